//! A plugin on several hosts, whose logs are judged together: rules that relate what is done on one host with what is done on another.

use serde_json::{Value, json};

use crate::Case;
use crate::history::{
    History, attach, capability, ctx, detach, publish, stage, staging, unpublish, unstage, with,
};

/// Hosts of controllers.
const CONTROLLER: usize = 0;
const SECOND: usize = 3;
/// The hosts of the nodes n1 and n2.
const N1: usize = 1;
const N2: usize = 2;

/// A CO on two hosts with controllers, and on two with the node half.
fn hosts(co: &mut History) {
    hosts_whose_plugin_can(
        co,
        &["PUBLISH_UNPUBLISH_VOLUME", "CREATE_DELETE_VOLUME"],
        &["STAGE_UNSTAGE_VOLUME"],
    );
}

fn hosts_whose_plugin_can(co: &mut History, controller: &[&str], node: &[&str]) {
    *co = History::unacquainted();
    for host in [CONTROLLER, SECOND, N1, N2] {
        co.on(host);
        co.ok("Probe", json!({}));
        match host {
            CONTROLLER | SECOND => co.controller_can(controller),
            _ => {
                co.fails("ControllerGetCapabilities", json!({}), "UNIMPLEMENTED");
                co.node_can(node);
                co.answered("NodeGetInfo", json!({}), json!({"node_id": format!("n{host}")}));
            }
        }
    }
}

/// A request in a mode of one node.
fn single(request: Value) -> Value {
    with(request, json!({"volume_capability": capability("SINGLE_NODE_WRITER")}))
}

fn to(node: usize, request: Value) -> Value {
    with(request, json!({"node_id": format!("n{node}")}))
}

/// Attaches `v` to a node.
fn attached(co: &mut History, node: usize) {
    co.on(CONTROLLER);
    co.answered("ControllerPublishVolume", to(node, attach("v")), json!({"publish_context": ctx()}));
}

/// Attached to a node, and staged there. The digests of a context differ in another log.
fn up(co: &mut History, node: usize) {
    attached(co, node);
    co.on(node);
    co.ok("NodeStageVolume", with(stage("v"), json!({"publish_context": {"values": {"device": node}}})));
}

