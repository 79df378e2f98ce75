//! Volumes that are created and deleted through the servers. The controller runs on another node, and is the test.

use std::time::Duration;

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::controller_call::Method;
use csi_proto::cluster::v1::{
    Answer, Attaches, CallClass, CallFailure, Capability, ChangeAsk, ControllerCall, CreateAsk,
    CreatedVolume, DeleteAsk, Deregister, PluginReport, Spec, VolumeRow,
};
use tokio::task::JoinHandle;

use crate::attach::{Controller, claiming, head, healthy, row, user};
use crate::site::{First, Refusal, Site, eventually, register};

/// The call that creates a volume of plugin `p` in the namespace `default`.
pub fn create(volume: &str) -> CreateAsk {
    let capability =
        Capability { access_mode: "single-node-writer".into(), attachment_mode: "file-system".into() };
    let spec = Spec {
        capabilities: vec![capability],
        parameters: [("pool".to_owned(), "fast".to_owned())].into(),
        ..Spec::default()
    };
    CreateAsk {
        namespace: String::new(),
        volume: volume.into(),
        plugin: "p".into(),
        spec: Some(spec),
        capacity_min: 4096,
        capacity_max: 1 << 20,
    }
}

/// Makes a change as `who` at a server, in a task, and repeats it as callers do while it goes on.
pub fn changing(site: &Site, server: usize, who: &str, what: What) -> JoinHandle<Result<VolumeRow, Refusal>> {
    let mut client = site.direct(server, Some(&site.client_pair(&format!("csid://prod/{who}"))));
    let ask = ChangeAsk { what: Some(what) };
    tokio::spawn(async move {
        loop {
            match client.change(ask.clone()).await {
                Ok(row) => return Ok(row.into_inner()),
                Err(status) if Refusal::of(&status).kind == "TimedOut" => {}
                Err(status) => return Err(Refusal::of(&status)),
            }
        }
    })
}

pub fn creating(site: &Site, server: usize, volume: &str) -> JoinHandle<Result<VolumeRow, Refusal>> {
    changing(site, server, "operator/all", What::Create(create(volume)))
}

pub fn deleting(site: &Site, server: usize, volume: &str) -> JoinHandle<Result<VolumeRow, Refusal>> {
    let delete = DeleteAsk { namespace: String::new(), volume: volume.into(), ..Default::default() };
    changing(site, server, "operator/all", What::Delete(delete))
}

pub fn is_create(call: &ControllerCall) -> bool {
    matches!(call.method, Some(Method::Create(_)))
}

pub fn is_delete(call: &ControllerCall) -> bool {
    matches!(call.method, Some(Method::Delete(_)))
}

pub fn created(external_id: &str) -> How {
    let created = CreatedVolume {
        external_id: external_id.into(),
        volume_context: [("share".to_owned(), "hunter2".to_owned())].into(),
        capacity: 8192,
        ..CreatedVolume::default()
    };
    How::Answer(Answer { created: Some(created), ..Answer::default() })
}

pub fn done() -> How {
    How::Answer(Answer::default())
}

/// The plugin's refusal with a status of gRPC.
pub fn refused(code: u32) -> How {
    failed(CallClass::Refused, Some(code))
}

pub fn failed(class: CallClass, code: Option<u32>) -> How {
    let message = "the pool is not there".into();
    How::Failed(CallFailure { class: class.into(), kind: "PluginError".into(), message, code })
}

pub async fn registration(site: &Site, volume: &str) -> String {
    row(site, &format!("vol/default/{volume}/reg")).await
}

/// Waits until nothing of any volume is in etcd.
pub async fn nothing_is_left(site: &Site) {
    eventually("nothing is left", async || {
        row(site, "vol/").await.is_empty() && row(site, "ext/").await.is_empty()
    })
    .await;
}

