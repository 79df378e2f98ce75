//! A plugin that attaches: the controller's calls around the node's.

use std::time::Duration;

use csid::store::registry::VolumeName;
use csid_client::{AccessMode, AttachOptions, CallOptions, CsidError, Kind};
use csid_tests::ask::*;
use csid_tests::script::{Act, Half, Rule};
use csid_tests::world::{World, eventually, refusal, world};
use csid_tests::{older, on_etcd};

use crate::*;

/// The volume's calls so far, by name.
fn rpcs(w: &mut World) -> Vec<String> {
    w.plugin("p").volume_calls().into_iter().map(|call| call.call.rpc).collect()
}

#[test]
fn co_rules_20_to_23_attach_is_first_detach_last() {
    world(async |w| {
        let client = attaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        let claimed = claim(&client, "v", "one").await.unwrap();
        assert_eq!(claimed.external_node_id, "node-1");
        assert!(!claimed.publish_context.is_empty(), "the plugin's context is in the answer");
        assert!(claimed.controller_required && claimed.schedulable);
        mount_registered(&client, "v", "one").await.unwrap();
        release(&client, "v", "one").await.unwrap();
        if clustered::is_used() {
            eventually("servers have it detached", async || {
                w.plugin("p").count("ControllerUnpublishVolume", "v") > 0
            })
            .await;
        }
        w.nothing_left(&client).await;
        let mut rpcs = rpcs(w);
        if clustered::is_used() {
            // Servers have the capabilities validated before the first attach. At the registration they know the node's controller, or not yet.
            let first = rpcs.iter().position(|rpc| rpc != "ValidateVolumeCapabilities").unwrap();
            assert!((1..=2).contains(&first), "{rpcs:?}");
            rpcs.drain(..first - 1);
        }
        assert_eq!(
            rpcs,
            [
                "ValidateVolumeCapabilities",
                "ControllerPublishVolume",
                "NodeStageVolume",
                "NodePublishVolume",
                "NodeUnpublishVolume",
                "NodeUnstageVolume",
                "ControllerUnpublishVolume",
            ]
        );
    });
}

#[test]
fn co_rule_23_other_claim_of_node_prevents_detach() {
    world(async |w| {
        let client = attaching(w).await;
        registered(&client, "v", &[AccessMode::MultiNodeMultiWriter]).await;
        mount_registered(&client, "v", "one").await.unwrap();
        mount_registered(&client, "v", "two").await.unwrap();
        unmount(&client, "v", "one").await.unwrap();
        let count = |w: &mut World, rpc: &str| w.plugin("p").count(rpc, "v");
        assert_eq!((count(w, "ControllerPublishVolume"), count(w, "ControllerUnpublishVolume")), (1, 0));
        unmount(&client, "v", "two").await.unwrap();
        if clustered::is_used() {
            eventually("servers have it detached", async || count(w, "ControllerUnpublishVolume") > 0).await;
        }
        w.nothing_left(&client).await;
        assert_eq!((count(w, "ControllerPublishVolume"), count(w, "ControllerUnpublishVolume")), (1, 1));
    });
}

#[test]
fn failing_detach_is_repeated_until_it_succeeds() {
    world(async |w| {
        let client = attaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        claim(&client, "v", "one").await.unwrap();
        let rule = Rule { times: 3, ..Rule::always("ControllerUnpublishVolume", Act::Fail(14)) };
        w.plugin("p").rules([rule]);
        release(&client, "v", "one").await.unwrap();
        let count = |w: &mut World| w.plugin("p").count("ControllerUnpublishVolume", "v");
        if clustered::is_used() {
            eventually("servers have it detached", async || count(w) >= 4).await;
        }
        assert!(count(w) >= 4);
        w.nothing_left(&client).await;
    });
}

