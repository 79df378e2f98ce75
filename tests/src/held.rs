//! System calls of csid's search through mount namespaces that wait for a test. A seccomp filter in csid and its helper hands the calls
//! over to the test's process.
//!
//! A call waits only if it is about the namespace that the test names. Every other call goes on at once.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept, bind,
    connect, listen, recvmsg, sendmsg, shutdown, socket_with,
};

/// The variable of a process' environment that has the socket of the test which holds its calls.
pub const SOCKET: &str = "CSID_TEST_HOLD";

/// The second byte of the number of each ioctl of a namespace's file.
const NSFS: u32 = 0xb7;

/// The calls by which a search finds the mounts of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SearchBy {
    /// The calls of the kernel that list mount namespaces.
    Kernel,
    /// `/proc/PID/mountinfo`: the kernel seems not to list mount namespaces.
    Tables,
}

/// Hands the calls of this process, and of those that it starts, over to the test at `socket`. The process must have one thread.
pub fn hand_over(socket: &Path) -> io::Result<()> {
    let test = packets()?;
    connect(&test, &SocketAddrUnix::new(socket)?)?;
    let listener = listener()?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [listener.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&fds));
    sendmsg(&test, &[IoSlice::new(b"x")], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn packets() -> io::Result<OwnedFd> {
    Ok(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Adds a filter to this process that stops each read, and each ioctl of a namespace's file. Returns the descriptor that shows them.
fn listener() -> io::Result<OwnedFd> {
    const LOAD: u32 = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    const EQUAL: u32 = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    const RETURN: u32 = libc::BPF_RET | libc::BPF_K;
    let number = std::mem::offset_of!(libc::seccomp_data, nr);
    // The lower half of the second argument.
    let request =
        std::mem::offset_of!(libc::seccomp_data, args) + 8 + usize::from(cfg!(target_endian = "big")) * 4;
    let line = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut lines = [
        line(LOAD, number as u32, 0, 0),
        line(EQUAL, libc::SYS_read as u32, 6, 0),
        line(EQUAL, libc::SYS_ioctl as u32, 0, 4),
        line(LOAD, request as u32, 0, 0),
        line(libc::BPF_ALU | libc::BPF_RSH | libc::BPF_K, 8, 0, 0),
        line(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0xff, 0, 0),
        line(EQUAL, NSFS, 1, 0),
        line(RETURN, libc::SECCOMP_RET_ALLOW, 0, 0),
        line(RETURN, libc::SECCOMP_RET_USER_NOTIF, 0, 0),
    ];
    let program = libc::sock_fprog { len: lines.len() as u16, filter: lines.as_mut_ptr() };
    // SAFETY: the kernel copies the program, which lives through the call.
    let made = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const program,
        )
    };
    match i32::try_from(made) {
        // SAFETY: the call has just opened this descriptor, and nothing else owns it.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The test's side. Dropped, it lets no process hand over its calls any more; those that do get ENOSYS.
pub struct HeldCalls {
    socket: PathBuf,
    entrance: Arc<OwnedFd>,
    wanted: Arc<Mutex<Option<Wanted>>>,
}

/// A call that a test waits for.
struct Wanted {
    /// The links of a descriptor of the namespace, and of one of the table of its mounts.
    links: [PathBuf; 2],
    found: Sender<HeldCall>,
}

/// A call that waits. It goes on when this is dropped.
pub struct HeldCall {
    listener: Arc<OwnedFd>,
    id: u64,
    /// The thread that waits.
    pub thread: u32,
}

impl HeldCall {
    /// Has the call go on.
    pub fn go_on(self) {
        drop(self);
    }
}

impl Drop for HeldCall {
    fn drop(&mut self) {
        answer(&self.listener, self.id, 0);
    }
}

impl HeldCalls {
    /// Takes the calls over of each process that connects to `socket`.
    pub fn at(socket: PathBuf, by: SearchBy) -> io::Result<Self> {
        let entrance = packets()?;
        bind(&entrance, &SocketAddrUnix::new(&socket)?)?;
        listen(&entrance, 8)?;
        let held = HeldCalls { socket, entrance: Arc::new(entrance), wanted: Arc::default() };
        let (entrance, wanted) = (Arc::clone(&held.entrance), Arc::clone(&held.wanted));
        std::thread::spawn(move || serve(&entrance, &wanted, by));
        Ok(held)
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Holds the next call that a search makes while it has a descriptor of the mount namespace of `process`. Returns where it comes.
    pub fn hold(&self, process: u32) -> io::Result<Receiver<HeldCall>> {
        let directory = Path::new("/proc").join(process.to_string());
        let links = [std::fs::read_link(directory.join("ns/mnt"))?, directory.join("mountinfo")];
        let (found, call) = channel();
        *self.wanted.lock().unwrap_or_else(PoisonError::into_inner) = Some(Wanted { links, found });
        Ok(call)
    }
}

impl Drop for HeldCalls {
    fn drop(&mut self) {
        // The thread that serves ends.
        let _ = shutdown(&self.entrance, Shutdown::Both);
    }
}

/// Answers the calls of all processes, until the entrance is shut down.
fn serve(entrance: &OwnedFd, wanted: &Mutex<Option<Wanted>>, by: SearchBy) {
    let mut listeners: Vec<Arc<OwnedFd>> = Vec::new();
    loop {
        let all = std::iter::once(entrance).chain(listeners.iter().map(|listener| &**listener));
        let mut fds: Vec<PollFd<'_>> = all.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        match poll(&mut fds, None) {
            Err(Errno::INTR) => continue,
            other => other.expect("a poll"),
        };
        let events: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
        drop(fds);
        let mut of_listeners = events[1..].iter();
        listeners.retain(|listener| {
            let events = of_listeners.next().copied().unwrap_or(PollFlags::empty());
            if events.contains(PollFlags::IN) {
                take(listener, wanted, by);
            }
            // All its processes have ended.
            !events.intersects(PollFlags::HUP | PollFlags::ERR)
        });
        if events[0].contains(PollFlags::HUP) {
            return;
        }
        if events[0].contains(PollFlags::IN) {
            listeners.extend(accept(entrance).ok().and_then(received).map(Arc::new));
        }
    }
}

/// Returns the descriptor that a process sent.
fn received(from: OwnedFd) -> Option<OwnedFd> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(from, &mut [IoSliceMut::new(&mut [0])], &mut control, RecvFlags::CMSG_CLOEXEC).ok()?;
    control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    })
}

