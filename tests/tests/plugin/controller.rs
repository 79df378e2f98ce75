//! Its controller, with the node service and without it.

use std::collections::BTreeMap;

use csi_proto::csi::v1::controller_client::ControllerClient;
use csi_proto::csi::v1::node_client::NodeClient;
use csi_proto::csi::v1::volume_capability::access_mode::Mode;
use csi_proto::csi::v1::volume_content_source::{SnapshotSource, Type};
use csi_proto::csi::v1::*;
use csid_tests::backend::Volume as Stored;
use csid_tests::plugin::TestPlugin;
use csid_tests::script::{Act, CONTROLLER, Half, Lie, Rule};
use csid_tests::world::{World, world};
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use crate::{capability, connect};

const MIB: i64 = 1 << 20;
type Map = BTreeMap<String, String>;

/// A CO's way to one instance.
struct Co {
    controller: ControllerClient<Channel>,
    node: NodeClient<Channel>,
}

impl Co {
    async fn new(plugin: &TestPlugin) -> Self {
        let channel = connect(plugin).await;
        Co { controller: ControllerClient::new(channel.clone()), node: NodeClient::new(channel) }
    }

    async fn create(&mut self, request: CreateVolumeRequest) -> Result<Volume, Code> {
        let answer = self.controller.create_volume(request).await;
        answer.map(|answer| answer.into_inner().volume.unwrap_or_default()).map_err(|status| status.code())
    }

    async fn delete(&mut self, id: &str) -> Code {
        let request = DeleteVolumeRequest { volume_id: id.to_owned(), ..Default::default() };
        code(self.controller.delete_volume(request).await)
    }

    async fn attach(&mut self, request: ControllerPublishVolumeRequest) -> Result<Map, Code> {
        let answer = self.controller.controller_publish_volume(request).await;
        answer.map(|answer| answer.into_inner().publish_context).map_err(|status| status.code())
    }

    async fn detach(&mut self, id: &str, node: &str) -> Code {
        let request = ControllerUnpublishVolumeRequest {
            volume_id: id.to_owned(),
            node_id: node.to_owned(),
            ..Default::default()
        };
        code(self.controller.controller_unpublish_volume(request).await)
    }

    async fn expand(&mut self, id: &str, required_bytes: i64, limit_bytes: i64) -> Result<(i64, bool), Code> {
        let request = ControllerExpandVolumeRequest {
            volume_id: id.to_owned(),
            capacity_range: Some(CapacityRange { required_bytes, limit_bytes }),
            ..Default::default()
        };
        let answer = self.controller.controller_expand_volume(request).await;
        let answer = answer.map_err(|status| status.code())?.into_inner();
        Ok((answer.capacity_bytes, answer.node_expansion_required))
    }

    async fn snapshot(&mut self, name: &str, volume: &str) -> Result<Snapshot, Code> {
        let request = CreateSnapshotRequest {
            name: name.to_owned(),
            source_volume_id: volume.to_owned(),
            ..Default::default()
        };
        let answer = self.controller.create_snapshot(request).await.map_err(|status| status.code())?;
        Ok(answer.into_inner().snapshot.unwrap())
    }

    /// The ids of a page, and the token of the next.
    async fn list(&mut self, max_entries: i32, token: &str) -> Result<(Vec<String>, String), Code> {
        let request = ListVolumesRequest { max_entries, starting_token: token.to_owned() };
        let answer =
            self.controller.list_volumes(request).await.map_err(|status| status.code())?.into_inner();
        let ids = answer.entries.into_iter().map(|entry| entry.volume.unwrap().volume_id);
        Ok((ids.collect(), answer.next_token))
    }
}

fn code<T>(answer: Result<Response<T>, Status>) -> Code {
    answer.map_or_else(|status| status.code(), |_| Code::Ok)
}

fn order(name: &str) -> CreateVolumeRequest {
    CreateVolumeRequest {
        name: name.to_owned(),
        volume_capabilities: vec![
            capability(Mode::SingleNodeWriter, false),
            capability(Mode::MultiNodeMultiWriter, false),
        ],
        ..Default::default()
    }
}

