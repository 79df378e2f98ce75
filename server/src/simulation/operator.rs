//! An operator who blocks nodes while a crowd claims, and accepts them again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use csi_proto::cluster::v1::admin_server::Admin;
use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{Accept, BlockAsk, NodeAsk, NodeChange, NodeRow};
use tokio::time::sleep;

use super::client::Client;
use super::node::Host;

/// A crowd's claims are written within this time in milliseconds.
const CLAIMED: u64 = 20;
/// The longest time in milliseconds that a node is blocked, if the operator is answered at once.
const BLOCKED: u64 = 500;

pub struct Operator {
    pub client: Client,
    pub nodes: Vec<Arc<Host>>,
    pub stops: AtomicBool,
}

impl Operator {
    /// Blocks a node and accepts it, again and again.
    pub async fn run(&self) {
        let dice = &self.client.dice;
        while !self.stops.load(Ordering::Relaxed) {
            let node = &self.nodes[dice.roll(self.nodes.len() as u64) as usize];
            node.gather().await;
            sleep(dice.time(0, CLAIMED)).await;
            self.change(&node.name, Change::Block(BlockAsk { reason: "stolen".into() })).await;
            sleep(dice.time(0, BLOCKED)).await;
            self.accept(&node.name).await;
        }
    }

    /// Accepts the nodes that are blocked.
    pub async fn accept_all(&self) {
        for node in &self.nodes {
            self.accept(&node.name).await;
        }
    }

    /// Accepts a node if it is blocked.
    async fn accept(&self, node: &str) {
        let ask = NodeAsk { node: node.to_owned() };
        let shown = self.client.ask(ask, |service, request| async move { service.node(request).await }).await;
        let Some(NodeRow { machine: Some(machine), revision, .. }) =
            shown.filter(|shown: &NodeRow| shown.state == "blocked")
        else {
            return;
        };
        let (machine_id, journal_id) = (machine.machine_id, machine.journal_id);
        let accept = Accept { machine_id, journal_id, revision, ..Accept::default() };
        self.change(node, Change::Accept(accept)).await;
    }

    async fn change(&self, node: &str, change: Change) {
        let ask = NodeChange { node: node.to_owned(), change: Some(change) };
        // A change without an answer may come late. The next look at the row shows it.
        drop(self.client.ask(ask, |service, request| async move { service.set_node(request).await }).await);
    }
}
