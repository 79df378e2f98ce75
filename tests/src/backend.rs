//! The storage behind the test plugin: volumes, what they are attached to, snapshots. It is files of a directory, so that it
//! outlives the plugin, several instances of a plugin can have the same, and a test can look. What is read is whole; who
//! changes something holds the lock from the look to the write.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug)]
pub struct Backend {
    pub directory: PathBuf,
}

/// The process that serves what is staged of a volume.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Server {
    pub volume: String,
    pub pid: i32,
}

impl Kept for Server {
    const KIND: &str = "servers";
    fn id(&self) -> &str {
        &self.volume
    }
}

/// How often a volume is published, as a plugin counts that does not look.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Published {
    pub volume: String,
    pub count: u64,
}

impl Kept for Published {
    const KIND: &str = "published";
    fn id(&self) -> &str {
        &self.volume
    }
}

/// An object of the backend with an id.
pub trait Kept: Serialize + DeserializeOwned {
    /// The name of the directory of such objects.
    const KIND: &str;
    fn id(&self) -> &str;
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Volume {
    pub id: String,
    /// The request to the controller. `None`: an operator made the volume.
    pub order: Option<Order>,
    pub bytes: i64,
    /// How far the node's file system has grown into it.
    pub node_bytes: i64,
    pub topology: BTreeMap<String, String>,
    /// The `volume_context`.
    pub context: BTreeMap<String, String>,
    /// The attachments by node id.
    pub attachments: BTreeMap<String, Attachment>,
}

/// The arguments in which two requests for one name have to agree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    pub uses: Vec<Use>,
    pub parameters: BTreeMap<String, String>,
    /// The id of a snapshot or volume.
    pub source: Option<String>,
    /// The topologies from which the volume has to be reachable.
    pub places: Vec<BTreeMap<String, String>>,
}

/// A volume capability.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Use {
    pub block: bool,
    pub mode: String,
    pub fs_type: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    pub usage: Use,
    pub read_only: bool,
    /// The value in its `publish_context`: another one with each attachment.
    pub token: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Snapshot {
    pub id: String,
    pub volume: String,
    pub bytes: i64,
    /// How often it was asked for.
    pub asked: u64,
}

impl Kept for Volume {
    const KIND: &str = "volumes";
    fn id(&self) -> &str {
        &self.id
    }
}

impl Kept for Snapshot {
    const KIND: &str = "snapshots";
    fn id(&self) -> &str {
        &self.id
    }
}

impl Volume {
    /// Makes a volume as an operator does: for every use.
    pub fn provisioned(id: &str, bytes: i64) -> Self {
        Volume {
            id: id.to_owned(),
            order: None,
            bytes,
            node_bytes: bytes,
            topology: BTreeMap::new(),
            context: BTreeMap::new(),
            attachments: BTreeMap::new(),
        }
    }

    pub fn can(&self, usage: &Use) -> bool {
        self.order.as_ref().is_none_or(|order| order.uses.contains(usage))
    }
}

/// Bytes of an id in a file's name, which has 255 at most: two digits each, and the digest of a longer id.
const LONG: usize = 118;

fn file_name(id: &str) -> String {
    let name: String = id.bytes().take(LONG).map(|byte| format!("{byte:02x}")).collect();
    if id.len() > LONG { format!("{name}-{}", digest(id)) } else { name }
}

fn digest(text: &str) -> String {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    format!("{:x}", hasher.finish())
}

/// Returns the id of an object of a kind, by its name. No id is longer than CSI allows.
pub fn id_of(kind: &str, name: &str) -> String {
    if name.len() > LONG { format!("{kind}-{}", digest(name)) } else { format!("{kind}-{name}") }
}

impl Backend {
    pub fn new(directory: &Path) -> Self {
        Backend { directory: directory.to_owned() }
    }

    /// Held until it is dropped, or its holder dies.
    pub fn lock(&self) -> io::Result<File> {
        let file = File::create(self.directory.join("lock"))?;
        file.lock()?;
        Ok(file)
    }

    pub fn get<T: Kept>(&self, id: &str) -> io::Result<Option<T>> {
        match fs::read(self.directory.join(T::KIND).join(file_name(id))) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            text => Ok(Some(serde_json::from_slice(&text?)?)),
        }
    }

    /// By id.
    pub fn all<T: Kept>(&self) -> io::Result<Vec<T>> {
        let entries = match fs::read_dir(self.directory.join(T::KIND)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut all: Vec<T> = Vec::new();
        for entry in entries {
            match fs::read(entry?.path()) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                text => all.push(serde_json::from_slice(&text?)?),
            }
        }
        all.sort_by(|one, other| one.id().cmp(other.id()));
        Ok(all)
    }

    pub fn put<T: Kept>(&self, kept: &T) -> io::Result<()> {
        let (new, directory) = (self.directory.join("new"), self.directory.join(T::KIND));
        fs::create_dir_all(&directory)?;
        fs::write(&new, serde_json::to_vec(kept)?)?;
        fs::rename(new, directory.join(file_name(kept.id())))
    }

    pub fn remove<T: Kept>(&self, id: &str) -> io::Result<()> {
        match fs::remove_file(self.directory.join(T::KIND).join(file_name(id))) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Returns the plugin's own place for a mount at `path`.
    pub fn apart(&self, path: &Path) -> PathBuf {
        self.directory.join("apart").join(digest(&path.to_string_lossy()))
    }

    /// Returns the directory of a volume's data, which outlives every mount.
    pub fn data(&self, volume: &str) -> PathBuf {
        self.data_directory().join(file_name(volume))
    }

    pub fn data_directory(&self) -> PathBuf {
        self.directory.join("data")
    }

    /// How often the volume is published since `change` of it.
    pub fn count_published(&self, volume: &str, change: i64) -> io::Result<u64> {
        let _lock = self.lock()?;
        let count = self.get::<Published>(volume)?.map_or(0, |published| published.count);
        let count = count.saturating_add_signed(change);
        self.put(&Published { volume: volume.to_owned(), count })?;
        Ok(count)
    }

    /// Returns the objects that the controller has made and not removed: `volume ID`, `attachment ID NODE`, `snapshot ID`.
    pub fn made(&self) -> io::Result<Vec<String>> {
        let mut made = Vec::new();
        for Volume { id, order, attachments, .. } in self.all()? {
            made.extend(order.map(|_| format!("volume {id}")));
            made.extend(attachments.keys().map(|node| format!("attachment {id} {node}")));
        }
        made.extend(self.all()?.iter().map(|Snapshot { id, .. }| format!("snapshot {id}")));
        Ok(made)
    }
}
