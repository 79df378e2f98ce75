//! ExpandVolume where a volume that somebody has cannot be expanded (CSI rule 26).

use std::time::Duration;

use csid_client::{
    AccessMode, AttachOptions, ClaimOptions, CreateVolume, ExpandOptions, Expanded, Kind, MountOptions,
    ReleaseOptions,
};
use csid_tests::ask::{NAMESPACE, capabilities, state, unmount};
use csid_tests::clustered::{self, alone};
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, eventually, refusal, world};

use crate::site::{Site, creating, expands_offline, options, spec};

/// Why tests are skipped on a node of a cluster.
const OFFLINE: &str = "servers refuse an offline expansion of a volume in use at once";

const LARGE: u64 = 8 << 20;

#[test]
fn co_rule_26_offline_expansion_waits_for_the_unmount() {
    world(async |w| {
        let mut s = creating(w).await;
        expands_offline(&mut s).await;
        s.create("a", spec()).await.unwrap();
        s.client.mount(NAMESPACE, "a", "job", MountOptions::default()).await.unwrap();

        let soon = ExpandOptions { deadline_usec: Some(300_000), ..ExpandOptions::default() };
        let (kind, error) = refusal(s.client.expand_volume(NAMESPACE, "a", LARGE, 0, soon).await);
        assert_eq!(s.w.plugin("p").count("ControllerExpandVolume", ""), 0);
        if clustered::is_used() {
            // Servers do not wait for the unmount.
            assert!(kind == Kind::Busy && error.message.contains("OFFLINE"), "{error}");
            unmount(&s.client, "a", "job").await.unwrap();
            eventually("it is expanded when nobody has it", async || {
                expand(&s, LARGE).await.unwrap().is_ok_and(|expanded| expanded.capacity_bytes == LARGE)
            })
            .await;
            assert_eq!(s.w.plugin("p").count("ControllerExpandVolume", ""), 1);
            return end(s).await;
        }
        assert!(kind == Kind::TimedOut && error.message.contains("in use"), "{error}");

        let client = s.client.clone();
        let asked = tokio::spawn(async move {
            client.expand_volume(NAMESPACE, "a", LARGE, 0, ExpandOptions::default()).await
        });
        s.waits("waiting until nobody has it").await;
        unmount(&s.client, "a", "job").await.unwrap();
        let expanded = asked.await.unwrap().unwrap();
        assert_eq!(expanded.capacity_bytes, LARGE);
        assert_eq!(s.w.plugin("p").count("ControllerExpandVolume", ""), 1);
        s.delete("a", options()).await.unwrap();
        s.nothing_left().await;
    });
}

/// It keeps later callers from the volume, and its caller may be gone.
#[test]
fn offline_expansion_without_a_deadline_ends() {
    alone(OFFLINE, async |w| {
        w.configure("[deadlines]\noperation = \"2s\"");
        let mut s = creating(w).await;
        expands_offline(&mut s).await;
        s.create("a", spec()).await.unwrap();
        s.client.mount(NAMESPACE, "a", "job", MountOptions::default()).await.unwrap();
        let expanded = s.client.expand_volume(NAMESPACE, "a", LARGE, 0, ExpandOptions::default()).await;
        let (kind, error) = refusal(expanded);
        assert!(kind == Kind::TimedOut && error.message.contains("in use"), "{error}");
        assert_eq!(s.w.plugin("p").count("ControllerExpandVolume", ""), 0);
        s.client.mount(NAMESPACE, "a", "job", MountOptions::default()).await.unwrap();
        unmount(&s.client, "a", "job").await.unwrap();
        s.delete("a", options()).await.unwrap();
        s.nothing_left().await;
    });
}

#[test]
fn target_is_free_while_an_expansion_waits() {
    alone(OFFLINE, async |w| {
        let mut s = creating(w).await;
        expands_offline(&mut s).await;
        let capabilities = Some(capabilities(&[AccessMode::SingleNodeMultiWriter]));
        s.create("a", CreateVolume { capabilities, ..spec() }).await.unwrap();
        s.create("b", spec()).await.unwrap();
        let target = s.w.path("target");
        std::fs::create_dir(&target).unwrap();
        let at_target =
            MountOptions { target: Some(target.display().to_string()), ..MountOptions::default() };
        s.client.mount(NAMESPACE, "a", "one", at_target.clone()).await.unwrap();
        s.client.mount(NAMESPACE, "a", "two", MountOptions::default()).await.unwrap();
        let client = s.client.clone();
        let expanded = tokio::spawn(async move {
            client.expand_volume(NAMESPACE, "a", LARGE, 0, ExpandOptions::default()).await
        });
        s.waits("waiting until nobody has it").await;
        unmount(&s.client, "a", "one").await.unwrap();
        s.client.mount(NAMESPACE, "b", "one", at_target).await.expect("the target is free");
        unmount(&s.client, "b", "one").await.unwrap();
        unmount(&s.client, "a", "two").await.unwrap();
        assert_eq!(expanded.await.unwrap().unwrap().capacity_bytes, LARGE);
        s.delete("a", options()).await.unwrap();
        s.delete("b", options()).await.unwrap();
        s.nothing_left().await;
    });
}

