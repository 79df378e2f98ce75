//! Claims that end without a Release: with a systemd unit, or with their caller's connection.
//!
//! Once a second, as long as there are such claims, it is asked what they are bound to: systemd once for all units, the bus once
//! for all names. (Being told instead would make PID 1 send csid every change of every unit of the host, and each mount is one.)
//! What has ended and has not come back within the grace time is let go by the volume's task, as by Release, and retried so.
//! A grace time is of this csid: after its restart it begins anew.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::host::units::UnitsError;
use crate::store::registry::{Bound, BoundTo, Record, VolumeName};
use crate::store::rows::VolumeKey;
use crate::volume::task::Message;
use crate::volume::{Shared, Volumes, claim_words as words};

const EVERY: Duration = Duration::from_secs(1);
/// Units that one uid's claims may name, root's aside: systemd loads each one that it is asked about, every second, also those
/// that do not exist.
const UNITS_OF_UID: usize = 16;

/// This node's claims that are bound and not on their way out, as the registry has them.
#[derive(Default)]
pub(super) struct BoundClaims(Mutex<BTreeMap<VolumeName, Vec<Claimed>>>);

#[derive(Clone)]
struct Claimed {
    volume: VolumeKey,
    consumer: String,
    uid: u32,
    bound: Bound,
    /// Since when what it is bound to is seen to be gone.
    gone: Option<Instant>,
}

impl BoundClaims {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<VolumeName, Vec<Claimed>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Take over what the record says now.
    pub(super) fn note(&self, record: &Record, node: &str) {
        let mut table = self.lock();
        let before = table.remove(&record.name).unwrap_or_default();
        let claims = record.claims.iter().filter(|claim| claim.node == node && !claim.releasing);
        let claimed = claims.filter_map(|claim| {
            let bound = claim.bound.clone()?;
            let same = |old: &&Claimed| old.consumer == claim.consumer && old.bound == bound;
            let gone = before.iter().find(same).and_then(|old| old.gone);
            let (volume, consumer) = (record.volume.clone(), claim.consumer.clone());
            Some(Claimed { volume, consumer, uid: claim.uid, bound, gone })
        });
        let claimed: Vec<Claimed> = claimed.collect();
        if !claimed.is_empty() {
            table.insert(record.name.clone(), claimed);
        }
    }

    fn all(&self) -> Vec<BoundTo> {
        self.lock().values().flatten().map(|claimed| claimed.bound.to.clone()).collect()
    }

    /// Whether a uid may name this unit beside those that its claims name.
    fn may_name(&self, uid: u32, unit: &BoundTo) -> bool {
        let table = self.lock();
        let of =
            table.values().flatten().filter(|claimed| claimed.uid == uid).map(|claimed| &claimed.bound.to);
        let named: BTreeSet<&BoundTo> = of.filter(|to| matches!(to, BoundTo::Unit(_))).collect();
        uid == 0 || named.contains(unit) || named.len() < UNITS_OF_UID
    }

    /// Those whose grace time is over.
    fn due(&self, is_gone: impl Fn(&BoundTo) -> Option<bool>, now: Instant) -> Vec<(VolumeName, Claimed)> {
        let mut due = Vec::new();
        for (name, claimed) in self.lock().iter_mut() {
            for claimed in claimed {
                match is_gone(&claimed.bound.to) {
                    None => continue,
                    Some(false) => claimed.gone = None,
                    Some(true) => {
                        let gone = *claimed.gone.get_or_insert(now);
                        if now.duration_since(gone) >= Duration::from_micros(claimed.bound.grace_usec) {
                            due.push((name.clone(), claimed.clone()));
                        }
                    }
                }
            }
        }
        due
    }
}

/// The connections on the private socket, by the names that claims know them by.
#[derive(Clone, Default)]
pub(super) struct Connections(Arc<Mutex<BTreeSet<String>>>);

/// One connection, till it is dropped.
pub struct Connected {
    name: String,
    of: Connections,
}

impl Connected {
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.of.lock().remove(&self.name);
    }
}

impl Connections {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Who is there; absent: nobody could be asked.
#[derive(Default)]
struct There {
    units: Option<BTreeSet<String>>,
    on_bus: Option<BTreeSet<String>>,
    connected: BTreeSet<String>,
}

impl There {
    fn is_gone(&self, to: &BoundTo) -> Option<bool> {
        match to {
            BoundTo::Unit(unit) => self.units.as_ref().map(|units| !units.contains(unit)),
            BoundTo::Caller(name) if is_on_bus(name) => {
                self.on_bus.as_ref().map(|names| !names.contains(name))
            }
            BoundTo::Caller(name) => Some(!self.connected.contains(name)),
        }
    }
}

impl Volumes {
    /// A connection on the private socket, by a name that no other one has had or will have.
    pub fn connected(&self, name: String) -> Connected {
        let of = self.shared.connections.clone();
        of.lock().insert(name.clone());
        Connected { name, of }
    }

    /// Look at what claims are bound to for ever.
    pub async fn watch_bound(&self) {
        let mut every = tokio::time::interval(EVERY);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            every.tick().await;
            let all = self.shared.bound.all();
            if all.is_empty() || self.shared.changeable().is_err() {
                continue;
            }
            let there = self.shared.there(&all).await;
            for (name, claimed) in self.shared.bound.due(|to| there.is_gone(to), Instant::now()) {
                let Claimed { volume, consumer, uid, bound, .. } = claimed;
                let key = name.key(&consumer);
                let message = Message::Unbind(key.clone(), uid, bound);
                self.shared.directory.send(&self.shared, &volume, &key, message);
            }
        }
    }
}

