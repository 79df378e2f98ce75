//! A descriptor of a target, which root opened. A process that opens a path below a pending automount waits for the automount's
//! daemon. Only the daemon's own process group passes. So a process of that group opens the target, and csid never walks there.
//!
//! csid's tables prove where the descriptor is. No file system is asked, so nothing here can hang.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{OFlags, fcntl_getfl};

use crate::host::error::HostError;
use crate::host::table::{self, MountTable};

/// The kind of object at a target, by a descriptor that was proven to be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum At {
    /// A directory or file with nothing of anybody's mounted on it, or a bare automount.
    Free,
    /// The root of the mount at the target.
    Mount,
}

/// Proves that `fd` is what a walk to `target` would end on, if no automount kept it waiting.
pub(super) fn prove(fd: BorrowedFd<'_>, target: &Path) -> Result<At, HostError> {
    let not = |why: &'static str| HostError::NotTarget { path: target.into(), why: why.into() };
    if !fcntl_getfl(fd).is_ok_and(|flags| flags.contains(OFlags::PATH)) {
        return Err(not("it was not opened with O_PATH"));
    }
    let number = fd.as_raw_fd();
    let name = rustix::fs::readlink(format!("/proc/self/fd/{number}"), Vec::new());
    if !name.is_ok_and(|name| name.to_bytes() == target.as_os_str().as_bytes()) {
        return Err(not("it is at another path"));
    }
    let mount = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}")).ok();
    let mount = mount.as_deref().and_then(mount_id).ok_or_else(|| not("its mount is not known"))?;
    let table = MountTable::read()?;
    // A copy of the mount in another mount namespace has the same path there, and another number.
    match table.entry_around(target).filter(|entry| entry.id == mount) {
        None => Err(not("it is on another mount than the path, or in another mount namespace")),
        Some(entry) if entry.path == target && !table::is_autofs(&entry) => Ok(At::Mount),
        Some(entry) if entry.path == target && table.covers_a_mount(&entry) => {
            Err(not("a mount lies below the automount"))
        }
        Some(_) => Ok(At::Free),
    }
}

/// The number of the mount in the text of a `fdinfo`.
fn mount_id(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok())
}
