//! A volume's rows, and the types that [`step`](super::step) takes and returns.

use std::ops::Range;
use std::sync::Arc;

use crate::store::rows::{Leg, MountKey, MountRow, MountSpec, Phase, Restore, VolumeKey, VolumeRow};

/// Consumer of a mount for which no trustworthy record names a consumer.
pub(in crate::volume) const UNKNOWN: &str = "unknown";

/// A volume's rows: all state that decides what may happen to the volume.
#[derive(Clone, PartialEq, Eq)]
pub struct Volume {
    pub row: VolumeRow,
    /// Rows, shared with the journal's copy of them, because most steps change only one.
    pub mounts: Vec<Arc<MountRow>>,
}

/// Capabilities of a plugin's node service, as far as they decide anything here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abilities {
    pub stages: bool,
    pub single_node_multi_writer: bool,
    pub mount_group: bool,
}

/// A requested mount.
#[derive(Clone)]
pub struct DesiredMount {
    pub key: MountKey,
    pub uid: u32,
    pub spec: MountSpec,
    pub operations: Vec<String>,
}

impl DesiredMount {
    /// Returns the mount that the row already requests.
    pub(in crate::volume) fn of(row: &MountRow) -> Self {
        let MountRow { key, uid, spec, operations, .. } = row.clone();
        DesiredMount { key, uid, spec, operations }
    }
}

/// Paths at which a mount is made, or at which an existing mount is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paths {
    /// `None`: the plugin does not stage.
    pub staging: Option<String>,
    pub source: String,
}

/// Result of an effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The effect is done and was verified. `device`: the device number of the publish. `None`: the effect published nothing.
    Done { device: Option<u64> },
    /// The request never reached its recipient.
    NotSent,
    /// Not done yet. The same effect may be tried again as it is.
    Again,
    /// Not done, or the outcome is unknown.
    Failed,
}

/// State that the kernel shows of a mount whose row is `mounted`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Observed {
    /// The mount is there, whether it answers or not.
    There,
    /// The mount is there, but its server is gone.
    Dead,
    /// The published path is there, but the consumer's target is not bound.
    Unbound,
    Gone,
}

#[derive(Clone)]
pub enum MountEvent {
    /// Mount, requested by a caller or by the restoration of a row at rest.
    Mount { wanted: DesiredMount, paths: Paths, abilities: Abilities },
    /// The kernel shows a mount of another manager at `paths`, and a caller hands it over.
    Adopt { wanted: DesiredMount, paths: Paths, abilities: Abilities, device: u64 },
    /// A caller requests the unmount.
    Unmount { key: MountKey },
    /// Roll-back of a Mount that failed, or for which no caller waits any more.
    Undo { key: MountKey },
    /// Next try towards the state that the row wants.
    Continue { key: MountKey },
    /// Outcome of the effect. `error` is kept in the row unless the outcome is `Done`.
    Ended { effect: Effect, outcome: Outcome, error: Option<String> },
    /// The time for a removal is over. The row waits for another try.
    GaveUp { key: MountKey },
    /// csid postpones a mount that only csid itself wants, and whose effect may have been tried. A row that was answered once
    /// rests, its legs stay as they are, and the next try repeats the same call.
    Yield { key: MountKey },
    /// The publish stays: it is in use, or it was answered once and only its target is missing.
    Keep { key: MountKey },
    /// A caller requested a mount again that its row calls published, or the mount is to be healed, and the kernel was probed.
    /// `sights`: the observed state of each mount, in the order of the rows. A dead mount is made again.
    Seen { key: MountKey, sights: Vec<Observed> },
    /// Root drops the mount, although the plugin acknowledged no end of it. No mount namespace shows a mount of it.
    Forget { key: MountKey },
    /// csid has started. `sights`: the observed state of each mount, in the order of the rows.
    Recovered { same_boot: bool, sights: Vec<Observed> },
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

    /// Returns whether the action makes something. Otherwise it removes something.
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

/// A step that changes the world outside csid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effect {
    pub action: Action,
    /// Mount that has the leg.
    pub key: MountKey,
    /// Mount for which the effect is performed. It differs from `key` if the publish of `key` is in the way of its staging.
    pub goal: MountKey,
    /// State of the leg before the effect. It is restored if the effect was never sent.
    pub from: Leg,
}

/// Action that a step requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Persist the state, then run the effect.
    Run(Effect),
    /// The mount is complete: persist durably, then answer.
    Mounted,
    /// The row is gone: persist durably, then answer.
    Gone,
    /// Nothing to do now.
    Rest,
}

/// Returns the ranges of both lists that remain without the objects that both share at their beginning and end. One changed row
/// of a thousand remains alone.
pub(in crate::volume) fn between(
    one: &[Arc<MountRow>],
    other: &[Arc<MountRow>],
) -> (Range<usize>, Range<usize>) {
    let same = |(one, other): &(&Arc<MountRow>, &Arc<MountRow>)| Arc::ptr_eq(one, other);
    let front = one.iter().zip(other).take_while(same).count();
    let back = one[front..].iter().rev().zip(other[front..].iter().rev()).take_while(same).count();
    (front..one.len() - back, front..other.len() - back)
}

/// Returns whether the row has this key. The rows of a volume differ in their consumers, so the consumers are compared first.
pub(in crate::volume) fn has_key(mount: &MountRow, key: &MountKey) -> bool {
    mount.key.consumer == key.consumer && mount.key == *key
}

