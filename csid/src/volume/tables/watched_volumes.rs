//! The volumes whose mounts have a server that may die.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::host::Look;
use crate::store::registry::VolumeName;
use crate::store::rows::{MountRow, VolumeKey};

/// The volumes to probe, and the one name that each has while it is in use.
#[derive(Default)]
pub(in crate::volume) struct WatchedVolumes(Mutex<BTreeMap<VolumeKey, Arc<VolumeName>>>);

impl WatchedVolumes {
    pub(in crate::volume) fn lock(&self) -> MutexGuard<'_, BTreeMap<VolumeKey, Arc<VolumeName>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a mount that has a server.
    pub(in crate::volume) fn note(&self, row: &MountRow) {
        self.lock().insert(row.volume.clone(), Arc::new(VolumeName::of(&row.key)));
    }

    /// Removes a volume without rows, unless it was noted again since.
    pub(in crate::volume) fn forget(&self, volume: &VolumeKey, noted: &Arc<VolumeName>) {
        let mut all = self.lock();
        if all.get(volume).is_some_and(|now| Arc::ptr_eq(now, noted)) {
            all.remove(volume);
        }
    }

    pub(in crate::volume) fn has(&self, volume: &VolumeKey) -> bool {
        self.lock().contains_key(volume)
    }

    /// Returns whether a mount with this probe result has or had a server.
    pub(in crate::volume) fn are_watched(look: &Look) -> bool {
        matches!(look, Look::Mounted { served: true, .. } | Look::Dead(_) | Look::Hung)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::model::step::tests::begun;

    /// The rows of the volume are read, and it has none. Then a mount is made and noted, and only then the first result is acted
    /// on.
    #[test]
    fn a_note_that_came_meanwhile_is_kept() {
        let (served, row) = (WatchedVolumes::default(), begun().mounts[0].clone());
        served.note(&row);
        let first = Arc::clone(&served.lock()[&row.volume]);
        served.note(&row);
        served.forget(&row.volume, &first);
        assert!(served.has(&row.volume));
        let second = Arc::clone(&served.lock()[&row.volume]);
        served.forget(&row.volume, &second);
        assert!(!served.has(&row.volume));
    }
}
