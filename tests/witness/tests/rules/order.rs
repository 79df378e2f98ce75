//! Rules 18, 20 to 24 and 26: what comes before what.

use serde_json::json;

use crate::Case;
use crate::history::{History, attach, create, detach, publish, stage, staging, unpublish, unstage, with};

/// The proof is the stage or unstage that left the volume unstaged, and the call that needs it.
#[test]
fn rule_21_names_the_call_that_left_it_unstaged() {
    let ways: [fn(&mut History); 4] = [
        |co| co.fails("NodeStageVolume", stage("v"), "NOT_FOUND"),
        |co| {
            co.stage("v");
            co.unstage("v");
        },
        |co| {
            co.stage("v");
            co.reboot();
        },
        // Nothing else is known of the volume by then.
        |co| {
            co.detach("v");
            co.controller_can(&[]);
            co.fails("NodeStageVolume", with(stage("v"), json!({"publish_context": null})), "NOT_FOUND");
        },
    ];
    for (number, way) in ways.into_iter().enumerate() {
        let mut co = History::new();
        co.attach("v");
        way(&mut co);
        let rests_on = co.last;
        let mut request = publish("v", "/t");
        if number == 3 {
            request = with(request, json!({"publish_context": null}));
        }
        co.ok("NodePublishVolume", request);
        let breaches = &co.verdict().breaches;
        let proofs: Vec<_> = breaches.iter().map(|breach| (breach.rule, breach.calls.clone())).collect();
        assert_eq!(proofs, [(21, vec![rests_on, co.last])], "way {number}");
    }
}

pub fn cases() -> Vec<Case> {
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
            // Another node may release it meanwhile.
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
        Case {
            rule: 26,
            bad: |co| {
                co.plugin_can(&["CONTROLLER_SERVICE", "OFFLINE"]);
                co.controller_can(&["EXPAND_VOLUME"]);
                co.ok("NodeStageVolume", with(stage("v"), json!({"publish_context": null})));
                co.ok("ControllerExpandVolume", json!({"volume_id": "v"}));
            },
            good: |co| {
                co.plugin_can(&["CONTROLLER_SERVICE", "OFFLINE", "ONLINE"]);
                co.up("v");
                co.ok("ControllerExpandVolume", json!({"volume_id": "v"}));
                co.unstage("v");
                co.detach("v");
                co.plugin_can(&["CONTROLLER_SERVICE", "OFFLINE"]);
                co.ok("ControllerExpandVolume", json!({"volume_id": "v"}));
            },
        },
        Case {
            rule: 26,
            bad: |co| {
                co.ok("NodeExpandVolume", json!({"volume_id": "v", "staging_target_path": staging("v")}));
            },
            good: |co| {
                co.up("v");
                co.ok("NodeExpandVolume", json!({"volume_id": "v", "staging_target_path": staging("v")}));
            },
        },
        // Without a stage the publish comes before.
        Case {
            rule: 26,
            bad: |co| {
                co.node_can(&["EXPAND_VOLUME"]);
                co.attach("v");
                co.fails("NodePublishVolume", publish("v", "/t"), "FAILED_PRECONDITION");
                co.ok("NodeExpandVolume", json!({"volume_id": "v", "volume_path": "/t"}));
            },
            good: |co| {
                co.node_can(&["EXPAND_VOLUME"]);
                co.attach("v");
                co.publish("v", "/t");
                co.lost("NodePublishVolume", publish("v", "/s"));
                co.ok("NodeExpandVolume", json!({"volume_id": "v", "volume_path": "/t"}));
            },
        },
        // What is attached, and be it to another node, is not offline.
        Case {
            rule: 26,
            bad: |co| {
                co.plugin_can(&["CONTROLLER_SERVICE", "OFFLINE"]);
                co.ok("ControllerPublishVolume", with(attach("v"), json!({"node_id": "n2"})));
                co.ok("ControllerExpandVolume", json!({"volume_id": "v"}));
            },
            good: |co| {
                co.plugin_can(&["CONTROLLER_SERVICE", "OFFLINE"]);
                co.ok("ControllerPublishVolume", with(attach("v"), json!({"node_id": "n2"})));
                co.ok("ControllerUnpublishVolume", with(detach("v"), json!({"node_id": "n2"})));
                co.attach("w");
                co.ok("ControllerExpandVolume", json!({"volume_id": "v"}));
            },
        },
        Case {
            rule: 26,
            bad: |co| {
                co.plugin_can(&["CONTROLLER_SERVICE", "OFFLINE"]);
                co.attach("v");
                co.lost("ControllerUnpublishVolume", detach("v"));
                co.ok("ControllerExpandVolume", json!({"volume_id": "v"}));
            },
            // A plugin that does not say how it expands may be asked at any time.
            good: |co| {
                co.up("v");
                co.ok("ControllerExpandVolume", json!({"volume_id": "v"}));
                co.plugin_can(&["CONTROLLER_SERVICE", "OFFLINE"]);
                co.unstage("v");
                co.lost("ControllerUnpublishVolume", detach("v"));
                co.detach("v");
                co.ok("ControllerExpandVolume", json!({"volume_id": "v"}));
            },
        },
    ]
}
