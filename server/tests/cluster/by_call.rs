//! AttachVolume and DetachVolume through servers: who may, what excludes what, and what repeats are answered.

use std::time::Duration;

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::controller_call::Method;
use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{
    Accept, Answer, AttachAsk, AttachmentRow, AuditAsk, BlockAsk, CallClass, ChangeAsk, ClaimAsk,
    ControllerCall, DetachAsk, DrainAsk, ForgetAsk, Machine, NodeRow, PluginReport, UndrainAsk, UpgradeAsk,
    VolumeAsk, VolumeRow,
};
use tokio::task::JoinHandle;
use tonic::Code;
use tonic::transport::Channel;

use crate::attach::{Controller, attached, claiming, failed, head, is_publish, node_id, row, user};
use crate::fence::{fence, set, show};
use crate::operators::{csictl, operator};
use crate::site::{Refusal, Site, eventually};

pub type Client = csi_proto::cluster::v1::cluster_client::ClusterClient<Channel>;

/// Makes a call with a name of its own.
pub fn attach_ask(volume: &str, node_id: &str) -> AttachAsk {
    let call = csid::random::name();
    AttachAsk { volume: volume.into(), node_id: node_id.into(), call, ..AttachAsk::default() }
}

pub fn detach_ask(volume: &str, node_id: &str) -> DetachAsk {
    DetachAsk { volume: volume.into(), node_id: node_id.into(), ..DetachAsk::default() }
}

/// Makes a change. As csid and csictl do, it is repeated while the servers go on.
pub async fn change(client: &mut Client, what: What) -> Result<VolumeRow, Refusal> {
    let what = match with_id(client, what).await? {
        Ok(what) => what,
        Err(row) => return Ok(row),
    };
    loop {
        match ask(client, what.clone()).await {
            Err(refusal) if refusal.kind == "TimedOut" => {}
            answer => return answer,
        }
    }
}

/// Makes a change once. A detach names what it ends, as csid and csictl do.
pub async fn once(client: &mut Client, what: What) -> Result<VolumeRow, Refusal> {
    match with_id(client, what).await? {
        Ok(what) => ask(client, what).await,
        Err(row) => Ok(row),
    }
}

/// Adds the ID of the attachment to a detach that has none. `Err`: nothing is attached.
async fn with_id(client: &mut Client, what: What) -> Result<Result<What, VolumeRow>, Refusal> {
    let What::Detach(detach) = what else { return Ok(Ok(what)) };
    let row = ask(client, What::Detach(detach.clone())).await?;
    Ok(match &row.attached {
        Some(at) => Ok(What::Detach(DetachAsk { id: at.id.clone(), ..detach })),
        None => Err(row),
    })
}

/// Makes one call.
pub async fn ask(client: &mut Client, what: What) -> Result<VolumeRow, Refusal> {
    let answer = client.change(ChangeAsk { what: Some(what) }).await;
    answer.map(tonic::Response::into_inner).map_err(|status| Refusal::of(&status))
}

/// Accepts a node and its names by plugins, as an operator who vouches for them.
pub async fn accept(site: &Site, node: &str) {
    let row = show(site, node).await;
    let Machine { machine_id, journal_id, .. } = row.machine.unwrap();
    let names = row.plugins.into_iter().map(|of| (of.plugin, of.node_id)).collect();
    let accept = Accept { machine_id, journal_id, revision: row.revision, names, forget: false };
    set(site, 0, node, Change::Accept(accept)).await.unwrap();
}

/// Attaches a volume, in a task.
pub fn attaching(client: &Client, ask: AttachAsk) -> JoinHandle<Result<AttachmentRow, Refusal>> {
    let mut client = client.clone();
    tokio::spawn(async move { Ok(change(&mut client, What::Attach(ask)).await?.attached.unwrap()) })
}

/// Begins to attach a volume. Returns the task, and the call that its controller gets.
pub async fn attach_begins(
    client: &Client,
    controller: &mut Controller,
    ask: AttachAsk,
) -> (JoinHandle<Result<AttachmentRow, Refusal>>, ControllerCall) {
    let attach = attaching(client, ask);
    let call = controller.called().await;
    assert!(is_publish(&call), "{call:?}");
    (attach, call)
}

/// Detaches a volume, in a task.
pub fn detaching(client: &Client, ask: DetachAsk) -> JoinHandle<Result<(), Refusal>> {
    let mut client = client.clone();
    tokio::spawn(async move { change(&mut client, What::Detach(ask)).await.map(drop) })
}

/// Returns the row of an attachment in etcd. Empty: there is none.
pub async fn at(site: &Site, volume: &str, node_id: &str) -> String {
    row(site, &format!("vol/default/{volume}/at/@/{}", node_id.replace(' ', "%20"))).await
}

async fn shown(client: &mut Client, volume: &str) -> VolumeRow {
    let ask = VolumeAsk { namespace: String::new(), volume: volume.into(), ..VolumeAsk::default() };
    client.volume(ask).await.unwrap().into_inner()
}

fn conflict(refusal: &Refusal) -> bool {
    refusal.kind == "ClaimConflict" && refusal.code == Code::FailedPrecondition
}

