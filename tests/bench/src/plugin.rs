//! The plugin that everybody is measured with: its publish makes one bind mount, its unpublish takes that away, and nothing
//! else costs anything.

use std::path::Path;

use csi_proto::csi::v1::*;
use rustix::mount::{UnmountFlags, mount_bind, unmount};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status, async_trait};

#[derive(Clone, Copy)]
struct Plugin {
    /// Volumes that it takes on a node; 0: any number.
    most: i64,
}

type Answer<T> = Result<Response<T>, Status>;

/// Serve at `socket` until killed; `most`: volumes that it takes on a node, 0 for any number.
#[tokio::main(worker_threads = 2)]
pub async fn serve(socket: &Path, most: i64) -> anyhow::Result<()> {
    let plugin = Plugin { most };
    let listener = UnixListener::bind(socket)?;
    Server::builder()
        .add_service(identity_server::IdentityServer::new(plugin))
        .add_service(node_server::NodeServer::new(plugin))
        .serve_with_incoming(UnixListenerStream::new(listener))
        .await?;
    Ok(())
}

fn internal(error: std::io::Error) -> Status {
    Status::internal(error.to_string())
}

#[async_trait]
impl identity_server::Identity for Plugin {
    async fn get_plugin_info(&self, _: Request<GetPluginInfoRequest>) -> Answer<GetPluginInfoResponse> {
        Ok(Response::new(GetPluginInfoResponse { name: "bench.csid".to_owned(), ..Default::default() }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Answer<GetPluginCapabilitiesResponse> {
        Ok(Response::new(Default::default()))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Answer<ProbeResponse> {
        Ok(Response::new(Default::default()))
    }
}

#[async_trait]
impl node_server::Node for Plugin {
    async fn node_stage_volume(&self, _: Request<NodeStageVolumeRequest>) -> Answer<NodeStageVolumeResponse> {
        Ok(Response::new(Default::default()))
    }

    async fn node_unstage_volume(
        &self,
        _: Request<NodeUnstageVolumeRequest>,
    ) -> Answer<NodeUnstageVolumeResponse> {
        Ok(Response::new(Default::default()))
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Answer<NodePublishVolumeResponse> {
        let request = request.into_inner();
        std::fs::create_dir(&request.target_path).map_err(internal)?;
        mount_bind(&request.staging_target_path, &request.target_path)
            .map_err(|error| internal(error.into()))?;
        Ok(Response::new(Default::default()))
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Answer<NodeUnpublishVolumeResponse> {
        let target = request.into_inner().target_path;
        unmount(&target, UnmountFlags::empty()).map_err(|error| internal(error.into()))?;
        std::fs::remove_dir(&target).map_err(internal)?;
        Ok(Response::new(Default::default()))
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Answer<NodeGetCapabilitiesResponse> {
        use node_service_capability::{Rpc, Type, rpc};
        let stages = Type::Rpc(Rpc { r#type: rpc::Type::StageUnstageVolume.into() });
        let capabilities = vec![NodeServiceCapability { r#type: Some(stages) }];
        Ok(Response::new(NodeGetCapabilitiesResponse { capabilities }))
    }

    async fn node_get_info(&self, _: Request<NodeGetInfoRequest>) -> Answer<NodeGetInfoResponse> {
        Ok(Response::new(NodeGetInfoResponse {
            node_id: "bench".to_owned(),
            max_volumes_per_node: self.most,
            ..Default::default()
        }))
    }

    async fn node_get_volume_stats(
        &self,
        _: Request<NodeGetVolumeStatsRequest>,
    ) -> Answer<NodeGetVolumeStatsResponse> {
        Err(Status::unimplemented("not this plugin"))
    }

    async fn node_expand_volume(
        &self,
        _: Request<NodeExpandVolumeRequest>,
    ) -> Answer<NodeExpandVolumeResponse> {
        Err(Status::unimplemented("not this plugin"))
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
