//! The handle of the journal: each call is a message to its thread.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;

use futures_util::future::BoxFuture;
use futures_util::{FutureExt, TryFutureExt};
use tokio::sync::{broadcast, oneshot, watch};

use crate::store::change::{Change, Durability};
use crate::store::counts::Counts;
use crate::store::error::StoreError;
use crate::store::held::HeldVolumes;
use crate::store::journal::Journal;
use crate::store::loaded::{Loaded, MountFilter};
use crate::store::place::JournalDirectory;
use crate::store::record::{Record, VolumeName};
use crate::store::records;
use crate::store::registry::{
    ClaimFilter, Conflict, Listed, ListedClaim, RecordFilter, Registry, RegistryError, Swap,
};
use crate::store::request::{Ask, Commit, StoreReply, StoreRequest, Work};
use crate::store::rows::{Event, MountRow, NewEvent, Phase, PluginRow};
use crate::store::shared::{Health, Published};
use crate::store::thread;

/// Events that a listener may be behind before it gets `Lagged`.
const EVENTS_QUEUED: usize = 1024;

/// A sync of the journal that goes on. It needs no poll to go on.
pub struct Syncing(oneshot::Receiver<Result<(), StoreError>>);

impl Syncing {
    /// Waits until the sync has ended.
    pub async fn ended(self) -> Result<(), StoreError> {
        self.0.await.map_err(|_| StoreError::Gone)?
    }
}

