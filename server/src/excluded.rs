//! What servers leave to an operator after a restore of etcd (decision 0022): claims that exclude each other, and detaches. Nothing but a
//! node's word is known of some volumes, and others may be mounted for claims that servers have refused.

use csid::error::{Obstacle, shortened};
use csid::store::registry::{Claim, ClaimState, Record};
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

/// Returns why the detach for a claim waits for an operator's word, which is the leg that is to be removed. `None`: it does not wait.
///
/// * etcd has no registration of the volume, so its node's word alone says that it is attached. The node may have named another one's volume.
/// * `has_refused_mounts`: the node may have the volume mounted for a claim that etcd does not have. The end of a claim that the node had is its word that
///   nothing of the volume is staged there. A claim that was never granted is none.
pub fn why_waits(record: &Record, claim: &Claim, has_refused_mounts: bool) -> Option<&'static str> {
    let leg = record.attachment(&claim.node).map_or(Leg::Absent, |at| at.leg);
    let is_of_node = claim.state == ClaimState::NodeDetached && claim.kept;
    match leg {
        Leg::Present if claim.adopted && record.registration.is_none() => {
            Some("the volume has no registration since etcd was restored")
        }
        Leg::Present | Leg::Making if has_refused_mounts && !is_of_node => {
            Some("the node may have the volume mounted for a claim that was refused since etcd was restored")
        }
        _ => None,
    }
}

/// Returns a record after a step of a claim that is no operator's word for a detach.
pub fn left_attached(record: &Record, claim: &Claim, has_refused_mounts: bool, mut after: Record) -> Record {
    let is_removed = after.attachment(&claim.node).is_some_and(|at| at.leg == Leg::Removing);
    let stepped = after.claim_at(&claim.consumer, &claim.node).unwrap_or(claim);
    if is_removed && why_waits(record, stepped, has_refused_mounts).is_some() {
        after.attachments.clone_from(&record.attachments);
    }
    after
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

#[cfg(test)]
mod tests {
    use csid::store::registry::{Attachment, Capability, ClaimMode, Use, VolumeName};
    use csid::store::rows::{AccessMode, AttachmentMode};

    use super::*;

    #[test]
    fn detach_waits_while_a_mount_may_be_there() {
        use ClaimState::{NodeDetached, Pending, Taken};
        let access_mode = AccessMode::SingleNodeMultiWriter;
        let capability = Capability { access_mode, attachment_mode: AttachmentMode::FileSystem };
        let usage = Use { mode: ClaimMode::Write, capability };
        for (state, kept, leg, due) in [
            (Pending, false, Leg::Present, true),
            (Pending, false, Leg::Making, true),
            (Taken, true, Leg::Making, true),
            (NodeDetached, false, Leg::Making, true),
            (NodeDetached, false, Leg::Present, true),
            // The node has said that nothing is staged.
            (NodeDetached, true, Leg::Present, false),
            (NodeDetached, true, Leg::Making, false),
            // An operator's word.
            (NodeDetached, false, Leg::Removing, false),
            (Pending, false, Leg::Absent, false),
        ] {
            let mut record = Record::none(VolumeName { namespace: "default".into(), volume: "data".into() });
            if leg != Leg::Absent {
                record.attachments.push(Attachment::new("n1", leg));
            }
            let claim = Claim { state, kept, ..rules::new_claim("web", "n1", 0, usage) };
            assert_eq!(why_waits(&record, &claim, true).is_some(), due, "{state:?} {kept} {leg:?}");
            assert_eq!(why_waits(&record, &claim, false), None, "{state:?} {kept} {leg:?}");
        }
    }
}
