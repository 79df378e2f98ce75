//! Mount namespaces and their mounts, as the system calls of Linux 6.12 and later show them: `NS_MNT_GET_NEXT`, `listmount` and
//! `statmount`. An older kernel, a filter of system calls, or a PID namespace other than the first one answers with an error. Constants are those of `linux/mount.h` and
//! `linux/nsfs.h`.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Error, Result};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::host::table::{Groups, MountEntry, NO_SOURCE};

/// The numbers of these calls are the same on every architecture that csid runs on. libc does not name them.
const SYS_STATMOUNT: libc::c_long = 457;
const SYS_LISTMOUNT: libc::c_long = 458;
/// Stands for the root of a namespace in a request of `listmount`.
const LSMT_ROOT: u64 = u64::MAX;
/// Mounts that one call of `listmount` returns at most. The kernel lets no process mount while it makes a page, and takes a time for
/// each mount that grows with the number of mounts below it. After a page of csid's own namespace that took less than [`QUICK`] csid asks
/// for a longer one. Users make other namespaces, and may make them slow.
const PAGE: usize = 128;
const LONG_PAGE: usize = 512;
const QUICK: Duration = Duration::from_micros(50);

const NS_MNT_GET_INFO: libc::c_ulong = ioctl_number(10);
const NS_MNT_GET_NEXT: libc::c_ulong = ioctl_number(11);
const NS_MNT_GET_PREV: libc::c_ulong = ioctl_number(12);

/// Returns the number of a request of nsfs that reads a [`NamespaceInfo`].
const fn ioctl_number(request: u8) -> libc::c_ulong {
    const READ: libc::c_ulong = 2;
    const NSFS: libc::c_ulong = 0xb7;
    READ << 30 | (size_of::<NamespaceInfo>() as libc::c_ulong) << 16 | NSFS << 8 | request as libc::c_ulong
}

#[repr(C)]
struct NamespaceInfo {
    size: u32,
    mounts: u32,
    id: u64,
}

/// The argument of `statmount` and `listmount`.
#[repr(C)]
struct Request {
    size: u32,
    spare: u32,
    mount: u64,
    /// Of `statmount`: the wanted fields. Of `listmount`: the mount after which the list continues.
    parameter: u64,
    namespace: u64,
}

/// The fixed part of the answer of `statmount`. A string is at its offset in the bytes that follow.
#[repr(C)]
struct Fixed {
    size: u32,
    mount_options: u32,
    mask: u64,
    major: u32,
    minor: u32,
    magic: u64,
    superblock_flags: u32,
    fs_type: u32,
    id: u64,
    parent: u64,
    old_id: u32,
    old_parent: u32,
    attributes: u64,
    propagation: u64,
    peer_group: u64,
    master: u64,
    propagate_from: u64,
    root: u32,
    point: u32,
    namespace: u64,
    fs_subtype: u32,
    source: u32,
    spare: [u64; 48],
}

const _: () = assert!(size_of::<Request>() == 32 && size_of::<Fixed>() == 512);

/// Three paths and the name of a file system, each with its NUL.
const STRINGS: usize = 3 * 4_096 + 256;

#[repr(C)]
struct Answer {
    fixed: Fixed,
    strings: [u8; STRINGS],
}

const SB_BASIC: u64 = 0x1;
const MNT_BASIC: u64 = 0x2;
const MNT_ROOT: u64 = 0x8;
const MNT_POINT: u64 = 0x10;
const FS_TYPE: u64 = 0x20;
const FS_SUBTYPE: u64 = 0x100;
const SB_SOURCE: u64 = 0x200;

/// Stands for csid's own namespace.
pub(super) const OWN: u64 = 0;

/// Returns the id of csid's own mount namespace, and those of the others, the ones with the fewest mounts first. The kernel never uses an id
/// again. A namespace in which csid lacks `CAP_SYS_ADMIN` is left out.
pub(super) fn namespaces() -> Result<(u64, Vec<u64>)> {
    let mut others = Vec::new();
    let own = each_namespace(|info, _| others.push((info.mounts, info.id)))?;
    others.sort_unstable();
    Ok((own, others.into_iter().map(|(_, id)| id).collect()))
}

/// Returns the inode numbers of these namespaces, as the links `/proc/PID/ns/mnt` of their processes have them, by the namespaces' ids. A
/// namespace that is gone has none.
pub(super) fn inodes(namespaces: &BTreeSet<u64>) -> Result<BTreeMap<u64, u64>> {
    let mut inodes = BTreeMap::new();
    each_namespace(|info, file| {
        if namespaces.contains(&info.id) {
            inodes.extend(file.metadata().ok().map(|of| (info.id, of.ino())));
        }
    })?;
    Ok(inodes)
}

