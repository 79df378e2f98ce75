//! Histories of a whole cluster: real etcd, servers, links and hosts, a seeded load of clients, and faults. porcupine judges what the clients
//! saw (tests/go/histories), and csi-witness the calls to the plugins of all hosts. `$CSID_FAULTS` is the number of faults, `$CSID_SEED`
//! repeats the choices of a run. What the processes do with them is not repeated.

mod breaks;
mod etcd_faults;
mod faults;
mod flat;
mod held;
mod history;
mod host;
mod joins;
mod load;
mod pauses;
mod rest;
mod samples;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CStr;
use std::fmt::Display;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use csi_proto::cluster::v1::change_ask::What;
use csi_witness::report::Report;
use csi_witness::{Event, Hosts};
use csid_tests::backend::{Backend, Volume as Stored};
use csid_tests::clock::Clock;
use csid_tests::cluster as site;
use csid_tests::dice::Dice;
use csid_tests::etcd::{Cluster as Etcd, Place};
use csid_tests::fault::Fault as ServerFault;
use csid_tests::network::Network;
use csid_tests::world::{World, eventually, world_within};
use rustix::mount::{MountFlags, mount};
use rustix::process::Signal;
use tokio::sync::mpsc::unbounded_channel;
use tokio::task::JoinHandle;

use crate::faults::{Faults, holders};
use crate::history::{Counts, History};
use crate::host::{CLIENTS, CONTROLLER, Host, Places, host, log, node_id};
use crate::load::{ATTACHING, Shared, VOLUMES};
use crate::site::{Programs, Site};

/// The hosts with clients at the start, and at the end.
const HOSTS: [usize; 2] = [2, 5];
/// The faults in `make test`: each kind once.
const FAULTS: usize = faults::ALL.len();
/// The members of etcd.
const MEMBERS: usize = 3;
/// etcd's own times, in milliseconds, as docs/cluster.md leaves them.
const ELECTION: [&str; 4] = ["--heartbeat-interval", "100", "--election-timeout", "1000"];
/// The ports of a member of etcd, for clients and peers, and of a server.
const PORTS: [u16; 3] = [2379, 2380, 8443];

/// The CSI rules of which the witness has to see something over the hosts of each plugin.
const JUDGED: [u8; 6] = [18, 21, 22, 24, 25, 34];
/// The same, where a controller attaches.
const JUDGED_OF_CONTROLLERS: [u8; 2] = [20, 23];

/// The disk of a member of etcd. In half an hour of load its log has up to four files of 64 MB.
const DISK: &CStr = c"size=512m";

/// One of so many calls at most has an unknown outcome. A fault of some seconds leaves a client one open claim, and one open end for each pause of
/// its tries. On a busy machine the calls in between are fewer.
const UNKNOWN: usize = 4;
/// How long a client has a volume at most.
const HELD: Duration = Duration::from_millis(150);
/// How long the servers may take to have no claim of hosts that are at rest.
const SOON: Duration = Duration::from_secs(60);
/// How long a run may take for each fault, and for what is before and after all faults.
const TIME_OF_FAULT: Duration = Duration::from_secs(60);
const TIME_BESIDES: Duration = Duration::from_secs(300);
/// How long a host may take to come to rest.
const REST: Duration = Duration::from_secs(160);

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

/// A cluster under load.
struct Run {
    seed: u64,
    checker: PathBuf,
    site: Site,
    network: Network,
    /// The clocks of the servers.
    clocks: Vec<Clock>,
    /// The edges of the servers.
    server_faults: Vec<ServerFault>,
    shared: Arc<Shared>,
    /// The first one runs the controller of the plugin that attaches.
    hosts: Vec<Host>,
    places: Places,
    /// The disks of the members of etcd.
    disks: Vec<PathBuf>,
    /// What writes the sessions of hosts into the history.
    joins: JoinHandle<()>,
    /// The fault that each csid has on purpose. Empty: none.
    csid_break: &'static str,
    /// How long each host may run.
    limit: Duration,
}

