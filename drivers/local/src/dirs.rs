//! Directories that hold an image and what is to be known of it, `PARENT/ID/{image,meta.json}`: whole or not there.
//!
//! What always holds: one is made aside as `.new-ID` and renamed into place, and renamed to `.gone-ID` before anything
//! of it is removed. So both of these are rubbish and `sweep` may remove them, unless they are locked: then somebody is
//! still at work.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{At, Error, Result};
use crate::store::{Content, Format, Volume, is_id};
use crate::{caller, copy};

/// How long a call waits for another one of the same volume.
const PATIENCE: Duration = Duration::from_secs(10);
const NEW: &str = ".new-";
const GONE: &str = ".gone-";

pub struct Listed<M> {
    pub id: String,
    pub meta: M,
    pub capacity: u64,
    pub used: u64,
}

/// What is copied. A volume is locked meanwhile; a snapshot never changes, and may be deleted while its image is open.
pub struct Origin {
    pub image: File,
    pub content: Content,
    pub format: Format,
    /// The device that carries the image: with one it changes under a copy that is not made at once.
    pub in_use: Option<PathBuf>,
    /// Its lock.
    pub _volume: Option<Volume>,
}

impl Origin {
    pub fn stat(&self) -> Result<std::fs::Metadata> {
        self.image.metadata().at("look at", Path::new("the source's image"))
    }
}

/// Takes the lock of a directory. Fails with [`Error::Busy`] after ten seconds, and when no caller waits any more: a later call for the
/// volume may have had the lock, and undone what this one would do.
pub fn lock(dir: &File, id: &str) -> Result<()> {
    let give_up = Instant::now() + PATIENCE;
    loop {
        match flock(dir, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) if caller::has_gone() => {
                flock(dir, FlockOperation::Unlock).at("unlock", Path::new(id))?;
                return Err(Error::Busy(id.to_owned()));
            }
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::WOULDBLOCK) if caller::has_gone() => {
                return Err(Error::Busy(id.to_owned()));
            }
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < give_up => {
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(Error::Busy(id.to_owned())),
            Err(e) => return Err(e).at("lock the volume", Path::new(id)),
        }
    }
}

/// Removes what an interrupted `make` or `remove` left. The store's lock must be held. A leftover that cannot be removed stays for the
/// next sweep, and no other volume waits for it.
pub fn sweep(parent: &Path) -> Result<()> {
    for name in names(parent)? {
        if !name.starts_with(NEW) && !name.starts_with(GONE) {
            continue;
        }
        let leftover = parent.join(&name);
        let held = match File::open(&leftover) {
            Ok(dir) => flock(&dir, FlockOperation::NonBlockingLockExclusive).is_err(),
            Err(e) => e.kind() == io::ErrorKind::NotFound, // just renamed into place
        };
        if !held {
            tracing::info!(leftover = name, "removing what an interrupted call left");
            remove_or_log(&leftover);
        }
    }
    Ok(())
}

/// Returns whether `PARENT/ID` is being made by another call.
pub fn is_being_made(parent: &Path, id: &str) -> bool {
    let new = File::open(parent.join(format!("{NEW}{id}")));
    new.is_ok_and(|dir| flock(&dir, FlockOperation::NonBlockingLockExclusive).is_err())
}

/// Makes `PARENT/ID` whole, empty or from an origin. The store's lock is held until all is said that others must know
/// to plan with the disk; what is being made has a lock of its own.
pub fn make<M: Serialize>(
    store_lock: File,
    parent: &Path,
    id: &str,
    length: u64,
    origin: Option<Origin>,
    meta: impl FnOnce(bool) -> M,
) -> Result<M> {
    let new = parent.join(format!("{NEW}{id}"));
    match DirBuilder::new().mode(0o700).create(&new) {
        // A sweep has just removed what is left over, unless it could not.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && is_being_made(parent, id) => {
            return Err(Error::Busy(id.to_owned()));
        }
        made => made.at("make", &new)?,
    }
    let own = File::open(&new).at("open", &new)?;
    let made = (|| {
        lock(&own, id)?;
        let path = new.join("image");
        let image = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let image = image.at("make", &path)?;
        let shared = match &origin {
            Some(origin) => copy::reflink(&origin.image, &image).at("clone to", &path)?,
            None => false,
        };
        if let Some(device) = origin.as_ref().and_then(|o| o.in_use.as_ref()).filter(|_| !shared) {
            return Err(Error::Precondition(format!(
                "the volume is in use on {} and {} has no reflinks, so a copy would not be of one moment; \
                 unpublish and unstage it first, or have the volumes on xfs or btrfs",
                device.display(),
                parent.display()
            )));
        }
        image.set_len(length).at("set the size of", &path)?;
        let meta = meta(shared);
        write_meta(&new, &meta)?;
        drop(store_lock);
        if let Some(origin) = origin.filter(|_| !shared) {
            copy::data(&origin.image, &image).at("copy to", &path)?;
        }
        image.sync_all().at("sync", &path)?;
        rename(parent, &new, &parent.join(id))?;
        Ok(meta)
    })();
    if made.is_err() {
        // At once, for a half-made copy may be what has filled the disk.
        remove_or_log(&new);
    }
    made
}

