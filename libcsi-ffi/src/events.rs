//! `csi_events`: csid's events in order, pulled. State: a queue of bounded length, and where it goes on.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::ffi::{CString, c_char};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{process, ptr};

use csid_client::{Client, Error, Event, Follower, News, Session};
use serde_json::{Map, Value, json};
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::border::{Result, entry, invalid, object, optional_text, out, plain};
use crate::client::{Slot, csi_client, same_process};
use crate::error::{CSI_E_DEADLINE, CSI_E_PENDING, csi_code, csi_error};
use crate::op::{descriptor, signal, unsignal};
use crate::row::{csi_row, cstring};

/// The number of events that wait here for a slow reader. All others wait in csid.
const QUEUE: usize = 256;
const PAUSE: Duration = Duration::from_millis(100);

/// A reader of csid's events, through csid's restarts. Counted: csi_events_ref, csi_events_unref. Any thread
/// may use it at any time.
pub struct csi_events {
    process: u32,
    queue: Arc<Queue>,
    task: AbortHandle,
}

/// One event, or a gap. Owned: its receiver frees it with csi_event_free. One thread at a time.
pub struct csi_event {
    gap: bool,
    cursor: CString,
    row: csi_row,
}

struct Queue {
    /// Readable while there is something.
    some: OwnedFd,
    state: Mutex<State>,
    room: Notify,
}

#[derive(Default)]
struct State {
    events: VecDeque<csi_event>,
    /// The error that ended the reader. `None`: it has not ended.
    failed: Option<csi_error>,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn push(&self, event: csi_event) {
        while self.state().events.len() >= QUEUE {
            self.room.notified().await;
        }
        self.state().events.push_back(event);
        signal(&self.some);
    }

    fn fail(&self, error: csi_error) {
        self.state().failed.get_or_insert(error);
        signal(&self.some);
    }

    fn pop(&self) -> Result<Option<csi_event>> {
        let mut state = self.state();
        let event = state.events.pop_front();
        if state.events.is_empty() && state.failed.is_none() {
            unsignal(&self.some);
        }
        self.room.notify_one();
        match (event, &state.failed) {
            (None, Some(error)) => Err(error.clone()),
            (event, _) => Ok(event),
        }
    }
}

/// The client is closed, and with it its events.
struct Ending(Arc<Queue>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.fail(csi_error::closed());
    }
}

/// The place of a reader: the journal, and the last event. None: the journal's present end.
#[derive(Clone)]
struct Cursor {
    journal: Option<String>,
    sequence: Option<u64>,
}

impl Cursor {
    fn read(text: Option<&str>) -> Result<Self> {
        let Some(text) = text else { return Ok(Self { journal: None, sequence: None }) };
        if text.is_empty() {
            return Ok(Self { journal: None, sequence: Some(0) });
        }
        let (journal, sequence) =
            text.rsplit_once(':').ok_or_else(|| invalid("cursor is none of csi_event_cursor's"))?;
        let sequence = sequence.parse().map_err(|_| invalid("cursor is none of csi_event_cursor's"))?;
        Ok(Self { journal: Some(journal.to_owned()), sequence: Some(sequence) })
    }

    fn of(follower: &Follower) -> Self {
        Self { journal: Some(follower.journal().to_owned()), sequence: Some(follower.cursor()) }
    }
}

/// Queues the events from a cursor on, until csid is away. The cursor has the place then.
async fn follow(
    client: &Client,
    queue: &Queue,
    cursor: &mut Cursor,
    opened: &mut Option<Arc<Slot<Result<()>>>>,
) -> std::result::Result<Infallible, Error> {
    let mut follower = match (&cursor.journal, cursor.sequence) {
        (Some(journal), Some(sequence)) => client.follow_journal(journal, sequence).await?,
        (_, since) => client.follow(since).await?,
    };
    *cursor = Cursor::of(&follower);
    if let Some(opened) = opened.take() {
        opened.put(Ok(()));
    }
    loop {
        let news = follower.next().await?;
        *cursor = Cursor::of(&follower);
        let row = match &news {
            News::Gap => csi_row::default(),
            News::Event(event) => row(event),
        };
        let place = cstring(format!("{}:{}", follower.journal(), follower.cursor()));
        queue.push(csi_event { gap: matches!(news, News::Gap), cursor: place, row }).await;
    }
}

