//! The network of a managed plugin: the host's, a loopback of its own, or a network namespace by name.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::plugin::errors::spec::SpecError;

/// The directory in which `ip netns` keeps network namespaces.
const NAMESPACES: &str = "/run/netns";
/// The limit of a namespace's name, which is part of a unit's name, too.
const NAME_BYTES: usize = 128;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Network {
    #[default]
    Host,
    None,
    /// The network namespace of this name in `/run/netns`.
    Namespace(String),
}

impl TryFrom<String> for Network {
    type Error = SpecError;

    fn try_from(text: String) -> Result<Self, SpecError> {
        let name = match text.as_str() {
            "host" => return Ok(Network::Host),
            "none" => return Ok(Network::None),
            other => other.strip_prefix("netns:"),
        };
        let name = name.ok_or(SpecError::Network)?;
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
        let good = (1..=NAME_BYTES).contains(&name.len())
            && name.bytes().all(plain)
            && name.as_bytes()[0].is_ascii_alphanumeric();
        match good {
            true => Ok(Network::Namespace(name.to_owned())),
            false => Err(SpecError::Namespace { limit: NAME_BYTES }),
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
            assert!(error.to_string().starts_with("network"), "{wrong:?}: {error}");
        }
        Network::try_from(format!("netns:{}", "x".repeat(128))).unwrap();
    }
}
