//! A cluster for one test: etcd, servers, and nodes with their links. All of it ends with the test's thread.

use std::collections::BTreeMap;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use csi_proto::cluster::v1::admin_client::AdminClient;
use csi_proto::cluster::v1::cluster_client::ClusterClient;
use csi_proto::cluster::v1::{
    Attaches, Capability, ChangeAsk, ClaimAsk, Failure, FromNode, Hello, Owed, PluginReport, Plugins,
    Register, ReleaseAsk, Spec, ToNode, Use, VolumeRow, Welcome, change_ask, from_node, to_node,
};
use csid_etcd::api::kv_client::KvClient;
use csid_etcd::api::request_op::Request as Operation;
use csid_etcd::api::{
    CompactionRequest, DeleteRangeRequest, KeyValue, PutRequest, RangeRequest, RequestOp, TxnRequest,
};
use hyper_util::rt::TokioIo;
use prost::Message;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Status, Streaming};

use crate::certificates::{Authority, Pair, Purpose};
use crate::etcd::{Cluster as Etcd, command};
use crate::fault::Fault;

/// How long a step may take on a busy machine.
pub const SOON: Duration = Duration::from_secs(20);
const ANSWER: Duration = Duration::from_secs(30);

/// The grants of the tests. Nodes n1 to n9 may mount in `default` and `shared`.
pub const GRANTS: &str = r#"
[[grant]]
who = "node/n*"
namespaces = ["default", "shared"]
may = ["join", "mount"]

[[grant]]
who = "node/n-registers"
namespaces = ["default"]
may = ["register"]

[[grant]]
who = "node/c*"
namespaces = ["default", "shared"]
may = ["join", "controller:p"]

[[grant]]
who = "node/shared-ctl"
namespaces = ["shared"]
may = ["join", "controller:p"]

[[grant]]
who = "node/joins"
namespaces = ["*"]
may = ["join"]

[[grant]]
who = "operator/all"
namespaces = ["*"]
may = ["read", "register", "claim-for", "release-others", "fence", "admit", "drain", "cluster"]

[[grant]]
who = "operator/all"
namespaces = ["*"]
may = ["cluster"]

[[grant]]
who = "operator/anna"
namespaces = ["*"]
may = ["read", "admit"]

[[grant]]
who = "operator/second"
namespaces = ["*"]
may = ["read", "admit"]

[[grant]]
who = "operator/reads"
namespaces = ["*"]
may = ["read"]

[[grant]]
who = "operator/local"
namespaces = ["default"]
may = ["read", "admit", "cluster"]

[[grant]]
who = "node/n-trusted"
namespaces = ["*"]
may = ["read", "register", "claim-for", "release-others", "fence", "admit", "cluster"]

[[grant]]
who = "operator/releases"
namespaces = ["default"]
may = ["release-others"]

[[grant]]
who = "operator/all"
namespaces = ["*"]
may = ["create", "delete", "expand", "snapshot"]

[[grant]]
who = "node/n-creates"
namespaces = ["default"]
may = ["create", "delete", "expand", "snapshot"]

[[grant]]
who = "operator/creates"
namespaces = ["default"]
may = ["create", "delete", "expand", "snapshot"]

[[grant]]
who = "operator/all"
namespaces = ["*"]
may = ["attach"]

[[grant]]
who = "node/n-attaches"
namespaces = ["default"]
may = ["attach"]

[[grant]]
who = "operator/attaches"
namespaces = ["default"]
may = ["attach", "read"]

[[grant]]
who = "operator/registers"
namespaces = ["a"]
may = ["register"]
"#;

