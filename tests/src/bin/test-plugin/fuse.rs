//! File systems in user space: one with nothing but a root directory, enough to be alive and to die with the plugin; and
//! bindfs, with files in it and a process of its own.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{LazyLock, Mutex, PoisonError};

use rustix::mount::{MountFlags, mount};

/// The connections of what is mounted: closing one is the death of its mount.
static OPEN: LazyLock<Mutex<HashMap<PathBuf, File>>> = LazyLock::new(Mutex::default);

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Life {
    Alive,
    Dead,
}

pub fn mount_at(target: &Path, life: Life) -> io::Result<()> {
    let connection = OpenOptions::new().read(true).write(true).open("/dev/fuse")?;
    let options = format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other\0", connection.as_raw_fd());
    let options = std::ffi::CStr::from_bytes_with_nul(options.as_bytes()).map_err(io::Error::other)?;
    mount("csid-test", target, "fuse", MountFlags::NOSUID | MountFlags::NODEV, options)?;
    if life == Life::Dead {
        return Ok(());
    }
    if life == Life::Alive {
        let mut server = connection.try_clone()?;
        std::thread::spawn(move || while serve(&mut server).is_ok() {});
    }
    OPEN.lock().unwrap_or_else(PoisonError::into_inner).insert(target.to_owned(), connection);
    Ok(())
}

pub fn forget(target: &Path) {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner).remove(target);
}

/// Show `source` at `target`, and what is written there. The process' id; it dies with the plugin, unless it `stays`.
pub fn serve_by_bindfs(source: &Path, target: &Path, stays: bool) -> io::Result<i32> {
    let mut command = Command::new("setpriv");
    if !stays {
        command.args(["--pdeathsig", "KILL"]);
    }
    command.args(["bindfs", "-f", "-o", "allow_other"]).args([source, target]);
    let (reply, pid) = std::sync::mpsc::channel();
    // The kernel takes the end of the thread that started it for the plugin's.
    std::thread::spawn(move || {
        let child = command.spawn();
        drop(reply.send(child.as_ref().map(Child::id).map_err(|error| io::Error::from(error.kind()))));
        child.and_then(|mut child| child.wait())
    });
    let pid = pid.recv().map_err(io::Error::other)??;
    i32::try_from(pid).map_err(io::Error::other)
}

const GETATTR: u32 = 3;
const STATFS: u32 = 17;
const INIT: u32 = 26;
const FORGET: [u32; 2] = [2, 42];
const ENOSYS: i32 = 38;

/// Answer one request: those that a look at a mount needs, and no others.
fn serve(connection: &mut File) -> io::Result<()> {
    let mut request = vec![0; 65536];
    let length = connection.read(&mut request)?;
    let Some(header) = request.get(..40).filter(|_| length >= 40) else { return Ok(()) };
    let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let opcode = word(4);
    let (error, body) = match opcode {
        INIT => (0, init()),
        GETATTR => (0, root_attributes()),
        STATFS => (0, vec![0; 80]),
        opcode if FORGET.contains(&opcode) => return Ok(()),
        _ => (-ENOSYS, Vec::new()),
    };
    let mut answer = Vec::new();
    answer.extend_from_slice(&(16 + body.len() as u32).to_ne_bytes());
    answer.extend_from_slice(&error.to_ne_bytes());
    answer.extend_from_slice(&header[8..16]);
    answer.extend_from_slice(&body);
    connection.write_all(&answer)
}

/// Protocol 7.31, nothing special.
fn init() -> Vec<u8> {
    let mut body = Vec::new();
    for word in [7u32, 31, 65536, 0, 0, 4096, 1, 0] {
        body.extend_from_slice(&word.to_ne_bytes());
    }
    body.resize(64, 0);
    body
}

/// An empty directory, never cached.
fn root_attributes() -> Vec<u8> {
    let mut body = vec![0; 16];
    body.extend_from_slice(&1u64.to_ne_bytes());
    body.resize(16 + 48 + 12, 0);
    for word in [0o040_755u32, 2, 0, 0, 0, 4096, 0] {
        body.extend_from_slice(&word.to_ne_bytes());
    }
    body
}
