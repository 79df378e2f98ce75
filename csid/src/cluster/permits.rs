//! What this host does for other hosts. csid.toml says it: a server is of the network, and may be an attacker's.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::config::Cluster;
use crate::error::{Error, Kind, Result};

/// The limit of controller calls that wait or are made at the same time, of all servers.
pub(super) const CALLS: usize = 256;
/// The same, of one plugin. A plugin that hangs leaves places to the others.
const CALLS_OF_PLUGIN: usize = 64;

/// The plugins whose controllers this host calls for others, the credentials that it uses for that, and the places for the calls.
pub(super) struct Permits {
    plugins: BTreeMap<String, Arc<Semaphore>>,
    credentials: Vec<String>,
    places: Arc<Semaphore>,
}

/// The place of a controller call, until the drop.
pub(super) struct CallPlace {
    _of_plugin: OwnedSemaphorePermit,
    _of_all: OwnedSemaphorePermit,
}

impl Permits {
    pub fn new(config: &Cluster) -> Permits {
        let places = || Arc::new(Semaphore::new(CALLS_OF_PLUGIN));
        Permits {
            plugins: config.controllers.iter().map(|plugin| (plugin.clone(), places())).collect(),
            credentials: config.controller_credentials.clone(),
            places: Arc::new(Semaphore::new(CALLS)),
        }
    }

    /// Returns whether this host calls the plugin's controller for others.
    pub fn has(&self, plugin: &str) -> bool {
        self.plugins.contains_key(plugin)
    }

    /// Takes the place of a call. Refuses a call that csid.toml does not allow. An empty credential: the call has none.
    pub fn admit(&self, plugin: &str, credential: &str) -> Result<CallPlace> {
        let refused = |text: &str| Error::new(Kind::NotAuthorized, text);
        let of_plugin = self.plugins.get(plugin);
        let of_plugin = of_plugin
            .ok_or_else(|| refused("csid.toml of the host does not name the plugin in controllers"))?;
        if !credential.is_empty() && !self.credentials.iter().any(|entry| is_of(entry, credential)) {
            return Err(refused(
                "csid.toml of the host does not name the credential in controller-credentials",
            ));
        }
        let full = |most: usize| {
            move |_| {
                Error::new(Kind::RateLimited, format!("{most} controller calls wait or are made, the limit"))
            }
        };
        Ok(CallPlace {
            _of_plugin: Arc::clone(of_plugin).try_acquire_owned().map_err(full(CALLS_OF_PLUGIN))?,
            _of_all: Arc::clone(&self.places).try_acquire_owned().map_err(full(CALLS))?,
        })
    }
}

/// Returns whether an entry of `controller-credentials` names the credential. A namespace may have dots, and the last part has none.
fn is_of(entry: &str, credential: &str) -> bool {
    match entry.strip_suffix(".*") {
        Some(namespace) => {
            credential.rsplit_once('.').is_some_and(|(of, name)| of == namespace && !name.is_empty())
        }
        None => entry == credential,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permits(controllers: &[&str], credentials: &[&str]) -> Permits {
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        Permits::new(&Cluster {
            name: "prod".into(),
            inline: false,
            link: "/run/csid-link".into(),
            controllers: owned(controllers),
            controller_credentials: owned(credentials),
        })
    }

    #[test]
    fn call_that_csid_toml_does_not_allow_is_refused() {
        let none = permits(&[], &["csid.prod.key"]);
        assert!(none.admit("p", "").is_err() && !none.has("p"));
        let some = permits(&["p"], &["csid.prod.key", "csid.a.*"]);
        assert!(some.has("p") && some.admit("p", "").is_ok());
        for good in ["csid.prod.key", "csid.a.key", "csid.a.other"] {
            assert!(some.admit("p", good).is_ok(), "{good}");
        }
        for bad in
            ["csid.prod.other", "csid.prod.key2", "csid.b.key", "csid.a.b.key", "csid.a.", "csid.a", "key"]
        {
            let error = some.admit("p", bad).err().map(|error| error.kind);
            assert_eq!(error, Some(Kind::NotAuthorized), "{bad}");
        }
        assert!(some.admit("q", "").is_err() && some.admit("", "").is_err());
        assert!(permits(&["p"], &[]).admit("p", "csid.prod.key").is_err());
    }

    #[test]
    fn plugin_that_hangs_leaves_places_to_others() {
        let permits = permits(&["a", "b"], &[]);
        let taken: Vec<CallPlace> = std::iter::from_fn(|| permits.admit("a", "").ok()).take(CALLS).collect();
        assert_eq!(taken.len(), CALLS_OF_PLUGIN);
        assert!(permits.admit("b", "").is_ok());
        drop(taken);
        assert!(permits.admit("a", "").is_ok());
    }
}
