//! Histories of a whole cluster: real etcd, servers, links and hosts, a seeded load of clients, and faults. porcupine judges what the clients
//! saw (tests/go/histories), and a witness judges each host's calls to its plugin. `$CSID_FAULTS` is the number of faults, `$CSID_SEED`
//! repeats the choices of a run. What the processes do with them is not repeated.

#[path = "../../../server/tests/cluster/certificates.rs"]
#[allow(dead_code, reason = "the tests of the servers use more of it")]
mod certificates;
#[path = "../../../etcd/tests/etcd/cluster.rs"]
#[allow(dead_code, reason = "the tests of the registry use more of it")]
mod etcd;
mod faults;
mod history;
mod host;
mod load;
#[path = "../../../server/tests/cluster/site.rs"]
#[allow(dead_code, reason = "the tests of the servers use more of it")]
mod site;

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use csid_tests::dice::Dice;
use csid_tests::world::{eventually, world};
use rustix::process::Signal;
use tokio::sync::mpsc::unbounded_channel;

use crate::faults::{Faults, own_network};
use crate::history::{History, Line, Outcome};
use crate::host::{Host, host};
use crate::load::{Shared, VOLUMES};
use crate::site::Site;

/// The hosts at the start, and at the end.
const HOSTS: [usize; 2] = [2, 5];
/// The faults in `make test`.
const FAULTS: usize = 20;

/// Runs go on the module of the checker. Returns whether it was a success, and prints what it said.
fn go(arguments: &[&str]) -> bool {
    let module = Path::new(env!("CARGO_MANIFEST_DIR")).join("go/histories");
    let output = Command::new("go").arg("-C").arg(module).args(arguments).output().expect("go is installed");
    println!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    output.status.success()
}

/// Judges a history. Returns whether it is linearizable, and what the checker says.
fn judge(program: &Path, history: &Path) -> (bool, String) {
    let lines = std::fs::File::open(history).expect("the history");
    let output = Command::new(program).stdin(lines).output().expect("the checker");
    let said = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn checker_is_red_for_wrong_histories() {
    assert!(go(&["test", "-count=1", "./..."]));
}

#[test]
fn cluster_with_faults_is_linearizable() {
    // The world keeps the times of a test. The hosts have worlds of their own.
    world(async |w| {
        let begun = Instant::now();
        let seed = Dice::seed();
        let count = std::env::var("CSID_FAULTS").map_or(FAULTS, |text| text.parse().expect("a number"));
        eprintln!("histories: CSID_SEED={seed}, {count} faults");
        let checker = w.path("checker");
        assert!(go(&["build", "-o", checker.to_str().unwrap(), "."]));

        own_network();
        let mut site = Site::start_on(3, 3, "").await;
        for (volume, mode) in VOLUMES {
            site.register(volume, mode).await;
        }
        let history = Arc::new(History::create(&w.path("history.jsonl")));
        let shared = Arc::new(Shared::new(Arc::clone(&history), seed));
        let mut hosts: Vec<Host> = Vec::new();
        let mut faults = Faults::new(seed);
        let start = |hosts: &mut Vec<Host>, site: &Site| {
            let name = format!("n{}", hosts.len() + 1);
            let node = site.node(&name);
            let (orders, taken) = unbounded_channel();
            let (shared, link, of) = (Arc::clone(&shared), node.run().to_owned(), name.clone());
            let thread = std::thread::Builder::new().name(name.clone());
            let run = move || world(async move |w| Box::pin(host(w, &of, &link, shared, taken)).await);
            hosts.push(Host { name, node, orders, thread: thread.spawn(run).expect("a thread") });
        };
        while hosts.len() < HOSTS[0] {
            start(&mut hosts, &site);
        }
        eventually("the first hosts have claims", async || shared.taken.load(Ordering::SeqCst) > 10).await;
        while hosts.len() < HOSTS[1] {
            start(&mut hosts, &site);
        }
        eventually("all hosts run", async || shared.hosts.load(Ordering::SeqCst) == HOSTS[1]).await;
        println!("{} hosts after {:.1} s", HOSTS[1], begun.elapsed().as_secs_f64());

        for _ in 0..count {
            faults.next(&mut site, &mut hosts, &shared).await;
            faults.read(&site, &shared).await;
        }
        // All faults have ended. Every call comes to its end, and every host lets all volumes go.
        let ended = Instant::now();
        shared.stop.store(true, Ordering::SeqCst);
        for host in hosts {
            let Host { name, node: _node, orders, thread } = host;
            drop(orders);
            eventually(&format!("{name} is at rest"), async || thread.is_finished()).await;
            if thread.join().is_err() {
                keep(&history.path, seed);
                panic!("{name} failed");
            }
        }
        eventually("the servers have no claim", async || {
            faults.holders(&site).await.iter().all(|(_, of)| of.is_empty())
        })
        .await;
        println!("at rest {:.1} s after the last fault", ended.elapsed().as_secs_f64());
        history.write(&Line::event("rest", history.now()));
        faults.read(&site, &shared).await;

        let (is_linearizable, said) = judge(&checker, &history.path);
        if !is_linearizable {
            keep(&history.path, seed);
        }
        assert!(is_linearizable, "seed {seed}: {said}");
        eprintln!("    {said}    {}", faults.summary(&history));
        let (taken, refused, unknown) = history.counts();
        eprintln!(
            "    {taken} claims granted, {refused} refused, {unknown} outcomes unknown, in {:.0} s",
            begun.elapsed().as_secs_f64()
        );
        assert!(taken > 20 && refused > 0, "the load has shown little");

        // The checker sees a second writer in this very history.
        let doubled = w.path("doubled.jsonl");
        std::fs::copy(&history.path, &doubled).unwrap();
        let mut more = History::append(&doubled, &history);
        let now = history.now();
        for (client, who) in [(901, "n1/one"), (902, "n2/two")] {
            let [start, end] = [2 * client, 2 * client + 1].map(|at| now + at);
            more.add(&Line {
                who: who.into(),
                volume: VOLUMES[0].0.into(),
                single: true,
                end,
                outcome: Some(Outcome::Ok),
                client: client as u32,
                ..Line::event("take", start)
            });
        }
        drop(more);
        let (is_linearizable, said) = judge(&checker, &doubled);
        assert!(!is_linearizable && said.contains("not linearizable"), "two writers were not seen: {said}");
    });
}

/// Keeps a history that shows a failure.
fn keep(history: &Path, seed: u64) {
    let kept = std::env::temp_dir().join(format!("csid-history-{seed}.jsonl"));
    let _ = std::fs::copy(history, &kept);
    eprintln!("the history is {}", kept.display());
}

/// Stops a program for a time.
async fn stopped(signal: impl Fn(Signal), time: Duration) {
    signal(Signal::STOP);
    tokio::time::sleep(time).await;
    signal(Signal::CONT);
}
