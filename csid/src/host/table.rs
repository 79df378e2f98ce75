//! The mount table and the process table, read whole: for recovery, Reconcile and a person's error message,
//! never to find out about one mount.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::host::error::HostError;

/// A path with at least one mount on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountPoint {
    pub path: PathBuf,
    /// The device number of the topmost mount.
    pub device: u64,
    /// The number of mounts over one another.
    pub stacked: usize,
}

const HOLDERS: usize = 16;
/// Characters of a holder's name.
const NAME: usize = 256;
const PATIENCE: Duration = Duration::from_millis(500);

/// A mount in the table. `root` is what of its file system it shows.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MountEntry {
    /// The id of the mount. No two mounts of a kernel have the same id at a time. `parent` is the mount that it is mounted on.
    pub id: u64,
    pub parent: u64,
    pub device: u64,
    pub root: PathBuf,
    pub path: PathBuf,
    pub fs_type: String,
    /// What was mounted, such as a device or `HOST:/PATH`. Empty: the answer does not have it.
    pub source: String,
    /// The mount is, whatever its file system is.
    pub read_only: bool,
    pub groups: Groups,
}

/// The source of a mount that has none.
pub(super) const NO_SOURCE: &str = "none";

/// The peer groups by which a mount receives what is mounted and unmounted elsewhere, as `mount_namespaces(7)` names them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Groups {
    /// The group that it is a member of.
    pub shared: Option<u64>,
    /// The group that it is a slave of.
    pub master: Option<u64>,
    /// The nearest group above that, where the master is out of its namespace's sight.
    pub propagate_from: Option<u64>,
}

/// The types of file systems that a process or another host serves, with or without a subtype after a dot.
const SERVED: [&str; 10] =
    ["fuse", "fuseblk", "virtiofs", "nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "afs"];

/// The mount table of one moment: its text, and where each mount's line is. A line is parsed when it is asked for. Ten thousand parsed
/// lines would be dropped soon, and would leave holes all over the heap.
#[derive(Debug)]
pub struct MountTable {
    text: Vec<u8>,
    /// In the order of their parents, then of their places, then of the text.
    lines: Vec<TableLine>,
    /// The number that the mount of `/` is on.
    bottom: u64,
    hasher: RandomState,
}

/// A line of the table.
#[derive(Clone, Copy, Debug)]
struct TableLine {
    id: u64,
    parent: u64,
    /// A hash of the mount's path.
    place: u64,
    start: usize,
}

/// A mount as the table shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableMount {
    pub device: u64,
    /// The directory of the file system that the mount shows.
    pub root: PathBuf,
    /// A process or another host serves the file system.
    pub is_served: bool,
}

impl MountTable {
    pub(super) fn read() -> Result<MountTable, HostError> {
        Ok(MountTable::of(text()?))
    }

    /// Makes the table of the text of a `mountinfo`.
    pub(super) fn of(text: Vec<u8>) -> MountTable {
        let hasher = RandomState::new();
        let (mut lines, mut start) = (Vec::new(), 0);
        for line in text.split(|&byte| byte == b'\n') {
            let mut fields = line.split(|&byte| byte == b' ');
            let mut number = || number(fields.next()?);
            // The device and the root stand before the path.
            if let (Some(id), Some(parent), Some(path)) = (number(), number(), fields.nth(2)) {
                let place = hasher.hash_one(unescape(path).as_os_str());
                lines.push(TableLine { id, parent, place, start });
            }
            start += line.len() + 1;
        }
        let ids: HashSet<u64> = lines.iter().map(|line| line.id).collect();
        let root = hasher.hash_one(OsStr::new("/"));
        let bottom = lines.iter().find(|line| line.place == root && !ids.contains(&line.parent));
        let bottom = bottom.map_or(0, |line| line.parent);
        lines.sort_by_key(|line| (line.parent, line.place));
        MountTable { text, lines, bottom, hasher }
    }

