//! Tests the rules as a table, and `step` against a small model of the world. Whatever the events, and however the effects end,
//! csid never asks the controller to detach a volume that a node still has. A row explains everything that stays attached.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::store::registry::{AttachCall, AttachSecrets, BoundTo, Use};
use crate::store::rows::AttachmentMode;
use AccessMode::*;
use AttachmentMode::{BlockDevice, FileSystem};
use ClaimMode::{Read, Write};

const MODES: [AccessMode; 7] = [
    SingleNodeWriter,
    SingleNodeReaderOnly,
    SingleNodeSingleWriter,
    SingleNodeMultiWriter,
    MultiNodeReaderOnly,
    MultiNodeSingleWriter,
    MultiNodeMultiWriter,
];

fn capability(access_mode: AccessMode, attachment_mode: AttachmentMode) -> Capability {
    Capability { access_mode, attachment_mode }
}

pub(super) fn volume(attaches: bool) -> Claims {
    let attaches = Some(attaches);
    let both = |mode| [capability(mode, FileSystem), capability(mode, BlockDevice)];
    let capabilities = MODES.into_iter().flat_map(both).collect();
    Claims { attaches, node_id: Some("now".to_owned()), capabilities, ..Claims::default() }
}

pub(super) fn claim(consumer: &str, node: &str, mode: ClaimMode, access_mode: AccessMode) -> Claim {
    Claim {
        consumer: consumer.to_owned(),
        node: node.to_owned(),
        uid: 7,
        usage: Use { mode, capability: capability(access_mode, FileSystem) },
        state: ClaimState::Pending,
        kept: false,
        releasing: false,
        blocked: None,
        by_mount: false,
        bound: None,
        credential: None,
        secrets_given: false,
        error: None,
        since_usec: 0,
        released_usec: 0,
        id: String::new(),
        call: String::new(),
        keeper: String::new(),
        adopted: false,
        grant: None,
        modify_index: 0,
    }
}

pub(super) fn holding(held: &[Claim]) -> Claims {
    let claims =
        held.iter().map(|claim| Claim { state: ClaimState::Taken, kept: true, ..claim.clone() }).collect();
    Claims { claims, ..volume(false) }
}

#[test]
fn a_second_claim_by_access_mode() {
    // Claims that may join a writer on the same node, a writer on another node, or a reader on the same node. The second claim
    // is given as (mode, read or write, the same node).
    let table: [(AccessMode, ClaimMode, [bool; 4]); 9] = [
        // second: write here, write there, read here, read there
        (SingleNodeWriter, Write, [false; 4]),
        (SingleNodeReaderOnly, Read, [false; 4]),
        (SingleNodeSingleWriter, Write, [false; 4]),
        (SingleNodeMultiWriter, Write, [true, false, true, false]),
        (SingleNodeMultiWriter, Read, [true, false, true, false]),
        (MultiNodeReaderOnly, Read, [false, false, true, true]),
        (MultiNodeSingleWriter, Write, [false, false, true, true]),
        (MultiNodeSingleWriter, Read, [true; 4]),
        (MultiNodeMultiWriter, Write, [true; 4]),
    ];
    for (access_mode, first, allowed) in table {
        let held = holding(&[claim("a", "here", first, access_mode)]);
        let seconds = [(Write, "here"), (Write, "there"), (Read, "here"), (Read, "there")];
        for ((mode, node), allowed) in seconds.into_iter().zip(allowed) {
            let answer = admit(&held, &claim("b", node, mode, access_mode));
            assert_eq!(
                answer.is_ok(),
                allowed,
                "{access_mode:?}: {first:?} here, then {mode:?} {node}: {answer:?}"
            );
            if let Err(ClaimRefusal::Conflict { holders, .. }) = answer {
                assert_eq!(holders, ["a"], "the refusal names the holder");
            }
        }
    }
}

#[test]
fn first_claim_sets_modes_and_last_clears_them() {
    let held = holding(&[claim("a", "here", Write, MultiNodeMultiWriter)]);
    let other = claim("b", "here", Read, MultiNodeReaderOnly);
    let conflict = |what| Err(ClaimRefusal::Conflict { what, holders: vec!["a".to_owned()] });
    assert_eq!(admit(&held, &other), conflict("the access mode"));
    let mut block = claim("b", "here", Write, MultiNodeMultiWriter);
    block.usage.capability.attachment_mode = BlockDevice;
    assert_eq!(admit(&held, &block), conflict("the attachment mode"));
    assert_eq!(admit(&volume(false), &other), Ok(()));
    assert_eq!(admit(&volume(false), &block), Ok(()));
}

