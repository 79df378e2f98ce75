//! Members of etcd for one test. They end with it, and with the test's thread.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use csid_etcd::api::maintenance_client::MaintenanceClient;
use csid_etcd::api::{StatusRequest, StatusResponse};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tonic::transport::Endpoint;

/// How long the members may take to choose a leader.
const START: Duration = Duration::from_secs(20);

pub struct Cluster {
    pub members: Vec<Member>,
    /// Names and addresses of the peers, as etcd takes them.
    initial: String,
    directory: TempDir,
}

/// Where a member runs.
pub struct Place {
    pub client: SocketAddr,
    pub peer: SocketAddr,
    /// Its network namespace. `None`: that of the test.
    pub network: Option<PathBuf>,
    /// The disk with its data, which is in DISK/data. `None`: it is with that of the other members.
    pub disk: Option<PathBuf>,
}

pub struct Member {
    pub client: SocketAddr,
    peer: SocketAddr,
    /// The directory of its data.
    pub data: PathBuf,
    process: Child,
    command: Command,
}

impl Cluster {
    /// Returns a cluster without members.
    pub fn none() -> Cluster {
        // etcd syncs each change. On a tmpfs that costs nothing. tests/run removes what a killed test leaves below this name.
        let temporary = std::env::temp_dir();
        let below = Path::new("/dev/shm").join(temporary.file_name().unwrap());
        std::fs::create_dir_all(&below).unwrap();
        let directory = tempfile::Builder::new().prefix("csid-etcd.").tempdir_in(below).unwrap();
        Cluster { members: Vec::new(), initial: String::new(), directory }
    }

    /// Starts members with more arguments, and waits until they have a leader.
    pub async fn start(members: usize, more: &[&str]) -> Cluster {
        let places = (0..members).map(|_| {
            let [client, peer] = addresses();
            Place { client, peer, network: None, disk: None }
        });
        Cluster::start_at(&places.collect::<Vec<_>>(), more).await
    }

    /// Starts members at these places, and waits until they have a leader.
    pub async fn start_at(places: &[Place], more: &[&str]) -> Cluster {
        let Cluster { directory, .. } = Cluster::none();
        let initial: Vec<String> =
            (0..).zip(places).map(|(n, place)| format!("m{n}=http://{}", place.peer)).collect();
        let initial = initial.join(",");
        let members = (0..).zip(places).map(|(n, Place { client, peer, network, disk })| {
            let own = disk.as_ref().map(|disk| disk.join("data"));
            let data = own.unwrap_or_else(|| directory.path().join(format!("m{n}")));
            let log = std::fs::File::create(directory.path().join(format!("m{n}.log"))).unwrap();
            let mut command = command(Path::new("etcd"), network.as_deref());
            command
                .args(["--name", &format!("m{n}")])
                .arg("--data-dir")
                .arg(&data)
                .args(["--listen-client-urls", &format!("http://{client}")])
                .args(["--advertise-client-urls", &format!("http://{client}")])
                .args(["--listen-peer-urls", &format!("http://{peer}")])
                .args(["--initial-advertise-peer-urls", &format!("http://{peer}")])
                .args(["--initial-cluster", &initial, "--initial-cluster-token", &initial])
                .args(["--heartbeat-interval", "50", "--election-timeout", "500"])
                .args(["--logger", "zap", "--log-level", "warn", "--log-outputs", "stderr"])
                .args(more)
                .stdout(Stdio::null())
                .stderr(log);
            let process = command.spawn().expect("etcd-server is not installed");
            Member { client: *client, peer: *peer, data, process, command }
        });
        let cluster = Cluster { members: members.collect(), initial: initial.clone(), directory };
        cluster.started().await;
        cluster
    }

