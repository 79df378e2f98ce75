//! A witness that runs: in a program of its own, or in a test next to the CO that it watches.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use tokio::sync::oneshot;

use crate::log::{LogError, Reader};
use crate::message::Mask;
use crate::proxy::{self, Shared, Way};
use crate::record::{self, Log, Mark};
use crate::rules::{Checker, Verdict};
use crate::script::Script;

/// The place of a witness.
#[derive(Debug, Default)]
pub struct Setup {
    /// More than one where a plugin's node half and its controllers are processes of their own.
    pub sockets: Vec<Sockets>,
    /// Replaced.
    pub log: PathBuf,
    pub script: Script,
}

/// The sockets of a witness for one socket of the plugin.
#[derive(Clone, Debug)]
pub struct Sockets {
    pub listen: PathBuf,
    /// The plugin's own. Nobody needs to listen there yet.
    pub plugin: PathBuf,
}

/// Why a witness does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot listen on {}", path.display())]
    Listen { path: PathBuf, source: io::Error },
    #[error("cannot make the log {}; a log is of one run, so move an older one away", path.display())]
    Log { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Read(#[from] LogError),
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
}

/// Forwards until it is dropped. It has one thread of its own: what happens on the wire is recorded in the order in which
/// it was seen there, and a test that keeps its threads busy does not slow it.
pub struct Witness {
    _bound: Vec<Bound>,
    log: PathBuf,
    /// The part of the log that was read and judged so far.
    judged: Mutex<(Reader, Checker)>,
    thread: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

impl Witness {
    pub fn start(setup: Setup) -> Result<Self, StartError> {
        let Setup { sockets, log: path, script } = setup;
        let (mut bound, mut ways) = (Vec::new(), Vec::new());
        for Sockets { listen, plugin } in sockets {
            let listener =
                bind(&listen).map_err(|source| StartError::Listen { path: listen.clone(), source })?;
            bound.push(Bound(listen));
            ways.push(Way { listener, plugin });
        }
        let log = Log::create(&path).map_err(|source| StartError::Log { path: path.clone(), source })?;
        let judged = Mutex::new((Reader::open(&path)?, Checker::default()));

        let shared = Arc::new(Shared { log, script, mask: Mask::default() });
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(StartError::Thread)?;
        let (stop, stopped) = oneshot::channel();
        let serve = move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = stopped => {}
                    end = proxy::serve(ways, shared) => panic!("the witness cannot listen: {end:?}"),
                }
            });
        };
        let thread = std::thread::Builder::new().name("csi-witness".into()).spawn(serve);
        let thread = Some((stop, thread.map_err(StartError::Thread)?));
        Ok(Witness { _bound: bound, log: path, judged, thread })
    }

    pub fn mark(&self, mark: Mark) -> io::Result<()> {
        record::mark(&self.log, mark)
    }

    /// Returns the verdict of the rules on all calls so far.
    pub fn verdict(&self) -> Result<Verdict, LogError> {
        let mut judged = self.judged.lock().unwrap_or_else(PoisonError::into_inner);
        let (reader, checker) = &mut *judged;
        for event in reader {
            checker.feed(0, &event?.event);
        }
        Ok(checker.verdict().clone())
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.thread.take() {
            drop(stop);
            // A panic of the thread was printed.
            let _ = thread.join();
        }
    }
}

/// A socket's path that was bound here: the file goes with it.
struct Bound(PathBuf);

impl Drop for Bound {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn is_left_over(path: &Path) -> io::Result<bool> {
    let is_socket = std::fs::symlink_metadata(path)?.file_type().is_socket();
    let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    Ok(is_socket && UnixStream::connect(path).is_err_and(refused))
}

/// Binds a listener. A socket that a killed witness left is replaced. Fails if a witness lives there, or another file is there.
fn bind(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_left_over(path)? => {
            std::fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        result => result,
    }
}
