//! A cluster that recovers from a backup of etcd: how that begins, what it refuses meanwhile, what it waits for, and how it ends.

use std::time::Duration;

use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::resume_ask::Step;
use csi_proto::cluster::v1::{
    Attaches, BlockAsk, ChangeAsk, CreateAsk, DrainAsk, FenceAsk, HeldClaims, Hello, NodeAsk, NodeChange,
    ReleaseAsk, RestoredAsk, ResumeAsk, Spec,
};
use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::attach::{Controller, claiming, row, user};
use crate::creations::create;
use crate::operators::{csictl, operator};
use crate::recovery::{
    claims, held, hold, is, leave_out, page, phase, restored, resume, resumed, servers, step, try_hold,
    welcome,
};
use crate::site::{First, Node, Refusal, Session, Site, eventually, register, release_ask};

async fn is_gone(session: &mut Session) {
    assert_eq!(session.next().await.unwrap_err().kind, "Unavailable", "the session of before goes on");
}

#[tokio::test]
async fn restored_raises_the_generation_that_was_seen_once() {
    let site = Site::start(2).await;
    let node = site.node("n1");
    let mut session = node.join(1).await;
    for _ in 0..2 {
        for server in [0, 1] {
            let rows = restored(&site, server, 1).await.unwrap();
            assert_eq!((rows.generation, rows.mode.as_str()), (2, "recovering"));
            assert_eq!((rows.awaited, rows.by.as_str()), (vec!["n1".to_owned()], "operator/all"));
        }
    }
    for generation in [0, 3, u64::MAX] {
        assert_eq!(restored(&site, 0, generation).await.unwrap_err().kind, "Busy");
    }
    assert_eq!(phase(&site).await, is(2, "recovering", &["n1"]));
    is_gone(&mut session).await;
    let refused = site.admin(0, "local").restored(RestoredAsk { generation: 2, past: 0 }).await.unwrap_err();
    assert_eq!(Refusal::of(&refused).kind, "NotAuthorized", "it is a grant for all namespaces");
    let (welcome, _session) = welcome(&node, 1).await;
    assert_eq!((welcome.generation, welcome.mode.as_str()), (2, "recovering"));
    hold(&node, 1, page(&node, 2, vec![], true)).await.unwrap();
    resumed(&site, 2).await;
    // The first word again, which the operator got no answer to.
    assert_eq!(restored(&site, 0, 1).await.unwrap().mode, "normal");
    assert_eq!(phase(&site).await, is(2, "normal", &[]));
}

/// Returns all rows of etcd but those of servers, which beat, and of sessions.
async fn stored(site: &Site) -> Vec<(String, Vec<u8>)> {
    let found = site.raw().await.below("/csid/v1/").await.into_iter();
    let found = found.map(|kv| (String::from_utf8(kv.key).unwrap(), kv.value));
    found.filter(|(key, _)| !key.contains("/server/") && !key.contains("/session/")).collect()
}

/// Returns the reason for which a node is refused.
async fn refused(node: &Node, server: usize) -> String {
    match node.say_hello(server).await.unwrap() {
        (First::Refused(reason), _) => reason,
        (welcome, _) => panic!("{welcome:?}"),
    }
}

fn ahead(name: &str, generation: u64, seen_revision: u64) -> Hello {
    Hello { generation, seen_revision, ..crate::site::hello(name) }
}

