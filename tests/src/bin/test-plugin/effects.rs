//! The mounts the plugin makes, honestly or not. All of them are idempotent.

use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use csid_tests::script::{Call, Device, Lie};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::mount::{MountFlags, UnmountFlags, mount_bind, mount_remount, unmount};
use tonic::Status;

use crate::fuse::{self, Life};

/// Where a volume's data is: it outlives every mount.
fn data(directory: &Path, volume: &str) -> io::Result<PathBuf> {
    let name: String = volume.bytes().map(|byte| format!("{byte:02x}")).collect();
    let path = directory.join("data").join(name);
    fs::create_dir_all(&path)?;
    Ok(path)
}

/// By the number of its mount, which is its parent's where nothing is mounted: no file system is asked, and no table of
/// a thousand mounts read.
fn mounted(path: &Path) -> Result<bool, Status> {
    let number = |path: &Path| -> io::Result<String> {
        let file = openat(CWD, path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let facts = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
        facts
            .lines()
            .find_map(|l| l.strip_prefix("mnt_id:"))
            .map(str::to_owned)
            .ok_or(io::ErrorKind::Other.into())
    };
    let parent = path.parent().ok_or_else(|| Status::invalid_argument("no path of a mount"))?;
    match number(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        own => Ok(own.map_err(internal)? != number(parent).map_err(internal)?),
    }
}

fn internal(error: io::Error) -> Status {
    Status::internal(error.to_string())
}

pub fn stage(directory: &Path, call: &Call, lie: Option<Lie>) -> Result<(), Status> {
    let staging = Path::new(&call.staging);
    if !staging.is_dir() {
        return Err(Status::failed_precondition("the staging path is no directory (CO rule 28)"));
    }
    // A block volume is only noted: nothing is mounted at its staging path.
    if call.block || lie == Some(Lie::Nothing) || mounted(staging)? {
        return Ok(());
    }
    let data = data(directory, &call.volume).map_err(internal)?;
    mount_bind(&data, staging).map_err(|error| internal(error.into()))
}

pub fn unstage(call: &Call) -> Result<(), Status> {
    unmount_all(Path::new(&call.staging))
}

pub fn publish(
    directory: &Path,
    devices: &[Device],
    staged: bool,
    call: &Call,
    lie: Option<Lie>,
) -> Result<(), Status> {
    let target = Path::new(&call.target);
    if !target.parent().is_some_and(Path::is_dir) {
        return Err(Status::internal("the target's parent is not there (CO rule 29)"));
    }
    if lie == Some(Lie::Nothing) {
        return Ok(());
    }
    if mounted(target)? {
        return Ok(());
    }
    let source = match lie {
        Some(Lie::File) => {
            let file = directory.join("a-regular-file");
            fs::write(&file, "not what was asked for").map_err(internal)?;
            file
        }
        Some(Lie::Directory) => data(directory, &call.volume).map_err(internal)?,
        Some(Lie::Character) => PathBuf::from("/dev/null"),
        _ if call.block => {
            let device = devices.iter().find(|d| d.volume == call.volume);
            let device = device.ok_or_else(|| Status::not_found("no device of that volume"))?;
            let writable = !call.read_only || lie == Some(Lie::Writable);
            if writable { device.writable.clone() } else { device.read_only.clone() }
        }
        _ if staged => {
            if !mounted(Path::new(&call.staging))? {
                return Err(Status::failed_precondition("the volume is not staged here"));
            }
            PathBuf::from(&call.staging)
        }
        _ => data(directory, &call.volume).map_err(internal)?,
    };
    let life = match lie {
        Some(Lie::Fuse) => Some(Life::Alive),
        Some(Lie::Hung) => Some(Life::Hung),
        Some(Lie::Dead) => Some(Life::Dead),
        _ => None,
    };
    let directory = if lie == Some(Lie::Empty) { !call.block } else { source.is_dir() };
    let made = if directory {
        fs::create_dir(target)
    } else {
        fs::OpenOptions::new().create_new(true).write(true).open(target).map(drop)
    };
    if let Err(error) = made
        && error.kind() != io::ErrorKind::AlreadyExists
    {
        return Err(internal(error));
    }
    if lie == Some(Lie::Empty) {
        return Ok(());
    }
    if let Some(life) = life {
        return fuse::mount_at(target, life).map_err(internal);
    }
    mount_bind(&source, target).map_err(|error| internal(error.into()))?;
    if call.read_only && lie != Some(Lie::Writable) {
        mount_remount(target, MountFlags::BIND | MountFlags::RDONLY, c"")
            .map_err(|error| internal(error.into()))?;
    }
    Ok(())
}

pub fn unpublish(call: &Call) -> Result<(), Status> {
    let target = Path::new(&call.target);
    fuse::forget(target);
    unmount_all(target)?;
    let removed = match fs::symlink_metadata(target) {
        Err(error) => Err(error),
        Ok(metadata) if metadata.is_dir() => fs::remove_dir(target),
        Ok(_) => fs::remove_file(target),
    };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(internal(error)),
        _ => Ok(()),
    }
}

fn unmount_all(path: &Path) -> Result<(), Status> {
    while mounted(path)? {
        unmount(path, UnmountFlags::NOFOLLOW).map_err(|error| internal(error.into()))?;
    }
    Ok(())
}
