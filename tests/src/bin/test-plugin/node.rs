//! The Node service.

use csi_proto::csi::v1::*;
use csid_tests::backend::{Backend, Volume};
use csid_tests::script::{Call, Script, has};
use tonic::{Request, Status, async_trait};

use crate::effects::{self, internal};
use crate::service::{Answer, Plugin, call, pairs, with_capability};
use crate::volumes::TOKEN;

/// Whether the volume may be staged or published here: as the controller knows it, where the plugin has one.
fn usable(backend: &Backend, script: &Script, call: &Call) -> Result<(), Status> {
    if script.controller.is_empty() {
        return Ok(());
    }
    let volume = match backend.get::<Volume>(&call.volume).map_err(internal)? {
        Some(volume) => volume,
        None if script.attaches() || has(&script.controller, "CREATE_DELETE_VOLUME") => {
            return Err(Status::not_found("no such volume"));
        }
        None => return Ok(()),
    };
    if volume.order.is_some() && !call.context.iter().eq(pairs(volume.context).iter()) {
        return Err(Status::invalid_argument("not the volume's volume_context (CO rule 31)"));
    }
    if script.attaches() {
        let attachment = volume.attachments.get(&script.node_id);
        let attachment = attachment
            .ok_or_else(|| Status::failed_precondition("the volume is not attached here (CO rule 20)"))?;
        if call.publish_context != [(TOKEN.to_owned(), attachment.token.clone())] {
            return Err(Status::failed_precondition("not the attachment's publish_context (CO rule 31)"));
        }
    }
    Ok(())
}

#[async_trait]
impl node_server::Node for Plugin {
    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Answer<NodeStageVolumeResponse> {
        let r = request.into_inner();
        let call = Call {
            staging: r.staging_target_path,
            context: pairs(r.volume_context),
            publish_context: pairs(r.publish_context),
            secrets: pairs(r.secrets),
            ..call("NodeStageVolume", r.volume_id)
        };
        let backend = self.backend.clone();
        self.run(with_capability(call, r.volume_capability), move |script, call, lie| {
            usable(&backend, script, call)?;
            effects::stage(&backend, script, call, lie).map(|()| NodeStageVolumeResponse {})
        })
        .await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Answer<NodeUnstageVolumeResponse> {
        let r = request.into_inner();
        let call = Call { staging: r.staging_target_path, ..call("NodeUnstageVolume", r.volume_id) };
        let backend = self.backend.clone();
        self.run(call, move |script, call, lie| match lie {
            Some(_) => Ok(NodeUnstageVolumeResponse {}),
            None if script.counts_publishes
                && backend.count_published(&call.volume, 0).map_err(internal)? > 0 =>
            {
                Err(Status::failed_precondition("the volume is still published (CO rule 22)"))
            }
            None => effects::unstage(&backend, call).map(|()| NodeUnstageVolumeResponse {}),
        })
        .await
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Answer<NodePublishVolumeResponse> {
        let r = request.into_inner();
        let call = Call {
            staging: r.staging_target_path,
            target: r.target_path,
            read_only: r.readonly,
            context: pairs(r.volume_context),
            publish_context: pairs(r.publish_context),
            secrets: pairs(r.secrets),
            ..call("NodePublishVolume", r.volume_id)
        };
        let backend = self.backend.clone();
        self.run(with_capability(call, r.volume_capability), move |script, call, lie| {
            usable(&backend, script, call)?;
            let was_there = effects::is_there(call)?;
            effects::publish(&backend, script, call, lie)?;
            if script.counts_publishes && !was_there {
                backend.count_published(&call.volume, 1).map_err(internal)?;
            }
            Ok(NodePublishVolumeResponse {})
        })
        .await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Answer<NodeUnpublishVolumeResponse> {
        let r = request.into_inner();
        let call = Call { target: r.target_path, ..call("NodeUnpublishVolume", r.volume_id) };
        let backend = self.backend.clone();
        self.run(call, move |script, call, lie| {
            if script.counts_publishes {
                backend.count_published(&call.volume, -1).map_err(internal)?;
            }
            match lie {
                Some(_) => Ok(NodeUnpublishVolumeResponse {}),
                None => effects::unpublish(&backend, call).map(|()| NodeUnpublishVolumeResponse {}),
            }
        })
        .await
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Answer<NodeGetCapabilitiesResponse> {
        use node_service_capability::{Rpc, Type, rpc};
        self.run(call("NodeGetCapabilities", String::new()), |script, _, _| {
            let capability = |name: &String| {
                let known = rpc::Type::from_str_name(name).unwrap_or(rpc::Type::Unknown);
                NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: known.into() })) }
            };
            Ok(NodeGetCapabilitiesResponse {
                capabilities: script.capabilities.iter().map(capability).collect(),
            })
        })
        .await
    }

    async fn node_get_info(&self, _: Request<NodeGetInfoRequest>) -> Answer<NodeGetInfoResponse> {
        self.run(call("NodeGetInfo", String::new()), |script, _, _| {
            let topology = Topology { segments: script.topology.clone() };
            Ok(NodeGetInfoResponse {
                node_id: script.node_id.clone(),
                max_volumes_per_node: script.max_volumes,
                accessible_topology: Some(topology).filter(|topology| !topology.segments.is_empty()),
            })
        })
        .await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Answer<NodeGetVolumeStatsResponse> {
        let r = request.into_inner();
        let call = Call {
            target: r.volume_path,
            staging: r.staging_target_path,
            ..call("NodeGetVolumeStats", r.volume_id)
        };
        let backend = self.backend.clone();
        self.run(call, move |_, call, _| {
            let usage = effects::usage(&backend, call)?;
            Ok(NodeGetVolumeStatsResponse { usage, ..Default::default() })
        })
        .await
    }

    async fn node_expand_volume(
        &self,
        request: Request<NodeExpandVolumeRequest>,
    ) -> Answer<NodeExpandVolumeResponse> {
        let r = request.into_inner();
        let range = r.capacity_range.unwrap_or_default();
        let call = Call {
            target: r.volume_path,
            staging: r.staging_target_path,
            required_bytes: range.required_bytes,
            limit_bytes: range.limit_bytes,
            secrets: pairs(r.secrets),
            ..call("NodeExpandVolume", r.volume_id)
        };
        let backend = self.backend.clone();
        self.run(with_capability(call, r.volume_capability), move |_, call, lie| match lie {
            Some(_) => Ok(NodeExpandVolumeResponse { capacity_bytes: call.required_bytes }),
            None => effects::grow(&backend, call)
                .map(|capacity_bytes| NodeExpandVolumeResponse { capacity_bytes }),
        })
        .await
    }

    async fn node_get_volume_health(
        &self,
        _: Request<NodeGetVolumeHealthRequest>,
    ) -> Answer<NodeGetVolumeHealthResponse> {
        Err(Status::unimplemented("not this plugin"))
    }

    async fn node_get_storage_health(
        &self,
        _: Request<NodeGetStorageHealthRequest>,
    ) -> Answer<NodeGetStorageHealthResponse> {
        Err(Status::unimplemented("not this plugin"))
    }
}
