//! Claims: who may have a volume beside those who have it ([`admit`]), and the way of a claim from the first call of the controller
//! to its last. Pure, as `state`: the caller persists what [`step`] returns, does the effect, and feeds its outcome back.
//!
//! ```text
//!             Attach                NodeDetach             Detach
//!   Pending ─────────▶ Taken ─────────────▶ NodeDetached ─────────▶ ControllerDetached ──▶ free: the row is gone
//! ```
//!
//! * A node's attachment is a leg that all claims of that node share, as all mounts of a volume share its staging: it is made
//!   for the first of them and taken away after the last, once (CSI rules 20, 23).
//! * The controller is told to detach only when no claim on that node is left whose node has not let go: never before, and
//!   with another live claim on the node not at all.
//! * `Making` and `Removing` are written before the call; what is not known is `Removing`, and only an acknowledged
//!   ControllerUnpublish ends that (rule 25).

use crate::store::registry::{Attachment, Bound, Capability, Claim, ClaimMode, ClaimState};
use crate::store::rows::{AccessMode, Leg};
use crate::volume::admission::OF_UID;

/// All that decides what may happen to a volume's claims.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claims {
    /// The plugin has a controller, and it attaches. `None`: that is not known yet.
    pub attaches: Option<bool>,
    /// What the plugin calls the node whose csid asks now. Empty: not known yet.
    pub node_id: String,
    /// What the volume was registered with.
    pub capabilities: Vec<Capability>,
    pub claims: Vec<Claim>,
    /// Those that are not known to be absent.
    pub attachments: Vec<Attachment>,
    /// The boot of now: what was attached in another one is attached again before it is used.
    pub boot: String,
}

/// Why a claim cannot be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The claim is another uid's.
    NotOwner,
    /// The consumer has the volume with other options.
    OtherOptions,
    /// The consumer's earlier claim is still being let go.
    Releasing,
    /// The volume was not registered with it.
    NoCapability,
    /// To write with a reader-only access mode.
    ReaderOnly,
    /// Somebody has what cannot be had twice.
    Conflict { what: &'static str, holders: Vec<String> },
    /// The uid has [`OF_UID`] claims.
    TooMany,
    /// There is no such claim.
    NoSuchClaim,
}

