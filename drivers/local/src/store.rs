//! The volumes on disk. Owns the state directory: `volumes/ID/{image,meta.json}`, and `snapshots/ID` with the same files.
//!
//! What always holds: a directory of either is a whole volume or snapshot (see `dirs`). The image's length is the
//! volume's capacity; nothing else records it. A change of a volume or its mounts holds the lock on its directory.
//! To begin one, to remove or to grow one, takes the lock on `volumes` before it. Both are flocks: the command line and
//! the server exclude each other, and a lock ends with its process. A long copy holds only the locks of its two ends.

use std::fmt;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::dirs::{self, Origin};
use crate::error::{At, Error, Result};
use crate::{loops, mounts, snapshots};

const BLOCK: u64 = 4096;
const DEFAULT_CAPACITY: u64 = 1 << 30;

/// What a volume holds, fixed when it is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Content {
    Block,
    Ext4,
    Xfs,
}

impl Content {
    pub fn name(self) -> &'static str {
        match self {
            Content::Block => "block",
            Content::Ext4 => "ext4",
            Content::Xfs => "xfs",
        }
    }

    /// What mkfs accepts: xfsprogs refuses less than 300 MiB.
    fn least(self) -> u64 {
        match self {
            Content::Block => 1 << 20,
            Content::Ext4 => 8 << 20,
            Content::Xfs => 300 << 20,
        }
    }
}

/// How far the file-system of a volume is. It is mounted only when `Done`, and made only when not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    None,
    Started,
    Done,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Meta {
    version: u32,
    pub name: String,
    pub content: Content,
    pub format: Format,
    /// What it was copied from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Source>,
    /// The copy has its blocks in common with others: it may yet need as many of its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    shared: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attached: Option<Attachment>,
}

/// The id of what a volume starts from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    Snapshot(String),
    Volume(String),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Snapshot(id) => write!(f, "snapshot {id}"),
            Source::Volume(id) => write!(f, "volume {id}"),
        }
    }
}

/// Where a volume is attached, when the driver attaches at all.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attachment {
    pub node: String,
    pub read_only: bool,
    /// Which attachment it is: another one has another.
    pub context: String,
}

/// How large a volume is to be, as the caller bounds it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Range {
    required: u64,
    limit: Option<u64>,
}

impl Range {
    /// 0 means unbounded, as in CSI.
    pub fn new(required: i64, limit: i64) -> Result<Range> {
        let bytes = |n: i64| u64::try_from(n).map_err(|_| Error::Invalid("a capacity is negative".into()));
        let (required, limit) = (bytes(required)?, bytes(limit)?);
        if limit != 0 && required > limit {
            return Err(Error::Invalid(format!("required_bytes {required} exceeds limit_bytes {limit}")));
        }
        Ok(Range { required, limit: (limit != 0).then_some(limit) })
    }

    /// As many bytes, but for the rounding to whole blocks.
    pub fn exactly(bytes: i64) -> Result<Range> {
        let mut range = Range::new(bytes, 0)?;
        range.limit = range.required.checked_next_multiple_of(BLOCK);
        Ok(range)
    }

    pub fn holds(&self, capacity: u64) -> bool {
        self.required <= capacity && self.limit.is_none_or(|limit| capacity <= limit)
    }

    fn pick(&self, least: u64, default: u64) -> Result<u64> {
        let wish = match (self.required, self.limit) {
            (0, None) => default,
            (0, Some(limit)) => default.min(limit / BLOCK * BLOCK),
            (required, _) => required,
        };
        wish.max(least).checked_next_multiple_of(BLOCK).filter(|c| self.holds(*c)).ok_or_else(|| {
            Error::OutOfRange(format!(
                "such a volume has at least {least} bytes, in steps of {BLOCK}; ask for so many"
            ))
        })
    }
}

/// The id of the volume or snapshot with this name: the name itself where that is safe as a file name, else its hash.
pub fn id_of(name: &str) -> String {
    if is_id(name) && !name.starts_with("sha256-") {
        return name.to_owned();
    }
    let hash = Sha256::digest(name.as_bytes());
    let hex: String = hash.iter().take(16).map(|b| format!("{b:02x}")).collect();
    format!("sha256-{hex}")
}

pub fn is_id(s: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric();
    s.len() <= 64
        && s.bytes().next().is_some_and(plain)
        && s.bytes().all(|b| plain(b) || b == b'-' || b == b'_')
}

#[derive(Clone, Debug)]
pub struct Store {
    volumes: PathBuf,
    pub snapshots: PathBuf,
}