pub struct Site {
    pub etcd: Etcd,
    pub authority: Authority,
    pub servers: Vec<Program>,
    /// HOST:PORT of each server.
    pub addresses: Vec<String>,
    /// What servers have in their environment from their next start on, by their places.
    pub environments: Vec<Vec<(&'static str, PathBuf)>>,
    /// The network namespaces of servers and links, by their names. The others run in the test's.
    pub networks: BTreeMap<String, PathBuf>,
    /// The programs of servers and links from their next start on.
    pub programs: Programs,
    directory: TempDir,
}

/// The programs of a release.
#[derive(Clone)]
pub struct Programs {
    pub server: PathBuf,
    pub link: PathBuf,
}

/// Those that cargo built for this test run.
impl Default for Programs {
    fn default() -> Self {
        Programs { server: server_program(), link: link_program() }
    }
}

/// A program that runs.
pub struct Program {
    process: Child,
    pub log: PathBuf,
    /// The last status that it has notified since it was ready.
    status: Arc<Mutex<String>>,
}

impl Program {
    /// Starts a program of this repository in a network namespace, and waits until it is ready. `None`: in that of the test.
    fn start(
        network: Option<&PathBuf>,
        program: &Path,
        arguments: &[&str],
        environment: &[(&str, &Path)],
        log: PathBuf,
    ) -> Program {
        let notified = log.with_extension("notify");
        let _ = fs::remove_file(&notified);
        let socket = UnixDatagram::bind(&notified).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let file = fs::File::create(&log).unwrap();
        let mut process = command(program, network.map(PathBuf::as_path))
            .args(arguments)
            .envs(environment.iter().copied())
            .env("NOTIFY_SOCKET", &notified)
            .stdout(file.try_clone().unwrap())
            .stderr(file)
            .spawn()
            .unwrap();
        let begun = Instant::now();
        let mut message = [0; 256];
        loop {
            if let Ok(size) = socket.recv(&mut message)
                && message[..size].starts_with(b"READY=1")
            {
                let status = Arc::default();
                std::thread::spawn({
                    let status = Arc::downgrade(&status);
                    move || keep_status(&socket, &status)
                });
                return Program { process, log, status };
            }
            let ended = process.try_wait().unwrap();
            if ended.is_some() || begun.elapsed() > SOON {
                let _ = process.kill();
                panic!("{}: {ended:?}: {}", program.display(), fs::read_to_string(&log).unwrap());
            }
        }
    }

    /// Returns the last status that the program has notified since it was ready.
    pub fn status(&self) -> String {
        self.status.lock().unwrap().clone()
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.process)
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Returns whether the program has ended.
    pub fn has_ended(&mut self) -> bool {
        self.process.try_wait().unwrap().is_some()
    }

