//! Probe, fingerprint, heartbeat, and a plugin that goes and comes back.

use csi_proto::csi::v1;
use tonic::Code;
use v1::plugin_capability::{Service as PluginService, Type, VolumeExpansion};

use super::*;
use crate::Kind;
use crate::plugin::Can;

fn capability(r#type: Type) -> v1::PluginCapability {
    v1::PluginCapability { r#type: Some(r#type) }
}

#[tokio::test]
async fn a_plugin_is_known_by_its_answers() {
    let (host, mut fake) = {
        let host = Host::new();
        let fake = host.fake();
        (host, fake)
    };
    fake.script().plugin_capabilities = vec![
        capability(Type::Service(PluginService { r#type: 1 })),
        capability(Type::Service(PluginService { r#type: 99 })),
        capability(Type::VolumeExpansion(VolumeExpansion { r#type: 1 })),
        v1::PluginCapability { r#type: None },
    ];
    fake.script().node_capabilities = vec![1, 5, 6, 0, 77];
    fake.start();
    host.register(&fake).await;
    let ready = host.ready().await;
    assert!(ready.stages() && ready.single_node_multi_writer() && ready.mount_group());
    assert!(ready.can("STAGE_UNSTAGE_VOLUME") && !ready.can("EXPAND_VOLUME"));
    assert_eq!((ready.node_id(), ready.max_volumes()), ("node-1", 7));
    assert_eq!(ready.topology().get("zone").map(String::as_str), Some("z1"));
    assert_eq!(ready.host_root(), host.directory.path().join("state/plugins/p"));

    let view = host.plugins.view("p").unwrap();
    assert_eq!((view.state, view.healthy, view.health_message.as_str()), ("ready", true, ""));
    // A control character never reaches D-Bus or a terminal.
    assert_eq!((view.provider.as_str(), view.provider_version.as_str()), ("test.csi", "1 "));
    assert_eq!(view.services, ["node", "controller"]);
    assert_eq!(view.plugin_capabilities, ["CONTROLLER_SERVICE", "ONLINE"]);
    assert_eq!(
        view.node_capabilities,
        ["STAGE_UNSTAGE_VOLUME", "SINGLE_NODE_MULTI_WRITER", "VOLUME_MOUNT_GROUP"]
    );
    assert_eq!(view.controller_capabilities, ["CREATE_DELETE_VOLUME", "PUBLISH_UNPUBLISH_VOLUME"]);
    assert_eq!((view.node_id.as_str(), view.max_volumes), ("node-1", 7));
    assert_eq!(view.topology.get("zone").map(String::as_str), Some("z1"));
    assert_eq!((view.supervision, view.unit.as_str(), view.log), ("external", "", "none"));
    assert_eq!(host.plugins.list(), [view]);
    // Rule 3: Identity comes first. Some drivers insist on the authority.
    assert_eq!(fake.script().calls[..2], ["Probe", "GetPluginInfo"]);
    assert_eq!(fake.script().authorities.iter().collect::<Vec<_>>(), ["localhost"]);
    assert_eq!(host.events("plugin-fingerprint").await.len(), 1);
}

#[tokio::test]
async fn co_rule_10_a_plugin_without_a_node_service_is_fine() {
    let host = Host::new();
    let mut fake = host.fake().serving(false, true);
    fake.script().plugin_capabilities = vec![capability(Type::Service(PluginService { r#type: 1 }))];
    fake.start();
    host.register(&fake).await;
    host.plugins.wait("p", Service::Controller, Some(soon(LONG))).await.unwrap();
    assert_eq!(host.plugins.view("p").unwrap().services, ["controller"]);
    let error = host.plugins.ready("p", Service::Node, soon(Duration::from_millis(50))).await.err().unwrap();
    assert_eq!(error.kind, Kind::PluginUnavailable);
    assert!(error.message.contains("offers no node service (it offers: controller)"), "{error}");
}

#[tokio::test]
async fn co_rule_10_node_half_names_an_unserved_controller() {
    let host = Host::new();
    let mut fake = host.fake().serving(true, false);
    fake.script().plugin_capabilities = vec![capability(Type::Service(PluginService { r#type: 1 }))];
    fake.start();
    host.register(&fake).await;
    host.ready().await;
    assert_eq!(host.plugins.view("p").unwrap().services, ["node"]);
}

#[tokio::test]
async fn co_rule_37_false_waits_an_error_is_unhealthy() {
    let host = Host::new();
    let mut fake = host.fake();
    fake.script().ready = Some(false);
    fake.start();
    host.register(&fake).await;
    host.state(&["probing"]).await;
    assert!(!host.plugins.healthy_now("p"));
    assert!(!host.plugins.probe("p", Some(soon(LONG))).await.unwrap());
    assert_eq!(fake.calls("GetPluginInfo"), 0);

    fake.script().probe = Err((Code::FailedPrecondition, "no\nmodule".into()));
    host.state(&["unhealthy"]).await;
    let view = host.plugins.view("p").unwrap();
    assert_eq!(view.health_message, "Probe: FAILED_PRECONDITION: no module");
    assert_eq!(host.plugins.probe("p", None).await.unwrap_err().kind, Kind::PluginError);

    fake.script().probe = Ok(());
    fake.script().ready = Some(true);
    host.ready().await;
    assert!(host.plugins.probe("p", None).await.unwrap());
    // And while it is ready, the heartbeat says so.
    fake.script().ready = Some(false);
    host.state(&["probing"]).await;
    assert!(!host.plugins.healthy_now("p"));

    let turns: Vec<_> = host.events("plugin-health").await.into_iter().map(|(_, details)| details).collect();
    let to: Vec<_> =
        turns.iter().map(|details| (details["to"].as_str(), details["success"].as_str())).collect();
    assert_eq!(to, [("unhealthy", "false"), ("ready", "true"), ("probing", "false")]);
    assert!(turns[0]["error"].contains("no module"), "{turns:?}");
}

#[tokio::test]
async fn empty_name_and_invalid_node_id_are_errors() {
    let host = Host::new();
    let mut fake = host.fake();
    fake.script().name = String::new();
    fake.start();
    host.register(&fake).await;
    host.state(&["unhealthy"]).await;
    assert!(host.plugins.view("p").unwrap().health_message.contains("name is empty"));
    fake.script().name = "n".into();
    fake.script().node_id = String::new();
    let node_id = async {
        while !host.plugins.view("p").unwrap().health_message.contains("node_id is empty") {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(LONG, node_id).await.unwrap();
    fake.script().node_id = "n\0".into();
    let node_id = async {
        while !host.plugins.view("p").unwrap().health_message.contains("node_id has a control character") {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(LONG, node_id).await.unwrap();
    fake.script().node_id = "n".into();
    host.ready().await;
}

#[tokio::test]
async fn failed_fingerprint_keeps_earlier_answers() {
    let host = Host::new();
    let mut fake = host.fake();
    fake.script().plugin_capabilities = controller::services(&[]);
    fake.script().broken = vec!["NodeGetInfo"];
    fake.start();
    host.register(&fake).await;
    host.state(&["unhealthy"]).await;
    let view = host.plugins.view("p").unwrap();
    assert!(view.health_message.starts_with("NodeGetInfo: INTERNAL"), "{view:?}");
    assert_eq!(
        (view.services, view.node_id.as_str()),
        (vec!["node".to_owned(), "controller".to_owned()], "")
    );
    assert!(!view.controller_capabilities.is_empty());
    // What it cannot do is not known as long as not all of it was seen.
    assert_eq!(host.plugins.can("p", Can::Controller("GET_CAPACITY")), None);

    fake.script().broken = vec!["ControllerGetCapabilities"];
    until(|| host.plugins.view("p").unwrap().node_id == "node-1").await;
    let view = host.plugins.view("p").unwrap();
    assert!(view.health_message.starts_with("ControllerGetCapabilities: INTERNAL"), "{view:?}");
    assert!(view.services.contains(&"controller".to_owned()), "it is contradicted by nothing: {view:?}");
    fake.script().broken.clear();
    host.ready().await;
    assert_eq!(host.plugins.can("p", Can::Controller("GET_CAPACITY")), Some(false));
}

#[tokio::test]
async fn a_socket_that_appears_late_is_found_soon() {
    let host = Host::new();
    let mut fake = host.fake();
    host.register(&fake).await;
    until(|| host.plugins.view("p").unwrap().health_message.contains("cannot connect")).await;
    assert_eq!(host.plugins.view("p").unwrap().state, "starting");
    assert!(host.events("plugin-health").await.is_empty());
    // Nothing is there in time: it is said, and waited for on.
    host.state(&["unhealthy"]).await;
    fake.start();
    host.ready().await;
}

#[tokio::test]
async fn death_is_noticed_at_once_and_return_is_probed() {
    // The heartbeat is too slow to be what notices.
    let host = Host::with(Pace { heartbeat: LONG, ..PACE }, Vec::new());
    let mut fake = host.fake();
    fake.start();
    host.register(&fake).await;
    let before = host.ready().await;
    fake.kill();
    let noticed = Instant::now();
    host.state(&["unhealthy"]).await;
    assert!(noticed.elapsed() < Duration::from_secs(5), "{:?}", noticed.elapsed());
    let error = host.plugins.ready("p", Service::Node, soon(Duration::from_millis(50))).await.err().unwrap();
    assert_eq!(
        (error.kind, error.details.step),
        (Kind::PluginUnavailable, Some(crate::error::Step::WaitingForPlugin))
    );
    assert!(error.message.contains("(socket /"), "{error}");

    fake.script().node_id = "node-2".into();
    fake.start();
    host.ready().await;
    assert_eq!(host.plugins.view("p").unwrap().node_id, "node-2");
    let changed = host.events("plugin-node-id").await;
    assert_eq!((changed[0].1["from"].as_str(), changed[0].1["to"].as_str()), ("node-1", "node-2"));
    // The old snapshot's channel has reconnected too.
    before.unstage(calls::call(&calls::usage(), soon(LONG))).await.unwrap();
}

#[tokio::test]
async fn heartbeat_reads_capabilities_not_identity() {
    let host = Host::new();
    let mut fake = host.fake();
    fake.start();
    host.register(&fake).await;
    assert!(host.ready().await.stages());
    fake.script().node_capabilities = vec![];
    let changed = async {
        while host.ready().await.stages() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, changed).await.unwrap();
    assert_eq!((fake.calls("GetPluginInfo"), fake.calls("NodeGetInfo")), (1, 1));
    assert!(host.events("plugin-health").await.iter().all(|(_, details)| details["success"] == "true"));
}

#[tokio::test]
async fn hung_plugin_is_unhealthy_and_blocks_no_other() {
    let host = Host::new();
    // Connections are taken by the kernel, and nobody answers.
    let hung = host.directory.path().join("hung.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&hung).unwrap();
    host.plugins.register("hung", external(&hung), 0).await.unwrap();
    let mut fake = host.fake();
    fake.start();
    host.register(&fake).await;
    host.ready().await;
    let hangs = async {
        while host.plugins.view("hung").unwrap().state != "unhealthy" {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONG, hangs).await.unwrap();
    let message = host.plugins.view("hung").unwrap().health_message;
    assert!(message.starts_with("Probe: DEADLINE_EXCEEDED: the plugin did not answer within"), "{message}");
}

#[tokio::test]
async fn after_shutdown_no_plugin_is_healthy_or_called() {
    let host = Host::new();
    let mut fake = host.fake();
    fake.start();
    host.register(&fake).await;
    let ready = host.ready().await;
    let waiting = {
        let plugins = host.plugins.clone();
        tokio::spawn(async move { plugins.ready("unknown", Service::Node, soon(LONG)).await.err().unwrap() })
    };
    let probes = fake.calls("Probe");
    host.plugins.shutdown().await;
    assert_eq!(fake.calls("Probe"), probes + 1);
    let view = host.plugins.view("p").unwrap();
    assert_eq!((view.state, view.healthy), ("unhealthy", false));
    let is_csids_stop = |error: crate::Error| {
        assert_eq!(error.kind, Kind::PluginShutdown);
        assert_eq!(error.details.obstacle, Some(crate::error::Obstacle::Stopping), "{error}");
    };
    is_csids_stop(waiting.await.unwrap());
    let error = ready.stage(calls::call(&calls::usage(), soon(LONG))).await.unwrap_err();
    is_csids_stop(error.into_error());
    assert_eq!(fake.calls("NodeStageVolume"), 0);
    is_csids_stop(host.plugins.register("q", external(&fake.socket), 0).await.unwrap_err());
}

#[tokio::test]
async fn the_last_probe_of_a_hung_plugin_is_bounded() {
    let host = Host::new();
    let hung = host.directory.path().join("hung.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&hung).unwrap();
    host.plugins.register("hung", external(&hung), 0).await.unwrap();
    let start = Instant::now();
    host.plugins.shutdown().await;
    assert!(start.elapsed() < PACE.last * 2 + Duration::from_secs(5), "{:?}", start.elapsed());
    assert_eq!(host.plugins.view("hung").unwrap().state, "unhealthy");
}

#[tokio::test]
async fn co_rule_11_a_topology_that_is_too_long_is_dropped() {
    for (bytes, kept) in [(4096, 1), (4097, 0)] {
        let host = Host::new();
        let mut fake = host.fake();
        fake.script().topology = [("zone".to_owned(), "z".repeat(bytes - 4))].into();
        fake.start();
        host.register(&fake).await;
        host.ready().await;
        assert_eq!(host.plugins.view("p").unwrap().topology.len(), kept);
    }
}
