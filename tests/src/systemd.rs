//! A systemd on a world's own bus: units that the test starts and ends, and a count of what PID 1 is asked.
//!
//! As the real one it sends signals only to a bus on which a subscriber is, loads each unit that it is asked about, and unloads the
//! idle ones at once. After a re-execution it knows no subscriber, and nobody heard what changed meanwhile.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use futures_util::StreamExt;
use zbus::message::Type;
use zbus::{Connection, Message, MessageStream, ObjectPath, OwnedObjectPath, Variant};

use crate::dbus::Bus;
use crate::raw;

const NAME: &str = "org.freedesktop.systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";
const MANAGER_PATH: &str = "/org/freedesktop/systemd1";

type Listed = (String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);

#[derive(Default)]
struct Units {
    running: BTreeSet<String>,
    /// Units that end as soon as they were asked about.
    brief: BTreeSet<String>,
    subscribers: BTreeSet<String>,
    calls: BTreeMap<String, usize>,
    /// Names of units in those calls.
    names: usize,
}

pub struct Systemd {
    units: Arc<Mutex<Units>>,
    connection: Connection,
    task: tokio::task::JoinHandle<()>,
}

impl Systemd {
    pub async fn start(bus: &Bus) -> Self {
        Systemd::with(bus, Arc::default()).await
    }

    async fn with(bus: &Bus, units: Arc<Mutex<Units>>) -> Self {
        let connection = bus.connect(raw::ROOT).await;
        let mut messages = MessageStream::from(&connection);
        connection.request_name(NAME).await.expect("systemd's name");
        let task = {
            let (units, connection) = (units.clone(), connection.clone());
            tokio::spawn(async move {
                while let Some(Ok(message)) = messages.next().await {
                    if message.message_type() == Type::MethodCall {
                        answer(&units, &connection, &message).await;
                    }
                }
            })
        };
        Systemd { units, connection, task }
    }

    fn lock(&self) -> MutexGuard<'_, Units> {
        self.units.lock().expect("the units")
    }

    /// Takes another connection to `bus`, as systemd does when it is executed again or when the bus was restarted; `meanwhile`
    /// changes units that nobody hears of.
    pub async fn reconnect(mut self, bus: &Bus, meanwhile: impl FnOnce(&Self)) -> Self {
        let _ = self.connection.release_name(NAME).await;
        self.task.abort();
        self.lock().subscribers.clear();
        meanwhile(&self);
        let units = self.units.clone();
        let next = Systemd::with(bus, units).await;
        self.connection = next.connection.clone();
        drop(self);
        next
    }

    /// Starts or ends a unit, without a signal.
    pub fn set(&self, unit: &str, runs: bool) {
        let mut units = self.lock();
        match runs {
            true => units.running.insert(unit.to_owned()),
            false => units.running.remove(unit),
        };
    }

    /// Starts or ends a unit.
    pub async fn change(&self, unit: &str, runs: bool) {
        self.set(unit, runs);
        changed(&self.units, &self.connection, unit).await;
    }

    /// Lets a unit end right after the next question about it, as one does that ends during a claim.
    pub fn ends_once_asked(&self, unit: &str) {
        self.lock().brief.insert(unit.to_owned());
    }

    /// Says that it has read its definitions again.
    pub async fn reloaded(&self) {
        for active in [true, false] {
            signal(&self.units, &self.connection, MANAGER_PATH, MANAGER, "Reloading", &(active,)).await;
        }
    }

    /// Waits until somebody has subscribed.
    pub async fn has_subscriber(&self) {
        crate::world::eventually("csid has subscribed", async || !self.lock().subscribers.is_empty()).await;
    }

    /// How often it was asked for anything since the last [`Systemd::count_anew`], and about how many units.
    pub fn asked(&self) -> (usize, usize) {
        let units = self.lock();
        (units.calls.values().sum(), units.names)
    }

    pub fn count_anew(&self) {
        let mut units = self.lock();
        units.calls.clear();
        units.names = 0;
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The object of a unit.
fn path(unit: &str) -> String {
    let letter = |letter: char| match letter {
        'a'..='z' | 'A'..='Z' | '0'..='9' => letter.to_string(),
        other => format!("_{:02x}", u32::from(other)),
    };
    format!("{MANAGER_PATH}/unit/{}", unit.chars().map(letter).collect::<String>())
}

fn object(path: String) -> OwnedObjectPath {
    path.try_into().expect("a path")
}

async fn signal<B>(
    units: &Mutex<Units>,
    connection: &Connection,
    path: &str,
    interface: &str,
    member: &str,
    body: &B,
) where
    B: serde::Serialize + zbus::DynamicType,
{
    if units.lock().expect("the units").subscribers.is_empty() {
        return;
    }
    connection.emit_signal(None::<&str>, path, interface, member, body).await.expect("a signal");
}

async fn changed(units: &Mutex<Units>, connection: &Connection, unit: &str) {
    let runs = units.lock().expect("the units").running.contains(unit);
    let none = ObjectPath::try_from("/").expect("a path");
    let changed: HashMap<&str, Variant<'_>> = HashMap::from([
        ("ActiveState", Variant::from(if runs { "active" } else { "inactive" })),
        ("Job", Variant::from((0_u32, none))),
    ]);
    let body = ("org.freedesktop.systemd1.Unit", changed, Vec::<String>::new());
    signal(units, connection, &path(unit), raw::PROPERTIES, "PropertiesChanged", &body).await;
    if !runs {
        removed(units, connection, unit).await;
    }
}

