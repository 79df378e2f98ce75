//! D-Bus without csid-client: members read from introspection, any arguments, any caller.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use rustix::process::{Gid, Uid};
use zbus::connection::Builder;
use zbus::wire::Structure;
use zbus::{Array, Connection, DBusError, Dict, Message, Signature, Variant};

use crate::world::World;

pub const NAME: &str = "org.csid1";
pub const MANAGER_PATH: &str = "/org/csid1";
pub const MANAGER: &str = "org.csid1.Manager";
pub const PLUGIN: &str = "org.csid1.Plugin";
pub const PROPERTIES: &str = "org.freedesktop.DBus.Properties";
pub const ROOT: User = User { uid: 0, groups: &[] };
pub const NOBODY: User = User { uid: 65534, groups: &[] };
/// Group csid in a world, and a member of it: [`group_csid`] makes them.
pub const GROUP: u32 = 990;
pub const MEMBER: User = User { uid: 1001, groups: &[GROUP] };
pub const OTHER: User = User { uid: 1002, groups: &[] };

/// Whose connection it is.
#[derive(Clone, Copy, Debug)]
pub struct User {
    pub uid: u32,
    pub groups: &'static [u32],
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    pub interface: String,
    pub name: String,
    pub kind: MemberKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberKind {
    /// The in-arguments: name and signature.
    Method(Vec<(String, String)>),
    Property,
    Signal,
}

/// The members of an introspection text. It is csid's own and simple: tags and their attributes are all it takes.
pub fn members(xml: &str) -> Vec<Member> {
    let mut members: Vec<Member> = Vec::new();
    let mut interface = String::new();
    let mut rest = xml;
    while let Some(start) = rest.find('<') {
        rest = &rest[start..];
        if let Some(comment) = rest.strip_prefix("<!--") {
            rest = &comment[comment.find("-->").expect("a comment ends")..];
            continue;
        }
        let end = rest.find('>').expect("a tag ends");
        let tag = &rest[1..end];
        rest = &rest[end..];
        let attribute = |name: &str| {
            let at = tag.find(&format!(" {name}=\""))? + name.len() + 3;
            Some(tag[at..].split('"').next()?.to_owned())
        };
        let mut add = |kind| {
            let name = attribute("name").expect("a name");
            members.push(Member { interface: interface.clone(), name, kind });
        };
        match tag.split(' ').next() {
            Some("interface") => interface = attribute("name").expect("a name"),
            Some("method") => add(MemberKind::Method(Vec::new())),
            Some("signal") => add(MemberKind::Signal),
            Some("property") => add(MemberKind::Property),
            Some("arg") if attribute("direction").as_deref() == Some("in") => {
                let argument = (attribute("name").unwrap_or_default(), attribute("type").expect("a type"));
                if let Some(Member { kind: MemberKind::Method(arguments), .. }) = members.last_mut() {
                    arguments.push(argument);
                }
            }
            _ => {}
        }
    }
    members
}

/// Group csid and its member, for this world's processes.
pub fn group_csid(w: &World) {
    let (member, other) = (MEMBER.uid, OTHER.uid);
    let added = [
        (
            "passwd",
            format!("member:x:{member}:{member}::/:/bin/false\nother:x:{other}:{other}::/:/bin/false\n"),
        ),
        ("group", format!("csid:x:{GROUP}:member\nmember:x:{member}:\nother:x:{other}:\n")),
    ];
    for (name, lines) in added {
        let ours = |line: &str| ["csid:", "member:", "other:"].iter().any(|name| line.starts_with(name));
        let path = format!("/etc/{name}");
        let text = fs::read_to_string(&path).expect("the users");
        let kept: String = text.lines().filter(|l| !ours(l)).map(|l| format!("{l}\n")).collect();
        fs::write(w.path(name), kept + &lines).expect("other users");
        rustix::mount::mount_bind(w.path(name), path).expect("other users for this world");
    }
}

/// Runs `act` on a thread of another user.
fn as_user<T: Send>(user: User, act: impl FnOnce() -> std::io::Result<T> + Send) -> std::io::Result<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            if user.uid != 0 {
                let (uid, gid) = (Uid::from_raw(user.uid), Gid::from_raw(user.uid));
                let groups: Vec<_> = user.groups.iter().map(|group| Gid::from_raw(*group)).collect();
                rustix::thread::set_thread_groups(&groups)?;
                rustix::thread::set_thread_res_gid(gid, gid, gid)?;
                rustix::thread::set_thread_res_uid(uid, uid, uid)?;
            }
            act()
        });
        thread.join().unwrap_or_else(|_| Err(std::io::Error::other("the thread panicked")))
    })
}

/// A connection to a Unix socket, made by another user. The kernel gives the peer the credentials of the thread that
/// connected.
pub fn connect_as(user: User, socket: &Path) -> std::io::Result<UnixStream> {
    as_user(user, || UnixStream::connect(socket))
}

/// A Unix socket where another user listens, likewise.
pub fn listen_as(user: User, socket: &Path) -> std::io::Result<UnixListener> {
    let listener = UnixListener::bind(socket)?;
    as_user(user, || Ok(rustix::net::listen(&listener, 16)?))?;
    Ok(listener)
}

