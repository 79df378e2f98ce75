//! Which plugins there are, and the handle that everybody has. A plugin of `plugins.d` is as its file says;
//! one registered on the bus is a row of the journal. Changes of the registry follow one another; nothing
//! else waits for them.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{broadcast, mpsc, oneshot, watch};

use super::node::Ready;
use super::rpc::Limit;
use super::spec::{Place, PluginSpec};
use super::task::{Asked, How, Pace, Shared, Snapshot, Stop, Task};
use super::{PluginChange, PluginView, Service, events, validate_id};
use crate::config::Directories;
use crate::error::{Error, Kind, Result};
use crate::host::units::Units;
use crate::store::rows::PluginRow;
use crate::store::{Change, Durability, Store};

/// Changes that a listener may be behind; then it is told that it missed some, and reads all.
const CHANGES: usize = 256;
/// Probes that wait for one plugin's next look.
const PROBES: usize = 64;

/// The handle of all plugins.
#[derive(Clone)]
pub struct Plugins(Arc<Registry>);

struct Registry {
    directories: Directories,
    shared: Shared,
    plugins: Mutex<BTreeMap<String, Entry>>,
    /// Told when a plugin comes or goes, and when csid stops.
    known: watch::Sender<()>,
    /// Held across a change of the registry and its commit.
    changing: tokio::sync::Mutex<()>,
}

struct Entry {
    spec: PluginSpec,
    owner: u32,
    origin: Origin,
    state: watch::Receiver<Snapshot>,
    probes: mpsc::Sender<Asked>,
    stops: mpsc::Sender<Stop>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    File,
    Bus,
}

/// What [`Plugins::apply_files`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    pub added: Vec<String>,
    pub changed: Vec<String>,
    pub removed: Vec<String>,
    /// Their files are gone, but they have mounts: they stay until the next reload without.
    pub kept: Vec<String>,
    /// `ID: why`: a unit could not be stopped; the plugin goes on as before.
    pub failed: Vec<String>,
}

impl Plugins {
    /// Start with what `plugins.d` defines and the journal remembers; a file wins. Answers at once: no plugin
    /// is waited for. Needs a runtime. `rpc` is the deadline of one RPC where a spec gives none.
    pub fn start(
        directories: &Directories,
        rpc: Duration,
        store: Store,
        files: Vec<(String, PluginSpec)>,
        rows: Vec<PluginRow>,
    ) -> Plugins {
        Self::start_at(Pace::default(), directories, rpc, store, files, rows)
    }

    pub(super) fn start_at(
        pace: Pace,
        directories: &Directories,
        rpc: Duration,
        store: Store,
        files: Vec<(String, PluginSpec)>,
        rows: Vec<PluginRow>,
    ) -> Plugins {
        let shared = Shared {
            store,
            units: Units::default(),
            changes: broadcast::channel(CHANGES).0,
            closed: Arc::new(AtomicBool::new(false)),
            limit: Limit::new(rpc),
            pace,
        };
        let plugins = Plugins(Arc::new(Registry {
            directories: directories.clone(),
            shared,
            plugins: Mutex::default(),
            known: watch::Sender::new(()),
            changing: tokio::sync::Mutex::default(),
        }));
        for (id, spec) in files {
            plugins.add(&id, spec, 0, Origin::File);
        }
        for row in rows {
            if plugins.entries().contains_key(&row.id) {
                tracing::warn!(plugin = %row.id, "registered, and defined by plugins.d: the file wins");
                continue;
            }
            let sound = serde_json::from_str::<PluginSpec>(&row.spec)
                .map_err(|error| error.to_string())
                .and_then(|spec| spec.validate(&row.id).map(|()| spec).map_err(|error| error.message));
            match sound {
                Ok(spec) => plugins.add(&row.id, spec, row.uid, Origin::Bus),
                Err(error) => {
                    tracing::error!(plugin = %row.id, %error, "the journal's spec is no good; register again");
                }
            }
        }
        plugins
    }

    /// csid.toml's deadline of one RPC has changed.
    pub fn set_rpc_deadline(&self, rpc: Duration) {
        self.0.shared.limit.set(rpc);
    }

    pub async fn register(&self, id: &str, spec: PluginSpec, uid: u32) -> Result<()> {
        spec.validate(id)?;
        if uid != 0 && spec.needs_root() {
            return Err(Error::new(
                Kind::NotAuthorized,
                "argv, environment, plugin-root and plugin-view are root's alone",
            ));
        }
        let (plugins, id) = (self.clone(), id.to_owned());
        to_the_end(async move { plugins.registered(&id, spec, uid).await }).await
    }

