//! Turns a mount that another manager made into a row. The kernel was probed before.

use std::sync::Arc;

use crate::store::rows::{Leg, MountRow, MountStatus, Phase};
use crate::volume::model::admission::Refusal;
use crate::volume::model::volume::{DesiredMount, Paths, Volume};

/// Enters the row of an existing mount, or finds it entered. The caller has checked that `volume` admits the mount.
pub(super) fn adopt(
    volume: &mut Volume,
    wanted: &DesiredMount,
    at: &Paths,
    device: u64,
) -> Result<(), Refusal> {
    let other = |what, path: &str| Err(Refusal::OtherPath { what, path: path.to_owned() });
    let other_staging = |volume: &Volume| other("staging", volume.row.staging.as_deref().unwrap_or_default());
    let key = &wanted.key;
    let is_down = volume.mount(key).is_none_or(|row| volume.is_down(row));
    if let Some(row) = volume.mount(key).filter(|_| !is_down) {
        return match row.phase {
            _ if row.source != at.source => other("published", &row.source),
            _ if volume.row.staging != at.staging => other_staging(volume),
            Phase::Mounted => Ok(()),
            _ => Err(Refusal::Unsettled),
        };
    }
    match volume.row.stage {
        Leg::Present if volume.row.staging != at.staging => return other_staging(volume),
        Leg::Making | Leg::Removing => return Err(Refusal::Unsettled),
        Leg::Present | Leg::Absent => {}
    }
    if let Some(row) = volume.mounts.iter().find(|row| row.key != *key && row.source == at.source) {
        return Err(Refusal::Conflict { what: "the path", holders: vec![row.key.consumer.clone()] });
    }
    if volume.mounts.iter().all(|row| row.key == *key || volume.has_ended(row)) {
        volume.row.namespace.clone_from(&key.namespace);
        volume.row.volume.clone_from(&key.volume);
    }
    // The backing of an earlier staging does not describe this one.
    if volume.row.stage == Leg::Absent && !volume.published_elsewhere(key) {
        volume.row.backing = None;
    }
    volume.row.staging.clone_from(&at.staging);
    volume.row.stage = if at.staging.is_some() { Leg::Present } else { Leg::Absent };
    volume.mounts.retain(|row| row.key != *key);
    volume.mounts.push(Arc::new(MountRow {
        key: key.clone(),
        volume: volume.row.key.clone(),
        uid: wanted.uid,
        spec: wanted.spec.clone(),
        status: MountStatus::default(),
        phase: Phase::Mounted,
        kept: true,
        source: at.source.clone(),
        published: None,
        publish: Leg::Present,
        target: if wanted.spec.target.is_some() { Leg::Present } else { Leg::Absent },
        device: Some(device),
        error: None,
        operations: Vec::new(),
        since_usec: 0,
        modify_index: 0,
    }));
    Ok(())
}

#[cfg(test)]
#[path = "adopt_tests.rs"]
mod tests;
