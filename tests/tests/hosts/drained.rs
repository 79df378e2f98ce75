//! A host that drains: it unmounts what nobody uses, keeps what is in use, and reports that.

use std::fs::File;
use std::time::Duration;

use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{DrainAsk, NodeAsk, NodeChange, NodeRow, UndrainAsk};
use csid_client::{Client, Kind};
use csid_tests::ask::*;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, eventually, refusal, within_time, world};

use crate::*;

/// Longer than two tries of a drain, and than a server needs to say that a node drains no more.
const TRIED: Duration = Duration::from_secs(12);
/// Longer than the longest pause between two tries.
const RETRIED: Duration = Duration::from_secs(45);

pub(crate) async fn set(site: &Site, server: usize, change: Change) {
    let change = NodeChange { node: "n1".into(), change: Some(change) };
    // A server may have lost etcd for a moment on a busy machine. The same change again changes nothing.
    eventually("the node is changed", async || {
        site.admin(server, "all").set_node(change.clone()).await.is_ok()
    })
    .await;
}

async fn show(site: &Site, server: usize) -> Option<NodeRow> {
    let row = site.admin(server, "all").node(NodeAsk { node: "n1".into() }).await;
    row.ok().map(tonic::Response::into_inner)
}

/// Waits until a server shows that this is left, as VOLUME and the beginning of the reason.
pub(crate) async fn left(site: &Site, server: usize, due: &[(&str, &str)]) {
    within_time(RETRIED, &format!("this is left: {due:?}"), async || {
        let Some(drained) = show(site, server).await.and_then(|row| row.drained) else { return false };
        usize::try_from(drained.count) == Ok(due.len())
            && drained.left.len() == due.len()
            && drained.left.iter().zip(due).all(|(of, due)| of.volume == due.0 && of.why.contains(due.1))
    })
    .await;
}

async fn is_mounted(client: &Client, volume: &str) -> bool {
    row(client, volume, "web").await.is_some_and(|row| row.state == "mounted")
}

/// Mounts a volume, and opens a file there.
async fn opened(client: &Client, volume: &str) -> File {
    let mounted = mount_registered(client, volume, "web").await.unwrap();
    File::create(format!("{}/file", mounted.source)).unwrap()
}

fn in_use() -> String {
    format!("is in use by {} ", std::process::id())
}

pub(crate) async fn drains(w: &World, is_due: bool) {
    eventually(&format!("csid drains: {is_due}"), async || w.status().contains(", drains") == is_due).await;
}

#[test]
fn drain_unmounts_what_nobody_uses() {
    world(async |w| {
        let site = one_server(&["data", "more", "open"]).await;
        let (client, _link) = n1(w, &site).await;
        mount_registered(&client, "data", "web").await.unwrap();
        claim(&client, "more", "web").await.unwrap();
        let file = opened(&client, "open").await;
        set(&site, 0, Change::Drain(DrainAsk {})).await;
        let used = in_use();
        let due = [("open", used.as_str()), ("more", "it was claimed by itself")];
        left(&site, 0, &due).await;
        servers_have(&site, "data", &[]).await;
        assert!(row(&client, "data", "web").await.is_none() && is_mounted(&client, "open").await);
        let named = show(&site, 0).await.unwrap().drained.unwrap().left.remove(0);
        assert_eq!((named.consumer.as_str(), named.target), ("web", source(&client, "open").await));
        // Neither a new claim nor the mount of a claimed volume begins.
        for volume in ["data", "more"] {
            let (kind, error) = refusal(mount_registered(&client, volume, "web").await);
            assert_eq!((kind, error.message.contains("drains")), (Kind::Busy, true), "{}", error.message);
        }
        mount_registered(&client, "open", "web").await.expect("what is mounted is answered");

        // The drain goes on in another csid.
        w.kill();
        assert!(w.launch(&[]).await);
        joined(w).await;
        drains(w, true).await;
        let client = w.client().await;
        healthy(&client, "p").await;
        left(&site, 0, &due).await;
        assert!(is_mounted(&client, "open").await, "it is in use");
        drop(file);
        left(&site, 0, &due[1..]).await;
        servers_have(&site, "open", &[]).await;
        release(&client, "more", "web").await.unwrap();
        left(&site, 0, &[]).await;
        assert_eq!(show(&site, 0).await.unwrap().claims, 0);

        set(&site, 0, Change::Undrain(UndrainAsk {})).await;
        drains(w, false).await;
        mount_registered(&client, "data", "web").await.unwrap();
        assert_eq!(show(&site, 0).await.unwrap().drained, None);
        unmount(&client, "data", "web").await.unwrap();
        w.nothing_left(&client).await;
    });
}

async fn source(client: &Client, volume: &str) -> String {
    row(client, volume, "web").await.unwrap().source
}

#[test]
fn undrain_ends_the_drain() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let (client, _link) = n1(w, &site).await;
        let file = opened(&client, "data").await;
        set(&site, 0, Change::Drain(DrainAsk {})).await;
        left(&site, 0, &[("data", &in_use())]).await;
        set(&site, 0, Change::Undrain(UndrainAsk {})).await;
        drains(w, false).await;
        drop(file);
        tokio::time::sleep(TRIED).await;
        assert!(is_mounted(&client, "data").await, "a drain that is over has unmounted it");
        servers_have(&site, "data", &["n1/web"]).await;
        // Another drain is reported, too.
        set(&site, 0, Change::Drain(DrainAsk {})).await;
        left(&site, 0, &[]).await;
        assert!(row(&client, "data", "web").await.is_none());
        w.nothing_left(&client).await;
    });
}

