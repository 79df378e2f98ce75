//! What this server counts, for Prometheus. `scrape` serves it.
//!
//! A label's value is a word of csid, of gRPC or of the contract, or the name of a plugin in a grant. It is never a name or a text that a
//! caller sends. So the number of series has a limit.

use std::time::Duration;

use csi_proto::cluster::v1::ListExternal;
use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::controller_call::Method;
use csid::cluster::rpcs;
use csid::plugin::code_name;
use csid_etcd::Observe;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use tonic::Code;

use crate::grants::Grants;

/// The calls of the contract, with what their addresses end with.
const RPCS: [&str; 22] = [
    "Session",
    "Claim",
    "Withdraw",
    "Detached",
    "Hold",
    "Release",
    "Change",
    "Volume",
    "Volumes",
    "Claims",
    "Expanded",
    "Inventory",
    "Explain",
    "Nodes",
    "Node",
    "SetNode",
    "Servers",
    "Audit",
    "Upgrade",
    "Status",
    "Restored",
    "Resume",
];
/// Why Hellos are refused.
const REASONS: [&str; 9] = [
    "wrong-cluster",
    "too-old",
    "too-new",
    "blocked",
    "another-machine",
    "twice",
    "fenced",
    "ahead-of-etcd",
    "etcd-restored",
];
/// What stands for all that is not in a table.
const OTHER: &str = "other";

/// The upper bounds of durations, in seconds.
const SECONDS: [f64; 16] =
    [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0];
/// The upper bounds of claims in a change.
const CLAIMS: [f64; 7] = [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0];

/// Labels of a metric, whose values are words of csid's.
type Words<const N: usize> = [(&'static str, &'static str); N];
type Counters<const N: usize> = Family<Words<N>, Counter>;
type Durations<L> = Family<L, Histogram, fn() -> Histogram>;

/// The counts of a server. Copies share them.
#[derive(Clone)]
pub struct Metrics {
    requests: Counters<2>,
    request_durations: Durations<Words<1>>,
    txn_durations: Durations<Words<1>>,
    txn_claims: Histogram,
    call_durations: Durations<[(&'static str, String); 3]>,
    takeovers: Counter,
    stale_calls: Counter,
    refused: Counters<1>,
    etcd_errors: Counters<1>,
}

fn durations<L: Clone + std::hash::Hash + Eq>() -> Durations<L> {
    Family::new_with_constructor(|| Histogram::new(SECONDS))
}

impl Default for Metrics {
    fn default() -> Metrics {
        let (requests, takeovers, stale_calls, refused, etcd_errors) = Default::default();
        Metrics {
            requests,
            request_durations: durations(),
            txn_durations: durations(),
            txn_claims: Histogram::new(CLAIMS),
            call_durations: durations(),
            takeovers,
            stale_calls,
            refused,
            etcd_errors,
        }
    }
}

impl Metrics {
    /// Enters the metrics into a registry.
    pub fn register(&self, into: &mut Registry) {
        let Metrics { requests, request_durations, txn_durations, txn_claims, .. } = self.clone();
        let Metrics { call_durations, takeovers, stale_calls, refused, etcd_errors, .. } = self.clone();
        let seconds = || Unit::Seconds;
        into.register("requests", "Calls of nodes and operators, by their gRPC code", requests);
        let help = "How long calls take until their answer begins";
        into.register_with_unit("request_duration", help, seconds(), request_durations);
        into.register_with_unit("txn_duration", "Transactions in etcd", seconds(), txn_durations);
        into.register("txn_claims", "Claims that one change of a volume has changed", txn_claims);
        let help = "Controller calls that were sent to nodes, until their end came";
        into.register_with_unit("call_duration", help, seconds(), call_durations);
        into.register("takeovers", "Volumes for which this server goes on after another one", takeovers);
        let help = "Controller calls that nodes did not make, because they have had a later one";
        into.register("stale_calls", help, stale_calls);
        into.register("refused", "Callers that were refused before a call was begun", refused);
        into.register("etcd_errors", "Calls of etcd's members that failed", etcd_errors);
    }

    /// Counts a call. `path`: what the caller has asked for.
    pub fn requested(&self, path: &str, code: Code, took: Duration) {
        let rpc = rpc_at(path);
        self.requests.get_or_create(&[("rpc", rpc), ("code", code_name(code))]).inc();
        self.request_durations.get_or_create(&[("rpc", rpc)]).observe(took.as_secs_f64());
    }

    /// Counts a refusal by a limit, or of a certificate.
    pub fn refused_by(&self, reason: &'static str) {
        self.refused.get_or_create(&[("reason", reason)]).inc();
    }

    /// Counts a Hello that was refused.
    pub fn refused_hello(&self, reason: &str) {
        self.refused_by(REASONS.into_iter().find(|known| *known == reason).unwrap_or(OTHER));
    }

    /// Counts a controller call. `None`: no end came.
    pub fn called(&self, plugin: &str, rpc: &'static str, how: Option<&How>, took: Duration) {
        let code = match how {
            Some(How::Answer(_)) => "OK",
            Some(How::Failed(failed)) => match failed.code.and_then(|code| i32::try_from(code).ok()) {
                Some(code) => code_name(Code::from_i32(code)),
                None => "NO_ANSWER",
            },
            Some(How::NotStarted(_)) => "NOT_STARTED",
            Some(How::Stale(_)) => {
                self.stale_calls.inc();
                "STALE"
            }
            None => "LOST",
        };
        let labels = [("plugin", plugin.to_owned()), ("rpc", rpc.to_owned()), ("code", code.to_owned())];
        self.call_durations.get_or_create(&labels).observe(took.as_secs_f64());
    }

    /// Counts a volume for which this server goes on after another one.
    pub fn took_over(&self) {
        self.takeovers.inc();
    }
}

impl Observe for Metrics {
    fn transaction(&self, result: &'static str, took: Duration) {
        self.txn_durations.get_or_create(&[("result", result)]).observe(took.as_secs_f64());
    }

    fn claims(&self, count: usize) {
        self.txn_claims.observe(count as f64);
    }

    fn failed(&self, code: &'static str) {
        self.etcd_errors.get_or_create(&[("code", code)]).inc();
    }
}

/// Returns the RPC of a plugin that a controller call asks for.
pub fn method_name(method: Option<&Method>) -> &'static str {
    match method {
        Some(Method::Publish(_)) => rpcs::PUBLISH,
        Some(Method::Unpublish(_)) => rpcs::UNPUBLISH,
        Some(Method::Create(_)) => rpcs::CREATE,
        Some(Method::Delete(_)) => rpcs::DELETE,
        Some(Method::Expand(_)) => rpcs::EXPAND,
        Some(Method::Validate(_)) => rpcs::VALIDATE,
        Some(Method::Snapshot(_)) => rpcs::SNAPSHOT,
        Some(Method::DeleteSnapshot(_)) => rpcs::DELETE_SNAPSHOT,
        Some(Method::List(ListExternal { snapshots: true, .. })) => rpcs::LIST_SNAPSHOTS,
        Some(Method::List(_)) => rpcs::LIST,
        Some(Method::Capacity(_)) => rpcs::CAPACITY,
        None => OTHER,
    }
}

/// Returns the name of a call of the contract.
fn rpc_at(path: &str) -> &'static str {
    let name = path.strip_prefix("/csid.cluster.v1.").and_then(|path| path.split_once('/'));
    RPCS.into_iter().find(|rpc| name.is_some_and(|(_, name)| name == *rpc)).unwrap_or(OTHER)
}

