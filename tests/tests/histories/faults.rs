//! The faults of a run, one after the other, each with a line in the history.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use csi_proto::cluster::v1::resume_ask::Step;
use csi_proto::cluster::v1::{RestoredAsk, ResumeAsk, ServersAsk};
use csid_etcd::api::KeyValue;
use csid_tests::dice::Dice;
use csid_tests::network::Way;
use csid_tests::world::eventually;
use tokio::sync::oneshot;

use crate::etcd_faults::{fill, revoke, write_until_it_ends};
use crate::history::{Line, Outcome};
use crate::host::{CONTROLLER, Host, Order};
use crate::load::{ATTACHING, Shared, VOLUMES};
use crate::pauses::{BOUND, BOUND_OF_ATTACHED, BOUNDED, MAJORITY_IS_BACK, MORE};
use crate::site::Site;
use crate::{Run, keep, stopped};

/// The number of the reader among the clients.
const READER: u32 = 1;
/// A long stop. The server regards a host as away meanwhile, and etcd a server as gone.
const LONG: Duration = Duration::from_secs(30);
/// How long etcd has no majority while clients keep what they have. In a long time servers have passed their 10 s without etcd.
const AWAY: Duration = Duration::from_secs(1);
const LONG_AWAY: Duration = Duration::from_secs(13);
/// How long a server is cut off that a compaction is to pass. After 10 s it would list the volumes without a compaction.
const PAST: Duration = Duration::from_secs(6);
/// What a server's log says when etcd has compacted what its watch has to see next.
const LISTED_AGAIN: &str = "the volumes are listed again error=etcd has compacted";
/// By how many seconds a clock is moved.
const MOVES: [i64; 4] = [-3600, -40, 40, 3600];
/// csid or a server is killed at one of so many edges that it passes next. A server without a node passes two each 3 s.
const EDGES: u64 = 30;
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    KillCsid,
    StopCsid,
    KillHelper,
    KillPlugin,
    KillLink,
    StopLink,
    KillServer,
    StopServer,
    KillLeader,
    KillFollower,
    KillMajority,
    FillDisk,
    StopMember,
    CutHost,
    CutServer,
    CutServerFromNodes,
    CutServerFromEtcd,
    CutServersFromEtcd,
    CutMember,
    Compact,
    CompactPastServer,
    RemoveServerRow,
    RevokeLease,
    KillCsidAtEdge,
    KillServerAtEdge,
    MoveClockOfHost,
    MoveClockOfServer,
    Restore,
}

pub const ALL: [Fault; 28] = [
    Fault::KillCsid,
    Fault::KillHelper,
    Fault::KillPlugin,
    Fault::KillFollower,
    Fault::KillLeader,
    Fault::KillServer,
    Fault::StopServer,
    Fault::KillMajority,
    Fault::KillLink,
    Fault::StopCsid,
    Fault::FillDisk,
    Fault::StopMember,
    Fault::StopLink,
    Fault::CutHost,
    Fault::CutServer,
    Fault::CutServerFromNodes,
    Fault::CutServerFromEtcd,
    Fault::CutServersFromEtcd,
    Fault::CutMember,
    Fault::Compact,
    Fault::CompactPastServer,
    Fault::RemoveServerRow,
    Fault::RevokeLease,
    Fault::KillCsidAtEdge,
    Fault::KillServerAtEdge,
    Fault::MoveClockOfHost,
    Fault::MoveClockOfServer,
    Fault::Restore,
];

/// The hosts and servers that [`Faults::sparing`] kills nothing of: those before these places.
const SPARED_HOSTS: usize = 2;
const SPARED_SERVERS: usize = 1;

/// The dice of the first fault. Those of clients have lower numbers.
const FIRST: u64 = 1 << 32;

