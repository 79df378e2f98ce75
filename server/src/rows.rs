//! The values of the rows that a cluster has besides its volumes. A field that this version does not know is written back.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use csid_etcd::{Row, RowKey};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The versions of values that a server knows. A server that meets another one does not serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schemas {
    pub min: u32,
    pub max: u32,
}

/// The versions that this release knows. `max` stands in a cluster that it makes. `csictl server upgrade` raises that of others.
pub const SCHEMAS: Schemas = Schemas { min: 1, max: 2 };
/// The first version with attachments by AttachVolume. A server that knows version 1 alone takes them for claims'.
pub const ATTACHES_BY_CALL: u32 = 2;

impl Schemas {
    pub fn know(self, schema: u32) -> bool {
        (self.min..=self.max).contains(&schema)
    }
}

impl fmt::Display for Schemas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.min == self.max {
            true => write!(f, "{}", self.max),
            false => write!(f, "{} to {}", self.min, self.max),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    Normal,
    /// A backup was restored. Nothing is granted.
    Recovering,
    /// etcd is a backup, and no operator has said so. Nothing is granted, and no node joins. It is no value of the row: the row names another etcd
    /// cluster then.
    #[serde(skip)]
    Restored,
}

impl Mode {
    pub fn word(self) -> &'static str {
        match self {
            Mode::Normal => "normal",
            Mode::Recovering => "recovering",
            Mode::Restored => "restored",
        }
    }
}

/// The row of the cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MetaRow {
    pub cluster: String,
    pub schema: u32,
    pub generation: u64,
    pub mode: Mode,
    /// The ID of the etcd cluster that has the row. In a backup that was restored it is another one. `None`: an earlier server has written
    /// the row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd: Option<String>,
    /// Why the last recovery has begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recovery: Option<RecoveryRow>,
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

impl MetaRow {
    /// Returns the row of a new cluster whose values have the newest of these versions. `etcd`: the ID of the etcd cluster.
    pub fn new(cluster: &str, schemas: Schemas, etcd: u64) -> MetaRow {
        let (recovery, rest) = Default::default();
        MetaRow {
            cluster: cluster.to_owned(),
            schema: schemas.max,
            generation: 1,
            mode: Mode::Normal,
            etcd: Some(etcd_name(etcd)),
            recovery,
            rest,
        }
    }
}

/// Returns the ID of an etcd cluster as the row of the cluster has it.
pub fn etcd_name(id: u64) -> String {
    format!("{id:x}")
}

/// The beginning of a recovery.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct RecoveryRow {
    /// The operator who has begun it, as grants name it.
    pub by: String,
    pub reason: String,
    /// Microseconds since 1970, for people.
    pub since_usec: u64,
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// The row of a server that runs. It is under the server's lease.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct ServerRow {
    /// The name in the server's certificate.
    pub name: String,
    pub version: String,
    pub schema_min: u32,
    pub schema_max: u32,
    pub address: String,
    /// A digest of the grants.
    pub grants: String,
    pub beat: u64,
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeState {
    Ready,
    Draining,
    Fenced,
    Blocked,
}

impl NodeState {
    pub fn word(self) -> &'static str {
        match self {
            NodeState::Ready => "ready",
            NodeState::Draining => "draining",
            NodeState::Fenced => "fenced",
            NodeState::Blocked => "blocked",
        }
    }
}

/// The row of a node.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct NodeRow {
    pub journal_id: String,
    pub machine_id: String,
    pub boot: String,
    pub state: NodeState,
    /// Plugins by name.
    #[serde(default)]
    pub plugins: BTreeMap<String, NodePlugin>,
    /// The first name of the node by each plugin that the node has reported. It stays when the plugin is gone.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_ids: BTreeMap<String, String>,
    /// The names of `node_ids` that an operator has accepted. Another node may have the same one. A fence ends what AttachVolume has attached to them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub accepted_ids: BTreeMap<String, String>,
    /// Another machine with the node's certificate, whose Hello was refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other: Option<OtherMachine>,
    /// Why the node is blocked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<BlockRow>,
    /// How often the node was drained.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub drains: u64,
    /// The last fence. It stays when the node has joined again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<FenceRow>,
    /// What the node has seen that etcd does not have. `None`: its last Hello named nothing like that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ahead: Option<AheadRow>,
    /// The boot in which the node had claims that servers refused in a recovery, and that an operator has forgotten. Their mounts may be there still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused_boot: Option<String>,
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

