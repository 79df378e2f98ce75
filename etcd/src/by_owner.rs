//! The number of volumes that each identity has registered, so that its limit does not walk all volumes.

use std::collections::BTreeMap;

/// Registrations by owner. An owner without any is not in it.
#[derive(Default)]
pub(crate) struct OwnerIndex(BTreeMap<String, usize>);

impl OwnerIndex {
    /// Takes over a change of a volume's owner. `None`: the volume is not registered.
    pub fn change(&mut self, before: Option<&str>, after: Option<&str>) {
        if before == after {
            return;
        }
        if let Some(owner) = after {
            *self.0.entry(owner.to_owned()).or_default() += 1;
        }
        if let Some(owner) = before
            && let Some(count) = self.0.get_mut(owner)
        {
            *count -= 1;
            if *count == 0 {
                self.0.remove(owner);
            }
        }
    }

    /// Returns the number of an owner's registrations.
    pub fn volumes(&self, owner: &str) -> usize {
        self.0.get(owner).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_has_its_registrations_alone() {
        let mut index = OwnerIndex::default();
        let (a, b) = (Some("node/a"), Some("node/b"));
        for (before, after, of_a, of_b) in
            [(None, a, 1, 0), (None, a, 2, 0), (a, a, 2, 0), (a, b, 1, 1), (a, None, 0, 1), (b, None, 0, 0)]
        {
            index.change(before, after);
            assert_eq!((index.volumes("node/a"), index.volumes("node/b")), (of_a, of_b), "{after:?}");
        }
        assert!(index.0.is_empty(), "an owner without volumes takes memory");
    }
}
