//! The table of plugins, and its handle. A plugin has one instance or several, each with a task
//! of its own; one of `plugins.d` is as its file says, one registered on the bus or by its own socket is a row of the journal.
//! Changes of the registry follow one another; nothing else waits for them.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::{BoxFuture, Shared as SharedFuture};
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use crate::config::Directories;
use crate::error::Result;
use crate::host::units::Units;
use crate::plugin::common::{Common, EarlierSecrets};
use crate::plugin::errors::registry::RegistrationError;
use crate::plugin::events;
use crate::plugin::instance::Hands;
use crate::plugin::namespace::Namespaces;
use crate::plugin::node_ids::NodeIds;
use crate::plugin::place::Location;
use crate::plugin::registry::facts::InstanceFacts;
use crate::plugin::registry::kept::Kept;
use crate::plugin::rpc::Limit;
use crate::plugin::self_registered;
use crate::plugin::spec::PluginSpec;
use crate::plugin::task::{Asked, How, InstanceState, Pace, Stop, Task, TaskContext};
use crate::plugin::view::PluginChange;
use crate::store::rows::PluginRow;
use crate::store::{Change, Durability, Store};

/// Changes that a listener may be behind. After that it learns that it missed some, and reads all.
const CHANGES: usize = 256;
/// Probes that wait for one plugin's next look.
const PROBES: usize = 64;

/// The handle of all plugins.
#[derive(Clone)]
pub struct Plugins(pub(in crate::plugin) Arc<PluginRegistry>);

pub(in crate::plugin) struct PluginRegistry {
    pub directories: Directories,
    pub shared: TaskContext,
    earlier_secrets: EarlierSecrets,
    pub(super) plugins: Mutex<InstanceTable>,
    /// Signalled when an instance comes or goes, and when csid stops.
    pub known: watch::Sender<()>,
    /// How often a controller was chosen.
    pub turns: AtomicU64,
    /// The upgrades that are under way, by the plugin's id. Nothing else changes the instances of such a plugin.
    pub(super) upgrades: Mutex<BTreeMap<String, Upgrade>>,
    /// Held across a change of the registry and its commit.
    pub(in crate::plugin) changing: tokio::sync::Mutex<()>,
}

/// Each plugin's instances, the newest first; there is no plugin without one.
pub(in crate::plugin) type InstanceTable = BTreeMap<String, Vec<InstanceEntry>>;

/// An instance.
pub(in crate::plugin) struct InstanceEntry {
    pub spec: PluginSpec,
    pub owner: u32,
    pub(super) origin: SpecOrigin,
    /// When it came among its plugin's: a newer one's is greater. 0: the file's, which is the oldest whenever it is read. One that
    /// takes another's place has the same.
    pub(super) number: u64,
    pub state: watch::Receiver<InstanceState>,
    pub probes: mpsc::Sender<Asked>,
    /// All of the plugin's have the same one.
    pub common: Arc<Common>,
    pub(super) stops: mpsc::Sender<Stop>,
    /// The instance in whose place it is to be, as long as it is only tried.
    pub(super) replaces: Option<String>,
    /// The facts of that instance, as in the journal.
    pub(super) before: Option<InstanceFacts>,
    /// The instance that it replaced.
    pub(super) replaced: Option<String>,
    /// The handles of its task. `None`: the instance was replaced, and gets no call.
    pub hands: Option<Hands>,
}

impl InstanceEntry {
    /// Returns whether the instance gets calls when it is healthy.
    pub fn serves(&self) -> bool {
        self.replaces.is_none() && self.hands.is_some()
    }
}

/// An upgrade that is under way.
pub(super) struct Upgrade {
    /// The instance that is replaced.
    pub(super) old: String,
    /// The new instance's.
    pub(super) spec: PluginSpec,
    pub(super) outcome: UpgradeOutcome,
}

/// The new instance's name, for everybody who waits for it.
pub(super) type UpgradeOutcome = SharedFuture<BoxFuture<'static, Result<String>>>;

