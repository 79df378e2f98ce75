//! A volume's record: its registration, its claims and its attachments.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::store::claim::{Blocked, Capability, Claim, ClaimState, Queued, is_unknown};
use crate::store::claim_set::ClaimSet;
use crate::store::rows::{AttachmentMode, Leg, MountKey, Usage, VolumeKey};
use crate::store::words::or_default;

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

    /// Returns the identity of `consumer`'s claim, or of its one mount without a tag.
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

/// The policy for a mount that died.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Heal {
    #[default]
    Report,
    Remount,
}

/// The options of RegisterVolume and CreateVolume that stay with the volume.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
pub struct VolumeSpec {
    /// A name for people. CreateVolume gives it to the plugin.
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
    /// The snapshot that the volume was created from. Empty: none.
    pub snapshot: String,
    /// The id of the volume whose clone the volume was created as. Empty: none.
    pub clone: String,
}

impl VolumeSpec {
    /// Returns whether the volume was created from a snapshot or as a clone.
    pub fn has_source(&self) -> bool {
        !self.snapshot.is_empty() || !self.clone.is_empty()
    }
}

/// A CreateVolume whose answer is not known or not yet fetched.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Creation {
    pub capacity_min: u64,
    /// 0: none given.
    pub capacity_max: u64,
    /// Whether csid keeps the row. `false`: the caller keeps its own, and csid deletes the row once the caller has its answer.
    pub register: bool,
    pub secrets_given: bool,
    /// The plugin's id of the volume that it is to be a clone of. `None`: of none.
    #[serde(default, with = "or_default")]
    pub source: Option<String>,
    /// Whether the volume exists, but the plugin does not confirm that it comes from its snapshot or volume.
    #[serde(default)]
    pub sourceless: bool,
    /// Whether the plugin was never called for it. Nothing is then lost with the row.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unasked: bool,
    /// Whether the volume is created only to be deleted, because a DeleteVolume came in.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub to_delete: bool,
    /// The topology of the node when the plugin was first called. Each repeated call requires the same. Empty: the caller requires
    /// topologies, or the node's is not known.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub place: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Standing {
    Registered,
    /// The plugin is or was asked to create it; the handle is `Creating` until it has answered.
    Creating(Creation),
    /// The plugin is or was asked to delete it.
    Deleting {
        secrets_given: bool,
        /// The standing that the volume returns to if the plugin refuses. Absent: the volume is not registered; the call named it
        /// inline.
        #[serde(default)]
        back: Option<Box<Standing>>,
        /// Whether a server wants the deletion, and the plugin was never called for it. csid alone makes the call at once.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        unasked: bool,
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

/// The nodes' part of an expansion that a controller of a cluster has done, as the servers keep it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct OwedExpansion {
    pub required: u64,
    /// 0: none given.
    pub limit: u64,
    /// The nodes that have yet to do their part, in the order of their names.
    #[serde(default)]
    pub nodes: Vec<String>,
    /// The last node of the list, if nodes with later names have yet to come into it. Empty: there are none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub rest: String,
    /// Whether a node has done its part. A node that claims the volume from then on finds it expanded.
    #[serde(default)]
    pub by_node: bool,
}

/// A snapshot that the servers of a cluster have a plugin make or delete. The last one of a volume stays, with its answer.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct SnapshotTask {
    /// The caller's name of the call, after its identity.
    pub call: String,
    pub what: SnapshotWish,
    /// Whether the plugin was never called for it.
    #[serde(default)]
    pub unasked: bool,
    /// The plugin's last answer to CreateSnapshot. `None`: there is none.
    #[serde(default)]
    pub made: Option<MadeSnapshot>,
    /// The last failure; redacted.
    #[serde(default)]
    pub error: Option<SnapshotError>,
    /// Whether nothing is left to do.
    #[serde(default)]
    pub is_over: bool,
}

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SnapshotWish {
    /// The name is the caller's.
    Create { name: String, parameters: BTreeMap<String, String> },
    /// By the plugin's ID.
    Delete { snapshot: String },
}

