//! The load: clients that claim or mount volumes and let them go again, through csid's socket.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use csid_client::{ClaimOptions, Client, Error, Kind, MountOptions, ReleaseOptions, Target, UnmountOptions};
use csid_tests::ask::NAMESPACE;
use csid_tests::dice::Dice;
use csid_tests::world::eventually;

use crate::held::HeldMount;
use crate::history::{History, Line, Outcome};
use crate::host::{CONTROLLER, Host};
use crate::samples::Hosts;

/// A volume of the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Volume {
    pub name: &'static str,
    pub access_mode: &'static str,
    pub plugin: &'static str,
}

impl Volume {
    pub fn is_single(&self) -> bool {
        self.access_mode == SINGLE
    }

    /// Whether a controller attaches it.
    pub fn attaches(&self) -> bool {
        self.plugin == ATTACHING
    }

    /// Returns the volume's ID at its plugin.
    pub fn external_id(&self) -> String {
        format!("ext-{}", self.name)
    }
}

pub const VOLUMES: [Volume; 6] = [
    Volume { name: "one", access_mode: SINGLE, plugin: "p" },
    Volume { name: "two", access_mode: SINGLE, plugin: "p" },
    Volume { name: "three", access_mode: SINGLE, plugin: "p" },
    Volume { name: "many", access_mode: MANY, plugin: "p" },
    Volume { name: "attached", access_mode: SINGLE, plugin: ATTACHING },
    Volume { name: "attached-many", access_mode: MANY, plugin: ATTACHING },
];
/// The plugin whose volumes are attached.
pub const ATTACHING: &str = "attaching";
const SINGLE: &str = "single-node-writer";
const MANY: &str = "multi-node-multi-writer";
/// How long a call may take: csid's deadline, and how long a client waits for an answer.
const DEADLINE: Duration = Duration::from_secs(4);
const ANSWER: Duration = Duration::from_secs(8);
/// How long a claim waits for others that are in its way. Most of them are not for so long, but some are while their host is cut off.
const WAIT: Duration = Duration::from_millis(1500);
/// What csid says of a claim that it refuses at its time while the claim has its place in the queue.
const WAITING: [&str; 2] = ["; it waits, and ", "the claim waits at the cluster's servers"];
/// The longest pause of a client before it tries again to let a volume go.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// The time between two looks of a client at its mount.
const LOOK: Duration = Duration::from_millis(100);
/// How long a client tries to let a volume go.
const REST: Duration = Duration::from_secs(150);

/// A volume that is attached to a host, and neither etcd nor a journal knows it since a restore of etcd. Its call had no end, or its claim had ended.
#[derive(Clone, Debug)]
pub struct Stray {
    pub volume: &'static str,
    /// The plugin's name of the host.
    pub node: String,
}

