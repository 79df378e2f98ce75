//! The claims of one volume. Copies share them: a change copies the claim that it changes, and no other.

use std::sync::Arc;

use crate::store::claim::Claim;

/// Claims by consumer, one of each.
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

    /// In the order of their consumers.
    pub fn iter(&self) -> impl Iterator<Item = &Claim> {
        self.0.iter().map(Arc::as_ref)
    }

    pub fn first(&self) -> Option<&Claim> {
        self.iter().next()
    }

    pub fn get(&self, consumer: &str) -> Option<&Claim> {
        self.place(consumer).ok().map(|at| self.0[at].as_ref())
    }

    /// The claim to change; its consumer has to stay.
    pub fn get_mut(&mut self, consumer: &str) -> Option<&mut Claim> {
        let at = self.place(consumer).ok()?;
        Some(Arc::make_mut(&mut Arc::make_mut(&mut self.0)[at]))
    }

    /// Enters a claim in place of its consumer's earlier one.
    pub fn insert(&mut self, claim: Claim) {
        let place = self.place(&claim.consumer);
        let claims = Arc::make_mut(&mut self.0);
        match place {
            Ok(at) => claims[at] = Arc::new(claim),
            Err(at) => claims.insert(at, Arc::new(claim)),
        }
    }

    pub fn remove(&mut self, consumer: &str) {
        if let Ok(at) = self.place(consumer) {
            Arc::make_mut(&mut self.0).remove(at);
        }
    }

    /// The claims that differ, by consumer. One that both sets share is not looked into.
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
                    if Arc::ptr_eq(one, two) || one.consumer == two.consumer =>
                {
                    if one != two {
                        found.push((Some(one.as_ref()), Some(two.as_ref())));
                    }
                    (had, has) = (had_rest, has_rest);
                }
                ([one, rest @ ..], [two, ..]) if one.consumer < two.consumer => {
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

    fn place(&self, consumer: &str) -> Result<usize, usize> {
        self.0.binary_search_by(|claim| claim.consumer.as_str().cmp(consumer))
    }
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
        if !claims.is_sorted_by(|one, next| one.consumer < next.consumer) {
            // The last of several claims of one consumer stays.
            claims.reverse();
            claims.sort_by(|one, other| one.consumer.cmp(&other.consumer));
            claims.dedup_by(|later, kept| later.consumer == kept.consumer);
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
        /// How many claims are in memory once for both sets.
        pub fn shared_with(&self, other: &ClaimSet) -> usize {
            let is_other = |claim: &&Arc<Claim>| other.0.iter().any(|other| Arc::ptr_eq(claim, other));
            self.0.iter().filter(is_other).count()
        }
    }
}
