//! Snapshots of volumes through the servers. The controller runs on another node, and is the test.

use std::time::Duration;

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::controller_call::Method;
use csi_proto::cluster::v1::{
    Answer, CallClass, ControllerCall, DeleteSnapshotAsk, ExternalSnapshot, Listed, SnapshotAsk, VolumeRow,
};
use tokio::task::JoinHandle;

use crate::attach::{Controller, claiming, head, is_publish, user};
use crate::creations::{changing, created, creating, done, failed, refused, registration};
use crate::questions::{answering, answers};
use crate::site::{Refusal, Site};

fn ask(call: &str) -> SnapshotAsk {
    SnapshotAsk {
        volume: "data".into(),
        name: "monday".into(),
        parameters: [("tier".to_owned(), "hunter2".to_owned())].into(),
        call: call.into(),
        ..SnapshotAsk::default()
    }
}

fn snapshotting(site: &Site, server: usize, ask: SnapshotAsk) -> JoinHandle<Result<VolumeRow, Refusal>> {
    changing(site, server, "operator/all", What::Snapshot(ask))
}

fn deleting(site: &Site, who: &str) -> JoinHandle<Result<VolumeRow, Refusal>> {
    let delete = DeleteSnapshotAsk { plugin: "p".into(), snapshot: "snap-1".into(), call: "d".into() };
    changing(site, 0, who, What::DeleteSnapshot(delete))
}

fn row(external_id: &str, ready: bool) -> ExternalSnapshot {
    ExternalSnapshot {
        id: "snap-1".into(),
        external_id: external_id.into(),
        size: 4096,
        created_usec: 7,
        ready,
    }
}

fn made(external_id: &str, ready: bool) -> How {
    How::Answer(Answer { snapshot: Some(row(external_id, ready)), ..Answer::default() })
}

fn listed(snapshots: Vec<ExternalSnapshot>) -> How {
    let listed = Listed { snapshots, ..Listed::default() };
    How::Answer(Answer { listed: Some(listed), ..Answer::default() })
}

fn is_snapshot(call: &ControllerCall) -> bool {
    matches!(&call.method, Some(Method::Snapshot(of)) if of.name == "monday" && of.parameters["tier"] == "hunter2")
}

/// Creates the volume `data`, whose ID is `ext-data`, with a controller that knows snapshots.
async fn start(site: &Site, server: usize) -> Controller {
    let mut controller = answering(site, server).await;
    let creation = creating(site, server, "data");
    let call = controller.called().await;
    controller.end(&call, created("ext-data")).await;
    creation.await.unwrap().unwrap();
    controller
}

#[tokio::test]
async fn snapshot_is_made_until_it_is_ready_then_deleted() {
    let site = Site::start(1).await;
    let mut controller = start(&site, 0).await;
    let snapshot = snapshotting(&site, 0, ask("1"));
    let call = controller.called().await;
    assert!(is_snapshot(&call) && call.order == "ext-data" && call.epoch > 0, "{call:?}");
    assert!(head(&site, "data").await.contains("\"rpc\":\"snapshot\""));
    controller.end(&call, made("ext-data", false)).await;
    let call = controller.called().await;
    assert!(is_snapshot(&call), "it is not ready: {call:?}");
    controller.end(&call, made("ext-data", true)).await;
    assert_eq!(snapshot.await.unwrap().unwrap().snapshot, Some(row("ext-data", true)));
    assert!(!registration(&site, "data").await.contains("hunter2\",\"tier"));
    assert!(!registration(&site, "data").await.contains("tier"), "parameters are kept");
    // The same call is answered with the same answer, and another one asks the plugin.
    assert_eq!(
        snapshotting(&site, 0, ask("1")).await.unwrap().unwrap().snapshot,
        Some(row("ext-data", true))
    );
    let quick = snapshotting(&site, 0, SnapshotAsk { no_wait: true, ..ask("2") });
    let call = controller.called().await;
    controller.end(&call, made("ext-data", false)).await;
    assert_eq!(quick.await.unwrap().unwrap().snapshot, Some(row("ext-data", false)));
    let call = controller.called().await;
    let ready = snapshotting(&site, 0, ask("2"));
    controller.end(&call, made("ext-data", true)).await;
    // Until the servers know the answer, a deletion is refused as Busy.
    assert_eq!(ready.await.unwrap().unwrap().snapshot, Some(row("ext-data", true)));

    let deletion = deleting(&site, "operator/all");
    let call = controller.called().await;
    assert!(matches!(&call.method, Some(Method::List(list)) if list.snapshots && list.snapshot == "snap-1"));
    controller.end(&call, listed(vec![row("ext-data", true)])).await;
    let call = controller.called().await;
    assert!(matches!(&call.method, Some(Method::DeleteSnapshot(of)) if of.snapshot == "snap-1"), "{call:?}");
    controller.end(&call, done()).await;
    deletion.await.unwrap().unwrap();
    assert!(!head(&site, "data").await.contains("driver"));
    // It is gone.
    let deletion = deleting(&site, "operator/all");
    let call = controller.called().await;
    controller.end(&call, listed(Vec::new())).await;
    deletion.await.unwrap().unwrap();
    assert!(!controller.is_called(Duration::from_millis(300)).await);
}

