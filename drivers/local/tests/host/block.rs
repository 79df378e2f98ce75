//! Raw block volumes, and devices that are not there.

use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

use csi_proto::csi::v1::volume_capability::access_mode::Mode;
use csi_proto::csi::v1::*;
use tonic::Code;

use crate::harness::*;

#[tokio::test]
async fn a_block_volume_is_a_device_of_its_size() {
    let mut host = Host::new();
    let wanted = capability("block", Mode::SingleNodeMultiWriter);
    host.create("v", "block", 4 * MIB).await.unwrap();
    assert_eq!(code(host.publish("v", &wanted, "t", false).await), Code::FailedPrecondition);
    host.stage("v", &wanted).await.unwrap();
    host.kill();
    host.start();
    host.stage("v", &wanted).await.unwrap();
    host.publish("v", &wanted, "t", false).await.unwrap();
    host.publish("v", &wanted, "t", false).await.unwrap();
    assert_eq!((host.loops().len(), host.mounts().len()), (1, 1));

    let target = host.seen("publish/t");
    assert!(target.metadata().unwrap().file_type().is_block_device());
    let device = std::fs::File::options().read(true).write(true).open(&target).unwrap();
    device.write_all_at(b"kept", 4 * MIB as u64 - 4).unwrap();
    assert_eq!(device.write_at(b"x", 4 * MIB as u64).unwrap_err().kind(), ErrorKind::StorageFull);
    device.sync_all().unwrap();
    drop(device);

    assert_eq!(host.expand("v", 8 * MIB).await.unwrap(), 8 * MIB);
    assert_eq!(host.node_expand("v", "t").await.unwrap(), 8 * MIB);
    let size = std::fs::read_to_string(format!("/sys/dev/block/{}/size", device_of(&target))).unwrap();
    assert_eq!(size.trim(), (8 * MIB / 512).to_string());

    assert_eq!(code(host.unstage("v").await), Code::FailedPrecondition, "still published");
    assert_eq!(code(host.delete("v").await), Code::FailedPrecondition, "still staged");
    host.unpublish_closed("v", "t").await;
    host.unstage("v").await.unwrap();
    host.assert_clean();
    let image = std::fs::File::open(host.image("v")).unwrap();
    let mut bytes = [0; 4];
    image.read_exact_at(&mut bytes, 4 * MIB as u64 - 4).unwrap();
    assert_eq!(&bytes, b"kept");
    assert_eq!(
        code(host.stage("v", &capability("ext4", Mode::SingleNodeWriter)).await),
        Code::InvalidArgument
    );
}

/// Newer kernels open a read-only device for writing, and refuse the write.
fn cannot_be_written(device: &Path) -> bool {
    let open = std::fs::File::options().write(true).open(device);
    open.and_then(|d| d.write_all_at(b"x", 0).and_then(|()| d.sync_all())).is_err()
}

#[tokio::test]
async fn a_read_only_block_publish_cannot_be_written() {
    let host = Host::new();
    host.create("v", "block", 4 * MIB).await.unwrap();
    let wanted = capability("block", Mode::SingleNodeMultiWriter);
    host.stage("v", &wanted).await.unwrap();
    host.publish("v", &wanted, "ro", true).await.unwrap();
    host.publish("v", &wanted, "rw", false).await.unwrap();
    for (target, read_only) in [("ro", true), ("rw", false)] {
        let path = host.seen(&format!("publish/{target}"));
        let ro = std::fs::read_to_string(format!("/sys/dev/block/{}/ro", device_of(&path))).unwrap();
        assert_eq!(ro.trim() == "1", read_only);
        assert_eq!(cannot_be_written(&path), read_only, "{target}");
    }
    assert_eq!(code(host.publish("v", &wanted, "ro", false).await), Code::AlreadyExists);
    for target in ["ro", "rw"] {
        host.unpublish_closed("v", target).await;
    }
    host.unstage("v").await.unwrap();
    host.assert_clean();

    let reader = capability("block", Mode::SingleNodeReaderOnly);
    host.stage("v", &reader).await.unwrap();
    host.publish("v", &reader, "t", false).await.unwrap();
    assert!(cannot_be_written(&host.seen("publish/t")));
    host.unpublish_closed("v", "t").await;
    host.unstage("v").await.unwrap();
    host.assert_clean();
}

#[tokio::test]
async fn block_volume_has_one_writer() {
    let host = Host::new();
    host.create("v", "block", 4 * MIB).await.unwrap();
    let wanted = capability("block", Mode::SingleNodeSingleWriter);
    host.stage("v", &wanted).await.unwrap();
    host.publish("v", &wanted, "a", false).await.unwrap();
    assert_eq!(code(host.publish("v", &wanted, "b", false).await), Code::FailedPrecondition);
    host.unpublish("v", "a").await.unwrap();
    host.publish("v", &wanted, "b", false).await.unwrap();
    host.unpublish("v", "b").await.unwrap();
    host.unstage("v").await.unwrap();
    host.assert_clean();
}

#[tokio::test]
async fn open_device_is_reported_and_attached_once() {
    let host = Host::new();
    host.create("v", "block", 4 * MIB).await.unwrap();
    let wanted = capability("block", Mode::SingleNodeWriter);
    host.stage("v", &wanted).await.unwrap();
    host.publish("v", &wanted, "t", false).await.unwrap();
    let user = std::fs::File::open(host.seen("publish/t")).unwrap();
    assert_eq!(code(host.unpublish("v", "t").await), Code::FailedPrecondition, "open there");
    drop(user);
    let user = std::fs::File::open(format!("/dev/{}", host.loops()[0])).unwrap();
    host.unpublish_closed("v", "t").await;
    assert_eq!(code(host.unstage("v").await), Code::FailedPrecondition);
    assert_eq!(code(host.stage("v", &wanted).await), Code::FailedPrecondition);
    assert_eq!(host.loops().len(), 1);
    drop(user);
    host.unstage("v").await.unwrap();
    host.assert_clean();
}

#[tokio::test]
async fn missing_devices_are_made_or_named() {
    let host = Host::new();
    // As in a container: a /dev without udev and without a single loop node.
    host.shell("mount -t tmpfs dev /dev; mknod /dev/null c 1 3; mknod /dev/loop-control c 10 237");
    host.create("v", "ext4", 16 * MIB).await.unwrap();
    let wanted = capability("ext4", Mode::SingleNodeWriter);
    host.stage("v", &wanted).await.unwrap();
    host.unstage("v").await.unwrap();
    assert_eq!(host.identity().await.probe(ProbeRequest {}).await.unwrap().into_inner().ready, Some(true));

    host.shell("rm /dev/loop-control");
    let probe = host.identity().await.probe(ProbeRequest {}).await.unwrap_err();
    assert_eq!(probe.code(), Code::FailedPrecondition);
    assert!(probe.message().contains("modprobe loop"), "{probe}");
    let stage = host.stage("v", &wanted).await.unwrap_err();
    assert!(stage.message().contains("/dev/loop-control"), "{stage}");
    assert_eq!(host.mounts(), Vec::<String>::new());

    std::fs::remove_file(host.image("v")).unwrap();
    host.shell("mknod /dev/loop-control c 10 237");
    assert!(matches!(code(host.stage("v", &wanted).await), Code::NotFound | Code::Internal));
    host.delete("v").await.unwrap();
    assert!(is_missing(&host.path("state/volumes/v")));
}
