//! The claims of volumes that have many, as they were read or written last, so that one claim among a thousand does not
//! read all of them again.
//!
//! They are believed while the volume's row has the revision that they were read at; that row is read each time. A transaction
//! that failed may be committed all the same, and its revision is given again to the next one: it ends what is known.

use std::collections::HashMap;

use crate::store::claim::Claim;
use crate::store::claim_set::ClaimSet;
use crate::store::record::{Record, VolumeName};

/// Fewer claims than this are read each time.
const MANY: usize = 16;
/// The claims that are kept, of all volumes. Those that were not read lately are dropped; half of it is always kept.
const KEPT: usize = 8_192;

#[derive(Default)]
pub(super) struct KnownClaims {
    /// Of each volume: its revision, and the claims at that revision.
    newer: HashMap<VolumeName, (u64, ClaimSet)>,
    older: HashMap<VolumeName, (u64, ClaimSet)>,
    /// How many claims are in `newer`.
    claims: usize,
}

impl KnownClaims {
    /// Returns the claims that the volume has at this revision, if they are known.
    pub(super) fn at(&mut self, name: &VolumeName, revision: u64) -> Option<ClaimSet> {
        if let Some((of, claims)) = self.newer.get(name) {
            return (*of == revision).then(|| claims.clone());
        }
        let (of, claims) = self.older.remove(name)?;
        if of != revision {
            return None;
        }
        self.keep(name, revision, &claims);
        Some(claims)
    }

    pub(super) fn keep(&mut self, name: &VolumeName, revision: u64, claims: &ClaimSet) {
        self.forget(name);
        if !(MANY..=KEPT / 2).contains(&claims.len()) {
            return;
        }
        if self.claims + claims.len() > KEPT / 2 {
            self.older = std::mem::take(&mut self.newer);
            self.claims = 0;
        }
        self.claims += claims.len();
        self.newer.insert(name.clone(), (revision, claims.clone()));
    }

    /// Takes over a change that is committed.
    pub(super) fn change(&mut self, before: &Record, after: &Record, revision: u64) {
        let Some(mut claims) = self.at(&before.name, before.revision) else {
            return self.forget(&before.name);
        };
        for (had, has) in changes(before, after) {
            match (had, has) {
                (_, Some(claim)) => claims.insert(Claim { modify_index: revision, ..claim.clone() }),
                (Some(claim), None) => claims.remove_at(&claim.consumer, &claim.node),
                (None, None) => {}
            }
        }
        self.keep(&before.name, revision, &claims);
    }

    fn forget(&mut self, name: &VolumeName) {
        if let Some((_, claims)) = self.newer.remove(name) {
            self.claims -= claims.len();
        }
        self.older.remove(name);
    }
}

/// The claims that a swap writes or deletes. What nothing has touched may have another index.
pub fn changes<'a>(
    before: &'a Record,
    after: &'a Record,
) -> impl Iterator<Item = (Option<&'a Claim>, Option<&'a Claim>)> {
    let same = |had: &Claim, has: &Claim| Claim { modify_index: has.modify_index, ..had.clone() } == *has;
    let differences = before.claims.differences(&after.claims).into_iter();
    differences.filter(move |(had, has)| !had.zip(*has).is_some_and(|(had, has)| same(had, has)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::testing::samples::{claim, name};

    fn claims(count: usize) -> ClaimSet {
        (0..count).map(|n| claim(&format!("c{n:05}"), "n1")).collect()
    }

    #[test]
    fn only_so_many_claims_are_kept() {
        let mut known = KnownClaims::default();
        let held = |known: &KnownClaims| -> usize {
            known.newer.values().chain(known.older.values()).map(|(_, claims)| claims.len()).sum()
        };
        for volume in 0..40 {
            known.keep(&name(&volume.to_string()), 1, &claims(1_000));
            assert!(held(&known) <= KEPT && known.claims <= KEPT / 2);
            assert!(known.at(&name(&volume.to_string()), 1).is_some());
            assert!(known.at(&name("0"), 1).is_some(), "which is asked for all the time");
        }
        assert!(held(&known) > KEPT / 4 && known.at(&name("20"), 1).is_none());
        for too_many_or_few in [0, 1, MANY - 1, KEPT / 2 + 1] {
            known.keep(&name("0"), 2, &claims(too_many_or_few));
            assert!(known.at(&name("0"), 2).is_none() && known.at(&name("0"), 1).is_none());
        }
    }

    #[test]
    fn another_revision_is_not_known() {
        let mut known = KnownClaims::default();
        known.keep(&name("a"), 7, &claims(MANY));
        assert!(known.at(&name("a"), 6).is_none() && known.at(&name("a"), 8).is_none());
        assert_eq!(known.at(&name("a"), 7), Some(claims(MANY)));
    }
}
