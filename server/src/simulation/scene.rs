//! A cluster that is set up by a seed, broken for a while, and left alone until it is at rest.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use csi_proto::cluster::v1::cluster_server::Cluster as Calls;
use csi_proto::cluster::v1::{Capability, ChangeAsk, Register, ReleaseAsk, Spec, change_ask};
use csi_proto::identity::Role;
use csid_etcd::api::KeyValue;
use csid_etcd::double::Double;
use tokio::time::{Instant, sleep};
use tonic::Request;

use super::breaks::{Break, Broken};
use super::client::Client;
use super::dice::Dice;
use super::faults::{Fault, Faults};
use super::modes::{access_mode, is_single};
use super::network::{Network, Place};
use super::node::{Host, Parts, Servers};
use super::operator::Operator;
use super::scheduler::Scheduler;
use super::server::{self, Running, identity};
use super::world::World;
use crate::folding;
use crate::random::seeded;

/// How long the cluster has to come to rest when nothing fails any more. A claim that was given up is tried again after 300 s.
const REST: Duration = Duration::from_secs(900);
/// etcd has done by then what a server that was killed has asked for.
const LATEST: Duration = Duration::from_secs(15);
/// How long the death of a server may wait for claims that share a transaction.
const FOLD: Duration = Duration::from_secs(3);
/// Consumers of a crowd on each node.
const CROWD: usize = 4;
/// The time between two looks of the judge.
const LOOK: Duration = Duration::from_secs(1);

/// What became of a scene.
pub struct Outcome {
    pub violation: Option<String>,
    /// What happened, if it was to be kept.
    pub log: Vec<String>,
    pub faults: Arc<Faults>,
    pub grants: u64,
    pub calls: u64,
    /// The virtual time.
    pub took: Duration,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Outcome { violation, grants, calls, took, .. } = self;
        write!(f, "{violation:?}: {grants} grants, {calls} controller calls, {} s", took.as_secs())
    }
}

/// Plays the scene of a seed. `keeps_log`: the outcome has what happened.
pub fn play(seed: u64, broken: Option<Broken>, keeps_log: bool) -> Outcome {
    seeded::begin(Some(seed));
    folding::broken::begin(match broken {
        Some(Broken { of: Break::Fold(fault), .. }) => Some(fault),
        _ => None,
    });
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_time().start_paused(true);
    // Without it tokio chooses the order of some wakes by itself, and the seed does not repeat the scene.
    #[cfg(tokio_unstable)]
    builder.rng_seed(tokio::runtime::RngSeed::from_bytes(&seed.to_le_bytes()));
    let outcome = builder.build().unwrap().block_on(async {
        let scene = Scene::new(seed, broken, keeps_log).await;
        let begun = Instant::now();
        scene.play().await;
        let world = &scene.world;
        let (grants, calls) = world.counts();
        let (faults, took) = (scene.network.seen.clone(), begun.elapsed());
        Outcome { violation: world.violation(), log: world.log(), faults, grants, calls, took }
    });
    seeded::begin(None);
    folding::broken::begin(None);
    outcome
}

struct Scene {
    dice: Dice,
    network: Arc<Network>,
    double: Double,
    servers: Servers,
    nodes: Vec<Arc<Host>>,
    hosts: Vec<Arc<Host>>,
    volumes: Vec<String>,
    /// Whether many consumers claim the first volume at the same time.
    has_crowd: bool,
    world: World,
    is_broken: Option<Break>,
    /// `None`: claims alone are taken.
    scheduler: Option<Arc<Scheduler>>,
    /// `None`: no node is blocked.
    operator: Option<Arc<Operator>>,
}

