//! The creation, the deletion and the expansion of a volume, as changes of its record. They are pure: csid alone makes the calls to the plugin between
//! them, and so do the servers of a cluster.

use std::collections::BTreeSet;

use crate::error::{Error, Kind, Result};
use crate::plugin::Created;
use crate::store::registry::{
    Claim, ClaimState, Creation, Expansion, MadeSnapshot, OwedExpansion, Record, Registration, SnapshotError,
    SnapshotTask, SnapshotWish, Standing,
};
use crate::store::rows::VolumeKey;
use crate::volume::errors::volume::VolumeError;
use crate::volume::lifecycle::{is_asked_for_by, is_unborn, refuse_in_transition, refuse_other};

/// The most nodes in the list of those that owe an expansion.
const OWING: usize = 128;

/// The state of a volume after the plugin's answer to CreateVolume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterCreation {
    Registered,
    /// The caller keeps the row of the volume.
    NotRegistered,
    /// A DeleteVolume has come in, and the deletion has begun.
    Deleting,
    /// The plugin does not confirm the source, or the volume has not the capacity that was asked for. The row of the volume stays.
    Unfit,
}

/// Enters a creation, whose name at the plugin is in the spec. An attachment under this name belongs to another volume.
pub fn begin_creation(record: &mut Record, plugin: &str, new: Registration) -> Result<()> {
    VolumeError::refuse_attached(record)?;
    record.volume = VolumeKey::creating(plugin, &new.spec.name);
    record.registration = Some(new);
    Ok(())
}

/// Joins the creation of a record, or finds that it is done. Refuses a call with other arguments. A creation that was given up continues.
pub fn join_creation(
    record: &mut Record,
    plugin: &str,
    wanted: &Registration,
    secrets_given: bool,
) -> Result<()> {
    refuse_other(record, plugin, wanted)?;
    if is_unborn(record)
        && let Some(Registration { spec, standing: Standing::Creating(creation), blocked, .. }) =
            &mut record.registration
    {
        creation.secrets_given |= secrets_given;
        *blocked = None;
        if wanted.spec.credential.is_some() {
            spec.credential.clone_from(&wanted.spec.credential);
        }
    }
    Ok(())
}

/// Enters that the volume is created only to be deleted.
pub fn doom(record: &mut Record) {
    if is_unborn(record)
        && let Some(Registration { standing: Standing::Creating(creation), .. }) = &mut record.registration
    {
        creation.to_delete = true;
    }
}

/// Enters the volume that the plugin has created. `task`: the volume as it was asked for. Fails if nothing of the record waits for it.
pub fn enter_created(record: &mut Record, task: &VolumeKey, created: &Created) -> Result<AfterCreation> {
    let name = record.name.clone();
    let external_id = || created.external_id.clone();
    let is_anothers = record.registration.is_some() && !is_asked_for_by(record, task);
    // After a forced Forget an attachment may use the name.
    if is_anothers || !record.attachments.is_empty() || !record.claims.is_empty() {
        return Err(VolumeError::Spare { name, external_id: external_id() }.into());
    }
    // The row was given up and is not made again.
    let Some(registration) = &mut record.registration else {
        return Err(VolumeError::GivenUp { name, external_id: external_id() }.into());
    };
    let Standing::Creating(creation) = &mut registration.standing else {
        return Err(VolumeError::Spare { name, external_id: external_id() }.into());
    };
    let (register, to_delete) = (creation.register, creation.to_delete);
    creation.sourceless = !created.from_source;
    registration.spec.context.clone_from(&created.context);
    registration.spec.topologies.clone_from(&created.topologies);
    registration.capacity = created.capacity;
    registration.blocked = None;
    registration.error = None;
    let is_fit = created.from_source && has_asked_capacity(creation, created.capacity);
    record.volume = VolumeKey::new(task.plugin.clone(), created.external_id.as_str());
    if to_delete {
        creation.to_delete = false;
        let secrets_given = creation.secrets_given;
        let back = if register && is_fit { Standing::Registered } else { registration.standing.clone() };
        registration.standing =
            Standing::Deleting { secrets_given, back: Some(Box::new(back)), unasked: false };
        return Ok(AfterCreation::Deleting);
    }
    if !is_fit {
        return Ok(AfterCreation::Unfit);
    }
    if !register {
        return Ok(AfterCreation::NotRegistered);
    }
    registration.standing = Standing::Registered;
    Ok(AfterCreation::Registered)
}

