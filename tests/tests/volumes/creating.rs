//! CreateVolume and DeleteVolume: whatever dies, no volume is made that no row knows (CSI rule 39), and what is to go goes.

use std::collections::BTreeMap;
use std::time::Duration;

use csid_client::{
    AccessMode, AttachOptions, CallOptions, CreateVolume, DeregisterOptions, DetachOptions, Kind,
    MountOptions, VolumeOptions,
};
use csid_tests::ask::{NAMESPACE, capabilities, cursor, event, healthy, secrets, unmount};
use csid_tests::clustered::{self, alone};
use csid_tests::on_etcd;
use csid_tests::script::{Act, CONTROLLER, Rule};
use csid_tests::world::{count, eventually, refusal, world};

use crate::site::{
    GIVEN_UP, OPERATIONS, PASSWORD, SECRETS, Site, creating, options, spec, with_secrets, within,
};

/// Why tests are skipped on a node of a cluster.
const NAMES: &str = "servers name a volume at the plugin";

const SHORT: Duration = Duration::from_millis(300);

#[test]
fn created_volume_is_used_and_deleted() {
    world(async |w| {
        let mut s = creating(w).await;
        let row = s.create("a", spec()).await.unwrap();
        assert_eq!((row.id.as_str(), row.capacity), ("a", 1 << 20));
        assert_eq!(row.external_id, format!("id-{}", row.name), "the plugin names it by csid's name");
        // Servers say a volume's context to the nodes that have claimed it.
        assert!(row.context.contains_key("born") || clustered::is_used(), "{:?}", row.context);
        assert_eq!(s.create("a", spec()).await.unwrap().external_id, row.external_id, "the same again");
        let other = CreateVolume { fs_type: Some("xfs".to_owned()), ..spec() };
        assert_eq!(s.refused("a", other).await.0, Kind::AlreadyExists);
        let larger = CreateVolume { capacity_min: Some(1 << 30), ..spec() };
        assert_eq!(s.refused("a", larger).await.0, Kind::AlreadyExists);

        // At once: nothing of its making is in the way of its first use.
        let clone = CreateVolume { clone: Some("a".to_owned()), ..spec() };
        let twin = s.create("b", clone).await.unwrap();
        s.client.mount(NAMESPACE, "b", "job", MountOptions::default()).await.unwrap();
        assert_eq!(refusal(s.delete("b", options()).await).0, Kind::Busy);
        unmount(&s.client, "b", "job").await.unwrap();
        s.has(&[&row.external_id, &twin.external_id]).await;
        s.delete("a", options()).await.unwrap();
        s.delete("a", options()).await.expect("what is not there is deleted");
        s.delete("b", options()).await.unwrap();
        assert_eq!(s.w.plugin("p").count("CreateVolume", ""), 2);
        s.nothing_left().await;
    });
}

/// csid neither uses nor deletes such a volume by itself, and the same call has the same answer.
#[test]
fn volume_over_its_limit_is_kept_unregistered() {
    world(async |w| {
        let s = creating(w).await;
        s.w.plugin("p").set(|script| script.least = 2 << 20);
        let limited = || CreateVolume { capacity_max: Some(1 << 20), ..spec() };
        let (kind, first) = s.refused("a", limited()).await;
        assert!(kind == Kind::PluginError && first.contains("2097152 bytes"), "{first}");
        assert_eq!(s.refused("a", limited()).await, (kind, first));
        assert_eq!(s.w.plugin("p").count("CreateVolume", ""), 1);
        let mount = s.client.mount(NAMESPACE, "a", "job", MountOptions::default()).await;
        // Servers show a host no volume that they are creating.
        let kind = if clustered::is_used() { Kind::NotFound } else { Kind::Busy };
        assert_eq!(refusal(mount).0, kind);
        s.delete("a", options()).await.unwrap();
        assert_eq!(s.w.plugin("p").count("DeleteVolume", ""), 1);
        s.nothing_left().await;
    });
}