#[test]
fn later_claims_do_not_overtake_offline_expansion() {
    alone(OFFLINE, async |w| {
        let mut s = creating(w).await;
        expands_offline(&mut s).await;
        let capabilities = Some(capabilities(&[AccessMode::SingleNodeMultiWriter]));
        s.create("a", CreateVolume { capabilities, ..spec() }).await.unwrap();
        let claim = async |s: &Site<'_>, consumer: &str, options: ClaimOptions| {
            s.client.claim(NAMESPACE, "a", consumer, options).await
        };
        claim(&s, "one", ClaimOptions::default()).await.unwrap();
        let client = s.client.clone();
        let expanded = tokio::spawn(async move {
            client.expand_volume(NAMESPACE, "a", LARGE, 0, ExpandOptions::default()).await
        });
        s.waits("waiting until nobody has it").await;

        let (kind, error) = refusal(claim(&s, "two", ClaimOptions::default()).await);
        assert!(kind == Kind::ClaimConflict && error.message.contains("expansion"), "{error}");
        let mount = s.client.mount(NAMESPACE, "a", "two", MountOptions::default()).await;
        assert_eq!(refusal(mount).0, Kind::ClaimConflict);
        let attach = s.client.attach_volume(NAMESPACE, "a", "node-2", AttachOptions::default()).await;
        assert_eq!(refusal(attach).0, Kind::ClaimConflict);
        // Who has it goes on using it.
        claim(&s, "one", ClaimOptions::default()).await.expect("the same again");
        s.client.mount(NAMESPACE, "a", "one", MountOptions::default()).await.unwrap();
        unmount(&s.client, "a", "one").await.unwrap();

        let client = s.client.clone();
        let later = tokio::spawn(async move {
            let options = ClaimOptions { wait_usec: Some(30_000_000), ..ClaimOptions::default() };
            client.claim(NAMESPACE, "a", "three", options).await
        });
        s.waits("waiting for claims").await;
        assert_eq!(s.w.plugin("p").count("ControllerExpandVolume", ""), 0);
        s.client.release(NAMESPACE, "a", "one", ReleaseOptions::default()).await.unwrap();
        assert_eq!(expanded.await.unwrap().unwrap().capacity_bytes, LARGE);
        later.await.unwrap().expect("its turn");
        let calls: Vec<_> = s.w.plugin("p").volume_calls().into_iter().map(|call| call.call.rpc).collect();
        let last = |rpc: &str| calls.iter().rposition(|call| call == rpc);
        assert!(last("ControllerExpandVolume") < last("ControllerPublishVolume"), "{calls:?}");
        s.client.release(NAMESPACE, "a", "three", ReleaseOptions::default()).await.unwrap();
        s.delete("a", options()).await.unwrap();
        s.nothing_left().await;
    });
}

#[test]
fn failed_node_expansion_is_repeated_by_the_same_call() {
    world(async |w| {
        let mut s = creating(w).await;
        s.w.plugin("p").set(|script| {
            script.plugin.push("ONLINE".to_owned());
            script.capabilities.push("EXPAND_VOLUME".to_owned());
        });
        s.w.plugin("p").kill();
        s.w.plugin("p").start().await;
        s.restart().await;
        s.is_ready().await;
        s.create("a", spec()).await.unwrap();
        s.client.mount(NAMESPACE, "a", "job", MountOptions::default()).await.unwrap();
        let expand = async |s: &Site<'_>| {
            let patience = Duration::from_secs(10).as_micros() as u64;
            let options = ExpandOptions { deadline_usec: Some(patience), ..ExpandOptions::default() };
            s.client.expand_volume(NAMESPACE, "a", LARGE, 0, options).await
        };
        s.rules([Rule::always("NodeExpandVolume", Act::Fail(9))]);
        assert_eq!(refusal(expand(&s).await).0, Kind::PluginError);
        assert_eq!(s.volumes().await[0].pending_expand, LARGE);
        s.w.plugin("p").honest();
        let expanded = expand(&s).await.unwrap();
        assert_eq!((expanded.capacity_bytes, expanded.node_expansion_required), (LARGE, false));
        assert_eq!(s.w.plugin("p").count("ControllerExpandVolume", ""), 1);
        unmount(&s.client, "a", "job").await.unwrap();
        s.delete("a", options()).await.unwrap();
        s.nothing_left().await;
    });
}

