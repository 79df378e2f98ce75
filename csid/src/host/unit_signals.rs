//! Receives systemd's signals about units. They come on a connection of their own, so that many signals delay no call of csid's.

use std::collections::HashMap;
use std::num::NonZeroUsize;

use futures_util::StreamExt;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use zbus::message::Type;
use zbus::{Connection, Message, MessageStream, OwnedObjectPath, OwnedVariant, Variant};

use crate::host::units::{CALL, MANAGER, MANAGER_PATH, Units, UnitsError};
use crate::system_bus;

const DBUS: &str = "org.freedesktop.DBus";
const DBUS_PATH: &str = "/org/freedesktop/DBus";
const PROPERTIES: &str = "org.freedesktop.DBus.Properties";
/// Signals that may come while the rules are added, when nothing reads them yet. Anybody on the bus may send some.
const QUEUE: usize = 64;
/// The match rules. They name units by the beginning of a path, since the bus limits the number of rules.
const RULES: [&str; 5] = [
    "type='signal',sender='org.freedesktop.DBus',interface='org.freedesktop.DBus',member='NameOwnerChanged',\
     arg0='org.freedesktop.systemd1'",
    "type='signal',sender='org.freedesktop.systemd1',interface='org.freedesktop.DBus.Properties',\
     member='PropertiesChanged',path_namespace='/org/freedesktop/systemd1/unit',arg0='org.freedesktop.systemd1.Unit'",
    "type='signal',sender='org.freedesktop.systemd1',interface='org.freedesktop.systemd1.Manager',\
     member='UnitRemoved'",
    "type='signal',sender='org.freedesktop.systemd1',interface='org.freedesktop.systemd1.Manager',\
     member='JobRemoved'",
    "type='signal',sender='org.freedesktop.systemd1',interface='org.freedesktop.systemd1.Manager',member='Reloading'",
];

#[derive(Debug, PartialEq, Eq)]
pub enum UnitSignal {
    /// The unit at this object path runs, or a job is about to start it (`Some(true)`), or neither (`Some(false)`). `None`: the
    /// signal does not say.
    Changed { path: String, runs: Option<bool> },
    /// A job of the unit of this name has ended.
    Job { unit: String },
    /// systemd has read its definitions again: a name may mean another unit.
    Reloaded,
}

/// A subscription to systemd's signals; it ends when it is dropped.
pub struct UnitSignals {
    /// The signals that the task has read; `None` at its end. The task reads each message at once, since a message may be large and
    /// come from any sender.
    signals: mpsc::UnboundedReceiver<UnitSignal>,
    task: JoinHandle<()>,
}

/// The messages of a subscription.
struct Messages {
    stream: MessageStream,
    /// systemd's own name on the bus: a signal of another sender is not systemd's.
    systemd: String,
}

impl Units {
    /// Subscribes to systemd's signals of all units. What changed before is not among them.
    pub async fn signals(&self) -> Result<UnitSignals, UnitsError> {
        let no_manager = |source| UnitsError::NoManager { source };
        let connection = system_bus::without_descriptors().await.map_err(no_manager)?;
        let connection = connection.method_timeout(CALL).build().await.map_err(no_manager)?;
        let mut messages = MessageStream::from(&connection);
        messages.set_max_queued(NonZeroUsize::MIN.saturating_add(QUEUE));
        for rule in RULES {
            ask_bus(&connection, "AddMatch", rule).await.map_err(no_manager)?;
        }
        let owner = ask_bus(&connection, "GetNameOwner", MANAGER).await.map_err(no_manager)?;
        let systemd: String = owner.body().deserialize().map_err(no_manager)?;
        let manager = Some("org.freedesktop.systemd1.Manager");
        let subscribed = connection.call_method(Some(MANAGER), MANAGER_PATH, manager, "Subscribe", &()).await;
        subscribed.map_err(no_manager)?;
        let mut messages = Messages { stream: messages, systemd };
        let (read, signals) = mpsc::unbounded_channel();
        let task = tokio::spawn(async move {
            while let Some(signal) = messages.next().await {
                if read.send(signal).is_err() {
                    return;
                }
            }
        });
        Ok(UnitSignals { signals, task })
    }
}

async fn ask_bus(connection: &Connection, call: &str, argument: &str) -> zbus::Result<Message> {
    connection.call_method(Some(DBUS), DBUS_PATH, Some(DBUS), call, &(argument,)).await
}

impl UnitSignals {
    /// Returns the next signal; `None`: the bus or this systemd is gone, and signals may have been lost.
    pub async fn next(&mut self) -> Option<UnitSignal> {
        self.signals.recv().await
    }
}

impl Drop for UnitSignals {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Messages {
    async fn next(&mut self) -> Option<UnitSignal> {
        loop {
            let message = self.stream.next().await?.ok()?;
            if message.message_type() != Type::Signal {
                continue;
            }
            let header = message.header();
            let sender = header.sender().map(|sender| sender.as_str()).unwrap_or_default();
            let (Some(interface), Some(member), Some(path)) =
                (header.interface(), header.member(), header.path())
            else {
                continue;
            };
            if sender == DBUS {
                let owner: Result<(String, String, String), _> = message.body().deserialize();
                match owner {
                    Ok((name, ..)) if member.as_str() == "NameOwnerChanged" && name == MANAGER => {
                        return None;
                    }
                    _ => continue,
                }
            }
            if sender != self.systemd {
                continue;
            }
            let signal = match (interface.as_str(), member.as_str()) {
                (PROPERTIES, "PropertiesChanged") => {
                    Some(UnitSignal::Changed { path: path.to_string(), runs: runs(&message) })
                }
                (_, "UnitRemoved") => removed(&message),
                (_, "JobRemoved") => ended(&message),
                (_, "Reloading") => reloaded(&message),
                _ => None,
            };
            if signal.is_some() {
                return signal;
            }
        }
    }
}

/// Whether a unit of these properties runs, or a job is about to start it.
fn runs(message: &Message) -> Option<bool> {
    type Body = (String, HashMap<String, OwnedVariant>, Vec<String>);
    let (_, mut changed, _): Body = message.body().deserialize().ok()?;
    let active = String::try_from(changed.remove("ActiveState")?).ok()?;
    let job = Variant::from(changed.remove("Job")?);
    let Variant::Structure(job) = job else { return None };
    let Some(Variant::U32(job)) = job.fields().first() else { return None };
    Some(!matches!(active.as_str(), "inactive" | "failed") || *job != 0)
}

fn removed(message: &Message) -> Option<UnitSignal> {
    let (_, path): (String, OwnedObjectPath) = message.body().deserialize().ok()?;
    Some(UnitSignal::Changed { path: path.to_string(), runs: Some(false) })
}

fn ended(message: &Message) -> Option<UnitSignal> {
    let (_, _, unit, _): (u32, OwnedObjectPath, String, String) = message.body().deserialize().ok()?;
    Some(UnitSignal::Job { unit })
}

/// Returns the event of a Reloading signal. systemd sends one at the beginning and one at the end of a reload.
fn reloaded(message: &Message) -> Option<UnitSignal> {
    let (begins,): (bool,) = message.body().deserialize().ok()?;
    (!begins).then_some(UnitSignal::Reloaded)
}
