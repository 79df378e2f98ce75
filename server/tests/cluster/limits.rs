//! The limits of one caller. It is refused with ResourceExhausted, and keeps no other out.

use std::time::Duration;

use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{
    AuditAsk, BlockAsk, ChangeAsk, Deregister, FromNode, Hello, PluginReport, Plugins, VolumeAsk, from_node,
};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

use crate::attach::row;
use crate::creations::create;
use crate::fence::set;
use crate::recovery::{leave_out, restored, resume};
use crate::site::{First, Node, Refusal, Site, eventually, open, register};

/// Returns whether a call was refused by a limit of the caller. Such a refusal says so in all its parts.
fn is_over_the_limit(refused: &Status) -> bool {
    if refused.code() != Code::ResourceExhausted {
        return false;
    }
    let refusal = Refusal::of(refused);
    assert_eq!((refusal.kind.as_str(), refusal.retryable), ("RateLimited", true), "{refused:?}");
    true
}

#[tokio::test]
async fn node_with_many_calls_keeps_no_other_out() {
    let site = Site::start(1).await;
    let (n1, n2) = (site.node("n1"), site.node("n2"));
    let _sessions = (n1.join(0).await, n2.join(0).await);
    let ask = VolumeAsk { namespace: "default".into(), volume: "v0".into(), ..VolumeAsk::default() };
    for n in 0..6 {
        let volume = format!("v{n}");
        site.register(&volume, "single-node-writer").await;
        n2.claim(0, &volume).await.unwrap();
    }
    let mut calls = JoinSet::new();
    for n in 0..6 {
        // A connection makes 128 calls at most.
        let client = n1.client(0);
        for m in 0..30 {
            let mut wanted = n1.ask(&format!("v{n}"), &format!("c{m}"));
            wanted.call = format!("call {n} {m}");
            (wanted.queue_ms, wanted.answer_ms) = (60_000, 8_000);
            let mut client = client.clone();
            calls.spawn(async move { client.claim(wanted).await.unwrap_err() });
        }
    }
    // The calls below the limit wait for 8 s each.
    let refused = loop {
        let refused = calls.join_next().await.expect("180 calls of one node were under way").unwrap();
        if is_over_the_limit(&refused) {
            break refused;
        }
    };
    assert!(Refusal::of(&refused).message.contains("node/n1 has 128 calls"), "{refused:?}");
    n2.client(0).volume(ask.clone()).await.unwrap();
    site.operator(0, "reads").volume(ask.clone()).await.unwrap();
    calls.join_all().await;
    n1.client(0).volume(ask).await.unwrap();
}

#[tokio::test]
async fn node_with_many_hellos_keeps_no_other_out() {
    let site = Site::start(1).await;
    let (n1, n2) = (site.node("n1"), site.node("n2"));
    // A Hello that is refused counts, too.
    let of_another = Hello { cluster: "another".into(), ..n1.hello.clone() };
    let (mut client, mut said) = (n1.client(0), 0);
    let refused = loop {
        match open(&mut client, of_another.clone()).await {
            Ok((first, _)) => assert!(matches!(first, First::Refused(_)), "{first:?}"),
            Err(refused) if Refusal::of(&refused).message.contains("Hellos") => break refused,
            // The server has not seen the ends of the sessions before.
            Err(refused) => assert!(is_over_the_limit(&refused), "{refused:?}"),
        }
        said += 1;
        assert!(said < 3000, "each Hello is taken");
    };
    assert!(is_over_the_limit(&refused) && said >= 300, "{said}: {refused:?}");
    n2.join(0).await;
    eventually("the node may join later", async || n1.say_hello(0).await.is_ok()).await;
}

