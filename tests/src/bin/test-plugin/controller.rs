//! The Controller service: decodes, does it to the backend (`volumes`), encodes.

use csi_proto::csi::v1::{self, *};
use csid_tests::backend::{Backend, Snapshot, Volume};
use csid_tests::script::{Call, Lie, Script, has};
use tonic::{Request, Status, async_trait};

use crate::effects::internal;
use crate::service::{Answer, Plugin, call, pairs, with_capability};
use crate::volumes::{self, TOKEN, page};

impl Plugin {
    /// Run what looks at the backend and changes it in one go. A lie does nothing.
    async fn control<T: Default + Send + 'static>(
        &self,
        call: Call,
        effect: impl FnOnce(&Backend, &Script, &Call) -> Result<T, Status> + Send + 'static,
    ) -> Answer<T> {
        let backend = self.backend.clone();
        self.run(call, move |script, call, lie| {
            if lie == Some(Lie::Nothing) {
                return Ok(T::default());
            }
            let _lock = backend.lock().map_err(internal)?;
            effect(&backend, script, call)
        })
        .await
    }
}

#[async_trait]
impl controller_server::Controller for Plugin {
    async fn create_volume(&self, request: Request<CreateVolumeRequest>) -> Answer<CreateVolumeResponse> {
        let r = request.into_inner();
        let range = r.capacity_range.unwrap_or_default();
        let call = Call {
            required_bytes: range.required_bytes,
            limit_bytes: range.limit_bytes,
            parameters: pairs(r.parameters.clone()),
            secrets: pairs(r.secrets.clone()),
            ..call("CreateVolume", r.name.clone())
        };
        self.control(call, move |backend, script, _| {
            let volume = volumes::create(backend, script, &r)?;
            Ok(CreateVolumeResponse {
                volume: Some(v1::Volume { content_source: r.volume_content_source, ..volume }),
            })
        })
        .await
    }

    async fn delete_volume(&self, request: Request<DeleteVolumeRequest>) -> Answer<DeleteVolumeResponse> {
        let r = request.into_inner();
        let call = Call { secrets: pairs(r.secrets), ..call("DeleteVolume", r.volume_id) };
        self.control(call, |backend, _, call| {
            volumes::delete(backend, &call.volume).map(|()| DeleteVolumeResponse {})
        })
        .await
    }

    async fn controller_publish_volume(
        &self,
        request: Request<ControllerPublishVolumeRequest>,
    ) -> Answer<ControllerPublishVolumeResponse> {
        let r = request.into_inner();
        let call = Call {
            node: r.node_id.clone(),
            read_only: r.readonly,
            context: pairs(r.volume_context.clone()),
            secrets: pairs(r.secrets.clone()),
            ..call("ControllerPublishVolume", r.volume_id.clone())
        };
        let call = with_capability(call, r.volume_capability.clone());
        self.control(call, move |backend, script, call| {
            let token = volumes::attach(backend, script, call, &r)?;
            Ok(ControllerPublishVolumeResponse { publish_context: [(TOKEN.to_owned(), token)].into() })
        })
        .await
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<ControllerUnpublishVolumeRequest>,
    ) -> Answer<ControllerUnpublishVolumeResponse> {
        let r = request.into_inner();
        let call = Call {
            node: r.node_id,
            secrets: pairs(r.secrets),
            ..call("ControllerUnpublishVolume", r.volume_id)
        };
        self.control(call, |backend, _, call| {
            volumes::detach(backend, call).map(|()| ControllerUnpublishVolumeResponse {})
        })
        .await
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<ValidateVolumeCapabilitiesRequest>,
    ) -> Answer<ValidateVolumeCapabilitiesResponse> {
        let r = request.into_inner();
        let call = Call {
            context: pairs(r.volume_context.clone()),
            parameters: pairs(r.parameters.clone()),
            secrets: pairs(r.secrets.clone()),
            ..call("ValidateVolumeCapabilities", r.volume_id.clone())
        };
        let call = with_capability(call, r.volume_capabilities.first().cloned());
        self.control(call, move |backend, _, _| {
            let confirmed = volumes::confirm(backend, r)?;
            let message = if confirmed.is_some() { "" } else { "the volume was not made for that" };
            Ok(ValidateVolumeCapabilitiesResponse { confirmed, message: message.to_owned() })
        })
        .await
    }

    async fn list_volumes(&self, request: Request<ListVolumesRequest>) -> Answer<ListVolumesResponse> {
        let r = request.into_inner();
        self.control(call("ListVolumes", String::new()), move |backend, script, _| {
            let all = backend.all::<Volume>().map_err(internal)?;
            let (page, next_token) = page(all, r.max_entries, &r.starting_token, script)?;
            let tells_nodes = has(&script.controller, "LIST_VOLUMES_PUBLISHED_NODES");
            let entry = |volume: &Volume| list_volumes_response::Entry {
                volume: Some(volumes::shown(volume)),
                status: tells_nodes.then(|| list_volumes_response::VolumeStatus {
                    published_node_ids: volume.attachments.keys().cloned().collect(),
                    ..Default::default()
                }),
            };
            Ok(ListVolumesResponse { entries: page.iter().map(entry).collect(), next_token })
        })
        .await
    }

