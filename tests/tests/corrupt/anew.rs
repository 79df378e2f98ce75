//! A new journal in place of a damaged one.

use csid_client::{Kind, PluginSpec, Supervision, UnmountOptions, UnregisterOptions};
use csid_tests::older;
use csid_tests::world::{eventually, refusal, world};
use rustix::mount::MountFlags;

use super::*;

async fn unmount_all(client: &Client) {
    for row in rows(client).await {
        let options = UnmountOptions { tag: Some(row.tag.clone()), ..UnmountOptions::default() };
        let unmounted = client.unmount(&row.namespace, &row.volume, &row.consumer, options).await;
        unmounted.unwrap_or_else(|error| panic!("{row:?}: {error:?}"));
    }
}

/// All pages of the rows can be read: the new journal knows every volume.
#[test]
fn mounts_are_reconstructed_for_consumer_unknown() {
    world(async |w| {
        let client = populated(w).await;
        let before = rows(&client).await;
        let properties = client.manager().await.unwrap();
        let calls = w.plugin("p").volume_calls().len();
        w.stop().await;
        let live = mounts(w);
        // The events' pages lie behind the others.
        let mut damaged = files(&journal(w));
        let end = damaged["csid.db"].len();
        damaged.get_mut("csid.db").unwrap().truncate(end - 4096);
        put(&journal(w), &damaged);

        let client = w.start().await;
        let (dry, shown) = (client.reconcile(new_journal(true)).await.unwrap(), rows(&client).await);
        assert_eq!(facts(&shown), facts(&before), "what can be read is shown as it was");
        assert_eq!((dry.adopted.len(), dry.kept.as_str()), (4, ""), "{dry:?}");
        assert_untouched(w, &damaged, "a dry run");
        let (report, client) = begin_anew(w, &client).await;
        assert_eq!(report.adopted, dry.adopted);

        assert_eq!(mounts(w), live, "nothing is unmounted");
        assert_eq!(w.plugin("p").volume_calls().len(), calls, "no plugin was asked for anything");
        let kept = Path::new(&report.kept);
        assert_eq!(kept.parent(), Some(journal(w).as_path()));
        assert!(fs::read(kept).unwrap() == damaged["csid.db"], "it is kept as it was");
        let now = client.manager().await.unwrap();
        assert_ne!(now.journal_id, properties.journal_id, "cursors are void");
        eventually("csid is ready", async || state_of(&client).await == "ready").await;
        let recorded = rows(&client).await;
        assert_eq!(recorded.len(), before.len());
        for row in &before {
            let now = recorded.iter().find(|now| now.source == row.source).expect("its mount");
            assert_eq!(
                (now.consumer.as_str(), now.state.as_str(), now.healthy),
                ("unknown", "mounted", true)
            );
            assert_eq!(
                (&now.volume, &now.plugin, &now.external_id, &now.staging, &now.target),
                (&row.volume, &row.plugin, &row.external_id, &row.staging, &row.target)
            );
            assert!(now.error.contains(&row.consumer), "whose it was: {now:?}");
            assert!(client.has_mount(&row.source).await.unwrap());
        }
        // Its consumer learns which consumer has it; nothing of it is mounted a second time.
        for (consumer, options) in [("job", inline("v")), ("one", shared("s"))] {
            let (kind, error) = refusal(mount(&client, consumer, options).await);
            assert!(kind == Kind::ClaimConflict && error.message.contains("unknown"), "{error}");
        }

        // It goes on as ever, over another end of csid.
        w.kill();
        let client = w.start().await;
        settled(&client).await;
        assert_eq!(facts(&rows(&client).await), facts(&recorded));
        unmount_all(&client).await;
        w.nothing_left(&client).await;
        mounted(&client, "job", inline("v")).await;
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// One that an older csid published is where the mount of the same consumer would have its own directory.
#[test]
fn older_csids_publish_path_is_not_reused() {
    world(async |w| {
        populated(w).await;
        older::published_without_own_directories(w).await;
        let live = mounts(w);
        let mut damaged = files(&journal(w));
        let end = damaged["csid.db"].len();
        damaged.get_mut("csid.db").unwrap().truncate(end - 4096);
        put(&journal(w), &damaged);

        let client = w.start().await;
        let (report, client) = begin_anew(w, &client).await;
        assert_eq!(report.adopted.len(), 4, "{report:?}");
        for consumer in ["one", "two"] {
            let (kind, error) = refusal(mount(&client, consumer, shared("s")).await);
            assert!(kind == Kind::ClaimConflict && error.message.contains("the path"), "{error}");
        }
        assert_eq!(mounts(w), live);
        unmount_all(&client).await;
        w.nothing_left(&client).await;
    });
}

/// `systemctl stop` may come at any moment.
#[test]
fn stop_during_a_new_journal_is_not_lost() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "job", inline("v")).await;
        let live = mounts(w);
        w.stop().await;
        for _ in 0..5 {
            put(&journal(w), &Files::from([("csid.db".to_owned(), vec![7; 9999])]));
            let client = w.start().await;
            client.reconcile(new_journal(false)).await.expect("a new journal");
            w.stop().await;
            assert_eq!(mounts(w), live);
        }
    });
}

