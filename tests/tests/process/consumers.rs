//! Several consumers of one staged volume, and who may be the second one.

use std::fs;

use csid_client::{AccessMode, AttachmentMode, Kind, MountOptions, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::kernel;
use csid_tests::world::{count, refusal, world};

#[test]
fn co_rule_21_one_of_two_leaves_after_restarts() {
    world(async |w| {
        let client = running(w).await;
        let one = mounted(&client, "one", shared("v")).await;
        let two = mounted(&client, "two", shared("v")).await;
        fs::write(one.join("file"), "both").unwrap();
        assert_eq!(fs::read_to_string(two.join("file")).unwrap(), "both");
        assert_eq!(w.plugin("p").count("NodeStageVolume", ""), 1, "staged once");
        let staging = row(&client, "v", "one").await.unwrap().staging;
        assert_eq!(row(&client, "v", "two").await.unwrap().staging, staging, "co_rule_28");
        assert_ne!(one, two, "co_rule_29");

        w.kill();
        w.plugin("p").kill();
        w.plugin("p").start().await;
        let client = w.start().await;
        settled(&client).await;
        unmount(&client, "v", "one").await.unwrap();
        assert_eq!(w.plugin("p").count("NodeUnstageVolume", ""), 0, "co_rule_22: 0 unstage");
        assert!(!one.exists());
        assert_eq!(fs::read_to_string(two.join("file")).unwrap(), "both", "the other's mount works");
        fs::write(two.join("file"), "mine").unwrap();
        assert_eq!(state(&client, "v", "two").await, "mounted");
        unmount(&client, "v", "two").await.unwrap();
        assert_eq!(w.plugin("p").count("NodeUnstageVolume", ""), 1, "co_rule_24");
        w.nothing_left(&client).await;
    });
}

/// The contract's words for a mode, whether it is a reader's, and what a second consumer gets.
const MODES: [(AccessMode, bool, bool); 7] = [
    (AccessMode::SingleNodeWriter, false, false),
    (AccessMode::SingleNodeReaderOnly, true, false),
    (AccessMode::SingleNodeSingleWriter, false, false),
    (AccessMode::SingleNodeMultiWriter, false, true),
    (AccessMode::MultiNodeReaderOnly, true, true),
    (AccessMode::MultiNodeSingleWriter, false, false),
    (AccessMode::MultiNodeMultiWriter, false, true),
];

#[test]
fn co_rule_34_a_second_consumer_by_access_mode() {
    world(async |w| {
        let client = running(w).await;
        let mut looked = 0;
        for (first, reads, second_may) in MODES {
            let volume = first.as_str();
            let options = |mode: AccessMode, read_only: bool| MountOptions {
                access_mode: Some(mode),
                read_only: Some(read_only),
                ..inline(volume)
            };
            mounted(&client, "one", options(first, reads)).await;
            for (mode, reader, _) in MODES {
                let result = mount(&client, "two", options(mode, reader)).await;
                looked += 1;
                if mode == first && second_may {
                    result.unwrap_or_else(|e| panic!("{volume} twice: {e}"));
                    unmount(&client, volume, "two").await.unwrap();
                    continue;
                }
                let (kind, error) = refusal(result);
                assert_eq!(kind, Kind::ClaimConflict, "{volume} and {}: {error}", mode.as_str());
                assert_eq!(error.details.holders, ["one"], "the holders are named");
                assert!(error.message.contains("one"), "{error}");
            }
            // Only read-only may differ between users.
            let result = mount(&client, "reader", options(first, true)).await;
            looked += 1;
            if second_may || first == AccessMode::MultiNodeSingleWriter {
                result.unwrap_or_else(|e| panic!("{volume}, a reader: {e}"));
                unmount(&client, volume, "reader").await.unwrap();
            } else {
                assert_eq!(refusal(result).0, Kind::ClaimConflict, "{volume}, a reader");
            }
            assert_eq!(w.plugin("p").count("NodeUnstageVolume", volume), 0);
            unmount(&client, volume, "one").await.unwrap();
        }
        w.nothing_left(&client).await;
        count("pairs of consumers", looked);
    });
}

#[test]
fn writer_needs_a_writers_mode() {
    world(async |w| {
        let client = running(w).await;
        for mode in [AccessMode::SingleNodeReaderOnly, AccessMode::MultiNodeReaderOnly] {
            let options = MountOptions { access_mode: Some(mode), read_only: Some(false), ..inline("v") };
            let (kind, error) = refusal(mount(&client, "job", options).await);
            assert_eq!(kind, Kind::InvalidArgument, "{error}");
        }
        assert_eq!(w.plugin("p").volume_calls().len(), 0);
        w.nothing_left(&client).await;
    });
}

#[test]
fn users_of_one_staged_volume_share_its_usage() {
    world(async |w| {
        w.add_plugin("p").await;
        w.add_device("p", "v");
        let client = w.start().await;
        let base = || MountOptions {
            fs_type: Some("ext4".to_owned()),
            mount_flags: Some(vec!["noatime".to_owned()]),
            ..shared("v")
        };
        mounted(&client, "one", base()).await;
        let others = [
            MountOptions { fs_type: Some("xfs".to_owned()), ..base() },
            MountOptions { mount_flags: Some(vec![]), ..base() },
            MountOptions { mount_group: Some("5".to_owned()), ..base() },
            MountOptions { volume_context: Some([("a".to_owned(), "b".to_owned())].into()), ..base() },
            MountOptions {
                attachment_mode: Some(AttachmentMode::BlockDevice),
                fs_type: None,
                mount_flags: None,
                ..base()
            },
        ];
        let number = others.len();
        for options in others {
            let (kind, error) = refusal(mount(&client, "two", options).await);
            assert_eq!(kind, Kind::ClaimConflict, "{error}");
            assert_eq!(error.details.holders, ["one"]);
        }
        count("other usages refused", number);
        // Another name for the same external id.
        for (namespace, volume) in [("default", "other-name"), ("other-namespace", "v")] {
            let (kind, error) = refusal(client.mount(namespace, volume, "two", base()).await);
            assert_eq!(kind, Kind::ClaimConflict, "{error}");
        }
        // Once the last one has left, everything is open again.
        unmount(&client, "v", "one").await.unwrap();
        client.mount("other-namespace", "other-name", "two", shared("v")).await.unwrap();
        client.unmount("other-namespace", "other-name", "two", UnmountOptions::default()).await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn one_consumer_may_have_several_mounts_by_tag() {
    world(async |w| {
        let client = running(w).await;
        let tagged = |tag: &str| MountOptions { tag: Some(tag.to_owned()), ..shared("v") };
        let plain = mounted(&client, "job", shared("v")).await;
        let a = mounted(&client, "job", tagged("a")).await;
        let b = mounted(&client, "job", tagged("b")).await;
        assert!(plain != a && a != b && plain != b);
        let of = |tag: &str| UnmountOptions { tag: Some(tag.to_owned()), ..UnmountOptions::default() };
        client.unmount(NAMESPACE, "v", "job", of("a")).await.unwrap();
        assert_eq!([&plain, &a, &b].map(|p| kernel::stacked(p).unwrap()), [1, 0, 1]);
        client.unmount(NAMESPACE, "v", "job", of("never")).await.expect("gone already");
        unmount(&client, "v", "job").await.unwrap();
        assert_eq!([&plain, &b].map(|p| kernel::stacked(p).unwrap()), [0, 1]);
        client.unmount(NAMESPACE, "v", "job", of("b")).await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn many_volumes_at_once() {
    world(async |w| {
        let client = running(w).await;
        let descriptors = |pid| fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
        let before = descriptors(w.csid_pid());
        let calls: Vec<_> = (0..100)
            .map(|n| {
                let client = client.clone();
                tokio::spawn(async move {
                    let volume = format!("v{n}");
                    for consumer in ["one", "two"] {
                        mount(&client, consumer, shared(&volume)).await.unwrap();
                    }
                    for consumer in ["one", "two"] {
                        unmount(&client, &volume, consumer).await.unwrap();
                    }
                })
            })
            .collect();
        for call in calls {
            call.await.unwrap();
        }
        w.nothing_left(&client).await;
        let after = descriptors(w.csid_pid());
        // csid has connections to 24 workers of its helper at most, and keeps them for ten seconds.
        assert!(after <= before + 24 + 3, "{before} descriptors before, {after} after");
    });
}