#[tokio::test]
async fn volume_is_attached_by_call_and_detached() {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    // The server that is asked has no session of the controller.
    let mut client = site.operator(1, "attaches");
    let ask = AttachAsk { read_only: true, ..attach_ask("data", "id of n1") };
    let (attach, call) = attach_begins(&client, &mut controller, ask.clone()).await;
    let Some(Method::Publish(publish)) = &call.method else { panic!("{call:?}") };
    assert_eq!((call.order.as_str(), publish.node_id.as_str()), ("ext-data", "id of n1"));
    assert_eq!(publish.volume_context["share"], "hunter2");
    assert!(publish.read_only && publish.capability.as_ref().unwrap().access_mode == "single-node-writer");
    // The intent is in etcd before the call.
    let intent = head(&site, "data").await;
    assert!(intent.contains(&call.call) && intent.contains("\"node-id\":\"id of n1\""), "{intent}");
    assert!(at(&site, "data", "id of n1").await.contains("\"leg\":\"making\""));
    controller.end(&call, attached("/dev/x")).await;
    let answer = attach.await.unwrap().unwrap();
    assert_eq!((answer.node_id.as_str(), answer.node.as_str()), ("id of n1", "n1"));
    assert_eq!((answer.state.as_str(), answer.owner.as_str()), ("attached", "operator/attaches"));
    assert_eq!(answer.publish_context["device"], "/dev/x");
    eventually("nobody calls", async || !head(&site, "data").await.contains("driver")).await;

    // The same call has the same answer, at another server, too. Others do not get the context.
    let mut other = site.operator(0, "attaches");
    assert_eq!(once(&mut other, What::Attach(ask.clone())).await.unwrap().attached.unwrap(), answer);
    let listed = shown(&mut site.operator(0, "all"), "data").await.attachments;
    let without = AttachmentRow { publish_context: Default::default(), ..answer.clone() };
    assert_eq!(listed, [without]);
    let otherwise = once(&mut other, What::Attach(attach_ask("data", "id of n1"))).await.unwrap_err();
    assert!(otherwise.kind == "AlreadyExists" && otherwise.message.contains("read-only"), "{otherwise:?}");

    // It keeps claims out, and is detached by its own node ID alone.
    let refused = claiming(&n1, 0, "data").await.unwrap().unwrap_err();
    assert!(conflict(&refused) && refused.message.contains("AttachVolume"), "{refused:?}");
    once(&mut client, What::Detach(detach_ask("data", "id of n2"))).await.unwrap();
    assert!(at(&site, "data", "id of n1").await.contains("\"leg\":\"present\""));
    let detach = detaching(&client, detach_ask("data", "id of n1"));
    let call = controller.called().await;
    assert!(!is_publish(&call) && node_id(&call) == "id of n1", "{call:?}");
    assert!(conflict(&claiming(&n1, 0, "data").await.unwrap().unwrap_err()), "it is not detached yet");
    controller.end(&call, How::Answer(Answer::default())).await;
    detach.await.unwrap().unwrap();
    assert_eq!(at(&site, "data", "id of n1").await, "");
    once(&mut client, What::Detach(detach_ask("data", "id of n1"))).await.expect("it is detached already");
    let (claim, _) = (claiming(&n1, 0, "data"), controller.publish().await);
    claim.await.unwrap().unwrap();
    assert!(!controller.is_called(Duration::from_millis(500)).await);
    let audit = site.admin(0, "all").audit(AuditAsk {}).await.unwrap().into_inner().message().await.unwrap();
    assert_eq!(audit, None);
}

#[tokio::test]
async fn claims_and_attachments_by_call_exclude_each_other() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let mut client = site.operator(0, "all");
    let (claim, _) = (claiming(&n1, 0, "data"), controller.publish().await);
    let granted = claim.await.unwrap().unwrap();
    // A claim's attachment is not touched by them.
    for what in [
        What::Attach(attach_ask("data", "id of n1")),
        What::Attach(attach_ask("data", "elsewhere")),
        What::Detach(detach_ask("data", "id of n1")),
        What::Detach(DetachAsk { forget: true, ..detach_ask("data", "id of n1") }),
    ] {
        let refused = once(&mut client, what).await.unwrap_err();
        assert!(conflict(&refused) && refused.holders == ["n1/web"], "{refused:?}");
    }
    n1.detached(0, "data", &granted.claim).await.unwrap();
    controller.unpublish().await;
    eventually("the claim is free", async || row(&site, "vol/default/data/claim").await.is_empty()).await;

    // A claim waits in the queue until the last attachment is gone.
    let (first, _) = (attaching(&client, attach_ask("data", "id of n1")), controller.publish().await);
    first.await.unwrap().unwrap();
    let (second, _) = (attaching(&client, attach_ask("data", "elsewhere")), controller.publish().await);
    assert_eq!(second.await.unwrap().unwrap().node, "", "the servers know no such node");
    let ask = ClaimAsk { queue_ms: 60_000, call: "call 2".into(), ..n1.ask("data", "web") };
    let mut waiting = n1.client(0);
    let waits = tokio::spawn(async move {
        loop {
            match waiting.claim(ask.clone()).await {
                Ok(granted) => return granted.into_inner(),
                Err(status) => assert!(Refusal::of(&status).kind != "Busy", "{status:?}"),
            }
        }
    });
    eventually("it waits", async || !row(&site, "vol/default/data/queue").await.is_empty()).await;
    for id in ["id of n1", "elsewhere"] {
        assert!(!row(&site, "vol/default/data/queue").await.is_empty());
        let (detach, _) = (detaching(&client, detach_ask("data", id)), controller.unpublish().await);
        detach.await.unwrap().unwrap();
    }
    assert_eq!(node_id(&controller.publish().await), "id of n1");
    waits.await.unwrap();
}

