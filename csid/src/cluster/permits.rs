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
/// Those of them that create, expand or delete volumes.
const CALLS_FOR_VOLUMES: usize = 32;

/// The plugins whose controllers this host calls for others, the credentials that it uses for that, and the places for the calls.
pub(super) struct Permits {
    plugins: BTreeMap<String, Arc<Semaphore>>,
    credentials: Vec<String>,
    /// The plugins with which this host creates, expands and deletes volumes, and the places for that. Attaches have the others.
    volumes: BTreeMap<String, Arc<Semaphore>>,
    places: Arc<Semaphore>,
}

/// The place of a controller call, until the drop.
pub(super) struct CallPlace {
    _of_plugin: OwnedSemaphorePermit,
    _for_volumes: Option<OwnedSemaphorePermit>,
    _of_all: OwnedSemaphorePermit,
}

impl Permits {
    pub fn new(config: &Cluster) -> Permits {
        let places = |plugins: &[String], most: usize| {
            plugins.iter().map(|plugin| (plugin.clone(), Arc::new(Semaphore::new(most)))).collect()
        };
        Permits {
            plugins: places(&config.controllers, CALLS_OF_PLUGIN),
            volumes: places(&config.controller_volumes, CALLS_FOR_VOLUMES),
            credentials: config.controller_credentials.clone(),
            places: Arc::new(Semaphore::new(CALLS)),
        }
    }

    /// Returns whether this host calls the plugin's controller for others.
    pub fn has(&self, plugin: &str) -> bool {
        self.plugins.contains_key(plugin)
    }

    /// Takes the place of a call. Refuses a call that csid.toml does not allow. An empty credential: the call has none. `changes_volumes`: it creates,
    /// expands or deletes a volume.
    pub fn admit(&self, plugin: &str, credential: &str, changes_volumes: bool) -> Result<CallPlace> {
        let refused = |text: &str| Error::new(Kind::NotAuthorized, text);
        let of_plugin = self.plugins.get(plugin);
        let of_plugin = of_plugin
            .ok_or_else(|| refused("csid.toml of the host does not name the plugin in controllers"))?;
        if !credential.is_empty() && !self.credentials.iter().any(|entry| is_of(entry, credential)) {
            return Err(refused(
                "csid.toml of the host does not name the credential in controller-credentials",
            ));
        }
        let for_volumes = match changes_volumes {
            false => None,
            true => Some(self.volumes.get(plugin).ok_or_else(|| {
                refused("csid.toml of the host does not name the plugin in controller-volumes")
            })?),
        };
        let full = |most: usize| {
            move |_| {
                Error::new(Kind::RateLimited, format!("{most} controller calls wait or are made, the limit"))
            }
        };
        Ok(CallPlace {
            _of_plugin: Arc::clone(of_plugin).try_acquire_owned().map_err(full(CALLS_OF_PLUGIN))?,
            _for_volumes: for_volumes
                .map(|places| Arc::clone(places).try_acquire_owned())
                .transpose()
                .map_err(full(CALLS_FOR_VOLUMES))?,
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
            on_fenced: Default::default(),
            link: "/run/csid-link".into(),
            controllers: owned(controllers),
            controller_credentials: owned(credentials),
            controller_volumes: owned(&controllers[..controllers.len().min(1)]),
        })
    }

    #[test]
    fn call_that_csid_toml_does_not_allow_is_refused() {
        let none = permits(&[], &["csid.prod.key"]);
        assert!(none.admit("p", "", false).is_err() && !none.has("p"));
        let some = permits(&["p"], &["csid.prod.key", "csid.a.*"]);
        assert!(some.has("p") && some.admit("p", "", false).is_ok());
        for good in ["csid.prod.key", "csid.a.key", "csid.a.other"] {
            assert!(some.admit("p", good, false).is_ok(), "{good}");
        }
        for bad in
            ["csid.prod.other", "csid.prod.key2", "csid.b.key", "csid.a.b.key", "csid.a.", "csid.a", "key"]
        {
            let error = some.admit("p", bad, false).err().map(|error| error.kind);
            assert_eq!(error, Some(Kind::NotAuthorized), "{bad}");
        }
        assert!(some.admit("q", "", false).is_err() && some.admit("", "", false).is_err());
        let two = permits(&["p", "q"], &[]);
        assert!(two.admit("q", "", false).is_ok() && two.admit("p", "", true).is_ok());
        assert!(two.admit("q", "", true).is_err(), "it attaches, and changes no volumes");
        assert!(permits(&["p"], &[]).admit("p", "csid.prod.key", false).is_err());
    }

    #[test]
    fn plugin_that_hangs_leaves_places_to_others() {
        let permits = permits(&["a", "b"], &[]);
        let taken: Vec<CallPlace> =
            std::iter::from_fn(|| permits.admit("a", "", false).ok()).take(CALLS).collect();
        assert_eq!(taken.len(), CALLS_OF_PLUGIN);
        assert!(permits.admit("b", "", false).is_ok());
        drop(taken);
        assert!(permits.admit("a", "", false).is_ok());
    }
}
