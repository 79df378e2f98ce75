//! Claims: which consumers may have a volume at the same time ([`admit`]), and the states of a claim between its first and last
//! controller call. Pure, as the step of mounts. The caller persists the state that [`step`] returns, performs the effect, and
//! feeds its outcome back.
//!
//! ```text
//!             Attach                NodeDetach             Detach
//!   Pending ─────────▶ Taken ─────────────▶ NodeDetached ─────────▶ ControllerDetached ──▶ free: the row is gone
//! ```
//!
//! * A node's attachment is a leg that all claims of that node share, as all mounts of a volume share its staging. It is made
//!   for the first claim and removed once, after the last (CSI rules 20, 23).
//! * csid asks the controller to detach only when the node has released every claim on it. It never asks earlier, and not at
//!   all while another live claim is on the node.
//! * In a cluster each claim has a leg of its own, its grant. A server grants the claim before anything else is done for it, and
//!   learns of its end after everything else. Attachments are then the servers' business.
//! * A server gives a claim of the same journal and boot the name of the latest call that asks for it. So the words of an earlier
//!   call end nothing that a later call has.
//! * `Making` and `Removing` are written before the call. An unknown outcome is `Removing`, and only an acknowledged
//!   ControllerUnpublish ends that (rule 25).

use std::sync::Arc;

use crate::store::claim_set::ClaimSet;
use crate::store::registry::{
    Attachment, Blocked, Bound, Capability, Claim, ClaimMode, ClaimState, Grant, Use,
};
use crate::store::rows::{AccessMode, Leg};
use crate::volume::model::admission::OF_UID;
use crate::volume::model::call_name::is_later;

/// State that decides what may happen to a volume's claims.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claims {
    /// Whether the plugin has a controller that attaches. `None`: not known yet.
    pub attaches: Option<bool>,
    /// Id that the plugin uses for the node whose csid asks now. `None`: not known yet.
    pub node_id: Option<String>,
    /// Capabilities that the volume was registered with.
    pub capabilities: Vec<Capability>,
    pub claims: ClaimSet,
    /// Waiting claims. They come before a claim that is not there yet.
    pub ahead: Vec<Arc<Claim>>,
    /// Attachments that are not known to be absent.
    pub attachments: Vec<Attachment>,
    /// Node whose claims the events name. `None`: csid alone, where a consumer has one claim, whatever its node.
    pub node: Option<String>,
    /// Cluster whose servers grant the claims. They then attach the volume, too. `None`: csid is alone.
    pub cluster: Option<String>,
    /// Current boot. A volume that was attached in another boot is attached again before it is used. Likewise, a server grants a
    /// claim again.
    pub boot: String,
}