#[tokio::test]
async fn call_that_may_not_attach_changes_nothing() {
    let site = Site::start(1).await;
    for volume in ["data", "other"] {
        site.register(volume, "single-node-writer").await;
    }
    let mut client = site.operator(0, "attaches");
    let none = once(&mut client, What::Attach(attach_ask("data", "x"))).await.unwrap_err();
    assert_eq!(none.kind, "PluginUnavailable", "no host has the controller: {none:?}");
    let mut controller = Controller::start(&site, "c1", 0).await;
    let long = "x".repeat(1000);
    let kind = |of: Result<VolumeRow, Refusal>| of.map(|_| ()).unwrap_err().kind;
    for (ask, due) in [
        (attach_ask("none", "x"), "NotFound"),
        (attach_ask("", "x"), "InvalidArgument"),
        (attach_ask("data", ""), "InvalidArgument"),
        (attach_ask("data", &long), "InvalidArgument"),
        (attach_ask("data", "a\nb"), "InvalidArgument"),
        (AttachAsk { access_mode: "any".into(), ..attach_ask("data", "x") }, "InvalidArgument"),
        (AttachAsk { attachment_mode: "any".into(), ..attach_ask("data", "x") }, "InvalidArgument"),
        // The volume was registered without it.
        (
            AttachAsk { access_mode: "multi-node-multi-writer".into(), ..attach_ask("data", "x") },
            "InvalidArgument",
        ),
        (AttachAsk { namespace: "other".into(), ..attach_ask("data", "x") }, "NotAuthorized"),
        (AttachAsk { namespace: long.clone(), ..attach_ask("data", "x") }, "InvalidArgument"),
    ] {
        assert_eq!(kind(once(&mut client, What::Attach(ask.clone())).await), due, "{ask:?}");
    }
    for (ask, due) in [
        (detach_ask("data", ""), "InvalidArgument"),
        (detach_ask("", "x"), "InvalidArgument"),
        (DetachAsk { namespace: "other".into(), ..detach_ask("data", "x") }, "NotAuthorized"),
        (DetachAsk { forget: true, ..detach_ask("data", "x") }, "NotAuthorized"),
    ] {
        assert_eq!(kind(once(&mut client, What::Detach(ask.clone())).await), due, "{ask:?}");
    }
    once(&mut client, What::Detach(detach_ask("none", "x"))).await.expect("it is not attached");
    assert!(row(&site, "vol/default/data/at").await.is_empty());
    // Another identity neither shares an attachment nor ends it, unless it may release what others have.
    let (attach, _) = (attaching(&client, attach_ask("data", "x")), controller.publish().await);
    attach.await.unwrap().unwrap();
    let node = site.node("n-attaches");
    let _session = node.join(0).await;
    let mut others = node.client(0);
    assert_eq!(kind(once(&mut others, What::Attach(attach_ask("data", "x"))).await), "NotAuthorized");
    assert_eq!(kind(once(&mut others, What::Detach(detach_ask("data", "x"))).await), "NotAuthorized");
    let mut all = site.operator(0, "all");
    assert_eq!(kind(once(&mut all, What::Attach(attach_ask("data", "x"))).await), "NotAuthorized");
    // A volume that is attached stays.
    for what in [
        What::Delete(csi_proto::cluster::v1::DeleteAsk {
            namespace: String::new(),
            volume: "data".into(),
            ..Default::default()
        }),
        What::Deregister(csi_proto::cluster::v1::Deregister {
            namespace: String::new(),
            volume: "data".into(),
            ..Default::default()
        }),
    ] {
        assert_eq!(kind(once(&mut all, what).await), "Busy");
    }
    let (attach, _) = (attaching(&others, attach_ask("other", "x")), controller.publish().await);
    assert_eq!(attach.await.unwrap().unwrap().owner, "node/n-attaches");
    let (detach, _) = (detaching(&all, detach_ask("data", "x")), controller.unpublish().await);
    detach.await.unwrap().unwrap();
    assert!(!controller.is_called(Duration::from_millis(500)).await);
}

