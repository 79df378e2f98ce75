//! Drivers that need longer than an RPC's deadline, and drivers that serve one call after the other. A witness stands
//! before each of them.

use std::time::{Duration, Instant};

use csid_client::{AccessMode, Client, Kind, MountOptions, Restore};
use csid_tests::ask::*;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, count, eventually, refusal, within_time, world};

const RPC_DEADLINE: &str = "rpc-deadline = \"500ms\"";
const LONG: Duration = Duration::from_secs(60);

async fn brief(w: &mut World) -> Client {
    w.add_plugin_and("p", &[], RPC_DEADLINE).await;
    let client = w.start().await;
    healthy(&client, "p").await;
    client
}

/// The same, of a plugin that attaches, with the registered volume `v`.
async fn attaching(w: &mut World) -> Client {
    attaching_within(w, RPC_DEADLINE).await
}

async fn attaching_within(w: &mut World, deadline: &str) -> Client {
    let plugin = w.add_plugin_and("p", &[], deadline).await;
    plugin.set(|script| script.control(&["PUBLISH_UNPUBLISH_VOLUME"]));
    plugin.kill();
    plugin.start().await;
    plugin.provision("v");
    let client = w.start().await;
    healthy(&client, "p").await;
    registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
    client
}

fn negations(w: &mut World) -> usize {
    let calls = w.plugin("p").volume_calls();
    calls.iter().filter(|call| call.call.rpc.contains("Un")).count()
}

#[test]
fn co_rule_25_a_late_stage_or_publish_is_repeated() {
    world(async |w| {
        let client = brief(w).await;
        for rpc in ["NodeStageVolume", "NodePublishVolume"] {
            // At the second try it is done; or it takes four deadlines, however often it is asked for.
            for (work, least) in [(700, 2), (2_000, 3)] {
                let before = w.plugin("p").volume_calls().len();
                w.plugin("p").rules([Rule::always(rpc, Act::Background(work))]);
                mount(&client, "job", within(LONG, inline("v")))
                    .await
                    .unwrap_or_else(|e| panic!("{rpc}: {e}"));
                let calls = w.plugin("p").volume_calls().split_off(before);
                let sent = calls.iter().filter(|call| call.call.rpc == rpc).count();
                assert!(sent >= least, "{rpc} was sent {sent} times");
                let negated = calls.iter().any(|call| call.call.rpc.starts_with("NodeUn"));
                assert!(!negated, "{rpc} was negated though its caller waits: {calls:?}");
                unmount(&client, "v", "job").await.unwrap();
                w.nothing_left(&client).await;
            }
        }
    });
}

