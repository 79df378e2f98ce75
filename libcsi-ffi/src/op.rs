//! `csi_op`: one call of csid's under way, with a descriptor that is readable when it has ended.

use std::ffi::{CString, c_char};
use std::future::Future;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};
use std::{io, process, ptr};

use csid_client::{CallOptions, Client, Error, Kind, Session};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use serde::Serialize;
use tokio::runtime::Handle;
use tokio::sync::{Notify, RwLock};

use crate::arguments::{Call, csi_call};
use crate::border::{Result, entry, invalid, object, out, plain};
use crate::client::{csi_client, same_process};
use crate::error::{CSI_E_INTERNAL, CSI_E_PENDING, csi_code, csi_error};
use crate::row::{csi_row, cstring};

/// The interval at which a cancellation is sent again, for the call itself may not have reached csid yet.
const AGAIN: Duration = Duration::from_millis(200);
/// The time after which it is no longer sent.
const UNTIL: Duration = Duration::from_secs(30);
/// The time for which csid may not know an operation whose call it has read.
const UNKNOWN: Duration = Duration::from_secs(5);

/// The result of an operation: rows, or a descriptor until the caller takes it.
#[derive(Default)]
pub struct Answer {
    rows: Vec<csi_row>,
    fd: Mutex<Option<OwnedFd>>,
}

impl From<Vec<csi_row>> for Answer {
    fn from(rows: Vec<csi_row>) -> Self {
        Self { rows, ..Self::default() }
    }
}

/// An operation: a running call, and later its result. Counted: csi_op_ref, csi_op_unref. Any thread may use it
/// at any time. Dropping the last reference does not end the operation in csid.
pub struct csi_op {
    process: u32,
    id: CString,
    ended: OwnedFd,
    end: OnceLock<std::result::Result<Answer, csi_error>>,
    cancelled: AtomicBool,
    cancel: Notify,
}

impl csi_op {
    /// The first end counts.
    fn end(&self, end: std::result::Result<Answer, csi_error>) {
        if self.end.set(end).is_ok() {
            signal(&self.ended);
        }
    }
}

/// A descriptor that is readable from `signal` to `unsignal`.
pub fn descriptor() -> Result<OwnedFd> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|error| {
        csi_error::new(CSI_E_INTERNAL, format!("no descriptor for it: {}", io::Error::from(error)))
    })
}

/// Neither can fail: the count is far from its end.
pub fn signal(fd: &OwnedFd) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

pub fn unsignal(fd: &OwnedFd) {
    let _ = rustix::io::read(fd, &mut [0; 8]);
}

/// Start what `prepare` has read of C's arguments. What it gives asks csid once, and again if csid went away meanwhile.
///
/// # Safety
/// As csi.h says of every argument.
pub unsafe fn start<A, F>(
    name: &'static str,
    (client, call): (*mut csi_client, *const csi_call),
    (op, error): (*mut *mut csi_op, *mut *mut csi_error),
    prepare: impl FnOnce() -> Result<A>,
) -> csi_code
where
    A: Fn(Client, CallOptions) -> F + Send + Sync + 'static,
    F: Future<Output = csid_client::Result<Answer>> + Send + 'static,
{
    // SAFETY: the caller's promise.
    unsafe {
        entry(name, error, || {
            let op = out("op", op)?;
            let client = object("client", client)?;
            client.here()?;
            let Call { deadline, mut common } = Call::read(call)?;
            let ask = prepare()?;
            let id = common.operation_id.get_or_insert_with(|| client.operation_id());
            let made = Arc::new(csi_op {
                process: process::id(),
                id: cstring(id.as_str()),
                ended: descriptor()?,
                end: OnceLock::new(),
                cancelled: AtomicBool::new(false),
                cancel: Notify::new(),
            });
            let ending = Ending(made.clone());
            let talking = client.talking.clone();
            let driven = drive(client.session.clone(), talking, ending, deadline, common, ask);
            begin(&client.runtime, Box::pin(driven));
            op.write(Arc::into_raw(made).cast_mut());
            Ok(())
        })
    }
}

/// The call is sent from here, as far as that waits for nothing: the client's thread would have to wake up for it first.
fn begin(runtime: &Handle, mut driven: Pin<Box<impl Future<Output = ()> + Send + 'static>>) {
    let _context = runtime.enter();
    // This poll wakes nothing; the thread polls again after it.
    if driven.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
        runtime.spawn(driven);
    }
}

/// However the task ends, its operation does too.
struct Ending(Arc<csi_op>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.end(Err(match std::thread::panicking() {
            true => csi_error::new(CSI_E_INTERNAL, "libcsi panicked; this is a fault of its"),
            false => csi_error::closed(),
        }));
    }
}