fn range(required_bytes: i64, limit_bytes: i64) -> Option<CapacityRange> {
    Some(CapacityRange { required_bytes, limit_bytes })
}

fn on(volume: &Volume, node: &str, mode: Mode) -> ControllerPublishVolumeRequest {
    ControllerPublishVolumeRequest {
        volume_id: volume.volume_id.clone(),
        node_id: node.to_owned(),
        volume_capability: Some(capability(mode, false)),
        volume_context: volume.volume_context.clone(),
        ..Default::default()
    }
}

async fn everything(w: &mut World) -> Co {
    let plugin = w.add_plugin("p").await;
    plugin.set(|script| script.control(&CONTROLLER));
    Co::new(plugin).await
}

#[test]
fn create_by_name_is_idempotent() {
    world(async |w| {
        let mut co = everything(w).await;
        let ask =
            |required, limit| CreateVolumeRequest { capacity_range: range(required, limit), ..order("n") };
        let volume = co.create(ask(MIB, 0)).await.unwrap();
        assert_eq!((volume.volume_id.as_str(), volume.capacity_bytes), ("id-n", MIB));
        // Also when the plugin died meanwhile.
        assert!(w.plugin("p").kill());
        assert_eq!(w.plugin("p").backend().made().unwrap(), ["volume id-n"]);
        w.plugin("p").start().await;
        let mut co = Co::new(w.plugin("p")).await;
        assert_eq!(co.create(ask(0, 2 * MIB)).await.unwrap(), volume);
        assert_eq!(co.create(ask(2 * MIB, 0)).await, Err(Code::AlreadyExists));
        let long = "n".repeat(128);
        let [one, two] = [co.create(order(&long)).await, co.create(order(&long)).await];
        let long = one.clone().unwrap().volume_id;
        assert!(one == two && long.len() <= 128, "{long}");
        assert_eq!(co.delete(&long).await, Code::Ok);
        let parameters = [("kind".to_owned(), "fast".to_owned())].into();
        let other = CreateVolumeRequest { parameters, ..order("n") };
        assert_eq!(co.create(other).await, Err(Code::AlreadyExists));

        assert_eq!(
            co.create(CreateVolumeRequest { name: String::new(), ..order("") }).await,
            Err(Code::InvalidArgument)
        );
        w.plugin("p").set(|script| script.capacity = 3 * MIB);
        assert_eq!(
            co.create(CreateVolumeRequest { capacity_range: range(4 * MIB, 0), ..order("m") }).await,
            Err(Code::OutOfRange)
        );
        assert_eq!(
            co.create(CreateVolumeRequest { capacity_range: range(3 * MIB, 0), ..order("m") }).await,
            Err(Code::ResourceExhausted)
        );
        let left = co.controller.get_capacity(GetCapacityRequest::default()).await.unwrap().into_inner();
        assert_eq!(left.available_capacity, 2 * MIB);

        assert_eq!([co.delete("id-n").await, co.delete("id-n").await], [Code::Ok, Code::Ok]);
        assert_eq!(w.plugin("p").backend().made().unwrap(), Vec::<String>::new());
        let again = co.create(ask(MIB, 0)).await.unwrap();
        assert_ne!(again.volume_context, volume.volume_context, "another volume");
    });
}

