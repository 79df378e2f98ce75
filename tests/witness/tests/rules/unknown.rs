//! Rule 25: calls without an answer.

use serde_json::json;

use crate::Case;
use crate::history::{attach, capability, publish, stage, with};

pub fn cases() -> Vec<Case> {
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
