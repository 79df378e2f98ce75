//! Explain on a host of a cluster: what the servers know of other hosts' claims.

use csi_proto::cluster::v1::ReleaseAsk;
use csid_client::{CallOptions, Kind};
use csid_tests::ask::*;
use csid_tests::world::{eventually, refusal, world};

use crate::shown::csictl_of;
use crate::*;

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
        other.claim(0, "data").await.unwrap();
        let found = explain().await.unwrap();
        assert_eq!(found.holders, ["n2/web"]);
        assert!(found.steps.contains(&"claim of n2/web: taken".to_owned()), "{found:?}");

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
        mount_registered(&client, "data", "web").await.unwrap();
        node.link.kill();
        cut_off(w).await;
        let found = client.explain(NAMESPACE, "data", CallOptions::default()).await.unwrap();
        assert_eq!(found.holders, ["web"]);
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