/// What all hosts share.
pub struct Shared {
    pub history: Arc<History>,
    pub seed: u64,
    /// How long a client has a volume at most.
    pub held: Duration,
    pub stop: AtomicBool,
    /// A client that has got a volume keeps it until `stop`.
    pub keeps: AtomicBool,
    /// Clients use what they have mounted.
    pub uses: AtomicBool,
    /// The volumes that clients have, with the clients as NODE/CONSUMER.
    pub had: Mutex<BTreeSet<(&'static str, String)>>,
    /// Those of them that clients have mounted.
    pub mounted: Mutex<BTreeSet<(&'static str, String)>>,
    /// What restores of etcd have left attached.
    pub strays: Mutex<Vec<Stray>>,
    /// The clients that run.
    pub clients: AtomicUsize,
    /// The run is broken on purpose. Nobody has to come to rest.
    pub is_broken: AtomicBool,
    /// The claims that were granted, and the hosts that run.
    pub taken: AtomicUsize,
    pub hosts: AtomicUsize,
    /// The hosts, by their mount namespaces.
    pub namespaces: Hosts,
}

impl Shared {
    pub fn new(history: Arc<History>, seed: u64, held: Duration) -> Shared {
        let (stop, keeps, uses, is_broken, taken, hosts) = Default::default();
        let (had, mounted, strays, clients, namespaces) = Default::default();
        Shared {
            history,
            seed,
            held,
            stop,
            keeps,
            uses,
            had,
            mounted,
            strays,
            clients,
            is_broken,
            taken,
            hosts,
            namespaces,
        }
    }
}

impl Shared {
    /// Waits until a claim of each host with clients is granted from now on.
    pub async fn each_host_claims(&self, hosts: &[Host]) {
        let hosts = hosts.iter().filter(|host| host.name != CONTROLLER).map(|host| &host.name);
        let before: Vec<_> = hosts.map(|host| (host, self.history.granted(host))).collect();
        eventually("a claim of each host is granted", async || {
            before.iter().all(|(host, granted)| self.history.granted(host) > *granted)
        })
        .await;
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
    /// The path of the last mount that was answered.
    source: PathBuf,
}

/// What a client does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Choice {
    volume: Volume,
    take: Call,
    leave: Call,
    wait: Duration,
    /// How long it has the volume, if it gets it.
    held: Duration,
    /// The time until it goes on.
    pause: Duration,
}

impl Choice {
    /// Draws a choice. `most`: how long the volume is had at most. Each choice takes as many draws, whatever became of the one before.
    fn draw(dice: &mut Dice, volumes: &[Volume], most: Duration) -> Choice {
        let volume = dice.of(volumes);
        let [take, leave] = dice.of(&[[Call::Claim, Call::Release], [Call::Mount, Call::Unmount]]);
        let wait = if dice.once_in(3) { WAIT } else { Duration::ZERO };
        let held = Duration::from_millis(dice.below(most.as_millis() as u64));
        let pause = Duration::from_millis(30 + dice.below(120));
        Choice { volume, take, leave, wait, held, pause }
    }
}

/// Returns the volumes that a client asks for. The first one of each host asks for what needs no controller, also while the others wait for one.
fn volumes_of(number: u32) -> Vec<Volume> {
    VOLUMES.into_iter().filter(|volume| number != 0 || !volume.attaches()).collect()
}

/// Claims or mounts one volume after the other, and lets each go again.
pub async fn client(shared: Arc<Shared>, node: String, number: u32, socket: PathBuf) {
    let (consumer, volumes) = (format!("c{number}"), volumes_of(number));
    let place: u32 = node[1..].parse().expect("nN");
    let number = 100 * place + number;
    let mut dice = Dice::new(shared.seed, u64::from(number));
    let who = format!("{node}/{consumer}");
    let mut caller = Caller {
        shared: Arc::clone(&shared),
        socket,
        connection: None,
        consumer,
        who,
        number,
        source: PathBuf::new(),
    };
    shared.clients.fetch_add(1, Ordering::SeqCst);
    while !shared.stop.load(Ordering::SeqCst) {
        let Choice { volume, take, leave, wait, held, pause } =
            Choice::draw(&mut dice, &volumes, shared.held);
        let outcome = caller.call(take, volume, wait).await;
        if outcome != Outcome::Refused {
            if outcome == Outcome::Ok {
                shared.taken.fetch_add(1, Ordering::SeqCst);
                let had = (volume.name, caller.who.clone());
                shared.had.lock().expect("the volumes").insert(had.clone());
                let uses = take == Call::Mount && shared.uses.load(Ordering::SeqCst);
                let mount = uses.then(|| caller.uses(volume));
                if take == Call::Mount {
                    shared.mounted.lock().expect("the mounts").insert(had.clone());
                }
                let end = Instant::now() + held;
                while Instant::now() < end {
                    let rest = end.saturating_duration_since(Instant::now());
                    tokio::time::sleep(if mount.is_some() { rest.min(LOOK) } else { rest }).await;
                    caller.looks_at(mount.as_ref(), volume);
                }
                while shared.keeps.load(Ordering::SeqCst) && !shared.stop.load(Ordering::SeqCst) {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    caller.looks_at(mount.as_ref(), volume);
                }
                shared.had.lock().expect("the volumes").remove(&had);
                shared.mounted.lock().expect("the mounts").remove(&had);
            }
            let begun = Instant::now();
            let mut again = Duration::from_millis(100);
            while caller.call(leave, volume, Duration::ZERO).await != Outcome::Ok {
                if shared.is_broken.load(Ordering::SeqCst) {
                    return;
                }
                assert!(begun.elapsed() < REST, "{} did not let {} go", caller.who, volume.name);
                // Each call whose outcome is not known doubles what the checker has to search.
                tokio::time::sleep(again).await;
                again = (2 * again).min(LONGEST_PAUSE);
            }
        }
        tokio::time::sleep(pause).await;
    }
    shared.clients.fetch_sub(1, Ordering::SeqCst);
}

impl Caller {
    /// Begins to use the mount of a volume that was just answered.
    fn uses(&self, volume: Volume) -> HeldMount {
        self.must(volume, HeldMount::new(&self.source, &self.who))
    }

    /// Looks at a mount that the client has. `None`: it uses none.
    fn looks_at(&self, mount: Option<&HeldMount>, volume: Volume) {
        if let Some(mount) = mount {
            self.must(volume, mount.check());
        }
    }

    fn must<T>(&self, volume: Volume, found: Result<T, String>) -> T {
        found.unwrap_or_else(|why| panic!("{} has {} mounted: {why}", self.who, volume.name))
    }

    /// Makes a call, and writes it with its outcome.
    async fn call(&mut self, call: Call, volume: Volume, wait: Duration) -> Outcome {
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
        let asked = ask(&connection, call, volume.name, &self.consumer, wait);
        let answer = tokio::time::timeout(ANSWER, asked).await;
        let end = self.shared.history.now();
        let error = match &answer {
            Ok(Err(error)) => error.to_string(),
            Ok(Ok(_)) | Err(_) => String::new(),
        };
        let outcome = match answer {
            Ok(Ok(source)) => {
                self.source = source;
                Outcome::Ok
            }
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
        self.shared.history.write(&Line {
            call: name.to_owned(),
            who: self.who.clone(),
            client: self.number,
            volume: volume.name.to_owned(),
            single: volume.is_single(),
            attaches: volume.attaches(),
            start,
            end,
            wait: wait.as_micros() as i64,
            waiting: outcome == Outcome::Refused && WAITING.iter().any(|text| error.contains(text)),
            outcome: Some(outcome),
            error,
            holders: vec![],
        });
        outcome
    }
}

/// Makes a call. Returns the path of a mount; "": the call is no Mount.
async fn ask(
    client: &Client,
    call: Call,
    volume: &str,
    consumer: &str,
    wait: Duration,
) -> csid_client::Result<PathBuf> {
    let none = PathBuf::new();
    let wait_usec = Some(wait.as_micros() as u64);
    let deadline_usec = Some(DEADLINE.as_micros() as u64);
    match call {
        Call::Claim => {
            let options = ClaimOptions { deadline_usec, wait_usec, ..ClaimOptions::default() };
            client.claim(NAMESPACE, volume, consumer, options).await.map(|_| none)
        }
        Call::Mount => {
            let options = MountOptions { deadline_usec, wait_usec, ..MountOptions::default() };
            client.mount(NAMESPACE, volume, consumer, options).await.map(|mounted| mounted.source.into())
        }
        Call::Release => {
            let options = ReleaseOptions { deadline_usec, ..ReleaseOptions::default() };
            client.release(NAMESPACE, volume, consumer, options).await.map(|()| none)
        }
        Call::Unmount => {
            let options = UnmountOptions { deadline_usec, ..UnmountOptions::default() };
            client.unmount(NAMESPACE, volume, consumer, options).await.map(|()| none)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_of_a_seed_draws_the_same_again() {
        let choices = |seed, number| {
            let (mut dice, volumes) = (Dice::new(seed, number), volumes_of(1));
            (0..100).map(|_| Choice::draw(&mut dice, &volumes, crate::HELD)).collect::<Vec<_>>()
        };
        let first = choices(7, 101);
        assert_eq!(choices(7, 101), first);
        assert!(choices(8, 101) != first && choices(7, 102) != first);
        let waits = first.iter().filter(|choice| !choice.wait.is_zero()).count();
        assert!((20..50).contains(&waits), "{waits} of 100 claims wait");
        assert!(VOLUMES.iter().all(|volume| first.iter().any(|choice| choice.volume == *volume)));
    }
}
