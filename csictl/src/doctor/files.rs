//! csid's sockets and their rights, its mount namespace, its journal and its disk.

use std::{
    fs::{self, File},
    io::{self, ErrorKind, Read},
    os::{
        fd::AsRawFd,
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
};

use rustix::{fs::statvfs, process::geteuid};
use serde::{Deserialize, Serialize};
use tokio::process::Command;

use super::bounded::run;
use super::finding::Report;

const STATE: &str = "/var/lib/csid";
const JOURNAL: &str = "/var/lib/csid/journal/csid.db";
/// What SQLite has not yet copied to the journal's file.
const LOG: &str = "/var/lib/csid/journal/csid.db-wal";
/// The version of the journal that the csid of this version writes.
const SCHEMA: u32 = 5;

/// Free space and inodes below which csid soon cannot write: bytes, and parts in a thousand.
const FULL: (u64, u64) = (16 << 20, 5);
const SCARCE: (u64, u64) = (256 << 20, 50);

const ROOTS: &str = "/var/lib/csid/plugins";
const FILES: &str = "/etc/csid/plugins.d";

/// What is below csid's directories. A process of its own looks, because a process that waits for a file system's server cannot end.
#[derive(Default, Serialize, Deserialize)]
pub struct State {
    findings: Report,
    /// The plugins of plugins.d.
    pub files: Vec<String>,
    /// The plugins that have a directory.
    pub roots: Vec<String>,
    /// Where these directories are, as the mount table names it.
    pub real_roots: PathBuf,
}

impl State {
    /// Looks in this process.
    pub fn look() -> State {
        let mut findings = Report::default();
        journal(&mut findings);
        disk(&mut findings);
        let files = names(Path::new(FILES));
        let files = files.iter().filter_map(|name| name.strip_suffix(".toml").map(str::to_owned));
        let real_roots = real(ROOTS).unwrap_or_else(|_| ROOTS.into());
        State { files: files.collect(), roots: names(Path::new(ROOTS)), real_roots, findings }
    }
}

/// Returns a directory's path without links.
fn real(directory: &str) -> io::Result<PathBuf> {
    let opened = File::open(directory)?;
    fs::read_link(format!("/proc/self/fd/{}", opened.as_raw_fd()))
}

/// Returns the names in a directory. Nothing in it is opened.
fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.retain(|name| !name.starts_with('.'));
    names.sort();
    names
}

pub async fn look(report: &mut Report) -> State {
    sockets(report);
    let program = std::env::current_exe().unwrap_or_else(|_| "csictl".into());
    let looked = run(Command::new(program).arg("doctor-state")).await;
    let state = looked.and_then(|ended| Ok(serde_json::from_str::<State>(&ended.stdout)?));
    match state {
        Ok(mut state) => {
            report.append(std::mem::take(&mut state.findings));
            state
        }
        Err(error) if error.kind() == ErrorKind::TimedOut => {
            let remedy = "repair the server or the disk of the file system: `findmnt --target /var/lib/csid`";
            report.error(STATE, "its file system does not answer: csid cannot write its journal", remedy);
            State::default()
        }
        Err(error) => {
            report.warning(
                STATE,
                &format!("it cannot be looked at: {error}"),
                "`csictl doctor-state` shows why",
            );
            State::default()
        }
    }
}

/// A socket of csid's.
struct Socket {
    path: &'static str,
    unit: &'static str,
    mode: u32,
    group: &'static str,
}

const HELPER: &str = "csid-helper.socket";
const SOCKETS: [Socket; 2] = [
    Socket { path: "/run/csid/csid.sock", unit: "csid.socket", mode: 0o660, group: "csid" },
    Socket { path: "/run/csid/helper.sock", unit: HELPER, mode: 0o600, group: "root" },
];

impl Socket {
    /// Returns the command that gives the socket its owner, group and mode.
    fn rights(&self) -> String {
        let Self { path, mode, group, .. } = self;
        format!("`chown root:{group} {path} && chmod {mode:04o} {path}`; mounts stay")
    }

    /// Returns the command that has systemd make the socket. systemd starts no socket whose service is active. It restarts csid, which
    /// requires both sockets. The helper does not require its socket, so it is stopped first.
    fn remake(&self) -> String {
        match self.unit {
            HELPER => format!(
                "`systemctl stop csid-helper.service; systemctl restart {HELPER}; systemctl start csid.service` makes it again; \
                 mounts stay"
            ),
            unit => format!("`systemctl restart {unit}` makes it again; mounts stay"),
        }
    }
}