/// A volume with its lock. `lock` is handed to mkfs too: a killed driver's mkfs keeps the volume locked until it ends.
pub struct Volume {
    pub id: String,
    pub meta: Meta,
    dir: PathBuf,
    pub lock: File,
}

pub type Listed = dirs::Listed<Meta>;

impl Store {
    pub fn open(state_dir: &Path) -> Result<Store> {
        let make = |name| {
            let dir = state_dir.join(name);
            DirBuilder::new().recursive(true).mode(0o700).create(&dir).at("make", &dir)?;
            // Images are found again by this path, whatever the working directory is.
            std::path::absolute(&dir).at("resolve", &dir)
        };
        let store = Store { volumes: make("volumes")?, snapshots: make("snapshots")? };
        let _lock = store.lock()?;
        store.sweep()?;
        Ok(store)
    }

    pub fn lock(&self) -> Result<File> {
        let dir = File::open(&self.volumes).at("open", &self.volumes)?;
        dirs::lock(&dir, "of another name").map(|()| dir)
    }

    /// Removes what an interrupted create or delete left. The lock must be held.
    pub fn sweep(&self) -> Result<()> {
        dirs::sweep(&self.volumes)?;
        dirs::sweep(&self.snapshots)
    }

    /// Every volume, by id. One that goes meanwhile is left out.
    pub fn list(&self) -> Result<Vec<Listed>> {
        dirs::list(&self.volumes)
    }

    /// The bytes that may still be promised: images are sparse, and what they may yet take is taken off, so that
    /// volumes cannot starve each other.
    pub fn available(&self) -> Result<u64> {
        let stat = rustix::fs::statvfs(&self.volumes).at("look at", &self.volumes)?;
        Ok((stat.f_bavail * stat.f_frsize).saturating_sub(self.promised()?))
    }

    /// Returns the bytes that images may yet take. One whose metadata cannot be read may take its whole length.
    fn promised(&self) -> Result<u64> {
        let mut promised = 0;
        for volume in dirs::list_all::<Meta>(&self.volumes)? {
            let is_shared = volume.meta.is_none_or(|meta| meta.shared);
            promised += volume.capacity.saturating_sub(if is_shared { 0 } else { volume.used });
        }
        for snapshot in dirs::list_all::<snapshots::Meta>(&self.snapshots)? {
            promised += snapshot.meta.map_or(snapshot.used, |meta| meta.promised(snapshot.used));
        }
        Ok(promised)
    }

    fn reserve(&self, more: u64) -> Result<()> {
        let available = self.available()?;
        if more > available {
            return Err(Error::OutOfRange(format!(
                "{more} bytes are asked for and {available} are free; delete volumes or enlarge the disk of {}",
                self.volumes.display()
            )));
        }
        Ok(())
    }

    /// Makes the volume, or finds that it is there already.
    pub fn create(
        &self,
        name: &str,
        content: Content,
        range: Range,
        source: Option<Source>,
    ) -> Result<(String, u64)> {
        let id = id_of(name);
        if let Some(Source::Volume(id)) = &source {
            self.flush(id)?;
        }
        let store_lock = self.lock()?;
        match self.read(&id) {
            Ok((meta, capacity)) => {
                let same = meta.name == name && meta.content == content && meta.source == source;
                return if same && range.holds(capacity) {
                    Ok((id, capacity))
                } else {
                    Err(Error::Exists(format!(
                        "volume {id} is there with {capacity} bytes of {} from {}; delete it or ask for the same",
                        meta.content.name(),
                        meta.source.map_or("nothing".into(), |s| s.to_string())
                    )))
                };
            }
            Err(Error::NoVolume(_)) => self.refuse_while_made(&id)?,
            Err(e) => return Err(e),
        }
        let origin = source.as_ref().map(|s| self.origin(s)).transpose()?;
        let (least, default, format) = match &origin {
            Some(origin) if origin.content != content => {
                return Err(Error::Invalid(format!("the source is {}", origin.content.name())));
            }
            Some(origin) => (origin.stat()?.len(), 0, origin.format),
            None => (content.least(), DEFAULT_CAPACITY, Format::None),
        };
        let capacity = range.pick(least, default)?;
        self.sweep()?;
        self.reserve(capacity)?;
        let meta = |shared| {
            let name = name.to_owned();
            Meta { version: 1, name, content, format, source, shared, attached: None }
        };
        dirs::make(store_lock, &self.volumes, &id, capacity, origin, meta)?;
        Ok((id, capacity))
    }

    /// Before a copy, without the store's lock because it may take long: the disk gets what users have written so far.
    pub fn flush(&self, id: &str) -> Result<()> {
        match self.volume(id) {
            Ok(volume) => mounts::flush(&volume),
            Err(Error::NoVolume(_)) => Ok(()),
            Err(e) => Err(e),
        }
    }

