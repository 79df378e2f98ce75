//! What is asked of the registry: which plugins there are and how they are, and one that is healthy, waited for.

use std::future::Future;
use std::path::PathBuf;
use std::time::Instant;

use tokio::sync::{broadcast, oneshot};

use super::controller::Controller;
use super::node::Ready;
use super::registry::{Entry, Plugins};
use super::spec::Place;
use super::{PluginChange, PluginView, Service, validate_id};
use crate::error::{Error, Kind, Result};

impl Plugins {
    /// The host directory of each plugin's volumes.
    pub fn roots(&self) -> Vec<(String, PathBuf)> {
        let root = |id: &String, entry: &Entry| Place::of(&self.0.directories, id, &entry.spec).root;
        self.entries().iter().map(|(id, entry)| (id.clone(), root(id, entry))).collect()
    }

    /// All plugins, by id.
    pub fn list(&self) -> Vec<PluginView> {
        self.entries().values().map(|entry| (*entry.state.borrow().view).clone()).collect()
    }

    pub fn view(&self, id: &str) -> Option<PluginView> {
        self.entries().get(id).map(|entry| (*entry.state.borrow().view).clone())
    }

    pub fn healthy_now(&self, id: &str) -> bool {
        self.entries().get(id).is_some_and(|entry| entry.state.borrow().ready.is_some())
    }

    /// Wait until the plugin is healthy and offers `service`. An id that nobody knows is waited for too.
    pub async fn wait(&self, id: &str, service: Service, deadline: Option<Instant>) -> Result<()> {
        validate_id(id)?;
        match by(deadline, self.found(id, service)).await {
            Some(found) => found.map(drop),
            None => {
                let error = Error::new(Kind::TimedOut, self.lacking(id, service));
                Err(waiting(error, id))
            }
        }
    }

    /// A healthy plugin that offers `service`, waited for till `deadline`; PluginUnavailable after it.
    pub async fn ready(&self, id: &str, service: Service, deadline: Instant) -> Result<Ready> {
        match by(Some(deadline), self.found(id, service)).await {
            Some(found) => found,
            None => {
                let error = Error::new(Kind::PluginUnavailable, self.lacking(id, service));
                Err(waiting(error, id))
            }
        }
    }

    /// The healthy controller of a plugin with the fewest calls in flight, waited for till `deadline`; PluginUnavailable
    /// after it.
    pub async fn controller(&self, id: &str, deadline: Instant) -> Result<Controller> {
        let Ready(instance) = self.ready(id, Service::Controller, deadline).await?;
        Ok(Controller(instance))
    }

    /// Whether volumes of this plugin are attached: a controller of it says PUBLISH_UNPUBLISH_VOLUME. `None`: that is not
    /// known yet, for the plugin was not seen, or names a controller service and none was seen.
    pub fn attaches(&self, id: &str) -> Option<bool> {
        let view = self.view(id).filter(|view| !view.provider.is_empty())?;
        let has = |names: &[String], name: &str| names.iter().any(|found| found == name);
        match has(&view.services, Service::Controller.name()) {
            true => Some(has(&view.controller_capabilities, "PUBLISH_UNPUBLISH_VOLUME")),
            false => (!has(&view.plugin_capabilities, "CONTROLLER_SERVICE")).then_some(false),
        }
    }

    /// Probe now; what it finds is also the plugin's health.
    pub async fn probe(&self, id: &str, deadline: Option<Instant>) -> Result<bool> {
        let unknown =
            || Error::not_found(format!("there is no plugin {id}; `csictl plugin list` shows them"));
        let probes = self.entries().get(id).map(|entry| entry.probes.clone()).ok_or_else(unknown)?;
        let (asked, answer) = oneshot::channel();
        let probed = async {
            probes.send(asked).await.map_err(|_| unknown())?;
            answer.await.map_err(|_| unknown())?
        };
        by(deadline, probed).await.unwrap_or_else(|| {
            Err(Error::new(
                Kind::TimedOut,
                format!("the plugin {id} has not answered Probe within the deadline"),
            )
            .with(|details| details.plugin = Some(id.to_owned())))
        })
    }

    pub fn subscribe(&self) -> broadcast::Receiver<PluginChange> {
        self.0.shared.changes.subscribe()
    }

    async fn found(&self, id: &str, service: Service) -> Result<Ready> {
        let mut known = self.0.known.subscribe();
        loop {
            // Seen before the look, so that nothing that happens after it is missed.
            known.borrow_and_update();
            self.open()?;
            let state = self.entries().get(id).map(|entry| entry.state.clone());
            let Some(mut state) = state else {
                let _ = known.changed().await;
                continue;
            };
            let ready = state.borrow_and_update().ready.clone();
            if let Some(ready) = ready.filter(|ready| ready.0.offers(service)) {
                return Ok(ready);
            }
            tokio::select! {
                _ = known.changed() => {}
                // The task of a plugin that was removed has ended; `known` tells of its successor.
                Ok(()) = state.changed() => {}
            }
        }
    }

    /// What a caller reads who has waited for a plugin in vain.
    fn lacking(&self, id: &str, service: Service) -> String {
        let Some(view) = self.view(id) else {
            return format!(
                "no plugin {id} is registered; register it (csictl plugin register), or write \
                 plugins.d/{id}.toml and reload"
            );
        };
        if view.healthy {
            let services = view.services.join(", ");
            let services = if services.is_empty() { "none" } else { &services };
            return format!("the plugin {id} offers no {} service (it offers: {services})", service.name());
        }
        let advice = match view.unit.as_str() {
            "" => format!("start what listens at {}", view.socket),
            unit => format!("see `journalctl -u '{unit}'`"),
        };
        let message = if view.health_message.is_empty() { "not contacted yet" } else { &view.health_message };
        format!("the plugin {id} is {}: {message}; {advice}", view.state)
    }
}

fn waiting(error: Error, id: &str) -> Error {
    error.with(|details| {
        details.step = Some("waiting for plugin");
        details.plugin = Some(id.to_owned());
    })
}

/// `None`: the deadline ended first.
async fn by<T>(deadline: Option<Instant>, work: impl Future<Output = T>) -> Option<T> {
    match deadline {
        Some(deadline) => tokio::time::timeout_at(deadline.into(), work).await.ok(),
        None => Some(work.await),
    }
}