/// The runtime directory is a tmpfs, so these calls do not hang.
fn sockets(report: &mut Report) {
    let before = report.len();
    for socket in SOCKETS {
        let path = socket.path;
        let file = match fs::symlink_metadata(path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                report.error(path, "it is not there", &socket.remake());
                continue;
            }
            Err(error) => {
                report.note(path, &format!("it cannot be looked at: {error}"), "run doctor as root");
                continue;
            }
        };
        let (mode, rights) = (file.mode() & 0o7777, socket.mode);
        if !file.file_type().is_socket() {
            report.error(path, "it is no socket", &format!("remove it, then {}", socket.remake()));
        } else if file.uid() != 0 {
            report.error(path, &format!("it belongs to uid {}, not to root", file.uid()), &socket.rights());
        } else if mode & !rights != 0 {
            let found =
                format!("its mode is {mode:04o}, and not {rights:04o}: more users than due may reach csid");
            report.error(path, &found, &socket.rights());
        } else if mode != rights {
            let found = format!("its mode is {mode:04o}, and not {rights:04o}: some users cannot reach csid");
            report.warning(path, &found, &socket.rights());
        } else if let Some(gid) = group(socket.group).filter(|gid| *gid != file.gid()) {
            let found = format!("its group is {}, and not {} ({gid})", file.gid(), socket.group);
            report.warning(path, &found, &socket.rights());
        }
    }
    if report.len() == before {
        report.ok("/run/csid", "csid's sockets are there, with the right owners and modes");
    }
}

/// Returns a group's number. `None`: /etc/group does not have it.
fn group(name: &str) -> Option<u32> {
    let groups = fs::read_to_string("/etc/group").ok()?;
    let line = groups.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split(':').nth(1)?.parse().ok()
}

/// Reads the head of the journal's file. csid checks the whole journal itself.
fn journal(report: &mut Report) {
    let mut head = [0; 100];
    let path = Path::new(JOURNAL);
    match File::open(path).and_then(|mut file| file.read_exact(&mut head)) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return report.note(JOURNAL, "csid has no journal: it has never run here", "");
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied && !geteuid().is_root() => {
            return report.ok(JOURNAL, "only root can look at it");
        }
        Err(error) => {
            let remedy = "csid(8), A damaged journal";
            return report.error(JOURNAL, &format!("it cannot be read: {error}"), remedy);
        }
    }
    // The head may be older than what csid wrote to its log.
    let has_log = fs::metadata(LOG).is_ok_and(|log| log.len() > 0);
    // Of the format of SQLite's files: the magic words, and the user version at byte 60.
    let version = u32::from_be_bytes([head[60], head[61], head[62], head[63]]);
    if !head.starts_with(b"SQLite format 3\0") {
        let remedy = "put a backup back, or `csictl reconcile --new-journal`: csid(8), A damaged journal";
        report.error(JOURNAL, "it is no journal of csid's any more", remedy);
    } else if has_log {
        report.ok(JOURNAL, "it is a journal of csid's");
    } else if version > SCHEMA {
        let found = format!("its version is {version}; this version of csid reads versions up to {SCHEMA}");
        report.error(JOURNAL, &found, "install the later version of csid again, which wrote the journal");
    } else {
        report.ok(JOURNAL, &format!("its version is {version}"));
    }
}

fn disk(report: &mut Report) {
    let space = match statvfs(STATE) {
        Ok(space) => space,
        Err(rustix::io::Errno::NOENT) => return,
        Err(error) => {
            return report.error(
                STATE,
                &format!("its file system cannot be looked at: {error}"),
                "repair it",
            );
        }
    };
    let is_below = |free: u64, total: u64, (_, parts): (u64, u64)| total > 0 && free < total / 1000 * parts;
    let free = space.f_bavail * space.f_frsize;
    let total = space.f_blocks * space.f_frsize;
    // A small disk is scarce by its part, a large one by its bytes.
    let lacks = |limit: (u64, u64)| {
        (free < limit.0 && is_below(free, total, limit)) || is_below(space.f_favail, space.f_files, limit)
    };
    let found = format!("{} MiB and {} inodes are free", free >> 20, space.f_favail);
    let remedy = "make room below /var/lib/csid: csid refuses changes while it cannot write its journal";
    if lacks(FULL) {
        report.error(STATE, &format!("the disk is full: {found}"), remedy);
    } else if lacks(SCARCE) {
        report.warning(STATE, &format!("the disk is almost full: {found}"), remedy);
    } else {
        report.ok(STATE, &found);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schema_is_the_newest_of_csids_source() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../csid/src/store/schema");
        let versions = fs::read_dir(directory)
            .unwrap()
            .filter_map(|file| file.unwrap().file_name().to_str()?.strip_suffix(".sql")?.parse::<u32>().ok());
        assert_eq!(versions.max(), Some(SCHEMA));
    }
}
