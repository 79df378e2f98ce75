//! Volumes that are expanded through the servers. The controller runs on another node, and is the test.

use std::time::Duration;

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::controller_call::Method;
use csi_proto::cluster::v1::{
    Answer, CallClass, ControllerCall, Expand, ExpandAsk, ExpandVolume, ExpandedVolume, NodeExpanded,
    NodeExpansion, VolumeAsk, VolumeRow, to_node,
};
use tokio::task::JoinHandle;
use tonic::Code;

use crate::attach::{Controller, claiming, head, is_publish, row, user};
use crate::creations::{changing, created, creating, deleting, failed, is_delete, refused, registration};
use crate::site::{Node, Refusal, Session, Site, eventually};

fn expanding(
    site: &Site,
    server: usize,
    required: u64,
    limit: u64,
) -> JoinHandle<Result<VolumeRow, Refusal>> {
    changing(site, server, "operator/all", What::Expand(expand(required, limit)))
}

fn expand(required: u64, limit: u64) -> ExpandAsk {
    ExpandAsk { namespace: String::new(), volume: "data".into(), required, limit }
}

fn expanded(capacity: u64, node_expansion_required: bool) -> How {
    let expanded = Some(ExpandedVolume { capacity, node_expansion_required });
    How::Answer(Answer { expanded, ..Answer::default() })
}

fn of_expand(call: &ControllerCall) -> &ExpandVolume {
    match call.method.as_ref().unwrap() {
        Method::Expand(expand) => expand,
        other => panic!("another call: {other:?}"),
    }
}

/// Creates the volume `data` of 8192 bytes, whose ID is `ext-data`.
async fn make(site: &Site, controller: &mut Controller) {
    let creation = creating(site, 0, "data");
    let call = controller.called().await;
    controller.end(&call, created("ext-data")).await;
    creation.await.unwrap().unwrap();
}

#[tokio::test]
async fn claimed_volume_is_expanded_for_its_nodes() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    make(&site, &mut controller).await;
    // It is large enough.
    assert_eq!(expanding(&site, 0, 4096, 0).await.unwrap().unwrap().capacity, 8192);
    let (n1, _one) = user(&site, "n1", 0).await;
    let (claim, _) = (claiming(&n1, 0, "data"), controller.publish().await);
    let granted = claim.await.unwrap().unwrap();
    assert!(granted.volume.unwrap().expansion.is_none());

    let expansion = expanding(&site, 0, 16_384, 1 << 20);
    let call = controller.called().await;
    let of = of_expand(&call);
    assert_eq!((call.order.as_str(), of.required, of.limit, of.in_use), ("ext-data", 16_384, 1 << 20, true));
    let intent = head(&site, "data").await;
    assert!(intent.contains(&call.call) && intent.contains("\"rpc\":\"expand\""), "{intent}");
    controller.end(&call, expanded(16_384, true)).await;
    let row = expansion.await.unwrap().unwrap();
    let due = |nodes: &[&str]| {
        let nodes = nodes.iter().map(|node| (*node).to_owned()).collect();
        Some(NodeExpansion { required: 16_384, limit: 1 << 20, nodes })
    };
    assert_eq!((row.capacity, row.expansion), (16_384, due(&["n1"])));
    assert!(!head(&site, "data").await.contains("driver"));
    let again = claiming(&n1, 0, "data").await.unwrap().unwrap();
    assert_eq!(again.volume.unwrap().expansion, due(&[]), "the node does not learn of its part");

    // The next one needs no node.
    let expansion = expanding(&site, 0, 32_768, 0);
    let call = controller.called().await;
    controller.end(&call, expanded(32_768, false)).await;
    let row = expansion.await.unwrap().unwrap();
    assert_eq!((row.capacity, row.expansion), (32_768, None));
    assert!(!controller.is_called(Duration::from_millis(300)).await);
}

