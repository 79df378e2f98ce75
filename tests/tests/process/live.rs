//! The tmpfs below a plugin's root, where csid makes the directories of mounts.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use csid_client::{Kind, UnregisterOptions};
use csid_tests::ask::*;
use csid_tests::fault::Fault;
use csid_tests::kernel;
use csid_tests::world::{World, eventually, refusal, world};
use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags, mount_remount};
use rustix::mount::{mount as kernel_mount, unmount as kernel_unmount};

use crate::drains::by_call;

/// More than a start or a mount takes, where nothing hangs.
const AT_ONCE: Duration = Duration::from_secs(10);

fn live(w: &World) -> PathBuf {
    w.path("state/plugins/p/live")
}

/// The numbers of csid's tmpfs at the plugin's root.
fn tmpfs(w: &World) -> Vec<u64> {
    let there = kernel::mounts().unwrap().into_iter();
    there.filter(|mount| mount.is_live() && mount.point == live(w)).map(|mount| mount.id).collect()
}

/// Mounts a FUSE file system whose server is this test. It answers nothing.
fn fuse(path: &Path) -> OwnedFd {
    let server = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0", server.as_raw_fd());
    let options = std::ffi::CString::new(options).unwrap();
    kernel_mount("hung", path, "fuse", MountFlags::empty(), Some(options.as_c_str())).unwrap();
    server
}

fn detach(path: &Path) {
    kernel_unmount(path, UnmountFlags::DETACH).unwrap();
}

/// What is in the directories of volumes.
fn left(w: &World) -> Vec<PathBuf> {
    let kinds = ["staging", "private", "publish"].map(|kind| live(w).join(kind));
    kinds.iter().flat_map(|kind| kernel::tree(kind).unwrap()).collect()
}

#[test]
fn mounts_are_made_on_one_tmpfs_over_restarts() {
    world(async |w| {
        let client = running(w).await;
        w.add_device("p", "b");
        assert!(tmpfs(w).is_empty(), "not before the first mount");
        let source = mounted(&client, "job", inline("v")).await;
        let device = mounted(&client, "disk", block("b")).await;
        let first = tmpfs(w);
        assert!(first.len() == 1 && source.starts_with(live(w)) && device.starts_with(live(w)));
        assert!(row(&client, "v", "job").await.unwrap().staging.starts_with(live(w).to_str().unwrap()));
        let mounts = kernel::volumes_below(&live(w)).unwrap();
        for kill in [true, false] {
            if kill {
                w.kill()
            } else {
                w.stop().await
            }
            let client = w.start().await;
            healthy(&client, "p").await;
            assert_eq!((tmpfs(w), kernel::volumes_below(&live(w)).unwrap()), (first.clone(), mounts.clone()));
            assert_eq!(state(&client, "v", "job").await, "mounted");
            let other = mounted(&client, "job", inline("other")).await;
            assert!(other.starts_with(live(w)));
            unmount(&client, "other", "job").await.unwrap();
        }
        let client = w.client().await;
        unmount(&client, "v", "job").await.unwrap();
        unmount(&client, "b", "disk").await.unwrap();
        assert_eq!((left(w), tmpfs(w)), (vec![], first));
        w.nothing_left(&client).await;
    });
}

#[test]
fn killed_csid_leaves_one_tmpfs_or_none() {
    world(async |w| {
        let fault = Fault::of(w);
        running(w).await;
        for (edge, due) in [("live.before", 0), ("live.after", 1), ("NodeStageVolume.before", 1)] {
            let client = w.client().await;
            healthy(&client, "p").await;
            fault.arm(&format!("{edge}:1"));
            mount(&client, "job", inline("v")).await.unwrap_err();
            eventually("csid is killed", async || w.dead()).await;
            assert_eq!((fault.disarm(), tmpfs(w).len()), (edge.to_owned(), due));
            let client = w.start().await;
            healthy(&client, "p").await;
            let source = mounted(&client, "job", inline("v")).await;
            assert_eq!((source.starts_with(live(w)), tmpfs(w).len()), (true, 1), "{edge}");
            unmount(&client, "v", "job").await.unwrap();
            w.nothing_left(&client).await;
            if edge == "live.before" {
                detach(&live(w));
            }
        }
    });
}

#[test]
fn tmpfs_unmounted_while_idle_is_made_again() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "job", inline("v")).await;
        unmount(&client, "v", "job").await.unwrap();
        detach(&live(w));
        let source = mounted(&client, "job", inline("v")).await;
        assert!(source.starts_with(live(w)) && tmpfs(w).len() == 1);
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// What was mounted in it goes with it. So nothing prevents another one.
#[test]
fn tmpfs_unmounted_in_use_is_made_again() {
    world(async |w| {
        let client = running(w).await;
        let paths = [mounted(&client, "job", inline("a")).await, mounted(&client, "job", inline("b")).await];
        detach(&live(w));
        let other = mounted(&client, "job", inline("other")).await;
        assert!(other.starts_with(live(w)) && tmpfs(w).len() == 1, "{other:?}");
        for (volume, path) in ["a", "b"].into_iter().zip(paths) {
            assert_eq!(mounted(&client, "job", inline(volume)).await, path, "it is repaired");
        }
        for volume in ["a", "b", "other"] {
            unmount(&client, volume, "job").await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

/// A removal looks for the tmpfs again, and no restart of csid is needed.
#[test]
fn tmpfs_covered_at_a_start_is_found_later() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "job", inline("v")).await;
        w.kill();
        kernel_mount("cover", live(w), "tmpfs", MountFlags::empty(), None).unwrap();
        let client = w.start().await;
        healthy(&client, "p").await;
        detach(&live(w));
        unmount(&client, "v", "job").await.unwrap();
        assert_eq!(tmpfs(w).len(), 1);
        w.nothing_left(&client).await;
    });
}

