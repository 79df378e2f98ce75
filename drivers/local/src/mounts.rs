//! Mounts: what is at a path, mounting, binding, unmounting. The kernel alone knows what is mounted; nothing is
//! remembered here, and nothing is unmounted or removed that is not the volume's.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatVfsMountFlags, StatxAttributes, StatxFlags, statvfs, statx, syncfs};
use rustix::mount::{
    MountFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, mount, move_mount, open_tree, unmount,
};

use crate::capability::MountOptions;
use crate::error::{At, Error, Result};
use crate::loops::{self, Inode, Loop};
use crate::store::{Content, Volume};
use crate::sys;

/// What is at a path, as far as one volume is concerned.
pub enum There {
    Nothing,
    /// Something that is not a mount: what an interrupted call left, or the caller made.
    NoMount(std::fs::Metadata),
    /// The volume, on this loop device.
    Volume(Loop),
    /// A mount of something else.
    Foreign,
}

pub fn look(path: &Path, volume: &Volume) -> Result<There> {
    let meta = match path.symlink_metadata() {
        Ok(meta) => meta,
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(There::Nothing);
        }
        Err(e) => return Err(e).at("look at", path),
    };
    if !is_mount(path)? {
        return Ok(There::NoMount(meta));
    }
    let dev = if meta.file_type().is_block_device() { meta.rdev() } else { meta.dev() };
    let number = loops::number_of_device(rustix::fs::major(dev), rustix::fs::minor(dev));
    let Some(number) = number else { return Ok(There::Foreign) };
    Ok(loops::carries(number, Inode::of(&volume.image())?)?.map_or(There::Foreign, There::Volume))
}

fn is_mount(path: &Path) -> Result<bool> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    let stat = statx(CWD, path, flags, StatxFlags::BASIC_STATS).at("look at", path)?;
    Ok(stat.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

pub fn is_read_only(path: &Path) -> Result<bool> {
    Ok(statvfs(path).at("look at", path)?.f_flag.contains(StatVfsMountFlags::RDONLY))
}

/// Mounts the volume's file-system on a directory that exists.
pub fn mount_filesystem(content: Content, attached: &Loop, at: &Path, options: &MountOptions) -> Result<()> {
    let data = options.data.as_deref();
    match mount(attached.node(), at, content.name(), options.flags, data) {
        Err(rustix::io::Errno::INVAL) if data.is_some() => {
            Err(Error::Invalid(format!("{} refuses one of the mount flags", content.name())))
        }
        mounted => mounted.at("mount the volume on", at),
    }
}

/// Has the image hold what the volume's users have written so far.
pub fn flush(volume: &Volume) -> Result<()> {
    for attached in loops::of_image(&volume.image())? {
        for user in users(&attached, Path::new(""))? {
            // A mount below another one cannot be reached by its path.
            if volume.meta.content != Content::Block && matches!(look(&user, volume)?, There::Volume(_)) {
                let mounted = File::open(&user).at("open", &user)?;
                syncfs(mounted).at("sync", &user)?;
                break;
            }
        }
        attached.device.sync_all().at("sync", &attached.node())?;
    }
    Ok(())
}

/// Makes `target` the same mount as `source`. A read-only one is never seen writable.
pub fn bind(source: &Path, target: &Path, read_only: bool) -> Result<()> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let tree = open_tree(CWD, source, flags).at("open", source)?;
    if read_only {
        sys::mount_set_read_only(&tree).at("make read-only what goes to", target)?;
    }
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    move_mount(&tree, "", CWD, target, flags).at("bind the volume on", target)
}

/// The directory or file that a mount goes on, if it is not there yet: the caller makes its parent (CO rule 29).
pub fn make_target(target: &Path, content: Content) -> Result<()> {
    let made = if content == Content::Block {
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(target).map(drop)
    } else {
        std::fs::create_dir(target)
    };
    match made {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made.at("make", target),
    }
}

/// Unmounts the volume from the path, however often it is there.
pub fn unmount_volume(path: &Path, volume: &Volume) -> Result<()> {
    loop {
        match look(path, volume)? {
            There::Nothing | There::NoMount(_) => return Ok(()),
            There::Foreign => return Err(foreign(path, volume)),
            There::Volume(attached) => drop(attached),
        }
        match unmount(path, UnmountFlags::NOFOLLOW) {
            Err(rustix::io::Errno::BUSY) => {
                return Err(Error::Precondition(format!(
                    "volume {} is in use at {}; stop what uses it (`fuser -vm` names it)",
                    volume.id,
                    path.display()
                )));
            }
            unmounted => unmounted.at("unmount", path)?,
        }
    }
}

pub fn foreign(path: &Path, volume: &Volume) -> Error {
    Error::Precondition(format!(
        "something that is not volume {} is mounted on {}; unmount it first",
        volume.id,
        path.display()
    ))
}

