//! Queries of the registry: the plugins and their state, and waits for a healthy instance.
//! Node calls go to the newest, controller calls to all that are healthy and offer the RPC, the least busy first.

use std::collections::BTreeSet;
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{broadcast, oneshot, watch};

use crate::error::{Kind, Result};
use crate::plugin::common::HeldDirectories;
use crate::plugin::controller::{Controller, needed_by};
use crate::plugin::errors::registry::RegistrationError;
use crate::plugin::errors::service::ServiceError;
use crate::plugin::node::Ready;
use crate::plugin::place::Location;
use crate::plugin::registry::{InstanceEntry, Plugins, owner};
use crate::plugin::spec::validate_id;
use crate::plugin::task::InstanceState;
use crate::plugin::view::{ATTACHES, Can, PluginChange, PluginView, Service};

impl Plugins {
    /// Returns the host directory of each plugin's volumes; more than one where its instances differ.
    pub fn roots(&self) -> Vec<(String, PathBuf)> {
        let root =
            |id: &String, entry: &InstanceEntry| Location::of(&self.0.directories, id, &entry.spec).root;
        let plugins = self.entries();
        let roots = plugins.iter().flat_map(|(id, entries)| {
            entries.iter().map(|entry| (id.clone(), root(id, entry))).collect::<BTreeSet<_>>()
        });
        roots.collect()
    }

    /// Returns all plugins, by id.
    pub fn list(&self) -> Vec<PluginView> {
        self.entries().values().filter_map(|entries| merged(entries)).collect()
    }

    pub fn view(&self, id: &str) -> Option<PluginView> {
        merged(self.entries().get(id)?)
    }

    /// Returns the processes that csid is connected to as instances of the plugin.
    pub fn processes(&self, id: &str) -> Vec<u32> {
        // All instances of a plugin have this together.
        let first =
            self.entries().get(id).and_then(|entries| entries.first().map(|entry| entry.common.clone()));
        first.map(|common| common.listeners.processes()).unwrap_or_default()
    }

    /// Returns whether any instance is healthy.
    pub fn healthy_now(&self, id: &str) -> bool {
        let plugins = self.entries();
        serving(plugins.get(id)).any(|entry| entry.state.borrow().ready.is_some())
    }

    /// Returns whether an instance of root's is healthy and offers its controller.
    pub fn has_roots_controller(&self, id: &str) -> bool {
        let plugins = self.entries();
        let is_one =
            |entry: &InstanceEntry| entry.state.borrow().ready.as_ref().is_some_and(is_roots_controller);
        serving(plugins.get(id)).any(is_one)
    }

    /// Whether its mounts are served when this instance has left, so that it may although there are some: another one has node
    /// calls in the same directory, and controller calls where it had them and the plugin attaches.
    pub fn serves_without(&self, id: &str, instance: &str) -> bool {
        let attaches = self.can(id, ATTACHES) != Some(false);
        let plugins = self.entries();
        let (own, others): (Vec<&InstanceEntry>, Vec<&InstanceEntry>) =
            serving(plugins.get(id)).partition(|entry| entry.spec.instance() == instance);
        let serves = |entry: &InstanceEntry, service| {
            entry.state.borrow().ready.as_ref().is_some_and(|ready| ready.0.offers(service))
        };
        let controls = |entry: &InstanceEntry| {
            entry.state.borrow().view.services.iter().any(|offered| offered == Service::Controller.name())
        };
        let beside =
            |other: &InstanceEntry| own.iter().all(|own| own.spec.plugin_root == other.spec.plugin_root);
        let needs_controller = attaches && own.iter().any(|own| controls(own));
        others.iter().any(|other| serves(other, Service::Node) && beside(other))
            && (!needs_controller || others.iter().any(|other| serves(other, Service::Controller)))
    }

    /// Keeps a reload from moving the directories of the plugin that `ready` is an instance of. `None`: one has moved them.
    pub async fn hold_directories(&self, ready: &Ready) -> Option<HeldDirectories> {
        let (instance, common) = (&ready.0, &ready.0.peer.common);
        let held = common.hold_directories().await;
        let plugins = self.entries();
        let mut entries = plugins.get(&*instance.peer.id).into_iter().flatten();
        let is_there = |entry: &InstanceEntry| {
            let place = Location::of(&self.0.directories, &instance.peer.id, &entry.spec);
            Arc::ptr_eq(&entry.common, common) && place.root == instance.root && place.view == instance.view
        };
        entries.any(is_there).then_some(held)
    }