    /// Returns the mount that a walk to `path`, which is absolute, ends on. `None`: nothing is mounted there, or another mount
    /// covers a directory above.
    pub fn at(&self, path: &Path) -> Option<TableMount> {
        let MountEntry { device, root, fs_type, .. } = self.entry_at(path)?;
        let kind = fs_type.split('.').next().unwrap_or_default();
        Some(TableMount { device, root, is_served: SERVED.contains(&kind) })
    }

    /// Returns whether the mount at `path` is read-only. `None`: as of [`MountTable::at`].
    pub fn is_read_only(&self, path: &Path) -> Option<bool> {
        self.entry_at(path).map(|entry| entry.read_only)
    }

    /// Returns whether the automount `top` lies on a mount at the same path that is no automount.
    pub(super) fn covers_a_mount(&self, top: &MountEntry) -> bool {
        let mut under = self.entry_of(top.parent);
        while let Some(mount) = under.filter(|mount| mount.path == top.path && mount.id != mount.parent) {
            if !is_autofs(&mount) {
                return true;
            }
            under = self.entry_of(mount.parent);
        }
        false
    }

    pub(super) fn entry_at(&self, path: &Path) -> Option<MountEntry> {
        self.entry_around(path).filter(|mount| mount.path == path)
    }

    /// Returns the mount that what lies at `path` is on: the last one that a walk there enters.
    pub(super) fn entry_around(&self, path: &Path) -> Option<MountEntry> {
        let path = plain(path);
        let mut way: Vec<&Path> = path.ancestors().collect();
        let mut reached: Option<&TableLine> = None;
        while let Some(next) = way.last() {
            match self.mounted_on(reached.map_or(self.bottom, |mount| mount.id), next) {
                Some(mount) => reached = Some(mount),
                None => drop(way.pop()),
            }
        }
        self.entry(reached?)
    }

    /// Returns all mounts at `path`, those that others cover, too.
    pub(super) fn all_at(&self, path: &Path) -> impl Iterator<Item = MountEntry> {
        let path = plain(path).into_owned();
        let place = self.hasher.hash_one(path.as_os_str());
        let there = self.lines.iter().filter(move |line| line.place == place);
        there.filter_map(|line| self.entry(line)).filter(move |entry| entry.path == path)
    }

    /// Returns the mount with this number.
    fn entry_of(&self, id: u64) -> Option<MountEntry> {
        self.entry(self.lines.iter().find(|line| line.id == id)?)
    }

    /// Returns the topmost of the mounts at `path` that are on the mount `parent`.
    fn mounted_on(&self, parent: u64, path: &Path) -> Option<&TableLine> {
        let of = (parent, self.hasher.hash_one(path.as_os_str()));
        let end = self.lines.partition_point(|line| (line.parent, line.place) <= of);
        let same = self.lines[..end].iter().rev().take_while(|line| (line.parent, line.place) == of);
        let mut same = same.filter(|line| {
            let there = self.line(line).split(|&byte| byte == b' ').nth(4).map(unescape);
            there.is_some_and(|there| there.as_os_str() == path.as_os_str())
        });
        same.next()
    }

    fn line(&self, line: &TableLine) -> &[u8] {
        let rest = &self.text[line.start..];
        rest.split(|&byte| byte == b'\n').next().unwrap_or_default()
    }

    fn entry(&self, line: &TableLine) -> Option<MountEntry> {
        entry(self.line(line))
    }
}

/// Returns the path without empty and `.` parts, as the kernel writes it.
pub fn plain(path: &Path) -> Cow<'_, Path> {
    let bytes = path.as_os_str().as_bytes();
    let may_have = bytes.windows(2).any(|pair| matches!(pair, b"//" | b"/."));
    match may_have || bytes.len() > 1 && bytes.ends_with(b"/") {
        true => Cow::Owned(path.components().collect()),
        false => Cow::Borrowed(path),
    }
}

