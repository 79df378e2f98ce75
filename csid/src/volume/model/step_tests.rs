//! Tests `step` against a small model of the world. Whatever the events, and however effects end, the rows explain every mount
//! that is there, and no answered mount is forgotten.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::store::rows::{AccessMode, AttachmentMode, Propagation, Usage};
use crate::store::rows::{MountSpec, MountStatus, Restore, VolumeKey};
use crate::volume::model::admission::OF_UID;
use crate::volume::model::observed::same_after_boot;
use crate::volume::model::write_ahead::{cover, foreseen};

pub fn key(consumer: u8) -> MountKey {
    MountKey {
        namespace: "ns".into(),
        volume: "vol".into(),
        consumer: format!("c{consumer}"),
        tag: String::new(),
    }
}

pub fn usage(access_mode: AccessMode) -> Usage {
    Usage {
        access_mode,
        attachment_mode: AttachmentMode::FileSystem,
        fs_type: String::new(),
        mount_flags: Vec::new(),
        mount_group: String::new(),
        context: BTreeMap::new(),
        publish_context: BTreeMap::new(),
    }
}

pub fn wanted(consumer: u8) -> DesiredMount {
    let spec = MountSpec {
        usage: usage(AccessMode::MultiNodeMultiWriter),
        read_only: false,
        target: consumer.is_multiple_of(2).then(|| format!("/srv/{consumer}")),
        propagation: Propagation::Private,
        suid: false,
        dev: false,
        restore: if consumer == 1 { Restore::Hold } else { Restore::Auto },
        credential: None,
        registered: false,
        secrets_given: false,
    };
    DesiredMount { key: key(consumer), uid: 0, spec, operations: Vec::new() }
}

fn paths(consumer: u8) -> Paths {
    Paths { staging: Some("/staging".into()), source: format!("/root/publish/v/{consumer}") }
}

pub const ABLE: Abilities = Abilities { stages: true, single_node_multi_writer: true, mount_group: true };

pub fn volume() -> Volume {
    Volume::new(VolumeKey::new("p", "x"), "ns", "vol")
}

/// Returns a volume whose only mount is under way.
pub fn begun() -> Volume {
    let event = MountEvent::Mount { wanted: wanted(0), paths: paths(0), abilities: ABLE };
    step(&volume(), event).unwrap_or_else(|refusal| panic!("{refusal:?}")).0
}

fn with(wanted: &DesiredMount, edit: impl FnOnce(&mut DesiredMount)) -> DesiredMount {
    let mut other = wanted.clone();
    edit(&mut other);
    other
}

/// Actual state: the plugin's staging, its publishes, csid's binds.
#[derive(Clone, Default)]
struct World {
    staged: bool,
    published: BTreeSet<MountKey>,
    bound: BTreeSet<MountKey>,
    /// The server of the staged file system is gone, and with it every publish of it.
    staged_dead: bool,
    /// Mounts with a dead publish.
    dead: BTreeSet<MountKey>,
    /// Mounts whose target shows a dead file system.
    dead_bound: BTreeSet<MountKey>,
}

impl World {
    /// Applies the effect. Fails if the specification forbids the effect.
    fn happen(&mut self, effect: &Effect, stages: bool) {
        let key = effect.key.clone();
        match effect.action {
            Action::Stage => {
                assert!(stages, "rule 19: the plugin does not stage");
                self.staged = true;
            }
            Action::Publish => {
                assert!(self.staged || !stages, "rule 21: published before it was staged");
                // A publish that may have been tried is repeated as it is. It may meet a file system that has died since.
                let is_repeated = effect.from == Leg::Making;
                assert!(is_repeated || !self.dead.contains(&key), "published over what is dead");
                if self.staged_dead {
                    self.dead.insert(key.clone());
                }
                self.published.insert(key);
            }
            Action::Bind => {
                assert!(self.published.contains(&key), "bound what is not published");
                self.dead_bound.remove(&key);
                self.bound.insert(key);
            }
            Action::Unbind => {
                self.bound.remove(&key);
                self.dead_bound.remove(&key);
            }
            Action::Unpublish => {
                assert!(!self.bound.contains(&key), "unpublished under a bind");
                self.published.remove(&key);
                self.dead.remove(&key);
            }
            Action::Unstage => {
                assert!(stages, "rule 19: the plugin does not unstage");
                assert!(self.published.is_empty(), "rule 22: unstaged while published");
                assert!(self.bound.is_empty(), "unstaged while a target shows it");
                self.staged = false;
                self.staged_dead = false;
            }
        }
    }

    fn explained(&self, volume: &Volume) {
        assert!(!self.staged || volume.row.stage != Leg::Absent, "a staging that no row explains");
        for key in &self.published {
            let row = volume.mount(key).expect("a publish without a row");
            assert!(row.publish != Leg::Absent, "a publish that its row does not explain");
        }
        for key in self.bound.iter().chain(&self.dead_bound) {
            let row = volume.mount(key).expect("a bind without a row");
            assert!(row.target != Leg::Absent, "a bind that its row does not explain");
        }
        for row in volume.mounts.iter().filter(|row| row.phase == Phase::Mounted) {
            assert_eq!(row.publish, Leg::Present, "called mounted");
        }
    }

