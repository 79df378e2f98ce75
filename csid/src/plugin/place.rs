//! The places of a plugin: its unit, its socket, its user and its directories.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::config::Directories;
use crate::plugin::namespace::NamespaceCommands;
use crate::plugin::profile::Profile;
use crate::plugin::spec::{ENDPOINT, PluginSpec, SOCKET_BYTES, Supervision, unit_name};

const SOCKET: &str = "csi.sock";
/// Below `/run/csid/plugins`, a plugin's id of 63 bytes leaves so many for the directory of its socket.
pub(super) const HASH_BYTES: usize = 16;

/// The places of a plugin, derived from its id and spec alone.
#[derive(Clone, Debug)]
pub(super) struct Location {
    /// Empty for an external plugin.
    pub unit: String,
    /// The commands that make its network namespace. `None`: csid makes none.
    pub network: Option<NamespaceCommands>,
    pub socket: PathBuf,
    /// The directory of the socket, when it is csid's own (CSI rule 5).
    pub directory: Option<PathBuf>,
    /// The user that systemd makes for the plugin; `None`: it runs as root.
    pub user: Option<String>,
    pub root: PathBuf,
    pub view: PathBuf,
}

impl Location {
    pub fn of(directories: &Directories, id: &str, spec: &PluginSpec) -> Self {
        // Paths are compared by bytes, so this one has no slash at its end.
        let one_spelling = |path: &String| Path::new(path).components().collect();
        let root = spec.plugin_root.as_ref().map_or_else(|| directories.plugin(id), one_spelling);
        let view = spec.plugin_view.as_ref().map_or_else(|| root.clone(), PathBuf::from);
        let endpoint = spec.environment.get(ENDPOINT).and_then(|endpoint| endpoint.strip_prefix("unix://"));
        let own = socket_directory(directories, id, spec.instance());
        let (unit, socket, directory) = match (spec.supervision, endpoint) {
            (Supervision::Unit, _) => (
                spec.unit.clone().unwrap_or_default(),
                PathBuf::from(spec.socket.clone().unwrap_or_default()),
                None,
            ),
            (Supervision::External, _) => {
                (String::new(), PathBuf::from(spec.socket.clone().unwrap_or_default()), None)
            }
            (Supervision::Managed, Some(endpoint)) => {
                (unit_name(id, spec.instance()), PathBuf::from(endpoint), None)
            }
            (Supervision::Managed, None) => (unit_name(id, spec.instance()), own.join(SOCKET), Some(own)),
        };
        let network = NamespaceCommands::of(id, spec);
        let has_own = spec.supervision == Supervision::Managed && spec.profile == Some(Profile::Controller);
        let user = has_own.then(|| user_name(id));
        Location { unit, network, socket, directory, user, root, view }
    }

    /// Returns the environment of a managed plugin: that of its spec, and the endpoint, unless the spec names one (CSI rule 2).
    pub fn environment(&self, spec: &PluginSpec) -> BTreeMap<String, String> {
        let mut environment = spec.environment.clone();
        let endpoint = || format!("unix://{}", self.socket.display());
        environment.entry(ENDPOINT.to_owned()).or_insert_with(endpoint);
        environment
    }
}

/// Returns the directory of a managed plugin's socket: the instance's name, or a short hash of it where the socket's path would not
/// fit into an address. No instance is called like the hash: `+` is in no name.
fn socket_directory(directories: &Directories, id: &str, instance: &str) -> PathBuf {
    let plugin = directories.runtime.join("plugins").join(id);
    let own = plugin.join(instance);
    match own.join(SOCKET).as_os_str().len() <= SOCKET_BYTES || instance.len() <= HASH_BYTES {
        true => own,
        false => {
            let hash = Sha256::digest(instance.as_bytes());
            let hex = hash.iter().flat_map(|byte| [byte >> 4, byte & 15]).take(HASH_BYTES - 1);
            let digits = hex.filter_map(|digit| char::from_digit(digit.into(), 16));
            plugin.join(std::iter::once('+').chain(digits).collect::<String>())
        }
    }
}

/// Returns the name of a plugin's own user: `csi-ID`, or with a hash of the id where that is no user's name. Instances of a plugin
/// share it, and with it their state.
fn user_name(id: &str) -> String {
    const LONGEST: usize = 31;
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"_-".contains(&b);
    let name = format!("csi-{id}");
    if name.len() <= LONGEST && id.bytes().all(plain) {
        return name;
    }
    let hash = Sha256::digest(id.as_bytes());
    hash[..8].iter().fold("csi-".to_owned(), |name, byte| format!("{name}{byte:02x}"))
}
