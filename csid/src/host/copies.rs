//! Decides which mounts of other namespaces keep a volume in use. Pure: a search finds the mounts.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use crate::host::namespaces::{MountElsewhere, Question, Shown};
use crate::host::table::{Groups, MountEntry};

/// A directory or file of the file system with this number.
type Place<'a> = (u64, &'a [u8]);

/// Mounts of one answer.
const MOST: usize = 1_024;
/// Bytes of all paths in the answers of one search.
const PATHS: usize = 4 << 20;

/// The questions that one search answers.
pub(super) struct Search<'a> {
    pub questions: &'a [Question],
    shown: HashMap<Place<'a>, Vec<(usize, &'a Shown)>>,
    devices: HashSet<u64>,
    /// Each group in which csid's own unmount begins, and the place on its members.
    unmounted: HashSet<(u64, u64, PathBuf)>,
}

/// A mount that shows what was asked for.
pub(super) struct ForeignMount {
    pub copy: MountElsewhere,
    /// The questions that it answers.
    pub of: BTreeSet<usize>,
    pub device: u64,
    /// The groups of its parent, and its place on it. `None`: no process sees the parent.
    pub parent: Option<(Groups, PathBuf)>,
    /// Whether something is mounted on it, so that it outlives csid's unmount.
    pub is_parent: bool,
}

/// The groups above each group: what is unmounted in one of these is unmounted in the group, too.
#[derive(Default)]
pub(super) struct Masters(HashMap<u64, BTreeSet<u64>>);

impl Masters {
    /// Adds the relations that a mount with these groups shows.
    pub fn add(&mut self, Groups { shared, master, propagate_from }: Groups) {
        for (below, above) in [(shared, master), (shared, propagate_from), (master, propagate_from)] {
            if let (Some(below), Some(above)) = (below, above) {
                self.0.entry(below).or_default().insert(above);
            }
        }
    }

    /// Returns every group whose unmounts reach a mount with these groups.
    fn reach(&self, groups: Groups) -> impl Iterator<Item = u64> {
        let mut reached: BTreeSet<u64> = BTreeSet::new();
        let mut next: Vec<u64> =
            [groups.shared, groups.master, groups.propagate_from].into_iter().flatten().collect();
        while let Some(group) = next.pop() {
            if reached.insert(group) {
                next.extend(self.0.get(&group).into_iter().flatten());
            }
        }
        reached.into_iter()
    }
}

impl<'a> Search<'a> {
    pub fn new(questions: &'a [Question]) -> Self {
        let mut shown: HashMap<Place<'_>, Vec<(usize, &Shown)>> = HashMap::new();
        for (number, question) in questions.iter().enumerate() {
            for one in &question.shown {
                shown.entry((one.device, one.root.as_os_str().as_bytes())).or_default().push((number, one));
            }
        }
        let devices = shown.keys().map(|(device, _)| *device).collect();
        Search { questions, shown, devices, unmounted: HashSet::new() }
    }

    /// Returns whether a question is about the file system with this number.
    pub fn is_about(&self, device: u64) -> bool {
        self.devices.contains(&device)
    }

    /// Returns the questions about the file system with this number.
    pub fn about(&self, device: u64) -> BTreeSet<usize> {
        let asks = |question: &Question| question.shown.iter().any(|shown| shown.device == device);
        (0..self.questions.len()).filter(|number| asks(&self.questions[*number])).collect()
    }

    /// Returns the questions that ask for a mount like this.
    pub fn asking(&self, entry: &MountEntry) -> BTreeSet<usize> {
        if !self.is_about(entry.device) {
            return BTreeSet::new();
        }
        let above = entry.root.ancestors().map(|root| (entry.device, root.as_os_str().as_bytes()));
        let asking = above.filter_map(|key| self.shown.get(&key)).flatten();
        asking.filter(|(_, shown)| shown.is_shown_by(entry)).map(|(number, _)| *number).collect()
    }

    /// Notes that csid's own namespace has this mount on that one. csid will unmount it if a question is about it.
    pub fn note_own(&mut self, entry: &MountEntry, on: &MountEntry) {
        if !self.asking(entry).is_empty()
            && let Some((group, place)) = on.groups.shared.zip(place_on(entry, on))
        {
            self.unmounted.insert((entry.device, group, place));
        }
    }

