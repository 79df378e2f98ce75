//! Nodes that are off by an operator's word, nodes that drain, and nodes that are forgotten.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{
    Attaches, BlockAsk, DrainAsk, FenceAsk, ForgetAsk, Hello, NodeAsk, NodeChange, NodeRow, UndrainAsk,
};
use rustix::process::Signal;

use crate::attach::{Controller, user};
use crate::operators::{csictl, operator};
use crate::site::{First, Node, Refusal, Session, Site, eventually, open};

pub async fn set(site: &Site, server: usize, node: &str, change: Change) -> Result<NodeRow, Refusal> {
    let ask = NodeChange { node: node.into(), change: Some(change) };
    let set = site.admin(server, "all").set_node(ask).await;
    set.map(tonic::Response::into_inner).map_err(|status| Refusal::of(&status))
}

pub async fn show(site: &Site, node: &str) -> NodeRow {
    let ask = NodeAsk { node: node.into() };
    site.admin(0, "all").node(ask).await.unwrap().into_inner()
}

/// Fences a node, as an operator who has just looked at it.
pub async fn fence(site: &Site, server: usize, node: &str) -> Result<NodeRow, Refusal> {
    let revision = show(site, node).await.revision;
    set(site, server, node, Change::Fence(FenceAsk { reason: "no power".into(), revision, by_hand: false }))
        .await
}

/// Says Hello, and returns the word of the refusal. `None`: the node has joined, and its session has ended.
async fn refused(node: &Node, hello: Hello) -> Option<String> {
    match open(&mut node.client(0), hello).await.unwrap().0 {
        First::Welcome(_) => None,
        First::Refused(reason) => Some(reason),
    }
}

async fn joined(node: &Node) -> Session {
    let mut session = node.join(0).await;
    session.report(Attaches::No).await;
    session
}

#[tokio::test]
async fn fenced_node_has_no_claims_and_no_session() {
    let site = Site::start(2).await;
    for volume in ["data", "more"] {
        site.register(volume, "single-node-writer").await;
    }
    let (n1, n2) = (site.node("n1"), site.node("n2"));
    let (mut first, _second) = (joined(&n1).await, joined(&n2).await);
    let claim = n1.claim(0, "data").await.unwrap();
    n1.claim(0, "more").await.unwrap();
    assert_eq!(n2.claim(0, "data").await.unwrap_err().kind, "ClaimConflict");
    let row = fence(&site, 1, "n1").await.unwrap();
    let of = row.fence.unwrap();
    assert_eq!((row.state.as_str(), row.claims, of.number), ("fenced", 0, 1));
    assert_eq!(
        (of.by.as_str(), of.reason.as_str(), of.boot.as_str()),
        ("operator/all", "no power", "boot 1 of n1")
    );
    assert_eq!(
        first.next().await.unwrap_err().kind,
        "Busy",
        "the session has ended at the other server, too"
    );
    n2.claim(0, "data").await.unwrap();
    // The fenced machine goes on: nothing of it counts.
    n1.detached(0, "data", &claim).await.unwrap();
    assert_eq!(n2.claim(0, "data").await.map(drop), Ok(()), "its Detached has ended another node's claim");
    assert!(
        matches!(n1.claim(0, "more").await, Err(of) if ["Unavailable", "Busy"].contains(&of.kind.as_str()))
    );
    assert_eq!(refused(&n1, n1.hello.clone()).await.as_deref(), Some("fenced"));
}

#[tokio::test]
async fn fenced_node_joins_clean_or_in_another_boot() {
    let site = Site::start(1).await;
    let node = site.node("n1");
    drop(joined(&node).await);
    for hello in
        [Hello { clean: 1, ..node.hello.clone() }, Hello { boot: "boot 2".into(), ..node.hello.clone() }]
    {
        fence(&site, 0, "n1").await.unwrap();
        assert_eq!(
            refused(
                &node,
                Hello { boot: show(&site, "n1").await.machine.unwrap().boot, ..node.hello.clone() }
            )
            .await
            .as_deref(),
            Some("fenced")
        );
        eventually("the node joins", async || refused(&node, hello.clone()).await.is_none()).await;
        let row = show(&site, "n1").await;
        assert_eq!((row.state.as_str(), row.fence.unwrap().reason.as_str()), ("ready", "no power"));
    }
    assert_eq!(show(&site, "n1").await.fence.unwrap().number, 2);
}

