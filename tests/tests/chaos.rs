//! Everything at once: callers who mount and unmount, csid and the plugin killed, codes and delays. Whatever happened,
//! the plugin saw no rule broken, and in the end everything can be unmounted and nothing is left.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use csid_client::{Client, Error, Kind, MountFilter, MountOptions, Restore, Target, UnmountOptions};
use csid_tests::ask::*;
use csid_tests::kernel;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{count, eventually, world};
use rustix::mount::{UnmountFlags, unmount as unmount_now};

const LASTS: Duration = Duration::from_secs(20);
const CALLERS: u64 = 6;
const VOLUMES: u64 = 5;

/// Small, and the same at every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

fn rules(dice: &mut Dice) -> Vec<Rule> {
    let rpcs = ["NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume", "NodeUnstageVolume"];
    let mut rules = Vec::new();
    for _ in 0..dice.below(4) {
        let code = 1 + dice.below(16) as i32;
        let act = match dice.below(5) {
            0 => Act::Fail(code),
            1 => Act::FailAfter(code),
            2 => Act::Delay(dice.below(1500)),
            3 => Act::DelayAfter(dice.below(1500)),
            _ => Act::Stubborn(dice.below(1500)),
        };
        rules.push(Rule { times: 1 + dice.below(3), ..Rule::always(dice.of(&rpcs), act) });
    }
    rules
}

/// One caller's life; what he was told, by kind.
async fn caller(
    socket: std::path::PathBuf,
    seed: u64,
    end: Instant,
    told: Arc<Mutex<BTreeMap<String, usize>>>,
) {
    let mut dice = Dice(seed);
    let mut client: Option<Client> = None;
    while Instant::now() < end {
        let Some(connected) = &client else {
            client = Client::connect(&Target::Socket(socket.clone())).await.ok();
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        let volume = format!("v{}", dice.below(VOLUMES));
        let consumer = format!("c{}", dice.below(3));
        let deadline = Duration::from_millis(200 + dice.below(2500));
        let result = if dice.below(2) == 0 {
            let restore = if consumer == "c0" { Restore::Auto } else { Restore::Hold };
            let options = MountOptions { restore: Some(restore), ..shared(&volume) };
            mount(connected, &consumer, within(deadline, options)).await.map(drop)
        } else {
            let deadline_usec = Some(deadline.as_micros() as u64);
            let options = UnmountOptions { deadline_usec, ..UnmountOptions::default() };
            connected.unmount(NAMESPACE, &volume, &consumer, options).await
        };
        let word = match &result {
            Ok(()) => "answered".to_owned(),
            Err(Error::Csid(error)) => {
                assert_ne!(error.kind, Kind::Internal, "{error}");
                error.kind.name().to_owned()
            }
            Err(Error::Disconnected(_)) => "cut off".to_owned(),
            Err(other) => panic!("{other:?}"),
        };
        if word == "cut off" {
            client = None;
        }
        *told.lock().unwrap().entry(word).or_default() += 1;
    }
}

fn chaos(seed: u64) {
    world(async move |w| {
        w.add_plugin_with("p", "rpc-deadline = \"1s\"").await;
        w.start().await;
        let mut dice = Dice(seed);
        let end = Instant::now() + LASTS;
        let told = Arc::<Mutex<BTreeMap<String, usize>>>::default();
        let callers: Vec<_> = (0..CALLERS)
            .map(|n| tokio::spawn(caller(w.socket(), seed * 1000 + n + 1, end, told.clone())))
            .collect();
        let (mut csid_kills, mut plugin_kills, mut reboots, mut thefts) = (0, 0, 0, 0);
        while Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(200 + dice.below(1200))).await;
            match dice.below(8) {
                0 => {
                    w.reboot().await;
                    assert!(w.launch(&[]).await, "csid starts again");
                    reboots += 1;
                }
                1 => {
                    // Somebody takes a mount away.
                    let published = kernel::below(&w.path("state/plugins/p/publish")).unwrap();
                    if let Some(mount) = published.first() {
                        thefts += usize::from(unmount_now(&mount.point, UnmountFlags::DETACH).is_ok());
                    }
                }
                2 | 3 => {
                    w.kill();
                    assert!(w.launch(&[]).await, "csid starts again");
                    csid_kills += 1;
                }
                4 => {
                    w.plugin("p").kill();
                    tokio::time::sleep(Duration::from_millis(dice.below(500))).await;
                    w.plugin("p").start().await;
                    plugin_kills += 1;
                }
                _ => w.plugin("p").rules(rules(&mut dice)),
            }
        }
        w.plugin("p").honest();
        for caller in callers {
            caller.await.unwrap();
        }
        let client = w.client().await;
        for volume in 0..VOLUMES {
            for consumer in 0..3 {
                let (volume, consumer) = (format!("v{volume}"), format!("c{consumer}"));
                unmount(&client, &volume, &consumer)
                    .await
                    .unwrap_or_else(|e| panic!("{volume} {consumer}: {e}"));
            }
        }
        eventually("no row", async || client.list_mounts(MountFilter::default()).await.unwrap().is_empty())
            .await;
        w.nothing_left(&client).await;
        for (word, number) in told.lock().unwrap().iter() {
            count(&format!("calls: {word}"), *number);
        }
        count("kills of csid", csid_kills);
        count("reboots", reboots);
        count("mounts taken away", thefts);
        count("kills of the plugin", plugin_kills);
        count("volume RPCs without a rule broken", w.plugin("p").assert_rules());
    });
}

#[test]
fn chaos_one() {
    chaos(1);
}

#[test]
fn chaos_two() {
    chaos(2);
}
