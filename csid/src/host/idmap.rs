//! ID-mapped mounts: the owners of files as a user namespace maps them.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use rustix::io::Errno;

use crate::host::error::{HostError, at};
use crate::host::raw::{self, NamespaceKind};

/// Maps the owners of the files on a detached mount by a user namespace. `source`: where the mount was cloned, for errors.
///
/// The descriptor may be of any file. Its link is read first, because an ioctl of a file reaches the file system's server.
pub(super) fn map(tree: &OwnedFd, userns: &OwnedFd, source: &Path) -> Result<(), HostError> {
    let refused = |why: &'static str| HostError::NotUserNamespace { why: why.into() };
    let link = rustix::fs::readlink(format!("/proc/self/fd/{}", userns.as_raw_fd()), Vec::new());
    let is_namespace = link.is_ok_and(|link| link.to_bytes().starts_with(b"user:["))
        && raw::namespace_kind(userns.as_fd()).is_ok_and(|kind| kind == NamespaceKind::USER);
    if !is_namespace {
        return Err(refused("it is of something else, or was opened with O_PATH"));
    }
    if is_own(userns)? {
        return Err(refused("it is csid's own, which maps no owner to another one"));
    }
    raw::map_ids(tree.as_fd(), userns.as_fd()).map_err(|source_error| {
        match Errno::from_raw_os_error(source_error.raw_os_error().unwrap_or_default()) {
            Errno::INVAL => HostError::NotIdMapped(source.into()),
            Errno::PERM => HostError::NotIdMappable(source.into()),
            error => at("map the owners of files at", source)(error),
        }
    })
}

/// Returns whether this process is in the user namespace.
fn is_own(userns: &OwnedFd) -> Result<bool, HostError> {
    let own = Path::new("/proc/self/ns/user");
    let number = |stat: rustix::fs::Stat| (stat.st_dev, stat.st_ino);
    let stat = rustix::fs::stat(own).map_err(at("look at", own))?;
    let given = rustix::fs::fstat(userns).map_err(at("compare the user namespace with", own))?;
    Ok(number(stat) == number(given))
}
