//! System calls that rustix has no safe name for.

use std::io::{Error, Result};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::AtomicU64;

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
    set_attributes(
        mount,
        libc::mount_attr { attr_set: set, attr_clr: 0, propagation: peers as u64, userns_fd: 0 },
    )
}

/// Maps the owners of the files on the one mount whose root `mount` is.
pub(super) fn map_ids(mount: BorrowedFd<'_>, userns: BorrowedFd<'_>) -> Result<()> {
    let userns_fd = u64::try_from(userns.as_raw_fd()).map_err(|_| Error::from_raw_os_error(libc::EBADF))?;
    let attr_set = libc::MOUNT_ATTR_IDMAP;
    set_attributes(mount, libc::mount_attr { attr_set, attr_clr: 0, propagation: 0, userns_fd })
}

fn set_attributes(mount: BorrowedFd<'_>, attr: libc::mount_attr) -> Result<()> {
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

/// The kind of a namespace, a flag of clone(2).
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct NamespaceKind(libc::c_int);

impl NamespaceKind {
    pub(super) const USER: NamespaceKind = NamespaceKind(libc::CLONE_NEWUSER);
}

/// Returns the kind of the namespace that `fd` is of (ioctl_nsfs(2)).
pub(super) fn namespace_kind(fd: BorrowedFd<'_>) -> Result<NamespaceKind> {
    const NS_GET_NSTYPE: libc::Ioctl = 0xb703;
    // SAFETY: the descriptor is open as long as it is borrowed; the request has no argument.
    match unsafe { libc::ioctl(fd.as_raw_fd(), NS_GET_NSTYPE) } {
        -1 => Err(Error::last_os_error()),
        kind => Ok(NamespaceKind(kind)),
    }
}

/// Forks this process; `None` in the child. It must have one thread.
pub(super) fn fork() -> Result<Option<rustix::process::Pid>> {
    // SAFETY: the process has one thread, so the child's memory is whole: no lock of another thread's is held in it.
    match unsafe { libc::fork() } {
        -1 => Err(Error::last_os_error()),
        0 => Ok(None),
        pid => Ok(rustix::process::Pid::from_raw(pid)),
    }
}

/// Closes standard input; nothing of this process reads it afterwards.
pub(super) fn close_stdin() {
    // SAFETY: the descriptor is not owned by any value; the process uses it no more.
    unsafe { libc::close(libc::STDIN_FILENO) };
}

/// Closes every descriptor of this process, and ends it. A thread that waits in the kernel keeps the process, but no
/// descriptor; if the close of one waits, too, those after it stay.
pub(super) fn close_all_and_end() -> ! {
    // SAFETY: what other threads do with the numbers of closed descriptors is over with the next call. The end needs no destructor.
    unsafe {
        libc::syscall(libc::SYS_close_range, 0_u32, u32::MAX, 0_u32);
        libc::_exit(0)
    }
}

/// Returns `count` zeroes that processes forked from now on have in common with this one, for as long as each lives.
pub(super) fn shared_memory(count: usize) -> Result<&'static [AtomicU64]> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    let length = count * size_of::<AtomicU64>();
    // SAFETY: a new mapping at an address of the kernel's choice takes the place of nothing.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, -1, 0) };
    if address == libc::MAP_FAILED {
        return Err(Error::last_os_error());
    }
    // SAFETY: the mapping is page-aligned, as long as that, and never unmapped; zeroes are atomic integers.
    Ok(unsafe { std::slice::from_raw_parts(address.cast(), count) })
}

/// Makes the allocator give large blocks back at once, and makes all threads use one heap. By itself it keeps a freed block of some
/// megabytes, and small blocks that live long are put into it. Each thread then does so in a heap of its own.
pub(super) fn keep_heap_small() {
    const LARGE: libc::c_int = 128 * 1024;
    // SAFETY: mallopt sets numbers of the allocator. No other thread runs yet.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Give memory that was freed back to the host; the allocator keeps it otherwise.
pub(super) fn trim() {
    // SAFETY: malloc_trim has no preconditions; it returns pages of the heap that nothing is in.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}
