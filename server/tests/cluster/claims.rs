//! Claims of two nodes at two servers.

use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::{
    Attaches, ClaimAsk, Failure, ListAsk, PluginReport, ReleaseAsk, VolumeAsk, to_node,
};
use prost::Message;
use tonic::Code;

use crate::site::{Refusal, Site, eventually, register, release_ask};

#[tokio::test]
async fn released_claim_is_had_by_the_other_node() {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let (n1, n2) = (site.node("n1"), site.node("n2"));
    let (_one, _two) = (n1.join(0).await, n2.join(1).await);
    let first = n1.claim(0, "data").await.unwrap();
    assert_eq!(first.len(), 32, "128 random bits");
    assert_eq!(n1.claim(0, "data").await, Ok(first.clone()), "the same claim again");

    let refused = n2.claim(1, "data").await.unwrap_err();
    assert_eq!((refused.code, refused.kind.as_str()), (Code::FailedPrecondition, "ClaimConflict"));
    assert_eq!((refused.holders, refused.retryable), (vec!["n1/web".to_owned()], true));

    n1.detached(0, "data", &first).await.unwrap();
    let second = n2.claim(1, "data").await.unwrap();
    assert_ne!(first, second);
    // A Detached that comes late, or twice, ends no later claim.
    n1.detached(1, "data", &first).await.unwrap();
    let refused = n1.claim(0, "data").await.unwrap_err();
    assert_eq!(refused.holders, ["n2/web"]);
    n2.detached(0, "data", &second).await.unwrap();
    let third = n1.claim(0, "data").await.unwrap();
    assert_ne!(first, third);
    n1.detached(0, "data", &first).await.unwrap();
    assert_eq!(n1.claim(0, "data").await, Ok(third), "an old id ended a new claim");
}

#[tokio::test]
async fn same_consumer_on_two_nodes_has_two_claims() {
    let site = Site::start(1).await;
    site.register("shared", "multi-node-multi-writer").await;
    let nodes = [site.node("n1"), site.node("n2")];
    let mut ids = Vec::new();
    let mut sessions = Vec::new();
    for node in &nodes {
        sessions.push(node.join(0).await);
        let mut wanted = node.ask("shared", "web");
        wanted.r#use.as_mut().unwrap().access_mode = "multi-node-multi-writer".into();
        let mut granted = None;
        eventually("the claim is granted", async || {
            granted = node.client(0).claim(wanted.clone()).await.ok();
            granted.is_some()
        })
        .await;
        ids.push(granted.unwrap().into_inner().claim);
    }
    let mut raw = site.raw().await;
    let keys = raw.below("/csid/v1/vol/default/shared/claim/").await;
    let keys: Vec<_> = keys.iter().map(|kv| String::from_utf8_lossy(&kv.key).into_owned()).collect();
    let due = ["n1", "n2"].map(|node| format!("/csid/v1/vol/default/shared/claim/{node}/web"));
    assert_eq!(keys, due);
    nodes[0].detached(0, "shared", &ids[0]).await.unwrap();
    let row = nodes[1]
        .client(0)
        .volume(VolumeAsk { namespace: String::new(), volume: "shared".into(), ..VolumeAsk::default() })
        .await;
    let claims = row.unwrap().into_inner().claims;
    assert_eq!((claims.len(), claims[0].node.as_str(), &claims[0].claim), (1, "n2", &ids[1]));
}