/// Only the number of the last fence, by which the node was refused, says that the node has nothing.
#[tokio::test]
async fn lie_of_a_fenced_node_is_refused() {
    let site = Site::start(1).await;
    let node = site.node("n1");
    drop(joined(&node).await);
    fence(&site, 0, "n1").await.unwrap();
    let clean = |clean| Hello { clean, ..node.hello.clone() };
    eventually("the node joins", async || refused(&node, clean(1)).await.is_none()).await;
    fence(&site, 0, "n1").await.unwrap();
    for number in [0, 1, 3, u64::MAX] {
        assert_eq!(refused(&node, clean(number)).await.as_deref(), Some("fenced"), "{number}");
        // Another machine with the node's key is not the fenced one.
        let another = Hello { machine_id: "another".into(), ..clean(number) };
        assert!(refused(&node, another).await.is_some(), "{number}");
        assert_eq!(show(&site, "n1").await.state, "fenced", "{number}");
    }
    eventually("the node joins", async || refused(&node, clean(2)).await.is_none()).await;
}

#[tokio::test]
async fn fence_names_the_row_that_the_operator_saw() {
    let site = Site::start(1).await;
    let node = site.node("n1");
    let mut session = joined(&node).await;
    let seen = show(&site, "n1").await.revision;
    session.report_name("i-1").await;
    eventually("the row has changed", async || show(&site, "n1").await.revision > seen).await;
    for (revision, kind) in [(0, "InvalidArgument"), (seen, "Busy")] {
        let refused = set(&site, 0, "n1", Change::Fence(FenceAsk { revision, ..FenceAsk::default() })).await;
        assert_eq!(refused.unwrap_err().kind, kind);
    }
    assert_eq!(show(&site, "n1").await.state, "ready");
    let unknown = set(&site, 0, "n9", Change::Fence(FenceAsk { revision: 1, ..FenceAsk::default() })).await;
    assert_eq!(unknown.unwrap_err().kind, "NotFound");
}

/// Writes a fence command that notes its node in a file, and then does what `text` says. Returns the keys of the configuration, and the file.
pub fn command(directory: &Path, text: &str, keys: &str) -> (String, PathBuf) {
    let [program, ran] = ["fence", "ran"].map(|name| directory.join(name));
    fs::write(&program, format!("#!/bin/sh\necho \"$1\" >> {}\n{text}\n", ran.display())).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    (format!("[fence]\ncommand = {program:?}\n{keys}\n"), ran)
}

#[tokio::test]
async fn fence_command_runs_before_the_fence() {
    let directory = tempfile::tempdir().unwrap();
    let allowed = directory.path().join("off");
    let (keys, ran) = command(directory.path(), &format!("test -e {} || exit 7", allowed.display()), "");
    let site = Site::start_with(2, &keys).await;
    site.register("data", "single-node-writer").await;
    let (node, other) = (site.node("n1"), site.node("n2"));
    let (_session, _other) = (joined(&node).await, joined(&other).await);
    node.claim(0, "data").await.unwrap();
    let refusal = fence(&site, 0, "n1").await.unwrap_err();
    assert_eq!(refusal.kind, "Unavailable", "{}", refusal.message);
    assert!(refusal.message.ends_with("has exited with 7"), "{}", refusal.message);
    assert_eq!(show(&site, "n1").await.state, "ready");
    assert_eq!(other.claim(0, "data").await.unwrap_err().kind, "ClaimConflict");
    // A row that the operator has not seen is refused before the command.
    let old = Change::Fence(FenceAsk { reason: String::new(), revision: 1, by_hand: false });
    assert_eq!(set(&site, 0, "n1", old).await.unwrap_err().kind, "Busy");
    assert_eq!(fs::read_to_string(&ran).unwrap(), "n1\n");
    fs::write(&allowed, "").unwrap();
    assert_eq!(fence(&site, 1, "n1").await.unwrap().state, "fenced");
    assert_eq!(fence(&site, 1, "n1").await.unwrap().claims, 0);
    assert_eq!(fs::read_to_string(&ran).unwrap(), "n1\nn1\n", "a fenced node's machine is off already");
    other.claim(0, "data").await.unwrap();
}

