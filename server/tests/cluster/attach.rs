//! Claims of volumes whose plugin attaches. The controller runs on another node, and is the test.

use std::time::Duration;

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::controller_call::Method;
use csi_proto::cluster::v1::{
    Answer, Attaches, CallClass, CallEnded, CallFailure, ClaimAsk, ControllerCall, FromNode, Granted,
    PluginReport, ReleaseAsk, from_node, to_node,
};
use tokio::task::JoinHandle;
use tonic::Code;

use crate::site::{First, Node, Refusal, Session, Site, eventually, register, release_ask};

/// A node that has the controller of plugin `p`.
pub struct Controller {
    pub node: Node,
    pub session: Session,
}

impl Controller {
    /// Joins at a server, and waits until the servers know the controller.
    pub async fn start(site: &Site, name: &str, server: usize) -> Controller {
        let node = site.node(name);
        let session = Controller::join(&node, server).await;
        let named = format!("\"{name}\"");
        eventually("the servers know the controller", async || row(site, "plugin/p").await.contains(&named))
            .await;
        Controller { node, session }
    }

    async fn join(node: &Node, server: usize) -> Session {
        let (first, mut session) = node.say_hello(server).await.unwrap();
        assert!(matches!(first, First::Welcome(_)), "{first:?}");
        session.report_as(healthy()).await;
        session
    }

    /// Ends the session. Calls that were sent have no answer.
    pub async fn leave(&mut self) {
        self.session.to_server = tokio::sync::mpsc::channel(1).0;
        while let Ok(Some(_)) = self.session.from_server.message().await {}
    }

    /// Ends the session, and joins again.
    pub async fn join_again(&mut self, server: usize) {
        self.session = Controller::join(&self.node, server).await;
    }

    /// Joins at another server. Returns the session of before.
    pub async fn join_other(&mut self, server: usize) -> Session {
        let session = Controller::join(&self.node, server).await;
        std::mem::replace(&mut self.session, session)
    }

    /// Waits for the next call.
    pub async fn called(&mut self) -> ControllerCall {
        self.called_within(Duration::from_secs(20)).await
    }

    pub async fn called_within(&mut self, limit: Duration) -> ControllerCall {
        let next = tokio::time::timeout(limit, self.session.from_server.message()).await;
        match next.expect("no call came").unwrap().and_then(|message| message.is) {
            Some(to_node::Is::Call(call)) => call,
            other => panic!("no call: {other:?}"),
        }
    }

    pub async fn end(&self, call: &ControllerCall, how: How) {
        let ended = CallEnded { call: call.call.clone(), epoch: call.epoch, how: Some(how) };
        self.say(ended).await;
    }

    pub async fn say(&self, ended: CallEnded) {
        self.session.to_server.send(FromNode { is: Some(from_node::Is::Ended(ended)) }).await.unwrap();
    }

    /// Waits for a publish, and answers it.
    pub async fn publish(&mut self) -> ControllerCall {
        let call = self.called().await;
        assert!(is_publish(&call), "{call:?}");
        self.end(&call, attached("/dev/x")).await;
        call
    }

    /// Waits for an unpublish, and answers it.
    pub async fn unpublish(&mut self) -> ControllerCall {
        let call = self.called().await;
        assert!(!is_publish(&call), "{call:?}");
        self.end(&call, How::Answer(Answer::default())).await;
        call
    }

    /// Returns whether a call is waiting.
    pub async fn is_called(&mut self, within: Duration) -> bool {
        tokio::time::timeout(within, self.session.from_server.message()).await.is_ok()
    }
}

pub fn healthy() -> PluginReport {
    PluginReport {
        plugin: "p".into(),
        attaches: Attaches::Yes.into(),
        node_id: "a controller's node".into(),
        controller: true,
        max_volumes: None,
        calls: 0,
    }
}

pub fn is_publish(call: &ControllerCall) -> bool {
    matches!(call.method, Some(Method::Publish(_)))
}

/// Returns the plugin's name of the node in a call.
pub fn node_id(call: &ControllerCall) -> &str {
    match call.method.as_ref().unwrap() {
        Method::Publish(publish) => &publish.node_id,
        Method::Unpublish(unpublish) => &unpublish.node_id,
        other => panic!("a call for no node: {other:?}"),
    }
}

