//! A controller call for a volume itself, and its end: CreateVolume, DeleteVolume and ControllerExpandVolume.

use std::time::Duration;

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::controller_call::Method;
use csi_proto::cluster::v1::{
    Answer, CallClass, CallEnded, Capability, ControllerCall, CreateSnapshot, CreateVolume, CreatedVolume,
    DeleteSnapshot, DeleteVolume, ExpandVolume, ExternalSnapshot, Topology,
};
use csid::store::registry::{
    Creation, DrivenRpc, MadeSnapshot, Record, Registration, SnapshotWish, Standing,
};
use csid::volume::rules::{self, Created};
use csid::{Error, Kind};
use tonic::Code;

use crate::failure::Result;
use crate::forward::{failure_of, is_silent, message};
use crate::metrics::method_name;

/// Returns the call that a volume's standing asks for. `None`: the volume is registered, or not there.
pub fn rpc_of_volume(record: &Record) -> Option<DrivenRpc> {
    match &record.registration.as_ref()?.standing {
        Standing::Creating(_) if record.volume.handle.is_creating() => Some(DrivenRpc::Create),
        // A node may have brought a claim back since the deletion was asked for.
        Standing::Deleting { .. } => record.claims.is_empty().then_some(DrivenRpc::Delete),
        Standing::Registered if record.awaits_expansion() => Some(DrivenRpc::Expand),
        Standing::Registered => match record.wanted_snapshot()?.what {
            SnapshotWish::Create { .. } => Some(DrivenRpc::Snapshot),
            SnapshotWish::Delete { .. } => Some(DrivenRpc::DeleteSnapshot),
        },
        Standing::Creating(_) => None,
    }
}

/// Returns whether the plugin was never asked for what the volume's standing asks for.
pub fn is_unasked(record: &Record) -> bool {
    match record.registration.as_ref().map(|registration| &registration.standing) {
        Some(Standing::Creating(creation)) => creation.unasked,
        Some(Standing::Deleting { unasked, .. }) => *unasked,
        None | Some(Standing::Registered) => false,
    }
}

/// Returns the word of a call in errors and in the memory of a volume.
pub fn word(rpc: DrivenRpc) -> &'static str {
    match rpc {
        DrivenRpc::Create => "create",
        DrivenRpc::Delete => "delete",
        DrivenRpc::Publish => "attach",
        DrivenRpc::Unpublish => "detach",
        DrivenRpc::Expand => "expand",
        DrivenRpc::Snapshot => "snapshot",
        DrivenRpc::DeleteSnapshot => "delete-snapshot",
    }
}

/// Returns whether claims of the volume have their turns while the call waits.
pub fn leaves_claims(rpc: DrivenRpc) -> bool {
    matches!(rpc, DrivenRpc::Expand | DrivenRpc::Snapshot | DrivenRpc::DeleteSnapshot)
}

/// A call for a volume that is ready to be sent.
pub struct VolumeCall {
    pub rpc: DrivenRpc,
    pub host: String,
    pub message: ControllerCall,
    /// The caller's name of its call for a snapshot. Empty: it is for none.
    pub snapshot: String,
}

/// How a call for a volume ended.
pub enum VolumeEnd {
    Created(Created),
    Deleted,
    /// `None`: the plugin does not report the capacity.
    Expanded {
        capacity: Option<u64>,
        node_is_due: bool,
    },
    Snapshot(MadeSnapshot),
    SnapshotGone,
    Failed(VolumeFailure),
}

/// A call for a volume that failed.
pub struct VolumeFailure {
    pub class: CallClass,
    /// The plugin's status. `None`: it is not known.
    code: Option<Code>,
    /// Whether the call has had an effect, though nothing can be done with it.
    is_done: bool,
    pub error: Error,
}

impl VolumeFailure {
    fn new(class: CallClass, error: Error) -> VolumeFailure {
        VolumeFailure { class, code: None, is_done: false, error }
    }

    /// Returns the failure of a call that its host was not sent.
    pub fn not_sent(error: Error) -> VolumeFailure {
        VolumeFailure::new(CallClass::NotSent, error)
    }

    /// Returns the failure of a call without an answer.
    pub fn lost(host: &str) -> VolumeFailure {
        let text = format!("node {host} did not answer the controller call");
        VolumeFailure::new(CallClass::Unknown, Error::new(Kind::Uncertain, text))
    }

