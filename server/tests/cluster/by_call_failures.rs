//! AttachVolume through servers and controllers that die, hang or lie.

use std::time::{Duration, Instant};

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::{Answer, CallClass, CallEnded, CallFailure, DetachAsk};

use crate::attach::{Controller, attached, claiming, head, is_publish, node_id, row, user};
use crate::by_call::{ask, at, attach_ask, attach_begins, attaching, change, detach_ask, detaching, once};
use crate::site::{Site, eventually};

#[tokio::test]
async fn attach_without_an_answer_is_detached_first() {
    let site = Site::start(2).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    // The second caller asks a server that knows the failure by the record alone.
    for (server, volume) in [(0, "data"), (1, "more")] {
        site.register(volume, "single-node-writer").await;
        let client = site.operator(server, "attaches");
        let (attach, lost) = attach_begins(&client, &mut controller, attach_ask(volume, "x")).await;
        controller.join_again(0).await;
        // The answer to the lost call comes in the new session.
        controller.end(&lost, attached("/dev/late")).await;
        let undo = controller.called().await;
        assert!(!is_publish(&undo) && undo.epoch > lost.epoch, "{undo:?}");
        let found = at(&site, volume, "x").await;
        assert!(found.contains("removing") && !found.contains("late"), "{found}");
        controller.end(&undo, How::Answer(Answer::default())).await;
        // The caller still waits.
        assert!(controller.publish().await.epoch > undo.epoch);
        attach.await.unwrap().unwrap();
    }
}

/// The server that has sent the call dies. Another one drives it on, and the caller asks that one.
#[tokio::test]
async fn attach_of_a_killed_server_is_driven_on() {
    let mut site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let mut first = site.operator(0, "attaches");
    let asked = tokio::spawn(async move { once(&mut first, What::Attach(attach_ask("data", "x"))).await });
    let lost = controller.called().await;
    site.servers[0].kill();
    let begun = Instant::now();
    asked.await.unwrap().unwrap_err();
    let attach = attaching(&site.operator(1, "attaches"), attach_ask("data", "x"));
    controller.join_again(1).await;
    let undo = controller.called_within(Duration::from_secs(30)).await;
    assert!(begun.elapsed() < Duration::from_secs(20), "it took {:?}", begun.elapsed());
    assert!(!is_publish(&undo) && undo.epoch > lost.epoch, "{undo:?}");
    controller.end(&undo, How::Answer(Answer::default())).await;
    controller.publish().await;
    assert_eq!(attach.await.unwrap().unwrap().publish_context["device"], "/dev/x");
    // The driver of the detach is lost, too.
    let detach = detaching(&site.operator(1, "attaches"), detach_ask("data", "x"));
    let lost = controller.called().await;
    assert!(!is_publish(&lost));
    controller.join_again(1).await;
    let again = controller.unpublish().await;
    assert!(again.epoch > lost.epoch);
    detach.await.unwrap().unwrap();
}

/// The server dies between its answer's write and the caller's answer: the same call has the same answer.
#[tokio::test]
async fn lost_answer_is_had_by_the_same_call() {
    let mut site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 1).await;
    let mut first = site.operator(0, "attaches");
    let asked = tokio::spawn(async move { once(&mut first, What::Attach(attach_ask("data", "x"))).await });
    let call = controller.called().await;
    site.servers[0].kill();
    controller.end(&call, attached("/dev/x")).await;
    asked.await.unwrap().unwrap_err();
    let mut second = site.operator(1, "attaches");
    let answer = change(&mut second, What::Attach(attach_ask("data", "x"))).await.unwrap();
    assert_eq!(answer.attached.unwrap().publish_context["device"], "/dev/x");
    assert!(!controller.is_called(Duration::from_millis(500)).await, "it was called again");
}

