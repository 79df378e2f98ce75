//! Many seeds, the breaks that the judge has to see, and a seed that repeats its scene.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use csi_proto::cluster::v1::Hello;
use csi_proto::identity::Role;
use csid::store::registry::VolumeName;
use csid_etcd::double::Double;
use csid_etcd::{Expected, Guard, RowKey, Write};
use sha2::{Digest, Sha256};

use super::breaks::{Break, Broken, EARLY_DETACH, TWO_WRITERS};
use super::dice::Dice;
use super::faults::Faults;
use super::network::{Network, Place};
use super::scene::{Outcome, play};
use super::server;
use crate::joins::OpenJoin;
use crate::rows::{self, SessionRow};

/// Seeds of a run without tests/simulation.
const SEEDS: u64 = 20;
/// Seeds from which on each kind of fault has to occur.
const ALL_KINDS: u64 = 1000;
/// Seeds within which each break has to be seen.
const BROKEN: u64 = 1000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// What many seeds have done.
#[derive(Default)]
struct Played {
    faults: Faults,
    grants: AtomicU64,
    calls: AtomicU64,
    /// The least seed that has failed.
    failed: Mutex<Option<(u64, Outcome)>>,
}

/// Plays seeds on all processors until one fails.
fn play_all(seeds: std::ops::Range<u64>, broken: Option<Broken>) -> Played {
    let next = AtomicU64::new(seeds.start);
    let played = Played::default();
    let play_some = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return;
            }
            let outcome = play(seed, broken, false);
            played.faults.add(&outcome.faults);
            played.grants.fetch_add(outcome.grants, Ordering::Relaxed);
            played.calls.fetch_add(outcome.calls, Ordering::Relaxed);
            if outcome.violation.is_some() {
                next.store(seeds.end, Ordering::Relaxed);
                let mut failed = played.failed.lock().unwrap();
                if failed.as_ref().is_none_or(|(of, _)| *of > seed) {
                    *failed = Some((seed, outcome));
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(play_some);
        }
    });
    played
}

/// Returns the time that this process has had of processors.
fn processor() -> Duration {
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(used.tv_sec as u64, used.tv_nsec as u32)
}

#[test]
fn cluster_keeps_its_rules_under_all_seeds() {
    if let Some(seed) = number("CSID_SIM_SEED") {
        let outcome = play(seed, None, true);
        println!("{}CSID_SIM_SEED={seed}: {outcome}", outcome.faults);
        assert_eq!(outcome.violation, None);
        return;
    }
    let (seeds, first) = (number("CSID_SIM_SEEDS").unwrap_or(SEEDS), number("CSID_SIM_FIRST").unwrap_or(0));
    let (begun, used) = (Instant::now(), processor());
    let played = play_all(first..first + seeds, None);
    if let Some((seed, first)) = played.failed.into_inner().unwrap() {
        // The first time it kept no log.
        let outcome = play(seed, None, true);
        let last = outcome.log.len().saturating_sub(120);
        println!("{}\nCSID_SIM_SEED={seed}: {first}\nonce more: {outcome}", outcome.log[last..].join("\n"));
        panic!("CSID_SIM_SEED={seed} breaks a rule");
    }
    let (took, used) = (begun.elapsed().as_secs_f64(), (processor() - used).as_secs_f64());
    let (grants, calls) = (played.grants.into_inner(), played.calls.into_inner());
    println!("{}", played.faults);
    println!(
        "{seeds} seeds in {took:.1} s, {:.1} ms of a processor each; {grants} grants, {calls} controller calls",
        used * 1000.0 / seeds as f64
    );
    let missing = played.faults.missing();
    assert!(seeds < ALL_KINDS || missing.is_empty(), "kinds of faults that have not occurred: {missing:?}");
}

/// The judge is not blind. What it has seen it sees again.
#[test]
fn each_break_is_seen() {
    // Another rule is seen sooner, so these take a program that is optimised: tests/simulation.
    let by = |rule| if cfg!(tokio_unstable) { rule } else { "" };
    let mut breaks = vec![
        (Break::EarlyDetached, EARLY_DETACH),
        (Break::ForcedRelease, by(TWO_WRITERS)),
        (Break::ForcedRelease, EARLY_DETACH),
        (Break::NoCompare, by(TWO_WRITERS)),
        (Break::StaleCalls, ""),
    ];
    use crate::folding::broken::FoldFault;
    let of_fold = [
        FoldFault::NodesUncompared,
        FoldFault::OneRefusal,
        FoldFault::OutcomesUnwritten,
        FoldFault::SameRecord,
        FoldFault::QueuePassed,
    ];
    breaks.extend(of_fold.map(|fault| (Break::Fold(fault), "")));
    // It needs a lost host and a second one, so it takes a program that is optimised: tests/simulation.
    if cfg!(tokio_unstable) {
        breaks.push((Break::SlowPlugin, ""));
    }
    let first = number("CSID_SIM_FIRST").unwrap_or(0);
    for (of, rule) in breaks {
        let broken = Broken { of, rule };
        let found = play_all(first..first + BROKEN, Some(broken)).failed.into_inner().unwrap();
        let (seed, outcome) =
            found.unwrap_or_else(|| panic!("{broken:?} was not seen in {BROKEN} seeds from {first} on"));
        println!("{broken:?}: seed {seed}: {outcome}");
        if cfg!(tokio_unstable) {
            let again = play(seed, Some(broken), true).violation;
            assert_eq!(again, outcome.violation, "{broken:?}: seed {seed} does not repeat its violation");
        }
    }
}

/// Prints a digest of what happens in the seed `CSID_SIM_DIGEST`.
#[test]
fn digest_of_a_seed_is_printed() {
    let Some(seed) = number("CSID_SIM_DIGEST") else { return };
    println!("\ndigest {}", digest(seed));
}

