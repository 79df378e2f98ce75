//! The version of the values in etcd: who raises it, and what a server does that does not know it. And the end of a server in an upgrade.

use std::path::Path;
use std::time::{Duration, Instant};

use csi_proto::cluster::v1::{UpgradeAsk, VolumeAsk};
use rustix::process::Signal;
use serde_json::json;

use crate::attach::{Controller, claiming, row, user};
use crate::operators::{csictl, operator, operator_file};
use crate::site::{First, Raw, Refusal, Site, eventually, next_server_program, server_program};

/// Returns the version of the values.
async fn schema(site: &Site) -> u64 {
    let meta: serde_json::Value = serde_json::from_str(&row(site, "meta").await).unwrap();
    meta["schema"].as_u64().unwrap()
}

/// Replaces a server by one of the next release.
async fn upgrade_server(site: &mut Site, n: usize) {
    replace_server(site, n, &next_server_program()).await;
}

async fn replace_server(site: &mut Site, n: usize, program: &Path) {
    site.servers[n].signal(Signal::TERM);
    assert!(site.servers[n].ended().await, "{}", site.servers[n].text());
    site.servers[n] = site.start_server_of(program, n);
}

/// `make soak-cluster` does the same with an earlier release, with hosts that use their volumes.
#[tokio::test]
async fn each_server_is_taken_back_before_the_upgrade() {
    let mut site = Site::start(3).await;
    for volume in ["data", "held"] {
        site.register(volume, "single-node-writer").await;
    }
    let node = site.node("n1");
    let session = node.join(0).await;
    let held = node.claim(0, "held").await.unwrap();
    drop(session);
    let kept = row(&site, "vol/default/held/claim/n1/web").await;
    assert!(kept.contains(&held), "{kept}");
    let file = operator(&site, "all");
    for n in 0..3 {
        for (program, most) in [(next_server_program(), 3), (server_program(), 2), (next_server_program(), 3)]
        {
            replace_server(&mut site, n, &program).await;
            let _session = node.join(n).await;
            let claim = node.claim(n, "data").await.unwrap();
            assert_eq!(row(&site, "vol/default/held/claim/n1/web").await, kept);
            node.detached(n, "data", &claim).await.unwrap();
            let list = csictl(&file, "server list --json").await.json();
            let servers = list["servers"].as_array().unwrap();
            let this = servers.iter().find(|server| server["name"] == format!("s{n}")).unwrap();
            assert_eq!((&this["schema-max"], schema(&site).await), (&json!(most), 2), "{list}");
        }
    }
    // All know the next version, which is not raised. The last one is taken back once more.
    replace_server(&mut site, 2, &server_program()).await;
    let _session = node.join(2).await;
    node.detached(2, "held", &held).await.unwrap();
    assert_eq!(row(&site, "vol/default/held/claim/n1/web").await, "");
}

#[tokio::test]
async fn upgrade_waits_for_the_last_server() {
    let mut site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let file = operator(&site, "all");
    let said = csictl(&file, "server upgrade").await;
    assert_eq!((said.code, said.err.as_str()), (Some(0), "The values have version 2 already.\n"));

    // One server is of the next release. The claims of both go on.
    upgrade_server(&mut site, 0).await;
    let list = csictl(&file, "server list --json").await.json();
    let schemas =
        |n: usize| (list["servers"][n]["schema-min"].clone(), list["servers"][n]["schema-max"].clone());
    assert_eq!((schemas(0), schemas(1)), ((json!(1), json!(3)), (json!(1), json!(2))), "{list}");
    let said = csictl(&file, "server list").await;
    assert!(said.out.contains("1-3"), "{said:?}");
    let node = site.node("n1");
    let _session = node.join(1).await;
    let claim = node.claim(1, "data").await.unwrap();
    node.detached(1, "data", &claim).await.unwrap();
    let status = csictl(&file, "--operator cluster status").await;
    assert!(status.out.contains("upgrade the other servers"), "{status:?}");

    let said = csictl(&file, "server upgrade --confirm prod").await;
    assert!(said.code == Some(1) && said.err.contains("the server s1 ("), "{said:?}");
    assert!(said.err.contains("knows values of version 1 to 2, and not 3"), "{said:?}");
    assert_eq!(schema(&site).await, 2);
    let said = csictl(&file, "server upgrade").await;
    assert!(said.code == Some(1) && said.err.contains("--confirm prod"), "{said:?}");

    // The last one is, too.
    upgrade_server(&mut site, 1).await;
    eventually("the upgrade is due", async || {
        csictl(&file, "--operator cluster status").await.out.contains("`csictl server upgrade`")
    })
    .await;
    let said = csictl(&file, "server upgrade --confirm prod").await;
    assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (Some(0), "", ""));
    assert_eq!(schema(&site).await, 3);
    let again = csictl(&file, "server upgrade --json").await.json();
    assert_eq!(again["schema"], 3);
    let lowered = site.admin(0, "all").upgrade(UpgradeAsk { schema: 2 }).await.unwrap_err();
    assert_eq!(Refusal::of(&lowered).kind, "InvalidArgument");
    // The servers go on with the new version, and have read the changed row.
    let _session = node.join(1).await;
    let claim = node.claim(1, "data").await.unwrap();
    node.detached(0, "data", &claim).await.unwrap();
}

