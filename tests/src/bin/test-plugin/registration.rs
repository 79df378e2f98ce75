//! The plugin registers itself, as drivers without a registrar do.

use std::io;
use std::path::Path;

use csi_proto::pluginregistration::registration_server::{Registration, RegistrationServer};
use csi_proto::pluginregistration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, async_trait};

use crate::service::Answer;

struct Itself(PluginInfo);

pub fn serve(at: &Path, name: String, endpoint: &Path) -> io::Result<()> {
    let info = PluginInfo {
        r#type: "CSIPlugin".to_owned(),
        name,
        endpoint: endpoint.to_string_lossy().into_owned(),
        supported_versions: vec!["1.0.0".to_owned()],
    };
    let listener = UnixListenerStream::new(UnixListener::bind(at)?);
    let server = Server::builder().add_service(RegistrationServer::new(Itself(info)));
    tokio::spawn(server.serve_with_incoming(listener));
    Ok(())
}

#[async_trait]
impl Registration for Itself {
    async fn get_info(&self, _: Request<InfoRequest>) -> Answer<PluginInfo> {
        Ok(self.0.clone().into())
    }

    async fn notify_registration_status(
        &self,
        status: Request<RegistrationStatus>,
    ) -> Answer<RegistrationStatusResponse> {
        println!("{:?}", status.into_inner());
        Ok(RegistrationStatusResponse {}.into())
    }
}
