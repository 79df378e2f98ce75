//! Claims that end with their caller's connection. (Units: the booted container.)

use std::time::{Duration, Instant};

use csid_client::{AccessMode, ClaimOptions, Kind, MountOptions};
use csid_tests::ask::*;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{eventually, refusal, world};

use crate::*;

fn bound(grace: Duration) -> ClaimOptions {
    let grace_usec = (!grace.is_zero()).then(|| u64::try_from(grace.as_micros()).expect("a time"));
    ClaimOptions { bind: Some("caller".to_owned()), grace_usec, ..ClaimOptions::default() }
}

fn bound_mount() -> MountOptions {
    MountOptions { bind: Some("caller".to_owned()), ..MountOptions::default() }
}

/// Loses a connection with a claim on the volume `later`, and waits until csid has released that claim. By then csid has acted
/// on each earlier loss with this grace time. csid checks connections once a second, so the claim's own grace time is longer.
async fn later_loss_ended(w: &mut World, client: &Client, grace: Duration) {
    drop(claim_later(w, client, grace + Duration::from_secs(1)).await);
    later_is_released(client).await;
}

/// Returns a connection that has a claim on the volume `later`.
async fn claim_later(w: &mut World, client: &Client, grace: Duration) -> Client {
    registered(client, "later", &[AccessMode::SingleNodeWriter]).await;
    let later = w.client().await;
    later.claim(NAMESPACE, "later", "lost", bound(grace)).await.expect("a claim");
    later
}

async fn later_is_released(client: &Client) {
    eventually("a later loss ends its claim", async || {
        claims(client).await.iter().all(|claim| claim.volume != "later")
    })
    .await;
}

/// The events since of the claims on `v`, as (from, to, whether the end of what it was bound to is named).
async fn changes(client: &Client, since: u64) -> Vec<(String, String, bool)> {
    let mut changed = events(client, since).await;
    changed.retain(|event| event.kind == "claim-changed" && event.subject == format!("{NAMESPACE}/v"));
    let text = |event: &csid_client::Event, key: &str| {
        event.details.get(key).map(|value| value.to_string().trim_matches('"').to_owned()).unwrap_or_default()
    };
    changed
        .into_iter()
        .map(|event| (text(&event, "from"), text(&event, "to"), text(&event, "bound") == "caller"))
        .collect()
}

