//! What a controller answers and must not, what of it is not repeated, and who may be sent what.

use csi_proto::csi::v1;
use tonic::Code;

use super::calls::usage;
use super::controller::{ALL, create, made, map, request, secrets, services, snapshot, with};
use super::*;
use crate::Kind;
use crate::plugin::{ATTACHES, CallContext, Class, Create};

/// What may have had an effect is not called a failure.
#[tokio::test]
async fn an_answer_that_breaks_csi_is_an_error_of_its_own() {
    let (_host, fake, controller) = with(&ALL, &[]).await;
    let (usages, none, r) = ([usage()], BTreeMap::new(), request(None));
    let mut seen = Vec::new();
    for volume in [
        None,
        Some(v1::Volume { capacity_bytes: 1, ..v1::Volume::default() }),
        Some(v1::Volume { volume_id: "v".into(), capacity_bytes: -1, ..v1::Volume::default() }),
    ] {
        fake.says(v1::CreateVolumeResponse { volume });
        seen.push((controller.create(create(&usages), r).await.err().unwrap(), Class::Unknown));
    }
    fake.says(v1::ControllerExpandVolumeResponse { capacity_bytes: -1, node_expansion_required: false });
    seen.push((controller.expand("v", 1, 0, &usages[0], r).await.unwrap_err(), Class::Unknown));
    let before_1970 = std::time::SystemTime::UNIX_EPOCH - Duration::from_secs(5);
    for snapshot in [
        None,
        Some(v1::Snapshot { snapshot_id: String::new(), ..snapshot() }),
        Some(v1::Snapshot { source_volume_id: String::new(), ..snapshot() }),
        Some(v1::Snapshot { size_bytes: -1, ..snapshot() }),
        Some(v1::Snapshot { creation_time: Some(before_1970.into()), ..snapshot() }),
    ] {
        fake.says(v1::CreateSnapshotResponse { snapshot: snapshot.clone() });
        seen.push((controller.snapshot("v", "s", &none, r).await.unwrap_err(), Class::Unknown));
        let entries = vec![v1::list_snapshots_response::Entry { snapshot }];
        fake.says(v1::ListSnapshotsResponse { entries, next_token: String::new() });
        seen.push((controller.snapshots("", "", "", 0, r).await.unwrap_err(), Class::Refused));
    }
    fake.says(v1::ListVolumesResponse { entries: vec![Default::default()], next_token: String::new() });
    seen.push((controller.volumes("", 0, request(None)).await.unwrap_err(), Class::Refused));
    fake.says(v1::GetCapacityResponse { available_capacity: -1, ..v1::GetCapacityResponse::default() });
    seen.push((controller.capacity(&usages, &none, &none, request(None)).await.unwrap_err(), Class::Refused));
    for (error, class) in seen {
        assert_eq!((error.class, error.code), (class, Code::Ok), "{error}");
        assert!(error.to_string().contains(": OK: the answer breaks CSI: "), "{error}");
    }
}

