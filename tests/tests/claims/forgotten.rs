//! A claim whose detach never ends: root forgets it, and who waits behind it goes on.

use std::time::Duration;

use csid_client::{AccessMode, ClaimFilter, Client, Kind, ReleaseOptions, Result};
use csid_tests::ask::*;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{eventually, refusal, world};

use crate::*;

const BOUND: Duration = Duration::from_secs(60);

async fn forget(client: &Client, consumer: &str) -> Result<()> {
    let options = ReleaseOptions { forget: Some(true), ..ReleaseOptions::default() };
    let forget = client.release(NAMESPACE, "v", consumer, options);
    tokio::time::timeout(BOUND, forget).await.expect("forget ends")
}

#[test]
fn claim_whose_detach_never_ends_can_be_forgotten() {
    alone("a node lists what it has, and servers list what they detach", async |w| {
        let client = attaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeMultiWriter]).await;
        mount_registered(&client, "v", "one").await.unwrap();
        claim(&client, "v", "one").await.unwrap();
        let (kind, error) = refusal(forget(&client, "one").await);
        assert_eq!(kind, Kind::Busy, "it is mounted: {error}");

        for act in [Act::Delay(600_000), Act::Fail(2)] {
            w.plugin("p").rules([Rule::always("ControllerUnpublishVolume", act)]);
            let caller = client.clone();
            let releasing = tokio::spawn(async move { release(&caller, "v", "one").await });
            eventually("it hangs", async || claimed(&client).await == [pair("one", "node-detached")]).await;
            let caller = client.clone();
            let two = tokio::spawn(async move { mount_registered(&caller, "v", "two").await });
            eventually("it waits", async || client.list_operations().await.unwrap().len() == 2).await;
            forget(&client, "one").await.unwrap();
            assert_eq!(refusal(releasing.await.unwrap()).0, Kind::Cancelled);
            tokio::time::timeout(BOUND, two).await.expect("it goes on").unwrap().unwrap();
            assert_eq!(claimed(&client).await, [pair("two", "taken")]);
            let past = ClaimFilter { past: Some(true), ..ClaimFilter::default() };
            let past = client.list_claims(past).await.unwrap();
            assert!(past.iter().any(|row| row.consumer == "one"), "{past:?}");

            w.plugin("p").honest();
            unmount(&client, "v", "two").await.unwrap();
            eventually("no claim is left", async || claims(&client).await.is_empty()).await;
            w.nothing_left(&client).await;
            claim(&client, "v", "one").await.unwrap();
        }
        release(&client, "v", "one").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// The claim that a Mount took is released to the end. Root's forget breaks rule 23: the plugin never said that it unstaged.
#[test]
fn forgotten_mount_releases_its_claim() {
    world(async |w| {
        w.excuse(23, "ControllerUnpublishVolume");
        w.add_plugin("p").await.set(|script| script.control(ATTACH));
        w.plugin("p").kill();
        w.plugin("p").start().await;
        w.plugin("p").provision("v");
        let client = w.start().await;
        healthy(&client, "p").await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        w.plugin("p").rules(
            ["NodeStageVolume", "NodeUnstageVolume"].map(|rpc| Rule::always(rpc, Act::Fail(2)).of("v")),
        );
        let soon = MountOptions { deadline_usec: Some(2_000_000), ..MountOptions::default() };
        refusal(client.mount(NAMESPACE, "v", "one", soon).await);
        let options = csid_client::UnmountOptions { forget: Some(true), ..Default::default() };
        client.unmount(NAMESPACE, "v", "one", options).await.unwrap();
        eventually("no claim is left", async || claims(&client).await.is_empty()).await;
        w.nothing_left(&client).await;
        assert!(w.plugin("p").count("ControllerUnpublishVolume", "v") > 0);
    });
}