#[tokio::test]
async fn operators_word_replaces_the_command() {
    let directory = tempfile::tempdir().unwrap();
    let (keys, ran) = command(directory.path(), "sleep 600", "seconds = 1");
    let site = Site::start_with(1, &keys).await;
    drop(joined(&site.node("n1")).await);
    let refusal = fence(&site, 0, "n1").await.unwrap_err();
    assert!(refusal.message.ends_with("has not ended in 1 s, and was killed"), "{}", refusal.message);
    assert_eq!(show(&site, "n1").await.state, "ready");
    let file = operator(&site, "all");
    let said = csictl(&file, "node fence n1 --reason plug --without-command --confirm n1").await;
    assert_eq!(said.code, Some(0), "{said:?}");
    assert_eq!(show(&site, "n1").await.state, "fenced");
    assert_eq!(fs::read_to_string(&ran).unwrap(), "n1\n");
}

/// It takes 60 s at least, the shortest time that the configuration allows.
#[tokio::test]
async fn node_away_for_its_time_is_fenced() {
    let directory = tempfile::tempdir().unwrap();
    let (keys, ran) = command(directory.path(), "", "after-seconds = 60");
    let site = Site::start_with(2, &keys).await;
    for volume in ["data", "more", "rest"] {
        site.register(volume, "single-node-writer").await;
    }
    let nodes = ["n1", "n2", "n3"].map(|name| site.node(name));
    let [first, second, third] = &nodes;
    let [gone, _stays, _stays_too] = [joined(first).await, joined(second).await, joined(third).await];
    first.claim(0, "data").await.unwrap();
    second.claim(0, "more").await.unwrap();
    third.claim(0, "rest").await.unwrap();
    drop(gone);
    let begun = Instant::now();
    loop {
        let row = show(&site, "n1").await;
        if row.state == "fenced" && row.claims == 0 {
            let fence = row.fence.unwrap();
            assert!(fence.by.starts_with("server/s"), "{}", fence.by);
            assert_eq!(fence.reason, "without a session for 60 s");
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(120), "{row:?}");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(begun.elapsed() >= Duration::from_secs(55), "{:?}", begun.elapsed());
    assert_eq!(fs::read_to_string(&ran).unwrap(), "n1\n", "one server acts, once");
    second.claim(0, "data").await.unwrap();
    for name in ["n2", "n3"] {
        assert_eq!(show(&site, name).await.state, "ready");
    }
}

/// An operator who fences need not accept nodes, and the reverse.
#[tokio::test]
async fn fence_needs_its_own_grant() {
    let site = Site::start(1).await;
    drop(joined(&site.node("n1")).await);
    let revision = show(&site, "n1").await.revision;
    let change = Change::Fence(FenceAsk { revision, ..FenceAsk::default() });
    let ask = NodeChange { node: "n1".into(), change: Some(change) };
    let refused = site.admin(0, "anna").set_node(ask).await.unwrap_err();
    assert_eq!(Refusal::of(&refused).kind, "NotAuthorized");
    assert_eq!(show(&site, "n1").await.state, "ready");
}

/// Writes the fence of n1 as a server does that dies then.
async fn write_fence(site: &Site) {
    let mut raw = site.raw().await;
    let row = raw.below("/csid/v1/node/n1").await.remove(0);
    let mut value: serde_json::Value = serde_json::from_slice(&row.value).unwrap();
    value["state"] = "fenced".into();
    value["fence"] = serde_json::json!({
        "number": 4, "boot": "boot 1 of n1", "by": "operator/all", "reason": "", "since-usec": 1, "before": "ready",
    });
    raw.put("/csid/v1/node/n1", &value.to_string()).await;
}

/// A server died after it had written the fence.
#[tokio::test]
async fn repeated_fence_ends_the_claims_that_are_left() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let (node, other) = (site.node("n1"), site.node("n2"));
    let _session = joined(&node).await;
    node.claim(0, "data").await.unwrap();
    assert_eq!(show(&site, "n1").await.claims, 1);
    write_fence(&site).await;
    let row = fence(&site, 0, "n1").await.unwrap();
    assert_eq!((row.claims, row.fence.unwrap().number), (0, 4));
    let _session = joined(&other).await;
    other.claim(0, "data").await.unwrap();
}

