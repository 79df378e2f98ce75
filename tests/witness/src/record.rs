//! The log: one record a line, in the order of what happened on the wire. The rules are checked against these records and
//! nothing else, so a log is enough to judge a CO later and elsewhere.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A line of the log.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Record {
    /// Microseconds since 1970. The logs of several hosts are put in one order by it.
    pub time: u64,
    #[serde(flatten)]
    pub event: Event,
}

/// An event. Connections and calls have numbers that never repeat in a log.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// The CO connected and the witness connected to the plugin; the pids are the peers', 0 where they cannot be seen.
    Connected {
        connection: u64,
        /// The number of the plugin's socket, from 0.
        #[serde(default)]
        socket: usize,
        co: i32,
        plugin: i32,
    },
    /// The connection ended; whatever was in flight on it has no answer.
    Closed {
        connection: u64,
    },
    /// `request` is absent where the witness does not know the message.
    Called {
        call: u64,
        connection: u64,
        rpc: String,
        #[serde(default, skip_serializing_if = "Value::is_null")]
        request: Value,
    },
    /// `code` is the CO's answer, absent where it had none: it gave up, or a connection broke.
    Ended {
        call: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        code: Option<String>,
        #[serde(default, skip_serializing_if = "Value::is_null")]
        response: Value,
        /// The fault that the script applied to this call. `None`: none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fault: Option<String>,
    },
    Marked {
        mark: Mark,
    },
}

impl Event {
    /// Returns the event with other numbers of its connection and call.
    pub(crate) fn numbered(self, number: impl Fn(u64) -> u64) -> Event {
        match self {
            Event::Connected { connection, socket, co, plugin } => {
                Event::Connected { connection: number(connection), socket, co, plugin }
            }
            Event::Closed { connection } => Event::Closed { connection: number(connection) },
            Event::Called { call, connection, rpc, request } => {
                Event::Called { call: number(call), connection: number(connection), rpc, request }
            }
            Event::Ended { call, code, response, fault } => {
                Event::Ended { call: number(call), code, response, fault }
            }
            Event::Marked { mark } => Event::Marked { mark },
        }
    }
}

/// An event that the witness cannot see, and a caller adds.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mark {
    /// The node rebooted: nothing is staged or published any more; what is attached still is.
    Reboot,
    /// The CO has nothing left to do and wants no volume on this node: what is there now was forgotten.
    Rest,
    /// The CO has lost its record of an attachment, as a restore of an older backup does: it cannot know of it.
    Forgotten { volume: String, node: String },
}

/// The file of the records. A line is one write to a file opened for appending, so lines of several writers do not mix.
pub(crate) struct Log {
    file: Mutex<File>,
    connections: AtomicU64,
    calls: AtomicU64,
}

impl Log {
    /// A log is of one run: digests of two runs do not compare, and what happened between them nobody saw.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create_new(true).mode(0o600).open(path)?;
        Ok(Log { file: Mutex::new(file), connections: AtomicU64::new(0), calls: AtomicU64::new(0) })
    }

    pub(crate) fn connected(&self, socket: usize, co: i32, plugin: i32) -> u64 {
        let connection = self.connections.fetch_add(1, Ordering::Relaxed) + 1;
        self.write(Event::Connected { connection, socket, co, plugin });
        connection
    }

    pub(crate) fn called(&self, connection: u64, rpc: &str, request: Value) -> u64 {
        let call = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        self.write(Event::Called { call, connection, rpc: rpc.to_owned(), request });
        call
    }

    /// A call that cannot be written down is not forwarded: its task ends here.
    pub(crate) fn write(&self, event: Event) {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = append(&mut file, event) {
            // A call is also written from its drop.
            assert!(std::thread::panicking(), "cannot write the log: {error}");
        }
    }
}

/// Tell a log, its witness running or not, what cannot be seen on the wire.
pub fn mark(log: &Path, mark: Mark) -> io::Result<()> {
    append(&mut OpenOptions::new().append(true).open(log)?, Event::Marked { mark })
}

/// Returns the time of a record that is made now, in microseconds.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

fn append(file: &mut File, event: Event) -> io::Result<()> {
    let mut line = serde_json::to_vec(&Record { time: now(), event })?;
    line.push(b'\n');
    file.write_all(&line)
}