#[tokio::test]
async fn node_ahead_of_etcd_stops_nobody_but_itself() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut node = site.node("n1");
    drop(welcome(&node, 0).await);
    let other = site.node("n2");
    let _session = other.join(0).await;
    other.claim(0, "data").await.unwrap();
    let before = stored(&site).await;
    node.hello = ahead("n1", 2, 1 << 40);
    assert_eq!(refused(&node, 0).await, "ahead-of-etcd");
    let noted = stored(&site).await;
    let changed: Vec<_> =
        noted.iter().filter(|row| !before.contains(row)).map(|(key, _)| key.as_str()).collect();
    assert_eq!((changed, noted.len()), (vec!["/csid/v1/node/n1"], before.len()));
    for (generation, revision) in [(2, 1 << 40), (1, 1 << 40), (3, 0), (u64::MAX, u64::MAX)] {
        node.hello = ahead("n1", generation, revision);
        assert_eq!(refused(&node, 0).await, "ahead-of-etcd");
        assert_eq!(stored(&site).await, noted, "a refused Hello has changed something");
    }
    // etcd does not know this one.
    let mut unknown = site.node("n3");
    unknown.hello = ahead("n3", 2, 0);
    assert_eq!(refused(&unknown, 0).await, "ahead-of-etcd");
    assert_eq!(stored(&site).await, noted);
    assert_eq!(phase(&site).await, is(1, "normal", &[]));
    other.client(0).claim(other.ask("data", "web")).await.expect("the other node's session goes on");

    let file = operator(&site, "all");
    let said = csictl(&file, "server audit --json").await;
    let found: Value = serde_json::from_str(&said.out).unwrap();
    let due = json!([{
        "kind": "node-ahead-of-etcd",
        "key": "/csid/v1/node/n1",
        "text": "node n1 has seen generation 2 and revision 1099511627776 of it, which etcd does not have, and is refused",
    }]);
    assert_eq!((said.code, found), (Some(1), due));
    let said = csictl(&file, "node list").await;
    assert!(said.out.contains("refused: it has seen generation 2"), "{said:?}");
    let said = csictl(&file, "server restored --past 1002 --confirm prod").await;
    assert_eq!((said.code, phase(&site).await), (Some(1), is(1, "normal", &[])), "{said:?}");
    let rows = csictl(&file, "server restored --past 2 --confirm prod --json").await.json();
    assert_eq!((&rows["generation"], &rows["mode"]), (&json!(3), &json!("recovering")));
    node.hello = ahead("n1", 2, 1 << 40);
    let (welcome, _session) = welcome(&node, 0).await;
    assert_eq!((welcome.generation, welcome.mode.as_str(), welcome.forget), (3, "recovering", false));
    let found = csictl(&file, "server audit --json").await.out;
    assert!(!found.contains("node-ahead-of-etcd") && found.contains("recovery-awaits-node"), "{found}");
}

/// Nothing is granted while the cluster recovers, so no node has a claim of that generation.
#[tokio::test]
async fn node_of_the_recovering_generation_is_refused() {
    let site = Site::start(1).await;
    let mut node = site.node("n1");
    drop(welcome(&node, 0).await);
    restored(&site, 0, 1).await.unwrap();
    node.hello = ahead("n1", 2, 1);
    assert_eq!(refused(&node, 0).await, "ahead-of-etcd");
    assert_eq!(phase(&site).await, is(2, "recovering", &["n1"]));
    node.hello = ahead("n1", 0, 1 << 40);
    drop(welcome(&node, 0).await);
    node.hello = ahead("n1", 1, 1 << 40);
    let (_, session) = welcome(&node, 0).await;
    hold(&node, 0, page(&node, 2, vec![], true)).await.unwrap();
    resumed(&site, 2).await;
    drop(session);
    node.hello = ahead("n1", 2, 1);
    let (welcome, _session) = welcome(&node, 0).await;
    assert_eq!((welcome.generation, welcome.mode.as_str()), (2, "normal"));
}