impl Fault {
    pub fn name(self) -> &'static str {
        match self {
            Fault::KillCsid => "kill csid",
            Fault::StopCsid => "stop csid",
            Fault::KillHelper => "kill helper",
            Fault::KillPlugin => "kill plugin",
            Fault::KillLink => "kill link",
            Fault::StopLink => "stop link",
            Fault::KillServer => "kill server",
            Fault::StopServer => "stop server",
            Fault::KillLeader => "kill leader",
            Fault::KillFollower => "kill follower",
            Fault::KillMajority => "kill majority",
            Fault::FillDisk => "fill member's disk",
            Fault::StopMember => "stop member",
            Fault::CutHost => "cut host",
            Fault::CutServer => "cut server",
            Fault::CutServerFromNodes => "cut server from nodes",
            Fault::CutServerFromEtcd => "cut server from etcd",
            Fault::CutServersFromEtcd => "cut servers from etcd",
            Fault::CutMember => "cut member",
            Fault::Compact => "compact etcd",
            Fault::CompactPastServer => "compact etcd past a server",
            Fault::RemoveServerRow => "remove server's row",
            Fault::RevokeLease => "revoke server's lease",
            Fault::KillCsidAtEdge => "kill csid at an edge",
            Fault::KillServerAtEdge => "kill server at an edge",
            Fault::MoveClockOfHost => "move host's clock",
            Fault::MoveClockOfServer => "move server's clock",
            Fault::Restore => "restore etcd",
        }
    }

    /// Whether it kills csid, its helper or the link of a host.
    fn kills_on_host(self) -> bool {
        matches!(self, Fault::KillCsid | Fault::KillCsidAtEdge | Fault::KillHelper | Fault::KillLink)
    }

    /// Whether it kills a server.
    fn kills_server(self) -> bool {
        matches!(self, Fault::KillServer | Fault::KillServerAtEdge)
    }
}

pub struct Faults {
    seed: u64,
    /// The faults that were drawn.
    drawn: u64,
    /// Of the kinds.
    order: Dice,
    /// Of the fault that is made. Each fault has dice of its own, for how often they are cast may depend on what the fault finds.
    dice: Dice,
    /// The kinds of a round.
    kinds: Vec<Fault>,
    /// Whether no process of the first two hosts and of the first server is killed.
    is_sparing: bool,
    /// The faults of this round that are still to come: each kind once in a round.
    round: Vec<Fault>,
    counts: BTreeMap<Fault, usize>,
    /// Whether half of the stops are long.
    has_long_stops: bool,
    /// The backup of etcd that is restored next. `None`: it is to be saved.
    backup: Option<PathBuf>,
    /// The edges at which servers were killed.
    reached: BTreeSet<String>,
}

impl Faults {
    pub fn new(seed: u64) -> Faults {
        let has_long_stops = std::env::var_os("CSID_LONG_STOPS").is_some();
        Faults {
            seed,
            drawn: 0,
            order: Dice::new(seed, 0),
            dice: Dice::new(seed, FIRST),
            kinds: ALL.to_vec(),
            is_sparing: false,
            round: Vec::new(),
            counts: BTreeMap::new(),
            has_long_stops,
            backup: None,
            reached: BTreeSet::new(),
        }
    }

    /// Returns faults of a few seconds that let some processes live: the first host, which has the controller, the first one with clients, and the
    /// first server. All other faults hit them. A restore ends all servers, so there is none.
    pub fn sparing(seed: u64) -> Faults {
        let kinds = ALL.into_iter().filter(|fault| *fault != Fault::Restore).collect();
        Faults { kinds, is_sparing: true, has_long_stops: false, ..Faults::new(seed) }
    }

    /// Draws the next fault, and its dice.
    fn draw(&mut self) -> Fault {
        if self.round.is_empty() {
            self.round.clone_from(&self.kinds);
            self.order.shuffle(&mut self.round);
        }
        self.dice = Dice::new(self.seed, FIRST + self.drawn);
        self.drawn += 1;
        self.round.pop().expect("a fault")
    }