/// Returns whether a capacity is within the bounds of a creation. A plugin need not say the capacity.
fn has_asked_capacity(creation: &Creation, capacity: Option<u64>) -> bool {
    let &Creation { capacity_min, capacity_max, .. } = creation;
    capacity.is_none_or(|has| has >= capacity_min && (capacity_max == 0 || has <= capacity_max))
}

/// Fails if the volume was created otherwise than it was asked for: the plugin does not confirm the source of its data, or it has another
/// capacity. The same call fails in the same way.
pub fn refuse_unfit(record: &Record) -> Result<()> {
    let Some(Registration { standing: Standing::Creating(creation), capacity, .. }) = &record.registration
    else {
        return Ok(());
    };
    let (name, external_id) = (record.name.clone(), record.volume.handle.to_string());
    if creation.sourceless {
        return Err(VolumeError::UnconfirmedSource { name, external_id }.into());
    }
    match *capacity {
        Some(has) if !has_asked_capacity(creation, *capacity) => {
            let (least, most) = (creation.capacity_min, creation.capacity_max);
            Err(VolumeError::UnfitCapacity { name, external_id, has, least, most }.into())
        }
        _ => Ok(()),
    }
}

/// Removes the row of a creation: the plugin has no such volume, or another row has it.
pub fn not_created(record: &mut Record, task: &VolumeKey) {
    if is_asked_for_by(record, task) {
        record.registration = None;
    }
}

/// Returns whether the servers of a cluster have a volume created, expanded or deleted, or a snapshot of it made or deleted.
pub fn is_unfinished(record: &Record) -> bool {
    record.awaits_expansion()
        || record.wanted_snapshot().is_some()
        || record.registration.as_ref().is_some_and(|of| of.standing != Standing::Registered)
}

/// Refuses while the record says that the volume is in use, anywhere.
pub fn refuse_used(record: &Record) -> Result<()> {
    if !record.claims.is_empty() || !record.queue.is_empty() {
        return Err(VolumeError::in_use(record).into());
    }
    let nodes: Vec<String> =
        record.attachments.iter().map(|at| format!("node {}", at.shown_node())).collect();
    match nodes.is_empty() {
        true => Ok(()),
        false => Err(VolumeError::Attached { name: record.name.clone(), nodes }.into()),
    }
}

/// Enters the deletion of a volume that is registered. Returns whether the plugin may have been asked for it before.
pub fn begin_deletion(record: &mut Record, volume: &VolumeKey, secrets_given: bool) -> Result<bool> {
    // Another node may have claimed the volume since the caller has looked, and nothing else prevents that.
    if !record.claims.is_empty() {
        return Err(VolumeError::in_use(record).into());
    }
    let Some(registration) = &mut record.registration else { return Ok(false) };
    if record.volume != *volume {
        return Err(VolumeError::Replaced { name: record.name.clone() }.into());
    }
    Ok(match &mut registration.standing {
        // A repeated call without secrets keeps the note that the first call had some.
        Standing::Deleting { secrets_given: had, .. } => {
            *had |= secrets_given;
            true
        }
        standing => {
            let back = Some(Box::new(standing.clone()));
            *standing = Standing::Deleting { secrets_given, back, unasked: false };
            false
        }
    })
}

/// Restores the earlier state of a volume whose deletion the plugin refused. A volume that was not registered has no row then.
pub fn deletion_refused(record: &mut Record) {
    record.registration = record.registration.take().and_then(|registration| {
        let Standing::Deleting { back, .. } = &registration.standing else { return Some(registration) };
        let standing = Standing::clone(back.as_deref()?);
        Some(Registration { standing, blocked: None, error: None, ..registration })
    });
}

