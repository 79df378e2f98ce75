//! What a volume may do, as a pure function: no I/O, no clock. The task persists the state that [`step`] returns, runs the
//! effect, and feeds its outcome back; a restart feeds [`Event::Recovered`] into the same function.
//!
//! Each mount has legs (`Leg`), made in this order and taken down in the reverse one; the staging is shared by all mounts
//! of the volume (CSI rules 21-23):
//!
//! ```text
//!            Stage            Publish           Bind (only with a target)
//!   Absent ────────▶ staged ──────────▶ published ──────▶ Mounted
//!     ▲                │                    │                │
//!     └────────────────┴────────────────────┴────────────────┘
//!        Unstage (last)      Unpublish          Unbind
//! ```
//!
//! * A row in `Mounting` or `Mounted` wants its legs present; one in `Unmounting` or `Uncertain` wants them absent; `Lost`
//!   and `Waiting` rest until somebody asks. [`advance`] finds the one next effect towards that.
//! * A row that was answered once (`kept`) ends only by Unmount: when its mount cannot be had it goes to rest.
//! * `Making` and `Removing` are written before the RPC. A `Making` leg may be tried again as it is; anything that is not
//!   known (a time-out, a cancelled call, a broken connection) is `Removing`, and only its negation ends that (rule 25).
//! * The volume is unstaged only when no row has a publish that is not known to be gone (rule 22), and staged before any
//!   publish (rule 21).

use std::sync::Arc;

use crate::store::rows::{Leg, MountKey, MountRow, MountSpec, Phase, Restore, VolumeKey, VolumeRow};
use crate::volume::admission::{Refusal, admit};
use crate::volume::secrets::may_have_had_secrets;
use crate::volume::sights::{gone, none_left, recovered};

/// A volume's rows: all that decides what may happen to it.
#[derive(Clone, PartialEq, Eq)]
pub struct Volume {
    pub row: VolumeRow,
    /// Shared with what the journal holds of them: most steps change one.
    pub mounts: Vec<Arc<MountRow>>,
}

/// What a plugin's node service can do, as far as it decides anything here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    pub stages: bool,
    pub single_node_multi_writer: bool,
    pub mount_group: bool,
}

/// A mount that is asked for.
#[derive(Clone)]
pub struct Wanted {
    pub key: MountKey,
    pub uid: u32,
    pub spec: MountSpec,
    pub operations: Vec<String>,
}

impl Wanted {
    /// What the row wants already.
    pub(super) fn of(row: &MountRow) -> Self {
        let MountRow { key, uid, spec, operations, .. } = row.clone();
        Wanted { key, uid, spec, operations }
    }
}

/// Where a mount is made; of one that is there, where it is.
#[derive(Clone)]
pub struct Paths {
    pub staging: String,
    pub source: String,
}

/// What happened to an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is done and was looked at. The device number of what is published.
    Done { device: Option<u64> },
    /// It never reached whom it was for.
    NotSent,
    /// Not done yet; the same may be tried again as it is.
    Again,
    /// Not done, or nobody knows.
    Failed,
}

/// What the kernel shows of a mount that a row calls mounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// It is there, whether it answers or not.
    There,
    /// It is there, and whoever served it is gone.
    Dead,
    /// The published path is there, the consumer's target is not bound.
    Unbound,
    Gone,
}

#[derive(Clone)]
pub enum Event {
    /// Mount, by a caller or by the restoration of a row that rests.
    Mount { wanted: Wanted, paths: Paths, abilities: Abilities },
    /// A caller wants it gone.
    Unmount { key: MountKey },
    /// A Mount that failed or that nobody waits for any more.
    Undo { key: MountKey },
    /// The next try of what the row wants.
    Continue { key: MountKey },
    /// The effect's outcome; `error` is kept in the row when it failed.
    Ended { effect: Effect, outcome: Outcome, error: String },
    /// The time for a removal is over; the row waits for another try.
    GaveUp { key: MountKey },
    /// What is published stays: it is in use, or it was answered once and only its target is missing.
    Keep { key: MountKey },
    /// A caller asked again for what the row says is published, or it is to be healed, and the kernel was looked at: what it
    /// shows of each mount, in the order of the rows. What is dead is made again.
    Seen { key: MountKey, sights: Vec<Sight> },
    /// csid has started; what the kernel shows of each mount, in the order of the rows.
    Recovered { same_boot: bool, sights: Vec<Sight> },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    Stage,
    Publish,
    Bind,
    Unbind,
    Unpublish,
    Unstage,
}

impl Action {
    pub const ALL: [Action; 6] =
        [Action::Stage, Action::Publish, Action::Bind, Action::Unbind, Action::Unpublish, Action::Unstage];

    /// Whether it makes something, or takes it away.
    pub fn makes(self) -> bool {
        matches!(self, Action::Stage | Action::Publish | Action::Bind)
    }

