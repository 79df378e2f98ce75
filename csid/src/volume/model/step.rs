//! The state machine of a volume, as a pure function without I/O and clock. The actor persists the state that [`step`] returns,
//! runs the effect, and feeds its outcome back. A restart feeds [`MountEvent::Recovered`] into the same function.
//!
//! Each mount has legs (`Leg`). They are made in this order and taken down in the reverse order. All mounts of the volume share
//! the staging (CSI rules 21-23):
//!
//! ```text
//!            Stage            Publish           Bind (only with a target)
//!   Absent ────────▶ staged ──────────▶ published ──────▶ Mounted
//!     ▲                │                    │                │
//!     └────────────────┴────────────────────┴────────────────┘
//!        Unstage (last)      Unpublish          Unbind
//! ```
//!
//! * A row in `Mounting` or `Mounted` wants its legs present. A row in `Unmounting` or `Uncertain` wants them absent. A row in
//!   `Lost` or `Waiting` rests until a request for it comes. [`advance`] finds the one next effect towards that.
//! * A row that was answered once (`kept`) ends only by Unmount or Forget. If its mount cannot be made, the row goes to rest.
//! * `Making` and `Removing` are written before the RPC. A `Making` leg may be tried again as it is, also if its last try timed
//!   out or its connection broke. A try that was given up or refused is `Removing`, and only its negation ends that (rule 25).
//! * The volume is unstaged only if the publishes of all rows are known to be gone (rule 22). It is staged before any publish
//!   (rule 21).

use std::path::Path;
use std::sync::Arc;

use crate::store::rows::{Leg, MountKey, MountRow, MountStatus, Phase};
use crate::volume::model::admission::{Refusal, admit};
use crate::volume::model::adopt::adopt;
use crate::volume::model::observed::{gone, none_left, recovered};
use crate::volume::model::paths;
use crate::volume::model::volume::{
    Abilities, Action, DesiredMount, Effect, MountEvent, Next, Observed, Outcome, Paths, Volume, leg_mut,
    rest, run, shows_it,
};

/// Returns the next state and the next action, or the reason why nothing changes.
pub fn step(volume: &Volume, event: MountEvent) -> Result<(Volume, Next), Refusal> {
    let mut volume = volume.clone();
    let next = match event {
        MountEvent::Mount { wanted, paths, abilities } => {
            admit(&volume, &wanted, Some(abilities))?;
            begin(&mut volume, &wanted, paths, abilities);
            advance(&mut volume, &wanted.key)
        }
        MountEvent::Adopt { wanted, paths, abilities, device } => {
            admit(&volume, &wanted, Some(abilities))?;
            adopt(&mut volume, &wanted, &paths, device)?;
            Next::Mounted
        }
        MountEvent::Unmount { key } => {
            let mount = volume.mount_mut(&key).ok_or(Refusal::NoSuchMount)?;
            mount.phase = Phase::Unmounting;
            mount.kept = false;
            advance(&mut volume, &key)
        }
        MountEvent::Undo { key } => {
            let mount = volume.mount_mut(&key).ok_or(Refusal::NoSuchMount)?;
            if mount.phase == Phase::Mounting {
                mount.phase = Phase::Unmounting;
            }
            advance(&mut volume, &key)
        }
        MountEvent::Continue { key } => {
            volume.mount(&key).ok_or(Refusal::NoSuchMount)?;
            advance(&mut volume, &key)
        }
        MountEvent::Ended { effect, outcome, error } => ended(&mut volume, effect, outcome, error),
        MountEvent::GaveUp { key } => {
            let staged = volume.row.stage;
            let mount = volume.mount_mut(&key).ok_or(Refusal::NoSuchMount)?;
            if mount.phase == Phase::Unmounting
                && [staged, mount.publish, mount.target].contains(&Leg::Removing)
            {
                mount.phase = Phase::Uncertain;
            }
            Next::Rest
        }
        MountEvent::Yield { key } => {
            let mount = volume.mount_mut(&key).ok_or(Refusal::NoSuchMount)?;
            match mount.phase {
                Phase::Mounting if mount.kept => {
                    mount.phase = rest(mount);
                    mount.operations.clear();
                }
                Phase::Mounting => mount.phase = Phase::Unmounting,
                _ => {}
            }
            advance(&mut volume, &key)
        }
        MountEvent::Keep { key } => {
            let mount = volume.mount_mut(&key).ok_or(Refusal::NoSuchMount)?;
            let wanted = matches!(mount.phase, Phase::Unmounting | Phase::Mounting);
            if wanted && mount.publish == Leg::Present {
                mount.phase = Phase::Mounted;
                mount.kept = true;
                mount.operations.clear();
            }
            Next::Rest
        }
        MountEvent::Seen { key, sights } => {
            volume.mount(&key).ok_or(Refusal::NoSuchMount)?;
            let seen: Vec<(MountKey, Observed)> =
                volume.mounts.iter().map(|mount| mount.key.clone()).zip(sights).collect();
            for (seen, sight) in seen {
                let Some(mount) = volume.mount(&seen).filter(|mount| mount.shows()) else { continue };
                // The requested mount is made again. The other mounts, and rows at rest, rest until their turn.
                let after = match mount.phase {
                    Phase::Mounted if seen == key => Phase::Mounting,
                    Phase::Mounted if sight == Observed::Dead => Phase::Waiting,
                    _ => rest(mount),
                };
                match sight {
                    Observed::There => {}
                    Observed::Unbound if seen != key => {}
                    _ => gone(&mut volume, &seen, sight, after),
                }
            }
            none_left(&mut volume);
            advance(&mut volume, &key)
        }
        MountEvent::Forget { key } => {
            volume.mount(&key).ok_or(Refusal::NoSuchMount)?;
            if volume.forgets_staging(&key) {
                volume.row.stage = Leg::Absent;
            }
            volume.drop_row(&key);
            Next::Gone
        }
        MountEvent::Recovered { same_boot, sights } => {
            recovered(&mut volume, same_boot, &sights);
            Next::Rest
        }
    };
    Ok((volume, next))
}

