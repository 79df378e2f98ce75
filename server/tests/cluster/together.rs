//! Claims of one volume by many nodes at the same time, at three servers. Real etcd counts the transactions.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use csi_proto::cluster::v1::cluster_client::ClusterClient;
use csi_proto::cluster::v1::{ClaimAsk, Granted, Owed};
use futures_util::future::join_all;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::transport::Channel;

use crate::attach::{Controller, row, user};
use crate::recovery::welcome;
use crate::site::{Raw, Refusal, Session, Site, ask, eventually};

const SERVERS: usize = 3;
const MANY: &str = "multi-node-multi-writer";
const ONE: &str = "single-node-writer";
/// The longest time in which all have their claims on a busy machine.
const BOUND: Duration = Duration::from_secs(20);

/// Servers, and nodes m0 to mN that have joined. An operator claims for them: each node's claims are asked at the same server.
struct Crowd {
    site: Site,
    clients: Vec<ClusterClient<Channel>>,
    nodes: usize,
    /// What the row of a node is made of.
    row: String,
    raw: Raw,
    _session: Session,
}

type Answer = Result<Granted, Refusal>;

impl Crowd {
    async fn start(nodes: usize) -> Crowd {
        let site = Site::start(SERVERS).await;
        let first = site.node("n1");
        let session = first.join(0).await;
        let mut raw = site.raw().await;
        let mut row = String::new();
        eventually("the node has reported its plugin", async || {
            let found = raw.below("/csid/v1/node/n1").await.remove(0);
            row = String::from_utf8(found.value).unwrap();
            row.contains("\"attaches\":false")
        })
        .await;
        let clients = (0..SERVERS).map(|server| site.operator(server, "all")).collect();
        let mut crowd = Crowd { site, clients, nodes, row, raw, _session: session };
        for node in 0..nodes {
            crowd.put_row(node, |row| row).await;
        }
        // Servers know the nodes' rows, and connections are open.
        crowd.site.register("warm", MANY).await;
        for answer in crowd.claim_all("warm", MANY).await {
            answer.unwrap();
        }
        crowd
    }

    /// Writes a node's row past the servers.
    async fn put_row(&mut self, node: usize, change: impl Fn(String) -> String) {
        let row = self.row.replace(" of n1", &format!(" of m{node}"));
        self.raw.put(&format!("/csid/v1/node/m{node}"), &change(row)).await;
    }

    fn ask(&self, node: usize, volume: &str, access_mode: &str) -> ClaimAsk {
        let mut ask =
            ClaimAsk { node: format!("m{node}"), call: format!("m{node} {volume}"), ..ask(volume, "web") };
        ask.r#use.as_mut().unwrap().access_mode = access_mode.into();
        ask
    }

    /// Claims a volume for each node, all at the same time.
    async fn claim_all(&self, volume: &str, access_mode: &str) -> Vec<Answer> {
        let calls = (0..self.nodes).map(|node| {
            let (mut client, ask) =
                (self.clients[node % SERVERS].clone(), self.ask(node, volume, access_mode));
            async move {
                let granted = client.claim(ask).await;
                granted.map(tonic::Response::into_inner).map_err(|status| Refusal::of(&status))
            }
        });
        join_all(calls).await
    }

    async fn transactions(&self) -> u64 {
        transactions(&self.site).await
    }

    /// Returns the nodes and the names of a volume's claims in etcd.
    async fn claims(&mut self, volume: &str) -> BTreeSet<(String, String)> {
        let found = self.raw.below(&format!("/csid/v1/vol/default/{volume}/claim/")).await;
        let claim = |kv: &csid_etcd::api::KeyValue| {
            let key = String::from_utf8_lossy(&kv.key).into_owned();
            let value: serde_json::Value = serde_json::from_slice(&kv.value).unwrap();
            (key.split('/').nth(7).unwrap().to_owned(), value["id"].as_str().unwrap().to_owned())
        };
        found.iter().map(claim).collect()
    }
}

/// Returns how many transactions etcd has been asked for, with those whose comparison failed.
pub async fn transactions(site: &Site) -> u64 {
    handled(site, "Txn").await
}

