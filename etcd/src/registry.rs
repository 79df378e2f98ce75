//! The trait [`Registry`] on etcd.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use csid::store::registry::{
    ClaimFilter, Conflict, HeldVolumes, Listed, ListedClaim, Record, RecordFilter, Registry, RegistryError,
    Swap, VolumeName,
};
use csid::store::rows::NewEvent;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::task::JoinHandle;

use crate::cache::Cache;
use crate::change::{Before, Change, Named};
use crate::client::{Client, Decided};
use crate::error::EtcdError;
use crate::keys::{Keys, Part};
use crate::lists;
use crate::members::EtcdConfig;
use crate::stored::{Head, Stored};
use crate::watcher;
use crate::wire::event::EventType;
use crate::wire::response_op::Response;
use crate::wire::{KeyValue, RangeRequest, TxnResponse};

/// How long a change waits for the cache to have the record it changes, before it asks etcd.
const CACHE_WAIT: Duration = Duration::from_millis(50);

/// Keeps the events of a change that is committed. The change is answered after that. The events of a change whose outcome stays
/// unknown are not kept.
pub type KeepEvents = Box<dyn Fn(Vec<NewEvent>) -> BoxFuture<'static, ()> + Send + Sync>;

/// The registry of a cluster.
pub struct EtcdRegistry {
    inner: Arc<Inner>,
    watcher: JoinHandle<()>,
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
        let keys = Keys::new(prefix);
        let client = Arc::new(Client::new(config)?);
        let cache = Arc::new(Cache::new(keys.clone(), *timing));
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
        Ok(EtcdRegistry { inner: Arc::new(inner), watcher })
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
            let revision = inner.swap(&swap).await?;
            if !events.is_empty() {
                (inner.events)(events).await;
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
    /// Reads a volume of etcd.
    async fn stored(&self, name: &VolumeName) -> Result<Stored, EtcdError> {
        let (key, range_end) = self.keys.volume(name);
        let request = RangeRequest { key, range_end, ..RangeRequest::default() };
        let found = self.client.range("read a volume's record", request).await?;
        Ok(Stored::read(&self.keys, name, &found.kvs))
    }

    /// Reads a volume of etcd; an error if not all of it can be read.
    async fn readable(&self, name: &VolumeName) -> Result<Stored, EtcdError> {
        let stored = self.stored(name).await?;
        match stored.unreadable(&self.keys) {
            Some(error) => Err(error),
            None => Ok(stored),
        }
    }

    /// Returns all volumes, with this registry's own changes.
    async fn volumes(&self) -> Result<std::sync::RwLockReadGuard<'_, crate::cache::Volumes>, EtcdError> {
        self.cache.at_least(self.written.load(Ordering::Acquire)).await
    }

    async fn swap(&self, swap: &Swap) -> Result<u64, RegistryError> {
        let found = self.before(swap).await?;
        let id = format!("{:016x}{:016x}", self.id, self.changes.fetch_add(1, Ordering::Relaxed));
        let change = Change::of(&self.keys, swap, found, id)?;
        let head = || self.keys.part(&swap.before.name, &Part::Head);
        let revision = match self.client.txn("change a volume's record", &change.txn).await? {
            Decided::Committed { revision } => revision,
            Decided::Compared { answers, open: false } => return Err(self.conflict(swap, &answers)),
            Decided::Compared { answers, open: true } => match self.made(&change, head()).await? {
                Some(revision) => revision,
                None => return Err(self.conflict(swap, &answers)),
            },
            Decided::Full { open } => match self.made(&change, head()).await? {
                Some(revision) => revision,
                None if open => return Err(EtcdError::FullAndOpen.into()),
                None => return Err(EtcdError::Full.into()),
            },
        };
        if !change.is_nothing() {
            self.written.fetch_max(revision, Ordering::AcqRel);
        }
        Ok(revision)
    }

    /// Returns what etcd has of the record that is to change.
    async fn before(&self, swap: &Swap) -> Result<Before, RegistryError> {
        let Record { name, revision, .. } = &swap.before;
        if *revision == 0 {
            let key = self.keys.gone(&self.keys.external(&swap.after.volume));
            let request = RangeRequest { key, ..RangeRequest::default() };
            let found = self.client.range("read the deletions of volumes", request).await?;
            return Ok(Before::Absent(found.kvs.first().map_or(0, revision_of)));
        }
        let stale = || RegistryError::from(Conflict::Stale);
        let mut is_seen = false;
        if let Some(volumes) = self.cache.soon(*revision, CACHE_WAIT).await {
            is_seen = true;
            if let Some(stored) = volumes.by_name.get(name) {
                match stored.record.revision {
                    found if found == *revision => {
                        return Ok(Before::Present(Box::new(Stored::clone(stored))));
                    }
                    // No later change brings the revision back.
                    found if found > *revision => return Err(stale()),
                    _ => {}
                }
            }
        }
        let stored = self.stored(name).await?;
        if stored.record.revision != *revision {
            return Err(stale());
        }
        if is_seen {
            // etcd has the record, and the cache should.
            self.cache.doubt();
        }
        Ok(Before::Present(Box::new(stored)))
    }

    /// Returns the reason why the comparison of a transaction failed.
    fn conflict(&self, swap: &Swap, answers: &TxnResponse) -> RegistryError {
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
        let Some(taken) = kvs.iter().find(|kv| kv.key != head) else { return Conflict::Stale.into() };
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

    /// Returns the revision of a change of which some try may have been committed. `None`: none was.
    async fn made(&self, change: &Change, head: Vec<u8>) -> Result<Option<u64>, EtcdError> {
        let step = "read what became of a change";
        let read = async |revision: i64| {
            let request = RangeRequest { key: head.clone(), revision, ..RangeRequest::default() };
            let found = self.client.range(step, request).await?;
            Ok::<_, EtcdError>(found.kvs.into_iter().next())
        };
        let now = read(0).await?;
        if let Some(found) = now.as_ref().filter(|kv| is_by(kv, &change.id)) {
            return Ok(Some(revision_of(found)));
        }
        if change.before == 0 {
            // It made the volume's first head, if any.
            let Some(now) = now else { return Ok(None) };
            let first = read(now.create_revision).await?;
            return Ok(first.filter(|kv| is_by(kv, &change.id)).as_ref().map(revision_of));
        }
        if now.is_some_and(|kv| revision_of(&kv) == change.before) {
            return Ok(None);
        }
        // Only the first change of the head after that revision can be this one.
        let watched = async {
            let mut watch = self.client.watch(head.clone(), Vec::new(), change.before + 1).await?;
            loop {
                if let Some(events) = watch.next().await? {
                    return Ok::<_, EtcdError>(events);
                }
                self.client.leave(&watch);
                watch = self.client.watch(head.clone(), Vec::new(), change.before + 1).await?;
            }
        };
        let limit = self.client.timing.request;
        let events = tokio::time::timeout(limit, watched).await.map_err(|_| EtcdError::Unreachable {
            step,
            waited: limit,
            last: "the history of the record has not come".into(),
        })??;
        let first = events.into_iter().next();
        Ok(first.and_then(|event| {
            let is_ours = match EventType::try_from(event.r#type) {
                Ok(EventType::Delete) => change.deletes,
                _ => event.kv.as_ref().is_some_and(|kv| is_by(kv, &change.id)),
            };
            event.kv.filter(|_| is_ours).as_ref().map(revision_of)
        }))
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
