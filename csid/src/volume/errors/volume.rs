//! Errors of volumes: their registration, creation, deletion and other calls to the controller.

use std::path::PathBuf;

use crate::error::{Details, Error, Kind, Obstacle, Step};
use crate::store::registry::{Record, VolumeName};
use crate::store::rows::VolumeKey;
use crate::volume::api::views::OperationView;
use crate::volume::model::subject::Subject;

/// Why a volume is not registered, created, deleted or otherwise changed.
#[derive(Debug, thiserror::Error)]
pub(in crate::volume) enum VolumeError {
    #[error("no plugin `{plugin}` is registered")]
    UnknownPlugin { plugin: String },
    #[error("volume {:?} of namespace {:?} is not registered", name.volume, name.namespace)]
    NotRegistered { name: VolumeName },
    /// A file declares the volume. A call that uses the volume registers it first.
    #[error("{name} is declared by {}, and not registered yet", file.display())]
    NotRegisteredYet { name: VolumeName, file: PathBuf },
    #[error("the volume that was {name} is not registered any more")]
    Replaced { name: VolumeName },
    /// The external ID was only in the damaged journal. `holder`: the consumer of the mount or claim.
    #[error(
        "the external id of {name} could not be read from the damaged journal, and without it csid cannot name the volume \
         to unpublish"
    )]
    Unidentified { name: VolumeName, plugin: String, holder: Option<String> },
    #[error("{name} is registered, so a call cannot give its plugin and external id")]
    Registered { name: VolumeName },
    /// `how`: registered or attached.
    #[error("external id `{}` of plugin {} is {how} as {name}", volume.handle, volume.plugin)]
    KnownAs { name: VolumeName, volume: VolumeKey, how: &'static str },
    #[error("{name} is claimed by {}", holders.join(", "))]
    InUse { name: VolumeName, holders: Vec<String> },
    #[error("{name} is claimed by {}, so its registration cannot change", holders.join(", "))]
    RegistrationInUse { name: VolumeName, holders: Vec<String> },
    #[error("{name} is mounted by {}", holders.join(", "))]
    Mounted { name: VolumeName, holders: Vec<String> },
    #[error("{name} is attached to {}", nodes.join(", "))]
    Attached { name: VolumeName, nodes: Vec<String> },
    /// The volume has no users.
    #[error("{name} is still being unstaged on this host")]
    StillStaged { name: VolumeName },
    #[error("{name} is not mounted on this node")]
    NotMounted { name: VolumeName },
    #[error("{name} is being created or deleted")]
    InTransition { name: VolumeName },
    /// `answer`: the plugin's last one; empty: there was none.
    #[error(
        "{name} is being created, and uid {uid} waits for it in the operation {operation} (at `{step}`{})",
        last(answer)
    )]
    BeingCreated { name: VolumeName, operation: String, uid: u32, step: Step, answer: String },
    /// AttachVolume has attached a volume that is not registered under the name.
    #[error("{name} is external id `{external_id}` of plugin {plugin}, attached to {}", nodes.join(", "))]
    NameAttached { name: VolumeName, external_id: String, plugin: String, nodes: Vec<String> },
    #[error("{name} was registered by another uid")]
    OtherOwner { name: VolumeName },
    #[error("{option} differs from the registration of {name} by uid {uid}")]
    OtherOption { name: VolumeName, option: &'static str, uid: u32 },
    #[error("{name} exists or is being created, with another {option}")]
    CreatedOtherwise { name: VolumeName, option: &'static str },
    #[error("the plugin {plugin} does not offer {capability}")]
    NotOffered { plugin: String, capability: &'static str },
    /// `why`: the plugin's message.
    #[error("the plugin does not confirm that {name} can be used so: {}", reason(why))]
    NotConfirmed { name: VolumeName, why: String },
    #[error("for {call} of {name} the plugin needs the secrets again, which csid does not keep")]
    SecretsNeeded { name: VolumeName, call: &'static str },
    #[error("snapshot {name} (`{id}`) is not ready to use yet")]
    SnapshotNotReady { name: String, id: String },
    #[error(
        "snapshot `{snapshot}` is of no volume that you have registered (for a new volume: in its namespace)"
    )]
    NotOwnSnapshot { snapshot: String },
    /// csid retries the CreateVolume, which has no answer.
    #[error("{}; csid goes on asking for it", source.message)]
    CreationGoesOn { source: Error },
    #[error(
        "the plugin made {name} (`{external_id}`), but does not say that it comes from the snapshot or volume that was \
         asked for: it may be empty. csid neither uses nor deletes it by itself"
    )]
    UnconfirmedSource { name: VolumeName, external_id: String },
    /// `most`: 0 for no limit.
    #[error(
        "the plugin made {name} (`{external_id}`) with {has} bytes, and capacity-min {least} and capacity-max {most} were \
         asked for. csid neither uses nor deletes it by itself"
    )]
    UnfitCapacity { name: VolumeName, external_id: String, has: u64, least: u64, most: u64 },
    /// The row of the created volume is gone, and its name means another volume now.
    #[error(
        "the plugin made `{external_id}` for {name}, which was registered or attached as another volume meanwhile"
    )]
    Spare { name: VolumeName, external_id: String },
    /// The row of the created volume was given up before.
    #[error("the plugin made `{external_id}` for {name}, whose creation was given up")]
    GivenUp { name: VolumeName, external_id: String },
    /// `file`: `None` where the file is gone or wrong.
    #[error("{name} {}", declaration(file))]
    OfFile { name: VolumeName, file: Option<PathBuf> },
    /// A call has registered the volume that a file declares.
    #[error("{name} was registered by a call, and a file does not take it over")]
    OfCall { name: VolumeName },
    /// The error of a declared volume, with its file.
    #[error("{}: {}", file.display(), source.message)]
    InFile { file: PathBuf, source: Error },
}

