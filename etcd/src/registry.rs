//! The trait [`Registry`] on etcd.

use std::collections::BTreeMap;
use std::io::Read;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use csid::store::registry::{
    ClaimFilter, Conflict, HeldVolumes, Listed, ListedClaim, Record, RecordFilter, Registry, RegistryError,
    Swap, VolumeName, claim_changes,
};
use csid::store::rows::NewEvent;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::cache::Cache;
use crate::change::{Before, Change, Named};
use crate::client::{Client, Decided};
use crate::error::EtcdError;
use crate::guard::Guard;
use crate::keys::{Keys, Part, RowKey};
use crate::listing::{self, ClaimInList, ClaimsAfter, LeftOut, ListFilter, ListPart};
use crate::lists;
use crate::members::{EtcdConfig, Timing};
use crate::observe::Observe;
use crate::rows::{RowStore, Write, broken};
use crate::stored::{Head, Stored};
use crate::walk::Walk;
use crate::watcher;
use crate::wire::event::EventType;
use crate::wire::response_op::Response;
use crate::wire::{Event, KeyValue, RangeRequest, TxnResponse};

/// How long a change waits for the cache to have the record it changes, before it asks etcd.
const CACHE_WAIT: Duration = Duration::from_millis(50);

/// The least time between two warnings of volumes that lists leave out.
const BETWEEN_WARNINGS: Duration = Duration::from_secs(60);

const BECAME: &str = "read what became of a change";

/// Keeps the events of a change that is committed. The change is answered after that. The events of a change whose outcome stays
/// unknown are not kept.
pub type KeepEvents = Box<dyn Fn(Vec<NewEvent>) -> BoxFuture<'static, ()> + Send + Sync>;

/// What became of a change with guards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Swapped {
    /// The record has this revision.
    Done(u64),
    /// These rows, at least one, are not as guards expect. The change was not made, and no try of it will be.
    Refused(Vec<RowKey>),
}

/// The registry of a cluster.
pub struct EtcdRegistry {
    inner: Arc<Inner>,
    watcher: JoinHandle<()>,
    /// When the log had last what lists leave out.
    warned: Mutex<Option<Instant>>,
}

struct Inner {
    keys: Keys,
    client: Arc<Client>,
    cache: Arc<Cache>,
    events: KeepEvents,
    /// The newest change of this registry. Lists have it.
    written: AtomicU64,
    /// The first half of the names of this registry's changes, and the next one's second half.
    id: u64,
    changes: AtomicU64,
}

impl EtcdRegistry {
    /// Begins to list the volumes, in a task of the present runtime. Lists wait for that. `events` gets the events of each change
    /// after its commit.
    pub fn start(config: &EtcdConfig, events: KeepEvents) -> Result<Self, EtcdError> {
        let EtcdConfig { prefix, timing, .. } = config;
        if !(prefix.starts_with('/') && prefix.ends_with('/')) {
            return Err(EtcdError::Prefix { prefix: prefix.clone() });
        }
        Self::follow(Client::new(config)?, prefix, *timing, events)
    }

    /// Does the same by connections that are there.
    #[cfg(feature = "double")]
    pub fn start_at(
        connections: Vec<crate::double::Connection>,
        prefix: &str,
        timing: Timing,
        events: KeepEvents,
    ) -> Result<Self, EtcdError> {
        Self::follow(Client::at(connections, timing), prefix, timing, events)
    }

    fn follow(client: Client, prefix: &str, timing: Timing, events: KeepEvents) -> Result<Self, EtcdError> {
        let keys = Keys::new(prefix);
        let client = Arc::new(client);
        let cache = Arc::new(Cache::new(keys.clone(), timing));
        let watcher = tokio::spawn(watcher::run(client.clone(), cache.clone()));
        let inner = Inner {
            keys,
            client,
            cache,
            events,
            written: AtomicU64::new(0),
            id: random()?,
            changes: AtomicU64::new(0),
        };
        Ok(EtcdRegistry { inner: Arc::new(inner), watcher, warned: Mutex::default() })
    }

