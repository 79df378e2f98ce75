//! `hung-server`'s side: one thread for each connection to the kernel, one for each who asks. No thread looks at a path but
//! to mount.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount};

use super::fs::{FileSystem, LONGEST, Request};
use super::{Answer, Ask, Op};

/// The type in the mount table.
pub const TYPE: &str = "fuse.csid-hung";
/// The type of one on a block device.
const ON_DISK: &str = "fuseblk.csid-hung";
pub(super) const TYPES: [&str; 2] = [TYPE, ON_DISK];
/// Longer than a test may run.
const LIFE: Duration = Duration::from_secs(660);

#[derive(Default)]
struct Server {
    /// The directory in which an unmounted file system's files are written.
    kept: Option<PathBuf>,
    /// The requests that are held for file systems without an entry in `of`.
    all: Vec<Op>,
    of: BTreeMap<String, Vec<Op>>,
    mounts: Vec<Arc<Mount>>,
}

struct Mount {
    name: String,
    connection: File,
    kept: Option<PathBuf>,
    /// The connection's.
    number: u64,
    state: Mutex<State>,
}

struct State {
    /// Whether it is unmounted or aborted. Another connection may then get its number.
    is_gone: bool,
    system: FileSystem,
    hold: Vec<Op>,
    held: Vec<Request>,
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves at `socket`, and ends the process when a test's time is over. At the end of a file system, and no earlier, its files are
/// written to a directory of its name below `kept`.
pub fn run(socket: &Path, kept: Option<PathBuf>) -> io::Result<()> {
    std::thread::spawn(|| {
        std::thread::sleep(LIFE);
        // This closes every connection, so hung processes continue with an error.
        std::process::exit(1);
    });
    let listener = UnixListener::bind(socket)?;
    let server = Arc::new(Mutex::new(Server { kept, ..Server::default() }));
    for stream in listener.incoming() {
        let (stream, server) = (stream?, Arc::clone(&server));
        std::thread::spawn(move || {
            if let Err(error) = answer(stream, &server) {
                eprintln!("hung-server: {error}");
            }
        });
    }
    Ok(())
}

fn answer(stream: UnixStream, server: &Mutex<Server>) -> io::Result<()> {
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line)?;
    // A connection that only tests whether it listens sends nothing.
    if line.is_empty() {
        return Ok(());
    }
    let done = done(serde_json::from_str(&line)?, server);
    let answer = done.unwrap_or_else(|error| Answer { error: error.to_string(), ..Answer::default() });
    let mut line = serde_json::to_vec(&answer)?;
    line.push(b'\n');
    (&stream).write_all(&line)
}

fn done(ask: Ask, server: &Mutex<Server>) -> io::Result<Answer> {
    let mut answer = Answer::default();
    match ask {
        Ask::Mount { name, at, disk } => {
            let (connection, number) = mounted(&at, disk.as_deref())?;
            let mut all = locked(server);
            let hold = all.of.get(&name).unwrap_or(&all.all).clone();
            let state =
                Mutex::new(State { is_gone: false, system: FileSystem::new(), hold, held: Vec::new() });
            let kept = all.kept.clone();
            let mount = Arc::new(Mount { name, connection, kept, number, state });
            all.mounts.push(Arc::clone(&mount));
            drop(all);
            let reader = mount.connection.try_clone()?;
            std::thread::spawn(move || mount.serve(reader));
        }
        Ask::Hold { name, ops } => {
            let mut all = locked(server);
            match &name {
                Some(name) => drop(all.of.insert(name.clone(), ops.clone())),
                None => {
                    all.of.clear();
                    all.all.clone_from(&ops);
                }
            }
            let of = all.mounts.iter().filter(|mount| name.as_ref().is_none_or(|name| *name == mount.name));
            of.for_each(|mount| mount.hold(&ops));
        }
        Ask::Fail { ops } => {
            for mount in &locked(server).mounts {
                locked(&mount.state).system.fails.clone_from(&ops);
            }
        }
        Ask::End { name } => {
            let all = locked(server);
            for mount in all.mounts.iter().filter(|mount| mount.name == name) {
                if locked(&mount.state).is_gone {
                    continue;
                }
                let abort = format!("{}/{}/abort", super::CONTROL, mount.number);
                match std::fs::write(abort, "1") {
                    // The file system was unmounted.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    done => done?,
                }
            }
        }
        Ask::State => {
            for mount in &locked(server).mounts {
                let state = locked(&mount.state);
                if state.is_gone {
                    continue;
                }
                let held = state.held.iter().filter_map(Request::op);
                answer.held.extend(held.map(|op| (mount.name.clone(), op)));
                answer.connections.push(mount.number);
            }
        }
    }
    Ok(answer)
}

/// A new mount there: its connection, and the connection's number.
fn mounted(at: &Path, disk: Option<&Path>) -> io::Result<(File, u64)> {
    let connection = OpenOptions::new().read(true).write(true).open("/dev/fuse")?;
    let options = format!(
        "fd={},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions\0",
        connection.as_raw_fd()
    );
    let options = std::ffi::CStr::from_bytes_with_nul(options.as_bytes()).map_err(io::Error::other)?;
    let (source, fs_type) = disk.map_or((Path::new("csid-hung"), TYPE), |disk| (disk, ON_DISK));
    mount(source, at, fs_type, MountFlags::NOSUID | MountFlags::NODEV, options)?;
    // These flags request nothing of the server.
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    let device = statx(CWD, at, flags, StatxFlags::empty())?;
    // The kernel's own form of a device number.
    let number = u64::from(device.stx_dev_major) << 20 | u64::from(device.stx_dev_minor);
    Ok((connection, number))
}

impl Mount {
    /// Reads requests until the file system is unmounted or its connection aborted.
    fn serve(&self, mut reader: File) {
        let mut buffer = vec![0; LONGEST];
        loop {
            let length = match reader.read(&mut buffer) {
                Ok(length) => length,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            let Some(request) = Request::read(&buffer[..length]) else { continue };
            let mut state = locked(&self.state);
            if request.op().is_some_and(|op| state.hold.contains(&op)) {
                state.held.push(request);
            } else {
                self.answer(&mut state, &request);
            }
        }
        let mut state = locked(&self.state);
        state.held.clear();
        state.is_gone = true;
        if let Some(kept) = &self.kept {
            let done = state.system.keep(&kept.join(&self.name));
            eprintln!("{} is unmounted, its files are written: {done:?}", self.name);
        }
    }

    fn hold(&self, ops: &[Op]) {
        let mut state = locked(&self.state);
        state.hold = ops.to_vec();
        let held = std::mem::take(&mut state.held);
        for request in held {
            if request.op().is_some_and(|op| ops.contains(&op)) {
                state.held.push(request);
            } else {
                self.answer(&mut state, &request);
            }
        }
    }

    fn answer(&self, state: &mut State, request: &Request) {
        let Some(answer) = state.system.answer(request) else { return };
        match (&self.connection).write(&answer) {
            Ok(_) => {}
            // The caller waits no longer, or the file system is gone.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => {}
            Err(error) => eprintln!("hung-server: {}: an answer is refused: {error}", self.name),
        }
    }
}
