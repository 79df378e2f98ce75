//! `csid.toml`, the directories csid lives in, and those that have one file per thing.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use csi_proto::identity::is_member_name;
use serde::Deserialize;

use crate::names;

/// The directories of csid, from systemd's variables.
#[derive(Clone, Debug)]
pub struct Directories {
    /// `$STATE_DIRECTORY`: the journal, and the volumes' paths below `plugins/`.
    pub state: PathBuf,
    /// `$RUNTIME_DIRECTORY`: sockets and the boot marker.
    pub runtime: PathBuf,
    /// `$CONFIGURATION_DIRECTORY`: `csid.toml`, `plugins.d/` and `volumes.d/`.
    pub configuration: PathBuf,
}

impl Directories {
    pub fn from_environment() -> Self {
        let directory = |name: &str, default: &str| {
            std::env::var_os(name).map_or_else(|| PathBuf::from(default), PathBuf::from)
        };
        Directories {
            state: directory("STATE_DIRECTORY", "/var/lib/csid"),
            runtime: directory("RUNTIME_DIRECTORY", "/run/csid"),
            configuration: directory("CONFIGURATION_DIRECTORY", "/etc/csid"),
        }
    }

    pub fn journal(&self) -> PathBuf {
        self.state.join("journal")
    }

    /// Returns the directory in which plugins register themselves by the kubelet's protocol.
    pub fn registrations(&self) -> PathBuf {
        self.state.join("plugins_registry")
    }

    /// The host directory of a plugin's staging and publish paths, unless its spec names another (`plugin-root`).
    pub fn plugin(&self, id: &str) -> PathBuf {
        self.state.join("plugins").join(id)
    }
}

/// `csid.toml`. Every key has a default; an unknown one is an error.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Config {
    /// Directories below which callers other than root may name a mount's `target`.
    pub target_roots: Vec<PathBuf>,
    /// This host's name in claims, from the next start on; else the host name that csid found at its first start.
    pub node: Option<String>,
    /// Whether commands may be run in plugins (`Plugin.Exec`).
    pub exec: bool,
    /// How many operations of one uid may be under way; more is RateLimited.
    pub operations_per_uid: usize,
    /// Microseconds for which csid polls for events, instead of sleeping, after each step of an operation. 0: it sleeps.
    pub busy_poll_usec: u32,
    pub deadlines: Deadlines,
    /// The cluster that this host is a node of, from the next start on. `None`: csid is alone.
    pub cluster: Option<Cluster>,
}

/// A cluster, as one of its nodes knows it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Cluster {
    pub name: String,
    /// Whether root may mount volumes that are not registered.
    #[serde(default)]
    pub inline: bool,
    #[serde(default)]
    pub on_fenced: OnFenced,
    /// The directory of csid-link's sockets, one for each server.
    #[serde(default = "link")]
    pub link: PathBuf,
    /// Plugins whose controllers this host calls for other hosts.
    #[serde(default)]
    pub controllers: Vec<String>,
    /// Credentials that such a call may name: `csid.NAMESPACE.NAME`, or `csid.NAMESPACE.*` for all of a namespace.
    #[serde(default)]
    pub controller_credentials: Vec<String>,
    /// Those of `controllers` with which such a call may create, expand or delete volumes.
    #[serde(default)]
    pub controller_volumes: Vec<String>,
}

/// What a host does with the servers' volumes after the servers have refused it as fenced. It mounts none in either case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnFenced {
    /// It keeps what is mounted.
    #[default]
    Hold,
    /// It unmounts what is not in use, and releases the claims.
    Unmount,
}

/// The limit of `busy-poll-usec`.
const BUSY_POLL_USEC: u32 = 10_000;

/// The limits of `controllers`, which `controller-volumes` has, too, and of `controller-credentials`.
const CONTROLLERS: usize = 64;
const CONTROLLER_CREDENTIALS: usize = 1000;

fn link() -> PathBuf {
    PathBuf::from("/run/csid-link")
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Deadlines {
    /// How long an operation is tried when its caller gives no deadline.
    #[serde(deserialize_with = "duration")]
    pub operation: Duration,
    /// The deadline of an RPC to a plugin. A plugin's own `rpc-deadline` takes precedence.
    #[serde(deserialize_with = "duration")]
    pub rpc: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            target_roots: Vec::new(),
            node: None,
            exec: false,
            operations_per_uid: 256,
            busy_poll_usec: 200,
            deadlines: Deadlines::default(),
            cluster: None,
        }
    }
}

impl Default for Deadlines {
    fn default() -> Self {
        Deadlines { operation: Duration::from_secs(120), rpc: Duration::from_secs(60) }
    }
}

