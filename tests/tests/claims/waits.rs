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
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
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
fn readers_do_not_overtake_a_waiting_writer() {
    world(async |w| {
        let client = unattaching(w).await;
        registered(&client, "v", &[AccessMode::MultiNodeReaderOnly, AccessMode::SingleNodeWriter]).await;
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
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
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
async fn claim_waits(client: &Client, consumer: &'static str, options: ClaimOptions) -> Waits {
    let before = waiting_claims(client).await;
    let call = {
        let client = client.clone();
        tokio::spawn(async move { client.claim(NAMESPACE, "v", consumer, options).await })
    };
    eventually("it waits", async || waiting_claims(client).await > before).await;
    call
}

#[test]
fn reader_overtakes_writers_waiting_for_a_writer() {
    world(async |w| {
        let client = unattaching(w).await;
        registered(&client, "v", &[AccessMode::MultiNodeSingleWriter, AccessMode::SingleNodeWriter]).await;
        let single = AccessMode::SingleNodeWriter;
        let exclusive = ClaimOptions { access_mode: Some(single), ..ClaimOptions::default() };
        client.claim(NAMESPACE, "v", "exclusive", exclusive).await.unwrap();
        let shared = |mode| ClaimOptions {
            mode: Some(mode),
            access_mode: Some(AccessMode::MultiNodeSingleWriter),
            ..waiting(Duration::from_secs(60))
        };
        let first = claim_waits(&client, "first", shared(ClaimMode::Write)).await;
        let second = claim_waits(&client, "second", shared(ClaimMode::Write)).await;
        let third = claim_waits(&client, "third", shared(ClaimMode::Write)).await;
        let reader = claim_waits(&client, "reader", shared(ClaimMode::Read)).await;
        release(&client, "v", "exclusive").await.unwrap();
        first.await.unwrap().expect("the first writer");
        reader.await.unwrap().expect("a reader, though two writers wait before it");
        assert!(!second.is_finished() && !third.is_finished());
        release(&client, "v", "first").await.unwrap();
        second.await.unwrap().expect("the second writer");
        assert!(!third.is_finished(), "the order is kept");
        for consumer in ["second", "reader"] {
            release(&client, "v", consumer).await.unwrap();
        }
        third.await.unwrap().expect("the third writer");
        release(&client, "v", "third").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn queued_claim_waits_no_longer_than_its_limit() {
    world(async |w| {
        let client = unattaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        claim(&client, "v", "holder").await.unwrap();
        let first = claim_waits(&client, "first", waiting(Duration::from_secs(60))).await;
        let brief = claim_waits(&client, "brief", waiting(Duration::from_secs(2))).await;
        let last = claim_waits(&client, "last", waiting(Duration::from_secs(60))).await;
        // The end of other claims does not let one pass.
        for _ in 0..3 {
            client.mount(NAMESPACE, "v", "holder", MountOptions::default()).await.unwrap();
            unmount(&client, "v", "holder").await.unwrap();
        }
        let (kind, error) = refusal(brief.await.unwrap());
        assert_eq!(
            (kind, error.details.holders),
            (Kind::ClaimConflict, vec!["holder".into(), "first".into()])
        );
        assert!(!first.is_finished() && !last.is_finished());
        // Who is first gives up; the next has it.
        release(&client, "v", "first").await.unwrap();
        assert_eq!(refusal(first.await.unwrap()).0, Kind::Cancelled);
        release(&client, "v", "holder").await.unwrap();
        last.await.unwrap().expect("the claim");
        release(&client, "v", "last").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// A mount in a task of its own, when csid says that it waits.
async fn mount_waits(client: &Client, consumer: &'static str, options: MountOptions) -> MountWaits {
    let before = waiting_claims(client).await;
    let options = MountOptions { wait_usec: Some(60_000_000), ..options };
    let call = {
        let client = client.clone();
        tokio::spawn(async move { client.mount(NAMESPACE, "v", consumer, options).await })
    };
    eventually("it waits", async || waiting_claims(client).await > before).await;
    call
}

type MountWaits = tokio::task::JoinHandle<Result<Mounted>>;

#[test]
fn mount_waits_as_a_claim_does() {
    world(async |w| {
        let client = unattaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        client.mount(NAMESPACE, "v", "one", MountOptions::default()).await.unwrap();
        let (kind, error) = refusal(client.mount(NAMESPACE, "v", "hasty", MountOptions::default()).await);
        assert_eq!((kind, error.details.retryable), (Kind::ClaimConflict, Some(true)), "{error}");
        let short = MountOptions { wait_usec: Some(200_000), ..MountOptions::default() };
        let (kind, error) = refusal(client.mount(NAMESPACE, "v", "short", short).await);
        assert_eq!((kind, error.details.holders), (Kind::ClaimConflict, vec!["one".to_owned()]));

        let two = mount_waits(&client, "two", MountOptions::default()).await;
        let three = mount_waits(&client, "three", MountOptions::default()).await;
        let ended = mount_waits(&client, "ended", MountOptions::default()).await;
        unmount(&client, "v", "ended").await.unwrap();
        assert_eq!(refusal(ended.await.unwrap()).0, Kind::Cancelled);
        unmount(&client, "v", "one").await.unwrap();
        two.await.unwrap().unwrap();
        assert!(!three.is_finished(), "who came later waits on");
        unmount(&client, "v", "two").await.unwrap();
        three.await.unwrap().unwrap();
        unmount(&client, "v", "three").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn mount_of_an_inline_volume_waits_too() {
    world(async |w| {
        let client = unattaching(w).await;
        client.mount(NAMESPACE, "v", "one", inline("v")).await.unwrap();
        let two = mount_waits(&client, "two", inline("v")).await;
        unmount(&client, "v", "one").await.unwrap();
        two.await.unwrap().unwrap();
        unmount(&client, "v", "two").await.unwrap();
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

/// A claim waits at the plugin's limit of volumes until another volume leaves the node.
#[test]
fn release_of_another_volume_frees_max_volumes() {
    world(async |w| {
        let plugin = w.add_plugin_and("p", &[], "").await;
        plugin.set(|script| script.max_volumes = 1);
        plugin.kill();
        plugin.start().await;
        for volume in ["a", "b", "c", "d"] {
            plugin.provision(volume);
        }
        let client = w.start().await;
        healthy(&client, "p").await;
        for volume in ["a", "b", "c", "d"] {
            registered(&client, volume, &[AccessMode::SingleNodeWriter]).await;
        }
        claim(&client, "a", "one").await.unwrap();
        let b = waits(&client, "b", "two").await;
        let c = waits(&client, "c", "three").await;
        release(&client, "a", "one").await.unwrap();
        eventually("one of them has it", async || b.is_finished() != c.is_finished()).await;
        // A later claim waits until its time is over: there is room for one.
        let (kind, error) =
            refusal(client.claim(NAMESPACE, "d", "four", waiting(Duration::from_millis(300))).await);
        assert_eq!(kind, Kind::ClaimConflict, "{error}");
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

/// A volume out of the node's reach is refused at once: waiting changes nothing.
#[test]
fn unreachable_topology_is_not_waited_for() {
    world(async |w| {
        let client = unattaching(w).await;
        let spec = RegisterVolume {
            plugin: Some("p".to_owned()),
            external_id: Some("v".to_owned()),
            capabilities: Some(capabilities(&[AccessMode::SingleNodeWriter])),
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

/// csid does not know a plugin's limit and topology before it has seen the plugin.
#[test]
fn limit_and_topology_hold_before_plugin_is_probed() {
    world(async |w| {
        let plugin = w.add_plugin_and("p", &[], "").await;
        plugin.set(|script| script.max_volumes = 1);
        plugin.kill();
        plugin.start().await;
        let client = w.start().await;
        healthy(&client, "p").await;
        for volume in ["a", "b"] {
            registered(&client, volume, &[AccessMode::SingleNodeWriter]).await;
        }
        let far = RegisterVolume {
            plugin: Some("p".to_owned()),
            external_id: Some("far".to_owned()),
            capabilities: Some(capabilities(&[AccessMode::SingleNodeWriter])),
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

/// A claim that fails may have released something before.
#[test]
fn failed_claim_frees_its_place_for_waiting_ones() {
    alone("a node lists what it has, and servers list what they detach", async |w| {
        let client = attaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
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
