//! A host of the bench's own: a mount namespace, directories on the real disk, a message bus, plugins and csid.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use csid_client::{Client, PluginService, Target};
use rustix::fs::{Advice, fadvise};
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, unmount,
};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, Signal, kill_process};

const LIMIT: Duration = Duration::from_secs(60);
const BUS: &str = "bus";

/// The system bus of the host in `directory`.
pub fn bus_address(directory: &Path) -> String {
    format!("unix:path={}", directory.join(BUS).display())
}

/// A process that ends with its handle.
pub struct Running(Child);

impl Running {
    pub fn start(command: &mut Command) -> Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        Ok(Running(command.stdin(Stdio::null()).spawn().with_context(|| format!("cannot start {name}"))?))
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// CPU time used, in the kernel and out of it, in ticks of 10 ms.
    pub fn cpu(&self) -> Result<Duration> {
        let text = fs::read_to_string(format!("/proc/{}/stat", self.pid()))?;
        let fields: Vec<&str> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let ticks = |place: usize| -> Result<u64> { Ok(fields.get(place).context("a short stat")?.parse()?) };
        Ok(Duration::from_millis(10 * (ticks(11)? + ticks(12)?)))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Killed when it is dropped, or stopped if its host says so.
pub struct Csid {
    process: Running,
    _helper: Running,
    stops: bool,
    /// exec to READY.
    pub ready: Duration,
}

impl Drop for Csid {
    fn drop(&mut self) {
        if !self.stops {
            return;
        }
        let _ = kill_process(Pid::from_child(&self.process.0), Signal::TERM);
        let begun = Instant::now();
        while begun.elapsed() < LIMIT && matches!(self.process.0.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Csid {
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Resident memory, KiB.
    pub fn rss(&self) -> Result<f64> {
        let text = fs::read_to_string(format!("/proc/{}/status", self.process.pid()))?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        Ok(line.trim().trim_end_matches(" kB").parse()?)
    }

    pub fn cpu(&self) -> Result<Duration> {
        self.process.cpu()
    }
}

pub struct Host {
    directory: PathBuf,
    csid: PathBuf,
    /// csid ends by SIGTERM. `false`: by SIGKILL, as in a crash.
    pub stops: bool,
}

impl Host {
    /// In `directory`, by a process that has a mount namespace for itself: every mount ends with it.
    pub fn new(directory: &Path, csid: &Path) -> Result<Self> {
        // As systemd leaves a host: mounts are shared.
        mount_change("/", MountPropagationFlags::SHARED | MountPropagationFlags::REC)?;
        let host = Host { directory: directory.to_owned(), csid: csid.to_owned(), stops: false };
        for name in ["run", "etc/plugins.d", "foreign", "floor", "journal"] {
            fs::create_dir_all(host.path(name))?;
        }
        fs::write(host.path("etc/csid.toml"), "")?;
        host.mount_run()?;
        Ok(host)
    }

    /// Asks the kernel to drop csid's file from the page cache, so that csid's RSS is that after a boot. The kernel maps a cached file in the
    /// parts in which it was cached. A file that was just written is cached in larger parts than one that is read while it is executed.
    /// What a running process has mapped stays in the cache, and so does a file on a tmpfs. The first start afterwards reads the disk.
    pub fn evict_csid(&self) -> Result<()> {
        let file = fs::File::open(&self.csid)?;
        file.sync_all()?;
        Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    fn mount_run(&self) -> Result<()> {
        Ok(mount("tmpfs", self.path("run"), "tmpfs", MountFlags::empty(), c"mode=0755")?)
    }

    /// Not in /run: a plugin outlives the reboot that the bench plays.
    pub fn socket(&self, plugin: &str) -> PathBuf {
        self.path(&format!("{plugin}.sock"))
    }

    /// Another host in a directory of this one's, with its own csid.
    pub fn beside(&self, name: &str) -> Result<Self> {
        let directory = self.path(name);
        fs::create_dir_all(&directory)?;
        Ok(Host { stops: self.stops, ..Host::new(&directory, &self.csid)? })
    }

    pub fn bus_address(&self) -> String {
        bus_address(&self.directory)
    }

    /// A plugin that csid knows by its configuration.
    pub fn plugin(&self, id: &str) -> Result<Running> {
        self.plugin_with(id, 0)
    }

    /// The same, which takes so many volumes at most; 0: any number.
    pub fn plugin_with(&self, id: &str, most: i64) -> Result<Running> {
        let socket = self.socket(id);
        let _ = fs::remove_file(&socket);
        let text = format!("supervision = \"external\"\nsocket = {socket:?}\n");
        fs::write(self.path(&format!("etc/plugins.d/{id}.toml")), text)?;
        let plugin = Running::start(
            Command::new(std::env::current_exe()?).arg("serve-plugin").arg(&socket).arg(most.to_string()),
        )?;
        self.listens(&socket)?;
        Ok(plugin)
    }

    /// The daemon that does the least for a mount of the volumes `0..volumes` by the plugin `id`, and a connection to it.
    pub async fn least(&self, id: &str, volumes: u32) -> Result<(Running, Client)> {
        let (socket, directory) = (self.path("least.sock"), self.path("journal/least"));
        let _ = fs::remove_file(&socket);
        fs::create_dir_all(&directory)?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("serve-least").arg(&socket).arg(self.socket(id)).arg(&directory).arg(volumes.to_string());
        let daemon = Running::start(&mut command)?;
        self.listens(&socket)?;
        Ok((daemon, Client::connect(&Target::Socket(socket)).await?))
    }

    fn listens(&self, socket: &Path) -> Result<()> {
        let end = Instant::now() + LIMIT;
        while std::os::unix::net::UnixStream::connect(socket).is_err() {
            ensure!(Instant::now() < end, "nobody listens at {}", socket.display());
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// A real dbus-daemon, with what csid's package adds to its policy.
    pub fn bus(&self) -> Result<Running> {
        let (socket, config) = (self.path(BUS), self.path("bus.conf"));
        let text = format!(
            r#"<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>system</type><auth>EXTERNAL</auth><listen>unix:path={}</listen>
<policy context="default"><allow user="*"/><deny own="*"/><deny send_type="method_call"/>
<allow send_type="signal"/><allow send_requested_reply="true" send_type="method_return"/>
<allow send_requested_reply="true" send_type="error"/><allow receive_type="method_call"/>
<allow receive_type="method_return"/><allow receive_type="error"/><allow receive_type="signal"/>
<allow send_destination="org.freedesktop.DBus" send_interface="org.freedesktop.DBus"/></policy>
<policy user="root"><allow own="org.freedesktop.systemd1"/>
<allow send_destination="org.freedesktop.systemd1"/></policy>
<include>{}/../../packaging/dbus/org.csid1.conf</include></busconfig>"#,
            socket.display(),
            env!("CARGO_MANIFEST_DIR")
        );
        fs::write(&config, text)?;
        let mut command = Command::new("dbus-daemon");
        command.args(["--nofork", "--nopidfile"]).arg(format!("--config-file={}", config.display()));
        command.stderr(fs::File::create(self.path("bus.log"))?);
        let bus = Running::start(&mut command)?;
        self.listens(&socket)?;
        Ok(bus)
    }

    /// Start csid and wait until it says READY.
    pub fn start(&self) -> Result<Csid> {
        let notify = self.path("run/notify");
        let _ = fs::remove_file(&notify);
        let answer = UnixDatagram::bind(&notify)?;
        answer.set_read_timeout(Some(LIMIT))?;
        let log = fs::OpenOptions::new().create(true).append(true).open(self.path("csid.log"))?;
        let mut command = Command::new(&self.csid);
        command
            .env_clear()
            .env("STATE_DIRECTORY", self.path("state"))
            .env("RUNTIME_DIRECTORY", self.path("run"))
            .env("CONFIGURATION_DIRECTORY", self.path("etc"))
            .env("NOTIFY_SOCKET", &notify)
            .env("DBUS_SYSTEM_BUS_ADDRESS", bus_address(&self.directory))
            .stdout(log.try_clone()?)
            .stderr(log);
        let helper = self.helper()?;
        let begun = Instant::now();
        let process = Running::start(&mut command)?;
        let mut buffer = [0; 4096];
        loop {
            let length = match answer.recv(&mut buffer) {
                Ok(length) => length,
                Err(error) => bail!("csid was not ready ({error}); its log: {}", self.log()),
            };
            if String::from_utf8_lossy(&buffer[..length]).lines().any(|line| line == "READY=1") {
                break;
            }
        }
        let ready = begun.elapsed();
        // Read on to its end, as systemd does.
        answer.set_read_timeout(None)?;
        std::thread::spawn(move || while answer.recv(&mut [0; 4096]).is_ok() {});
        Ok(Csid { process, _helper: helper, stops: self.stops, ready })
    }

    /// csid's helper, as csid-helper.socket starts it.
    fn helper(&self) -> Result<Running> {
        let path = self.path("run/helper.sock");
        let _ = fs::remove_file(&path);
        let kind = SocketType::SEQPACKET;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path)?)?;
        rustix::net::listen(&socket, 128)?;
        let log = fs::OpenOptions::new().create(true).append(true).open(self.path("csid.log"))?;
        let mut command = Command::new(&self.csid);
        command.arg("host-helper").env_clear().stdin(socket).stdout(log.try_clone()?).stderr(log);
        Ok(Running(command.spawn().context("cannot start csid's helper")?))
    }

    fn log(&self) -> String {
        let text = fs::read_to_string(self.path("csid.log")).unwrap_or_default();
        text.lines().rev().take(20).collect::<Vec<_>>().join("\n")
    }

    /// A new connection on which the plugin `id` is ready.
    pub async fn client(&self, target: &Target, id: &str) -> Result<Client> {
        let end = Instant::now() + LIMIT;
        loop {
            let tried = async {
                let client = Client::connect(target).await?;
                client.wait_for_plugin(id, PluginService::Node, Default::default()).await?;
                csid_client::Result::Ok(client)
            };
            match tried.await {
                Ok(client) => return Ok(client),
                // Its name on the bus comes after READY.
                Err(error) if Instant::now() > end => return Err(error).context("csid cannot be reached"),
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }

    pub fn private(&self) -> Target {
        Target::Socket(self.path("run/csid.sock"))
    }

    /// `count` mounts that no test here owns.
    pub fn foreign(&self, count: usize) -> Result<()> {
        let present = self.mounts("foreign")?;
        for n in present..count {
            let path = self.path(&format!("foreign/{n}"));
            fs::create_dir_all(&path)?;
            mount_bind(&path, &path)?;
        }
        for n in count..present {
            unmount(self.path(&format!("foreign/{n}")), UnmountFlags::empty())?;
        }
        Ok(())
    }

    /// How many mounts are below a directory of this host.
    pub fn mounts(&self, name: &str) -> Result<usize> {
        Ok(mounts_below(&self.path(name))?.len())
    }

    /// What a reboot leaves when csid is dead: no mount, and a new /run.
    pub fn reboot(&self) -> Result<()> {
        self.unmount_all()?;
        self.mount_run()
    }

    fn unmount_all(&self) -> Result<()> {
        for point in mounts_below(&self.directory)?.iter().rev() {
            unmount(point, UnmountFlags::DETACH)?;
        }
        Ok(())
    }

    /// Nothing of csid's any more: as after its first installation.
    pub fn forget_state(&self) -> Result<()> {
        self.reboot()?;
        match fs::remove_dir_all(self.path("state")) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }
}

/// Mount points below `directory`, in mount order.
fn mounts_below(directory: &Path) -> Result<Vec<PathBuf>> {
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    let points = table.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    Ok(points.filter(|point| point.starts_with(directory) && point != directory).collect())
}
