//! AttachVolume that came to nothing: what was never asked of a controller leaves nothing, and keeps nobody from the volume.

use csid_client::{AttachOptions, DetachOptions, Kind};
use csid_tests::ask::*;
use csid_tests::fault::Fault;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, eventually, refusal, world};
use rustix::mount::{UnmountFlags, unmount as kernel_unmount};

use crate::*;

fn writer() -> AttachOptions {
    AttachOptions {
        plugin: Some("p".to_owned()),
        external_id: Some("v".to_owned()),
        capabilities: Some(capabilities(&[AccessMode::SingleNodeWriter])),
        ..AttachOptions::default()
    }
}

/// Any number of nodes may have the volume attached.
fn anywhere() -> AttachOptions {
    AttachOptions { capabilities: Some(capabilities(&[AccessMode::MultiNodeMultiWriter])), ..writer() }
}

/// Checks that no row names the volume, also after csid was killed.
async fn is_forgotten(w: &mut World, client: Client) -> Client {
    let is_unknown = async |client: &Client| {
        let answer = client.explain(NAMESPACE, "v", CallOptions::default()).await;
        answer.is_err_and(|error| error.to_string().contains("not registered"))
    };
    eventually("nothing is left of it", async || is_unknown(&client).await).await;
    w.kill();
    let client = w.start().await;
    assert!(is_unknown(&client).await, "nor after csid's restart");
    client
}

