//! One volume from mount to unmount, and csid's end in between.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::time::{Duration, Instant};

use csid_client::{Kind, MountOptions};
use csid_tests::ask::*;
use csid_tests::fault::Fault;
use csid_tests::kernel;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{eventually, refusal, world};

#[test]
fn mount_is_adopted_after_kill_without_any_rpc() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        fs::write(source.join("file"), "data").unwrap();
        let before = w.plugin("p").volume_calls().len();
        assert_eq!(before, 2, "one mount is stage and publish, and nothing else");

        for _ in 0..3 {
            w.kill();
            let client = w.start().await;
            settled(&client).await;
            let row = row(&client, "v", "job").await.expect("the row");
            assert_eq!((row.state.as_str(), row.healthy), ("mounted", true), "{row:?}");
            assert_eq!(fs::read_to_string(source.join("file")).unwrap(), "data");
            let again = mount(&client, "job", inline("v")).await.unwrap();
            assert_eq!(again.source, source.to_str().unwrap(), "the same answer");
            assert!(client.has_mount(&again.source).await.unwrap());
        }
        assert_eq!(w.plugin("p").volume_calls().len(), before, "adopted with zero RPCs");
        assert_eq!(kernel::stacked(&source).unwrap(), 1);

        let client = w.client().await;
        unmount(&client, "v", "job").await.unwrap();
        // At once, not sometime.
        assert_eq!((state(&client, "v", "job").await.as_str(), w.leftovers().len()), ("none", 0));
        assert_eq!(w.plugin("p").volume_calls().len(), before + 2);
        assert!(!client.has_mount(source.to_str().unwrap()).await.unwrap());
        w.nothing_left(&client).await;
        unmount(&client, "v", "job").await.expect("what is not there is gone already");
    });
}

/// systemd starts it again; the journal is as after a kill.
#[test]
fn next_csid_settles_the_mount_after_a_panic() {
    world(async |w| {
        let fault = Fault::of(w);
        running(w).await;
        for edge in ["stage.before", "publish.after", "outcome.after", "answer.after"] {
            let client = w.client().await;
            fault.arm(&format!("{edge}:1:panic"));
            let mounting = tokio::spawn(async move { mount(&client, "job", inline("v")).await });
            w.aborted().await;
            assert!(fault.killed_at(edge));
            assert!(mounting.await.unwrap().is_err(), "{edge}");
            let log = fs::read_to_string(w.path("csid.log")).unwrap();
            assert!(log.contains("panicked") && log.contains("fault.rs"), "{log}");
            let client = w.start().await;
            settled(&client).await;
            mount(&client, "job", inline("v")).await.unwrap();
            unmount(&client, "v", "job").await.unwrap();
            w.nothing_left(&client).await;
        }
    });
}

#[test]
fn same_after_an_orderly_stop() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        fs::write(source.join("file"), "data").unwrap();
        w.stop().await;
        assert_eq!(kernel::stacked(&source).unwrap(), 1, "a stop unmounts nothing");
        let client = w.start().await;
        settled(&client).await;
        assert_eq!(state(&client, "v", "job").await, "mounted");
        assert_eq!(w.plugin("p").volume_calls().len(), 2);
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn adoption_needs_no_plugin() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        w.kill();
        w.plugin("p").kill();
        let client = w.start().await;
        let begun = Instant::now();
        let again = mount(&client, "job", inline("v")).await.unwrap();
        assert_eq!(again.source, source.to_str().unwrap());
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        w.plugin("p").start().await;
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn block_volume_is_a_device() {
    world(async |w| {
        w.add_plugin("p").await;
        let device = w.add_device("p", "b");
        let client = w.start().await;
        let answer = mount(&client, "job", block("b")).await.unwrap();
        assert!(answer.is_device);
        let source = std::path::PathBuf::from(&answer.source);
        assert!(fs::metadata(&source).unwrap().file_type().is_block_device());
        fs::write(&source, vec![7; 512]).expect("the device is writable");
        assert_eq!(fs::read(&device.writable).unwrap()[..512], [7; 512]);
        let row = row(&client, "b", "job").await.unwrap();
        assert!(row.is_device && row.healthy && row.attachment_mode == "block-device", "{row:?}");

        w.kill();
        let client = w.start().await;
        settled(&client).await;
        assert_eq!(state(&client, "b", "job").await, "mounted");
        assert!(client.has_mount(&answer.source).await.unwrap());
        assert_eq!(w.plugin("p").volume_calls().len(), 2, "adopted with zero RPCs");
        unmount(&client, "b", "job").await.unwrap();
        assert!(!client.has_mount(&answer.source).await.unwrap());
        w.nothing_left(&client).await;
    });
}

