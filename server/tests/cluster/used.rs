//! A node's volume limit: the count of its volumes of a plugin, which two servers keep together.

use std::collections::BTreeSet;

use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{Attaches, AuditAsk, DrainAsk, ForgetAsk, NodeChange, Owed, PluginReport};
use tokio::task::JoinSet;
use tonic::Code;

use crate::site::{First, Node, Raw, Refusal, Session, Site, eventually, register};

const MANY: &str = "multi-node-multi-writer";

/// Joins at a server, with a plugin that has a limit.
async fn limited(site: &Site, name: &str, server: usize, most: u64) -> (Node, Session) {
    let node = site.node(name);
    let (first, mut session) = node.say_hello(server).await.unwrap();
    assert!(matches!(first, First::Welcome(_)), "{first:?}");
    report(site, name, &mut session, most).await;
    (node, session)
}

async fn report(site: &Site, name: &str, session: &mut Session, most: u64) {
    session
        .report_as(PluginReport {
            plugin: "p".into(),
            attaches: Attaches::No.into(),
            max_volumes: Some(most),
            ..PluginReport::default()
        })
        .await;
    let mut raw = site.raw().await;
    let limit = format!("\"max-volumes\":{most}");
    eventually("the servers know the limit", async || {
        raw.below(&format!("/csid/v1/node/{name}"))
            .await
            .first()
            .is_some_and(|kv| String::from_utf8_lossy(&kv.value).contains(&limit))
    })
    .await;
}

/// Returns the count of a node's volumes in etcd. `None`: there is no row.
async fn counted(raw: &mut Raw, node: &str) -> Option<u64> {
    let found = raw.below(&format!("/csid/v1/used/{node}/p")).await;
    let value: serde_json::Value = serde_json::from_slice(&found.first()?.value).unwrap();
    Some(value["volumes"].as_u64().unwrap_or_else(|| panic!("{value} is no count at rest")))
}

/// Returns the volumes that a node has claimed, by the keys of the claims.
async fn claimed(raw: &mut Raw, node: &str) -> BTreeSet<String> {
    let claims = raw.below("/csid/v1/vol/default/").await;
    let keys = claims.into_iter().map(|kv| String::from_utf8(kv.key).unwrap());
    let of_node = keys.filter(|key| key.contains(&format!("/claim/{node}/")));
    of_node.map(|key| key.split('/').nth(5).unwrap().to_owned()).collect()
}

async fn volumes(site: &Site, count: usize) {
    for n in 0..count {
        site.register(&format!("v{n}"), MANY).await;
    }
}

/// Claims a volume. Returns the claim's id.
async fn claim(
    node: &Node,
    server: usize,
    volume: &str,
    consumer: &str,
    call: &str,
) -> Result<String, Refusal> {
    let mut ask = node.ask(volume, consumer);
    ask.call = call.into();
    ask.r#use.as_mut().unwrap().access_mode = MANY.into();
    let granted = node.client(server).claim(ask).await;
    granted.map(|granted| granted.into_inner().claim).map_err(|status| Refusal::of(&status))
}

fn is_full(refused: &Refusal) -> bool {
    refused.kind == "ClaimConflict" && refused.message.contains("the plugin's limit for a node")
}

async fn detach(node: &Node, server: usize, volume: &str, consumer: &str, id: &str) {
    let owed = Owed { consumer: consumer.into(), ..node.owed(volume, id) };
    node.client(server).detached(owed).await.unwrap();
}

