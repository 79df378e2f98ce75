//! The messages between csid and a worker of the helper: one packet each, in JSON, with at most one descriptor.

use std::cell::RefCell;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

use crate::host::bind::{Bind, Restrict, Unbind};
use crate::host::device::BlockDevice;
use crate::host::error::HostError;
use crate::host::look::Look;
use crate::host::namespaces::{MountElsewhere, Question};

/// Bytes of one packet; a request has a few paths of at most 4 KiB each, an answer at most the names of 16 processes. What may be larger
/// is in memory (`memory`).
pub(super) const PACKET: usize = 64 << 10;

/// A call that a file system's server can delay.
#[derive(Debug, Serialize, Deserialize)]
pub(in crate::host) enum HelperRequest {
    Look {
        path: PathBuf,
        /// Ask also when an earlier call at this path has hung.
        despite_hung: bool,
    },
    Deliver {
        published: PathBuf,
        source: PathBuf,
        how: Restrict,
    },
    Bind {
        source: PathBuf,
        root: PathBuf,
        target: PathBuf,
        how: Bind,
    },
    /// As `Bind`, at the descriptor of the target that comes with it. The answer has one of the mount.
    BindAt {
        source: PathBuf,
        target: PathBuf,
        how: Bind,
    },
    /// With the descriptor of the mount that was made there, if there is one.
    Unbind {
        source: PathBuf,
        target: PathBuf,
        were: Vec<u64>,
        how: Unbind,
    },
    IsBound {
        source: PathBuf,
        target: PathBuf,
    },
    OpenTree {
        source: PathBuf,
        shown: Look,
        subpath: Option<PathBuf>,
        how: Restrict,
    },
    /// As `OpenTree`. The descriptor of a user namespace comes with it, which maps the owners of files.
    OpenMappedTree {
        source: PathBuf,
        shown: Look,
        subpath: Option<PathBuf>,
        how: Restrict,
    },
    Detach {
        path: PathBuf,
        /// Detach also when an earlier call at this path has hung.
        despite_hung: bool,
    },
    Clear {
        path: PathBuf,
    },
    InUse {
        path: PathBuf,
    },
    CheckTarget {
        root: PathBuf,
        target: PathBuf,
        uid: u32,
    },
    /// Asks for the name of a directory without symbolic links.
    Resolve {
        directory: PathBuf,
    },
    IsHeld {
        device: BlockDevice,
        shows: bool,
    },
    /// Unmounts what is at `path`, unless it is in use, and removes the path.
    RemoveOrphan {
        root: PathBuf,
        path: PathBuf,
        /// As of `RemoveLeft`.
        held: Option<PathBuf>,
    },
    /// Removes empty directories and files of csid's, each pair a directory of csid's and a path below it.
    RemoveLeft {
        paths: Vec<(PathBuf, PathBuf)>,
        /// The path of a tmpfs of csid's that all the paths are in. Its root directory comes with the request.
        held: Option<PathBuf>,
        despite_hung: bool,
    },
    /// Asks for users of the mount at `path`, by what the processes have open. A link of a process leads to a mount that may be
    /// detached meanwhile, and reading the link then closes the mount's last reference.
    Holders {
        path: PathBuf,
    },
    /// Watches the file system at `path` for its end, by the inotify instance that comes with it. Its answer is the number of the file
    /// system and the watch, if it can be watched.
    WatchEnd {
        path: PathBuf,
    },
    /// Searches all mount namespaces.
    Search {
        /// `None`: they are in the memory that comes with it.
        questions: Option<Vec<Question>>,
    },
    /// Closes the descriptor that comes with it.
    Close,
    /// Receives one byte of the stream that comes with it, and the descriptors that were sent with that byte. It is a worker's
    /// last request: the worker ends when it has closed what it does not pass on.
    Sift,
}

/// The answer to [`HelperRequest::Sift`].
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum SiftAnswer {
    /// No descriptor came.
    Nothing,
    /// The one that came is with this answer.
    Passed,
    /// Several came, or one whose close may wait for a file system's server.
    Refused,
}