impl Run {
    /// Starts members of etcd and servers, each on a machine of its own.
    async fn start(w: &World, seed: u64, servers: usize, held: Duration) -> Run {
        let checker = w.path("checker");
        assert!(go(&["build", "-o", checker.to_str().unwrap(), "."]));
        let mut network = Network::new();
        let [for_clients, for_peers, for_nodes] = PORTS;
        let mut place = |name: String| {
            let address = network.add(&name);
            let [client, peer] = [for_clients, for_peers].map(|port| (address, port).into());
            let disk = w.path(&name);
            std::fs::create_dir(&disk).expect("a directory");
            mount("tmpfs", &disk, "tmpfs", MountFlags::empty(), DISK).expect("a disk");
            Place { client, peer, network: Some(network.namespace(&name)), disk: Some(disk) }
        };
        let places: Vec<_> = (0..MEMBERS).map(|n| place(format!("m{n}"))).collect();
        let disks = places.iter().filter_map(|place| place.disk.clone()).collect();
        let etcd = Etcd::start_at(&places, &ELECTION).await;
        let grants = site::GRANTS.replace("controller:p", &format!("controller:{ATTACHING}"));
        let section = format!("endpoints = {:?}\n{grants}", etcd.endpoints());
        let mut networks = BTreeMap::new();
        let mut address = |name: String| -> SocketAddr {
            let address = network.add(&name);
            networks.insert(name.clone(), network.namespace(&name));
            (address, for_nodes).into()
        };
        let addresses: Vec<_> = (0..servers).map(|n| address(format!("s{n}"))).collect();
        let mut site = Site::at(Programs::default(), etcd, &addresses, networks, "", &section);
        let clocks: Vec<_> = (0..servers).map(|n| Clock::new(&w.path(&format!("clock-s{n}")))).collect();
        site.environments = clocks.iter().map(|clock| clock.environment().to_vec()).collect();
        let server_faults = site.start_with_faults();
        let places = Places { storage: w.path("storage"), logs: w.path("witnesses") };
        std::fs::create_dir(&places.logs).expect("a directory");
        let stored = Backend::new(&places.storage);
        std::fs::create_dir_all(stored.data_directory()).expect("the storage");
        for volume in VOLUMES {
            let mut ask = site::register(volume.name, volume.access_mode);
            if let Some(What::Register(register)) = &mut ask.what {
                register.plugin = volume.plugin.into();
            }
            site.operator(0, "all").change(ask).await.expect("the registration");
            if volume.attaches() {
                stored.put(&Stored::provisioned(&volume.external_id(), 4 << 20)).expect("the storage");
            }
        }
        let history = Arc::new(History::create(&w.path("history.jsonl")));
        let shared = Arc::new(Shared::new(history, seed, held));
        let hosts = Vec::new();
        let joins = joins::watch(site.etcd.endpoints().remove(0), Arc::clone(&shared.history));
        let mut run = Run {
            seed,
            checker,
            site,
            network,
            clocks,
            server_faults,
            shared,
            hosts,
            places,
            disks,
            joins,
            csid_break: "",
            limit: w.limit,
        };
        run.start_host(CONTROLLER.to_owned());
        let row = format!("/csid/v1/plugin/{ATTACHING}");
        eventually("the servers know the controller", async || {
            !run.site.raw().await.below(&row).await.is_empty()
        })
        .await;
        run
    }

    /// Starts hosts until so many have clients. Waits until all of them run, and claims were granted.
    async fn hosts(&mut self, count: usize) {
        while self.hosts.len() <= count {
            self.start_host(format!("n{}", self.hosts.len()));
        }
        eventually("all hosts run", async || {
            let (running, taken) = (&self.shared.hosts, &self.shared.taken);
            running.load(Ordering::SeqCst) == self.hosts.len() && taken.load(Ordering::SeqCst) > 10
        })
        .await;
    }

    fn start_host(&mut self, name: String) {
        self.network.add(&name);
        self.site.networks.insert(name.clone(), self.network.namespace(&name));
        let node = self.site.node(&name);
        let (orders, taken) = unbounded_channel();
        let (shared, link, of) = (Arc::clone(&self.shared), node.run().to_owned(), name.clone());
        let thread = std::thread::Builder::new().name(name.clone());
        let (csid_break, limit, places) = (self.csid_break, self.limit, self.places.clone());
        let run = move || {
            world_within(limit, async move |w| {
                w.environment.insert("CSID_BREAK".into(), csid_break.into());
                Box::pin(host(w, &of, &link, &places, shared, taken)).await;
            });
        };
        self.hosts.push(Host { name, node, orders, thread: thread.spawn(run).expect("a thread") });
    }

