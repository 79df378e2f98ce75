//! Several callers, deadlines and cancelling: the answer of each, and what is true afterwards.

use std::time::{Duration, Instant};

use csid_client::{Client, Kind, MountFilter, MountOptions, Mounted, Result, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, count, eventually, refusal, world};
use tokio::task::JoinHandle;

pub fn spawn(client: &Client, options: MountOptions) -> JoinHandle<Result<Mounted>> {
    let client = client.clone();
    tokio::spawn(async move { mount(&client, "job", options).await })
}

pub fn named(name: &str, options: MountOptions) -> MountOptions {
    MountOptions { operation_id: Some(name.to_owned()), ..options }
}

/// Until the plugin has a call of `rpc`.
pub async fn reached(w: &mut World, rpc: &str) {
    let plugin = w.plugin("p");
    eventually(rpc, async || plugin.count(rpc, "") > 0).await;
}

/// Plugin `p` takes a minute to stage; a caller that goes away ends it.
async fn slow(w: &mut World) -> Client {
    let client = running(w).await;
    w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Delay(60_000))]);
    client
}

async fn cancelled_in_the_plugin(w: &mut World) {
    let plugin = w.plugin("p");
    eventually("the plugin sees the cancellation", async || {
        plugin.calls().iter().any(|c| c.call.rpc == "NodeStageVolume" && c.cancelled)
    })
    .await;
}

#[test]
fn same_call_joins_the_one_under_way() {
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Delay(800))]);
        let calls: Vec<_> = (0..10).map(|_| spawn(&client, inline("v"))).collect();
        let mut answers = Vec::new();
        for call in calls {
            answers.push(call.await.unwrap().unwrap());
        }
        assert!(answers.iter().all(|a| *a == answers[0]), "{answers:?}");
        assert_eq!(w.plugin("p").volume_calls().len(), 2, "one mount for ten callers");
        count("callers of one mount", answers.len());

        let other = MountOptions { fs_type: Some("xfs".to_owned()), ..inline("v") };
        let (kind, error) = refusal(mount(&client, "job", other).await);
        assert_eq!(kind, Kind::AlreadyExists, "{error}");
        assert_eq!(error.details.volume.as_deref(), Some("v"));
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn external_id_may_be_longer_than_a_name() {
    world(async |w| {
        // CSI's limit is 128 bytes, and some plugins have longer ids.
        w.excuse(11, "a longer volume_id than CSI allows");
        let client = running(w).await;
        for length in [147, 240] {
            let id = "x".repeat(length);
            client.mount(NAMESPACE, "v", "job", inline(&id)).await.unwrap();
            unmount(&client, "v", "job").await.unwrap();
        }
        let (kind, error) = refusal(client.mount(NAMESPACE, "v", "job", inline(&"x".repeat(1025))).await);
        assert_eq!(kind, Kind::InvalidArgument, "{error}");
        w.nothing_left(&client).await;
    });
}

