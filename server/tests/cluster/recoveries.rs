//! A cluster that recovers from a backup of etcd: how that begins, what it refuses meanwhile, and how it ends.

use std::time::{Duration, Instant};

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::resume_ask::Step;
use csi_proto::cluster::v1::{
    Answer, Attaches, AuditAsk, BlockAsk, CallClass, ChangeAsk, ClaimAsk, CreateAsk, DetachAsk, DrainAsk,
    FenceAsk, Granted, HeldClaim, HeldClaims, Hello, NodeAsk, NodeChange, PluginReport, RefusedClaim,
    ReleaseAsk, RestoredAsk, ResumeAsk, ServerRows, ServersAsk, Spec, UndrainAsk, Use, VolumeAsk, Welcome,
    change_ask::What, node_change::Change,
};
use futures_util::FutureExt;
use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::attach::{Controller, attached, claiming, failed, head, is_publish, row, user, user_named};
use crate::by_call::{ask, at, attach_ask, attach_begins, attaching, detach_ask, detaching, once};
use crate::creations::{create, created, creating, deleting, is_delete, registration};
use crate::fence::set;
use crate::operators::{csictl, operator};
use crate::site::{First, Node, Refusal, Session, Site, eventually, register, release_ask};
use crate::together::transactions;

async fn servers(site: &Site, server: usize) -> ServerRows {
    site.admin(server, "all").servers(ServersAsk {}).await.unwrap().into_inner()
}

async fn phase(site: &Site) -> (u64, String, Vec<String>) {
    let rows = servers(site, 0).await;
    (rows.generation, rows.mode, rows.awaited)
}

fn is(generation: u64, mode: &str, awaited: &[&str]) -> (u64, String, Vec<String>) {
    (generation, mode.into(), awaited.iter().map(|&node| node.into()).collect())
}

async fn restored(site: &Site, server: usize, generation: u64) -> Result<ServerRows, Refusal> {
    let ask = RestoredAsk { generation, past: 0 };
    let done = site.admin(server, "all").restored(ask).await;
    done.map(tonic::Response::into_inner).map_err(|status| Refusal::of(&status))
}

async fn step(site: &Site, server: usize, ask: ResumeAsk) -> Result<ServerRows, Refusal> {
    let generation = servers(site, 0).await.generation;
    let done = site.admin(server, "all").resume(ResumeAsk { generation, ..ask }).await;
    done.map(tonic::Response::into_inner).map_err(|status| Refusal::of(&status))
}

/// Ends a recovery.
async fn resume(site: &Site) -> Result<ServerRows, Refusal> {
    step(site, 0, ResumeAsk { step: Step::End.into(), ..ResumeAsk::default() }).await
}

/// Fences a node that is awaited.
async fn leave_out(site: &Site, server: usize, node: &str) -> Result<ServerRows, Refusal> {
    let revision = match site.admin(0, "all").node(NodeAsk { node: node.into() }).await {
        Ok(row) => row.into_inner().revision,
        Err(_) => 1,
    };
    let node = node.to_owned();
    step(site, server, ResumeAsk { node, revision, by_hand: true, step: Step::Fence.into(), generation: 0 })
        .await
}

/// Says as an operator that the refused claims of a node were looked at.
async fn forget(site: &Site, node: &str) {
    let rows = servers(site, 0).await;
    let revision = rows.refused.iter().find(|of| of.node == node).expect("nothing was refused").revision;
    let (node, step_of) = (node.to_owned(), Step::Forget.into());
    step(site, 0, ResumeAsk { node, revision, step: step_of, ..ResumeAsk::default() }).await.unwrap();
}

/// Ends a recovery for which nothing is missing.
async fn resumed(site: &Site, generation: u64) {
    assert_eq!(phase(site).await, is(generation, "recovering", &[]), "a recovery ended by itself");
    let rows = resume(site).await.unwrap();
    assert_eq!((rows.generation, rows.mode.as_str()), (generation, "normal"));
}

/// Joins, and returns the Welcome.
async fn welcome(node: &Node, server: usize) -> (Welcome, Session) {
    match node.say_hello(server).await.unwrap() {
        (First::Welcome(welcome), session) => (welcome, session),
        (refused, _) => panic!("{refused:?}"),
    }
}

fn writing(access_mode: &str) -> Use {
    let (mode, attachment_mode) = ("write".into(), "file-system".into());
    Use { mode, access_mode: access_mode.into(), attachment_mode }
}

/// Returns what a node that has claimed a volume for `web` says to hold.
fn held(node: &Node, volume: &str, claim: &str) -> HeldClaim {
    HeldClaim {
        claim: claim.into(),
        call: "call 1".into(),
        volume: volume.into(),
        consumer: "web".into(),
        uid: 1000,
        usage: Some(writing("single-node-writer")),
        plugin: "p".into(),
        external_id: format!("ext-{volume}"),
        granted_boot: node.hello.boot.clone(),
        ..HeldClaim::default()
    }
}

/// Makes the same of a claim that a server has granted with an attachment.
fn held_attached(node: &Node, volume: &str, granted: &Granted) -> HeldClaim {
    HeldClaim {
        external_node_id: granted.external_node_id.clone(),
        publish_context: granted.publish_context.clone(),
        ..held(node, volume, &granted.claim)
    }
}

fn page(node: &Node, generation: u64, claims: Vec<HeldClaim>, last: bool) -> HeldClaims {
    HeldClaims { boot: node.hello.boot.clone(), generation, claims, last }
}

/// Says a page of what a node holds, of which nothing is refused.
async fn hold(node: &Node, server: usize, page: HeldClaims) -> Result<(), Refusal> {
    let refused = try_hold(node, server, page).await?;
    assert!(refused.is_empty(), "{refused:?}");
    Ok(())
}

/// Says a page of what a node holds. Returns what was refused of it.
async fn try_hold(node: &Node, server: usize, page: HeldClaims) -> Result<Vec<RefusedClaim>, Refusal> {
    // The row changes with the report of the session, and the node says it once more then, as csid does.
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        match node.client(server).hold(page.clone()).await.map_err(|status| Refusal::of(&status)) {
            Err(refusal) if refusal.kind == "Unavailable" && Instant::now() < end => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            held => return held.map(|held| held.into_inner().refused),
        }
    }
}

/// Returns the claims of a volume in etcd, by NODE/CONSUMER.
async fn claims(site: &Site, volume: &str) -> Vec<String> {
    let prefix = format!("/csid/v1/vol/default/{volume}/claim/");
    let found = site.raw().await.below(&prefix).await;
    found.into_iter().map(|kv| String::from_utf8(kv.key).unwrap()[prefix.len()..].to_owned()).collect()
}

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

