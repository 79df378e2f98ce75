//! Calls to the kernel: what lies at a path, csid's directories, binds to a consumer's target, the boot's id.
//!
//! State: none about mounts; the kernel is asked each time. Always true:
//! - No path is followed through a symbolic link, in any part of it. Directories that the configuration names
//!   are resolved at start and at a reload ([`Host::resolve`]).
//! - What is created, mounted, unmounted or removed is reached by descriptor, or by name in its parent's
//!   descriptor: never by a path walked twice. Nothing is removed recursively, and nothing with something
//!   mounted on it.
//! - Calls that a file system's server can hold up (NFS, FUSE) are made by the helper, another process, with a deadline for the
//!   one that waits. A call that hung may still be carried out; once nothing waits for it, it takes no further step.

mod base;
mod bind;
pub mod boot;
mod caller;
mod calls;
pub mod cgroup;
mod copies;
pub mod credential;
mod deadline;
mod device;
mod elsewhere;
mod ends;
pub mod enter;
mod error;
pub mod exec;
mod held_live;
pub mod helper;
mod idmap;
mod live;
pub mod log;
mod look;
mod lookout;
mod mount;
mod mount_changes;
mod mount_index;
mod namespace_tables;
mod namespaces;
pub mod oneshot;
mod own_mounts;
mod own_paths;
mod path;
mod process_tables;
mod raw;
pub(crate) mod sandbox;
mod sealed;
mod search;
mod statmount;
mod table;
mod target;
pub mod unit_signals;
pub mod units;

use std::path::{Path, PathBuf};

pub use base::part_below;
pub use bind::{Bind, Restrict, Unbind};
pub use calls::{Host, TargetFd};
pub use elsewhere::OwnMounts;
pub use ends::{EndWatch, KnownEnds};
pub use error::HostError;
pub use helper::{Sifted, Tree};
pub use live::Live;
pub use look::Look;
pub use namespaces::{Backing, MountElsewhere, PlacedMount, Shown, Sought};
pub use own_paths::{OwnPath, OwnPaths};
pub use path::Access;
pub use table::{MountPoint, MountTable, TableMount, plain};

/// Returns the name of a directory without symbolic links, as all of this module wants it. It walks in this process, so the
/// directory has to be csid's own.
pub fn resolve(directory: &Path) -> Result<PathBuf, HostError> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(directory, flags, Mode::empty()).map_err(error::at("open", directory))?;
    let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
    std::fs::read_link(link).map_err(|source| HostError::Os {
        step: "name".into(),
        path: directory.into(),
        source,
    })
}

/// Reads the mount table. No file system is asked for it. `None`: it cannot be read, so each path has to be probed.
pub async fn mount_table() -> Option<MountTable> {
    let table = table::blocking(MountTable::read).await;
    table.inspect_err(|error| tracing::warn!(%error, "the mount table cannot be read")).ok()
}

/// Limits the memory that the allocator keeps. Call this before there is a second thread.
pub fn keep_heap_small() {
    raw::keep_heap_small();
}

/// Give memory back to the host, after something that needed much for a moment.
pub fn trim_memory() {
    raw::trim();
}
