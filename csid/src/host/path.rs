//! Paths: opened without following a symbolic link in any part of them, directories made, leftovers removed.
//! Everything is done through the parent's descriptor; a path is walked again only to see where it leads by then.

use std::ffi::{OsStr, OsString};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RawDir, ResolveFlags, StatxAttributes, StatxFlags};
use rustix::io::Errno;

use crate::host::base::{Base, TRIES, openat2, part_below, root_of_kind};
use crate::host::error::{HostError, at};
use crate::host::look::Look;
use crate::host::table;

/// The access to a directory of csid's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// 0711: consumers pass through to published volumes, and list nothing.
    Passable,
    /// 0700: what is staged is the plugin's. Nothing may be mounted on it.
    Private,
    /// 0700, and something may be mounted on it.
    MountPoint,
}

impl Access {
    fn mode(self) -> Mode {
        Mode::from_raw_mode(match self {
            Access::Passable => 0o711,
            Access::Private | Access::MountPoint => 0o700,
        })
    }
}

/// Symbolic links on the way to one directory, as many as the kernel follows.
const LINKS: usize = 40;

/// The statx fields of an open file that need no answer of its server.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Sight {
    pub kind: FileType,
    pub is_mount: bool,
    pub device: u64,
    pub inode: u64,
    pub rdev: u64,
    pub size: u64,
}

impl Sight {
    pub fn of(file: impl AsFd) -> rustix::io::Result<Sight> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::NO_AUTOMOUNT | AtFlags::STATX_DONT_SYNC;
        let stat =
            rustix::fs::statx(file, c"", flags, StatxFlags::TYPE | StatxFlags::INO | StatxFlags::SIZE)?;
        Ok(Sight {
            kind: FileType::from_raw_mode(stat.stx_mode.into()),
            is_mount: stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT),
            device: rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            rdev: rustix::fs::makedev(stat.stx_rdev_major, stat.stx_rdev_minor),
            size: stat.stx_size,
        })
    }

    /// The number of the block device, or of the device that the file system is on.
    pub fn number(&self) -> u64 {
        if self.kind == FileType::BlockDevice { self.rdev } else { self.device }
    }

    /// Whether both show the same root directory, or the same block device.
    pub fn shows_the_same(&self, other: &Sight) -> bool {
        match (self.kind, other.kind) {
            (FileType::BlockDevice, FileType::BlockDevice) => self.rdev == other.rdev,
            (a, b) => a == b && (self.device, self.inode) == (other.device, other.inode),
        }
    }
}

/// Returns a descriptor of an absolute path, of the topmost mount there. The file itself is not opened.
pub(super) fn find(path: &Path) -> rustix::io::Result<OwnedFd> {
    openat2(CWD, path, OFlags::PATH, ResolveFlags::empty())
}

/// The directory that holds `path`, and the name in it. `None`: there is no such directory.
pub(super) fn parent(path: &Path) -> Result<Option<(OwnedFd, &OsStr)>, HostError> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(HostError::WrongKind { path: path.into(), wanted: "a path with a name".into() });
    };
    match openat2(CWD, parent, OFlags::PATH | OFlags::DIRECTORY, ResolveFlags::empty()) {
        Ok(directory) => Ok(Some((directory, name))),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
        Err(error) => Err(at("open the directory of", path)(error)),
    }
}

/// As [`find`], of a name in a directory.
pub(super) fn find_in(directory: &OwnedFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    openat2(directory, Path::new(name), OFlags::PATH, ResolveFlags::empty())
}

/// Returns a descriptor of `path`, which has to be below `root`, whatever is renamed meanwhile.
pub(super) fn find_below(root: &Path, path: &Path) -> Result<OwnedFd, HostError> {
    let outside = || HostError::Outside { path: path.into(), root: root.into() };
    let relative = part_below(path, root).ok_or_else(outside)?;
    if relative.as_os_str().is_empty() {
        return Err(outside());
    }
    let directory = openat2(CWD, root, OFlags::PATH | OFlags::DIRECTORY, ResolveFlags::empty());
    let directory = directory.map_err(at("open", root))?;
    let found = match walk_cached(&directory, relative) {
        // Before Linux 5.12 there is no such walk.
        Err(Errno::AGAIN | Errno::INVAL) if table::is_automount(path)? => {
            return Err(HostError::Automount(path.into()));
        }
        Err(Errno::AGAIN | Errno::INVAL) => openat2(directory, relative, OFlags::PATH, ResolveFlags::BENEATH),
        found => found,
    };
    found.map_err(|error| match error {
        Errno::XDEV => outside(),
        error => at("open", path)(error),
    })
}