/// Returns a plugin's name as a label: it stands in a grant, and so an administrator has written it.
pub fn plugin_of<'a>(grants: &Grants, plugin: &'a str) -> &'a str {
    match grants.name_controller(None, plugin) {
        true => plugin,
        false => OTHER,
    }
}

#[cfg(test)]
mod tests {
    use csi_proto::cluster::v1::CallFailure;
    use prometheus_client::encoding::text;

    use super::*;

    fn text_of(metrics: &Metrics) -> String {
        let mut registry = Registry::with_prefix("csid_server");
        metrics.register(&mut registry);
        let mut text = String::new();
        text::encode(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn each_call_of_the_contract_has_its_name() {
        let contract = include_str!("../../proto/cluster/v1/cluster.proto");
        let rpcs = contract.lines().filter_map(|line| line.trim().strip_prefix("rpc "));
        let rpcs: Vec<&str> = rpcs.filter_map(|rest| rest.split('(').next()).collect();
        assert_eq!(rpcs.len(), RPCS.len());
        for rpc in rpcs {
            assert_eq!(rpc_at(&format!("/csid.cluster.v1.Cluster/{rpc}")), rpc);
        }
    }

    #[test]
    fn text_of_a_caller_is_no_label() {
        let metrics = Metrics::default();
        let canary = "hunter2";
        metrics.requested(&format!("/csid.cluster.v1.Cluster/{canary}"), Code::Unimplemented, Duration::ZERO);
        metrics.requested(&format!("/{canary}/Claim"), Code::Unimplemented, Duration::ZERO);
        metrics.refused_hello(canary);
        let grants = Grants::default();
        let failed = CallFailure {
            kind: canary.into(),
            message: canary.into(),
            code: Some(4711),
            ..CallFailure::default()
        };
        let (plugin, how) = (plugin_of(&grants, canary), How::Failed(failed));
        metrics.called(plugin, "publish", Some(&how), Duration::ZERO);
        let text = text_of(&metrics);
        assert!(!text.contains(canary), "{text}");
        assert!(
            text.contains("csid_server_requests_total{rpc=\"other\",code=\"UNIMPLEMENTED\"} 2"),
            "{text}"
        );
        assert!(text.contains("csid_server_refused_total{reason=\"other\"} 1"), "{text}");
        let call =
            "csid_server_call_duration_seconds_count{plugin=\"other\",rpc=\"publish\",code=\"UNKNOWN\"} 1";
        assert!(text.contains(call), "{text}");
    }

    #[test]
    fn stale_call_is_counted_twice() {
        let metrics = Metrics::default();
        metrics.called("p", "publish", Some(&How::Stale(true)), Duration::ZERO);
        metrics.called("p", "publish", None, Duration::ZERO);
        let text = text_of(&metrics);
        assert!(text.contains("csid_server_stale_calls_total 1"), "{text}");
        for code in ["STALE", "LOST"] {
            let call =
                format!("call_duration_seconds_count{{plugin=\"p\",rpc=\"publish\",code=\"{code}\"}} 1");
            assert!(text.contains(&call), "{text}");
        }
    }
}
