//! Records as callers see them.

use csi_proto::cluster::v1::{
    AttachmentName, AttachmentRow, ClaimInList, ClaimRow, NodeExpansion, QueueRow, Spec, Use, VolumeRow,
};
use csi_proto::identity::{Identity, Role};
use csid::cluster::rows::write_spec;
use csid::error::cut;
use csid::store::registry::{
    Attachment, Claim, ClaimState, Expansion, Record, Registration, Standing, VolumeSpec,
};
use csid::store::rows::Leg;
use csid::volume::rules::{owes, words_of};
use csid_etcd::ClaimInList as ClaimOfList;
use prost::Message;
use sha2::{Digest, Sha256};

use crate::by_call::attachments;
use crate::excluded::excluding;

/// Claims in a volume's row at most: for operators, and for others. A node needs its own ones, and takes 128 KiB.
const OPERATORS_CLAIMS: usize = 256;
const CLAIMS: usize = 64;
/// The same of claims that wait.
const OPERATORS_QUEUE: usize = 64;
const QUEUE: usize = 16;
/// The nodes in it at most that owe an expansion.
const OWING: usize = 64;
/// Attachments by AttachVolume in it at most.
const ATTACHMENTS: usize = 64;
/// The limit of a claim's error and of a volume's, in bytes.
const ERROR: usize = 512;

/// Returns a record as this caller may see it. The maps and flags of a spec may contain a secret, so a node sees those of a volume
/// that it has claimed, and no other caller sees any.
pub fn row(record: &Record, caller: &Identity) -> VolumeRow {
    let most = match caller.role {
        Role::Operator => OPERATORS_CLAIMS,
        Role::Node | Role::Server => CLAIMS,
    };
    let is_own = |claim: &Claim| is_own(claim, caller);
    let is_whole = record.claims.len() <= most;
    let own = record.claims.iter().filter(|claim| is_whole || is_own(claim));
    let others = record.claims.iter().filter(|claim| !is_whole && !is_own(claim));
    let claims = own.chain(others).take(most).map(|claim| claim_row(claim, caller));
    VolumeRow { claims: claims.collect(), ..row_without_claims(record, caller) }
}

/// Does the same for the answer to a claim. It has no other claim: with them an answer would be as long as the list of claims.
pub fn granted_row(record: &Record, claim: &Claim, caller: &Identity) -> VolumeRow {
    VolumeRow { claims: vec![claim_row(claim, caller)], ..row_without_claims(record, caller) }
}

/// Does the same without claims. It has their number.
fn row_without_claims(record: &Record, caller: &Identity) -> VolumeRow {
    let registration = record.registration.as_ref();
    // A claim that came back by its node's word may be a lie while another one excludes it.
    let is_doubtful = |claim: &Claim| claim.adopted && excluding(record, claim).next().is_some();
    let is_holder = record.claims.iter().any(|claim| is_own(claim, caller) && !is_doubtful(claim));
    let handle = &record.volume.handle;
    let queued = match caller.role {
        Role::Operator => OPERATORS_QUEUE,
        Role::Node | Role::Server => QUEUE,
    };
    VolumeRow {
        namespace: record.name.namespace.clone(),
        volume: record.name.volume.clone(),
        plugin: record.volume.plugin.clone(),
        external_id: if handle.is_creating() { String::new() } else { handle.text().into_owned() },
        standing: match registration.map(|of| &of.standing) {
            None => String::new(),
            Some(Standing::Registered) => "registered".to_owned(),
            Some(Standing::Creating(_)) => "creating".to_owned(),
            Some(Standing::Deleting { .. }) => "deleting".to_owned(),
        },
        owner: registration.map(|of| of.owner.clone()).unwrap_or_default(),
        spec: registration.map(|of| spec(&of.spec, is_holder)),
        claims: Vec::new(),
        revision: record.revision,
        claim_count: u64::try_from(record.claims.len()).unwrap_or(u64::MAX),
        capacity: registration.and_then(|of| of.capacity).unwrap_or(0),
        queue: record.queue.iter().take(queued).map(|queued| queue_row(&queued.claim)).collect(),
        queue_count: u64::try_from(record.queue.len()).unwrap_or(u64::MAX),
        validated: None,
        snapshot: None,
        attachments: attachments(record).take(ATTACHMENTS).map(|at| attachment(at, caller)).collect(),
        attached: None,
        mark: Vec::new(),
        registration_id: String::new(),
        expansion: registration.and_then(|of| expansion(of, caller)),
        error: registration
            .filter(|of| caller.role == Role::Operator || of.owner == caller.to_string())
            .and_then(|of| of.blocked.as_ref().map(|blocked| &blocked.reason).or(of.error.as_ref()))
            .map(|error| cut(error, ERROR).into_owned())
            .unwrap_or_default(),
    }
}

/// Returns a digest of what every node is shown of a volume's registration. So it shows nothing of the maps and flags.
pub fn mark(record: &Record) -> Vec<u8> {
    let shown = VolumeRow {
        plugin: record.volume.plugin.clone(),
        external_id: record.volume.handle.text().into_owned(),
        owner: record.registration.as_ref().map(|of| of.owner.clone()).unwrap_or_default(),
        spec: record.registration.as_ref().map(|of| spec(&of.spec, false)),
        ..VolumeRow::default()
    };
    Sha256::digest(shown.encode_to_vec()).to_vec()
}

