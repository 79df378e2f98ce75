//! Controllers that fail, lie or die in a creation or deletion, and servers that do.

use std::time::{Duration, Instant};

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::{Answer, CallClass, CallEnded, CreatedVolume, Topology, VolumeAsk};
use rustix::process::Signal;

use crate::attach::{Controller, head, row};
use crate::creations::{
    created, creating, deleting, done, failed, is_create, is_delete, nothing_is_left, refused, registration,
};
use crate::site::{Site, eventually};

/// Creates the volume `data`, whose ID is `ext-data`.
async fn make(site: &Site, controller: &mut Controller) {
    let creation = creating(site, 0, "data");
    let call = controller.called().await;
    controller.end(&call, created("ext-data")).await;
    creation.await.unwrap().unwrap();
}

#[tokio::test]
async fn call_that_may_succeed_later_is_made_again() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let creation = creating(&site, 0, "data");
    let (mut epoch, mut order) = (0, String::new());
    for how in [
        How::NotStarted(true),
        failed(CallClass::NotSent, None),
        How::Stale(true),
        failed(CallClass::Again, Some(8)),
        failed(CallClass::Unknown, Some(4)),
        // An answer without a volume.
        done(),
    ] {
        let call = controller.called().await;
        assert!(is_create(&call) && call.epoch > epoch && (order.is_empty() || order == call.order));
        (epoch, order) = (call.epoch, call.order.clone());
        controller.end(&call, how).await;
    }
    let call = controller.called().await;
    controller.end(&call, created("ext-data")).await;
    assert_eq!(creation.await.unwrap().unwrap().external_id, "ext-data");
    assert!(!registration(&site, "data").await.contains("the pool is not there"), "an old error stays");

    let deletion = deleting(&site, 0, "data");
    for how in [failed(CallClass::Again, Some(10)), failed(CallClass::Unknown, None), How::NotStarted(true)] {
        let call = controller.called().await;
        assert!(is_delete(&call) && call.order == "ext-data" && call.epoch > epoch);
        epoch = call.epoch;
        controller.end(&call, how).await;
    }
    let call = controller.called().await;
    controller.end(&call, done()).await;
    deletion.await.unwrap().unwrap();
    nothing_is_left(&site).await;
}

/// An earlier call may have made the volume, so an error about the caller proves nothing.
#[tokio::test]
async fn refusal_after_an_unknown_call_parks_the_creation() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let creation = creating(&site, 0, "data");
    let call = controller.called().await;
    controller.end(&call, failed(CallClass::Unknown, None)).await;
    let call = controller.called().await;
    controller.end(&call, refused(7)).await;
    let error = creation.await.unwrap().unwrap_err();
    assert_eq!((error.kind.as_str(), error.retryable), ("PluginError", false), "{error:?}");
    let going = registration(&site, "data").await;
    assert!(going.contains("creating") && going.contains("\"parked\":\"node c1"), "{going}");
    assert!(!controller.is_called(Duration::from_secs(1)).await, "a creation that is given up goes on");
    // The same call has it tried again.
    let creation = creating(&site, 0, "data");
    let call = controller.called().await;
    // The plugin knows the arguments, and makes no such volume.
    controller.end(&call, refused(3)).await;
    creation.await.unwrap().unwrap_err();
    nothing_is_left(&site).await;
}

/// The server stands still while it writes the intent, and sends nothing. So the plugin has not been asked, and its refusal is final.
#[tokio::test]
async fn refusal_after_an_unsent_call_ends_the_creation() {
    let mut site = Site::start(1).await;
    let fault = site.start_with_faults().remove(0);
    let mut controller = Controller::start(&site, "c1", 0).await;
    fault.arm("intent.held");
    let creation = creating(&site, 0, "data");
    eventually("the server is held", async || fault.holds("intent")).await;
    tokio::time::sleep(Duration::from_millis(5200)).await;
    fault.disarm();
    let call = controller.called().await;
    controller.end(&call, refused(7)).await;
    creation.await.unwrap().unwrap_err();
    nothing_is_left(&site).await;
}

