//! A creation or deletion that does not end: it is gone at once where the plugin was never asked, DeleteVolume takes it over where
//! it was, and what is given up does not come back.

use std::time::Duration;

use csid_client::{CreateVolume, DeregisterOptions, Kind, VolumeOptions, VolumeRow};
use csid_tests::ask::NAMESPACE;
use csid_tests::clustered::{self, alone};
use csid_tests::script::{Act, CONTROLLER, Rule};
use csid_tests::world::{count, eventually, refusal, world};
use tokio::task::JoinHandle;

use crate::site::{GIVEN_UP, SECRETS, Site, creating, options, spec, within};

/// Why tests are skipped on a node of a cluster.
const GOES_ON: &str = "servers go on with a creation whose caller is gone";

const SHORT: Duration = Duration::from_millis(300);

/// Starts a CreateVolume of `volume` in a task of its own. Its name at the plugin is the volume's.
fn create(s: &Site<'_>, volume: &'static str) -> JoinHandle<csid_client::Result<VolumeRow>> {
    let client = s.client.clone();
    let spec = CreateVolume { operation_id: Some(volume.to_owned()), ..spec() };
    tokio::spawn(async move { client.create_volume(NAMESPACE, volume, spec).await })
}

async fn deregister(s: &Site<'_>, volume: &str, options: DeregisterOptions) -> csid_client::Result<()> {
    s.client.deregister_volume(NAMESPACE, volume, options).await
}

fn by_force() -> DeregisterOptions {
    DeregisterOptions { force: Some(true), ..DeregisterOptions::default() }
}

fn forget() -> DeregisterOptions {
    DeregisterOptions { forget: Some(true), ..DeregisterOptions::default() }
}

/// The plugin is away, and csid has not seen it since its start.
async fn away(s: &mut Site<'_>) {
    s.w.plugin("p").kill();
    s.restart().await;
}

async fn back(s: &mut Site<'_>) {
    s.w.plugin("p").honest();
    s.w.plugin("p").start().await;
    s.is_ready().await;
}

async fn no_row(s: &Site<'_>) {
    eventually("no row", async || s.volumes().await.is_empty()).await;
}

/// Waits until csid has no operation.
async fn quiet(s: &Site<'_>) {
    eventually("no operation", async || s.client.list_operations().await.unwrap().is_empty()).await;
}

#[test]
fn create_never_sent_ends_with_its_caller() {
    alone(GOES_ON, async |w| {
        let mut s = creating(w).await;
        away(&mut s).await;
        let cancelled = create(&s, "a");
        eventually("it is entered", async || s.volumes().await.len() == 1).await;
        s.client.cancel_operation("a").await.unwrap();
        assert_eq!(refusal(cancelled.await.unwrap()).0, Kind::Cancelled);
        no_row(&s).await;
        assert_eq!(s.refused("b", within(SHORT, spec())).await.0, Kind::TimedOut);
        no_row(&s).await;
        quiet(&s).await;
        back(&mut s).await;
        assert_eq!(s.w.plugin("p").count("CreateVolume", ""), 0);
        s.create("a", spec()).await.expect("the name is free");
        s.delete("a", options()).await.unwrap();
        s.nothing_left().await;
    });
}

#[test]
fn create_never_sent_ends_by_delete_or_deregister() {
    alone(GOES_ON, async |w| {
        let mut s = creating(w).await;
        away(&mut s).await;
        for round in 0..3 {
            let waits = create(&s, "a");
            eventually("it is entered", async || s.volumes().await.len() == 1).await;
            let ends = async {
                match round {
                    0 => s.delete("a", options()).await,
                    1 => deregister(&s, "a", DeregisterOptions::default()).await,
                    _ => deregister(&s, "a", forget()).await,
                }
            };
            let ended = tokio::time::timeout(Duration::from_secs(10), ends).await;
            ended.expect("at once").unwrap();
            assert!(s.volumes().await.is_empty(), "{round}");
            assert_eq!(refusal(waits.await.unwrap()).0, Kind::Cancelled, "{round}");
        }
        quiet(&s).await;
        back(&mut s).await;
        assert_eq!(s.w.plugin("p").count("CreateVolume", ""), 0);
        s.nothing_left().await;
    });
}

