//! Search through the mount namespaces that the kernel lists, whether a process is in them or not. A mount keeps its file system
//! for life, so a later search asks only for the new mounts, and for those of the file systems in question.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{Error, ErrorKind, Result};
use std::time::{Duration, Instant};

use crate::host::copies::{ForeignMount, Masters, Search, place_on};
use crate::host::namespaces::{Budget, Holder, MountElsewhere, NAMED};
use crate::host::process_tables::{first_id, processes, threads};
use crate::host::statmount::{Stat, inodes, mounts, unless_gone};
use crate::host::table::MountEntry;

/// The mounts of each namespace, by the namespace's id, as the last search found them.
#[derive(Default)]
pub(super) struct Known {
    mounts: HashMap<u64, Vec<KnownMount>>,
    /// Mounts that were asked for, by all searches.
    learned: u64,
}

/// Facts about a mount that never change.
#[derive(Clone, Copy)]
struct KnownMount {
    id: u64,
    /// Id in `mountinfo`.
    old_id: u64,
    device: u64,
}

fn hidden() -> Error {
    Error::new(ErrorKind::Unsupported, "the kernel lists a mount namespace in part")
}

/// Mounts of one namespace that a question may be about.
#[derive(Default)]
struct Entries {
    entries: Vec<MountEntry>,
    /// The file systems of mounts whose paths are longer than the kernel's answer may be.
    unreadable: Vec<u64>,
    /// Whether the namespace has more mounts, for which there was no time.
    is_cut: bool,
}

impl Known {
    /// Returns how many mounts all searches have asked for.
    pub fn learned(&self) -> u64 {
        self.learned
    }

    /// Forgets what is known of namespaces that are gone.
    fn retain(&mut self, own: u64, others: &[u64]) {
        let alive: BTreeSet<u64> = others.iter().copied().chain([own]).collect();
        self.mounts.retain(|id, _| alive.contains(id));
    }

    /// Returns the mounts of a namespace that a question may be about, as far as they are found by `end`. `None`: the namespace is gone,
    /// or the kernel lists nothing of it.
    fn entries(
        &mut self,
        namespace: u64,
        search: &Search<'_>,
        stat: &mut Stat,
        end: Instant,
    ) -> Result<Option<Entries>> {
        let Some(listed) = unless_gone(mounts(namespace, None, end))? else {
            self.mounts.remove(&namespace);
            return Ok(None);
        };
        let mut before = self.mounts.remove(&namespace).unwrap_or_default().into_iter().peekable();
        let mut now: Vec<KnownMount> = Vec::with_capacity(listed.ids.len());
        let mut found = Entries { is_cut: listed.is_cut, ..Entries::default() };
        for id in listed.ids {
            while before.next_if(|mount| mount.id < id).is_some() {}
            let mount = match before.next_if(|mount| mount.id == id) {
                Some(mount) => mount,
                // The first mount identifies the namespace.
                None if !now.is_empty() && Instant::now() >= end => {
                    found.is_cut = true;
                    break;
                }
                None => match unless_gone(stat.identity(namespace, id))? {
                    Some((old_id, device)) => {
                        self.learned += 1;
                        KnownMount { id, old_id, device }
                    }
                    None => continue,
                },
            };
            now.push(mount);
            if search.is_about(mount.device) {
                match stat.entry(namespace, id) {
                    // Every user can mount at such a path.
                    Err(error) if error.raw_os_error() == Some(libc::EOVERFLOW) => {
                        found.unreadable.push(mount.device);
                    }
                    entry => found.entries.extend(unless_gone(entry)?),
                }
            }
        }
        if found.is_cut {
            // The next search goes on where this one had no more time.
            now.extend(before);
        }
        self.mounts.insert(namespace, now);
        Ok(Some(found))
    }