    /// Waits until the members have a leader.
    async fn started(&self) {
        let begun = Instant::now();
        for member in &self.members {
            while member.status().await.is_none_or(|status| status.leader == 0) {
                assert!(begun.elapsed() < START, "etcd did not start:\n{}", self.logs());
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }

    /// Saves a backup, as an administrator does.
    pub fn save(&self, file: &Path) {
        let _ = std::fs::remove_file(file);
        let file = file.to_str().unwrap();
        etcdctl(&["--endpoints", &self.endpoints()[0], "snapshot", "save", file]);
    }

    /// Restores a backup on all members, and starts them. `token`: that of the new cluster. `None`: that of the cluster of before.
    pub async fn restore(&mut self, file: &Path, token: Option<&str>) {
        self.members.iter_mut().for_each(Member::kill);
        for (n, member) in self.members.iter_mut().enumerate() {
            let name = format!("m{n}");
            std::fs::remove_dir_all(&member.data).unwrap();
            etcdctl(&[
                "snapshot",
                "restore",
                file.to_str().unwrap(),
                "--name",
                &name,
                "--data-dir",
                member.data.to_str().unwrap(),
                "--initial-cluster",
                &self.initial,
                "--initial-cluster-token",
                token.unwrap_or(&self.initial),
                "--initial-advertise-peer-urls",
                &format!("http://{}", member.peer),
            ]);
            member.process = member.command.spawn().unwrap();
        }
        self.started().await;
    }

    pub fn endpoints(&self) -> Vec<String> {
        self.members.iter().map(Member::endpoint).collect()
    }

    /// Returns the place of the leader. Waits while the members choose one.
    pub async fn leader(&self) -> usize {
        let begun = Instant::now();
        loop {
            for (at, member) in self.members.iter().enumerate() {
                if let Some(StatusResponse { header: Some(header), leader, .. }) = member.status().await
                    && header.member_id == leader
                {
                    return at;
                }
            }
            assert!(begun.elapsed() < START, "no member is the leader:\n{}", self.logs());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Starts a killed member again, on its data. Waits until it knows the leader.
    pub async fn restart(&mut self, at: usize) {
        let member = &mut self.members[at];
        member.process = member.command.spawn().unwrap();
        let begun = Instant::now();
        while self.members[at].status().await.is_none_or(|status| status.leader == 0) {
            assert!(begun.elapsed() < START, "the member did not start again:\n{}", self.logs());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn logs(&self) -> String {
        let log = |n| std::fs::read_to_string(self.directory.path().join(format!("m{n}.log"))).unwrap();
        (0..self.members.len()).map(log).collect()
    }
}

impl Member {
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.client)
    }

    /// Returns `None` if the member does not answer.
    pub async fn status(&self) -> Option<StatusResponse> {
        let endpoint = Endpoint::from_shared(self.endpoint()).unwrap().timeout(Duration::from_secs(2));
        let channel = endpoint.connect().await.ok()?;
        Some(MaintenanceClient::new(channel).status(StatusRequest {}).await.ok()?.into_inner())
    }

    /// Returns whether the member has ended.
    pub fn has_ended(&mut self) -> bool {
        self.process.try_wait().unwrap().is_some()
    }

    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns a command that is killed when this thread ends. `network`: the network namespace that it runs in. `None`: that of the test.
pub fn command(program: &Path, network: Option<&Path>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]);
    if let Some(network) = network {
        command.arg("nsenter").arg(format!("--net={}", network.display()));
    }
    command.arg(program).stdin(Stdio::null());
    command
}

/// Runs a command of etcdctl to its end, which has to succeed.
pub fn etcdctl(command: &[&str]) {
    let done = Command::new("etcdctl").env("ETCDCTL_API", "3").args(command).output();
    let done = done.expect("etcd-client is not installed");
    assert!(done.status.success(), "etcdctl {command:?}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Returns free addresses for clients and peers. No other process has a port at this IP address. A member shares it only with the
/// 249th one before it, which ended long ago.
fn addresses() -> [SocketAddr; 2] {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let next = NEXT.fetch_add(1, Ordering::Relaxed) % 249 + 1;
    let address = Ipv4Addr::new(127, high, low, next as u8);
    let listeners = [(); 2].map(|()| TcpListener::bind((address, 0)).unwrap());
    listeners.map(|listener| listener.local_addr().unwrap())
}