/// Takes one call, and answers it unless the test waits for it.
fn take(listener: &Arc<OwnedFd>, wanted: &Mutex<Option<Wanted>>, by: SearchBy) {
    // SAFETY: zeroes are valid for each field. The kernel refuses others.
    let mut call: libc::seccomp_notif = unsafe { std::mem::zeroed() };
    // SAFETY: the request writes one `seccomp_notif`.
    if unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV, &raw mut call) } != 0 {
        // The caller was killed.
        return;
    }
    if by == SearchBy::Tables && i64::from(call.data.nr) == libc::SYS_ioctl {
        answer(listener, call.id, -libc::ENOTTY);
        return;
    }
    let held = HeldCall { listener: Arc::clone(listener), id: call.id, thread: call.pid };
    let mut wanted = wanted.lock().unwrap_or_else(PoisonError::into_inner);
    if wanted.is_none() {
        return;
    }
    let link = std::fs::read_link(format!("/proc/{}/fd/{}", call.pid, call.data.args[0])).ok();
    if let Some(found) = wanted.take_if(|wanted| link.is_some_and(|link| wanted.links.contains(&link))) {
        // A test that has ended waits no longer.
        let _ = found.found.send(held);
    }
}

/// Has a call go on, or fail with an error. The caller may have been killed.
fn answer(listener: &OwnedFd, id: u64, error: i32) {
    let flags = if error == 0 { libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32 } else { 0 };
    let mut answer = libc::seccomp_notif_resp { id, val: 0, error, flags };
    // SAFETY: the request reads one `seccomp_notif_resp`.
    unsafe { libc::ioctl(listener.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND, &raw mut answer) };
}
