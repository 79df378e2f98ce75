//! Claims of hosts that wait in the servers' queue.

use std::path::Path;

use csi_proto::cluster::v1::Capability;
use csi_proto::cluster::v1::change_ask::What;
use csid_client::{AccessMode, CallOptions, Kind, MountOptions};
use csid_tests::ask::*;
use csid_tests::world::{World, eventually, refusal, world};

use crate::site::{Site, register};
use crate::*;

fn waits(seconds: u64) -> MountOptions {
    MountOptions { wait_usec: Some(seconds * 1_000_000), ..MountOptions::default() }
}

/// Returns the claims of `data` that wait at the servers, as NODE/CONSUMER, in their order.
async fn queue(site: &Site) -> Vec<String> {
    let found = site.raw().await.below("/csid/v1/vol/default/data/queue/").await;
    let row = |value: Vec<u8>| serde_json::from_slice::<serde_json::Value>(&value).unwrap();
    let rows = found.into_iter().map(|kv| row(kv.value));
    rows.map(|row| format!("{}/{}", row["node"].as_str().unwrap(), row["consumer"].as_str().unwrap()))
        .collect()
}

pub(crate) async fn servers_queue(site: &Site, due: &[&str]) {
    eventually(&format!("the servers have this queue: {due:?}"), async || queue(site).await == due).await;
}

/// Waits until an operation of this csid waits for another host's claim, and says so.
async fn waits_for(client: &Client, holder: &str) {
    eventually("the operation waits for the holder", async || {
        let explained = client.explain(NAMESPACE, "data", CallOptions::default()).await;
        explained
            .is_ok_and(|of| of.waiting_for == "waiting for claims" && of.holders.contains(&holder.to_owned()))
    })
    .await;
}

/// Runs the second host: it waits for the first one's volume.
async fn second(w: &mut World, link: &Path, mut first: Other) {
    let client = start_node(w, "n2", link).await;
    first.hear("it is mine").await;
    let mount = client.mount(NAMESPACE, "data", "web", waits(120));
    let heard = async {
        waits_for(&client, "n1/web").await;
        first.say("it waits");
    };
    let (mounted, ()) = tokio::join!(mount, heard);
    mounted.unwrap();
    first.say("it is mine");
    first.hear("queued").await;
    unmount(&client, "data", "web").await.unwrap();
    w.nothing_left(&client).await;
}

#[test]
fn host_that_waits_has_the_volume_next() {
    world(async |w| {
        let site = Site::start(2).await;
        site.register("data", "single-node-writer").await;
        let (client, _link) = n1(w, &site).await;
        let (mut other, first) = Other::pair();
        let link = site.node("n2");
        let run = link.run().to_owned();
        let second = std::thread::spawn(move || world(async move |w| Box::pin(second(w, &run, first)).await));
        mount_registered(&client, "data", "web").await.unwrap();
        other.say("it is mine");
        other.hear("it waits").await;
        servers_queue(&site, &["n2/web"]).await;
        unmount(&client, "data", "web").await.unwrap();
        // The first host comes again, and does not overtake.
        let again = client.mount(NAMESPACE, "data", "web", waits(120));
        let rest = async {
            other.hear("it is mine").await;
            servers_have(&site, "data", &["n2/web"]).await;
            servers_queue(&site, &["n1/web"]).await;
            other.say("queued");
        };
        let (mounted, ()) = tokio::join!(again, rest);
        mounted.unwrap();
        servers_queue(&site, &[]).await;
        unmount(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &[]).await;
        w.nothing_left(&client).await;
        second.join().unwrap();
    });
}

