//! The identity of callers: from the kernel on the private socket, from the bus daemon on the system bus, never from the message.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use zbus::message::Flags;
use zbus::{Connection, Message, OwnedVariant};

use super::socket::Credentials;
use crate::error::{Error, Kind, Result};

/// The group whose members may read, mount and unmount.
const GROUP: &str = "csid";

pub(super) struct Caller {
    /// The name of the caller's connection, which is never given to another one. On the bus it is the bus' id and the unique name, on
    /// the private socket csid's own. Claims can be bound to it.
    pub name: String,
    pub uid: u32,
    /// Whether the caller is a member of group csid.
    pub member: bool,
    pub way: Way,
}

pub(super) enum Way {
    Socket,
    /// The unique name on the bus, and whether polkit may ask the user to authenticate.
    Bus {
        sender: String,
        interactive: bool,
    },
}

impl Caller {
    pub fn on_socket(credentials: &Credentials, group: Option<u32>) -> Self {
        Caller {
            name: String::new(),
            uid: credentials.uid,
            member: member(credentials, group),
            way: Way::Socket,
        }
    }

    pub fn on_bus(credentials: &Credentials, group: Option<u32>, sender: String, interactive: bool) -> Self {
        Caller {
            name: String::new(),
            uid: credentials.uid,
            member: member(credentials, group),
            way: Way::Bus { sender, interactive },
        }
    }

    pub fn is_root(&self) -> bool {
        self.uid == 0
    }
}

fn member(credentials: &Credentials, group: Option<u32>) -> bool {
    group.is_some_and(|group| credentials.groups.contains(&group))
}

/// Returns the gid of group csid from the group file, where sysusers creates it. `None`: there is no such group, and no members.
pub(super) fn csid_group(file: &Path) -> Option<u32> {
    let text = std::fs::read_to_string(file).ok()?;
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(GROUP)).then_some(())?;
        // 0 would make every process of root's group a member.
        fields.nth(1)?.parse().ok().filter(|gid| *gid != 0)
    })
}

/// A source of callers' identities.
#[derive(Clone)]
pub(super) enum CallerSource {
    /// The peer of the private socket, whatever sender its messages name.
    Peer(Arc<Caller>),
    /// The sender in the header, which the bus daemon writes.
    OnBus(Arc<Senders>),
}

impl CallerSource {
    pub async fn caller(&self, message: &Message) -> Result<Arc<Caller>> {
        match self {
            CallerSource::Peer(caller) => Ok(caller.clone()),
            CallerSource::OnBus(senders) => senders.caller(message).await.map(Arc::new),
        }
    }
}

/// The credentials of unique names on one bus connection. A bus never gives a unique name twice, and a sender's credentials are those
/// from when it connected. So they are valid as long as the connection to the bus.
pub(super) struct Senders {
    asker: Connection,
    group_file: PathBuf,
    known: Mutex<HashMap<String, Credentials>>,
}

impl Senders {
    /// The most names that are kept. Above it all are dropped and requested again.
    const MOST: usize = 4096;

    pub fn new(asker: Connection, group_file: PathBuf) -> Self {
        Senders { asker, group_file, known: Mutex::default() }
    }

    async fn caller(&self, message: &Message) -> Result<Caller> {
        let header = message.header();
        let Some(sender) = header.sender().map(ToString::to_string) else {
            return Err(Error::new(Kind::NotAuthorized, "the call has no sender"));
        };
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).get(&sender).cloned();
        let credentials = match known {
            Some(credentials) => credentials,
            None => {
                let credentials = self.ask(&sender).await.map_err(|why| {
                    Error::new(
                        Kind::NotAuthorized,
                        format!("the bus did not return the credentials of {sender}: {why}"),
                    )
                })?;
                let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
                if known.len() >= Self::MOST {
                    known.clear();
                }
                known.insert(sender.clone(), credentials.clone());
                credentials
            }
        };
        let interactive = header.primary().flags().contains(Flags::ALLOW_INTERACTIVE_AUTH);
        // Root needs no group. Most calls are root's, so the file is not read for them.
        let group = if credentials.uid == 0 { None } else { csid_group(&self.group_file) };
        let name = format!("{}{sender}", self.asker.server_guid());
        Ok(Caller { name, ..Caller::on_bus(&credentials, group, sender, interactive) })
    }

    async fn ask(&self, sender: &str) -> Result<Credentials, String> {
        const DBUS: &str = "org.freedesktop.DBus";
        let call = self.asker.call_method(
            Some(DBUS),
            "/org/freedesktop/DBus",
            Some(DBUS),
            "GetConnectionCredentials",
            &sender,
        );
        let reply = call.await.map_err(|error| error.to_string())?;
        let body = reply.body();
        let mut map: HashMap<String, OwnedVariant> = body.deserialize().map_err(|error| error.to_string())?;
        // A value of another type is not a uid.
        let uid = map.remove("UnixUserID").and_then(|uid| u32::try_from(uid).ok()).ok_or("no uid")?;
        let groups = match map.remove("UnixGroupIDs") {
            Some(groups) => {
                Vec::<u32>::try_from(groups).map_err(|error| format!("its groups are malformed: {error}"))?
            }
            None => Vec::new(),
        };
        Ok(Credentials { uid, groups })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_is_found_by_its_whole_name() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (text, gid) in [
            ("root:x:0:\ncsid:x:990:alice,bob\n", Some(990)),
            ("xcsid:x:1:\ncsidx:x:2:\n", None),
            ("csid:x:0:\n", None),
            ("csid:x\n", None),
            ("csid:x:-1:\n", None),
        ] {
            std::fs::write(file.path(), text).unwrap();
            assert_eq!(csid_group(file.path()), gid, "{text:?}");
        }
        assert_eq!(csid_group(Path::new("/nonexistent")), None);
    }
}
