//! The HTTP/2 connection to a plugin's socket: made at the first call, and again after it ended. Its end
//! is signalled.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::Notify;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::host::units::Units;
use crate::plugin::trust;
use crate::quiet_stream::QuietStream;

/// No connection was made, so nothing was sent.
#[derive(Debug, thiserror::Error)]
#[error("cannot connect to {}: {source}", path.display())]
pub(super) struct NotConnected {
    path: PathBuf,
    // Part of the message: tonic keeps only that, and `class` looks for this very type in the chain.
    source: io::Error,
}

/// The process that may listen at a plugin's socket.
#[derive(Clone)]
pub(super) enum AllowedListener {
    /// A process that may listen for a plugin of this uid.
    Owner(u32),
    /// A process of this unit. The plugin writes in the socket's directory, so the path may lead to another's socket.
    Unit { units: Units, unit: String },
}

/// The processes that listen at the sockets that csid is connected to, one entry for each connection.
#[derive(Default)]
pub(super) struct Listeners(Mutex<Vec<u32>>);

impl Listeners {
    pub fn processes(&self) -> Vec<u32> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn add(&self, process: u32) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(process);
    }

    fn remove(&self, process: u32) {
        let mut processes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = processes.iter().position(|known| *known == process) {
            processes.swap_remove(place);
        }
    }
}

/// A channel to `socket`, where `listener` has to listen; `ended` is notified each time a
/// connection of it ends. Some drivers insist on the authority `localhost`.
pub(super) fn open(
    socket: &Path,
    listener: AllowedListener,
    ended: Arc<Notify>,
    listeners: Arc<Listeners>,
) -> Channel {
    let path = socket.to_owned();
    let connect = tower::service_fn(move |_: Uri| {
        let (path, listener) = (path.clone(), listener.clone());
        let (ended, listeners) = (ended.clone(), listeners.clone());
        async move {
            match connected(&path, &listener).await {
                Ok((stream, process)) => {
                    listeners.add(process);
                    let end = ConnectionEnd { ended, listeners, process };
                    Ok(TokioIo::new(Watched { stream, _end: end }))
                }
                Err(source) => Err(NotConnected { path, source }),
            }
        }
    });
    Endpoint::from_static("http://localhost").connect_with_connector_lazy(connect)
}

/// Connects to the socket, and checks the listener by the peer's credentials before a byte is sent. Returns the listener's process ID
/// too; 0: a process of another pid namespace.
async fn connected(path: &Path, listener: &AllowedListener) -> io::Result<(QuietStream, u32)> {
    let stream = UnixStream::connect(path).await?;
    let peer = stream.peer_cred()?;
    let pid = peer.pid().and_then(|pid| u32::try_from(pid).ok()).unwrap_or_default();
    let distrusted = |distrust| io::Error::new(io::ErrorKind::PermissionDenied, distrust);
    match listener {
        AllowedListener::Owner(owner) => {
            trust::check_listener(path, *owner, peer.uid()).map_err(distrusted)?
        }
        AllowedListener::Unit { units, unit } => {
            if !units.has_process(unit, pid).await.map_err(io::Error::other)? {
                let (uid, unit) = (peer.uid(), unit.clone());
                return Err(distrusted(trust::Distrust::Stranger { pid, uid, unit }));
            }
        }
    }
    Ok((QuietStream::of(stream)?, pid))
}

/// A stream that signals its end when it is dropped. The connection's driver drops it as soon as the peer is
/// gone.
struct Watched {
    stream: QuietStream,
    _end: ConnectionEnd,
}

/// The end of a connection, signalled to the instance when it is dropped.
struct ConnectionEnd {
    ended: Arc<Notify>,
    listeners: Arc<Listeners>,
    process: u32,
}

impl Drop for ConnectionEnd {
    fn drop(&mut self) {
        self.listeners.remove(self.process);
        self.ended.notify_one();
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