#[test]
fn refused_create_leaves_no_row() {
    world(async |w| {
        let mut s = creating(w).await;
        for code in [3, 5, 6, 9, 11, 16] {
            s.rules([Rule::always("CreateVolume", Act::Fail(code))]);
            let (kind, text) = s.refused(&format!("v{code}"), spec()).await;
            assert_eq!(kind, Kind::PluginError, "{code}: {text}");
            assert!(s.volumes().await.is_empty(), "{code}: {text}");
        }
        assert_eq!(s.w.plugin("p").count("CreateVolume", ""), 6, "none was repeated");
        s.w.plugin("p").honest();
        // Servers know the plugins that their grants name.
        let unknown = if clustered::is_used() { Kind::NotSupported } else { Kind::NotFound };
        for (spec, kind) in [
            (CreateVolume { clone: Some("none".to_owned()), ..spec() }, Kind::NotFound),
            (CreateVolume { plugin: Some("none".to_owned()), ..spec() }, unknown),
            (CreateVolume { snapshot: Some("none".to_owned()), ..spec() }, Kind::PluginError),
        ] {
            assert_eq!(s.refused("a", spec).await.0, kind);
            assert!(s.volumes().await.is_empty());
        }
        s.nothing_left().await;
    });
}

/// Two volumes of csid have one name at the plugin. csid refuses the second, and the first keeps everything.
#[test]
fn plugin_name_belongs_to_one_volume() {
    alone(NAMES, async |w| {
        let mut s = creating(w).await;
        let named = || CreateVolume { name: Some("disk".to_owned()), ..spec() };
        s.create("a", named()).await.unwrap();
        let (kind, text) = s.refused("b", named()).await;
        assert!(kind == Kind::AlreadyExists && text.contains("default/a"), "{text}");
        s.has(&["id-disk"]).await;
        s.delete("a", options()).await.unwrap();
        s.nothing_left().await;
    });
}

/// csid looks at the source of a creation when the creation's turn comes, not when the caller asks.
#[test]
fn source_is_checked_at_the_create() {
    alone(NAMES, async |w| {
        let mut s = creating(w).await;
        s.create("a", spec()).await.unwrap();
        s.rules([Rule::once("CreateVolume", Act::DelayAfter(800))]);
        let named = || CreateVolume { name: Some("disk".to_owned()), ..spec() };
        let ask = |volume: &'static str, spec| {
            let client = s.client.clone();
            tokio::spawn(async move { client.create_volume(NAMESPACE, volume, spec).await })
        };
        let first = ask("b", named());
        eventually("the name is being made", async || s.w.plugin("p").count("CreateVolume", "disk") == 1)
            .await;
        let behind = ask("a", CreateVolume { clone: Some("nowhere".to_owned()), ..named() });
        eventually("the other waits for it", async || {
            let operations = s.client.list_operations().await.unwrap();
            operations.iter().any(|operation| operation.subject == "default/a")
        })
        .await;
        let made = s.volumes().await.into_iter().find(|row| row.id == "a").expect("a row").external_id;
        s.client.deregister_volume(NAMESPACE, "a", Default::default()).await.unwrap();
        let made_first = first.await.unwrap().unwrap();
        assert_eq!(refusal(behind.await.unwrap()).0, Kind::NotFound, "there is no such source");
        assert_eq!(s.w.plugin("p").count("CreateVolume", "disk"), 1, "nothing was made instead of a clone");
        assert_eq!(made_first.external_id, "id-disk");
        let inline = VolumeOptions { plugin: Some("p".to_owned()), external_id: Some(made), ..options() };
        s.delete("a", inline).await.unwrap();
        s.delete("b", options()).await.unwrap();
        s.nothing_left().await;
    });
}