#[derive(Clone, PartialEq, Eq)]
pub(super) enum SpecOrigin {
    /// With the instance's name there; since a reload put it in another's place it may run by another.
    File(String),
    Bus,
    /// The plugin registered itself (`registrar`).
    Socket,
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
        node_ids: BTreeMap<String, String>,
        earlier_secrets: EarlierSecrets,
    ) -> Plugins {
        Self::begin(Pace::default(), directories, rpc, store, files, (rows, node_ids), earlier_secrets)
    }

    /// systemd, by the one connection that csid has to it.
    pub fn units(&self) -> Units {
        self.0.shared.units.clone()
    }

    #[cfg(test)]
    pub(in crate::plugin) fn start_at(
        pace: Pace,
        directories: &Directories,
        rpc: Duration,
        store: Store,
        files: Vec<(String, PluginSpec)>,
        journaled: (Vec<PluginRow>, BTreeMap<String, String>),
    ) -> Plugins {
        Self::begin(pace, directories, rpc, store, files, journaled, EarlierSecrets::default())
    }

    fn begin(
        pace: Pace,
        directories: &Directories,
        rpc: Duration,
        store: Store,
        files: Vec<(String, PluginSpec)>,
        (mut rows, node_ids): (Vec<PluginRow>, BTreeMap<String, String>),
        earlier_secrets: EarlierSecrets,
    ) -> Plugins {
        let shared = TaskContext {
            store,
            units: Units::default(),
            changes: broadcast::channel(CHANGES).0,
            closed: Arc::new(AtomicBool::new(false)),
            limit: Limit::new(rpc),
            node_ids: Arc::new(NodeIds::of(node_ids)),
            namespaces: Namespaces::default(),
            pace,
        };
        let plugins = Plugins(Arc::new(PluginRegistry {
            directories: directories.clone(),
            shared,
            earlier_secrets,
            plugins: Mutex::default(),
            known: watch::Sender::new(()),
            turns: AtomicU64::new(0),
            upgrades: Mutex::default(),
            changing: tokio::sync::Mutex::default(),
        }));
        for (id, spec) in files {
            plugins.define(&id, &spec, &rows);
        }
        // Whose plugin it is, is its oldest instance's to say; one that is tried comes after the one that it replaces.
        let is_tried = |row: &PluginRow| Kept::read(row).is_ok_and(|kept| kept.replaces.is_some());
        rows.sort_by_cached_key(|row| (row.number, is_tried(row)));
        rows.into_iter().for_each(|row| plugins.restore(row));
        plugins.resume();
        plugins.clean_execs();
        plugins
    }

    fn restore(&self, row: PluginRow) {
        let mut kept = match Kept::read(&row) {
            // The instance is defined by its file, if that still exists.
            Ok(Kept { filed: Some(_), .. }) => return,
            Ok(kept) => kept,
            Err(error) => {
                let id = &row.id;
                tracing::error!(plugin = %id, "plugin {id}: the journal's spec cannot be used: {error}; register it again");
                return;
            }
        };
        // The file may have come since.
        let allowed =
            self.entries().get(&row.id).is_none_or(|entries| joins(entries, kept.spec.instance(), row.uid));
        match allowed {
            true => {
                let of_socket = self_registered::is_name(kept.spec.instance());
                let origin = if of_socket { SpecOrigin::Socket } else { SpecOrigin::Bus };
                kept.replaces = kept.replaces.filter(|old| self.entry(&row.id, old, |_| ()).is_some());
                self.add_kept(&row.id, kept, row.uid, origin, row.number);
            }
            false => {
                let id = &row.id;
                tracing::warn!(plugin = %id, "plugin {id} is registered, and defined by plugins.d: the file wins");
            }
        }
    }

    /// csid.toml's deadline of one RPC has changed.
    pub fn set_rpc_deadline(&self, rpc: Duration) {
        self.0.shared.limit.set(rpc);
    }

    pub async fn register(&self, id: &str, spec: PluginSpec, uid: u32) -> Result<()> {
        spec.validate(id)?;
        if uid != 0 && spec.needs_root() {
            return Err(RegistrationError::RootsKeys.into());
        }
        let (plugins, id) = (self.clone(), id.to_owned());
        to_the_end(async move { plugins.registered(&id, spec, uid).await }).await
    }

    async fn registered(&self, id: &str, spec: PluginSpec, uid: u32) -> Result<()> {
        let _changing = self.0.changing.lock().await;
        let instance = spec.instance().to_owned();
        if self_registered::is_name(&instance) {
            return Err(RegistrationError::ReservedName { instance }.into());
        }
        self.enter(id, spec, uid, SpecOrigin::Bus).await?;
        self.renew(id, &instance, uid).await
    }

    /// Makes an instance that its owner or root registers again the newest, so that node calls go to it. Nothing changes where it is
    /// the newest, or where the plugin would become another uid's, which is that of its oldest instance.
    async fn renew(&self, id: &str, instance: &str, uid: u32) -> Result<()> {
        let (row, number) = {
            let plugins = self.entries();
            let entries = plugins.get(id).map(Vec::as_slice).unwrap_or_default();
            let is_it = |entry: &&InstanceEntry| entry.spec.instance() == instance;
            let newest = entries.iter().map(|entry| entry.number).max().unwrap_or(0);
            let others_oldest = entries.iter().rfind(|entry| !is_it(entry));
            let Some(entry) = entries.iter().find(is_it).filter(|entry| {
                entry.origin == SpecOrigin::Bus
                    && entry.serves()
                    && entry.number < newest
                    && [0, entry.owner].contains(&uid)
                    && others_oldest.is_none_or(|oldest| Some(oldest.owner) == owner(entries))
            }) else {
                return Ok(());
            };
            let kept = Kept { replaced: entry.replaced.clone(), ..Kept::new(&entry.spec) };
            (kept.row(id, newest + 1, entry.owner)?, newest + 1)
        };
        self.refuse_upgrading(id)?;
        let came = events::came(id, instance, uid, false);
        self.commit(vec![Change::PutPlugin(row), Change::Event(came)]).await?;
        {
            let mut plugins = self.entries();
            let Some(entries) = plugins.get_mut(id) else { return Ok(()) };
            if let Some(at) = entries.iter().position(|entry| entry.spec.instance() == instance) {
                entries[at].number = number;
                entries[..=at].rotate_right(1);
            }
        }
        self.tell(PluginChange::Changed(id.to_owned()));
        Ok(())
    }

    async fn enter(&self, id: &str, spec: PluginSpec, uid: u32, origin: SpecOrigin) -> Result<()> {
        self.open()?;
        self.0.shared.store.writable()?;
        let Some((first, number)) = self.place_of(id, &spec, uid)? else { return Ok(()) };
        self.refuse_upgrading(id)?;
        // Not before: an instance that is here already needs no look.
        spec.check_start()?;
        let came = events::came(id, spec.instance(), uid, first);
        let row = Kept::new(&spec).row(id, number, uid)?;
        self.commit(vec![Change::PutPlugin(row), Change::Event(came)]).await?;
        self.add(id, spec, uid, origin, number);
        Ok(())
    }

    /// An instance that registered itself, in the place of what had its socket before.
    pub(in crate::plugin) async fn joined(&self, id: &str, spec: PluginSpec) -> Result<()> {
        let (plugins, id) = (self.clone(), id.to_owned());
        to_the_end(async move {
            let _changing = plugins.0.changing.lock().await;
            if plugins.is_otherwise(&id) {
                return Err(RegistrationError::NotJoined { id }.into());
            }
            for (other, before) in plugins.of_sockets() {
                if before.instance() == spec.instance() && (other != id || !before.same(&spec)) {
                    plugins.leave(&other, before.instance()).await?;
                }
            }
            plugins.enter(&id, spec, 0, SpecOrigin::Socket).await
        })
        .await
    }

    async fn parted(&self, id: &str, instance: &str) {
        let (plugins, of, named) = (self.clone(), id.to_owned(), instance.to_owned());
        let left = to_the_end(async move {
            let _changing = plugins.0.changing.lock().await;
            let of_socket = plugins.entry(&of, &named, |entry| entry.origin == SpecOrigin::Socket);
            if of_socket == Some(true) { plugins.leave(&of, &named).await } else { Ok(()) }
        });
        if let Err(error) = left.await {
            tracing::error!(
                plugin = %id, %instance,
                "plugin {id}: instance {instance} stays, though its registration socket is gone: {error}"
            );
        }
    }

    /// End the instances of registration sockets that are gone.
    pub(in crate::plugin) async fn part(&self, is_gone: impl Fn(&str) -> bool + Send) {
        let gone: Vec<_> =
            self.of_sockets().into_iter().filter(|(_, spec)| is_gone(spec.instance())).collect();
        for (id, spec) in gone {
            self.parted(&id, spec.instance()).await;
        }
    }

    fn is_otherwise(&self, id: &str) -> bool {
        self.entries().get(id).into_iter().flatten().any(|entry| entry.origin != SpecOrigin::Socket)
    }

    fn of_sockets(&self) -> Vec<(String, PluginSpec)> {
        let entries = self.entries();
        let all = entries.iter().flat_map(|(id, entries)| entries.iter().map(move |entry| (id, entry)));
        let of_sockets = all.filter(|(_, entry)| entry.origin == SpecOrigin::Socket);
        of_sockets.map(|(id, entry)| (id.clone(), entry.spec.clone())).collect()
    }

    /// Whether it is the plugin's first instance, and its number; `None`: it is there already.
    fn place_of(&self, id: &str, spec: &PluginSpec, uid: u32) -> Result<Option<(bool, u64)>> {
        Ok(match self.entries().get(id) {
            Some(entries) if self.is_there(id, entries, spec, uid)? => None,
            Some(entries) => Some((false, entries.iter().map(|entry| entry.number).max().unwrap_or(0) + 1)),
            None => Some((true, 1)),
        })
    }

    /// Whether there is such an instance already; an error if there cannot be one.
    fn is_there(
        &self,
        id: &str,
        entries: &[InstanceEntry],
        spec: &PluginSpec,
        uid: u32,
    ) -> Result<bool, RegistrationError> {
        // Another user's instance would receive the owner's secrets and make the owner's mounts.
        if let Some(owner) = owner(entries).filter(|owner| uid != 0 && uid != *owner) {
            return Err(RegistrationError::OtherOwner { id: id.to_owned(), owner });
        }
        let instance = spec.instance();
        if let Some(entry) = entries.iter().find(|entry| entry.spec.instance() == instance) {
            let (id, instance) = (id.to_owned(), instance.to_owned());
            return match &entry.origin {
                SpecOrigin::File(_) => Err(RegistrationError::NameOfFile { id, instance }),
                SpecOrigin::Bus | SpecOrigin::Socket if entry.spec.same(spec) => Ok(true),
                SpecOrigin::Bus | SpecOrigin::Socket => Err(RegistrationError::OtherSpec { id, instance }),
            };
        }
        let socket = |spec| Location::of(&self.0.directories, id, spec).socket;
        match entries.iter().find(|entry| socket(&entry.spec) == socket(spec)) {
            Some(other) => {
                let instance = other.spec.instance().to_owned();
                Err(RegistrationError::SocketTaken { id: id.to_owned(), instance })
            }
            None => Ok(false),
        }
    }

    /// csid stops: one last Probe of each plugin, within a second in all; then none is healthy, and calls
    /// fail with PluginShutdown. The plugins go on.
    pub async fn shutdown(&self) {
        let _changing = self.0.changing.lock().await;
        let stops: Vec<_> = self.entries().values().flatten().map(|entry| entry.stops.clone()).collect();
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

    pub(super) fn add(&self, id: &str, spec: PluginSpec, owner: u32, origin: SpecOrigin, number: u64) {
        self.add_kept(id, Kept { spec, ..Kept::default() }, owner, origin, number);
    }

    /// The same; one that `replaces` another is only tried, until it has its place.
    pub(super) fn add_kept(&self, id: &str, kept: Kept, owner: u32, origin: SpecOrigin, number: u64) {
        let Kept { spec, replaces, before, replaced, .. } = kept;
        let place = Location::of(&self.0.directories, id, &spec);
        self.0.shared.namespaces.add(&spec.network);
        let (probes, asked) = mpsc::channel(PROBES);
        // Stops run one at a time; the next one waits.
        let (stops, stopped) = mpsc::channel(1);
        let common = self.entries().get(id).and_then(|entries| Some(entries.first()?.common.clone()));
        let common = common.unwrap_or_else(|| Arc::new(self.0.earlier_secrets.common_of(id)));
        let (task, state) =
            Task::new(self.0.shared.clone(), id, spec.clone(), owner, place, asked, common.clone());
        tokio::spawn(task.run(stopped));
        let first = {
            let mut entries = self.entries();
            let entries = entries.entry(id.to_owned()).or_default();
            let at = entries.partition_point(|entry| entry.number > number);
            let hands = Some(Hands::default());
            let entry = InstanceEntry {
                spec,
                owner,
                origin,
                number,
                state,
                probes,
                common,
                stops,
                replaces,
                before,
                replaced,
                hands,
            };
            entries.insert(at, entry);
            entries.len() == 1
        };
        let id = id.to_owned();
        self.tell(if first { PluginChange::Added(id) } else { PluginChange::Changed(id) });
    }

    pub(super) fn remove(&self, id: &str, instance: &str) {
        let last = {
            let mut plugins = self.entries();
            let left = plugins.get_mut(id).map(|entries| {
                entries.retain(|entry| {
                    let stays = entry.spec.instance() != instance;
                    if !stays {
                        self.0.shared.namespaces.remove(&entry.spec.network);
                    }
                    stays
                });
                entries.len()
            });
            left == Some(0) && plugins.remove(id).is_some()
        };
        let id = id.to_owned();
        self.tell(if last { PluginChange::Removed(id) } else { PluginChange::Changed(id) });
    }

    pub(super) fn tell(&self, change: PluginChange) {
        self.0.known.send_replace(());
        let _ = self.0.shared.changes.send(change);
    }

    pub(super) fn entry<T>(
        &self,
        id: &str,
        instance: &str,
        look: impl FnOnce(&InstanceEntry) -> T,
    ) -> Option<T> {
        self.entries().get(id)?.iter().find(|entry| entry.spec.instance() == instance).map(look)
    }

    pub(super) async fn commit(&self, changes: Vec<Change>) -> Result<()> {
        Ok(self.0.shared.store.commit(changes, Durability::Disk).await?)
    }

    pub(in crate::plugin) fn open(&self) -> Result<()> {
        if self.0.shared.closed.load(Ordering::Acquire) {
            return Err(RegistrationError::Stopping.into());
        }
        Ok(())
    }

    pub(in crate::plugin) fn entries(&self) -> MutexGuard<'_, InstanceTable> {
        self.0.plugins.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A change of the registry that has begun is ended, whether or not its caller still waits.
pub(super) async fn to_the_end<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    match tokio::spawn(work).await {
        Ok(done) => done,
        Err(source) => Err(RegistrationError::Interrupted { source }.into()),
    }
}

/// Whose plugin it is: its oldest instance's uid.
pub(in crate::plugin) fn owner(entries: &[InstanceEntry]) -> Option<u32> {
    entries.last().map(|oldest| oldest.owner)
}

/// Returns whether a remembered instance of `uid` may join those that are there.
fn joins(entries: &[InstanceEntry], instance: &str, uid: u32) -> bool {
    entries.iter().all(|entry| entry.spec.instance() != instance)
        && (uid == 0 || owner(entries).is_none_or(|owner| owner == uid))
}

pub(super) async fn stop(stops: &mpsc::Sender<Stop>, how: How) -> Result<()> {
    let (done, stopped) = oneshot::channel();
    if stops.send(Stop { how, done }).await.is_err() {
        return Ok(());
    }
    stopped.await.unwrap_or(Ok(()))
}