fn row(event: &Event) -> csi_row {
    let details = event.details.iter();
    let details: Map<String, Value> =
        details.map(|(key, value)| (key.clone(), csid_client::json(value))).collect();
    csi_row::of(&json!({
        "sequence": event.sequence,
        "realtime-usec": event.realtime_usec,
        "type": event.kind,
        "subject": event.subject,
        "details": details,
    }))
}

/// The same, with the connection of now.
async fn read(
    session: &Session,
    queue: &Queue,
    cursor: &mut Cursor,
    opened: &mut Option<Arc<Slot<Result<()>>>>,
) -> std::result::Result<Infallible, Error> {
    let client = session.client().await?;
    let ended = follow(&client, queue, cursor, opened).await;
    session.forget(&client).await;
    ended
}

/// Opens a reader of csid's events in order.
///
/// @param client  The connection. Not NULL.
/// @param cursor  csi_event_cursor of the last event that was handled, by this process or an earlier one. NULL:
///   only events from now on. "": from the first event that csid still has.
/// @param timeout_usec  How long to wait for csid's answer, in microseconds. 0: 10 s.
/// @param events  Receives the reader, which the caller frees with csi_events_unref. Not NULL.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK, or an error. CSI_E_INVALID: cursor is not one of csi_event_cursor's, or an argument is NULL.
///   CSI_E_DEADLINE: csid did not answer within timeout_usec. CSI_E_DENIED: the caller may not read events.
///   CSI_E_DISCONNECTED: the client was closed. CSI_E_FORKED, CSI_E_INTERNAL.
///
/// Threads: any thread; blocks up to timeout_usec and cannot be cancelled.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_events_open(
    client: *mut csi_client,
    cursor: *const c_char,
    timeout_usec: u64,
    events: *mut *mut csi_events,
    error: *mut *mut csi_error,
) -> csi_code {
    // SAFETY: as csi.h says of every argument.
    unsafe {
        entry("csi_events_open", error, || {
            let events = out("events", events)?;
            let client = object("client", client)?;
            client.here()?;
            let mut cursor = Cursor::read(optional_text("cursor", cursor)?.as_deref())?;
            let timeout = Duration::from_micros(if timeout_usec == 0 { 10_000_000 } else { timeout_usec });
            let queue = Arc::new(Queue { some: descriptor()?, state: Mutex::default(), room: Notify::new() });
            let opened = Arc::new(Slot::default());
            let (ending, session, mut sender) =
                (Ending(queue.clone()), client.session.clone(), Some(opened.clone()));
            let task = client.runtime.spawn(async move {
                loop {
                    match read(&session, &ending.0, &mut cursor, &mut sender).await {
                        Ok(never) => match never {},
                        Err(lost) if lost.lost() => tokio::time::sleep(PAUSE).await,
                        Err(error) => {
                            let error = csi_error::from(error);
                            if let Some(sender) = sender.take() {
                                sender.put(Err(error.clone()));
                            }
                            return ending.0.fail(error);
                        }
                    }
                }
            });
            let task = task.abort_handle();
            let made = csi_events { process: process::id(), queue, task };
            let late = || csi_error::new(CSI_E_DEADLINE, "csid did not answer in time");
            opened.take(timeout).unwrap_or_else(|| Err(late()))?;
            events.write(Arc::into_raw(Arc::new(made)).cast_mut());
            Ok(())
        })
    }
}

/// Returns a descriptor for poll(), readable while csi_events_next has an event or an error to return.
///
/// @param events  The reader. May be NULL.
/// @return The descriptor, which belongs to the reader: do not read, write or close it, and dup() it to keep it
///   longer. -1 for NULL.
///
/// Threads: any thread; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_events_fd(events: *const csi_events) -> i32 {
    plain("csi_events_fd", -1, || {
        // SAFETY: as csi.h says of every argument.
        unsafe { events.as_ref() }.map_or(-1, |events| events.queue.some.as_raw_fd())
    })
}