/// Returns a descriptor of a mount point, whose directories the kernel has in memory. No file system is asked for a name. Fails with
/// EAGAIN where one would have to be.
pub(super) fn find_cached(path: &Path) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let walk = |resolve| rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve);
    for _ in 1..TRIES {
        match walk(resolve | ResolveFlags::CACHED) {
            // A rename while it walked.
            Err(Errno::AGAIN) => {}
            // Before Linux 5.12 there is no such walk.
            Err(Errno::INVAL) => return walk(resolve),
            other => return other,
        }
    }
    walk(resolve | ResolveFlags::CACHED)
}

/// Walks by what the kernel has in memory, and fails with EAGAIN where that is not all. It never waits. Every other walk to an
/// automount point waits for the mount that it asked for, which may be this very one; only systemd's own process group does not.
fn walk_cached(directory: &OwnedFd, relative: &Path) -> rustix::io::Result<OwnedFd> {
    let resolve = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::CACHED;
    rustix::fs::openat2(directory, relative, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), resolve)
}

/// The result of a look-up of a name that does not wait for an automount.
pub(super) enum Found {
    File(OwnedFd),
    /// An automount has nothing mounted on it.
    Automount,
    /// Something is mounted on an automount, and whatever goes there may wait for the automount's daemon.
    BehindAutomount,
}

/// Finds a name in a directory, as [`find_in`] does, but never waits for an automount at `path`, which is the name's. Only the
/// daemon's own process group passes an automount that is pending or being expired.
pub(super) fn find_unwaiting(directory: &OwnedFd, name: &OsStr, path: &Path) -> rustix::io::Result<Found> {
    if let Ok(file) = walk_cached(directory, Path::new(name)) {
        return Ok(Found::File(file));
    }
    match table::automount_at(path)
        .map_err(|error| error.errno().map_or(Errno::IO, Errno::from_raw_os_error))?
    {
        table::Automount::None => return find_in(directory, name).map(Found::File),
        table::Automount::Bare => return Ok(Found::Automount),
        table::Automount::Covered => {}
    }
    // The kernel has every mount point in memory. Whatever is mounted on the host at that moment makes the walk fail, too.
    for _ in 0..TRIES {
        match walk_cached(directory, Path::new(name)) {
            Err(Errno::AGAIN) => {}
            // Before Linux 5.12 there is no such walk.
            Err(Errno::INVAL) => break,
            found => return found.map(Found::File),
        }
    }
    Ok(Found::BehindAutomount)
}

/// Returns the directory above an open directory, whatever is mounted on that.
pub(super) fn above(directory: &OwnedFd, path: &Path) -> Result<OwnedFd, HostError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    openat2(directory, Path::new(".."), flags, ResolveFlags::empty())
        .map_err(at("open the directory of", path))
}

/// Opens the target at `path`, below `root`, as [`find_below`] does. For another `uid` than root's the target and each directory
/// on the way to it below `root` have to be that uid's or root's, and nobody else may write there. Each is judged by the
/// descriptor that the walk goes on from, so a rename meanwhile changes nothing. What is mounted at the target is not
/// judged: its owners are the volume's.
pub(super) fn find_target(root: &Path, path: &Path, uid: u32) -> Result<OwnedFd, HostError> {
    if uid == 0 {
        return find_below(root, path);
    }
    // An automount is seen by this one.
    find_below(root, path)?;
    let relative = part_below(path, root).and_then(names);
    let relative = relative.ok_or_else(|| HostError::Outside { path: path.into(), root: root.into() })?;
    let mut directory = openat2(CWD, root, OFlags::PATH | OFlags::DIRECTORY, ResolveFlags::empty())
        .map_err(at("open", root))?;
    let mut walked = root.to_owned();
    for (depth, name) in relative.iter().enumerate() {
        walked.push(name);
        let next = openat2(&directory, Path::new(name), OFlags::PATH, ResolveFlags::BENEATH);
        directory = next.map_err(at("open", &walked))?;
        let is_target = depth + 1 == relative.len();
        if !(is_target && Sight::of(&directory).map_err(at("look at", &walked))?.is_mount) {
            judge(&directory, &walked, uid, is_target)?;
        }
    }
    Ok(directory)
}

