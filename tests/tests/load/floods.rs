//! One uid floods csid with calls: it is bounded, and another uid notices nothing.

use std::collections::HashMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use csid_client::Client;
use csid_tests::ask::*;
use csid_tests::kernel::resident_kib;
use csid_tests::raw::{self, MANAGER, MANAGER_PATH, MEMBER};
use csid_tests::world::{count, eventually};
use futures_util::StreamExt;
use zbus::{MessageStream, Variant};

use crate::alone;
use crate::beside::within_bound;

const CONNECTIONS: usize = 8;
/// KiB: a uid's calls that nobody reads the answers of are far less.
const GROWTH: usize = 32 * 1024;
const CALLS: usize = 10_000;
/// The time for which a socket has no room before a thread tries again.
const FULL: Duration = Duration::from_millis(100);
/// operations-per-uid, as shipped.
const OPERATIONS: usize = 256;

/// Threads that call and never read; a thread connects again when csid closes its connection.
struct Flood {
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Counts {
    sent: AtomicUsize,
    /// Writes of all threads that the kernel took, in part or whole.
    writes: AtomicUsize,
    /// Of each thread: writes for which its socket had no room in the time of [`FULL`].
    refused: [AtomicUsize; CONNECTIONS],
}

impl Flood {
    fn begin(socket: PathBuf) -> Self {
        let (stop, counts) = (Arc::<AtomicBool>::default(), Arc::<Counts>::default());
        let call = zbus::Message::method_call(MANAGER_PATH, "ListPlugins").interface(MANAGER);
        let call = call.destination(raw::NAME).build(&()).unwrap().data().bytes().to_vec();
        let threads = (0..CONNECTIONS)
            .map(|number| {
                let (socket, call) = (socket.clone(), call.clone());
                let (stop, counts) = (stop.clone(), counts.clone());
                std::thread::spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        flood(&socket, &call, &stop, &counts, number);
                    }
                })
            })
            .collect();
        Flood { stop, counts, threads }
    }

    fn writes(&self) -> usize {
        self.counts.writes.load(Ordering::Relaxed)
    }

    fn refused(&self) -> [usize; CONNECTIONS] {
        self.counts.refused.each_ref().map(|refused| refused.load(Ordering::Relaxed))
    }

    async fn end(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            tokio::task::spawn_blocking(move || thread.join()).await.unwrap().unwrap();
        }
        self.counts.sent.load(Ordering::Relaxed)
    }
}

/// One connection, until it is hung up.
fn flood(socket: &std::path::Path, call: &[u8], stop: &AtomicBool, counts: &Counts, number: usize) {
    let Ok(mut stream) = raw::hello(MEMBER, socket) else { return };
    stream.set_write_timeout(Some(FULL)).unwrap();
    let mut place = 0;
    while !stop.load(Ordering::Relaxed) {
        match stream.write(&call[place..]) {
            Ok(n) => place += n,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                counts.refused[number].fetch_add(1, Ordering::Relaxed);
                continue;
            }
            Err(_) => return,
        }
        counts.writes.fetch_add(1, Ordering::Relaxed);
        if place == call.len() {
            place = 0;
            counts.sent.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Waits until csid reads no more of it: csid answers another caller, while every thread's socket is full and stays full.
async fn saturated(client: &Client, flood: &Flood) {
    let mut since = None;
    eventually("the flood is dammed", async || {
        client.list_plugins().await.expect("an answer");
        let writes = flood.writes();
        let (begun, refused) = since.get_or_insert_with(|| (writes, flood.refused()));
        if *begun != writes {
            since = None;
            return false;
        }
        // The second of them has begun after csid has answered.
        flood.refused().iter().zip(refused).all(|(now, before)| *now >= *before + 2)
    })
    .await;
}

fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

#[test]
fn flood_of_one_uid_is_bounded_for_the_others() {
    alone(async |w| {
        raw::group_csid(w);
        let client = running(w).await;
        std::os::unix::fs::chown(w.socket(), None, Some(raw::GROUP)).unwrap();
        let (pid, socket) = (w.csid_pid(), w.socket());
        let (before, open) = (resident_kib(pid), descriptors(pid));
        let (mut most, mut sent) = (0, 0);
        let begin = async || {
            let flood = Flood::begin(socket.clone());
            saturated(&client, &flood).await;
            flood
        };
        let end = async |flood: Flood| {
            most = most.max(resident_kib(pid));
            sent += flood.end().await;
            // csid keeps connections to 24 workers of its helper at most.
            eventually("csid has hung up", async || descriptors(pid) <= open + 24).await;
        };
        within_bound(&client, "p", begin, end).await;
        count("calls of the flood, what its sockets hold included", sent);
        count("KiB csid had before", before);
        count("KiB csid had in the flood", most);
        assert!(most < before + GROWTH, "csid grew from {before} to {most} KiB");
        w.nothing_left(&client).await;
    });
}

#[test]
fn calls_above_a_uids_limit_are_refused_at_once() {
    alone(async |w| {
        raw::group_csid(w);
        let client = running(w).await;
        std::os::unix::fs::chown(w.socket(), None, Some(raw::GROUP)).unwrap();
        let before = resident_kib(w.csid_pid());
        let flooding = raw::peer(MEMBER, &w.socket()).await.unwrap();
        let mut answers = MessageStream::from(&flooding);
        // None of them ends before the test: the plugin does not exist, and each waits for it.
        let body =
            ("no-such-plugin", "node", HashMap::from([("deadline-usec", Variant::from(600_000_000_u64))]));
        let send = async {
            for _ in 0..CALLS {
                let call = zbus::Message::method_call(MANAGER_PATH, "WaitForPlugin").interface(MANAGER);
                flooding.send(&call.destination(raw::NAME).build(&body).unwrap()).await.unwrap();
            }
        };
        let refused = async {
            let mut refused = 0;
            while refused < CALLS - OPERATIONS {
                let answer = answers.next().await.expect("an answer").unwrap();
                if let Some(name) = answer.header().error_name() {
                    assert_eq!(name.as_str(), "org.csid1.Error.RateLimited");
                    refused += 1;
                }
            }
            refused
        };
        let both = tokio::time::timeout(Duration::from_secs(60), futures_util::future::join(send, refused));
        let ((), refused) = both.await.expect("all of them are answered");
        count("calls refused of 10,000", refused);
        count("KiB csid grew by", resident_kib(w.csid_pid()).saturating_sub(before));
        // Reads still work, and root's own calls go on.
        raw::call(&flooding, MANAGER_PATH, MANAGER, "ListOperations", Vec::new()).await.unwrap();
        mounted(&client, "job", inline("v")).await;
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}
