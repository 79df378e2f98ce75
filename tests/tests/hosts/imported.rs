//! A host takes its own volumes along into a cluster, and leaves it when it holds nothing of it.

use std::time::Duration;

use csid_client::{AccessMode, JoinOptions, Kind};
use csid_tests::ask::*;
use csid_tests::fault::Fault;
use csid_tests::world::{World, count, eventually, refusal, world};
use rustix::process::Signal;

use crate::fenced::{fence, fenced};
use crate::shown::csictl_of;
use crate::*;

const NODE: &str = "n-registers";
const OWN: &str = "refused as own-volumes";

fn import() -> JoinOptions {
    JoinOptions { import: Some(true), ..JoinOptions::default() }
}

/// Has csid register volumes without a cluster, and starts it again as a node.
async fn node_with(w: &mut World, node: &Node, name: &str, volumes: &[String]) -> Client {
    w.configure(&format!("node = {name:?}\n"));
    let client = w.start().await;
    healthy(&client, "p").await;
    for volume in volumes {
        registered(&client, volume, &[AccessMode::SingleNodeWriter]).await;
    }
    w.stop().await;
    w.configure(&of_node(name, node.run()));
    let client = w.start().await;
    healthy(&client, "p").await;
    eventually("csid says why it does not join", async || w.status().contains(OWN)).await;
    client
}

/// Returns the volumes that servers have registered, in the order of their names.
async fn registered_at_servers(site: &Site) -> Vec<String> {
    const PREFIX: &str = "/csid/v1/vol/default/";
    let keys = site.raw().await.below(PREFIX).await.into_iter();
    let keys = keys.map(|kv| String::from_utf8(kv.key).unwrap());
    keys.filter_map(|key| Some(key.strip_prefix(PREFIX)?.strip_suffix("/reg")?.to_owned())).collect()
}

#[test]
fn import_moves_what_the_host_has_registered() {
    world(async |w| {
        let site = Site::start(2).await;
        let node = site.node(NODE);
        w.add_plugin_and("p", &[], "").await;
        w.configure(&format!("node = {NODE:?}\n"));
        let client = w.start().await;
        healthy(&client, "p").await;
        for volume in ["a", "b"] {
            registered(&client, volume, &[AccessMode::SingleNodeWriter]).await;
        }
        mount_registered(&client, "b", "web").await.unwrap();
        w.stop().await;
        w.configure(&of_node(NODE, node.run()));
        let client = w.start().await;
        eventually("csid says why it does not join", async || w.status().contains(OWN)).await;
        // Without the option nothing is moved, and with it nothing that is used.
        let (kind, error) = refusal(client.join(JoinOptions::default()).await);
        assert!(kind == Kind::Unavailable && error.message.contains(OWN), "{}", error.message);
        let (kind, error) = refusal(client.join(import()).await);
        assert!(kind == Kind::Busy && error.message.ends_with(": default/b"), "{}", error.message);
        assert!(registered_at_servers(&site).await.is_empty());

        unmount(&client, "b", "web").await.unwrap();
        let said = csictl_of(w, &["cluster", "join", "--import"]).await;
        assert!(said.status.success(), "{said:?}");
        joined(w).await;
        assert_eq!(registered_at_servers(&site).await, ["a", "b"]);
        client.join(import()).await.expect("nothing is left to move");
        assert_eq!(client.volume(NAMESPACE, "a").await.unwrap().external_id, "a");
        mount_registered(&client, "b", "web").await.unwrap();

        // What the host holds or owes keeps it in the cluster.
        let said = csictl_of(w, &["cluster", "leave"]).await;
        let text = String::from_utf8(said.stderr).unwrap();
        assert!(!said.status.success() && text.contains("default/b of web"), "{text}");
        site.servers.iter().for_each(|server| server.signal(Signal::STOP));
        unmount(&client, "b", "web").await.unwrap();
        let said = csictl_of(w, &["cluster", "leave"]).await;
        let text = String::from_utf8(said.stderr).unwrap();
        assert!(!said.status.success() && text.contains("the end of 1 claims"), "{text}");
        site.servers.iter().for_each(|server| server.signal(Signal::CONT));
        eventually("nothing is owed", async || csictl_of(w, &["cluster", "leave"]).await.status.success())
            .await;
        w.nothing_left(&client).await;
    });
}