#[test]
fn lost_create_answer_is_asked_for_by_name() {
    world(async |w| {
        let mut s = creating(w).await;
        s.rules([Rule::once("CreateVolume", Act::DelayAfter(1500))]);
        let row = s.create("late", spec()).await.expect("the second answer comes in time");
        s.has(&[&row.external_id]).await;
        assert_eq!(s.w.plugin("p").count("CreateVolume", &row.name), 2);

        s.rules([Rule::once("CreateVolume", Act::DieAfter)]);
        assert_eq!(s.refused("dead", within(SHORT, spec())).await.0, Kind::TimedOut);
        s.w.plugin("p").died().await;
        s.w.plugin("p").honest();
        s.w.plugin("p").start().await;
        let dead = s.create("dead", spec()).await.expect("it is waited for");
        s.has(&[&row.external_id, &dead.external_id]).await;
        s.delete("late", options()).await.unwrap();
        s.delete("dead", options()).await.unwrap();
        s.nothing_left().await;
    });
}

#[test]
fn unanswered_create_is_repeated_without_a_caller() {
    world(async |w| {
        let mut s = creating(w).await;
        s.rules([Rule::always("CreateVolume", Act::FailAfter(13))]);
        let (kind, text) = s.refused("a", within(SHORT, spec())).await;
        assert!(kind == Kind::TimedOut && text.contains("CreateVolume: INTERNAL"), "{text}");
        assert!(s.waits_for_failed("a", "CreateVolume: INTERNAL").await, "before the operation's end");
        let (kind, _) =
            s.refused("a", CreateVolume { fs_type: Some("xfs".to_owned()), ..within(SHORT, spec()) }).await;
        assert!([Kind::AlreadyExists, Kind::TimedOut].contains(&kind));
        s.restart().await;
        eventually("csid asks again", async || s.w.plugin("p").count("CreateVolume", "") > 3).await;
        assert_eq!(s.external_id("a").await, "", "it is known, and not there yet");
        eventually("it is explained", async || {
            let reply = s.client.explain(NAMESPACE, "a", CallOptions::default()).await.unwrap();
            let is_due = reply.next_try > 0 || clustered::is_used();
            reply.waiting_for.contains("CreateVolume") && is_due && s.waits_for_failed("a", "INTERNAL").await
        })
        .await;
        s.w.plugin("p").honest();
        eventually("it is there", async || s.external_id("a").await.starts_with("id-")).await;
        s.delete("a", options()).await.unwrap();
        s.nothing_left().await;
    });
}

#[test]
fn killed_around_a_creation_csid_finishes_it() {
    world(async |w| {
        let mut s = creating(w).await;
        for (round, edge) in ["CreateVolume.before:1", "CreateVolume.after:1"].into_iter().enumerate() {
            let volume = format!("v{round}");
            s.fault.arm(edge);
            s.create(&volume, spec()).await.expect_err("csid dies");
            s.died().await;
            s.restart().await;
            eventually("it is made", async || !s.external_id(&volume).await.is_empty()).await;
            let row = s.create(&volume, spec()).await.unwrap();
            s.has(&[&row.external_id]).await;
            s.delete(&volume, options()).await.unwrap();
        }
        s.nothing_left().await;
    });
}

/// Kills csid at each edge that a caller's request passes.
#[test]
fn killed_anywhere_csid_ends_as_its_caller_wants() {
    world(async |w| {
        let mut s = creating(w).await;
        let mut kills = 0;
        // Servers keep each volume that they create.
        let registered = if clustered::is_used() { vec![true] } else { vec![true, false] };
        for register in registered {
            for edge in 1.. {
                let spec = || CreateVolume { register: Some(register), ..spec() };
                let volume = format!("{register}-{edge}");
                s.fault.arm(&format!("any:{edge}"));
                let mut made = s.create(&volume, spec()).await.ok();
                let inline = |external_id: &str| match register {
                    true => options(),
                    false => VolumeOptions {
                        plugin: Some("p".to_owned()),
                        external_id: Some(external_id.to_owned()),
                        ..options()
                    },
                };
                let mut deleted = false;
                if let Some(row) = &made {
                    deleted = s.delete(&volume, inline(&row.external_id)).await.is_ok();
                }
                if made.is_some() && deleted {
                    break;
                }
                kills += 1;
                s.died().await;
                s.restart().await;
                s.is_ready().await;
                if made.is_none() {
                    made = s.create(&volume, spec()).await.ok();
                }
                let row = made.expect("a caller who asks again is answered");
                s.delete(&volume, inline(&row.external_id)).await.unwrap();
                s.has(&[]).await;
            }
        }
        count("kills around creations and deletions", kills);
        // A node of a cluster writes nothing of a creation.
        let least = if clustered::is_used() { 4 } else { 28 };
        assert!(kills >= least, "{kills}");
        s.fault.disarm();
        s.nothing_left().await;
    });
}

