//! Registered volumes and claims over D-Bus against a plugin that attaches: what a caller is answered, what the controller was
//! asked, and what is attached afterwards, also after csid was killed. A witness stands before each plugin.

mod attached;
mod bound;
mod by_call;
mod controller;
mod forgotten;
mod kills;
mod owners;
mod units;
mod waits;

use csid_client::{
    AccessMode, AttachmentMode, CallOptions, ClaimFilter, ClaimOptions, Claimed, Client, Kind, MountOptions,
    Mounted, RegisterVolume, ReleaseOptions, Result,
};
use csid_tests::ask::*;
use csid_tests::clustered::{self, alone};
use csid_tests::world::{World, refusal, world};

/// Why tests are skipped on a node of a cluster.
const UNREGISTERED: &str = "AttachVolume without a registration is refused in a cluster";

const ATTACH: &[&str] = &["PUBLISH_UNPUBLISH_VOLUME", "PUBLISH_READONLY", "SINGLE_NODE_MULTI_WRITER"];

/// Starts csid with plugin `p`, whose controller attaches, and its volume `v`.
async fn attaching(w: &mut World) -> Client {
    let plugin = w.add_plugin_and("p", &["second"], "").await;
    plugin.set(|script| script.control(ATTACH));
    plugin.kill();
    plugin.start().await;
    plugin.provision("v");
    let client = w.start().await;
    healthy(&client, "p").await;
    client
}

/// Starts csid with plugin `p`, which has no controller.
async fn unattaching(w: &mut World) -> Client {
    w.add_plugin_and("p", &[], "").await;
    let client = w.start().await;
    healthy(&client, "p").await;
    client
}

/// Returns the claims as pairs of consumer and state.
async fn claimed(client: &Client) -> Vec<(String, String)> {
    claims(client).await.into_iter().map(|row| (row.consumer, row.state)).collect()
}

fn pair(consumer: &str, state: &str) -> (String, String) {
    (consumer.to_owned(), state.to_owned())
}

#[test]
fn claim_names_its_holder_and_ends_by_release() {
    world(async |w| {
        let client = unattaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        let first = claim(&client, "v", "one").await.unwrap();
        assert_eq!((first.state.as_str(), first.external_id.as_str()), ("taken", "v"));
        assert_eq!(claim(&client, "v", "one").await.unwrap().state, "taken", "the same again");
        let (kind, error) = refusal(claim(&client, "v", "two").await);
        assert_eq!((kind, error.details.holders), (Kind::ClaimConflict, vec!["one".to_owned()]));
        assert_eq!(refusal(mount_registered(&client, "v", "two").await).0, Kind::ClaimConflict);
        assert_eq!(claimed(&client).await, [pair("one", "taken")]);

        w.kill();
        let client = w.start().await;
        healthy(&client, "p").await;
        assert_eq!(claimed(&client).await, [pair("one", "taken")], "an answered claim outlives csid");
        release(&client, "v", "one").await.unwrap();
        release(&client, "v", "one").await.unwrap();
        claim(&client, "v", "two").await.unwrap();
        release(&client, "v", "two").await.unwrap();
        let past = ClaimFilter { past: Some(true), ..ClaimFilter::default() };
        let past: Vec<_> =
            client.list_claims(past).await.unwrap().into_iter().map(|row| row.consumer).collect();
        // Servers list no past claims yet.
        let due: &[&str] = if clustered::is_used() { &[] } else { &["one", "two"] };
        assert_eq!(past, due);
        w.nothing_left(&client).await;
    });
}

/// A credential is loaded by a unit of systemd, and there is no systemd here. So a call that loads one fails.
#[test]
fn call_without_secrets_loads_no_credential() {
    world(async |w| {
        let client = running(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        let credential = || Some(format!("csid.{NAMESPACE}.key"));
        let stats = CallOptions { credential: credential(), ..CallOptions::default() };
        let (kind, error) = refusal(client.volume_stats(NAMESPACE, "v", stats).await);
        assert_ne!(kind, Kind::SecretRequired, "{error}");
        let nobodys = ReleaseOptions { credential: credential(), ..ReleaseOptions::default() };
        client.release(NAMESPACE, "v", "nobody", nobodys).await.unwrap();
    });
}

#[test]
fn last_unmount_releases_the_mounts_claim() {
    world(async |w| {
        let client = unattaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeMultiWriter]).await;
        mount_registered(&client, "v", "one").await.unwrap();
        let second = MountOptions { tag: Some("2".to_owned()), ..MountOptions::default() };
        client.mount(NAMESPACE, "v", "one", second).await.unwrap();
        assert_eq!(claimed(&client).await, [pair("one", "taken")]);
        unmount(&client, "v", "one").await.unwrap();
        assert_eq!(claimed(&client).await, [pair("one", "taken")], "its other mount is there");
        let tag = csid_client::UnmountOptions { tag: Some("2".to_owned()), ..Default::default() };
        client.unmount(NAMESPACE, "v", "one", tag).await.unwrap();
        assert_eq!(claimed(&client).await, []);

        // An explicit one stays.
        claim(&client, "v", "two").await.unwrap();
        mount_registered(&client, "v", "two").await.unwrap();
        unmount(&client, "v", "two").await.unwrap();
        assert_eq!(claimed(&client).await, [pair("two", "taken")]);
        mount_registered(&client, "v", "two").await.unwrap();
        release(&client, "v", "two").await.unwrap();
        assert_eq!(claimed(&client).await, []);

        // Also one that a Mount took, once it was claimed.
        mount_registered(&client, "v", "three").await.unwrap();
        claim(&client, "v", "three").await.unwrap();
        unmount(&client, "v", "three").await.unwrap();
        assert_eq!(claimed(&client).await, [pair("three", "taken")]);
        release(&client, "v", "three").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn mount_that_fails_leaves_no_claim() {
    world(async |w| {
        let client = unattaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        let refuse = csid_tests::script::Act::Fail(3);
        w.plugin("p").rules([csid_tests::script::Rule::always("NodePublishVolume", refuse)]);
        assert_eq!(refusal(mount_registered(&client, "v", "one").await).0, Kind::PluginError);
        assert_eq!(claimed(&client).await, []);
        w.honest();
        w.nothing_left(&client).await;
    });
}