async fn drive<A, F>(
    session: Arc<Session>,
    talking: Arc<RwLock<()>>,
    ending: Ending,
    deadline: Option<Instant>,
    common: CallOptions,
    ask: A,
) where
    A: Fn(Client, CallOptions) -> F,
    F: Future<Output = csid_client::Result<Answer>>,
{
    let op = &ending.0;
    let withdrawn = Arc::<AtomicBool>::default();
    let mut asking = pin!(session.ask(deadline, |client, deadline_usec| {
        let asked = ask(client.unless(withdrawn.clone()), CallOptions { deadline_usec, ..common.clone() });
        async {
            // A cancelled call is not repeated.
            if op.cancelled.load(Ordering::Relaxed) { Ok(Answer::default()) } else { asked.await }
        }
    }));
    tokio::select! {
        // A call that was cancelled before it began does not begin.
        biased;
        () = op.cancel.notified() => withdrawn.store(true, Ordering::Relaxed),
        answer = &mut asking => match answer {
            // csid may get the call yet, and work on it when nobody waits any more.
            Err(error @ Error::NoAnswer { .. }) => {
                let _talking = talking.read().await;
                op.end(Err(error.into()));
                let _ = tokio::time::timeout(UNTIL, cancel(&session, op)).await;
                return;
            }
            answer => return op.end(answer.map_err(csi_error::from)),
        },
    }
    // Closing the client waits for this.
    let _talking = talking.read().await;
    op.end(Err(csi_error::cancelled()));
    let telling = async {
        loop {
            cancel(&session, op).await;
            tokio::time::sleep(AGAIN).await;
        }
    };
    let _ = tokio::time::timeout(UNTIL, async {
        tokio::select! {
            () = telling => {}
            _ = asking => {}
        }
    })
    .await;
}

/// Asks csid to end an operation, and returns when csid has begun that, or has not known the operation for some seconds. A call may wait for
/// the volume's record before csid knows its operation.
async fn cancel(session: &Session, op: &csi_op) {
    let id = op.id.to_string_lossy();
    let mut unknown_since = None;
    loop {
        if let Ok(client) = session.client().await {
            match client.cancel_operation(&id).await {
                Err(error) if error.lost() => session.forget(&client).await,
                Err(Error::Csid(error)) if error.kind == Kind::NotFound => {
                    if unknown_since.get_or_insert_with(Instant::now).elapsed() > UNKNOWN {
                        return;
                    }
                }
                _ => return,
            }
        }
        tokio::time::sleep(AGAIN).await;
    }
}

/// Makes the answer of a call that returns nothing.
pub fn nothing((): ()) -> Answer {
    Answer::default()
}

pub fn one<T: Serialize>(answer: T) -> Answer {
    vec![csi_row::of(&answer)].into()
}

pub fn many<T: Serialize>(answers: Vec<T>) -> Answer {
    answers.iter().map(csi_row::of).collect::<Vec<_>>().into()
}

pub fn handed_out(fd: OwnedFd) -> Answer {
    Answer { fd: Mutex::new(Some(fd)), ..Answer::default() }
}

/// Returns a descriptor for poll(), readable from the end of the operation on.
///
/// @param op  The operation. May be NULL.
/// @return The descriptor, which belongs to the operation: do not read, write or close it, and dup() it to keep
///   it longer. -1 for NULL.
///
/// Threads: any thread; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_op_fd(op: *const csi_op) -> i32 {
    // SAFETY: as csi.h says of every argument.
    plain("csi_op_fd", -1, || unsafe { op.as_ref() }.map_or(-1, |op| op.ended.as_raw_fd()))
}

/// Returns the name of the operation in csid: csi_call.operation_id, or one that the library chose.
///
/// @param op  The operation. May be NULL.
/// @return A text that lives as long as the handle; NULL for NULL.
///
/// Threads: any thread; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_op_id(op: *const csi_op) -> *const c_char {
    // SAFETY: as csi.h says of every argument.
    plain("csi_op_id", ptr::null(), || unsafe { op.as_ref() }.map_or(ptr::null(), |op| op.id.as_ptr()))
}

/// Waits for the end of an operation and returns how it ended. It may be called again, and by several threads
/// at once.
///
/// @param op  The operation. Not NULL.
/// @param timeout_usec  How long to wait, in microseconds. 0: do not wait. Negative: no limit.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: the operation succeeded; csi_op_row has the result. CSI_E_PENDING: it is still running;
///   *error is not written. CSI_E_INVALID: op is NULL. CSI_E_FORKED: op belongs to the parent process. Any
///   other code: the operation failed; see the errors of the function that started it.
///
/// Threads: any thread; blocks up to timeout_usec. csi_op_cancel from another thread ends the wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_op_wait(
    op: *mut csi_op,
    timeout_usec: i64,
    error: *mut *mut csi_error,
) -> csi_code {
    let mut pending = false;
    // SAFETY: as csi.h says of every argument.
    let code = unsafe {
        entry("csi_op_wait", error, || {
            let op = object("op", op)?;
            same_process(op.process)?;
            wait(&op.ended, u64::try_from(timeout_usec).ok().map(Duration::from_micros))?;
            match op.end.get() {
                Some(Ok(_)) => Ok(()),
                Some(Err(error)) => Err(error.clone()),
                None => {
                    pending = true;
                    Ok(())
                }
            }
        })
    };
    if pending { CSI_E_PENDING } else { code }
}

