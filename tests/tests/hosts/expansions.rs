//! Volumes that are expanded while this host has claimed them. The controller runs on another node, and is the test.

use std::time::Duration;

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::controller_call::Method;
use csi_proto::cluster::v1::{
    Answer, Attaches, CallEnded, ChangeAsk, ExpandAsk, ExpandedVolume, FromNode, PluginReport, change_ask,
    from_node, to_node,
};
use csid_tests::fault::Fault;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{count, world};

use crate::kills::again;
use crate::site::Session;
use crate::*;

/// Starts this world's csid as `n1`, whose plugin expands volumes on the node.
async fn expands(w: &mut World, site: &Site) -> (Client, Node) {
    let node = site.node("n1");
    let plugin = w.add_plugin_and("p", &[], "").await;
    plugin.set(|script| script.capabilities.push("EXPAND_VOLUME".to_owned()));
    plugin.kill();
    plugin.start().await;
    w.configure(&of_node("n1", node.run()));
    let client = w.start().await;
    healthy(&client, "p").await;
    joined(w).await;
    (client, node)
}

/// Has the controller of another node expand `data`, and leaves the nodes' parts.
async fn expand(site: &Site, controller: &mut Session, required: u64) {
    let expand = ExpandAsk { namespace: String::new(), volume: "data".into(), required, limit: 0 };
    let ask = ChangeAsk { what: Some(change_ask::What::Expand(expand)) };
    let mut operator = site.operator(0, "all");
    let expansion = tokio::spawn(async move { operator.change(ask).await });
    let Some(to_node::Is::Call(call)) = controller.next().await.unwrap() else { panic!("no call") };
    assert!(matches!(call.method, Some(Method::Expand(_))), "{call:?}");
    let expanded = Some(ExpandedVolume { capacity: required, node_expansion_required: true });
    let how = Some(How::Answer(Answer { expanded, ..Answer::default() }));
    let ended = CallEnded { call: call.call, epoch: call.epoch, how };
    controller.to_server.send(FromNode { is: Some(from_node::Is::Ended(ended)) }).await.unwrap();
    expansion.await.unwrap().unwrap();
}

/// Joins as `c1`, which has the controller.
async fn c1(site: &Site) -> (Session, Node) {
    let node = site.node("c1");
    let mut session = node.join(0).await;
    session
        .report_as(PluginReport {
            plugin: "p".into(),
            attaches: Attaches::No.into(),
            node_id: "node c1".into(),
            controller: true,
            calls: 0,
            max_volumes: None,
        })
        .await;
    (session, node)
}

/// Returns whether a node owes an expansion of `data`, by its record in etcd.
async fn is_owed(site: &Site) -> bool {
    let found = site.raw().await.below("/csid/v1/vol/default/data/reg").await;
    String::from_utf8(found[0].value.clone()).unwrap().contains("owed-expansion")
}

async fn nothing_owed(site: &Site) {
    eventually("no node owes an expansion", async || !is_owed(site).await).await;
}

#[test]
fn mounted_volume_is_expanded_by_its_host() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let (client, _link) = expands(w, &site).await;
        let (mut controller, _c1) = c1(&site).await;
        mount_registered(&client, "data", "web").await.unwrap();
        expand(&site, &mut controller, 1 << 20).await;
        nothing_owed(&site).await;
        assert_eq!(w.plugin("p").count("NodeExpandVolume", ""), 1);
        unmount(&client, "data", "web").await.unwrap();
        // A host that has claimed the volume alone does its part after the mount.
        claim(&client, "data", "web").await.unwrap();
        expand(&site, &mut controller, 2 << 20).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(is_owed(&site).await && w.plugin("p").count("NodeExpandVolume", "") == 1);
        mount_registered(&client, "data", "web").await.unwrap();
        nothing_owed(&site).await;
        assert_eq!(w.plugin("p").count("NodeExpandVolume", ""), 2);
        unmount(&client, "data", "web").await.unwrap();
        release(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &[]).await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn refused_expansion_waits_for_another_mount() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let (client, _link) = expands(w, &site).await;
        let (mut controller, _c1) = c1(&site).await;
        mount_registered(&client, "data", "web").await.unwrap();
        w.plugin("p").rules([Rule::always("NodeExpandVolume", Act::Fail(9))]);
        expand(&site, &mut controller, 1 << 20).await;
        let expansions = |w: &mut World| w.plugin("p").count("NodeExpandVolume", "");
        eventually("the plugin has refused", async || expansions(w) == 1).await;
        // The first pauses are shorter.
        tokio::time::sleep(Duration::from_secs(8)).await;
        assert!(is_owed(&site).await && expansions(w) == 1, "{} calls", expansions(w));
        // Other bounds are another call.
        expand(&site, &mut controller, 2 << 20).await;
        eventually("the plugin has refused that, too", async || expansions(w) == 2).await;
        w.plugin("p").honest();
        unmount(&client, "data", "web").await.unwrap();
        mount_registered(&client, "data", "web").await.unwrap();
        nothing_owed(&site).await;
        assert_eq!(expansions(w), 3);
        unmount(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &[]).await;
        w.nothing_left(&client).await;
    });
}

/// The edges are those of the RPC, of the note that it is due, and of the note that it is done. The report comes after the last one.
#[test]
fn killed_host_does_its_part_of_an_expansion() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let fault = Fault::of(w);
        let (client, _link) = expands(w, &site).await;
        let (mut controller, _c1) = c1(&site).await;
        mount_registered(&client, "data", "web").await.unwrap();
        let mut client = client;
        let (mut kills, mut size) = (0, 1_u64 << 20);
        for edge in [
            "registration.before:1",
            "registration.after:1",
            "NodeExpandVolume.before:1",
            "NodeExpandVolume.after:1",
            "registration.before:2",
            "registration.after:2",
        ] {
            fault.arm(edge);
            expand(&site, &mut controller, size).await;
            client = again(w, &fault).await;
            nothing_owed(&site).await;
            kills += 1;
            size += 1 << 20;
        }
        count("kills", kills);
        let calls = w.plugin("p").count("NodeExpandVolume", "");
        assert!((6..=12).contains(&calls), "{calls} calls");
        unmount(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &[]).await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn cut_off_host_expands_when_it_has_joined() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let (client, link) = expands(w, &site).await;
        let (mut controller, _c1) = c1(&site).await;
        mount_registered(&client, "data", "web").await.unwrap();
        drop(link);
        cut_off(w).await;
        expand(&site, &mut controller, 1 << 20).await;
        assert!(is_owed(&site).await);
        let _link = site.node("n1");
        joined(w).await;
        nothing_owed(&site).await;
        assert_eq!(w.plugin("p").count("NodeExpandVolume", ""), 1);
        unmount(&client, "data", "web").await.unwrap();
        servers_have(&site, "data", &[]).await;
        w.nothing_left(&client).await;
    });
}
