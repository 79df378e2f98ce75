//! A node that drains: it learns so, and reports what is left.

use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::to_node::Is;
use csi_proto::cluster::v1::{
    Attaches, Drain, DrainAsk, DrainLeft, Drained, ForgetAsk, FromNode, NodeAsk, NodesAsk, UndrainAsk,
    from_node,
};

use crate::fence::{set, show};
use crate::operators::{csictl, operator};
use crate::site::{First, Node, Session, Site, eventually};

fn left(volume: &str, why: &str) -> DrainLeft {
    DrainLeft {
        namespace: "default".into(),
        volume: volume.into(),
        consumer: "web".into(),
        tag: String::new(),
        target: format!("/srv/{volume}"),
        why: why.into(),
    }
}

async fn report(session: &Session, drain: u64, count: u64, left: Vec<DrainLeft>) {
    let drained = Drained { left, count, since_usec: 7, drain };
    session.to_server.send(FromNode { is: Some(from_node::Is::Drained(drained)) }).await.unwrap();
}

/// Says Hello, and returns the number of the drain that the Welcome has.
async fn drain_of(node: &Node, server: usize) -> (u64, Session) {
    let (first, mut session) = node.say_hello(server).await.unwrap();
    let First::Welcome(welcome) = first else { panic!("{first:?}") };
    session.report(Attaches::No).await;
    (welcome.drain, session)
}

/// Waits for the next word about the node's drain.
async fn next_drain(session: &mut Session) -> u64 {
    match session.next().await.unwrap() {
        Some(Is::Drain(Drain { number })) => number,
        other => panic!("{other:?}"),
    }
}

/// Returns what each of two servers shows of the drain of n1.
async fn shown_by_both(site: &Site) -> [Option<Drained>; 2] {
    let at = async |server| {
        let mut drained = None;
        // A server may have lost etcd for a moment on a busy machine.
        eventually("the server answers", async || {
            let answer = site.admin(server, "all").node(NodeAsk { node: "n1".into() }).await;
            let is_there = answer.is_ok();
            drained = answer.ok().and_then(|row| row.into_inner().drained);
            is_there
        })
        .await;
        drained
    };
    [at(0).await, at(1).await]
}

/// Returns what both servers show, while the node reports nothing new.
async fn shown(site: &Site) -> Option<Drained> {
    let [one, other] = shown_by_both(site).await;
    assert_eq!(one, other, "a server shows another report");
    one
}

async fn shows(site: &Site, count: Option<u64>) {
    eventually(&format!("the servers show {count:?}"), async || {
        shown_by_both(site).await.iter().all(|of| of.as_ref().map(|of| of.count) == count)
    })
    .await;
}

#[tokio::test]
async fn node_learns_its_drain_and_reports_what_is_left() {
    let site = Site::start(2).await;
    let node = site.node("n1");
    let (drain, mut session) = drain_of(&node, 0).await;
    assert_eq!(drain, 0);
    // The other server has it written.
    set(&site, 1, "n1", Change::Drain(DrainAsk {})).await.unwrap();
    assert_eq!(next_drain(&mut session).await, 1);
    assert_eq!(shown(&site).await, None, "the node has reported nothing");
    report(&session, 1, 40, vec![left("data", "it is in use by psql (7)"), left("more", "it is claimed")])
        .await;
    shows(&site, Some(40)).await;
    let first = shown(&site).await.unwrap();
    assert_eq!((first.left.len(), first.left[0].why.as_str()), (2, "it is in use by psql (7)"));
    assert!(first.since_usec > 7, "the time is the server's");
    let mut pages = site.admin(1, "all").nodes(NodesAsk::default()).await.unwrap().into_inner();
    let listed = pages.message().await.unwrap().unwrap().nodes.remove(0).drained.unwrap();
    assert_eq!((listed.count, listed.left.len()), (40, 0), "a list is short");
    let said = csictl(&operator(&site, "all"), "node list").await;
    assert!(said.out.contains("40 mounts and claims are left"), "{said:?}");

    // It stays when the node and its server have gone.
    let revision = show(&site, "n1").await.revision;
    drop(session);
    let (drain, session) = drain_of(&node, 1).await;
    assert_eq!((drain, shown(&site).await), (1, Some(first.clone())));
    // The same report again is no change.
    report(&session, 1, 40, first.left.clone()).await;
    report(&session, 1, 1, vec![left("data", "it is in use by psql (7)")]).await;
    shows(&site, Some(1)).await;
    assert!(show(&site, "n1").await.revision > revision, "it has joined");
    let revision = show(&site, "n1").await.revision;
    report(&session, 1, 0, Vec::new()).await;
    shows(&site, Some(0)).await;
    assert_eq!(show(&site, "n1").await.revision, revision, "an operator's fence would be refused");
}

#[tokio::test]
async fn report_counts_for_its_drain_alone() {
    let site = Site::start(2).await;
    let mut node = site.node("n1");
    let (_, mut session) = drain_of(&node, 0).await;
    for drain in [1, 2] {
        set(&site, 0, "n1", Change::Drain(DrainAsk {})).await.unwrap();
        assert_eq!(next_drain(&mut session).await, drain);
        shows(&site, None).await;
        // Of a drain that is over, of none, and of one that has not begun.
        for other in [drain - 1, drain + 1] {
            report(&session, other, 0, Vec::new()).await;
        }
        report(&session, drain, 3, Vec::new()).await;
        shows(&site, Some(3)).await;
        set(&site, 0, "n1", Change::Undrain(UndrainAsk {})).await.unwrap();
        assert_eq!(next_drain(&mut session).await, 0);
        report(&session, drain, 9, Vec::new()).await;
        shows(&site, None).await;
    }
    set(&site, 0, "n1", Change::Drain(DrainAsk {})).await.unwrap();
    assert_eq!(next_drain(&mut session).await, 3);
    report(&session, 3, 0, Vec::new()).await;
    shows(&site, Some(0)).await;
    // What the host had in an earlier boot is nothing of this one.
    drop(session);
    node.reboot(0).await;
    assert_eq!(shown(&site).await, None);
    eventually("the node and its report are forgotten", async || {
        set(&site, 0, "n1", Change::Forget(ForgetAsk {})).await.is_ok()
    })
    .await;
    assert!(site.raw().await.below("/csid/v1/report/").await.is_empty());
}