pub fn attached(device: &str) -> How {
    let publish_context = [("device".to_owned(), device.to_owned())].into();
    How::Answer(Answer { publish_context, ..Answer::default() })
}

pub fn failed(class: CallClass) -> How {
    How::Failed(CallFailure {
        class: class.into(),
        kind: "PluginError".into(),
        message: "ControllerPublishVolume: no such disk".into(),
        code: None,
    })
}

/// Returns a row of etcd. Empty: there is none.
pub async fn row(site: &Site, key: &str) -> String {
    let found = site.raw().await.below(&format!("/csid/v1/{key}")).await;
    found.into_iter().next().map(|kv| String::from_utf8(kv.value).unwrap()).unwrap_or_default()
}

pub async fn head(site: &Site, volume: &str) -> String {
    row(site, &format!("vol/default/{volume}/head")).await
}

/// Starts a node that has no controller, and waits until the servers know its name by the plugin.
pub async fn user(site: &Site, name: &str, server: usize) -> (Node, Session) {
    user_named(site, name, server, &format!("id of {name}")).await
}

/// Does the same. `node_id`: the plugin's name of the node.
pub async fn user_named(site: &Site, name: &str, server: usize, node_id: &str) -> (Node, Session) {
    let node = site.node(name);
    let (first, mut session) = node.say_hello(server).await.unwrap();
    assert!(matches!(first, First::Welcome(_)), "{first:?}");
    session.report_name(node_id).await;
    let key = format!("node/{name}");
    eventually("the servers know the node", async || row(site, &key).await.contains("node-id")).await;
    (node, session)
}

/// Claims a volume for `web`, in a task.
pub fn claiming(node: &Node, server: usize, volume: &str) -> JoinHandle<Result<Granted, Refusal>> {
    let (mut client, ask) = (node.client(server), node.ask(volume, "web"));
    tokio::spawn(async move {
        loop {
            match client.claim(ask.clone()).await {
                Ok(granted) => return Ok(granted.into_inner()),
                // As csid does.
                Err(status) if Refusal::of(&status).kind == "TimedOut" => {}
                Err(status) => return Err(Refusal::of(&status)),
            }
        }
    })
}

#[tokio::test]
async fn volume_is_attached_for_a_claim_and_detached() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let (n2, _two) = user(&site, "n2", 0).await;
    let claim = claiming(&n1, 0, "data");
    let call = controller.called().await;
    assert_eq!((call.plugin.as_str(), call.order.as_str(), node_id(&call)), ("p", "ext-data", "id of n1"));
    let Some(Method::Publish(publish)) = &call.method else { panic!("{call:?}") };
    assert_eq!(publish.volume_context["share"], "hunter2");
    assert!(!publish.read_only && publish.capability.as_ref().unwrap().access_mode == "single-node-writer");
    // The intent is in etcd before the call.
    let intent = head(&site, "data").await;
    assert!(intent.contains(&call.call) && intent.contains("\"host\":\"c1\""), "{intent}");
    let pending = row(&site, "vol/default/data/claim/n1/web").await;
    assert!(pending.contains("\"state\":\"pending\""), "{pending}");
    controller.end(&call, attached("/dev/x")).await;
    let granted = claim.await.unwrap().unwrap();
    assert_eq!(granted.publish_context["device"], "/dev/x");
    assert_eq!(granted.external_node_id, "id of n1");
    eventually("nobody calls", async || !head(&site, "data").await.contains("driver")).await;

    let again = claiming(&n1, 0, "data").await.unwrap().unwrap();
    assert_eq!((&again.claim, &again.publish_context), (&granted.claim, &granted.publish_context));
    let refused = claiming(&n2, 0, "data").await.unwrap().unwrap_err();
    assert_eq!((refused.kind.as_str(), refused.holders), ("ClaimConflict", vec!["n1/web".to_owned()]));

    // The node's word is durable. The volume is free when the controller has answered.
    n1.detached(0, "data", &granted.claim).await.unwrap();
    let call = controller.called().await;
    assert!(!is_publish(&call) && node_id(&call) == "id of n1", "{call:?}");
    let refused = claiming(&n2, 0, "data").await.unwrap().unwrap_err();
    assert_eq!(refused.holders, ["n1/web"]);
    controller.end(&call, How::Answer(Answer::default())).await;
    eventually("the claim is free", async || row(&site, "vol/default/data/claim").await.is_empty()).await;
    assert!(row(&site, "vol/default/data/at/").await.is_empty());
    let (second, call) = (claiming(&n2, 0, "data"), controller.publish().await);
    assert_eq!(node_id(&call), "id of n2");
    assert_ne!(second.await.unwrap().unwrap().claim, granted.claim);
}

