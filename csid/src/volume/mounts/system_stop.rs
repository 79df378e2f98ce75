//! Unmounts the targets of consumers when the system stops, while their plugins and the network still run. PID 1 would unmount
//! them last. The rows stay: after the next boot each mount is restored as its row says. Nothing is unpublished.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream;

use crate::host::Unbind;
use crate::store::MountFilter;
use crate::store::rows::{Leg, MountRow};
use crate::volume::context::Context;
use crate::volume::manager::Volumes;

/// Time for systemd to answer whether the system stops.
const ASK: Duration = Duration::from_secs(3);
/// Number of targets that are unmounted at the same time.
const AT_ONCE: usize = 64;

impl Volumes {
    /// Asks systemd whether the system stops. Returns false without systemd.
    pub async fn does_system_stop(&self) -> bool {
        match tokio::time::timeout(ASK, self.shared.units.is_system_stopping()).await {
            Ok(Ok(is_stopping)) => is_stopping,
            Ok(Err(error)) => {
                tracing::debug!(%error, "whether the system goes down is not known");
                false
            }
            Err(_) => {
                tracing::warn!("systemd does not say whether the system goes down; the targets stay mounted");
                false
            }
        }
    }

    /// Unmounts every target that no process uses. Called after `shutdown`. Ends after `patience` at the latest.
    pub async fn unmount_targets(&self, patience: Duration) {
        let rows = match self.shared.store.mounts(MountFilter::default()).await {
            Ok(rows) => rows,
            Err(error) => {
                tracing::error!(%error, "the mounts cannot be read; their targets stay mounted");
                return;
            }
        };
        let end = tokio::time::Instant::now() + patience;
        // One target may be on the volume of another one.
        let mut depths: BTreeMap<usize, Vec<MountRow>> = BTreeMap::new();
        for (row, _) in rows {
            if let Some(target) = row.spec.target.as_ref().filter(|_| row.target != Leg::Absent) {
                depths.entry(Path::new(target).components().count()).or_default().push(row);
            }
        }
        let mut unmounted = 0;
        for rows in depths.values().rev() {
            let unbound = stream::iter(rows).map(|row| self.shared.unmount_target(row));
            let mut unbound = unbound.buffer_unordered(AT_ONCE);
            loop {
                match tokio::time::timeout_at(end, unbound.next()).await {
                    Ok(Some(done)) => unmounted += usize::from(done),
                    Ok(None) => break,
                    Err(_) => {
                        tracing::warn!(
                            unmounted,
                            ?patience,
                            "unmounting the targets takes too long; csid stops"
                        );
                        return;
                    }
                }
            }
        }
        tracing::info!(unmounted, "the system goes down, the targets are unmounted");
    }
}

impl Context {
    /// Unmounts the row's target. Returns whether the target was mounted and is not any more.
    async fn unmount_target(&self, row: &MountRow) -> bool {
        let Some(target) = &row.spec.target else { return false };
        let were = row.device.into_iter().chain(row.status.died.iter().copied()).collect();
        let (plugin, source) = (&row.volume.plugin, Path::new(&row.source));
        match self.host.unbind(plugin, source, Path::new(target), were, Unbind::Unused).await {
            Ok(unbound) => unbound,
            Err(error) => {
                let consumer = &row.key.consumer;
                tracing::warn!(target, consumer, %error, "the target stays mounted until the end of the system; is its consumer ordered After=csid.service?");
                false
            }
        }
    }
}
