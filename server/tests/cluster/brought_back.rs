//! What a recovery from a backup of etcd makes of what nodes say to hold: claims and volumes come back, or are refused.

use std::time::Duration;

use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::resume_ask::Step;
use csi_proto::cluster::v1::{Attaches, ClaimAsk, HeldClaim, PluginReport, ReleaseAsk, ResumeAsk, Use};
use serde_json::{Value, json};

use crate::attach::{Controller, claiming, head, row, user, user_named};
use crate::creations::{created, creating, deleting, is_delete, registration};
use crate::operators::{csictl, operator};
use crate::recovery::{
    claims, forget, held, held_attached, hold, is, leave_out, page, phase, restored, resume, resumed,
    servers, step, try_hold, welcome, writing,
};
use crate::site::{Refusal, Site, eventually, register, release_ask};

#[tokio::test]
async fn name_in_another_namespace_is_hidden_from_a_node() {
    let site = Site::start(1).await;
    let mut ask = register("hidden", "single-node-writer");
    if let Some(What::Register(register)) = &mut ask.what {
        register.namespace = "secret".into();
    }
    site.operator(0, "all").change(ask).await.unwrap();
    let node = site.node("n1");
    drop(welcome(&node, 0).await);
    restored(&site, 0, 1).await.unwrap();
    let _session = welcome(&node, 0).await;
    let lie = HeldClaim { external_id: "ext-hidden".into(), ..held(&node, "data", "lie") };
    let refused = try_hold(&node, 0, page(&node, 2, vec![lie], true)).await.unwrap();
    assert_eq!(refused.len(), 1);
    assert!(!format!("{refused:?}").contains("secret"), "{refused:?}");
    assert!(refused[0].why.contains("known under another name"), "{refused:?}");
}