    fn sight(&self, row: &MountRow) -> Observed {
        match (self.published.contains(&row.key), &row.spec.target) {
            (false, _) => Observed::Gone,
            (true, _) if self.dead.contains(&row.key) => Observed::Dead,
            (true, Some(_)) if !self.bound.contains(&row.key) => Observed::Unbound,
            (true, _) => Observed::There,
        }
    }
}

#[derive(Clone, Debug)]
enum Act {
    Mount(u8),
    Unmount(u8),
    Undo(u8),
    /// csid dies here and starts again; the world stays.
    Crash,
    Reboot,
    /// The host boots with a plugin that stages if the one before did not, and the other way round.
    Replace,
    /// The power goes: the journal has what was synced.
    PowerCut,
    /// An unmount behind csid's back: of the published path, of the target, or of both.
    Remove(u8, bool, bool),
    /// The server of the volume dies.
    Die,
}

/// End of an effect: whether it happened, and what csid learns of it. 0: csid dies before the outcome is written. 10: the power goes
/// before that, and the intent is on the disk if the effect happened.
#[derive(Clone, Debug)]
struct End {
    happened: bool,
    told: u8,
}

fn act() -> impl Strategy<Value = Act> {
    let consumer = 0..3_u8;
    prop_oneof![
        6 => consumer.clone().prop_map(Act::Mount),
        4 => consumer.clone().prop_map(Act::Unmount),
        2 => consumer.clone().prop_map(Act::Undo),
        2 => Just(Act::Crash),
        1 => Just(Act::Reboot),
        1 => Just(Act::Replace),
        1 => Just(Act::PowerCut),
        2 => (consumer, any::<bool>(), any::<bool>()).prop_map(|(c, source, target)| Act::Remove(c, source, target)),
        2 => Just(Act::Die),
    ]
}

fn end() -> impl Strategy<Value = End> {
    (any::<bool>(), 0..11_u8).prop_map(|(happened, told)| End { happened, told })
}

struct Run {
    volume: Volume,
    /// Rows that the last sync wrote.
    durable: Volume,
    world: World,
    stages: bool,
    /// Mounts that were answered and whose unmount was not requested since.
    answered: BTreeSet<MountKey>,
    /// Mounts whose unmount was answered, and that were not requested since.
    gone: BTreeSet<MountKey>,
    ends: std::vec::IntoIter<End>,
}

impl Run {
    fn step(&mut self, event: MountEvent) -> Option<Next> {
        let (volume, next) = step(&self.volume, event).ok()?;
        self.volume = volume;
        self.check();
        Some(next)
    }

    fn check(&self) {
        self.world.explained(&self.volume);
        for key in &self.answered {
            assert!(self.volume.mount(key).is_some_and(|row| row.kept), "an answered mount was forgotten");
        }
        for key in &self.gone {
            assert!(self.volume.mount(key).is_none_or(|row| !row.kept), "an answered unmount was forgotten");
        }
    }

    fn crash(&mut self, same_boot: bool) {
        if !same_boot {
            self.world = World::default();
        }
        let sights = self.volume.mounts.iter().map(|row| self.world.sight(row)).collect();
        self.step(MountEvent::Recovered { same_boot, sights });
        self.durable = self.volume.clone();
    }

    /// Syncs `rows`, unless the synced ones mean the same after a power cut. Returns the rows that were synced before.
    fn sync(&mut self, rows: &Volume) -> Volume {
        match same_after_boot(&self.durable, rows) {
            true => self.durable.clone(),
            false => std::mem::replace(&mut self.durable, rows.clone()),
        }
    }

