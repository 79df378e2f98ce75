//! One socket, and the server that its connections go to.

use std::fs;
use std::io::{ErrorKind, Result};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustls::ClientConfig;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, copy, split};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use crate::far::Far;

/// Connections of one socket at the same time.
const AT_ONCE: usize = 64;
/// How long one direction goes on after the other has ended.
const REST: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(100);
/// How long a server's failure is not logged again. csid tries the server every few seconds.
const AGAIN: Duration = Duration::from_secs(600);
/// The most failures of one server that are logged in that time.
const KINDS: usize = 8;

/// A socket for one server. Its file goes with it.
pub struct Relay {
    listener: UnixListener,
    path: PathBuf,
    far: Far,
    failures: Failures,
}

/// What the log says of failures to reach a server.
#[derive(Default)]
struct Failures(Mutex<Logged>);

#[derive(Default)]
struct Logged {
    /// The failures that were logged, and when.
    failures: Vec<(String, Instant)>,
    /// Whether one of them was logged since the log said that the server is reached again.
    is_open: bool,
}

impl Failures {
    fn lock(&self) -> MutexGuard<'_, Logged> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a failure is to be logged: none like it was for [`AGAIN`], and fewer than [`KINDS`] others were.
    fn is_news(&self, failure: String) -> bool {
        let mut logged = self.lock();
        logged.failures.retain(|(_, at)| at.elapsed() < AGAIN);
        let is_news =
            logged.failures.len() < KINDS && !logged.failures.iter().any(|(known, _)| *known == failure);
        if is_news {
            logged.failures.push((failure, Instant::now()));
            logged.is_open = true;
        }
        is_news
    }

    /// Notes that a connection has reached the server. Returns whether the log says otherwise.
    fn end(&self) -> bool {
        std::mem::take(&mut self.lock().is_open)
    }
}

impl Relay {
    /// Makes the socket of a server, HOST:PORT, in a directory.
    pub fn new(directory: &Path, server: &str, tls: Arc<ClientConfig>) -> Result<Relay> {
        let far = Far::new(server, tls)?;
        let path = directory.join(server);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        Ok(Relay { listener, path, far, failures: Failures::default() })
    }

    /// Serves connections until the task is aborted.
    pub async fn run(self: Arc<Self>) {
        let places = Arc::new(Semaphore::new(AT_ONCE));
        loop {
            let Ok(place) = places.clone().acquire_owned().await else { return };
            match self.listener.accept().await {
                Ok((near, _)) => {
                    let relay = self.clone();
                    tokio::spawn(async move {
                        relay.serve(near).await;
                        drop(place);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection was not accepted");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    async fn serve(&self, near: UnixStream) {
        let server = self.far.server();
        match near.peer_cred() {
            Ok(peer) if peer.uid() == 0 => {}
            Ok(peer) => {
                return tracing::warn!(server, uid = peer.uid(), "a caller other than root was refused");
            }
            Err(error) => return tracing::warn!(server, %error, "a caller's uid is not known"),
        }
        match self.far.connect().await {
            Ok(far) => {
                if self.failures.end() {
                    tracing::info!(server, "the server is reached again");
                }
                relay(near, far).await;
            }
            Err(error) if self.failures.is_news(error.to_string()) => {
                tracing::warn!(server, %error, "the server was not reached");
            }
            Err(_) => {}
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Copies both ways until each end has said all. After one end has, the other has some time left.
async fn relay(near: impl AsyncRead + AsyncWrite, far: impl AsyncRead + AsyncWrite) {
    let ((mut from_near, mut to_near), (mut from_far, mut to_far)) = (split(near), split(far));
    let mut there = std::pin::pin!(async {
        let copied = copy(&mut from_near, &mut to_far).await;
        copied.and(to_far.shutdown().await)
    });
    let mut back = std::pin::pin!(async {
        let copied = copy(&mut from_far, &mut to_near).await;
        copied.and(to_near.shutdown().await)
    });
    // An error of one direction ends both: the ends close with this function.
    let _ = tokio::select! {
        ended = &mut there => match ended {
            Ok(()) => tokio::time::timeout(REST, &mut back).await.map(drop),
            Err(_) => Ok(()),
        },
        ended = &mut back => match ended {
            Ok(()) => tokio::time::timeout(REST, &mut there).await.map(drop),
            Err(_) => Ok(()),
        },
    };
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, duplex};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn failure_is_logged_once_in_ten_minutes() {
        let failures = Failures::default();
        let is_news = |failure: &str| failures.is_news(failure.to_owned());
        assert!(is_news("refused") && is_news("unreachable"));
        assert!(!is_news("refused") && !is_news("unreachable"), "they take turns");
        assert!(failures.end() && !failures.end());
        assert!(!is_news("refused") && !failures.end(), "it comes and goes");
        tokio::time::advance(AGAIN).await;
        assert!(is_news("refused") && !is_news("refused"));
        let others = (0..KINDS).filter(|n| is_news(&n.to_string())).count();
        assert_eq!(others, KINDS - 1);
    }

    #[tokio::test(start_paused = true)]
    async fn end_of_one_side_ends_the_other_in_time() {
        let (mut near, inner_near) = duplex(64);
        let (mut far, inner_far) = duplex(64);
        let copying = tokio::spawn(relay(inner_near, inner_far));
        near.write_all(b"ask").await.unwrap();
        let mut read = [0; 3];
        far.read_exact(&mut read).await.unwrap();
        far.write_all(b"yes").await.unwrap();
        near.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"yes");
        near.shutdown().await.unwrap();
        assert_eq!(far.read(&mut read).await.unwrap(), 0, "the end came through");
        // The far end says nothing more, and does not close either.
        tokio::time::timeout(REST * 2, copying).await.expect("it goes on for ever").unwrap();
        assert_eq!(near.read(&mut read).await.unwrap(), 0);
    }
}