/// Returns how many calls of a method etcd has been asked for.
async fn handled(site: &Site, method: &str) -> u64 {
    let mut stream = TcpStream::connect(site.etcd.members[0].client).await.unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let of_method = format!("grpc_method=\"{method}\"");
    let is_one = |line: &&str| line.starts_with("grpc_server_handled_total{") && line.contains(&of_method);
    let counts = text.lines().filter(is_one).map(|line| line.rsplit_once(' ').unwrap().1);
    let counts: Vec<u64> = counts.map(|count| count.parse::<f64>().unwrap() as u64).collect();
    assert!(!counts.is_empty(), "etcd counts no calls of {method}: {text}");
    counts.iter().sum()
}

/// Returns the nodes that were granted a claim, with the claims' names.
fn granted(answers: &[Answer]) -> BTreeSet<(String, String)> {
    let granted = answers.iter().enumerate().filter_map(|(node, answer)| Some((node, answer.as_ref().ok()?)));
    granted.map(|(node, granted)| (format!("m{node}"), granted.claim.clone())).collect()
}

#[tokio::test]
async fn crowd_is_granted_in_few_transactions() {
    let mut crowd = Crowd::start(200).await;
    crowd.site.register("shared", MANY).await;
    let (before, begun) = (crowd.transactions().await, Instant::now());
    let answers = crowd.claim_all("shared", MANY).await;
    let (took, count) = (begun.elapsed(), crowd.transactions().await - before);
    println!("200 claims in {took:?} and {count} transactions");
    for (node, answer) in answers.iter().enumerate() {
        let volume = answer.as_ref().unwrap().volume.as_ref().unwrap();
        let claims: Vec<&str> = volume.claims.iter().map(|claim| claim.node.as_str()).collect();
        assert_eq!(claims, [format!("m{node}")], "an answer has the claims of others");
        assert!(volume.claim_count >= 1 && volume.claim_count <= 200, "{}", volume.claim_count);
    }
    assert!(took < BOUND, "{took:?}");
    // 200 changes without a failed comparison would be 200 transactions.
    assert!(count <= 100, "{count} transactions");
    let (granted, written) = (granted(&answers), crowd.claims("shared").await);
    assert_eq!((granted.len(), &granted), (200, &written));
    let names: BTreeSet<_> = written.iter().map(|(_, name)| name).collect();
    assert_eq!(names.len(), 200, "a claim was granted twice");
    // The same calls again find their claims.
    let again = crowd.claim_all("shared", MANY).await;
    assert_eq!(self::granted(&again), written);
}

#[tokio::test]
async fn one_of_a_crowd_has_a_volume_of_one_writer() {
    let mut crowd = Crowd::start(200).await;
    crowd.site.register("data", ONE).await;
    let before = crowd.transactions().await;
    let answers = crowd.claim_all("data", ONE).await;
    let count = crowd.transactions().await - before;
    println!("200 claims of one writer in {count} transactions");
    let granted = granted(&answers);
    assert_eq!((granted.len(), &granted), (1, &crowd.claims("data").await));
    let holder = format!("{}/web", granted.first().unwrap().0);
    for refused in answers.iter().filter_map(|answer| answer.as_ref().err()) {
        assert_eq!((refused.kind.as_str(), &refused.holders[..]), ("ClaimConflict", &[holder.clone()][..]));
    }
    assert!(count <= 50, "{count} transactions: a claim that is refused writes nothing");
}

/// The servers have the rows in memory as they were before.
#[tokio::test]
async fn node_that_is_not_ready_is_refused_alone() {
    let mut crowd = Crowd::start(90).await;
    crowd.site.register("shared", MANY).await;
    for (node, state) in [(7, "fenced"), (8, "draining"), (39, "fenced"), (40, "blocked")] {
        crowd
            .put_row(node, |row| row.replace("\"state\":\"ready\"", &format!("\"state\":\"{state}\"")))
            .await;
    }
    // A row that has changed, and whose node is ready.
    crowd.put_row(9, |row| row.replace("journal of", "another journal of")).await;
    let before = crowd.transactions().await;
    let answers = crowd.claim_all("shared", MANY).await;
    let count = crowd.transactions().await - before;
    println!("90 claims, four refused, in {count} transactions");
    for (node, answer) in answers.iter().enumerate() {
        let due = match node {
            7 | 39 => Some("fenced"),
            8 => Some("draining"),
            40 => Some("blocked"),
            _ => None,
        };
        match (due, answer) {
            (None, answer) => assert!(answer.is_ok(), "m{node}: {answer:?}"),
            (Some(state), Err(refused)) => {
                assert_eq!(
                    (refused.kind.as_str(), refused.message.as_str()),
                    ("Busy", format!("node m{node} is {state}").as_str())
                );
            }
            (Some(state), Ok(_)) => panic!("m{node} is {state}, and was granted a claim"),
        }
    }
    let written = crowd.claims("shared").await;
    assert_eq!((written.len(), granted(&answers)), (86, written));
    assert!(count <= 60, "{count} transactions");
}

