//! Nodes that lie about controllers and their calls.

use std::time::Duration;

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{
    Answer, BlockAsk, CallClass, CallEnded, ClaimAsk, FromNode, NodeChange, Owed, PluginReport, StatusAsk,
    from_node, to_node,
};

use crate::attach::{
    Controller, attached, claiming, failed, healthy, is_publish, node_id, row, user, user_named,
};
use crate::operators::{csictl, operator};
use crate::site::{First, Refusal, Site, eventually, register};

#[tokio::test]
async fn node_without_the_grant_is_no_controller() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let (n1, mut session) = user(&site, "n1", 0).await;
    // It has a controller that attaches, and no grant.
    session.report_as(PluginReport { node_id: "id of n1".into(), ..healthy() }).await;
    eventually("the report is written", async || row(&site, "node/n1").await.contains("\"attaches\":true"))
        .await;
    let refused = claiming(&n1, 0, "data").await.unwrap().unwrap_err();
    assert!(refused.message.contains("no node with the grant controller:"), "{refused:?}");
    assert!(row(&site, "plugin/").await.is_empty(), "a node without the grant is a controller");
    let mut controller = Controller::start(&site, "c1", 0).await;
    let claim = claiming(&n1, 0, "data");
    let call = controller.called().await;
    // The stranger's answer to the call.
    let forged = CallEnded { call: call.call.clone(), epoch: call.epoch, how: Some(attached("/dev/forged")) };
    let is = Some(from_node::Is::Ended(forged));
    session.to_server.send(FromNode { is }).await.unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(row(&site, "vol/default/data/claim").await.contains("\"state\":\"pending\""));
    controller.end(&call, attached("/dev/x")).await;
    assert_eq!(claim.await.unwrap().unwrap().publish_context["device"], "/dev/x");
}

#[tokio::test]
async fn lie_about_the_end_of_a_call_counts_for_nothing() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controllers = [Controller::start(&site, "c1", 0).await, Controller::start(&site, "c2", 0).await];
    let (n1, _one) = user(&site, "n1", 0).await;
    let claim = claiming(&n1, 0, "data");
    let call = {
        let [one, two] = &mut controllers;
        tokio::select! { call = one.called() => (0, call), call = two.called() => (1, call) }
    };
    let (called, call) = call;
    let (host, other) = (&controllers[called], &controllers[1 - called]);
    let good = || CallEnded { call: call.call.clone(), epoch: call.epoch, how: Some(attached("/dev/lie")) };
    other.say(good()).await;
    for lie in [
        CallEnded { epoch: call.epoch - 1, ..good() },
        CallEnded { epoch: call.epoch + 1, ..good() },
        CallEnded { epoch: 0, ..good() },
        CallEnded { call: String::new(), ..good() },
        CallEnded { call: "x".repeat(100_000), ..good() },
    ] {
        host.say(lie).await;
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let pending = row(&site, "vol/default/data/claim").await;
    assert!(pending.contains("\"state\":\"pending\""), "a lie ended the call: {pending}");
    host.say(CallEnded { how: Some(attached("/dev/x")), ..good() }).await;
    // Its end comes twice.
    host.say(good()).await;
    assert_eq!(claim.await.unwrap().unwrap().publish_context["device"], "/dev/x");
}