#[tokio::test]
async fn refused_attach_is_undone_before_its_answer() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let client = site.operator(0, "attaches");
    let (attach, call) = attach_begins(&client, &mut controller, attach_ask("data", "x")).await;
    controller.end(&call, failed(CallClass::Refused)).await;
    controller.unpublish().await;
    let refused = attach.await.unwrap().unwrap_err();
    assert!(refused.kind == "PluginError" && refused.message.contains("no such disk"), "{refused:?}");
    assert_eq!(at(&site, "data", "x").await, "");
    // What the plugin was not called for is not undone.
    let (attach, call) = attach_begins(&client, &mut controller, attach_ask("data", "x")).await;
    controller.end(&call, failed(CallClass::Withheld)).await;
    assert!(attach.await.unwrap().unwrap_err().message.contains("no such disk"));
    assert_eq!(at(&site, "data", "x").await, "");
    // The same call is made again when the plugin says so.
    let attach = attaching(&client, attach_ask("data", "x"));
    for class in [CallClass::Again, CallClass::NotSent] {
        let call = controller.called().await;
        assert!(is_publish(&call));
        controller.end(&call, failed(class)).await;
    }
    controller.publish().await;
    attach.await.unwrap().unwrap();
    // A detach that the plugin refuses waits for a caller.
    let detach = detaching(&client, detach_ask("data", "x"));
    let call = controller.called().await;
    controller.end(&call, failed(CallClass::Refused)).await;
    assert_eq!(detach.await.unwrap().unwrap_err().kind, "PluginError");
    assert!(!controller.is_called(Duration::from_secs(1)).await);
    let (detach, _) = (detaching(&client, detach_ask("data", "x")), controller.unpublish().await);
    detach.await.unwrap().unwrap();
}

#[tokio::test]
async fn forgotten_attachment_is_gone_without_the_plugin() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let mut all = site.operator(0, "all");
    let (attach, call) = attach_begins(&all, &mut controller, attach_ask("data", "x")).await;
    let forget = What::Detach(DetachAsk { forget: true, ..detach_ask("data", "x") });
    let early = once(&mut all, forget.clone()).await.unwrap_err();
    assert!(early.kind == "Busy" && early.message.contains("is attaching"), "{early:?}");
    let detach = detaching(&all, detach_ask("data", "x"));
    eventually("it is to be detached", async || at(&site, "data", "x").await.contains("removing")).await;
    let forget = with_id(&mut all, forget).await.unwrap().unwrap();
    ask(&mut all, forget.clone()).await.unwrap();
    detach.await.unwrap().unwrap();
    ask(&mut all, forget).await.expect("a repeat after a lost answer has the same answer");
    assert_eq!(attach.await.unwrap().unwrap_err().kind, "PluginError");
    // The row stays while the call may run. Another attach waits for its end, and gets nothing of it.
    assert!(at(&site, "data", "x").await.contains("forgotten"));
    let again = attaching(&all, attach_ask("data", "x"));
    assert!(!controller.is_called(Duration::from_millis(500)).await);
    controller.end(&call, attached("/dev/forgotten")).await;
    controller.unpublish().await;
    controller.publish().await;
    assert_eq!(again.await.unwrap().unwrap().publish_context["device"], "/dev/x");
    // What the plugin does not detach is gone at once.
    let detach = detaching(&all, detach_ask("data", "x"));
    let call = controller.called().await;
    controller.end(&call, failed(CallClass::Refused)).await;
    detach.await.unwrap().unwrap_err();
    once(&mut all, What::Detach(DetachAsk { forget: true, ..detach_ask("data", "x") })).await.unwrap();
    assert_eq!(at(&site, "data", "x").await, "");
    assert!(!controller.is_called(Duration::from_millis(500)).await);
}

/// The tries of an earlier call may come after its caller has attached the volume again.
#[tokio::test]
async fn late_detach_or_forget_ends_no_newer_attachment() {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let mut all = site.operator(0, "all");
    let (first, _) = (attaching(&all, attach_ask("data", "x")), controller.publish().await);
    let first = first.await.unwrap().unwrap();
    // The question changes nothing.
    let found = ask(&mut all, What::Detach(detach_ask("data", "x"))).await.unwrap().attached.unwrap();
    assert!(found.id == first.id && found.publish_context.is_empty(), "{found:?}");
    let late = DetachAsk { id: found.id, ..detach_ask("data", "x") };
    let (detach, _) = (detaching(&all, late.clone()), controller.unpublish().await);
    detach.await.unwrap().unwrap();
    let (second, _) = (attaching(&all, attach_ask("data", "x")), controller.publish().await);
    assert_ne!(second.await.unwrap().unwrap().id, first.id);
    for server in 0..2 {
        let mut all = site.operator(server, "all");
        ask(&mut all, What::Detach(late.clone())).await.unwrap();
        ask(&mut all, What::Detach(DetachAsk { forget: true, ..late.clone() })).await.unwrap();
        // Another identity is answered the same: what it means has ended.
        ask(&mut site.operator(server, "attaches"), What::Detach(late.clone())).await.unwrap();
    }
    assert!(at(&site, "data", "x").await.contains("present"));
    assert!(!controller.is_called(Duration::from_millis(500)).await);
}

/// A server of the release before would take the rows for those of claims.
#[tokio::test]
async fn attach_waits_until_all_servers_know_it() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let mut client = site.operator(0, "attaches");
    let newest = row(&site, "meta").await;
    let first = newest.replace("\"schema\":2", "\"schema\":1");
    assert_ne!(first, newest);
    site.raw().await.put("/csid/v1/meta", &first).await;
    eventually("the server has read the row", async || {
        let refused = once(&mut site.operator(0, "attaches"), What::Attach(attach_ask("data", "x"))).await;
        refused.is_err_and(|of| of.kind == "NotSupported" && of.message.contains("needs version 2"))
    })
    .await;
    assert_eq!(at(&site, "data", "x").await, "");
    site.admin(0, "all").upgrade(UpgradeAsk { schema: 2 }).await.unwrap();
    let (attach, _) = (attaching(&client, attach_ask("data", "x")), controller.publish().await);
    attach.await.unwrap().unwrap();
    let (detach, _) = (detaching(&client, detach_ask("data", "x")), controller.unpublish().await);
    detach.await.unwrap().unwrap();
    once(&mut client, What::Detach(detach_ask("data", "x"))).await.unwrap();
}

