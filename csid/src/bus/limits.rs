//! Limits of calls in progress: of each uid, and of each sender on the bus, where all senders share one connection to csid. Root's uid
//! has no limit, because a scheduler with ten thousand volumes runs as root. A call is in progress until its work has ended and its
//! answer is sent, even if its caller has gone.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::caller::{Caller, Way};
use crate::error::{Error, Kind, Result};

/// The class of a call, each with its own count. So a uid can still list and cancel operations when it has as many as allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum CallClass {
    Operation,
    Short,
    /// Reads of the whole journal, which delay all commits.
    Survey,
}

/// The limit of surveys of one uid.
const SURVEYS: usize = 4;

/// The limit of calls of one sender on the bus.
const OF_SENDER: usize = 256;

#[derive(Clone, PartialEq, Eq, Hash)]
enum Key {
    Uid(u32, CallClass),
    Sender(String),
}

#[derive(Clone, Default)]
pub struct Limits(Arc<Mutex<HashMap<Key, usize>>>);

/// A call in progress. It counts until the last clone is dropped.
#[derive(Clone)]
pub(super) struct Slot {
    _counts: Arc<[Count]>,
}

struct Count(Limits, Key);

impl Limits {
    /// Counts a call of this class. `most`: operations-per-uid of csid.toml.
    pub(super) fn enter(&self, caller: &Caller, class: CallClass, most: usize) -> Result<Slot> {
        let mut counts = Vec::new();
        if let Way::Bus { sender, .. } = &caller.way {
            let why = "calls in progress, the limit of one connection to the bus";
            counts.push(self.count(Key::Sender(sender.clone()), OF_SENDER, sender, why)?);
        }
        if !caller.is_root() {
            let (most, why) = match class {
                CallClass::Survey => (
                    SURVEYS,
                    "lists (ListMounts, ListVolumes, ListClaims, GetEvents) and Reconcile calls in progress, the limit of one uid",
                ),
                _ => (most.max(1), "calls in progress, the limit operations-per-uid of csid.toml"),
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
            return Err(Error::new(Kind::RateLimited, format!("{who} has {most} {why}")));
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
    fn calls_are_limited_by_uid_and_class() {
        let limits = Limits::default();
        let first = limits.enter(&uid(1000), CallClass::Operation, 2).ok();
        let _second = limits.enter(&uid(1000), CallClass::Operation, 2).ok();
        let refused = limits.enter(&uid(1000), CallClass::Operation, 2).err().unwrap();
        assert_eq!(refused.kind, Kind::RateLimited);
        assert!(refused.details.retryable);
        assert!(limits.enter(&uid(1000), CallClass::Short, 2).is_ok(), "another class");
        assert!(limits.enter(&uid(1001), CallClass::Operation, 2).is_ok(), "another uid");
        drop(first);
        assert!(limits.enter(&uid(1000), CallClass::Operation, 2).is_ok(), "one has ended");
        for _ in 0..10 {
            std::mem::forget(limits.enter(&uid(0), CallClass::Operation, 2).ok().unwrap());
        }
    }

    #[test]
    fn each_clone_holds_the_slot_of_a_survey() {
        let limits = Limits::default();
        let slots: Vec<Slot> =
            (0..SURVEYS).map(|_| limits.enter(&uid(1000), CallClass::Survey, 256).ok().unwrap()).collect();
        let clone = slots[0].clone();
        assert!(limits.enter(&uid(1000), CallClass::Survey, 256).is_err());
        drop(slots);
        let _three: Vec<Slot> =
            (1..SURVEYS).map(|_| limits.enter(&uid(1000), CallClass::Survey, 256).ok().unwrap()).collect();
        assert!(limits.enter(&uid(1000), CallClass::Survey, 256).is_err(), "the clone holds the fourth");
        drop(clone);
        assert!(limits.enter(&uid(1000), CallClass::Survey, 256).is_ok());
    }

    #[test]
    fn sender_on_the_bus_is_limited_even_as_root() {
        let limits = Limits::default();
        let root = Credentials { uid: 0, groups: Vec::new() };
        let sender = |name: &str| Caller::on_bus(&root, None, name.to_owned(), false);
        let enter = |name: &str| limits.enter(&sender(name), CallClass::Operation, 1);
        let slots: Vec<Slot> = (0..OF_SENDER).map(|_| enter(":1.1").ok().unwrap()).collect();
        assert_eq!(enter(":1.1").err().unwrap().kind, Kind::RateLimited);
        assert!(enter(":1.2").is_ok());
        drop(slots);
        assert!(enter(":1.1").is_ok());
        assert!(limits.0.lock().unwrap().is_empty());
    }

    #[test]
    fn counts_of_an_idle_uid_are_dropped() {
        let limits = Limits::default();
        drop(limits.enter(&uid(1000), CallClass::Short, 1));
        assert!(limits.0.lock().unwrap().is_empty());
    }
}
