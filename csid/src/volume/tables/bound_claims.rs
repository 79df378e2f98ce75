//! The bound claims of this node, by the unit or connection of each, and when each is to be released. Only a full probe walks
//! over all of them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::store::registry::{Bound, BoundTo, Record, VolumeName};
use crate::store::rows::VolumeKey;

/// The number of units that the claims of one uid, except root, may name. systemd loads each unit that csid asks about, even one
/// that does not exist.
pub(in crate::volume) const UNITS_OF_UID: usize = 16;
/// The delay after which a release is requested again if the claim still exists.
const AGAIN: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(in crate::volume) struct BoundClaims {
    table: Mutex<Table>,
    changed: Notify,
}

type Name = (VolumeName, String);

#[derive(Default)]
struct Table {
    claims: BTreeMap<VolumeName, BTreeMap<String, Claimed>>,
    targets: BTreeMap<BoundTo, Target>,
    /// The units that the claims of each uid name, and how many claims name each.
    units_of: BTreeMap<u32, BTreeMap<String, usize>>,
    due: BTreeSet<(Instant, Name)>,
    /// Units that were not probed since their first claim was bound.
    unread: BTreeSet<String>,
}

struct Claimed {
    volume: VolumeKey,
    uid: u32,
    bound: Bound,
    /// The time since which this csid has the claim bound so.
    since: Instant,
    /// The time of the claim in the table `due`. `None`: the claim is not in it.
    due: Option<Instant>,
}

#[derive(Default)]
struct Target {
    claims: BTreeSet<Name>,
    /// The time since which it is known to be gone. `None`: it is there, or that is unknown.
    gone: Option<Instant>,
}

/// A claim whose grace time is over.
pub(in crate::volume) struct Due {
    pub(in crate::volume) name: VolumeName,
    pub(in crate::volume) consumer: String,
    pub(in crate::volume) volume: VolumeKey,
    pub(in crate::volume) uid: u32,
    pub(in crate::volume) bound: Bound,
}

impl BoundClaims {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over the bound claims of the record.
    pub(in crate::volume) fn note(&self, record: &Record, node: &str) {
        let bound = record.claims.iter().filter_map(|claim| {
            let bound = claim.bound.as_ref().filter(|_| !claim.releasing && claim.node == node)?;
            Some((claim.consumer.as_str(), (claim.uid, bound)))
        });
        let mut new: BTreeMap<&str, (u32, &Bound)> = bound.collect();
        let mut table = self.lock();
        let Table { claims, .. } = &mut *table;
        let mut ended = Vec::new();
        for (consumer, had) in claims.get_mut(&record.name).into_iter().flatten() {
            match new.get(consumer.as_str()) {
                Some((uid, bound)) if **bound == had.bound && *uid == had.uid => {
                    had.volume.clone_from(&record.volume);
                    new.remove(consumer.as_str());
                }
                _ => ended.push((record.name.clone(), consumer.clone())),
            }
        }
        if ended.is_empty() && new.is_empty() {
            return;
        }
        for name in ended {
            table.remove(&name);
        }
        let since = Instant::now();
        for (consumer, (uid, bound)) in new {
            let (volume, bound) = (record.volume.clone(), bound.clone());
            let claimed = Claimed { volume, uid, bound, since, due: None };
            table.add((record.name.clone(), consumer.to_owned()), claimed);
        }
        drop(table);
        self.changed.notify_one();
    }

    /// Waits until [`BoundClaims::note`] has changed something.
    pub(in crate::volume) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Returns whether a uid may name this unit in addition to those that its claims name.
    pub(in crate::volume) fn may_name(&self, uid: u32, unit: &str) -> bool {
        let table = self.lock();
        let named = table.units_of.get(&uid);
        uid == 0 || named.is_none_or(|named| named.contains_key(unit) || named.len() < UNITS_OF_UID)
    }

    pub(in crate::volume) fn has_units(&self) -> bool {
        matches!(self.lock().targets.keys().next(), Some(BoundTo::Unit(_)))
    }

    pub(in crate::volume) fn has_callers(&self) -> bool {
        matches!(self.lock().targets.keys().next_back(), Some(BoundTo::Caller(_)))
    }

    pub(in crate::volume) fn units(&self) -> BTreeSet<String> {
        let table = self.lock();
        let units = table.targets.keys().filter_map(|to| match to {
            BoundTo::Unit(unit) => Some(unit.clone()),
            BoundTo::Caller(_) => None,
        });
        units.collect()
    }

    pub(in crate::volume) fn callers(&self) -> Vec<String> {
        let table = self.lock();
        let callers = table.targets.keys().rev().map_while(|to| match to {
            BoundTo::Caller(name) => Some(name.clone()),
            BoundTo::Unit(_) => None,
        });
        callers.collect()
    }

