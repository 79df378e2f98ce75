//! A whole life of two volumes, twice: by a CO that keeps every rule, and by one that is careless at the end.

use std::collections::{BTreeMap, BTreeSet};

use csi_proto::csi::v1::controller_client::ControllerClient;
use csi_proto::csi::v1::identity_client::IdentityClient;
use csi_proto::csi::v1::node_client::NodeClient;
use csi_proto::csi::v1::volume_capability::{AccessMode, AccessType, MountVolume, access_mode::Mode};
use csi_proto::csi::v1::*;
use csi_witness::Mark;
use csi_witness::report::Report;
use csi_witness::rules::RULES;
use tonic::Status;
use tonic::transport::Channel;

use crate::plugin::ENDLESS;
use crate::world::World;

type Map = BTreeMap<String, String>;

fn map(key: &str) -> Map {
    Map::from([(key.to_owned(), "canary-7f3a".to_owned())])
}

fn capability() -> VolumeCapability {
    let mount =
        MountVolume { fs_type: "ext4".into(), mount_flags: vec!["canary-7f3a".into()], ..Default::default() };
    VolumeCapability {
        access_mode: Some(AccessMode { mode: Mode::MultiNodeMultiWriter.into() }),
        access_type: Some(AccessType::Mount(mount)),
    }
}

fn staging(volume: &Volume) -> String {
    format!("/staging/{}", volume.volume_id)
}

/// A CO's way to one plugin.
struct Co {
    identity: IdentityClient<Channel>,
    controller: ControllerClient<Channel>,
    node: NodeClient<Channel>,
}

impl Co {
    async fn new(world: &World) -> Self {
        let channel = world.co().await;
        Co {
            identity: IdentityClient::new(channel.clone()),
            controller: ControllerClient::new(channel.clone()),
            node: NodeClient::new(channel),
        }
    }

    /// The plugin's node id.
    async fn acquaint(&mut self) -> String {
        self.identity.probe(ProbeRequest {}).await.unwrap();
        self.identity.get_plugin_info(GetPluginInfoRequest {}).await.unwrap();
        self.identity.get_plugin_capabilities(GetPluginCapabilitiesRequest {}).await.unwrap();
        self.controller.controller_get_capabilities(ControllerGetCapabilitiesRequest {}).await.unwrap();
        self.node.node_get_capabilities(NodeGetCapabilitiesRequest {}).await.unwrap();
        self.node.node_get_info(NodeGetInfoRequest {}).await.unwrap().into_inner().node_id
    }

    async fn create(&mut self, name: &str) -> Result<Volume, Status> {
        let zone = Topology { segments: Map::from([("zone".to_owned(), "a".to_owned())]) };
        let request = CreateVolumeRequest {
            name: name.into(),
            capacity_range: Some(CapacityRange { required_bytes: 1, limit_bytes: 0 }),
            volume_capabilities: vec![capability()],
            secrets: map("password"),
            mutable_parameters: map("iops"),
            accessibility_requirements: Some(TopologyRequirement {
                requisite: vec![zone.clone()],
                preferred: vec![zone],
            }),
            ..Default::default()
        };
        Ok(self.controller.create_volume(request).await?.into_inner().volume.unwrap())
    }

    async fn attach(&mut self, volume: &Volume, node_id: &str) -> Map {
        let request = ControllerPublishVolumeRequest {
            volume_id: volume.volume_id.clone(),
            node_id: node_id.into(),
            volume_capability: Some(capability()),
            readonly: true,
            secrets: map("password"),
            volume_context: volume.volume_context.clone(),
        };
        self.controller.controller_publish_volume(request).await.unwrap().into_inner().publish_context
    }

    async fn stage(&mut self, volume: &Volume, publish_context: &Map) {
        let request = NodeStageVolumeRequest {
            volume_id: volume.volume_id.clone(),
            publish_context: publish_context.clone(),
            staging_target_path: staging(volume),
            volume_capability: Some(capability()),
            secrets: map("password"),
            volume_context: volume.volume_context.clone(),
        };
        self.node.node_stage_volume(request).await.unwrap();
    }

    async fn publish(&mut self, volume: &Volume, publish_context: &Map, target: &str) {
        let request = NodePublishVolumeRequest {
            volume_id: volume.volume_id.clone(),
            publish_context: publish_context.clone(),
            staging_target_path: staging(volume),
            target_path: target.into(),
            volume_capability: Some(capability()),
            volume_context: volume.volume_context.clone(),
            ..Default::default()
        };
        self.node.node_publish_volume(request).await.unwrap();
    }

    async fn unpublish(&mut self, volume: &Volume, target: &str) {
        let request =
            NodeUnpublishVolumeRequest { volume_id: volume.volume_id.clone(), target_path: target.into() };
        self.node.node_unpublish_volume(request).await.unwrap();
    }

    async fn unstage(&mut self, volume: &Volume) {
        let request = NodeUnstageVolumeRequest {
            volume_id: volume.volume_id.clone(),
            staging_target_path: staging(volume),
        };
        self.node.node_unstage_volume(request).await.unwrap();
    }

    async fn detach(&mut self, volume: &Volume, node_id: &str) {
        let request = ControllerUnpublishVolumeRequest {
            volume_id: volume.volume_id.clone(),
            node_id: node_id.into(),
            secrets: map("password"),
        };
        self.controller.controller_unpublish_volume(request).await.unwrap();
    }

