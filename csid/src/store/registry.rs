//! What is known of volumes beyond this host's mounts: registrations, claims, attachments. It is shared by all nodes that
//! may have a volume; today's one node keeps it in its journal, and asks for it through [`Registry`] only.

use std::collections::BTreeMap;
use std::fmt;

use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};

use super::rows::{AccessMode, AttachmentMode, Leg, MountKey, NewEvent, Usage, VolumeKey};
use super::{Durability, StoreError};

/// A volume's name in the contract.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VolumeName {
    pub namespace: String,
    pub volume: String,
}

impl VolumeName {
    pub fn of(key: &MountKey) -> Self {
        VolumeName { namespace: key.namespace.clone(), volume: key.volume.clone() }
    }

    /// The identity of `consumer`'s claim, or of his one mount without a tag.
    pub fn key(&self, consumer: &str) -> MountKey {
        MountKey {
            namespace: self.namespace.clone(),
            volume: self.volume.clone(),
            consumer: consumer.to_owned(),
            tag: String::new(),
        }
    }
}

impl fmt::Display for VolumeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.volume)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Capability {
    pub access_mode: AccessMode,
    pub attachment_mode: AttachmentMode,
}

/// What is done about a mount that died.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Heal {
    #[default]
    Report,
    Remount,
}

/// The options of RegisterVolume and CreateVolume that stay with the volume.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
pub struct VolumeSpec {
    /// For people, and the name that CreateVolume gives the plugin.
    pub name: String,
    pub capabilities: Vec<Capability>,
    pub fs_type: String,
    pub mount_flags: Vec<String>,
    pub mount_group: String,
    pub context: BTreeMap<String, String>,
    pub parameters: BTreeMap<String, String>,
    pub topologies: Vec<BTreeMap<String, String>>,
    /// The name of a systemd credential that holds the volume's secrets.
    pub credential: Option<String>,
    pub heal: Heal,
    pub suid: bool,
    pub dev: bool,
    /// Of a volume that was created: from which snapshot, or as whose clone.
    pub snapshot: String,
    pub clone: String,
}

/// A CreateVolume whose answer is not known or not yet fetched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Creation {
    pub capacity_min: u64,
    /// 0: none given.
    pub capacity_max: u64,
    /// `false`: its caller keeps the row; this one is gone when he has been answered.
    pub register: bool,
    pub secrets_given: bool,
    /// The plugin's id of the volume that it is to be a clone of; empty: of none.
    #[serde(default)]
    pub source: String,
    /// It is there, but the plugin does not say that it comes from its snapshot or volume.
    #[serde(default)]
    pub sourceless: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    Registered,
    /// The plugin is or was asked to create it; the external id is empty until it has answered.
    Creating(Creation),
    /// The plugin is or was asked to delete it.
    Deleting {
        secrets_given: bool,
        /// What it is again when the plugin refuses; absent: not registered, it was given with the call.
        #[serde(default)]
        back: Option<Box<Standing>>,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    #[default]
    Bus,
    /// A file of `volumes.d`.
    File,
}

/// An expansion that has not come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Expansion {
    pub required: u64,
    /// 0: none given.
    pub limit: u64,
    /// The controller has done its part.
    pub by_controller: bool,
}

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Registration {
    pub uid: u32,
    pub spec: VolumeSpec,
    pub standing: Standing,
    #[serde(default)]
    pub origin: Origin,
    /// Bytes; 0: not known.
    #[serde(default)]
    pub capacity: u64,
    #[serde(default)]
    pub pending_expansion: Option<Expansion>,
    /// Why a creation or deletion does not go on, for a person. Empty: it goes on.
    #[serde(default)]
    pub parked: String,
    /// The last failure of one, for a person; redacted.
    #[serde(default)]
    pub error: String,
}

impl Registration {
    /// What the plugin is told of a use of the volume; its publish context comes with an attachment.
    pub fn usage(&self, capability: Capability) -> Usage {
        let Capability { access_mode, attachment_mode } = capability;
        let VolumeSpec { fs_type, mount_flags, mount_group, context, .. } = self.spec.clone();
        let is_mount = attachment_mode == AttachmentMode::FileSystem;
        let text = |text: String| if is_mount { text } else { String::new() };
        Usage {
            access_mode,
            attachment_mode,
            fs_type: text(fs_type),
            mount_flags: if is_mount { mount_flags } else { Vec::new() },
            mount_group: text(mount_group),
            context,
            publish_context: BTreeMap::new(),
        }
    }
}

/// A claim's state, in the contract's words (`org.csid1`, claim states). A claim that is free has no row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClaimState {
    Pending,
    Taken,
    NodeDetached,
    ControllerDetached,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClaimMode {
    Read,
    Write,
}