    /// Takes the units that were not probed since their first claim was bound.
    pub(in crate::volume) fn take_unread(&self) -> BTreeSet<String> {
        std::mem::take(&mut self.lock().unread)
    }

    /// Returns whether a unit or connection is known to be gone. `None`: no claim is bound to it.
    pub(in crate::volume) fn is_gone(&self, to: &BoundTo) -> Option<bool> {
        self.lock().targets.get(to).map(|target| target.gone.is_some())
    }

    /// Notes whether a unit or connection that claims are bound to is gone.
    pub(in crate::volume) fn set_gone(&self, to: &BoundTo, is_gone: bool, now: Instant) {
        let mut table = self.lock();
        let Some(target) = table.targets.get_mut(to) else { return };
        if target.gone.is_some() == is_gone {
            return;
        }
        target.gone = is_gone.then_some(now);
        for name in target.claims.clone() {
            table.arm(name);
        }
    }

    pub(in crate::volume) fn next_due(&self) -> Option<Instant> {
        self.lock().due.first().map(|(at, _)| *at)
    }

    /// Takes the claims whose grace time is over. Each claim becomes due again after `AGAIN`, if it still exists.
    pub(in crate::volume) fn take_due(&self, now: Instant) -> Vec<Due> {
        let mut table = self.lock();
        let mut due = Vec::new();
        while table.due.first().is_some_and(|(at, _)| *at <= now) {
            let Some((_, name)) = table.due.pop_first() else { break };
            let Some(claimed) = table.claims.get_mut(&name.0).and_then(|of| of.get_mut(&name.1)) else {
                continue;
            };
            let (at, (volume_name, consumer)) = (now + AGAIN, name.clone());
            claimed.due = Some(at);
            let Claimed { volume, uid, bound, .. } = claimed;
            let (volume, uid, bound) = (volume.clone(), *uid, bound.clone());
            due.push(Due { name: volume_name, consumer, volume, uid, bound });
            table.due.insert((at, name));
        }
        due
    }
}

impl Table {
    fn add(&mut self, name: Name, claimed: Claimed) {
        if let BoundTo::Unit(unit) = &claimed.bound.to {
            *self.units_of.entry(claimed.uid).or_default().entry(unit.clone()).or_default() += 1;
            if !self.targets.contains_key(&claimed.bound.to) {
                self.unread.insert(unit.clone());
            }
        }
        self.targets.entry(claimed.bound.to.clone()).or_default().claims.insert(name.clone());
        self.claims.entry(name.0.clone()).or_default().insert(name.1.clone(), claimed);
        self.arm(name);
    }

    fn remove(&mut self, name: &Name) {
        let Some(of) = self.claims.get_mut(&name.0) else { return };
        let Some(claimed) = of.remove(&name.1) else { return };
        if of.is_empty() {
            self.claims.remove(&name.0);
        }
        if let Some(at) = claimed.due {
            self.due.remove(&(at, name.clone()));
        }
        let to = &claimed.bound.to;
        if let Some(target) = self.targets.get_mut(to) {
            target.claims.remove(name);
            if target.claims.is_empty() {
                self.targets.remove(to);
            }
        }
        let BoundTo::Unit(unit) = to else { return };
        let Some(named) = self.units_of.get_mut(&claimed.uid) else { return };
        if let Some(times) = named.get_mut(unit) {
            *times -= 1;
            if *times == 0 {
                named.remove(unit);
            }
        }
        if named.is_empty() {
            self.units_of.remove(&claimed.uid);
        }
    }

