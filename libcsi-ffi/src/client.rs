//! `csi_client`: a session with csid, and the one thread that drives it.

use std::ffi::c_char;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{io, mem, process, ptr};

use csid_client::{Session, Target};
use tokio::runtime::{Builder, Handle};
use tokio::sync::{RwLock, oneshot};

use crate::border::{Extensible, Result, entry, extensible, invalid, optional_text, out, plain};
use crate::error::{CSI_E_DEADLINE, CSI_E_FORKED, CSI_E_INTERNAL, csi_code, csi_error};

/// A closing client gives its cancellations this long to reach csid.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A connection to csid that outlives csid's restarts. Counted: csi_client_ref, csi_client_unref. Any thread
/// may use it at any time.
pub struct csi_client {
    process: u32,
    pub(crate) runtime: Handle,
    pub(crate) session: Arc<Session>,
    /// Held for reading while a cancellation is still to be sent to csid.
    pub(crate) talking: Arc<RwLock<()>>,
    operations: (u64, AtomicU64),
    thread: Mutex<Option<(oneshot::Sender<()>, JoinHandle<()>)>>,
}

/// How csi_client_open finds csid. NULL or all zeroes: as csictl does.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct csi_client_options {
    /// sizeof(csi_client_options), in bytes.
    pub struct_size: usize,
    /// Path of csid's private socket (absolute), or "system-bus". NULL: $CSID_SOCKET, else the socket at its
    /// usual place, else the system bus. A set-uid program ignores the environment.
    pub address: *const c_char,
    /// How long to try to connect, in microseconds. 0: 10 s.
    pub timeout_usec: u64,
}

// SAFETY: repr(C), struct_size first, a pointer and an integer of eight bytes.
unsafe impl Extensible for csi_client_options {}

/// Connects to csid. Fails at once if csid cannot be reached now. Later calls wait for a csid that restarts.
///
/// @param options  Where csid is and how long to try. NULL: the defaults.
/// @param client  Receives the connection, which the caller frees with csi_client_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK, or an error. CSI_E_INVALID: an argument is wrong. CSI_E_UNSUPPORTED: options has unknown
///   members. CSI_E_DISCONNECTED: csid cannot be reached. CSI_E_DEADLINE: no connection within timeout_usec.
///   CSI_E_INTERNAL: no thread could be started.
///
/// Threads: any thread; blocks up to timeout_usec, up to a second more if it fails, and cannot be cancelled.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_client_open(
    options: *const csi_client_options,
    client: *mut *mut csi_client,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        entry("csi_client_open", error, || {
            let client = out("client", client)?;
            let options = extensible("options", options)?;
            let target = match optional_text("options.address", options.address)?.as_deref() {
                None => Target::from_env(),
                Some("system-bus") => Target::SystemBus,
                Some(path) if path.starts_with('/') => Target::Socket(path.into()),
                Some(_) => return Err(invalid("options.address is neither a path nor \"system-bus\"")),
            };
            let timeout = Duration::from_micros(match options.timeout_usec {
                0 => 10_000_000,
                usec => usec,
            });
            client.write(Arc::into_raw(Arc::new(csi_client::open(target, timeout)?)).cast_mut());
            Ok(())
        })
    }
}

/// Adds a reference to a client.
///
/// @param client  The client. May be NULL.
/// @return The same pointer; NULL for NULL. Each reference is given back with csi_client_unref.
///
/// Threads: any thread; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_client_ref(client: *mut csi_client) -> *mut csi_client {
    plain("csi_client_ref", ptr::null_mut(), || {
        if !client.is_null() {
            // SAFETY: as csi.h says of every argument: it is counted, and the caller has one count.
            unsafe { Arc::increment_strong_count(client.cast_const()) };
        }
        client
    })
}

/// Drops a reference to a client. The last one closes the connection. Running operations and event readers of
/// the client end here with CSI_E_DISCONNECTED. They go on in csid, and nothing is unmounted.
///
/// @param client  The client. NULL does nothing. In a forked child nothing happens.
///
/// Threads: any thread; the last reference may block for two seconds while cancellations are sent.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_client_unref(client: *mut csi_client) {
    plain("csi_client_unref", (), || {
        // SAFETY: as csi.h says of every argument.
        let here = unsafe { client.as_ref() }.is_some_and(|client| client.here().is_ok());
        // After a fork the thread is the parent's: nothing here can end it.
        if here {
            // SAFETY: it is counted, and the caller gives its count back.
            unsafe { Arc::decrement_strong_count(client.cast_const()) };
        }
    });
}