#[test]
fn attachment_stays_until_detach() {
    world(async |w| {
        let mut co = everything(w).await;
        let volume = co.create(order("n")).await.unwrap();
        let single = |node| on(&volume, node, Mode::SingleNodeWriter);
        let context = co.attach(single("node-1")).await.unwrap();
        assert_eq!(co.attach(single("node-1")).await.as_ref(), Ok(&context), "the same again");
        let read_only = ControllerPublishVolumeRequest { readonly: true, ..single("node-1") };
        assert_eq!(co.attach(read_only.clone()).await, Err(Code::AlreadyExists));
        assert_eq!(co.attach(single("node-2")).await, Err(Code::FailedPrecondition));
        assert_eq!(co.delete("id-n").await, Code::FailedPrecondition);
        w.plugin("p").kill();
        assert_eq!(w.leftovers(), ["attachment id-n node-1"]);
        w.plugin("p").start().await;
        let mut co = Co::new(w.plugin("p")).await;
        assert_eq!(co.attach(single("node-1")).await.as_ref(), Ok(&context), "it outlives the plugin");

        assert_eq!(
            [co.detach("id-n", "node-1").await, co.detach("id-n", "node-1").await],
            [Code::Ok, Code::Ok]
        );
        assert_eq!(w.leftovers(), Vec::<String>::new());
        let many = |node| on(&volume, node, Mode::MultiNodeMultiWriter);
        let again = co.attach(many("node-1")).await.unwrap();
        assert_ne!(again, context, "another attachment");
        co.attach(many("node-2")).await.unwrap();
        let made = w.plugin("p").backend().made().unwrap();
        assert_eq!(made, ["volume id-n", "attachment id-n node-1", "attachment id-n node-2"]);
        assert_eq!(co.detach("id-n", "").await, Code::Ok);
        assert_eq!(w.plugin("p").backend().made().unwrap(), ["volume id-n"]);

        let wrong = Volume { volume_context: Map::new(), ..volume.clone() };
        assert_eq!(co.attach(on(&wrong, "node-1", Mode::SingleNodeWriter)).await, Err(Code::InvalidArgument));
        assert_eq!(co.attach(single("node-3")).await, Err(Code::NotFound), "no such node");
        let nothing = ControllerPublishVolumeRequest { volume_capability: None, ..single("node-1") };
        assert_eq!(co.attach(nothing).await, Err(Code::InvalidArgument));
        assert_eq!([co.detach("", "").await, co.delete("").await], [Code::InvalidArgument; 2]);
        let nowhere = Volume { volume_id: "id-m".to_owned(), ..Volume::default() };
        assert_eq!(co.attach(on(&nowhere, "node-1", Mode::SingleNodeWriter)).await, Err(Code::NotFound));
        w.plugin("p").set(|script| script.controller.retain(|can| can != "PUBLISH_READONLY"));
        assert_eq!(co.attach(read_only).await, Err(Code::InvalidArgument));

        w.plugin("p").set(|script| script.max_volumes = 1);
        w.plugin("p").provision("v");
        let provisioned = Volume { volume_id: "v".to_owned(), ..Volume::default() };
        co.attach(on(&provisioned, "node-1", Mode::SingleNodeWriter)).await.unwrap();
        assert_eq!(co.attach(single("node-1")).await, Err(Code::ResourceExhausted));
        assert_eq!(w.plugin("p").backend().made().unwrap(), ["volume id-n", "attachment v node-1"]);
    });
}

fn stage(w: &World, volume: &Volume, publish_context: &Map) -> NodeStageVolumeRequest {
    NodeStageVolumeRequest {
        volume_id: volume.volume_id.clone(),
        publish_context: publish_context.clone(),
        staging_target_path: w.path("targets/staging").to_str().unwrap().to_owned(),
        volume_capability: Some(capability(Mode::SingleNodeWriter, false)),
        volume_context: volume.volume_context.clone(),
        ..Default::default()
    }
}

