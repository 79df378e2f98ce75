//! Calls without an answer: which host is called next, and when. Calls that were never made, and calls that fail for ever.

use std::time::{Duration, Instant};

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::{Answer, CallClass, ControllerCall, PluginReport, ReleaseAsk};

use crate::attach::{Controller, attached, claiming, failed, head, healthy, is_publish, node_id, row, user};
use crate::site::{Site, eventually};

/// 10 s to begin, and 10 s for the plugin.
const KEYS: &str = "controller-seconds = 10";
/// The time of a call, less what this test may have been late by.
const TIME: Duration = Duration::from_secs(19);
const LONG: Duration = Duration::from_secs(60);

/// Starts two controllers, and waits for the first call. Returns the called one first.
async fn called(site: &Site, claim: impl FnOnce()) -> (Controller, Controller, ControllerCall) {
    let (mut one, mut two) = (Controller::start(site, "c1", 0).await, Controller::start(site, "c2", 0).await);
    claim();
    let (call, is_first) =
        tokio::select! { call = one.called() => (call, true), call = two.called() => (call, false) };
    match is_first {
        true => (one, two, call),
        false => (two, one, call),
    }
}

async fn free(site: &Site) {
    eventually("the claim is free", async || row(site, "vol/default/data/claim").await.is_empty()).await;
}

/// The host of a lost call is back while another server's time runs, and is lost once more.
#[tokio::test]
async fn each_lost_call_has_its_own_time() {
    let site = Site::start_with(1, KEYS).await;
    site.register("data", "single-node-writer").await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let mut claim = None;
    let (mut one, mut two, lost) = called(&site, || claim = Some(claiming(&n1, 0, "data"))).await;
    one.leave().await;
    assert!(!two.is_called(Duration::from_secs(12)).await, "another node was called too early");
    one.join_again(0).await;
    let undo = one.called().await;
    assert!(!is_publish(&undo) && undo.epoch > lost.epoch, "{undo:?}");
    one.leave().await;
    let begun = Instant::now();
    let next = two.called_within(LONG).await;
    assert!(begun.elapsed() > TIME, "another node was called after {:?}", begun.elapsed());
    assert!(!is_publish(&next), "{next:?}");
    two.end(&next, attached("")).await;
    two.publish().await;
    claim.unwrap().await.unwrap().unwrap();
}

/// A claim that was taken in another boot is released while the call for this boot has no answer.
#[tokio::test]
async fn release_keeps_the_host_of_a_lost_call() {
    let site = Site::start_with(1, KEYS).await;
    site.register("data", "single-node-writer").await;
    let (mut n1, session) = user(&site, "n1", 0).await;
    let mut claim = None;
    let (mut one, mut two, call) = called(&site, || claim = Some(claiming(&n1, 0, "data"))).await;
    one.end(&call, attached("/dev/x")).await;
    let granted = claim.unwrap().await.unwrap().unwrap();
    drop(session);
    let _session = n1.reboot(0).await;
    let again = claiming(&n1, 0, "data");
    let lost = one.called().await;
    assert!(is_publish(&lost), "{lost:?}");
    one.leave().await;
    let begun = Instant::now();
    again.abort();
    eventually("the call has no answer", async || head(&site, "data").await.contains("\"server\":\"\""))
        .await;
    let (node, consumer) = ("n1".to_owned(), "web".to_owned());
    let release = ReleaseAsk { volume: "data".into(), node, consumer, ..ReleaseAsk::default() };
    let mut operator = site.operator(0, "all");
    let released = tokio::spawn(async move { operator.release(release).await });
    assert!(!two.is_called(Duration::from_secs(3)).await, "another node was called at once");
    n1.detached(0, "data", &granted.claim).await.unwrap();
    let undo = two.called_within(LONG).await;
    assert!(begun.elapsed() > TIME, "another node was called after {:?}", begun.elapsed());
    assert!(!is_publish(&undo), "{undo:?}");
    two.end(&undo, attached("")).await;
    released.await.unwrap().unwrap();
    free(&site).await;
}

/// The host's word that the plugin did not answer, or may have done it, does not end the plugin's work.
#[tokio::test]
async fn time_out_on_the_host_binds_the_next_call() {
    for class in [CallClass::Unknown, CallClass::Again] {
        let site = Site::start_with(1, KEYS).await;
        site.register("data", "single-node-writer").await;
        let (n1, _one) = user(&site, "n1", 0).await;
        let mut claim = None;
        let (mut one, mut two, call) = called(&site, || claim = Some(claiming(&n1, 0, "data"))).await;
        // Its controller is not healthy any more, so it gets no call.
        one.session.report_as(PluginReport { controller: false, ..healthy() }).await;
        one.end(&call, failed(class)).await;
        let begun = Instant::now();
        let next = two.called_within(LONG).await;
        assert!(begun.elapsed() > TIME, "{class:?}: another node was called after {:?}", begun.elapsed());
        two.end(&next, attached("/dev/x")).await;
        // What may have been done is detached first.
        if class == CallClass::Unknown {
            assert!(!is_publish(&next), "{next:?}");
            two.publish().await;
        }
        claim.unwrap().await.unwrap().unwrap();
    }
}

