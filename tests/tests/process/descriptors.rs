//! Descriptors that callers send along: of a file whose server does not answer the close, and secrets.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::chown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::JoinHandle;

use csid_tests::ask::*;
use csid_tests::dbus::{Bus, Policy};
use csid_tests::hung::{self, Ask, FILE, Op};
use csid_tests::raw::{
    self, GROUP, MANAGER, MANAGER_PATH, MEMBER, NAME, ROOT, call, dict, group_csid, text, value,
};
use csid_tests::world::{SOON, World, world};
use rustix::mount::{UnmountFlags, unmount as unmount_fs};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::thread::UnshareFlags;
use zbus::{Message, Variant, fdo};

/// Of the file system whose server does not answer.
const SENT: &str = "sent";

/// An open file whose close hangs: its server answers everything but FLUSH. It is in the descriptor table of a thread alone, for
/// every process that the test starts would close it, too.
struct HungFile {
    /// The server's.
    socket: PathBuf,
    /// `None`: the thread is to end.
    work: Option<mpsc::Sender<Work>>,
    thread: Option<JoinHandle<()>>,
}

type Work = Box<dyn FnOnce(&File) + Send>;

impl HungFile {
    fn open(w: &mut World) -> Self {
        w.hang("p", "NodeStageVolume");
        w.plugin("p").honest();
        let at = w.path("hung");
        fs::create_dir(&at).unwrap();
        w.hung().mount(SENT, &at);
        let (work, works) = mpsc::channel::<Work>();
        let thread = std::thread::spawn(move || {
            // SAFETY: the thread was made for this; what it has open is what it opens from now on.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FILES) }.unwrap();
            // The copies would keep open what other tests close.
            let copies = fs::read_dir("/proc/thread-self/fd").unwrap().flatten();
            let copies: Vec<i32> =
                copies.filter_map(|copy| copy.file_name().to_str()?.parse().ok()).collect();
            for copy in copies.into_iter().filter(|copy| *copy > 2) {
                // SAFETY: nothing of this thread uses it.
                unsafe {
                    // The list's own is closed.
                    if rustix::io::fcntl_getfd(BorrowedFd::borrow_raw(copy)).is_ok() {
                        rustix::io::close(copy);
                    }
                }
            }
            let file = File::open(at.join(FILE)).unwrap();
            works.into_iter().for_each(|work| work(&file));
        });
        let socket = w.hung().socket().to_owned();
        let file = HungFile { socket, work: Some(work), thread: Some(thread) };
        // It is open.
        file.with(|_| ());
        w.hung().hold_of(SENT, &[Op::Flush]);
        file
    }

    /// Does something with the file, where it is open.
    fn with<T: Send + 'static>(&self, act: impl FnOnce(&File) -> T + Send + 'static) -> T {
        let (answer, answered) = mpsc::channel();
        let work = self.work.as_ref().expect("the thread runs");
        work.send(Box::new(move |file| drop(answer.send(act(file))))).unwrap();
        answered.recv().expect("it is done")
    }
}

/// The server answers everything again: a bus that hangs could not be ended.
impl Drop for HungFile {
    fn drop(&mut self) {
        let released = hung::ask(&self.socket, &Ask::Hold { name: None, ops: Vec::new() });
        self.work = None;
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            released.unwrap();
            ended.expect("it ran").unwrap();
        }
    }
}

/// Returns a call of Mount that says it has one descriptor.
fn mount_call() -> Message {
    let null = OwnedFd::from(File::open("/dev/null").unwrap());
    let options = HashMap::from([
        ("plugin", Variant::from("p")),
        ("external-id", Variant::from("v")),
        ("secrets", Variant::Fd(null.into())),
    ]);
    let call = Message::method_call(MANAGER_PATH, "Mount").interface(MANAGER).destination(NAME);
    call.build(&(NAMESPACE, "v", "member", options)).unwrap()
}

/// Returns a signal to one connection that says the same.
fn signal_to(name: &str) -> Message {
    let null = OwnedFd::from(File::open("/dev/null").unwrap());
    let signal = Message::signal(MANAGER_PATH, MANAGER, "Changed").destination(name);
    signal.build(&zbus::Fd::from(null)).unwrap()
}

