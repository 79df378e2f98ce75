//! Servers and etcd that die or stand still.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use tonic::Code;

use crate::site::{First, Refusal, Site, eventually, open};

#[tokio::test]
async fn node_of_a_killed_server_goes_on_at_the_other() {
    let mut site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let (n1, n2) = (site.node("n1"), site.node("n2"));
    let mut session = n1.join(0).await;
    let _other = n2.join(1).await;
    let claim = n1.claim(0, "data").await.unwrap();
    site.servers[0].kill();
    let begun = Instant::now();
    let ended = session.next().await.unwrap_err();
    assert!(ended.kind.is_empty(), "no server said this: {ended:?}");
    // A clone of the node that comes meanwhile is another boot, and the killed server's lease has not ended.
    let mut clone = n1.hello.clone();
    clone.boot = "of a clone".into();
    let (first, _) = open(&mut n1.client(1), clone.clone()).await.unwrap();
    assert!(matches!(&first, First::Refused(of) if of == "twice"), "{first:?}");

    let session = n1.join(1).await;
    assert!(begun.elapsed() < Duration::from_secs(5), "it took {:?}", begun.elapsed());
    assert_eq!(n1.claim(1, "data").await, Ok(claim.clone()), "its claim is still there");
    let refused = n2.claim(1, "data").await.unwrap_err();
    assert_eq!(refused.holders, ["n1/web"]);
    n1.detached(1, "data", &claim).await.unwrap();
    n2.claim(1, "data").await.unwrap();
    // The lease of the killed server ends, and its rows with it.
    drop(session);
    eventually("another boot joins", async || {
        let (first, _session) = open(&mut n1.client(1), clone.clone()).await.unwrap();
        matches!(first, First::Welcome(_))
    })
    .await;
    let mut raw = site.raw().await;
    assert_eq!(raw.below("/csid/v1/server/").await.len(), 1);
}

#[tokio::test]
async fn server_without_etcd_ends_its_sessions_in_time() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let node = site.node("n1");
    let mut session = node.join(0).await;
    let claim = node.claim(0, "data").await.unwrap();
    let mut raw = site.raw().await;
    site.etcd.members[0].signal(Signal::STOP);
    let begun = Instant::now();
    let ended = session.next().await.unwrap_err();
    assert_eq!((ended.code, ended.kind.as_str()), (Code::Unavailable, "Unavailable"));
    assert!(begun.elapsed() < Duration::from_secs(15), "it took {:?}", begun.elapsed());
    let refused = node.client(0).claim(node.ask("data", "web")).await.unwrap_err();
    assert_eq!(Refusal::of(&refused).kind, "Unavailable");
    let hello = node.say_hello(0).await;
    assert_eq!(hello.err().map(|status| status.code()), Some(Code::Unavailable));

    site.etcd.members[0].signal(Signal::CONT);
    eventually("the node joins again", async || {
        matches!(node.say_hello(0).await, Ok((First::Welcome(_), _)))
    })
    .await;
    let _session = node.join(0).await;
    assert_eq!(node.claim(0, "data").await, Ok(claim));
    // A lease that has ended meanwhile leaves no row behind.
    eventually("one server is in etcd", async || raw.below("/csid/v1/server/").await.len() == 1).await;
}

/// What a server does that stood still for longer than its lease: etcd refuses its writes.
#[tokio::test]
async fn server_whose_row_is_gone_grants_nothing() {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let node = site.node("n1");
    let mut session = node.join(0).await;
    // The other server's rows are found by this session's server's.
    let mut raw = site.raw().await;
    let of_session = String::from_utf8(raw.below("/csid/v1/session/n1/").await.remove(0).key).unwrap();
    let id = of_session.rsplit_once('/').unwrap().1.to_owned();
    site.register("known", "single-node-writer").await;
    node.claim(0, "known").await.unwrap();
    raw.delete(format!("/csid/v1/server/{id}").as_bytes()).await;
    // The claim that is there is granted no more, either.
    for volume in ["known", "data"] {
        let refused = node.claim(0, volume).await.unwrap_err();
        assert_eq!((refused.code, refused.retryable), (Code::Unavailable, true), "{volume}: {refused:?}");
    }
    assert!(raw.below("/csid/v1/vol/default/data/claim/").await.is_empty());
    // The server notices at its next beat, ends its sessions, and takes another name.
    assert_eq!(session.next().await.unwrap_err().code, Code::Unavailable);
    eventually(
        "the node joins again",
        async || matches!(node.say_hello(0).await, Ok((First::Welcome(welcome), _)) if welcome.server != id),
    )
    .await;
    let _session = node.join(0).await;
    node.claim(0, "data").await.unwrap();
}

#[tokio::test]
async fn nothing_is_granted_in_a_recovery() {
    let site = Site::start(1).await;
    for volume in ["data", "more"] {
        site.register(volume, "single-node-writer").await;
    }
    let node = site.node("n1");
    let mut _session = node.join(0).await;
    let claim = node.claim(0, "data").await.unwrap();
    let mut raw = site.raw().await;
    let meta = String::from_utf8(raw.below("/csid/v1/meta").await.remove(0).value).unwrap();
    let recovering = meta.replace("\"normal\"", "\"recovering\"");
    assert_ne!(recovering, meta);
    // The server has the earlier row in memory at the first claim: of one that is there, then of a new one.
    for volumes in [["data", "more"], ["more", "data"]] {
        raw.put("/csid/v1/meta", &recovering).await;
        for volume in volumes {
            let refused = node.claim(0, volume).await.unwrap_err();
            assert_eq!((refused.code, refused.kind.as_str()), (Code::Unavailable, "Unavailable"), "{volume}");
        }
        raw.put("/csid/v1/meta", &meta).await;
        // The server may have ended the session when it saw the recovery.
        _session = node.join(0).await;
        assert_eq!(node.claim(0, "data").await, Ok(claim.clone()));
    }
}

/// An etcd that starts again keeps its leases, so a server keeps its ID. It has given up on the rows of the sessions that have ended.
#[tokio::test]
async fn session_that_ended_without_etcd_leaves_no_row() {
    let mut site = Site::start(1).await;
    let node = site.node("n1");
    let mut session = node.join(0).await;
    let sessions = async |site: &Site| site.raw().await.below("/csid/v1/session/").await.len();
    assert_eq!(sessions(&site).await, 1);
    site.etcd.members[0].kill();
    session.next().await.unwrap_err();
    drop(session);
    // A transaction is tried for 30 s.
    tokio::time::sleep(Duration::from_secs(35)).await;
    site.etcd.restart(0).await;
    eventually("the row of the session is gone", async || sessions(&site).await == 0).await;
    let _other = site.node("n1").join(0).await;
}