#[tokio::test]
async fn sessions_without_a_hello_are_few() {
    let site = Site::start(1).await;
    let (n1, n2) = (site.node("n1"), site.node("n2"));
    let mut silent = Vec::new();
    let refused = loop {
        let (sender, receiver) = mpsc::channel::<FromNode>(1);
        match n1.client(0).session(ReceiverStream::new(receiver)).await {
            Ok(answers) => silent.push((sender, answers)),
            Err(refused) => break refused,
        }
        assert!(silent.len() < 50);
    };
    assert!(is_over_the_limit(&refused) && silent.len() == 4, "{} {refused:?}", silent.len());
    n2.join(0).await;
    drop(silent);
    eventually("the places are free", async || n1.say_hello(0).await.is_ok()).await;
}

#[tokio::test]
async fn sessions_of_all_nodes_have_a_limit() {
    let site = Site::start_with(1, "max-sessions = 1").await;
    let (n1, n2) = (site.node("n1"), site.node("n2"));
    let session = n1.join(0).await;
    let refused = n2.say_hello(0).await.err().unwrap();
    assert!(is_over_the_limit(&refused), "{refused:?}");
    let again = n1.join(0).await;
    drop((session, again));
    eventually("the place is free", async || n2.say_hello(0).await.is_ok()).await;
}

#[tokio::test]
async fn operator_has_one_audit_and_leaves_one_to_others() {
    let site = Site::start(1).await;
    // A volume whose driver is gone has the audit wait.
    site.register("data", "single-node-writer").await;
    let mut raw = site.raw().await;
    // No server goes on for it while the cluster recovers.
    let meta = raw.below("/csid/v1/meta").await.remove(0);
    let meta = String::from_utf8(meta.value).unwrap();
    raw.put("/csid/v1/meta", &meta.replace("\"normal\"", "\"recovering\"")).await;
    let head = raw.below("/csid/v1/vol/default/data/head").await.remove(0);
    let mut value: serde_json::Value = serde_json::from_slice(&head.value).unwrap();
    value["driver"] = serde_json::json!({ "server": "gone", "host": "c1", "deadline-ms": 1000 });
    raw.put("/csid/v1/vol/default/data/head", &value.to_string()).await;
    let mut first = site.admin(0, "reads");
    let held = first.audit(AuditAsk {}).await.unwrap();
    let refused = first.audit(AuditAsk {}).await.unwrap_err();
    assert!(is_over_the_limit(&refused), "{refused:?}");
    site.admin(0, "anna").audit(AuditAsk {}).await.unwrap();
    drop(held);
    eventually("the place is free", async || first.audit(AuditAsk {}).await.is_ok()).await;
}

#[tokio::test]
async fn claim_that_waits_ends_with_its_grant() {
    let mut site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let (n1, n2) = (site.node("n1"), site.node("n2"));
    let sessions = (n1.join(0).await, n2.join(0).await);
    n1.claim(0, "data").await.unwrap();
    let mut ask = n2.ask("data", "web");
    (ask.queue_ms, ask.answer_ms) = (600_000, 1);
    eventually("the claim waits", async || {
        let refused = Refusal::of(&n2.client(0).claim(ask.clone()).await.unwrap_err());
        refused.kind == "ClaimConflict"
    })
    .await;
    let mut raw = site.raw().await;
    let queue = "/csid/v1/vol/default/data/queue/";
    assert_eq!(raw.below(queue).await.len(), 1);
    drop(sessions);
    let server = site.servers.remove(0);
    server.signal(rustix::process::Signal::TERM);
    drop(server);
    let file = site.path("s0.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    let revoked = text.replace("who = \"node/n*\"", "who = \"node/n1\"");
    assert_ne!(revoked, text);
    std::fs::write(&file, revoked).unwrap();
    let server = site.start_server(0);
    site.servers.push(server);
    // Without the grant's end the entry would stay for 60 s after the last ask.
    eventually("the entry has ended", async || raw.below(queue).await.is_empty()).await;
}

/// Returns 64 plugins. The node's names by them have `size` quotes in all, and JSON doubles each.
fn plugins(prefix: &str, size: usize) -> Vec<PluginReport> {
    let of = |n: usize| PluginReport {
        plugin: format!("{prefix}{n:x<126}"),
        node_id: format!("n{}", "\"".repeat(size.saturating_sub(n * 255).min(255))),
        ..PluginReport::default()
    };
    (0..64).map(of).collect()
}

