//! Mounts, one at a time and by descriptor. Blocking, and some of it for as long as a dead server likes:
//! a worker of the helper runs it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{FileType, StatVfsMountFlags};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, OpenTreeFlags, UnmountFlags};

use crate::host::bind::{Bind, Restrict, Unbind};
use crate::host::caller::WaitingCaller;
use crate::host::error::{HostError, at};
use crate::host::idmap;
use crate::host::look::Look;
use crate::host::path::{self, Found, Sight};
use crate::host::raw::{self, Peers};
use crate::host::table;
use crate::host::target::{self, At};
use crate::store::rows::Propagation;

/// More mounts than this on one another are no leftover of csid's.
const STACKED: usize = 16;

/// How often, and how long apart, what is busy is asked again.
const INSTANTS: u32 = 15;
const INSTANT: Duration = Duration::from_millis(20);

pub(super) fn look(path: &Path) -> Look {
    path::find(path).map_or_else(missing, |file| look_at(&file))
}

/// Returns the state of a path that cannot be opened.
fn missing(error: Errno) -> Look {
    match error {
        Errno::NOENT | Errno::NOTDIR => Look::Missing,
        // These say nothing about the path.
        Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::INTR => Look::Hung,
        error => Look::Dead(error.raw_os_error()),
    }
}

fn look_at(file: &OwnedFd) -> Look {
    let dead = |error: Errno| Look::Dead(error.raw_os_error());
    match Sight::of(file) {
        Err(error) => dead(error),
        Ok(Sight { kind: FileType::BlockDevice, rdev, .. }) => Look::Device { rdev },
        // Attributes may be cached; this asks the server, if there is one.
        Ok(Sight { kind: FileType::Directory, is_mount: true, device, .. }) => {
            match rustix::fs::fstatfs(file) {
                Ok(stat) => Look::Mounted { device, served: is_served(stat.f_type) },
                Err(error) => dead(error),
            }
        }
        Ok(Sight { is_mount: true, .. }) => dead(Errno::NOTDIR),
        Ok(_) => Look::Plain,
    }
}

/// FUSE (virtiofs, too), NFS, CIFS and SMB2, Ceph, 9P, AFS: whose file system's type it is, by statfs(2). The kernel's number is
/// 32 bits, in a word that may have a sign.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "32 bits")]
fn is_served(f_type: rustix::fs::FsWord) -> bool {
    const SERVED: [u32; 7] =
        [0x6573_5546, 0x6969, 0xff53_4d42, 0xfe53_4d42, 0x00c3_6400, 0x0102_1997, 0x5346_414f];
    SERVED.contains(&(f_type as u32))
}

fn attributes(nosuid: bool, nodev: bool, read_only: bool) -> u64 {
    let flag = |wanted, flag| if wanted { flag } else { 0 };
    flag(nosuid, raw::NOSUID) | flag(nodev, raw::NODEV) | flag(read_only, raw::RDONLY)
}

fn set(mount: impl AsFd, set: u64, peers: Peers, path: &Path) -> Result<(), HostError> {
    raw::mount_setattr(mount.as_fd(), set, peers).map_err(|source| match source.raw_os_error() {
        // Read-only, while a file is open for writing.
        Some(libc::EBUSY) => HostError::Busy { path: path.into(), holders: table::holders(path) },
        _ => HostError::Os { step: "set the flags of the mount at".into(), path: path.into(), source },
    })
}