#[tokio::test]
async fn claims_that_a_fence_has_left_end_by_a_server() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let (node, other) = (site.node("n1"), site.node("n2"));
    let _session = joined(&node).await;
    node.claim(0, "data").await.unwrap();
    write_fence(&site).await;
    eventually("the claim has ended", async || show(&site, "n1").await.claims == 0).await;
    assert_eq!(show(&site, "n1").await.fence.unwrap().number, 4);
    let _session = joined(&other).await;
    other.claim(0, "data").await.unwrap();
}

#[tokio::test]
async fn csictl_waits_for_the_end_of_a_fences_claims() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (node, _session) = user(&site, "n1", 0).await;
    let file = operator(&site, "all");
    let (claimed, _) = tokio::join!(node.claim(0, "data"), controller.publish());
    claimed.unwrap();
    let fence = "node fence n1 --reason dead --confirm n1 --wait";
    let said = csictl(&file, &format!("{fence} --deadline 1s --json")).await;
    let row: serde_json::Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!((said.code, &row["state"], &row["claims"]), (Some(1), &"fenced".into(), &1.into()));
    assert!(said.err.contains("node n1 still has claims: 1 claims end when"), "{said:?}");
    let ends = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        controller.unpublish().await
    };
    let (said, _) = tokio::join!(csictl(&file, fence), ends);
    assert_eq!((said.code, said.out.as_str()), (Some(0), ""), "{said:?}");
    assert!(said.err.contains("Node n1: 1 claims end when"), "{said:?}");
    assert_eq!(show(&site, "n1").await.claims, 0);
    assert_eq!(csictl(&file, fence).await.code, Some(0), "nothing is left to wait for");
}

#[tokio::test]
async fn volume_of_a_fenced_node_is_detached_first() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _first) = user(&site, "n1", 0).await;
    let (n2, _second) = user(&site, "n2", 0).await;
    let (claimed, call) = tokio::join!(n1.claim(0, "data"), controller.publish());
    claimed.unwrap();
    let row = fence(&site, 0, "n1").await.unwrap();
    assert_eq!((row.state.as_str(), row.claims), ("fenced", 1), "the claim is there until the detach");
    assert_eq!(n2.claim(0, "data").await.unwrap_err().kind, "ClaimConflict");
    let detach = controller.unpublish().await;
    assert!(detach.epoch > call.epoch);
    eventually("the claim is free", async || show(&site, "n1").await.claims == 0).await;
    let (claimed, _) = tokio::join!(n2.claim(0, "data"), controller.publish());
    claimed.unwrap();
}

#[tokio::test]
async fn blocked_node_is_fenced_and_stays_blocked() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let node = site.node("n1");
    let _session = joined(&node).await;
    node.claim(0, "data").await.unwrap();
    set(&site, 0, "n1", Change::Block(BlockAsk { reason: "stolen".into() })).await.unwrap();
    let row = fence(&site, 0, "n1").await.unwrap();
    assert_eq!(
        (row.state.as_str(), row.claims, row.block.unwrap().reason.as_str()),
        ("blocked", 0, "stolen")
    );
    let other_boot = Hello { boot: "boot 2".into(), ..node.hello.clone() };
    assert_eq!(refused(&node, other_boot).await.as_deref(), Some("blocked"));
}

#[tokio::test]
async fn draining_node_gets_nothing_more() {
    let site = Site::start(1).await;
    for volume in ["data", "more"] {
        site.register(volume, "single-node-writer").await;
    }
    let node = site.node("n1");
    let _session = joined(&node).await;
    let claim = node.claim(0, "data").await.unwrap();
    assert_eq!(set(&site, 0, "n1", Change::Drain(DrainAsk {})).await.unwrap().state, "draining");
    let refused = node.claim(0, "more").await.unwrap_err();
    assert!(refused.kind == "Busy" && refused.message.contains("draining"), "{refused:?}");
    let forget = || set(&site, 0, "n1", Change::Forget(ForgetAsk {}));
    assert!(forget().await.unwrap_err().message.contains("session"));
    node.detached(0, "data", &claim).await.unwrap();
    assert_eq!(set(&site, 0, "n1", Change::Undrain(UndrainAsk {})).await.unwrap().state, "ready");
    node.claim(0, "more").await.unwrap();
    assert!(forget().await.unwrap_err().message.contains("ready"));
}

