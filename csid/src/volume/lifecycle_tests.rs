use super::*;
use crate::store::registry::Capability;
use crate::store::rows::{AccessMode, AttachmentMode};

fn creation() -> Creation {
    Creation {
        capacity_min: 10,
        capacity_max: 20,
        register: true,
        secrets_given: false,
        source: String::new(),
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
    let volume = VolumeKey { plugin: "p".into(), external_id: external_id.into() };
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

#[test]
fn different_create_volume_is_refused() {
    let kind = |record: &Record, plugin: &str, wanted: &Registration| {
        refuse_other(record, plugin, wanted).unwrap_err().kind
    };
    for record in [record("", wanted()), made(|_| {})] {
        assert_eq!(kind(&record, "q", &wanted()), Kind::AlreadyExists);
        assert_eq!(kind(&record, "p", &Registration { uid: 1001, ..wanted() }), Kind::NotAuthorized);
        assert_eq!(refuse_other(&record, "p", &Registration { uid: 0, ..wanted() }), Ok(()));
        let changes: [fn(&mut VolumeSpec); 5] = [
            |spec| spec.name = "other".into(),
            |spec| spec.snapshot = "snap".into(),
            |spec| spec.suid = true,
            |spec| spec.capabilities.clear(),
            |spec| drop(spec.parameters.insert("tier".into(), "1".into())),
        ];
        for change in changes {
            let mut other = wanted();
            change(&mut other.spec);
            assert_eq!(kind(&record, "p", &other), Kind::AlreadyExists);
        }
        let larger = Creation { capacity_min: 16, ..creation() };
        let larger = Registration { standing: Standing::Creating(larger), ..wanted() };
        assert_eq!(kind(&record, "p", &larger), Kind::AlreadyExists);
    }
    let elsewhere = |of: &mut Registration| of.spec.topologies.clear();
    let mut other = wanted();
    elsewhere(&mut other);
    assert_eq!(kind(&record("", wanted()), "p", &other), Kind::AlreadyExists);
    let going = made(|of| of.standing = Standing::Deleting { secrets_given: false, back: None });
    assert_eq!(kind(&going, "p", &wanted()), Kind::Busy);
}

#[test]
fn volume_without_id_queues_by_its_name() {
    let unborn = record("", wanted());
    assert_eq!(queue_key(&unborn), paths::unborn("p", "disk"));
    assert_eq!(queue_key(&made(|_| {})).external_id, "x");
    let unfetched = made(|of| of.standing = Standing::Creating(creation()));
    assert_eq!(queue_key(&unfetched).external_id, "x");
}

#[test]
fn identity_fields_are_immutable() {
    let name = VolumeName { namespace: "ns".into(), volume: "v".into() };
    let volume = |plugin: &str, id: &str| VolumeKey { plugin: plugin.into(), external_id: id.into() };
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
    let leaving =
        Registration { standing: Standing::Deleting { secrets_given: false, back: None }, ..present };
    assert_eq!(change(&leaving, 7, volume("p", "x"), &flags), Some(Kind::Busy));
}
