//! The Controller service: decodes, calls the store, encodes.

use csi_proto::csi::v1::controller_server::Controller;
use csi_proto::csi::v1::controller_service_capability::{Rpc, Type, rpc};
use csi_proto::csi::v1::validate_volume_capabilities_response::Confirmed;
use csi_proto::csi::v1::*;
use tonic::{Request, Response, Status};

use crate::capability::{Wanted, content_for};
use crate::error::{Error, Result};
use crate::serve::{blocking, required};
use crate::store::{Range, Store};

type Answer<T> = std::result::Result<Response<T>, Status>;

const TOKEN: &str = "after:";

#[derive(Clone, Debug)]
pub struct Volumes {
    pub store: Store,
    pub node_id: String,
}

fn range(range: Option<CapacityRange>) -> Result<Range> {
    range.map_or(Ok(Range::default()), |r| Range::new(r.required_bytes, r.limit_bytes))
}

/// Where volumes of this node can be reached from.
pub fn topology(node_id: &str) -> Topology {
    Topology { segments: [(format!("{}/node", crate::identity::NAME), node_id.to_owned())].into() }
}

impl Volumes {
    fn volume(&self, id: String, capacity: u64) -> Volume {
        Volume {
            volume_id: id,
            capacity_bytes: capacity as i64, // a file's length is an i64
            accessible_topology: vec![topology(&self.node_id)],
            ..Default::default()
        }
    }

    fn check_create(&self, request: &CreateVolumeRequest) -> Result<()> {
        required("name", &request.name)?;
        if request.name.len() > 128 || request.name.chars().any(char::is_control) {
            return Err(Error::Invalid("a name has at most 128 bytes and no control characters".into()));
        }
        if request.volume_content_source.is_some() {
            return Err(Error::Invalid(
                "volumes start empty: this driver has no snapshots and no clones".into(),
            ));
        }
        if !request.parameters.is_empty() || !request.mutable_parameters.is_empty() {
            return Err(Error::Invalid("this driver has no parameters".into()));
        }
        let here = topology(&self.node_id);
        match &request.accessibility_requirements {
            Some(wish) if !wish.requisite.is_empty() && !wish.requisite.contains(&here) => {
                Err(Error::NotOnThisNode(format!("volumes made here can only be on node {}", self.node_id)))
            }
            _ => Ok(()),
        }
    }

    fn list(&self, request: &ListVolumesRequest) -> Result<ListVolumesResponse> {
        let max = usize::try_from(request.max_entries)
            .map_err(|_| Error::Invalid("max_entries is negative".into()))?;
        let max = if max == 0 { usize::MAX } else { max };
        // A token names the last volume that was shown, so that it stays good when that is deleted.
        let after = match request.starting_token.as_str() {
            "" => "",
            token => token.strip_prefix(TOKEN).ok_or(Error::Token)?,
        };
        let mut rest = self.store.list()?.into_iter().filter(|v| v.id.as_str() > after).peekable();
        let mut entries = Vec::new();
        let mut next_token = String::new();
        while let Some(listed) = rest.next() {
            let last = listed.id.clone();
            entries.push(list_volumes_response::Entry {
                volume: Some(self.volume(listed.id, listed.capacity)),
                status: None,
            });
            if entries.len() >= max && rest.peek().is_some() {
                next_token = format!("{TOKEN}{last}");
                break;
            }
        }
        Ok(ListVolumesResponse { entries, next_token })
    }

    fn validate(
        &self,
        request: ValidateVolumeCapabilitiesRequest,
    ) -> Result<ValidateVolumeCapabilitiesResponse> {
        let (meta, _) = self.store.read(required("volume_id", &request.volume_id)?)?;
        if request.volume_capabilities.is_empty() {
            return Err(Error::Invalid("volume_capabilities is empty".into()));
        }
        let fits = |c| Wanted::parse(Some(c)).and_then(|wanted| wanted.fits(meta.content));
        let foreign = !request.volume_context.is_empty()
            || !request.parameters.is_empty()
            || !request.mutable_parameters.is_empty();
        let refused = match request.volume_capabilities.iter().try_for_each(fits) {
            Err(e) => Some(e.to_string()),
            Ok(()) if foreign => Some("volumes of this driver have no context and no parameters".to_owned()),
            Ok(()) => None,
        };
        Ok(match refused {
            Some(message) => ValidateVolumeCapabilitiesResponse { confirmed: None, message },
            None => ValidateVolumeCapabilitiesResponse {
                confirmed: Some(Confirmed {
                    volume_capabilities: request.volume_capabilities,
                    ..Default::default()
                }),
                message: String::new(),
            },
        })
    }
}

#[tonic::async_trait]
impl Controller for Volumes {
    async fn create_volume(&self, request: Request<CreateVolumeRequest>) -> Answer<CreateVolumeResponse> {
        let (this, request) = (self.clone(), request.into_inner());
        blocking("CreateVolume", request.name.clone(), move || {
            this.check_create(&request)?;
            let content = content_for(&request.volume_capabilities)?;
            let (id, capacity) = this.store.create(&request.name, content, range(request.capacity_range)?)?;
            Ok(CreateVolumeResponse { volume: Some(this.volume(id, capacity)) })
        })
        .await
    }

