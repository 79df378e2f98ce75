//! Rules 27 to 29, 31, 33 and 34: what a call says, given what others said.

use serde_json::{Value, json};

use crate::Case;
use crate::history::{attach, capability, create, ctx, detach, publish, stage, staging, with};

pub fn cases() -> Vec<Case> {
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
                co.ok("NodeUnstageVolume", json!({"volume_id": "w", "staging_target_path": staging("v")}));
            },
            // Nothing is staged there any more.
            good: |co| {
                co.up("v");
                co.unstage("v");
                co.ok("NodeUnstageVolume", json!({"volume_id": "w", "staging_target_path": staging("v")}));
            },
        },
        Case {
            rule: 28,
            bad: |co| co.ok("NodeUnstageVolume", json!({"volume_id": "v", "staging_target_path": "var/v"})),
            good: |co| co.ok("NodeUnstageVolume", json!({"volume_id": "v", "staging_target_path": "/var/v"})),
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
                co.up("w");
                co.publish("v", "/t");
                co.unpublish("w", "/t");
            },
            good: |co| {
                co.up("v");
                co.up("w");
                co.publish("v", "/t");
                co.unpublish("v", "/t");
                co.unpublish("w", "/t");
            },
        },
        Case { rule: 29, bad: |co| co.unpublish("v", "t"), good: |co| co.unpublish("v", "/t") },
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
        // Also where it was validated before.
        Case {
            rule: 31,
            bad: |co| {
                co.answered("ValidateVolumeCapabilities", validate("v"), json!({"confirmed": validate("v")}));
                co.attach("v");
                let other = json!({"volume_context": {"bytes": 2, "values": {"k": "d"}}});
                co.ok("NodeStageVolume", with(stage("v"), other));
            },
            good: |co| {
                co.answered("ValidateVolumeCapabilities", validate("v"), json!({"confirmed": validate("v")}));
                co.attach("v");
                co.detach("v");
                let other = json!({"volume_context": {"bytes": 2, "values": {"k": "d"}}});
                co.ok("ControllerPublishVolume", with(attach("v"), other));
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

fn validate(volume: &str) -> Value {
    json!({"volume_id": volume, "volume_capabilities": [capability("MULTI_NODE_MULTI_WRITER")]})
}