#[tokio::test]
async fn volume_is_created_claimed_and_deleted() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let creation = creating(&site, 0, "data");
    let call = controller.called().await;
    let name = call.order.strip_prefix("+csid-").expect("a name that is made").to_owned();
    let Some(Method::Create(of)) = &call.method else { panic!("{call:?}") };
    assert_eq!((of.capacity_min, of.capacity_max), (4096, 1 << 20));
    assert_eq!(of.parameters["pool"], "fast");
    assert_eq!(of.capabilities[0].access_mode, "single-node-writer");
    // The intent is in etcd before the call.
    let (intent, going) = (head(&site, "data").await, registration(&site, "data").await);
    assert!(intent.contains(&call.call) && intent.contains("\"rpc\":\"create\""), "{intent}");
    assert!(going.contains("creating") && going.contains(&name), "{going}");
    assert!(!row(&site, "ext/p/+").await.is_empty(), "the name is free for another volume");
    let busy = claiming(&n1, 0, "data").await.unwrap().unwrap_err();
    assert_eq!(busy.kind, "Busy", "{busy:?}");
    controller.end(&call, created("ext-data")).await;
    let made = creation.await.unwrap().unwrap();
    assert_eq!((made.external_id.as_str(), made.standing.as_str()), ("ext-data", "registered"));
    assert_eq!((made.capacity, made.owner.as_str()), (8192, "operator/all"));
    assert!(row(&site, "ext/p/+").await.is_empty() && !head(&site, "data").await.contains("driver"));
    // The same call again finds the volume.
    assert_eq!(creating(&site, 0, "data").await.unwrap().unwrap().external_id, "ext-data");

    let (claim, attach) = (claiming(&n1, 0, "data"), controller.publish().await);
    let Some(Method::Publish(publish)) = &attach.method else { panic!() };
    assert_eq!(publish.volume_context["share"], "hunter2");
    let granted = claim.await.unwrap().unwrap();
    let in_use = deleting(&site, 0, "data").await.unwrap().unwrap_err();
    assert_eq!((in_use.kind.as_str(), in_use.holders), ("Busy", vec!["n1/web".to_owned()]));
    n1.detached(0, "data", &granted.claim).await.unwrap();
    controller.unpublish().await;
    eventually("the claim is free", async || row(&site, "vol/default/data/claim").await.is_empty()).await;

    let deletion = deleting(&site, 0, "data");
    let call = controller.called().await;
    assert!(is_delete(&call) && call.order == "ext-data", "{call:?}");
    assert!(head(&site, "data").await.contains("\"rpc\":\"delete\""));
    assert_eq!(claiming(&n1, 0, "data").await.unwrap().unwrap_err().kind, "Busy");
    controller.end(&call, done()).await;
    deletion.await.unwrap().unwrap();
    nothing_is_left(&site).await;
    // It is deleted already.
    deleting(&site, 0, "data").await.unwrap().unwrap();
}

/// A controller that does not attach creates volumes, too.
#[tokio::test]
async fn controller_that_attaches_nothing_creates() {
    let site = Site::start(1).await;
    let node = site.node("c1");
    let (first, mut session) = node.say_hello(0).await.unwrap();
    assert!(matches!(first, First::Welcome(_)), "{first:?}");
    session.report_as(PluginReport { attaches: Attaches::No.into(), ..healthy() }).await;
    let mut controller = Controller { node, session };
    let (n1, _one) = user(&site, "n1", 0).await;
    let creation = creating(&site, 0, "data");
    let call = controller.called().await;
    controller.end(&call, created("ext-data")).await;
    creation.await.unwrap().unwrap();
    // Its controller is called for no claim.
    let granted = claiming(&n1, 0, "data").await.unwrap().unwrap();
    assert!(granted.external_node_id.is_empty(), "{granted:?}");
    assert!(!controller.is_called(Duration::from_millis(300)).await);
}

#[tokio::test]
async fn late_answer_is_waited_for_by_the_same_call() {
    let site = Site::start(2).await;
    let mut controller = Controller::start(&site, "c1", 1).await;
    let mut operator = site.operator(0, "all");
    let ask = ChangeAsk { what: Some(What::Create(create("data"))) };
    let late = Refusal::of(&operator.change(ask.clone()).await.unwrap_err());
    assert_eq!((late.kind.as_str(), late.retryable), ("TimedOut", true), "{late:?}");
    let call = controller.called().await;
    let creation = creating(&site, 0, "data");
    assert!(!controller.is_called(Duration::from_millis(500)).await, "two calls for a volume at once");
    controller.end(&call, created("ext-data")).await;
    assert_eq!(creation.await.unwrap().unwrap().external_id, "ext-data");
}