#[test]
fn an_identity_is_its_owners_and_keeps_its_options() {
    let mine = claim("a", "here", Write, MultiNodeMultiWriter);
    let held = holding(std::slice::from_ref(&mine));
    assert_eq!(admit(&held, &mine), Ok(()), "the same claim again");
    assert_eq!(admit(&held, &Claim { uid: 8, ..mine.clone() }), Err(ClaimRefusal::NotOwner));
    assert_eq!(
        admit(&held, &Claim { node: "there".into(), ..mine.clone() }),
        Err(ClaimRefusal::OtherOption { option: "node" })
    );
    let reader = Use { mode: Read, ..mine.usage };
    assert_eq!(
        admit(&held, &Claim { usage: reader, ..mine.clone() }),
        Err(ClaimRefusal::OtherOption { option: "mode" })
    );
    let mut leaving = held;
    leaving.claims[0].releasing = true;
    assert_eq!(admit(&leaving, &mine), Err(ClaimRefusal::Releasing));
}

#[test]
fn bound_unit_is_part_of_a_claim_and_ends_it() {
    let to = |to, grace_usec| Claim {
        bound: Some(Bound::new(to, grace_usec)),
        ..claim("a", "here", Write, MultiNodeMultiWriter)
    };
    let caller = |name: &str| BoundTo::Caller(name.to_owned());
    let held = holding(&[to(caller("1"), 5)]);
    assert_eq!(admit(&held, &to(caller("2"), 5)), Ok(()), "the same call on another connection");
    let unbound = claim("a", "here", Write, MultiNodeMultiWriter);
    for other in [to(caller("1"), 6), to(BoundTo::Unit("a.service".into()), 5), unbound] {
        assert_eq!(admit(&held, &other), Err(ClaimRefusal::OtherOption { option: "bind" }));
    }
    let by_mount = Claim { by_mount: true, ..claim("a", "here", Write, MultiNodeMultiWriter) };
    assert_eq!(admit(&held, &by_mount), Ok(()), "a Mount goes with the claim that is there");
    let bound = Bound::new(caller("2"), 5);
    let (held, next) = step(&held, ClaimEvent::Bind { consumer: "a".into(), bound: bound.clone() }).unwrap();
    assert_eq!((held.claims[0].bound.as_ref(), next), (Some(&bound), ClaimNext::Rest));
    let (ended, next) = step(&held, ClaimEvent::Unbound { consumer: "a".into() }).unwrap();
    assert!(matches!(next, ClaimNext::Run(ClaimEffect { action: ClaimAction::NodeDetach, .. })));
    assert!(ended.claims[0].releasing && ended.claims[0].bound.as_ref().is_some_and(|bound| bound.ended));
}

#[test]
fn unregistered_capability_is_not_claimed() {
    let narrow = Claims { capabilities: vec![capability(SingleNodeWriter, FileSystem)], ..Claims::default() };
    assert_eq!(admit(&narrow, &claim("a", "here", Write, SingleNodeWriter)), Ok(()));
    let wide = claim("a", "here", Write, MultiNodeMultiWriter);
    assert_eq!(admit(&narrow, &wide), Err(ClaimRefusal::NoCapability));
    let writer = claim("a", "here", Write, MultiNodeReaderOnly);
    assert_eq!(admit(&volume(false), &writer), Err(ClaimRefusal::ReaderOnly));
}

/// Actual state.
#[derive(Clone, Default)]
struct World {
    attached: BTreeSet<String>,
    /// Node id with which the volume was attached, by node.
    ids: BTreeMap<String, String>,
    /// Nodes that were detached by a call whose answer was written, and for which no attach was requested since.
    detached: BTreeSet<String>,
    /// Nodes for which the outcome of an attach or a detach is unknown.
    unknown: BTreeSet<String>,
    /// Consumers that may have mounts, each with its node.
    mounted: BTreeMap<String, String>,
}

