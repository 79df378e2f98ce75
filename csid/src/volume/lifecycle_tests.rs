use super::*;
use crate::store::registry::Capability;
use crate::store::rows::{AccessMode, AttachmentMode};

fn creation() -> Creation {
    Creation {
        capacity_min: 10,
        capacity_max: 20,
        register: true,
        secrets_given: false,
        source: None,
        sourceless: false,
        ..Creation::default()
    }
}

fn wanted() -> Registration {
    let capability =
        Capability { access_mode: AccessMode::SingleNodeWriter, attachment_mode: AttachmentMode::FileSystem };
    let spec = VolumeSpec {
        name: "disk".into(),
        capabilities: vec![capability],
        topologies: vec![[("zone".to_owned(), "a".to_owned())].into()],
        ..VolumeSpec::default()
    };
    Registration { standing: Standing::Creating(creation()), ..new_registration(1000, spec, Origin::Bus) }
}

fn record(external_id: &str, registration: Registration) -> Record {
    let name = VolumeName { namespace: "ns".into(), volume: "v".into() };
    let volume = match external_id {
        "" => VolumeKey::creating("p", &registration.spec.name),
        id => VolumeKey::new("p", id),
    };
    Record { volume, registration: Some(registration), ..Record::none(name) }
}

/// Returns a record as the plugin's answer leaves it, with `change`.
fn made(change: impl FnOnce(&mut Registration)) -> Record {
    let mut registration = Registration { capacity: Some(15), standing: Standing::Registered, ..wanted() };
    registration.spec.context = [("born".to_owned(), "now".to_owned())].into();
    registration.spec.topologies = vec![[("zone".to_owned(), "b".to_owned())].into()];
    change(&mut registration);
    record("x", registration)
}

#[test]
fn repeated_create_volume_matches_its_record() {
    let same = |record: &Record| refuse_other(record, "p", &wanted());
    assert_eq!(same(&record("", wanted())), Ok(()));
    assert_eq!(same(&made(|_| {})), Ok(()));
    assert_eq!(same(&made(|of| of.spec.credential = Some("csid.ns.key".into()))), Ok(()));
    assert_eq!(same(&made(|of| of.capacity = None)), Ok(()), "a plugin need not say");
    let unfetched = Creation { register: false, ..creation() };
    let asks = Registration { standing: Standing::Creating(unfetched.clone()), ..wanted() };
    let left = made(|of| of.standing = Standing::Creating(unfetched));
    assert_eq!(refuse_other(&left, "p", &asks), Ok(()));
    assert_eq!(refuse_other(&left, "p", &wanted()).unwrap_err().kind, Kind::AlreadyExists);
    assert_eq!(refuse_other(&made(|_| {}), "p", &asks).unwrap_err().kind, Kind::AlreadyExists);
}

