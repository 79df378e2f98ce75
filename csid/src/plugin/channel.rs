//! The HTTP/2 connection to a plugin's socket: made at the first call, made again after it ended, and its end
//! is told.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tonic::transport::{Channel, Endpoint, Uri};

use super::trust;

/// No connection was made, so nothing was sent.
#[derive(Debug, thiserror::Error)]
#[error("cannot connect to {}: {source}", path.display())]
pub(super) struct NotConnected {
    path: PathBuf,
    // Part of the message: tonic keeps only that, and `class` looks for this very type in the chain.
    source: io::Error,
}

/// A channel to `socket`, where somebody listens who may for a plugin of `owner`; `ended` is notified each time a
/// connection of it ends. Some drivers insist on the authority `localhost`.
pub(super) fn open(socket: &Path, owner: u32, ended: Arc<Notify>) -> Channel {
    let path = socket.to_owned();
    let connect = tower::service_fn(move |_: Uri| {
        let (path, ended) = (path.clone(), ended.clone());
        async move {
            match connected(&path, owner).await {
                Ok(stream) => Ok(TokioIo::new(Watched { stream, _end: Told(ended) })),
                Err(source) => Err(NotConnected { path, source }),
            }
        }
    });
    Endpoint::from_static("http://localhost").connect_with_connector_lazy(connect)
}

/// Who listens is known only now, and is asked of the kernel before a byte is sent.
async fn connected(path: &Path, owner: u32) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(path).await?;
    let listener = stream.peer_cred()?.uid();
    trust::check_listener(path, owner, listener)
        .map_err(|distrust| io::Error::new(io::ErrorKind::PermissionDenied, distrust))?;
    Ok(stream)
}

/// A stream that tells of its end by being dropped: the connection's driver does so as soon as the peer is
/// gone.
struct Watched {
    stream: UnixStream,
    _end: Told,
}

struct Told(Arc<Notify>);

impl Drop for Told {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

impl AsyncRead for Watched {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}