    /// Makes one fault, and ends it.
    pub async fn next(&mut self, run: &mut Run) {
        let fault = self.draw();
        // A backup from before an earlier restore would need a word of the operator more.
        let backup = run.site.path("backup");
        if self.kinds.contains(&Fault::Restore) && (self.backup.is_none() || self.dice.once_in(4)) {
            run.site.etcd.save(&backup);
            self.backup = Some(backup);
        }
        let Run { site, network, clocks, server_faults, hosts, shared, disks, .. } = run;
        let time = Duration::from_millis(1000 + self.dice.below(2500));
        // All attaching needs the first host.
        let mut host = if self.dice.once_in(3) { 0 } else { self.dice.below(hosts.len() as u64) as usize };
        let mut server = self.dice.below(site.servers.len() as u64) as usize;
        if self.is_sparing && fault.kills_on_host() {
            host = SPARED_HOSTS + self.dice.below((hosts.len() - SPARED_HOSTS) as u64) as usize;
        }
        if fault == Fault::MoveClockOfHost {
            // csid reads the wall clock for each call of a client, and hardly on the controller's host, which has none.
            host = 1 + self.dice.below(hosts.len() as u64 - 1) as usize;
        }
        if self.is_sparing && fault.kills_server() {
            server = SPARED_SERVERS + self.dice.below((site.servers.len() - SPARED_SERVERS) as u64) as usize;
        }
        tokio::time::sleep(Duration::from_millis(500 + self.dice.below(1500))).await;
        if BOUNDED.contains(&fault) {
            // No pause of the fault before is to be this one's.
            shared.each_host_claims(hosts).await;
        }
        if matches!(fault, Fault::KillServer | Fault::MoveClockOfServer) {
            // Its hosts have to go on at another server, or have it read its clock.
            let mut servers = servers_of_hosts(site).await;
            servers.retain(|server| !self.is_sparing || !fault.kills_server() || *server >= SPARED_SERVERS);
            let is_shown = self.is_sparing || fault != Fault::KillServer;
            assert!(is_shown || !servers.is_empty(), "no server has a session of a host");
            if !servers.is_empty() {
                server = self.dice.of(&servers);
            }
        }
        let way = self.dice.of(&[Way::Both, Way::In, Way::Out]);
        let stop = if self.has_long_stops && self.dice.below(2) == 0 { LONG } else { time };
        let seconds = self.dice.of(&MOVES);
        println!(
            "{:8.3} s: {} (host {}, server s{server}, {way:?})",
            shared.history.now() as f64 / 1e6,
            fault.name(),
            hosts[host].name
        );
        *self.counts.entry(fault).or_default() += 1;
        let servers: Vec<_> = (0..site.servers.len()).map(|n| format!("s{n}")).collect();
        let members: Vec<_> = (0..site.etcd.members.len()).map(|n| format!("m{n}")).collect();
        let nodes: Vec<_> = hosts.iter().map(|host| host.name.clone()).collect();
        let the_server = &servers[server..=server];
        let begin = || shared.history.write(&Line::event(fault.name(), shared.history.now()));
        match fault {
            Fault::KillCsid => {
                begin();
                order(&hosts[host], Order::Kill).await;
            }
            Fault::StopCsid => {
                begin();
                order(&hosts[host], Order::Stop(stop)).await;
            }
            Fault::KillHelper => {
                begin();
                order(&hosts[host], Order::KillHelper).await;
            }
            Fault::KillPlugin => {
                let plugin = if host == 0 { ATTACHING } else { self.dice.of(&[ATTACHING, "p"]) };
                println!("           the plugin {plugin}");
                begin();
                order(&hosts[host], Order::KillPlugin(plugin, time)).await;
            }
            Fault::KillLink => {
                begin();
                let host = &mut hosts[host];
                host.node.link.kill();
                host.node = site.node(&host.name);
            }
            Fault::StopLink => {
                begin();
                stopped(|signal| hosts[host].node.link.signal(signal), stop).await;
            }
            Fault::KillServer => {
                begin();
                site.servers[server].kill();
                tokio::time::sleep(BOUND_OF_ATTACHED + MORE).await;
                site.servers[server] = site.start_server(server);
            }
            Fault::StopServer => {
                begin();
                stopped(|signal| site.servers[server].signal(signal), stop).await;
            }
            Fault::KillLeader => {
                let leader = site.etcd.leader().await;
                begin();
                site.etcd.members[leader].kill();
                tokio::time::sleep(BOUND + MORE).await;
                site.etcd.restart(leader).await;
            }
            Fault::KillFollower => {
                let leader = site.etcd.leader().await;
                let others: Vec<_> = (0..members.len()).filter(|member| *member != leader).collect();
                let follower = self.dice.of(&others);
                begin();
                site.etcd.members[follower].kill();
                tokio::time::sleep(BOUND + MORE).await;
                site.etcd.restart(follower).await;
            }
            Fault::KillMajority => {
                let kept = self.dice.below(members.len() as u64) as usize;
                // No new claim, and then, in a long one, servers that have given up etcd.
                let time = if stop == LONG { LONG_AWAY } else { AWAY };
                lose_majority(site, shared, kept, time).await;
            }
            Fault::FillDisk => {
                let leader = site.etcd.leader().await;
                let file = disks[leader].join("filled");
                begin();
                fill(&file, &disks[leader]);
                write_until_it_ends(site, leader).await;
                tokio::time::sleep(BOUND + MORE).await;
                std::fs::remove_file(file).expect("the file that fills the disk");
                site.etcd.restart(leader).await;
            }
            Fault::StopMember => {
                let member = self.dice.below(site.etcd.members.len() as u64) as usize;
                begin();
                stopped(|signal| site.etcd.members[member].signal(signal), stop).await;
            }
            Fault::CutHost => {
                begin();
                network.cut(&nodes[host..=host], &[], way, stop).await;
            }
            Fault::CutServer => {
                begin();
                network.cut(the_server, &[], way, stop).await;
            }
            Fault::CutServerFromNodes => {
                begin();
                network.cut(the_server, &nodes, way, stop).await;
            }
            Fault::CutServerFromEtcd => {
                begin();
                network.cut(the_server, &members, way, stop).await;
            }
            Fault::CutServersFromEtcd => {
                begin();
                // All clients try again and again meanwhile. With 30 s the checker has more open outcomes than it can order.
                let time = if stop == LONG { LONG_AWAY } else { time };
                network.cut(&servers, &members, way, time).await;
            }
            Fault::CutMember => {
                let member = self.dice.below(members.len() as u64) as usize;
                begin();
                network.cut(&members[member..=member], &[], way, stop).await;
            }
            Fault::Compact => {
                begin();
                site.raw().await.compact().await;
            }
            Fault::CompactPastServer => {
                let program = &site.servers[server];
                let listed = || program.text().matches(LISTED_AGAIN).count();
                let before = listed();
                begin();
                network.refuse(&servers[server], &members);
                // The server writes each 3 s, and so finds its connections ended. The other servers write as often.
                tokio::time::sleep(PAST).await;
                site.raw().await.compact().await;
                network.heal(&servers[server]);
                eventually("the server lists the volumes again", async || listed() > before).await;
            }
            Fault::RemoveServerRow => {
                begin();
                let mut raw = site.raw().await;
                let rows = raw.below("/csid/v1/server/").await;
                let row = &rows[self.dice.below(rows.len() as u64) as usize];
                raw.delete(&row.key).await;
            }
            Fault::RevokeLease => {
                begin();
                let rows = site.raw().await.below("/csid/v1/server/").await;
                let row = &rows[self.dice.below(rows.len() as u64) as usize];
                revoke(site, row.lease).await;
            }
            Fault::KillCsidAtEdge => {
                let number = 1 + self.dice.below(EDGES);
                begin();
                order(&hosts[host], Order::KillAtEdge(number)).await;
            }
            Fault::KillServerAtEdge => {
                let number = 1 + self.dice.below(EDGES);
                begin();
                server_faults[server].arm(&format!("any:{number}"));
                eventually("the server ends at an edge", async || site.servers[server].has_ended()).await;
                let edge = server_faults[server].disarm();
                println!("           s{server} was killed at {edge}");
                self.reached.insert(edge);
                tokio::time::sleep(time).await;
                site.servers[server] = site.start_server(server);
            }
            Fault::MoveClockOfHost => {
                begin();
                order(&hosts[host], Order::MoveClock(seconds, stop)).await;
            }
            Fault::MoveClockOfServer => {
                begin();
                clocks[server].move_by(seconds);
                let clock = &clocks[server];
                eventually("the server reads its moved clock", async || clock.is_read_at(seconds)).await;
                tokio::time::sleep(stop).await;
                clocks[server].move_by(0);
            }
            Fault::Restore => {
                // Claims are granted and end that the backup does not know.
                tokio::time::sleep(time).await;
                begin();
                restore(run, &self.backup.take().expect("a backup")).await;
            }
        }
        println!("{:8.3} s: ended", run.shared.history.now() as f64 / 1e6);
    }

