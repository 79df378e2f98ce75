//! `csid host-helper`: the process that makes for csid what a file system's server can hold up, in a unit of its own.
//!
//! ```text
//!   csid ──connect──▶ /run/csid/helper.sock (standard input of this process)
//!                          │ accept, fork
//!   csid ◀──packets──▶ worker: one call at a time
//! ```
//!
//! A worker that hangs survives SIGKILL, and with it whatever it has open: so it has nothing but its connection and what its call is
//! about. A worker ends when csid closes the connection; one that hangs, as soon as the kernel returns. This process itself
//! touches no file system.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SocketFlags, recvmsg};
use rustix::process::{Pid, PidfdFlags, WaitOptions, pidfd_open, waitpid};
use serde::Serialize;

use crate::host::base::Base;
use crate::host::caller::WaitingCaller;
use crate::host::device;
use crate::host::ends;
use crate::host::error::HostError;
use crate::host::helper::memory;
use crate::host::helper::slots::{Slots, WORKERS};
use crate::host::helper::wire::{self, HelperRequest, SearchReply, SiftAnswer};
use crate::host::look::Look;
use crate::host::mount;
use crate::host::namespace_tables::Known;
use crate::host::namespaces::{Budget, Question};
use crate::host::path;
use crate::host::raw;
use crate::host::search::{self, FoundCopies};
use crate::host::table;

struct Worker {
    pid: Pid,
    /// Readable when the process has ended.
    ended: OwnedFd,
    slot: usize,
}

/// Serves connections at the socket that is standard input, each by a process of its own, until it is killed.
pub fn main() -> ExitCode {
    match listen() {
        Ok(never) => match never {},
        Err(error) => {
            eprintln!("csid host-helper: {error}");
            ExitCode::FAILURE
        }
    }
}

fn listen() -> io::Result<std::convert::Infallible> {
    let listener = rustix::stdio::stdin();
    let slots = Slots::shared()?;
    let mut workers: Vec<Worker> = Vec::new();
    loop {
        let is_full = workers.len() == WORKERS;
        let mut fds: Vec<PollFd<'_>> =
            workers.iter().map(|worker| PollFd::new(&worker.ended, PollFlags::IN)).collect();
        if !is_full {
            fds.push(PollFd::new(&listener, PollFlags::IN));
        }
        match poll(&mut fds, None) {
            Err(Errno::INTR) => continue,
            other => other?,
        };
        let is_asked = !is_full && fds.pop().is_some_and(|fd| !fd.revents().is_empty());
        drop(fds);
        workers.retain(|worker| !has_ended(worker, &slots));
        if !is_asked {
            continue;
        }
        let connection = match rustix::net::accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(connection) => connection,
            Err(Errno::INTR | Errno::CONNABORTED) => continue,
            Err(error) => return Err(error.into()),
        };
        if !is_ours(&connection) {
            continue;
        }
        let slot = (0..WORKERS).find(|slot| workers.iter().all(|worker| worker.slot != *slot));
        let Some(slot) = slot else { continue };
        match raw::fork()? {
            None => {
                // The listener is csid's to come: a worker that hangs does not keep it.
                raw::close_stdin();
                drop(workers);
                serve(connection, &slots, slot);
                std::process::exit(0);
            }
            Some(pid) => {
                let ended = pidfd_open(pid, PidfdFlags::empty())?;
                workers.push(Worker { pid, ended, slot });
            }
        }
    }
}

fn has_ended(worker: &Worker, slots: &Slots) -> bool {
    let ended = !matches!(waitpid(Some(worker.pid), WaitOptions::NOHANG), Ok(None));
    if ended {
        slots.end(worker.slot);
    }
    ended
}

