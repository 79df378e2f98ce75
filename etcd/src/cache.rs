//! All volumes as of one revision, in memory. Lists are read from it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use csid::store::registry::{HeldIndex, VolumeName};
use tokio::sync::{Notify, watch};

use crate::error::EtcdError;
use crate::keys::Keys;
use crate::members::Timing;
use crate::stored::Stored;
use crate::wire::event::EventType;
use crate::wire::{Event, KeyValue};

pub(crate) struct Cache {
    pub keys: Keys,
    timing: Timing,
    volumes: RwLock<Volumes>,
    /// The revision of `volumes`. `None`: they are being listed.
    revision: watch::Sender<Option<u64>>,
    /// Set by a reader that waits in vain, or finds the cache wrong: all is listed again.
    pub doubted: Notify,
}

/// The volumes at one revision of etcd.
#[derive(Default)]
pub(crate) struct Volumes {
    pub revision: u64,
    pub by_name: BTreeMap<VolumeName, Arc<Stored>>,
    pub held: HeldIndex,
    /// Volumes with a value that cannot be read.
    pub unreadable: BTreeSet<VolumeName>,
}

impl Cache {
    pub fn new(keys: Keys, timing: Timing) -> Self {
        Cache {
            keys,
            timing,
            volumes: RwLock::default(),
            revision: watch::channel(None).0,
            doubted: Notify::new(),
        }
    }

    /// Returns the volumes at `revision` or a later one.
    pub async fn at_least(&self, revision: u64) -> Result<RwLockReadGuard<'_, Volumes>, EtcdError> {
        let is_there = |at: &Option<u64>| at.is_some_and(|at| at >= revision);
        let mut revisions = self.revision.subscribe();
        let is_late = tokio::time::timeout(self.timing.answer, revisions.wait_for(is_there)).await.is_err();
        if is_late {
            // The watch may have lost its place, or its member.
            self.doubted.notify_one();
            let rest = self.timing.request.saturating_sub(self.timing.answer);
            if tokio::time::timeout(rest, revisions.wait_for(is_there)).await.is_err() {
                return Err(EtcdError::Unreachable {
                    step: "follow the volumes",
                    waited: self.timing.request,
                    last: format!("the revision {revision} has not come"),
                });
            }
        }
        Ok(self.read())
    }

    /// Returns the present volumes if they come to `revision` soon.
    pub async fn soon(&self, revision: u64, wait: Duration) -> Option<RwLockReadGuard<'_, Volumes>> {
        let is_there = |at: &Option<u64>| at.is_some_and(|at| at >= revision);
        let mut revisions = self.revision.subscribe();
        tokio::time::timeout(wait, revisions.wait_for(is_there)).await.ok()?.ok()?;
        Some(self.read())
    }

    /// Waits for a revision after `index`, and returns it.
    pub async fn after(&self, index: u64) -> Option<u64> {
        let mut revisions = self.revision.subscribe();
        *revisions.wait_for(|at| at.is_some_and(|at| at > index)).await.ok()?
    }

    /// Has lists wait until the volumes are listed again.
    pub fn forget(&self) {
        self.revision.send_replace(None);
    }

    /// Takes over a list of all keys.
    pub fn replace(&self, volumes: Volumes) {
        let revision = volumes.revision;
        *self.write() = volumes;
        self.revision.send_replace(Some(revision));
    }

    /// Takes over changes, all of each revision. Returns the newest revision.
    pub fn apply(&self, events: &[Event]) -> u64 {
        let revision = self.write().apply(&self.keys, events);
        self.revision.send_replace(Some(revision));
        revision
    }

    fn read(&self) -> RwLockReadGuard<'_, Volumes> {
        self.volumes.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Volumes> {
        self.volumes.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Volumes {
    /// Adds keys of a list. [`Volumes::listed`] follows the last ones.
    pub fn add(&mut self, keys: &Keys, kvs: &[KeyValue]) {
        for kv in kvs {
            if let Some((name, part)) = keys.read(&kv.key) {
                let volume =
                    self.by_name.entry(name).or_insert_with_key(|name| Stored::none(name.clone()).into());
                Arc::make_mut(volume).put(part, kv);
            }
        }
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
            let volume =
                self.by_name.entry(name).or_insert_with_key(|name| Stored::none(name.clone()).into());
            let volume = Arc::make_mut(volume);
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
        let Some(volume) = self.by_name.get_mut(name) else { return };
        Arc::make_mut(volume).finish();
        self.held.change(&before.record, &volume.record);
        match volume.unreadable(keys) {
            Some(_) => self.unreadable.insert(name.clone()),
            None => self.unreadable.remove(name),
        };
        if volume.is_none() {
            self.by_name.remove(name);
        }
    }
}
