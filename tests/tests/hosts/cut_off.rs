//! A host without a server. What is mounted stays; the servers learn later what has ended.

use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant};

use csi_proto::cluster::v1::NodeAsk;
use csid_client::{Kind, MountOptions, ReleaseOptions};
use csid_tests::ask::*;
use csid_tests::kernel;
use csid_tests::world::{eventually, refusal, world};
use rustix::process::Signal;

use crate::*;

/// Longer than the time after which servers end what a node that is away only waits for, and than the sweep that finds it.
const AWAY: Duration = Duration::from_secs(65);

#[test]
fn mounts_of_a_cut_off_host_stay_and_end() {
    world(async |w| {
        let site = one_server(&["data", "kept", "more"]).await;
        let (mut client, mut node) = n1(w, &site).await;
        for volume in ["data", "kept"] {
            mount_registered(&client, volume, "web").await.unwrap();
        }
        node.link.kill();
        cut_off(w).await;
        mount_registered(&client, "kept", "web").await.expect("the same mount again");
        let options = within(Duration::from_secs(2), MountOptions::default());
        let (kind, error) = refusal(client.mount(NAMESPACE, "more", "web", options).await);
        assert_eq!((kind, error.details.retryable), (Kind::Unavailable, Some(true)), "{}", error.message);
        unmount(&client, "data", "web").await.expect("an unmount needs no server");
        assert!(row(&client, "data", "web").await.is_none());
        let (kind, error) = refusal(mount_registered(&client, "data", "web").await);
        assert_eq!(kind, Kind::Unavailable, "{}", error.message);
        // The claim of the ended mount outlives csid until a server knows.
        for _ in 0..2 {
            let states: Vec<_> =
                claims(&client).await.into_iter().map(|row| (row.volume, row.state)).collect();
            let due = [("data", "controller-detached"), ("kept", "taken")];
            assert_eq!(states, due.map(|(volume, state)| (volume.to_owned(), state.to_owned())));
            w.kill();
            assert!(w.launch(&[]).await);
            cut_off(w).await;
            client = w.client().await;
        }
        servers_have(&site, "data", &["n1/web"]).await;
        let pair = site.client_pair("csid://prod/node/n1");
        node.link = site.link("n1", &pair, &site.addresses);
        joined(w).await;
        servers_have(&site, "data", &[]).await;
        servers_have(&site, "kept", &["n1/web"]).await;
        eventually("csid has forgotten the claim", async || claims(&client).await.len() == 1).await;
        mount_registered(&client, "more", "web").await.unwrap();
        for volume in ["kept", "more"] {
            unmount(&client, volume, "web").await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}

/// The server has read the requests, and answers none of them.
#[test]
fn server_that_hangs_costs_no_mount_and_no_claim() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        site.register("more", "multi-node-multi-writer").await;
        let (client, _link) = n1(w, &site).await;
        mount_registered(&client, "data", "web").await.unwrap();
        // csid keeps the registration of a claimed volume, so a Claim is the first that it asks the server for.
        claim(&client, "more", "other").await.unwrap();
        site.servers[0].signal(Signal::STOP);
        let options = within(Duration::from_secs(3), MountOptions::default());
        let (kind, error) = refusal(client.mount(NAMESPACE, "more", "web", options).await);
        assert_eq!(kind, Kind::TimedOut, "{}", error.message);
        unmount(&client, "data", "web").await.expect("an unmount needs no server");
        cut_off(w).await;
        w.kill();
        site.servers[0].signal(Signal::CONT);
        assert!(w.launch(&[]).await);
        joined(w).await;
        let client = w.client().await;
        servers_have(&site, "data", &[]).await;
        servers_have(&site, "more", &["n1/other"]).await;
        eventually("csid has one claim", async || claims(&client).await.len() == 1).await;
        release(&client, "more", "other").await.unwrap();
        servers_have(&site, "more", &[]).await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn node_of_a_killed_server_joins_the_other() {
    world(async |w| {
        let mut site = Site::start(2).await;
        site.register("data", "single-node-writer").await;
        let (client, _link) = n1(w, &site).await;
        mount_registered(&client, "data", "web").await.unwrap();
        let at = site.addresses.iter().position(|address| w.status().contains(address.as_str())).unwrap();
        site.servers[at].kill();
        let other = format!("joined at {}", site.addresses[1 - at]);
        eventually("csid has joined the other server", async || w.status().contains(&other)).await;
        mount_registered(&client, "data", "web").await.unwrap();
        unmount(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &[]).await;
        w.nothing_left(&client).await;
    });
}

/// A plain claim is released when the servers know it: another host may have it from then on.
#[test]
fn release_of_a_cut_off_host_is_not_answered_early() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let (client, mut node) = n1(w, &site).await;
        claim(&client, "data", "web").await.unwrap();
        node.link.kill();
        cut_off(w).await;
        let options = ReleaseOptions { deadline_usec: Some(2_000_000), ..ReleaseOptions::default() };
        let (kind, error) = refusal(client.release(NAMESPACE, "data", "web", options).await);
        assert_eq!(kind, Kind::Unavailable, "{}", error.message);
        let pair = site.client_pair("csid://prod/node/n1");
        node.link = site.link("n1", &pair, &site.addresses);
        servers_have(&site, "data", &[]).await;
        release(&client, "data", "web").await.expect("a claim that is not there is released");
    });
}

/// Packets are dropped, so each side finds that out by itself. The host's process goes on to use its file, and another host asks for the volume.
#[test]
fn silent_cut_keeps_the_mount_and_the_claim() {
    world(async |w| {
        let (site, wire) = one_server_on_wire(&["data"]).await;
        let (client, _link) = n1(w, &site).await;
        let other = site.node("n2");
        let _session = other.join(0).await;
        let path = mount_registered(&client, "data", "web").await.unwrap().source;
        let mut file = File::create(format!("{path}/file")).unwrap();
        let held = claims_at_servers(&site, "data").await;
        assert_eq!(held.len(), 1);
        let (calls, mount) = (w.plugin("p").volume_calls().len(), kernel::mount_id(path.as_ref()).unwrap());

        wire.cut();
        cut_off(w).await;
        let mut admin = site.admin(0, "all");
        eventually("the host is away", async || {
            let row = admin.node(NodeAsk { node: "n1".into() }).await;
            row.is_ok_and(|row| row.into_inner().sessions.is_empty())
        })
        .await;
        let (begun, mut due) = (Instant::now(), String::new());
        while begun.elapsed() < AWAY {
            let line = format!("{:?}\n", begun.elapsed());
            due.push_str(&line);
            file.write_all(line.as_bytes()).unwrap();
            file.sync_all().unwrap();
            assert_eq!(std::fs::read_to_string(format!("{path}/file")).unwrap(), due);
            let refused = other.claim(0, "data").await.unwrap_err();
            assert_eq!(
                (refused.kind.as_str(), refused.holders),
                ("ClaimConflict", vec!["n1/web".to_owned()])
            );
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(claims_at_servers(&site, "data").await, held);
        assert!(w.status().contains("cut off"), "{}", w.status());

        wire.heal();
        joined(w).await;
        mount_registered(&client, "data", "web").await.expect("the same mount again");
        assert_eq!(kernel::mount_id(path.as_ref()).unwrap(), mount, "the mount is another one");
        assert_eq!(w.plugin("p").volume_calls().len(), calls, "csid called the plugin");
        assert_eq!(claims_at_servers(&site, "data").await, held);
        drop(file);
        unmount(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &[]).await;
        other.claim(0, "data").await.unwrap();
        w.nothing_left(&client).await;
    });
}