#[tokio::test]
async fn node_without_claims_is_forgotten() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let node = site.node("n1");
    let session = joined(&node).await;
    let claim = node.claim(0, "data").await.unwrap();
    set(&site, 0, "n1", Change::Drain(DrainAsk {})).await.unwrap();
    drop(session);
    let forget = || set(&site, 0, "n1", Change::Forget(ForgetAsk {}));
    eventually("its claim keeps it", async || {
        forget().await.is_err_and(|of| of.message.contains("1 claims"))
    })
    .await;
    let session = node.join(0).await;
    node.detached(0, "data", &claim).await.unwrap();
    drop(session);
    eventually("it is forgotten", async || forget().await.is_ok()).await;
    assert_eq!(forget().await.map(|row| row.state), Ok(String::new()), "it is forgotten once");
    assert!(site.raw().await.below("/csid/v1/node/n1").await.is_empty());
    drop(joined(&node).await);
    assert_eq!(show(&site, "n1").await.state, "ready");
}

#[tokio::test]
async fn forgotten_controller_host_is_none() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    controller.leave().await;
    set(&site, 0, "c1", Change::Drain(DrainAsk {})).await.unwrap();
    let forget = || set(&site, 0, "c1", Change::Forget(ForgetAsk {}));
    eventually("it is forgotten", async || forget().await.is_ok()).await;
    let rows = site.raw().await.below("/csid/v1/plugin/").await;
    assert!(rows.iter().all(|row| !String::from_utf8_lossy(&row.value).contains("c1")), "{rows:?}");
}

/// The other server is killed between the fence and the end of the claims.
#[tokio::test]
async fn fence_goes_on_at_another_server() {
    let site = Site::start(2).await;
    let node = site.node("n1");
    let _session = joined(&node).await;
    for n in 0..40 {
        site.register(&format!("v{n}"), "single-node-writer").await;
        let claim = node.ask(&format!("v{n}"), "web");
        node.client(0).claim(claim).await.unwrap();
    }
    let revision = show(&site, "n1").await.revision;
    let change = Change::Fence(FenceAsk { revision, ..FenceAsk::default() });
    let (cut, ()) = tokio::join!(set(&site, 1, "n1", change.clone()), async {
        eventually("the fence is there", async || show(&site, "n1").await.state == "fenced").await;
        site.servers[1].signal(Signal::KILL);
    });
    // It may have been done before the kill.
    drop(cut);
    let row = set(&site, 0, "n1", change).await.unwrap();
    assert_eq!((row.state.as_str(), row.claims), ("fenced", 0));
}

#[tokio::test]
async fn csictl_fences_a_node_by_its_name() {
    let site = Site::start(1).await;
    let file = operator(&site, "all");
    drop(joined(&site.node("n1")).await);
    let said = csictl(&file, "node fence n1 --reason dead").await;
    assert!(said.code == Some(1) && said.err.contains("--confirm n1"), "{said:?}");
    let said = csictl(&file, "node fence n1 --reason dead --confirm n2").await;
    assert!(said.code == Some(1) && said.err.contains("nothing was done"), "{said:?}");
    assert_eq!(show(&site, "n1").await.state, "ready");
    let row = csictl(&file, "node fence n1 --reason dead --confirm n1 --json").await.json();
    assert_eq!((&row["state"], &row["fence"]["reason"]), (&"fenced".into(), &"dead".into()));
    assert!(csictl(&file, "node list").await.out.contains("fenced by operator/all dead"));
    let error = csictl(&file, "node drain n1 --json").await.error();
    assert_eq!(error["error"], "Busy", "{error}");
    eventually("it is forgotten", async || csictl(&file, "node forget n1").await.code == Some(0)).await;
    assert_eq!(csictl(&file, "node show n1 --json").await.error()["error"], "NotFound");
}