    /// Waits for the end of the program. Returns whether it was a success.
    pub async fn ended(&mut self) -> bool {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status.success();
            }
            assert!(begun.elapsed() < SOON, "the program goes on: {}", self.text());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub fn text(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }
}

/// Reads what a program notifies, until the program is dropped. A full socket would hold it up.
fn keep_status(socket: &UnixDatagram, status: &Weak<Mutex<String>>) {
    let mut message = [0; 1024];
    while let Some(status) = status.upgrade() {
        let Ok(size) = socket.recv(&mut message) else { continue };
        let text = String::from_utf8_lossy(&message[..size]).into_owned();
        if let Some(of) = text.lines().find_map(|line| line.strip_prefix("STATUS=")) {
            of.clone_into(&mut status.lock().unwrap());
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns a program of this repository, as cargo built it for this test run.
fn program(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let program = tests.ancestors().nth(2).unwrap().join(name);
    assert!(program.exists(), "{} was not built: cargo build -p {name}", program.display());
    program
}

pub fn server_program() -> PathBuf {
    program("csid-server")
}

/// Returns the server with named edges.
pub fn server_under_test() -> PathBuf {
    program("csid-server-under-test")
}

/// Returns the server of a release that knows the next version of values.
pub fn next_server_program() -> PathBuf {
    program("csid-server-next")
}

pub fn csictl_program() -> PathBuf {
    program("csictl")
}

pub fn link_program() -> PathBuf {
    program("csid-link")
}

/// Returns free addresses. Nothing else has a port at this IP address, which is this process' own.
pub fn addresses(count: usize) -> Vec<SocketAddr> {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let address = Ipv4Addr::new(127, high, low, 251);
    let listeners: Vec<_> = (0..count).map(|_| TcpListener::bind((address, 0)).unwrap()).collect();
    listeners.iter().map(|listener| listener.local_addr().unwrap()).collect()
}

/// Returns two ports of 127.0.0.1 that were free.
pub fn free_ports() -> [u16; 2] {
    let listeners = [(); 2].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}

impl Site {
    /// Starts etcd and servers.
    pub async fn start(servers: usize) -> Site {
        Site::start_with(servers, "").await
    }

    /// Starts etcd and servers, whose configuration begins with more keys.
    pub async fn start_with(servers: usize, keys: &str) -> Site {
        Site::start_on(1, servers, keys).await
    }

    /// Starts etcd of so many members, and servers likewise.
    pub async fn start_on(members: usize, servers: usize, keys: &str) -> Site {
        Site::on(Etcd::start(members, &[]).await, servers, keys)
    }

    /// Starts servers of this etcd.
    pub fn on(etcd: Etcd, servers: usize, keys: &str) -> Site {
        let section = format!("endpoints = {:?}\n{GRANTS}", etcd.endpoints());
        Site::of(etcd, servers, keys, &section)
    }

    /// Starts servers. `section`: what their configuration says of etcd, which may be another one, and the grants.
    pub fn of(etcd: Etcd, servers: usize, keys: &str, section: &str) -> Site {
        Site::at(Programs::default(), etcd, &addresses(servers), BTreeMap::new(), keys, section)
    }

    /// Starts a server at each address, s0 at the first one. `networks`: as in [`Site`].
    pub fn at(
        programs: Programs,
        etcd: Etcd,
        addresses: &[SocketAddr],
        networks: BTreeMap<String, PathBuf>,
        keys: &str,
        section: &str,
    ) -> Site {
        let directory = tempfile::Builder::new().prefix("csid-cluster.").tempdir().unwrap();
        let authority = Authority::new();
        let mut site = Site {
            etcd,
            authority,
            servers: Vec::new(),
            addresses: addresses.iter().map(SocketAddr::to_string).collect(),
            environments: Vec::new(),
            networks,
            programs,
            directory,
        };
        for (n, address) in addresses.iter().enumerate() {
            let names = format!("IP:{},URI:csid://prod/server/s{n}", address.ip());
            let pair = site.authority.issue(&format!("s{n}"), &names, Purpose::Both, 30);
            site.credentials(&format!("s{n}"), "server", &pair);
            let text = format!(
                "cluster = \"prod\"\nlisten = \"{address}\"\naddress = \"{address}\"\n{keys}\n[etcd]\n{section}"
            );
            fs::write(site.path(&format!("s{n}.toml")), text).unwrap();
        }
        let (made, output) = site.run_server(0, &["init"]);
        assert!(made, "{output}");
        for n in 0..addresses.len() {
            let server = site.start_server(n);
            site.servers.push(server);
        }
        site
    }

    pub fn path(&self, file: &str) -> PathBuf {
        self.directory.path().join(file)
    }

    /// Makes a directory of credentials: ca.pem, NAME.pem, NAME.key.
    pub fn credentials(&self, directory: &str, name: &str, pair: &Pair) -> PathBuf {
        let path = self.path(directory);
        fs::create_dir_all(&path).unwrap();
        fs::copy(self.authority.certificate(), path.join("ca.pem")).unwrap();
        fs::copy(&pair.certificate, path.join(format!("{name}.pem"))).unwrap();
        fs::copy(&pair.key, path.join(format!("{name}.key"))).unwrap();
        path
    }

    /// Runs a command of csid-server to its end. Returns whether it was a success, and what it said.
    pub fn run_server(&self, n: usize, arguments: &[&str]) -> (bool, String) {
        let network = self.networks.get(&format!("s{n}"));
        let output = command(&self.programs.server, network.map(PathBuf::as_path))
            .arg("--config")
            .arg(self.path(&format!("s{n}.toml")))
            .arg("--credentials")
            .arg(self.path(&format!("s{n}")))
            .args(arguments)
            .output()
            .unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(said).unwrap())
    }

    pub fn start_server(&self, n: usize) -> Program {
        self.start_server_of(&self.programs.server, n)
    }

    /// Starts all servers again as ones that are killed at the named edges which a test arms. Returns the faults of each.
    pub fn start_with_faults(&mut self) -> Vec<Fault> {
        self.programs.server = server_under_test();
        self.environments.resize_with(self.servers.len(), Vec::new);
        let faults: Vec<_> =
            (0..self.servers.len()).map(|n| Fault::new(self.path(&format!("fault-s{n}")))).collect();
        for (n, fault) in faults.iter().enumerate() {
            self.environments[n].push(fault.environment());
            self.servers[n].kill();
            self.servers[n] = self.start_server(n);
        }
        faults
    }

    /// Starts a server of the given program.
    pub fn start_server_of(&self, program: &Path, n: usize) -> Program {
        let (config, keys) = (self.path(&format!("s{n}.toml")), self.path(&format!("s{n}")));
        let arguments = ["--config", config.to_str().unwrap(), "--credentials", keys.to_str().unwrap()];
        let environment: Vec<(&str, &Path)> = self
            .environments
            .get(n)
            .into_iter()
            .flatten()
            .map(|(key, value)| (*key, value.as_path()))
            .collect();
        let network = self.networks.get(&format!("s{n}"));
        Program::start(network, program, &arguments, &environment, self.path(&format!("s{n}.log")))
    }

    /// Issues the certificate of a client of the cluster.
    pub fn client_pair(&self, uri: &str) -> Pair {
        let file = uri.replace(['/', ':'], "_");
        self.authority.issue(&file, &format!("URI:{uri}"), Purpose::Client, 30)
    }

    /// Returns a client that talks to a server itself. `None`: it has no certificate.
    pub fn direct(&self, server: usize, pair: Option<&Pair>) -> ClusterClient<Channel> {
        ClusterClient::new(self.channel(server, pair))
    }

    /// Returns a connection to a server. `None`: the caller has no certificate.
    pub fn channel(&self, server: usize, pair: Option<&Pair>) -> Channel {
        let mut tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(fs::read(self.authority.certificate()).unwrap()));
        if let Some(Pair { certificate, key }) = pair {
            tls = tls.identity(Identity::from_pem(fs::read(certificate).unwrap(), fs::read(key).unwrap()));
        }
        let endpoint = Endpoint::from_shared(format!("https://{}", self.addresses[server])).unwrap();
        endpoint.tls_config(tls).unwrap().timeout(ANSWER).connect_lazy()
    }

    /// Returns a client of an operator for the calls about nodes and servers.
    pub fn admin(&self, server: usize, name: &str) -> AdminClient<Channel> {
        let pair = self.client_pair(&format!("csid://prod/operator/{name}"));
        AdminClient::new(self.channel(server, Some(&pair)))
    }

    /// Returns a client of an operator.
    pub fn operator(&self, server: usize, name: &str) -> ClusterClient<Channel> {
        self.direct(server, Some(&self.client_pair(&format!("csid://prod/operator/{name}"))))
    }

    /// Starts a node: its link with its certificate.
    pub fn node(&self, name: &str) -> Node {
        let pair = self.client_pair(&format!("csid://prod/node/{name}"));
        let link = self.link(name, &pair, &self.addresses);
        Node {
            link,
            run: self.path(&format!("{name}.run")),
            servers: self.addresses.clone(),
            hello: hello(name),
        }
    }

    pub fn link(&self, name: &str, pair: &Pair, servers: &[String]) -> Program {
        let run = self.path(&format!("{name}.run"));
        fs::create_dir_all(&run).unwrap();
        let (config, keys) = (self.path(&format!("{name}.toml")), self.credentials(name, "node", pair));
        fs::write(&config, format!("cluster = \"prod\"\nservers = {servers:?}\n")).unwrap();
        let arguments = ["--config", config.to_str().unwrap()];
        let environment = [("CREDENTIALS_DIRECTORY", keys.as_path()), ("RUNTIME_DIRECTORY", run.as_path())];
        let network = self.networks.get(name);
        Program::start(
            network,
            &self.programs.link,
            &arguments,
            &environment,
            self.path(&format!("{name}.log")),
        )
    }

    /// Registers a volume of plugin `p` in the namespace `default`, with one access mode.
    pub async fn register(&self, volume: &str, access_mode: &str) -> VolumeRow {
        let ask = register(volume, access_mode);
        self.operator(0, "all").change(ask).await.unwrap().into_inner()
    }

    pub async fn raw(&self) -> Raw {
        let endpoint = Endpoint::from_shared(self.etcd.endpoints().remove(0)).unwrap().timeout(ANSWER);
        Raw(KvClient::new(endpoint.connect().await.unwrap()))
    }
}

pub fn register(volume: &str, access_mode: &str) -> ChangeAsk {
    let capability = Capability { access_mode: access_mode.into(), attachment_mode: "file-system".into() };
    let spec = Spec {
        capabilities: vec![capability],
        volume_context: [("share".to_owned(), "hunter2".to_owned())].into(),
        ..Spec::default()
    };
    let register = Register {
        namespace: String::new(),
        volume: volume.into(),
        plugin: "p".into(),
        external_id: format!("ext-{volume}"),
        spec: Some(spec),
    };
    ChangeAsk { what: Some(change_ask::What::Register(register)) }
}

/// A node: its link, and what its Hello says.
pub struct Node {
    pub link: Program,
    run: PathBuf,
    servers: Vec<String>,
    pub hello: Hello,
}

pub fn hello(name: &str) -> Hello {
    Hello {
        cluster: "prod".into(),
        journal_id: format!("journal of {name}"),
        machine_id: format!("machine of {name}"),
        boot: format!("boot 1 of {name}"),
        version: "0.1.0".into(),
        protocol_min: 1,
        protocol_max: 1,
        generation: 0,
        seen_revision: 0,
        clean: 0,
    }
}

/// A node's session.
pub struct Session {
    pub to_server: mpsc::Sender<FromNode>,
    pub from_server: Streaming<ToNode>,
}

/// The first answer to a Hello.
#[derive(Debug)]
pub enum First {
    Welcome(Welcome),
    Refused(String),
}

impl Node {
    /// Returns the directory of the link's sockets.
    pub fn run(&self) -> &Path {
        &self.run
    }

    /// Returns a client that talks to a server through the link.
    pub fn client(&self, server: usize) -> ClusterClient<Channel> {
        through(&self.run().join(&self.servers[server]))
    }

    /// Opens a session, and returns its first answer.
    pub async fn say_hello(&self, server: usize) -> Result<(First, Session), Status> {
        open(&mut self.client(server), self.hello.clone()).await
    }

    /// Joins at a server, and reports that plugin `p` attaches nothing.
    pub async fn join(&self, server: usize) -> Session {
        let (first, mut session) = self.say_hello(server).await.unwrap();
        assert!(matches!(first, First::Welcome(_)), "{first:?}");
        session.report(Attaches::No).await;
        session
    }

    /// Boots the node again, and joins at a server. Waits until the servers know the end of the earlier boot's
    /// sessions.
    pub async fn reboot(&mut self, server: usize) -> Session {
        self.hello.boot = format!("{} and again", self.hello.boot);
        let mut joined = None;
        eventually("the rebooted node joins", async || {
            let (first, session) = self.say_hello(server).await.unwrap();
            joined = Some(session);
            matches!(first, First::Welcome(_))
        })
        .await;
        joined.unwrap()
    }

    /// Claims a volume for the consumer `web`. Waits until the server knows the node's plugin.
    pub async fn claim(&self, server: usize, volume: &str) -> Result<String, Refusal> {
        let begun = Instant::now();
        loop {
            match self.client(server).claim(self.ask(volume, "web")).await {
                Ok(granted) => return Ok(granted.into_inner().claim),
                Err(status) => {
                    let refusal = Refusal::of(&status);
                    if refusal.kind != "PluginUnavailable" || begun.elapsed() > SOON {
                        return Err(refusal);
                    }
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
    }

    /// A claim that this boot of the node asks for.
    pub fn ask(&self, volume: &str, consumer: &str) -> ClaimAsk {
        ClaimAsk { boot: self.hello.boot.clone(), ..ask(volume, consumer) }
    }

    /// The end of a claim, by this boot of the node.
    pub fn owed(&self, volume: &str, claim: &str) -> Owed {
        Owed { boot: self.hello.boot.clone(), ..owed(volume, claim) }
    }

    pub async fn detached(&self, server: usize, volume: &str, claim: &str) -> Result<(), Refusal> {
        let owed = self.owed(volume, claim);
        self.client(server).detached(owed).await.map(drop).map_err(|status| Refusal::of(&status))
    }
}

/// Returns a client that talks through a socket of a link.
pub fn through(socket: &Path) -> ClusterClient<Channel> {
    let socket = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://csid-link").timeout(ANSWER);
    ClusterClient::new(endpoint.connect_with_connector_lazy(connector))
}

pub async fn open(client: &mut ClusterClient<Channel>, hello: Hello) -> Result<(First, Session), Status> {
    let (to_server, receiver) = mpsc::channel(8);
    let first = FromNode { is: Some(from_node::Is::Hello(hello)) };
    to_server.send(first).await.unwrap();
    let mut from_server = client.session(ReceiverStream::new(receiver)).await?.into_inner();
    let answer = tokio::time::timeout(ANSWER, from_server.message()).await.expect("no answer to Hello")?;
    let first = match answer.and_then(|answer| answer.is) {
        Some(to_node::Is::Welcome(welcome)) => First::Welcome(welcome),
        Some(to_node::Is::Refused(refused)) => First::Refused(refused.reason),
        other => panic!("no answer to Hello: {other:?}"),
    };
    Ok((first, Session { to_server, from_server }))
}

impl Session {
    pub async fn report(&mut self, attaches: Attaches) {
        let report =
            PluginReport { plugin: "p".into(), attaches: attaches.into(), ..PluginReport::default() };
        let plugins = Plugins { plugins: vec![report] };
        self.to_server.send(FromNode { is: Some(from_node::Is::Plugins(plugins)) }).await.unwrap();
    }

    /// Reports that plugin `p` attaches nothing by this node, and has a name for it.
    pub async fn report_name(&mut self, node_id: &str) {
        self.report_as(PluginReport {
            plugin: "p".into(),
            attaches: Attaches::No.into(),
            node_id: node_id.into(),
            controller: false,
            max_volumes: None,
            calls: 0,
        })
        .await;
    }

    /// Reports one plugin.
    pub async fn report_as(&mut self, report: PluginReport) {
        let plugins = Plugins { plugins: vec![report] };
        self.to_server.send(FromNode { is: Some(from_node::Is::Plugins(plugins)) }).await.unwrap();
    }

    /// Waits for the next message.
    pub async fn next(&mut self) -> Result<Option<to_node::Is>, Refusal> {
        let next = tokio::time::timeout(SOON, self.from_server.message()).await.expect("no message came");
        next.map(|message| message.and_then(|message| message.is)).map_err(|status| Refusal::of(&status))
    }
}

/// A claim of the consumer on the calling node.
pub fn ask(volume: &str, consumer: &str) -> ClaimAsk {
    ClaimAsk {
        call: "call 1".into(),
        volume: volume.into(),
        consumer: consumer.into(),
        uid: 1000,
        r#use: Some(Use {
            mode: "write".into(),
            access_mode: "single-node-writer".into(),
            attachment_mode: "file-system".into(),
        }),
        ..ClaimAsk::default()
    }
}

/// The release of the claim of `web` on a node, by an operator.
pub fn release_ask(volume: &str, node: &str) -> ReleaseAsk {
    ReleaseAsk { volume: volume.into(), node: node.into(), consumer: "web".into(), ..ReleaseAsk::default() }
}

pub fn owed(volume: &str, claim: &str) -> Owed {
    Owed { claim: claim.into(), volume: volume.into(), consumer: "web".into(), ..Owed::default() }
}

/// Why a call was refused.
#[derive(Debug, PartialEq, Eq)]
pub struct Refusal {
    pub code: Code,
    /// Empty: the answer has no Failure.
    pub kind: String,
    pub message: String,
    pub holders: Vec<String>,
    pub retryable: bool,
}

impl Refusal {
    pub fn of(status: &Status) -> Refusal {
        let trailer = status.metadata().get_bin("csid-failure-bin").and_then(|value| value.to_bytes().ok());
        let failure = trailer.map(|bytes| Failure::decode(bytes).unwrap()).unwrap_or_default();
        let Failure { kind, holders, retryable, .. } = failure;
        Refusal { code: status.code(), kind, message: status.message().to_owned(), holders, retryable }
    }
}

/// Writes an operator's file, with the keys next to it.
pub fn operator_file(site: &Site, name: &str, pair: &Pair, servers: &[String]) -> PathBuf {
    let directory = site.credentials(&format!("operator-{name}"), "operator", pair);
    fs::set_permissions(directory.join("operator.key"), PermissionsExt::from_mode(0o600)).unwrap();
    let file = directory.join("operator.toml");
    let keys = "ca = \"ca.pem\"\ncertificate = \"operator.pem\"\nkey = \"operator.key\"\n";
    fs::write(&file, format!("servers = {servers:?}\n{keys}")).unwrap();
    file
}

/// Returns the file of an operator who asks all servers.
pub fn operator(site: &Site, name: &str) -> PathBuf {
    operator_file(site, name, &site.client_pair(&format!("csid://prod/operator/{name}")), &site.addresses)
}

/// Polls until `condition` holds.
pub async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !condition().await {
        assert!(Instant::now() < end, "in {SOON:?} it did not come to this: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// etcd itself, past the servers. A call is repeated while a member refuses it, as one does whose leader has changed.
pub struct Raw(KvClient<Channel>);

impl Raw {
    pub async fn below(&mut self, prefix: &str) -> Vec<KeyValue> {
        let mut range_end = prefix.as_bytes().to_vec();
        *range_end.last_mut().unwrap() += 1;
        let request = RangeRequest { key: prefix.into(), range_end, ..RangeRequest::default() };
        let mut kvs = Err(Status::unknown(""));
        eventually("etcd is read", async || {
            kvs = self.0.range(request.clone()).await.map(|answer| answer.into_inner().kvs);
            kvs.is_ok()
        })
        .await;
        kvs.unwrap()
    }

    pub async fn put(&mut self, key: &str, value: &str) {
        let put = PutRequest { key: key.into(), value: value.into(), ..PutRequest::default() };
        self.change(Operation::RequestPut(put)).await;
    }

    pub async fn delete(&mut self, key: &[u8]) {
        let delete = DeleteRangeRequest { key: key.to_vec(), range_end: Vec::new() };
        self.change(Operation::RequestDeleteRange(delete)).await;
    }

    /// Writes a key, unless etcd refuses that.
    pub async fn try_put(&mut self, put: PutRequest) -> Result<(), Status> {
        let success = vec![RequestOp { request: Some(Operation::RequestPut(put)) }];
        self.0.txn(TxnRequest { success, ..TxnRequest::default() }).await.map(drop)
    }

    /// Returns etcd's last revision.
    async fn revision(&mut self) -> Result<i64, Status> {
        let range = RangeRequest { key: b"/csid/v1/meta".to_vec(), ..RangeRequest::default() };
        let answer = self.0.range(range).await?;
        Ok(answer.into_inner().header.expect("a header").revision)
    }

    /// Compacts etcd up to its last revision.
    pub async fn compact(&mut self) {
        eventually("etcd is compacted", async || {
            let Ok(revision) = self.revision().await else { return false };
            self.0.compact(CompactionRequest { revision, physical: false }).await.is_ok()
        })
        .await;
    }

    async fn change(&mut self, operation: Operation) {
        let success = vec![RequestOp { request: Some(operation) }];
        let request = TxnRequest { success, ..TxnRequest::default() };
        eventually("etcd is changed", async || {
            let done = self.0.txn(request.clone()).await;
            done.is_ok_and(|done| done.into_inner().succeeded)
        })
        .await;
    }
}
