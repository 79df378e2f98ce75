//! Adoption in the pure state machine, against the rules of a mount that csid made.

use super::*;
use crate::store::rows::{AccessMode, MountSpec, Restore};
use crate::volume::model::step;
use crate::volume::model::step::step;
use crate::volume::model::step::tests::{ABLE, key, volume, wanted};
use crate::volume::model::volume::{Action, MountEvent, Next, Observed, Outcome};

fn at(consumer: u8) -> Paths {
    Paths { staging: Some("/other/staging".into()), source: format!("/other/{consumer}") }
}

fn adopting(wanted: &DesiredMount, paths: Paths) -> MountEvent {
    MountEvent::Adopt { wanted: wanted.clone(), paths, abilities: ABLE, device: 7 }
}

fn adopted() -> Volume {
    let (volume, next) = step(&volume(), adopting(&wanted(1), at(1))).unwrap_or_else(|r| panic!("{r:?}"));
    assert_eq!(next, Next::Mounted, "no effect");
    volume
}

fn refusal(volume: &Volume, event: MountEvent) -> Refusal {
    step(volume, event).err().expect("a refusal")
}

#[test]
fn adopted_row_has_all_its_legs() {
    let volume = adopted();
    let row = volume.mount(&key(1)).unwrap();
    assert_eq!((volume.row.staging.as_deref(), volume.row.stage), (Some("/other/staging"), Leg::Present));
    assert_eq!((row.source.as_str(), row.publish, row.target), ("/other/1", Leg::Present, Leg::Absent));
    assert!(row.phase == Phase::Mounted && row.kept && row.device == Some(7));

    let (volume, _) =
        step(&step::tests::volume(), adopting(&wanted(2), at(2))).unwrap_or_else(|r| panic!("{r:?}"));
    assert_eq!(volume.mount(&key(2)).unwrap().target, Leg::Present, "the target that was given");
}

#[test]
fn adopting_twice_changes_nothing_unless_paths_differ() {
    let volume = adopted();
    let (again, next) = step(&volume, adopting(&wanted(1), at(1))).unwrap_or_else(|r| panic!("{r:?}"));
    assert!(again == volume && next == Next::Mounted);
    for (paths, what) in [
        (Paths { source: "/other/9".into(), ..at(1) }, "published"),
        (Paths { staging: Some("/other/9".into()), ..at(1) }, "staging"),
    ] {
        let Refusal::OtherPath { what: named, .. } = refusal(&volume, adopting(&wanted(1), paths)) else {
            panic!("{what}");
        };
        assert_eq!(named, what);
    }
    let mut other = wanted(1);
    other.spec.read_only = true;
    assert_eq!(refusal(&volume, adopting(&other, at(1))), Refusal::OtherOption { option: "read-only" });
}

#[test]
fn second_consumer_shares_the_given_staging() {
    let volume = adopted();
    let elsewhere = Paths { staging: Some("/other/9".into()), ..at(3) };
    assert!(matches!(
        refusal(&volume, adopting(&wanted(3), elsewhere)),
        Refusal::OtherPath { what: "staging", .. }
    ));
    let same = Paths { source: "/other/1".into(), ..at(3) };
    assert!(matches!(
        refusal(&volume, adopting(&wanted(3), same)),
        Refusal::Conflict { what: "the path", .. }
    ));

    let own = Paths { staging: Some("/staging".into()), source: "/publish/3".into() };
    let event = MountEvent::Mount { wanted: wanted(3), paths: own, abilities: ABLE };
    let (mounting, next) = step(&volume, event).unwrap_or_else(|r| panic!("{r:?}"));
    let Next::Run(effect) = next else { panic!("{next:?}") };
    assert_eq!((effect.action, mounting.row.staging.as_deref()), (Action::Publish, Some("/other/staging")));
}

#[test]
fn access_modes_hold_for_adoption_too() {
    let single = |consumer| {
        let DesiredMount { key, uid, spec, operations } = wanted(consumer);
        let usage = step::tests::usage(AccessMode::SingleNodeWriter);
        DesiredMount { key, uid, spec: MountSpec { usage, ..spec }, operations }
    };
    let (volume, _) = step(&volume(), adopting(&single(1), at(1))).unwrap_or_else(|r| panic!("{r:?}"));
    assert!(matches!(
        refusal(&volume, adopting(&single(3), at(3))),
        Refusal::Conflict { what: "a second consumer", .. }
    ));
}

#[test]
fn adopted_mount_is_unmounted_like_any_other() {
    let mut volume = adopted();
    let (unmounting, mut next) =
        step(&volume, MountEvent::Unmount { key: key(1) }).unwrap_or_else(|r| panic!("{r:?}"));
    volume = unmounting;
    let mut done = Vec::new();
    while let Next::Run(effect) = next {
        done.push(effect.action);
        assert_eq!(volume.row.staging.as_deref(), Some("/other/staging"));
        let event = MountEvent::Ended { effect, outcome: Outcome::Done { device: None }, error: None };
        (volume, next) = step(&volume, event).unwrap_or_else(|r| panic!("{r:?}"));
    }
    assert_eq!((done.as_slice(), next), (&[Action::Unpublish, Action::Unstage][..], Next::Gone));
}

#[test]
fn adoption_is_repeated_after_another_boot() {
    for restore in [Restore::Hold, Restore::Auto] {
        let mut wanted = wanted(1);
        wanted.spec.restore = restore;
        let (volume, _) = step(&volume(), adopting(&wanted, at(1))).unwrap_or_else(|r| panic!("{r:?}"));
        let booted = MountEvent::Recovered { same_boot: false, sights: vec![Observed::Gone] };
        let (volume, _) = step(&volume, booted).unwrap_or_else(|r| panic!("{r:?}"));
        let row = volume.mount(&key(1)).unwrap();
        assert!(volume.row.stage == Leg::Absent && row.publish == Leg::Absent && row.phase != Phase::Mounted);
        let elsewhere = Paths { staging: Some("/third/staging".into()), source: "/third/1".into() };
        let (volume, next) = step(&volume, adopting(&wanted, elsewhere)).unwrap_or_else(|r| panic!("{r:?}"));
        let row = volume.mount(&key(1)).unwrap();
        assert!(next == Next::Mounted && volume.mounts.len() == 1 && row.phase == Phase::Mounted);
        assert_eq!(
            (row.source.as_str(), volume.row.staging.as_deref()),
            ("/third/1", Some("/third/staging"))
        );
    }
}

#[test]
fn mount_being_removed_is_not_adopted() {
    let (volume, _) =
        step(&adopted(), MountEvent::Unmount { key: key(1) }).unwrap_or_else(|r| panic!("{r:?}"));
    assert_eq!(refusal(&volume, adopting(&wanted(1), at(1))), Refusal::Unsettled);
}
