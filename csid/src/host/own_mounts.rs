//! The mounts of csid's own namespace that may concern one volume, by `listmount` and `statmount`. To read the whole mountinfo costs as
//! much as all mounts of the host. A mount keeps its file system for life, so csid asks once for each mount, and again only for those that
//! a question may be about.
//!
//! The directory that a mount shows may be renamed. Many volumes may be directories of one file system, and then any of its mounts may
//! have come to show any of them. csid asks for each of a few such mounts. With more of them it reads mountinfo once for all questions of a
//! short while. So csid may overlook a bind whose directory came into the volume's one a moment ago, as it overlooks one that comes there a
//! moment later. A new bind is found at once. Questions that must not overlook one share the next read.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::hash::{BuildHasher, RandomState};
use std::io::{Error, ErrorKind, Result};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use crate::host::mount_index::{MountFacts, MountIndex};
use crate::host::namespaces::Shown;
use crate::host::statmount::{OWN, Stat, mounts, unless_gone};
use crate::host::table::{self, MountEntry, blocking};

/// Listing more mounts than this, or asking for more of them, is no work for a thread of the runtime.
const FEW: usize = 1_000;
/// Other mounts of the volume's file systems that are asked for one by one. To ask for more costs more than a read of mountinfo.
const OTHERS: usize = 16;
/// How long the directories that mountinfo showed are used: a multiple of the time that the read took, within these bounds.
const USES_OF_READ: u32 = 50;
const SHORTEST_USE: Duration = Duration::from_millis(50);
const LONGEST_USE: Duration = Duration::from_secs(1);
/// A list of the namespace is never cut.
const END: Duration = Duration::from_secs(60);

/// The paths in csid's own namespace where mounts of a volume are csid's.
pub struct OwnPaths<'a> {
    /// The paths of the volume's rows.
    pub exact: BTreeSet<&'a OsStr>,
    /// Those of them at which a mount is for certain.
    pub mounted: Vec<&'a OsStr>,
    /// Directories that only csid and the plugin mount in.
    pub below: Vec<&'a Path>,
    /// Whether directories that csid has read before do not answer the question.
    pub needs_read: bool,
}

/// The mounts of csid's own namespace as far as csid knows them.
#[derive(Default)]
pub(super) struct KnownMounts {
    known: Arc<Mutex<Known>>,
    /// The number of questions until now. A question has the number of those before it, plus one.
    asked: AtomicU64,
}

#[derive(Default)]
struct Known {
    answers: Answers,
    mounts: MountIndex,
    /// The last question that was asked before the last complete list of the mounts was begun.
    listed_for: u64,
    /// The last read of the directories of all mounts. `None`: they were never read.
    read: Option<RootsRead>,
    stat: Option<Stat>,
    hasher: RandomState,
}

/// Whether the two calls answer what mountinfo does.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Answers {
    #[default]
    Unproven,
    Proven,
    /// An older kernel, or a filter of system calls.
    Missing,
}

#[derive(Clone, Copy)]
struct RootsRead {
    /// The last question that was asked before the read was begun.
    read_for: u64,
    /// When csid reads again for another question.
    until: Instant,
}

