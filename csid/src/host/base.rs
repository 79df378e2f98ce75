//! The directories below which csid walks, and the system call by which it walks.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::host::error::{HostError, at};
use crate::store::volume_handle::{KINDS, LIVE};

/// openat2 answers EAGAIN when something was renamed while it walked.
pub(super) const TRIES: usize = 64;

/// Opens a path without following a symbolic link in any part of it.
pub(super) fn openat2(
    directory: impl AsFd,
    path: &Path,
    flags: OFlags,
    resolve: ResolveFlags,
) -> rustix::io::Result<OwnedFd> {
    let resolve = resolve | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let flags = flags | OFlags::CLOEXEC;
    for _ in 1..TRIES {
        match rustix::fs::openat2(directory.as_fd(), path, flags, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return other,
        }
    }
    rustix::fs::openat2(directory, path, flags, Mode::empty(), resolve)
}

/// A directory of csid's, below which paths are walked.
#[derive(Clone, Copy)]
pub(super) struct Base<'a> {
    pub path: &'a Path,
    /// `None`: the directory is opened by its path.
    held: Option<&'a OwnedFd>,
}

impl<'a> Base<'a> {
    /// Returns a base that is opened by its path.
    pub fn at(path: &'a Path) -> Self {
        Base { path, held: None }
    }

    /// Returns a base that is open as `held`. Nothing walks to its path.
    pub fn held(path: &'a Path, held: &'a OwnedFd) -> Self {
        Base { path, held: Some(held) }
    }

    /// Opens the base for a walk to what is `first` in it. `None`: for the base itself.
    pub fn open(&self, first: Option<&OsStr>) -> rustix::io::Result<Opened<'a>> {
        match self.held {
            Some(held) => Ok(Opened::Held(held)),
            None => open_unheld(self.path, first, OFlags::PATH).map(Opened::Own),
        }
    }

    /// As [`Self::open`], to read the directory.
    pub fn open_for_reading(&self, first: Option<&OsStr>) -> Result<OwnedFd, HostError> {
        let opened = match self.held {
            Some(held) => openat2(
                held,
                Path::new("."),
                OFlags::RDONLY | OFlags::DIRECTORY,
                ResolveFlags::BENEATH | ResolveFlags::NO_XDEV,
            ),
            None => open_unheld(self.path, first, OFlags::RDONLY),
        };
        opened.map_err(|error| match error {
            Errno::XDEV => HostError::Occupied(self.path.into()),
            error => at("open", self.path)(error),
        })
    }
}

/// The descriptor of a base.
pub(super) enum Opened<'a> {
    Held(&'a OwnedFd),
    Own(OwnedFd),
}

impl AsFd for Opened<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Opened::Held(held) => held.as_fd(),
            Opened::Own(own) => own.as_fd(),
        }
    }
}

/// Opens a base by its path. A plugin may mount something over a directory of volumes, or over the tmpfs that the directory is
/// in: such a base is opened from the plugin's root without crossing a mount.
fn open_unheld(path: &Path, first: Option<&OsStr>, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let flags = flags | OFlags::DIRECTORY;
    let Some(root) = root_of_kind(path, first) else {
        return openat2(CWD, path, flags, ResolveFlags::empty());
    };
    let below = part_below(path, root).ok_or(Errno::INVAL)?;
    let root = openat2(CWD, root, OFlags::PATH | OFlags::DIRECTORY, ResolveFlags::empty())?;
    openat2(root, below, flags, ResolveFlags::BENEATH | ResolveFlags::NO_XDEV)
}

/// Returns ROOT of a path `ROOT/KIND` or `ROOT/live/KIND`, which has `first` in it. `None`: the path is no such path. A plugin's root
/// may have the name of a kind, too, but it has kinds in it.
pub(super) fn root_of_kind<'p>(path: &'p Path, first: Option<&OsStr>) -> Option<&'p Path> {
    if first.is_some_and(|first| first == LIVE || KINDS.iter().any(|kind| first == *kind)) {
        return None;
    }
    let directory = path.parent().filter(|_| KINDS.iter().any(|kind| path.ends_with(kind)))?;
    if directory.ends_with(LIVE) { directory.parent() } else { Some(directory) }
}

/// Returns what is behind `root` in `path`. Empty: both are the same. `None`: `path` is not below `root`. Compares bytes where both are
/// written alike, because each mount has many paths.
pub fn part_below<'p>(path: &'p Path, root: &Path) -> Option<&'p Path> {
    let rest = path.as_os_str().as_bytes().strip_prefix(root.as_os_str().as_bytes());
    // An end that Path would read otherwise than it is written is left to it.
    let is_plain =
        |rest: &[u8]| !matches!(rest, [] | [b'/' | b'.', ..] | [.., b'/']) && !rest.ends_with(b"/.");
    match rest.and_then(|rest| rest.strip_prefix(b"/")) {
        Some(rest) if is_plain(rest) && !root.as_os_str().is_empty() => {
            Some(Path::new(OsStr::from_bytes(rest)))
        }
        _ => path.strip_prefix(root).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_with_the_name_of_a_kind_is_no_kind() {
        let hash = OsStr::new("0123456789abcdef0123456789abcdef");
        let root =
            |path: &'static str, first: Option<&str>| root_of_kind(Path::new(path), first.map(OsStr::new));
        assert_eq!(root("/srv/p/publish", None), Some(Path::new("/srv/p")));
        assert_eq!(root("/srv/p/live/staging", hash.to_str()), Some(Path::new("/srv/p")));
        assert_eq!(root("/srv/publish", Some("publish")), None);
        assert_eq!(root("/srv/publish", Some("live")), None);
        assert_eq!(root("/srv/publish/publish", hash.to_str()), Some(Path::new("/srv/publish")));
        assert_eq!(root("/srv/p/publish", Some("left")), Some(Path::new("/srv/p")));
        assert_eq!(root("/var/lib/csid", Some("plugins")), None);
    }

    #[test]
    fn part_below_is_what_path_strips() {
        let paths = [
            "/a/b", "/a/b/c", "/a/bc", "/a", "/a/", "/a/.", "/a/./b", "/a//b", "/a/b/", "/a/b/.", "/a/../b",
            "/a/.b", "/", "a/b", "",
        ];
        let roots = ["/a", "/a/", "/", "", "/a/b", "a", ".", "/a/.."];
        for (path, root) in paths.iter().flat_map(|path| roots.map(|root| (path, root))) {
            let stripped = Path::new(path).strip_prefix(root).ok();
            let found = part_below(Path::new(path), Path::new(root));
            assert_eq!(found.map(Path::as_os_str), stripped.map(Path::as_os_str), "{path} below {root}");
        }
    }
}