#[tokio::test]
async fn refused_attach_rolls_its_claim_back() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let claim = claiming(&n1, 0, "data");
    let call = controller.called().await;
    controller.end(&call, failed(CallClass::Refused)).await;
    // What was refused may have been done in part.
    controller.unpublish().await;
    let refused = claim.await.unwrap().unwrap_err();
    assert_eq!((refused.kind.as_str(), refused.retryable), ("PluginError", false));
    assert!(refused.message.contains("no such disk"), "{refused:?}");
    eventually("the claim is free", async || row(&site, "vol/default/data/claim").await.is_empty()).await;
    assert!(!controller.is_called(Duration::from_millis(500)).await, "a call nobody wants");
}

#[tokio::test]
async fn call_that_may_go_well_later_is_made_again() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let claim = claiming(&n1, 0, "data");
    let mut epoch = 0;
    for how in [How::NotStarted(true), failed(CallClass::NotSent), failed(CallClass::Again), How::Stale(true)]
    {
        let call = controller.called().await;
        assert!(is_publish(&call) && call.epoch > epoch, "{call:?}");
        epoch = call.epoch;
        controller.end(&call, how).await;
    }
    controller.publish().await;
    let granted = claim.await.unwrap().unwrap();
    n1.detached(0, "data", &granted.claim).await.unwrap();
    let call = controller.called().await;
    controller.end(&call, failed(CallClass::Again)).await;
    controller.unpublish().await;
    eventually("the claim is free", async || row(&site, "vol/default/data/claim").await.is_empty()).await;
}

#[tokio::test]
async fn unknown_attach_is_detached_first() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let claim = claiming(&n1, 0, "data");
    let call = controller.called().await;
    controller.end(&call, failed(CallClass::Unknown)).await;
    controller.unpublish().await;
    controller.publish().await;
    claim.await.unwrap().unwrap();
}

/// The node gives its call up while the controller works.
#[tokio::test]
async fn claim_that_is_given_up_is_detached() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let claim = claiming(&n1, 0, "data");
    let call = controller.called().await;
    claim.abort();
    let owed = csi_proto::cluster::v1::Owed { call: "call 1".into(), ..n1.owed("data", "") };
    n1.client(0).detached(owed).await.unwrap();
    assert!(!controller.is_called(Duration::from_millis(500)).await, "two calls for a volume at once");
    controller.end(&call, attached("/dev/x")).await;
    controller.unpublish().await;
    eventually("the claim is free", async || row(&site, "vol/default/data/claim").await.is_empty()).await;
}

#[tokio::test]
async fn forced_release_detaches_before_it_is_answered() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, one) = user(&site, "n1", 0).await;
    let claim = claiming(&n1, 0, "data");
    controller.publish().await;
    claim.await.unwrap().unwrap();
    // The node is away.
    drop(one);
    let release = ReleaseAsk { force: true, ..release_ask("data", "n1") };
    let mut operator = site.operator(0, "all");
    let released = tokio::spawn(async move { operator.release(release).await });
    let call = controller.called().await;
    assert!(!is_publish(&call) && !released.is_finished());
    controller.end(&call, How::Answer(Answer::default())).await;
    released.await.unwrap().unwrap();
    let (n2, _two) = user(&site, "n2", 0).await;
    let (second, _) = (claiming(&n2, 0, "data"), controller.publish().await);
    second.await.unwrap().unwrap();
}

/// The volume was attached in another boot of the node.
#[tokio::test]
async fn claim_of_another_boot_is_attached_again() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (mut n1, one) = user(&site, "n1", 0).await;
    let claim = claiming(&n1, 0, "data");
    controller.publish().await;
    let first = claim.await.unwrap().unwrap();
    drop(one);
    let _session = n1.reboot(0).await;
    let claim = claiming(&n1, 0, "data");
    let call = controller.called().await;
    assert!(is_publish(&call), "{call:?}");
    controller.end(&call, attached("/dev/y")).await;
    let again = claim.await.unwrap().unwrap();
    assert_eq!((again.claim, again.publish_context["device"].as_str()), (first.claim, "/dev/y"));
}