#[test]
fn co_rule_25_a_late_attach_is_repeated() {
    world(async |w| {
        let client = attaching(w).await;
        w.plugin("p").rules([Rule::always("ControllerPublishVolume", Act::Background(1_600))]);
        let options = within(LONG, MountOptions::default());
        client.mount(NAMESPACE, "v", "job", options).await.unwrap();
        let sent = w.plugin("p").count("ControllerPublishVolume", "v");
        assert!(sent >= 3, "it was sent {sent} times");
        assert_eq!(negations(w), 0);
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// `CSID_LATE=90` is the full size, as tests/soak has it: a driver that needs 90 s, with a plugin's default deadline.
#[test]
fn driver_slower_than_its_deadline_succeeds() {
    let full: Option<u64> =
        std::env::var("CSID_LATE").ok().map(|text| text.parse().expect("a number of seconds"));
    world(async move |w| {
        let (work, deadline) = match full {
            Some(seconds) => (seconds * 1_000, ""),
            None => (750, RPC_DEADLINE),
        };
        let client = attaching_within(w, deadline).await;
        for rpc in ["ControllerPublishVolume", "NodeStageVolume"] {
            let (before, negated) = (w.plugin("p").count(rpc, "v"), negations(w));
            w.plugin("p").rules([Rule::always(rpc, Act::Background(work))]);
            let begun = Instant::now();
            let options = within(Duration::from_secs(250), MountOptions::default());
            client.mount(NAMESPACE, "v", "job", options).await.unwrap_or_else(|e| panic!("{rpc}: {e}"));
            let took = begun.elapsed();
            assert!(took >= Duration::from_millis(work), "{rpc} took {took:?}");
            let sent = w.plugin("p").count(rpc, "v") - before;
            assert!(sent >= 2, "{rpc} was sent {sent} times");
            count(&format!("ms until a mount with a late {rpc}"), took.as_millis() as usize);
            count(&format!("times that {rpc} was sent"), sent);
            assert_eq!(negations(w), negated, "{rpc}");
            unmount(&client, "v", "job").await.unwrap();
            w.nothing_left(&client).await;
        }
    });
}

#[test]
fn abandoned_call_is_undone() {
    world(async |w| {
        let client = attaching(w).await;
        for (rpc, negation) in [
            ("ControllerPublishVolume", "ControllerUnpublishVolume"),
            ("NodeStageVolume", "NodeUnstageVolume"),
            ("NodePublishVolume", "NodeUnpublishVolume"),
        ] {
            let before = w.plugin("p").count(negation, "v");
            w.plugin("p").rules([Rule::always(rpc, Act::Background(3_000))]);
            let options = within(Duration::from_millis(1_400), MountOptions::default());
            let (kind, error) = refusal(client.mount(NAMESPACE, "v", "job", options).await);
            // The operation has the same deadline. Its own result goes first, if it ends in time.
            assert!([Kind::TimedOut, Kind::Uncertain].contains(&kind), "{error}");
            assert!(w.plugin("p").count(rpc, "v") >= 1);
            w.nothing_left(&client).await;
            assert!(w.plugin("p").count(negation, "v") > before, "{rpc} was not negated");
        }
    });
}

#[test]
fn co_rule_36_refused_repeat_is_undone() {
    world(async |w| {
        let client = brief(w).await;
        for (rpc, negation) in
            [("NodeStageVolume", "NodeUnstageVolume"), ("NodePublishVolume", "NodeUnpublishVolume")]
        {
            // The first has its effect, and no answer in time. INVALID_ARGUMENT is final.
            let late = Rule::once(rpc, Act::DelayAfter(5_000));
            let refused = Rule { from: 2, ..Rule::always(rpc, Act::Fail(3)) };
            let (sent, negated) = (w.plugin("p").count(rpc, ""), w.plugin("p").count(negation, ""));
            w.plugin("p").rules([late, refused]);
            let (kind, error) = refusal(mount(&client, "job", within(LONG, inline("v"))).await);
            assert_eq!((kind, error.details.grpc_code), (Kind::PluginError, Some(3)), "{error}");
            assert_eq!(w.plugin("p").count(rpc, "") - sent, 2, "{rpc}");
            assert!(w.plugin("p").count(negation, "") > negated, "{rpc} was not negated");
            w.nothing_left(&client).await;
        }
    });
}

#[test]
fn unanswered_mount_is_undone_after_a_kill() {
    world(async |w| {
        let client = brief(w).await;
        w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Background(1_500))]);
        let call = {
            let client = client.clone();
            tokio::spawn(async move { mount(&client, "job", within(LONG, inline("v"))).await })
        };
        let plugin = w.plugin("p");
        eventually("it is repeated", async || plugin.count("NodeStageVolume", "v") >= 2).await;
        w.kill();
        call.await.unwrap().unwrap_err();
        drop(client);
        let client = w.start().await;
        w.nothing_left(&client).await;
        assert!(w.plugin("p").count("NodeUnstageVolume", "v") >= 1);
    });
}