pub(super) fn deliver(
    published: &Path,
    source: &Path,
    how: Restrict,
    caller: &WaitingCaller<'_>,
) -> Result<Look, HostError> {
    let from = match path::find(published) {
        Ok(from) => from,
        Err(error) => return Ok(missing(error)),
    };
    let look = look_at(&from);
    if !matches!(look, Look::Mounted { .. } | Look::Device { .. }) {
        return Ok(look);
    }
    let flags = attributes(how.nosuid, how.nodev, how.read_only);
    let shown = Sight::of(&from).map_err(at("look at", published))?;
    let mut to = path::find(source).map_err(at("open", source))?;
    let mut there = Sight::of(&to).map_err(at("look at", source))?;
    caller.check(source)?;
    if there.is_mount {
        if !is_clone(&there, &shown, &from) {
            return Err(HostError::Occupied(source.into()));
        }
        set(&to, flags, Peers::Unchanged, source)?;
        // csid's own clone, of a try before. A plugin could have mounted it, and other namespaces have it without the flags.
        let is_own = published == source;
        drop(to);
        let place = Place::of(source)?.ok_or_else(|| at("open", source)(Errno::NOENT))?;
        if is_own || place.unmount(UnmountFlags::empty(), caller).is_err() {
            return Ok(look);
        }
        to = path::find(source).map_err(at("open", source))?;
        there = Sight::of(&to).map_err(at("look at", source))?;
        if there.is_mount {
            return Err(HostError::Occupied(source.into()));
        }
    }
    // A file system where a device is due, or the other way round: the caller says so.
    let is_device = shown.kind == FileType::BlockDevice;
    let due = if is_device { FileType::RegularFile } else { FileType::Directory };
    if there.kind != due {
        return Ok(look);
    }
    let tree = cloned(&from, published)?;
    // Private: what a consumer mounts in it does not reach the plugin's mount, which could not be unmounted then.
    set(&tree, flags, Peers::Private, source)?;
    caller.check(source)?;
    attach(&tree, &to, MoveMountFlags::empty()).map_err(at("mount at", source))?;
    Ok(look)
}

fn attach(tree: &OwnedFd, to: &OwnedFd, how: MoveMountFlags) -> rustix::io::Result<()> {
    let by_descriptor = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    rustix::mount::move_mount(tree, c"", to, c"", by_descriptor | how)
}

/// Whether `sight` is of a mount of what was `shown` by `from`. A FUSE server's first answer about its root may give it another inode
/// number: it is read once more then.
fn is_clone(sight: &Sight, shown: &Sight, from: &OwnedFd) -> bool {
    let is_now = || Sight::of(from).is_ok_and(|now| sight.shows_the_same(&now));
    sight.is_mount && (sight.shows_the_same(shown) || is_now())
}

/// The mount to bind at a target, and its flags.
struct Source {
    from: OwnedFd,
    shown: Sight,
    flags: u64,
    peers: Peers,
}

impl Source {
    fn of(source: &Path, how: &Bind) -> Result<Source, HostError> {
        let from = path::find(source).map_err(at("open", source))?;
        let shown = Sight::of(&from).map_err(at("look at", source))?;
        let is_device = shown.kind == FileType::BlockDevice;
        let is_directory = shown.is_mount && shown.kind == FileType::Directory;
        if !(is_device || is_directory) {
            return Err(HostError::WrongKind {
                path: source.into(),
                wanted: "a mounted directory or a block device".into(),
            });
        }
        // A device node on a mount with nodev cannot be opened by anybody.
        let flags = attributes(how.nosuid, how.nodev && !is_device, how.read_only);
        let peers = match how.propagation {
            Propagation::Private => Peers::Private,
            Propagation::HostToTask => Peers::Slave,
            Propagation::Bidirectional => Peers::Shared,
        };
        Ok(Source { from, shown, flags, peers })
    }
}

/// A file system is bound at a directory, a device at a file.
fn refuse_other_kind(shown: &Sight, there: &Sight, target: &Path) -> Result<(), HostError> {
    let wanted = match (shown.kind == FileType::BlockDevice, there.kind) {
        (false, FileType::Directory) | (true, FileType::RegularFile) => return Ok(()),
        (false, _) => "a directory",
        (true, _) => "a regular file",
    };
    Err(HostError::WrongKind { path: target.into(), wanted: wanted.into() })
}

