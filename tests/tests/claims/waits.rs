//! Who waits for a claim has it in the order of the asking.

use std::time::Duration;

use csid_client::{AccessMode, ClaimMode, Kind};
use csid_tests::ask::*;
use csid_tests::world::{eventually, refusal, world};

use crate::*;

fn waiting(limit: Duration) -> ClaimOptions {
    ClaimOptions { wait_usec: Some(limit.as_micros() as u64), ..ClaimOptions::default() }
}

#[test]
fn claims_wait_in_the_order_they_came() {
    world(async |w| {
        let client = unattaching(w).await;
        register(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        claim(&client, "v", "first").await.unwrap();
        let mut calls = Vec::new();
        for consumer in ["a", "b", "c"] {
            let client = client.clone();
            calls.push(tokio::spawn(async move {
                let claimed = client.claim(NAMESPACE, "v", consumer, waiting(Duration::from_secs(60))).await;
                claimed.map(|_| consumer)
            }));
            eventually("it waits", async || {
                let operations = w.client().await.list_operations().await.unwrap();
                operations.iter().filter(|o| o.kind == "claim").count() == calls.len()
            })
            .await;
        }
        let (kind, error) = refusal(claim(&client, "v", "hasty").await);
        assert_eq!(kind, Kind::ClaimConflict, "{error}");
        let mut holder = "first";
        for call in calls {
            release(&client, "v", holder).await.unwrap();
            holder = call.await.unwrap().unwrap();
            assert_eq!(claimed(&client).await, [pair(holder, "taken")]);
        }
        assert_eq!(holder, "c");
        release(&client, "v", holder).await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn a_writer_that_waits_is_not_passed_by_readers() {
    world(async |w| {
        let client = unattaching(w).await;
        register(&client, "v", &[AccessMode::MultiNodeReaderOnly, AccessMode::SingleNodeWriter]).await;
        let reader = || ClaimOptions {
            mode: Some(ClaimMode::Read),
            access_mode: Some(AccessMode::MultiNodeReaderOnly),
            ..ClaimOptions::default()
        };
        client.claim(NAMESPACE, "v", "reader", reader()).await.unwrap();
        let writer = ClaimOptions {
            access_mode: Some(AccessMode::SingleNodeWriter),
            ..waiting(Duration::from_secs(60))
        };
        let call = {
            let client = client.clone();
            tokio::spawn(async move { client.claim(NAMESPACE, "v", "writer", writer).await })
        };
        eventually("the writer waits", async || {
            let operations = client.list_operations().await.unwrap();
            operations.iter().any(|o| o.step == "waiting for claims")
        })
        .await;
        let (kind, error) = refusal(client.claim(NAMESPACE, "v", "late", reader()).await);
        assert_eq!((kind, error.details.holders), (Kind::ClaimConflict, vec!["writer".to_owned()]));
        release(&client, "v", "reader").await.unwrap();
        call.await.unwrap().unwrap();
        release(&client, "v", "writer").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn waiting_ends_with_its_time_or_with_a_release() {
    world(async |w| {
        let client = unattaching(w).await;
        register(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        claim(&client, "v", "one").await.unwrap();
        let late = client.claim(NAMESPACE, "v", "two", waiting(Duration::from_millis(200))).await;
        let (kind, error) = refusal(late);
        assert_eq!((kind, error.details.holders), (Kind::ClaimConflict, vec!["one".to_owned()]));
        let call = {
            let client = client.clone();
            tokio::spawn(async move {
                client.claim(NAMESPACE, "v", "three", waiting(Duration::from_secs(60))).await
            })
        };
        eventually("it waits", async || {
            client.list_operations().await.unwrap().iter().any(|o| o.step == "waiting for claims")
        })
        .await;
        release(&client, "v", "three").await.unwrap();
        assert_eq!(refusal(call.await.unwrap()).0, Kind::Cancelled);
        release(&client, "v", "one").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// A claim in a task of its own, when csid says that it waits.
async fn waits(client: &Client, volume: &'static str, consumer: &'static str) -> Waits {
    let before = waiting_claims(client).await;
    let call = {
        let client = client.clone();
        tokio::spawn(async move {
            client.claim(NAMESPACE, volume, consumer, waiting(Duration::from_secs(60))).await
        })
    };
    eventually("it waits", async || waiting_claims(client).await > before).await;
    call
}

type Waits = tokio::task::JoinHandle<Result<Claimed>>;

async fn waiting_claims(client: &Client) -> usize {
    let operations = client.list_operations().await.unwrap();
    operations.iter().filter(|operation| operation.step.starts_with("waiting for")).count()
}

/// What a plugin takes at most on a node is freed by other volumes.
#[test]
fn who_waits_for_the_plugins_limit_has_what_another_volume_frees() {
    world(async |w| {
        let plugin = w.add_witnessed("p", &[], "").await;
        plugin.set(|script| script.max_volumes = 1);
        plugin.kill();
        plugin.start().await;
        for volume in ["a", "b", "c"] {
            plugin.provision(volume);
        }
        let client = w.start().await;
        healthy(&client, "p").await;
        for volume in ["a", "b", "c"] {
            register(&client, volume, &[AccessMode::SingleNodeWriter]).await;
        }
        claim(&client, "a", "one").await.unwrap();
        let b = waits(&client, "b", "two").await;
        let c = waits(&client, "c", "three").await;
        release(&client, "a", "one").await.unwrap();
        eventually("one of them has it", async || b.is_finished() != c.is_finished()).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_ne!(b.is_finished(), c.is_finished(), "one, as many as there is room for");
        let (volume, consumer, first, last) =
            if b.is_finished() { ("b", "two", b, c) } else { ("c", "three", c, b) };
        first.await.unwrap().unwrap();
        release(&client, volume, consumer).await.unwrap();
        tokio::time::timeout(Duration::from_secs(10), last).await.expect("at once").unwrap().unwrap();
        let (volume, consumer) = if volume == "b" { ("c", "three") } else { ("b", "two") };
        release(&client, volume, consumer).await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// Time does not bring a volume nearer.
#[test]
fn what_this_node_cannot_reach_is_not_waited_for() {
    world(async |w| {
        let client = unattaching(w).await;
        let spec = RegisterVolume {
            plugin: Some("p".to_owned()),
            external_id: Some("v".to_owned()),
            capabilities: Some(uses(&[AccessMode::SingleNodeWriter])),
            topologies: Some(vec![[("zone".to_owned(), "far".to_owned())].into()]),
            ..RegisterVolume::default()
        };
        client.register_volume(NAMESPACE, "v", spec).await.unwrap();
        let claim = client.claim(NAMESPACE, "v", "one", waiting(Duration::from_secs(60)));
        let claim = tokio::time::timeout(Duration::from_secs(10), claim).await.expect("at once");
        let (kind, error) = refusal(claim);
        assert_eq!(kind, Kind::ClaimConflict);
        assert!(error.message.contains("not reachable from this node"), "{error}");
        w.nothing_left(&client).await;
    });
}

/// A claim in a task of its own, when csid says that its plugin is waited for.
async fn asks_for(client: &Client, volume: &'static str) -> Waits {
    let call = {
        let client = client.clone();
        tokio::spawn(async move { claim(&client, volume, "two").await })
    };
    eventually("the plugin is waited for", async || {
        let operations = client.list_operations().await.unwrap();
        let subject = format!("{NAMESPACE}/{volume}");
        operations.iter().any(|of| of.subject == subject && of.step == "waiting for plugin")
    })
    .await;
    call
}

/// What a plugin takes, and where it is, is not known before it has been seen.
#[test]
fn a_plugin_that_has_just_started_is_given_no_volume_too_many_or_too_far() {
    world(async |w| {
        let plugin = w.add_witnessed("p", &[], "").await;
        plugin.set(|script| script.max_volumes = 1);
        plugin.kill();
        plugin.start().await;
        let client = w.start().await;
        healthy(&client, "p").await;
        for volume in ["a", "b"] {
            register(&client, volume, &[AccessMode::SingleNodeWriter]).await;
        }
        let far = RegisterVolume {
            plugin: Some("p".to_owned()),
            external_id: Some("far".to_owned()),
            capabilities: Some(uses(&[AccessMode::SingleNodeWriter])),
            topologies: Some(vec![[("zone".to_owned(), "far".to_owned())].into()]),
            ..RegisterVolume::default()
        };
        client.register_volume(NAMESPACE, "far", far).await.unwrap();
        claim(&client, "a", "one").await.unwrap();
        w.kill();
        w.plugin("p").kill();
        let client = w.start().await;
        let (many, far) = (asks_for(&client, "b").await, asks_for(&client, "far").await);
        w.plugin("p").start().await;
        let (kind, error) = refusal(many.await.unwrap());
        assert!(kind == Kind::ClaimConflict && error.message.contains("at most 1 volumes"), "{error}");
        let (kind, error) = refusal(far.await.unwrap());
        assert!(kind == Kind::ClaimConflict && error.message.contains("not reachable"), "{error}");
        release(&client, "a", "one").await.unwrap();
        assert_eq!(claimed(&client).await, []);
        w.nothing_left(&client).await;
    });
}

/// Whoever fails may have let something go on his way.
#[test]
fn a_claim_that_fails_frees_what_it_held_for_those_who_wait() {
    world(async |w| {
        let client = attaching(w).await;
        register(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        claim(&client, "v", "one").await.unwrap();
        w.plugin("p").rules([csid_tests::script::Rule::always(
            "ControllerUnpublishVolume",
            csid_tests::script::Act::Fail(9),
        )]);
        assert_eq!(refusal(release(&client, "v", "one").await).0, Kind::PluginError);
        let two = waits(&client, "v", "two").await;
        w.honest();
        assert_eq!(refusal(claim(&client, "v", "one").await).0, Kind::ClaimConflict, "two was first");
        tokio::time::timeout(Duration::from_secs(10), two).await.expect("at once").unwrap().unwrap();
        assert_eq!(claimed(&client).await, [pair("two", "taken")]);
        release(&client, "v", "two").await.unwrap();
        w.nothing_left(&client).await;
    });
}