#[test]
fn unregistered_creates_row_stays_until_fetched() {
    alone("servers keep each volume that they create", async |w| {
        let mut s = creating(w).await;
        let unkept = || CreateVolume { register: Some(false), ..spec() };
        let row = s.create("a", unkept()).await.unwrap();
        assert!(row.external_id.starts_with("id-") && s.volumes().await.is_empty());
        assert_eq!(s.create("a", unkept()).await.unwrap().external_id, row.external_id);

        // The answer of this one is lost: it is kept until it is fetched.
        s.fault.arm("CreateVolume.after:1");
        s.create("b", unkept()).await.expect_err("csid dies");
        s.died().await;
        s.restart().await;
        eventually("it is made", async || !s.volumes().await[0].external_id.is_empty()).await;
        let kept = s.volumes().await.remove(0);
        assert_eq!(
            refusal(s.client.mount(NAMESPACE, "b", "job", MountOptions::default()).await).0,
            Kind::Busy
        );
        assert_eq!(s.create("b", unkept()).await.unwrap().external_id, kept.external_id);
        assert!(s.volumes().await.is_empty());

        for external_id in [row.external_id, kept.external_id] {
            let inline =
                VolumeOptions { plugin: Some("p".to_owned()), external_id: Some(external_id), ..options() };
            s.delete("x", inline).await.unwrap();
        }
        s.nothing_left().await;
    });
}

#[test]
fn secrets_that_are_needed_again_are_asked_for() {
    alone(SECRETS, async |w| {
        let mut s = creating(w).await;
        s.w.plugin("p").set(|script| script.secret = Some(("password".to_owned(), PASSWORD.to_owned())));
        let secret = || CreateVolume { secrets: Some(secrets(&[("password", PASSWORD)])), ..spec() };
        assert_eq!(s.refused("a", spec()).await.0, Kind::PluginError);
        assert!(s.volumes().await.is_empty(), "nothing was made");

        let before = cursor(&s.client).await;
        s.fault.arm("CreateVolume.after:1");
        s.create("a", secret()).await.expect_err("csid dies");
        s.died().await;
        s.restart().await;
        event(&s.client, before, &["secret-required"], "default/a").await;
        assert_eq!(s.w.plugin("p").count("CreateVolume", ""), 2, "it is not asked without them");
        let (kind, text) = s.refused("a", spec()).await;
        assert!(kind == Kind::SecretRequired && text.contains("CreateVolume"), "{text}");
        let row = s.create("a", secret()).await.unwrap();
        s.has(&[&row.external_id]).await;

        assert_eq!(refusal(s.delete("a", options()).await).0, Kind::PluginError);
        s.fault.arm("DeleteVolume.after:1");
        s.delete("a", with_secrets()).await.expect_err("csid dies");
        s.died().await;
        s.restart().await;
        assert_eq!(refusal(s.delete("a", options()).await).0, Kind::SecretRequired);
        s.delete("a", with_secrets()).await.unwrap();
        s.nothing_left().await;
    });
}

#[test]
fn killed_around_a_deletion_csid_finishes_it() {
    world(async |w| {
        let mut s = creating(w).await;
        for edge in ["DeleteVolume.before:1", "DeleteVolume.after:1"] {
            s.create("a", spec()).await.unwrap();
            s.fault.arm(edge);
            s.delete("a", options()).await.expect_err("csid dies");
            s.died().await;
            s.restart().await;
            eventually("it is gone", async || s.volumes().await.is_empty()).await;
            s.delete("a", options()).await.unwrap();
            s.has(&[]).await;
        }
        s.nothing_left().await;
    });
}