    /// Runs the effects as the actor does. Failures are rolled back or given up. At most `tries` effects are run.
    fn drive(&mut self, key: &MountKey, mut next: Next, tries: usize) -> bool {
        // State of the journal. An intent that an earlier commit foresaw is not written again.
        let mut written = self.volume.clone();
        for _ in 0..tries {
            let effect = match next {
                Next::Run(effect) => effect,
                Next::Mounted => {
                    self.sync(&self.volume.clone());
                    // An answered mount is there: staged, published, bound.
                    let row = self.volume.mount(key).expect("answered without a row");
                    assert_eq!(row.phase, Phase::Mounted);
                    assert_eq!(self.world.sight(row), Observed::There, "answered and not there");
                    assert!(!self.stages || self.world.staged, "answered and not staged");
                    self.answered.insert(key.clone());
                    return true;
                }
                Next::Gone | Next::Rest => {
                    let under_way = self.volume.mount(key).is_some_and(|row| row.phase == Phase::Mounting);
                    assert!(!under_way, "a mount ended without an end");
                    self.sync(&self.volume.clone());
                    return true;
                }
            };
            let ahead = foreseen(&self.volume, &effect);
            let mut before = self.durable.clone();
            if !cover(&written, &ahead) {
                before = self.sync(&ahead);
                written = ahead;
            }
            let end = self.ends.next().unwrap_or(End { happened: true, told: 7 });
            // A publish of a dead file system is dead, and csid sees that.
            let is_seen_dead = effect.action == Action::Publish
                && (self.world.staged_dead || self.world.dead.contains(&effect.key));
            let outcome = match end.told {
                0 => {
                    if end.happened {
                        self.world.happen(&effect, self.stages);
                    }
                    self.volume = written;
                    self.crash(true);
                    return false;
                }
                10 => {
                    self.volume = if end.happened { self.durable.clone() } else { before };
                    self.crash(false);
                    return false;
                }
                1 => Outcome::NotSent,
                2 | 8 | 9 => Outcome::Again,
                3 => Outcome::Failed,
                _ if is_seen_dead => Outcome::Failed,
                _ => Outcome::Done { device: None },
            };
            let done = matches!(outcome, Outcome::Done { .. });
            if done || (end.happened && outcome != Outcome::NotSent) {
                self.world.happen(&effect, self.stages);
            }
            let makes = effect.action.makes();
            let Some(after) = self.step(MountEvent::Ended { effect, outcome, error: Some("failed".into()) })
            else {
                return false;
            };
            next = if done {
                after
            } else {
                let event = match (makes, end.happened) {
                    // The same call is repeated, whether it has had its effect or not.
                    (true, _) if end.told == 8 => MountEvent::Continue { key: key.clone() },
                    (true, _) if end.told == 9 => MountEvent::Yield { key: key.clone() },
                    (true, true) => MountEvent::Undo { key: key.clone() },
                    (_, false) => MountEvent::Continue { key: key.clone() },
                    (false, true) => {
                        self.step(MountEvent::GaveUp { key: key.clone() });
                        self.sync(&self.volume.clone());
                        return false;
                    }
                };
                match self.step(event) {
                    Some(next) => next,
                    None => return false,
                }
            };
        }
        false
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Mount(consumer) => {
                let key = key(consumer);
                self.gone.remove(&key);
                if let Some(row) = self.volume.mount(&key) {
                    if !matches!(row.phase, Phase::Mounted | Phase::Lost | Phase::Waiting) {
                        return self.act(Act::Undo(consumer));
                    }
                    if row.shows() {
                        let sights = self.volume.mounts.iter().map(|row| self.world.sight(row)).collect();
                        match self.step(MountEvent::Seen { key: key.clone(), sights }) {
                            Some(Next::Rest) => {}
                            next => {
                                next.map(|next| self.drive(&key, next, 40));
                                return;
                            }
                        }
                    }
                }
                let abilities = Abilities { stages: self.stages, ..ABLE };
                let event = MountEvent::Mount { wanted: wanted(consumer), paths: paths(consumer), abilities };
                if let Some(next) = self.step(event) {
                    self.drive(&key, next, 40);
                }
            }
            Act::Unmount(consumer) => {
                let key = key(consumer);
                self.answered.remove(&key);
                if let Some(next) = self.step(MountEvent::Unmount { key: key.clone() })
                    && self.drive(&key, next, 40)
                {
                    self.gone.insert(key);
                }
            }
            Act::Undo(consumer) => {
                let key = key(consumer);
                let under_way = self.volume.mount(&key).is_some_and(|row| {
                    matches!(row.phase, Phase::Mounting | Phase::Unmounting | Phase::Uncertain)
                });
                if under_way && let Some(next) = self.step(MountEvent::Undo { key: key.clone() }) {
                    self.drive(&key, next, 40);
                }
            }
            Act::Crash => self.crash(true),
            Act::Reboot => self.crash(false),
            Act::Replace => {
                self.crash(false);
                self.stages = !self.stages;
            }
            Act::PowerCut => {
                self.volume = self.durable.clone();
                self.crash(false);
            }
            Act::Remove(consumer, source, target) => {
                let key = key(consumer);
                if target {
                    self.world.bound.remove(&key);
                    self.world.dead_bound.remove(&key);
                }
                if source {
                    self.world.published.remove(&key);
                    self.world.dead.remove(&key);
                }
            }
            Act::Die => {
                self.world.staged_dead = self.world.staged;
                self.world.dead.clone_from(&self.world.published);
                let bound = std::mem::take(&mut self.world.bound);
                self.world.dead_bound.extend(bound);
            }
        }
    }
}

proptest! {
    #[test]
    fn every_mount_is_explained_by_its_rows(
        stages in any::<bool>(),
        acts in proptest::collection::vec(act(), 1..24),
        ends in proptest::collection::vec(end(), 0..64),
    ) {
        let mut run = Run { ends: ends.into_iter(), ..run(stages) };
        for act in acts {
            run.act(act);
        }
        // With a plugin that answers, all rows come to rest. Every requested mount can be made, whatever died. An unmounted one
        // leaves nothing.
        run.ends = Vec::new().into_iter();
        for round in 0..12 {
            run.act(Act::Mount(round % 3));
        }
        for consumer in 0..3 {
            let row = run.volume.mount(&key(consumer));
            prop_assert!(row.is_some_and(|row| run.world.sight(row) == Observed::There));
        }
        for consumer in 0..3 {
            run.act(Act::Unmount(consumer));
        }
        prop_assert!(run.volume.mounts.is_empty());
        prop_assert!(!run.world.staged && run.world.published.is_empty());
        prop_assert!(run.world.bound.is_empty() && run.world.dead_bound.is_empty());
    }
}

