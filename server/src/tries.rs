//! A call that asks for a claim, or that ends one, and what becomes of a try of it.

use std::time::Duration;

use csi_proto::cluster::v1::{Granted, Owed};
use csi_proto::identity::Identity;
use csid::Error;
use csid::store::registry::{Claim, VolumeName};
use tokio::time::Instant;

/// What became of a try to take or to end a claim.
pub enum Tried {
    Granted(Box<Granted>),
    /// The claim has ended, or there is none.
    Ended,
    /// The record or a row has changed since it was read.
    Changed,
    /// The time was over before the try had its turn, or the record has changed too often. Nothing of it is written.
    Late,
    /// The claim is written. It waits for its controller.
    Waits {
        id: String,
        /// The last failure.
        error: Option<String>,
        /// The record's revision.
        revision: u64,
    },
    /// The claim waits in the queue.
    Queued(QueuePlace),
}

/// A claim that waits in the queue.
pub struct QueuePlace {
    /// The entry's claim.
    pub id: String,
    /// What is in its way.
    pub error: Error,
    /// The record's revision.
    pub revision: u64,
}

/// The word of a node that it has nothing of a claim any more.
pub struct ClaimEnd {
    pub name: VolumeName,
    pub node: String,
    /// The name of the call that has asked for the claim. `None`: the node names the claim alone.
    pub call: Option<String>,
    pub owed: Owed,
}

/// What an earlier try of a call has found.
#[derive(Clone)]
pub struct Found {
    /// The name of the claim.
    pub id: String,
    /// Whether the claim was in the queue.
    pub in_queue: bool,
}

/// The claim that a call asks for.
pub struct Wanted {
    pub caller: Identity,
    pub name: VolumeName,
    pub node: String,
    /// The boot of a calling node.
    pub boot: String,
    pub claim: Claim,
    /// The end of the wait in the queue. `None`: the claim does not wait there.
    pub until: Option<Instant>,
    /// How long the answer may take while the claim is in the queue.
    pub answer: Duration,
    /// The mark of the registration by which the caller has chosen the claim. Empty: any.
    pub mark: Vec<u8>,
    /// Whether the caller's own call had secrets for a controller.
    pub brings_secrets: bool,
}

impl Wanted {
    /// Returns whether the claim waits in the queue if others are in its way.
    pub fn is_waiting(&self) -> bool {
        self.until.is_some_and(|until| until > Instant::now())
    }
}
