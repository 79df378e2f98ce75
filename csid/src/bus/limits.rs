//! How many calls may be under way: of one uid, and on the bus of one sender, whose calls share their connection to csid with
//! everybody's. Root's uid is not counted: a scheduler with ten thousand volumes runs as root. A call is under way until its
//! work has ended and its answer is sent, whether or not anybody still waits for it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::caller::{Caller, Way};
use crate::error::{Error, Kind, Result};

/// Calls that may wait long and calls that answer at once are counted apart, so that an operation can be looked at and
/// cancelled when the uid has all the operations it may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Class {
    Operation,
    Short,
    /// Reads that go through the whole journal, where everybody's commits wait behind them.
    Survey,
}

/// Surveys of one uid.
const SURVEYS: usize = 4;

/// Calls of one sender on the bus.
const OF_SENDER: usize = 256;

#[derive(Clone, PartialEq, Eq, Hash)]
enum Key {
    Uid(u32, Class),
    Sender(String),
}

#[derive(Clone, Default)]
pub struct Limits(Arc<Mutex<HashMap<Key, usize>>>);

/// Counts one call until the last clone is dropped.
#[derive(Clone)]
pub(super) struct Slot {
    _counts: Arc<[Count]>,
}

struct Count(Limits, Key);

impl Limits {
    /// `most`: operations-per-uid of csid.toml.
    pub(super) fn enter(&self, caller: &Caller, class: Class, most: usize) -> Result<Slot> {
        let mut counts = Vec::new();
        if let Way::Bus { sender, .. } = &caller.way {
            let why = "calls under way, as many as one connection to the bus may have";
            counts.push(self.count(Key::Sender(sender.clone()), OF_SENDER, sender, why)?);
        }
        if !caller.is_root() {
            let (most, why) = match class {
                Class::Survey => (
                    SURVEYS,
                    "lists (ListMounts, ListVolumes, ListClaims, GetEvents) and calls of Reconcile under way, as many as one uid may have",
                ),
                _ => (most.max(1), "calls under way, as many as operations-per-uid in csid.toml allows"),
            };
            let who = format!("uid {}", caller.uid);
            counts.push(self.count(Key::Uid(caller.uid, class), most, &who, why)?);
        }
        Ok(Slot { _counts: counts.into() })
    }

    fn count(&self, key: Key, most: usize, who: &str, why: &str) -> Result<Count> {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(key.clone()).or_insert(0);
        if *count >= most {
            return Err(Error::new(
                Kind::RateLimited,
                format!("{who} has {most} {why}; wait for one to end"),
            ));
        }
        *count += 1;
        Ok(Count(self.clone(), key))
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        let Count(limits, of) = self;
        let mut counts = limits.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(of) {
            *count -= 1;
            if *count == 0 {
                counts.remove(of);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus::socket::Credentials;

    fn uid(uid: u32) -> Caller {
        Caller::on_socket(&Credentials { uid, groups: Vec::new() }, None)
    }

    #[test]
    fn one_uids_calls_are_bounded_and_counted_by_class() {
        let limits = Limits::default();
        let first = limits.enter(&uid(1000), Class::Operation, 2).ok();
        let _second = limits.enter(&uid(1000), Class::Operation, 2).ok();
        let refused = limits.enter(&uid(1000), Class::Operation, 2).err().unwrap();
        assert_eq!(refused.kind, Kind::RateLimited);
        assert!(refused.details.retryable);
        assert!(limits.enter(&uid(1000), Class::Short, 2).is_ok(), "another class");
        assert!(limits.enter(&uid(1001), Class::Operation, 2).is_ok(), "another uid");
        drop(first);
        assert!(limits.enter(&uid(1000), Class::Operation, 2).is_ok(), "one has ended");
        for _ in 0..10 {
            std::mem::forget(limits.enter(&uid(0), Class::Operation, 2).ok().unwrap());
        }
    }

    #[test]
    fn surveys_are_few_and_a_slot_is_held_by_each_clone() {
        let limits = Limits::default();
        let slots: Vec<Slot> =
            (0..SURVEYS).map(|_| limits.enter(&uid(1000), Class::Survey, 256).ok().unwrap()).collect();
        let clone = slots[0].clone();
        assert!(limits.enter(&uid(1000), Class::Survey, 256).is_err());
        drop(slots);
        let _three: Vec<Slot> =
            (1..SURVEYS).map(|_| limits.enter(&uid(1000), Class::Survey, 256).ok().unwrap()).collect();
        assert!(limits.enter(&uid(1000), Class::Survey, 256).is_err(), "the clone holds the fourth");
        drop(clone);
        assert!(limits.enter(&uid(1000), Class::Survey, 256).is_ok());
    }

    #[test]
    fn one_sender_on_the_bus_has_a_bound_root_too() {
        let limits = Limits::default();
        let root = Credentials { uid: 0, groups: Vec::new() };
        let sender = |name: &str| Caller::on_bus(&root, None, name.to_owned(), false);
        let enter = |name: &str| limits.enter(&sender(name), Class::Operation, 1);
        let slots: Vec<Slot> = (0..OF_SENDER).map(|_| enter(":1.1").ok().unwrap()).collect();
        assert_eq!(enter(":1.1").err().unwrap().kind, Kind::RateLimited);
        assert!(enter(":1.2").is_ok());
        drop(slots);
        assert!(enter(":1.1").is_ok());
        assert!(limits.0.lock().unwrap().is_empty());
    }

    #[test]
    fn nothing_is_kept_of_a_uid_that_has_gone() {
        let limits = Limits::default();
        drop(limits.enter(&uid(1000), Class::Short, 1));
        assert!(limits.0.lock().unwrap().is_empty());
    }
}