/// The table of csid's own namespace, read once for all callers that ask at the same time: each read costs as much as all mounts of
/// the host.
#[derive(Default)]
pub(super) struct OwnTable {
    /// How many callers have asked since csid started: a caller's number.
    asked: AtomicU64,
    /// Callers that have no answer yet.
    waiting: AtomicUsize,
    last: tokio::sync::Mutex<LastRead>,
}

/// The result of the last read. It is dropped when no caller waits for it.
#[derive(Default)]
struct LastRead {
    /// The read began after this caller had asked, and after all callers before it.
    after: u64,
    entries: Option<Arc<Vec<MountEntry>>>,
}

/// A caller without an answer.
struct Waiting<'a>(&'a AtomicUsize);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl OwnTable {
    /// Returns the mounts of csid's own namespace, as they were at a moment after this call began.
    pub async fn entries(&self) -> Result<Arc<Vec<MountEntry>>, HostError> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let waiting = Waiting(&self.waiting);
        let caller = self.asked.fetch_add(1, Ordering::SeqCst) + 1;
        let mut last = self.last.lock().await;
        let known = last.entries.clone().filter(|_| last.after >= caller);
        let found = match known {
            Some(entries) => entries,
            None => {
                let after = self.asked.load(Ordering::SeqCst);
                let read = Arc::new(blocking(entries).await?);
                *last = LastRead { after, entries: Some(Arc::clone(&read)) };
                read
            }
        };
        drop(waiting);
        if self.waiting.load(Ordering::SeqCst) == 0 {
            last.entries = None;
        }
        Ok(found)
    }
}

/// Runs what reads `/proc` on a thread of the blocking pool.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, HostError> + Send + 'static,
) -> Result<T, HostError> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| {
        let source = std::io::Error::other("the thread that reads it ended without an answer");
        Err(HostError::Os { step: "read".into(), path: "/proc".into(), source })
    })
}

/// Returns the mounts of csid's own namespace.
pub(super) fn entries() -> Result<Vec<MountEntry>, HostError> {
    Ok(parsed(&text()?).collect())
}

/// Returns whether csid's own namespace shows the file system with this number.
pub(super) fn shows(device: u64) -> Result<bool, HostError> {
    Ok(briefs(&text()?).any(|mount| mount.device == device))
}

/// Bytes that are read of a mount table at first.
const TEXT: usize = 64 << 10;

/// Returns the text of csid's own `mountinfo`.
pub(super) fn text() -> Result<Vec<u8>, HostError> {
    let table = Path::new("/proc/thread-self/mountinfo");
    let failed = |source| HostError::Os { step: "read".into(), path: table.into(), source };
    let mut file = File::open(table).map_err(failed)?;
    // The file has no size. Without a first capacity the reads would begin with 32 bytes.
    let mut text = Vec::with_capacity(TEXT);
    file.read_to_end(&mut text).map_err(failed)?;
    Ok(text)
}

/// Returns the mounts in the text of a `mountinfo`.
pub(super) fn parsed(text: &[u8]) -> impl Iterator<Item = MountEntry> {
    text.split(|&byte| byte == b'\n').filter_map(entry)
}

pub(super) fn mounts_below(root: &Path) -> Result<Vec<MountPoint>, HostError> {
    let mut points: BTreeMap<PathBuf, MountPoint> = BTreeMap::new();
    for MountEntry { device, path, .. } in entries()?.into_iter().filter(|entry| entry.path.starts_with(root))
    {
        let first = MountPoint { path: path.clone(), device, stacked: 0 };
        let point = points.entry(path).or_insert(first);
        point.device = device;
        point.stacked += 1;
    }
    Ok(points.into_values().collect())
}

pub(super) fn copies(source: &Path) -> Result<Vec<PathBuf>, HostError> {
    shown(source, |shown, root| shown == root)
}

/// As [`copies`], with the mounts of directories below.
pub(super) fn copies_and_parts(source: &Path) -> Result<Vec<PathBuf>, HostError> {
    shown(source, |shown, root| shown.starts_with(root))
}

