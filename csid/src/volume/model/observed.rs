//! Updates a volume's rows from the observed state of its mounts, for a request of a mount and at csid's start. A part of
//! [`step`](super::step), and pure.

use std::sync::Arc;

use crate::store::rows::{Leg, MountKey, MountRow, MountSpec, MountStatus, Phase, VolumeKey};
use crate::volume::model::volume::{Observed, Volume, at_rest, between, rest, shows_it};

/// Marks a mount that is dead, or not where its row says. The plugin still regards it as mounted, so its legs are negated
/// before they are made again.
pub(in crate::volume) fn gone(volume: &mut Volume, key: &MountKey, sight: Observed, phase: Phase) {
    let Some(mount) = volume.mount_mut(key) else { return };
    mount.phase = phase;
    if mount.spec.target.is_some() {
        let is_dead = sight == Observed::Dead && mount.target == Leg::Present;
        // csid was replacing the dead bind at the target when csid ended.
        let goes_on = sight == Observed::Unbound && mount.status.healing && mount.target == Leg::Making;
        mount.target = if is_dead || goes_on { Leg::Making } else { Leg::Removing };
    }
    if sight != Observed::Unbound {
        mount.publish = Leg::Removing;
    }
    mount.status.healing |= sight == Observed::Dead;
}

/// Sets the staging to `Removing` if the last publish has been removed. The staging may have been removed with it, so its state
/// is unknown.
pub(in crate::volume) fn none_left(volume: &mut Volume) {
    let taken = volume.mounts.iter().any(|mount| mount.publish == Leg::Removing);
    let left = volume.mounts.iter().any(|mount| mount.publish == Leg::Present);
    if taken && !left && volume.row.stage == Leg::Present {
        volume.row.stage = Leg::Removing;
    }
}

/// What another boot leaves of a row. It ends the mount, and with it the legs, the device and what is known of its server.
#[derive(PartialEq, Eq)]
struct Booted<'a> {
    key: &'a MountKey,
    volume: &'a VolumeKey,
    uid: u32,
    spec: &'a MountSpec,
    secrets_beside: bool,
    counted: bool,
    node_id: Option<&'a str>,
    phase: Phase,
    kept: bool,
    source: &'a str,
    published: Option<&'a str>,
    error: Option<&'a str>,
    operations: &'a [String],
}

impl<'a> Booted<'a> {
    fn of(mount: &'a MountRow) -> Self {
        let MountRow { key, volume, uid, spec, status, phase, kept, source, published, .. } = mount;
        let MountRow {
            publish, target: _, device: _, error, operations, since_usec: _, modify_index: _, ..
        } = mount;
        let MountStatus { secrets_beside, healing: _, counted, died: _, node_id } = status;
        let (phase, kept, operations) = match phase {
            // A caller may have received the answer for a mount whose row is still `Mounting`: an outcome is not synced. A mount that
            // died with the host is not healed, and comes back as `restore` says.
            Phase::Mounting | Phase::Mounted | Phase::Waiting => (at_rest(spec.restore), true, [].as_slice()),
            Phase::Unmounting | Phase::Uncertain => (Phase::Unmounting, *kept, operations.as_slice()),
            Phase::Lost => (Phase::Lost, *kept, operations.as_slice()),
        };
        Booted {
            key,
            volume,
            uid: *uid,
            spec,
            secrets_beside: *secrets_beside,
            counted: *counted || *publish != Leg::Absent,
            node_id: node_id.as_deref(),
            phase,
            kept,
            source,
            published: published.as_deref(),
            error: error.as_deref(),
            operations,
        }
    }

    /// Returns whether the row stays. That of an unmount ends.
    fn stays(&self) -> bool {
        self.kept || self.phase != Phase::Unmounting
    }
}

/// Updates a row after another boot.
fn boot(mount: &mut MountRow) {
    let Booted { phase, kept, counted, operations, .. } = Booted::of(mount);
    let is_idle = operations.is_empty();
    (mount.phase, mount.kept, mount.status.counted) = (phase, kept, counted);
    if is_idle {
        mount.operations.clear();
    }
    mount.publish = Leg::Absent;
    mount.target = Leg::Absent;
    mount.device = None;
    mount.status.died.clear();
    mount.status.healing = false;
}

/// Returns whether csid makes the same of both after another boot.
pub(in crate::volume) fn same_after_boot(one: &Volume, other: &Volume) -> bool {
    fn left(rows: &[Arc<MountRow>]) -> impl Iterator<Item = Booted<'_>> {
        rows.iter().map(|row| Booted::of(row)).filter(Booted::stays)
    }
    let (had, has) = (&one.row, &other.row);
    let (before, after) = between(&one.mounts, &other.mounts);
    had.namespace == has.namespace
        && had.volume == has.volume
        && had.staging == has.staging
        && left(&one.mounts[before]).eq(left(&other.mounts[after]))
}

/// Updates a volume's rows at a start of csid.
pub(in crate::volume) fn recovered(volume: &mut Volume, same_boot: bool, sights: &[Observed]) {
    let seen: Vec<(MountKey, Phase, Observed)> = volume
        .mounts
        .iter()
        .zip(sights.iter().copied().chain(std::iter::repeat(Observed::Gone)))
        .map(|(mount, sight)| (mount.key.clone(), mount.phase, sight))
        .collect();
    if !same_boot {
        // The device numbers are valid only in the boot in which they were read.
        volume.row.backing = None;
        // No mount outlives a boot. A mount that is observed all the same keeps the staging and itself: the boot was a
        // container's, or a marker was lost. Block nodes are never observed here, because they may be left over.
        let any = seen.iter().any(|(_, phase, sight)| *phase == Phase::Mounted && *sight != Observed::Gone);
        if !any {
            volume.row.stage = Leg::Absent;
        }
    }
    for (key, phase, sight) in &seen {
        let Some(mount) = volume.mount_mut(key) else { continue };
        if !same_boot && (*phase != Phase::Mounted || *sight == Observed::Gone) {
            boot(mount);
            continue;
        }
        mount.status.healing &= same_boot;
        let rest = rest(mount);
        match phase {
            // The mount was answered once and is published. Only its target was under way, which csid binds without a request.
            Phase::Mounting if mount.kept && mount.publish == Leg::Present => {
                mount.phase = Phase::Waiting;
            }
            // No caller received an answer for the mount, so it is rolled back.
            Phase::Mounting => {
                mount.phase = Phase::Unmounting;
                let is_dead_bind = mount.target != Leg::Absent && !shows_it(mount);
                if mount.publish == Leg::Making {
                    mount.publish = Leg::Removing;
                }
                if mount.target == Leg::Making && !is_dead_bind {
                    mount.target = Leg::Removing;
                }
                if volume.row.stage == Leg::Making {
                    volume.row.stage = Leg::Removing;
                }
            }
            Phase::Unmounting | Phase::Uncertain => mount.phase = Phase::Unmounting,
            Phase::Mounted if matches!(sight, Observed::There | Observed::Dead) => {}
            // The publish stays with its user. The target is bound again only where the mount comes back by itself.
            Phase::Mounted if *sight == Observed::Unbound && rest == Phase::Lost => {}
            Phase::Mounted => gone(volume, key, *sight, rest),
            Phase::Lost | Phase::Waiting => {}
        }
    }
    if same_boot {
        none_left(volume);
    }
}