/// A node claims by what it has read of the volume before.
#[tokio::test]
async fn claim_by_an_old_mark_changes_nothing() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let node = site.node("n1");
    let _session = node.join(0).await;
    let free = node.claim(0, "data").await.unwrap();
    node.detached(0, "data", &free).await.unwrap();
    let mark = async || {
        let volume = VolumeAsk { namespace: String::new(), volume: "data".into(), ..VolumeAsk::default() };
        node.client(0).volume(volume).await.unwrap().into_inner().mark
    };
    let old = mark().await;
    assert_eq!(old.len(), 32);
    let by = |mark: &[u8], call: &str| ClaimAsk {
        mark: mark.to_vec(),
        call: call.into(),
        ..node.ask("data", "web")
    };
    let granted = node.client(0).claim(by(&old, "first")).await.unwrap().into_inner();
    assert_eq!(mark().await, old, "a claim is no other registration");
    // A claim that is there is not compared, for the answer to an earlier message of its call may be lost.
    let again = node.client(0).claim(by(b"another", "first")).await.unwrap().into_inner();
    assert_eq!(again.claim, granted.claim);
    node.detached(0, "data", &granted.claim).await.unwrap();

    let mut wider = register("data", "single-node-writer");
    let Some(What::Register(of)) = &mut wider.what else { unreachable!() };
    of.spec.as_mut().unwrap().capabilities.push(csi_proto::cluster::v1::Capability {
        access_mode: "single-node-reader-only".into(),
        attachment_mode: "file-system".into(),
    });
    site.operator(0, "all").change(wider).await.unwrap();
    assert_ne!(mark().await, old);
    let status = node.client(0).claim(by(&old, "second")).await.unwrap_err();
    let failure = status.metadata().get_bin("csid-failure-bin").unwrap().to_bytes().unwrap();
    assert!(Failure::decode(failure).unwrap().changed, "{status:?}");
    assert!(site.raw().await.below("/csid/v1/vol/default/data/claim/").await.is_empty());
    node.client(0).claim(by(&mark().await, "third")).await.unwrap();
}

/// 40 nodes' consumers ask at two servers at once.
#[tokio::test]
async fn one_of_many_claims_at_once_is_granted() {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let nodes = [site.node("n1"), site.node("n2")];
    let _sessions = (nodes[0].join(0).await, nodes[1].join(1).await);
    // The servers know the plugin of both.
    site.register("other", "single-node-writer").await;
    let other = nodes[0].claim(0, "other").await.unwrap();
    nodes[0].detached(0, "other", &other).await.unwrap();
    nodes[1].claim(1, "other").await.unwrap();
    let calls = (0..40).map(|n| {
        let node = &nodes[n % 2];
        let (mut client, ask) = (node.client(n % 2), node.ask("data", &format!("c{n}")));
        async move { client.claim(ask).await }
    });
    let answers = futures_util::future::join_all(calls).await;
    let granted = answers.iter().filter(|answer| answer.is_ok()).count();
    assert_eq!(granted, 1);
    for answer in answers.iter().filter_map(|answer| answer.as_ref().err()) {
        let refused = Refusal::of(answer);
        assert_eq!((refused.kind.as_str(), refused.holders.len()), ("ClaimConflict", 1), "{refused:?}");
    }
}

#[tokio::test]
async fn plugin_that_attaches_or_is_unknown_is_refused() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let node = site.node("n1");
    let (_, mut session) = node.say_hello(0).await.unwrap();
    let unknown = node.client(0).claim(node.ask("data", "web")).await.unwrap_err();
    let unknown = Refusal::of(&unknown);
    assert_eq!((unknown.kind.as_str(), unknown.retryable), ("PluginUnavailable", true));
    session.report(Attaches::Yes).await;
    let refused = node.claim(0, "data").await.unwrap_err();
    assert!(refused.message.contains("no node with the grant controller:"), "{refused:?}");
    assert_eq!(
        (refused.code, refused.kind.as_str(), refused.retryable),
        (Code::Unavailable, "PluginUnavailable", true)
    );
    let mut raw = site.raw().await;
    assert!(raw.below("/csid/v1/vol/default/data/claim/").await.is_empty(), "a refused claim was written");
}

