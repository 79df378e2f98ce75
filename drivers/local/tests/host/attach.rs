//! Volumes that are attached before they are staged: `serve --attach`.

use csi_proto::csi::v1::controller_service_capability::{Type, rpc};
use csi_proto::csi::v1::volume_capability::access_mode::Mode;
use csi_proto::csi::v1::*;
use tonic::{Code, Status};

use crate::harness::*;

fn attaching() -> Host {
    let mut host = Host::new();
    host.kill();
    host.flags.push("--attach");
    host.start();
    host
}

fn request(volume: &str, node: &str, fs: &str, readonly: bool) -> ControllerPublishVolumeRequest {
    ControllerPublishVolumeRequest {
        volume_id: volume.into(),
        node_id: node.into(),
        volume_capability: Some(capability(fs, Mode::SingleNodeWriter)),
        readonly,
        ..Default::default()
    }
}

/// Attaches, and has stage and publish say so from here on.
async fn attach(host: &mut Host, volume: &str, node: &str, fs: &str, readonly: bool) -> Result<(), Status> {
    let answer =
        host.controller().await.controller_publish_volume(request(volume, node, fs, readonly)).await?;
    host.context = answer.into_inner().publish_context;
    assert!(!host.context.is_empty());
    Ok(())
}

async fn detach(host: &Host, volume: &str, node: &str) -> Result<(), Status> {
    let request = ControllerUnpublishVolumeRequest {
        volume_id: volume.into(),
        node_id: node.into(),
        ..Default::default()
    };
    host.controller().await.controller_unpublish_volume(request).await.map(drop)
}

async fn published_nodes(host: &Host) -> Vec<String> {
    let listed = host.controller().await.list_volumes(ListVolumesRequest::default()).await.unwrap();
    listed.into_inner().entries.remove(0).status.unwrap().published_node_ids
}

#[tokio::test]
async fn a_volume_is_attached_before_it_is_staged() {
    for fs in ["ext4", "block"] {
        let mut host = attaching();
        let wanted = capability(fs, Mode::SingleNodeWriter);
        host.create("v", fs, 16 * MIB).await.unwrap();
        assert_eq!(code(host.stage("v", &wanted).await), Code::FailedPrecondition);
        assert_eq!(published_nodes(&host).await, Vec::<String>::new());
        attach(&mut host, "v", "here", fs, false).await.unwrap();
        let first = host.context.clone();
        host.kill();
        host.start();
        attach(&mut host, "v", "here", fs, false).await.unwrap();
        assert_eq!(host.context, first, "asked for again it is the same, after a restart too");
        assert_eq!(published_nodes(&host).await, ["here"]);

        host.context.clear();
        assert_eq!(code(host.stage("v", &wanted).await), Code::FailedPrecondition, "no context");
        host.context = first.clone();
        host.stage("v", &wanted).await.unwrap();
        host.context.clear();
        assert_eq!(code(host.publish("v", &wanted, "t", false).await), Code::FailedPrecondition);
        host.context = first.clone();
        host.publish("v", &wanted, "t", false).await.unwrap();

        assert_eq!(code(detach(&host, "v", "here").await), Code::FailedPrecondition, "published");
        host.unpublish("v", "t").await.unwrap();
        assert_eq!(code(detach(&host, "v", "here").await), Code::FailedPrecondition, "staged");
        host.unstage("v").await.unwrap();
        wait_for("autoclear", || host.loops().is_empty());
        assert_eq!(code(host.delete("v").await), Code::FailedPrecondition, "attached");
        for node in ["here", "here", ""] {
            detach(&host, "v", node).await.unwrap();
        }
        host.kill();
        host.start();
        assert_eq!(
            code(host.stage("v", &wanted).await),
            Code::FailedPrecondition,
            "detached, after a restart too"
        );
        attach(&mut host, "v", "here", fs, false).await.unwrap();
        assert_ne!(host.context, first, "another attachment");
        host.context = first;
        assert_eq!(code(host.stage("v", &wanted).await), Code::FailedPrecondition, "an old context");
        detach(&host, "v", "").await.unwrap();
        host.delete("v").await.unwrap();
        host.assert_clean();
    }
}