    /// Returns whether the same call is made again soon.
    pub fn is_retried(&self) -> bool {
        matches!(self.class, CallClass::Unknown | CallClass::NotSent | CallClass::Again)
    }

    /// Returns whether the plugin has done nothing, and would refuse the call again. `asked_before`: an earlier call may have had an
    /// effect.
    pub fn is_no(&self, asked_before: bool) -> bool {
        match self.class {
            CallClass::Refused => !self.is_done && rules::proves_no_effect(self.code, false, asked_before),
            CallClass::Withheld => !asked_before,
            CallClass::Unknown | CallClass::NotSent | CallClass::Again => false,
        }
    }
}

impl VolumeCall {
    /// Makes the call of a volume. Its epoch is not known yet. `time`: how long the plugin has.
    pub fn new(record: &Record, rpc: DrivenRpc, host: &str, time: Duration) -> Result<VolumeCall> {
        let lacks = |what: &str| Error::internal(format!("{}: the record has no {what}", record.name));
        let registration = record.registration.as_ref().ok_or_else(|| lacks("registration"))?;
        let credential = registration.spec.credential.clone();
        let mut snapshot = String::new();
        let (order, method) = match (rpc, &registration.standing) {
            (DrivenRpc::Create, Standing::Creating(creation)) => {
                (format!("+{}", registration.spec.name), Method::Create(creating(registration, creation)))
            }
            (DrivenRpc::Delete, Standing::Deleting { .. }) => {
                (record.volume.handle.text().into_owned(), Method::Delete(DeleteVolume {}))
            }
            (DrivenRpc::Expand, Standing::Registered) => {
                let method = expanding(record, registration).ok_or_else(|| lacks("expansion"))?;
                (record.volume.handle.text().into_owned(), Method::Expand(method))
            }
            (DrivenRpc::Snapshot | DrivenRpc::DeleteSnapshot, Standing::Registered) => {
                let task = record.wanted_snapshot().ok_or_else(|| lacks("snapshot"))?;
                let method = match task.what.clone() {
                    SnapshotWish::Create { name, parameters } => {
                        Method::Snapshot(CreateSnapshot { name, parameters })
                    }
                    SnapshotWish::Delete { snapshot } => Method::DeleteSnapshot(DeleteSnapshot { snapshot }),
                };
                snapshot.clone_from(&task.call);
                (record.volume.handle.text().into_owned(), method)
            }
            _ => return Err(lacks("standing for the call").into()),
        };
        let message = message(record, registration, order, credential, method, time)?;
        Ok(VolumeCall { rpc, host: host.to_owned(), message, snapshot })
    }

    /// Reads the end of the call, as the host says it.
    pub fn read(&self, record: &Record, ended: CallEnded) -> VolumeEnd {
        let host = &self.host;
        let unsent = |why: &str| {
            let text = format!("node {host} did not make the controller call: {why}");
            VolumeEnd::Failed(VolumeFailure::not_sent(Error::new(Kind::PluginUnavailable, text)))
        };
        let unknown = |text: String| {
            let error = Error::new(Kind::PluginError, text);
            VolumeEnd::Failed(VolumeFailure::new(CallClass::Unknown, error))
        };
        match ended.how {
            Some(How::Answer(Answer { snapshot: Some(made), .. })) if self.rpc == DrivenRpc::Snapshot => {
                match check_made(record, &made) {
                    Ok(made) => VolumeEnd::Snapshot(made),
                    Err(error) => {
                        unknown(format!("node {host}: the plugin's answer to CreateSnapshot: {error}"))
                    }
                }
            }
            Some(How::Answer(Answer { created, expanded, .. })) => match (self.rpc, created, expanded) {
                (DrivenRpc::Delete, _, _) => VolumeEnd::Deleted,
                (DrivenRpc::DeleteSnapshot, _, _) => VolumeEnd::SnapshotGone,
                (DrivenRpc::Create, Some(created), _) => self.read_created(record, created),
                (DrivenRpc::Expand, _, Some(expanded)) => match i64::try_from(expanded.capacity) {
                    Ok(_) => VolumeEnd::Expanded {
                        capacity: Some(expanded.capacity).filter(|bytes| *bytes > 0),
                        node_is_due: expanded.node_expansion_required,
                    },
                    Err(_) => unknown(format!("node {host} answered with a capacity above CSI's limit")),
                },
                _ => unknown(format!("node {host} answered the controller call without a volume")),
            },
            Some(How::Failed(failure)) => {
                let rpc = method_name(self.message.method.as_ref());
                let error = failure_of(host, rpc, is_silent(&self.message), &failure);
                let code = failure.code.and_then(|code| i32::try_from(code).ok()).map(Code::from);
                let mut failed = VolumeFailure::new(failure.class(), error);
                let is_retried = failed.is_retried();
                failed.error = failed.error.with(|details| details.retryable = is_retried);
                VolumeEnd::Failed(VolumeFailure { code, ..failed })
            }
            Some(How::NotStarted(true)) => unsent("it could not begin in time"),
            Some(How::Stale(true)) => unsent("it has had a later one"),
            // A word of a later version. The call may have been made.
            _ => unknown(format!("node {host} ended the controller call with an unknown word")),
        }
    }