/// Whether a claim may be had beside the volume's others. The first one sets the modes, until the last one is free.
pub fn admit(volume: &Claims, wanted: &Claim) -> Result<(), Refusal> {
    let (mode, capability) = (wanted.usage.mode, wanted.usage.capability);
    let access_mode = capability.access_mode;
    if let Some(present) = volume.claim(&wanted.consumer) {
        if present.uid != wanted.uid {
            return Err(Refusal::NotOwner);
        }
        if present.releasing {
            return Err(Refusal::Releasing);
        }
        let same_bound = match (&present.bound, &wanted.bound) {
            (Some(present), Some(wanted)) => present.same_call(wanted),
            // A Mount that says nothing of it goes with the claim that is there.
            (Some(_), None) => wanted.by_mount,
            (None, wanted) => wanted.is_none(),
        };
        let same = same_bound && (present.usage, &present.node) == (wanted.usage, &wanted.node);
        return if same { Ok(()) } else { Err(Refusal::OtherOptions) };
    }
    if wanted.uid != 0 && volume.claims.iter().filter(|claim| claim.uid == wanted.uid).count() >= OF_UID {
        return Err(Refusal::TooMany);
    }
    if !volume.capabilities.contains(&capability) {
        return Err(Refusal::NoCapability);
    }
    if reader_only(access_mode) && mode == ClaimMode::Write {
        return Err(Refusal::ReaderOnly);
    }
    let conflict = |what, held: fn(&Claim, &Claim) -> bool| {
        let holders = volume.claims.iter().filter(|other| held(other, wanted));
        let holders: Vec<String> = holders.map(|other| other.consumer.clone()).collect();
        if holders.is_empty() { Ok(()) } else { Err(Refusal::Conflict { what, holders }) }
    };
    if volume.attachments.iter().any(|at| at.by_call.is_some()) {
        return Err(Refusal::Conflict { what: "an attachment by AttachVolume", holders: Vec::new() });
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

pub(super) fn reader_only(mode: AccessMode) -> bool {
    matches!(mode, AccessMode::SingleNodeReaderOnly | AccessMode::MultiNodeReaderOnly)
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A consumer wants the volume: `Pending`, nothing of it done.
    Claim(Claim),
    /// It is let go: by its consumer, or because it could not be had.
    Release { consumer: String },
    /// The next try of what is under way or parked.
    Continue { consumer: String },
    /// The caller has repeated his call on another connection: that one ends the claim.
    Bind { consumer: String, bound: Bound },
    /// What the claim is bound to has ended, and with it the claim.
    Unbound { consumer: String },
    /// The effect's outcome.
    Ended { effect: Effect, outcome: Outcome },
    /// An operator knows that the consumer, and what it had on its node, is gone: the claim is dropped as it is, and the node's
    /// attachment with the last claim there.
    Forget { consumer: String },
    /// The node's csid has started: nobody was told of what was pending there.
    Recovered { node: String },
}

/// One thing to do outside, for `consumer`'s claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effect {
    pub action: Action,
    pub consumer: String,
    pub node: String,
    /// The node's attachment before it.
    pub from: Option<Attachment>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// ControllerPublishVolume.
    Attach,
    /// Every mount of the consumer's on the node is unmounted.
    NodeDetach,
    /// ControllerUnpublishVolume.
    Detach,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// It never reached whom it was for; with a reason: nor will the same again.
    NotSent(Option<String>),
    /// It can be tried again as it is.
    Again,
    /// Not done, or nobody knows; there will be other tries.
    Unknown,
    /// The same again will end the same: an attach is undone, what is let go is parked with the reason.
    Hopeless(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Persist the state for good, then do it.
    Run(Effect),
    /// The claim is the consumer's: persist for good, then answer.
    Taken,
    /// The claim's row is gone: persist for good, then answer.
    Free,
    /// Nothing now: its reason is in the row, or another try comes.
    Rest,
    /// What comes next depends on what the plugin can do: see it first, then `Continue`.
    Unseen,
}

impl Claims {
    pub fn claim(&self, consumer: &str) -> Option<&Claim> {
        self.claims.iter().find(|claim| claim.consumer == consumer)
    }

    fn claim_mut(&mut self, consumer: &str) -> Result<&mut Claim, Refusal> {
        self.claims.iter_mut().find(|claim| claim.consumer == consumer).ok_or(Refusal::NoSuchClaim)
    }

    pub fn leg(&self, node: &str) -> Leg {
        self.attachments.iter().find(|at| at.node == node).map_or(Leg::Absent, |at| at.leg)
    }

    fn set_leg(&mut self, node: &str, leg: Leg) {
        if leg == Leg::Absent {
            return self.attachments.retain(|at| at.node != node);
        }
        match self.attachments.iter_mut().find(|at| at.node == node) {
            Some(at) => at.leg = leg,
            None => self.attachments.push(Attachment::new(node, leg)),
        }
        let boot = self.boot.clone();
        if let Some(at) = self.attachments.iter_mut().find(|at| at.node == node && leg == Leg::Present) {
            at.boot = boot;
        }
    }

    fn make(&mut self, node: &str) {
        self.set_leg(node, Leg::Making);
        let node_id = self.node_id.clone();
        self.attachments.iter_mut().filter(|at| at.node == node).for_each(|at| at.node_id = node_id.clone());
    }

    /// Nothing came of what was intended: the attachment is as it was.
    fn put_back(&mut self, node: &str, from: Option<Attachment>) {
        self.attachments.retain(|at| at.node != node);
        self.attachments.extend(from);
    }

    /// Whether what has to be attached is; `None`: nobody knows whether it has to be.
    fn is_attached(&self, node: &str) -> Option<bool> {
        let attached = |at: &Attachment| at.node == node && at.leg == Leg::Present && at.boot == self.boot;
        match self.attachments.iter().any(attached) {
            true => Some(true),
            false => self.attaches.map(|attaches| !attaches),
        }
    }

    /// Whether the plugin had another name for the node when it was attached, which only a detach by that name ends.
    fn is_renamed(&self, node: &str) -> bool {
        let other = |at: &Attachment| at.node == node && !at.node_id.is_empty() && at.node_id != self.node_id;
        !self.node_id.is_empty() && self.attachments.iter().any(other)
    }

    /// Whether the node's attachment is none: before it was seen that the plugin does not attach, it was to be asked to,
    /// and was not (CSI rule 19). `None`: that is not known yet.
    fn is_none(&self, node: &str) -> Option<bool> {
        match self.attachments.iter().find(|at| at.node == node) {
            None => Some(true),
            Some(at) if at.leg == Leg::Present || !at.boot.is_empty() => Some(false),
            Some(_) => self.attaches.map(|attaches| !attaches),
        }
    }

    /// Whether another claim's node may still have the volume.
    fn held_elsewhere(&self, claim: &Claim) -> bool {
        self.claims.iter().any(|other| {
            (other.consumer != claim.consumer && other.node == claim.node)
                && matches!(other.state, ClaimState::Pending | ClaimState::Taken)
        })
    }
}

/// The next state and what to do, or why nothing changes.
pub fn step(volume: &Claims, event: Event) -> Result<(Claims, Next), Refusal> {
    let mut volume = volume.clone();
    let next = match event {
        Event::Claim(wanted) => {
            admit(&volume, &wanted)?;
            let consumer = wanted.consumer.clone();
            match volume.claim_mut(&consumer) {
                // Claimed by itself it outlives the mount that took it.
                Ok(present) => present.by_mount &= wanted.by_mount,
                Err(_) => volume.claims.push(wanted),
            }
            advance(&mut volume, &consumer)
        }
        Event::Release { consumer } => {
            volume.claim_mut(&consumer)?.releasing = true;
            advance(&mut volume, &consumer)
        }
        Event::Continue { consumer } => {
            volume.claim_mut(&consumer)?.parked.clear();
            advance(&mut volume, &consumer)
        }
        Event::Bind { consumer, bound } => {
            volume.claim_mut(&consumer)?.bound = Some(bound);
            Next::Rest
        }
        Event::Unbound { consumer } => {
            let claim = volume.claim_mut(&consumer)?;
            claim.releasing = true;
            claim.bound.iter_mut().for_each(|bound| bound.ended = true);
            advance(&mut volume, &consumer)
        }
        Event::Ended { effect, outcome } => ended(&mut volume, &effect, outcome)?,
        Event::Forget { consumer } => {
            let node = volume.claim_mut(&consumer)?.node.clone();
            volume.claims.retain(|claim| claim.consumer != consumer);
            if volume.claims.iter().all(|claim| claim.node != node) {
                volume.set_leg(&node, Leg::Absent);
            }
            Next::Free
        }
        Event::Recovered { node } => {
            let pending = |claim: &&mut Claim| claim.node == node && claim.state == ClaimState::Pending;
            volume.claims.iter_mut().filter(pending).for_each(|claim| claim.releasing = true);
            for at in volume.attachments.iter_mut().filter(|at| at.node == node && at.leg == Leg::Making) {
                at.leg = Leg::Removing;
            }
            Next::Rest
        }
    };
    Ok((volume, next))
}

fn ended(volume: &mut Claims, effect: &Effect, outcome: Outcome) -> Result<Next, Refusal> {
    let Effect { action, consumer, node, from } = effect;
    match (action, &outcome) {
        (_, Outcome::Again) | (Action::NodeDetach, _) => {}
        (Action::Attach, Outcome::NotSent(_)) => volume.put_back(node, from.clone()),
        (Action::Attach, Outcome::Done) => volume.set_leg(node, Leg::Present),
        (Action::Detach, Outcome::Done) => volume.set_leg(node, Leg::Absent),
        // What was refused may have been done in part: it is negated before it is forgotten.
        (Action::Attach | Action::Detach, _) => volume.set_leg(node, Leg::Removing),
    }
    let claim = volume.claim_mut(consumer)?;
    match (outcome, action) {
        (Outcome::Done, Action::NodeDetach) => claim.state = ClaimState::NodeDetached,
        (Outcome::Done, _) => {}
        (Outcome::Again | Outcome::Unknown | Outcome::NotSent(None), _) => return Ok(Next::Rest),
        // Nobody was told of it. One that was answered ends only by Release.
        (Outcome::Hopeless(_) | Outcome::NotSent(Some(_)), Action::Attach)
            if claim.state == ClaimState::Pending =>
        {
            claim.releasing = true
        }
        (Outcome::Hopeless(_) | Outcome::NotSent(Some(_)), Action::Attach) => return Ok(Next::Rest),
        (Outcome::Hopeless(why) | Outcome::NotSent(Some(why)), _) => {
            claim.parked = why;
            return Ok(Next::Rest);
        }
    }
    Ok(advance(volume, consumer))
}

/// The one next effect of a claim; its intent is in the state when it is returned.
fn advance(volume: &mut Claims, consumer: &str) -> Next {
    loop {
        let Some(claim) = volume.claim(consumer).cloned() else { return Next::Free };
        let leg = volume.leg(&claim.node);
        let from = volume.attachments.iter().find(|at| at.node == claim.node).cloned();
        let run = |action| {
            Next::Run(Effect {
                action,
                consumer: claim.consumer.clone(),
                node: claim.node.clone(),
                from: from.clone(),
            })
        };
        let state = match (claim.state, claim.releasing) {
            (ClaimState::Pending | ClaimState::Taken, false) => match volume.is_attached(&claim.node) {
                Some(true) if claim.state == ClaimState::Taken => return Next::Taken,
                Some(true) => ClaimState::Taken,
                None => return Next::Unseen,
                Some(false) if leg == Leg::Removing || volume.is_renamed(&claim.node) => {
                    volume.set_leg(&claim.node, Leg::Removing);
                    return run(Action::Detach);
                }
                Some(false) if volume.node_id.is_empty() => return Next::Unseen,
                Some(false) => {
                    volume.make(&claim.node);
                    return run(Action::Attach);
                }
            },
            // Nothing of it was ever on the node.
            (ClaimState::Pending, true) => ClaimState::NodeDetached,
            (ClaimState::Taken, true) => return run(Action::NodeDetach),
            (ClaimState::NodeDetached, _) if volume.held_elsewhere(&claim) => ClaimState::ControllerDetached,
            (ClaimState::NodeDetached, _) => match volume.is_none(&claim.node) {
                Some(true) => {
                    volume.set_leg(&claim.node, Leg::Absent);
                    ClaimState::ControllerDetached
                }
                Some(false) => {
                    volume.set_leg(&claim.node, Leg::Removing);
                    return run(Action::Detach);
                }
                None => return Next::Unseen,
            },
            (ClaimState::ControllerDetached, _) => {
                volume.claims.retain(|other| other.consumer != consumer);
                return Next::Free;
            }
        };
        if let Ok(claim) = volume.claim_mut(consumer) {
            claim.state = state;
            claim.kept |= state == ClaimState::Taken;
        }
    }
}

#[cfg(test)]
#[path = "claims_tests.rs"]
mod tests;