/// In a directory with the sticky bit nobody renames or removes what is another's, so the way may lead through one. A target
/// is covered with all that is in it, so a sticky one has to be the uid's own.
fn judge(file: &OwnedFd, path: &Path, uid: u32, is_target: bool) -> Result<(), HostError> {
    let stat = rustix::fs::fstat(file).map_err(at("look at", path))?;
    let owned = stat.st_uid == uid || stat.st_uid == 0;
    let mode = Mode::from_raw_mode(stat.st_mode);
    let sticky = mode.contains(Mode::SVTX) && (!is_target || stat.st_uid == uid);
    match (owned, mode.intersects(Mode::WGRP | Mode::WOTH) && !sticky) {
        (true, false) => Ok(()),
        (false, _) => Err(HostError::Others { path: path.into(), owner: Some(stat.st_uid), uid }),
        (true, true) => Err(HostError::Others { path: path.into(), owner: None, uid }),
    }
}

/// In its own mount namespace the kernel lets no mount point be renamed, but asks only when a rename begins: one that began just
/// before something was mounted in `directory` moves it all the same. Afterwards none is under way there: a rename has the
/// directory's lock to its end, and to read it waits for that, until csid is killed and no longer.
pub(super) fn outwait_renames(directory: &OwnedFd, path: &Path) -> Result<(), HostError> {
    let here = Path::new(".");
    let read = openat2(directory, here, OFlags::RDONLY | OFlags::DIRECTORY, ResolveFlags::empty());
    let mut buffer = [MaybeUninit::uninit(); 512];
    let entry = read.and_then(|read| RawDir::new(read, &mut buffer).next().transpose().map(drop));
    entry.map_err(at("read the directory of", path))
}

/// The directory or regular file at `subpath` in `directory`, which is at `path`, and in its file system; what somebody
/// else who writes there makes of it meanwhile leads nowhere else.
pub(super) fn find_inside(directory: &OwnedFd, path: &Path, subpath: &Path) -> Result<OwnedFd, HostError> {
    let whole = path.join(subpath);
    let wrong_kind =
        || HostError::WrongKind { path: whole.clone(), wanted: "a directory or a regular file".into() };
    let found = openat2(directory, subpath, OFlags::PATH, ResolveFlags::BENEATH | ResolveFlags::NO_XDEV)
        .map_err(|error| match error {
            Errno::XDEV => HostError::Outside { path: whole.clone(), root: path.into() },
            Errno::NOTDIR | Errno::NAMETOOLONG => wrong_kind(),
            error => at("open", &whole)(error),
        })?;
    match Sight::of(&found).map_err(at("look at", &whole))?.kind {
        FileType::Directory | FileType::RegularFile => Ok(found),
        _ => Err(wrong_kind()),
    }
}

/// Returns the state of `path`. `None`: a mount is at it, or on the way to it from `base`.
pub(super) fn look_unmounted(base: Base<'_>, path: &Path) -> Option<Look> {
    let relative = part_below(path, base.path)?;
    let first = relative.iter().next();
    let root = match base.open(first) {
        // The directories of a tmpfs that is not mounted any more.
        Err(Errno::NOENT) if root_of_kind(base.path, first).is_some() => return Some(Look::Missing),
        root => root.ok()?,
    };
    match openat2(root, relative, OFlags::PATH, ResolveFlags::BENEATH | ResolveFlags::NO_XDEV) {
        Ok(file) => match Sight::of(file).ok()? {
            Sight { is_mount: true, .. } => None,
            Sight { kind: FileType::BlockDevice, rdev, .. } => Some(Look::Device { rdev }),
            _ => Some(Look::Plain),
        },
        Err(Errno::NOENT | Errno::NOTDIR) => Some(Look::Missing),
        Err(_) => None,
    }
}

