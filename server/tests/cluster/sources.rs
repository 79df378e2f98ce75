//! Volumes that are created from snapshots and as clones. The controller runs on another node, and is the test.

use std::time::Duration;

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::controller_call::Method;
use csi_proto::cluster::v1::{
    Answer, CallClass, ControllerCall, CreateAsk, CreatedVolume, DeleteAsk, Deregister, ExternalSnapshot,
    Listed, Register, Spec, VolumeRow,
};
use tokio::task::JoinHandle;

use crate::attach::{Controller, claiming, row, user};
use crate::attach_random::Dice;
use crate::creations::{
    changing, create, created, creating, deleting, done, failed, is_create, is_delete, nothing_is_left,
    registration,
};
use crate::questions::answering;
use crate::site::{Refusal, Site, eventually};

/// Rounds of a creation and the deletion of its source.
const ROUNDS: usize = 24;

/// Returns the creation of `copy` from a snapshot or as a clone.
fn from(snapshot: &str, clone: &str) -> CreateAsk {
    let ask = create("copy");
    let of_source = |spec| Spec { snapshot: snapshot.into(), clone: clone.into(), ..spec };
    CreateAsk { spec: ask.spec.map(of_source), ..ask }
}

fn creating_from(
    site: &Site,
    server: usize,
    who: &str,
    ask: CreateAsk,
) -> JoinHandle<Result<VolumeRow, Refusal>> {
    changing(site, server, who, What::CreateFrom(ask))
}

/// Returns the sources of a creation: the snapshot, and the volume to clone.
fn sources(call: &ControllerCall) -> (&str, &str) {
    let Some(Method::Create(of)) = &call.method else { panic!("{call:?}") };
    (&of.source_snapshot, &of.source_volume)
}

/// Returns the answer of a plugin that has named the source.
fn copied(external_id: &str) -> How {
    let created =
        CreatedVolume { external_id: external_id.into(), from_source: true, ..CreatedVolume::default() };
    How::Answer(Answer { created: Some(created), ..Answer::default() })
}

fn listed(snapshots: &[(&str, &str)]) -> How {
    let rows = snapshots.iter().map(|(id, external_id)| ExternalSnapshot {
        id: (*id).into(),
        external_id: (*external_id).into(),
        ready: true,
        ..ExternalSnapshot::default()
    });
    let listed = Listed { snapshots: rows.collect(), ..Listed::default() };
    How::Answer(Answer { listed: Some(listed), ..Answer::default() })
}

/// Creates the volume `data` for this caller. Its ID is `ext-data`.
async fn start(site: &Site, who: &str) -> Controller {
    let mut controller = answering(site, 0).await;
    let creation = changing(site, 0, who, What::Create(create("data")));
    let call = controller.called().await;
    controller.end(&call, created("ext-data")).await;
    creation.await.unwrap().unwrap();
    controller
}

#[tokio::test]
async fn clone_is_made_of_the_volume() {
    let site = Site::start(1).await;
    let mut controller = start(&site, "operator/all").await;
    let creation = creating_from(&site, 0, "operator/all", from("", "data"));
    let call = controller.called().await;
    assert!(is_create(&call) && sources(&call) == ("", "ext-data"), "{call:?}");
    controller.end(&call, copied("ext-copy")).await;
    let made = creation.await.unwrap().unwrap();
    assert_eq!((made.external_id.as_str(), made.standing.as_str()), ("ext-copy", "registered"));
    assert_eq!(made.spec.unwrap().clone, "data");
    // The same call again finds the volume, also without its source.
    deleting(&site, 0, "data");
    let call = controller.called().await;
    controller.end(&call, done()).await;
    let again = creating_from(&site, 0, "operator/all", from("", "data")).await.unwrap().unwrap();
    assert_eq!(again.external_id, "ext-copy");
    let other = creating_from(&site, 0, "operator/all", from("snap-1", "")).await.unwrap().unwrap_err();
    assert_eq!(other.kind, "AlreadyExists", "{other:?}");
    assert!(!controller.is_called(Duration::from_millis(300)).await);
}

/// Who has the grant `snapshot` everywhere may name any snapshot, so the plugin is not asked for its volume.
#[tokio::test]
async fn any_snapshot_is_of_the_grant_for_all() {
    let site = Site::start(1).await;
    let mut controller = answering(&site, 0).await;
    let creation = creating_from(&site, 0, "operator/all", from("snap-1", ""));
    let call = controller.called().await;
    assert!(sources(&call) == ("snap-1", ""), "{call:?}");
    controller.end(&call, copied("ext-copy")).await;
    assert_eq!(creation.await.unwrap().unwrap().spec.unwrap().snapshot, "snap-1");
}