/// Why the configuration was refused; nothing of it was taken.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path}: {message}")]
    Parse { path: PathBuf, message: String },
    #[error("{path}: target-roots: {root} is not an absolute path without `..`")]
    TargetRoot { path: PathBuf, root: PathBuf },
    #[error("{path}: busy-poll-usec is {usec}; the limit is {BUSY_POLL_USEC}")]
    BusyPoll { path: PathBuf, usec: u32 },
    #[error("{path}: node is not 1 to 128 bytes without control characters")]
    Node { path: PathBuf },
    #[error("{path}: [cluster]: {what} is not a DNS name of at most 63 bytes in small letters")]
    Cluster { path: PathBuf, what: &'static str },
    #[error("{path}: [cluster]: {what}")]
    Controllers { path: PathBuf, what: String },
}

impl Cluster {
    /// Checks what this host does for others. Returns what is wrong.
    fn check_controllers(&self) -> Result<(), String> {
        let Cluster { controllers, controller_credentials, controller_volumes, .. } = self;
        for (key, count, limit) in [
            ("controllers", controllers.len(), CONTROLLERS),
            ("controller-volumes", controller_volumes.len(), CONTROLLERS),
            ("controller-credentials", controller_credentials.len(), CONTROLLER_CREDENTIALS),
        ] {
            if count > limit {
                return Err(format!("{key} has {count} entries, and the limit is {limit}"));
            }
        }
        for plugin in controllers {
            names::name("plugin", plugin).map_err(|error| format!("controllers: {error}"))?;
        }
        if let Some(plugin) = controller_volumes.iter().find(|plugin| !controllers.contains(plugin)) {
            return Err(format!("controller-volumes has {plugin:?}, which controllers does not have"));
        }
        for credential in controller_credentials {
            let name = credential.strip_suffix(".*").map(|rest| format!("{rest}.name"));
            let name = name.as_ref().unwrap_or(credential);
            let namespace = names::credential_namespace(name).unwrap_or_default();
            if names::credential(name).is_err()
                || namespace.is_empty()
                || name.contains('*')
                || name.ends_with('.')
            {
                return Err(format!(
                    "controller-credentials has {credential:?}, which is neither csid.NAMESPACE.NAME nor csid.NAMESPACE.*"
                ));
            }
        }
        Ok(())
    }
}

impl Config {
    /// Read `csid.toml`; a missing file is the default configuration.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Config::default()),
            Err(source) => return Err(ConfigError::Read { path: path.into(), source }),
        };
        let config: Config = toml::from_str(&text)
            .map_err(|error| ConfigError::Parse { path: path.into(), message: error.to_string() })?;
        for root in &config.target_roots {
            let plain = root.components().all(|c| !matches!(c, std::path::Component::ParentDir));
            if !root.is_absolute() || !plain {
                return Err(ConfigError::TargetRoot { path: path.into(), root: root.clone() });
            }
        }
        if config.busy_poll_usec > BUSY_POLL_USEC {
            return Err(ConfigError::BusyPoll { path: path.into(), usec: config.busy_poll_usec });
        }
        let plain = |node: &str| (1..=128).contains(&node.len()) && !node.chars().any(char::is_control);
        if !config.node.as_deref().is_none_or(plain) {
            return Err(ConfigError::Node { path: path.into() });
        }
        if let Some(cluster) = &config.cluster {
            for (what, name) in [("name", Some(&cluster.name)), ("the key node", config.node.as_ref())] {
                if !name.is_some_and(|name| is_member_name(name)) {
                    return Err(ConfigError::Cluster { path: path.into(), what });
                }
            }
            let wrong = |what| ConfigError::Controllers { path: path.into(), what };
            cluster.check_controllers().map_err(wrong)?;
        }
        Ok(config)
    }
}

/// An error of a directory of files, or of one file in it. It begins with the path.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// With the line, where there is one.
    #[error("{}: {message}", path.display())]
    Wrong { path: PathBuf, message: String },
}

/// Read every `*.toml` of a directory, by name, each for itself: `read` takes the path, the name without `.toml`, and the
/// text. A directory that is not there has none.
pub(crate) fn read_each<T>(
    directory: &Path,
    read: impl Fn(&Path, &str, &str) -> Result<T, String>,
) -> Result<Vec<Result<T, FileError>>, FileError> {
    let unread = |source| FileError::Read { path: directory.into(), source };
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(unread)?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry.map_err(unread)?.path();
        let hidden = path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."));
        if !hidden && path.extension() == Some(OsStr::new("toml")) {
            paths.push(path);
        }
    }
    paths.sort();
    let file = |path: PathBuf| {
        let id = path.file_stem().and_then(OsStr::to_str).unwrap_or_default();
        match std::fs::read_to_string(&path) {
            Ok(text) => read(&path, id, &text).map_err(|message| FileError::Wrong { path, message }),
            Err(source) => Err(FileError::Read { path, source }),
        }
    };
    Ok(paths.into_iter().map(file).collect())
}