#[tokio::test]
async fn node_has_as_many_volumes_as_its_plugin_takes() {
    let site = Site::start(2).await;
    volumes(&site, 4).await;
    let (n1, _one) = limited(&site, "n1", 0, 2).await;
    let _again = n1.join(1).await;
    let (n2, _two) = limited(&site, "n2", 1, 0).await;
    let mut raw = site.raw().await;
    let first = claim(&n1, 0, "v0", "a", "1").await.unwrap();
    let second = claim(&n1, 0, "v0", "b", "2").await.unwrap();
    claim(&n1, 0, "v1", "a", "3").await.unwrap();
    let refused = claim(&n1, 0, "v2", "a", "4").await.unwrap_err();
    assert!(
        is_full(&refused) && refused.code == Code::FailedPrecondition && refused.retryable,
        "{refused:?}"
    );
    assert_eq!(counted(&mut raw, "n1").await, Some(2), "two claims of a volume are one volume");
    claim(&n1, 0, "v1", "b", "5").await.unwrap();
    for n in 0..4 {
        claim(&n2, 1, &format!("v{n}"), "a", &format!("n2 {n}")).await.unwrap();
    }
    assert_eq!(counted(&mut raw, "n2").await, None, "no limit is counted");
    detach(&n1, 0, "v0", "a", &first).await;
    assert!(is_full(&claim(&n1, 0, "v2", "a", "6").await.unwrap_err()), "v0 has another claim");
    detach(&n1, 0, "v0", "b", &second).await;
    claim(&n1, 0, "v2", "a", "7").await.unwrap();
    assert_eq!(counted(&mut raw, "n1").await, Some(2));
    // The same claim again takes no place.
    claim(&n1, 0, "v2", "a", "7").await.unwrap();
    assert_eq!(claimed(&mut raw, "n1").await.len(), 2);
}

#[tokio::test]
async fn limit_that_comes_later_counts_what_is_there() {
    let site = Site::start(1).await;
    volumes(&site, 4).await;
    let (n1, mut session) = limited(&site, "n1", 0, 0).await;
    for n in 0..3 {
        claim(&n1, 0, &format!("v{n}"), "a", &n.to_string()).await.unwrap();
    }
    report(&site, "n1", &mut session, 3).await;
    assert!(is_full(&claim(&n1, 0, "v3", "a", "3").await.unwrap_err()));
    let mut raw = site.raw().await;
    assert_eq!(counted(&mut raw, "n1").await, Some(3));
    // A plugin that has not said its limit yet keeps the earlier one.
    session.report(Attaches::No).await;
    assert!(is_full(&claim(&n1, 0, "v3", "a", "4").await.unwrap_err()));
    report(&site, "n1", &mut session, 4).await;
    claim(&n1, 0, "v3", "a", "5").await.unwrap();
}

#[tokio::test]
async fn last_place_is_given_once_by_two_servers() {
    let site = Site::start(2).await;
    volumes(&site, 8).await;
    let (n1, _one) = limited(&site, "n1", 0, 3).await;
    let (first, mut at_the_other) = n1.say_hello(1).await.unwrap();
    assert!(matches!(first, First::Welcome(_)));
    report(&site, "n1", &mut at_the_other, 3).await;
    let mut claims = JoinSet::new();
    for n in 0..8 {
        let mut ask = n1.ask(&format!("v{n}"), "a");
        ask.call = n.to_string();
        ask.r#use.as_mut().unwrap().access_mode = MANY.into();
        let mut client = n1.client(n % 2);
        claims.spawn(async move { client.claim(ask).await.map_err(|status| Refusal::of(&status)) });
    }
    let (granted, refused): (Vec<_>, Vec<_>) = claims.join_all().await.into_iter().partition(Result::is_ok);
    let mut raw = site.raw().await;
    assert_eq!((granted.len(), claimed(&mut raw, "n1").await.len()), (3, 3), "{refused:?}");
    assert!(refused.iter().all(|refused| is_full(refused.as_ref().unwrap_err())), "{refused:?}");
    assert_eq!(counted(&mut raw, "n1").await, Some(3));
}