/// A host that lies so has the volume attached where no server knows it. No node was granted the volume by that, and none has it without a call.
#[tokio::test]
async fn lie_that_no_call_was_made_grants_nothing() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let (n2, _two) = user(&site, "n2", 0).await;
    let withheld = || failed(CallClass::Withheld);
    for lie in [How::NotStarted(true), How::Stale(true), failed(CallClass::NotSent), withheld()] {
        let what = format!("{lie:?}");
        let is_withheld = matches!(&lie, How::Failed(of) if of.class == i32::from(CallClass::Withheld));
        let claim = claiming(&n1, 0, "data");
        let call = controller.called().await;
        assert_eq!(node_id(&call), "id of n1", "{what}");
        // The plugin has attached the volume to n1.
        controller.end(&call, lie).await;
        if is_withheld {
            let refused = claim.await.unwrap().unwrap_err();
            assert_eq!(refused.kind, "PluginError", "{what}: {refused:?}");
        } else {
            // The call is made again: a claim is granted by an answer alone.
            let again = controller.called().await;
            assert!(is_publish(&again) && again.epoch > call.epoch, "{what}: {again:?}");
            assert!(!claim.is_finished(), "{what}");
            claim.abort();
            let owed = Owed { call: "call 1".into(), ..n1.owed("data", "") };
            n1.client(0).detached(owed).await.unwrap();
            controller.end(&again, How::NotStarted(true)).await;
            // The answer to the first call comes after all. It is of no call that waits.
            let late = CallEnded { call: call.call, epoch: call.epoch, how: Some(attached("/dev/lie")) };
            controller.say(late).await;
        }
        free(&site).await;
        // n2 has the volume by a call of its own, and n1 is granted nothing meanwhile.
        let second = claiming(&n2, 0, "data");
        assert_eq!(node_id(&controller.publish().await), "id of n2", "{what}");
        let granted = second.await.unwrap().unwrap();
        let refused = claiming(&n1, 0, "data").await.unwrap().unwrap_err();
        assert_eq!(refused.holders, ["n2/web"], "{what}");
        // A detach that was not made, by the host's word, is made again. n2 keeps others out until then.
        n2.detached(0, "data", &granted.claim).await.unwrap();
        let call = controller.called().await;
        assert!(!is_publish(&call), "{what}: {call:?}");
        controller.end(&call, How::NotStarted(true)).await;
        let refused = claiming(&n1, 0, "data").await.unwrap().unwrap_err();
        assert_eq!(refused.holders, ["n2/web"], "{what}");
        controller.unpublish().await;
        free(&site).await;
    }
}

/// The plugin has refused nothing, and a refused detach is a lie. The claim stays, and keeps others out.
#[tokio::test]
async fn lie_that_a_detach_is_refused_frees_nothing() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let (n2, _two) = user(&site, "n2", 0).await;
    let claim = claiming(&n1, 0, "data");
    controller.publish().await;
    let granted = claim.await.unwrap().unwrap();
    n1.detached(0, "data", &granted.claim).await.unwrap();
    let call = controller.called().await;
    controller.end(&call, failed(CallClass::Withheld)).await;
    let mut admin = site.admin(0, "all");
    eventually("the detach is given up", async || {
        admin.status(StatusAsk {}).await.unwrap().into_inner().parked == 1
    })
    .await;
    let refused = claiming(&n2, 0, "data").await.unwrap().unwrap_err();
    assert_eq!(refused.holders, ["n1/web"]);
    assert!(row(&site, "vol/default/data/claim").await.contains("node-detached"));
}

async fn free(site: &Site) {
    eventually("the claim is free", async || row(site, "vol/default/data/claim").await.is_empty()).await;
}

/// What a controller's node answers is bounded, and what it says is not believed to be words.
#[tokio::test]
async fn answer_that_is_too_large_is_refused() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let claim = claiming(&n1, 0, "data");
    let call = controller.called().await;
    let huge = [("k".to_owned(), "x".repeat(30_000))].into();
    controller.end(&call, How::Answer(Answer { publish_context: huge, ..Answer::default() })).await;
    controller.unpublish().await;
    let refused = claim.await.unwrap().unwrap_err();
    assert!(refused.message.contains("publish context"), "{refused:?}");
    free(&site).await;

    let claim = claiming(&n1, 0, "data");
    let call = controller.called().await;
    let How::Failed(mut failure) = failed(CallClass::Refused) else { unreachable!() };
    (failure.kind, failure.message) = ("no kind".into(), format!("a\nb{}", "y".repeat(100_000)));
    controller.end(&call, How::Failed(failure)).await;
    controller.unpublish().await;
    let refused = claim.await.unwrap().unwrap_err();
    assert_eq!(refused.kind, "PluginError");
    assert!(refused.message.len() < 3000 && !refused.message.contains('\n'), "{}", refused.message.len());
    free(&site).await;

    // No word at all: the call may have been made.
    let claim = claiming(&n1, 0, "data");
    let call = controller.called().await;
    controller.say(CallEnded { call: call.call, epoch: call.epoch, how: None }).await;
    controller.unpublish().await;
    controller.publish().await;
    claim.await.unwrap().unwrap();
}

