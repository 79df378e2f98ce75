//! Servers and controllers that die in a controller call.

use std::time::{Duration, Instant};

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{
    BlockAsk, CallClass, CallEnded, FromNode, Granted, NodeChange, PluginReport, from_node,
};
use rustix::process::Signal;
use tokio::task::JoinHandle;

use crate::attach::{Controller, attached, claiming, failed, head, healthy, is_publish, row, user};
use crate::fault::Fault;
use crate::site::{First, Node, Refusal, Session, Site, eventually};

#[tokio::test]
async fn lost_controller_detaches_first_when_it_is_back() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let claim = claiming(&n1, 0, "data");
    let lost = controller.called().await;
    controller.join_again(0).await;
    // The answer to the lost call comes in the new session.
    controller.end(&lost, attached("/dev/late")).await;
    let undo = controller.called().await;
    assert!(!is_publish(&undo) && undo.epoch > lost.epoch, "{undo:?}");
    let at = row(&site, "vol/default/data/at/n1").await;
    assert!(at.contains("\"leg\":\"removing\"") && !at.contains("late"), "{at}");
    controller.end(&undo, attached("")).await;
    let call = controller.publish().await;
    assert!(call.epoch > undo.epoch);
    assert_eq!(claim.await.unwrap().unwrap().publish_context["device"], "/dev/x");
}

/// A call without an answer may still run on its node.
#[tokio::test]
async fn other_controller_is_called_when_the_time_is_over() {
    let site = Site::start_with(1, "controller-seconds = 10").await;
    site.register("data", "single-node-writer").await;
    let (mut one, mut two) =
        (Controller::start(&site, "c1", 0).await, Controller::start(&site, "c2", 0).await);
    let (n1, _one) = user(&site, "n1", 0).await;
    let claim = claiming(&n1, 0, "data");
    // The same of the two is chosen each time.
    let first = tokio::select! { call = one.called() => (call, 1), call = two.called() => (call, 2) };
    let (lost, mut other) = match first {
        (call, 1) => (call, two),
        (call, _) => {
            std::mem::swap(&mut one, &mut two);
            (call, two)
        }
    };
    // It comes back, and still runs the call. Its plugin is not healthy any more.
    one.join_again(0).await;
    let late = one.called().await;
    one.end(&late, How::NotStarted(true)).await;
    one.session.report_as(PluginReport { controller: false, ..healthy() }).await;
    let begun = Instant::now();
    let undo = other.called_within(Duration::from_secs(60)).await;
    // 10 s to begin, and 10 s for the plugin.
    assert!(begun.elapsed() > Duration::from_secs(19), "another node was called after {:?}", begun.elapsed());
    assert!(!is_publish(&undo) && lost.epoch < late.epoch && late.epoch < undo.epoch);
    other.end(&undo, attached("")).await;
    other.publish().await;
    claim.await.unwrap().unwrap();
}

/// Kills the server that has sent the call, or is about to.
#[tokio::test]
async fn call_of_a_killed_server_is_driven_on() {
    let mut site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 1).await;
    let claim = claiming(&n1, 1, "data");
    let lost = controller.called().await;
    site.servers[0].kill();
    let begun = Instant::now();
    controller.join_again(1).await;
    let undo = controller.called_within(Duration::from_secs(30)).await;
    assert!(begun.elapsed() < Duration::from_secs(20), "it took {:?}", begun.elapsed());
    assert!(!is_publish(&undo) && undo.epoch > lost.epoch, "{undo:?}");
    controller.end(&undo, attached("")).await;
    controller.publish().await;
    claim.await.unwrap().unwrap();
}

/// The server is killed when the answer has come. etcd may get the outcome all the same.
#[tokio::test]
async fn outcome_that_was_not_written_is_unknown() {
    let mut site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 1).await;
    let claim = claiming(&n1, 1, "data");
    let lost = controller.called().await;
    site.etcd.members[0].signal(Signal::STOP);
    // On a busy machine etcd's threads do not stand still at once, and could write the outcome.
    tokio::time::sleep(Duration::from_millis(200)).await;
    controller.end(&lost, attached("/dev/lost")).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    site.servers[0].kill();
    site.etcd.members[0].signal(Signal::CONT);
    controller.join_again(1).await;
    let mut claim = claim;
    let granted = tokio::select! {
        // What the dead server sent to etcd may be there: its outcome, too.
        granted = &mut claim => granted,
        next = controller.called_within(Duration::from_secs(40)) => {
            match is_publish(&next) {
                true => controller.end(&next, attached("/dev/next")).await,
                false => {
                    controller.end(&next, attached("")).await;
                    controller.publish().await;
                }
            }
            claim.await
        }
    };
    let granted = granted.unwrap().unwrap();
    let at = row(&site, "vol/default/data/at/n1").await;
    assert!(at.contains(&granted.publish_context["device"]) && at.contains("\"leg\":\"present\""), "{at}");
}