    /// Fails if a question is about a mount that the list of a namespace leaves out. Kernels differ in the mount that they take for the
    /// namespace's root, and a process whose root is another one may see more. Returns whether there was time to see them all.
    fn refuse_hidden(
        &self,
        namespace: u64,
        search: &Search<'_>,
        stat: &mut Stat,
        end: Instant,
    ) -> Result<bool> {
        let in_sight = self.of(namespace);
        let Some(first) = in_sight.first() else { return Err(Error::from_raw_os_error(libc::ENOENT)) };
        let mut bottom = first.id;
        loop {
            match stat.parent(namespace, bottom)? {
                parent if parent == bottom => break,
                parent => bottom = parent,
            }
        }
        let listed = mounts(namespace, Some(bottom), end)?;
        for id in listed.ids {
            if in_sight.binary_search_by_key(&id, |mount| mount.id).is_ok() {
                continue;
            }
            if Instant::now() >= end {
                return Ok(false);
            }
            let entry = unless_gone(stat.entry(namespace, id))?;
            if entry.is_some_and(|entry| !search.asking(&entry).is_empty()) {
                return Err(hidden());
            }
        }
        Ok(!listed.is_cut)
    }

    fn of(&self, namespace: u64) -> &[KnownMount] {
        self.mounts.get(&namespace).map_or(&[], Vec::as_slice)
    }

    /// Returns whether the first mount that a process sees is in this namespace.
    fn has(&self, namespace: u64, first_id: u64) -> bool {
        self.of(namespace).iter().any(|mount| mount.old_id == first_id)
    }

    /// Returns the relations of all mounts' groups. `None`: there was no time for all.
    fn masters(&self, namespaces: &[u64], stat: &mut Stat, budget: &Budget) -> Result<Option<Masters>> {
        let mut masters = Masters::default();
        for &namespace in namespaces {
            for mount in self.of(namespace) {
                if budget.is_spent() {
                    return Ok(None);
                }
                if let Some(groups) = unless_gone(stat.groups(namespace, mount.id))? {
                    masters.add(groups);
                }
            }
        }
        Ok(Some(masters))
    }
}

/// The processes of plugins, whose namespaces some questions leave out.
#[derive(Default)]
struct Plugins(HashMap<u32, Option<u64>>);

impl Plugins {
    fn are_in(&mut self, namespace: u64, processes: &[u32], known: &Known) -> bool {
        let mut first = |process: &u32| *self.0.entry(*process).or_insert_with(|| first_id(*process));
        processes.iter().any(|process| first(process).is_some_and(|first| known.has(namespace, first)))
    }
}

/// Lists of namespaces that one search reads at most. A process may leave a namespace for a copy of it between a list and the search.
const LISTS: usize = 8;

