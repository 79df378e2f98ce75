//! What a host shows of itself as a node of its cluster: over D-Bus, in signals, and in its metrics.

use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::{ChangeAsk, Deregister};
use csid_client::{CallOptions, Cluster, Kind, MountOptions};
use csid_tests::ask::*;
use csid_tests::fault::Fault;
use csid_tests::queries;
use csid_tests::world::{eventually, refusal, world};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::site::free_ports;
use crate::*;

async fn shown(client: &Client) -> Cluster {
    client.cluster().await.unwrap()
}

/// Returns the answer with all metrics.
pub(crate) async fn metrics(w: &World) -> String {
    metrics_of(tokio::net::UnixStream::connect(w.path("run/metrics.sock")).await.unwrap()).await
}

pub(crate) async fn metrics_of(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> String {
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    tokio::time::timeout(std::time::Duration::from_secs(10), stream.read_to_string(&mut answer))
        .await
        .expect("metrics in time")
        .unwrap();
    answer
}

/// Returns the value of a metric. `None`: csid has no such metric.
async fn metric(w: &World, sample: &str) -> Option<f64> {
    value_in(&metrics(w).await, sample)
}

fn value_in(answer: &str, sample: &str) -> Option<f64> {
    let value = answer.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    value.map(|value| value.parse().unwrap())
}

/// Returns how many requests of a kind the server with this port of metrics has answered.
async fn answered(port: u16, rpc: &str) -> f64 {
    let answer = metrics_of(tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap()).await;
    value_in(&answer, &format!(r#"csid_server_requests_total{{rpc="{rpc}",code="OK"}}"#)).unwrap_or(0.0)
}

/// Returns what a command of csictl prints about this world's csid.
async fn csictl(w: &World, words: &[&str]) -> String {
    String::from_utf8(csictl_of(w, words).await.stdout).unwrap()
}

/// Runs a command of csictl with this world's csid, to its end.
pub(crate) async fn csictl_of(w: &World, words: &[&str]) -> std::process::Output {
    let mut command = tokio::process::Command::new(site::csictl_program());
    command.arg("--csid-socket").arg(w.path("run/csid.sock")).args(words).kill_on_drop(true);
    let output = tokio::time::timeout(std::time::Duration::from_secs(60), command.output());
    output.await.expect("csictl ends").unwrap()
}

/// Starts a server with the volume `data`. Returns the port of its metrics, too.
async fn measured() -> (Site, u16) {
    let [port, _] = free_ports();
    let site = Site::start_with(1, &format!("metrics = \"127.0.0.1:{port}\"")).await;
    site.register("data", "single-node-writer").await;
    (site, port)
}

#[test]
fn mount_asks_a_server_once_for_its_volume() {
    world(async |w| {
        let (site, port) = measured().await;
        let (client, _node) = n1(w, &site).await;
        let before = answered(port, "Volume").await;
        mount_registered(&client, "data", "job").await.unwrap();
        assert_eq!(answered(port, "Volume").await, before + 1.0);
        unmount(&client, "data", "job").await.unwrap();
        // The server compares with the claim what the node remembers.
        claim(&client, "data", "other").await.unwrap();
        mount_registered(&client, "data", "other").await.unwrap();
        assert_eq!(answered(port, "Volume").await, before + 1.0);
    });
}

/// Has an operator register `data` as another volume of the plugin.
async fn replace(site: &Site) {
    let mut operator = site.operator(0, "all");
    let old = Deregister { namespace: "default".into(), volume: "data".into(), ..Default::default() };
    operator.change(ChangeAsk { what: Some(What::Deregister(old)) }).await.unwrap();
    let mut new = site::register("data", "single-node-writer");
    let Some(What::Register(register)) = &mut new.what else { unreachable!() };
    register.external_id = "another".into();
    operator.change(new).await.unwrap();
}

#[test]
fn volume_replaced_since_its_last_mount_is_mounted() {
    world(async |w| {
        let (site, port) = measured().await;
        let (client, _node) = n1(w, &site).await;
        mount_registered(&client, "data", "web").await.unwrap();
        unmount(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &[]).await;
        let (claims, before) = (answered(port, "Claim").await, answered(port, "Volume").await);
        replace(&site).await;
        mount_registered(&client, "data", "web").await.unwrap();
        assert_eq!(answered(port, "Claim").await, claims + 1.0, "the old volume was claimed");
        assert_eq!(answered(port, "Volume").await, before + 1.0);
        let staged = w.plugin("p").volume_calls();
        let last = staged.iter().rev().find(|of| of.call.rpc == "NodePublishVolume").unwrap();
        assert_eq!(last.call.volume, "another", "{:?}", last.call);
        unmount(&client, "data", "web").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// csid refuses the mount by what it remembers, and asks then.
#[test]
fn mount_of_a_mode_registered_since_is_made() {
    world(async |w| {
        let (site, _port) = measured().await;
        let (client, _node) = n1(w, &site).await;
        mount_registered(&client, "data", "web").await.unwrap();
        unmount(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &[]).await;
        let reader = MountOptions {
            access_mode: Some(csid_client::AccessMode::SingleNodeReaderOnly),
            read_only: Some(true),
            ..MountOptions::default()
        };
        client.mount(NAMESPACE, "data", "web", reader.clone()).await.expect_err("no such mode");
        let mut wider = site::register("data", "single-node-writer");
        let Some(What::Register(of)) = &mut wider.what else { unreachable!() };
        of.spec.as_mut().unwrap().capabilities.push(csi_proto::cluster::v1::Capability {
            access_mode: "single-node-reader-only".into(),
            attachment_mode: "file-system".into(),
        });
        site.operator(0, "all").change(wider).await.unwrap();
        client.mount(NAMESPACE, "data", "web", reader).await.unwrap();
        unmount(&client, "data", "web").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// The plugin's limit delays a mount, and another volume gets the name meanwhile.
#[test]
fn volume_replaced_during_a_wait_is_not_claimed() {
    world(async |w| {
        let (site, port) = measured().await;
        site.register("other", "single-node-writer").await;
        let node = site.node("n1");
        let plugin = w.add_plugin_and("p", &[], "").await;
        plugin.set(|script| script.max_volumes = 1);
        plugin.kill();
        plugin.start().await;
        w.configure(&of_node("n1", node.run()));
        let client = w.start().await;
        healthy(&client, "p").await;
        joined(w).await;
        mount_registered(&client, "other", "web").await.unwrap();
        let claims = answered(port, "Claim").await;
        let options = MountOptions { wait_usec: Some(60_000_000), ..MountOptions::default() };
        let mount = client.mount(NAMESPACE, "data", "web", options);
        let replaced = async {
            eventually("the mount waits for the other volume", async || {
                let explained = client.explain(NAMESPACE, "data", CallOptions::default()).await;
                explained.is_ok_and(|of| of.waiting_for == "waiting for another volume's claims")
            })
            .await;
            replace(&site).await;
            // csid asks once for the volume of a call that has its turn soon.
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            unmount(&client, "other", "web").await.unwrap();
        };
        let (mounted, ()) = tokio::join!(mount, replaced);
        let (kind, error) = refusal(mounted);
        assert_eq!(kind, Kind::NotFound, "{error}");
        assert_eq!(answered(port, "Claim").await, claims);
        servers_have(&site, "data", &[]).await;
        mount_registered(&client, "data", "web").await.unwrap();
        unmount(&client, "data", "web").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// The journal has the ended claim of an earlier mount when the mount is requested, and has nothing when the mount has its turn.
#[test]
fn mount_reports_no_claim_that_another_has_reported() {
    world(async |w| {
        let (site, port) = measured().await;
        let fault = Fault::of(w);
        let (client, _node) = n1(w, &site).await;
        mount_registered(&client, "data", "web").await.unwrap();
        let before = answered(port, "Volume").await;
        fault.arm("Detached.held");
        unmount(&client, "data", "web").await.expect("an unmount needs no server");
        begun(&client, "continue").await;
        let mounting = mount_begins(&client).await;
        fault.disarm();
        mounting.await.unwrap().unwrap();
        assert_eq!(answered(port, "Detached").await, 1.0);
        assert_eq!(answered(port, "Volume").await, before + 1.0);
        servers_have(&site, "data", &["n1/web"]).await;
        unmount(&client, "data", "web").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn host_shows_its_state_and_what_it_owes() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let (client, mut node) = n1(w, &site).await;
        let joined_row = shown(&client).await;
        assert_eq!(
            [&joined_row.name, &joined_row.node, &joined_row.state, &joined_row.server, &joined_row.reason],
            ["prod", "n1", "joined", site.addresses[0].as_str(), ""]
        );
        assert!(joined_row.generation == 1 && joined_row.since > 1_700_000_000_000_000);
        assert!(client.manager().await.unwrap().features.contains(&"cluster".to_owned()));
        assert_eq!(metric(w, r#"csid_cluster_state{state="joined"}"#).await, Some(1.0));
        assert_eq!(metric(w, "csid_owed").await, Some(0.0));

        // The cluster's dashboard and alarms ask for more than the servers serve.
        let samples = metrics(w).await;
        let samples: Vec<String> =
            samples.lines().map(|line| line.split(' ').next().unwrap().to_owned()).collect();
        let asked = [
            queries::of_dashboard(include_str!("../../../packaging/grafana/csid-server.json")),
            queries::of_alarms(include_str!("../../../packaging/prometheus/csid-server.yml")),
        ];
        let is_hosts = |metric: &str| !metric.starts_with("csid_server_");
        let missing = queries::not_served(&asked.concat(), samples.iter(), is_hosts);
        assert!(missing.is_empty(), "{missing:#?}");

        let line = format!("cluster: prod, node n1: joined at {}", site.addresses[0]);
        assert!(csictl(w, &["status"]).await.contains(&line));
        assert!(csictl(w, &["doctor", "--verbose"]).await.contains(&line["cluster: ".len()..]));
        let row = csictl(w, &["cluster", "status", "--json"]).await;
        let row: serde_json::Value = serde_json::from_str(&row).unwrap();
        assert_eq!((&row["state"], &row["owed"]), (&"joined".into(), &0.into()));
        mount_registered(&client, "data", "web").await.unwrap();
        eventually("the claim's revision is shown", async || shown(&client).await.revision > 0).await;
        node.link.kill();
        cut_off(w).await;
        let away = shown(&client).await;
        assert_eq!([away.state.as_str(), &away.server], ["cut-off", ""]);
        assert!(!away.reason.is_empty() && away.since > joined_row.since, "{away:?}");
        unmount(&client, "data", "web").await.unwrap();
        eventually("the end of the claim is owed", async || shown(&client).await.owed == 1).await;
        assert_eq!(metric(w, r#"csid_cluster_state{state="cut-off"}"#).await, Some(1.0));
        assert_eq!(metric(w, "csid_owed").await, Some(1.0));
        eventually("the age of what is owed grows", async || {
            metric(w, "csid_owed_age_seconds").await.is_some_and(|age| age >= 1.0)
        })
        .await;

        let pair = site.client_pair("csid://prod/node/n1");
        node.link = site.link("n1", &pair, &site.addresses);
        joined(w).await;
        servers_have(&site, "data", &[]).await;
        eventually("nothing is owed", async || shown(&client).await.owed == 0).await;
        assert_eq!(metric(w, "csid_owed_age_seconds").await, Some(0.0));
        assert_eq!(shown(&client).await.state, "joined");
        w.nothing_left(&client).await;
    });
}

#[test]
fn host_alone_has_no_cluster_and_no_metric_of_it() {
    world(async |w| {
        let client = w.start().await;
        assert_eq!(csictl(w, &["cluster", "status"]).await, "This host has no cluster.\n");
        assert!(!csictl(w, &["status"]).await.contains("cluster:"));
        let row = shown(&client).await;
        assert_eq!((row.state.as_str(), row.is_clustered(), row.since), ("alone", false, 0));
        assert_eq!(metric(w, "csid_owed").await, None);
    });
}