#[tokio::test]
async fn list_of_other_snapshots_is_no_deletion() {
    let site = Site::start(1).await;
    let mut controller = start(&site, 0).await;
    let other = ExternalSnapshot { id: "snap-2".into(), ..row("ext-data", true) };
    for (snapshots, next) in [(vec![other.clone()], "next"), (vec![other], ""), (Vec::new(), "next")] {
        let deletion = deleting(&site, "operator/all");
        let call = controller.called().await;
        let listed = Listed { snapshots, next: next.into(), ..Listed::default() };
        controller.end(&call, How::Answer(Answer { listed: Some(listed), ..Answer::default() })).await;
        let error = deletion.await.unwrap().unwrap_err();
        assert_eq!(error.kind, "PluginError");
        assert!(error.message.contains("lists others"), "{}", error.message);
    }
}

#[tokio::test]
async fn call_for_the_same_snapshot_joins_the_first() {
    let site = Site::start(1).await;
    let mut controller = start(&site, 0).await;
    let first = snapshotting(&site, 0, ask("1"));
    let call = controller.called().await;
    controller.end(&call, made("ext-data", false)).await;
    let call = controller.called().await;
    let second = snapshotting(&site, 0, SnapshotAsk { no_wait: true, ..ask("2") }).await.unwrap().unwrap();
    assert_eq!(second.snapshot, Some(row("ext-data", false)));
    let other = SnapshotAsk { name: "tuesday".into(), ..ask("3") };
    assert_eq!(snapshotting(&site, 0, other).await.unwrap().unwrap_err().kind, "Busy");
    controller.end(&call, made("ext-data", true)).await;
    assert_eq!(first.await.unwrap().unwrap().snapshot, Some(row("ext-data", true)));
    assert!(!controller.is_called(Duration::from_millis(300)).await);
}

#[tokio::test]
async fn refused_snapshot_is_over() {
    let site = Site::start(2).await;
    let mut controller = start(&site, 1).await;
    for (n, (before, how, kind)) in [
        (None, refused(12), "PluginError"),
        (None, failed(CallClass::Withheld, None), "PluginError"),
        // An earlier call may have made it.
        (Some(failed(CallClass::Unknown, None)), refused(12), "Uncertain"),
        // This status says that nothing was made (CSI rule 36).
        (Some(failed(CallClass::Unknown, None)), refused(9), "PluginError"),
    ]
    .into_iter()
    .enumerate()
    {
        // The answer is known at a server that did not make the call.
        let snapshot = snapshotting(&site, 0, ask(&n.to_string()));
        if let Some(before) = before {
            let call = controller.called().await;
            controller.end(&call, before).await;
        }
        let call = controller.called().await;
        assert!(is_snapshot(&call), "{call:?}");
        controller.end(&call, how).await;
        let error = snapshot.await.unwrap().unwrap_err();
        assert_eq!(error.kind, kind, "{error:?}");
    }
    assert!(!controller.is_called(Duration::from_millis(500)).await);
}

