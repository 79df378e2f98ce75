//! A plugin of the tests: a real gRPC server on a Unix socket that does what its script says, in a runtime of
//! its own, so that it can die as a process does.

use std::any::{Any, TypeId};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use csi_proto::csi::v1;
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::body::Body;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status};
use tower::util::{MapRequestLayer, MapResponseLayer};
use v1::controller_server::{Controller, ControllerServer};
use v1::identity_server::{Identity, IdentityServer};
use v1::node_server::{Node, NodeServer};

pub struct Script {
    pub ready: Option<bool>,
    pub probe: Result<(), (Code, String)>,
    /// Probe is answered after this.
    pub late: Duration,
    pub name: String,
    pub node_id: String,
    pub topology: BTreeMap<String, String>,
    pub plugin_capabilities: Vec<v1::PluginCapability>,
    pub node_capabilities: Vec<i32>,
    pub controller_capabilities: Vec<i32>,
    /// Calls about the plugin itself that fail with INTERNAL.
    pub broken: Vec<&'static str>,
    /// The answer of all but the calls about the plugin itself; `None`: never.
    pub answer: Option<Result<(), (Code, String)>>,
    /// The `grpc-encoding` that each answer names.
    pub encoding: Option<&'static str>,
    /// What an OK says, by its type; else the default.
    answers: HashMap<TypeId, Box<dyn Any + Send>>,
    /// The last request of a type.
    requests: HashMap<TypeId, Box<dyn Any + Send>>,
    /// The RPCs that came, in order.
    pub calls: Vec<&'static str>,
    /// RPCs that were cancelled before they were answered.
    pub cancelled: Vec<&'static str>,
    pub authorities: BTreeSet<String>,
    pub timeouts: Vec<String>,
}

/// What survives a plugin's restart in a test: its script and its socket.
pub struct Fake {
    pub socket: PathBuf,
    script: Arc<Mutex<Script>>,
    /// node, controller
    services: (bool, bool),
    runtime: Option<Runtime>,
}

impl Fake {
    /// Not started yet; it listens at `NAME.sock`.
    pub fn new(directory: &Path, name: &str) -> Self {
        let script = Script {
            ready: None,
            probe: Ok(()),
            late: Duration::ZERO,
            name: "test.csi".into(),
            node_id: "node-1".into(),
            topology: [("zone".to_owned(), "z1".to_owned())].into(),
            plugin_capabilities: Vec::new(),
            node_capabilities: vec![1],
            controller_capabilities: vec![1, 2, 999],
            broken: Vec::new(),
            answer: Some(Ok(())),
            encoding: None,
            answers: HashMap::new(),
            requests: HashMap::new(),
            calls: Vec::new(),
            cancelled: Vec::new(),
            authorities: BTreeSet::new(),
            timeouts: Vec::new(),
        };
        Fake {
            socket: directory.join(format!("{name}.sock")),
            script: Arc::new(Mutex::new(script)),
            services: (true, true),
            runtime: None,
        }
    }

    pub fn serving(mut self, node: bool, controller: bool) -> Self {
        self.services = (node, controller);
        self
    }

    pub fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap()
    }

    pub fn calls(&self, rpc: &str) -> usize {
        self.script().calls.iter().filter(|call| **call == rpc).count()
    }

    /// Answer so from now on.
    pub fn says<R: Any + Send>(&self, answer: R) {
        self.script().answers.insert(TypeId::of::<R>(), Box::new(answer));
    }

    /// The last request of this type.
    pub fn got<Q: Any + Clone>(&self) -> Q {
        let script = self.script();
        let request = script.requests.get(&TypeId::of::<Q>()).expect("no such request came");
        request.downcast_ref::<Q>().unwrap().clone()
    }

    pub fn start(&mut self) {
        self.start_as(rustix::process::geteuid().as_raw());
    }

    /// Who listens is the kernel's word to csid.
    pub fn start_as(&mut self, uid: u32) {
        let _ = std::fs::remove_file(&self.socket);
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let plugin = Plugin(self.script.clone());
        let listener = {
            let listener = listener(&self.socket, uid);
            listener.set_nonblocking(true).unwrap();
            let _inside = runtime.enter();
            UnixListener::from_std(listener).unwrap()
        };
        let mut routes = Routes::new(IdentityServer::new(plugin.clone()));
        if self.services.0 {
            routes = routes.add_service(NodeServer::new(plugin.clone()));
        }
        if self.services.1 {
            routes = routes.add_service(ControllerServer::new(plugin));
        }
        // tonic's own request does not show the authority.
        let authority = MapRequestLayer::new(|mut request: http::Request<Body>| {
            let authority = request.uri().authority().map(ToString::to_string);
            request.extensions_mut().insert(Authority(authority.unwrap_or_default()));
            request
        });
        let script = self.script.clone();
        let encoding = MapResponseLayer::new(move |mut response: http::Response<Body>| {
            if let Some(encoding) = script.lock().unwrap().encoding {
                response.headers_mut().insert("grpc-encoding", http::HeaderValue::from_static(encoding));
            }
            response
        });
        runtime.spawn(async move {
            let incoming = UnixListenerStream::new(listener);
            Server::builder()
                .layer(authority)
                .layer(encoding)
                .add_routes(routes)
                .serve_with_incoming(incoming)
                .await
        });
        self.runtime = Some(runtime);
    }

    /// All its connections break; the socket stays as a file, as after a kill -9.
    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// On a thread of its own, as that becomes the user for good.