/// Returns the mount points, other than `source`, of the same file system whose root `is_of` the root of what is at `source`.
fn shown(source: &Path, is_of: impl Fn(&Path, &Path) -> bool) -> Result<Vec<PathBuf>, HostError> {
    let entries = entries()?;
    // The topmost mount at the source; a block device's node is itself none, but lies in one.
    let around = entries.iter().filter(|entry| source.starts_with(&entry.path));
    let Some(around) = around.max_by_key(|entry| entry.path.components().count()) else {
        return Ok(Vec::new());
    };
    let root: PathBuf =
        around.root.components().chain(source.components().skip(around.path.components().count())).collect();
    let is_copy = |entry: &&MountEntry| {
        entry.device == around.device && is_of(&entry.root, &root) && entry.path != source
    };
    Ok(entries.iter().filter(is_copy).map(|entry| entry.path.clone()).collect())
}

/// Whether the mount on top at `path` is one of autofs.
pub(super) fn is_automount(path: &Path) -> Result<bool, HostError> {
    Ok(entries()?.iter().rfind(|entry| entry.path == path).is_some_and(is_autofs))
}

/// Whether the mount is an automount.
pub(super) fn is_autofs(mount: &MountEntry) -> bool {
    mount.fs_type == "autofs"
}

/// The relation of an automount to a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Automount {
    /// There is no automount.
    None,
    /// The path is an automount point, and nothing is mounted on it.
    Bare,
    /// Something is mounted on the automount.
    Covered,
}

/// Returns what an automount is to `path`: a direct one is mounted there, an indirect one is what the path lies on.
pub(super) fn automount_at(path: &Path) -> Result<Automount, HostError> {
    let table = MountTable::read()?;
    let is_known = table.all_at(path).any(|entry| is_autofs(&entry));
    let is_on_one =
        table.all_at(path).filter_map(|entry| table.entry_of(entry.parent)).any(|on| is_autofs(&on));
    let is_over_a_mount = |top: &MountEntry| top.path == path && table.covers_a_mount(top);
    Ok(match table.entry_around(path) {
        Some(top) if is_autofs(&top) && !is_over_a_mount(&top) => Automount::Bare,
        _ if is_known || is_on_one => Automount::Covered,
        _ => Automount::None,
    })
}

/// How many mounts at `path`, on top or not, are of the file system with this number.
pub(super) fn count_at(path: &Path, device: u64) -> Result<usize, HostError> {
    Ok(entries()?.iter().filter(|entry| entry.path == path && entry.device == device).count())
}

/// The part of a line that a look at many mounts reads. It allocates nothing.
pub(super) struct Brief<'a> {
    pub id: u64,
    pub parent: u64,
    pub device: u64,
    pub groups: Groups,
    line: &'a [u8],
}

impl<'a> Brief<'a> {
    /// Returns the directory of its file system that the mount shows, and the mount's path.
    pub fn root_and_path(&self) -> Option<(Cow<'a, Path>, Cow<'a, Path>)> {
        let mut fields = self.line.split(|&byte| byte == b' ').skip(3);
        Some((unescape(fields.next()?), unescape(fields.next()?)))
    }

    /// Returns the whole line.
    pub fn entry(&self) -> Option<MountEntry> {
        entry(self.line)
    }
}

/// Returns the mounts in the text of a `mountinfo`, as [`parsed`] does.
pub(super) fn briefs(text: &[u8]) -> impl Iterator<Item = Brief<'_>> {
    text.split(|&byte| byte == b'\n').filter_map(brief)
}

fn brief(line: &[u8]) -> Option<Brief<'_>> {
    let mut fields = line.split(|&byte| byte == b' ');
    let mut number = || number(fields.next()?);
    let (id, parent) = (number()?, number()?);
    let device = device(fields.next()?)?;
    // The root, the path and the options.
    let groups = groups(fields.skip(3).take_while(|field| *field != b"-"));
    Some(Brief { id, parent, device, groups, line })
}