    /// Has the work with etcd reported. Only the first call has an effect.
    pub fn observe(&self, observe: Arc<dyn Observe>) {
        self.inner.client.observer.set(observe);
    }

    /// Returns how often all volumes were listed, and how many the lists have. It does not wait for a list that is under way.
    pub fn size(&self) -> (u64, usize) {
        self.inner.cache.size()
    }

    /// Returns the rows that are not volumes.
    pub fn rows(&self) -> RowStore {
        RowStore { keys: self.inner.keys.clone(), client: self.inner.client.clone() }
    }

    /// Begins a walk over all rows.
    pub fn walk(&self) -> Walk {
        Walk::new(self.inner.keys.clone(), self.inner.client.clone())
    }

    /// Changes a record as [`Registry::swap`] does, if the guards hold at the same moment.
    pub async fn swap_guarded(&self, swap: Swap, guards: Vec<Guard>) -> Result<Swapped, RegistryError> {
        self.swap_with(swap, guards, Vec::new()).await
    }

    /// Does the same, and writes rows in the same transaction.
    pub async fn swap_with(
        &self,
        swap: Swap,
        guards: Vec<Guard>,
        writes: Vec<Write>,
    ) -> Result<Swapped, RegistryError> {
        let inner = self.inner.clone();
        // A caller that gives up withdraws nothing.
        let swapped = tokio::spawn(async move { inner.swap(&swap, &guards, &writes).await });
        swapped.await.unwrap_or_else(|error| Err(RegistryError::Ended(error.into())))
    }

    /// Waits until lists have this revision.
    pub async fn reached(&self, revision: u64) -> Result<(), EtcdError> {
        self.inner.cache.at_least(revision).await.map(drop)
    }

    /// Returns whether lists come to a revision in time. It may be one that etcd does not have.
    pub async fn comes_to(&self, revision: u64, wait: Duration) -> Result<bool, EtcdError> {
        self.inner.cache.comes_to(revision, wait).await
    }

    /// Returns a record as lists have it, and the revision of the lists. They have all changes of this registry. `None`: they have no such
    /// record.
    pub async fn listed(&self, name: &VolumeName) -> Result<(Option<Record>, u64), EtcdError> {
        let volumes = self.inner.volumes().await?;
        let stored = volumes.by_name.get(name);
        let record = stored.map(|stored| lists::readable(&self.inner.keys, stored)).transpose()?;
        Ok((record.cloned(), volumes.revision))
    }

    /// Returns how long ago the row of a server was last written, as this registry has seen it. `None`: it has seen no write yet.
    pub fn since_beat(&self, server: &str) -> Option<Duration> {
        self.inner.cache.since_beat(server)
    }

    /// Returns a revision that is another one after each change of a node's row that lists have.
    pub fn nodes_changed(&self) -> u64 {
        self.inner.cache.nodes_changed()
    }

    /// Returns the number of a node's claims.
    pub async fn claims_of(&self, node: &str) -> Result<usize, EtcdError> {
        Ok(self.inner.volumes().await?.by_node.claims(node))
    }

    /// Returns the number of a node's claims that wait.
    pub async fn queued_of(&self, node: &str) -> Result<usize, EtcdError> {
        Ok(self.inner.volumes().await?.by_node.queued(node))
    }

    /// Returns the number of volumes that an identity has registered.
    pub async fn registered_by(&self, owner: &str) -> Result<usize, EtcdError> {
        Ok(self.inner.volumes().await?.by_owner.volumes(owner))
    }

    /// Returns the number of a plugin's volumes that a node holds, as far as volumes can be read.
    pub async fn held_by(&self, plugin: &str, node: &str) -> Result<usize, EtcdError> {
        Ok(self.inner.volumes().await?.held.of(plugin, node, 0).count)
    }

    /// Returns the revision that lists have.
    pub async fn index(&self) -> Result<u64, EtcdError> {
        Ok(self.inner.volumes().await?.revision)
    }

