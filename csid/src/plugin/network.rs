//! Which network a managed plugin has: the host's, none but a loopback of its own, or a namespace by name, which is there or
//! which commands make. The commands are a unit of their own, one for each namespace, that stays active as long as the namespace
//! shall be there: nothing of it is lost when csid or the plugin dies, and several plugins, and instances of one, have it together.
//! It is stopped after the last of them.

use std::path::{Path, PathBuf};
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

/// The commands that make the namespace and take it away.
#[derive(Clone, Debug)]
pub(super) struct Commands(Oneshot);

impl Commands {
    pub fn of(id: &str, spec: &PluginSpec) -> Option<Self> {
        let (Network::Namespace(name), false) = (&spec.network, spec.network_prestart.is_empty()) else {
            return None;
        };
        Some(Commands(Oneshot {
            unit: format!("csid-network-{name}.service"),
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

    /// Have the namespace taken away, unless another plugin's unit still runs in it. Should one come just now, it does not
    /// start without the namespace, and is tried again.
    pub async fn clear(&self, units: &Units) -> std::result::Result<(), UnitsError> {
        if units.is_required(self.unit()).await? {
            return Ok(());
        }
        units.stop(self.unit()).await?;
        units.reset_failed(self.unit()).await
    }
}

/// Before the plugin starts: the namespace is there.
pub(super) async fn prepare(
    units: &Units,
    network: &Network,
    commands: Option<&Commands>,
) -> std::result::Result<(), StartError> {
    if let Some(commands) = commands {
        commands.run(units).await?;
    }
    match network.path() {
        Some(path) if !path.exists() => Err(match commands {
            Some(commands) => StartError::NotMade { path, unit: commands.unit().to_owned() },
            None => StartError::NoNamespace { path },
        }),
        _ => Ok(()),
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