#[tokio::test]
async fn snapshot_of_an_own_volume_is_a_source() {
    let site = Site::start(1).await;
    for who in ["operator/creates", "node/n-creates"] {
        let mut controller = start(&site, who).await;
        let creation = creating_from(&site, 0, who, from("snap-1", ""));
        let call = controller.called().await;
        let Some(Method::List(list)) = &call.method else { panic!("{call:?}") };
        assert!(list.snapshots && list.snapshot == "snap-1", "{list:?}");
        controller.end(&call, listed(&[("snap-1", "ext-data")])).await;
        let call = controller.called().await;
        assert_eq!(sources(&call), ("snap-1", ""));
        controller.end(&call, copied("ext-copy")).await;
        creation.await.unwrap().unwrap();
        for volume in ["copy", "data"] {
            let delete = DeleteAsk { namespace: String::new(), volume: volume.into(), ..Default::default() };
            let deletion = changing(&site, 0, who, What::Delete(delete));
            let call = controller.called().await;
            controller.end(&call, done()).await;
            deletion.await.unwrap().unwrap();
        }
        nothing_is_left(&site).await;
    }
}

#[tokio::test]
async fn source_of_another_is_refused() {
    let site = Site::start(1).await;
    let mut controller = start(&site, "operator/all").await;
    for (listing, why) in [
        (listed(&[("snap-1", "ext-data")]), "the volume is another identity's"),
        (listed(&[("snap-1", "ext-unknown")]), "nobody has registered the volume"),
        (listed(&[("snap-2", "ext-data")]), "the plugin answers with another snapshot"),
        (listed(&[]), "there is no such snapshot"),
    ] {
        let creation = creating_from(&site, 0, "operator/creates", from("snap-1", ""));
        let call = controller.called().await;
        assert!(matches!(call.method, Some(Method::List(_))), "{why}: {call:?}");
        controller.end(&call, listing).await;
        let denied = creation.await.unwrap().unwrap_err();
        assert_eq!(denied.kind, "NotAuthorized", "{why}: {denied:?}");
    }
    let denied = creating_from(&site, 0, "operator/creates", from("", "data")).await.unwrap().unwrap_err();
    assert_eq!(denied.kind, "NotAuthorized", "{denied:?}");
    let missing = creating_from(&site, 0, "operator/all", from("", "nothing")).await.unwrap().unwrap_err();
    assert_eq!(missing.kind, "NotFound", "{missing:?}");
    let other = CreateAsk { plugin: "q".into(), ..from("", "data") };
    let other = creating_from(&site, 0, "operator/all", other).await.unwrap().unwrap_err();
    assert_eq!(other.kind, "InvalidArgument", "{other:?}");
    // Its external ID is not known.
    let going = creating(&site, 0, "going");
    let call = controller.called().await;
    let unborn = creating_from(&site, 0, "operator/all", from("", "going")).await.unwrap().unwrap_err();
    assert_eq!(unborn.kind, "Busy", "{unborn:?}");
    controller.end(&call, created("ext-going")).await;
    going.await.unwrap().unwrap();
    assert!(row(&site, "vol/default/copy/").await.is_empty());
    assert!(!controller.is_called(Duration::from_millis(300)).await);
}

#[tokio::test]
async fn call_with_a_wrong_source_is_refused() {
    let site = Site::start(1).await;
    let mut controller = start(&site, "operator/all").await;
    let spec = from("", "data").spec;
    let register = Register {
        volume: "copy".into(),
        plugin: "p".into(),
        external_id: "ext-copy".into(),
        spec,
        ..Register::default()
    };
    for (why, what) in [
        ("two sources", What::CreateFrom(from("snap-1", "data"))),
        ("no source", What::CreateFrom(create("copy"))),
        ("a source of an empty volume", What::Create(from("", "data"))),
        ("a volume with a line", What::CreateFrom(from("", "a\nb"))),
        ("a snapshot with a line", What::CreateFrom(from("a\nb", ""))),
        ("a long snapshot", What::CreateFrom(from(&"x".repeat(10_000), ""))),
        ("a registration", What::Register(register)),
    ] {
        let error = changing(&site, 0, "operator/all", what).await.unwrap().unwrap_err();
        assert_eq!(error.kind, "InvalidArgument", "{why}: {error:?}");
    }
    assert!(row(&site, "vol/default/copy/").await.is_empty());
    assert!(!controller.is_called(Duration::from_millis(300)).await);
}