    /// Returns a part of the volumes after one, ordered by name, with at most `most` rows. `sees`: whether the caller sees a namespace.
    pub async fn volume_list(
        &self,
        filter: &ListFilter,
        after: Option<&VolumeName>,
        most: usize,
        sees: impl Fn(&str) -> bool,
    ) -> Result<ListPart<Record, VolumeName>, EtcdError> {
        let volumes = self.inner.volumes().await?;
        let part = listing::volumes(&self.inner.keys, &volumes, filter, after, most, &sees);
        self.warn_of(&part.left_out);
        Ok(part)
    }

    /// Returns a part of the claims after one, ordered by volume, node and consumer, with at most `most` rows.
    pub async fn claim_list(
        &self,
        filter: &ListFilter,
        after: Option<&ClaimsAfter>,
        most: usize,
        sees: impl Fn(&str) -> bool,
    ) -> Result<ListPart<ClaimInList, ClaimsAfter>, EtcdError> {
        let volumes = self.inner.volumes().await?;
        let part = listing::claims(&self.inner.keys, &volumes, filter, after, most, &sees);
        self.warn_of(&part.left_out);
        Ok(part)
    }

    /// Returns the volumes with work that is not done, and the revision at which they were read. Volumes that cannot be read are left out.
    pub async fn restless(&self) -> Result<(Vec<Record>, u64), EtcdError> {
        let volumes = self.inner.volumes().await?;
        Ok((lists::restless(&volumes), volumes.revision))
    }

    /// Does the same. Fails if a volume cannot be read, for it may have such work.
    pub async fn all_restless(&self) -> Result<Vec<Record>, EtcdError> {
        let volumes = self.inner.volumes().await?;
        lists::all_readable(&self.inner.keys, &volumes)?;
        Ok(lists::restless(&volumes))
    }

    /// Returns the volumes that AttachVolume has attached and that match. Volumes that cannot be read are left out.
    pub async fn attached_by_call(
        &self,
        is_wanted: impl Fn(&Record) -> bool,
    ) -> Result<Vec<Record>, EtcdError> {
        Ok(lists::attached_by_call(&*self.inner.volumes().await?, is_wanted))
    }

    /// Logs what a list has left out, without its content, and at most once a minute.
    fn warn_of(&self, LeftOut { count, first }: &LeftOut) {
        let Some((_, key)) = first else { return };
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        if warned.is_none_or(|warned| warned.elapsed() >= BETWEEN_WARNINGS) {
            *warned = Some(Instant::now());
            tracing::warn!(
                count,
                key,
                "a list leaves out volumes that cannot be read; the first one's key is named"
            );
        }
    }
}

impl Drop for EtcdRegistry {
    fn drop(&mut self) {
        self.watcher.abort();
    }
}