#[test]
fn attach_without_its_plugin_leaves_nothing() {
    alone(UNREGISTERED, async |w| {
        let client = attaching(w).await;
        w.plugin("p").kill();
        eventually("it is missed", async || !client.plugin("p").await.unwrap().healthy).await;
        let soon = AttachOptions { deadline_usec: Some(300_000), ..writer() };
        let (kind, error) = refusal(client.attach_volume(NAMESPACE, "v", "node-2", soon).await);
        assert!([Kind::TimedOut, Kind::PluginUnavailable].contains(&kind), "{error}");
        let client = is_forgotten(w, client).await;
        w.plugin("p").start().await;
        healthy(&client, "p").await;
        client.attach_volume(NAMESPACE, "v", "node-2", writer()).await.unwrap();
        assert_eq!(w.plugin("p").count("ControllerUnpublishVolume", "v"), 0, "there was nothing to undo");
        client.detach_volume(NAMESPACE, "v", "node-2", Default::default()).await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// A cancellation during the wait for the plugin leaves nothing that would need the caller's secrets.
#[test]
fn attach_cancelled_before_sending_leaves_nothing() {
    alone(UNREGISTERED, async |w| {
        let client = attaching(w).await;
        w.plugin("p").kill();
        eventually("it is missed", async || !client.plugin("p").await.unwrap().healthy).await;
        let call = {
            let client = client.clone();
            let named = AttachOptions {
                secrets: Some(secrets(&[("password", "x")])),
                operation_id: Some("mine".to_owned()),
                ..writer()
            };
            tokio::spawn(async move { client.attach_volume(NAMESPACE, "v", "node-2", named).await })
        };
        eventually("the plugin is waited for", async || {
            let entered = client.explain(NAMESPACE, "v", CallOptions::default()).await.is_ok();
            let operations = client.list_operations().await.unwrap();
            entered && operations.iter().any(|operation| operation.step == "waiting for plugin")
        })
        .await;
        client.cancel_operation("mine").await.unwrap();
        assert_eq!(refusal(call.await.unwrap()).0, Kind::Cancelled);
        let client = is_forgotten(w, client).await;
        w.plugin("p").start().await;
        healthy(&client, "p").await;
        client.attach_volume(NAMESPACE, "v", "node-2", writer()).await.expect("it has no owner");
        client.detach_volume(NAMESPACE, "v", "node-2", Default::default()).await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// Gives this node another id at the plugin.
async fn renamed(w: &mut World, client: &Client, node_id: &str, others: &[&str]) {
    w.plugin("p").set(|script| {
        script.node_id = node_id.to_owned();
        script.others = others.iter().map(|other| (*other).to_owned()).collect();
    });
    w.plugin("p").kill();
    eventually("it is missed", async || !client.plugin("p").await.unwrap().healthy).await;
    w.plugin("p").start().await;
    healthy(client, "p").await;
}

/// Another program takes the staging away. csid stages again under the present node id, and keeps that id as the staged one.
#[test]
fn co_rule_23_restaged_is_kept_from_detach_by_new_id() {
    alone(UNREGISTERED, async |w| {
        let client = attaching(w).await;
        w.plugin("p").set(|script| script.token = Some("t".to_owned()));
        let context = client.attach_volume(NAMESPACE, "v", "node-1", anywhere()).await.unwrap();
        client.attach_volume(NAMESPACE, "v", "node-2", anywhere()).await.unwrap();
        let attached = || MountOptions {
            access_mode: Some(AccessMode::MultiNodeMultiWriter),
            publish_context: Some(context.clone()),
            ..inline("v")
        };
        let source = mounted(&client, "job", attached()).await;
        renamed(w, &client, "node-2", &["node-1", "node-3"]).await;
        kernel_unmount(&source, UnmountFlags::empty()).unwrap();
        mount(&client, "job", attached()).await.unwrap();
        assert_eq!(w.plugin("p").count("NodeStageVolume", "v"), 2);
        renamed(w, &client, "node-3", &["node-1", "node-2"]).await;
        let detach = |node| client.detach_volume(NAMESPACE, "v", node, Default::default());
        for node in ["node-1", "node-2"] {
            let (kind, error) = refusal(detach(node).await);
            assert_eq!((kind, &error.details.holders), (Kind::Busy, &vec!["job".to_owned()]), "{node}");
            let is_disputed = error.details.obstacle.as_deref() == Some("node-id");
            assert_eq!(is_disputed, node == "node-1", "{}", error.message);
        }
        client.accept_node_id("p", "node-3", Default::default()).await.unwrap();
        assert_eq!(refusal(detach("node-2").await).0, Kind::Busy);
        assert_eq!(w.plugin("p").count("ControllerUnpublishVolume", "v"), 0);
        detach("node-1").await.expect("nothing is staged under it any more");
        unmount(&client, "v", "job").await.unwrap();
        detach("node-2").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// A plugin without staging publishes a second mount. The first one stays published under its own node id.
#[test]
fn co_rule_23_rebound_mount_keeps_its_node_id() {
    alone(UNREGISTERED, async |w| {
        let client = attaching(w).await;
        w.plugin("p").set(|script| script.capabilities.retain(|can| can != "STAGE_UNSTAGE_VOLUME"));
        renamed(w, &client, "node-1", &["node-2"]).await;
        let context = client.attach_volume(NAMESPACE, "v", "node-1", writer()).await.unwrap();
        let target = w.path("targets/t");
        std::fs::create_dir(&target).unwrap();
        let attached = || MountOptions {
            publish_context: Some(context.clone()),
            target: Some(target.to_str().unwrap().to_owned()),
            restore: Some(csid_client::Restore::Auto),
            ..inline("v")
        };
        mount(&client, "job", attached()).await.unwrap();
        renamed(w, &client, "node-2", &["node-1"]).await;
        w.kill();
        kernel_unmount(&target, UnmountFlags::empty()).unwrap();
        let client = w.start().await;
        eventually("it is bound again", async || state(&client, "v", "job").await == "mounted").await;
        assert_eq!(w.plugin("p").count("NodePublishVolume", "v"), 1);
        let detach = || client.detach_volume(NAMESPACE, "v", "node-1", Default::default());
        assert_eq!(refusal(detach().await).0, Kind::Busy);
        unmount(&client, "v", "job").await.unwrap();
        detach().await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// A detach was on its way: what it is of is not forgotten for want of a plugin that attaches.
#[test]
fn possible_attachment_outlives_lost_capability() {
    alone(UNREGISTERED, async |w| {
        let client = attaching(w).await;
        w.plugin("p").rules([
            Rule::once("ControllerPublishVolume", Act::FailAfter(9)),
            Rule::always("ControllerUnpublishVolume", Act::Fail(14)),
        ]);
        let soon = AttachOptions { deadline_usec: Some(1_000_000), ..writer() };
        client.attach_volume(NAMESPACE, "v", "node-2", soon).await.expect_err("it is refused");
        assert!(w.plugin("p").count("ControllerUnpublishVolume", "v") > 0, "it is to be detached");
        w.kill();
        w.honest();
        w.plugin("p").set(|script| script.control(&["CREATE_DELETE_VOLUME"]));
        w.plugin("p").kill();
        w.plugin("p").start().await;
        let client = w.start().await;
        healthy(&client, "p").await;
        let detach = || client.detach_volume(NAMESPACE, "v", "node-2", Default::default());
        detach().await.expect_err("it cannot be detached");
        client.explain(NAMESPACE, "v", CallOptions::default()).await.expect("it is not forgotten");
        w.plugin("p").set(|script| script.control(ATTACH));
        w.plugin("p").kill();
        eventually("it is missed", async || !client.plugin("p").await.unwrap().healthy).await;
        w.plugin("p").start().await;
        healthy(&client, "p").await;
        detach().await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// A node that is called otherwise since has the volume staged all the same.
#[test]
fn co_rule_23_staged_under_old_id_is_not_detached() {
    alone(UNREGISTERED, async |w| {
        let client = attaching(w).await;
        let context = client.attach_volume(NAMESPACE, "v", "node-1", writer()).await.unwrap();
        let attached = MountOptions { publish_context: Some(context), ..inline("v") };
        mount(&client, "job", attached).await.unwrap();
        w.kill();
        w.plugin("p").set(|script| {
            script.node_id = "node-2".to_owned();
            script.others = vec!["node-1".to_owned()];
        });
        w.plugin("p").kill();
        w.plugin("p").start().await;
        let client = w.start().await;
        healthy(&client, "p").await;
        let detach = || client.detach_volume(NAMESPACE, "v", "node-1", Default::default());
        let (kind, error) = refusal(detach().await);
        assert_eq!((kind, error.details.holders), (Kind::Busy, vec!["job".to_owned()]));
        assert_eq!(w.plugin("p").count("ControllerUnpublishVolume", "v"), 0);
        unmount(&client, "v", "job").await.unwrap();
        detach().await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// csid is killed before it asks the controller. The plugin that it finds then cannot detach.
#[test]
fn never_attached_is_not_detached() {
    alone(UNREGISTERED, async |w| {
        let fault = Fault::of(w);
        let client = attaching(w).await;
        fault.arm("ControllerPublishVolume.before:1");
        client.attach_volume(NAMESPACE, "v", "node-2", writer()).await.expect_err("csid dies");
        eventually("csid dies", async || w.dead()).await;
        w.plugin("p").set(|script| script.control(&["CREATE_DELETE_VOLUME"]));
        w.plugin("p").kill();
        w.plugin("p").start().await;
        fault.disarm();
        let client = w.start().await;
        let client = is_forgotten(w, client).await;
        healthy(&client, "p").await;
        mount(&client, "job", inline("v")).await.expect("nobody has it");
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn inline_attach_takes_a_usage_without_capabilities() {
    alone(UNREGISTERED, async |w| {
        let client = attaching(w).await;
        let usage = AttachOptions { capabilities: None, ..writer() };
        let (kind, error) = refusal(client.attach_volume(NAMESPACE, "v", "node-2", usage.clone()).await);
        assert_eq!(kind, Kind::InvalidArgument, "neither is given: {error}");
        for (access_mode, attachment_mode) in [
            (Some(AccessMode::SingleNodeWriter), None),
            (Some(AccessMode::SingleNodeWriter), Some(AttachmentMode::FileSystem)),
            (None, Some(AttachmentMode::FileSystem)),
        ] {
            let usage = AttachOptions { access_mode, attachment_mode, ..usage.clone() };
            client.attach_volume(NAMESPACE, "v", "node-2", usage).await.unwrap();
            client.detach_volume(NAMESPACE, "v", "node-2", Default::default()).await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

fn forget() -> DetachOptions {
    DetachOptions { forget: Some(true), ..DetachOptions::default() }
}

/// Returns how many of csid's events say that an attachment was forgotten.
async fn forgotten(client: &Client) -> usize {
    let of_forget = |event: &csid_client::Event| {
        event.kind == "volume-detached" && event.details.contains_key("forgotten")
    };
    events(client, 0).await.iter().filter(|event| of_forget(event)).count()
}

/// Starts a DetachVolume from a node, and waits until csid has listed it at `step`.
async fn detaching(
    client: &Client,
    node: &'static str,
    id: &str,
    step: &str,
) -> tokio::task::JoinHandle<Result<()>> {
    detaching_with(client, node, id, step, DetachOptions::default()).await
}

async fn detaching_with(
    client: &Client,
    node: &'static str,
    id: &str,
    step: &str,
    options: DetachOptions,
) -> tokio::task::JoinHandle<Result<()>> {
    let (asking, named) = (client.clone(), DetachOptions { operation_id: Some(id.to_owned()), ..options });
    let detaching = tokio::spawn(async move { asking.detach_volume(NAMESPACE, "v", node, named).await });
    eventually("the caller waits", async || {
        let operations = client.list_operations().await.unwrap();
        operations.iter().any(|operation| operation.id == id && operation.step == step)
    })
    .await;
    detaching
}

/// The plugin answers neither the call of a caller nor that of the next csid.
#[test]
fn forget_ends_a_detach_without_an_answer() {
    if clustered::is_skipped(UNREGISTERED) {
        return;
    }
    world(async |w| {
        let client = attaching(w).await;
        client.attach_volume(NAMESPACE, "v", "node-2", writer()).await.unwrap();
        let rpc = "ControllerUnpublishVolume";
        w.plugin("p").rules([Rule::always(rpc, Act::Hold)]);
        let first = detaching(&client, "node-2", "first", "detach").await;
        eventually("the plugin has the call", async || w.plugin("p").count(rpc, "v") == 1).await;
        let (kind, error) = refusal(client.attach_volume(NAMESPACE, "v", "node-2", within(300)).await);
        assert_eq!(kind, Kind::TimedOut, "{error}");
        w.kill();
        assert!(first.await.unwrap().is_err(), "csid was killed");
        let client = w.start().await;
        eventually("the plugin has csid's own call", async || w.plugin("p").count(rpc, "v") == 2).await;
        let second = detaching(&client, "node-2", "second", "queued").await;
        let (kind, error) = refusal(client.detach_volume(NAMESPACE, "v", "node-1", forget()).await);
        assert_eq!(kind, Kind::NotFound, "{error}");
        assert!(!second.is_finished() && forgotten(&client).await == 0);
        client.detach_volume(NAMESPACE, "v", "node-2", forget()).await.unwrap();
        assert_eq!(refusal(second.await.unwrap()).0, Kind::Cancelled);
        assert_eq!(forgotten(&client).await, 1);
        let client = is_forgotten(w, client).await;
        assert_eq!(w.plugin("p").count(rpc, "v"), 2, "the plugin is asked no more");
        w.honest();
        healthy(&client, "p").await;
        client.attach_volume(NAMESPACE, "v", "node-2", writer()).await.unwrap();
        w.plugin("p").rules([Rule::always(rpc, Act::Hold)]);
        let third = detaching(&client, "node-2", "third", "detach").await;
        client.detach_volume(NAMESPACE, "v", "node-2", forget()).await.unwrap();
        assert_eq!(refusal(third.await.unwrap()).0, Kind::Cancelled);
        assert_eq!(forgotten(&client).await, 2);
        w.honest();
        // The plugin may have it attached; csid does not know.
        client.attach_volume(NAMESPACE, "v", "node-2", writer()).await.unwrap();
        client.detach_volume(NAMESPACE, "v", "node-2", Default::default()).await.unwrap();
        forgets_another_node(w, &client).await;
        w.nothing_left(&client).await;
    });
}

/// csid waits for the plugin's answer about one node. A forget of another node ends the detaches that were asked for before it.
async fn forgets_another_node(w: &mut World, client: &Client) {
    let forgotten_before = forgotten(client).await;
    for node in ["node-1", "node-2"] {
        client.attach_volume(NAMESPACE, "v", node, anywhere()).await.unwrap();
    }
    w.plugin("p").rules([Rule::always("ControllerUnpublishVolume", Act::Hold)]);
    let running = detaching(client, "node-1", "running", "detach").await;
    let before = detaching(client, "node-2", "before", "queued").await;
    client.detach_volume(NAMESPACE, "v", "node-2", forget()).await.unwrap();
    assert_eq!(refusal(before.await.unwrap()).0, Kind::Cancelled);
    // The name alone means only what csid knows to be attached.
    let given = DetachOptions {
        plugin: Some("p".to_owned()),
        external_id: Some("v".to_owned()),
        ..DetachOptions::default()
    };
    let after = detaching_with(client, "node-2", "after", "queued", given).await;
    assert!(!running.is_finished() && !after.is_finished());
    w.honest();
    running.await.unwrap().unwrap();
    after.await.unwrap().unwrap();
    assert_eq!(forgotten(client).await, forgotten_before + 1);
}

fn within(milliseconds: u64) -> AttachOptions {
    AttachOptions { deadline_usec: Some(milliseconds * 1000), ..writer() }
}

/// The plugin answers neither the attach nor its rollback.
#[test]
fn forget_ends_an_attach_without_an_answer() {
    alone(UNREGISTERED, async |w| {
        let client = attaching(w).await;
        let held = ["ControllerPublishVolume", "ControllerUnpublishVolume"];
        w.plugin("p").rules(held.map(|rpc| Rule::always(rpc, Act::Hold)));
        let asking = client.clone();
        let attaching =
            tokio::spawn(async move { asking.attach_volume(NAMESPACE, "v", "node-2", writer()).await });
        eventually("the plugin has the call", async || {
            w.plugin("p").count("ControllerPublishVolume", "v") == 1
        })
        .await;
        client.detach_volume(NAMESPACE, "v", "node-2", forget()).await.unwrap();
        assert_eq!(refusal(attaching.await.unwrap()).0, Kind::Cancelled);
        assert_eq!(forgotten(&client).await, 1);
        let client = is_forgotten(w, client).await;
        w.honest();
        healthy(&client, "p").await;
        // The plugin may have it attached; csid does not know.
        client.attach_volume(NAMESPACE, "v", "node-2", writer()).await.unwrap();
        client.detach_volume(NAMESPACE, "v", "node-2", Default::default()).await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// A detach that the plugin refuses for good rests until a caller repeats it.
#[test]
fn forget_ends_a_detach_at_rest() {
    alone(UNREGISTERED, async |w| {
        let client = attaching(w).await;
        client.attach_volume(NAMESPACE, "v", "node-2", writer()).await.unwrap();
        w.plugin("p").rules([Rule::always("ControllerUnpublishVolume", Act::Fail(9))]);
        let detach = |options| client.detach_volume(NAMESPACE, "v", "node-2", options);
        assert_eq!(refusal(detach(Default::default()).await).0, Kind::PluginError);
        let inline =
            DetachOptions { plugin: Some("p".to_owned()), external_id: Some("v".to_owned()), ..forget() };
        assert_eq!(refusal(detach(inline).await).0, Kind::InvalidArgument);
        let calls = w.plugin("p").count("ControllerUnpublishVolume", "v");
        detach(forget()).await.unwrap();
        assert_eq!(w.plugin("p").count("ControllerUnpublishVolume", "v"), calls);
        is_forgotten(w, client.clone()).await;
    });
}

#[test]
fn forget_refuses_an_attachment_staged_here() {
    alone(UNREGISTERED, async |w| {
        let client = attaching(w).await;
        let context = client.attach_volume(NAMESPACE, "v", "node-1", writer()).await.unwrap();
        let attached = MountOptions { publish_context: Some(context), ..inline("v") };
        mount(&client, "job", attached).await.unwrap();
        let (kind, error) = refusal(client.detach_volume(NAMESPACE, "v", "node-1", forget()).await);
        assert_eq!((kind, error.details.holders), (Kind::Busy, vec!["job".to_owned()]));
        unmount(&client, "v", "job").await.unwrap();
        client.detach_volume(NAMESPACE, "v", "node-1", Default::default()).await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// Another manager has the volume attached to the node with other arguments. The plugin says so by ALREADY_EXISTS.
#[test]
fn another_managers_attachment_is_not_detached() {
    alone(UNREGISTERED, async |w| {
        let client = attaching(w).await;
        w.plugin("p").rules([Rule::always("ControllerPublishVolume", Act::Fail(6))]);
        let (kind, error) = refusal(client.attach_volume(NAMESPACE, "v", "node-2", writer()).await);
        assert_eq!((kind, error.details.grpc_code), (Kind::PluginError, Some(6)), "{error}");
        let client = is_forgotten(w, client).await;
        assert_eq!(w.plugin("p").count("ControllerUnpublishVolume", "v"), 0, "csid did not attach it");

        // An earlier try without an answer may have attached it.
        let unanswered = Rule::once("ControllerPublishVolume", Act::FailAfter(13));
        w.plugin("p")
            .rules([unanswered, Rule { from: 2, ..Rule::always("ControllerPublishVolume", Act::Fail(6)) }]);
        let (kind, error) = refusal(client.attach_volume(NAMESPACE, "v", "node-2", writer()).await);
        assert_eq!((kind, error.details.grpc_code), (Kind::PluginError, Some(6)), "{error}");
        let client = is_forgotten(w, client).await;
        assert_eq!(w.plugin("p").count("ControllerUnpublishVolume", "v"), 1);
        w.nothing_left(&client).await;
    });
}