/// A stolen node says that it holds another one's volume, and claims that then as the same consumer.
#[tokio::test]
async fn excluded_claim_gets_no_attachment() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (owner, first) = user(&site, "n1", 0).await;
    let (thief, second) = user(&site, "n2", 0).await;
    let claim = claiming(&owner, 0, "data");
    controller.publish().await;
    let granted = claim.await.unwrap().unwrap();
    drop((first, second));
    restored(&site, 0, 1).await.unwrap();
    controller.join_again(0).await;
    let sessions = (welcome(&owner, 0).await, welcome(&thief, 0).await);
    hold(&thief, 0, page(&thief, 2, vec![held(&thief, "data", "lie")], true)).await.unwrap();
    let of_owner = held_attached(&owner, "data", &granted);
    hold(&owner, 0, page(&owner, 2, vec![of_owner], true)).await.unwrap();
    hold(&controller.node, 0, page(&controller.node, 2, vec![], true)).await.unwrap();
    resumed(&site, 2).await;
    drop(sessions);
    controller.join_again(0).await;
    let _sessions = (welcome(&owner, 0).await, welcome(&thief, 0).await);
    for (node, holder) in [(&thief, "n1/web"), (&owner, "n2/web")] {
        let refused = tokio::time::timeout(Duration::from_secs(20), claiming(node, 0, "data")).await;
        let refused = refused.expect("the claim waits for a controller").unwrap().unwrap_err();
        assert_eq!((refused.kind.as_str(), refused.holders), ("ClaimConflict", vec![holder.to_owned()]));
    }
    assert!(!controller.is_called(Duration::from_secs(3)).await, "a controller was called");
    assert!(row(&site, "vol/default/data/at/n2").await.is_empty());
    thief.detached(0, "data", "lie").await.unwrap();
    eventually("the lie has ended", async || claims(&site, "data").await == ["n1/web"]).await;
    assert_eq!(claiming(&owner, 0, "data").await.unwrap().unwrap().claim, granted.claim);
}

/// The context says which storage gets the secrets.
#[tokio::test]
async fn excluded_claim_shows_no_context() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let (owner, thief) = (site.node("n1"), site.node("n2"));
    let sessions = (owner.join(0).await, thief.join(0).await);
    owner.claim(0, "data").await.unwrap();
    drop(sessions);
    restored(&site, 0, 1).await.unwrap();
    let _sessions = (owner.join(0).await, thief.join(0).await);
    hold(&thief, 0, page(&thief, 2, vec![held(&thief, "data", "lie")], false)).await.unwrap();
    let shown = async |node: &Node| {
        let ask = VolumeAsk { namespace: "default".into(), volume: "data".into(), ..VolumeAsk::default() };
        node.client(0).volume(ask).await.unwrap().into_inner().spec.unwrap().volume_context
    };
    assert_eq!(shown(&owner).await["share"], "hunter2");
    assert!(shown(&thief).await.is_empty(), "a lie got a context");
}

/// Without an attachment the grant alone lets a node write.
#[tokio::test]
async fn excluded_claim_is_not_granted_again() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let (owner, thief) = (site.node("n1"), site.node("n2"));
    let sessions = (owner.join(0).await, thief.join(0).await);
    let claim = owner.claim(0, "data").await.unwrap();
    drop(sessions);
    restored(&site, 0, 1).await.unwrap();
    let sessions = (owner.join(0).await, thief.join(0).await);
    hold(&thief, 0, page(&thief, 2, vec![held(&thief, "data", "lie")], true)).await.unwrap();
    hold(&owner, 0, page(&owner, 2, vec![held(&owner, "data", &claim)], true)).await.unwrap();
    resumed(&site, 2).await;
    drop(sessions);
    let _sessions = (owner.join(0).await, thief.join(0).await);
    assert_eq!(thief.claim(0, "data").await.unwrap_err().kind, "ClaimConflict");
    thief.detached(0, "data", "lie").await.unwrap();
    assert_eq!(owner.claim(0, "data").await.unwrap(), claim);
}

