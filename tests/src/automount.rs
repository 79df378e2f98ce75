//! An automount as systemd has it for `x-systemd.automount`: a direct mount of autofs whose daemon the test is. The kernel lets a
//! process of the daemon's group pass; everybody else waits while the daemon owes it an answer.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::ioctl::{IntegerSetter, Opcode, Setter, ioctl, opcode};
use rustix::mount::{MountFlags, UnmountFlags};

use crate::world::{SOON, child};

/// `struct autofs_v5_packet`.
const PACKET: usize = 304;
const READY: Opcode = opcode::none(0x93, 0x60);
const FAIL: Opcode = opcode::none(0x93, 0x61);
const CATATONIC: Opcode = opcode::none(0x93, 0x62);
const EXPIRE_MULTI: Opcode = opcode::write::<i32>(0x93, 0x66);

/// A request of the kernel to the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    ToMount,
    ToUnmount,
}

/// A request of the kernel's that has not been answered yet.
#[must_use]
pub struct Request {
    pub asked: Asked,
    token: u32,
}

/// A direct automount. Dropping it lets everybody go who waits for it, and unmounts it.
pub struct Automount {
    point: PathBuf,
    /// The leader of the daemon's process group. The leader's pid is the group's number.
    leader: Child,
    _leader_ends: Option<ChildStdin>,
    requests: File,
    root: Option<OwnedFd>,
}

impl Automount {
    /// Mounts it at a directory.
    pub fn at(point: &Path) -> Automount {
        let mut command = child(Path::new("cat"));
        let mut leader = command.stdin(Stdio::piped()).process_group(0).spawn().expect("a leader");
        let (requests, asking) = rustix::pipe::pipe().expect("a pipe");
        let options = format!("fd={},pgrp={},minproto=5,maxproto=5,direct", asking.as_raw_fd(), leader.id());
        let options = std::ffi::CString::new(options).expect("options");
        rustix::mount::mount("test", point, "autofs", MountFlags::empty(), options.as_c_str())
            .expect("the kernel has autofs");
        let _leader_ends = leader.stdin.take();
        let mut automount = Automount {
            point: point.to_owned(),
            leader,
            _leader_ends,
            requests: requests.into(),
            root: None,
        };
        automount.root = Some(automount.open(OFlags::RDONLY));
        automount
    }

    /// Waits until the kernel asks for something.
    pub fn request(&mut self) -> Request {
        let mut packet = [0; PACKET];
        self.requests.read_exact(&mut packet).expect("a request");
        let number = |at: usize| u32::from_ne_bytes(packet[at..at + 4].try_into().expect("four bytes"));
        let asked = match number(4) {
            5 => Asked::ToMount,
            6 => Asked::ToUnmount,
            other => panic!("a request of type {other}"),
        };
        Request { asked, token: number(8) }
    }

    /// Says that what was asked for is done.
    pub fn answer(&self, request: Request) {
        // SAFETY: the request takes a number, and `root` is the root of an autofs mount.
        unsafe { ioctl(self.root(), IntegerSetter::<READY>::new_usize(request.token as usize)) }
            .expect("the kernel waits for this answer");
    }

    /// Says that what was asked for cannot be had.
    pub fn fail(&self, request: Request) {
        // SAFETY: as above.
        unsafe { ioctl(self.root(), IntegerSetter::<FAIL>::new_usize(request.token as usize)) }
            .expect("the kernel waits for this answer");
    }

    /// Has the kernel ask for the unmounting of what is mounted here, as soon as nobody uses it. Ends with the answer.
    pub fn expire(&self) -> JoinHandle<()> {
        const AT_ONCE: i32 = 1;
        // The clone is the same open file, so it uses the automount no more than the original.
        let root = self.root().try_clone().expect("a descriptor");
        std::thread::spawn(move || {
            let end = Instant::now() + SOON;
            // SAFETY: the request reads an int.
            while let Err(error) = unsafe { ioctl(&root, Setter::<EXPIRE_MULTI, i32>::new(AT_ONCE)) } {
                assert_eq!(error, rustix::io::Errno::AGAIN, "somebody uses it");
                assert!(Instant::now() < end, "nobody uses it soon");
                std::thread::sleep(Duration::from_millis(10));
            }
        })
    }

    /// Returns a descriptor of the target, which a process of the daemon's group opened with O_PATH.
    pub fn target_fd(&self) -> OwnedFd {
        self.open(OFlags::PATH)
    }

    /// Unmounts what is mounted on the automount, as a process of the daemon's group.
    pub fn unmount(&self) {
        let mut command = child(Path::new("umount"));
        let status = command.args(["-n", "-i"]).arg(&self.point).process_group(self.group()).status();
        assert!(status.expect("umount runs").success());
    }

    fn open(&self, flags: OFlags) -> OwnedFd {
        let mut command = child(Path::new("sh"));
        command.args(["-c", "exec sleep 1000 <\"$0\""]).arg(&self.point).process_group(self.group());
        let mut opener = command.stdin(Stdio::null()).spawn().expect("a process of the daemon's group");
        let link = format!("/proc/{}/fd/0", opener.id());
        let end = Instant::now() + SOON;
        while !std::fs::read_link(&link).is_ok_and(|name| name == self.point) {
            assert!(Instant::now() < end, "the daemon's group passes");
            std::thread::sleep(Duration::from_millis(2));
        }
        let opened = rustix::fs::open(link, flags | OFlags::CLOEXEC, Mode::empty()).expect("what it opened");
        opener.kill().expect("it ends");
        opener.wait().expect("it has ended");
        opened
    }

    fn group(&self) -> i32 {
        self.leader.id().try_into().expect("a pid")
    }

    fn root(&self) -> &OwnedFd {
        self.root.as_ref().expect("it was opened at first")
    }
}

impl Drop for Automount {
    fn drop(&mut self) {
        if let Some(root) = &self.root {
            // SAFETY: the request takes nothing.
            let _ = unsafe { ioctl(root, IntegerSetter::<CATATONIC>::new_usize(0)) };
        }
        let _ = self.leader.kill();
        let _ = self.leader.wait();
        self.root = None;
        // A mount that is still on it is a fault of the test. This does not hide it.
        let _ = rustix::mount::unmount(&self.point, UnmountFlags::DETACH);
    }
}

/// A process that reads a file below an automount, and belongs to no daemon.
pub fn reader(file: &Path) -> Child {
    let mut command: Command = child(Path::new("cat"));
    command.arg(file).stdout(Stdio::piped()).process_group(0).spawn().expect("a process")
}