#[tokio::test]
async fn refused_expansion_leaves_the_volume() {
    let site = Site::start(2).await;
    let mut controller = Controller::start(&site, "c1", 1).await;
    make(&site, &mut controller).await;
    for (how, retries) in [
        (refused(11), 0),
        (failed(CallClass::Withheld, None), 0),
        // An earlier call may have expanded it, and the next one says so again.
        (refused(9), 1),
    ] {
        // The error is known at a server that did not make the call.
        let expansion = expanding(&site, 0, 16_384, 0);
        for _ in 0..retries {
            let call = controller.called().await;
            controller.end(&call, failed(CallClass::Unknown, None)).await;
        }
        let call = controller.called().await;
        assert!(!of_expand(&call).in_use);
        controller.end(&call, how).await;
        let error = expansion.await.unwrap().unwrap_err();
        assert_eq!(error.kind, "PluginError", "{error:?}");
        assert!(error.message.contains("the pool is not there"), "{error:?}");
        let stays = registration(&site, "data").await;
        assert!(
            stays.contains("\"pending-expansion\":null") && stays.contains("\"capacity\":8192"),
            "{stays}"
        );
    }
    assert!(!controller.is_called(Duration::from_millis(500)).await);
    let expansion = expanding(&site, 0, 16_384, 0);
    let call = controller.called().await;
    controller.end(&call, expanded(16_384, false)).await;
    assert!(expansion.await.unwrap().unwrap().error.is_empty());
}

#[tokio::test]
async fn expansion_with_a_wrong_field_is_refused() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let unknown = expanding(&site, 0, 16_384, 0).await.unwrap().unwrap_err();
    assert_eq!(unknown.kind, "NotFound", "{unknown:?}");
    let creation = creating(&site, 0, "data");
    let call = controller.called().await;
    let busy = expanding(&site, 0, 16_384, 0).await.unwrap().unwrap_err();
    assert_eq!(busy.kind, "Busy", "{busy:?}");
    controller.end(&call, created("ext-data")).await;
    creation.await.unwrap().unwrap();
    for (required, limit) in [(u64::MAX, 0), (16_384, u64::MAX), (16_384, 9000), (0, 4096)] {
        let error = expanding(&site, 0, required, limit).await.unwrap().unwrap_err();
        assert_eq!(error.kind, "InvalidArgument", "{required} {limit}: {error:?}");
    }
    for who in ["operator/creates", "node/n-creates"] {
        let denied = changing(&site, 0, who, What::Expand(expand(16_384, 0))).await.unwrap().unwrap_err();
        assert_eq!(denied.kind, "NotAuthorized", "{who}: {denied:?}");
    }
    assert!(!controller.is_called(Duration::from_millis(300)).await);
}

/// The plugin may expand the volume OFFLINE, so nobody may begin to use it meanwhile.
#[tokio::test]
async fn first_claim_waits_for_an_expansion() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    make(&site, &mut controller).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let expansion = expanding(&site, 0, 16_384, 0);
    let call = controller.called().await;
    let busy = claiming(&n1, 0, "data").await.unwrap().unwrap_err();
    assert_eq!((busy.kind.as_str(), busy.retryable), ("Busy", true), "{busy:?}");
    controller.end(&call, expanded(16_384, false)).await;
    expansion.await.unwrap().unwrap();
    let (claim, _) = (claiming(&n1, 0, "data"), controller.publish().await);
    claim.await.unwrap().unwrap();
}

