//! Controller calls, and the node calls of what is mounted: what is sent, what comes back, and what is not asked at all.

use csi_proto::csi::v1;
use tonic::Code;
use v1::plugin_capability::{Service as PluginService, Type, VolumeExpansion};
use v1::validate_volume_capabilities_response::Confirmed;
use v1::volume_capability::{AccessType, access_mode::Mode};

use super::calls::{call, usage};
use super::*;
use crate::Kind;
use crate::plugin::{CallContext, Class, Controller, Create, Measure, NodeCall, Snapshot, Source};
use crate::secret::Secrets;
use crate::store::rows::{AccessMode, Usage};

/// CSI's numbers of a controller's capabilities.
pub const ALL: [i32; 13] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13];

/// CONTROLLER_SERVICE, and more of its kind.
pub fn services(more: &[i32]) -> Vec<v1::PluginCapability> {
    let service = |r#type: &i32| Type::Service(PluginService { r#type: *r#type });
    let offline = Type::VolumeExpansion(VolumeExpansion { r#type: 2 });
    let types = [1].iter().chain(more).map(service).chain([offline]);
    types.map(|r#type| v1::PluginCapability { r#type: Some(r#type) }).collect()
}

pub async fn with(controller: &[i32], plugin: &[i32]) -> (Host, Fake, Controller) {
    let host = Host::new();
    let mut fake = host.fake();
    fake.script().plugin_capabilities = services(plugin);
    fake.script().controller_capabilities = controller.to_vec();
    fake.start();
    host.register(&fake).await;
    let controller = host.plugins.controller("p", "ValidateVolumeCapabilities", soon(LONG)).await.unwrap();
    (host, fake, controller)
}

pub fn secrets() -> Secrets {
    Secrets::from_json(br#"{"key":"hunter2"}"#).unwrap()
}

pub fn request(secrets: Option<&Secrets>) -> CallContext<'_> {
    CallContext { uid: 0, secrets, secrets_forgotten: false, patience: LONG }
}

pub fn map(key: &str, value: &str) -> BTreeMap<String, String> {
    [(key.to_owned(), value.to_owned())].into()
}

#[tokio::test]
async fn attach_sends_all_fields_and_returns_its_context() {
    let (_host, fake, controller) = with(&[2, 8, 13], &[]).await;
    assert!(
        controller.can("PUBLISH_READONLY") && controller.can("OFFLINE") && !controller.can("GET_CAPACITY")
    );
    let context = map("device", "/dev/x");
    fake.says(v1::ControllerPublishVolumeResponse { publish_context: context.clone() });
    let (usage, secrets) = (usage(), secrets());
    let attached =
        controller.publish("vol-1", " node/1", &usage, true, request(Some(&secrets))).await.unwrap();
    assert_eq!(attached, context);
    let sent: v1::ControllerPublishVolumeRequest = fake.got();
    assert_eq!((sent.volume_id.as_str(), sent.node_id.as_str(), sent.readonly), ("vol-1", " node/1", true));
    assert_eq!((&sent.secrets, &sent.volume_context), (&map("key", "hunter2"), &usage.context));
    let capability = sent.volume_capability.unwrap();
    assert_eq!(capability.access_mode.unwrap().mode(), Mode::SingleNodeSingleWriter);
    let Some(AccessType::Mount(mount)) = capability.access_type else { panic!("no mount") };
    assert_eq!((mount.fs_type.as_str(), mount.mount_flags), ("ext4", usage.mount_flags.clone()));
    assert_eq!(mount.volume_mount_group, "", "which is a node's capability");

    // Rule 33: the detach has the attach's secrets.
    controller.unpublish("vol-1", " node/1", request(Some(&secrets))).await.unwrap();
    let sent: v1::ControllerUnpublishVolumeRequest = fake.got();
    assert_eq!((sent.volume_id.as_str(), sent.node_id.as_str()), ("vol-1", " node/1"));
    assert_eq!(sent.secrets, map("key", "hunter2"));
}

#[tokio::test]
async fn co_rule_32_read_only_needs_the_capability() {
    let (_host, fake, controller) = with(&[2], &[]).await;
    controller.publish("v", "n", &usage(), true, request(None)).await.unwrap();
    let sent: v1::ControllerPublishVolumeRequest = fake.got();
    assert!(!sent.readonly);
    // Nor does it know the newer words for one writer.
    assert_eq!(sent.volume_capability.unwrap().access_mode.unwrap().mode(), Mode::SingleNodeWriter);
}

/// To CSI it means every node.
#[tokio::test]
async fn no_node_id_is_never_sent() {
    let (_host, fake, controller) = with(&[2], &[]).await;
    for sent in [
        controller.publish("v", "", &usage(), true, request(None)).await.map(drop),
        controller.unpublish("v", "", request(None)).await,
    ] {
        assert_eq!(sent.unwrap_err().class, Class::Refused);
    }
    assert_eq!(fake.calls("ControllerPublishVolume") + fake.calls("ControllerUnpublishVolume"), 0);
}

pub fn create(usages: &[Usage]) -> Create<'_> {
    static NONE: BTreeMap<String, String> = BTreeMap::new();
    Create { name: "n", required: 0, limit: 0, usages, parameters: &NONE, source: None, topologies: &[] }
}

pub fn made(volume: v1::Volume) -> v1::CreateVolumeResponse {
    v1::CreateVolumeResponse { volume: Some(volume) }
}

#[tokio::test]
async fn a_volume_is_made_as_it_was_asked_for() {
    let (_host, fake, controller) = with(&[1, 5, 7], &[2]).await;
    let clone = v1::volume_content_source::Type::Volume(v1::volume_content_source::VolumeSource {
        volume_id: "old".into(),
    });
    let volume = v1::Volume {
        capacity_bytes: 7,
        volume_id: "vol-1".into(),
        volume_context: map("share", "/x"),
        content_source: Some(v1::VolumeContentSource { r#type: Some(clone.clone()) }),
        accessible_topology: vec![v1::Topology { segments: map("zone", "a") }],
    };
    fake.says(made(volume.clone()));
    let (usages, parameters) = ([usage()], map("tier", "fast"));
    let topologies = [map("zone", "b"), map("zone", "a")];
    let (topologies, source) = (&topologies[..], Some(Source::Volume("old")));
    let secrets = secrets();
    let asked =
        Create { required: 5, limit: 9, parameters: &parameters, source, topologies, ..create(&usages) };
    let created = controller.create(asked, request(Some(&secrets))).await.unwrap();
    assert_eq!((created.external_id.as_str(), created.capacity), ("vol-1", Some(7)));
    assert_eq!((created.context, created.topologies), (map("share", "/x"), vec![map("zone", "a")]));
    assert!(created.from_source);
    let sent: v1::CreateVolumeRequest = fake.got();
    assert_eq!((sent.name.as_str(), &sent.parameters, sent.mutable_parameters.len()), ("n", &parameters, 0));
    let range = sent.capacity_range.unwrap();
    assert_eq!((range.required_bytes, range.limit_bytes), (5, 9));
    assert_eq!((sent.volume_capabilities.len(), sent.secrets.len()), (1, 1));
    assert_eq!(sent.volume_content_source.unwrap().r#type, Some(clone));
    let places = sent.accessibility_requirements.unwrap();
    let said: Vec<_> = places.requisite.iter().map(|place| place.segments.clone()).collect();
    assert_eq!(said, topologies);
    assert_eq!(places.requisite, places.preferred, "rule 15: what is preferred is among what is required");

    // A volume that may be empty is not called a clone.
    fake.says(made(v1::Volume { content_source: None, ..volume.clone() }));
    assert!(!controller.create(asked, request(None)).await.unwrap_or_else(|e| panic!("{e}")).from_source);
    fake.says(made(v1::Volume { content_source: None, ..volume }));
    let snapshot = Create { source: Some(Source::Snapshot("s")), ..create(&usages) };
    assert!(!controller.create(snapshot, request(None)).await.unwrap_or_else(|e| panic!("{e}")).from_source);
    assert!(controller.create(create(&usages), request(None)).await.is_ok_and(|made| made.from_source));
    let sent: v1::CreateVolumeRequest = fake.got();
    assert!(sent.capacity_range.is_none() && sent.volume_content_source.is_none());
    assert!(sent.accessibility_requirements.is_none(), "rule 15: no list without a place");
}

#[tokio::test]
async fn co_rule_15_places_only_to_plugins_that_have_them() {
    let (_host, fake, controller) = with(&[1, 4], &[]).await;
    fake.says(made(v1::Volume { volume_id: "v".into(), ..v1::Volume::default() }));
    let (usages, topologies) = ([usage()], [map("zone", "a")]);
    let asked = Create { topologies: &topologies, ..create(&usages) };
    assert!(controller.create(asked, request(None)).await.is_ok());
    assert!(fake.got::<v1::CreateVolumeRequest>().accessibility_requirements.is_none());
    controller.capacity(&usages, &BTreeMap::new(), &topologies[0], request(None)).await.unwrap();
    assert!(fake.got::<v1::GetCapacityRequest>().accessible_topology.is_none());
}

#[tokio::test]
async fn co_rule_19_unsupported_controller_rpc_is_not_sent() {
    // CLONE_VOLUME alone: no call has it to itself. And SINGLE_NODE_MULTI_WRITER to hold the place of others.
    let (host, fake, controller) = with(&[13], &[]).await;
    let ready = host.ready().await;
    let before = fake.script().calls.len();
    let (usage, none, r) = (usage(), BTreeMap::new(), request(None));
    let usages = [usage.clone()];
    let node = || call(&usage, soon(LONG));
    let refused = [
        controller.publish("v", "n", &usage, false, r).await.err(),
        controller.unpublish("v", "n", r).await.err(),
        controller.create(create(&usages), r).await.err(),
        controller.delete("v", r).await.err(),
        controller.expand("v", 1, 0, &usage, r).await.err(),
        controller.snapshot("v", "s", &none, r).await.err(),
        controller.delete_snapshot("s", r).await.err(),
        controller.snapshots("", "", "", 0, r).await.err(),
        controller.volumes("", 0, request(None)).await.err(),
        controller.capacity(&usages, &none, &none, request(None)).await.err(),
        ready.expand(node(), 1, 0).await.err(),
        ready.stats(node()).await.err(),
    ];
    for error in refused {
        let error = error.expect("refused");
        assert_eq!((error.code, error.class), (Code::Unimplemented, Class::Unimplemented), "{error}");
        assert!(error.message.contains("does not offer"), "{error}");
        let error = error.into_error();
        assert_eq!((error.kind, error.details.retryable), (Kind::PluginError, false));
    }
    assert_eq!(fake.script().calls[before..], [] as [&str; 0]);

    let (_host, fake, controller) = with(&[1], &[]).await;
    for source in [Source::Snapshot("s"), Source::Volume("v")] {
        let error = controller.create(Create { source: Some(source), ..create(&usages) }, r).await.err();
        assert_eq!(error.unwrap().class, Class::Unimplemented);
    }
    assert_eq!(fake.calls("CreateVolume"), 0);
}

#[tokio::test]
async fn co_rule_36_not_found_ends_a_removal() {
    let (_host, fake, controller) = with(&ALL, &[]).await;
    fake.script().answer = Some(Err((Code::NotFound, "gone".into())));
    let r = request(None);
    controller.unpublish("v", "n", r).await.unwrap();
    controller.delete("v", r).await.unwrap();
    controller.delete_snapshot("s", r).await.unwrap();
    let usage = usage();
    assert_eq!(controller.publish("v", "n", &usage, false, r).await.unwrap_err().code, Code::NotFound);
    assert_eq!(controller.expand("v", 1, 0, &usage, r).await.unwrap_err().code, Code::NotFound);
    let validated = controller.validate("v", &[usage], &BTreeMap::new(), r).await;
    assert_eq!(validated.unwrap_err().class, Class::Refused);
}

#[tokio::test]
async fn co_rule_35_confirmed_capabilities_are_compared() {
    let (_host, fake, controller) = with(&[], &[]).await;
    let usages = [usage(), Usage { access_mode: AccessMode::MultiNodeReaderOnly, ..usage() }];
    let (parameters, secrets) = (map("tier", "fast"), secrets());
    let validate = async |confirmed: Option<Confirmed>, message: &str| {
        fake.says(v1::ValidateVolumeCapabilitiesResponse { confirmed, message: message.into() });
        controller.validate("v", &usages, &parameters, request(Some(&secrets))).await.unwrap()
    };
    assert_eq!(validate(None, "").await, Err("the plugin does not say why".into()));
    let sent: v1::ValidateVolumeCapabilitiesRequest = fake.got();
    assert_eq!((sent.volume_id.as_str(), &sent.parameters), ("v", &parameters));
    assert_eq!((&sent.volume_context, &sent.secrets), (&usages[0].context, &map("key", "hunter2")));
    assert_eq!(sent.volume_capabilities.len(), 2);
    let said = validate(None, "no tier fast\nfor hunter2").await;
    assert_eq!(said, Err("no tier fast for [redacted]".into()));

    let all = Confirmed {
        volume_context: sent.volume_context,
        volume_capabilities: sent.volume_capabilities.clone(),
        parameters: sent.parameters,
        mutable_parameters: BTreeMap::new(),
    };
    assert_eq!(validate(Some(all.clone()), "").await, Ok(()));
    let fewer = || Confirmed { volume_context: BTreeMap::new(), parameters: BTreeMap::new(), ..all.clone() };
    assert_eq!(validate(Some(fewer()), "").await, Ok(()), "which CSI lets the plugin leave out");
    let mut block = all.clone();
    block.volume_capabilities[1].access_type = Some(AccessType::Block(v1::volume_capability::BlockVolume {}));
    for wrong in [
        Confirmed::default(),
        Confirmed { volume_capabilities: sent.volume_capabilities[..1].to_vec(), ..all.clone() },
        block,
        Confirmed { volume_context: map("share", "other"), ..all.clone() },
        Confirmed { parameters: map("tier", "slow"), ..all.clone() },
    ] {
        let text = validate(Some(wrong), "").await.unwrap_err();
        assert!(text.starts_with("the plugin confirms "), "{text}");
    }
}

#[tokio::test]
async fn an_expansion_is_two_calls() {
    let (host, fake, controller) = with(&[9], &[]).await;
    fake.says(v1::ControllerExpandVolumeResponse { capacity_bytes: 9, node_expansion_required: true });
    let (usage, secrets) = (usage(), secrets());
    let expanded = controller.expand("v", 8, 10, &usage, request(Some(&secrets))).await.unwrap();
    assert_eq!(expanded, (Some(9), true));
    let sent: v1::ControllerExpandVolumeRequest = fake.got();
    let range = sent.capacity_range.unwrap();
    assert_eq!((sent.volume_id.as_str(), range.required_bytes, range.limit_bytes), ("v", 8, 10));
    assert_eq!((sent.secrets, sent.volume_capability.is_some()), (map("key", "hunter2"), true));
    for (required, limit, code) in [(0, 0, Code::InvalidArgument), (u64::MAX, 0, Code::OutOfRange)] {
        let error = controller.expand("v", required, limit, &usage, request(None)).await.unwrap_err();
        assert_eq!((error.code, error.class), (code, Class::Refused));
    }
    assert_eq!(fake.calls("ControllerExpandVolume"), 1);

    fake.script().node_capabilities = vec![1, 3];
    host.plugins.probe("p", None).await.unwrap();
    let ready = host.ready().await;
    fake.says(v1::NodeExpandVolumeResponse { capacity_bytes: 8 });
    let node = || NodeCall { secrets: Some(&secrets), ..call(&usage, soon(LONG)) };
    assert_eq!(ready.expand(node(), 8, 0).await.unwrap(), Some(8));
    let sent: v1::NodeExpandVolumeRequest = fake.got();
    assert_eq!((sent.volume_id.as_str(), sent.volume_path.as_str()), ("vol-1", "/srv/root/publish/x/y"));
    assert_eq!(sent.staging_target_path, "/srv/root/staging/x", "rule 33");
    assert_eq!((sent.capacity_range.unwrap().required_bytes, sent.secrets), (8, map("key", "hunter2")));
    assert!(sent.volume_capability.is_some());
    ready.expand(node(), 0, 0).await.unwrap();
    assert!(fake.got::<v1::NodeExpandVolumeRequest>().capacity_range.is_none());
}

#[tokio::test]
async fn co_rule_33_stats_have_the_staging_path() {
    let (host, fake, _) = with(&[], &[]).await;
    let usage = usage();
    for (capabilities, staging, condition) in [
        (vec![1, 2, 4], "/srv/root/staging/x", Some((true, "at [redacted]".to_owned()))),
        (vec![2], "", None),
    ] {
        fake.script().node_capabilities = capabilities;
        host.plugins.probe("p", None).await.unwrap();
        let measure = |unit, used| v1::VolumeUsage { available: 1, total: 3, used, unit };
        fake.says(v1::NodeGetVolumeStatsResponse {
            usage: vec![measure(1, 2), measure(2, 4), measure(99, 0)],
            volume_condition: Some(v1::VolumeCondition { abnormal: true, message: "at ctx-v4lue-1".into() }),
        });
        let stats = host.ready().await.stats(call(&usage, soon(LONG))).await.unwrap();
        let expected = |unit, used| Measure { unit, available: 1, total: 3, used };
        assert_eq!(stats.usage, [expected("BYTES", 2), expected("INODES", 4)]);
        assert_eq!(stats.abnormal, condition);
        let sent: v1::NodeGetVolumeStatsRequest = fake.got();
        assert_eq!((sent.volume_id.as_str(), sent.volume_path.as_str()), ("vol-1", "/srv/root/publish/x/y"));
        assert_eq!(sent.staging_target_path, staging);
    }
    fake.says(v1::NodeGetVolumeStatsResponse {
        usage: vec![v1::VolumeUsage { available: -1, unit: 1, ..v1::VolumeUsage::default() }],
        volume_condition: None,
    });
    let error = host.ready().await.stats(call(&usage, soon(LONG))).await.unwrap_err();
    assert_eq!(error.to_string(), "NodeGetVolumeStats: OK: the answer breaks CSI: available is negative");
}

pub fn snapshot() -> v1::Snapshot {
    let created = std::time::SystemTime::UNIX_EPOCH + Duration::from_micros(1_700_000_000_000_001);
    v1::Snapshot {
        size_bytes: 4,
        snapshot_id: "s-1".into(),
        source_volume_id: "v".into(),
        creation_time: Some(created.into()),
        ready_to_use: false,
        ..v1::Snapshot::default()
    }
}

#[tokio::test]
async fn snapshots_are_made_once_a_call_and_listed_in_pages() {
    let (_host, fake, controller) = with(&[5, 6], &[]).await;
    fake.says(v1::CreateSnapshotResponse { snapshot: Some(snapshot()) });
    let (parameters, secrets) = (map("tier", "cold"), secrets());
    let r = request(Some(&secrets));
    let expected = Snapshot {
        id: "s-1".into(),
        external_id: "v".into(),
        size: 4,
        created_usec: 1_700_000_000_000_001,
        ready: false,
    };
    assert_eq!(controller.snapshot("v", "name", &parameters, r).await.unwrap(), expected);
    assert_eq!(fake.calls("CreateSnapshot"), 1);
    let sent: v1::CreateSnapshotRequest = fake.got();
    assert_eq!((sent.source_volume_id.as_str(), sent.name.as_str()), ("v", "name"));
    assert_eq!((sent.parameters, sent.secrets.len()), (parameters, 1));
    controller.delete_snapshot("s-1", r).await.unwrap();
    let sent: v1::DeleteSnapshotRequest = fake.got();
    assert_eq!((sent.snapshot_id.as_str(), sent.secrets.len()), ("s-1", 1));

    let entry = |snapshot| v1::list_snapshots_response::Entry { snapshot: Some(snapshot) };
    let undated = v1::Snapshot { creation_time: None, ready_to_use: true, ..snapshot() };
    let entries = vec![entry(snapshot()), entry(undated)];
    fake.says(v1::ListSnapshotsResponse { entries, next_token: "next".into() });
    let (listed, token) = controller.snapshots("s", "v", "from", 5, r).await.unwrap();
    assert_eq!(token, "next");
    let undated = Snapshot { created_usec: 0, ready: true, ..expected.clone() };
    assert_eq!(listed, [expected, undated]);
    let sent: v1::ListSnapshotsRequest = fake.got();
    assert_eq!((sent.snapshot_id.as_str(), sent.source_volume_id.as_str()), ("s", "v"));
    assert_eq!((sent.starting_token.as_str(), sent.max_entries, sent.secrets.len()), ("from", 5, 1));
}

#[tokio::test]
async fn list_of_other_snapshots_proves_no_absence() {
    let (_host, fake, controller) = with(&ALL, &[]).await;
    let found = async |ids: &[&str], token: &str| {
        let entry = |id: &&str| v1::list_snapshots_response::Entry {
            snapshot: Some(v1::Snapshot { snapshot_id: (*id).into(), ..snapshot() }),
        };
        let entries = ids.iter().map(entry).collect();
        fake.says(v1::ListSnapshotsResponse { entries, next_token: token.into() });
        controller.find_snapshot("s", request(None)).await.map(|found| found.map(|found| found.id))
    };
    assert_eq!(found(&[], "").await, Ok(None));
    assert_eq!(found(&["s"], "").await, Ok(Some("s".to_owned())));
    assert_eq!(found(&["other", "s"], "next").await, Ok(Some("s".to_owned())));
    for (ids, token) in [(&["other"] as &[&str], "next"), (&["other"], ""), (&[], "next")] {
        let error = found(ids, token).await.unwrap_err();
        assert!(error.message.contains("the snapshot s alone, and it lists others"), "{error}");
    }
}

#[tokio::test]
async fn listed_volumes_have_the_offered_fields() {
    use v1::list_volumes_response::{Entry, VolumeStatus};
    let status = VolumeStatus {
        published_node_ids: vec!["n".into()],
        volume_condition: Some(v1::VolumeCondition { abnormal: false, message: "fine\n".into() }),
    };
    let volume = v1::Volume { volume_id: "v".into(), capacity_bytes: 3, ..v1::Volume::default() };
    let entries = vec![Entry { volume: Some(volume), status: Some(status) }];
    for (capabilities, nodes, abnormal) in
        [(vec![3, 10, 11], vec!["n".to_owned()], Some((false, "fine ".to_owned()))), (vec![3], vec![], None)]
    {
        let (_host, fake, controller) = with(&capabilities, &[]).await;
        fake.says(v1::ListVolumesResponse { entries: entries.clone(), next_token: "t".into() });
        let (volumes, token) = controller.volumes("", u32::MAX, request(None)).await.unwrap();
        assert_eq!((volumes[0].external_id.as_str(), volumes[0].capacity, token.as_str()), ("v", 3, "t"));
        assert_eq!((&volumes[0].published_node_ids, &volumes[0].abnormal), (&nodes, &abnormal));
        assert_eq!(fake.got::<v1::ListVolumesRequest>().max_entries, i32::MAX);
    }
}

/// A list is of all volumes: any of their secrets may stand in it.
#[tokio::test]
async fn earlier_secrets_withhold_messages() {
    let (host, fake, controller) = with(&ALL, &[]).await;
    let had = async |controller: &Controller, before| {
        controller.had_secrets(|| async move { Ok::<_, ()>(before) }).await.unwrap()
    };
    assert!(!had(&controller, false).await);
    assert!(!had(&controller, true).await, "it was asked for once");
    let secrets = secrets();
    controller.delete("v", request(Some(&secrets))).await.unwrap();
    assert!(
        had(&host.plugins.controller("p", "ValidateVolumeCapabilities", soon(LONG)).await.unwrap(), false)
            .await
    );

    let forgotten = CallContext { secrets_forgotten: true, ..request(None) };
    fake.says(v1::ListVolumesResponse {
        entries: vec![v1::list_volumes_response::Entry {
            volume: Some(v1::Volume { volume_id: "v".into(), ..v1::Volume::default() }),
            status: Some(v1::list_volumes_response::VolumeStatus {
                volume_condition: Some(v1::VolumeCondition { abnormal: true, message: "bad hunter2".into() }),
                ..Default::default()
            }),
        }],
        next_token: String::new(),
    });
    let (listed, _) = controller.volumes("", 0, forgotten).await.unwrap();
    let (_, words) = listed[0].abnormal.clone().unwrap();
    assert!(words.contains("see the plugin's log") && !words.contains("hunter2"), "{words}");
    // Nor is it where nothing is asked of a volume.
    fake.script().probe = Err((Code::Internal, "bad hunter2".into()));
    let probed = host.plugins.probe("p", None).await.unwrap_err();
    host.state(&["unhealthy", "probing", "failed"]).await;
    let messages = [probed.message, host.plugins.view("p").unwrap().health_message.clone()];
    assert!(
        messages.iter().all(|text| text.contains("INTERNAL") && !text.contains("hunter2")),
        "{messages:?}"
    );
}

#[tokio::test]
async fn capacity_is_asked_for_a_place() {
    let (_host, fake, controller) = with(&[4], &[2]).await;
    fake.says(v1::GetCapacityResponse { available_capacity: 11, ..v1::GetCapacityResponse::default() });
    let (parameters, zone) = (map("tier", "fast"), map("zone", "a"));
    assert_eq!(controller.capacity(&[usage()], &parameters, &zone, request(None)).await.unwrap(), 11);
    let sent: v1::GetCapacityRequest = fake.got();
    assert_eq!((sent.volume_capabilities.len(), sent.parameters), (1, parameters));
    assert_eq!(sent.accessible_topology.unwrap().segments, zone);
    fake.script().answer = Some(Err((Code::Internal, "no fast ext4 with ctx-v4lue-1".into())));
    let parameters = map("tier", "fast");
    let error = controller.capacity(&[usage()], &parameters, &zone, request(None)).await.unwrap_err();
    assert_eq!(error.message, "no fast ext4 with [redacted]");
}
