//! Reboots, as far as a process can have them: everything is killed, no mount is left, and `/run` or the boot id is new.

use std::fs;

use csid_client::{Kind, MountOptions, Restore};
use csid_tests::ask::*;
use csid_tests::kernel;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, eventually, refusal, world};

fn auto(volume: &str) -> MountOptions {
    MountOptions { restore: Some(Restore::Auto), ..inline(volume) }
}

/// `held` was made with restore=hold, `kept` with restore=auto; both had a file.
async fn hold_rests_and_auto_is_back(w: &mut World, calls_before: usize) {
    let client = w.start().await;
    settled(&client).await;
    eventually("the auto mount is back", async || state(&client, "kept", "job").await == "mounted").await;
    let kept = row(&client, "kept", "job").await.unwrap();
    let file = std::path::Path::new(&kept.source).join("file");
    assert_eq!(fs::read_to_string(file).unwrap(), "kept", "the data is still there");
    let held = row(&client, "held", "job").await.unwrap();
    assert_eq!((held.state.as_str(), held.healthy), ("lost", false), "{held:?}");
    assert_eq!(kernel::stacked(held.source.as_ref()).unwrap(), 0);
    let after: Vec<_> = w.plugin("p").volume_calls().split_off(calls_before);
    assert_eq!(after.iter().filter(|c| c.call.volume == "held").count(), 0, "untouched: {after:?}");
    let rpcs: Vec<_> = after.iter().map(|call| call.call.rpc.as_str()).collect();
    // A driver that counts publishes still counts the one of the earlier boot.
    assert_eq!(rpcs, ["NodeStageVolume", "NodeUnpublishVolume", "NodePublishVolume"]);
}

async fn two_mounts(w: &mut World) -> usize {
    let client = running(w).await;
    for (volume, options) in [("held", inline("held")), ("kept", auto("kept"))] {
        let source = mounted(&client, "job", options).await;
        fs::write(source.join("file"), volume).unwrap();
    }
    w.plugin("p").volume_calls().len()
}

