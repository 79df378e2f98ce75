//! The parts with few claims: rates, times and lags.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use csi_proto::cluster::v1::admin_client::AdminClient;
use csi_proto::cluster::v1::cluster_client::ClusterClient;
use csi_proto::cluster::v1::{Capability, ChangeAsk, ListAsk, NodeRow, NodesAsk, Register, Spec, change_ask};
use futures_util::future::try_join_all;
use tonic::Code;
use tonic::transport::Channel;

use crate::Args;
use crate::certificates::Pair;
use crate::load::{self, Load, median};
use crate::nodes::{AGAIN, ATTACHING, Fleet, LIMIT, Node, PLAIN, Role};
use crate::raw::{Raw, Template, external_id};
use crate::report::Report;
use crate::site::Site;

/// Callers at the same time.
pub const CALLERS: usize = 64;
/// Volumes that the claims of one second may need at most.
const PER_SECOND: usize = 2500;
/// The same, of one of several callers.
pub const OF_CALLER: usize = 50;
/// Claims of one volume in one transaction, as many as a server writes at most.
const FOLDED: usize = 40;
/// Figures of the processor's time of [`Site::cpu`], in its order.
const CPU_OF_CLAIM: [&str; 3] = ["one_volume_nodes_ms", "one_volume_servers_ms", "one_volume_etcd_ms"];
/// How long all nodes may take for claims of one volume.
const AT_ONCE: Duration = Duration::from_secs(60);
/// Changes whose lag is measured.
const CHANGES: usize = 50;
/// How long an idle server is watched.
const IDLE: Duration = Duration::from_secs(12);
/// The access mode of volumes that one node has at a time.
pub const OWN: &str = "single-node-writer";
const SHARED: &str = "multi-node-multi-writer";
/// The servers.
pub const ALL: [usize; 3] = [0, 1, 2];

/// A run.
pub struct Bench {
    pub args: Args,
    pub site: Site,
    pub raw: Raw,
    pub template: Template,
    pub report: Report,
    /// The nodes, with their certificates.
    pub fleet: Fleet,
    pub names: Vec<String>,
    pub pairs: Vec<Pair>,
    /// The node with the controller.
    pub controller: Fleet,
    pub of_controller: Pair,
    /// The certificate of csid's node.
    pub of_csid: Pair,
    operator: Pair,
    /// Volumes that were made.
    pub volumes: usize,
}

/// Volumes that nobody has claimed.
struct Pool {
    names: Vec<String>,
    next: AtomicUsize,
}

impl Bench {
    /// Starts the cluster with one server, and makes the nodes.
    pub async fn start(args: Args, directory: &Path) -> Result<Bench> {
        let mut site = Site::start(directory).await?;
        let names: Vec<String> = (0..args.nodes()).map(|n| format!("n{n:03}")).collect();
        let mut report = Report::default();
        let begun = Instant::now();
        let more = ["c0".to_owned(), "n-csid".to_owned()];
        let mut pairs = site.nodes(&[&names[..], &more].concat())?;
        report.add("certificates_s", begun.elapsed().as_secs_f64(), &format!("{} nodes", names.len()));
        let [of_controller, of_csid] =
            pairs.split_off(names.len()).try_into().ok().context("two more pairs")?;
        site.start_server(0)?;
        let mut fleet = Fleet::new(&site, &names, &pairs)?;
        let controller = Fleet::new(&site, &more[..1], std::slice::from_ref(&of_controller))?;
        let operator = site.operator();
        let mut client = ClusterClient::new(site.channel(0, &operator)?);
        change(&mut client, register("template", PLAIN, OWN)).await?;
        fleet.join(1, &[0]).await?;
        fleet.nodes[0].claim("template", OWN).await?;
        let raw = Raw::new(site.member_channel(0)?);
        let template = raw.template("template").await?;
        Ok(Bench {
            args,
            site,
            raw,
            template,
            report,
            fleet,
            names,
            pairs,
            controller,
            of_controller,
            of_csid,
            operator,
            volumes: 0,
        })
    }

    /// Returns a client of an operator.
    pub fn operator(&self, server: usize) -> Result<ClusterClient<Channel>> {
        Ok(ClusterClient::new(self.site.channel(server, &self.operator)?))
    }

    /// Returns names of volumes that nothing else has.
    pub fn new_names(&mut self, count: usize) -> Vec<String> {
        self.volumes += count;
        (self.volumes - count..self.volumes).map(|n| format!("v{n:07}")).collect()
    }