#[tokio::test]
async fn accepted_node_forgets_what_it_has_seen() {
    let site = Site::start(2).await;
    let mut node = site.node("n1");
    drop(welcome(&node, 0).await);
    let file = operator(&site, "all");
    let said = csictl(&file, "node accept n1 --forget").await;
    assert_eq!(said.code, Some(1), "it has seen nothing: {said:?}");
    node.hello = ahead("n1", 1 << 63, 7);
    assert_eq!(refused(&node, 0).await, "ahead-of-etcd");
    assert_eq!(csictl(&file, "node accept n1").await.code, Some(0));
    assert_eq!(refused(&node, 1).await, "ahead-of-etcd", "the operator did not say that");
    let status = csictl(&file, "--operator cluster status").await.out;
    assert!(status.contains("node-ahead-of-etcd") && status.contains("csictl node show n1"), "{status}");
    assert_eq!(csictl(&file, "node accept n1 --forget").await.code, Some(0));
    let status = csictl(&file, "--operator cluster status").await.out;
    assert!(!status.contains("node-ahead-of-etcd"), "{status}");
    node.hello = ahead("n1", 1 << 63, 8);
    assert_eq!(refused(&node, 1).await, "ahead-of-etcd", "the operator has not seen that");
    assert_eq!(csictl(&file, "node accept n1 --forget").await.code, Some(0));
    for server in [1, 0] {
        let (welcome, _session) = welcome(&node, server).await;
        assert_eq!((welcome.generation, welcome.forget), (1, true));
    }
    assert_eq!(csictl(&file, "server audit").await.code, Some(0));
    node.hello = ahead("n1", 0, 0);
    let (welcome, session) = welcome(&node, 0).await;
    assert!(!welcome.forget);
    drop(session);
    node.hello = ahead("n1", 1 << 63, 8);
    assert_eq!(refused(&node, 0).await, "ahead-of-etcd", "an acceptance is for one time");
}

/// The node may have joined again since the backup, or was blocked during the recovery. It cannot say what it holds.
#[tokio::test]
async fn blocked_or_fenced_node_is_awaited() {
    let site = Site::start(1).await;
    let nodes = ["n1", "n2", "n3", "n4"].map(|name| site.node(name));
    for node in &nodes {
        drop(welcome(node, 0).await);
    }
    let change = async |node: &str, change: Change| {
        let ask = NodeChange { node: node.into(), change: Some(change) };
        site.admin(0, "all").set_node(ask).await.unwrap();
    };
    let revision =
        site.admin(0, "all").node(NodeAsk { node: "n3".into() }).await.unwrap().into_inner().revision;
    change("n2", Change::Block(BlockAsk { reason: "stolen".into() })).await;
    change("n3", Change::Fence(FenceAsk { reason: "off".into(), revision, by_hand: true })).await;
    change("n4", Change::Drain(DrainAsk {})).await;
    restored(&site, 0, 1).await.unwrap();
    change("n4", Change::Block(BlockAsk { reason: "stolen".into() })).await;
    assert_eq!(phase(&site).await, is(2, "recovering", &["n1", "n2", "n3", "n4"]));
    assert_eq!(
        (refused(&nodes[1], 0).await, refused(&nodes[2], 0).await),
        ("blocked".into(), "fenced".into())
    );
    for node in [&nodes[1], &nodes[2], &nodes[3]] {
        let said = try_hold(node, 0, page(node, 2, vec![], true)).await;
        assert!(["Busy", "NotAuthorized"].contains(&said.unwrap_err().kind.as_str()));
    }
    let _session = welcome(&nodes[0], 0).await;
    hold(&nodes[0], 0, page(&nodes[0], 2, vec![], true)).await.unwrap();
    let missing = resume(&site).await.unwrap_err();
    assert!(missing.message.contains("have not said what they hold: n2, n3, n4"), "{missing:?}");
    leave_out(&site, 0, "n2").await.unwrap();
    let file = operator(&site, "all");
    let said = csictl(&file, "server resume --without n3,n4 --without-command --confirm n3,n4").await;
    assert_eq!(said.code, Some(0), "{said:?}");
    assert_eq!(phase(&site).await, is(2, "normal", &[]));
}

