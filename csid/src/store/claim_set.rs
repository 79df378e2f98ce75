//! The claims of one volume. Copies share them: a change copies the claim that it changes, and no other.
//!
//! A claim is of a consumer on a node. On one host a consumer has one claim. In a cluster consumers of two nodes may have the same
//! name.

use std::sync::Arc;

use crate::store::claim::Claim;

/// Claims by consumer and node, one of each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimSet(Arc<Vec<Arc<Claim>>>);

/// A claim that two sets do not have alike: what the first has, and what the second has.
pub type Difference<'a> = (Option<&'a Claim>, Option<&'a Claim>);

impl ClaimSet {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// In the order of their consumers, then of their nodes.
    pub fn iter(&self) -> impl Iterator<Item = &Claim> {
        self.0.iter().map(Arc::as_ref)
    }

    pub fn first(&self) -> Option<&Claim> {
        self.iter().next()
    }

    /// Returns the first claim of a consumer, whatever its node.
    pub fn get(&self, consumer: &str) -> Option<&Claim> {
        self.first_of(consumer).map(|at| self.0[at].as_ref())
    }

    /// Returns the claim of a consumer on a node.
    pub fn get_at(&self, consumer: &str, node: &str) -> Option<&Claim> {
        self.place(consumer, node).ok().map(|at| self.0[at].as_ref())
    }

    /// Returns the first claim of a consumer to change it; its consumer and node have to stay.
    pub fn get_mut(&mut self, consumer: &str) -> Option<&mut Claim> {
        let at = self.first_of(consumer)?;
        Some(Arc::make_mut(&mut Arc::make_mut(&mut self.0)[at]))
    }

    /// Returns the claim of a consumer on a node to change it; its consumer and node have to stay.
    pub fn get_mut_at(&mut self, consumer: &str, node: &str) -> Option<&mut Claim> {
        let at = self.place(consumer, node).ok()?;
        Some(Arc::make_mut(&mut Arc::make_mut(&mut self.0)[at]))
    }

    /// Enters a claim in place of its consumer's earlier one on the same node.
    pub fn insert(&mut self, claim: Claim) {
        let place = self.place(&claim.consumer, &claim.node);
        let claims = Arc::make_mut(&mut self.0);
        match place {
            Ok(at) => claims[at] = Arc::new(claim),
            Err(at) => claims.insert(at, Arc::new(claim)),
        }
    }

    /// Removes the claim of a consumer on a node.
    pub fn remove_at(&mut self, consumer: &str, node: &str) {
        if let Ok(at) = self.place(consumer, node) {
            Arc::make_mut(&mut self.0).remove(at);
        }
    }

    /// The claims that differ, by consumer and node. One that both sets share is not looked into.
    pub fn differences<'a>(&'a self, other: &'a ClaimSet) -> Vec<Difference<'a>> {
        let mut found = Vec::new();
        if Arc::ptr_eq(&self.0, &other.0) {
            return found;
        }
        let (mut had, mut has) = (self.0.as_slice(), other.0.as_slice());
        loop {
            match (had, has) {
                ([], []) => return found,
                ([one, had_rest @ ..], [two, has_rest @ ..])
                    if Arc::ptr_eq(one, two) || key(one) == key(two) =>
                {
                    if one != two {
                        found.push((Some(one.as_ref()), Some(two.as_ref())));
                    }
                    (had, has) = (had_rest, has_rest);
                }
                ([one, rest @ ..], [two, ..]) if key(one) < key(two) => {
                    found.push((Some(one.as_ref()), None));
                    had = rest;
                }
                ([one, rest @ ..], []) => {
                    found.push((Some(one.as_ref()), None));
                    had = rest;
                }
                (_, [two, rest @ ..]) => {
                    found.push((None, Some(two.as_ref())));
                    has = rest;
                }
            }
        }
    }

    fn place(&self, consumer: &str, node: &str) -> Result<usize, usize> {
        self.0.binary_search_by(|claim| key(claim).cmp(&(consumer, node)))
    }

    fn first_of(&self, consumer: &str) -> Option<usize> {
        let at = self.0.partition_point(|claim| claim.consumer.as_str() < consumer);
        self.0.get(at).filter(|claim| claim.consumer == consumer).map(|_| at)
    }
}

fn key(claim: &Claim) -> (&str, &str) {
    (&claim.consumer, &claim.node)
}

impl<'a> IntoIterator for &'a ClaimSet {
    type Item = &'a Claim;
    type IntoIter = std::iter::Map<std::slice::Iter<'a, Arc<Claim>>, fn(&'a Arc<Claim>) -> &'a Claim>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter().map(Arc::as_ref)
    }
}

impl FromIterator<Claim> for ClaimSet {
    fn from_iter<I: IntoIterator<Item = Claim>>(claims: I) -> Self {
        let mut claims: Vec<Arc<Claim>> = claims.into_iter().map(Arc::new).collect();
        if !claims.is_sorted_by(|one, next| key(one) < key(next)) {
            // The last of several claims of one consumer and node stays.
            claims.reverse();
            claims.sort_by(|one, other| key(one).cmp(&key(other)));
            claims.dedup_by(|later, kept| key(later) == key(kept));
        }
        ClaimSet(Arc::new(claims))
    }
}

#[cfg(any(test, feature = "testing"))]
mod testing {
    use std::ops::{Index, IndexMut};
    use std::sync::Arc;

    use crate::store::claim::Claim;
    use crate::store::claim_set::ClaimSet;

    impl Index<usize> for ClaimSet {
        type Output = Claim;

        fn index(&self, at: usize) -> &Claim {
            &self.0[at]
        }
    }

    impl IndexMut<usize> for ClaimSet {
        fn index_mut(&mut self, at: usize) -> &mut Claim {
            Arc::make_mut(&mut Arc::make_mut(&mut self.0)[at])
        }
    }

    impl From<Vec<Claim>> for ClaimSet {
        fn from(claims: Vec<Claim>) -> Self {
            claims.into_iter().collect()
        }
    }

    impl ClaimSet {
        /// Removes the first claim of a consumer, whatever its node.
        pub fn remove(&mut self, consumer: &str) {
            if let Some(at) = self.first_of(consumer) {
                Arc::make_mut(&mut self.0).remove(at);
            }
        }

        /// How many claims are in memory once for both sets.
        pub fn shared_with(&self, other: &ClaimSet) -> usize {
            let is_other = |claim: &&Arc<Claim>| other.0.iter().any(|other| Arc::ptr_eq(claim, other));
            self.0.iter().filter(is_other).count()
        }
    }
}