    pub fn name(self) -> &'static str {
        match self {
            Action::Stage => "stage",
            Action::Publish => "publish",
            Action::Bind => "bind",
            Action::Unbind => "unbind",
            Action::Unpublish => "unpublish",
            Action::Unstage => "unstage",
        }
    }
}

/// One thing to do outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effect {
    pub action: Action,
    /// Whose leg it is.
    pub key: MountKey,
    /// The mount that it is done for: another one when a publish is in the way of its staging.
    pub goal: MountKey,
    /// The leg as it was before, so that what was never sent can be taken back.
    pub from: Leg,
}

/// What a step asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Persist the state, then run the effect.
    Run(Effect),
    /// The mount is complete: persist for good, then answer.
    Mounted,
    /// The row is gone: persist for good, then answer.
    Gone,
    /// Nothing to do now.
    Rest,
}

impl Volume {
    pub fn new(key: VolumeKey, namespace: &str, volume: &str) -> Self {
        let row = VolumeRow {
            key,
            namespace: namespace.to_owned(),
            volume: volume.to_owned(),
            staging: String::new(),
            stage: Leg::Absent,
        };
        Volume { row, mounts: Vec::new() }
    }

    pub fn mount(&self, key: &MountKey) -> Option<&MountRow> {
        self.mounts.iter().find(|mount| mount.key == *key).map(Arc::as_ref)
    }

    pub(super) fn mount_mut(&mut self, key: &MountKey) -> Option<&mut MountRow> {
        self.mounts.iter_mut().find(|mount| mount.key == *key).map(Arc::make_mut)
    }

    /// Whether another mount's publish, or a target that shows it, may be there, so that the volume must stay staged.
    pub(super) fn published_elsewhere(&self, key: &MountKey) -> bool {
        let used = |mount: &MountRow| mount.publish != Leg::Absent || shows_it(mount);
        self.mounts.iter().any(|mount| mount.key != *key && used(mount))
    }
}

/// The next state and what to do, or why nothing changes.
pub fn step(volume: &Volume, event: Event) -> Result<(Volume, Next), Refusal> {
    let mut volume = volume.clone();
    let next = match event {
        Event::Mount { wanted, paths, abilities } => {
            admit(&volume, &wanted, Some(abilities))?;
            begin(&mut volume, &wanted, paths, abilities);
            advance(&mut volume, &wanted.key)
        }
        Event::Unmount { key } => {
            let mount = volume.mount_mut(&key).ok_or(Refusal::NoSuchMount)?;
            mount.phase = Phase::Unmounting;
            mount.kept = false;
            advance(&mut volume, &key)
        }
        Event::Undo { key } => {
            let mount = volume.mount_mut(&key).ok_or(Refusal::NoSuchMount)?;
            if mount.phase == Phase::Mounting {
                mount.phase = Phase::Unmounting;
            }
            advance(&mut volume, &key)
        }
        Event::Continue { key } => {
            volume.mount(&key).ok_or(Refusal::NoSuchMount)?;
            advance(&mut volume, &key)
        }
        Event::Ended { effect, outcome, error } => ended(&mut volume, effect, outcome, error),
        Event::GaveUp { key } => {
            let staged = volume.row.stage;
            let mount = volume.mount_mut(&key).ok_or(Refusal::NoSuchMount)?;
            if mount.phase == Phase::Unmounting
                && [staged, mount.publish, mount.target].contains(&Leg::Removing)
            {
                mount.phase = Phase::Uncertain;
            }
            Next::Rest
        }
        Event::Keep { key } => {
            let mount = volume.mount_mut(&key).ok_or(Refusal::NoSuchMount)?;
            let wanted = matches!(mount.phase, Phase::Unmounting | Phase::Mounting);
            if wanted && mount.publish == Leg::Present {
                mount.phase = Phase::Mounted;
                mount.kept = true;
                mount.operations.clear();
            }
            Next::Rest
        }
        Event::Seen { key, sights } => {
            volume.mount(&key).ok_or(Refusal::NoSuchMount)?;
            let seen: Vec<(MountKey, Sight)> =
                volume.mounts.iter().map(|mount| mount.key.clone()).zip(sights).collect();
            for (seen, sight) in seen {
                let Some(mount) = volume.mount(&seen).filter(|mount| mount.shows()) else { continue };
                // The one that is asked for is made again; the others, and what rests, rest until their turn.
                let after = match mount.phase {
                    Phase::Mounted if seen == key => Phase::Mounting,
                    Phase::Mounted if sight == Sight::Dead => Phase::Waiting,
                    _ => rest(mount),
                };
                match sight {
                    Sight::There => {}
                    Sight::Unbound if seen != key => {}
                    _ => gone(&mut volume, &seen, sight, after),
                }
            }
            none_left(&mut volume);
            advance(&mut volume, &key)
        }
        Event::Recovered { same_boot, sights } => {
            recovered(&mut volume, same_boot, &sights);
            Next::Rest
        }
    };
    Ok((volume, next))
}