/// Binds as [`bind`] does, at the descriptor `to` of `target`. Nothing walks to the target, so a pending automount there is not
/// waited for. Returns the new mount; `None`: it was there.
pub(super) fn bind_at(
    source: &Path,
    target: &Path,
    to: &OwnedFd,
    how: &Bind,
    caller: &WaitingCaller<'_>,
) -> Result<Option<OwnedFd>, HostError> {
    let Source { from, shown, flags, peers } = Source::of(source, how)?;
    let is_free = target::prove(to.as_fd(), target)? == At::Free;
    let there = Sight::of(to).map_err(at("look at", target))?;
    if !is_free {
        if !is_clone(&there, &shown, &from) {
            return Err(HostError::Occupied(target.into()));
        }
        // Bound before, perhaps not to the end.
        caller.check(target)?;
        return set(to, flags, peers, target).map(|()| None);
    }
    refuse_other_kind(&shown, &there, target)?;
    let above = match there.kind {
        FileType::Directory => path::above(to, target)?,
        _ => path::parent(target)?.ok_or_else(|| HostError::Link(target.into()))?.0,
    };
    let tree = cloned(&from, source)?;
    set(&tree, flags, Peers::Unchanged, source)?;
    caller.check(target)?;
    let settle = || {
        attach(&tree, to, MoveMountFlags::empty()).map_err(at("mount at", target))?;
        set(&tree, 0, peers, target)?;
        path::outwait_renames(&above, target)?;
        caller.check(target)?;
        match target::prove(tree.as_fd(), target) {
            Ok(At::Mount) => Ok(()),
            Ok(At::Free) | Err(HostError::NotTarget { .. }) => Err(HostError::Link(target.into())),
            Err(error) => Err(error),
        }
    };
    settle().inspect_err(|_| {
        let _gone = rustix::mount::unmount(descriptor(&tree, None), UnmountFlags::DETACH);
    })?;
    Ok(Some(tree))
}

pub(super) fn bind(
    source: &Path,
    root: &Path,
    target: &Path,
    how: &Bind,
    caller: &WaitingCaller<'_>,
) -> Result<(), HostError> {
    let Source { from, shown, flags, peers } = Source::of(source, how)?;
    let found = || {
        let to = path::find_target(root, target, how.uid)?;
        let there = Sight::of(&to).map_err(at("look at", target))?;
        let is_former = there.is_mount && how.replaces_dead.contains(&there.number());
        let gives_way = is_former && look_at(&to).has_lost_its_server();
        Ok::<_, HostError>((to, there, gives_way))
    };
    let (mut to, mut there, mut gives_way) = found()?;
    // The dead one may have the same number: a server's file systems may be one, dead or not.
    let dead = usize::from(there.number() == shown.device);
    if gives_way && table::count_at(target, shown.device)? > dead {
        // An earlier bind lies beneath the dead mount, and was not finished.
        take_away(&to, target, caller)?;
        (to, there, gives_way) = found()?;
    }
    if there.is_mount && !gives_way {
        if !there.shows_the_same(&shown) {
            return Err(HostError::Occupied(target.into()));
        }
        // Bound before, perhaps not to the end.
        caller.check(target)?;
        return set(&to, flags, peers, target);
    }
    refuse_other_kind(&shown, &there, target)?;

    let tree = cloned(&from, source)?;
    // The flags before anybody can see it; how it propagates after, as a mount on a shared one is made
    // shared.
    set(&tree, flags, Peers::Unchanged, source)?;
    caller.check(target)?;
    let place = Place::of(target)?.ok_or_else(|| HostError::Link(target.into()))?;
    let settle = || {
        let mut is_attached = false;
        if gives_way {
            // Beneath it first: nobody writes into the directory below between two mounts. Before Linux 6.5 that can be, for
            // an instant.
            is_attached = attach(&tree, &to, MoveMountFlags::MOVE_MOUNT_BENEATH).is_ok();
            take_away(&to, target, caller)?;
            (to, there, _) = found()?;
            if !is_attached && there.is_mount {
                return Err(HostError::Occupied(target.into()));
            }
        }
        if !is_attached {
            attach(&tree, &to, MoveMountFlags::empty()).map_err(at("mount at", target))?;
        }
        drop(to);
        set(&tree, 0, peers, target)?;
        // A user who may write in a directory above may have moved the target or the directory meanwhile.
        path::outwait_renames(&place.directory, target)?;
        caller.check(target)?;
        let there = Sight::of(path::find_below(root, target)?).map_err(at("look at", target))?;
        let is_it = |sight: &Sight| is_clone(sight, &shown, &from);
        match place.look()?.as_ref().is_some_and(is_it) && is_it(&there) {
            true => Ok(()),
            false => Err(HostError::Link(target.into())),
        }
    };
    // A tree that is nowhere yet goes with its descriptor.
    settle().inspect_err(|_| {
        let _gone = rustix::mount::unmount(descriptor(&tree, None), UnmountFlags::DETACH);
    })
}