#[tokio::test]
async fn recovering_cluster_changes_nothing_but_ends() {
    let site = Site::start(2).await;
    for volume in ["data", "more", "rest"] {
        site.register(volume, "single-node-writer").await;
    }
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (node, session) = user(&site, "n1", 0).await;
    let mut granted = Vec::new();
    for volume in ["data", "more"] {
        let claim = claiming(&node, 0, volume);
        controller.publish().await;
        granted.push(claim.await.unwrap().unwrap());
    }
    let waits = site.node("n2");
    let _second = user(&site, "n2", 1).await;
    drop(session);
    restored(&site, 0, 1).await.unwrap();
    assert_eq!(phase(&site).await, is(2, "recovering", &["c1", "n1", "n2"]));
    controller.join_again(0).await;
    let (_, mut session) = welcome(&node, 0).await;
    session.report_name("id of n1").await;
    let _waiting = welcome(&waits, 1).await;

    let before = site.raw().await.below("/csid/v1/vol/").await;
    // Calls of one volume share a transaction.
    let many = (0..20).map(|n| {
        let (mut client, ask) = (node.client(0), node.ask("rest", &format!("c{n}")));
        async move { Refusal::of(&client.claim(ask).await.unwrap_err()).kind }
    });
    assert!(join_all(many).await.iter().all(|kind| kind == "Unavailable"));
    for (asking, volume) in [(&node, "rest"), (&waits, "rest"), (&waits, "data")] {
        let refused = asking.client(0).claim(asking.ask(volume, "other")).await;
        let refused = refused.err().or(waits.client(1).claim(waits.ask("rest", "web")).await.err());
        assert_eq!(Refusal::of(&refused.expect("a claim was granted")).kind, "Unavailable");
    }
    let refused = site.operator(0, "all").change(register("new", "single-node-writer")).await.unwrap_err();
    assert_eq!(Refusal::of(&refused).kind, "Unavailable");
    let by_force = ReleaseAsk { force: true, ..release_ask("data", "n1") };
    let refused = site.operator(0, "all").release(by_force).await.unwrap_err();
    assert_eq!(Refusal::of(&refused).kind, "Unavailable");
    let created = create("copy");
    let spec = created.spec.clone().map(|spec| Spec { snapshot: "snap".into(), ..spec });
    let from = CreateAsk { spec, ..created };
    let from = ChangeAsk { what: Some(What::CreateFrom(from)) };
    let refused = Refusal::of(&site.operator(0, "all").change(from).await.unwrap_err());
    assert_eq!(refused.kind, "Unavailable", "{}", refused.message);
    assert_eq!(site.raw().await.below("/csid/v1/vol/").await, before, "a refused call has changed something");

    // The end of a claim is taken, and the volume stays attached.
    node.detached(0, "data", &granted[0].claim).await.unwrap();
    assert!(!controller.is_called(Duration::from_secs(3)).await, "a controller was called");
    assert!(!row(&site, "vol/default/data/at/n1").await.is_empty());
    // A fence is written, and ends nothing yet.
    let revision =
        site.admin(0, "all").node(NodeAsk { node: "n1".into() }).await.unwrap().into_inner().revision;
    let fence = Change::Fence(FenceAsk { reason: "off".into(), revision, by_hand: true });
    let ask = NodeChange { node: "n1".into(), change: Some(fence) };
    assert_eq!(site.admin(0, "all").set_node(ask).await.unwrap().into_inner().state, "fenced");
    assert_eq!(claims(&site, "more").await, ["n1/web"]);
    // What a node has is not known yet, so none is forgotten.
    let forget = NodeChange { node: "n1".into(), change: Some(Change::Forget(Default::default())) };
    assert_eq!(Refusal::of(&site.admin(0, "all").set_node(forget).await.unwrap_err()).kind, "Unavailable");

    for (of, server) in [(&controller.node, 0), (&waits, 1)] {
        hold(of, server, page(of, 2, vec![], true)).await.unwrap();
    }
    resumed(&site, 2).await;
    controller.join_again(0).await;
    for _ in ["data", "more"] {
        controller.unpublish().await;
    }
    for volume in ["data", "more"] {
        eventually("the claims of the fenced node end", async || claims(&site, volume).await.is_empty())
            .await;
    }
}

