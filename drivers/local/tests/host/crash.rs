//! The driver killed, at moments that are known and at many that are not.

use std::os::unix::fs::FileExt;
use std::time::Duration;

use csi_proto::csi::v1::volume_capability::access_mode::Mode;
use tonic::Code;

use crate::harness::*;

#[tokio::test]
async fn interrupted_mkfs_is_repeated_after_its_end() {
    let mut host = Host::new();
    let wanted = capability("ext4", Mode::SingleNodeWriter);
    host.create("v", "ext4", 16 * MIB).await.unwrap();

    // An mkfs that has written something and does not end.
    let pid = host.path("mkfs.pid");
    let path = host.path.clone();
    host.replace_mkfs(&format!(
        "for image; do :; done; printf half-made | dd of=$image seek=5000 bs=1 conv=notrunc 2>&-\n\
         echo $$ >{0}.new; mv {0}.new {0}; exec sleep 60 >&- 2>&-",
        pid.display()
    ));
    host.kill();
    host.start();
    let (mut node, request) = (host.node().await, host.stage_request("v", &wanted));
    let stage = tokio::spawn(async move { node.node_stage_volume(request).await });
    wait_for_async("mkfs", || pid.exists()).await;
    host.kill();
    assert!(stage.await.unwrap().is_err());

    // It runs on without its driver, and the next driver must not write to the same image.
    host.path = path;
    host.start();
    let waiting = tokio::time::timeout(Duration::from_millis(300), host.stage("v", &wanted)).await;
    assert!(waiting.is_err(), "{waiting:?}");
    assert_eq!(host.mounts(), Vec::<String>::new());
    let orphan = std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
    let orphan = rustix::process::Pid::from_raw(orphan).unwrap();
    rustix::process::kill_process(orphan, rustix::process::Signal::KILL).unwrap();
    host.stage("v", &wanted).await.unwrap();
    std::fs::write(host.seen("staging/file"), "kept").unwrap();
    host.unstage("v").await.unwrap();
    host.assert_clean();
}

async fn wait_for_async(what: &str, done: impl Fn() -> bool) {
    for _ in 0..5000 {
        if done() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    panic!("waiting for {what}");
}

#[tokio::test]
async fn sigterm_finishes_what_runs() {
    let mut host = Host::new();
    let wanted = capability("ext4", Mode::SingleNodeWriter);
    host.create("v", "ext4", 16 * MIB).await.unwrap();
    let started = host.path("started");
    let path = host.path.clone();
    host.replace_mkfs(&format!("touch {}; sleep 0.5; PATH={path} exec mkfs.ext4 \"$@\"", started.display()));
    host.kill();
    host.start();
    let (mut node, request) = (host.node().await, host.stage_request("v", &wanted));
    let stage = tokio::spawn(async move { node.node_stage_volume(request).await });
    wait_for_async("mkfs", || started.exists()).await;
    // A client that never says anything does not hold up the end.
    let idle = std::os::unix::net::UnixStream::connect(host.path("csi.sock")).unwrap();
    let end = tokio::time::timeout(Duration::from_secs(10), host.terminate()).await.unwrap();
    assert_eq!(end.code(), Some(0));
    drop(idle);
    stage.await.unwrap().unwrap();
    assert_eq!(host.mounts().len(), 1);
    host.start();
    host.unstage("v").await.unwrap();
    host.assert_clean();
}

#[tokio::test]
async fn data_is_never_formatted_away() {
    let host = Host::new();
    let wanted = capability("ext4", Mode::SingleNodeWriter);
    host.create("v", "ext4", 16 * MIB).await.unwrap();
    // Somebody else's bytes in a volume that was never used.
    let image = std::fs::File::options().read(true).write(true).open(host.image("v")).unwrap();
    image.write_all_at(b"precious", 9 << 20).unwrap();
    assert_eq!(code(host.stage("v", &wanted).await), Code::FailedPrecondition);
    let mut bytes = [0; 8];
    image.read_exact_at(&mut bytes, 9 << 20).unwrap();
    assert_eq!(&bytes, b"precious");
    image.write_all_at(&[0; 8], 9 << 20).unwrap();

    // A file-system whose superblock is lost: an error, and for fsck to repair.
    host.stage("v", &wanted).await.unwrap();
    std::fs::write(host.seen("staging/file"), "kept").unwrap();
    host.unstage("v").await.unwrap();
    wait_for("autoclear", || host.loops().is_empty());
    let mut superblock = [0; 1024];
    image.read_exact_at(&mut superblock, 1024).unwrap();
    image.write_all_at(&[0; 1024], 1024).unwrap();
    assert_eq!(code(host.stage("v", &wanted).await), Code::Internal);
    let mut now = [1; 1024];
    image.read_exact_at(&mut now, 1024).unwrap();
    assert_eq!(now, [0; 1024]);
    image.write_all_at(&superblock, 1024).unwrap();
    host.stage("v", &wanted).await.unwrap();
    assert_eq!(std::fs::read(host.seen("staging/file")).unwrap(), b"kept");
    host.unstage("v").await.unwrap();
    host.assert_clean();
}

/// Everything there is, from nothing to nothing.
async fn cycle(host: &Host, fs: &str, size: i64) -> Result<(), tonic::Status> {
    let wanted = capability(fs, Mode::SingleNodeWriter);
    host.create("v", fs, size).await?;
    host.stage("v", &wanted).await?;
    host.publish("v", &wanted, "t", false).await?;
    host.expand("v", size * 2).await?;
    host.unpublish("v", "t").await?;
    host.unstage("v").await?;
    host.delete("v").await
}

#[tokio::test]
async fn killed_anywhere_it_continues_or_clears_up() {
    for fs in ["ext4", "block"] {
        let mut host = Host::new();
        let size = 8 * MIB;
        let mut cut_short = 0;
        for round in 0..40 {
            let pid = rustix::process::Pid::from_raw(host.driver_pid()).unwrap();
            let killer = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_micros(700 * round));
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            });
            if cycle(&host, fs, size).await.is_err() {
                cut_short += 1;
            }
            killer.join().unwrap();
            host.kill();
            host.start();
            // One half goes on where it was, the other goes back.
            if round % 2 == 0 {
                let wanted = capability(fs, Mode::SingleNodeWriter);
                if host.path("state/volumes/v").exists() {
                    host.stage("v", &wanted).await.unwrap();
                    host.publish("v", &wanted, "t", false).await.unwrap();
                    assert_eq!(host.loops().len(), 1, "round {round}");
                }
            }
            for answer in [host.unpublish("v", "t").await, host.unstage("v").await] {
                assert!(matches!(code(answer), Code::Ok | Code::NotFound), "round {round}");
            }
            host.delete("v").await.unwrap();
            host.assert_clean();
        }
        assert!(cut_short >= 10, "only {cut_short} of 40 rounds were cut short");
        cycle(&host, fs, size).await.unwrap();
    }
}
