//! The mounts of csid's own namespace that may concern one volume, by `listmount` and `statmount`. To read the whole mountinfo costs as
//! much as all mounts of the host. A mount keeps its file system for life, so csid asks once for each mount, and again only for those that
//! a question may be about.
//!
//! The directory that a mount shows may be renamed. Many volumes may be directories of one file system, and then any of its mounts may
//! have come to show any of them. csid asks for each of a few such mounts. With more of them it reads mountinfo once for all questions of a
//! short while. So csid may overlook a bind whose directory came into the volume's one a moment ago, as it overlooks one that comes there a
//! moment later. A new bind is found at once. Questions that must not overlook one share the next read.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::io::{Error, ErrorKind, Result};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Mutex;

use crate::host::mount_changes::MountChanges;
use crate::host::mount_index::{MountFacts, MountIndex};
use crate::host::namespaces::Shown;
use crate::host::own_paths::{OwnPath, OwnPaths, live_of};
use crate::host::statmount::{OWN, Stat, mounts, unless_gone};
use crate::host::table::{self, MountEntry, blocking};
use crate::store::volume_handle::directory_of;

/// Listing more mounts than this, or asking for more of them, is no work for a thread of the runtime.
const FEW: usize = 1_000;
/// Other mounts of the volume's file systems that are asked for one by one. To ask for more costs more than a read of mountinfo.
const OTHERS: usize = 16;
/// Mounts in a volume's own directories that are asked for again on a thread of the runtime.
const OF_VOLUME: usize = 256;
/// How long the directories that mountinfo showed are used: a multiple of the time that the read took, within these bounds.
const USES_OF_READ: u32 = 50;
const SHORTEST_USE: Duration = Duration::from_millis(50);
const LONGEST_USE: Duration = Duration::from_secs(1);
/// A list of the namespace is never cut.
const END: Duration = Duration::from_secs(60);

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
    /// The last question that was asked before the last complete list of the mounts was begun, or while it was still right.
    listed_for: u64,
    /// Whether the mounts were listed. False: the last list failed, or there was none.
    is_listed: bool,
    changes: MountChanges,
    /// The mounts below csid's tmpfs since that list.
    below: ListedBelow,
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

/// The mounts below some tmpfs of csid's.
#[derive(Default)]
struct ListedBelow {
    /// The places of the tmpfs. Empty: no question needed the mounts below any.
    lives: BTreeSet<u64>,
    /// The ids of the tmpfs' own mounts. Empty: one of the places has none or several, so there is no such list.
    tops: Vec<u64>,
    /// In ascending order.
    ids: Vec<u64>,
}

/// The mounts that csid has asked for to answer a question.
#[derive(Default)]
struct Asked {
    /// By their ids. `true`: it is at a path of one of the volume's rows.
    found: BTreeMap<u64, (MountEntry, bool)>,
    /// The ids and file systems of all mounts that csid has not asked for, and that are not below csid's tmpfs or have a path that is too
    /// long. `None`: all mounts that csid has not asked for may be foreign.
    apart: Option<Vec<(u64, u64)>>,
}

/// Mounts in the volume's directories that show the same directory of a file system.
struct Alike {
    device: u64,
    root: Arc<Path>,
    /// The first ones.
    ids: Vec<u64>,
}

/// The known mounts as a question about one row needs them.
#[derive(Default)]
struct Partition {
    /// Those that csid asks for: at the row's paths, or moved to csid's tmpfs.
    ids: Vec<u64>,
    /// As of [`Asked`].
    apart: Vec<(u64, u64)>,
    /// Those in the volume's directories that are at other rows' paths.
    alike: Vec<Alike>,
}

#[derive(Clone, Copy)]
struct RootsRead {
    /// The last question that was asked before the read was begun.
    read_for: u64,
    /// When csid reads again for another question.
    until: Instant,
}