/// Whether the other side is this process' own user: the socket's mode says so, too.
fn is_ours(connection: &OwnedFd) -> bool {
    let peer = rustix::net::sockopt::socket_peercred(connection);
    peer.is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

/// Answers one request after the other until the connection ends.
pub(super) fn serve(connection: OwnedFd, slots: &Slots, slot: usize) {
    let mut buffer = Vec::new();
    let mut known = Known::default();
    let mut is_watched = false;
    loop {
        let fd = match wire::receive(&connection, &mut buffer) {
            Ok(Some(fd)) => fd,
            Err(Errno::INTR) => continue,
            Ok(None) | Err(_) => return,
        };
        let Ok(request) = serde_json::from_slice::<HelperRequest>(&buffer) else { return };
        if matches!(request, HelperRequest::Sift) {
            // An error is the end of the connection, for the answer did not come.
            let _ = fd.map_or(Ok(()), |stream| sift(&connection, stream));
            return;
        }
        if matches!(request, HelperRequest::Search { .. }) && slots.are_of_processes() && !is_watched {
            if end_at_hangup(&connection).is_err() {
                return;
            }
            is_watched = true;
        }
        let answer = match request {
            HelperRequest::Search { questions } => match slots.begin_search(slot) {
                Ok(()) => search(questions, fd, &mut known),
                Err(processes) => plain(&SearchReply::TooMany(processes)),
            },
            request => {
                let paths = request.paths();
                let turn = slots.begin(slot, &paths, request.is_despite_hung());
                let hung_at = paths.last().map(|path| path.to_path_buf()).unwrap_or_default();
                drop(paths);
                match turn {
                    true => answer(request, fd, WaitingCaller::new(connection.as_fd())),
                    false => hung(&request, hung_at),
                }
            }
        };
        slots.end(slot);
        let sent = match answer {
            Ok((packet, fd)) => wire::send(&connection, &packet, fd.as_ref()),
            Err(error) => Err(error),
        };
        if sent.is_err() {
            return;
        }
    }
}

/// Has a thread end this process as soon as csid closes the connection. A search that hangs at the close of one namespace's file has that
/// of the next namespace, and would keep the mounts there.
fn end_at_hangup(connection: &OwnedFd) -> io::Result<()> {
    let connection = connection.try_clone()?;
    let watch = move || {
        while poll(&mut [PollFd::new(&connection, PollFlags::empty())], None) == Err(Errno::INTR) {}
        raw::close_all_and_end()
    };
    std::thread::Builder::new().spawn(watch).map(drop)
}

/// Answers requests as [`serve`] does, without other workers.
#[cfg(test)]
pub(in crate::host) fn serve_alone(connection: OwnedFd) {
    serve(connection, &Slots::own(), 0);
}

/// Bytes of memory that is passed on; `secrets` has 16 KiB at most.
const LARGEST: i64 = 1 << 20;
/// Descriptors that one message may have (the kernel's SCM_MAX_FD).
const MAX_FDS: usize = 253;

/// Answers [`HelperRequest::Sift`]. It returns when the descriptors are closed that it does not pass on, which may take until a file
/// system's server answers.
fn sift(connection: &OwnedFd, stream: OwnedFd) -> io::Result<()> {
    // Room for all that a message may have. The kernel closes what does not fit before this call returns, and so before the answer.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(&stream, &mut [IoSliceMut::new(&mut byte)], &mut control, flags)?;
    let fds: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    // The stream's end must not wait for the closes below.
    drop(stream);
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let is_cut = received.flags.contains(ReturnFlags::CTRUNC);
    let (sifted, passed) = match fds.as_slice() {
        [] if !is_cut => (SiftAnswer::Nothing, None),
        [fd] if !is_cut && closes_at_once(fd) => (SiftAnswer::Passed, Some(fd)),
        _ => (SiftAnswer::Refused, None),
    };
    wire::send(connection, &serde_json::to_vec(&sifted)?, passed)
}

/// Whether it is memory, a pipe without a name or a user namespace. To find that out asks no file system.
fn closes_at_once(fd: &OwnedFd) -> bool {
    // Memory alone has seals. Much of it takes long to free.
    if rustix::fs::fcntl_get_seals(fd).is_ok() {
        return rustix::fs::fstat(fd).is_ok_and(|file| file.st_size <= LARGEST);
    }
    let link =
        rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new()).unwrap_or_default();
    let is_nameless_pipe = || rustix::pipe::fcntl_getpipe_size(fd).is_ok();
    // A file's link is its path, and begins with `/` or `(unreachable)`.
    link.to_bytes().starts_with(b"user:[") || link.to_bytes().starts_with(b"pipe:[") && is_nameless_pipe()
}

type Answer = io::Result<(Vec<u8>, Option<OwnedFd>)>;

fn plain(answer: &impl Serialize) -> Answer {
    Ok((serde_json::to_vec(answer)?, None))
}

/// The answer where an earlier call at the path has hung.
fn hung(request: &HelperRequest, path: PathBuf) -> Answer {
    match request {
        HelperRequest::Look { .. } => plain(&Ok::<_, HostError>(Look::Hung)),
        _ => plain(&Err::<(), _>(HostError::Hung(path))),
    }
}