/// csid counts at most once a second what it owes.
#[test]
fn host_leaves_directly_after_its_last_unmount() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let (client, _link) = n1(w, &site).await;
        for _ in 0..4 {
            mount_registered(&client, "data", "web").await.unwrap();
            // The next look comes with the unmount.
            tokio::time::sleep(Duration::from_millis(1300)).await;
            unmount(&client, "data", "web").await.unwrap();
            // On a busy machine an unmount is answered before the server is.
            eventually("no claim is left", async || claims(&client).await.is_empty()).await;
            let said = csictl_of(w, &["cluster", "leave"]).await;
            assert!(said.status.success(), "{said:?}");
        }
        w.nothing_left(&client).await;
    });
}

#[test]
fn volume_that_servers_refuse_stays_on_the_host() {
    world(async |w| {
        let site = Site::start(1).await;
        let node = site.node("n1");
        w.add_plugin_and("p", &[], "").await;
        let client = node_with(w, &node, "n1", &["own".to_owned()]).await;
        let (kind, error) = refusal(client.join(import()).await);
        assert!(
            kind == Kind::NotAuthorized && error.message.contains("default/own was not moved"),
            "{}",
            error.message
        );
        assert_eq!(client.volume(NAMESPACE, "own").await.unwrap().external_id, "own");
        assert!(w.status().contains(OWN), "{}", w.status());
        // Another one has the name.
        w.stop().await;
        let node = site.node(NODE);
        site.register("own", "single-node-writer").await;
        w.configure(&of_node(NODE, node.run()));
        let client = w.start().await;
        eventually("csid says why it does not join", async || w.status().contains(OWN)).await;
        let (_, error) = refusal(client.join(import()).await);
        assert!(error.message.contains("default/own was not moved"), "{}", error.message);
        assert_eq!(client.volume(NAMESPACE, "own").await.unwrap().external_id, "own");
        w.nothing_left(&client).await;
    });
}

#[test]
fn killed_import_is_repeated_and_loses_nothing() {
    world(async |w| {
        let site = Site::start(1).await;
        let node = site.node(NODE);
        w.add_plugin_and("p", &[], "").await;
        let fault = Fault::of(w);
        let (mut kills, mut all) = (0, Vec::new());
        for edge in ["Register.before", "Register.after", "registration.before", "registration.after"] {
            for passing in 1..=2 {
                let volumes = [1, 2].map(|n| format!("{kills}-{n}"));
                all.extend(volumes.clone());
                let client = node_with(w, &node, NODE, &volumes).await;
                fault.arm(&format!("{edge}:{passing}"));
                client.join(import()).await.expect_err("csid is killed");
                eventually("csid is killed", async || w.dead()).await;
                fault.disarm();
                kills += 1;
                // Each volume is here or there.
                assert!(w.launch(&[]).await);
                let client = w.client().await;
                healthy(&client, "p").await;
                client.join(import()).await.unwrap_or_else(|error| panic!("{edge}:{passing}: {error}"));
                joined(w).await;
                let mut due = all.clone();
                due.sort();
                assert_eq!(registered_at_servers(&site).await, due, "{edge}:{passing}");
                let last = volumes.last().unwrap();
                mount_registered(&client, last, "web").await.unwrap();
                unmount(&client, last, "web").await.unwrap();
                servers_have(&site, last, &[]).await;
                w.stop().await;
            }
        }
        count("kills", kills);
    });
}