    /// Checks the plugin's answer. A volume that is to be deleted needs its ID alone.
    fn read_created(&self, record: &Record, created: CreatedVolume) -> VolumeEnd {
        let Some(Registration { spec, standing: Standing::Creating(creation), .. }) = &record.registration
        else {
            let error = Error::internal(format!("{}: the record has no creation", record.name));
            return VolumeEnd::Failed(VolumeFailure::new(CallClass::Unknown, error));
        };
        let CreatedVolume { external_id, volume_context, capacity, topologies, from_source } = created;
        let mut created = Created {
            external_id,
            context: volume_context,
            capacity: Some(capacity).filter(|bytes| *bytes > 0),
            topologies: topologies.into_iter().map(|topology| topology.segments).collect(),
            from_source: from_source || !spec.has_source(),
        };
        if creation.to_delete {
            created.context.clear();
            created.topologies.clear();
            created.capacity = None;
        }
        match rules::check_created(&record.volume.plugin, spec, &created) {
            Ok(()) => VolumeEnd::Created(created),
            // The volume is there, and nothing can use it. The same call would be answered so again.
            Err(error) => {
                let text = format!("node {}: the plugin's answer to CreateVolume: {error}", self.host);
                let error = Error::new(Kind::PluginError, text);
                let failed = VolumeFailure::new(CallClass::Refused, error);
                VolumeEnd::Failed(VolumeFailure { is_done: true, ..failed })
            }
        }
    }
}

/// Checks a snapshot as its host says it.
fn check_made(record: &Record, made: &ExternalSnapshot) -> csid::Result<MadeSnapshot> {
    let ExternalSnapshot { id, external_id, size, created_usec, ready } = made.clone();
    rules::check_external_id(&id)?;
    if *external_id != *record.volume.handle.text() {
        return Err(Error::invalid("the snapshot is of another volume"));
    }
    rules::check_capacity(size, 0)?;
    Ok(MadeSnapshot { id, external_id, size, created_usec, ready })
}

/// Returns the call of a record's expansion. `None`: it has none, or is usable in no way.
fn expanding(record: &Record, registration: &Registration) -> Option<ExpandVolume> {
    let pending = registration.pending_expansion?;
    let used = record.claims.iter().next().map(|claim| claim.usage.capability);
    let capability = used.or(registration.spec.capabilities.first().copied())?;
    let usage = registration.usage(capability);
    let [access_mode, attachment_mode] = rules::words_of_capability(capability).map(str::to_owned);
    Some(ExpandVolume {
        capability: Some(Capability { access_mode, attachment_mode }),
        fs_type: usage.fs_type,
        mount_flags: usage.mount_flags,
        mount_group: usage.mount_group,
        required: pending.required,
        limit: pending.limit,
        in_use: rules::refuse_used(record).is_err(),
    })
}

fn creating(registration: &Registration, creation: &Creation) -> CreateVolume {
    let spec = registration.spec.clone();
    let capabilities = spec.capabilities.iter().map(|of| {
        let [access_mode, attachment_mode] = rules::words_of_capability(*of).map(str::to_owned);
        Capability { access_mode, attachment_mode }
    });
    CreateVolume {
        capabilities: capabilities.collect(),
        fs_type: spec.fs_type,
        mount_flags: spec.mount_flags,
        mount_group: spec.mount_group,
        parameters: spec.parameters,
        topologies: spec.topologies.into_iter().map(|segments| Topology { segments }).collect(),
        capacity_min: creation.capacity_min,
        capacity_max: creation.capacity_max,
        source_snapshot: spec.snapshot,
        source_volume: creation.source.clone().unwrap_or_default(),
    }
}
