//! Carries out the controller's calls on the backend, as the specification requires.

use std::io;
use std::time::SystemTime;

use csi_proto::csi::v1::validate_volume_capabilities_response::Confirmed;
use csi_proto::csi::v1::{self, *};
use csid_tests::backend::{Attachment, Backend, Kept, Order, Snapshot, Use, Volume, id_of};
use csid_tests::script::{Call, Script, has};
use tonic::Status;

use crate::effects::internal;
use crate::service::with_capability;

/// The key of what publish_context says.
pub const TOKEN: &str = "attachment";
/// The size of a volume for which none was requested.
const BYTES: i64 = 4 << 20;
const AFTER: &str = "after:";

/// Returns the token of a new context: the script's, or another one each time, also after the plugin died.
fn token(script: &Script) -> String {
    if let Some(token) = &script.token {
        return token.clone();
    }
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("{:x}", since.as_nanos())
}

fn usage(capability: &VolumeCapability) -> Use {
    let Call { block, access_mode: mode, fs_type, .. } =
        with_capability(Call::default(), Some(capability.clone()));
    Use { block, mode, fs_type }
}

fn named<T: Kept>(backend: &Backend, id: &str) -> Result<T, Status> {
    let kept = backend.get(id).map_err(internal)?;
    kept.ok_or_else(|| Status::not_found(format!("{} has no {id}", T::KIND)))
}

pub fn shown(volume: &Volume) -> v1::Volume {
    let topology = Topology { segments: volume.topology.clone() };
    v1::Volume {
        volume_id: volume.id.clone(),
        capacity_bytes: volume.bytes,
        volume_context: volume.context.clone(),
        content_source: None,
        accessible_topology: (!topology.segments.is_empty()).then_some(topology).into_iter().collect(),
    }
}

pub fn taken(snapshot: &Snapshot, script: &Script) -> v1::Snapshot {
    v1::Snapshot {
        snapshot_id: snapshot.id.clone(),
        source_volume_id: snapshot.volume.clone(),
        size_bytes: snapshot.bytes,
        creation_time: Some(SystemTime::UNIX_EPOCH.into()),
        ready_to_use: snapshot.asked >= script.snapshot_ready_at,
        ..Default::default()
    }
}

