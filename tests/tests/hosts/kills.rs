//! csid is killed at each edge of a claim that a server grants. Afterwards the servers and the host agree.

use std::collections::BTreeSet;
use std::time::Instant;

use csid::fault::edges_of;
use csid_client::{ClaimFilter, Client};
use csid_tests::ask::*;
use csid_tests::fault::Fault;
use csid_tests::world::{World, count, eventually, world};

use crate::controllers::c1_that;
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

/// A host that mounts and unmounts `data` again and again. csid is killed meanwhile.
struct Killed<'w> {
    w: &'w mut World,
    site: Site,
    fault: Fault,
    client: Client,
}

impl Killed<'_> {
    /// Mounts and unmounts. If csid is killed by that, the servers and the host agree afterwards, and the host gives the volume up. Returns the edge of the
    /// kill. `None`: there was none.
    async fn once(&mut self, armed: &str) -> Option<String> {
        let Killed { w, site, fault, client } = self;
        fault.arm(armed);
        let mounted = mount_registered(client, "data", "web").await.is_ok();
        let unmounted = mounted && unmount(client, "data", "web").await.is_ok();
        // The servers learn the end of the claim after the unmount was answered, and have the volume detached then.
        eventually(&format!("{armed}: csid is killed, or the claim ends"), async || {
            let claims = client.list_claims(ClaimFilter::default()).await;
            let is_detached = claims_at_servers(site, "data").await.is_empty();
            w.dead() || (unmounted && is_detached && claims.is_ok_and(|claims| claims.is_empty()))
        })
        .await;
        let edge = fault.disarm();
        if edge == armed {
            return None;
        }
        *client = again(w, fault).await;
        agree(site, client, &edge).await;
        if row(client, "data", "web").await.is_some() {
            unmount(client, "data", "web").await.unwrap();
        }
        servers_have(site, "data", &[]).await;
        eventually(&format!("{edge}: nothing is left"), async || {
            claims(client).await.is_empty() && w.leftovers().is_empty()
        })
        .await;
        Some(edge)
    }

    /// Kills csid at the first edge that it passes, then at the second one, and so on. `passed`: what it has to pass.
    async fn at_any_edge(mut self, passed: &[&str]) {
        let (begun, mut edges, mut kills) = (Instant::now(), BTreeSet::new(), 0);
        while let Some(edge) = self.once(&format!("any:{}", kills + 1)).await {
            edges.insert(edge);
            kills += 1;
        }
        for edge in passed.iter().flat_map(|name| edges_of(name)) {
            // Edges of two tasks have no order, so one may have had the number of another one.
            if !edges.contains(&edge) {
                kills += 1;
                assert_eq!(self.once(&format!("{edge}:1")).await.as_ref(), Some(&edge));
            }
        }
        count("kills", kills);
        count("edges", edges.len());
        count("seconds", usize::try_from(begun.elapsed().as_secs()).unwrap());
        self.w.nothing_left(&self.client).await;
    }
}

#[test]
fn host_killed_at_any_edge_agrees_with_servers() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let fault = Fault::of(w);
        let (client, _link) = n1(w, &site).await;
        let passed = ["Claim", "Detached", "claim", "intent", "outcome", "answer"];
        Killed { w, site, fault, client }.at_any_edge(&passed).await;
    });
}

/// The host runs the controller itself, so each edge of a controller call is an edge of its csid.
#[test]
fn host_killed_at_any_edge_of_an_attach_agrees() {
    world(async |w| {
        let etcd = Etcd::start(1, &[]).await;
        let mounts = "[[grant]]\nwho = \"node/c1\"\nnamespaces = [\"default\"]\nmay = [\"mount\"]\n";
        let section = format!("endpoints = {:?}\n{GRANTS}\n{mounts}", etcd.endpoints());
        let site = Site::of(etcd, 1, "", &section);
        site.register("data", "single-node-writer").await;
        let fault = Fault::of(w);
        let link = site.node("c1");
        let client = c1_that(w, link.run(), "controllers = [\"p\"]\n").await;
        let passed =
            ["Claim", "Detached", "ControllerPublishVolume", "ControllerUnpublishVolume", "CallEnded"];
        Killed { w, site, fault, client }.at_any_edge(&passed).await;
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