#[tokio::test]
async fn node_at_its_volume_limit_is_refused_alone() {
    let mut crowd = Crowd::start(60).await;
    crowd.site.register("shared", MANY).await;
    for node in [3, 4, 5, 31] {
        // It has the volume `warm`.
        crowd
            .put_row(node, |row| row.replace("\"attaches\":false", "\"attaches\":false,\"max-volumes\":1"))
            .await;
    }
    for node in [6, 7] {
        crowd
            .put_row(node, |row| row.replace("\"attaches\":false", "\"attaches\":false,\"max-volumes\":2"))
            .await;
    }
    let answers = crowd.claim_all("shared", MANY).await;
    for (node, answer) in answers.iter().enumerate() {
        match ([3, 4, 5, 31].contains(&node), answer) {
            (false, answer) => assert!(answer.is_ok(), "m{node}: {answer:?}"),
            (true, Err(refused)) => {
                assert!(refused.message.contains("the plugin's limit for a node"), "{refused:?}");
            }
            (true, Ok(_)) => panic!("m{node} has more volumes than its plugin takes"),
        }
    }
    let counts = [3, 6, 7].map(|node| format!("/csid/v1/used/m{node}/p"));
    for (key, due) in counts.iter().zip([1, 2, 2]) {
        let found = crowd.raw.below(key).await.remove(0);
        let value: serde_json::Value = serde_json::from_slice(&found.value).unwrap();
        assert_eq!(value["volumes"].as_u64(), Some(due), "{key}");
    }
    let written = crowd.claims("shared").await;
    assert_eq!((written.len(), granted(&answers)), (56, written));
}

/// Callers that hang up are part of the same transactions.
#[tokio::test]
async fn caller_that_goes_away_harms_no_other() {
    let mut crowd = Crowd::start(120).await;
    crowd.site.register("shared", MANY).await;
    let calls = (0..crowd.nodes).map(|node| {
        let (mut client, ask) = (crowd.clients[node % SERVERS].clone(), crowd.ask(node, "shared", MANY));
        async move {
            let limit = if node % 2 == 0 { Duration::from_millis(node as u64) } else { BOUND };
            tokio::time::timeout(limit, client.claim(ask)).await
        }
    });
    let answers = join_all(calls).await;
    for (node, answer) in answers.into_iter().enumerate().filter(|(node, _)| node % 2 == 1) {
        assert!(matches!(answer, Ok(Ok(_))), "m{node}: {answer:?}");
    }
    // What became of the others is found by the same calls.
    let again = crowd.claim_all("shared", MANY).await;
    let written = crowd.claims("shared").await;
    assert_eq!((written.len(), granted(&again)), (120, written));
}