/// On csid's private socket, having said hello as D-Bus does; what follows is up to the caller.
pub fn hello(user: User, socket: &Path) -> std::io::Result<UnixStream> {
    let mut stream = connect_as(user, socket)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let uid: String = user.uid.to_string().bytes().map(|digit| format!("{digit:02x}")).collect();
    stream.write_all(format!("\0AUTH EXTERNAL {uid}\r\nNEGOTIATE_UNIX_FD\r\nBEGIN\r\n").as_bytes())?;
    let mut answer = String::new();
    while answer.matches("\r\n").count() < 2 {
        let mut buffer = [0; 256];
        let n = stream.read(&mut buffer)?;
        if n == 0 || !"OK ".starts_with(&answer[..answer.len().min(3)]) {
            return Err(std::io::Error::other(format!("the handshake: {answer}")));
        }
        answer.push_str(&String::from_utf8_lossy(&buffer[..n]));
    }
    Ok(stream)
}

/// Peer to peer on csid's private socket.
pub async fn peer(user: User, socket: &Path) -> zbus::Result<Connection> {
    let stream = connect_as(user, socket)?;
    Builder::unix_stream(stream).user_id(user.uid).p2p().build().await
}

/// On a bus.
pub async fn on_bus(user: User, socket: &Path) -> zbus::Result<Connection> {
    let stream = connect_as(user, socket)?;
    Builder::unix_stream(stream).user_id(user.uid).build().await
}

fn signature(text: &str) -> Signature {
    Signature::try_from(text).expect("a signature")
}

pub fn text(value: &str) -> Variant<'static> {
    Variant::from(value.to_owned())
}

pub fn dict(entries: Vec<(&str, Variant<'static>)>) -> Variant<'static> {
    let mut dict = Dict::new(&signature("s"), &signature("v"));
    for (key, value) in entries {
        dict.append(text(key), Variant::Variant(Box::new(value))).expect("an entry");
    }
    Variant::Dict(dict)
}

/// A harmless value of a type.
pub fn value(of: &str) -> Variant<'static> {
    match of {
        "s" => text("x"),
        "o" => Variant::from(zbus::ObjectPath::try_from("/").expect("a path").into_owned()),
        "b" => Variant::from(false),
        "q" => Variant::from(1u16),
        "u" => Variant::from(1u32),
        "i" => Variant::from(1i32),
        "x" => Variant::from(1i64),
        "t" => Variant::from(1u64),
        "as" => Variant::Array(Array::new(&signature("s"))),
        "aa{sv}" => Variant::Array(Array::new(&signature("a{sv}"))),
        "aa{ss}" => Variant::Array(Array::new(&signature("a{ss}"))),
        "a{ss}" => Variant::Dict(Dict::new(&signature("s"), &signature("s"))),
        "a{sv}" => dict(Vec::new()),
        other => panic!("a value of {other}"),
    }
}

/// Call, and get the reply or the error's name and text.
pub async fn call(
    connection: &Connection,
    path: &str,
    interface: &str,
    member: &str,
    arguments: Vec<Variant<'static>>,
) -> Result<Message, (String, String)> {
    let limit = Duration::from_secs(20);
    let call = async {
        if arguments.is_empty() {
            return connection.call_method(Some(NAME), path, Some(interface), member, &()).await;
        }
        let mut body = Structure::builder();
        for argument in arguments {
            body.push_value(argument);
        }
        let body = body.build()?;
        connection.call_method(Some(NAME), path, Some(interface), member, &body).await
    };
    match tokio::time::timeout(limit, call).await {
        Err(_) => Err(("no answer".to_owned(), format!("{interface}.{member}"))),
        Ok(Ok(reply)) => Ok(reply),
        Ok(Err(error)) => Err(name_of(&error)),
    }
}

/// An error's name on D-Bus; one of this side's own is a failed test.
pub fn name_of(error: &zbus::Error) -> (String, String) {
    match error {
        zbus::Error::MethodError(name, text, _) => (name.to_string(), text.clone().unwrap_or_default()),
        zbus::Error::FDO(error) => (error.name().to_string(), error.to_string()),
        other => (format!("local: {other}"), String::new()),
    }
}

/// Returns csid's own introspection data of `path`.
pub async fn introspect(connection: &Connection, path: &str) -> Result<String, (String, String)> {
    let reply =
        call(connection, path, "org.freedesktop.DBus.Introspectable", "Introspect", Vec::new()).await?;
    reply.body().deserialize::<String>().map_err(|error| name_of(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contract_is_read_whole() {
        let members = members(csi_proto::DBUS_INTERFACE_XML);
        let of = |interface: &str| members.iter().filter(|m| m.interface == interface).count();
        assert!(of(MANAGER) >= 35 && of(PLUGIN) >= 32, "{} {}", of(MANAGER), of(PLUGIN));
        let mount = members.iter().find(|m| m.name == "Mount").unwrap();
        let arguments = [("namespace", "s"), ("volume", "s"), ("consumer", "s"), ("options", "a{sv}")]
            .map(|(name, signature)| (name.to_owned(), signature.to_owned()))
            .to_vec();
        assert_eq!(mount.kind, MemberKind::Method(arguments));
    }
}
