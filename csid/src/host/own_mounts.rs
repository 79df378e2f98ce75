//! The mounts of csid's own namespace that may concern one volume, by `listmount` and `statmount`. To read the whole mountinfo costs as
//! much as all mounts of the host. A mount keeps its file system and its root for life, so csid asks once for each mount, and again only
//! for those that a question may be about.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::OsStr;
use std::hash::{BuildHasher, RandomState};
use std::io::{Error, Result};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::host::namespaces::Shown;
use crate::host::statmount::{OWN, Stat, mounts};
use crate::host::table::{self, MountEntry, blocking};

/// Listing more mounts than this is no work for a thread of the runtime.
const FEW: usize = 1_000;
/// Mounts of one file system that are all asked for, because one of them may have been moved to a path of the volume. A kernel moves no
/// mount out of a shared one, so a plugin can rarely do that.
const OF_DEVICE: usize = 8;
/// A list of the namespace is never cut.
const END: Duration = Duration::from_secs(60);

/// The paths in csid's own namespace where mounts of a volume are csid's.
pub struct OwnPaths<'a> {
    /// The paths of the volume's rows.
    pub exact: HashSet<&'a OsStr>,
    /// Directories that only csid and the plugin mount in.
    pub below: Vec<&'a Path>,
}

/// The mounts of csid's own namespace as far as csid knows them.
#[derive(Default)]
pub(super) struct KnownMounts(Arc<Mutex<Known>>);

#[derive(Default)]
struct Known {
    answers: Answers,
    /// In the order of the ids.
    facts: Vec<Facts>,
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

/// Facts about a mount that never change, and where it was when csid first asked.
struct Facts {
    id: u64,
    device: u64,
    /// `None`: the root of its file system.
    root: Option<Box<Path>>,
    /// A hash of its path then.
    place: u64,
}

impl Facts {
    fn root(&self) -> &Path {
        self.root.as_deref().unwrap_or(Path::new("/"))
    }
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
        let known = Arc::clone(&self.0).lock_owned().await;
        if known.answers == Answers::Missing {
            return None;
        }
        let is_long = known.answers == Answers::Unproven || known.facts.len() > FEW;
        let (refreshed, mut known) = match is_long {
            true => blocking(move || Ok(known.refreshed())).await.ok()?,
            false => known.refreshed(),
        };
        let found = match refreshed {
            Ok(()) => known.about(paths, devices, shown),
            Err(error) => Err(error),
        };
        found.unwrap_or_else(|error| {
            tracing::debug!(%error, "csid reads its whole mount table");
            None
        })
    }
}

trait Refresh {
    /// Lists the mounts, and asks for those that are new. The first time it proves the answers.
    fn refreshed(self) -> (Result<()>, Self);
}

impl Refresh for OwnedMutexGuard<Known> {
    fn refreshed(mut self) -> (Result<()>, Self) {
        let proven = if self.answers == Answers::Unproven { self.prove() } else { Ok(()) };
        (proven.and_then(|()| self.refresh()), self)
    }
}

impl Known {
    /// Compares the calls' answers with mountinfo. A kernel that leaves something out is not asked again.
    fn prove(&mut self) -> Result<()> {
        let before = table::entries().map_err(Error::other)?;
        let listed = mounts(OWN, None, Instant::now() + END).and_then(|listed| {
            let asked = listed.ids.iter().map(|id| self.entry(*id));
            asked.filter_map(Result::transpose).collect::<Result<Vec<_>>>()
        });
        let after: HashMap<u64, MountEntry> =
            table::entries().map_err(Error::other)?.into_iter().map(|entry| (entry.id, entry)).collect();
        let answered: HashMap<u64, MountEntry> =
            listed.unwrap_or_default().into_iter().map(|entry| (entry.id, entry)).collect();
        // What has changed meanwhile proves nothing.
        let mut still = before.iter().filter(|entry| after.get(&entry.id) == Some(entry));
        let differs =
            still.find(|entry| answered.get(&entry.id).is_none_or(|answer| !is_answered(entry, answer)));
        match differs {
            None => {
                self.answers = Answers::Proven;
                Ok(())
            }
            Some(entry) => {
                tracing::info!(mount = %entry.path.display(), "the kernel's calls do not show each mount as mountinfo does");
                self.answers = Answers::Missing;
                Err(Error::from(std::io::ErrorKind::Unsupported))
            }
        }
    }

    fn refresh(&mut self) -> Result<()> {
        let listed = mounts(OWN, None, Instant::now() + END)?;
        let mut before = std::mem::take(&mut self.facts).into_iter().peekable();
        let mut now = Vec::with_capacity(listed.ids.len());
        for id in listed.ids {
            while before.next_if(|facts| facts.id < id).is_some() {}
            match before.next_if(|facts| facts.id == id) {
                Some(facts) => now.push(facts),
                None => {
                    let Some(MountEntry { device, root, path, .. }) = self.entry(id)? else { continue };
                    let root = Some(root).filter(|root| root != Path::new("/")).map(Into::into);
                    let place = self.hasher.hash_one(path.as_os_str());
                    now.push(Facts { id, device, root, place });
                }
            }
        }
        self.facts = now;
        Ok(())
    }