    /// Reads the holders of each volume in etcd, and writes them.
    pub async fn read(&self, site: &Site, shared: &Shared) {
        for volume in VOLUMES {
            let start = shared.history.now();
            let holders = holders(site, volume.name).await;
            let (end, volume) = (shared.history.now(), volume.name.to_owned());
            let outcome = Some(Outcome::Ok);
            let call = "read".to_owned();
            let client = READER;
            let line = Line { call, client, volume, start, end, outcome, holders, ..Line::default() };
            shared.history.write(&line);
        }
    }

    /// Says how often each fault was made.
    pub fn summary(&self) -> String {
        let counts: Vec<String> =
            self.counts.iter().map(|(fault, count)| format!("{} {count}", fault.name())).collect();
        format!(
            "faults: {}; servers were killed at the edges {:?} of {}",
            counts.join(", "),
            self.reached,
            csid_server::points().len()
        )
    }
}

/// Kills all members of etcd but one, and starts them again. No claim is granted meanwhile, and unmounts are answered.
async fn lose_majority(site: &mut Site, shared: &Shared, kept: usize, away: Duration) {
    // Some clients have a volume mounted then, and others ask for one.
    shared.keeps.store(true, Ordering::SeqCst);
    eventually("clients have volumes mounted", async || {
        shared.mounted.lock().expect("the mounts").len() >= 3
    })
    .await;
    let killed: Vec<_> = (0..site.etcd.members.len()).filter(|member| *member != kept).collect();
    shared.history.write(&Line::event(Fault::KillMajority.name(), shared.history.now()));
    for member in &killed {
        site.etcd.members[*member].kill();
    }
    let lost = shared.history.now();
    tokio::time::sleep(away).await;
    let mounted = shared.mounted.lock().expect("the mounts").clone();
    let unmounts = shared.history.now();
    shared.keeps.store(false, Ordering::SeqCst);
    tokio::time::sleep(BOUND).await;
    let is_in_vain = |line: &Line| line.call == "take" && line.outcome != Some(Outcome::Refused);
    eventually("a claim is asked for in vain", async || shared.history.since(lost).iter().any(is_in_vain))
        .await;
    let lines = shared.history.since(lost);
    let granted: Vec<_> = lines.iter().filter(|line| line.is_grant()).collect();
    let is_unmounted = |(volume, who): &(&str, String)| {
        let is_one = |line: &&Line| {
            line.call == "unmount" && line.volume == *volume && line.who == *who && line.start >= unmounts
        };
        // Soon after the loss a call may wait behind another caller's claim of the volume, which a server does not answer.
        let is_done = |line: &Line| {
            line.outcome == Some(Outcome::Ok)
                || away < LONG_AWAY && line.error.contains("the deadline passed at `queued`")
        };
        lines.iter().find(is_one).is_some_and(is_done)
    };
    let stuck: Vec<_> = mounted.iter().filter(|mount| !is_unmounted(mount)).collect();
    let (asked, answered) = (lines.iter().filter(|line| is_in_vain(line)).count(), mounted.len());
    println!("           {asked} claims were asked for in vain, {answered} unmounts were answered");
    if !granted.is_empty() || !stuck.is_empty() {
        keep(&shared.history.path, shared.seed);
    }
    assert!(granted.is_empty(), "seed {}: granted without a majority: {granted:#?}", shared.seed);
    assert!(stuck.is_empty(), "seed {}: not unmounted without a majority: {stuck:?}", shared.seed);
    for (n, member) in killed.into_iter().enumerate() {
        site.etcd.restart(member).await;
        if n == 0 {
            shared.history.write(&Line::event(MAJORITY_IS_BACK, shared.history.now()));
        }
    }
    tokio::time::sleep(BOUND + MORE).await;
}

