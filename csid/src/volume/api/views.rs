//! The answers to calls on volumes.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::error::Step;
use crate::store::registry::{ClaimState, Record, VolumeName};
use crate::store::rows::MountRow;
use crate::volume::api::operation_kind::OperationKind;

/// The answer to a Mount: the published path, and whether it is a block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    pub source: String,
    pub is_device: bool,
}

/// A row of ListMounts.
pub struct MountView {
    pub row: MountRow,
    pub staging: String,
    /// Whether a probe made for this answer found the mount healthy.
    pub healthy: bool,
    /// Why the row is not mounted, or not healthy, for a person. Empty: no reason is known.
    pub error: String,
}

/// A row of ListOperations.
#[derive(Clone, Debug)]
pub struct OperationView {
    pub id: String,
    pub kind: OperationKind,
    /// `NAMESPACE/VOLUME`, or the id of a plugin.
    pub subject: String,
    pub step: Step,
    /// The plugin's last error, after which it is called again. Empty: there was none.
    pub said: String,
    /// What is in the way of its claim at the servers of a cluster: NODE/CONSUMER.
    pub holders: Vec<String>,
    pub since_usec: u64,
    /// The deadline of the caller. `None`: no caller waits with a deadline.
    pub deadline_usec: Option<u64>,
    pub uid: u32,
}

/// The result of Reconcile. Each entry is a path or `NAMESPACE/VOLUME CONSUMER`.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub adopted: Vec<String>,
    pub remounted: Vec<String>,
    pub undone: Vec<String>,
    pub orphans: Vec<String>,
    pub failed: Vec<String>,
    /// The path where the damaged journal is kept, if a new one was begun.
    pub kept: Option<PathBuf>,
}

/// A registered volume, as GetVolume returns it.
#[derive(Clone)]
pub struct VolumeView {
    /// The record, always with a registration. Its mount flags are not for the bus.
    pub record: Record,
    pub provider: String,
    pub provider_version: String,
    pub controller_required: bool,
    pub schedulable: bool,
    /// The consumers of past claims, the last one first.
    pub past: Vec<String>,
    /// Whether a file declares the volume and it is not registered. The record then shows the declaration.
    pub only_declared: bool,
}

#[derive(Clone)]
pub struct Claimed {
    pub volume: VolumeView,
    pub publish_context: BTreeMap<String, String>,
    pub external_node_id: String,
    pub state: ClaimState,
}

/// The reasons known to csid why a volume is not in its desired state.
#[derive(Clone, Debug, Default)]
pub struct Explanation {
    /// The cause of the wait. Empty: the volume waits for nothing.
    pub waiting_for: String,
    pub holders: Vec<String>,
    pub last_error: String,
    /// The time of the next retry in microseconds since 1970. 0: none is due.
    pub next_try_usec: u64,
    pub steps: Vec<String>,
    /// The steps of the last mount, each with its duration in microseconds. Empty: none is known.
    pub timings: Vec<(String, u64)>,
}

/// The result of recovery, for the status line and the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Mounts that were mounted before and still are. No RPC was made.
    pub adopted: usize,
    /// Mounts to be mounted again.
    pub waiting: usize,
    /// Mounts kept as `lost` until a caller asks for them.
    pub lost: usize,
    /// Mounts that were begun and not answered, or were to be unmounted. They are taken down.
    pub unsettled: usize,
}

/// The result of Drain. Each entry is `NAMESPACE/VOLUME CONSUMER`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    pub unmounted: Vec<String>,
    /// The mounts that remain, each with the reason.
    pub failed: Vec<String>,
    /// The claims and attachments made apart from a mount. They are unchanged.
    pub claimed: Vec<String>,
}

/// What a drain of this node leaves of the servers' volumes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeDrained {
    /// The first ones: mounts by their keys, then claims.
    pub left: Vec<LeftByDrain>,
    /// The number of all.
    pub count: usize,
}

/// A mount that stays, or a claim without a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftByDrain {
    pub name: VolumeName,
    pub consumer: String,
    /// Empty: a mount without a tag, or a claim.
    pub tag: String,
    /// Where the consumer has the mount. Empty: it is a claim.
    pub target: String,
    /// Why it stays: who uses it, for a mount in use.
    pub why: String,
}

/// The result of [`Volumes::declare`].
#[derive(Debug, Default)]
pub struct Applied {
    /// Volumes that are registered as declared.
    pub unchanged: usize,
    /// Volumes that have to be registered or changed.
    pub waiting: usize,
    pub removed: Vec<String>,
    /// Volumes in use whose files are gone. They stay until the next reload that finds them unused.
    pub kept: Vec<String>,
}