/// A mounted volume `a` of a plugin with these capabilities besides its controller's.
async fn mounted<'w>(w: &'w mut World, plugin: &str, node: &[&str]) -> Site<'w> {
    let mut s = creating(w).await;
    s.w.plugin("p").set(|script| {
        script.plugin.push(plugin.to_owned());
        script.capabilities.extend(node.iter().map(|can| (*can).to_owned()));
    });
    s.w.plugin("p").kill();
    s.w.plugin("p").start().await;
    s.restart().await;
    s.is_ready().await;
    s.create("a", spec()).await.unwrap();
    s.client.mount(NAMESPACE, "a", "job", MountOptions::default()).await.unwrap();
    s
}

/// A plugin expands no file system through a read-only mount.
#[test]
fn node_expands_at_the_writable_mount() {
    world(async |w| {
        let mut s = creating(w).await;
        s.w.plugin("p").set(|script| {
            script.plugin.push("ONLINE".to_owned());
            script.capabilities.push("EXPAND_VOLUME".to_owned());
        });
        s.w.plugin("p").kill();
        s.w.plugin("p").start().await;
        s.restart().await;
        s.is_ready().await;
        let capabilities = Some(capabilities(&[AccessMode::SingleNodeMultiWriter]));
        s.create("a", CreateVolume { capabilities, ..spec() }).await.unwrap();
        for (consumer, read_only) in [("first", true), ("second", false)] {
            let options = MountOptions { read_only: Some(read_only), ..MountOptions::default() };
            s.client.mount(NAMESPACE, "a", consumer, options).await.unwrap();
        }
        expand(&s, LARGE).await.unwrap().unwrap();
        let calls = s.w.plugin("p").volume_calls();
        let last = |rpc: &str| calls.iter().rfind(|call| call.call.rpc == rpc).unwrap().call.clone();
        let writable = last("NodePublishVolume");
        assert!(!writable.read_only && last("NodeExpandVolume").target == writable.target, "{calls:?}");
        for consumer in ["first", "second"] {
            unmount(&s.client, "a", consumer).await.unwrap();
        }
        end(s).await;
    });
}

/// Starts an ExpandVolume of `a` in a task of its own.
fn expand(s: &Site<'_>, to: u64) -> tokio::task::JoinHandle<csid_client::Result<Expanded>> {
    let client = s.client.clone();
    tokio::spawn(async move {
        let deadline_usec = Some(Duration::from_secs(10).as_micros() as u64);
        let options = ExpandOptions { deadline_usec, ..ExpandOptions::default() };
        client.expand_volume(NAMESPACE, "a", to, 0, options).await
    })
}

/// Expands as [`expand`] does, on a csid that was killed and sees its plugin only after the request.
async fn expand_unseen(s: &mut Site<'_>, to: u64) -> tokio::task::JoinHandle<csid_client::Result<Expanded>> {
    s.w.plugin("p").kill();
    s.restart().await;
    let asked = expand(s, to);
    eventually("csid waits", async || !s.client.list_operations().await.unwrap().is_empty()).await;
    s.w.plugin("p").start().await;
    asked
}

async fn end(s: Site<'_>) {
    s.delete("a", options()).await.unwrap();
    s.nothing_left().await;
}

#[test]
fn co_rule_26_offline_waits_with_plugin_seen_late() {
    alone(OFFLINE, async |w| {
        let mut s = mounted(w, "OFFLINE", &["EXPAND_VOLUME"]).await;
        let asked = expand_unseen(&mut s, LARGE).await;
        s.is_ready().await;
        eventually("it waits", async || {
            let operations = s.client.list_operations().await.unwrap();
            operations.iter().any(|operation| operation.step == "waiting until nobody has it")
        })
        .await;
        assert_eq!(s.w.plugin("p").count("ControllerExpandVolume", ""), 0);
        unmount(&s.client, "a", "job").await.unwrap();
        assert_eq!(asked.await.unwrap().unwrap().capacity_bytes, LARGE);
        end(s).await;
    });
}

#[test]
fn failed_node_expansion_is_due_at_a_late_plugin() {
    world(async |w| {
        let mut s = mounted(w, "ONLINE", &["EXPAND_VOLUME"]).await;
        s.rules([Rule::always("NodeExpandVolume", Act::Fail(9))]);
        assert_eq!(refusal(expand(&s, LARGE).await.unwrap()).0, Kind::PluginError);
        s.w.plugin("p").honest();
        let before = s.w.plugin("p").count("NodeExpandVolume", "");
        let expanded = expand_unseen(&mut s, LARGE).await.await.unwrap().unwrap();
        assert_eq!((expanded.capacity_bytes, expanded.node_expansion_required), (LARGE, false));
        assert_eq!(s.w.plugin("p").count("NodeExpandVolume", ""), before + 1);
        assert_eq!(s.w.plugin("p").count("ControllerExpandVolume", ""), 1);
        unmount(&s.client, "a", "job").await.unwrap();
        end(s).await;
    });
}

