//! Decides which intents are written together. An intent says that its effect may have happened, so an early intent is true,
//! too. Recovery negates it like any other. A mount therefore has one commit before its first RPC, and so has an unmount.

use crate::store::rows::{Leg, MountRow, Phase, VolumeRow};
use crate::volume::model::volume::{Action, Effect, Volume, run, shows_it};

/// Returns the rows with the intent of `effect`, which they already hold, and the intent of the effect that follows if it
/// succeeds.
pub(in crate::volume) fn foreseen(volume: &Volume, effect: &Effect) -> Volume {
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

/// Returns whether `written` equals `ahead`, except for intents in it whose effects have been performed since.
pub(in crate::volume) fn cover(written: &Volume, ahead: &Volume) -> bool {
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
                    // A dead bind in `written` does not cover the bind that replaces it.
                    && (shows_it(written) || !shows_it(now)))
        })
}