#[tokio::test]
async fn refused_creation_leaves_nothing() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    for how in [refused(3), refused(7), refused(12), failed(CallClass::Withheld, None)] {
        let creation = creating(&site, 0, "data");
        let call = controller.called().await;
        controller.end(&call, how).await;
        let error = creation.await.unwrap().unwrap_err();
        assert_eq!((error.kind.as_str(), error.retryable), ("PluginError", false));
        assert!(error.message.contains("the pool is not there"), "{error:?}");
        nothing_is_left(&site).await;
    }
    assert!(!controller.is_called(Duration::from_millis(500)).await, "a call nobody wants");
}

/// The answer to a deletion may be lost. The caller may have created another volume under the name when its call is repeated.
#[tokio::test]
async fn repeated_deletion_deletes_no_later_volume() {
    let site = Site::start(2).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let ask = DeleteAsk { volume: "data".into(), ..DeleteAsk::default() };
    let asks_id = DeleteAsk { asks_id: true, ..ask.clone() };
    let delete = |server, ask: DeleteAsk| changing(&site, server, "operator/all", What::Delete(ask));
    let none = delete(0, asks_id.clone()).await.unwrap().unwrap();
    assert_eq!((none.plugin, none.registration_id), (String::new(), String::new()));

    let mut ids = Vec::new();
    for external_id in ["ext-first", "ext-later"] {
        let creation = creating(&site, 0, "data");
        let call = controller.called().await;
        controller.end(&call, created(external_id)).await;
        creation.await.unwrap().unwrap();
        let found = delete(1, asks_id.clone()).await.unwrap().unwrap();
        assert_eq!(found.plugin, "p", "{external_id}");
        // The same creation again is of the same volume.
        creating(&site, 1, "data").await.unwrap().unwrap();
        let again = delete(0, asks_id.clone()).await.unwrap().unwrap();
        assert_eq!(again.registration_id, found.registration_id);
        ids.push(found.registration_id);
        if ids.len() == 1 {
            let deletion = delete(0, DeleteAsk { id: ids[0].clone(), ..ask.clone() });
            let call = controller.called().await;
            assert!(is_delete(&call), "{call:?}");
            controller.end(&call, done()).await;
            deletion.await.unwrap().unwrap();
        }
    }
    assert!(!ids[0].is_empty() && ids[0] != ids[1], "{ids:?}");
    for server in 0..2 {
        delete(server, DeleteAsk { id: ids[0].clone(), ..ask.clone() }).await.unwrap().unwrap();
    }
    let who = "operator/creates";
    let denied = changing(&site, 0, who, What::Delete(asks_id.clone())).await.unwrap().unwrap_err();
    assert_eq!(denied.kind, "NotAuthorized", "{denied:?}");
    assert!(!controller.is_called(Duration::from_millis(500)).await, "a later volume is deleted");
    assert!(registration(&site, "data").await.contains("registered"));

    let deletion = delete(1, DeleteAsk { id: ids[1].clone(), ..ask });
    let call = controller.called().await;
    assert!(is_delete(&call), "{call:?}");
    controller.end(&call, done()).await;
    deletion.await.unwrap().unwrap();
    nothing_is_left(&site).await;
}

#[tokio::test]
async fn repeated_deregister_ends_no_later_registration() {
    let site = Site::start(2).await;
    let ask = Deregister { volume: "data".into(), ..Deregister::default() };
    let deregister = |server, ask: Deregister| changing(&site, server, "operator/all", What::Deregister(ask));
    let asks_id = Deregister { asks_id: true, ..ask.clone() };
    let mut ids = Vec::new();
    for _ in 0..2 {
        let register = register("data", "single-node-writer").what.unwrap();
        changing(&site, 0, "operator/all", register).await.unwrap().unwrap();
        let found = deregister(1, asks_id.clone()).await.unwrap().unwrap();
        assert_eq!((found.plugin.as_str(), &found.spec), ("p", &None));
        let id = found.registration_id;
        if ids.is_empty() {
            deregister(0, Deregister { id: id.clone(), ..ask.clone() }).await.unwrap().unwrap();
            let none = deregister(1, asks_id.clone()).await.unwrap().unwrap();
            assert_eq!((none.plugin, none.registration_id), (String::new(), String::new()));
        }
        ids.push(id);
    }
    assert!(!ids[0].is_empty() && ids[0] != ids[1], "{ids:?}");
    deregister(1, Deregister { id: ids[0].clone(), ..ask.clone() }).await.unwrap().unwrap();
    assert!(registration(&site, "data").await.contains("registered"), "a later registration has ended");
    deregister(0, Deregister { id: ids[1].clone(), ..ask }).await.unwrap().unwrap();
    nothing_is_left(&site).await;
}

