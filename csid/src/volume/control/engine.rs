//! The engine of claims and controller calls, for one operation.

use std::sync::Arc;

use crate::error::Result;
use crate::store::registry::{Bound, Claim, Record, VolumeName};
use crate::volume::api::requests::Authority;
use crate::volume::control::records::Records;
use crate::volume::control::tries::RpcTries;
use crate::volume::errors::claim::ClaimError;
use crate::volume::model::claim;
use crate::volume::model::subject::ClaimKey;
use crate::volume::operation::request::{CallTarget, ControllerRequest, OperationResponse, ServersAnswer};
use crate::volume::seam::{Control, Site};

/// The engine during one operation of a volume. It runs in the actor of the volume, so no controller call overlaps a node call
/// (CSI rule 18).
pub(in crate::volume) struct Engine<'a, S> {
    pub(in crate::volume) records: &'a Records,
    pub(in crate::volume) site: &'a mut S,
    /// The tries of the last controller call.
    pub(in crate::volume) tried: RpcTries,
    /// Whether the caller does not wait for a server of the cluster to learn that a claim has ended.
    pub(in crate::volume) is_brief: bool,
    /// The answer of a server by which the present claim was chosen. `None`: a server was asked in its turn, or the journal has the volume.
    pub(in crate::volume) answer: Option<Arc<ServersAnswer>>,
    /// Whether the call of the present claim has secrets for a controller that the servers of a cluster do not get.
    pub(in crate::volume) brings_secrets: bool,
}

impl<'a, S: Site> Engine<'a, S> {
    pub(in crate::volume) fn new(records: &'a Records, site: &'a mut S) -> Self {
        let (tried, is_brief, answer, brings_secrets) = Default::default();
        Engine { records, site, tried, is_brief, answer, brings_secrets }
    }
}

/// A future is as large as its largest branch, and each future that awaits it holds it. So the large ones of the engine are boxed
/// here: a mount or an unmount without a claim has no room for them.
impl<S: Site> Control for Engine<'_, S> {
    async fn record(&self, name: &VolumeName) -> Result<Record> {
        self.registered_as_mine(name).await
    }

    fn admit(&self, record: &Record, claim: &Claim) -> Result<()> {
        claim::admit(&self.claims(record), claim)
            .map_err(|refusal| ClaimError::refused(refusal, &record.name, &claim.consumer).into())
    }

    async fn claim(
        &mut self,
        name: &VolumeName,
        wanted: &Claim,
        ahead: &[Arc<Claim>],
        answer: Option<Arc<ServersAnswer>>,
    ) -> Result<Record> {
        Box::pin(self.take_claim(name, wanted, ahead, answer)).await
    }

    async fn rebind(&mut self, record: &mut Record, wanted: &Claim) -> Result<()> {
        Box::pin(self.rebind_claim(record, wanted)).await
    }

    async fn release(
        &mut self,
        key: &ClaimKey,
        authority: Authority,
        force: bool,
        id: Option<&str>,
    ) -> Result<()> {
        Box::pin(self.release_claim(key, authority, force, id)).await
    }

    async fn unbind(&mut self, key: &ClaimKey, bound: &Bound) -> Result<()> {
        Box::pin(self.release_unbound(key, bound)).await
    }

    async fn give_back(&mut self, key: &ClaimKey) -> Result<()> {
        self.release_implicit(key).await
    }

    async fn call(&mut self, target: &CallTarget, call: ControllerRequest) -> Result<OperationResponse> {
        Box::pin(self.run_call(target, call)).await
    }

    async fn finish_expansion(&mut self, target: &CallTarget) -> Result<()> {
        Box::pin(self.expand_the_rest(target)).await
    }

    async fn continue_claim(&mut self, key: &ClaimKey) -> Result<()> {
        Box::pin(self.retry_claim(key)).await
    }

    async fn continue_call(&mut self, name: &VolumeName) -> Result<()> {
        Box::pin(self.retry_call(name)).await
    }

    async fn forget_attachment(&mut self, name: &VolumeName, node_id: &str) -> Result<()> {
        Box::pin(self.forget_attached(name, node_id)).await
    }

    async fn continue_detach(&mut self, name: &VolumeName, node_id: &str) -> Result<()> {
        Box::pin(self.retry_detach(name, node_id)).await
    }
}
