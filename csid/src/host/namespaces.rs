//! Mounts of a volume in other mount namespaces than csid's: a container's, a sandboxed service's. They keep the volume in use
//! after csid has unmounted its own mounts.
//!
//! A mount there that receives the host's unmount goes along with it, and is no use of its own. Unmounting propagates by the
//! *parent* mount: the mount goes if its parent is a peer or a slave of the host mount's parent and it lies at the same place
//! on it. How the mount itself propagates says nothing: an `rslave` bind of it outlives the unmount.
//!
//! csid asks `/proc/PID/mountinfo`, once for each namespace. It may not read `/proc/PID/ns/mnt` (that takes CAP_SYS_PTRACE),
//! so the first line identifies a namespace: a mount has one id in the kernel and one namespace. csid does not see a namespace
//! without a process (one that a file or a descriptor holds), one that only a thread of a process is in, and, where `/proc`
//! is mounted with `hidepid`, those of other users' processes.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::host::device::BlockDevice;
use crate::host::error::HostError;
use crate::host::table::{self, Brief, Groups, MountEntry};

/// How often, and how long apart, it is looked again: a container's runtime copies all mounts for an instant.
pub(super) const LOOKS: u32 = 3;
pub(super) const PAUSE: Duration = Duration::from_millis(100);
/// Bytes of one table of mounts that csid reads; a namespace has 100,000 mounts at most (fs.mount-max). A larger table may show anything,
/// so its namespace counts as one that shows the volume.
const LARGEST: u64 = 64 << 20;
/// Holders that an error names.
pub(super) const NAMED: usize = 16;

/// A directory or file of a file system, which a mount shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Shown {
    pub(super) device: u64,
    /// The file system's type; empty: any. The kernel gives the number of an unmounted file system without a device to the next one.
    pub(super) fs_type: String,
    #[serde(with = "bytes")]
    pub(super) root: PathBuf,
    /// Whether it is the node of a block device.
    pub(super) is_node: bool,
}

/// A path in the journal: text, or an array of bytes where the path is not UTF-8.
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
}

impl Shown {
    /// Whether this is a mount of it, or of something in it. A node under its own name in a `/dev` is none: a container that was
    /// given the device has not been given the volume.
    pub(super) fn is_shown_by(&self, entry: &MountEntry) -> bool {
        self.device == entry.device
            && (self.fs_type.is_empty() || self.fs_type == entry.fs_type)
            && entry.root.starts_with(&self.root)
            && !(self.is_node && is_in_dev(&entry.path, &entry.root))
    }
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
}

impl Backing {
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

/// A mount of a volume in another namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountElsewhere {
    /// A process in that namespace.
    pub process: u32,
    /// As the process sees it.
    pub path: PathBuf,
    pub read_only: bool,
}

/// Questions that wait for the next look, and whether a look is under way: one look answers all who asked before it.
#[derive(Default)]
pub(super) struct Lookout {
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
pub(super) struct Waiting {
    pub(super) is_looking: bool,
    pub(super) questions: Vec<(Question, ProbeReply)>,
}

pub(super) type ProbeReply = oneshot::Sender<Result<Vec<MountElsewhere>, HostError>>;

pub(super) struct Question {
    pub(super) shown: Vec<Shown>,
    /// Processes whose namespaces are not looked at.
    pub(super) but_of: Vec<u32>,
}

impl Lookout {
    pub(super) fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A look under way. After one that panics the next question starts another one.
pub(super) struct Looking {
    pub(super) at: Arc<Lookout>,
    pub(super) has_ended: bool,
}

impl Drop for Looking {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let mut waiting = self.at.waiting();
        waiting.is_looking = false;
        waiting.questions.clear();
    }
}

pub(super) fn ended() -> HostError {
    let source = std::io::Error::other("the look at other mount namespaces ended without an answer");
    HostError::Os { step: "read".into(), path: "/proc".into(), source }
}

/// Answers questions until none waits.
pub(super) fn answer_all(mut looking: Looking) {
    loop {
        let batch = {
            let mut waiting = looking.at.waiting();
            if waiting.questions.is_empty() {
                waiting.is_looking = false;
                drop(waiting);
                looking.has_ended = true;
                return;
            }
            std::mem::take(&mut waiting.questions)
        };
        let (questions, answers): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
        match look(&questions) {
            Ok(found) => {
                for (answer, found) in answers.into_iter().zip(found) {
                    let _ = answer.send(Ok(found));
                }
            }
            // Each question without its own error is answered by the dropped sender.
            Err(error) => {
                if let Some(answer) = answers.into_iter().next() {
                    let _ = answer.send(Err(error));
                }
            }
        }
    }
}

/// A mount that shows what was asked for, as all views of its namespace have it.
struct Found {
    copy: MountElsewhere,
    /// The questions that it answers.
    of: BTreeSet<usize>,
    device: u64,
    /// The groups of its parent, and its place on it, by the first process that sees the parent.
    parent: Option<(Groups, PathBuf)>,
    /// Something is mounted on it, so that it outlives the host's unmount.
    is_parent: bool,
}

/// A directory or file of the file system with this number.
type Place<'a> = (u64, &'a [u8]);

