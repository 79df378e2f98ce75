//! What servers leave to an operator after a restore of etcd (decision 0022): claims that exclude each other, and the detach of a volume of which nothing but
//! a node's word is known. Nodes bring both back.

use csid::error::{Obstacle, shortened};
use csid::store::registry::{Claim, Record};
use csid::store::rows::Leg;
use csid::volume::rules;
use csid::{Error, Kind};

use crate::failure::Result;

/// Returns the claims of a volume that exclude one of its claims. Nodes bring such claims back after a restore of etcd, and servers do not know who is
/// right.
pub fn excluding<'a>(record: &'a Record, claim: &'a Claim) -> impl Iterator<Item = &'a Claim> {
    record.claims.iter().filter(|other| {
        (&other.node, &other.consumer) != (&claim.node, &claim.consumer)
            && (other.adopted || claim.adopted)
            && rules::exclude_each_other(other, claim)
    })
}

/// Returns whether the volume of a claim is attached by its node's word alone: etcd has no registration of it. The node may have named another one's volume,
/// so the end of the claim does not detach it. An operator's word does, which is the leg that is to be removed.
pub fn waits_for_word(record: &Record, claim: &Claim) -> bool {
    let is_there = record.attachment(&claim.node).is_some_and(|at| at.leg == Leg::Present);
    claim.adopted && record.registration.is_none() && is_there
}

/// Returns a record after the end of a claim that is no operator's word for a detach.
pub fn left_attached(record: &Record, claim: &Claim, after: Record) -> Record {
    match waits_for_word(record, claim) {
        true => Record { attachments: record.attachments.clone(), ..after },
        false => after,
    }
}

/// Refuses a claim that another one excludes. Its node may have the volume already, and gets nothing more.
pub fn refuse_excluded(record: &Record, claim: &Claim) -> Result<()> {
    let holders: Vec<String> =
        excluding(record, claim).map(|other| format!("{}/{}", other.node, other.consumer)).collect();
    if holders.is_empty() {
        return Ok(());
    }
    let text = format!(
        "{}: the claim of {} and others exclude each other since etcd was restored: {}",
        record.name,
        claim.consumer,
        shortened(&holders.join(", "))
    );
    let error = Error::new(Kind::ClaimConflict, text).obstructed_by(Obstacle::OtherNode);
    Err(error.with(|details| details.holders = holders).into())
}
