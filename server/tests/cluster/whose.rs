//! The table of calls about a claim: by each kind of caller, and against whose claim. etcd is compared before and after each call.

use std::collections::BTreeMap;

use csi_proto::cluster::v1::cluster_client::ClusterClient;
use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{
    Attaches, BlockAsk, CallName, ClaimAsk, FenceAsk, HeldClaim, HeldClaims, Owed, ReleaseAsk, VolumeAsk,
};
use serde_json::Value;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::fence::{set, show};
use crate::recovery::{restored, writing};
use crate::site::{First, Refusal, SOON, Session, Site, ask, eventually, hello, open};

/// What became of a call, and of the claim that it is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cell {
    /// The call was answered, and etcd is as before.
    Done,
    /// The same, and the answer has the volume's context.
    Shown,
    /// The claim has changed or ended.
    Changed,
    /// The claim is as before, and another one was written.
    Added,
    /// The volume, node or claim has decided against the call. etcd is as before.
    Decided,
    /// No grant allows the call. etcd is as before.
    Denied,
}

use Cell::{Added, Changed, Decided, Denied, Done, Shown};

/// Whose claim a call is about: the caller's, another consumer's of its node, another node's, one that an operator has taken for a node, and a
/// claim that is not there. A caller that may have no claim is no node of them.
const WHOSE: [&str; 5] = ["own", "same-node", "other-node", "operators", "none"];

/// The calls about a claim that was granted, and about one that waits.
const CALLS: [&str; 9] = [
    "detached",
    "detached for web",
    "release",
    "release by force",
    "volume",
    "claim",
    "claim for its node",
    "withdraw",
    "detached that waits",
];

const NONE: [Cell; 5] = [Denied; 5];
const NO_EFFECT: [Cell; 5] = [Done; 5];

/// A claim that a call is about.
#[derive(Clone)]
struct Claimed {
    volume: String,
    /// The node of the claim.
    node: String,
    consumer: &'static str,
    uid: u32,
    /// The caller who has asked for it, as its certificate has it. `None`: there is no claim.
    by: Option<String>,
    /// Another node has the volume, and the claim waits.
    waits: bool,
    /// Empty: it waits, or there is no claim.
    id: String,
    /// How often it was asked for.
    number: usize,
}

impl Claimed {
    /// Returns the name of the call, which all callers give theirs. A call that was withdrawn is not repeated.
    fn call(&self) -> String {
        format!("call {} for {}", self.number, self.volume)
    }
}

/// The cluster, and who calls it.
struct Stage {
    site: Site,
    clients: BTreeMap<String, ClusterClient<Channel>>,
    sessions: Vec<Session>,
    /// With what the names of the present caller's volumes begin.
    prefix: String,
}

impl Stage {
    async fn start(nodes: &[&str]) -> Stage {
        let (site, clients, sessions) = (Site::start(1).await, BTreeMap::new(), Vec::new());
        let mut stage = Stage { site, clients, sessions, prefix: String::new() };
        stage.join(nodes).await;
        stage
    }

    async fn join(&mut self, nodes: &[&str]) {
        for node in nodes {
            let mut joined = None;
            let mut client = self.client(&format!("node/{node}"));
            eventually("the node joins", async || {
                joined = open(&mut client, hello(node)).await.ok();
                matches!(&joined, Some((First::Welcome(_), _)))
            })
            .await;
            let mut session = joined.expect("a session").1;
            session.report(Attaches::No).await;
            self.sessions.push(session);
        }
    }

    /// Returns a client. `who`: ROLE/NAME.
    fn client(&mut self, who: &str) -> ClusterClient<Channel> {
        let site = &self.site;
        let made =
            || ClusterClient::new(site.channel(0, Some(&site.client_pair(&format!("csid://prod/{who}")))));
        self.clients.entry(who.to_owned()).or_insert_with(made).clone()
    }

    /// Returns all of the caller's volumes that is in etcd, without its form. Other callers' places in queues end 60 s after they have asked.
    async fn rows(&self) -> BTreeMap<String, Vec<u8>> {
        let found = self.site.raw().await.below(&format!("/csid/v1/vol/default/{}", self.prefix)).await;
        found.into_iter().map(|kv| (String::from_utf8(kv.key).unwrap(), kv.value)).collect()
    }

