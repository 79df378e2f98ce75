//! Mounts of a volume in other mount namespaces than csid's: a container's, a sandboxed service's. They keep the volume in use
//! after csid has unmounted its own mounts.
//!
//! A mount there that receives the host's unmount goes along with it, and is no use of its own. Unmounting propagates by the
//! *parent* mount: the mount goes if its parent is a peer or a slave of the host mount's parent and it lies at the same place
//! on it. How the mount itself propagates says nothing: an `rslave` bind of it outlives the unmount.
//!
//! From Linux 6.12 the kernel lists all mount namespaces (`namespace_tables`), also one that only a file or a descriptor holds. On older
//! kernels, and in a container, csid reads the tables of all processes (`process_tables`).

use std::collections::HashSet;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::host::device::BlockDevice;
use crate::host::table::{self, MountEntry};

/// Holders that an error names.
pub(super) const NAMED: usize = 16;

/// A directory or file of a file system, which a mount shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Shown {
    pub(super) device: u64,
    /// The file system's type; empty: any. The kernel gives the number of an unmounted file system without a device to the next one.
    /// A subtype, after a dot, is not compared: not every kernel has it in each answer.
    pub(super) fs_type: String,
    #[serde(with = "bytes")]
    pub(super) root: PathBuf,
    /// Whether it is the node of a block device.
    pub(super) is_node: bool,
    /// What was mounted. Empty: not known, as in the row of an older csid.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) source: String,
}

/// A path in the journal, and between csid and its helper: text, or an array of bytes where the path is not UTF-8.
mod bytes {
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    use std::path::{Path, PathBuf};

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Text(String),
        Bytes(Vec<u8>),
    }

    pub fn serialize<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
        match path.to_str() {
            Some(text) => text.serialize(serializer),
            None => path.as_os_str().as_bytes().serialize(serializer),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
        Ok(match Written::deserialize(deserializer)? {
            Written::Text(text) => text.into(),
            Written::Bytes(bytes) => OsString::from_vec(bytes).into(),
        })
    }

    /// A path that may be missing.
    pub mod optional {
        use std::path::PathBuf;

        use serde::{Deserialize, Deserializer, Serialize, Serializer};

        #[derive(Serialize, Deserialize)]
        struct Path(#[serde(with = "super")] PathBuf);

        pub fn serialize<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
            path.clone().map(Path).serialize(serializer)
        }

        pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PathBuf>, D::Error> {
            Ok(Option::deserialize(deserializer)?.map(|Path(path)| path))
        }
    }
}

impl Shown {
    /// Whether this is a mount of it, or of something in it. A node under its own name in a `/dev` is none: a container that was
    /// given the device has not been given the volume.
    pub(super) fn is_shown_by(&self, entry: &MountEntry) -> bool {
        self.device == entry.device
            && (self.fs_type.is_empty() || without_subtype(&self.fs_type) == without_subtype(&entry.fs_type))
            && entry.root.starts_with(&self.root)
            && !(self.is_node && is_in_dev(&entry.path, &entry.root))
    }
}

impl Shown {
    /// Returns the number of the file system.
    pub fn device(&self) -> u64 {
        self.device
    }

    /// Returns whether it is a whole file system, and the kernel gives its number to another one once it has ended.
    pub fn lends_its_number(&self) -> bool {
        rustix::fs::major(self.device) == 0 && self.root == Path::new("/") && !self.is_node
    }

    /// Returns whether a mount of csid's own namespace may be of the same file system although the number may be another one's by now:
    /// the kernel gives the number of an unmounted file system without a device to the next one.
    pub(super) fn is_of_source(&self, entry: &MountEntry) -> bool {
        // An older csid wrote both as the mount table does, with escapes.
        let is = |written: &str, there: &str| written == there || table::unescaped(written) == there;
        self.source.is_empty() || (is(&self.source, &entry.source) && is(&self.fs_type, &entry.fs_type))
    }
}

fn without_subtype(fs_type: &str) -> &str {
    fs_type.split_once('.').map_or(fs_type, |(without, _)| without)
}

fn is_in_dev(path: &Path, node: &Path) -> bool {
    node.strip_prefix("/").is_ok_and(|name| path.ends_with(Path::new("dev").join(name)))
}

