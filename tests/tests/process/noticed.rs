//! What others do behind csid's back: mounts taken away, put there, left over.

use std::time::{Duration, Instant};
use std::{fs, io};

use csid_client::{AccessMode, Kind, MountOptions, ReconcileOptions, Restore, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::kernel;
use csid_tests::script::{Act, Lie, Rule};
use csid_tests::world::{count, eventually, refusal, world};
use rustix::mount::{MountFlags, UnmountFlags, mount as kernel_mount, mount_bind, unmount as kernel_unmount};

#[test]
fn dead_or_removed_mount_is_noticed_and_repaired() {
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([Rule::always("NodePublishVolume", Act::Lie(Lie::Fuse))]);
        let fuse = mounted(&client, "job", inline("fuse")).await;
        w.plugin("p").honest();
        let source = mounted(&client, "job", inline("v")).await;
        fs::write(source.join("file"), "data").unwrap();
        let before = cursor(&client).await;
        kernel_unmount(&source, UnmountFlags::empty()).unwrap();
        assert!(!client.has_mount(source.to_str().unwrap()).await.unwrap());
        assert!(!row(&client, "v", "job").await.unwrap().healthy);
        // A file system in user space dies with its server.
        w.plugin("p").kill();
        let died = Instant::now();
        eventually("it is dead", async || {
            fs::metadata(&fuse).is_err_and(|error| error.kind() == io::ErrorKind::NotConnected)
        })
        .await;
        let dead = row(&client, "fuse", "job").await.unwrap();
        assert_eq!(
            (dead.state.as_str(), dead.healthy),
            ("mounted", false),
            "it is there, and dead: {dead:?}"
        );
        event_within(Duration::from_secs(10), &client, before, &["mount-dead"], "default/fuse").await;
        count("seconds until a dead mount was an event", died.elapsed().as_secs() as usize);
        // At what nobody serves csid looks once a minute.
        event_within(Duration::from_secs(90), &client, before, &["mount-lost"], "default/v").await;
        w.plugin("p").start().await;
        // A dead mount is no answer; unmounted, it can be mounted again.
        let (_, error) = refusal(mount(&client, "job", inline("fuse")).await);
        assert!(error.message.contains("dead"), "{error}");
        unmount(&client, "fuse", "job").await.unwrap();
        mounted(&client, "job", inline("fuse")).await;
        assert!(row(&client, "fuse", "job").await.unwrap().healthy);
        unmount(&client, "fuse", "job").await.unwrap();

        let again = mounted(&client, "job", inline("v")).await;
        assert_eq!(fs::read_to_string(again.join("file")).unwrap(), "data");
        assert!(row(&client, "v", "job").await.unwrap().healthy);
        let answer = events(&client, before).await;
        assert!(answer.iter().any(|e| ["mount", "mount-healed"].contains(&e.kind.as_str())), "{answer:?}");
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn mount_removed_while_csid_was_down_is_lost() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        let staging = row(&client, "v", "job").await.unwrap().staging;
        let before = cursor(&client).await;
        w.kill();
        kernel_unmount(&source, UnmountFlags::empty()).unwrap();
        kernel_unmount(&staging, UnmountFlags::empty()).unwrap();
        let client = w.start().await;
        settled(&client).await;
        let row = row(&client, "v", "job").await.expect("the row stays");
        assert_eq!((row.state.as_str(), row.healthy), ("lost", false), "an inline mount is held: {row:?}");
        event(&client, before, &["mount-dead", "mount-lost"], "default/v").await;
        mounted(&client, "job", inline("v")).await;
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn all_mounts_gone_while_csid_was_down_are_made_again() {
    world(async |w| {
        let client = running(w).await;
        let sources = [mounted(&client, "a", shared("v")).await, mounted(&client, "b", shared("v")).await];
        drop(client);
        w.kill();
        for source in &sources {
            kernel_unmount(source, UnmountFlags::empty()).unwrap();
        }
        let client = w.start().await;
        healthy(&client, "p").await;
        for (consumer, source) in ["a", "b"].into_iter().zip(&sources) {
            assert_eq!(state(&client, "v", consumer).await, "lost");
            assert_eq!(&mounted(&client, consumer, shared("v")).await, source);
            assert_eq!(kernel::stacked(source).unwrap(), 1, "{consumer} was answered, so it is mounted");
        }
        for consumer in ["a", "b"] {
            unmount(&client, "v", consumer).await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn volume_is_staged_again_when_its_staging_is_gone() {
    world(async |w| {
        let client = running(w).await;
        let sources = [mounted(&client, "a", shared("v")).await, mounted(&client, "b", shared("v")).await];
        let staging = row(&client, "v", "a").await.unwrap().staging;
        for path in sources.iter().map(|source| source.to_str().unwrap()).chain([staging.as_str()]) {
            kernel_unmount(path, UnmountFlags::empty()).unwrap();
        }
        mounted(&client, "a", shared("v")).await;
        assert_eq!(w.plugin("p").count("NodeStageVolume", "v"), 2, "published from a staging that is gone");
        assert_eq!(
            [sources[0].as_path(), staging.as_ref()].map(|path| kernel::stacked(path).unwrap()),
            [1, 1]
        );
        for consumer in ["a", "b"] {
            unmount(&client, "v", consumer).await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn target_removed_behind_csids_back_is_bound_again() {
    world(async |w| {
        let client = running(w).await;
        let target = w.path("targets/t");
        fs::create_dir(&target).unwrap();
        let options = || MountOptions { target: Some(target.to_str().unwrap().to_owned()), ..inline("v") };
        let source = mounted(&client, "job", options()).await;
        fs::write(source.join("file"), "data").unwrap();
        kernel_unmount(&target, UnmountFlags::empty()).unwrap();
        assert!(!row(&client, "v", "job").await.unwrap().healthy);
        mounted(&client, "job", options()).await;
        assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "data");
        assert_eq!([&source, &target].map(|p| kernel::stacked(p).unwrap()), [1, 1]);
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn unmount_of_a_gone_mount_succeeds() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        let staging = row(&client, "v", "job").await.unwrap().staging;
        kernel_unmount(&source, UnmountFlags::empty()).unwrap();
        kernel_unmount(&staging, UnmountFlags::empty()).unwrap();
        fs::remove_dir(&source).unwrap();
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
        assert_eq!(w.plugin("p").count("NodeUnpublishVolume", "v"), 1, "co_rule_24: the plugin is asked");
        assert_eq!(w.plugin("p").count("NodeUnstageVolume", "v"), 1);
    });
}

#[test]
fn mount_without_a_row_keeps_the_volume_staged() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        let before = cursor(&client).await;
        // The volume is bound next to the published path, in its own directory.
        let stranger = source.parent().unwrap().join("stranger");
        fs::create_dir(&stranger).unwrap();
        mount_bind(&source, &stranger).unwrap();
        let options = UnmountOptions { deadline_usec: Some(2_000_000), ..UnmountOptions::default() };
        let (kind, error) = refusal(client.unmount(NAMESPACE, "v", "job", options).await);
        assert_eq!(kind, Kind::Busy, "{error}");
        assert_eq!(w.plugin("p").count("NodeUnstageVolume", "v"), 0);
        event(&client, before, &["orphan"], "default/v").await;
        assert_eq!(kernel::stacked(&stranger).unwrap(), 1, "nothing is unmounted that was not asked for");
        kernel_unmount(&stranger, UnmountFlags::empty()).unwrap();
        fs::remove_dir(&stranger).unwrap();
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

fn removing() -> ReconcileOptions {
    ReconcileOptions { remove_orphans: Some(true), ..ReconcileOptions::default() }
}

#[test]
fn orphans_are_reported_and_removed_if_empty() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        fs::write(source.join("file"), "in use").unwrap();
        let before = cursor(&client).await;
        w.kill();
        // As a csid that was killed long ago could leave them, and as an administrator could.
        let publish = w.path("state/plugins/p/live/publish");
        let [empty, canary, foreign] =
            ["0123456789abcdef", "fedcba9876543210", "aaaaaaaaaaaaaaaa"].map(|name| publish.join(name));
        fs::create_dir_all(empty.join("x")).unwrap();
        fs::create_dir_all(&canary).unwrap();
        fs::write(canary.join("precious"), "canary").unwrap();
        fs::create_dir_all(&foreign).unwrap();
        kernel_mount("tmpfs", &foreign, "tmpfs", MountFlags::empty(), c"").unwrap();
        fs::write(foreign.join("precious"), "canary").unwrap();

        let client = w.start().await;
        settled(&client).await;
        eventually("the orphans are reported", async || {
            events(&client, before).await.iter().any(|e| e.kind == "orphan")
        })
        .await;
        assert!(empty.exists() && canary.exists() && foreign.exists(), "a start removes nothing");
        let dry = ReconcileOptions { dry_run: Some(true), ..removing() };
        for options in [dry, ReconcileOptions::default()] {
            let report = client.reconcile(options).await.unwrap();
            for orphan in [&empty, &canary, &foreign] {
                let orphan = orphan.to_str().unwrap();
                assert!(report.orphans.iter().any(|o| o.contains(orphan)), "{orphan} in {report:?}");
            }
            assert!(empty.exists(), "only remove-orphans removes");
        }
        let report = client.reconcile(removing()).await.unwrap();
        assert!(!empty.exists(), "{report:?}");
        assert_eq!(fs::read_to_string(canary.join("precious")).unwrap(), "canary");
        assert_eq!(fs::read_to_string(foreign.join("precious")).unwrap(), "canary");
        assert_eq!(kernel::stacked(&foreign).unwrap(), 1);
        assert_eq!(fs::read_to_string(source.join("file")).unwrap(), "in use");

        kernel_unmount(&foreign, UnmountFlags::empty()).unwrap();
        fs::remove_file(canary.join("precious")).unwrap();
        client.reconcile(removing()).await.unwrap();
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
        assert_eq!(w.plugin("p").volume_calls().len(), 4, "the volume in use was not touched");
    });
}

#[test]
fn unmount_during_a_reconcile_stays_unmounted() {
    world(async |w| {
        let client = running(w).await;
        for volume in ["a", "b"] {
            let source = mounted(&client, "job", inline(volume)).await;
            kernel_unmount(&source, UnmountFlags::empty()).unwrap();
        }
        w.plugin("p").rules([Rule::always("NodePublishVolume", Act::Hold).of("a")]);
        let before = w.plugin("p").recorded();
        let reconciling = tokio::spawn({
            let client = client.clone();
            async move { client.reconcile(ReconcileOptions::default()).await }
        });
        eventually("csid mounts a again", async || {
            w.plugin("p").begun_since(before, "NodePublishVolume") == 1
        })
        .await;
        unmount(&client, "b", "job").await.unwrap();
        w.plugin("p").honest();
        let report = reconciling.await.unwrap().unwrap();
        assert_eq!(report.remounted.len(), 1, "{report:?}");
        assert!(row(&client, "b", "job").await.is_none(), "an answered unmount is undone");
        assert_eq!(w.plugin("p").begun_since(before, "NodePublishVolume"), 1, "of a alone");
        assert!(row(&client, "a", "job").await.unwrap().healthy);
        unmount(&client, "a", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn reconcile_mounts_each_row_of_a_volume_again() {
    world(async |w| {
        let client = running(w).await;
        for restore in [Restore::Hold, Restore::Auto] {
            let options = MountOptions {
                access_mode: Some(AccessMode::MultiNodeMultiWriter),
                restore: Some(restore),
                ..inline("v")
            };
            for consumer in ["a", "b"] {
                let source = mounted(&client, consumer, options.clone()).await;
                kernel_unmount(&source, UnmountFlags::empty()).unwrap();
            }
            let report = client.reconcile(ReconcileOptions::default()).await.unwrap();
            assert_eq!((report.remounted.len(), report.failed.len()), (2, 0), "{report:?}");
            for consumer in ["a", "b"] {
                let row = row(&client, "v", consumer).await.unwrap();
                assert!(row.state == "mounted" && row.healthy, "{row:?}");
                unmount(&client, "v", consumer).await.unwrap();
            }
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn reconcile_without_anything_to_do_does_nothing() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        let calls = w.plugin("p").volume_calls().len();
        let report = client.reconcile(removing()).await.unwrap();
        assert_eq!((report.orphans.len(), report.undone.len(), report.failed.len()), (0, 0, 0), "{report:?}");
        assert_eq!(w.plugin("p").volume_calls().len(), calls);
        assert_eq!(kernel::stacked(&source).unwrap(), 1);
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn mount_is_never_stacked() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        for _ in 0..3 {
            mounted(&client, "job", inline("v")).await;
        }
        assert_eq!(kernel::stacked(&source).unwrap(), 1);
        unmount(&client, "v", "job").await.unwrap();
        // Something else sits where the next publish would go: it is not covered.
        fs::create_dir_all(&source).unwrap();
        kernel_mount("tmpfs", &source, "tmpfs", MountFlags::empty(), c"").unwrap();
        fs::write(source.join("precious"), "canary").unwrap();
        let options = within(Duration::from_secs(3), inline("v"));
        let (kind, error) = refusal(mount(&client, "job", options).await);
        assert_eq!(kind, Kind::Busy, "{error}");
        assert_eq!(kernel::stacked(&source).unwrap(), 1);
        assert_eq!(fs::read_to_string(source.join("precious")).unwrap(), "canary");
        kernel_unmount(&source, UnmountFlags::empty()).unwrap();
        mounted(&client, "job", inline("v")).await;
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}