    async fn delete(&mut self, volume: &Volume) {
        let request = DeleteVolumeRequest { volume_id: volume.volume_id.clone(), secrets: map("password") };
        self.controller.delete_volume(request).await.unwrap();
    }
}

const SCRIPT: &str = r#"
    [[fault]]
    rpc = "CreateVolume"
    nth = 1
    after = true
    do = { code = "DEADLINE_EXCEEDED" }

    [[fault]]
    rpc = "NodePublishVolume"
    nth = 2
    do = { code = "INVALID_ARGUMENT" }
"#;

/// Up to two published targets, over two unknown outcomes, a refusal, a crash and a reboot.
async fn up(world: &World) -> (Co, Volume, Map, String) {
    let mut co = Co::new(world).await;
    let node_id = co.acquaint().await;
    co.create("one").await.unwrap_err();
    let volume = co.create("one").await.unwrap();
    let validate = ValidateVolumeCapabilitiesRequest {
        volume_id: volume.volume_id.clone(),
        volume_capabilities: vec![capability()],
        ..Default::default()
    };
    co.controller.validate_volume_capabilities(validate).await.unwrap();
    let context = co.attach(&volume, &node_id).await;
    co.stage(&volume, &context).await;
    co.publish(&volume, &context, "/t/1").await;
    let refused = NodePublishVolumeRequest { volume_id: volume.volume_id.clone(), ..Default::default() };
    let refused = NodePublishVolumeRequest {
        staging_target_path: staging(&volume),
        target_path: "/t/2".into(),
        publish_context: context.clone(),
        volume_context: volume.volume_context.clone(),
        volume_capability: Some(capability()),
        ..refused
    };
    co.node.node_publish_volume(refused).await.unwrap_err();
    co.unpublish(&volume, "/t/2").await;

    // Another volume's stage hangs, and the CO dies over it.
    let endless = Volume { volume_id: ENDLESS.into(), ..Default::default() };
    let attached = co.attach(&endless, &node_id).await;
    let mut staging_co = Co::new(world).await;
    let hung = tokio::spawn({
        let (endless, attached) = (endless.clone(), attached.clone());
        async move { staging_co.stage(&endless, &attached).await }
    });
    world.until_staged(2).await;
    hung.abort();
    world.until_log(r#""event":"closed","connection":2"#).await;
    co.unstage(&endless).await;
    co.detach(&endless, &node_id).await;

    world.witness.mark(Mark::Reboot).unwrap();
    let context = co.attach(&volume, &node_id).await;
    co.stage(&volume, &context).await;
    co.publish(&volume, &context, "/t/1").await;
    co.publish(&volume, &context, "/t/2").await;
    let stats = NodeGetVolumeStatsRequest {
        volume_id: volume.volume_id.clone(),
        volume_path: "/t/1".into(),
        staging_target_path: staging(&volume),
    };
    co.node.node_get_volume_stats(stats).await.unwrap();
    let expand = NodeExpandVolumeRequest {
        volume_id: volume.volume_id.clone(),
        volume_path: "/t/1".into(),
        staging_target_path: staging(&volume),
        ..Default::default()
    };
    co.node.node_expand_volume(expand).await.unwrap();
    (co, volume, context, node_id)
}

#[tokio::test]
async fn good_co_breaks_no_rule_and_meets_every_one() {
    let world = World::new(SCRIPT);
    let (mut co, volume, _, node_id) = up(&world).await;
    co.unpublish(&volume, "/t/1").await;
    co.unpublish(&volume, "/t/2").await;
    co.unstage(&volume).await;
    co.detach(&volume, &node_id).await;
    co.delete(&volume).await;
    world.witness.mark(Mark::Rest).unwrap();

    let verdict = world.witness.verdict().unwrap();
    assert_eq!(verdict.breaches, [], "{}", world.log());
    let looked: BTreeSet<u8> = verdict.checked.keys().copied().collect();
    assert_eq!(looked, RULES.iter().map(|(rule, _)| *rule).collect::<BTreeSet<u8>>());
    assert!(!world.log().contains("canary"), "{}", world.log());

    // The log alone says the same.
    let report = Report::read(&[world.at("log.jsonl")]).unwrap();
    assert!(report.breaches.is_empty());
    assert!(report.rules.iter().all(|row| row.checked == verdict.checked[&row.rule]));
}

#[tokio::test]
async fn careless_end_is_reported_with_its_calls() {
    let world = World::new(SCRIPT);
    let (mut co, volume, _, _) = up(&world).await;
    co.unpublish(&volume, "/t/1").await;
    co.unstage(&volume).await;
    co.publish(&volume, &Map::new(), "/t/1").await;

    let report = Report::read(&[world.at("log.jsonl")]).unwrap();
    let told: Vec<(u8, Vec<&str>)> = report
        .breaches
        .iter()
        .map(|breach| (breach.rule, breach.calls.iter().map(|call| call.rpc.as_str()).collect()))
        .collect();
    let expected = [
        (22, vec!["NodePublishVolume", "NodeUnstageVolume"]),
        (31, vec!["ControllerPublishVolume", "NodePublishVolume"]),
        (21, vec!["NodeUnstageVolume", "NodePublishVolume"]),
    ];
    assert_eq!(told, expected, "{report}");
    assert!(report.to_string().contains("rule 22: NodeUnstageVolume"), "{report}");
}
