//! Operators when servers or etcd die: what csictl does then, and what it says of the result.

use std::time::{Duration, Instant};

use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::{Accept, BlockAsk, ChangeAsk, Deregister, NodeAsk, NodeChange, VolumeAsk};
use rustix::process::Signal;
use serde_json::{Value, json};
use tonic::Code;

use crate::certificates::Pair;
use crate::far_end::FarEnd;
use crate::operators::{csictl, operator, operator_file};
use crate::site::{Refusal, Site, eventually, register};

#[tokio::test]
async fn without_etcd_csictl_ends_in_time() {
    let site = Site::start(2).await;
    drop(site.node("n1").join(0).await);
    let file = operator(&site, "all");
    site.etcd.members[0].signal(Signal::STOP);
    let begun = Instant::now();
    for words in ["node list --json", "node show n1 --json", "server list --json"] {
        let error = csictl(&file, words).await.error();
        assert_eq!(
            (&error["error"], &error["details"]["retryable"]),
            (&json!("Unreachable"), &json!(true)),
            "{error}"
        );
        let servers = error["details"]["servers"].as_array().unwrap();
        assert_eq!(servers.len(), 2, "{error}");
        assert!(servers[0]["why"].as_str().unwrap().contains("etcd"), "{error}");
    }
    let error = csictl(&file, "node block n1 --json").await.error();
    assert_eq!(error["error"], "Unreachable", "nothing was written: {error}");
    assert!(begun.elapsed() < Duration::from_secs(30), "it took {:?}", begun.elapsed());
    site.etcd.members[0].signal(Signal::CONT);
    eventually("the servers have etcd again", async || csictl(&file, "node list").await.code == Some(0))
        .await;
    assert_eq!(csictl(&file, "node show n1 --json").await.json()["state"], "ready");
}