#[test]
fn empty_namespace_is_the_default() {
    world(async |w| {
        let client = running(w).await;
        client.mount("", "v", "job", inline("v")).await.unwrap();
        client.mount("default", "v", "job", inline("v")).await.unwrap();
        let rows = client.list_mounts(MountFilter::default()).await.unwrap();
        let names: Vec<_> = rows.iter().map(|row| row.namespace.as_str()).collect();
        assert_eq!(names, ["default"]);
        let empty = || Some(String::new());
        let filter = MountFilter { namespace: empty(), after: empty(), ..MountFilter::default() };
        assert_eq!(client.list_mounts(filter).await.unwrap().len(), 1);
        client.unmount("", "v", "job", UnmountOptions::default()).await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn other_options_are_refused_during_the_mount() {
    world(async |w| {
        let client = slow(w).await;
        let first = spawn(&client, inline("v"));
        reached(w, "NodeStageVolume").await;
        let other = MountOptions { read_only: Some(true), ..inline("v") };
        assert_eq!(refusal(mount(&client, "job", other).await).0, Kind::AlreadyExists);
        assert!(!first.is_finished());
        unmount(&client, "v", "job").await.unwrap();
        assert_eq!(refusal(first.await.unwrap()).0, Kind::Cancelled);
        w.nothing_left(&client).await;
    });
}

#[test]
fn timed_out_unmount_names_the_plugins_last_error() {
    world(async |w| {
        let client = running(w).await;
        mount(&client, "job", inline("v")).await.unwrap();
        let says = Act::Say(13, "still published on node-7".to_owned());
        w.plugin("p").rules([Rule::always("NodeUnpublishVolume", says)]);
        let options = UnmountOptions { deadline_usec: Some(1_500_000), ..UnmountOptions::default() };
        let (kind, error) = refusal(client.unmount(NAMESPACE, "v", "job", options).await);
        assert_eq!(kind, Kind::TimedOut, "{error}");
        let details = &error.details;
        assert_eq!(
            (details.rpc.as_deref(), details.grpc_code),
            (Some("NodeUnpublishVolume"), Some(13)),
            "{error}"
        );
        assert_eq!(details.plugin_message.as_deref(), Some("still published on node-7"));
        assert!(error.message.contains("still published on node-7"), "{error}");
        w.plugin("p").rules([]);
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn co_rule_25_unmount_ends_a_mount_under_way() {
    world(async |w| {
        let client = slow(w).await;
        let first = spawn(&client, inline("v"));
        reached(w, "NodeStageVolume").await;
        let begun = Instant::now();
        unmount(&client, "v", "job").await.unwrap();
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        assert_eq!(refusal(first.await.unwrap()).0, Kind::Cancelled);
        cancelled_in_the_plugin(w).await;
        w.nothing_left(&client).await;
        assert!(
            w.plugin("p").count("NodeUnstageVolume", "v") >= 1,
            "only the negation ends a cancelled call"
        );
    });
}

#[test]
fn cancel_operation_reaches_the_rpc() {
    world(async |w| {
        let client = slow(w).await;
        let call = spawn(&client, named("my-mount", inline("v")));
        reached(w, "NodeStageVolume").await;
        let operations = client.list_operations().await.unwrap();
        let operation = operations.iter().find(|o| o.id == "my-mount").expect("the operation by its name");
        assert_eq!((operation.kind.as_str(), operation.subject.as_str()), ("mount", "default/v"));
        assert_eq!((operation.step.as_str(), operation.uid), ("stage", 0), "{operation:?}");
        assert_eq!(row(&client, "v", "job").await.unwrap().state, "mounting");
        client.cancel_operation("my-mount").await.unwrap();
        let (kind, error) = refusal(call.await.unwrap());
        assert_eq!(kind, Kind::Cancelled, "{error}");
        cancelled_in_the_plugin(w).await;
        w.nothing_left(&client).await;
        assert_eq!(refusal(client.cancel_operation("never-was").await).0, Kind::NotFound);
    });
}

/// systemd knows which commands in plugins run; here is none.
#[test]
fn operations_are_listed_while_systemd_hangs() {
    world(async |w| {
        let client = slow(w).await;
        let call = spawn(&client, named("my-mount", inline("v")));
        reached(w, "NodeStageVolume").await;
        let begun = r#"{"plugin": "p", "uid": 0, "terminal": null, "request": null, "end": null}"#;
        std::fs::create_dir_all(w.path("run/exec")).unwrap();
        std::fs::write(w.path("run/exec/csi-exec-0123456789abcdef.json"), begun).unwrap();
        let operations = client.list_operations().await.expect("what csid itself does");
        assert_eq!(operations.iter().map(|o| o.id.as_str()).collect::<Vec<_>>(), ["my-mount"]);
        client.cancel_operation("my-mount").await.unwrap();
        assert_eq!(refusal(call.await.unwrap()).0, Kind::Cancelled);
        w.nothing_left(&client).await;
    });
}

#[test]
fn cancel_withdraws_one_of_two_callers() {
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([Rule::once("NodeStageVolume", Act::Delay(2_000))]);
        let one = spawn(&client, named("one", inline("v")));
        reached(w, "NodeStageVolume").await;
        let two = spawn(&client, named("two", inline("v")));
        eventually("both are listed", async || {
            let ids: Vec<_> = client.list_operations().await.unwrap().into_iter().map(|o| o.id).collect();
            ["one", "two"].iter().all(|id| ids.contains(&(*id).to_owned()))
        })
        .await;
        client.cancel_operation("one").await.unwrap();
        assert_eq!(refusal(one.await.unwrap()).0, Kind::Cancelled);
        two.await.unwrap().expect("the other caller's mount");
        assert_eq!(w.plugin("p").volume_calls().len(), 2);
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn operation_id_is_unique_for_its_uid() {
    world(async |w| {
        let client = slow(w).await;
        let one = spawn(&client, named("same", inline("v")));
        reached(w, "NodeStageVolume").await;
        let (kind, error) = refusal(mount(&client, "job", named("same", inline("w"))).await);
        assert_eq!(kind, Kind::AlreadyExists, "{error}");
        client.cancel_operation("same").await.unwrap();
        assert_eq!(refusal(one.await.unwrap()).0, Kind::Cancelled);
        w.nothing_left(&client).await;
    });
}

#[test]
fn deadline_rolls_the_mount_back() {
    world(async |w| {
        let client = slow(w).await;
        let calls: Vec<_> = (0..20)
            .map(|n| spawn(&client, within(Duration::from_millis(700 + n), inline(&format!("v{n}")))))
            .collect();
        let begun = Instant::now();
        for call in calls {
            let (kind, error) = refusal(call.await.unwrap());
            let waited = begun.elapsed();
            // The answer is the same whether the RPC or its undoing was under way.
            assert_eq!(kind, Kind::TimedOut, "{error}");
            assert!(waited >= Duration::from_millis(600) && waited < Duration::from_secs(5), "{waited:?}");
            assert_eq!(error.details.retryable, Some(true));
        }
        cancelled_in_the_plugin(w).await;
        w.nothing_left(&client).await;
        assert!(w.plugin("p").count("NodeUnstageVolume", "v0") >= 1);
    });
}

#[test]
fn joined_callers_have_their_own_deadlines() {
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([Rule::once("NodeStageVolume", Act::Delay(2_000))]);
        let hasty = spawn(&client, within(Duration::from_millis(500), inline("v")));
        // The RPC was sent for the hasty one alone.
        reached(w, "NodeStageVolume").await;
        let patient = spawn(&client, inline("v"));
        assert_eq!(refusal(hasty.await.unwrap()).0, Kind::TimedOut);
        patient.await.unwrap().expect("the patient caller's mount");
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn lost_connection_ends_nothing() {
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([Rule::once("NodeStageVolume", Act::Delay(1_000))]);
        let call = spawn(&client, inline("v"));
        reached(w, "NodeStageVolume").await;
        call.abort();
        drop(client);
        let client = w.client().await;
        eventually("the mount is made", async || state(&client, "v", "job").await == "mounted").await;
        assert!(!w.plugin("p").calls().iter().any(|c| c.cancelled));
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn failed_rollback_is_uncertain_until_it_ends() {
    world(async |w| {
        let client = running(w).await;
        // INTERNAL leaves the publish unknown, and undoing it fails.
        w.plugin("p").rules([
            Rule::always("NodePublishVolume", Act::FailAfter(13)),
            Rule::always("NodeUnpublishVolume", Act::Fail(14)),
        ]);
        let begun = Instant::now();
        let (kind, first) = refusal(mount(&client, "job", within(Duration::from_secs(2), inline("v"))).await);
        assert_eq!(kind, Kind::Uncertain, "its rollback has not ended: {first}");
        let (kind, second) =
            refusal(mount(&client, "job", within(Duration::from_secs(1), inline("v"))).await);
        // It waits for the undoing of the first, and then undoes the same.
        let due = match second.details.step.as_deref() {
            Some("queued") => Kind::TimedOut,
            _ => Kind::Uncertain,
        };
        assert_eq!(kind, due, "{second}");
        assert!(begun.elapsed() < Duration::from_secs(6));
        let row = row(&client, "v", "job").await.expect("what may be there has a row");
        assert!(["unmounting", "uncertain"].contains(&row.state.as_str()), "{row:?}");
        let options = UnmountOptions { deadline_usec: Some(1_000_000), ..UnmountOptions::default() };
        let (kind, third) = refusal(client.unmount(NAMESPACE, "v", "job", options).await);
        assert_eq!(kind, Kind::TimedOut, "an unmount goes on: {third}");
        assert_eq!(w.plugin("p").count("NodeUnstageVolume", ""), 0, "co_rule_22");

        w.plugin("p").honest();
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn late_rpc_answer_is_asked_for_again() {
    world(async |w| {
        w.add_plugin_with("p", "rpc-deadline = \"500ms\"").await;
        let client = w.start().await;
        for rpc in ["NodeStageVolume", "NodePublishVolume"] {
            // It goes on after the caller has gone, does its work late, and answers ABORTED meanwhile.
            w.plugin("p").rules([Rule::once(rpc, Act::Stubborn(1_500))]);
            let calls = w.plugin("p").volume_calls().len();
            let answer = mount(&client, "job", within(Duration::from_secs(60), inline("v"))).await.unwrap();
            assert!(client.has_mount(&answer.source).await.unwrap());
            let after: Vec<_> = w.plugin("p").volume_calls().split_off(calls);
            let late = after.iter().find(|c| c.call.rpc == rpc).unwrap();
            assert!(late.cancelled, "the deadline reached the RPC: {after:?}");
            assert!(!after.iter().any(|c| c.call.rpc.starts_with("NodeUn")), "not negated: {after:?}");
            unmount(&client, "v", "job").await.unwrap();
            w.nothing_left(&client).await;
        }
    });
}

#[test]
fn call_cut_off_by_kill_can_be_repeated() {
    world(async |w| {
        let client = slow(w).await;
        let call = spawn(&client, named("op", inline("v")));
        reached(w, "NodeStageVolume").await;
        w.kill();
        assert!(matches!(call.await.unwrap(), Err(csid_client::Error::Disconnected(_))));
        w.plugin("p").honest();
        let client = w.start().await;
        mount(&client, "job", named("op", inline("v"))).await.expect("the repeated call");
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn stop_answers_waiting_callers() {
    world(async |w| {
        let client = slow(w).await;
        let call = spawn(&client, inline("v"));
        reached(w, "NodeStageVolume").await;
        w.stop().await;
        match call.await.unwrap() {
            Err(csid_client::Error::Csid(error)) => assert_eq!(error.kind, Kind::ShuttingDown, "{error}"),
            other => panic!("{other:?}"),
        }
        w.plugin("p").honest();
        let client = w.start().await;
        settled(&client).await;
        eventually("it is undone or can be", async || {
            ["none", "unmounting"].contains(&state(&client, "v", "job").await.as_str())
        })
        .await;
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}