/// The claims of two nodes are attached one after the other, and of one node once.
#[tokio::test]
async fn calls_for_one_volume_come_one_at_a_time() {
    let site = Site::start(1).await;
    site.register("shared", "multi-node-multi-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let (n2, _two) = user(&site, "n2", 0).await;
    let mut claims = Vec::new();
    for (node, consumer) in [(&n1, "a"), (&n1, "b"), (&n2, "a")] {
        let (mut client, mut ask) = (node.client(0), node.ask("shared", consumer));
        ask.call = format!("call of {consumer}");
        ask.r#use.as_mut().unwrap().access_mode = "multi-node-multi-writer".into();
        claims.push(tokio::spawn(async move { client.claim(ask).await }));
    }
    let first = controller.called().await;
    assert!(!controller.is_called(Duration::from_secs(1)).await, "two calls for a volume at once");
    controller.end(&first, attached("/dev/1")).await;
    let second = controller.called().await;
    assert_ne!(node_id(&first), node_id(&second));
    assert!(second.hidden.as_ref().unwrap().hide.contains(&"/dev/1".to_owned()));
    controller.end(&second, attached("/dev/2")).await;
    for claim in claims {
        claim.await.unwrap().unwrap();
    }
    assert!(!controller.is_called(Duration::from_millis(300)).await);
}

/// The secrets are on the host of the caller. The controller would be called without them.
#[tokio::test]
async fn claim_that_brings_secrets_attaches_nothing() {
    let site = Site::start(1).await;
    for volume in ["data", "shared"] {
        site.register(volume, "multi-node-multi-writer").await;
    }
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let asks = |volume, consumer: &str, brings_secrets| {
        let mut ask = ClaimAsk { call: format!("call of {consumer}"), ..n1.ask(volume, consumer) };
        ask.r#use.as_mut().unwrap().access_mode = "multi-node-multi-writer".into();
        ClaimAsk { brings_secrets, ..ask }
    };
    // A volume that is attached already, and one that is not.
    let (mut client, ask) = (n1.client(0), asks("shared", "web", false));
    let first = tokio::spawn(async move { client.claim(ask).await });
    controller.publish().await;
    first.await.unwrap().unwrap();
    let before = [row(&site, "vol/default/data").await, row(&site, "vol/default/shared").await];
    for (volume, queue_ms) in [("data", 0), ("shared", 0), ("data", 60_000)] {
        let ask = ClaimAsk { queue_ms, ..asks(volume, "other", true) };
        let refused = Refusal::of(&n1.client(0).claim(ask).await.unwrap_err());
        assert_eq!((refused.code, refused.kind.as_str()), (Code::FailedPrecondition, "SecretRequired"));
        assert!(!refused.retryable, "{refused:?}");
    }
    assert_eq!([row(&site, "vol/default/data").await, row(&site, "vol/default/shared").await], before);
    assert!(!controller.is_called(Duration::from_millis(300)).await);
}

/// A claim's credential comes before the volume's. Its name crosses, and no secret.
#[tokio::test]
async fn credential_of_the_attach_is_that_of_the_detach() {
    let site = Site::start(1).await;
    let mut change = register("data", "single-node-writer");
    let Some(What::Register(of)) = &mut change.what else { panic!() };
    of.spec.as_mut().unwrap().credential = "csid.default.volume".into();
    site.operator(0, "all").change(change).await.unwrap();
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    for (credential, due) in [("csid.default.claim", "csid.default.claim"), ("", "csid.default.volume")] {
        let (mut client, mut ask) = (n1.client(0), n1.ask("data", "web"));
        (ask.credential, ask.call) = (credential.into(), format!("with {credential}"));
        let claim = tokio::spawn(async move { client.claim(ask).await });
        assert_eq!(controller.publish().await.credential, due);
        let granted = claim.await.unwrap().unwrap().into_inner();
        n1.detached(0, "data", &granted.claim).await.unwrap();
        assert_eq!(controller.unpublish().await.credential, due);
        eventually("the claim is free", async || row(&site, "vol/default/data/claim").await.is_empty()).await;
    }
}