#[test]
fn co_rule_25_abandoned_making_is_negated() {
    let mut volume = begun();
    let key = key(0);
    let stage = |from| Effect { action: Action::Stage, key: key.clone(), goal: key.clone(), from };
    let ended =
        |from, outcome| MountEvent::Ended { effect: stage(from), outcome, error: Some("timed out".into()) };
    let go_on = || MountEvent::Continue { key: key.clone() };
    for from in [Leg::Absent, Leg::Making, Leg::Making] {
        let (after, _) = step(&volume, ended(from, Outcome::Again)).ok().unwrap();
        let (after, next) = step(&after, go_on()).ok().unwrap();
        assert_eq!(next, Next::Run(stage(Leg::Making)), "the same call, not its negation");
        volume = after;
    }
    // A try that is not sent does not settle the earlier ones, nor does one that is refused.
    for outcome in [Outcome::NotSent, Outcome::Again, Outcome::Failed] {
        let (after, _) = step(&volume, ended(Leg::Making, outcome)).ok().unwrap();
        let (_, next) = step(&after, MountEvent::Undo { key: key.clone() }).ok().unwrap();
        assert!(matches!(next, Next::Run(Effect { action: Action::Unstage, .. })), "{outcome:?}: {next:?}");
    }
    // A kept row rests as it is, and its next try repeats the call. Unmount negates it.
    Arc::make_mut(&mut volume.mounts[0]).kept = true;
    let (rests, next) = step(&volume, MountEvent::Yield { key: key.clone() }).ok().unwrap();
    assert_eq!((next, rests.mounts[0].phase, rests.row.stage), (Next::Rest, Phase::Waiting, Leg::Making));
    let again = MountEvent::Mount { wanted: wanted(0), paths: paths(0), abilities: ABLE };
    assert_eq!(step(&rests, again).ok().unwrap().1, Next::Run(stage(Leg::Making)));
    let (_, next) = step(&rests, MountEvent::Unmount { key: key.clone() }).ok().unwrap();
    assert!(matches!(next, Next::Run(Effect { action: Action::Unstage, .. })), "{next:?}");
}

#[test]
fn one_intent_covers_a_mount_or_an_unmount() {
    let commits = |mut volume: Volume, event: MountEvent| {
        let (mut written, mut commits) = (volume.clone(), 0);
        let (after, mut next) = step(&volume, event).ok().unwrap();
        volume = after;
        while let Next::Run(effect) = next {
            let ahead = foreseen(&volume, &effect);
            if !cover(&written, &ahead) {
                (written, commits) = (ahead, commits + 1);
            }
            let outcome = Outcome::Done { device: Some(1) };
            (volume, next) = step(&volume, MountEvent::Ended { effect, outcome, error: None }).ok().unwrap();
        }
        (volume, commits)
    };
    let mut wanted = wanted(0);
    wanted.spec.target = None;
    let key = wanted.key.clone();
    let (mounted, commits_up) =
        commits(volume(), MountEvent::Mount { wanted, paths: paths(0), abilities: ABLE });
    assert_eq!((mounted.mounts[0].phase, commits_up), (Phase::Mounted, 1));
    let (gone, commits_down) = commits(mounted, MountEvent::Unmount { key });
    assert_eq!((gone.mounts.len(), commits_down), (0, 1));
}

#[test]
fn published_volume_is_not_staged_by_a_new_ability() {
    let mount = |volume: &Volume, consumer, stages| {
        let abilities = Abilities { stages, ..ABLE };
        let event = MountEvent::Mount { wanted: wanted(consumer), paths: paths(consumer), abilities };
        step(volume, event).unwrap()
    };
    let run = |next: Next| match next {
        Next::Run(effect) => effect,
        other => panic!("{other:?}"),
    };
    let ended = |volume: &Volume, effect, outcome| {
        step(volume, MountEvent::Ended { effect, outcome, error: None }).unwrap()
    };
    let done = Outcome::Done { device: None };
    let (volume, next) = mount(&volume(), 1, false);
    let (volume, next) = ended(&volume, run(next), done);
    assert!(matches!(next, Next::Mounted), "{next:?}");
    let (second, next) = mount(&volume, 3, true);
    let publish = run(next);
    assert_eq!((publish.action, second.row.staging.as_deref()), (Action::Publish, None));
    // Its failure is undone without a step for the other one.
    let (second, _) = ended(&second, publish, Outcome::Failed);
    let (second, next) = step(&second, MountEvent::Undo { key: key(3) }).unwrap();
    let unpublish = run(next);
    assert_eq!((unpublish.action, &unpublish.key), (Action::Unpublish, &key(3)));
    let (second, next) = ended(&second, unpublish, Outcome::Done { device: None });
    assert!(matches!(next, Next::Gone), "{next:?}");
    assert!(second == volume, "the first mount is as it was");
    // Nor does the first one again, whose target was unmounted meanwhile.
    let mut unbound = volume.clone();
    let row = unbound.mount_mut(&key(1)).unwrap();
    (row.phase, row.target) = (Phase::Waiting, Leg::Removing);
    let (unbound, next) = mount(&unbound, 1, true);
    assert_eq!((run(next).action, unbound.row.staging), (Action::Unbind, None));
    // The first of a volume that has no publish stages it.
    let (volume, next) = step(&volume, MountEvent::Unmount { key: key(1) }).unwrap();
    let (volume, _) = ended(&volume, run(next), Outcome::Done { device: None });
    assert_eq!(run(mount(&volume, 3, true).1).action, Action::Stage);
}

#[test]
fn plugin_that_stages_no_more_publishes_alone() {
    let mut run = run(true);
    run.act(Act::Mount(0));
    run.act(Act::Mount(1));
    run.act(Act::Replace);
    assert_eq!((run.volume.row.stage, run.volume.row.staging.is_some()), (Leg::Absent, true));
    run.act(Act::Mount(0));
    assert_eq!(run.world.sight(&run.volume.mounts[0]), Observed::There);
    assert_eq!(run.volume.row.staging, None);
    run.act(Act::Mount(1));
    run.act(Act::Unmount(0));
    run.act(Act::Unmount(1));
    assert!(run.volume.mounts.is_empty() && run.world.published.is_empty());
}

