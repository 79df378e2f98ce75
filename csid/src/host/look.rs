//! The result of a look at a path.

use serde::{Deserialize, Serialize};

/// The state of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Look {
    Missing,
    /// A directory, a file or another object without a mount. Not a block device.
    Plain,
    /// A directory with a file system mounted on it that answers.
    Mounted {
        device: u64,
        /// A process or another host serves it (FUSE, NFS). The mount dies with its server.
        served: bool,
    },
    /// A block device: its node, or one bound on a file.
    Device {
        rdev: u64,
    },
    /// The path exists but cannot be used. The error number: `ENOTCONN` and similar ones mean that the server is gone, `ENOTDIR` that
    /// something is mounted on a file, `ELOOP` a symbolic link.
    Dead(i32),
    /// The kernel did not answer in time.
    Hung,
}

impl Look {
    /// Returns whether both are mounts of the same file system, or the same block device.
    pub(super) fn shows_the_same(self, other: Look) -> bool {
        match (self, other) {
            (Look::Mounted { device, .. }, Look::Mounted { device: other, .. })
            | (Look::Device { rdev: device }, Look::Device { rdev: other }) => device == other,
            _ => false,
        }
    }

    /// Returns whether the server is gone for good, so that the mount can only be unmounted. A server that does not answer,
    /// or answers an error, may come back. SMB's client returns EHOSTDOWN while it connects again.
    pub fn has_lost_its_server(self) -> bool {
        let Look::Dead(code) = self else { return false };
        matches!(code, libc::ENOTCONN | libc::ECONNABORTED | libc::ESHUTDOWN | libc::ESTALE)
    }

    /// Returns whether the file handle is stale. NFS also returns this for a moment while its server exports again: probe again.
    pub fn is_stale(self) -> bool {
        self == Look::Dead(libc::ESTALE)
    }
}