/// csid waits for systemd to load the volume's credential, and systemd does not answer.
#[test]
fn create_without_its_credential_ends_with_caller() {
    alone(GOES_ON, async |w| {
        // A bus that takes every connection and says nothing.
        let path = w.path("silent-bus");
        let _silent = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let address = format!("unix:path={}", path.display());
        w.environment.insert("DBUS_SYSTEM_BUS_ADDRESS".to_owned(), address);
        let s = creating(w).await;
        let credential = Some("csid.default.a".to_owned());
        let (kind, text) = s.refused("a", within(SHORT, CreateVolume { credential, ..spec() })).await;
        assert_eq!(kind, Kind::TimedOut, "{text}");
        quiet(&s).await;
        no_row(&s).await;
        assert_eq!(s.w.plugin("p").count("CreateVolume", ""), 0);
        s.nothing_left().await;
    });
}

/// csid is killed while it waits for the plugin, and no caller repeats the call.
#[test]
fn create_never_sent_does_not_outlive_csid() {
    alone(GOES_ON, async |w| {
        let mut s = creating(w).await;
        away(&mut s).await;
        let waits = create(&s, "a");
        eventually("it is entered", async || s.volumes().await.len() == 1).await;
        waits.abort();
        s.restart().await;
        no_row(&s).await;
        back(&mut s).await;
        quiet(&s).await;
        assert_eq!(s.w.plugin("p").count("CreateVolume", ""), 0);
        s.nothing_left().await;
    });
}

#[test]
fn delete_takes_over_a_create_that_is_waited_for() {
    world(async |w| {
        let mut s = creating(w).await;
        s.rules([Rule::always("CreateVolume", Act::FailAfter(13))]);
        let waits = create(&s, "a");
        eventually("p has answered", async || s.waits_for_failed("a", "INTERNAL").await).await;
        let soon = VolumeOptions { deadline_usec: Some(2_000_000), ..options() };
        assert_eq!(refusal(s.delete("a", soon).await).0, Kind::TimedOut);
        let stopped = tokio::time::timeout(Duration::from_secs(10), waits).await.expect("at once");
        let due = if clustered::is_used() { Kind::Busy } else { Kind::Cancelled };
        assert_eq!(refusal(stopped.unwrap()).0, due);
        // What was asked to go is not given to who asks for it meanwhile.
        assert_eq!(s.refused("a", spec()).await.0, Kind::Busy);
        // Nobody asks again, and csid is another one.
        s.restart().await;
        s.w.plugin("p").honest();
        no_row(&s).await;
        quiet(&s).await;
        s.nothing_left().await;
    });
}

#[test]
fn volume_found_by_a_refused_delete_is_registered() {
    world(async |w| {
        let mut s = creating(w).await;
        s.rules([Rule::always("CreateVolume", Act::FailAfter(13))]);
        assert_eq!(s.refused("a", within(SHORT, spec())).await.0, Kind::TimedOut);
        let soon = VolumeOptions { deadline_usec: Some(300_000), ..options() };
        assert_eq!(refusal(s.delete("a", soon).await).0, Kind::TimedOut);
        s.rules([Rule::always("DeleteVolume", Act::Fail(9))]);
        assert_eq!(refusal(s.delete("a", options()).await).0, Kind::PluginError);
        let external_id = s.external_id("a").await;
        assert!(external_id.starts_with("id-"), "{external_id}");
        s.w.plugin("p").honest();
        s.delete("a", options()).await.unwrap();
        s.nothing_left().await;
    });
}

