//! Sessions: who may join, and what ends a session.

use std::time::{Duration, Instant};

use csi_proto::cluster::v1::{ClaimAsk, FromNode, Hello, ListAsk, Owed, VolumeAsk, from_node};
use rustix::process::Signal;
use tonic::{Code, Status};

use crate::site::{First, Refusal, Site, eventually, hello, open};

#[tokio::test]
async fn hello_of_another_machine_or_cluster_is_refused() {
    let site = Site::start(1).await;
    let node = site.node("n1");
    let session = node.join(0).await;
    type Lie<'a> = &'a dyn Fn(&mut Hello);
    let cases: [(Lie<'_>, &str); 6] = [
        (&|hello| hello.cluster = "test".into(), "wrong-cluster"),
        (&|hello| hello.journal_id = "another".into(), "another-machine"),
        (&|hello| hello.machine_id = "another".into(), "another-machine"),
        (&|hello| hello.boot = "another".into(), "twice"),
        (&|hello| (hello.protocol_min, hello.protocol_max) = (0, 0), "too-old"),
        (&|hello| (hello.protocol_min, hello.protocol_max) = (2, 3), "too-new"),
    ];
    for (change, reason) in cases {
        let mut hello = node.hello.clone();
        change(&mut hello);
        let (first, mut refused) = open(&mut node.client(0), hello).await.unwrap();
        assert!(matches!(&first, First::Refused(of) if of == reason), "{reason}: {first:?}");
        assert_eq!(refused.next().await, Ok(None), "a refused session goes on");
    }
    // The last session of the boot has ended, so another boot is a reboot.
    drop(session);
    let mut rebooted = node.hello.clone();
    rebooted.boot = "boot 2".into();
    eventually("the rebooted node joins", async || {
        let (first, _session) = open(&mut node.client(0), rebooted.clone()).await.unwrap();
        matches!(first, First::Welcome(_))
    })
    .await;
    let mut raw = site.raw().await;
    let row = raw.below("/csid/v1/node/n1").await.remove(0);
    let row = String::from_utf8(row.value).unwrap();
    assert!(row.contains("\"boot\":\"boot 2\"") && row.contains("journal of n1"), "{row}");
}

#[tokio::test]
async fn note_of_another_journal_ends_with_a_join() {
    let site = Site::start(1).await;
    let notes = async |name: &str, change: &dyn Fn(&mut Hello)| {
        let node = site.node(name);
        drop(node.join(0).await);
        let mut other = node.hello.clone();
        change(&mut other);
        let (first, _) = open(&mut node.client(0), other).await.unwrap();
        assert!(matches!(&first, First::Refused(of) if of == "another-machine"), "{first:?}");
        let mut has_note = Vec::new();
        for joins in [false, true] {
            if joins {
                drop(node.join(0).await);
            }
            let row = site.raw().await.below(&format!("/csid/v1/node/{name}")).await.remove(0);
            has_note.push(String::from_utf8(row.value).unwrap().contains("\"other\""));
        }
        has_note
    };
    assert_eq!(notes("n1", &|hello| hello.journal_id = "another".into()).await, [true, false]);
    let of_machine = notes("n2", &|hello| hello.machine_id = "another".into()).await;
    assert_eq!(of_machine, [true, true], "the other machine may run, too");
}

#[tokio::test]
async fn welcome_names_the_servers_that_run() {
    let site = Site::start(2).await;
    let node = site.node("n1");
    let (first, _session) = node.say_hello(1).await.unwrap();
    let First::Welcome(welcome) = first else { panic!("{first:?}") };
    let mut addresses = site.addresses.clone();
    addresses.sort();
    assert_eq!((welcome.servers, welcome.mode.as_str(), welcome.generation), (addresses, "normal", 1));
    let mut raw = site.raw().await;
    let sessions = raw.below("/csid/v1/session/").await;
    let key = format!("/csid/v1/session/n1/{}", welcome.server);
    assert_eq!((sessions.len(), String::from_utf8_lossy(&sessions[0].key)), (1, key.into()));
}

#[tokio::test]
async fn second_session_of_a_boot_ends_the_first() {
    let site = Site::start(1).await;
    let node = site.node("n1");
    let mut first = node.join(0).await;
    let _second = node.join(0).await;
    let ended = first.next().await.unwrap_err();
    assert_eq!((ended.code, ended.kind.as_str()), (Code::Unavailable, "Unavailable"));
    let mut raw = site.raw().await;
    assert_eq!(
        raw.below("/csid/v1/session/n1/").await.len(),
        1,
        "the first took the row of the second with it"
    );
}

#[tokio::test]
async fn session_that_begins_otherwise_is_ended() {
    let site = Site::start(1).await;
    let node = site.node("n1");
    let (to_server, receiver) = tokio::sync::mpsc::channel(8);
    let plugins = from_node::Is::Plugins(Default::default());
    to_server.send(FromNode { is: Some(plugins) }).await.unwrap();
    let stream = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let mut session = node.client(0).session(stream).await.unwrap().into_inner();
    assert_eq!(Refusal::of(&session.message().await.unwrap_err()).kind, "InvalidArgument");
    // A second Hello ends a session, too.
    let mut session = node.join(0).await;
    let again = from_node::Is::Hello(hello("n1"));
    session.to_server.send(FromNode { is: Some(again) }).await.unwrap();
    assert_eq!(session.next().await.unwrap_err().kind, "InvalidArgument");
}

#[tokio::test]
async fn fenced_or_blocked_node_is_refused() {
    let site = Site::start(1).await;
    let node = site.node("n1");
    site.register("data", "single-node-writer").await;
    site.register("more", "single-node-writer").await;
    let session = node.join(0).await;
    let claim = node.claim(0, "data").await.unwrap();
    drop(session);
    let mut raw = site.raw().await;
    let row = raw.below("/csid/v1/node/n1").await.remove(0);
    let row = String::from_utf8(row.value).unwrap();
    // The server has the ready row in memory at the first claim. For a new claim etcd compares it. The claim that is there is no change.
    for (state, volumes) in [("blocked", ["data", "more"]), ("fenced", ["more", "data"])] {
        raw.put("/csid/v1/node/n1", &row).await;
        let _session = node.join(0).await;
        assert_eq!(node.claim(0, "data").await, Ok(claim.clone()));
        let changed = row.replace("\"ready\"", &format!("\"{state}\""));
        assert_ne!(changed, row);
        raw.put("/csid/v1/node/n1", &changed).await;
        for volume in volumes {
            let refused = node.claim(0, volume).await.unwrap_err();
            // The server may have ended the session meanwhile.
            assert!(["Busy", "Unavailable"].contains(&refused.kind.as_str()), "{volume}: {refused:?}");
        }
        let (first, _) = node.say_hello(0).await.unwrap();
        assert!(matches!(&first, First::Refused(of) if of == state), "{first:?}");
    }
    node.detached(0, "data", &claim).await.expect("a fenced node's word that it has nothing is taken");
    raw.put("/csid/v1/node/n1", &row).await;
    let _session = node.join(0).await;
    node.claim(0, "more").await.unwrap();
}

#[tokio::test]
async fn blocked_node_sees_nothing_and_has_no_session() {
    let site = Site::start(1).await;
    for volume in ["data", "more"] {
        site.register(volume, "single-node-writer").await;
    }
    let (node, draining) = (site.node("n1"), site.node("n2"));
    let (mut session, _draining) = (node.join(0).await, draining.join(0).await);
    let claim = node.claim(0, "data").await.unwrap();
    draining.claim(0, "more").await.unwrap();
    let mut raw = site.raw().await;
    let mut changed = async |node: &str, from: &str, to: &str| {
        let key = format!("/csid/v1/node/{node}");
        let row = String::from_utf8(raw.below(&key).await.remove(0).value).unwrap();
        let changed = row.replace(&format!("{from:?}"), &format!("{to:?}"));
        assert_ne!(changed, row);
        raw.put(&key, &changed).await;
    };
    changed("n2", "ready", "draining").await;
    changed("n1", "ready", "blocked").await;
    let refused = |kind: &str| assert_eq!(kind, "Busy");
    let volume = VolumeAsk { namespace: String::new(), volume: "data".into(), ..VolumeAsk::default() };
    refused(&Refusal::of(&node.client(0).volume(volume.clone()).await.unwrap_err()).kind);
    let mut list = node.client(0).volumes(ListAsk::default()).await.unwrap().into_inner();
    refused(&Refusal::of(&list.message().await.unwrap_err()).kind);
    refused(&node.detached(0, "data", &claim).await.unwrap_err().kind);
    refused(&node.detached(0, "more", "an id of no claim").await.unwrap_err().kind);
    let begun = Instant::now();
    let ended = session.next().await.unwrap_err();
    assert!(ended.kind == "Busy" && ended.message.contains("blocked"), "{ended:?}");
    assert!(begun.elapsed() < Duration::from_secs(10), "it took {:?}", begun.elapsed());
    let refused = node.claim(0, "data").await.unwrap_err();
    assert_eq!((refused.code, refused.kind.as_str()), (Code::Unavailable, "Unavailable"));

    changed("n1", "blocked", "ready").await;
    let mut session = node.join(0).await;
    changed("n1", "ready", "fenced").await;
    let ended = session.next().await.unwrap_err();
    assert!(ended.kind == "Busy" && ended.message.contains("fenced"), "{ended:?}");
    node.client(0).volume(volume).await.expect("a fenced node sees what it has");
    node.detached(0, "data", &claim).await.expect("a fenced node's word that it has nothing is taken");
    // Two looks at the rows have ended no session of a draining node.
    let refused = draining.claim(0, "more").await.unwrap_err();
    assert!(refused.kind == "Busy" && refused.message.contains("draining"), "{refused:?}");
}

#[tokio::test]
async fn claim_without_a_session_is_refused() {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let node = site.node("n1");
    let _session = node.join(0).await;
    node.claim(0, "data").await.unwrap();
    let refused = node.claim(1, "data").await.unwrap_err();
    assert_eq!((refused.code, refused.retryable), (Code::Unavailable, true), "{refused:?}");
}

#[tokio::test]
async fn stopped_server_leaves_nothing_in_etcd() {
    let mut site = Site::start(1).await;
    let node = site.node("n1");
    let mut session = node.join(0).await;
    site.servers[0].signal(Signal::TERM);
    let ended = session.next().await.unwrap_err();
    assert_eq!(ended.code, Code::Unavailable);
    assert!(site.servers[0].ended().await, "{}", site.servers[0].text());
    let mut raw = site.raw().await;
    for prefix in ["/csid/v1/server/", "/csid/v1/session/"] {
        assert!(raw.below(prefix).await.is_empty(), "{prefix}");
    }
    // Its row in `node` stays.
    assert_eq!(raw.below("/csid/v1/node/").await.len(), 1);
}

/// A clone has the key and the journal of the node, and another boot.
#[tokio::test]
async fn clone_of_a_node_does_nothing_with_its_claims() {
    let site = Site::start(2).await;
    for volume in ["data", "more"] {
        site.register(volume, "single-node-writer").await;
    }
    let mut node = site.node("n1");
    let session = node.join(0).await;
    let claim = node.claim(0, "data").await.unwrap();
    let refused = |status: Status| {
        let refusal = Refusal::of(&status);
        assert_eq!((refusal.code, refusal.kind.as_str()), (Code::Aborted, "Busy"), "{refusal:?}");
        assert!(refusal.message.contains("another boot"), "{refusal:?}");
    };
    let of_clone = |volume| ClaimAsk { boot: "of a clone".into(), ..node.ask(volume, "web") };
    for volume in ["data", "more"] {
        refused(node.client(0).claim(of_clone(volume)).await.unwrap_err());
    }
    let owed = Owed { boot: "of a clone".into(), ..node.owed("data", &claim) };
    for server in [0, 1] {
        refused(node.client(server).detached(owed.clone()).await.unwrap_err());
    }
    assert_eq!(node.claim(0, "data").await, Ok(claim.clone()));
    // An operator has no boot.
    let of_operator = ClaimAsk { node: "n1".into(), boot: String::new(), ..node.ask("more", "web") };
    site.operator(0, "all").claim(of_operator).await.unwrap();

    // The node boots again, and joins the other server. The first one has its old row in memory.
    let old = node.owed("data", &claim);
    drop(session);
    node.reboot(1).await;
    refused(node.client(0).detached(old).await.unwrap_err());
    node.detached(0, "data", &claim).await.unwrap();
    let mut raw = site.raw().await;
    assert!(raw.below("/csid/v1/vol/default/data/claim/").await.is_empty());
}
