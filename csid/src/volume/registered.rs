//! What the bus asks of volumes beyond their mounts: the registry, claims, and what only a controller does.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::error::{Error, Kind, Result};
use crate::secret::Secrets;
use crate::store::registry::{
    Bound, Capability, Claim, ClaimFilter, ClaimMode, ClaimState, Record, RecordFilter, VolumeName,
    VolumeSpec,
};
use crate::store::rows::{AccessMode, AttachmentMode, VolumeKey};
use crate::volume::{Authority, Volumes, Wait};

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

fn later<T>() -> Result<T> {
    Err(Error::new(Kind::NotSupported, "not yet"))
}

impl Volumes {
    pub async fn register_volume(&self, _request: RegisterRequest) -> Result<VolumeView> {
        later()
    }

    pub async fn create_volume(&self, _request: CreateRequest) -> Result<VolumeView> {
        later()
    }

    pub async fn volumes(&self, _filter: RecordFilter) -> Result<Vec<VolumeView>> {
        later()
    }

    pub async fn volume(&self, _name: VolumeName) -> Result<VolumeView> {
        later()
    }

    /// Whether the plugin confirms it, and what it says if not.
    pub async fn validate_volume(
        &self,
        _request: VolumeRequest,
        _capability: Option<Capability>,
    ) -> Result<(bool, String)> {
        later()
    }

    pub async fn deregister_volume(&self, _request: VolumeRequest, _force: bool) -> Result<()> {
        later()
    }

    pub async fn delete_volume(&self, _request: VolumeRequest) -> Result<()> {
        later()
    }

    /// The capacity, and whether a node still has to expand it.
    pub async fn expand_volume(
        &self,
        _request: VolumeRequest,
        _required: u64,
        _limit: u64,
        _part: Part,
    ) -> Result<(u64, bool)> {
        later()
    }

    pub async fn attach_volume(
        &self,
        _request: VolumeRequest,
        _node_id: String,
        _read_only: bool,
        _access_mode: Option<AccessMode>,
        _attachment_mode: Option<AttachmentMode>,
    ) -> Result<BTreeMap<String, String>> {
        later()
    }

    pub async fn detach_volume(&self, _request: VolumeRequest, _node_id: String) -> Result<()> {
        later()
    }

    pub async fn explain(&self, _name: VolumeName) -> Result<Explanation> {
        later()
    }

    pub async fn claim(&self, _request: ClaimRequest) -> Result<Claimed> {
        later()
    }

    pub async fn release(&self, _request: ReleaseRequest) -> Result<()> {
        later()
    }

    pub async fn claims(&self, _filter: ClaimFilter) -> Result<Vec<(VolumeName, Claim)>> {
        later()
    }

    /// The uid that owns a claim, for the choice of the action to authorise.
    pub async fn claim_owner(&self, _name: &VolumeName, _consumer: &str) -> Result<Option<u32>> {
        later()
    }
}