/// What a claim asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Use {
    pub mode: ClaimMode,
    #[serde(flatten)]
    pub capability: Capability,
}

/// Whose end ends the claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Bound {
    pub to: BoundTo,
    /// How long after its end the claim is kept, should it come back.
    pub grace_usec: u64,
    /// It has ended, and the claim is let go for that.
    #[serde(default)]
    pub ended: bool,
}

impl Bound {
    pub fn new(to: BoundTo, grace_usec: u64) -> Self {
        Bound { to, grace_usec, ended: false }
    }

    /// The same options: whoever repeats his call on another connection is bound by that one.
    pub fn same_call(&self, other: &Bound) -> bool {
        let same = match (&self.to, &other.to) {
            (BoundTo::Unit(one), BoundTo::Unit(other)) => one == other,
            (BoundTo::Caller(_), BoundTo::Caller(_)) => true,
            _ => false,
        };
        same && self.grace_usec == other.grace_usec
    }
}

/// As the option says it.
impl fmt::Display for BoundTo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BoundTo::Unit(unit) => write!(f, "unit:{unit}"),
            BoundTo::Caller(_) => f.write_str("caller"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BoundTo {
    /// A systemd unit.
    Unit(String),
    /// A caller's name on the bus, or his connection to the socket.
    Caller(String),
}

/// A claim of a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Claim {
    pub consumer: String,
    pub node: String,
    pub uid: u32,
    #[serde(flatten)]
    pub usage: Use,
    pub state: ClaimState,
    /// It was answered once: it ends only by Release.
    #[serde(default)]
    pub kept: bool,
    /// It is let go: there is no way back.
    pub releasing: bool,
    /// Why it does not go on, for a person. Empty: it goes on.
    pub parked: String,
    /// A Mount took it, and the consumer's last Unmount gives it back.
    #[serde(default)]
    pub by_mount: bool,
    #[serde(default)]
    pub bound: Option<Bound>,
    /// The name of a systemd credential that the claim gave, in place of the volume's own.
    #[serde(default)]
    pub credential: Option<String>,
    /// Its call had secrets that csid does not keep.
    #[serde(default)]
    pub secrets_given: bool,
    /// The last failure, for a person; redacted.
    #[serde(default)]
    pub error: String,
    #[serde(default)]
    pub since_usec: u64,
    /// Set by the store at commit.
    #[serde(skip)]
    pub modify_index: u64,
}

/// A volume's attachment to one node. Its claims of the node share it; without claims it is a caller's of AttachVolume.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Attachment {
    pub node: String,
    /// The plugin's own name of the node when it was attached: a detach uses no other.
    #[serde(default)]
    pub node_id: String,
    pub leg: Leg,
    #[serde(default)]
    pub publish_context: BTreeMap<String, String>,
    /// In which boot the controller was told; in another one it is told again before a stage. Empty: it has never said yes.
    #[serde(default)]
    pub boot: String,
    /// Of AttachVolume: whose, and what for.
    #[serde(default)]
    pub by_call: Option<AttachCall>,
    /// Of claims; absent: an earlier csid made it, and kept that with the claims.
    #[serde(default)]
    pub secrets: Option<AttachSecrets>,
}

/// The secrets that the controller had for an attachment, and wants for its end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct AttachSecrets {
    /// The name of a systemd credential that a claim gave, in place of the volume's own.
    pub credential: Option<String>,
    /// There were some that csid does not keep.
    pub given: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct AttachCall {
    pub uid: u32,
    pub read_only: bool,
    #[serde(flatten)]
    pub capability: Capability,
    /// It had secrets that csid does not keep.
    pub secrets_given: bool,
}

/// Without the publish context's values: a plugin may put a token there.
impl fmt::Debug for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Attachment { node, node_id, leg, publish_context, boot, by_call, secrets } = self;
        f.debug_struct("Attachment")
            .field("node", node)
            .field("node_id", node_id)
            .field("leg", leg)
            .field("publish_context", &publish_context.keys())
            .field("boot", boot)
            .field("by_call", by_call)
            .field("secrets", secrets)
            .finish()
    }
}

impl Attachment {
    /// It is what AttachVolume made for this node id.
    pub fn is_by_call(&self, node_id: &str) -> bool {
        self.by_call.is_some() && self.node_id == node_id
    }

    /// One that a claim wants, nothing known of it but its leg.
    pub fn new(node: &str, leg: Leg) -> Self {
        Attachment {
            node: node.to_owned(),
            node_id: String::new(),
            leg,
            publish_context: BTreeMap::new(),
            boot: String::new(),
            by_call: None,
            secrets: None,
        }
    }
}