#[tokio::test]
async fn call_whose_attachment_has_ended_makes_no_other() {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let mut client = site.operator(0, "attaches");
    let asked = attach_ask("data", "x");
    let (attach, _) = (attaching(&client, asked.clone()), controller.publish().await);
    attach.await.unwrap().unwrap();
    let (detach, _) = (detaching(&client, detach_ask("data", "x")), controller.unpublish().await);
    detach.await.unwrap().unwrap();
    for server in 0..2 {
        let mut late = site.operator(server, "attaches");
        let refused = once(&mut late, What::Attach(asked.clone())).await.unwrap_err();
        assert!(refused.kind == "Busy" && refused.message.contains("since the call began"), "{refused:?}");
    }
    assert_eq!(at(&site, "data", "x").await, "");
    let unnamed = AttachAsk { call: String::new(), ..asked };
    assert_eq!(once(&mut client, What::Attach(unnamed)).await.unwrap_err().kind, "InvalidArgument");
    assert!(!controller.is_called(Duration::from_millis(500)).await);
    let (attach, _) = (attaching(&client, attach_ask("data", "x")), controller.publish().await);
    attach.await.unwrap().unwrap();
}

#[tokio::test]
async fn fence_ends_attachments_to_its_node_alone() {
    let site = Site::start(1).await;
    for volume in ["data", "more", "early"] {
        site.register(volume, "multi-node-multi-writer").await;
    }
    let mut controller = Controller::start(&site, "c1", 0).await;
    let mut client = site.operator(0, "attaches");
    // It comes before the servers know the node.
    let (attach, _) = (attaching(&client, attach_ask("early", "id of n1")), controller.publish().await);
    attach.await.unwrap().unwrap();
    let (_n1, _one) = user(&site, "n1", 0).await;
    let (_n2, _two) = user(&site, "n2", 0).await;
    for (volume, id) in
        [("data", "id of n1"), ("data", "id of n2"), ("data", "elsewhere"), ("more", "id of n2")]
    {
        let (attach, _) = (attaching(&client, attach_ask(volume, id)), controller.publish().await);
        attach.await.unwrap().unwrap();
    }
    // A node that takes nothing more keeps what it has.
    set(&site, 0, "n1", Change::Drain(DrainAsk {})).await.unwrap();
    let drains = once(&mut client, What::Attach(attach_ask("more", "id of n1"))).await.unwrap_err();
    assert!(drains.kind == "Busy" && drains.message.contains("n1 is draining"), "{drains:?}");
    assert!(at(&site, "data", "id of n1").await.contains("present"));
    set(&site, 0, "n1", Change::Undrain(UndrainAsk {})).await.unwrap();
    accept(&site, "n1").await;
    let fenced = fence(&site, 0, "n1").await.unwrap();
    assert_eq!((fenced.left_count, fenced.accepted_ids["p"].as_str()), (0, "id of n1"));
    for volume in ["data", "early"] {
        assert!(at(&site, volume, "id of n1").await.contains("removing"), "{volume}");
    }
    let fenced = once(&mut client, What::Attach(attach_ask("more", "id of n1"))).await.unwrap_err();
    assert!(fenced.kind == "Busy" && fenced.message.contains("n1 is fenced"), "{fenced:?}");
    for _ in 0..2 {
        assert_eq!(node_id(&controller.unpublish().await), "id of n1");
    }
    assert!(!controller.is_called(Duration::from_secs(1)).await);
    for (volume, id, left) in [
        ("data", "id of n1", false),
        ("early", "id of n1", false),
        ("data", "id of n2", true),
        ("data", "elsewhere", true),
        ("more", "id of n2", true),
    ] {
        let found = !at(&site, volume, id).await.is_empty();
        assert_eq!(found, left, "{volume} at {id}");
    }
}

#[tokio::test]
async fn fence_during_an_attach_gives_its_node_nothing() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (_n1, _one) = user(&site, "n1", 0).await;
    let (attach, call) =
        attach_begins(&site.operator(0, "attaches"), &mut controller, attach_ask("data", "id of n1")).await;
    accept(&site, "n1").await;
    fence(&site, 0, "n1").await.unwrap();
    controller.end(&call, attached("/dev/x")).await;
    controller.unpublish().await;
    assert_eq!(attach.await.unwrap().unwrap_err().kind, "PluginError");
    assert_eq!(at(&site, "data", "id of n1").await, "");
}