    async fn delete_volume(&self, request: Request<DeleteVolumeRequest>) -> Answer<DeleteVolumeResponse> {
        let (this, id) = (self.clone(), request.into_inner().volume_id);
        blocking("DeleteVolume", id.clone(), move || {
            this.store.delete(required("volume_id", &id)?)?;
            Ok(DeleteVolumeResponse {})
        })
        .await
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<ValidateVolumeCapabilitiesRequest>,
    ) -> Answer<ValidateVolumeCapabilitiesResponse> {
        let (this, request) = (self.clone(), request.into_inner());
        let id = request.volume_id.clone();
        blocking("ValidateVolumeCapabilities", id, move || this.validate(request)).await
    }

    async fn list_volumes(&self, request: Request<ListVolumesRequest>) -> Answer<ListVolumesResponse> {
        let (this, request) = (self.clone(), request.into_inner());
        blocking("ListVolumes", String::new(), move || this.list(&request)).await
    }

    async fn get_capacity(&self, request: Request<GetCapacityRequest>) -> Answer<GetCapacityResponse> {
        let (this, request) = (self.clone(), request.into_inner());
        blocking("GetCapacity", String::new(), move || {
            let elsewhere = request.accessible_topology.is_some_and(|t| t != topology(&this.node_id));
            let fits =
                request.volume_capabilities.is_empty() || content_for(&request.volume_capabilities).is_ok();
            let none = elsewhere || !fits || !request.parameters.is_empty();
            let bytes = if none { 0 } else { this.store.available()? };
            let available_capacity = i64::try_from(bytes).unwrap_or(i64::MAX);
            Ok(GetCapacityResponse { available_capacity, ..Default::default() })
        })
        .await
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<ControllerGetCapabilitiesRequest>,
    ) -> Answer<ControllerGetCapabilitiesResponse> {
        let capabilities = [
            rpc::Type::CreateDeleteVolume,
            rpc::Type::ListVolumes,
            rpc::Type::GetCapacity,
            rpc::Type::ExpandVolume,
            rpc::Type::SingleNodeMultiWriter,
        ];
        let capabilities = capabilities
            .map(|c| ControllerServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: c.into() })) });
        Ok(Response::new(ControllerGetCapabilitiesResponse { capabilities: capabilities.into() }))
    }

    async fn controller_expand_volume(
        &self,
        request: Request<ControllerExpandVolumeRequest>,
    ) -> Answer<ControllerExpandVolumeResponse> {
        let (this, request) = (self.clone(), request.into_inner());
        blocking("ControllerExpandVolume", request.volume_id.clone(), move || {
            let id = required("volume_id", &request.volume_id)?;
            let wish =
                request.capacity_range.ok_or_else(|| Error::Invalid("capacity_range is missing".into()))?;
            let wish = range(Some(wish))?;
            let capacity = this.store.expand(id, wish)?;
            let capacity_bytes = capacity as i64; // a file's length is an i64
            Ok(ControllerExpandVolumeResponse { capacity_bytes, node_expansion_required: true })
        })
        .await
    }

    // What the capabilities above do not name.

    async fn controller_publish_volume(
        &self,
        _: Request<ControllerPublishVolumeRequest>,
    ) -> Answer<ControllerPublishVolumeResponse> {
        Err(not_here())
    }
    async fn controller_unpublish_volume(
        &self,
        _: Request<ControllerUnpublishVolumeRequest>,
    ) -> Answer<ControllerUnpublishVolumeResponse> {
        Err(not_here())
    }
    async fn controller_list_volume_health(
        &self,
        _: Request<ControllerListVolumeHealthRequest>,
    ) -> Answer<ControllerListVolumeHealthResponse> {
        Err(not_here())
    }
    async fn controller_get_volume_health(
        &self,
        _: Request<ControllerGetVolumeHealthRequest>,
    ) -> Answer<ControllerGetVolumeHealthResponse> {
        Err(not_here())
    }
    async fn create_snapshot(&self, _: Request<CreateSnapshotRequest>) -> Answer<CreateSnapshotResponse> {
        Err(not_here())
    }
    async fn delete_snapshot(&self, _: Request<DeleteSnapshotRequest>) -> Answer<DeleteSnapshotResponse> {
        Err(not_here())
    }
    async fn list_snapshots(&self, _: Request<ListSnapshotsRequest>) -> Answer<ListSnapshotsResponse> {
        Err(not_here())
    }
    async fn get_snapshot(&self, _: Request<GetSnapshotRequest>) -> Answer<GetSnapshotResponse> {
        Err(not_here())
    }
    async fn controller_get_volume(
        &self,
        _: Request<ControllerGetVolumeRequest>,
    ) -> Answer<ControllerGetVolumeResponse> {
        Err(not_here())
    }
    async fn controller_modify_volume(
        &self,
        _: Request<ControllerModifyVolumeRequest>,
    ) -> Answer<ControllerModifyVolumeResponse> {
        Err(not_here())
    }
}

fn not_here() -> Status {
    Status::unimplemented("csi-local does not have this; ControllerGetCapabilities names what it has")
}
