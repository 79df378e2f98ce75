//! What all calls share: the configuration, the registry, this server's presence, and the rows that writes compare.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use csid::store::registry::{Record, Registry, VolumeName};
use csid::volume::rules::Claims;
use csid::{Error, Kind};
use csid_etcd::{EtcdRegistry, Expected, Guard, RowKey, RowStore, Written};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::asks::Asks;
use crate::certificates::Certificates;
use crate::config::Config;
use crate::edges;
use crate::failure::{Result, ServerError};
use crate::joins::Joins;
use crate::metrics::Metrics;
use crate::presence::Presence;
use crate::rows::{self, MetaRow, Mode, NodeRow, NodeState, PluginRow, Read, Schemas, UsedRow};
use crate::turns::Turns;

/// The error of what is refused while etcd is a backup of another etcd cluster.
pub const RESTORED: &str = "etcd was restored from a backup, and no operator has said so";
/// The least time between two writes of a server that another machine wants to be a node.
const BETWEEN_OTHERS: Duration = Duration::from_secs(10);

/// How long the reason for a rolled back claim is kept, and the most of them.
const KEPT: Duration = Duration::from_secs(60);
const FAILURES: usize = 10_000;
/// The most plugins without a row that are remembered.
const PLUGINS: usize = 10_000;
/// The same of counts of volumes.
const USED: usize = 100_000;

pub struct Cluster {
    pub config: Config,
    pub registry: EtcdRegistry,
    pub rows: RowStore,
    pub presence: Presence,
    /// The versions of values that this server knows.
    pub schemas: Schemas,
    pub certificates: Certificates,
    pub metrics: Metrics,
    /// The calls of callers that wait for claims.
    pub asks: Asks,
    pub joins: Joins,
    /// The turns of claims of one volume.
    pub turns: Turns,
    known: Mutex<Known>,
    /// The last read of all names of nodes. `None`: there was none.
    pub(crate) seen_names: tokio::sync::Mutex<Option<SeenNames>>,
    /// The generation and the mode of the cluster, as this server has read them last. `None`: it has not yet.
    phase: watch::Sender<Option<Phase>>,
    /// New claims of each node that are being written.
    writing: Mutex<HashMap<String, usize>>,
    /// When this server has written last that another machine wants to be a node.
    others: Mutex<HashMap<String, Instant>>,
    /// Volumes that may need a controller's call.
    due: mpsc::Sender<ToDrive>,
    /// Volumes whose claims wait for a controller's call. Each changes when a call may have granted or ended one.
    driven: Mutex<HashMap<VolumeName, watch::Sender<Driven>>>,
    /// Why claims were rolled back, by their names.
    failures: Mutex<HashMap<String, (Error, Instant)>>,
}

/// What a controller's call has last made of a volume's record. `None`: it has to be read.
pub type Driven = Option<Arc<CallOutcome>>;

/// A record as the outcome of a call was written.
pub struct CallOutcome {
    pub record: Record,
    /// The node that the call was for.
    pub node: String,
    /// Its boot, by the row that the transaction has compared. `None`: the node gets no claim.
    pub boot: Option<String>,
    /// The record as the rules take it for the node, by the rows that the transaction has compared.
    pub claims: Claims,
}

/// A volume that may need a controller's call.
pub struct ToDrive {
    pub name: VolumeName,
    /// The record as this server has just written it. `None`: it has to be read.
    pub written: Option<Box<Record>>,
}

/// A new claim that is being written. It counts until the drop.
pub struct Writing<'a> {
    cluster: &'a Cluster,
    node: &'a str,
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let mut writing = self.cluster.writing();
        if let Some(count) = writing.get_mut(self.node) {
            *count -= 1;
            if *count == 0 {
                writing.remove(self.node);
            }
        }
    }
}

/// Nodes by plugin and the plugin's name, as they were at a revision of the nodes' rows.
pub struct NodeIds {
    pub revision: u64,
    pub nodes: HashMap<(String, String), Vec<String>>,
}

