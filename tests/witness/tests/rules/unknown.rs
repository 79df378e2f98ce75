//! Rules 25 and 39: calls without an answer.

use serde_json::{Value, json};

use crate::Case;
use crate::history::{attach, capability, create, publish, stage, with};

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
        Case {
            rule: 39,
            bad: |co| {
                co.lost("CreateVolume", create("n"));
                co.ok("CreateVolume", with(create("n"), json!({"capacity_range": {"required_bytes": 1}})));
            },
            // Secrets may be others by then; and what is answered may be asked for otherwise.
            good: |co| {
                let secrets = |digest: &str| json!({"secrets": {"bytes": 2, "values": {"k": digest}}});
                co.lost("CreateVolume", with(create("n"), secrets("d")));
                co.answered("CreateVolume", with(create("n"), secrets("e")), volume("id-n"));
                let other = json!({"capacity_range": {"required_bytes": 1}});
                co.fails("CreateVolume", with(create("n"), other), "ALREADY_EXISTS");
            },
        },
        // The volume that the call may have made was deleted by a guess.
        Case {
            rule: 39,
            bad: |co| {
                co.fails("CreateVolume", create("n"), "DEADLINE_EXCEEDED");
                co.ok("DeleteVolume", json!({"volume_id": "id-n"}));
                co.answered("CreateVolume", create("n"), volume("id-n"));
            },
            // Others come and go meanwhile, and what was deleted before the call is not its volume.
            good: |co| {
                co.lost("CreateVolume", create("l"));
                co.ok("DeleteVolume", json!({"volume_id": "id-n"}));
                co.fails("CreateVolume", create("n"), "DEADLINE_EXCEEDED");
                co.answered("CreateVolume", create("m"), volume("id-m"));
                co.ok("DeleteVolume", json!({"volume_id": "id-m"}));
                co.ok("DeleteVolume", json!({"volume_id": "id-before"}));
                co.answered("CreateVolume", create("n"), volume("id-n"));
                co.ok("DeleteVolume", json!({"volume_id": "id-n"}));
            },
        },
        Case {
            rule: 39,
            bad: |co| {
                co.begins("CreateVolume", create("n"));
                co.crash();
                co.ok("DeleteVolume", json!({"volume_id": "id-n"}));
                co.fails("CreateVolume", create("n"), "DEADLINE_EXCEEDED");
                co.answered("CreateVolume", create("n"), volume("id-n"));
            },
            // An id that the plugin returned is no guess: it lists the volume, or there was one of that name before.
            good: |co| {
                co.controller_can(&["CREATE_DELETE_VOLUME", "LIST_VOLUMES"]);
                co.begins("CreateVolume", create("n"));
                co.crash();
                co.answered("ListVolumes", json!({}), json!({"entries": [volume("id-n")]}));
                co.ok("DeleteVolume", json!({"volume_id": "id-n"}));
                co.answered("CreateVolume", create("n"), volume("id-n"));
                co.lost("CreateVolume", create("m"));
                co.ok("DeleteVolume", json!({"volume_id": "id-n"}));
                co.answered("CreateVolume", create("m"), volume("id-m"));
                co.lost("CreateVolume", create("n"));
                co.ok("DeleteVolume", json!({"volume_id": "id-n"}));
                co.answered("CreateVolume", create("n"), volume("id-n"));
            },
        },
        // ABORTED shows nothing of the call before; a refusal of the same call does.
        Case {
            rule: 39,
            bad: |co| {
                co.fails("CreateVolume", create("n"), "UNAVAILABLE");
                co.fails("CreateVolume", create("n"), "ABORTED");
                co.ok("CreateVolume", with(create("n"), json!({"parameters": {"bytes": 0, "values": {}}})));
            },
            good: |co| {
                co.fails("CreateVolume", create("n"), "UNAVAILABLE");
                co.fails("CreateVolume", create("n"), "OUT_OF_RANGE");
                co.ok("CreateVolume", with(create("n"), json!({"parameters": {"bytes": 0, "values": {}}})));
            },
        },
    ]
}

fn volume(id: &str) -> Value {
    json!({"volume": {"volume_id": id}})
}
