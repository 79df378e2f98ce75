//! What it mounts, and its script.

use csi_proto::csi::v1::identity_client::IdentityClient;
use csi_proto::csi::v1::node_client::NodeClient;
use csi_proto::csi::v1::volume_capability::access_mode::Mode;
use csi_proto::csi::v1::*;
use csid_tests::kernel;
use csid_tests::script::{Act, Lie, Probe, Rule};
use csid_tests::world::{World, eventually, world};
use tonic::Code;
use tonic::transport::Channel;

use crate::{capability as of_mode, connect};

async fn channel(w: &mut World) -> Channel {
    connect(w.add_plugin("p").await).await
}

struct Paths {
    staging: std::path::PathBuf,
    target: std::path::PathBuf,
}

fn paths(w: &World) -> Paths {
    let [staging, target] = ["targets/staging", "targets/published"].map(|p| w.path(p));
    std::fs::create_dir(&staging).unwrap();
    Paths { staging, target }
}

fn capability(block: bool) -> Option<VolumeCapability> {
    Some(of_mode(Mode::SingleNodeWriter, block))
}

fn stage(p: &Paths) -> NodeStageVolumeRequest {
    NodeStageVolumeRequest {
        volume_id: "v".to_owned(),
        staging_target_path: p.staging.to_str().unwrap().to_owned(),
        volume_capability: capability(false),
        secrets: [("k".to_owned(), "s".to_owned())].into(),
        ..Default::default()
    }
}

fn publish(p: &Paths, block: bool, readonly: bool) -> NodePublishVolumeRequest {
    NodePublishVolumeRequest {
        volume_id: "v".to_owned(),
        staging_target_path: p.staging.to_str().unwrap().to_owned(),
        target_path: p.target.to_str().unwrap().to_owned(),
        volume_capability: capability(block),
        readonly,
        ..Default::default()
    }
}

fn unpublish(p: &Paths) -> NodeUnpublishVolumeRequest {
    NodeUnpublishVolumeRequest {
        volume_id: "v".to_owned(),
        target_path: p.target.to_str().unwrap().to_owned(),
    }
}

#[test]
fn it_mounts_for_real_and_records() {
    world(async |w| {
        let mut node = NodeClient::new(channel(w).await);
        let p = paths(w);
        node.node_stage_volume(stage(&p)).await.unwrap();
        node.node_stage_volume(stage(&p)).await.expect("idempotent");
        node.node_publish_volume(publish(&p, false, false)).await.unwrap();
        std::fs::write(p.target.join("file"), "data").unwrap();
        assert_eq!([&p.staging, &p.target].map(|p| kernel::stacked(p).unwrap()), [1, 1]);
        node.node_unpublish_volume(unpublish(&p)).await.unwrap();
        assert!(!p.target.exists());
        node.node_publish_volume(publish(&p, false, true)).await.unwrap();
        assert_eq!(std::fs::read_to_string(p.target.join("file")).unwrap(), "data");
        assert!(std::fs::write(p.target.join("file"), "").is_err(), "read-only");
        node.node_unpublish_volume(unpublish(&p)).await.unwrap();
        let unstage = NodeUnstageVolumeRequest {
            volume_id: "v".to_owned(),
            staging_target_path: p.staging.to_str().unwrap().to_owned(),
        };
        node.node_unstage_volume(unstage).await.unwrap();
        assert_eq!(w.leftovers(), Vec::<String>::new());
        let calls = w.plugin("p").volume_calls();
        assert_eq!(calls.len(), 7);
        assert!(calls.iter().all(|c| c.code == Some(0)));
        assert_eq!(calls[0].call.secrets, [("k".to_owned(), "s".to_owned())]);
    });
}

#[test]
fn it_obeys_its_script() {
    world(async |w| {
        let channel = channel(w).await;
        let mut node = NodeClient::new(channel.clone());
        let p = paths(w);
        w.plugin("p").rules([Rule { from: 2, times: 2, ..Rule::once("NodeStageVolume", Act::Fail(14)) }]);
        let mut codes = Vec::new();
        for _ in 0..4 {
            codes.push(node.node_stage_volume(stage(&p)).await.map_or_else(|s| s.code(), |_| Code::Ok));
        }
        assert_eq!(codes, [Code::Ok, Code::Unavailable, Code::Unavailable, Code::Ok]);
        w.plugin("p").rules([Rule::always("NodePublishVolume", Act::FailAfter(13))]);
        let error = node.node_publish_volume(publish(&p, false, false)).await.unwrap_err();
        assert_eq!((error.code(), kernel::stacked(&p.target).unwrap()), (Code::Internal, 1));
        w.plugin("p").honest();
        node.node_unpublish_volume(unpublish(&p)).await.unwrap();
        for (lie, mounted, exists) in [(Lie::Nothing, 0, false), (Lie::Empty, 0, true), (Lie::File, 1, true)]
        {
            w.plugin("p").rules([Rule::always("NodePublishVolume", Act::Lie(lie))]);
            node.node_publish_volume(publish(&p, false, false)).await.unwrap();
            assert_eq!(
                (kernel::stacked(&p.target).unwrap(), p.target.exists()),
                (mounted, exists),
                "{lie:?}"
            );
            node.node_unpublish_volume(unpublish(&p)).await.unwrap();
        }
        // A caller that goes away ends a wait, unless the plugin is stubborn.
        for act in [Act::Delay(60_000), Act::Stubborn(300)] {
            w.plugin("p").rules([Rule::once("NodePublishVolume", act)]);
            let wait = std::time::Duration::from_millis(100);
            let call = node.node_publish_volume(publish(&p, false, false));
            assert!(tokio::time::timeout(wait, call).await.is_err());
        }
        let busy = node.node_unpublish_volume(unpublish(&p)).await.unwrap_err();
        assert_eq!(busy.code(), Code::Aborted);
        eventually("it went on", async || kernel::stacked(&p.target).unwrap() == 1).await;
        let calls = w.plugin("p").volume_calls();
        assert_eq!(calls.iter().filter(|c| c.cancelled).count(), 2);

        w.plugin("p").set(|script| script.probe = Probe::NotReady);
        let mut identity = IdentityClient::new(channel);
        assert_eq!(identity.probe(ProbeRequest {}).await.unwrap().into_inner().ready, Some(false));
        w.plugin("p").rules([Rule::once("NodeUnpublishVolume", Act::DieBefore)]);
        assert!(node.node_unpublish_volume(unpublish(&p)).await.is_err());
        w.plugin("p").died().await;
    });
}

#[test]
fn its_block_volumes_are_devices() {
    world(async |w| {
        let mut node = NodeClient::new(channel(w).await);
        let p = paths(w);
        let device = w.add_device("p", "v");
        for read_only in [false, true] {
            node.node_publish_volume(publish(&p, true, read_only)).await.unwrap();
            assert_eq!(std::fs::write(&p.target, vec![1; 512]).is_err(), read_only);
            node.node_unpublish_volume(unpublish(&p)).await.unwrap();
        }
        let ours = device.writable.to_str().unwrap().to_owned();
        assert!(kernel::loops().unwrap().iter().any(|line| line.starts_with(&ours)));
    });
}
