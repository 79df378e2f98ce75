//! A Unix stream, as zbus reads one. Descriptors arrive with close-on-exec, which zbus' own transport does not set.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use zbus::connection::socket::ReadHalf;
use zbus::export::async_trait::async_trait;

use crate::quiet_stream::QuietStream;
use crate::system_bus::MAX_FDS;

/// A stream, with the bytes and descriptors that were read ahead.
#[derive(Debug)]
pub(super) struct Stream {
    pub stream: Arc<QuietStream>,
    /// Whether descriptors are received. If not, the kernel drops them without a flush request to the file system's server. The last
    /// release of a file may still wait, with FUSE's write-back cache or NFS.
    pub receives: bool,
    pub ahead: Vec<u8>,
    pub ahead_fds: Vec<OwnedFd>,
    /// The number of descriptors of the current message.
    pub fds: usize,
}

impl Stream {
    /// Reads the bytes that have arrived, at most the buffer's length. Their descriptors are closed.
    pub async fn some(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.fds = 0;
        Ok(self.recvmsg(buffer).await?.0)
    }

    /// Fills the whole buffer. Returns the descriptors that arrived with it.
    pub async fn fill(&mut self, buffer: &mut [u8]) -> io::Result<Vec<OwnedFd>> {
        let (mut place, mut all) = (0, Vec::new());
        while place < buffer.len() {
            let (count, fds) = self.recvmsg(&mut buffer[place..]).await?;
            place += count;
            all.extend(fds);
        }
        Ok(all)
    }
}

#[async_trait]
impl ReadHalf for Stream {
    async fn recvmsg(&mut self, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        if !self.ahead.is_empty() {
            let count = buffer.len().min(self.ahead.len());
            buffer[..count].copy_from_slice(&self.ahead[..count]);
            self.ahead.drain(..count);
            return Ok((count, std::mem::take(&mut self.ahead_fds)));
        }
        let receive = |stream: BorrowedFd<'_>| match self.receives {
            true => receive(stream, buffer),
            false => Ok((receive_bytes(stream, buffer)?, Vec::new())),
        };
        let (count, fds) = self.stream.read_with(receive).await?;
        self.fds += fds.len();
        if self.fds > MAX_FDS {
            return Err(invalid("too many file descriptors"));
        }
        Ok((count, fds))
    }

    fn can_pass_unix_fd(&self) -> bool {
        true
    }
}

fn receive_bytes(stream: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    match rustix::net::recv(stream, buffer, RecvFlags::empty())?.0 {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        count => Ok(count),
    }
}

fn receive(stream: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
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

pub(super) fn invalid(text: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}
