//! The names of nodes by plugins. A controller attaches and detaches by them, so two nodes may not have the same one.

use std::collections::BTreeSet;
use std::sync::Arc;

use csid::error::shortened;
use csid::{Error, Kind};
use csid_etcd::Guard;
use tokio::time::Instant;

use crate::cluster::{Cluster, Named, NodesByName, SeenNames, node_guard};
use crate::failure::{Result, ServerError};
use crate::rows::{NodeRow, Read};

/// Plugins, each with a name that it has for a node.
pub type NodeNames = BTreeSet<(String, String)>;

impl Cluster {
    /// Returns those of some names that other nodes have, as etcd has them now. `counts`: whether a node's names count.
    pub async fn names_of_others(
        &self,
        node: &str,
        mut names: NodeNames,
        counts: fn(&Named) -> bool,
    ) -> Result<NodeNames> {
        if !names.is_empty() {
            let nodes = self.names_now().await?;
            let is_other = |of: &Named| of.node != node && counts(of);
            names.retain(|name| nodes.get(name).is_some_and(|of| of.iter().any(is_other)));
        }
        Ok(names)
    }

    /// Returns the names of all nodes. A fleet that joins for the first time asks once for each node, so those that wait at the same time share
    /// a read, and its failure. The read begins after each of them has asked.
    async fn names_now(&self) -> Result<Arc<NodesByName>> {
        let asked = Instant::now();
        let mut seen = self.seen_names.lock().await;
        if let Some(seen) = seen.as_ref().filter(|seen| seen.begun > asked) {
            let failed = || ServerError::Unavailable("the names of the nodes could not be read".into());
            return seen.nodes.clone().ok_or_else(failed);
        }
        let begun = Instant::now();
        let nodes = self.read_names().await.map(Arc::new);
        *seen = Some(SeenNames { begun, nodes: nodes.as_ref().ok().cloned() });
        nodes
    }

    /// Reads the names of all nodes from etcd.
    async fn read_names(&self) -> Result<NodesByName> {
        let mut nodes = NodesByName::new();
        let mut pages = self.pages_of_nodes();
        while let Some(page) = self.next_of_nodes(&mut pages).await? {
            for (node, row) in page {
                // A row that cannot be read has no name.
                let Ok(Read { value, .. }) = row else { continue };
                let may_have_sessions = value.may_have_sessions();
                for name in value.node_ids {
                    nodes.entry(name).or_default().push(Named { node: node.clone(), may_have_sessions });
                }
            }
        }
        Ok(nodes)
    }

    /// Refuses names that an operator accepts for a node while another node's row has them as accepted. Returns the guards of the nodes that have
    /// such a name otherwise: an operator may accept it there in the same moment.
    pub async fn refuse_accepted_names(
        &self,
        node: &str,
        before: &NodeRow,
        after: &NodeRow,
    ) -> Result<Vec<Guard>> {
        let is_new = |(plugin, name): &(&String, &String)| before.accepted_ids.get(*plugin) != Some(*name);
        let new: Vec<_> = after.accepted_ids.iter().filter(is_new).collect();
        let mut guards = Vec::new();
        if new.is_empty() {
            return Ok(guards);
        }
        let mut pages = self.pages_of_nodes();
        while let Some(page) = self.next_of_nodes(&mut pages).await? {
            for (other, row) in page.into_iter().filter(|(other, _)| other != node) {
                let Ok(row) = row else { continue };
                let accepted =
                    |(plugin, name): &&(&String, &String)| row.value.accepted_ids.get(*plugin) == Some(*name);
                if let Some((plugin, name)) = new.iter().find(accepted) {
                    let text = format!(
                        "node {node} does not get the name {:?} by plugin {plugin}: an operator has accepted it for node {other}",
                        shortened(name)
                    );
                    return Err(Error::new(Kind::AlreadyExists, text).into());
                }
                if new.iter().any(|(plugin, name)| has_name(&row, plugin, name)) {
                    guards.push(node_guard(&other, &row));
                }
            }
        }
        Ok(guards)
    }
}

/// Returns whether a node has, or wants, a name by a plugin.
fn has_name(row: &Read<NodeRow>, plugin: &str, name: &str) -> bool {
    let of = row.value.plugins.get(plugin);
    let reported = of.into_iter().flat_map(|of| [&of.node_id, &of.other_node_id]).flatten();
    reported.chain(row.value.node_ids.get(plugin)).any(|of| of == name)
}