fn answer(request: HelperRequest, fd: Option<OwnedFd>, caller: WaitingCaller<'_>) -> Answer {
    match request {
        HelperRequest::Look { path, .. } => plain(&Ok::<_, HostError>(mount::look(&path))),
        HelperRequest::Deliver { published, source, how } => {
            plain(&mount::deliver(&published, &source, how, &caller))
        }
        HelperRequest::Bind { source, root, target, how } => {
            plain(&mount::bind(&source, &root, &target, &how, &caller))
        }
        HelperRequest::BindAt { source, target, how } => {
            let bound = match &fd {
                Some(fd) => mount::bind_at(&source, &target, fd, &how, &caller),
                None => Err(HostError::NotTarget { path: target, why: "it did not come".into() }),
            };
            match bound {
                Err(error) => plain(&Err::<(), _>(error)),
                Ok(made) => Ok((serde_json::to_vec(&Ok::<_, HostError>(()))?, made)),
            }
        }
        HelperRequest::Unbind { source, target, were, how } => {
            plain(&mount::unbind(&source, &target, &were, how, fd, &caller))
        }
        HelperRequest::IsBound { source, target } => plain(&mount::is_bound(&source, &target)),
        HelperRequest::OpenTree { source, shown, subpath, how } => {
            opened(mount::open_tree(&source, shown, subpath.as_deref(), how, None))
        }
        HelperRequest::OpenMappedTree { source, shown, subpath, how } => opened(match &fd {
            Some(userns) => mount::open_tree(&source, shown, subpath.as_deref(), how, Some(userns)),
            None => Err(HostError::NotUserNamespace { why: "it did not come".into() }),
        }),
        HelperRequest::Detach { path, .. } => plain(&mount::detach(&path, &caller)),
        HelperRequest::Clear { path } => plain(&mount::clear(&path, &caller)),
        HelperRequest::CheckTarget { root, target, uid } => {
            plain(&path::find_target(&root, &target, uid).map(drop))
        }
        HelperRequest::Resolve { directory } => plain(&path::resolve_root(&directory)),
        HelperRequest::IsHeld { device, shows } => plain(&device::held(&device, shows)),
        HelperRequest::InUse { path } => plain(&mount::in_use(&path, &caller)),
        HelperRequest::RemoveOrphan { root, path, held } => {
            let cleared = mount::clear(&path, &caller);
            plain(&cleared.and_then(|()| remove_left(&[(root, path)], held.as_deref(), fd.as_ref())))
        }
        HelperRequest::RemoveLeft { paths, held, .. } => {
            plain(&remove_left(&paths, held.as_deref(), fd.as_ref()))
        }
        HelperRequest::Close => {
            drop(fd);
            plain(&Ok::<_, HostError>(()))
        }
        HelperRequest::WatchEnd { path } => {
            plain(&Ok::<_, HostError>(fd.and_then(|inotify| ends::watch(inotify, &path, &caller))))
        }
        HelperRequest::Holders { path } => plain(&Ok::<_, HostError>(table::holders(&path))),
        // Never come here: one ends its worker, and `serve` answers the other.
        HelperRequest::Sift => plain(&SiftAnswer::Refused),
        HelperRequest::Search { .. } => plain(&SearchReply::TooMany(Vec::new())),
    }
}

/// Returns the answer with the mount that was opened, if there is one.
fn opened(opened: Result<Option<(OwnedFd, bool)>, HostError>) -> Answer {
    let (tree, is_bound) = match opened {
        Err(error) => return plain(&Err::<(), _>(error)),
        Ok(opened) => opened.unzip(),
    };
    Ok((serde_json::to_vec(&Ok::<_, HostError>(is_bound))?, tree))
}

/// Answers [`HelperRequest::Search`]. `known` is what the worker's searches before have learned.
fn search(questions: Option<Vec<Question>>, memory: Option<OwnedFd>, known: &mut Known) -> Answer {
    let questions = match questions {
        Some(questions) => questions,
        None => memory::read(memory.ok_or(io::ErrorKind::InvalidData)?)?,
    };
    match search::search(&questions, known, &Budget::new()) {
        Ok(FoundCopies { answers, unlisted }) => {
            let unlisted = unlisted.map(|error| error.to_string());
            let learned = known.learned();
            let reply = SearchReply::Found { answers: Some(answers), learned, unlisted };
            match memory::packed(reply, SearchReply::take_answers) {
                Ok(packed) => Ok(packed),
                Err(error) => {
                    let why = format!("the answer cannot be sent: {error}");
                    plain(&SearchReply::Failed(HostError::Search(why.into())))
                }
            }
        }
        Err(error) => plain(&SearchReply::Failed(error)),
    }
}

/// Removes each path below its directory, from the descriptor of `held` where the paths are in that tmpfs. Returns whether all are
/// gone, or the first error; the other paths are tried, too.
fn remove_left(
    paths: &[(PathBuf, PathBuf)],
    held: Option<&Path>,
    fd: Option<&OwnedFd>,
) -> Result<bool, HostError> {
    let remove = |(base, path): &(PathBuf, PathBuf)| match (held, fd) {
        (None, _) => path::remove(Base::at(base), path),
        (Some(at), Some(fd)) => path::remove_held(Base::held(at, fd), base, path),
        // The descriptor did not come, and the path may lead elsewhere.
        (Some(_), None) => Ok(false),
    };
    let removed: Vec<_> = paths.iter().map(remove).collect();
    removed.into_iter().try_fold(true, |all, gone| Ok(gone? && all))
}
