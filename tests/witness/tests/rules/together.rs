//! Rules on what calls are to each other: 18, 20 to 25, 27 to 29, 31, 33 to 36.

use serde_json::json;

use crate::Case;
use crate::history::{
    attach, capability, create, ctx, detach, publish, stage, staging, unpublish, unstage, with,
};

pub fn cases() -> Vec<Case> {
    let mut cases = order();
    cases.extend(unknown());
    cases.extend(arguments());
    cases.extend(answers());
    cases
}

fn order() -> Vec<Case> {
    vec![
        Case {
            rule: 18,
            bad: |co| {
                co.up("v");
                co.begins("NodePublishVolume", publish("v", "/t"));
                co.ok("NodeGetVolumeStats", json!({"volume_id": "v", "staging_target_path": staging("v")}));
            },
            // Another volume, a call that was given up, a call that died with its CO.
            good: |co| {
                co.up("v");
                co.up("w");
                let first = co.begins("NodePublishVolume", publish("v", "/t"));
                co.publish("w", "/u");
                co.ok("Probe", json!({}));
                co.ends(first, None, json!(null));
                let second = co.begins("NodePublishVolume", publish("v", "/t"));
                co.crash();
                let third = co.begins("NodePublishVolume", publish("v", "/t"));
                co.ends(second, None, json!(null));
                co.ends(third, Some("OK"), json!(null));
            },
        },
        Case {
            rule: 18,
            bad: |co| {
                co.begins("CreateVolume", create("n"));
                co.begins("CreateVolume", create("n"));
            },
            good: |co| {
                co.begins("CreateVolume", create("n"));
                co.begins("CreateVolume", create("m"));
                co.reboot();
                co.begins("CreateVolume", create("n"));
            },
        },
        Case {
            rule: 20,
            bad: |co| co.stage("v"),
            // It survives a reboot.
            good: |co| {
                co.up("v");
                co.reboot();
                co.stage("v");
            },
        },
        Case {
            rule: 20,
            bad: |co| {
                co.fails("ControllerPublishVolume", attach("v"), "RESOURCE_EXHAUSTED");
                co.stage("v");
            },
            good: |co| {
                co.fails("ControllerPublishVolume", attach("v"), "RESOURCE_EXHAUSTED");
                co.up("v");
            },
        },
        Case {
            rule: 20,
            bad: |co| {
                co.attach("v");
                co.lost("ControllerUnpublishVolume", detach("v"));
                co.stage("v");
            },
            good: |co| {
                co.attach("v");
                co.fails("ControllerUnpublishVolume", detach("v"), "FAILED_PRECONDITION");
                co.stage("v");
            },
        },
        // No stage: publish is what needs the attachment. Nobody knows whether a plugin attaches whose controller was
        // not asked here.
        Case {
            rule: 20,
            bad: |co| {
                co.node_can(&[]);
                co.publish("v", "/t");
            },
            good: |co| {
                co.node_can(&[]);
                co.attach("v");
                co.publish("v", "/t");
            },
        },
        Case {
            rule: 21,
            bad: |co| {
                co.attach("v");
                co.publish("v", "/t");
            },
            good: |co| {
                co.up("v");
                co.stage("v");
                co.crash();
                co.stage("v");
                co.publish("v", "/t");
                co.publish("v", "/t");
            },
        },
        Case {
            rule: 21,
            bad: |co| {
                co.attach("v");
                co.fails("NodeStageVolume", stage("v"), "NOT_FOUND");
                co.publish("v", "/t");
            },
            good: |co| {
                co.up("v");
                co.fails("NodeUnstageVolume", unstage("v"), "FAILED_PRECONDITION");
                co.publish("v", "/t");
            },
        },
        Case {
            rule: 21,
            bad: |co| {
                co.up("v");
                co.reboot();
                co.publish("v", "/t");
            },
            good: |co| {
                co.up("v");
                co.reboot();
                co.stage("v");
                co.publish("v", "/t");
            },
        },
        Case {
            rule: 21,
            bad: |co| {
                co.up("v");
                co.lost("NodeUnstageVolume", unstage("v"));
                co.publish("v", "/t");
            },
            good: |co| {
                co.up("v");
                co.lost("NodeUnstageVolume", unstage("v"));
                co.stage("v");
                co.publish("v", "/t");
            },
        },
        Case {
            rule: 22,
            bad: |co| {
                co.up("v");
                co.publish("v", "/t");
                co.publish("v", "/u");
                co.unpublish("v", "/t");
                co.unstage("v");
            },
            good: |co| {
                co.up("v");
                co.publish("v", "/t");
                co.publish("v", "/u");
                co.unpublish("v", "/t");
                co.fails("NodeUnpublishVolume", unpublish("v", "/u"), "NOT_FOUND");
                co.unstage("v");
            },
        },
        Case {
            rule: 22,
            bad: |co| {
                co.up("v");
                co.publish("v", "/t");
                co.fails("NodeUnpublishVolume", unpublish("v", "/t"), "INTERNAL");
                co.unstage("v");
            },
            // A publish that was refused need not be taken back, but may.
            good: |co| {
                co.up("v");
                co.fails("NodePublishVolume", publish("v", "/t"), "FAILED_PRECONDITION");
                co.unstage("v");
                co.unpublish("v", "/t");
                co.unstage("v");
            },
        },
        Case {
            rule: 22,
            bad: |co| {
                co.up("v");
                co.publish("v", "/t");
                co.crash();
                co.unstage("v");
            },
            good: |co| {
                co.up("v");
                co.publish("v", "/t");
                co.reboot();
                co.unstage("v");
            },
        },
        Case {
            rule: 23,
            bad: |co| {
                co.up("v");
                co.detach("v");
            },
            // Another node may let go meanwhile.
            good: |co| {
                co.up("v");
                co.ok("ControllerPublishVolume", with(attach("v"), json!({"node_id": "n2"})));
                co.ok("ControllerUnpublishVolume", json!({"volume_id": "v", "node_id": "n2"}));
                co.unstage("v");
                co.detach("v");
            },
        },
        Case {
            rule: 23,
            bad: |co| {
                co.up("v");
                co.fails("NodeUnstageVolume", unstage("v"), "UNAVAILABLE");
                co.ok("ControllerUnpublishVolume", json!({"volume_id": "v"}));
            },
            good: |co| {
                co.up("v");
                co.fails("NodeUnstageVolume", unstage("v"), "UNAVAILABLE");
                co.unstage("v");
                co.ok("ControllerUnpublishVolume", json!({"volume_id": "v"}));
                co.ok("ControllerUnpublishVolume", json!({"volume_id": "v"}));
            },
        },
        Case {
            rule: 24,
            bad: |co| {
                co.attach("v");
                co.ok("DeleteVolume", json!({"volume_id": "v"}));
            },
            good: |co| {
                co.up("v");
                co.unstage("v");
                co.detach("v");
                co.ok("DeleteVolume", json!({"volume_id": "v"}));
            },
        },
        Case {
            rule: 24,
            bad: |co| {
                co.node_can(&[]);
                co.attach("v");
                co.publish("v", "/t");
                co.unpublish("v", "/t");
                co.rest();
            },
            good: |co| {
                co.up("v");
                co.publish("v", "/t");
                co.unpublish("v", "/t");
                co.unstage("v");
                co.detach("v");
                co.rest();
            },
        },
    ]
}

