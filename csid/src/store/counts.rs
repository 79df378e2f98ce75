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
    pub(super) fn committed(&self, durability: Durability, took: Duration, events: &[Arc<Event>]) {
        match durability {
            Durability::Disk => self.synced.record(took),
            Durability::Process => self.unsynced.record(took),
        }
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

    /// Commits, of one or of many requests, and how long each took.
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