/// Each of the servers dies when a node has said a part, and when an operator has fenced a node.
#[tokio::test]
async fn recovery_goes_on_when_a_server_dies() {
    let mut site = Site::start(2).await;
    for volume in ["data", "more", "gone"] {
        site.register(volume, "single-node-writer").await;
    }
    let (n1, n2) = (site.node("n1"), site.node("n2"));
    let sessions = (n1.join(0).await, n2.join(0).await);
    n2.claim(0, "gone").await.unwrap();
    drop(sessions);
    restored(&site, 0, 1).await.unwrap();
    let session = n1.join(0).await;
    hold(&n1, 0, page(&n1, 2, vec![held(&n1, "data", "one")], false)).await.unwrap();
    site.servers[0].kill();
    drop(session);
    let mut session = n1.join(1).await;
    session.report(Attaches::No).await;
    for (volume, claim, last) in [("data", "one", false), ("more", "two", true)] {
        hold(&n1, 1, page(&n1, 2, vec![held(&n1, volume, claim)], last)).await.unwrap();
        assert_eq!(claims(&site, volume).await, ["n1/web"]);
    }
    site.servers[0] = site.start_server(0);
    assert_eq!(phase(&site).await, is(2, "recovering", &["n2"]));
    // A resume has fenced the node, and its server dies then.
    let revision =
        site.admin(0, "all").node(NodeAsk { node: "n2".into() }).await.unwrap().into_inner().revision;
    let fence = Change::Fence(FenceAsk { reason: "off".into(), revision, by_hand: true });
    site.admin(0, "all").set_node(NodeChange { node: "n2".into(), change: Some(fence) }).await.unwrap();
    site.servers[0].kill();
    assert_eq!(claims(&site, "gone").await, ["n2/web"]);
    for _ in 0..2 {
        let fence =
            ResumeAsk { node: "n2".into(), revision, by_hand: true, step: Step::Fence.into(), generation: 2 };
        site.admin(1, "all").resume(fence).await.unwrap();
        let end = ResumeAsk { generation: 2, step: Step::End.into(), ..ResumeAsk::default() };
        let rows = site.admin(1, "all").resume(end).await.unwrap().into_inner();
        assert_eq!((rows.generation, rows.mode.as_str()), (2, "normal"));
    }
    eventually("the claims of the fenced node end", async || claims(&site, "gone").await.is_empty()).await;
    for volume in ["data", "more"] {
        assert_eq!(claims(&site, volume).await, ["n1/web"]);
    }
}