/// Restores etcd from a backup, and does what an operator does then. Waits until the clients, etcd and the storage agree again.
async fn restore(run: &mut Run, backup: &Path) {
    let before = run.site.admin(0, "all").servers(ServersAsk {}).await.expect("the servers").into_inner();
    let token = format!("after generation {}", before.generation);
    run.site.etcd.restore(backup, Some(&token)).await;
    for n in 0..run.site.servers.len() {
        // It has run on, and finds another etcd. systemd starts it again.
        assert!(!run.site.servers[n].ended().await, "a server has not seen the restore");
        run.site.servers[n] = run.site.start_server(n);
    }
    let now = || run.shared.history.now() as f64 / 1e6;
    println!("{:8.3} s: the servers run again", now());
    let mut admin = run.site.admin(0, "all");
    let mut rows = admin.servers(ServersAsk {}).await.expect("the servers").into_inner();
    assert_eq!(rows.mode, "restored");
    admin.restored(RestoredAsk { generation: rows.generation, past: 0 }).await.expect("a recovery");
    eventually("all nodes have said what they hold", async || {
        rows = admin.servers(ServersAsk {}).await.expect("the servers").into_inner();
        rows.mode == "recovering" && rows.awaited.is_empty()
    })
    .await;
    assert_eq!(rows.refused, [], "claims were not brought back");
    run.note_strays().await;
    let ask = ResumeAsk { generation: rows.generation, step: Step::End.into(), ..ResumeAsk::default() };
    let rows = admin.resume(ask).await.expect("the end of the recovery").into_inner();
    println!("{:8.3} s: the cluster is normal. Half done: {:?}", now(), rows.half_done);
    run.agree().await;
    run.shared.keeps.store(false, Ordering::SeqCst);
    run.shared.history.write(&Line::event("restored", run.shared.history.now()));
}