impl Scene {
    async fn new(seed: u64, broken: Option<Broken>, keeps_log: bool) -> Scene {
        let is_broken = broken.map(|broken| broken.of);
        let dice = Dice::new(seed);
        let double = Double::default();
        tokio::spawn(double.clone().run());
        server::init(&double).await;
        let seen = Arc::new(Faults::default());
        let network = Arc::new(Network::new(dice.clone(), seen.clone()));
        let world = World::new(double.clone(), dice.clone(), seen, broken, keeps_log);
        let count = 2 + usize::from(dice.once_in(4));
        let servers = (0..count).map(|n| Some(server::start(&double, &network, n))).collect();
        let servers: Servers = Arc::new(Mutex::new(servers));
        // Plugin p attaches its volumes, and q, which has the plain ones, does not.
        let has_slow_plugin = is_broken == Some(Break::SlowPlugin);
        let mut volumes: Vec<String> = match dice.roll(6) {
            0 | 3 if has_slow_plugin => vec!["data".into()],
            0 => vec!["plain".into()],
            1 => vec!["data".into(), "plain".into()],
            2 => vec!["shared".into()],
            3 => vec!["shared-plain".into()],
            _ => vec!["data".into()],
        };
        let has_crowd = dice.once_in(if is_single(&volumes[0]) { 6 } else { 4 }) && !has_slow_plugin;
        if has_crowd && is_single(&volumes[0]) && dice.once_in(2) {
            volumes[0] = if volumes[0] == "plain" { "team-plain" } else { "team" }.into();
        }
        let parts =
            || Parts { network: network.clone(), servers: servers.clone(), world: world.clone(), is_broken };
        let mut uses: Vec<(String, String)> =
            volumes.iter().map(|volume| (volume.clone(), "web".to_owned())).collect();
        if !is_single(&volumes[0]) && dice.once_in(2) {
            uses.push((volumes[0].clone(), "job".to_owned()));
        }
        if has_crowd {
            uses.extend((0..CROWD).map(|n| (volumes[0].clone(), format!("crowd-{n}"))));
        }
        let nodes = 2 + dice.roll(2) as usize;
        let nodes: Vec<_> =
            (0..nodes).map(|n| Host::new(n, &format!("n{n}"), uses.clone(), parts())).collect();
        // A takeover needs a second host.
        let hosts = if has_slow_plugin { 2 } else { 1 + dice.roll(2) as usize };
        let first = nodes.len();
        let hosts: Vec<_> = (0..hosts)
            .map(|n| Host::new(first + n, &format!("c{}", first + n), Vec::new(), parts()))
            .collect();
        let client =
            |name| Client { name, servers: servers.clone(), world: world.clone(), dice: dice.clone() };
        let has_scheduler = !volumes[0].ends_with("plain") && !has_slow_plugin && dice.once_in(4);
        let scheduler = has_scheduler.then(|| {
            Arc::new(Scheduler {
                client: client("the scheduler"),
                volume: volumes[0].clone(),
                stops: AtomicBool::new(false),
                has_ended: AtomicBool::new(false),
            })
        });
        let has_operator = has_crowd && dice.once_in(2);
        let operator = has_operator.then(|| {
            let (client, nodes) = (client("the operator"), nodes.clone());
            Arc::new(Operator { client, nodes, stops: AtomicBool::new(false) })
        });
        Scene {
            dice,
            network,
            double,
            servers,
            nodes,
            hosts,
            volumes,
            has_crowd,
            world,
            is_broken,
            scheduler,
            operator,
        }
    }

    /// Registers the volumes at the first server.
    async fn register(&self) {
        let server = self.servers.lock().unwrap_or_else(PoisonError::into_inner)[0].clone().unwrap();
        let mut presence = server.service.cluster.presence.subscribe();
        presence.wait_for(Option::is_some).await.unwrap();
        for volume in &self.volumes {
            let capability =
                Capability { access_mode: access_mode(volume).into(), attachment_mode: "file-system".into() };
            let register = Register {
                volume: volume.clone(),
                plugin: if volume.ends_with("plain") { "q".into() } else { "p".into() },
                external_id: format!("ext-{volume}"),
                spec: Some(Spec { capabilities: vec![capability], ..Spec::default() }),
                ..Register::default()
            };
            let mut request = Request::new(ChangeAsk { what: Some(change_ask::What::Register(register)) });
            request.extensions_mut().insert(identity(Role::Operator, "all"));
            server.service.change(request).await.unwrap();
        }
    }