/// Calls `found` for each mount namespace other than csid's own, and returns the id of csid's own.
fn each_namespace(mut found: impl FnMut(&NamespaceInfo, &File)) -> Result<u64> {
    let own = File::open("/proc/self/ns/mnt")?;
    let (own_info, _) = ask(&own, NS_MNT_GET_INFO)?;
    // A namespace that is made meanwhile may be missed: new ids are not above all others.
    for request in [NS_MNT_GET_PREV, NS_MNT_GET_NEXT] {
        let mut at: Option<File> = None;
        loop {
            match ask(at.as_ref().unwrap_or(&own), request) {
                Ok((info, Some(next))) => {
                    found(&info, &next);
                    at = Some(next);
                }
                Ok((_, None)) => break,
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => break,
                Err(error) => return Err(error),
            }
        }
    }
    Ok(own_info.id)
}

/// Sends a request about a namespace. Returns the answer, and the file that the request opens, if it opens one.
fn ask(file: &File, request: libc::c_ulong) -> Result<(NamespaceInfo, Option<File>)> {
    let size = u32::try_from(size_of::<NamespaceInfo>()).unwrap_or_default();
    let mut info = NamespaceInfo { size, mounts: 0, id: 0 };
    // SAFETY: the descriptor is open while `file` is borrowed. The request writes one `NamespaceInfo`.
    let answer = unsafe { libc::ioctl(file.as_raw_fd(), request as _, &raw mut info) };
    match answer {
        -1 => Err(Error::last_os_error()),
        _ if request == NS_MNT_GET_INFO => Ok((info, None)),
        // SAFETY: the request has just opened this descriptor, and nothing else owns it.
        opened => Ok((info, Some(unsafe { File::from_raw_fd(opened) }))),
    }
}

/// The ids of mounts, in ascending order.
pub(super) struct ListedMounts {
    pub ids: Vec<u64>,
    /// Whether the list ends before the namespace does, because it took too long.
    pub is_cut: bool,
}

/// Returns the mounts below `mount`, or as many as the kernel lists by `end`. With `None` they are all mounts that are in sight of a process
/// whose root is the namespace's: a mount over `/` hides those below it. Fails with `ENOENT` if the namespace or
/// the mount is gone.
pub(super) fn mounts(namespace: u64, mount: Option<u64>, end: Instant) -> Result<ListedMounts> {
    let mut found: Vec<u64> = Vec::new();
    let (mut page, mut length) = ([0_u64; LONG_PAGE], PAGE);
    let mut begun = Instant::now();
    loop {
        let last = found.last().copied().unwrap_or_default();
        let request =
            Request { size: size(), spare: 0, mount: mount.unwrap_or(LSMT_ROOT), parameter: last, namespace };
        // SAFETY: `request` lives through the call. The call writes `length` numbers at most, for which `page` has room.
        let count =
            unsafe { libc::syscall(SYS_LISTMOUNT, &raw const request, page.as_mut_ptr(), length, 0_u32) };
        let Ok(count) = usize::try_from(count) else { return Err(Error::last_os_error()) };
        found.extend_from_slice(&page[..count]);
        if count < length {
            return Ok(ListedMounts { ids: found, is_cut: false });
        }
        let now = Instant::now();
        if now >= end {
            return Ok(ListedMounts { ids: found, is_cut: true });
        }
        length = next_page(namespace, now - begun);
        begun = now;
    }
}

/// Returns the length of the page that follows one that took so long.
fn next_page(namespace: u64, took: Duration) -> usize {
    if namespace == OWN && took < QUICK { LONG_PAGE } else { PAGE }
}

fn size() -> u32 {
    u32::try_from(size_of::<Request>()).unwrap_or_default()
}

/// A buffer for the answers of `statmount`.
pub(super) struct Stat(Box<Answer>);

impl Stat {
    pub fn new() -> Self {
        // SAFETY: an answer has only integers, for which zeroes are valid.
        Stat(unsafe { Box::new_zeroed().assume_init() })
    }

    /// Asks for the fields `mask` of a mount. Fails with `ENOENT` if the mount is gone.
    fn ask(&mut self, namespace: u64, mount: u64, mask: u64) -> Result<&Answer> {
        let request = Request { size: size(), spare: 0, mount, parameter: mask, namespace };
        // SAFETY: `request` lives through the call, which writes as many bytes as the size says at most.
        let answer = unsafe {
            libc::syscall(SYS_STATMOUNT, &raw const request, &raw mut *self.0, size_of::<Answer>(), 0_u32)
        };
        match answer {
            0 => Ok(&self.0),
            _ => Err(Error::last_os_error()),
        }
    }

