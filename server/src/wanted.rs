//! A call that asks for a claim, and what becomes of a try of it.

use std::time::Duration;

use csi_proto::cluster::v1::Granted;
use csi_proto::identity::Identity;
use csid::store::registry::{Claim, RecordFilter, VolumeName};
use csid::{Error, Kind};
use tokio::time::Instant;

use crate::failure::ServerError;

/// Tries of a change that others are faster with.
pub const TRIES: usize = 64;

/// What became of a try to take a claim.
pub enum Tried {
    Granted(Box<Granted>),
    /// The record or a row has changed since it was read.
    Changed,
    /// The claim is written. It waits for its controller.
    Waits {
        id: String,
        /// The last failure.
        error: Option<String>,
        /// The record's revision.
        revision: u64,
    },
    /// The claim waits in the queue.
    Queued(Place),
}

/// A claim that waits in the queue.
pub struct Place {
    /// The entry's claim.
    pub id: String,
    /// What is in its way.
    pub error: Error,
    /// The record's revision.
    pub revision: u64,
}

/// The claim that a call asks for.
pub struct Wanted<'a> {
    pub caller: &'a Identity,
    pub name: VolumeName,
    pub node: String,
    /// The boot of a calling node.
    pub boot: String,
    pub claim: Claim,
    /// The end of the wait in the queue. `None`: the claim does not wait there.
    pub until: Option<Instant>,
    /// How long the answer may take while the claim is in the queue.
    pub answer: Duration,
}

impl Wanted<'_> {
    /// Returns whether the claim waits in the queue if others are in its way.
    pub fn is_waiting(&self) -> bool {
        self.until.is_some_and(|until| until > Instant::now())
    }
}

/// Returns the filter of the one volume of this name.
pub fn filter_of(name: &VolumeName) -> RecordFilter {
    let VolumeName { namespace, volume } = name.clone();
    RecordFilter { namespace: Some(namespace), volume: Some(volume), most: 1, ..RecordFilter::default() }
}

/// Returns the error of a change that others were faster with each time.
pub fn busy(name: &VolumeName) -> ServerError {
    Error::new(Kind::Busy, format!("the record of {name} changed {TRIES} times meanwhile")).into()
}