    /// Has clients keep what they get. Waits until each client has a volume, and clients, etcd and the storage agree on all holders.
    async fn agree(&self) {
        self.shared.keeps.store(true, Ordering::SeqCst);
        let mut differs = String::new();
        let agreed = tokio::time::timeout(SOON, async {
            loop {
                differs = self.disagreement().await;
                if differs.is_empty() {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        if agreed.await.is_err() {
            keep(&self.shared.history.path, self.seed);
            panic!("in {SOON:?} clients, etcd and the storage do not agree: {differs}");
        }
    }

    /// Says that a client has no volume, or what volume has other holders by clients, etcd or the storage. Empty: neither.
    async fn disagreement(&self) -> String {
        let had = self.shared.had.lock().expect("the volumes").clone();
        if had.len() < (self.hosts.len() - 1) * CLIENTS as usize {
            return format!("clients have {had:?} alone");
        }
        for volume in VOLUMES {
            let of_volume = had.iter().filter(|(name, _)| *name == volume.name);
            let had: BTreeSet<String> = of_volume.map(|(_, who)| who.clone()).collect();
            let held: BTreeSet<String> = holders(&self.site, volume.name).await.into_iter().collect();
            let nodes = had.iter().map(|who| node_id(who.split('/').next().expect("NODE/CONSUMER")));
            let due: BTreeSet<String> = nodes.filter(|_| volume.attaches()).collect();
            let attached = self.attached(&volume.external_id());
            let strays = self.shared.strays.lock().expect("the strays");
            let strays = strays.iter().filter(|stray| stray.volume == volume.name);
            let strays: BTreeSet<String> = strays.map(|stray| stray.node.clone()).collect();
            if held != had || !attached.is_superset(&due) || !(&attached - &due).is_subset(&strays) {
                return format!(
                    "{} is had by {had:?}, held by {held:?}, attached to {attached:?}",
                    volume.name
                );
            }
        }
        String::new()
    }

    /// Returns to what nodes a volume is attached, by the storage. Empty for a volume that no controller attaches.
    fn attached(&self, external_id: &str) -> BTreeSet<String> {
        let stored = Backend::new(&self.places.storage).get::<Stored>(external_id).expect("the storage");
        stored.into_iter().flat_map(|stored| stored.attachments.into_keys()).collect()
    }

    /// Returns the logs of a plugin's witnesses on all hosts.
    fn logs(&self, plugin: &str) -> Vec<PathBuf> {
        let hosts = std::fs::read_dir(&self.places.logs).expect("the logs");
        let logs = hosts.map(|host| log(&host.expect("the logs").path(), plugin));
        logs.filter(|log| log.exists()).collect()
    }

    /// Returns what the witness says of the calls to a plugin on all hosts.
    fn report(&self, plugin: &str) -> Report {
        Report::read(&self.logs(plugin)).expect("the witnesses' logs")
    }

    /// Judges the calls to the plugins of all hosts.
    fn judge_calls(&self) {
        let strays = self.shared.strays.lock().expect("the strays");
        for plugin in BTreeSet::from(VOLUMES.map(|volume| volume.plugin)) {
            let (logs, report) = (self.logs(plugin), self.report(plugin));
            let mut rules = JUDGED.to_vec();
            if plugin == ATTACHING {
                rules.extend(JUDGED_OF_CONTROLLERS);
            }
            let checked =
                |rule: u8| report.rules.iter().find(|row| row.rule == rule).map_or(0, |row| row.checked);
            let checked: Vec<_> = rules.into_iter().map(|rule| (rule, checked(rule))).collect();
            let counts: Vec<_> = checked.iter().map(|(rule, count)| format!("{rule}: {count}")).collect();
            eprintln!(
                "    witness of {plugin} on {} hosts: {} calls, {} breaches, checks by rule: {}",
                logs.len(),
                report.calls,
                report.breaches.len(),
                counts.join(", ")
            );
            let mut early = early(&logs);
            // An attach elsewhere fails while a stray of the volume is in its way.
            let is_stray = |id: &str| {
                VOLUMES
                    .iter()
                    .any(|of| of.external_id() == id && strays.iter().any(|stray| stray.volume == of.name))
            };
            early.retain(|(rpc, volume)| rpc != "ControllerPublishVolume" || !is_stray(volume));
            if !report.breaches.is_empty() || !early.is_empty() {
                self.keep_logs(&logs);
            }
            assert!(report.breaches.is_empty(), "seed {}: {plugin}: {report}", self.seed);
            assert!(early.is_empty(), "seed {}: the plugin does not allow {early:?}", self.seed);
            let is_shown = |(_, count): &(u8, u64)| *count >= HOSTS[1] as u64;
            assert!(checked.iter().all(is_shown), "the load has shown little of {plugin}");
        }
        for volume in VOLUMES {
            assert_eq!(self.attached(&volume.external_id()), BTreeSet::new(), "{} is attached", volume.name);
        }
    }

    /// Keeps the history and logs that show a failure.
    fn keep_logs(&self, logs: &[PathBuf]) {
        keep(&self.shared.history.path, self.seed);
        for log in logs {
            let name = log.strip_prefix(&self.places.logs).expect("a log").with_extension("");
            keep(log, format!("{}-{}", self.seed, name.display().to_string().replace('/', "-")));
        }
    }

    /// Ends the load of hosts that need not come to rest. Each call has its line then.
    fn break_off(&mut self) {
        self.joins.abort();
        self.shared.is_broken.store(true, Ordering::SeqCst);
        self.shared.stop.store(true, Ordering::SeqCst);
        for Host { orders, thread, .. } in self.hosts.drain(..) {
            drop(orders);
            assert!(thread.join().is_ok(), "a host has failed");
        }
    }

    /// Judges how much the load has shown.
    fn judge_load(&self) {
        let history = &self.shared.history;
        let counts = history.counts();
        // Past the capture of the test harness.
        let _ = writeln!(std::io::stderr(), "    {counts}");
        let Counts { calls, granted, refused, unknown, waits_granted, waits_refused } = counts;
        assert!(granted > 20 && refused > 0, "the load has shown little: {counts}");
        assert!(waits_granted > 0 && waits_refused > 0, "the load has shown little of waits: {counts}");
        assert!(unknown * UNKNOWN <= calls, "seed {}: too much is unknown: {counts}", self.seed);
        for host in (1..=HOSTS[1]).map(|n| format!("n{n}")) {
            assert!(history.granted(&host) > 0, "seed {}: no claim of {host} was granted", self.seed);
        }
    }
}

#[test]
fn cluster_with_faults_is_linearizable() {
    let count = std::env::var("CSID_FAULTS").map_or(FAULTS, |text| text.parse().expect("a number"));
    world_within(TIME_BESIDES + TIME_OF_FAULT * count as u32, async move |w| {
        let begun = Instant::now();
        let seed = Dice::seed();
        eprintln!("    CSID_SEED={seed}, {count} faults");
        let mut run = Run::start(w, seed, 3, HELD).await;
        run.shared.uses.store(true, Ordering::SeqCst);
        let mut faults = Faults::new(seed);
        for hosts in HOSTS {
            run.hosts(hosts).await;
        }
        println!("{} hosts after {:.1} s", HOSTS[1], begun.elapsed().as_secs_f64());
        for _ in 0..count {
            faults.next(&mut run).await;
            faults.read(&run.site, &run.shared).await;
        }
        run.agree().await;
        run.rest(&faults).await;
        pauses::judge(&run, count);
        run.judge_calls();

        let history = &run.shared.history;
        let (is_linearizable, said) = judge(&run.checker, &history.path);
        if !is_linearizable {
            keep(&history.path, seed);
        }
        assert!(is_linearizable, "seed {seed}: {said}");
        eprintln!("    {}\n    {}", said.trim_end(), faults.summary());
        run.judge_load();
        eprintln!("    {:.0} s", begun.elapsed().as_secs_f64());
    });
}

/// Returns the calls that a plugin has refused as ones that are not allowed in its state, each with its volume: they came before their turn.
fn early(logs: &[PathBuf]) -> Vec<(String, String)> {
    let mut called = BTreeMap::new();
    let mut early = Vec::new();
    for event in Hosts::open(logs).expect("the witnesses' logs") {
        match event.expect("the witnesses' logs").1 {
            Event::Called { call, rpc, request, .. } => {
                let volume = request["volume_id"].as_str().unwrap_or_default().to_owned();
                drop(called.insert(call, (rpc, volume)));
            }
            Event::Ended { call, code, .. } if code.as_deref() == Some("FAILED_PRECONDITION") => {
                early.extend(called.remove(&call));
            }
            _ => {}
        }
    }
    early
}

/// Keeps a file that shows a failure, where no end of a run removes it.
fn keep(file: &Path, name: impl Display) {
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("csid-history-{name}.jsonl"));
    let _ = std::fs::copy(file, &kept);
    eprintln!("kept: {}", kept.display());
}

/// Stops a program for a time.
async fn stopped(signal: impl Fn(Signal), time: Duration) {
    signal(Signal::STOP);
    tokio::time::sleep(time).await;
    signal(Signal::CONT);
}