/// Starts csid without a cluster. It registers a volume of its own, mounts it, and mounts it again after a reboot. The mount stays.
async fn is_alone(w: &mut World, volume: &str) -> Client {
    w.stop().await;
    w.configure(&format!("node = {NODE:?}\n"));
    let client = w.start().await;
    healthy(&client, "p").await;
    assert!(!w.status().contains("cluster"), "{}", w.status());
    registered(&client, volume, &[AccessMode::SingleNodeWriter]).await;
    let path = mount_registered(&client, volume, "web").await.unwrap().source;
    std::fs::write(format!("{path}/file"), volume).unwrap();
    w.reboot().await;
    let client = w.start().await;
    eventually("the own volume is mounted again", async || {
        row(&client, volume, "web").await.is_some_and(|row| row.state == "mounted")
    })
    .await;
    assert_eq!(std::fs::read_to_string(format!("{path}/file")).unwrap(), volume);
    healthy(&client, "p").await;
    client
}

/// Has csid join again, with its own volume.
async fn joins_again(w: &mut World, site: &Site, link: &Path, volumes: &[&str]) -> Client {
    w.stop().await;
    w.configure(&of_node(NODE, link));
    let client = w.start().await;
    healthy(&client, "p").await;
    eventually("csid says why it does not join", async || w.status().contains(OWN)).await;
    client.join(import()).await.unwrap();
    joined(w).await;
    assert_eq!(registered_at_servers(site).await, volumes);
    client
}

#[test]
fn host_that_left_is_alone_again() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let mut node = site.node(NODE);
        let client = start_node(w, NODE, node.run()).await;
        mount_registered(&client, "data", "web").await.unwrap();
        unmount(&client, "data", "web").await.unwrap();
        eventually("nothing is owed", async || csictl_of(w, &["cluster", "leave"]).await.status.success())
            .await;
        let client = is_alone(w, "own").await;
        let (kind, _) = refusal(mount_registered(&client, "data", "web").await);
        assert_eq!(kind, Kind::NotFound, "the servers alone know it");
        unmount(&client, "own", "web").await.unwrap();
        let client = joins_again(w, &site, node.run(), &["data", "own"]).await;
        for volume in ["data", "own"] {
            mount_registered(&client, volume, "web").await.unwrap();
            servers_have(&site, volume, &[&format!("{NODE}/web")]).await;
            unmount(&client, volume, "web").await.unwrap();
            servers_have(&site, volume, &[]).await;
        }

        // The journal has a claim of the cluster and a fence, and the cluster is gone.
        claim(&client, "data", "web").await.unwrap();
        fence(&site, NODE).await;
        fenced(w).await;
        node.link.kill();
        let said = csictl_of(w, &["cluster", "leave"]).await;
        assert!(!said.status.success(), "{said:?}");
        let client = is_alone(w, "second").await;
        unmount(&client, "second", "web").await.unwrap();
        let states: Vec<_> = claims(&client).await.into_iter().map(|row| (row.volume, row.state)).collect();
        assert_eq!(states, [("data".to_owned(), "taken".to_owned())], "what the cluster granted is kept");
        let (kind, error) = refusal(mount_registered(&client, "data", "web").await);
        assert_eq!(kind, Kind::Unavailable, "no server has granted it in this boot: {}", error.message);
        node.link = site.link(NODE, &site.client_pair(&format!("csid://prod/node/{NODE}")), &site.addresses);
        let client = joins_again(w, &site, node.run(), &["data", "own", "second"]).await;
        for volume in ["data", "second"] {
            mount_registered(&client, volume, "web").await.unwrap();
            servers_have(&site, volume, &[&format!("{NODE}/web")]).await;
            unmount(&client, volume, "web").await.unwrap();
        }
        // It was claimed by itself.
        release(&client, "data", "web").await.unwrap();
        eventually("no claim is left", async || claims(&client).await.is_empty()).await;
        w.nothing_left(&client).await;
    });
}