impl NodeRow {
    /// Returns the row of a node that joins for the first time.
    pub fn new(journal_id: &str, machine_id: &str, boot: &str) -> NodeRow {
        let (plugins, node_ids, accepted_ids, other, block, drains, fence, ahead, refused_boot, rest) =
            Default::default();
        NodeRow {
            journal_id: journal_id.to_owned(),
            machine_id: machine_id.to_owned(),
            boot: boot.to_owned(),
            state: NodeState::Ready,
            plugins,
            node_ids,
            accepted_ids,
            other,
            block,
            drains,
            fence,
            ahead,
            refused_boot,
            rest,
        }
    }

    /// Returns whether the node may have volumes mounted for claims that etcd does not have: servers refused them in this boot of it.
    pub fn has_refused_mounts(&self) -> bool {
        self.refused_boot.as_ref() == Some(&self.boot) && !self.is_fenced()
    }

    /// Returns the number of the node's drain. 0: it does not drain.
    pub fn drain(&self) -> u64 {
        match self.state {
            // A server of an earlier version does not count.
            NodeState::Draining => self.drains.max(1),
            NodeState::Ready | NodeState::Fenced | NodeState::Blocked => 0,
        }
    }

    /// Returns whether the node may have sessions.
    pub fn may_have_sessions(&self) -> bool {
        matches!(self.state, NodeState::Ready | NodeState::Draining)
    }

    /// Returns whether the servers refuse the node until an operator accepts it: the node has seen what etcd does not have, or it has another
    /// journal than before in the same boot. The machine ran at its last Hello, and may be off since.
    pub fn awaits_acceptance(&self) -> bool {
        self.ahead.as_ref().is_some_and(|ahead| !ahead.accepted)
            || self.other.as_ref().is_some_and(|other| other.is_machine(&self.machine_id, &self.boot))
    }

    /// Returns whether the node's machine is off, by an operator's word. A node that is blocked may be fenced, too.
    pub fn is_fenced(&self) -> bool {
        let is_below = |block: &BlockRow| block.before == NodeState::Fenced;
        self.state == NodeState::Fenced
            || (self.state == NodeState::Blocked && self.block.as_ref().is_some_and(is_below))
    }

    /// Returns whether the node was fenced in this generation. While the cluster recovers, an earlier fence is one of the backup, and may have ended
    /// since.
    pub fn is_fenced_in(&self, generation: u64) -> bool {
        self.is_fenced() && self.fence.as_ref().is_some_and(|fence| fence.generation == generation)
    }

    /// Returns the state of a fenced node that is off no more.
    pub fn state_after_fence(&self) -> NodeState {
        match self.fence.as_ref().map(|fence| fence.before) {
            Some(NodeState::Draining) => NodeState::Draining,
            _ => NodeState::Ready,
        }
    }
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A machine that is not the one that has joined, as its Hello names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct OtherMachine {
    pub journal_id: String,
    pub machine_id: String,
    pub boot: String,
    /// Microseconds since 1970, for people.
    pub since_usec: u64,
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

impl OtherMachine {
    /// Returns whether this is the machine with this id, in this boot.
    pub fn is_machine(&self, machine_id: &str, boot: &str) -> bool {
        (self.machine_id.as_str(), self.boot.as_str()) == (machine_id, boot)
    }
}

/// A generation and a revision of it that a node has seen, and that etcd does not have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct AheadRow {
    pub generation: u64,
    pub revision: u64,
    /// Microseconds since 1970, for people.
    pub since_usec: u64,
    /// Whether an operator has accepted that. The node joins then, and forgets it.
    #[serde(default)]
    pub accepted: bool,
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// An operator's block of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlockRow {
    /// The operator, as grants name it.
    pub by: String,
    pub reason: String,
    /// Microseconds since 1970, for people.
    pub since_usec: u64,
    /// The state that the node has again when it is accepted.
    pub before: NodeState,
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// An operator's word that a node is off.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct FenceRow {
    /// How often the node was fenced.
    pub number: u64,
    /// The boot that was fenced. The node may join with another one.
    pub boot: String,
    /// The operator, as grants name it.
    pub by: String,
    pub reason: String,
    /// Microseconds since 1970, for people.
    pub since_usec: u64,
    /// The state that the node has again after the fence.
    pub before: NodeState,
    /// The cluster's generation when it was fenced. 0: an earlier server has written the row.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub generation: u64,
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// What a node reports of a plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct NodePlugin {
    /// Whether the plugin's controller attaches volumes. `None`: the node does not know.
    pub attaches: Option<bool>,
    /// The plugin's name of the node. `None`: the node does not know it, or has another one than it had first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_id: Option<String>,
    /// A name that is not the first one. It counts when an operator accepts the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_node_id: Option<String>,
    /// How many of the plugin's volumes the node may have. 0: any number. `None`: the plugin has not said it yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_volumes: Option<u64>,
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// The row of a plugin that attaches volumes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PluginRow {
    /// Nodes with a grant for the plugin's controller, whose last report says that it attaches volumes.
    #[serde(default)]
    pub controllers: BTreeSet<String>,
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// The row that counts a node's volumes of a plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct UsedRow {
    /// `None`: they are being counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<u64>,
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// What a node that drains has left, as it has reported last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct DrainedRow {
    /// The number of the drain, and the boot in which the node has reported it.
    pub drain: u64,
    pub boot: String,
    /// Microseconds since 1970, for people.
    pub since_usec: u64,
    /// The number of all that is left.
    pub count: u64,
    /// The first ones.
    #[serde(default)]
    pub left: Vec<DrainLeftRow>,
}

impl DrainedRow {
    /// Returns whether another report says the same, at whatever time.
    pub fn is_same(&self, other: &DrainedRow) -> bool {
        DrainedRow { since_usec: other.since_usec, ..self.clone() } == *other
    }
}

/// A mount that stays, or a claim without a mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct DrainLeftRow {
    pub namespace: String,
    pub volume: String,
    pub consumer: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tag: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub target: String,
    pub why: String,
}