/// Returns the next event.
///
/// @param events  The reader. Not NULL.
/// @param event  Receives the event, which the caller frees with csi_event_free. Not NULL. Written only with
///   CSI_OK.
/// @param error  Receives the error on failure, which the caller frees with csi_error_free. May be NULL.
/// @return CSI_OK: *event was written. CSI_E_PENDING: there is no event now; *error is not written. Any other
///   code ends the reader; open another one with the last cursor: CSI_E_DISCONNECTED if the client was closed,
///   CSI_E_DENIED if csid refuses the caller, CSI_E_INTERNAL. CSI_E_INVALID (NULL) and CSI_E_FORKED do not end
///   it.
///
/// Threads: any thread; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_events_next(
    events: *mut csi_events,
    event: *mut *mut csi_event,
    error: *mut *mut csi_error,
) -> csi_code {
    let mut pending = false;
    // SAFETY: as csi.h says of every argument.
    let code = unsafe {
        entry("csi_events_next", error, || {
            let event = out("event", event)?;
            let events = object("events", events)?;
            same_process(events.process)?;
            match events.queue.pop()? {
                Some(next) => event.write(Box::into_raw(Box::new(next))),
                None => pending = true,
            }
            Ok(())
        })
    };
    if pending { CSI_E_PENDING } else { code }
}

/// Adds a reference to an event reader.
///
/// @param events  The reader. May be NULL.
/// @return The same pointer; NULL for NULL. Each reference is given back with csi_events_unref.
///
/// Threads: any thread; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_events_ref(events: *mut csi_events) -> *mut csi_events {
    plain("csi_events_ref", ptr::null_mut(), || {
        if !events.is_null() {
            // SAFETY: as csi.h says of every argument: it is counted, and the caller has one count.
            unsafe { Arc::increment_strong_count(events.cast_const()) };
        }
        events
    })
}

/// Drops a reference to an event reader. The last one closes it.
///
/// @param events  The reader. NULL does nothing. In a forked child nothing happens.
///
/// Threads: any thread; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_events_unref(events: *mut csi_events) {
    plain("csi_events_unref", (), || {
        // SAFETY: as csi.h says of every argument.
        let here = unsafe { events.as_ref() }.is_some_and(|events| same_process(events.process).is_ok());
        // After a fork the task is the parent's.
        if here {
            // SAFETY: it is counted, and the caller gives its count back.
            unsafe { Arc::decrement_strong_count(events.cast_const()) };
        }
    });
}

impl Drop for csi_events {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Returns whether events were lost before this point, or csid has a new journal. List the objects again
/// (csi_list). A gap has an empty row.
///
/// @param event  The event. May be NULL.
/// @return false for NULL.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_event_gap(event: *const csi_event) -> bool {
    // SAFETY: as csi.h says of every argument.
    plain("csi_event_gap", false, || unsafe { event.as_ref() }.is_some_and(|event| event.gap))
}

/// Returns the cursor to continue with after this event was handled. It may be stored and given to
/// csi_events_open of a later process.
///
/// @param event  The event. May be NULL.
/// @return A text that lives as long as the event; NULL for NULL.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_event_cursor(event: *const csi_event) -> *const c_char {
    plain("csi_event_cursor", ptr::null(), || {
        // SAFETY: as csi.h says of every argument.
        unsafe { event.as_ref() }.map_or(ptr::null(), |event| event.cursor.as_ptr())
    })
}

/// Returns the content of an event: sequence, realtime-usec (microseconds since 1970), type, subject, and
/// details, a row of its own with success, error, consumer, tag, plugin and others as the type has them.
///
/// @param event  The event. May be NULL.
/// @return A row that lives as long as the event; NULL for NULL.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_event_row(event: *const csi_event) -> *const csi_row {
    plain("csi_event_row", ptr::null(), || {
        // SAFETY: as csi.h says of every argument.
        unsafe { event.as_ref() }.map_or(ptr::null(), |event| &raw const event.row)
    })
}

/// Frees an event and everything that was read from it.
///
/// @param event  The event. NULL does nothing.
///
/// Threads: any thread, one at a time; never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn csi_event_free(event: *mut csi_event) {
    plain("csi_event_free", (), || {
        if !event.is_null() {
            // SAFETY: csi_events_next gave it out, and the caller frees it once.
            drop(unsafe { Box::from_raw(event) });
        }
    });
}
