//! The transport of zbus' connections, to the peers of the private socket and to the system bus. It limits the memory of one message
//! before zbus allocates any.
//!
//! csid has to close a descriptor that it receives, which may wait for a file system's server. So csid itself receives only root's on
//! the private socket, and the helper receives the others' ([`Takes`]).
//!
//! A peer's groups come from the kernel. zbus would look up the uid in the user database, which has no `SupplementaryGroups=` of units.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{RecvAncillaryBuffer, RecvFlags, ReturnFlags};
use zbus::Message;
use zbus::connection::socket::{ReadHalf, Socket, Split, WriteHalf};
use zbus::export::async_trait::async_trait;
use zbus::fdo::ConnectionCredentials;

use super::oversize::{self, Discard, PRIMARY, Primary};
use super::stream::{Stream, invalid};
use crate::quiet_stream::QuietStream;
use crate::system_bus;
use crate::volume::{Sifted, Volumes};

/// The limit of bytes before a peer has logged in, which needs a few lines.
const MAX_HANDSHAKE: usize = 16 * 1024;

/// The credentials of a peer from the kernel, as of when the peer connected.
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

/// Returns `SO_PEERGROUPS`, which rustix does not have.
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

/// A connected stream, to a peer or to the system bus. Both halves share it.
#[derive(Debug)]
pub(super) struct Transport {
    stream: QuietStream,
    remote: Remote,
    takes: Takes,
}

/// The descriptors that csid accepts on a connection.
#[derive(Debug)]
pub(super) enum Takes {
    /// All, because they are root's. A close that hangs blocks csid.
    All,
    /// One descriptor of each message. The helper receives it, and passes it on if its close cannot hang.
    Sifted(Sifter),
    /// No descriptor. Descriptors are not negotiated.
    Nothing,
}

/// The receiver of a connection's descriptors.
pub(super) struct Sifter {
    pub volumes: Volumes,
    /// The caller's uid. `None` on the bus, where it is not known yet.
    pub uid: Option<u32>,
}

impl std::fmt::Debug for Sifter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sifter").field("uid", &self.uid).finish_non_exhaustive()
    }
}

/// The other end. A peer that sends malformed data is disconnected; the connection to the bus serves all callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Remote {
    Peer,
    Bus,
}

impl Transport {
    pub fn peer(stream: QuietStream, takes: Takes) -> Self {
        Transport { stream, remote: Remote::Peer, takes }
    }

    pub fn bus(stream: QuietStream, takes: Takes) -> Self {
        Transport { stream, remote: Remote::Bus, takes }
    }
}

impl Socket for Transport {
    type ReadHalf = Reader;
    type WriteHalf = Writer;

    fn split(self) -> Split<Reader, Writer> {
        let stream = Arc::new(self.stream);
        let receives = matches!(self.takes, Takes::All);
        let negotiates = !matches!(self.takes, Takes::Nothing);
        let reader =
            Stream { stream: stream.clone(), receives, ahead: Vec::new(), ahead_fds: Vec::new(), fds: 0 };
        // The bus sends no BEGIN, and its first message may follow its lines in the same read.
        let handshake = (self.remote == Remote::Peer).then(Handshake::default);
        let reader = Reader { stream: reader, remote: self.remote, takes: self.takes, handshake };
        Split::new(reader, Writer { stream, negotiates })
    }
}

/// The reading half. It checks each message's length before anything is allocated for it. A message that is too large is discarded, and
/// zbus gets [`oversize`]'s stand-in.
#[derive(Debug)]
pub(super) struct Reader {
    stream: Stream,
    remote: Remote,
    takes: Takes,
    /// `None` after the handshake, and on the bus.
    handshake: Option<Handshake>,
}

#[async_trait]
impl ReadHalf for Reader {
    /// Reads bytes of the handshake for zbus.
    async fn recvmsg(&mut self, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        // Read single bytes: the message behind the last line may have descriptors, which would be lost with its first byte.
        let most = if self.stream.receives { buffer.len() } else { buffer.len().min(1) };
        let (count, fds) = self.stream.recvmsg(&mut buffer[..most]).await?;
        if let Some(handshake) = &mut self.handshake {
            handshake.check(&buffer[..count])?;
        }
        Ok((count, fds))
    }

