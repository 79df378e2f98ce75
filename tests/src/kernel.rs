//! Reads the kernel's state: the mount table of the calling thread's namespace, and loop devices.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

/// A line of mountinfo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    pub id: u64,
    /// `MAJOR:MINOR`.
    pub device: String,
    pub root: PathBuf,
    pub point: PathBuf,
    pub options: String,
    /// `shared:N`, `master:N`, both or nothing.
    pub propagation: String,
    pub fs_type: String,
    pub source: String,
}

impl Mount {
    /// Whether it is a tmpfs of csid's for mount points.
    pub fn is_live(&self) -> bool {
        self.fs_type == "tmpfs" && self.source == "csid-live" && self.root == Path::new("/")
    }

    pub fn has(&self, option: &str) -> bool {
        self.options.split(',').any(|o| o == option)
    }
}

/// The mount table, in mount order.
pub fn mounts() -> io::Result<Vec<Mount>> {
    mounts_of(Path::new("/proc/thread-self"))
}

/// The mount table of a process or thread, by its directory in /proc.
pub fn mounts_of(process: &Path) -> io::Result<Vec<Mount>> {
    let text = std::fs::read_to_string(process.join("mountinfo"))?;
    Ok(text.lines().filter_map(parse).collect())
}

fn parse(line: &str) -> Option<Mount> {
    let (front, back) = line.split_once(" - ")?;
    let mut fields = front.split(' ');
    let id = fields.next()?.parse().ok()?;
    let device = fields.nth(1)?.to_owned();
    let root = unescape(fields.next()?);
    let point = unescape(fields.next()?);
    let options = fields.next()?.to_owned();
    let propagation = fields.collect::<Vec<_>>().join(" ");
    let mut back = back.split(' ');
    let (fs_type, source) = (back.next()?.to_owned(), back.next()?.to_owned());
    Some(Mount { id, device, root, point, options, propagation, fs_type, source })
}

/// `\040` and its like.
fn unescape(text: &str) -> PathBuf {
    use std::os::unix::ffi::OsStringExt;

    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut place = 0;
    while place < bytes.len() {
        let octal = bytes.get(place + 1..place + 4).filter(|_| bytes[place] == b'\\');
        match octal.and_then(|o| std::str::from_utf8(o).ok()).and_then(|o| u8::from_str_radix(o, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                place += 4;
            }
            None => {
                out.push(bytes[place]);
                place += 1;
            }
        }
    }
    std::ffi::OsString::from_vec(out).into()
}

/// How many mounts are stacked exactly at `path`.
pub fn stacked(path: &Path) -> io::Result<usize> {
    Ok(mounts()?.iter().filter(|m| m.point == path).count())
}

/// The number of the mount at `path`, where the kernel has it (6.8) one that no later mount gets.
pub fn mount_id(path: &Path) -> io::Result<u64> {
    const MNT_ID_UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);
    let flags = MNT_ID_UNIQUE | StatxFlags::MNT_ID;
    Ok(statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT, flags)?.stx_mnt_id)
}

/// The mounts strictly below `path`.
pub fn below(path: &Path) -> io::Result<Vec<Mount>> {
    Ok(mounts()?.into_iter().filter(|m| m.point != path && m.point.starts_with(path)).collect())
}

/// The mounts strictly below `path`, but csid's own tmpfs for mount points.
pub fn volumes_below(path: &Path) -> io::Result<Vec<Mount>> {
    Ok(below(path)?.into_iter().filter(|m| !m.is_live()).collect())
}

/// Everything below `path`, sorted. What is mounted is not entered, but for csid's own tmpfs for mount points.
pub fn tree(path: &Path) -> io::Result<Vec<PathBuf>> {
    let points: Vec<_> = mounts()?.into_iter().filter(|m| !m.is_live()).map(|m| m.point).collect();
    let mut found = Vec::new();
    let mut todo = vec![path.to_owned()];
    while let Some(directory) = todo.pop() {
        let entries = match std::fs::read_dir(&directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other?,
        };
        for entry in entries {
            let entry = entry?;
            if entry.file_type()?.is_dir() && !points.contains(&entry.path()) {
                todo.push(entry.path());
            }
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

/// A loop device over a file. It is detached when the last who has it open closes it, and this value has it open: also
/// the death of the test ends it.
pub struct Loop {
    pub device: PathBuf,
    _open: File,
}

impl Loop {
    pub fn attach(file: &Path, read_only: bool) -> io::Result<Self> {
        let mut command = Command::new("losetup");
        command.args(["--find", "--show"]);
        if read_only {
            command.arg("--read-only");
        }
        let output = command.arg(file).output()?;
        if !output.status.success() {
            return Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()));
        }
        let device = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        let open = File::open(&device);
        // Detaching an open device makes the kernel wait for its last close.
        let detached = Command::new("losetup").arg("--detach").arg(&device).status()?;
        if !detached.success() {
            return Err(io::Error::other(format!("losetup --detach {}: {detached}", device.display())));
        }
        Ok(Loop { device, _open: open? })
    }
}

/// A process' memory, as the kernel counts it.
pub fn resident_kib(pid: u32) -> usize {
    memory_kib(pid, "VmRSS:")
}

/// Returns the most memory that a process had since [`forget_peak`].
pub fn peak_kib(pid: u32) -> usize {
    memory_kib(pid, "VmHWM:")
}

/// Makes the kernel measure the peak of a process' memory from now on.
pub fn forget_peak(pid: u32) {
    std::fs::write(format!("/proc/{pid}/clear_refs"), "5").expect("a new peak");
}

fn memory_kib(pid: u32, what: &str) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    let line = status.lines().find_map(|line| line.strip_prefix(what)).expect("its memory");
    line.trim_end_matches("kB").trim().parse().expect("a number")
}

/// The backing files of all attached loop devices.
pub fn loops() -> io::Result<Vec<String>> {
    let output = Command::new("losetup").args(["--noheadings", "--output", "NAME,BACK-FILE"]).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_is_read_with_its_escapes() {
        let line = r"36 35 98:0 /mnt1 /a\040b\134c rw,noatime master:1 - ext3 /dev/root rw,errors=continue";
        let mount = parse(line).unwrap();
        assert_eq!(mount.point, Path::new(r"/a b\c"));
        assert_eq!((mount.id, mount.device.as_str(), mount.fs_type.as_str()), (36, "98:0", "ext3"));
        assert!(mount.has("noatime") && !mount.has("ro"));
    }
}
