//! The tmpfs of each plugin's root, at `ROOT/live`. csid makes the directories of new mounts there: no mount outlives a boot, and so
//! no directory of one has to.
//!
//! csid holds the root directory of each tmpfs by a descriptor, and walks from it. A plugin may mount a file system over the tmpfs
//! whose server does not answer, and csid does not go there.

use std::collections::BTreeSet;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::StatxFlags;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags};

use crate::host::base::{Base, part_below};
use crate::host::calls::Host;
use crate::host::error::{HostError, at};
use crate::host::held_live::{HeldLive, LiveState};
use crate::host::path::{self, Access, Sight};
use crate::host::table::{self, MountEntry, MountTable};
use crate::store::volume_handle::{KINDS, LIVE};

/// The source of each tmpfs in the mount table.
const SOURCE: &str = "csid-live";
/// The limits of each tmpfs. A mount needs six inodes, and no page unless its plugin writes into its directories.
const SIZE: &str = "64m";
const INODES: &str = "524288";
/// The time after which csid tries again to mount a tmpfs that could not be mounted.
const PAUSE: Duration = Duration::from_secs(60);

/// The state of a plugin's tmpfs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Live {
    /// It is mounted at this path.
    At(PathBuf),
    /// It could not be mounted, and csid does not try again yet.
    Without,
    /// csid has not looked for it, or may try again to mount it, or it is not mounted any more.
    Unknown,
}

impl Host {
    /// Returns the state of the tmpfs of a plugin with this root. No mount table is read.
    pub fn live(&self, root: &Path) -> Live {
        match self.lives.get(root) {
            Some(LiveState::Held(live)) if live.is_attached() => Live::At(live.at.clone()),
            Some(LiveState::Without(since)) if since.elapsed() < PAUSE => Live::Without,
            Some(LiveState::Held(_) | LiveState::Without(_)) | None => Live::Unknown,
        }
    }

    /// Returns the directory of the tmpfs of a plugin with this root. `None`: csid holds none, whether one is mounted or not.
    pub fn live_of(&self, root: &Path) -> Option<PathBuf> {
        match self.lives.get(root)? {
            LiveState::Held(live) => Some(live.at.clone()),
            LiveState::Without(_) => None,
        }
    }

    /// Finds the tmpfs of a plugin with this `root`, or mounts it. `base` is an existing directory of csid's that `root` is in, or
    /// `root`. Returns its directory. `None`: csid does without one, and has logged why.
    pub async fn make_live(&self, base: &Path, root: &Path) -> Option<PathBuf> {
        let _changing = self.lives.changing.lock().await;
        // Another caller may have made it meanwhile.
        match self.live(root) {
            Live::At(path) => return Some(path),
            Live::Without => return None,
            Live::Unknown => {}
        }
        let (base, of) = (base.to_owned(), root.to_owned());
        match table::blocking(move || found_or_mounted(&base, &of)).await {
            Ok(live) => {
                let path = live.at.clone();
                self.lives.set(root, Some(LiveState::Held(Arc::new(live))));
                Some(path)
            }
            Err(error) => {
                let before = self.lives.set(root, Some(LiveState::Without(Instant::now())));
                if !matches!(before, Some(LiveState::Without(_))) {
                    tracing::warn!(
                        root = %root.display(), %error,
                        "no tmpfs can be mounted below the plugin's root; its mounts' directories are made in the root itself"
                    );
                }
                None
            }
        }
    }

    /// Finds, by one look at the mount table, those tmpfs of these plugins' roots that an earlier csid mounted. Returns the paths of
    /// those that csid cannot hold, because another mount covers them or the table cannot be read.
    pub async fn find_lives(&self, roots: BTreeSet<PathBuf>) -> Vec<PathBuf> {
        if roots.iter().all(|root| self.live_of(root).is_some()) {
            return Vec::new();
        }
        let _changing = self.lives.changing.lock().await;
        match table::blocking(MountTable::read).await {
            Err(error) => {
                tracing::warn!(%error, "the tmpfs of plugins cannot be looked for");
                roots.iter().filter(|root| self.live_of(root).is_none()).map(|root| root.join(LIVE)).collect()
            }
            Ok(table) => self.hold_lives(&table, &roots),
        }
    }

    /// As [`Host::find_lives`], by a mount table that was just read.
    pub async fn find_lives_in(&self, table: &MountTable, roots: &BTreeSet<PathBuf>) -> Vec<PathBuf> {
        let _changing = self.lives.changing.lock().await;
        self.hold_lives(table, roots)
    }

    /// Holds those tmpfs of these roots that the table shows. The caller has `changing`.
    fn hold_lives(&self, table: &MountTable, roots: &BTreeSet<PathBuf>) -> Vec<PathBuf> {
        let mut left = Vec::new();
        for root in roots.iter().filter(|root| self.live_of(root).is_none()) {
            let path = root.join(LIVE);
            if !table.all_at(&path).any(|entry| is_own(&entry)) {
                continue;
            }
            match held(root, table) {
                Ok(Some(live)) => drop(self.lives.set(root, Some(LiveState::Held(Arc::new(live))))),
                Ok(None) | Err(_) => left.push(path),
            }
        }
        left
    }

