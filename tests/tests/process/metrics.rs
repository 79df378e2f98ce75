//! The metrics' socket: its contents, and its permissions.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use csid_client::CallOptions;
use csid_tests::ask::*;
use csid_tests::script::{Act, Rule};
use csid_tests::world::world;
use csid_tests::{queries, raw};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

async fn connect(socket: &Path) -> UnixStream {
    UnixStream::connect(socket).await.expect("the metrics' socket")
}

/// The status, the headers and the body of an answer.
async fn ask(socket: &Path, request: &str) -> (String, String) {
    let mut stream = connect(socket).await;
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    let read = stream.read_to_string(&mut answer);
    tokio::time::timeout(Duration::from_secs(10), read).await.expect("an answer").unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect("HTTP");
    (head.to_owned(), body.to_owned())
}

/// Each sample by its name and labels, of a text that is OpenMetrics.
async fn samples(socket: &Path) -> BTreeMap<String, f64> {
    let (head, text) = ask(socket, "GET /metrics HTTP/1.0\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.0 200 ") || head.starts_with("HTTP/1.1 200 "), "{head}");
    assert!(head.to_lowercase().contains("\r\ncontent-type: application/openmetrics-text;"), "{head}");
    let lines = text.strip_suffix("# EOF\n").expect("# EOF");
    let (mut samples, mut families, mut family) = (BTreeMap::new(), BTreeSet::new(), ("", ""));
    for line in lines.lines() {
        if let Some(about) = line.strip_prefix("# ") {
            let mut words = about.splitn(3, ' ');
            let (what, name, rest) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
            match what {
                "TYPE" => {
                    family = (name, rest);
                    assert!(families.insert(name.to_owned()), "{name} comes twice");
                }
                "HELP" | "UNIT" => {}
                _ => panic!("{line}"),
            }
            continue;
        }
        let (sample, value) = line.rsplit_once(' ').expect("a value");
        let name = sample.split('{').next().unwrap();
        let suffix = name.strip_prefix(family.0).unwrap_or_else(|| panic!("{line} is not of {family:?}"));
        let allowed: &[&str] = match family.1 {
            "gauge" => &[""],
            "counter" => &["_total"],
            "info" => &["_info"],
            "histogram" => &["_bucket", "_sum", "_count"],
            other => panic!("{other}"),
        };
        assert!(allowed.contains(&suffix), "{line}");
        let labels = sample.strip_prefix(name).unwrap();
        for label in labels.trim_matches(['{', '}']).split(',').filter(|label| !label.is_empty()) {
            let (key, value) = label.split_once('=').expect("a label");
            let known =
                ["plugin", "rpc", "code", "state", "kind", "step", "type", "durability", "le", "version"];
            assert!(known.contains(&key) && value.starts_with('"') && value.ends_with('"'), "{line}");
        }
        let value: f64 = value.parse().expect("a number");
        assert!(samples.insert(sample.to_owned(), value).is_none(), "{sample} comes twice");
    }
    samples
}

fn of(samples: &BTreeMap<String, f64>, sample: &str) -> f64 {
    *samples.get(sample).unwrap_or_else(|| panic!("no {sample} in {samples:#?}"))
}

