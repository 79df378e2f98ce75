//! What a node of a cluster refuses, and what is refused to it.

use csid_client::{AccessMode, DeregisterOptions, Kind, RegisterVolume};
use csid_tests::ask::*;
use csid_tests::world::{eventually, refusal, world};

use crate::*;

#[test]
fn node_refuses_volumes_that_no_server_knows() {
    world(async |w| {
        let site = Site::start(1).await;
        let (client, node) = n1(w, &site).await;
        let (kind, error) = refusal(mount(&client, "web", inline("x")).await);
        assert_eq!((kind, error.message.contains("in a cluster")), (Kind::NotAuthorized, true));
        let (kind, _) = refusal(mount_registered(&client, "none", "web").await);
        assert_eq!(kind, Kind::NotFound);
        let (kind, _) = refusal(client.volume(NAMESPACE, "none").await);
        assert_eq!(kind, Kind::NotFound);
        w.nothing_left(&client).await;
        w.stop().await;
        w.configure(&format!("{}inline = true\n", of_node("n1", node.run())));
        let client = w.start().await;
        healthy(&client, "p").await;
        mount(&client, "web", inline("x")).await.expect("root's inline mount where csid.toml allows it");
        unmount(&client, "x", "web").await.unwrap();
    });
}

/// An inline mount takes no claim, so no server would attach the volume.
#[test]
fn inline_mount_of_a_servers_volume_is_refused() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let mut node = site.node("n1");
        w.add_plugin_and("p", &[], "").await;
        w.configure(&format!("{}inline = true\n", of_node("n1", node.run())));
        let client = w.start().await;
        healthy(&client, "p").await;
        joined(w).await;
        let (kind, error) = refusal(mount(&client, "web", inline("data")).await);
        assert_eq!(kind, Kind::AlreadyExists);
        assert!(error.message.contains("default/data is registered, so a call cannot"), "{}", error.message);
        // The same volume of the plugin under another name.
        let (kind, error) = refusal(mount(&client, "web", inline("ext-data")).await);
        assert_eq!(kind, Kind::AlreadyExists);
        assert!(error.message.contains("is registered as default/data"), "{}", error.message);
        assert_eq!(w.plugin("p").volume_calls().len(), 0, "the plugin was called");
        mount(&client, "web", inline("x")).await.expect("no server knows the volume");
        node.link.kill();
        cut_off(w).await;
        mount(&client, "web", inline("x")).await.expect("a mount that is there is answered");
        unmount(&client, "x", "web").await.unwrap();
        let (kind, _) = refusal(mount(&client, "web", inline("x")).await);
        assert_eq!(kind, Kind::Unavailable);
        w.nothing_left(&client).await;
    });
}

#[test]
fn host_with_another_nodes_key_does_not_join() {
    world(async |w| {
        let site = one_server(&["data"]).await;
        let link = site.node("n1");
        w.add_plugin_and("p", &[], "").await;
        w.configure(&of_node("n2", link.run()));
        let client = w.start().await;
        healthy(&client, "p").await;
        let due =
            "cluster prod: refused as another-name (the certificate is of node n1, and csid.toml says n2)";
        eventually("csid does not join", async || w.status().contains(due)).await;
        let (kind, _) = refusal(mount_registered(&client, "data", "web").await);
        assert_eq!(kind, Kind::Unavailable);
        assert!(claims_at_servers(&site, "data").await.is_empty());
        w.nothing_left(&client).await;
    });
}

#[test]
fn node_registers_only_with_a_grant() {
    world(async |w| {
        let site = Site::start(1).await;
        let (client, _link) = n1(w, &site).await;
        let spec = || RegisterVolume {
            plugin: Some("p".to_owned()),
            external_id: Some("data".to_owned()),
            capabilities: Some(capabilities(&[AccessMode::SingleNodeWriter])),
            ..RegisterVolume::default()
        };
        let (kind, error) = refusal(client.register_volume(NAMESPACE, "data", spec()).await);
        assert_eq!(kind, Kind::NotAuthorized, "{}", error.message);
        w.stop().await;
        let node = site.node("n-registers");
        w.configure(&of_node("n-registers", node.run()));
        let client = w.start().await;
        healthy(&client, "p").await;
        joined(w).await;
        let registered = client.register_volume(NAMESPACE, "data", spec()).await.unwrap();
        assert_eq!((registered.plugin.as_str(), registered.external_id.as_str()), ("p", "data"));
        assert_eq!(client.volume(NAMESPACE, "data").await.unwrap().external_id, "data");
        mount_registered(&client, "data", "web").await.unwrap();
        let deregister = async |options| client.deregister_volume(NAMESPACE, "data", options).await;
        let (kind, error) = refusal(deregister(DeregisterOptions::default()).await);
        assert_eq!(kind, Kind::Busy, "{}", error.message);
        let by_force = DeregisterOptions { force: Some(true), ..DeregisterOptions::default() };
        assert_eq!(refusal(deregister(by_force).await).0, Kind::NotSupported);
        unmount(&client, "data", "web").await.unwrap();
        // The servers may learn of the claim's end a moment later.
        eventually("the host deregisters the volume", async || {
            deregister(DeregisterOptions::default()).await.is_ok()
        })
        .await;
        assert_eq!(refusal(mount_registered(&client, "data", "web").await).0, Kind::NotFound);
        deregister(DeregisterOptions::default()).await.expect("what is not there is deregistered");
        w.nothing_left(&client).await;
    });
}

#[test]
fn host_with_volumes_of_its_own_does_not_join() {
    world(async |w| {
        let site = Site::start(1).await;
        w.add_plugin_and("p", &[], "").await;
        w.configure("node = \"n1\"\n");
        let client = w.start().await;
        healthy(&client, "p").await;
        registered(&client, "own", &[AccessMode::SingleNodeWriter]).await;
        mount_registered(&client, "own", "web").await.unwrap();
        w.stop().await;
        let node = site.node("n1");
        w.configure(&of_node("n1", node.run()));
        let client = w.start().await;
        eventually("csid says why it does not join", async || {
            w.status().contains("refused as own-volumes (this host has 1 volumes of its own: default/own)")
        })
        .await;
        assert_eq!(
            row(&client, "own", "web").await.unwrap().state,
            "mounted",
            "a mount that was there is kept"
        );
        unmount(&client, "own", "web").await.expect("a mount of that time ends");
        assert_eq!(
            client.volume(NAMESPACE, "own").await.unwrap().external_id,
            "own",
            "its registration is gone"
        );
        w.nothing_left(&client).await;
    });
}

#[test]
fn certificate_of_another_node_does_not_join() {
    world(async |w| {
        let site = Site::start(1).await;
        let node = site.node("stranger");
        w.add_plugin_and("p", &[], "").await;
        w.configure(&of_node("stranger", node.run()));
        w.start().await;
        eventually("csid says why it has not joined", async || w.status().contains("no grant for join"))
            .await;
    });
}
