//! csid-server.toml, and the files of keys that systemd hands over.

use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use csi_proto::identity::is_member_name;
use csid_etcd::EtcdTls;
use serde::Deserialize;

use crate::fence_command::FenceCommand;
use crate::grants::{Grant, Grants};

/// The least and the longest time that a plugin may have. With the time in which a call has to begin it is longer than a node's session
/// with a server that stands still.
const CONTROLLER_SECONDS: (u64, u64) = (10, 600);
/// The least and the longest time that a fence command may take. The call of an operator takes longer.
const FENCE_SECONDS: (u64, u64) = (1, 45);
/// The least time after which a node that is away is fenced. A node that reboots, and one whose server has died, are back by then.
const AWAY_SECONDS: u64 = 60;
/// The limit of each file, in bytes.
const FILE: u64 = 1024 * 1024;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    cluster: String,
    listen: SocketAddr,
    address: String,
    #[serde(default)]
    metrics: Option<SocketAddr>,
    #[serde(default)]
    crl: Option<PathBuf>,
    #[serde(default = "max_claims")]
    max_claims: usize,
    #[serde(default = "max_volumes")]
    max_volumes: usize,
    #[serde(default = "max_sessions")]
    max_sessions: usize,
    #[serde(default = "controller_seconds")]
    controller_seconds: u64,
    etcd: EtcdSection,
    #[serde(default)]
    fence: FenceSection,
    #[serde(default, rename = "grant")]
    grants: Vec<Grant>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct EtcdSection {
    endpoints: Vec<String>,
    #[serde(default = "prefix")]
    prefix: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct FenceSection {
    command: Option<String>,
    seconds: Option<u64>,
    after_seconds: Option<u64>,
}

fn max_claims() -> usize {
    1000
}

fn max_volumes() -> usize {
    100_000
}

fn max_sessions() -> usize {
    5000
}

fn controller_seconds() -> u64 {
    60
}

fn prefix() -> String {
    "/csid/".to_owned()
}

/// The configuration of a server.
#[derive(Debug)]
pub struct Config {
    pub cluster: String,
    pub listen: SocketAddr,
    /// HOST:PORT at which nodes reach this server.
    pub address: String,
    /// The address of the metrics. `None`: they are not served.
    pub metrics: Option<SocketAddr>,
    /// The file of the certificates that the authority has revoked, as PEM. `None`: there is none.
    pub crl: Option<PathBuf>,
    /// The limit of claims of one node.
    pub max_claims: usize,
    /// The limit of volumes that one identity has registered or created.
    pub max_volumes: usize,
    pub max_sessions: usize,
    /// How long a plugin has for the answer to a controller call.
    pub controller_time: Duration,
    pub endpoints: Vec<String>,
    /// Begins and ends with a slash.
    pub prefix: String,
    pub fence: RwLock<Arc<Fencing>>,
    pub grants: Grants,
}

/// How nodes are fenced.
#[derive(Debug, Default)]
pub struct Fencing {
    /// The command that switches a node's machine off. `None`: an operator's word is enough.
    pub command: Option<FenceCommand>,
    /// The time without a session after which a node with claims is fenced. `None`: an operator alone fences.
    pub after: Option<Duration>,
}

impl Config {
    pub fn read(path: &Path) -> Result<Config> {
        let text = String::from_utf8(bytes(path)?);
        let text = text.with_context(|| format!("{} is not UTF-8", path.display()))?;
        Config::parse(&text).with_context(|| path.display().to_string())
    }

    fn parse(text: &str) -> Result<Config> {
        let File {
            cluster,
            listen,
            address,
            metrics,
            crl,
            max_claims,
            max_volumes,
            max_sessions,
            controller_seconds,
            etcd,
            fence,
            grants,
        } = toml::from_str(text)?;
        ensure!(is_member_name(&cluster), "cluster is not a DNS name of at most 63 bytes: {cluster:?}");
        let port = address.rsplit_once(':').filter(|(host, _)| !host.is_empty());
        let port = port.and_then(|(_, port)| port.parse::<u16>().ok()).filter(|port| *port != 0);
        ensure!(port.is_some() && address.len() <= 260, "address is not HOST:PORT: {address:?}");
        ensure!(!etcd.endpoints.is_empty(), "etcd.endpoints is empty");
        ensure!(max_claims > 0, "max-claims is 0");
        ensure!(max_volumes > 0, "max-volumes is 0");
        ensure!(max_sessions > 0, "max-sessions is 0");
        let (least, most) = CONTROLLER_SECONDS;
        ensure!(
            (least..=most).contains(&controller_seconds),
            "controller-seconds is not {least} to {most}: {controller_seconds}"
        );
        let controller_time = Duration::from_secs(controller_seconds);
        let EtcdSection { endpoints, prefix } = etcd;
        let open =
            endpoints.iter().find(|endpoint| !endpoint.starts_with("https://") && !is_loopback(endpoint));
        ensure!(open.is_none(), "etcd.endpoints has an address of another host without https://: {open:?}");
        ensure!(
            prefix.starts_with('/') && prefix.ends_with('/'),
            "etcd.prefix does not begin and end with a slash: {prefix:?}"
        );
        ensure!(crl.iter().all(|file| file.is_absolute()), "crl is not an absolute path: {crl:?}");
        let fence = RwLock::new(Arc::new(fencing(fence)?));
        let grants = Grants::new(grants)?;
        Ok(Config {
            cluster,
            listen,
            address,
            metrics,
            crl,
            max_claims,
            max_volumes,
            max_sessions,
            controller_time,
            endpoints,
            prefix,
            fence,
            grants,
        })
    }
}

impl Config {
    pub fn fence(&self) -> Arc<Fencing> {
        Arc::clone(&self.fence.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes the grants and the fence of `new`. Returns the keys of other values that differ, which count after a restart.
    pub fn take(&self, new: &Config) -> Vec<&'static str> {
        *self.fence.write().unwrap_or_else(PoisonError::into_inner) = new.fence();
        self.grants.replace(&new.grants);
        let differs = [
            ("cluster", self.cluster != new.cluster),
            ("listen", self.listen != new.listen),
            ("address", self.address != new.address),
            ("metrics", self.metrics != new.metrics),
            ("max-claims", self.max_claims != new.max_claims),
            ("max-volumes", self.max_volumes != new.max_volumes),
            ("max-sessions", self.max_sessions != new.max_sessions),
            ("controller-seconds", self.controller_time != new.controller_time),
            ("etcd.endpoints", self.endpoints != new.endpoints),
            ("etcd.prefix", self.prefix != new.prefix),
        ];
        differs.into_iter().filter_map(|(key, differs)| differs.then_some(key)).collect()
    }

    /// Reads the list of revoked certificates. `None`: the configuration names none.
    pub fn read_crl(&self) -> Result<Option<Vec<u8>>> {
        let Some(file) = self.crl.as_deref() else { return Ok(None) };
        let crl = bytes(file)?;
        ensure!(!crl.is_empty(), "{} is empty", file.display());
        Ok(Some(crl))
    }
}

fn fencing(section: FenceSection) -> Result<Fencing> {
    let FenceSection { command, seconds, after_seconds } = section;
    let (least, most) = FENCE_SECONDS;
    let time = seconds.unwrap_or(30);
    ensure!((least..=most).contains(&time), "fence.seconds is not {least} to {most}: {time}");
    let is_path = |command: &String| Path::new(command).is_absolute() && !command.contains('\0');
    ensure!(command.iter().all(is_path), "fence.command is not an absolute path: {command:?}");
    if let Some(after) = after_seconds {
        ensure!(after >= AWAY_SECONDS, "fence.after-seconds is less than {AWAY_SECONDS}: {after}");
        ensure!(command.is_some(), "fence.after-seconds is there, and fence.command is not");
    }
    let command = command.map(|program| FenceCommand::new(program, Duration::from_secs(time)));
    Ok(Fencing { command, after: after_seconds.map(Duration::from_secs) })
}

/// Returns whether the endpoint is http:// and an address of this host.
fn is_loopback(endpoint: &str) -> bool {
    let address = endpoint.strip_prefix("http://").map(|rest| rest.trim_end_matches('/'));
    address
        .and_then(|address| address.parse::<SocketAddr>().ok())
        .is_some_and(|address| address.ip().is_loopback())
}

/// The keys and certificates of a server, as PEM.
pub struct Keys {
    /// The cluster's authority.
    pub ca: Vec<u8>,
    pub certificate: Vec<u8>,
    pub key: Vec<u8>,
    /// `None`: etcd is reached without TLS.
    pub etcd: Option<EtcdTls>,
}

impl Keys {
    /// Reads the files of a directory: ca.pem, server.pem, server.key, and those of etcd if an endpoint needs them.
    pub fn read(directory: &Path, endpoints: &[String]) -> Result<Keys> {
        let file = |name: &str| bytes(&directory.join(name));
        let needs_tls = endpoints.iter().any(|endpoint| endpoint.starts_with("https://"));
        let etcd = match needs_tls {
            true => Some(EtcdTls {
                ca: file("etcd-ca.pem")?,
                certificate: file("etcd.pem")?,
                key: file("etcd.key")?,
            }),
            false => None,
        };
        Ok(Keys { ca: file("ca.pem")?, certificate: file("server.pem")?, key: file("server.key")?, etcd })
    }
}

/// Returns the directory with the files of keys.
pub fn credentials(given: Option<PathBuf>) -> Result<PathBuf> {
    match given.or_else(|| std::env::var_os("CREDENTIALS_DIRECTORY").map(PathBuf::from)) {
        Some(directory) => Ok(directory),
        None => bail!("CREDENTIALS_DIRECTORY is not set, so there are no keys"),
    }
}

fn bytes(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
    file.take(FILE + 1).read_to_end(&mut bytes).with_context(|| path.display().to_string())?;
    ensure!(bytes.len() as u64 <= FILE, "{} is larger than {FILE} bytes", path.display());
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: &str = "cluster = \"prod\"\nlisten = \"[::]:7443\"\naddress = \"s1.example:7443\"\n\
                         [etcd]\nendpoints = [\"https://10.0.0.1:2379\"]\n";

    #[test]
    fn least_file_has_defaults_and_no_grant() {
        let config = Config::parse(LEAST).unwrap();
        assert_eq!((config.max_claims, config.max_sessions, config.prefix.as_str()), (1000, 5000, "/csid/"));
        assert_eq!(config.max_volumes, 100_000);
        assert_eq!(config.controller_time, Duration::from_secs(60));
        assert_eq!(config.metrics, None);
        let root = csi_proto::identity::Identity::of(["csid://prod/operator/root"]).unwrap();
        assert!(!config.grants.allow(&root, "default", crate::grants::May::Read));
    }

    #[test]
    fn unknown_key_or_bad_value_is_refused() {
        for (from, to) in [
            ("cluster =", "metrics = \"localhost\"\ncluster ="),
            ("cluster =", "max-bytes = 1\ncluster ="),
            ("\"prod\"", "\"Prod\""),
            ("s1.example:7443", "s1.example"),
            ("s1.example:7443", ":7443"),
            ("[\"https://10.0.0.1:2379\"]", "[]"),
            ("https://10", "http://10"),
            ("https://10", "10"),
            ("https://10.0.0.1:2379", "http://localhost.example:2379"),
            ("[etcd]\n", "controller-seconds = 9\n[etcd]\n"),
            ("[etcd]\n", "controller-seconds = 601\n[etcd]\n"),
            ("[etcd]\n", "[etcd]\nprefix = \"csid\"\n"),
            ("[etcd]\n", "[etcd]\npassword = \"x\"\n"),
            ("[etcd]\n", "[fence]\nafter-seconds = 600\n[etcd]\n"),
            ("[etcd]\n", "[fence]\ncommand = \"/off\"\nafter-seconds = 59\n[etcd]\n"),
            ("[etcd]\n", "[fence]\ncommand = \"/off\"\nseconds = 46\n[etcd]\n"),
            ("[etcd]\n", "[fence]\ncommand = \"off\"\n[etcd]\n"),
        ] {
            let text = LEAST.replacen(from, to, 1);
            assert_ne!(text, LEAST);
            assert!(Config::parse(&text).is_err(), "{text}");
        }
    }
}
