//! A claim of a volume: its consumer, its use, and its lifetime.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::store::rows::{AccessMode, AttachmentMode, Leg};
use crate::store::words::or_default;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Capability {
    pub access_mode: AccessMode,
    pub attachment_mode: AttachmentMode,
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

/// The use that a claim asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Use {
    pub mode: ClaimMode,
    #[serde(flatten)]
    pub capability: Capability,
}

/// The unit or caller whose end releases the claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Bound {
    pub to: BoundTo,
    /// How long after its end the claim is kept, should it come back.
    pub grace_usec: u64,
    /// Whether it has ended, so that the claim is released.
    #[serde(default)]
    pub ended: bool,
}

impl Bound {
    pub fn new(to: BoundTo, grace_usec: u64) -> Self {
        Bound { to, grace_usec, ended: false }
    }

    /// Returns whether the options are the same. A call that is repeated on another connection binds the claim to that one.
    pub fn same_call(&self, other: &Bound) -> bool {
        let same = match (&self.to, &other.to) {
            (BoundTo::Unit(one), BoundTo::Unit(other)) => one == other,
            (BoundTo::Caller(_), BoundTo::Caller(_)) => true,
            _ => false,
        };
        same && self.grace_usec == other.grace_usec
    }
}

/// Writes the value of the option `bind`.
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
    /// A caller's name on the bus, or its connection to the socket.
    Caller(String),
}

/// The reason why work is not retried until a caller repeats it, for a person; redacted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Blocked {
    pub reason: String,
}

/// The servers' part of a claim in a cluster, as the claim's node knows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Grant {
    /// The name of the cluster.
    pub cluster: String,
    /// `Making`: a server was asked, and may have granted the claim. `Removing`: the servers have yet to learn that the node has
    /// nothing of the volume any more.
    pub leg: Leg,
    /// The boot of the node in which a server granted the claim last. In another boot a server is asked again. `None`: none has
    /// granted it.
    #[serde(default, with = "or_default")]
    pub boot: Option<String>,
    /// The generation of the cluster, and the revision of its etcd, at which a server granted the claim last. They prove that etcd has gone back
    /// if it has less. 0: none has granted it, or an earlier csid did not note it.
    #[serde(default, skip_serializing_if = "is_unknown")]
    pub generation: u64,
    #[serde(default, skip_serializing_if = "is_unknown")]
    pub revision: u64,
}

impl Grant {
    /// Returns the grant of a claim for which no server was asked yet.
    pub fn new(cluster: String, leg: Leg) -> Grant {
        Grant { cluster, leg, boot: None, generation: 0, revision: 0 }
    }
}

/// Returns whether a number is 0, which means that it is not known.
pub(super) fn is_unknown(number: &u64) -> bool {
    *number == 0
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
    /// Whether a caller has got the claim. It then ends only by Release.
    #[serde(default)]
    pub kept: bool,
    /// Whether the claim is being released. A release is never taken back.
    pub releasing: bool,
    /// The reason why the claim or release does not continue. `None`: it continues.
    #[serde(rename = "parked", with = "or_default")]
    pub blocked: Option<Blocked>,
    /// Whether a Mount took the claim. The consumer's last Unmount then releases it.
    #[serde(default)]
    pub by_mount: bool,
    #[serde(default)]
    pub bound: Option<Bound>,
    /// The name of a systemd credential that the claim gave, in place of the volume's own.
    #[serde(default)]
    pub credential: Option<String>,
    /// Whether the call had secrets, which csid does not keep.
    #[serde(default)]
    pub secrets_given: bool,
    /// The last failure, for people; redacted. `None`: nothing has failed.
    #[serde(default, with = "or_default")]
    pub error: Option<String>,
    #[serde(default)]
    pub since_usec: u64,
    /// When a server of a cluster began to release the claim, in microseconds since 1970, for people. 0: it is not being released, csid
    /// alone took it, or an earlier server did not note it.
    #[serde(default, skip_serializing_if = "is_unknown")]
    pub released_usec: u64,
    /// The random name that a cluster's server gave the claim. Empty: csid alone took it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub id: String,
    /// The call that asked a cluster's server for the claim: the caller's identity, a slash, and its name of the call. Empty: csid
    /// alone took it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub call: String,
    /// The ID of the server of a cluster that the caller has asked last, while the claim waits. Empty: an earlier server did not note it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub keeper: String,
    /// Whether the claim's node has brought it back to the servers of its cluster, whose etcd was restored from a backup.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adopted: bool,
    /// `None`: no server of a cluster was asked for the claim, or it has learned that the claim has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grant: Option<Grant>,
    /// Set by the store at commit.
    #[serde(skip)]
    pub modify_index: u64,
}

/// A claim that waits in the queue of its volume, at the servers of a cluster. It is granted when no claim and no earlier entry is in its way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queued {
    /// Its place. A later entry has a greater number.
    pub serial: u64,
    /// What is granted: pending.
    pub claim: Arc<Claim>,
}
