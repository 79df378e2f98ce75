//! Errors of claims and attachments.

use std::collections::BTreeMap;

use crate::error::{Details, Error, Kind, Obstacle, Step};
use crate::store::registry::{AttachCall, BoundTo, Record, VolumeName};
use crate::volume::model::admission::OF_UID;
use crate::volume::model::claim::ClaimRefusal;
use crate::volume::model::subject::ClaimKey;

/// Why a volume is not claimed, released, attached or detached.
#[derive(Debug, thiserror::Error)]
pub(in crate::volume) enum ClaimError {
    /// Another user's claim was to be released.
    #[error(
        "the claim of {} by {} is another user's; it takes org.csid1.unmount-others",
        claim.volume, claim.consumer
    )]
    NotOwner { claim: ClaimKey },
    /// Another user has a claim of the same identity.
    #[error("the claim of {} by {} is another user's", claim.volume, claim.consumer)]
    OtherUser { claim: ClaimKey },
    #[error("{} has claimed {} with another {option}", claim.consumer, claim.volume)]
    ClaimedOtherwise { claim: ClaimKey, option: &'static str },
    #[error("an earlier claim of {} by {} is still being released", claim.volume, claim.consumer)]
    Releasing { claim: ClaimKey },
    /// No registered capability has the modes.
    #[error("{name} was not registered with that access mode and attachment mode")]
    NoCapability { name: VolumeName },
    #[error("a reader-only access mode is claimed with mode read")]
    ReaderOnly,
    /// `holders` may be empty.
    #[error("{what} conflicts with the claim of {name} by {}", others(holders))]
    Conflict { name: VolumeName, what: &'static str, holders: Vec<String> },
    #[error("you have {OF_UID} claims of {name}, as many as one user may")]
    TooMany { name: VolumeName },
    #[error("the row of the claim is gone")]
    NoRow,
    /// The state does not allow an event of csid itself.
    #[error("an inner event of {name} was refused: {refusal:?}")]
    InnerEvent { name: VolumeName, refusal: ClaimRefusal },
    #[error("{} is not claimed by {} any more", claim.volume, claim.consumer)]
    Unclaimed { claim: ClaimKey },
    #[error("to detach {name} the plugin needs its secrets again")]
    SecretsNeeded { name: VolumeName },
    #[error("plugin {plugin} attaches volumes, but its node service gives no node id (NodeGetInfo)")]
    NoNodeId { plugin: String },
    /// The attachment's row has no node id, and the plugin has none for `node`.
    #[error(
        "the attachment of {name} to node {node} has no node id, and plugin {plugin} names none for that node"
    )]
    UnknownAttachment { name: VolumeName, node: String, plugin: String },
    #[error("bind {to}: its end cannot be watched: {source}")]
    Unwatchable { to: BoundTo, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("bind {to}: that does not run")]
    NotRunning { to: BoundTo },
    #[error("your claims name {most} units, as many as one user's may")]
    TooManyUnits { most: usize },
    /// `topology`: this node's.
    #[error("{name} is not reachable from this node ({})", segments(topology))]
    OutOfReach { name: VolumeName, topology: BTreeMap<String, String> },
    /// `volumes`: those that this node has.
    #[error("plugin {plugin} takes at most {most} volumes on this node")]
    TooManyVolumes { plugin: String, most: i64, volumes: Vec<VolumeName> },
    #[error("an expansion of {name}, which came before, waits until the volume is not in use")]
    ExpandsFirst { name: VolumeName },
    /// AttachVolume and DetachVolume are refused.
    #[error("{name} is claimed by {}", holders.join(", "))]
    Claimed { name: VolumeName, holders: Vec<String> },
    #[error("another user has attached {name} to {node_id}")]
    NotAttacher { name: VolumeName, node_id: String },
    #[error(
        "plugin {plugin} attaches nothing (no PUBLISH_UNPUBLISH_VOLUME): its volumes are mounted as they are"
    )]
    AttachesNothing { plugin: String },
    #[error("{name} is attached to {node_id} with another {option}")]
    AttachedOtherwise { name: VolumeName, node_id: String, option: &'static str },
    #[error("this host has {name} staged under that node id")]
    StagedHere { name: VolumeName, holders: Vec<String> },
    /// `source`: why it is unknown whether that node id is this host's.
    #[error("this host has {name} staged, perhaps under that node id. {source}")]
    PerhapsStagedHere { name: VolumeName, holders: Vec<String>, source: Error },
}

fn others(holders: &[String]) -> String {
    match holders.is_empty() {
        true => "another consumer".to_owned(),
        false => holders.join(", "),
    }
}

fn segments(topology: &BTreeMap<String, String>) -> String {
    match topology.is_empty() {
        true => "no topology".to_owned(),
        false => topology.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(", "),
    }
}

