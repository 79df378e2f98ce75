//! What a recovery from a backup of etcd makes of what nodes say to hold: claims, attachments and volumes come back, or are refused.

use std::time::Duration;

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::resume_ask::Step;
use csi_proto::cluster::v1::{
    Answer, Attaches, AuditAsk, CallClass, ClaimAsk, DetachAsk, DrainAsk, FenceAsk, HeldClaim, NodeAsk,
    NodeChange, PluginReport, ReleaseAsk, ResumeAsk, UndrainAsk, Use, VolumeAsk,
};
use futures_util::FutureExt;
use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::attach::{Controller, attached, claiming, failed, head, is_publish, row, user, user_named};
use crate::by_call::{ask, at, attach_ask, attach_begins, attaching, detach_ask, detaching, once};
use crate::creations::{created, creating, deleting, is_delete, registration};
use crate::fence::set;
use crate::operators::{csictl, operator};
use crate::recovery::{
    claims, forget, held, held_attached, hold, is, leave_out, page, phase, restored, resume, resumed,
    servers, step, try_hold, welcome, writing,
};
use crate::site::{Node, Refusal, Site, eventually, register, release_ask};
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

/// The backup does not have the detach and the claim that came after it.
#[tokio::test]
async fn attachment_by_call_stays_until_it_is_detached() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (node, session) = user(&site, "n1", 0).await;
    let (attach, call) =
        attach_begins(&site.operator(0, "attaches"), &mut controller, attach_ask("data", "id of n1")).await;
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
    let (attach, call) =
        attach_begins(&site.operator(0, "attaches"), &mut controller, attach_ask("data", "id of n1")).await;
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
    let (attach, call) =
        attach_begins(&site.operator(0, "attaches"), &mut controller, attach_ask("data", "id of n1")).await;
    controller.end(&call, failed(CallClass::Refused)).await;
    assert_eq!(attach.await.unwrap().unwrap_err().kind, "PluginError");
    assert!(!controller.is_called(Duration::from_secs(8)).await, "it is undone, or called again at once");
    let (attach, call) =
        attach_begins(&site.operator(0, "attaches"), &mut controller, attach_ask("data", "id of n1")).await;
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
    let (attach, call) =
        attach_begins(&site.operator(0, "attaches"), &mut controller, attach_ask("data", "x")).await;
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