/// Removes `PARENT/ID`, whose lock is held, as is the store's. After the rename the volume is gone. Files that csi-local did not make
/// stay in the renamed directory.
pub fn remove(parent: &Path, id: &str) -> Result<()> {
    let mut gone = parent.join(format!("{GONE}{id}"));
    for n in 1.. {
        if !gone.try_exists().at("look at", &gone)? {
            break;
        }
        gone = parent.join(format!("{GONE}{id}.{n}"));
    }
    rename(parent, &parent.join(id), &gone)?;
    remove_or_log(&gone);
    Ok(())
}

/// Removes what is no volume any more. A later sweep removes what is left.
fn remove_or_log(dir: &Path) {
    if let Err(error) = remove_aside(dir) {
        tracing::warn!(%error, "the rest of a deleted or unfinished volume stays");
    }
}

/// The rename is what makes or ends a volume; it is on disk before the answer.
fn rename(parent: &Path, from: &Path, to: &Path) -> Result<()> {
    std::fs::rename(from, to).at("rename", from)?;
    sync_dir(parent)
}

/// Removes a volume's directory that has another name by now.
fn remove_aside(dir: &Path) -> Result<()> {
    let gone = |removed: io::Result<()>, path: &Path| match removed {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.at("remove", path),
    };
    for file in ["image", "meta.json", ".meta.json"].map(|name| dir.join(name)) {
        gone(std::fs::remove_file(&file), &file)?;
    }
    gone(std::fs::remove_dir(dir), dir)
}

pub fn names(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in dir.read_dir().at("list", dir)? {
        names.push(entry.at("list", dir)?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Everything that is whole, by id. What goes meanwhile is left out, and so is one whose metadata cannot be read.
pub fn list<M: DeserializeOwned>(parent: &Path) -> Result<Vec<Listed<M>>> {
    let whole = list_all(parent)?.into_iter().filter(|l| is_id(&l.id));
    Ok(whole
        .filter_map(|Listed { id, meta, capacity, used }| Some(Listed { id, meta: meta?, capacity, used }))
        .collect())
}

/// Also what is being made: it takes room too. `None`: the metadata cannot be read.
pub fn list_all<M: DeserializeOwned>(parent: &Path) -> Result<Vec<Listed<Option<M>>>> {
    let mut listed = Vec::new();
    for id in names(parent)?.into_iter().filter(|name| is_id(name.strip_prefix(NEW).unwrap_or(name))) {
        let dir = parent.join(&id);
        let stat = match dir.join("image").metadata() {
            Ok(stat) => stat,
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e).at("look at", &dir.join("image")),
        };
        let meta = match read_meta(&dir) {
            Ok(meta) => Some(meta),
            Err(Error::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => continue,
            Err(error @ Error::Meta { .. }) => {
                tracing::warn!(%error, "a volume or snapshot is not listed");
                None
            }
            Err(e) => return Err(e),
        };
        listed.push(Listed { id, meta, capacity: stat.len(), used: stat.blocks() * 512 });
    }
    Ok(listed)
}

pub fn read_meta<M: DeserializeOwned>(dir: &Path) -> Result<M> {
    let path = dir.join("meta.json");
    let bytes = std::fs::read(&path).at("read", &path)?;
    serde_json::from_slice(&bytes).map_err(|source| Error::Meta { path, source })
}

pub fn write_meta(dir: &Path, meta: &impl Serialize) -> Result<()> {
    let (temp, path) = (dir.join(".meta.json"), dir.join("meta.json"));
    let text = serde_json::to_vec(meta).map_err(|source| Error::Meta { path: path.clone(), source })?;
    let mut file = File::create(&temp).at("make", &temp)?;
    file.write_all(&text).at("write", &temp)?;
    file.sync_all().at("sync", &temp)?;
    std::fs::rename(&temp, &path).at("rename", &temp)?;
    sync_dir(dir)
}

fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|d| d.sync_all()).at("sync", dir)
}
