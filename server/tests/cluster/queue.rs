//! Claims that wait in the queue of their volume, at two servers.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{
    Answer, BlockAsk, CallName, Capability, ChangeAsk, ClaimAsk, DeleteAsk, Deregister, Failure, Granted,
    Owed, Use,
};
use prost::Message;
use tonic::{Code, Status};

use crate::attach::{Controller, attached, is_publish, node_id, user};
use crate::fence::set;
use crate::recovery::{held as held_claim, hold, page, restored, resumed, welcome};
use crate::site::{First, Node, Raw, Refusal, SOON, Site, eventually, register};

const DATA: &str = "/csid/v1/vol/default/data";

/// Returns whether a call failed because its claim waits.
fn is_queued(status: &Status) -> bool {
    let trailer = status.metadata().get_bin("csid-failure-bin").and_then(|value| value.to_bytes().ok());
    trailer.is_some_and(|bytes| Failure::decode(bytes).unwrap().queued)
}

/// A call that waits for a minute.
fn waits(node: &Node, volume: &str, call: &str) -> ClaimAsk {
    ClaimAsk { call: call.into(), queue_ms: 60_000, ..node.ask(volume, call) }
}

/// A call that waits, and is answered at once.
fn waits_briefly(node: &Node, volume: &str, call: &str) -> ClaimAsk {
    ClaimAsk { answer_ms: 1, ..waits(node, volume, call) }
}

fn name(node: &Node, volume: &str, call: &str) -> CallName {
    let boot = node.hello.boot.clone();
    CallName { call: call.into(), namespace: String::new(), volume: volume.into(), boot }
}

/// Enters a call into the queue. The error names what is in its way.
async fn enter(node: &Node, server: usize, call: &str) -> Refusal {
    let status = node.client(server).claim(waits_briefly(node, "data", call)).await.unwrap_err();
    assert!(is_queued(&status), "{status:?}");
    Refusal::of(&status)
}

/// Asks until the claim is granted.
async fn granted(node: &Node, server: usize, call: &str) -> Granted {
    let begun = Instant::now();
    loop {
        match node.client(server).claim(waits(node, "data", call)).await {
            Ok(granted) => return granted.into_inner(),
            Err(status) => assert!(is_queued(&status) && begun.elapsed() < SOON, "{status:?}"),
        }
    }
}

async fn end(node: &Node, server: usize, consumer: &str, claim: &str) {
    let owed = node.owed("data", claim);
    let owed = Owed { consumer: consumer.into(), ..owed };
    node.client(server).detached(owed).await.unwrap();
}

/// Returns the consumers that wait, in the order of their keys.
async fn queue(raw: &mut Raw) -> Vec<String> {
    let found = raw.below(&format!("{DATA}/queue/")).await;
    let consumer = |value: Vec<u8>| {
        let value: serde_json::Value = serde_json::from_slice(&value).unwrap();
        value["consumer"].as_str().unwrap().to_owned()
    };
    found.into_iter().map(|kv| consumer(kv.value)).collect()
}

async fn holders(raw: &mut Raw) -> Vec<String> {
    let prefix = format!("{DATA}/claim/");
    let found = raw.below(&prefix).await;
    found.into_iter().map(|kv| String::from_utf8(kv.key).unwrap()[prefix.len()..].to_owned()).collect()
}

/// A volume that `n1` has claimed for `web`, at the first of two servers. `n2` has joined at the second one.
struct Held {
    site: Site,
    n1: Node,
    n2: Node,
    raw: Raw,
    claim: String,
    _sessions: [crate::site::Session; 2],
}

async fn held() -> Held {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    site.register("known", "single-node-writer").await;
    let (n1, n2) = (site.node("n1"), site.node("n2"));
    let sessions = [n1.join(0).await, n2.join(1).await];
    // The servers know the plugin of both.
    n2.claim(1, "known").await.unwrap();
    let claim = n1.claim(0, "data").await.unwrap();
    let raw = site.raw().await;
    Held { site, n1, n2, raw, claim, _sessions: sessions }
}

