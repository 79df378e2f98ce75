//! A bus of a world's own, and a polkitd that says what the test wants.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::{Arc, Mutex};

use futures_util::StreamExt;
use zbus::{Connection, Message, MessageStream, OwnedVariant, fdo};

use crate::raw;
use crate::world::{World, child, eventually};

/// The policy of a bus.
#[derive(Clone, Copy, Debug)]
pub enum Policy {
    /// Everything, so that csid itself has to refuse.
    Everything,
    /// The policy of Debian's system bus, and the one in csid's package.
    Shipped,
}

const EVERYTHING: &str = r#"<policy context="default">
<allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/><allow own="*"/><allow user="*"/></policy>"#;

/// The limit of dbus' own system.conf.
const SYSTEM: &str = r#"<policy context="default"><allow user="*"/><deny own="*"/><deny send_type="method_call"/>
<allow send_type="signal"/><allow send_requested_reply="true" send_type="method_return"/>
<allow send_requested_reply="true" send_type="error"/><allow receive_type="method_call"/>
<allow receive_type="method_return"/><allow receive_type="error"/><allow receive_type="signal"/>
<allow send_destination="org.freedesktop.DBus" send_interface="org.freedesktop.DBus"/>
<allow send_destination="org.freedesktop.DBus" send_interface="org.freedesktop.DBus.Properties"/></policy>
<policy user="root"><allow own="*"/><allow send_type="method_call"/></policy>"#;

pub struct Bus {
    pub socket: PathBuf,
    daemon: Child,
}

impl Bus {
    /// Start one; csid will be on it.
    pub async fn start(w: &mut World, policy: Policy) -> Self {
        let socket = w.path("bus");
        let config = w.path("bus.conf");
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/dbus/org.csid1.conf");
        let rules = match policy {
            Policy::Everything => EVERYTHING.to_owned(),
            Policy::Shipped => format!("{SYSTEM}<include>{}</include>", shipped.display()),
        };
        let text = format!(
            r#"<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>system</type><auth>EXTERNAL</auth><listen>unix:path={}</listen>{rules}</busconfig>"#,
            socket.display()
        );
        fs::write(&config, text).expect("the bus' configuration");
        let log = fs::File::create(w.path("bus.log")).expect("a log");
        let mut command = child(Path::new("dbus-daemon"));
        command.args(["--nofork", "--nopidfile"]).arg(format!("--config-file={}", config.display()));
        let daemon = command.stderr(log).spawn().expect("dbus-daemon starts");
        eventually("the bus listens", async || raw::connect_as(raw::ROOT, &socket).is_ok()).await;
        w.environment.insert("DBUS_SYSTEM_BUS_ADDRESS".to_owned(), format!("unix:path={}", socket.display()));
        Bus { socket, daemon }
    }

    pub async fn connect(&self, user: raw::User) -> Connection {
        raw::on_bus(user, &self.socket).await.expect("a connection to the bus")
    }

    /// Everything that passes over the bus from now on: of calls and of all else, the bytes.
    pub async fn monitor(&self) -> Monitor {
        let connection = self.connect(raw::ROOT).await;
        let mut messages = MessageStream::from(&connection);
        let seen = Arc::<Mutex<[Vec<u8>; 2]>>::default();
        let into = seen.clone();
        let dbus = "org.freedesktop.DBus";
        let rules: (&[&str], u32) = (&[], 0);
        let monitoring = Some("org.freedesktop.DBus.Monitoring");
        connection
            .call_method(Some(dbus), "/org/freedesktop/DBus", monitoring, "BecomeMonitor", &rules)
            .await
            .expect("a monitor");
        let task = tokio::spawn(async move {
            while let Some(Ok(message)) = messages.next().await {
                let mut seen = into.lock().expect("what passed");
                let is_call = message.message_type() == zbus::message::Type::MethodCall;
                seen[usize::from(!is_call)].extend_from_slice(message.data());
            }
        });
        Monitor { seen, _connection: connection, task }
    }

