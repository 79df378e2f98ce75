//! The metrics of this server as OpenMetrics text: what it has counted, and what it has at the moment of the question.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use csid::metrics::Scrape;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::drive::Driving;
use crate::failure::Result;
use crate::sessions::Sessions;
use crate::status::{NodeStates, Work, work_of};

/// How long the answer waits for etcd and for the cache. What has not come is left out.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long a count of the nodes serves. It reads the row of each node.
const COUNTED: Duration = Duration::from_secs(10);
/// What the metrics are read from.
#[derive(Clone)]
pub struct Sources {
    pub cluster: Arc<Cluster>,
    pub sessions: Arc<Sessions>,
    pub driving: Arc<Driving>,
    /// The last count of the nodes, and when it was made.
    pub counted: Arc<Mutex<Option<(Instant, NodeStates)>>>,
}

impl Scrape for Sources {
    async fn text(&self) -> Result<String, fmt::Error> {
        let mut registry = Registry::with_prefix("csid_server");
        self.cluster.metrics.register(&mut registry);
        registry.register_collector(Box::new(self.seen().await));
        let mut text = String::new();
        text::encode(&mut text, &registry)?;
        Ok(text)
    }
}

impl Sources {
    async fn seen(&self) -> Seen {
        let (lists, volumes) = self.cluster.registry.size();
        let (nodes, work) = tokio::join!(
            tokio::time::timeout(PATIENCE, self.nodes()),
            tokio::time::timeout(PATIENCE, self.work())
        );
        Seen {
            sessions: self.sessions.roles(),
            nodes: nodes.ok().and_then(|counted| warned(counted, "nodes")),
            work: work.ok().and_then(|counted| warned(counted, "volumes")),
            driven: count(self.driving.tasks.running()),
            records: count(volumes),
            // The first list is none again.
            relists: lists.saturating_sub(1),
            lag: self.cluster.presence.lag(),
        }
    }

    /// Counts the nodes by their states.
    async fn nodes(&self) -> Result<NodeStates> {
        let mut counted = self.counted.lock().await;
        if let Some((at, nodes)) = &*counted
            && at.elapsed() < COUNTED
        {
            return Ok(nodes.clone());
        }
        let nodes = self.cluster.see_nodes(|_, _, _| ()).await?;
        *counted = Some((Instant::now(), nodes.clone()));
        Ok(nodes)
    }

    /// Counts the work that is not done.
    async fn work(&self) -> Result<Work> {
        let (records, _) = self.cluster.registry.restless().await?;
        Ok(work_of(&records))
    }
}

fn warned<T>(counted: Result<T>, what: &str) -> Option<T> {
    counted.inspect_err(|error| tracing::warn!(%error, "{what} cannot be counted")).ok()
}

fn count(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

/// What this server has at one moment.
#[derive(Debug)]
struct Seen {
    sessions: [(&'static str, u64); 2],
    /// `None`: they have not come in time. The same of `work`.
    nodes: Option<NodeStates>,
    work: Option<Work>,
    driven: u64,
    records: u64,
    relists: u64,
    lag: Duration,
}

impl Collector for Seen {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        let mut info =
            encoder.encode_descriptor("build", "Which csid-server this is.", None, MetricType::Info)?;
        info.encode_info(&[("version", env!("CARGO_PKG_VERSION"))])?;
        let sessions = self.sessions.map(|(role, count)| ([("role", role)], count));
        gauges(&mut encoder, "sessions", "Sessions of nodes with this server.", sessions)?;
        if let Some(nodes) = &self.nodes {
            let nodes = nodes.iter().map(|(state, count)| ([("state", *state)], *count));
            gauges(&mut encoder, "nodes", "Nodes of the cluster, by state.", nodes)?;
        }
        if let Some(Work { restless, parked, queued, owed }) = self.work {
            let help = "Volumes of the cluster with work that is not done.";
            gauge(&mut encoder, "restless", help, restless)?;
            let help = "Claims and volumes of the cluster whose work a plugin refuses.";
            gauge(&mut encoder, "parked", help, parked)?;
            gauge(&mut encoder, "queued", "Claims of the cluster that wait in a queue.", queued)?;
            gauge(&mut encoder, "owed", "Claims of the cluster that their nodes have yet to end.", owed)?;
        }
        gauge(&mut encoder, "driven", "Volumes that this server acts for now.", self.driven)?;
        gauge(&mut encoder, "cache_records", "Volumes in this server's cache.", self.records)?;
        let help = "How long this server's last beat took to come back from etcd, or has not come back.";
        let lag = Some(&Unit::Seconds);
        encoder
            .encode_descriptor("cache_lag", help, lag, MetricType::Gauge)?
            .encode_gauge(&self.lag.as_secs_f64())?;
        let help = "How often this server has listed all volumes again.";
        encoder
            .encode_descriptor("cache_relists", help, None, MetricType::Counter)?
            .encode_counter::<NoLabelSet, _, u64>(&self.relists, None)
    }
}

fn gauge(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: u64) -> fmt::Result {
    encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)
}

fn gauges<L: EncodeLabelSet>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: impl IntoIterator<Item = (L, u64)>,
) -> fmt::Result {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    values.into_iter().try_for_each(|(labels, value)| family.encode_family(&labels)?.encode_gauge(&value))
}