/// Returns whether a volume is to be larger than it is. `current`: its capacity in bytes, `None` if that is not known.
pub fn falls_short(current: Option<u64>, required: u64, limit: u64) -> Result<bool> {
    let least = required.max(current.unwrap_or(0));
    if limit > 0 && limit < least {
        let text = format!("limit {limit} is less than what the volume has or is to have ({least})");
        return Err(Error::invalid(text));
    }
    Ok(current.is_none_or(|has| required > has))
}

/// Enters the controller's answer to an expansion. An expansion that another call has asked for meanwhile stays. `node_is_due`: the nodes
/// that have claimed the volume owe their part from then on.
pub fn enter_expanded(record: &mut Record, asked: Expansion, capacity: Option<u64>, node_is_due: bool) {
    let Some(registration) = &mut record.registration else { return };
    let is_last = registration.pending_expansion == Some(asked);
    if is_last {
        registration.pending_expansion = None;
        registration.error = None;
    }
    if node_is_due || is_last {
        let Expansion { required, limit, .. } = asked;
        let owed = OwedExpansion { required, limit, ..OwedExpansion::default() };
        registration.owed_expansion = node_is_due.then(|| Box::new(owed));
    }
    registration.capacity = capacity.or(registration.capacity);
    settle_owed(record);
}

/// Returns the nodes of a cluster that may have a volume mounted.
fn nodes_with_claims(record: &Record) -> BTreeSet<&str> {
    let may_use = |claim: &&Claim| matches!(claim.state, ClaimState::Pending | ClaimState::Taken);
    record.claims.iter().filter(may_use).map(|claim| claim.node.as_str()).collect()
}

/// Brings the nodes that owe an expansion in line with the claims, after a change of these. A node without a claim owes nothing. Until a node has
/// done its part, each node with a claim owes it. The list is bounded: nodes with later names come into it when others have left it.
pub fn settle_owed(record: &mut Record) {
    let claiming: Vec<String> = match record.owed_expansion() {
        Some(_) => nodes_with_claims(record).into_iter().map(str::to_owned).collect(),
        None => return,
    };
    let Some(Registration { owed_expansion, .. }) = &mut record.registration else { return };
    let Some(owed) = owed_expansion else { return };
    match owed.by_node {
        false => (owed.nodes, owed.rest) = (Vec::new(), String::new()),
        true => owed.nodes.retain(|node| claiming.binary_search(node).is_ok()),
    }
    if !owed.by_node || !owed.rest.is_empty() {
        let later = claiming.partition_point(|node| *node <= owed.rest);
        let mut later = claiming.into_iter().skip(later);
        let room = OWING.saturating_sub(owed.nodes.len());
        owed.nodes.extend(later.by_ref().take(room));
        let is_whole = later.next().is_none();
        match owed.nodes.last() {
            Some(last) if !is_whole => owed.rest.clone_from(last),
            _ => owed.rest.clear(),
        }
    }
    if owed.by_node && owed.nodes.is_empty() {
        *owed_expansion = None;
    }
}

/// Returns whether a node has its part of an expansion to do, now or after it has claimed the volume.
pub fn owes(owed: &OwedExpansion, node: &str) -> bool {
    let is_later = !owed.rest.is_empty() && *node > *owed.rest;
    !owed.by_node || is_later || owed.nodes.iter().any(|of| of == node)
}

/// Enters that a node has done its part of an expansion. Returns `false` if it owes none with these bounds.
pub fn expanded_by_node(record: &mut Record, node: &str, required: u64, limit: u64) -> bool {
    let has_claim = nodes_with_claims(record).contains(node);
    let Some(owed) = record.registration.as_mut().and_then(|of| of.owed_expansion.as_mut()) else {
        return false;
    };
    if (owed.required, owed.limit) != (required, limit) || !has_claim || !owes(owed, node) {
        return false;
    }
    owed.by_node = true;
    owed.nodes.retain(|of| of != node);
    settle_owed(record);
    true
}

