//! Runs one operation of a volume. The work itself is in `mounts` and `control`.

pub(in crate::volume) mod run;
pub(in crate::volume) mod secrets;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::host::{OwnMounts, Shown, TargetFd};
use crate::store::rows::MountKey;
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
    /// The mounts that the checks before an unmount have read, and the row that they were read for. Only the first effect of the
    /// operation uses them, if it is one of that row.
    pub(in crate::volume) own_mounts: Option<(MountKey, OwnMounts)>,
    /// Whether this operation has found the tmpfs of the plugin's root at its place.
    pub(in crate::volume) has_tmpfs: bool,
    /// The search of this operation that found no copy elsewhere. `None`: there was none, or an effect has failed since.
    pub(in crate::volume) searched: Option<Searched>,
}

/// A search of all mount namespaces that found no mount of what is `shown`.
pub(in crate::volume) struct Searched {
    pub(in crate::volume) at: Instant,
    pub(in crate::volume) shown: Vec<Shown>,
}

/// Age of a search that still says what a namespace shows. An effect that waits for a turn or for a slow plugin takes longer.
const FRESH: Duration = Duration::from_secs(1);

impl Searched {
    /// Returns whether this search has just looked for all that is `shown`.
    pub(in crate::volume) fn covers(&self, shown: &[Shown]) -> bool {
        self.at.elapsed() < FRESH && shown.iter().all(|shown| self.shown.contains(shown))
    }
}

impl<'a> Executor<'a> {
    /// Makes an operation that forces nothing.
    pub(in crate::volume) fn new(
        shared: &'a Arc<Context>,
        rows: &'a mut JournaledVolume,
        operation: RunningOperation,
    ) -> Self {
        rows.begin();
        Executor {
            shared,
            rows,
            operation,
            target_fd: None,
            force: Force::No,
            heals: false,
            own: false,
            in_effect: false,
            own_mounts: None,
            has_tmpfs: false,
            searched: None,
        }
    }

    /// Returns the engine of claims and controller calls for this operation.
    pub(in crate::volume) fn control(&mut self) -> impl Control
    where
        Self: Site,
    {
        Engine::new(&self.shared.records, self)
    }
}