impl Registry for EtcdRegistry {
    fn record(&self, name: VolumeName) -> BoxFuture<'_, Result<Record, RegistryError>> {
        async move { Ok(self.inner.readable(&name).await?.record) }.boxed()
    }

    fn swap(&self, swap: Swap, events: Vec<NewEvent>) -> BoxFuture<'_, Result<u64, RegistryError>> {
        let inner = self.inner.clone();
        let swapped = async move {
            let revision = match inner.swap(&swap, &[], &[]).await? {
                Swapped::Done(revision) => revision,
                Swapped::Refused(_) => return Err(Conflict::Stale.into()),
            };
            if !events.is_empty() {
                let kept = AssertUnwindSafe(async { (inner.events)(events).await }).catch_unwind().await;
                if kept.is_err() {
                    tracing::error!(
                        revision,
                        "the events of a change were not kept: what keeps them panicked"
                    );
                }
            }
            Ok(revision)
        };
        // A caller that gives up withdraws nothing. The events of the change are not lost with it.
        async move {
            tokio::spawn(swapped).await.unwrap_or_else(|error| Err(RegistryError::Ended(error.into())))
        }
        .boxed()
    }

    fn sync(&self) -> BoxFuture<'_, Result<(), RegistryError>> {
        // etcd answers a change after a majority has synced it.
        std::future::ready(Ok(())).boxed()
    }

    fn records(&self, filter: RecordFilter) -> BoxFuture<'_, Listed<Record>> {
        async move {
            let volumes = self.inner.volumes().await?;
            Ok((lists::records(&self.inner.keys, &volumes, &filter)?, volumes.revision))
        }
        .boxed()
    }

    fn held(
        &self,
        plugin: &str,
        node: &str,
        most: usize,
    ) -> BoxFuture<'_, Result<HeldVolumes, RegistryError>> {
        let (plugin, node) = (plugin.to_owned(), node.to_owned());
        async move {
            let volumes = self.inner.volumes().await?;
            lists::all_readable(&self.inner.keys, &volumes)?;
            Ok(volumes.held.of(&plugin, &node, most))
        }
        .boxed()
    }

    fn claims(&self, filter: ClaimFilter) -> BoxFuture<'_, Listed<ListedClaim>> {
        async move {
            let volumes = self.inner.volumes().await?;
            Ok((lists::claims(&self.inner.keys, &volumes, &filter)?, volumes.revision))
        }
        .boxed()
    }

    fn claim_states(&self) -> BoxFuture<'_, Result<BTreeMap<String, u64>, RegistryError>> {
        async move {
            let volumes = self.inner.volumes().await?;
            Ok(lists::claim_states(&self.inner.keys, &volumes)?)
        }
        .boxed()
    }

    fn changed(&self, index: u64) -> BoxFuture<'_, Result<u64, RegistryError>> {
        async move { self.inner.cache.after(index).await.ok_or_else(|| EtcdError::Ended.into()) }.boxed()
    }
}

impl Inner {
    /// Reads a volume of etcd. Returns it with the revision of etcd.
    async fn stored(&self, name: &VolumeName) -> Result<(Stored, u64), EtcdError> {
        let (key, range_end) = self.keys.volume(name);
        let request = RangeRequest { key, range_end, ..RangeRequest::default() };
        let found = self.client.range("read a volume's record", request).await?;
        Ok((Stored::read(&self.keys, name, &found.kvs), found.revision))
    }

    /// Reads a volume of etcd; an error if not all of it can be read.
    async fn readable(&self, name: &VolumeName) -> Result<Stored, EtcdError> {
        let (stored, _) = self.stored(name).await?;
        match stored.unreadable(&self.keys) {
            Some(error) => Err(error),
            None => Ok(stored),
        }
    }

