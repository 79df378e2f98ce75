//! Tests `step` for a node of a cluster, whose claims the servers grant. Whatever the events, and however the calls end, a consumer has a
//! volume only while the servers have its claim, and a row explains each claim that the servers have.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::tests::{claim, holding, volume};
use super::*;
use crate::volume::model::call_name::name_call;
use AccessMode::MultiNodeMultiWriter;
use ClaimMode::Write;

fn wanted(consumer: &str) -> Claim {
    Claim { call: format!("call of {consumer}"), ..claim(consumer, "here", Write, MultiNodeMultiWriter) }
}

/// Returns a claim that a server granted in this boot.
fn granted_in(boot: &str) -> Claim {
    let grant = Grant { boot: Some(boot.into()), ..Grant::new("prod".into(), Leg::Present) };
    Claim { grant: Some(grant), ..wanted("a") }
}

fn alone() -> Claims {
    Claims { cluster: Some("prod".into()), boot: "boot 1".into(), ..volume(false) }
}

/// Steps, and returns the effect that has to follow.
fn run(volume: &Claims, event: ClaimEvent, action: ClaimAction) -> (Claims, ClaimEffect) {
    let (volume, next) = step(volume, event).unwrap();
    let ClaimNext::Run(effect) = next else { panic!("{next:?}") };
    assert_eq!(effect.action, action);
    (volume, effect)
}

fn ended(effect: ClaimEffect, outcome: ClaimOutcome) -> ClaimEvent {
    ClaimEvent::Ended { effect, outcome }
}

fn leg(volume: &Claims) -> Option<Leg> {
    volume.claims.iter().next().and_then(|claim| claim.grant.as_ref()).map(|grant| grant.leg)
}

#[test]
fn server_grants_first_and_hears_the_end_last() {
    let (asking, effect) = run(&alone(), ClaimEvent::Claim(wanted("a")), ClaimAction::ServerClaim);
    assert_eq!((leg(&asking), asking.claims[0].state), (Some(Leg::Making), ClaimState::Pending));
    let (taken, next) = step(&asking, ended(effect, ClaimOutcome::Done)).unwrap();
    assert_eq!((next, leg(&taken)), (ClaimNext::Taken, Some(Leg::Present)));
    let release = ClaimEvent::Release { consumer: "a".into() };
    let (leaving, effect) = run(&taken, release, ClaimAction::NodeDetach);
    let (reported, effect) = run(&leaving, ended(effect, ClaimOutcome::Done), ClaimAction::ServerDetached);
    assert_eq!(leg(&reported), Some(Leg::Removing));
    let (rests, next) = step(&reported, ended(effect.clone(), ClaimOutcome::NotSent(None))).unwrap();
    assert_eq!((next, leg(&rests)), (ClaimNext::Rest, Some(Leg::Removing)));
    let (free, next) = step(&rests, ended(effect, ClaimOutcome::Done)).unwrap();
    assert_eq!((next, free.claims.len()), (ClaimNext::Free, 0));
}

#[test]
fn later_call_has_the_claim_at_a_server() {
    let by = |place| {
        let call = name_call("node/here/boot", place, "r");
        Claim { call, id: format!("id {place}"), ..wanted("a") }
    };
    for (node, later) in [(Some("here".to_owned()), 2), (None, 1)] {
        // csid's own row keeps the name that the servers know.
        let empty = Claims { node, ..volume(false) };
        let (mut held, _) = step(&empty, ClaimEvent::Claim(by(1))).unwrap();
        for place in [2, 1, 0] {
            let next;
            (held, next) = step(&held, ClaimEvent::Claim(by(place))).unwrap();
            assert_eq!(
                (next, held.claims.len(), name_of(&held.claims[0])),
                (ClaimNext::Taken, 1, name_of(&by(later)))
            );
        }
        let released = Claims { claims: ClaimSet::from_iter([Claim { releasing: true, ..by(1) }]), ..held };
        assert_eq!(step(&released, ClaimEvent::Claim(by(2))), Err(ClaimRefusal::Releasing));
    }
}

fn name_of(claim: &Claim) -> (String, String) {
    (claim.call.clone(), claim.id.clone())
}

