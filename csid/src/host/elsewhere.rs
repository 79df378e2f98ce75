//! Calls about mounts of a volume in csid's own and in other mount namespaces.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::host::calls::Host;
use crate::host::copies::{Masters, Search, place_on};
use crate::host::device::BlockDevice;
use crate::host::ends::EndWatch;
use crate::host::error::HostError;
use crate::host::helper::HelperRequest;
use crate::host::lookout::{LOOKS, PAUSE, search_failed};
use crate::host::namespaces::{Backing, Holder, MountElsewhere, NAMED, PlacedMount, Question, Shown, Sought};
use crate::host::own_paths::OwnPaths;
use crate::host::process_tables::described;
use crate::host::table::{MountEntry, blocking};

/// The mounts of csid's own namespace at one moment, or those that may concern one volume.
pub struct OwnMounts {
    mounts: Arc<Vec<MountEntry>>,
    /// Whether they are all mounts. Otherwise they are of one volume, and csid's or the plugin's. One mount at the paths of rows that
    /// nobody asked about is there for each directory that such mounts show.
    are_all: bool,
}

impl OwnMounts {
    /// Returns what is mounted at these paths, and the block device below it. A path where nothing is mounted adds nothing.
    /// `is_block`: they are nodes of a block device, and `number` is its number. Else `number` is the one that the mounts had, for where
    /// none is there any more. `None`: it is not known yet.
    pub fn backing(&self, paths: &[&Path], is_block: bool, number: Option<u64>) -> Backing {
        let shown = self.shown_at(|path| paths.iter().any(|own| own.as_os_str() == path), is_block);
        let (node, had) = if is_block { (number, None) } else { (None, number) };
        // A directory of a file system is not all that its device is used for.
        let is_whole = |number: &u64| {
            let mut own = shown.iter().filter(|own| own.device == *number).peekable();
            own.peek().is_none() || own.any(|own| own.root == Path::new("/"))
        };
        let had = had.filter(|_| shown.is_empty());
        let numbers = node.into_iter().chain(shown.iter().map(|own| own.device)).chain(had);
        let device = numbers.filter(is_whole).find_map(BlockDevice::of);
        let is_remembered = device.as_ref().is_some_and(|device| had == Some(device.number));
        Backing { shown, device, is_remembered, ..Backing::default() }
    }

    fn all(mounts: Arc<Vec<MountEntry>>) -> Self {
        OwnMounts { mounts, are_all: true }
    }

    /// Returns what the mounts at the paths of the volume's rows show.
    pub fn shown(&self, paths: &OwnPaths<'_>) -> Vec<Shown> {
        match self.are_all {
            true => self.shown_at(|path| paths.sorted().contains(path), paths.are_nodes),
            false => self.shown_at(|path| paths.have_exactly(path), paths.are_nodes),
        }
    }

    /// Returns the numbers of the file systems whose whole is mounted at `path`, and whose number the kernel gives to another one once
    /// they have ended. `is_node`: the path is the node of a block device.
    pub fn lent_numbers(&self, path: &Path, is_node: bool) -> BTreeSet<u64> {
        let shown = self.shown_at(|at| at == path.as_os_str(), is_node);
        shown.iter().filter(|shown| shown.lends_its_number()).map(|shown| shown.device).collect()
    }

    /// Returns what the mounts at these paths show. `is_node`: the nodes of a block device.
    fn shown_at(&self, is_at: impl Fn(&OsStr) -> bool, is_node: bool) -> Vec<Shown> {
        let mut shown: Vec<Shown> = Vec::new();
        for entry in self.mounts.iter().filter(|entry| is_at(entry.path.as_os_str())) {
            let is_known = |own: &Shown| {
                own.device == entry.device && own.root == entry.root && own.fs_type == entry.fs_type
            };
            if !shown.iter().any(is_known) {
                let (device, root) = (entry.device, entry.root.clone());
                let (fs_type, source) = (entry.fs_type.clone(), entry.source.clone());
                shown.push(Shown { device, fs_type, root, is_node, source });
            }
        }
        shown
    }