/// etcd stops while changes of many nodes are on their way to it. One transaction may have all of them.
#[tokio::test]
async fn change_that_etcd_does_not_answer_is_unknown() {
    const NODES: usize = 48;
    let site = Site::start(1).await;
    let mut raw = site.raw().await;
    let row = json!({ "journal-id": "j", "machine-id": "m", "boot": "b", "state": "ready" }).to_string();
    for n in 0..NODES {
        raw.put(&format!("/csid/v1/node/m{n}"), &row).await;
    }
    let admin = site.admin(0, "all");
    let changing: Vec<_> = (0..NODES)
        .map(|n| {
            let mut admin = admin.clone();
            tokio::spawn(async move {
                let (mut state, mut revision) = ("ready".to_owned(), 0);
                for is_block in [true, false].into_iter().cycle() {
                    let accept = Accept {
                        machine_id: "m".into(),
                        journal_id: "j".into(),
                        revision,
                        ..Accept::default()
                    };
                    let change = match is_block {
                        true => Change::Block(BlockAsk::default()),
                        false => Change::Accept(accept),
                    };
                    let ask = NodeChange { node: format!("m{n}"), change: Some(change) };
                    match admin.set_node(ask).await {
                        Ok(row) => {
                            let row = row.into_inner();
                            (state, revision) = (row.state, row.revision);
                        }
                        Err(status) => return (state, Refusal::of(&status).kind),
                    }
                }
                unreachable!("the changes never end")
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(500)).await;
    site.etcd.members[0].signal(Signal::STOP);
    let begun = Instant::now();
    let mut ended = Vec::new();
    for change in changing {
        ended.push(change.await.unwrap());
    }
    assert!(begun.elapsed() < Duration::from_secs(20), "it took {:?}", begun.elapsed());
    // Nothing of a change that begins now can be written.
    let late = NodeChange { node: "m0".into(), change: Some(Change::Block(BlockAsk::default())) };
    let late = admin.clone().set_node(late).await.unwrap_err();
    assert_eq!(Refusal::of(&late).kind, "Unavailable", "{late:?}");
    site.etcd.members[0].signal(Signal::CONT);
    eventually("the server has etcd again", async || {
        admin.clone().node(NodeAsk { node: "m0".into() }).await.is_ok()
    })
    .await;
    let mut unknown = 0;
    for (n, (answered, kind)) in ended.into_iter().enumerate() {
        let state = admin.clone().node(NodeAsk { node: format!("m{n}") }).await.unwrap().into_inner().state;
        match kind.as_str() {
            "Uncertain" => unknown += 1,
            "Unavailable" => assert_eq!(state, answered, "m{n}: what was not done is done"),
            _ => panic!("m{n}: {kind}"),
        }
    }
    assert_ne!(unknown, 0, "no change was on its way to etcd");
}

/// As above, with volumes that are registered and deregistered.
#[tokio::test]
async fn registration_that_etcd_does_not_answer_is_unknown() {
    const VOLUMES: usize = 48;
    let site = Site::start(1).await;
    let operator = site.operator(0, "all");
    let changing: Vec<_> = (0..VOLUMES)
        .map(|n| {
            let mut operator = operator.clone();
            tokio::spawn(async move {
                let volume = format!("v{n}");
                let deregister = Deregister { volume: volume.clone(), ..Deregister::default() };
                let deregister = ChangeAsk { what: Some(What::Deregister(deregister)) };
                let mut is_registered = false;
                loop {
                    let ask = match is_registered {
                        true => deregister.clone(),
                        false => register(&volume, "single-node-writer"),
                    };
                    match operator.change(ask).await {
                        Ok(_) => is_registered = !is_registered,
                        Err(status) => return (is_registered, Refusal::of(&status).kind),
                    }
                }
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(500)).await;
    site.etcd.members[0].signal(Signal::STOP);
    let mut ended = Vec::new();
    for change in changing {
        ended.push(tokio::time::timeout(Duration::from_secs(20), change).await.unwrap().unwrap());
    }
    // Nothing of a change that begins now can be written.
    let late = operator.clone().change(register("late", "single-node-writer")).await.unwrap_err();
    assert_eq!(Refusal::of(&late).kind, "Unavailable", "{late:?}");
    site.etcd.members[0].signal(Signal::CONT);
    let show =
        async |volume: String| operator.clone().volume(VolumeAsk { volume, ..VolumeAsk::default() }).await;
    eventually("the server has etcd again", async || {
        show("none".into()).await.is_err_and(|status| status.code() == Code::NotFound)
    })
    .await;
    let mut unknown = 0;
    for (n, (was_registered, kind)) in ended.into_iter().enumerate() {
        let is_registered = show(format!("v{n}")).await.is_ok();
        match kind.as_str() {
            "Uncertain" => unknown += 1,
            "Unavailable" => assert_eq!(is_registered, was_registered, "v{n}: what was not done is done"),
            _ => panic!("v{n}: {kind}"),
        }
    }
    assert_ne!(unknown, 0, "no change was on its way to etcd");
}

#[tokio::test]
async fn csictl_asks_the_next_server_when_one_is_dead() {
    let mut site = Site::start(2).await;
    drop(site.node("n1").join(1).await);
    let file = operator(&site, "all");
    // A server that stands still takes connections, and says nothing.
    site.servers[0].signal(Signal::STOP);
    let begun = Instant::now();
    let said = csictl(&file, "node block n1").await;
    assert_eq!(said.code, Some(0), "{said:?}");
    assert_eq!(
        said.err,
        format!("csictl: {}: the server was not reached: no answer within 5 s\n", site.addresses[0])
    );
    assert!(begun.elapsed() < Duration::from_secs(10), "it took {:?}", begun.elapsed());
    site.servers[0].kill();
    let said = csictl(&file, "node show n1 --json").await;
    assert_eq!(said.json()["state"], "blocked");
    let warning: Value = serde_json::from_str(said.err.trim_end()).unwrap();
    assert_eq!(warning["server"], site.addresses[0]);
    assert!(warning["warning"].as_str().unwrap().contains("refused"), "{warning}");
    // The row of the dead server ends with its lease.
    eventually("one server is in the list", async || {
        csictl(&file, "server list --json").await.json()["servers"].as_array().map(Vec::len) == Some(1)
    })
    .await;
    site.servers[1].kill();
    let said = csictl(&file, "node list").await;
    assert_eq!(said.code, Some(1), "{said:?}");
    for text in [
        &*site.addresses[0],
        &site.addresses[1],
        "no server of the cluster prod",
        "systemctl status csid-server",
    ] {
        assert!(said.err.contains(text), "{text}: {said:?}");
    }
}

#[tokio::test]
async fn calls_of_a_server_that_is_killed_are_done_by_the_next() {
    let mut site = Site::start(2).await;
    drop(site.node("n1").join(1).await);
    let file = operator(&site, "all");
    let running: Vec<_> = (0..12)
        .map(|n| {
            let file = file.clone();
            let words = if n % 2 == 0 { "node block n1 --json" } else { "node list --json" };
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(n * 15)).await;
                csictl(&file, words).await
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(120)).await;
    site.servers[0].kill();
    for said in running {
        let said = said.await.unwrap();
        assert_eq!(said.code, Some(0), "{said:?}");
    }
    assert_eq!(csictl(&file, "node show n1 --json").await.json()["state"], "blocked");
}

/// The far end takes a call, and ends the connection without an answer.
#[tokio::test]
async fn lost_answer_of_a_change_is_said_to_be_unknown() {
    let site = Site::start(1).await;
    drop(site.node("n1").join(0).await);
    let of_server = Pair { certificate: site.path("s0/server.pem"), key: site.path("s0/server.key") };
    let far = FarEnd::start(&of_server);
    let pair = site.client_pair("csid://prod/operator/all");
    let alone = operator_file(&site, "alone", &pair, &[far.address()]);
    let error = csictl(&alone, "node block n1 --json").await.error();
    assert_eq!(error["error"], "Uncertain", "{error}");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("block node n1") && message.contains(&far.address()), "{error}");
    assert!(error["hint"].as_str().unwrap().contains("csictl node show n1"), "{error}");
    // What changes nothing has no unknown result.
    assert_eq!(csictl(&alone, "node show n1 --json").await.error()["error"], "Unreachable");
    // The change is the same when it is repeated, so the next server is asked for it.
    let both = operator_file(&site, "both", &pair, &[far.address(), site.addresses[0].clone()]);
    let said = csictl(&both, "node block n1 --json").await;
    assert_eq!(said.json()["state"], "blocked");
    assert!(said.err.contains(&far.address()), "{said:?}");
}