#[test]
fn root_that_is_a_mount_point_named_publish_serves() {
    world(async |w| {
        let root = w.path("publish");
        fs::create_dir(&root).unwrap();
        kernel_mount("root", &root, "tmpfs", MountFlags::empty(), None).unwrap();
        w.add_plugin_with("p", &format!("plugin-root = {root:?}\n")).await;
        let client = w.start().await;
        healthy(&client, "p").await;
        let source = mounted(&client, "job", inline("v")).await;
        assert!(source.starts_with(root.join("live/publish")), "{source:?}");
        w.kill();
        let client = w.start().await;
        healthy(&client, "p").await;
        unmount(&client, "v", "job").await.unwrap();
        assert_eq!(kernel::tree(&root.join("live/publish")).unwrap(), Vec::<PathBuf>::new());
        detach(&root.join("live"));
        detach(&root);
    });
}

#[test]
fn foreign_mount_at_its_place_is_left_alone() {
    world(async |w| {
        w.add_plugin("p").await;
        fs::create_dir_all(live(w)).unwrap();
        let server = fuse(&live(w));
        let begun = Instant::now();
        let client = w.start().await;
        healthy(&client, "p").await;
        let source = mounted(&client, "job", inline("v")).await;
        assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
        assert!(source.starts_with(w.path("state/plugins/p/publish")), "{source:?}");
        w.kill();
        let client = w.start().await;
        healthy(&client, "p").await;
        unmount(&client, "v", "job").await.unwrap();
        assert_eq!(kernel::stacked(&live(w)).unwrap(), 1);
        assert!(fs::read_to_string(w.path("csid.log")).unwrap().contains("no tmpfs can be mounted"));
        drop(server);
        detach(&live(w));
        w.nothing_left(&client).await;
    });
}

/// csid's threads end with it, also where a plugin mounts something over the tmpfs.
#[test]
fn hung_mount_over_the_tmpfs_holds_no_csid_up() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "job", inline("v")).await;
        let server = fuse(&live(w));
        let begun = Instant::now();
        assert_eq!(row(&client, "v", "job").await.unwrap().state, "mounted");
        w.kill();
        assert_eq!(crate::hung::holders(&w.path("state/journal")), []);
        let client = w.start().await;
        assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
        assert_eq!(rows(&client).await.len(), 1);
        w.kill();
        assert_eq!(crate::hung::holders(&w.path("state/journal")), []);
        drop(server);
        detach(&live(w));
        let client = w.start().await;
        healthy(&client, "p").await;
        assert_eq!(state(&client, "v", "job").await, "mounted");
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// As of an older csid.
#[test]
fn rows_below_the_root_itself_are_unmounted() {
    world(async |w| {
        w.add_plugin("p").await;
        let file = live(w).join("file");
        fs::create_dir_all(live(w)).unwrap();
        fs::write(&file, "in the way").unwrap();
        let client = w.start().await;
        healthy(&client, "p").await;
        let old = mounted(&client, "one", shared("v")).await;
        assert!(old.starts_with(w.path("state/plugins/p/publish")) && tmpfs(w).is_empty());
        fs::remove_file(&file).unwrap();
        w.kill();
        let client = w.start().await;
        healthy(&client, "p").await;
        let new = mounted(&client, "two", shared("v")).await;
        assert!(new.starts_with(live(w)), "{new:?}");
        assert_eq!(mounted(&client, "one", shared("v")).await, old, "it is there");
        for consumer in ["one", "two"] {
            unmount(&client, "v", consumer).await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn full_tmpfs_refuses_a_mount_and_says_so() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "job", inline("v")).await;
        mount_remount(live(w), MountFlags::NOSUID, c"nr_inodes=9").unwrap();
        let (kind, error) = refusal(mount(&client, "job", inline("other")).await);
        assert_eq!(kind, Kind::Internal);
        assert!(error.message.contains(&format!("the tmpfs at {}", live(w).display())), "{error}");
        unmount(&client, "v", "job").await.unwrap();
        mounted(&client, "job", inline("other")).await;
        unmount(&client, "other", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn unregistered_plugin_leaves_no_tmpfs() {
    world(async |w| {
        let client = by_call(w).await;
        mounted(&client, "job", inline("v")).await;
        refusal(client.unregister_plugin("p", UnregisterOptions::default()).await);
        assert_eq!(tmpfs(w).len(), 1);
        unmount(&client, "v", "job").await.unwrap();
        client.unregister_plugin("p", UnregisterOptions::default()).await.unwrap();
        assert!(tmpfs(w).is_empty());
        w.nothing_left(&client).await;
    });
}

#[test]
fn reboot_without_a_tmpfs_restores_the_mount() {
    world(async |w| {
        let client = running(w).await;
        registered(&client, "v", &[csid_client::AccessMode::SingleNodeWriter]).await;
        let source: PathBuf = mount_registered(&client, "v", "job").await.unwrap().source.into();
        w.reboot().await;
        assert!(tmpfs(w).is_empty() && !source.exists());
        let client = w.start().await;
        eventually("it is mounted again", async || state(&client, "v", "job").await == "mounted").await;
        assert_eq!((kernel::stacked(&source).unwrap(), tmpfs(w).len()), (1, 1));
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}