#[test]
fn refused_delete_changes_nothing() {
    world(async |w| {
        let mut s = creating(w).await;
        let row = s.create("a", spec()).await.unwrap();
        s.rules([Rule::always("DeleteVolume", Act::Fail(9))]);
        assert_eq!(refusal(s.delete("a", options()).await).0, Kind::PluginError);
        s.has(&[&row.external_id]).await;
        s.w.plugin("p").honest();
        s.client.mount(NAMESPACE, "a", "job", MountOptions::default()).await.expect("it is as it was");
        unmount(&s.client, "a", "job").await.unwrap();
        s.delete("a", options()).await.unwrap();
        s.nothing_left().await;
    });
}

/// CSI rule 39: csid cannot delete a volume that may have been made before it knows the volume's id.
#[test]
fn delete_during_create_runs_after_it() {
    world(async |w| {
        let mut s = creating(w).await;
        s.rules([Rule::once("CreateVolume", Act::DieAfter)]);
        assert_eq!(s.refused("a", within(SHORT, spec())).await.0, Kind::TimedOut);
        s.w.plugin("p").died().await;
        s.w.plugin("p").honest();
        s.w.plugin("p").start().await;
        s.delete("a", options()).await.unwrap();
        s.nothing_left().await;
    });
}

/// A plugin cannot be asked about a volume whose id it has not answered.
#[test]
fn detach_during_create_calls_no_plugin() {
    world(async |w| {
        let mut s = creating(w).await;
        s.rules([Rule::always("CreateVolume", Act::FailAfter(13))]);
        assert_eq!(s.refused("a", within(SHORT, spec())).await.0, Kind::TimedOut);
        let detached = s.client.detach_volume(NAMESPACE, "a", "node-2", Default::default()).await;
        match clustered::is_used() {
            true => detached.expect("servers have attached nothing"),
            false => {
                let (kind, error) = refusal(detached);
                assert!(
                    kind == Kind::Busy && error.message.contains("is being created"),
                    "{kind:?} {error:?}"
                );
            }
        }
        assert_eq!(s.w.plugin("p").count("ControllerUnpublishVolume", ""), 0);
        s.w.plugin("p").honest();
        s.delete("a", options()).await.unwrap();
        s.nothing_left().await;
    });
}

/// Adds another plugin that creates volumes.
async fn with_another(s: &mut Site<'_>) {
    let plugin = s.w.add_plugin("q").await;
    plugin.set(|script| script.control(&CONTROLLER));
    plugin.kill();
    plugin.start().await;
    s.restart().await;
    s.is_ready().await;
    healthy(&s.client, "q").await;
}

fn of_q() -> CreateVolume {
    CreateVolume { plugin: Some("q".to_owned()), ..spec() }
}

async fn forget(s: &Site<'_>, volume: &str) {
    let force = DeregisterOptions { force: Some(true), ..DeregisterOptions::default() };
    s.client.deregister_volume(NAMESPACE, volume, force).await.expect("it is forgotten");
}

async fn is_made(s: &Site<'_>, volume: &str) -> bool {
    s.volumes().await.iter().any(|row| row.id == volume && !row.external_id.is_empty())
}

