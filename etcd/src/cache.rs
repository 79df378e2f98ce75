//! All volumes as of one revision, in memory. Lists are read from it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use csid::store::registry::{HeldIndex, VolumeName};
use futures_util::FutureExt;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::by_node::NodeIndex;
use crate::by_owner::OwnerIndex;
use crate::error::EtcdError;
use crate::keys::{Keys, RowKey};
use crate::members::Timing;
use crate::stored::Stored;
use crate::wire::event::EventType;
use crate::wire::{Event, KeyValue};

/// A change needs the history after the revision at which its record was read. etcd keeps an hour of it. So a record in a cache
/// without an event for longer than this is read of etcd.
const FRESH: Duration = Duration::from_secs(600);

pub(crate) struct Cache {
    pub keys: Keys,
    timing: Timing,
    volumes: RwLock<Volumes>,
    /// When the last event of each server's row came, by the server's ID.
    beats: Mutex<HashMap<String, Instant>>,
    /// The revision of the last change of a node's row, or of a later list.
    nodes: AtomicU64,
    followed: watch::Sender<Followed>,
    /// Notified by a reader that waits in vain, or finds the cache wrong. All is listed again then.
    doubted: Notify,
    /// How often all volumes were listed.
    lists: AtomicU64,
}

/// What the task that keeps the cache has done.
#[derive(Clone, Copy)]
enum Followed {
    /// The volumes are being listed.
    Listing,
    /// The volumes are those of this revision, which came at this time.
    Until(u64, Instant),
    /// The task has ended, or panicked.
    Ended,
}

/// The volumes at one revision of etcd. The indexes share the names with `by_name`.
#[derive(Default)]
pub(crate) struct Volumes {
    pub revision: u64,
    pub by_name: BTreeMap<Arc<VolumeName>, Arc<Stored>>,
    pub held: HeldIndex,
    pub by_node: NodeIndex,
    pub by_owner: OwnerIndex,
    /// Volumes that AttachVolume has attached.
    pub by_call: BTreeSet<VolumeName>,
    /// Volumes with work that is not done.
    pub restless: BTreeSet<Arc<VolumeName>>,
    /// Volumes with a value that cannot be read.
    pub unreadable: BTreeSet<VolumeName>,
}

impl Cache {
    pub fn new(keys: Keys, timing: Timing) -> Self {
        Cache {
            keys,
            timing,
            volumes: RwLock::default(),
            beats: Mutex::default(),
            nodes: AtomicU64::new(0),
            followed: watch::channel(Followed::Listing).0,
            doubted: Notify::new(),
            lists: AtomicU64::new(0),
        }
    }