#[test]
fn halves_and_controllers_share_their_volumes() {
    world(async |w| {
        w.add_plugin("p").await.set(|script| script.control(&CONTROLLER));
        w.plugin("p").set(|script| script.serves = vec![Half::Node]);
        for instance in ["one", "two"] {
            w.add_instance("p", instance).await.set(|script| script.serves = vec![Half::Controller]);
        }
        let mut node = Co::new(w.plugin("p")).await;
        let (mut one, mut two) = (Co::new(w.plugin("p.one")).await, Co::new(w.plugin("p.two")).await);
        assert_eq!(node.create(order("n")).await, Err(Code::Unimplemented));
        let volume = one.create(order("n")).await.unwrap();
        let context = two.attach(on(&volume, "node-1", Mode::SingleNodeWriter)).await.unwrap();
        std::fs::create_dir(w.path("targets/staging")).unwrap();
        assert_eq!(code(one.node.node_stage_volume(stage(w, &volume, &context)).await), Code::Unimplemented);

        let mut staged = async |request| code(node.node.node_stage_volume(request).await);
        assert_eq!(staged(stage(w, &volume, &Map::new())).await, Code::FailedPrecondition);
        let wrong = Volume { volume_context: Map::new(), ..volume.clone() };
        assert_eq!(staged(stage(w, &wrong, &context)).await, Code::InvalidArgument);
        let nowhere = Volume { volume_id: "id-m".to_owned(), ..Volume::default() };
        assert_eq!(staged(stage(w, &nowhere, &context)).await, Code::NotFound);
        assert_eq!(staged(stage(w, &volume, &context)).await, Code::Ok);
        assert_eq!(one.detach("id-n", "node-1").await, Code::Ok);
        assert_eq!(staged(stage(w, &volume, &context)).await, Code::FailedPrecondition, "attached no more");

        // Each has a script and a record of its own.
        w.plugin("p.one").rules([Rule::always("CreateVolume", Act::Fail(14))]);
        assert_eq!(one.create(order("m")).await, Err(Code::Unavailable));
        two.create(order("m")).await.unwrap();
        assert_eq!(["p.one", "p.two"].map(|id| w.plugin(id).count("CreateVolume", "m")), [1, 1]);
        let unstage = NodeUnstageVolumeRequest {
            volume_id: volume.volume_id.clone(),
            staging_target_path: w.path("targets/staging").to_str().unwrap().to_owned(),
        };
        node.node.node_unstage_volume(unstage).await.unwrap();
    });
}

#[test]
fn it_grows_first_there_and_then_here() {
    world(async |w| {
        let mut co = everything(w).await;
        w.plugin("p").set(|script| {
            script.plugin.push("OFFLINE".to_owned());
            script.capabilities.extend(["EXPAND_VOLUME", "GET_VOLUME_STATS"].map(str::to_owned));
        });
        let volume =
            co.create(CreateVolumeRequest { capacity_range: range(MIB, 0), ..order("n") }).await.unwrap();
        let context = co.attach(on(&volume, "node-1", Mode::SingleNodeWriter)).await.unwrap();
        assert_eq!(co.expand("id-n", 2 * MIB, 0).await, Err(Code::FailedPrecondition), "it is attached");
        assert_eq!(co.expand("id-n", MIB, 0).await, Ok((MIB, true)), "nothing to do");
        assert_eq!(co.expand("id-n", 0, MIB / 2).await, Err(Code::OutOfRange));
        w.plugin("p").set(|script| script.plugin.push("ONLINE".to_owned()));
        assert_eq!(co.expand("id-n", 2 * MIB, 0).await, Ok((2 * MIB, true)));
        assert_eq!(co.expand("id-m", 2 * MIB, 0).await, Err(Code::NotFound));

        std::fs::create_dir(w.path("targets/staging")).unwrap();
        let path = w.path("targets/staging").to_str().unwrap().to_owned();
        let grow = |required_bytes| NodeExpandVolumeRequest {
            volume_id: "id-n".to_owned(),
            volume_path: path.clone(),
            capacity_range: Some(CapacityRange { required_bytes, limit_bytes: 0 }),
            ..Default::default()
        };
        let stats = NodeGetVolumeStatsRequest {
            volume_id: "id-n".to_owned(),
            volume_path: path.clone(),
            ..Default::default()
        };
        assert_eq!(code(co.node.node_expand_volume(grow(0)).await), Code::NotFound, "it is not there");
        assert_eq!(code(co.node.node_get_volume_stats(stats.clone()).await), Code::NotFound);
        co.node.node_stage_volume(stage(w, &volume, &context)).await.unwrap();
        assert_eq!(code(co.node.node_expand_volume(grow(3 * MIB)).await), Code::OutOfRange);
        let stored = |w: &mut World| w.plugin("p").backend().get::<Stored>("id-n").unwrap().unwrap();
        assert_eq!(stored(w).node_bytes, MIB);
        let grown = co.node.node_expand_volume(grow(2 * MIB)).await.unwrap().into_inner();
        assert_eq!((grown.capacity_bytes, stored(w).node_bytes), (2 * MIB, 2 * MIB));
        let usage = co.node.node_get_volume_stats(stats).await.unwrap().into_inner().usage;
        let units: Vec<_> = usage.iter().map(VolumeUsage::unit).collect();
        assert_eq!(units, [volume_usage::Unit::Bytes, volume_usage::Unit::Inodes]);
        assert!(usage.iter().all(|usage| usage.total > 0), "{usage:?}");
        rustix::mount::unmount(path.as_str(), rustix::mount::UnmountFlags::empty()).unwrap();
    });
}