/// Detaches the dead mount that is open as `mount`, also one in use.
fn take_away(mount: &OwnedFd, path: &Path, caller: &WaitingCaller<'_>) -> Result<(), HostError> {
    caller.check(path)?;
    rustix::mount::unmount(descriptor(mount, None), UnmountFlags::DETACH).map_err(at("unmount", path))
}

/// A mount of what `file` is, its own mount's flags kept, that is nowhere to be seen.
fn cloned(file: &OwnedFd, path: &Path) -> Result<OwnedFd, HostError> {
    let how =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    rustix::mount::open_tree(file, c"", how).map_err(at("clone the mount at", path))
}

/// And whether its flags keep its user from anything.
pub(super) fn open_tree(
    source: &Path,
    shown: Look,
    subpath: Option<&Path>,
    how: Restrict,
    userns: Option<&OwnedFd>,
) -> Result<Option<(OwnedFd, bool)>, HostError> {
    let root = match path::find(source) {
        Ok(root) => root,
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
        Err(error) => return Err(at("open", source)(error)),
    };
    match look_at(&root) {
        look if look.shows_the_same(shown) => {}
        Look::Dead(code) => return Err(at("look at", source)(Errno::from_raw_os_error(code))),
        _ => return Ok(None),
    }
    let from = match subpath {
        None => root,
        Some(subpath) => path::find_inside(&root, source, subpath)?,
    };
    let tree = cloned(&from, source)?;
    let flags = attributes(how.nosuid, how.nodev, how.read_only);
    // Private: what somebody mounts in it does not show up here.
    set(&tree, flags, Peers::Private, source)?;
    userns.map_or(Ok(()), |userns| idmap::map(&tree, userns, source))?;
    // The flags that the plugin gave its mount stay.
    let bounds = StatVfsMountFlags::RDONLY
        | StatVfsMountFlags::NOSUID
        | StatVfsMountFlags::NODEV
        | StatVfsMountFlags::NOEXEC;
    let flags = rustix::fs::fstatvfs(&tree).map_err(at("look at the flags of", source))?.f_flag;
    Ok(Some((tree, flags.intersects(bounds))))
}

/// A path whose directory was opened once: what is there is looked at and unmounted through it, whatever is
/// renamed above meanwhile. A mount point itself cannot be renamed or removed, but from another mount namespace.
struct Place<'a> {
    path: &'a Path,
    directory: OwnedFd,
    name: &'a OsStr,
}

impl<'a> Place<'a> {
    /// `None`: there is no such directory.
    fn of(path: &'a Path) -> Result<Option<Self>, HostError> {
        Ok(path::parent(path)?.map(|(directory, name)| Place { path, directory, name }))
    }

    /// Looks without waiting for an automount; a bare one is nothing.
    fn look(&self) -> Result<Option<Sight>, HostError> {
        match path::find_unwaiting(&self.directory, self.name, self.path) {
            Ok(Found::File(file)) => seen(Ok(file), self.path),
            Ok(Found::Automount) => Ok(None),
            Ok(Found::BehindAutomount) => Err(HostError::AutomountPending(self.path.into())),
            Err(error) => seen(Err(error), self.path),
        }
    }