/// A slow publish shows in the event, in the explanation and in the metrics.
#[test]
fn mount_has_the_time_of_each_step() {
    const SLOW: u64 = 300_000;
    world(async |w| {
        let client = running(w).await;
        w.plugin("p").rules([Rule::always("NodePublishVolume", Act::Delay(SLOW / 1_000))]);
        mounted(&client, "job", inline("v")).await;
        unmount(&client, "v", "job").await.unwrap();
        mounted(&client, "job", inline("v")).await;
        let explained = client.explain(NAMESPACE, "v", CallOptions::default()).await.unwrap().timings;
        let names: Vec<_> = explained.iter().map(|(step, _)| step.as_str()).collect();
        let due = ["bus", "queued", "waiting for plugin", "verify", "intent", "stage", "publish", "deliver"];
        assert_eq!(names, due, "in the order of the steps, without the commit");
        let took = |step: &str| explained.iter().find(|(of, _)| of == step).unwrap().1;
        assert!(took("publish") >= SLOW && took("stage") < took("publish"), "{explained:?}");
        let last = events(&client, 0).await.into_iter().rfind(|event| event.kind == "mount").unwrap();
        let of_event: Vec<(String, u64)> = serde_json::from_str(&detail(&last, "timings")).unwrap();
        assert_eq!(of_event, explained);

        let samples = samples(&w.path("run/metrics.sock")).await;
        let step = |kind: &str, step: &str, part: &str| {
            let labels = format!(r#"kind="{kind}",step="{step}""#);
            of(&samples, &format!("csid_operation_step_duration_seconds_{part}{{{labels}}}"))
        };
        assert_eq!((step("mount", "publish", "count"), step("unmount", "unpublish", "count")), (2.0, 1.0));
        assert!(step("mount", "publish", "sum") >= 2.0 * SLOW as f64 / 1e6);
        assert_eq!(step("mount", "commit", "count"), 2.0);
        unmount(&client, "v", "job").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn dashboard_and_alarms_ask_for_what_csid_serves() {
    world(async |w| {
        let client = running(w).await;
        mounted(&client, "job", inline("v")).await;
        registered(&client, "claimed", &[csid_client::AccessMode::SingleNodeWriter]).await;
        client.claim(NAMESPACE, "claimed", "job", Default::default()).await.unwrap();
        let samples = samples(&w.path("run/metrics.sock")).await;
        let queries = queries::of_dashboard(include_str!("../../../packaging/grafana/csid.json"));
        let alarms = queries::of_alarms(include_str!("../../../packaging/prometheus/csid.yml"));
        assert!(queries.len() >= 12 && alarms.len() >= 5);
        let missing = queries::not_served(&[queries, alarms].concat(), samples.keys(), |_| true);
        assert!(missing.is_empty(), "{missing:#?}");
    });
}

#[test]
fn metrics_are_openmetrics_without_volume_names() {
    world(async |w| {
        let client = running(w).await;
        settled(&client).await;
        let socket = w.path("run/metrics.sock");
        let before = samples(&socket).await;
        assert_eq!(of(&before, r#"csid_state{state="ready"}"#), 1.0);
        assert_eq!(of(&before, r#"csid_state{state="stopping"}"#), 0.0);
        assert_eq!(of(&before, r#"csid_plugins{state="ready"}"#), 1.0);
        assert_eq!(of(&before, r#"csid_plugin_healthy{plugin="p"}"#), 1.0);
        assert_eq!(of(&before, r#"csid_mounts{state="mounted"}"#), 0.0);

        w.plugin("p").rules([Rule::always("NodeStageVolume", Act::Fail(9)).of("canary-bad")]);
        mounted(&client, "canary-consumer", inline("canary-volume")).await;
        mount(&client, "canary-consumer", inline("canary-bad")).await.unwrap_err();
        registered(&client, "canary-claimed", &[csid_client::AccessMode::SingleNodeWriter]).await;
        client.claim(NAMESPACE, "canary-claimed", "job", Default::default()).await.unwrap();
        let after = samples(&socket).await;
        assert_eq!(of(&after, r#"csid_mounts{state="mounted"}"#), 1.0);
        assert_eq!(of(&after, r#"csid_claims{state="taken"}"#), 1.0);
        assert_eq!(of(&after, r#"csid_operations_total{kind="mount"}"#), 2.0);
        // Its entry goes just after its answer.
        assert!(of(&after, r#"csid_operations_in_flight{kind="mount"}"#) <= 1.0);
        assert_eq!(of(&after, r#"csid_events_total{type="mount"}"#), 2.0);
        let rpc = |part: &str, code: &str, le: &str| {
            let labels = format!(r#"{le}plugin="p",rpc="NodeStageVolume",code="{code}""#);
            of(&after, &format!("csid_plugin_rpc_duration_seconds_{part}{{{labels}}}"))
        };
        assert_eq!((rpc("count", "OK", ""), rpc("count", "FAILED_PRECONDITION", "")), (1.0, 1.0));
        assert_eq!(rpc("bucket", "OK", r#"le="+Inf","#), 1.0);
        assert!(rpc("sum", "OK", "") > 0.0 && rpc("sum", "OK", "") < 60.0);
        let commits =
            |samples| of(samples, r#"csid_journal_commit_duration_seconds_count{durability="disk"}"#);
        assert!(commits(&after) > commits(&before), "a mount is synced");
        assert!(after.keys().all(|sample| !sample.contains("canary")), "{after:#?}");
    });
}

#[test]
fn metrics_socket_is_private_and_bounded() {
    world(async |w| {
        let client = running(w).await;
        let socket = w.path("run/metrics.sock");
        let mode =
            std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&socket).unwrap().permissions());
        assert_eq!(mode & 0o777, 0o660);
        assert!(raw::connect_as(raw::NOBODY, &socket).is_err(), "nobody does not even get in");

        for (request, status) in [
            ("GET / HTTP/1.1\r\nHost: x\r\n\r\n", "404"),
            ("POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", "405"),
            ("HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "200"),
            ("\0\r\n\r\n", "400"),
        ] {
            let (head, _) = ask(&socket, request).await;
            assert!(head.contains(&format!(" {status} ")), "{request:?}: {head}");
        }
        let large = format!("GET /metrics HTTP/1.1\r\nHost: x\r\nX: {}\r\n\r\n", "x".repeat(64 << 10));
        let mut stream = connect(&socket).await;
        let _ = stream.write_all(large.as_bytes()).await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        assert!(!answer.windows(4).any(|window| window == b" 200"), "64 KiB of headers are too many");

        // More than are served at once, none of which asks anything: who comes after them is answered all the same, and csid
        // does its work meanwhile.
        let mut silent = Vec::new();
        for _ in 0..12 {
            silent.push(connect(&socket).await);
        }
        mounted(&client, "job", inline("v")).await;
        let mut last = connect(&socket).await;
        last.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        tokio::time::timeout(Duration::from_secs(30), last.read_to_string(&mut answer))
            .await
            .unwrap()
            .unwrap();
        assert!(answer.ends_with("# EOF\n"), "{answer}");
    });
}
