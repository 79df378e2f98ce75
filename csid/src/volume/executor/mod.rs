//! One operation of one volume while it runs. What it does is in `mounts` and `control`.

pub(in crate::volume) mod rpc_outcome;
pub(in crate::volume) mod run;
pub(in crate::volume) mod secrets;
mod waits;

use std::sync::Arc;
use std::time::Duration;

use crate::host::TargetFd;
use crate::volume::api::requests::Force;
use crate::volume::context::Context;
use crate::volume::executor::rpc_outcome::RpcTries;
use crate::volume::operation::journal::JournaledVolume;
use crate::volume::operation::turn::Turn;

/// The time limit for finding the processes that hold a mount, and for querying the capabilities of a plugin.
pub(in crate::volume) const PATIENCE: Duration = Duration::from_secs(5);

pub(in crate::volume) struct Executor<'a> {
    pub(in crate::volume) shared: &'a Arc<Context>,
    pub(in crate::volume) rows: &'a mut JournaledVolume,
    pub(in crate::volume) turn: Turn,
    /// The descriptor of the target that the caller gave. Retries without a caller have none and walk to the target. Either its
    /// automount has ended by then, or they are refused and retried.
    pub(in crate::volume) target_fd: Option<Arc<TargetFd>>,
    pub(in crate::volume) force: Force,
    /// Whether a mount that has lost its server is mounted again.
    pub(in crate::volume) heals: bool,
    /// Whether csid itself requested the mount. It requests it again if this operation fails.
    pub(in crate::volume) own: bool,
    /// The tries of the last controller call.
    pub(in crate::volume) tried: RpcTries,
    /// Whether an effect is under way: the rows have its intent.
    pub(in crate::volume) in_effect: bool,
}

impl<'a> Executor<'a> {
    /// Makes an operation that forces nothing.
    pub(in crate::volume) fn new(
        shared: &'a Arc<Context>,
        rows: &'a mut JournaledVolume,
        turn: Turn,
    ) -> Self {
        let (target_fd, force, tried) = (None, Force::No, RpcTries::default());
        let (heals, own, in_effect) = (false, false, false);
        Executor { shared, rows, turn, target_fd, force, heals, own, tried, in_effect }
    }
}
