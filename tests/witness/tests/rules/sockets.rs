//! A plugin whose node half and two controllers are processes of their own: rules that relate what is said to one of them with
//! what is said to another.

use serde_json::json;

use crate::Case;
use crate::history::{History, attach, capability, create, detach, stage, staging, with};

const NODE: usize = 0;
const ONE: usize = 1;
const TWO: usize = 2;

/// A CO that knows all three. The node half speaks of a controller and serves none.
fn halves(co: &mut History) {
    *co = History::unacquainted();
    for socket in [ONE, TWO, NODE] {
        co.at(socket);
        co.ok("Probe", json!({}));
        co.plugin_can(&["CONTROLLER_SERVICE", "OFFLINE"]);
    }
    co.node_can(&["STAGE_UNSTAGE_VOLUME", "EXPAND_VOLUME"]);
    co.answered("NodeGetInfo", json!({}), json!({"node_id": "n1"}));
    co.fails("ControllerGetCapabilities", json!({}), "UNIMPLEMENTED");
    for socket in [ONE, TWO] {
        co.at(socket);
        co.fails("NodeGetCapabilities", json!({}), "UNIMPLEMENTED");
        co.fails("NodeGetInfo", json!({}), "UNIMPLEMENTED");
        co.controller_can(&["CREATE_DELETE_VOLUME", "PUBLISH_UNPUBLISH_VOLUME", "EXPAND_VOLUME"]);
    }
}

/// Attached by the first controller, staged.
fn up(co: &mut History) {
    halves(co);
    co.at(ONE);
    co.attach("v");
    co.at(NODE);
    co.stage("v");
}