#[tokio::test]
async fn lying_node_reports_little_and_of_itself() {
    let site = Site::start(2).await;
    let (node, other) = (site.node("n1"), site.node("n2"));
    let (_, mut session) = drain_of(&node, 0).await;
    let _other = other.join(0).await;
    for name in ["n1", "n2"] {
        set(&site, 0, name, Change::Drain(DrainAsk {})).await.unwrap();
    }
    assert_eq!(next_drain(&mut session).await, 1);
    let long = DrainLeft { why: "w".repeat(5_000), target: "\u{1b}[2J".into(), ..left("data", "") };
    report(&session, 1, u64::MAX, vec![long; 32]).await;
    shows(&site, Some(u64::MAX)).await;
    let kept = shown(&site).await.unwrap();
    assert_eq!(kept.left.len(), 32);
    assert!(kept.left.iter().all(|of| of.why.len() < 200 && of.target == " [2J"), "{kept:?}");
    assert_eq!(show(&site, "n2").await.drained, None, "it is another node's");

    for (count, lie) in [
        (33, vec![left("data", ""); 33]),
        (1, vec![left("data", ""); 2]),
        (1, vec![left("", "")]),
        (1, vec![DrainLeft { consumer: "c".repeat(129), ..left("data", "") }]),
    ] {
        let (drain, mut session) = drain_of(&node, 0).await;
        assert_eq!(drain, 1);
        report(&session, 1, count, lie).await;
        let end = session.next().await.unwrap_err();
        assert_eq!(end.kind, "InvalidArgument", "{end:?}");
    }
    assert_eq!(shown(&site).await, Some(kept), "a lie has changed something");
}

/// A node's clock may be wrong, or the node may lie.
#[tokio::test]
async fn time_of_a_report_is_the_servers() {
    let site = Site::start(2).await;
    let node = site.node("n1");
    let (_, mut session) = drain_of(&node, 0).await;
    set(&site, 0, "n1", Change::Drain(DrainAsk {})).await.unwrap();
    assert_eq!(next_drain(&mut session).await, 1);
    let begun = now_usec();
    for (since_usec, count) in [0, 1, u64::MAX].into_iter().zip(1..) {
        let drained = Drained { left: Vec::new(), count, since_usec, drain: 1 };
        session.to_server.send(FromNode { is: Some(from_node::Is::Drained(drained)) }).await.unwrap();
        shows(&site, Some(count)).await;
        let of_servers = shown(&site).await.unwrap().since_usec;
        assert!((begun..=now_usec()).contains(&of_servers), "{since_usec}: {of_servers}");
    }
}

fn now_usec() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    u64::try_from(now.as_micros()).unwrap()
}

#[tokio::test]
async fn csictl_waits_until_a_node_is_drained() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let (node, file) = (site.node("n1"), operator(&site, "all"));
    let (_, mut session) = drain_of(&node, 0).await;
    let claim = node.claim(0, "data").await.unwrap();
    let said = csictl(&file, "node drain n1 --wait --deadline 1s").await;
    assert_eq!(said.code, Some(1), "{said:?}");
    assert!(said.err.contains("has not reported yet what is left"), "{said:?}");
    assert_eq!(next_drain(&mut session).await, 1);
    report(&session, 1, 1, vec![left("data", "it is in use by psql (7)")]).await;
    eventually("the report is there", async || show(&site, "n1").await.drained.is_some()).await;
    let said = csictl(&file, "node drain n1 --wait --deadline 1s --json").await;
    assert_eq!(said.code, Some(1), "{said:?}");
    let row: serde_json::Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!(row["drained"]["left"][0]["why"], "it is in use by psql (7)");
    let ends = async {
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        report(&session, 1, 0, Vec::new()).await;
        eventually("nothing is left there", async || {
            show(&site, "n1").await.drained.is_some_and(|of| of.count == 0)
        })
        .await;
        node.detached(0, "data", &claim).await.unwrap();
    };
    let (said, ()) = tokio::join!(csictl(&file, "node drain n1 --wait"), ends);
    assert_eq!((said.code, said.out.as_str()), (Some(0), ""), "{said:?}");
    assert!(said.err.contains("1 mounts and claims are left"), "{said:?}");
    let said = csictl(&file, "node show n1").await;
    assert!(said.out.contains("drained, at "), "{said:?}");
    let undrained = async {
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        node.detached(0, "data", &claim).await.unwrap();
        set(&site, 0, "n1", Change::Undrain(UndrainAsk {})).await.unwrap();
    };
    report(&session, 1, 1, Vec::new()).await;
    eventually("something is left", async || show(&site, "n1").await.drained.is_some_and(|of| of.count == 1))
        .await;
    let (said, ()) = tokio::join!(csictl(&file, "node drain n1 --wait"), undrained);
    assert!(said.code == Some(1) && said.err.contains("drains no more"), "{said:?}");
}