/// Enters the row, or wakes a row at rest.
fn begin(volume: &mut Volume, wanted: &DesiredMount, paths: Paths, abilities: Abilities) {
    if volume.mounts.iter().all(|mount| mount.key == wanted.key || volume.has_ended(mount)) {
        volume.row.namespace.clone_from(&wanted.key.namespace);
        volume.row.volume.clone_from(&wanted.key.volume);
    }
    // A volume that was published before its plugin could stage is staged by the first mount after its last publish is gone (rule 21).
    let is_published = volume.mount(&wanted.key).is_some_and(|mount| mount.publish != Leg::Absent)
        || volume.published_elsewhere(&wanted.key);
    if abilities.stages && volume.row.staging.is_none() && !is_published {
        volume.row.staging = paths.staging;
    }
    // A plugin that does not stage any more gets no call for it (rule 19).
    if !abilities.stages && volume.row.stage == Leg::Absent && !is_published {
        volume.row.staging = None;
    }
    let is_down = volume.mount(&wanted.key).is_some_and(|mount| volume.is_down(mount));
    if let Some(mount) = volume.mount_mut(&wanted.key) {
        mount.source = paths.source;
        if mount.publish == Leg::Absent {
            mount.published = private(&mount.source);
        }
        if is_down {
            mount.spec.usage.publish_context.clone_from(&wanted.spec.usage.publish_context);
        }
        mount.spec.remember_secrets(&wanted.spec);
        if mount.phase != Phase::Mounted {
            mount.phase = Phase::Mounting;
            mount.error = None;
            mount.operations.clone_from(&wanted.operations);
        }
        return;
    }
    let volume_key = volume.row.key.clone();
    volume.mounts.push(Arc::new(MountRow {
        key: wanted.key.clone(),
        volume: volume_key,
        uid: wanted.uid,
        spec: wanted.spec.clone(),
        status: MountStatus::default(),
        phase: Phase::Mounting,
        kept: false,
        published: private(&paths.source),
        source: paths.source,
        publish: Leg::Absent,
        target: Leg::Absent,
        device: None,
        error: None,
        operations: wanted.operations.clone(),
        since_usec: 0,
        modify_index: 0,
    }));
}

/// Returns the one next effect towards the state that the row wants. The state holds its intent when the effect is returned.
fn advance(volume: &mut Volume, key: &MountKey) -> Next {
    let Some(mount) = volume.mount(key) else { return Next::Gone };
    match mount.phase {
        Phase::Mounting => upwards(volume, key),
        Phase::Mounted => Next::Mounted,
        Phase::Unmounting | Phase::Uncertain => downwards(volume, key),
        Phase::Lost | Phase::Waiting => Next::Rest,
    }
}

