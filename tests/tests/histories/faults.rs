//! The faults of a run, one after the other, each with a line in the history.

use std::collections::BTreeMap;
use std::time::Duration;

use csid_tests::dice::Dice;
use tokio::sync::oneshot;

use crate::history::{History, Line, Outcome};
use crate::host::{Host, Order};
use crate::load::{Shared, VOLUMES};
use crate::site::Site;
use crate::stopped;

/// The number of the reader among the clients.
const READER: u32 = 1;
/// How long after a fault a gap of claims may begin, in microseconds.
const AFTER: i64 = 5_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fault {
    KillCsid,
    StopCsid,
    KillLink,
    StopLink,
    KillServer,
    StopServer,
    KillLeader,
    StopMember,
}

const ALL: [Fault; 8] = [
    Fault::KillCsid,
    Fault::KillLeader,
    Fault::KillServer,
    Fault::StopServer,
    Fault::KillLink,
    Fault::StopCsid,
    Fault::StopMember,
    Fault::StopLink,
];

impl Fault {
    fn name(self) -> &'static str {
        match self {
            Fault::KillCsid => "kill csid",
            Fault::StopCsid => "stop csid",
            Fault::KillLink => "kill link",
            Fault::StopLink => "stop link",
            Fault::KillServer => "kill server",
            Fault::StopServer => "stop server",
            Fault::KillLeader => "kill leader",
            Fault::StopMember => "stop member",
        }
    }
}

pub struct Faults {
    dice: Dice,
    /// The faults of this round that are still to come: each kind once in a round.
    round: Vec<Fault>,
    counts: BTreeMap<Fault, usize>,
}

impl Faults {
    pub fn new(seed: u64) -> Faults {
        Faults { dice: Dice::new(seed, 0), round: Vec::new(), counts: BTreeMap::new() }
    }

    /// Makes one fault, and ends it.
    pub async fn next(&mut self, site: &mut Site, hosts: &mut [Host], shared: &Shared) {
        if self.round.is_empty() {
            self.round = ALL.to_vec();
            self.dice.shuffle(&mut self.round);
        }
        let fault = self.round.pop().expect("a fault");
        let time = Duration::from_millis(1000 + self.dice.below(2500));
        let host = self.dice.below(hosts.len() as u64) as usize;
        let server = self.dice.below(site.servers.len() as u64) as usize;
        tokio::time::sleep(Duration::from_millis(500 + self.dice.below(1500))).await;
        println!(
            "{:8.3} s: {} (host n{}, server s{server})",
            shared.history.now() as f64 / 1e6,
            fault.name(),
            host + 1
        );
        *self.counts.entry(fault).or_default() += 1;
        let begin = || shared.history.write(&Line::event(fault.name(), shared.history.now()));
        match fault {
            Fault::KillCsid => {
                begin();
                order(&hosts[host], Order::Kill).await;
            }
            Fault::StopCsid => {
                begin();
                order(&hosts[host], Order::Stop(time)).await;
            }
            Fault::KillLink => {
                begin();
                let host = &mut hosts[host];
                host.node.link.kill();
                host.node = site.node(&host.name);
            }
            Fault::StopLink => {
                begin();
                stopped(|signal| hosts[host].node.link.signal(signal), time).await;
            }
            Fault::KillServer => {
                begin();
                site.servers[server].kill();
                tokio::time::sleep(time).await;
                site.servers[server] = site.start_server(server);
            }
            Fault::StopServer => {
                begin();
                stopped(|signal| site.servers[server].signal(signal), time).await;
            }
            Fault::KillLeader => {
                let leader = site.etcd.leader().await;
                begin();
                site.etcd.members[leader].kill();
                tokio::time::sleep(time).await;
                site.etcd.restart(leader).await;
            }
            Fault::StopMember => {
                let member = self.dice.below(site.etcd.members.len() as u64) as usize;
                begin();
                stopped(|signal| site.etcd.members[member].signal(signal), time).await;
            }
        }
        println!("{:8.3} s: ended", shared.history.now() as f64 / 1e6);
    }

    /// Reads the holders of each volume in etcd, and writes them.
    pub async fn read(&self, site: &Site, shared: &Shared) {
        for (volume, _) in VOLUMES {
            let start = shared.history.now();
            let holders = holders(site, volume).await;
            let (end, volume) = (shared.history.now(), volume.to_owned());
            let outcome = Some(Outcome::Ok);
            let call = "read".to_owned();
            let client = READER;
            let line = Line { call, client, volume, start, end, outcome, holders, ..Line::default() };
            shared.history.write(&line);
        }
    }

    /// Returns the holders of each volume in etcd.
    pub async fn holders(&self, site: &Site) -> Vec<(&'static str, Vec<String>)> {
        let mut all = Vec::new();
        for (volume, _) in VOLUMES {
            all.push((volume, holders(site, volume).await));
        }
        all
    }

    /// Says how often each fault was made, and the longest gaps of claims.
    pub fn summary(&self, history: &History) -> String {
        let counts: Vec<String> =
            self.counts.iter().map(|(fault, count)| format!("{} {count}", fault.name())).collect();
        let gap = |fault: Fault| history.longest_gap(fault.name(), AFTER) as f64 / 1e6;
        format!(
            "faults: {}; longest gap of claims: {:.1} s at a killed leader, {:.1} s at a killed server",
            counts.join(", "),
            gap(Fault::KillLeader),
            gap(Fault::KillServer)
        )
    }
}

/// Has a host carry out an order.
async fn order(host: &Host, order: Order) {
    let (done, ended) = oneshot::channel();
    host.orders.send((order, done)).expect("the host runs");
    ended.await.expect("the host goes on");
}

/// Returns the holders of a volume in etcd, as NODE/CONSUMER. The read is linearizable.
async fn holders(site: &Site, volume: &str) -> Vec<String> {
    let prefix = format!("/csid/v1/vol/default/{volume}/claim/");
    let found = site.raw().await.below(&prefix).await;
    found.into_iter().map(|kv| String::from_utf8_lossy(&kv.key[prefix.len()..]).into_owned()).collect()
}
