//! csid is killed at each edge that it has as a node of a cluster alone. Then it does again what it was at, and the servers know that.

use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{ChangeAsk, DeleteSnapshotAsk, DrainAsk, SnapshotAsk, UndrainAsk, VolumeRow};
use csid_client::{AccessMode, Client, JoinOptions, MountOptions};
use csid_tests::ask::*;
use csid_tests::fault::Fault;
use csid_tests::world::{World, count, eventually, world};

use crate::kills::{again, agree};
use crate::*;

/// What `n1` may do, more than mount: it calls the controller for its own volumes, and takes volumes of its own along.
const MORE: &str = r#"
[[grant]]
who = "node/n1"
namespaces = ["*"]
may = ["controller:p"]

[[grant]]
who = "node/n1"
namespaces = ["default"]
may = ["register"]
"#;
const CONTROLS: &[&str] =
    &["PUBLISH_UNPUBLISH_VOLUME", "PUBLISH_READONLY", "CREATE_DELETE_SNAPSHOT", "LIST_SNAPSHOTS"];

struct Host<'w> {
    w: &'w mut World,
    site: Site,
    node: Node,
    fault: Fault,
    client: Client,
}

impl Host<'_> {
    fn configuration(&self) -> String {
        let does = "controllers = [\"p\"]\ncontroller-volumes = [\"p\"]\n";
        format!("{}{does}", of_node("n1", self.node.run()))
    }

    /// Waits until csid is killed at the edge, and starts it again.
    async fn dies(&mut self, edge: &str) {
        eventually(&format!("csid is killed at {edge}"), async || self.w.dead()).await;
        assert!(self.fault.killed_at(edge), "csid was killed at {}", self.fault.disarm());
        self.client = again(self.w, &self.fault).await;
    }

    fn arm(&self, edge: &str) {
        self.fault.arm(&format!("{edge}:1"));
    }

    async fn mount(&self) {
        mount_registered(&self.client, "data", "web").await.unwrap();
    }

    /// Waits until the servers and the host agree, unmounts the volume, and waits until nothing is left of it.
    async fn ends(&mut self, edge: &str) {
        agree(&self.site, &self.client, edge).await;
        if row(&self.client, "data", "web").await.is_some() {
            unmount(&self.client, "data", "web").await.unwrap();
        }
        servers_have(&self.site, "data", &[]).await;
        eventually(&format!("{edge}: nothing is left"), async || {
            claims(&self.client).await.is_empty() && self.w.leftovers().is_empty()
        })
        .await;
    }

    /// Makes a change as an operator, until a server has made it.
    async fn change(&self, what: What) -> VolumeRow {
        let ask = ChangeAsk { what: Some(what) };
        let (mut operator, mut made) = (self.site.operator(0, "all"), None);
        eventually("the servers have made the change", async || {
            made = operator.change(ask.clone()).await.ok().map(tonic::Response::into_inner);
            made.is_some()
        })
        .await;
        made.unwrap()
    }

    async fn dies_in_a_mount(&mut self, edge: &str) {
        self.arm(edge);
        let _ = mount_registered(&self.client, "data", "web").await;
        self.dies(edge).await;
        self.ends(edge).await;
    }

    async fn dies_in_an_unmount(&mut self, edge: &str) {
        self.mount().await;
        self.arm(edge);
        let _ = unmount(&self.client, "data", "web").await;
        self.dies(edge).await;
        self.ends(edge).await;
    }

    async fn dies_in_a_deletion(&mut self, edge: &str) {
        let ask = SnapshotAsk {
            volume: "data".into(),
            name: edge.replace('.', "-"),
            call: edge.into(),
            ..SnapshotAsk::default()
        };
        let snapshot = self.change(What::Snapshot(ask)).await.snapshot.unwrap().id;
        assert!(self.w.plugin("p").made().contains(&format!("snapshot {snapshot}")));
        let call = format!("deletion at {edge}");
        let ask = DeleteSnapshotAsk { plugin: "p".into(), snapshot: snapshot.clone(), call };
        self.arm(edge);
        let mut operator = self.site.operator(0, "all");
        let delete = ChangeAsk { what: Some(What::DeleteSnapshot(ask.clone())) };
        let deleting = tokio::spawn(async move { operator.change(delete).await });
        eventually(&format!("{edge}: the call is made or answered"), async || {
            self.w.dead() || deleting.is_finished()
        })
        .await;
        assert!(self.w.dead(), "{edge}: {:?}", deleting.await);
        self.dies(edge).await;
        // The same call joins what the servers go on with.
        let _ = deleting.await.unwrap();
        self.change(What::DeleteSnapshot(ask)).await;
        assert!(!self.w.plugin("p").made().contains(&format!("snapshot {snapshot}")));
    }

    /// The cluster recovers from a backup, and csid says what it holds.
    async fn dies_in_a_recovery(&mut self, edge: &str) {
        self.mount().await;
        let calls = self.w.plugin("p").volume_calls().len();
        let generation = restored::servers(&self.site).await.generation;
        self.arm(edge);
        restored::restored(&self.site, generation).await;
        self.dies(edge).await;
        restored::awaits(&self.site, &[]).await;
        restored::resume(&self.site).await;
        servers_have(&self.site, "data", &["n1/web"]).await;
        restored::is_untouched(self.w, &self.client, "data", calls).await;
        self.ends(edge).await;
    }

    /// csid gives a place in the queue up.
    async fn dies_in_the_queue(&mut self, edge: &str) {
        let other = self.site.node("n2");
        let mut session = other.join(0).await;
        session.report_name("node n2").await;
        let claim = other.claim(0, "data").await.unwrap();
        self.arm(edge);
        let options = MountOptions { wait_usec: Some(1_000_000), ..MountOptions::default() };
        let _ = self.client.mount(NAMESPACE, "data", "web", options).await;
        self.dies(edge).await;
        queue::servers_queue(&self.site, &[]).await;
        eventually("csid has given the claim up", async || claims(&self.client).await.is_empty()).await;
        servers_have(&self.site, "data", &["n2/web"]).await;
        other.detached(0, "data", &claim).await.unwrap();
        self.ends(edge).await;
    }

    async fn dies_in_a_drain(&mut self, edge: &str) {
        self.arm(edge);
        drained::set(&self.site, 0, Change::Drain(DrainAsk {})).await;
        self.dies(edge).await;
        drained::left(&self.site, 0, &[]).await;
        drained::set(&self.site, 0, Change::Undrain(UndrainAsk {})).await;
        drained::drains(self.w, false).await;
    }

    async fn dies_in_a_fence(&mut self, edge: &str) {
        self.arm(edge);
        fenced::fence(&self.site, "n1").await;
        self.dies(edge).await;
        self.mount().await;
        self.ends(edge).await;
    }

    async fn dies_in_an_import(&mut self, edge: &str) {
        let volume = edge.replace('.', "-");
        self.w.plugin("p").provision(&volume);
        self.w.stop().await;
        self.w.configure("node = \"n1\"\n");
        self.client = self.w.start().await;
        healthy(&self.client, "p").await;
        registered(&self.client, &volume, &[AccessMode::SingleNodeWriter]).await;
        self.w.stop().await;
        self.w.configure(&self.configuration());
        self.client = self.w.start().await;
        healthy(&self.client, "p").await;
        self.arm(edge);
        let import = JoinOptions { import: Some(true), ..JoinOptions::default() };
        let _ = self.client.join(import.clone()).await;
        eventually(&format!("csid is killed at {edge}"), async || self.w.dead()).await;
        assert_eq!(self.fault.disarm(), edge);
        self.client = self.w.start().await;
        healthy(&self.client, "p").await;
        self.client.join(import).await.unwrap();
        joined(self.w).await;
        assert_eq!(self.client.volume(NAMESPACE, &volume).await.unwrap().external_id, volume);
    }
}