fn upwards(volume: &mut Volume, key: &MountKey) -> Next {
    let stages = volume.row.staging.is_some();
    let stage = volume.row.stage;
    let Some(mount) = volume.mount(key) else { return Next::Gone };
    let (publish, target, has_target) = (mount.publish, mount.target, mount.spec.target.is_some());
    // A leg that is not known to be there is negated before it is made again (rule 25) ...
    if target == Leg::Removing {
        return run(volume, Action::Unbind, key, key);
    }
    if publish == Leg::Removing || (publish == Leg::Making && mount.published.is_none()) {
        // A publish that an older csid began continues at another path.
        return run(volume, Action::Unpublish, key, key);
    }
    if stage == Leg::Removing {
        // ... and every publish, with the target that shows it, before the staging (rule 22).
        let other = |is_there: fn(&MountRow) -> bool| {
            volume.mounts.iter().find(|mount| is_there(mount)).map(|mount| mount.key.clone())
        };
        if let Some(other) = other(shows_it) {
            return run(volume, Action::Unbind, &other, key);
        }
        return match other(|mount| mount.publish != Leg::Absent) {
            Some(other) => run(volume, Action::Unpublish, &other, key),
            None => run(volume, Action::Unstage, key, key),
        };
    }
    if stages && stage != Leg::Present {
        return run(volume, Action::Stage, key, key);
    }
    if publish != Leg::Present {
        if let Some(mount) = volume.mount_mut(key).filter(|_| publish == Leg::Absent) {
            mount.published = private(&mount.source);
        }
        return run(volume, Action::Publish, key, key);
    }
    if has_target && target != Leg::Present {
        return run(volume, Action::Bind, key, key);
    }
    if let Some(mount) = volume.mount_mut(key) {
        mount.phase = Phase::Mounted;
        mount.kept = true;
        mount.status.healing = false;
        mount.status.died.clear();
        mount.error = None;
        mount.operations.clear();
    }
    Next::Mounted
}

/// Returns the path at which the plugin publishes the mount that consumers find at `source`. `None`: csid makes no path
/// like `source`.
fn private(source: &str) -> Option<String> {
    paths::private(Path::new(source)).map(|path| path.to_string_lossy().into_owned())
}

fn downwards(volume: &mut Volume, key: &MountKey) -> Next {
    let Some(mount) = volume.mount(key) else { return Next::Gone };
    let publish = mount.publish;
    if shows_it(mount) {
        return run(volume, Action::Unbind, key, key);
    }
    if publish != Leg::Absent {
        return run(volume, Action::Unpublish, key, key);
    }
    if volume.row.stage != Leg::Absent && !volume.published_elsewhere(key) {
        return run(volume, Action::Unstage, key, key);
    }
    match volume.mount_mut(key) {
        Some(mount) if mount.kept => {
            mount.phase = rest(mount);
            mount.operations.clear();
            Next::Rest
        }
        _ => {
            volume.drop_row(key);
            Next::Gone
        }
    }
}

fn ended(volume: &mut Volume, effect: Effect, outcome: Outcome, error: Option<String>) -> Next {
    let Effect { action, key, goal, from } = effect;
    let Some(leg) = leg_mut(volume, action, &key) else { return Next::Gone };
    let makes = action.makes();
    *leg = match (outcome, makes) {
        (Outcome::Done { .. }, true) => Leg::Present,
        (Outcome::Done { .. }, false) => Leg::Absent,
        (Outcome::NotSent, _) => from,
        (Outcome::Again, _) => *leg,
        (Outcome::Failed, _) => Leg::Removing,
    };
    if let Some(mount) = volume.mount_mut(&key) {
        match outcome {
            Outcome::Done { device } => {
                if matches!(action, Action::Publish | Action::Unpublish) {
                    mount.status.counted = false;
                }
                if action == Action::Publish {
                    // The dead file system stays at the target until it is replaced.
                    let former = mount.device.filter(|_| mount.status.healing && mount.target != Leg::Absent);
                    let died = &mut mount.status.died;
                    died.extend(former.filter(|old| !died.contains(old)));
                    mount.device = device;
                }
            }
            _ => mount.error = error,
        }
        // A failed mount is rolled back.
        if makes && outcome == Outcome::Failed {
            mount.phase = Phase::Unmounting;
        }
    }
    match outcome {
        Outcome::Done { .. } => advance(volume, &goal),
        _ => Next::Rest,
    }
}

#[cfg(test)]
#[path = "step_tests.rs"]
pub(in crate::volume) mod tests;