impl World {
    /// Applies the effect. `known`: its outcome is known. Fails if the specification forbids the effect.
    fn does(&mut self, effect: &ClaimEffect, id: &str, known: bool) {
        let node = effect.node.clone();
        if effect.action != ClaimAction::NodeDetach && self.attached.contains(&node) {
            assert_eq!(self.ids[&node], id, "by another name it is another node");
        }
        match effect.action {
            ClaimAction::Attach => {
                self.ids.insert(node.clone(), id.to_owned());
                self.attached.insert(node);
            }
            ClaimAction::NodeDetach => drop(self.mounted.remove(&effect.consumer)),
            ClaimAction::ServerClaim | ClaimAction::ServerDetached => panic!("csid is alone"),
            ClaimAction::Detach => {
                let users: Vec<_> = self.mounted.iter().filter(|(_, at)| **at == node).collect();
                assert!(users.is_empty(), "detached from {node} while {users:?} have it (CSI rule 23)");
                assert!(!self.detached.contains(&node), "detached twice from {node}");
                self.attached.remove(&node);
                if known {
                    self.detached.insert(node);
                }
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Turn {
    Claim {
        consumer: u8,
        node: u8,
        mode: ClaimMode,
        access_mode: AccessMode,
    },
    Release(u8),
    Continue(u8),
    Restart,
    /// After a reboot no volume is mounted, and attached volumes stay attached. The plugin may have another id for the node
    /// then.
    Reboot {
        renamed: bool,
    },
}

/// Returns how an effect ends, and whether it happened.
fn endings() -> impl Strategy<Value = (ClaimOutcome, bool)> {
    prop_oneof![
        4 => Just((ClaimOutcome::Done, true)),
        1 => Just((ClaimOutcome::Again, false)),
        1 => any::<bool>().prop_map(|lasts| (ClaimOutcome::NotSent(lasts.then(|| "no".to_owned())), false)),
        2 => any::<bool>().prop_map(|happened| (ClaimOutcome::Unknown, happened)),
        1 => Just((ClaimOutcome::Hopeless("no".to_owned()), false)),
    ]
}

fn turns() -> impl Strategy<Value = Turn> {
    let mode = prop_oneof![Just(Read), Just(Write)];
    let access_mode = prop_oneof![
        4 => Just(MultiNodeMultiWriter),
        1 => proptest::sample::select(MODES.to_vec()),
    ];
    prop_oneof![
        4 => (0..4_u8, 0..2_u8, mode, access_mode).prop_map(|(consumer, node, mode, access_mode)| {
            Turn::Claim { consumer, node, mode, access_mode }
        }),
        3 => (0..4_u8).prop_map(Turn::Release),
        2 => (0..4_u8).prop_map(Turn::Continue),
        1 => Just(Turn::Restart),
        1 => any::<bool>().prop_map(|renamed| Turn::Reboot { renamed }),
    ]
}

fn is_attached(volume: &Claims, node: &str) -> bool {
    volume.is_attached(node) == Some(true)
}

struct Run {
    volume: Claims,
    /// Capability that csid knows once it has probed the plugin.
    attaches: bool,
    node_id: String,
    world: World,
    endings: std::vec::IntoIter<(ClaimOutcome, bool)>,
}

impl Run {
    /// Restarts csid on both nodes. Neither has probed the plugin yet.
    fn restart(&mut self) {
        self.volume.attaches = None;
        self.volume.node_id = None;
        for node in ["n0", "n1"] {
            self.turn(ClaimEvent::Recovered { node: node.to_owned() }, false);
        }
    }

    /// Runs one event and its effects to their end. `die`: csid is killed at the first effect, whose intent is written.
    fn turn(&mut self, event: ClaimEvent, die: bool) {
        let consumer = match &event {
            ClaimEvent::Claim(claim) => claim.consumer.clone(),
            ClaimEvent::Release { consumer } | ClaimEvent::Continue { consumer } => consumer.clone(),
            _ => String::new(),
        };
        let Ok((volume, mut next)) = step(&self.volume, event) else { return };
        self.volume = volume;
        loop {
            let (outcome, happened) = self.endings.next().unwrap_or((ClaimOutcome::Done, true));
            let effect = match next {
                ClaimNext::Run(effect) => effect,
                // The plugin may be away for longer than any caller waits.
                ClaimNext::Unseen if outcome == ClaimOutcome::Done => {
                    self.volume.attaches = Some(self.attaches);
                    self.volume.node_id = Some(self.node_id.clone());
                    let seen = step(&self.volume, ClaimEvent::Continue { consumer: consumer.clone() });
                    (self.volume, next) = seen.expect("a claim goes on");
                    continue;
                }
                _ => break,
            };
            assert!(
                self.attaches || effect.action == ClaimAction::NodeDetach,
                "it has no such call (CSI rule 19)"
            );
            // After the request the attachment may be there, whatever was answered.
            let is_sent = die || !matches!(outcome, ClaimOutcome::NotSent(_));
            if effect.action == ClaimAction::Attach && is_sent {
                self.world.detached.remove(&effect.node);
                assert!(
                    !self.world.unknown.contains(&effect.node),
                    "attached what is not known (CSI rule 25)"
                );
            }
            if die || matches!(outcome, ClaimOutcome::Unknown | ClaimOutcome::Hopeless(_)) {
                if effect.action != ClaimAction::NodeDetach {
                    self.world.unknown.insert(effect.node.clone());
                }
            } else if (effect.action, &outcome) == (ClaimAction::Detach, &ClaimOutcome::Done) {
                self.world.unknown.remove(&effect.node);
            }
            if happened {
                let at = self.volume.attachments.iter().find(|at| at.node == effect.node);
                let id = at.and_then(|at| at.node_id.clone()).unwrap_or_default();
                self.world.does(&effect, &id, outcome == ClaimOutcome::Done && !die);
            }
            if die {
                return;
            }
            let claimed = step(&self.volume, ClaimEvent::Ended { effect, outcome });
            let Ok((volume, following)) = claimed else { panic!("an effect's outcome was refused") };
            self.volume = volume;
            next = following;
        }
        let usable =
            |claim: &&Claim| claim.state == ClaimState::Taken && is_attached(&self.volume, &claim.node);
        for claim in self.volume.claims.iter().filter(usable) {
            self.world.mounted.entry(claim.consumer.clone()).or_insert_with(|| claim.node.clone());
        }
    }

    fn check(&self) {
        for claim in self.volume.claims.iter().filter(|claim| claim.state == ClaimState::Taken) {
            let attached = self.world.attached.contains(&claim.node);
            let said = self.attaches && is_attached(&self.volume, &claim.node);
            assert!(attached || !said, "{} has what is not attached", claim.consumer);
        }
        for node in &self.world.attached {
            assert_ne!(self.volume.leg(node), Leg::Absent, "no row explains the attachment to {node}");
        }
        for at in &self.volume.attachments {
            let claimed = self.volume.claims.iter().any(|claim| claim.node == at.node);
            assert!(claimed, "nobody will detach {}", at.node);
        }
    }
}

proptest! {
    #[test]
    fn detach_comes_once_and_after_all_users(
        attaches: bool,
        turns in proptest::collection::vec((turns(), any::<bool>()), 1..24),
        endings in proptest::collection::vec(endings(), 0..48),
    ) {
        let (volume, endings) = (volume(attaches), endings.into_iter());
        let node_id = volume.node_id.clone().unwrap();
        let mut run = Run { volume, attaches, node_id, world: World::default(), endings };
        for (turn, die) in turns {
            let name = |consumer: u8| format!("c{consumer}");

            let event = match turn {
                Turn::Claim { consumer, node, mode, access_mode } => {
                    ClaimEvent::Claim(claim(&name(consumer), &format!("n{node}"), mode, access_mode))
                }
                Turn::Release(consumer) => ClaimEvent::Release { consumer: name(consumer) },
                Turn::Continue(consumer) => ClaimEvent::Continue { consumer: name(consumer) },
                Turn::Restart => {
                    run.restart();
                    continue;
                }
                Turn::Reboot { renamed } => {
                    run.volume.boot.push('+');
                    run.node_id.push_str(if renamed { "+" } else { "" });
                    run.world.mounted.clear();
                    run.restart();
                    continue;
                }
            };
            run.turn(event, die);
            if die {
                run.restart();
            }
            run.check();
        }
        run.endings = Vec::new().into_iter();
        for claim in &run.volume.claims.clone() {
            run.turn(ClaimEvent::Release { consumer: claim.consumer.clone() }, false);
            run.check();
        }
        prop_assert!(run.volume.claims.is_empty() && run.volume.attachments.is_empty());
        prop_assert!(run.world.attached.is_empty() && run.world.mounted.is_empty());
    }
}

#[test]
fn claim_with_refused_attach_is_released() {
    let wanted = claim("a", "here", Write, SingleNodeWriter);
    let (volume, next) = step(&volume(true), ClaimEvent::Claim(wanted)).unwrap();
    let ClaimNext::Run(attach) = next else { panic!("{next:?}") };
    assert_eq!((attach.action, volume.leg("here")), (ClaimAction::Attach, Leg::Making));
    let refused =
        ClaimEvent::Ended { effect: attach, outcome: ClaimOutcome::Hopeless("INVALID_ARGUMENT".into()) };
    let (volume, next) = step(&volume, refused).unwrap();
    // The attach may have been done in part.
    let ClaimNext::Run(detach) = next else { panic!("{next:?}") };
    assert_eq!((detach.action, volume.leg("here")), (ClaimAction::Detach, Leg::Removing));
    let (volume, next) =
        step(&volume, ClaimEvent::Ended { effect: detach, outcome: ClaimOutcome::Done }).unwrap();
    assert_eq!((next, volume.claims.len(), volume.attachments.len()), (ClaimNext::Free, 0, 0));
}

#[test]
fn an_attach_that_was_not_sent_is_not_undone() {
    let wanted = claim("a", "here", Write, SingleNodeWriter);
    let not_sent = |volume: &Claims, effect: &ClaimEffect, why: Option<&str>| {
        let outcome = ClaimOutcome::NotSent(why.map(str::to_owned));
        step(volume, ClaimEvent::Ended { effect: effect.clone(), outcome }).unwrap()
    };
    let (making, next) = step(&volume(true), ClaimEvent::Claim(wanted.clone())).unwrap();
    let ClaimNext::Run(attach) = next else { panic!("{next:?}") };
    let (free, next) = not_sent(&making, &attach, Some("no such credential"));
    assert_eq!((next, free.claims.len(), free.attachments.len()), (ClaimNext::Free, 0, 0));
    let (rests, next) = not_sent(&making, &attach, None);
    assert_eq!((next, rests.leg("here")), (ClaimNext::Rest, Leg::Absent));
    let (again, next) = step(&rests, ClaimEvent::Continue { consumer: "a".into() }).unwrap();
    assert_eq!((again, next), (making, ClaimNext::Run(attach)));

    // The possible effect of an earlier try has to be rolled back all the same.
    let (tried, _) = step(&volume(true), ClaimEvent::Claim(wanted)).unwrap();
    let (tried, next) = step(&tried, ClaimEvent::Continue { consumer: "a".into() }).unwrap();
    let ClaimNext::Run(second) = next else { panic!("{next:?}") };
    assert_eq!(second.from.as_ref().map(|at| at.leg), Some(Leg::Making));
    let (_, next) = not_sent(&tried, &second, Some("no"));
    assert!(matches!(next, ClaimNext::Run(ClaimEffect { action: ClaimAction::Detach, .. })), "{next:?}");
}

#[test]
fn refused_detach_is_blocked_until_requested() {
    let mut held = holding(&[claim("a", "here", Write, SingleNodeWriter)]);
    held.attaches = Some(true);
    held.attachments.push(Attachment::new("here", Leg::Present));
    let (held, next) = step(&held, ClaimEvent::Release { consumer: "a".into() }).unwrap();
    let ClaimNext::Run(unmount) = next else { panic!("{next:?}") };
    let (held, next) =
        step(&held, ClaimEvent::Ended { effect: unmount, outcome: ClaimOutcome::Done }).unwrap();
    let ClaimNext::Run(detach) = next else { panic!("{next:?}") };
    let hopeless = ClaimOutcome::Hopeless("SecretRequired".into());
    let (parked, next) =
        step(&held, ClaimEvent::Ended { effect: detach.clone(), outcome: hopeless }).unwrap();
    assert_eq!(
        (next, parked.claims[0].blocked.as_ref().map(|blocked| &*blocked.reason)),
        (ClaimNext::Rest, Some("SecretRequired"))
    );
    assert_eq!(parked.claims[0].state, ClaimState::NodeDetached);
    let (again, next) = step(&parked, ClaimEvent::Continue { consumer: "a".into() }).unwrap();
    let detach = ClaimEffect { from: held.attachments.first().cloned().map(Box::new), ..detach };
    assert_eq!((next, &again.claims[0].blocked), (ClaimNext::Run(detach), &None));
}

#[test]
fn forgotten_claim_takes_its_attachment() {
    let two =
        [claim("a", "here", Write, MultiNodeMultiWriter), claim("b", "here", Write, MultiNodeMultiWriter)];
    let mut held = Claims { attaches: Some(true), ..holding(&two) };
    held.attachments.push(Attachment::new("here", Leg::Present));
    let (held, next) = step(&held, ClaimEvent::Forget { consumer: "a".into() }).unwrap();
    assert_eq!((next, held.leg("here")), (ClaimNext::Free, Leg::Present), "the other one has it");
    let (held, _) = step(&held, ClaimEvent::Forget { consumer: "b".into() }).unwrap();
    assert_eq!((held.leg("here"), held.claims.len()), (Leg::Absent, 0));
    assert_eq!(step(&held, ClaimEvent::Forget { consumer: "b".into() }), Err(ClaimRefusal::NoSuchClaim));
}

#[test]
fn another_boot_attaches_again_and_keeps_claims() {
    let wanted = claim("a", "here", Write, SingleNodeWriter);
    let mut held =
        Claims { attaches: Some(true), boot: "now".into(), ..holding(std::slice::from_ref(&wanted)) };
    held.attachments.push(Attachment {
        boot: Some("before".into()),
        node_id: held.node_id.clone(),
        ..Attachment::new("here", Leg::Present)
    });
    let attach = ClaimEffect {
        action: ClaimAction::Attach,
        consumer: "a".into(),
        node: "here".into(),
        from: held.attachments.first().cloned().map(Box::new),
        grant: None,
    };
    let (making, next) = step(&held, ClaimEvent::Claim(wanted.clone())).unwrap();
    assert_eq!((next, making.leg("here")), (ClaimNext::Run(attach.clone()), Leg::Making));

    let unsent = ClaimOutcome::NotSent(None);
    let mut with_others = making.clone();
    with_others.attachments[0].secrets = Some(AttachSecrets { credential: None, given: true });
    let ended = ClaimEvent::Ended { effect: attach.clone(), outcome: unsent };
    let (still, next) = step(&with_others, ended).unwrap();
    assert_eq!(
        (next, &still.attachments),
        (ClaimNext::Rest, &held.attachments),
        "also its boot and its secrets"
    );
    let refused = ClaimOutcome::Hopeless("gone".into());
    let (still, next) =
        step(&making, ClaimEvent::Ended { effect: attach.clone(), outcome: refused }).unwrap();
    assert_eq!(next, ClaimNext::Rest);
    assert!(still.claims[0].state == ClaimState::Taken && !still.claims[0].releasing);

    let (done, next) =
        step(&making, ClaimEvent::Ended { effect: attach, outcome: ClaimOutcome::Done }).unwrap();
    assert_eq!((next, done.attachments[0].boot.as_deref()), (ClaimNext::Taken, Some("now")));
    assert_eq!(
        step(&done, ClaimEvent::Claim(wanted)).unwrap(),
        (done, ClaimNext::Taken),
        "the same claim again"
    );
}

#[test]
fn volume_attached_by_call_is_not_claimed() {
    let mut held = volume(true);
    let by_call = AttachCall {
        uid: 7,
        read_only: false,
        secrets_given: false,
        capability: capability(SingleNodeWriter, FileSystem),
    };
    held.attachments
        .push(Attachment { by_call: Some(by_call), ..Attachment::new("elsewhere", Leg::Present) });
    let answer = admit(&held, &claim("a", "here", Write, MultiNodeMultiWriter));
    assert!(matches!(answer, Err(ClaimRefusal::Conflict { .. })), "{answer:?}");
}

#[test]
fn plugin_without_attach_leaves_no_attachment() {
    let one = claim("a", "here", Write, SingleNodeWriter);
    let unseen = Claims { attaches: None, ..volume(true) };
    let (pending, next) = step(&unseen, ClaimEvent::Claim(one.clone())).unwrap();
    assert_eq!((next, pending.leg("here")), (ClaimNext::Unseen, Leg::Absent), "it is not decided");
    assert!(!pending.claims[0].kept);
    let seen = Claims { attaches: Some(false), ..pending };
    let (taken, next) = step(&seen, ClaimEvent::Continue { consumer: "a".into() }).unwrap();
    assert_eq!((next, taken.attachments.len()), (ClaimNext::Taken, 0));
}

/// A call that may have attached the volume was sent. Only an acknowledged detach ends that (CSI rule 25).
#[test]
fn possible_attachment_outlives_lost_capability() {
    let lost = |held: &Claims| Claims { attaches: Some(false), ..held.clone() };
    let again = || ClaimEvent::Continue { consumer: "a".into() };
    let detaches = |held: &Claims, event: ClaimEvent, condition: &str| {
        let (left, next) = step(held, event).unwrap();
        match next {
            ClaimNext::Run(effect) if effect.action == ClaimAction::Detach => (left, effect),
            next => panic!("{condition}: {next:?}"),
        }
    };
    let wanted = claim("a", "here", Write, SingleNodeWriter);
    let (making, next) = step(&volume(true), ClaimEvent::Claim(wanted)).unwrap();
    let ClaimNext::Run(attach) = next else { panic!("{next:?}") };
    let refused = ClaimOutcome::Hopeless("FAILED_PRECONDITION".into());
    for outcome in [ClaimOutcome::Again, ClaimOutcome::Unknown, refused] {
        let condition = format!("{outcome:?}");
        let (held, _) = step(&making, ClaimEvent::Ended { effect: attach.clone(), outcome }).unwrap();
        let release = || ClaimEvent::Release { consumer: "a".into() };
        let (held, detach) = detaches(&lost(&held), release(), &condition);
        let unavailable = ClaimEvent::Ended { effect: detach, outcome: ClaimOutcome::Unknown };
        let (held, next) = step(&held, unavailable).unwrap();
        assert_eq!((next, held.leg("here")), (ClaimNext::Rest, Leg::Removing), "{condition}");
        detaches(&Claims { attaches: None, ..held.clone() }, again(), &condition);
        detaches(&held, again(), &condition);
    }
    // csid was killed while the call may have been under way.
    let (held, _) = step(&making, ClaimEvent::Recovered { node: "here".into() }).unwrap();
    detaches(&lost(&held), again(), "killed");
    // This call was not sent, so nothing is to be detached (CSI rule 19).
    let unsent = ClaimEvent::Ended { effect: attach, outcome: ClaimOutcome::NotSent(None) };
    let (held, _) = step(&making, unsent).unwrap();
    let (free, next) = step(&lost(&held), ClaimEvent::Release { consumer: "a".into() }).unwrap();
    assert_eq!((next, free.claims.len(), free.attachments.len()), (ClaimNext::Free, 0, 0));
}

fn in_cluster(node: &str, held: &[Claim]) -> Claims {
    Claims { node: Some(node.to_owned()), ..holding(held) }
}

#[test]
fn refusal_in_a_cluster_names_node_and_consumer() {
    let held = in_cluster("n2", &[claim("web", "n1", Write, SingleNodeWriter)]);
    let refused = step(&held, ClaimEvent::Claim(claim("web", "n2", Write, SingleNodeWriter)));
    let holders = vec!["n1/web".to_owned()];
    assert_eq!(refused, Err(ClaimRefusal::Conflict { what: "a single-node volume", holders }));
}

#[test]
fn consumers_of_one_name_on_two_nodes_are_two() {
    let [one, two] = ["n1", "n2"].map(|node| claim("web", node, Write, MultiNodeMultiWriter));
    let held = in_cluster("n2", std::slice::from_ref(&one));
    let (both, next) = step(&held, ClaimEvent::Claim(two)).unwrap();
    assert_eq!((next, both.claims.len()), (ClaimNext::Taken, 2));
    let (left, next) = step(&both, ClaimEvent::Detached { consumer: "web".into() }).unwrap();
    assert_eq!((next, left.claims.len()), (ClaimNext::Free, 1));
    assert_eq!(left.claims[0].node, "n1", "the other node's claim stays");
    let gone = step(&left, ClaimEvent::Detached { consumer: "web".into() });
    assert_eq!(gone, Err(ClaimRefusal::NoSuchClaim));
    let of_uid: Vec<Claim> =
        (0..OF_UID).map(|n| claim(&format!("c{n}"), "n1", Write, MultiNodeMultiWriter)).collect();
    let same_uid = claim("web", "n2", Write, MultiNodeMultiWriter);
    assert_eq!(admit(&in_cluster("n2", &of_uid), &same_uid), Ok(()), "a uid is of one host");
}

#[test]
fn detached_claim_waits_for_others_of_its_node() {
    let held = [claim("a", "n1", Write, MultiNodeMultiWriter), claim("b", "n1", Write, MultiNodeMultiWriter)];
    let mut held = Claims { attaches: Some(true), ..in_cluster("n1", &held) };
    held.attachments.push(Attachment::new("n1", Leg::Present));
    let (held, next) = step(&held, ClaimEvent::Detached { consumer: "a".into() }).unwrap();
    assert_eq!((next, held.leg("n1")), (ClaimNext::Free, Leg::Present), "the other one has it");
    let (held, next) = step(&held, ClaimEvent::Detached { consumer: "b".into() }).unwrap();
    assert!(matches!(next, ClaimNext::Run(ClaimEffect { action: ClaimAction::Detach, .. })), "{next:?}");
    assert_eq!((held.claims[0].state, held.leg("n1")), (ClaimState::NodeDetached, Leg::Removing));
}

#[test]
fn detached_claim_is_blocked_no_more() {
    let mut blocked = claim("a", "n1", Write, SingleNodeWriter);
    blocked.blocked = Some(Blocked { reason: "no credential".into() });
    let mut held = Claims { attaches: Some(true), ..in_cluster("n1", &[blocked]) };
    held.attachments.push(Attachment::new("n1", Leg::Removing));
    let (held, next) = step(&held, ClaimEvent::Detached { consumer: "a".into() }).unwrap();
    assert!(matches!(next, ClaimNext::Run(ClaimEffect { action: ClaimAction::Detach, .. })), "{next:?}");
    assert_eq!(held.claims[0].blocked, None);
}

/// A server writes the attachment with the claim, and calls later.
#[test]
fn attachment_without_a_call_is_dropped() {
    let wanted = claim("a", "n1", Write, SingleNodeWriter);
    let free = Claims { attaches: Some(true), ..in_cluster("n1", &[]) };
    let (making, next) = step(&free, ClaimEvent::Claim(wanted)).unwrap();
    assert!(making.attachments[0].uncalled && making.leg("n1") == Leg::Making);
    let ClaimNext::Run(attach) = next else { panic!("{next:?}") };
    // Another name of the node changes the intent alone.
    let renamed = Claims { node_id: Some("later".into()), ..making.clone() };
    let (again, next) = step(&renamed, ClaimEvent::Continue { consumer: "a".into() }).unwrap();
    assert_eq!(next, ClaimNext::Run(ClaimEffect { from: None, ..attach.clone() }));
    assert_eq!(again.attachments[0].node_id.as_deref(), Some("later"));
    for event in [
        ClaimEvent::Release { consumer: "a".into() },
        ClaimEvent::Detached { consumer: "a".into() },
        ClaimEvent::Ended { effect: attach.clone(), outcome: ClaimOutcome::NotSent(Some("no".into())) },
    ] {
        let (left, next) = step(&making, event).unwrap();
        assert_eq!((next, left.claims.len(), left.attachments.len()), (ClaimNext::Free, 0, 0));
    }
    let mut called = making.clone();
    called.attachments[0].uncalled = false;
    let (left, next) = step(&called, ClaimEvent::Release { consumer: "a".into() }).unwrap();
    assert!(matches!(next, ClaimNext::Run(ClaimEffect { action: ClaimAction::Detach, .. })), "{next:?}");
    assert_eq!(left.leg("n1"), Leg::Removing);
    let (_, next) = step(&called, ClaimEvent::Continue { consumer: "a".into() }).unwrap();
    let ClaimNext::Run(second) = next else { panic!("{next:?}") };
    assert_eq!(second.from.map(|at| at.leg), Some(Leg::Making), "the earlier call may have been made");
}

#[test]
fn a_uid_has_only_so_many_claims_of_a_volume() {
    let held: Vec<Claim> =
        (0..OF_UID).map(|n| claim(&format!("c{n}"), "n", Write, MultiNodeMultiWriter)).collect();
    let next = claim("one more", "n", Write, MultiNodeMultiWriter);
    assert_eq!(admit(&holding(&held), &next), Err(ClaimRefusal::TooMany));
    assert_eq!(admit(&holding(&held), &held[0]), Ok(()), "what is there may be asked for again");
    assert_eq!(admit(&holding(&held[1..]), &next), Ok(()));
    for uid in [0, 8] {
        assert_eq!(admit(&holding(&held), &Claim { uid, ..next.clone() }), Ok(()), "uid {uid}");
    }
}

/// A step costs the same for a volume with a thousand claims as for one with ten.
#[test]
fn a_step_copies_only_the_claim_it_changes() {
    for others in [10, 1_000] {
        let held: Vec<Claim> =
            (0..others).map(|n| claim(&format!("c{n:04}"), "here", Write, MultiNodeMultiWriter)).collect();
        let held = holding(&held);
        let wanted = Claim { uid: 8, ..claim("c0005+", "here", Write, MultiNodeMultiWriter) };
        let (taken, next) = step(&held, ClaimEvent::Claim(wanted)).unwrap();
        assert_eq!((next, taken.claims.len()), (ClaimNext::Taken, others + 1));
        assert_eq!(taken.claims.shared_with(&held.claims), others);
        let changed = held.claims.differences(&taken.claims);
        assert_eq!(changed, [(None, taken.claim("c0005+"))]);
        let (leaving, _) = step(&taken, ClaimEvent::Release { consumer: "c0003".into() }).unwrap();
        assert_eq!(leaving.claims.shared_with(&taken.claims), others);
        assert_eq!(
            taken.claims.differences(&leaving.claims),
            [(taken.claim("c0003"), leaving.claim("c0003"))]
        );
        let (free, next) = step(&taken, ClaimEvent::Forget { consumer: "c0005+".into() }).unwrap();
        assert_eq!((next, free.claims.shared_with(&held.claims)), (ClaimNext::Free, others));
    }
}

#[test]
fn forgotten_claim_ends_waits_for_its_detach() {
    let one = claim("a", "here", Write, SingleNodeMultiWriter);
    let two = claim("b", "here", Write, SingleNodeMultiWriter);
    let claims = holding(&[one, two]).claims;
    let mut held = Claims { claims, node_id: Some("n".into()), ..volume(true) };
    held.claims[1].state = ClaimState::Pending;
    held.claims[0].releasing = true;
    held.claims[0].state = ClaimState::NodeDetached;
    held.attachments.push(Attachment::new("here", Leg::Removing));
    let (after, next) = step(&held, ClaimEvent::Forget { consumer: "a".into() }).unwrap();
    assert_eq!((next, after.leg("here")), (ClaimNext::Free, Leg::Absent));
    let (_, next) = step(&after, ClaimEvent::Continue { consumer: "b".into() }).unwrap();
    assert!(matches!(next, ClaimNext::Run(ClaimEffect { action: ClaimAction::Attach, .. })), "{next:?}");
    // A claim that was answered keeps its attachment.
    held.claims[1].state = ClaimState::Taken;
    let (after, _) = step(&held, ClaimEvent::Forget { consumer: "a".into() }).unwrap();
    assert_eq!(after.leg("here"), Leg::Removing);
}
