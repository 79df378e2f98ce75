//! The server: its socket, its log lines, its end. A running call is finished before the process ends; mounts stay.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use csi_proto::csi::v1::controller_server::ControllerServer;
use csi_proto::csi::v1::identity_server::IdentityServer;
use csi_proto::csi::v1::node_server::NodeServer;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Response, Status};

use crate::caller::Caller;
use crate::controller::Volumes;
use crate::error::{Error, Result};
use crate::identity::Plugin;
use crate::node::Host;
use crate::store::Store;

pub async fn serve(store: Store, endpoint: &str, node_id: String, attach: bool) -> anyhow::Result<()> {
    // Before the socket: a supervisor that sees the socket may send a signal.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let listener = listen(&socket_path(endpoint)?)?;
    tracing::info!(endpoint, node_id, version = env!("CARGO_PKG_VERSION"), "serving");
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = tonic::transport::Server::builder()
        .add_service(IdentityServer::new(Plugin))
        .add_service(ControllerServer::new(Volumes {
            store: store.clone(),
            node_id: node_id.clone(),
            attach,
        }))
        .add_service(NodeServer::new(Host { store, node_id, attach }))
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), async {
            // A sender that is dropped ends the wait too.
            let _ = stopped.await;
        });
    tokio::pin!(server);
    tokio::select! {
        ended = &mut server => return ended.context("serving"),
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!("finishing the running calls; mounts stay");
    drop(stop);
    // The server waits for its clients to hang up as well, and one that does not answer must not hold up the end.
    let answered = async {
        while RUNNING.load(Ordering::SeqCst) > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::time::sleep(HANG_UP).await;
    };
    tokio::select! {
        ended = server => ended.context("serving"),
        () = answered => Ok(()),
    }
}

/// How many calls are at work.
static RUNNING: AtomicUsize = AtomicUsize::new(0);
/// Counts one, also when it panics.
struct Running;

impl Running {
    fn new() -> Running {
        RUNNING.fetch_add(1, Ordering::SeqCst);
        Running
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        RUNNING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// How long clients have to fetch their answers and hang up.
const HANG_UP: Duration = Duration::from_millis(300);

/// `unix:///run/x.sock`, `unix:/run/x.sock` or `/run/x.sock`.
fn socket_path(endpoint: &str) -> anyhow::Result<PathBuf> {
    let path =
        endpoint.strip_prefix("unix://").or_else(|| endpoint.strip_prefix("unix:")).unwrap_or(endpoint);
    if !path.starts_with('/') {
        bail!("the endpoint must be unix:///absolute/path.sock, not {endpoint:?}");
    }
    Ok(PathBuf::from(path))
}

fn listen(path: &Path) -> anyhow::Result<UnixListener> {
    match path.symlink_metadata() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e).with_context(|| format!("looking at {}", path.display())),
        Ok(meta) if !meta.file_type().is_socket() => bail!("{} is there and no socket", path.display()),
        Ok(_) if UnixStream::connect(path).is_ok() => {
            bail!("{} is served by another process; stop it first", path.display())
        }
        Ok(_) => {
            std::fs::remove_file(path).with_context(|| format!("removing stale {}", path.display()))?;
        }
    }
    // The socket is never open to others, not even between bind and chmod.
    let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(path).with_context(|| format!("listening on {}", path.display()));
    rustix::process::umask(before);
    listener
}

/// Runs a call where it may block, and writes its line in the log. When the caller has gone, the call still runs to its end, unless it
/// waits for a lock.
pub async fn blocking<T: Send + 'static>(
    rpc: &'static str,
    volume: String,
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> std::result::Result<Response<T>, Status> {
    let running = Running::new();
    let caller = Caller::default();
    let of_caller = caller.call();
    let run = move || {
        let _running = running;
        let start = Instant::now();
        let answer = of_caller.run(call);
        let ms = start.elapsed().as_millis() as u64;
        match &answer {
            Ok(_) => tracing::info!(rpc, volume, ms, "ok"),
            Err(e) => tracing::warn!(rpc, volume, ms, error = %e, "failed"),
        }
        answer
    };
    match tokio::task::spawn_blocking(run).await {
        Ok(Ok(answer)) => Ok(Response::new(answer)),
        Ok(Err(e)) => Err(e.into()),
        Err(e) => Err(Status::internal(format!("{rpc} did not end: {e}"))),
    }
}

pub fn required<'a>(what: &str, value: &'a str) -> Result<&'a str> {
    if value.is_empty() { Err(Error::Invalid(format!("{what} is missing"))) } else { Ok(value) }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::dirs;
    use crate::error::At;

    #[tokio::test]
    async fn call_without_a_caller_waits_for_no_lock() {
        let dir = tempfile::tempdir().unwrap();
        let held = File::open(dir.path()).unwrap();
        dirs::lock(&held, "v").unwrap();
        let (ended, end) = tokio::sync::oneshot::channel();
        let path = dir.path().to_owned();
        let stage = move || {
            let locked = File::open(path).at("open", Path::new("v")).and_then(|dir| dirs::lock(&dir, "v"));
            let _ = ended.send(matches!(locked, Err(Error::Busy(_))));
            Ok(())
        };
        let call = blocking("NodeStageVolume", "v".into(), stage);
        assert!(
            tokio::time::timeout(Duration::from_millis(50), call).await.is_err(),
            "it waits for the lock"
        );
        // The lock is free before the call's patience is over.
        tokio::time::sleep(Duration::from_millis(50)).await;
        drop(held);
        assert!(end.await.unwrap(), "the call takes the lock though its caller has gone");
    }
}
