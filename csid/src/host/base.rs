//! The directories below which csid walks, and the system call by which it walks.

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

    pub fn open(&self) -> rustix::io::Result<Opened<'a>> {
        match self.held {
            Some(held) => Ok(Opened::Held(held)),
            None => open_unheld(self.path, OFlags::PATH).map(Opened::Own),
        }
    }

    pub fn open_for_reading(&self) -> Result<OwnedFd, HostError> {
        let opened = match self.held {
            Some(held) => openat2(
                held,
                Path::new("."),
                OFlags::RDONLY | OFlags::DIRECTORY,
                ResolveFlags::BENEATH | ResolveFlags::NO_XDEV,
            ),
            None => open_unheld(self.path, OFlags::RDONLY),
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
fn open_unheld(path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let flags = flags | OFlags::DIRECTORY;
    let Some(root) = root_of_kind(path) else {
        return openat2(CWD, path, flags, ResolveFlags::empty());
    };
    let below = path.strip_prefix(root).map_err(|_| Errno::INVAL)?;
    let root = openat2(CWD, root, OFlags::PATH | OFlags::DIRECTORY, ResolveFlags::empty())?;
    openat2(root, below, flags, ResolveFlags::BENEATH | ResolveFlags::NO_XDEV)
}

/// Returns ROOT of a path `ROOT/KIND` or `ROOT/live/KIND`. `None`: the path is no such path.
pub(super) fn root_of_kind(path: &Path) -> Option<&Path> {
    let directory = path.parent().filter(|_| KINDS.iter().any(|kind| path.ends_with(kind)))?;
    if directory.ends_with(LIVE) { directory.parent() } else { Some(directory) }
}