/// Facts about a volume's mounts, collected while they exist, for the time after that.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Backing {
    pub shown: Vec<Shown>,
    /// The block device that is the volume's alone; `None`: there is none, or others use its file system, too.
    pub(super) device: Option<BlockDevice>,
    /// The device is known by the number alone that the mounts had.
    pub(super) is_remembered: bool,
    /// The mounts of csid's own namespace that appeared when the plugin published, at paths that no row has. They are no use of the
    /// volume. `None`: not known, as in the row of an older csid.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) of_plugin: Option<Vec<PlacedMount>>,
    /// Such mounts that were there before the plugin published, while it also had the volume. They are a use of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) of_others: Vec<PlacedMount>,
}

/// Mounts of a plugin that are remembered although they are gone.
const REMEMBERED: usize = 256;

/// A mount of csid's own namespace, by its path and by what of its file system it shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PlacedMount {
    #[serde(with = "bytes")]
    pub(super) path: PathBuf,
    #[serde(with = "bytes")]
    pub(super) root: PathBuf,
    /// Not journaled: a mount stays the same if its flags change.
    #[serde(skip)]
    pub(super) read_only: bool,
}

impl PlacedMount {
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// Returns what makes it the same mount at two moments.
    fn place(&self) -> (&OsStr, &OsStr) {
        // As bytes: a plugin may have thousands.
        (self.path.as_os_str(), self.root.as_os_str())
    }

    pub(super) fn is_same(&self, other: &PlacedMount) -> bool {
        self.place() == other.place()
    }
}

impl Backing {
    /// Returns whether nothing is known of what the mounts showed.
    pub fn is_unknown(&self) -> bool {
        self.shown.is_empty() && self.device.is_none()
    }

    /// Returns the record for a new staging. `there`: the mounts at paths that no row has. They stay a use of the volume, unless they
    /// were the plugin's.
    pub fn restaged(self, there: Vec<PlacedMount>) -> Self {
        let of_others = if self.knows_own() { self.foreign(there) } else { self.of_others };
        Backing { of_others, ..Backing::default() }
    }

    /// Notes the mounts at paths that no row has, before the plugin publishes.
    pub fn note_before(&mut self, there: Vec<PlacedMount>) {
        if self.knows_own() {
            self.of_others = self.foreign(there);
        }
    }

    /// Notes the same mounts after the plugin has published. What was not there before is the plugin's.
    pub fn note_published(&mut self, there: Vec<PlacedMount>) {
        let mut of_plugin = self.of_plugin.take().unwrap_or_default();
        // A plugin that is restarting may mount there again, so a mount that is gone is not dropped at once.
        if of_plugin.len() > REMEMBERED {
            let there: HashSet<_> = there.iter().map(PlacedMount::place).collect();
            of_plugin.retain(|known| there.contains(&known.place()));
        }
        let known: HashSet<_> = of_plugin.iter().chain(&self.of_others).map(PlacedMount::place).collect();
        let new: Vec<_> = there.iter().filter(|mount| !known.contains(&mount.place())).cloned().collect();
        of_plugin.extend(new);
        self.of_plugin = Some(of_plugin);
    }

    /// Notes that these mounts, at paths that no row has, are no use: they are of the plugin, or of another manager.
    pub fn note_found(&mut self, there: Vec<PlacedMount>) {
        self.of_others.clear();
        self.note_published(there);
    }

    /// Regards each mount of csid's own namespace as no use, because it is not known which are the plugin's.
    pub fn forget_own(&mut self) {
        self.of_plugin = None;
        self.of_others.clear();
    }

    /// Returns whether it is known which mounts of csid's own namespace are the plugin's.
    pub fn knows_own(&self) -> bool {
        self.of_plugin.is_some()
    }

    /// Returns those of the mounts that are not the plugin's. Empty: there are none, or it is not known which are.
    pub fn foreign(&self, mut there: Vec<PlacedMount>) -> Vec<PlacedMount> {
        let Some(of_plugin) = &self.of_plugin else { return Vec::new() };
        let known: HashSet<_> = of_plugin.iter().map(PlacedMount::place).collect();
        there.retain(|mount| !known.contains(&mount.place()));
        there
    }

    /// Returns whether the device is known by the number alone that the mounts had: it may be another one by now.
    pub fn is_remembered(&self) -> bool {
        self.is_remembered
    }