pub fn create(backend: &Backend, script: &Script, r: &CreateVolumeRequest) -> Result<v1::Volume, Status> {
    use volume_content_source::Type;
    if r.volume_capabilities.is_empty() {
        return Err(Status::invalid_argument("a volume has capabilities"));
    }
    let source = r.volume_content_source.as_ref().and_then(|source| source.r#type.as_ref());
    let wanted = r.accessibility_requirements.as_ref().map_or(&[] as &[Topology], |wanted| &wanted.requisite);
    if script.wants_places && wanted.is_empty() {
        return Err(Status::failed_precondition("no place is required, and volumes are in places"));
    }
    let order = Order {
        uses: r.volume_capabilities.iter().map(usage).collect(),
        parameters: r.parameters.clone(),
        source: source.map(|source| match source {
            Type::Snapshot(snapshot) => snapshot.snapshot_id.clone(),
            Type::Volume(volume) => volume.volume_id.clone(),
        }),
        places: wanted.iter().map(|place| place.segments.clone()).collect(),
    };
    let (least, most) = bounds(r.capacity_range)?;
    let (least, most) = (least.max(script.least), most.max(script.least));
    let id = id_of("id", &r.name);
    if let Some(volume) = backend.get::<Volume>(&id).map_err(internal)? {
        let same = volume.order.as_ref() == Some(&order) && (least..=most).contains(&volume.bytes);
        return same
            .then(|| shown(&volume))
            .ok_or_else(|| Status::already_exists("there is another volume of that name"));
    }
    let source_bytes = match source {
        None => 0,
        Some(Type::Volume(volume)) => named::<Volume>(backend, &volume.volume_id)?.bytes,
        Some(Type::Snapshot(snapshot)) => {
            let snapshot: Snapshot = named(backend, &snapshot.snapshot_id)?;
            if snapshot.asked < script.snapshot_ready_at {
                return Err(Status::failed_precondition("the snapshot is not ready to use (CO rule 42)"));
            }
            snapshot.bytes
        }
    };
    let bytes = if least > 0 { least } else { BYTES.min(most) }.max(source_bytes);
    if bytes > most || bytes > script.capacity {
        return Err(Status::out_of_range(format!("a volume would have {bytes} bytes")));
    }
    if bytes > left(backend, script).map_err(internal)? {
        return Err(Status::resource_exhausted("there are too many volumes"));
    }
    let topology = match has(&script.plugin, "VOLUME_ACCESSIBILITY_CONSTRAINTS") {
        true => script.topology.clone(),
        false => Default::default(),
    };
    if !wanted.is_empty() && !wanted.iter().any(|place| place.segments == topology) {
        return Err(Status::resource_exhausted("there is no room at that place"));
    }
    let context = [("born".to_owned(), token(script))].into();
    let volume = Volume { order: Some(order), topology, context, ..Volume::provisioned(&id, bytes) };
    backend.put(&volume).map_err(internal)?;
    Ok(shown(&volume))
}

/// The least and the most bytes.
fn bounds(range: Option<CapacityRange>) -> Result<(i64, i64), Status> {
    let CapacityRange { required_bytes, limit_bytes } = range.unwrap_or_default();
    let most = if limit_bytes == 0 { i64::MAX } else { limit_bytes };
    if required_bytes < 0 || most < required_bytes {
        return Err(Status::invalid_argument("a capacity_range of nothing"));
    }
    Ok((required_bytes, most))
}

pub fn left(backend: &Backend, script: &Script) -> io::Result<i64> {
    let taken: i64 = backend.all::<Volume>()?.iter().map(|volume| volume.bytes).sum();
    Ok(script.capacity.saturating_sub(taken).max(0))
}

pub fn delete(backend: &Backend, id: &str) -> Result<(), Status> {
    let Some(volume) = backend.get::<Volume>(id).map_err(internal)? else { return Ok(()) };
    if let Some(node) = volume.attachments.keys().next() {
        return Err(Status::failed_precondition(format!("the volume is attached to {node} (CO rule 24)")));
    }
    match std::fs::remove_dir_all(backend.data(id)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(internal(error)),
        _ => {}
    }
    backend.remove::<Volume>(id).map_err(internal)
}

pub fn attach(
    backend: &Backend,
    script: &Script,
    call: &Call,
    r: &ControllerPublishVolumeRequest,
) -> Result<String, Status> {
    let usage = usage(&r.volume_capability.clone().unwrap_or_default());
    if r.readonly && !has(&script.controller, "PUBLISH_READONLY") {
        return Err(Status::invalid_argument("readonly without PUBLISH_READONLY (CO rule 32)"));
    }
    if call.node != script.node_id && !script.others.contains(&call.node) {
        return Err(Status::not_found("no such node (CO rule 27)"));
    }
    let mut volume: Volume = named(backend, &r.volume_id)?;
    if volume.order.is_some() && r.volume_context != volume.context {
        return Err(Status::invalid_argument("not the volume's volume_context (CO rule 31)"));
    }
    if !volume.can(&usage) {
        return Err(Status::invalid_argument("the volume was not made for that"));
    }
    if let Some(there) = volume.attachments.get(&call.node) {
        return (there.usage == usage && there.read_only == r.readonly)
            .then(|| there.token.clone())
            .ok_or_else(|| Status::already_exists("attached there, but not so (CO rule 34)"));
    }
    let for_many = |usage: &Use| usage.mode.starts_with("MULTI_NODE_");
    let other = volume.attachments.iter().find(|(_, there)| !for_many(&usage) || !for_many(&there.usage));
    if let Some((node, _)) = other {
        return Err(Status::failed_precondition(format!("the volume is attached to {node}")));
    }
    let attached = backend.all::<Volume>().map_err(internal)?;
    let many = attached.iter().filter(|other| other.attachments.contains_key(&call.node)).count();
    if script.max_volumes > 0 && many as i64 >= script.max_volumes {
        return Err(Status::resource_exhausted("the node has as many volumes as it can (CO rule 38)"));
    }
    let token = token(script);
    let attachment = Attachment { usage, read_only: r.readonly, token: token.clone() };
    volume.attachments.insert(call.node.clone(), attachment);
    backend.put(&volume).map_err(internal)?;
    Ok(token)
}

/// Detaches a volume. A volume that does not exist or is not attached counts as detached. An empty node stands for every node.
pub fn detach(backend: &Backend, call: &Call) -> Result<(), Status> {
    let Some(mut volume) = backend.get::<Volume>(&call.volume).map_err(internal)? else { return Ok(()) };
    volume.attachments.retain(|node, _| !call.node.is_empty() && *node != call.node);
    backend.put(&volume).map_err(internal)
}

pub fn confirm(backend: &Backend, r: ValidateVolumeCapabilitiesRequest) -> Result<Option<Confirmed>, Status> {
    let volume: Volume = named(backend, &r.volume_id)?;
    if r.volume_capabilities.is_empty() {
        return Err(Status::invalid_argument("no capabilities"));
    }
    let can = r.volume_capabilities.iter().all(|capability| volume.can(&usage(capability)));
    let is_it = volume.order.is_none() || volume.context == r.volume_context;
    Ok((can && is_it).then_some(Confirmed {
        volume_context: r.volume_context,
        volume_capabilities: r.volume_capabilities,
        parameters: r.parameters,
        mutable_parameters: r.mutable_parameters,
    }))
}

/// The new size.
pub fn expand(backend: &Backend, script: &Script, r: &ControllerExpandVolumeRequest) -> Result<i64, Status> {
    let mut volume: Volume = named(backend, &r.volume_id)?;
    let (least, most) = bounds(r.capacity_range)?;
    if volume.bytes > most {
        return Err(Status::out_of_range("the volume is larger already"));
    }
    if volume.bytes >= least {
        return Ok(volume.bytes);
    }
    if let Some(node) = volume.attachments.keys().next()
        && has(&script.plugin, "OFFLINE")
        && !has(&script.plugin, "ONLINE")
    {
        return Err(Status::failed_precondition(format!("the volume is attached to {node} (CO rule 26)")));
    }
    if least - volume.bytes > left(backend, script).map_err(internal)? {
        return Err(Status::out_of_range("there is no room for that"));
    }
    volume.bytes = least;
    backend.put(&volume).map_err(internal)?;
    Ok(least)
}

pub fn snapshot(backend: &Backend, r: &CreateSnapshotRequest) -> Result<Snapshot, Status> {
    let id = id_of("snap", &r.name);
    let snapshot = match backend.get::<Snapshot>(&id).map_err(internal)? {
        Some(snapshot) if snapshot.volume != r.source_volume_id => {
            return Err(Status::already_exists("there is another volume's snapshot of that name"));
        }
        Some(snapshot) => Snapshot { asked: snapshot.asked + 1, ..snapshot },
        None => {
            let volume: Volume = named(backend, &r.source_volume_id)?;
            Snapshot { id, volume: volume.id, bytes: volume.bytes, asked: 1 }
        }
    };
    backend.put(&snapshot).map_err(internal)?;
    Ok(snapshot)
}

/// Returns a page of objects sorted by id, and the token of the next page. A token names the last object of its page.
pub fn page<T: Kept>(
    all: Vec<T>,
    most: i32,
    token: &str,
    script: &Script,
) -> Result<(Vec<T>, String), Status> {
    let most = usize::try_from(most).map_err(|_| Status::invalid_argument("max_entries is negative"))?;
    let most = if most == 0 { script.page } else { most.min(script.page) };
    let after = match token {
        "" => "",
        token => token
            .strip_prefix(AFTER)
            .ok_or_else(|| Status::aborted("no token of this plugin (CO rule 40)"))?,
    };
    let mut rest: Vec<T> = all.into_iter().filter(|one| one.id() > after).collect();
    let is_last = rest.len() <= most;
    rest.truncate(most);
    let next = rest.last().filter(|_| !is_last).map(|last| format!("{AFTER}{}", last.id()));
    Ok((rest, next.unwrap_or_default()))
}