impl ClaimError {
    pub(in crate::volume) fn refused(refusal: ClaimRefusal, name: &VolumeName, consumer: &str) -> Self {
        let (name, claim) = (name.clone(), ClaimKey::new(name, consumer));
        match refusal {
            ClaimRefusal::NotOwner => ClaimError::OtherUser { claim },
            ClaimRefusal::OtherOption { option } => ClaimError::ClaimedOtherwise { claim, option },
            ClaimRefusal::Releasing => ClaimError::Releasing { claim },
            ClaimRefusal::NoCapability => ClaimError::NoCapability { name },
            ClaimRefusal::ReaderOnly => ClaimError::ReaderOnly,
            ClaimRefusal::Conflict { what, holders } => ClaimError::Conflict { name, what, holders },
            ClaimRefusal::TooMany => ClaimError::TooMany { name },
            ClaimRefusal::NoSuchClaim => ClaimError::NoRow,
        }
    }

    /// Refuses AttachVolume and DetachVolume of a volume with claims.
    pub(in crate::volume) fn refuse_claimed(record: &Record) -> Result<(), Error> {
        if record.claims.is_empty() {
            return Ok(());
        }
        Err(ClaimError::Claimed { name: record.name.clone(), holders: record.consumers() }.into())
    }

    /// Refuses an AttachVolume of a volume that another one has attached to the node otherwise.
    pub(in crate::volume) fn refuse_attached_otherwise(
        name: &VolumeName,
        node_id: &str,
        present: &AttachCall,
        wanted: &AttachCall,
    ) -> Result<(), Error> {
        match present.other_option(wanted) {
            None => Ok(()),
            Some(option) => {
                let (name, node_id) = (name.clone(), node_id.to_owned());
                Err(ClaimError::AttachedOtherwise { name, node_id, option }.into())
            }
        }
    }

    fn kind(&self) -> Kind {
        match self {
            ClaimError::NotOwner { .. } | ClaimError::OtherUser { .. } | ClaimError::NotAttacher { .. } => {
                Kind::NotAuthorized
            }
            ClaimError::ClaimedOtherwise { .. } | ClaimError::AttachedOtherwise { .. } => Kind::AlreadyExists,
            ClaimError::Releasing { .. } => Kind::Uncertain,
            ClaimError::NoCapability { .. } | ClaimError::ReaderOnly => Kind::InvalidArgument,
            ClaimError::Conflict { .. }
            | ClaimError::Unclaimed { .. }
            | ClaimError::OutOfReach { .. }
            | ClaimError::TooManyVolumes { .. }
            | ClaimError::ExpandsFirst { .. }
            | ClaimError::Claimed { .. } => Kind::ClaimConflict,
            ClaimError::TooMany { .. } | ClaimError::TooManyUnits { .. } => Kind::RateLimited,
            ClaimError::NoRow | ClaimError::InnerEvent { .. } => Kind::Internal,
            ClaimError::SecretsNeeded { .. } => Kind::SecretRequired,
            ClaimError::NoNodeId { .. } | ClaimError::UnknownAttachment { .. } => Kind::PluginError,
            ClaimError::Unwatchable { .. } | ClaimError::AttachesNothing { .. } => Kind::NotSupported,
            ClaimError::NotRunning { .. } => Kind::NotFound,
            ClaimError::StagedHere { .. } | ClaimError::PerhapsStagedHere { .. } => Kind::Busy,
        }
    }

    fn obstacle(&self) -> Option<Obstacle> {
        match self {
            ClaimError::OtherUser { .. } => Some(Obstacle::OtherUser),
            ClaimError::ClaimedOtherwise { .. } => Some(Obstacle::ClaimedOtherwise),
            ClaimError::NoCapability { .. } => Some(Obstacle::Capability),
            ClaimError::NotRunning { .. } => Some(Obstacle::NotRunning),
            ClaimError::ExpandsFirst { .. } => Some(Obstacle::Expansion),
            ClaimError::PerhapsStagedHere { source, .. } => source.details.obstacle,
            _ => None,
        }
    }

    fn fill(self, details: &mut Details) {
        details.obstacle = self.obstacle();
        match self {
            ClaimError::Conflict { holders, .. } => {
                details.holders = holders;
                details.step = Some(Step::Claim);
            }
            ClaimError::OutOfReach { .. } => {
                details.step = Some(Step::Topology);
                // Waiting does not change the topology.
                details.retryable = false;
            }
            ClaimError::TooManyVolumes { volumes, .. } => {
                details.holders = volumes.iter().map(VolumeName::to_string).collect();
                details.step = Some(Step::VolumeLimit);
            }
            ClaimError::Claimed { holders, .. }
            | ClaimError::StagedHere { holders, .. }
            | ClaimError::PerhapsStagedHere { holders, .. } => details.holders = holders,
            _ => {}
        }
    }
}

impl From<ClaimError> for Error {
    fn from(error: ClaimError) -> Self {
        Error::new(error.kind(), error.to_string()).with(|details| error.fill(details))
    }
}
