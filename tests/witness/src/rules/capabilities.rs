//! The plugin's capabilities, and the rules on requests that need one: 15 (in part), 16, 19, 32. The CO does not know capabilities that
//! it never queried.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{Call, Outcome, Verdict};

/// By host and the plugin's socket there: its node half and its controllers may be processes of their own, each with its own answers.
#[derive(Default)]
pub(super) struct Capabilities {
    sockets: BTreeMap<(usize, usize), Answers>,
}

#[derive(Default)]
struct Answers {
    /// The set of each Get*Capabilities answer; absent until there was one.
    capabilities: BTreeMap<Side, BTreeSet<String>>,
    /// NodeGetInfo's answer. `None`: there was none.
    node_id: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
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
    /// Returns the answers of all sockets.
    fn answers(&self, side: Side) -> impl Iterator<Item = &BTreeSet<String>> {
        self.sockets.values().filter_map(move |answers| answers.capabilities.get(&side))
    }

    fn any(&self, side: Side, capability: &str) -> bool {
        self.answers(side).any(|known| known.contains(capability))
    }

    /// By the socket's own answer. Where it was not asked, another's may be taken for it: it is the same plugin.
    fn has(&self, call: &Call, side: Side, capability: &str) -> bool {
        let own = self.sockets.get(&socket(call)).and_then(|answers| answers.capabilities.get(&side));
        own.map_or_else(|| self.any(side, capability), |known| known.contains(capability))
    }

    /// `None` where nobody asked.
    pub(super) fn attaches(&self) -> Option<bool> {
        self.answers(Side::Controller).next()?;
        Some(self.any(Side::Controller, "PUBLISH_UNPUBLISH_VOLUME"))
    }

    pub(super) fn stages(&self) -> bool {
        self.any(Side::Node, "STAGE_UNSTAGE_VOLUME")
    }

    pub(super) fn expands_offline_only(&self) -> bool {
        self.any(Side::Plugin, "OFFLINE") && !self.any(Side::Plugin, "ONLINE")
    }

    /// Returns the id of the node that the plugin runs on there. `None`: it is not known.
    pub(super) fn node_id(&self, host: usize) -> Option<&str> {
        let of_host = self.sockets.iter().filter(|((at, _), _)| *at == host);
        of_host.into_iter().find_map(|(_, answers)| answers.node_id.as_deref())
    }

    /// Whether a node is another host than this one.
    pub(super) fn is_elsewhere(&self, node: &str, host: usize) -> bool {
        self.sockets.iter().any(|((at, _), answers)| *at != host && answers.node_id.as_deref() == Some(node))
    }

    pub(super) fn begin(&self, call: &Call, verdict: &mut Verdict) {
        let mut check = |rule, side, capability: &str, what: &str| {
            let holds = self.has(call, side, capability);
            verdict.check(rule, holds, &[call.id], || match self.answers(side).next() {
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
        let side = match call.rpc.as_str() {
            "GetPluginCapabilities" => Side::Plugin,
            "ControllerGetCapabilities" => Side::Controller,
            "GroupControllerGetCapabilities" => Side::Group,
            "NodeGetCapabilities" => Side::Node,
            "NodeGetInfo" => {
                let node_id = answer["node_id"].as_str().map(str::to_owned);
                self.sockets.entry(socket(call)).or_default().node_id = node_id;
                return;
            }
            _ => return,
        };
        self.sockets.entry(socket(call)).or_default().capabilities.insert(side, listed(answer));
    }
}

fn socket(call: &Call) -> (usize, usize) {
    (call.host(), call.peers.socket)
}

/// Each is `{"rpc": {"type": …}}`, of the plugin also `service` or `volume_expansion`.
fn listed(answer: &Value) -> BTreeSet<String> {
    let all = answer["capabilities"].as_array().into_iter().flatten();
    let types = all.filter_map(|one| one.as_object()?.values().next()?["type"].as_str());
    types.map(str::to_owned).collect()
}
