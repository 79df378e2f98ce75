//! csid's counts as OpenMetrics text, on a separate socket (`serve`).
//!
//! State: none; the rooms count, and are asked. A label's value is a plugin's id or one of csid's, CSI's or gRPC's own words:
//! never a volume's name, a caller's or a plugin's text.

mod serve;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::TryFutureExt;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};
use tokio::sync::watch;

pub use serve::{Listener, Scrape, serve};

use crate::bus::State;
use crate::cluster::{Node, NodeView, STATES as STATES_OF_NODE};
use crate::histogram::{BOUNDS_USEC, Durations};
use crate::names;
use crate::plugin::{PluginView, Plugins, RpcCount, code_name};
use crate::store::registry::Registry as VolumeRegistry;
use crate::store::rows::Phase;
use crate::store::{Durability, Store};
use crate::volume::{OperationKind, Volumes};

/// A journal that takes longer is left out of the answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// The rooms that are counted.
#[derive(Clone)]
pub struct Sources {
    pub state: watch::Receiver<State>,
    pub plugins: Plugins,
    pub volumes: Volumes,
    pub store: Store,
    pub claims: Arc<dyn VolumeRegistry>,
    /// `None`: the host has no cluster.
    pub node: Option<Arc<Node>>,
}

impl Scrape for Sources {
    async fn text(&self) -> Result<String, fmt::Error> {
        let mut registry = Registry::with_prefix("csid");
        registry.register_collector(Box::new(self.seen().await));
        let mut text = String::new();
        text::encode(&mut text, &registry)?;
        Ok(text)
    }
}

impl Sources {
    async fn seen(&self) -> Seen {
        let mounts = self.store.phases().map_err(crate::Error::from);
        let claims = self.claims.claim_states().map_err(crate::Error::from);
        let journal = async { tokio::try_join!(mounts, claims) };
        let journal = match tokio::time::timeout(PATIENCE, journal).await {
            Ok(Ok(counted)) => Some(counted),
            Ok(Err(error)) => {
                tracing::warn!(%error, "mounts and claims cannot be counted");
                None
            }
            Err(_) => None,
        };
        let (mounts, claims) = journal.unzip();
        let begun = self.volumes.operations_begun().into_iter();
        let begun: BTreeMap<_, _> = begun.map(|(kind, count)| (kind.name(), count)).collect();
        // A kind that was begun once is reported as 0 when there is none.
        let mut operations: BTreeMap<_, _> = begun.keys().map(|kind| (*kind, 0)).collect();
        for operation in self.volumes.operations() {
            *operations.entry(operation.kind.name()).or_default() += 1;
        }
        let counts = self.store.counts();
        Seen {
            state: *self.state.borrow(),
            plugins: self.plugins.list(),
            rpcs: self.plugins.rpcs(),
            mounts,
            claims,
            operations,
            begun,
            steps: self.volumes.operation_steps(),
            commits: [("disk", Durability::Disk), ("process", Durability::Process)]
                .map(|(word, durability)| (word, counts.commits(durability))),
            events: counts.events(),
            node: self.node.as_ref().map(|node| (node.view(), node.owed_seconds())),
        }
    }
}

