//! A server with empty rooms, and clients of it.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tempfile::TempDir;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use zbus::connection::Builder;
use zbus::{Connection, Message, OwnedVariant};

use crate::bus::polkit::Timeouts;
use crate::bus::serve::{serve_bus_at, serve_peers};
use crate::bus::signals::Signals;
use crate::bus::{Limits, Rooms, State};
use crate::config::{Config, Directories};
use crate::error::Result;
use crate::host::Host;
use crate::plugin::Plugins;
use crate::store::Store;
use crate::volume::Volumes;

pub const MANAGER: &str = "org.csid1.Manager";

pub type Options = HashMap<&'static str, zbus::Variant<'static>>;

pub struct World {
    pub rooms: Rooms,
    pub state: watch::Sender<State>,
    pub config: watch::Sender<Arc<Config>>,
    pub directory: TempDir,
    _reload: JoinHandle<()>,
}

impl World {
    pub fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (store, loaded) = Store::open(&directory.path().join("journal"), directory.path(), None).unwrap();
        let (state, states) = watch::channel(State::Ready);
        let (config, configs) = watch::channel(Arc::new(Config::default()));
        let (reload, mut reloads) = mpsc::channel::<oneshot::Sender<Result<()>>>(1);
        let _reload = tokio::spawn(async move {
            while let Some(answer) = reloads.recv().await {
                let _ = answer.send(Ok(()));
            }
        });
        let (volumes, plugins) = rooms(&store, loaded, &directory, configs.clone());
        let rooms = Rooms {
            volumes,
            plugins,
            store,
            state: states,
            reload,
            config: configs,
            node: None,
            limits: Limits::default(),
        };
        World { rooms, state, config, directory, _reload }
    }

    /// Returns a path below the world's directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn group_file(&self) -> PathBuf {
        let file = self.directory.path().join("group");
        std::fs::write(&file, "csid:x:4242:\n").unwrap();
        file
    }

    /// Serves a private socket with mode 0666.
    pub fn listen(&self) -> (PathBuf, JoinHandle<std::io::Result<()>>) {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(self.directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let path = self.directory.path().join("csid.sock");
        let listener = UnixListener::bind(&path).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o666)).unwrap();
        let serving = tokio::spawn(serve_peers(
            listener,
            self.rooms.clone(),
            Signals::of(&self.rooms),
            self.group_file(),
        ));
        (path, serving)
    }
}

fn rooms(
    store: &Store,
    loaded: crate::store::Loaded,
    directory: &TempDir,
    config: watch::Receiver<Arc<Config>>,
) -> (Volumes, Plugins) {
    let directories = Directories {
        state: directory.path().join("state"),
        runtime: directory.path().join("run"),
        configuration: directory.path().join("etc"),
    };
    let rpc = config.borrow().deadlines.rpc;
    let plugins = Plugins::start(
        &directories,
        rpc,
        store.clone(),
        Vec::new(),
        loaded.plugins,
        loaded.node_ids,
        Default::default(),
    );
    let registry = Arc::new(store.clone());
    let volumes =
        Volumes::new(store.clone(), registry, plugins.clone(), Host::of_threads(), config, directories, None);
    (volumes, plugins)
}

/// The credentials of a caller.
#[derive(Clone, Copy)]
pub struct User {
    pub uid: u32,
    pub groups: &'static [u32],
}

pub const ROOT: User = User { uid: 0, groups: &[0] };
pub const NOBODY: User = User { uid: 65534, groups: &[] };
/// A member of group csid, by a supplementary group that is not in the user database. dbus-daemon needs the uid to be in it.
pub const MEMBER: User = User { uid: 1, groups: &[100, 4242] };

/// These tests speak as several uids, which only root can.
pub fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("SKIPPED: not root");
    }
    root
}

/// Returns a stream that `user` connected, as a thread of this process with these credentials.
fn stream(path: &Path, user: User) -> UnixStream {
    use rustix::process::{Gid, Uid};
    let path = path.to_owned();
    let connect = move || {
        if user.uid != rustix::process::geteuid().as_raw() {
            let groups: Vec<Gid> = user.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
            rustix::thread::set_thread_groups(&groups).unwrap();
            let (gid, uid) = (Gid::from_raw(65534), Uid::from_raw(user.uid));
            rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
            rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
        }
        UnixStream::connect(path).unwrap()
    };
    std::thread::spawn(connect).join().unwrap()
}

/// A peer of the private socket.
pub async fn connect(path: &Path) -> Connection {
    let stream = UnixStream::connect(path).unwrap();
    Builder::unix_stream(stream).p2p().build().await.unwrap()
}

pub async fn connect_as(path: &Path, user: User) -> Connection {
    Builder::unix_stream(stream(path, user)).user_id(user.uid).p2p().build().await.unwrap()
}

/// A dbus-daemon of the test's own, whose policy allows every user everything.
pub struct Bus {
    daemon: std::process::Child,
    socket: PathBuf,
    directory: TempDir,
}

const BUS: &str = r#"<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
 <type>system</type>
 <listen>unix:path=SOCKET</listen>
 <servicedir>SERVICES</servicedir>
 <servicehelper>/bin/false</servicehelper>
 <auth>EXTERNAL</auth>
 <limit name="max_replies_per_connection">50000</limit>
 <policy context="default">
  <allow user="*"/><allow own="*"/>
  <allow send_destination="*"/><allow receive_sender="*"/>
  <allow send_type="signal"/><allow send_requested_reply="true"/>
 </policy>
</busconfig>
"#;