#[tokio::test]
async fn two_callers_of_a_name_get_one_volume() {
    let site = Site::start(2).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let callers = [creating(&site, 0, "data"), creating(&site, 1, "data")];
    let call = controller.called().await;
    assert!(!controller.is_called(Duration::from_millis(500)).await, "two calls for a volume at once");
    let other = || create("data");
    let larger = CreateAsk { capacity_max: 2 << 20, ..other() };
    let differs = changing(&site, 1, "operator/all", What::Create(larger)).await.unwrap().unwrap_err();
    assert_eq!(differs.kind, "AlreadyExists", "{differs:?}");
    for who in ["operator/creates", "node/n-creates"] {
        let denied = changing(&site, 1, who, What::Create(other())).await.unwrap().unwrap_err();
        assert_eq!(denied.kind, "NotAuthorized", "{who}: {denied:?}");
        let delete = DeleteAsk { namespace: String::new(), volume: "data".into(), ..Default::default() };
        let denied = changing(&site, 1, who, What::Delete(delete)).await.unwrap().unwrap_err();
        assert_eq!(denied.kind, "NotAuthorized", "{who}: {denied:?}");
    }
    controller.end(&call, created("ext-data")).await;
    for caller in callers {
        assert_eq!(caller.await.unwrap().unwrap().external_id, "ext-data");
    }
}

/// A name of the caller's own could be that of another cluster's volume.
/// No host could ever make such a call, and the caller would wait for one.
#[tokio::test]
async fn creation_without_a_controllers_grant_is_refused() {
    let site = Site::start(1).await;
    let ask = CreateAsk { plugin: "none".into(), ..create("data") };
    let refused = changing(&site, 0, "operator/all", What::Create(ask)).await.unwrap().unwrap_err();
    assert_eq!(refused.kind, "NotSupported", "{refused:?}");
    assert!(refused.message.contains("controller:none"), "{refused:?}");
    nothing_is_left(&site).await;
}

#[tokio::test]
async fn creation_with_a_wrong_field_is_refused() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let change = |change: &dyn Fn(&mut CreateAsk, &mut Spec)| {
        let (mut ask, mut spec) = (create("data"), create("data").spec.unwrap());
        change(&mut ask, &mut spec);
        ask.spec = ask.spec.and(Some(spec));
        ask
    };
    for (lie, ask) in [
        ("a name", change(&|_, spec| spec.name = "of-another".into())),
        ("a context", change(&|_, spec| drop(spec.volume_context.insert("k".into(), "v".into())))),
        ("no spec", change(&|ask, _| ask.spec = None)),
        ("no use", change(&|_, spec| spec.capabilities.clear())),
        ("no plugin", change(&|ask, _| ask.plugin.clear())),
        ("a long plugin", change(&|ask, _| ask.plugin = "p".repeat(1000))),
        ("no volume", change(&|ask, _| ask.volume.clear())),
        ("a volume with a line", change(&|ask, _| ask.volume = "a\nb".into())),
        ("a capacity above CSI's", change(&|ask, _| ask.capacity_min = u64::MAX)),
        ("a limit below the capacity", change(&|ask, _| ask.capacity_max = 1)),
        ("another's credential", change(&|_, spec| spec.credential = "csid.shared.key".into())),
        ("large parameters", change(&|_, spec| drop(spec.parameters.insert("k".into(), "x".repeat(10_000))))),
        ("a topology of nothing", change(&|_, spec| spec.topologies.push(Default::default()))),
    ] {
        let error = changing(&site, 0, "operator/all", What::Create(ask)).await.unwrap().unwrap_err();
        assert_eq!(error.kind, "InvalidArgument", "{lie}: {error:?}");
    }
    assert!(row(&site, "vol/").await.is_empty());
    assert!(!controller.is_called(Duration::from_millis(300)).await);
}