#[tokio::test]
async fn claim_waits_for_a_place_of_its_node() {
    let site = Site::start(2).await;
    for volume in ["v0", "v1"] {
        site.register(volume, "single-node-writer").await;
    }
    let (n1, _one) = limited(&site, "n1", 0, 1).await;
    let n2 = site.node("n2");
    let _two = n2.join(1).await;
    let held = n1.claim(0, "v0").await.unwrap();
    let mut wait = n1.ask("v1", "web");
    (wait.call, wait.queue_ms, wait.answer_ms) = ("wait".into(), 600_000, 1);
    let status = n1.client(0).claim(wait.clone()).await.unwrap_err();
    let refused = Refusal::of(&status);
    assert!(is_full(&refused) && refused.message.contains("it waits"), "{refused:?}");
    // It is not in the way of another node.
    let other = n2.claim(1, "v1").await.unwrap();
    n2.detached(1, "v1", &other).await.unwrap();
    assert!(is_full(&Refusal::of(&n1.client(0).claim(wait.clone()).await.unwrap_err())));
    let (mut client, asked) = (n1.client(0), n1.ask("v1", "web"));
    let mut asked = csi_proto::cluster::v1::ClaimAsk { call: "wait".into(), ..asked };
    (asked.queue_ms, asked.answer_ms) = (600_000, 8_000);
    let waits = tokio::spawn(async move { client.claim(asked).await });
    // The end comes by the other server.
    let _again = n1.join(1).await;
    let (mut raw, begun) = (site.raw().await, std::time::Instant::now());
    n1.detached(1, "v0", &held).await.unwrap();
    eventually("the place is given", async || claimed(&mut raw, "n1").await.contains("v1")).await;
    assert!(begun.elapsed().as_secs() < 4, "nobody was woken: {:?}", begun.elapsed());
    drop(waits);
    assert_eq!(counted(&mut raw, "n1").await, Some(1));
}

#[tokio::test]
async fn wrong_count_is_found_and_a_forgotten_node_has_none() {
    let site = Site::start(1).await;
    volumes(&site, 2).await;
    let (n1, session) = limited(&site, "n1", 0, 2).await;
    let held = claim(&n1, 0, "v0", "a", "1").await.unwrap();
    let mut raw = site.raw().await;
    let findings = async || {
        let mut answers = site.admin(0, "reads").audit(AuditAsk {}).await.unwrap().into_inner();
        let mut found = Vec::new();
        while let Some(finding) = answers.message().await.unwrap() {
            found.push((finding.kind, finding.key));
        }
        found
    };
    assert_eq!(findings().await, []);
    let key = "/csid/v1/used/n1/p";
    raw.put(key, "{\"volumes\":2,\"later\":7}").await;
    assert_eq!(findings().await, [("used-differs".to_owned(), key.to_owned())]);
    detach(&n1, 0, "v0", "a", &held).await;
    assert_eq!(findings().await, [("used-without-claim".to_owned(), key.to_owned())]);
    assert!(String::from_utf8(raw.below(key).await.remove(0).value).unwrap().contains("\"later\":7"));
    // An end that finds no volume counted has them counted again.
    raw.put(key, "{\"volumes\":0}").await;
    let held = claim(&n1, 0, "v0", "a", "2").await.unwrap();
    raw.put(key, "{\"volumes\":0}").await;
    detach(&n1, 0, "v0", "a", &held).await;
    let held = claim(&n1, 0, "v1", "a", "3").await.unwrap();
    assert_eq!(counted(&mut raw, "n1").await, Some(1));
    detach(&n1, 0, "v1", "a", &held).await;
    assert_eq!((counted(&mut raw, "n1").await, findings().await), (Some(0), Vec::new()));
    drop(session);
    let mut admin = site.admin(0, "all");
    let change = |change| NodeChange { node: "n1".into(), change: Some(change) };
    admin.set_node(change(Change::Drain(DrainAsk {}))).await.unwrap();
    eventually("the node is forgotten", async || {
        admin.set_node(change(Change::Forget(ForgetAsk {}))).await.is_ok()
    })
    .await;
    assert_eq!((counted(&mut raw, "n1").await, findings().await), (None, Vec::new()));
}