fn send(stream: &UnixStream, message: &Message, fd: impl AsFd) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let bytes = message.data();
    let sent = sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL);
    assert_eq!(sent.unwrap(), bytes.len());
}

/// Reads until `wanted` has come.
fn read_until(stream: &mut UnixStream, wanted: &str) {
    let mut seen = Vec::new();
    while !seen.windows(wanted.len()).any(|bytes| bytes == wanted.as_bytes()) {
        let mut buffer = [0; 4096];
        let count = stream.read(&mut buffer).unwrap_or(0);
        assert_ne!(count, 0, "{wanted} does not come, but {:?}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&buffer[..count]);
    }
}

/// Connects a member to a bus.
fn member_on(bus: &Path) -> UnixStream {
    let mut stream = raw::hello(MEMBER, bus).unwrap();
    let dbus = "org.freedesktop.DBus";
    let hello = Message::method_call("/org/freedesktop/DBus", "Hello").interface(dbus).destination(dbus);
    stream.write_all(hello.build(&()).unwrap().data()).unwrap();
    read_until(&mut stream, "NameAcquired");
    stream
}

/// Registers volume `v`, whose mount a member may open.
async fn register(w: &World) {
    let root = raw::peer(ROOT, &w.socket()).await.unwrap();
    let capability = vec![HashMap::from([
        ("access-mode".to_owned(), text("single-node-multi-writer")),
        ("attachment-mode".to_owned(), text("file-system")),
    ])];
    let spec = dict(vec![
        ("plugin", text("p")),
        ("external-id", text("v")),
        ("capabilities", capability.into()),
        ("suid", Variant::from(true)),
        ("dev", Variant::from(true)),
    ]);
    let values = vec![text(NAMESPACE), text("v"), spec];
    call(&root, MANAGER_PATH, MANAGER, "RegisterVolume", values).await.expect("a volume");
}

/// Asserts that csid answers a member: calls, and with a descriptor of its own.
async fn answers(w: &World) {
    let member = raw::peer(MEMBER, &w.socket()).await.unwrap();
    let values = || vec![text(NAMESPACE), text("v"), text("member's"), value("a{sv}")];
    call(&member, MANAGER_PATH, MANAGER, "Mount", values()).await.expect("a mount");
    let tree = call(&member, MANAGER_PATH, MANAGER, "OpenMount", values()).await.expect("its tree");
    let tree: zbus::OwnedFd = tree.body().deserialize().expect("a descriptor");
    assert!(rustix::fs::fstat(&tree).unwrap().st_ino > 0);
    drop(tree);
    call(&member, MANAGER_PATH, MANAGER, "Unmount", values()).await.expect("an unmount");
}

/// Counts the threads of csid that wait for a FUSE server.
fn waiting(w: &World) -> usize {
    let threads = fs::read_dir(format!("/proc/{}/task", w.csid_pid())).unwrap();
    let waits = |thread: &fs::DirEntry| {
        let place = fs::read_to_string(thread.path().join("wchan")).unwrap_or_default();
        place.contains("fuse") || place.contains("request_wait")
    };
    threads.flatten().filter(waits).count()
}

#[test]
fn hung_descriptor_of_a_member_holds_up_nothing() {
    world(async |w| {
        group_csid(w);
        running(w).await;
        register(w).await;
        chown(w.socket(), None, Some(GROUP)).unwrap();
        let file = HungFile::open(w);
        let socket = w.socket();
        file.with(move |file| {
            let mut member = raw::hello(MEMBER, &socket).unwrap();
            send(&member, &mount_call(), file);
            read_until(&mut member, "org.csid1.Error.InvalidArgument");
        });
        w.hung().hangs(SENT).await;
        assert_eq!(waiting(w), 0, "csid closed it");
        answers(w).await;
        w.kill();
        let client = w.start().await;
        chown(w.socket(), None, Some(GROUP)).unwrap();
        answers(w).await;
        drop(file);
        unmount_fs(w.path("hung"), UnmountFlags::DETACH).unwrap();
        w.nothing_left(&client).await;
    });
}

/// The bus closes its own descriptor, so it hangs itself.
#[test]
fn hung_descriptor_over_the_bus_holds_up_nothing() {
    world(async |w| {
        group_csid(w);
        let bus = Bus::start(w, Policy::Shipped).await;
        running(w).await;
        register(w).await;
        let file = HungFile::open(w);
        for is_signal in [true, false] {
            chown(w.socket(), None, Some(GROUP)).unwrap();
            bus.has_csid().await;
            let root = bus.connect(ROOT).await;
            let dbus = fdo::DBusProxy::new(&root).await.unwrap();
            let name = dbus.get_name_owner(NAME.try_into().unwrap()).await.unwrap();
            w.hung().hold_of(SENT, &[Op::Flush]);
            let socket = bus.socket.clone();
            let _member = file.with(move |file| {
                let member = member_on(&socket);
                let message = if is_signal { signal_to(name.as_str()) } else { mount_call() };
                send(&member, &message, file);
                member.into_raw_fd()
            });
            // The bus' close, and that of who got it.
            w.hung().holds(2).await;
            assert_eq!(waiting(w), 0, "csid closed it, of a signal: {is_signal}");
            answers(w).await;
            w.kill();
            w.hung().hold_of(SENT, &[]);
            w.start().await;
        }
        drop(file);
    });
}

/// A connection that needs no descriptors gets none: the bus refuses the message.
#[test]
fn connections_without_descriptors_get_none() {
    world(async |w| {
        let bus = Bus::start(w, Policy::Everything).await;
        running(w).await;
        bus.has_csid().await;
        let root = bus.connect(ROOT).await;
        let dbus = fdo::DBusProxy::new(&root).await.unwrap();
        let own = dbus.get_name_owner(NAME.try_into().unwrap()).await.unwrap();
        let mut others = Vec::new();
        for name in dbus.list_names().await.unwrap() {
            let pid = dbus.get_connection_unix_process_id(name.inner().clone()).await;
            if pid.is_ok_and(|pid| pid == w.csid_pid())
                && name.as_str().starts_with(':')
                && name.as_str() != own.as_str()
            {
                others.push(name);
            }
        }
        assert!(!others.is_empty(), "csid asks the bus by a connection of its own");
        for name in others {
            let null = OwnedFd::from(File::open("/dev/null").unwrap());
            let fd = zbus::Fd::from(null);
            let sent = root.call_method(Some(name.as_str()), "/", Some("a.b"), "C", &fd);
            let sent = tokio::time::timeout(SOON, sent).await.expect("the bus refuses it");
            let error = sent.unwrap_err().to_string();
            assert!(error.contains("NotSupported"), "{name}: {error}");
        }
    });
}

#[test]
fn secrets_of_a_member_reach_the_plugin() {
    world(async |w| {
        group_csid(w);
        let bus = Bus::start(w, Policy::Shipped).await;
        let client = running(w).await;
        register(w).await;
        chown(w.socket(), None, Some(GROUP)).unwrap();
        bus.has_csid().await;
        let peer = raw::peer(MEMBER, &w.socket()).await.unwrap();
        for (member, consumer) in [(peer, "socket"), (bus.connect(MEMBER).await, "bus")] {
            let (reader, mut writer) = std::io::pipe().unwrap();
            writer.write_all(format!(r#"{{"of":"{consumer}"}}"#).as_bytes()).unwrap();
            drop(writer);
            let options = dict(vec![("secrets", Variant::Fd(OwnedFd::from(reader).into()))]);
            let values = vec![text(NAMESPACE), text("v"), text(consumer), options];
            call(&member, MANAGER_PATH, MANAGER, "Mount", values).await.expect("a mount");
            let last = w.plugin("p").volume_calls().pop().expect("a call");
            assert_eq!(last.call.secrets, [("of".to_owned(), consumer.to_owned())]);
        }
        for consumer in ["socket", "bus"] {
            unmount(&client, "v", consumer).await.unwrap();
        }
        w.nothing_left(&client).await;
    });
}