    /// Writes volumes that nobody has claimed, as many as claims may need for `time`.
    async fn pool(&mut self, time: Duration) -> Result<Arc<Pool>> {
        let names = self.free(PER_SECOND, time).await?;
        Ok(Arc::new(Pool { names, next: AtomicUsize::new(0) }))
    }

    /// Writes volumes that nobody has claimed, so many for each second of `time`. Waits until all servers have them.
    pub async fn free(&mut self, per_second: usize, time: Duration) -> Result<Vec<String>> {
        let names = self.new_names((per_second as f64 * time.as_secs_f64()).ceil() as usize);
        self.raw.write_volumes(&self.template, PLAIN, &names, |_| None).await?;
        let last = names.last().context("no volume is needed")?;
        for server in ALL {
            if self.site.servers[server].is_some() {
                self.listed(&mut self.operator(server)?, last).await?;
            }
        }
        Ok(names)
    }

    /// Waits until a server's list has a volume.
    async fn listed(&self, server: &mut ClusterClient<Channel>, volume: &str) -> Result<()> {
        let begun = Instant::now();
        let ask = ListAsk { volume: volume.to_owned(), ..ListAsk::default() };
        loop {
            let list = async {
                let mut pages = server.volumes(ask.clone()).await?.into_inner();
                let mut found = 0;
                while let Some(page) = pages.message().await? {
                    found += page.volumes.len();
                }
                Ok::<_, tonic::Status>(found)
            };
            match list.await {
                Ok(0) => {}
                Ok(_) => return Ok(()),
                // A server that is behind etcd answers nothing.
                Err(error) if error.code() == Code::Unavailable => tokio::time::sleep(AGAIN).await,
                Err(error) => return Err(error).context("list a volume"),
            }
            ensure!(begun.elapsed() < LIMIT, "{volume} did not come into a server's list");
        }
    }

    /// Waits until the rows of all nodes have their names by the plugins.
    async fn reported(&self, mut server: AdminClient<Channel>) -> Result<()> {
        let (begun, nodes) = (Instant::now(), &self.fleet.nodes[..self.args.nodes()]);
        let has_name =
            |node: &NodeRow| node.plugins.iter().any(|of| of.plugin == ATTACHING && !of.node_id.is_empty());
        loop {
            let mut named = HashSet::new();
            let list = async {
                let mut pages = server.nodes(NodesAsk::default()).await?.into_inner();
                while let Some(page) = pages.message().await? {
                    named.extend(page.nodes.into_iter().filter(has_name).map(|node| node.node));
                }
                Ok::<_, tonic::Status>(())
            };
            match list.await {
                // A server that is behind etcd answers nothing.
                Err(error) if error.code() != Code::Unavailable => {
                    return Err(error).context("list the nodes");
                }
                _ => {}
            }
            let unnamed = nodes.iter().filter(|node| !named.contains(&node.name)).count();
            if unnamed == 0 {
                return Ok(());
            }
            ensure!(begun.elapsed() < LIMIT, "{unnamed} nodes do not have their names by the plugins");
            // A list is work for etcd, too.
            tokio::time::sleep(10 * AGAIN).await;
        }
    }

    /// Registers volumes by calls of an operator.
    pub async fn register(&mut self, count: usize, plugin: &str, access_mode: &str) -> Result<Vec<String>> {
        let names = self.new_names(count);
        let client = self.operator(0)?;
        for some in names.chunks(16) {
            let registered = some.iter().map(|name| {
                let mut client = client.clone();
                async move { change(&mut client, register(name, plugin, access_mode)).await }
            });
            try_join_all(registered).await.context("register volumes")?;
        }
        Ok(names)
    }

    pub async fn floor(&self, callers: usize) -> Result<Load> {
        self.raw.swap(&self.template, callers, 1, self.args.time()).await
    }

    /// Measures a floor of one caller, and keeps it.
    pub async fn floor_p50(&mut self) -> Result<f64> {
        let floor = self.floor(1).await?.p50_ms;
        self.report.add("floor_p50_ms", floor, "");
        Ok(floor)
    }

    async fn claim_own(&self, callers: usize, pool: &Arc<Pool>) -> Result<Load> {
        let nodes: Arc<Vec<Arc<Node>>> = Arc::new(self.fleet.nodes.clone());
        let pool = Arc::clone(pool);
        load::run(callers, self.args.time(), move |caller| {
            let node = Arc::clone(&nodes[caller % nodes.len()]);
            let (pool, place) = (Arc::clone(&pool), pool.next.fetch_add(1, Ordering::Relaxed));
            async move {
                let Some(volume) = pool.names.get(place) else { return Ok(false) };
                node.claim(volume, OWN).await.map(|()| true)
            }
        })
        .await
    }