/// The stage may have been done, so the plugin has to undo it. The publish of another mount needs it.
#[test]
fn staged_volume_keeps_its_staging_path() {
    let mount = |volume: &Volume, stages| {
        let abilities = Abilities { stages, ..ABLE };
        let event = MountEvent::Mount { wanted: wanted(1), paths: paths(1), abilities };
        step(volume, event).unwrap().0.row.staging
    };
    let staging = paths(1).staging;
    let mut volume = begun();
    for leg in [Leg::Making, Leg::Present, Leg::Removing] {
        volume.row.stage = leg;
        assert_eq!(mount(&volume, false), staging, "{leg:?}");
    }
    volume.row.stage = Leg::Absent;
    assert_eq!(mount(&volume, false), None);
    volume.mount_mut(&key(0)).unwrap().publish = Leg::Present;
    assert_eq!(mount(&volume, false), staging);
}

#[test]
fn lost_publish_is_repeated_before_the_bind() {
    let mut run = run(true);
    run.act(Act::Mount(0));
    run.act(Act::Remove(0, false, true));
    run.act(Act::Crash);
    assert_eq!(run.volume.mounts[0].phase, Phase::Waiting, "its target is to be bound again");
    run.act(Act::Remove(0, true, false));
    run.act(Act::Mount(0));
    assert_eq!(run.world.sight(&run.volume.mounts[0]), Observed::There);
}

fn run(stages: bool) -> Run {
    let (world, answered, gone) = Default::default();
    Run { volume: volume(), durable: volume(), world, stages, answered, gone, ends: Vec::new().into_iter() }
}

/// Consumer 1's mounts do not come back by themselves. Consumer 0 has a target.
#[test]
fn dead_mount_is_made_again_for_all_consumers() {
    for stages in [false, true] {
        let mut run = run(stages);
        run.act(Act::Mount(0));
        run.act(Act::Mount(1));
        run.act(Act::Die);
        run.act(Act::Mount(0));
        let [first, second] = &run.volume.mounts[..] else { panic!("two rows") };
        assert_eq!((first.phase, run.world.sight(first)), (Phase::Mounted, Observed::There));
        assert_eq!((second.phase, second.status.healing), (Phase::Waiting, true), "its turn comes by itself");
        assert!(!first.status.healing, "it is healed");
        run.act(Act::Crash);
        assert_eq!(run.volume.mounts[1].phase, Phase::Waiting);
        run.act(Act::Mount(1));
        assert_eq!(run.world.sight(&run.volume.mounts[1]), Observed::There);
    }
}

/// The row keeps the device numbers that its target may still show, until the mount is healed.
#[test]
fn dead_device_is_kept_until_its_target_is_replaced() {
    let Run { volume, .. } = run(true);
    let wanted = wanted(0);
    let key = wanted.key.clone();
    let made = |(mut volume, mut next): (Volume, Next), number: u64, until: Option<Action>| {
        while let Next::Run(effect) = next.clone() {
            if Some(effect.action) == until {
                break;
            }
            let device = (effect.action == Action::Publish).then_some(number);
            let ended = MountEvent::Ended { effect, outcome: Outcome::Done { device }, error: None };
            (volume, next) = step(&volume, ended).ok().unwrap();
        }
        (volume, next)
    };
    let event = MountEvent::Mount { wanted, paths: paths(0), abilities: ABLE };
    let (first, _) = made(step(&volume, event).ok().unwrap(), 1, None);
    assert_eq!((first.mounts[0].device, &first.mounts[0].status.died[..]), (Some(1), &[][..]));
    // A server's file system may have the same number again.
    for again in [2, 1] {
        let died = MountEvent::Seen { key: key.clone(), sights: vec![Observed::Dead] };
        let binding = made(step(&first, died).ok().unwrap(), again, Some(Action::Bind));
        let second = &binding.0;
        assert_eq!((second.mounts[0].device, &second.mounts[0].status.died[..]), (Some(again), &[1][..]));
        let (healed, _) = made(binding, again, None);
        assert_eq!((healed.mounts[0].phase, &healed.mounts[0].status.died[..]), (Phase::Mounted, &[][..]));
    }
}

#[test]
fn another_boot_ends_healing_and_restore_decides() {
    let mut run = run(true);
    run.act(Act::Mount(0));
    run.act(Act::Mount(1));
    run.act(Act::Die);
    run.ends = vec![End { happened: false, told: 1 }; 100].into_iter();
    run.act(Act::Mount(0));
    assert!(run.volume.mounts.iter().all(|row| row.status.healing), "not done yet");
    run.act(Act::Reboot);
    run.ends = Vec::new().into_iter();
    for row in &run.volume.mounts {
        assert!(!row.status.healing && row.publish == Leg::Absent);
    }
    assert_eq!(run.volume.mounts[1].phase, Phase::Lost, "held: two hosts could have it");
}

const PHASES: [Phase; 6] =
    [Phase::Mounting, Phase::Mounted, Phase::Unmounting, Phase::Uncertain, Phase::Lost, Phase::Waiting];
const LEGS: [Leg; 4] = [Leg::Absent, Leg::Making, Leg::Present, Leg::Removing];