    /// Unmounts the tmpfs of a plugin's root that no plugin uses any more, if nothing is in it. Returns whether it is gone.
    pub async fn unmount_live(&self, root: &Path) -> Result<bool, HostError> {
        let _changing = self.lives.changing.lock().await;
        let live = match self.lives.set(root, None) {
            Some(LiveState::Held(live)) => live,
            Some(LiveState::Without(_)) | None => return Ok(true),
        };
        let of = Arc::clone(&live);
        let gone = table::blocking(move || unmount(&of)).await;
        if !matches!(gone, Ok(true)) {
            self.lives.set(root, Some(LiveState::Held(live)));
        }
        gone
    }
}

fn is_own(entry: &MountEntry) -> bool {
    entry.fs_type == "tmpfs" && entry.source == SOURCE && entry.root == Path::new("/")
}

/// Returns the tmpfs that an earlier csid mounted. `None`: there is none, or a mount covers a directory above. An error: something
/// else is mounted over it.
fn held(root: &Path, table: &MountTable) -> Result<Option<HeldLive>, HostError> {
    let at_live = root.join(LIVE);
    let Some(entry) = table.entry_at(&at_live) else { return Ok(None) };
    if !is_own(&entry) {
        return Err(HostError::Occupied(at_live));
    }
    // The table has just said that the walk ends on a tmpfs. What has been mounted since is not asked.
    let file = path::find_cached(&at_live).map_err(at("open", &at_live))?;
    let sight = Sight::of(&file).map_err(at("look at", &at_live))?;
    match sight.is_mount && sight.device == entry.device {
        true => Ok(Some(HeldLive { at: at_live, root: file })),
        false => Err(HostError::Occupied(at_live)),
    }
}

fn found_or_mounted(base: &Path, root: &Path) -> Result<HeldLive, HostError> {
    match held(root, &MountTable::read()?)? {
        Some(live) => Ok(live),
        None => mounted(base, root),
    }
}

/// Returns whether there is nothing but the empty directories of csid's in the directory `at_live`.
fn is_unused(base: Base<'_>, at_live: &Path) -> Result<bool, HostError> {
    for path in path::entries(base, at_live)? {
        let is_kind = KINDS.iter().any(|kind| path.ends_with(kind));
        // A file with such a name is no directory.
        if !is_kind || !path::entries(base, &path).is_ok_and(|entries| entries.is_empty()) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn mounted(base: &Path, root: &Path) -> Result<HeldLive, HostError> {
    let at_live = root.join(LIVE);
    let outside = || HostError::Outside { path: at_live.clone(), root: base.into() };
    let relative = part_below(&at_live, base).ok_or_else(outside)?;
    path::make_directory(Base::at(base), relative, Access::Passable, Access::Passable)?;
    // It may be the root of another plugin, or have mounts from a time when no tmpfs could be mounted.
    if !is_unused(Base::at(base), &at_live)? {
        return Err(HostError::WrongKind { path: at_live, wanted: "an empty directory".into() });
    }
    let place = path::open_directory(Base::at(base), relative).map_err(at("open", &at_live))?;
    let new = tmpfs().map_err(at("make a tmpfs for", &at_live))?;
    let by_descriptor = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    rustix::mount::move_mount(&new, c"", place, c"", by_descriptor).map_err(at("mount at", &at_live))?;
    let live = HeldLive { at: at_live, root: new };
    if live.is_attached() {
        return Ok(live);
    }
    // The directory was renamed meanwhile.
    unmount_by_descriptor(&live)?;
    Err(HostError::Link(live.at))
}

/// Returns a tmpfs that is nowhere to be seen. It has devices: plugins make the nodes of block volumes there.
fn tmpfs() -> rustix::io::Result<OwnedFd> {
    let options = rustix::mount::fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in [("source", SOURCE), ("mode", "0711"), ("size", SIZE), ("nr_inodes", INODES)] {
        rustix::mount::fsconfig_set_string(&options, key, value)?;
    }
    rustix::mount::fsconfig_create(&options)?;
    rustix::mount::fsmount(&options, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_NOSUID)
}

/// Unmounts a tmpfs in which there is nothing but the empty directories of csid's.
fn unmount(live: &HeldLive) -> Result<bool, HostError> {
    if !is_unused(live.base(), &live.at)? {
        return Ok(false);
    }
    let id = rustix::fs::statx(
        &live.root,
        c"",
        rustix::fs::AtFlags::EMPTY_PATH | rustix::fs::AtFlags::STATX_DONT_SYNC,
        StatxFlags::MNT_ID,
    );
    let id = id.map_err(at("look at", &live.at))?.stx_mnt_id;
    if table::entries()?
        .iter()
        .any(|entry| entry.parent == id || entry.path.starts_with(&live.at) && !is_own(entry))
    {
        return Ok(false);
    }
    if !live.is_attached() {
        return Ok(true);
    }
    unmount_by_descriptor(live)?;
    Ok(true)
}

/// Unmounts the tmpfs wherever it is. Its path may lead to another mount by then.
fn unmount_by_descriptor(live: &HeldLive) -> Result<(), HostError> {
    let link = format!("/proc/self/fd/{}", live.root.as_raw_fd());
    rustix::mount::unmount(link, UnmountFlags::DETACH).map_err(at("unmount", &live.at))
}
