//! Rules 35 and 36: what an answer forbids.

use serde_json::json;

use crate::Case;
use crate::history::{History, attach, capability, create, publish, stage, staging, unstage, with};

/// The calls of each breach of rule 36.
fn refused_again(co: &History) -> Vec<&[u64]> {
    let breaches = co.verdict().breaches.iter();
    breaches.filter(|breach| breach.rule == 36).map(|breach| breach.calls.as_slice()).collect()
}

#[test]
fn ok_takes_an_unimplemented_back() {
    let expand = |volume| json!({"volume_id": volume, "staging_target_path": staging(volume)});
    let mut co = History::new();
    co.up("v");
    co.up("w");
    co.fails("NodeExpandVolume", expand("v"), "UNIMPLEMENTED");
    let first = co.last;
    co.ok("NodeExpandVolume", expand("v"));
    co.ok("NodeExpandVolume", expand("v"));
    assert_eq!(refused_again(&co), [[first, first + 1]]);

    // The plugin has the RPC, as it shows for another volume.
    let mut co = History::new();
    co.up("v");
    co.up("w");
    co.fails("NodeExpandVolume", expand("v"), "UNIMPLEMENTED");
    co.ok("NodeExpandVolume", expand("w"));
    co.ok("NodeExpandVolume", expand("v"));
    assert_eq!(refused_again(&co), [[0; 0]; 0]);
}

#[test]
fn invalid_argument_is_seen_behind_another_call() {
    let mut co = History::new();
    co.attach("v");
    co.fails("NodeStageVolume", stage("v"), "INVALID_ARGUMENT");
    let first = co.last;
    co.attach("v");
    co.stage("v");
    assert_eq!(refused_again(&co), [[first, co.last]]);

    let mut co = History::new();
    co.up("v");
    co.fails("NodePublishVolume", publish("v", "/t"), "INVALID_ARGUMENT");
    let first = co.last;
    co.fails("NodePublishVolume", publish("v", "/u"), "INVALID_ARGUMENT");
    co.fails("NodePublishVolume", publish("v", "/t"), "INVALID_ARGUMENT");
    co.fails("NodePublishVolume", publish("v", "/u"), "INVALID_ARGUMENT");
    assert_eq!(refused_again(&co), [[first, first + 2], [first + 1, first + 3]]);
}

#[test]
fn refusal_by_the_state_ends_with_the_state() {
    // Whether it exists already, or is out of range, may be another matter after another call.
    for code in ["ALREADY_EXISTS", "OUT_OF_RANGE"] {
        let mut co = History::new();
        co.fails("ControllerPublishVolume", attach("v"), code);
        co.ok("ControllerExpandVolume", json!({"volume_id": "v"}));
        co.attach("v");
        co.fails("CreateVolume", create("n"), code);
        co.ok("DeleteVolume", json!({"volume_id": "w"}));
        co.ok("CreateVolume", create("n"));
        assert_eq!(refused_again(&co), [[0; 0]; 0], "{code}");
    }
    // The same call was answered with OK in between.
    let mut co = History::new();
    co.fails("ControllerPublishVolume", attach("v"), "INVALID_ARGUMENT");
    let first = co.last;
    co.attach("v");
    co.attach("v");
    assert_eq!(refused_again(&co), [[first, first + 1]]);
}

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