    async fn registered(&self, id: &str, spec: PluginSpec, uid: u32) -> Result<()> {
        let _changing = self.0.changing.lock().await;
        self.open()?;
        self.0.shared.store.writable()?;
        if let Some(entry) = self.entries().get(id) {
            return again(id, entry, &spec, uid);
        }
        // Not before: a plugin that is here already needs no look.
        spec.check_program()?;
        let text = serde_json::to_string(&spec)
            .map_err(|error| Error::internal(format!("the spec cannot be written: {error}")))?;
        let row = PluginRow { id: id.to_owned(), uid, spec: text };
        self.commit(vec![Change::PutPlugin(row), Change::Event(events::registered(id, uid))]).await?;
        self.add(id, spec, uid, Origin::Bus);
        Ok(())
    }

    /// Forget a plugin and stop a managed one; whether it has mounts is asked before, by `volume`. One that
    /// is not there, or not by that instance, is forgotten already. `uid`: who asks; another's plugin is root's to forget.
    pub async fn unregister(&self, id: &str, instance: Option<&str>, uid: u32) -> Result<()> {
        validate_id(id)?;
        let (plugins, id, instance) = (self.clone(), id.to_owned(), instance.map(str::to_owned));
        to_the_end(async move { plugins.unregistered(&id, instance.as_deref(), uid).await }).await
    }

    async fn unregistered(&self, id: &str, instance: Option<&str>, uid: u32) -> Result<()> {
        let _changing = self.0.changing.lock().await;
        self.0.shared.store.writable()?;
        let (stops, spec, owner) = match self.entries().get(id) {
            // Compared here, where nobody else can register the id meanwhile.
            Some(entry) if uid != 0 && uid != entry.owner => {
                let text = format!("plugin {id} was registered by another uid; root may unregister it");
                return Err(Error::new(Kind::NotAuthorized, text));
            }
            Some(entry) if instance.is_none_or(|instance| instance == entry.spec.instance()) => {
                if entry.origin == Origin::File {
                    let text = format!(
                        "the plugin {id} is defined by plugins.d/{id}.toml: remove the file and reload"
                    );
                    return Err(Error::new(Kind::NotSupported, text));
                }
                (entry.stops.clone(), entry.spec.clone(), entry.owner)
            }
            _ => return Ok(()),
        };
        stop(&stops, How::Unit).await?;
        self.remove(id);
        let gone = vec![Change::DeletePlugin(id.to_owned()), Change::Event(events::deregistered(id))];
        let committed = self.commit(gone).await;
        if committed.is_err() {
            // What the journal still says comes back, so that the call can be repeated.
            self.add(id, spec, owner, Origin::Bus);
        }
        committed
    }

    /// Make the plugins of `plugins.d` those of `files`. One whose file is gone stays while it is in
    /// `in_use`.
    pub async fn apply_files(
        &self,
        files: Vec<(String, PluginSpec)>,
        in_use: BTreeSet<String>,
    ) -> Result<Applied> {
        let plugins = self.clone();
        to_the_end(async move { plugins.applied(files, &in_use).await }).await
    }

    async fn applied(&self, files: Vec<(String, PluginSpec)>, in_use: &BTreeSet<String>) -> Result<Applied> {
        let _changing = self.0.changing.lock().await;
        self.open()?;
        self.0.shared.store.writable()?;
        let mut applied = Applied::default();
        let mut changes = Vec::new();
        let gone: Vec<String> = self
            .entries()
            .iter()
            .filter(|(id, entry)| entry.origin == Origin::File && !files.iter().any(|(file, _)| file == *id))
            .map(|(id, _)| id.clone())
            .collect();
        for id in gone {
            if in_use.contains(&id) {
                tracing::warn!(plugin = %id, "the plugin's file is gone, but it has mounts: it stays");
                applied.kept.push(id);
            } else if self.retire(&id, How::Unit, &mut applied).await {
                self.remove(&id);
                changes.push(Change::Event(events::deregistered(&id)));
                applied.removed.push(id);
            }
        }
        for (id, spec) in files {
            let present = self.entries().get(&id).map(|entry| (entry.spec.clone(), entry.origin));
            match present {
                Some((_, Origin::Bus)) => {
                    let text =
                        format!("{id}: a plugin registered on the bus has that id; unregister it first");
                    tracing::warn!("{text}");
                    applied.failed.push(text);
                }
                Some((present, Origin::File)) if present.same(&spec) => {}
                Some((present, Origin::File)) => {
                    let how = if spec.same_process(&present) { How::Leave } else { How::Unit };
                    if self.retire(&id, how, &mut applied).await {
                        self.remove(&id);
                        self.add(&id, spec, 0, Origin::File);
                        applied.changed.push(id);
                    }
                }
                None => {
                    changes.push(Change::Event(events::registered(&id, 0)));
                    self.add(&id, spec, 0, Origin::File);
                    applied.added.push(id);
                }
            }
        }
        if !changes.is_empty() {
            self.commit(changes).await?;
        }
        Ok(applied)
    }

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