#[test]
fn detach_that_fails_for_good_is_blocked_and_shown() {
    alone("a node lists what it has, and servers list what they detach", async |w| {
        let client = attaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        claim(&client, "v", "one").await.unwrap();
        w.plugin("p").rules([Rule::always("ControllerUnpublishVolume", Act::Fail(9))]);
        assert_eq!(refusal(release(&client, "v", "one").await).0, Kind::PluginError);
        let row = claims(&client).await.pop().expect("the claim");
        assert_eq!(row.state, "parked");
        assert!(row.error.contains("FAILED_PRECONDITION"), "{row:?}");
        assert_eq!(refusal(claim(&client, "v", "two").await).0, Kind::ClaimConflict);

        w.kill();
        let client = w.start().await;
        healthy(&client, "p").await;
        w.honest();
        // Who mounts meanwhile has a claim of its own, which the Unmount gives back.
        mount_registered(&client, "v", "one").await.unwrap();
        assert_eq!(claimed(&client).await, [pair("one", "taken")]);
        unmount(&client, "v", "one").await.unwrap();
        assert_eq!(claimed(&client).await, []);
        w.nothing_left(&client).await;
    });
}

#[test]
fn refused_attach_is_undone_and_its_claim_released() {
    world(async |w| {
        let client = attaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        w.plugin("p").rules([Rule::always("ControllerPublishVolume", Act::FailAfter(9))]);
        assert_eq!(refusal(claim(&client, "v", "one").await).0, Kind::PluginError);
        assert_eq!(claimed(&client).await, []);
        if clustered::is_used() {
            eventually("servers undo it", async || w.plugin("p").count("ControllerUnpublishVolume", "v") > 0)
                .await;
        }
        w.nothing_left(&client).await;
        assert_eq!(w.plugin("p").count("ControllerUnpublishVolume", "v"), 1, "it may have been done");

        // The refusal is the answer, also when the detach takes several tries.
        let busy = Rule { times: 2, ..Rule::always("ControllerUnpublishVolume", Act::Fail(10)) };
        w.plugin("p").rules([Rule::once("ControllerPublishVolume", Act::FailAfter(9)), busy]);
        let (kind, error) = refusal(claim(&client, "v", "one").await);
        assert_eq!((kind, error.details.grpc_code), (Kind::PluginError, Some(9)), "{error}");
        assert_eq!(error.details.rpc.as_deref(), Some("ControllerPublishVolume"), "{error}");
        assert_eq!(claimed(&client).await, []);
        w.nothing_left(&client).await;
    });
}

/// Another manager has the volume attached to this node with other arguments. The plugin says so by ALREADY_EXISTS.
#[test]
fn attach_refused_as_already_there_is_not_undone() {
    world(async |w| {
        let client = attaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        let undone = |w: &mut World, volume| w.plugin("p").count("ControllerUnpublishVolume", volume);
        w.plugin("p").rules([Rule::always("ControllerPublishVolume", Act::Fail(6))]);
        let (kind, error) = refusal(claim(&client, "v", "one").await);
        assert_eq!((kind, error.details.grpc_code), (Kind::PluginError, Some(6)), "{error}");
        assert_eq!(claimed(&client).await, []);
        assert_eq!(undone(w, "v"), 0, "csid did not attach it");

        // An earlier try without an answer may have attached it.
        let unanswered = Rule::once("ControllerPublishVolume", Act::FailAfter(13));
        w.plugin("p")
            .rules([unanswered, Rule { from: 2, ..Rule::always("ControllerPublishVolume", Act::Fail(6)) }]);
        w.plugin("p").provision("w");
        registered(&client, "w", &[AccessMode::SingleNodeWriter]).await;
        assert_eq!(refusal(claim(&client, "w", "one").await).0, Kind::PluginError);
        assert_eq!(claimed(&client).await, []);
        eventually("it is undone", async || undone(w, "w") == 1).await;
        w.nothing_left(&client).await;
    });
}

#[test]
fn co_rule_25_abandoned_claim_is_undone() {
    world(async |w| {
        let client = attaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        if clustered::is_used() {
            // The servers know the node's controller when they have attached by it.
            claim(&client, "v", "first").await.unwrap();
            release(&client, "v", "first").await.unwrap();
            w.nothing_left(&client).await;
        }
        let undone = |w: &mut World| w.plugin("p").count("ControllerUnpublishVolume", "v");
        let before = undone(w);
        w.plugin("p").rules([Rule::once("ControllerPublishVolume", Act::Stubborn(1500))]);
        let options = ClaimOptions { deadline_usec: Some(300_000), ..ClaimOptions::default() };
        assert_eq!(refusal(client.claim(NAMESPACE, "v", "one", options).await).0, Kind::TimedOut);
        eventually("the claim is gone", async || claims(&client).await.is_empty()).await;
        if clustered::is_used() {
            eventually("servers undo it", async || undone(w) > before).await;
        }
        assert!(undone(w) > before);
        w.nothing_left(&client).await;
    });
}