    /// Has claims of each kind. `me`: the node whose claims are the caller's own.
    async fn claims(&mut self, prefix: &str, me: &str, waits: bool) -> Vec<Claimed> {
        let mut claims = Vec::new();
        for whose in WHOSE {
            let of_node = |node: &str| Some(format!("node/{node}"));
            let (node, consumer, uid, by) = match whose {
                "own" => (me, "web", 1000, of_node(me)),
                "same-node" => (me, "other", 1001, of_node(me)),
                "other-node" => ("n9", "web", 1000, of_node("n9")),
                "operators" => ("n8", "for", 1000, Some("operator/all".to_owned())),
                _ => (me, "web", 1000, None),
            };
            let volume = format!("{prefix}-{whose}");
            self.site.register(&volume, "single-node-writer").await;
            let node = node.to_owned();
            let mut claimed =
                Claimed { volume, node, consumer, uid, by, waits, id: String::new(), number: 1 };
            self.establish(&mut claimed).await;
            claims.push(claimed);
        }
        claims
    }

    /// Takes a claim, or has it wait.
    async fn establish(&mut self, of: &mut Claimed) {
        if of.waits {
            let mut holder = self.client("node/n7");
            let ask = ClaimAsk { boot: hello("n7").boot, ..ask(&of.volume, "holder") };
            eventually("the volume is held", async || holder.claim(ask.clone()).await.is_ok()).await;
        }
        let Some(by) = of.by.clone() else { return };
        let ask = ClaimAsk { queue_ms: 600_000, answer_ms: 1, ..claim_ask(of, &by) };
        let ask = if of.waits { ask } else { ClaimAsk { queue_ms: 0, answer_ms: 0, ..ask } };
        let mut client = self.client(&by);
        let waits = of.waits;
        let id = &mut of.id;
        eventually("the claim is there", async || match client.claim(ask.clone()).await {
            Ok(granted) => {
                assert!(!waits, "the volume was granted twice");
                *id = granted.into_inner().claim;
                true
            }
            Err(refused) => waits && Refusal::of(&refused).kind == "ClaimConflict",
        })
        .await;
    }

    /// Ends all claims of a volume, those that wait first.
    async fn clear(&mut self, volume: &str) {
        for part in ["queue", "claim"] {
            let prefix = format!("/csid/v1/vol/default/{volume}/{part}/");
            for row in self.site.raw().await.below(&prefix).await {
                let claim: Value = serde_json::from_slice(&row.value).unwrap();
                let text = |field: &str| claim[field].as_str().expect("a text").to_owned();
                let (node, consumer) = (text("node"), text("consumer"));
                let owed = Owed {
                    claim: text("id"),
                    volume: volume.into(),
                    consumer,
                    boot: hello(&node).boot,
                    ..Owed::default()
                };
                self.client(&format!("node/{node}")).detached(owed).await.unwrap();
            }
            eventually("the claims end", async || self.site.raw().await.below(&prefix).await.is_empty())
                .await;
        }
    }