    /// Sets when a claim is to be released: its grace time after its unit or connection was gone, or after it was bound if that
    /// is later.
    fn arm(&mut self, name: Name) {
        let Some(claimed) = self.claims.get_mut(&name.0).and_then(|of| of.get_mut(&name.1)) else { return };
        if let Some(at) = claimed.due.take() {
            self.due.remove(&(at, name.clone()));
        }
        let Some(gone) = self.targets.get(&claimed.bound.to).and_then(|target| target.gone) else { return };
        let grace = Duration::from_micros(claimed.bound.grace_usec);
        claimed.due = gone.max(claimed.since).checked_add(grace);
        self.due.extend(claimed.due.map(|at| (at, name)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::registry::{Capability, Claim, ClaimMode, Use};
    use crate::store::rows::{AccessMode, AttachmentMode};
    use crate::volume::lifecycle::new_claim;

    const GRACE: Duration = Duration::from_secs(10);

    fn record(bound: Option<Bound>) -> Record {
        let capability = Capability {
            access_mode: AccessMode::SingleNodeWriter,
            attachment_mode: AttachmentMode::FileSystem,
        };
        let usage = Use { mode: ClaimMode::Write, capability };
        let claim = Claim { bound, ..new_claim("job", "host", 7, usage) };
        let name = VolumeName { namespace: "ns".into(), volume: "v".into() };
        Record { claims: vec![claim].into(), ..Record::none(name) }
    }

    fn unit(name: &str) -> BoundTo {
        BoundTo::Unit(name.to_owned())
    }

    #[test]
    fn claim_returning_within_grace_time_is_kept() {
        let claims = BoundClaims::default();
        let to = unit("db.service");
        let bound = Bound::new(to.clone(), GRACE.as_micros() as u64);
        claims.note(&record(Some(bound.clone())), "host");
        let begun = Instant::now();
        let due = |after: Duration| claims.take_due(begun + after).len();
        let gone = |is_gone, after: Duration| claims.set_gone(&to, is_gone, begun + after);
        assert_eq!(due(GRACE * 2), 0, "not known is not gone");
        gone(true, Duration::ZERO);
        assert_eq!(due(GRACE / 2), 0);
        gone(false, GRACE / 2);
        assert_eq!(due(GRACE * 2), 0, "it is there again");
        gone(true, GRACE);
        assert_eq!(due(GRACE), 0);
        // A change of the record that keeps the binding keeps the time.
        claims.note(&record(Some(bound)), "host");
        gone(true, GRACE * 2);
        assert_eq!(due(GRACE * 2), 1);
        assert_eq!(due(GRACE * 2), 0);
        assert_eq!(due(GRACE * 3), 1, "it is still there");
        claims.note(&record(Some(Bound::new(BoundTo::Caller("a".into()), 0))), "host");
        assert_eq!(due(GRACE * 4), 0, "it is bound to something else");
    }

    #[test]
    fn the_grace_time_begins_with_the_binding() {
        let claims = BoundClaims::default();
        let to = unit("db.service");
        let bound = |grace: Duration| Bound::new(to.clone(), grace.as_micros() as u64);
        claims.note(&record(Some(bound(GRACE * 100))), "host");
        let long_ago = Instant::now().checked_sub(GRACE * 2).unwrap_or_else(Instant::now);
        claims.set_gone(&to, true, long_ago);
        let mut later = record(Some(bound(GRACE)));
        later.name.volume = "w".into();
        claims.note(&later, "host");
        assert_eq!(claims.take_due(Instant::now()).len(), 0);
        assert_eq!(claims.take_due(Instant::now() + GRACE).len(), 1);
        // An infinite grace time does not end: the other claim is due.
        claims.note(&record(Some(Bound::new(to, u64::MAX))), "host");
        assert_eq!(claims.take_due(Instant::now() + GRACE * 1_000).len(), 1);
    }

    #[test]
    fn a_uid_names_only_so_many_units() {
        let claims = BoundClaims::default();
        let name = |number: usize| format!("u{number}.service");
        let noted = |number: usize, bound: Option<Bound>| {
            let mut record = record(bound);
            record.name.volume = format!("v{number}");
            claims.note(&record, "host");
        };
        for number in 0..UNITS_OF_UID {
            assert!(claims.may_name(7, &name(number)), "{number}");
            noted(number, Some(Bound::new(unit(&name(number)), u64::MAX)));
        }
        assert!(!claims.may_name(7, &name(UNITS_OF_UID)));
        assert!(claims.may_name(7, &name(0)), "which is named already");
        assert!(claims.may_name(8, &name(UNITS_OF_UID)), "another uid");
        assert!(claims.may_name(0, &name(UNITS_OF_UID)));
        noted(0, None);
        assert!(claims.may_name(7, &name(UNITS_OF_UID)));
    }

    #[test]
    fn only_this_nodes_claims_that_are_held_are_watched() {
        let claims = BoundClaims::default();
        let bound = || Some(Bound::new(BoundTo::Caller("a".into()), 0));
        claims.note(&record(bound()), "other");
        assert!(!claims.has_callers());
        claims.note(&record(bound()), "host");
        assert_eq!(claims.callers(), ["a"]);
        assert!(!claims.has_units());
        let mut releasing = record(bound());
        releasing.claims[0].releasing = true;
        claims.note(&releasing, "host");
        assert!(!claims.has_callers());
        claims.note(&record(Some(Bound::new(unit("a.service"), 0))), "host");
        assert!(claims.has_units() && claims.take_unread().len() == 1);
        claims.set_gone(&unit("a.service"), true, Instant::now());
        claims.note(&record(None), "host");
        let table = claims.lock();
        assert!(table.claims.is_empty() && table.targets.is_empty() && table.due.is_empty());
        assert!(table.units_of.is_empty());
    }
}
