//! etcd whose database has reached its quota. It reads and deletes then, and refuses each other change until an administrator has made space.

use std::fs;
use std::time::{Duration, Instant};

use csi_proto::cluster::v1::ReleaseAsk;
use csid_etcd::api::PutRequest;
use futures_util::future::join_all;
use serde_json::json;
use tonic::Code;

use crate::etcd::{Cluster, etcdctl};
use crate::fence;
use crate::operators::{csictl, operator};
use crate::site::{First, Node, Refusal, SOON, Session, Site, eventually, release_ask};

/// etcd's database in bytes. The servers write less than 1 MB in this test.
const QUOTA: &str = "8000000";
/// Longer than a server serves without a beat, and than its lease.
const LONG: Duration = Duration::from_secs(15);

async fn start(keys: &str) -> Site {
    Site::on(Cluster::start(3, &["--quota-backend-bytes", QUOTA]).await, 2, keys)
}

/// Writes to etcd until it refuses that for its quota. Many writes at once pass the check, so the database is larger than the quota. The keys are below
/// `/filler/`.
async fn fill(site: &Site) {
    for round in 0..20 {
        let writes = (0..30).map(async |n| {
            let key = format!("/filler/{round}-{n}");
            let put = PutRequest { key: key.into(), value: vec![b'x'; 60_000], ..PutRequest::default() };
            match site.raw().await.try_put(put).await {
                Ok(()) => false,
                Err(status) if status.code() == Code::ResourceExhausted => true,
                Err(status) => panic!("{status}"),
            }
        });
        if join_all(writes).await.contains(&true) {
            return;
        }
    }
    panic!("etcd has taken 36 MB, and has a quota of {QUOTA} bytes");
}

/// Makes space as docs/cluster-operations.md says it.
async fn make_space(site: &Site) {
    let endpoints = site.etcd.endpoints().join(",");
    let run = |command: &[&str]| etcdctl(&[&["--endpoints", &endpoints], command].concat());
    run(&["del", "--prefix", "/filler/"]);
    site.raw().await.compact().await;
    run(&["defrag"]);
    run(&["alarm", "disarm"]);
}

fn is_refused(of: &Refusal) -> bool {
    of.code == Code::Unavailable && of.retryable
}

async fn joins(node: &Node, server: usize) -> bool {
    matches!(node.say_hello(server).await, Ok((First::Welcome(_), _)))
}

/// Asserts that a session does not end while another user of this etcd deletes keys. The servers' watches do not see them.
async fn goes_on(site: &Site, session: &mut Session) {
    let begun = Instant::now();
    while begun.elapsed() < LONG {
        let n = begun.elapsed().as_millis() / 300;
        site.raw().await.delete(format!("/filler/0-{}", n % 30).as_bytes()).await;
        let ended = tokio::time::timeout(Duration::from_millis(300), session.next()).await;
        assert!(ended.is_err(), "the session has ended: {ended:?}");
    }
    for server in &site.servers {
        assert!(!server.text().contains("the volumes are listed again"), "{}", server.text());
    }
}

#[tokio::test]
async fn full_etcd_frees_and_grants_nothing() {
    let site = start("").await;
    for volume in ["data", "more"] {
        site.register(volume, "single-node-writer").await;
    }
    let (n1, n2) = (site.node("n1"), site.node("n2"));
    let mut session = n1.join(0).await;
    let claim = n1.claim(0, "data").await.unwrap();
    let file = operator(&site, "all");
    fill(&site).await;

    let begun = Instant::now();
    for server in 0..2 {
        let refused = n1.claim(server, "more").await.unwrap_err();
        assert!(is_refused(&refused), "{refused:?}");
        let refused = n1.detached(server, "data", &claim).await.unwrap_err();
        assert!(is_refused(&refused), "{refused:?}");
    }
    let release = ReleaseAsk { deadline_ms: 1, ..release_ask("data", "n1") };
    let refused = site.operator(0, "all").release(release).await.unwrap_err();
    assert!(is_refused(&Refusal::of(&refused)), "{refused:?}");
    let said = csictl(&file, "node block n1 --reason stolen").await;
    assert!(said.code == Some(1) && said.err.contains("quota"), "{said:?}");
    assert!(begun.elapsed() < SOON, "the answers took {:?}", begun.elapsed());
    // A node sends a report once.
    session.report_name("i-1").await;
    goes_on(&site, &mut session).await;
    let said = csictl(&file, "--operator explain default data --json").await.json();
    let of_claim = &said["claims"][0];
    assert_eq!((&of_claim["node"], &of_claim["releasing"]), (&json!("n1"), &json!(false)), "{said}");
    let said = csictl(&file, "--operator cluster status --json").await.json();
    assert_eq!(said["attention"][0]["kind"], "etcd-full", "{said}");
    assert!(site.servers[0].status().contains("etcd's database has reached its quota"));

    make_space(&site).await;
    eventually("a claim is granted", async || n1.claim(0, "more").await.is_ok()).await;
    n1.detached(1, "data", &claim).await.unwrap();
    eventually("the servers know that there is space", async || {
        let said = csictl(&file, "--operator cluster status --json").await.json();
        said["attention"] == json!([]) && site.servers[0].status() == "serves nodes and operators"
    })
    .await;
    eventually("the report is written", async || {
        let row = site.raw().await.below("/csid/v1/node/n1").await.remove(0).value;
        String::from_utf8(row).unwrap().contains("\"i-1\"")
    })
    .await;
    eventually("another node joins", async || joins(&n2, 1).await).await;
    let _other = n2.join(1).await;
    n2.claim(1, "data").await.unwrap();
    let said = csictl(&file, "server audit").await;
    assert!(said.err.contains("No findings"), "{said:?}");
}

#[tokio::test]
async fn full_etcd_lets_no_machine_be_switched_off() {
    let directory = tempfile::tempdir().unwrap();
    let (keys, ran) = fence::command(directory.path(), "exit 0", "");
    let site = start(&keys).await;
    site.register("data", "single-node-writer").await;
    let mut n1 = site.node("n1");
    let session = n1.join(0).await;
    let claim = n1.claim(0, "data").await.unwrap();
    fill(&site).await;
    let file = operator(&site, "all");
    eventually("the servers know that etcd is full", async || {
        let said = csictl(&file, "--operator cluster status --json").await.json();
        said["attention"][0]["kind"] == "etcd-full"
    })
    .await;
    drop(session);
    eventually("the node cannot come back", async || {
        n1.say_hello(0).await.is_err_and(|status| status.code() == Code::Unavailable)
    })
    .await;
    for server in 0..2 {
        let refused = fence::fence(&site, server, "n1").await.unwrap_err();
        assert!(is_refused(&refused), "{refused:?}");
    }
    assert!(!ran.exists(), "{:?}", fs::read_to_string(&ran));

    make_space(&site).await;
    // The row of the session that has ended keeps out no later boot.
    n1.hello.boot = "another".into();
    eventually("the node's next boot joins", async || joins(&n1, 1).await).await;
    let _session = n1.join(1).await;
    n1.detached(1, "data", &claim).await.unwrap();
    assert!(!ran.exists(), "{:?}", fs::read_to_string(&ran));
}