/// The plugin's volume is another record's.
#[tokio::test]
async fn volume_of_another_record_is_not_taken() {
    let site = Site::start(1).await;
    site.register("first", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let creation = creating(&site, 0, "data");
    let call = controller.called().await;
    controller.end(&call, created("ext-first")).await;
    let error = creation.await.unwrap().unwrap_err();
    assert_eq!((error.kind.as_str(), error.retryable), ("AlreadyExists", false), "{error:?}");
    assert!(error.message.contains("default/first"), "{error:?}");
    eventually("the row is gone", async || row(&site, "vol/default/data/").await.is_empty()).await;
    assert!(row(&site, "ext/p/+").await.is_empty(), "the name is not free");
    assert!(head(&site, "first").await.contains("ext-first"));
    assert!(!controller.is_called(Duration::from_millis(500)).await, "the other record's volume is deleted");
}

/// What a controller's node answers is bounded, and its volume is usable on each node.
#[tokio::test]
async fn answer_that_no_node_can_use_is_parked() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let good = || CreatedVolume { external_id: "ext-data".into(), ..CreatedVolume::default() };
    let large = || [("k".to_owned(), "x".repeat(10_000))].into();
    for (n, lie) in [
        CreatedVolume { external_id: String::new(), ..good() },
        CreatedVolume { external_id: "x".repeat(10_000), ..good() },
        CreatedVolume { external_id: "a\nb".into(), ..good() },
        CreatedVolume { external_id: format!("unidentified:{}", "0".repeat(32)), ..good() },
        CreatedVolume { volume_context: large(), ..good() },
        CreatedVolume { capacity: u64::MAX, ..good() },
        CreatedVolume { topologies: vec![Topology::default()], ..good() },
        CreatedVolume { topologies: vec![Topology { segments: large() }], ..good() },
    ]
    .into_iter()
    .enumerate()
    {
        let volume = format!("data-{n}");
        let creation = creating(&site, 0, &volume);
        let call = controller.called().await;
        controller.end(&call, How::Answer(Answer { created: Some(lie), ..Answer::default() })).await;
        let error = creation.await.unwrap().unwrap_err();
        assert_eq!((error.kind.as_str(), error.retryable), ("PluginError", false), "{n}: {error:?}");
        assert!(registration(&site, &volume).await.contains("creating"), "{n}");
        let ask = VolumeAsk { volume: volume.clone(), ..VolumeAsk::default() };
        let waits = site.operator(0, "all").explain(ask).await.unwrap().into_inner().wait.unwrap();
        assert_eq!(waits.kind, "parked", "{n}: {waits:?}");
        // The volume is there. Its deletion needs its ID alone.
        let deletion = deleting(&site, 0, &volume);
        let call = controller.called().await;
        assert!(is_create(&call), "{n}: {call:?}");
        controller.end(&call, created(&format!("ext-{n}"))).await;
        let call = controller.called().await;
        assert!(is_delete(&call) && call.order == format!("ext-{n}"), "{n}: {call:?}");
        controller.end(&call, done()).await;
        deletion.await.unwrap().unwrap();
    }
    nothing_is_left(&site).await;
}

#[tokio::test]
async fn refused_deletion_leaves_the_volume() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    make(&site, &mut controller).await;
    for code in [9, 12] {
        let deletion = deleting(&site, 0, "data");
        let call = controller.called().await;
        controller.end(&call, refused(code)).await;
        let error = deletion.await.unwrap().unwrap_err();
        assert!(error.message.contains("the pool is not there"), "{error:?}");
        let stays = registration(&site, "data").await;
        assert!(stays.contains("\"standing\":\"registered\""), "{stays}");
    }
    assert!(!controller.is_called(Duration::from_millis(500)).await);
}

#[tokio::test]
async fn creation_that_no_plugin_was_asked_for_is_dropped() {
    let site = Site::start(1).await;
    let creation = creating(&site, 0, "data");
    eventually("the intent is there", async || registration(&site, "data").await.contains("creating")).await;
    deleting(&site, 0, "data").await.unwrap().unwrap();
    nothing_is_left(&site).await;
    let error = creation.await.unwrap().unwrap_err();
    assert_eq!(error.kind, "PluginError", "{error:?}");
}

/// A volume without an ID cannot be deleted.
#[tokio::test]
async fn volume_in_creation_is_created_and_deleted() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let creation = creating(&site, 0, "data");
    let call = controller.called().await;
    let deletion = deleting(&site, 0, "data");
    eventually("the deletion is written", async || registration(&site, "data").await.contains("to-delete"))
        .await;
    let busy = creating(&site, 0, "data").await.unwrap().unwrap_err();
    assert_eq!(busy.kind, "Busy", "{busy:?}");
    controller.end(&call, created("ext-data")).await;
    let call = controller.called().await;
    assert!(is_delete(&call) && call.order == "ext-data", "{call:?}");
    controller.end(&call, done()).await;
    deletion.await.unwrap().unwrap();
    creation.await.unwrap().unwrap_err();
    nothing_is_left(&site).await;
}

/// Kills the server in the call. The answer of the first call is late, and counts for nothing.
#[tokio::test]
async fn creation_of_a_killed_server_goes_on() {
    let mut site = Site::start(2).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let creation = creating(&site, 1, "data");
    let lost = controller.called().await;
    site.servers[0].kill();
    let begun = Instant::now();
    controller.join_again(1).await;
    controller.end(&lost, created("ext-late")).await;
    let call = controller.called_within(Duration::from_secs(30)).await;
    assert!(begun.elapsed() < Duration::from_secs(20), "it took {:?}", begun.elapsed());
    assert!(is_create(&call) && call.epoch > lost.epoch && call.order == lost.order, "{call:?}");
    controller.end(&call, created("ext-data")).await;
    assert_eq!(creation.await.unwrap().unwrap().external_id, "ext-data");
    assert!(!head(&site, "data").await.contains("driver"));
}

