//! The metrics of a server: each that the document lists is served, and moves by the event that it counts.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::{CallClass, ReleaseAsk};
use rustix::process::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::attach::{Controller, claiming, failed, head, user};
use crate::queries;
use crate::site::{First, SOON, Site, eventually, free_ports, open, release_ask};

const DOCUMENT: &str = include_str!("../../../docs/metrics.md");
const DASHBOARD: &str = include_str!("../../../packaging/grafana/csid-server.json");
const ALARMS: &str = include_str!("../../../packaging/prometheus/csid-server.yml");

/// A server that serves its metrics, with its port.
struct Counting {
    site: Site,
    port: u16,
}

/// The value of each sample, by its name and labels.
type Samples = BTreeMap<String, f64>;

impl Counting {
    async fn start() -> Counting {
        let [port, _] = free_ports();
        let site = Site::start_with(1, &format!("metrics = \"127.0.0.1:{port}\"")).await;
        Counting { site, port }
    }

    async fn text(&self) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).await.unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: csid\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (headers, text) = answer.split_once("\r\n\r\n").unwrap();
        assert!(headers.starts_with("HTTP/1.1 200") && headers.contains("openmetrics-text"), "{headers}");
        assert!(text.ends_with("# EOF\n"), "{text}");
        text.to_owned()
    }

    async fn samples(&self) -> Samples {
        let text = self.text().await;
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        samples
            .filter_map(|line| line.rsplit_once(' '))
            .map(|(name, value)| (name.to_owned(), value.parse().unwrap()))
            .collect()
    }

    async fn value(&self, sample: &str) -> f64 {
        self.samples().await.get(&format!("csid_server_{sample}")).copied().unwrap_or(0.0)
    }

    /// Waits until a sample has a value.
    async fn becomes(&self, sample: &str, value: f64) {
        let end = Instant::now() + SOON;
        while self.value(sample).await != value {
            assert!(Instant::now() < end, "{sample} is not {value}: {}", self.text().await);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// Returns the names of the metrics of servers in the document, as samples have them without `_bucket`, `_count` and `_sum`.
fn documented() -> BTreeSet<String> {
    let rows = DOCUMENT.lines().filter_map(|line| line.strip_prefix("| `csid_server_"));
    let names: BTreeSet<_> =
        rows.map(|row| format!("csid_server_{}", row.split('`').next().unwrap())).collect();
    assert!(names.len() > 15, "{names:?}");
    names
}

/// Returns the metric of a sample.
fn metric_of(sample: &str) -> &str {
    let name = sample.split('{').next().unwrap();
    ["_bucket", "_count", "_sum"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name)
}

#[tokio::test]
async fn each_metric_moves_by_what_it_counts() {
    let counting = Counting::start().await;
    let site = &counting.site;
    counting.becomes("cache_records", 0.0).await;
    let txns = "txn_duration_seconds_count{result=\"committed\"}";
    let before = counting.value(txns).await;
    site.register("data", "single-node-writer").await;
    counting.becomes("cache_records", 1.0).await;
    assert!(counting.value(txns).await > before);
    assert_eq!(counting.value("requests_total{rpc=\"Change\",code=\"OK\"}").await, 1.0);
    assert_eq!(counting.value("request_duration_seconds_count{rpc=\"Change\"}").await, 1.0);

    // Sessions, nodes and refusals.
    let mut controller = Controller::start(site, "c1", 0).await;
    let (n1, session) = user(site, "n1", 0).await;
    let (n2, _two) = user(site, "n2", 0).await;
    counting.becomes("sessions{role=\"controller\"}", 1.0).await;
    counting.becomes("sessions{role=\"node\"}", 2.0).await;
    counting.becomes("nodes{state=\"ready\"}", 3.0).await;
    let mut hello = n1.hello.clone();
    hello.machine_id = "another machine".into();
    assert!(matches!(open(&mut n1.client(0), hello).await.unwrap().0, First::Refused(_)));
    assert_eq!(counting.value("refused_total{reason=\"another-machine\"}").await, 1.0);

    // A claim, and its controller's call.
    let claims = counting.value("txn_claims_count").await;
    let claim = claiming(&n1, 0, "data");
    let stale = controller.called().await;
    counting.becomes("driven", 1.0).await;
    assert!(counting.value("txn_claims_count").await > claims);
    let publish = |code: &str| {
        format!("call_duration_seconds_count{{plugin=\"p\",rpc=\"ControllerPublishVolume\",code=\"{code}\"}}")
    };
    controller.end(&stale, How::Stale(true)).await;
    counting.becomes("stale_calls_total", 1.0).await;
    counting.becomes(&publish("STALE"), 1.0).await;
    loop {
        let call = controller.called().await;
        let is_publish = crate::attach::is_publish(&call);
        controller.end(&call, crate::attach::attached("/dev/x")).await;
        if is_publish {
            break;
        }
    }
    let granted = claim.await.unwrap().unwrap();
    counting.becomes(&publish("OK"), 1.0).await;
    counting.becomes("driven", 0.0).await;
    counting.becomes("restless", 0.0).await;

    // A claim that waits.
    let mut wait = n2.ask("data", "web");
    (wait.queue_ms, wait.answer_ms) = (600_000, 1);
    n2.client(0).claim(wait.clone()).await.unwrap_err();
    counting.becomes("queued", 1.0).await;
    counting.becomes("restless", 1.0).await;

    // A volume that a server left, and a detach that the plugin refuses for good.
    let mut raw = site.raw().await;
    let value = head(site, "data").await.replacen('{', r#"{"driver":{"server":"gone","host":"c1"},"#, 1);
    raw.put("/csid/v1/vol/default/data/head", &value).await;
    counting.becomes("takeovers_total", 1.0).await;
    let release = ReleaseAsk { deadline_ms: 1, ..release_ask("data", "n1") };
    site.operator(0, "all").release(release).await.unwrap_err();
    counting.becomes("owed", 1.0).await;
    n1.detached(0, "data", &granted.claim).await.unwrap();
    counting.becomes("owed", 0.0).await;
    let call = controller.called().await;
    controller.end(&call, failed(CallClass::Refused)).await;
    counting.becomes("parked", 1.0).await;

    drop(session);
    counting.becomes("nodes{state=\"away\"}", 1.0).await;
    counting.becomes("sessions{role=\"node\"}", 1.0).await;

    // etcd stands still.
    assert!(counting.value("cache_lag_seconds").await < 5.0);
    site.etcd.members[0].signal(Signal::STOP);
    eventually("the lag grows", async || counting.value("cache_lag_seconds").await > 5.0).await;
    eventually("etcd's silence is counted", async || {
        counting.value("etcd_errors_total{code=\"TIMEOUT\"}").await > 0.0
    })
    .await;
    site.etcd.members[0].signal(Signal::CONT);
    eventually("the lag is over", async || counting.value("cache_lag_seconds").await < 5.0).await;
    eventually("etcd answers", async || {
        let samples = counting.samples().await;
        ["nodes{state=\"away\"}", "queued"]
            .iter()
            .all(|of| samples.contains_key(&format!("csid_server_{of}")))
    })
    .await;

    let text = counting.text().await;
    let all = counting.samples().await;
    let served: BTreeSet<String> = all.keys().map(|name| metric_of(name).to_owned()).collect();
    let asked = [queries::of_dashboard(DASHBOARD), queries::of_alarms(ALARMS)].concat();
    let unserved = queries::not_served(&asked, all.keys(), |metric| metric.starts_with("csid_server_"));
    assert!(unserved.is_empty(), "{unserved:#?}");
    let missing: Vec<_> = documented().difference(&served).cloned().collect();
    assert!(missing.is_empty(), "the document has metrics that are not served: {missing:?}\n{text}");
    let unknown: Vec<_> = served.difference(&documented()).cloned().collect();
    assert!(unknown.is_empty(), "metrics are served that the document does not have: {unknown:?}");
    for name in ["n1", "n2", "c1", "\"data\"", "web", "another machine", "hunter2", "call 1"] {
        assert!(!text.contains(name), "{name} of a caller is in the metrics: {text}");
    }
    for line in text.lines().filter(|line| line.starts_with("# TYPE")) {
        let [_, _, name, kind] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let row = DOCUMENT.lines().find(|row| {
            row.contains(&format!("`{name}`"))
                || row.contains(&format!("`{name}_total`"))
                || row.contains(&format!("`{name}_info`"))
        });
        let row = row.unwrap_or_else(|| panic!("{name} has no row"));
        assert!(row.contains(&format!("| {kind} |")), "{name} is a {kind}: {row}");
    }
}

#[tokio::test]
async fn list_after_a_compaction_is_counted() {
    let mut counting = Counting::start().await;
    counting.site.register("data", "single-node-writer").await;
    counting.becomes("cache_records", 1.0).await;
    assert_eq!(counting.value("cache_relists_total").await, 0.0);
    // The watch ends with etcd, and what it has to see next is compacted before the server asks again.
    counting.site.servers[0].signal(Signal::STOP);
    counting.site.etcd.members[0].kill();
    counting.site.etcd.restart(0).await;
    let mut raw = counting.site.raw().await;
    for value in ["1", "2"] {
        raw.put("/other", value).await;
    }
    raw.compact().await;
    counting.site.servers[0].signal(Signal::CONT);
    eventually("the volumes are listed again", async || counting.value("cache_relists_total").await > 0.0)
        .await;
    let log = counting.site.servers[0].text();
    assert!(log.contains("the volumes are listed again error=etcd has compacted the revision"), "{log}");
    counting.becomes("cache_records", 1.0).await;
}

/// The servers' metrics are compared with a real server above, and the hosts' in the suite of hosts.
#[test]
fn queries_name_metrics_of_the_document() {
    let (panels, alarms) = (queries::of_dashboard(DASHBOARD), queries::of_alarms(ALARMS));
    assert!(panels.len() >= 20 && alarms.len() == 8);
    for query in panels.iter().chain(&alarms) {
        for (metric, _) in queries::metrics_of(query) {
            let name = ["_bucket", "_count", "_sum"].iter().find_map(|end| metric.strip_suffix(end));
            let name = name.unwrap_or(&metric);
            assert!(DOCUMENT.contains(&format!("`{name}`")), "{query}: no such metric");
        }
    }
    for metric in documented() {
        let is_shown = panels.iter().any(|query| query.contains(&metric));
        assert!(is_shown, "the dashboard does not show {metric}");
    }
}

/// `make test` has promtool. Without it the test counts as left out, for Prometheus itself has not checked the files.
#[test]
fn promtool_takes_the_alarms_and_their_tests() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for (words, directory) in
        [(["check", "rules"], "packaging/prometheus"), (["test", "rules"], "tests/prometheus")]
    {
        let mut command = Command::new("promtool");
        command.current_dir(repository).args(words);
        command.args(["csid.yml", "csid-server.yml"].map(|file| format!("{directory}/{file}")));
        match command.output() {
            Ok(output) => {
                let said = [output.stdout, output.stderr].concat();
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let why = "promtool is not in PATH, and `make test` has it of Debian's package prometheus";
                left_out("promtool_takes_the_alarms_and_their_tests", why);
                break;
            }
            Err(error) => panic!("promtool: {error}"),
        }
    }
    // Each alarm has a test of when it is silent, and of when it is not.
    for (alarms, tests) in [
        (ALARMS, include_str!("../../../tests/prometheus/csid-server.yml")),
        (
            include_str!("../../../packaging/prometheus/csid.yml"),
            include_str!("../../../tests/prometheus/csid.yml"),
        ),
    ] {
        for name in alarms.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
            assert!(tests.contains(&format!("alertname: {name}")), "{name} has no test");
        }
    }
}

/// Prints why a test is left out, past the capture of the test harness: `tests/run` counts it.
fn left_out(test: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "    {test}: left out: {why}");
}

#[tokio::test]
async fn metrics_are_not_served_unless_configured() {
    let site = Site::start(1).await;
    assert!(!site.servers[0].text().contains("9811"));
    let taken = Counting::start().await;
    let file = site.path("s0.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, format!("metrics = \"127.0.0.1:{}\"\n{text}", taken.port)).unwrap();
    let (started, said) = site.run_server(0, &["run"]);
    assert!(!started && said.contains("in use"), "{said}");
}