/// The counts of all rooms at one moment.
#[derive(Debug)]
struct Seen {
    state: State,
    plugins: Vec<PluginView>,
    rpcs: Vec<(String, Vec<RpcCount>)>,
    mounts: Option<BTreeMap<Phase, u64>>,
    claims: Option<BTreeMap<String, u64>>,
    operations: BTreeMap<&'static str, u64>,
    begun: BTreeMap<&'static str, u64>,
    steps: BTreeMap<(OperationKind, &'static str), Durations>,
    commits: [(&'static str, Durations); 2],
    events: BTreeMap<String, u64>,
    /// The node of a cluster, and how long the servers have not learned of the oldest end of a claim.
    node: Option<(NodeView, u64)>,
}

const STATES: [State; 5] =
    [State::Starting, State::Restoring, State::Ready, State::Degraded, State::Stopping];
const PLUGIN_STATES: [&str; 7] =
    ["stopped", "starting", "probing", "ready", "unhealthy", "failed", "stopping"];
const PHASES: [Phase; 6] =
    [Phase::Mounting, Phase::Mounted, Phase::Unmounting, Phase::Uncertain, Phase::Lost, Phase::Waiting];
const CLAIM_STATES: [&str; 5] = ["pending", "taken", "node-detached", "controller-detached", "parked"];

impl Collector for Seen {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        let mut family = Family(&mut encoder);
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        family
            .0
            .encode_descriptor("build", "Which csid this is.", None, MetricType::Info)?
            .encode_info(&version)?;
        let states = STATES.map(|state| ([("state", state.as_str())], u64::from(state == self.state)));
        family.gauges("state", "csid's state: 1 is the one that it is in.", states)?;

        let of = |state| self.plugins.iter().filter(|plugin| plugin.state == state).count() as u64;
        let states = PLUGIN_STATES.map(|state| ([("state", state)], of(state)));
        family.gauges("plugins", "Plugins, by the state of the active instance.", states)?;
        let each = |value: fn(&PluginView) -> u64| {
            self.plugins.iter().map(move |plugin| ([("plugin", plugin.id.as_str())], value(plugin)))
        };
        let healthy = each(|plugin| plugin.healthy.into());
        family.gauges("plugin_healthy", "1: the plugin's active instance is healthy.", healthy)?;
        let restarts = each(|plugin| plugin.restarts.into());
        family.counters(
            "plugin_restarts",
            "How often the plugin's active instance was started again.",
            restarts,
        )?;
        let rpcs = self.rpcs.iter().flat_map(|(id, counts)| {
            let labels = |count: &RpcCount| {
                [("plugin", id.as_str()), ("rpc", count.rpc), ("code", code_name(count.code))]
            };
            counts.iter().map(move |count| (labels(count), &count.took))
        });
        family.histograms("plugin_rpc_duration", "RPCs to plugins, by their end's gRPC code.", rpcs)?;

        if let Some((node, age)) = &self.node {
            let states = STATES_OF_NODE.map(|state| ([("state", state)], u64::from(state == node.state)));
            family.gauges(
                "cluster_state",
                "The state in the cluster: 1 is the one that it is in.",
                states,
            )?;
            let help = "Claims that have ended here, which the cluster's servers have yet to learn.";
            family.gauge("owed", help, None, u64::from(node.owed))?;
            let help =
                "How long the servers have not learned of the oldest of them, since csid's start at most.";
            family.gauge("owed_age", help, Some(&Unit::Seconds), *age)?;
        }
        if let Some(mounts) = &self.mounts {
            let count = |phase| mounts.get(&phase).copied().unwrap_or(0);
            let mounts = PHASES.map(|phase| ([("state", names::word(phase))], count(phase)));
            family.gauges("mounts", "Mounts, by state.", mounts)?;
        }
        if let Some(claims) = &self.claims {
            let count = |state: &str| claims.get(state).copied().unwrap_or(0);
            let claims = CLAIM_STATES.map(|state| ([("state", state)], count(state)));
            family.gauges("claims", "Claims, by state.", claims)?;
        }

        let kinds = |counts: &'_ BTreeMap<&'static str, u64>| {
            counts.iter().map(|(kind, count)| ([("kind", *kind)], *count)).collect::<Vec<_>>()
        };
        family.gauges("operations_in_flight", "Operations under way.", kinds(&self.operations))?;
        family.counters("operations", "Operations that were begun.", kinds(&self.begun))?;

        let labels = |kind: OperationKind, step| [("kind", kind.name()), ("step", step)];
        let steps = self.steps.iter().map(|((kind, step), took)| (labels(*kind, *step), took));
        let help = "Steps of mounts, restores and unmounts that have ended.";
        family.histograms("operation_step_duration", help, steps)?;

        let commits = self.commits.iter().map(|(durability, took)| ([("durability", *durability)], took));
        let help = "The journal's commits, by what they have to survive: a power cut (disk) or csid's end (process).";
        family.histograms("journal_commit_duration", help, commits)?;
        let events = self.events.iter().map(|(kind, count)| ([("type", kind.as_str())], *count));
        family.counters("events", "Events, by type.", events)
    }
}

/// A metric with one name and several labels.
struct Family<'a, 'e>(&'a mut DescriptorEncoder<'e>);

impl Family<'_, '_> {
    fn gauges<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, u64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        values.into_iter().try_for_each(|(labels, value)| family.encode_family(&labels)?.encode_gauge(&value))
    }

    /// Writes a gauge without labels.
    fn gauge(&mut self, name: &str, help: &str, unit: Option<&Unit>, value: u64) -> fmt::Result {
        self.0.encode_descriptor(name, help, unit, MetricType::Gauge)?.encode_gauge(&value)
    }

    fn counters<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, u64)>,
    ) -> fmt::Result {
        let mut family = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        values.into_iter().try_for_each(|(labels, value)| {
            family.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&value, None)
        })
    }

    fn histograms<'d, L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, &'d Durations)>,
    ) -> fmt::Result {
        let seconds = |usec: u64| usec as f64 / 1e6;
        let bounds = BOUNDS_USEC.iter().map(|usec| seconds(*usec)).chain([f64::INFINITY]);
        let mut family = self.0.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Histogram)?;
        values.into_iter().try_for_each(|(labels, took)| {
            let buckets: Vec<_> = bounds.clone().zip(took.buckets).collect();
            let (sum, count) = (seconds(took.total_usec), took.count());
            family.encode_family(&labels)?.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
        })
    }
}
