//! No space is left in a volume, and none under it. Its writer gets the error; csid and its rows are not affected.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::process::{Child, Command};

use csid_client::{Client, Error, Kind};
use csid_tests::ask::*;
use csid_tests::kernel;
use csid_tests::world::{World, eventually, program, world};
use rustix::mount::{UnmountFlags, unmount as unmount_now};

use crate::full::{fill, make_room, small_disk};

/// A new volume's external id.
fn create(w: &World) -> String {
    let mut command = Command::new(program("csi-local"));
    command.arg("--state-dir").arg(w.path("volumes")).args(["create", "data", "--size", "16M"]);
    let output = command.output().expect("csi-local");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("UTF-8").trim().to_owned()
}

/// Write until it fails: how much was written, and why no more was.
fn write(path: &Path) -> (u64, std::io::Error) {
    let mut file = File::create(path).expect("a file");
    for block in 0.. {
        if let Err(error) = file.write_all(&[7; 65536]).and_then(|()| file.sync_data()) {
            return (block * 65536, error);
        }
    }
    unreachable!("the volume has an end")
}

/// The mount is what it was for csid, also for one that starts now.
async fn still_mounted(w: &mut World, id: &str) -> Client {
    let before = kernel::volumes_below(&w.path("state/plugins/local")).expect("the mount table");
    for kill in [false, true] {
        if kill {
            w.kill();
            w.start().await;
        }
        let client = w.client().await;
        settled(&client).await;
        let row = row(&client, id, "job").await.expect("its row");
        assert_eq!((row.state.as_str(), row.healthy, row.error.as_str()), ("mounted", true, ""));
    }
    assert_eq!(kernel::volumes_below(&w.path("state/plugins/local")).expect("the mount table"), before);
    w.client().await
}

/// A process that another test has begun to start uses what was open here, until it is another program.
async fn unmounted(client: &Client, id: &str) {
    eventually("nobody uses the volume", async || match unmount(client, id, "job").await {
        Err(Error::Csid(error)) if error.kind == Kind::Busy => false,
        result => {
            result.expect("an unmount");
            true
        }
    })
    .await;
}

/// Everything is unmounted, and csi-local's disk with it.
async fn nothing_left(w: &mut World, client: &Client, mut served: Child) {
    served.kill().and_then(|()| served.wait()).expect("csi-local ends");
    let volumes = w.path("volumes");
    eventually("nobody uses the volumes", async || unmount_now(&volumes, UnmountFlags::empty()).is_ok())
        .await;
    w.nothing_left(client).await;
}

#[test]
fn full_volume_affects_its_writer_alone() {
    world(async |w| {
        small_disk(&w.path("volumes"), "size=64m");
        let (served, client) = running_local(w).await;
        let id = create(w);
        let source = mounted(&client, "job", of_plugin("local", &id)).await;
        let (written, error) = write(&source.join("file"));
        assert_eq!(error.kind(), ErrorKind::StorageFull, "after {written} bytes");
        let client = still_mounted(w, &id).await;
        unmounted(&client, &id).await;
        let source = mounted(&client, "job", of_plugin("local", &id)).await;
        assert!(fs::metadata(source.join("file")).expect("the file").len() >= written);
        fs::remove_file(source.join("file")).expect("room is made");
        fs::write(source.join("other"), "data").expect("it has space again");
        unmounted(&client, &id).await;
        nothing_left(w, &client, served).await;
    });
}

/// An image takes its space when it is written to, and somebody else has it.
#[test]
fn volume_without_backing_space_unmounts_and_returns() {
    world(async |w| {
        small_disk(&w.path("volumes"), "size=64m");
        let (served, client) = running_local(w).await;
        let id = create(w);
        let source = mounted(&client, "job", of_plugin("local", &id)).await;
        fs::write(source.join("before"), "data").expect("a file");
        rustix::fs::syncfs(File::open(&source).expect("the volume")).expect("it is synced");
        fill(&w.path("volumes"));
        let (written, error) = write(&source.join("file"));
        assert!(written < 8 << 20, "the volume has more, its disk has not: {written} bytes, then {error}");
        let client = still_mounted(w, &id).await;
        unmounted(&client, &id).await;
        make_room(&w.path("volumes"));
        let source = mounted(&client, "job", of_plugin("local", &id)).await;
        assert_eq!(fs::read_to_string(source.join("before")).expect("what was synced"), "data");
        fs::write(source.join("after"), "data").expect("it has space again");
        unmounted(&client, &id).await;
        nothing_left(w, &client, served).await;
    });
}