#[tokio::test]
async fn claims_are_granted_in_the_order_of_the_queue() {
    let mut held = held().await;
    let calls: Vec<String> = (0..8).map(|n| format!("c{n}")).collect();
    let nodes = [&held.n1, &held.n2];
    for (n, call) in calls.iter().enumerate() {
        let refused = enter(nodes[n % 2], n % 2, call).await;
        assert_eq!((refused.kind.as_str(), refused.retryable), ("ClaimConflict", true));
        assert_eq!(refused.holders[0], "n1/web");
        assert!(refused.message.ends_with(&format!("{n} claims wait before it")), "{}", refused.message);
    }
    assert_eq!(queue(&mut held.raw).await, calls);
    // A call that does not wait does not overtake, either.
    held.n1.detached(0, "data", &held.claim).await.unwrap();
    let refused = held.n2.claim(1, "data").await.unwrap_err();
    assert_eq!((refused.kind.as_str(), refused.holders[0].as_str()), ("ClaimConflict", "n1/c0"));
    let mut order = Vec::new();
    let all = calls.iter().enumerate().map(|(n, call)| {
        let node = nodes[n % 2];
        async move {
            let claim = granted(node, n % 2, call).await.claim;
            let at = Instant::now();
            end(node, n % 2, call, &claim).await;
            (at, call.clone())
        }
    });
    for (at, call) in futures_util::future::join_all(all).await {
        order.push((at, call));
    }
    order.sort();
    assert_eq!(order.into_iter().map(|(_, call)| call).collect::<Vec<_>>(), calls);
    assert!(queue(&mut held.raw).await.is_empty() && holders(&mut held.raw).await.is_empty());
}

/// n-trusted may claim for n2. An operator blocks it while its claim waits.
#[tokio::test]
async fn claim_of_a_blocked_caller_is_not_granted() {
    let mut held = held().await;
    let trusted = held.site.node("n-trusted");
    let _session = trusted.join(0).await;
    let ask = ClaimAsk { node: "n2".into(), ..waits_briefly(&trusted, "data", "next") };
    let status = trusted.client(0).claim(ask).await.unwrap_err();
    assert!(is_queued(&status), "{status:?}");
    enter(&held.n2, 1, "last").await;
    // Each end of a claim grants from the front, in its transaction. The other server looks at the queue only later.
    let block = Change::Block(BlockAsk { reason: "stolen".into() });
    set(&held.site, 1, "n-trusted", block).await.unwrap();
    held.n1.detached(0, "data", &held.claim).await.unwrap();
    let claim = granted(&held.n2, 1, "last").await.claim;
    assert!(queue(&mut held.raw).await.is_empty());
    assert_eq!(holders(&mut held.raw).await, ["n2/last"]);
    end(&held.n2, 1, "last", &claim).await;
}

#[tokio::test]
async fn end_of_a_claim_grants_in_its_transaction() {
    let mut held = held().await;
    enter(&held.n2, 1, "next").await;
    held.n1.detached(0, "data", &held.claim).await.unwrap();
    let all = held.raw.below(&format!("{DATA}/")).await;
    let revision = |part: &str| {
        let kv = all.iter().find(|kv| kv.key.starts_with(format!("{DATA}/{part}").as_bytes()));
        kv.unwrap_or_else(|| panic!("no {part}")).mod_revision
    };
    assert_eq!(revision("past/"), revision("claim/n2/next"));
    assert_eq!(revision("head"), revision("claim/n2/next"));
    assert!(queue(&mut held.raw).await.is_empty());
    let value = all.iter().find(|kv| kv.key.ends_with(b"claim/n2/next")).unwrap();
    let value: serde_json::Value = serde_json::from_slice(&value.value).unwrap();
    assert_eq!((value["state"].as_str(), value.get("keeper")), (Some("taken"), None));
    let claim = granted(&held.n2, 1, "next").await.claim;
    assert_eq!(value["id"], claim);
}