impl Volume {
    pub fn new(key: VolumeKey, namespace: &str, volume: &str) -> Self {
        let row = VolumeRow {
            key,
            namespace: namespace.to_owned(),
            volume: volume.to_owned(),
            staging: None,
            stage: Leg::Absent,
            backing: None,
        };
        Volume { row, mounts: Vec::new() }
    }

    pub fn mount(&self, key: &MountKey) -> Option<&MountRow> {
        self.mounts.iter().find(|mount| has_key(mount, key)).map(Arc::as_ref)
    }

    pub(in crate::volume) fn mount_mut(&mut self, key: &MountKey) -> Option<&mut MountRow> {
        self.mounts.iter_mut().find(|mount| has_key(mount, key)).map(Arc::make_mut)
    }

    /// Returns whether a mount at rest has neither staging nor publish. Its attachment may have been replaced by another one.
    pub(in crate::volume) fn is_down(&self, mount: &MountRow) -> bool {
        matches!(mount.phase, Phase::Lost | Phase::Waiting)
            && self.row.stage == Leg::Absent
            && mount.publish == Leg::Absent
    }

    /// Returns whether only the row is left of an unmount. A power cut may have taken back its removal.
    pub(in crate::volume) fn has_ended(&self, mount: &MountRow) -> bool {
        matches!(mount.phase, Phase::Unmounting | Phase::Uncertain)
            && !mount.kept
            && [self.row.stage, mount.publish, mount.target].iter().all(|leg| *leg == Leg::Absent)
    }

    /// Returns whether the publish of another mount, or a target that shows it, may exist. If so, the volume must stay staged.
    pub(in crate::volume) fn published_elsewhere(&self, key: &MountKey) -> bool {
        let used = |mount: &MountRow| mount.publish != Leg::Absent || shows_it(mount);
        self.mounts.iter().any(|mount| used(mount) && !has_key(mount, key))
    }

    /// Returns whether the staging is dropped along with this mount. That holds if no other mount is published, none is being
    /// staged, and none has an unmount pending that asks the plugin to unstage.
    pub(in crate::volume) fn forgets_staging(&self, key: &MountKey) -> bool {
        let stages = |mount: &MountRow| mount.phase == Phase::Mounting && !has_key(mount, key);
        let is_staged = self.row.stage != Leg::Removing && self.mounts.iter().any(|mount| stages(mount));
        let ends = |mount: &MountRow| {
            matches!(mount.phase, Phase::Unmounting | Phase::Uncertain) && !has_key(mount, key)
        };
        let is_owed = self.row.stage != Leg::Absent && self.mounts.iter().any(|mount| ends(mount));
        !is_staged && !is_owed && !self.published_elsewhere(key)
    }

    /// Drops a row. If its mount may have had secrets, the other rows record that.
    pub(super) fn drop_row(&mut self, key: &MountKey) {
        let had_secrets = self.mount(key).is_some_and(may_have_had_secrets);
        self.mounts.retain(|mount| !has_key(mount, key));
        for other in self.mounts.iter_mut().filter(|_| had_secrets) {
            Arc::make_mut(other).status.secrets_beside = true;
        }
    }
}

/// Returns whether the target shows the volume, or may show it. The dead bind of a mount that is being healed shows nothing. It
/// stays until it is replaced or unmounted. If it went earlier, its consumer could write into the directory below it.
pub(in crate::volume) fn shows_it(mount: &MountRow) -> bool {
    let is_dead =
        mount.kept && mount.status.healing && mount.target == Leg::Making && mount.publish != Leg::Present;
    mount.target != Leg::Absent && !is_dead
}

/// Returns the phase in which a mount rests if it cannot be made now.
pub(in crate::volume) fn rest(mount: &MountRow) -> Phase {
    if mount.status.healing { Phase::Waiting } else { at_rest(mount.spec.restore) }
}

/// Returns the phase in which a mount rests that is not being healed.
pub(in crate::volume::model) fn at_rest(restore: Restore) -> Phase {
    match restore {
        Restore::Auto => Phase::Waiting,
        Restore::Hold => Phase::Lost,
    }
}

/// Writes the intent of `action` into its leg.
pub(in crate::volume) fn run(volume: &mut Volume, action: Action, key: &MountKey, goal: &MountKey) -> Next {
    let Some(leg) = leg_mut(volume, action, key) else { return Next::Gone };
    let from = *leg;
    *leg = if action.makes() { Leg::Making } else { Leg::Removing };
    Next::Run(Effect { action, key: key.clone(), goal: goal.clone(), from })
}

pub(super) fn leg_mut<'a>(volume: &'a mut Volume, action: Action, key: &MountKey) -> Option<&'a mut Leg> {
    match action {
        Action::Stage | Action::Unstage => Some(&mut volume.row.stage),
        Action::Publish | Action::Unpublish => volume.mount_mut(key).map(|mount| &mut mount.publish),
        Action::Bind | Action::Unbind => volume.mount_mut(key).map(|mount| &mut mount.target),
    }
}

/// Returns whether the mount may have been made with secrets. A mount that was reconstructed from the kernel alone may have
/// been.
pub(in crate::volume) fn may_have_had_secrets(mount: &MountRow) -> bool {
    let MountSpec { credential, secrets_given, .. } = &mount.spec;
    *secrets_given || mount.status.secrets_beside || credential.is_some() || mount.key.consumer == UNKNOWN
}

pub(in crate::volume) fn title(key: &MountKey) -> String {
    match key.tag.as_str() {
        "" => format!("{}/{} {}", key.namespace, key.volume, key.consumer),
        tag => format!("{}/{} {} {tag}", key.namespace, key.volume, key.consumer),
    }
}