/// Reads the mounts of all namespaces once, and returns the answers in the order of the questions.
fn look(questions: &[Question]) -> Result<Vec<Vec<MountElsewhere>>, HostError> {
    let mut text = Vec::new();
    let own_line = first_line(Path::new("/proc/self"), &mut text).map(|(_, line)| line).unwrap_or_default();
    let mut but_of: Vec<HashSet<Vec<u8>>> = Vec::new();
    for question in questions {
        let lines = question.but_of.iter().filter_map(|process| first_line(&directory(*process), &mut text));
        but_of.push(lines.map(|(_, line)| line).collect());
    }

    let own = table::entries()?;
    let own_ids: HashMap<u64, &MountEntry> = own.iter().map(|entry| (entry.id, entry)).collect();
    let mut shown: HashMap<Place<'_>, Vec<(usize, &Shown)>> = HashMap::new();
    for (number, question) in questions.iter().enumerate() {
        for one in &question.shown {
            shown.entry((one.device, one.root.as_os_str().as_bytes())).or_default().push((number, one));
        }
    }
    let devices: HashSet<u64> = shown.keys().map(|(device, _)| *device).collect();
    let asked = |entry: &MountEntry| -> BTreeSet<usize> {
        if !devices.contains(&entry.device) {
            return BTreeSet::new();
        }
        let above = entry.root.ancestors().map(|root| (entry.device, root.as_os_str().as_bytes()));
        let asked = above.filter_map(|key| shown.get(&key)).flatten();
        asked.filter(|(_, shown)| shown.is_shown_by(entry)).map(|(number, _)| *number).collect()
    };
    // By the group that the host's unmount begins in, and the place on its members.
    let mut unmounted: HashSet<(u64, u64, PathBuf)> = HashSet::new();
    for entry in own.iter().filter(|entry| !asked(entry).is_empty()) {
        let parent = own_ids.get(&entry.parent).copied();
        if let Some((group, place)) = parent.and_then(|on| Some((on.groups.shared?, place_on(entry, on)?))) {
            unmounted.insert((entry.device, group, place));
        }
    }

    let mut seen: HashSet<Vec<u8>> = HashSet::from([own_line]);
    let mut masters: HashMap<u64, BTreeSet<u64>> = HashMap::new();
    let mut found: BTreeMap<u64, Found> = BTreeMap::new();
    let mut unread: Vec<(MountElsewhere, Vec<u8>)> = Vec::new();
    for process in processes() {
        // A process that has ended has no namespace.
        let Some((mut file, line)) = first_line(&directory(process), &mut text) else { continue };
        if seen.contains(&line) || file.by_ref().take(LARGEST).read_to_end(&mut text).is_err() {
            continue;
        }
        if text.len() as u64 >= LARGEST {
            unread
                .push((MountElsewhere { process, path: PathBuf::from("/"), read_only: false }, line.clone()));
        }
        let briefs: Vec<Brief<'_>> = table::briefs(&text).collect();
        let mut by_id: Option<(HashMap<u64, &Brief<'_>>, HashSet<u64>)> = None;
        for brief in &briefs {
            let Groups { shared, master, propagate_from } = brief.groups;
            for (below, above) in [(shared, master), (shared, propagate_from), (master, propagate_from)] {
                if let (Some(below), Some(above)) = (below, above) {
                    masters.entry(below).or_default().insert(above);
                }
            }
            if !devices.contains(&brief.device) || own_ids.contains_key(&brief.id) {
                continue;
            }
            let Some(entry) = brief.entry() else { continue };
            let mut of = asked(&entry);
            of.retain(|number| !but_of[*number].contains(&line));
            if of.is_empty() {
                continue;
            }
            let (by_id, parents) = by_id.get_or_insert_with(|| {
                let is_root = |other: &&Brief<'_>| other.parent == other.id;
                let parents = briefs.iter().filter(|other| !is_root(other)).map(|other| other.parent);
                (briefs.iter().map(|on| (on.id, on)).collect(), parents.collect())
            });
            let is_parent = parents.contains(&entry.id);
            let parent = by_id.get(&entry.parent).filter(|on| on.id != entry.id);
            let parent = parent.and_then(|on| Some((on.groups, place_on(&entry, &on.entry()?)?)));
            let copy = MountElsewhere { process, path: entry.path.clone(), read_only: entry.read_only };
            let device = entry.device;
            let known = found.entry(entry.id).or_insert_with(|| Found {
                copy,
                of: BTreeSet::new(),
                device,
                parent: None,
                is_parent: false,
            });
            known.of.extend(of);
            known.is_parent |= is_parent;
            known.parent = known.parent.take().or(parent);
        }
        seen.insert(line);
    }

    let goes_along = |found: &Found| {
        let Some((groups, place)) = found.parent.as_ref().filter(|_| !found.is_parent) else { return false };
        let begins = |group: u64| unmounted.contains(&(found.device, group, place.clone()));
        receives_from(*groups, &masters).any(begins)
    };
    let mut answers = vec![Vec::new(); questions.len()];
    for found in found.into_values().filter(|found| !goes_along(found)) {
        for number in found.of {
            answers[number].push(found.copy.clone());
        }
    }
    for (copy, line) in unread {
        let asking = answers.iter_mut().zip(&but_of).filter(|(_, but_of)| !but_of.contains(&line));
        asking.for_each(|(answer, _)| answer.push(copy.clone()));
    }
    Ok(answers)
}

/// Returns every group whose unmounts reach a mount with these groups.
fn receives_from(groups: Groups, masters: &HashMap<u64, BTreeSet<u64>>) -> impl Iterator<Item = u64> {
    let mut reached: BTreeSet<u64> = BTreeSet::new();
    let mut next: Vec<u64> =
        [groups.shared, groups.master, groups.propagate_from].into_iter().flatten().collect();
    while let Some(group) = next.pop() {
        if reached.insert(group) {
            next.extend(masters.get(&group).into_iter().flatten());
        }
    }
    reached.into_iter()
}

/// Returns the directory or file that `entry` is mounted on, as its path in the file system of the mount `on`.
fn place_on(entry: &MountEntry, on: &MountEntry) -> Option<PathBuf> {
    Some(on.root.join(entry.path.strip_prefix(&on.path).ok()?))
}

fn directory(process: u32) -> PathBuf {
    PathBuf::from(format!("/proc/{process}"))
}

/// Returns the processes, the first ones first.
fn processes() -> BTreeSet<u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect()
}