fn listener(socket: &Path, uid: u32) -> std::os::unix::net::UnixListener {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket as new};
    let bound = new(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    bind(&bound, &SocketAddrUnix::new(socket).unwrap()).unwrap();
    let listening = std::thread::spawn(move || {
        if uid != rustix::process::geteuid().as_raw() {
            rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(uid)).unwrap();
        }
        listen(&bound, 64).unwrap();
        bound.into()
    });
    listening.join().unwrap()
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.kill();
    }
}

#[derive(Clone)]
struct Plugin(Arc<Mutex<Script>>);

impl Plugin {
    fn came<T>(&self, rpc: &'static str, request: &Request<T>) -> MutexGuard<'_, Script> {
        let mut script = self.0.lock().unwrap();
        script.calls.push(rpc);
        if let Some(timeout) = request.metadata().get("grpc-timeout") {
            script.timeouts.push(timeout.to_str().unwrap().to_owned());
        }
        script
    }

    /// The same, of a call about the plugin itself.
    fn asked<T>(&self, rpc: &'static str, request: &Request<T>) -> Result<MutexGuard<'_, Script>, Status> {
        let script = self.came(rpc, request);
        match script.broken.contains(&rpc) {
            true => Err(Status::internal("no metadata service")),
            false => Ok(script),
        }
    }

    async fn serve<Q: Any + Send, R: Any + Clone + Default>(
        &self,
        rpc: &'static str,
        request: Request<Q>,
    ) -> Result<Response<R>, Status> {
        let answer = {
            let mut script = self.came(rpc, &request);
            script.requests.insert(TypeId::of::<Q>(), Box::new(request.into_inner()));
            let ok = script.answers.get(&TypeId::of::<R>()).and_then(|ok| ok.downcast_ref::<R>());
            let ok = ok.cloned().unwrap_or_default();
            script.answer.clone().map(|answer| answer.map(|()| ok))
        };
        match answer {
            Some(Ok(ok)) => Ok(Response::new(ok)),
            Some(Err((code, message))) => Err(Status::new(code, message)),
            None => {
                let _told = Dropped(self.0.clone(), rpc);
                tokio::time::sleep(Duration::from_secs(3600)).await;
                Err(Status::internal("the test is too slow"))
            }
        }
    }
}

struct Dropped(Arc<Mutex<Script>>, &'static str);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.lock().unwrap().cancelled.push(self.1);
    }
}

type Answer<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Identity for Plugin {
    async fn get_plugin_info(
        &self,
        r: Request<v1::GetPluginInfoRequest>,
    ) -> Answer<v1::GetPluginInfoResponse> {
        let name = self.came("GetPluginInfo", &r).name.clone();
        let manifest = BTreeMap::new();
        Ok(Response::new(v1::GetPluginInfoResponse { name, vendor_version: "1\n".into(), manifest }))
    }

    async fn get_plugin_capabilities(
        &self,
        r: Request<v1::GetPluginCapabilitiesRequest>,
    ) -> Answer<v1::GetPluginCapabilitiesResponse> {
        let capabilities = self.came("GetPluginCapabilities", &r).plugin_capabilities.clone();
        Ok(Response::new(v1::GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, r: Request<v1::ProbeRequest>) -> Answer<v1::ProbeResponse> {
        let authority = r.extensions().get::<Authority>().map(|a| a.0.clone());
        let late = self.came("Probe", &r).late;
        tokio::time::sleep(late).await;
        let mut script = self.0.lock().unwrap();
        script.authorities.extend(authority);
        script.probe.clone().map_err(|(code, message)| Status::new(code, message))?;
        Ok(Response::new(v1::ProbeResponse { ready: script.ready }))
    }
}

#[derive(Clone)]
pub struct Authority(pub String);

type Boxed<'a, T> = Pin<Box<dyn Future<Output = Answer<T>> + Send + 'a>>;

// As async_trait writes a method: it does not see what a macro makes.
macro_rules! served {
    ($($rpc:ident $name:literal $request:ident -> $response:ident),* $(,)?) => {
        $(fn $rpc<'a, 'b>(&'a self, request: Request<v1::$request>) -> Boxed<'b, v1::$response>
        where
            'a: 'b,
            Self: 'b,
        {
            Box::pin(self.serve($name, request))
        })*
    };
}

#[tonic::async_trait]
impl Node for Plugin {
    async fn node_get_capabilities(
        &self,
        r: Request<v1::NodeGetCapabilitiesRequest>,
    ) -> Answer<v1::NodeGetCapabilitiesResponse> {
        use v1::node_service_capability::{Rpc, Type};
        let kinds = self.asked("NodeGetCapabilities", &r)?.node_capabilities.clone();
        let capability = |r#type| v1::NodeServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type })) };
        let capabilities = kinds.into_iter().map(capability).collect();
        Ok(Response::new(v1::NodeGetCapabilitiesResponse { capabilities }))
    }

    async fn node_get_info(&self, r: Request<v1::NodeGetInfoRequest>) -> Answer<v1::NodeGetInfoResponse> {
        let script = self.asked("NodeGetInfo", &r)?;
        let (node_id, segments) = (script.node_id.clone(), script.topology.clone());
        Ok(Response::new(v1::NodeGetInfoResponse {
            node_id,
            max_volumes_per_node: 7,
            accessible_topology: Some(v1::Topology { segments }),
        }))
    }

    served! {
        node_stage_volume "NodeStageVolume" NodeStageVolumeRequest -> NodeStageVolumeResponse,
        node_unstage_volume "NodeUnstageVolume" NodeUnstageVolumeRequest -> NodeUnstageVolumeResponse,
        node_publish_volume "NodePublishVolume" NodePublishVolumeRequest -> NodePublishVolumeResponse,
        node_unpublish_volume "NodeUnpublishVolume" NodeUnpublishVolumeRequest -> NodeUnpublishVolumeResponse,
        node_get_volume_stats "NodeGetVolumeStats" NodeGetVolumeStatsRequest -> NodeGetVolumeStatsResponse,
        node_get_volume_health "NodeGetVolumeHealth" NodeGetVolumeHealthRequest -> NodeGetVolumeHealthResponse,
        node_get_storage_health "NodeGetStorageHealth" NodeGetStorageHealthRequest -> NodeGetStorageHealthResponse,
        node_expand_volume "NodeExpandVolume" NodeExpandVolumeRequest -> NodeExpandVolumeResponse,
    }
}

#[tonic::async_trait]
impl Controller for Plugin {
    async fn controller_get_capabilities(
        &self,
        r: Request<v1::ControllerGetCapabilitiesRequest>,
    ) -> Answer<v1::ControllerGetCapabilitiesResponse> {
        use v1::controller_service_capability::{Rpc, Type};
        let kinds = self.asked("ControllerGetCapabilities", &r)?.controller_capabilities.clone();
        let capability = |r#type| v1::ControllerServiceCapability { r#type: Some(Type::Rpc(Rpc { r#type })) };
        let capabilities = kinds.into_iter().map(capability).collect();
        Ok(Response::new(v1::ControllerGetCapabilitiesResponse { capabilities }))
    }

    served! {
        create_volume "CreateVolume" CreateVolumeRequest -> CreateVolumeResponse,
        delete_volume "DeleteVolume" DeleteVolumeRequest -> DeleteVolumeResponse,
        controller_publish_volume "ControllerPublishVolume" ControllerPublishVolumeRequest
            -> ControllerPublishVolumeResponse,
        controller_unpublish_volume "ControllerUnpublishVolume" ControllerUnpublishVolumeRequest
            -> ControllerUnpublishVolumeResponse,
        validate_volume_capabilities "ValidateVolumeCapabilities" ValidateVolumeCapabilitiesRequest
            -> ValidateVolumeCapabilitiesResponse,
        list_volumes "ListVolumes" ListVolumesRequest -> ListVolumesResponse,
        controller_list_volume_health "ControllerListVolumeHealth" ControllerListVolumeHealthRequest
            -> ControllerListVolumeHealthResponse,
        controller_get_volume_health "ControllerGetVolumeHealth" ControllerGetVolumeHealthRequest
            -> ControllerGetVolumeHealthResponse,
        get_capacity "GetCapacity" GetCapacityRequest -> GetCapacityResponse,
        create_snapshot "CreateSnapshot" CreateSnapshotRequest -> CreateSnapshotResponse,
        delete_snapshot "DeleteSnapshot" DeleteSnapshotRequest -> DeleteSnapshotResponse,
        list_snapshots "ListSnapshots" ListSnapshotsRequest -> ListSnapshotsResponse,
        get_snapshot "GetSnapshot" GetSnapshotRequest -> GetSnapshotResponse,
        controller_expand_volume "ControllerExpandVolume" ControllerExpandVolumeRequest
            -> ControllerExpandVolumeResponse,
        controller_get_volume "ControllerGetVolume" ControllerGetVolumeRequest -> ControllerGetVolumeResponse,
        controller_modify_volume "ControllerModifyVolume" ControllerModifyVolumeRequest
            -> ControllerModifyVolumeResponse,
    }
}
