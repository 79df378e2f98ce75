//! The Controller service: decodes, calls the store, encodes.

use std::time::{SystemTime, UNIX_EPOCH};

use csi_proto::csi::v1::controller_server::Controller;
use csi_proto::csi::v1::controller_service_capability::{Rpc, Type, rpc};
use csi_proto::csi::v1::validate_volume_capabilities_response::Confirmed;
use csi_proto::csi::v1::*;
use tonic::{Request, Response, Status};

use crate::capability::{Wanted, content_for};
use crate::dirs::Listed;
use crate::error::{Error, Result};
use crate::loops;
use crate::serve::{blocking, required};
use crate::snapshots::Snapshot as Taken;
use crate::store::{Attachment, Meta, Range, Source, Store};

type Answer<T> = std::result::Result<Response<T>, Status>;

const TOKEN: &str = "after:";
/// In publish_context: which attachment it is.
pub const CONTEXT: &str = "attachment";

#[derive(Clone, Debug)]
pub struct Volumes {
    pub store: Store,
    pub node_id: String,
    /// Whether volumes are attached before they are staged.
    pub attach: bool,
}

fn range(range: Option<CapacityRange>) -> Result<Range> {
    range.map_or(Ok(Range::default()), |r| Range::new(r.required_bytes, r.limit_bytes))
}

/// Where volumes of this node can be reached from.
pub fn topology(node_id: &str) -> Topology {
    Topology { segments: [(format!("{}/node", crate::identity::NAME), node_id.to_owned())].into() }
}

fn check_name(name: &str) -> Result<()> {
    required("name", name)?;
    if name.len() > 128 || name.chars().any(char::is_control) {
        return Err(Error::Invalid("a name has at most 128 bytes and no control characters".into()));
    }
    Ok(())
}

fn source(request: &CreateVolumeRequest) -> Result<Option<Source>> {
    use volume_content_source::Type;
    let Some(source) = &request.volume_content_source else { return Ok(None) };
    Ok(Some(match &source.r#type {
        None => return Err(Error::Invalid("volume_content_source names nothing".into())),
        Some(Type::Snapshot(s)) => Source::Snapshot(required("snapshot_id", &s.snapshot_id)?.to_owned()),
        Some(Type::Volume(v)) => Source::Volume(required("volume_id", &v.volume_id)?.to_owned()),
    }))
}