#[test]
fn delete_without_its_credential_deletes_nothing() {
    alone(SECRETS, async |w| {
        let mut s = creating(w).await;
        s.rules([Rule::always("CreateVolume", Act::FailAfter(13))]);
        assert_eq!(s.refused("a", within(SHORT, spec())).await.0, Kind::TimedOut);
        let mistyped = VolumeOptions { credential: Some("none".to_owned()), ..options() };
        assert_eq!(refusal(s.delete("a", mistyped).await).0, Kind::SecretRequired);
        s.w.plugin("p").honest();
        s.create("a", spec()).await.expect("the creation goes on");
        quiet(&s).await;
        assert_eq!(s.w.plugin("p").count("DeleteVolume", ""), 0);
        s.delete("a", options()).await.unwrap();
        s.nothing_left().await;
    });
}

/// The plugin refuses the CreateVolume that the deletion waits for.
#[test]
fn delete_after_a_refused_create_creates_nothing() {
    alone(GOES_ON, async |w| {
        let plugin = w.add_plugin("p").await;
        plugin.set(|script| script.control(&CONTROLLER));
        let mut s = Site::start(w).await;
        s.is_ready().await;
        s.rules([Rule::once("CreateVolume", Act::FailLater(2_000, 9))]);
        let waits = create(&s, "a");
        eventually("p is asked", async || s.w.plugin("p").count("CreateVolume", "") == 1).await;
        let deletes = {
            let client = s.client.clone();
            tokio::spawn(async move { client.delete_volume(NAMESPACE, "a", options()).await })
        };
        assert_eq!(refusal(waits.await.unwrap()).0, Kind::Cancelled);
        deletes.await.unwrap().expect("there is no such volume");
        assert_eq!(s.w.plugin("p").count("CreateVolume", ""), 1);
        s.nothing_left().await;
    });
}

/// Codes after which no volume was made: UNKNOWN, RESOURCE_EXHAUSTED, INTERNAL, UNAVAILABLE.
#[test]
fn create_that_was_given_up_does_not_come_back() {
    alone(GIVEN_UP, async |w| {
        let mut s = creating(w).await;
        for (round, code) in [2, 8, 13, 14].into_iter().enumerate() {
            s.rules([Rule::always("CreateVolume", Act::Fail(code))]);
            let asked = s.w.plugin("p").count("CreateVolume", "");
            let waits = create(&s, "a");
            eventually("p is asked", async || s.w.plugin("p").count("CreateVolume", "") > asked).await;
            if round % 2 == 0 {
                s.w.plugin("p").kill();
            }
            let options = if round < 2 { by_force() } else { forget() };
            let given_up = tokio::time::timeout(Duration::from_secs(10), deregister(&s, "a", options)).await;
            given_up.expect("at once").unwrap();
            assert!(s.volumes().await.is_empty(), "{code}");
            assert_eq!(refusal(waits.await.unwrap()).0, Kind::Cancelled, "{code}");
            quiet(&s).await;
            let asked = s.w.plugin("p").count("CreateVolume", "");
            match round % 2 {
                0 => back(&mut s).await,
                _ => s.w.plugin("p").honest(),
            }
            s.restart().await;
            s.is_ready().await;
            quiet(&s).await;
            assert_eq!(s.w.plugin("p").count("CreateVolume", ""), asked, "{code}: since it was given up");
            assert!(s.volumes().await.is_empty(), "{code}");
        }
        s.nothing_left().await;
    });
}