    fn origin(&self, source: &Source) -> Result<Origin> {
        match source {
            Source::Snapshot(id) => self.snapshot_origin(id),
            Source::Volume(id) => self.volume_origin(id),
        }
    }

    pub fn volume_origin(&self, id: &str) -> Result<Origin> {
        let volume = self.volume(id)?;
        let image = File::open(volume.image()).at("open", &volume.image())?;
        Ok(Origin {
            image,
            content: volume.meta.content,
            format: volume.meta.format,
            in_use: loops::of_image(&volume.image())?.first().map(loops::Loop::node),
            _volume: Some(volume),
        })
    }

    /// Returns [`Error::Busy`] while another call makes the volume. The room that it takes is not free for this call, and its source
    /// may be gone already.
    fn refuse_while_made(&self, id: &str) -> Result<()> {
        if dirs::is_being_made(&self.volumes, id) { Err(Error::Busy(id.to_owned())) } else { Ok(()) }
    }

    /// Returns what a volume with this name holds, or would hold as a copy of `source`. The source of one that is there may be gone.
    pub fn content_of(&self, name: &str, source: &Source) -> Result<Content> {
        let id = id_of(name);
        let there = || self.read(&id).map(|(there, _)| there.content);
        match there() {
            Err(Error::NoVolume(_)) => self.refuse_while_made(&id)?,
            there => return there,
        }
        let of_source = match source {
            Source::Snapshot(id) => self.read_snapshot(id).map(|snapshot| snapshot.meta.content),
            Source::Volume(id) => self.read(id).map(|(meta, _)| meta.content),
        };
        // Another call may have made the volume meanwhile.
        of_source.or_else(|error| there().map_err(|_| error))
    }

    /// Removes the volume; one that is not there is removed already. Who attaches does not want an attached one removed.
    pub fn delete(&self, id: &str, attaches: bool) -> Result<()> {
        let _lock = self.lock()?;
        self.sweep()?;
        let (dir, _volume_lock) = match self.locked(id) {
            Ok(locked) => locked,
            Err(Error::NoVolume(_)) => return Ok(()),
            Err(e) => return Err(e),
        };
        // A volume without its image can still be deleted, and so can one with damaged metadata.
        let image = dir.join("image");
        let there = image.try_exists().at("look at", &image)?;
        let attached = if there { loops::of_image(&image)? } else { Vec::new() };
        if let Some(attached) = attached.first() {
            return Err(Error::Precondition(format!(
                "volume {id} is in use on {}; unpublish and unstage it first",
                attached.node().display()
            )));
        }
        let meta = dirs::read_meta::<Meta>(&dir);
        let meta =
            meta.inspect_err(|error| tracing::warn!(volume = id, %error, "it is deleted all the same"));
        if let Some(attached) = meta.ok().and_then(|meta| meta.attached).filter(|_| attaches) {
            let node = &attached.node;
            return Err(Error::Precondition(format!(
                "volume {id} is attached to node {node}; detach it first"
            )));
        }
        dirs::remove(&self.volumes, id)
    }

    /// Makes the volume at least as large as asked; answers its capacity. The node must follow.
    pub fn expand(&self, id: &str, range: Range) -> Result<u64> {
        let _lock = self.lock()?;
        let volume = self.volume(id)?;
        let now = volume.capacity()?;
        let wish = range.required.max(now).checked_next_multiple_of(BLOCK);
        let wish = wish.filter(|w| range.limit.is_none_or(|limit| *w <= limit)).ok_or_else(|| {
            Error::OutOfRange(format!("volume {id} has {now} bytes and cannot have those that are asked for"))
        })?;
        if wish > now {
            self.reserve(wish - now)?;
            let path = volume.image();
            let image = OpenOptions::new().write(true).open(&path).at("open", &path)?;
            image.set_len(wish).at("set the size of", &path)?;
            image.sync_all().at("sync", &path)?;
        }
        Ok(wish)
    }

    /// Reads without the lock.
    pub fn read(&self, id: &str) -> Result<(Meta, u64)> {
        if !is_id(id) {
            return Err(Error::NoVolume(id.to_owned()));
        }
        let dir = self.volumes.join(id);
        let image = dir.join("image");
        match image.metadata() {
            Ok(stat) => Ok((dirs::read_meta(&dir)?, stat.len())),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Err(Error::NoVolume(id.to_owned())),
            Err(e) => Err(e).at("look at", &image),
        }
    }

