//! The largest messages that a bus passes on, sent by a user who may do nothing. csid stays on the bus, and root on the
//! private socket notices them no more than if they were sent to another.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use csid_tests::ask::*;
use csid_tests::dbus::{Bus, Policy};
use csid_tests::kernel::resident_kib;
use csid_tests::raw::{self, MANAGER, NOBODY, ROOT};
use csid_tests::world::{count, eventually};
use zbus::Connection;
use zbus::message::Flags;

use crate::alone;
use crate::beside::{median, p99_of_reads};

/// The largest message that dbus-daemon lets through, less the rest of the header.
const LARGEST: usize = (32 << 20) - 1024;
/// The size with which the fault was measured.
const LARGE: usize = 20 << 20;
const SENDERS: usize = 4;
const ROUNDS: usize = 3;
/// Long against one message's way through the bus.
const DURING: Duration = Duration::from_secs(2);
const TRIES: usize = 3;
/// KiB: without a bound each of the messages is held, most of them several times.
const GROWTH: usize = 32 * 1024;
const SINK: &str = "org.example.Sink";

fn message(destination: &str, member: &str, length: usize) -> Vec<u8> {
    let path = format!("/{}", "x".repeat(length));
    let call = zbus::Message::method_call(path, member).interface(MANAGER).destination(destination);
    let call = match destination {
        SINK => call.with_flags(Flags::NO_REPLY_EXPECTED),
        _ => call,
    };
    call.build(&()).unwrap().data().bytes().to_vec()
}

/// Returns a connection to the bus on which the test writes bytes of its own.
fn logged_in(socket: &Path) -> std::io::Result<UnixStream> {
    let mut stream = raw::hello(NOBODY, socket)?;
    let hello = zbus::Message::method_call("/org/freedesktop/DBus", "Hello");
    let hello = hello.interface("org.freedesktop.DBus").destination("org.freedesktop.DBus");
    stream.write_all(hello.build(&()).unwrap().data())?;
    Ok(stream)
}

/// Reads until csid has answered, or the bus in its place.
fn answer(mut stream: UnixStream) -> String {
    let mut answers = String::new();
    while !answers.contains(".Error.") {
        let mut bytes = [0; 4096];
        let read = stream.read(&mut bytes).expect("an answer");
        assert!(read > 0, "the bus has hung up");
        answers.push_str(&String::from_utf8_lossy(&bytes[..read]));
    }
    answers
}

/// Senders that send until `end`. They read the answers and do not wait for them.
struct Senders {
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicUsize>,
    threads: Vec<JoinHandle<()>>,
}

impl Senders {
    /// Starts the senders. Returns when they have sent as many messages as there are senders.
    async fn begin(bus: PathBuf, destination: &'static str) -> Self {
        let (stop, sent) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
        let message = Arc::new(message(destination, "HasMount", LARGE));
        let threads = (0..SENDERS)
            .map(|_| {
                let (bus, message) = (bus.clone(), message.clone());
                let (stop, sent) = (stop.clone(), sent.clone());
                std::thread::spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        let _ = send(&bus, &message, &stop, &sent);
                    }
                })
            })
            .collect();
        let begun = sent.clone();
        eventually("the senders send", async || begun.load(Ordering::Relaxed) >= SENDERS).await;
        Senders { stop, sent, threads }
    }

    async fn end(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            tokio::task::spawn_blocking(move || thread.join()).await.unwrap().unwrap();
        }
        self.sent.load(Ordering::Relaxed)
    }
}