#[tokio::test]
async fn withdraw_and_grant_have_one_outcome() {
    let mut held = held().await;
    let mut claim = held.claim.clone();
    let (mut taken, mut withdrawn) = (0, 0);
    for n in 0..30 {
        let call = format!("c{n}");
        enter(&held.n2, 1, &call).await;
        let mut client = held.n2.client(n % 2);
        // The first of three rounds has Withdraw first, the second one the release, and the third one both at once.
        let after =
            async |at| tokio::time::sleep(Duration::from_millis(if n % 3 == at { 40 } else { 0 })).await;
        let released = async {
            after(0).await;
            held.n1.detached(0, "data", &claim).await.unwrap();
        };
        let withdrawn_call = async {
            after(1).await;
            client.withdraw(name(&held.n2, "data", &call)).await
        };
        let (answer, ()) = tokio::join!(withdrawn_call, released);
        let is_taken = answer.unwrap().into_inner().taken;
        let due = if is_taken { vec![format!("n2/{call}")] } else { vec![] };
        assert_eq!(holders(&mut held.raw).await, due, "round {n}");
        assert!(queue(&mut held.raw).await.is_empty());
        // The same again.
        let again = client.withdraw(name(&held.n2, "data", &call)).await.unwrap().into_inner();
        assert_eq!(again.taken, is_taken);
        assert_eq!(holders(&mut held.raw).await, due, "round {n}");
        match is_taken {
            true => {
                taken += 1;
                let owed = Owed { consumer: call.clone(), call: call.clone(), ..held.n2.owed("data", "") };
                held.n2.client(1).detached(owed).await.unwrap();
            }
            false => withdrawn += 1,
        }
        claim = held.n1.claim(0, "data").await.unwrap();
    }
    println!("taken {taken}, withdrawn {withdrawn}");
    assert!(withdrawn > 0 && taken > 0);
}

#[tokio::test]
async fn late_withdraw_ends_nothing_newer() {
    let mut held = held().await;
    enter(&held.n2, 1, "a").await;
    let mut client = held.n2.client(0);
    let (of_a, of_b) = (name(&held.n2, "data", "a"), name(&held.n2, "data", "b"));
    // Another node has no call of this name.
    held.n1.client(0).withdraw(name(&held.n1, "data", "a")).await.unwrap();
    assert_eq!(queue(&mut held.raw).await, ["a"]);
    assert!(!client.withdraw(of_a.clone()).await.unwrap().into_inner().taken);
    let again = ClaimAsk { call: "b".into(), ..waits_briefly(&held.n2, "data", "a") };
    assert!(is_queued(&held.n2.client(1).claim(again.clone()).await.unwrap_err()));
    client.withdraw(of_a.clone()).await.unwrap();
    assert_eq!(queue(&mut held.raw).await, ["a"], "the later call of the same consumer stays");
    // A Detached by the later call is a Withdraw, too.
    held.n1.detached(0, "data", &held.claim).await.unwrap();
    client.withdraw(of_a).await.unwrap();
    assert_eq!(holders(&mut held.raw).await, ["n2/a"]);
    assert!(client.withdraw(of_b).await.unwrap().into_inner().taken);
    let claim = held.n2.client(1).claim(again).await.unwrap().into_inner().claim;
    end(&held.n2, 1, "a", &claim).await;
    assert!(holders(&mut held.raw).await.is_empty());
}

#[tokio::test]
async fn call_keeps_its_place_when_its_server_dies() {
    let mut held = held().await;
    enter(&held.n2, 1, "first").await;
    let before = held.raw.below(&format!("{DATA}/queue/")).await.remove(0);
    let n3 = held.site.node("n3");
    let _third = n3.join(0).await;
    eventually("the server knows the plugin", async || {
        is_queued(&n3.client(0).claim(waits_briefly(&n3, "data", "second")).await.unwrap_err())
    })
    .await;
    held.site.servers[1].kill();
    let _session = held.n2.join(0).await;
    enter(&held.n2, 0, "first").await;
    assert_eq!(queue(&mut held.raw).await, ["first", "second"]);
    let after = held.raw.below(&format!("{DATA}/queue/")).await.remove(0);
    assert_eq!((&before.key, before.create_revision), (&after.key, after.create_revision));
    let [before, after] = [before, after].map(|kv| String::from_utf8(kv.value).unwrap());
    assert_ne!(before, after, "the entry names the server that was asked last");
    held.n1.detached(0, "data", &held.claim).await.unwrap();
    assert_eq!(holders(&mut held.raw).await, ["n2/first"]);
    let claim = granted(&held.n2, 0, "first").await.claim;
    end(&held.n2, 0, "first", &claim).await;
    assert_eq!(holders(&mut held.raw).await, ["n3/second"]);
}