/// The controller of the backup may still attach the volume for another node.
#[tokio::test]
async fn call_for_another_node_is_not_dropped() {
    let site = Site::start(1).await;
    site.register("data", "multi-node-multi-writer").await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (n1, first) = user(&site, "n1", 0).await;
    let (n2, _second) = user(&site, "n2", 0).await;
    let many = writing("multi-node-multi-writer");
    let mut client = n2.client(0);
    let ask = ClaimAsk { r#use: Some(many.clone()), ..n2.ask("data", "web") };
    let claim = tokio::spawn(async move { client.claim(ask).await });
    let call = controller.called().await;
    drop(first);
    restored(&site, 0, 1).await.unwrap();
    let (_, _session) = welcome(&n1, 0).await;
    let of_n1 =
        HeldClaim { usage: Some(many), external_node_id: "id of n1".into(), ..held(&n1, "data", "one") };
    hold(&n1, 0, page(&n1, 2, vec![of_n1], true)).await.unwrap();
    assert!(row(&site, "vol/default/data/at/n1").await.contains("\"present\""));
    let head = head(&site, "data").await;
    assert!(head.contains(&call.call), "a call that may run was dropped: {head}");
    claim.abort();
}

#[tokio::test]
async fn lie_about_what_a_node_holds_is_refused() {
    let site = Site::start(1).await;
    for volume in ["data", "more"] {
        site.register(volume, "single-node-writer").await;
    }
    let node = site.node("n1");
    drop(node.join(0).await);
    restored(&site, 0, 1).await.unwrap();
    let mut session = node.join(0).await;
    session.report_name("id of n1").await;
    eventually("the servers know its name", async || row(&site, "node/n1").await.contains("id of n1")).await;
    let before = site.raw().await.below("/csid/v1/vol/").await;
    let one = held(&node, "data", "one");
    let context: std::collections::BTreeMap<_, _> = [("device".to_owned(), "x".to_owned())].into();
    let usage = |mode: &str, access_mode: &str| {
        let (mode, access_mode) = (mode.into(), access_mode.into());
        Some(Use { mode, access_mode, attachment_mode: "file-system".into() })
    };
    let lies = [
        ("no grant for mount", HeldClaim { namespace: "other".into(), ..one.clone() }),
        ("claim", HeldClaim { claim: String::new(), ..one.clone() }),
        ("call", HeldClaim { call: "x".repeat(129), ..one.clone() }),
        ("consumer", HeldClaim { consumer: "a\nb".into(), ..one.clone() }),
        ("plugin", HeldClaim { plugin: String::new(), ..one.clone() }),
        ("", HeldClaim { external_id: String::new(), ..one.clone() }),
        ("usage", HeldClaim { usage: None, ..one.clone() }),
        ("credential", HeldClaim { credential: "csid.other.key".into(), ..one.clone() }),
        ("publish context", HeldClaim { publish_context: context.clone(), ..one.clone() }),
        // The plugin's volume of another name.
        ("default/more", HeldClaim { volume: "new".into(), external_id: "ext-more".into(), ..one.clone() }),
        ("another volume", HeldClaim { external_id: "ext-more".into(), ..one.clone() }),
        // Under the name of another node it would be detached from there.
        ("another name by plugin", HeldClaim { external_node_id: "id of n2".into(), ..one.clone() }),
        // The volume was not registered for that.
        ("", HeldClaim { usage: usage("read", "multi-node-multi-writer"), ..one.clone() }),
        ("", HeldClaim { usage: usage("write", "single-node-reader-only"), ..one.clone() }),
        // No grant names the plugin's controller, which would have to detach it.
        (
            "no grant names its controller",
            HeldClaim {
                plugin: "ghost".into(),
                volume: "new".into(),
                external_node_id: "i-1".into(),
                ..one.clone()
            },
        ),
    ];
    let count = lies.len();
    for (why, lie) in lies {
        let refused = try_hold(&node, 0, page(&node, 2, vec![lie.clone()], false)).await.unwrap();
        assert_eq!(refused.len(), 1, "{lie:?}");
        assert!(!refused[0].why.is_empty() && refused[0].why.contains(why), "{lie:?}: {refused:?}");
        assert_eq!(phase(&site).await, is(2, "recovering", &["n1"]));
    }
    let many = page(&node, 2, vec![one.clone(); 65], true);
    assert_eq!(hold(&node, 0, many).await.unwrap_err().kind, "InvalidArgument");
    let file = operator(&site, "all");
    assert_eq!(csictl(&file, "server audit").await.code, Some(1));
    // A later word about the same claim replaces the earlier one.
    let kept: Value = serde_json::from_str(&row(&site, "heard/n1").await).unwrap();
    assert_eq!(
        (kept["claims"].as_array().unwrap().len(), &kept["more"]),
        (2, &json!(false)),
        "of {count} lies"
    );
    assert_eq!(site.raw().await.below("/csid/v1/vol/").await, before, "a lie was written");
    // An operator does not hold volumes.
    let refused = site.operator(0, "all").hold(page(&node, 2, vec![one.clone()], true)).await.unwrap_err();
    assert_eq!(Refusal::of(&refused).kind, "NotAuthorized");
    // What was refused keeps the recovery from its end, until an operator has looked.
    hold(&node, 0, page(&node, 2, vec![one], true)).await.unwrap();
    assert_eq!(phase(&site).await, is(2, "recovering", &[]));
    assert_eq!(resume(&site).await.unwrap_err().kind, "Busy");
    let status = csictl(&file, "--operator cluster status").await.out;
    assert!(
        status.contains("held-claim-refused") && status.contains("`csictl server resume --forget n1`"),
        "{status}"
    );
    let said = csictl(&file, "server resume").await;
    assert!(said.code == Some(1) && said.err.contains("claims of n1 were not brought back"), "{said:?}");
    // A page came since the operator has looked.
    let seen = servers(&site, 0).await.refused[0].revision;
    let later = HeldClaim { consumer: "a\nb".into(), ..held(&node, "data", "later") };
    try_hold(&node, 0, page(&node, 2, vec![later], true)).await.unwrap();
    let old =
        ResumeAsk { node: "n1".into(), revision: seen, step: Step::Forget.into(), ..ResumeAsk::default() };
    assert_eq!(step(&site, 0, old).await.unwrap_err().kind, "Busy");
    assert_eq!(csictl(&file, "server resume --forget n1").await.code, Some(0));
    assert_eq!(phase(&site).await, is(2, "normal", &[]));
    assert_eq!(csictl(&file, "server audit").await.code, Some(0));
    let status = csictl(&file, "--operator cluster status").await.out;
    assert!(!status.contains("held-claim-refused"), "{status}");
}

/// etcd has the claim, and what etcd has stays: the node's word about it is for a claim that etcd lacks.
#[tokio::test]
async fn lie_about_a_held_claim_changes_nothing() {
    let site = Site::start(1).await;
    for volume in ["data", "attached", "lost"] {
        site.register(volume, "single-node-writer").await;
    }
    let (node, _first) = user(&site, "n1", 0).await;
    let claim = node.claim(0, "data").await.unwrap();
    let mut controller = Controller::start(&site, "c1", 0).await;
    let attached = claiming(&node, 0, "attached");
    controller.publish().await;
    let granted = attached.await.unwrap().unwrap();
    eventually("nobody calls", async || !head(&site, "attached").await.contains("driver")).await;
    restored(&site, 0, 1).await.unwrap();
    let (_, mut session) = welcome(&node, 0).await;
    session.report_name("id of n1").await;
    let good = held(&node, "data", &claim);
    hold(&node, 0, page(&node, 2, vec![good.clone(), held_attached(&node, "attached", &granted)], false))
        .await
        .unwrap();
    let before = site.raw().await.below("/csid/v1/vol/").await;
    for of in [good, held_attached(&node, "attached", &granted)] {
        type Lie<'a> = &'a dyn Fn(&mut HeldClaim);
        let lies: [(&str, Lie<'_>, bool); 12] = [
            ("root's uid", &|of| of.uid = 0, false),
            ("another uid", &|of| of.uid = u32::MAX, false),
            ("a mount", &|of| of.by_mount = true, false),
            ("another call", &|of| of.call = "call 2".into(), false),
            ("an earlier boot", &|of| of.granted_boot = "boot 0 of n1".into(), false),
            ("no boot", &|of| of.granted_boot = String::new(), true),
            ("a long boot", &|of| of.granted_boot = "x".repeat(129), true),
            ("the first moment", &|of| of.since_usec = 1, false),
            ("the last moment", &|of| of.since_usec = u64::MAX, false),
            ("a credential of the volume", &|of| of.volume_credential = "csid.default.key".into(), false),
            ("another's credential", &|of| of.volume_credential = "csid.other.key".into(), true),
            ("a credential as a path", &|of| of.volume_credential = "csid.default./../x".into(), true),
        ];
        for (lie, change, is_refused) in lies {
            let mut lying = of.clone();
            change(&mut lying);
            let refused = try_hold(&node, 0, page(&node, 2, vec![lying], false)).await.unwrap();
            assert_eq!(refused.len(), usize::from(is_refused), "{}: {lie}: {refused:?}", of.volume);
            assert_eq!(site.raw().await.below("/csid/v1/vol/").await, before, "{}: {lie}", of.volume);
        }
    }
    // A claim that etcd lacks is as its node says, and the servers and an operator's terminal bear the strangest one.
    let strange = HeldClaim {
        uid: u32::MAX,
        by_mount: true,
        since_usec: u64::MAX,
        granted_boot: "boot 0 of n1".into(),
        volume_credential: "csid.default.key".into(),
        ..held(&node, "lost", "strange")
    };
    hold(&node, 0, page(&node, 2, vec![strange], true)).await.unwrap();
    let row = row(&site, "vol/default/lost/claim/n1/web").await;
    assert!(!row.contains("csid.default.key"), "the volume's credential is for the detach alone: {row}");
    let file = operator(&site, "all");
    for words in ["--operator claims", "--operator claims --json", "--operator explain default lost"] {
        let said = csictl(&file, words).await;
        assert!(said.code == Some(0) && said.out.contains("lost"), "{words}: {said:?}");
    }
}

/// A thief of a node's key has the servers detach another node's volume, in a namespace of its own and under the other node's name.
#[tokio::test]
async fn name_of_another_node_by_a_plugin_is_refused() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (owner, _first) = user(&site, "n1", 0).await;
    let (thief, mut second) = {
        let node = site.node("n2");
        let (_, mut session) = welcome(&node, 0).await;
        session.report_name("id of n1").await;
        (node, session)
    };
    eventually("the report is written", async || row(&site, "node/n2").await.contains("other-node-id")).await;
    assert!(!row(&site, "node/n2").await.contains("\"node-id\""));
    site.register("data", "single-node-writer").await;
    let refused = claiming(&thief, 0, "data").await.unwrap().unwrap_err();
    assert_eq!(refused.kind, "NotAuthorized");
    assert!(refused.message.contains("by plugin p") && !refused.message.contains("n1 "), "{refused:?}");
    second.report_name("id of n2").await;
    eventually("its own name is taken", async || row(&site, "node/n2").await.contains("\"id of n2\"")).await;
    drop(second);
    restored(&site, 0, 1).await.unwrap();
    controller.join_again(0).await;
    let _sessions = (welcome(&owner, 0).await, welcome(&thief, 0).await);
    let lie = HeldClaim {
        external_node_id: "id of n1".into(),
        external_id: "ext-of-n1".into(),
        ..held(&thief, "stolen", "lie")
    };
    let refused = try_hold(&thief, 0, page(&thief, 2, vec![lie], true)).await.unwrap();
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert!(refused[0].why.contains("by plugin p that another node has"), "{refused:?}");
    assert!(!refused[0].why.contains("n1"), "{refused:?}");
    thief.detached(0, "stolen", "lie").await.unwrap();
    let of_owner = HeldClaim {
        external_node_id: "id of n1".into(),
        external_id: "ext-of-n1".into(),
        ..held(&owner, "own", "true")
    };
    hold(&owner, 0, page(&owner, 2, vec![of_owner], true)).await.unwrap();
    hold(&controller.node, 0, page(&controller.node, 2, vec![], true)).await.unwrap();
    forget(&site, "n2").await;
    resumed(&site, 2).await;
    controller.join_again(0).await;
    assert!(!controller.is_called(Duration::from_secs(3)).await, "the volume was detached");
    assert_eq!(claims(&site, "own").await, ["n1/web"]);
}

/// Its plugin begins later than csid does.
#[tokio::test]
async fn claim_waits_for_the_name_of_its_node() {
    let site = Site::start(1).await;
    let controller = Controller::start(&site, "c1", 0).await;
    let node = site.node("n1");
    drop(welcome(&node, 0).await);
    restored(&site, 0, 1).await.unwrap();
    let (_, mut session) = welcome(&node, 0).await;
    let of = |volume: &str| HeldClaim { external_node_id: "id of n1".into(), ..held(&node, volume, volume) };
    let all = || vec![of("data"), held(&node, "plain", "plain"), of("more")];
    let said = node.client(0).hold(page(&node, 2, all(), true)).await;
    assert_eq!(Refusal::of(&said.unwrap_err()).kind, "Unavailable");
    assert_eq!(claims(&site, "plain").await, ["n1/web"], "the other claim waits, too");
    assert_eq!(phase(&site).await, is(2, "recovering", &["c1", "n1"]));
    assert!(servers(&site, 0).await.refused.is_empty());
    session.report_name("id of n1").await;
    hold(&node, 0, page(&node, 2, all(), true)).await.unwrap();
    for volume in ["data", "plain", "more"] {
        assert_eq!(claims(&site, volume).await, ["n1/web"]);
    }
    drop(controller);
}

/// Since the backup the node has released one volume and taken another one.
#[tokio::test]
async fn claim_beyond_the_volume_limit_comes_back() {
    let site = Site::start(1).await;
    for volume in ["data", "more", "rest"] {
        site.register(volume, "single-node-writer").await;
    }
    let node = site.node("n1");
    let limited = || PluginReport {
        plugin: "p".into(),
        attaches: Attaches::No.into(),
        max_volumes: Some(1),
        ..PluginReport::default()
    };
    let (_, mut session) = welcome(&node, 0).await;
    session.report_as(limited()).await;
    let released = node.claim(0, "data").await.unwrap();
    restored(&site, 0, 1).await.unwrap();
    let (_, mut session) = welcome(&node, 0).await;
    session.report_as(limited()).await;
    hold(&node, 0, page(&node, 2, vec![held(&node, "more", "since")], true)).await.unwrap();
    resumed(&site, 2).await;
    assert_eq!(claims(&site, "more").await, ["n1/web"]);
    assert!(row(&site, "used/n1/p").await.contains("\"volumes\":2"));
    // The limit counts again for what is claimed later.
    let (_, mut session) = welcome(&node, 0).await;
    session.report_as(limited()).await;
    assert_eq!(node.claim(0, "rest").await.unwrap_err().kind, "ClaimConflict");
    node.detached(0, "data", &released).await.unwrap();
    assert_eq!(node.claim(0, "rest").await.unwrap_err().kind, "ClaimConflict");
    node.detached(0, "more", "since").await.unwrap();
    node.claim(0, "rest").await.unwrap();
}

/// Since the backup the node has released one claim and taken another one.
#[tokio::test]
async fn claim_beyond_the_limit_of_claims_comes_back() {
    let site = Site::start_with(1, "max-claims = 1").await;
    for volume in ["data", "more", "rest"] {
        site.register(volume, "single-node-writer").await;
    }
    let node = site.node("n1");
    let session = node.join(0).await;
    node.claim(0, "data").await.unwrap();
    drop(session);
    restored(&site, 0, 1).await.unwrap();
    let _session = node.join(0).await;
    hold(&node, 0, page(&node, 2, vec![held(&node, "more", "since")], true)).await.unwrap();
    resumed(&site, 2).await;
    assert_eq!(claims(&site, "more").await, ["n1/web"]);
    let _session = node.join(0).await;
    assert_eq!(node.claim(0, "rest").await.unwrap_err().kind, "RateLimited");
}

/// Claims, attachments and volumes that the backup lacks or has otherwise.
#[tokio::test]
async fn what_the_backup_lacks_comes_back() {
    let site = Site::start(1).await;
    for volume in ["data", "more"] {
        site.register(volume, "single-node-writer").await;
    }
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (node, session) = user(&site, "n1", 0).await;
    // In the backup the consumer has an earlier claim of `more`, whose detach is under way.
    let claim = claiming(&node, 0, "more");
    controller.publish().await;
    let earlier = claim.await.unwrap().unwrap().claim;
    node.detached(0, "more", &earlier).await.unwrap();
    controller.called().await;
    drop(session);
    controller.leave().await;
    restored(&site, 0, 1).await.unwrap();
    controller.join_again(0).await;
    let (_, mut session) = welcome(&node, 0).await;
    session.report_name("id of n1").await;
    let context = |device: &str| [("device".to_owned(), device.to_owned())].into();
    let of = |volume: &str, claim: &str| HeldClaim {
        external_node_id: "id of n1".into(),
        publish_context: context("/dev/y"),
        ..held(&node, volume, claim)
    };
    let all = vec![of("data", "one"), of("more", "two"), of("unknown", "three")];
    hold(&node, 0, page(&node, 2, all.clone(), false)).await.unwrap();
    let written = site.raw().await.below("/csid/v1/vol/").await;
    hold(&node, 0, page(&node, 2, all, true)).await.unwrap();
    assert_eq!(
        site.raw().await.below("/csid/v1/vol/").await,
        written,
        "the same again has changed something"
    );
    hold(&controller.node, 0, page(&controller.node, 2, vec![], true)).await.unwrap();
    resumed(&site, 2).await;
    for volume in ["data", "more", "unknown"] {
        let claim = row(&site, &format!("vol/default/{volume}/claim/n1/web")).await;
        assert!(claim.contains("\"adopted\":true") && claim.contains("\"taken\""), "{claim}");
        let at = row(&site, &format!("vol/default/{volume}/at/n1")).await;
        assert!(at.contains("/dev/y") && at.contains("\"present\""), "{at}");
    }
    controller.join_again(0).await;
    assert!(!controller.is_called(Duration::from_secs(3)).await, "the detach of the backup was made");
    // The volume without a registration keeps others out, and ends with its claim.
    let refused =
        site.operator(0, "all").change(register("unknown", "single-node-writer")).await.unwrap_err();
    assert!(!Refusal::of(&refused).message.is_empty());
    for (volume, claim) in [("data", "one"), ("more", "two")] {
        node.detached(0, volume, claim).await.unwrap();
        controller.unpublish().await;
        eventually("the claim has ended", async || claims(&site, volume).await.is_empty()).await;
    }
    // A node's word alone does not detach what nobody has registered.
    node.detached(0, "unknown", "three").await.unwrap();
    assert!(!controller.is_called(Duration::from_secs(3)).await, "a volume of another one was detached");
    let file = operator(&site, "all");
    let found: Value = serde_json::from_str(&csictl(&file, "server audit --json").await.out).unwrap();
    assert_eq!(found[0]["kind"], "detach-waits-for-operator", "{found}");
    let explained = csictl(&file, "--operator explain default unknown").await;
    assert!(explained.out.contains("release default unknown web --node n1 --force"), "{explained:?}");
    let by_force = ReleaseAsk { force: true, ..release_ask("unknown", "n1") };
    let mut client = site.operator(0, "all");
    let release = tokio::spawn(async move { client.release(by_force).await });
    controller.unpublish().await;
    release.await.unwrap().unwrap();
    eventually("nothing is left of it", async || row(&site, "vol/default/unknown/head").await.is_empty())
        .await;
    site.register("unknown", "single-node-writer").await;
}

/// Since the backup the plugin has refused the deletion, and a node has claimed the volume.
#[tokio::test]
async fn volume_that_a_node_holds_is_not_deleted() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let (node, session) = user(&site, "n1", 0).await;
    let creation = creating(&site, 0, "data");
    let call = controller.called().await;
    controller.end(&call, created("ext-data")).await;
    creation.await.unwrap().unwrap();
    let deletion = deleting(&site, 0, "data");
    assert!(is_delete(&controller.called().await));
    deletion.abort();
    drop(session);
    controller.leave().await;
    restored(&site, 0, 1).await.unwrap();
    assert!(registration(&site, "data").await.contains("\"deleting\""));
    controller.join_again(0).await;
    let (_, mut session) = welcome(&node, 0).await;
    session.report_name("id of n1").await;
    let of = HeldClaim { external_node_id: "id of n1".into(), ..held(&node, "data", "one") };
    hold(&node, 0, page(&node, 2, vec![of], true)).await.unwrap();
    assert!(registration(&site, "data").await.contains("\"registered\""));
    hold(&controller.node, 0, page(&controller.node, 2, vec![], true)).await.unwrap();
    resumed(&site, 2).await;
    controller.join_again(0).await;
    assert!(!controller.is_called(Duration::from_secs(3)).await, "a volume in use is deleted");
    assert_eq!(claims(&site, "data").await, ["n1/web"]);
}