impl KnownMounts {
    /// Returns the mounts at the volume's own paths, and all mounts of what these or `shown` show. `devices`: the numbers of file systems
    /// that the volume's mounts are known to have. `None`: only the whole mountinfo answers the question. That is so if one of the mounts is
    /// at a foreign path: whether it goes along with an unmount depends on all mounts.
    pub async fn about(
        &self,
        paths: &OwnPaths<'_>,
        devices: &[u64],
        shown: &[Shown],
    ) -> Option<Vec<MountEntry>> {
        let question = self.asked.fetch_add(1, Ordering::AcqRel) + 1;
        let mut known = Arc::clone(&self.known).lock_owned().await;
        // Questions that waited meanwhile share a list and a read.
        let newest = self.asked.load(Ordering::Acquire);
        if known.answers == Answers::Missing {
            return None;
        }
        let is_long = known.answers == Answers::Unproven || known.mounts.len() > FEW;
        let mut refreshed = match known.listed_for >= question {
            true => Ok(()),
            false if is_long => Err(long()),
            false => known.refresh(FEW, newest),
        };
        if refreshed.as_ref().is_err_and(|error| error.kind() == ErrorKind::WouldBlock) {
            let work = move || {
                let proven = if known.answers == Answers::Unproven { known.prove() } else { Ok(()) };
                Ok((proven.and_then(|()| known.refresh(usize::MAX, newest)), known))
            };
            (refreshed, known) = blocking(work).await.ok()?;
        }
        let mut found = refreshed.and_then(|()| known.about(paths, devices, shown, question, false));
        if found.as_ref().is_err_and(|error| error.kind() == ErrorKind::WouldBlock) {
            let work = move || Ok((known.read_roots(newest), known));
            let read;
            (read, known) = blocking(work).await.ok()?;
            found = read.and_then(|()| known.about(paths, devices, shown, question, true));
        }
        found.unwrap_or_else(|error| {
            tracing::debug!(%error, "csid reads its whole mount table");
            None
        })
    }
}

/// Returns the error for what takes too long on a thread of the runtime, and for directories that have to be read first.
fn long() -> Error {
    Error::from(ErrorKind::WouldBlock)
}

/// Returns whether the kernel does not have the calls, or a filter refuses them.
fn is_missing(error: &Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EINVAL))
}

fn is_too_long(error: &Error) -> bool {
    error.raw_os_error() == Some(libc::EOVERFLOW)
}

impl Known {
    /// Compares the calls' answers with mountinfo. A kernel that leaves something out is not asked again.
    fn prove(&mut self) -> Result<()> {
        let before = table::entries().map_err(Error::other)?;
        let answered = self.answered();
        let after: HashMap<u64, MountEntry> =
            table::entries().map_err(Error::other)?.into_iter().map(|entry| (entry.id, entry)).collect();
        let answered = match answered {
            Err(error) if !is_missing(&error) => return Err(error),
            answered => answered.unwrap_or_default(),
        };
        // What has changed meanwhile proves nothing.
        let mut still = before.iter().filter(|entry| after.get(&entry.id) == Some(entry));
        let is_answered = |entry: &MountEntry| {
            answered
                .get(&entry.id)
                .is_some_and(|answer| answer.as_ref().is_none_or(|answer| is_same(entry, answer)))
        };
        match still.find(|entry| !is_answered(entry)) {
            None => {
                self.answers = Answers::Proven;
                Ok(())
            }
            Some(entry) => {
                let mount = entry.path.display();
                tracing::info!(%mount, "the kernel's calls do not show each mount as mountinfo does");
                self.answers = Answers::Missing;
                Err(Error::from(ErrorKind::Unsupported))
            }
        }
    }

    /// Returns the answers for all mounts, by the ids in mountinfo. `None`: a mount's answer is too long.
    fn answered(&mut self) -> Result<HashMap<u64, Option<MountEntry>>> {
        let mut answered = HashMap::new();
        for id in mounts(OWN, None, Instant::now() + END)?.ids {
            match self.entry(id) {
                Err(error) if is_too_long(&error) => {
                    let (old_id, _) = self.stat().identity(OWN, id)?;
                    answered.insert(old_id, None);
                }
                entry => answered.extend(entry?.map(|entry| (entry.id, Some(entry)))),
            }
        }
        Ok(answered)
    }

