//! The seam between the engine of claims and controller calls (`control`) and the mounts of this host (`mounts`).
//!
//! The engine asks its host through [`Site`], and the mounts ask the engine through [`Control`]. Neither side imports the other,
//! so the engine can run where nothing is mounted.

use std::sync::Arc;
use std::time::Instant;

use crate::error::Result;
use crate::plugin::{Plugins, Stats};
use crate::secret::Secrets;
use crate::store::registry::{Bound, Capability, Claim, Expansion, Record, VolumeName};
use crate::store::rows::VolumeKey;
use crate::volume::api::requests::Authority;
use crate::volume::model::subject::{ClaimKey, Subject};
use crate::volume::operation::request::{CallTarget, ControllerRequest, OperationResponse, ServersAnswer};
use crate::volume::operation::running::RunningOperation;
use crate::volume::operation::running::Unfinished;

/// The host on which the engine runs an operation of one volume.
pub(in crate::volume) trait Site: Send + Sync {
    fn operation(&self) -> &RunningOperation;

    /// Returns the volume of the operation.
    fn volume(&self) -> &VolumeKey;

    fn plugins(&self) -> &Plugins;

    /// Carries out the orders of root that have come (`RunningOperation::orders`). Fails with the reason to end the wait if it cannot.
    fn carry_out_orders(&mut self) -> impl Future<Output = Result<()>> + Send;

    /// Returns the consumers of the volume's mounts here.
    fn consumers(&self) -> Vec<String>;

    /// Returns whether the consumer has a mount of the volume here, whatever its tag.
    fn has_mounts_of(&self, key: &ClaimKey) -> bool;

    /// Returns whether the volume is or may be staged or published here.
    fn is_staged(&self) -> bool;

    /// Returns whether the volume is or may be staged here under this node id, as far as the rows say. Calls no plugin.
    fn may_be_staged_under(&self, node_id: &str) -> bool;

    /// Returns whether the volume is or may be staged here under this node id.
    fn is_staged_under(&mut self, node_id: &str) -> impl Future<Output = Result<bool>> + Send;

    /// Returns whether a mount here is complete.
    fn is_mounted(&self) -> bool;

    /// Returns the capability of the volume's first mount here. `None`: there is no mount.
    fn used_capability(&self) -> Option<Capability>;

    /// Returns whether the plugin may know secrets of mounts here that a call does not have. With `given`, the call has those of
    /// the consumer `own`, or of the credential `at_hand`.
    fn has_other_secrets(&self, own: Option<&str>, at_hand: Option<&String>, given: bool) -> bool;

    /// Returns Busy if a volume of this name is mounted here.
    fn refuse_mounted(&self, name: &VolumeName) -> impl Future<Output = Result<()>> + Send;

    /// Returns Busy while processes use a mount of the consumer. `call` is what they are in the way of.
    fn refuse_in_use(&mut self, key: &ClaimKey) -> impl Future<Output = Result<()>> + Send;

    /// Unmounts every mount of the consumer.
    fn unmount_all(&mut self, key: &ClaimKey) -> impl Future<Output = Result<()>> + Send;

    /// Returns the statistics of a mount here.
    fn stats(&mut self, target: &CallTarget) -> impl Future<Output = Result<Stats>> + Send;

    /// Expands the volume on this node, and returns its capacity. `None`: the plugin does not report it, or has no such RPC and
    /// so nothing to do.
    fn expand_here(
        &mut self,
        target: &CallTarget,
        expansion: Expansion,
        secrets: Option<&Secrets>,
    ) -> impl Future<Output = Result<Option<u64>>> + Send;

    /// Returns the secrets of a credential.
    fn credential(&self, name: &str) -> impl Future<Output = Result<Secrets>> + Send;

    /// Returns whether the snapshot exists. Fails if it belongs to another uid.
    fn is_own_snapshot(
        &self,
        namespace: &str,
        snapshot: &str,
        uid: u32,
        deadline: Instant,
    ) -> impl Future<Output = Result<bool>> + Send;

    /// Returns the subjects of the volume's unfinished work.
    fn unfinished(&self) -> Vec<Subject>;

    /// Notes what is left to do for a subject. `None`: nothing.
    fn set_unfinished(&mut self, subject: Subject, work: Option<Unfinished>);

    /// Has the actor of `volume` continue the work on a subject, for the uid that began it.
    fn go_on(&self, volume: &VolumeKey, subject: Subject, uid: u32);

    /// Notes to which units and connections the claims of a record are bound.
    fn note_bound(&self, record: &Record);
}

/// The engine of claims and controller calls, for an operation of one volume.
pub(in crate::volume) trait Control: Send {
    /// Returns the record of this volume. Fails if the name has come to mean another volume since the request.
    fn record(&self, name: &VolumeName) -> impl Future<Output = Result<Record>> + Send;

    /// Refuses a claim that the record does not admit.
    fn admit(&self, record: &Record, claim: &Claim) -> Result<()>;

    /// Takes a claim, or finds it taken, and returns the record with it. `ahead` are the claims that wait before this one. `answer`: what a
    /// server has answered to the same call about the volume. `None`: a server is asked if the journal lacks the volume.
    fn claim(
        &mut self,
        name: &VolumeName,
        wanted: &Claim,
        ahead: &[Arc<Claim>],
        answer: Option<Arc<ServersAnswer>>,
    ) -> impl Future<Output = Result<Record>> + Send;

    /// Binds an existing claim to the unit or connection of a repeated call, which is otherwise the same. This is the last step
    /// of the call, so a cancelled call has changed nothing.
    fn rebind(&mut self, record: &mut Record, wanted: &Claim) -> impl Future<Output = Result<()>> + Send;

    /// Releases a claim, for its owner or by authority. `force` drops the claim as it is. `id`: only if a server gave it this name.
    fn release(
        &mut self,
        key: &ClaimKey,
        authority: Authority,
        force: bool,
        id: Option<&str>,
    ) -> impl Future<Output = Result<()>> + Send;

    /// Releases a claim whose unit or connection has ended, unless it was bound to another one since.
    fn unbind(&mut self, key: &ClaimKey, bound: &Bound) -> impl Future<Output = Result<()>> + Send;

    /// Releases a claim that a Mount took, once the last mount of its consumer is gone. Does nothing for other claims.
    fn give_back(&mut self, key: &ClaimKey) -> impl Future<Output = Result<()>> + Send;

    /// Makes a call to the plugin's controller, or one that concerns no mount.
    fn call(
        &mut self,
        target: &CallTarget,
        call: ControllerRequest,
    ) -> impl Future<Output = Result<OperationResponse>> + Send;

    /// Finishes a pending expansion on this node, after the volume is published.
    fn finish_expansion(&mut self, target: &CallTarget) -> impl Future<Output = Result<()>> + Send;

    /// Continues the release of a claim.
    fn continue_claim(&mut self, key: &ClaimKey) -> impl Future<Output = Result<()>> + Send;

    /// Retries a creation or deletion.
    fn continue_call(&mut self, name: &VolumeName) -> impl Future<Output = Result<()>> + Send;

    /// Removes the row of an attachment by AttachVolume without a call to the plugin.
    fn forget_attachment(
        &mut self,
        name: &VolumeName,
        node_id: &str,
    ) -> impl Future<Output = Result<()>> + Send;

    /// Finishes what AttachVolume or DetachVolume left between two states.
    fn continue_detach(
        &mut self,
        name: &VolumeName,
        node_id: &str,
    ) -> impl Future<Output = Result<()>> + Send;
}