/// Nodes by the names that plugins have had for them.
pub type NodesByName = HashMap<(String, String), Vec<Named>>;

/// The nodes as one read of all rows has found them.
pub struct SeenNames {
    /// When the read was begun.
    pub begun: Instant,
    /// `None`: the read has failed.
    pub nodes: Option<Arc<NodesByName>>,
}

/// A node that has a name.
pub struct Named {
    pub node: String,
    pub may_have_sessions: bool,
}

/// Rows as they were read last. etcd compares them with each write, so an old one costs a second try.
#[derive(Default)]
struct Known {
    meta: Option<Read<MetaRow>>,
    nodes: HashMap<String, Read<NodeRow>>,
    /// `None`: there was no row.
    plugins: HashMap<String, Option<Read<PluginRow>>>,
    /// The same of counts, by node and plugin.
    used: HashMap<(String, String), Option<Read<UsedRow>>>,
    /// `None`: they were not read yet.
    node_ids: Option<Arc<NodeIds>>,
}

impl Cluster {
    pub fn new(
        config: Config,
        certificates: Certificates,
        registry: EtcdRegistry,
        presence: Presence,
        due: mpsc::Sender<ToDrive>,
        schemas: Schemas,
    ) -> Self {
        let rows = registry.rows();
        let metrics = Metrics::default();
        registry.observe(Arc::new(metrics.clone()));
        let (known, writing, others, failures) = Default::default();
        let (driven, asks, joins, phase) = Default::default();
        Cluster {
            config,
            registry,
            rows,
            presence,
            schemas,
            certificates,
            metrics,
            asks,
            joins,
            turns: Turns::default(),
            known,
            seen_names: tokio::sync::Mutex::default(),
            phase,
            writing,
            others,
            due,
            driven,
            failures,
        }
    }

    /// Has a volume's controller called, if that is due. Otherwise it is found later.
    pub fn wake(&self, name: &VolumeName) {
        let _ = self.due.try_send(ToDrive { name: name.clone(), written: None });
    }

    /// Does the same for a record that this server has just written.
    pub fn wake_written(&self, record: &Record) {
        let _ =
            self.due.try_send(ToDrive { name: record.name.clone(), written: Some(record.clone().into()) });
    }

    /// Says that a controller's call has changed a volume's record.
    pub fn was_driven(&self, name: &VolumeName) {
        self.was_driven_to(name, None);
    }

    /// Does the same, with the outcome that is written.
    pub fn was_driven_to(&self, name: &VolumeName, outcome: Driven) {
        let mut driven = self.driven.lock().unwrap_or_else(PoisonError::into_inner);
        driven.retain(|_, sender| sender.receiver_count() > 0);
        if let Some(sender) = driven.get(name) {
            sender.send_replace(outcome);
        }
    }

    /// Returns what changes when a controller's call has changed a volume's record.
    pub fn subscribe_driven(&self, name: &VolumeName) -> watch::Receiver<Driven> {
        let mut driven = self.driven.lock().unwrap_or_else(PoisonError::into_inner);
        driven.retain(|_, sender| sender.receiver_count() > 0);
        driven.entry(name.clone()).or_insert_with(|| watch::Sender::new(None)).subscribe()
    }

    fn failures(&self) -> MutexGuard<'_, HashMap<String, (Error, Instant)>> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps for a while why a claim was rolled back, for the caller that waits for it.
    pub fn note_failure(&self, claim: &str, error: Error) {
        let mut failures = self.failures();
        failures.retain(|_, (_, at)| at.elapsed() < KEPT);
        if failures.len() < FAILURES {
            failures.insert(claim.to_owned(), (error, Instant::now()));
        }
    }

    /// Returns why a claim was rolled back. `None`: it was not, or another server knows.
    pub fn failure(&self, claim: &str) -> Option<Error> {
        self.failures().get(claim).map(|(error, _)| error.clone())
    }

    /// Returns a failure that was noted after a call has begun. `None`: there is none, or another server knows.
    pub fn failure_since(&self, what: &str, begun: Instant) -> Option<Error> {
        self.failures().get(what).filter(|(_, at)| *at >= begun).map(|(error, _)| error.clone())
    }