/// A detach under the other node's name would be of its volume.
#[tokio::test]
async fn node_with_anothers_name_is_not_attached() {
    let site = Site::start(1).await;
    site.register("shared", "multi-node-multi-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let (n2, _two) = user_named(&site, "n2", 0, "id of n1").await;
    let ask = |node: &crate::site::Node| {
        let mut ask = node.ask("shared", "web");
        ask.r#use.as_mut().unwrap().access_mode = "multi-node-multi-writer".into();
        ask
    };
    let (mut client, first) = (n1.client(0), ask(&n1));
    let claim = tokio::spawn(async move { client.claim(first).await });
    controller.publish().await;
    claim.await.unwrap().unwrap();
    let refused = Refusal::of(&n2.client(0).claim(ask(&n2)).await.unwrap_err());
    assert_eq!(refused.kind, "NotAuthorized", "{refused:?}");
    assert!(!controller.is_called(Duration::from_millis(500)).await);
    assert!(row(&site, "vol/default/shared/claim/n2").await.is_empty());
}

/// Under another name, another node could be attached or detached.
#[tokio::test]
async fn nodes_other_name_waits_for_an_operator() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, mut session) = user(&site, "n1", 0).await;
    session.report_name("id of n2").await;
    eventually("the report is written", async || row(&site, "node/n1").await.contains("other-node-id")).await;
    let refused = claiming(&n1, 0, "data").await.unwrap().unwrap_err();
    assert_eq!(refused.kind, "NotAuthorized", "{refused:?}");
    assert!(refused.message.contains("\"id of n2\""), "{refused:?}");
    assert!(!controller.is_called(Duration::from_millis(500)).await);
    // The plugin leaves meanwhile.
    session.report_as(PluginReport { plugin: "q".into(), ..PluginReport::default() }).await;
    eventually("the report is written", async || !row(&site, "node/n1").await.contains("other-node-id"))
        .await;
    session.report_name("id of n2").await;
    eventually("the report is written", async || row(&site, "node/n1").await.contains("other-node-id")).await;
    let said = csictl(&operator(&site, "all"), "node accept n1").await;
    assert_eq!(said.code, Some(0), "{said:?}");
    let claim = claiming(&n1, 0, "data");
    assert_eq!(node_id(&controller.publish().await), "id of n2");
    claim.await.unwrap().unwrap();
}

#[tokio::test]
async fn controller_counts_in_its_namespaces_alone() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "shared-ctl", 0).await;
    // The plugin of n1 attaches nothing, and has no controller in the namespace.
    let (n1, _one) = user(&site, "n1", 0).await;
    let granted = claiming(&n1, 0, "data").await.unwrap().unwrap();
    assert!(granted.publish_context.is_empty() && granted.external_node_id.is_empty(), "{granted:?}");
    let mut ask = register("other", "single-node-writer");
    let Some(What::Register(of)) = &mut ask.what else { unreachable!() };
    of.namespace = "shared".into();
    site.operator(0, "all").change(ask).await.unwrap();
    let (mut client, ask) = (n1.client(0), ClaimAsk { namespace: "shared".into(), ..n1.ask("other", "web") });
    let claim = tokio::spawn(async move { client.claim(ask).await });
    assert_eq!(controller.publish().await.namespace, "shared");
    claim.await.unwrap().unwrap();
}

/// Each server ends the session by itself, and not at once.
#[tokio::test]
async fn blocked_controller_is_sent_no_call_by_any_server() {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    site.register("more", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 1).await;
    let (n1, _one) = user(&site, "n1", 1).await;
    let claim = claiming(&n1, 1, "data");
    let granted = (controller.publish().await, claim.await.unwrap().unwrap()).1;
    let block = Change::Block(BlockAsk { reason: "stolen".into() });
    let block = NodeChange { node: "c1".into(), change: Some(block) };
    site.admin(0, "all").set_node(block).await.unwrap();
    n1.detached(1, "data", &granted.claim).await.unwrap();
    loop {
        let next = tokio::time::timeout(Duration::from_secs(20), controller.session.from_server.message());
        match next.await.expect("the session goes on") {
            Ok(Some(message)) => assert!(!matches!(message.is, Some(to_node::Is::Call(_))), "{message:?}"),
            Ok(None) | Err(_) => break,
        }
    }
    assert!(row(&site, "vol/default/data/claim").await.contains("node-detached"));
    // n1's plugin says that it attaches nothing. Only the controller's word counts, also while it is blocked.
    let waits = n1.client(1).claim(n1.ask("more", "web")).await.expect_err("granted without an attachment");
    assert_eq!(Refusal::of(&waits).kind, "TimedOut");
}

#[tokio::test]
async fn lie_about_a_nodes_name_ends_the_session() {
    let site = Site::start(1).await;
    let node = site.node("n1");
    for node_id in ["x".repeat(257), "a\nb".into()] {
        let (first, mut session) = node.say_hello(0).await.unwrap();
        assert!(matches!(first, First::Welcome(_)));
        session.report_name(&node_id).await;
        assert_eq!(session.next().await.unwrap_err().kind, "InvalidArgument");
    }
}
