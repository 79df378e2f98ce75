//! The Identity service: who this is, and whether the host has loop devices.

use csi_proto::csi::v1::identity_server::Identity;
use csi_proto::csi::v1::plugin_capability::{Service, Type, VolumeExpansion, service, volume_expansion};
use csi_proto::csi::v1::{
    GetPluginCapabilitiesRequest, GetPluginCapabilitiesResponse, GetPluginInfoRequest, GetPluginInfoResponse,
    PluginCapability, ProbeRequest, ProbeResponse,
};
use tonic::{Request, Response, Status};

pub const NAME: &str = "local.csid1.org";

#[derive(Debug)]
pub struct Plugin;

#[tonic::async_trait]
impl Identity for Plugin {
    async fn get_plugin_info(
        &self,
        _: Request<GetPluginInfoRequest>,
    ) -> Result<Response<GetPluginInfoResponse>, Status> {
        Ok(Response::new(GetPluginInfoResponse {
            name: NAME.to_owned(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Default::default()
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Result<Response<GetPluginCapabilitiesResponse>, Status> {
        let service = |service: service::Type| Type::Service(Service { r#type: service.into() });
        let capabilities = [
            service(service::Type::ControllerService),
            service(service::Type::VolumeAccessibilityConstraints),
            Type::VolumeExpansion(VolumeExpansion { r#type: volume_expansion::Type::Online.into() }),
        ];
        Ok(Response::new(GetPluginCapabilitiesResponse {
            capabilities: capabilities.map(|c| PluginCapability { r#type: Some(c) }).into(),
        }))
    }

    async fn probe(&self, _: Request<ProbeRequest>) -> Result<Response<ProbeResponse>, Status> {
        match std::fs::File::open("/dev/loop-control") {
            Ok(_) => Ok(Response::new(ProbeResponse { ready: Some(true) })),
            Err(e) => Err(Status::failed_precondition(format!(
                "/dev/loop-control: {e}; load the kernel module `loop` (modprobe loop)"
            ))),
        }
    }
}