    async fn get_capacity(&self, request: Request<GetCapacityRequest>) -> Answer<GetCapacityResponse> {
        let r = request.into_inner();
        let call = Call { parameters: pairs(r.parameters), ..call("GetCapacity", String::new()) };
        self.control(call, move |backend, script, _| {
            let is_here = r.accessible_topology.is_none_or(|place| place.segments == script.topology);
            let left = volumes::left(backend, script).map_err(internal)?;
            Ok(GetCapacityResponse {
                available_capacity: if is_here { left } else { 0 },
                ..Default::default()
            })
        })
        .await
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<ControllerGetCapabilitiesRequest>,
    ) -> Answer<ControllerGetCapabilitiesResponse> {
        use controller_service_capability::{Rpc, Type, rpc};
        self.run(call("ControllerGetCapabilities", String::new()), |script, _, _| {
            let capability = |name: &String| {
                let known = rpc::Type::from_str_name(name).unwrap_or(rpc::Type::Unknown);
                ControllerServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: known.into() })) }
            };
            let capabilities = script.controller.iter().map(capability).collect();
            Ok(ControllerGetCapabilitiesResponse { capabilities })
        })
        .await
    }

    async fn create_snapshot(
        &self,
        request: Request<CreateSnapshotRequest>,
    ) -> Answer<CreateSnapshotResponse> {
        let r = request.into_inner();
        let call = Call {
            snapshot: r.name.clone(),
            parameters: pairs(r.parameters.clone()),
            secrets: pairs(r.secrets.clone()),
            ..call("CreateSnapshot", r.source_volume_id.clone())
        };
        self.control(call, move |backend, script, _| {
            Ok(CreateSnapshotResponse {
                snapshot: Some(volumes::taken(&volumes::snapshot(backend, &r)?, script)),
            })
        })
        .await
    }

    async fn delete_snapshot(
        &self,
        request: Request<DeleteSnapshotRequest>,
    ) -> Answer<DeleteSnapshotResponse> {
        let r = request.into_inner();
        let call = Call {
            snapshot: r.snapshot_id,
            secrets: pairs(r.secrets),
            ..call("DeleteSnapshot", String::new())
        };
        self.control(call, |backend, _, call| {
            backend.remove::<Snapshot>(&call.snapshot).map_err(internal)?;
            Ok(DeleteSnapshotResponse {})
        })
        .await
    }

    async fn list_snapshots(&self, request: Request<ListSnapshotsRequest>) -> Answer<ListSnapshotsResponse> {
        let r = request.into_inner();
        let call = Call {
            snapshot: r.snapshot_id.clone(),
            secrets: pairs(r.secrets.clone()),
            ..call("ListSnapshots", r.source_volume_id.clone())
        };
        let backend = self.backend.clone();
        self.run(call, move |script, call, lie| {
            let _lock = backend.lock().map_err(internal)?;
            let mut all = backend.all::<Snapshot>().map_err(internal)?;
            all.retain(|one| call.snapshot.is_empty() || one.id == call.snapshot);
            all.retain(|one| call.volume.is_empty() || one.volume == call.volume);
            match lie {
                Some(Lie::Nothing) => all.clear(),
                Some(Lie::Another) => all.iter_mut().for_each(|one| one.volume = "another".to_owned()),
                _ => {}
            }
            let (page, next_token) = page(all, r.max_entries, &r.starting_token, script)?;
            let entry = |one| list_snapshots_response::Entry { snapshot: Some(volumes::taken(one, script)) };
            Ok(ListSnapshotsResponse { entries: page.iter().map(entry).collect(), next_token })
        })
        .await
    }

    async fn controller_expand_volume(
        &self,
        request: Request<ControllerExpandVolumeRequest>,
    ) -> Answer<ControllerExpandVolumeResponse> {
        let r = request.into_inner();
        let range = r.capacity_range.unwrap_or_default();
        let call = Call {
            required_bytes: range.required_bytes,
            limit_bytes: range.limit_bytes,
            secrets: pairs(r.secrets.clone()),
            ..call("ControllerExpandVolume", r.volume_id.clone())
        };
        let call = with_capability(call, r.volume_capability.clone());
        self.control(call, move |backend, script, call| {
            Ok(ControllerExpandVolumeResponse {
                capacity_bytes: volumes::expand(backend, script, &r)?,
                node_expansion_required: has(&script.capabilities, "EXPAND_VOLUME") && !call.block,
            })
        })
        .await
    }

    async fn controller_list_volume_health(
        &self,
        _: Request<ControllerListVolumeHealthRequest>,
    ) -> Answer<ControllerListVolumeHealthResponse> {
        Err(Status::unimplemented("not this plugin"))
    }

    async fn controller_get_volume_health(
        &self,
        _: Request<ControllerGetVolumeHealthRequest>,
    ) -> Answer<ControllerGetVolumeHealthResponse> {
        Err(Status::unimplemented("not this plugin"))
    }

    async fn get_snapshot(&self, _: Request<GetSnapshotRequest>) -> Answer<GetSnapshotResponse> {
        Err(Status::unimplemented("not this plugin"))
    }

    async fn controller_get_volume(
        &self,
        _: Request<ControllerGetVolumeRequest>,
    ) -> Answer<ControllerGetVolumeResponse> {
        Err(Status::unimplemented("not this plugin"))
    }

    async fn controller_modify_volume(
        &self,
        _: Request<ControllerModifyVolumeRequest>,
    ) -> Answer<ControllerModifyVolumeResponse> {
        Err(Status::unimplemented("not this plugin"))
    }
}
