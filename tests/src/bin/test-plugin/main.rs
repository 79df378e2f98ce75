//! `test-plugin DIRECTORY [BACKEND [REGISTRATION]]`: a CSI plugin that makes real bind mounts and obeys the script in its
//! directory. It serves on `DIRECTORY/csi.sock` and records each call in `DIRECTORY/calls.jsonl`. The volumes are in the
//! directory BACKEND, which several instances may have in common, and which is DIRECTORY by default. With REGISTRATION it
//! registers itself, by the kubelet's protocol, at that socket.

mod controller;
mod effects;
mod fuse;
mod node;
mod registration;
mod service;
mod volumes;

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use csi_proto::csi::v1::controller_server::ControllerServer;
use csi_proto::csi::v1::identity_server::IdentityServer;
use csi_proto::csi::v1::node_server::NodeServer;
use csid_tests::backend::Backend;
use csid_tests::script::Script;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;

// The runtime has one thread, so the cancellation of a call is handled before a call that came after it.
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let directory = arguments.next().ok_or("usage: test-plugin DIRECTORY [BACKEND [REGISTRATION]]")?;
    let backend = Backend::new(&arguments.next().unwrap_or_else(|| directory.clone()));
    // csid sets the socket of a managed plugin.
    let socket = match std::env::var("CSI_ENDPOINT") {
        Ok(endpoint) => PathBuf::from(endpoint.strip_prefix("unix://").ok_or("CSI_ENDPOINT is no unix://")?),
        Err(_) => directory.join("csi.sock"),
    };
    if socket.exists() {
        std::fs::remove_file(&socket)?;
    }
    let plugin = Arc::new(service::Plugin::new(directory.clone(), backend)?);
    let listener = UnixListener::bind(&socket)?;
    if let Some(at) = arguments.next() {
        registration::serve(&at, Script::read(&directory)?.name, &socket)?;
    }
    Server::builder()
        .add_service(IdentityServer::from_arc(Arc::clone(&plugin)))
        .add_service(ControllerServer::from_arc(Arc::clone(&plugin)))
        .add_service(NodeServer::from_arc(plugin))
        .serve_with_incoming(UnixListenerStream::new(listener))
        .await?;
    Ok(())
}