/// No report of a node can change that: the caller need not wait.
#[tokio::test]
async fn plugin_without_a_controllers_grant_is_refused() {
    let site = Site::start(1).await;
    let mut ask = register("data", "single-node-writer");
    let Some(What::Register(of)) = &mut ask.what else { unreachable!() };
    of.plugin = "ungranted".into();
    site.operator(0, "all").change(ask).await.unwrap();
    let node = site.node("n1");
    let (_, mut session) = node.say_hello(0).await.unwrap();
    session
        .report_as(PluginReport {
            plugin: "ungranted".into(),
            attaches: Attaches::Yes.into(),
            node_id: "id of n1".into(),
            controller: true,
            ..PluginReport::default()
        })
        .await;
    let refused = node.claim(0, "data").await.unwrap_err();
    assert!(refused.message.contains("no node with the grant controller:ungranted"), "{refused:?}");
    assert_eq!(
        (refused.code, refused.kind.as_str(), refused.retryable),
        (Code::Unimplemented, "NotSupported", false)
    );
    let mut raw = site.raw().await;
    assert!(raw.below("/csid/v1/vol/default/data/claim/").await.is_empty(), "a refused claim was written");
}

/// The node reports at one server, and claims at the other, which has an older row in memory.
#[tokio::test]
async fn plugin_that_another_server_wrote_is_known() {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let node = site.node("n1");
    let (_, _session) = node.say_hello(0).await.unwrap();
    let (_, mut other) = node.say_hello(1).await.unwrap();
    let why = async || {
        let answer = node.client(0).claim(node.ask("data", "web")).await;
        answer.err().map(|status| Refusal::of(&status).message).unwrap_or_default()
    };
    assert!(why().await.contains("has not reported whether plugin"));
    other.report(Attaches::Yes).await;
    eventually("the server knows that it attaches", async || why().await.contains("no node with the grant"))
        .await;
    other.report(Attaches::No).await;
    eventually("the claim is granted", async || why().await.is_empty()).await;
}

#[tokio::test]
async fn operators_release_is_asked_of_the_node() {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let node = site.node("n1");
    let mut session = node.join(1).await;
    let claim = node.claim(1, "data").await.unwrap();
    let release = |deadline_ms| ReleaseAsk { deadline_ms, ..release_ask("data", "n1") };
    let late = site.operator(0, "releases").release(release(300)).await.unwrap_err();
    let late = Refusal::of(&late);
    assert_eq!((late.kind.as_str(), late.holders), ("TimedOut", vec!["n1/web".to_owned()]));
    // The other server asks the node.
    let Some(to_node::Is::Changed(changed)) = session.next().await.unwrap() else { panic!("not asked") };
    assert_eq!((&changed.claim, changed.state.as_str()), (&claim, "releasing"));
    let again = node.claim(1, "data").await.unwrap_err();
    assert_eq!(again.kind, "Uncertain", "{again:?}");
    let mut operator = site.operator(0, "releases");
    let (released, detached) =
        tokio::join!(operator.release(release(20_000)), node.detached(1, "data", &claim));
    detached.unwrap();
    released.unwrap();
    operator.release(release(1)).await.expect("a claim that is not there is released");
    node.claim(1, "data").await.unwrap();

    let forced = ReleaseAsk { force: true, ..release(20_000) };
    let denied = Refusal::of(&operator.release(forced.clone()).await.unwrap_err());
    assert_eq!(denied.kind, "NotAuthorized", "force takes the grant fence, too");
    site.operator(0, "all").release(forced).await.unwrap();
    let other = site.node("n2");
    let _other = other.join(0).await;
    other.claim(0, "data").await.unwrap();
}

