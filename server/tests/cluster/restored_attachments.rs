//! Attachments after a recovery from a backup of etcd: those of claims, and those of AttachVolume.

use std::time::Duration;

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{
    Answer, AuditAsk, CallClass, CallName, ClaimAsk, DetachAsk, DrainAsk, FenceAsk, HeldClaim, NodeAsk,
    NodeChange, ReleaseAsk, UndrainAsk, VolumeAsk,
};
use tokio::task::JoinHandle;

use crate::attach::{Controller, attached, claiming, failed, head, is_publish, row, user, user_named};
use crate::by_call::{ask, at, attach_ask, attach_begins, attaching, detach_ask, detaching, once};
use crate::fence::set;
use crate::recovery::{
    forget, held, held_attached, hold, page, restored, resume, resumed, servers, try_hold, welcome, writing,
};
use crate::site::{Refusal, Site, eventually, release_ask};

/// No node's row has the name yet. The thief is fenced, and nothing of its lie is detached by that.
#[tokio::test]
async fn unregistered_volume_stays_attached_after_a_fence() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (thief, session) = user_named(&site, "n2", 0, "id of n1").await;
    drop(session);
    restored(&site, 0, 1).await.unwrap();
    controller.join_again(0).await;
    let (_, session) = welcome(&thief, 0).await;
    let lie = HeldClaim {
        external_node_id: "id of n1".into(),
        external_id: "ext-of-n1".into(),
        ..held(&thief, "stolen", "lie")
    };
    hold(&thief, 0, page(&thief, 2, vec![lie], true)).await.unwrap();
    hold(&controller.node, 0, page(&controller.node, 2, vec![], true)).await.unwrap();
    drop(session);
    resumed(&site, 2).await;
    controller.join_again(0).await;
    let revision =
        site.admin(0, "all").node(NodeAsk { node: "n2".into() }).await.unwrap().into_inner().revision;
    let fence = Change::Fence(FenceAsk { reason: "it lies".into(), revision, by_hand: true });
    site.admin(0, "all").set_node(NodeChange { node: "n2".into(), change: Some(fence) }).await.unwrap();
    eventually("the claim has ended", async || {
        row(&site, "vol/default/stolen/claim/n2").await.contains("node-detached")
    })
    .await;
    // It is no word for a detach without --force.
    let release = ReleaseAsk { deadline_ms: 1000, ..release_ask("stolen", "n2") };
    let waits = Refusal::of(&site.operator(0, "all").release(release).await.unwrap_err());
    assert_eq!(waits.kind, "TimedOut", "{waits:?}");
    assert!(!controller.is_called(Duration::from_secs(3)).await, "the volume of another node was detached");
    assert!(row(&site, "vol/default/stolen/at/n2").await.contains("\"present\""));
}

/// The claim of the backup has ended since, or its node has it still. The node asks for the next claim before the first one's end is known.
#[tokio::test]
async fn attachment_that_no_node_holds_is_made_again() {
    for is_held in [false, true] {
        let site = Site::start(1).await;
        site.register("data", "single-node-writer").await;
        let mut controller = Controller::start(&site, "c1", 0).await;
        let (node, session) = user(&site, "n1", 0).await;
        let claim = claiming(&node, 0, "data");
        controller.publish().await;
        let granted = claim.await.unwrap().unwrap();
        drop(session);
        restored(&site, 0, 1).await.unwrap();
        controller.join_again(0).await;
        let (_, mut session) = welcome(&node, 0).await;
        session.report_name("id of n1").await;
        let claims = if is_held { vec![held_attached(&node, "data", &granted)] } else { Vec::new() };
        hold(&node, 0, page(&node, 2, claims, true)).await.unwrap();
        hold(&controller.node, 0, page(&controller.node, 2, vec![], true)).await.unwrap();
        resumed(&site, 2).await;
        controller.join_again(0).await;
        let (_, mut session) = welcome(&node, 0).await;
        session.report_name("id of n1").await;

        let (mut client, ask) =
            (node.client(0), ClaimAsk { call: "call 2".into(), ..node.ask("data", "web") });
        let claim = tokio::spawn(async move { client.claim(ask).await });
        if !is_held {
            let call = controller.called().await;
            assert!(is_publish(&call), "{call:?}");
            controller.end(&call, attached("/dev/new")).await;
        }
        let context = claim.await.unwrap().unwrap().into_inner().publish_context;
        let due = if is_held { "/dev/x" } else { "/dev/new" };
        assert_eq!(context["device"], due, "held: {is_held}");
        assert!(!controller.is_called(Duration::from_secs(1)).await, "a controller was called");
        // The new row is trusted.
        let ask = ClaimAsk { call: "call 3".into(), ..node.ask("data", "web") };
        assert_eq!(node.client(0).claim(ask).await.unwrap().into_inner().publish_context["device"], due);
    }
}