/// A controller that expands nothing for a while attaches and detaches all the same.
#[tokio::test]
async fn claims_are_served_while_an_expansion_fails() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    make(&site, &mut controller).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let (claim, _) = (claiming(&n1, 0, "data"), controller.publish().await);
    let granted = claim.await.unwrap().unwrap();
    let expansion = expanding(&site, 0, 16_384, 0);
    let call = controller.called().await;
    of_expand(&call);
    n1.detached(0, "data", &granted.claim).await.unwrap();
    controller.end(&call, failed(CallClass::Again, Some(10))).await;
    let mut is_detached = false;
    // The calls of both come in any order, each after its own pause.
    for _ in 0..20 {
        let call = controller.called().await;
        match &call.method {
            Some(Method::Unpublish(_)) => {
                controller.end(&call, How::Answer(Answer::default())).await;
                is_detached = true;
            }
            _ if is_detached => {
                of_expand(&call);
                controller.end(&call, expanded(16_384, false)).await;
                break;
            }
            _ => controller.end(&call, failed(CallClass::Again, Some(10))).await,
        }
    }
    assert!(is_detached, "the expansion holds up the detach");
    expansion.await.unwrap().unwrap();
    eventually("the claim is free", async || row(&site, "vol/default/data/claim").await.is_empty()).await;
    let deletion = deleting(&site, 0, "data");
    let call = controller.called().await;
    assert!(is_delete(&call) && !is_publish(&call));
    controller.end(&call, How::Answer(Answer::default())).await;
    deletion.await.unwrap().unwrap();
}

/// What the controller's node answers is bounded.
#[tokio::test]
async fn lie_in_the_answer_to_an_expansion_is_nothing() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    make(&site, &mut controller).await;
    let expansion = expanding(&site, 0, 16_384, 0);
    for lie in [expanded(u64::MAX, false), created("ext-other"), How::Answer(Answer::default())] {
        let call = controller.called().await;
        of_expand(&call);
        controller.end(&call, lie).await;
    }
    let call = controller.called().await;
    controller.end(&call, expanded(16_384, false)).await;
    let row = expansion.await.unwrap().unwrap();
    assert_eq!((row.capacity, row.external_id.as_str()), (16_384, "ext-data"));
    // A volume that is smaller than it was asked to be is not what its caller wants.
    let expansion = expanding(&site, 0, 32_768, 0);
    let call = controller.called().await;
    controller.end(&call, expanded(100, false)).await;
    let error = expansion.await.unwrap().unwrap_err();
    assert_eq!(error.kind, "PluginError", "{error:?}");
}

#[tokio::test]
async fn expansion_of_a_killed_server_goes_on() {
    let mut site = Site::start(2).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    make(&site, &mut controller).await;
    let expansion = expanding(&site, 1, 16_384, 0);
    let lost = controller.called().await;
    site.servers[0].kill();
    controller.join_again(1).await;
    controller.end(&lost, expanded(1 << 30, false)).await;
    let call = controller.called_within(Duration::from_secs(30)).await;
    assert!(of_expand(&call).required == 16_384 && call.epoch > lost.epoch, "{call:?}");
    controller.end(&call, expanded(16_384, false)).await;
    assert_eq!(expansion.await.unwrap().unwrap().capacity, 16_384);
    assert!(!head(&site, "data").await.contains("driver"));
}

/// Creates the volume `data`, which n1 claims, and has its controller expand it to 16384 bytes.
async fn owing(site: &Site, controller: &mut Controller) -> (Node, Session, String) {
    make(site, controller).await;
    let (n1, session) = user(site, "n1", 0).await;
    let (claim, _) = (claiming(&n1, 0, "data"), controller.publish().await);
    let claim = claim.await.unwrap().unwrap().claim;
    let expansion = expanding(site, 0, 16_384, 0);
    let call = controller.called().await;
    controller.end(&call, expanded(16_384, true)).await;
    expansion.await.unwrap().unwrap();
    (n1, session, claim)
}

/// Waits until the session's node is asked for its part.
async fn asked(session: &mut Session) {
    let due = Expand { namespace: "default".into(), volume: "data".into(), required: 16_384, limit: 0 };
    assert_eq!(session.next().await.unwrap(), Some(to_node::Is::Expand(due)));
}

fn done(node: &Node) -> NodeExpanded {
    NodeExpanded {
        namespace: "default".into(),
        volume: "data".into(),
        required: 16_384,
        limit: 0,
        boot: node.hello.boot.clone(),
    }
}