/// Takes back an expansion that the plugin has refused. `why` is for the callers that wait for it.
pub fn expansion_refused(record: &mut Record, asked: Expansion, why: &str) {
    if let Some(registration) = &mut record.registration
        && registration.pending_expansion == Some(asked)
    {
        registration.pending_expansion = None;
        registration.error = Some(why.to_owned());
    }
}

/// Refuses the first claim of a volume while a controller may be expanding it. The plugin may expand it OFFLINE (CSI rule 26).
pub fn refuse_expanding(record: &Record) -> Result<()> {
    match record.claims.is_empty() && record.driver.is_some() && record.awaits_expansion() {
        true => Err(Error::new(Kind::Busy, format!("{} is being expanded", record.name))),
        false => Ok(()),
    }
}

/// Enters a snapshot that is wanted of a registered volume. The same call joins what goes on, or finds its answer. Another call for the same
/// snapshot joins what goes on, too. Any other is refused while the plugin may make or delete a snapshot of the volume. Returns the name of the
/// call that goes on.
pub fn begin_snapshot(record: &mut Record, task: &SnapshotTask) -> Result<String> {
    refuse_in_transition(record)?;
    let name = record.name.clone();
    let Some(registration) = &mut record.registration else {
        return Err(VolumeError::NotRegistered { name }.into());
    };
    match &registration.snapshot {
        Some(present) if present.call == task.call => match present.what == task.what || present.is_over {
            true => Ok(task.call.clone()),
            false => Err(Error::invalid("the call wants another snapshot")),
        },
        Some(present) if !present.is_over && present.what == task.what => Ok(present.call.clone()),
        Some(present) if !present.is_over && !present.unasked => {
            Err(Error::new(Kind::Busy, format!("another snapshot of {name} is being made or deleted")))
        }
        Some(_) | None => {
            registration.snapshot = Some(task.clone().into());
            Ok(task.call.clone())
        }
    }
}

/// Enters the plugin's answer to CreateSnapshot. One that is not ready is asked for again (CSI rule 42).
pub fn enter_snapshot(record: &mut Record, call: &str, made: MadeSnapshot) {
    if let Some(task) = snapshot_of(record, call) {
        if made.ready {
            end_snapshot(task);
        }
        (task.made, task.error) = (Some(made), None);
    }
}

/// Enters that the snapshot is deleted.
pub fn snapshot_deleted(record: &mut Record, call: &str) {
    if let Some(task) = snapshot_of(record, call) {
        end_snapshot(task);
        task.error = None;
    }
}

/// Enters that a call for a snapshot has failed. `is_final`: it is not made again.
pub fn snapshot_failed(record: &mut Record, call: &str, error: SnapshotError, is_final: bool) {
    if let Some(task) = snapshot_of(record, call) {
        task.error = Some(error);
        if is_final {
            end_snapshot(task);
        }
    }
}

/// Notes whether the plugin was asked for the snapshot.
pub fn set_snapshot_unasked(record: &mut Record, is_unasked: bool) {
    if let Some(task) = record.registration.as_mut().and_then(|of| of.snapshot.as_mut()) {
        task.unasked = is_unasked;
    }
}

/// Returns the snapshot that this call of a caller wants.
fn snapshot_of<'a>(record: &'a mut Record, call: &str) -> Option<&'a mut SnapshotTask> {
    let task = record.registration.as_mut()?.snapshot.as_deref_mut()?;
    (task.call == call && !task.is_over).then_some(task)
}

/// Ends a task. Its parameters may have a secret, and are not kept.
fn end_snapshot(task: &mut SnapshotTask) {
    task.is_over = true;
    if let SnapshotWish::Create { parameters, .. } = &mut task.what {
        parameters.clear();
    }
}

/// Notes whether the plugin was asked for a creation or deletion that is in the record. Another standing stays.
pub fn set_unasked(record: &mut Record, is_unasked: bool) {
    match record.registration.as_mut().map(|registration| &mut registration.standing) {
        Some(Standing::Creating(Creation { unasked, .. }) | Standing::Deleting { unasked, .. }) => {
            *unasked = is_unasked;
        }
        None | Some(Standing::Registered) => {}
    }
}