    /// Returns a mount's id in `mountinfo`, and the number of its file system. Neither ever changes.
    pub fn identity(&mut self, namespace: u64, mount: u64) -> Result<(u64, u64)> {
        let fixed = &self.ask(namespace, mount, SB_BASIC | MNT_BASIC)?.fixed;
        Ok((u64::from(fixed.old_id), rustix::fs::makedev(fixed.major, fixed.minor)))
    }

    /// Returns the mount that a mount is mounted on. The bottom mount of a namespace is mounted on itself.
    pub fn parent(&mut self, namespace: u64, mount: u64) -> Result<u64> {
        Ok(self.ask(namespace, mount, MNT_BASIC)?.fixed.parent)
    }

    /// Returns the groups by which a mount receives and passes on unmounts.
    pub fn groups(&mut self, namespace: u64, mount: u64) -> Result<Groups> {
        Ok(self.ask(namespace, mount, MNT_BASIC)?.fixed.groups())
    }

    /// Returns the directory of its file system that a mount of csid's own namespace shows, and the mount's path.
    pub fn own_root_and_path(&mut self, mount: u64) -> Result<(&Path, &Path)> {
        let answer = self.ask(OWN, mount, MNT_ROOT | MNT_POINT)?;
        let path = |offset| Path::new(OsStr::from_bytes(answer.string(offset)));
        Ok((path(answer.fixed.root), path(answer.fixed.point)))
    }

    /// Returns all that csid reads of a mount. Its ids are those of `listmount`, and its path begins at the root of its namespace.
    /// Its file system's type has no subtype.
    pub fn entry(&mut self, namespace: u64, mount: u64) -> Result<MountEntry> {
        let answer = self.ask(namespace, mount, SB_BASIC | MNT_BASIC | MNT_ROOT | MNT_POINT | FS_TYPE)?;
        let fixed = &answer.fixed;
        let path = |offset| PathBuf::from(OsStr::from_bytes(answer.string(offset)));
        Ok(MountEntry {
            id: fixed.id,
            parent: fixed.parent,
            device: rustix::fs::makedev(fixed.major, fixed.minor),
            root: path(fixed.root),
            path: path(fixed.point),
            source: String::new(),
            fs_type: String::from_utf8_lossy(answer.string(fixed.fs_type)).into_owned(),
            read_only: fixed.attributes & libc::MOUNT_ATTR_RDONLY != 0,
            groups: fixed.groups(),
        })
    }

    /// Returns a mount of csid's own namespace as `mountinfo` shows it, without its groups. Needs Linux 6.13.
    pub fn own_entry(&mut self, mount: u64) -> Result<MountEntry> {
        let wanted = SB_BASIC | MNT_BASIC | MNT_ROOT | MNT_POINT | FS_TYPE | FS_SUBTYPE | SB_SOURCE;
        let answer = self.ask(OWN, mount, wanted)?;
        let fixed = &answer.fixed;
        let path = |offset| PathBuf::from(OsStr::from_bytes(answer.string(offset)));
        let has = |field| fixed.mask & field != 0;
        let text = |offset| String::from_utf8_lossy(answer.string(offset)).into_owned();
        let mut fs_type = text(fixed.fs_type);
        if has(FS_SUBTYPE) {
            fs_type = format!("{fs_type}.{}", text(fixed.fs_subtype));
        }
        Ok(MountEntry {
            id: u64::from(fixed.old_id),
            parent: u64::from(fixed.old_parent),
            device: rustix::fs::makedev(fixed.major, fixed.minor),
            root: path(fixed.root),
            path: path(fixed.point),
            source: if has(SB_SOURCE) { text(fixed.source) } else { NO_SOURCE.into() },
            fs_type,
            read_only: fixed.attributes & libc::MOUNT_ATTR_RDONLY != 0,
            groups: Groups::default(),
        })
    }
}

/// Returns what an answer about a mount or a namespace says. `None`: it is gone.
pub(super) fn unless_gone<T>(answer: Result<T>) -> Result<Option<T>> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Fixed {
    fn groups(&self) -> Groups {
        let group = |number| Some(number).filter(|number| *number != 0);
        // The nearest group in the caller's sight says nothing about other namespaces.
        Groups { shared: group(self.peer_group), master: group(self.master), propagate_from: None }
    }
}

impl Answer {
    /// Returns the string at an offset, without its NUL.
    fn string(&self, offset: u32) -> &[u8] {
        let rest = self.strings.get(offset as usize..).unwrap_or_default();
        rest.split(|byte| *byte == 0).next().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_csids_own_namespace_has_long_pages() {
        for (namespace, took, length) in
            [(OWN, Duration::ZERO, LONG_PAGE), (OWN, QUICK, PAGE), (7, Duration::ZERO, PAGE)]
        {
            assert_eq!(next_page(namespace, took), length, "{namespace} {took:?}");
        }
    }
}