/// The rows of servers are read in pages, and the last one of 150 knows less.
#[tokio::test]
async fn upgrade_asks_each_of_many_servers() {
    let mut site = Site::start(1).await;
    let mut raw = site.raw().await;
    let row =
        async |raw: &mut Raw| String::from_utf8(raw.below("/csid/v1/server/").await.remove(0).value).unwrap();
    let old = row(&mut raw).await;
    upgrade_server(&mut site, 0).await;
    let new = row(&mut raw).await;
    for n in 0..150 {
        raw.put(&format!("/csid/v1/server/x{n:03}"), if n == 149 { &old } else { &new }).await;
    }
    let refusal = site.admin(0, "all").upgrade(UpgradeAsk { schema: 3 }).await.unwrap_err();
    assert!(refusal.message().contains("(x149, "), "{refusal:?}");
    assert_eq!(schema(&site).await, 2);
}

#[tokio::test]
async fn upgrade_is_refused_after_a_restore() {
    let mut site = Site::start(1).await;
    upgrade_server(&mut site, 0).await;
    let meta = row(&site, "meta").await;
    let recovering = meta.replace("\"normal\"", "\"recovering\"");
    assert_ne!(meta, recovering);
    site.raw().await.put("/csid/v1/meta", &recovering).await;
    let file = operator(&site, "all");
    let said = csictl(&file, "server upgrade --confirm prod").await;
    assert!(said.code == Some(1) && said.err.contains("recovers from a backup"), "{said:?}");
    assert_eq!(schema(&site).await, 2);
    // The row is of another etcd cluster, and no operator has said that it was restored.
    let mut other: serde_json::Value = serde_json::from_str(&meta).unwrap();
    assert!(other["etcd"].is_string(), "{meta}");
    other["etcd"] = json!("1");
    site.raw().await.put("/csid/v1/meta", &other.to_string()).await;
    let said = csictl(&file, "server upgrade --confirm prod").await;
    assert!(said.code == Some(1) && said.err.contains("etcd was restored from a backup"), "{said:?}");
    assert!(said.err.contains("`csictl server restored`"), "{said:?}");
    assert_eq!(schema(&site).await, 2);
    let denied = csictl(&operator(&site, "reads"), "server upgrade --confirm prod").await;
    assert!(denied.code == Some(1) && denied.err.contains("`cluster`"), "{denied:?}");
}

#[tokio::test]
async fn server_stops_serving_at_a_newer_version() {
    let mut site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    upgrade_server(&mut site, 1).await;
    let node = site.node("n1");
    let mut session = node.join(0).await;
    let meta = row(&site, "meta").await;
    let newer = meta.replace("\"schema\":2", "\"schema\":3");
    assert_ne!(meta, newer);
    let mut raw = site.raw().await;
    raw.put("/csid/v1/meta", &newer).await;
    let begun = Instant::now();
    let ended = session.next().await.unwrap_err();
    let why = "etcd has values of version 3, and this server knows 1 to 2";
    assert_eq!((ended.kind.as_str(), ended.message.as_str()), ("Unavailable", why));
    assert!(begun.elapsed() < Duration::from_secs(10), "it took {:?}", begun.elapsed());
    let asked = VolumeAsk { namespace: "default".into(), volume: "data".into(), ..VolumeAsk::default() };
    let refused = node.client(0).volume(asked).await.unwrap_err();
    let refused = Refusal::of(&refused);
    assert_eq!((refused.kind.as_str(), refused.message.as_str()), ("Unavailable", why));
    // Another read of the row than the one that reports may have ended the session.
    eventually("systemd learns why", async || site.servers[0].status().contains(why)).await;
    let log = site.servers[0].text();
    assert!(log.contains(&format!("this server serves nothing: {why}")), "{log}");

    // Operators and nodes go to the other server, which lists the one that does not serve.
    let file = operator(&site, "all");
    let said = csictl(&file, "server list").await;
    assert!(said.code == Some(0) && said.err.contains(why) && said.out.contains("s0"), "{said:?}");
    let said = csictl(&file, "--operator cluster status").await;
    assert!(said.out.contains("server-too-old") && said.out.contains("s0"), "{said:?}");
    let of_one =
        operator_file(&site, "one", &site.client_pair("csid://prod/operator/reads"), &site.addresses[..1]);
    assert!(csictl(&of_one, "node list").await.err.contains(why));
    let _other = node.join(1).await;
    let claim = node.claim(1, "data").await.unwrap();

    // A server that starts then says why it does not.
    let (started, said) = site.run_server(0, &["run"]);
    assert!(!started && said.contains(why), "{said}");

    // The version goes down again, as after a restore of etcd.
    raw.put("/csid/v1/meta", &meta).await;
    eventually("the server serves again", async || {
        matches!(node.say_hello(0).await, Ok((First::Welcome(_), _)))
    })
    .await;
    node.detached(0, "data", &claim).await.unwrap();
    eventually("systemd learns it", async || site.servers[0].status() == "serves nodes and operators").await;
}