#[test]
fn uncertain_expansion_outlives_a_smaller_request() {
    alone("servers repeat an expansion without an answer by themselves", async |w| {
        let mut s = mounted(w, "ONLINE", &["EXPAND_VOLUME"]).await;
        s.rules([Rule::always("ControllerExpandVolume", Act::FailAfter(13))]);
        let kind = refusal(expand(&s, LARGE).await.unwrap()).0;
        assert!(matches!(kind, Kind::Uncertain | Kind::TimedOut), "{kind:?}");
        s.w.plugin("p").honest();
        let met = expand(&s, 1 << 20).await.unwrap().unwrap();
        assert!(met.node_expansion_required, "{met:?}");
        assert_eq!(s.volumes().await[0].pending_expand, LARGE);
        unmount(&s.client, "a", "job").await.unwrap();
        s.client.mount(NAMESPACE, "a", "job", MountOptions::default()).await.unwrap();
        eventually("it is expanded", async || s.volumes().await[0].pending_expand == 0).await;
        assert_eq!(s.w.plugin("p").count("NodeExpandVolume", ""), 1);
        assert_eq!(s.volumes().await[0].capacity, LARGE);
        unmount(&s.client, "a", "job").await.unwrap();
        end(s).await;
    });
}

#[test]
fn failed_node_expansion_is_done_after_a_reboot() {
    world(async |w| {
        let mut s = mounted(w, "ONLINE", &["EXPAND_VOLUME"]).await;
        s.rules([Rule::always("NodeExpandVolume", Act::Fail(9))]);
        assert_eq!(refusal(expand(&s, LARGE).await.unwrap()).0, Kind::PluginError);
        s.w.plugin("p").honest();
        s.w.reboot().await;
        s.w.another_boot_id();
        s.restart().await;
        eventually("it is expanded", async || s.volumes().await[0].pending_expand == 0).await;
        assert_eq!(state(&s.client, "a", "job").await, "mounted");
        unmount(&s.client, "a", "job").await.unwrap();
        end(s).await;
    });
}

/// A node of a cluster shows its own copy of a volume that it has claimed.
#[test]
fn expanded_claimed_volume_shows_its_capacity() {
    world(async |w| {
        let s = mounted(w, "ONLINE", &[]).await;
        assert_eq!(expand(&s, LARGE).await.unwrap().unwrap().capacity_bytes, LARGE);
        assert_eq!(s.client.volume(NAMESPACE, "a").await.unwrap().capacity, LARGE);
        unmount(&s.client, "a", "job").await.unwrap();
        end(s).await;
    });
}

/// The controller fails for longer than any mount waits; the mounts go on, and so does the expansion.
#[test]
fn expansion_that_fails_delays_no_mount() {
    world(async |w| {
        let mut s = mounted(w, "ONLINE", &["EXPAND_VOLUME"]).await;
        s.rules([Rule::always("ControllerExpandVolume", Act::FailAfter(13))]);
        let kind = refusal(expand(&s, LARGE).await.unwrap()).0;
        assert!(matches!(kind, Kind::Uncertain | Kind::TimedOut), "{kind:?}");
        for _ in 0..3 {
            unmount(&s.client, "a", "job").await.unwrap();
            let options = MountOptions { deadline_usec: Some(600_000_000), ..MountOptions::default() };
            let asked = s.w.plugin("p").count("ControllerExpandVolume", "");
            let mount = s.client.mount(NAMESPACE, "a", "job", options);
            // Until the operation's own end, which is two minutes, without it.
            let mounted = tokio::time::timeout(Duration::from_secs(60), mount).await;
            mounted.expect("it does not wait for the expansion").unwrap();
            eventually("it is tried again", async || {
                s.w.plugin("p").count("ControllerExpandVolume", "") > asked
            })
            .await;
        }
        // Servers say what nodes have yet to do, and not what a controller has.
        let due = if clustered::is_used() { 0 } else { LARGE };
        assert_eq!(s.client.volume(NAMESPACE, "a").await.unwrap().pending_expand, due);
        s.w.plugin("p").honest();
        eventually("it is expanded", async || {
            s.client.volume(NAMESPACE, "a").await.unwrap().capacity == LARGE
        })
        .await;
        unmount(&s.client, "a", "job").await.unwrap();
        end(s).await;
    });
}