/// A snapshot as the plugin has answered it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MadeSnapshot {
    pub id: String,
    /// The plugin's ID of the volume.
    pub external_id: String,
    /// Bytes. 0: the plugin does not report it.
    pub size: u64,
    /// Since 1970. 0: the plugin does not report it.
    pub created_usec: u64,
    pub ready: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct SnapshotError {
    /// A name of org.csid1.Error.
    pub kind: String,
    pub message: String,
}

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Registration {
    pub uid: u32,
    /// The identity that registered the volume in a cluster, such as `operator/a`. Empty: csid alone has it, for `uid`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub owner: String,
    /// Random: another registration of the name has another one. Empty: csid alone has it, or a server of an earlier version wrote it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub id: String,
    pub spec: VolumeSpec,
    pub standing: Standing,
    #[serde(default)]
    pub origin: Origin,
    /// Bytes. `None`: not known.
    #[serde(default, with = "or_default")]
    pub capacity: Option<u64>,
    #[serde(default)]
    pub pending_expansion: Option<Expansion>,
    /// What nodes of a cluster owe of the last expansion. `None`: nothing. A csid has none in its journal. Few volumes have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owed_expansion: Option<Box<OwedExpansion>>,
    /// The last expansion of which this node has done its part for the servers of its cluster. `None`: it has done none. Servers have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expanded_here: Option<Expansion>,
    /// The last snapshot that servers were asked for. `None`: none. A csid has none in its journal. It is large, and few volumes have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<Box<SnapshotTask>>,
    /// The reason why a creation or deletion does not continue. `None`: it continues.
    #[serde(default, rename = "parked", with = "or_default")]
    pub blocked: Option<Blocked>,
    /// The last failure of a creation or deletion, for people; redacted. `None`: nothing has failed.
    #[serde(default, with = "or_default")]
    pub error: Option<String>,
}

impl Registration {
    /// Returns a use of the volume as the plugin's requests have it. Its publish context comes with an attachment.
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

/// A volume's attachment to one node. Its claims of the node share it; without claims it is a caller's of AttachVolume.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Attachment {
    /// csid's name of the node. AttachVolume names the plugin's: empty then, unless servers know which node that is.
    pub node: String,
    /// The plugin's own name of the node when it was attached: a detach uses no other. `None`: the attach was not begun, or an
    /// earlier csid did not note it.
    #[serde(default, with = "or_default")]
    pub node_id: Option<String>,
    pub leg: Leg,
    /// Whether a server wants the attachment, and no call was made for it yet. csid alone makes the call at once.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub uncalled: bool,
    #[serde(default)]
    pub publish_context: BTreeMap<String, String>,
    /// The boot of the controller's last successful call. In another boot it is called again before a stage. `None`: no call
    /// has succeeded.
    #[serde(default, with = "or_default")]
    pub boot: Option<String>,
    /// The cluster's generation in which claims have asked for the attachment, a controller has attached the volume for them, or the node has said that it holds
    /// one. An earlier one than the cluster's: the row is of a backup of etcd, and the volume may have been attached or detached since. 0: csid alone, or a
    /// server of an earlier release, wrote it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub generation: u64,
    /// The AttachVolume that made the attachment. `None`: claims made it.
    #[serde(default)]
    pub by_call: Option<AttachCall>,
    /// The secrets of the attachment. Absent: an earlier csid made it, and kept them with the claims or the registration. Also absent for
    /// AttachVolume without a credential.
    #[serde(default)]
    pub secrets: Option<AttachSecrets>,
    /// What the servers of a cluster keep of an AttachVolume. `None`: claims made the attachment, or csid alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked: Option<AskedAttach>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// What the servers of a cluster keep of an AttachVolume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct AskedAttach {
    /// Random. A detach names it, so that it ends no newer attachment to the node.
    pub id: String,
    /// The identity whose call it was. It detaches the volume.
    pub owner: String,
    /// The caller's name of its call.
    pub call: String,
    /// The ID of the server that was asked last. While no call was made, that server judges whether the caller still waits.
    pub keeper: String,
    /// The cluster's generation when it was asked for, or when the plugin has attached the volume since. An earlier one: the row is of a backup of etcd, and
    /// may lack what was done since.
    #[serde(default)]
    pub generation: u64,
    /// Why the last call has failed. `None`: it has not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The kind of that error. Empty: it has none, or an earlier server has written the row.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub error_kind: String,
    /// The plugin refuses the detach, or an attach of a backup. It is tried again seldom, or when a caller asks. `None`: it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocked: Option<Blocked>,
    /// Whether DetachVolume or a fence has ended it. `false`: it is wanted, or a failed attach is undone.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ended: bool,
    /// Whether an operator has forgotten it while a controller's call for the volume has no answer. Its row goes when none may run any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub forgotten: bool,
}

