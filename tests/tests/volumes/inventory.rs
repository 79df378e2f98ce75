//! What a plugin has and could have: capacity, its volumes and snapshots in pages, and a snapshot's end.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use csid_client::{
    AccessMode, AttachmentMode, CallOptions, Capability, CapacityOptions, ClaimOptions, CreateVolume, Error,
    ExpandOptions, Kind, PluginService, ReleaseOptions, SnapshotFilter, SnapshotOptions, ValidateOptions,
};
use csid_tests::ask::{NAMESPACE, capabilities, secrets};
use csid_tests::clustered::{self, alone};
use csid_tests::script::{Act, CONTROLLER, Rule};
use csid_tests::world::{count, eventually, refusal, world};

use crate::site::{OPERATIONS, PASSWORD, SECRETS, Site, creating, options, spec, with_secrets};

/// Takes a snapshot of `volume`. Returns the plugin's id of it.
async fn take_snapshot(s: &Site<'_>, volume: &str, name: &str) -> String {
    let taken = s.client.create_snapshot(NAMESPACE, volume, name, SnapshotOptions::default());
    taken.await.expect("a snapshot").id
}

/// Reads all pages of at most `max` entries. Returns the ids and the number of pages.
async fn list_snapshots(s: &Site<'_>, max: u32, external_id: Option<&str>) -> (Vec<String>, usize) {
    let (mut ids, mut pages, mut token) = (Vec::new(), 0, None);
    loop {
        let volume = external_id.map(str::to_owned);
        let filter = SnapshotFilter { volume, token, max: Some(max), ..SnapshotFilter::default() };
        let (rows, next) = s.client.list_snapshots("p", filter).await.expect("a page");
        assert!(rows.len() <= max as usize, "{rows:?}");
        assert!(rows.iter().all(|row| row.ready && row.size > 0), "{rows:?}");
        ids.extend(rows.into_iter().map(|row| row.id));
        pages += 1;
        if next.is_empty() {
            return (ids, pages);
        }
        token = Some(next);
    }
}

#[test]
fn co_rule_40_stale_token_restarts_the_list() {
    world(async |w| {
        let s = creating(w).await;
        let mut made = BTreeSet::new();
        for volume in ["a", "b", "c"] {
            made.insert(s.create(volume, spec()).await.unwrap().external_id);
        }
        let (mut listed, mut token) = (BTreeSet::new(), String::new());
        for page in 1..=2 {
            let (rows, next) = s.client.list_external_volumes("p", &token, 2).await.unwrap();
            assert!(rows.len() <= 2 && rows.iter().all(|row| row.capacity >= 1 << 20), "{rows:?}");
            listed.extend(rows.into_iter().map(|row| row.external_id));
            token = next;
            assert_eq!(token.is_empty(), page == 2, "{token}");
        }
        assert_eq!(listed, made);

        let own = [take_snapshot(&s, "a", "one").await, take_snapshot(&s, "a", "two").await];
        let other = take_snapshot(&s, "b", "three").await;
        let (all, pages) = list_snapshots(&s, 1, None).await;
        assert_eq!((all.len(), pages), (3, 3));
        let of_a = s.client.volume(NAMESPACE, "a").await.unwrap().external_id;
        assert_eq!(list_snapshots(&s, 9, Some(&of_a)).await.0, own);
        let only = SnapshotFilter { snapshot: Some(other.clone()), ..SnapshotFilter::default() };
        let (only, next) = s.client.list_snapshots("p", only).await.unwrap();
        assert_eq!((only.len(), only[0].id.as_str(), next.as_str()), (1, other.as_str(), ""));

        let stale = SnapshotFilter { token: Some("stale".to_owned()), ..SnapshotFilter::default() };
        for (kind, error) in [
            refusal(s.client.list_snapshots("p", stale).await),
            refusal(s.client.list_external_volumes("p", "stale", 0).await),
        ] {
            assert_eq!((kind, error.details.grpc_code), (Kind::PluginError, Some(10)), "{error}");
            assert!(error.message.contains("does not accept the token any more"), "{error}");
        }

        for snapshot in own.iter().chain([&other]) {
            s.client.delete_snapshot("p", snapshot, CallOptions::default()).await.unwrap();
        }
        assert_eq!(list_snapshots(&s, 9, None).await.0, Vec::<String>::new());
        for volume in ["a", "b", "c"] {
            s.delete(volume, options()).await.unwrap();
        }
        s.nothing_left().await;
    });
}