/// A creation that was forgotten by force has no say in another plugin's volume that has its name since.
#[test]
fn forgotten_create_is_not_a_volume_elsewhere() {
    if on_etcd::is_skipped("a second record under one name at the plugin is refused there") {
        return;
    }
    alone(GIVEN_UP, async |w| {
        let mut s = creating(w).await;
        with_another(&mut s).await;
        // It comes late.
        s.rules([Rule::once("CreateVolume", Act::DelayAfter(900))]);
        let late = {
            let client = s.client.clone();
            tokio::spawn(async move { client.create_volume(NAMESPACE, "a", spec()).await })
        };
        eventually("p is asked", async || s.w.plugin("p").count("CreateVolume", "") == 1).await;
        forget(&s, "a").await;
        s.w.plugin("q").rules([Rule::always("CreateVolume", Act::Fail(13))]);
        assert_eq!(s.refused("a", within(SHORT, of_q())).await.0, Kind::TimedOut);
        assert_eq!(refusal(late.await.unwrap()).0, Kind::Cancelled);
        let row = s.volumes().await.remove(0);
        assert_eq!((row.plugin.as_str(), row.external_id.as_str()), ("q", ""));
        s.w.plugin("q").honest();
        let made = s.create("a", of_q()).await.expect("q's answer");
        assert_eq!(made.plugin, "q");
        s.delete("a", options()).await.unwrap();

        // It is refused.
        let internal = || [Rule::always("CreateVolume", Act::Fail(13))];
        s.rules(internal());
        assert_eq!(s.refused("b", within(SHORT, spec())).await.0, Kind::TimedOut);
        forget(&s, "b").await;
        s.w.plugin("q").rules(internal());
        assert_eq!(s.refused("b", within(SHORT, of_q())).await.0, Kind::TimedOut);
        s.rules([Rule::always("CreateVolume", Act::Fail(3))]);
        let is_over = async || {
            let operations = s.client.list_operations().await.unwrap();
            operations.iter().filter(|of| of.subject == format!("{NAMESPACE}/b")).count() <= 1
        };
        eventually("p's is at its end", is_over).await;
        s.w.plugin("q").honest();
        assert_eq!(s.create("b", of_q()).await.expect("q's answer").plugin, "q");
        s.delete("b", options()).await.unwrap();

        // It is to be asked for again when another one of p's name has come to its end.
        let named = || CreateVolume { name: Some("disk".to_owned()), ..within(SHORT, spec()) };
        s.rules(internal());
        s.w.plugin("q").rules(internal());
        assert_eq!(s.refused("c", named()).await.0, Kind::TimedOut);
        assert_eq!(s.refused("d", named()).await.0, Kind::TimedOut);
        forget(&s, "c").await;
        assert_eq!(s.refused("c", within(SHORT, of_q())).await.0, Kind::TimedOut);
        s.w.plugin("p").honest();
        eventually("d is made", async || is_made(&s, "d").await).await;
        s.w.plugin("q").honest();
        eventually("c is made", async || is_made(&s, "c").await).await;
        assert_eq!(s.create("c", of_q()).await.expect("q's answer").plugin, "q");
        s.delete("c", options()).await.unwrap();
        s.delete("d", options()).await.unwrap();
        let inline = VolumeOptions {
            plugin: Some("p".to_owned()),
            external_id: s.w.plugin("p").backend().made().unwrap().pop().map(|it| it.replace("volume ", "")),
            ..options()
        };
        s.delete("x", inline).await.unwrap();
        s.nothing_left().await;
    });
}

#[test]
fn cancelled_create_is_completed_and_deleted() {
    alone(OPERATIONS, async |w| {
        let mut s = creating(w).await;
        s.rules([Rule::always("CreateVolume", Act::FailAfter(13))]);
        let waits = {
            let client = s.client.clone();
            let named = CreateVolume { operation_id: Some("mine".to_owned()), ..spec() };
            tokio::spawn(async move { client.create_volume(NAMESPACE, "a", named).await })
        };
        eventually("p has answered", async || {
            let reply = s.client.explain(NAMESPACE, "a", CallOptions::default()).await;
            reply.is_ok_and(|reply| reply.last_error.contains("INTERNAL"))
        })
        .await;
        s.client.cancel_operation("mine").await.unwrap();
        assert_eq!(refusal(waits.await.unwrap()).0, Kind::Cancelled);
        s.w.plugin("p").honest();
        s.delete("a", options()).await.expect("it is created, and then deleted");
        s.nothing_left().await;
    });
}