fn device(field: &[u8]) -> Option<u64> {
    let (major, minor) = std::str::from_utf8(field).ok()?.split_once(':')?;
    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
}

fn groups<'a>(fields: impl Iterator<Item = &'a [u8]>) -> Groups {
    let mut groups = Groups::default();
    for field in fields {
        let of = |name: &[u8]| number(field.strip_prefix(name)?);
        groups.shared = groups.shared.or_else(|| of(b"shared:"));
        groups.master = groups.master.or_else(|| of(b"master:"));
        groups.propagate_from = groups.propagate_from.or_else(|| of(b"propagate_from:"));
    }
    groups
}

/// A line such as `36 35 98:0 /root /mnt\040point rw,noatime shared:2 master:1 - ext3 /dev/root rw`.
fn entry(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|&byte| byte == b' ');
    let mut number = || number(fields.next()?);
    let (id, parent) = (number()?, number()?);
    let device = device(fields.next()?)?;
    let mut path = || Some(unescape(fields.next()?).into_owned());
    let (root, path) = (path()?, path()?);
    let read_only = fields.next()?.split(|&byte| byte == b',').any(|option| option == b"ro");
    let groups = groups(fields.by_ref().take_while(|field| *field != b"-"));
    let mut text = || Some(unescape(fields.next()?).to_string_lossy().into_owned());
    let fs_type = text()?;
    let source = text().filter(|source| !source.is_empty()).unwrap_or_else(|| NO_SOURCE.into());
    Some(MountEntry { id, parent, device, root, path, fs_type, source, read_only, groups })
}

fn number(field: &[u8]) -> Option<u64> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

/// Returns the text that the kernel writes so into a mount table.
pub(super) fn unescaped(text: &str) -> String {
    unescape(text.as_bytes()).to_string_lossy().into_owned()
}

/// The kernel writes space, tab, newline, `\` and `#` as `\` and three octal digits.
fn unescape(field: &[u8]) -> Cow<'_, Path> {
    if !field.contains(&b'\\') {
        return Cow::Borrowed(Path::new(OsStr::from_bytes(field)));
    }
    let mut path = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, after)) = rest.split_first() {
        let code =
            after.get(..3).filter(|_| byte == b'\\').and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(code) => {
                path.push(code);
                rest = &after[3..];
            }
            None => {
                path.push(byte);
                rest = after;
            }
        }
    }
    Cow::Owned(PathBuf::from(OsString::from_vec(path)))
}

/// Returns the holders of the mount at `path`: `PID COMMAND`, and `mount PATH` for mounts below it. The list may be incomplete, since
/// only links are read, never the files that they lead to, which may be dead.
pub(super) fn holders(path: &Path) -> Vec<String> {
    let end = Instant::now() + PATIENCE;
    let below = mounts_below(path).unwrap_or_default().into_iter().filter(|point| point.path != path);
    let mut found: Vec<_> =
        below.map(|point| presentable("mount", point.path.as_os_str().as_bytes())).take(HOLDERS).collect();
    let processes: BTreeSet<u32> = std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    for links in [true, false] {
        for process in &processes {
            if found.len() >= HOLDERS || Instant::now() > end {
                return found;
            }
            let directory = PathBuf::from(format!("/proc/{process}"));
            if if links { has_link(&directory, path) } else { has_mapping(&directory, path) } {
                let command = std::fs::read(directory.join("comm")).unwrap_or_default();
                found.push(presentable(&process.to_string(), command.trim_ascii_end()));
            }
        }
        // Maps are dear to read, and rarely all that holds a mount.
        if !found.is_empty() {
            break;
        }
    }
    found
}

/// Returns the name on one line. The holder of a mount chose it, and it goes to a terminal.
pub(super) fn presentable(what: &str, name: &[u8]) -> String {
    let name = String::from_utf8_lossy(name);
    let short: String = name.chars().take(NAME).collect();
    format!("{what} {short}").replace(char::is_control, " ")
}