#[tokio::test]
async fn attach_that_no_controller_takes_leaves_nothing() {
    let mut site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    controller.leave().await;
    let (n1, _one) = user(&site, "n1", 1).await;
    let mut client = site.operator(0, "attaches");
    let asked = once(&mut client, What::Attach(attach_ask("data", "x"))).await.unwrap_err();
    assert!(asked.kind == "TimedOut" && asked.retryable, "{asked:?}");
    assert_eq!(at(&site, "data", "x").await, "");
    // DetachVolume ends at once what was not asked of a controller.
    let mut other = site.operator(0, "attaches");
    let waits = tokio::spawn(async move { once(&mut other, What::Attach(attach_ask("data", "x"))).await });
    eventually("it is wanted", async || !at(&site, "data", "x").await.is_empty()).await;
    once(&mut client, What::Detach(detach_ask("data", "x"))).await.unwrap();
    assert_eq!(at(&site, "data", "x").await, "");
    waits.await.unwrap().unwrap_err();
    // The server that keeps it dies, and nobody repeats the call.
    let mut other = site.operator(0, "attaches");
    let waits = tokio::spawn(async move { once(&mut other, What::Attach(attach_ask("data", "x"))).await });
    eventually("it is wanted", async || !at(&site, "data", "x").await.is_empty()).await;
    site.servers[0].kill();
    waits.await.unwrap().unwrap_err();
    let begun = Instant::now();
    while !at(&site, "data", "x").await.is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(120), "it stays");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    controller.join_again(1).await;
    let (claim, call) = (claiming(&n1, 1, "data"), controller.publish().await);
    assert_eq!(node_id(&call), "id of n1");
    claim.await.unwrap().unwrap();
}

#[tokio::test]
async fn detach_during_an_attach_has_the_last_word() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let client = site.operator(0, "attaches");
    let (attach, call) = attach_begins(&client, &mut controller, attach_ask("data", "x")).await;
    let detach = detaching(&client, detach_ask("data", "x"));
    eventually("it is to be detached", async || at(&site, "data", "x").await.contains("removing")).await;
    controller.end(&call, attached("/dev/x")).await;
    controller.unpublish().await;
    detach.await.unwrap().unwrap();
    assert_eq!(attach.await.unwrap().unwrap_err().kind, "PluginError");
    assert!(row(&site, "vol/default/data/at").await.is_empty());
    assert!(!controller.is_called(Duration::from_millis(500)).await);
}

/// A host is believed about the call that it was sent, and about no other.
#[tokio::test]
async fn lying_host_attaches_nothing_by_call() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let mut client = site.operator(0, "attaches");
    let (attach, call) = attach_begins(&client, &mut controller, attach_ask("data", "x")).await;
    let lies = [
        CallEnded { call: "another".into(), epoch: call.epoch, how: Some(attached("/dev/lie")) },
        CallEnded { call: call.call.clone(), epoch: call.epoch + 1, how: Some(attached("/dev/lie")) },
        CallEnded { call: call.call.clone(), epoch: call.epoch - 1, how: Some(attached("/dev/lie")) },
    ];
    for lie in lies {
        controller.say(lie).await;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(at(&site, "data", "x").await.contains("making"));
    // A context that is too large is refused, and what may be attached is detached.
    let context = [("k".to_owned(), "v".repeat(30_000))].into();
    controller.end(&call, How::Answer(Answer { publish_context: context, ..Answer::default() })).await;
    controller.unpublish().await;
    let refused = attach.await.unwrap().unwrap_err();
    assert!(refused.message.contains("publish context"), "{refused:?}");
    assert!(!head(&site, "data").await.contains("driver"));
    // An unpublish that was never sent is not believed to have been made.
    let (attach, _) = (attaching(&client, attach_ask("data", "x")), controller.publish().await);
    attach.await.unwrap().unwrap();
    let detach = detaching(&client, detach_ask("data", "x"));
    let call = controller.called().await;
    controller.end(&call, How::Stale(true)).await;
    assert!(at(&site, "data", "x").await.contains("removing"));
    controller.unpublish().await;
    detach.await.unwrap().unwrap();
    once(&mut client, What::Detach(DetachAsk { forget: true, ..detach_ask("data", "x") })).await.unwrap_err();
}