    /// The volume, locked.
    pub fn volume(&self, id: &str) -> Result<Volume> {
        let (dir, lock) = self.locked(id)?;
        Ok(Volume { id: id.to_owned(), meta: dirs::read_meta(&dir)?, dir, lock })
    }

    /// Returns the volume's directory, and the directory's lock.
    fn locked(&self, id: &str) -> Result<(PathBuf, File)> {
        let none = || Error::NoVolume(id.to_owned());
        if !is_id(id) {
            return Err(none());
        }
        let dir = self.volumes.join(id);
        let locked = match File::open(&dir) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(none()),
            Err(e) => return Err(e).at("open", &dir),
        };
        dirs::lock(&locked, id)?;
        // While this waited the volume may have been deleted, and even made again.
        let held = locked.metadata().at("look at", &dir)?.ino();
        match dir.metadata() {
            Ok(now) if now.ino() == held => {}
            Ok(_) => return Err(none()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(none()),
            Err(e) => return Err(e).at("look at", &dir),
        }
        Ok((dir, locked))
    }
}

impl Volume {
    pub fn image(&self) -> PathBuf {
        self.dir.join("image")
    }

    pub fn capacity(&self) -> Result<u64> {
        Ok(self.image().metadata().at("look at", &self.image())?.len())
    }

    pub fn set_format(&mut self, format: Format) -> Result<()> {
        self.meta.format = format;
        dirs::write_meta(&self.dir, &self.meta)
    }

    pub fn set_attached(&mut self, attached: Option<Attachment>) -> Result<()> {
        self.meta.attached = attached;
        dirs::write_meta(&self.dir, &self.meta)
    }

    /// The lock once more, for a child process to hold.
    pub fn share_lock(&self) -> Result<OwnedFd> {
        Ok(self.lock.try_clone().at("share the lock of", &self.dir)?.into())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn ids_are_safe_as_file_names_and_do_not_clash() {
        assert_eq!(id_of("demo-1_A"), "demo-1_A");
        for name in ["", ".", "..", "a/b", ".new-x", "-x", "vol[0]", "a b", "ä", "a\nb", &"x".repeat(65)] {
            let id = id_of(name);
            assert!(is_id(&id) && id.starts_with("sha256-"), "{name:?}: {id}");
        }
        // A name that looks like a hash cannot take the place of the name with that hash.
        assert_ne!(id_of(&id_of("a/b")), id_of("a/b"));
    }

    #[test]
    fn capacities_keep_to_the_range() {
        let pick = |required, limit| {
            Range::new(required, limit).and_then(|r| r.pick(1 << 20, DEFAULT_CAPACITY)).ok()
        };
        assert_eq!(pick(0, 0), Some(DEFAULT_CAPACITY));
        assert_eq!(pick(1, 0), Some(1 << 20));
        assert_eq!(pick((1 << 20) + 1, 0), Some((1 << 20) + 4096));
        assert_eq!(pick((1 << 20) + 1, (1 << 20) + 2), None);
        assert_eq!(pick(0, (2 << 20) + 5), Some(2 << 20));
        assert_eq!(pick(0, 4096), None);
        assert_eq!(pick(i64::MAX, 0), Some(1 << 63));
        assert_eq!(pick(-1, 0), None);
        assert_eq!(pick(2, 1), None);
    }

    #[test]
    fn a_volume_is_whole_or_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let range = Range::new(1 << 20, 1 << 20).unwrap();
        let (id, capacity) = store.create("one", Content::Block, range, None).unwrap();
        assert_eq!((id.as_str(), capacity), ("one", 1 << 20));
        assert_eq!(store.create("one", Content::Block, range, None).unwrap(), (id, capacity));
        assert!(matches!(store.create("one", Content::Ext4, range, None), Err(Error::Exists(_))));

        // What a create and a delete that were killed leave.
        let volumes = dir.path().join("volumes");
        std::fs::create_dir(volumes.join(".new-two")).unwrap();
        std::fs::write(volumes.join(".new-two/image"), "x").unwrap();
        std::fs::rename(volumes.join("one"), volumes.join(".gone-one")).unwrap();
        assert!(matches!(store.read("one"), Err(Error::NoVolume(_))));
        store.delete("one", true).unwrap();
        assert_eq!(dirs::names(&volumes).unwrap(), Vec::<String>::new());
    }

    fn small() -> Range {
        Range::new(1 << 20, 0).unwrap()
    }

