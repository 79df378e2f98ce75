//! etcd whose database has reached its quota. It reads and deletes then, and refuses each other change until an administrator has made space.

use std::time::{Duration, Instant};

use csi_proto::cluster::v1::ReleaseAsk;
use csid_etcd::api::PutRequest;
use serde_json::json;
use tonic::Code;

use crate::etcd::{Cluster, etcdctl};
use crate::operators::{csictl, operator};
use crate::site::{First, Refusal, SOON, Site, eventually, release_ask};

/// etcd's database in bytes. The servers write less than 1 MB in this test.
const QUOTA: &str = "8000000";

/// Writes to etcd until it refuses that for its quota. The keys are below `/filler/`.
async fn fill(site: &Site) {
    let mut raw = site.raw().await;
    let value = vec![b'x'; 400_000];
    for n in 0..100 {
        let put =
            PutRequest { key: format!("/filler/{n}").into(), value: value.clone(), ..PutRequest::default() };
        match raw.try_put(put).await {
            Ok(()) => {}
            Err(status) if status.code() == Code::ResourceExhausted => return,
            Err(status) => panic!("{status}"),
        }
    }
    panic!("etcd took 40 MB, and has a quota of {QUOTA} bytes");
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

#[tokio::test]
async fn full_etcd_frees_and_grants_nothing() {
    let etcd = Cluster::start(3, &["--quota-backend-bytes", QUOTA]).await;
    let site = Site::on(etcd, 2, "");
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
    assert!(begun.elapsed() < SOON, "the answers took {:?}", begun.elapsed());
    // A session outlives the lease of its server, so the lease is kept alive.
    let ended = tokio::time::timeout(Duration::from_secs(15), session.next()).await;
    assert!(ended.is_err(), "the session has ended: {ended:?}");
    let said = csictl(&file, "--operator explain default data --json").await.json();
    let of_claim = &said["claims"][0];
    assert_eq!((&of_claim["node"], &of_claim["releasing"]), (&json!("n1"), &json!(false)), "{said}");
    let said = csictl(&file, "--operator cluster status --json").await.json();
    assert_eq!(said["attention"][0]["kind"], "etcd-full", "{said}");
    assert!(site.servers[0].status().contains("etcd's database has reached its quota"));
    assert_eq!(n1.claim(0, "data").await, Ok(claim.clone()), "it is granted already");

    make_space(&site).await;
    eventually("a claim is granted", async || n1.claim(0, "more").await.is_ok()).await;
    n1.detached(1, "data", &claim).await.unwrap();
    eventually("the servers know that there is space", async || {
        let said = csictl(&file, "--operator cluster status --json").await.json();
        said["attention"] == json!([]) && site.servers[0].status() == "serves nodes and operators"
    })
    .await;
    eventually("another node joins", async || matches!(n2.say_hello(1).await, Ok((First::Welcome(_), _))))
        .await;
    let _other = n2.join(1).await;
    n2.claim(1, "data").await.unwrap();
    let said = csictl(&file, "server audit").await;
    assert!(said.err.contains("No findings"), "{said:?}");
}