pub fn cases() -> Vec<Case> {
    vec![
        // Each process is asked who it is.
        Case {
            rule: 3,
            bad: |co| {
                co.at(ONE);
                co.ok("ControllerGetCapabilities", json!({}));
            },
            good: |co| {
                co.at(ONE);
                co.ok("GetPluginInfo", json!({}));
                co.ok("ControllerGetCapabilities", json!({}));
            },
        },
        Case {
            rule: 18,
            bad: |co| {
                halves(co);
                co.at(ONE);
                co.begins("ControllerPublishVolume", attach("v"));
                co.at(TWO);
                co.ok("ControllerPublishVolume", attach("v"));
            },
            good: |co| {
                halves(co);
                co.at(ONE);
                co.begins("ControllerPublishVolume", attach("v"));
                co.at(TWO);
                co.attach("w");
            },
        },
        // What one half cannot says nothing of the other.
        Case {
            rule: 19,
            bad: |co| {
                halves(co);
                co.at(NODE);
                co.fails("CreateVolume", create("n"), "UNIMPLEMENTED");
            },
            good: |co| {
                halves(co);
                co.at(NODE);
                co.fails("ControllerGetCapabilities", json!({}), "UNIMPLEMENTED");
                co.at(ONE);
                co.ok("CreateVolume", create("n"));
                // It is the same plugin at each of its sockets.
                co.at(3);
                co.ok("Probe", json!({}));
                co.ok("CreateVolume", create("m"));
            },
        },
        Case {
            rule: 20,
            bad: |co| {
                halves(co);
                co.at(NODE);
                co.stage("v");
            },
            good: |co| {
                up(co);
                co.unstage("v");
                co.at(TWO);
                co.detach("v");
                co.at(ONE);
                co.attach("v");
                co.at(NODE);
                co.stage("v");
            },
        },
        Case {
            rule: 20,
            bad: |co| {
                halves(co);
                co.at(ONE);
                co.attach("v");
                co.at(TWO);
                co.detach("v");
                co.at(NODE);
                co.stage("v");
            },
            good: |co| {
                halves(co);
                co.at(ONE);
                co.attach("v");
                co.at(TWO);
                co.detach("v");
                co.attach("v");
                co.at(NODE);
                co.stage("v");
            },
        },
        Case {
            rule: 23,
            bad: |co| {
                up(co);
                co.at(TWO);
                co.detach("v");
            },
            good: |co| {
                up(co);
                co.unstage("v");
                co.at(TWO);
                co.detach("v");
            },
        },
        // One did not answer: the other may be asked the same.
        Case {
            rule: 25,
            bad: |co| {
                halves(co);
                co.at(ONE);
                co.lost("ControllerPublishVolume", attach("v"));
                co.at(TWO);
                let single = json!({"volume_capability": capability("SINGLE_NODE_WRITER")});
                co.ok("ControllerPublishVolume", with(attach("v"), single));
            },
            good: |co| {
                halves(co);
                co.at(ONE);
                co.lost("ControllerPublishVolume", attach("v"));
                co.at(TWO);
                co.attach("v");
                co.at(NODE);
                co.stage("v");
            },
        },
        Case {
            rule: 26,
            bad: |co| {
                halves(co);
                co.at(ONE);
                co.attach("v");
                co.at(TWO);
                co.ok("ControllerExpandVolume", json!({"volume_id": "v"}));
            },
            // One of them is newer.
            good: |co| {
                up(co);
                co.ok("NodeExpandVolume", json!({"volume_id": "v", "staging_target_path": staging("v")}));
                co.at(TWO);
                co.plugin_can(&["CONTROLLER_SERVICE", "ONLINE"]);
                co.ok("ControllerExpandVolume", json!({"volume_id": "v"}));
            },
        },
        Case {
            rule: 27,
            bad: |co| {
                halves(co);
                co.at(TWO);
                co.ok("ControllerPublishVolume", with(attach("v"), json!({"node_id": "host.example"})));
                co.at(NODE);
                co.stage("v");
            },
            good: up,
        },
        Case {
            rule: 31,
            bad: |co| {
                halves(co);
                co.at(TWO);
                co.attach("v");
                co.at(NODE);
                co.ok("NodeStageVolume", with(stage("v"), json!({"publish_context": null})));
            },
            good: up,
        },
        Case {
            rule: 32,
            bad: |co| {
                halves(co);
                co.at(ONE);
                co.ok("ControllerPublishVolume", with(attach("v"), json!({"readonly": true})));
            },
            good: |co| {
                halves(co);
                co.at(TWO);
                co.controller_can(&["PUBLISH_UNPUBLISH_VOLUME", "PUBLISH_READONLY"]);
                co.ok("ControllerPublishVolume", with(attach("v"), json!({"readonly": true})));
            },
        },
        Case {
            rule: 33,
            bad: |co| {
                halves(co);
                let secrets = json!({"secrets": {"bytes": 2, "values": {"k": "d"}}});
                co.at(ONE);
                co.ok("ControllerPublishVolume", with(attach("v"), secrets));
                co.at(TWO);
                co.detach("v");
            },
            good: |co| {
                halves(co);
                let secrets = json!({"secrets": {"bytes": 2, "values": {"k": "d"}}});
                co.at(ONE);
                co.ok("ControllerPublishVolume", with(attach("v"), secrets.clone()));
                co.at(TWO);
                co.ok("ControllerUnpublishVolume", with(detach("v"), secrets));
            },
        },
        Case {
            rule: 35,
            bad: |co| {
                halves(co);
                co.at(ONE);
                let request =
                    json!({"volume_id": "v", "volume_capabilities": [capability("MULTI_NODE_MULTI_WRITER")]});
                co.answered("ValidateVolumeCapabilities", request, json!({"message": "no"}));
                co.at(TWO);
                co.attach("v");
            },
            good: |co| {
                halves(co);
                co.at(ONE);
                let request =
                    json!({"volume_id": "v", "volume_capabilities": [capability("MULTI_NODE_MULTI_WRITER")]});
                co.answered("ValidateVolumeCapabilities", request.clone(), json!({"confirmed": request}));
                co.at(TWO);
                co.attach("v");
            },
        },
        // The answer of another instance settles it.
        Case {
            rule: 39,
            bad: |co| {
                halves(co);
                co.at(ONE);
                co.lost("CreateVolume", create("n"));
                co.at(TWO);
                co.ok("CreateVolume", with(create("n"), json!({"capacity_range": {"limit_bytes": 1}})));
            },
            good: |co| {
                halves(co);
                co.at(ONE);
                co.lost("CreateVolume", create("n"));
                co.at(TWO);
                co.ok("CreateVolume", create("n"));
                co.ok("CreateVolume", with(create("n"), json!({"capacity_range": {"limit_bytes": 1}})));
            },
        },
    ]
}