#[tokio::test]
async fn invalid_attach_is_refused() {
    let mut host = attaching();
    host.create("v", "ext4", 16 * MIB).await.unwrap();
    for (volume, node, fs, expected) in [
        ("", "here", "ext4", Code::InvalidArgument),
        ("v", "", "ext4", Code::InvalidArgument),
        ("v", "here", "block", Code::InvalidArgument),
        ("gone", "here", "ext4", Code::NotFound),
        ("../volumes/v", "here", "ext4", Code::NotFound),
        ("v", "elsewhere", "ext4", Code::NotFound),
    ] {
        let answer = attach(&mut host, volume, node, fs, false).await;
        assert_eq!(code(answer), expected, "{volume:?} {node:?} {fs}");
    }
    let mut several = request("v", "here", "ext4", false);
    several.volume_capability = Some(capability("ext4", Mode::MultiNodeMultiWriter));
    assert_eq!(
        code(host.controller().await.controller_publish_volume(several.clone()).await),
        Code::InvalidArgument
    );
    several.volume_capability = None;
    assert_eq!(code(host.controller().await.controller_publish_volume(several).await), Code::InvalidArgument);

    attach(&mut host, "v", "here", "ext4", false).await.unwrap();
    assert_eq!(code(attach(&mut host, "v", "elsewhere", "ext4", false).await), Code::NotFound);
    // Not there, or not attached there: nothing to do. What is attached here stays so.
    assert_eq!(code(detach(&host, "", "here").await), Code::InvalidArgument);
    for (volume, node) in [("gone", "here"), ("v", "elsewhere"), ("../v", "")] {
        detach(&host, volume, node).await.unwrap();
    }
    assert_eq!(published_nodes(&host).await, ["here"]);

    // The host under another name is a second node.
    host.kill();
    host.flags = vec!["--node-id", "renamed", "--attach"];
    host.start();
    assert_eq!(code(attach(&mut host, "v", "renamed", "ext4", false).await), Code::FailedPrecondition);
    let wanted = capability("ext4", Mode::SingleNodeWriter);
    assert_eq!(code(host.stage("v", &wanted).await), Code::FailedPrecondition);
    detach(&host, "v", "here").await.unwrap();
    attach(&mut host, "v", "renamed", "ext4", false).await.unwrap();
    host.stage("v", &wanted).await.unwrap();
    host.unstage("v").await.unwrap();
    host.assert_clean();
}

#[tokio::test]
async fn attached_for_reading_it_is_only_read() {
    for fs in ["ext4", "block"] {
        let mut host = attaching();
        let wanted = capability(fs, Mode::SingleNodeWriter);
        host.create("v", fs, 16 * MIB).await.unwrap();
        attach(&mut host, "v", "here", fs, true).await.unwrap();
        assert_eq!(code(attach(&mut host, "v", "here", fs, false).await), Code::AlreadyExists);
        host.stage("v", &wanted).await.unwrap();
        host.publish("v", &wanted, "t", false).await.unwrap();
        host.publish("v", &wanted, "t", false).await.unwrap();
        let target = host.seen("publish/t");
        if fs == "block" {
            let ro = std::fs::read_to_string(format!("/sys/dev/block/{}/ro", device_of(&target))).unwrap();
            assert_eq!(ro.trim(), "1");
        } else {
            let refused = std::fs::write(target.join("file"), "x").unwrap_err();
            assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
        }
        host.unpublish("v", "t").await.unwrap();
        host.unstage("v").await.unwrap();
        host.assert_clean();
    }
}

async fn has(host: &Host, wanted: rpc::Type) -> bool {
    let request = ControllerGetCapabilitiesRequest {};
    let answer = host.controller().await.controller_get_capabilities(request).await.unwrap().into_inner();
    let is = |c: &ControllerServiceCapability| match &c.r#type {
        Some(Type::Rpc(rpc)) => rpc.r#type == i32::from(wanted),
        None => false,
    };
    answer.capabilities.iter().any(is)
}

#[tokio::test]
async fn without_the_flag_nothing_is_attached() {
    let mut host = attaching();
    let of_attach =
        [rpc::Type::PublishUnpublishVolume, rpc::Type::PublishReadonly, rpc::Type::ListVolumesPublishedNodes];
    for capability in of_attach {
        assert!(has(&host, capability).await);
    }
    host.create("v", "ext4", 16 * MIB).await.unwrap();
    attach(&mut host, "v", "here", "ext4", false).await.unwrap();

    host.kill();
    host.flags.pop();
    host.start();
    for capability in of_attach {
        assert!(!has(&host, capability).await);
    }
    assert_eq!(code(attach(&mut host, "v", "here", "ext4", false).await), Code::Unimplemented);
    assert_eq!(code(detach(&host, "v", "here").await), Code::Unimplemented);
    host.context.clear();
    host.stage("v", &capability("ext4", Mode::SingleNodeWriter)).await.unwrap();
    host.unstage("v").await.unwrap();
    wait_for("autoclear", || host.loops().is_empty());
    // What another run of the driver attached holds nothing up.
    host.delete("v").await.unwrap();
    host.assert_clean();
}
