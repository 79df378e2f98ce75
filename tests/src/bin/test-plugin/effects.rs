//! The mounts the plugin makes, honestly or not. All of them are idempotent.

use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use csi_proto::csi::v1::{VolumeUsage, volume_usage::Unit};
use csid_tests::backend::{Backend, Server, Volume};
use csid_tests::hung;
use csid_tests::script::{Call, Lie, Script, has};
use rustix::fs::{CWD, Mode, OFlags, openat, statvfs};
use rustix::mount::{MountFlags, UnmountFlags, mount, mount_bind, mount_remount, unmount};
use tonic::Status;

use crate::fuse::{self, Life};

fn data(backend: &Backend, volume: &str) -> Result<PathBuf, Status> {
    let path = backend.data(volume);
    fs::create_dir_all(&path).map_err(internal)?;
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

pub fn internal(error: io::Error) -> Status {
    Status::internal(error.to_string())
}

fn mount_hung(script: &Script, call: &Call, at: &Path) -> Result<(), Status> {
    let mount = hung::Ask::Mount { name: call.volume.clone(), at: at.to_owned(), disk: None };
    hung::ask(&script.hung, &mount).map(drop).map_err(internal)
}

pub fn stage(backend: &Backend, script: &Script, call: &Call, lie: Option<Lie>) -> Result<(), Status> {
    let staging = Path::new(&call.staging);
    if !staging.is_dir() {
        return Err(Status::failed_precondition("the staging path is no directory (CO rule 28)"));
    }
    // A block volume is only noted: nothing is mounted at its staging path.
    if call.block || lie == Some(Lie::Nothing) || mounted(staging)? {
        return Ok(());
    }
    let disk = script.devices.iter().find(|d| d.volume == call.volume && !d.file_system.is_empty());
    if let Some(disk) = disk {
        let mounted = mount(&disk.writable, staging, disk.file_system.as_str(), MountFlags::empty(), None);
        return mounted.map_err(|error| internal(error.into()));
    }
    let data = data(backend, &call.volume)?;
    if let Some(lie @ (Lie::Served | Lie::Left)) = lie {
        let pid = fuse::serve_by_bindfs(&data, staging, lie == Lie::Left).map_err(internal)?;
        let end = Instant::now() + Duration::from_secs(10);
        while !mounted(staging)? {
            if Instant::now() > end {
                return Err(Status::internal("bindfs does not mount"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _lock = backend.lock().map_err(internal)?;
        return backend.put(&Server { volume: call.volume.clone(), pid }).map_err(internal);
    }
    if lie == Some(Lie::Hung) {
        return mount_hung(script, call, staging);
    }
    let from = apart(backend, script, &data, Path::new(&call.staging))?;
    mount_bind(&from, staging).map_err(|error| internal(error.into()))
}

/// Binds `from` at the plugin's own place for `path`, if it has such mounts. Returns the place, or `from`.
fn apart(backend: &Backend, script: &Script, from: &Path, path: &Path) -> Result<PathBuf, Status> {
    if !script.mounts_apart {
        return Ok(from.to_owned());
    }
    let place = backend.apart(path);
    fs::create_dir_all(&place).map_err(internal)?;
    if !mounted(&place)? {
        mount_bind(from, &place).map_err(|error| internal(error.into()))?;
    }
    Ok(place)
}

/// Unmounts the plugin's own place for `path`, if it has one.
fn leave_apart(backend: &Backend, path: &Path) -> Result<(), Status> {
    let place = backend.apart(path);
    if place.is_dir() {
        unmount_all(&place)?;
        fs::remove_dir(&place).map_err(internal)?;
    }
    Ok(())
}

pub fn unstage(backend: &Backend, call: &Call) -> Result<(), Status> {
    unmount_all(Path::new(&call.staging))?;
    leave_apart(backend, Path::new(&call.staging))
}

/// Whether the target of a publish is mounted.
pub fn is_there(call: &Call) -> Result<bool, Status> {
    mounted(Path::new(&call.target))
}

pub fn publish(backend: &Backend, script: &Script, call: &Call, lie: Option<Lie>) -> Result<(), Status> {
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
            let file = backend.directory.join("a-regular-file");
            fs::write(&file, "not what was asked for").map_err(internal)?;
            file
        }
        Some(Lie::Directory) => data(backend, &call.volume)?,
        Some(Lie::Character) => PathBuf::from("/dev/null"),
        _ if call.block => {
            let device = script.devices.iter().find(|d| d.volume == call.volume);
            let device = device.ok_or_else(|| Status::not_found("no device of that volume"))?;
            let writable = !call.read_only || lie == Some(Lie::Writable);
            if writable { device.writable.clone() } else { device.read_only.clone() }
        }
        _ if has(&script.capabilities, "STAGE_UNSTAGE_VOLUME") => {
            if !mounted(Path::new(&call.staging))? {
                return Err(Status::failed_precondition("the volume is not staged here"));
            }
            PathBuf::from(&call.staging)
        }
        _ => data(backend, &call.volume)?,
    };
    let life = match lie {
        Some(Lie::Fuse) => Some(Life::Alive),
        Some(Lie::Dead) => Some(Life::Dead),
        _ => None,
    };
    // Not asked of what is staged: it may hang.
    let directory = match lie {
        Some(Lie::File | Lie::Character) => false,
        Some(Lie::Directory) => true,
        _ => !call.block,
    };
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
    if lie == Some(Lie::Hung) {
        return mount_hung(script, call, target);
    }
    if let Some(life) = life {
        return fuse::mount_at(target, life).map_err(internal);
    }
    let source = if directory { apart(backend, script, &source, target)? } else { source };
    mount_bind(&source, target).map_err(|error| internal(error.into()))?;
    if call.read_only && lie != Some(Lie::Writable) {
        mount_remount(target, MountFlags::BIND | MountFlags::RDONLY, c"")
            .map_err(|error| internal(error.into()))?;
    }
    Ok(())
}

pub fn unpublish(backend: &Backend, call: &Call) -> Result<(), Status> {
    let target = Path::new(&call.target);
    fuse::forget(target);
    unmount_all(target)?;
    leave_apart(backend, target)?;
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

fn must_be_there(call: &Call) -> Result<(), Status> {
    let path = Path::new(&call.target);
    match if path.is_dir() { mounted(path)? } else { path.exists() } {
        true => Ok(()),
        false => Err(Status::not_found("the volume is not at the volume_path")),
    }
}

/// Returns the usage of a mounted volume in bytes and inodes; of a block volume the size that the controller knows.
pub fn usage(backend: &Backend, call: &Call) -> Result<Vec<VolumeUsage>, Status> {
    must_be_there(call)?;
    let path = Path::new(&call.target);
    if !path.is_dir() {
        let volume = backend.get::<Volume>(&call.volume).map_err(internal)?;
        let total = volume.map_or(0, |volume| volume.bytes);
        return Ok(vec![VolumeUsage { total, unit: Unit::Bytes.into(), ..Default::default() }]);
    }
    let fs = statvfs(path).map_err(|error| internal(error.into()))?;
    let usage = |total: u64, free: u64, unit: Unit| VolumeUsage {
        available: free.cast_signed(),
        total: total.cast_signed(),
        used: total.saturating_sub(free).cast_signed(),
        unit: unit.into(),
    };
    let bytes = usage(fs.f_blocks * fs.f_frsize, fs.f_bavail * fs.f_frsize, Unit::Bytes);
    Ok(vec![bytes, usage(fs.f_files, fs.f_favail, Unit::Inodes)])
}

/// Grow into what the controller has made larger. The new size.
pub fn grow(backend: &Backend, call: &Call) -> Result<i64, Status> {
    must_be_there(call)?;
    let _lock = backend.lock().map_err(internal)?;
    let Some(mut volume) = backend.get::<Volume>(&call.volume).map_err(internal)? else {
        return Ok(call.required_bytes);
    };
    if volume.bytes < call.required_bytes {
        return Err(Status::out_of_range("the volume is smaller: ControllerExpandVolume comes first"));
    }
    volume.node_bytes = volume.bytes;
    backend.put(&volume).map_err(internal)?;
    Ok(volume.bytes)
}
