//! A peer of the private socket as a transport for zbus: what one message may make csid hold is bounded here, before zbus
//! allocates for it, and the peer's groups are the kernel's (zbus would look its uid up in the user database instead, which
//! knows nothing of a unit's `SupplementaryGroups=`).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use tokio::io::Interest;
use tokio::net::UnixStream;
use zbus::connection::socket::{ReadHalf, Socket, Split, WriteHalf};
use zbus::export::async_trait::async_trait;
use zbus::fdo::ConnectionCredentials;

/// No call of the contract comes near: options are 64 KiB at most.
const MAX_MESSAGE: usize = 1024 * 1024;
/// No member takes more than one file descriptor.
const MAX_FDS: usize = 8;
/// The part of a message that says how long the rest is; zbus reads it on its own.
const PRIMARY_HEADER: usize = 16;

/// Who is at the other end, as the kernel saw it when he connected.
#[derive(Clone, Debug)]
pub(super) struct Credentials {
    pub uid: u32,
    pub groups: Vec<u32>,
}

impl Credentials {
    pub fn of(socket: impl AsFd) -> io::Result<Self> {
        let peer = rustix::net::sockopt::socket_peercred(socket.as_fd())?;
        let mut groups = supplementary_groups(socket.as_fd())?;
        groups.push(peer.gid.as_raw());
        Ok(Credentials { uid: peer.uid.as_raw(), groups })
    }
}

/// `SO_PEERGROUPS`, which rustix does not have.
fn supplementary_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let mut bytes = libc::socklen_t::try_from(size_of_val(groups.as_slice())).unwrap_or(0);
        // SAFETY: the descriptor is open for the borrow's life, `groups` is writable for `bytes` bytes, and the kernel
        // writes at most that many whole gid_t and stores into `bytes` how many it wrote, or on ERANGE needs.
        let result = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &mut bytes,
            )
        };
        let count = bytes as usize / size_of::<libc::gid_t>();
        if result == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::ERANGE) || count <= groups.len() {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}

/// A connected peer; both halves share the stream.
#[derive(Debug)]
pub(super) struct Peer(pub UnixStream);

impl Socket for Peer {
    type ReadHalf = Reader;
    type WriteHalf = Writer;

    fn split(self) -> Split<Reader, Writer> {
        let stream = Arc::new(self.0);
        Split::new(Reader { stream: stream.clone(), fds: 0 }, Writer { stream })
    }
}

#[derive(Debug)]
pub(super) struct Reader {
    stream: Arc<UnixStream>,
    /// File descriptors that came with the message under way.
    fds: usize,
}

#[async_trait]
impl ReadHalf for Reader {
    async fn recvmsg(&mut self, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        // zbus asks for a message's primary header, then for all that is left of it.
        if buffer.len() > MAX_MESSAGE {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the message is larger than 1 MiB"));
        }
        if buffer.len() == PRIMARY_HEADER {
            self.fds = 0;
        }
        let (count, fds) = self.stream.async_io(Interest::READABLE, || receive(&self.stream, buffer)).await?;
        self.fds += fds.len();
        if self.fds > MAX_FDS {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "too many file descriptors"));
        }
        Ok((count, fds))
    }

    fn can_pass_unix_fd(&self) -> bool {
        true
    }

    async fn peer_credentials(&mut self) -> io::Result<ConnectionCredentials> {
        credentials(&self.stream)
    }
}

fn receive(stream: &UnixStream, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message =
        rustix::net::recvmsg(stream, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let fds = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    match message.bytes {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        count => Ok((count, fds)),
    }
}

#[derive(Debug)]
pub(super) struct Writer {
    stream: Arc<UnixStream>,
}

#[async_trait]
impl WriteHalf for Writer {
    async fn sendmsg(&mut self, buffer: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        let send = || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            Ok(rustix::net::sendmsg(
                &self.stream,
                &[IoSlice::new(buffer)],
                &mut control,
                SendFlags::NOSIGNAL,
            )?)
        };
        self.stream.async_io(Interest::WRITABLE, send).await
    }

    async fn close(&mut self) -> io::Result<()> {
        Ok(rustix::net::shutdown(&self.stream, rustix::net::Shutdown::Both)?)
    }

    fn can_pass_unix_fd(&self) -> bool {
        true
    }

    async fn peer_credentials(&mut self) -> io::Result<ConnectionCredentials> {
        credentials(&self.stream)
    }
}

/// For zbus' handshake, which compares the uid with the one the peer claims.
fn credentials(stream: &UnixStream) -> io::Result<ConnectionCredentials> {
    let peer = rustix::net::sockopt::socket_peercred(stream)?;
    Ok(ConnectionCredentials::default().set_unix_user_id(peer.uid.as_raw()))
}