    async fn play(&self) {
        self.register().await;
        // Without a controller's row a claim of an attaching volume is refused for good.
        self.hosts.iter().for_each(|host| host.start());
        sleep(Duration::from_secs(1)).await;
        self.nodes.iter().for_each(|node| node.start());
        if let Some(scheduler) = self.scheduler.clone() {
            self.network.seen.count(Fault::Scheduled);
            tokio::spawn(async move { scheduler.run().await });
        }
        if let Some(operator) = self.operator.clone() {
            tokio::spawn(async move { operator.run().await });
        }
        sleep(Duration::from_secs(1)).await;
        self.double.compares(self.is_broken != Some(Break::NoCompare));
        self.network
            .faults
            .store(if self.dice.once_in(4) { 0 } else { 8 + self.dice.roll(50) }, Ordering::Relaxed);
        // A host that is lost for longer than a call may run needs a long scene.
        let (least, most, pause) = match self.is_broken {
            Some(Break::SlowPlugin) => (60_000, 240_000, 6_000),
            _ if self.dice.once_in(8) => (20_000, 60_000, 6_000),
            _ => (5_000, 20_000, 2_000),
        };
        let end = Instant::now() + self.dice.time(least, most);
        let mut look = Instant::now() + LOOK;
        while Instant::now() < end && self.world.violation().is_none() {
            self.break_something();
            let next = Instant::now() + self.dice.time(50, pause);
            while Instant::now() < next {
                sleep((look.min(next)).saturating_duration_since(Instant::now())).await;
                if Instant::now() >= look {
                    self.world.compare();
                    look = Instant::now() + LOOK;
                }
            }
        }
        self.rest().await;
    }

    /// Does one bad thing.
    fn break_something(&self) {
        let (dice, network) = (&self.dice, &self.network);
        let is_of_host = self.is_broken == Some(Break::SlowPlugin) && dice.once_in(3);
        match if is_of_host { 6 } else { dice.roll(14) } {
            0 | 1 => self.kill_server(),
            2 | 3 => {
                let (one, other) = self.pair();
                let is_one_way = dice.once_in(3);
                let time = dice.time(200, 25_000);
                self.world.note(|| format!("{one:?} and {other:?} are parted, one way: {is_one_way}"));
                network.part(one, other);
                network.seen.count(if is_one_way { Fault::PartedOneWay } else { Fault::Parted });
                if !is_one_way {
                    network.part(other, one);
                }
                let network = network.clone();
                tokio::spawn(async move {
                    sleep(time).await;
                    network.heal(one, other);
                    network.heal(other, one);
                });
            }
            4 | 5 => {
                let is_reboot = dice.once_in(2);
                network.seen.count(if is_reboot { Fault::NodeRebooted } else { Fault::NodeKilled });
                self.restart(&self.nodes, dice.time(0, 5_000), is_reboot);
            }
            // A call without an answer may go on for 20 s.
            6 => {
                let (time, is_reboot) =
                    (if dice.once_in(2) { (15_000, 60_000) } else { (0, 5_000) }, dice.once_in(3));
                network.seen.count(if is_reboot { Fault::HostRebooted } else { Fault::HostKilled });
                self.restart(&self.hosts, dice.time(time.0, time.1), is_reboot);
            }
            7 => {
                let leases = self.double.leases();
                if !leases.is_empty() {
                    let lease = leases[dice.roll(leases.len() as u64) as usize];
                    self.world.note(|| format!("lease {lease} ends early"));
                    self.double.end_lease(lease);
                    network.seen.count(Fault::LeaseEnded);
                }
            }
            8 => network.cut_watches(),
            9 => {
                network.seen.count(Fault::Compacted);
                self.double.compact();
            }
            10 | 11 => {
                network.seen.count(Fault::Released);
                self.release();
            }
            12 => {
                network.seen.count(Fault::Forced);
                self.force();
            }
            _ => {}
        }
    }

    /// Returns two places that talk to each other.
    fn pair(&self) -> (Place, Place) {
        let dice = &self.dice;
        let server = Place::Server(dice.roll(self.count()) as usize);
        let places = (self.nodes.len() + self.hosts.len()) as u64;
        let other = match dice.once_in(3) {
            true => Place::Etcd,
            false => Place::Node(dice.roll(places) as usize),
        };
        if dice.once_in(2) { (server, other) } else { (other, server) }
    }

