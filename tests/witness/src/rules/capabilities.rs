//! What the plugin said that it can, and the rules on what is sent only then: 15 (in part), 16, 19, 32. What the CO never
//! asked for it cannot know.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{Call, Outcome, Verdict};

/// One set per Get*Capabilities answer; `None` until there was one.
#[derive(Default)]
pub(super) struct Capabilities {
    plugin: Option<BTreeSet<String>>,
    controller: Option<BTreeSet<String>>,
    group: Option<BTreeSet<String>>,
    node: Option<BTreeSet<String>>,
    /// What NodeGetInfo answered.
    pub(super) node_id: Option<String>,
}

#[derive(Clone, Copy)]
enum Side {
    Plugin,
    Controller,
    Group,
    Node,
}

/// The capability that an RPC needs (CO rule 19).
fn gate(rpc: &str) -> Option<(Side, &'static str)> {
    Some(match rpc {
        "CreateVolume" | "DeleteVolume" => (Side::Controller, "CREATE_DELETE_VOLUME"),
        "ControllerPublishVolume" | "ControllerUnpublishVolume" => {
            (Side::Controller, "PUBLISH_UNPUBLISH_VOLUME")
        }
        "ValidateVolumeCapabilities" => (Side::Plugin, "CONTROLLER_SERVICE"),
        "ListVolumes" => (Side::Controller, "LIST_VOLUMES"),
        "ControllerListVolumeHealth" => (Side::Controller, "LIST_VOLUME_HEALTH"),
        "ControllerGetVolumeHealth" => (Side::Controller, "GET_VOLUME_HEALTH"),
        "GetCapacity" => (Side::Controller, "GET_CAPACITY"),
        "CreateSnapshot" | "DeleteSnapshot" => (Side::Controller, "CREATE_DELETE_SNAPSHOT"),
        "ListSnapshots" => (Side::Controller, "LIST_SNAPSHOTS"),
        "GetSnapshot" => (Side::Controller, "GET_SNAPSHOT"),
        "ControllerExpandVolume" => (Side::Controller, "EXPAND_VOLUME"),
        "ControllerGetVolume" => (Side::Controller, "GET_VOLUME"),
        "ControllerModifyVolume" => (Side::Controller, "MODIFY_VOLUME"),
        "CreateVolumeGroupSnapshot" | "DeleteVolumeGroupSnapshot" | "GetVolumeGroupSnapshot" => {
            (Side::Group, "CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT")
        }
        "GetMetadataAllocated" | "GetMetadataDelta" => (Side::Plugin, "SNAPSHOT_METADATA_SERVICE"),
        "NodeStageVolume" | "NodeUnstageVolume" => (Side::Node, "STAGE_UNSTAGE_VOLUME"),
        "NodeGetVolumeStats" => (Side::Node, "GET_VOLUME_STATS"),
        "NodeGetVolumeHealth" => (Side::Node, "GET_VOLUME_HEALTH"),
        "NodeGetStorageHealth" => (Side::Node, "GET_STORAGE_HEALTH"),
        "NodeExpandVolume" => (Side::Node, "EXPAND_VOLUME"),
        _ => return None,
    })
}

impl Capabilities {
    fn side(&self, side: Side) -> Option<&BTreeSet<String>> {
        match side {
            Side::Plugin => self.plugin.as_ref(),
            Side::Controller => self.controller.as_ref(),
            Side::Group => self.group.as_ref(),
            Side::Node => self.node.as_ref(),
        }
    }

    fn has(&self, side: Side, capability: &str) -> bool {
        self.side(side).is_some_and(|known| known.contains(capability))
    }

    /// `None` where nobody asked.
    pub(super) fn attaches(&self) -> Option<bool> {
        self.controller.as_ref().map(|known| known.contains("PUBLISH_UNPUBLISH_VOLUME"))
    }

    pub(super) fn stages(&self) -> bool {
        self.has(Side::Node, "STAGE_UNSTAGE_VOLUME")
    }

    pub(super) fn expands_offline_only(&self) -> bool {
        self.has(Side::Plugin, "OFFLINE") && !self.has(Side::Plugin, "ONLINE")
    }

    pub(super) fn begin(&self, call: &Call, verdict: &mut Verdict) {
        let mut check = |rule, side, capability: &str, what: &str| {
            verdict.check(rule, self.has(side, capability), &[call.id], || match self.side(side) {
                Some(_) => format!("{what}, and the plugin has no {capability}"),
                None => format!("{what}, and nobody asked the plugin whether it has {capability}"),
            });
        };
        let rpc = call.rpc.as_str();
        if let Some((side, capability)) = gate(rpc) {
            check(19, side, capability, rpc);
        }
        if !call.request["mutable_parameters"].is_null() && rpc != "ControllerModifyVolume" {
            check(16, Side::Controller, "MODIFY_VOLUME", &format!("{rpc} with mutable_parameters"));
        }
        if rpc == "ControllerPublishVolume" && call.request["readonly"] == true {
            check(32, Side::Controller, "PUBLISH_READONLY", "ControllerPublishVolume with readonly");
        }
        let topology = ["accessibility_requirements", "accessible_topology"];
        if topology.iter().any(|field| !call.request[*field].is_null()) {
            let capability = match rpc {
                "CreateSnapshot" => "SNAPSHOT_ACCESSIBILITY_CONSTRAINTS",
                _ => "VOLUME_ACCESSIBILITY_CONSTRAINTS",
            };
            check(15, Side::Plugin, capability, &format!("{rpc} with a topology"));
        }
    }

    pub(super) fn end(&mut self, call: &Call, outcome: &Outcome) {
        let answer = match outcome {
            Outcome::Ok(answer) => *answer,
            // The service is not there, and so is none of its capabilities.
            Outcome::Refused("UNIMPLEMENTED") => &Value::Null,
            _ => return,
        };
        match call.rpc.as_str() {
            "GetPluginCapabilities" => self.plugin = Some(listed(answer)),
            "ControllerGetCapabilities" => self.controller = Some(listed(answer)),
            "GroupControllerGetCapabilities" => self.group = Some(listed(answer)),
            "NodeGetCapabilities" => self.node = Some(listed(answer)),
            "NodeGetInfo" => self.node_id = answer["node_id"].as_str().map(str::to_owned),
            _ => {}
        }
    }
}

/// Each is `{"rpc": {"type": …}}`, of the plugin also `service` or `volume_expansion`.
fn listed(answer: &Value) -> BTreeSet<String> {
    let all = answer["capabilities"].as_array().into_iter().flatten();
    let types = all.filter_map(|one| one.as_object()?.values().next()?["type"].as_str());
    types.map(str::to_owned).collect()
}