/// Rule 25: calls without an answer.
fn unknown() -> Vec<Case> {
    vec![
        Case {
            rule: 25,
            bad: |co| {
                co.up("v");
                co.lost("NodePublishVolume", publish("v", "/t"));
                co.unstage("v");
            },
            good: |co| {
                co.up("v");
                co.lost("NodePublishVolume", publish("v", "/t"));
                co.unpublish("v", "/t");
                co.unstage("v");
            },
        },
        Case {
            rule: 25,
            bad: |co| {
                co.attach("v");
                co.fails("NodeStageVolume", stage("v"), "DEADLINE_EXCEEDED");
                co.publish("v", "/t");
            },
            good: |co| {
                co.attach("v");
                co.fails("NodeStageVolume", stage("v"), "DEADLINE_EXCEEDED");
                co.fails("NodeStageVolume", stage("v"), "ABORTED");
                co.stage("v");
                co.publish("v", "/t");
            },
        },
        // A refusal later does not tell what became of the call before.
        Case {
            rule: 25,
            bad: |co| {
                co.attach("v");
                co.lost("NodeStageVolume", stage("v"));
                co.fails("NodeStageVolume", stage("v"), "ABORTED");
                co.detach("v");
            },
            good: |co| {
                co.attach("v");
                co.lost("NodeStageVolume", stage("v"));
                co.fails("NodeStageVolume", stage("v"), "ABORTED");
                co.unstage("v");
                co.detach("v");
            },
        },
        Case {
            rule: 25,
            bad: |co| {
                co.attach("v");
                co.begins("NodeStageVolume", stage("v"));
                co.crash();
                let other = json!({"volume_capability": capability("SINGLE_NODE_WRITER")});
                co.ok("NodeStageVolume", with(stage("v"), other));
            },
            good: |co| {
                co.attach("v");
                co.begins("NodeStageVolume", stage("v"));
                co.crash();
                co.unstage("v");
                let other = json!({"volume_capability": capability("SINGLE_NODE_WRITER")});
                co.ok("NodeStageVolume", with(stage("v"), other));
            },
        },
        Case {
            rule: 25,
            bad: |co| {
                co.lost("ControllerPublishVolume", attach("v"));
                co.stage("v");
            },
            good: |co| {
                co.lost("ControllerPublishVolume", attach("v"));
                co.attach("v");
                co.stage("v");
            },
        },
        Case {
            rule: 25,
            bad: |co| {
                co.up("v");
                let single = json!({"volume_capability": capability("SINGLE_NODE_WRITER")});
                co.lost("NodePublishVolume", with(publish("v", "/t"), single.clone()));
                co.ok("NodePublishVolume", with(publish("v", "/u"), single));
            },
            good: |co| {
                co.up("v");
                let single = json!({"volume_capability": capability("SINGLE_NODE_WRITER")});
                co.lost("NodePublishVolume", with(publish("v", "/t"), single.clone()));
                co.unpublish("v", "/t");
                co.ok("NodePublishVolume", with(publish("v", "/u"), single));
            },
        },
        Case {
            rule: 25,
            bad: |co| {
                co.controller_can(&[]);
                co.lost("NodeStageVolume", with(stage("v"), json!({"publish_context": null})));
                co.rest();
            },
            good: |co| {
                co.attach("v");
                co.lost("NodeStageVolume", stage("v"));
                co.unstage("v");
                co.detach("v");
                co.rest();
            },
        },
    ]
}