/// An option, and a change of it.
type Change = (&'static str, fn(&mut VolumeSpec));

#[test]
fn different_create_volume_names_the_option() {
    let refused = |record: &Record, plugin: &str, wanted: &Registration| {
        refuse_other(record, plugin, wanted).unwrap_err()
    };
    let names = |record: &Record, plugin: &str, wanted: &Registration, option: &str| {
        let error = refused(record, plugin, wanted);
        assert_eq!(error.kind, Kind::AlreadyExists);
        assert!(error.message.ends_with(&format!("with another {option}")), "{option}: {error}");
    };
    for record in [record("", wanted()), made(|_| {})] {
        names(&record, "q", &wanted(), "plugin");
        let others = Registration { uid: 1001, ..wanted() };
        assert_eq!(refused(&record, "p", &others).kind, Kind::NotAuthorized);
        assert_eq!(refuse_other(&record, "p", &Registration { uid: 0, ..wanted() }), Ok(()));
        let changes: [Change; 11] = [
            ("name", |spec| spec.name = "other".into()),
            ("capabilities", |spec| spec.capabilities.clear()),
            ("fs-type", |spec| spec.fs_type = "xfs".into()),
            ("mount-flags", |spec| spec.mount_flags.push("noatime".into())),
            ("mount-group", |spec| spec.mount_group = "7".into()),
            ("parameters", |spec| drop(spec.parameters.insert("tier".into(), "1".into()))),
            ("heal", |spec| spec.heal = Heal::Remount),
            ("suid", |spec| spec.suid = true),
            ("dev", |spec| spec.dev = true),
            ("snapshot", |spec| spec.snapshot = "snap".into()),
            ("clone", |spec| spec.clone = "other".into()),
        ];
        for (option, change) in changes {
            let mut other = wanted();
            change(&mut other.spec);
            names(&record, "p", &other, option);
        }
        let larger = Creation { capacity_min: 16, ..creation() };
        names(
            &record,
            "p",
            &Registration { standing: Standing::Creating(larger), ..wanted() },
            "capacity-min",
        );
        let not_kept = Creation { register: false, ..creation() };
        let not_kept = Registration { standing: Standing::Creating(not_kept), ..wanted() };
        names(&record, "p", &not_kept, "register");
    }
    let mut other = wanted();
    other.spec.topologies.clear();
    names(&record("", wanted()), "p", &other, "topologies");
    let going =
        made(|of| of.standing = Standing::Deleting { secrets_given: false, back: None, unasked: false });
    assert_eq!(refused(&going, "p", &wanted()).kind, Kind::Busy);
}

#[test]
fn creation_belongs_to_the_queue_of_its_name() {
    let task = VolumeKey::creating("p", "disk");
    assert!(is_asked_for_by(&record("", wanted()), &task));
    assert!(!is_asked_for_by(&record("", wanted()), &VolumeKey::creating("p", "other")));
    let unfetched = made(|of| of.standing = Standing::Creating(creation()));
    assert!(!is_asked_for_by(&unfetched, &task) && !is_asked_for_by(&unfetched, &unfetched.volume));
}

#[test]
fn only_a_plugins_own_id_is_sent_to_it() {
    let subject = Subject::Volume(record("", wanted()).name);
    let sent = |key: &VolumeKey| known_id(key, &subject).map(str::to_owned).map_err(|error| error.kind);
    assert_eq!(sent(&VolumeKey::new("p", "x")), Ok("x".to_owned()));
    assert_eq!(sent(&VolumeKey::creating("p", "disk")), Err(Kind::Busy));
    let lost = VolumeKey::lost("p", "d41d8cd98f00b204e9800998ecf8427e");
    assert_eq!(sent(&lost), Err(Kind::Uncertain));
    assert_eq!(lost, VolumeKey::new("p", lost.handle.text()), "as the journal has it");
}

#[test]
fn identity_fields_are_immutable() {
    let name = VolumeName { namespace: "ns".into(), volume: "v".into() };
    let volume = |plugin: &str, id: &str| VolumeKey::new(plugin, id);
    let present = new_registration(7, VolumeSpec::default(), Origin::Bus);
    let change = |present: &Registration, uid, to: VolumeKey, spec: &VolumeSpec| {
        let new = new_registration(uid, spec.clone(), Origin::Bus);
        may_change(&name, &volume("p", "x"), present, &to, &new).err().map(|error| error.kind)
    };
    let same = VolumeSpec::default();
    let flags = VolumeSpec { mount_flags: vec!["noatime".into()], ..VolumeSpec::default() };
    let clone = VolumeSpec { clone: "y".into(), ..VolumeSpec::default() };
    let snapshot = VolumeSpec { snapshot: "y".into(), ..VolumeSpec::default() };
    let parameters = VolumeSpec { parameters: [("a".into(), "b".into())].into(), ..VolumeSpec::default() };
    for (uid, to, spec, refused) in [
        (7, volume("p", "x"), &flags, None),
        (0, volume("p", "x"), &flags, None),
        (8, volume("p", "x"), &flags, Some(Kind::NotAuthorized)),
        (7, volume("q", "x"), &same, Some(Kind::AlreadyExists)),
        (7, volume("p", "y"), &same, Some(Kind::AlreadyExists)),
        (7, volume("p", "x"), &clone, Some(Kind::AlreadyExists)),
        (7, volume("p", "x"), &snapshot, Some(Kind::AlreadyExists)),
        (7, volume("p", "x"), &parameters, Some(Kind::AlreadyExists)),
    ] {
        assert_eq!(change(&present, uid, to, spec), refused);
    }
    let leaving = Registration {
        standing: Standing::Deleting { secrets_given: false, back: None, unasked: false },
        ..present
    };
    assert_eq!(change(&leaving, 7, volume("p", "x"), &flags), Some(Kind::Busy));
}