/// The servers attach. This host's csid calls no controller, also after it has left the cluster.
#[test]
fn attachment_of_the_servers_is_theirs_to_end() {
    for cluster in [Some("prod".to_owned()), None] {
        let attachment = Attachment { boot: Some("boot 1".into()), ..Attachment::new("here", Leg::Present) };
        let held = Claims {
            cluster,
            boot: "boot 1".into(),
            attachments: vec![attachment],
            ..holding(&[granted_in("boot 1")])
        };
        let release = ClaimEvent::Release { consumer: "a".into() };
        let (leaving, effect) = run(&held, release, ClaimAction::NodeDetach);
        let (left, _) = run(&leaving, ended(effect, ClaimOutcome::Done), ClaimAction::ServerDetached);
        assert!(left.attachments.is_empty());
    }
}

#[test]
fn refused_claim_leaves_nothing_to_report() {
    for outcome in [ClaimOutcome::Hopeless("held".into()), ClaimOutcome::NotSent(Some("no".into()))] {
        let (asking, effect) = run(&alone(), ClaimEvent::Claim(wanted("a")), ClaimAction::ServerClaim);
        let (free, next) = step(&asking, ended(effect, outcome)).unwrap();
        assert_eq!((next, free.claims.len()), (ClaimNext::Free, 0));
    }
}

#[test]
fn refusal_after_an_unknown_answer_is_reported() {
    let (asking, effect) = run(&alone(), ClaimEvent::Claim(wanted("a")), ClaimAction::ServerClaim);
    let (rests, next) = step(&asking, ended(effect, ClaimOutcome::Unknown)).unwrap();
    assert_eq!((next, leg(&rests)), (ClaimNext::Rest, Some(Leg::Making)));
    let again = ClaimEvent::Continue { consumer: "a".into() };
    let (asking, effect) = run(&rests, again, ClaimAction::ServerClaim);
    let refused = ended(effect, ClaimOutcome::Hopeless("held".into()));
    run(&asking, refused, ClaimAction::ServerDetached);
}

#[test]
fn claim_is_granted_again_in_another_boot() {
    let granted = granted_in("boot 0");
    let held = Claims { cluster: Some("prod".into()), boot: "boot 1".into(), ..holding(&[granted]) };
    let (asking, effect) = run(&held, ClaimEvent::Claim(wanted("a")), ClaimAction::ServerClaim);
    // An answered claim stays, whatever the servers say.
    let refused = ended(effect.clone(), ClaimOutcome::Hopeless("held by n2".into()));
    let (kept, next) = step(&asking, refused).unwrap();
    assert_eq!((next, kept.claims.len(), leg(&kept)), (ClaimNext::Rest, 1, Some(Leg::Present)));
    assert!(!kept.is_granted(&kept.claims[0]));
    let (taken, next) = step(&asking, ended(effect, ClaimOutcome::Done)).unwrap();
    assert_eq!((next, taken.is_granted(&taken.claims[0])), (ClaimNext::Taken, true));
}

#[test]
fn end_of_a_forgotten_claim_is_reported() {
    let granted = granted_in("boot 1");
    let held = Claims { cluster: Some("prod".into()), boot: "boot 1".into(), ..holding(&[granted]) };
    let (forgotten, next) = step(&held, ClaimEvent::Forget { consumer: "a".into() }).unwrap();
    assert_eq!((next, forgotten.claims.len()), (ClaimNext::Free, 1));
    let (_, effect) =
        run(&forgotten, ClaimEvent::Release { consumer: "a".into() }, ClaimAction::ServerDetached);
    let (free, next) = step(&forgotten, ended(effect, ClaimOutcome::Done)).unwrap();
    assert_eq!((next, free.claims.len()), (ClaimNext::Free, 0));
}

#[test]
fn host_that_left_its_cluster_needs_the_grant() {
    let left = |boot: &str| Claims { boot: boot.into(), ..holding(&[granted_in("boot 1")]) };
    let (_, next) = step(&left("boot 1"), ClaimEvent::Claim(wanted("a"))).unwrap();
    assert_eq!(next, ClaimNext::Taken);
    run(&left("boot 2"), ClaimEvent::Claim(wanted("a")), ClaimAction::ServerClaim);
    let other = Claims { cluster: Some("test".into()), ..left("boot 1") };
    run(&other, ClaimEvent::Claim(wanted("a")), ClaimAction::ServerClaim);
    let (free, next) = step(&left("boot 2"), ClaimEvent::Forget { consumer: "a".into() }).unwrap();
    assert_eq!((next, free.claims.len()), (ClaimNext::Free, 0));
}