/// The server died between the intent and the call.
#[tokio::test]
async fn intent_of_a_server_that_is_gone_is_unknown() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let claim = claiming(&n1, 0, "data");
    controller.publish().await;
    let granted = claim.await.unwrap().unwrap();
    // The state that the dead server leaves.
    let mut raw = site.raw().await;
    let before = head(&site, "data").await;
    let driver = r#"{"driver":{"server":"of the dead","host":"c1","call":{"id":"x","rpc":"publish","node":"n1","consumer":"web"}},"#;
    raw.put("/csid/v1/vol/default/data/head", &before.replacen('{', driver, 1)).await;
    let undo = controller.unpublish().await;
    let call = controller.publish().await;
    assert!(call.epoch > undo.epoch);
    eventually("nobody calls", async || !head(&site, "data").await.contains("driver")).await;
    let at = row(&site, "vol/default/data/at/n1").await;
    assert!(at.contains("\"leg\":\"present\""), "{at}");
    assert_eq!(claiming(&n1, 0, "data").await.unwrap().unwrap().claim, granted.claim);
}

/// A server that has no session of the controller's node leaves the call to the one that has.
#[tokio::test]
async fn claim_at_one_server_is_attached_by_another() {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 1).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let claim = claiming(&n1, 0, "data");
    controller.publish().await;
    let granted = claim.await.unwrap().unwrap();
    n1.detached(0, "data", &granted.claim).await.unwrap();
    controller.unpublish().await;
    eventually("the claim is free", async || row(&site, "vol/default/data/claim").await.is_empty()).await;
}

/// A server that stops by SIGTERM writes the outcomes of its calls.
#[tokio::test]
async fn stopped_server_waits_for_its_calls() {
    let mut site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 1).await;
    let claim = claiming(&n1, 1, "data");
    let call = controller.called().await;
    site.servers[0].signal(Signal::TERM);
    tokio::time::sleep(Duration::from_millis(500)).await;
    controller.end(&call, attached("/dev/x")).await;
    assert_eq!(claim.await.unwrap().unwrap().publish_context["device"], "/dev/x");
    assert!(site.servers[0].ended().await, "{}", site.servers[0].text());
    controller.join_again(1).await;
    assert!(!controller.is_called(Duration::from_secs(1)).await, "a call whose outcome is known came again");
}

/// No caller has got the claim, and the node repeats no call.
#[tokio::test]
async fn pending_claim_of_a_lost_node_ends() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, one) = user(&site, "n1", 0).await;
    let claim = claiming(&n1, 0, "data");
    let begun = Instant::now();
    let call = controller.called().await;
    claim.abort();
    drop(one);
    controller.end(&call, failed(CallClass::Again)).await;
    loop {
        let call = controller.called().await;
        if !is_publish(&call) {
            controller.end(&call, attached("")).await;
            break;
        }
        controller.end(&call, failed(CallClass::Again)).await;
    }
    assert!(begun.elapsed() > Duration::from_secs(59), "it ended after {:?}", begun.elapsed());
    eventually("the claim is free", async || row(&site, "vol/default/data/claim").await.is_empty()).await;
}

/// The claim is written, and no server has called the controller yet.
#[tokio::test]
async fn claim_of_a_killed_server_is_attached_at_once() {
    let mut site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 1).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    site.servers[1].signal(Signal::STOP);
    let claim = claiming(&n1, 0, "data");
    eventually("the claim is written", async || {
        row(&site, "vol/default/data/claim").await.contains("\"state\":\"pending\"")
    })
    .await;
    site.servers[0].kill();
    site.servers[1].signal(Signal::CONT);
    claim.abort();
    let (first, _session) = n1.say_hello(1).await.unwrap();
    assert!(matches!(first, First::Welcome(_)), "{first:?}");
    // Nothing was sent, so there is nothing to detach.
    let (claim, _) = (claiming(&n1, 1, "data"), controller.publish().await);
    claim.await.unwrap().unwrap();
}