#[test]
fn wait_that_ends_leaves_the_queue() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let (client, _link) = n1(w, &site).await;
        let other = site.node("n2");
        let _session = other.join(0).await;
        let held = other.claim(0, "data").await.unwrap();
        // The wait is over.
        let (kind, error) = refusal(client.mount(NAMESPACE, "data", "web", waits(3)).await);
        assert_eq!((kind, error.details.holders), (Kind::ClaimConflict, vec!["n2/web".to_owned()]));
        servers_queue(&site, &[]).await;
        // The caller cancels, or its deadline passes.
        let mut cancelled = waits(120);
        cancelled.operation_id = Some("mine".into());
        let mount = client.mount(NAMESPACE, "data", "web", cancelled);
        let cancel = async {
            waits_for(&client, "n2/web").await;
            assert_eq!(queue(&site).await, ["n1/web"]);
            client.cancel_operation("mine").await.unwrap();
        };
        let (mounted, ()) = tokio::join!(mount, cancel);
        assert_eq!(refusal(mounted).0, Kind::Cancelled);
        servers_queue(&site, &[]).await;
        let mut late = waits(120);
        late.deadline_usec = Some(3_000_000);
        let (kind, _) = refusal(client.mount(NAMESPACE, "data", "web", late).await);
        assert_eq!(kind, Kind::TimedOut);
        servers_queue(&site, &[]).await;
        eventually("csid has no claim", async || claims(&client).await.is_empty()).await;
        other.detached(0, "data", &held).await.unwrap();
        mount_registered(&client, "data", "web").await.unwrap();
        unmount(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &[]).await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn wait_goes_on_at_another_server() {
    world(async |w| {
        let mut site = Site::start(2).await;
        site.register("data", "single-node-writer").await;
        let (client, _link) = n1(w, &site).await;
        // Each server compares the claim with what the host remembers of the volume.
        mount_registered(&client, "data", "web").await.unwrap();
        unmount(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &[]).await;
        let server = client.cluster().await.unwrap().server;
        let its = site.addresses.iter().position(|address| *address == server).unwrap();
        let other = site.node("n2");
        let _session = other.join(1 - its).await;
        let held = other.claim(1 - its, "data").await.unwrap();
        let mount = client.mount(NAMESPACE, "data", "web", waits(120));
        let rest = async {
            waits_for(&client, "n2/web").await;
            let entry = site.raw().await.below("/csid/v1/vol/default/data/queue/").await.remove(0);
            site.servers[its].kill();
            eventually("csid asks the other server", async || {
                let now = site.raw().await.below("/csid/v1/vol/default/data/queue/").await;
                now.len() == 1 && now[0].key == entry.key && now[0].value != entry.value
            })
            .await;
            other.detached(1 - its, "data", &held).await.unwrap();
        };
        let (mounted, ()) = tokio::join!(mount, rest);
        mounted.unwrap();
        unmount(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &[]).await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn killed_host_leaves_the_queue_at_its_start() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let (client, _link) = n1(w, &site).await;
        let other = site.node("n2");
        let _session = other.join(0).await;
        let held = other.claim(0, "data").await.unwrap();
        let waiting = tokio::spawn({
            let client = client.clone();
            async move { client.mount(NAMESPACE, "data", "web", waits(120)).await }
        });
        waits_for(&client, "n2/web").await;
        w.kill();
        waiting.await.unwrap().unwrap_err();
        assert_eq!(queue(&site).await, ["n1/web"]);
        // It is granted while the host may be off, or it is not: its csid ends both.
        other.detached(0, "data", &held).await.unwrap();
        assert!(w.launch(&[]).await);
        joined(w).await;
        let client = w.client().await;
        healthy(&client, "p").await;
        servers_queue(&site, &[]).await;
        servers_have(&site, "data", &[]).await;
        mount_registered(&client, "data", "web").await.unwrap();
        unmount(&client, "data", "web").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn one_of_two_waits_of_a_host_ends_alone() {
    world(async |w| {
        let site = one_server(&[]).await;
        let mut change = register("data", "single-node-writer");
        let Some(What::Register(of)) = &mut change.what else { panic!() };
        let (access_mode, attachment_mode) = ("multi-node-reader-only".into(), "file-system".into());
        of.spec.as_mut().unwrap().capabilities.push(Capability { access_mode, attachment_mode });
        site.operator(0, "all").change(change).await.unwrap();
        let (client, _link) = n1(w, &site).await;
        let other = site.node("n2");
        let _session = other.join(0).await;
        let held = other.claim(0, "data").await.unwrap();
        // Both are readers, so neither is in the other's way.
        let reads = |operation: &str| MountOptions {
            access_mode: Some(AccessMode::MultiNodeReaderOnly),
            read_only: Some(true),
            operation_id: Some(operation.into()),
            ..waits(120)
        };
        let first = client.mount(NAMESPACE, "data", "a", reads("first"));
        let second = client.mount(NAMESPACE, "data", "b", reads("second"));
        let rest = async {
            eventually("both wait", async || queue(&site).await.len() == 2).await;
            client.cancel_operation("second").await.unwrap();
            servers_queue(&site, &["n1/a"]).await;
            other.detached(0, "data", &held).await.unwrap();
        };
        let (first, second, ()) = tokio::join!(first, second, rest);
        assert_eq!(refusal(second).0, Kind::Cancelled);
        first.unwrap();
        servers_have(&site, "data", &["n1/a"]).await;
        unmount(&client, "data", "a").await.unwrap();
        servers_have(&site, "data", &[]).await;
        w.nothing_left(&client).await;
    });
}