#[tokio::test]
async fn snapshot_of_anothers_volume_is_refused() {
    let site = Site::start(1).await;
    let mut controller = start(&site, 0).await;
    for who in ["operator/creates", "node/n-creates"] {
        let denied = changing(&site, 0, who, What::Snapshot(ask("1"))).await.unwrap().unwrap_err();
        assert_eq!(denied.kind, "NotAuthorized", "{who}: {denied:?}");
        let deletion = deleting(&site, who);
        let call = controller.called().await;
        controller.end(&call, listed(vec![row("ext-data", true)])).await;
        let denied = deletion.await.unwrap().unwrap_err();
        assert_eq!(denied.kind, "NotAuthorized", "{who}: {denied:?}");
    }
    // Nobody has registered the volume.
    let deletion = deleting(&site, "operator/all");
    let call = controller.called().await;
    controller.end(&call, listed(vec![row("ext-other", true)])).await;
    assert_eq!(deletion.await.unwrap().unwrap_err().kind, "NotAuthorized");
    for wrong in [
        SnapshotAsk { name: String::new(), ..ask("1") },
        SnapshotAsk { call: String::new(), ..ask("1") },
        SnapshotAsk { name: "a\nb".into(), ..ask("1") },
        SnapshotAsk { parameters: [("k".to_owned(), "x".repeat(10_000))].into(), ..ask("1") },
    ] {
        let error = snapshotting(&site, 0, wrong).await.unwrap().unwrap_err();
        assert_eq!(error.kind, "InvalidArgument", "{error:?}");
    }
    assert!(!controller.is_called(Duration::from_millis(300)).await);
}

/// What the controller's node answers is checked, and other calls have their turns.
#[tokio::test]
async fn lie_in_the_answer_to_a_snapshot_is_nothing() {
    let site = Site::start(1).await;
    let mut controller = start(&site, 0).await;
    let snapshot = snapshotting(&site, 0, ask("1"));
    for lie in [made("ext-other", true), created("ext-other"), done()] {
        let call = controller.called().await;
        assert!(is_snapshot(&call), "{call:?}");
        controller.end(&call, lie).await;
    }
    let other = SnapshotAsk { name: "tuesday".into(), ..ask("2") };
    let busy = snapshotting(&site, 0, other).await.unwrap().unwrap_err();
    assert_eq!((busy.kind.as_str(), busy.retryable), ("Busy", true), "{busy:?}");
    let (n1, _one) = user(&site, "n1", 0).await;
    let claim = claiming(&n1, 0, "data");
    let (mut is_attached, mut is_made) = (false, false);
    while !is_attached || !is_made {
        let call = controller.called().await;
        match is_publish(&call) {
            true => {
                controller.end(&call, crate::attach::attached("/dev/x")).await;
                is_attached = true;
            }
            false if is_attached => {
                controller.end(&call, made("ext-data", true)).await;
                is_made = true;
            }
            false => controller.end(&call, failed(CallClass::Again, Some(10))).await,
        }
    }
    claim.await.unwrap().unwrap();
    snapshot.await.unwrap().unwrap();
}

#[tokio::test]
async fn snapshot_of_a_killed_server_goes_on() {
    let mut site = Site::start(2).await;
    let mut controller = start(&site, 0).await;
    let snapshot = snapshotting(&site, 1, ask("1"));
    let lost = controller.called().await;
    site.servers[0].kill();
    controller.join_again(1).await;
    answers(&mut controller).await;
    let call = controller.called_within(Duration::from_secs(30)).await;
    assert!(is_snapshot(&call) && call.epoch > lost.epoch, "{call:?}");
    controller.end(&call, made("ext-data", true)).await;
    assert_eq!(snapshot.await.unwrap().unwrap().snapshot, Some(row("ext-data", true)));
    assert!(!head(&site, "data").await.contains("driver"));
}
