//! The load: clients that claim or mount volumes and let them go again, through csid's socket.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use csid_client::{
    ClaimOptions, Client, Error, Kind, MountOptions, ReleaseOptions, Result, Target, UnmountOptions,
};
use csid_tests::ask::NAMESPACE;
use csid_tests::dice::Dice;

use crate::history::{History, Line, Outcome};

/// The volumes with their access modes.
pub const VOLUMES: [(&str, &str); 4] =
    [("one", SINGLE), ("two", SINGLE), ("three", SINGLE), ("many", "multi-node-multi-writer")];
pub const SINGLE: &str = "single-node-writer";
/// How long a call may take: csid's deadline, and how long a client waits for an answer.
const DEADLINE: Duration = Duration::from_secs(4);
const ANSWER: Duration = Duration::from_secs(8);
/// The longest pause of a client before it tries again to let a volume go.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// How long a client tries to let a volume go.
const REST: Duration = Duration::from_secs(150);

/// What all hosts share.
pub struct Shared {
    pub history: Arc<History>,
    pub seed: u64,
    /// How long a client has a volume at most.
    pub held: Duration,
    pub stop: AtomicBool,
    /// The run is broken on purpose. Nobody has to come to rest.
    pub is_broken: AtomicBool,
    /// The claims that were granted, and the hosts that run.
    pub taken: AtomicUsize,
    pub hosts: AtomicUsize,
}

impl Shared {
    pub fn new(history: Arc<History>, seed: u64, held: Duration) -> Shared {
        let (stop, is_broken, taken, hosts) = Default::default();
        Shared { history, seed, held, stop, is_broken, taken, hosts }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    Claim,
    Mount,
    Release,
    Unmount,
}

struct Caller {
    shared: Arc<Shared>,
    socket: PathBuf,
    connection: Option<Client>,
    consumer: String,
    who: String,
    number: u32,
}

/// Claims or mounts one volume after the other, and lets each go again.
pub async fn client(shared: Arc<Shared>, node: String, number: u32, socket: PathBuf) {
    let consumer = format!("c{number}");
    let place: u32 = node[1..].parse().expect("nN");
    let number = 100 * place + number;
    let mut dice = Dice::new(shared.seed, u64::from(number));
    let who = format!("{node}/{consumer}");
    let mut caller = Caller { shared: Arc::clone(&shared), socket, connection: None, consumer, who, number };
    while !shared.stop.load(Ordering::SeqCst) {
        let (volume, mode) = dice.of(&VOLUMES);
        let [take, leave] = dice.of(&[[Call::Claim, Call::Release], [Call::Mount, Call::Unmount]]);
        let outcome = caller.call(take, volume, mode == SINGLE).await;
        if outcome != Outcome::Refused {
            if outcome == Outcome::Ok {
                shared.taken.fetch_add(1, Ordering::SeqCst);
                let held = dice.below(shared.held.as_millis() as u64);
                tokio::time::sleep(Duration::from_millis(held)).await;
            }
            let begun = Instant::now();
            let mut pause = Duration::from_millis(100);
            while caller.call(leave, volume, mode == SINGLE).await != Outcome::Ok {
                if shared.is_broken.load(Ordering::SeqCst) {
                    return;
                }
                assert!(begun.elapsed() < REST, "{} did not let {volume} go", caller.who);
                // Each call whose outcome is not known doubles what the checker has to search.
                tokio::time::sleep(pause).await;
                pause = (2 * pause).min(LONGEST_PAUSE);
            }
        }
        tokio::time::sleep(Duration::from_millis(30 + dice.below(120))).await;
    }
}

impl Caller {
    /// Makes a call, and writes it with its outcome.
    async fn call(&mut self, call: Call, volume: &str, single: bool) -> Outcome {
        if self.connection.is_none() {
            match Client::connect(&Target::Socket(self.socket.clone())).await {
                Ok(client) => self.connection = Some(client),
                Err(_) => {
                    // Nothing was asked, so the history has no line of it.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    return if matches!(call, Call::Claim | Call::Mount) {
                        Outcome::Refused
                    } else {
                        Outcome::Unknown
                    };
                }
            }
        }
        let connection = self.connection.clone().expect("a connection");
        let start = self.shared.history.now();
        let answer = tokio::time::timeout(ANSWER, ask(&connection, call, volume, &self.consumer)).await;
        let end = self.shared.history.now();
        let outcome = match answer {
            Ok(Ok(())) => Outcome::Ok,
            // Other errors say nothing that the model needs.
            Ok(Err(Error::Csid(error))) if error.kind == Kind::ClaimConflict => Outcome::Refused,
            Ok(Err(Error::Csid(_))) => Outcome::Unknown,
            Ok(Err(_)) | Err(_) => {
                self.connection = None;
                Outcome::Unknown
            }
        };
        let name = match call {
            Call::Claim | Call::Mount => "take",
            Call::Release => "release",
            Call::Unmount => "unmount",
        };
        let (call, who, volume) = (name.to_owned(), self.who.clone(), volume.to_owned());
        let outcome_of = Some(outcome);
        let client = self.number;
        let line =
            Line { call, who, client, volume, single, start, end, outcome: outcome_of, holders: vec![] };
        self.shared.history.write(&line);
        outcome
    }
}

async fn ask(client: &Client, call: Call, volume: &str, consumer: &str) -> Result<()> {
    let deadline_usec = Some(DEADLINE.as_micros() as u64);
    match call {
        Call::Claim => {
            let options = ClaimOptions { deadline_usec, ..ClaimOptions::default() };
            client.claim(NAMESPACE, volume, consumer, options).await.map(drop)
        }
        Call::Mount => {
            let options = MountOptions { deadline_usec, ..MountOptions::default() };
            client.mount(NAMESPACE, volume, consumer, options).await.map(drop)
        }
        Call::Release => {
            let options = ReleaseOptions { deadline_usec, ..ReleaseOptions::default() };
            client.release(NAMESPACE, volume, consumer, options).await
        }
        Call::Unmount => {
            let options = UnmountOptions { deadline_usec, ..UnmountOptions::default() };
            client.unmount(NAMESPACE, volume, consumer, options).await
        }
    }
}
