//! Connections to the system bus. One that needs no descriptors does not negotiate them, so that the bus delivers none. csid
//! would have to close them, which may wait for a file system's server.

use std::ffi::OsString;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use tokio::net::UnixStream;
use zbus::Address;
use zbus::address::transport::{Transport, UnixSocket};
use zbus::connection::Builder;
use zbus::connection::socket::{ReadHalf, Socket, Split, WriteHalf};
use zbus::export::async_trait::async_trait;

use crate::quiet_stream::QuietStream;

/// Connects to the system bus, or to the bus at `address`.
pub(crate) async fn connect(address: Option<&Address>) -> zbus::Result<QuietStream> {
    let address = address.map_or_else(Address::system, |address| Ok(address.clone()))?;
    let path = match address.transport() {
        Transport::Unix(unix) => match unix.path() {
            UnixSocket::File(path) => path.clone(),
            UnixSocket::Abstract(name) => {
                PathBuf::from(OsString::from_vec([b"\0", name.as_bytes()].concat()))
            }
            _ => return Err(zbus::Error::Unsupported),
        },
        _ => return Err(zbus::Error::Unsupported),
    };
    Ok(QuietStream::of(UnixStream::connect(path).await?)?)
}

/// Begins a connection to the system bus that passes no descriptors.
pub(crate) async fn without_descriptors() -> zbus::Result<Builder<'static>> {
    Ok(Builder::socket(Plain { stream: connect(None).await?, sends: false }))
}

/// Begins a connection to the system bus that sends descriptors and receives none, for one call: a message with descriptors from
/// anybody ends it.
pub(crate) async fn sending_descriptors() -> zbus::Result<Builder<'static>> {
    Ok(Builder::socket(Plain { stream: connect(None).await?, sends: true }))
}

/// Sends a part of `buffer`, and with it the descriptors. Returns how many bytes were sent.
pub(crate) async fn send(stream: &QuietStream, buffer: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let send = |stream: BorrowedFd<'_>| {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let buffer = [IoSlice::new(buffer)];
        Ok(rustix::net::sendmsg(stream, &buffer, &mut control, SendFlags::NOSIGNAL)?)
    };
    stream.write_with(send).await
}

/// Descriptors of one message.
pub(crate) const MAX_FDS: usize = 8;

/// A stream of bytes alone, but for the descriptors that are sent.
#[derive(Debug)]
struct Plain {
    stream: QuietStream,
    sends: bool,
}

#[derive(Debug)]
struct Half {
    stream: Arc<QuietStream>,
    sends: bool,
}

impl Socket for Plain {
    type ReadHalf = Half;
    type WriteHalf = Half;

    fn split(self) -> Split<Half, Half> {
        let half = |stream| Half { stream, sends: self.sends };
        let stream = Arc::new(self.stream);
        Split::new(half(Arc::clone(&stream)), half(stream))
    }
}

#[async_trait]
impl ReadHalf for Half {
    async fn recvmsg(&mut self, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        let read = self.stream.read_with(|stream| Ok(rustix::io::read(stream, &mut *buffer)?));
        Ok((read.await?, Vec::new()))
    }

    fn can_pass_unix_fd(&self) -> bool {
        self.sends
    }
}

#[async_trait]
impl WriteHalf for Half {
    async fn sendmsg(&mut self, buffer: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        send(&self.stream, buffer, fds).await
    }

    async fn close(&mut self) -> io::Result<()> {
        Ok(rustix::net::shutdown(&self.stream, rustix::net::Shutdown::Both)?)
    }

    fn can_pass_unix_fd(&self) -> bool {
        self.sends
    }
}