    /// Waits until the plugin is healthy and offers `service`. The plugin may be registered meanwhile.
    pub async fn wait(&self, id: &str, service: Service, deadline: Option<Instant>) -> Result<()> {
        validate_id(id)?;
        match by(deadline, self.found(id, ready, newest(service))).await {
            Some(found) => found.map(drop),
            None => Err(self.lacking(Kind::TimedOut, id, service).into()),
        }
    }

    /// Waits until `deadline` for the newest healthy instance that offers `service`; PluginUnavailable after it.
    pub async fn ready(&self, id: &str, service: Service, deadline: Instant) -> Result<Ready> {
        self.picked(id, service, deadline, newest(service)).await
    }

    /// Waits until `deadline` for the healthy controller with the fewest calls in flight that offers `rpc`; PluginUnavailable after it.
    pub async fn controller(&self, id: &str, rpc: &str, deadline: Instant) -> Result<Controller> {
        self.controller_of(id, rpc, deadline, |_| true).await
    }

    /// Does the same, of root's instances alone. What other hosts have called is sent to no user's plugin.
    pub async fn roots_controller(&self, id: &str, rpc: &str, deadline: Instant) -> Result<Controller> {
        self.controller_of(id, rpc, deadline, |owner| owner == 0).await
    }

    /// Waits for a controller of an owner that `may` serve. The instances may have different capabilities (CSI rule 10). If none has that of
    /// `rpc`, any of them is taken, and refuses the call.
    async fn controller_of(
        &self,
        id: &str,
        rpc: &str,
        deadline: Instant,
        may: impl Fn(u32) -> bool,
    ) -> Result<Controller> {
        let least = |healthy: &[Ready]| {
            // An instance that is not healthy now has it, too, and is waited for.
            let offered = |needed: &&'static str| {
                let views = self.views(id);
                views.iter().any(|view| {
                    may(view.owner) && view.controller_capabilities.iter().any(|has| has == needed)
                })
            };
            let needed = needed_by(rpc).filter(offered);
            let is_one = |ready: &&Ready| {
                may(ready.0.owner)
                    && ready.0.offers(Service::Controller)
                    && needed.is_none_or(|needed| ready.0.print.controller.contains(&needed))
            };
            healthy.iter().filter(is_one).min_by_key(|ready| ready.0.load.rank()).cloned()
        };
        let chosen = self.picked(id, Service::Controller, deadline, least).await?;
        chosen.0.load.choose(self.0.turns.fetch_add(1, Ordering::Relaxed) + 1);
        Ok(Controller::of(chosen))
    }

    async fn picked(
        &self,
        id: &str,
        service: Service,
        deadline: Instant,
        pick: impl Fn(&[Ready]) -> Option<Ready>,
    ) -> Result<Ready> {
        by(Some(deadline), self.found(id, ready, pick))
            .await
            .unwrap_or_else(|| Err(self.unavailable(id, service).into()))
    }

    fn unavailable(&self, id: &str, service: Service) -> ServiceError {
        let views = self.views(id);
        let stopping = !views.is_empty() && views.iter().all(|view| view.state == "stopping");
        let kind = if stopping { Kind::PluginShutdown } else { Kind::PluginUnavailable };
        self.lacking(kind, id, service)
    }

    /// Whether the plugin can do this: an instance of it says so. `None`: that is not known yet, for none of those that were
    /// seen says so, and not all were, or a controller service is named and none was seen.
    pub fn can(&self, id: &str, what: Can) -> Option<bool> {
        known(&self.views(id), what)
    }

    /// Waits until `deadline` for what [`Self::can`] returns to be known; PluginUnavailable after it.
    pub async fn known(&self, id: &str, what: Can, deadline: Instant) -> Result<bool> {
        let service = match what {
            Can::Node(_) => Service::Node,
            Can::Plugin(_) | Can::Controller(_) => Service::Controller,
        };
        let views = |_: &InstanceEntry, state: &InstanceState| Some(state.view.clone());
        let known = self.found(id, views, |views| known(views, what));
        by(Some(deadline), known).await.unwrap_or_else(|| Err(self.unavailable(id, service).into()))
    }

    /// This node as the plugin calls it, verbatim (CSI rule 27), and may. Empty: that is not known as long as it is not healthy,
    /// it gives none, or it is another than was agreed to (`refuse_other_node_id`).
    pub fn node_id(&self, id: &str) -> String {
        let now = self.node_id_now(id);
        match self.0.shared.node_ids.other_than(id, &now) {
            Some(_) => String::new(),
            None => now,
        }
    }

    pub(super) fn node_id_now(&self, id: &str) -> String {
        let plugins = self.entries();
        let healthy: Vec<Ready> =
            serving(plugins.get(id)).filter_map(|entry| ready(entry, &entry.state.borrow())).collect();
        newest(Service::Node)(&healthy).map(|ready| ready.node_id().to_owned()).unwrap_or_default()
    }

    /// Probes the active instance now. The result is also its health.
    pub async fn probe(&self, id: &str, deadline: Option<Instant>) -> Result<bool> {
        let unknown = || RegistrationError::unknown(id);
        let probes = self
            .entries()
            .get(id)
            .and_then(|entries| Some(active(entries)?.probes.clone()))
            .ok_or_else(unknown)?;
        let (asked, answer) = oneshot::channel();
        let probed = async {
            probes.send(asked).await.map_err(|_| unknown())?;
            answer.await.map_err(|_| unknown())?
        };
        let late = || Err(ServiceError::ProbeTimedOut { id: id.to_owned() }.into());
        by(deadline, probed).await.unwrap_or_else(late)
    }

    /// Starts a probe of each instance and does not wait for it.
    pub(super) fn look_again(&self, id: &str) {
        for entry in self.entries().get(id).into_iter().flatten() {
            // An instance with that many Probes waiting is probed soon anyway.
            let _ = entry.probes.try_send(oneshot::channel().0);
        }
    }

    pub fn subscribe(&self) -> broadcast::Receiver<PluginChange> {
        self.0.shared.changes.subscribe()
    }

    /// Waits until `pick` returns a value for one of the instances that are `such`, the newest first.
    async fn found<S, T>(
        &self,
        id: &str,
        such: impl Fn(&InstanceEntry, &InstanceState) -> Option<S>,
        pick: impl Fn(&[S]) -> Option<T>,
    ) -> Result<T> {
        let mut known = self.0.known.subscribe();
        loop {
            // Seen before the look, so that nothing that happens after it is missed.
            known.borrow_and_update();
            self.open()?;
            let (mut states, mut found) = (Vec::new(), Vec::new());
            for entry in serving(self.entries().get(id)) {
                let mut state = entry.state.clone();
                found.extend(such(entry, &state.borrow_and_update()));
                states.push(state);
            }
            if let Some(picked) = pick(&found) {
                return Ok(picked);
            }
            drop(found);
            tokio::select! {
                _ = known.changed() => {}
                () = any_changed(states) => {}
            }
        }
    }

    /// Returns the view of each instance that serves, the newest first.
    fn views(&self, id: &str) -> Vec<Arc<PluginView>> {
        let plugins = self.entries();
        serving(plugins.get(id)).map(|entry| entry.state.borrow().view.clone()).collect()
    }

    /// Describes the awaited instance and its state for a person: one that is not healthy, else the newest.
    pub fn awaited(&self, id: &str) -> String {
        let views = self.views(id);
        let Some(view) = views.iter().find(|view| !view.healthy).or(views.first()) else {
            return format!("plugin {id} (not registered)");
        };
        let which = match views.len() {
            1 => String::new(),
            _ => format!(", instance {}", view.instances.join(", ")),
        };
        format!("plugin {id}{which} ({}) {}", view.state, view.health_message).trim_end().to_owned()
    }

    /// Returns the error of a wait for a plugin's service that timed out.
    fn lacking(&self, kind: Kind, id: &str, service: Service) -> ServiceError {
        let (views, id) = (self.views(id), id.to_owned());
        let Some(newest) = views.first() else { return ServiceError::Unregistered { id, kind } };
        // An instance that was never seen may offer it.
        let may = |view: &PluginView| {
            view.provider.is_empty() || view.services.iter().any(|offered| offered == service.name())
        };
        let sick = views.iter().find(|view| !view.healthy && may(view));
        if let (None, true) = (sick, views.iter().any(|view| view.healthy)) {
            let offered: BTreeSet<&String> = views.iter().flat_map(|view| &view.services).collect();
            let offered = offered.into_iter().cloned().collect();
            return ServiceError::NotOffered { id, kind, service, offered };
        }
        let (view, is_only) = (sick.unwrap_or(newest).clone(), views.len() == 1);
        ServiceError::Unhealthy { id, kind, view, is_only }
    }
}