/// A plugin that ignores the source has made an empty volume, or had one of the name. So does the csid of an earlier version.
#[tokio::test]
async fn volume_of_an_unconfirmed_source_is_not_used() {
    let site = Site::start(1).await;
    let mut controller = start(&site, "operator/all").await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let creation = creating_from(&site, 0, "operator/all", from("", "data"));
    let call = controller.called().await;
    controller.end(&call, created("ext-copy")).await;
    let doubt = creation.await.unwrap().unwrap_err();
    assert_eq!((doubt.kind.as_str(), doubt.retryable), ("PluginError", false), "{doubt:?}");
    assert!(doubt.message.contains("ext-copy"), "{doubt:?}");
    let kept = registration(&site, "copy").await;
    assert!(kept.contains("\"sourceless\":true") && kept.contains("parked"), "{kept}");
    let again = creating_from(&site, 0, "operator/all", from("", "data")).await.unwrap().unwrap_err();
    assert_eq!(again.kind, "PluginError", "{again:?}");
    assert_eq!(claiming(&n1, 0, "copy").await.unwrap().unwrap_err().kind, "Busy");
    assert!(!controller.is_called(Duration::from_secs(1)).await, "the volume is made or deleted unasked");
    // A deletion that the plugin refuses leaves the volume as it was.
    let deletion = deleting(&site, 0, "copy");
    let call = controller.called().await;
    assert!(is_delete(&call) && call.order == "ext-copy", "{call:?}");
    controller.end(&call, failed(CallClass::Refused, Some(9))).await;
    deletion.await.unwrap().unwrap_err();
    let again = creating_from(&site, 0, "operator/all", from("", "data")).await.unwrap().unwrap_err();
    assert_eq!(again.kind, "PluginError", "{again:?}");
    let deletion = deleting(&site, 0, "copy");
    let call = controller.called().await;
    controller.end(&call, done()).await;
    deletion.await.unwrap().unwrap();
    eventually("the copy is gone", async || row(&site, "vol/default/copy/").await.is_empty()).await;
}

/// The source is in the intent, so another server names the same one.
#[tokio::test]
async fn killed_server_leaves_the_source_to_another() {
    let mut site = Site::start(2).await;
    let mut controller = start(&site, "operator/all").await;
    let creation = creating_from(&site, 1, "operator/all", from("", "data"));
    let lost = controller.called().await;
    assert_eq!(sources(&lost), ("", "ext-data"));
    site.servers[0].kill();
    controller.join_again(1).await;
    let call = controller.called_within(Duration::from_secs(30)).await;
    assert!(sources(&call) == ("", "ext-data") && call.order == lost.order, "{call:?}");
    controller.end(&call, copied("ext-copy")).await;
    assert_eq!(creation.await.unwrap().unwrap().external_id, "ext-copy");
}

/// Has the plugin delete a volume.
async fn delete(site: &Site, controller: &mut Controller, volume: &str) {
    let deletion = deleting(site, 0, volume);
    let call = controller.called().await;
    assert!(is_delete(&call), "{call:?}");
    controller.end(&call, done()).await;
    deletion.await.unwrap().unwrap();
}

/// Begins a creation and the deletion of its source at any servers, in any order. The plugin answers late.
#[tokio::test]
async fn source_is_not_deleted_while_it_is_copied() {
    let site = Site::start(3).await;
    let mut controller = answering(&site, 0).await;
    let mut dice = Dice(7);
    let (mut kept, mut refused) = (0, 0);
    for round in 0..ROUNDS {
        let making = changing(&site, 0, "operator/all", What::Create(create("data")));
        let call = controller.called().await;
        controller.end(&call, created(&format!("ext-data-{round}"))).await;
        making.await.unwrap().unwrap();

        let [maker, deleter] = [(); 2].map(|()| dice.roll(3) as usize);
        let gap = Duration::from_millis(dice.roll(40) * dice.roll(4));
        let late = Duration::from_millis([0, 100, 700][dice.roll(3) as usize]);
        let (creation, deletion) = if dice.roll(2) == 0 {
            let creation = creating_from(&site, maker, "operator/all", from("", "data"));
            tokio::time::sleep(gap).await;
            (creation, deleting(&site, deleter, "data"))
        } else {
            let deletion = deleting(&site, deleter, "data");
            tokio::time::sleep(gap).await;
            (creating_from(&site, maker, "operator/all", from("", "data")), deletion)
        };
        let both = async { (creation.await.unwrap(), deletion.await.unwrap()) };
        tokio::pin!(both);
        let (mut is_made, mut is_deleted) = (false, false);
        let (made, gone) = loop {
            let call = tokio::select! {
                outcome = &mut both => break outcome,
                call = controller.called() => call,
            };
            if is_create(&call) {
                assert!(!is_deleted, "round {round}: a volume is made from a deleted one");
                is_made = true;
                assert!(!controller.is_called(late).await, "round {round}: the source is deleted");
                controller.end(&call, copied("ext-copy")).await;
            } else {
                assert!(is_delete(&call) && call.order == format!("ext-data-{round}"), "{call:?}");
                is_deleted = true;
                tokio::time::sleep(late).await;
                controller.end(&call, done()).await;
            }
        };
        match (&made, &gone) {
            (Ok(_), Ok(_)) => {}
            (Ok(_), Err(busy)) if busy.kind == "Busy" => kept += 1,
            (Err(error), Ok(_)) if ["Busy", "NotFound"].contains(&error.kind.as_str()) => refused += 1,
            other => panic!("round {round}: {other:?}"),
        }
        assert_eq!((is_made, is_deleted), (made.is_ok(), gone.is_ok()), "round {round}");
        if made.is_ok() {
            delete(&site, &mut controller, "copy").await;
        }
        if gone.is_err() {
            delete(&site, &mut controller, "data").await;
        }
        nothing_is_left(&site).await;
    }
    assert!(kept > 0 && refused > 0, "{kept} deletions and {refused} creations were refused");
}