/// `90s`, `2min`, `500ms`: systemd's spelling of a time span, one unit.
pub(crate) fn duration<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse_duration(&text).ok_or_else(|| {
        serde::de::Error::custom(format!("`{text}` is no time span; write e.g. 500ms, 90s, 2min or 1h"))
    })
}

fn parse_duration(text: &str) -> Option<Duration> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().ok().filter(|n| *n > 0)?;
    let unit = match text[digits..].trim() {
        "ms" => 1,
        "" | "s" => 1_000,
        "min" | "m" => 60_000,
        "h" => 3_600_000,
        _ => return None,
    };
    number.checked_mul(unit).map(Duration::from_millis)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, toml::de::Error> {
        toml::from_str(text)
    }

    #[test]
    fn an_empty_file_is_the_default() {
        assert_eq!(parse("").unwrap(), Config::default());
    }

    #[test]
    fn spans_are_read_as_systemd_writes_them() {
        let config = parse("[deadlines]\noperation = \"2min\"\nrpc = \"500ms\"").unwrap();
        assert_eq!(config.deadlines.operation, Duration::from_secs(120));
        assert_eq!(config.deadlines.rpc, Duration::from_millis(500));
        for wrong in ["", "0s", "-1s", "1 fortnight", "s", "99999999999999999h"] {
            assert_eq!(parse_duration(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn node_of_a_cluster_has_a_name_of_dns() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("csid.toml");
        let load = |text: &str| {
            std::fs::write(&path, text).unwrap();
            Config::load(&path).map_err(|error| error.to_string())
        };
        let config = load("node = \"db-1\"\n[cluster]\nname = \"prod\"").unwrap().cluster.unwrap();
        assert_eq!((config.name.as_str(), config.inline, config.link), ("prod", false, link()));
        for (text, what) in [
            ("[cluster]\nname = \"prod\"", "the key node"),
            ("node = \"DB 1\"\n[cluster]\nname = \"prod\"", "the key node"),
            ("node = \"db-1\"\n[cluster]\nname = \"Prod\"", "name"),
        ] {
            let error = load(text).unwrap_err();
            assert!(error.contains(&format!("[cluster]: {what} is not a DNS name")), "{error}");
        }
    }

    #[test]
    fn host_does_nothing_for_others_unless_it_says_so() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("csid.toml");
        let load = |text: &str| {
            std::fs::write(&path, format!("node = \"ctl-1\"\n[cluster]\nname = \"prod\"\n{text}")).unwrap();
            Config::load(&path).map(|config| config.cluster.unwrap()).map_err(|error| error.to_string())
        };
        let config = load("").unwrap();
        assert!(config.controllers.is_empty() && config.controller_credentials.is_empty());
        let config =
            load("controllers = [\"ceph\"]\ncontroller-credentials = [\"csid.prod.key\", \"csid.a.b.*\"]")
                .unwrap();
        assert_eq!((config.controllers.len(), config.controller_credentials.len()), (1, 2));
        for credential in
            ["*", "csid.*", "csid..*", "csid.pro*.key", "csid.prod.k*", "csid.prod.", "key", "csid.a/b.key"]
        {
            let error = load(&format!("controller-credentials = [{credential:?}]")).unwrap_err();
            assert!(error.contains("controller-credentials has"), "{credential}: {error}");
        }
        assert!(load("controllers = [\"\"]").is_err());
        assert!(load("controller-volumes = [\"ceph\"]").unwrap_err().contains("controllers does not have"));
        assert!(load("controllers = [\"ceph\"]\ncontroller-volumes = [\"ceph\"]").is_ok());
        assert!(
            load(&format!("controllers = {:?}", vec!["p"; CONTROLLERS + 1]))
                .unwrap_err()
                .contains("65 entries")
        );
    }

    #[test]
    fn fenced_host_holds_its_mounts_unless_it_says_otherwise() {
        let cluster = |text: &str| {
            let text = format!("node = \"db-1\"\n[cluster]\nname = \"prod\"\n{text}");
            parse(&text).map(|config| config.cluster.unwrap().on_fenced).ok()
        };
        let of =
            ["", "on-fenced = \"hold\"", "on-fenced = \"unmount\"", "on-fenced = \"reboot\""].map(cluster);
        assert_eq!(of, [Some(OnFenced::Hold), Some(OnFenced::Hold), Some(OnFenced::Unmount), None]);
    }

    #[test]
    fn an_unknown_key_is_refused() {
        assert!(parse("target-root = []").unwrap_err().to_string().contains("unknown field"));
    }
}