#[test]
fn capacity_query_has_use_parameters_and_topology() {
    world(async |w| {
        let s = creating(w).await;
        let all = s.client.capacity("p", CapacityOptions::default()).await.unwrap();
        s.create("a", spec()).await.unwrap();
        let less = CapacityOptions {
            capabilities: Some(vec![Capability {
                access_mode: AccessMode::SingleNodeWriter,
                attachment_mode: AttachmentMode::BlockDevice,
            }]),
            parameters: Some(BTreeMap::from([("tier".to_owned(), "1".to_owned())])),
            topology: Some(BTreeMap::from([("zone".to_owned(), "elsewhere".to_owned())])),
            ..CapacityOptions::default()
        };
        // The plugin has no topologies: it is given none, and answers for its own place.
        assert_eq!(s.client.capacity("p", less).await.unwrap(), all - (1 << 20));
        let asked = s.w.plugin("p").calls().into_iter().rfind(|call| call.call.rpc == "GetCapacity");
        assert_eq!(asked.unwrap().call.parameters, [("tier".to_owned(), "1".to_owned())]);
        s.delete("a", options()).await.unwrap();
        s.nothing_left().await;
    });
}

#[test]
fn missing_capability_is_not_asked() {
    world(async |w| {
        let mut s = creating(w).await;
        s.w.plugin("p").set(|script| script.control(&CONTROLLER[..1]));
        s.w.plugin("p").kill();
        s.w.plugin("p").start().await;
        s.restart().await;
        s.is_ready().await;
        for (rpc, answer) in [
            ("GetCapacity", s.client.capacity("p", CapacityOptions::default()).await.map(drop)),
            ("ListVolumes", s.client.list_external_volumes("p", "", 0).await.map(drop)),
            ("ListSnapshots", s.client.list_snapshots("p", SnapshotFilter::default()).await.map(drop)),
            ("DeleteSnapshot", s.client.delete_snapshot("p", "x", CallOptions::default()).await),
        ] {
            let (kind, error) = refusal(answer);
            assert_eq!((kind, error.details.grpc_code), (Kind::PluginError, Some(12)), "{error}");
            assert_eq!((error.details.rpc.as_deref(), s.w.plugin("p").count(rpc, "")), (Some(rpc), 0));
        }
        let nobody = s.client.capacity("q", CapacityOptions::default()).await.unwrap_err();
        assert!(matches!(&nobody, Error::Csid(error) if error.kind == Kind::NotFound), "{nobody:?}");
        s.nothing_left().await;
    });
}

#[test]
fn plugin_without_controller_is_not_supported() {
    world(async |w| {
        w.add_plugin("p").await;
        let client = w.start().await;
        client.wait_for_plugin("p", PluginService::Node, CallOptions::default()).await.unwrap();
        for answer in [
            client.capacity("p", CapacityOptions::default()).await.map(drop),
            client.list_external_volumes("p", "", 0).await.map(drop),
            client.list_snapshots("p", SnapshotFilter::default()).await.map(drop),
            client.delete_snapshot("p", "x", CallOptions::default()).await,
        ] {
            let (kind, error) = refusal(answer);
            assert_eq!(kind, Kind::NotSupported, "{error}");
            assert_eq!(error.message, "the plugin p does not offer CONTROLLER_SERVICE");
        }
    });
}

/// These calls are about no volume, so the plugin may repeat any secret that it was sent.
#[test]
fn list_error_repeats_no_secret_of_another_call() {
    alone(SECRETS, async |w| {
        let mut s = creating(w).await;
        s.create("a", spec()).await.unwrap();
        let words = format!("the login with {PASSWORD} failed");
        let rpcs = ["ListVolumes", "ListSnapshots", "GetCapacity"];
        s.rules(rpcs.map(|rpc| Rule::always(rpc, Act::Say(13, words.clone()))));
        let says = async |client: &csid_client::Client| {
            [
                refusal(client.list_external_volumes("p", "", 0).await).1.message,
                refusal(client.list_snapshots("p", SnapshotFilter::default()).await).1.message,
                refusal(client.capacity("p", CapacityOptions::default()).await).1.message,
            ]
        };
        assert!(says(&s.client).await.iter().all(|said| said.contains("failed")), "nobody had any");
        let options =
            ClaimOptions { secrets: Some(secrets(&[("password", PASSWORD)])), ..ClaimOptions::default() };
        s.client.claim(NAMESPACE, "a", "one", options).await.unwrap();
        for _ in 0..2 {
            for said in says(&s.client).await {
                assert!(said.contains("see the plugin's log") && !said.contains(PASSWORD), "{said}");
            }
            s.restart().await;
            s.is_ready().await;
        }
        s.w.plugin("p").honest();
        let options =
            ReleaseOptions { secrets: Some(secrets(&[("password", PASSWORD)])), ..ReleaseOptions::default() };
        s.client.release(NAMESPACE, "a", "one", options).await.unwrap();
        s.delete("a", with_secrets()).await.unwrap();
        s.nothing_left().await;
    });
}