#[test]
fn claim_that_the_servers_ended_is_granted_again() {
    let mut held =
        Claims { cluster: Some("prod".into()), boot: "boot 1".into(), ..holding(&[granted_in("boot 1")]) };
    assert!(Claims::lose_grant(held.claims.get_mut("a").unwrap()));
    assert!(!Claims::lose_grant(held.claims.get_mut("a").unwrap()), "it is lost once");
    let (asking, effect) = run(&held, ClaimEvent::Claim(wanted("a")), ClaimAction::ServerClaim);
    let (kept, next) = step(&asking, ended(effect, ClaimOutcome::Hopeless("held by n2".into()))).unwrap();
    assert_eq!((next, kept.claims.len(), leg(&kept)), (ClaimNext::Rest, 1, Some(Leg::Absent)));
    let release = ClaimEvent::Release { consumer: "a".into() };
    let (leaving, effect) = run(&kept, release, ClaimAction::NodeDetach);
    // The servers may have granted it meanwhile, and not have been heard.
    run(&leaving, ended(effect, ClaimOutcome::Done), ClaimAction::ServerDetached);
}

/// A server that recovers from a backup grants nothing. The node has to say the claim all the same.
#[test]
fn claim_is_in_use_while_it_is_asked_for_after_a_boot() {
    let held =
        |boot: &str, claim| Claims { cluster: Some("prod".into()), boot: boot.into(), ..holding(&[claim]) };
    let is_in_use = |of: &Claims| Claims::is_in_use(&of.claims[0]);
    let rebooted = held("boot 2", granted_in("boot 1"));
    let (asking, effect) = run(&rebooted, ClaimEvent::Claim(wanted("a")), ClaimAction::ServerClaim);
    assert!(leg(&asking) == Some(Leg::Making) && is_in_use(&asking));
    let (open, _) = step(&asking, ended(effect, ClaimOutcome::Unknown)).unwrap();
    assert!(leg(&open) == Some(Leg::Making) && is_in_use(&open));
    // The servers have ended this one before.
    let mut lost = held("boot 1", granted_in("boot 1"));
    Claims::lose_grant(lost.claims.get_mut("a").unwrap());
    assert!(!is_in_use(&lost));
    let (asking, _) = run(&lost, ClaimEvent::Claim(wanted("a")), ClaimAction::ServerClaim);
    assert!(leg(&asking) == Some(Leg::Making) && !is_in_use(&asking));
    // No server has granted this one yet.
    let (asking, _) =
        run(&held("boot 1", wanted("a")), ClaimEvent::Claim(wanted("a")), ClaimAction::ServerClaim);
    assert!(!is_in_use(&asking));
}

#[test]
fn failed_claim_leaves_a_mounts_claim_as_it_was() {
    let by_mount = Claim { by_mount: true, ..granted_in("boot 0") };
    let held = Claims { cluster: Some("prod".into()), boot: "boot 1".into(), ..holding(&[by_mount]) };
    let (asking, effect) = run(&held, ClaimEvent::Claim(wanted("a")), ClaimAction::ServerClaim);
    assert!(asking.claims[0].by_mount);
    let (granted, _) = step(&asking, ended(effect, ClaimOutcome::Done)).unwrap();
    let (taken, next) = step(&granted, ClaimEvent::Claim(wanted("a"))).unwrap();
    assert_eq!((next, taken.claims[0].by_mount), (ClaimNext::Taken, false));
}

#[derive(Clone, Debug)]
enum Turn {
    Claim(u8),
    Release(u8),
    Continue(u8),
    Forget(u8),
    /// An operator ends the claim at the servers, and csid learns it.
    Lose(u8),
    Restart,
    Reboot,
}

fn turns() -> impl Strategy<Value = Turn> {
    prop_oneof![
        4 => (0..3_u8).prop_map(Turn::Claim),
        3 => (0..3_u8).prop_map(Turn::Release),
        2 => (0..3_u8).prop_map(Turn::Continue),
        1 => (0..3_u8).prop_map(Turn::Forget),
        1 => (0..3_u8).prop_map(Turn::Lose),
        1 => Just(Turn::Restart),
        1 => Just(Turn::Reboot),
    ]
}

/// Returns how a call ends, and whether it had its effect.
fn endings() -> impl Strategy<Value = (ClaimOutcome, bool)> {
    prop_oneof![
        4 => Just((ClaimOutcome::Done, true)),
        1 => Just((ClaimOutcome::Again, false)),
        1 => Just((ClaimOutcome::NotSent(None), false)),
        2 => any::<bool>().prop_map(|happened| (ClaimOutcome::Unknown, happened)),
        1 => Just((ClaimOutcome::Hopeless("no".to_owned()), false)),
    ]
}

