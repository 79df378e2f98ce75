//! The arguments of calls on volumes.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use crate::host::TargetFd;
use crate::secret::Secrets;
use crate::store::registry::{Bound, ClaimMode, Origin, VolumeName, VolumeSpec};
use crate::store::rows::{AccessMode, AttachmentMode, MountKey, VolumeKey};
use crate::volume::api::mount_options::MountOptions;
use crate::volume::model::volume::Paths;

/// The deadline of a caller, and its name for the operation.
#[derive(Clone, Default)]
pub struct Wait {
    /// When csid read the call. `None`: csid begins the operation by itself.
    pub arrived: Option<Instant>,
    pub deadline: Option<Instant>,
    pub operation: Option<String>,
    /// Held until the operation has ended, which may be long after its caller's deadline.
    pub hold: Option<Arc<dyn Send + Sync>>,
}

/// The rows that a caller may change: only its own, or those of every uid. The actor that owns the row checks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Authority {
    Own(u32),
    Any(u32),
}

#[derive(Clone)]
pub struct MountRequest {
    pub key: MountKey,
    /// The plugin and external id of an inline volume. `None`: the volume is registered.
    pub inline: Option<VolumeKey>,
    pub uid: u32,
    pub options: MountOptions,
    /// The paths of a mount that another manager made. `None`: csid makes the mount.
    pub adopted: Option<Paths>,
    /// A descriptor of the target that the caller opened. With it csid never walks the path of the target.
    pub target_fd: Option<Arc<TargetFd>>,
    /// The end of the wait for the claims in the way. `None`: the call does not wait.
    pub wait_until: Option<Instant>,
    pub secrets: Option<Secrets>,
    pub wait: Wait,
}

/// The mounts that an Unmount may detach although they are in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Force {
    #[default]
    No,
    /// A mount that is gone, with what its target still shows.
    Gone,
    /// A mount whose server is gone.
    Dead,
    /// Also a mount whose server does not answer a probe that is made now.
    Hung,
}

pub struct UnmountRequest {
    pub key: MountKey,
    pub authority: Authority,
    /// Whether the call covers every mount of the consumer, whatever its tag.
    pub all_tags: bool,
    pub how: Unmounting,
    pub uncovered: Option<Uncovered>,
    pub wait: Wait,
}

/// A target that the caller has unmounted, with a descriptor of the directory that shows it. csid never walks the path of this
/// target.
#[derive(Clone)]
pub struct Uncovered {
    pub target: String,
    pub fd: Arc<TargetFd>,
}

/// How a mount is unmounted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unmounting {
    pub force: Force,
    /// Whether a missing mount or claim is NotFound. `false`: the call succeeds without one.
    pub must_exist: bool,
    /// Whether the call is answered after the first try. The rest is then retried without the caller.
    pub once: bool,
    /// Whether nothing is unmounted any more once this node has stopped to drain.
    pub by_drain: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct ReconcileOptions {
    pub dry_run: bool,
    pub remove_orphans: bool,
    pub new_journal: bool,
}

/// A volume that the call describes, and that is not registered here.
#[derive(Clone)]
pub struct Inline {
    pub volume: VolumeKey,
    pub spec: VolumeSpec,
}

/// A call about one volume.
pub struct VolumeRequest {
    pub name: VolumeName,
    /// The volume, if the call gives it. `None`: the volume is registered.
    pub inline: Option<Inline>,
    pub uid: u32,
    pub secrets: Option<Secrets>,
    /// The name of a credential to use instead of the volume's own.
    pub credential: Option<String>,
    pub wait: Wait,
}

pub struct RegisterRequest {
    pub name: VolumeName,
    pub volume: VolumeKey,
    pub spec: VolumeSpec,
    pub uid: u32,
    pub origin: Origin,
    pub secrets: Option<Secrets>,
    pub wait: Wait,
}

pub struct CreateRequest {
    pub name: VolumeName,
    pub plugin: String,
    /// The spec of the volume. Its `name` is the volume's name at the plugin. Empty: csid makes one of its node, the namespace
    /// and the id.
    pub spec: VolumeSpec,
    pub capacity_min: u64,
    /// The largest capacity that the caller accepts. 0: none is given.
    pub capacity_max: u64,
    /// Whether the volume is registered. `false`: csid only creates it, and the caller keeps the row.
    pub register: bool,
    pub uid: u32,
    pub secrets: Option<Secrets>,
    pub wait: Wait,
}

#[derive(Clone)]
pub struct ClaimRequest {
    pub name: VolumeName,
    pub consumer: String,
    pub uid: u32,
    /// The mode of the claim. `None`: the mode of an existing claim, else to write if the access mode has writers.
    pub mode: Option<ClaimMode>,
    /// The access mode. `None`: that of existing claims, else of the first registered capability that fits the rest.
    pub access_mode: Option<AccessMode>,
    pub attachment_mode: Option<AttachmentMode>,
    /// The node that claims. `None`: this node.
    pub node: Option<String>,
    /// The end of the wait for the claims in the way. `None`: the call does not wait.
    pub wait_until: Option<Instant>,
    pub bound: Option<Bound>,
    pub secrets: Option<Secrets>,
    pub credential: Option<String>,
    pub wait: Wait,
}

pub struct ReleaseRequest {
    pub name: VolumeName,
    pub consumer: String,
    pub authority: Authority,
    /// Whether the claim is dropped as it is, since an operator knows that its holder is gone.
    pub force: bool,
    pub node: Option<String>,
    pub secrets: Option<Secrets>,
    pub credential: Option<String>,
    /// The name that a server of the cluster gave the claim: another claim of the consumer stays. `None`: any.
    pub id: Option<String>,
    pub wait: Wait,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    All,
    Controller,
    Node,
}

/// The rows that root gives up.
pub struct ForgetRequest {
    pub key: MountKey,
    /// The node that has the claim. `None`: any node.
    pub node: Option<String>,
    /// Whether the call covers every mount of the consumer, whatever its tag.
    pub all_tags: bool,
    /// Whether the consumer's claim is forgotten too, with all its mounts.
    pub claim: bool,
    /// Whether a missing mount or claim is NotFound. `false`: the call succeeds without one.
    pub must_exist: bool,
    pub wait: Wait,
}

/// The token where a list continues, and the largest length of the page. 0: as much as the plugin likes.
pub struct Page {
    pub token: String,
    pub max: u32,
}

/// The arguments of a list of snapshots. An empty id stands for any.
pub struct ListSnapshots {
    pub snapshot: String,
    pub external_id: String,
    pub page: Page,
    pub uid: u32,
    pub secrets: Option<Secrets>,
    /// The name of a credential with the secrets.
    pub credential: Option<String>,
}

pub struct DeleteSnapshot {
    pub snapshot: String,
    pub uid: u32,
    pub secrets: Option<Secrets>,
    pub credential: Option<String>,
}

/// A volume as a file declares it.
#[derive(Clone, PartialEq, Eq)]
pub struct Declared {
    pub file: PathBuf,
    pub name: VolumeName,
    pub volume: VolumeKey,
    pub spec: VolumeSpec,
}