#[test]
fn host_dies_at_each_edge_of_the_cluster() {
    world(async |w| {
        let etcd = Etcd::start(1, &[]).await;
        let section = format!("endpoints = {:?}\n{GRANTS}{MORE}", etcd.endpoints());
        let site = Site::of(etcd, 1, "", &section);
        site.register("data", "single-node-writer").await;
        let (fault, node) = (Fault::of(w), site.node("n1"));
        let plugin = w.add_plugin_and("p", &[], "").await;
        plugin.set(|script| {
            script.control(CONTROLS);
            script.node_id = "node n1".into();
            script.others = vec!["node n2".into()];
        });
        plugin.kill();
        plugin.start().await;
        plugin.provision("ext-data");
        let configuration =
            format!("{}controllers = [\"p\"]\ncontroller-volumes = [\"p\"]\n", of_node("n1", node.run()));
        w.configure(&configuration);
        let client = w.start().await;
        healthy(&client, "p").await;
        joined(w).await;
        let mut host = Host { w, site, node, fault, client };
        let points = csid::fault::points_of_cluster();
        for edge in &points {
            let (name, _) = edge.split_once('.').unwrap();
            match name {
                "Claim" | "CallEnded" => host.dies_in_a_mount(edge).await,
                "Detached" => host.dies_in_an_unmount(edge).await,
                "DeleteSnapshot" => host.dies_in_a_deletion(edge).await,
                "Hold" => host.dies_in_a_recovery(edge).await,
                "Withdraw" => host.dies_in_the_queue(edge).await,
                "Drained" => host.dies_in_a_drain(edge).await,
                "Fence" => host.dies_in_a_fence(edge).await,
                "Register" => host.dies_in_an_import(edge).await,
                name => panic!("no test kills csid at {name}"),
            }
        }
        count("kills", points.len());
        host.w.nothing_left(&host.client).await;
    });
}