/// The plain names of a relative path.
fn names(relative: &Path) -> Option<Vec<&OsStr>> {
    let name = |component| match component {
        Component::Normal(name) => Some(name),
        _ => None,
    };
    let names: Vec<_> = relative.components().map(name).collect::<Option<_>>()?;
    (!names.is_empty()).then_some(names)
}

/// Opens a directory in `directory`, on the same file system. Mounts are not entered, so a dead one is not called.
fn enter(directory: &OwnedFd, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    openat2(directory, Path::new(name), OFlags::RDONLY | OFlags::DIRECTORY, ResolveFlags::NO_XDEV)
}

/// Makes the directory and its missing parents. `access` applies to the last one, and `of_parent` to the one above; the others are
/// passable.
pub(super) fn make_directory(
    base: Base<'_>,
    relative: &Path,
    access: Access,
    of_parent: Access,
) -> Result<(), HostError> {
    let path = base.path.join(relative);
    let names =
        names(relative).ok_or_else(|| HostError::Outside { path: path.clone(), root: base.path.into() })?;
    if make_last(base, &names, access) == Ok(true) {
        return Ok(());
    }
    let mut tries = TRIES;
    loop {
        match make(base.open_for_reading(names.first().copied())?, &names, &path, (access, of_parent)) {
            // A parent that was empty for a moment was removed with the neighbour's leftovers.
            Err(HostError::Os { source, .. }) if source.raw_os_error() == Some(2) && tries > 0 => tries -= 1,
            other => return other,
        }
    }
}