    /// Adds what is known `now`. What was known before stays: a device's number may be another one's by now.
    pub fn join(&mut self, now: Backing) {
        for shown in now.shown {
            if !self.shown.contains(&shown) {
                self.shown.push(shown);
            }
        }
        if self.device.is_none() {
            self.device = now.device;
            self.is_remembered = now.is_remembered;
        }
    }

    /// Returns the text that the journal keeps; empty: nothing is known.
    pub fn to_text(&self) -> Result<String, serde_json::Error> {
        if *self == Backing::default() { Ok(String::new()) } else { serde_json::to_string(self) }
    }

    /// Reads what [`Self::to_text`] has written.
    pub fn from_text(text: &str) -> Result<Self, serde_json::Error> {
        if text.is_empty() { Ok(Backing::default()) } else { serde_json::from_str(text) }
    }
}

/// The mounts that keep a volume from being forgotten.
#[derive(Clone, Debug)]
pub struct Sought {
    /// Mounts at these paths or below.
    pub below: Vec<PathBuf>,
    /// The path where the volume was bound.
    pub target: Option<PathBuf>,
    /// The number that the mounts had.
    pub device: Option<u64>,
    /// The directories and files that the volume's mounts showed.
    pub shown: Vec<Shown>,
    /// Whether every mount of `shown` counts, because no other volume shows it.
    pub everywhere: bool,
    /// csid's own directory, where other volumes' mounts are.
    pub base: PathBuf,
}

/// What has a mount namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Holder {
    /// A process that is in it.
    Process(u32),
    /// A file or a descriptor: no process is in the namespace with this inode.
    Namespace(u64),
    /// The namespace has ended before its holder was known.
    Ended,
}

/// A mount of a volume in another namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountElsewhere {
    pub holder: Holder,
    /// The path in that namespace. `None`: csid could not search the namespace to its end, so it may show the volume.
    #[serde(with = "bytes::optional")]
    pub path: Option<PathBuf>,
    pub read_only: bool,
}

impl MountElsewhere {
    /// Returns the answer for a namespace that takes too long to search.
    pub(super) fn unsearched(holder: Holder) -> Self {
        MountElsewhere { holder, path: None, read_only: false }
    }

    /// Returns whether the mount is at `path` or below. A namespace that was not searched may have one there.
    pub fn may_be_below(&self, path: &Path) -> bool {
        self.path.as_ref().is_none_or(|own| own.starts_with(path))
    }
}

/// The time that a search of all namespaces takes at most. The kernel needs a time for a namespace that grows with the square of its
/// mounts if they are stacked, and every user can make such a namespace.
pub(super) struct Budget(Instant);

impl Budget {
    pub fn new() -> Self {
        Budget::lasting(OF_SEARCH)
    }

    pub fn lasting(time: Duration) -> Self {
        Budget(Instant::now() + time)
    }

    /// Returns the time by which the search of one more namespace has to end.
    pub fn of_namespace(&self) -> Instant {
        self.0.min(Instant::now() + OF_NAMESPACE)
    }

    pub fn is_spent(&self) -> bool {
        Instant::now() >= self.0
    }
}

/// A namespace of 3,000 mounts takes some milliseconds.
const OF_NAMESPACE: Duration = Duration::from_secs(1);
const OF_SEARCH: Duration = Duration::from_secs(5);