/// Reports plugins in a session of its own. Returns whether the server has written them.
async fn is_reported(site: &Site, node: &Node, plugins: Vec<PluginReport>) -> bool {
    let (first, mut session) = loop {
        match open(&mut node.client(0), node.hello.clone()).await {
            Ok(opened) => break opened,
            // The server has not seen the ends of the sessions before.
            Err(refused) => assert!(is_over_the_limit(&refused), "{refused:?}"),
        }
    };
    assert!(matches!(first, First::Welcome(_)), "{first:?}");
    let before = row(site, "node/n1").await;
    let report = from_node::Is::Plugins(Plugins { plugins });
    session.to_server.send(FromNode { is: Some(report) }).await.unwrap();
    while row(site, "node/n1").await == before {
        match tokio::time::timeout(Duration::from_millis(20), session.from_server.message()).await {
            Ok(Ok(Some(_))) | Err(_) => {}
            Ok(Ok(None)) => return false,
            Ok(Err(refused)) => {
                assert!(Refusal::of(&refused).message.contains("the limit is"), "{refused:?}");
                return false;
            }
        }
    }
    true
}

/// A node makes its own row as large as servers let it. What operators write of the node has room.
#[tokio::test]
async fn node_with_a_full_row_is_fenced_and_blocked() {
    let site = Site::start(1).await;
    let node = site.node("n1");
    // The first name of a node by each plugin stays.
    assert!(is_reported(&site, &node, plugins("a", 255 * 26).into_iter().take(26).collect()).await);
    assert!(is_reported(&site, &node, plugins("b", 0)).await);
    let (mut taken, mut refused) = (0, 255 * 64);
    assert!(!is_reported(&site, &node, plugins("b", refused)).await, "no row is that large");
    while refused - taken > 1 {
        let size = (taken + refused) / 2;
        match is_reported(&site, &node, plugins("b", size)).await {
            true => taken = size,
            false => refused = size,
        }
    }
    let size = row(&site, "node/n1").await.len();
    assert!(size > 47 * 1024, "{size}");
    restored(&site, 0, 1).await.unwrap();
    leave_out(&site, 0, "n1").await.expect("a recovery goes on without the node");
    resume(&site).await.unwrap();
    set(&site, 0, "n1", Change::Block(BlockAsk { reason: "y".repeat(256) })).await.unwrap();
}

#[tokio::test]
async fn owner_registers_no_more_than_its_limit() {
    let site = Site::start_with(1, "max-volumes = 2").await;
    let of = |volume: &str| register(volume, "single-node-writer");
    let ask = |what| ChangeAsk { what: Some(what) };
    let mut all = site.operator(0, "all");
    for volume in ["a", "b"] {
        all.change(of(volume)).await.unwrap();
    }
    for further in [of("c"), ask(What::Create(create("c")))] {
        let refused = all.change(further).await.unwrap_err();
        assert!(is_over_the_limit(&refused), "{refused:?}");
        let due = "no further volume: operator/all has registered or created 2, and max-volumes is 2";
        assert_eq!(Refusal::of(&refused).message, due);
    }
    assert_eq!(row(&site, "vol/default/c").await, "");
    // A registration that is there is changed and repeated, and others have places of their own.
    all.change(of("a")).await.unwrap();
    all.change(register("b", "multi-node-multi-writer")).await.unwrap();
    let mut of_other = of("c");
    if let Some(What::Register(register)) = &mut of_other.what {
        register.namespace = "a".into();
    }
    site.operator(0, "registers").change(of_other).await.unwrap();
    // The end of a registration frees its place.
    all.change(ask(What::Deregister(Deregister {
        namespace: String::new(),
        volume: "a".into(),
        ..Default::default()
    })))
    .await
    .unwrap();
    all.change(of("d")).await.unwrap();
    assert!(is_over_the_limit(&all.change(of("e")).await.unwrap_err()));
}