/// The backup has the claim before its first call. The call was made after the backup.
#[tokio::test]
async fn uncalled_attachment_of_a_backup_is_undone() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (node, session) = user(&site, "n1", 0).await;
    controller.leave().await;
    let claim = claiming(&node, 0, "data");
    eventually("the claim waits for its call", async || {
        row(&site, "vol/default/data/at/n1").await.contains("\"uncalled\":true")
    })
    .await;
    claim.abort();
    drop(session);
    restored(&site, 0, 1).await.unwrap();
    controller.join_again(0).await;
    let (_, session) = welcome(&node, 0).await;
    hold(&node, 0, page(&node, 2, vec![], true)).await.unwrap();
    hold(&controller.node, 0, page(&controller.node, 2, vec![], true)).await.unwrap();
    drop(session);
    controller.leave().await;
    resumed(&site, 2).await;
    let given_up = CallName {
        call: "call 1".into(),
        volume: "data".into(),
        boot: node.hello.boot.clone(),
        ..CallName::default()
    };
    assert!(!node.client(0).withdraw(given_up).await.unwrap().into_inner().taken);
    controller.join_again(0).await;
    controller.unpublish().await;
    eventually("the volume is free", async || row(&site, "vol/default/data/at/n1").await.is_empty()).await;

    // What is written since the recovery is not of the backup.
    controller.leave().await;
    let (_, mut session) = welcome(&node, 0).await;
    session.report_name("id of n1").await;
    let (mut client, ask) = (node.client(0), ClaimAsk { call: "call 2".into(), ..node.ask("data", "web") });
    let claim = tokio::spawn(async move { client.claim(ask).await });
    eventually("the new claim waits for its call", async || {
        row(&site, "vol/default/data/at/n1").await.contains("\"uncalled\":true")
    })
    .await;
    controller.join_again(0).await;
    controller.publish().await;
    claim.await.unwrap().unwrap();
}

