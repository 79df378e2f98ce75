//! Loop devices: which of them carry an image, attach and detach. The kernel alone knows what is attached; nothing is
//! remembered here. A loop device is an image's when the kernel says that it carries that very inode: names, and
//! numbers from before a reboot, prove nothing.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

use crate::error::{At, Error, Result};
use crate::sys;

/// The device and inode of an image.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Inode {
    device: u64,
    inode: u64,
}

impl Inode {
    pub fn of(image: &Path) -> Result<Inode> {
        let meta = image.metadata().at("look at", image)?;
        Ok(Inode { device: meta.dev(), inode: meta.ino() })
    }
}

/// An attached loop device, held open: an autoclear one stays for as long as this does.
pub struct Loop {
    pub number: u32,
    pub device: File,
    flags: u32,
}

impl Loop {
    pub fn read_only(&self) -> bool {
        self.flags & sys::LO_READ_ONLY != 0
    }

    pub fn autoclear(&self) -> bool {
        self.flags & sys::LO_AUTOCLEAR != 0
    }

    pub fn node(&self) -> PathBuf {
        node(self.number)
    }

    pub fn rdev(&self) -> Result<u64> {
        Ok(self.device.metadata().at("look at", &self.node())?.rdev())
    }

    pub fn take_new_size(&self) -> Result<()> {
        sys::loop_set_capacity(&self.device).at("set the size of", &self.node())
    }
}

fn node(number: u32) -> PathBuf {
    PathBuf::from(format!("/dev/loop{number}"))
}

/// Opens /dev/loopN, and makes the node where there is no udev to make it.
fn open(number: u32) -> io::Result<File> {
    let path = node(number);
    let open = || OpenOptions::new().read(true).open(&path);
    match open() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            let dev = std::fs::read_to_string(format!("/sys/block/loop{number}/dev"))?;
            let (major, minor) = dev.trim().split_once(':').ok_or(io::ErrorKind::InvalidData)?;
            let parse = |n: &str| n.parse().map_err(|_| io::ErrorKind::InvalidData);
            let dev = makedev(parse(major)?, parse(minor)?);
            match mknodat(CWD, &path, FileType::BlockDevice, Mode::from_raw_mode(0o660), dev) {
                Ok(()) | Err(rustix::io::Errno::EXIST) => open(),
                Err(e) => Err(e.into()),
            }
        }
        opened => opened,
    }
}

/// `loopN` when it carries the image; None when it carries another or nothing.
pub fn carries(number: u32, image: Inode) -> Result<Option<Loop>> {
    let device = match open(number) {
        Ok(device) => device,
        // Gone, or being detached, since it was listed.
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOENT | libc::ENXIO | libc::EBUSY)) => {
            return Ok(None);
        }
        Err(e) => return Err(e).at("open", &node(number)),
    };
    match sys::loop_status(&device) {
        Ok(info) if (Inode { device: info.device, inode: info.inode }) == image => {
            Ok(Some(Loop { number, device, flags: info.flags }))
        }
        Ok(_) => Ok(None),
        Err(e) if e.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        Err(e) => Err(e).at("ask", &node(number)),
    }
}

/// Every loop device that carries the image.
pub fn of_image(image: &Path) -> Result<Vec<Loop>> {
    let inode = Inode::of(image)?;
    let name = image_tail(image);
    let blocks = Path::new("/sys/block");
    let mut loops = Vec::new();
    for entry in blocks.read_dir().at("list", blocks)? {
        let entry = entry.at("list", blocks)?;
        let Some(number) = number_of(&entry.file_name().to_string_lossy()) else { continue };
        // The name is only a filter that saves opening the others: from another root the same file is below another.
        match std::fs::read_to_string(entry.path().join("loop/backing_file")) {
            Ok(backing) if backing.trim_end().trim_end_matches(" (deleted)").ends_with(&name) => {}
            _ => continue,
        }
        loops.extend(carries(number, inode)?);
    }
    loops.sort_by_key(|l| l.number);
    Ok(loops)
}

/// `ID/image`: the part of the image's path that is the same from every root.
fn image_tail(image: &Path) -> String {
    let parts: Vec<_> = image.iter().rev().take(2).map(|p| p.to_string_lossy()).collect();
    parts.into_iter().rev().collect::<Vec<_>>().join("/")
}

/// The loop device with these numbers, by its name in sysfs: partitions may shift the minors.
pub fn number_of_device(major: u32, minor: u32) -> Option<u32> {
    let target = std::fs::read_link(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    number_of(target.file_name()?.to_str()?)
}

fn number_of(name: &str) -> Option<u32> {
    name.strip_prefix("loop")?.parse().ok()
}

/// Attaches the image to a free device. An `autoclear` one goes with its last user; the caller holds it until a mount
/// does, so that a killed driver leaves none.
pub fn attach(image: &Path, read_only: bool, autoclear: bool) -> Result<Loop> {
    let path = Path::new("/dev/loop-control");
    let control = OpenOptions::new().read(true).write(true).open(path).map_err(|source| {
        tracing::error!("there are no loop devices here: load the kernel module `loop`");
        Error::Io { step: "open", path: path.to_owned(), source }
    })?;
    let backing = OpenOptions::new().read(true).write(!read_only).open(image).at("open", image)?;
    let mut flags = 0;
    if read_only {
        flags |= sys::LO_READ_ONLY;
    }
    if autoclear {
        flags |= sys::LO_AUTOCLEAR;
    }
    let info = sys::LoopInfo::new(flags, image.as_os_str().as_encoded_bytes());
    // Others on this kernel race for the same free device: the loser asks for the next one.
    let give_up = Instant::now() + Duration::from_secs(5);
    loop {
        let number = sys::loop_get_free(&control).at("find a free device with", path)? as u32;
        let configured = configure(number, &backing, info, !read_only);
        match configured {
            Ok(device) => return Ok(Loop { number, device, flags }),
            Err(e) if lost_race(&e) && Instant::now() < give_up => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(e) => return Err(e).at("attach the image to", &node(number)),
        }
    }
}

fn configure(number: u32, backing: &File, info: sys::LoopInfo, write: bool) -> io::Result<File> {
    drop(open(number)?); // makes the node where it is missing
    let device = OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags(rustix::fs::OFlags::CLOEXEC.bits() as i32)
        .open(node(number))?;
    sys::loop_configure(&device, backing, info)?;
    Ok(device)
}

fn lost_race(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EBUSY | libc::ENXIO | libc::ENOENT))
}

/// Detaches every device of the image; false when something still has one open: it goes when that closes it.
pub fn detach_all(image: &Path) -> Result<bool> {
    let give_up = Instant::now() + Duration::from_millis(500);
    loop {
        let loops = of_image(image)?;
        if loops.is_empty() {
            return Ok(true);
        }
        if Instant::now() > give_up {
            return Ok(false);
        }
        for attached in &loops {
            match sys::loop_clear(&attached.device) {
                Ok(()) => {}
                Err(e) if e.raw_os_error() == Some(libc::ENXIO) => {}
                Err(e) => return Err(e).at("detach", &attached.node()),
            }
        }
        // Only the last close detaches, and ours is one of them; udev's look at the device may be another.
        drop(loops);
        std::thread::sleep(Duration::from_millis(2));
    }
}