#[tokio::test]
async fn attachments_by_call_count_for_a_nodes_limit() {
    let site = Site::start(1).await;
    for volume in ["v0", "v1", "v2"] {
        site.register(volume, "single-node-writer").await;
    }
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, mut one) = user(&site, "n1", 0).await;
    let report = PluginReport {
        node_id: "id of n1".into(),
        max_volumes: Some(1),
        controller: false,
        ..crate::attach::healthy()
    };
    one.report_as(report).await;
    eventually("the limit is known", async || row(&site, "node/n1").await.contains("max-volumes")).await;
    let mut client = site.operator(0, "attaches");
    let (attach, _) = (attaching(&client, attach_ask("v0", "id of n1")), controller.publish().await);
    attach.await.unwrap().unwrap();
    assert!(row(&site, "used/n1/p").await.contains("\"volumes\":1"));
    let full = once(&mut client, What::Attach(attach_ask("v1", "id of n1"))).await.unwrap_err();
    assert!(full.kind == "ClaimConflict" && full.message.contains("limit"), "{full:?}");
    assert!(claiming(&n1, 0, "v1").await.unwrap().unwrap_err().message.contains("limit"));
    // A node of which the servers know nothing has no limit.
    let (attach, _) = (attaching(&client, attach_ask("v2", "elsewhere")), controller.publish().await);
    attach.await.unwrap().unwrap();
    // A node is not forgotten while it has such a volume.
    set(&site, 0, "n1", Change::Drain(DrainAsk {})).await.unwrap();
    one.to_server = tokio::sync::mpsc::channel(1).0;
    while let Ok(Some(_)) = one.from_server.message().await {}
    let mut busy = None;
    eventually("the session is gone", async || {
        busy = set(&site, 0, "n1", Change::Forget(ForgetAsk {})).await.err();
        busy.as_ref().is_some_and(|of| !of.message.contains("session"))
    })
    .await;
    assert!(busy.unwrap().message.contains("AttachVolume has attached 1 volumes"));
    let audit = site.admin(0, "all").audit(AuditAsk {}).await.unwrap().into_inner().message().await.unwrap();
    assert_eq!(audit, None);
    let (detach, _) = (detaching(&client, detach_ask("v0", "id of n1")), controller.unpublish().await);
    detach.await.unwrap().unwrap();
    assert!(row(&site, "used/n1/p").await.contains("\"volumes\":0"));
    set(&site, 0, "n1", Change::Forget(ForgetAsk {})).await.unwrap();
}

/// The name may be that of a machine outside of the cluster, which still uses the volume.
#[tokio::test]
async fn fence_leaves_a_name_that_nobody_has_accepted() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let mut client = site.operator(0, "attaches");
    let (attach, _) = (attaching(&client, attach_ask("data", "i-7")), controller.publish().await);
    attach.await.unwrap().unwrap();
    let (_n2, _two) = crate::attach::user_named(&site, "n2", 0, "i-7").await;
    site.register("more", "single-node-writer").await;
    let (attach, _) = (attaching(&client, attach_ask("more", "i-7")), controller.publish().await);
    assert_eq!(attach.await.unwrap().unwrap().node, "n2");
    let fenced = fence(&site, 0, "n2").await.unwrap();
    let left: Vec<&str> = fenced.left.iter().map(|of| of.volume.as_str()).collect();
    assert_eq!((fenced.left_count, left), (2, vec!["data", "more"]));
    assert!(fenced.left.iter().all(|of| of.node_id == "i-7" && of.namespace == "default"));
    for volume in ["data", "more"] {
        assert!(at(&site, volume, "i-7").await.contains("present"), "{volume}");
    }
    assert!(!controller.is_called(Duration::from_secs(1)).await);
    // An operator detaches it by hand.
    for volume in ["data", "more"] {
        let forget = set(&site, 0, "n2", Change::Forget(ForgetAsk {})).await.unwrap_err();
        assert!(forget.message.contains("AttachVolume has attached"), "{forget:?}");
        let (detach, _) = (detaching(&client, detach_ask(volume, "i-7")), controller.unpublish().await);
        detach.await.unwrap().unwrap();
    }
    let none = once(&mut client, What::Attach(attach_ask("data", "i-7"))).await.unwrap_err();
    assert!(none.message.contains("n2 is fenced"), "{none:?}");
}

/// A node that reports another's name would have that node's attachments end with its own fence.
#[tokio::test]
async fn name_of_two_nodes_is_attached_to_neither() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (_n1, _one) = user(&site, "n1", 0).await;
    let mut client = site.operator(0, "attaches");
    let (attach, _) = (attaching(&client, attach_ask("data", "id of n1")), controller.publish().await);
    attach.await.unwrap().unwrap();
    let (_n2, _two) = crate::attach::user_named(&site, "n2", 0, "id of n1").await;
    // A name that another node has is not taken. Reports of the same moment are.
    let said = row(&site, "node/n2").await;
    let both = said.replace("\"other-node-id\"", "\"node-id\"");
    assert_ne!(said, both);
    site.raw().await.put("/csid/v1/node/n2", &both).await;
    site.register("more", "single-node-writer").await;
    let both = once(&mut client, What::Attach(attach_ask("more", "id of n1"))).await.unwrap_err();
    assert!(both.kind == "NotAuthorized" && both.message.contains("node n1 as for node n2"), "{both:?}");
    accept(&site, "n1").await;
    fence(&site, 0, "n2").await.unwrap();
    assert!(at(&site, "data", "id of n1").await.contains("present"), "the liar's fence has ended it");
    fence(&site, 0, "n1").await.unwrap();
    controller.unpublish().await;
}