    /// Returns a mount as it is now. `None`: it is gone.
    fn entry(&mut self, id: u64) -> Result<Option<MountEntry>> {
        match self.stat.get_or_insert_with(Stat::new).own_entry(id) {
            Ok(entry) => Ok(Some(entry)),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn about(
        &mut self,
        paths: &OwnPaths<'_>,
        devices: &[u64],
        shown: &[Shown],
    ) -> Result<Option<Vec<MountEntry>>> {
        let places: HashSet<u64> = paths.exact.iter().map(|path| self.hasher.hash_one(*path)).collect();
        let is_of_device = |facts: &&Facts| devices.contains(&facts.device);
        let are_few = self.facts.iter().filter(is_of_device).nth(OF_DEVICE).is_none();
        let is_asked = |facts: &&Facts| places.contains(&facts.place) || (are_few && is_of_device(facts));
        let first: Vec<u64> = self.facts.iter().filter(is_asked).map(|facts| facts.id).collect();
        let mut found: BTreeMap<u64, MountEntry> = BTreeMap::new();
        for id in first {
            found.extend(self.entry(id)?.map(|entry| (id, entry)));
        }
        let is_at = |entry: &&MountEntry| paths.exact.contains(entry.path.as_os_str());
        let at_own = found.values().filter(is_at).map(|entry| (entry.device, entry.root.as_path()));
        let shows: BTreeSet<(u64, &Path)> =
            at_own.chain(shown.iter().map(|shown| (shown.device, shown.root.as_path()))).collect();
        let is_of_volume = |device: u64, root: &Path| {
            shows.iter().any(|(shown, above)| *shown == device && root.starts_with(above))
        };
        let more = self.facts.iter().filter(|facts| !found.contains_key(&facts.id));
        let more: Vec<u64> =
            more.filter(|facts| is_of_volume(facts.device, facts.root())).map(|facts| facts.id).collect();
        let is_foreign = |entry: &MountEntry| {
            is_of_volume(entry.device, &entry.root) && !paths.have(entry.path.as_os_str())
        };
        let mut has_foreign = found.values().any(is_foreign);
        let mut rest: Vec<(u64, MountEntry)> = Vec::new();
        for id in more {
            let Some(entry) = self.entry(id)? else { continue };
            has_foreign |= is_foreign(&entry);
            rest.push((id, entry));
        }
        found.extend(rest);
        Ok((!has_foreign).then(|| found.into_values().collect()))
    }
}

/// Returns whether the calls' answer is what mountinfo shows. The groups are not compared: nobody reads them of such an answer.
fn is_answered(shown: &MountEntry, answer: &MountEntry) -> bool {
    let of = |entry: &MountEntry| {
        let MountEntry { id, parent, device, root, path, fs_type, source, read_only, groups: _ } = entry;
        (*id, *parent, *device, root.clone(), path.clone(), fs_type.clone(), source.clone(), *read_only)
    };
    of(shown) == of(answer)
}

impl OwnPaths<'_> {
    /// Returns whether a mount at this path is csid's or the plugin's.
    pub(super) fn have(&self, path: &OsStr) -> bool {
        self.exact.contains(path) || self.below.iter().any(|above| Path::new(path).starts_with(above))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns what is known of this process' mounts, where the kernel has the calls.
    fn known() -> Option<Known> {
        let mut known = Known::default();
        if known.prove().is_err() {
            eprintln!("skipped: the kernel does not show each mount by its calls");
            return None;
        }
        known.refresh().unwrap();
        Some(known)
    }

    fn at(path: &Path) -> OwnPaths<'_> {
        OwnPaths { exact: HashSet::from([path.as_os_str()]), below: vec![] }
    }

    #[test]
    fn listed_mounts_are_those_of_mountinfo() {
        let Some(mut known) = known() else { return };
        let all = table::entries().unwrap();
        // A path with one mount, of a file system that nothing else shows.
        let is_alone = |one: &&MountEntry| {
            let others = || all.iter().filter(|other| other.id != one.id);
            others().all(|other| other.path != one.path && other.device != one.device)
        };
        let one = all.iter().find(is_alone).expect("a mount");
        let found = known.about(&at(&one.path), &[], &[]).unwrap().unwrap();
        assert!(found.len() == 1 && is_answered(one, &found[0]), "{found:?}");
        // Asked for by what it shows, its path is a foreign one.
        let shown = Shown {
            device: one.device,
            fs_type: one.fs_type.clone(),
            root: one.root.clone(),
            is_node: false,
            source: one.source.clone(),
        };
        let nowhere = at(Path::new("/nowhere"));
        assert_eq!(known.about(&nowhere, &[], &[shown]).unwrap(), None);
        assert_eq!(known.about(&nowhere, &[], &[]).unwrap(), Some(vec![]));
    }

    #[test]
    fn moved_mount_is_found_by_its_device() {
        let Some(mut known) = known() else { return };
        let all = table::entries().unwrap();
        let root = all.iter().find(|entry| entry.path == Path::new("/proc")).expect("a proc");
        let paths = at(Path::new("/proc"));
        // As if it had been elsewhere when csid first asked.
        known.facts.iter_mut().for_each(|facts| facts.place = 0);
        assert_eq!(known.about(&paths, &[], &[]).unwrap(), Some(vec![]));
        let found = known.about(&paths, &[root.device], &[]).unwrap();
        assert!(found.is_none_or(|found| found.iter().any(|entry| entry.path == root.path)));
    }
}
