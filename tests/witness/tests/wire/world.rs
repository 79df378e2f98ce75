//! A plugin and the witness before it.

use std::net::Shutdown;
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use csi_proto::csi::v1::controller_server::ControllerServer;
use csi_proto::csi::v1::identity_client::IdentityClient;
use csi_proto::csi::v1::identity_server::IdentityServer;
use csi_proto::csi::v1::node_server::NodeServer;
use csi_proto::csi::v1::{ProbeRequest, ProbeResponse};
use csi_witness::{Script, Setup, Sockets, Witness};
use hyper_util::rt::TokioIo;
use tempfile::TempDir;
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Runtime;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint, Server, Uri};
use tonic::{Response, Status};

use crate::plugin::Plugin;

/// No test waits longer for what has to happen.
pub const AGES: Duration = Duration::from_secs(30);

pub struct World {
    pub witness: Witness,
    pub plugin: Arc<Plugin>,
    /// The plugin's.
    runtime: Option<Runtime>,
    /// The plugin's ends of its connections.
    connections: Arc<Mutex<Vec<StdStream>>>,
    directory: TempDir,
}

impl World {
    pub fn new(script: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let script = Script::parse(script).unwrap();
        let at = |name: &str| directory.path().join(name);
        let sockets = vec![Sockets { listen: at("co.sock"), plugin: at("csi.sock") }];
        let setup = Setup { sockets, log: at("log.jsonl"), script };
        let witness = Witness::start(setup).unwrap();
        let mut world =
            World { witness, plugin: Arc::default(), runtime: None, connections: Arc::default(), directory };
        world.start_plugin();
        world
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.at("log.jsonl")).unwrap()
    }

    pub async fn until(&self, holds: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !holds(self) {
            assert!(start.elapsed() < AGES, "it did not come to be; the log: {}", self.log());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    pub async fn until_log(&self, text: &str) {
        self.until(|world| world.log().contains(text)).await;
    }

    pub async fn until_staged(&self, count: usize) {
        self.until(|world| world.plugin.staged.lock().unwrap().len() == count).await;
    }

    pub fn start_plugin(&mut self) {
        let listener = std::os::unix::net::UnixListener::bind(self.at("csi.sock")).unwrap();
        listener.set_nonblocking(true).unwrap();
        let (plugin, connections) = (Arc::clone(&self.plugin), Arc::clone(&self.connections));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.spawn(async move {
            let server = Server::builder()
                .add_service(IdentityServer::from_arc(Arc::clone(&plugin)))
                .add_service(ControllerServer::from_arc(Arc::clone(&plugin)))
                .add_service(NodeServer::from_arc(plugin));
            let incoming =
                UnixListenerStream::new(UnixListener::from_std(listener).unwrap()).map(move |stream| {
                    let stream = stream?.into_std()?;
                    connections.lock().unwrap().push(stream.try_clone()?);
                    UnixStream::from_std(stream)
                });
            server.serve_with_incoming(incoming).await.unwrap();
        });
        self.runtime = Some(runtime);
    }

    /// Its connections end as those of a process that is killed: with no word more.
    pub fn kill_plugin(&mut self) {
        // Its directory may be gone, its socket also.
        let _ = std::fs::remove_file(self.at("csi.sock"));
        for connection in self.connections.lock().unwrap().drain(..) {
            let _ = connection.shutdown(Shutdown::Both);
        }
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    /// A connection of the CO: by way of the witness.
    pub async fn co(&self) -> Channel {
        connect(&self.at("co.sock")).await
    }

    /// One that goes past it.
    pub async fn direct(&self) -> Channel {
        connect(&self.at("csi.sock")).await
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.kill_plugin();
    }
}

pub async fn connect(socket: &Path) -> Channel {
    let socket = socket.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost").connect_with_connector(connector).await.unwrap()
}

pub async fn probe(co: &Channel) -> Result<Response<ProbeResponse>, Status> {
    IdentityClient::new(co.clone()).probe(ProbeRequest {}).await
}