/// Returns the places of the servers that hosts with clients have a session with, each once for each host.
async fn servers_of_hosts(site: &Site) -> Vec<usize> {
    let mut raw = site.raw().await;
    let rows = raw.below("/csid/v1/server/").await;
    // The row of a killed server stays for as long as its lease. The newest row of an address is that of the server which runs.
    let id_at = |address: &String| {
        let is_there = |row: &&KeyValue| {
            let row: serde_json::Value = serde_json::from_slice(&row.value).expect("a server's row");
            row["address"].as_str() == Some(address)
        };
        rows.iter().filter(is_there).max_by_key(|row| row.create_revision).map(|row| names(row).1)
    };
    let ids: Vec<_> = site.addresses.iter().map(id_at).collect();
    let sessions = raw.below("/csid/v1/session/").await;
    let sessions = sessions.iter().map(names).filter(|(host, _)| host != CONTROLLER);
    sessions.filter_map(|(_, id)| ids.iter().position(|of| of.as_ref() == Some(&id))).collect()
}

/// Returns the last two names of a row's key.
fn names(row: &KeyValue) -> (String, String) {
    let key = String::from_utf8_lossy(&row.key);
    let mut names = key.rsplit('/').map(str::to_owned);
    let last = names.next().unwrap_or_default();
    (names.next().unwrap_or_default(), last)
}

/// Has a host carry out an order.
async fn order(host: &Host, order: Order) {
    let (done, ended) = oneshot::channel();
    host.orders.send((order, done)).expect("the host runs");
    ended.await.expect("the host goes on");
}

/// Returns the holders of a volume in etcd, as NODE/CONSUMER. The read is linearizable.
pub async fn holders(site: &Site, volume: &str) -> Vec<String> {
    let prefix = format!("/csid/v1/vol/default/{volume}/claim/");
    let rows = site.raw().await.below(&prefix).await;
    rows.into_iter().map(|row| String::from_utf8_lossy(&row.key[prefix.len()..]).into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first draws of each fault. `more`: how many more its making takes.
    fn drawn(mut faults: Faults, more: impl Fn(usize) -> usize) -> Vec<(Fault, [u64; 8])> {
        let fault = |n| {
            let fault = faults.draw();
            let draws = [(); 8].map(|()| faults.dice.bits());
            for _ in 0..more(n) {
                faults.dice.bits();
            }
            (fault, draws)
        };
        (0..3 * ALL.len()).map(fault).collect()
    }

    #[test]
    fn seed_draws_the_same_faults_again() {
        for new in [Faults::new, Faults::sparing] {
            let first = drawn(new(7), |_| 0);
            assert_eq!(drawn(new(7), |n| n % 5), first, "the draws depend on what faults find");
            assert_ne!(drawn(new(8), |_| 0), first);
            let round: BTreeSet<Fault> =
                first[..new(7).kinds.len()].iter().map(|(fault, _)| *fault).collect();
            assert_eq!(round.len(), new(7).kinds.len(), "each kind once in a round");
        }
    }
}
