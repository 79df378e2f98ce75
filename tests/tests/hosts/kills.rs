//! csid is killed at each edge of a claim that a server grants. Afterwards the servers and the host agree.

use csid_client::Client;
use csid_tests::ask::*;
use csid_tests::fault::Fault;
use csid_tests::world::{World, count, eventually, world};

use crate::*;

const EDGES: [&str; 6] =
    ["claim.before", "claim.after", "Claim.before", "Claim.after", "Detached.before", "Detached.after"];

/// Waits until the servers have a claim of the volume only if the host has it mounted.
pub(crate) async fn agree(site: &Site, client: &Client, edge: &str) {
    eventually(&format!("{edge}: servers and host agree"), async || {
        let operations = client.list_operations().await.unwrap();
        let is_mounted = row(client, "data", "web").await.is_some_and(|row| row.state == "mounted");
        let claimed = claims_at_servers(site, "data").await;
        let known: Vec<_> = claims(client).await.into_iter().map(|row| row.state).collect();
        let due = if is_mounted { vec!["taken".to_owned()] } else { Vec::new() };
        operations.is_empty() && claimed.len() == usize::from(is_mounted) && known == due
    })
    .await;
}

#[test]
fn killed_host_and_its_servers_agree() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let fault = Fault::of(w);
        let (mut client, _link) = n1(w, &site).await;
        let other = site.node("n2");
        let _session = other.join(0).await;
        let mut kills = 0;
        for edge in EDGES {
            for passing in 1.. {
                let edge = format!("{edge}:{passing}");
                fault.arm(&edge);
                let mounted = mount_registered(&client, "data", "web").await.is_ok();
                let unmounted = mounted && unmount(&client, "data", "web").await.is_ok();
                if unmounted {
                    // The edge is not passed as often.
                    assert_eq!(fault.disarm(), edge);
                    break;
                }
                client = again(w, &fault).await;
                kills += 1;
                agree(&site, &client, &edge).await;
                // Nobody else has got it, and it can be used.
                mount_registered(&client, "data", "web").await.unwrap();
                let refused = other.claim(0, "data").await.unwrap_err();
                assert_eq!(refused.holders, ["n1/web"], "{edge}");
                unmount(&client, "data", "web").await.unwrap();
                servers_have(&site, "data", &[]).await;
            }
        }
        assert!(kills >= EDGES.len(), "{kills} kills");
        count("kills", kills);
        w.nothing_left(&client).await;
    });
}

/// Starts csid after it was killed.
pub(crate) async fn again(w: &mut World, fault: &Fault) -> Client {
    eventually("csid is killed", async || w.dead()).await;
    fault.disarm();
    assert!(w.launch(&[]).await);
    joined(w).await;
    let client = w.client().await;
    healthy(&client, "p").await;
    client
}