/// The copy that is read of a damaged journal may be larger than what is left of `/run`.
#[test]
fn full_run_hides_nothing() {
    world(async |w| {
        let client = populated(w).await;
        let before = rows(&client).await;
        let spec = PluginSpec {
            supervision: Some(Supervision::External),
            socket: Some(w.path("run/q.sock").to_str().unwrap().to_owned()),
            ..PluginSpec::default()
        };
        client.register_plugin("q", spec).await.unwrap();
        // The last page of the file is one of events, which are not needed.
        for _ in 0..40 {
            let spec = PluginSpec {
                supervision: Some(Supervision::External),
                socket: Some(w.path("run/r.sock").to_str().unwrap().to_owned()),
                ..PluginSpec::default()
            };
            client.register_plugin("r", spec).await.unwrap();
            client.unregister_plugin("r", UnregisterOptions::default()).await.unwrap();
        }
        w.stop().await;
        let mut damaged = files(&journal(w));
        let end = damaged["csid.db"].len();
        damaged.get_mut("csid.db").unwrap().truncate(end - 4096);
        put(&journal(w), &damaged);
        assert!(end > 24 << 10, "{end}");
        rustix::mount::mount_remount(w.path("run"), MountFlags::empty(), c"mode=0755,size=24k").unwrap();

        let client = w.start().await;
        assert!(w.status().contains("damaged"), "{}", w.status());
        assert_eq!(facts(&rows(&client).await), facts(&before));
        assert_untouched(w, &damaged, "it was copied");
        assert!(!w.path("run/journal-copy").exists());
        let (_, client) = begin_anew(w, &client).await;
        let plugins = client.list_plugins().await.unwrap();
        assert!(plugins.iter().any(|plugin| plugin.id == "q"), "{plugins:?}");
        client.unregister_plugin("q", UnregisterOptions::default()).await.unwrap();
        unmount_all(&client).await;
        w.nothing_left(&client).await;
    });
}