fn last(answer: &str) -> String {
    match answer.is_empty() {
        true => String::new(),
        false => format!(", the plugin's last answer was {answer}"),
    }
}

fn reason(why: &str) -> &str {
    if why.is_empty() { "it does not say why" } else { why }
}

fn declaration(file: &Option<PathBuf>) -> String {
    match file {
        Some(file) => format!("is declared by {}", file.display()),
        None => "was declared by a file of volumes.d that is gone or wrong".to_owned(),
    }
}

impl VolumeError {
    pub(in crate::volume) fn in_use(record: &Record) -> Self {
        VolumeError::InUse { name: record.name.clone(), holders: record.consumers() }
    }

    /// Makes the error for a DeleteVolume of a volume in creation.
    pub(in crate::volume) fn being_created(name: &VolumeName, under_way: OperationView) -> Self {
        let OperationView { id: operation, uid, step, said: answer, .. } = under_way;
        VolumeError::BeingCreated { name: name.clone(), operation, uid, step, answer }
    }

    /// Makes the error for a volume whose external ID was only in the damaged journal.
    pub(in crate::volume) fn unidentified(volume: &VolumeKey, subject: &Subject) -> Self {
        let holder = match subject {
            Subject::Mount(key) => Some(key.consumer.clone()),
            Subject::Claim(key) => Some(key.consumer.clone()),
            Subject::Volume(_) | Subject::Attachment { .. } => None,
        };
        VolumeError::Unidentified { name: subject.volume(), plugin: volume.plugin.clone(), holder }
    }

    /// Refuses a name under which AttachVolume has attached a volume that is not registered.
    pub(in crate::volume) fn refuse_attached(record: &Record) -> Result<(), Error> {
        if record.attachments.is_empty() {
            return Ok(());
        }
        let error = VolumeError::NameAttached {
            name: record.name.clone(),
            external_id: record.volume.handle.to_string(),
            plugin: record.volume.plugin.clone(),
            nodes: record.attachments.iter().map(|at| at.shown_node().to_owned()).collect(),
        };
        Err(error.into())
    }

