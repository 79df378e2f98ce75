//! File systems that hang as the world's do: FUSE mounts whose server reads a request and answers it when the test says so.
//!
//! A process that gets no answer waits in the kernel and survives SIGKILL. It shows state S until its first signal, and D from then on.
//! The server is a process of its own, `hung-server`, which neither csid's end nor the plugin's
//! touches. It asks no file system, so it cannot hang.
//!
//! Invariant: no hung mount outlives its [`Hung`]. Dropping it aborts every connection, ends the server and detaches the
//! mounts. If the test dies without that, its server is killed with it, which closes the connections; and no server lives
//! longer than a test may.

mod fs;
pub mod server;

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde::{Deserialize, Serialize};

use crate::kernel;
use crate::world::{child, eventually, program};

/// The server answers at once, whatever it holds.
const ANSWER: Duration = Duration::from_secs(30);
/// The file that each of these file systems has in the beginning, with [`TEXT`] in it.
pub const FILE: &str = "file";
pub const TEXT: &str = "served";

/// A FUSE request that can be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Op {
    Lookup,
    GetAttr,
    SetAttr,
    Unlink,
    Open,
    Read,
    Write,
    StatFs,
    Fsync,
    Flush,
    OpenDir,
    ReadDir,
    Create,
    /// A file system on a block device asks for it at its last unmount, and waits for the answer.
    Destroy,
}

/// Whatever a look, a walk or a listing asks.
pub const LOOKS: [Op; 5] = [Op::StatFs, Op::GetAttr, Op::Lookup, Op::OpenDir, Op::ReadDir];

/// A request to the server, one line of JSON on each connection.
#[derive(Debug, Serialize, Deserialize)]
pub enum Ask {
    /// Mount a file system at this path. It holds what was said of `name`, else what was said of all. `disk`: the block device that it
    /// is on.
    Mount {
        name: String,
        at: PathBuf,
        disk: Option<PathBuf>,
    },
    /// From now on hold these, of one file system or of all, also of those to come; answer the others that are held.
    Hold {
        name: Option<String>,
        ops: Vec<Op>,
    },
    /// From now on answer these with EIO, of every file system that is there.
    Fail {
        ops: Vec<Op>,
    },
    /// Answer nothing more of it: its server is dead.
    End {
        name: String,
    },
    State,
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Answer {
    /// Empty: done.
    pub error: String,
    /// The requests that are held, by the name of their file system.
    pub held: Vec<(String, Op)>,
    /// The numbers of the connections.
    pub connections: Vec<u64>,
}

/// Asks the server that listens at `socket`. Its refusal is an error.
pub fn ask(socket: &Path, ask: &Ask) -> io::Result<Answer> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(ANSWER))?;
    let mut line = serde_json::to_vec(ask)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    let answer: Answer = serde_json::from_str(&answer)?;
    if answer.error.is_empty() { Ok(answer) } else { Err(io::Error::other(answer.error)) }
}

/// A running server, the only one of its mount namespace. To be made, used and dropped there.
pub struct Hung {
    socket: PathBuf,
    process: Child,
}

impl Hung {
    /// Starts a server that listens at `socket`.
    pub fn start(socket: PathBuf) -> Self {
        mount_control().expect("fusectl, by which a connection is aborted");
        let mut command = child(&program("hung-server"));
        let hung = Hung { process: command.arg(&socket).spawn().expect("the server starts"), socket };
        let end = Instant::now() + ANSWER;
        while UnixStream::connect(&hung.socket).is_err() {
            assert!(Instant::now() < end, "the server does not listen");
            std::thread::sleep(Duration::from_millis(2));
        }
        hung
    }

    /// The server's process.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Returns the socket at which a plugin requests a mount.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    fn ask(&self, ask: &Ask) -> Answer {
        self::ask(&self.socket, ask).unwrap_or_else(|error| panic!("the server, asked {ask:?}: {error}"))
    }

    /// Mounts a file system at `at`, a directory.
    pub fn mount(&self, name: &str, at: &Path) {
        self.ask(&Ask::Mount { name: name.to_owned(), at: at.to_owned(), disk: None });
    }

    /// Mounts a file system on a block device at `at`. Its last unmount waits for the server ([`Op::Destroy`]).
    pub fn mount_disk(&self, name: &str, disk: &Path, at: &Path) {
        self.ask(&Ask::Mount { name: name.to_owned(), at: at.to_owned(), disk: Some(disk.to_owned()) });
    }

    /// Holds these requests of every file system, and no others.
    pub fn hold(&self, ops: &[Op]) {
        self.ask(&Ask::Hold { name: None, ops: ops.to_vec() });
    }

    /// Holds calls as `hold` does, of one file system only: a volume's, where a plugin mounts it.
    pub fn hold_of(&self, name: &str, ops: &[Op]) {
        self.ask(&Ask::Hold { name: Some(name.to_owned()), ops: ops.to_vec() });
    }

    /// Answers these requests of every file system with EIO, and the others as before.
    pub fn fail(&self, ops: &[Op]) {
        self.ask(&Ask::Fail { ops: ops.to_vec() });
    }

    /// Answers everything.
    pub fn release(&self) {
        self.hold(&[]);
    }

    /// Kills the server of one file system, as far as its mounts can tell.
    pub fn end(&self, name: &str) {
        self.ask(&Ask::End { name: name.to_owned() });
    }

    /// How many requests it holds now.
    pub fn held(&self) -> usize {
        self.ask(&Ask::State).held.len()
    }

    /// Returns the requests of one file system that the server holds now.
    pub fn held_of(&self, name: &str) -> Vec<Op> {
        let held = self.ask(&Ask::State).held;
        held.into_iter().filter(|(of, _)| of == name).map(|(_, op)| op).collect()
    }

    /// Waits until as many requests are held at least.
    pub async fn holds(&self, requests: usize) {
        eventually("requests hang", async || self.held() >= requests).await;
    }

    /// Waits until a request of that file system is held.
    pub async fn hangs(&self, name: &str) {
        eventually("a request hangs", async || !self.held_of(name).is_empty()).await;
    }

    /// Aborts, kills, detaches. A step that fails does not keep the others from being taken.
    fn leave_nothing(&mut self) {
        let connections = ask(&self.socket, &Ask::State).map(|state| state.connections);
        let connections = connections.unwrap_or_default();
        for number in &connections {
            if let Err(error) = std::fs::write(format!("{CONTROL}/{number}/abort"), "1") {
                eprintln!("FUSE connection {number} cannot be aborted: {error}");
            }
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
        let mounts = kernel::mounts().unwrap_or_default();
        for mount in mounts.iter().rev().filter(|mount| server::TYPES.contains(&&*mount.fs_type)) {
            if let Err(error) = unmount(&mount.point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
                eprintln!("{} cannot be detached: {error}", mount.point.display());
            }
        }
    }
}

impl Drop for Hung {
    fn drop(&mut self) {
        self.leave_nothing();
    }
}

/// The directory in which the kernel shows the FUSE connections, each by the minor number of its device.
pub const CONTROL: &str = "/sys/fs/fuse/connections";

fn mount_control() -> io::Result<()> {
    if kernel::stacked(Path::new(CONTROL))? == 0 {
        mount("fusectl", CONTROL, "fusectl", MountFlags::NOSUID | MountFlags::NODEV, c"")?;
    }
    Ok(())
}