#[tokio::test]
async fn wait_ends_with_its_time() {
    let mut held = held().await;
    let ask = ClaimAsk { queue_ms: 700, ..waits(&held.n2, "data", "a") };
    let begun = Instant::now();
    let status = held.n2.client(1).claim(ask.clone()).await.unwrap_err();
    assert!(!is_queued(&status) && begun.elapsed() >= Duration::from_millis(700), "{status:?}");
    assert_eq!(Refusal::of(&status).kind, "ClaimConflict");
    assert!(queue(&mut held.raw).await.is_empty());
    // The caller asks no more.
    let ask = ClaimAsk { answer_ms: 1, ..ask };
    assert!(is_queued(&held.n2.client(1).claim(ask.clone()).await.unwrap_err()));
    assert_eq!(queue(&mut held.raw).await, ["a"]);
    eventually("the entry is gone", async || queue(&mut held.raw).await.is_empty()).await;
    // The last try of a call does not wait.
    enter(&held.n2, 1, "b").await;
    let last = ClaimAsk { queue_ms: 0, ..waits(&held.n2, "data", "b") };
    let status = held.n2.client(1).claim(last).await.unwrap_err();
    assert!(!is_queued(&status) && queue(&mut held.raw).await.is_empty());
}

#[tokio::test]
async fn entry_of_a_call_that_asks_no_more_ends() {
    let mut held = held().await;
    let n3 = held.site.node("n3");
    let session = n3.join(0).await;
    eventually("the server knows the plugin", async || {
        is_queued(&n3.client(0).claim(waits_briefly(&n3, "data", "away")).await.unwrap_err())
    })
    .await;
    let begun = Instant::now();
    let waits_long = |call| ClaimAsk { queue_ms: 600_000, ..waits_briefly(&held.n2, "data", call) };
    assert!(is_queued(&held.n2.client(1).claim(waits_long("deserted")).await.unwrap_err()));
    assert!(is_queued(&held.n2.client(1).claim(waits_long("stays")).await.unwrap_err()));
    // The first entry ends last. Before that nothing is granted, for its node is away.
    tokio::time::sleep(Duration::from_secs(12)).await;
    assert!(is_queued(&held.n2.client(1).claim(waits_long("stays")).await.unwrap_err()));
    assert!(is_queued(&n3.client(0).claim(waits_briefly(&n3, "data", "away")).await.unwrap_err()));
    drop(session);
    eventually("the node is away", async || held.raw.below("/csid/v1/session/n3/").await.is_empty()).await;
    held.n1.detached(0, "data", &held.claim).await.unwrap();
    assert!(holders(&mut held.raw).await.is_empty(), "a node that may be off was granted a claim");
    let (mut seen, mut last) = (Vec::new(), String::new());
    let mut again = None;
    while seen.last().is_none_or(|(_, queue): &(Duration, Vec<String>)| !queue.is_empty()) {
        assert!(begun.elapsed() < Duration::from_secs(150), "{seen:?}: {last}");
        if let Err(status) = held.n2.client(1).claim(waits_long("stays")).await {
            last = format!("{status:?}");
            // On a machine that stands still for a while the server ends its sessions.
            if Refusal::of(&status).kind == "Unavailable"
                && let Ok((First::Welcome(_), session)) = held.n2.say_hello(1).await
            {
                again = Some(session);
            }
        }
        let now = queue(&mut held.raw).await;
        if seen.last().is_none_or(|(_, last)| *last != now) {
            seen.push((begun.elapsed(), now));
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    drop(again);
    let granted = holders(&mut held.raw).await;
    assert!(granted.len() == 1, "{seen:?} {granted:?}");
    assert!(seen.iter().all(|(at, queue)| at.as_secs() >= 55 || queue.len() == 3), "{seen:?}");
}

#[tokio::test]
async fn queue_is_bounded() {
    let mut held = held().await;
    let limited = Site::start_with(1, "max-claims = 3").await;
    let n1 = limited.node("n1");
    let _session = n1.join(0).await;
    let other = limited.node("n2");
    let _other = other.join(0).await;
    for volume in ["a", "b", "c"] {
        limited.register(volume, "single-node-writer").await;
    }
    n1.claim(0, "a").await.unwrap();
    other.claim(0, "b").await.unwrap();
    for (call, due) in [("1", None), ("2", None), ("3", Some(Code::ResourceExhausted))] {
        let status = n1.client(0).claim(waits_briefly(&n1, "b", call)).await.unwrap_err();
        assert_eq!(is_queued(&status), due.is_none(), "{status:?}");
        assert!(due.is_none_or(|due| status.code() == due), "{status:?}");
    }
    let refused = n1.claim(0, "c").await.unwrap_err();
    assert_eq!(refused.kind, "RateLimited", "what waits counts");
    // The volume's own limit, by entries that a server wrote.
    enter(&held.n2, 1, "first").await;
    let entry = held.raw.below(&format!("{DATA}/queue/")).await.remove(0);
    let (key, value) = (String::from_utf8(entry.key).unwrap(), String::from_utf8(entry.value).unwrap());
    for n in 2..=1024 {
        let (key, value) = (
            key.replace("0000000000000001", &format!("{n:016x}")),
            // Few users have so many claims of a volume.
            value.replace("first", &format!("c{n}")).replace("\"uid\":1000", &format!("\"uid\":{n}")),
        );
        held.raw.put(&key, &value).await;
    }
    let mut last = None;
    eventually("the server has the entries", async || {
        let status = held.n2.client(1).claim(waits_briefly(&held.n2, "data", "more")).await.unwrap_err();
        last = Some(Refusal::of(&status));
        !is_queued(&status)
    })
    .await;
    let last = last.unwrap();
    assert_eq!((last.code, last.kind.as_str()), (Code::ResourceExhausted, "RateLimited"), "{last:?}");
    assert!(last.message.contains("1024"), "{}", last.message);

    // A recovery ends them all, in more than one transaction.
    restored(&held.site, 0, 1).await.unwrap();
    let mut sessions = Vec::new();
    for (node, server) in [(&held.n1, 0), (&held.n2, 1)] {
        sessions.push(welcome(node, server).await.1);
        hold(node, server, page(node, 2, vec![], true)).await.unwrap();
    }
    resumed(&held.site, 2).await;
    assert_eq!(queue(&mut held.raw).await, Vec::<String>::new());
}

#[tokio::test]
async fn attached_volume_goes_to_the_next_of_the_queue() {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 1).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let (n2, _two) = user(&site, "n2", 1).await;
    let mut raw = site.raw().await;
    let (first, _) = tokio::join!(granted(&n1, 0, "web"), controller.publish());
    enter(&n2, 1, "next").await;
    end(&n1, 0, "web", &first.claim).await;
    assert_eq!(queue(&mut raw).await, ["next"], "the volume is attached to the first node still");
    controller.unpublish().await;
    // The claim goes on without its caller.
    let call = controller.called().await;
    assert!(is_publish(&call) && node_id(&call) == "id of n2", "{call:?}");
    assert_eq!((queue(&mut raw).await, holders(&mut raw).await), (vec![], vec!["n2/next".to_owned()]));
    controller.end(&call, attached("/dev/y")).await;
    let next = granted(&n2, 1, "next").await;
    assert_eq!(next.publish_context["device"], "/dev/y");
}

#[tokio::test]
async fn withdrawn_claim_that_is_pending_is_undone() {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 1).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let (n2, _two) = user(&site, "n2", 1).await;
    let mut raw = site.raw().await;
    let asks = tokio::spawn({
        let (mut client, ask) = (n1.client(0), waits(&n1, "data", "web"));
        async move { client.claim(ask).await }
    });
    let call = controller.called().await;
    enter(&n2, 1, "next").await;
    let withdrawn = n1.client(1).withdraw(name(&n1, "data", "web")).await.unwrap().into_inner();
    assert!(!withdrawn.taken);
    assert!(!n1.client(0).withdraw(name(&n1, "data", "web")).await.unwrap().into_inner().taken);
    controller.end(&call, attached("/dev/x")).await;
    let undo = controller.called().await;
    assert!(!is_publish(&undo) && node_id(&undo) == "id of n1", "{undo:?}");
    assert_eq!(queue(&mut raw).await, ["next"], "the volume was granted before it was detached");
    controller.end(&undo, How::Answer(Answer::default())).await;
    asks.await.unwrap().expect_err("the claim was withdrawn");
    let (next, _) = tokio::join!(granted(&n2, 1, "next"), controller.publish());
    assert_eq!(holders(&mut raw).await, ["n2/next"]);
    end(&n2, 1, "next", &next.claim).await;
}