#[tokio::test]
async fn volume_attached_by_call_is_explained() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (_n1, _one) = user(&site, "n1", 0).await;
    let client = site.operator(0, "attaches");
    let explain = async || {
        let ask = VolumeAsk { namespace: String::new(), volume: "data".into(), ..VolumeAsk::default() };
        site.operator(0, "all").explain(ask).await.unwrap().into_inner()
    };
    let (attach, call) = attach_begins(&client, &mut controller, attach_ask("data", "id of n1")).await;
    let of = explain().await;
    let [at] = of.attachments.as_slice() else { panic!("{of:?}") };
    assert_eq!((at.node.as_str(), at.node_id.as_str(), at.state.as_str()), ("n1", "id of n1", "attaching"));
    assert_eq!(at.wait.as_ref().unwrap().kind, "attach");
    assert_eq!(of.acting.unwrap().node, "n1");
    assert!(of.nodes.iter().any(|node| node.node == "n1"));
    controller.end(&call, attached("/dev/x")).await;
    attach.await.unwrap().unwrap();
    let at = explain().await.attachments.remove(0);
    assert_eq!((at.state.as_str(), at.wait), ("attached", None));
    let detach = detaching(&client, detach_ask("data", "id of n1"));
    let call = controller.called().await;
    controller.end(&call, failed(CallClass::Refused)).await;
    detach.await.unwrap().unwrap_err();
    let wait = explain().await.attachments.remove(0).wait.unwrap();
    assert!(wait.kind == "parked" && wait.text.contains("no such disk"), "{wait:?}");
}

#[tokio::test]
async fn operator_attaches_and_detaches_by_csictl() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (_n1, _one) = user(&site, "n1", 0).await;
    let file = operator(&site, "all");
    let words = ["--json", "--operator", "volume", "attach", "default", "data"].join(" ");
    let attach = format!("{words} elsewhere --read-only --access-mode single-node-writer");
    let (said, call) = tokio::join!(csictl(&file, &attach), controller.publish());
    assert!(matches!(call.method, Some(Method::Publish(of)) if of.read_only && of.node_id == "elsewhere"));
    let shown: serde_json::Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!(shown["publish-context"]["device"], "/dev/x", "{}", said.err);
    let shown = csictl(&file, "--operator volume show default data").await.out;
    assert!(
        shown.contains("elsewhere") && shown.contains("operator/all") && !shown.contains("/dev/x"),
        "{shown}"
    );
    let explained = csictl(&file, "--operator explain default data").await.out;
    assert!(explained.contains("ATTACHED TO") && !explained.contains("/dev/x"), "{explained}");
    // The plugin refuses the detach, and the next command is in the explanation.
    let detach = "--operator volume detach default data elsewhere";
    let refuses = async {
        let call = controller.called().await;
        controller.end(&call, failed(CallClass::Refused)).await;
    };
    let (said, ()) = tokio::join!(csictl(&file, detach), refuses);
    assert!(said.code != Some(0) && said.err.contains("no such disk"), "{}", said.err);
    let explained = csictl(&file, "--operator explain default data").await.out;
    assert!(explained.contains(detach), "{explained}");
    let status = csictl(&file, "--operator cluster status").await.out;
    assert!(status.contains("its plugin refuses work"), "{status}");
    let unsure = csictl(&file, &format!("{detach} --forget")).await;
    assert!(unsure.code != Some(0) && unsure.err.contains("--yes default/data"), "{}", unsure.err);
    let said = csictl(&file, &format!("{detach} --forget --yes default/data")).await;
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert_eq!(at(&site, "data", "elsewhere").await, "");
}

/// Accepts one name of a node, as an operator who has just looked.
async fn accept_name(site: &Site, node: &str, name: &str) -> Result<NodeRow, Refusal> {
    let row = show(site, node).await;
    let Machine { machine_id, journal_id, .. } = row.machine.unwrap();
    let names = [("p".to_owned(), name.to_owned())].into();
    let accept = Accept { machine_id, journal_id, revision: row.revision, names, forget: false };
    set(site, 0, node, Change::Accept(accept)).await
}

/// An earlier server has let two nodes have the name. The machine may have come back as the other node.
#[tokio::test]
async fn fence_leaves_what_another_node_has() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (_n1, _one) = user(&site, "n1", 0).await;
    let (_n2, _two) = user(&site, "n2", 0).await;
    let client = site.operator(0, "attaches");
    let (attach, _) = (attaching(&client, attach_ask("data", "id of n2")), controller.publish().await);
    assert_eq!(attach.await.unwrap().unwrap().node, "n2");
    let mut both: serde_json::Value = serde_json::from_str(&row(&site, "node/n1").await).unwrap();
    both["accepted-ids"] = serde_json::json!({ "p": "id of n2" });
    site.raw().await.put("/csid/v1/node/n1", &both.to_string()).await;
    eventually("n1 has the name, too", async || show(&site, "n1").await.accepted_ids.contains_key("p")).await;
    let fenced = fence(&site, 0, "n1").await.unwrap();
    assert!(at(&site, "data", "id of n2").await.contains("present"), "the fence of n1 has ended it");
    assert_eq!((fenced.left_count, fenced.left[0].volume.as_str()), (1, "data"));
    // The servers look at absent nodes again and again.
    assert!(!controller.is_called(Duration::from_secs(8)).await);
}