#[test]
fn closed_connection_unmounts_and_releases() {
    world(async |w| {
        let client = attaching(w).await;
        w.plugin("p").provision("later");
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        let since = cursor(&client).await;
        let other = w.client().await;
        other.claim(NAMESPACE, "v", "one", bound(Duration::ZERO)).await.unwrap();
        mount_registered(&other, "v", "one").await.unwrap();
        assert_eq!(claims(&client).await[0].bind, "caller");
        later_loss_ended(w, &client, Duration::ZERO).await;
        assert_eq!(claimed(&client).await, [pair("one", "taken")], "as long as it is there");
        assert!(changes(&client, since).await.iter().all(|(_, _, bound)| !bound));

        drop(other);
        eventually("it is released", async || claimed(&client).await.is_empty()).await;
        w.nothing_left(&client).await;
        let ended = changes(&client, since).await;
        assert!(ended.iter().any(|(from, _, bound)| from == "taken" && *bound), "{ended:?}");
        assert_eq!(w.plugin("p").count("ControllerUnpublishVolume", "v"), 1);

        // A Mount's claim is bound as the Mount is; one that is released is released.
        let other = w.client().await;
        other.mount(NAMESPACE, "v", "two", bound_mount()).await.unwrap();
        unmount(&other, "v", "two").await.unwrap();
        assert_eq!(claimed(&client).await, []);
        other.mount(NAMESPACE, "v", "two", bound_mount()).await.unwrap();
        drop(other);
        eventually("it is released", async || claimed(&client).await.is_empty()).await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn return_within_grace_time_keeps_the_claim() {
    const GRACE: Duration = Duration::from_secs(3);
    world(async |w| {
        let client = unattaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        let first = w.client().await;
        first.claim(NAMESPACE, "v", "one", bound(GRACE)).await.unwrap();
        // csid has noticed the first loss when it has noticed the second.
        let later = claim_later(w, &client, Duration::ZERO).await;
        drop((first, later));
        later_is_released(&client).await;
        let second = w.client().await;
        second.claim(NAMESPACE, "v", "one", bound(GRACE)).await.expect("the same call");
        for other in [ClaimOptions::default(), bound(GRACE * 2)] {
            let refused = refusal(second.claim(NAMESPACE, "v", "one", other).await).0;
            assert_eq!(refused, Kind::AlreadyExists, "with other options it is another call");
        }
        later_loss_ended(w, &client, GRACE).await;
        assert_eq!(claimed(&client).await, [pair("one", "taken")]);
        // The repeated Mount, too, binds it to its own connection.
        drop(mount_registered(&second, "v", "one").await.unwrap());
        let third = w.client().await;
        let options = MountOptions { grace_usec: Some(GRACE.as_micros() as u64), ..bound_mount() };
        third.mount(NAMESPACE, "v", "one", options).await.unwrap();
        drop(second);
        later_loss_ended(w, &client, GRACE).await;
        assert_eq!(claimed(&client).await, [pair("one", "taken")]);
        let begun = Instant::now();
        drop(third);
        eventually("it is released", async || claimed(&client).await.is_empty()).await;
        assert!(begun.elapsed() >= GRACE - Duration::from_millis(100), "{:?}", begun.elapsed());
        w.nothing_left(&client).await;
    });
}

#[test]
fn restart_ends_connections_and_repeats_releases() {
    world(async |w| {
        let client = attaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        client.mount(NAMESPACE, "v", "one", bound_mount()).await.unwrap();
        w.plugin("p").rules([Rule { times: 2, ..Rule::always("NodeUnpublishVolume", Act::Fail(14)) }]);
        w.kill();
        let client = w.start().await;
        eventually("it is released", async || claimed(&client).await.is_empty()).await;
        assert!(w.plugin("p").count("NodeUnpublishVolume", "v") >= 3);
        w.nothing_left(&client).await;
    });
}

#[test]
fn unwatchable_lifetime_is_refused() {
    world(async |w| {
        let client = unattaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        let with = |bind: Option<&str>, grace_usec| ClaimOptions {
            bind: bind.map(str::to_owned),
            grace_usec,
            ..ClaimOptions::default()
        };
        for (options, kind) in [
            (with(Some("nobody"), None), Kind::InvalidArgument),
            (with(Some("unit:db"), None), Kind::InvalidArgument),
            (with(Some("unit:../db.service"), None), Kind::InvalidArgument),
            (with(None, Some(1)), Kind::InvalidArgument),
            // Here no systemd answers.
            (with(Some("unit:db.service"), None), Kind::NotSupported),
        ] {
            let text = format!("{:?}", options.bind);
            assert_eq!(refusal(client.claim(NAMESPACE, "v", "one", options).await).0, kind, "{text}");
        }
        let inline = MountOptions { bind: Some("caller".to_owned()), ..inline("w") };
        assert_eq!(refusal(mount(&client, "one", inline).await).0, Kind::NotSupported);
        assert_eq!(claimed(&client).await, []);
    });
}

/// A caller that was answered "mounted" keeps the mount.
#[test]
fn mount_being_released_is_not_joined() {
    world(async |w| {
        let client = unattaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        let other = w.client().await;
        let source = other.mount(NAMESPACE, "v", "one", bound_mount()).await.unwrap().source;
        let mut user =
            csid_tests::world::child("sleep".as_ref()).arg("600").current_dir(source).spawn().unwrap();
        drop(other);
        eventually("its first release has failed", async || {
            claims(&client).await.iter().any(|claim| claim.releasing && claim.error.contains("is in use"))
        })
        .await;
        for options in [MountOptions::default(), bound_mount()] {
            let (kind, error) = refusal(client.mount(NAMESPACE, "v", "one", options).await);
            assert_eq!(kind, Kind::Uncertain, "{error}");
            assert!(error.message.contains("is still being released"), "{error}");
        }
        user.kill().unwrap();
        user.wait().unwrap();
        eventually("it is released", async || claimed(&client).await.is_empty()).await;

        // A node keeps a claim that is released by force until it has unmounted the volume.
        if clustered::is_used() {
            w.nothing_left(&client).await;
            return;
        }
        // Without its claim, which somebody dropped by force, it is bound by another one.
        mount_registered(&client, "v", "two").await.unwrap();
        let force = ReleaseOptions { force: Some(true), ..ReleaseOptions::default() };
        client.release(NAMESPACE, "v", "two", force).await.unwrap();
        assert_eq!(claimed(&client).await, []);
        mount_registered(&client, "v", "two").await.expect("it is there");
        let other = w.client().await;
        other.mount(NAMESPACE, "v", "two", bound_mount()).await.unwrap();
        assert_eq!(claims(&client).await[0].bind, "caller");
        drop(other);
        eventually("it is released", async || claimed(&client).await.is_empty()).await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn joining_caller_takes_over_claim_lifetime() {
    const GRACE: Duration = Duration::from_secs(1);
    world(async |w| {
        let client = unattaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        w.plugin("p").rules([Rule::once("NodePublishVolume", Act::Delay(1500))]);
        let options = || MountOptions { grace_usec: Some(GRACE.as_micros() as u64), ..bound_mount() };
        let first = w.client().await;
        let begins = {
            let first = first.clone();
            tokio::spawn(async move { first.mount(NAMESPACE, "v", "one", options()).await.map(drop) })
        };
        let begun = async || w.plugin("p").begun_since(0, "NodePublishVolume") > 0;
        eventually("it is being published", begun).await;
        let second = w.client().await;
        let joins = {
            let second = second.clone();
            tokio::spawn(async move { second.mount(NAMESPACE, "v", "one", options()).await.map(drop) })
        };
        eventually("both wait", async || client.list_operations().await.unwrap().len() == 2).await;
        begins.abort();
        drop((begins.await, first));
        joins.await.unwrap().expect("a mount");
        later_loss_ended(w, &client, GRACE).await;
        assert_eq!(claimed(&client).await, [pair("one", "taken")], "its caller is there");
        assert_eq!(state(&client, "v", "one").await, "mounted");
        drop(second);
        eventually("it is released", async || claimed(&client).await.is_empty()).await;
        w.nothing_left(&client).await;
    });
}

/// A failed call changes nothing, nor the claim's lifetime.
#[test]
fn failed_call_leaves_claim_lifetime_unchanged() {
    world(async |w| {
        let client = unattaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        let first = w.client().await;
        let source = first.mount(NAMESPACE, "v", "one", bound_mount()).await.unwrap().source;
        // It is gone, and cannot be had again.
        rustix::mount::unmount(source, rustix::mount::UnmountFlags::empty()).unwrap();
        w.plugin("p").kill();
        let second = w.client().await;
        let soon = MountOptions { deadline_usec: Some(500_000), ..bound_mount() };
        let (kind, error) = refusal(second.mount(NAMESPACE, "v", "one", soon).await);
        assert!([Kind::TimedOut, Kind::PluginUnavailable].contains(&kind), "{error}");
        drop(second);
        w.plugin("p").start().await;
        healthy(&client, "p").await;
        later_loss_ended(w, &client, Duration::ZERO).await;
        assert_eq!(claimed(&client).await, [pair("one", "taken")]);
        first.mount(NAMESPACE, "v", "one", bound_mount()).await.expect("the mount");
        drop(first);
        eventually("it is released", async || claimed(&client).await.is_empty()).await;
        w.nothing_left(&client).await;
    });
}
