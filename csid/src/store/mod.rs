//! The journal: SQLite, one connection, one thread that owns it; a request is a message, an answer a oneshot.
//! Requests that wait together are committed together.
//!
//! State: the file `csid.db` and its log, nothing else; no row is kept in memory. Always true:
//! - A commit is answered after it happened, and is as durable as the strictest request in its group asked.
//!   Every commit changes a row (`modify_index`): SQLite syncs nothing for a transaction that changed
//!   nothing, and then earlier unsynced commits would stay so.
//! - A request is done whole or not at all, and fails alone. A swap of a record that is another one by now is refused
//!   before it writes anything, so that it costs those beside it nothing.
//! - Nothing is written before all was read and found sound. A damaged file is left as it is, whenever that is
//!   noticed: what can be read of it is read, every change is refused ([`StoreError::Corrupt`]), until
//!   [`Store::replace`] keeps it aside.
//! - An event's sequence is never given twice, not even after a power cut; blocks of numbers are reserved by
//!   synced commits.
//!
//! It knows rows, not rules: what a row may become is `volume`'s.

mod checksum;
mod counts;
mod error;
mod file;
mod journal;
mod mark;
mod node;
mod place;
mod records;
pub mod registry;
mod remains;
pub mod rows;
mod schema;
mod tables;
#[cfg(test)]
mod tests;
mod thread;
mod words;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;

use tokio::sync::{broadcast, oneshot, watch};

pub use counts::Counts;
pub use error::StoreError;
use journal::Journal;
use place::Place;
use rows::{Event, MountKey, MountRow, NewEvent, Phase, PluginRow, VolumeKey, VolumeRow};
use thread::{Answer, Ask, Commit, Request, Work};

/// What a commit has to survive before it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// The end of csid: written, not synced. Enough for the intent of a node call, which no power cut
    /// outlives either.
    Process,
    /// A power cut: synced, and with it every earlier commit.
    Disk,
}

#[allow(clippy::large_enum_variant, reason = "few live at once, each on its way to the disk")]
pub enum Change {
    PutVolume(VolumeRow),
    DeleteVolume(VolumeKey),
    PutMount(Arc<MountRow>),
    DeleteMount(MountKey),
    PutPlugin(PluginRow),
    /// By id and instance.
    DeletePlugin(String, String),
    /// All instances, by their id.
    DeletePlugins(String),
    /// What a plugin calls this node, and may: by the plugin's id.
    PutNodeId(String, String),
    DeleteNodeId(String),
    Event(NewEvent),
    /// The boot in which the mounts that the rows tell of were made.
    Boot(String),
}

/// Everything the journal holds, or what can be read of it.
pub struct Loaded {
    pub boot: Option<String>,
    pub plugins: Vec<PluginRow>,
    /// What each plugin may call this node, by the plugin's id.
    pub node_ids: BTreeMap<String, String>,
    pub volumes: Vec<VolumeRow>,
    pub mounts: Vec<MountRow>,
}

/// Equality on each field that is given.
#[derive(Clone, Debug, Default)]
pub struct MountFilter {
    pub namespace: Option<String>,
    pub volume: Option<String>,
    pub consumer: Option<String>,
    pub tag: Option<String>,
    pub plugin: Option<String>,
    pub source: Option<String>,
    pub phase: Option<Phase>,
    pub uid: Option<u32>,
}

impl MountFilter {
    /// The one mount of this identity.
    pub fn of(key: &MountKey) -> Self {
        MountFilter {
            namespace: Some(key.namespace.clone()),
            volume: Some(key.volume.clone()),
            consumer: Some(key.consumer.clone()),
            tag: Some(key.tag.clone()),
            ..MountFilter::default()
        }
    }
}

/// Events that a listener may be behind before it is told that it lagged.
const EVENTS_QUEUED: usize = 1024;

#[derive(Clone)]
pub struct Store {
    // Unbounded: each sender waits for its answer, so it holds no more than there are operations.
    requests: mpsc::Sender<Request>,
    shared: Arc<Shared>,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
}

/// What the thread tells without being asked.
struct Shared {
    journal_id: String,
    node: String,
    modify_index: AtomicU64,
    sequence: AtomicU64,
    events: broadcast::Sender<Arc<Event>>,
    health: watch::Sender<Health>,
    /// The index of the registry's newest change; its sender is the thread's.
    registry: watch::Receiver<u64>,
    /// There is or was a record since the journal was opened.
    has_records: AtomicBool,
    counts: Counts,
}

/// What the journal's file is found to be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Health {
    #[default]
    Sound,
    /// Nothing is written any more, because of this.
    Damaged(String),
    /// A new journal has taken the damaged one's place; csid has to begin anew with it.
    Replaced,
}

