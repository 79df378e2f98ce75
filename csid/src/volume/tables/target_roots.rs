//! The directories of target-roots, with their symbolic links resolved.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The resolved roots of the configuration.
#[derive(Default)]
pub(in crate::volume) struct TargetRoots(Mutex<KnownRoots>);

#[derive(Default)]
pub(in crate::volume) struct KnownRoots {
    /// The resolved name of each root that was reached.
    pub(in crate::volume) resolved: BTreeMap<PathBuf, PathBuf>,
    /// Roots that the last try could not reach. Each was reported by an event.
    pub(in crate::volume) failed: BTreeSet<PathBuf>,
    /// How often the configuration was read. The result of an earlier read is dropped.
    pub(in crate::volume) reads: u64,
}

impl TargetRoots {
    pub(in crate::volume) fn known(&self) -> MutexGuard<'_, KnownRoots> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