    /// Until csid owns its name.
    pub async fn has_csid(&self) {
        let root = self.connect(raw::ROOT).await;
        let bus = fdo::DBusProxy::new(&root).await.expect("the bus itself");
        eventually("csid is on the bus", async || {
            let name = raw::NAME.try_into().expect("a name");
            bus.name_has_owner(name).await.unwrap_or(false)
        })
        .await;
    }
}

impl Drop for Bus {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

pub struct Monitor {
    seen: Arc<Mutex<[Vec<u8>; 2]>>,
    _connection: Connection,
    task: tokio::task::JoinHandle<()>,
}

impl Monitor {
    /// Returns the bytes of calls, and those of answers, errors and signals.
    pub fn seen(&self) -> [Vec<u8>; 2] {
        self.seen.lock().expect("what passed").clone()
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Yes,
    No,
    /// Yes to all actions but this one.
    But(&'static str),
    /// A person would have to be asked.
    Challenge,
    Error,
    /// An answer of another type.
    Malformed,
}

/// A question polkit was asked: the subject's kind, its name, the action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    pub kind: String,
    pub name: String,
    /// How many facts the subject has.
    pub keys: usize,
    pub action: String,
    pub flags: u32,
}

/// The fake; it ends with this value.
pub struct Polkit {
    verdict: Arc<Mutex<Verdict>>,
    asked: Arc<Mutex<Vec<Asked>>>,
    task: tokio::task::JoinHandle<()>,
}

type Answer = (bool, bool, HashMap<String, String>);

impl Polkit {
    pub async fn start(bus: &Bus, verdict: Verdict) -> Self {
        let verdict = Arc::new(Mutex::new(verdict));
        let asked = Arc::<Mutex<Vec<Asked>>>::default();
        let connection = bus.connect(raw::ROOT).await;
        let mut messages = MessageStream::from(&connection);
        connection.request_name("org.freedesktop.PolicyKit1").await.expect("polkit's name");
        let task = {
            let (verdict, asked) = (verdict.clone(), asked.clone());
            tokio::spawn(async move {
                while let Some(Ok(message)) = messages.next().await {
                    let header = message.header();
                    if header.member().is_none_or(|m| m.as_str() != "CheckAuthorization") {
                        continue;
                    }
                    let question = question(&message);
                    let action = question.action.clone();
                    asked.lock().expect("the questions").push(question);
                    let verdict = *verdict.lock().expect("the verdict");
                    let answer =
                        |yes: bool, challenge: bool| -> (Answer,) { ((yes, challenge, HashMap::new()),) };
                    let sent = match verdict {
                        Verdict::Yes => connection.reply(&header, &answer(true, false)).await,
                        Verdict::But(one) => connection.reply(&header, &answer(action != one, false)).await,
                        Verdict::No => connection.reply(&header, &answer(false, false)).await,
                        Verdict::Challenge => connection.reply(&header, &answer(false, true)).await,
                        Verdict::Malformed => connection.reply(&header, &(true, true)).await,
                        Verdict::Error => {
                            let name = "org.freedesktop.PolicyKit1.Error.Failed";
                            connection.reply_error(&header, name, &"yes, but no").await
                        }
                    };
                    sent.expect("polkit's answer");
                }
            })
        };
        Polkit { verdict, asked, task }
    }

    pub fn says(&self, verdict: Verdict) {
        *self.verdict.lock().expect("the verdict") = verdict;
    }

    /// The questions since the last look.
    pub fn asked(&self) -> Vec<Asked> {
        std::mem::take(&mut *self.asked.lock().expect("the questions"))
    }
}

impl Drop for Polkit {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn question(message: &Message) -> Asked {
    type Question = ((String, HashMap<String, OwnedVariant>), String, HashMap<String, String>, u32, String);
    let body = message.body();
    let ((kind, subject), action, _, flags, _): Question = body.deserialize().expect("a question to polkit");
    let name = subject.get("name").and_then(|v| v.downcast_ref::<&str>().ok()).unwrap_or_default();
    Asked { name: name.to_owned(), keys: subject.len(), kind, action, flags }
}