/// The plugin answers while the server waits for it, and no other call begins.
#[tokio::test]
async fn stopped_server_ends_its_calls_first() {
    let mut site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    site.register("more", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let _claim = claiming(&n1, 0, "data");
    let call = controller.called().await;
    site.servers[0].signal(Signal::TERM);
    tokio::time::sleep(Duration::from_millis(500)).await;
    // Another claim is no work of this server any more.
    let _more = claiming(&n1, 0, "more");
    let none = controller.is_called(Duration::from_secs(2)).await;
    assert!(!none, "a server that stops has begun another call");
    controller.end(&call, crate::attach::attached("/dev/x")).await;
    let begun = Instant::now();
    assert!(site.servers[0].ended().await, "{}", site.servers[0].text());
    assert!(begun.elapsed() < Duration::from_secs(8), "it took {:?}", begun.elapsed());
    assert!(!site.servers[0].text().contains("given up"), "{}", site.servers[0].text());
    // The outcome is written, the driver is cleared, and the lease is gone with the server's rows.
    let head = crate::attach::head(&site, "data").await;
    assert!(!head.contains("\"server\":"), "{head}");
    let claim = row(&site, "vol/default/data/claim/n1/web").await;
    assert!(claim.contains("\"state\":\"taken\""), "{claim}");
    let mut raw = site.raw().await;
    assert_eq!(raw.below("/csid/v1/server/").await.len(), 1);
    assert!(raw.below("/csid/v1/session/").await.is_empty());
}

/// The plugin does not answer. The server waits 10 s for it, and the next server knows that the call may run.
#[tokio::test]
async fn stopped_server_gives_up_a_call_that_hangs() {
    let mut site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _one) = user(&site, "n1", 0).await;
    let _claim = claiming(&n1, 0, "data");
    let call = controller.called().await;
    site.servers[0].signal(Signal::TERM);
    let begun = Instant::now();
    assert!(site.servers[0].ended().await, "{}", site.servers[0].text());
    let took = begun.elapsed();
    assert!((Duration::from_secs(9)..Duration::from_secs(14)).contains(&took), "it took {took:?}");
    let intent = crate::attach::head(&site, "data").await;
    assert!(intent.contains(&call.call) && intent.contains("\"host\":\"c1\""), "{intent}");
    assert!(site.raw().await.below("/csid/v1/session/").await.is_empty());
}

/// A release waits for its node for up to 60 s, and a server that stops does not.
#[tokio::test]
async fn release_goes_on_after_its_server_stops() {
    let mut site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let node = site.node("n1");
    let mut session = node.join(1).await;
    let claim = node.claim(1, "data").await.unwrap();
    let file = operator(&site, "all");
    let released = tokio::spawn(async move { csictl(&file, "--operator release default data web").await });
    assert!(session.next().await.unwrap().is_some(), "the node is asked");
    site.servers[0].signal(Signal::TERM);
    let begun = Instant::now();
    assert!(site.servers[0].ended().await, "{}", site.servers[0].text());
    assert!(begun.elapsed() < Duration::from_secs(8), "it took {:?}", begun.elapsed());
    assert!(!released.is_finished());
    node.detached(1, "data", &claim).await.unwrap();
    let said = released.await.unwrap();
    assert!(said.code == Some(0) && said.err.contains("does not follow etcd now, or stops"), "{said:?}");
}