/// Random claims and ends at two servers, against a model: a node's volumes by the claims in etcd.
#[tokio::test]
async fn count_is_the_claims_after_each_random_step() {
    let seed = std::env::var("CSID_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or_else(|| u64::from(std::process::id()));
    println!("CSID_SEED={seed}");
    let mut state = seed | 1;
    let mut roll = |sides: usize| {
        // xorshift64*
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        usize::try_from(state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33).unwrap() % sides
    };
    let site = Site::start(2).await;
    volumes(&site, 5).await;
    let limits = [2, 3];
    let mut nodes = Vec::new();
    for (n, most) in limits.iter().enumerate() {
        let name = format!("n{}", n + 1);
        let (node, session) = limited(&site, &name, 0, *most).await;
        let (first, mut other) = node.say_hello(1).await.unwrap();
        assert!(matches!(first, First::Welcome(_)));
        report(&site, &name, &mut other, *most).await;
        nodes.push((node, name, session, other));
    }
    let mut raw = site.raw().await;
    // The claims that the model has: node, volume, consumer, id.
    let mut held: Vec<(usize, String, String, String)> = Vec::new();
    let (mut granted, mut full, mut ended) = (0, 0, 0);
    for step in 0..250 {
        let server = roll(2);
        if roll(3) == 0 && !held.is_empty() {
            let (node, volume, consumer, id) = held.swap_remove(roll(held.len()));
            detach(&nodes[node].0, server, &volume, &consumer, &id).await;
            ended += 1;
        } else {
            let node = roll(2);
            let (volume, consumer) = (format!("v{}", roll(5)), format!("c{}", roll(2)));
            let is_there = |held: &[(usize, String, String, String)], consumer: Option<&str>| {
                held.iter().any(|of| of.0 == node && of.1 == volume && consumer.is_none_or(|c| of.2 == c))
            };
            if is_there(&held, Some(&consumer)) {
                continue;
            }
            let has: BTreeSet<&str> = held.iter().filter(|of| of.0 == node).map(|of| of.1.as_str()).collect();
            let has_place = is_there(&held, None) || (has.len() as u64) < limits[node];
            match claim(&nodes[node].0, server, &volume, &consumer, &format!("step {step}")).await {
                Ok(id) => {
                    assert!(has_place, "step {step}: more than the limit");
                    held.push((node, volume, consumer, id));
                    granted += 1;
                }
                Err(refused) => {
                    assert!(!has_place && is_full(&refused), "step {step}: {refused:?}");
                    full += 1;
                }
            }
        }
        for (n, (_, name, ..)) in nodes.iter().enumerate() {
            let model: BTreeSet<String> = held.iter().filter(|of| of.0 == n).map(|of| of.1.clone()).collect();
            assert_eq!(claimed(&mut raw, name).await, model, "step {step}");
            let count = counted(&mut raw, name).await.unwrap_or(0);
            assert_eq!(count, model.len() as u64, "step {step}: {name}");
        }
    }
    assert!(granted > 20 && full > 5 && ended > 20, "{granted} {full} {ended}");
}

/// A count is in the transaction of the volume's record, also of one that is registered for another plugin.
#[tokio::test]
async fn volumes_of_another_plugin_take_no_place() {
    let site = Site::start(1).await;
    volumes(&site, 1).await;
    let mut change = register("other", MANY);
    let Some(What::Register(of)) = &mut change.what else { panic!() };
    of.plugin = "q".into();
    site.operator(0, "all").change(change).await.unwrap();
    let node = site.node("n1");
    let (_, session) = node.say_hello(0).await.unwrap();
    let of = |plugin: &str| PluginReport {
        plugin: plugin.into(),
        attaches: Attaches::No.into(),
        max_volumes: Some(1),
        ..PluginReport::default()
    };
    let plugins = csi_proto::cluster::v1::Plugins { plugins: vec![of("p"), of("q")] };
    let is = csi_proto::cluster::v1::from_node::Is::Plugins(plugins);
    session.to_server.send(csi_proto::cluster::v1::FromNode { is: Some(is) }).await.unwrap();
    eventually("the servers know the plugins", async || claim(&node, 0, "v0", "a", "1").await.is_ok()).await;
    claim(&node, 0, "other", "a", "2").await.unwrap();
}