/// Another mount of the volume is under way, so the drain's unmount waits behind it until the drain is over.
#[test]
fn unmount_that_waits_ends_with_the_drain() {
    world(async |w| {
        let site = Site::start(1).await;
        site.register("data", "multi-node-multi-writer").await;
        let (client, _link) = n1(w, &site).await;
        mount_registered(&client, "data", "web").await.unwrap();
        w.plugin("p").rules([Rule::always("NodePublishVolume", Act::Hold)]);
        let mounting = {
            let client = client.clone();
            tokio::spawn(async move { mount_registered(&client, "data", "slow").await })
        };
        eventually("the plugin publishes", async || {
            w.plugin("p").count("NodePublishVolume", "ext-data") == 2
        })
        .await;
        set(&site, 0, Change::Drain(DrainAsk {})).await;
        drains(w, true).await;
        eventually("the unmount waits", async || {
            let operations = client.list_operations().await.expect("the operations");
            operations.iter().any(|of| of.kind == "unmount")
        })
        .await;
        set(&site, 0, Change::Undrain(UndrainAsk {})).await;
        drains(w, false).await;
        w.plugin("p").honest();
        mounting.await.unwrap().expect("a mount that was under way");
        tokio::time::sleep(TRIED).await;
        assert!(is_mounted(&client, "data").await, "a drain that is over has unmounted it");
        unmount(&client, "data", "web").await.unwrap();
        unmount(&client, "data", "slow").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn drain_goes_on_after_the_death_of_a_server() {
    world(async |w| {
        let mut site = Site::start(2).await;
        site.register("data", "single-node-writer").await;
        let (client, _link) = n1(w, &site).await;
        let file = opened(&client, "data").await;
        let at = site.addresses.iter().position(|address| w.status().contains(address.as_str())).unwrap();
        let other = 1 - at;
        set(&site, at, Change::Drain(DrainAsk {})).await;
        left(&site, at, &[("data", &in_use())]).await;
        site.servers[at].kill();
        left(&site, other, &[("data", &in_use())]).await;
        drop(file);
        left(&site, other, &[]).await;
        servers_have(&site, "data", &[]).await;
        assert!(row(&client, "data", "web").await.is_none());
        w.nothing_left(&client).await;
    });
}

#[test]
fn host_that_was_away_drains_when_it_is_back() {
    world(async |w| {
        let site = one_server(&["data", "open"]).await;
        let (client, mut node) = n1(w, &site).await;
        mount_registered(&client, "data", "web").await.unwrap();
        let file = opened(&client, "open").await;
        node.link.kill();
        cut_off(w).await;
        set(&site, 0, Change::Drain(DrainAsk {})).await;
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert!(is_mounted(&client, "data").await, "the host cannot know it");
        let pair = site.client_pair("csid://prod/node/n1");
        node.link = site.link("n1", &pair, &site.addresses);
        left(&site, 0, &[("open", &in_use())]).await;
        assert!(row(&client, "data", "web").await.is_none());
        // The drain needs no server to go on. The end of the claim is reported later.
        node.link.kill();
        cut_off(w).await;
        drop(file);
        within_time(RETRIED, "it is unmounted", async || row(&client, "open", "web").await.is_none()).await;
        servers_have(&site, "open", &["n1/web"]).await;
        node.link = site.link("n1", &pair, &site.addresses);
        left(&site, 0, &[]).await;
        servers_have(&site, "open", &[]).await;
        w.nothing_left(&client).await;
    });
}

/// The host's plugin fails each unmount at first, and the drain tries again.
#[test]
fn mount_that_its_plugin_keeps_is_left_with_the_reason() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let (client, _link) = n1(w, &site).await;
        mount_registered(&client, "data", "web").await.unwrap();
        let refuses = Rule::always("NodeUnpublishVolume", Act::Fail(9));
        w.plugin("p").rules([refuses]);
        set(&site, 0, Change::Drain(DrainAsk {})).await;
        left(&site, 0, &[("data", "FAILED_PRECONDITION")]).await;
        w.plugin("p").rules([]);
        left(&site, 0, &[]).await;
        w.nothing_left(&client).await;
    });
}

/// The mount would come back after the boot.
#[test]
fn rebooted_host_that_drains_mounts_nothing_again() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let (client, _link) = n1(w, &site).await;
        let file = opened(&client, "data").await;
        set(&site, 0, Change::Drain(DrainAsk {})).await;
        left(&site, 0, &[("data", &in_use())]).await;
        w.kill();
        drop(file);
        w.reboot().await;
        let client = w.start().await;
        healthy(&client, "p").await;
        left(&site, 0, &[]).await;
        assert!(row(&client, "data", "web").await.is_none());
        servers_have(&site, "data", &[]).await;
        assert_eq!(w.plugin("p").count("NodeStageVolume", "ext-data"), 1, "it was staged again");
        w.nothing_left(&client).await;
    });
}
