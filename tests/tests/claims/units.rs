//! Claims that end with a systemd unit, with a systemd of the test's own. (The real one: the booted container.)

use std::time::Duration;

use csid_client::{ClaimOptions, Kind};
use csid_tests::ask::*;
use csid_tests::dbus::{Bus, Policy};
use csid_tests::systemd::Systemd;
use csid_tests::world::{count, eventually, refusal, world};

use crate::*;

const UNITS: usize = 1_000;
/// Number of units that end while the others run.
const ENDS: usize = 10;

fn unit(n: usize) -> String {
    format!("u{n}.service")
}

fn bound(n: usize, grace: Duration) -> ClaimOptions {
    let grace_usec = (!grace.is_zero()).then(|| u64::try_from(grace.as_micros()).expect("a time"));
    ClaimOptions { bind: Some(format!("unit:{}", unit(n))), grace_usec, ..ClaimOptions::default() }
}

fn volume(n: usize) -> String {
    format!("v{n}")
}

/// A bus with a systemd on it whose units run, and csid with a volume for each.
async fn beside(w: &mut World, units: usize) -> (Bus, Systemd, Client) {
    let bus = Bus::start(w, Policy::Everything).await;
    let systemd = Systemd::start(&bus).await;
    let client = unattaching(w).await;
    for n in 0..units {
        systemd.set(&unit(n), true);
        registered(&client, &volume(n), &[AccessMode::SingleNodeWriter]).await;
    }
    (bus, systemd, client)
}

async fn claim_bound(client: &Client, n: usize, grace: Duration) {
    client.claim(NAMESPACE, &volume(n), "job", bound(n, grace)).await.expect("a claim");
}

async fn is_released(client: &Client, n: usize) {
    let filter = || ClaimFilter { volume: Some(volume(n)), ..ClaimFilter::default() };
    eventually("the claim is released", async || client.list_claims(filter()).await.unwrap().is_empty())
        .await;
}

#[test]
fn units_that_do_not_change_are_not_asked_about() {
    world(async |w| {
        let (_bus, systemd, client) = beside(w, UNITS).await;
        for n in 0..UNITS {
            claim_bound(&client, n, Duration::ZERO).await;
        }
        systemd.change(&unit(0), false).await;
        is_released(&client, 0).await;
        systemd.count_anew();
        for n in 1..=ENDS {
            systemd.change(&unit(n), false).await;
            is_released(&client, n).await;
        }
        let (calls, names) = systemd.asked();
        count("calls to PID 1 with 1,000 bound units while ten end", calls);
        count("units that they asked about", names);
        // One to see that the unit has not come back. The fallback may fall in between, once, with all names.
        assert!(calls <= ENDS + 1, "{calls} calls");
        assert!(names <= ENDS + UNITS, "{names} units");
        assert_eq!(claims(&client).await.len(), UNITS - 1 - ENDS);
    });
}

#[test]
fn unit_that_ends_during_its_claim_is_noticed() {
    world(async |w| {
        let (_bus, systemd, client) = beside(w, 2).await;
        for n in 0..2 {
            // The first is bound before csid has subscribed, the second after.
            systemd.ends_once_asked(&unit(n));
            claim_bound(&client, n, Duration::ZERO).await;
            is_released(&client, n).await;
        }
    });
}

#[test]
fn unit_that_ends_without_csid_is_noticed() {
    world(async |w| {
        let (_bus, systemd, client) = beside(w, 2).await;
        for n in 0..2 {
            claim_bound(&client, n, Duration::ZERO).await;
        }
        systemd.has_subscriber().await;
        w.kill();
        systemd.change(&unit(0), false).await;
        let client = w.start().await;
        is_released(&client, 0).await;
        systemd.change(&unit(1), false).await;
        is_released(&client, 1).await;
    });
}

#[test]
fn units_are_read_again_when_signals_were_missed() {
    world(async |w| {
        let (bus, systemd, client) = beside(w, 5).await;
        for n in 0..5 {
            claim_bound(&client, n, Duration::ZERO).await;
        }
        systemd.has_subscriber().await;
        // systemd is executed again; what changes meanwhile has no signal.
        let systemd = systemd.reconnect(&bus, |systemd| systemd.set(&unit(0), false)).await;
        is_released(&client, 0).await;
        systemd.has_subscriber().await;
        systemd.change(&unit(1), false).await;
        is_released(&client, 1).await;
        // It reads its definitions again: a name may mean another unit.
        systemd.set(&unit(2), false);
        systemd.reloaded().await;
        is_released(&client, 2).await;
        // The bus is restarted.
        drop(bus);
        let bus = Bus::start(w, Policy::Everything).await;
        let systemd = systemd.reconnect(&bus, |systemd| systemd.set(&unit(3), false)).await;
        is_released(&client, 3).await;
        systemd.has_subscriber().await;
        systemd.change(&unit(4), false).await;
        is_released(&client, 4).await;
    });
}

#[test]
fn unit_back_within_grace_time_keeps_its_claim() {
    world(async |w| {
        let (_bus, systemd, client) = beside(w, 3).await;
        claim_bound(&client, 0, Duration::from_secs(3_600)).await;
        claim_bound(&client, 1, Duration::from_secs(2)).await;
        systemd.has_subscriber().await;
        for n in [0, 1] {
            systemd.change(&unit(n), false).await;
        }
        systemd.change(&unit(0), true).await;
        is_released(&client, 1).await;
        // That the first ended is not what releases it: now it ends for longer than its time.
        assert_eq!(claims(&client).await.len(), 1);
        systemd.change(&unit(0), false).await;
        claim_bound(&client, 2, Duration::ZERO).await;
        systemd.change(&unit(2), false).await;
        is_released(&client, 2).await;
        assert_eq!(claims(&client).await.len(), 1);
    });
}

#[test]
fn unit_that_never_runs_has_its_grace_time() {
    world(async |w| {
        let (_bus, systemd, client) = beside(w, 1).await;
        systemd.set(&unit(0), false);
        let refused = refusal(client.claim(NAMESPACE, "v0", "job", bound(0, Duration::ZERO)).await).0;
        assert_eq!(refused, Kind::NotFound);
        systemd.count_anew();
        claim_bound(&client, 0, Duration::from_secs(2)).await;
        is_released(&client, 0).await;
        // systemd loads a unit to answer, and unloads it: these signals are no reason to ask again.
        let (calls, _) = systemd.asked();
        assert!(calls <= 5, "{calls} calls to PID 1");
    });
}