/// Opens a process' table of mounts and reads its first line, which identifies the namespace and how much of it the process'
/// root shows. What was read is in `text`. `None`: the process has ended, or sees no mount.
fn first_line(process: &Path, text: &mut Vec<u8>) -> Option<(File, Vec<u8>)> {
    let mut file = File::open(process.join("mountinfo")).ok()?;
    text.clear();
    // The kernel writes no more lines than are asked for.
    let mut part = [0; 256];
    loop {
        let count = file.read(&mut part).ok().filter(|count| *count > 0)?;
        text.extend_from_slice(&part[..count]);
        if let Some(end) = text.iter().position(|&byte| byte == b'\n') {
            return Some((file, text[..end].to_vec()));
        }
    }
}

pub(super) fn described(process: u32) -> String {
    let directory = directory(process);
    let command = std::fs::read(directory.join("comm")).unwrap_or_default();
    let name = table::presentable(&process.to_string(), command.trim_ascii_end());
    let groups = std::fs::read_to_string(directory.join("cgroup")).unwrap_or_default();
    match unit(&groups) {
        Some(unit) => format!("{name} ({})", unit.replace(char::is_control, " ")),
        None => name,
    }
}

/// Returns the systemd unit, or the control group where there is none, of a process whose `/proc/PID/cgroup` says this. Of a user's
/// unit its own, not that of the user's systemd.
fn unit(groups: &str) -> Option<&str> {
    let named = |prefix: &str| groups.lines().find_map(|line| line.split_once(prefix)).map(|(_, path)| path);
    let path = named("0::").filter(|path| *path != "/").or_else(|| named(":name=systemd:"))?;
    let is_unit = |part: &&str| part.ends_with(".service") || part.ends_with(".scope");
    let of_user = |part: &&str| !part.starts_with("user@");
    let mut units = path.split('/').filter(is_unit);
    let first = units.next();
    first.filter(of_user).or_else(|| units.next()).or(first).or(Some(path).filter(|path| *path != "/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_named_with_its_unit() {
        for (groups, due) in [
            ("0::/system.slice/cron.service\n", Some("cron.service")),
            ("0::/machine.slice/libpod-ab.scope/container\n", Some("libpod-ab.scope")),
            ("0::/user.slice/user-1.slice/user@1.service/app.slice/app-x.scope\n", Some("app-x.scope")),
            ("0::/user.slice/user-1.slice/user@1.service\n", Some("user@1.service")),
            ("1:name=systemd:/system.slice/a.service\n0::/\n", Some("a.service")),
            ("0::/docker/ab\n", Some("/docker/ab")),
            ("0::/\n", None),
            ("", None),
        ] {
            assert_eq!(unit(groups), due, "{groups}");
        }
    }

    #[test]
    fn unmounts_come_by_peers_and_masters_alone() {
        let masters = HashMap::from([(9, BTreeSet::from([5])), (5, BTreeSet::from([2]))]);
        let from = |shared, master, propagate_from| -> Vec<u64> {
            receives_from(Groups { shared, master, propagate_from }, &masters).collect()
        };
        assert_eq!(from(Some(2), None, None), [2]);
        assert_eq!(from(None, Some(9), None), [2, 5, 9], "a slave of a slave");
        assert_eq!(from(None, Some(7), Some(5)), [2, 5, 7]);
        assert!(from(None, None, None).is_empty(), "a private mount receives nothing");
    }

    #[test]
    fn a_place_is_named_in_its_file_system() {
        let entry = |line: &[u8]| table::parsed(line).next().unwrap();
        let on = entry(b"2 1 0:5 /srv /var rw - tmpfs - rw");
        let at = entry(b"3 2 0:6 / /var/a/b rw - tmpfs - rw");
        assert_eq!(place_on(&at, &on), Some(PathBuf::from("/srv/a/b")));
        assert_eq!(place_on(&on, &at), None);
    }

    #[test]
    fn a_node_in_dev_is_no_copy_of_a_volume() {
        let shown = |is_node| Shown {
            device: rustix::fs::makedev(0, 5),
            fs_type: "devtmpfs".into(),
            root: "/loop3".into(),
            is_node,
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
        };
        let entry = |line: &[u8]| table::parsed(line).next().unwrap();
        assert!(shown.is_shown_by(&entry(b"3 2 0:5 / /data rw - nfs4 server:/data rw")));
        assert!(!shown.is_shown_by(&entry(b"3 2 0:5 / /tmp rw - tmpfs tmpfs rw")));
    }

    #[test]
    fn backing_round_trips_through_text() {
        use std::os::unix::ffi::OsStringExt;
        let shown = |root: PathBuf| Shown { device: 5, fs_type: "nfs4".into(), root, is_node: false };
        let odd = std::ffi::OsString::from_vec(b"/a\xff".to_vec());
        let known =
            Backing { shown: vec![shown("/exported".into()), shown(odd.into())], ..Backing::default() };
        assert_eq!(Backing::from_text(&known.to_text().unwrap()).unwrap(), known);
        assert_eq!(Backing::default().to_text().unwrap(), "");
        assert_eq!(Backing::from_text("").unwrap(), Backing::default());
        assert!(Backing::from_text("{").is_err());
    }

    #[test]
    fn joined_backing_keeps_earlier_facts() {
        let shown = |device| Shown { device, fs_type: "nfs4".into(), root: "/".into(), is_node: false };
        let backing = |device| Backing { shown: vec![shown(device)], ..Backing::default() };
        let mut known = backing(5);
        known.join(backing(6));
        known.join(backing(5));
        assert_eq!(known.shown, [shown(5), shown(6)]);
    }
}