    /// Returns the mounts of what is `shown`, or of something in it, at other paths than these. A mount that goes along with the
    /// unmount of one of the paths is left out, as in other namespaces.
    pub fn foreign(&self, shown: &[Shown], paths: &OwnPaths<'_>) -> Vec<PlacedMount> {
        if !self.are_all {
            return Vec::new();
        }
        let all = &self.mounts;
        let exact = paths.sorted();
        let at_own = all.iter().filter(|entry| exact.contains(entry.path.as_os_str()));
        let there: HashSet<u64> = at_own.map(|entry| entry.device).collect();
        // Once the volume's own mounts are gone, its number may be another file system's.
        let shows = |shown: &Shown, entry: &MountEntry| {
            shown.is_shown_by(entry) && (there.contains(&entry.device) || shown.is_of_source(entry))
        };
        let is_foreign = |entry: &&MountEntry| {
            let path = entry.path.as_os_str();
            shown.iter().any(|shown| shows(shown, entry)) && !exact.contains(path) && !paths.have_above(path)
        };
        let mut found: Vec<&MountEntry> = all.iter().filter(is_foreign).collect();
        if !found.is_empty() {
            let taken_along = taken_along(all, &found, shown, paths);
            found.retain(|entry| !taken_along.contains(&entry.id));
        }
        let placed = |entry: &MountEntry| PlacedMount {
            path: entry.path.clone(),
            root: entry.root.clone(),
            read_only: entry.read_only,
        };
        let mut mounts: Vec<PlacedMount> = found.into_iter().map(placed).collect();
        // A mount on a shared mount that lies on its own peer is there twice.
        mounts.sort_by(|one, other| one.path.cmp(&other.path));
        mounts.dedup_by(|one, other| one.is_same(other));
        mounts
    }
}

/// Returns the ids of the mounts that the kernel unmounts with a mount at one of the volume's own paths.
fn taken_along(
    all: &[MountEntry],
    found: &[&MountEntry],
    shown: &[Shown],
    paths: &OwnPaths<'_>,
) -> HashSet<u64> {
    let questions = [Question { shown: shown.to_vec(), but_of: Vec::new() }];
    let mut search = Search::new(&questions);
    let by_id: HashMap<u64, &MountEntry> = all.iter().map(|entry| (entry.id, entry)).collect();
    let mut masters = Masters::default();
    let mut parents = HashSet::new();
    for entry in all {
        masters.add(entry.groups);
        parents.insert(entry.parent);
        if paths.sorted().contains(entry.path.as_os_str())
            && let Some(on) = by_id.get(&entry.parent)
        {
            search.note_own(entry, on);
        }
    }
    let goes_along = |entry: &&&MountEntry| {
        let parent = by_id.get(&entry.parent).and_then(|on| Some((on.groups, place_on(entry, on)?)));
        search.takes_along(entry.device, parent, parents.contains(&entry.id), &masters)
    };
    found.iter().filter(goes_along).map(|entry| entry.id).collect()
}

impl Host {
    /// Returns all mounts of csid's own namespace, as they are now.
    pub async fn all_own_mounts(&self) -> Result<OwnMounts, HostError> {
        self.own_table.entries().await.map(OwnMounts::all)
    }

    /// Returns the mounts of csid's own namespace that may concern the volume with these paths. `shown` is what its mounts are known to
    /// show.
    pub async fn own_mounts(&self, paths: &OwnPaths<'_>, shown: &[Shown]) -> Result<OwnMounts, HostError> {
        match self.known_mounts.about(paths, shown).await {
            Some(found) => Ok(OwnMounts { mounts: Arc::new(found), are_all: false }),
            None => self.all_own_mounts().await,
        }
    }