#[test]
fn reboot_attaches_again_before_staging() {
    world(async |w| {
        let client = attaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        mount_registered(&client, "v", "one").await.unwrap();
        w.reboot().await;
        w.another_boot_id();
        let client = w.start().await;
        settled(&client).await;
        eventually("it is mounted again", async || state(&client, "v", "one").await == "mounted").await;
        let all = rpcs(w);
        let of = |rpc: &str| all.iter().rposition(|call| call == rpc);
        assert!(of("ControllerPublishVolume") < of("NodeStageVolume"), "{all:?}");
        assert_eq!(all.iter().filter(|rpc| *rpc == "ControllerPublishVolume").count(), 2);
        unmount(&client, "v", "one").await.unwrap();
        assert_eq!(claimed(&client).await, []);
        w.nothing_left(&client).await;
    });
}

#[test]
fn plugin_without_attach_seen_late_is_not_asked() {
    for controller in [None, Some("CREATE_DELETE_VOLUME")] {
        world(async move |w| {
            let plugin = w.add_plugin_and("p", &[], "").await;
            plugin.set(|script| controller.iter().for_each(|can| script.control(&[*can])));
            plugin.kill();
            plugin.start().await;
            plugin.provision("v");
            let client = w.start().await;
            healthy(&client, "p").await;
            registered(&client, "v", &[AccessMode::SingleNodeMultiWriter]).await;
            mount_registered(&client, "v", "one").await.unwrap();

            w.plugin("p").kill();
            w.reboot().await;
            w.another_boot_id();
            let client = w.start().await;
            let soon = ClaimOptions { deadline_usec: Some(300_000), ..ClaimOptions::default() };
            let (kind, _) = refusal(client.claim(NAMESPACE, "v", "two", soon).await);
            assert!(matches!(kind, Kind::TimedOut | Kind::PluginUnavailable), "{kind:?}");
            eventually("it leaves no claim", async || claims(&client).await.len() == 1).await;
            let late = {
                let client = client.clone();
                tokio::spawn(async move { mount_registered(&client, "v", "three").await })
            };
            eventually("csid waits", async || {
                client.list_operations().await.unwrap().iter().any(|row| row.kind == "mount")
            })
            .await;
            w.plugin("p").start().await;
            late.await.unwrap().unwrap();
            eventually("it is mounted again", async || state(&client, "v", "one").await == "mounted").await;
            for consumer in ["one", "three"] {
                unmount(&client, "v", consumer).await.unwrap();
            }
            assert_eq!(claimed(&client).await, []);
            let reply = client.explain(NAMESPACE, "v", CallOptions::default()).await.unwrap();
            assert!(!reply.steps.iter().any(|step| step.contains("tached")), "{reply:?}");
            w.nothing_left(&client).await;
        });
    }
}