/// Removes the empty directory or file that a volume was mounted on; anything else there is not ours.
pub fn remove_target(target: &Path) -> Result<()> {
    let meta = match target.symlink_metadata() {
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(()),
        meta => meta.at("look at", target)?,
    };
    if meta.is_dir() {
        std::fs::remove_dir(target).at("remove", target)
    } else if meta.is_file() && meta.len() == 0 {
        std::fs::remove_file(target).at("remove", target)
    } else {
        Err(Error::Precondition(format!("{} is not a target of ours; remove it first", target.display())))
    }
}

/// Where this loop device is mounted or, as a node, bound, in this mount namespace; `but` is left out.
pub fn users(attached: &Loop, but: &Path) -> Result<Vec<PathBuf>> {
    let path = Path::new("/proc/self/mountinfo");
    let table = std::fs::read(path).at("read", path)?;
    let rdev = attached.rdev()?;
    let device = format!("{}:{}", rustix::fs::major(rdev), rustix::fs::minor(rdev));
    let node = format!("/loop{}", attached.number);
    let mut users = Vec::new();
    for line in table.split(|byte| *byte == b'\n') {
        let mut fields = line.split(|byte| *byte == b' ').skip(2);
        let (Some(dev), Some(root), Some(point)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let point = unescape(point);
        let bound = root.ends_with(node.as_bytes()) && !point.starts_with("/dev") && is_node(&point, rdev);
        if (dev == device.as_bytes() || bound) && point != but {
            users.push(point);
        }
    }
    Ok(users)
}

fn is_node(path: &Path, rdev: u64) -> bool {
    path.symlink_metadata().is_ok_and(|m| m.file_type().is_block_device() && m.rdev() == rdev)
}

/// mountinfo writes space, tab, newline and backslash as `\ooo`.
fn unescape(field: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((byte, tail)) = rest.split_first() {
        let octal = (*byte == b'\\').then(|| tail.get(..3)).flatten().and_then(|digits| {
            let digits = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(digits, 8).ok()
        });
        match octal {
            Some(value) => {
                bytes.push(value);
                rest = &tail[3..];
            }
            None => {
                bytes.push(*byte);
                rest = tail;
            }
        }
    }
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

/// The mount flags that are bits; what is left is the file-system's.
pub fn parse_flags(flags: &[String]) -> (MountFlags, Vec<&str>) {
    let mut bits = MountFlags::empty();
    let mut data = Vec::new();
    for flag in flags.iter().flat_map(|f| f.split(',')) {
        match flag {
            "" | "defaults" => {}
            "rw" => bits.remove(MountFlags::RDONLY),
            "ro" => bits.insert(MountFlags::RDONLY),
            "suid" => bits.remove(MountFlags::NOSUID),
            "nosuid" => bits.insert(MountFlags::NOSUID),
            "dev" => bits.remove(MountFlags::NODEV),
            "nodev" => bits.insert(MountFlags::NODEV),
            "exec" => bits.remove(MountFlags::NOEXEC),
            "noexec" => bits.insert(MountFlags::NOEXEC),
            "atime" => bits.remove(MountFlags::NOATIME),
            "noatime" => bits.insert(MountFlags::NOATIME),
            "diratime" => bits.remove(MountFlags::NODIRATIME),
            "nodiratime" => bits.insert(MountFlags::NODIRATIME),
            "relatime" => bits.insert(MountFlags::RELATIME),
            "strictatime" => bits.insert(MountFlags::STRICTATIME),
            "async" => bits.remove(MountFlags::SYNCHRONOUS),
            "sync" => bits.insert(MountFlags::SYNCHRONOUS),
            "dirsync" => bits.insert(MountFlags::DIRSYNC),
            "lazytime" => bits.insert(MountFlags::LAZYTIME),
            other => data.push(other),
        }
    }
    (bits, data)
}

/// The open node, to see that the bound one is the device and not the file it was bound on.
pub fn is_bound_device(target: &Path, attached: &Loop) -> Result<bool> {
    let meta = File::open(target).and_then(|f| f.metadata()).at("look at", target)?;
    Ok(meta.file_type().is_block_device() && meta.rdev() == attached.rdev()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_paths_are_unescaped() {
        assert_eq!(unescape(br"/a\040b\134\011c\0"), Path::new("/a b\\\tc\\0"));
    }

    #[test]
    fn the_later_flag_wins_and_the_rest_is_data() {
        let flags = ["ro,noatime".to_owned(), "rw".to_owned(), "commit=5,defaults".to_owned()];
        assert_eq!(parse_flags(&flags), (MountFlags::NOATIME, vec!["commit=5"]));
    }
}
