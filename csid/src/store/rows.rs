//! The rows of the journal. Plain data: `volume` decides how a row may change.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::store::event_kind::EventKind;
use crate::store::volume_handle::VolumeHandle;
use crate::store::words::or_default;

/// The state of a leg of a mount: the staging, a publish, or a consumer's target. Each leg is made and removed.
///
/// `Making` and `Removing` are intents: the effect may or may not have happened. A `Making` leg may be tried again as it
/// is; a `Removing` one is not known to be there, and only its negation makes it `Absent` (CSI rule 25).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Leg {
    Absent,
    Making,
    Present,
    Removing,
}

/// A mount's state, in the contract's words (`org.csid1`, mount states). The first two want the mount, the next two want
/// it gone, the last two rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    Mounting,
    Mounted,
    Unmounting,
    Uncertain,
    Lost,
    Waiting,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AccessMode {
    SingleNodeWriter,
    SingleNodeReaderOnly,
    SingleNodeSingleWriter,
    SingleNodeMultiWriter,
    MultiNodeReaderOnly,
    MultiNodeSingleWriter,
    MultiNodeMultiWriter,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AttachmentMode {
    FileSystem,
    BlockDevice,
}

/// How a mount event inside a consumer's target reaches the host and back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Propagation {
    #[default]
    Private,
    HostToTask,
    Bidirectional,
}

/// What happens to a mount after another boot: csid mounts it again, or keeps the row as `lost` until a caller mounts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Restore {
    Auto,
    Hold,
}

/// The options that the users of one staged volume share (CSI rules 28, 34); only `read-only` may differ between them.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Usage {
    pub access_mode: AccessMode,
    pub attachment_mode: AttachmentMode,
    pub fs_type: String,
    pub mount_flags: Vec<String>,
    pub mount_group: String,
    pub context: BTreeMap<String, String>,
    pub publish_context: BTreeMap<String, String>,
}

/// The options of a Mount.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MountSpec {
    pub usage: Usage,
    pub read_only: bool,
    pub target: Option<String>,
    pub propagation: Propagation,
    pub suid: bool,
    pub dev: bool,
    pub restore: Restore,
    /// Whether the volume is registered. Its publish context then comes with its claim.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub registered: bool,
    /// The name of a systemd credential that holds the volume's secrets.
    pub credential: Option<String>,
    /// Whether the mount was made with secrets that csid does not keep.
    pub secrets_given: bool,
}

/// The state of a mount besides its legs. The journal keeps it in the same object as the [`MountSpec`].
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct MountStatus {
    /// Whether a past user of the volume may have had secrets. The plugin may still repeat them.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub secrets_beside: bool,
    /// Whether the mount is made again because its server died, whatever `restore` says. This ends when it is mounted, or the host
    /// boots.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub healing: bool,
    /// Whether the mount was published in an earlier boot, and not since. A driver that counts publishes still counts that one.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub counted: bool,
    /// The device numbers that the mount had before, while it is made again. Its target may still show a mount with one of them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub died: Vec<u64>,
    /// The plugin's id of this node when the volume was staged. `None`: not known, or not needed.
    #[serde(with = "or_default", skip_serializing_if = "Option::is_none")]
    pub node_id: Option<String>,
}

impl MountRow {
    /// Returns where the plugin publishes.
    pub fn published(&self) -> &str {
        self.published.as_deref().unwrap_or(&self.source)
    }

    /// Returns whether the row is published and nothing is under way. The kernel then shows whether the mount is still there.
    pub fn shows(&self) -> bool {
        self.publish == Leg::Present && matches!(self.phase, Phase::Mounted | Phase::Lost | Phase::Waiting)
    }

    /// Returns whether the mount cannot be made again without secrets from a caller. A published volume is bound without secrets.
    pub fn lacks_secrets(&self) -> bool {
        self.spec.needs_secrets() && self.publish != Leg::Present
    }
}

impl MountSpec {
    /// Returns the first option of a call that differs from `other`'s, by its key in the contract. `None`: the calls are the same.
    /// Secrets are not compared, nor is the publish context of a registered volume, which csid itself gives.
    pub fn other_option(&self, other: &MountSpec) -> Option<&'static str> {
        let is_given = !(self.registered && other.registered);
        let differs = is_given && self.usage.publish_context != other.usage.publish_context;
        self.other_option_but_attached(other).or(differs.then_some("publish-context"))
    }

    /// Returns the same without a comparison of the publish contexts, which differ after another attach.
    pub fn other_option_but_attached(&self, other: &MountSpec) -> Option<&'static str> {
        // The fields without a name here are not of the call, but for the publish context.
        let MountSpec {
            usage,
            read_only,
            target,
            propagation,
            suid,
            dev,
            restore,
            registered,
            credential: _,
            secrets_given: _,
        } = self;
        let Usage {
            access_mode,
            attachment_mode,
            fs_type,
            mount_flags,
            mount_group,
            context,
            publish_context: _,
        } = usage;
        // csid itself gives the context of a registered volume.
        let is_given = !(*registered && other.registered);
        let is_other = [
            ("plugin", *registered != other.registered),
            ("target", *target != other.target),
            ("read-only", *read_only != other.read_only),
            ("access-mode", *access_mode != other.usage.access_mode),
            ("attachment-mode", *attachment_mode != other.usage.attachment_mode),
            ("fs-type", *fs_type != other.usage.fs_type),
            ("mount-flags", *mount_flags != other.usage.mount_flags),
            ("mount-group", *mount_group != other.usage.mount_group),
            ("volume-context", is_given && *context != other.usage.context),
            ("propagation", *propagation != other.propagation),
            ("suid", *suid != other.suid),
            ("dev", *dev != other.dev),
            ("restore", *restore != other.restore),
        ];
        is_other.into_iter().find_map(|(option, differs)| differs.then_some(option))
    }

    /// Remembers which secrets a call gave. The next restore needs the same. A call without secrets changes nothing.
    pub fn remember_secrets(&mut self, given: &MountSpec) {
        if given.secrets_given || given.credential.is_some() {
            self.secrets_given = given.secrets_given;
            self.credential.clone_from(&given.credential);
        }
    }

    /// Returns whether the volume cannot be staged again without secrets from a caller.
    pub fn needs_secrets(&self) -> bool {
        self.secrets_given && self.credential.is_none()
    }
}