impl Shared {
    async fn there(&self, all: &[BoundTo]) -> There {
        let mut there = There { connected: self.connections.lock().clone(), ..There::default() };
        let units: BTreeSet<&str> = all
            .iter()
            .filter_map(|to| match to {
                BoundTo::Unit(unit) => Some(unit.as_str()),
                BoundTo::Caller(_) => None,
            })
            .collect();
        if !units.is_empty() {
            there.units = heard(self.units.running(&units.into_iter().collect::<Vec<_>>()).await);
        }
        if all.iter().any(|to| matches!(to, BoundTo::Caller(name) if is_on_bus(name))) {
            there.on_bus = heard(self.units.bus_names().await);
        }
        there
    }

    /// A unit that does not run ends the claim at once, unless it has time; and a uid may name only so many.
    pub(super) async fn refuse_ended(&self, bound: &Bound, uid: u32) -> Result<()> {
        let BoundTo::Unit(unit) = &bound.to else { return Ok(()) };
        if !self.bound.may_name(uid, &bound.to) {
            return Err(words::too_many_units(UNITS_OF_UID));
        }
        match self.units.running(&[unit]).await {
            Ok(running) if running.is_empty() && bound.grace_usec == 0 => Err(words::at_rest(&bound.to)),
            Ok(_) => Ok(()),
            Err(error) => Err(words::unwatchable(&bound.to, &error)),
        }
    }
}

/// A unique name has a colon, after the name of its bus.
fn is_on_bus(name: &str) -> bool {
    name.contains(':')
}

fn heard(answer: Result<Vec<String>, UnitsError>) -> Option<BTreeSet<String>> {
    match answer {
        Ok(names) => Some(names.into_iter().collect()),
        Err(error) => {
            tracing::warn!(%error, "what claims are bound to cannot be looked at; they stay");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::registry::{Capability, Claim, ClaimMode, Use};
    use crate::store::rows::{AccessMode, AttachmentMode};
    use crate::volume::registered::new_claim;

    const GRACE: Duration = Duration::from_secs(10);

    fn record(bound: Option<Bound>) -> Record {
        let capability = Capability {
            access_mode: AccessMode::SingleNodeWriter,
            attachment_mode: AttachmentMode::FileSystem,
        };
        let usage = Use { mode: ClaimMode::Write, capability };
        let claim = Claim { bound, ..new_claim("job", "host", 7, usage) };
        let name = VolumeName { namespace: "ns".into(), volume: "v".into() };
        Record { claims: vec![claim], ..Record::none(name) }
    }

    #[test]
    fn what_comes_back_within_its_grace_time_is_kept() {
        let claims = BoundClaims::default();
        let bound = Bound::new(BoundTo::Unit("db.service".into()), GRACE.as_micros() as u64);
        claims.note(&record(Some(bound.clone())), "host");
        let begun = Instant::now();
        let due = |gone: Option<bool>, after: Duration| claims.due(|_| gone, begun + after).len();
        assert_eq!(due(Some(true), Duration::ZERO), 0);
        assert_eq!(due(None, GRACE * 2), 0, "not known is not gone");
        assert_eq!(due(Some(false), GRACE / 2), 0);
        assert_eq!(due(Some(true), GRACE), 0, "it was there meanwhile");
        // What changes of the record beside it does not begin it anew.
        claims.note(&record(Some(bound)), "host");
        assert_eq!(due(Some(true), GRACE * 2), 1);
        // Whoever is bound to something else begins anew.
        claims.note(&record(Some(Bound::new(BoundTo::Caller("a".into()), 0))), "host");
        assert_eq!(due(Some(false), GRACE * 2), 0);
    }

    #[test]
    fn a_uid_names_only_so_many_units() {
        let claims = BoundClaims::default();
        let unit = |number: usize| BoundTo::Unit(format!("u{number}.service"));
        for number in 0..UNITS_OF_UID {
            assert!(claims.may_name(7, &unit(number)), "{number}");
            let mut record = record(Some(Bound::new(unit(number), u64::MAX)));
            record.name.volume = format!("v{number}");
            claims.note(&record, "host");
        }
        assert!(!claims.may_name(7, &unit(UNITS_OF_UID)));
        assert!(claims.may_name(7, &unit(0)), "which is named already");
        assert!(claims.may_name(8, &unit(UNITS_OF_UID)), "another uid");
        assert!(claims.may_name(0, &unit(UNITS_OF_UID)));
    }

    #[test]
    fn only_this_nodes_claims_that_are_held_are_watched() {
        let claims = BoundClaims::default();
        let bound = || Some(Bound::new(BoundTo::Caller("a".into()), 0));
        claims.note(&record(bound()), "other");
        assert!(claims.all().is_empty());
        claims.note(&record(bound()), "host");
        assert_eq!(claims.all().len(), 1);
        let mut releasing = record(bound());
        releasing.claims[0].releasing = true;
        claims.note(&releasing, "host");
        assert!(claims.all().is_empty());
        claims.note(&record(bound()), "host");
        claims.note(&record(None), "host");
        assert!(claims.lock().is_empty());
    }
}