fn digest(seed: u64) -> String {
    let log = play(seed, None, true).log.join("\n");
    Sha256::digest(log).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Without tokio's cfg the order of some wakes is tokio's own: tests/simulation has it.
#[cfg(tokio_unstable)]
#[test]
fn seed_repeats_its_scene_in_another_process() {
    const DIGEST: &str = "simulation::tests::digest_of_a_seed_is_printed";
    let own = std::env::current_exe().unwrap();
    for seed in 0..20 {
        let mut other = std::process::Command::new(&own);
        other.args([DIGEST, "--exact", "--nocapture", "--test-threads=1"]);
        let output = other.env("CSID_SIM_DIGEST", seed.to_string()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let found = text.lines().find_map(|line| line.strip_prefix("digest "));
        assert_eq!(found, Some(digest(seed).as_str()), "CSID_SIM_SEED={seed} has two scenes");
    }
}

/// The first row is of an earlier session. The second one is the join's own, and comes late.
#[tokio::test(start_paused = true)]
async fn late_row_of_a_join_without_outcome_goes() {
    let double = Double::default();
    tokio::spawn(double.clone().run());
    server::init(&double).await;
    let server = server::start(&double, &Arc::new(Network::new(Dice::new(1), Arc::default())), 0);
    let cluster = &server.service.cluster;
    let here = cluster.presence.subscribe().wait_for(Option::is_some).await.unwrap().clone().unwrap();
    let node = RowKey::Node("n1".into());
    let mut join = cluster.joins.begin("n1");
    let guard = Guard { key: node.clone(), is: Expected::Absent };
    join.open = Some(OpenJoin { node: guard, server: here.id.clone() });
    drop(join);
    let key = RowKey::Session { node: "n1".into(), server: here.id.clone() };
    for which in ["earlier", "late"] {
        let row = rows::write(&key, &SessionRow { since_usec: 1, boot: which.into() }).unwrap();
        let write = Write { key: key.clone(), value: Some(row), lease: here.lease };
        cluster.rows.write(&[], vec![write]).await.unwrap();
        assert!(cluster.rows.read(&key).await.unwrap().is_some());
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert!(cluster.rows.read(&key).await.unwrap().is_none(), "the {which} row stays");
        // A member of etcd may stand still for any time.
        tokio::time::sleep(Duration::from_secs(600)).await;
    }
    assert_eq!(cluster.joins.open().len(), 1, "the join may yet write");
    let write = Write { key: node, value: Some(Vec::new()), lease: 0 };
    cluster.rows.write(&[], vec![write]).await.unwrap();
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(cluster.joins.open(), [], "the node's row is another");
}

#[tokio::test(start_paused = true)]
async fn volume_whose_task_panics_has_a_later_one() {
    let double = Double::default();
    tokio::spawn(double.clone().run());
    server::init(&double).await;
    let server = server::start(&double, &Arc::new(Network::new(Dice::new(1), Arc::default())), 0);
    let tasks = &server.service.driving.tasks;
    let name = VolumeName { namespace: "default".into(), volume: "v".into() };
    let reserved = tasks.reserve(&name).unwrap();
    let task = tokio::spawn(async move {
        let _task = reserved.begin();
        panic!("a fault of the test");
    });
    assert!(task.await.unwrap_err().is_panic());
    assert_eq!(tasks.running(), 0);
    assert!(tasks.reserve(&name).is_some(), "no later task begins");
}

/// etcd is away, and comes back a while after the server has noticed that. Its leases do not end meanwhile, as without a majority.
#[tokio::test(start_paused = true)]
async fn server_is_back_soon_after_its_etcd() {
    for away in [0, 100, 1000, 2900] {
        let double = Double::default();
        server::init(&double).await;
        let network = Arc::new(Network::new(Dice::new(1), Arc::default()));
        let server = server::start(&double, &network, 0);
        let mut here = server.service.cluster.presence.subscribe();
        here.wait_for(Option::is_some).await.unwrap();
        network.part(Place::Server(0), Place::Etcd);
        here.wait_for(Option::is_none).await.unwrap();
        tokio::time::sleep(Duration::from_millis(away)).await;
        network.heal(Place::Server(0), Place::Etcd);
        let healed = tokio::time::Instant::now();
        here.wait_for(Option::is_some).await.unwrap();
        let took = healed.elapsed();
        assert!(took <= Duration::from_millis(1500), "away for {away} ms more: it took {took:?}");
        server.kill();
    }
}

/// etcd is away from the moment of a Hello on. The node may join another server as soon as this one says that.
#[tokio::test(start_paused = true)]
async fn hello_ends_with_the_presence_of_its_server() {
    let double = Double::default();
    server::init(&double).await;
    let network = Arc::new(Network::new(Dice::new(1), Arc::default()));
    let server = server::start(&double, &network, 0);
    let cluster = &server.service.cluster;
    cluster.presence.subscribe().wait_for(Option::is_some).await.unwrap();
    network.part(Place::Server(0), Place::Etcd);
    let begun = tokio::time::Instant::now();
    let text = |text: &str| text.to_owned();
    let hello = Hello {
        cluster: text(server::CLUSTER),
        journal_id: text("j"),
        machine_id: text("m"),
        boot: text("b"),
        version: text("0.1.0"),
        protocol_min: 1,
        protocol_max: 1,
        ..Hello::default()
    };
    let node = server::identity(Role::Node, "n1");
    let mut under_way = cluster.joins.begin("n1");
    let Err(error) = cluster.join(&node, &hello, &mut under_way).await else { panic!("the node has joined") };
    assert!(error.is_unavailable(), "{error}");
    assert!(begun.elapsed() <= Duration::from_millis(10_100), "it took {:?}", begun.elapsed());
}
