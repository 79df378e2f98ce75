//! Rules 35 and 36: what an answer forbids.

use serde_json::json;

use crate::Case;
use crate::history::{capability, create, publish, stage, staging, unstage, with};

pub fn cases() -> Vec<Case> {
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