#[test]
fn after_a_reboot_hold_rests_and_auto_is_back() {
    world(async |w| {
        let before = two_mounts(w).await;
        w.reboot().await;
        hold_rests_and_auto_is_back(w, before).await;
        let client = w.client().await;
        // Asked for, it is back with its data; and csid's own restart changes neither.
        w.kill();
        let client = {
            drop(client);
            w.start().await
        };
        settled(&client).await;
        assert_eq!(state(&client, "held", "job").await, "lost");
        let source = mounted(&client, "job", inline("held")).await;
        assert_eq!(fs::read_to_string(source.join("file")).unwrap(), "held");
        for volume in ["held", "kept"] {
            unmount(&client, volume, "job").await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

/// An attachment's publish context is another one after each attach.
#[test]
fn lost_mount_comes_back_with_another_context() {
    world(async |w| {
        let client = running(w).await;
        let attached = |device: &str| MountOptions {
            publish_context: Some([("device".to_owned(), device.to_owned())].into()),
            ..shared("v")
        };
        mounted(&client, "job", attached("one")).await;
        mounted(&client, "other", attached("one")).await;
        let (kind, error) = refusal(mount(&client, "job", attached("two")).await);
        assert_eq!(kind, Kind::AlreadyExists, "{error}");
        w.reboot().await;

        let client = w.start().await;
        settled(&client).await;
        assert_eq!(state(&client, "v", "job").await, "lost");
        let changed = MountOptions { fs_type: Some("xfs".to_owned()), ..attached("two") };
        let (kind, error) = refusal(mount(&client, "job", changed).await);
        assert_eq!(kind, Kind::AlreadyExists, "{error}");
        mounted(&client, "job", attached("two")).await;
        // What is staged now was staged with that context.
        let (kind, error) = refusal(mount(&client, "job", attached("one")).await);
        assert_eq!(kind, Kind::AlreadyExists, "{error}");
        let (kind, error) = refusal(mount(&client, "other", attached("one")).await);
        assert_eq!(kind, Kind::ClaimConflict, "{error}");
        for consumer in ["job", "other"] {
            unmount(&client, "v", consumer).await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

/// A try that comes to nothing is no event: the state is seen all the same when it is at its end.
#[test]
fn failed_restore_does_not_keep_csid_restoring() {
    world(async |w| {
        w.configure("[deadlines]\noperation = \"4s\"");
        let client = running(w).await;
        mounted(&client, "job", auto("kept")).await;
        w.kill();
        w.plugin("p").kill();
        w.reboot().await;
        let client = w.start().await;
        assert_eq!(client.manager().await.unwrap().state, "restoring");
        settled(&client).await;
        w.plugin("p").start().await;
        eventually("the auto mount is back", async || state(&client, "kept", "job").await == "mounted").await;
        eventually("csid is ready", async || client.manager().await.unwrap().state == "ready").await;
        unmount(&client, "kept", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn another_boot_id_is_a_reboot_too() {
    world(async |w| {
        let before = two_mounts(w).await;
        w.reboot_with_old_run().await;
        hold_rests_and_auto_is_back(w, before).await;
        let client = w.client().await;
        for volume in ["held", "kept"] {
            unmount(&client, volume, "job").await.expect("a lost one can be unmounted");
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn target_is_bound_again() {
    world(async |w| {
        let client = running(w).await;
        let target = w.path("targets/t");
        fs::create_dir(&target).unwrap();
        let options = MountOptions { target: Some(target.to_str().unwrap().to_owned()), ..auto("v") };
        let source = mounted(&client, "job", options).await;
        fs::write(source.join("file"), "data").unwrap();
        w.reboot().await;
        let client = w.start().await;
        eventually("the mount is back", async || state(&client, "v", "job").await == "mounted").await;
        assert_eq!(fs::read_to_string(target.join("file")).unwrap(), "data");
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn missing_plugin_delays_its_own_restores_alone() {
    world(async |w| {
        w.add_plugin("q").await;
        let client = running(w).await;
        mount(&client, "job", auto("mine")).await.unwrap();
        let theirs = MountOptions { restore: Some(Restore::Auto), ..of_plugin("q", "theirs") };
        mount(&client, "job", theirs).await.unwrap();
        w.plugin("q").kill();
        w.reboot().await;

        let client = w.start().await;
        eventually("p's volume is back", async || state(&client, "mine", "job").await == "mounted").await;
        assert_ne!(state(&client, "theirs", "job").await, "mounted");
        mount(&client, "job", inline("new")).await.expect("p serves as ever");
        w.plugin("q").start().await;
        eventually("q's volume is back", async || state(&client, "theirs", "job").await == "mounted").await;
        for volume in ["mine", "theirs", "new"] {
            unmount(&client, volume, "job").await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn restore_that_fails_waits_and_is_no_loop() {
    world(async |w| {
        let client = running(w).await;
        mount(&client, "job", auto("v")).await.unwrap();
        mount(&client, "job", auto("retried")).await.unwrap();
        // INVALID_ARGUMENT: not retried as it is (CO rule 36). UNAVAILABLE is retried.
        let fails = Rule { times: 4, ..Rule::always("NodeStageVolume", Act::Fail(14)) };
        w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Fail(3)).of("v"), fails.of("retried")]);
        w.reboot().await;
        let stages = w.plugin("p").count("NodeStageVolume", "v");
        let client = w.start().await;
        settled(&client).await;
        eventually("it waits", async || state(&client, "v", "job").await == "waiting").await;
        let row = row(&client, "v", "job").await.unwrap();
        assert!(row.error.contains("NodeStageVolume") && row.error.contains("INVALID_ARGUMENT"), "{row:?}");
        eventually("a retried restore is done", async || state(&client, "retried", "job").await == "mounted")
            .await;
        let tries = w.plugin("p").count("NodeStageVolume", "v") - stages;
        assert!(tries <= 3, "{tries} tries");
        unmount(&client, "retried", "job").await.unwrap();
        assert_eq!(w.leftovers(), Vec::<String>::new(), "what was tried is undone");
        // The plugin heals; a caller asks.
        w.plugin("p").honest();
        mount(&client, "job", auto("v")).await.unwrap();
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn block_node_of_another_boot_is_not_trusted() {
    world(async |w| {
        w.add_plugin("p").await;
        w.add_device("p", "b");
        // No tmpfs is mounted over a file, so the directories outlive the boot.
        fs::create_dir_all(w.path("state/plugins/p/live")).unwrap();
        fs::write(w.path("state/plugins/p/live/file"), "").unwrap();
        let client = w.start().await;
        let source = mounted(&client, "job", block("b")).await;
        w.reboot().await;
        // The empty file is still there, as a node made by mknod would be.
        assert!(source.exists());
        let client = w.start().await;
        settled(&client).await;
        assert_eq!(state(&client, "b", "job").await, "lost");
        assert!(!client.has_mount(source.to_str().unwrap()).await.unwrap());
        unmount(&client, "b", "job").await.unwrap();
        fs::remove_dir_all(w.path("state/plugins/p/live")).unwrap();
        w.nothing_left(&client).await;
    });
}
