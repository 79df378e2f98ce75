//! The program: its commands, its start and its end.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use csi_proto::cluster::v1::admin_server::AdminServer;
use csi_proto::cluster::v1::cluster_server::ClusterServer;
use csi_proto::identity::{Identity, Role};
use csid::metrics;
use csid_etcd::{EtcdConfig, EtcdRegistry, Expected, Guard, RowKey, Timing, Write, Written};
use futures_util::FutureExt;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use sd_notify::NotifyState;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tonic::transport::{Certificate, Server, ServerTlsConfig};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

use crate::away::fence_away;
use crate::certificates::{Certificates, read_crl};
use crate::claims::due_releases;
use crate::cluster::{Cluster, check};
use crate::config::{Config, Keys, credentials};
use crate::drive::Driving;
use crate::edges;
use crate::expansions::due_expansions;
use crate::failure::ServerError;
use crate::gate::GateLayer;
use crate::grants::May;
use crate::listen;
use crate::places::Places;
use crate::presence::Presence;
use crate::rows::{self, MetaRow, SCHEMAS, Schemas, ServerRow};
use crate::scrape::Sources;
use crate::service::{Service, end_if_over};
use crate::sessions::Sessions;

/// Connections beyond those of sessions: calls of operators, and nodes that have not said Hello yet.
const MORE_CONNECTIONS: usize = 1000;
const HANDSHAKE: Duration = Duration::from_secs(10);
const PING: Duration = Duration::from_secs(10);
/// A call without an answer for so long is given up. The longest waits for a release.
const CALL: Duration = Duration::from_secs(70);
const CALLS_OF_CONNECTION: usize = 128;
/// The limit of a message: a registration has at most 64 KiB in etcd.
const MESSAGE: usize = 256 * 1024;
const HEADERS: u32 = 16 * 1024;
/// How long calls in flight have at the end.
const LAST_CALLS: Duration = Duration::from_secs(10);
/// The least time between two looks for claims whose release their nodes have to be asked for.
const LOOK: Duration = Duration::from_millis(300);
/// Volumes that wait for a look at what their controllers owe. Others are found a little later.
const DUE: usize = 1024;
/// The time between two looks at the version of the values.
const SCHEMA: Duration = Duration::from_secs(2);
/// The status for systemd of a server that serves.
const SERVES: &str = "serves nodes and operators";
/// The same of one whose etcd is full.
const FULL: &str = "no claim begins or ends: etcd's database has reached its quota";
/// The time between two looks at the rows of the nodes that have a session.
const NODES: Duration = Duration::from_secs(3);

/// A server of a csid cluster
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The configuration
    #[arg(long, value_name = "FILE", default_value = "/etc/csid-server/csid-server.toml")]
    config: PathBuf,
    /// The directory with ca.pem, server.pem and server.key, and with etcd-ca.pem, etcd.pem and etcd.key
    /// [default: CREDENTIALS_DIRECTORY of systemd]
    #[arg(long, value_name = "DIR")]
    credentials: Option<PathBuf>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Serve nodes and operators (this is the default)
    Run,
    /// Make the cluster's row in etcd, once for each cluster
    Init,
    /// Read the configuration and say what is wrong with it
    CheckConfig,
}

/// Runs a server of this release.
pub fn main() -> ExitCode {
    main_knowing(SCHEMAS)
}