#[tokio::test]
async fn accepted_name_counts_without_its_plugin() {
    let site = Site::start(1).await;
    for volume in ["data", "more"] {
        site.register(volume, "single-node-writer").await;
    }
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (_n1, mut one) = user(&site, "n1", 0).await;
    accept(&site, "n1").await;
    one.report_as(PluginReport { plugin: "q".into(), ..PluginReport::default() }).await;
    eventually("the plugin is gone", async || show(&site, "n1").await.plugins[0].plugin == "q").await;
    let mut client = site.operator(0, "attaches");
    set(&site, 0, "n1", Change::Drain(DrainAsk {})).await.unwrap();
    let drains = once(&mut client, What::Attach(attach_ask("data", "id of n1"))).await.unwrap_err();
    assert!(drains.kind == "Busy" && drains.message.contains("n1 is draining"), "{drains:?}");
    set(&site, 0, "n1", Change::Undrain(UndrainAsk {})).await.unwrap();
    let (attach, _) = (attaching(&client, attach_ask("data", "id of n1")), controller.publish().await);
    assert_eq!(attach.await.unwrap().unwrap().node, "n1");
    fence(&site, 0, "n1").await.unwrap();
    controller.unpublish().await;
    let fenced = once(&mut client, What::Attach(attach_ask("more", "id of n1"))).await.unwrap_err();
    assert!(fenced.kind == "Busy" && fenced.message.contains("n1 is fenced"), "{fenced:?}");
    assert!(!controller.is_called(Duration::from_secs(1)).await);
}

/// Its attachments would end with the fence of either node.
#[tokio::test]
async fn name_is_accepted_for_one_node_at_a_time() {
    let site = Site::start(1).await;
    let (_n1, one) = user(&site, "n1", 0).await;
    accept_name(&site, "n1", "id of n1").await.unwrap();
    let (_n2, _two) = crate::attach::user_named(&site, "n2", 0, "id of n1").await;
    let before = row(&site, "node/n2").await;
    let plain = async || {
        let row = show(&site, "n2").await;
        let Machine { machine_id, journal_id, .. } = row.machine.unwrap();
        let accept = Accept { machine_id, journal_id, revision: row.revision, ..Accept::default() };
        set(&site, 0, "n2", Change::Accept(accept)).await
    };
    for refused in [accept_name(&site, "n2", "id of n1").await, plain().await] {
        let refused = refused.unwrap_err();
        assert!(refused.kind == "AlreadyExists" && refused.message.contains("n1"), "{refused:?}");
    }
    assert_eq!(row(&site, "node/n2").await, before);
    accept_name(&site, "n1", "id of n1").await.expect("it has the name already");
    set(&site, 0, "n1", Change::Drain(DrainAsk {})).await.unwrap();
    drop(one);
    let forget = || set(&site, 0, "n1", Change::Forget(ForgetAsk {}));
    eventually("it is forgotten", async || forget().await.is_ok()).await;
    let accepted = accept_name(&site, "n2", "id of n1").await.unwrap();
    assert_eq!(accepted.accepted_ids["p"], "id of n1");
}

/// It has reported the name of a machine that is not in the cluster.
#[tokio::test]
async fn block_frees_the_name_of_a_node_that_lies() {
    let site = Site::start(1).await;
    for volume in ["data", "more"] {
        site.register(volume, "single-node-writer").await;
    }
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (_n1, _one) = crate::attach::user_named(&site, "n1", 0, "i-1").await;
    let client = site.operator(0, "attaches");
    let (attach, _) = (attaching(&client, attach_ask("data", "i-1")), controller.publish().await);
    assert_eq!(attach.await.unwrap().unwrap().node, "n1");
    set(&site, 0, "n1", Change::Block(BlockAsk { reason: "it lies".into() })).await.unwrap();
    let (attach, _) = (attaching(&client, attach_ask("more", "i-1")), controller.publish().await);
    assert_eq!(attach.await.unwrap().unwrap().node, "", "it is the name of a blocked node");
    let forget = || set(&site, 0, "n1", Change::Forget(ForgetAsk {}));
    assert!(forget().await.unwrap_err().message.contains("is blocked"), "its machine may be there");
    fence(&site, 0, "n1").await.unwrap();
    eventually("it is forgotten", async || forget().await.is_ok()).await;
    for volume in ["data", "more"] {
        assert!(at(&site, volume, "i-1").await.contains("present"), "{volume}");
    }
    let (detach, _) = (detaching(&client, detach_ask("data", "i-1")), controller.unpublish().await);
    detach.await.unwrap().unwrap();
    assert!(!controller.is_called(Duration::from_secs(1)).await);
}

#[tokio::test]
async fn accepted_name_of_a_blocked_node_is_its_own() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let controller = Controller::start(&site, "c1", 0).await;
    let (_n1, _one) = user(&site, "n1", 0).await;
    accept(&site, "n1").await;
    set(&site, 0, "n1", Change::Block(BlockAsk { reason: "stolen".into() })).await.unwrap();
    let mut client = site.operator(0, "attaches");
    let blocked = once(&mut client, What::Attach(attach_ask("data", "id of n1"))).await.unwrap_err();
    assert!(blocked.kind == "Busy" && blocked.message.contains("n1 is blocked"), "{blocked:?}");
    drop(controller);
}