/// The reply to [`HelperRequest::Search`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum SearchReply {
    Found {
        /// The answers in the order of the questions. `None`: they are in the memory that comes with it.
        answers: Option<Vec<Vec<MountElsewhere>>>,
        /// Mounts that the worker has asked for since its beginning.
        learned: u64,
        /// Why `/proc` was read. `None`: the kernel listed the namespaces.
        unlisted: Option<String>,
    },
    Failed(HostError),
    /// No search was made: too many others have not ended. They are of these processes.
    TooMany(Vec<u32>),
}

impl SearchReply {
    pub(super) fn take_answers(&mut self) -> Option<Vec<Vec<MountElsewhere>>> {
        match self {
            SearchReply::Found { answers, .. } => answers.take(),
            SearchReply::Failed(_) | SearchReply::TooMany(_) => None,
        }
    }
}

impl HelperRequest {
    pub(super) fn take_questions(&mut self) -> Option<Vec<Question>> {
        match self {
            HelperRequest::Search { questions } => questions.take(),
            _ => None,
        }
    }

    /// The paths that it may hang at; the last one is named in errors.
    pub(super) fn paths(&self) -> Vec<&Path> {
        match self {
            HelperRequest::Deliver { published, source, .. } => vec![source, published],
            HelperRequest::Bind { source, target, .. }
            | HelperRequest::Unbind { source, target, .. }
            | HelperRequest::IsBound { source, target } => vec![source, target],
            HelperRequest::Look { path, .. }
            | HelperRequest::BindAt { source: path, .. }
            | HelperRequest::OpenTree { source: path, .. }
            | HelperRequest::OpenMappedTree { source: path, .. }
            | HelperRequest::Detach { path, .. }
            | HelperRequest::Clear { path }
            | HelperRequest::InUse { path }
            | HelperRequest::CheckTarget { target: path, .. }
            | HelperRequest::Resolve { directory: path }
            | HelperRequest::WatchEnd { path }
            | HelperRequest::RemoveOrphan { path, .. } => vec![path],
            // What holds up a removal is in another namespace. Calls at the path do not hang with it.
            HelperRequest::RemoveLeft { .. }
            | HelperRequest::IsHeld { .. }
            | HelperRequest::Holders { .. }
            | HelperRequest::Search { .. }
            | HelperRequest::Close
            | HelperRequest::Sift => Vec::new(),
        }
    }

    /// Whether it is made even when an earlier call at its path has hung.
    pub(super) fn is_despite_hung(&self) -> bool {
        matches!(
            self,
            HelperRequest::Look { despite_hung: true, .. }
                | HelperRequest::Detach { despite_hung: true, .. }
                | HelperRequest::RemoveLeft { despite_hung: true, .. }
        )
    }
}

/// Sends one packet.
pub(super) fn send(socket: impl AsFd, packet: &[u8], fd: Option<&OwnedFd>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd.as_fd()]);
    if let Some(fds) = &fds {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    sendmsg(socket, &[IoSlice::new(packet)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

thread_local! {
    /// Room for the largest packet. To make it for each packet would clear it each time.
    static ROOM: RefCell<Vec<u8>> = RefCell::new(vec![0; PACKET]);
}

/// Receives one packet into `buffer`, with its descriptor. `None`: the other side has ended.
pub(super) fn receive(
    socket: impl AsFd,
    buffer: &mut Vec<u8>,
) -> rustix::io::Result<Option<Option<OwnedFd>>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    buffer.clear();
    let received = ROOM.with_borrow_mut(|room| {
        let received = recvmsg(socket, &mut [IoSliceMut::new(room)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        buffer.extend_from_slice(&room[..received.bytes]);
        Ok::<_, rustix::io::Errno>(received)
    })?;
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(rustix::io::Errno::MSGSIZE);
    }
    Ok((received.bytes > 0).then_some(fd))
}