/// A try of csid's own ends at `operation`; the next one repeats the same call.
#[test]
fn late_restore_is_repeated_by_the_next_try() {
    world(async |w| {
        w.configure("[deadlines]\noperation = \"1s\"");
        let client = brief(w).await;
        let auto = MountOptions { restore: Some(Restore::Auto), ..inline("v") };
        mount(&client, "job", auto).await.unwrap();
        let stages = w.plugin("p").count("NodeStageVolume", "v");
        w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Background(4_000))]);
        w.reboot().await;
        let client = w.start().await;
        eventually("it is back", async || state(&client, "v", "job").await == "mounted").await;
        assert!(w.plugin("p").count("NodeStageVolume", "v") - stages >= 3);
        assert_eq!(w.plugin("p").count("NodeUnstageVolume", "v"), 0, "csid wants it");
        assert_eq!(w.plugin("p").count("NodeUnpublishVolume", "v"), 1, "the publish of the earlier boot");
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn node_calls_of_one_plugin_take_turns() {
    world(async |w| {
        w.add_plugin_and("p", &[], "node-calls-at-once = 1").await;
        w.add_plugin("q").await;
        let client = w.start().await;
        healthy(&client, "p").await;
        healthy(&client, "q").await;
        w.plugin("p").rules([Rule::once("NodeStageVolume", Act::Delay(5_000))]);
        let first = {
            let client = client.clone();
            tokio::spawn(async move { mount(&client, "job", within(LONG, inline("first"))).await })
        };
        let plugin = w.plugin("p");
        eventually("the first has its turn", async || plugin.count("NodeStageVolume", "first") > 0).await;
        // Its caller is answered in the queue, and the plugin is neither asked nor asked to undo it.
        let hasty = within(Duration::from_millis(500), inline("hasty"));
        assert_eq!(refusal(mount(&client, "job", hasty).await).0, Kind::TimedOut);
        mount(&client, "job", of_plugin("q", "parallel")).await.expect("another plugin's queue is its own");
        assert!(!first.is_finished());
        mount(&client, "job", within(LONG, inline("next"))).await.expect("its turn comes");
        first.await.unwrap().unwrap();
        for volume in ["first", "next", "parallel"] {
            unmount(&client, volume, "job").await.unwrap();
        }
        w.nothing_left(&client).await;
        let calls = w.plugin("p").volume_calls();
        assert!(calls.iter().all(|call| call.call.volume != "hasty"), "{calls:?}");
    });
}

#[test]
fn co_rule_22_a_driver_that_counts_publishes_unstages() {
    world(async |w| {
        w.add_plugin_and("p", &[], "").await.set(|script| script.counts_publishes = true);
        let client = w.start().await;
        healthy(&client, "p").await;
        let auto = || MountOptions { restore: Some(Restore::Auto), ..inline("v") };
        mount(&client, "job", auto()).await.unwrap();
        w.reboot().await;
        let client = w.start().await;
        eventually("it is back", async || state(&client, "v", "job").await == "mounted").await;
        // The driver refuses Unstage as long as it counts the publish of the boot before.
        let _ = unmount(&client, "v", "job").await;
        w.nothing_left(&client).await;
    });
}

/// `CSID_RESTORES=400` is the full size, as tests/soak has it: 100 ms each, a deadline of 5 s, and a bound on the time.
#[test]
fn serial_driver_restores_with_one_stage_each() {
    let full: Option<usize> =
        std::env::var("CSID_RESTORES").ok().map(|text| text.parse().expect("a number of volumes"));
    world(async move |w| {
        let (volumes, milliseconds, deadline) = match full {
            Some(volumes) => (volumes, 100, "5s"),
            // On a busy machine a call takes long, so the deadline leaves room. All calls at once would still pass it.
            None => (200, 40, "4s"),
        };
        w.add_plugin_and("p", &[], &format!("rpc-deadline = {deadline:?}")).await;
        let client = w.start().await;
        healthy(&client, "p").await;
        let volume = |n: usize| format!("v{n}");
        for n in 0..volumes {
            let auto = MountOptions { restore: Some(Restore::Auto), ..inline(&volume(n)) };
            mount(&client, "job", auto).await.unwrap();
        }
        let stages = w.plugin("p").count("NodeStageVolume", "");
        w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Serial(milliseconds))]);
        w.reboot().await;
        let begun = Instant::now();
        let client = w.start().await;
        within_time(Duration::from_secs(300), "all are back", async || {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let rows = client.list_mounts(Default::default()).await.unwrap();
            rows.iter().filter(|row| row.state == "mounted").count() == volumes
        })
        .await;
        let took = begun.elapsed();
        let least = Duration::from_millis(milliseconds) * u32::try_from(volumes).unwrap();
        count("ms for all restores", took.as_millis() as usize);
        assert_eq!(w.plugin("p").count("NodeStageVolume", "") - stages, volumes, "one stage each");
        assert_eq!(w.plugin("p").count("NodeUnstageVolume", ""), 0);
        if full.is_some() {
            assert!(took <= least.mul_f64(1.3), "{took:?}; the driver alone needs {least:?}");
        }
        for n in 0..volumes {
            unmount(&client, &volume(n), "job").await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}
