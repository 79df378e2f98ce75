//! Audits: what does not fit in a real etcd is found by its kind, and nothing else is.

use std::collections::BTreeSet;

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::{Answer, AuditAsk, ChangeAsk, Deregister};
use serde_json::{Value, json};

use crate::attach::{Controller, attached, claiming, row, user};
use crate::operators::{csictl, operator};
use crate::site::{Site, eventually};

/// Part of a value that no finding may have.
const CANARY: &str = "c4n4ry-v4lu3";

async fn value(site: &Site, key: &str) -> Value {
    let found = site.raw().await.below(key).await;
    let kv = found.into_iter().find(|kv| kv.key == key.as_bytes());
    serde_json::from_slice(&kv.unwrap_or_else(|| panic!("no key {key}")).value).unwrap()
}

/// Starts a cluster with the volume `data`, which n1 has claimed.
async fn with_claim() -> Site {
    let site = Site::start(2).await;
    site.register("data", "single-node-writer").await;
    let node = site.node("n1");
    let session = node.join(0).await;
    node.claim(0, "data").await.unwrap();
    drop(session);
    site
}

#[tokio::test]
async fn healthy_cluster_has_no_findings() {
    let site = with_claim().await;
    let file = operator(&site, "reads");
    let said = csictl(&file, "server audit").await;
    assert_eq!((said.code, said.err.as_str(), said.out.as_str()), (Some(0), "No findings.\n", ""));
    assert_eq!(csictl(&file, "server audit --json").await.json(), json!([]));
}