    #[test]
    fn foreign_file_in_a_deleted_volume_stops_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let volumes = dir.path().join("volumes");
        for n in 0..3 {
            store.create("v", Content::Block, small(), None).unwrap();
            std::fs::write(volumes.join("v/image.bak"), format!("{n}")).unwrap();
            store.delete("v", true).unwrap();
            assert!(matches!(store.read("v"), Err(Error::NoVolume(_))));
        }
        let store = Store::open(dir.path()).unwrap();
        store.create("other", Content::Block, small(), None).unwrap();
        let gone = [".gone-v", ".gone-v.1", ".gone-v.2"];
        assert_eq!(dirs::names(&volumes).unwrap(), [&gone[..], &["other"]].concat());
        for (n, gone) in gone.iter().enumerate() {
            assert_eq!(dirs::names(&volumes.join(gone)).unwrap(), ["image.bak"], "the rest is removed");
            assert_eq!(std::fs::read_to_string(volumes.join(gone).join("image.bak")).unwrap(), n.to_string());
        }
        // What a create leaves may have such a file, too. Only that volume cannot be made.
        std::fs::create_dir(volumes.join(".new-w")).unwrap();
        std::fs::write(volumes.join(".new-w/x"), "").unwrap();
        assert!(matches!(store.create("w", Content::Block, small(), None), Err(Error::Io { .. })));
        store.create("third", Content::Block, small(), None).unwrap();
    }

    #[test]
    fn volume_that_another_call_makes_is_busy() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let new = dir.path().join("volumes/.new-v");
        std::fs::create_dir(&new).unwrap();
        let held = File::open(&new).unwrap();
        dirs::lock(&held, "v").unwrap();
        // There is no room for two of them, and the source of the first may be gone.
        let all = Range::new(i64::try_from(store.available().unwrap() * 2).unwrap(), 0).unwrap();
        let source = Source::Snapshot("gone".into());
        assert!(matches!(store.create("v", Content::Block, all, None), Err(Error::Busy(_))));
        assert!(matches!(store.create("v", Content::Block, all, Some(source.clone())), Err(Error::Busy(_))));
        assert!(matches!(store.content_of("v", &source), Err(Error::Busy(_))));
        drop(held);
        assert!(matches!(store.create("v", Content::Block, all, None), Err(Error::OutOfRange(_))));
        assert!(matches!(store.content_of("v", &source), Err(Error::NoSnapshot(_))));
        store.create("v", Content::Block, small(), None).unwrap();
        assert_eq!(store.content_of("v", &source).unwrap(), Content::Block, "its source is gone");
    }

    #[test]
    fn damaged_metadata_stops_its_own_volume_alone() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        for name in ["bad", "missing", "good"] {
            store.create(name, Content::Block, small(), None).unwrap();
        }
        store.snapshot("bad", "bad").unwrap();
        for of in ["volumes", "snapshots"] {
            std::fs::write(dir.path().join(of).join("bad/meta.json"), "{").unwrap();
        }
        std::fs::remove_file(dir.path().join("volumes/missing/meta.json")).unwrap();
        assert_eq!(store.promised().unwrap(), 2 << 20, "the damaged volume keeps its room");
        let listed: Vec<_> = store.list().unwrap().into_iter().map(|listed| listed.id).collect();
        assert_eq!(listed, ["good"]);
        assert!(store.snapshots().unwrap().is_empty());
        store.create("new", Content::Block, small(), None).unwrap();
        store.expand("good", Range::new(2 << 20, 0).unwrap()).unwrap();
        assert!(matches!(store.create("bad", Content::Block, small(), None), Err(Error::Meta { .. })));
        for name in ["bad", "missing"] {
            store.delete(name, true).unwrap();
            store.create(name, Content::Block, small(), None).unwrap();
        }
        store.delete_snapshot("bad").unwrap();
    }

    #[test]
    fn the_disk_is_not_promised_twice() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        let free = i64::try_from(store.available().unwrap()).unwrap();
        store.create("half", Content::Block, Range::new(free / 2, 0).unwrap(), None).unwrap();
        let more = Range::new(free / 4 * 3, 0).unwrap();
        assert!(matches!(store.create("more", Content::Block, more, None), Err(Error::OutOfRange(_))));
        assert!(matches!(store.expand("half", Range::new(free * 2, 0).unwrap()), Err(Error::OutOfRange(_))));
    }

    #[test]
    fn two_calls_for_one_volume_take_turns() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        store.create("v", Content::Block, Range::default(), None).unwrap();
        let held = store.volume("v").unwrap();
        let other = store.clone();
        let (send, done) = std::sync::mpsc::channel();
        std::thread::spawn(move || send.send(other.volume("v").map(|v| v.id)));
        assert!(done.recv_timeout(Duration::from_millis(100)).is_err(), "it did not wait");
        drop(held);
        assert_eq!(done.recv().unwrap().unwrap(), "v");
    }
}