/// Returns the answers in the order of the questions. `list` returns the id of csid's own namespace and those of the others. Fails if the
/// kernel lacks one of the calls, or hides a mount that counts.
pub(super) fn search(
    search: &mut Search<'_>,
    list: impl Fn() -> Result<(u64, Vec<u64>)>,
    known: &mut Known,
    budget: &Budget,
) -> Result<Vec<Vec<MountElsewhere>>> {
    let mut stat = Stat::new();
    let mut plugins = Plugins::default();
    let mut found: Vec<(u64, ForeignMount)> = Vec::new();
    let mut unsearched: Vec<u64> = Vec::new();
    let mut searched: BTreeSet<u64> = BTreeSet::new();
    let (_, mut new) = list()?;
    let mut lists = 1;
    // A search ends with a second list that shows no other namespace. One list may lack a namespace and its copy, which a process of it has
    // just made: the kernel's ids do not rise with time (Linux 6.18).
    let (own, others) = loop {
        let gone = in_namespaces(
            &new,
            search,
            known,
            budget,
            &mut stat,
            &mut plugins,
            (&mut found, &mut unsearched),
        )?;
        searched.extend(&new);
        let (own, others) = list()?;
        lists += 1;
        // Some kernels list nothing of a namespace with one mount, and answer that it is gone.
        if others.iter().any(|namespace| gone.contains(namespace)) {
            return Err(hidden());
        }
        known.retain(own, &others);
        new.clear();
        new.extend(others.iter().filter(|namespace| !searched.contains(namespace)));
        // Copies that go along with csid's own unmount are no answer yet. Only a namespace that is not searched is.
        if new.is_empty() || !unsearched.is_empty() || lists == LISTS {
            unsearched.append(&mut new);
            break (own, others);
        }
    };

    if found.is_empty() && unsearched.is_empty() {
        return Ok(search.answers([]));
    }
    if !found.is_empty() {
        // csid's own mounts say which copies its unmounts take along.
        let of_own = known.entries(own, search, &mut stat, budget.of_namespace())?;
        for entry in of_own.map(|found| found.entries).unwrap_or_default() {
            if entry.parent != entry.id
                && !search.asking(&entry).is_empty()
                && let Some(on) = unless_gone(stat.entry(own, entry.parent))?
            {
                search.note_own(&entry, &on);
            }
        }
        // A copy's master is csid's own group, mostly. Only a longer chain takes the groups of all mounts.
        found.retain(|(_, found)| !search.goes_along(found, &Masters::default()));
    }
    if !found.is_empty()
        && let Some(masters) = known.masters(&others, &mut stat, budget)?
    {
        found.retain(|(_, found)| !search.goes_along(found, &masters));
    }
    let wanted = found.iter().map(|(namespace, _)| *namespace).chain(unsearched.iter().copied());
    let holders = holders(wanted.collect(), known, TO_NAME)?;
    // The last process of a namespace may have left it for a copy of it, so a namespace that has ended since is an answer.
    let holder = |namespace: u64| holders.get(&namespace).copied().unwrap_or(Holder::Ended);
    let mut answers = search.answers(found.into_iter().map(|(namespace, mut found)| {
        found.copy.holder = holder(namespace);
        found
    }));
    for namespace in unsearched {
        for (answer, question) in answers.iter_mut().zip(search.questions) {
            if !plugins.are_in(namespace, &question.but_of, known) {
                answer.push(MountElsewhere::unsearched(holder(namespace)));
            }
        }
    }
    Ok(answers)
}

/// Searches these namespaces, and adds what is found, and the namespaces for which there was no time. Returns the namespaces that are gone
/// by the kernel's answer.
fn in_namespaces(
    namespaces: &[u64],
    search: &Search<'_>,
    known: &mut Known,
    budget: &Budget,
    stat: &mut Stat,
    plugins: &mut Plugins,
    (found, unsearched): (&mut Vec<(u64, ForeignMount)>, &mut Vec<u64>),
) -> Result<BTreeSet<u64>> {
    let mut gone: BTreeSet<u64> = BTreeSet::new();
    for &namespace in namespaces {
        // Even without time the first mounts are read, for the name of the namespace's process.
        if budget.is_spent() && unsearched.len() >= NAMED {
            unsearched.push(namespace);
            continue;
        }
        let end = budget.of_namespace();
        let Some(Entries { entries, unreadable, mut is_cut }) =
            known.entries(namespace, search, stat, end)?
        else {
            gone.insert(namespace);
            continue;
        };
        if !is_cut {
            match unless_gone(known.refuse_hidden(namespace, search, stat, end))? {
                Some(all_seen) => is_cut = !all_seen,
                None => drop(gone.insert(namespace)),
            }
        }
        for device in unreadable {
            let mut of = search.about(device);
            of.retain(|number| !plugins.are_in(namespace, &search.questions[*number].but_of, known));
            if !of.is_empty() {
                let copy = MountElsewhere::unsearched(Holder::Namespace(namespace));
                found.push((namespace, ForeignMount { copy, of, device, parent: None, is_parent: false }));
            }
        }
        for entry in entries {
            let mut of = search.asking(&entry);
            of.retain(|number| !plugins.are_in(namespace, &search.questions[*number].but_of, known));
            if of.is_empty() {
                continue;
            }
            let on = match entry.parent == entry.id {
                true => None,
                false => unless_gone(stat.entry(namespace, entry.parent))?,
            };
            let parent = on.and_then(|on| Some((on.groups, place_on(&entry, &on)?)));
            let below = unless_gone(mounts(namespace, Some(entry.id), end))?;
            let is_parent = below.is_some_and(|below| below.is_cut || !below.ids.is_empty());
            let copy = MountElsewhere {
                holder: Holder::Namespace(namespace),
                path: Some(entry.path),
                read_only: entry.read_only,
            };
            found.push((namespace, ForeignMount { copy, of, device: entry.device, parent, is_parent }));
            if Instant::now() >= end {
                is_cut = true;
                break;
            }
        }
        if is_cut {
            unsearched.push(namespace);
        }
    }
    Ok(gone)
}