#[test]
fn read_only_is_read_only() {
    world(async |w| {
        w.add_plugin("p").await;
        w.add_device("p", "b");
        let client = w.start().await;
        let options = MountOptions { read_only: Some(true), ..inline("v") };
        let source = mounted(&client, "job", options).await;
        let error = fs::write(source.join("file"), "x").unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
        let device = mounted(&client, "job", MountOptions { read_only: Some(true), ..block("b") }).await;
        assert!(fs::write(&device, vec![1; 512]).is_err(), "a read-only device");
        let publish = w.plugin("p").calls();
        let publish: Vec<_> = publish.iter().filter(|c| c.call.rpc == "NodePublishVolume").collect();
        assert!(publish.len() == 2 && publish.iter().all(|c| c.call.read_only));
        for volume in ["v", "b"] {
            unmount(&client, volume, "job").await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn co_rule_31_arguments_reach_plugin_unchanged() {
    world(async |w| {
        let client = running(w).await;
        let pairs = |n: usize| -> std::collections::BTreeMap<String, String> {
            (0..n).map(|i| (format!("key/{i}"), format!("välue {i}\n"))).collect()
        };
        let options = MountOptions {
            volume_context: Some(pairs(3)),
            publish_context: Some(pairs(2)),
            fs_type: Some("ext4".to_owned()),
            mount_flags: Some(vec!["noatime".to_owned(), "data=ordered".to_owned()]),
            mount_group: Some("1234".to_owned()),
            ..shared("an/external id")
        };
        mount(&client, "job", options).await.unwrap();
        for call in w.plugin("p").volume_calls().into_iter().map(|c| c.call) {
            assert_eq!(call.volume, "an/external id");
            assert_eq!(call.context, pairs(3).into_iter().collect::<Vec<_>>());
            assert_eq!(call.publish_context, pairs(2).into_iter().collect::<Vec<_>>());
            assert_eq!((call.fs_type.as_str(), call.mount_group.as_str()), ("ext4", "1234"));
            assert_eq!(call.mount_flags, ["noatime", "data=ordered"]);
            assert_eq!(call.access_mode, "SINGLE_NODE_MULTI_WRITER");
        }
        unmount(&client, "an/external id", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn co_rule_19_no_capability_no_rpc() {
    world(async |w| {
        w.add_plugin("p").await.set(|script| script.capabilities.clear());
        let client = w.start().await;
        mount(&client, "job", inline("v")).await.unwrap();
        assert_eq!(w.plugin("p").count("NodeStageVolume", ""), 0);
        let (kind, _) = refusal(mount(&client, "job", shared("w")).await);
        assert_eq!(kind, Kind::NotSupported, "SINGLE_NODE_MULTI_WRITER is not there");
        let options = MountOptions { mount_group: Some("7".to_owned()), ..inline("x") };
        assert_eq!(refusal(mount(&client, "job", options).await).0, Kind::NotSupported);
        unmount(&client, "v", "job").await.unwrap();
        assert_eq!(w.plugin("p").count("NodeUnstageVolume", ""), 0);
        w.nothing_left(&client).await;
        // Without the capability the single writer has its older name.
        let options = MountOptions {
            access_mode: Some(csid_client::AccessMode::SingleNodeSingleWriter),
            ..inline("y")
        };
        mount(&client, "job", options).await.unwrap();
        let calls = w.plugin("p").volume_calls();
        assert_eq!(calls.last().unwrap().call.access_mode, "SINGLE_NODE_WRITER");
        unmount(&client, "y", "job").await.unwrap();
    });
}

#[test]
fn journal_is_roots_published_paths_are_public() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        let mode = |path: &std::path::Path| fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777;
        let journal = w.path("state/journal");
        assert_eq!(mode(&journal), 0o700);
        let files = kernel::tree(&journal).unwrap();
        assert!(files.iter().any(|f| f.ends_with("csid.db")));
        for file in &files {
            assert_eq!(mode(file), 0o600, "{}", file.display());
        }
        // A consumer that is not root reaches what is published, and can list nothing on the way.
        let mut directory = source.parent().unwrap();
        while directory != w.path("state") {
            assert_eq!(mode(directory), 0o711, "{}", directory.display());
            directory = directory.parent().unwrap();
        }
        unmount(&client, "v", "job").await.unwrap();
    });
}

#[test]
fn late_plugin_is_waited_for_and_found_again() {
    world(async |w| {
        // A witness accepts connections also while its plugin is away, so csid could not know that nothing was sent.
        w.add_unwitnessed("p", "").await.kill();
        let client = w.start().await;
        let asked = {
            let client = client.clone();
            tokio::spawn(async move { mount(&client, "job", inline("v")).await })
        };
        eventually("csid waits for the plugin", async || {
            client.list_operations().await.unwrap().iter().any(|row| row.step == "waiting for plugin")
        })
        .await;
        assert!(!asked.is_finished(), "{:?}", asked.await);
        w.plugin("p").start().await;
        asked.await.unwrap().expect("the mount, once the plugin is there");

        w.plugin("p").kill();
        eventually("its death is seen", async || !client.plugin("p").await.unwrap().healthy).await;
        w.plugin("p").start().await;
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;

        w.plugin("p").kill();
        // A request that was sent just before could have had an effect, and would be undone once the plugin is back.
        eventually("its death is seen", async || !client.plugin("p").await.unwrap().healthy).await;
        let begun = Instant::now();
        let options = within(Duration::from_secs(1), inline("v"));
        let (kind, error) = refusal(mount(&client, "job", options).await);
        assert!([Kind::PluginUnavailable, Kind::TimedOut].contains(&kind), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(10));
        // The answer may come before the mount is rolled back.
        w.nothing_left(&client).await;
        let (kind, error) = refusal(mount(&client, "job", of_plugin("nobody-knows", "v")).await);
        assert_eq!(kind, Kind::NotFound, "{error}");
        assert!(error.message.contains("nobody-knows"), "{error}");
    });
}

#[test]
fn plugin_that_dies_in_the_middle_is_asked_again() {
    world(async |w| {
        let client = running(w).await;
        for (round, rpc) in ["NodeStageVolume", "NodePublishVolume"].into_iter().enumerate() {
            for act in [Act::DieBefore, Act::DieAfter] {
                w.plugin("p").rules([Rule::once(rpc, act.clone())]);
                let asked = {
                    let client = client.clone();
                    tokio::spawn(async move { mount(&client, "job", inline("v")).await })
                };
                w.plugin("p").died().await;
                w.plugin("p").honest();
                w.plugin("p").start().await;
                // Its connection broke: unknown. csid undoes that, and says so or tries again.
                match asked.await.unwrap() {
                    Ok(answer) => assert!(client.has_mount(&answer.source).await.unwrap()),
                    Err(csid_client::Error::Csid(error)) => {
                        let kinds = [Kind::PluginError, Kind::PluginShutdown, Kind::PluginUnavailable];
                        assert!(kinds.contains(&error.kind), "round {round} {rpc} {act:?}: {error}");
                        w.nothing_left(&client).await;
                    }
                    Err(other) => panic!("{other:?}"),
                }
                mount(&client, "job", inline("v")).await.expect("the second try");
                unmount(&client, "v", "job").await.unwrap();
                w.nothing_left(&client).await;
            }
        }
    });
}

#[test]
fn stuck_plugin_delays_its_own_volumes_only() {
    world(async |w| {
        w.add_plugin("q").await;
        let client = running(w).await;
        w.plugin("q").rules([Rule::always("NodeStageVolume", Act::Delay(600_000))]);
        let stuck: Vec<_> = (0..20)
            .map(|n| {
                let client = client.clone();
                tokio::spawn(async move {
                    let options = within(Duration::from_secs(12), of_plugin("q", &format!("stuck-{n}")));
                    mount(&client, "job", options).await
                })
            })
            .collect();
        let plugin = w.plugin("q");
        eventually("all are stuck", async || plugin.count("NodeStageVolume", "") == stuck.len()).await;
        let begun = Instant::now();
        for n in 0..10 {
            let volume = format!("quick-{n}");
            mount(&client, "job", inline(&volume)).await.unwrap();
            unmount(&client, &volume, "job").await.unwrap();
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?} with a stuck plugin", begun.elapsed());
        for call in stuck {
            assert_eq!(refusal(call.await.unwrap()).0, Kind::TimedOut);
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn mount_in_use_is_not_unmounted() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        let mut user =
            csid_tests::world::child("sleep".as_ref()).arg("600").current_dir(&source).spawn().unwrap();
        let pid = user.id().to_string();
        let begun = Instant::now();
        let (kind, error) = refusal(unmount(&client, "v", "job").await);
        assert_eq!(kind, Kind::Busy, "{error}");
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        assert!(error.details.holders.iter().any(|h| h.contains(&pid)), "who: {:?}", error.details.holders);
        assert_eq!(kernel::stacked(&source).unwrap(), 1);
        assert_eq!(state(&client, "v", "job").await, "mounted");
        assert_eq!(w.plugin("p").volume_calls().len(), 2, "nothing was touched");
        user.kill().unwrap();
        user.wait().unwrap();
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}
