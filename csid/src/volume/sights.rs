//! What is seen of a volume's mounts, by who asks for one and at csid's start, and what that makes of its rows. A part of
//! `state`, and pure.

use crate::store::rows::{Leg, MountKey, Phase};
use crate::volume::state::{Sight, Volume, rest, shows_it};

/// A mount that is not where its row says, or dead: the plugin still believes in it, so its legs are negated before they are made
/// again.
pub(super) fn gone(volume: &mut Volume, key: &MountKey, sight: Sight, phase: Phase) {
    let Some(mount) = volume.mount_mut(key) else { return };
    mount.phase = phase;
    if mount.spec.target.is_some() {
        let is_dead = sight == Sight::Dead && mount.target == Leg::Present;
        // What is dead there was giving way when csid ended.
        let goes_on = sight == Sight::Unbound && mount.spec.healing && mount.target == Leg::Making;
        mount.target = if is_dead || goes_on { Leg::Making } else { Leg::Removing };
    }
    if sight != Sight::Unbound {
        mount.publish = Leg::Removing;
    }
    mount.spec.healing |= sight == Sight::Dead;
}

/// Whoever took the last publish may have taken the staging: it is not known to be there.
pub(super) fn none_left(volume: &mut Volume) {
    let taken = volume.mounts.iter().any(|mount| mount.publish == Leg::Removing);
    let left = volume.mounts.iter().any(|mount| mount.publish == Leg::Present);
    if taken && !left && volume.row.stage == Leg::Present {
        volume.row.stage = Leg::Removing;
    }
}

/// What a start of csid makes of a volume's rows.
pub(super) fn recovered(volume: &mut Volume, same_boot: bool, sights: &[Sight]) {
    let seen: Vec<(MountKey, Phase, Sight)> = volume
        .mounts
        .iter()
        .zip(sights.iter().copied().chain(std::iter::repeat(Sight::Gone)))
        .map(|(mount, sight)| (mount.key.clone(), mount.phase, sight))
        .collect();
    if !same_boot {
        // No mount outlives a boot. One that is seen all the same (the boot was a container's, or a marker was lost) keeps
        // the staging and itself; block nodes are never seen here, they may be left over.
        let any = seen.iter().any(|(_, phase, sight)| *phase == Phase::Mounted && *sight != Sight::Gone);
        if !any {
            volume.row.stage = Leg::Absent;
        }
    }
    for (key, phase, sight) in &seen {
        let Some(mount) = volume.mount_mut(key) else { continue };
        if !same_boot && (*phase != Phase::Mounted || *sight == Sight::Gone) {
            mount.publish = Leg::Absent;
            mount.target = Leg::Absent;
            mount.device = None;
            mount.spec.died.clear();
        }
        // What died with the host is the host's loss: it comes back as `restore` says.
        mount.spec.healing &= same_boot;
        let rest = rest(mount);
        match phase {
            // It was answered once, and is published: all that was under way is its target, which is bound by itself.
            Phase::Mounting if same_boot && mount.kept && mount.publish == Leg::Present => {
                mount.phase = Phase::Waiting;
            }
            // Nobody was told of it: undone.
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
            Phase::Mounted if matches!(sight, Sight::There | Sight::Dead) => {}
            Phase::Mounted if !same_boot && *sight == Sight::Gone => mount.phase = rest,
            // What is published stays the user's; its target is bound again, where it comes back by itself.
            Phase::Mounted if *sight == Sight::Unbound && rest == Phase::Lost => {}
            Phase::Mounted => gone(volume, key, *sight, rest),
            Phase::Waiting if !same_boot => mount.phase = rest,
            Phase::Lost | Phase::Waiting => {}
        }
    }
    if same_boot {
        none_left(volume);
    }
}
