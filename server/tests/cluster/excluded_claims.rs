//! Claims that exclude each other after a recovery from a backup of etcd: an operator decides, and no server grants one meanwhile.

use std::time::Duration;

use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{ClaimAsk, FenceAsk, HeldClaim, NodeAsk, NodeChange, Use, VolumeAsk};
use futures_util::FutureExt;
use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::attach::{Controller, claiming, row, user};
use crate::operators::{csictl, operator};
use crate::recovery::{
    claims, held, held_attached, hold, is, page, phase, restored, resume, resumed, try_hold, welcome,
};
use crate::site::{Node, Refusal, Site, eventually};
use crate::together::transactions;

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
async fn later_call_takes_no_excluded_claim_over() {
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
    n1.client(0).claim(waits.clone()).await.unwrap_err();
    drop(sessions);
    restored(&site, 0, 1).await.unwrap();
    let sessions = (n1.join(0).await, n2.join(0).await);
    let of_n1 = HeldClaim { call: "calls.0000000000000001.a".into(), ..held(&n1, "data", "one") };
    hold(&n1, 0, page(&n1, 2, vec![of_n1], true)).await.unwrap();
    hold(&n2, 0, page(&n2, 2, vec![held(&n2, "data", &claim)], true)).await.unwrap();
    resumed(&site, 2).await;
    drop(sessions);
    let _sessions = (n1.join(0).await, n2.join(0).await);
    // The end of the recovery has ended its wait, so the caller asks again.
    let refused = Refusal::of(&n1.client(0).claim(waits.clone()).await.unwrap_err());
    assert_eq!((refused.kind.as_str(), refused.holders), ("ClaimConflict", vec!["n2/web".to_owned()]));
    let key = "vol/default/data/claim/n1/web";
    let before = row(&site, key).await;
    assert!(before.contains("node/n1/calls.0000000000000001.a"), "{before}");
    let explained = csictl(&operator(&site, "all"), "--operator explain default data --json").await.json();
    for (n, holder) in ["n2/web", "n1/web"].into_iter().enumerate() {
        let wait = &explained["claims"][n]["waits-for"];
        assert_eq!((&wait["kind"], &wait["holders"]), (&json!("claims"), &json!([holder])), "{explained}");
    }
    assert_eq!(row(&site, key).await, before, "a later call took the claim over");
    assert!(site.raw().await.below("/csid/v1/vol/default/data/queue/").await.is_empty());
    n2.detached(0, "data", &claim).await.unwrap();
    eventually("the later call has the claim", async || {
        n1.client(0).claim(ClaimAsk { answer_ms: 0, ..waits.clone() }).await.is_ok()
    })
    .await;
    assert!(row(&site, key).await.contains("node/n1/calls.0000000000000002.a"));
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
