//! A plugin that has every service, says yes to everything and does nothing.

use std::collections::BTreeMap;
use std::sync::Mutex;

use csi_proto::csi::v1::controller_server::Controller;
use csi_proto::csi::v1::identity_server::Identity;
use csi_proto::csi::v1::node_server::Node;
use csi_proto::csi::v1::*;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Request, Response, Status};

#[derive(Default)]
pub struct Plugin {
    /// What came with the last Probe.
    pub metadata: Mutex<Option<MetadataMap>>,
    /// As they came.
    pub staged: Mutex<Vec<NodeStageVolumeRequest>>,
    /// How many calls were dropped before they had an answer.
    pub cancelled: Mutex<usize>,
}

struct Cancelled<'a>(&'a Plugin);

impl Drop for Cancelled<'_> {
    fn drop(&mut self) {
        *self.0.cancelled.lock().unwrap() += 1;
    }
}

/// The volume whose stage is never answered.
pub const ENDLESS: &str = "endless";
/// The volume whose publish is refused, with details.
pub const REFUSED: &str = "refused";

fn map(key: &str, value: &str) -> BTreeMap<String, String> {
    BTreeMap::from([(key.to_owned(), value.to_owned())])
}

/// Each answers its request with a message.
macro_rules! answers {
    ($($method:ident($plugin:pat, $request:pat_param in $input:ty) -> $output:ty $answer:block)*) => {
        $(fn $method<'a, 'b>(
            &'a self,
            request: Request<$input>,
        ) -> std::pin::Pin<Box<dyn Future<Output = Result<Response<$output>, Status>> + Send + 'b>>
        where
            'a: 'b,
            Self: 'b,
        {
            Box::pin(async move {
                let ($plugin, $request) = (self, request);
                Ok(Response::new($answer))
            })
        })*
    };
}

fn plugin_can(service: plugin_capability::service::Type) -> PluginCapability {
    let service = plugin_capability::Service { r#type: service.into() };
    PluginCapability { r#type: Some(plugin_capability::Type::Service(service)) }
}

impl Identity for Plugin {
    answers! {
        get_plugin_info(_, _ in GetPluginInfoRequest) -> GetPluginInfoResponse {
            GetPluginInfoResponse { name: "yes.example".into(), vendor_version: "1".into(), manifest: map("a", "b") }
        }
        get_plugin_capabilities(_, _ in GetPluginCapabilitiesRequest) -> GetPluginCapabilitiesResponse {
            use plugin_capability::service::Type;
            let all = [Type::ControllerService, Type::VolumeAccessibilityConstraints];
            GetPluginCapabilitiesResponse { capabilities: all.map(plugin_can).into() }
        }
        probe(plugin, request in ProbeRequest) -> ProbeResponse {
            *plugin.metadata.lock().unwrap() = Some(request.metadata().clone());
            ProbeResponse { ready: Some(true) }
        }
    }
}

impl Node for Plugin {
    answers! {
        node_stage_volume(plugin, request in NodeStageVolumeRequest) -> NodeStageVolumeResponse {
            let request = request.into_inner();
            let endless = request.volume_id == ENDLESS;
            plugin.staged.lock().unwrap().push(request);
            if endless {
                let _cancelled = Cancelled(plugin);
                std::future::pending::<()>().await;
            }
            NodeStageVolumeResponse {}
        }
        node_unstage_volume(_, _ in NodeUnstageVolumeRequest) -> NodeUnstageVolumeResponse {
            NodeUnstageVolumeResponse {}
        }
        node_publish_volume(_, request in NodePublishVolumeRequest) -> NodePublishVolumeResponse {
            if request.get_ref().volume_id == REFUSED {
                let mut status = Status::with_details(
                    tonic::Code::FailedPrecondition,
                    "not so: \u{e4}",
                    b"\x00details".as_slice().into(),
                );
                status.metadata_mut().insert("x-why", MetadataValue::from_static("because"));
                return Err(status);
            }
            NodePublishVolumeResponse {}
        }
        node_unpublish_volume(_, _ in NodeUnpublishVolumeRequest) -> NodeUnpublishVolumeResponse {
            NodeUnpublishVolumeResponse {}
        }
        node_get_volume_stats(_, _ in NodeGetVolumeStatsRequest) -> NodeGetVolumeStatsResponse {
            NodeGetVolumeStatsResponse::default()
        }
        node_get_volume_health(_, _ in NodeGetVolumeHealthRequest) -> NodeGetVolumeHealthResponse {
            NodeGetVolumeHealthResponse::default()
        }
        node_get_storage_health(_, _ in NodeGetStorageHealthRequest) -> NodeGetStorageHealthResponse {
            NodeGetStorageHealthResponse::default()
        }
        node_expand_volume(_, _ in NodeExpandVolumeRequest) -> NodeExpandVolumeResponse {
            NodeExpandVolumeResponse::default()
        }
        node_get_capabilities(_, _ in NodeGetCapabilitiesRequest) -> NodeGetCapabilitiesResponse {
            use node_service_capability::{Rpc, Type, rpc};
            let all = [rpc::Type::StageUnstageVolume, rpc::Type::GetVolumeStats, rpc::Type::ExpandVolume];
            let one = |kind: rpc::Type| NodeServiceCapability {
                r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })),
            };
            NodeGetCapabilitiesResponse { capabilities: all.map(one).into() }
        }
        node_get_info(_, _ in NodeGetInfoRequest) -> NodeGetInfoResponse {
            NodeGetInfoResponse { node_id: "node-1".into(), ..Default::default() }
        }
    }
}

