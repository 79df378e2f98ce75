//! Bytes that are no message, and a peer that never reads.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use csid_tests::ask::*;
use csid_tests::kernel::{forget_peak, peak_kib, resident_kib};
use csid_tests::raw::{self, MANAGER, MANAGER_PATH};
use csid_tests::world::{SOON, World, count, world};

use crate::{busy, everything};

fn authenticated(w: &World) -> UnixStream {
    raw::hello(raw::ROOT, &w.socket()).unwrap()
}

#[test]
fn bytes_that_are_no_message_drop_that_client_alone() {
    world(async |w| {
        let (client, _, _) = busy(w).await;
        let before = everything(w, &client).await;
        let mut noise: Vec<Vec<u8>> = vec![
            vec![0; 64],
            vec![0xff; 4096],
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
            // A header that promises 128 MiB and more.
            [&b"l\x01\0\x01\xff\xff\xff\x7f\x01\0\0\0\xff\xff\xff\x7f"[..], &[0; 64]].concat(),
            // A right fixed header with no fields at all.
            b"l\x01\0\x01\0\0\0\0\x01\0\0\0\0\0\0\0".to_vec(),
            b"l\x09\0\x01\0\0\0\0\x01\0\0\0\0\0\0\0".to_vec(),
        ];
        let mut seed = 42u64;
        noise.extend((0..50).map(|_| {
            (0..256)
                .map(|_| {
                    seed =
                        seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    (seed >> 33) as u8
                })
                .collect()
        }));
        let number = noise.len();
        for bytes in noise {
            for mut stream in [UnixStream::connect(w.socket()).unwrap(), authenticated(w)] {
                stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
                let _ = stream.write_all(&bytes);
                let _ = stream.shutdown(std::net::Shutdown::Write);
                let mut rest = Vec::new();
                let end = tokio::task::spawn_blocking(move || stream.read_to_end(&mut rest)).await.unwrap();
                let dropped = end.is_ok() || end.is_err_and(|e| e.kind() == ErrorKind::ConnectionReset);
                assert!(dropped, "csid holds on to {bytes:?}");
            }
            assert_eq!(state(&client, "in-use", "job").await, "mounted", "the others notice nothing");
        }
        // A client that says nothing, or stops in the middle, blocks no other client.
        let _silent: Vec<_> = (0..50).map(|_| UnixStream::connect(w.socket()).unwrap()).collect();
        let mut half: Vec<_> = (0..50).map(|_| authenticated(w)).collect();
        for stream in &mut half {
            stream.write_all(b"l\x01\0\x01\x04\0\0\0\x01\0").unwrap();
        }
        let begun = Instant::now();
        let fresh = w.client().await;
        assert_eq!(state(&fresh, "in-use", "job").await, "mounted");
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        count("kinds of noise, before and after the handshake", number);
        assert_eq!(everything(w, &client).await, before, "nothing is changed");
    });
}

/// More than csid takes from a peer that never reads.
const CALLS: usize = 200_000;

#[test]
fn peer_that_calls_without_reading_is_bounded() {
    world(async |w| {
        let (client, _, _) = busy(w).await;
        let pid = w.csid_pid();
        let before = resident_kib(pid);
        forget_peak(pid);
        let message = zbus::Message::method_call(MANAGER_PATH, "ListPlugins").interface(MANAGER);
        let bytes = message.destination(raw::NAME).build(&()).unwrap().data().bytes().to_vec();
        let mut stream = authenticated(w);
        stream.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
        let answers = Arc::<AtomicUsize>::default();
        let answered = answers.clone();
        let flood = tokio::task::spawn_blocking(move || {
            let chunk = bytes.repeat(100);
            let (mut sent, mut place) = (0, 0);
            while sent < CALLS {
                let before = answered.load(Ordering::Relaxed);
                match stream.write(&chunk[place..]) {
                    Ok(count) => place += count,
                    // A csid that answers no other peer has only not come to this one.
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        if answered.load(Ordering::Relaxed) > before + 1 {
                            break;
                        }
                    }
                    Err(_) => break,
                }
                if place == chunk.len() {
                    (sent, place) = (sent + 100, 0);
                }
            }
            (sent, stream)
        });
        let mut slowest = Duration::ZERO;
        while !flood.is_finished() {
            let begun = Instant::now();
            assert_eq!(state(&client, "in-use", "job").await, "mounted");
            slowest = slowest.max(begun.elapsed());
            answers.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let (sent, mut stream) = flood.await.unwrap();
        assert!(sent < CALLS, "csid reads no more when nothing is read");
        // The peer reads now. csid hangs up when it has read the last of what the socket holds.
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let rest = tokio::task::spawn_blocking(move || std::io::copy(&mut stream, &mut std::io::sink()));
        let end = rest.await.unwrap();
        let hung_up = end.is_ok() || end.as_ref().is_err_and(|e| e.kind() == ErrorKind::ConnectionReset);
        assert!(hung_up, "{end:?}");
        assert_eq!(state(&client, "in-use", "job").await, "mounted");
        let grown = peak_kib(pid).saturating_sub(before);
        count("calls taken from a peer that never reads", sent);
        count("KiB csid grew by at most", grown);
        assert!(grown < 64 * 1024, "csid grew by {grown} KiB");
        assert!(slowest < Duration::from_secs(10), "another peer waited {slowest:?}");
    });
}