    fn writing(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts one claim more of a node, or refuses it by the limit. Claims that other servers write at the same moment are not counted.
    pub async fn place<'a>(&'a self, node: &'a str) -> Result<Writing<'a>> {
        let had = {
            let mut writing = self.writing();
            let count = writing.entry(node.to_owned()).or_insert(0);
            *count += 1;
            *count - 1
        };
        let place = Writing { cluster: self, node };
        // A claim that was written meanwhile may count twice. The caller repeats the call then.
        let queued = self.registry.queued_of(node).await?;
        let count = self.registry.claims_of(node).await? + queued + had;
        match count >= self.config.max_claims {
            true => {
                let text = format!(
                    "node {node} has {count} claims, {queued} of which wait, and the limit is {}",
                    self.config.max_claims
                );
                Err(Error::new(Kind::RateLimited, text).into())
            }
            false => Ok(place),
        }
    }

    /// Returns whether this server may write again that another machine wants to be this node. Each Hello of it would be a write.
    pub fn may_note(&self, node: &str) -> bool {
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        others.retain(|_, last| last.elapsed() < BETWEEN_OTHERS);
        let is_first = !others.contains_key(node);
        if is_first {
            others.insert(node.to_owned(), Instant::now());
        }
        is_first
    }

    /// Does something for as long as this server follows etcd.
    pub async fn while_here<T>(&self, doing: impl Future<Output = Result<T>>) -> Result<T> {
        let here = self.presence.here()?;
        let mut presence = self.presence.subscribe();
        tokio::select! {
            biased;
            done = doing => done,
            _ = presence.wait_for(|now| now.as_ref() != Some(&here)) => Err(self.presence.cut_off()),
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the cluster's row, perhaps an old one.
    pub async fn meta(&self) -> Result<Read<MetaRow>> {
        if let Some(meta) = self.known().meta.clone() {
            return Ok(meta);
        }
        self.meta_now().await
    }

    /// Reads the cluster's row.
    pub async fn meta_now(&self) -> Result<Read<MetaRow>> {
        let row = self.rows.read(&RowKey::Meta).await?;
        let row = row.ok_or_else(|| ServerError::Unavailable("etcd has no cluster".into()))?;
        let mut meta: Read<MetaRow> = rows::read(&RowKey::Meta, &row)?;
        if let Err(error) = check(&meta.value, &self.config.cluster, self.schemas) {
            self.known().meta = None;
            self.presence.close(Some(error.to_string()));
            return Err(error);
        }
        if meta.value.etcd.as_ref().is_some_and(|etcd| *etcd != rows::etcd_name(self.rows.etcd_cluster())) {
            meta.value.mode = Mode::Restored;
        }
        let now = Phase::of(&meta);
        self.phase.send_if_modified(|phase| {
            // An earlier read may end later.
            let is_new = phase.as_ref().is_none_or(|phase| phase.revision < now.revision);
            let is_other = phase.as_ref().is_none_or(|phase| !phase.is_same(&now));
            if is_new {
                *phase = Some(now);
            }
            is_new && is_other
        });
        self.known().meta = Some(meta.clone());
        Ok(meta)
    }

    /// Waits until this server has read that the cluster is in another generation or mode than `phase`.
    pub async fn left(&self, phase: &Phase) {
        let is_over = |now: &Option<Phase>| {
            now.as_ref().is_some_and(|now| now.revision > phase.revision && !now.is_same(phase))
        };
        // The channel lives as long as `self`.
        let _ = self.phase.subscribe().wait_for(is_over).await;
    }

    /// Returns the cluster's row, or an error unless claims are granted.
    pub async fn normal(&self) -> Result<Read<MetaRow>> {
        let meta = self.meta().await?;
        match meta.value.mode {
            Mode::Normal => Ok(meta),
            mode => {
                self.known().meta = None;
                let text = match mode {
                    Mode::Restored => RESTORED,
                    _ => "the cluster recovers from a backup",
                };
                Err(ServerError::Unavailable(text.into()))
            }
        }
    }

    /// Returns a node's row, perhaps an old one. `None`: the node has never joined.
    pub async fn node(&self, node: &str) -> Result<Option<Read<NodeRow>>> {
        if let Some(row) = self.known().nodes.get(node).cloned() {
            return Ok(Some(row));
        }
        self.node_now(node).await
    }

    /// Reads a node's row.
    pub async fn node_now(&self, node: &str) -> Result<Option<Read<NodeRow>>> {
        let key = RowKey::Node(node.to_owned());
        match self.rows.read(&key).await? {
            Some(row) => {
                let row: Read<NodeRow> = rows::read(&key, &row)?;
                self.known().nodes.insert(node.to_owned(), row.clone());
                Ok(Some(row))
            }
            None => {
                self.known().nodes.remove(node);
                Ok(None)
            }
        }
    }

    /// Returns a plugin's row, perhaps an old one. `None`: the plugin has no controller.
    pub async fn plugin(&self, plugin: &str) -> Result<Option<Read<PluginRow>>> {
        if let Some(row) = self.known().plugins.get(plugin).cloned() {
            return Ok(row);
        }
        self.plugin_now(plugin).await
    }

    /// Reads a plugin's row.
    pub async fn plugin_now(&self, plugin: &str) -> Result<Option<Read<PluginRow>>> {
        let key = RowKey::Plugin(plugin.to_owned());
        let row = self.rows.read(&key).await?.map(|row| rows::read(&key, &row)).transpose()?;
        let plugins = &mut self.known().plugins;
        if plugins.len() >= PLUGINS {
            // Names come from registrations. Those that are used are read again.
            plugins.clear();
        }
        plugins.insert(plugin.to_owned(), row.clone());
        Ok(row)
    }

    /// Returns the count of a node's volumes of a plugin, perhaps an old one. `None`: there is none.
    pub async fn used(&self, node: &str, plugin: &str) -> Result<Option<Read<UsedRow>>> {
        if let Some(row) = self.known().used.get(&(node.to_owned(), plugin.to_owned())).cloned() {
            return Ok(row);
        }
        self.used_now(node, plugin).await
    }

    /// Reads the count of a node's volumes of a plugin.
    pub async fn used_now(&self, node: &str, plugin: &str) -> Result<Option<Read<UsedRow>>> {
        let key = RowKey::Used { node: node.to_owned(), plugin: plugin.to_owned() };
        let row = self.rows.read(&key).await?.map(|row| rows::read(&key, &row)).transpose()?;
        self.know_used(node, plugin, row.clone());
        Ok(row)
    }

    /// Remembers a count, unless a later one is known.
    pub fn know_used(&self, node: &str, plugin: &str, row: Option<Read<UsedRow>>) {
        let used = &mut self.known().used;
        if used.len() >= USED {
            used.clear();
        }
        let revision = |row: &Option<Read<UsedRow>>| row.as_ref().map_or(0, |row| row.revision);
        let key = (node.to_owned(), plugin.to_owned());
        if used.get(&key).is_none_or(|known| row.is_none() || revision(known) <= revision(&row)) {
            used.insert(key, row);
        }
    }

    /// Returns the plugins' names of nodes, perhaps old ones.
    pub fn known_node_ids(&self) -> Option<Arc<NodeIds>> {
        self.known().node_ids.clone()
    }

    pub fn know_node_ids(&self, ids: Arc<NodeIds>) {
        self.known().node_ids = Some(ids);
    }

    /// Reads a node's row again. Returns whether it has changed since it was read.
    pub async fn has_changed(&self, node: &str, row: &Read<NodeRow>) -> Result<bool> {
        Ok(self.node_now(node).await?.is_none_or(|now| now.revision != row.revision))
    }

    /// Reads a node's row, and refuses a node that is blocked. `None`: the node has never joined.
    pub async fn unblocked(&self, node: &str) -> Result<Option<Read<NodeRow>>> {
        match self.node_now(node).await? {
            Some(row) if row.value.state == NodeState::Blocked => Err(is_in_state(node, row.value.state)),
            row => Ok(row),
        }
    }

    /// Returns why a node may have no session, by its row in etcd now. `None`: it may have one.
    pub async fn over(&self, node: &str) -> Result<Option<ServerError>> {
        Ok(match self.node_now(node).await?.map(|row| row.value.state) {
            Some(NodeState::Ready | NodeState::Draining) => None,
            Some(state) => Some(is_in_state(node, state)),
            None => Some(not_joined(node)),
        })
    }

    /// Returns a row of a guard that does not hold in etcd now, and forgets what it was. `Some(None)`: etcd gave no answer that decides. `None`: all
    /// guards hold.
    pub async fn broken(&self, guards: &[Guard]) -> Result<Option<Option<RowKey>>> {
        match edges::write(&self.rows, guards, Vec::new()).await? {
            Written::Done { .. } => Ok(None),
            Written::Refused(RowKey::Server(_)) => {
                Err(ServerError::Unavailable("this server's row in etcd is gone".into()))
            }
            Written::Refused(key) => {
                self.forget(&key);
                Ok(Some(Some(key)))
            }
            Written::Unknown => Ok(Some(None)),
        }
    }

    /// Waits for a change of etcd after `index`. `None`: none will come.
    pub async fn registry_changed(&self, index: u64) -> Option<u64> {
        self.registry.changed(index).await.ok()
    }

    /// Forgets a row that a guard has found changed.
    pub fn forget(&self, key: &RowKey) {
        match key {
            RowKey::Meta => self.known().meta = None,
            RowKey::Node(node) => drop(self.known().nodes.remove(node)),
            RowKey::Plugin(plugin) => drop(self.known().plugins.remove(plugin)),
            RowKey::Used { node, plugin } => {
                self.known().used.remove(&(node.clone(), plugin.clone()));
            }
            RowKey::Server(_)
            | RowKey::Session { .. }
            | RowKey::Report(_)
            | RowKey::Heard(_)
            | RowKey::Volume(_) => {}
        }
    }
}

/// A time in which the cluster has one generation and one mode.
#[derive(Clone, Copy, Debug)]
pub struct Phase {
    generation: u64,
    mode: Mode,
    /// That of the row that says so.
    revision: u64,
}

impl Phase {
    pub fn of(meta: &Read<MetaRow>) -> Phase {
        Phase { generation: meta.value.generation, mode: meta.value.mode, revision: meta.revision }
    }

    fn is_same(&self, other: &Phase) -> bool {
        (self.generation, self.mode) == (other.generation, other.mode)
    }
}

/// Returns the guard of the cluster's row.
pub fn meta_guard(meta: &Read<MetaRow>) -> Guard {
    Guard { key: RowKey::Meta, is: Expected::Revision(meta.revision) }
}

/// Returns the guard of a node's row. What is granted after a fence is refused by it.
pub fn node_guard(node: &str, row: &Read<NodeRow>) -> Guard {
    Guard { key: RowKey::Node(node.to_owned()), is: Expected::Revision(row.revision) }
}

pub fn is_in_state(node: &str, state: NodeState) -> ServerError {
    Error::new(Kind::Busy, format!("node {node} is {}", state.word())).into()
}

pub fn not_joined(node: &str) -> ServerError {
    Error::not_found(format!("node {node} has never joined the cluster")).into()
}

/// Refuses another cluster's row, and one of a version that a server does not know. Another server may know it.
pub fn check(meta: &MetaRow, cluster: &str, known: Schemas) -> Result<()> {
    if meta.cluster != cluster {
        let text = format!("etcd has the cluster {:?}, and csid-server.toml names {cluster:?}", meta.cluster);
        return Err(Error::new(Kind::InvalidArgument, text).into());
    }
    if !known.know(meta.schema) {
        let text = format!("etcd has values of version {}, and this server knows {known}", meta.schema);
        return Err(ServerError::Unavailable(text));
    }
    Ok(())
}