/// A server of another version may have written the record of the copy.
#[tokio::test]
async fn source_of_an_unreadable_copy_is_not_deleted() {
    let site = Site::start(2).await;
    let mut controller = start(&site, "operator/all").await;
    let _creation = creating_from(&site, 0, "operator/all", from("", "data"));
    let call = controller.called().await;
    assert!(is_create(&call), "{call:?}");
    site.raw().await.put("/csid/v1/vol/default/copy/reg", "\"hunter2\"").await;
    eventually("the deletion fails by the record", async || {
        let refused = deleting(&site, 1, "data").await.unwrap().unwrap_err();
        // The volume may be of another namespace.
        assert!(!refused.message.contains("hunter2") && !refused.message.contains("/csid/v1"), "{refused:?}");
        // Until the damage has come to the server, it knows the copy.
        refused.kind == "Internal" && refused.message.contains("cannot be read")
    })
    .await;
    assert!(!controller.is_called(Duration::from_millis(500)).await, "the plugin was sent a deletion");
    let source = registration(&site, "data").await;
    assert!(!source.is_empty() && !source.contains("deleting"), "{source}");
}

/// The source has another name by then. The server that began the creation is killed.
#[tokio::test]
async fn ended_creation_leaves_its_source_free() {
    let mut site = Site::start(3).await;
    let mut controller = start(&site, "operator/all").await;
    let creation = creating_from(&site, 1, "operator/all", from("", "data"));
    let lost = controller.called().await;
    assert!(is_create(&lost), "{lost:?}");
    let deregister = Deregister { volume: "data".into(), ..Deregister::default() };
    changing(&site, 2, "operator/all", What::Deregister(deregister)).await.unwrap().unwrap();
    let register = Register {
        volume: "other".into(),
        plugin: "p".into(),
        external_id: "ext-data".into(),
        spec: create("other").spec,
        ..Register::default()
    };
    changing(&site, 2, "operator/all", What::Register(register)).await.unwrap().unwrap();
    let busy = deleting(&site, 2, "other").await.unwrap().unwrap_err();
    assert!(busy.kind == "Busy" && busy.message.contains("default/copy"), "{busy:?}");
    site.servers[0].kill();
    let busy = deleting(&site, 1, "other").await.unwrap().unwrap_err();
    assert_eq!(busy.kind, "Busy", "{busy:?}");
    controller.join_again(1).await;
    let call = controller.called_within(Duration::from_secs(30)).await;
    assert!(is_create(&call) && call.order == lost.order, "{call:?}");
    controller.end(&call, copied("ext-copy")).await;
    creation.await.unwrap().unwrap();
    let deletion = deleting(&site, 2, "other");
    let call = controller.called().await;
    assert!(is_delete(&call) && call.order == "ext-data", "{call:?}");
    controller.end(&call, done()).await;
    deletion.await.unwrap().unwrap();
}

#[tokio::test]
async fn creation_that_was_never_sent_can_be_deleted() {
    let site = Site::start(2).await;
    let mut controller = start(&site, "operator/all").await;
    controller.leave().await;
    eventually("the session is gone", async || row(&site, "session/").await.is_empty()).await;
    let creation = creating_from(&site, 1, "operator/all", from("", "data"));
    eventually("the intent is there", async || !registration(&site, "copy").await.is_empty()).await;
    let busy = deleting(&site, 0, "data").await.unwrap().unwrap_err();
    assert_eq!(busy.kind, "Busy", "{busy:?}");
    deleting(&site, 0, "copy").await.unwrap().unwrap();
    creation.await.unwrap().unwrap_err();
    let deletion = deleting(&site, 0, "data");
    eventually("the deletion has begun", async || registration(&site, "data").await.contains("deleting"))
        .await;
    controller.join_again(0).await;
    let call = controller.called_within(Duration::from_secs(30)).await;
    assert!(is_delete(&call) && call.order == "ext-data", "{call:?}");
    controller.end(&call, done()).await;
    deletion.await.unwrap().unwrap();
    nothing_is_left(&site).await;
}