    /// Returns the volumes at `revision` or a later one.
    pub async fn at_least(&self, revision: u64) -> Result<RwLockReadGuard<'_, Volumes>, EtcdError> {
        let is_there = |followed: &Followed| !followed.is_before(revision);
        let mut followed = self.followed.subscribe();
        let is_late = tokio::time::timeout(self.timing.answer, followed.wait_for(is_there)).await.is_err();
        if is_late {
            // The watch may have lost its place, or its member. A list that is under way has the revision.
            if matches!(*self.followed.borrow(), Followed::Until(..)) {
                self.doubt();
            }
            let rest = self.timing.request.saturating_sub(self.timing.answer);
            if tokio::time::timeout(rest, followed.wait_for(is_there)).await.is_err() {
                return Err(EtcdError::Unreachable {
                    step: "follow the volumes",
                    waited: self.timing.request,
                    last: format!("the revision {revision} has not come"),
                });
            }
        }
        match *self.followed.borrow() {
            Followed::Ended => Err(EtcdError::Ended),
            _ => Ok(self.read()),
        }
    }

    /// Returns whether the volumes come to `revision` in time. Nobody vouches for it, so it is no reason to list them again.
    pub async fn comes_to(&self, revision: u64, wait: Duration) -> Result<bool, EtcdError> {
        let mut followed = self.followed.subscribe();
        let there = followed.wait_for(|followed| !followed.is_before(revision));
        match tokio::time::timeout(wait, there).await.map(|followed| followed.map(|followed| *followed)) {
            Err(_) => Ok(false),
            Ok(Ok(Followed::Until(..))) => Ok(true),
            Ok(_) => Err(EtcdError::Ended),
        }
    }

    /// Returns the present volumes if they come to `revision` soon, and etcd can be asked for the history after them.
    pub async fn soon(&self, revision: u64, wait: Duration) -> Option<RwLockReadGuard<'_, Volumes>> {
        let is_there = |followed: &Followed| !followed.is_before(revision);
        let mut followed = self.followed.subscribe();
        match *tokio::time::timeout(wait, followed.wait_for(is_there)).await.ok()?.ok()? {
            Followed::Until(_, came) if came.elapsed() < FRESH => Some(self.read()),
            _ => None,
        }
    }

    /// Waits for a revision after `index`, and returns it. `None`: none will come.
    pub async fn after(&self, index: u64) -> Option<u64> {
        let mut followed = self.followed.subscribe();
        match *followed.wait_for(|followed| !followed.is_before(index.saturating_add(1))).await.ok()? {
            Followed::Until(revision, _) => Some(revision),
            Followed::Listing | Followed::Ended => None,
        }
    }

    /// Has all volumes listed again.
    pub fn doubt(&self) {
        self.doubted.notify_one();
    }

    pub async fn is_doubted(&self) {
        self.doubted.notified().await;
    }

    /// Has lists wait until the volumes are listed again.
    pub fn forget(&self) {
        self.followed.send_replace(Followed::Listing);
    }

    /// Takes over a list of all keys. Doubts of the volumes before it are settled.
    pub fn replace(&self, volumes: Volumes) {
        let revision = volumes.revision;
        *self.write() = volumes;
        self.nodes.store(revision, Ordering::Release);
        self.lists.fetch_add(1, Ordering::Relaxed);
        // Rows may have been deleted that no event has named.
        self.beats.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let _ = self.doubted.notified().now_or_never();
        self.followed.send_replace(Followed::Until(revision, Instant::now()));
    }

    /// Takes over changes, all of each revision. Returns the newest revision.
    pub fn apply(&self, events: &[Event]) -> u64 {
        let revision = self.write().apply(&self.keys, events);
        self.notice_rows(events);
        self.followed.send_replace(Followed::Until(revision, Instant::now()));
        revision
    }

    fn notice_rows(&self, events: &[Event]) {
        let mut beats = self.beats.lock().unwrap_or_else(PoisonError::into_inner);
        for Event { r#type, kv } in events {
            let key = kv.as_ref().and_then(|kv| self.keys.read_row(&kv.key));
            match (key, EventType::try_from(*r#type)) {
                (Some(RowKey::Server(id)), Ok(EventType::Delete)) => drop(beats.remove(&id)),
                (Some(RowKey::Server(id)), _) => drop(beats.insert(id, Instant::now())),
                (Some(RowKey::Node(_)), _) => {
                    let revision = kv.as_ref().and_then(|kv| u64::try_from(kv.mod_revision).ok());
                    self.nodes.store(revision.unwrap_or(0), Ordering::Release);
                }
                _ => {}
            }
        }
    }

    /// Returns how long ago the last event of a server's row came. `None`: none has come since the volumes were listed.
    pub fn since_beat(&self, server: &str) -> Option<Duration> {
        let beats = self.beats.lock().unwrap_or_else(PoisonError::into_inner);
        beats.get(server).map(Instant::elapsed)
    }

    /// Returns the revision of the last change of a node's row that has come. After a list it is the list's.
    pub fn nodes_changed(&self) -> u64 {
        self.nodes.load(Ordering::Acquire)
    }

    /// Returns how often all volumes were listed, and how many there are.
    pub fn size(&self) -> (u64, usize) {
        (self.lists.load(Ordering::Relaxed), self.read().by_name.len())
    }

    /// Has readers end.
    pub fn end(&self) {
        self.followed.send_replace(Followed::Ended);
    }

    fn read(&self) -> RwLockReadGuard<'_, Volumes> {
        self.volumes.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Volumes> {
        self.volumes.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Followed {
    /// Returns whether the revision may come and has not.
    fn is_before(&self, revision: u64) -> bool {
        match self {
            Followed::Listing => true,
            Followed::Until(at, _) => *at < revision,
            Followed::Ended => false,
        }
    }
}

impl Volumes {
    /// Adds keys of a list. [`Volumes::listed`] follows the last ones.
    pub fn add(&mut self, keys: &Keys, kvs: &[KeyValue]) {
        for kv in kvs {
            if let Some((name, part)) = keys.read(&kv.key) {
                Arc::make_mut(self.volume(name)).put(part, kv);
            }
        }
    }

    /// Returns the volume of this name. It has no keys yet if it is not known.
    fn volume(&mut self, name: VolumeName) -> &mut Arc<Stored> {
        let none = |name: &Arc<VolumeName>| Stored::none(VolumeName::clone(name)).into();
        self.by_name.entry(name.into()).or_insert_with_key(none)
    }

    pub fn listed(&mut self, keys: &Keys, revision: u64) {
        self.revision = revision;
        for name in self.by_name.keys().cloned().collect::<Vec<_>>() {
            self.settle(keys, &name, None);
        }
    }

    fn apply(&mut self, keys: &Keys, events: &[Event]) -> u64 {
        let mut changed: BTreeMap<VolumeName, Option<Arc<Stored>>> = BTreeMap::new();
        for Event { r#type, kv } in events {
            let Some(kv) = kv else { continue };
            self.revision = self.revision.max(u64::try_from(kv.mod_revision).unwrap_or(0));
            let Some((name, part)) = keys.read(&kv.key) else { continue };
            changed.entry(name.clone()).or_insert_with(|| self.by_name.get(&name).cloned());
            let volume = Arc::make_mut(self.volume(name));
            match EventType::try_from(*r#type) {
                Ok(EventType::Delete) => volume.delete(&part),
                _ => volume.put(part, kv),
            }
        }
        for (name, before) in changed {
            self.settle(keys, &name, before);
        }
        self.revision
    }

    /// Brings a volume whose keys have changed to its end, and the indexes with it.
    fn settle(&mut self, keys: &Keys, name: &VolumeName, before: Option<Arc<Stored>>) {
        let before = before.unwrap_or_else(|| Stored::none(name.clone()).into());
        let Some((shared, _)) = self.by_name.get_key_value(name) else { return };
        let shared = shared.clone();
        let Some(volume) = self.by_name.get_mut(name) else { return };
        Arc::make_mut(volume).finish();
        self.held.change(&shared, &before.record, &volume.record);
        self.by_node.change(&shared, &before.record.claims, &volume.record.claims);
        self.by_node.change_queue(&before.record.queue, &volume.record.queue);
        let [had, has] = [&before.record, &volume.record].map(|of| of.registration.as_ref());
        self.by_owner.change(had.map(|of| of.owner.as_str()), has.map(|of| of.owner.as_str()));
        match volume.record.attachments.iter().any(|at| at.by_call.is_some()) {
            true => self.by_call.insert(name.clone()),
            false => self.by_call.remove(name),
        };
        match volume.record.is_restless() {
            true => self.restless.insert(shared),
            false => self.restless.remove(name),
        };
        match volume.unreadable(keys) {
            Some(_) => self.unreadable.insert(name.clone()),
            None => self.unreadable.remove(name),
        };
        if volume.is_none() {
            self.by_name.remove(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Part;

    fn cache() -> Cache {
        let timing = Timing {
            first_answer: Duration::from_millis(5),
            answer: Duration::from_millis(5),
            request: Duration::from_millis(20),
        };
        Cache::new(Keys::new("/csid/"), timing)
    }

    fn is_doubted(cache: &Cache) -> bool {
        cache.doubted.notified().now_or_never().is_some()
    }

    #[tokio::test]
    async fn late_list_is_not_begun_again() {
        let cache = cache();
        assert!(matches!(cache.at_least(1).await, Err(EtcdError::Unreachable { .. })));
        assert!(!is_doubted(&cache), "a list under way was doubted");
        cache.replace(Volumes::default());
        assert!(matches!(cache.at_least(1).await, Err(EtcdError::Unreachable { .. })));
        cache.replace(Volumes::default());
        assert!(!is_doubted(&cache), "the new list was doubted");
        assert_eq!(cache.size(), (2, 0));
        assert!(cache.at_least(1).await.is_err() && is_doubted(&cache));
    }

    #[tokio::test]
    async fn revision_that_never_comes_doubts_nothing() {
        let cache = cache();
        let wait = Duration::from_millis(5);
        assert!(!cache.comes_to(0, wait).await.unwrap(), "a list under way is none");
        cache.replace(Volumes { revision: 7, ..Volumes::default() });
        for (revision, due) in [(0, true), (7, true), (8, false), (u64::MAX, false)] {
            assert_eq!(cache.comes_to(revision, wait).await.unwrap(), due, "{revision}");
        }
        assert!(!is_doubted(&cache), "a caller's revision was believed");
        cache.end();
        assert!(matches!(cache.comes_to(8, wait).await, Err(EtcdError::Ended)));
    }

    #[test]
    fn beat_of_a_server_is_forgotten_with_its_row() {
        let cache = cache();
        let event = |kind: EventType, key: &RowKey| {
            let kv = KeyValue { key: cache.keys.row(key), mod_revision: 7, ..KeyValue::default() };
            Event { r#type: kind.into(), kv: Some(kv) }
        };
        let server = RowKey::Server("a".into());
        cache.apply(&[event(EventType::Put, &server), event(EventType::Put, &RowKey::Node("b".into()))]);
        assert!(cache.since_beat("a").is_some() && cache.since_beat("b").is_none());
        cache.apply(&[event(EventType::Delete, &server)]);
        assert_eq!(cache.since_beat("a"), None);
        cache.apply(&[event(EventType::Put, &server)]);
        cache.replace(Volumes::default());
        assert_eq!(cache.since_beat("a"), None, "the row may be gone");
    }

    #[test]
    fn change_of_a_nodes_row_is_noticed() {
        let cache = cache();
        let event = |kind: EventType, key: &RowKey, mod_revision: i64| {
            let kv = KeyValue { key: cache.keys.row(key), mod_revision, ..KeyValue::default() };
            Event { r#type: kind.into(), kv: Some(kv) }
        };
        cache.replace(Volumes { revision: 7, ..Volumes::default() });
        assert_eq!(cache.nodes_changed(), 7, "a row may have changed before the list");
        let (first, last) = cache.keys.followed();
        for (revision, key) in (8..).zip([RowKey::Server("a".into()), RowKey::Report("n1".into())]) {
            cache.apply(&[event(EventType::Put, &key, revision)]);
            assert_eq!(cache.nodes_changed(), 7, "{key:?}");
        }
        for (revision, kind) in [(10, EventType::Put), (11, EventType::Delete)] {
            let node = RowKey::Node("n1".into());
            assert!((first.clone()..last.clone()).contains(&cache.keys.row(&node)), "it is not followed");
            cache.apply(&[event(kind, &node, revision)]);
            assert_eq!(cache.nodes_changed(), revision as u64);
        }
    }

    #[test]
    fn volume_is_listed_while_its_work_is_not_done() {
        let cache = cache();
        let name = csid::store::testing::samples::name("data");
        let event = |kind: EventType, driver: Option<serde_json::Value>| {
            let value = serde_json::json!({"volume": ["local", "v1"], "driver": driver});
            let (key, value) = (cache.keys.part(&name, &Part::Head), value.to_string().into_bytes());
            Event { r#type: kind.into(), kv: Some(KeyValue { key, value, ..KeyValue::default() }) }
        };
        let restless = || crate::lists::restless(&cache.read()).len();
        let driver = serde_json::json!({"server": "a", "host": "n1"});
        for (event, due) in [
            (event(EventType::Put, None), 0),
            (event(EventType::Put, Some(driver.clone())), 1),
            (event(EventType::Put, None), 0),
            (event(EventType::Put, Some(driver)), 1),
            (event(EventType::Put, Some("unreadable".into())), 0),
            (event(EventType::Delete, None), 0),
        ] {
            cache.apply(std::slice::from_ref(&event));
            assert_eq!(restless(), due, "{event:?}");
        }
        assert!(cache.read().restless.is_empty(), "a volume that is gone takes memory");
    }

    #[tokio::test]
    async fn reader_of_an_ended_cache_ends() {
        let cache = cache();
        let waits = async {
            tokio::task::yield_now().await;
            cache.end();
        };
        let (index, ()) = tokio::join!(cache.after(0), waits);
        assert_eq!(index, None);
        assert!(matches!(cache.at_least(0).await, Err(EtcdError::Ended)));
    }
}