#[tokio::test]
async fn resume_names_nodes_that_are_awaited() {
    let site = Site::start(1).await;
    let (n1, n2) = (site.node("n1"), site.node("n2"));
    drop((n1.join(0).await, n2.join(0).await));
    restored(&site, 0, 1).await.unwrap();
    let _session = n1.join(0).await;
    hold(&n1, 0, page(&n1, 2, vec![], true)).await.unwrap();
    for node in ["n1", "n7", "../n2"] {
        assert_eq!(leave_out(&site, 0, node).await.unwrap_err().kind, "NotFound", "{node}");
        assert_eq!(phase(&site).await, is(2, "recovering", &["n2"]));
    }
    for (generation, revision) in [(1, 1), (3, 1), (2, 1), (2, 0)] {
        let step = Step::Fence.into();
        let ask = ResumeAsk { generation, node: "n2".into(), revision, by_hand: true, step };
        let refused = Refusal::of(&site.admin(0, "all").resume(ask).await.unwrap_err());
        let due = if revision == 0 { "InvalidArgument" } else { "Busy" };
        assert_eq!(refused.kind, due, "{}", refused.message);
    }
    let file = operator(&site, "all");
    let said = csictl(&file, "server resume --without n7 --confirm n7").await;
    assert_eq!(said.code, Some(1), "{said:?}");
    let unknown = step(&site, 0, ResumeAsk { step: 9, ..ResumeAsk::default() }).await.unwrap_err();
    assert_eq!(unknown.kind, "InvalidArgument");
    let missing = resume(&site).await.unwrap_err();
    assert_eq!(missing.kind, "Busy");
    assert!(missing.message.contains("have not said what they hold: n2"), "{missing:?}");
    let said = csictl(&file, "server resume").await;
    assert!(said.code == Some(1) && said.err.contains("waits for n2: nothing was done"), "{said:?}");
    // Its machine is not off.
    let session = n2.join(0).await;
    let said = csictl(&file, "server resume --without n2 --without-command --confirm n2").await;
    assert!(said.code == Some(1) && said.err.contains("has a session"), "{said:?}");
    drop(session);
    eventually("the session has ended", async || {
        csictl(&file, "node show n2 --json").await.json()["sessions"] == json!([])
    })
    .await;
    let said = csictl(&file, "server resume --without n2").await;
    assert_eq!((said.code, phase(&site).await), (Some(1), is(2, "recovering", &["n2"])), "{said:?}");
    let said = csictl(&file, "server restored --confirm another").await;
    assert_eq!(said.code, Some(0), "it recovers already: {said:?}");
    assert!(said.err.contains("Nodes that have not said yet what they hold: n2."), "{said:?}");
    let said = csictl(&file, "server resume --without n2 --without-command --confirm n2 --json").await.json();
    assert_eq!((&said["mode"], &said["awaited"]), (&json!("normal"), &json!([])));
    assert_eq!(csictl(&file, "node show n2 --json").await.json()["state"], "fenced");
    // An operator who got no answer repeats it.
    let said = csictl(&file, "server resume --without n2 --without-command --confirm n2").await;
    assert_eq!(said.code, Some(0), "{said:?}");
}

#[tokio::test]
async fn late_word_of_another_generation_or_boot_is_refused() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let node = site.node("n1");
    let session = node.join(0).await;
    let one = || vec![held(&node, "data", "one")];
    assert_eq!(hold(&node, 0, page(&node, 1, one(), true)).await.unwrap_err().kind, "Busy", "it is normal");
    drop(session);
    restored(&site, 0, 1).await.unwrap();
    let _session = node.join(0).await;
    for generation in [0, 1, 3] {
        assert_eq!(hold(&node, 0, page(&node, generation, one(), true)).await.unwrap_err().kind, "Busy");
    }
    let other_boot = HeldClaims { boot: "boot 2 of n1".into(), ..page(&node, 2, one(), true) };
    assert_eq!(hold(&node, 0, other_boot).await.unwrap_err().kind, "Busy");
    assert_eq!(phase(&site).await, is(2, "recovering", &["n1"]));
    assert!(claims(&site, "data").await.is_empty());
    // The end of a claim that etcd lacks has ended.
    node.detached(0, "data", "one").await.unwrap();
    hold(&node, 0, page(&node, 2, one(), true)).await.unwrap();
    resumed(&site, 2).await;
    hold(&node, 0, page(&node, 2, vec![], true)).await.expect("the same word again");
    let more = page(&node, 2, vec![held(&node, "data", "two")], true);
    assert_eq!(hold(&node, 0, more).await.unwrap_err().kind, "Busy", "the recovery is over");
    assert!(row(&site, "vol/default/data/claim/n1/web").await.contains("\"one\""));
}