#[test]
fn kill_during_a_rebind_removes_no_mount() {
    for (target, restore) in [Leg::Making, Leg::Removing]
        .into_iter()
        .flat_map(|leg| [Restore::Auto, Restore::Hold].map(|restore| (leg, restore)))
    {
        let mut volume = begun();
        volume.row.stage = Leg::Present;
        let row = Arc::make_mut(&mut volume.mounts[0]);
        (row.kept, row.publish, row.target, row.spec.restore) = (true, Leg::Present, target, restore);
        (row.spec.secrets_given, row.spec.credential) = (true, None);
        let (again, _) =
            step(&volume, MountEvent::Recovered { same_boot: true, sights: vec![Observed::Gone] }).unwrap();
        let row = &again.mounts[0];
        assert_eq!((row.phase, row.publish, again.row.stage), (Phase::Waiting, Leg::Present, Leg::Present));
        assert!(!row.lacks_secrets(), "to bind it needs none");
        let (after, _) =
            step(&volume, MountEvent::Recovered { same_boot: false, sights: vec![Observed::Gone] }).unwrap();
        assert_eq!(after.mounts[0].publish, Leg::Absent, "no mount outlives a boot");
    }
}

/// Combines every state of a row and of the volume with every event. The resulting rows explain everything that may be there.
#[test]
fn every_state_takes_every_event() {
    let mut combinations = 0;
    for (phase, stage, publish, target) in PHASES.into_iter().flat_map(|phase| {
        LEGS.into_iter().flat_map(move |a| LEGS.into_iter().flat_map(move |b| LEGS.map(|c| (phase, a, b, c))))
    }) {
        for kept in [false, true] {
            let mut before = volume();
            before.row.staging = Some("/staging".into());
            before.row.stage = stage;
            let wanted = wanted(0);
            before.mounts.push(Arc::new(MountRow {
                key: wanted.key.clone(),
                volume: before.row.key.clone(),
                uid: 0,
                spec: wanted.spec.clone(),
                status: MountStatus::default(),
                phase,
                kept,
                source: "/root/publish/v/0".into(),
                published: None,
                publish,
                target,
                device: None,
                error: None,
                operations: Vec::new(),
                since_usec: 0,
                modify_index: 0,
            }));
            for event in events(&wanted) {
                combinations += 1;
                let reboot = matches!(event, MountEvent::Recovered { same_boot: false, .. });
                let ended = match &event {
                    MountEvent::Ended { effect, outcome: Outcome::Done { .. }, .. } => Some(effect.action),
                    MountEvent::Ended { effect, outcome: Outcome::NotSent, .. } => Some(effect.action),
                    _ => None,
                };
                let Ok((after, next)) = step(&before, event) else { continue };
                let row = after.mount(&wanted.key);
                if let Next::Run(effect) = &next {
                    let leg = match effect.action {
                        Action::Stage | Action::Unstage => after.row.stage,
                        Action::Publish | Action::Unpublish => row.map_or(Leg::Absent, |row| row.publish),
                        Action::Bind | Action::Unbind => row.map_or(Leg::Absent, |row| row.target),
                    };
                    assert_eq!(
                        leg,
                        if effect.action.makes() { Leg::Making } else { Leg::Removing },
                        "the intent is written"
                    );
                }
                // A leg that may be there becomes absent only by the acknowledged negation or by another boot.
                let negated = |action| reboot || ended == Some(action);
                let stays = |leg: Leg, now: Leg| leg == Leg::Absent || now != Leg::Absent;
                assert!(stays(stage, after.row.stage) || negated(Action::Unstage) || negated(Action::Stage));
                let (publish_now, target_now) =
                    row.map_or((Leg::Absent, Leg::Absent), |row| (row.publish, row.target));
                assert!(
                    stays(publish, publish_now) || negated(Action::Unpublish) || negated(Action::Publish)
                );
                assert!(stays(target, target_now) || negated(Action::Unbind) || negated(Action::Bind));
            }
        }
    }
    println!("every_state_takes_every_event: {combinations} combinations");
    assert_eq!(combinations, 6 * 4 * 4 * 4 * 2 * events(&wanted(0)).len());
}

fn events(wanted: &DesiredMount) -> Vec<MountEvent> {
    let key = wanted.key.clone();
    let mut events = vec![
        MountEvent::Mount { wanted: wanted.clone(), paths: paths(0), abilities: ABLE },
        MountEvent::Unmount { key: key.clone() },
        MountEvent::Undo { key: key.clone() },
        MountEvent::Continue { key: key.clone() },
        MountEvent::GaveUp { key: key.clone() },
        MountEvent::Yield { key: key.clone() },
        MountEvent::Keep { key: key.clone() },
    ];
    for sight in [Observed::There, Observed::Dead, Observed::Unbound, Observed::Gone] {
        events.push(MountEvent::Seen { key: key.clone(), sights: vec![sight] });
        for same_boot in [false, true] {
            events.push(MountEvent::Recovered { same_boot, sights: vec![sight] });
        }
    }
    for action in Action::ALL {
        for outcome in [Outcome::Done { device: None }, Outcome::NotSent, Outcome::Again, Outcome::Failed] {
            let effect = Effect { action, key: key.clone(), goal: key.clone(), from: Leg::Absent };
            events.push(MountEvent::Ended { effect, outcome, error: Some("why".into()) });
        }
    }
    events
}