    /// Makes a call about a claim, and returns what became of it and of the claim.
    async fn cell(
        &mut self,
        who: &str,
        call: &str,
        of: &Claimed,
        before: &BTreeMap<String, Vec<u8>>,
    ) -> Cell {
        let mut client = self.client(who);
        let boot = who.strip_prefix("node/").map(|node| hello(node).boot).unwrap_or_default();
        let owed = Owed {
            claim: if of.id.is_empty() { "no claim".into() } else { of.id.clone() },
            volume: of.volume.clone(),
            consumer: of.consumer.into(),
            boot: boot.clone(),
            ..Owed::default()
        };
        let release = ReleaseAsk {
            volume: of.volume.clone(),
            node: of.node.clone(),
            consumer: of.consumer.into(),
            deadline_ms: 1,
            ..ReleaseAsk::default()
        };
        let mut is_shown = false;
        let answer = match call {
            "detached" => client.detached(owed).await.map(drop),
            "detached for web" => client.detached(Owed { consumer: "web".into(), ..owed }).await.map(drop),
            "detached that waits" => {
                let owed = Owed { claim: String::new(), call: of.call(), ..owed };
                client.detached(owed).await.map(drop)
            }
            "release" => client.release(release).await.map(drop),
            "release by force" => client.release(ReleaseAsk { force: true, ..release }).await.map(drop),
            "volume" => {
                let ask = VolumeAsk { volume: of.volume.clone(), ..VolumeAsk::default() };
                client.volume(ask).await.map(|row| {
                    let spec = row.into_inner().spec.unwrap_or_default();
                    is_shown = spec.volume_context.get("share").is_some_and(|share| share == "hunter2");
                })
            }
            "claim" => {
                let ask = ClaimAsk { node: String::new(), uid: 1000, ..claim_ask(of, who) };
                client.claim(ask).await.map(drop)
            }
            "claim for its node" => {
                let ask = ClaimAsk { node: of.node.clone(), uid: 1000, ..claim_ask(of, who) };
                client.claim(ask).await.map(drop)
            }
            "withdraw" => {
                let name =
                    CallName { call: of.call(), namespace: String::new(), volume: of.volume.clone(), boot };
                client.withdraw(name).await.map(drop)
            }
            other => panic!("{other}"),
        };
        outcome(answer, is_shown, of, before, &self.rows().await)
    }

    /// Expects what becomes of each call of a caller about each claim. `me`: the node whose claims are its own.
    async fn expect(&mut self, prefix: &str, who: &str, me: &str, due: [[Cell; 5]; 9]) {
        let held = self.claims(prefix, me, false).await;
        let waiting = self.claims(&format!("{prefix}-q"), me, true).await;
        self.compare(prefix, who, [held, waiting], due).await;
    }