fn is_roots_controller(ready: &Ready) -> bool {
    ready.0.owner == 0 && ready.0.offers(Service::Controller)
}

/// [`Plugins::can`], of these instances.
fn known(views: &[Arc<PluginView>], what: Can) -> Option<bool> {
    let has = |names: fn(&PluginView) -> &Vec<String>, name: &str| {
        views.iter().any(|view| names(view).iter().any(|found| found == name))
    };
    let can = match what {
        Can::Plugin(name) => has(|view| &view.plugin_capabilities, name),
        Can::Node(name) => has(|view| &view.node_capabilities, name),
        Can::Controller(name) => has(|view| &view.controller_capabilities, name),
    };
    let controls = has(|view| &view.services, Service::Controller.name());
    let seen = !views.is_empty() && views.iter().all(|view| !view.provider.is_empty());
    match what {
        _ if can => Some(true),
        _ if !seen => None,
        Can::Controller(_) if !controls && has(|view| &view.plugin_capabilities, "CONTROLLER_SERVICE") => {
            None
        }
        _ => Some(false),
    }
}

/// Returns the instances of a plugin that get calls, the newest first. An instance on trial or a replaced one gets none.
fn serving(entries: Option<&Vec<InstanceEntry>>) -> impl Iterator<Item = &InstanceEntry> {
    entries.into_iter().flatten().filter(|entry| entry.serves())
}