/// The host has not made the call, so there is nothing to detach.
#[tokio::test]
async fn attach_that_was_never_made_is_dropped() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    for _ in 0..2 {
        let claim = claiming(&n1, 0, "data");
        let call = controller.called().await;
        assert!(is_publish(&call), "{call:?}");
        controller.end(&call, failed(CallClass::Withheld)).await;
        let refused = claim.await.unwrap().unwrap_err();
        assert_eq!((refused.kind.as_str(), refused.retryable), ("PluginError", false));
        free(&site).await;
        assert!(row(&site, "vol/default/data/at/").await.is_empty());
    }
    // No controller is there, and the caller goes.
    controller.leave().await;
    let claim = claiming(&n1, 0, "data");
    eventually("the claim is written", async || !row(&site, "vol/default/data/at/n1").await.is_empty()).await;
    claim.abort();
    let owed = csi_proto::cluster::v1::Owed { call: "call 1".into(), ..n1.owed("data", "") };
    n1.client(0).detached(owed).await.unwrap();
    free(&site).await;
    assert!(row(&site, "vol/default/data/at/").await.is_empty());
}

/// A call to a dead node takes long, and the node is looked at meanwhile.
#[tokio::test]
async fn long_calls_do_not_keep_a_lost_nodes_claim() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, one) = user(&site, "n1", 0).await;
    let claim = claiming(&n1, 0, "data");
    let mut call = controller.called().await;
    claim.abort();
    drop(one);
    let begun = Instant::now();
    while is_publish(&call) {
        assert!(begun.elapsed() < Duration::from_secs(100), "the claim goes on");
        tokio::time::sleep(Duration::from_secs(17)).await;
        controller.end(&call, failed(CallClass::Again)).await;
        call = controller.called().await;
    }
    assert!(begun.elapsed() > Duration::from_secs(59), "it ended after {:?}", begun.elapsed());
    controller.end(&call, attached("")).await;
    free(&site).await;
}

/// A server that has nothing to do sees what another one writes.
#[tokio::test]
async fn detached_at_another_server_is_seen_at_once() {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 1).await;
    let claim = claiming(&n1, 1, "data");
    controller.publish().await;
    let granted = claim.await.unwrap().unwrap();
    // The volume rests for 5 s at the server that has the controller.
    tokio::time::sleep(Duration::from_millis(500)).await;
    n1.detached(1, "data", &granted.claim).await.unwrap();
    let undo = controller.called_within(Duration::from_secs(4)).await;
    assert!(!is_publish(&undo), "{undo:?}");
    controller.end(&undo, attached("")).await;
    free(&site).await;
}

/// Each claim of the volume has its turn.
#[tokio::test]
async fn call_that_fails_for_ever_holds_up_no_other() {
    let site = Site::start(1).await;
    site.register("shared", "multi-node-multi-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let (n2, _two) = user(&site, "n2", 0).await;
    let claim = |node: &crate::site::Node| {
        let (mut client, mut ask) = (node.client(0), node.ask("shared", "web"));
        ask.r#use.as_mut().unwrap().access_mode = "multi-node-multi-writer".into();
        tokio::spawn(async move { client.claim(ask).await })
    };
    let first = claim(&n1);
    controller.publish().await;
    let granted = first.await.unwrap().unwrap().into_inner();
    n1.detached(0, "shared", &granted.claim).await.unwrap();
    let mut undos = 0;
    while undos < 3 {
        let call = controller.called().await;
        assert!(!is_publish(&call), "{call:?}");
        controller.end(&call, failed(CallClass::Unknown)).await;
        undos += 1;
    }
    let second = claim(&n2);
    let begun = Instant::now();
    loop {
        let call = controller.called().await;
        if node_id(&call) == "id of n2" {
            controller.end(&call, attached("/dev/2")).await;
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "the claim of n2 has no turn");
        controller.end(&call, failed(CallClass::Unknown)).await;
    }
    second.await.unwrap().unwrap();
    // The one that fails goes on.
    let call = controller.called().await;
    assert_eq!((is_publish(&call), node_id(&call)), (false, "id of n1"));
    controller.end(&call, How::Answer(Answer::default())).await;
    eventually("the claim of n1 is free", async || {
        row(&site, "vol/default/shared/claim/n1").await.is_empty()
    })
    .await;
}
