//! With a damaged journal everything can be asked, and nothing is changed.

use csid_client::{
    CallOptions, ClaimFilter, Kind, MountOptions, PluginSpec, ReconcileOptions, Supervision,
    UnregisterOptions, VolumeFilter,
};
use csid_tests::world::{refusal, world};

use super::damage::SCHEMA_VERSION;
use super::*;

const DIRECTORY_GONE: &str = "gone with its directory";

/// The ways a file can be damaged that need no chance.
fn ways(good: &Files) -> Vec<(&'static str, Files)> {
    let with = |name: &str, bytes: Vec<u8>| {
        let mut files = good.clone();
        files.insert(name.to_owned(), bytes);
        files
    };
    let without = |name: &str| {
        let mut files = good.clone();
        files.remove(name);
        files
    };
    let (file, log) = (&good["csid.db"], &good["csid.db-wal"]);
    vec![
        ("garbage", with("csid.db", vec![0x5a; 20_000])),
        ("cut within its first page", with("csid.db", file[..1000].to_vec())),
        ("empty", with("csid.db", Vec::new())),
        ("gone, with its log there", without("csid.db")),
        ("gone altogether", Files::new()),
        (DIRECTORY_GONE, Files::new()),
        ("its log gone", without("csid.db-wal")),
        ("its log empty", with("csid.db-wal", Vec::new())),
        ("its log cut", with("csid.db-wal", log[..log.len() - 5000].to_vec())),
    ]
}

#[test]
fn reads_work_and_every_change_is_refused() {
    world(async |w| {
        let client = populated(w).await;
        let before = rows(&client).await;
        let properties = client.manager().await.unwrap();
        let calls = w.plugin("p").volume_calls().len();
        w.kill();
        let good = files(&journal(w));
        let live = mounts(w);
        let mark = fs::read(w.path("run/journal-seen")).unwrap();
        for (what, damaged) in ways(&good) {
            eprintln!("-- {what}");
            put(&journal(w), &damaged);
            if what == DIRECTORY_GONE {
                fs::remove_dir(journal(w)).expect("an empty directory");
            }
            let client = w.start().await;
            assert!(w.status().contains("csictl reconcile --new-journal"), "{what}: {}", w.status());
            assert_eq!(state_of(&client).await, "degraded", "{what}");
            healthy(&client, "p").await;

            let shown = rows(&client).await;
            for row in &before {
                let same = shown.iter().find(|shown| shown.source == row.source);
                let same = same.unwrap_or_else(|| panic!("{what}: {} is not shown: {shown:#?}", row.source));
                assert!(same.consumer == row.consumer || same.consumer == "unknown", "{what}: {same:?}");
                assert!(same.healthy && same.state == "mounted", "{what}: {same:?}");
                assert!(client.has_mount(&row.source).await.unwrap(), "{what}");
            }
            client.list_operations().await.unwrap();
            client.get_events(0, 1000).await.unwrap();
            client.list_volumes(VolumeFilter::default()).await.unwrap();
            client.list_claims(ClaimFilter::default()).await.unwrap();
            assert_eq!(client.list_plugins().await.unwrap().len(), 1);
            client.reconcile(ReconcileOptions { dry_run: Some(true), ..Default::default() }).await.unwrap();

            let spec = PluginSpec {
                supervision: Some(Supervision::External),
                socket: Some("/run/q.sock".to_owned()),
                ..PluginSpec::default()
            };
            for refused in [
                refusal(mount(&client, "job", inline("v")).await),
                refusal(mount(&client, "job", inline("new")).await),
                refusal(
                    mount(&client, "job", MountOptions { plugin: Some("q".into()), ..inline("new") }).await,
                ),
                refusal(unmount(&client, "v", "job").await),
                refusal(unmount(&client, "v", "unknown").await),
                refusal(unmount(&client, "never", "there").await),
                refusal(client.register_plugin("q", spec).await),
                refusal(client.unregister_plugin("p", UnregisterOptions::default()).await),
                refusal(client.delete_snapshot("p", "s", CallOptions::default()).await),
                refusal(client.reload(CallOptions::default()).await),
                refusal(client.reconcile(ReconcileOptions::default()).await),
            ] {
                assert_eq!(refused.0, Kind::StateCorrupt, "{what}: {}", refused.1);
                assert!(refused.1.message.contains("csid refuses every change"), "{}", refused.1);
            }
            assert_eq!(mounts(w), live, "{what}");
            assert_eq!(w.plugin("p").volume_calls().len(), calls, "{what}: no plugin was asked for anything");
            w.stop().await;
            assert_untouched(w, &damaged, what);
        }

        // What was good is good again, with the same journal.
        put(&journal(w), &good);
        fs::write(w.path("run/journal-seen"), mark).unwrap();
        let client = w.start().await;
        settled(&client).await;
        assert_eq!(facts(&rows(&client).await), facts(&before));
        assert_eq!(client.manager().await.unwrap().journal_id, properties.journal_id);
        for (volume, consumer) in [("v", "job"), ("s", "one"), ("s", "two"), ("b", "disk")] {
            unmount(&client, volume, consumer).await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn sound_journal_is_not_replaced() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "job", inline("v")).await;
        for dry_run in [true, false] {
            let (kind, error) = refusal(client.reconcile(new_journal(dry_run)).await);
            assert_eq!(kind, Kind::InvalidArgument, "{error}");
        }
        unmount(&client, "v", "job").await.unwrap();
    });
}

/// After a downgrade: nothing is wrong with the journal, so no other one may take its place.
#[test]
fn newer_journal_is_left_to_its_csid() {
    world(async |w| {
        let client = populated(w).await;
        let before = rows(&client).await;
        w.stop().await;
        let (good, live) = (files(&journal(w)), mounts(w));
        let mut newer = good.clone();
        newer.get_mut("csid.db").unwrap()[SCHEMA_VERSION].copy_from_slice(&99_u32.to_be_bytes());
        put(&journal(w), &newer);
        for again in ["first", "again"] {
            let said = w.refuses_to_start().await;
            for words in ["schema version 99", "knows up to", "Install the newer csid again", "backup"] {
                assert!(said.contains(words), "{words}: {said}");
            }
            assert!(!said.contains("new-journal"), "{said}");
            assert_untouched(w, &newer, again);
            assert_eq!(mounts(w), live, "{again}");
        }
        put(&journal(w), &good);
        let client = w.start().await;
        settled(&client).await;
        assert_eq!(facts(&rows(&client).await), facts(&before), "its csid goes on with it");
        for (volume, consumer) in [("v", "job"), ("s", "one"), ("s", "two"), ("b", "disk")] {
            unmount(&client, volume, consumer).await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}