    /// Returns all volumes, with this registry's own changes.
    async fn volumes(&self) -> Result<std::sync::RwLockReadGuard<'_, crate::cache::Volumes>, EtcdError> {
        self.cache.at_least(self.written.load(Ordering::Acquire)).await
    }

    async fn swap(&self, swap: &Swap, guards: &[Guard], writes: &[Write]) -> Result<Swapped, RegistryError> {
        let found = self.before(swap).await?;
        let id = format!("{:016x}{:016x}", self.id, self.changes.fetch_add(1, Ordering::Relaxed));
        let change = Change::of(&self.keys, swap, found, id, guards, writes)?;
        let refused = |answers: &TxnResponse| {
            let keys = broken(&self.keys, guards, &answers.responses);
            (!keys.is_empty()).then_some(Ok(Swapped::Refused(keys)))
        };
        let revision = match self.client.txn("change a volume's record", &change.txn).await? {
            Decided::Committed { revision } => revision,
            Decided::Compared { answers, open: false } => {
                return refused(&answers).unwrap_or_else(|| Err(self.conflict(swap, guards, &answers)));
            }
            Decided::Compared { answers, open: true } => match self.made(&change).await? {
                Some(revision) => revision,
                None => {
                    let conflict = || Err(self.conflict_of_open(swap, guards, &answers));
                    return refused(&answers).unwrap_or_else(conflict);
                }
            },
            Decided::Full { open } => match self.made(&change).await? {
                Some(revision) => revision,
                None if open => {
                    return Err(EtcdError::Open { why: "etcd's database has reached its quota" }.into());
                }
                None => return Err(EtcdError::Full.into()),
            },
        };
        if !change.is_nothing() {
            self.written.fetch_max(revision, Ordering::AcqRel);
            let claims = claim_changes(&swap.before, &swap.after).count();
            self.client.observer.report(|observe| observe.claims(claims));
        }
        Ok(Swapped::Done(revision))
    }

    /// Returns what etcd has of the record that is to change.
    async fn before(&self, swap: &Swap) -> Result<Before, RegistryError> {
        let Record { name, revision, .. } = &swap.before;
        if *revision == 0 {
            let read = |key: Vec<u8>| {
                let request = RangeRequest { key: self.keys.gone(&key), ..RangeRequest::default() };
                self.client.range("read the deletions of volumes", request)
            };
            let head = read(self.keys.part(name, &Part::Head));
            let (head, volume) = tokio::try_join!(head, read(self.keys.external(&swap.after.volume)))?;
            let gone = [&head, &volume].map(|found| found.kvs.first().map_or(0, revision_of));
            return Ok(Before::Absent { gone, seen: head.revision });
        }
        let (mut is_seen, mut is_later) = (false, false);
        if let Some(volumes) = self.cache.soon(*revision, CACHE_WAIT).await {
            is_seen = true;
            match volumes.by_name.get(name) {
                Some(stored) if stored.record.revision == *revision => {
                    let stored = Box::new(Stored::clone(stored));
                    return Ok(Before::Present { stored, seen: volumes.revision });
                }
                stored => is_later = stored.is_some_and(|at| at.record.revision > *revision),
            }
        }
        if is_later {
            // Others were faster, as a rule. A record of many claims is not read for that.
            let request = RangeRequest { key: self.keys.part(name, &Part::Head), ..RangeRequest::default() };
            let head = self.client.range("read the head of a record", request).await?;
            if head.kvs.first().map_or(0, revision_of) != *revision {
                return Err(Conflict::Stale.into());
            }
        }
        let (stored, seen) = self.stored(name).await?;
        if stored.record.revision != *revision {
            return Err(Conflict::Stale.into());
        }
        if is_seen {
            // etcd has the record, and the cache should. A cache that is ahead is of an etcd that was restored since.
            self.cache.doubt();
        }
        Ok(Before::Present { stored: Box::new(stored), seen })
    }

    /// Returns the reason why the comparison of a transaction failed.
    fn conflict(&self, swap: &Swap, guards: &[Guard], answers: &TxnResponse) -> RegistryError {
        let kvs: Vec<&KeyValue> = answers
            .responses
            .iter()
            .filter_map(|answer| match &answer.response {
                Some(Response::ResponseRange(found)) => found.kvs.first(),
                _ => None,
            })
            .collect();
        let head = self.keys.part(&swap.before.name, &Part::Head);
        let revision = kvs.iter().find(|kv| kv.key == head).map_or(0, |kv| kv.mod_revision);
        if u64::try_from(revision) != Ok(swap.before.revision) {
            return Conflict::Stale.into();
        }
        let is_guard = |kv: &KeyValue| guards.iter().any(|guard| self.keys.row(&guard.key) == kv.key);
        let Some(taken) = kvs.iter().find(|kv| kv.key != head && !is_guard(kv)) else {
            return Conflict::Stale.into();
        };
        let unreadable = |why: String| {
            let key = String::from_utf8_lossy(&taken.key).into_owned();
            RegistryError::from(EtcdError::Unreadable { key, why })
        };
        match serde_json::from_slice::<Named>(&taken.value).map(VolumeName::from) {
            Ok(name) if name == swap.before.name => {
                unreadable("the volume is known under this name, and its record does not say so".into())
            }
            Ok(name) => Conflict::Taken(name).into(),
            Err(error) => unreadable(error.to_string()),
        }
    }

    /// Returns the reason why the comparison failed of a transaction whose earlier try is open.
    fn conflict_of_open(&self, swap: &Swap, guards: &[Guard], answers: &TxnResponse) -> RegistryError {
        match self.conflict(swap, guards, answers) {
            // The open try compares the head, which has not changed, and the absence of a key that may be deleted.
            RegistryError::Conflict(Conflict::Taken(_)) if swap.before.revision != 0 => {
                EtcdError::Open { why: "another record has the volume" }.into()
            }
            conflict => conflict,
        }
    }

    /// Returns the revision of a change of which some try may have been committed. `None`: no try is committed yet.
    async fn made(&self, change: &Change) -> Result<Option<u64>, EtcdError> {
        let limit = self.client.timing.request;
        let found =
            tokio::time::timeout(limit, self.find(change)).await.map_err(|_| EtcdError::Unreachable {
                step: BECAME,
                waited: limit,
                last: "the history of the record has not come".into(),
            })?;
        match found {
            Err(EtcdError::Compacted { .. }) => {
                Err(EtcdError::Open { why: "etcd has compacted the history of the record" })
            }
            found => found,
        }
    }

    /// Looks for the change in the head and in the head's history.
    async fn find(&self, change: &Change) -> Result<Option<u64>, EtcdError> {
        let read = async |key: &[u8], revision: u64| {
            let revision = i64::try_from(revision).unwrap_or(i64::MAX);
            let request = RangeRequest { key: key.to_vec(), revision, ..RangeRequest::default() };
            Ok::<_, EtcdError>(self.client.range(BECAME, request).await?.kvs.into_iter().next())
        };
        let now = read(&change.head, 0).await?;
        if let Some(found) = now.as_ref().filter(|kv| is_by(kv, &change.id)) {
            return Ok(Some(revision_of(found)));
        }
        let first = if now.as_ref().map_or(0, revision_of) != change.before {
            self.first(change, change.head.clone(), Vec::new(), u64::MAX).await?
        } else if change.before != 0 {
            None
        } else {
            // The record is not there. It may have been created and deleted.
            let deleted = read(&change.gone, 0).await?.as_ref().map_or(0, revision_of);
            match deleted > change.seen {
                true => {
                    let end = [&change.head[..], &[0]].concat();
                    self.first(change, change.gone.clone(), end, deleted).await?
                }
                false => None,
            }
        };
        let Some((kind, kv)) = first.and_then(|event| Some((event.r#type(), event.kv?))) else {
            return Ok(None);
        };
        let revision = revision_of(&kv);
        let is_ours = match kind {
            EventType::Put => is_by(&kv, &change.id),
            EventType::Delete if change.deletes => {
                read(&change.gone, revision).await?.is_some_and(|kv| kv.value == change.id.as_bytes())
            }
            EventType::Delete => false,
        };
        Ok(is_ours.then_some(revision))
    }

    /// Returns the first event of the head after the revision at which the change was begun. The range has the head, and an event at
    /// `until` or later. `None`: the head has none before that.
    async fn first(
        &self,
        change: &Change,
        key: Vec<u8>,
        range_end: Vec<u8>,
        until: u64,
    ) -> Result<Option<Event>, EtcdError> {
        loop {
            let mut watch = self.client.watch(key.clone(), range_end.clone(), change.seen + 1).await?;
            while let Some(events) = watch.next().await? {
                let newest = events.iter().filter_map(|event| event.kv.as_ref()).map(revision_of).max();
                let is_of_head = |event: &Event| event.kv.as_ref().is_some_and(|kv| kv.key == change.head);
                if let Some(event) = events.into_iter().find(is_of_head) {
                    return Ok(Some(event));
                }
                if newest >= Some(until) {
                    return Ok(None);
                }
            }
            self.client.leave(&watch);
        }
    }
}

/// Returns whether a change wrote this head.
fn is_by(kv: &KeyValue, change: &str) -> bool {
    serde_json::from_slice::<Head>(&kv.value).is_ok_and(|head| head.change == change)
}

fn revision_of(kv: &KeyValue) -> u64 {
    u64::try_from(kv.mod_revision).unwrap_or(0)
}

fn random() -> Result<u64, EtcdError> {
    let mut bytes = [0; 8];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|error| EtcdError::Random { why: error.to_string() })?;
    Ok(u64::from_ne_bytes(bytes))
}