fn has_link(process: &Path, path: &Path) -> bool {
    let descriptors = std::fs::read_dir(process.join("fd")).into_iter().flatten();
    let descriptors = descriptors.filter_map(|entry| Some(entry.ok()?.path()));
    let fixed = ["cwd", "root", "exe"].into_iter().map(|name| process.join(name));
    fixed.chain(descriptors).any(|link| std::fs::read_link(link).is_ok_and(|leads| leads.starts_with(path)))
}

fn has_mapping(process: &Path, path: &Path) -> bool {
    let maps = std::fs::read(process.join("maps")).unwrap_or_default();
    maps.split(|&byte| byte == b'\n').any(|line| {
        let start = line.iter().position(|&byte| byte == b'/').unwrap_or(line.len());
        Path::new(OsStr::from_bytes(&line[start..])).starts_with(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_path_of_a_table_is_found() {
        let table = MountTable::of(
            br"2 1 0:1 / / rw - ext4 d rw
3 2 0:2 /r /a\040b rw - tmpfs t rw
4 3 0:3 / /a\040b rw - fuse t rw"
                .to_vec(),
        );
        let ids = |path: &str| table.all_at(Path::new(path)).map(|entry| entry.id).collect::<BTreeSet<_>>();
        assert_eq!(table.entry_at(Path::new("/a b")).map(|entry| entry.id), Some(4));
        assert_eq!(ids("/a b"), BTreeSet::from([3, 4]));
        assert_eq!(ids("/a//b"), BTreeSet::new());
    }

    #[test]
    fn plain_path_has_no_empty_part() {
        for (path, is) in [
            ("/", "/"),
            ("/a/b", "/a/b"),
            ("/a//b", "/a/b"),
            ("/a/b/", "/a/b"),
            ("//a/./b//", "/a/b"),
            ("/.a/.b", "/.a/.b"),
            ("/a/..b/.", "/a/..b"),
        ] {
            assert_eq!(plain(Path::new(path)).as_os_str(), is, "{path}");
        }
        let table = MountTable::of(b"2 1 0:1 / / rw - ext4 d rw\n3 2 0:2 / /a/b rw - tmpfs t rw".to_vec());
        assert_eq!(
            table.at(Path::new("/a//b/")).unwrap().device,
            table.at(Path::new("/a/b")).unwrap().device
        );
    }

    #[tokio::test]
    async fn simultaneous_callers_share_a_read() {
        let table = OwnTable::default();
        let held = table.last.lock().await;
        let callers = futures_util::future::join_all((0..10).map(|_| table.entries()));
        let release = async move {
            tokio::task::yield_now().await;
            drop(held);
        };
        let (answers, ()) = tokio::join!(callers, release);
        let answers: Vec<_> = answers.into_iter().map(Result::unwrap).collect();
        assert!(answers.iter().all(|one| Arc::ptr_eq(one, &answers[0])));
        assert!(table.last.lock().await.entries.is_none(), "nobody waits for it");
    }

    #[tokio::test]
    async fn caller_during_a_read_gets_a_later_read() {
        let table = OwnTable::default();
        let first = table.entries().await.unwrap();
        // As if the first read were still under way when the next caller asked.
        let entries = Some(first.clone());
        *table.last.lock().await = LastRead { after: 1, entries };
        assert!(!Arc::ptr_eq(&table.entries().await.unwrap(), &first));
    }

    #[test]
    fn automount_over_a_mount_covers_it() {
        let root = "20 1 8:1 / / rw - ext4 /dev/sda1 rw";
        let bare = "30 20 0:40 / /srv/pg rw - autofs systemd-1 rw,direct";
        let covers = |lines: &[&str]| {
            let table = MountTable::of(lines.join("\n").into_bytes());
            let top = table.entry_around(Path::new("/srv/pg")).expect("a mount");
            (is_autofs(&top), table.covers_a_mount(&top))
        };
        assert_eq!(covers(&[root, bare]), (true, false));
        let bind = "31 20 8:16 / /srv/pg rw - ext4 /dev/sdb rw";
        let over = "32 31 0:41 / /srv/pg rw - autofs other rw,direct";
        assert_eq!(covers(&[root, bind, over]), (true, true));
        let second = "33 32 0:42 / /srv/pg rw - autofs third rw,direct";
        assert_eq!(covers(&[root, bind, over, second]), (true, true));
        let above = "34 20 8:32 / /srv rw - ext4 /dev/sdc rw";
        let below = "35 34 0:43 / /srv/pg rw - autofs systemd-1 rw,direct";
        assert_eq!(covers(&[root, above, below]), (true, false), "another path's mount");
    }

    #[test]
    fn reads_a_line() {
        let line = br"36 35 98:7 /mnt1 /mnt\0402\134\011x\012 rw,noatime master:1 - ext3 /dev/root rw,errors=continue";
        let (root, path) = (PathBuf::from("/mnt1"), PathBuf::from("/mnt 2\\\tx\n"));
        let device = rustix::fs::makedev(98, 7);
        let groups = Groups { master: Some(1), ..Groups::default() };
        let (fs_type, source) = ("ext3".to_owned(), "/dev/root".to_owned());
        let due =
            MountEntry { id: 36, parent: 35, device, root, path, fs_type, source, read_only: false, groups };
        assert_eq!(entry(line), Some(due));
        assert_eq!(entry(b""), None);
        assert_eq!(unescape(br"/a\04"), PathBuf::from(r"/a\04"));
    }

    #[test]
    fn a_brief_line_is_the_start_of_the_whole() {
        let text = b"7 1 0:5 / /a ro,relatime shared:3 master:2 propagate_from:1 - tmpfs - rw\n\n8 7 8:1 /x /a/- rw - ext4 d rw\n";
        let read: Vec<_> = briefs(text)
            .map(|brief| (brief.id, brief.parent, brief.device, brief.groups, brief.entry()))
            .collect();
        let due = parsed(text).map(|entry| (entry.id, entry.parent, entry.device, entry.groups, Some(entry)));
        assert_eq!(read, Vec::from_iter(due));
        assert_eq!(read.len(), 2);
    }

    #[test]
    fn reads_all_optional_fields() {
        let line = b"7 1 0:5 / /a ro,relatime shared:3 master:2 propagate_from:1 unbindable - tmpfs - rw";
        let read = entry(line).unwrap();
        assert_eq!(read.groups, Groups { shared: Some(3), master: Some(2), propagate_from: Some(1) });
        assert!(read.read_only, "the mount's flags count, not the file system's");
    }

    #[test]
    fn covered_mount_is_not_shown() {
        let table = |text: &str| MountTable::of(text.as_bytes().to_vec());
        let plain = "1 0 0:1 / / rw - ext4 x rw\n2 1 0:2 / /a rw shared:1 - tmpfs x rw\n3 2 0:3 /r /a/b/c rw - fuse.x x rw";
        let shown = |device, root: &str, is_served| {
            Some(TableMount { device: rustix::fs::makedev(0, device), root: root.into(), is_served })
        };
        let at = |more: &str, path: &str| table(&format!("{plain}\n{more}")).at(Path::new(path));
        assert_eq!(at("", "/a/b/c"), shown(3, "/r", true));
        assert_eq!(at("", "/a"), shown(2, "/", false));
        assert_eq!(at("", "/a/b"), None);
        assert_eq!(at("4 2 0:4 / /a/b rw - tmpfs x rw", "/a/b/c"), None, "covered from above");
        assert_eq!(
            at("4 2 0:4 / /a rw - tmpfs x rw", "/a/b/c"),
            None,
            "covered by a mount on top of a lower one"
        );
        assert_eq!(at("4 3 0:4 / /a/b/c rw - tmpfs x rw", "/a/b/c"), shown(4, "/", false), "stacked");
    }
}