/// Claims that are granted, refused and ended share transactions. A reader excludes nobody.
#[tokio::test]
async fn excluded_claims_are_refused_among_others() {
    const READERS: usize = 30;
    const MODE: &str = "multi-node-single-writer";
    let site = Site::start(1).await;
    site.register("data", MODE).await;
    site.register("warm", "single-node-writer").await;
    let nodes = ["n1", "n2", "n3", "n4"].map(|name| site.node(name));
    for node in &nodes {
        let _session = node.join(0).await;
        // The servers know its plugin then.
        let claim = node.claim(0, "warm").await.unwrap();
        node.detached(0, "warm", &claim).await.unwrap();
    }
    restored(&site, 0, 1).await.unwrap();
    let of_mode = |mode: &str| Use {
        mode: mode.into(),
        access_mode: MODE.into(),
        attachment_mode: "file-system".into(),
    };
    let [n1, n2, n3, reader] = &nodes;
    for (node, claim) in [(n1, Some("one")), (n2, Some("two")), (n3, Some("three")), (reader, None)] {
        let _session = node.join(0).await;
        let of = |claim| HeldClaim { usage: Some(of_mode("write")), ..held(node, "data", claim) };
        hold(node, 0, page(node, 2, claim.map(of).into_iter().collect(), true)).await.unwrap();
    }
    resumed(&site, 2).await;
    let mut sessions = Vec::new();
    for node in &nodes {
        sessions.push(node.join(0).await);
    }
    let writer_rows = async || {
        let key = |node: &str| format!("vol/default/data/claim/{node}/web");
        (row(&site, &key("n1")).await, row(&site, &key("n2")).await)
    };
    let rows_before = writer_rows().await;

    let asked = |node: &Node, consumer: &str, call: usize, mode: &str| {
        let call = format!("call {consumer} {call}");
        let ask = ClaimAsk { call, r#use: Some(of_mode(mode)), ..node.ask("data", consumer) };
        let mut client = node.client(0);
        async move { client.claim(ask).await.map(drop).map_err(|status| Refusal::of(&status)) }.boxed()
    };
    let mut calls = Vec::new();
    for n in 0..READERS {
        calls.push(asked(reader, &format!("reader{n}"), n, "read"));
        if n % 10 == 5 {
            calls.extend([asked(n1, "web", n, "write"), asked(n2, "web", n, "write")]);
        }
    }
    let end = async { n3.detached(0, "data", "three").await.unwrap() };
    let before = transactions(&site).await;
    let (answers, ()) = tokio::join!(join_all(calls), end);
    let count = transactions(&site).await - before;
    println!("{READERS} readers, 6 writers and an end in {count} transactions");
    assert!(count <= READERS as u64 / 2, "{count} transactions");
    let (granted, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(Result::is_ok);
    assert_eq!((granted.len(), refused.len()), (READERS, 6));
    for refusal in refused.into_iter().map(Result::unwrap_err) {
        assert_eq!(refusal.kind, "ClaimConflict", "{refusal:?}");
        assert!(refusal.holders.iter().any(|of| ["n1/web", "n2/web"].contains(&of.as_str())), "{refusal:?}");
    }
    let left = claims(&site, "data").await;
    assert_eq!(left.len(), READERS + 2, "{left:?}");
    assert!(!left.contains(&"n3/web".to_owned()), "{left:?}");
    assert_eq!(writer_rows().await, rows_before, "a call took an excluded claim over");
    n2.detached(0, "data", "two").await.unwrap();
    asked(n1, "web", READERS, "write").await.unwrap();
}

/// The backup has a call that waits, and the node holds the volume by an earlier one. A later call takes the claim of its consumer over.
#[tokio::test]
async fn waiting_call_takes_no_excluded_claim_over() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let (n1, n2) = (site.node("n1"), site.node("n2"));
    let sessions = (n1.join(0).await, n2.join(0).await);
    let claim = n2.claim(0, "data").await.unwrap();
    let waits = ClaimAsk {
        call: "calls.0000000000000002.a".into(),
        queue_ms: 600_000,
        answer_ms: 1,
        ..n1.ask("data", "web")
    };
    n1.client(0).claim(waits).await.unwrap_err();
    drop(sessions);
    restored(&site, 0, 1).await.unwrap();
    let sessions = (n1.join(0).await, n2.join(0).await);
    let of_n1 = HeldClaim { call: "calls.0000000000000001.a".into(), ..held(&n1, "data", "one") };
    hold(&n1, 0, page(&n1, 2, vec![of_n1], true)).await.unwrap();
    hold(&n2, 0, page(&n2, 2, vec![held(&n2, "data", &claim)], true)).await.unwrap();
    resumed(&site, 2).await;
    drop(sessions);
    let _sessions = (n1.join(0).await, n2.join(0).await);
    let key = "vol/default/data/claim/n1/web";
    let before = row(&site, key).await;
    assert!(before.contains("node/n1/calls.0000000000000001.a"), "{before}");
    let explained = csictl(&operator(&site, "all"), "--operator explain default data --json").await.json();
    for (n, holder) in ["n2/web", "n1/web"].into_iter().enumerate() {
        let wait = &explained["claims"][n]["waits-for"];
        assert_eq!((&wait["kind"], &wait["holders"]), (&json!("claims"), &json!([holder])), "{explained}");
    }
    // A server looks at the queue meanwhile.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(row(&site, key).await, before, "a call that waits took the claim over");
    assert_eq!(site.raw().await.below("/csid/v1/vol/default/data/queue/").await.len(), 1);
    n2.detached(0, "data", &claim).await.unwrap();
    eventually("the call that waits has the claim", async || {
        row(&site, key).await.contains("node/n1/calls.0000000000000002.a")
    })
    .await;
}

/// A node's word is refused claim by claim.
#[tokio::test]
async fn refused_claim_keeps_no_other_claim_out() {
    let site = Site::start(1).await;
    for volume in ["data", "more"] {
        site.register(volume, "single-node-writer").await;
    }
    let (node, session) = user(&site, "n1", 0).await;
    drop(session);
    restored(&site, 0, 1).await.unwrap();
    let (_, _session) = welcome(&node, 0).await;
    let bad = HeldClaim { external_id: "ext-more".into(), ..held(&node, "data", "bad") };
    let all = vec![bad.clone(), held(&node, "more", "good"), held(&node, "unknown", "third")];
    let refused = try_hold(&node, 0, page(&node, 2, all, true)).await.unwrap();
    assert_eq!(refused.iter().map(|of| of.claim.as_str()).collect::<Vec<_>>(), ["bad"]);
    assert!(refused[0].why.contains("another volume of a plugin"), "{refused:?}");
    let missing = resume(&site).await.unwrap_err();
    assert_eq!(missing.kind, "Busy");
    assert!(missing.message.contains("claims were not all brought back: n1"), "{missing:?}");
    assert_eq!(phase(&site).await, is(2, "recovering", &[]));
    for (volume, due) in [("data", &[][..]), ("more", &["n1/web"]), ("unknown", &["n1/web"])] {
        assert_eq!(claims(&site, volume).await, due, "{volume}");
    }
    let file = operator(&site, "all");
    let said = csictl(&file, "server audit --json").await;
    let found: Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!((said.code, found.as_array().unwrap().len()), (Some(1), 1), "{said:?}");
    assert_eq!(found[0]["kind"], "held-claim-refused");
    let text = found[0]["text"].as_str().unwrap();
    assert!(
        text.starts_with("the claim of web on node n1 was not brought back for default/data: "),
        "{text}"
    );

    let revision =
        site.admin(0, "all").node(NodeAsk { node: "n1".into() }).await.unwrap().into_inner().revision;
    let fence = Change::Fence(FenceAsk { reason: "it lies".into(), revision, by_hand: true });
    site.admin(0, "all").set_node(NodeChange { node: "n1".into(), change: Some(fence) }).await.unwrap();
    resumed(&site, 2).await;
    for volume in ["data", "more", "unknown"] {
        eventually("its claims end", async || claims(&site, volume).await.is_empty()).await;
    }
    eventually("nothing is left", async || row(&site, "vol/default/unknown/head").await.is_empty()).await;
    let said = csictl(&file, "server audit").await;
    assert_eq!(said.code, Some(0), "{said:?}");
}

#[tokio::test]
async fn name_in_another_namespace_is_hidden_from_a_node() {
    let site = Site::start(1).await;
    let mut ask = register("hidden", "single-node-writer");
    if let Some(What::Register(register)) = &mut ask.what {
        register.namespace = "secret".into();
    }
    site.operator(0, "all").change(ask).await.unwrap();
    let node = site.node("n1");
    drop(welcome(&node, 0).await);
    restored(&site, 0, 1).await.unwrap();
    let _session = welcome(&node, 0).await;
    let lie = HeldClaim { external_id: "ext-hidden".into(), ..held(&node, "data", "lie") };
    let refused = try_hold(&node, 0, page(&node, 2, vec![lie], true)).await.unwrap();
    assert_eq!(refused.len(), 1);
    assert!(!format!("{refused:?}").contains("secret"), "{refused:?}");
    assert!(refused[0].why.contains("known under another name"), "{refused:?}");
}

/// The controller of the backup may still attach the volume for another node.
#[tokio::test]
async fn call_for_another_node_is_not_dropped() {
    let site = Site::start(1).await;
    site.register("data", "multi-node-multi-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, first) = user(&site, "n1", 0).await;
    let (n2, _second) = user(&site, "n2", 0).await;
    let many = writing("multi-node-multi-writer");
    let mut client = n2.client(0);
    let ask = ClaimAsk { r#use: Some(many.clone()), ..n2.ask("data", "web") };
    let claim = tokio::spawn(async move { client.claim(ask).await });
    let call = controller.called().await;
    drop(first);
    restored(&site, 0, 1).await.unwrap();
    let (_, _session) = welcome(&n1, 0).await;
    let of_n1 =
        HeldClaim { usage: Some(many), external_node_id: "id of n1".into(), ..held(&n1, "data", "one") };
    hold(&n1, 0, page(&n1, 2, vec![of_n1], true)).await.unwrap();
    assert!(row(&site, "vol/default/data/at/n1").await.contains("\"present\""));
    let head = head(&site, "data").await;
    assert!(head.contains(&call.call), "a call that may run was dropped: {head}");
    claim.abort();
}

#[tokio::test]
async fn claims_that_exclude_each_other_are_shown() {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let (n1, n2) = (site.node("n1"), site.node("n2"));
    drop((n1.join(0).await, n2.join(1).await));
    restored(&site, 0, 1).await.unwrap();
    let _sessions = (n1.join(0).await, n2.join(1).await);
    hold(&n1, 0, page(&n1, 2, vec![held(&n1, "data", "one")], true)).await.unwrap();
    assert_eq!(phase(&site).await, is(2, "recovering", &["n2"]));
    hold(&n2, 1, page(&n2, 2, vec![held(&n2, "data", "two")], true)).await.unwrap();
    resumed(&site, 2).await;
    assert_eq!(claims(&site, "data").await, ["n1/web", "n2/web"]);
    let file = operator(&site, "reads");
    let said = csictl(&file, "server audit --json").await;
    let found: Value = serde_json::from_str(&said.out).unwrap();
    let due = json!([{
        "kind": "claims-exclude-each-other",
        "key": "/csid/v1/vol/default/data/claim/n2/web",
        "text": "the claim of web on node n2 and the one of web on node n1 exclude each other",
    }]);
    assert_eq!((said.code, found), (Some(1), due));
    let n3 = site.node("n3");
    let _third = n3.join(0).await;
    assert_eq!(n3.claim(0, "data").await.unwrap_err().holders, ["n1/web", "n2/web"]);
    n1.detached(0, "data", "one").await.unwrap();
    assert_eq!(csictl(&file, "server audit").await.code, Some(0));
    n2.detached(0, "data", "two").await.unwrap();
    eventually("both have ended", async || claims(&site, "data").await.is_empty()).await;
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

#[tokio::test]
async fn lie_about_what_a_node_holds_is_refused() {
    let site = Site::start(1).await;
    for volume in ["data", "more"] {
        site.register(volume, "single-node-writer").await;
    }
    let node = site.node("n1");
    drop(node.join(0).await);
    restored(&site, 0, 1).await.unwrap();
    let mut session = node.join(0).await;
    session.report_name("id of n1").await;
    eventually("the servers know its name", async || row(&site, "node/n1").await.contains("id of n1")).await;
    let before = site.raw().await.below("/csid/v1/vol/").await;
    let one = held(&node, "data", "one");
    let context: std::collections::BTreeMap<_, _> = [("device".to_owned(), "x".to_owned())].into();
    let usage = |mode: &str, access_mode: &str| {
        let (mode, access_mode) = (mode.into(), access_mode.into());
        Some(Use { mode, access_mode, attachment_mode: "file-system".into() })
    };
    let lies = [
        ("no grant for mount", HeldClaim { namespace: "other".into(), ..one.clone() }),
        ("claim", HeldClaim { claim: String::new(), ..one.clone() }),
        ("call", HeldClaim { call: "x".repeat(129), ..one.clone() }),
        ("consumer", HeldClaim { consumer: "a\nb".into(), ..one.clone() }),
        ("plugin", HeldClaim { plugin: String::new(), ..one.clone() }),
        ("", HeldClaim { external_id: String::new(), ..one.clone() }),
        ("usage", HeldClaim { usage: None, ..one.clone() }),
        ("credential", HeldClaim { credential: "csid.other.key".into(), ..one.clone() }),
        ("publish context", HeldClaim { publish_context: context.clone(), ..one.clone() }),
        // The plugin's volume of another name.
        ("default/more", HeldClaim { volume: "new".into(), external_id: "ext-more".into(), ..one.clone() }),
        ("another volume", HeldClaim { external_id: "ext-more".into(), ..one.clone() }),
        // Under the name of another node it would be detached from there.
        ("another name by plugin", HeldClaim { external_node_id: "id of n2".into(), ..one.clone() }),
        // The volume was not registered for that.
        ("", HeldClaim { usage: usage("read", "multi-node-multi-writer"), ..one.clone() }),
        ("", HeldClaim { usage: usage("write", "single-node-reader-only"), ..one.clone() }),
        // No grant names the plugin's controller, which would have to detach it.
        (
            "no grant names its controller",
            HeldClaim {
                plugin: "ghost".into(),
                volume: "new".into(),
                external_node_id: "i-1".into(),
                ..one.clone()
            },
        ),
    ];
    let count = lies.len();
    for (why, lie) in lies {
        let refused = try_hold(&node, 0, page(&node, 2, vec![lie.clone()], false)).await.unwrap();
        assert_eq!(refused.len(), 1, "{lie:?}");
        assert!(!refused[0].why.is_empty() && refused[0].why.contains(why), "{lie:?}: {refused:?}");
        assert_eq!(phase(&site).await, is(2, "recovering", &["n1"]));
    }
    let many = page(&node, 2, vec![one.clone(); 65], true);
    assert_eq!(hold(&node, 0, many).await.unwrap_err().kind, "InvalidArgument");
    let file = operator(&site, "all");
    assert_eq!(csictl(&file, "server audit").await.code, Some(1));
    // A later word about the same claim replaces the earlier one.
    let kept: Value = serde_json::from_str(&row(&site, "heard/n1").await).unwrap();
    assert_eq!(
        (kept["claims"].as_array().unwrap().len(), &kept["more"]),
        (2, &json!(false)),
        "of {count} lies"
    );
    assert_eq!(site.raw().await.below("/csid/v1/vol/").await, before, "a lie was written");
    // An operator does not hold volumes.
    let refused = site.operator(0, "all").hold(page(&node, 2, vec![one.clone()], true)).await.unwrap_err();
    assert_eq!(Refusal::of(&refused).kind, "NotAuthorized");
    // What was refused keeps the recovery from its end, until an operator has looked.
    hold(&node, 0, page(&node, 2, vec![one], true)).await.unwrap();
    assert_eq!(phase(&site).await, is(2, "recovering", &[]));
    assert_eq!(resume(&site).await.unwrap_err().kind, "Busy");
    let status = csictl(&file, "--operator cluster status").await.out;
    assert!(
        status.contains("held-claim-refused") && status.contains("`csictl server resume --forget n1`"),
        "{status}"
    );
    let said = csictl(&file, "server resume").await;
    assert!(said.code == Some(1) && said.err.contains("claims of n1 were not brought back"), "{said:?}");
    // A page came since the operator has looked.
    let seen = servers(&site, 0).await.refused[0].revision;
    let later = HeldClaim { consumer: "a\nb".into(), ..held(&node, "data", "later") };
    try_hold(&node, 0, page(&node, 2, vec![later], true)).await.unwrap();
    let old =
        ResumeAsk { node: "n1".into(), revision: seen, step: Step::Forget.into(), ..ResumeAsk::default() };
    assert_eq!(step(&site, 0, old).await.unwrap_err().kind, "Busy");
    assert_eq!(csictl(&file, "server resume --forget n1").await.code, Some(0));
    assert_eq!(phase(&site).await, is(2, "normal", &[]));
    assert_eq!(csictl(&file, "server audit").await.code, Some(0));
    let status = csictl(&file, "--operator cluster status").await.out;
    assert!(!status.contains("held-claim-refused"), "{status}");
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

/// A thief of a node's key has the servers detach another node's volume, in a namespace of its own and under the other node's name.
#[tokio::test]
async fn name_of_another_node_by_a_plugin_is_refused() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (owner, _first) = user(&site, "n1", 0).await;
    let (thief, mut second) = {
        let node = site.node("n2");
        let (_, mut session) = welcome(&node, 0).await;
        session.report_name("id of n1").await;
        (node, session)
    };
    eventually("the report is written", async || row(&site, "node/n2").await.contains("other-node-id")).await;
    assert!(!row(&site, "node/n2").await.contains("\"node-id\""));
    site.register("data", "single-node-writer").await;
    let refused = claiming(&thief, 0, "data").await.unwrap().unwrap_err();
    assert_eq!(refused.kind, "NotAuthorized");
    assert!(refused.message.contains("by plugin p") && !refused.message.contains("n1 "), "{refused:?}");
    second.report_name("id of n2").await;
    eventually("its own name is taken", async || row(&site, "node/n2").await.contains("\"id of n2\"")).await;
    drop(second);
    restored(&site, 0, 1).await.unwrap();
    controller.join_again(0).await;
    let _sessions = (welcome(&owner, 0).await, welcome(&thief, 0).await);
    let lie = HeldClaim {
        external_node_id: "id of n1".into(),
        external_id: "ext-of-n1".into(),
        ..held(&thief, "stolen", "lie")
    };
    let refused = try_hold(&thief, 0, page(&thief, 2, vec![lie], true)).await.unwrap();
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert!(refused[0].why.contains("by plugin p that another node has"), "{refused:?}");
    assert!(!refused[0].why.contains("n1"), "{refused:?}");
    thief.detached(0, "stolen", "lie").await.unwrap();
    let of_owner = HeldClaim {
        external_node_id: "id of n1".into(),
        external_id: "ext-of-n1".into(),
        ..held(&owner, "own", "true")
    };
    hold(&owner, 0, page(&owner, 2, vec![of_owner], true)).await.unwrap();
    hold(&controller.node, 0, page(&controller.node, 2, vec![], true)).await.unwrap();
    forget(&site, "n2").await;
    resumed(&site, 2).await;
    controller.join_again(0).await;
    assert!(!controller.is_called(Duration::from_secs(3)).await, "the volume was detached");
    assert_eq!(claims(&site, "own").await, ["n1/web"]);
}

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

/// Its plugin begins later than csid does.
#[tokio::test]
async fn claim_waits_for_the_name_of_its_node() {
    let site = Site::start(1).await;
    let controller = Controller::start(&site, "c1", 0).await;
    let node = site.node("n1");
    drop(welcome(&node, 0).await);
    restored(&site, 0, 1).await.unwrap();
    let (_, mut session) = welcome(&node, 0).await;
    let of = |volume: &str| HeldClaim { external_node_id: "id of n1".into(), ..held(&node, volume, volume) };
    let all = || vec![of("data"), held(&node, "plain", "plain"), of("more")];
    let said = node.client(0).hold(page(&node, 2, all(), true)).await;
    assert_eq!(Refusal::of(&said.unwrap_err()).kind, "Unavailable");
    assert_eq!(claims(&site, "plain").await, ["n1/web"], "the other claim waits, too");
    assert_eq!(phase(&site).await, is(2, "recovering", &["c1", "n1"]));
    assert!(servers(&site, 0).await.refused.is_empty());
    session.report_name("id of n1").await;
    hold(&node, 0, page(&node, 2, all(), true)).await.unwrap();
    for volume in ["data", "plain", "more"] {
        assert_eq!(claims(&site, volume).await, ["n1/web"]);
    }
    drop(controller);
}

/// Since the backup the node has released one volume and taken another one.
#[tokio::test]
async fn claim_beyond_the_volume_limit_comes_back() {
    let site = Site::start(1).await;
    for volume in ["data", "more", "rest"] {
        site.register(volume, "single-node-writer").await;
    }
    let node = site.node("n1");
    let limited = || PluginReport {
        plugin: "p".into(),
        attaches: Attaches::No.into(),
        max_volumes: Some(1),
        ..PluginReport::default()
    };
    let (_, mut session) = welcome(&node, 0).await;
    session.report_as(limited()).await;
    let released = node.claim(0, "data").await.unwrap();
    restored(&site, 0, 1).await.unwrap();
    let (_, mut session) = welcome(&node, 0).await;
    session.report_as(limited()).await;
    hold(&node, 0, page(&node, 2, vec![held(&node, "more", "since")], true)).await.unwrap();
    resumed(&site, 2).await;
    assert_eq!(claims(&site, "more").await, ["n1/web"]);
    assert!(row(&site, "used/n1/p").await.contains("\"volumes\":2"));
    // The limit counts again for what is claimed later.
    let (_, mut session) = welcome(&node, 0).await;
    session.report_as(limited()).await;
    assert_eq!(node.claim(0, "rest").await.unwrap_err().kind, "ClaimConflict");
    node.detached(0, "data", &released).await.unwrap();
    assert_eq!(node.claim(0, "rest").await.unwrap_err().kind, "ClaimConflict");
    node.detached(0, "more", "since").await.unwrap();
    node.claim(0, "rest").await.unwrap();
}

/// Since the backup the node has released one claim and taken another one.
#[tokio::test]
async fn claim_beyond_the_limit_of_claims_comes_back() {
    let site = Site::start_with(1, "max-claims = 1").await;
    for volume in ["data", "more", "rest"] {
        site.register(volume, "single-node-writer").await;
    }
    let node = site.node("n1");
    let session = node.join(0).await;
    node.claim(0, "data").await.unwrap();
    drop(session);
    restored(&site, 0, 1).await.unwrap();
    let _session = node.join(0).await;
    hold(&node, 0, page(&node, 2, vec![held(&node, "more", "since")], true)).await.unwrap();
    resumed(&site, 2).await;
    assert_eq!(claims(&site, "more").await, ["n1/web"]);
    let _session = node.join(0).await;
    assert_eq!(node.claim(0, "rest").await.unwrap_err().kind, "RateLimited");
}

/// Claims, attachments and volumes that the backup lacks or has otherwise.
#[tokio::test]
async fn what_the_backup_lacks_comes_back() {
    let site = Site::start(1).await;
    for volume in ["data", "more"] {
        site.register(volume, "single-node-writer").await;
    }
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (node, session) = user(&site, "n1", 0).await;
    // In the backup the consumer has an earlier claim of `more`, whose detach is under way.
    let claim = claiming(&node, 0, "more");
    controller.publish().await;
    let earlier = claim.await.unwrap().unwrap().claim;
    node.detached(0, "more", &earlier).await.unwrap();
    controller.called().await;
    drop(session);
    controller.leave().await;
    restored(&site, 0, 1).await.unwrap();
    controller.join_again(0).await;
    let (_, mut session) = welcome(&node, 0).await;
    session.report_name("id of n1").await;
    let context = |device: &str| [("device".to_owned(), device.to_owned())].into();
    let of = |volume: &str, claim: &str| HeldClaim {
        external_node_id: "id of n1".into(),
        publish_context: context("/dev/y"),
        ..held(&node, volume, claim)
    };
    let all = vec![of("data", "one"), of("more", "two"), of("unknown", "three")];
    hold(&node, 0, page(&node, 2, all.clone(), false)).await.unwrap();
    let written = site.raw().await.below("/csid/v1/vol/").await;
    hold(&node, 0, page(&node, 2, all, true)).await.unwrap();
    assert_eq!(
        site.raw().await.below("/csid/v1/vol/").await,
        written,
        "the same again has changed something"
    );
    hold(&controller.node, 0, page(&controller.node, 2, vec![], true)).await.unwrap();
    resumed(&site, 2).await;
    for volume in ["data", "more", "unknown"] {
        let claim = row(&site, &format!("vol/default/{volume}/claim/n1/web")).await;
        assert!(claim.contains("\"adopted\":true") && claim.contains("\"taken\""), "{claim}");
        let at = row(&site, &format!("vol/default/{volume}/at/n1")).await;
        assert!(at.contains("/dev/y") && at.contains("\"present\""), "{at}");
    }
    controller.join_again(0).await;
    assert!(!controller.is_called(Duration::from_secs(3)).await, "the detach of the backup was made");
    // The volume without a registration keeps others out, and ends with its claim.
    let refused =
        site.operator(0, "all").change(register("unknown", "single-node-writer")).await.unwrap_err();
    assert!(!Refusal::of(&refused).message.is_empty());
    for (volume, claim) in [("data", "one"), ("more", "two")] {
        node.detached(0, volume, claim).await.unwrap();
        controller.unpublish().await;
        eventually("the claim has ended", async || claims(&site, volume).await.is_empty()).await;
    }
    // A node's word alone does not detach what nobody has registered.
    node.detached(0, "unknown", "three").await.unwrap();
    assert!(!controller.is_called(Duration::from_secs(3)).await, "a volume of another one was detached");
    let file = operator(&site, "all");
    let found: Value = serde_json::from_str(&csictl(&file, "server audit --json").await.out).unwrap();
    assert_eq!(found[0]["kind"], "detach-waits-for-operator", "{found}");
    let explained = csictl(&file, "--operator explain default unknown").await;
    assert!(explained.out.contains("release default unknown web --node n1 --force"), "{explained:?}");
    let by_force = ReleaseAsk { force: true, ..release_ask("unknown", "n1") };
    let mut client = site.operator(0, "all");
    let release = tokio::spawn(async move { client.release(by_force).await });
    controller.unpublish().await;
    release.await.unwrap().unwrap();
    eventually("nothing is left of it", async || row(&site, "vol/default/unknown/head").await.is_empty())
        .await;
    site.register("unknown", "single-node-writer").await;
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
    let node = site.node("n1");
    drop(node.join(0).await);
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
    assert_eq!(restored(&site, 1, 1).await.unwrap().by, "operator/all");
    // Another start in the same etcd changes nothing.
    site.servers[0].kill();
    site.servers[0] = site.start_server(0);
    assert_eq!(phase(&site).await, is(2, "recovering", &["n1"]));
    let said = csictl(&operator(&site, "all"), "--operator cluster status").await;
    assert!(said.out.contains("waits for 1 nodes") && said.out.contains("csictl server resume"), "{said:?}");
    let drain = NodeChange { node: "n1".into(), change: Some(Change::Drain(DrainAsk {})) };
    site.admin(0, "all").set_node(drain).await.unwrap();
    let _session = node.join(0).await;
    hold(&node, 0, page(&node, 2, vec![], true)).await.unwrap();
    resumed(&site, 2).await;
}

/// Since the backup the plugin has refused the deletion, and a node has claimed the volume.
#[tokio::test]
async fn volume_that_a_node_holds_is_not_deleted() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (node, session) = user(&site, "n1", 0).await;
    let creation = creating(&site, 0, "data");
    let call = controller.called().await;
    controller.end(&call, created("ext-data")).await;
    creation.await.unwrap().unwrap();
    let deletion = deleting(&site, 0, "data");
    assert!(is_delete(&controller.called().await));
    deletion.abort();
    drop(session);
    controller.leave().await;
    restored(&site, 0, 1).await.unwrap();
    assert!(registration(&site, "data").await.contains("\"deleting\""));
    controller.join_again(0).await;
    let (_, mut session) = welcome(&node, 0).await;
    session.report_name("id of n1").await;
    let of = HeldClaim { external_node_id: "id of n1".into(), ..held(&node, "data", "one") };
    hold(&node, 0, page(&node, 2, vec![of], true)).await.unwrap();
    assert!(registration(&site, "data").await.contains("\"registered\""));
    hold(&controller.node, 0, page(&controller.node, 2, vec![], true)).await.unwrap();
    resumed(&site, 2).await;
    controller.join_again(0).await;
    assert!(!controller.is_called(Duration::from_secs(3)).await, "a volume in use is deleted");
    assert_eq!(claims(&site, "data").await, ["n1/web"]);
}

/// The machine has a new node name. The plugin's name of it is still that of the earlier node.
#[tokio::test]
async fn accepted_name_of_another_node_counts() {
    for is_fenced in [false, true] {
        let site = Site::start(1).await;
        let controller = Controller::start(&site, "c1", 0).await;
        drop(user_named(&site, "n1", 0, "i-1").await);
        let machine = site.node("n2");
        restored(&site, 0, 1).await.unwrap();
        let (_, mut session) = welcome(&machine, 0).await;
        session.report_name("i-1").await;
        eventually("its name is refused", async || row(&site, "node/n2").await.contains("other-node-id"))
            .await;
        let of = HeldClaim { external_node_id: "i-1".into(), ..held(&machine, "data", "one") };
        let said = || page(&machine, 2, vec![of.clone()], true);
        assert_eq!(try_hold(&machine, 0, said()).await.unwrap().len(), 1, "no operator has accepted it");
        let file = operator(&site, "all");
        assert_eq!(csictl(&file, "node accept n2").await.code, Some(0));
        if is_fenced {
            // A server of an earlier version has written the acceptance.
            let accepted = row(&site, "node/n2").await;
            let of_before = accepted.replace(",\"accepted-ids\":{\"p\":\"i-1\"}", "");
            assert_ne!(accepted, of_before);
            site.raw().await.put("/csid/v1/node/n2", &of_before).await;
            assert_eq!(try_hold(&machine, 0, said()).await.unwrap().len(), 1, "the other node may be there");
            leave_out(&site, 0, "n1").await.unwrap();
        }
        hold(&machine, 0, said()).await.unwrap();
        assert_eq!(claims(&site, "data").await, ["n2/web"]);
        drop(controller);
    }
}

#[tokio::test]
async fn claim_of_a_volume_in_creation_is_refused() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let node = site.node("n1");
    drop(welcome(&node, 0).await);
    let creation = creating(&site, 0, "data");
    controller.called().await;
    creation.abort();
    restored(&site, 0, 1).await.unwrap();
    let _session = welcome(&node, 0).await;
    let refused = try_hold(&node, 0, page(&node, 2, vec![held(&node, "data", "one")], true)).await.unwrap();
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert!(refused[0].why.contains("default/data is being created in etcd"), "{refused:?}");
    assert_eq!(resume(&site).await.unwrap_err().kind, "Busy", "an operator has not looked at it");
}

/// Nobody can count the volumes of the node, so the same word again changes nothing.
#[tokio::test]
async fn claim_with_an_unreadable_count_is_refused() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let node = site.node("n1");
    drop(node.join(0).await);
    restored(&site, 0, 1).await.unwrap();
    site.raw().await.put("/csid/v1/used/n1/p", "no row").await;
    let _session = node.join(0).await;
    let said = page(&node, 2, vec![held(&node, "data", "one")], true);
    let refused = tokio::time::timeout(Duration::from_secs(20), try_hold(&node, 0, said)).await;
    let refused = refused.expect("the claim is never refused").unwrap();
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert!(refused[0].why.contains("in etcd is not csid's"), "{refused:?}");
    assert_eq!(phase(&site).await, is(2, "recovering", &[]), "the node is awaited for ever");
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

/// The backup does not have the detach and the claim that came after it.
#[tokio::test]
async fn attachment_by_call_stays_until_it_is_detached() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (node, session) = user(&site, "n1", 0).await;
    let (attach, call) = attach_begins(&site.operator(0, "attaches"), &mut controller, attach_ask("data", "id of n1")).await;
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
    let (attach, call) = attach_begins(&site.operator(0, "attaches"), &mut controller, attach_ask("data", "id of n1")).await;
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
    let (attach, call) = attach_begins(&site.operator(0, "attaches"), &mut controller, attach_ask("data", "id of n1")).await;
    controller.end(&call, failed(CallClass::Refused)).await;
    assert_eq!(attach.await.unwrap().unwrap_err().kind, "PluginError");
    assert!(!controller.is_called(Duration::from_secs(8)).await, "it is undone, or called again at once");
    let (attach, call) = attach_begins(&site.operator(0, "attaches"), &mut controller, attach_ask("data", "id of n1")).await;
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
    let (attach, call) = attach_begins(&site.operator(0, "attaches"), &mut controller, attach_ask("data", "x")).await;
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

/// Returns a cluster after a restore, in which a claim of `web` on n1 was refused and forgotten. Its volume is mounted there. `is_known`: etcd has the
/// claim.
async fn with_refused_claim(servers: usize, is_known: bool) -> (Site, Controller, Node, Session) {
    let site = Site::start(servers).await;
    site.register("data", "single-node-multi-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (node, session) = user(&site, "n1", 0).await;
    let mut said = HeldClaim {
        usage: Some(writing("single-node-multi-writer")),
        external_node_id: "an earlier id".into(),
        ..held(&node, "data", "web")
    };
    if is_known {
        let claim = claiming_as(&node, 0, "web");
        controller.publish().await;
        said.claim = claim.await.unwrap().unwrap().claim;
    }
    drop(session);
    restored(&site, 0, 1).await.unwrap();
    controller.join_again(0).await;
    hold(&controller.node, 0, page(&controller.node, 2, vec![], true)).await.unwrap();
    let (_, mut session) = welcome(&node, 0).await;
    session.report_name("id of n1").await;
    let refused = try_hold(&node, 0, page(&node, 2, vec![said], true)).await.unwrap();
    assert!(refused.len() == 1 && refused[0].why.contains("under another name"), "{refused:?}");
    forget(&site, "n1").await;
    resumed(&site, 2).await;
    drop(session);
    controller.join_again(0).await;
    let (_, mut session) = welcome(&node, 0).await;
    session.report_name("id of n1").await;
    (site, controller, node, session)
}

/// Claims the volume of several writers for a consumer, in a task.
fn claiming_as(node: &Node, server: usize, consumer: &str) -> JoinHandle<Result<Granted, Refusal>> {
    let usage = Some(writing("single-node-multi-writer"));
    let ask = ClaimAsk { r#use: usage, ..node.ask("data", consumer) };
    let mut client = node.client(server);
    tokio::spawn(async move {
        loop {
            let granted = client.claim(ask.clone()).await.map_err(|status| Refusal::of(&status));
            match granted {
                // As csid does.
                Err(refusal) if refusal.kind == "TimedOut" => {}
                granted => return granted.map(tonic::Response::into_inner),
            }
        }
    })
}

#[tokio::test]
async fn failed_attach_after_a_refusal_is_not_undone() {
    for is_known in [false, true] {
        let (site, mut controller, node, _session) = with_refused_claim(1, is_known).await;
        let claim = claiming_as(&node, 0, "other");
        let call = controller.called().await;
        assert!(is_publish(&call), "{call:?}");
        controller.end(&call, failed(CallClass::Refused)).await;
        assert_eq!(claim.await.unwrap().unwrap_err().kind, "PluginError");
        if is_known {
            // The claim that etcd has is attached once more.
            let again = controller.called().await;
            assert!(is_publish(&again), "the volume is detached under a mount: {again:?}");
            controller.end(&again, attached("/dev/x")).await;
            eventually("the other claim has ended", async || claims(&site, "data").await == ["n1/web"]).await;
            assert!(!controller.is_called(Duration::from_secs(3)).await);
            continue;
        }
        assert!(!controller.is_called(Duration::from_secs(8)).await, "the volume is detached under a mount");
        assert!(row(&site, "vol/default/data/at/n1").await.contains("\"making\""));
        let file = operator(&site, "all");
        let found: Value = serde_json::from_str(&csictl(&file, "server audit --json").await.out).unwrap();
        assert_eq!(found[0]["kind"], "detach-waits-for-operator", "{found}");
        let explained = csictl(&file, "--operator explain default data").await;
        assert!(explained.out.contains("release default data other --node n1 --force"), "{explained:?}");
        // A release without force is no word for a detach.
        let release = ReleaseAsk { consumer: "other".into(), deadline_ms: 1000, ..release_ask("data", "n1") };
        let waits = Refusal::of(&site.operator(0, "all").release(release.clone()).await.unwrap_err());
        assert_eq!(waits.kind, "TimedOut", "{waits:?}");
        // Another consumer may have the volume attached once more.
        let claim = claiming_as(&node, 0, "third");
        controller.publish().await;
        claim.await.unwrap().unwrap();
        eventually("the failed claim has ended", async || claims(&site, "data").await == ["n1/third"]).await;
        assert!(!controller.is_called(Duration::from_secs(3)).await, "the volume is detached under a mount");
    }
}

/// The call has no answer, and its server dies. The next server waits for the call, makes it again, and is refused.
#[tokio::test]
async fn lost_attach_after_a_refusal_is_not_undone() {
    let (mut site, mut controller, node, session) = with_refused_claim(2, false).await;
    let claim = claiming_as(&node, 0, "other");
    let call = controller.called().await;
    assert!(is_publish(&call), "{call:?}");
    site.servers[0].kill();
    drop((session, claim));
    controller.join_again(1).await;
    let (_, mut session) = welcome(&node, 1).await;
    session.report_name("id of n1").await;
    let claim = claiming_as(&node, 1, "other");
    let again = controller.called_within(Duration::from_secs(60)).await;
    assert!(
        is_publish(&again) && again.epoch > call.epoch,
        "the volume is detached under a mount: {again:?}"
    );
    controller.end(&again, failed(CallClass::Refused)).await;
    assert_eq!(claim.await.unwrap().unwrap_err().kind, "PluginError");
    assert!(!controller.is_called(Duration::from_secs(8)).await, "the volume is detached under a mount");
    // The operator has looked at the node.
    let release = ReleaseAsk { consumer: "other".into(), force: true, ..release_ask("data", "n1") };
    let mut client = site.operator(1, "all");
    let release = tokio::spawn(async move { client.release(release).await });
    controller.unpublish().await;
    release.await.unwrap().unwrap();
    assert!(claims(&site, "data").await.is_empty());
}

/// The plugin has another name for the node now. Only a detach by the earlier one would end the attachment.
#[tokio::test]
async fn renamed_node_after_a_refusal_is_not_detached() {
    let (site, mut controller, node, mut session) = with_refused_claim(1, true).await;
    session.report_name("a later id").await;
    eventually("its name is refused", async || row(&site, "node/n1").await.contains("other-node-id")).await;
    let file = operator(&site, "all");
    assert_eq!(csictl(&file, "node accept n1").await.code, Some(0));
    let claim = claiming_as(&node, 0, "other");
    eventually("the other claim waits", async || claims(&site, "data").await.len() == 2).await;
    assert!(!controller.is_called(Duration::from_secs(8)).await, "the volume is detached under a mount");
    assert!(row(&site, "vol/default/data/at/n1").await.contains("\"present\""));
    claim.abort();
    // It was never granted, so its end detaches nothing, either.
    let release = ReleaseAsk { consumer: "other".into(), ..release_ask("data", "n1") };
    site.operator(0, "all").release(release).await.unwrap();
    assert_eq!(claims(&site, "data").await, ["n1/web"]);
    assert!(!controller.is_called(Duration::from_secs(3)).await, "the volume is detached under a mount");
}

/// Nothing of an earlier boot is mounted.
#[tokio::test]
async fn failed_attach_after_a_reboot_is_undone() {
    let (site, mut controller, mut node, session) = with_refused_claim(1, false).await;
    drop(session);
    node.hello.boot = "boot 2".into();
    let mut session = eventually_joined(&node).await;
    session.report_name("id of n1").await;
    let claim = claiming_as(&node, 0, "other");
    let call = controller.called().await;
    controller.end(&call, failed(CallClass::Refused)).await;
    controller.unpublish().await;
    assert_eq!(claim.await.unwrap().unwrap_err().kind, "PluginError");
    eventually("nothing is left", async || claims(&site, "data").await.is_empty()).await;
}

/// Joins in a new boot, when the session of the earlier one has ended.
async fn eventually_joined(node: &Node) -> Session {
    loop {
        match node.say_hello(0).await.unwrap() {
            (First::Welcome(_), session) => return session,
            _ => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}