#[test]
fn co_rule_34_a_second_consumer_needs_a_mode_for_it() {
    use AccessMode::*;
    let modes = [
        (SingleNodeWriter, false),
        (SingleNodeReaderOnly, false),
        (SingleNodeSingleWriter, false),
        (SingleNodeMultiWriter, true),
        (MultiNodeReaderOnly, true),
        (MultiNodeSingleWriter, false),
        (MultiNodeMultiWriter, true),
    ];
    for (mode, second) in modes {
        let reader = matches!(mode, SingleNodeReaderOnly | MultiNodeReaderOnly);
        let set = |wanted: &mut DesiredMount| {
            wanted.spec.usage.access_mode = mode;
            wanted.spec.read_only = reader;
        };
        let event = MountEvent::Mount { wanted: with(&wanted(0), set), paths: paths(0), abilities: ABLE };
        let (volume, _) = step(&volume(), event).ok().unwrap();
        let answer = admit(&volume, &with(&wanted(1), set), Some(ABLE));
        assert_eq!(answer.is_ok(), second, "{mode:?}: {answer:?}");
        if let Err(Refusal::Conflict { holders, .. }) = answer {
            assert_eq!(holders, ["c0"], "the holder is named");
        }
        // Readers along with the one writer.
        let third = with(&wanted(2), |wanted| {
            set(wanted);
            wanted.spec.read_only = true;
        });
        let beside = matches!(
            mode,
            SingleNodeMultiWriter | MultiNodeReaderOnly | MultiNodeSingleWriter | MultiNodeMultiWriter
        );
        assert_eq!(admit(&volume, &third, Some(ABLE)).is_ok(), beside, "{mode:?}");
    }
}

#[test]
fn users_share_everything_but_read_only() {
    let event = MountEvent::Mount { wanted: wanted(0), paths: paths(0), abilities: ABLE };
    let (volume, _) = step(&volume(), event).ok().unwrap();
    type Edit = fn(&mut DesiredMount);
    let edits: [(&str, Edit); 7] = [
        ("the attachment mode", |w| w.spec.usage.attachment_mode = AttachmentMode::BlockDevice),
        ("the access mode", |w| w.spec.usage.access_mode = AccessMode::SingleNodeMultiWriter),
        ("the fs type", |w| w.spec.usage.fs_type = "xfs".into()),
        ("the list of mount flags", |w| w.spec.usage.mount_flags = vec!["noatime".into()]),
        ("the mount group", |w| w.spec.usage.mount_group = "7".into()),
        ("the volume context", |w| drop(w.spec.usage.context.insert("a".into(), "b".into()))),
        ("the publish context", |w| drop(w.spec.usage.publish_context.insert("a".into(), "b".into()))),
    ];
    for (what, edit) in edits {
        let answer = admit(&volume, &with(&wanted(1), edit), Some(ABLE));
        assert_eq!(answer, Err(Refusal::Conflict { what, holders: vec!["c0".into()] }));
    }
    assert_eq!(admit(&volume, &with(&wanted(1), |w| w.spec.read_only = true), Some(ABLE)), Ok(()));
    let renamed = with(&wanted(1), |w| w.key.volume = "other".into());
    assert!(matches!(admit(&volume, &renamed, Some(ABLE)), Err(Refusal::OtherName { .. })));
}

#[test]
fn unsupported_mount_is_refused_before_its_rpc() {
    let poor = Abilities { stages: true, single_node_multi_writer: false, mount_group: false };
    let multi = with(&wanted(0), |w| w.spec.usage.access_mode = AccessMode::SingleNodeMultiWriter);
    let capability = "SINGLE_NODE_MULTI_WRITER";
    assert_eq!(admit(&volume(), &multi, Some(poor)), Err(Refusal::NotSupported { capability }));
    let group = with(&wanted(0), |w| w.spec.usage.mount_group = "7".into());
    let capability = "VOLUME_MOUNT_GROUP";
    assert_eq!(admit(&volume(), &group, Some(poor)), Err(Refusal::NotSupported { capability }));
    let writer = with(&wanted(0), |w| w.spec.usage.access_mode = AccessMode::MultiNodeReaderOnly);
    assert_eq!(admit(&volume(), &writer, Some(ABLE)), Err(Refusal::ReaderOnly));
}

