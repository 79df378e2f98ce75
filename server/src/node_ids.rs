//! The nodes by the plugins' names of them: those that nodes have reported, and those that an operator has accepted.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use csid::{Error, Kind};

use crate::cluster::{Cluster, NodeIds};
use crate::failure::Result;
use crate::rows::{NodeRow, NodeState, Read};

impl Cluster {
    /// Returns the node for which a plugin has this name. `None`: no node has. Fails if two nodes have it.
    pub async fn node_of_id(&self, plugin: &str, node_id: &str) -> Result<Option<String>> {
        let ids = self.node_ids_now().await?;
        let found = ids.nodes.get(&(plugin.to_owned(), node_id.to_owned()));
        match found.map(Vec::as_slice).unwrap_or_default() {
            [] => Ok(None),
            [node] => Ok(Some(node.clone())),
            [one, other, ..] => {
                let text = format!("plugin {plugin} has the same name for node {one} as for node {other}");
                Err(Error::new(Kind::NotAuthorized, text).into())
            }
        }
    }

    /// Returns all names, which are read again when a node's row has changed.
    async fn node_ids_now(&self) -> Result<Arc<NodeIds>> {
        let revision = self.registry.nodes_changed();
        if let Some(ids) = self.known_node_ids().filter(|ids| ids.revision == revision) {
            return Ok(ids);
        }
        let mut ids = NodeIds { revision, nodes: HashMap::new() };
        let mut pages = self.pages_of_nodes();
        while let Some(page) = self.next_of_nodes(&mut pages).await? {
            for (node, row) in page {
                // The name of a node whose row cannot be read is not known.
                let Ok(Read { value, .. }) = row else { continue };
                for name in names_of(value) {
                    ids.nodes.entry(name).or_default().push(node.clone());
                }
            }
        }
        let ids = Arc::new(ids);
        self.know_node_ids(ids.clone());
        Ok(ids)
    }
}

/// Returns the names of a node: those that it reports, and those that were accepted for it. An accepted one stays when its plugin is gone, and
/// a fence goes by it. A blocked node may have lied, so what it has reported is no name.
fn names_of(row: NodeRow) -> BTreeSet<(String, String)> {
    let is_believed = row.state != NodeState::Blocked;
    let reported = row.plugins.into_iter().filter(|_| is_believed);
    let reported = reported.filter_map(|(plugin, of)| Some((plugin, of.node_id?)));
    reported.chain(row.accepted_ids).collect()
}
