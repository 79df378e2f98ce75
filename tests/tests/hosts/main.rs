//! csid on the hosts of a cluster, with real servers, etcd and csid-link. Each csid has a world and a plugin of its own, with a witness.

mod by_call;
mod canary;
mod controllers;
mod creations;
mod cut_off;
mod drained;
mod earlier;
mod edges;
mod expansions;
mod explained;
mod fenced;
mod imported;
mod kills;
mod lying;
mod moves;
mod queue;
mod refused;
mod restored;
mod shown;
mod unheld;
mod withheld;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use csid_client::{Client, Mounted};
use csid_tests::ask::*;
use csid_tests::cluster as site;
use csid_tests::etcd::{Cluster as Etcd, Place};
use csid_tests::network::{Network, Way};
use csid_tests::world::{World, eventually, world};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;

use crate::site::{GRANTS, Node, Programs, Site, release_ask};

/// One host's end of what two hosts' tests say to each other.
struct Other {
    says: UnboundedSender<&'static str>,
    hears: UnboundedReceiver<&'static str>,
}

impl Other {
    fn pair() -> (Other, Other) {
        let ((says, heard), (answers, hears)) = (unbounded_channel(), unbounded_channel());
        (Other { says, hears }, Other { says: answers, hears: heard })
    }

    fn say(&self, what: &'static str) {
        self.says.send(what).expect("the other host's test goes on");
    }

    async fn hear(&mut self, what: &str) {
        assert_eq!(self.hears.recv().await, Some(what), "the other host's test has ended");
    }
}

/// Returns what csid.toml says of a node, whose link has its sockets in `link`.
fn of_node(name: &str, link: &Path) -> String {
    format!("node = {name:?}\n[cluster]\nname = \"prod\"\nlink = {link:?}\n")
}

/// Starts this world's csid as a node, with plugin `p`, and waits until it has joined.
async fn start_node(w: &mut World, name: &str, link: &Path) -> Client {
    w.add_plugin_and("p", &[], "").await;
    w.configure(&of_node(name, link));
    let client = w.start().await;
    healthy(&client, "p").await;
    joined(w).await;
    client
}

/// Starts another host in a thread, which does what `uses` says, and waits until it is ready. It has the storage of this host's plugin. Its link ends
/// with the returned node.
async fn start_user<F>(
    site: &Site,
    w: &mut World,
    name: &str,
    uses: F,
) -> (Other, std::thread::JoinHandle<()>, Node)
where
    F: AsyncFnOnce(&mut World, &Path, PathBuf, Other) + Send + 'static,
{
    let (mut user, other) = Other::pair();
    let node = site.node(name);
    let (run, storage) = (node.run().to_owned(), w.plugin("p").state().to_owned());
    let thread = std::thread::spawn(move || {
        world(async move |w| Box::pin(uses(w, &run, storage, other)).await);
    });
    user.hear("ready").await;
    (user, thread, node)
}

/// Starts a cluster of one server, with volumes of one consumer each.
async fn one_server(volumes: &[&str]) -> Site {
    let site = Site::start(1).await;
    for volume in volumes {
        site.register(volume, "single-node-writer").await;
    }
    site
}

/// The network of a cluster, in which the link of `n1` has a machine of its own.
struct Wire(Network);

impl Wire {
    /// Cuts `n1` off: packets are dropped, and no connection ends by that.
    fn cut(&self) {
        self.0.begin_cut(&["n1".to_owned()], &[], Way::Both);
    }

    fn heal(&self) {
        self.0.heal("n1");
    }
}

/// Starts the cluster of [`one_server`] in a network.
async fn one_server_on_wire(volumes: &[&str]) -> (Site, Wire) {
    let mut network = Network::new();
    network.add("n1");
    let of = Network::own_address();
    let place = Place { client: (of, 2379).into(), peer: (of, 2380).into(), network: None, disk: None };
    let etcd = Etcd::start_at(&[place], &[]).await;
    let section = format!("endpoints = {:?}\n{GRANTS}", etcd.endpoints());
    let networks = BTreeMap::from([("n1".to_owned(), network.namespace("n1"))]);
    let site = Site::at(Programs::default(), etcd, &[(of, 8443).into()], networks, "", &section);
    for volume in volumes {
        site.register(volume, "single-node-writer").await;
    }
    (site, Wire(network))
}

/// Starts this world's csid as the node `n1`. Its link ends with the returned node.
async fn n1(w: &mut World, site: &Site) -> (Client, Node) {
    let node = site.node("n1");
    let client = start_node(w, "n1", node.run()).await;
    (client, node)
}

async fn joined(w: &World) {
    eventually("csid has joined", async || w.status().contains("cluster prod: joined at")).await;
}

async fn cut_off(w: &World) {
    eventually("csid is cut off", async || w.status().contains("cluster prod: cut off")).await;
}

/// Returns the claims of a volume that the servers have, as NODE/CONSUMER, each with its value.
async fn claims_at_servers(site: &Site, volume: &str) -> Vec<(String, String)> {
    let prefix = format!("/csid/v1/vol/default/{volume}/claim/");
    let found = site.raw().await.below(&prefix).await;
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    found.into_iter().map(|kv| (text(kv.key)[prefix.len()..].to_owned(), text(kv.value))).collect()
}

/// Waits until the servers have these claims of a volume.
async fn servers_have(site: &Site, volume: &str, due: &[&str]) {
    eventually(&format!("the servers have these claims of {volume}: {due:?}"), async || {
        claims_at_servers(site, volume).await.iter().map(|(name, _)| name.as_str()).eq(due.iter().copied())
    })
    .await;
}

/// Waits until csid has an operation of this kind.
async fn begun(client: &Client, kind: &str) {
    eventually(&format!("csid has an operation {kind}"), async || {
        client.list_operations().await.unwrap().iter().any(|operation| operation.kind == kind)
    })
    .await;
}

/// Returns the controller's calls since the last time.
fn called(w: &mut World, seen: &mut usize) -> Vec<String> {
    let calls = w.plugin("p").volume_calls();
    let new = calls.iter().skip(*seen).map(|recorded| recorded.call.rpc.clone()).collect();
    *seen = calls.len();
    new
}

/// Begins a mount of the volume `data`, and waits until it is an operation of csid.
async fn mount_begins(client: &Client) -> JoinHandle<csid_client::Result<Mounted>> {
    let mounting = tokio::spawn({
        let client = client.clone();
        async move { mount_registered(&client, "data", "web").await }
    });
    begun(client, "mount").await;
    mounting
}