/// It would go into rows, and onto a bus that ends the connection of its sender.
#[tokio::test]
async fn answers_that_d_bus_cannot_carry_are_refused() {
    let (_host, fake, controller) = with(&ALL, &[]).await;
    let (usages, none, r) = ([usage()], BTreeMap::new(), request(None));
    let mut seen = Vec::new();
    let long = "v".repeat(1025);
    for id in ["v\0", "\u{1}unborn:n", "unidentified:0123456789abcdef0123456789abcdef", &long] {
        let volume = v1::Volume { volume_id: id.into(), ..v1::Volume::default() };
        fake.says(made(volume.clone()));
        seen.push((controller.create(create(&usages), r).await.err(), Class::Unknown));
        let with_node = |id: &str, node: &str| {
            let status = v1::list_volumes_response::VolumeStatus {
                published_node_ids: vec![node.into()],
                volume_condition: None,
            };
            let volume = v1::Volume { volume_id: id.into(), ..v1::Volume::default() };
            v1::list_volumes_response::Entry { volume: Some(volume), status: Some(status) }
        };
        for entry in [with_node(id, "n"), with_node("v", id)] {
            fake.says(v1::ListVolumesResponse { entries: vec![entry], next_token: String::new() });
            seen.push((controller.volumes("", 0, request(None)).await.err(), Class::Refused));
        }
        for snapshot in [
            v1::Snapshot { snapshot_id: id.into(), ..snapshot() },
            v1::Snapshot { source_volume_id: id.into(), ..snapshot() },
        ] {
            fake.says(v1::CreateSnapshotResponse { snapshot: Some(snapshot.clone()) });
            seen.push((controller.snapshot("v", "s", &none, r).await.err(), Class::Unknown));
            let entries = vec![v1::list_snapshots_response::Entry { snapshot: Some(snapshot) }];
            fake.says(v1::ListSnapshotsResponse { entries, next_token: String::new() });
            seen.push((controller.snapshots("", "", "", 0, r).await.err(), Class::Refused));
        }
    }
    for map in [map("k\n", "v"), map("k", "v\0"), map("k", &"v".repeat(64 * 1024))] {
        let volume = v1::Volume { volume_id: "v".into(), ..v1::Volume::default() };
        let accessible_topology = vec![v1::Topology { segments: map.clone() }];
        fake.says(made(v1::Volume { accessible_topology, ..volume.clone() }));
        seen.push((controller.create(create(&usages), r).await.err(), Class::Unknown));
        fake.says(made(v1::Volume { volume_context: map.clone(), ..volume }));
        seen.push((controller.create(create(&usages), r).await.err(), Class::Unknown));
        fake.says(v1::ControllerPublishVolumeResponse { publish_context: map });
        seen.push((controller.publish("v", "n", &usages[0], false, r).await.err(), Class::Unknown));
    }
    let nowhere = vec![v1::Topology::default(); 5000];
    fake.says(made(v1::Volume {
        volume_id: "v".into(),
        accessible_topology: nowhere,
        ..v1::Volume::default()
    }));
    seen.push((controller.create(create(&usages), r).await.err(), Class::Unknown));
    fake.says(v1::ListVolumesResponse { entries: Vec::new(), next_token: "t\0".into() });
    seen.push((controller.volumes("", 0, request(None)).await.err(), Class::Refused));
    fake.says(v1::ListSnapshotsResponse { entries: Vec::new(), next_token: "t\0".into() });
    seen.push((controller.snapshots("", "", "", 0, r).await.err(), Class::Refused));
    for (number, (error, class)) in seen.into_iter().enumerate() {
        let error = error.unwrap_or_else(|| panic!("answer {number} was taken"));
        assert_eq!((error.class, error.code), (class, Code::Ok), "{error}");
        let text = error.to_string();
        assert!(text.contains(": OK: the answer breaks CSI: its ") && text.len() < 200, "{error}");
        assert!(!text.contains(char::is_control), "{error}");
    }
    // A value may have lines.
    let context = map("certificate", "a\nb\n");
    fake.says(v1::ControllerPublishVolumeResponse { publish_context: context.clone() });
    assert_eq!(controller.publish("v", "n", &usages[0], false, r).await.unwrap(), context);
}

/// CSI rule 11 binds the plugin, not csid.
#[tokio::test]
async fn co_rule_11_a_long_answer_is_taken_as_it_is() {
    let (_host, fake, controller) = with(&[1, 2], &[]).await;
    let (id, context) = ("v".repeat(500), map("key", &"x".repeat(5000)));
    fake.says(v1::ControllerPublishVolumeResponse { publish_context: context.clone() });
    assert_eq!(controller.publish("v", "n", &usage(), false, request(None)).await.unwrap(), context);
    let volume =
        v1::Volume { volume_id: id.clone(), volume_context: context.clone(), ..v1::Volume::default() };
    fake.says(made(volume));
    let created = controller.create(create(&[usage()]), request(None)).await.ok().unwrap();
    assert_eq!((created.external_id, created.context), (id, context));
}