/// The common case, in few calls: only the last directory is missing. Anything else is left to [`make`], and so are its errors.
fn make_last(base: Base<'_>, names: &[&OsStr], access: Access) -> rustix::io::Result<bool> {
    let Some((name, parents)) = names.split_last().filter(|(_, parents)| !parents.is_empty()) else {
        return Ok(false);
    };
    let parents: PathBuf = parents.iter().collect();
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV;
    let parent =
        openat2(base.open(parents.iter().next())?, &parents, OFlags::PATH | OFlags::DIRECTORY, resolve)?;
    let own = own_uid();
    let above = rustix::fs::fstat(&parent)?;
    if above.st_uid != own {
        return Ok(false);
    }
    rustix::fs::mkdirat(&parent, *name, access.mode())?;
    let made = rustix::fs::statat(&parent, *name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(made.st_uid == own && Mode::from_raw_mode(made.st_mode) == access.mode())
}

/// Returns the uid of this process, which does not change.
fn own_uid() -> u32 {
    static OWN: OnceLock<u32> = OnceLock::new();
    *OWN.get_or_init(|| rustix::process::geteuid().as_raw())
}

fn make(
    root: OwnedFd,
    names: &[&OsStr],
    path: &Path,
    (access, of_parent): (Access, Access),
) -> Result<(), HostError> {
    let mut directory = root;
    for (depth, name) in names.iter().enumerate() {
        let last = depth + 1 == names.len();
        let mode = match names.len() - depth {
            1 => access.mode(),
            2 => of_parent.mode(),
            _ => Access::Passable.mode(),
        };
        let is_new = match rustix::fs::mkdirat(&directory, *name, mode) {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(error) => return Err(at("create the directory", path)(error)),
        };
        directory = match enter(&directory, name) {
            Ok(entered) => entered,
            Err(Errno::XDEV) if last && access == Access::MountPoint => return Ok(()),
            Err(Errno::XDEV) => return Err(HostError::Occupied(path.into())),
            Err(Errno::NOTDIR) => {
                return Err(HostError::WrongKind { path: path.into(), wanted: "a directory".into() });
            }
            Err(error) => return Err(at("create the directory", path)(error)),
        };
        let stat = rustix::fs::fstat(&directory).map_err(at("look at", path))?;
        if stat.st_uid != own_uid() {
            return Err(HostError::Foreign { path: path.into(), uid: stat.st_uid });
        }
        // The umask may have taken bits away.
        if (last || is_new) && Mode::from_raw_mode(stat.st_mode) != mode {
            rustix::fs::fchmod(&directory, mode).map_err(at("set the mode of", path))?;
        }
    }
    Ok(())
}

pub(super) fn make_file(base: Base<'_>, relative: &Path) -> Result<(), HostError> {
    let path = base.path.join(relative);
    let (Some(above), Some(name)) = (relative.parent(), relative.file_name()) else {
        return Err(HostError::Outside { path, root: base.path.into() });
    };
    let above = open_below(base, above, OFlags::PATH).map_err(|error| in_the_way(error, &path))?;
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::openat(above, name, flags, Mode::RUSR | Mode::WUSR) {
        Ok(_) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(at("create the file", &path)(error)),
    }
}

pub(super) fn entries(base: Base<'_>, directory: &Path) -> Result<Vec<PathBuf>, HostError> {
    let outside = || HostError::Outside { path: directory.into(), root: base.path.into() };
    let relative = part_below(directory, base.path).ok_or_else(outside)?;
    let file = match open_below(base, relative, OFlags::RDONLY) {
        Ok(file) => file,
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(Vec::new()),
        Err(error) => return Err(in_the_way(error, directory)),
    };
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::new(file).map_err(at("read", directory))? {
        let entry = entry.map_err(at("read", directory))?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name != "." && name != ".." {
            names.push(directory.join(name));
        }
    }
    names.sort();
    Ok(names)
}

/// A directory below `base`, on its file system, by no symbolic link.
fn open_below(base: Base<'_>, relative: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let first = relative.iter().next();
    let relative = if first.is_none() { Path::new(".") } else { relative };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_XDEV;
    openat2(base.open(first)?, relative, flags | OFlags::DIRECTORY, resolve)
}

/// Opens a directory below `base`, on its file system, to be the place of a mount.
pub(super) fn open_directory(base: Base<'_>, relative: &Path) -> rustix::io::Result<OwnedFd> {
    open_below(base, relative, OFlags::PATH)
}

fn in_the_way(error: Errno, path: &Path) -> HostError {
    match error {
        Errno::XDEV => HostError::Occupied(path.into()),
        Errno::LOOP => HostError::Link(path.into()),
        error => at("open the directory of", path)(error),
    }
}

/// Returns the name of a directory without symbolic links. A link is followed only where root owns the link and its directory,
/// and no other user can write in that directory. The owner of another link would choose the directory.
pub(super) fn resolve_root(directory: &Path) -> Result<PathBuf, HostError> {
    let open = |at: &OwnedFd, name: &OsStr, flags| {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC | flags;
        rustix::fs::openat2(at, name, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS)
    };
    let top =
        || rustix::fs::openat(CWD, "/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let failed = || at("open", directory);
    let mut links = 0;
    let mut way: Vec<(OwnedFd, OsString)> = Vec::new();
    let mut rest: Vec<OsString> = directory.iter().rev().map(OsStr::to_owned).collect();
    while let Some(name) = rest.pop() {
        match name.as_bytes() {
            b"/" => way.clear(),
            b"." => {}
            b".." => drop(way.pop()),
            _ => {
                let root;
                let at = match way.last() {
                    Some((at, _)) => at,
                    None => {
                        root = top().map_err(failed())?;
                        &root
                    }
                };
                let file = open(at, &name, OFlags::empty()).map_err(failed())?;
                let stat = rustix::fs::fstat(&file).map_err(failed())?;
                if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
                    way.push((file, name));
                    continue;
                }
                let above = rustix::fs::fstat(at).map_err(failed())?;
                let is_roots = stat.st_uid == 0 && above.st_uid == 0 && above.st_mode & 0o022 == 0;
                links += 1;
                if !is_roots || links > LINKS {
                    return Err(HostError::Link(directory.into()));
                }
                let target = rustix::fs::readlinkat(&file, c"", Vec::new()).map_err(failed())?;
                rest.extend(
                    Path::new(OsStr::from_bytes(target.as_bytes())).iter().rev().map(OsStr::to_owned),
                );
            }
        }
    }
    let found: PathBuf =
        std::iter::once(OsStr::new("/")).chain(way.iter().map(|(_, name)| &**name)).collect();
    openat2(CWD, &found, OFlags::PATH | OFlags::DIRECTORY, ResolveFlags::empty()).map_err(failed())?;
    Ok(found)
}

/// Removes as [`remove`] does, from a `base` that is held. The parents stay from `above` on, where that is below `base`.
pub(super) fn remove_held(base: Base<'_>, above: &Path, path: &Path) -> Result<bool, HostError> {
    let Some(relative) = part_below(above, base.path).filter(|path| !path.as_os_str().is_empty()) else {
        return remove(base, path);
    };
    match open_below(base, relative, OFlags::PATH) {
        Ok(directory) => remove(Base::held(above, &directory), path),
        Err(Errno::NOENT) => Ok(true),
        Err(Errno::XDEV | Errno::NOTDIR | Errno::LOOP) => Ok(false),
        Err(error) => Err(at("open the directory of", path)(error)),
    }
}

pub(super) fn remove(base: Base<'_>, path: &Path) -> Result<bool, HostError> {
    let outside = || HostError::Outside { path: path.into(), root: base.path.into() };
    let names = part_below(path, base.path).and_then(names).ok_or_else(outside)?;
    let base_directory = match base.open(names.first().copied()) {
        Ok(directory) => directory,
        Err(Errno::NOENT) => return Ok(true),
        Err(Errno::XDEV) => return Ok(false),
        Err(error) => return Err(at("open", base.path)(error)),
    };
    // As deep as there is something; what is not there is gone.
    let mut below: Vec<OwnedFd> = Vec::new();
    for name in &names[..names.len() - 1] {
        let parent = below.last().map_or(base_directory.as_fd(), AsFd::as_fd);
        match openat2(parent, Path::new(name), OFlags::PATH | OFlags::DIRECTORY, ResolveFlags::NO_XDEV) {
            Ok(directory) => below.push(directory),
            Err(Errno::NOENT) => break,
            Err(Errno::XDEV | Errno::NOTDIR | Errno::LOOP) => return Ok(false),
            Err(error) => return Err(at("open the directory of", path)(error)),
        }
    }
    let directories = std::iter::once(base_directory.as_fd()).chain(below.iter().map(AsFd::as_fd));
    let directories: Vec<BorrowedFd<'_>> = directories.collect();
    for (depth, directory) in directories.into_iter().enumerate().rev() {
        let gone = if depth + 1 == names.len() {
            remove_leftover(directory, names[depth])
        } else {
            remove_directory(directory, names[depth])
        };
        match gone.map_err(at("remove", path))? {
            true => {}
            false if depth + 1 == names.len() => return Ok(false),
            // A parent that is still in use.
            false => break,
        }
    }
    Ok(true)
}

/// The kernel itself refuses what is not empty and what something is mounted on.
fn remove_directory(parent: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<bool> {
    match rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::NOTEMPTY | Errno::EXIST | Errno::BUSY | Errno::NOTDIR) => Ok(false),
        Err(error) => Err(error),
    }
}

fn remove_leftover(parent: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<bool> {
    if remove_directory(parent, name)? {
        return Ok(true);
    }
    let file = match openat2(parent, Path::new(name), OFlags::PATH, ResolveFlags::NO_XDEV) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(true),
        Err(Errno::XDEV | Errno::LOOP) => return Ok(false),
        Err(error) => return Err(error),
    };
    let sight = Sight::of(&file)?;
    let ours = match sight.kind {
        FileType::RegularFile => sight.size == 0,
        FileType::BlockDevice | FileType::CharacterDevice => true,
        _ => false,
    };
    if !ours {
        return Ok(false);
    }
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::BUSY | Errno::ISDIR) => Ok(false),
        Err(error) => Err(error),
    }
}