/// A server stands still in a call, and another one takes over. The first one goes on, and gets its answer.
#[tokio::test]
async fn server_that_stood_still_writes_no_outcome() {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 1).await;
    let claim = claiming(&n1, 1, "data");
    let lost = controller.called().await;
    site.servers[0].signal(Signal::STOP);
    let session = controller.join_other(1).await;
    let undo = controller.called_within(Duration::from_secs(40)).await;
    assert!(!is_publish(&undo) && undo.epoch > lost.epoch, "{undo:?}");
    controller.end(&undo, attached("")).await;
    controller.publish().await;
    let granted = claim.await.unwrap().unwrap();
    site.servers[0].signal(Signal::CONT);
    let late = CallEnded { call: lost.call, epoch: lost.epoch, how: Some(attached("/dev/late")) };
    let late = FromNode { is: Some(from_node::Is::Ended(late)) };
    // The session may be over already.
    let _ = session.to_server.send(late).await;
    n1.detached(1, "data", &granted.claim).await.unwrap();
    controller.unpublish().await;
    eventually("the claim is free", async || row(&site, "vol/default/data/claim").await.is_empty()).await;
    let (claim, _) = (claiming(&n1, 1, "data"), controller.publish().await);
    assert_eq!(claim.await.unwrap().unwrap().publish_context["device"], "/dev/x");
    assert!(!row(&site, "vol/default/data/at/n1").await.contains("late"));
}

/// Starts two servers. A controller and a node that claims have joined at the first one, which has faults.
async fn with_faults() -> (Site, Fault, Controller, (Node, Session)) {
    let mut site = Site::start(2).await;
    let fault = site.start_with_faults().remove(0);
    site.register("data", "single-node-writer").await;
    let controller = Controller::start(&site, "c1", 0).await;
    let node = user(&site, "n1", 0).await;
    (site, fault, controller, node)
}

/// Claims a volume at the first server, which is held before it writes the claim with the intent of its call.
async fn held(fault: &Fault, node: &Node) -> JoinHandle<Result<Granted, Refusal>> {
    fault.arm("intent.held");
    let claim = claiming(node, 0, "data");
    eventually("the server is held", async || fault.holds("intent")).await;
    claim
}

/// The claim and its call are in etcd, and nothing was sent. Nobody knows that.
#[tokio::test]
async fn unsent_call_of_a_dead_server_is_undone_first() {
    let (mut site, fault, mut controller, (n1, _one)) = with_faults().await;
    fault.arm("intent.after:1");
    let claim = claiming(&n1, 0, "data");
    site.servers[0].ended().await;
    claim.await.unwrap().unwrap_err();
    let (claim, head) = (row(&site, "vol/default/data/claim/n1").await, head(&site, "data").await);
    assert!(
        claim.contains("\"state\":\"pending\"") && head.contains("\"rpc\":\"publish\""),
        "{claim} {head}"
    );
    let at = row(&site, "vol/default/data/at/n1").await;
    assert!(at.contains("\"leg\":\"making\"") && !at.contains("uncalled"), "{at}");
    controller.join_again(1).await;
    let (first, _session) = n1.say_hello(1).await.unwrap();
    assert!(matches!(first, First::Welcome(_)), "{first:?}");
    let claim = claiming(&n1, 1, "data");
    let undo = controller.called_within(Duration::from_secs(30)).await;
    assert!(!is_publish(&undo), "{undo:?}");
    controller.end(&undo, attached("")).await;
    let call = controller.publish().await;
    assert!(call.epoch > undo.epoch);
    claim.await.unwrap().unwrap();
}

/// An operator blocks the host at another server. The claim is written without the call.
#[tokio::test]
async fn claim_with_its_call_compares_the_hosts_row() {
    let (site, fault, controller, (n1, _one)) = with_faults().await;
    let claim = held(&fault, &n1).await;
    let block = Change::Block(BlockAsk { reason: "stolen".into() });
    let block = NodeChange { node: "c1".into(), change: Some(block) };
    site.admin(1, "all").set_node(block).await.unwrap();
    fault.disarm();
    eventually("the claim is written", async || {
        row(&site, "vol/default/data/claim").await.contains("\"state\":\"pending\"")
    })
    .await;
    let at = row(&site, "vol/default/data/at/n1").await;
    assert!(at.contains("\"leg\":\"making\"") && at.contains("\"uncalled\":true"), "{at}");
    assert!(!head(&site, "data").await.contains("driver"));
    claim.abort();
    drop(controller);
}

/// The server stands still while it writes the intent. Its lease may be over, and another server may have called. Nothing was sent, so nothing is
/// undone.
#[tokio::test]
async fn call_is_not_sent_long_after_its_intent() {
    let (site, fault, mut controller, (n1, _one)) = with_faults().await;
    let claim = held(&fault, &n1).await;
    tokio::time::sleep(Duration::from_millis(5200)).await;
    fault.disarm();
    let call = controller.publish().await;
    claim.await.unwrap().unwrap();
    let claim = site.raw().await.below("/csid/v1/vol/default/data/claim/n1").await.remove(0);
    let written = u64::try_from(claim.create_revision).unwrap();
    assert!(call.epoch > written, "the call of the first intent was sent: {call:?}");
}