fn arguments() -> Vec<Case> {
    vec![
        Case {
            rule: 27,
            bad: |co| {
                co.ok("ControllerPublishVolume", with(attach("v"), json!({"node_id": "host.example"})));
                co.stage("v");
            },
            // A controller attaches to other nodes, too.
            good: |co| {
                co.ok("ControllerPublishVolume", with(attach("v"), json!({"node_id": "n2"})));
                co.up("v");
            },
        },
        Case {
            rule: 28,
            bad: |co| {
                co.up("v");
                co.ok("NodeStageVolume", with(stage("v"), json!({"staging_target_path": "/else"})));
            },
            good: |co| {
                co.up("v");
                co.unstage("v");
                co.ok("NodeStageVolume", with(stage("v"), json!({"staging_target_path": "/else"})));
            },
        },
        Case {
            rule: 28,
            bad: |co| {
                co.attach("v");
                co.ok("NodeStageVolume", with(stage("v"), json!({"staging_target_path": "var/v"})));
            },
            good: |co| co.up("v"),
        },
        Case {
            rule: 28,
            bad: |co| {
                co.up("v");
                co.attach("w");
                co.ok("NodeStageVolume", with(stage("w"), json!({"staging_target_path": staging("v")})));
            },
            good: |co| {
                co.up("v");
                co.unstage("v");
                co.attach("w");
                co.ok("NodeStageVolume", with(stage("w"), json!({"staging_target_path": staging("v")})));
            },
        },
        Case {
            rule: 28,
            bad: |co| {
                co.up("v");
                co.ok("NodeUnstageVolume", json!({"volume_id": "v", "staging_target_path": "/else"}));
            },
            good: |co| {
                co.up("v");
                co.unstage("v");
                co.unstage("v");
            },
        },
        Case {
            rule: 28,
            bad: |co| {
                co.up("v");
                co.ok("NodePublishVolume", with(publish("v", "/t"), json!({"staging_target_path": ""})));
            },
            good: |co| {
                co.up("v");
                co.publish("v", "/t");
            },
        },
        Case {
            rule: 29,
            bad: |co| {
                co.up("v");
                co.up("w");
                co.publish("v", "/t");
                co.publish("w", "/t");
            },
            good: |co| {
                co.up("v");
                co.up("w");
                co.publish("v", "/t");
                co.unpublish("v", "/t");
                co.publish("w", "/t");
                co.reboot();
                co.stage("v");
                co.publish("v", "/t");
            },
        },
        Case {
            rule: 29,
            bad: |co| {
                co.up("v");
                co.publish("v", &staging("v"));
            },
            good: |co| {
                co.up("v");
                co.publish("v", "/staging/v/t");
            },
        },
        Case {
            rule: 29,
            bad: |co| {
                co.up("v");
                co.publish("v", "t");
            },
            good: |co| {
                co.up("v");
                co.publish("v", "/t");
            },
        },
        Case {
            rule: 31,
            bad: |co| {
                co.attach("v");
                co.ok("NodeStageVolume", with(stage("v"), json!({"publish_context": null})));
            },
            // Two answers; the CO may have lost the second.
            good: |co| {
                co.attach("v");
                co.answered(
                    "ControllerPublishVolume",
                    attach("v"),
                    json!({"publish_context": {"values": {}}}),
                );
                co.stage("v");
            },
        },
        Case {
            rule: 31,
            bad: |co| {
                co.controller_can(&["CREATE_DELETE_VOLUME"]);
                co.stage("v");
            },
            good: |co| {
                co.controller_can(&["CREATE_DELETE_VOLUME"]);
                co.ok("NodeStageVolume", with(stage("v"), json!({"publish_context": null})));
            },
        },
        Case {
            rule: 31,
            bad: |co| {
                co.up("v");
                let other = json!({"volume_context": {"bytes": 2, "values": {"k": "d"}}});
                co.ok("NodePublishVolume", with(publish("v", "/t"), other));
            },
            // Once it is down, another registration of it may say otherwise.
            good: |co| {
                co.up("v");
                co.unstage("v");
                co.detach("v");
                let other = json!({"volume_context": {"bytes": 2, "values": {"k": "d"}}});
                co.answered(
                    "ControllerPublishVolume",
                    with(attach("v"), other.clone()),
                    json!({"publish_context": ctx()}),
                );
                co.ok("NodeStageVolume", with(stage("v"), other));
            },
        },
        Case {
            rule: 31,
            bad: |co| {
                let volume = json!({"volume_id": "v", "volume_context": {"bytes": 2, "values": {"k": "d"}}});
                co.answered("CreateVolume", create("n"), json!({"volume": volume}));
                co.attach("v");
            },
            good: |co| {
                let context = json!({"volume_context": {"bytes": 2, "values": {"k": "d"}}});
                let volume = with(json!({"volume_id": "v"}), context.clone());
                co.answered("CreateVolume", create("n"), json!({"volume": volume}));
                co.ok("ControllerPublishVolume", with(attach("v"), context));
                co.detach("v");
                co.ok("DeleteVolume", json!({"volume_id": "v"}));
                co.attach("v");
            },
        },
        Case {
            rule: 33,
            bad: |co| {
                co.up("v");
                co.ok("NodeGetVolumeStats", json!({"volume_id": "v", "volume_path": "/t"}));
            },
            good: |co| {
                co.up("v");
                co.ok("NodeGetVolumeStats", json!({"volume_id": "v", "staging_target_path": staging("v")}));
            },
        },
        Case {
            rule: 33,
            bad: |co| {
                co.up("v");
                co.ok("NodeExpandVolume", json!({"volume_id": "v", "staging_target_path": "/else"}));
            },
            good: |co| {
                co.up("v");
                co.ok("NodeExpandVolume", json!({"volume_id": "v", "staging_target_path": staging("v")}));
            },
        },
        Case {
            rule: 33,
            bad: |co| {
                let secrets = json!({"secrets": {"bytes": 2, "values": {"k": "d"}}});
                co.ok("ControllerPublishVolume", with(attach("v"), secrets));
                co.detach("v");
            },
            // Rotated meanwhile.
            good: |co| {
                let secrets = json!({"secrets": {"bytes": 2, "values": {"k": "d"}}});
                co.ok("ControllerPublishVolume", with(attach("v"), secrets));
                let secrets = json!({"secrets": {"bytes": 2, "values": {"k": "e"}}});
                co.ok("ControllerUnpublishVolume", with(detach("v"), secrets));
            },
        },
        Case {
            rule: 34,
            bad: |co| {
                co.up("v");
                co.publish("v", "/t");
                co.ok("NodePublishVolume", with(publish("v", "/t"), json!({"readonly": true})));
            },
            good: |co| {
                co.up("v");
                co.publish("v", "/t");
                co.ok("NodePublishVolume", with(publish("v", "/u"), json!({"readonly": true})));
            },
        },
        Case {
            rule: 34,
            bad: |co| {
                co.up("v");
                co.publish("v", "/t");
                let other = json!({"volume_capability": capability("MULTI_NODE_READER_ONLY")});
                co.ok("NodePublishVolume", with(publish("v", "/u"), other));
            },
            good: |co| {
                co.up("v");
                co.publish("v", "/t");
                co.unpublish("v", "/t");
                let other = json!({"volume_capability": capability("MULTI_NODE_READER_ONLY")});
                co.ok("NodePublishVolume", with(publish("v", "/u"), other));
            },
        },
        Case {
            rule: 34,
            bad: |co| {
                co.up("v");
                let single = json!({"volume_capability": capability("SINGLE_NODE_READER_ONLY")});
                co.ok("NodePublishVolume", with(publish("v", "/t"), single.clone()));
                co.ok("NodePublishVolume", with(publish("v", "/u"), single));
            },
            good: |co| {
                co.up("v");
                let many = json!({"volume_capability": capability("SINGLE_NODE_MULTI_WRITER")});
                co.ok("NodePublishVolume", with(publish("v", "/t"), many.clone()));
                co.ok("NodePublishVolume", with(publish("v", "/u"), many));
            },
        },
    ]
}