/// Claims of one node end while others of it begin, and while the calls of those that end come again.
#[tokio::test]
async fn claims_of_a_volume_end_in_few_transactions() {
    const CONSUMERS: usize = 60;
    let site = Site::start(2).await;
    site.register("shared", MANY).await;
    let node = site.node("n1");
    let _session = node.join(0).await;
    let (_, _other) = node.say_hello(1).await.unwrap();
    site.register("warm", ONE).await;
    node.claim(0, "warm").await.unwrap();
    node.claim(1, "warm").await.unwrap();
    let clients = [node.client(0), node.client(1)];
    let claim_all = async |prefix: &str| {
        let calls = (0..CONSUMERS).map(|n| {
            let mut ask = node.ask("shared", &format!("{prefix}{n}"));
            ask.call = format!("call {prefix}{n}");
            ask.r#use.as_mut().unwrap().access_mode = MANY.into();
            let mut client = clients[n % 2].clone();
            async move { client.claim(ask).await.unwrap().into_inner().claim }
        });
        join_all(calls).await
    };
    let first = claim_all("a").await;
    let end_all = async || {
        let calls = first.iter().enumerate().map(|(n, claim)| {
            let owed = Owed { consumer: format!("a{n}"), ..node.owed("shared", claim) };
            let mut client = clients[n % 2].clone();
            async move { client.detached(owed).await.unwrap() }
        });
        join_all(calls).await
    };
    let before = transactions(&site).await;
    let (again, _, second) = tokio::join!(claim_all("a"), end_all(), claim_all("b"));
    let count = transactions(&site).await - before;
    println!("120 claims and 60 ends in {count} transactions");
    assert!(count <= 80, "{count} transactions");
    let mut raw = site.raw().await;
    let written = raw.below("/csid/v1/vol/default/shared/claim/").await;
    let written: BTreeSet<_> = written
        .iter()
        .map(|kv| {
            serde_json::from_slice::<serde_json::Value>(&kv.value).unwrap()["id"].as_str().unwrap().to_owned()
        })
        .collect();
    // A call that came before the end was granted the claim that has ended.
    let stay = again.into_iter().filter(|claim| !first.contains(claim));
    assert_eq!(written, second.into_iter().chain(stay).collect());
    let past = raw.below("/csid/v1/vol/default/shared/past/").await;
    assert_eq!(past.len(), 16, "the last claims that ended are kept");
    // They come once more, and end nothing.
    end_all().await;
    assert_eq!(raw.below("/csid/v1/vol/default/shared/claim/").await.len(), written.len());
}

/// One caller claims a volume whose controller answers at once. The least of many rounds has nothing of the servers' beats.
#[tokio::test]
async fn attach_for_one_caller_has_its_cost() {
    let site = Site::start(SERVERS).await;
    site.register("data", ONE).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _session) = user(&site, "n1", 0).await;
    let mut client = n1.client(0);
    let mut counted = Vec::new();
    for round in 0..20 {
        let ask = ClaimAsk { call: format!("call {round}"), ..n1.ask("data", "web") };
        let before = (handled(&site, "Txn").await, handled(&site, "Range").await);
        let (granted, _) = tokio::join!(client.claim(ask), controller.publish());
        let after = (handled(&site, "Txn").await, handled(&site, "Range").await);
        counted.push((after.0 - before.0, after.1 - before.1));
        n1.detached(0, "data", &granted.unwrap().into_inner().claim).await.unwrap();
        controller.unpublish().await;
        eventually("the claim is free", async || row(&site, "vol/default/data/claim").await.is_empty()).await;
    }
    println!("transactions and reads of each attach: {counted:?}");
    let (transactions, reads) = counted.into_iter().min().unwrap();
    assert_eq!(transactions, 2);
    // The task looks at the record once more, perhaps after the count.
    assert!(reads <= 2, "{reads} reads");
}

/// A first name is compared with those of all nodes. Reports that wait at the same time share a read of them.
#[tokio::test]
async fn first_reports_of_many_nodes_share_reads() {
    const NODES: usize = 60;
    let site = Site::start(1).await;
    let (mut nodes, mut sessions) = (Vec::new(), Vec::new());
    for n in 0..NODES {
        let node = site.node(&format!("n{n}"));
        sessions.push(welcome(&node, 0).await.1);
        nodes.push(node);
    }
    let before = handled(&site, "Range").await;
    for (n, session) in sessions.iter_mut().enumerate() {
        session.report_name(&format!("id of n{n}")).await;
    }
    let mut polls = 0;
    eventually("the reports are written", async || {
        polls += 1;
        let rows = site.raw().await.below("/csid/v1/node/").await;
        rows.iter().filter(|kv| String::from_utf8_lossy(&kv.value).contains("\"id of n")).count() == NODES
    })
    .await;
    let reads = handled(&site, "Range").await - before - polls;
    println!("{reads} reads for the first reports of {NODES} nodes");
    // Each report reads the row of its node twice. Without a shared read it makes three.
    assert!(reads < 3 * NODES as u64 - 10, "{reads} reads");
}