/// The machine has a new node name. The plugin's name of it is still that of the earlier node.
#[tokio::test]
async fn accepted_name_of_another_node_counts() {
    for is_fenced in [false, true] {
        let site = Site::start(1).await;
        let controller = Controller::start(&site, "c1", 0).await;
        drop(user_named(&site, "n1", 0, "i-1").await);
        let machine = site.node("n2");
        restored(&site, 0, 1).await.unwrap();
        let (_, mut session) = welcome(&machine, 0).await;
        session.report_name("i-1").await;
        eventually("its name is refused", async || row(&site, "node/n2").await.contains("other-node-id"))
            .await;
        let of = HeldClaim { external_node_id: "i-1".into(), ..held(&machine, "data", "one") };
        let said = || page(&machine, 2, vec![of.clone()], true);
        assert_eq!(try_hold(&machine, 0, said()).await.unwrap().len(), 1, "no operator has accepted it");
        let file = operator(&site, "all");
        assert_eq!(csictl(&file, "node accept n2").await.code, Some(0));
        if is_fenced {
            // A server of an earlier version has written the acceptance.
            let accepted = row(&site, "node/n2").await;
            let of_before = accepted.replace(",\"accepted-ids\":{\"p\":\"i-1\"}", "");
            assert_ne!(accepted, of_before);
            site.raw().await.put("/csid/v1/node/n2", &of_before).await;
            assert_eq!(try_hold(&machine, 0, said()).await.unwrap().len(), 1, "the other node may be there");
            leave_out(&site, 0, "n1").await.unwrap();
        }
        hold(&machine, 0, said()).await.unwrap();
        assert_eq!(claims(&site, "data").await, ["n2/web"]);
        drop(controller);
    }
}