    /// Returns the mount there. `None`: nothing is mounted there.
    fn mounted(&self) -> Result<Option<Sight>, HostError> {
        Ok(self.look()?.filter(|sight| sight.is_mount))
    }

    fn is_dead(&self) -> bool {
        path::find_in(&self.directory, self.name).is_ok_and(|file| look_at(&file).has_lost_its_server())
    }

    /// Detaches the mount that was seen there, also one in use, and no other.
    fn take_away(&self, there: &Sight, caller: &WaitingCaller<'_>) -> Result<bool, HostError> {
        let mount = match path::find_in(&self.directory, self.name) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(false),
            found => found.map_err(at("open", self.path))?,
        };
        let now = Sight::of(&mount).map_err(at("look at", self.path))?;
        match now.is_mount {
            true if now.shows_the_same(there) => take_away(&mount, self.path, caller).map(|()| true),
            true => Err(HostError::Occupied(self.path.into())),
            false => Ok(false),
        }
    }

    /// Whether something was there to unmount.
    fn unmount(&self, how: UnmountFlags, caller: &WaitingCaller<'_>) -> Result<bool, HostError> {
        caller.check(self.path)?;
        match patiently(|| self.umount2(how)) {
            Ok(()) => Ok(true),
            // EINVAL: nothing is mounted there.
            Err(Errno::INVAL | Errno::NOENT) => Ok(false),
            Err(Errno::BUSY) => {
                Err(HostError::Busy { path: self.path.into(), holders: table::holders(self.path) })
            }
            Err(error) => Err(at("unmount", self.path)(error)),
        }
    }

    fn umount2(&self, how: UnmountFlags) -> rustix::io::Result<()> {
        rustix::mount::unmount(descriptor(&self.directory, Some(self.name)), how | UnmountFlags::NOFOLLOW)
    }
}

/// `None`: nothing is there. No descriptor is left, which would keep a mount busy.
fn seen(found: rustix::io::Result<OwnedFd>, path: &Path) -> Result<Option<Sight>, HostError> {
    match found {
        Ok(file) => Sight::of(file).map(Some).map_err(at("look at", path)),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
        Err(error) => Err(at("open", path)(error)),
    }
}

/// The mount at a target, compared with `source`.
enum Bound {
    Yes,
    /// The mount that was at the source before.
    Former,
    Other,
    /// Nothing is at the source, and the earlier mount there is not known.
    Unproven,
}

/// `were`: the numbers that were at the source, for when they are there no more. A number is nobody else's as long as anything of
/// its file system is mounted.
fn bound(source: &Path, there: &Sight, were: &[u64]) -> Result<Bound, HostError> {
    let shown = seen(path::find(source), source)?;
    let shown = shown.filter(|sight| sight.is_mount || sight.kind == FileType::BlockDevice);
    Ok(match shown {
        Some(shown) if there.shows_the_same(&shown) => Bound::Yes,
        None if were.contains(&there.number()) => Bound::Yes,
        Some(_) if were.contains(&there.number()) => Bound::Former,
        None if were.is_empty() => Bound::Unproven,
        _ => Bound::Other,
    })
}

pub(super) fn is_bound(source: &Path, target: &Path) -> Result<bool, HostError> {
    let Some(place) = Place::of(target)? else { return Ok(false) };
    match place.mounted() {
        // A path that cannot be opened now is judged by the mount table.
        Err(HostError::AutomountPending(_)) => {
            let table = table::MountTable::read()?;
            let (shown, there) = (table.at(source), table.at(target));
            let is_same = |a: table::TableMount, b| (a.device, a.root) == b;
            Ok(shown.zip(there).is_some_and(|(shown, there)| is_same(shown, (there.device, there.root))))
        }
        there => match there? {
            Some(there) => Ok(matches!(bound(source, &there, &[])?, Bound::Yes)),
            None => Ok(false),
        },
    }
}