#[tokio::test]
async fn reader_does_not_overtake_a_waiting_writer() {
    let site = Site::start(1).await;
    let mut change = register("data", "single-node-writer");
    let Some(What::Register(of)) = &mut change.what else { panic!() };
    let readers =
        Capability { access_mode: "multi-node-reader-only".into(), attachment_mode: "file-system".into() };
    of.spec.as_mut().unwrap().capabilities.push(readers);
    site.operator(0, "all").change(change).await.unwrap();
    site.register("known", "single-node-writer").await;
    let node = site.node("n1");
    let _session = node.join(0).await;
    node.claim(0, "known").await.unwrap();
    let reads = |call: &str| ClaimAsk {
        r#use: Some(Use {
            mode: "read".into(),
            access_mode: "multi-node-reader-only".into(),
            attachment_mode: "file-system".into(),
        }),
        ..waits_briefly(&node, "data", call)
    };
    let mut raw = site.raw().await;
    let mut client = node.client(0);
    let first = client.claim(reads("r1")).await.unwrap().into_inner().claim;
    client.claim(reads("r2")).await.unwrap();
    enter(&node, 0, "writer").await;
    for reader in ["r3", "r4"] {
        assert!(is_queued(&client.claim(reads(reader)).await.unwrap_err()), "a reader overtook the writer");
    }
    end(&node, 0, "r1", &first).await;
    assert_eq!(queue(&mut raw).await, ["writer", "r3", "r4"]);
    // Without the writer both readers are granted in one transaction.
    client.withdraw(name(&node, "data", "writer")).await.unwrap();
    assert!(queue(&mut raw).await.is_empty());
    let revisions: Vec<_> = raw.below(&format!("{DATA}/claim/")).await;
    let revision = |consumer: &str| {
        let key = format!("{DATA}/claim/n1/{consumer}");
        revisions.iter().find(|kv| kv.key == key.as_bytes()).unwrap().mod_revision
    };
    assert_eq!(revision("r3"), revision("r4"));
}