#[tokio::test]
async fn deletion_of_a_killed_server_goes_on() {
    let mut site = Site::start(2).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    make(&site, &mut controller).await;
    let deletion = deleting(&site, 1, "data");
    let lost = controller.called().await;
    site.servers[0].kill();
    controller.join_again(1).await;
    let call = controller.called_within(Duration::from_secs(30)).await;
    assert!(is_delete(&call) && call.epoch > lost.epoch && call.order == "ext-data", "{call:?}");
    controller.end(&call, done()).await;
    deletion.await.unwrap().unwrap();
    nothing_is_left(&site).await;
}

/// The intent of the caller is written, and no server has called the controller yet.
#[tokio::test]
async fn creation_before_its_call_goes_on_elsewhere() {
    let mut site = Site::start(2).await;
    let creation = creating(&site, 0, "data");
    eventually("the intent is there", async || registration(&site, "data").await.contains("creating")).await;
    site.servers[0].kill();
    creation.await.unwrap().unwrap_err();
    let mut controller = Controller::start(&site, "c1", 1).await;
    let call = controller.called().await;
    controller.end(&call, created("ext-data")).await;
    assert_eq!(creating(&site, 1, "data").await.unwrap().unwrap().external_id, "ext-data");
}

/// The server is killed when the answer has come, and its outcome is not written.
#[tokio::test]
async fn lost_answer_of_a_creation_is_asked_for_again() {
    let mut site = Site::start(2).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let creation = creating(&site, 1, "data");
    let lost = controller.called().await;
    site.etcd.members[0].signal(Signal::STOP);
    controller.end(&lost, created("ext-data")).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    site.servers[0].kill();
    site.etcd.members[0].signal(Signal::CONT);
    controller.join_again(1).await;
    // What the dead server sent to etcd may be there.
    let made = tokio::select! {
        made = creation => made.unwrap(),
        call = controller.called_within(Duration::from_secs(40)) => {
            assert!(is_create(&call) && call.order == lost.order && call.epoch > lost.epoch, "{call:?}");
            controller.end(&call, created("ext-data")).await;
            creating(&site, 1, "data").await.unwrap()
        }
    };
    assert_eq!(made.unwrap().external_id, "ext-data");
}

/// The server died between the intent and the call.
#[tokio::test]
async fn intent_to_create_of_a_dead_server_is_made_again() {
    let site = Site::start(1).await;
    let creation = creating(&site, 0, "data");
    eventually("the intent is there", async || registration(&site, "data").await.contains("creating")).await;
    // The state that the dead server leaves.
    let mut raw = site.raw().await;
    let unasked = registration(&site, "data").await;
    raw.put("/csid/v1/vol/default/data/reg", &unasked.replace("\"unasked\":true", "\"unasked\":false")).await;
    let driver = r#"{"driver":{"server":"of the dead","host":"c1","call":{"id":"x","rpc":"create","node":"","consumer":""}},"#;
    raw.put("/csid/v1/vol/default/data/head", &head(&site, "data").await.replacen('{', driver, 1)).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let call = controller.called().await;
    // The dead server's call may have been made, so this proves nothing.
    controller.end(&call, refused(12)).await;
    creation.await.unwrap().unwrap_err();
    let going = registration(&site, "data").await;
    assert!(going.contains("creating") && going.contains("\"parked\":\"node c1"), "{going}");
}

/// A controller that does not answer keeps its volume's calls. Another one is asked when the time for that is over.
#[tokio::test]
async fn other_controller_creates_when_the_time_is_over() {
    let site = Site::start_with(1, "controller-seconds = 10").await;
    let (mut one, mut two) =
        (Controller::start(&site, "c1", 0).await, Controller::start(&site, "c2", 0).await);
    let creation = creating(&site, 0, "data");
    let (lost, is_one) =
        tokio::select! { call = one.called() => (call, true), call = two.called() => (call, false) };
    if !is_one {
        std::mem::swap(&mut one, &mut two);
    }
    let begun = Instant::now();
    one.leave().await;
    let call = two.called_within(Duration::from_secs(60)).await;
    assert!(begun.elapsed() > Duration::from_secs(19), "another node was called after {:?}", begun.elapsed());
    assert!(is_create(&call) && call.order == lost.order && call.epoch > lost.epoch);
    two.end(&call, created("ext-data")).await;
    creation.await.unwrap().unwrap();
}

/// Another node's word, another epoch and another name end no call.
#[tokio::test]
async fn lie_about_the_end_of_a_creation_is_nothing() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let creation = creating(&site, 0, "data");
    let call = controller.called().await;
    let good = || CallEnded { call: call.call.clone(), epoch: call.epoch, how: Some(created("ext-lie")) };
    let (_n1, stranger) = crate::attach::user(&site, "n1", 0).await;
    let is = Some(csi_proto::cluster::v1::from_node::Is::Ended(good()));
    stranger.to_server.send(csi_proto::cluster::v1::FromNode { is }).await.unwrap();
    for lie in [
        CallEnded { epoch: call.epoch - 1, ..good() },
        CallEnded { epoch: call.epoch + 1, ..good() },
        CallEnded { call: "another".into(), ..good() },
    ] {
        controller.say(lie).await;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(registration(&site, "data").await.contains("creating"), "a lie ended the call");
    controller.end(&call, created("ext-data")).await;
    assert_eq!(creation.await.unwrap().unwrap().external_id, "ext-data");
}
