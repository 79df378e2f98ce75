//! Limits of messages, descriptors and logins.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use zbus::message::Flags;
use zbus::{Message, Variant};

use super::harness::{
    MANAGER, MEMBER, Options, World, connect, connect_as, is_root, manager, properties, raw, raw_as,
};
use crate::store::event_kind::EventKind;
use crate::store::rows::NewEvent;
use crate::store::{Change, Durability};

fn call_bytes(serial: u32) -> Vec<u8> {
    let call = Message::method_call("/org/csid1", "ListPlugins")
        .destination("org.csid1")
        .interface(MANAGER)
        .serial(serial.try_into().unwrap())
        .build(&())
        .unwrap();
    call.data().to_vec()
}

/// The connection is closed by the other end, within 3 s.
fn is_dropped(stream: &mut std::os::unix::net::UnixStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_bytes_end_only_their_connection() {
    let world = World::new();
    let (path, _serving) = world.listen();
    let other = connect(&path).await;
    let good = call_bytes(7);
    let flipped = |place: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[place] = byte;
        bytes
    };
    let mut cases = vec![
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        vec![0; 64],
        vec![0xff; 4096],
        flipped(0, b'x'),
        flipped(1, 0),
        flipped(3, 9),
        flipped(8, 0),
        // A body and header fields of 128 MiB that were announced and never come.
        flipped(7, 0x07),
        flipped(15, 0x07),
    ];
    // A string that is no UTF-8 in an otherwise sound message.
    let text = Message::method_call("/org/csid1", "HasMount").interface(MANAGER).build(&"abcdefgh").unwrap();
    let mut bytes = text.data().to_vec();
    let place = bytes.windows(8).position(|window| window == b"abcdefgh").unwrap();
    bytes[place] = 0xff;
    cases.push(bytes.clone());
    bytes[place] = 0;
    cases.push(bytes);
    for (number, case) in cases.into_iter().enumerate() {
        let path = path.clone();
        let dropped = tokio::task::spawn_blocking(move || {
            let mut stream = raw(&path);
            stream.write_all(&case).unwrap();
            is_dropped(&mut stream)
        });
        assert!(dropped.await.unwrap(), "case {number}");
        properties(&other).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn peer_without_login_is_disconnected() {
    let world = World::new();
    let (path, _serving) = world.listen();
    let other = path.clone();
    let wrong = tokio::task::spawn_blocking(move || {
        // Another uid than the kernel's, and an anonymous one.
        for auth in ["EXTERNAL 3432", "ANONYMOUS 61"] {
            let mut stream = std::os::unix::net::UnixStream::connect(&other).unwrap();
            stream.write_all(format!("\0AUTH {auth}\r\n").as_bytes()).unwrap();
            let mut answer = [0; 64];
            let count = stream.read(&mut answer).unwrap();
            assert!(answer[..count].starts_with(b"REJECTED EXTERNAL"), "{auth}");
        }
        let begun = Instant::now();
        let mut silent = std::os::unix::net::UnixStream::connect(&other).unwrap();
        silent.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        assert_eq!(silent.read(&mut [0; 1]).unwrap_or(0), 0);
        begun.elapsed()
    });
    let took = wrong.await.unwrap();
    assert!(took > Duration::from_secs(3) && took < Duration::from_secs(50), "{took:?}");
    properties(&connect(&path).await).await;
}

fn byte(stream: &mut std::os::unix::net::UnixStream) -> u8 {
    let mut byte = [0];
    stream.read_exact(&mut byte).unwrap();
    byte[0]
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_descriptors_end_only_their_connection() {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let world = World::new();
    let (path, _serving) = world.listen();
    let other = connect(&path).await;
    let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    // A message that says it has five, of which one comes: while the peer logs in, and after.
    let claimed: Vec<Variant<'_>> = (0..5).map(|_| Variant::Fd((&null).into())).collect();
    let call = Message::method_call("/org/csid1", "Reload").interface(MANAGER).build(&(claimed,)).unwrap();
    let uid = rustix::process::getuid().as_raw().to_string();
    let uid: String = uid.bytes().map(|byte| format!("{byte:02x}")).collect();
    let login = format!("\0AUTH EXTERNAL {uid}\r\nNEGOTIATE_UNIX_FD\r\nBEGIN\r\n");
    for together in [true, false] {
        let (path, login, bytes) = (path.clone(), login.clone(), call.data().to_vec());
        let fd = null.try_clone().unwrap();
        let dropped = tokio::task::spawn_blocking(move || {
            let mut stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
            let then = match together {
                true => [login.into_bytes(), bytes].concat(),
                false => {
                    stream.write_all(&[login.into_bytes(), call_bytes(7)].concat()).unwrap();
                    // The login has ended when csid answers a call.
                    let mut answer = Vec::new();
                    while !answer.ends_with(b"AGREE_UNIX_FD\r\n") {
                        answer.push(byte(&mut stream));
                    }
                    assert_eq!(byte(&mut stream), b'l', "a message begins");
                    bytes
                }
            };
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let fds = [std::os::fd::AsFd::as_fd(&fd)];
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            let sent = sendmsg(&stream, &[std::io::IoSlice::new(&then)], &mut control, SendFlags::empty());
            assert_eq!(sent.unwrap(), then.len());
            is_dropped(&mut stream)
        });
        assert!(dropped.await.unwrap(), "together: {together}");
        properties(&other).await;
    }
}

fn memfd(text: &[u8], seals: SealFlags) -> OwnedFd {
    let fd = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::io::write(&fd, text).unwrap();
    fcntl_add_seals(&fd, seals).unwrap();
    fd
}

#[tokio::test(flavor = "multi_thread")]
async fn secrets_are_read_before_the_operation_starts() {
    let world = World::new();
    let (path, _serving) = world.listen();
    let client = connect(&path).await;
    let mount = async |fd: OwnedFd, credential: bool| {
        let mut options = Options::from([
            ("plugin", "p".into()),
            ("external-id", "v".into()),
            ("secrets", Variant::Fd(fd.into())),
        ]);
        if credential {
            options.insert("credential", "disk".into());
        }
        let soon = 500_000u64;
        options.insert("deadline-usec", soon.into());
        manager(&client, "Mount", &("ns", "vol", "job", options)).await.unwrap_err()
    };
    let sealed = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK;
    for (fd, credential, said) in [
        (memfd(br#"{"password":"hunter2"}"#, SealFlags::empty()), false, "sealed"),
        (memfd(br#"{"password":"hunter2"}"#, sealed), true, "exclude each other"),
        (memfd(br#"["hunter2"]"#, sealed), false, "JSON"),
        (std::fs::File::open("/").unwrap().into(), false, "sealed"),
    ] {
        let (name, text) = mount(fd, credential).await;
        assert_eq!(name, "org.csid1.Error.InvalidArgument", "{text}");
        assert!(text.contains(said) && !text.contains("hunter2"), "{text}");
    }
    // Sound ones go on to where there is no plugin.
    let (name, text) = mount(memfd(br#"{"password":"hunter2"}"#, sealed), false).await;
    assert_ne!(name, "org.csid1.Error.InvalidArgument", "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sizes_are_bounded() {
    let world = World::new();
    let (path, _serving) = world.listen();
    let other = connect(&path).await;
    let options = |bytes: usize| Options::from([("operation-id", "x".repeat(bytes).into())]);
    let (name, text) = manager(&other, "Reload", &(options(100_000),)).await.unwrap_err();
    assert_eq!(name, "org.csid1.Error.InvalidArgument");
    assert!(text.contains("the limit is 65536"), "{text}");

    let (name, text) = manager(&other, "Reload", &(options(2_000_000),)).await.unwrap_err();
    assert_eq!(name, "org.csid1.Error.InvalidArgument");
    assert!(text.contains("the limits are 1048576"), "{text}");

    // More descriptors than any member takes: as many as a message could say it has.
    let client = connect(&path).await;
    let fds: Vec<Variant<'_>> = (0..200)
        .map(|_| Variant::Fd(OwnedFd::from(std::fs::File::open("/dev/null").unwrap()).into()))
        .collect();
    let many = fds.iter().collect::<Vec<_>>();
    assert!(manager(&client, "Reload", &(many,)).await.is_err());
    client.closed().await;
    properties(&other).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_reply_flag_suppresses_the_answer() {
    const CALLS: u32 = 20;
    let world = World::new();
    let (path, _serving) = world.listen();
    let sound = |flags: Flags, serial: u32| {
        let call = Message::method_call("/org/csid1", "ListPlugins").interface(MANAGER);
        call.with_flags(flags).serial(serial.try_into().unwrap()).build(&()).unwrap().data().to_vec()
    };
    let first = tokio::task::spawn_blocking(move || {
        let mut stream = raw(&path);
        stream.write_all(&sound(Flags::NO_REPLY_EXPECTED, 0x0102_0304)).unwrap();
        // Each of these calls comes when the one before is answered. An answer to the first would come among theirs.
        let mut answers = Vec::new();
        for serial in 1..=CALLS {
            stream.write_all(&sound(Flags::empty(), 0x0a0b_0c00 + serial)).unwrap();
            let wanted = (0x0a0b_0c00 + serial).to_le_bytes();
            while !answers.windows(4).any(|window| window == wanted) {
                answers.push(byte(&mut stream));
            }
        }
        answers
    });
    let answers = first.await.unwrap();
    let unwanted = 0x0102_0304_u32.to_le_bytes();
    assert!(!answers.windows(4).any(|window| window == unwanted), "the first call is answered");
}

#[tokio::test(flavor = "multi_thread")]
async fn malformed_login_ends_only_its_connection() {
    let world = World::new();
    let (path, _serving) = world.listen();
    let other = connect(&path).await;
    let long = [b"\0AUTH ".to_vec(), vec![b'x'; 64 * 1024]].concat();
    for lines in [b"\n".to_vec(), b"\0\n".to_vec(), b"\0AUTH EXTERNAL\r\n\nBEGIN\r\n".to_vec(), long] {
        let path = path.clone();
        let dropped = tokio::task::spawn_blocking(move || {
            let mut stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
            let begun = Instant::now();
            let _ = stream.write_all(&lines);
            is_dropped(&mut stream) && begun.elapsed() < Duration::from_secs(4)
        });
        assert!(dropped.await.unwrap(), "not before the time for the handshake is over");
    }
    properties(&other).await;
}

/// Resident memory of this process, in MiB.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() / 1024
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_of_a_peer_that_never_reads_are_limited() {
    const CALLS: u32 = 200_000;
    let world = World::new();
    let (path, _serving) = world.listen();
    let other = connect(&path).await;
    properties(&other).await;
    let before = resident();
    let flood = path.clone();
    let (accepted, mut sent) = tokio::sync::mpsc::unbounded_channel();
    let flooding = tokio::task::spawn_blocking(move || {
        let mut stream = raw(&flood);
        stream.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
        let mut count = 0;
        while count < CALLS && stream.write_all(&call_bytes(count + 1)).is_ok() {
            count += 1;
        }
        accepted.send((count, stream)).unwrap();
    });
    let mut slowest = Duration::ZERO;
    while !flooding.is_finished() {
        let begun = Instant::now();
        properties(&other).await;
        slowest = slowest.max(begun.elapsed());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let (count, stream) = sent.recv().await.unwrap();
    let grown = resident().saturating_sub(before);
    println!(
        "{count} of {CALLS} calls were taken; {grown} MiB more; another peer waited {slowest:?} at most"
    );
    assert!(count < CALLS, "reading stops when nothing is read");
    // Other tests run in this process; without a bound it is ten times that.
    assert!(grown < 200, "{grown} MiB more");
    assert!(slowest < Duration::from_secs(10), "another peer waited {slowest:?}");
    drop(stream);
    properties(&other).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn peer_with_unread_large_answers_is_disconnected() {
    // The number of calls that csid reads from one connection.
    const CALLS: u32 = 500;
    if !is_root() {
        return;
    }
    let world = World::new();
    let events = (0..1000).map(|_| {
        Change::Event(NewEvent {
            kind: EventKind::Mount,
            subject: "x".repeat(200),
            details: BTreeMap::from([("text", "y".repeat(200).into())]),
        })
    });
    world.rooms.store.commit(events.collect(), Durability::Process).await.unwrap();
    let (path, _serving) = world.listen();
    let member = connect_as(&path, MEMBER).await;
    let ask =
        async || manager(&member, "GetEvents", &(0u64, 1000u32)).await.map(|answer| answer.data().len());
    assert!(ask().await.unwrap() > 300_000);
    let before = resident();
    let flood = path.clone();
    let flooding = tokio::task::spawn_blocking(move || {
        let mut stream = raw_as(&flood, MEMBER);
        for serial in 1..=CALLS {
            let call = Message::method_call("/org/csid1", "GetEvents").interface(MANAGER);
            let call = call.serial(serial.try_into().unwrap()).build(&(0u64, 1000u32)).unwrap();
            stream.write_all(call.data()).unwrap();
        }
        stream
    });
    let mut stream = flooding.await.unwrap();
    let name = ask().await.unwrap_err().0;
    assert_eq!(name, "org.csid1.Error.RateLimited", "calls with unread answers count");
    let grown = resident().saturating_sub(before);
    assert!(grown < 200, "{grown} MiB more");
    let begun = Instant::now();
    while let Err((name, text)) = ask().await {
        assert_eq!(name, "org.csid1.Error.RateLimited", "{text}");
        assert!(begun.elapsed() < Duration::from_secs(20), "the peer is not hung up");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(tokio::task::spawn_blocking(move || is_dropped(&mut stream)).await.unwrap());
}
