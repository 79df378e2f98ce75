//! The names of nodes by plugins. A controller attaches and detaches by them, so two nodes may not have the same one.

use std::collections::BTreeSet;

use csid_etcd::{RowKey, Rows};

use crate::cluster::Cluster;
use crate::failure::Result;
use crate::rows::{self, NodeRow};

/// Nodes that are read together.
const NODES: i64 = 1000;

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
        let (mut names, mut after) = (NodeNames::new(), String::new());
        if plugins.is_empty() {
            return Ok(names);
        }
        loop {
            let found = self.rows.list(&Rows::Nodes { after: after.clone() }, NODES).await?;
            if found.is_empty() {
                return Ok(names);
            }
            for (key, row) in found {
                let RowKey::Node(other) = &key else { continue };
                after.clone_from(other);
                let Ok(row) = rows::read::<NodeRow>(&key, &row) else { continue };
                let counts = counts(&row.value);
                let of_plugins =
                    row.value.node_ids.into_iter().filter(|(plugin, _)| plugins.contains(plugin));
                if other != node && counts {
                    names.extend(of_plugins);
                }
            }
        }
    }
}