    /// csid stops: one last Probe of each plugin, within a second in all; then none is healthy, and calls
    /// fail with PluginShutdown. The plugins go on.
    pub async fn shutdown(&self) {
        let _changing = self.0.changing.lock().await;
        let stops: Vec<_> = self.entries().values().map(|entry| entry.stops.clone()).collect();
        let mut last = tokio::task::JoinSet::new();
        for stops in stops {
            last.spawn(async move { stop(&stops, How::Last).await });
        }
        // A task that is busy with systemd or the journal is not waited for any longer than a plugin.
        if tokio::time::timeout(self.0.shared.pace.last * 2, last.join_all()).await.is_err() {
            tracing::warn!("not every plugin's task ended in time");
        }
        self.0.shared.closed.store(true, Ordering::Release);
        self.0.known.send_replace(());
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
            if let Some(ready) = ready.filter(|ready| ready.offers(service)) {
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

    fn add(&self, id: &str, spec: PluginSpec, owner: u32, origin: Origin) {
        let place = Place::of(&self.0.directories, id, &spec);
        let (probes, asked) = mpsc::channel(PROBES);
        // One stop at a time: each is sent under `changing`.
        let (stops, stopped) = mpsc::channel(1);
        let (task, state) = Task::new(self.0.shared.clone(), id, spec.clone(), owner, place, asked);
        tokio::spawn(task.run(stopped));
        self.entries().insert(id.to_owned(), Entry { spec, owner, origin, state, probes, stops });
        self.0.known.send_replace(());
        let _ = self.0.shared.changes.send(PluginChange::Added(id.to_owned()));
    }

    fn remove(&self, id: &str) {
        self.entries().remove(id);
        self.0.known.send_replace(());
        let _ = self.0.shared.changes.send(PluginChange::Removed(id.to_owned()));
    }

    /// End a plugin's task; `false`: its unit could not be stopped, so it goes on.
    async fn retire(&self, id: &str, how: How, applied: &mut Applied) -> bool {
        let stops = self.entries().get(id).map(|entry| entry.stops.clone());
        let Some(stops) = stops else { return true };
        match stop(&stops, how).await {
            Ok(()) => true,
            Err(error) => {
                applied.failed.push(format!("{id}: {}", error.message));
                false
            }
        }
    }

    async fn commit(&self, changes: Vec<Change>) -> Result<()> {
        Ok(self.0.shared.store.commit(changes, Durability::Disk).await?)
    }

    fn open(&self) -> Result<()> {
        if self.0.shared.closed.load(Ordering::Acquire) {
            return Err(Error::new(Kind::PluginShutdown, "csid is stopping; ask again when it is back"));
        }
        Ok(())
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        self.0.plugins.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A change of the registry that has begun is ended, whether or not its caller still waits.
async fn to_the_end<T: Send + 'static>(work: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
    match tokio::spawn(work).await {
        Ok(done) => done,
        Err(error) => Err(Error::internal(format!("the change of the registry was not ended: {error}"))),
    }
}

/// Registering a plugin that is there.
fn again(id: &str, entry: &Entry, spec: &PluginSpec, uid: u32) -> Result<()> {
    let exists = |text: String| Err(Error::new(Kind::AlreadyExists, text));
    if uid != 0 && uid != entry.owner {
        let text = format!("the plugin {id} belongs to uid {}", entry.owner);
        return Err(Error::new(Kind::NotAuthorized, text));
    }
    if entry.origin == Origin::File {
        return exists(format!("the plugin {id} is defined by plugins.d/{id}.toml"));
    }
    if entry.spec.same(spec) {
        return Ok(());
    }
    if entry.spec.instance() != spec.instance() {
        let text = format!(
            "the plugin {id} is there as instance `{}`; this csid runs one instance of a plugin",
            entry.spec.instance()
        );
        return Err(Error::new(Kind::NotSupported, text));
    }
    exists(format!("the plugin {id} is registered with another spec; unregister it first"))
}

async fn stop(stops: &mpsc::Sender<Stop>, how: How) -> Result<()> {
    let (done, stopped) = oneshot::channel();
    if stops.send(Stop { how, done }).await.is_err() {
        return Ok(());
    }
    stopped.await.unwrap_or(Ok(()))
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