/// What a node has said to hold after a restore of etcd.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct HeardRow {
    /// The generation in which the node has said that.
    pub generation: u64,
    /// Whether it has said all that it holds.
    #[serde(default)]
    pub complete: bool,
    /// The first claims that servers have not taken over, and that no operator has forgotten.
    #[serde(default)]
    pub claims: Vec<RefusedClaimRow>,
    /// Whether there were more.
    #[serde(default)]
    pub more: bool,
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

impl HeardRow {
    /// Returns whether claims were not taken over, and no operator has forgotten them.
    pub fn has_refused(&self) -> bool {
        self.more || !self.claims.is_empty()
    }
}

/// A claim that a node has said to hold. Its names are texts of that node, cut off.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct RefusedClaimRow {
    pub claim: String,
    pub namespace: String,
    pub volume: String,
    pub consumer: String,
    pub why: String,
}

/// The row of a session. It is under the server's lease.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct SessionRow {
    /// Microseconds since 1970, for people.
    pub since_usec: u64,
    pub boot: String,
}

/// A row, and the revisions that a guard compares.
#[derive(Clone, Debug)]
pub struct Read<T> {
    pub value: T,
    pub revision: u64,
}

#[derive(Clone, Debug, thiserror::Error)]
#[error("the row {key:?} in etcd is not csid's: {source}")]
pub struct RowError {
    key: RowKey,
    source: Arc<serde_json::Error>,
}

impl RowError {
    fn new(key: &RowKey, source: serde_json::Error) -> RowError {
        RowError { key: key.clone(), source: source.into() }
    }
}

pub fn read<T: DeserializeOwned>(key: &RowKey, row: &Row) -> Result<Read<T>, RowError> {
    let value = serde_json::from_slice(&row.value).map_err(|source| RowError::new(key, source))?;
    Ok(Read { value, revision: row.revision })
}

pub fn write<T: Serialize>(key: &RowKey, value: &T) -> Result<Vec<u8>, RowError> {
    serde_json::to_vec(value).map_err(|source| RowError::new(key, source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn field_of_a_later_version_is_written_back() {
        let value = br#"{"journal-id":"j","machine-id":"m","boot":"b","state":"ready","taint":[1],
            "plugins":{"p":{"attaches":false,"node-id":"i","other-node-id":"j","max-volumes":7}},
            "node-ids":{"p":"i"},"accepted-ids":{"p":"i"},
            "other":{"journal-id":"k","machine-id":"n","boot":"c","since-usec":1,"version":"9"},
            "block":{"by":"operator/a","reason":"","since-usec":2,"before":"fenced","until":3},
            "drains":2,"fence":{"number":1,"boot":"b","by":"operator/a","reason":"","since-usec":2,"before":"ready","generation":5,"how":4},
            "ahead":{"generation":3,"revision":4,"since-usec":5,"accepted":true,"who":"x"}}"#;
        let row = Row { value: value.to_vec(), created: 1, revision: 2 };
        let key = RowKey::Node("n".into());
        let read: Read<NodeRow> = read(&key, &row).unwrap();
        let written: Value = serde_json::from_slice(&write(&key, &read.value).unwrap()).unwrap();
        assert_eq!(written, serde_json::from_slice::<Value>(value).unwrap());
    }
}