#[test]
fn unready_snapshot_is_asked_for_with_its_secrets() {
    world(async |w| {
        let s = creating(w).await;
        s.create("a", spec()).await.unwrap();
        let snapshot = take_snapshot(&s, "a", "one").await;
        s.w.plugin("p").set(|script| script.secret = Some(("password".to_owned(), PASSWORD.to_owned())));
        let with = || Some(secrets(&[("password", PASSWORD)]));
        let delete = |secrets| {
            let options = CallOptions { secrets, ..CallOptions::default() };
            s.client.delete_snapshot("p", &snapshot, options)
        };
        let list = |secrets| {
            let filter = SnapshotFilter { secrets, ..SnapshotFilter::default() };
            s.client.list_snapshots("p", filter)
        };
        assert_eq!(refusal(delete(None).await).0, Kind::PluginError);
        assert_eq!(refusal(list(None).await).0, Kind::PluginError);
        assert_eq!(list(with()).await.unwrap().0.len(), 1);
        let credential = SnapshotFilter { credential: Some("none".to_owned()), ..SnapshotFilter::default() };
        assert_eq!(refusal(s.client.list_snapshots("p", credential).await).0, Kind::SecretRequired);
        std::fs::write(s.w.path("credentials/key"), format!(r#"{{"password":"{PASSWORD}"}}"#)).unwrap();
        let credential = SnapshotFilter { credential: Some("key".to_owned()), ..SnapshotFilter::default() };
        assert_eq!(s.client.list_snapshots("p", credential).await.unwrap().0.len(), 1);

        // Not an answer: it is asked again. One that says no is one.
        let before = s.w.plugin("p").count("DeleteSnapshot", "");
        s.w.plugin("p").rules([Rule::once("DeleteSnapshot", Act::FailAfter(14))]);
        s.client
            .delete_snapshot("p", &snapshot, CallOptions { secrets: with(), ..CallOptions::default() })
            .await
            .unwrap();
        let asked = s.w.plugin("p").count("DeleteSnapshot", "") - before;
        assert_eq!(asked, 2);
        count("calls for one deletion", asked);
        s.w.plugin("p").rules([Rule::once("DeleteSnapshot", Act::Fail(9))]);
        let refused = CallOptions { secrets: with(), ..CallOptions::default() };
        let (kind, error) = refusal(s.client.delete_snapshot("p", &snapshot, refused).await);
        assert_eq!((kind, error.details.grpc_code), (Kind::PluginError, Some(9)), "{error}");
        s.w.plugin("p").honest();
        let again = CallOptions { secrets: with(), ..CallOptions::default() };
        s.client.delete_snapshot("p", &snapshot, again).await.expect("one that is not there is deleted");

        // A caller's deadline ends the wait, and a deletion that has begun goes on.
        s.w.plugin("p").set(|script| script.secret = None);
        let snapshot = take_snapshot(&s, "a", "two").await;
        s.w.plugin("p").rules([
            Rule::once("DeleteSnapshot", Act::Delay(700)),
            Rule::once("GetCapacity", Act::Delay(60_000)),
        ]);
        let soon = CallOptions { deadline_usec: Some(200_000), ..CallOptions::default() };
        assert_eq!(refusal(s.client.delete_snapshot("p", &snapshot, soon).await).0, Kind::TimedOut);
        let soon = CapacityOptions { deadline_usec: Some(200_000), ..CapacityOptions::default() };
        assert_eq!(refusal(s.client.capacity("p", soon).await).0, Kind::TimedOut);
        s.w.plugin("p").rules([]);
        eventually("it is deleted", async || list_snapshots(&s, 9, None).await.0.is_empty()).await;
        s.delete("a", options()).await.unwrap();
        s.nothing_left().await;
    });
}

#[test]
fn snapshot_without_wait_returns_before_ready() {
    world(async |w| {
        let s = creating(w).await;
        s.create("a", spec()).await.unwrap();
        s.w.plugin("p").set(|script| script.snapshot_ready_at = 3);
        let mut answers = Vec::new();
        for asked in 1..=3 {
            let options = SnapshotOptions { wait: Some(false), ..SnapshotOptions::default() };
            answers.push(s.client.create_snapshot(NAMESPACE, "a", "one", options).await.unwrap());
            // Servers ask by themselves until it is ready.
            let is_each = s.w.plugin("p").count("CreateSnapshot", "") == asked || clustered::is_used();
            assert!(is_each, "one call each");
        }
        match clustered::is_used() {
            true => {
                eventually("it is ready", async || {
                    let again = s.client.create_snapshot(NAMESPACE, "a", "one", SnapshotOptions::default());
                    again.await.is_ok_and(|row| row.ready && row.id == answers[0].id)
                })
                .await;
            }
            false => {
                assert_eq!(
                    [&answers[0], &answers[1], &answers[2]].map(|row| row.ready),
                    [false, false, true]
                );
            }
        }
        assert!(answers.iter().all(|row| row.id == answers[0].id && !row.id.is_empty()), "{answers:?}");
        // With wait, the default, it is answered once it can be used.
        s.w.plugin("p").set(|script| script.snapshot_ready_at = 2);
        let ready = take_snapshot(&s, "a", "two").await;
        for id in [&answers[0].id, &ready] {
            s.client.delete_snapshot("p", id, CallOptions::default()).await.unwrap();
        }
        s.delete("a", options()).await.unwrap();
        s.nothing_left().await;
    });
}

#[test]
fn snapshot_not_ready_gives_way_without_caller() {
    alone(OPERATIONS, async |w| {
        let s = creating(w).await;
        s.create("a", spec()).await.unwrap();
        s.w.plugin("p").set(|script| script.snapshot_ready_at = 1_000);
        let soon = SnapshotOptions { deadline_usec: Some(300_000), ..SnapshotOptions::default() };
        assert_eq!(refusal(s.client.create_snapshot(NAMESPACE, "a", "s", soon).await).0, Kind::TimedOut);
        let expand = s.client.expand_volume(NAMESPACE, "a", 8 << 20, 0, ExpandOptions::default());
        let expanded = tokio::time::timeout(Duration::from_secs(20), expand).await;
        expanded.expect("the snapshot gives way").unwrap();
        let (snapshots, _) = s.client.list_snapshots("p", SnapshotFilter::default()).await.unwrap();
        for snapshot in snapshots {
            s.client.delete_snapshot("p", &snapshot.id, CallOptions::default()).await.unwrap();
        }
        s.delete("a", options()).await.unwrap();
        s.nothing_left().await;
    });
}

#[test]
fn validation_asks_for_each_of_several_capabilities() {
    use AccessMode::{MultiNodeMultiWriter, SingleNodeReaderOnly, SingleNodeWriter};
    world(async |w| {
        let s = creating(w).await;
        let can = CreateVolume {
            capabilities: Some(capabilities(&[SingleNodeWriter, SingleNodeReaderOnly])),
            ..spec()
        };
        s.create("a", can).await.unwrap();
        for (asked, confirmed) in [
            (vec![SingleNodeWriter, SingleNodeReaderOnly], true),
            (vec![SingleNodeReaderOnly], true),
            (vec![SingleNodeWriter, MultiNodeMultiWriter], false),
            (vec![MultiNodeMultiWriter, SingleNodeWriter], false),
        ] {
            let options =
                ValidateOptions { capabilities: Some(capabilities(&asked)), ..ValidateOptions::default() };
            let answer = s.client.validate_volume(NAMESPACE, "a", options).await.unwrap();
            assert_eq!(answer.confirmed, confirmed, "{asked:?}: {}", answer.message);
            assert_eq!(answer.message.is_empty(), confirmed, "{asked:?}: {}", answer.message);
        }
        s.delete("a", options()).await.unwrap();
        s.nothing_left().await;
    });
}

#[test]
fn expansion_by_a_plugin_that_cannot_is_not_supported() {
    world(async |w| {
        let mut s = creating(w).await;
        let able: Vec<&str> = CONTROLLER.into_iter().filter(|can| *can != "EXPAND_VOLUME").collect();
        s.w.plugin("p").set(|script| script.control(&able));
        s.w.plugin("p").kill();
        s.w.plugin("p").start().await;
        s.restart().await;
        s.is_ready().await;
        let before = s.create("a", spec()).await.unwrap().capacity;
        let expand = async |s: &Site<'_>| {
            s.client.expand_volume(NAMESPACE, "a", 8 << 20, 0, ExpandOptions::default()).await
        };
        let (kind, error) = refusal(expand(&s).await);
        assert_eq!(kind, Kind::NotSupported, "{error}");
        let mounted = s.client.mount(NAMESPACE, "a", "job", csid_client::MountOptions::default()).await;
        mounted.unwrap();
        assert_eq!(refusal(expand(&s).await).0, Kind::NotSupported, "also where it is mounted");
        let row = s.client.volume(NAMESPACE, "a").await.unwrap();
        assert_eq!((row.capacity, row.pending_expand), (before, 0));
        csid_tests::ask::unmount(&s.client, "a", "job").await.unwrap();
        assert_eq!(s.w.plugin("p").count("ControllerExpandVolume", ""), 0);
        s.delete("a", options()).await.unwrap();
        s.nothing_left().await;
    });
}
