//! Rules on what one call looks like: 3, 11 to 17, 19, 32.

use serde_json::{Value, json};

use crate::Case;
use crate::history::{History, attach, create, publish, stage, with};

pub fn cases() -> Vec<Case> {
    vec![
        Case {
            rule: 3,
            bad: |co| {
                *co = History::unacquainted();
                co.ok("NodeGetInfo", json!({}));
            },
            good: |co| {
                *co = History::unacquainted();
                co.ok("GetPluginInfo", json!({}));
                co.reconnect();
                co.ok("NodeGetInfo", json!({}));
            },
        },
        // Another process of the CO gets to know the plugin for itself; a failed call is no acquaintance.
        Case {
            rule: 3,
            bad: |co| {
                *co = History::unacquainted();
                co.fails("Probe", json!({}), "UNAVAILABLE");
                co.ok("NodeGetCapabilities", json!({}));
            },
            good: |co| {
                co.crash();
                co.ok("NodeGetCapabilities", json!({}));
            },
        },
        Case {
            rule: 11,
            bad: |co| co.ok("CreateVolume", create(&"n".repeat(129))),
            good: |co| co.ok("CreateVolume", create(&"n".repeat(128))),
        },
        Case {
            rule: 11,
            bad: |co| {
                let secrets = json!({"bytes": 4097, "values": {"k": "d"}});
                co.ok("CreateVolume", with(create("n"), json!({"secrets": secrets})));
            },
            good: |co| {
                let secrets = json!({"bytes": 4096, "values": {"k": "d"}});
                co.ok("CreateVolume", with(create("n"), json!({"secrets": secrets})));
            },
        },
        // Mount flags, deep in a capability; a path may be long.
        Case {
            rule: 11,
            bad: |co| {
                co.attach("v");
                let mount = json!({"mount": {"mount_flags": {"bytes": 4097, "values": ["d"]}}});
                co.ok("NodeStageVolume", with(stage("v"), json!({"volume_capability": mount})));
            },
            good: |co| {
                co.up("v");
                co.publish("v", &format!("/{}", "p".repeat(500)));
            },
        },
        // What the plugin gave goes back to it however long it is.
        Case {
            rule: 11,
            bad: |co| co.ok("DeleteVolume", json!({"volume_id": "i".repeat(129)})),
            good: |co| {
                let id = "i".repeat(129);
                co.answered("CreateVolume", create("n"), json!({"volume": {"volume_id": id}}));
                co.ok("DeleteVolume", json!({"volume_id": id}));
            },
        },
        Case {
            rule: 11,
            bad: |co| {
                let required = json!({"requisite": [{"segments": {"zone": "z".repeat(4093)}}]});
                co.ok("CreateVolume", reachable(required));
            },
            good: |co| {
                let topology = json!({"segments": {"zone": "z".repeat(4093)}});
                co.answered(
                    "NodeGetInfo",
                    json!({}),
                    json!({"node_id": "n1", "accessible_topology": topology}),
                );
                let required = json!({"requisite": [topology]});
                co.ok("CreateVolume", reachable(required));
            },
        },
        Case {
            rule: 12,
            bad: |co| co.ok("CreateVolume", json!({"name": "n"})),
            good: |co| co.ok("CreateVolume", create("n")),
        },
        Case {
            rule: 12,
            bad: |co| co.ok("ControllerModifyVolume", json!({"volume_id": "v"})),
            good: |co| {
                let parameters = json!({"bytes": 2, "values": {"k": "d"}});
                co.ok("ControllerModifyVolume", json!({"volume_id": "v", "mutable_parameters": parameters}));
            },
        },
        Case {
            rule: 13,
            bad: |co| co.ok("CreateVolume", create("a\u{7}b")),
            good: |co| co.ok("CreateVolume", create("vol[0] ä/b")),
        },
        Case {
            rule: 14,
            bad: |co| {
                co.ok("CreateVolume", with(create("n"), json!({"capacity_range": {}})));
            },
            good: |co| {
                co.ok("CreateVolume", with(create("n"), json!({"capacity_range": {"limit_bytes": 1}})));
            },
        },
        Case {
            rule: 14,
            bad: |co| {
                let range = json!({"required_bytes": 5, "limit_bytes": -1});
                co.ok("ControllerExpandVolume", json!({"volume_id": "v", "capacity_range": range}));
            },
            good: |co| {
                let range = json!({"required_bytes": 5, "limit_bytes": 6});
                co.ok("ControllerExpandVolume", json!({"volume_id": "v", "capacity_range": range}));
            },
        },
        Case {
            rule: 15,
            bad: |co| {
                co.ok(
                    "CreateVolume",
                    reachable(json!({"requisite": [{"segments": {"zone": "a", "Zone": "b"}}]})),
                )
            },
            good: |co| {
                let all = json!({"requisite": [zone("a"), zone("b")], "preferred": [zone("b")]});
                co.ok("CreateVolume", reachable(all));
            },
        },
        Case {
            rule: 15,
            bad: |co| co.ok("CreateVolume", reachable(json!({}))),
            good: |co| {
                let all = json!({"requisite": [zone("a"), zone("b")], "preferred": [zone("b")]});
                co.ok("CreateVolume", reachable(all));
            },
        },
        Case {
            rule: 15,
            bad: |co| {
                co.ok("CreateVolume", reachable(json!({"requisite": [zone("a")], "preferred": [zone("b")]})))
            },
            good: |co| {
                let all = json!({"requisite": [zone("a"), zone("b")], "preferred": [zone("b")]});
                co.ok("CreateVolume", reachable(all));
            },
        },
        Case {
            rule: 15,
            bad: |co| {
                co.plugin_can(&["CONTROLLER_SERVICE"]);
                let required = json!({"requisite": [zone("a")]});
                co.ok("CreateVolume", reachable(required));
            },
            good: |co| {
                let required = json!({"preferred": [zone("a")]});
                co.ok("CreateVolume", reachable(required));
            },
        },
        Case {
            rule: 16,
            bad: |co| {
                co.controller_can(&["CREATE_DELETE_VOLUME"]);
                let parameters = json!({"bytes": 2, "values": {"k": "d"}});
                co.ok("CreateVolume", with(create("n"), json!({"mutable_parameters": parameters})));
            },
            good: |co| {
                let parameters = json!({"bytes": 2, "values": {"k": "d"}});
                co.ok("CreateVolume", with(create("n"), json!({"mutable_parameters": parameters})));
            },
        },
        Case {
            rule: 17,
            bad: |co| {
                let secrets = json!({"bytes": 9, "values": {"pass word": "d"}});
                co.ok("CreateVolume", with(create("n"), json!({"secrets": secrets})));
            },
            good: |co| {
                let secrets = json!({"bytes": 9, "values": {"Pass_word-1.x": "d"}});
                co.ok("CreateVolume", with(create("n"), json!({"secrets": secrets})));
            },
        },
        // Nobody asked: the CO cannot know.
        Case {
            rule: 19,
            bad: |co| {
                *co = History::unacquainted();
                co.ok("Probe", json!({}));
                co.ok("NodeStageVolume", stage("v"));
            },
            good: |co| co.up("v"),
        },
        Case {
            rule: 19,
            bad: |co| {
                co.node_can(&[]);
                co.fails("NodeGetVolumeStats", json!({"volume_id": "v"}), "UNIMPLEMENTED");
            },
            good: |co| {
                co.node_can(&["GET_VOLUME_STATS"]);
                co.ok("NodeGetVolumeStats", json!({"volume_id": "v"}));
                co.crash();
                co.ok("NodeGetVolumeStats", json!({"volume_id": "v"}));
            },
        },
        Case {
            rule: 19,
            bad: |co| {
                co.fails("ControllerGetCapabilities", json!({}), "UNIMPLEMENTED");
                co.ok("ListVolumes", json!({}));
            },
            good: |co| {
                co.controller_can(&["LIST_VOLUMES"]);
                // It was not answered: what was known still is.
                co.fails("ControllerGetCapabilities", json!({}), "UNAVAILABLE");
                co.ok("ListVolumes", json!({}));
            },
        },
        // A plugin that neither stages nor attaches is published at once.
        Case {
            rule: 19,
            bad: |co| {
                co.controller_can(&[]);
                co.ok("ControllerUnpublishVolume", json!({"volume_id": "v"}));
            },
            good: |co| {
                *co = History::unacquainted();
                co.ok("Probe", json!({}));
                co.controller_can(&["GET_CAPACITY"]);
                co.node_can(&[]);
                co.ok("GetCapacity", json!({}));
                co.ok("NodePublishVolume", json!({"volume_id": "v", "target_path": "/t"}));
            },
        },
        Case {
            rule: 32,
            bad: |co| {
                co.controller_can(&["PUBLISH_UNPUBLISH_VOLUME"]);
                co.ok("ControllerPublishVolume", with(attach("v"), json!({"readonly": true})));
            },
            good: |co| {
                co.ok("ControllerPublishVolume", with(attach("v"), json!({"readonly": true})));
                co.up("w");
                co.ok("NodePublishVolume", with(publish("w", "/t"), json!({"readonly": true})));
            },
        },
    ]
}

fn reachable(required: Value) -> Value {
    with(create("n"), json!({"accessibility_requirements": required}))
}

fn zone(name: &str) -> Value {
    json!({"segments": {"zone": name}})
}
