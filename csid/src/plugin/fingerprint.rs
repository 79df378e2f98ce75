//! Queries a plugin's identity and capabilities over its channel. CSI's names of capabilities are kept unchanged; numbers that csid does
//! not know are left out.

use std::collections::BTreeMap;
use std::time::Instant;

use csi_proto::csi::v1;
use v1::controller_service_capability::{Type as ControllerType, rpc::Type as ControllerRpc};
use v1::node_service_capability::{Type as NodeType, rpc::Type as NodeRpc};
use v1::plugin_capability::{
    Type as PluginType, service::Type as Service, volume_expansion::Type as Expansion,
};

use crate::plugin::answer;
use crate::plugin::rpc::{MAP_BYTES, Peer, RpcError, STRING_BYTES, map_bytes};
use crate::plugin::rpc_outcome::Class;
use crate::plugin::wire::Wire;

/// CSI rule 11.
const NODE_ID_BYTES: usize = 256;

/// The facts that do not change while the plugin's process lives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Identity {
    pub name: String,
    pub version: String,
    /// Empty where there is no node service, or one that gives none.
    pub node_id: String,
    pub max_volumes: i64,
    pub topology: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Fingerprint {
    pub identity: Identity,
    pub services: Vec<&'static str>,
    pub plugin: Vec<&'static str>,
    pub node: Vec<&'static str>,
    pub controller: Vec<&'static str>,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum FingerprintError {
    #[error(transparent)]
    Rpc(#[from] RpcError),
    #[error("GetPluginInfo: the plugin's name is empty; CSI asks for one")]
    NoName,
    #[error("NodeGetInfo: the answer breaks CSI: its node_id {0}")]
    NodeId(String),
}

/// CSI rule 37: no `ready` is ready, `false` is wait.
pub(super) async fn probe(peer: &Peer, deadline: Instant) -> Result<bool, RpcError> {
    let send = async |wire: Wire, request| wire.identity().probe(request).await;
    let answer = peer.call("Probe", deadline, v1::ProbeRequest {}, || peer.hidden(), send).await?;
    Ok(answer.ready.unwrap_or(true))
}

/// The answers of a fingerprint that failed. `None`: the plugin has not answered that call.
#[derive(Default)]
pub(super) struct PartialFingerprint {
    pub plugin: Option<Vec<&'static str>>,
    /// The service's capabilities; `Some(None)`: the plugin says that it has no such service.
    pub node: Option<Option<Vec<&'static str>>>,
    pub controller: Option<Option<Vec<&'static str>>>,
    pub identity: Option<Identity>,
}

/// Asks a ready plugin everything, or, with its `known` identity, only for its capabilities. A call that fails keeps no other
/// from being made: `facts` has what was answered.
pub(super) async fn take(
    peer: &Peer,
    known: Option<&Identity>,
    deadline: Instant,
    facts: &mut PartialFingerprint,
) -> Result<Fingerprint, FingerprintError> {
    let mut print = Fingerprint::default();
    let name = match known {
        Some(_) => None,
        None => {
            let send = async |wire: Wire, request| wire.identity().get_plugin_info(request).await;
            let request = v1::GetPluginInfoRequest {};
            let info = peer.call("GetPluginInfo", deadline, request, || peer.hidden(), send).await?;
            if info.name.is_empty() {
                return Err(FingerprintError::NoName);
            }
            peer.warn_if_long("manifest", map_bytes(&info.manifest), MAP_BYTES);
            Some((info.name, info.vendor_version))
        }
    };

    let send = async |wire: Wire, request| wire.identity().get_plugin_capabilities(request).await;
    let request = v1::GetPluginCapabilitiesRequest {};
    let answer = peer.call("GetPluginCapabilities", deadline, request, || peer.hidden(), send).await?;
    let plugin: Vec<PluginType> = answer.capabilities.into_iter().filter_map(|c| c.r#type).collect();
    let has = |service: Service| {
        plugin.iter().any(|p| matches!(p, PluginType::Service(s) if s.r#type == i32::from(service)))
    };
    print.plugin = plugin.iter().filter_map(plugin_name).collect();
    facts.plugin = Some(print.plugin.clone());

    let send = async |wire: Wire, request| wire.node().node_get_capabilities(request).await;
    let request = v1::NodeGetCapabilitiesRequest {};
    let node = served(peer.call("NodeGetCapabilities", deadline, request, || peer.hidden(), send).await);
    let node = node.map(|answer| Some(answer?.capabilities.iter().filter_map(node_name).collect::<Vec<_>>()));
    facts.node = node.clone().ok();
    // A driver's node half often names the controller service and does not serve it (CSI rule 10).
    let controller = if has(Service::ControllerService) {
        let send = async |wire: Wire, request| wire.controller().controller_get_capabilities(request).await;
        let request = v1::ControllerGetCapabilitiesRequest {};
        let answer = peer.call("ControllerGetCapabilities", deadline, request, || peer.hidden(), send).await;
        served(answer)
            .map(|answer| Some(answer?.capabilities.iter().filter_map(controller_name).collect::<Vec<_>>()))
    } else {
        Ok(None)
    };
    facts.controller = controller.clone().ok();

    let identity = match (known, name) {
        (Some(known), _) => Ok(known.clone()),
        (None, name) => {
            let (name, version) = name.unwrap_or_default();
            let mut identity = Identity { name, version, ..Identity::default() };
            let asked = match node {
                Ok(Some(_)) => node_info(peer, deadline, &mut identity).await,
                _ => Ok(()),
            };
            peer.warn_if_long("name", identity.name.len(), STRING_BYTES);
            peer.warn_if_long("vendor_version", identity.version.len(), STRING_BYTES);
            peer.warn_if_long("node_id", identity.node_id.len(), NODE_ID_BYTES);
            facts.identity = (asked.is_ok() && node.is_ok()).then(|| identity.clone());
            asked.map(|()| identity)
        }
    };
    if let Some(node) = node? {
        print.services.push("node");
        print.node = node;
    }
    if let Some(controller) = controller? {
        print.services.push("controller");
        print.controller = controller;
    }
    if has(Service::GroupControllerService) {
        print.services.push("group-controller");
    }
    print.identity = identity?;
    Ok(print)
}

/// NodeGetInfo is asked for only of plugins that attach; another may leave it out.
async fn node_info(peer: &Peer, deadline: Instant, identity: &mut Identity) -> Result<(), FingerprintError> {
    let send = async |wire: Wire, request| wire.node().node_get_info(request).await;
    let request = v1::NodeGetInfoRequest {};
    let answer = peer.call("NodeGetInfo", deadline, request, || peer.hidden(), send).await;
    let Some(info) = served(answer)? else { return Ok(()) };
    answer::id(&info.node_id).map_err(FingerprintError::NodeId)?;
    identity.node_id = info.node_id;
    // CSI allows no negative one; no limit is what it can mean.
    identity.max_volumes = info.max_volumes_per_node.max(0);
    let topology = info.accessible_topology.unwrap_or_default().segments;
    peer.warn_if_long("accessible_topology", map_bytes(&topology), MAP_BYTES);
    // Every listener to the plugin's properties receives it, so an over-long one is dropped.
    if map_bytes(&topology) <= MAP_BYTES {
        identity.topology = topology;
    }
    Ok(())
}

/// `None` for a service that the plugin does not have.
fn served<T>(answer: Result<T, RpcError>) -> Result<Option<T>, RpcError> {
    match answer {
        Err(error) if error.class == Class::Unimplemented => Ok(None),
        answer => answer.map(Some),
    }
}

fn plugin_name(capability: &PluginType) -> Option<&'static str> {
    match capability {
        PluginType::Service(service) => {
            Service::try_from(service.r#type).ok().filter(|t| *t != Service::Unknown).map(|t| t.as_str_name())
        }
        PluginType::VolumeExpansion(expansion) => Expansion::try_from(expansion.r#type)
            .ok()
            .filter(|t| *t != Expansion::Unknown)
            .map(|t| t.as_str_name()),
    }
}

fn node_name(capability: &v1::NodeServiceCapability) -> Option<&'static str> {
    let Some(NodeType::Rpc(rpc)) = &capability.r#type else { return None };
    NodeRpc::try_from(rpc.r#type).ok().filter(|t| *t != NodeRpc::Unknown).map(|t| t.as_str_name())
}

fn controller_name(capability: &v1::ControllerServiceCapability) -> Option<&'static str> {
    let Some(ControllerType::Rpc(rpc)) = &capability.r#type else { return None };
    ControllerRpc::try_from(rpc.r#type).ok().filter(|t| *t != ControllerRpc::Unknown).map(|t| t.as_str_name())
}
