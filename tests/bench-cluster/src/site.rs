//! The cluster that is measured: three members of etcd and servers, all with TLS on addresses of this process.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use crate::certificates::{Authority, Pair, Purpose};
use crate::process::{Program, command, cpu_of, sibling};
use crate::wire::StatusRequest;
use crate::wire::maintenance_client::MaintenanceClient;

/// Members of etcd, and servers.
pub const THREE: usize = 3;
/// How long the members may take to choose a leader.
const LEADER: Duration = Duration::from_secs(30);
/// How long a call may take.
const ANSWER: Duration = Duration::from_secs(30);
/// Certificates that are made at the same time.
const AT_ONCE: usize = 4;

const GRANTS: &str = r#"
[[grant]]
who = "node/n*"
namespaces = ["*"]
may = ["join", "mount"]

[[grant]]
who = "node/c*"
namespaces = ["*"]
may = ["join", "controller:attaching"]

[[grant]]
who = "operator/bench"
namespaces = ["*"]
may = ["read", "register"]
"#;

/// A member of etcd.
struct Member {
    client: SocketAddr,
    peer: SocketAddr,
    program: Option<Program>,
}

/// The cluster. It ends with this.
pub struct Site {
    members: Vec<Member>,
    /// `None`: the server does not run.
    pub servers: Vec<Option<Program>>,
    /// HOST:PORT of each server.
    pub addresses: Vec<String>,
    authority: Authority,
    of_etcd: Authority,
    /// A client's certificate for etcd.
    client: Pair,
    directory: TempDir,
}