/// The plugin hangs with the call, and makes the volume after all.
#[test]
fn late_answer_of_a_forgotten_create_is_ignored() {
    alone(GIVEN_UP, async |w| {
        let mut s = creating(w).await;
        s.rules([Rule::always("CreateVolume", Act::Stubborn(2_000))]);
        let waits = create(&s, "a");
        eventually("p is asked", async || s.w.plugin("p").count("CreateVolume", "") > 0).await;
        deregister(&s, "a", forget()).await.unwrap();
        assert_eq!(refusal(waits.await.unwrap()).0, Kind::Cancelled);
        eventually("p makes it", async || !s.w.plugin("p").backend().made().unwrap().is_empty()).await;
        quiet(&s).await;
        assert!(s.volumes().await.is_empty());
        s.restart().await;
        s.is_ready().await;
        assert!(s.volumes().await.is_empty());
        let made = s.w.plugin("p").backend().made().unwrap().pop().unwrap().replace("volume ", "");
        let inline = VolumeOptions { plugin: Some("p".to_owned()), external_id: Some(made), ..options() };
        s.w.plugin("p").honest();
        s.delete("x", inline).await.unwrap();
        s.nothing_left().await;
    });
}

#[test]
fn deletion_that_was_given_up_does_not_come_back() {
    alone(GIVEN_UP, async |w| {
        let mut s = creating(w).await;
        for options_of in [by_force, forget] {
            let row = s.create("a", spec()).await.unwrap();
            s.rules([Rule::always("DeleteVolume", Act::Fail(13))]);
            let asked = s.w.plugin("p").count("DeleteVolume", "");
            let waits = {
                let client = s.client.clone();
                tokio::spawn(async move { client.delete_volume(NAMESPACE, "a", options()).await })
            };
            eventually("p is asked", async || s.w.plugin("p").count("DeleteVolume", "") > asked).await;
            assert_eq!(
                refusal(deregister(&s, "a", DeregisterOptions::default()).await).0,
                Kind::Busy,
                "not without a word"
            );
            let given_up =
                tokio::time::timeout(Duration::from_secs(10), deregister(&s, "a", options_of())).await;
            given_up.expect("at once").unwrap();
            assert_eq!(refusal(waits.await.unwrap()).0, Kind::Cancelled);
            quiet(&s).await;
            let asked = s.w.plugin("p").count("DeleteVolume", "");
            s.w.plugin("p").honest();
            s.restart().await;
            s.is_ready().await;
            quiet(&s).await;
            assert_eq!(s.w.plugin("p").count("DeleteVolume", ""), asked, "since it was given up");
            let inline = VolumeOptions {
                plugin: Some("p".to_owned()),
                external_id: Some(row.external_id),
                ..options()
            };
            s.delete("x", inline).await.unwrap();
        }
        s.nothing_left().await;
    });
}

/// Kills csid at each edge that a given-up creation passes.
#[test]
fn killed_while_it_gives_up_csid_brings_nothing_back() {
    alone(GIVEN_UP, async |w| {
        let mut s = creating(w).await;
        let mut kills = 0;
        for edge in 1.. {
            s.rules([Rule::always("CreateVolume", Act::Fail(13))]);
            assert_eq!(s.refused("a", within(SHORT, spec())).await.0, Kind::TimedOut);
            s.w.plugin("p").kill();
            s.restart().await;
            eventually("it is known", async || s.volumes().await.len() == 1).await;
            let armed = format!("any:{edge}");
            s.fault.arm(&armed);
            let given_up = deregister(&s, "a", forget()).await.is_ok();
            // csid may die after its answer, too, or just before this kills it.
            if !given_up {
                s.died().await;
            } else if !s.w.dead() {
                s.w.kill();
            }
            let is_killed = s.fault.disarm() != armed;
            s.restart().await;
            kills += usize::from(is_killed);
            if !given_up {
                deregister(&s, "a", forget()).await.unwrap();
            }
            assert!(s.volumes().await.is_empty());
            let asked = s.w.plugin("p").count("CreateVolume", "");
            back(&mut s).await;
            quiet(&s).await;
            assert_eq!(s.w.plugin("p").count("CreateVolume", ""), asked, "since it was given up");
            assert!(s.volumes().await.is_empty());
            if !is_killed {
                break;
            }
        }
        count("kills around what is given up", kills);
        assert!(kills >= 2, "{kills}");
        s.nothing_left().await;
    });
}