    fn count(&self) -> u64 {
        self.servers.lock().unwrap_or_else(PoisonError::into_inner).len() as u64
    }

    /// Kills a server, and starts it again later.
    fn kill_server(&self) {
        let at = self.dice.roll(self.count()) as usize;
        let (time, servers) = (self.dice.time(0, 20_000), self.servers.clone());
        let (double, network, world) = (self.double.clone(), self.network.clone(), self.world.clone());
        let is_in_fold = self.has_crowd && self.dice.once_in(2);
        tokio::spawn(async move {
            let of = |servers: &Servers| servers.lock().unwrap_or_else(PoisonError::into_inner)[at].clone();
            let is_folding =
                |servers: &Servers| of(servers).is_some_and(|of| of.service.cluster.turns.is_folding());
            let end = Instant::now() + FOLD;
            while is_in_fold && Instant::now() < end && !is_folding(&servers) {
                sleep(Duration::from_millis(1)).await;
            }
            if is_folding(&servers) {
                network.seen.count(Fault::KilledInFold);
            }
            let killed = servers.lock().unwrap_or_else(PoisonError::into_inner)[at].take();
            let Some(killed) = killed else { return };
            world.note(|| format!("server {at} is killed"));
            network.seen.count(Fault::ServerKilled);
            if killed.service.cluster.presence.here().is_ok_and(|here| has_called(&double, &here.id)) {
                network.seen.count(Fault::KilledInCall);
            }
            killed.kill();
            sleep(time).await;
            world.note(|| format!("server {at} starts"));
            let server = server::start(&double, &network, at);
            servers.lock().unwrap_or_else(PoisonError::into_inner)[at] = Some(server);
        });
    }

    /// Kills csid on a host, or switches the host off, and starts it again later.
    fn restart(&self, of: &[Arc<Host>], time: Duration, is_reboot: bool) {
        let host = of[self.dice.roll(of.len() as u64) as usize].clone();
        match is_reboot {
            true => host.reboot(),
            false => {
                self.world.note(|| format!("csid of {} is killed", host.name));
                host.kill();
            }
        }
        let host = host.hold_off();
        tokio::spawn(async move {
            sleep(time).await;
            host.start_again();
        });
    }

    /// Has an operator ask for a release.
    fn release(&self) {
        let at = self.dice.roll(self.count()) as usize;
        let server = self.servers.lock().unwrap_or_else(PoisonError::into_inner)[at].clone();
        let Some(server) = server else { return };
        let node = &self.nodes[self.dice.roll(self.nodes.len() as u64) as usize];
        let ask = ReleaseAsk {
            volume: self.volumes[0].clone(),
            node: node.name.clone(),
            consumer: "web".into(),
            force: self.is_broken == Some(Break::ForcedRelease),
            ..ReleaseAsk::default()
        };
        self.world.note(|| format!("an operator releases {ask:?}"));
        drop(release_at(&server, ask));
    }

    /// Switches a node off, and has an operator end its claim by force before it comes back.
    fn force(&self) {
        let node = self.nodes[self.dice.roll(self.nodes.len() as u64) as usize].clone();
        node.reboot();
        let ask = ReleaseAsk {
            volume: self.volumes[0].clone(),
            node: node.name.clone(),
            consumer: "web".into(),
            force: true,
            deadline_ms: 1000,
            ..ReleaseAsk::default()
        };
        let (servers, world, dice) = (self.servers.clone(), self.world.clone(), self.dice.clone());
        let node = node.hold_off();
        tokio::spawn(async move {
            world.note(|| format!("an operator forces {ask:?}"));
            let servers = servers.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some(server) = servers.into_iter().flatten().next()
                && release_at(&server, ask).await.is_err()
            {
                // etcd may do it later.
                sleep(LATEST).await;
            }
            sleep(dice.time(0, 3000)).await;
            node.start_again();
        });
    }