/// Of the rows nothing can be read: who names the volume proves by its path which it is.
#[test]
fn volume_with_lost_id_waits_for_its_external_id() {
    world(async |w| {
        populated(w).await;
        w.kill();
        let live = mounts(w);
        put(&journal(w), &Files::from([("csid.db".to_owned(), vec![7; 9999])]));
        let client = w.start().await;
        let (report, client) = begin_anew(w, &client).await;
        assert_eq!(report.adopted.len(), 4, "{report:?}");
        assert_eq!(mounts(w), live);

        let all = rows(&client).await;
        assert!(all.iter().all(|row| row.consumer == "unknown" && row.state == "mounted"), "{all:#?}");
        for row in &all {
            let options = UnmountOptions { tag: Some(row.tag.clone()), ..UnmountOptions::default() };
            let (kind, error) =
                refusal(client.unmount(&row.namespace, &row.volume, &row.consumer, options).await);
            assert_eq!(kind, Kind::Uncertain, "{error}");
            assert_eq!(error.details.obstacle.as_deref(), Some("unidentified-volume"), "{error}");
            assert_eq!(error.details.retryable, Some(false), "{error}");
        }
        assert_eq!(mounts(w), live, "nothing was unmounted");
        // Another volume is not held up by it.
        mounted(&client, "job", inline("other")).await;
        unmount(&client, "other", "job").await.unwrap();

        for options in [inline("v"), shared("s"), block("b")] {
            let (kind, error) = refusal(mount(&client, "job", options).await);
            assert!(kind == Kind::ClaimConflict && error.message.contains("unknown"), "{error}");
        }
        w.kill();
        let client = w.start().await;
        settled(&client).await;
        let ids: std::collections::BTreeSet<_> =
            rows(&client).await.into_iter().map(|row| row.external_id).collect();
        assert_eq!(ids.into_iter().collect::<Vec<_>>(), ["b", "s", "v"]);
        // That there was a target could not be read either.
        let of_v = rows(&client).await.into_iter().find(|row| row.external_id == "v").unwrap();
        let unmounted =
            client.unmount(&of_v.namespace, &of_v.volume, "unknown", UnmountOptions::default()).await;
        let (kind, error) = refusal(unmounted);
        assert!(kind == Kind::Busy && error.message.contains("targets/t"), "{error}");
        assert_eq!(error.details.obstacle.as_deref(), Some("unknown-target"), "{error}");
        let target = w.path("targets/t");
        rustix::mount::unmount(&target, rustix::mount::UnmountFlags::empty()).unwrap();
        unmount_all(&client).await;
        w.nothing_left(&client).await;
    });
}

/// A mount that was only staged, or made in part, can be unmounted, too.
#[test]
fn staged_only_volume_is_reconstructed_and_ended() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "job", inline("v")).await;
        w.kill();
        // As a csid that ended between the two calls of an unmount.
        let row =
            kernel::volumes_below(&w.path("state/plugins/p/live/publish")).unwrap().pop().expect("the mount");
        rustix::mount::unmount(&row.point, rustix::mount::UnmountFlags::empty()).unwrap();
        let mut damaged = files(&journal(w));
        damaged.insert("csid.db".to_owned(), vec![7; 9999]);
        put(&journal(w), &damaged);
        let client = w.start().await;
        let (report, client) = begin_anew(w, &client).await;
        assert_eq!(report.adopted.len(), 1, "{report:?}");
        refusal(mount(&client, "job", inline("v")).await);
        assert_eq!(rows(&client).await[0].state, "lost");
        unmount_all(&client).await;
        assert_eq!(w.plugin("p").count("NodeUnstageVolume", "v"), 1);
        eventually("nothing is left", async || rows(&client).await.is_empty()).await;
        w.nothing_left(&client).await;
    });
}

/// After a boot nothing is mounted: no leftover directory keeps a volume from its consumer.
#[test]
fn leftovers_of_another_boot_have_no_owner() {
    world(async |w| {
        let client = populated(w).await;
        let before = rows(&client).await;
        w.stop().await;
        let mut damaged = files(&journal(w));
        let end = damaged["csid.db"].len();
        damaged.get_mut("csid.db").unwrap().truncate(end - 4096);
        put(&journal(w), &damaged);
        w.reboot().await;

        let client = w.start().await;
        let (report, client) = begin_anew(w, &client).await;
        assert_eq!(report.adopted, Vec::<String>::new());
        assert_eq!(report.undone.len(), before.len(), "what is forgotten is named: {report:?}");
        assert_eq!(rows(&client).await.len(), 0);
        for row in &before {
            mounted(&client, &row.consumer, of_plugin(&row.plugin, &row.external_id)).await;
            client
                .unmount(NAMESPACE, &row.external_id, &row.consumer, UnmountOptions::default())
                .await
                .unwrap();
        }
        w.nothing_left(&client).await;
    });
}