    /// Returns whether csid's own unmount takes this mount along.
    pub fn goes_along(&self, found: &ForeignMount, masters: &Masters) -> bool {
        self.takes_along(found.device, found.parent.clone(), found.is_parent, masters)
    }

    /// Returns the same for a mount with this device number, parent, and something mounted on it or not.
    pub fn takes_along(
        &self,
        device: u64,
        parent: Option<(Groups, PathBuf)>,
        is_parent: bool,
        masters: &Masters,
    ) -> bool {
        let Some((groups, place)) = parent.filter(|_| !is_parent) else { return false };
        let begins = |group: u64| self.unmounted.contains(&(device, group, place.clone()));
        masters.reach(groups).any(begins)
    }

    /// Returns the answers in the order of the questions. Each is bounded, because every user can make many mounts. Its last mount then
    /// stands for those that are left out.
    pub fn answers(&self, found: impl IntoIterator<Item = ForeignMount>) -> Vec<Vec<MountElsewhere>> {
        let mut answers = vec![Vec::new(); self.questions.len()];
        let mut space = PATHS;
        for ForeignMount { copy, of, .. } in found {
            for number in of {
                let answer: &mut Vec<MountElsewhere> = &mut answers[number];
                let path = copy.path.as_ref().map_or(0, |path| path.as_os_str().len());
                if answer.len() < MOST && path <= space {
                    space -= path;
                    answer.push(copy.clone());
                } else if answer.len() <= MOST {
                    answer.push(MountElsewhere::unsearched(copy.holder));
                }
            }
        }
        answers
    }
}

/// Returns the directory or file that `entry` is mounted on, as its path in the file system of the mount `on`.
pub(super) fn place_on(entry: &MountEntry, on: &MountEntry) -> Option<PathBuf> {
    Some(on.root.join(entry.path.strip_prefix(&on.path).ok()?))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::host::namespaces::Holder;
    use crate::host::table;

    #[test]
    fn answer_is_bounded_and_says_so() {
        let questions = [Question { shown: vec![], but_of: vec![] }];
        let found = |path: String| ForeignMount {
            copy: MountElsewhere { holder: Holder::Process(7), path: Some(path.into()), read_only: false },
            of: [0].into(),
            device: 1,
            parent: None,
            is_parent: false,
        };
        let left_out = MountElsewhere::unsearched(Holder::Process(7));
        assert!(left_out.may_be_below(Path::new("/anywhere")));
        let many = (0..3 * MOST).map(|number| found(format!("/{number}")));
        let answer = Search::new(&questions).answers(many).remove(0);
        assert_eq!((answer.len(), &answer[MOST]), (MOST + 1, &left_out));
        let long = (0..3).map(|_| found("x".repeat(PATHS / 2)));
        let answer = Search::new(&questions).answers(long).remove(0);
        assert!(answer[..2].iter().all(|copy| copy.path.is_some()));
        assert_eq!(answer[2..], [left_out]);
    }

    #[test]
    fn unmounts_come_by_peers_and_masters_alone() {
        let mut masters = Masters::default();
        for (shared, master) in [(9, 5), (5, 2)] {
            masters.add(Groups { shared: Some(shared), master: Some(master), propagate_from: None });
        }
        let from = |shared, master, propagate_from| -> Vec<u64> {
            masters.reach(Groups { shared, master, propagate_from }).collect()
        };
        assert_eq!(from(Some(2), None, None), [2]);
        assert_eq!(from(None, Some(9), None), [2, 5, 9], "a slave of a slave");
        assert_eq!(from(None, Some(7), Some(5)), [2, 5, 7]);
        assert!(from(None, None, None).is_empty(), "a private mount receives nothing");
    }

    #[test]
    fn a_place_is_named_in_its_file_system() {
        let entry = |line: &[u8]| table::parsed(line).next().unwrap();
        let on = entry(b"2 1 0:5 /srv /var rw - tmpfs - rw");
        let at = entry(b"3 2 0:6 / /var/a/b rw - tmpfs - rw");
        assert_eq!(place_on(&at, &on), Some(PathBuf::from("/srv/a/b")));
        assert_eq!(place_on(&on, &at), None);
    }
}
