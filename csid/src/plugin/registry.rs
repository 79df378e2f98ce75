//! Which plugins there are, and the handle that everybody has. A plugin of `plugins.d` is as its file says;
//! one registered on the bus is a row of the journal. Changes of the registry follow one another; nothing
//! else waits for them.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{broadcast, mpsc, oneshot, watch};

use super::rpc::Limit;
use super::spec::{Place, PluginSpec};
use super::task::{Asked, How, Pace, Shared, Snapshot, Stop, Task};
use super::{PluginChange, events, validate_id};
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
pub struct Plugins(pub(super) Arc<Registry>);

pub(super) struct Registry {
    pub directories: Directories,
    pub shared: Shared,
    plugins: Mutex<BTreeMap<String, Entry>>,
    /// Told when a plugin comes or goes, and when csid stops.
    pub known: watch::Sender<()>,
    /// Held across a change of the registry and its commit.
    changing: tokio::sync::Mutex<()>,
}

pub(super) struct Entry {
    pub spec: PluginSpec,
    owner: u32,
    origin: Origin,
    pub state: watch::Receiver<Snapshot>,
    pub probes: mpsc::Sender<Asked>,
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
        let row = PluginRow { id: id.to_owned(), instance: spec.instance().to_owned(), uid, spec: text };
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
        let gone = vec![
            Change::DeletePlugin(id.to_owned(), spec.instance().to_owned()),
            Change::Event(events::deregistered(id)),
        ];
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

    pub(super) fn open(&self) -> Result<()> {
        if self.0.shared.closed.load(Ordering::Acquire) {
            return Err(Error::new(Kind::PluginShutdown, "csid is stopping; ask again when it is back"));
        }
        Ok(())
    }

    pub(super) fn entries(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
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