/// An attach may have been done, and its detach failed. The plugin says later that it does not attach.
#[test]
fn claim_outlives_a_lost_attach_capability() {
    alone("servers attach the volumes of a cluster", async |w| {
        let client = attaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        w.plugin("p").rules([
            Rule::once("ControllerPublishVolume", Act::FailAfter(9)),
            Rule::always("ControllerUnpublishVolume", Act::Fail(14)),
        ]);
        let soon = ClaimOptions { deadline_usec: Some(1_000_000), ..ClaimOptions::default() };
        client.claim(NAMESPACE, "v", "one", soon).await.expect_err("it is refused");
        w.kill();
        w.honest();
        w.plugin("p").set(|script| script.control(&["CREATE_DELETE_VOLUME"]));
        w.plugin("p").kill();
        w.plugin("p").start().await;
        let client = w.start().await;
        healthy(&client, "p").await;
        release(&client, "v", "one").await.expect_err("the plugin does not detach");
        assert_eq!(claimed(&client).await, [pair("one", "parked")]);
        w.plugin("p").set(|script| script.control(ATTACH));
        w.plugin("p").kill();
        eventually("it is missed", async || !client.plugin("p").await.unwrap().healthy).await;
        w.plugin("p").start().await;
        healthy(&client, "p").await;
        release(&client, "v", "one").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// A plugin attaches or not: csid knows that once it has seen each instance. The error names the instance that is missing.
#[test]
fn missing_instance_is_named_in_the_error() {
    alone("servers know a plugin of a node, and none of its instances", async |w| {
        w.add_plugin("p").await;
        let sockets = [w.plugin("p").witnessed_socket(), w.path("nobody.sock")];
        let client = w.start().await;
        for (instance, socket) in ["first", "second"].iter().zip(sockets) {
            let spec = csid_client::PluginSpec {
                supervision: Some(csid_client::Supervision::External),
                socket: Some(socket.to_str().unwrap().to_owned()),
                instance: Some((*instance).to_owned()),
                ..Default::default()
            };
            client.register_plugin("two", spec).await.unwrap();
            if *instance == "first" {
                healthy(&client, "two").await;
                let spec = RegisterVolume {
                    plugin: Some("two".to_owned()),
                    external_id: Some("v".to_owned()),
                    capabilities: Some(capabilities(&[AccessMode::SingleNodeWriter])),
                    ..RegisterVolume::default()
                };
                client.register_volume(NAMESPACE, "v", spec).await.unwrap();
            }
        }
        let call = {
            let client = client.clone();
            let soon = ClaimOptions { deadline_usec: Some(2_000_000), ..ClaimOptions::default() };
            tokio::spawn(async move { client.claim(NAMESPACE, "v", "one", soon).await })
        };
        eventually("it is explained", async || {
            let reply = client.explain(NAMESPACE, "v", CallOptions::default()).await.unwrap();
            reply.waiting_for.contains("plugin two, instance second (")
        })
        .await;
        let (kind, error) = refusal(call.await.unwrap());
        assert!([Kind::TimedOut, Kind::PluginUnavailable].contains(&kind), "{error}");
        eventually("it leaves no claim", async || claims(&client).await.is_empty()).await;
        let options =
            csid_client::UnregisterOptions { instance: Some("second".to_owned()), ..Default::default() };
        client.unregister_plugin("two", options).await.unwrap();
        claim(&client, "v", "one").await.expect("all are seen");
        release(&client, "v", "one").await.unwrap();
        w.nothing_left(&client).await;
    });
}

#[test]
fn node_renamed_by_a_boot_is_detached_by_its_old_id() {
    world(async |w| {
        let client = attaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        mount_registered(&client, "v", "one").await.unwrap();
        w.kill();
        w.plugin("p").set(|script| {
            script.node_id = "node-2".to_owned();
            script.others = vec!["node-1".to_owned()];
        });
        w.plugin("p").kill();
        w.plugin("p").start().await;
        w.reboot().await;
        w.another_boot_id();
        let client = w.start().await;
        let controller = |w: &mut World| {
            let calls = w.plugin("p").volume_calls().into_iter().map(|call| call.call);
            let calls = calls.filter(|call| call.rpc.starts_with("Controller"));
            Vec::from_iter(calls.map(|call| format!("{} {}", call.rpc, call.node)))
        };
        // Until somebody says that this is the node's name nothing is attached by it, and nothing detached for it.
        healthy(&client, "p").await;
        let names_both = |text: &str| text.contains("`node-2`") && text.contains("`node-1`");
        let is_said = |error: &CsidError| {
            names_both(&error.message) && error.details.obstacle.as_deref() == Some("node-id")
        };
        let (kind, error) = refusal(mount_registered(&client, "v", "one").await);
        assert!(kind == Kind::PluginUnavailable && is_said(&error), "{error}");
        if clustered::is_used() {
            // The servers keep the name that they know, until an operator accepts the other one.
            assert_eq!(w.plugin("p").count("NodeStageVolume", "v"), 1, "it was staged under another name");
            return;
        }
        w.plugin("p").provision("w");
        registered(&client, "w", &[AccessMode::SingleNodeWriter]).await;
        let (kind, error) = refusal(client.claim(NAMESPACE, "w", "two", ClaimOptions::default()).await);
        assert!(kind == Kind::PluginUnavailable && is_said(&error), "{error}");
        let inline_attach = || AttachOptions {
            plugin: Some("p".to_owned()),
            external_id: Some("x".to_owned()),
            capabilities: Some(capabilities(&[AccessMode::SingleNodeWriter])),
            ..AttachOptions::default()
        };
        for node in ["node-1", "node-2"] {
            let (kind, error) = refusal(client.attach_volume(NAMESPACE, "x", node, inline_attach()).await);
            assert!(kind == Kind::PluginUnavailable && is_said(&error), "{node}: {error}");
        }
        assert_eq!(controller(w), ["ControllerPublishVolume node-1"]);
        assert!(names_both(&client.plugin("p").await.unwrap().health_message));
        let reply = client.explain(NAMESPACE, "v", CallOptions::default()).await.unwrap();
        assert!(reply.steps.iter().any(|step| names_both(step)), "{reply:?}");
        let accept = |id| client.accept_node_id("p", id, CallOptions::default());
        assert_eq!(refusal(accept("node-1").await).0, Kind::InvalidArgument);
        accept("node-2").await.unwrap();
        mount_registered(&client, "v", "one").await.expect("it is mounted again");
        let moved = [
            "ControllerPublishVolume node-1",
            "ControllerUnpublishVolume node-1",
            "ControllerPublishVolume node-2",
        ];
        assert_eq!(controller(w), moved);
        unmount(&client, "v", "one").await.unwrap();
        assert_eq!(controller(w)[3..], ["ControllerUnpublishVolume node-2"]);
        assert_eq!(claimed(&client).await, []);
        w.nothing_left(&client).await;
    });
}

/// csid asked the controller for nothing, so it undoes nothing, and others get the volume.
#[test]
fn attach_never_sent_leaves_nothing() {
    alone("a claim that brings secrets is refused where the controller needs them", async |w| {
        let client = attaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        let typo = || Some("csid.default.typo".to_owned());
        let options = ClaimOptions { credential: typo(), ..ClaimOptions::default() };
        let (kind, error) = refusal(client.claim(NAMESPACE, "v", "one", options).await);
        assert_eq!(kind, Kind::SecretRequired, "{error}");
        assert_eq!(claimed(&client).await, []);
        let options = MountOptions { credential: typo(), ..MountOptions::default() };
        let (kind, error) = refusal(client.mount(NAMESPACE, "v", "one", options).await);
        assert_eq!(kind, Kind::SecretRequired, "{error}");
        assert_eq!(claimed(&client).await, []);
        claim(&client, "v", "two").await.expect("nobody has it");
        release(&client, "v", "two").await.unwrap();
        assert_eq!(rpcs(w).iter().filter(|rpc| *rpc == "ControllerUnpublishVolume").count(), 1);
        w.nothing_left(&client).await;
    });
}

/// The secrets of the last ControllerUnpublishVolume.
fn secrets_of_the_detach(w: &mut World) -> Vec<(String, String)> {
    let calls = w.plugin("p").volume_calls();
    let detach = calls.into_iter().rev().find(|call| call.call.rpc == "ControllerUnpublishVolume");
    detach.expect("a detach").call.secrets
}

/// The node's claims share an attachment, and with it its secrets, no matter which call brought them.
#[test]
fn co_rule_33_a_detach_has_the_secrets_of_its_attach() {
    alone("a claim that brings secrets is refused where the controller needs them", async |w| {
        let client = attaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeMultiWriter]).await;
        std::fs::write(w.path("credentials/csid.default.v"), r#"{"password":"x"}"#).unwrap();
        let credential = Some("csid.default.v".to_owned());
        let with_one = ClaimOptions { credential, ..ClaimOptions::default() };
        client.claim(NAMESPACE, "v", "one", with_one).await.unwrap();
        claim(&client, "v", "two").await.unwrap();
        release(&client, "v", "one").await.unwrap();
        w.kill();
        let client = w.start().await;
        healthy(&client, "p").await;
        release(&client, "v", "two").await.unwrap();
        assert_eq!(secrets_of_the_detach(w), [("password".to_owned(), "x".to_owned())]);

        let with_some =
            || ClaimOptions { secrets: Some(secrets(&[("password", "y")])), ..ClaimOptions::default() };
        client.claim(NAMESPACE, "v", "one", with_some()).await.unwrap();
        claim(&client, "v", "two").await.unwrap();
        release(&client, "v", "one").await.unwrap();
        assert_eq!(refusal(release(&client, "v", "two").await).0, Kind::SecretRequired);
        let again =
            ReleaseOptions { secrets: Some(secrets(&[("password", "y")])), ..ReleaseOptions::default() };
        client.release(NAMESPACE, "v", "two", again).await.unwrap();
        assert_eq!(secrets_of_the_detach(w), [("password".to_owned(), "y".to_owned())]);

        // Secrets that were never used have no owner.
        claim(&client, "v", "one").await.unwrap();
        client.claim(NAMESPACE, "v", "two", with_some()).await.unwrap();
        release(&client, "v", "one").await.unwrap();
        release(&client, "v", "two").await.unwrap();
        assert_eq!(secrets_of_the_detach(w), []);
        w.nothing_left(&client).await;
    });
}

/// csid waits for systemd to load a credential, and systemd may never answer. The wait ends with the call's deadline.
#[test]
fn credential_wait_ends_with_the_call() {
    world(async |w| {
        // A bus that takes every connection and says nothing.
        let path = w.path("silent-bus");
        let _silent = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let address = format!("unix:path={}", path.display());
        w.environment.insert("DBUS_SYSTEM_BUS_ADDRESS".to_owned(), address);
        let client = attaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        claim(&client, "v", "one").await.unwrap();
        let options = ReleaseOptions {
            credential: Some("csid.default.v".to_owned()),
            deadline_usec: Some(500_000),
            ..ReleaseOptions::default()
        };
        let release_in_time = client.release(NAMESPACE, "v", "one", options);
        let released = tokio::time::timeout(Duration::from_secs(5), release_in_time);
        assert_eq!(refusal(released.await.expect("in its time")).0, Kind::TimedOut);
        assert_eq!(claimed(&client).await, [pair("one", "taken")]);
        release(&client, "v", "one").await.unwrap();
        w.nothing_left(&client).await;
    });
}

/// To CSI no node id means every node.
#[test]
fn detach_without_a_node_id_names_this_node() {
    if clustered::is_skipped("the record of an older csid is in its journal") {
        return;
    }
    if on_etcd::is_skipped("the record of an older csid is in its journal") {
        return;
    }
    world(async |w| {
        let client = attaching(w).await;
        registered(&client, "v", &[AccessMode::SingleNodeWriter]).await;
        claim(&client, "v", "job").await.unwrap();
        let name = VolumeName { namespace: NAMESPACE.to_owned(), volume: "v".to_owned() };
        older::attached_without_node_id(w, name).await;
        // Without a node service the plugin does not name this node.
        w.plugin("p").set(|script| script.serves = vec![Half::Controller]);
        w.plugin("p").kill();
        w.plugin("p").start().await;
        let client = w.start().await;
        eventually("the plugin answers", async || {
            client.list_plugins().await.unwrap().iter().any(|plugin| plugin.state == "ready")
        })
        .await;
        let options = ReleaseOptions { deadline_usec: Some(1_000_000), ..ReleaseOptions::default() };
        refusal(client.release(NAMESPACE, "v", "job", options).await);
        eventually("the release names what is missing", async || {
            claims(&client).await.iter().any(|claim| claim.error.contains("has no node id"))
        })
        .await;
        assert_eq!(w.plugin("p").count("ControllerUnpublishVolume", ""), 0);
        w.plugin("p").set(|script| script.control(ATTACH));
        w.plugin("p").kill();
        w.plugin("p").start().await;
        eventually("the claim ends", async || claims(&client).await.is_empty()).await;
        let calls = w.plugin("p").calls();
        let nodes: Vec<_> = calls
            .iter()
            .filter(|call| call.call.rpc == "ControllerUnpublishVolume")
            .map(|call| call.call.node.as_str())
            .collect();
        assert_eq!(nodes, ["node-1"]);
    });
}
