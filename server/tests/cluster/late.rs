//! Messages of a call that come after the node has given the call up, and while a later call has the claim.

use std::time::Duration;

use csi_proto::cluster::v1::{CallName, ClaimAsk, Owed};
use csid::volume::rules::name_call;

use crate::attach::{Controller, attached, row, user};
use crate::site::{First, Node, SOON, Site, eventually};

/// Returns the name of a call of the node's boot.
fn call(place: u64) -> String {
    name_call("boot1", place, "r")
}

fn ask(node: &Node, call: &str) -> ClaimAsk {
    ClaimAsk { call: call.into(), ..node.ask("data", "web") }
}

/// Asks for a claim, and returns its ID.
async fn claim(node: &Node, server: usize, call: &str) -> String {
    node.client(server).claim(ask(node, call)).await.unwrap().into_inner().claim
}

/// Says that a call has ended, as csid does: by its name, and by the ID of its claim if that is known.
async fn end(node: &Node, server: usize, call: &str, claim: &str) {
    let owed = Owed { call: call.into(), ..node.owed("data", claim) };
    node.client(server).detached(owed).await.unwrap();
}

async fn withdraw(node: &Node, server: usize, call: &str) {
    let boot = node.hello.boot.clone();
    let name = CallName { call: call.into(), volume: "data".into(), boot, ..CallName::default() };
    node.client(server).withdraw(name).await.unwrap();
}

/// Returns the claim in etcd. "": there is none.
async fn held(site: &Site) -> String {
    row(site, "vol/default/data/claim/n1/web").await
}

/// Sends all that a call may have sent, to each server.
async fn say_late(node: &Node, call: &str, claim: &str) {
    for server in 0..2 {
        withdraw(node, server, call).await;
        end(node, server, call, "").await;
        end(node, server, call, claim).await;
    }
}

/// A node that has joined at two servers.
async fn joined() -> (Site, Node, [crate::site::Session; 2]) {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let n1 = site.node("n1");
    let sessions = [n1.join(0).await, n1.join(1).await];
    let known = n1.claim(0, "data").await.unwrap();
    n1.detached(0, "data", &known).await.unwrap();
    (site, n1, sessions)
}

#[tokio::test]
async fn late_words_do_not_end_the_claim_of_a_later_call() {
    let (site, n1, _sessions) = joined().await;
    end(&n1, 0, &call(1), "").await;
    // The node has given the call up. Its Claim comes now.
    let first = claim(&n1, 0, &call(1)).await;
    let second = claim(&n1, 1, &call(2)).await;
    assert_ne!(first, second, "the later call has the ID of the earlier one");
    say_late(&n1, &call(1), &first).await;
    assert!(held(&site).await.contains(&second), "{}", held(&site).await);
    assert_eq!(claim(&n1, 0, &call(2)).await, second, "the same call again");

    // The late Claim comes once more, and takes nothing.
    claim(&n1, 0, &call(1)).await;
    say_late(&n1, &call(1), &first).await;
    assert!(held(&site).await.contains(&call(2)), "{}", held(&site).await);
    end(&n1, 0, &call(2), &second).await;
    assert_eq!(held(&site).await, "");
}

#[tokio::test]
async fn claim_keeps_its_name_if_the_order_is_not_known() {
    let (site, n1, _sessions) = joined().await;
    let first = claim(&n1, 0, &call(1)).await;
    for other in ["boot1.r".to_owned(), name_call("boot2", 9, "r"), name_call("boot1", 0, "r")] {
        assert_eq!(claim(&n1, 1, &other).await, first, "{other}");
        say_late(&n1, &other, "").await;
        assert!(held(&site).await.contains(&call(1)), "{other}: {}", held(&site).await);
    }
    // An operator's claim stays an operator's.
    end(&n1, 0, &call(1), &first).await;
    let for_node = ClaimAsk { node: "n1".into(), boot: String::new(), ..ask(&n1, &call(1)) };
    let granted = site.operator(0, "all").claim(for_node).await.unwrap().into_inner().claim;
    assert_eq!(claim(&n1, 1, &call(2)).await, granted);
    say_late(&n1, &call(2), "").await;
    assert!(held(&site).await.contains("operator/all"), "{}", held(&site).await);
}

/// The node's first call has made the claim. The controller's answer comes when the second call waits for it, too.
#[tokio::test]
async fn late_words_do_not_end_a_pending_claim() {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let (welcome, mut other) = n1.say_hello(1).await.unwrap();
    assert!(matches!(welcome, First::Welcome(_)), "{welcome:?}");
    other.report_name("id of n1").await;
    let asking = |server: usize, place| {
        let (mut client, ask) = (n1.client(server), ask(&n1, &call(place)));
        tokio::spawn(async move { client.claim(ask).await.map(|granted| granted.into_inner().claim) })
    };
    let _first = asking(0, 1);
    let publish = controller.called().await;
    let second = asking(1, 2);
    eventually("the later call has the claim", async || held(&site).await.contains(&call(2))).await;
    say_late(&n1, &call(1), "").await;
    controller.end(&publish, attached("/dev/x")).await;
    let second = tokio::time::timeout(SOON, second).await.expect("no answer").unwrap().unwrap();
    say_late(&n1, &call(1), "").await;
    assert!(!controller.is_called(Duration::from_secs(2)).await, "the volume is detached");
    assert!(held(&site).await.contains(&second), "{}", held(&site).await);
    end(&n1, 0, &call(2), &second).await;
    controller.unpublish().await;
    eventually("the claim is free", async || held(&site).await.is_empty()).await;
}

/// Both calls of a node wait in the queue, the late one in front.
#[tokio::test]
async fn late_words_do_not_end_a_claim_of_the_queue() {
    let (site, n1, _sessions) = joined().await;
    let n2 = site.node("n2");
    let _session = n2.join(0).await;
    let others = n2.claim(0, "data").await.unwrap();
    let waits = |place| ClaimAsk { queue_ms: 60_000, answer_ms: 1, ..ask(&n1, &call(place)) };
    for place in [1, 2] {
        n1.client(0).claim(waits(place)).await.unwrap_err();
    }
    let entries = site.raw().await.below("/csid/v1/vol/default/data/queue/").await;
    assert_eq!(entries.len(), 2);
    n2.detached(0, "data", &others).await.unwrap();
    let mut second = String::new();
    eventually("the later call is granted the claim", async || {
        second = n1.client(0).claim(waits(2)).await.map(|of| of.into_inner().claim).unwrap_or_default();
        !second.is_empty()
    })
    .await;
    say_late(&n1, &call(1), "").await;
    let held = held(&site).await;
    assert!(held.contains(&second) && held.contains(&call(2)), "{held}");
}