/// etcd does not know it: it has joined after the backup.
#[tokio::test]
async fn node_that_joins_meanwhile_is_awaited() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let n1 = site.node("n1");
    drop(n1.join(0).await);
    restored(&site, 0, 1).await.unwrap();
    let _session = n1.join(0).await;
    hold(&n1, 0, page(&n1, 2, vec![], true)).await.unwrap();
    let file = operator(&site, "all");
    let found: Value = serde_json::from_str(&csictl(&file, "server audit --json").await.out).unwrap();
    assert_eq!(found[0]["kind"], "recovery-awaits-operator", "{found}");
    let said = csictl(&file, "server list").await;
    assert!(said.err.contains("If no machine is missing: csictl server resume"), "{said:?}");
    let late = site.node("n4");
    let _late = late.join(0).await;
    assert_eq!(phase(&site).await, is(2, "recovering", &["n4"]));
    let found: Value = serde_json::from_str(&csictl(&file, "server audit --json").await.out).unwrap();
    assert_eq!(found[0]["text"], "the recovery of the cluster waits for node n4 to say what it holds");
    assert_eq!(resume(&site).await.unwrap_err().kind, "Busy");
    hold(&late, 0, page(&late, 2, vec![held(&late, "data", "young")], true)).await.unwrap();
    resumed(&site, 2).await;
    assert_eq!(claims(&site, "data").await, ["n4/web"]);
    assert!(site.raw().await.below("/csid/v1/heard/").await.is_empty());
}

/// A fenced node has rebooted. It is there again, and has claims perhaps.
#[tokio::test]
async fn fenced_node_that_is_back_is_awaited_again() {
    let site = Site::start(1).await;
    let mut node = site.node("n1");
    drop(node.join(0).await);
    restored(&site, 0, 1).await.unwrap();
    leave_out(&site, 0, "n1").await.unwrap();
    assert_eq!(phase(&site).await, is(2, "recovering", &[]));
    node.hello.boot = "boot 2 of n1".into();
    let _session = node.join(0).await;
    assert_eq!(phase(&site).await, is(2, "recovering", &["n1"]));
    assert_eq!(resume(&site).await.unwrap_err().kind, "Busy");
    hold(&node, 0, page(&node, 2, vec![], true)).await.unwrap();
    resumed(&site, 2).await;
}

/// With the token of before etcd says nothing of the restore, but its revision has gone back.
#[tokio::test]
async fn node_shows_a_restore_with_the_old_token() {
    let mut site = Site::start(2).await;
    for volume in ["data", "more"] {
        site.register(volume, "single-node-writer").await;
    }
    let mut node = site.node("n1");
    let session = node.join(1).await;
    let backup = site.path("backup");
    site.etcd.save(&backup);
    // Servers' beats raise the revision of the restored etcd, too.
    for _ in 0..100 {
        site.raw().await.put("/other", "1").await;
    }
    let claim = node.claim(1, "data").await.unwrap();
    let revision = site.raw().await.below("/other").await[0].mod_revision;
    node.hello = Hello { generation: 1, seen_revision: revision.unsigned_abs(), ..node.hello };
    drop(session);
    site.servers[0].kill();
    site.etcd.restore(&backup, None).await;
    // What this server remembers is of another history.
    assert!(!site.servers[1].ended().await);
    assert!(site.servers[1].text().contains("it had the revision"), "{}", site.servers[1].text());
    for n in [0, 1] {
        site.servers[n] = site.start_server(n);
    }
    assert_eq!(phase(&site).await, is(1, "normal", &[]));
    assert_eq!(refused(&node, 1).await, "ahead-of-etcd");
    assert_eq!(phase(&site).await, is(1, "normal", &[]));
    restored(&site, 0, 1).await.unwrap();
    let _session = node.join(1).await;
    assert_eq!(phase(&site).await, is(2, "recovering", &["n1"]));
    assert!(claims(&site, "data").await.is_empty());
    hold(&node, 1, page(&node, 2, vec![held(&node, "data", &claim)], true)).await.unwrap();
    resumed(&site, 2).await;
    assert_eq!(claims(&site, "data").await, ["n1/web"]);
}

