//! A plugin is drained: what was mounted of it is unmounted for good, what is in use stays and is named, and nothing new comes
//! meanwhile.

use std::fs;

use csid_client::{AccessMode, CallOptions, ClaimFilter, ClaimOptions, Client, Kind, MountFilter};
use csid_client::{MountOptions, PluginSpec, Supervision, UnregisterOptions};
use csid_tests::ask::*;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, eventually, refusal, world};

/// A world with plugin `p`, which is registered by a call.
pub async fn by_call(w: &mut World) -> Client {
    w.add_plugin("p").await;
    fs::remove_file(w.path("etc/plugins.d/p.toml")).unwrap();
    let client = w.start().await;
    let spec = PluginSpec {
        supervision: Some(Supervision::External),
        socket: Some(w.plugin("p").witnessed_socket().to_string_lossy().into_owned()),
        ..PluginSpec::default()
    };
    client.register_plugin("p", spec).await.unwrap();
    healthy(&client, "p").await;
    client
}

async fn claims(client: &Client) -> Vec<String> {
    let claims = client.list_claims(ClaimFilter::default()).await.unwrap();
    claims.into_iter().map(|claim| format!("{} {}", claim.volume, claim.consumer)).collect()
}

#[test]
fn drained_plugin_can_be_unregistered() {
    world(async |w| {
        let client = by_call(w).await;
        for consumer in ["one", "two"] {
            mounted(&client, consumer, shared("both")).await;
        }
        let used = mounted(&client, "psql", inline("used")).await;
        let held = fs::File::create(used.join("file")).unwrap();
        let writer = [AccessMode::SingleNodeWriter];
        for volume in ["claimed", "taken"] {
            registered(&client, volume, &writer).await;
        }
        client.claim(NAMESPACE, "claimed", "job", ClaimOptions::default()).await.unwrap();
        for volume in ["claimed", "taken"] {
            client.mount(NAMESPACE, volume, "job", MountOptions::default()).await.unwrap();
        }
        assert_eq!(claims(&client).await, ["claimed job", "taken job"]);
        // One that is on its way, and an unmount that takes its time.
        w.plugin("p").rules([
            Rule::once("NodeStageVolume", Act::Delay(60_000)).of("late"),
            Rule::once("NodeUnpublishVolume", Act::Delay(1_000)).of("both"),
        ]);
        let late = tokio::spawn({
            let client = client.clone();
            async move { mount(&client, "job", inline("late")).await }
        });
        eventually("it is under way", async || w.plugin("p").count("NodeStageVolume", "late") == 1).await;

        let before = cursor(&client).await;
        let (report, ()) = tokio::join!(client.drain_plugin("p", CallOptions::default()), async {
            eventually("it has begun", async || w.plugin("p").count("NodeUnpublishVolume", "both") > 0).await;
            let (kind, error) = refusal(mount(&client, "job", inline("new")).await);
            assert_eq!(kind, Kind::PluginUnavailable);
            assert!(error.message.contains("is being drained"), "{error}");
            assert_eq!(refusal(client.drain_plugin("p", CallOptions::default()).await).0, Kind::Busy);
            let unregistered = client.unregister_plugin("p", UnregisterOptions::default()).await;
            assert_eq!(refusal(unregistered).0, Kind::Busy);
        });
        let report = report.unwrap();
        assert_eq!(refusal(late.await.unwrap()).0, Kind::Cancelled);
        let name = |of: &str| format!("{NAMESPACE}/{of}");
        let names = ["both one", "both two", "claimed job", "late job", "taken job"].map(name);
        assert_eq!(report.unmounted, names);
        let [failed] = &report.failed[..] else { panic!("{report:?}") };
        assert!(failed.starts_with(&name("used psql: Busy: ")), "{failed}");
        assert!(
            failed.contains(&format!("is in use by {} ", std::process::id())),
            "the process is named: {failed}"
        );
        assert_eq!(report.claimed, [name("claimed job")], "the other claim came and went with its mount");
        assert_eq!(claims(&client).await, ["claimed job"]);
        let left = client.list_mounts(MountFilter::default()).await.unwrap();
        assert_eq!(left.iter().map(|row| row.volume.as_str()).collect::<Vec<_>>(), ["used"]);
        let answer = event(&client, before, &["plugin-drained"], "p").await;
        assert!(detail(&answer, "error").starts_with("1 mount"), "{answer:?}");
        assert_eq!(events(&client, before).await.iter().filter(|event| event.kind == "unmount").count(), 4);
        assert!(client.plugin("p").await.unwrap().healthy, "the plugin goes on");

        drop(held);
        let report = client.drain_plugin("p", CallOptions::default()).await.unwrap();
        assert_eq!((report.unmounted, report.failed), (vec![name("used psql")], Vec::new()));
        assert_eq!(report.claimed, [name("claimed job")]);
        // It is for good: nothing comes back with csid.
        w.kill();
        let client = w.start().await;
        settled(&client).await;
        assert!(client.list_mounts(MountFilter::default()).await.unwrap().is_empty());
        client.release(NAMESPACE, "claimed", "job", Default::default()).await.unwrap();
        for volume in ["claimed", "taken"] {
            client.deregister_volume(NAMESPACE, volume, Default::default()).await.unwrap();
        }
        client.unregister_plugin("p", UnregisterOptions::default()).await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn deadline_ends_the_waiting_and_not_the_drain() {
    world(async |w| {
        let client = by_call(w).await;
        mounted(&client, "job", inline("v")).await;
        w.plugin("p").rules([Rule::once("NodeUnpublishVolume", Act::Delay(1_000))]);
        let soon = CallOptions { deadline_usec: Some(200_000), ..CallOptions::default() };
        assert_eq!(refusal(client.drain_plugin("p", soon).await).0, Kind::TimedOut);
        eventually("it goes on", async || state(&client, "v", "job").await == "none").await;
        eventually("and ends", async || mount(&client, "job", inline("v")).await.is_ok()).await;
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}