    /// Ends claims that late messages of earlier boots have made. A host does not end them, for a clone of it may use the volume (decision 0008).
    /// An operator does.
    fn end_late_claims(&self) {
        for kv in self.double.below("/csid/v1/vol/default/") {
            let key = String::from_utf8_lossy(&kv.key).into_owned();
            let place = key.strip_prefix("/csid/v1/vol/default/").and_then(|rest| rest.split_once("/claim/"));
            let Some((volume, (node, consumer))) =
                place.and_then(|(volume, rest)| Some((volume, rest.split_once('/')?)))
            else {
                continue;
            };
            let value = String::from_utf8_lossy(&kv.value);
            let host = self.nodes.iter().find(|host| host.name == node);
            if host.is_none_or(|host| value.contains(&format!("\"node/{node}/{}.", host.calls()))) {
                continue;
            }
            let ask = ReleaseAsk {
                volume: volume.to_owned(),
                node: node.to_owned(),
                consumer: consumer.to_owned(),
                force: true,
                deadline_ms: 1000,
                ..ReleaseAsk::default()
            };
            self.world.note(|| format!("an operator ends a claim of an earlier boot: {ask:?}"));
            let servers = self.servers.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some(server) = servers.into_iter().flatten().next() {
                drop(release_at(&server, ask));
            }
        }
    }

    /// Ends an attachment that the scheduler's late calls have made.
    async fn end_late_attachment(&self) {
        let Some(scheduler) = self.scheduler.as_ref().filter(|of| of.has_ended.load(Ordering::Relaxed))
        else {
            return;
        };
        let keys = self.double.below("/csid/v1/vol/default/");
        if keys.iter().any(|kv| String::from_utf8_lossy(&kv.key).contains("/at/@/")) {
            scheduler.detach().await;
        }
    }

    /// Ends all faults, and waits until everything is at rest.
    async fn rest(&self) {
        self.world.note(|| "nothing fails any more".to_owned());
        self.network.calm();
        self.world.calm();
        self.nodes.iter().for_each(|node| node.stops.store(true, Ordering::Relaxed));
        self.scheduler.iter().for_each(|of| of.stops.store(true, Ordering::Relaxed));
        self.operator.iter().for_each(|of| of.stops.store(true, Ordering::Relaxed));
        let end = Instant::now() + REST;
        loop {
            if self.world.violation().is_some() {
                return;
            }
            self.world.compare();
            if let Some(operator) = &self.operator {
                operator.accept_all().await;
            }
            let restless = match self.nodes.iter().find(|node| !node.is_empty()) {
                Some(node) => Some(format!("the journal of {}: {}", node.name, node.shown())),
                None => {
                    self.end_late_claims();
                    self.end_late_attachment().await;
                    self.world.restless()
                }
            };
            let Some(restless) = restless else { return };
            if Instant::now() >= end {
                return self.world.fail(format!("not at rest: {restless}"));
            }
            sleep(LOOK).await;
        }
    }
}

/// Returns whether a server has written a claim and its call in one transaction, and the call has no outcome yet.
fn has_called(double: &Double, server: &str) -> bool {
    let rows = double.below("/csid/v1/vol/default/");
    let is_of = |kv: &KeyValue, part: &str| String::from_utf8_lossy(&kv.key).contains(part);
    let claims = rows.iter().filter(|kv| is_of(kv, "/claim/"));
    let claims: BTreeSet<i64> = claims.map(|kv| kv.create_revision).collect();
    let is_driver = format!("\"server\":\"{server}\"");
    let mut heads = rows.iter().filter(|kv| is_of(kv, "/head") && claims.contains(&kv.mod_revision));
    heads.any(|kv| String::from_utf8_lossy(&kv.value).contains(&is_driver))
}

/// Sends an operator's release to a server.
fn release_at(server: &Arc<Running>, ask: ReleaseAsk) -> tokio::task::JoinHandle<()> {
    let mut request = Request::new(ask);
    request.extensions_mut().insert(identity(Role::Operator, "all"));
    let of = server.clone();
    server.spawn(async move { drop(of.service.release(request).await) })
}
