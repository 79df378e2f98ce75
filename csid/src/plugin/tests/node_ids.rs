//! What a plugin calls this node, and what happens when it calls it otherwise.

use super::*;
use crate::Kind;
use crate::error::Obstacle;
use crate::store::tests::opened;

/// csid starts again over the same journal.
async fn again(host: Host) -> Host {
    host.plugins.shutdown().await;
    host.store.close().await.unwrap();
    let Host { directory, .. } = host;
    let (store, loaded) = opened(&directory.path().join("journal")).unwrap();
    let known = (loaded.plugins, loaded.node_ids);
    let plugins =
        Plugins::start_at(PACE, &directories(directory.path()), RPC, store.clone(), Vec::new(), known);
    Host { directory, store, plugins }
}

#[tokio::test]
async fn changed_node_id_is_refused_until_accepted() {
    let host = Host::new();
    let mut fake = host.fake();
    fake.start();
    host.register(&fake).await;
    host.ready().await;
    assert_eq!(host.plugins.node_id("p"), "node-1", "the first one is agreed to");
    host.plugins.refuse_other_node_id("p").unwrap();
    host.plugins.accept_node_id("p", "node-1", 0).await.expect("again");

    // Also when csid was away as it changed, as at a boot.
    fake.kill();
    fake.script().node_id = "node-2".into();
    let host = again(host).await;
    let none = host.plugins.accept_node_id("p", "node-2", 0).await.unwrap_err();
    assert_eq!(none.kind, Kind::PluginUnavailable, "it is not known yet");
    fake.start();
    host.ready().await;
    let refused = host.plugins.refuse_other_node_id("p").unwrap_err();
    assert_eq!(refused.kind, Kind::PluginUnavailable);
    assert_eq!(refused.details.obstacle, Some(Obstacle::NodeId));
    for words in ["`node-2`", "`node-1`"] {
        assert!(refused.message.contains(words), "{words}: {refused}");
    }
    assert_eq!(host.plugins.node_id("p"), "", "nothing is attached under it");
    let view = host.plugins.view("p").unwrap();
    assert_eq!((view.healthy, view.node_id.as_str()), (true, "node-2"), "mounts go on");
    assert_eq!(view.health_message, refused.message);
    for (node, refused) in [("node-1", true), ("node-2", true), ("node-3", false)] {
        assert_eq!(host.plugins.refuse_other_node_id_as("p", node).is_err(), refused, "{node}");
    }
    let changed = host.events("plugin-node-id").await;
    let of = |details: &BTreeMap<String, String>| (details["from"].clone(), details["to"].clone());
    assert_eq!(
        changed.iter().map(|(_, details)| of(details)).collect::<Vec<_>>(),
        [("node-1".to_owned(), "node-2".to_owned())]
    );

    // What is accepted is what the plugin says.
    for wrong in ["node-1", "", "node-3"] {
        let error = host.plugins.accept_node_id("p", wrong, 0).await.unwrap_err();
        assert_eq!(error.kind, Kind::InvalidArgument);
        assert!(error.message.contains("`node-2`"), "{error}");
    }
    assert_eq!(host.plugins.accept_node_id("none", "node-2", 0).await.unwrap_err().kind, Kind::NotFound);
    host.plugins.accept_node_id("p", "node-2", 7).await.unwrap();
    host.plugins.refuse_other_node_id("p").unwrap();
    assert_eq!(host.plugins.node_id("p"), "node-2");
    until(|| host.plugins.view("p").unwrap().health_message.is_empty()).await;
    let accepted = host.events("plugin-node-id").await.pop().unwrap().1;
    assert_eq!((accepted["accepted"].as_str(), accepted["uid"].as_str()), ("true", "7"));

    // It is remembered, and forgotten with the plugin: another driver may have the id next.
    let host = again(host).await;
    host.ready().await;
    assert_eq!(host.plugins.node_id("p"), "node-2");
    host.plugins.unregister("p", None, 0).await.unwrap();
    fake.script().node_id = "node-3".into();
    host.register(&fake).await;
    host.ready().await;
    assert_eq!(host.plugins.node_id("p"), "node-3");
    let host = again(host).await;
    host.ready().await;
    assert_eq!(host.plugins.node_id("p"), "node-3");
    assert_eq!(host.events("plugin-node-id").await.len(), 2, "no news");
}