/// Returns what nodes owe of an expansion. A node that has done its part owes nothing.
fn expansion(registration: &Registration, caller: &Identity) -> Option<NodeExpansion> {
    let Some(owed) = &registration.owed_expansion else {
        // A server of an earlier version has written it, and kept no list.
        let pending = registration.pending_expansion.filter(|of| of.by_controller)?;
        let Expansion { required, limit, .. } = pending;
        return Some(NodeExpansion { required, limit, nodes: Vec::new() });
    };
    let nodes = match caller.role {
        Role::Node if !owes(owed, &caller.name) => return None,
        Role::Operator => owed.nodes.iter().take(OWING).cloned().collect(),
        Role::Node | Role::Server => Vec::new(),
    };
    Some(NodeExpansion { required: owed.required, limit: owed.limit, nodes })
}

/// Returns the answer to an AttachVolume, with the publish context. It is for the caller whose call that is.
pub fn attached(at: &Attachment, caller: &Identity) -> AttachmentRow {
    AttachmentRow { publish_context: at.publish_context.clone(), ..attachment(at, caller) }
}

/// Returns an attachment by AttachVolume as this caller may see it.
pub fn attachment(at: &Attachment, caller: &Identity) -> AttachmentRow {
    let asked = at.asked.clone().unwrap_or_default();
    let sees_error = caller.role == Role::Operator || asked.owner == caller.to_string();
    let error = asked.error.filter(|_| sees_error).unwrap_or_default();
    AttachmentRow {
        node_id: at.node_id.clone().unwrap_or_default(),
        node: at.node.clone(),
        state: leg(at.leg).to_owned(),
        error: cut(&error, ERROR).into_owned(),
        owner: asked.owner,
        id: asked.id,
        publish_context: Default::default(),
    }
}

/// Returns an attachment as operators see it who have to end it.
pub fn attachment_name(record: &Record, at: &Attachment) -> AttachmentName {
    AttachmentName {
        namespace: record.name.namespace.clone(),
        volume: record.name.volume.clone(),
        node_id: at.node_id.clone().unwrap_or_default(),
        node: at.node.clone(),
    }
}

/// Returns the word of an attachment's state.
pub fn leg(leg: Leg) -> &'static str {
    match leg {
        Leg::Present => "attached",
        Leg::Making => "attaching",
        // A leg that is absent is removed from the record.
        Leg::Removing | Leg::Absent => "detaching",
    }
}

fn queue_row(claim: &Claim) -> QueueRow {
    QueueRow {
        node: claim.node.clone(),
        consumer: claim.consumer.clone(),
        r#use: Some(use_of(claim)),
        since_usec: claim.since_usec,
    }
}

fn use_of(claim: &Claim) -> Use {
    let [mode, access_mode, attachment_mode] = words_of(claim.usage).map(str::to_owned);
    Use { mode, access_mode, attachment_mode }
}

/// Returns a claim as this caller may see it, with its volume. Who uses it and what keeps it up are for operators and its own node.
pub fn claim_in_list(of: &ClaimOfList, caller: &Identity) -> ClaimInList {
    let ClaimOfList { name, plugin, claim } = of;
    let row = ClaimInList {
        namespace: name.namespace.clone(),
        volume: name.volume.clone(),
        plugin: plugin.clone(),
        claim: Some(claim_row(claim, caller)),
        revision: claim.modify_index,
        parked: claim.blocked.is_some(),
        ..ClaimInList::default()
    };
    if caller.role != Role::Operator && !is_own(claim, caller) {
        return row;
    }
    let error = claim.blocked.as_ref().map(|blocked| &blocked.reason).or(claim.error.as_ref());
    ClaimInList {
        uid: claim.uid,
        by_mount: claim.by_mount,
        error: error.map(|error| cut(error, ERROR).into_owned()).unwrap_or_default(),
        since_usec: claim.since_usec,
        ..row
    }
}

fn claim_row(claim: &Claim, caller: &Identity) -> ClaimRow {
    let calls_of_own = format!("{caller}/");
    ClaimRow {
        node: claim.node.clone(),
        consumer: claim.consumer.clone(),
        r#use: Some(use_of(claim)),
        state: state(claim.state).to_owned(),
        releasing: claim.releasing,
        claim: if is_own(claim, caller) { claim.id.clone() } else { String::new() },
        call: claim.call.strip_prefix(&calls_of_own).unwrap_or_default().to_owned(),
    }
}

fn is_own(claim: &Claim, caller: &Identity) -> bool {
    caller.role == Role::Node && claim.node == caller.name
}

/// Returns a spec. Without `whole`, without its maps and flags.
fn spec(of: &VolumeSpec, whole: bool) -> Spec {
    let shown = write_spec(of);
    match whole {
        true => shown,
        false => Spec {
            mount_flags: Vec::new(),
            volume_context: Default::default(),
            parameters: Default::default(),
            ..shown
        },
    }
}

fn state(state: ClaimState) -> &'static str {
    match state {
        ClaimState::Pending => "pending",
        ClaimState::Taken => "taken",
        ClaimState::NodeDetached => "node-detached",
        ClaimState::ControllerDetached => "controller-detached",
    }
}