    fn kind(&self) -> Kind {
        match self {
            VolumeError::UnknownPlugin { .. }
            | VolumeError::NotRegistered { .. }
            | VolumeError::NotRegisteredYet { .. }
            | VolumeError::Replaced { .. }
            | VolumeError::NotMounted { .. } => Kind::NotFound,
            VolumeError::Unidentified { .. } => Kind::Uncertain,
            VolumeError::InUse { .. }
            | VolumeError::RegistrationInUse { .. }
            | VolumeError::Mounted { .. }
            | VolumeError::Attached { .. }
            | VolumeError::StillStaged { .. }
            | VolumeError::InTransition { .. }
            | VolumeError::BeingCreated { .. }
            | VolumeError::NameAttached { .. }
            | VolumeError::Spare { .. } => Kind::Busy,
            VolumeError::OtherOwner { .. }
            | VolumeError::OtherOption { .. }
            | VolumeError::NotOwnSnapshot { .. } => Kind::NotAuthorized,
            VolumeError::Registered { .. }
            | VolumeError::KnownAs { .. }
            | VolumeError::CreatedOtherwise { .. }
            | VolumeError::OfCall { .. } => Kind::AlreadyExists,
            VolumeError::NotOffered { .. } | VolumeError::OfFile { .. } => Kind::NotSupported,
            VolumeError::NotConfirmed { .. } => Kind::InvalidArgument,
            VolumeError::SecretsNeeded { .. } => Kind::SecretRequired,
            VolumeError::SnapshotNotReady { .. } => Kind::TimedOut,
            VolumeError::UnconfirmedSource { .. } | VolumeError::UnfitCapacity { .. } => Kind::PluginError,
            VolumeError::GivenUp { .. } => Kind::Cancelled,
            VolumeError::CreationGoesOn { source } | VolumeError::InFile { source, .. } => source.kind,
        }
    }

    fn obstacle(&self) -> Option<Obstacle> {
        match self {
            VolumeError::UnknownPlugin { .. } => Some(Obstacle::UnknownPlugin),
            VolumeError::NotRegistered { .. } => Some(Obstacle::UnregisteredVolume),
            VolumeError::NotRegisteredYet { .. } => Some(Obstacle::DeclaredVolume),
            VolumeError::NotMounted { .. } => Some(Obstacle::NotMounted),
            VolumeError::Unidentified { .. } => Some(Obstacle::UnidentifiedVolume),
            VolumeError::Registered { .. } | VolumeError::KnownAs { .. } => Some(Obstacle::KnownVolume),
            VolumeError::BeingCreated { .. } => Some(Obstacle::Creation),
            VolumeError::UnconfirmedSource { .. } => Some(Obstacle::UnconfirmedSource),
            VolumeError::UnfitCapacity { .. } => Some(Obstacle::UnfitCapacity),
            VolumeError::Spare { .. } => Some(Obstacle::SpareVolume),
            VolumeError::OfFile { .. } => Some(Obstacle::DeclaredByFile),
            VolumeError::OfCall { .. } => Some(Obstacle::RegisteredByCall),
            _ => None,
        }
    }

    fn fill(self, details: &mut Details) {
        details.obstacle = self.obstacle();
        match self {
            VolumeError::UnknownPlugin { plugin } => details.plugin = Some(plugin),
            VolumeError::NotRegistered { name }
            | VolumeError::Registered { name }
            | VolumeError::KnownAs { name, .. }
            | VolumeError::OfCall { name } => {
                details.namespace = Some(name.namespace);
                details.volume = Some(name.volume);
            }
            VolumeError::NotRegisteredYet { .. } => details.retryable = true,
            VolumeError::Unidentified { plugin, holder, .. } => {
                details.retryable = false;
                details.plugin = Some(plugin);
                details.holders = Vec::from_iter(holder);
            }
            VolumeError::Spare { .. } => details.retryable = false,
            VolumeError::InUse { holders, .. }
            | VolumeError::RegistrationInUse { holders, .. }
            | VolumeError::Mounted { holders, .. }
            | VolumeError::Attached { nodes: holders, .. } => details.holders = holders,
            VolumeError::BeingCreated { operation, .. } => details.holders = vec![operation],
            VolumeError::CreationGoesOn { source } | VolumeError::InFile { source, .. } => {
                *details = *source.details;
            }
            _ => {}
        }
    }
}

impl From<VolumeError> for Error {
    fn from(error: VolumeError) -> Self {
        Error::new(error.kind(), error.to_string()).with(|details| error.fill(details))
    }
}