#[test]
fn snapshot_is_ready_at_the_scripted_call() {
    world(async |w| {
        let mut co = everything(w).await;
        w.plugin("p").set(|script| script.snapshot_ready_at = 3);
        let volume = co.create(order("n")).await.unwrap();
        let first = co.snapshot("s", "id-n").await.unwrap();
        w.plugin("p").kill();
        w.plugin("p").start().await;
        let mut co = Co::new(w.plugin("p")).await;
        assert_eq!(co.snapshot("s", "id-n").await, Ok(first.clone()), "the plugin still counts");
        let from = |id: &str| CreateVolumeRequest {
            volume_content_source: Some(VolumeContentSource {
                r#type: Some(Type::Snapshot(SnapshotSource { snapshot_id: id.to_owned() })),
            }),
            ..order("copy")
        };
        assert!(!first.ready_to_use);
        assert_eq!(co.create(from("snap-s")).await, Err(Code::FailedPrecondition));
        assert!(co.snapshot("s", "id-n").await.unwrap().ready_to_use);
        assert_eq!(
            co.create(from("snap-s")).await.unwrap().content_source,
            from("snap-s").volume_content_source
        );
        assert_eq!(co.create(order("copy")).await, Err(Code::AlreadyExists), "without its source");
        assert_eq!(co.snapshot("s", "id-copy").await, Err(Code::AlreadyExists));
        assert_eq!(co.snapshot("t", "id-m").await.map(|_| ()), Err(Code::NotFound));

        let mut listed = async |volume: &str| {
            let request = ListSnapshotsRequest { source_volume_id: volume.to_owned(), ..Default::default() };
            co.controller.list_snapshots(request).await.unwrap().into_inner().entries.len()
        };
        assert_eq!([listed("").await, listed("id-n").await, listed("id-copy").await], [1, 1, 0]);
        assert_eq!(volume.capacity_bytes, first.size_bytes);
        let made = w.plugin("p").backend().made().unwrap();
        assert_eq!(made, ["volume id-copy", "volume id-n", "snapshot snap-s"]);
        let delete = DeleteSnapshotRequest { snapshot_id: "snap-s".to_owned(), ..Default::default() };
        for _ in 0..2 {
            co.controller.delete_snapshot(delete.clone()).await.unwrap();
        }
        assert_eq!(w.plugin("p").backend().made().unwrap(), ["volume id-copy", "volume id-n"]);
    });
}

#[test]
fn list_has_pages() {
    world(async |w| {
        let mut co = everything(w).await;
        for name in ["a", "b", "c", "d", "e"] {
            co.create(order(name)).await.unwrap();
        }
        let (first, token) = co.list(2, "").await.unwrap();
        assert_eq!(first, ["id-a", "id-b"]);
        assert_eq!(co.list(1, &token).await.unwrap().0, ["id-c"]);
        // The one that the token names may go.
        assert_eq!(co.delete("id-b").await, Code::Ok);
        let (rest, end) = co.list(0, &token).await.unwrap();
        assert_eq!((rest.len(), end.as_str()), (3, ""));
        w.plugin("p").set(|script| script.page = 1);
        assert_eq!(co.list(3, "").await.unwrap().0, ["id-a"], "no more than it likes");
        assert_eq!(co.list(0, "nonsense").await, Err(Code::Aborted));
        assert_eq!(co.list(-1, "").await, Err(Code::InvalidArgument));
    });
}

