//! Counts of commits since csid's start.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::histogram::{Durations, Histogram};
use crate::store::change::Durability;
use crate::store::rows::Event;

#[derive(Default)]
pub struct Counts {
    synced: Histogram,
    unsynced: Histogram,
    /// By type; these are csid's own words, so that there are only so many.
    events: Mutex<BTreeMap<String, u64>>,
}

impl Counts {
    pub(super) fn record(&self, durability: Durability, took: Duration) {
        match durability {
            Durability::Disk => self.synced.record(took),
            Durability::Process => self.unsynced.record(took),
        }
    }

    pub(super) fn count(&self, events: &[Arc<Event>]) {
        if events.is_empty() {
            return;
        }
        let mut counted = self.counted();
        for event in events {
            match counted.get_mut(&event.kind) {
                Some(count) => *count += 1,
                None => drop(counted.insert(event.kind.clone(), 1)),
            }
        }
    }

    /// Returns how long commits took, each of one or of many requests. Those on the disk took until their sync ended. A sync of earlier
    /// commits is one of them.
    pub fn commits(&self, durability: Durability) -> Durations {
        match durability {
            Durability::Disk => self.synced.read(),
            Durability::Process => self.unsynced.read(),
        }
    }

    /// Events, by type.
    pub fn events(&self) -> BTreeMap<String, u64> {
        self.counted().clone()
    }

    fn counted(&self) -> MutexGuard<'_, BTreeMap<String, u64>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