impl Site {
    /// Starts the members of etcd, with their data below `directory`, and makes the cluster. No server runs yet.
    pub async fn start(directory: &Path) -> Result<Site> {
        let directory = tempfile::Builder::new().prefix("cluster-").tempdir_in(directory)?;
        let (authority, of_etcd) = (Authority::new(), Authority::new());
        let ports = addresses(3 * THREE)?;
        let ip = ports[0].ip();
        let names = format!("IP:{ip},IP:127.0.0.1");
        let member = of_etcd.issue("member", &names, Purpose::Both, 30);
        let client = of_etcd.issue("client", "", Purpose::Client, 30);
        let members =
            (0..THREE).map(|n| Member { client: ports[n], peer: ports[THREE + n], program: None }).collect();
        let ports = &ports[2 * THREE..];
        let mut site = Site {
            members,
            servers: (0..THREE).map(|_| None).collect(),
            addresses: ports.iter().map(SocketAddr::to_string).collect(),
            authority,
            of_etcd,
            client,
            directory,
        };
        for n in 0..THREE {
            site.start_member(n, &member)?;
        }
        site.leader().await?;
        for (n, address) in ports.iter().enumerate() {
            site.configure(n, address)?;
        }
        let mut init = site.server_command(0)?;
        let made = init.arg("init").stdin(Stdio::null()).output()?;
        ensure!(made.status.success(), "csid-server init: {}", String::from_utf8_lossy(&made.stderr));
        Ok(site)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn start_member(&mut self, n: usize, pair: &Pair) -> Result<()> {
        let initial: Vec<String> =
            self.members.iter().enumerate().map(|(n, of)| format!("m{n}=https://{}", of.peer)).collect();
        let initial = initial.join(",");
        let Member { client, peer, .. } = &self.members[n];
        let ca = self.of_etcd.certificate();
        let mut etcd = command("etcd");
        etcd.args(["--name", &format!("m{n}"), "--data-dir"])
            .arg(self.path(&format!("m{n}")))
            .args(["--listen-client-urls", &format!("https://{client}")])
            .args(["--advertise-client-urls", &format!("https://{client}")])
            .args(["--listen-peer-urls", &format!("https://{peer}")])
            .args(["--initial-advertise-peer-urls", &format!("https://{peer}")])
            .args(["--initial-cluster", &initial, "--initial-cluster-token", "csid-bench"])
            .args(["--logger", "zap", "--log-level", "error", "--log-outputs", "stderr"])
            .args(["--quota-backend-bytes", "8589934592", "--client-cert-auth", "--peer-client-cert-auth"]);
        for (option, file) in [
            ("--trusted-ca-file", &ca),
            ("--cert-file", &pair.certificate),
            ("--key-file", &pair.key),
            ("--peer-trusted-ca-file", &ca),
            ("--peer-cert-file", &pair.certificate),
            ("--peer-key-file", &pair.key),
        ] {
            etcd.arg(option).arg(file);
        }
        let started = Program::spawn(&mut etcd, &self.path(&format!("m{n}.log")));
        self.members[n].program = Some(started.context("Debian's etcd-server is needed")?);
        Ok(())
    }

    /// Kills a member of etcd.
    pub fn kill_member(&mut self, n: usize) -> Result<()> {
        self.members[n].program.take().context("the member does not run")?.kill()
    }

    /// Starts a member again, with its data.
    pub async fn start_member_again(&mut self, n: usize) -> Result<()> {
        let directory = self.of_etcd.certificate();
        let file = |name: &str| directory.with_file_name(name);
        self.start_member(n, &Pair { certificate: file("member.pem"), key: file("member.key") })?;
        self.leader().await.map(drop)
    }

    /// Waits until each member that runs has a leader. Returns the place of the leader.
    pub async fn leader(&self) -> Result<usize> {
        let begun = Instant::now();
        loop {
            let mut leader = None;
            let mut without = 0;
            for (n, member) in self.members.iter().enumerate() {
                if member.program.is_none() {
                    continue;
                }
                let mut client = MaintenanceClient::new(self.member_channel(n)?);
                let status = client.status(StatusRequest {});
                match tokio::time::timeout(Duration::from_secs(2), status).await {
                    Ok(Ok(status)) => {
                        let status = status.into_inner();
                        without += usize::from(status.leader == 0);
                        if status.header.is_some_and(|header| header.member_id == status.leader) {
                            leader = Some(n);
                        }
                    }
                    _ => without += 1,
                }
            }
            match leader {
                Some(leader) if without == 0 => return Ok(leader),
                _ => ensure!(begun.elapsed() < LEADER, "etcd has no leader; its logs: {:?}", self.directory),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Returns a new connection to a member of etcd.
    pub fn member_channel(&self, n: usize) -> Result<Channel> {
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(fs::read(self.of_etcd.certificate())?))
            .identity(identity(&self.client)?);
        let endpoint = Endpoint::from_shared(format!("https://{}", self.members[n].client))?;
        Ok(endpoint.tls_config(tls)?.tcp_nodelay(true).timeout(ANSWER).connect_lazy())
    }

    fn configure(&self, n: usize, address: &SocketAddr) -> Result<()> {
        let names = format!("IP:{},URI:csid://prod/server/s{n}", address.ip());
        let pair = self.authority.issue(&format!("s{n}"), &names, Purpose::Both, 30);
        let keys = self.path(&format!("s{n}"));
        fs::create_dir_all(&keys)?;
        for (from, to) in [
            (&self.authority.certificate(), "ca.pem"),
            (&pair.certificate, "server.pem"),
            (&pair.key, "server.key"),
            (&self.of_etcd.certificate(), "etcd-ca.pem"),
            (&self.client.certificate, "etcd.pem"),
            (&self.client.key, "etcd.key"),
        ] {
            fs::copy(from, keys.join(to))?;
        }
        let endpoints: Vec<String> =
            self.members.iter().map(|member| format!("https://{}", member.client)).collect();
        let text = format!(
            "cluster = \"prod\"\nlisten = \"{address}\"\naddress = \"{address}\"\nmax-claims = 100000\nmax-volumes = 1000000\n\
             [etcd]\nendpoints = {endpoints:?}\n{GRANTS}"
        );
        Ok(fs::write(self.path(&format!("s{n}.toml")), text)?)
    }

    fn server_command(&self, n: usize) -> Result<Command> {
        let mut command = command(sibling("csid-server")?);
        command.arg("--config").arg(self.path(&format!("s{n}.toml")));
        command.arg("--credentials").arg(self.path(&format!("s{n}"))).env("CSID_LOG", "warn");
        Ok(command)
    }

    /// Starts a server. Returns how long it took until it was ready.
    pub fn start_server(&mut self, n: usize) -> Result<Duration> {
        let program = Program::start(&mut self.server_command(n)?, &self.path(&format!("s{n}.log")))?;
        let ready = program.ready;
        self.servers[n] = Some(program);
        Ok(ready)
    }

    /// Starts all servers that do not run.
    pub fn start_servers(&mut self) -> Result<()> {
        for n in 0..THREE {
            if self.servers[n].is_none() {
                self.start_server(n)?;
            }
        }
        Ok(())
    }

    pub fn kill_server(&mut self, n: usize) -> Result<()> {
        self.servers[n].take().context("the server does not run")?.kill()
    }

    pub fn server(&self, n: usize) -> Result<&Program> {
        self.servers[n].as_ref().context("the server does not run")
    }

    /// Returns the processor's time in seconds that was used until now by the nodes, which are this program, by all servers and by all members of etcd.
    pub fn cpu(&self) -> Result<[f64; 3]> {
        let all = |programs: Vec<&Program>| programs.into_iter().map(Program::cpu).sum::<Result<f64>>();
        let members = self.members.iter().filter_map(|member| member.program.as_ref());
        let servers = self.servers.iter().flatten();
        Ok([cpu_of(std::process::id())?, all(servers.collect())?, all(members.collect())?])
    }

    /// Returns a connection to a server, which is made at the first call.
    pub fn channel(&self, server: usize, pair: &Pair) -> Result<Channel> {
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(fs::read(self.authority.certificate())?))
            .identity(identity(pair)?);
        let endpoint = Endpoint::from_shared(format!("https://{}", self.addresses[server]))?;
        Ok(endpoint.tls_config(tls)?.tcp_nodelay(true).connect_timeout(ANSWER).connect_lazy())
    }

    pub fn operator(&self) -> Pair {
        self.authority.issue("operator", "URI:csid://prod/operator/bench", Purpose::Client, 30)
    }

    /// Issues certificates of nodes. They have one key, for one process has them all.
    pub fn nodes(&self, names: &[String]) -> Result<Vec<Pair>> {
        let first = self.authority.issue("nodes", "", Purpose::Client, 30);
        let next = AtomicUsize::new(0);
        let issue = || -> Result<()> {
            while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.issue_again(&first, name)?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(issue)).collect();
            threads.into_iter().try_for_each(|thread| match thread.join() {
                Ok(issued) => issued,
                Err(_) => anyhow::bail!("a thread that makes certificates panicked"),
            })
        })?;
        let pair = |name: &String| Pair { certificate: self.node_file(name), key: first.key.clone() };
        Ok(names.iter().map(pair).collect())
    }