impl Bus {
    /// Starts a bus. `None`: there is no dbus-daemon, as a printed line says. `activatable`: polkit is installed, but cannot be started.
    pub fn start(activatable: bool) -> Option<Self> {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let socket = directory.path().join("bus");
        let services = directory.path().join("services");
        std::fs::create_dir(&services).unwrap();
        if activatable {
            let service = "[D-BUS Service]\nName=org.freedesktop.PolicyKit1\nExec=/bin/false\nUser=root\n";
            std::fs::write(services.join("org.freedesktop.PolicyKit1.service"), service).unwrap();
        }
        let text =
            BUS.replace("SOCKET", socket.to_str().unwrap()).replace("SERVICES", services.to_str().unwrap());
        let config = directory.path().join("bus.conf");
        std::fs::write(&config, text).unwrap();
        match daemon(&directory, &socket) {
            Ok(daemon) => Some(Bus { daemon, socket, directory }),
            Err(error) => {
                eprintln!("SKIPPED: dbus-daemon: {error}");
                None
            }
        }
    }

    /// Ends it and starts another one at the same place.
    pub fn restart(&mut self) {
        self.daemon.kill().unwrap();
        self.daemon.wait().unwrap();
        std::fs::remove_file(&self.socket).unwrap();
        self.daemon = daemon(&self.directory, &self.socket).unwrap();
    }

    pub async fn has(&self, name: &str) -> bool {
        let connection = self.connect_as(ROOT).await;
        zbus::fdo::DBusProxy::new(&connection)
            .await
            .unwrap()
            .name_has_owner(name.try_into().unwrap())
            .await
            .unwrap()
    }

    pub fn address(&self) -> zbus::Address {
        zbus::Address::try_from(format!("unix:path={}", self.socket.display()).as_str()).unwrap()
    }

    pub async fn connect_as(&self, user: User) -> Connection {
        Builder::unix_stream(stream(&self.socket, user)).user_id(user.uid).build().await.unwrap()
    }

    /// Serves csid on it, and waits until it has its name.
    pub async fn serve(&self, world: &World, timeouts: Timeouts) -> JoinHandle<()> {
        let (rooms, signals) = (world.rooms.clone(), Signals::of(&world.rooms));
        let serving = serve_bus_at(Some(self.address()), rooms, signals, world.group_file(), timeouts);
        let serving = tokio::spawn(serving);
        let probe = self.connect_as(ROOT).await;
        for _ in 0..500 {
            let peer = call(&probe, "/org/csid1", "org.freedesktop.DBus.Peer", "Ping", &()).await;
            if peer.is_ok() {
                return serving;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("csid is not on the bus");
    }
}

#[allow(clippy::disallowed_types, reason = "the test's own bus")]
fn daemon(directory: &TempDir, socket: &Path) -> std::io::Result<std::process::Child> {
    let mut daemon = std::process::Command::new("dbus-daemon")
        .args(["--nofork", "--nopidfile", "--nosyslog"])
        .arg(format!("--config-file={}", directory.path().join("bus.conf").display()))
        .spawn()?;
    for _ in 0..500 {
        if UnixStream::connect(socket).is_ok() {
            return Ok(daemon);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    daemon.kill()?;
    panic!("dbus-daemon did not start");
}

impl Drop for Bus {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// Calls a member. The error is its name and message.
pub async fn call<B>(
    connection: &Connection,
    path: &str,
    interface: &str,
    member: &str,
    body: &B,
) -> std::result::Result<Message, (String, String)>
where
    B: serde::Serialize + zbus::DynamicType,
{
    let call = connection.call_method(Some("org.csid1"), path, Some(interface), member, body);
    let reply = tokio::time::timeout(Duration::from_secs(20), call).await.expect("an answer in 20 s");
    reply.map_err(named)
}

fn named(error: zbus::Error) -> (String, String) {
    match error {
        zbus::Error::MethodError(name, text, _) => (name.to_string(), text.unwrap_or_default()),
        zbus::Error::FDO(error) => {
            let name = zbus::DBusError::name(&*error).to_string();
            (name, zbus::DBusError::description(&*error).unwrap_or_default().to_owned())
        }
        other => (String::new(), other.to_string()),
    }
}

pub async fn manager<B>(
    connection: &Connection,
    member: &str,
    body: &B,
) -> std::result::Result<Message, (String, String)>
where
    B: serde::Serialize + zbus::DynamicType,
{
    call(connection, "/org/csid1", MANAGER, member, body).await
}

pub async fn properties(connection: &Connection) -> HashMap<String, OwnedVariant> {
    let reply = call(connection, "/org/csid1", "org.freedesktop.DBus.Properties", "GetAll", &(MANAGER,))
        .await
        .unwrap();
    reply.body().deserialize().unwrap()
}

/// Returns a peer's stream after the login, for bytes that no D-Bus library would send.
pub fn raw(path: &Path) -> UnixStream {
    raw_as(path, User { uid: rustix::process::geteuid().as_raw(), groups: &[] })
}

pub fn raw_as(path: &Path, user: User) -> UnixStream {
    let mut stream = stream(path, user);
    let uid = user.uid.to_string();
    let uid: String = uid.bytes().map(|byte| format!("{byte:02x}")).collect();
    stream.write_all(format!("\0AUTH EXTERNAL {uid}\r\n").as_bytes()).unwrap();
    let mut answer = [0; 64];
    let count = stream.read(&mut answer).unwrap();
    assert!(answer[..count].starts_with(b"OK "), "{:?}", String::from_utf8_lossy(&answer[..count]));
    stream.write_all(b"BEGIN\r\n").unwrap();
    stream
}
