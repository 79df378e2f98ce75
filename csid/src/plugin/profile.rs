//! The profiles of managed plugins.

use serde::{Deserialize, Serialize};

/// For which kind of driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Profile {
    /// Disks: local, iSCSI, NVMe, RBD.
    NodeBlock,
    /// Mounts that are processes, which outlive the plugin's own.
    NodeFuse,
    /// NFS, SMB and other file systems of the kernel's.
    NodeNet,
    /// Talks to its back end, and mounts nothing.
    Controller,
}

impl Profile {
    /// As calls say them; files say the same.
    pub const WORDS: [(&str, Self); 4] = [
        ("node-block", Profile::NodeBlock),
        ("node-fuse", Profile::NodeFuse),
        ("node-net", Profile::NodeNet),
        ("controller", Profile::Controller),
    ];
}
