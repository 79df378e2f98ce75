//! The mount table and the process table, read whole: for recovery, Reconcile and a person's error message,
//! never to find out about one mount.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::MountPoint;
use super::error::HostError;

const HOLDERS: usize = 16;
const PATIENCE: Duration = Duration::from_millis(500);

/// A mount in the table. `root` is what of its file system it shows.
#[derive(Debug, PartialEq, Eq)]
struct Entry {
    device: u64,
    root: PathBuf,
    path: PathBuf,
}

fn entries() -> Result<Vec<Entry>, HostError> {
    let table = Path::new("/proc/self/mountinfo");
    let text =
        std::fs::read(table).map_err(|source| HostError::Os { step: "read", path: table.into(), source })?;
    Ok(text.split(|&byte| byte == b'\n').filter_map(entry).collect())
}

pub(super) fn mounts_below(root: &Path) -> Result<Vec<MountPoint>, HostError> {
    let mut points: BTreeMap<PathBuf, MountPoint> = BTreeMap::new();
    for Entry { device, path, .. } in entries()?.into_iter().filter(|entry| entry.path.starts_with(root)) {
        let first = MountPoint { path: path.clone(), device, stacked: 0 };
        let point = points.entry(path).or_insert(first);
        point.device = device;
        point.stacked += 1;
    }
    Ok(points.into_values().collect())
}

pub(super) fn copies(source: &Path) -> Result<Vec<PathBuf>, HostError> {
    let entries = entries()?;
    // The topmost mount at the source; a block device's node is itself none, but lies in one.
    let around = entries.iter().filter(|entry| source.starts_with(&entry.path));
    let Some(around) = around.max_by_key(|entry| entry.path.components().count()) else {
        return Ok(Vec::new());
    };
    let root: PathBuf =
        around.root.components().chain(source.components().skip(around.path.components().count())).collect();
    let is_copy =
        |entry: &&Entry| entry.device == around.device && entry.root == root && entry.path != source;
    Ok(entries.iter().filter(is_copy).map(|entry| entry.path.clone()).collect())
}

/// How many mounts at `path`, on top or not, are of the file system with this number.
pub(super) fn count_at(path: &Path, device: u64) -> Result<usize, HostError> {
    Ok(entries()?.iter().filter(|entry| entry.path == path && entry.device == device).count())
}

/// A line such as `36 35 98:0 /root /mnt\040point rw …`.
fn entry(line: &[u8]) -> Option<Entry> {
    let mut fields = line.split(|&byte| byte == b' ').skip(2);
    let (major, minor) = std::str::from_utf8(fields.next()?).ok()?.split_once(':')?;
    Some(Entry {
        device: rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?),
        root: unescape(fields.next()?),
        path: unescape(fields.next()?),
    })
}

/// The kernel writes space, tab, newline, `\` and `#` as `\` and three octal digits.
fn unescape(field: &[u8]) -> PathBuf {
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
    PathBuf::from(OsString::from_vec(path))
}

/// Who keeps the mount at `path` busy: `PID COMMAND`, and `mount PATH` for mounts below it. Best effort: only
/// links are read, never what they lead to, which may be dead.
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

/// Whoever holds a mount chose the name: it goes to a terminal on one line.
fn presentable(what: &str, name: &[u8]) -> String {
    format!("{what} {}", String::from_utf8_lossy(name)).replace(char::is_control, " ")
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
        Path::new(std::ffi::OsStr::from_bytes(&line[start..])).starts_with(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_line() {
        let line = br"36 35 98:7 /mnt1 /mnt\0402\134\011x\012 rw,noatime master:1 - ext3 /dev/root rw,errors=continue";
        let (root, path) = (PathBuf::from("/mnt1"), PathBuf::from("/mnt 2\\\tx\n"));
        assert_eq!(entry(line), Some(Entry { device: rustix::fs::makedev(98, 7), root, path }));
        assert_eq!(entry(b""), None);
        assert_eq!(unescape(br"/a\04"), PathBuf::from(r"/a\04"));
    }
}
