//! The stream below zbus. zbus' own receives descriptors without close-on-exec: a program that starts others meanwhile
//! would leak a mount that it has opened, or a command's stream, into them. This one receives them with it. It also wakes the program for what
//! arrives alone: a stream of tokio's wakes it whenever csid has read what it sent, because there is room again.

use std::{
    ffi::OsString,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::{OsStrExt, OsStringExt},
    },
    path::PathBuf,
    sync::Arc,
};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    net::UnixStream,
};
use zbus::{
    Address,
    address::{Transport, transport::UnixSocket},
    connection::socket::{ReadHalf, Socket, Split, WriteHalf},
    export::async_trait::async_trait,
    fdo::ConnectionCredentials,
};

/// SCM_MAX_FD, the kernel's own limit. With room for fewer the kernel would drop some of the descriptors.
const MAX_FDS: usize = 253;

#[derive(Debug)]
pub(crate) struct Stream(AsyncFd<OwnedFd>);

impl Stream {
    fn of(stream: UnixStream) -> io::Result<Self> {
        registered(stream.into_std()?.into(), Interest::READABLE).map(Stream)
    }
}

/// Has the executor wait for this alone.
fn registered(stream: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    #[expect(deprecated, reason = "safe for an OwnedFd; what replaces it is unsafe for every type")]
    AsyncFd::with_interest(stream, interest)
}

/// Connects to the socket of an address; `None` where it is no Unix socket.
pub(crate) async fn connect(address: &Address) -> Option<io::Result<Stream>> {
    let Transport::Unix(unix) = address.transport() else { return None };
    let path = match unix.path() {
        UnixSocket::File(path) => path.clone(),
        UnixSocket::Abstract(name) => PathBuf::from(OsString::from_vec([b"\0", name.as_bytes()].concat())),
        _ => return None,
    };
    Some(UnixStream::connect(path).await.and_then(Stream::of))
}

impl Socket for Stream {
    type ReadHalf = Half;
    type WriteHalf = Half;

    fn split(self) -> Split<Half, Half> {
        let stream = Arc::new(self.0);
        Split::new(Half(stream.clone()), Half(stream))
    }
}

#[derive(Debug)]
pub(crate) struct Half(Arc<AsyncFd<OwnedFd>>);

impl Half {
    fn credentials(&self) -> io::Result<ConnectionCredentials> {
        let peer = rustix::net::sockopt::socket_peercred(&*self.0)?;
        let pid = peer.pid.as_raw_nonzero().get().unsigned_abs();
        Ok(ConnectionCredentials::default().set_unix_user_id(peer.uid.as_raw()).set_process_id(pid))
    }
}

#[async_trait]
impl ReadHalf for Half {
    async fn recvmsg(&mut self, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
        self.0.async_io(Interest::READABLE, |stream| receive(stream, buffer)).await
    }

    fn can_pass_unix_fd(&self) -> bool {
        true
    }

    async fn peer_credentials(&mut self) -> io::Result<ConnectionCredentials> {
        self.credentials()
    }
}

fn receive(stream: &OwnedFd, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = recvmsg(stream, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            fds.extend(passed);
        }
    }
    match message.bytes {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        count => Ok((count, fds)),
    }
}

#[async_trait]
impl WriteHalf for Half {
    async fn sendmsg(&mut self, buffer: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
        let send = |stream: &OwnedFd| -> io::Result<usize> {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(io::ErrorKind::InvalidInput.into());
            }
            Ok(sendmsg(stream, &[IoSlice::new(buffer)], &mut control, SendFlags::NOSIGNAL)?)
        };
        match send(self.0.get_ref()) {
            // Another descriptor waits for room, as long as there is none.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let copy = self.0.as_fd().try_clone_to_owned();
                let room =
                    copy.and_then(|stream| registered(stream, Interest::WRITABLE)).inspect_err(|_| {
                        // A message may be written by half, so the stream is over. The peer may have closed it.
                        let _ = rustix::net::shutdown(&*self.0, rustix::net::Shutdown::Both);
                    })?;
                room.async_io(Interest::WRITABLE, send).await
            }
            sent => sent,
        }
    }

    async fn close(&mut self) -> io::Result<()> {
        Ok(rustix::net::shutdown(&*self.0, rustix::net::Shutdown::Both)?)
    }

    fn can_pass_unix_fd(&self) -> bool {
        true
    }

    async fn peer_credentials(&mut self) -> io::Result<ConnectionCredentials> {
        self.credentials()
    }
}

#[cfg(test)]
mod tests {
    use std::io::pipe;
    use std::os::fd::AsFd;

    use rustix::io::{FdFlags, fcntl_getfd};
    use tokio::io::AsyncReadExt;

    use super::*;

    #[tokio::test]
    async fn full_stream_is_written_to_its_end() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let (_, mut writer) = Stream::of(ours).unwrap().split().take();
        let sent = vec![7; 4 << 20];
        let write = async {
            let mut place = 0;
            while place < sent.len() {
                place += writer.sendmsg(&sent[place..], &[]).await.unwrap();
            }
        };
        let mut received = vec![0; sent.len()];
        let ((), read) = tokio::join!(write, theirs.read_exact(&mut received));
        assert!(read.unwrap() == sent.len() && received == sent);
    }

    #[tokio::test]
    async fn descriptors_come_with_close_on_exec() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (_, mut writer) = Stream::of(ours).unwrap().split().take();
        let (mut reader, _) = Stream::of(theirs).unwrap().split().take();
        let (end, _other) = pipe().unwrap();
        assert_eq!(writer.sendmsg(b"x", &[end.as_fd(); 200]).await.unwrap(), 1);
        let (count, fds) = reader.recvmsg(&mut [0; 8]).await.unwrap();
        assert_eq!((count, fds.len()), (1, 200));
        assert!(fds.iter().all(|fd| fcntl_getfd(fd).unwrap().contains(FdFlags::CLOEXEC)));
    }
}