#[tokio::test]
async fn claim_of_a_volume_in_creation_is_refused() {
    let site = Site::start(1).await;
    let mut controller = Controller::start(&site, "c1", 0).await;
    let node = site.node("n1");
    drop(welcome(&node, 0).await);
    let creation = creating(&site, 0, "data");
    controller.called().await;
    creation.abort();
    restored(&site, 0, 1).await.unwrap();
    let _session = welcome(&node, 0).await;
    let refused = try_hold(&node, 0, page(&node, 2, vec![held(&node, "data", "one")], true)).await.unwrap();
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert!(refused[0].why.contains("default/data is being created in etcd"), "{refused:?}");
    assert_eq!(resume(&site).await.unwrap_err().kind, "Busy", "an operator has not looked at it");
}

/// Nobody can count the volumes of the node, so the same word again changes nothing.
#[tokio::test]
async fn claim_with_an_unreadable_count_is_refused() {
    let site = Site::start(1).await;
    site.register("data", "single-node-writer").await;
    let node = site.node("n1");
    drop(node.join(0).await);
    restored(&site, 0, 1).await.unwrap();
    site.raw().await.put("/csid/v1/used/n1/p", "no row").await;
    let _session = node.join(0).await;
    let said = page(&node, 2, vec![held(&node, "data", "one")], true);
    let refused = tokio::time::timeout(Duration::from_secs(20), try_hold(&node, 0, said)).await;
    let refused = refused.expect("the claim is never refused").unwrap();
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert!(refused[0].why.contains("in etcd is not csid's"), "{refused:?}");
    assert_eq!(phase(&site).await, is(2, "recovering", &[]), "the node is awaited for ever");
}