/// A question about a volume.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Question {
    pub(super) shown: Vec<Shown>,
    /// Processes whose namespaces are not looked at.
    pub(super) but_of: Vec<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_in_dev_is_no_copy_of_a_volume() {
        let shown = |is_node| Shown {
            device: rustix::fs::makedev(0, 5),
            fs_type: "devtmpfs".into(),
            root: "/loop3".into(),
            is_node,
            source: String::new(),
        };
        let entry = |path: &str| {
            table::parsed(format!("3 2 0:5 /loop3 {path} rw - devtmpfs dev rw").as_bytes()).next().unwrap()
        };
        assert!(!shown(true).is_shown_by(&entry("/dev/loop3")), "a container has the device");
        assert!(!shown(true).is_shown_by(&entry("/srv/container/dev/loop3")));
        assert!(shown(true).is_shown_by(&entry("/dev/xvda")), "a container has the volume by another name");
        assert!(shown(true).is_shown_by(&entry("/var/lib/csid/publish/ab")));
        assert!(shown(false).is_shown_by(&entry("/dev/loop3")), "a directory that is called so");
    }

    #[test]
    fn reused_device_number_is_another_file_system() {
        let shown = Shown {
            device: rustix::fs::makedev(0, 5),
            fs_type: "nfs4".into(),
            root: "/".into(),
            is_node: false,
            source: String::new(),
        };
        let entry = |line: &[u8]| table::parsed(line).next().unwrap();
        assert!(shown.is_shown_by(&entry(b"3 2 0:5 / /data rw - nfs4 server:/data rw")));
        assert!(!shown.is_shown_by(&entry(b"3 2 0:5 / /tmp rw - tmpfs tmpfs rw")));
    }

    #[test]
    fn backing_round_trips_through_text() {
        use std::os::unix::ffi::OsStringExt;
        let shown = |root: PathBuf| Shown {
            device: 5,
            fs_type: "nfs4".into(),
            root,
            is_node: false,
            source: String::new(),
        };
        let odd = std::ffi::OsString::from_vec(b"/a\xff".to_vec());
        let known =
            Backing { shown: vec![shown("/exported".into()), shown(odd.into())], ..Backing::default() };
        assert_eq!(Backing::from_text(&known.to_text().unwrap()).unwrap(), known);
        assert_eq!(Backing::default().to_text().unwrap(), "");
        assert_eq!(Backing::from_text("").unwrap(), Backing::default());
        assert!(Backing::from_text("{").is_err());
    }

    #[test]
    fn mounts_during_publishes_are_the_plugins() {
        let there = |paths: &[&str]| -> Vec<PlacedMount> {
            let placed = |path: &&str| PlacedMount { path: path.into(), root: "/".into(), read_only: false };
            paths.iter().map(placed).collect()
        };
        let mut known = Backing::default();
        assert!(known.foreign(there(&["/srv"])).is_empty(), "an older csid noted nothing");
        known.note_before(there(&["/driver/a"]));
        known.note_published(there(&["/driver/a"]));
        known.note_before(there(&["/driver/a", "/srv"]));
        known.note_published(there(&["/driver/a", "/driver/b", "/srv"]));
        let read = Backing::from_text(&known.to_text().unwrap()).unwrap();
        assert_eq!(read, known);
        assert_eq!(read.foreign(there(&["/driver/a", "/driver/b", "/srv"])), there(&["/srv"]));
        let mut staged = read.restaged(there(&["/driver/a", "/srv"]));
        assert!(!staged.knows_own(), "a volume that is not published is not searched for");
        staged = staged.restaged(Vec::new());
        staged.note_published(there(&["/driver/a", "/srv"]));
        assert_eq!(staged.foreign(there(&["/driver/a", "/srv"])), there(&["/srv"]), "it was there before");
    }

    #[test]
    fn gone_mounts_of_a_plugin_are_bounded() {
        let placed = |number: usize| PlacedMount {
            path: format!("/driver/{number}").into(),
            root: "/".into(),
            read_only: false,
        };
        let mut known = Backing::default();
        for number in 0..4 * REMEMBERED {
            known.note_published(vec![placed(0), placed(number)]);
            let of_plugin = known.of_plugin.as_ref().unwrap();
            assert!(of_plugin.len() <= REMEMBERED + 2, "{}", of_plugin.len());
            let there = vec![placed(0), placed(number)];
            assert_eq!(known.foreign(there), [], "a mount that is there is never dropped");
        }
    }

    #[test]
    fn mount_elsewhere_keeps_a_path_of_any_bytes() {
        use std::os::unix::ffi::OsStringExt;
        let odd = std::ffi::OsString::from_vec(b"/a\xff".to_vec());
        for path in [None, Some("/a".into()), Some(odd.into())] {
            let mount = MountElsewhere { holder: Holder::Namespace(7), path, read_only: true };
            let text = serde_json::to_string(&mount).unwrap();
            assert_eq!(serde_json::from_str::<MountElsewhere>(&text).unwrap(), mount);
        }
    }

    #[test]
    fn joined_backing_keeps_earlier_facts() {
        let shown = |device| Shown {
            device,
            fs_type: "nfs4".into(),
            root: "/".into(),
            is_node: false,
            source: String::new(),
        };
        let backing = |device| Backing { shown: vec![shown(device)], ..Backing::default() };
        let mut known = backing(5);
        known.join(backing(6));
        known.join(backing(5));
        assert_eq!(known.shown, [shown(5), shown(6)]);
    }
}