/// Claims, holds and releases a volume again and again, at whichever server answers. Counts the holders.
async fn work(node: Node, servers: usize, rounds: usize, holding: &AtomicUsize) {
    let mut at = 0;
    let mut _session = None;
    for round in 0..rounds {
        let call = format!("{} {round}", node.hello.journal_id);
        let ask = ClaimAsk { call: call.clone(), queue_ms: 120_000, ..node.ask("data", "web") };
        let begun = Instant::now();
        let claim = loop {
            assert!(begun.elapsed() < Duration::from_secs(100), "{call} was not granted");
            match node.client(at).claim(ask.clone()).await {
                Ok(granted) => break granted.into_inner().claim,
                Err(status) if is_queued(&status) => {}
                Err(status) => {
                    let kind = Refusal::of(&status).kind;
                    assert!(
                        ["", "Unavailable", "PluginUnavailable", "Busy"].contains(&kind.as_str()),
                        "{status:?}"
                    );
                    if ["", "Unavailable"].contains(&kind.as_str()) {
                        at = (at + 1) % servers;
                        if let Ok((First::Welcome(_), mut session)) = node.say_hello(at).await {
                            session.report(csi_proto::cluster::v1::Attaches::No).await;
                            _session = Some(session);
                        }
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        };
        assert_eq!(holding.fetch_add(1, Ordering::SeqCst), 0, "two nodes have the volume");
        tokio::time::sleep(Duration::from_millis(30)).await;
        holding.fetch_sub(1, Ordering::SeqCst);
        while node.detached(at, "data", &claim).await.is_err() {
            at = (at + 1) % servers;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

const ROUNDS: usize = 15;

/// Returns the work of four nodes.
async fn works<'a>(site: &Site, holding: &'a AtomicUsize) -> impl Future<Output = Vec<()>> + use<'a> {
    site.register("data", "single-node-writer").await;
    let nodes: Vec<Node> = (1..=4).map(|n| site.node(&format!("n{n}"))).collect();
    futures_util::future::join_all(nodes.into_iter().map(move |node| work(node, 2, ROUNDS, holding)))
}

async fn nothing_is_left(site: &Site) {
    let mut raw = site.raw().await;
    assert!(queue(&mut raw).await.is_empty() && holders(&mut raw).await.is_empty());
}

#[tokio::test]
async fn queue_survives_the_end_of_etcds_leader() {
    let mut site = Site::start_on(3, 2, "").await;
    let holding = AtomicUsize::new(0);
    let all = works(&site, &holding).await;
    let leader = site.etcd.leader().await;
    let kill = async {
        tokio::time::sleep(Duration::from_millis(1500)).await;
        // The other members are asked for what is left.
        let mut killed = site.etcd.members.remove(leader);
        killed.kill();
        killed
    };
    let _killed = tokio::join!(all, kill);
    nothing_is_left(&site).await;
}

#[tokio::test]
async fn queue_survives_servers_that_are_killed() {
    let mut site = Site::start(2).await;
    let holding = AtomicUsize::new(0);
    let all = works(&site, &holding).await;
    let kills = async {
        for n in 0..6 {
            tokio::time::sleep(Duration::from_millis(700 + 130 * n)).await;
            let server = (n % 2) as usize;
            site.servers[server].kill();
            tokio::time::sleep(Duration::from_millis(300)).await;
            site.servers[server] = site.start_server(server);
        }
    };
    tokio::join!(all, kills);
    nothing_is_left(&site).await;
}

/// The node that waits is away, so nothing is granted when the claim ends.
#[tokio::test]
async fn volume_that_is_waited_for_is_not_deleted() {
    let Held { site, n1, n2, mut raw, claim, _sessions: [_first, second] } = held().await;
    enter(&n2, 1, "c1").await;
    drop(second);
    eventually("n2 is away", async || site.raw().await.below("/csid/v1/session/n2/").await.is_empty()).await;
    end(&n1, 0, "web", &claim).await;
    assert_eq!((holders(&mut raw).await.len(), queue(&mut raw).await.len()), (0, 1));
    let mut operator = site.operator(0, "all");
    let change = |what| ChangeAsk { what: Some(what) };
    let delete = DeleteAsk { namespace: String::new(), volume: "data".into(), ..Default::default() };
    let refused = operator.change(change(What::Delete(delete))).await.unwrap_err();
    let kind = Refusal::of(&refused).kind;
    let delete = Deregister { namespace: String::new(), volume: "data".into(), ..Default::default() };
    assert_eq!(kind, Refusal::of(&operator.change(change(What::Deregister(delete))).await.unwrap_err()).kind);
    let _session = n2.join(1).await;
    granted(&n2, 1, "c1").await;
    assert_eq!(holders(&mut raw).await, ["n2/c1"]);
}

/// A backup has a claim that waits, and nobody waits for it any more. No csid would end what it was granted.
#[tokio::test]
async fn wait_of_a_backup_is_granted_nothing() {
    let Held { site, n1, n2, mut raw, claim, _sessions } = held().await;
    let known = n2.claim(1, "known").await.unwrap();
    enter(&n2, 1, "c0").await;
    assert_eq!(queue(&mut raw).await, ["c0"]);
    restored(&site, 0, 1).await.unwrap();
    let sessions = [n1.join(0).await, n2.join(1).await];
    hold(&n1, 0, page(&n1, 2, vec![held_claim(&n1, "data", &claim)], true)).await.unwrap();
    hold(&n2, 1, page(&n2, 2, vec![held_claim(&n2, "known", &known)], true)).await.unwrap();
    resumed(&site, 2).await;
    drop(sessions);
    let _sessions = [n1.join(0).await, n2.join(1).await];
    n1.detached(0, "data", &claim).await.unwrap();
    assert_eq!((queue(&mut raw).await, holders(&mut raw).await), (vec![], vec![]));
    // A call that waits still asks again.
    assert_eq!(granted(&n2, 1, "c1").await.volume.map(|_| ()), Some(()));
    assert_eq!(holders(&mut raw).await, ["n2/c1"]);
}