/// The host may run the call until its time is over, though an operator has forgotten the attachment.
#[tokio::test]
async fn forgotten_call_keeps_others_out_until_its_end() {
    let site = Site::start_with(1, "controller-seconds = 10").await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let mut all = site.operator(0, "all");
    let attach = attaching(&all, attach_ask("data", "x"));
    controller.called().await;
    controller.leave().await;
    let begun = Instant::now();
    eventually("the call has no answer", async || at(&site, "data", "x").await.contains("removing")).await;
    let mut other = Controller::start(&site, "c2", 0).await;
    let id = ask(&mut all, What::Detach(detach_ask("data", "x"))).await.unwrap().attached.unwrap().id;
    let named = DetachAsk { id, ..detach_ask("data", "x") };
    let detach = detaching(&all, named.clone());
    eventually("a caller has ended it", async || at(&site, "data", "x").await.contains("\"ended\":true"))
        .await;
    ask(&mut all, What::Detach(DetachAsk { forget: true, ..named })).await.unwrap();
    detach.await.unwrap().unwrap();
    attach.await.unwrap().unwrap_err();
    assert!(at(&site, "data", "x").await.contains("forgotten"));
    let refused = claiming(&n1, 0, "data").await.unwrap().unwrap_err();
    assert_eq!(refused.kind, "ClaimConflict");
    while !at(&site, "data", "x").await.is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it stays");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    // The call has 10 s to begin, and 10 s more.
    assert!(begun.elapsed() >= Duration::from_secs(19), "it is gone after {:?}", begun.elapsed());
    assert!(!head(&site, "data").await.contains("driver"));
    let (claim, call) = (claiming(&n1, 0, "data"), other.publish().await);
    assert_eq!(node_id(&call), "id of n1");
    claim.await.unwrap().unwrap();
}

/// A transaction of etcd takes 128 operations.
#[tokio::test]
async fn many_forgotten_attachments_are_removed() {
    const MANY: usize = 120;
    let site = Site::start_with(1, "controller-seconds = 60").await;
    site.register("data", "multi-node-multi-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let mut all = site.operator(0, "all");
    for n in 0..MANY {
        let attach = attaching(&all, attach_ask("data", &format!("x{n}")));
        controller.publish().await;
        attach.await.unwrap().unwrap();
    }
    let (last, call) = attach_begins(&all, &mut controller, attach_ask("data", "last")).await;
    for n in 0..MANY {
        let node_id = format!("x{n}");
        let detach = detaching(&all, detach_ask("data", &node_id));
        eventually("its detach waits", async || at(&site, "data", &node_id).await.contains("removing")).await;
        once(&mut all, What::Detach(DetachAsk { forget: true, ..detach_ask("data", &node_id) }))
            .await
            .unwrap();
        detach.await.unwrap().unwrap();
    }
    assert!(at(&site, "data", "x0").await.contains("forgotten"), "a call for the volume may run");
    controller.end(&call, attached("/dev/x")).await;
    last.await.unwrap().unwrap();
    for n in 0..MANY {
        let node_id = format!("x{n}");
        eventually("it is removed", async || at(&site, "data", &node_id).await.is_empty()).await;
    }
}

/// The node's limit, drain and fence hold from then on.
#[tokio::test]
async fn node_that_joins_before_the_call_is_in_the_row() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    controller.leave().await;
    let attach = attaching(&site.operator(0, "attaches"), attach_ask("data", "id of n1"));
    eventually("it is wanted", async || at(&site, "data", "id of n1").await.contains("\"node\":\"\"")).await;
    let (_n1, _one) = user(&site, "n1", 0).await;
    controller.join_again(0).await;
    let call = controller.called().await;
    assert!(at(&site, "data", "id of n1").await.contains("\"node\":\"n1\""));
    controller.end(&call, attached("/dev/x")).await;
    assert_eq!(attach.await.unwrap().unwrap().node, "n1");
}

#[tokio::test]
async fn detach_without_its_credential_says_so() {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let client = site.operator(1, "attaches");
    let (attach, _) = (attaching(&client, attach_ask("data", "x")), controller.publish().await);
    attach.await.unwrap().unwrap();
    let detach = detaching(&client, detach_ask("data", "x"));
    let call = controller.called().await;
    let withheld = CallFailure {
        class: CallClass::Withheld.into(),
        kind: "SecretRequired".into(),
        message: "ControllerUnpublishVolume: no credential".into(),
        code: None,
    };
    controller.end(&call, How::Failed(withheld)).await;
    let refused = detach.await.unwrap().unwrap_err();
    assert!(refused.kind == "SecretRequired" && refused.message.contains("no credential"), "{refused:?}");
    let (detach, _) = (detaching(&client, detach_ask("data", "x")), controller.unpublish().await);
    detach.await.unwrap().unwrap();
}