#[tokio::test]
async fn each_kind_of_misfit_is_found_by_its_key() {
    let site = with_claim().await;
    let mut raw = site.raw().await;
    let root = "/csid/v1";
    let data = format!("{root}/vol/default/data");
    // A value that cannot be read.
    raw.put(&format!("{root}/vol/default/bad/head"), &format!("{{\"volume\":\"{CANARY}\"}}")).await;
    // A claim of a node without a row.
    let mut claim = value(&site, &format!("{data}/claim/n1/web")).await;
    claim["node"] = json!("n8");
    raw.put(&format!("{data}/claim/n8/web"), &claim.to_string()).await;
    // A driver that is gone. Another server would go on, but none does while the cluster recovers.
    let mut meta = value(&site, &format!("{root}/meta")).await;
    meta["mode"] = json!("recovering");
    raw.put(&format!("{root}/meta"), &meta.to_string()).await;
    let mut head = value(&site, &format!("{data}/head")).await;
    head["driver"] = json!({ "server": "gone", "host": "c1", "deadline-ms": 1000 });
    raw.put(&format!("{data}/head"), &head.to_string()).await;
    // Volumes that lack a row, or whose row names another one.
    for (volume, plugin_volume) in [("lacks", "ext-lacks"), ("other", "ext-data")] {
        let head = json!({ "volume": ["p", plugin_volume], "change": "1" });
        raw.put(&format!("{root}/vol/default/{volume}/head"), &head.to_string()).await;
    }
    let lost = json!({ "namespace": "default", "volume": "lost" });
    raw.put(&format!("{root}/ext/p/00ff"), &lost.to_string()).await;
    raw.put(&format!("{root}/ext/p/00fe"), CANARY).await;
    let mut registration = value(&site, &format!("{data}/reg")).await;
    registration["owner"] = json!("node/n3");
    raw.put(&format!("{data}/reg"), &registration.to_string()).await;
    // An attachment without a claim, for an away node.
    let attachment =
        json!({ "node": "n7", "node-id": "i-7", "leg": "present", "publish-context": { "token": CANARY } });
    raw.put(&format!("{root}/vol/default/lacks/at/n7"), &attachment.to_string()).await;
    raw.put(&format!("{root}/vol/default/nohead/past/0"), &claim.to_string()).await;
    raw.put(&format!("{root}/vol/default/queued/queue/0001"), "{}").await;
    raw.put(&format!("{root}/used/n1/q"), "{\"volumes\":1}").await;
    raw.put(&format!("{root}/used/n9/q"), CANARY).await;
    // Rows that are no volume's.
    let controllers = json!({ "controllers": ["n8"] });
    raw.put(&format!("{root}/plugin/p"), &controllers.to_string()).await;
    raw.put(&format!("{root}/node/n6"), &format!("{{\"journal-id\":[\"{CANARY}\"]}}")).await;
    let session = json!({ "since-usec": 1, "boot": "b" });
    raw.put(&format!("{root}/session/n5/s"), &session.to_string()).await;
    let report = json!({ "drain": 1, "boot": "b", "since-usec": 1, "count": 0 });
    raw.put(&format!("{root}/report/n4"), &report.to_string()).await;
    raw.put(&format!("{root}/report/n1"), CANARY).await;
    let server = raw.below(&format!("{root}/server/")).await.remove(0);
    let mut server: Value = serde_json::from_slice(&server.value).unwrap();
    server["grants"] = json!("others");
    raw.put(&format!("{root}/server/third"), &server.to_string()).await;

    let file = operator(&site, "reads");
    let said = csictl(&file, "server audit --json").await;
    assert_eq!(said.code, Some(1), "{said:?}");
    assert!(!said.out.contains(CANARY) && !said.err.contains(CANARY), "{said:?}");
    assert!(!said.out.contains("hunter2"), "the context of a volume");
    let found: Value = serde_json::from_str(&said.out).unwrap();
    assert!(said.out.contains("the claim is of node n8, which has no row"), "{said:?}");
    let found: BTreeSet<(&str, &str)> = found
        .as_array()
        .unwrap()
        .iter()
        .map(|of| (of["kind"].as_str().unwrap(), of["key"].as_str().unwrap().strip_prefix(root).unwrap()))
        .collect();
    let external = |volume: &str| {
        use sha2::Digest;
        let digest = sha2::Sha256::digest(volume);
        format!("/ext/p/{}", digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
    };
    let (lacks, other) = (external("ext-lacks"), external("ext-data"));
    let due: BTreeSet<(&str, &str)> = [
        ("attachment-without-claim", "/vol/default/lacks/at/n7"),
        ("claim-without-node", "/vol/default/data/claim/n8/web"),
        ("claims-exclude-each-other", "/vol/default/data/claim/n8/web"),
        ("controller-without-node", "/plugin/p"),
        ("driver-without-server", "/vol/default/data/head"),
        ("external-id-without-volume", "/ext/p/00ff"),
        ("grants-differ", "/server/third"),
        ("recovery-awaits-node", "/node/n1"),
        ("recovery-awaits-node", "/node/n6"),
        ("report-without-node", "/report/n4"),
        ("session-without-node", "/session/n5/s"),
        ("unreadable-value", "/ext/p/00fe"),
        ("unreadable-value", "/node/n6"),
        ("unreadable-value", "/report/n1"),
        ("unreadable-value", "/used/n9/q"),
        ("unreadable-value", "/vol/default/bad/head"),
        ("used-without-claim", "/used/n1/q"),
        ("volume-without-external-id", &lacks),
        ("volume-without-external-id", &other),
        ("volume-without-head", "/vol/default/nohead/head"),
        ("volume-without-head", "/vol/default/queued/head"),
        ("volume-without-owner", "/vol/default/data/reg"),
    ]
    .into();
    assert_eq!(found, due);
}

#[tokio::test]
async fn audit_that_nobody_reads_makes_way_for_another() {
    let site = with_claim().await;
    let mut admin = site.admin(0, "reads");
    let first = admin.audit(AuditAsk {}).await.unwrap();
    drop(first);
    // Who leaves an audit ends it.
    eventually("another audit is made", async || {
        let answers = admin.audit(AuditAsk {}).await;
        match answers {
            Ok(answers) => answers.into_inner().message().await.unwrap().is_none(),
            Err(_) => false,
        }
    })
    .await;
}

#[tokio::test]
async fn driver_that_another_server_replaces_is_no_misfit() {
    let site = with_claim().await;
    let key = "/csid/v1/vol/default/data/head";
    let mut head = value(&site, key).await;
    head["driver"] = json!({ "server": "gone", "host": "c1", "deadline-ms": 1000 });
    site.raw().await.put(key, &head.to_string()).await;
    let said = csictl(&operator(&site, "reads"), "server audit").await;
    assert_eq!((said.code, said.err.as_str()), (Some(0), "No findings.\n"), "{said:?}");
}

#[tokio::test]
async fn attached_volume_is_no_misfit_at_any_step() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let file = operator(&site, "reads");
    let none = async |step: &str| {
        let said = csictl(&file, "server audit").await;
        assert_eq!((said.code, said.err.as_str()), (Some(0), "No findings.\n"), "{step}: {said:?}");
    };
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, _session) = user(&site, "n1", 0).await;
    let claim = claiming(&n1, 0, "data");
    let call = controller.called().await;
    none("attaching").await;
    controller.end(&call, attached("/dev/x")).await;
    let granted = claim.await.unwrap().unwrap();
    none("attached").await;
    n1.detached(0, "data", &granted.claim).await.unwrap();
    let call = controller.called().await;
    none("detaching").await;
    controller.end(&call, How::Answer(Answer::default())).await;
    eventually("the claim is free", async || row(&site, "vol/default/data/claim").await.is_empty()).await;
    none("detached").await;
    // The row of a plugin's volume goes with its registration.
    let deregister = Deregister { namespace: "default".into(), volume: "data".into(), ..Default::default() };
    let ask = ChangeAsk { what: Some(What::Deregister(deregister)) };
    site.operator(0, "all").change(ask).await.unwrap();
    none("deregistered").await;
}