/// Reason why a claim is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimRefusal {
    /// The claim belongs to another uid.
    NotOwner,
    /// The consumer has the volume with another value of this option.
    OtherOption { option: &'static str },
    /// The consumer's earlier claim is still being released.
    Releasing,
    /// The volume was not registered with the capability.
    NoCapability,
    /// A write claim was requested with a reader-only access mode.
    ReaderOnly,
    /// An existing claim or attachment excludes this claim.
    Conflict { what: &'static str, holders: Vec<String> },
    /// The uid has [`OF_UID`] claims.
    TooMany,
    /// There is no such claim.
    NoSuchClaim,
}

/// Checks whether a claim is admitted along with the volume's others. The first claim sets the modes, until the last claim is
/// free.
pub fn admit(volume: &Claims, wanted: &Claim) -> Result<(), ClaimRefusal> {
    let (mode, capability) = (wanted.usage.mode, wanted.usage.capability);
    let access_mode = capability.access_mode;
    if let Some(present) = volume.claim(&wanted.consumer) {
        if present.uid != wanted.uid {
            return Err(ClaimRefusal::NotOwner);
        }
        if present.releasing {
            return Err(ClaimRefusal::Releasing);
        }
        let same_bound = match (&present.bound, &wanted.bound) {
            (Some(present), Some(wanted)) => present.same_call(wanted),
            // A Mount that names no lifetime uses the existing claim.
            (Some(_), None) => wanted.by_mount,
            (None, wanted) => wanted.is_none(),
        };
        let (has, wants) = (present.usage, wanted.usage);
        let is_other = [
            ("node", present.node != wanted.node),
            ("mode", has.mode != wants.mode),
            ("access-mode", has.capability.access_mode != wants.capability.access_mode),
            ("attachment-mode", has.capability.attachment_mode != wants.capability.attachment_mode),
            ("bind", !same_bound),
        ];
        let other = is_other.into_iter().find_map(|(option, differs)| differs.then_some(option));
        return other.map_or(Ok(()), |option| Err(ClaimRefusal::OtherOption { option }));
    }
    let others = || volume.claims.iter().chain(volume.ahead.iter().map(Arc::as_ref));
    // A uid is of one host.
    let is_own =
        |claim: &&Claim| claim.uid == wanted.uid && (volume.node.is_none() || claim.node == wanted.node);
    if wanted.uid != 0 && others().filter(is_own).count() >= OF_UID {
        return Err(ClaimRefusal::TooMany);
    }
    fits(&volume.capabilities, wanted.usage)?;
    let conflict = |what, held: fn(&Claim, &Claim) -> bool| {
        let holders = others().filter(|other| held(other, wanted));
        let holders: Vec<String> = holders.map(|other| volume.shown(other)).collect();
        if holders.is_empty() { Ok(()) } else { Err(ClaimRefusal::Conflict { what, holders }) }
    };
    if volume.attachments.iter().any(|at| at.by_call.is_some()) {
        return Err(ClaimRefusal::Conflict { what: "an attachment by AttachVolume", holders: Vec::new() });
    }
    conflict("the attachment mode", |a, b| {
        a.usage.capability.attachment_mode != b.usage.capability.attachment_mode
    })?;
    conflict("the access mode", |a, b| a.usage.capability.access_mode != b.usage.capability.access_mode)?;
    match access_mode {
        // A second consumer is a second target (CSI rule 34).
        AccessMode::SingleNodeWriter
        | AccessMode::SingleNodeReaderOnly
        | AccessMode::SingleNodeSingleWriter => conflict("a single-node volume", |_, _| true),
        AccessMode::SingleNodeMultiWriter => conflict("a single-node volume", |a, b| a.node != b.node),
        AccessMode::MultiNodeSingleWriter if mode == ClaimMode::Write => {
            conflict("the one writer", |a, _| a.usage.mode == ClaimMode::Write)
        }
        AccessMode::MultiNodeSingleWriter
        | AccessMode::MultiNodeReaderOnly
        | AccessMode::MultiNodeMultiWriter => Ok(()),
    }
}

/// Checks a usage by the capabilities that a volume was registered with.
pub fn fits(capabilities: &[Capability], usage: Use) -> Result<(), ClaimRefusal> {
    if !capabilities.contains(&usage.capability) {
        return Err(ClaimRefusal::NoCapability);
    }
    if reader_only(usage.capability.access_mode) && usage.mode == ClaimMode::Write {
        return Err(ClaimRefusal::ReaderOnly);
    }
    Ok(())
}

/// Returns whether two claims of a volume exclude each other.
pub(in crate::volume) fn conflict(one: &Claim, other: &Claim) -> bool {
    let capabilities = vec![other.usage.capability];
    let (claims, node) = (ClaimSet::from_iter([one.clone()]), Some(other.node.clone()));
    let held = Claims { capabilities, claims, node, ..Claims::default() };
    matches!(admit(&held, other), Err(ClaimRefusal::Conflict { .. }))
}

/// Returns whether an access mode allows readers alone.
pub fn reader_only(mode: AccessMode) -> bool {
    matches!(mode, AccessMode::SingleNodeReaderOnly | AccessMode::MultiNodeReaderOnly)
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimEvent {
    /// A consumer claims the volume. The claim is `Pending`, and nothing was done for it yet. At a server a later call of the same node
    /// takes a present claim over.
    Claim(Claim),
    /// The claim is released by its consumer, or because it could not be satisfied.
    Release { consumer: String },
    /// Next try of pending or parked work.
    Continue { consumer: String },
    /// The caller has repeated the call on another connection. The end of that connection now ends the claim.
    Bind { consumer: String, bound: Bound },
    /// The unit or connection that the claim is bound to has ended, and the claim ends with it.
    Unbound { consumer: String },
    /// The node of a cluster says that the consumer has nothing of the volume there any more.
    Detached { consumer: String },
    /// Outcome of the effect.
    Ended { effect: ClaimEffect, outcome: ClaimOutcome },
    /// An operator states that the consumer is gone, with everything it had on its node. The claim is dropped as it is, and the
    /// node's attachment with the last claim there. Claims that only wait for its detach attach it again.
    Forget { consumer: String },
    /// The node's csid has started. No caller received an answer for the claims that were pending there.
    Recovered { node: String },
}

/// A step outside csid, for `consumer`'s claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimEffect {
    pub action: ClaimAction,
    pub consumer: String,
    pub node: String,
    /// Attachment of the node before the effect. `None`: there was none.
    pub from: Option<Box<Attachment>>,
    /// Grant of the claim before the effect. `None`: there was none.
    pub grant: Option<Grant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ClaimAction {
    /// ControllerPublishVolume.
    Attach,
    /// Unmount of every mount that the consumer has on the node.
    NodeDetach,
    /// ControllerUnpublishVolume.
    Detach,
    /// The call Claim of a cluster's server.
    ServerClaim,
    /// The call Detached of a cluster's server.
    ServerDetached,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimOutcome {
    Done,
    /// The call was never sent, or is known to have had no effect. `Some`: the reason why a repeated call ends the same way. `None`: a
    /// repeated call may be sent.
    NotSent(Option<String>),
    /// The call can be repeated as it is.
    Again,
    /// Not done, or the outcome is unknown. There will be other tries.
    Unknown,
    /// A repeated call ends the same way, for this reason. An attach is rolled back. A release is parked with the reason.
    Hopeless(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimNext {
    /// Persist the state durably, then perform the effect.
    Run(ClaimEffect),
    /// The consumer has the claim: persist durably, then answer.
    Taken,
    /// The claim's row is gone: persist durably, then answer.
    Free,
    /// Nothing to do now. The reason is in the row, or another try follows.
    Rest,
    /// The next step depends on what the plugin can do: probe the plugin first, then `Continue`.
    Unseen,
}

impl Claims {
    pub fn claim(&self, consumer: &str) -> Option<&Claim> {
        match &self.node {
            Some(node) => self.claims.get_at(consumer, node),
            None => self.claims.get(consumer),
        }
    }

    fn claim_mut(&mut self, consumer: &str) -> Result<&mut Claim, ClaimRefusal> {
        let claim = match &self.node {
            Some(node) => self.claims.get_mut_at(consumer, node),
            None => self.claims.get_mut(consumer),
        };
        claim.ok_or(ClaimRefusal::NoSuchClaim)
    }

    /// Returns the name of a claim's holder. Unit names are the same on many hosts, so in a cluster it begins with the node.
    fn shown(&self, claim: &Claim) -> String {
        match self.node {
            Some(_) => format!("{}/{}", claim.node, claim.consumer),
            None => claim.consumer.clone(),
        }
    }

    pub fn leg(&self, node: &str) -> Leg {
        self.attachments.iter().find(|at| at.node == node).map_or(Leg::Absent, |at| at.leg)
    }

    fn set_leg(&mut self, node: &str, leg: Leg) {
        if leg == Leg::Absent {
            return self.attachments.retain(|at| at.node != node);
        }
        match self.attachments.iter_mut().find(|at| at.node == node) {
            Some(at) => (at.leg, at.uncalled) = (leg, at.uncalled && leg == Leg::Making),
            None => self.attachments.push(Attachment::new(node, leg)),
        }
        let boot = self.boot.clone();
        if let Some(at) = self.attachments.iter_mut().find(|at| at.node == node && leg == Leg::Present) {
            at.boot = Some(boot);
        }
    }

    /// Writes that an attachment is wanted. A server makes the call later, and then says so in the row.
    fn make(&mut self, node: &str) {
        let is_later = self.node.is_some() && self.leg(node) == Leg::Absent;
        self.set_leg(node, Leg::Making);
        let node_id = self.node_id.clone();
        if let Some(at) = self.attachments.iter_mut().find(|at| at.node == node) {
            at.node_id = node_id;
            at.uncalled |= is_later;
        }
    }

    /// Restores the attachment to `from`, because the intended call had no effect.
    fn put_back(&mut self, node: &str, from: Option<&Attachment>) {
        self.attachments.retain(|at| at.node != node);
        self.attachments.extend(from.cloned());
    }

    /// Returns whether a server has granted the claim in this boot, or none is needed. A host that has left its cluster needs the grant of a
    /// claim from then.
    fn is_granted(&self, claim: &Claim) -> bool {
        match (&claim.grant, &self.cluster) {
            (None, cluster) => cluster.is_none(),
            (Some(grant), cluster) => {
                let is_own = cluster.as_ref().is_none_or(|cluster| *cluster == grant.cluster);
                is_own && grant.leg == Leg::Present && grant.boot.as_ref() == Some(&self.boot)
            }
        }
    }

    /// Notes that the servers have a claim no more: an operator has ended it by force. It stays, as its mounts do. A mount needs another grant
    /// first. Returns `false` if the claim is none that is granted and wanted.
    pub fn lose_grant(claim: &mut Claim) -> bool {
        let is_held = Claims::is_held(claim);
        if let Some(grant) = claim.grant.as_mut().filter(|_| is_held) {
            (grant.leg, grant.boot) = (Leg::Absent, None);
        }
        is_held
    }

    /// Returns whether servers have granted a claim, and have not ended it. After a boot the node asks for the grant again.
    pub fn was_granted(grant: &Grant) -> bool {
        match grant.leg {
            Leg::Present => true,
            Leg::Making => grant.boot.is_some(),
            Leg::Absent | Leg::Removing => false,
        }
    }

    /// Returns whether the node may have the volume in use by a claim that servers have granted. A claim that is being released is one until its mounts are
    /// gone.
    pub fn is_in_use(claim: &Claim) -> bool {
        claim.state == ClaimState::Taken && claim.grant.as_ref().is_some_and(Claims::was_granted)
    }

    /// Returns whether a claim is wanted, and granted by the servers of a cluster.
    pub fn is_held(claim: &Claim) -> bool {
        let is_granted = claim.grant.as_ref().is_some_and(|grant| grant.leg == Leg::Present);
        is_granted && claim.state == ClaimState::Taken && !claim.releasing
    }

    /// Sets the leg of a claim's grant. Its boot stays.
    fn set_grant(&mut self, consumer: &str, leg: Leg) {
        let cluster = self.cluster.clone().unwrap_or_default();
        if let Ok(claim) = self.claim_mut(consumer) {
            claim.grant.get_or_insert(Grant::new(cluster, leg)).leg = leg;
        }
    }

    /// Returns whether the node has the volume attached, or needs no attachment. `None`: it is not known whether the plugin
    /// attaches.
    fn is_attached(&self, node: &str) -> Option<bool> {
        let attached = |at: &Attachment| {
            at.node == node && at.leg == Leg::Present && at.boot.as_ref() == Some(&self.boot)
        };
        match self.attachments.iter().any(attached) {
            true => Some(true),
            false => self.attaches.map(|attaches| !attaches),
        }
    }

    /// Returns whether the plugin had another id for the node when the volume was attached. Only a detach by that id ends the
    /// attachment.
    fn is_renamed(&self, node: &str) -> bool {
        let Some(now) = &self.node_id else { return false };
        let other = |at: &Attachment| {
            at.node == node && !at.uncalled && at.node_id.as_ref().is_some_and(|id| id != now)
        };
        self.attachments.iter().any(other)
    }

    /// Returns whether the node is known to be detached. An attachment whose call may have been sent may exist, whatever capabilities
    /// the plugin has now (CSI rule 25). An attachment that the servers of a cluster have made is theirs to end.
    fn is_none(&self, node: &str) -> bool {
        let is_granted = |claim: &Claim| claim.node == node && claim.grant.is_some();
        let may_exist = |at: &Attachment| at.node == node && !at.uncalled;
        self.cluster.is_some()
            || self.claims.iter().any(is_granted)
            || !self.attachments.iter().any(may_exist)
    }

    /// Returns whether another claim on the same node may still have the volume.
    fn held_elsewhere(&self, claim: &Claim) -> bool {
        self.claims.iter().any(|other| {
            other.consumer != claim.consumer
                && other.node == claim.node
                && matches!(other.state, ClaimState::Pending | ClaimState::Taken)
        })
    }
}

/// Returns the next state and the next action, or the reason why nothing changes.
pub fn step(volume: &Claims, event: ClaimEvent) -> Result<(Claims, ClaimNext), ClaimRefusal> {
    let mut volume = volume.clone();
    let next = match event {
        ClaimEvent::Claim(wanted) => {
            admit(&volume, &wanted)?;
            let (consumer, by_mount) = (wanted.consumer.clone(), wanted.by_mount);
            match volume.claim(&consumer) {
                None => volume.claims.insert(wanted),
                Some(present) if volume.node.is_some() && is_later(&wanted.call, &present.call) => {
                    // The node has given the earlier call up. Messages of that call may come late, and must not end the claim.
                    let present = volume.claim_mut(&consumer)?;
                    (present.id, present.call) = (wanted.id, wanted.call);
                }
                Some(_) => {}
            }
            let next = advance(&mut volume, &consumer);
            if next == ClaimNext::Taken {
                // An explicit claim outlives the mount that took it. A Claim that has to do more first may fail.
                volume.claim_mut(&consumer)?.by_mount &= by_mount;
            }
            next
        }
        ClaimEvent::Release { consumer } => {
            volume.claim_mut(&consumer)?.releasing = true;
            advance(&mut volume, &consumer)
        }
        ClaimEvent::Continue { consumer } => {
            volume.claim_mut(&consumer)?.blocked = None;
            advance(&mut volume, &consumer)
        }
        ClaimEvent::Bind { consumer, bound } => {
            volume.claim_mut(&consumer)?.bound = Some(bound);
            ClaimNext::Rest
        }
        ClaimEvent::Unbound { consumer } => {
            let claim = volume.claim_mut(&consumer)?;
            claim.releasing = true;
            claim.bound.iter_mut().for_each(|bound| bound.ended = true);
            advance(&mut volume, &consumer)
        }
        ClaimEvent::Detached { consumer } => {
            let claim = volume.claim_mut(&consumer)?;
            (claim.releasing, claim.blocked) = (true, None);
            if claim.state == ClaimState::Taken {
                claim.state = ClaimState::NodeDetached;
            }
            advance(&mut volume, &consumer)
        }
        ClaimEvent::Ended { effect, outcome } => ended(&mut volume, &effect, outcome)?,
        ClaimEvent::Forget { consumer } => {
            let has_servers = volume.cluster.is_some();
            let claim = volume.claim_mut(&consumer)?;
            let node = claim.node.clone();
            match claim.grant {
                // The servers have yet to learn it.
                Some(_) if has_servers => {
                    (claim.releasing, claim.state) = (true, ClaimState::ControllerDetached)
                }
                _ => volume.claims.remove_at(&consumer, &node),
            }
            let is_detaching = volume.leg(&node) == Leg::Removing;
            let waits = |claim: &Claim| is_detaching && claim.state == ClaimState::Pending;
            let has_left =
                |claim: &Claim| claim.node != node || claim.state == ClaimState::ControllerDetached;
            if volume.claims.iter().all(|claim| has_left(claim) || waits(claim)) {
                volume.set_leg(&node, Leg::Absent);
            }
            ClaimNext::Free
        }
        ClaimEvent::Recovered { node } => {
            let pending = |claim: &&Claim| claim.state == ClaimState::Pending && claim.node == node;
            let pending: Vec<String> =
                volume.claims.iter().filter(pending).map(|claim| claim.consumer.clone()).collect();
            for consumer in pending {
                volume.claim_mut(&consumer)?.releasing = true;
            }
            for at in volume.attachments.iter_mut().filter(|at| at.node == node && at.leg == Leg::Making) {
                at.leg = Leg::Removing;
            }
            ClaimNext::Rest
        }
    };
    Ok((volume, next))
}

fn ended(
    volume: &mut Claims,
    effect: &ClaimEffect,
    outcome: ClaimOutcome,
) -> Result<ClaimNext, ClaimRefusal> {
    let ClaimEffect { action, consumer, node, from, grant } = effect;
    match (action, &outcome) {
        (ClaimAction::ServerClaim, ClaimOutcome::Done) => {
            let boot = Some(volume.boot.clone());
            if let Some(grant) = &mut volume.claim_mut(consumer)?.grant {
                (grant.leg, grant.boot) = (Leg::Present, boot);
            }
        }
        (ClaimAction::ServerDetached, ClaimOutcome::Done) => volume.claim_mut(consumer)?.grant = None,
        (ClaimAction::ServerClaim, ClaimOutcome::Unknown) | (ClaimAction::ServerDetached, _) => {}
        // This call has taken nothing. An earlier one may have.
        (ClaimAction::ServerClaim, _) => volume.claim_mut(consumer)?.grant.clone_from(grant),
        (_, ClaimOutcome::Again) | (ClaimAction::NodeDetach, _) => {}
        (ClaimAction::Attach, ClaimOutcome::NotSent(_)) => volume.put_back(node, from.as_deref()),
        (ClaimAction::Attach, ClaimOutcome::Done) => volume.set_leg(node, Leg::Present),
        (ClaimAction::Detach, ClaimOutcome::Done) => volume.set_leg(node, Leg::Absent),
        // A refused call may have been done in part, so it is negated before it is forgotten.
        (ClaimAction::Attach | ClaimAction::Detach, _) => volume.set_leg(node, Leg::Removing),
    }
    let claim = volume.claim_mut(consumer)?;
    match (outcome, action) {
        (ClaimOutcome::Done, ClaimAction::NodeDetach) => claim.state = ClaimState::NodeDetached,
        (ClaimOutcome::Done, _) => {}
        (ClaimOutcome::Again | ClaimOutcome::Unknown | ClaimOutcome::NotSent(None), _) => {
            return Ok(ClaimNext::Rest);
        }
        // No caller received an answer for a pending claim. An answered claim ends only by Release.
        (
            ClaimOutcome::Hopeless(_) | ClaimOutcome::NotSent(Some(_)),
            ClaimAction::Attach | ClaimAction::ServerClaim,
        ) => match claim.state {
            ClaimState::Pending => claim.releasing = true,
            _ => return Ok(ClaimNext::Rest),
        },
        (ClaimOutcome::Hopeless(why) | ClaimOutcome::NotSent(Some(why)), _) => {
            claim.blocked = Some(Blocked { reason: why });
            return Ok(ClaimNext::Rest);
        }
    }
    Ok(advance(volume, consumer))
}

/// Returns the one next effect of a claim. The state holds its intent when the effect is returned.
fn advance(volume: &mut Claims, consumer: &str) -> ClaimNext {
    loop {
        let Some(claim) = volume.claim(consumer).cloned() else { return ClaimNext::Free };
        let leg = volume.leg(&claim.node);
        let is_from = |at: &&Attachment| at.node == claim.node && !at.uncalled;
        let from = volume.attachments.iter().find(is_from).cloned().map(Box::new);
        let run = |action| {
            ClaimNext::Run(ClaimEffect {
                action,
                consumer: claim.consumer.clone(),
                node: claim.node.clone(),
                from: from.clone(),
                grant: claim.grant.clone(),
            })
        };
        let state = match (claim.state, claim.releasing) {
            (ClaimState::Pending | ClaimState::Taken, false) if !volume.is_granted(&claim) => {
                volume.set_grant(consumer, Leg::Making);
                return run(ClaimAction::ServerClaim);
            }
            (ClaimState::Pending | ClaimState::Taken, false) => match volume.is_attached(&claim.node) {
                Some(true) if claim.state == ClaimState::Taken => return ClaimNext::Taken,
                Some(true) => ClaimState::Taken,
                None => return ClaimNext::Unseen,
                Some(false) if leg == Leg::Removing || volume.is_renamed(&claim.node) => {
                    volume.set_leg(&claim.node, Leg::Removing);
                    return run(ClaimAction::Detach);
                }
                Some(false) if volume.node_id.is_none() => return ClaimNext::Unseen,
                Some(false) => {
                    volume.make(&claim.node);
                    return run(ClaimAction::Attach);
                }
            },
            // No mount of the claim was ever on the node.
            (ClaimState::Pending, true) => ClaimState::NodeDetached,
            (ClaimState::Taken, true) => return run(ClaimAction::NodeDetach),
            (ClaimState::NodeDetached, _) if volume.held_elsewhere(&claim) => ClaimState::ControllerDetached,
            (ClaimState::NodeDetached, _) if volume.is_none(&claim.node) => {
                volume.set_leg(&claim.node, Leg::Absent);
                ClaimState::ControllerDetached
            }
            (ClaimState::NodeDetached, _) => {
                volume.set_leg(&claim.node, Leg::Removing);
                return run(ClaimAction::Detach);
            }
            (ClaimState::ControllerDetached, _) if claim.grant.is_some() => {
                volume.set_grant(consumer, Leg::Removing);
                return run(ClaimAction::ServerDetached);
            }
            (ClaimState::ControllerDetached, _) => {
                volume.claims.remove_at(consumer, &claim.node);
                return ClaimNext::Free;
            }
        };
        if let Ok(claim) = volume.claim_mut(consumer) {
            claim.state = state;
            claim.kept |= state == ClaimState::Taken;
        }
    }
}

#[cfg(test)]
#[path = "grant_tests.rs"]
mod grant_tests;
#[cfg(test)]
#[path = "claim_tests.rs"]
mod tests;
#[cfg(test)]
#[path = "tests/walk/mod.rs"]
mod walk_tests;
