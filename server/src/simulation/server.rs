//! A server of the simulation: the tasks of the program, without TLS and without a listener.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use csi_proto::cluster::v1::cluster_server::ClusterServer;
use csi_proto::identity::{Identity, Role};
use csid_etcd::double::{Clear, Double};
use csid_etcd::{EtcdRegistry, Expected, Guard, RowKey, Timing, Write};
use futures_util::FutureExt;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::network::{Network, ToEtcd};
use crate::certificates::{Certificates, authority};
use crate::cluster::Cluster;
use crate::config::Config;
use crate::drive::Driving;
use crate::grants::{Grant, Grants};
use crate::places::Places;
use crate::presence::Presence;
use crate::program::{ask_nodes, end_sessions};
use crate::rows::{self, MetaRow, SCHEMAS, ServerRow};
use crate::service::Service;
use crate::sessions::Sessions;

pub const CLUSTER: &str = "prod";
const MEMBERS: usize = 3;
/// How long a plugin has.
pub const CONTROLLER: Duration = Duration::from_secs(10);

/// The authority of no certificate: the simulation has no TLS.
static CA: LazyLock<Vec<u8>> =
    LazyLock::new(|| std::fs::read(authority::Authority::new().certificate()).unwrap());

pub fn identity(role: Role, name: &str) -> Identity {
    Identity { cluster: CLUSTER.to_owned(), role, name: name.to_owned() }
}

/// A server that runs.
pub struct Running {
    pub service: Service,
    pub calls: ClusterServer<Service>,
    is_dead: Arc<AtomicBool>,
    tasks: Mutex<Vec<AbortHandle>>,
}

impl Running {
    /// Runs a task of the server. It ends with the server.
    pub fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> tokio::task::JoinHandle<T> {
        let task = tokio::spawn(task);
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.retain(|task| !task.is_finished());
        tasks.push(task.abort_handle());
        task
    }

    pub fn is_dead(&self) -> bool {
        self.is_dead.load(Ordering::Relaxed)
    }

    /// Kills the server. What it has begun in tasks of its own may go on, and reaches nothing any more.
    pub fn kill(&self) {
        self.is_dead.store(true, Ordering::Relaxed);
        for task in self.tasks.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            task.abort();
        }
        self.service.cluster.presence.leave();
    }
}

fn config(name: &str) -> Config {
    let grant = |who: &str, may: &[&str]| Grant {
        who: who.to_owned(),
        namespaces: vec!["*".to_owned()],
        may: may.iter().map(|word| (*word).to_owned()).collect(),
    };
    let grants = vec![
        grant("node/n*", &["join", "mount"]),
        grant("node/c*", &["join", "controller:p"]),
        grant("operator/all", &["read", "register", "attach", "release-others", "fence", "admit"]),
    ];
    Config {
        cluster: CLUSTER.to_owned(),
        listen: "127.0.0.1:1".parse().unwrap(),
        address: format!("{name}:7443"),
        metrics: None,
        crl: None,
        max_claims: 1000,
        max_volumes: 100_000,
        max_sessions: 100,
        controller_time: CONTROLLER,
        endpoints: Vec::new(),
        prefix: "/csid/".to_owned(),
        fence: Default::default(),
        grants: Grants::new(grants).unwrap(),
    }
}

/// Writes the cluster's row, as csid-server init does.
pub async fn init(double: &Double) {
    let events = Box::new(|_| std::future::ready(()).boxed());
    let connections = vec![double.connect(Arc::new(Clear))];
    let registry = EtcdRegistry::start_at(connections, "/csid/", Timing::default(), events).unwrap();
    // The answer has the ID of etcd's cluster.
    registry.rows().read(&RowKey::Meta).await.unwrap();
    let meta = MetaRow::new(CLUSTER, SCHEMAS, registry.rows().etcd_cluster());
    let guard = Guard { key: RowKey::Meta, is: Expected::Absent };
    let value = Some(rows::write(&RowKey::Meta, &meta).unwrap());
    let write = Write { value, key: RowKey::Meta, lease: 0 };
    registry.rows().write(&[guard], vec![write]).await.unwrap();
}

/// Returns a registry of a server on the etcd in memory.
pub fn registry(
    double: &Double,
    network: &Arc<Network>,
    server: usize,
    is_dead: &Arc<AtomicBool>,
) -> EtcdRegistry {
    let way = Arc::new(ToEtcd { network: network.clone(), server, is_dead: is_dead.clone() });
    let connections = (0..MEMBERS).map(|_| double.connect(way.clone())).collect();
    let events = Box::new(|_| std::future::ready(()).boxed());
    EtcdRegistry::start_at(connections, "/csid/", Timing::default(), events).unwrap()
}

/// Starts a server.
pub fn start(double: &Double, network: &Arc<Network>, server: usize) -> Arc<Running> {
    let is_dead = Arc::new(AtomicBool::new(false));
    let registry = registry(double, network, server, &is_dead);
    let (due, volumes) = mpsc::channel(1024);
    let certificates = Certificates::new(&CA, Vec::new()).unwrap();
    let name = format!("s{server}");
    let cluster =
        Arc::new(Cluster::new(config(&name), certificates, registry, Presence::new(), due, SCHEMAS));
    let row = ServerRow {
        name: name.clone(),
        version: "0.1.0".to_owned(),
        schema_min: SCHEMAS.min,
        schema_max: SCHEMAS.max,
        address: cluster.config.address.clone(),
        grants: cluster.config.grants.digest(),
        beat: 0,
        rest: Default::default(),
    };
    let sessions = Arc::new(Sessions::default());
    let driving = Arc::new(Driving::new(cluster.clone(), sessions.clone()));
    let places = Arc::new(Places::new(cluster.config.max_sessions, cluster.metrics.clone()));
    let service =
        Service { cluster: cluster.clone(), sessions: sessions.clone(), driving: driving.clone(), places };
    let calls = ClusterServer::new(service.clone());
    let running = Arc::new(Running { service, calls, is_dead, tasks: Mutex::default() });
    running.spawn({
        let cluster = cluster.clone();
        async move { cluster.presence.keep(&cluster.registry, || row.clone(), || ()).await }
    });
    running.spawn(ask_nodes(cluster.clone(), sessions.clone()));
    running.spawn(end_sessions(cluster, sessions));
    running.spawn(driving.run(volumes));
    running
}