fn content_source(source: Source) -> VolumeContentSource {
    use volume_content_source::{SnapshotSource, Type, VolumeSource};
    let source = match source {
        Source::Snapshot(snapshot_id) => Type::Snapshot(SnapshotSource { snapshot_id }),
        Source::Volume(volume_id) => Type::Volume(VolumeSource { volume_id }),
    };
    VolumeContentSource { r#type: Some(source) }
}

fn snapshot(taken: Taken) -> Snapshot {
    Snapshot {
        size_bytes: taken.capacity as i64, // a file's length is an i64
        snapshot_id: taken.id,
        source_volume_id: taken.meta.volume,
        creation_time: Some(taken.meta.created.into()),
        ready_to_use: true, // one that is not is not shown
        ..Default::default()
    }
}

/// One page of what is sorted by id, and the token of the next. A token names the last one that was shown, so that it
/// stays good when that is deleted.
fn page<M>(mut all: Vec<Listed<M>>, max_entries: i32, token: &str) -> Result<(Vec<Listed<M>>, String)> {
    let max = usize::try_from(max_entries).map_err(|_| Error::Invalid("max_entries is negative".into()))?;
    if !token.is_empty() {
        let after = token.strip_prefix(TOKEN).ok_or(Error::Token)?;
        all.retain(|l| l.id.as_str() > after);
    }
    if max == 0 || all.len() <= max {
        return Ok((all, String::new()));
    }
    all.truncate(max);
    let next = format!("{TOKEN}{}", all[max - 1].id);
    Ok((all, next))
}

impl Volumes {
    fn volume(&self, id: String, capacity: u64, source: Option<Source>) -> Volume {
        Volume {
            volume_id: id,
            capacity_bytes: capacity as i64, // a file's length is an i64
            accessible_topology: vec![topology(&self.node_id)],
            content_source: source.map(content_source),
            ..Default::default()
        }
    }

    fn create(&self, request: &CreateVolumeRequest) -> Result<CreateVolumeResponse> {
        self.check_create(request)?;
        let source = source(request)?;
        let content_of = |source| self.store.content_of(&request.name, source);
        let holds = source.as_ref().map(content_of).transpose()?;
        let content = content_for(&request.volume_capabilities, holds)?;
        let range = range(request.capacity_range)?;
        let (id, capacity) = self.store.create(&request.name, content, range, source.clone())?;
        Ok(CreateVolumeResponse { volume: Some(self.volume(id, capacity, source)) })
    }

    fn check_create(&self, request: &CreateVolumeRequest) -> Result<()> {
        check_name(&request.name)?;
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
        let (page, next_token) = page(self.store.list()?, request.max_entries, &request.starting_token)?;
        let entry = |listed: Listed<Meta>| {
            let nodes = |attached: Option<Attachment>| list_volumes_response::VolumeStatus {
                published_node_ids: attached.into_iter().map(|a| a.node).collect(),
                ..Default::default()
            };
            list_volumes_response::Entry {
                status: self.attach.then(|| nodes(listed.meta.attached)),
                volume: Some(self.volume(listed.id, listed.capacity, listed.meta.source)),
            }
        };
        Ok(ListVolumesResponse { entries: page.into_iter().map(entry).collect(), next_token })
    }

    fn list_snapshots(&self, request: &ListSnapshotsRequest) -> Result<ListSnapshotsResponse> {
        let wanted = |wish: &str, is: &str| wish.is_empty() || wish == is;
        let mut all = self.store.snapshots()?;
        all.retain(|s| {
            wanted(&request.snapshot_id, &s.id) && wanted(&request.source_volume_id, &s.meta.volume)
        });
        let (page, next_token) = page(all, request.max_entries, &request.starting_token)?;
        let entry = |taken| list_snapshots_response::Entry { snapshot: Some(snapshot(taken)) };
        Ok(ListSnapshotsResponse { entries: page.into_iter().map(entry).collect(), next_token })
    }

    fn attach(&self, request: &ControllerPublishVolumeRequest) -> Result<String> {
        let id = required("volume_id", &request.volume_id)?;
        let node = required("node_id", &request.node_id)?;
        let wanted = Wanted::parse(request.volume_capability.as_ref())?;
        let mut volume = self.store.volume(id)?;
        if node != self.node_id {
            return Err(Error::NoNode(node.to_owned(), self.node_id.clone()));
        }
        wanted.fits(volume.meta.content)?;
        match &volume.meta.attached {
            // By this driver under another name, which is the same host for all that is known.
            Some(a) if a.node != node => Err(Error::Precondition(format!(
                "volume {id} is attached to node {}; detach it there first",
                a.node
            ))),
            Some(a) if a.read_only != request.readonly => {
                Err(Error::Exists(format!("volume {id} is attached and differs in being read-only")))
            }
            Some(a) => Ok(a.context.clone()),
            None => {
                let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let context = format!("{:x}", since_epoch.as_nanos());
                volume.set_attached(Some(Attachment {
                    node: node.to_owned(),
                    read_only: request.readonly,
                    context: context.clone(),
                }))?;
                Ok(context)
            }
        }
    }

    /// What is not there, or not attached to that node, is detached already.
    fn detach(&self, request: &ControllerUnpublishVolumeRequest) -> Result<()> {
        let id = required("volume_id", &request.volume_id)?;
        let mut volume = match self.store.volume(id) {
            Err(Error::NoVolume(_)) => return Ok(()),
            volume => volume?,
        };
        let node = &request.node_id; // empty: from every node
        if volume.meta.attached.as_ref().is_none_or(|a| !node.is_empty() && a.node != *node) {
            return Ok(());
        }
        if let Some(attached) = loops::of_image(&volume.image())?.first() {
            return Err(Error::Precondition(format!(
                "volume {id} is in use on {}; unpublish and unstage it first",
                attached.node().display()
            )));
        }
        volume.set_attached(None)
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
        blocking("CreateVolume", request.name.clone(), move || this.create(&request)).await
    }

    async fn delete_volume(&self, request: Request<DeleteVolumeRequest>) -> Answer<DeleteVolumeResponse> {
        let (this, id) = (self.clone(), request.into_inner().volume_id);
        blocking("DeleteVolume", id.clone(), move || {
            this.store.delete(required("volume_id", &id)?, this.attach)?;
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
            let fits = request.volume_capabilities.is_empty()
                || content_for(&request.volume_capabilities, None).is_ok();
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
        let always = [
            rpc::Type::CreateDeleteVolume,
            rpc::Type::ListVolumes,
            rpc::Type::GetCapacity,
            rpc::Type::CreateDeleteSnapshot,
            rpc::Type::ListSnapshots,
            rpc::Type::CloneVolume,
            rpc::Type::ExpandVolume,
            rpc::Type::SingleNodeMultiWriter,
        ];
        let attaching = [
            rpc::Type::PublishUnpublishVolume,
            rpc::Type::PublishReadonly,
            rpc::Type::ListVolumesPublishedNodes,
        ];
        let capabilities = always.iter().chain(attaching.iter().filter(|_| self.attach));
        let capabilities = capabilities
            .map(|c| ControllerServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type: (*c).into() })) });
        Ok(Response::new(ControllerGetCapabilitiesResponse { capabilities: capabilities.collect() }))
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

    async fn create_snapshot(
        &self,
        request: Request<CreateSnapshotRequest>,
    ) -> Answer<CreateSnapshotResponse> {
        let (this, request) = (self.clone(), request.into_inner());
        blocking("CreateSnapshot", request.source_volume_id.clone(), move || {
            check_name(&request.name)?;
            let volume = required("source_volume_id", &request.source_volume_id)?;
            if !request.parameters.is_empty() {
                return Err(Error::Invalid("this driver has no parameters".into()));
            }
            let taken = this.store.snapshot(&request.name, volume)?;
            Ok(CreateSnapshotResponse { snapshot: Some(snapshot(taken)) })
        })
        .await
    }

    async fn delete_snapshot(
        &self,
        request: Request<DeleteSnapshotRequest>,
    ) -> Answer<DeleteSnapshotResponse> {
        let (this, id) = (self.clone(), request.into_inner().snapshot_id);
        blocking("DeleteSnapshot", id.clone(), move || {
            this.store.delete_snapshot(required("snapshot_id", &id)?)?;
            Ok(DeleteSnapshotResponse {})
        })
        .await
    }

    async fn list_snapshots(&self, request: Request<ListSnapshotsRequest>) -> Answer<ListSnapshotsResponse> {
        let (this, request) = (self.clone(), request.into_inner());
        blocking("ListSnapshots", String::new(), move || this.list_snapshots(&request)).await
    }

    async fn controller_publish_volume(
        &self,
        request: Request<ControllerPublishVolumeRequest>,
    ) -> Answer<ControllerPublishVolumeResponse> {
        if !self.attach {
            return Err(not_here());
        }
        let (this, request) = (self.clone(), request.into_inner());
        blocking("ControllerPublishVolume", request.volume_id.clone(), move || {
            let publish_context = [(CONTEXT.to_owned(), this.attach(&request)?)].into();
            Ok(ControllerPublishVolumeResponse { publish_context })
        })
        .await
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<ControllerUnpublishVolumeRequest>,
    ) -> Answer<ControllerUnpublishVolumeResponse> {
        if !self.attach {
            return Err(not_here());
        }
        let (this, request) = (self.clone(), request.into_inner());
        blocking("ControllerUnpublishVolume", request.volume_id.clone(), move || {
            this.detach(&request).map(|()| ControllerUnpublishVolumeResponse {})
        })
        .await
    }

    // What the capabilities above do not name.

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