    /// Returns the mounts of what is `shown`, or of something in it, in other mount namespaces than csid's, that do not go along
    /// with csid's own. The namespaces of the processes `but_of` are left out.
    pub async fn copies_elsewhere(
        &self,
        shown: &[Shown],
        but_of: &[u32],
    ) -> Result<Vec<MountElsewhere>, HostError> {
        if shown.is_empty() {
            return Ok(Vec::new());
        }
        let mut looks = 1;
        loop {
            let found =
                self.look_elsewhere(Question { shown: shown.to_vec(), but_of: but_of.to_vec() }).await?;
            if found.is_empty() || looks == LOOKS {
                return Ok(found);
            }
            looks += 1;
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Watches the file system with the number `device`, whose root is mounted at `path`, for its end. `None`: csid cannot watch it.
    pub async fn watch_end(&self, plugin: &str, path: &Path, device: u64) -> Option<EndWatch> {
        let failed = |error: &dyn std::fmt::Display| {
            tracing::debug!(path = %path.display(), %error, "csid cannot watch for the end of a file system");
        };
        let (inotify, request) = self.ends.request().inspect_err(|error| failed(error)).ok()?;
        let asked = HelperRequest::WatchEnd { path: path.to_owned() };
        let answer = self.with_descriptor::<Option<(u64, i32)>>(plugin, asked, Some(inotify)).await;
        let (found, watch) = answer.inspect_err(|error| failed(error)).ok()?.0?;
        let watch = request.answered(watch);
        (found == device).then_some(watch)
    }

    async fn look_elsewhere(&self, question: Question) -> Result<Vec<MountElsewhere>, HostError> {
        let answer = self.elsewhere.ask(&self.helper, question).await;
        answer.unwrap_or_else(|_| Err(search_failed("the search ended without an answer")))
    }

    /// Returns the mounts in csid's own namespace of what is `sought`, by the mount table alone.
    pub async fn still_mounted(&self, sought: Sought) -> Result<Vec<PathBuf>, HostError> {
        let own = self.own_table.entries().await?;
        let is_of_it = |entry: &MountEntry| {
            let is_at = |path: &PathBuf| entry.path.starts_with(path);
            let shows = sought.shown.iter().any(|shown| shown.is_shown_by(entry));
            let is_its = shows || sought.device.is_none_or(|device| device == entry.device);
            sought.below.iter().any(is_at)
                || (sought.target.as_ref() == Some(&entry.path) && is_its)
                || (sought.everywhere && shows && !entry.path.starts_with(&sought.base))
        };
        Ok(own.iter().filter(|entry| is_of_it(entry)).map(|entry| entry.path.clone()).collect())
    }

    /// Returns the mounts in other namespaces of what is `sought`, none of which csid has any more.
    pub async fn still_elsewhere(&self, sought: Sought) -> Result<Vec<MountElsewhere>, HostError> {
        let is_at = |mount: &MountElsewhere| {
            let mut paths = sought.below.iter().chain(&sought.target);
            paths.any(|path| mount.may_be_below(path))
        };
        let mut found = self.copies_elsewhere(&sought.shown, &[]).await?;
        found.retain(|mount| sought.everywhere || is_at(mount));
        let Some(device) = sought.device.filter(|_| found.is_empty()) else { return Ok(found) };
        // It is not known what the mounts showed. Mounts of the same file system count where theirs were; so does any mount of a disk
        // that csid has not mounted elsewhere.
        let is_alone = match sought.everywhere && sought.shown.is_empty() && BlockDevice::of(device).is_some()
        {
            true => self.own_table.entries().await?.iter().all(|entry| entry.device != device),
            false => false,
        };
        let (fs_type, source) = (String::new(), String::new());
        let all = Shown { device, fs_type, root: PathBuf::from("/"), is_node: false, source };
        found = self.copies_elsewhere(&[all], &[]).await?;
        found.retain(|mount| is_alone || is_at(mount));
        Ok(found)
    }

    /// Returns who has these mounts, as `PID COMMAND (UNIT)`, each process once, or as the namespace where no process is in it.
    pub async fn holders_elsewhere(&self, copies: &[MountElsewhere]) -> Vec<String> {
        // A namespace that was not searched to its end is named as such only if no mount was found there.
        let mut holders: BTreeMap<Holder, bool> = BTreeMap::new();
        for copy in copies {
            *holders.entry(copy.holder).or_default() |= copy.path.is_some();
        }
        let named = |(holder, is_found)| {
            let name = match holder {
                Holder::Process(process) => described(process),
                Holder::Namespace(inode) => format!("mount namespace mnt:[{inode}] without a process"),
                Holder::Ended => "a mount namespace that has just ended".to_owned(),
            };
            if is_found { name } else { format!("{name}, whose mounts are too many to search") }
        };
        let name = move || {
            let unnamed = holders.len().saturating_sub(NAMED);
            let names = holders.into_iter().take(NAMED).map(named);
            Ok(names.chain((unnamed > 0).then(|| format!("{unnamed} more"))).collect())
        };
        blocking(name).await.unwrap_or_default()
    }

    /// Returns whether a file system on the volume's block device is still mounted somewhere, or another exclusive user has the
    /// device: another namespace, a descriptor of a mount, an overlay's upper directory. Returns the device's name, if so.
    pub async fn is_held(&self, plugin: &str, backing: &Backing) -> Result<Option<String>, HostError> {
        let Some(device) = backing.device.clone() else { return Ok(None) };
        let shows = backing.is_remembered || backing.shown.iter().any(|shown| shown.device == device.number);
        self.within(plugin, HelperRequest::IsHeld { device, shows }).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::own_paths::OwnPath;
    use crate::host::table;

    /// csid was killed before it wrote the number of the device. A container has the device meanwhile.
    #[test]
    fn node_without_a_known_number_is_a_node() {
        let table = table::parsed(b"3 2 0:6 /loop3 /own rw - devtmpfs udev rw").collect();
        let backing = OwnMounts::all(Arc::new(table)).backing(&[Path::new("/own")], true, None);
        let in_dev = table::parsed(b"4 2 0:6 /loop3 /dev/loop3 rw - devtmpfs udev rw").next().unwrap();
        assert!(!backing.shown[0].is_shown_by(&in_dev));
    }

    /// A FUSE or NFS file system that was mounted after the volume's was unmounted may have its number.
    #[test]
    fn reused_number_is_no_use_of_the_volume() {
        let foreign = |lines: &str| {
            let entries = table::parsed(lines.as_bytes()).collect();
            let of_volume = table::parsed(b"3 2 0:5 / /own rw - fuse.juicefs juicefs:A rw").collect();
            let (own, shown) = (Path::new("/own"), OwnMounts::all(Arc::new(of_volume)));
            let exact = vec![OwnPath { path: own.as_os_str(), is_mounted: false }];
            let paths = OwnPaths { exact, ..OwnPaths::default() };
            let found = OwnMounts::all(Arc::new(entries)).foreign(&shown.shown(&paths), &paths);
            found.into_iter().map(|mount| mount.path().to_owned()).collect::<Vec<_>>()
        };
        let other = "4 2 0:5 / /run/gvfs rw - fuse.gvfsd-fuse gvfsd-fuse rw\n";
        let alike = "4 2 0:5 / /driver/b rw - fuse.juicefs juicefs:B rw\n";
        let bind = "4 2 0:5 / /srv rw - fuse.juicefs juicefs:A rw\n";
        assert!(foreign(other).is_empty() && foreign(alike).is_empty());
        assert_eq!(foreign(bind), [Path::new("/srv")]);
        let still = |line: &str| format!("3 2 0:5 / /own rw - fuse.juicefs juicefs:A rw\n{line}");
        for line in [other, alike, bind] {
            assert_eq!(foreign(&still(line)).len(), 1, "the number is the volume's while that is mounted");
        }
    }
}
