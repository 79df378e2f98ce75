//! A call that asks for a claim, and what becomes of a try of it.

use std::time::Duration;

use csi_proto::cluster::v1::{ClaimAsk, Granted};
use csi_proto::identity::{Identity, Role, is_member_name};
use csid::Error;
use csid::error::shortened;
use csid::store::registry::{Claim, RecordFilter, VolumeName};
use csid::volume::rules::{self, check_name};
use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::failure::{Result, ServerError};
use crate::grants::May;
use crate::random;
use crate::time::now_usec;

/// How long a caller waits for a controller. A node gives a call up after 10 s.
pub const CONTROLLER: Duration = Duration::from_secs(8);
/// The longest wait in the queue that a call may ask for. The same call asks for more of it.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

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

/// What an earlier try of a call has found.
pub struct Found {
    /// The name of the claim.
    pub id: String,
    /// Whether the claim was in the queue.
    pub in_queue: bool,
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

impl Cluster {
    /// Checks a call, and makes the claim that it asks for.
    pub fn wanted<'a>(&self, caller: &'a Identity, ask: ClaimAsk, has_session: bool) -> Result<Wanted<'a>> {
        let name = rules::volume_name(&ask.namespace, &ask.volume)?;
        let node = self.node_of(caller, &ask.node, &name.namespace)?;
        check_name("call", &ask.call)?;
        check_name("consumer", &ask.consumer)?;
        let usage = ask.r#use.ok_or_else(|| Error::invalid("use is missing"))?;
        let usage = rules::read_use(&usage.mode, &usage.access_mode, &usage.attachment_mode)?;
        let credential = (!ask.credential.is_empty()).then_some(ask.credential);
        if let Some(credential) = &credential {
            rules::check_credential(&name.namespace, credential)?;
        }
        if caller.role == Role::Node && !has_session {
            return Err(ServerError::Unavailable(format!("node {node} has no session with this server")));
        }
        let claim = Claim {
            by_mount: ask.by_mount,
            credential,
            id: random::name(),
            call: format!("{caller}/{}", ask.call),
            since_usec: now_usec(),
            ..rules::new_claim(&ask.consumer, &node, ask.uid, usage)
        };
        let until =
            (ask.queue_ms != 0).then(|| Instant::now() + Duration::from_millis(ask.queue_ms).min(LONGEST));
        let answer = match ask.answer_ms {
            0 => CONTROLLER,
            ms => Duration::from_millis(ms.into()).min(CONTROLLER),
        };
        Ok(Wanted { caller, name, node, boot: ask.boot, claim, until, answer })
    }

    /// Returns the node whose claim is meant, if the caller may claim for it.
    fn node_of(&self, caller: &Identity, node: &str, namespace: &str) -> Result<String> {
        let is_own = caller.role == Role::Node && (node.is_empty() || node == caller.name);
        if is_own {
            self.require(caller, namespace, May::Mount)?;
            return Ok(caller.name.clone());
        }
        self.require(caller, namespace, May::ClaimFor)?;
        match is_member_name(node) {
            true => Ok(node.to_owned()),
            false => Err(Error::invalid(format!("{:?} is not the name of a node", shortened(node))).into()),
        }
    }

    /// Returns whether a call is of the boot that has joined, as far as this server knows without a look at etcd.
    pub async fn is_of_known_boot(&self, wanted: &Wanted<'_>) -> Result<bool> {
        let Wanted { caller, boot, .. } = wanted;
        if caller.role != Role::Node {
            return Ok(true);
        }
        Ok(self.node(&caller.name).await?.is_some_and(|row| row.value.boot == *boot))
    }
}

/// Returns the filter of the one volume of this name.
pub fn filter_of(name: &VolumeName) -> RecordFilter {
    let VolumeName { namespace, volume } = name.clone();
    RecordFilter { namespace: Some(namespace), volume: Some(volume), most: 1, ..RecordFilter::default() }
}
