//! `test-plugin DIRECTORY`: a CSI node plugin that makes real bind mounts and obeys the script in its directory. It serves
//! on `DIRECTORY/csi.sock`, keeps the volumes' data in `DIRECTORY/data` and records each call in `DIRECTORY/calls.jsonl`.

mod effects;
mod fuse;
mod service;

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use csi_proto::csi::v1::{identity_server::IdentityServer, node_server::NodeServer};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;

// One thread: a call's cancellation is seen before the next call that came after it.
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let directory = PathBuf::from(std::env::args_os().nth(1).ok_or("usage: test-plugin DIRECTORY")?);
    // A managed one is told by csid where to listen.
    let socket = match std::env::var("CSI_ENDPOINT") {
        Ok(endpoint) => PathBuf::from(endpoint.strip_prefix("unix://").ok_or("CSI_ENDPOINT is no unix://")?),
        Err(_) => directory.join("csi.sock"),
    };
    if socket.exists() {
        std::fs::remove_file(&socket)?;
    }
    let plugin = Arc::new(service::Plugin::new(directory)?);
    let listener = UnixListener::bind(&socket)?;
    Server::builder()
        .add_service(IdentityServer::from_arc(Arc::clone(&plugin)))
        .add_service(NodeServer::from_arc(plugin))
        .serve_with_incoming(UnixListenerStream::new(listener))
        .await?;
    Ok(())
}
