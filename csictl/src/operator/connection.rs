//! A connection that remembers why it broke. The reason of TLS is lost on the way through HTTP/2.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The first error of a connection.
pub type Broken = Arc<OnceLock<String>>;

/// A connection whose first error is kept.
pub struct Connection<S> {
    stream: S,
    /// The error of a write. What the far end said before it closed the connection is read after that, and is the better reason.
    failed: Option<io::Error>,
    broken: Broken,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Connection<S> {
    pub fn new(stream: S, broken: Broken) -> Self {
        Connection { stream, failed: None, broken }
    }

    fn keep(&self, error: io::Error) -> io::Error {
        // A later error is a consequence.
        let _ = self.broken.set(error.to_string());
        error
    }

    /// Writes, and after a failure reads up to the end of the connection.
    fn write<T>(
        &mut self,
        context: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut S>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if self.failed.is_none() {
            match ready!(write(Pin::new(&mut self.stream), context)) {
                Ok(written) => return Poll::Ready(Ok(written)),
                Err(error) => self.failed = Some(error),
            }
        }
        let mut bytes = [0; 1024];
        loop {
            let mut buffer = ReadBuf::new(&mut bytes);
            match ready!(Pin::new(&mut self.stream).poll_read(context, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => {}
                Err(error) => return Poll::Ready(Err(self.keep(error))),
                Ok(()) => {
                    let error = self.failed.take().unwrap_or_else(|| io::ErrorKind::BrokenPipe.into());
                    return Poll::Ready(Err(self.keep(error)));
                }
            }
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Connection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = ready!(Pin::new(&mut self.stream).poll_read(context, buffer));
        Poll::Ready(read.map_err(|error| self.keep(error)))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.write(context, |stream, context| stream.poll_write(context, bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.write(context, |stream, context| stream.poll_flush(context))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// A stream whose writes fail. Its reads give some bytes, and then an error.
    struct Refused(usize);

    impl AsyncRead for Refused {
        fn poll_read(
            mut self: Pin<&mut Self>,
            context: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            self.0 += 1;
            match self.0 {
                1 => {
                    context.waker().wake_by_ref();
                    Poll::Pending
                }
                2 => {
                    buffer.put_slice(b"bytes");
                    Poll::Ready(Ok(()))
                }
                _ => Poll::Ready(Err(io::Error::other("received fatal alert: CertificateExpired"))),
            }
        }
    }

    impl AsyncWrite for Refused {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn reason_of_a_failed_write_is_read() {
        let broken = Broken::default();
        let mut connection = Connection::new(Refused(0), broken.clone());
        let error = connection.write_all(b"call").await.unwrap_err();
        assert!(error.to_string().contains("CertificateExpired"), "{error}");
        connection.read_u8().await.unwrap_err();
        assert_eq!(broken.get().map(String::as_str), Some("received fatal alert: CertificateExpired"));
    }
}
