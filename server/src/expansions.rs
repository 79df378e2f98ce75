//! The nodes' parts of expansions. A record lists the nodes that owe theirs; csid's rules keep the list in line with the claims. A node
//! is asked in its session, does its part, and reports that. A node that is away is asked when it joins again.

use csi_proto::cluster::v1::to_node::Is;
use csi_proto::cluster::v1::{Accepted, Expand, NodeExpanded};
use csi_proto::identity::Identity;
use csid::store::registry::{Record, Registry};
use csid::volume::rules;

use crate::cluster::{Cluster, meta_guard, node_guard, not_joined};
use crate::failure::Result;
use crate::records::{TRIES, busy};
use crate::sessions::Due;

/// Returns the parts of a volume's expansion that nodes have to do.
pub fn due_expansions(record: &Record) -> impl Iterator<Item = Due> {
    record.owed_expansion().into_iter().flat_map(|owed| {
        owed.nodes.iter().map(|node| {
            let expand = Expand {
                namespace: record.name.namespace.clone(),
                volume: record.name.volume.clone(),
                required: owed.required,
                limit: owed.limit,
            };
            Due { node: node.clone(), is: Is::Expand(expand) }
        })
    })
}

impl Cluster {
    /// Takes a node's word that it has done its part of an expansion. The word of a node without a claim counts for nothing.
    pub async fn expanded(&self, caller: &Identity, done: NodeExpanded) -> Result<Accepted> {
        self.require_node(caller)?;
        let name = rules::volume_name(&done.namespace, &done.volume)?;
        rules::check_capacity(done.required, done.limit)?;
        let node = &caller.name;
        for _ in 0..TRIES {
            let here = self.presence.here()?;
            let meta = self.meta().await?;
            let row = self.unblocked(node).await?;
            let record = self.registry.record(name.clone()).await?;
            let mut after = record.clone();
            if !rules::expanded_by_node(&mut after, node, done.required, done.limit) {
                // It has reported this before, or another expansion is due now, which it is asked for.
                return Ok(Accepted {});
            }
            let Some(row) = row else { return Err(not_joined(node)) };
            if !self.is_of_boot(node, &row, &done.boot).await? {
                continue;
            }
            let guards = vec![meta_guard(&meta), node_guard(node, &row), here.guard()];
            if self.swap(&record, after, guards).await?.is_some() {
                tracing::info!(node, volume = %name, "a node has done its part of an expansion");
                return Ok(Accepted {});
            }
        }
        Err(busy(&name))
    }
}