    async fn receive_message(
        &mut self,
        seq: u64,
        received: &mut Vec<u8>,
        received_fds: &mut Vec<OwnedFd>,
    ) -> zbus::Result<Message> {
        self.handshake = None;
        // zbus panics if fewer of these arrived than the message says.
        self.stream.ahead.append(received);
        self.stream.ahead_fds.append(received_fds);
        loop {
            self.stream.fds = 0;
            let mut bytes = [0; PRIMARY];
            let (mut fds, refused) = match self.sift(&mut bytes[0]).await? {
                None => (self.stream.fill(&mut bytes).await?, None),
                Some(Sifted::Busy) => (self.stream.fill(&mut bytes).await?, Some(Discard::Busy)),
                Some(sifted) => {
                    let others = self.stream.fill(&mut bytes[1..]).await?;
                    match sifted {
                        Sifted::Passed(fd) => (vec![fd], None),
                        Sifted::Refused => (others, Some(Discard::Descriptor)),
                        Sifted::Nothing | Sifted::Busy => (others, None),
                    }
                }
            };
            let primary = Primary::read(&bytes);
            let Some(refusal) = primary.too_large().or(refused) else {
                self.stream.ahead.splice(..0, bytes);
                self.stream.ahead_fds.splice(..0, fds);
                return self.stream.receive_message(seq, &mut Vec::new(), &mut Vec::new()).await;
            };
            fds.clear();
            if self.remote == Remote::Peer && primary.is_absurd() {
                return Err(invalid("the message is larger than 32 MiB").into());
            }
            let sender = oversize::discard(&mut self.stream, &primary).await?;
            if let Some(stand_in) =
                oversize::stand_in(&primary, sender.as_deref(), self.remote == Remote::Bus, refusal)
            {
                return Ok(stand_in);
            }
        }
    }

    fn can_pass_unix_fd(&self) -> bool {
        !matches!(self.takes, Takes::Nothing)
    }

    async fn peer_credentials(&mut self) -> io::Result<ConnectionCredentials> {
        credentials(&self.stream.stream)
    }
}

impl Reader {
    /// Waits for the next message. `Some`: it has descriptors for the helper to receive. Unless the helper is busy, it has read the
    /// message's first byte from the stream, which is now in `first`.
    async fn sift(&mut self, first: &mut u8) -> io::Result<Option<Sifted>> {
        let Takes::Sifted(sifter) = &self.takes else { return Ok(None) };
        if !self.stream.ahead.is_empty() {
            return Ok(None);
        }
        let stream = &self.stream.stream;
        let Some(byte) = stream.read_with(peek).await? else { return Ok(None) };
        *first = byte;
        let sifted = sifter.volumes.sift(sifter.uid, stream.as_fd().try_clone_to_owned()?).await;
        sifted
            .inspect_err(|error| tracing::warn!(%error, "the helper failed to receive a caller's descriptor"))
            .map(Some)
    }
}

/// Returns the next byte if it was sent with descriptors. Both stay in the stream.
fn peek(stream: BorrowedFd<'_>) -> io::Result<Option<u8>> {
    let mut byte = [0];
    let mut nothing = RecvAncillaryBuffer::default();
    let peeked =
        rustix::net::recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut nothing, RecvFlags::PEEK)?;
    Ok(peeked.flags.contains(ReturnFlags::CTRUNC).then_some(byte[0]))
}

/// A check of the lines before the first message. zbus keeps all bytes until a line ends, and panics at a line that begins with LF.
#[derive(Debug, Default)]
struct Handshake {
    bytes: usize,
    line: Vec<u8>,
    ended: bool,
}

impl Handshake {
    fn check(&mut self, bytes: &[u8]) -> io::Result<()> {
        for byte in bytes {
            if self.ended {
                return Ok(());
            }
            self.bytes += 1;
            if self.bytes > MAX_HANDSHAKE {
                return Err(invalid("the handshake is larger than 16 KiB"));
            }
            if *byte != b'\n' {
                self.line.push(*byte);
                continue;
            }
            if self.line.last() != Some(&b'\r') {
                return Err(invalid("a line of the handshake does not end in CR LF"));
            }
            // A message follows, with any bytes.
            self.ended = self.line == b"BEGIN\r";
            self.line.clear();
        }
        Ok(())
    }
}

#[derive(Debug)]
pub(super) struct Writer {
    stream: Arc<QuietStream>,
    negotiates: bool,
}

#[async_trait]
impl WriteHalf for Writer {
    async fn sendmsg(&mut self, buffer: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        system_bus::send(&self.stream, buffer, fds).await
    }

    async fn close(&mut self) -> io::Result<()> {
        Ok(rustix::net::shutdown(&self.stream, rustix::net::Shutdown::Both)?)
    }

    fn can_pass_unix_fd(&self) -> bool {
        self.negotiates
    }

    async fn peer_credentials(&mut self) -> io::Result<ConnectionCredentials> {
        credentials(&self.stream)
    }
}

/// Returns the peer's uid for zbus' handshake, which compares it with the one that the peer claims.
fn credentials(stream: &QuietStream) -> io::Result<ConnectionCredentials> {
    let peer = rustix::net::sockopt::socket_peercred(stream)?;
    Ok(ConnectionCredentials::default().set_unix_user_id(peer.uid.as_raw()))
}
