//! The registry of volumes: registrations, claims and attachments. All nodes that may use a volume share it. Today's one node
//! keeps it in its journal, and reaches it through [`Registry`] only.

use std::collections::BTreeMap;

use futures_util::future::BoxFuture;

use crate::store::change::Durability;
use crate::store::rows::NewEvent;

pub use crate::store::claim::{
    Blocked, Bound, BoundTo, Capability, Claim, ClaimMode, ClaimState, Grant, Queued, Use,
};
pub use crate::store::claim_set::ClaimSet;
pub use crate::store::held::{HeldIndex, HeldVolumes};
pub use crate::store::known_claims::changes as claim_changes;
pub use crate::store::record::{
    AskedAttach, AttachCall, AttachSecrets, Attachment, Creation, DrivenCall, DrivenRpc, Driver,
    EndedAttaches, Expansion, Heal, MadeSnapshot, Origin, OwedExpansion, Record, Registration, SnapshotError,
    SnapshotTask, SnapshotWish, Standing, VolumeName, VolumeSpec,
};

/// The reason why a registry did not do a request. Nothing of the request is kept, but for [`RegistryError::Unreachable`].
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// The registry has no space for the change. The same request may succeed later.
    #[error(transparent)]
    Full(RegistrySource),
    /// The registry did not answer in time. A change may have been made all the same: the record shows it once it can be read.
    #[error(transparent)]
    Unreachable(RegistrySource),
    /// The registry is damaged, and takes no change until it is repaired.
    #[error(transparent)]
    Damaged(RegistrySource),
    /// The registry has ended, because csid does.
    #[error(transparent)]
    Ended(RegistrySource),
    #[error(transparent)]
    Failed(RegistrySource),
}

/// The error of the database that keeps the registry.
pub type RegistrySource = Box<dyn std::error::Error + Send + Sync>;

/// The reason why the present records do not allow a [`Swap`].
#[derive(Debug, thiserror::Error)]
pub enum Conflict {
    /// The record has changed since it was read.
    #[error("the volume's record has changed meanwhile")]
    Stale,
    /// The plugin's volume is known under this name, and has no second one.
    #[error("the plugin's volume is known as {0} already")]
    Taken(VolumeName),
}

impl From<RegistryError> for crate::Error {
    fn from(error: RegistryError) -> Self {
        use crate::{Error, Kind};
        let (kind, retryable, other) = match &error {
            RegistryError::Conflict(Conflict::Stale)
            | RegistryError::Full(_)
            | RegistryError::Unreachable(_) => (Kind::Internal, true, None),
            RegistryError::Conflict(Conflict::Taken(name)) => {
                (Kind::AlreadyExists, false, Some((name.namespace.clone(), name.volume.clone())))
            }
            RegistryError::Damaged(_) => (Kind::StateCorrupt, false, None),
            RegistryError::Ended(_) => (Kind::ShuttingDown, false, None),
            RegistryError::Failed(_) => (Kind::Internal, false, None),
        };
        Error::new(kind, error.to_string()).with(|details| {
            details.retryable |= retryable;
            (details.namespace, details.volume) = other.unzip();
        })
    }
}

/// A change of one record: done as a whole if the record is still `before`, else not at all ([`Conflict::Stale`]).
pub struct Swap {
    pub before: Record,
    /// Empty: the record is deleted. Its revision does not matter.
    pub after: Record,
    /// Claims that are past with it.
    pub past: Vec<Claim>,
    pub durability: Durability,
}

/// Equality on each field that is given, but for the prefix.
#[derive(Clone, Debug, Default)]
pub struct RecordFilter {
    pub namespace: Option<String>,
    pub volume: Option<String>,
    pub plugin: Option<String>,
    pub external_id: Option<String>,
    /// Only volumes with a claim or an attachment of this node.
    pub node: Option<String>,
    /// A prefix of the volume's id.
    pub prefix: Option<String>,
    pub restless: bool,
    /// Not only attached.
    pub registered: bool,
    /// Only volumes whose names come after this one.
    pub after: Option<VolumeName>,
    /// The number of rows to return, from the first on; 0: all.
    pub most: usize,
}

#[derive(Clone, Debug, Default)]
pub struct ClaimFilter {
    pub namespace: Option<String>,
    pub volume: Option<String>,
    pub consumer: Option<String>,
    pub node: Option<String>,
    /// Whether to return past claims instead of present ones.
    pub past: bool,
    /// Only claims of the volumes from the first to the second name.
    pub between: Option<[VolumeName; 2]>,
    pub after: Option<ClaimPlace>,
    /// The number of rows to return, from the first on; 0: all.
    pub most: usize,
}

/// The place of a claim in a list that is read in parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimPlace {
    pub name: VolumeName,
    pub of_volume: OfVolume,
}

/// A claim among those of its volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OfVolume {
    /// A present claim, by its consumer.
    Consumer(String),
    /// A past claim, by its number. A later one has a higher number.
    Number(u64),
}

/// A claim in a list.
#[derive(Clone, Debug)]
pub struct ListedClaim {
    pub name: VolumeName,
    pub claim: Claim,
    pub of_volume: OfVolume,
}

/// The answer of a list: the rows, and the index they were read at.
pub type Listed<T> = Result<(Vec<T>, u64), RegistryError>;

/// Volumes, their claims and attachments. Every change is a compare-and-swap on a record's revision; what is read comes with
/// the index it was read at, and what changes after an index can be waited for.
pub trait Registry: Send + Sync {
    /// Returns a volume's record; [`Record::none`] if there is none.
    fn record(&self, name: VolumeName) -> BoxFuture<'_, Result<Record, RegistryError>>;

    /// Changes a record. Returns its new revision, when the change is as durable as was asked. `events` are for this node's
    /// journal: a registry that is in the journal commits them with the change, another one after it.
    fn swap(&self, swap: Swap, events: Vec<NewEvent>) -> BoxFuture<'_, Result<u64, RegistryError>>;

    /// Makes earlier changes as durable as [`Durability::Disk`]. An answer that repeats an earlier one needs that.
    fn sync(&self) -> BoxFuture<'_, Result<(), RegistryError>>;

    /// Returns records, ordered by name.
    fn records(&self, filter: RecordFilter) -> BoxFuture<'_, Listed<Record>>;

    /// Returns the volumes of a plugin that have a claim or an attachment of this node: their count, and at most `most` names. The
    /// cost does not grow with their number.
    fn held(
        &self,
        plugin: &str,
        node: &str,
        most: usize,
    ) -> BoxFuture<'_, Result<HeldVolumes, RegistryError>>;

    /// Returns claims, ordered by volume and consumer. Past claims are in the order of their end; in parts, by volume first.
    fn claims(&self, filter: ClaimFilter) -> BoxFuture<'_, Listed<ListedClaim>>;

    /// Returns the number of claims in each state, by the contract's words.
    fn claim_states(&self) -> BoxFuture<'_, Result<BTreeMap<String, u64>, RegistryError>>;

    /// Waits for a change after `index`, and returns its index.
    fn changed(&self, index: u64) -> BoxFuture<'_, Result<u64, RegistryError>>;
}