struct Run {
    volume: Claims,
    /// Consumers whose claims the servers have.
    at_servers: BTreeSet<String>,
    /// Consumers that may have mounts.
    mounted: BTreeSet<String>,
    endings: std::vec::IntoIter<(ClaimOutcome, bool)>,
}

impl Run {
    /// Runs one event and its effects to their end. `die`: csid is killed in the first effect, whose intent is written.
    fn turn(&mut self, event: ClaimEvent, die: bool) {
        if let ClaimEvent::Forget { consumer } = &event {
            self.mounted.remove(consumer);
        }
        let Ok((volume, mut next)) = step(&self.volume, event) else { return };
        self.volume = volume;
        while let ClaimNext::Run(effect) = next {
            let (outcome, happened) = self.endings.next().unwrap_or((ClaimOutcome::Done, true));
            let consumer = effect.consumer.clone();
            match effect.action {
                ClaimAction::ServerClaim if happened => drop(self.at_servers.insert(consumer)),
                ClaimAction::ServerDetached => {
                    assert!(
                        !self.mounted.contains(&consumer),
                        "{consumer} is mounted, and the servers hear of its end"
                    );
                    if happened {
                        self.at_servers.remove(&consumer);
                    }
                }
                ClaimAction::NodeDetach if happened => drop(self.mounted.remove(&consumer)),
                ClaimAction::ServerClaim | ClaimAction::NodeDetach => {}
                action => panic!("{action:?} is the servers' business"),
            }
            if die {
                return;
            }
            let (volume, following) = step(&self.volume, ended(effect, outcome)).expect("an outcome");
            self.volume = volume;
            next = following;
        }
        for claim in self.volume.claims.iter().filter(|claim| claim.state == ClaimState::Taken) {
            if self.volume.is_granted(claim) && !claim.releasing {
                self.mounted.insert(claim.consumer.clone());
            }
        }
    }

    fn check(&self) {
        for consumer in &self.mounted {
            assert!(self.at_servers.contains(consumer), "{consumer} has what the servers may give to others");
        }
        for consumer in &self.at_servers {
            let grant = self.volume.claim(consumer).and_then(|claim| claim.grant.as_ref());
            assert!(grant.is_some(), "no row explains the servers' claim of {consumer}");
        }
    }
}

proptest! {
    #[test]
    fn consumer_has_only_what_the_servers_gave(
        turns in proptest::collection::vec((turns(), any::<bool>()), 1..24),
        endings in proptest::collection::vec(endings(), 0..48),
    ) {
        let (at_servers, mounted) = Default::default();
        let mut run = Run { volume: alone(), at_servers, mounted, endings: endings.into_iter() };
        let restart = |run: &mut Run| run.turn(ClaimEvent::Recovered { node: "here".into() }, false);
        for (turn, die) in turns {
            let name = |consumer: u8| format!("c{consumer}");
            let event = match turn {
                Turn::Claim(consumer) => ClaimEvent::Claim(wanted(&name(consumer))),
                Turn::Release(consumer) => ClaimEvent::Release { consumer: name(consumer) },
                Turn::Continue(consumer) => ClaimEvent::Continue { consumer: name(consumer) },
                Turn::Forget(consumer) => ClaimEvent::Forget { consumer: name(consumer) },
                Turn::Lose(consumer) => {
                    let consumer = name(consumer);
                    let claim = run.volume.claims.get_mut(&consumer);
                    if claim.is_some_and(Claims::lose_grant) {
                        // The operator answers for what is mounted.
                        run.at_servers.remove(&consumer);
                        run.mounted.remove(&consumer);
                    }
                    run.check();
                    continue;
                }
                Turn::Restart => {
                    restart(&mut run);
                    continue;
                }
                Turn::Reboot => {
                    run.volume.boot.push('+');
                    run.mounted.clear();
                    restart(&mut run);
                    continue;
                }
            };
            run.turn(event, die);
            if die {
                restart(&mut run);
            }
            run.check();
        }
        run.endings = Vec::new().into_iter();
        for claim in &run.volume.claims.clone() {
            run.turn(ClaimEvent::Release { consumer: claim.consumer.clone() }, false);
            run.check();
        }
        prop_assert!(run.volume.claims.is_empty() && run.at_servers.is_empty() && run.mounted.is_empty());
    }
}