/// An answer of libcsi's thread to one that waits for it. std's channels leave something behind in the thread that waits.
pub struct Slot<T>(Mutex<Option<T>>, Condvar);

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self(Mutex::new(None), Condvar::new())
    }
}

impl<T> Slot<T> {
    pub fn put(&self, answer: T) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
        self.1.notify_one();
    }

    pub fn take(&self, timeout: Duration) -> Option<T> {
        let slot = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.1.wait_timeout_while(slot, timeout, |answer| answer.is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.take()
    }
}

/// Whether this is the process that made a handle.
pub fn same_process(process: u32) -> Result<()> {
    match process == process::id() {
        true => Ok(()),
        false => Err(csi_error::new(
            CSI_E_FORKED,
            "this handle is of the process before fork(); open another client",
        )),
    }
}

impl csi_client {
    fn open(target: Target, timeout: Duration) -> Result<Self> {
        let opened = Arc::new(Slot::default());
        let answer = opened.clone();
        let (stop, stopped) = oneshot::channel();
        let talking = Arc::new(RwLock::new(()));
        let last = talking.clone();
        let run = move || {
            let runtime = match Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(error) => return answer.put(Err(unavailable(&error))),
            };
            runtime.block_on(async {
                let session = match tokio::time::timeout(timeout, Session::open(target)).await {
                    Ok(Ok(session)) => Ok((Handle::current(), Arc::new(session))),
                    Ok(Err(error)) => Err(error.into()),
                    Err(_) => Err(csi_error::new(CSI_E_DEADLINE, "csid did not answer in time")),
                };
                let failed = session.is_err();
                answer.put(session);
                if failed {
                    return;
                }
                let _ = stopped.await;
                // The task of a call that was just cancelled has yet to run.
                tokio::time::sleep(Duration::from_millis(2)).await;
                let _ = tokio::time::timeout(LAST_WORDS, last.write()).await;
            });
            // Dropping the runtime would wait as long as a look-up of a bus's host name takes. A longer look-up keeps its thread.
            runtime.shutdown_timeout(LAST_WORDS);
        };
        let thread = without_signals(|| std::thread::Builder::new().name("libcsi".to_owned()).spawn(run));
        let thread = thread.map_err(|error| unavailable(&error))?;
        // The thread itself is never late.
        let (runtime, session) = match opened.take(timeout.saturating_add(LAST_WORDS * 10)) {
            Some(Ok(opened)) => opened,
            Some(Err(error)) => {
                // The program may unload libcsi once it has the error.
                let _ = thread.join();
                return Err(error);
            }
            None => return Err(csi_error::new(CSI_E_INTERNAL, "libcsi's thread died")),
        };
        Ok(Self {
            process: process::id(),
            runtime,
            session,
            talking,
            operations: (RandomState::new().build_hasher().finish(), AtomicU64::new(0)),
            thread: Mutex::new(Some((stop, thread))),
        })
    }

    /// Whether this is still the process that opened it.
    pub fn here(&self) -> Result<()> {
        same_process(self.process)
    }

    /// A name for an operation that no other has.
    pub fn operation_id(&self) -> String {
        let (random, count) = &self.operations;
        format!("libcsi-{random:016x}-{}", count.fetch_add(1, Ordering::Relaxed))
    }
}

impl Drop for csi_client {
    fn drop(&mut self) {
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((stop, thread)) = thread {
            let _ = stop.send(());
            let _ = thread.join();
        }
    }
}

fn unavailable(error: &io::Error) -> csi_error {
    csi_error::new(CSI_E_INTERNAL, format!("libcsi's thread cannot be started: {error}"))
}

/// A thread has the mask of the one that makes it: the program's signals are not for libcsi's.
fn without_signals<T>(spawn: impl FnOnce() -> T) -> T {
    // SAFETY: a signal set is plain data, and both are ours.
    let mut before: libc::sigset_t = unsafe { mem::zeroed() };
    // SAFETY: as above.
    let mut all: libc::sigset_t = unsafe { mem::zeroed() };
    // SAFETY: both sets are ours; with these arguments neither call fails.
    unsafe {
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
    }
    let spawned = spawn();
    // SAFETY: `before` is what the call above wrote.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut()) };
    spawned
}
