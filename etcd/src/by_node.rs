//! The volumes that each node has claimed, so that the list of a node's claims does not walk all volumes.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use csid::store::registry::{ClaimSet, Queued, VolumeName};

/// Claims by node.
#[derive(Default)]
pub(crate) struct NodeIndex(BTreeMap<String, OfNode>);

/// The claims of one node.
#[derive(Default)]
struct OfNode {
    claims: usize,
    /// The claims that wait.
    queued: usize,
    /// The number of the node's claims of each volume, which is at least 1.
    volumes: BTreeMap<Arc<VolumeName>, usize>,
}

impl OfNode {
    fn is_empty(&self) -> bool {
        self.claims == 0 && self.queued == 0
    }
}

impl NodeIndex {
    /// Takes over a change of a volume's claims.
    pub fn change(&mut self, name: &Arc<VolumeName>, before: &ClaimSet, after: &ClaimSet) {
        for (had, has) in before.differences(after) {
            match (had, has) {
                (None, Some(claim)) => self.add(name, &claim.node),
                (Some(claim), None) => self.remove(name, &claim.node),
                // The node is part of what a claim is known by.
                _ => {}
            }
        }
    }

    /// Takes over a change of the claims of a volume that wait.
    pub fn change_queue(&mut self, before: &[Queued], after: &[Queued]) {
        if before.is_empty() && after.is_empty() {
            return;
        }
        for queued in after {
            self.0.entry(queued.claim.node.clone()).or_default().queued += 1;
        }
        for queued in before {
            let node = &queued.claim.node;
            if let Some(of_node) = self.0.get_mut(node) {
                of_node.queued = of_node.queued.saturating_sub(1);
                if of_node.is_empty() {
                    self.0.remove(node);
                }
            }
        }
    }

    fn add(&mut self, name: &Arc<VolumeName>, node: &str) {
        let of_node = self.0.entry(node.to_owned()).or_default();
        of_node.claims += 1;
        *of_node.volumes.entry(name.clone()).or_default() += 1;
    }

    fn remove(&mut self, name: &VolumeName, node: &str) {
        let Some(of_node) = self.0.get_mut(node) else { return };
        let Some(count) = of_node.volumes.get_mut(name) else { return };
        of_node.claims -= 1;
        *count -= 1;
        if *count == 0 {
            of_node.volumes.remove(name);
        }
        if of_node.is_empty() {
            self.0.remove(node);
        }
    }

    /// Returns the number of a node's claims.
    pub fn claims(&self, node: &str) -> usize {
        self.0.get(node).map_or(0, |of_node| of_node.claims)
    }

    /// Returns the number of a node's claims that wait.
    pub fn queued(&self, node: &str) -> usize {
        self.0.get(node).map_or(0, |of_node| of_node.queued)
    }

    /// Returns the volumes that a node has claimed, by name, from a bound on.
    pub fn volumes(&self, node: &str, begin: Bound<VolumeName>) -> impl Iterator<Item = &VolumeName> {
        let of_node = self.0.get(node);
        of_node.into_iter().flat_map(move |of_node| {
            of_node.volumes.range((begin.clone(), Bound::Unbounded)).map(|(name, _)| name.as_ref())
        })
    }
}

#[cfg(test)]
mod tests {
    use csid::store::testing::samples::{claim, name};

    use super::*;

    fn set(claims: &[(&str, &str)]) -> ClaimSet {
        claims.iter().map(|(consumer, node)| claim(consumer, node)).collect()
    }

    #[test]
    fn node_has_a_volume_until_its_last_claim_ends() {
        let mut index = NodeIndex::default();
        let states = [
            set(&[]),
            set(&[("a", "n1"), ("b", "n1"), ("a", "n2")]),
            set(&[("b", "n1"), ("a", "n2")]),
            set(&[("a", "n2")]),
        ];
        let mut found = Vec::new();
        index.change(&name("other").into(), &states[0], &states[3]);
        for pair in states.windows(2) {
            index.change(&name("data").into(), &pair[0], &pair[1]);
            let volumes = |node| index.volumes(node, Bound::Unbounded).count();
            found.push((index.claims("n1"), volumes("n1"), index.claims("n2"), volumes("n2")));
        }
        assert_eq!(found, [(2, 1, 2, 2), (1, 1, 2, 2), (0, 0, 2, 2)]);
        assert!(!index.0.contains_key("n1"), "a node without claims takes memory");
        let after = Bound::Excluded(name("data"));
        assert_eq!(index.volumes("n2", after).collect::<Vec<_>>(), [&name("other")]);
    }
}
