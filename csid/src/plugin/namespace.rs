//! The network of a managed plugin: the host's, a loopback of its own, or a namespace by name. A named namespace exists already, or
//! commands make it. The commands are a unit of their own, one for each namespace, which stays active as long as a plugin needs the
//! namespace. So it outlives csid and the plugin, and several plugins and instances share it. csid stops the unit after the last of
//! them. A namespace that exists without that unit is not csid's: csid neither makes nor removes it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::host::oneshot::Oneshot;
use crate::host::units::{Units, UnitsError};
use crate::plugin::errors::start::{StartError, how_it_ended};
use crate::plugin::network::Network;
use crate::plugin::spec::PluginSpec;

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
pub(super) struct NamespaceCommands(Oneshot);

impl NamespaceCommands {
    pub fn of(id: &str, spec: &PluginSpec) -> Option<Self> {
        let (Network::Namespace(name), false) = (&spec.network, spec.network_prestart.is_empty()) else {
            return None;
        };
        Some(NamespaceCommands(Oneshot {
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
    async fn run(&self, units: &Units) -> Result<(), StartError> {
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
pub(super) async fn clear(units: &Units, network: &Network, all: &Namespaces) -> Result<(), UnitsError> {
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
    commands: Option<&NamespaceCommands>,
) -> Result<Option<String>, StartError> {
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