impl KnownMounts {
    /// Returns the mounts at the volume's own paths, and all mounts of what these or `shown` show. Of the paths of rows that nobody asks
    /// about, one of those that show the same directory stands for the others. `None`: only the whole mountinfo answers the question. That
    /// is so if one of the mounts is at a foreign path: whether it goes along with an unmount depends on all mounts.
    pub async fn about(&self, paths: &OwnPaths<'_>, shown: &[Shown]) -> Option<Vec<MountEntry>> {
        let question = self.asked.fetch_add(1, Ordering::AcqRel) + 1;
        let mut known = Arc::clone(&self.known).lock_owned().await;
        // Questions that waited meanwhile share a list and a read.
        let newest = self.asked.load(Ordering::Acquire);
        if known.answers == Answers::Missing {
            return None;
        }
        let is_long = known.answers == Answers::Unproven || known.mounts.len() > FEW;
        let lives: BTreeSet<u64> = paths.lives().into_iter().map(|live| known.place_of(live)).collect();
        if known.listed_for < question && known.is_unchanged() {
            known.listed_for = newest;
        }
        let is_listed = known.listed_for >= question && known.has_listed_below(&lives);
        let mut refreshed = match is_listed {
            true => Ok(()),
            false if is_long => Err(long()),
            false => known.list(FEW, question, newest, &lives),
        };
        if refreshed.as_ref().is_err_and(|error| error.kind() == ErrorKind::WouldBlock) {
            let work = move || {
                let proven = if known.answers == Answers::Unproven { known.prove() } else { Ok(()) };
                Ok((proven.and_then(|()| known.list(usize::MAX, question, newest, &lives)), known))
            };
            (refreshed, known) = blocking(work).await.ok()?;
        }
        let mut found = refreshed.and_then(|()| known.about(paths, shown, question, false));
        if found.as_ref().is_err_and(|error| error.kind() == ErrorKind::WouldBlock) {
            let work = move || Ok((known.read_roots(newest), known));
            let read;
            (read, known) = blocking(work).await.ok()?;
            found = read.and_then(|()| known.about(paths, shown, question, true));
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

    /// Lists the mounts, and those below the tmpfs at the places `lives`, unless csid has done so since it was asked the question.
    /// `most`, `newest`: as of [`Known::refresh`].
    fn list(&mut self, most: usize, question: u64, newest: u64, lives: &BTreeSet<u64>) -> Result<()> {
        if self.listed_for < question {
            self.refresh(most, newest)?;
        }
        if self.has_listed_below(lives) { Ok(()) } else { self.list_below(lives) }
    }

    /// Returns whether the mounts are those of the last list.
    fn is_unchanged(&mut self) -> bool {
        self.is_listed = self.is_listed && !self.changes.have_come();
        self.is_listed
    }

    /// Lists the mounts, and asks for those that are new. Fails if the list is longer than `most`.
    /// `newest`: the last question that was asked before.
    fn refresh(&mut self, most: usize, newest: u64) -> Result<()> {
        self.below = ListedBelow::default();
        self.is_listed = false;
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
        if let Some(error) = failed {
            return Err(error);
        }
        self.listed_for = newest;
        self.is_listed = !listed.is_cut;
        Ok(())
    }

    /// Returns whether the mounts below the tmpfs at these places, if there are any, are listed.
    fn has_listed_below(&self, lives: &BTreeSet<u64>) -> bool {
        lives.is_empty() || self.below.lives == *lives
    }

    /// Lists the mounts below the tmpfs at these places. A place without exactly one mount has no such list.
    fn list_below(&mut self, lives: &BTreeSet<u64>) -> Result<()> {
        let (mut tops, mut ids) = (Vec::new(), Vec::new());
        for live in lives {
            let place = BTreeSet::from([*live]);
            let mut at = self.mounts.at(&place);
            let (Some(top), None) = (at.next(), at.next()) else {
                tops.clear();
                break;
            };
            tops.push(top);
        }
        for top in &tops {
            ids.extend(mounts(OWN, Some(*top), Instant::now() + END)?.ids);
        }
        ids.sort_unstable();
        self.below = ListedBelow { lives: lives.clone(), tops, ids };
        Ok(())
    }

    /// Asks for a new mount. `None`: it is gone.
    fn facts(&mut self, id: u64) -> Result<Option<MountFacts>> {
        match self.entry(id) {
            Err(error) if is_too_long(&error) => {
                let (old_id, device) = self.stat().identity(OWN, id)?;
                let root = Arc::from(Path::new(""));
                Ok(Some(MountFacts { id, old_id, device, place: 0, home: 0, live: 0, root }))
            }
            Ok(Some(entry)) => {
                let (place, (home, live)) = (self.place_of(&entry.path), self.home_of(&entry.path));
                let (old_id, device, root) = (entry.id, entry.device, Arc::from(&*entry.root));
                Ok(Some(MountFacts { id, old_id, device, place, home, live, root }))
            }
            Ok(None) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the hash of a mount's path.
    fn place_of(&self, path: &Path) -> u64 {
        self.hasher.hash_one(path.as_os_str())
    }

    /// Returns the hashes of the volume's directory that the path is in, and of the tmpfs that this one would be below. 0: it is in none.
    fn home_of(&self, path: &Path) -> (u64, u64) {
        let place_of = |path: Option<&Path>| path.map_or(0, |path| self.place_of(path));
        let home = directory_of(path);
        (place_of(home), place_of(home.and_then(live_of)))
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
            let place = self.place_of(&path);
            if (facts.place, facts.root.as_os_str()) != (place, root.as_os_str()) {
                let (home, live) = self.home_of(&path);
                self.mounts.note(MountFacts { place, home, live, root: Arc::from(&*root), ..facts.clone() });
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

    /// Asks for the mount at each of the volume's own paths. `None`: only the whole mountinfo answers.
    fn ask_each(&mut self, paths: &OwnPaths<'_>) -> Result<Option<Asked>> {
        let places: BTreeSet<u64> = paths.exact.iter().map(|own| self.hasher.hash_one(own.path)).collect();
        let at_places: Vec<u64> = self.mounts.at(&places).take(FEW + 1).collect();
        let mut asked = Asked::default();
        let is_whole = self.ask(at_places, paths, &mut asked)?;
        Ok(is_whole.then_some(asked))
    }

    /// Asks for these mounts. Returns false if they are too many, or if one is gone: what has taken its place meanwhile is not in the list.
    fn ask(&mut self, ids: Vec<u64>, paths: &OwnPaths<'_>, asked: &mut Asked) -> Result<bool> {
        if ids.len() > FEW {
            return Ok(false);
        }
        let are_many = ids.len() > OTHERS;
        for id in ids {
            let Some(entry) = self.entry(id)? else { return Ok(false) };
            let path = entry.path.as_os_str();
            let is_own = if are_many { paths.sorted().contains(path) } else { paths.have_exactly(path) };
            asked.found.insert(id, (entry, is_own));
        }
        Ok(true)
    }

    /// Asks for the mounts of the row in question, and for one mount of each directory that the other rows' mounts show. `None`: only the
    /// whole mountinfo answers. `has_read`: the directories of all mounts were just read. `is_read`: they were, since the question was
    /// asked.
    ///
    /// A rename of a directory changes what all its mounts show, so csid compares one of them. Two directories may have had the same name,
    /// one after the other. Only a look at all their mounts shows these as two.
    ///
    /// Only csid and the plugin mount below csid's tmpfs, so none of the mounts there is foreign. A mount that root has moved from there may
    /// be, as any other mount of the host. csid asks for one that came there. A mount that root has moved from one row's path to another's
    /// counts where it was, also if that row is of another volume, until a question is about that row.
    fn ask_some(&mut self, paths: &OwnPaths<'_>, is_read: bool, has_read: bool) -> Result<Option<Asked>> {
        if self.below.tops.is_empty() {
            return self.ask_each(paths);
        }
        let below = std::mem::take(&mut self.below);
        let asked = self.ask_below(&below, paths, is_read, has_read);
        self.below = below;
        asked
    }

    /// Divides the known mounts for a question. `places`: of the row in question. `homes`: of the volume's directories.
    fn partition(&self, below: &ListedBelow, places: &BTreeSet<u64>, homes: &[u64]) -> Partition {
        let mut listed = below.ids.iter().copied().peekable();
        let mut parts = Partition::default();
        for facts in self.mounts.iter() {
            while listed.next_if(|id| *id < facts.id).is_some() {}
            let is_below = listed.next_if_eq(&facts.id).is_some();
            let has_come = is_below && !below.lives.contains(&facts.live);
            let is_too_long = facts.place == 0;
            if places.contains(&facts.place) || (has_come && !is_too_long) {
                parts.ids.push(facts.id);
            } else if !is_below || is_too_long {
                parts.apart.push((facts.id, facts.device));
            } else if homes.contains(&facts.home) {
                let is_like = |of: &&mut Alike| of.device == facts.device && of.root == facts.root;
                match parts.alike.iter_mut().rev().find(is_like) {
                    Some(of) if of.ids.len() < OTHERS => of.ids.push(facts.id),
                    Some(_) => {}
                    None => parts.alike.push(Alike {
                        device: facts.device,
                        root: Arc::clone(&facts.root),
                        ids: vec![facts.id],
                    }),
                }
            }
        }
        parts
    }

    /// Asks again for all known mounts in the volume's directories at the places `homes`. Fails with `WouldBlock` if they are many.
    fn see_again(&mut self, homes: &[u64]) -> Result<()> {
        let at_home = self.mounts.iter().filter(|facts| homes.contains(&facts.home));
        let ids: Vec<u64> = at_home.map(|facts| facts.id).take(OF_VOLUME + 1).collect();
        if ids.len() > OF_VOLUME {
            return Err(long());
        }
        for id in ids {
            let stat = self.stat.get_or_insert_with(Stat::new);
            let is_as_known = match (stat.own_root_and_path(id), self.mounts.get(id)) {
                (Ok((root, path)), Some(known)) => {
                    known.root.as_os_str() == root && known.place == self.hasher.hash_one(path.as_os_str())
                }
                // `facts` fails in the same way.
                _ => false,
            };
            if is_as_known {
                continue;
            }
            // The volume's directory may have been renamed, and what the last read showed of other mounts is then older.
            self.read = None;
            // One that is gone is missed when csid asks for it.
            if let Some(facts) = self.facts(id)? {
                self.mounts.note(facts);
            }
        }
        Ok(())
    }

    fn ask_below(
        &mut self,
        below: &ListedBelow,
        paths: &OwnPaths<'_>,
        is_read: bool,
        has_read: bool,
    ) -> Result<Option<Asked>> {
        for top in &below.tops {
            let is_there = self.entry(*top)?.is_some_and(|entry| paths.lives().contains(&*entry.path));
            if !is_there {
                return Ok(None);
            }
        }
        let row = paths.asked.iter().map(|own| own.path);
        let places: BTreeSet<u64> =
            row.chain(paths.apart.iter().copied()).map(|path| self.hasher.hash_one(path)).collect();
        let homes: Vec<u64> = paths.homes.iter().map(|home| self.place_of(home)).collect();
        let mut parts = self.partition(below, &places, &homes);
        let are_few = parts.alike.len() <= OTHERS;
        if are_few && paths.needs_read && !is_read && parts.alike.iter().any(|of| of.ids.len() > 1) {
            self.see_again(&homes)?;
            parts = self.partition(below, &places, &homes);
        }
        let Partition { ids, apart, alike } = parts;
        if alike.len() > OTHERS {
            return self.ask_each(paths);
        }
        let mut asked = Asked { apart: Some(apart), ..Asked::default() };
        if !self.ask(ids, paths, &mut asked)? {
            return Ok(None);
        }
        for of in alike {
            let is_cut = of.ids.len() == OTHERS;
            let mut is_own = false;
            for id in of.ids {
                let Some(entry) = self.entry(id)? else { return Ok(None) };
                if entry.root != *of.root {
                    return if has_read { Ok(None) } else { Err(long()) };
                }
                // A mount that a lost row has left there is none of a row.
                is_own = paths.have_exactly(entry.path.as_os_str());
                if is_own {
                    asked.found.insert(id, (entry, true));
                    break;
                }
            }
            if is_cut && !is_own {
                return Ok(None);
            }
        }
        Ok(Some(asked))
    }

    /// Answers as [`KnownMounts::about`] does the question of this number. Fails with `WouldBlock` if the directories of all mounts
    /// have to be read first. `has_read`: they were, since nothing else used them.
    fn about(
        &mut self,
        paths: &OwnPaths<'_>,
        shown: &[Shown],
        question: u64,
        has_read: bool,
    ) -> Result<Option<Vec<MountEntry>>> {
        let is_read_since = has_read || self.read.is_some_and(|read| read.read_for >= question);
        let asked = match paths.homes.is_empty() {
            true => self.ask_each(paths)?,
            false => self.ask_some(paths, is_read_since, has_read)?,
        };
        let Some(Asked { mut found, apart }) = asked else { return Ok(None) };
        let own = found.values().filter(|(_, is_own)| *is_own).map(|(entry, _)| entry);
        let known = paths.devices.iter().copied().chain(shown.iter().map(|shown| shown.device));
        let of_volume: BTreeSet<u64> = own.clone().map(|entry| entry.device).chain(known).collect();
        let own = own.map(|own| (own.device, own.root.as_path()));
        let roots: BTreeSet<(u64, &Path)> =
            own.chain(shown.iter().map(|shown| (shown.device, shown.root.as_path()))).collect();
        let may_show_it =
            |facts: &MountFacts| roots.iter().any(|(device, root)| facts.may_show(*device, root));
        let is_other = |id: &u64| !found.contains_key(id);
        let mut others: BTreeSet<u64> = match &apart {
            None => {
                let of_it = of_volume.iter().flat_map(|device| self.mounts.of_device(*device));
                of_it.filter(is_other).take(OTHERS + 1).collect()
            }
            Some(apart) => {
                let of_it = apart.iter().filter(|(_, device)| of_volume.contains(device));
                of_it.map(|(id, _)| *id).take(OTHERS + 1).collect()
            }
        };
        if others.len() > OTHERS {
            let is_renamed = |(id, (now, _)): (&u64, &(MountEntry, bool))| {
                let known = self.mounts.get(*id).filter(|facts| !facts.root.as_os_str().is_empty());
                known.is_some_and(|facts| *facts.root != *now.root)
            };
            // The volume's directory may have been renamed after a read that another question has made.
            let is_known =
                (is_read_since || (!paths.needs_read && self.has_roots())) && !found.iter().any(is_renamed);
            if !has_read && !is_known {
                return Err(long());
            }
            others = match &apart {
                None => {
                    let shows = roots.iter().flat_map(|(device, root)| self.mounts.may_show(*device, root));
                    shows.filter(is_other).take(OTHERS + 1).collect()
                }
                Some(apart) => {
                    let shows = apart.iter().filter(|(id, _)| self.mounts.get(*id).is_some_and(may_show_it));
                    shows.map(|(id, _)| *id).take(OTHERS + 1).collect()
                }
            };
            if others.len() > OTHERS {
                return Ok(None);
            }
        }
        let may_show = |id: &u64| self.mounts.get(*id).is_some_and(may_show_it);
        let others: Vec<(u64, bool)> = others.into_iter().map(|id| (id, may_show(&id))).collect();
        for (id, may_show) in others {
            match self.entry(id)? {
                Some(entry) => {
                    let is_own = paths.have_exactly(entry.path.as_os_str());
                    found.insert(id, (entry, is_own));
                }
                // A bind of the volume may have taken its place meanwhile.
                None if may_show => return Ok(None),
                None => {}
            }
        }
        // A mount that was moved is not where csid first saw it.
        let due = if apart.is_some() { &paths.asked } else { &paths.exact };
        let is_found = |own: &OwnPath<'_>| found.values().any(|(entry, _)| *entry.path == *own.path);
        if !due.iter().filter(|own| own.is_mounted).all(is_found) {
            return Ok(None);
        }
        Ok(of_volume_alone(found, paths, shown))
    }
}

/// Returns those of the mounts that show what the volume's own ones do, or what is `shown`. `None`: one of them is at a foreign path.
fn of_volume_alone(
    mut found: BTreeMap<u64, (MountEntry, bool)>,
    paths: &OwnPaths<'_>,
    shown: &[Shown],
) -> Option<Vec<MountEntry>> {
    let own = found.values().filter(|(_, is_own)| *is_own);
    let own = own.map(|(own, _)| (own.device, own.root.as_path()));
    let all = own.chain(shown.iter().map(|shown| (shown.device, shown.root.as_path())));
    let roots: BTreeSet<(u64, &Path)> = all.collect();
    let is_shown = |entry: &MountEntry| {
        roots.iter().any(|(of, root)| *of == entry.device && entry.root.starts_with(root))
    };
    let of_it: BTreeSet<u64> =
        found.iter().filter(|(_, (entry, _))| is_shown(entry)).map(|(id, _)| *id).collect();
    found.retain(|id, _| of_it.contains(id));
    let is_of_it = |(entry, is_own): &(MountEntry, bool)| *is_own || paths.have_above(entry.path.as_os_str());
    found.values().all(is_of_it).then(|| found.into_values().map(|(entry, _)| entry).collect())
}

/// Returns whether the calls' answer is what mountinfo shows. The groups are not compared: nobody reads them of such an answer.
fn is_same(shown: &MountEntry, answer: &MountEntry) -> bool {
    let MountEntry { id, parent, device, root, path, fs_type, source, read_only, groups: _ } = answer;
    (shown.id, shown.parent, shown.device, shown.read_only) == (*id, *parent, *device, *read_only)
        && (&shown.root, &shown.path, &shown.fs_type, &shown.source) == (root, path, fs_type, source)
}

#[cfg(test)]
#[path = "own_mounts_tests.rs"]
mod tests;