    /// Measures claims of own volumes against the floor, and with one server and three.
    pub async fn claims(&mut self) -> Result<()> {
        let callers = CALLERS.min(self.args.nodes());
        for _ in 0..self.args.rounds {
            for server in 1..ALL.len() {
                if self.site.servers[server].is_some() {
                    self.site.kill_server(server)?;
                }
            }
            let pool = self.pool(self.args.time() * 4).await?;
            self.fleet.join(callers, &[0]).await?;
            self.claim_own(1, &pool).await?;
            let one = self.claim_own(callers, &pool).await?;
            self.site.start_servers()?;
            let three = self.claim_own(callers, &pool).await?;
            self.report.add("watching", three.per_s / one.per_s, &format!("{callers} callers"));
            self.fleet.join(callers, &ALL).await?;
            let floor = self.floor(CALLERS).await?;
            let claims = self.claim_own(callers, &pool).await?;
            self.report.add("floor_per_s", floor.per_s, "");
            let of = format!("{:.0}/s against {:.0}/s", claims.per_s, floor.per_s);
            self.report.add("claims_per_s", claims.per_s / floor.per_s, &of);
            let floor = self.floor_p50().await?;
            let claims = self.claim_own(1, &pool).await?;
            let of = format!("{:.2} ms against {floor:.2} ms", claims.p50_ms);
            self.report.add("claim_p50", claims.p50_ms / floor, &of);
        }
        Ok(())
    }

    /// Measures claims of volumes that a controller attaches. The controller is of this program, and answers at once.
    pub async fn attach(&mut self) -> Result<()> {
        self.site.start_servers()?;
        self.controller.begin(1, &ALL, Role::Controls);
        self.fleet.join(1, &ALL).await?;
        let time = self.args.time();
        for _ in 0..self.args.rounds {
            let floor = self.floor_p50().await?;
            let names = self.register((200.0 * time.as_secs_f64()).ceil() as usize, ATTACHING, OWN).await?;
            // The first claim waits until the servers know the controller.
            self.fleet.nodes[0].claim(&names[0], OWN).await?;
            let (node, next) = (Arc::clone(&self.fleet.nodes[0]), AtomicUsize::new(1));
            let attached = load::run(1, time, move |_| {
                let (node, name) =
                    (Arc::clone(&node), names.get(next.fetch_add(1, Ordering::Relaxed)).cloned());
                async move {
                    let Some(name) = name else { return Ok(false) };
                    node.claim(&name, OWN).await.map(|()| true)
                }
            })
            .await?;
            let of = format!("{:.2} ms against {floor:.2} ms", attached.p50_ms);
            self.report.add("attach_p50", attached.p50_ms / floor, &of);
        }
        Ok(())
    }

    /// Measures how long it takes until another server's list has a change.
    pub async fn lag(&mut self) -> Result<()> {
        self.site.start_servers()?;
        let (mut here, mut there) = (self.operator(0)?, self.operator(1)?);
        let names = self.new_names(CHANGES.min(10 * self.args.rounds));
        let mut lags = Vec::new();
        for name in &names {
            change(&mut here, register(name, PLAIN, OWN)).await?;
            let changed = Instant::now();
            self.listed(&mut there, name).await?;
            lags.push(changed.elapsed().as_secs_f64() * 1000.0);
        }
        let of = format!("{} changes, with the time of a list", lags.len());
        self.report.add("lag_most_ms", lags.iter().copied().fold(0.0, f64::max), &of);
        self.report.add("lag_ms", median(lags), &of);
        Ok(())
    }

    /// Measures what a server with all sessions uses while no claim is taken.
    pub async fn idle(&mut self) -> Result<()> {
        self.site.start_servers()?;
        let nodes = self.args.nodes();
        let joined = self.fleet.join(nodes, &[0]).await?;
        self.report.add("join_s", joined.as_secs_f64(), &format!("{nodes} nodes at one server"));
        let begun = Instant::now();
        self.reported(AdminClient::new(self.site.channel(1, &self.operator)?)).await?;
        let written = joined + begun.elapsed();
        self.report.add("reported_s", written.as_secs_f64(), &format!("{nodes} nodes, 2 plugins each"));
        tokio::time::sleep(Duration::from_secs(2)).await;
        let time = if self.args.rounds > 1 { IDLE } else { IDLE / 4 };
        let (before, begun) = (self.site.server(0)?.cpu()?, Instant::now());
        tokio::time::sleep(time).await;
        let used = self.site.server(0)?.cpu()? - before;
        let percent = 100.0 * used / begun.elapsed().as_secs_f64();
        self.report.add("idle_cpu", percent, &format!("{nodes} sessions, {} s", time.as_secs()));
        Ok(())
    }

