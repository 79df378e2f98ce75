//! Whether a block device is still in use by the kernel, asked after its volume was unmounted.

use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::host::error::HostError;
use crate::host::table;

/// File systems that show their mounted devices in `/sys/fs`.
const IN_SYSFS: [&str; 4] = ["ext4", "xfs", "f2fs", "jfs"];

/// A block device, distinct from a later one with the same number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BlockDevice {
    pub number: u64,
    /// The name of the device in `/sys` and, with `/` for `!`, in `/dev`.
    pub name: String,
    /// The kernel counts the disks that a device was, from Linux 5.15 on: a loop device that is attached to another file has
    /// another number. `None`: the kernel does not count.
    disk: Option<u64>,
}

impl BlockDevice {
    /// Returns the block device with this number. `None`: there is none, as for a file system without a device.
    pub fn of(number: u64) -> Option<Self> {
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let directory = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        let name = std::fs::read_link(&directory).ok()?.file_name()?.to_str()?.to_owned();
        // A partition's is its disk's.
        let count = ["diskseq", "../diskseq"]
            .into_iter()
            .find_map(|file| std::fs::read_to_string(directory.join(file)).ok()?.trim().parse().ok());
        Some(BlockDevice { number, name, disk: count })
    }

    pub fn path(&self) -> PathBuf {
        Path::new("/dev").join(self.name.replace('!', "/"))
    }
}

/// Returns the device's name if [`is_held`]. `shows`: the volume's mounts showed its file system, so that what the host itself shows
/// of that is the plugin's, or of other volumes.
pub(super) fn held(device: &BlockDevice, shows: bool) -> Result<Option<String>, HostError> {
    if shows && table::shows(device.number)? {
        return Ok(None);
    }
    Ok(is_held(device).then(|| device.name.clone()))
}

/// Returns whether a mounted file system or another exclusive user has the device. The open may block on a device that hangs.
/// A device that is another one by now, or none, is free.
fn is_held(device: &BlockDevice) -> bool {
    let is_same = || BlockDevice::of(device.number).as_ref() == Some(device);
    if !is_same() {
        return false;
    }
    let path = device.path();
    let is_its_node = rustix::fs::lstat(&path).is_ok_and(|node| {
        FileType::from_raw_mode(node.st_mode) == FileType::BlockDevice && node.st_rdev == device.number
    });
    if !is_its_node {
        return is_mounted(&device.name);
    }
    // An exclusive open fails while the kernel has the device for a mount, and takes nothing from who has it open.
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::open(&path, flags, Mode::empty()) {
        Ok(_) | Err(Errno::NOENT | Errno::NXIO | Errno::NODEV | Errno::NOMEDIUM) => false,
        Err(Errno::BUSY) => is_same(),
        // EPERM is the device policy of csid's unit.
        Err(_) => is_mounted(&device.name),
    }
}

/// By what the commonest file systems say of themselves.
fn is_mounted(name: &str) -> bool {
    IN_SYSFS.into_iter().any(|kind| Path::new("/sys/fs").join(kind).join(name).exists())
}