/// The attachments by AttachVolume that have ended in a cluster. A call that has begun before makes no other one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct EndedAttaches {
    /// How many DetachVolume, a fence or an operator has ended.
    pub number: u64,
    /// The calls that had made the last ones.
    pub calls: Vec<String>,
}

impl EndedAttaches {
    /// The limit of calls that are remembered.
    const CALLS: usize = 16;

    pub fn is_none(&self) -> bool {
        self.number == 0
    }

    /// Notes the end of an attachment that a call has made.
    pub fn add(&mut self, call: &str) {
        self.number += 1;
        self.calls.push(call.to_owned());
        let excess = self.calls.len().saturating_sub(Self::CALLS);
        self.calls.drain(..excess);
    }
}

/// The secrets that the controller had for an attachment, and wants for its end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct AttachSecrets {
    /// The name of a systemd credential that a claim gave, in place of the volume's own.
    pub credential: Option<String>,
    /// Whether calls had secrets that csid does not keep.
    pub given: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct AttachCall {
    pub uid: u32,
    pub read_only: bool,
    #[serde(flatten)]
    pub capability: Capability,
    /// Whether the call had secrets, which csid does not keep.
    pub secrets_given: bool,
}

/// The servers' part of a volume while a controller is called for it, or may still run a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Driver {
    /// The ID of the server that acts for the volume. Empty: any server may.
    pub server: String,
    /// The node that was sent the last call.
    pub host: String,
    /// `None`: the last call has no answer. The host may still run it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub call: Option<DrivenCall>,
    /// The ID of the last call to the host that has no answer. Empty: there is none, or an earlier server did not note it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub unanswered: String,
    /// How long the plugin has for the call and for one without an answer, in milliseconds. 0: an earlier server did not note it.
    #[serde(default)]
    pub deadline_ms: u64,
    /// When the server was about to send the last call, in microseconds since 1970, for people. 0: an earlier server did not note it.
    #[serde(default, skip_serializing_if = "is_unknown")]
    pub sent_usec: u64,
}

/// A call to a controller that a server has sent, or is about to send.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct DrivenCall {
    /// Random.
    pub id: String,
    pub rpc: DrivenRpc,
    /// The node that is attached or detached, and the consumer whose claim wants it. Empty: the call is for no claim.
    pub node: String,
    pub consumer: String,
    /// The plugin's name of the node, in a call for an attachment by AttachVolume. Empty: the call is for none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub node_id: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DrivenRpc {
    /// ControllerPublishVolume.
    Publish,
    /// ControllerUnpublishVolume.
    Unpublish,
    /// CreateVolume.
    Create,
    /// DeleteVolume.
    Delete,
    /// ControllerExpandVolume.
    Expand,
    /// CreateSnapshot.
    Snapshot,
    DeleteSnapshot,
}

/// Shows no value of the publish context, since a plugin may put a token there.
impl fmt::Debug for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Attachment {
            node,
            node_id,
            leg,
            uncalled,
            publish_context,
            boot,
            generation,
            by_call,
            secrets,
            asked,
        } = self;
        f.debug_struct("Attachment")
            .field("node", node)
            .field("node_id", node_id)
            .field("leg", leg)
            .field("uncalled", uncalled)
            .field("publish_context", &publish_context.keys())
            .field("boot", boot)
            .field("generation", generation)
            .field("by_call", by_call)
            .field("secrets", secrets)
            .field("asked", asked)
            .finish()
    }
}

impl Attachment {
    /// Returns the node's name for people: the plugin's own, or csid's if that is not known.
    pub fn shown_node(&self) -> &str {
        self.node_id.as_deref().unwrap_or(&self.node)
    }

    /// Returns whether AttachVolume made the attachment for this node id.
    pub fn is_by_call(&self, node_id: &str) -> bool {
        self.by_call.is_some() && self.node_id.as_deref() == Some(node_id)
    }

    /// Makes an attachment that a claim wants. Nothing but its leg is known.
    pub fn new(node: &str, leg: Leg) -> Self {
        Attachment {
            node: node.to_owned(),
            node_id: None,
            leg,
            uncalled: false,
            publish_context: BTreeMap::new(),
            boot: None,
            generation: 0,
            by_call: None,
            secrets: None,
            asked: None,
        }
    }
}