impl Store {
    /// Open or create the journal in `directory`, which is made 0700 if it is not there; blocking, at start. In
    /// `runtime`, which a boot empties, is noted how far it came. A damaged journal is opened to be read. `node`: another
    /// name of this host in claims than the one of its first start.
    pub fn open(directory: &Path, runtime: &Path, node: Option<&str>) -> Result<(Store, Loaded), StoreError> {
        let place = Arc::new(Place::take(directory, runtime)?);
        if let Some(kept) = place.finish()? {
            tracing::warn!(kept = %kept.display(), "a new journal took the place of a damaged one");
        }
        let (journal, loaded) = match Journal::open(&place, node) {
            Err(StoreError::Corrupt { why, .. }) => Journal::remains(&place, why, node)?,
            opened => opened?,
        };
        let (registry, changes) = watch::channel(journal.counters.modify_index);
        let shared = Arc::new(Shared {
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
        let told = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("journal".into())
            .spawn(move || thread::run(journal, inbox, &told, &registry))
            .map_err(|source| StoreError::File {
                step: "start the thread of",
                path: directory.into(),
                source,
            })?;
        Ok((Store { requests, shared, thread: Arc::new(Mutex::new(Some(thread))) }, loaded))
    }

    /// Commit `changes` as one transaction, answered when it is as durable as asked. No changes and `Disk`:
    /// what was committed before is synced. A future that is dropped withdraws nothing.
    pub async fn commit(&self, changes: Vec<Change>, durability: Durability) -> Result<(), StoreError> {
        let work = Work::Changes(changes);
        self.request(|answer| Request::Commit(Commit { work, durability, answer })).await.map(drop)
    }

    /// What the journal's file is found to be, and its changes.
    pub fn health(&self) -> watch::Receiver<Health> {
        self.shared.health.subscribe()
    }

    /// Refuse what would change something while the journal is damaged; to be asked before an effect.
    pub fn writable(&self) -> crate::Result<()> {
        match &*self.shared.health.borrow() {
            Health::Sound => Ok(()),
            Health::Damaged(why) => Err(crate::Error::new(crate::Kind::StateCorrupt, why.clone())),
            Health::Replaced => Err(StoreError::Gone.into()),
        }
    }

    /// All rows.
    pub async fn rows(&self) -> Result<Loaded, StoreError> {
        self.request(|answer| Request::Ask(Ask::Rows(answer))).await
    }

    /// Show these rows, too, of a damaged journal; they are written nowhere.
    pub async fn show(&self, changes: Vec<Change>) -> Result<(), StoreError> {
        self.request(|answer| Request::Ask(Ask::Show(changes, answer))).await
    }

    /// Keep a damaged journal aside and begin a new one, of these rows and of the plugins that could be read; where the
    /// damaged one is. The new one is whole and synced before the other one's name is touched. This store only reads
    /// from then on: csid begins anew.
    pub async fn replace(&self, changes: Vec<Change>) -> Result<PathBuf, StoreError> {
        self.request(|answer| Request::Ask(Ask::Replace(changes, answer))).await
    }

    /// The mounts that match, each with its volume's staging path, ordered by key.
    pub async fn mounts(&self, filter: MountFilter) -> Result<Vec<(MountRow, String)>, StoreError> {
        self.request(|answer| Request::Ask(Ask::Mounts(filter, answer))).await
    }

    /// How many mounts are in each phase.
    pub async fn phases(&self) -> Result<BTreeMap<Phase, u64>, StoreError> {
        self.request(|answer| Request::Ask(Ask::Phases(answer))).await
    }

    /// How many claims are in each state, in the contract's words.
    pub async fn claim_states(&self) -> Result<BTreeMap<String, u64>, StoreError> {
        self.request(|answer| Request::Ask(Ask::ClaimStates(answer))).await
    }

    /// What was written since csid's start.
    pub fn counts(&self) -> &Counts {
        &self.shared.counts
    }

    /// At most `max` events after `since`, and whether some between were dropped or `since` was never given
    /// out.
    pub async fn events(&self, since: u64, max: u32) -> Result<(Vec<Event>, bool), StoreError> {
        self.request(|answer| Request::Ask(Ask::Events(since, max, answer))).await
    }

    /// Events as they are committed, in order.
    pub fn subscribe(&self) -> broadcast::Receiver<Arc<Event>> {
        self.shared.events.subscribe()
    }

    /// A round trip to the journal's thread and a read: the watchdog's question.
    pub async fn ping(&self) -> Result<(), StoreError> {
        self.request(|answer| Request::Ask(Ask::Ping(answer))).await
    }

    /// Sync everything, move the log into the file and end the thread; later requests get `Gone`.
    pub async fn close(&self) -> Result<(), StoreError> {
        self.request(|answer| Request::Ask(Ask::Close(answer))).await?;
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // It has answered as its last act, so this does not block.
        thread.map_or(Ok(()), |thread| thread.join().map_err(|_| StoreError::Gone))
    }

    /// Random, made with the journal: another one makes every cursor void.
    pub fn journal_id(&self) -> &str {
        &self.shared.journal_id
    }

    /// This host's name in claims.
    pub fn node(&self) -> &str {
        &self.shared.node
    }

    /// The newest event's sequence.
    pub fn event_sequence(&self) -> u64 {
        self.shared.sequence.load(Ordering::Acquire)
    }

    /// Grows with every commit; a row's `modify_index` is that of the commit that wrote it.
    pub fn modify_index(&self) -> u64 {
        self.shared.modify_index.load(Ordering::Acquire)
    }

    async fn request<T>(&self, request: impl FnOnce(Answer<T>) -> Request) -> Result<T, StoreError> {
        let (answer, answered) = oneshot::channel();
        self.requests.send(request(answer)).map_err(|_| StoreError::Gone)?;
        answered.await.map_err(|_| StoreError::Gone)?
    }
}