#[tokio::test]
async fn server_on_another_etcd_waits_for_an_operator() {
    let mut site = Site::start(2).await;
    let (node, thief) = (site.node("n1"), site.node("n2"));
    drop((node.join(0).await, thief.join(0).await));
    let backup = site.path("backup");
    site.etcd.save(&backup);
    site.servers[0].kill();
    site.etcd.restore(&backup, Some("new")).await;
    assert!(!site.servers[1].ended().await);
    assert!(site.servers[1].text().contains("its cluster had the ID"), "{}", site.servers[1].text());
    for n in [0, 1] {
        site.servers[n] = site.start_server(n);
    }
    // No server begins a recovery. Nothing is granted until an operator has said that etcd was restored, and no node joins.
    assert_eq!(phase(&site).await, is(1, "restored", &[]));
    let before = stored(&site).await;
    assert_eq!(refused(&node, 0).await, "etcd-restored");
    let change = site.operator(0, "all").change(register("new", "single-node-writer")).await;
    let change = Refusal::of(&change.unwrap_err());
    assert_eq!(change.kind, "Unavailable", "{}", change.message);
    assert!(change.message.contains("etcd was restored from a backup"), "{}", change.message);
    let said = [
        hold(&node, 0, page(&node, 1, vec![], true)).await,
        leave_out(&site, 0, "n1").await.map(drop),
        resume(&site).await.map(drop),
    ];
    for said in said {
        assert_eq!(said.unwrap_err().kind, "Busy");
    }
    assert_eq!(stored(&site).await, before, "a refused call has changed something");
    let said = csictl(&operator(&site, "all"), "server list").await;
    assert!(said.err.contains("Next: csictl server restored"), "{said:?}");
    let said = csictl(&operator(&site, "all"), "--operator cluster status").await;
    assert!(said.out.contains("cluster: prod, restored"), "{said:?}");
    assert!(said.out.contains("`csictl server restored`"), "{said:?}");
    // A block that is younger than the backup is not in it. The node does not join meanwhile.
    let block = Change::Block(BlockAsk { reason: "stolen".into() });
    site.admin(0, "all").set_node(NodeChange { node: "n2".into(), change: Some(block) }).await.unwrap();
    assert_eq!(restored(&site, 1, 1).await.unwrap().by, "operator/all");
    assert_eq!(refused(&thief, 1).await, "blocked");
    // Another start in the same etcd changes nothing.
    site.servers[0].kill();
    site.servers[0] = site.start_server(0);
    assert_eq!(phase(&site).await, is(2, "recovering", &["n1", "n2"]));
    let said = csictl(&operator(&site, "all"), "--operator cluster status").await;
    assert!(said.out.contains("waits for 2 nodes") && said.out.contains("csictl server resume"), "{said:?}");
    let drain = NodeChange { node: "n1".into(), change: Some(Change::Drain(DrainAsk {})) };
    site.admin(0, "all").set_node(drain).await.unwrap();
    let _session = node.join(0).await;
    hold(&node, 0, page(&node, 2, vec![], true)).await.unwrap();
    leave_out(&site, 0, "n2").await.unwrap();
    resumed(&site, 2).await;
}

/// The node says all once more in this one.
#[tokio::test]
async fn refused_claims_of_an_earlier_recovery_are_over() {
    let site = Site::start(1).await;
    let node = site.node("n1");
    drop(node.join(0).await);
    let claim = json!({"claim": "a", "namespace": "default", "volume": "v", "consumer": "web", "why": "x"});
    let heard = json!({"generation": 1, "complete": true, "claims": [claim]}).to_string();
    site.raw().await.put("/csid/v1/heard/n1", &heard).await;
    restored(&site, 0, 1).await.unwrap();
    assert_eq!(phase(&site).await, is(2, "recovering", &["n1"]));
    assert!(servers(&site, 0).await.refused.is_empty());
    let _session = node.join(0).await;
    hold(&node, 0, page(&node, 2, vec![], true)).await.unwrap();
    resumed(&site, 2).await;
}