/// Rules 35 and 36: what an answer forbids.
fn answers() -> Vec<Case> {
    vec![
        Case {
            rule: 35,
            bad: |co| {
                let request =
                    json!({"volume_id": "v", "volume_capabilities": [capability("MULTI_NODE_MULTI_WRITER")]});
                co.answered("ValidateVolumeCapabilities", request, json!({"message": "no"}));
                co.attach("v");
            },
            good: |co| {
                let capabilities = json!({"volume_capabilities": [capability("MULTI_NODE_MULTI_WRITER")]});
                let request = with(json!({"volume_id": "v"}), capabilities.clone());
                co.answered("ValidateVolumeCapabilities", request.clone(), json!({}));
                co.answered("ValidateVolumeCapabilities", request, json!({"confirmed": capabilities}));
                co.up("v");
            },
        },
        // Another capability was confirmed than was asked for.
        Case {
            rule: 35,
            bad: |co| {
                co.controller_can(&[]);
                let confirmed = json!({"volume_capabilities": [capability("SINGLE_NODE_WRITER")]});
                let request =
                    json!({"volume_id": "v", "volume_capabilities": [capability("MULTI_NODE_MULTI_WRITER")]});
                co.answered("ValidateVolumeCapabilities", request, json!({"confirmed": confirmed}));
                co.ok("NodeStageVolume", with(stage("v"), json!({"publish_context": null})));
            },
            good: |co| {
                co.controller_can(&[]);
                let confirmed = json!({"volume_capabilities": [capability("SINGLE_NODE_WRITER")]});
                let request = with(json!({"volume_id": "v"}), confirmed.clone());
                co.answered("ValidateVolumeCapabilities", request, json!({"confirmed": confirmed}));
                let single =
                    json!({"publish_context": null, "volume_capability": capability("SINGLE_NODE_WRITER")});
                co.ok("NodeStageVolume", with(stage("v"), single));
            },
        },
        Case {
            rule: 36,
            bad: |co| {
                co.attach("v");
                co.fails("NodeStageVolume", stage("v"), "INVALID_ARGUMENT");
                co.ok("Probe", json!({}));
                co.stage("v");
            },
            // Undone, then asked for again by somebody.
            good: |co| {
                co.attach("v");
                co.fails("NodeStageVolume", stage("v"), "INVALID_ARGUMENT");
                co.unstage("v");
                co.stage("v");
            },
        },
        Case {
            rule: 36,
            bad: |co| {
                co.fails("CreateVolume", create("n"), "ALREADY_EXISTS");
                co.fails("CreateVolume", create("n"), "ALREADY_EXISTS");
            },
            good: |co| {
                co.fails("CreateVolume", create("n"), "ALREADY_EXISTS");
                co.ok("CreateVolume", with(create("n"), json!({"capacity_range": {"required_bytes": 1}})));
            },
        },
        // The negation is sent until it is acknowledged; another process knows nothing of the refusal.
        Case {
            rule: 36,
            bad: |co| {
                co.fails("CreateVolume", create("n"), "OUT_OF_RANGE");
                co.reconnect();
                co.ok("CreateVolume", create("n"));
            },
            good: |co| {
                co.up("v");
                co.fails("NodeUnstageVolume", unstage("v"), "INVALID_ARGUMENT");
                co.unstage("v");
                co.fails("NodeStageVolume", stage("v"), "INVALID_ARGUMENT");
                co.crash();
                co.stage("v");
                co.fails("NodePublishVolume", publish("v", "/t"), "INVALID_ARGUMENT");
                co.ok("NodePublishVolume", publish("v", "/u"));
            },
        },
        Case {
            rule: 36,
            bad: |co| {
                co.up("v");
                co.fails(
                    "NodeExpandVolume",
                    json!({"volume_id": "v", "staging_target_path": staging("v")}),
                    "UNIMPLEMENTED",
                );
                co.publish("v", "/t");
                co.ok("NodeExpandVolume", json!({"volume_id": "v", "staging_target_path": staging("v")}));
            },
            // It asked what the plugin has now.
            good: |co| {
                co.up("v");
                co.fails(
                    "NodeExpandVolume",
                    json!({"volume_id": "v", "staging_target_path": staging("v")}),
                    "UNIMPLEMENTED",
                );
                co.node_can(&["STAGE_UNSTAGE_VOLUME", "EXPAND_VOLUME"]);
                co.ok("NodeExpandVolume", json!({"volume_id": "v", "staging_target_path": staging("v")}));
                co.fails("GetPluginInfo", json!({}), "UNIMPLEMENTED");
                co.fails("GetPluginInfo", json!({}), "UNIMPLEMENTED");
                co.publish("v", "/t");
                co.fails("NodePublishVolume", publish("v", "/u"), "ALREADY_EXISTS");
                co.unpublish("v", "/u");
                co.publish("v", "/u");
            },
        },
    ]
}
