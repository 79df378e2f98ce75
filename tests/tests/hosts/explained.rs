//! Explain on a host of a cluster: what the servers know of other hosts' claims.

use std::time::UNIX_EPOCH;

use csi_proto::cluster::v1::ReleaseAsk;
use csi_proto::time::timestamp;
use csid_client::{CallOptions, Kind};
use csid_tests::ask::*;
use csid_tests::world::{eventually, refusal, world};

use crate::shown::csictl_of;
use crate::*;

fn now_usec() -> u64 {
    u64::try_from(UNIX_EPOCH.elapsed().unwrap().as_micros()).unwrap()
}

/// Returns whether a line of the text ends with `claim since TIME`, where TIME is between the two. Times have milliseconds, and sort as texts do.
fn is_in_time(text: &str, claim: &str, between: [u64; 2]) -> bool {
    let [from, to] = between.map(timestamp);
    let of_line =
        |line: &str| line.split_once(claim)?.1.strip_prefix(" since ").map(|at| at.trim().to_owned());
    text.lines().filter_map(of_line).any(|at| from <= at && at <= to)
}

#[test]
fn explanation_names_another_hosts_claim() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let (client, mut node) = n1(w, &site).await;
        let explain = async || client.explain(NAMESPACE, "data", CallOptions::default()).await;
        let unused = explain().await.unwrap();
        assert!(unused.waiting_for.is_empty() && unused.holders.is_empty(), "{unused:?}");
        let (kind, _) = refusal(client.explain(NAMESPACE, "none", CallOptions::default()).await);
        assert_eq!(kind, Kind::NotFound);

        let other = site.node("n2");
        let session = other.join(0).await;
        let begun = now_usec();
        other.claim(0, "data").await.unwrap();
        let claimed = now_usec();
        let found = explain().await.unwrap();
        assert_eq!(found.holders, ["n2/web"]);
        let said = csictl_of(w, &["explain", NAMESPACE, "data"]).await;
        let said = String::from_utf8(said.stdout).unwrap();
        for text in [found.steps.join("\n"), said] {
            assert!(is_in_time(&text, "claim of n2/web: taken", [begun, claimed]), "{text}");
        }

        // The other host has to unmount the volume, and is away.
        let release = ReleaseAsk { deadline_ms: 1, ..release_ask("data", "n2") };
        site.operator(0, "all").release(release).await.unwrap_err();
        drop(session);
        let due = "node n2: away, has yet to unmount it for 1 claims".to_owned();
        eventually("the other host is away", async || explain().await.unwrap().steps.contains(&due)).await;
        let said = csictl_of(w, &["explain", NAMESPACE, "data"]).await;
        let said = String::from_utf8(said.stdout).unwrap();
        assert!(said.contains("claim of n2/web waits for node n2 to unmount the volume"), "{said}");

        // Without a server csid says that it does not know.
        node.link.kill();
        cut_off(w).await;
        let (kind, error) = refusal(explain().await);
        assert_eq!(kind, Kind::Unavailable, "{}", error.message);
        let pair = site.client_pair("csid://prod/node/n1");
        node.link = site.link("n1", &pair, &site.addresses);
        joined(w).await;
        explain().await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn cut_off_host_explains_its_own_mount() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let (client, mut node) = n1(w, &site).await;
        let begun = now_usec();
        mount_registered(&client, "data", "web").await.unwrap();
        let claimed = now_usec();
        node.link.kill();
        cut_off(w).await;
        let found = client.explain(NAMESPACE, "data", CallOptions::default()).await.unwrap();
        assert_eq!(found.holders, ["web"]);
        let own = "claim of web on n1: taken";
        assert!(is_in_time(&found.steps.join("\n"), own, [begun, claimed]), "{found:?}");
        let unknown = |step: &String| step.starts_with("the servers' part is not known: ");
        assert!(found.steps.iter().any(unknown), "{found:?}");
        let pair = site.client_pair("csid://prod/node/n1");
        node.link = site.link("n1", &pair, &site.addresses);
        joined(w).await;
        let found = client.explain(NAMESPACE, "data", CallOptions::default()).await.unwrap();
        assert!(!found.steps.iter().any(unknown) && found.waiting_for.is_empty(), "{found:?}");
        unmount(&client, "data", "web").await.unwrap();
        w.nothing_left(&client).await;
    });
}
