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

#[cfg(test)]
mod tests {
    use csid::store::registry::{ClaimState, Expansion, VolumeName, VolumeSpec};

    use super::*;

    const ASKED: Expansion = Expansion { required: 9, limit: 0, by_controller: false };

    /// A volume that is claimed on `nodes`, after the controller has expanded it.
    fn expanded(nodes: &[String]) -> Record {
        let name = VolumeName { namespace: "default".into(), volume: "data".into() };
        let mut record = Record::none(name);
        let mut registration = rules::new_registration("operator/a", VolumeSpec::default());
        registration.pending_expansion = Some(ASKED);
        record.registration = Some(registration);
        nodes.iter().for_each(|node| claim(&mut record, node));
        rules::enter_expanded(&mut record, ASKED, Some(9), true);
        record
    }

    fn claim(record: &mut Record, node: &str) {
        let usage = rules::read_use("read", "multi-node-reader-only", "file-system").unwrap();
        let mut claim = rules::new_claim("web", node, 0, usage);
        claim.state = ClaimState::Taken;
        record.claims.insert(claim);
        rules::settle_owed(record);
    }

    fn detached(record: &mut Record, node: &str) {
        record.claims.get_mut_at("web", node).unwrap().state = ClaimState::NodeDetached;
        rules::settle_owed(record);
    }

    fn asked(record: &Record) -> Vec<String> {
        due_expansions(record).map(|due| due.node).collect()
    }

    fn names(count: usize) -> Vec<String> {
        (0..count).map(|n| format!("n{n:04}")).collect()
    }

    #[test]
    fn each_node_with_a_claim_is_asked_in_a_bounded_list() {
        let nodes = names(1000);
        let mut record = expanded(&nodes);
        let mut done = Vec::new();
        while let Some(node) = asked(&record).pop() {
            assert!(asked(&record).len() <= 128);
            assert!(!rules::expanded_by_node(&mut record, &node, 8, 0), "another expansion");
            assert!(rules::expanded_by_node(&mut record, &node, 9, 0));
            assert!(!rules::expanded_by_node(&mut record, &node, 9, 0), "it was done before");
            done.push(node);
        }
        done.sort();
        done.dedup();
        assert_eq!(done, nodes);
        assert!(record.owed_expansion().is_none() && !record.is_restless());
    }

    #[test]
    fn nodes_without_claims_owe_nothing() {
        let mut record = expanded(&names(2));
        detached(&mut record, "n0000");
        assert_eq!(asked(&record), ["n0001"]);
        detached(&mut record, "n0001");
        // Nobody has done it, so the next node does.
        assert!(asked(&record).is_empty() && record.owed_expansion().is_some());
        claim(&mut record, "n0002");
        assert_eq!(asked(&record), ["n0002"]);
        assert!(!rules::expanded_by_node(&mut record, "n0001", 9, 0), "it has no claim");
        claim(&mut record, "n0003");
        assert!(rules::expanded_by_node(&mut record, "n0003", 9, 0));
        claim(&mut record, "n0004");
        assert_eq!(asked(&record), ["n0002"], "n0004 finds it expanded");
        detached(&mut record, "n0002");
        assert!(record.owed_expansion().is_none());
    }
}
