//! A Unix stream that wakes csid for what arrives. A stream of tokio's wakes it also whenever the peer has read what csid wrote, because
//! there is room again. csid waits for room only after a write that found none.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use rustix::net::{RecvFlags, Shutdown};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;

/// A connected Unix stream. Reads and writes of it do not block.
#[derive(Debug)]
pub(crate) struct QuietStream {
    stream: AsyncFd<OwnedFd>,
    /// The wait for room, by a descriptor of its own. `None`: the last write found room.
    room: Mutex<Option<AsyncFd<OwnedFd>>>,
}

impl QuietStream {
    /// Takes a stream over from tokio.
    pub fn of(stream: UnixStream) -> io::Result<Self> {
        QuietStream::new(stream.into_std()?.into())
    }

    /// Takes the descriptor of a stream whose reads and writes do not block.
    pub fn new(stream: OwnedFd) -> io::Result<Self> {
        Ok(QuietStream { stream: registered(stream, Interest::READABLE)?, room: Mutex::default() })
    }

    /// Calls `read` until it does not fail for lack of bytes.
    pub async fn read_with<T>(&self, mut read: impl FnMut(BorrowedFd<'_>) -> io::Result<T>) -> io::Result<T> {
        self.stream.async_io(Interest::READABLE, |stream| read(stream.as_fd())).await
    }

    /// Calls `write` until it does not fail for lack of room.
    pub async fn write_with<T>(
        &self,
        mut write: impl FnMut(BorrowedFd<'_>) -> io::Result<T>,
    ) -> io::Result<T> {
        std::future::poll_fn(|context| self.poll_write_with(context, &mut write)).await
    }

    /// Calls `write`, and again whenever there is room, until it does not fail for lack of room.
    fn poll_write_with<T>(
        &self,
        context: &mut Context<'_>,
        mut write: impl FnMut(BorrowedFd<'_>) -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match write(self.as_fd()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => {
                    *room = None;
                    return Poll::Ready(written);
                }
            }
            let waiting = match &mut *room {
                Some(waiting) => waiting,
                none => none.insert(self.waiting_for_room()?),
            };
            ready!(waiting.poll_write_ready(context))?.clear_ready();
        }
    }

    /// Begins a wait for room. If that fails, as without a free descriptor, the stream is over: a message may be written by half.
    fn waiting_for_room(&self) -> io::Result<AsyncFd<OwnedFd>> {
        let copy = self.as_fd().try_clone_to_owned();
        copy.and_then(|stream| registered(stream, Interest::WRITABLE)).inspect_err(|_| {
            // The peer may have closed it.
            let _ = rustix::net::shutdown(self, Shutdown::Both);
        })
    }
}

/// Has the executor wait for this alone. The descriptor gets events only while it is registered, so each kind of event can have a
/// descriptor of its own.
fn registered(stream: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    #[expect(deprecated, reason = "safe for an OwnedFd; what replaces it is unsafe for every type")]
    AsyncFd::with_interest(stream, interest)
}

impl AsFd for QuietStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.get_ref().as_fd()
    }
}

impl AsyncRead for QuietStream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut guard = ready!(self.stream.poll_read_ready(context))?;
            let room = buffer.initialize_unfilled();
            let size = room.len();
            match rustix::net::recv(guard.get_inner(), room, RecvFlags::empty()) {
                Ok((count, _)) => {
                    // Fewer bytes than there is room for are all that had arrived.
                    if count > 0 && count < size {
                        guard.clear_ready();
                    }
                    buffer.advance(count);
                    return Poll::Ready(Ok(()));
                }
                Err(rustix::io::Errno::AGAIN) => guard.clear_ready(),
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
    }
}

impl AsyncWrite for QuietStream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_write_with(context, |stream| Ok(rustix::io::write(stream, bytes)?))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_with(context, |stream| Ok(rustix::io::writev(stream, parts)?))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(rustix::net::shutdown(&self.stream, Shutdown::Write)?))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    fn pair() -> (QuietStream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (QuietStream::of(ours).unwrap(), theirs)
    }

    /// Returns the events that some epoll instance of this process waits for at this descriptor.
    fn events(fd: impl AsFd) -> Vec<u32> {
        let wanted = fd.as_fd().as_raw_fd().to_string();
        let event = |line: &str| {
            let mut words = line.strip_prefix("tfd:")?.split_whitespace();
            (words.next()? == wanted && words.next()? == "events:").then_some(())?;
            u32::from_str_radix(words.next()?, 16).ok()
        };
        let files = std::fs::read_dir("/proc/self/fdinfo").unwrap();
        let texts = files.filter_map(|file| std::fs::read_to_string(file.ok()?.path()).ok());
        texts.flat_map(|text| text.lines().filter_map(event).collect::<Vec<_>>()).collect()
    }

    #[tokio::test]
    async fn room_to_write_wakes_nobody() {
        let (mut ours, mut theirs) = pair();
        ours.write_all(b"12").await.unwrap();
        theirs.read_exact(&mut [0; 2]).await.unwrap();
        let events = events(&ours);
        assert!(!events.is_empty(), "tokio waits by epoll");
        assert!(events.iter().all(|events| events & libc::EPOLLOUT as u32 == 0), "{events:x?}");
    }

    #[tokio::test]
    async fn full_stream_is_written_to_its_end() {
        let (mut ours, mut theirs) = pair();
        let sent = vec![7; 4 << 20];
        let (written, read) = tokio::join!(ours.write_all(&sent), async {
            let mut received = vec![0; sent.len()];
            theirs.read_exact(&mut received).await.map(|_| received)
        });
        written.unwrap();
        assert!(read.unwrap() == sent);
        assert!(ours.room.lock().unwrap().is_none(), "it waits for room that it has");
    }

    #[tokio::test]
    async fn write_without_room_ends_with_the_peer() {
        let (mut ours, theirs) = pair();
        let (written, ()) = tokio::join!(ours.write_all(&[7; 4 << 20]), async { drop(theirs) });
        assert_eq!(written.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[tokio::test]
    async fn bytes_that_come_in_parts_are_read() {
        let (mut ours, mut theirs) = pair();
        for part in [b"12", b"34"] {
            theirs.write_all(part).await.unwrap();
            let mut buffer = [0; 8];
            assert_eq!(ours.read(&mut buffer).await.unwrap(), 2);
            assert_eq!(&buffer[..2], part);
        }
        drop(theirs);
        assert_eq!(ours.read(&mut [0; 8]).await.unwrap(), 0);
    }
}