impl AttachCall {
    /// The same options, but for the secrets.
    pub fn same_call(&self, other: &AttachCall) -> bool {
        (self.read_only, self.capability) == (other.read_only, other.capability)
    }
}

/// All that is known of one volume, changed as a whole.
#[derive(Clone, PartialEq, Eq)]
pub struct Record {
    pub name: VolumeName,
    /// The volume as the plugin knows it.
    pub volume: VolumeKey,
    /// Absent: it is only attached.
    pub registration: Option<Registration>,
    pub claims: Vec<Claim>,
    pub attachments: Vec<Attachment>,
    /// The index of its last change; 0: it is not there.
    pub revision: u64,
}

impl Record {
    /// Nothing is known of a volume of this name.
    pub fn none(name: VolumeName) -> Self {
        Record {
            name,
            volume: VolumeKey { plugin: String::new(), external_id: String::new() },
            registration: None,
            claims: Vec::new(),
            attachments: Vec::new(),
            revision: 0,
        }
    }

    pub fn claim(&self, consumer: &str) -> Option<&Claim> {
        self.claims.iter().find(|claim| claim.consumer == consumer)
    }

    pub fn attachment(&self, node: &str) -> Option<&Attachment> {
        self.attachments.iter().find(|at| at.node == node)
    }

    /// What the attachment to this node had, whichever of its claims brought it.
    pub fn attach_secrets(&self, node: &str) -> AttachSecrets {
        let kept = self.attachment(node).and_then(|at| at.secrets.clone());
        kept.unwrap_or_else(|| {
            let claims = || self.claims.iter().filter(|claim| claim.node == node);
            AttachSecrets {
                credential: claims().find_map(|claim| claim.credential.clone()),
                given: claims().any(|claim| claim.secrets_given),
            }
        })
    }

    pub fn is_empty(&self) -> bool {
        self.registration.is_none() && self.claims.is_empty() && self.attachments.is_empty()
    }

    /// Something is left to be done without being asked, parked or not.
    pub fn is_restless(&self) -> bool {
        let standing = self.registration.as_ref().map(|registration| &registration.standing);
        !matches!(standing, None | Some(Standing::Registered))
            || self.claims.iter().any(|claim| claim.releasing || claim.state != ClaimState::Taken)
            || self.attachments.iter().any(|at| at.leg != Leg::Present)
    }
}

/// A change of one record: done as a whole if the record is still `before`, else not at all ([`StoreError::Stale`]).
pub struct Swap {
    pub before: Record,
    /// Empty: the record is deleted. Its revision does not matter.
    pub after: Record,
    /// Claims that are past with it.
    pub past: Vec<Claim>,
    pub events: Vec<NewEvent>,
    pub durability: Durability,
}

/// Equality on each field that is given, but for the prefix.
#[derive(Clone, Debug, Default)]
pub struct RecordFilter {
    pub namespace: Option<String>,
    pub volume: Option<String>,
    pub plugin: Option<String>,
    pub external_id: Option<String>,
    /// With a claim or an attachment of this node.
    pub node: Option<String>,
    /// What the volume's id begins with.
    pub prefix: Option<String>,
    pub restless: bool,
}

#[derive(Clone, Debug, Default)]
pub struct ClaimFilter {
    pub namespace: Option<String>,
    pub volume: Option<String>,
    pub consumer: Option<String>,
    pub node: Option<String>,
    /// Those that ended, instead of those that are.
    pub past: bool,
}

/// What a list answers: the rows, and the index they were read at.
pub type Listed<T> = Result<(Vec<T>, u64), StoreError>;

/// Volumes, their claims and attachments. Every change is a compare-and-swap on a record's revision; what is read comes with
/// the index it was read at, and what changes after an index can be waited for.
pub trait Registry: Send + Sync {
    /// Nothing has been known of any volume since csid's start: that spares a mount its question.
    fn is_empty(&self) -> bool;

    /// A volume's record; [`Record::none`] when there is none.
    fn record(&self, name: VolumeName) -> BoxFuture<'_, Result<Record, StoreError>>;

    /// The record's new revision, when the change is as durable as was asked.
    fn swap(&self, swap: Swap) -> BoxFuture<'_, Result<u64, StoreError>>;

    /// By name.
    fn records(&self, filter: RecordFilter) -> BoxFuture<'_, Listed<Record>>;

    /// By volume and consumer; past ones in the order of their end.
    fn claims(&self, filter: ClaimFilter) -> BoxFuture<'_, Listed<(VolumeName, Claim)>>;

    /// The index of a change after `index`, as soon as there is one.
    fn changed(&self, index: u64) -> BoxFuture<'_, Result<u64, StoreError>>;
}