pub(super) fn unbind(
    source: &Path,
    target: &Path,
    were: &[u64],
    how: Unbind,
    made: Option<OwnedFd>,
    caller: &WaitingCaller<'_>,
) -> Result<bool, HostError> {
    let Some(place) = Place::of(target)? else { return Ok(false) };
    let there = match (place.mounted(), made) {
        // Everybody but the automount's daemon waits there, so nobody uses what its mount has just bound.
        (Err(HostError::AutomountPending(_)), Some(made))
            if matches!(target::prove(made.as_fd(), target), Ok(At::Mount)) =>
        {
            return take_away(&made, target, caller).map(|()| true);
        }
        // A descriptor of the mount would keep it busy.
        (there, made) => {
            drop(made);
            there?
        }
    };
    let Some(there) = there else { return Ok(false) };
    let is_dead = || how != Unbind::Unused && place.is_dead();
    match bound(source, &there, were)? {
        Bound::Former if is_dead() => place.take_away(&there, caller),
        Bound::Former | Bound::Other => Err(HostError::Occupied(target.into())),
        Bound::Unproven if how != Unbind::Forced => {
            Err(HostError::Unproven { path: target.into(), source_path: source.into() })
        }
        Bound::Yes | Bound::Unproven if how == Unbind::Forced || is_dead() => place.take_away(&there, caller),
        Bound::Yes | Bound::Unproven => place.unmount(UnmountFlags::empty(), caller),
    }
}

pub(super) fn detach(path: &Path, caller: &WaitingCaller<'_>) -> Result<(), HostError> {
    match Place::of(path)? {
        Some(place) => place.unmount(UnmountFlags::DETACH, caller).map(drop),
        None => Ok(()),
    }
}

/// csid's own looks hold a mount for an instant: only what stays busy is in use.
fn patiently(ask: impl Fn() -> rustix::io::Result<()>) -> rustix::io::Result<()> {
    for _ in 0..INSTANTS {
        match ask() {
            Err(Errno::BUSY) => std::thread::sleep(INSTANT),
            other => return other,
        }
    }
    ask()
}

/// Whether somebody holds the mount at `path`: an open file, a working directory, a mount below. MNT_EXPIRE (umount(2)) asks just
/// that: EBUSY for a mount in use, and EAGAIN, with a mark and nothing else, for one that is not. Two who ask
/// at once of one mount could unmount it: its volume's task alone asks.
pub(super) fn in_use(path: &Path, caller: &WaitingCaller<'_>) -> Result<bool, HostError> {
    let Some(place) = Place::of(path)? else { return Ok(false) };
    // The look also clears an earlier expiry mark, as the end of any use does: a marked mount would be unmounted.
    if !place.look()?.is_some_and(|sight| sight.is_mount) {
        return Ok(false);
    }
    caller.check(path)?;
    match patiently(|| place.umount2(UnmountFlags::EXPIRE)) {
        Err(Errno::BUSY) => Ok(true),
        Ok(()) | Err(Errno::AGAIN | Errno::INVAL | Errno::NOENT) => Ok(false),
        Err(error) => Err(at("ask for the users of", path)(error)),
    }
}

/// Unmount what is at `path`, as often as something is, if nobody uses it.
pub(super) fn clear(path: &Path, caller: &WaitingCaller<'_>) -> Result<(), HostError> {
    let Some(place) = Place::of(path)? else { return Ok(()) };
    for _ in 0..STACKED {
        // A dead one, which cannot be looked at, is there, too.
        let there = place.look().map_or(true, |sight| sight.is_some_and(|sight| sight.is_mount));
        if !there {
            break;
        }
        place.unmount(UnmountFlags::empty(), caller)?;
    }
    Ok(())
}

fn descriptor(fd: &OwnedFd, name: Option<&OsStr>) -> PathBuf {
    let mut path = PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    path.extend(name);
    path
}
