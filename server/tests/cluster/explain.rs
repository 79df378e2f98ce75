//! Explanations of volumes: what each claim waits for, who acts, and who may see which name.

use std::time::UNIX_EPOCH;

use csi_proto::cluster::v1::{ClaimAsk, Explanation, ReleaseAsk, VolumeAsk};
use csi_proto::time::timestamp;
use serde_json::{Value, json};

use crate::attach::{Controller, claiming, user};
use crate::operators::{csictl, operator};
use crate::site::{Site, eventually, release_ask};

fn data() -> VolumeAsk {
    VolumeAsk { namespace: "default".into(), volume: "data".into(), ..VolumeAsk::default() }
}

fn now_usec() -> u64 {
    u64::try_from(UNIX_EPOCH.elapsed().unwrap().as_micros()).unwrap()
}

/// Takes `since-usec` out of an object of JSON.
fn take_since(of: &mut Value) -> u64 {
    of.as_object_mut().unwrap().remove("since-usec").unwrap().as_u64().unwrap()
}

async fn explained(site: &Site, who: &str) -> Explanation {
    site.operator(0, who).explain(data()).await.unwrap().into_inner()
}

#[tokio::test]
async fn explanation_names_what_a_release_waits_for() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, one) = user(&site, "n1", 0).await;
    let (n2, _two) = user(&site, "n2", 0).await;
    let file = operator(&site, "all");
    let explain = async || csictl(&file, "--operator explain default data --json").await.json();

    let found = explain().await;
    assert_eq!((&found["claims"], &found["acting"], &found["do"]), (&json!([]), &Value::Null, &json!("")));

    // An attach in flight.
    let begun = now_usec();
    let claim = claiming(&n1, 0, "data");
    let call = controller.called().await;
    let called = now_usec();
    let mut found = explain().await;
    let sent = take_since(&mut found["acting"]);
    let waits = take_since(&mut found["claims"][0]["waits-for"]);
    assert!(begun <= waits && waits <= sent && sent <= called, "{begun} {waits} {sent} {called}");
    let acting = json!({
        "server": "s0", "gone": false, "rpc": "ControllerPublishVolume", "host": "c1", "node": "n1", "consumer": "web",
    });
    assert_eq!(found["acting"], acting);
    assert_eq!(found["claims"][0]["waits-for"]["kind"], "attach", "{found}");
    controller.end(&call, crate::attach::attached("/dev/x")).await;
    let granted = claim.await.unwrap().unwrap();

    // A claim that waits for the holder.
    let waits = ClaimAsk { queue_ms: 600_000, answer_ms: 1, ..n2.ask("data", "job") };
    n2.client(0).claim(waits).await.unwrap_err();
    let mut found = explain().await;
    let waits = take_since(&mut found["queue"][0]["waits-for"]);
    assert!(called <= waits && waits <= now_usec(), "{found}");
    let due = json!({ "kind": "claims", "text": "the end of n1/web", "holders": ["n1/web"], "node": "" });
    assert_eq!((&found["queue"][0]["waits-for"], &found["claims"][0]["waits-for"]), (&due, &Value::Null));
    assert!(
        found["claims"][0]["since-usec"].as_u64() > Some(0)
            && found["queue"][0]["since-usec"].as_u64() > Some(0)
    );
    let due =
        json!({ "node": "n1", "node-id": "", "state": "attached", "consumers": ["web"], "waits-for": null });
    assert_eq!(found["attachments"], json!([due]));
    assert!(
        found["do"].as_str().unwrap().contains("--operator release default data web --node n1"),
        "{found}"
    );

    // Its node has to unmount the volume, and is away.
    let begun = now_usec();
    let release = ReleaseAsk { deadline_ms: 1, ..release_ask("data", "n1") };
    site.operator(0, "all").release(release).await.unwrap_err();
    let mut found = explain().await;
    let released = take_since(&mut found["claims"][0]["waits-for"]);
    assert!(begun <= released && released <= now_usec(), "{found}");
    assert_eq!(
        (&found["claims"][0]["waits-for"]["kind"], &found["claims"][0]["waits-for"]["node"]),
        (&json!("node"), &json!("n1"))
    );
    assert_eq!(found["nodes"][0], json!({ "node": "n1", "state": "ready", "away": false, "owes": 1 }));
    csictl(&file, "node drain n1").await;
    drop(one);
    eventually("n1 is away", async || {
        let node = explain().await["nodes"][0].clone();
        node == json!({ "node": "n1", "state": "draining", "away": true, "owes": 1 })
    })
    .await;
    let said = csictl(&file, "--operator explain default data").await;
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    for due in [
        &format!("waits for: node n1 to unmount the volume (n1/web) since {}", timestamp(released)),
        "csictl node fence n1 --reason TEXT",
        "taken, releasing",
        "the end of n1/web",
        "draining  away",
    ] {
        assert!(said.out.contains(due), "{due}: {}", said.out);
    }

    // The node has let it go, and the controller is called.
    n1.detached(0, "data", &granted.claim).await.unwrap();
    let call = controller.called().await;
    let found = explain().await;
    assert_eq!(
        (&found["acting"]["rpc"], &found["acting"]["host"]),
        (&json!("ControllerUnpublishVolume"), &json!("c1"))
    );
    let wait = &found["claims"][0]["waits-for"];
    assert_eq!((&wait["kind"], &wait["since-usec"]), (&json!("detach"), &json!(released)));
    let sent = found["acting"]["since-usec"].clone();
    assert!(sent.as_u64() > Some(released), "{found}");

    // Who may not list nodes and servers sees neither the server nor the host.
    let of_node = n2.client(0).explain(data()).await.unwrap().into_inner();
    for of in [of_node, explained(&site, "local").await] {
        let acting = of.acting.unwrap();
        assert_eq!((acting.server.as_str(), acting.host.as_str()), ("", ""));
        assert_eq!((acting.rpc.as_str(), acting.node.as_str()), ("ControllerUnpublishVolume", "n1"));
        assert!(of.nodes.iter().all(|of| of.node != "c1"), "{:?}", of.nodes);
    }
    let of_host = controller.node.client(0).explain(data()).await.unwrap_err();
    assert_eq!(of_host.code(), tonic::Code::PermissionDenied, "it may not see the namespace");

    // The controller is gone, and its call has no answer.
    drop(call);
    controller.leave().await;
    eventually("the detach waits for a controller", async || {
        let found = explain().await;
        found["claims"][0]["waits-for"]["kind"] != "attach"
            && found["acting"]["rpc"] == ""
            && found["acting"]["host"] == "c1"
            && found["acting"]["since-usec"] == sent
    })
    .await;
    let said = csictl(&file, "--operator explain default data").await;
    assert!(said.out.contains("start csid on node c1"), "{}", said.out);
}

#[tokio::test]
async fn unknown_volume_is_not_explained() {
    let site = Site::start(1).await;
    let file = operator(&site, "reads");
    let said = csictl(&file, "--operator explain default none").await;
    assert!(said.code == Some(1) && said.err.contains("csictl --operator volume list"), "{said:?}");
    let denied = csictl(&operator(&site, "nobody"), "--operator explain default none --json").await;
    assert_eq!(denied.error()["error"], "NotAuthorized");
}

#[tokio::test]
async fn creation_waits_for_its_controller() {
    let site = Site::start(1).await;
    let file = operator(&site, "all");
    let create = "--operator volume create default disk --plugin p --access-mode single-node-writer --capacity 1GiB --deadline 1s";
    let said = csictl(&file, create).await;
    assert!(said.code == Some(1), "{said:?}");
    let found = csictl(&file, "--operator explain default disk --json").await.json();
    assert_eq!((&found["standing"], &found["waits-for"]["kind"]), (&json!("creating"), &json!("create")));
}