/// Enter the row, or wake one that rests.
fn begin(volume: &mut Volume, wanted: &Wanted, paths: Paths, abilities: Abilities) {
    if volume.mounts.iter().all(|mount| mount.key == wanted.key) {
        volume.row.namespace.clone_from(&wanted.key.namespace);
        volume.row.volume.clone_from(&wanted.key.volume);
    }
    if abilities.stages && volume.row.staging.is_empty() {
        volume.row.staging = paths.staging;
    }
    if let Some(mount) = volume.mount_mut(&wanted.key) {
        mount.source = paths.source;
        mount.spec.remember_secrets(&wanted.spec);
        if mount.phase != Phase::Mounted {
            mount.phase = Phase::Mounting;
            mount.error.clear();
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
        phase: Phase::Mounting,
        kept: false,
        source: paths.source,
        publish: Leg::Absent,
        target: Leg::Absent,
        device: None,
        error: String::new(),
        operations: wanted.operations.clone(),
        since_usec: 0,
        modify_index: 0,
    }));
}

/// The one next effect towards what the row wants; its intent is in the state when it is returned.
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
    let stages = !volume.row.staging.is_empty();
    let stage = volume.row.stage;
    let Some(mount) = volume.mount(key) else { return Next::Gone };
    let (publish, target, has_target) = (mount.publish, mount.target, mount.spec.target.is_some());
    // What is not known to be there is negated before it is made again (rule 25) ...
    if target == Leg::Removing {
        return run(volume, Action::Unbind, key, key);
    }
    if publish == Leg::Removing {
        return run(volume, Action::Unpublish, key, key);
    }
    if stage == Leg::Removing {
        // ... and every publish, with what shows it, before the staging (rule 22).
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
        return run(volume, Action::Publish, key, key);
    }
    if has_target && target != Leg::Present {
        return run(volume, Action::Bind, key, key);
    }
    if let Some(mount) = volume.mount_mut(key) {
        mount.phase = Phase::Mounted;
        mount.kept = true;
        mount.spec.healing = false;
        mount.spec.died.clear();
        mount.error.clear();
        mount.operations.clear();
    }
    Next::Mounted
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
            let had_secrets = volume.mount(key).is_some_and(may_have_had_secrets);
            volume.mounts.retain(|mount| mount.key != *key);
            for other in volume.mounts.iter_mut().filter(|_| had_secrets) {
                Arc::make_mut(other).spec.secrets_beside = true;
            }
            Next::Gone
        }
    }
}

/// Whether the target shows the volume, or may. A dead bind, of a mount that is being healed, shows nothing any more: it stays until it
/// is replaced, lest its consumer writes into the directory below it meanwhile, or until it is unmounted.
pub(super) fn shows_it(mount: &MountRow) -> bool {
    let is_dead =
        mount.kept && mount.spec.healing && mount.target == Leg::Making && mount.publish != Leg::Present;
    mount.target != Leg::Absent && !is_dead
}

/// How a mount that cannot be had now is kept.
pub(super) fn rest(mount: &MountRow) -> Phase {
    match mount.spec.restore {
        Restore::Auto => Phase::Waiting,
        Restore::Hold if mount.spec.healing => Phase::Waiting,
        Restore::Hold => Phase::Lost,
    }
}

/// Write the intent of `action` into its leg.
pub(super) fn run(volume: &mut Volume, action: Action, key: &MountKey, goal: &MountKey) -> Next {
    let Some(leg) = leg_mut(volume, action, key) else { return Next::Gone };
    let from = *leg;
    *leg = if action.makes() { Leg::Making } else { Leg::Removing };
    Next::Run(Effect { action, key: key.clone(), goal: goal.clone(), from })
}

fn leg_mut<'a>(volume: &'a mut Volume, action: Action, key: &MountKey) -> Option<&'a mut Leg> {
    match action {
        Action::Stage | Action::Unstage => Some(&mut volume.row.stage),
        Action::Publish | Action::Unpublish => volume.mount_mut(key).map(|mount| &mut mount.publish),
        Action::Bind | Action::Unbind => volume.mount_mut(key).map(|mount| &mut mount.target),
    }
}

fn ended(volume: &mut Volume, effect: Effect, outcome: Outcome, error: String) -> Next {
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
                if action == Action::Publish {
                    // What died is still at the target until it gives way.
                    let former = mount.device.filter(|_| mount.spec.healing && mount.target != Leg::Absent);
                    let died = &mut mount.spec.died;
                    died.extend(former.filter(|old| !died.contains(old)));
                    mount.device = device;
                }
            }
            _ => mount.error = error,
        }
        // A failed mount is undone.
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
#[path = "state_tests.rs"]
pub(super) mod tests;
