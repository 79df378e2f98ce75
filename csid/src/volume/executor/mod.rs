//! Runs one operation of a volume. The work itself is in `mounts` and `control`.

pub(in crate::volume) mod run;
pub(in crate::volume) mod secrets;

use std::sync::Arc;

use crate::host::{OwnMounts, TargetFd};
use crate::volume::api::requests::Force;
use crate::volume::context::Context;
use crate::volume::control::engine::Engine;
use crate::volume::operation::journal::JournaledVolume;
use crate::volume::operation::running::RunningOperation;
use crate::volume::seam::{Control, Site};

/// An operation of a volume that runs on this host.
pub(in crate::volume) struct Executor<'a> {
    pub(in crate::volume) shared: &'a Arc<Context>,
    pub(in crate::volume) rows: &'a mut JournaledVolume,
    pub(in crate::volume) operation: RunningOperation,
    /// The descriptor of the target that the caller gave. Retries without a caller have none and walk to the target. Either its
    /// automount has ended by then, or they are refused and retried.
    pub(in crate::volume) target_fd: Option<Arc<TargetFd>>,
    pub(in crate::volume) force: Force,
    /// Whether a mount that has lost its server is mounted again.
    pub(in crate::volume) heals: bool,
    /// Whether csid itself requested the mount. It requests it again if this operation fails.
    pub(in crate::volume) own: bool,
    /// Whether an effect is under way: the rows have its intent.
    pub(in crate::volume) in_effect: bool,
    /// The mounts that the checks before an unmount have read. Only the first effect of the operation uses them.
    pub(in crate::volume) own_mounts: Option<OwnMounts>,
}

impl<'a> Executor<'a> {
    /// Makes an operation that forces nothing.
    pub(in crate::volume) fn new(
        shared: &'a Arc<Context>,
        rows: &'a mut JournaledVolume,
        operation: RunningOperation,
    ) -> Self {
        let (target_fd, force) = (None, Force::No);
        let (heals, own, in_effect) = (false, false, false);
        Executor { shared, rows, operation, target_fd, force, heals, own, in_effect, own_mounts: None }
    }

    /// Returns the engine of claims and controller calls for this operation.
    pub(in crate::volume) fn control(&mut self) -> impl Control
    where
        Self: Site,
    {
        Engine::new(&self.shared.records, self)
    }
}