fn ready(entry: &InstanceEntry, state: &InstanceState) -> Option<Ready> {
    let Ready(instance, _) = state.ready.clone()?;
    Some(Ready(instance, Some(entry.hands.as_ref()?.give())))
}

fn newest(service: Service) -> impl Fn(&[Ready]) -> Option<Ready> {
    move |healthy| healthy.iter().find(|ready| ready.0.offers(service)).cloned()
}

/// The instance that node calls go to: the newest healthy one with a node service. Where there is none it is the one
/// that they wait for, and of a plugin without a node service a healthy one.
fn active(entries: &[InstanceEntry]) -> Option<&InstanceEntry> {
    entries.iter().filter(|entry| entry.serves()).min_by_key(|entry| {
        let state = entry.state.borrow();
        let node = state.view.services.iter().any(|service| service == Service::Node.name());
        match (node, state.ready.is_some()) {
            (true, true) => 0,
            (true, false) => 1,
            (false, true) => 2,
            (false, false) => 3,
        }
    })
}

/// Merges a plugin's instances into one view. The active instance comes first and gives the state and the node's capabilities.
/// The other capabilities are those of all instances, for controller calls go to all. Each call checks its own instance.
fn merged(entries: &[InstanceEntry]) -> Option<PluginView> {
    let active = active(entries)?;
    let mut view = (*active.state.borrow().view).clone();
    view.owner = owner(entries)?;
    for other in entries.iter().filter(|entry| entry.spec.instance() != active.spec.instance()) {
        let serves = other.serves();
        let other = other.state.borrow().view.clone();
        view.instances.extend_from_slice(&other.instances);
        if !serves {
            continue;
        }
        if other.healthy {
            add(&mut view.services, &other.services);
        }
        add(&mut view.plugin_capabilities, &other.plugin_capabilities);
        add(&mut view.controller_capabilities, &other.controller_capabilities);
    }
    Some(view)
}

fn add(names: &mut Vec<String>, more: &[String]) {
    for name in more {
        if !names.contains(name) {
            names.push(name.clone());
        }
    }
}

async fn any_changed(states: Vec<watch::Receiver<InstanceState>>) {
    let mut changes: FuturesUnordered<_> = states.into_iter().map(changed).collect();
    match changes.next().await {
        Some(()) => {}
        None => std::future::pending().await,
    }
}

async fn changed(mut state: watch::Receiver<InstanceState>) {
    // The task of a removed instance has ended. The registry signals what came after it.
    if state.changed().await.is_err() {
        std::future::pending().await
    }
}

/// `None`: the deadline ended first.
async fn by<T>(deadline: Option<Instant>, work: impl Future<Output = T>) -> Option<T> {
    match deadline {
        Some(deadline) => tokio::time::timeout_at(deadline.into(), work).await.ok(),
        None => Some(work.await),
    }
}