/// The volume as the plugin knows it: the key of everything that concerns staging.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VolumeKey {
    pub plugin: String,
    pub handle: VolumeHandle,
}

impl VolumeKey {
    /// Makes the key of a volume that the plugin has created, by the handle's text.
    pub fn new(plugin: impl Into<String>, external_id: impl Into<String>) -> Self {
        VolumeKey { plugin: plugin.into(), handle: VolumeHandle::of(external_id.into()) }
    }

    /// Makes the key of a volume that the plugin is to create under this name. Requests to create the same name wait for each
    /// other.
    pub fn creating(plugin: &str, name: &str) -> Self {
        let handle = VolumeHandle::Creating { name: name.to_owned() };
        VolumeKey { plugin: plugin.to_owned(), handle }
    }

    /// Makes the key of a volume of which only the name of its directories is known.
    pub fn lost(plugin: &str, directory: &str) -> Self {
        let handle = VolumeHandle::Lost { directory: directory.to_owned() };
        VolumeKey { plugin: plugin.to_owned(), handle }
    }
}

/// A mount's identity in the contract.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MountKey {
    pub namespace: String,
    pub volume: String,
    pub consumer: String,
    pub tag: String,
}

#[derive(Clone, PartialEq, Eq)]
pub struct VolumeRow {
    pub key: VolumeKey,
    /// The one name the volume has while it has users.
    pub namespace: String,
    pub volume: String,
    /// The staging path on the host. `None`: none was made. Nothing recomputes it.
    pub staging: Option<String>,
    pub stage: Leg,
    /// The file systems and devices that kept the volume's mounts when the last mount was to go, as JSON of `host::Backing`.
    /// `None`: not known.
    pub backing: Option<String>,
}

#[derive(Clone, PartialEq, Eq)]
pub struct MountRow {
    pub key: MountKey,
    pub volume: VolumeKey,
    pub uid: u32,
    pub spec: MountSpec,
    pub status: MountStatus,
    pub phase: Phase,
    /// The mount was answered once and not asked away since: when it cannot be had it rests, it is not forgotten.
    pub kept: bool,
    /// The path on the host where consumers find the published volume. It is never computed again.
    pub source: String,
    /// The path at which the plugin publishes. Only root can reach it; `source` is a clone of it. `None`: the plugin publishes at
    /// `source`, as with an older csid.
    pub published: Option<String>,
    pub publish: Leg,
    /// The leg of `spec.target`; `Absent` without one.
    pub target: Leg,
    /// The device number of what is published, a block device or the file system, good for the boot it was read in.
    pub device: Option<u64>,
    /// The reason why the row is not `mounted`, for people; redacted. `None`: nothing has failed.
    pub error: Option<String>,
    /// The callers' names for the operation in flight.
    pub operations: Vec<String>,
    /// When the phase was entered, microseconds since 1970.
    pub since_usec: u64,
    /// Set by the store at commit.
    pub modify_index: u64,
}

#[derive(Clone, PartialEq, Eq)]
pub struct PluginRow {
    pub id: String,
    pub instance: String,
    /// The greater, the newer among the plugin's instances.
    pub number: u64,
    pub uid: u32,
    /// RegisterPlugin's spec, as JSON.
    pub spec: String,
}

/// The servers' word that this node is off.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournaledFence {
    /// The number of the fence. 0: no server has named it.
    pub number: u64,
    /// The boot in which csid was refused. The fence does not count in another one.
    pub boot: String,
}

/// The details of an event: strings, booleans and unsigned numbers.
pub type EventDetails = BTreeMap<&'static str, serde_json::Value>;

/// An event to be written; the store gives it its sequence and time.
#[derive(Clone, Debug, PartialEq)]
pub struct NewEvent {
    pub kind: EventKind,
    pub subject: String,
    pub details: EventDetails,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    pub sequence: u64,
    pub realtime_usec: u64,
    /// The contract's word for the type, perhaps of a newer or older csid.
    pub kind: String,
    pub subject: String,
    pub details: BTreeMap<String, serde_json::Value>,
}

impl Event {
    pub fn is(&self, kind: EventKind) -> bool {
        self.kind == kind.name()
    }
}