#[tokio::test]
async fn repeated_release_ends_no_later_claim() {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let node = site.node("n1");
    let _session = node.join(1).await;
    let first = node.claim(1, "data").await.unwrap();
    let ask = ReleaseAsk { deadline_ms: 20_000, force: true, ..release_ask("data", "n1") };
    let release = async |server, ask| site.operator(server, "all").release(ask).await.unwrap().into_inner();
    let named = release(0, ReleaseAsk { asks_id: true, ..ask.clone() }).await;
    assert_eq!(named.claim, first);
    assert_eq!(node.claim(1, "data").await.unwrap(), first, "a question ends no claim");
    let ask = ReleaseAsk { claim: named.claim, ..ask };
    release(0, ask.clone()).await;
    let second = node.claim(1, "data").await.unwrap();
    assert_ne!(second, first);
    for force in [false, true] {
        release(1, ReleaseAsk { force, ..ask.clone() }).await;
        assert_eq!(node.claim(1, "data").await.unwrap(), second, "the later claim has ended");
    }
    let lie = ReleaseAsk { claim: "of another".into(), ..ask };
    release(0, lie).await;
    assert_eq!(node.claim(1, "data").await.unwrap(), second);
}

#[tokio::test]
async fn context_is_seen_by_the_claims_node_alone() {
    let site = Site::start(1).await;
    let row = site.register("data", "single-node-writer").await;
    assert!(row.spec.unwrap().volume_context.is_empty(), "an operator got a context");
    let (n1, n2) = (site.node("n1"), site.node("n2"));
    let _sessions = (n1.join(0).await, n2.join(0).await);
    let claim = n1.claim(0, "data").await.unwrap();
    let volume = VolumeAsk { namespace: "default".into(), volume: "data".into(), ..VolumeAsk::default() };
    let own = n1.client(0).volume(volume.clone()).await.unwrap().into_inner();
    assert_eq!(
        (own.claims[0].claim.as_str(), own.spec.unwrap().volume_context["share"].as_str()),
        (&*claim, "hunter2")
    );
    let others = n2.client(0).volume(volume).await.unwrap().into_inner();
    assert_eq!((others.claims[0].claim.as_str(), others.owner.as_str()), ("", "operator/all"));
    assert!(others.spec.unwrap().volume_context.is_empty(), "another node got a context");
}

#[tokio::test]
async fn list_has_the_namespaces_of_the_caller_in_pages() {
    let site = Site::start(1).await;
    let mut operator = site.operator(0, "all");
    for n in 0..510 {
        let mut ask = register(&format!("v{n:03}"), "single-node-writer");
        if let Some(What::Register(register)) = &mut ask.what
            && n % 2 == 0
        {
            register.namespace = "hidden".into();
        }
        operator.change(ask).await.unwrap();
    }
    let list = async |mut client: csi_proto::cluster::v1::cluster_client::ClusterClient<
        tonic::transport::Channel,
    >,
                      ask: ListAsk| {
        let mut pages = client.volumes(ask).await.unwrap().into_inner();
        let mut names = Vec::new();
        while let Some(page) = pages.message().await.unwrap() {
            names.extend(page.volumes.into_iter().map(|row| (row.namespace, row.volume)));
        }
        names
    };
    let all = list(operator.clone(), ListAsk::default()).await;
    assert!(all.len() == 510 && all.is_sorted());
    let node = site.node("n1");
    let seen = list(node.client(0), ListAsk::default()).await;
    assert!(seen.len() == 255 && seen.iter().all(|(namespace, _)| namespace == "default"));
    let own = || ListAsk { own: true, ..ListAsk::default() };
    assert_eq!(list(node.client(0), own()).await, []);
    let _session = node.join(0).await;
    let claim = node.claim(0, "v001").await.unwrap();
    let mut pages = node.client(0).volumes(own()).await.unwrap().into_inner();
    let mut page = pages.message().await.unwrap().expect("a page");
    assert!(page.volumes.len() == 1 && pages.message().await.unwrap().is_none());
    let row = page.volumes.remove(0).claims.remove(0);
    assert_eq!((row.claim, row.call.as_str()), (claim, "call 1"));
    let volume = VolumeAsk { namespace: "default".into(), volume: "v001".into(), ..VolumeAsk::default() };
    let seen = operator.clone().volume(volume).await.unwrap().into_inner().claims.remove(0);
    assert_eq!([seen.claim.as_str(), &seen.call], ["", ""], "an operator sees a node's names");
    let denied = operator.clone().volumes(own()).await.unwrap_err();
    assert_eq!(denied.code(), Code::PermissionDenied, "an operator has no claims");
    let after = ListAsk {
        namespace: "hidden".into(),
        after_namespace: "hidden".into(),
        after_volume: "v498".into(),
        ..ListAsk::default()
    };
    let rest: Vec<_> = list(operator, after).await.into_iter().map(|(_, volume)| volume).collect();
    assert_eq!(rest, ["v500", "v502", "v504", "v506", "v508"]);
}