#[derive(Clone)]
pub struct Store {
    // Unbounded: each sender waits for its answer, so it holds no more than there are operations.
    requests: mpsc::Sender<StoreRequest>,
    shared: Arc<Published>,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl Store {
    /// Opens or creates the journal in `directory`, as [`JournalDirectory::take`] and [`Store::open_in`] do.
    pub fn open(directory: &Path, runtime: &Path, node: Option<&str>) -> Result<(Store, Loaded), StoreError> {
        Store::open_in(JournalDirectory::take(directory, runtime)?, node)
    }

    /// Opens or creates the journal in its directory; blocking, at start. A damaged journal is opened to be read. `node`: another
    /// name of this host in claims than the one of its first start.
    pub fn open_in(place: JournalDirectory, node: Option<&str>) -> Result<(Store, Loaded), StoreError> {
        let directory = place.directory.clone();
        let place = Arc::new(place);
        if let Some(kept) = place.finish()? {
            tracing::warn!(kept = %kept.display(), "a new journal took the place of a damaged one");
        }
        let (journal, loaded) = match Journal::open(&place, node) {
            Err(StoreError::Corrupt { why, .. }) => Journal::remains(&place, why, node)?,
            opened => opened?,
        };
        let (registry, changes) = watch::channel(journal.counters.modify_index);
        let shared = Arc::new(Published {
            journal_id: journal.id.clone(),
            node: journal.node.name.clone(),
            modify_index: AtomicU64::new(journal.counters.modify_index),
            sequence: AtomicU64::new(journal.counters.sequence),
            events: broadcast::channel(EVENTS_QUEUED).0,
            health: watch::Sender::default(),
            registry: changes,
            has_records: AtomicBool::new(journal.ask("look for records", records::any)?),
            counts: Counts::default(),
        });
        thread::tell_health(&journal, &shared);
        let (requests, inbox) = mpsc::channel();
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("journal".into())
            .spawn(move || thread::run(journal, inbox, &of_thread, &registry))
            .map_err(|source| StoreError::File { step: "start the thread of", path: directory, source })?;
        Ok((Store { requests, shared, thread: Arc::new(Mutex::new(Some(thread))) }, loaded))
    }

    /// Commits `changes` as one transaction, answered when it is as durable as asked. A future that is dropped withdraws nothing.
    pub async fn commit(&self, changes: Vec<Change>, durability: Durability) -> Result<(), StoreError> {
        let work = Work::Changes(changes);
        // Only a swap has conflicts.
        self.request(|answer| StoreRequest::Commit(Commit { work, durability, answer })).await.map(drop)
    }

    /// Commits `changes` as one transaction, answered when it is written. Its sync goes on meanwhile: the returned future ends when it
    /// has ended.
    pub async fn commit_and_sync(&self, changes: Vec<Change>) -> Result<Syncing, StoreError> {
        let (written, answered) = oneshot::channel();
        let (synced, syncing) = oneshot::channel();
        let commit =
            Commit { work: Work::Changes(changes), durability: Durability::Process, answer: written };
        for request in [StoreRequest::Commit(commit), StoreRequest::Sync(synced)] {
            self.requests.send(request).map_err(|_| StoreError::Gone)?;
        }
        // Only a swap has conflicts.
        let _: Result<u64, Conflict> = answered.await.map_err(|_| StoreError::Gone)??;
        Ok(Syncing(syncing))
    }

    /// Makes every earlier commit durable.
    pub async fn sync(&self) -> Result<(), StoreError> {
        self.request(StoreRequest::Sync).await
    }

    /// Returns the state of the journal's file, and its changes.
    pub fn health(&self) -> watch::Receiver<Health> {
        self.shared.health.subscribe()
    }

    /// Returns an error while the journal is damaged. Callers check it before an effect.
    pub fn writable(&self) -> crate::Result<()> {
        match &*self.shared.health.borrow() {
            Health::Sound => Ok(()),
            Health::Damaged(why) => Err(crate::Error::new(crate::Kind::StateCorrupt, why.clone())),
            Health::Replaced => Err(StoreError::Gone.into()),
        }
    }

    /// Returns all rows.
    pub async fn rows(&self) -> Result<Loaded, StoreError> {
        self.request(|answer| StoreRequest::Ask(Ask::Rows(answer))).await
    }

    /// Returns the rows of all plugins.
    pub async fn plugins(&self) -> Result<Vec<PluginRow>, StoreError> {
        self.request(|answer| StoreRequest::Ask(Ask::Plugins(answer))).await
    }

    /// Adds these rows to what is read of a damaged journal. They are written nowhere.
    pub async fn show(&self, changes: Vec<Change>) -> Result<(), StoreError> {
        self.request(|answer| StoreRequest::Ask(Ask::Show(changes, answer))).await
    }

    /// Moves a damaged journal aside, begins a new one of these rows and of the plugins that could be read, and returns where
    /// the damaged one is. The new one is whole and synced before the other one's name changes. This store only reads
    /// from then on: csid starts again.
    pub async fn replace(&self, changes: Vec<Change>) -> Result<PathBuf, StoreError> {
        self.request(|answer| StoreRequest::Ask(Ask::Replace(changes, answer))).await
    }

    /// Returns the mounts that match, each with its volume's staging path, ordered by key.
    pub async fn mounts(&self, filter: MountFilter) -> Result<Vec<(MountRow, String)>, StoreError> {
        self.request(|answer| StoreRequest::Ask(Ask::Mounts(filter.into(), answer))).await
    }

    /// Returns the number of mounts in each phase.
    pub async fn phases(&self) -> Result<BTreeMap<Phase, u64>, StoreError> {
        self.request(|answer| StoreRequest::Ask(Ask::Phases(answer))).await
    }

    /// Returns the counts of commits since csid's start.
    pub fn counts(&self) -> &Counts {
        &self.shared.counts
    }

    /// Returns at most `max` events after `since`, and whether some between were dropped or `since` was never given
    /// out.
    pub async fn events(&self, since: u64, max: u32) -> Result<(Vec<Event>, bool), StoreError> {
        self.request(|answer| StoreRequest::Ask(Ask::Events(since, max, answer))).await
    }

    /// Subscribes to events, in the order of their commits.
    pub fn subscribe(&self) -> broadcast::Receiver<Arc<Event>> {
        self.shared.events.subscribe()
    }

    /// Makes a round trip to the journal's thread and a read, for the watchdog.
    pub async fn ping(&self) -> Result<(), StoreError> {
        self.request(|answer| StoreRequest::Ask(Ask::Ping(answer))).await
    }

    /// Syncs everything, moves the log into the file and ends the thread. Later requests get `Gone`.
    pub async fn close(&self) -> Result<(), StoreError> {
        self.request(|answer| StoreRequest::Ask(Ask::Close(answer))).await?;
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // The thread answers as its last act, so this does not block.
        thread.map_or(Ok(()), |thread| thread.join().map_err(|_| StoreError::Gone))
    }

    /// Returns the journal's random id. With another one, every cursor is void.
    pub fn journal_id(&self) -> &str {
        &self.shared.journal_id
    }

    /// Returns this host's name in claims.
    pub fn node(&self) -> &str {
        &self.shared.node
    }

    /// Returns the newest event's sequence.
    pub fn event_sequence(&self) -> u64 {
        self.shared.sequence.load(Ordering::Acquire)
    }

    /// Returns the newest index. It grows with every commit; a row's `modify_index` is that of the commit that wrote it.
    pub fn modify_index(&self) -> u64 {
        self.shared.modify_index.load(Ordering::Acquire)
    }

    async fn request<T>(&self, request: impl FnOnce(StoreReply<T>) -> StoreRequest) -> Result<T, StoreError> {
        let (answer, answered) = oneshot::channel();
        self.requests.send(request(answer)).map_err(|_| StoreError::Gone)?;
        answered.await.map_err(|_| StoreError::Gone)?
    }

    /// Returns whether the journal is sound and has had no record since csid's start. A mount of an inline volume then needs no
    /// answer of the journal's thread.
    fn has_no_record(&self) -> bool {
        !self.shared.has_records.load(Ordering::Acquire) && self.writable().is_ok()
    }

    /// Reads the registry.
    fn ask<'a, T: Send + 'a>(
        &'a self,
        ask: impl FnOnce(StoreReply<T>) -> Ask + Send + 'a,
    ) -> BoxFuture<'a, Result<T, RegistryError>> {
        self.request(|answer| StoreRequest::Ask(ask(answer))).map_err(RegistryError::from).boxed()
    }
}