impl Controller for Plugin {
    answers! {
        create_volume(_, request in CreateVolumeRequest) -> CreateVolumeResponse {
            let volume_id = format!("id-{}", request.get_ref().name);
            let volume = Volume { volume_id, volume_context: map("pool", "fast"), ..Default::default() };
            CreateVolumeResponse { volume: Some(volume) }
        }
        delete_volume(_, _ in DeleteVolumeRequest) -> DeleteVolumeResponse { DeleteVolumeResponse {} }
        controller_publish_volume(_, _ in ControllerPublishVolumeRequest) -> ControllerPublishVolumeResponse {
            ControllerPublishVolumeResponse { publish_context: map("device", "/dev/x") }
        }
        controller_unpublish_volume(_, _ in ControllerUnpublishVolumeRequest)
            -> ControllerUnpublishVolumeResponse { ControllerUnpublishVolumeResponse {} }
        validate_volume_capabilities(_, request in ValidateVolumeCapabilitiesRequest)
            -> ValidateVolumeCapabilitiesResponse {
            let volume_capabilities = request.into_inner().volume_capabilities;
            let confirmed =
                validate_volume_capabilities_response::Confirmed { volume_capabilities, ..Default::default() };
            ValidateVolumeCapabilitiesResponse { confirmed: Some(confirmed), ..Default::default() }
        }
        list_volumes(_, _ in ListVolumesRequest) -> ListVolumesResponse { ListVolumesResponse::default() }
        controller_list_volume_health(_, _ in ControllerListVolumeHealthRequest)
            -> ControllerListVolumeHealthResponse { ControllerListVolumeHealthResponse::default() }
        controller_get_volume_health(_, _ in ControllerGetVolumeHealthRequest)
            -> ControllerGetVolumeHealthResponse { ControllerGetVolumeHealthResponse::default() }
        get_capacity(_, _ in GetCapacityRequest) -> GetCapacityResponse { GetCapacityResponse::default() }
        controller_get_capabilities(_, _ in ControllerGetCapabilitiesRequest)
            -> ControllerGetCapabilitiesResponse {
            use controller_service_capability::{Rpc, Type, rpc};
            let all = [
                rpc::Type::CreateDeleteVolume,
                rpc::Type::PublishUnpublishVolume,
                rpc::Type::PublishReadonly,
                rpc::Type::ModifyVolume,
                rpc::Type::ExpandVolume,
            ];
            let one = |kind: rpc::Type| ControllerServiceCapability {
                r#type: Some(Type::Rpc(Rpc { r#type: kind.into() })),
            };
            ControllerGetCapabilitiesResponse { capabilities: all.map(one).into() }
        }
        create_snapshot(_, _ in CreateSnapshotRequest) -> CreateSnapshotResponse {
            CreateSnapshotResponse::default()
        }
        delete_snapshot(_, _ in DeleteSnapshotRequest) -> DeleteSnapshotResponse { DeleteSnapshotResponse {} }
        list_snapshots(_, _ in ListSnapshotsRequest) -> ListSnapshotsResponse {
            ListSnapshotsResponse::default()
        }
        get_snapshot(_, _ in GetSnapshotRequest) -> GetSnapshotResponse { GetSnapshotResponse::default() }
        controller_expand_volume(_, _ in ControllerExpandVolumeRequest) -> ControllerExpandVolumeResponse {
            ControllerExpandVolumeResponse { node_expansion_required: true, ..Default::default() }
        }
        controller_get_volume(_, _ in ControllerGetVolumeRequest) -> ControllerGetVolumeResponse {
            ControllerGetVolumeResponse::default()
        }
        controller_modify_volume(_, _ in ControllerModifyVolumeRequest) -> ControllerModifyVolumeResponse {
            ControllerModifyVolumeResponse {}
        }
    }
}
