//! A mount namespace with a driver in it. The namespace is held by a `cat` whose input is this process: when a test
//! dies the namespace and its mounts go with it. The test looks into it through /proc/PID/root.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use csi_proto::csi::v1::controller_client::ControllerClient;
use csi_proto::csi::v1::identity_client::IdentityClient;
use csi_proto::csi::v1::node_client::NodeClient;
use csi_proto::csi::v1::volume_capability::access_mode::Mode;
use csi_proto::csi::v1::volume_capability::{AccessMode, AccessType, BlockVolume, MountVolume};
use csi_proto::csi::v1::*;
use hyper_util::rt::TokioIo;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

pub const MIB: i64 = 1 << 20;

pub struct Host {
    dir: tempfile::TempDir,
    holder: Child,
    driver: Option<Child>,
    pub path: String,
    /// What the drivers started from here on get after `serve`.
    pub flags: Vec<&'static str>,
    /// The publish_context of stage and publish.
    pub context: BTreeMap<String, String>,
}

/// What a volume is to be, in most tests.
pub fn capability(fs: &str, mode: Mode) -> VolumeCapability {
    let access_type = match fs {
        "block" => AccessType::Block(BlockVolume {}),
        fs => AccessType::Mount(MountVolume { fs_type: fs.to_owned(), ..Default::default() }),
    };
    VolumeCapability { access_type: Some(access_type), access_mode: Some(AccessMode { mode: mode.into() }) }
}

pub fn code<T>(answer: Result<T, Status>) -> Code {
    answer.err().map_or(Code::Ok, |status| status.code())
}