    /// Measures claims of one volume by all nodes at once.
    pub async fn one_volume(&mut self) -> Result<()> {
        self.site.start_servers()?;
        let nodes = self.args.nodes();
        self.fleet.join(nodes, &ALL).await?;
        let names = self.register(self.args.rounds, PLAIN, SHARED).await?;
        tokio::time::sleep(Duration::from_secs(2)).await;
        for name in &names {
            let floor = self.floor(CALLERS).await?;
            self.report.add("floor_per_s", floor.per_s, "");
            let folds = self.raw.swap(&self.template, 1, FOLDED, self.args.time()).await?;
            let raw = folds.per_s * FOLDED as f64;
            let of = format!("{FOLDED} in a transaction: {raw:.0}/s against {:.0}/s", floor.per_s);
            self.report.add("raw_one_volume_per_s", raw / floor.per_s, &of);
            let begun = Instant::now();
            try_join_all(self.fleet.nodes.iter().map(|node| node.claim_in_vain(name, SHARED))).await?;
            let per_s = nodes as f64 / begun.elapsed().as_secs_f64();
            let of = format!("{nodes} nodes: {per_s:.0}/s against {:.0}/s", floor.per_s);
            self.report.add("refused_per_s", per_s / floor.per_s, &of);
            let revision = self.raw.revision().await?;
            let before = self.site.cpu()?;
            let (granted, begun) = (AtomicUsize::new(0), Instant::now());
            let claiming = self.fleet.nodes.iter().map(async |node| {
                node.claim(name, SHARED).await?;
                granted.fetch_add(1, Ordering::Relaxed);
                anyhow::Ok(())
            });
            let ended = tokio::time::timeout(AT_ONCE, try_join_all(claiming)).await;
            let (took, granted) = (begun.elapsed().as_secs_f64(), granted.into_inner());
            let used = self.site.cpu()?;
            if let Ok(ended) = ended {
                ended?;
            }
            let per_s = granted as f64 / took;
            let of = format!(
                "{granted} of {nodes} nodes in {took:.1} s: {per_s:.0}/s against {:.0}/s",
                floor.per_s
            );
            self.report.add("one_volume_per_s", per_s / floor.per_s, &of);
            for ((key, used), before) in CPU_OF_CLAIM.into_iter().zip(used).zip(before) {
                self.report.add(key, (used - before) * 1000.0 / granted as f64, &format!("{granted} claims"));
            }
            // Beats of servers are among them.
            let transactions = self.raw.revision().await? - revision;
            let of = format!("{granted} claims, {transactions} transactions of etcd");
            self.report.add("one_volume_folded", granted as f64 / transactions as f64, &of);
            if granted < nodes {
                // Servers that still try would disturb what follows.
                return self.stop();
            }
        }
        Ok(())
    }

    /// Ends all sessions and servers, so that what follows begins with new ones.
    pub fn stop(&mut self) -> Result<()> {
        self.fleet.leave();
        self.controller.leave();
        for server in ALL {
            if self.site.servers[server].is_some() {
                self.site.kill_server(server)?;
            }
        }
        Ok(())
    }
}

/// Makes a change. The same change again changes nothing, so it is repeated while the server is behind etcd.
pub async fn change(client: &mut ClusterClient<Channel>, ask: ChangeAsk) -> Result<()> {
    let begun = Instant::now();
    while let Err(error) = client.change(ask.clone()).await {
        let is_late = matches!(error.code(), Code::Unavailable | Code::DeadlineExceeded);
        ensure!(is_late && begun.elapsed() < LIMIT, "a change of volumes: {error}");
        tokio::time::sleep(AGAIN).await;
    }
    Ok(())
}

/// Returns the call that registers a volume of the namespace `default`.
pub fn register(volume: &str, plugin: &str, access_mode: &str) -> ChangeAsk {
    let capability = Capability { access_mode: access_mode.into(), attachment_mode: "file-system".into() };
    let spec = Spec { capabilities: vec![capability], ..Spec::default() };
    let register = Register {
        namespace: String::new(),
        volume: volume.into(),
        plugin: plugin.into(),
        external_id: external_id(volume),
        spec: Some(spec),
    };
    ChangeAsk { what: Some(change_ask::What::Register(register)) }
}
