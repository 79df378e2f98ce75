//! What is asked of volumes beyond their mounts, and what is answered.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::secret::Secrets;
use crate::store::registry::{Bound, ClaimMode, ClaimState, Origin, Record, VolumeName, VolumeSpec};
use crate::store::rows::{AccessMode, AttachmentMode, VolumeKey};
use crate::volume::{Authority, Wait};

/// A volume that is given with the call, and not registered here.
#[derive(Clone)]
pub struct Inline {
    pub volume: VolumeKey,
    pub spec: VolumeSpec,
}

/// One call about one volume.
pub struct VolumeRequest {
    pub name: VolumeName,
    /// Absent: the volume is registered.
    pub inline: Option<Inline>,
    pub uid: u32,
    pub secrets: Option<Secrets>,
    /// The name of a credential to take instead of the volume's own.
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
    /// Its name is what the plugin is told; empty: csid makes one of the namespace and the id.
    pub spec: VolumeSpec,
    pub capacity_min: u64,
    /// 0: none given.
    pub capacity_max: u64,
    /// `false`: only create; the caller keeps the row.
    pub register: bool,
    pub uid: u32,
    pub secrets: Option<Secrets>,
    pub wait: Wait,
}

pub struct ClaimRequest {
    pub name: VolumeName,
    pub consumer: String,
    pub uid: u32,
    /// Absent: to write, where the access mode has writers.
    pub mode: Option<ClaimMode>,
    /// Absent: as the claims that there are, else the volume's first capability that goes with the rest.
    pub access_mode: Option<AccessMode>,
    pub attachment_mode: Option<AttachmentMode>,
    /// Absent: this one.
    pub node: Option<String>,
    /// How long to wait for the claims that are in the way; absent: not at all.
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
    /// An operator knows that it is gone: the claim is dropped as it is.
    pub force: bool,
    pub node: Option<String>,
    pub secrets: Option<Secrets>,
    pub credential: Option<String>,
    pub wait: Wait,
}

/// A registered volume as GetVolume tells it.
#[derive(Clone)]
pub struct VolumeView {
    /// Its registration is there; mount flags are not for the bus.
    pub record: Record,
    pub provider: String,
    pub provider_version: String,
    pub controller_required: bool,
    pub schedulable: bool,
    /// Consumers whose claims are past, the last one first.
    pub past: Vec<String>,
    /// A file declares it, and it is not registered: this is how it is to be.
    pub only_declared: bool,
}

#[derive(Clone)]
pub struct Claimed {
    pub volume: VolumeView,
    pub publish_context: BTreeMap<String, String>,
    pub external_node_id: String,
    pub state: ClaimState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    All,
    Controller,
    Node,
}

/// What csid knows of why a volume is not where it is wanted.
#[derive(Clone, Debug, Default)]
pub struct Explanation {
    /// Empty: nothing.
    pub waiting_for: String,
    pub holders: Vec<String>,
    pub last_error: String,
    /// Microseconds since 1970; 0: nothing is to be tried.
    pub next_try_usec: u64,
    pub steps: Vec<String>,
}