#[test]
fn validate_confirms_the_created_capabilities() {
    world(async |w| {
        let mut co = everything(w).await;
        let volume = co.create(order("n")).await.unwrap();
        w.plugin("p").provision("v");
        let mut confirms = async |id: &str, context: &Map, mode| {
            let request = ValidateVolumeCapabilitiesRequest {
                volume_id: id.to_owned(),
                volume_context: context.clone(),
                volume_capabilities: vec![capability(mode, false)],
                ..Default::default()
            };
            let answer = co.controller.validate_volume_capabilities(request).await;
            answer.map(|answer| answer.into_inner().confirmed.is_some()).map_err(|status| status.code())
        };
        assert_eq!(confirms("id-n", &volume.volume_context, Mode::SingleNodeWriter).await, Ok(true));
        assert_eq!(confirms("id-n", &volume.volume_context, Mode::MultiNodeReaderOnly).await, Ok(false));
        assert_eq!(confirms("id-n", &Map::new(), Mode::SingleNodeWriter).await, Ok(false));
        assert_eq!(confirms("v", &Map::new(), Mode::MultiNodeReaderOnly).await, Ok(true));
        assert_eq!(confirms("id-m", &Map::new(), Mode::SingleNodeWriter).await, Err(Code::NotFound));
    });
}

#[test]
fn its_controller_obeys_the_script() {
    world(async |w| {
        let mut co = everything(w).await;
        let made = |w: &mut World| w.plugin("p").backend().made().unwrap();
        w.plugin("p").rules([Rule::once("CreateVolume", Act::FailAfter(4)).of("n")]);
        assert_eq!(co.create(order("n")).await, Err(Code::DeadlineExceeded));
        assert_eq!(made(w), ["volume id-n"], "done, and denied");
        let volume = co.create(order("n")).await.unwrap();
        w.plugin("p").rules([Rule::once("ControllerPublishVolume", Act::Lie(Lie::Nothing))]);
        assert_eq!(co.attach(on(&volume, "node-1", Mode::SingleNodeWriter)).await, Ok(Map::new()));
        assert_eq!(made(w), ["volume id-n"], "a lie");

        w.plugin("p").rules([Rule::once("ControllerPublishVolume", Act::DieAfter)]);
        co.attach(on(&volume, "node-1", Mode::SingleNodeWriter)).await.unwrap_err();
        w.plugin("p").died().await;
        assert_eq!(made(w), ["volume id-n", "attachment id-n node-1"]);
        w.plugin("p").honest();
        w.plugin("p").start().await;
        let mut co = Co::new(w.plugin("p")).await;
        w.plugin("p").set(|script| script.secret = Some(("key".to_owned(), "value".to_owned())));
        assert_eq!(co.detach("id-n", "node-1").await, Code::Unauthenticated);
        let with_secret = ControllerUnpublishVolumeRequest {
            volume_id: "id-n".to_owned(),
            node_id: "node-1".to_owned(),
            secrets: [("key".to_owned(), "value".to_owned())].into(),
        };
        co.controller.controller_unpublish_volume(with_secret).await.unwrap();
        assert_eq!(made(w), ["volume id-n"]);

        w.plugin("p").set(|script| {
            script.secret = None;
            script.control(&["PUBLISH_UNPUBLISH_VOLUME"]);
        });
        assert_eq!(co.create(order("m")).await, Err(Code::Unimplemented), "it cannot");
        let calls = w.plugin("p").calls();
        let reply: Vec<_> = calls.iter().map(|call| (call.call.rpc.as_str(), call.code)).collect();
        assert_eq!(
            reply,
            [
                ("CreateVolume", Some(4)),
                ("CreateVolume", Some(0)),
                ("ControllerPublishVolume", Some(0)),
                ("ControllerPublishVolume", None),
                ("ControllerUnpublishVolume", Some(16)),
                ("ControllerUnpublishVolume", Some(0)),
                ("CreateVolume", Some(12)),
            ]
        );
        assert_eq!(calls[5].call.node, "node-1");
    });
}
