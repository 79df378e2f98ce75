//! The claim that a call asks for, and a step of it over a record.

use std::time::Duration;

use csi_proto::cluster::v1::ClaimAsk;
use csi_proto::identity::{Identity, Role, is_member_name};
use csid::Error;
use csid::error::shortened;
use csid::store::registry::{Claim, Record};
use csid::volume::rules::{self, check_name};
use csid_etcd::Guard;
use tokio::time::Instant;

use crate::cluster::{Cluster, Writing};
use crate::failure::{Result, ServerError};
use crate::grants::May;
use crate::random;
use crate::time::now_usec;
use crate::tries::Wanted;

/// How long a caller waits for a controller. A node gives a call up after 10 s.
pub const CONTROLLER: Duration = Duration::from_secs(8);
/// The longest wait in the queue that a call may ask for. The same call asks for more of it.
const LONGEST: Duration = Duration::from_secs(24 * 60 * 60);

/// The step of a claim, or of its end, over a record.
pub(crate) struct ClaimStep<'a> {
    /// The record after it.
    pub after: Record,
    /// The rows that the claim needs as they are.
    pub guards: Vec<Guard>,
    /// The place of a new claim among those of its node, until it is written.
    pub place: Option<Writing<'a>>,
    pub awaits: Awaits,
}

/// What a try has when its step is written.
pub(crate) enum Awaits {
    /// The end of the claim.
    End,
    /// The claim. `is_due`: its controller has yet to attach the volume.
    Claim { is_due: bool },
    /// A place in the queue, behind so many, because of this.
    Queue { before: usize, error: Error },
}

impl Cluster {
    /// Checks a call, and makes the claim that it asks for.
    pub fn wanted(&self, caller: &Identity, ask: ClaimAsk, has_session: bool) -> Result<Wanted> {
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
        let (caller, boot, mark, brings_secrets) = (caller.clone(), ask.boot, ask.mark, ask.brings_secrets);
        Ok(Wanted { caller, name, node, boot, claim, until, answer, mark, brings_secrets })
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
    pub async fn is_of_known_boot(&self, wanted: &Wanted) -> Result<bool> {
        let Wanted { caller, boot, .. } = wanted;
        if caller.role != Role::Node {
            return Ok(true);
        }
        Ok(self.node(&caller.name).await?.is_some_and(|row| row.value.boot == *boot))
    }
}
