//! Plugins that register themselves: a real registrar on a socket in csid's directory.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use csi_proto::pluginregistration::registration_server::{Registration, RegistrationServer};
use csi_proto::pluginregistration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

use super::*;
use crate::Kind;

/// A registrar that names the plugin's socket and keeps the status that it got.
#[derive(Clone)]
struct Registrar {
    info: Arc<Mutex<PluginInfo>>,
    asked: Arc<AtomicUsize>,
    told: Arc<Mutex<Vec<RegistrationStatus>>>,
}

#[tonic::async_trait]
impl Registration for Registrar {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        self.asked.fetch_add(1, Ordering::AcqRel);
        Ok(Response::new(self.info.lock().unwrap().clone()))
    }

    async fn notify_registration_status(
        &self,
        status: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        self.told.lock().unwrap().push(status.into_inner());
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

impl Registrar {
    fn of(fake: &Fake) -> Self {
        let info = PluginInfo {
            r#type: "CSIPlugin".into(),
            name: "p".into(),
            endpoint: fake.socket.to_str().unwrap().into(),
            supported_versions: vec!["1.0.0".into()],
        };
        Registrar { info: Arc::new(Mutex::new(info)), asked: Arc::default(), told: Arc::default() }
    }

    fn told(&self) -> Vec<(bool, String)> {
        let told = self.told.lock().unwrap();
        told.iter().map(|status| (status.plugin_registered, status.error.clone())).collect()
    }

    /// Listen; the end of the task is the end of the registrar, its socket is left as by a kill -9.
    fn listen(&self, socket: &Path) -> JoinHandle<()> {
        let listener = UnixListenerStream::new(UnixListener::bind(socket).unwrap());
        let service = RegistrationServer::new(self.clone());
        tokio::spawn(async move {
            let server = tonic::transport::Server::builder().add_service(service);
            server.serve_with_incoming(listener).await.unwrap();
        })
    }
}

struct Watched {
    host: Host,
    watch: JoinHandle<()>,
}

impl Watched {
    fn new() -> Self {
        let host = Host::new();
        let watch = watching(&host.plugins);
        Watched { host, watch }
    }

    fn socket(&self, name: &str) -> PathBuf {
        let directory = self.host.plugins.0.directories.registrations();
        std::fs::create_dir_all(&directory).unwrap();
        directory.join(name)
    }

    fn instances(&self) -> usize {
        self.host.plugins.view("p").map_or(0, |view| view.instances.len())
    }
}

fn watching(plugins: &Plugins) -> JoinHandle<()> {
    let plugins = plugins.clone();
    tokio::spawn(async move { plugins.watch_registrations().await })
}

#[tokio::test]
async fn plugin_lives_as_long_as_its_registration_socket() {
    let w = Watched::new();
    let mut fake = w.host.fake();
    fake.start();
    let registrar = Registrar::of(&fake);
    let socket = w.socket("p-reg.sock");
    let listening = registrar.listen(&socket);
    w.host.ready().await;
    until(|| registrar.told() == [(true, String::new())]).await;
    let view = w.host.plugins.view("p").unwrap();
    assert_eq!((view.owner, view.supervision, view.instances.len()), (0, "external", 1));
    let refused = w.host.plugins.unregister("p", None, 0).await.unwrap_err();
    assert_eq!(refused.kind, Kind::NotSupported);
    assert!(refused.message.contains("plugins_registry"), "{refused}");

    // A registrar that died left its socket: the plugin is not the registrar.
    listening.abort();
    w.host.ready().await;
    std::fs::remove_file(&socket).unwrap();
    until(|| w.instances() == 0).await;
    let said = async {
        while w.host.events("plugin-deregistered").await.len() != 1 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(LONG, said).await.expect("an event says so");

    // Another socket by the same name is another registration, also when nobody saw the time between.
    let listening = registrar.listen(&socket);
    until(|| registrar.told().len() == 2).await;
    listening.abort();
    registrar.info.lock().unwrap().name = "q".into();
    std::fs::remove_file(&socket).unwrap();
    let _listening = registrar.listen(&socket);
    until(|| w.host.plugins.view("q").is_some() && w.instances() == 0).await;
    until(|| registrar.told().len() == 3).await;
    assert_eq!(w.host.events("plugin-registered").await.len(), 3);
}

#[tokio::test]
async fn self_registered_plugin_survives_restart_of_csid() {
    let w = Watched::new();
    let mut fake = w.host.fake();
    fake.start();
    let registrar = Registrar::of(&fake);
    let _listening = registrar.listen(&w.socket("p-reg.sock"));
    w.host.ready().await;
    until(|| registrar.told().len() == 1).await;
    w.watch.abort();
    w.host.plugins.shutdown().await;
    w.host.store.close().await.unwrap();

    let (store, rows) = open(w.host.directory.path());
    let directories = directories(w.host.directory.path());
    let plugins =
        Plugins::start_at(PACE, &directories, RPC, store.clone(), Vec::new(), (rows, BTreeMap::new()));
    assert!(plugins.view("p").is_some(), "before anybody is asked");
    plugins.ready("p", Service::Node, soon(LONG)).await.unwrap();
    let watch = watching(&plugins);
    until(|| registrar.told().len() == 2).await;
    assert_eq!(plugins.view("p").unwrap().instances.len(), 1);

    // One whose socket went while csid was away goes when csid looks.
    watch.abort();
    plugins.shutdown().await;
    store.close().await.unwrap();
    std::fs::remove_file(w.socket("p-reg.sock")).unwrap();
    let (store, rows) = open(w.host.directory.path());
    let plugins = Plugins::start_at(PACE, &directories, RPC, store, Vec::new(), (rows, BTreeMap::new()));
    assert!(plugins.view("p").is_some());
    let _watch = watching(&plugins);
    until(|| plugins.view("p").is_none()).await;
}

/// A registrar removes its socket at each start of its driver.
#[tokio::test]
async fn node_id_survives_its_registration_socket() {
    let w = Watched::new();
    let mut fake = w.host.fake();
    fake.start();
    let registrar = Registrar::of(&fake);
    let socket = w.socket("p-reg.sock");
    let listening = registrar.listen(&socket);
    w.host.ready().await;
    let left = async |times: usize| {
        until(|| w.instances() == 0).await;
        let written = async {
            while w.host.events("plugin-deregistered").await.len() != times {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(LONG, written).await.expect("the journal has its end");
    };
    let kept = async || w.host.store.rows().await.unwrap().node_ids.remove("p");
    listening.abort();
    std::fs::remove_file(&socket).unwrap();
    left(1).await;
    assert_eq!(kept().await.as_deref(), Some("node-1"), "it is there after a reboot, too");

    fake.script().node_id = "node-2".into();
    let listening = registrar.listen(&socket);
    w.host.ready().await;
    let refused = w.host.plugins.refuse_other_node_id("p").unwrap_err();
    assert!(refused.message.contains("`node-1`"), "{refused}");
    assert_eq!(w.host.plugins.node_id("p"), "", "nothing is attached under it");
    listening.abort();
    std::fs::remove_file(&socket).unwrap();
    left(2).await;

    // Root forgets it with the plugin that has left.
    w.host.plugins.unregister("p", None, OTHER).await.unwrap();
    w.host.plugins.unregister("p", Some("default"), 0).await.unwrap();
    assert_eq!(kept().await.as_deref(), Some("node-1"));
    w.host.plugins.unregister("p", None, 0).await.unwrap();
    assert_eq!(kept().await, None);
    let _listening = registrar.listen(&socket);
    w.host.ready().await;
    assert_eq!(w.host.plugins.node_id("p"), "node-2");
}

/// It went before it could be asked again.
#[tokio::test]
async fn socket_gone_unanswered_removes_remembered_plugin() {
    let w = Watched::new();
    let mut fake = w.host.fake();
    fake.start();
    let registrar = Registrar::of(&fake);
    let socket = w.socket("p-reg.sock");
    let listening = registrar.listen(&socket);
    until(|| registrar.told().len() == 1).await;
    w.watch.abort();
    listening.abort();
    std::fs::remove_file(&socket).unwrap();
    let silent = UnixListener::bind(&socket).unwrap();
    let _watch = watching(&w.host.plugins);
    let _connection = tokio::time::timeout(LONG, silent.accept()).await.expect("it is asked").unwrap();
    assert_eq!(w.instances(), 1);
    std::fs::remove_file(&socket).unwrap();
    until(|| w.instances() == 0).await;
}

/// A registration that was slow ends before the next one of its name begins, and takes nothing of that away.
#[tokio::test]
async fn socket_recreated_while_busy_is_registered() {
    let w = Watched::new();
    let mut fake = w.host.fake();
    fake.start();
    let registrar = Registrar::of(&fake);
    let socket = w.socket("p-reg.sock");
    let busy = w.host.plugins.0.changing.lock().await;
    let asked = || registrar.asked.load(Ordering::Acquire);
    let first = registrar.listen(&socket);
    until(|| asked() == 1).await;
    std::fs::remove_file(&socket).unwrap();
    // The watch has seen that it is gone.
    let other = Registrar::of(&fake);
    other.info.lock().unwrap().r#type = "DevicePlugin".into();
    let _other = other.listen(&w.socket("other-reg.sock"));
    until(|| !other.told().is_empty()).await;
    let _second = registrar.listen(&socket);
    drop(busy);
    // The second is asked when the first has ended, whose caller was perhaps gone.
    until(|| asked() == 2).await;
    first.abort();
    until(|| !registrar.told().is_empty()).await;
    w.host.ready().await;
    assert_eq!(w.instances(), 1);
}

#[tokio::test]
async fn socket_cannot_take_the_name_of_another_plugin() {
    let w = Watched::new();
    let mut fake = w.host.fake();
    fake.start();
    w.host.register(&fake).await;
    let registrar = Registrar::of(&fake);
    registrar.info.lock().unwrap().endpoint = "/run/none/other.sock".into();
    let _listening = registrar.listen(&w.socket("p-reg.sock"));
    until(|| !registrar.told().is_empty()).await;
    let (taken, why) = registrar.told().remove(0);
    assert!(!taken && why.contains("otherwise"), "{why}");
    assert_eq!(w.host.plugins.view("p").unwrap().instances, ["default"]);
    let spec = PluginSpec { instance: Some("reg0123456789ab".into()), ..external(&fake.socket) };
    let refused = w.host.plugins.register("q", spec, 0).await.unwrap_err();
    assert_eq!(refused.kind, Kind::InvalidArgument, "{refused}");
}

#[tokio::test]
async fn failed_registration_gets_reason_and_is_retried() {
    let w = Watched::new();
    let mut fake = w.host.fake();
    fake.start();
    let registrar = Registrar::of(&fake);
    registrar.info.lock().unwrap().r#type = "DevicePlugin".into();
    let _listening = registrar.listen(&w.socket("p-reg.sock"));
    std::fs::write(w.socket("file.sock"), "").unwrap();
    let _dead = UnixListener::bind(w.socket("dead-reg.sock")).unwrap();
    until(|| !registrar.told().is_empty()).await;
    let (taken, why) = registrar.told().remove(0);
    assert!(!taken && why.contains("CSIPlugin"), "{why}");
    assert!(w.host.plugins.list().is_empty());
    registrar.info.lock().unwrap().r#type = "CSIPlugin".into();
    w.host.ready().await;

    // Another instance may join, but not at the same socket; and the first one is not replaced.
    let other = Registrar::of(&fake);
    let _listening = other.listen(&w.socket("other-reg.sock"));
    until(|| !other.told().is_empty()).await;
    let (taken, why) = other.told().remove(0);
    assert!(!taken && why.contains("has that socket"), "{why}");
    let mut second = Fake::new(w.host.directory.path(), "second");
    second.start();
    other.info.lock().unwrap().endpoint = format!("unix://{}", second.socket.display());
    until(|| w.instances() == 2).await;
}
