//! The names of nodes by plugins. A controller attaches and detaches by them, so two nodes may not have the same one.

use std::collections::BTreeSet;

use csid::error::shortened;
use csid::{Error, Kind};
use csid_etcd::Guard;

use crate::cluster::{Cluster, node_guard};
use crate::failure::Result;
use crate::rows::{NodeRow, Read};

/// Plugins, each with a name that it has for a node.
pub type NodeNames = BTreeSet<(String, String)>;

impl Cluster {
    /// Returns the names that other nodes have by these plugins, as etcd has them now. `counts`: whether a node's names count.
    pub async fn names_of_others(
        &self,
        node: &str,
        plugins: &BTreeSet<String>,
        counts: fn(&NodeRow) -> bool,
    ) -> Result<NodeNames> {
        let mut names = NodeNames::new();
        if plugins.is_empty() {
            return Ok(names);
        }
        let mut pages = self.pages_of_nodes();
        while let Some(page) = self.next_of_nodes(&mut pages).await? {
            // A row that cannot be read has no name.
            for row in page.into_iter().filter(|(other, _)| other != node).filter_map(|(_, row)| row.ok()) {
                if counts(&row.value) {
                    let named = row.value.node_ids.into_iter();
                    names.extend(named.filter(|(plugin, _)| plugins.contains(plugin)));
                }
            }
        }
        Ok(names)
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