/// Runs a server that knows these versions of values.
pub fn main_knowing(schemas: Schemas) -> ExitCode {
    let filter = std::env::var("CSID_LOG").ok().and_then(|filter| filter.parse().ok());
    let filter = filter.unwrap_or_else(|| Targets::new().with_default(LevelFilter::INFO));
    let log = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false).without_time();
    tracing_subscriber::registry().with(filter).with(log).init();
    match begin(Arguments::parse(), schemas) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("csid-server: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// One worker: a call passes through several tasks, and to wake a second worker takes longer than what each task does.
#[tokio::main(worker_threads = 1)]
async fn begin(arguments: Arguments, schemas: Schemas) -> Result<()> {
    csid::random::open();
    let config = Config::read(&arguments.config)?;
    match arguments.command {
        Some(Command::CheckConfig) => config.read_crl()?.map_or(Ok(()), |crl| read_crl(&crl).map(drop)),
        Some(Command::Init) => init(&config, &keys(arguments.credentials, &config)?, schemas).await,
        None | Some(Command::Run) => {
            let keys = keys(arguments.credentials, &config)?;
            run(config, keys, &arguments.config, schemas).await
        }
    }
}

fn keys(directory: Option<PathBuf>, config: &Config) -> Result<Keys> {
    let keys = Keys::read(&credentials(directory)?, &config.endpoints)?;
    name_of(&keys, &config.cluster)?;
    Ok(keys)
}

/// Returns the name in the server's certificate. It has to be a server's of this cluster.
fn name_of(keys: &Keys, cluster: &str) -> Result<String> {
    // The parser's error has the text that it cannot read, and a key may be in the same file.
    let Ok(certificate) = CertificateDer::from_pem_slice(&keys.certificate) else {
        bail!("server.pem: not a certificate as PEM")
    };
    let read = webpki::EndEntityCert::try_from(&certificate).context("server.pem")?;
    match Identity::of(read.valid_uri_names()) {
        Some(Identity { cluster: of, role: Role::Server, name }) if of == cluster => Ok(name),
        _ => bail!("server.pem has not exactly one URI name csid://{cluster}/server/NAME"),
    }
}

fn registry(config: &Config, keys: &Keys) -> Result<EtcdRegistry> {
    let etcd = EtcdConfig {
        endpoints: config.endpoints.clone(),
        tls: keys.etcd.clone(),
        prefix: config.prefix.clone(),
        timing: Timing::default(),
    };
    // Nodes have events. A server has a log.
    Ok(EtcdRegistry::start(&etcd, Box::new(|_| std::future::ready(()).boxed()))?)
}

async fn init(config: &Config, keys: &Keys, schemas: Schemas) -> Result<()> {
    let rows = registry(config, keys)?.rows();
    // The answer has the ID of etcd's cluster.
    rows.read(&RowKey::Meta).await?;
    let meta = MetaRow::new(&config.cluster, schemas, rows.etcd_cluster());
    let guard = Guard { key: RowKey::Meta, is: Expected::Absent };
    let write = Write { value: Some(rows::write(&RowKey::Meta, &meta)?), key: RowKey::Meta, lease: 0 };
    let written = edges::write(&rows, &[guard], vec![write]).await?;
    if let Written::Done { .. } = written {
        println!("the cluster {} is there", config.cluster);
        return Ok(());
    }
    match rows.read(&RowKey::Meta).await? {
        Some(row) if written == Written::Unknown => {
            let present = rows::read::<MetaRow>(&RowKey::Meta, &row)?.value;
            Ok(check(&present, &config.cluster, schemas)?)
        }
        Some(row) => {
            let MetaRow { cluster, generation, .. } = rows::read(&RowKey::Meta, &row)?.value;
            bail!(
                "etcd has the cluster {cluster} below {} already, in generation {generation}",
                config.prefix
            )
        }
        None => bail!("etcd gave no answer that decides whether the cluster is there; it is not yet"),
    }
}

async fn run(config: Config, keys: Keys, file: &Path, schemas: Schemas) -> Result<()> {
    let mut stops = [signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?];
    let mut reloads = signal(SignalKind::hangup())?;
    let row = ServerRow {
        name: name_of(&keys, &config.cluster)?,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        schema_min: schemas.min,
        schema_max: schemas.max,
        address: config.address.clone(),
        grants: config.grants.digest(),
        beat: 0,
        rest: Default::default(),
    };
    let metrics = config.metrics;
    let (listen, most) = (config.listen, config.max_sessions + MORE_CONNECTIONS);
    let tls = ServerTlsConfig::new()
        .identity(tonic::transport::Identity::from_pem(&keys.certificate, &keys.key))
        .client_ca_root(Certificate::from_pem(&keys.ca))
        .timeout(HANDSHAKE);
    let server = Server::builder()
        .tls_config(tls)
        .context("the certificate of this server")?
        .timeout(CALL)
        .concurrency_limit_per_connection(CALLS_OF_CONNECTION)
        .max_concurrent_streams(CALLS_OF_CONNECTION as u32)
        .http2_keepalive_interval(Some(PING))
        .http2_keepalive_timeout(Some(PING))
        .http2_max_header_list_size(HEADERS);

    let name = row.name.clone();
    let registry = registry(&config, &keys)?;
    let certificates = Certificates::new(&keys.ca, config.read_crl()?.unwrap_or_default())?;
    drop(keys);
    let (due, volumes) = mpsc::channel(DUE);
    let cluster = Arc::new(Cluster::new(config, certificates, registry, Presence::new(), due, schemas));
    cluster.meta().await.context("the cluster's row in etcd, which csid-server init makes")?;
    cluster.notice_restore().await.context("the ID of the etcd cluster")?;
    let sessions = Arc::new(Sessions::default());
    let listener = TcpListener::bind(listen).await.with_context(|| listen.to_string())?;
    let of_metrics = match metrics {
        Some(address) => Some(TcpListener::bind(address).await.with_context(|| address.to_string())?),
        None => None,
    };

    let present = tokio::spawn({
        let cluster = cluster.clone();
        async move {
            // A reload changes the grants.
            let now = || ServerRow { grants: cluster.config.grants.digest(), ..row.clone() };
            cluster.presence.keep(&cluster.registry, now, || notify(NotifyState::Watchdog)).await
        }
    });
    let following = tokio::spawn(follow_schema(cluster.clone()));
    let asking = tokio::spawn(ask_nodes(cluster.clone(), sessions.clone()));
    let ending = tokio::spawn(end_sessions(cluster.clone(), sessions.clone()));
    let fencing = tokio::spawn(fence_away(cluster.clone(), name));
    let driving = Arc::new(Driving::new(cluster.clone(), sessions.clone()));
    let calling = tokio::spawn(driving.clone().run(volumes));
    let tasks = driving.tasks.clone();
    let counting = of_metrics.map(|listener| {
        let (cluster, sessions, driving) = (cluster.clone(), sessions.clone(), driving.clone());
        let sources = Sources { cluster, sessions, driving, counted: Arc::default() };
        tokio::spawn(metrics::serve(metrics::Listener::Tcp(listener), sources))
    });
    let places = Arc::new(Places::new(cluster.config.max_sessions, cluster.metrics.clone()));
    let gate = GateLayer { cluster: cluster.clone(), places: places.clone() };
    let service = Service { cluster: cluster.clone(), sessions: sessions.clone(), driving, places };
    let of_operators = AdminServer::new(service.clone()).max_decoding_message_size(MESSAGE);
    let calls = ClusterServer::new(service).max_decoding_message_size(MESSAGE);
    let (stop, stopped) = oneshot::channel::<()>();
    let metrics = cluster.metrics.clone();
    let serving = tokio::spawn(
        server
            .layer(gate)
            .add_service(calls)
            .add_service(of_operators)
            .serve_with_incoming_shutdown(listen::accept(listener, most, metrics), stopped.map(drop)),
    );
    let mut presence = cluster.presence.subscribe();
    let [terminate, interrupt] = &mut stops;
    let ready = async {
        // The channel lives as long as `cluster`.
        let _ = presence.wait_for(Option::is_some).await;
        notify(NotifyState::Status(if cluster.presence.is_full() { FULL } else { SERVES }));
        notify(NotifyState::Ready);
        tracing::info!(%listen, "nodes and operators are served");
        std::future::pending::<()>().await
    };
    tokio::pin!(ready);
    loop {
        tokio::select! {
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            Some(()) = reloads.recv() => reload(file, &cluster, &sessions),
            () = &mut ready => break,
            // What this process remembers is of another history. systemd starts it again.
            why = cluster.rows.restored() => bail!("etcd was restored from a backup while this server ran: {why}"),
        }
    }
    notify(NotifyState::Stopping);
    tracing::info!("this server stops");
    following.abort();
    asking.abort();
    if let Some(counting) = counting {
        counting.abort();
    }
    ending.abort();
    fencing.abort();
    calling.abort();
    // A call whose outcome is not written is unknown to the next server.
    if tokio::time::timeout(LAST_CALLS, tasks.stop()).await.is_err() {
        tracing::warn!(
            "controller calls were in flight for {} s more, and are given up",
            LAST_CALLS.as_secs()
        );
    }
    present.abort();
    // The task is over before this server says that it leaves.
    let _ = present.await;
    // Sessions end with the presence, and nodes go to another server. New calls are refused.
    let here = cluster.presence.stop();
    drop(stop);
    let ended = tokio::time::timeout(LAST_CALLS, serving).await;
    if let Some(here) = here {
        let revoked = tokio::time::timeout(LAST_CALLS, cluster.rows.revoke_lease(here.lease)).await;
        if !matches!(revoked, Ok(Ok(()))) {
            tracing::warn!("the lease in etcd was not ended; it ends by itself");
        }
    }
    match ended {
        Ok(served) => Ok(served.context("the task that serves")??),
        Err(_) => {
            tracing::warn!("calls were in flight for {} s more, and are given up", LAST_CALLS.as_secs());
            Ok(())
        }
    }
}

/// Takes the grants, the fence and the revocation lists of the files. Files that are wrong change nothing.
fn reload(file: &Path, cluster: &Cluster, sessions: &Sessions) {
    let taken = || -> Result<_> {
        let new = Config::read(file)?;
        let is_revoked = cluster.certificates.set_revoked(new.read_crl()?.unwrap_or_default())?;
        Ok((is_revoked, cluster.config.take(&new)))
    };
    let (is_revoked, others) = match taken() {
        Ok(taken) => taken,
        Err(error) => return tracing::error!("the configuration was not taken: {error:#}"),
    };
    match others.is_empty() {
        true => tracing::info!("the configuration was taken"),
        false => tracing::warn!(
            keys = others.join(", "),
            "the configuration was taken but for keys that need a restart"
        ),
    }
    for (node, number) in sessions.nodes() {
        let may_join = cluster.config.grants.allow_anywhere(&cluster.identity_of(&node), May::Join);
        if !may_join {
            sessions.end(
                &node,
                number,
                ServerError::denied(format!("node {node} has no grant for join any more")),
            );
        } else if is_revoked {
            // A session was verified when it began. Each node that is not revoked joins again at once.
            let text = "the revocation lists have changed: join again";
            sessions.end(&node, number, ServerError::Unavailable(text.into()));
        }
    }
}

/// Has this server serve only while it knows the version of the values in etcd, until the task is aborted. systemd gets the status.
async fn follow_schema(cluster: Arc<Cluster>) {
    let mut reported = (None, false);
    loop {
        tokio::time::sleep(SCHEMA).await;
        // Each read of the row closes the presence if the version is unknown. Without etcd nothing is known, and the beats decide.
        if cluster.meta_now().await.is_ok() {
            cluster.presence.close(None);
        }
        let is_full = cluster.presence.here().is_ok() && cluster.presence.is_full();
        let now = (cluster.presence.closed(), is_full);
        if now == reported {
            continue;
        }
        match &now {
            (Some(why), _) => {
                tracing::error!("this server serves nothing: {why}");
                notify(NotifyState::Status(&format!("serves nothing: {why}")));
            }
            (None, full) => {
                if reported.0.is_some() {
                    tracing::info!("this server knows the version of the values again, and serves");
                }
                notify(NotifyState::Status(if *full { FULL } else { SERVES }));
            }
        }
        reported = now;
    }
}

/// Asks nodes for the releases that operators want, and for their parts of expansions, until the task is aborted.
pub async fn ask_nodes(cluster: Arc<Cluster>, sessions: Arc<Sessions>) {
    loop {
        match cluster.registry.restless().await {
            Ok((records, index)) => {
                let due =
                    records.iter().flat_map(|record| due_releases(record).chain(due_expansions(record)));
                sessions.ask(&due.collect::<Vec<_>>());
                // A session that comes later wants them, too: a beat changes the index every few seconds.
                if cluster.registry_changed(index).await.is_none() {
                    return;
                }
            }
            Err(error) => tracing::warn!(%error, "what nodes have to do cannot be listed"),
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Ends the sessions of nodes that may have none any more, and has nodes learn that they drain, until the task is aborted. It reads all nodes'
/// rows in pages, and again only when one has changed or a session has begun.
pub async fn end_sessions(cluster: Arc<Cluster>, sessions: Arc<Sessions>) {
    // What was known before the last read, and what it has found.
    let (mut read, mut may) = ((0, Vec::new()), HashMap::new());
    loop {
        tokio::time::sleep(NODES).await;
        // Without etcd it is tried again.
        cluster.part_again().await;
        let _ = cluster.end_unbegun(|node| sessions.nodes().iter().any(|(of, _)| of == node)).await;
        let open = sessions.nodes();
        let known = (cluster.registry.nodes_changed(), open.clone());
        if open.is_empty() {
            continue;
        }
        // A session of another generation or mode ends when this server has seen that.
        let _ = cluster.meta_now().await;
        if known != read {
            // Without etcd all sessions end, by the presence.
            let Ok(found) = cluster.nodes_with_sessions().await else { continue };
            (read, may) = (known, found);
        }
        for (node, number) in open {
            match may.get(&node) {
                // The row was read after the session had begun, so it is no older than the Welcome.
                Some(drain) => sessions.set_drain(&node, number, *drain),
                None => end_if_over(&cluster, &sessions, &node, number).await,
            }
        }
    }
}

fn notify(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "systemd was not notified");
    }
}