#[tokio::test]
async fn controller_messages_hide_secrets() {
    let (_host, fake, controller) = with(&ALL, &[]).await;
    let text = "tier opensesame ctx-v4lue-1 pub-v4lue-1 hunter2 f4st-t1er";
    fake.script().answer = Some(Err((Code::Internal, text.into())));
    let (usages, parameters, secrets) = ([usage()], map("tier", "f4st-t1er"), secrets());
    let r = request(Some(&secrets));
    let asked = Create { parameters: &parameters, ..create(&usages) };
    let errors = [
        controller.create(asked, r).await.err().unwrap(),
        controller.validate("v", &usages, &parameters, r).await.unwrap_err(),
        controller.publish("v", "n", &usages[0], false, r).await.unwrap_err(),
        controller.expand("v", 1, 0, &usages[0], r).await.unwrap_err(),
        controller.snapshot("v", "s", &parameters, r).await.unwrap_err(),
        controller.unpublish("v", "n", r).await.unwrap_err(),
        controller.delete("v", r).await.unwrap_err(),
        controller.delete_snapshot("s", r).await.unwrap_err(),
        controller.snapshots("", "", "", 0, r).await.unwrap_err(),
    ];
    for (n, error) in errors.iter().enumerate() {
        // Each hides what it was sent.
        let hidden: &[&str] = match n {
            0 | 1 => &["hunter2", "opensesame", "ctx-v4lue-1", "pub-v4lue-1", "f4st-t1er"],
            2 | 3 => &["hunter2", "opensesame", "ctx-v4lue-1", "pub-v4lue-1"],
            4 => &["hunter2", "f4st-t1er"],
            _ => &["hunter2"],
        };
        let message = &error.message;
        assert!(hidden.iter().all(|word| !message.contains(word)) && message.contains("tier"), "{error}");
    }
    let forgotten = CallContext { secrets_forgotten: true, ..request(None) };
    let error = controller.delete("v", forgotten).await.unwrap_err();
    assert!(error.message.starts_with("[the plugin's words may repeat"), "{error}");

    let host = Host::new();
    let mut fake = host.fake();
    fake.script().plugin_capabilities = services(&[]);
    fake.script().controller_capabilities = ALL.to_vec();
    fake.start_as(OTHER);
    host.plugins.register("p", external(&fake.socket), OTHER).await.unwrap();
    let controller = host.plugins.controller("p", "ValidateVolumeCapabilities", soon(LONG)).await.unwrap();
    let before = fake.script().calls.len();
    let refused = [
        controller.create(asked, r).await.err(),
        controller.validate("v", &usages, &parameters, r).await.err(),
        controller.publish("v", "n", &usages[0], false, r).await.err(),
        controller.unpublish("v", "n", r).await.err(),
        controller.delete("v", r).await.err(),
        controller.expand("v", 1, 0, &usages[0], r).await.err(),
        controller.snapshot("v", "s", &parameters, r).await.err(),
        controller.delete_snapshot("s", r).await.err(),
        controller.snapshots("", "", "", 0, r).await.err(),
    ];
    for error in refused {
        assert_eq!(error.unwrap().class, Class::Forbidden);
    }
    // Those of a credential are root's, also where its user calls.
    let credential = crate::secret::Secrets::of_credential(br#"{"key":"hunter2"}"#).unwrap();
    let named = CallContext { uid: OTHER, ..request(Some(&credential)) };
    assert_eq!(controller.delete("v", named).await.unwrap_err().class, Class::Forbidden);
    assert_eq!(fake.script().calls[before..], [] as [&str; 0]);
    controller.delete("v", CallContext { uid: OTHER, ..r }).await.unwrap();
    controller.delete("v", request(None)).await.unwrap();
}

/// What other hosts have called has their volumes' contexts.
#[tokio::test]
async fn users_controller_serves_no_other_host() {
    let own = rustix::process::geteuid().as_raw();
    for owner in [0, OTHER] {
        let host = Host::new();
        let mut fake = host.fake();
        fake.script().plugin_capabilities = services(&[]);
        fake.script().controller_capabilities = ALL.to_vec();
        fake.start_as(if owner == 0 { own } else { owner });
        host.plugins.register("p", external(&fake.socket), owner).await.unwrap();
        host.plugins.controller("p", "ValidateVolumeCapabilities", soon(LONG)).await.unwrap();
        assert_eq!(host.plugins.has_roots_controller("p"), owner == 0);
        let found = host
            .plugins
            .roots_controller("p", "ValidateVolumeCapabilities", soon(Duration::from_millis(300)))
            .await;
        assert_eq!(found.err().map(|error| error.kind), (owner != 0).then_some(Kind::PluginUnavailable));
    }
}

#[tokio::test]
async fn attaching_is_known_once_a_controller_was_seen() {
    for (serves, capabilities, says, expected) in [
        (true, vec![1, 2], true, Some(true)),
        (true, vec![1], true, Some(false)),
        (true, vec![1, 2], false, Some(false)),
        (false, vec![], true, None),
    ] {
        let host = Host::new();
        let mut fake = host.fake().serving(true, serves);
        fake.script().plugin_capabilities = if says { services(&[]) } else { Vec::new() };
        fake.script().controller_capabilities = capabilities;
        assert_eq!(host.plugins.can("p", ATTACHES), None, "there is none");
        host.register(&fake).await;
        assert_eq!(host.plugins.can("p", ATTACHES), None, "none was seen");
        fake.start();
        host.ready().await;
        assert_eq!(host.plugins.can("p", ATTACHES), expected);
        fake.kill();
        host.state(&["unhealthy"]).await;
        assert_eq!(host.plugins.can("p", ATTACHES), expected, "what was seen is known");
    }
    let host = Host::new();
    let error = host
        .plugins
        .controller("p", "ValidateVolumeCapabilities", soon(Duration::from_millis(30)))
        .await
        .err()
        .unwrap();
    assert_eq!(error.kind, Kind::PluginUnavailable);
}

/// The plugin has done what it was asked for, so a retry finds the volume (CSI rule 39).
#[tokio::test]
async fn overlong_answer_leaves_the_outcome_unknown() {
    let (_host, fake, controller) = with(&ALL, &[]).await;
    let usages = [usage()];
    let asked = create(&usages);
    let created = |bytes: usize| v1::CreateVolumeResponse {
        volume: Some(v1::Volume {
            volume_id: "v".into(),
            volume_context: map("key", &"x".repeat(bytes)),
            ..v1::Volume::default()
        }),
    };
    for mib in [5, 20] {
        fake.says(created(mib << 20));
        let error = controller.create(asked, request(None)).await.err().unwrap();
        assert!(error.class == Class::Unknown && error.answered, "{mib} MiB: {error:?}");
    }
    let error = controller.create(asked, request(None)).await.err().unwrap();
    assert!(error.to_string().contains("csid cannot read the plugin's answer"), "{error}");
    fake.script().answer = Some(Err((Code::OutOfRange, "no such size".into())));
    let error = controller.create(asked, request(None)).await.err().unwrap();
    assert_eq!((error.class, error.code), (Class::Refused, Code::OutOfRange), "the plugin's word counts");
}

#[tokio::test]
async fn list_over_four_mib_is_read() {
    let (_host, fake, controller) = with(&ALL, &[]).await;
    let entry = |number: usize| v1::list_volumes_response::Entry {
        volume: Some(v1::Volume { volume_id: format!("{number:0900}"), ..v1::Volume::default() }),
        status: None,
    };
    let entries = (0..5000).map(entry).collect();
    fake.says(v1::ListVolumesResponse { entries, next_token: String::new() });
    let (volumes, _) = controller.volumes("", 0, request(None)).await.unwrap();
    assert_eq!(volumes.len(), 5000);
}

/// gRPC's library refuses it with UNIMPLEMENTED, which is no word of the plugin.
#[tokio::test]
async fn unknown_encoding_leaves_the_outcome_unknown() {
    let (_host, fake, controller) = with(&ALL, &[]).await;
    fake.script().encoding = Some("gzip");
    let error = controller.delete("v", request(None)).await.unwrap_err();
    assert!(error.class == Class::Unknown && error.answered, "{error:?}");
    fake.script().encoding = None;
    fake.script().answer = Some(Err((Code::Unimplemented, String::new())));
    let error = controller.delete("v", request(None)).await.unwrap_err();
    assert_eq!(error.class, Class::Unimplemented);
}
