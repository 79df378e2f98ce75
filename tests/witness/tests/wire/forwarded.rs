//! What goes through comes out as it went in, and is in the log.

use std::collections::BTreeMap;

use csi_proto::csi::v1::node_client::NodeClient;
use csi_proto::csi::v1::{NodePublishVolumeRequest, NodeStageVolumeRequest};
use csi_witness::{Event, Reader, Setup, Sockets, Witness};
use tonic::{Code, Request};

use crate::plugin::REFUSED;
use crate::world::{AGES, World, connect, probe};

#[tokio::test]
async fn metadata_passes_and_errors_keep_their_details() {
    let world = World::new("");
    let co = world.co().await;
    let mut request = Request::new(csi_proto::csi::v1::ProbeRequest {});
    request.metadata_mut().insert("x-asks", "me".parse().unwrap());
    request.set_timeout(AGES);
    csi_proto::csi::v1::identity_client::IdentityClient::new(co.clone()).probe(request).await.unwrap();
    let metadata = world.plugin.metadata.lock().unwrap().clone().unwrap();
    assert_eq!(metadata.get("x-asks").unwrap(), "me");
    assert!(metadata.get("grpc-timeout").is_some());

    let request = || NodePublishVolumeRequest { volume_id: REFUSED.into(), ..Default::default() };
    let through = NodeClient::new(co).node_publish_volume(request()).await.unwrap_err();
    let past = NodeClient::new(world.direct().await).node_publish_volume(request()).await.unwrap_err();
    assert_eq!(through.code(), Code::FailedPrecondition);
    assert_eq!((through.message(), through.details()), (past.message(), past.details()));
    assert_eq!(through.metadata().get("x-why"), past.metadata().get("x-why"));
}

#[tokio::test]
async fn request_arrives_whole_and_secrets_are_not_logged() {
    let world = World::new("");
    let co = world.co().await;
    probe(&co).await.unwrap();
    let canary = |key: &str| BTreeMap::from([(key.to_owned(), "canary-7f3a".to_owned())]);
    let request = NodeStageVolumeRequest {
        volume_id: "vol-1".into(),
        staging_target_path: "/staging".into(),
        secrets: canary("password"),
        volume_context: canary("context"),
        publish_context: canary("device"),
        ..Default::default()
    };
    NodeClient::new(co).node_stage_volume(request.clone()).await.unwrap();
    assert_eq!(*world.plugin.staged.lock().unwrap(), [request]);
    // It did not ask whether the plugin stages.
    let breaches = world.witness.verdict().unwrap().breaches;
    assert_eq!(breaches.iter().map(|breach| breach.rule).collect::<Vec<_>>(), [19]);
    let log = world.log();
    assert!(!log.contains("canary"), "{log}");
    for shown in ["vol-1", "/staging", "password", "NodeStageVolume", "\"code\":\"OK\""] {
        assert!(log.contains(shown), "{shown} is missing in {log}");
    }
}

#[tokio::test]
async fn each_socket_leads_to_its_own_plugin() {
    let world = World::new("");
    let other = World::new("");
    let [one, two, log] = ["one.sock", "two.sock", "both.jsonl"].map(|name| world.at(name));
    let sockets = vec![
        Sockets { listen: one.clone(), plugin: world.at("csi.sock") },
        Sockets { listen: two.clone(), plugin: other.at("csi.sock") },
    ];
    let witness = Witness::start(Setup { sockets, log: log.clone(), ..Setup::default() }).unwrap();
    let co = connect(&two).await;
    probe(&co).await.unwrap();
    assert!(
        world.plugin.metadata.lock().unwrap().is_none() && other.plugin.metadata.lock().unwrap().is_some()
    );
    probe(&connect(&one).await).await.unwrap();
    assert!(world.plugin.metadata.lock().unwrap().is_some());
    let connected: Vec<usize> = Reader::open(&log)
        .unwrap()
        .filter_map(|record| match record.unwrap().event {
            Event::Connected { socket, .. } => Some(socket),
            _ => None,
        })
        .collect();
    assert_eq!(connected, [1, 0]);
    drop(witness);
    assert!(!one.exists() && !two.exists());
}
