//! A whole cluster on one screen.

use csi_proto::cluster::v1::{Attaches, CallClass, ClaimAsk, ReleaseAsk};
use serde_json::json;

use crate::attach::{Controller, claiming, failed, user};
use crate::operators::{csictl, operator};
use crate::site::{First, Site, ask, eventually, hello, open, release_ask};

#[tokio::test]
async fn status_counts_and_names_what_is_to_be_done() {
    let mut site = Site::start(2).await;
    let file = operator(&site, "all");
    let said = csictl(&file, "--operator cluster status").await;
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    for due in ["cluster: prod, normal", "servers: 2 (s0 ", "nodes: 0", "needs an operator: nothing"] {
        assert!(said.out.contains(due), "{due}: {}", said.out);
    }

    for volume in ["data", "more"] {
        site.register(volume, "single-node-writer").await;
    }
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, one) = user(&site, "n1", 0).await;
    let (n2, _two) = user(&site, "n2", 0).await;
    for volume in ["data", "more"] {
        let claim = claiming(&n1, 0, volume);
        controller.publish().await;
        claim.await.unwrap().unwrap();
    }
    let waits = ClaimAsk { queue_ms: 600_000, answer_ms: 1, ..n2.ask("data", "web") };
    n2.client(0).claim(waits).await.unwrap_err();
    let release = |volume: &str| ReleaseAsk { deadline_ms: 1, ..release_ask(volume, "n1") };
    site.operator(0, "all").release(release("data")).await.unwrap_err();
    let mut hello = n2.hello.clone();
    hello.machine_id = "another".into();
    open(&mut n2.client(0), hello).await.unwrap();
    drop(one);
    let status = async || csictl(&file, "--operator cluster status --json").await.json();
    eventually("n1 is away", async || status().await["nodes"]["away"] == 1).await;
    let found = status().await;
    assert_eq!(found["nodes"], json!({ "away": 1, "ready": 2 }));
    assert_eq!(
        [&found["volumes"], &found["owed"], &found["queued"], &found["parked"]],
        [&json!(2), &json!(1), &json!(1), &json!(0)]
    );
    let kinds = |found: &serde_json::Value| -> Vec<String> {
        let all = found["attention"].as_array().unwrap();
        all.iter()
            .map(|of| format!("{} {}", of["kind"].as_str().unwrap(), of["name"].as_str().unwrap()))
            .collect()
    };
    assert_eq!(kinds(&found), ["node-away n1", "another-machine n2"]);

    // The plugin refuses a detach for good.
    let (_first, _session) = n1.say_hello(0).await.unwrap();
    let claim = {
        let row = crate::attach::row(&site, "vol/default/data/claim/n1/web").await;
        serde_json::from_str::<serde_json::Value>(&row).unwrap()["id"].as_str().unwrap().to_owned()
    };
    n1.detached(0, "data", &claim).await.unwrap();
    let call = controller.called().await;
    controller.end(&call, failed(CallClass::Refused)).await;
    eventually("the detach is parked", async || status().await["parked"] == 1).await;
    let found = status().await;
    assert!(kinds(&found).contains(&"parked default/data".to_owned()), "{found}");
    let said = csictl(&file, "--operator cluster status").await;
    assert!(said.out.contains("`csictl --operator explain default data`"), "{}", said.out);
    let said = csictl(&file, "--operator explain default data --json").await.json();
    assert_eq!(said["claims"][0]["waits-for"]["kind"], "parked");

    // The next server answers, and lists one server when the lease of the other has ended.
    site.servers[0].kill();
    eventually("one server is left", async || status().await["servers"].as_array().unwrap().len() == 1).await;
    let denied = csictl(&operator(&site, "local"), "--operator cluster status --json").await;
    assert_eq!(denied.error()["error"], "NotAuthorized");
}

/// A power failure of many hosts is when an operator reads the status.
#[tokio::test]
async fn status_with_many_nodes_away_is_one_screen() {
    let site = Site::start(1).await;
    site.register("shared", "multi-node-multi-writer").await;
    let away: usize = 70;
    for n in 0..away {
        let name = format!("n{n:02}");
        let mut client = site.direct(0, Some(&site.client_pair(&format!("csid://prod/node/{name}"))));
        let (first, mut session) = open(&mut client, hello(&name)).await.unwrap();
        assert!(matches!(first, First::Welcome(_)), "{first:?}");
        session.report(Attaches::No).await;
        let mut wanted = ClaimAsk { boot: hello(&name).boot, ..ask("shared", "web") };
        wanted.r#use.as_mut().unwrap().access_mode = "multi-node-multi-writer".into();
        eventually("the node has its claim", async || client.claim(wanted.clone()).await.is_ok()).await;
    }
    let file = operator(&site, "all");
    let mut found = serde_json::Value::Null;
    eventually("the nodes are away", async || {
        found = csictl(&file, "--operator cluster status --json").await.json();
        found["attention-count"] == away
    })
    .await;
    assert_eq!((found["attention"].as_array().unwrap().len(), &found["nodes"]["away"]), (64, &json!(away)));
    let said = csictl(&file, "--operator cluster status").await;
    let lines: Vec<&str> = said.out.lines().collect();
    assert!(said.code == Some(0) && lines.len() < 24, "{} lines: {}", lines.len(), said.out);
    let rows = lines.iter().filter(|line| line.starts_with("node-away")).count();
    assert!(rows >= 10 && said.out.contains("nodes: 70 (70 away)"), "{}", said.out);
    assert_eq!(*lines.last().unwrap(), format!("and {} more", away - rows), "{}", said.out);
}

/// The blocks of docs/cluster-operations.md, as an operator types them.
#[tokio::test]
async fn commands_of_the_runbooks_are_served() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let file = operator(&site, "all");
    let document = include_str!("../../../docs/cluster-operations.md");
    let mut typed = 0;
    for heading in ["At a glance", "A volume that waits", "Upgrades"] {
        let rest = document.split_once(&format!("### {heading}\n")).expect(heading).1;
        let section = rest.split("\n### ").next().unwrap();
        let blocks = section.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
        let lines = blocks.flat_map(str::lines).filter_map(|line| line.strip_prefix("csictl "));
        for line in lines.map(|line| line.split('#').next().unwrap().trim_end()) {
            let said = csictl(&file, line).await;
            assert_eq!(said.code, Some(0), "{line}: {said:?}");
            typed += 1;
        }
    }
    assert_eq!(typed, 4);
}
