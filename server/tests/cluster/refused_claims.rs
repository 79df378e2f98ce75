//! What is mounted for a claim that was refused in a recovery stays attached when the cluster is normal.

use std::time::Duration;

use csi_proto::cluster::v1::{CallClass, ClaimAsk, Granted, HeldClaim, ReleaseAsk};
use serde_json::Value;
use tokio::task::JoinHandle;

use crate::attach::{Controller, attached, failed, is_publish, row, user};
use crate::operators::{csictl, operator};
use crate::recovery::{claims, forget, held, hold, page, restored, resumed, try_hold, welcome, writing};
use crate::site::{Node, Refusal, Session, Site, eventually, release_ask};

/// Returns a cluster after a restore, in which a claim of `web` on n1 was refused and forgotten. Its volume is mounted there. `is_known`: etcd has the
/// claim.
async fn with_refused_claim(servers: usize, is_known: bool) -> (Site, Controller, Node, Session) {
    let site = Site::start(servers).await;
    site.register("data", "single-node-multi-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (node, session) = user(&site, "n1", 0).await;
    let mut said = HeldClaim {
        usage: Some(writing("single-node-multi-writer")),
        external_node_id: "an earlier id".into(),
        ..held(&node, "data", "web")
    };
    if is_known {
        let claim = claiming_as(&node, 0, "web");
        controller.publish().await;
        said.claim = claim.await.unwrap().unwrap().claim;
    }
    drop(session);
    restored(&site, 0, 1).await.unwrap();
    controller.join_again(0).await;
    hold(&controller.node, 0, page(&controller.node, 2, vec![], true)).await.unwrap();
    let (_, mut session) = welcome(&node, 0).await;
    session.report_name("id of n1").await;
    let refused = try_hold(&node, 0, page(&node, 2, vec![said], true)).await.unwrap();
    assert!(refused.len() == 1 && refused[0].why.contains("under another name"), "{refused:?}");
    forget(&site, "n1").await;
    resumed(&site, 2).await;
    drop(session);
    controller.join_again(0).await;
    let (_, mut session) = welcome(&node, 0).await;
    session.report_name("id of n1").await;
    (site, controller, node, session)
}

/// Claims the volume of several writers for a consumer, in a task.
fn claiming_as(node: &Node, server: usize, consumer: &str) -> JoinHandle<Result<Granted, Refusal>> {
    let usage = Some(writing("single-node-multi-writer"));
    let ask = ClaimAsk { r#use: usage, ..node.ask("data", consumer) };
    let mut client = node.client(server);
    tokio::spawn(async move {
        loop {
            let granted = client.claim(ask.clone()).await.map_err(|status| Refusal::of(&status));
            match granted {
                // As csid does.
                Err(refusal) if refusal.kind == "TimedOut" => {}
                granted => return granted.map(tonic::Response::into_inner),
            }
        }
    })
}

#[tokio::test]
async fn failed_attach_after_a_refusal_is_not_undone() {
    for is_known in [false, true] {
        let (site, mut controller, node, _session) = with_refused_claim(1, is_known).await;
        let claim = claiming_as(&node, 0, "other");
        let call = controller.called().await;
        assert!(is_publish(&call), "{call:?}");
        controller.end(&call, failed(CallClass::Refused)).await;
        assert_eq!(claim.await.unwrap().unwrap_err().kind, "PluginError");
        if is_known {
            // The claim that etcd has is attached once more.
            let again = controller.called().await;
            assert!(is_publish(&again), "the volume is detached under a mount: {again:?}");
            controller.end(&again, attached("/dev/x")).await;
            eventually("the other claim has ended", async || claims(&site, "data").await == ["n1/web"]).await;
            assert!(!controller.is_called(Duration::from_secs(3)).await);
            continue;
        }
        assert!(!controller.is_called(Duration::from_secs(8)).await, "the volume is detached under a mount");
        assert!(row(&site, "vol/default/data/at/n1").await.contains("\"making\""));
        let file = operator(&site, "all");
        let found: Value = serde_json::from_str(&csictl(&file, "server audit --json").await.out).unwrap();
        assert_eq!(found[0]["kind"], "detach-waits-for-operator", "{found}");
        let explained = csictl(&file, "--operator explain default data").await;
        assert!(explained.out.contains("release default data other --node n1 --force"), "{explained:?}");
        // A release without force is no word for a detach.
        let release = ReleaseAsk { consumer: "other".into(), deadline_ms: 1000, ..release_ask("data", "n1") };
        let waits = Refusal::of(&site.operator(0, "all").release(release.clone()).await.unwrap_err());
        assert_eq!(waits.kind, "TimedOut", "{waits:?}");
        // Another consumer may have the volume attached once more.
        let claim = claiming_as(&node, 0, "third");
        controller.publish().await;
        claim.await.unwrap().unwrap();
        eventually("the failed claim has ended", async || claims(&site, "data").await == ["n1/third"]).await;
        assert!(!controller.is_called(Duration::from_secs(3)).await, "the volume is detached under a mount");
    }
}

/// The call has no answer, and its server dies. The next server waits for the call, makes it again, and is refused.
#[tokio::test]
async fn lost_attach_after_a_refusal_is_not_undone() {
    let (mut site, mut controller, node, session) = with_refused_claim(2, false).await;
    let claim = claiming_as(&node, 0, "other");
    let call = controller.called().await;
    assert!(is_publish(&call), "{call:?}");
    site.servers[0].kill();
    drop((session, claim));
    controller.join_again(1).await;
    let (_, mut session) = welcome(&node, 1).await;
    session.report_name("id of n1").await;
    let claim = claiming_as(&node, 1, "other");
    let again = controller.called_within(Duration::from_secs(60)).await;
    assert!(
        is_publish(&again) && again.epoch > call.epoch,
        "the volume is detached under a mount: {again:?}"
    );
    controller.end(&again, failed(CallClass::Refused)).await;
    assert_eq!(claim.await.unwrap().unwrap_err().kind, "PluginError");
    assert!(!controller.is_called(Duration::from_secs(8)).await, "the volume is detached under a mount");
    // The operator has looked at the node.
    let release = ReleaseAsk { consumer: "other".into(), force: true, ..release_ask("data", "n1") };
    let mut client = site.operator(1, "all");
    let release = tokio::spawn(async move { client.release(release).await });
    controller.unpublish().await;
    release.await.unwrap().unwrap();
    assert!(claims(&site, "data").await.is_empty());
}

/// The plugin has another name for the node now. Only a detach by the earlier one would end the attachment.
#[tokio::test]
async fn renamed_node_after_a_refusal_is_not_detached() {
    let (site, mut controller, node, mut session) = with_refused_claim(1, true).await;
    session.report_name("a later id").await;
    eventually("its name is refused", async || row(&site, "node/n1").await.contains("other-node-id")).await;
    let file = operator(&site, "all");
    assert_eq!(csictl(&file, "node accept n1").await.code, Some(0));
    let claim = claiming_as(&node, 0, "other");
    eventually("the other claim waits", async || claims(&site, "data").await.len() == 2).await;
    assert!(!controller.is_called(Duration::from_secs(8)).await, "the volume is detached under a mount");
    assert!(row(&site, "vol/default/data/at/n1").await.contains("\"present\""));
    claim.abort();
    // It was never granted, so its end detaches nothing, either.
    let release = ReleaseAsk { consumer: "other".into(), ..release_ask("data", "n1") };
    site.operator(0, "all").release(release).await.unwrap();
    assert_eq!(claims(&site, "data").await, ["n1/web"]);
    assert!(!controller.is_called(Duration::from_secs(3)).await, "the volume is detached under a mount");
}

/// Nothing of an earlier boot is mounted.
#[tokio::test]
async fn failed_attach_after_a_reboot_is_undone() {
    let (site, mut controller, mut node, session) = with_refused_claim(1, false).await;
    drop(session);
    let mut session = node.reboot(0).await;
    session.report_name("id of n1").await;
    let claim = claiming_as(&node, 0, "other");
    let call = controller.called().await;
    controller.end(&call, failed(CallClass::Refused)).await;
    controller.unpublish().await;
    assert_eq!(claim.await.unwrap().unwrap_err().kind, "PluginError");
    eventually("nothing is left", async || claims(&site, "data").await.is_empty()).await;
}
