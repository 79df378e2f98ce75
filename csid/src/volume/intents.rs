//! Which intents are written together. An intent says that its effect may have happened, so one that is written early is true,
//! too, and recovery negates it like any other: a mount has one commit before its first RPC, and an unmount.

use crate::store::rows::{Leg, MountRow, Phase, VolumeRow};
use crate::volume::state::{Action, Effect, Volume, run, shows_it};

/// The rows with the intent of `effect`, which is in them, and of the effect that follows when it goes well.
pub(super) fn foreseen(volume: &Volume, effect: &Effect) -> Volume {
    let mut ahead = volume.clone();
    let key = &effect.goal;
    let Some(mount) = volume.mount(key) else { return ahead };
    match (effect.action, mount.phase) {
        (Action::Stage, Phase::Mounting) if mount.publish == Leg::Absent => {
            run(&mut ahead, Action::Publish, key, key);
        }
        (Action::Unpublish, Phase::Unmounting | Phase::Uncertain)
            if volume.row.stage != Leg::Absent && !volume.published_elsewhere(key) =>
        {
            run(&mut ahead, Action::Unstage, key, key);
        }
        _ => {}
    }
    ahead
}

/// Whether `written` says the same as `ahead`, but for intents in it that have been carried out since.
pub(super) fn cover(written: &Volume, ahead: &Volume) -> bool {
    let covers = |written: Leg, now: Leg| {
        written == now || matches!((written, now), (Leg::Making, Leg::Present) | (Leg::Removing, Leg::Absent))
    };
    let stage = written.row.stage;
    written.row == VolumeRow { stage, ..ahead.row.clone() }
        && covers(stage, ahead.row.stage)
        && written.mounts.len() == ahead.mounts.len()
        && written.mounts.iter().zip(&ahead.mounts).all(|(written, now)| {
            let (publish, target) = (written.publish, written.target);
            written == now
                || (**written == MountRow { publish, target, ..MountRow::clone(now) }
                    && covers(publish, now.publish)
                    && covers(target, now.target)
                    // Of a bind that replaces a dead one.
                    && (shows_it(written) || !shows_it(now)))
        })
}