pub fn cases() -> Vec<Case> {
    vec![
        // Two controllers. Nodes have a volume of several nodes at the same time.
        Case {
            rule: 18,
            bad: |co| {
                hosts(co);
                co.on(CONTROLLER);
                co.begins("ControllerPublishVolume", attach("v"));
                co.on(SECOND);
                co.ok("ControllerUnpublishVolume", to(N2, detach("v")));
            },
            good: |co| {
                hosts(co);
                attached(co, N1);
                attached(co, N2);
                for node in [N1, N2] {
                    co.on(node);
                    co.begins("NodeStageVolume", stage("v"));
                }
                co.on(SECOND);
                co.ok("ControllerUnpublishVolume", to(4, detach("v")));
            },
        },
        Case {
            rule: 20,
            bad: |co| {
                hosts(co);
                attached(co, N1);
                co.on(N2);
                co.stage("v");
            },
            good: |co| {
                hosts(co);
                up(co, N1);
                up(co, N2);
            },
        },
        Case {
            rule: 20,
            bad: |co| {
                hosts(co);
                up(co, N2);
                attached(co, N1);
                co.on(SECOND);
                co.lost("ControllerUnpublishVolume", detach("v"));
                co.on(N1);
                co.stage("v");
            },
            good: |co| {
                hosts(co);
                up(co, N2);
                attached(co, N1);
                co.on(SECOND);
                co.ok("ControllerUnpublishVolume", detach("v"));
                up(co, N1);
            },
        },
        Case {
            rule: 21,
            bad: |co| {
                hosts(co);
                up(co, N1);
                attached(co, N2);
                co.on(N2);
                co.publish("v", "/t");
            },
            good: |co| {
                hosts(co);
                up(co, N1);
                up(co, N2);
                co.ok("NodePublishVolume", with(publish("v", "/t"), json!({"publish_context": null})));
            },
        },
        // A target of the same path on another host is another target.
        Case {
            rule: 22,
            bad: |co| {
                hosts(co);
                up(co, N1);
                co.publish("v", "/t");
                co.on(N2);
                co.unpublish("v", "/t");
                co.on(N1);
                co.unstage("v");
            },
            good: |co| {
                hosts(co);
                up(co, N1);
                co.publish("v", "/t");
                up(co, N2);
                co.unstage("v");
            },
        },
        Case {
            rule: 23,
            bad: |co| {
                hosts(co);
                up(co, N1);
                co.on(CONTROLLER);
                co.detach("v");
            },
            good: |co| {
                hosts(co);
                up(co, N1);
                up(co, N2);
                co.on(N1);
                co.unstage("v");
                co.on(SECOND);
                co.detach("v");
            },
        },
        Case {
            rule: 23,
            bad: |co| {
                hosts(co);
                up(co, N1);
                co.lost("NodeUnstageVolume", unstage("v"));
                co.on(CONTROLLER);
                co.detach("v");
            },
            good: |co| {
                hosts(co);
                up(co, N1);
                co.lost("NodeUnstageVolume", unstage("v"));
                co.unstage("v");
                co.on(CONTROLLER);
                co.detach("v");
            },
        },
        // A reboot is of one host.
        Case {
            rule: 23,
            bad: |co| {
                hosts(co);
                up(co, N1);
                up(co, N2);
                co.on(N1);
                co.reboot();
                co.on(CONTROLLER);
                co.ok("ControllerUnpublishVolume", to(N2, detach("v")));
            },
            good: |co| {
                hosts(co);
                up(co, N1);
                up(co, N2);
                co.on(N1);
                co.reboot();
                co.on(CONTROLLER);
                co.detach("v");
            },
        },
        Case {
            rule: 24,
            bad: |co| {
                hosts_whose_plugin_can(co, &["CREATE_DELETE_VOLUME"], &["STAGE_UNSTAGE_VOLUME"]);
                co.on(N1);
                co.ok("NodeStageVolume", with(stage("v"), json!({"publish_context": null})));
                co.on(CONTROLLER);
                co.ok("DeleteVolume", json!({"volume_id": "v"}));
            },
            good: |co| {
                hosts(co);
                up(co, N1);
                co.unstage("v");
                co.on(SECOND);
                co.detach("v");
                co.on(CONTROLLER);
                co.ok("DeleteVolume", json!({"volume_id": "v"}));
            },
        },
        // One host is at rest, and not the other. Whose node it is attached to is said by a controller.
        Case {
            rule: 24,
            bad: |co| {
                hosts(co);
                up(co, N1);
                attached(co, N2);
                co.on(N2);
                co.rest();
            },
            good: |co| {
                hosts(co);
                up(co, N1);
                for host in [N2, CONTROLLER] {
                    co.on(host);
                    co.rest();
                }
            },
        },
        Case {
            rule: 25,
            bad: |co| {
                hosts(co);
                attached(co, N1);
                co.on(N1);
                co.lost("NodeStageVolume", stage("v"));
                co.on(CONTROLLER);
                co.detach("v");
            },
            good: |co| {
                hosts(co);
                attached(co, N1);
                co.on(N1);
                co.lost("NodeStageVolume", stage("v"));
                co.unstage("v");
                co.on(CONTROLLER);
                co.detach("v");
            },
        },
        Case {
            rule: 25,
            bad: |co| {
                hosts(co);
                co.on(CONTROLLER);
                co.lost("ControllerPublishVolume", single(attach("v")));
                co.on(SECOND);
                co.ok("ControllerPublishVolume", single(to(N2, attach("v"))));
            },
            good: |co| {
                hosts(co);
                co.on(CONTROLLER);
                co.lost("ControllerPublishVolume", single(attach("v")));
                co.on(SECOND);
                co.detach("v");
                co.ok("ControllerPublishVolume", single(to(N2, attach("v"))));
            },
        },
        // No node has this name.
        Case {
            rule: 27,
            bad: |co| {
                hosts(co);
                attached(co, 4);
                co.on(N1);
                co.stage("v");
            },
            good: |co| {
                hosts(co);
                attached(co, 4);
                up(co, N1);
            },
        },
        Case {
            rule: 34,
            bad: |co| {
                hosts(co);
                co.on(CONTROLLER);
                co.ok("ControllerPublishVolume", single(attach("v")));
                co.ok("ControllerPublishVolume", single(to(N2, attach("v"))));
            },
            good: |co| {
                hosts(co);
                co.on(CONTROLLER);
                co.ok("ControllerPublishVolume", single(attach("v")));
                co.fails("ControllerPublishVolume", single(to(N2, attach("v"))), "FAILED_PRECONDITION");
                co.forgets("v", "n1");
                co.ok("ControllerPublishVolume", single(to(N2, attach("v"))));
            },
        },
        Case {
            rule: 34,
            bad: |co| {
                hosts_whose_plugin_can(co, &[], &["STAGE_UNSTAGE_VOLUME"]);
                let request = single(with(stage("v"), json!({"publish_context": null})));
                co.on(N1);
                co.ok("NodeStageVolume", request.clone());
                co.fails("NodeUnstageVolume", unstage("v"), "INTERNAL");
                co.on(N2);
                co.ok("NodeStageVolume", request);
            },
            good: |co| {
                hosts_whose_plugin_can(co, &[], &["STAGE_UNSTAGE_VOLUME"]);
                let request = single(with(stage("v"), json!({"publish_context": null})));
                co.on(N1);
                co.ok("NodeStageVolume", request.clone());
                co.unstage("v");
                co.on(N2);
                co.ok("NodeStageVolume", request);
            },
        },
        // The plugin does not stage.
        Case {
            rule: 34,
            bad: |co| {
                hosts_whose_plugin_can(co, &[], &[]);
                let request = with(publish("v", "/t"), json!({"publish_context": null}));
                co.on(N1);
                co.ok("NodePublishVolume", request.clone());
                co.on(N2);
                co.ok("NodePublishVolume", single(request));
            },
            good: |co| {
                hosts_whose_plugin_can(co, &[], &[]);
                let request = with(publish("v", "/t"), json!({"publish_context": null}));
                co.on(N1);
                co.ok("NodePublishVolume", request.clone());
                co.fails("NodeUnpublishVolume", unpublish("v", "/t"), "NOT_FOUND");
                co.on(N2);
                co.ok("NodePublishVolume", single(request));
            },
        },
        // A path is of one host.
        Case {
            rule: 28,
            bad: |co| {
                hosts(co);
                up(co, N1);
                co.ok("NodeUnstageVolume", with(unstage("v"), json!({"staging_target_path": staging("w")})));
            },
            good: |co| {
                hosts(co);
                up(co, N1);
                attached(co, N2);
                co.on(N2);
                co.ok("NodeStageVolume", with(stage("v"), json!({"staging_target_path": staging("w")})));
            },
        },
    ]
}