#[tokio::test]
async fn registration_is_its_owners_and_one_per_volume() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    site.register("data", "single-node-writer").await;
    let mut operator = site.operator(0, "all");
    let mut other = register("other", "single-node-writer");
    let Some(What::Register(of)) = &mut other.what else { panic!() };
    of.external_id = "ext-data".into();
    let taken = Refusal::of(&operator.change(other).await.unwrap_err());
    assert_eq!(taken.kind, "AlreadyExists");
    let changed = register("data", "multi-node-multi-writer");
    operator.change(changed.clone()).await.unwrap();
    let node = site.node("n1");
    let _session = node.join(0).await;
    let mut raw = site.raw().await;
    let reg = raw.below("/csid/v1/vol/default/data/reg").await.remove(0);
    let of_another = String::from_utf8(reg.value).unwrap().replace("operator/all", "operator/gone");
    raw.put("/csid/v1/vol/default/data/reg", &of_another).await;
    let denied = Refusal::of(&operator.change(changed).await.unwrap_err());
    assert_eq!((denied.code, denied.kind.as_str()), (Code::PermissionDenied, "NotAuthorized"));
}

#[tokio::test]
async fn node_has_no_more_claims_than_the_limit() {
    let site = Site::start_with(1, "max-claims = 2").await;
    let node = site.node("n1");
    let _session = node.join(0).await;
    let mut ids = Vec::new();
    for volume in ["a", "b", "c"] {
        site.register(volume, "single-node-writer").await;
        ids.push(node.claim(0, volume).await);
    }
    let refused = ids[2].as_ref().unwrap_err();
    assert_eq!((refused.code, refused.kind.as_str()), (Code::ResourceExhausted, "RateLimited"));
    assert!(node.claim(0, "a").await.is_ok(), "a claim that is there is no new one");
    node.detached(0, "b", ids[1].as_ref().unwrap()).await.unwrap();
    node.claim(0, "c").await.unwrap();
}

#[tokio::test]
async fn claims_at_once_do_not_pass_the_limit() {
    let site = Site::start_with(1, "max-claims = 3").await;
    let node = site.node("n1");
    let _session = node.join(0).await;
    for n in 0..20 {
        site.register(&format!("v{n}"), "single-node-writer").await;
    }
    node.claim(0, "v0").await.unwrap();
    let calls = (1..20).map(|n| {
        let (mut client, ask) = (node.client(0), node.ask(&format!("v{n}"), "web"));
        async move { client.claim(ask).await }
    });
    let answers = futures_util::future::join_all(calls).await;
    let granted = answers.iter().filter(|answer| answer.is_ok()).count();
    assert!((1..=2).contains(&granted), "{granted} more claims than one");
    for answer in answers.iter().filter_map(|answer| answer.as_ref().err()) {
        assert_eq!(Refusal::of(answer).kind, "RateLimited", "{answer:?}");
    }
    let mut raw = site.raw().await;
    let claims = raw.below("/csid/v1/vol/").await;
    let claims = claims.iter().filter(|kv| String::from_utf8_lossy(&kv.key).contains("/claim/"));
    assert_eq!(claims.count(), granted + 1);
}