/// Root forgets a creation by force. An attachment under its name stays as it is.
#[test]
fn forgotten_create_is_not_an_attached_volume() {
    alone(GIVEN_UP, async |w| {
        let mut s = creating(w).await;
        s.w.plugin("p").provision("x");
        s.rules([Rule::once("CreateVolume", Act::DelayAfter(900))]);
        let late = {
            let client = s.client.clone();
            tokio::spawn(async move { client.create_volume(NAMESPACE, "a", spec()).await })
        };
        eventually("p is asked", async || s.w.plugin("p").count("CreateVolume", "") == 1).await;
        forget(&s, "a").await;
        let inline = AttachOptions {
            plugin: Some("p".to_owned()),
            external_id: Some("x".to_owned()),
            capabilities: Some(capabilities(&[AccessMode::SingleNodeWriter])),
            ..AttachOptions::default()
        };
        s.client.attach_volume(NAMESPACE, "a", "node-2", inline).await.unwrap();
        assert_eq!(refusal(late.await.unwrap()).0, Kind::Cancelled);
        let late = |s: &mut Site<'_>| {
            let made = s.w.plugin("p").backend().made().unwrap();
            made.into_iter()
                .find_map(|it| it.strip_prefix("volume ").filter(|id| *id != "x").map(str::to_owned))
        };
        eventually("p makes it", async || late(&mut s).is_some()).await;
        let of = |id: &str| VolumeOptions {
            plugin: Some("p".to_owned()),
            external_id: Some(id.to_owned()),
            ..options()
        };
        let VolumeOptions { plugin, external_id, .. } = of("x");
        let late_one = DetachOptions { plugin, external_id, ..DetachOptions::default() };
        s.client.detach_volume(NAMESPACE, "a", "node-2", late_one).await.unwrap();
        assert_eq!(s.w.plugin("p").count("ControllerUnpublishVolume", "x"), 1);
        let made = late(&mut s).expect("the late one");
        s.delete("y", of(&made)).await.unwrap();
        s.nothing_left().await;
    });
}

/// A create during the delete of the same volume is not answered with it.
#[test]
fn volume_created_for_deletion_is_not_returned() {
    alone(OPERATIONS, async |w| {
        let mut s = creating(w).await;
        s.rules([Rule::always("CreateVolume", Act::FailAfter(13))]);
        assert_eq!(s.refused("a", within(SHORT, spec())).await.0, Kind::TimedOut);
        let deletes = {
            let client = s.client.clone();
            tokio::spawn(async move { client.delete_volume(NAMESPACE, "a", options()).await })
        };
        eventually("it is being deleted", async || {
            s.client.list_operations().await.unwrap().iter().any(|operation| operation.kind == "delete")
        })
        .await;
        let at_once = tokio::time::timeout(Duration::from_secs(5), s.refused("a", spec()));
        let (kind, text) = at_once.await.expect("at once");
        assert!(kind == Kind::Busy && text.contains("deleted"), "{text}");
        s.w.plugin("p").honest();
        deletes.await.unwrap().expect("it is created, and then deleted");
        s.nothing_left().await;
    });
}

/// A plugin that is asked for the same name at another place answers ALREADY_EXISTS.
#[test]
fn creation_requires_the_place_where_the_node_was() {
    alone("servers create a volume where its caller says", async |w| {
        let mut s = creating(w).await;
        let at = |zone: &str| BTreeMap::from([("zone".to_owned(), zone.to_owned())]);
        s.w.plugin("p").set(|script| {
            script.plugin.push("VOLUME_ACCESSIBILITY_CONSTRAINTS".to_owned());
            script.wants_places = true;
            script.topology = at("a");
        });
        s.w.plugin("p").kill();
        s.w.plugin("p").start().await;
        s.restart().await;
        s.is_ready().await;
        s.rules([Rule::always("CreateVolume", Act::FailAfter(13))]);
        let (kind, text) = s.refused("v", within(SHORT, spec())).await;
        assert!(kind == Kind::TimedOut && text.contains("INTERNAL"), "{kind:?}: {text}");

        s.w.plugin("p").honest();
        s.w.plugin("p").set(|script| script.topology = at("b"));
        s.w.plugin("p").kill();
        s.w.plugin("p").start().await;
        s.restart().await;
        s.is_ready().await;
        eventually("it is made", async || !s.volumes().await[0].external_id.is_empty()).await;
        assert_eq!(s.create("v", spec()).await.unwrap().topologies, [at("a")]);
        assert_eq!(s.create("w", spec()).await.unwrap().topologies, [at("b")]);
        for volume in ["v", "w"] {
            s.delete(volume, options()).await.unwrap();
        }
        s.nothing_left().await;
    });
}