/// Returns the nodes that owe the expansion of `data`, as an operator sees them. `None`: it has come to its end.
async fn owe(site: &Site, server: usize) -> Option<Vec<String>> {
    let ask = VolumeAsk { namespace: String::new(), volume: "data".into(), ..VolumeAsk::default() };
    let row = site.operator(server, "all").volume(ask).await.unwrap().into_inner();
    row.expansion.map(|of| of.nodes)
}

#[tokio::test]
async fn node_that_has_done_its_part_owes_nothing() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, mut session, _) = owing(&site, &mut controller).await;
    asked(&mut session).await;
    // n2 has no claim, so its word counts for nothing.
    let (n2, _two) = user(&site, "n2", 0).await;
    n2.client(0).expanded(done(&n2)).await.unwrap();
    let good = done(&n1);
    for (lie, said, code) in [
        ("another expansion", NodeExpanded { required: 32_768, ..good.clone() }, None),
        ("another limit", NodeExpanded { limit: 1 << 20, ..good.clone() }, None),
        ("another boot", NodeExpanded { boot: "of a clone".into(), ..good.clone() }, Some(Code::Aborted)),
        ("no boot", NodeExpanded { boot: String::new(), ..good.clone() }, Some(Code::Aborted)),
        ("no volume", NodeExpanded { volume: String::new(), ..good.clone() }, Some(Code::InvalidArgument)),
        ("another volume", NodeExpanded { volume: "data/claim".into(), ..good.clone() }, None),
        ("another namespace", NodeExpanded { namespace: "shared".into(), ..good.clone() }, None),
        ("a huge capacity", NodeExpanded { required: u64::MAX, ..good.clone() }, Some(Code::InvalidArgument)),
        ("a small limit", NodeExpanded { limit: 1, ..good.clone() }, Some(Code::InvalidArgument)),
    ] {
        let answer = n1.client(0).expanded(said).await;
        assert_eq!(answer.err().map(|status| status.code()), code, "{lie}");
    }
    assert_eq!(owe(&site, 0).await, Some(vec!["n1".to_owned()]), "a lie counts");
    for _ in 0..2 {
        n1.client(0).expanded(good.clone()).await.unwrap();
        assert_eq!(owe(&site, 0).await, None);
    }
    assert!(!registration(&site, "data").await.contains("owed-expansion"));
}

#[tokio::test]
async fn node_that_was_away_is_asked_when_it_joins() {
    let mut site = Site::start(2).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, mut session, _) = owing(&site, &mut controller).await;
    asked(&mut session).await;
    // It dies after NodeExpandVolume and before its report, and its server dies, too.
    drop(session);
    site.servers[0].kill();
    let mut session = n1.join(1).await;
    asked(&mut session).await;
    n1.client(1).expanded(done(&n1)).await.unwrap();
    assert_eq!(owe(&site, 1).await, None);
}

#[tokio::test]
async fn expansion_of_a_free_volume_is_the_next_nodes() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, mut session, claim) = owing(&site, &mut controller).await;
    asked(&mut session).await;
    let n1s = owe(&site, 0).await;
    n1.detached(0, "data", &claim).await.unwrap();
    controller.unpublish().await;
    let after = owe(&site, 0).await;
    assert_eq!((n1s, after), (Some(vec!["n1".to_owned()]), Some(Vec::new())), "nobody has done it");
    let (n2, mut two) = user(&site, "n2", 0).await;
    let (claim, _) = (claiming(&n2, 0, "data"), controller.publish().await);
    let granted = claim.await.unwrap().unwrap().volume.unwrap().expansion;
    assert_eq!(granted.map(|of| (of.required, of.nodes)), Some((16_384, Vec::new())));
    asked(&mut two).await;
    assert_eq!(owe(&site, 0).await, Some(vec!["n2".to_owned()]));
    n2.client(0).expanded(done(&n2)).await.unwrap();
    assert_eq!(owe(&site, 0).await, None);
}