impl AttachCall {
    /// Returns the first option that differs from `other`'s, by its key in the contract. `None`: the calls are the same. Secrets
    /// are not compared.
    pub fn other_option(&self, other: &AttachCall) -> Option<&'static str> {
        let AttachCall { uid: _, read_only, capability, secrets_given: _ } = self;
        let Capability { access_mode, attachment_mode } = capability;
        let is_other = [
            ("read-only", *read_only != other.read_only),
            ("access-mode", *access_mode != other.capability.access_mode),
            ("attachment-mode", *attachment_mode != other.capability.attachment_mode),
        ];
        is_other.into_iter().find_map(|(option, differs)| differs.then_some(option))
    }
}

/// All that is known of one volume, changed as a whole.
#[derive(Clone, PartialEq, Eq)]
pub struct Record {
    pub name: VolumeName,
    /// The volume as the plugin knows it. It has no meaning in an empty record.
    pub volume: VolumeKey,
    /// Absent: it is only attached.
    pub registration: Option<Registration>,
    pub claims: ClaimSet,
    pub attachments: Vec<Attachment>,
    /// `None`: no server of a cluster calls a controller for the volume. A csid that is alone has none.
    pub driver: Option<Driver>,
    /// The claims that wait at the servers of a cluster, by their places. A csid that is alone has none.
    pub queue: Vec<Queued>,
    /// The greatest place that the queue has had.
    pub serial: u64,
    /// What has ended of AttachVolume in a cluster. A csid that is alone notes nothing there.
    pub ended_attaches: EndedAttaches,
    /// The index of its last change; 0: it is not there.
    pub revision: u64,
}

impl Record {
    /// Makes the record of a name that no volume has.
    pub fn none(name: VolumeName) -> Self {
        Record {
            name,
            volume: VolumeKey::creating("", ""),
            registration: None,
            claims: ClaimSet::default(),
            attachments: Vec::new(),
            driver: None,
            queue: Vec::new(),
            serial: 0,
            ended_attaches: EndedAttaches::default(),
            revision: 0,
        }
    }

    /// Returns the consumers that have a claim.
    pub fn consumers(&self) -> Vec<String> {
        self.claims.iter().map(|claim| claim.consumer.clone()).collect()
    }

    /// Returns the claim of a consumer, which has one on this host.
    pub fn claim(&self, consumer: &str) -> Option<&Claim> {
        self.claims.get(consumer)
    }

    /// Returns the claim of a consumer on one node of a cluster.
    pub fn claim_at(&self, consumer: &str, node: &str) -> Option<&Claim> {
        self.claims.get_at(consumer, node)
    }

    pub fn attachment(&self, node: &str) -> Option<&Attachment> {
        self.attachments.iter().find(|at| at.node == node)
    }

    /// Returns the secrets of the attachment to this node, from any of its claims.
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
        self.registration.is_none()
            && self.claims.is_empty()
            && self.attachments.is_empty()
            && self.queue.is_empty()
    }

    /// Something is left to be done without being asked, parked or not.
    pub fn is_restless(&self) -> bool {
        let standing = self.registration.as_ref().map(|registration| &registration.standing);
        !matches!(standing, None | Some(Standing::Registered))
            || self.claims.iter().any(|claim| claim.releasing || claim.state != ClaimState::Taken)
            || self.attachments.iter().any(|at| at.leg != Leg::Present)
            || self.driver.is_some()
            || !self.queue.is_empty()
            || self.awaits_expansion()
            || self.wanted_snapshot().is_some()
            || self.owed_expansion().is_some_and(|owed| !owed.nodes.is_empty())
    }

    /// Returns the snapshot that the servers of a cluster have yet to have made or deleted.
    pub fn wanted_snapshot(&self) -> Option<&SnapshotTask> {
        self.registration.as_ref()?.snapshot.as_deref().filter(|task| !task.is_over)
    }

    /// Returns what nodes of a cluster owe of an expansion.
    pub fn owed_expansion(&self) -> Option<&OwedExpansion> {
        self.registration.as_ref()?.owed_expansion.as_deref()
    }

    /// Returns whether the servers of a cluster have a controller expand the volume. csid alone expands it after the next mount.
    pub fn awaits_expansion(&self) -> bool {
        self.registration.as_ref().is_some_and(|of| {
            !of.owner.is_empty() && of.pending_expansion.is_some_and(|pending| !pending.by_controller)
        })
    }
}