fn send(bus: &Path, message: &[u8], stop: &AtomicBool, sent: &AtomicUsize) -> std::io::Result<()> {
    let mut stream = logged_in(bus)?;
    stream.set_nonblocking(true)?;
    let (mut place, mut answers) = (0, vec![0; 64 * 1024]);
    while !stop.load(Ordering::Relaxed) {
        let (mut written, mut read) = (0, 0);
        match stream.write(&message[place..]) {
            Ok(count) => written = count,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        match stream.read(&mut answers) {
            Ok(0) => return Ok(()),
            Ok(count) => read = count,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        place += written;
        if place == message.len() {
            place = 0;
            sent.fetch_add(1, Ordering::Relaxed);
        }
        if written + read == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(())
}

/// Owns [`SINK`] and throws away what comes.
fn sink(bus: &Path, stop: Arc<AtomicBool>) -> JoinHandle<()> {
    let mut stream = raw::hello(ROOT, bus).unwrap();
    for (member, serial) in [("Hello", 1), ("RequestName", 2)] {
        let call = zbus::Message::method_call("/org/freedesktop/DBus", member);
        let call = call.interface("org.freedesktop.DBus").destination("org.freedesktop.DBus");
        let call = call.serial(std::num::NonZeroU32::new(serial).unwrap());
        let call = match member {
            "Hello" => call.build(&()),
            _ => call.build(&(SINK, 4u32)),
        };
        stream.write_all(call.unwrap().data()).unwrap();
    }
    stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    std::thread::spawn(move || {
        let mut bytes = vec![0; 64 * 1024];
        while !stop.load(Ordering::Relaxed) {
            if matches!(stream.read(&mut bytes), Ok(0)) {
                return;
            }
        }
    })
}

async fn owner(root: &Connection) -> String {
    let bus = zbus::fdo::DBusProxy::new(root).await.unwrap();
    bus.get_name_owner(raw::NAME.try_into().unwrap()).await.expect("csid is on the bus").to_string()
}

#[test]
fn largest_messages_cost_root_nothing() {
    alone(async |w| {
        let bus = Bus::start(w, Policy::Everything).await;
        let client = running(w).await;
        bus.has_csid().await;
        let root = bus.connect(ROOT).await;
        let before = owner(&root).await;
        // The one that threw csid off the bus: the largest that the bus takes, and its answer had the path in it.
        let mut one = logged_in(&bus.socket).unwrap();
        one.write_all(&message(raw::NAME, "HasMount", LARGEST)).unwrap();
        one.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let answers = tokio::task::spawn_blocking(move || answer(one)).await.unwrap();
        assert!(answers.contains("org.csid1.Error.InvalidArgument"), "{answers}");
        assert_eq!(owner(&root).await, before, "csid is on the bus as before");

        let stop = Arc::<AtomicBool>::default();
        let sink = sink(&bus.socket, stop.clone());
        let resident = resident_kib(w.csid_pid());
        let mut most = 0;
        let mut seen = Vec::new();
        let mut held = false;
        for _ in 0..TRIES {
            let (mut elsewhere, mut here) = (Vec::new(), Vec::new());
            let (mut sent_elsewhere, mut sent) = (0, 0);
            for round in 0..2 * ROUNDS {
                // Both in turn, and each as often the first of two.
                let destination = if round % 4 == 0 || round % 4 == 3 { SINK } else { raw::NAME };
                let senders = Senders::begin(bus.socket.clone(), destination).await;
                let p99 = p99_of_reads(&client, DURING).await;
                if destination == SINK {
                    elsewhere.push(p99);
                    sent_elsewhere += senders.end().await;
                } else {
                    here.push(p99);
                    most = most.max(resident_kib(w.csid_pid()));
                    sent += senders.end().await;
                }
            }
            let (elsewhere, here) = (median(elsewhere), median(here));
            count("messages of 20 MiB to another name", sent_elsewhere);
            count("messages of 20 MiB to csid", sent);
            count("µs, the p99 of root's reads during reads of another name", elsewhere.as_micros() as usize);
            count("µs, the p99 of root's reads during reads of csid", here.as_micros() as usize);
            count("hundredths of it", (100.0 * here.as_secs_f64() / elsewhere.as_secs_f64()) as usize);
            held = here <= elsewhere * 3 / 2;
            seen.push((elsewhere, here));
            if held {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        sink.join().unwrap();
        assert!(held, "elsewhere and here, in {TRIES} tries: {seen:?}");
        count("KiB csid had before", resident);
        count("KiB csid had during them", most);
        assert!(most < resident + GROWTH, "csid grew from {resident} to {most} KiB");
        assert_eq!(owner(&root).await, before, "csid is on the bus as before");
        w.nothing_left(&client).await;
    });
}