/// The host has rebooted since the backup, and its claim was granted again with the same context.
#[tokio::test]
async fn held_attachment_of_a_later_boot_is_trusted() {
    let site = Site::start(1).await;
    site.register("data", "single-node-multi-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (mut node, session) = user(&site, "n1", 0).await;
    let many = writing("single-node-multi-writer");
    let ask = ClaimAsk { r#use: Some(many.clone()), ..node.ask("data", "web") };
    let mut client = node.client(0);
    let claim = tokio::spawn(async move { client.claim(ask).await });
    controller.publish().await;
    let granted = claim.await.unwrap().unwrap().into_inner();
    drop(session);
    restored(&site, 0, 1).await.unwrap();
    controller.join_again(0).await;
    let mut session = node.reboot(0).await;
    session.report_name("id of n1").await;
    let of = HeldClaim { usage: Some(many.clone()), ..held_attached(&node, "data", &granted) };
    hold(&node, 0, page(&node, 2, vec![of], true)).await.unwrap();
    hold(&controller.node, 0, page(&controller.node, 2, vec![], true)).await.unwrap();
    resumed(&site, 2).await;
    controller.join_again(0).await;
    let (_, mut session) = welcome(&node, 0).await;
    session.report_name("id of n1").await;
    // A Publish that fails would detach the volume under the first consumer's mount.
    let ask = ClaimAsk { call: "call 2".into(), r#use: Some(many), ..node.ask("data", "other") };
    let other = node.client(0).claim(ask).await.unwrap().into_inner();
    assert_eq!(other.publish_context, granted.publish_context);
    assert!(!controller.is_called(Duration::from_secs(1)).await, "a controller was called");
}

/// The backup does not have the detach and the claim that came after it.
#[tokio::test]
async fn attachment_by_call_stays_until_it_is_detached() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (node, session) = user(&site, "n1", 0).await;
    let (attach, call) =
        attach_begins(&site.operator(0, "attaches"), &mut controller, attach_ask("data", "id of n1")).await;
    controller.end(&call, attached("/dev/x")).await;
    let id = attach.await.unwrap().unwrap().id;
    eventually("nobody calls", async || !head(&site, "data").await.contains("driver")).await;
    drop(session);
    restored(&site, 0, 1).await.unwrap();
    controller.join_again(0).await;
    let (_, mut session) = welcome(&node, 0).await;
    session.report_name("id of n1").await;
    let before = at(&site, "data", "id of n1").await;
    assert!(before.contains("\"leg\":\"present\""), "{before}");
    let of = HeldClaim { external_node_id: "id of n1".into(), ..held(&node, "data", "one") };
    let refused = try_hold(&node, 0, page(&node, 2, vec![of], true)).await.unwrap();
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert!(refused[0].why.contains("attached by AttachVolume in etcd"), "{refused:?}");
    let detach = DetachAsk { id, ..detach_ask("data", "id of n1") };
    let early = ask(&mut site.operator(0, "attaches"), What::Detach(detach)).await.unwrap_err();
    assert!(early.message.contains("recover"), "{early:?}");
    assert!(!controller.is_called(Duration::from_secs(2)).await, "a controller is called in a recovery");
    hold(&controller.node, 0, page(&controller.node, 2, vec![], true)).await.unwrap();
    assert_eq!(resume(&site).await.unwrap_err().kind, "Busy", "an operator has not looked at the claim");
    forget(&site, "n1").await;
    resumed(&site, 2).await;
    drop(session);
    controller.join_again(0).await;
    let _sessions = welcome(&node, 0).await;
    assert_eq!(claiming(&node, 0, "data").await.unwrap().unwrap_err().kind, "ClaimConflict");
    assert!(!controller.is_called(Duration::from_secs(3)).await, "nobody has detached the volume");
    assert_eq!(at(&site, "data", "id of n1").await, before);
    let detach = detaching(&site.operator(0, "attaches"), detach_ask("data", "id of n1"));
    let call = controller.called().await;
    controller.end(&call, How::Answer(Answer::default())).await;
    detach.await.unwrap().unwrap();
    assert!(at(&site, "data", "id of n1").await.is_empty());
}

/// The volume may have been attached with another context since the backup.
#[tokio::test]
async fn attach_repeated_after_a_restore_is_made() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (node, session) = user(&site, "n1", 0).await;
    let (attach, call) =
        attach_begins(&site.operator(0, "attaches"), &mut controller, attach_ask("data", "id of n1")).await;
    controller.end(&call, attached("/dev/x")).await;
    let before = attach.await.unwrap().unwrap();
    eventually("nobody calls", async || !head(&site, "data").await.contains("driver")).await;
    drop(session);
    restored(&site, 0, 1).await.unwrap();
    controller.join_again(0).await;
    hold(&controller.node, 0, page(&controller.node, 2, vec![], true)).await.unwrap();
    let (_, mut session) = welcome(&node, 0).await;
    session.report_name("id of n1").await;
    hold(&node, 0, page(&node, 2, vec![], true)).await.unwrap();
    resumed(&site, 2).await;
    drop(session);
    controller.join_again(0).await;
    let (_, mut session) = welcome(&node, 0).await;
    session.report_name("id of n1").await;
    // A node that takes no volume now keeps what it has.
    set(&site, 0, "n1", Change::Drain(DrainAsk {})).await.unwrap();
    let row = at(&site, "data", "id of n1").await;
    let drains = once(&mut site.operator(0, "attaches"), What::Attach(attach_ask("data", "id of n1"))).await;
    assert_eq!(drains.unwrap_err().kind, "Busy");
    assert!(row.contains("\"leg\":\"present\""), "{row}");
    assert_eq!(at(&site, "data", "id of n1").await, row);
    set(&site, 0, "n1", Change::Undrain(UndrainAsk {})).await.unwrap();
    // The plugin refuses it first, and nothing is detached.
    let (attach, call) =
        attach_begins(&site.operator(0, "attaches"), &mut controller, attach_ask("data", "id of n1")).await;
    controller.end(&call, failed(CallClass::Refused)).await;
    assert_eq!(attach.await.unwrap().unwrap_err().kind, "PluginError");
    assert!(!controller.is_called(Duration::from_secs(8)).await, "it is undone, or called again at once");
    let (attach, call) =
        attach_begins(&site.operator(0, "attaches"), &mut controller, attach_ask("data", "id of n1")).await;
    controller.end(&call, attached("/dev/y")).await;
    let after = attach.await.unwrap().unwrap();
    assert_ne!(after.publish_context, before.publish_context);
    // The attachment is not of the backup any more.
    let again = once(&mut site.operator(0, "attaches"), What::Attach(attach_ask("data", "id of n1"))).await;
    assert!(again.is_ok() && !controller.is_called(Duration::from_secs(1)).await, "{again:?}");
    assert!(half_done(&site).await.is_empty());
}

/// Returns what an audit finds of attachments by AttachVolume that the backup has half done.
async fn half_done(site: &Site) -> Vec<String> {
    let mut found = site.admin(0, "all").audit(AuditAsk {}).await.unwrap().into_inner();
    let mut texts = Vec::new();
    while let Some(finding) = found.message().await.unwrap() {
        if finding.kind == "attachment-of-backup" {
            texts.push(finding.text);
        }
    }
    texts
}

/// The call had an answer after the backup, and the volume is mounted.
#[tokio::test]
async fn attach_of_a_backup_is_not_undone() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let ask = attach_ask("data", "x");
    let (attach, lost) = attach_begins(&site.operator(0, "attaches"), &mut controller, ask.clone()).await;
    assert!(half_done(&site).await.is_empty());
    restored(&site, 0, 1).await.unwrap();
    attach.abort();
    controller.join_again(0).await;
    hold(&controller.node, 0, page(&controller.node, 2, vec![], true)).await.unwrap();
    assert_eq!(half_done(&site).await.len(), 1);
    let rows = servers(&site, 0).await;
    let [of] = rows.half_done.as_slice() else { panic!("{rows:?}") };
    assert_eq!((of.namespace.as_str(), of.volume.as_str(), of.node_id.as_str()), ("default", "data", "x"));
    resumed(&site, 2).await;
    assert_eq!(servers(&site, 0).await.half_done.len(), 1, "the answer to the resume names it");
    controller.join_again(0).await;
    // It is made again, and the plugin refuses that.
    let again = controller.called_within(Duration::from_secs(40)).await;
    assert!(is_publish(&again) && again.epoch > lost.epoch, "{again:?}");
    controller.end(&again, failed(CallClass::Refused)).await;
    assert!(!controller.is_called(Duration::from_secs(8)).await, "it is undone, or called again at once");
    assert!(at(&site, "data", "x").await.contains("\"leg\":\"making\""));
    // The caller repeats the call, and hears why it does not succeed.
    let (attach, again) = attach_begins(&site.operator(0, "attaches"), &mut controller, ask.clone()).await;
    controller.end(&again, failed(CallClass::Refused)).await;
    let refused = attach.await.unwrap().unwrap_err();
    assert!(refused.kind == "PluginError" && refused.message.contains("no such disk"), "{refused:?}");
    assert!(at(&site, "data", "x").await.contains("\"leg\":\"making\""));
    // A word of its caller ends it.
    let detach = detaching(&site.operator(0, "attaches"), detach_ask("data", "x"));
    let call = controller.called().await;
    assert!(!is_publish(&call), "{call:?}");
    controller.end(&call, How::Answer(Answer::default())).await;
    detach.await.unwrap().unwrap();
    assert!(at(&site, "data", "x").await.is_empty() && half_done(&site).await.is_empty());
}