impl Registry for Store {
    fn record(&self, name: VolumeName) -> BoxFuture<'_, Result<Record, RegistryError>> {
        if self.has_no_record() {
            return std::future::ready(Ok(Record::none(name))).boxed();
        }
        self.ask(|answer| Ask::Record(name, answer))
    }

    fn swap(&self, swap: Swap, events: Vec<NewEvent>) -> BoxFuture<'_, Result<u64, RegistryError>> {
        let durability = swap.durability;
        let work = Work::Swap(Box::new(swap), events);
        let done = self.request(move |answer| StoreRequest::Commit(Commit { work, durability, answer }));
        async move { Ok(done.await??) }.boxed()
    }

    fn sync(&self) -> BoxFuture<'_, Result<(), RegistryError>> {
        Store::sync(self).map_err(RegistryError::from).boxed()
    }

    fn records(&self, filter: RecordFilter) -> BoxFuture<'_, Listed<Record>> {
        // The index is read first, so a record of a later index is not missed.
        let newest = *self.shared.registry.borrow();
        if self.has_no_record() {
            return std::future::ready(Ok((Vec::new(), newest))).boxed();
        }
        self.ask(|answer| Ask::Records(filter.into(), answer))
    }

    fn held(
        &self,
        plugin: &str,
        node: &str,
        most: usize,
    ) -> BoxFuture<'_, Result<HeldVolumes, RegistryError>> {
        let (plugin, node) = (plugin.to_owned(), node.to_owned());
        self.ask(move |answer| Ask::Held(plugin, node, most, answer))
    }

    fn claims(&self, filter: ClaimFilter) -> BoxFuture<'_, Listed<ListedClaim>> {
        self.ask(|answer| Ask::Claims(filter.into(), answer))
    }

    fn claim_states(&self) -> BoxFuture<'_, Result<BTreeMap<String, u64>, RegistryError>> {
        self.ask(Ask::ClaimStates)
    }

    fn changed(&self, index: u64) -> BoxFuture<'_, Result<u64, RegistryError>> {
        let mut newest = self.shared.registry.clone();
        async move {
            newest
                .wait_for(|newest| *newest > index)
                .await
                .map(|newest| *newest)
                .map_err(|_| StoreError::Gone.into())
        }
        .boxed()
    }
}
