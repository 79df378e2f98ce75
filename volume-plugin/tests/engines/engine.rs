//! The volume plugin in a world, and the requests of engines as they were recorded: Podman 4.3.1 and Docker 20.10.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use csid_tests::dbus::Bus;
use csid_tests::world::{World, eventually};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// The ID that Podman sends for every container.
pub const PODMAN: &str = "2f73349cfc4630255319c6c8dfc1b46a8996ace9d14d8e07563b165915918ec2";

const NOBODY: u32 = 65_534;

/// The volume plugin, for the volumes of a world's csid. It sweeps each second, and is killed when this is dropped.
pub struct VolumePlugin {
    process: Child,
    how: Start,
    pub socket: PathBuf,
    /// Where it counts users.
    pub users: PathBuf,
}

/// How the volume plugin is started.
struct Start {
    uid: u32,
    environment: (&'static str, String),
    arguments: Vec<&'static str>,
}

impl VolumePlugin {
    pub async fn start(w: &World) -> Self {
        let environment = ("CSID_SOCKET", w.socket().to_string_lossy().into_owned());
        VolumePlugin::start_as(w, Start { uid: 0, environment, arguments: Vec::new() }).await
    }

    /// Starts it as nobody, on a bus, with the right to create volumes.
    pub async fn that_creates(w: &World, bus: &Bus) -> Self {
        let address = format!("unix:path={}", bus.socket.display());
        let environment = ("DBUS_SYSTEM_BUS_ADDRESS", address);
        fs::set_permissions(w.path(""), fs::Permissions::from_mode(0o711)).unwrap();
        VolumePlugin::start_as(w, Start { uid: NOBODY, environment, arguments: vec!["--allow-create"] }).await
    }

    async fn start_as(w: &World, how: Start) -> Self {
        let directory = w.path("engine");
        let (socket, users) = (directory.join("csid.sock"), directory.join("users"));
        fs::create_dir_all(&users).unwrap();
        for path in [&directory, &users] {
            std::os::unix::fs::chown(path, Some(how.uid), Some(how.uid)).unwrap();
        }
        let process = how.spawn(&socket, &users);
        let plugin = VolumePlugin { process, how, socket, users };
        plugin.answers().await;
        plugin
    }

    async fn answers(&self) {
        eventually("the volume plugin answers", async || {
            self.try_post("/Plugin.Activate", "{}").await.is_ok_and(|(status, _)| status == 200)
        })
        .await;
    }

    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    pub async fn restart(&mut self) {
        self.process = self.how.spawn(&self.socket, &self.users);
        self.answers().await;
    }

    /// Sends SIGTERM and waits for the end.
    pub fn stop(&mut self) -> bool {
        let pid = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        self.process.wait().unwrap().success()
    }

    /// Returns the status and the body of an answer.
    pub async fn post(&self, path: &str, body: &str) -> (u16, String) {
        self.try_post(path, body).await.expect("an answer")
    }

    async fn try_post(&self, path: &str, body: &str) -> std::io::Result<(u16, String)> {
        let mut stream = self.ask(path, body).await?;
        let mut answer = String::new();
        tokio::time::timeout(Duration::from_secs(60), stream.read_to_string(&mut answer)).await??;
        let (head, body) = answer.split_once("\r\n\r\n").ok_or(std::io::ErrorKind::UnexpectedEof)?;
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        Ok((status.ok_or(std::io::ErrorKind::InvalidData)?, body.to_owned()))
    }

    /// Sends a request and does not wait for its answer.
    pub async fn ask(&self, path: &str, body: &str) -> std::io::Result<UnixStream> {
        let mut stream = UnixStream::connect(&self.socket).await?;
        let length = body.len();
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: plugin\r\nUser-Agent: Go-http-client/1.1\r\nContent-Length: {length}\r\n\
             Accept: application/vnd.docker.plugins.v1.2+json\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).await?;
        Ok(stream)
    }

    /// Mounts, which has to succeed. Returns the mount's path.
    pub async fn mounted(&self, volume: &str, id: &str) -> PathBuf {
        let (status, answer) = self.post("/VolumeDriver.Mount", &of(volume, id)).await;
        assert_eq!(status, 200, "{answer}");
        let answer: serde_json::Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["Err"], "");
        answer["Mountpoint"].as_str().unwrap().into()
    }

    pub async fn unmounted(&self, volume: &str, id: &str) {
        let answer = self.post("/VolumeDriver.Unmount", &of(volume, id)).await;
        assert_eq!(answer, (200, r#"{"Err":""}"#.to_owned()));
    }

    /// Returns how many uses are counted, of all volumes.
    pub fn count(&self) -> usize {
        let below = |path: &Path| -> Vec<PathBuf> {
            let entries = fs::read_dir(path).into_iter().flatten();
            entries.map(|entry| entry.unwrap().path()).collect()
        };
        let volumes = below(&self.users).into_iter().flat_map(|namespace| below(&namespace));
        volumes.map(|volume| below(&volume).len()).sum()
    }
}

impl Drop for VolumePlugin {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns the body of a Mount or an Unmount.
pub fn of(volume: &str, id: &str) -> String {
    serde_json::json!({ "Name": volume, "ID": id }).to_string()
}

impl Start {
    /// systemd-socket-activate becomes the volume plugin at the first connection, in the same process.
    fn spawn(&self, socket: &Path, users: &Path) -> Child {
        let log = users.with_file_name("log");
        let log = fs::OpenOptions::new().create(true).append(true).open(log).unwrap();
        let mut command = Command::new("setpriv");
        command.args(["--reuid", &self.uid.to_string(), "--regid", &self.uid.to_string(), "--clear-groups"]);
        command.args(["--pdeathsig", "KILL", "systemd-socket-activate", "--listen"]).arg(socket);
        command.arg(format!("--setenv={}", self.environment.0)).env(self.environment.0, &self.environment.1);
        command.arg(env!("CARGO_BIN_EXE_csid-volume-plugin"));
        command.args(["--namespace", "default", "--sweep", "1", "--runtime-dir"]).arg(users);
        command.args(&self.arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        command.spawn().expect("setpriv starts")
    }
}