    fn node_file(&self, name: &str) -> PathBuf {
        self.path(&format!("{name}.pem"))
    }

    /// Issues the certificate of a node for the key of another certificate.
    fn issue_again(&self, first: &Pair, name: &str) -> Result<()> {
        let extensions = self.path(&format!("{name}.ext"));
        fs::write(
            &extensions,
            format!(
                "basicConstraints=CA:FALSE\nextendedKeyUsage=clientAuth\nsubjectAltName=URI:csid://prod/node/{name}\n"
            ),
        )?;
        let mut serial = String::from("1");
        name.bytes().for_each(|byte| serial += &format!("{byte:02x}"));
        let done = Command::new("openssl")
            .args(["x509", "-req", "-days", "30", "-set_serial", &format!("0x{serial}"), "-in"])
            .arg(first.key.with_extension("csr"))
            .arg("-CA")
            .arg(self.authority.certificate())
            .arg("-CAkey")
            .arg(self.authority.key())
            .arg("-extfile")
            .arg(&extensions)
            .arg("-out")
            .arg(self.node_file(name))
            .stdin(Stdio::null())
            .output()?;
        ensure!(done.status.success(), "openssl: {}", String::from_utf8_lossy(&done.stderr));
        Ok(fs::remove_file(extensions)?)
    }

    /// Starts csid-link for a node. Returns it with the directory of its sockets.
    pub fn start_link(&self, name: &str, pair: &Pair) -> Result<(Program, PathBuf)> {
        let (keys, run) = (self.path("link"), self.path("link.run"));
        fs::create_dir_all(&keys)?;
        fs::create_dir_all(&run)?;
        for (from, to) in [
            (&self.authority.certificate(), "ca.pem"),
            (&pair.certificate, "node.pem"),
            (&pair.key, "node.key"),
        ] {
            fs::copy(from, keys.join(to))?;
        }
        let config = self.path("link.toml");
        fs::write(&config, format!("cluster = \"prod\"\nservers = {:?}\n", self.addresses))?;
        let mut command = command(sibling("csid-link")?);
        command.arg("--config").arg(config).env("CREDENTIALS_DIRECTORY", keys).env("RUNTIME_DIRECTORY", &run);
        let link = Program::start(&mut command, &self.path(&format!("{name}.log")))?;
        Ok((link, run))
    }
}

fn identity(pair: &Pair) -> Result<Identity> {
    Ok(Identity::from_pem(fs::read(&pair.certificate)?, fs::read(&pair.key)?))
}

/// Returns free addresses. Nothing else has a port at this IP address, which is this process' own.
fn addresses(count: usize) -> Result<Vec<SocketAddr>> {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let address = Ipv4Addr::new(127, high, low, 252);
    let listeners: Vec<TcpListener> =
        (0..count).map(|_| TcpListener::bind((address, 0))).collect::<std::io::Result<_>>()?;
    Ok(listeners.iter().map(TcpListener::local_addr).collect::<std::io::Result<_>>()?)
}