async fn removed(units: &Mutex<Units>, connection: &Connection, unit: &str) {
    let body = (unit, object(path(unit)));
    signal(units, connection, MANAGER_PATH, MANAGER, "UnitRemoved", &body).await;
}

async fn answer(units: &Mutex<Units>, connection: &Connection, call: &Message) {
    let header = call.header();
    let member = header.member().map(|member| member.to_string()).unwrap_or_default();
    let sender = header.sender().map(|sender| sender.to_string()).unwrap_or_default();
    *units.lock().expect("the units").calls.entry(member.clone()).or_default() += 1;
    let answered = match member.as_str() {
        "Subscribe" => {
            units.lock().expect("the units").subscribers.insert(sender);
            connection.reply(&header, &()).await
        }
        "ListUnitsByNames" => {
            let (names,): (Vec<String>,) = call.body().deserialize().expect("names");
            let (rows, idle, ended) = list(&mut units.lock().expect("the units"), &names);
            let answered = connection.reply(&header, &(rows,)).await;
            for unit in idle {
                let body = (unit.as_str(), object(path(&unit)));
                signal(units, connection, MANAGER_PATH, MANAGER, "UnitNew", &body).await;
                removed(units, connection, &unit).await;
            }
            for unit in ended {
                changed(units, connection, &unit).await;
            }
            answered
        }
        "Get" => connection.reply(&header, &Variant::from("running")).await,
        _ => connection.reply_error(&header, "org.freedesktop.systemd1.NoSuchUnit", &"there is none").await,
    };
    answered.expect("systemd's answer");
}

/// The rows of these units; those of them that do not run; and those that end now.
fn list(units: &mut Units, names: &[String]) -> (Vec<Listed>, Vec<String>, Vec<String>) {
    units.names += names.len();
    let none = || object("/".to_owned());
    let row = |name: &String| {
        let (load, active) = match units.running.contains(name) {
            true => ("loaded", "active"),
            false => ("not-found", "inactive"),
        };
        let text = |text: &str| text.to_owned();
        let (active, sub, follows) = (text(active), text(""), text(""));
        let own = object(path(name));
        (name.clone(), text(""), text(load), active, sub, follows, own, 0, text(""), none())
    };
    let rows = names.iter().map(row).collect();
    let idle = names.iter().filter(|name| !units.running.contains(*name)).cloned().collect();
    let ended: Vec<String> = names.iter().filter(|name| units.brief.remove(*name)).cloned().collect();
    for unit in &ended {
        units.running.remove(unit);
    }
    (rows, idle, ended)
}