    /// Lists the mounts, and asks for those that are new. Fails if the list is longer than `most`.
    /// `newest`: the last question that was asked before.
    fn refresh(&mut self, most: usize, newest: u64) -> Result<()> {
        let listed = mounts(OWN, None, Instant::now() + END)?;
        if listed.ids.len() > most {
            return Err(long());
        }
        let mut failed = None;
        for id in self.mounts.keep(&listed.ids) {
            match self.facts(id) {
                Ok(facts) => facts.into_iter().for_each(|facts| self.mounts.note(facts)),
                // The mounts that are known stay known.
                Err(error) => failed = Some(error),
            }
        }
        match failed {
            None => self.listed_for = newest,
            Some(error) => return Err(error),
        }
        Ok(())
    }

    /// Asks for a new mount. `None`: it is gone.
    fn facts(&mut self, id: u64) -> Result<Option<MountFacts>> {
        match self.entry(id) {
            Err(error) if is_too_long(&error) => {
                let (old_id, device) = self.stat().identity(OWN, id)?;
                Ok(Some(MountFacts { id, old_id, device, place: 0, root: Arc::from(Path::new("")) }))
            }
            Ok(Some(MountEntry { id: old_id, device, path, root, .. })) => {
                let place = self.hasher.hash_one(path.as_os_str());
                Ok(Some(MountFacts { id, old_id, device, place, root: Arc::from(root) }))
            }
            Ok(None) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads the directories of all known mounts from mountinfo. One read serves all questions until csid has used it for long enough.
    /// `newest`: the last question that was asked before.
    fn read_roots(&mut self, newest: u64) -> Result<()> {
        let begun = Instant::now();
        let text = table::text().map_err(Error::other)?;
        let asked = self.mounts.iter().filter(|facts| !facts.root.as_os_str().is_empty());
        let asked: HashMap<u64, MountFacts> = asked.map(|facts| (facts.old_id, facts.clone())).collect();
        for mount in table::briefs(&text) {
            // A mount that is gone may get what one shows that has its id now. csid asks before it believes.
            let Some(facts) = asked.get(&mount.id) else { continue };
            let Some((root, path)) = mount.root_and_path() else { continue };
            let place = self.hasher.hash_one(path.as_os_str());
            if (facts.place, facts.root.as_os_str()) != (place, root.as_os_str()) {
                self.mounts.note(MountFacts { place, root: Arc::from(&*root), ..facts.clone() });
            }
        }
        let used = (begun.elapsed() * USES_OF_READ).clamp(SHORTEST_USE, LONGEST_USE);
        self.read = Some(RootsRead { read_for: newest, until: begun + used });
        Ok(())
    }

    fn has_roots(&self) -> bool {
        self.read.is_some_and(|read| Instant::now() < read.until)
    }

    fn stat(&mut self) -> &mut Stat {
        self.stat.get_or_insert_with(Stat::new)
    }

    /// Returns a mount as it is now. `None`: it is gone.
    fn entry(&mut self, id: u64) -> Result<Option<MountEntry>> {
        unless_gone(self.stat().own_entry(id))
    }

    /// Answers as [`KnownMounts::about`] does the question of this number. Fails with `WouldBlock` if the directories of all mounts
    /// have to be read first. `has_read`: they were, since nothing else used them.
    fn about(
        &mut self,
        paths: &OwnPaths<'_>,
        devices: &[u64],
        shown: &[Shown],
        question: u64,
        has_read: bool,
    ) -> Result<Option<Vec<MountEntry>>> {
        let places: BTreeSet<u64> = paths.exact.iter().map(|path| self.hasher.hash_one(*path)).collect();
        let at_places: Vec<u64> = self.mounts.at(&places).take(FEW + 1).collect();
        if at_places.len() > FEW {
            return Ok(None);
        }
        let mut found: BTreeMap<u64, MountEntry> = BTreeMap::new();
        for id in at_places {
            // What has taken its place meanwhile is not in the list.
            let Some(entry) = self.entry(id)? else { return Ok(None) };
            found.insert(id, entry);
        }
        let is_at_own = |entry: &&MountEntry| paths.exact.contains(entry.path.as_os_str());
        let known = devices.iter().copied().chain(shown.iter().map(|shown| shown.device));
        let of_volume: BTreeSet<u64> =
            found.values().filter(is_at_own).map(|entry| entry.device).chain(known).collect();
        let own = found.values().filter(is_at_own).map(|own| (own.device, own.root.as_path()));
        let roots: BTreeSet<(u64, &Path)> =
            own.chain(shown.iter().map(|shown| (shown.device, shown.root.as_path()))).collect();
        let is_other = |id: &u64| !found.contains_key(id);
        let others = of_volume.iter().flat_map(|device| self.mounts.of_device(*device));
        let mut others: BTreeSet<u64> = others.filter(is_other).take(OTHERS + 1).collect();
        if others.len() > OTHERS {
            let is_renamed = |(id, now): (&u64, &MountEntry)| {
                let known = self.mounts.get(*id).filter(|facts| !facts.root.as_os_str().is_empty());
                known.is_some_and(|facts| *facts.root != *now.root)
            };
            let is_read_since = self.read.is_some_and(|read| read.read_for >= question);
            // The volume's directory may have been renamed after a read that another question has made.
            let is_known =
                (is_read_since || (!paths.needs_read && self.has_roots())) && !found.iter().any(is_renamed);
            if !has_read && !is_known {
                return Err(long());
            }
            let shows = roots.iter().flat_map(|(device, root)| self.mounts.may_show(*device, root));
            others = shows.filter(is_other).take(OTHERS + 1).collect();
            if others.len() > OTHERS {
                return Ok(None);
            }
        }
        let may_show = |id: &u64| {
            let facts = self.mounts.get(*id);
            facts.is_some_and(|facts| roots.iter().any(|(device, root)| facts.may_show(*device, root)))
        };
        let others: Vec<(u64, bool)> = others.into_iter().map(|id| (id, may_show(&id))).collect();
        for (id, may_show) in others {
            match self.entry(id)? {
                Some(entry) => drop(found.insert(id, entry)),
                // A bind of the volume may have taken its place meanwhile.
                None if may_show => return Ok(None),
                None => {}
            }
        }
        // A mount that was moved is not where csid first saw it.
        let is_found = |path: &&OsStr| found.values().any(|entry| entry.path.as_os_str() == *path);
        if !paths.mounted.iter().all(is_found) {
            return Ok(None);
        }
        let is_shown = |entry: &MountEntry| {
            let own = found.values().filter(is_at_own).map(|own| (own.device, own.root.as_path()));
            let mut all = own.chain(shown.iter().map(|shown| (shown.device, shown.root.as_path())));
            all.any(|(device, root)| entry.device == device && entry.root.starts_with(root))
        };
        let of_it: BTreeSet<u64> =
            found.iter().filter(|(_, entry)| is_shown(entry)).map(|(id, _)| *id).collect();
        found.retain(|id, _| of_it.contains(id));
        let has_foreign = found.values().any(|entry| !paths.have(entry.path.as_os_str()));
        Ok((!has_foreign).then(|| found.into_values().collect()))
    }
}

/// Returns whether the calls' answer is what mountinfo shows. The groups are not compared: nobody reads them of such an answer.
fn is_same(shown: &MountEntry, answer: &MountEntry) -> bool {
    let MountEntry { id, parent, device, root, path, fs_type, source, read_only, groups: _ } = answer;
    (shown.id, shown.parent, shown.device, shown.read_only) == (*id, *parent, *device, *read_only)
        && (&shown.root, &shown.path, &shown.fs_type, &shown.source) == (root, path, fs_type, source)
}

impl OwnPaths<'_> {
    /// Returns whether a mount at this path is csid's or the plugin's.
    pub(super) fn have(&self, path: &OsStr) -> bool {
        self.exact.contains(path) || self.below.iter().any(|above| Path::new(path).starts_with(above))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::path::PathBuf;

    use rustix::mount::{
        MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, mount_move, unmount,
    };

    use super::*;

    /// The numbers of a question before the last list and read, and of a later one.
    const BEFORE: u64 = 1;
    const LATER: u64 = 2;

    /// Runs `test` in a mount namespace of its own, with two file systems: one at `a`, and one at `b` with a bind of its directory `x`
    /// at `c`. Not where the kernel lacks the calls.
    fn apart(test: impl FnOnce(&Path, &mut Known) + Send) {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let run = || {
            // SAFETY: only this thread, which ends with the test, is in the new namespace.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }.unwrap();
            mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
            for name in ["a", "b"] {
                std::fs::create_dir(root.join(name)).unwrap();
                mount("tmpfs", root.join(name), "tmpfs", MountFlags::empty(), None).unwrap();
            }
            for name in ["b/x", "b/y", "c", "d"] {
                std::fs::create_dir(root.join(name)).unwrap();
            }
            mount_bind(root.join("b/x"), root.join("c")).unwrap();
            let mut known = Known::default();
            match known.prove() {
                Ok(()) => test(root, &mut known),
                Err(error) => eprintln!("skipped: the kernel does not show each mount by its calls: {error}"),
            }
        };
        std::thread::scope(|scope| scope.spawn(run).join().unwrap());
    }

    fn at_paths<'a>(at: &[&'a Path]) -> OwnPaths<'a> {
        let exact = at.iter().map(|path| path.as_os_str()).collect();
        OwnPaths { exact, mounted: vec![], below: vec![], needs_read: false }
    }

    /// Asks for the volume that is mounted at these paths.
    fn ask(known: &mut Known, at: &[&Path], mounted: &[&Path], shown: &[Shown]) -> Option<Vec<PathBuf>> {
        known.refresh(usize::MAX, BEFORE).unwrap();
        let mounted = mounted.iter().map(|path| path.as_os_str()).collect();
        let paths = OwnPaths { mounted, ..at_paths(at) };
        let found = known.about(&paths, &[], shown, LATER, false).unwrap()?;
        let all = table::entries().unwrap();
        for entry in &found {
            assert!(all.iter().any(|one| is_same(one, entry)), "mountinfo shows another one: {entry:?}");
        }
        Some(found.into_iter().map(|entry| entry.path).collect())
    }

    #[test]
    fn mounts_of_the_volume_are_found_alone() {
        apart(|root, known| {
            let [a, b, c] = ["a", "b", "c"].map(|name| root.join(name));
            assert_eq!(ask(known, &[&a], &[&a], &[]), Some(vec![a.clone()]));
            assert_eq!(ask(known, &[&b, &c], &[&b, &c], &[]), Some(vec![b.clone(), c.clone()]));
            assert_eq!(ask(known, &[&c], &[&c], &[]), Some(vec![c]), "the whole is no part of it");
            assert_eq!(ask(known, &[&b], &[&b], &[]), None, "the bind is at a foreign path");
            assert_eq!(ask(known, &[Path::new("/nowhere")], &[], &[]), Some(vec![]));
        });
    }

    /// Makes more mounts of the second file system than csid asks for one by one.
    fn crowd(root: &Path) {
        for number in 0..=OTHERS {
            let [from, to] = ["b", "crowd"].map(|name| root.join(format!("{name}/{number}")));
            std::fs::create_dir_all(&from).unwrap();
            std::fs::create_dir_all(&to).unwrap();
            mount_bind(from, to).unwrap();
        }
    }

    /// Returns whether csid has to read all directories before it knows the mounts at `at`.
    fn reads_first(known: &mut Known, at: &Path) -> bool {
        known.refresh(usize::MAX, BEFORE).unwrap();
        let answer = known.about(&at_paths(&[at]), &[], &[], LATER, false);
        answer.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    }

    fn use_until(known: &mut Known, until: Instant) {
        known.read.as_mut().unwrap().until = until;
    }

    /// Reads all directories, and uses them for longer than the test takes.
    fn read(known: &mut Known) {
        known.refresh(usize::MAX, BEFORE).unwrap();
        known.read_roots(BEFORE).unwrap();
        use_until(known, Instant::now() + END);
    }

    #[test]
    fn new_bind_among_many_mounts_is_found_at_once() {
        apart(|root, known| {
            crowd(root);
            let [b, c, d] = ["b", "c", "d"].map(|name| root.join(name));
            assert!(reads_first(known, &c));
            read(known);
            assert_eq!(ask(known, &[&c], &[&c], &[]), Some(vec![c.clone()]), "none of the others");
            std::fs::create_dir(b.join("x/inside")).unwrap();
            mount_bind(b.join("x/inside"), &d).unwrap();
            assert_eq!(ask(known, &[&c], &[&c], &[]), None, "a bind of it is at a foreign path");
            assert_eq!(ask(known, &[&c, &d], &[&c, &d], &[]), Some(vec![c, d.clone()]));
            // Of the whole file system each mount is a part.
            let all = OwnPaths { below: vec![root], ..at_paths(&[&b]) };
            assert!(known.about(&all, &[], &[], LATER, false).unwrap().is_none(), "too many to ask for each");
            for number in 0..4 {
                unmount(root.join(format!("crowd/{number}")), UnmountFlags::empty()).unwrap();
            }
            known.refresh(usize::MAX, BEFORE).unwrap();
            let found = known.about(&all, &[], &[], LATER, false).unwrap().expect("few enough");
            assert_eq!(found.len(), 3 + OTHERS + 1 - 4, "{found:?}");
        });
    }

    #[test]
    fn rename_among_many_mounts_is_found_by_the_next_read() {
        apart(|root, known| {
            crowd(root);
            let [b, c] = ["b", "c"].map(|name| root.join(name));
            read(known);
            // A directory that another mount shows comes into the volume's one.
            std::fs::rename(b.join("0"), b.join("x/0")).unwrap();
            assert_eq!(ask(known, &[&c], &[&c], &[]), Some(vec![c.clone()]), "csid uses what it has read");
            let fresh = OwnPaths { needs_read: true, ..at_paths(&[&c]) };
            assert!(known.about(&fresh, &[], &[], LATER, false).is_err(), "this question does not");
            use_until(known, Instant::now());
            assert!(reads_first(known, &c), "csid has used it for long enough");
            read(known);
            let answer = known.about(&fresh, &[], &[], BEFORE, false).unwrap();
            assert!(answer.is_none(), "the bind is at a foreign path");
            assert!(
                known.about(&fresh, &[], &[], LATER, false).is_err(),
                "a later question needs another read"
            );
            assert_eq!(ask(known, &[&c], &[&c], &[]), None, "the bind is at a foreign path");
            // The volume's own directory is renamed: what is known of the others may be older.
            std::fs::rename(b.join("x"), b.join("z")).unwrap();
            assert!(reads_first(known, &c));
            assert!(
                known.about(&fresh, &[], &[], BEFORE, false).is_err(),
                "another question's read is older"
            );
            read(known);
            assert!(!reads_first(known, &c));
        });
    }

    #[test]
    fn questions_that_wait_share_a_list() {
        apart(|root, known| {
            let known =
                KnownMounts { known: Arc::new(Mutex::new(std::mem::take(known))), asked: AtomicU64::new(0) };
            let [b, c, d] = ["b", "c", "d"].map(|name| root.join(name));
            let paths = at_paths(&[&c]);
            let ask = async || known.about(&paths, &[], &[]).await.map(|found| found.len());
            let questions = async {
                let busy = known.known.lock().await;
                let (mut first, mut second) = (Box::pin(ask()), Box::pin(ask()));
                assert!(futures_util::poll!(&mut first).is_pending());
                assert!(futures_util::poll!(&mut second).is_pending());
                drop(busy);
                assert_eq!(first.await, Some(1));
                mount_bind(b.join("x"), &d).unwrap();
                assert_eq!(second.await, Some(1), "the bind came after the question");
                assert_eq!(ask().await, None, "the bind is at a foreign path");
            };
            tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(questions);
        });
    }

    #[test]
    fn bind_gone_since_the_list_needs_the_whole_table() {
        apart(|root, known| {
            let [b, c, d] = ["b", "c", "d"].map(|name| root.join(name));
            for crowded in [false, true] {
                if crowded {
                    crowd(root);
                }
                mount_bind(b.join("x"), &d).unwrap();
                read(known);
                unmount(&d, UnmountFlags::empty()).unwrap();
                // Another bind may have come before this one went.
                assert!(known.about(&at_paths(&[&c]), &[], &[], LATER, false).unwrap().is_none());
                assert_eq!(
                    ask(known, &[&c], &[&c], &[]),
                    Some(vec![c.clone()]),
                    "it is not in the next list"
                );
            }
        });
    }

    #[test]
    fn bind_of_a_renamed_directory_is_found() {
        apart(|root, known| {
            let [b, c, d] = ["b", "c", "d"].map(|name| root.join(name));
            mount_bind(b.join("x"), &d).unwrap();
            assert_eq!(ask(known, &[&c, &d], &[&c, &d], &[]).unwrap().len(), 2);
            std::fs::rename(b.join("x"), b.join("z")).unwrap();
            assert_eq!(ask(known, &[&c], &[&c], &[]), None, "another bind is at a foreign path");
            assert_eq!(ask(known, &[&c, &d], &[&c, &d], &[]).unwrap().len(), 2);
            // A directory comes into the volume's one.
            mount_bind(b.join("y"), root.join("a")).unwrap();
            assert_eq!(ask(known, &[&c, &d], &[&c, &d], &[]).unwrap().len(), 2);
            std::fs::rename(b.join("y"), b.join("z/y")).unwrap();
            assert_eq!(ask(known, &[&c, &d], &[&c, &d], &[]), None);
        });
    }

    #[test]
    fn moved_mount_needs_the_whole_table() {
        apart(|root, known| {
            let [a, d] = ["a", "d"].map(|name| root.join(name));
            assert_eq!(ask(known, &[&a], &[&a], &[]), Some(vec![a.clone()]));
            mount_move(&a, &d).unwrap();
            assert_eq!(ask(known, &[&d], &[&d], &[]), None);
            unmount(&d, UnmountFlags::empty()).unwrap();
            assert_eq!(ask(known, &[&d], &[], &[]), Some(vec![]));
        });
    }

    #[test]
    fn mount_at_a_long_path_keeps_the_others_known() {
        apart(|root, known| {
            let a = root.join("a");
            // Longer than a path may be in one call.
            let below = ["n".repeat(255).as_str()].repeat(14).join("/");
            let mut directory = std::fs::File::open(&a).unwrap();
            for _ in 0..4 {
                let link = format!("/proc/self/fd/{}/{below}", directory.as_raw_fd());
                std::fs::create_dir_all(&link).unwrap();
                directory = std::fs::File::open(&link).unwrap();
            }
            mount_bind(root.join("c"), format!("/proc/self/fd/{}", directory.as_raw_fd())).unwrap();
            drop(directory);
            known.refresh(usize::MAX, BEFORE).unwrap();
            let facts = known.mounts.len();
            assert_eq!(ask(known, &[&a], &[&a], &[]), Some(vec![a.clone()]));
            assert_eq!(known.mounts.len(), facts);
            // It may be of this volume, and only mountinfo has its path.
            let c = root.join("c");
            let found = known.about(&at_paths(&[&c]), &[], &[], LATER, false);
            assert!(is_too_long(&found.unwrap_err()));
        });
    }
}
