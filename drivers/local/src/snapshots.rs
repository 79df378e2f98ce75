//! Snapshots: images that never change, in `snapshots/ID`. One is whole and a file of its own, so it outlives its
//! volume, and a volume made from it outlives the snapshot.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::dirs::{self, Origin};
use crate::error::{At, Error, Result};
use crate::store::{Content, Format, Store, id_of, is_id};

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Meta {
    version: u32,
    pub name: String,
    /// The id of the volume that it is of.
    pub volume: String,
    pub created: SystemTime,
    pub content: Content,
    format: Format,
    /// What the volume took on the disk.
    bytes: u64,
    /// The blocks are the volume's too: when that is written to, the disk has to hold both.
    shared: bool,
}

impl Meta {
    /// What the disk may yet have to give for a snapshot that has blocks for `used` bytes.
    pub fn promised(&self, used: u64) -> u64 {
        self.bytes.saturating_sub(if self.shared { 0 } else { used })
    }
}

pub type Snapshot = dirs::Listed<Meta>;

impl Store {
    /// Takes the snapshot, or finds that it was taken already.
    pub fn snapshot(&self, name: &str, volume: &str) -> Result<Snapshot> {
        let id = id_of(name);
        if let Some(there) = self.taken(&id, name, volume)? {
            return Ok(there);
        }
        self.flush(volume)?;
        let store_lock = self.lock()?;
        if let Some(there) = self.taken(&id, name, volume)? {
            return Ok(there);
        }
        let origin = self.volume_origin(volume)?;
        let stat = origin.stat()?;
        let bytes = stat.blocks() * 512;
        self.sweep()?;
        let available = self.available()?;
        if bytes > available {
            return Err(Error::Full(format!(
                "volume {volume} takes {bytes} bytes and {available} are free for its snapshot; delete volumes or \
                 snapshots or enlarge the disk"
            )));
        }
        let (content, format) = (origin.content, origin.format);
        let meta = |shared| Meta {
            version: 1,
            name: name.to_owned(),
            volume: volume.to_owned(),
            created: SystemTime::now(),
            content,
            format,
            bytes,
            shared,
        };
        let meta = dirs::make(store_lock, &self.snapshots, &id, stat.len(), Some(origin), meta)?;
        Ok(Snapshot { id, meta, capacity: stat.len(), used: bytes })
    }

    fn taken(&self, id: &str, name: &str, volume: &str) -> Result<Option<Snapshot>> {
        match self.read_snapshot(id) {
            Ok(there) if there.meta.name == name && there.meta.volume == volume => Ok(Some(there)),
            Ok(there) => Err(Error::Exists(format!(
                "snapshot {id} is there, and of volume {}; delete it or take one of another name",
                there.meta.volume
            ))),
            Err(Error::NoSnapshot(_)) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Removes the snapshot; one that is not there is removed already.
    pub fn delete_snapshot(&self, id: &str) -> Result<()> {
        let _lock = self.lock()?;
        self.sweep()?;
        if !is_id(id) || !self.snapshots.join(id).try_exists().at("look at", &self.snapshots)? {
            return Ok(());
        }
        dirs::remove(&self.snapshots, id)
    }

    /// Every snapshot, by id.
    pub fn snapshots(&self) -> Result<Vec<Snapshot>> {
        dirs::list(&self.snapshots)
    }

    pub fn read_snapshot(&self, id: &str) -> Result<Snapshot> {
        let (image, dir) = (self.snapshot_image(id)?, self.snapshots.join(id));
        let stat = image.metadata().at("look at", &dir)?;
        let meta = dirs::read_meta(&dir)?;
        Ok(Snapshot { id: id.to_owned(), meta, capacity: stat.len(), used: stat.blocks() * 512 })
    }

    pub fn snapshot_origin(&self, id: &str) -> Result<Origin> {
        let image = self.snapshot_image(id)?;
        let meta: Meta = dirs::read_meta(&self.snapshots.join(id))?;
        Ok(Origin { image, content: meta.content, format: meta.format, in_use: None, _volume: None })
    }

    fn snapshot_image(&self, id: &str) -> Result<File> {
        let none = || Error::NoSnapshot(id.to_owned());
        if !is_id(id) {
            return Err(none());
        }
        let path = self.snapshots.join(id).join("image");
        match File::open(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Err(none()),
            image => image.at("open", &path),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::store::{Range, Source};

    fn store() -> (tempfile::TempDir, Store) {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path()).unwrap();
        store.create("v", Content::Block, Range::new(1 << 20, 0).unwrap(), None).unwrap();
        (dir, store)
    }

    #[test]
    fn a_snapshot_is_whole_or_not_there() {
        let (dir, store) = store();
        let taken = store.snapshot("s", "v").unwrap();
        assert_eq!((taken.id.as_str(), taken.capacity), ("s", 1 << 20));
        for (path, mode) in [("", 0o700), ("s", 0o700), ("s/image", 0o600)] {
            let permissions = dir.path().join("snapshots").join(path).metadata().unwrap().permissions();
            assert_eq!(permissions.mode() & 0o777, mode, "{path}");
        }
        assert_eq!(store.snapshot("s", "v").unwrap().meta.created, taken.meta.created);

        // What a copy and a delete that were killed leave, and one that is still at work.
        let snapshots = dir.path().join("snapshots");
        let at_work = snapshots.join(".new-long");
        for half in [snapshots.join(".new-half"), at_work.clone()] {
            std::fs::create_dir(&half).unwrap();
            std::fs::copy(snapshots.join("s/image"), half.join("image")).unwrap();
            std::fs::copy(snapshots.join("s/meta.json"), half.join("meta.json")).unwrap();
        }
        let held = File::open(&at_work).unwrap();
        dirs::lock(&held, "long").unwrap();
        std::fs::rename(snapshots.join("s"), snapshots.join(".gone-s")).unwrap();
        assert!(store.snapshots().unwrap().is_empty());
        assert!(matches!(store.snapshot("long", "v"), Err(Error::Busy(_))));
        store.create("another", Content::Block, Range::new(1 << 20, 0).unwrap(), None).unwrap();
        assert_eq!(dirs::names(&snapshots).unwrap(), [".new-long"]);
        drop(held);
        store.delete_snapshot("s").unwrap();
        assert!(dirs::names(&snapshots).unwrap().is_empty());
    }

    #[test]
    fn ids_are_no_paths() {
        let (dir, store) = store();
        for id in ["", ".", "..", "../volumes/v", "/etc", ".new-x"] {
            assert!(matches!(store.read_snapshot(id), Err(Error::NoSnapshot(_))), "{id}");
            store.delete_snapshot(id).unwrap();
            for source in [Source::Snapshot(id.to_owned()), Source::Volume(id.to_owned())] {
                let made = store.create("x", Content::Block, Range::default(), Some(source));
                assert!(matches!(made, Err(Error::NoSnapshot(_) | Error::NoVolume(_))), "{id}");
            }
        }
        let taken = store.snapshot("../../x", "v").unwrap();
        assert!(taken.id.starts_with("sha256-"));
        assert!(dir.path().join("snapshots").join(&taken.id).is_dir());
        assert_eq!(store.list().unwrap().len(), 1);
    }

    #[test]
    fn shared_blocks_are_promised_and_copied_ones_are_not() {
        let (_dir, store) = store();
        let mut meta = store.snapshot("s", "v").unwrap().meta;
        meta.bytes = 100;
        for (shared, used, promised) in [(false, 100, 0), (false, 30, 70), (true, 100, 100)] {
            meta.shared = shared;
            assert_eq!(meta.promised(used), promised);
        }
    }
}
