//! Which network a managed plugin has: the host's, none but a loopback of its own, or a namespace by name, which is there or
//! which commands make. The commands are a unit of their own, one for each namespace, that stays active as long as the namespace
//! shall be there: nothing of it is lost when csid or the plugin dies, and several plugins, and instances of one, have it together.
//! It is stopped after the last of them. A namespace that is there without that unit is somebody else's: it is neither made nor
//! taken away.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::spec::PluginSpec;
use super::supervise::{StartError, how_it_ended};
use crate::error::{Error, Result};
use crate::host::oneshot::Oneshot;
use crate::host::units::{Units, UnitsError};

/// Where `ip netns` keeps them.
const NAMESPACES: &str = "/run/netns";
/// It is part of a unit's name, too.
const NAME_BYTES: usize = 128;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Network {
    #[default]
    Host,
    None,
    /// Of `/run/netns`.
    Namespace(String),
}

impl TryFrom<String> for Network {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        let name = match text.as_str() {
            "host" => return Ok(Network::Host),
            "none" => return Ok(Network::None),
            other => other.strip_prefix("netns:"),
        };
        let name = name.ok_or_else(|| Error::invalid("network is none of host, none, netns:NAME"))?;
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
        let good = (1..=NAME_BYTES).contains(&name.len())
            && name.bytes().all(plain)
            && name.as_bytes()[0].is_ascii_alphanumeric();
        match good {
            true => Ok(Network::Namespace(name.to_owned())),
            false => Err(Error::invalid(format!(
                "network: the namespace's name is not 1 to {NAME_BYTES} of [A-Za-z0-9._-], a letter or digit first"
            ))),
        }
    }
}

impl From<Network> for String {
    fn from(network: Network) -> String {
        match network {
            Network::Host => "host".to_owned(),
            Network::None => "none".to_owned(),
            Network::Namespace(name) => format!("netns:{name}"),
        }
    }
}

impl Network {
    pub fn is_host(&self) -> bool {
        *self == Network::Host
    }

    pub(super) fn path(&self) -> Option<PathBuf> {
        match self {
            Network::Namespace(name) => Some(Path::new(NAMESPACES).join(name)),
            Network::Host | Network::None => None,
        }
    }
}

/// The namespaces that instances are to run in: a name for each of them, whether or not it runs just now.
#[derive(Clone, Default)]
pub(super) struct Namespaces(Arc<Mutex<Vec<String>>>);

impl Namespaces {
    pub fn add(&self, network: &Network) {
        if let Network::Namespace(name) = network {
            self.names().push(name.clone());
        }
    }

    pub fn remove(&self, network: &Network) {
        let Network::Namespace(name) = network else { return };
        let mut names = self.names();
        if let Some(at) = names.iter().position(|named| named == name) {
            names.swap_remove(at);
        }
    }

    fn count(&self, name: &str) -> usize {
        self.names().iter().filter(|named| *named == name).count()
    }

    fn names(&self) -> MutexGuard<'_, Vec<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unit_of(name: &str) -> String {
    format!("csid-network-{name}.service")
}

/// The commands that make the namespace and take it away.
#[derive(Clone, Debug)]
pub(super) struct Commands(Oneshot);

impl Commands {
    pub fn of(id: &str, spec: &PluginSpec) -> Option<Self> {
        let (Network::Namespace(name), false) = (&spec.network, spec.network_prestart.is_empty()) else {
            return None;
        };
        Some(Commands(Oneshot {
            unit: unit_of(name),
            description: format!("Network namespace {name} of CSI plugins"),
            start: spec.network_prestart.clone(),
            stop: spec.network_poststop.clone(),
            log_field: format!("CSI_PLUGIN={id}"),
            syslog_identifier: id.to_owned(),
        }))
    }

    pub fn unit(&self) -> &str {
        &self.0.unit
    }

    /// Unless it has been before: have the namespace made, and wait for that.
    async fn run(&self, units: &Units) -> std::result::Result<(), StartError> {
        let unit = self.unit();
        let mut started = false;
        let mut pause = Duration::from_millis(5);
        loop {
            match units.state(unit).await? {
                Some(state) if state.active == "active" => return Ok(()),
                Some(state) if started && state.at_rest() => {
                    return Err(StartError::Network { unit: unit.to_owned(), how: how_it_ended(&state) });
                }
                state if state.as_ref().is_none_or(|state| state.at_rest()) => {
                    if state.is_some() {
                        units.reset_failed(unit).await?;
                    }
                    units.start_oneshot(&self.0).await?;
                    started = true;
                }
                // systemd ends it when it takes too long.
                _ => {}
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_millis(200));
        }
    }
}

/// Have the namespace taken away that commands made, unless another instance is to run in it, or its unit still does. Should one
/// come just now, it does not start without the namespace, and is tried again.
pub(super) async fn clear(
    units: &Units,
    network: &Network,
    all: &Namespaces,
) -> std::result::Result<(), UnitsError> {
    let Network::Namespace(name) = network else { return Ok(()) };
    let unit = unit_of(name);
    // The one that leaves is still among them.
    if all.count(name) > 1 || units.is_required(&unit).await? {
        return Ok(());
    }
    units.stop(&unit).await?;
    units.reset_failed(&unit).await
}

/// Before the plugin starts: the namespace is there. Answers with the unit that keeps it there, where that is the plugin's.
pub(super) async fn prepare(
    units: &Units,
    network: &Network,
    commands: Option<&Commands>,
) -> std::result::Result<Option<String>, StartError> {
    let Some(path) = network.path() else { return Ok(None) };
    if let Some(commands) = commands {
        // Looked at before the unit: one that comes meanwhile has not made what was there.
        if path.exists() && units.state(commands.unit()).await?.is_none() {
            return Ok(None);
        }
        commands.run(units).await?;
    }
    let unit = commands.map(|commands| commands.unit().to_owned());
    match (path.exists(), unit) {
        (true, unit) => Ok(unit),
        (false, Some(unit)) => Err(StartError::NotMade { path, unit }),
        (false, None) => Err(StartError::NoNamespace { path }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_one_name() {
        for (text, path) in [("host", None), ("none", None), ("netns:a-b.0", Some("/run/netns/a-b.0"))] {
            let network = Network::try_from(text.to_owned()).unwrap();
            assert_eq!(network.path().as_deref(), path.map(Path::new));
            assert_eq!(String::from(network), text);
        }
        let long = format!("netns:{}", "x".repeat(129));
        for wrong in [
            "",
            "Host",
            "bridge",
            "netns",
            "netns:",
            "netns:/run/netns/a",
            "netns:a/b",
            "netns:..",
            "netns:.a",
            "netns:-a",
            "netns:a b",
            "netns:a%i",
            "netns:a\n",
            "netns:ä",
            &long,
        ] {
            let error = Network::try_from(wrong.to_owned()).unwrap_err();
            assert!(error.message.starts_with("network"), "{wrong:?}: {error}");
        }
        Network::try_from(format!("netns:{}", "x".repeat(128))).unwrap();
    }
}
