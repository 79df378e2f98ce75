//! The known mounts of csid's own namespace, by their ids, their paths, and the directories that they show.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// A mount, its file system, which never changes, and where it was when csid first asked.
#[derive(Clone)]
pub(super) struct MountFacts {
    pub id: u64,
    /// Its id in mountinfo. The kernel uses such an id again.
    pub old_id: u64,
    pub device: u64,
    /// A hash of its path then. 0: the path is too long for an answer.
    pub place: u64,
    /// A hash of the directory that the path is in, if it has the form of a volume's. 0: it has not.
    pub home: u64,
    /// A hash of the directory that is two levels above that one: a volume's is below a tmpfs of csid's. 0: as of `home`.
    pub live: u64,
    /// The directory that it showed when csid last asked. Empty: the answer was too long, so it may be any directory.
    pub root: Arc<Path>,
}

impl MountFacts {
    /// Returns whether the mount may show something of the directory `root` of the file system `device`.
    pub fn may_show(&self, device: u64, root: &Path) -> bool {
        self.device == device && (self.root.as_os_str().is_empty() || self.root.starts_with(root))
    }
}

#[derive(Default)]
pub(super) struct MountIndex {
    /// In the order of the ids.
    mounts: Vec<MountFacts>,
    /// File systems, directories and ids. The directories below another one follow it.
    roots: BTreeSet<(u64, Arc<Path>, u64)>,
}

impl MountIndex {
    pub fn len(&self) -> usize {
        self.mounts.len()
    }

    pub fn get(&self, id: u64) -> Option<&MountFacts> {
        Some(&self.mounts[self.find(id).ok()?])
    }

    fn find(&self, id: u64) -> Result<usize, usize> {
        self.mounts.binary_search_by_key(&id, |facts| facts.id)
    }

    /// Returns the known mounts, in the order of their ids.
    pub fn iter(&self) -> impl Iterator<Item = &MountFacts> {
        self.mounts.iter()
    }

    /// Removes what is not in `listed`, which is in ascending order. Returns the ids in it that are not known.
    pub fn keep(&mut self, listed: &[u64]) -> Vec<u64> {
        let mut new = Vec::new();
        let mut listed = listed.iter().copied().peekable();
        self.mounts.retain(|facts| {
            while let Some(id) = listed.next_if(|id| *id < facts.id) {
                new.push(id);
            }
            let is_listed = listed.next_if_eq(&facts.id).is_some();
            if !is_listed {
                self.roots.remove(&(facts.device, Arc::clone(&facts.root), facts.id));
            }
            is_listed
        });
        new.extend(listed);
        new
    }

    /// Notes a mount, or what has changed of it.
    pub fn note(&mut self, mut facts: MountFacts) {
        // The mounts of a volume show the same directory.
        if let Some((_, root, _)) = self.roots.range((facts.device, Arc::clone(&facts.root), 0)..).next()
            && *root == facts.root
        {
            facts.root = Arc::clone(root);
        }
        self.roots.insert((facts.device, Arc::clone(&facts.root), facts.id));
        match self.find(facts.id) {
            Ok(at) => {
                let before = std::mem::replace(&mut self.mounts[at], facts);
                if before.root != self.mounts[at].root {
                    self.roots.remove(&(before.device, before.root, before.id));
                }
            }
            Err(at) => self.mounts.insert(at, facts),
        }
    }

    /// Returns the ids of the mounts at these places.
    pub fn at(&self, places: &BTreeSet<u64>) -> impl Iterator<Item = u64> {
        self.mounts.iter().filter(|facts| places.contains(&facts.place)).map(|facts| facts.id)
    }

    /// Returns the ids of the mounts of a file system.
    pub fn of_device(&self, device: u64) -> impl Iterator<Item = u64> {
        self.roots_from(device, Path::new("")).map(|(_, id)| id)
    }

    /// Returns the ids of the mounts that may show something of the directory `root` of the file system `device`.
    pub fn may_show(&self, device: u64, root: &Path) -> impl Iterator<Item = u64> {
        let unknown =
            self.roots_from(device, Path::new("")).take_while(|(root, _)| root.as_os_str().is_empty());
        let below = self.roots_from(device, root).take_while(move |(own, _)| own.starts_with(root));
        unknown.chain(below).map(|(_, id)| id)
    }

    fn roots_from(&self, device: u64, root: &Path) -> impl Iterator<Item = (&Path, u64)> {
        let from = (device, Arc::from(root), 0);
        self.roots.range(from..).take_while(move |(of, ..)| *of == device).map(|(_, root, id)| (&**root, *id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(mounts: &[(u64, u64, &str)]) -> MountIndex {
        let mut index = MountIndex::default();
        for &(id, device, root) in mounts {
            let root = Arc::from(Path::new(root));
            index.note(MountFacts { id, old_id: id, device, place: id, home: 0, live: 0, root });
        }
        index
    }

    #[test]
    fn mounts_of_a_directory_are_found_alone() {
        let index = index(&[
            (1, 7, "/"),
            (2, 7, "/a"),
            (3, 7, "/a.b"),
            (4, 7, "/a/b"),
            (5, 7, "/ab"),
            (6, 8, "/a"),
            (7, 7, ""),
            (8, 7, "/a"),
            (9, 6, "/a"),
        ]);
        for (root, shown) in [
            ("/a", vec![7, 2, 8, 4]),
            ("/a/b", vec![7, 4]),
            ("/", vec![7, 1, 2, 8, 4, 3, 5]),
            ("/b", vec![7]),
        ] {
            let found: Vec<u64> = index.may_show(7, Path::new(root)).collect();
            assert_eq!(found, shown, "{root}");
            let by_facts: BTreeSet<u64> = index
                .iter()
                .filter(|facts| facts.may_show(7, Path::new(root)))
                .map(|facts| facts.id)
                .collect();
            assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), by_facts, "{root}");
        }
        assert_eq!(index.of_device(8).collect::<Vec<_>>(), [6]);
        assert_eq!(index.of_device(7).count(), 7);
    }

    #[test]
    fn list_keeps_its_mounts_and_names_new_ones() {
        let mut index = index(&[(2, 7, "/a"), (4, 7, "/b"), (6, 7, "/c")]);
        assert_eq!(index.keep(&[1, 4, 5, 7]), [1, 5, 7]);
        assert_eq!(index.iter().map(|facts| facts.id).collect::<Vec<_>>(), [4]);
        assert_eq!(index.roots.len(), 1);
        let at = |index: &MountIndex| index.at(&BTreeSet::from([2, 4])).collect::<Vec<_>>();
        assert_eq!(at(&index), [4]);
        let moved =
            MountFacts { place: 9, root: Arc::from(Path::new("/d")), ..index.get(4).unwrap().clone() };
        index.note(moved);
        assert!(at(&index).is_empty());
        assert_eq!(index.at(&BTreeSet::from([9])).collect::<Vec<_>>(), [4]);
        assert_eq!(index.may_show(7, Path::new("/d")).collect::<Vec<_>>(), [4]);
        assert!(index.keep(&[]).is_empty());
        assert_eq!((index.len(), index.roots.len()), (0, 0));
    }
}