/// An option, and a change of it.
type Change = (&'static str, fn(&mut DesiredMount));

#[test]
fn an_identity_is_its_owners_and_its_options() {
    let event = MountEvent::Mount { wanted: wanted(0), paths: paths(0), abilities: ABLE };
    let (volume, _) = step(&volume(), event).ok().unwrap();
    assert_eq!(admit(&volume, &wanted(0), Some(ABLE)), Ok(()));
    assert_eq!(admit(&volume, &with(&wanted(0), |w| w.uid = 7), Some(ABLE)), Err(Refusal::NotOwner));
    let changes: [Change; 10] = [
        ("plugin", |w| w.spec.registered = true),
        ("target", |w| w.spec.target = Some("/t".into())),
        ("read-only", |w| w.spec.read_only = true),
        ("fs-type", |w| w.spec.usage.fs_type = "xfs".into()),
        ("mount-flags", |w| w.spec.usage.mount_flags = vec!["noatime".into()]),
        ("mount-group", |w| w.spec.usage.mount_group = "7".into()),
        ("volume-context", |w| w.spec.usage.context = [("k".into(), "v".into())].into()),
        ("publish-context", |w| w.spec.usage.publish_context = [("k".into(), "v".into())].into()),
        ("suid", |w| w.spec.suid = true),
        ("dev", |w| w.spec.dev = true),
    ];
    for (option, change) in changes {
        let other = with(&wanted(0), change);
        assert_eq!(admit(&volume, &other, Some(ABLE)), Err(Refusal::OtherOption { option }));
    }
}

#[test]
fn secrets_are_no_identity_and_are_needed_again() {
    let given = with(&wanted(0), |w| w.spec.secrets_given = true);
    let event = MountEvent::Mount { wanted: given.clone(), paths: paths(0), abilities: ABLE };
    let (mut volume, _) = step(&volume(), event).ok().unwrap();
    assert_eq!(admit(&volume, &wanted(0), Some(ABLE)), Ok(()), "the same call, under way");
    Arc::make_mut(&mut volume.mounts[0]).phase = Phase::Waiting;
    assert_eq!(admit(&volume, &wanted(0), Some(ABLE)), Err(Refusal::SecretRequired));
    assert_eq!(admit(&volume, &given, Some(ABLE)), Ok(()));
    let named = with(&wanted(0), |w| w.spec.credential = Some("csid.ns.vol".into()));
    let event = MountEvent::Mount { wanted: named, paths: paths(0), abilities: ABLE };
    let (volume, _) = step(&volume, event).ok().unwrap();
    assert!(!volume.mounts[0].spec.needs_secrets(), "it comes back with the credential from now on");
}

#[test]
fn a_uid_has_only_so_many_mounts_of_a_volume() {
    let mine = |tag: usize| {
        with(&wanted(1), |w| {
            w.uid = 7;
            w.key.tag = tag.to_string();
        })
    };
    let event = MountEvent::Mount { wanted: mine(0), paths: paths(0), abilities: ABLE };
    let (mut volume, _) = step(&volume(), event).ok().unwrap();
    for tag in 1..OF_UID {
        let mut row = MountRow::clone(&volume.mounts[0]);
        row.key = mine(tag).key;
        volume.mounts.push(Arc::new(row));
    }
    assert_eq!(admit(&volume, &mine(OF_UID), Some(ABLE)), Err(Refusal::TooMany));
    assert_eq!(admit(&volume, &mine(0), Some(ABLE)), Ok(()), "what is there may be asked for again");
    assert_eq!(admit(&volume, &with(&mine(OF_UID), |w| w.uid = 0), Some(ABLE)), Ok(()));
}

/// Returns a volume whose staging was tried and is not known to be gone, with mounts of these consumers. `published`: consumers
/// whose mounts are published.
fn stuck(consumers: &[u8], published: &[u8]) -> Volume {
    let mut volume = volume();
    volume.row.staging = Some("/staging".into());
    volume.row.stage = Leg::Removing;
    for consumer in consumers {
        let event = MountEvent::Mount { wanted: wanted(*consumer), paths: paths(*consumer), abilities: ABLE };
        volume = step(&volume, event).unwrap().0;
    }
    for consumer in published {
        volume.mount_mut(&key(*consumer)).unwrap().publish = Leg::Present;
    }
    volume.mount_mut(&key(consumers[0])).unwrap().phase = Phase::Uncertain;
    volume
}

#[test]
fn the_last_forgotten_mount_takes_the_staging_along() {
    let (volume, next) = step(&stuck(&[1], &[]), MountEvent::Forget { key: key(1) }).unwrap();
    assert!(volume.mounts.is_empty() && volume.row.stage == Leg::Absent && next == Next::Gone);
    assert!(matches!(step(&volume, MountEvent::Forget { key: key(1) }), Err(Refusal::NoSuchMount)));
}

#[test]
fn mount_waiting_behind_a_forgotten_one_stages() {
    let (volume, _) = step(&stuck(&[1, 3], &[]), MountEvent::Forget { key: key(1) }).unwrap();
    assert_eq!(volume.row.stage, Leg::Absent);
    let (_, next) = step(&volume, MountEvent::Continue { key: key(3) }).unwrap();
    assert!(matches!(next, Next::Run(Effect { action: Action::Stage, .. })), "{next:?}");
}

#[test]
fn forgotten_mount_leaves_the_unstage_to_others() {
    let mut volume = stuck(&[1, 3], &[]);
    volume.mount_mut(&key(3)).unwrap().phase = Phase::Unmounting;
    let (volume, _) = step(&volume, MountEvent::Forget { key: key(1) }).unwrap();
    assert_eq!(volume.row.stage, Leg::Removing);
    let (_, next) = step(&volume, MountEvent::Continue { key: key(3) }).unwrap();
    assert!(matches!(next, Next::Run(Effect { action: Action::Unstage, .. })), "{next:?}");
}

#[test]
fn forgotten_mount_leaves_the_staging_to_others() {
    let (volume, _) = step(&stuck(&[1, 3], &[3]), MountEvent::Forget { key: key(1) }).unwrap();
    assert_eq!((volume.row.stage, volume.mounts.len()), (Leg::Removing, 1));
    // Another mount is about to be staged, so the staging belongs to that mount.
    let mut staging = stuck(&[1, 3], &[]);
    staging.row.stage = Leg::Making;
    let (volume, _) = step(&staging, MountEvent::Forget { key: key(1) }).unwrap();
    assert_eq!(volume.row.stage, Leg::Making);
}
