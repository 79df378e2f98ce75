//! The one system call that rustix 1.1 has no name for.

use std::io::{Error, Result};
use std::os::fd::{AsRawFd, BorrowedFd};

pub(super) const RDONLY: u64 = libc::MOUNT_ATTR_RDONLY;
pub(super) const NOSUID: u64 = libc::MOUNT_ATTR_NOSUID;
pub(super) const NODEV: u64 = libc::MOUNT_ATTR_NODEV;

/// How mount events pass between a mount and its peers.
#[derive(Clone, Copy)]
#[repr(u64)]
pub(super) enum Peers {
    Unchanged = 0,
    Private = libc::MS_PRIVATE,
    Slave = libc::MS_SLAVE,
    Shared = libc::MS_SHARED,
}

/// Set attributes of the one mount whose root `mount` is; those below it keep theirs.
pub(super) fn mount_setattr(mount: BorrowedFd<'_>, set: u64, peers: Peers) -> Result<()> {
    let attr = libc::mount_attr { attr_set: set, attr_clr: 0, propagation: peers as u64, userns_fd: 0 };
    // SAFETY: the descriptor is open as long as it is borrowed; the path is a NUL-terminated constant; `attr`
    // lives through the call, which reads as many bytes of it as the size says.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    };
    if answer == 0 { Ok(()) } else { Err(Error::last_os_error()) }
}

/// Give memory that was freed back to the host; the allocator keeps it otherwise.
pub(super) fn trim() {
    // SAFETY: malloc_trim has no preconditions; it returns pages of the heap that nothing is in.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}