    /// Does the same for claims that are there.
    async fn compare(
        &mut self,
        prefix: &str,
        who: &str,
        [mut held, mut waiting]: [Vec<Claimed>; 2],
        due: [[Cell; 5]; 9],
    ) {
        self.prefix = format!("{prefix}-");
        let mut before = self.rows().await;
        let mut wrong = Vec::new();
        for (call, due) in CALLS.into_iter().zip(due) {
            let is_of_waiting = ["withdraw", "detached that waits"].contains(&call);
            for ((whose, due), n) in WHOSE.into_iter().zip(due).zip(0..) {
                let of = if is_of_waiting { &mut waiting[n] } else { &mut held[n] };
                let mut found = self.cell(who, call, of, &before).await;
                // The server does not know the caller's plugin yet.
                if call.starts_with("claim") && due == Added {
                    let begun = std::time::Instant::now();
                    while found == Decided && begun.elapsed() < SOON {
                        found = self.cell(who, call, of, &before).await;
                    }
                }
                if found != due {
                    wrong.push(format!("{who} ({prefix}): {call} of {whose} is {found:?}, and not {due:?}"));
                }
                if matches!(found, Changed | Added) {
                    self.clear(&of.volume).await;
                    of.number += 1;
                    self.establish(of).await;
                    before = self.rows().await;
                }
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
    }
}

/// Returns the cell of a call. Fails if anything of another volume has changed.
fn outcome(
    answer: Result<(), Status>,
    is_shown: bool,
    of: &Claimed,
    before: &BTreeMap<String, Vec<u8>>,
    after: &BTreeMap<String, Vec<u8>>,
) -> Cell {
    let own = format!("/csid/v1/vol/default/{}/", of.volume);
    let part = format!("{own}{}/", if of.waits { "queue" } else { "claim" });
    let keys = before.keys().chain(after.keys());
    let changed: Vec<&String> = keys.filter(|key| before.get(*key) != after.get(*key)).collect();
    let of_others: Vec<_> = changed.iter().filter(|key| !key.starts_with(&own)).collect();
    assert!(of_others.is_empty(), "a call about {} has changed {of_others:?}", of.volume);
    let is_of_claim = |key: &&&String| key.starts_with(&part) && before.contains_key(**key);
    let refused = answer.err().map(|status| {
        assert!(status.metadata().contains_key("csid-failure-bin"), "{status:?}");
        status.code()
    });
    match (refused, changed.iter().any(|key| is_of_claim(&key))) {
        (Some(Code::PermissionDenied), _) => {
            assert!(changed.is_empty(), "a call that was denied has changed {changed:?}");
            Denied
        }
        // A release may take longer than its caller waits.
        (_, true) => Changed,
        (None, false) if changed.is_empty() => {
            if is_shown {
                Shown
            } else {
                Done
            }
        }
        (None, false) => Added,
        (Some(code), false) => {
            assert!(changed.is_empty(), "a call that has failed with {code:?} has changed {changed:?}");
            Decided
        }
    }
}

/// Returns the call that asks for a claim, by a caller.
fn claim_ask(of: &Claimed, who: &str) -> ClaimAsk {
    let (boot, node) = match who.strip_prefix("node/") {
        Some(node) => (hello(node).boot, String::new()),
        None => (String::new(), of.node.clone()),
    };
    ClaimAsk { call: of.call(), boot, node, uid: of.uid, ..ask(&of.volume, of.consumer) }
}

/// Returns a row of the table, for a caller without a grant about claims. `detached`: what becomes of its word about a claim.
fn without_claims(detached: Cell, volume: Cell) -> [[Cell; 5]; 9] {
    let (detached, volume) = ([detached; 5], [volume; 5]);
    [detached, detached, NONE, NONE, volume, NONE, NONE, detached, detached]
}

#[tokio::test]
async fn call_reaches_no_claim_that_is_not_the_callers() {
    let nodes = ["n1", "n2", "n3", "n7", "n8", "n9", "n-trusted", "c1", "joins"];
    let mut stage = Stage::start(&nodes).await;
    // A node ends its own claims, and asks for its own ones. Another uid has not the claim of `other`.
    let node = [
        [Changed, Changed, Done, Done, Done],
        [Changed, Done, Done, Done, Done],
        NONE,
        NONE,
        [Shown, Shown, Done, Done, Done],
        [Done, Denied, Decided, Decided, Added],
        [Done, Denied, Denied, Denied, Added],
        [Changed, Changed, Done, Done, Done],
        [Changed, Changed, Done, Done, Done],
    ];
    stage.expect("a", "node/n1", "n1", node).await;
    let releases = [Changed, Changed, Changed, Changed, Done];
    // It has an operator's grants, and so it claims for other nodes. Their calls are theirs still.
    let trusted = [
        node[0],
        node[1],
        releases,
        releases,
        node[4],
        node[5],
        [Done, Denied, Done, Done, Added],
        node[7],
        node[8],
    ];
    stage.expect("b", "node/n-trusted", "n-trusted", trusted).await;
    let host = without_claims(Done, Denied);
    stage.expect("c", "node/c1", "n1", host).await;
    stage.expect("d", "node/joins", "n1", host).await;
    stage.expect("e", "node/stranger", "n1", host).await;
    let all = [
        NONE,
        NONE,
        releases,
        releases,
        NO_EFFECT,
        // An operator has no node of its own.
        [Decided; 5],
        [Done, Denied, Done, Done, Added],
        [Done, Done, Done, Changed, Done],
        NONE,
    ];
    stage.expect("f", "operator/all", "n1", all).await;
    let mut due = without_claims(Denied, Denied);
    due[2] = releases;
    stage.expect("g", "operator/releases", "n1", due).await;
    stage.expect("h", "operator/reads", "n1", without_claims(Denied, Done)).await;
    for (prefix, who) in [("i", "operator/nobody"), ("j", "operator/n1"), ("k", "server/s7")] {
        stage.expect(prefix, who, "n1", without_claims(Denied, Denied)).await;
    }

    // A fenced node has no claim any more, and one of its consumers might go on. The volumes may be another node's.
    let claims = [stage.claims("l", "n2", false).await, stage.claims("l-q", "n2", true).await];
    let fence =
        FenceAsk { reason: "off".into(), revision: show(&stage.site, "n2").await.revision, by_hand: true };
    set(&stage.site, 0, "n2", Change::Fence(fence)).await.unwrap();
    for of in claims.iter().flatten().filter(|of| of.node == "n2") {
        let prefix =
            format!("/csid/v1/vol/default/{}/{}/", of.volume, if of.waits { "queue" } else { "claim" });
        let mut raw = stage.site.raw().await;
        eventually("the fenced node's claims end", async || raw.below(&prefix).await.is_empty()).await;
    }
    let fenced = [
        NO_EFFECT,
        NO_EFFECT,
        NONE,
        NONE,
        NO_EFFECT,
        [Decided; 5],
        [Decided, Decided, Denied, Denied, Decided],
        NO_EFFECT,
        NO_EFFECT,
    ];
    stage.compare("l", "node/n2", claims, fenced).await;

    let claims = [stage.claims("m", "n-trusted", false).await, stage.claims("m-q", "n-trusted", true).await];
    set(&stage.site, 0, "n-trusted", Change::Block(BlockAsk { reason: "stolen".into() })).await.unwrap();
    for of in claims[1].iter().filter(|of| of.node == "n-trusted") {
        let prefix = format!("/csid/v1/vol/default/{}/queue/", of.volume);
        let mut raw = stage.site.raw().await;
        eventually("the blocked node waits for nothing", async || raw.below(&prefix).await.is_empty()).await;
    }
    stage.compare("m", "node/n-trusted", claims, [[Decided; 5]; 9]).await;
}

/// While the cluster recovers, a node names claims. It brings back its own ones, and those of others stay.
#[tokio::test]
async fn word_of_a_node_changes_no_other_nodes_claim() {
    let nodes = ["n1", "n2", "n8", "n9", "n-trusted", "c1", "joins"];
    let mut stage = Stage::start(&nodes).await;
    let claims = stage.claims("a", "n1", false).await;
    set(&stage.site, 0, "n-trusted", Change::Block(BlockAsk { reason: "stolen".into() })).await.unwrap();
    restored(&stage.site, 0, 1).await.unwrap();
    stage.join(&["n1", "n2", "n8", "n9", "c1", "joins"]).await;
    // n1 holds its own claims, and adds one where it says to hold another's. An audit shows both.
    for (who, due) in [
        ("operator/all", NONE),
        ("operator/nobody", NONE),
        ("server/s7", NONE),
        ("node/c1", [Decided; 5]),
        ("node/joins", [Decided; 5]),
        ("node/stranger", [Decided; 5]),
        ("node/n-trusted", [Decided; 5]),
        ("node/n2", [Added; 5]),
        ("node/n1", [Done, Done, Added, Added, Added]),
    ] {
        let boot = who.strip_prefix("node/").map(|node| hello(node).boot).unwrap_or_default();
        for ((whose, due), of) in WHOSE.into_iter().zip(due).zip(&claims) {
            let held = HeldClaim {
                claim: if of.id.is_empty() { "no claim".into() } else { of.id.clone() },
                call: of.call(),
                volume: of.volume.clone(),
                consumer: of.consumer.into(),
                uid: 1000,
                usage: Some(writing("single-node-writer")),
                plugin: "p".into(),
                external_id: format!("ext-{}", of.volume),
                granted_boot: boot.clone(),
                ..HeldClaim::default()
            };
            let page = HeldClaims { boot: boot.clone(), generation: 2, claims: vec![held], last: false };
            let (mut client, before) = (stage.client(who), stage.rows().await);
            let mut refused = Vec::new();
            let mut answer = Ok(());
            // The row changes with the report of the session, and the node says it once more then, as csid does.
            eventually("the node is heard", async || {
                answer = client.hold(page.clone()).await.map(|held| refused = held.into_inner().refused);
                !answer.as_ref().is_err_and(|status| Refusal::of(status).kind == "Unavailable")
            })
            .await;
            let after = stage.rows().await;
            let found = match outcome(answer, false, of, &before, &after) {
                Done if !refused.is_empty() => Decided,
                found => found,
            };
            assert_eq!(found, due, "{who}: hold of {whose}: {refused:?}");
        }
    }
}