/// `None`: for ever.
fn wait(fd: &OwnedFd, timeout: Option<Duration>) -> Result<()> {
    let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut [PollFd::new(fd, PollFlags::IN)], left.as_ref()) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => {
                return Err(invalid(format!("the operation's descriptor: {}", io::Error::from(error))));
            }
        }
    }
}

/// Cancels an operation. It ends here with CSI_E_CANCELLED, and csid is asked to end it too. csid rolls back a
/// mount, a claim or an attachment in progress, and goes on with anything else. One that was complete at that
/// moment stays. Does nothing after the end of the operation.
///
/// @param op  The operation. NULL does nothing. In a forked child nothing happens.
///
/// Threads: any thread; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_op_cancel(op: *mut csi_op) {
    plain("csi_op_cancel", (), || {
        // SAFETY: as csi.h says of every argument.
        if let Some(op) = unsafe { op.as_ref() }
            && same_process(op.process).is_ok()
        {
            op.cancelled.store(true, Ordering::Relaxed);
            op.cancel.notify_one();
        }
    });
}

/// Returns the number of rows in the result.
///
/// @param op  The operation. May be NULL.
/// @return 0 while the operation runs, if it failed, and for NULL.
///
/// Threads: any thread; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_op_rows(op: *const csi_op) -> usize {
    // SAFETY: as csi.h says of every argument.
    plain("csi_op_rows", 0, || unsafe { rows(op) }.len())
}

/// Returns a row of the result.
///
/// @param op  The operation. May be NULL.
/// @param index  Counted from 0.
/// @return A row that lives as long as the handle; NULL beyond the last row, and for NULL.
///
/// Threads: any thread; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_op_row(op: *const csi_op, index: usize) -> *const csi_row {
    // SAFETY: as csi.h says of every argument.
    plain("csi_op_row", ptr::null(), || unsafe { rows(op) }.get(index).map_or(ptr::null(), ptr::from_ref))
}

/// # Safety
/// As csi.h says of every argument.
unsafe fn rows<'a>(op: *const csi_op) -> &'a [csi_row] {
    // SAFETY: the caller's promise.
    unsafe { answer(op) }.map_or(&[], |answer| &answer.rows)
}

/// # Safety
/// As csi.h says of every argument.
unsafe fn answer<'a>(op: *const csi_op) -> Option<&'a Answer> {
    // SAFETY: the caller's promise.
    unsafe { op.as_ref() }.and_then(|op| op.end.get()?.as_ref().ok())
}

/// Returns the descriptor in the result of csi_open_mount and gives it to the caller, who closes it. It is
/// close-on-exec. If it is never taken, the last csi_op_unref closes it.
///
/// @param op  The operation. May be NULL.
/// @return The descriptor; -1 if there is none: the operation runs, failed, returns none, or the descriptor was
///   taken before.
///
/// Threads: any thread; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_op_take_fd(op: *mut csi_op) -> i32 {
    plain("csi_op_take_fd", -1, || {
        // SAFETY: as csi.h says of every argument.
        let (op, answer) = unsafe { (op.as_ref(), answer(op)) };
        // A forked child leaves the parent's handles alone.
        let answer = answer.filter(|_| op.is_some_and(|op| same_process(op.process).is_ok()));
        let fd = answer.and_then(|answer| answer.fd.lock().unwrap_or_else(PoisonError::into_inner).take());
        fd.map_or(-1, IntoRawFd::into_raw_fd)
    })
}

/// Adds a reference to an operation.
///
/// @param op  The operation. May be NULL.
/// @return The same pointer; NULL for NULL. Each reference is given back with csi_op_unref.
///
/// Threads: any thread; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_op_ref(op: *mut csi_op) -> *mut csi_op {
    plain("csi_op_ref", ptr::null_mut(), || {
        if !op.is_null() {
            // SAFETY: as csi.h says of every argument: it is counted, and the caller has one count.
            unsafe { Arc::increment_strong_count(op.cast_const()) };
        }
        op
    })
}

/// Drops a reference to an operation. The last one frees the result. A running operation goes on in csid.
///
/// @param op  The operation. NULL does nothing.
///
/// Threads: any thread; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_op_unref(op: *mut csi_op) {
    plain("csi_op_unref", (), || {
        if !op.is_null() {
            // SAFETY: it is counted, and the caller gives its count back.
            unsafe { Arc::decrement_strong_count(op.cast_const()) };
        }
    });
}
