//! A publish that answers OK and is not so: an error, undone, nothing left; or put right by csid.

use std::fs;
use std::time::{Duration, Instant};

use csid_client::{
    AccessMode, AttachmentMode, Capability, CreateVolume, Kind, MountOptions, VolumeFilter, VolumeOptions,
};
use csid_tests::ask::*;
use csid_tests::backend::{Volume, id_of};
use csid_tests::kernel;
use csid_tests::script::{Act, CONTROLLER, Lie, Rule};
use csid_tests::world::{count, refusal, world};

fn read_only(options: MountOptions) -> MountOptions {
    MountOptions { read_only: Some(true), ..options }
}

#[test]
fn publish_of_the_wrong_kind_is_undone() {
    world(async |w| {
        w.add_plugin("p").await;
        w.add_device("p", "v");
        let client = w.start().await;
        let fs_lies = [Lie::Nothing, Lie::Empty, Lie::File, Lie::Character];
        let block_lies = [Lie::Nothing, Lie::Empty, Lie::File, Lie::Directory, Lie::Character];
        let cases: Vec<(Lie, MountOptions, bool)> = fs_lies
            .into_iter()
            .flat_map(|lie| [(lie, inline("v"), false), (lie, read_only(inline("v")), false)])
            .chain(block_lies.into_iter().map(|lie| (lie, block("v"), true)))
            .collect();
        let number = cases.len();
        for (lie, options, is_block) in cases {
            w.plugin("p").rules([Rule::always("NodePublishVolume", Act::Lie(lie))]);
            let begun = Instant::now();
            let options = within(Duration::from_secs(10), options);
            let (kind, error) = refusal(mount(&client, "job", options).await);
            let case = format!("{lie:?} block={is_block}: {error}");
            assert_eq!(kind, Kind::PluginError, "{case}");
            assert_eq!(error.details.rpc.as_deref(), Some("NodePublishVolume"), "{case}");
            assert!(begun.elapsed() < Duration::from_secs(8), "{case}");
            w.nothing_left(&client).await;
        }
        count("lies found out and undone", number);
        w.plugin("p").honest();
        mounted(&client, "job", inline("v")).await;
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn writable_read_only_mount_is_made_read_only() {
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([Rule::always("NodePublishVolume", Act::Lie(Lie::Writable))]);
        let source = mounted(&client, "job", read_only(inline("v"))).await;
        assert_eq!(
            fs::write(source.join("f"), "").unwrap_err().kind(),
            std::io::ErrorKind::ReadOnlyFilesystem
        );
        assert!(kernel::mounts().unwrap().iter().any(|m| m.point == source && m.has("ro")));
        // The staged volume itself stays writable: another consumer may write.
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn writable_read_only_device_is_undone() {
    world(async |w| {
        w.add_plugin("p").await;
        w.add_device("p", "b");
        let client = w.start().await;
        w.plugin("p").rules([Rule::always("NodePublishVolume", Act::Lie(Lie::Writable))]);
        let options = within(Duration::from_secs(10), read_only(block("b")));
        let (kind, error) = refusal(mount(&client, "job", options).await);
        assert_eq!(kind, Kind::PluginError, "{error}");
        w.nothing_left(&client).await;
        w.plugin("p").honest();
        mounted(&client, "job", read_only(block("b"))).await;
        unmount(&client, "b", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn stage_that_did_nothing_fails_at_publish() {
    world(async |w| {
        let client = running(w).await;
        // A missing mount at the staging path proves nothing; here the plugin's own publish says what is wrong.
        w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Lie(Lie::Nothing))]);
        let options = within(Duration::from_secs(5), inline("v"));
        let (kind, error) = refusal(mount(&client, "job", options).await);
        assert_eq!(kind, Kind::PluginError, "{error}");
        assert!(error.message.starts_with("NodePublishVolume: FAILED_PRECONDITION: "), "{error}");
        assert_eq!(error.details.grpc_code, Some(9));
        w.nothing_left(&client).await;
    });
}

#[test]
fn unpublish_that_did_nothing_is_no_success() {
    world(async |w| {
        let client = running(w).await;
        let source = mounted(&client, "job", inline("v")).await;
        w.plugin("p").rules([Rule::always("NodeUnpublishVolume", Act::Lie(Lie::Nothing))]);
        let options = csid_client::UnmountOptions {
            deadline_usec: Some(2_000_000),
            ..csid_client::UnmountOptions::default()
        };
        match client.unmount(NAMESPACE, "v", "job", options).await {
            // csid took it away itself: then it must be away.
            Ok(()) => assert_eq!(kernel::stacked(&source).unwrap(), 0),
            Err(csid_client::Error::Csid(error)) => {
                assert_eq!(kernel::stacked(&source).unwrap(), 1, "{error}");
                assert_eq!(w.plugin("p").count("NodeUnstageVolume", ""), 0, "a volume in use stays staged");
                w.plugin("p").honest();
                unmount(&client, "v", "job").await.unwrap();
            }
            Err(other) => panic!("{other:?}"),
        }
        w.plugin("p").honest();
        w.nothing_left(&client).await;
    });
}

#[test]
fn unstage_that_did_nothing_is_reported() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "job", inline("v")).await;
        let staging = row(&client, "v", "job").await.unwrap().staging;
        w.plugin("p").rules([Rule::always("NodeUnstageVolume", Act::Lie(Lie::Nothing))]);
        let options = csid_client::UnmountOptions {
            deadline_usec: Some(2_000_000),
            ..csid_client::UnmountOptions::default()
        };
        let result = client.unmount(NAMESPACE, "v", "job", options).await;
        if kernel::stacked(staging.as_ref()).unwrap() > 0 {
            let (_, error) = refusal(result);
            assert_eq!(error.details.volume.as_deref(), Some("v"));
        }
        w.plugin("p").honest();
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn csid_removes_paths_the_plugin_leaves() {
    world(async |w| {
        let client = running(w).await;
        for rpc in ["NodeUnpublishVolume", "NodeUnstageVolume"] {
            mounted(&client, "job", inline("v")).await;
            w.plugin("p").rules([Rule::always(rpc, Act::Lie(Lie::Nothing))]);
            let options = csid_client::UnmountOptions {
                deadline_usec: Some(60_000_000),
                ..csid_client::UnmountOptions::default()
            };
            client.unmount(NAMESPACE, "v", "job", options).await.unwrap_or_else(|e| panic!("{rpc}: {e}"));
            w.nothing_left(&client).await;
            w.plugin("p").honest();
        }
    });
}

#[test]
fn stage_succeeds_and_publish_fails_for_ever() {
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([Rule::always("NodePublishVolume", Act::Fail(13))]);
        let mut tries = 0;
        for _ in 0..20 {
            let options = within(Duration::from_secs(5), inline("v"));
            let (kind, error) = refusal(mount(&client, "job", options).await);
            assert_eq!(kind, Kind::PluginError, "{error}");
            assert!(error.message.starts_with("NodePublishVolume: INTERNAL: "), "{error}");
            w.nothing_left(&client).await;
            tries += 1;
        }
        count("mounts undone one after the other", tries);
    });
}

#[test]
fn hung_rpc_ends_at_its_deadline() {
    world(async |w| {
        w.add_plugin_with("p", "rpc-deadline = \"300ms\"").await;
        let client = w.start().await;
        for rpc in ["NodeStageVolume", "NodePublishVolume"] {
            w.plugin("p").rules([Rule::always(rpc, Act::Delay(600_000))]);
            let begun = Instant::now();
            let (kind, error) =
                refusal(mount(&client, "job", within(Duration::from_secs(3), inline("v"))).await);
            // The deadline passes during the call, or during its undoing.
            assert!([Kind::TimedOut, Kind::Uncertain].contains(&kind), "{rpc}: {error}");
            assert!(begun.elapsed() < Duration::from_secs(6), "{rpc}: {:?}", begun.elapsed());
            assert!(w.plugin("p").calls().iter().any(|c| c.call.rpc == rpc && c.cancelled));
            w.nothing_left(&client).await;
        }
        w.plugin("p").honest();
        mounted(&client, "job", inline("v")).await;
        for rpc in ["NodeUnpublishVolume", "NodeUnstageVolume"] {
            w.plugin("p").rules([Rule::once(rpc, Act::DelayAfter(600_000))]);
            unmount(&client, "v", "job").await.expect("the second try succeeds");
            w.nothing_left(&client).await;
            w.plugin("p").honest();
            mounted(&client, "job", inline("v")).await;
        }
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn long_plugin_messages_are_cut() {
    world(async |w| {
        let client = running(w).await;
        for size in [100, 8_000, 200_000] {
            let words = format!("\u{1b}[31m{}\n", "blah ".repeat(size / 5));
            w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Say(3, words)).of("v")]);
            let options = within(Duration::from_secs(5), inline("v"));
            let (kind, error) = refusal(mount(&client, "job", options).await);
            assert_eq!(kind, Kind::PluginError, "{size}");
            assert!(error.message.len() < 16_384, "{size}: an error of {} bytes", error.message.len());
            mounted(&client, "job", inline("w")).await;
            unmount(&client, "w", "job").await.unwrap();
            w.plugin("p").honest();
            unmount(&client, "v", "job").await.unwrap();
            w.nothing_left(&client).await;
        }
    });
}

/// A plugin's text has characters that D-Bus forbids. zbus would send them, and the receiver would end the connection.
#[test]
fn invalid_topology_text_keeps_connections_open() {
    world(async |w| {
        w.add_plugin("p").await;
        w.plugin("p").set(|script| {
            script.control(&CONTROLLER);
            script.plugin.push("VOLUME_ACCESSIBILITY_CONSTRAINTS".to_owned());
            script.topology = [("zone".to_owned(), "a\0b".to_owned())].into();
        });
        let client = w.start().await;
        let create = || CreateVolume {
            plugin: Some("p".to_owned()),
            name: Some("disk".to_owned()),
            capabilities: Some(vec![Capability {
                access_mode: AccessMode::SingleNodeWriter,
                attachment_mode: AttachmentMode::FileSystem,
            }]),
            deadline_usec: Some(3_000_000),
            ..CreateVolume::default()
        };
        let (kind, error) = refusal(client.create_volume(NAMESPACE, "v", create()).await);
        assert_eq!(kind, Kind::TimedOut, "{error}");
        let rows = client.list_volumes(VolumeFilter::default()).await.expect("the list is sent, and read");
        assert!(rows.iter().all(|row| row.topologies.is_empty()), "{rows:?}");
        // The plugin mends it.
        w.plugin("p").set(|script| script.topology.clear());
        w.plugin("p").backend().remove::<Volume>(&id_of("id", "disk")).unwrap();
        client.create_volume(NAMESPACE, "v", create()).await.unwrap();
        client.delete_volume(NAMESPACE, "v", VolumeOptions::default()).await.unwrap();
        w.nothing_left(&client).await;
    });
}