/// The time to find processes of the namespaces that an answer names.
const TO_NAME: Duration = Duration::from_secs(2);

/// Returns what has each of the namespaces, by the namespace's id. A namespace that is gone has no entry. One whose process is not found
/// in `time` is its own holder.
pub(super) fn holders(
    mut wanted: BTreeSet<u64>,
    known: &Known,
    time: Duration,
) -> Result<BTreeMap<u64, Holder>> {
    let mut holders = BTreeMap::new();
    if wanted.is_empty() {
        return Ok(holders);
    }
    let of = |namespace: u64| known.of(namespace).iter().map(move |mount| (mount.old_id, namespace));
    let by_mount: HashMap<u64, u64> = wanted.iter().copied().flat_map(of).collect();
    let mut note = |process: u32, first: Option<u64>| {
        let namespace = first.and_then(|first| by_mount.get(&first));
        if let Some(namespace) = namespace.filter(|namespace| wanted.remove(namespace)) {
            holders.insert(*namespace, Holder::Process(process));
        }
        wanted.is_empty()
    };
    // The other threads of a process are mostly in its own namespace.
    // A holder that cannot be named as a process is named as a namespace.
    let all = processes().unwrap_or_default();
    // A user may have many processes and threads, and a name is not worth more time.
    let end = Instant::now() + time;
    let is_late = || Instant::now() >= end;
    let is_done = all.iter().any(|process| note(*process, first_id(*process)) || is_late());
    if !is_done {
        let mut threads = all.iter().flat_map(|process| threads(*process));
        threads.any(|(process, first)| note(process, first) || is_late());
    }
    if !wanted.is_empty() {
        let inodes = inodes(&wanted)?.into_iter();
        holders.extend(inodes.map(|(namespace, inode)| (namespace, Holder::Namespace(inode))));
    }
    Ok(holders)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::namespaces::{Question, Shown};
    use crate::host::statmount::namespaces;
    use crate::host::table;

    #[test]
    fn list_without_a_mount_in_question_is_refused() {
        let Ok((own, _)) = namespaces() else {
            eprintln!("skipped: the kernel does not list mount namespaces here");
            return;
        };
        let proc = table::entries().unwrap().into_iter().rfind(|entry| entry.path.ends_with("proc")).unwrap();
        let shown = Shown {
            device: proc.device,
            fs_type: proc.fs_type,
            root: proc.root,
            is_node: false,
            source: String::new(),
        };
        let questions = [Question { shown: vec![shown], but_of: vec![] }];
        let (search, mut known, mut stat) = (Search::new(&questions), Known::default(), Stat::new());
        let end = Instant::now() + Duration::from_secs(60);
        let found = known.entries(own, &search, &mut stat, end).unwrap().unwrap();
        assert!(!found.is_cut && !found.entries.is_empty());
        assert!(known.refuse_hidden(own, &search, &mut stat, end).unwrap());
        known.mounts.get_mut(&own).unwrap().retain(|mount| mount.device != proc.device);
        let refused = known.refuse_hidden(own, &search, &mut stat, end).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
    }
}