pub fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(20), "waiting for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl Host {
    /// A namespace with a driver that serves.
    pub fn new() -> Host {
        assert!(rustix::process::geteuid().is_root(), "these tests mount: run them as root");
        let holder = Command::new("unshare")
            .args(["--mount", "--propagation", "private", "cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let ns = |pid: u32| std::fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
        let own = ns(std::process::id());
        let is_cat = |pid| std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|c| c == "cat\n");
        wait_for("the namespace", || is_cat(holder.id()) && ns(holder.id()) != own);
        let path = std::env::var("PATH").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut host = Host {
            dir,
            holder,
            driver: None,
            path,
            flags: vec!["--node-id", "here"],
            context: BTreeMap::new(),
        };
        std::fs::create_dir(host.path("staging")).unwrap();
        std::fs::create_dir(host.path("publish")).unwrap();
        host.start();
        host
    }

    /// As the driver sees it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    /// The same place as this process reaches it.
    pub fn seen(&self, name: &str) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.holder.id()));
        root.join(self.path(name).strip_prefix("/").unwrap())
    }

    pub fn image(&self, volume: &str) -> PathBuf {
        self.path(&format!("state/volumes/{volume}/image"))
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap()
    }

    /// A command in the namespace.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--mount", "--target", &self.holder.id().to_string(), "--", program]);
        command.env("PATH", &self.path);
        command
    }

    pub fn shell(&self, script: &str) {
        let done = self.command("sh").args(["-ec", script]).status().unwrap();
        assert!(done.success(), "{script}");
    }

    /// The command line of the driver.
    pub fn cli(&self, arguments: &[&str]) -> std::process::Output {
        let state = self.text("state");
        let mut command = self.command(env!("CARGO_BIN_EXE_csi-local"));
        command.args(["--state-dir", &state]).args(arguments).output().unwrap()
    }

    pub fn spawn(&self) -> Child {
        let log = std::fs::File::options().create(true).append(true).open(self.path("log")).unwrap();
        let mut command = self.command(env!("CARGO_BIN_EXE_csi-local"));
        command.args(["--state-dir", &self.text("state"), "serve"]).args(&self.flags);
        let endpoint = format!("unix://{}", self.text("csi.sock"));
        command.env("CSI_ENDPOINT", endpoint).stderr(log).spawn().unwrap()
    }

    pub fn start(&mut self) {
        assert!(self.driver.is_none());
        let socket = self.path("csi.sock");
        // A program that a killed driver was about to start may hold the old listener for an instant.
        let _stale = std::fs::remove_file(&socket);
        self.driver = Some(self.spawn());
        wait_for("the driver", || std::os::unix::net::UnixStream::connect(&socket).is_ok());
    }

    pub fn driver_pid(&self) -> i32 {
        self.driver.as_ref().unwrap().id() as i32
    }

    pub fn kill(&mut self) {
        let mut driver = self.driver.take().unwrap();
        driver.kill().unwrap();
        driver.wait().unwrap();
    }

    /// Asks the driver to end, and waits without holding up the clients of this thread.
    pub async fn terminate(&mut self) -> std::process::ExitStatus {
        let mut driver = self.driver.take().unwrap();
        let pid = rustix::process::Pid::from_child(&driver);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        tokio::task::spawn_blocking(move || driver.wait().unwrap()).await.unwrap()
    }

    /// The drivers started from here on run this script as mkfs.ext4.
    pub fn replace_mkfs(&mut self, script: &str) {
        let bin = self.path("bin");
        std::fs::create_dir(&bin).unwrap();
        std::fs::write(bin.join("mkfs.ext4"), format!("#!/bin/sh\n{script}\n")).unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o755);
        rustix::fs::chmod(bin.join("mkfs.ext4"), mode).unwrap();
        self.path = format!("{}:{}", bin.display(), self.path);
    }

    fn channel(&self) -> Channel {
        let socket = self.path("csi.sock");
        let connect = move |_| {
            let socket = socket.clone();
            async move { Ok::<_, std::io::Error>(TokioIo::new(tokio::net::UnixStream::connect(socket).await?)) }
        };
        let endpoint = Endpoint::from_static("http://localhost");
        endpoint.connect_with_connector_lazy(tower::service_fn(connect))
    }

    pub async fn identity(&self) -> IdentityClient<Channel> {
        IdentityClient::new(self.channel())
    }

    pub async fn controller(&self) -> ControllerClient<Channel> {
        ControllerClient::new(self.channel())
    }

    pub async fn node(&self) -> NodeClient<Channel> {
        NodeClient::new(self.channel())
    }

    pub async fn create(&self, name: &str, fs: &str, size: i64) -> Result<CreateVolumeResponse, Status> {
        let request = CreateVolumeRequest {
            name: name.to_owned(),
            capacity_range: Some(CapacityRange { required_bytes: size, limit_bytes: size }),
            volume_capabilities: vec![capability(fs, Mode::SingleNodeWriter)],
            ..Default::default()
        };
        Ok(self.controller().await.create_volume(request).await?.into_inner())
    }

    /// A volume of any file-system, `size` 0 for as large as its source.
    pub async fn create_from(
        &self,
        name: &str,
        source: volume_content_source::Type,
        fs: &str,
        size: i64,
    ) -> Result<Volume, Status> {
        let request = CreateVolumeRequest {
            name: name.to_owned(),
            capacity_range: Some(CapacityRange { required_bytes: size, limit_bytes: size }),
            volume_capabilities: vec![capability(fs, Mode::SingleNodeWriter)],
            volume_content_source: Some(VolumeContentSource { r#type: Some(source) }),
            ..Default::default()
        };
        let answer = self.controller().await.create_volume(request).await?.into_inner();
        Ok(answer.volume.unwrap())
    }

    pub async fn snapshot(&self, name: &str, volume: &str) -> Result<Snapshot, Status> {
        let request = CreateSnapshotRequest {
            name: name.to_owned(),
            source_volume_id: volume.to_owned(),
            ..Default::default()
        };
        let answer = self.controller().await.create_snapshot(request).await?.into_inner();
        Ok(answer.snapshot.unwrap())
    }

    pub async fn delete_snapshot(&self, snapshot: &str) -> Result<(), Status> {
        let request = DeleteSnapshotRequest { snapshot_id: snapshot.to_owned(), ..Default::default() };
        self.controller().await.delete_snapshot(request).await.map(drop)
    }

    pub async fn snapshots(&self, request: ListSnapshotsRequest) -> Result<(Vec<String>, String), Status> {
        let answer = self.controller().await.list_snapshots(request).await?.into_inner();
        let ids = answer.entries.into_iter().map(|e| e.snapshot.unwrap().snapshot_id);
        Ok((ids.collect(), answer.next_token))
    }

    pub async fn delete(&self, volume: &str) -> Result<(), Status> {
        let request = DeleteVolumeRequest { volume_id: volume.to_owned(), ..Default::default() };
        self.controller().await.delete_volume(request).await.map(drop)
    }

    /// On the directory `staging` of the test.
    pub fn stage_request(&self, volume: &str, wanted: &VolumeCapability) -> NodeStageVolumeRequest {
        NodeStageVolumeRequest {
            volume_id: volume.to_owned(),
            staging_target_path: self.text("staging"),
            volume_capability: Some(wanted.clone()),
            publish_context: self.context.clone(),
            ..Default::default()
        }
    }

    pub async fn stage(&self, volume: &str, wanted: &VolumeCapability) -> Result<(), Status> {
        self.node().await.node_stage_volume(self.stage_request(volume, wanted)).await.map(drop)
    }

    pub async fn unstage(&self, volume: &str) -> Result<(), Status> {
        let request = NodeUnstageVolumeRequest {
            volume_id: volume.to_owned(),
            staging_target_path: self.text("staging"),
        };
        self.node().await.node_unstage_volume(request).await.map(drop)
    }

    /// Publishes on `publish/TARGET` of the test.
    pub async fn publish(
        &self,
        volume: &str,
        wanted: &VolumeCapability,
        target: &str,
        readonly: bool,
    ) -> Result<(), Status> {
        let request = NodePublishVolumeRequest {
            volume_id: volume.to_owned(),
            staging_target_path: self.text("staging"),
            target_path: self.text(&format!("publish/{target}")),
            volume_capability: Some(wanted.clone()),
            publish_context: self.context.clone(),
            readonly,
            ..Default::default()
        };
        self.node().await.node_publish_volume(request).await.map(drop)
    }

    pub async fn unpublish(&self, volume: &str, target: &str) -> Result<(), Status> {
        let request = NodeUnpublishVolumeRequest {
            volume_id: volume.to_owned(),
            target_path: self.text(&format!("publish/{target}")),
        };
        self.node().await.node_unpublish_volume(request).await.map(drop)
    }

    /// Unpublishes what this process had open: a program that another test is just starting may have it for an instant
    /// yet.
    pub async fn unpublish_closed(&self, volume: &str, target: &str) {
        for _ in 0..1000 {
            match self.unpublish(volume, target).await {
                Err(status) if status.code() == Code::FailedPrecondition => {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                unpublished => return unpublished.unwrap(),
            }
        }
        panic!("{target} stays open");
    }

    pub async fn expand(&self, volume: &str, size: i64) -> Result<i64, Status> {
        let request = ControllerExpandVolumeRequest {
            volume_id: volume.to_owned(),
            capacity_range: Some(CapacityRange { required_bytes: size, limit_bytes: 0 }),
            ..Default::default()
        };
        let answer = self.controller().await.controller_expand_volume(request).await?.into_inner();
        assert!(answer.node_expansion_required);
        Ok(answer.capacity_bytes)
    }

    pub async fn node_expand(&self, volume: &str, target: &str) -> Result<i64, Status> {
        let request = NodeExpandVolumeRequest {
            volume_id: volume.to_owned(),
            volume_path: self.text(&format!("publish/{target}")),
            ..Default::default()
        };
        Ok(self.node().await.node_expand_volume(request).await?.into_inner().capacity_bytes)
    }

    /// The mounts of the namespace below the test's directory.
    pub fn mounts(&self) -> Vec<String> {
        let table = std::fs::read_to_string(format!("/proc/{}/mountinfo", self.holder.id())).unwrap();
        let dir = self.text("");
        table.lines().filter(|line| line.contains(&dir)).map(str::to_owned).collect()
    }

    /// Has the driver's state on a file-system of its own.
    pub fn mount_state(&mut self, mount: &str) {
        self.kill();
        self.shell(&format!("{mount} {}", self.text("state")));
        self.start();
    }

    /// The end of a test with one.
    pub fn unmount_state(&mut self) {
        self.assert_no_halves();
        self.kill();
        // The kernel may release a detached image an instant later.
        wait_for("umount", || self.command("umount").arg(self.path("state")).status().unwrap().success());
        assert_eq!(self.mounts(), Vec::<String>::new());
    }

    /// The numbers of the loop devices that carry images of the test.
    pub fn loops(&self) -> Vec<String> {
        let mut loops = Vec::new();
        for entry in Path::new("/sys/block").read_dir().unwrap().flatten() {
            let backing = std::fs::read_to_string(entry.path().join("loop/backing_file"));
            if backing.is_ok_and(|b| Path::new(&b).starts_with(self.dir.path())) {
                loops.push(entry.file_name().into_string().unwrap());
            }
        }
        loops
    }

    /// Nothing is mounted, attached or in the way: the end of every test.
    pub fn assert_clean(&self) {
        assert_eq!(self.mounts(), Vec::<String>::new());
        wait_for("autoclear", || self.loops().is_empty());
        let targets: Vec<_> = self.path("publish").read_dir().unwrap().flatten().collect();
        assert!(targets.is_empty(), "{targets:?}");
        self.assert_no_halves();
    }

    /// Nothing is left of what was cut short.
    pub fn assert_no_halves(&self) {
        for kind in ["state/volumes", "state/snapshots"] {
            for entry in self.seen(kind).read_dir().unwrap().flatten() {
                assert!(!entry.file_name().to_string_lossy().starts_with('.'), "{entry:?}");
            }
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the driver's log:\n{}", self.log());
        }
        if self.driver.is_some() {
            self.kill();
        }
        // Those in use go with the mounts of the namespace. Before that: later an image's path does not tell whose it is.
        for device in self.loops() {
            let _ = Command::new("losetup").arg("-d").arg(format!("/dev/{device}")).status();
        }
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}

pub fn of_volume(id: &str) -> volume_content_source::Type {
    let volume_id = id.to_owned();
    volume_content_source::Type::Volume(volume_content_source::VolumeSource { volume_id })
}

pub fn of_snapshot(id: &str) -> volume_content_source::Type {
    let snapshot_id = id.to_owned();
    volume_content_source::Type::Snapshot(volume_content_source::SnapshotSource { snapshot_id })
}

/// Without it the kernel lets no mounted ext4 grow.
pub fn has_cap_sys_resource() -> bool {
    let sets = rustix::thread::capabilities(None).unwrap();
    sets.effective.contains(rustix::thread::CapabilitySet::SYS_RESOURCE)
}

pub fn is_missing(path: &Path) -> bool {
    path.symlink_metadata().is_err_and(|e| e.kind() == ErrorKind::NotFound)
}

pub fn device_of(path: &Path) -> String {
    let rdev = path.metadata().unwrap().rdev();
    format!("{}:{}", rustix::fs::major(rdev), rustix::fs::minor(rdev))
}