/// The caller has made the attach again after the backup, and the volume is mounted.
#[tokio::test]
async fn undo_of_a_backup_waits_for_a_word() {
    let site = Site::start(1).await;
    for volume in ["data", "more"] {
        site.register(volume, "single-node-writer").await;
    }
    let mut controller = Controller::start(&site, "c1", 0).await;
    let mut attaches = Vec::new();
    for volume in ["data", "more"] {
        attaches.push(attaching(&site.operator(0, "attaches"), attach_ask(volume, "x")));
        let call = controller.called().await;
        controller.end(&call, failed(CallClass::Refused)).await;
        let undo = controller.called().await;
        assert!(!is_publish(&undo), "{undo:?}");
    }
    restored(&site, 0, 1).await.unwrap();
    attaches.iter().for_each(JoinHandle::abort);
    controller.join_again(0).await;
    hold(&controller.node, 0, page(&controller.node, 2, vec![], true)).await.unwrap();
    assert_eq!(servers(&site, 0).await.half_done.len(), 2);
    resumed(&site, 2).await;
    controller.join_again(0).await;
    assert!(!controller.is_called(Duration::from_secs(10)).await, "it is detached without a word");
    let explain = VolumeAsk { namespace: String::new(), volume: "data".into(), ..VolumeAsk::default() };
    let of = site.operator(0, "all").explain(explain).await.unwrap().into_inner();
    let wait = of.attachments[0].wait.as_ref().unwrap();
    assert!(wait.kind == "parked" && wait.text.contains("backup"), "{wait:?}");
    // An attach is the word that the volume is wanted. It is called for, and nothing is detached before.
    let (attach, call) =
        attach_begins(&site.operator(0, "attaches"), &mut controller, attach_ask("data", "x")).await;
    controller.end(&call, attached("/dev/x")).await;
    attach.await.unwrap().unwrap();
    let detach = detaching(&site.operator(0, "attaches"), detach_ask("more", "x"));
    let call = controller.called().await;
    assert!(!is_publish(&call), "{call:?}");
    controller.end(&call, How::Answer(Answer::default())).await;
    detach.await.unwrap().unwrap();
    assert!(at(&site, "more", "x").await.is_empty() && half_done(&site).await.is_empty());
    assert!(at(&site, "data", "x").await.contains("\"leg\":\"present\""));
}
