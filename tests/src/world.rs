//! A world: a mount namespace with directories, one csid and its test plugins in it.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use csi_witness::rules::{Breach, Verdict};
use csi_witness::{Mark, Setup, Sockets, Witness};
use csid_client::{Client, Kind, MountFilter, Target};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, unmount,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::thread::UnshareFlags;
use tokio::net::UnixDatagram;

use crate::clustered::Servers;
use crate::fault::Fault;
use crate::held::{self, HeldCalls, SearchBy};
use crate::hung::Hung;
use crate::kernel::{self, Loop};
use crate::on_etcd;
use crate::plugin::TestPlugin;
use crate::script::{Act, Device, Lie, Rule};

/// No test takes longer, but for those that say so.
const LIMIT: Duration = Duration::from_secs(600);
/// The time within which an expected event comes on any machine. Benchmarks measure how soon it comes.
pub const SOON: Duration = Duration::from_secs(60);

/// A failed test prints this many of the last lines of csid's log.
const LOG_LINES: usize = 40;

pub struct World {
    /// The tmpfs with everything in it.
    pub dir: PathBuf,
    /// How long the test may take.
    pub limit: Duration,
    /// The program of csid and its helper from their next start on. `None`: the one that cargo built for this test run.
    pub csid_program: Option<PathBuf>,
    /// csid's environment beyond its directories.
    pub environment: BTreeMap<String, String>,
    /// The directory of the witnesses' logs, for a test that judges hosts together: ID.jsonl for a plugin. `None`: the world judges them itself.
    pub logs: Option<PathBuf>,
    plugins: BTreeMap<String, TestPlugin>,
    loops: Vec<Loop>,
    hung: Option<Hung>,
    /// The witnesses, which outlive csid.
    witnesses: Vec<Witness>,
    /// Breaches that the test makes csid commit, or may.
    excuses: Vec<Excuse>,
    csid: Option<Child>,
    /// csid's helper, which outlives it.
    helper: Option<Child>,
    /// The calls of both, if the test holds some.
    held: Option<HeldCalls>,
    /// Notifications that csid sent to systemd since it was started.
    notified: Arc<Mutex<Vec<String>>>,
    /// Boot ids that there were.
    boots: u32,
    /// What csid is a node of. `None`: csid is alone.
    servers: Option<Servers>,
}

/// An excuse of a test for breaches of a CSI rule.
#[derive(Debug)]
struct Excuse {
    rule: u8,
    /// A part of what the witness says of the breach.
    what: String,
    /// Whether the test makes csid break the rule in each run.
    must_be: bool,
}

impl Excuse {
    fn covers(&self, breach: &Breach) -> bool {
        self.rule == breach.rule && breach.what.contains(&self.what)
    }
}

/// Runs `test` in a world of its own. Its panic is the caller's.
pub fn world<F>(test: F)
where
    F: for<'w> AsyncFnOnce(&'w mut World) + Send + 'static,
{
    world_within(LIMIT, test);
}

/// Runs a test, which may take so long, in a world of its own. Its panic is the caller's.
pub fn world_within<F>(limit: Duration, test: F)
where
    F: for<'w> AsyncFnOnce(&'w mut World) + Send + 'static,
{
    let directory = tempfile::Builder::new().prefix("csid-test-").tempdir().expect("a temporary directory");
    let dir = directory.path().to_owned();
    let name = std::thread::current().name().unwrap_or("world").to_owned();
    let time = Time { test: name.clone(), begun: Instant::now() };
    let thread = std::thread::Builder::new().name(name).spawn(move || {
        let _time = time;
        let mut world = World::new(dir, limit).expect("a world (the tests need root)");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            tokio::time::timeout(limit, test(&mut world)).await.expect("the test ends in time");
        });
        world.assert_breaches();
        world.assert_excuses();
    });
    if let Err(panic) = thread.expect("a thread").join() {
        std::panic::resume_unwind(panic);
    }
}

/// A test's line in the file that `$CSID_TEST_TIMES` names: its seconds and its name.
struct Time {
    test: String,
    begun: Instant,
}

impl Drop for Time {
    fn drop(&mut self) {
        let Some(times) = std::env::var_os("CSID_TEST_TIMES") else { return };
        let line = format!("{:6.1} {}\n", self.begun.elapsed().as_secs_f64(), self.test);
        let file = fs::OpenOptions::new().create(true).append(true).open(times);
        if let Err(error) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
            eprintln!("the time of {} was not noted: {error}", self.test);
        }
    }
}

/// Prints a number that a test measured, past the capture of the test harness.
pub fn count(what: &str, number: usize) {
    let test = std::thread::current().name().unwrap_or("?").to_owned();
    let _ = writeln!(std::io::stderr(), "    {test}: {number} {what}");
}

/// Prints why this test is left out, past the capture of the test harness.
pub fn left_out(why: &str) {
    let test = std::thread::current().name().unwrap_or("?").to_owned();
    let _ = writeln!(std::io::stderr(), "    {test}: left out: {why}");
}

/// Returns whether a variable of the environment is set, which makes a test's subject missing. Prints why the test is skipped then.
pub(crate) fn is_set(variable: &str, how: &str, why: &str) -> bool {
    let is_set = std::env::var_os(variable).is_some();
    if is_set {
        left_out(&format!("{how}: {why}"));
    }
    is_set
}

/// Returns the path of a program of this package, as cargo built it for this test run.
pub fn program(name: &str) -> PathBuf {
    let this = std::env::current_exe().expect("this program's path");
    let mut beside = this.parent().expect("its directory");
    if beside.ends_with("deps") {
        beside = beside.parent().expect("target/debug");
    }
    let path = beside.join(name);
    assert!(path.exists(), "{} was not built", path.display());
    path
}

/// Returns the command of a program that is killed when the world's thread ends.
pub fn child(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(program).stdin(Stdio::null());
    command
}

/// Returns the command of a helper, as csid-helper.socket starts it for a csid whose runtime directory is `run`. The helper ends with
/// the thread that starts it.
fn helper(csid: &Path, run: &Path, log: &Path) -> std::io::Result<Command> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
    let path = run.join("helper.sock");
    let _ = fs::remove_file(&path);
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    bind(&socket, &SocketAddrUnix::new(&path)?)?;
    listen(&socket, 128)?;
    let log = fs::OpenOptions::new().create(true).append(true).open(log)?;
    let mut command = child(csid);
    command.arg("host-helper").env_clear().stdin(socket).stdout(log.try_clone()?).stderr(log);
    Ok(command)
}

fn held_at(held: &HeldCalls) -> (&str, &Path) {
    (held::SOCKET, held.socket())
}

/// Polls until `condition` holds.
pub async fn eventually(what: &str, condition: impl AsyncFnMut() -> bool) {
    within_time(SOON, what, condition).await;
}

pub async fn within_time(limit: Duration, what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + limit;
    while !condition().await {
        assert!(Instant::now() < end, "in {limit:?} it did not come to this: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Returns the kind of csid's error, and the error. Fails the test if there is none.
pub fn refusal<T: std::fmt::Debug>(result: csid_client::Result<T>) -> (Kind, csid_client::CsidError) {
    match result {
        Ok(value) => panic!("answered {value:?}, an error was due"),
        Err(csid_client::Error::Csid(error)) => (error.kind.clone(), *error),
        Err(other) => panic!("no error of csid's: {other:?}"),
    }
}

impl World {
    fn new(dir: PathBuf, limit: Duration) -> std::io::Result<Self> {
        // SAFETY: file descriptors stay shared; the thread was made for this world, and nobody expects its
        // working directory or mount table to be the process'.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }?;
        let rec = MountPropagationFlags::REC;
        mount_change("/", MountPropagationFlags::PRIVATE | rec)?;
        // As systemd leaves a host: mounts are shared.
        mount_change("/", MountPropagationFlags::SHARED | rec)?;
        mount("tmpfs", &dir, "tmpfs", MountFlags::empty(), c"mode=0755")?;
        let name = dir.file_name().expect("a name").to_string_lossy();
        let world = World {
            servers: Servers::start(&name),
            dir,
            limit,
            csid_program: None,
            environment: BTreeMap::new(),
            logs: None,
            plugins: BTreeMap::new(),
            loops: Vec::new(),
            hung: None,
            witnesses: Vec::new(),
            excuses: Vec::new(),
            csid: None,
            helper: None,
            held: None,
            notified: Arc::default(),
            boots: 0,
        };
        for name in ["state", "run", "etc/plugins.d", "etc/volumes.d", "credentials", "targets"] {
            fs::create_dir_all(world.dir.join(name))?;
        }
        world.mount_run()?;
        world.configure("");
        Ok(world)
    }

    fn mount_run(&self) -> std::io::Result<()> {
        Ok(mount("tmpfs", self.dir.join("run"), "tmpfs", MountFlags::empty(), c"mode=0755")?)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The text of csid.toml; targets may be below `targets`.
    pub fn configure(&self, more: &str) {
        let text = format!("target-roots = [{:?}]\n{more}", self.path("targets"));
        let text = match &self.servers {
            Some(servers) => servers.configuration(&text),
            None => text,
        };
        fs::write(self.path("etc/csid.toml"), text).expect("csid.toml");
    }

    /// Starts a test plugin that csid knows by its configuration, with a witness between both. A test fails at its end if csid broke
    /// a rule of CSI's.
    pub async fn add_plugin(&mut self, id: &str) -> &mut TestPlugin {
        self.add_plugin_with(id, "").await
    }

    /// Starts a test plugin with `more` in its configuration.
    pub async fn add_plugin_with(&mut self, id: &str, more: &str) -> &mut TestPlugin {
        self.add_plugin_and(id, &[], more).await
    }

    /// Starts a test plugin. Its witness stands between csid and these instances, too, which the test adds later.
    pub async fn add_plugin_and(&mut self, id: &str, instances: &[&str], more: &str) -> &mut TestPlugin {
        let directory = self.path("plugins").join(id);
        let of_instances =
            instances.iter().map(|instance| directory.with_file_name(format!("{id}.{instance}")));
        let sockets = [directory.clone()].into_iter().chain(of_instances).map(|directory| {
            fs::create_dir_all(&directory).expect("the plugin's directory");
            Sockets { listen: TestPlugin::witnessed(&directory), plugin: TestPlugin::own_socket(&directory) }
        });
        let log = match &self.logs {
            Some(logs) => logs.join(format!("{id}.jsonl")),
            None => directory.join("witness.jsonl"),
        };
        let setup = Setup { sockets: sockets.collect(), log, ..Setup::default() };
        self.witnesses.push(Witness::start(setup).expect("a witness"));
        self.configure_plugin(id, &TestPlugin::witnessed(&directory), more);
        self.start_plugin(id).await
    }

    /// Starts a test plugin without a witness.
    pub async fn add_unwitnessed(&mut self, id: &str, more: &str) -> &mut TestPlugin {
        let socket = TestPlugin::own_socket(&self.path("plugins").join(id));
        self.configure_plugin(id, &socket, more);
        self.start_plugin(id).await
    }

    async fn start_plugin(&mut self, id: &str) -> &mut TestPlugin {
        let plugin = TestPlugin::new(self.path("plugins").join(id));
        self.plugins.insert(id.to_owned(), plugin);
        let plugin = self.plugin(id);
        plugin.start().await;
        plugin
    }

    /// Excuses breaches of a CSI rule that the test makes csid commit. `what` is a part of what the witness says of them. The test
    /// fails if there is none.
    pub fn excuse(&mut self, rule: u8, what: &str) {
        self.excuses.push(Excuse { rule, what: what.to_owned(), must_be: true });
    }

    /// Excuses breaches of a CSI rule that the test may make csid commit, or not.
    pub fn may_excuse(&mut self, rule: u8, what: &str) {
        self.excuses.push(Excuse { rule, what: what.to_owned(), must_be: false });
    }

    /// Fails if a witness saw a breach that is not excused.
    pub fn assert_breaches(&self) {
        if self.logs.is_some() {
            return;
        }
        let mut breaches = self.breaches();
        breaches.retain(|breach| !self.excuses.iter().any(|excuse| excuse.covers(breach)));
        assert!(breaches.is_empty(), "the witness saw {breaches:#?}");
    }

    /// Fails if an excuse had nothing to excuse. A test that made csid break a rule no longer does so.
    fn assert_excuses(&self) {
        let breaches = self.breaches();
        let mut unused = self.excuses.iter().filter(|excuse| excuse.must_be);
        let unused = unused.find(|excuse| !breaches.iter().any(|breach| excuse.covers(breach)));
        assert!(unused.is_none(), "the witness saw no such breach: {unused:?}");
    }

    fn breaches(&self) -> Vec<Breach> {
        self.verdicts().flat_map(|verdict| verdict.breaches).collect()
    }

    fn verdicts(&self) -> impl Iterator<Item = Verdict> {
        self.witnesses.iter().map(|witness| witness.verdict().expect("the witness' log"))
    }

    /// How often the witnesses had something to hold against a rule.
    pub fn looks_at(&self, rule: u8) -> u64 {
        self.verdicts().filter_map(|verdict| verdict.checked.get(&rule).copied()).sum()
    }

    /// Another running instance of `id`, with the same volumes and its own script; it goes by `ID.INSTANCE` here.
    pub async fn add_instance(&mut self, id: &str, instance: &str) -> &mut TestPlugin {
        let name = format!("{id}.{instance}");
        let plugin = self.plugin(id);
        let plugin = plugin.another(plugin.directory.with_file_name(&name));
        self.plugins.insert(name.clone(), plugin);
        let plugin = self.plugin(&name);
        plugin.start().await;
        plugin
    }

    pub fn configure_plugin(&self, id: &str, socket: &Path, more: &str) {
        let text = format!("supervision = \"external\"\nsocket = {socket:?}\n{more}");
        fs::write(self.path("etc/plugins.d").join(format!("{id}.toml")), text).expect("a plugin's file");
    }

    /// A file of volumes.d: `id` is its name and the volume's external id, of plugin `p`; `more` says the rest.
    pub fn declare(&self, id: &str, more: &str) -> PathBuf {
        let text = format!("plugin = \"p\"\nexternal-id = {id:?}\n{more}");
        let file = self.path("etc/volumes.d").join(format!("{id}.toml"));
        fs::write(&file, text).expect("a volume's file");
        file
    }

    pub fn plugin(&mut self, id: &str) -> &mut TestPlugin {
        self.plugins.get_mut(id).expect("the plugin was added")
    }

    /// From now on what `rpc` of plugin `id` mounts is served by the world's [`Hung`], which holds nothing yet.
    pub fn hang(&mut self, id: &str, rpc: &str) -> &Hung {
        let socket = self.path("hung.sock");
        let server = self.hung.get_or_insert_with(|| Hung::start(socket)).socket().to_owned();
        let rule = Rule::always(rpc, Act::Lie(Lie::Hung));
        self.plugin(id).set(|script| (script.hung, script.rules) = (server, vec![rule]));
        self.hung()
    }

    /// The server of what hangs.
    pub fn hung(&self) -> &Hung {
        self.hung.as_ref().expect("a plugin's mounts hang")
    }

    /// Makes all plugins behave as they should.
    pub fn honest(&mut self) {
        self.plugins.values_mut().for_each(TestPlugin::honest);
    }

    /// Starts each plugin that died of its script. It behaves as it should from then on.
    pub async fn revive(&mut self) {
        for plugin in self.plugins.values_mut() {
            if plugin.dead() {
                plugin.honest();
                plugin.start().await;
            }
        }
    }

    /// A block device for `volume` of plugin `id`, and its read-only twin.
    pub fn add_device(&mut self, id: &str, volume: &str) -> Device {
        let file = self.path("plugins").join(id).join(format!("image-{}", self.loops.len()));
        fs::File::create(&file).and_then(|f| f.set_len(4 << 20)).expect("an image");
        let [writable, read_only] = [false, true].map(|ro| Loop::attach(&file, ro).expect("a loop device"));
        let device = Device {
            volume: volume.to_owned(),
            writable: writable.device.clone(),
            read_only: read_only.device.clone(),
            file_system: String::new(),
        };
        self.loops.extend([writable, read_only]);
        let added = device.clone();
        self.plugin(id).set(|script| script.devices.push(added));
        device
    }

    /// A block device with a file system for `volume` of plugin `id`: it is mounted where the volume is staged.
    pub fn add_disk(&mut self, id: &str, volume: &str) -> Device {
        let device = self.add_device(id, volume);
        let made =
            Command::new("mkfs.ext4").args(["-q", "-O", "^has_journal"]).arg(&device.writable).status();
        assert!(made.expect("mkfs.ext4").success());
        self.plugin(id).set(|script| {
            let own = script.devices.iter_mut().find(|own| own.writable == device.writable);
            own.expect("the device was added").file_system = "ext4".to_owned();
        });
        device
    }

    /// Starts csid and waits until it says that it is ready. As a node of a cluster it has joined, too.
    pub async fn start(&mut self) -> Client {
        self.launch(&[]).await;
        if self.servers.is_some() {
            eventually("csid has joined", async || self.status().contains("cluster prod: joined at")).await;
        }
        self.client().await
    }

    /// Start csid, which is to end with an error; what it says of it.
    pub async fn refuses_to_start(&mut self) -> String {
        let mut said = 0;
        if let Ok(log) = fs::metadata(self.path("csid.log")) {
            said = usize::try_from(log.len()).expect("a length");
        }
        self.spawn(&[]);
        let mut csid = self.csid.take().expect("csid was started");
        let mut status = None;
        eventually("csid ends", async || {
            status = csid.try_wait().expect("csid's status");
            status.is_some()
        })
        .await;
        assert_eq!(status.and_then(|status| status.code()), Some(1));
        assert!(!self.notified("READY=1"));
        fs::read_to_string(self.path("csid.log")).expect("csid's log").split_off(said)
    }

    /// Start csid; false when it ended before it was ready, as a fault makes it.
    pub async fn launch(&mut self, environment: &[(&str, &str)]) -> bool {
        self.spawn(environment);
        let end = Instant::now() + SOON;
        while !self.notified("READY=1") {
            if self.dead() {
                return false;
            }
            assert!(Instant::now() < end, "csid was not ready in {SOON:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        true
    }

    /// From the next start of csid and its helper on, the test may hold calls of searches that find mounts so.
    pub fn hold_calls(&mut self, by: SearchBy) {
        assert!(self.helper.is_none(), "the helper runs already");
        self.held = Some(HeldCalls::at(self.path("held.sock"), by).expect("a socket"));
    }

    /// The calls of csid and its helper.
    pub fn held(&self) -> &HeldCalls {
        self.held.as_ref().expect("the test holds calls")
    }

    fn csid_program(&self) -> PathBuf {
        self.csid_program.clone().unwrap_or_else(|| program("csid-under-test"))
    }

    fn spawn(&mut self, environment: &[(&str, &str)]) {
        assert!(self.csid.is_none(), "csid runs already");
        self.start_helper();
        let notify = self.path("notify");
        let _ = fs::remove_file(&notify);
        let socket = UnixDatagram::bind(&notify).expect("the notify socket");
        let notified = Arc::<Mutex<Vec<String>>>::default();
        self.notified = Arc::clone(&notified);
        // Read to its end, as systemd does: a full queue would block csid.
        tokio::spawn(async move {
            let mut buffer = [0; 4096];
            while let Ok(length) = socket.recv(&mut buffer).await {
                let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                notified.lock().expect("the notifications").extend(text.lines().map(str::to_owned));
            }
        });
        let log =
            fs::OpenOptions::new().create(true).append(true).open(self.path("csid.log")).expect("a log");
        let mut command = child(&self.csid_program());
        command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("STATE_DIRECTORY", self.path("state"))
            .env("RUNTIME_DIRECTORY", self.path("run"))
            .env("CONFIGURATION_DIRECTORY", self.path("etc"))
            .env("CREDENTIALS_DIRECTORY", self.path("credentials"))
            .env("DBUS_SYSTEM_BUS_ADDRESS", format!("unix:path={}", self.path("no-bus").display()))
            .env("NOTIFY_SOCKET", &notify)
            .env("RUST_BACKTRACE", "1")
            .envs(std::env::var(on_etcd::ENDPOINTS).map(|endpoints| (on_etcd::ENDPOINTS, endpoints)))
            .envs(&self.environment)
            .envs(environment.iter().copied())
            .envs(self.held.iter().map(held_at))
            .stdout(log.try_clone().expect("a log"))
            .stderr(log);
        self.csid = Some(command.spawn().expect("csid starts"));
    }

    /// Starts csid's helper, as csid-helper.socket does.
    fn start_helper(&mut self) {
        if self.helper.is_some() {
            return;
        }
        let helper = helper(&self.csid_program(), &self.path("run"), &self.path("csid.log"));
        let mut helper = helper.expect("the helper's socket");
        self.helper = Some(helper.envs(self.held.iter().map(held_at)).spawn().expect("csid's helper"));
    }

    /// Replaces csid's helper, as a restart of its unit does. Its workers stay.
    pub fn replace_helper(&mut self) {
        self.stop_helper();
        self.start_helper();
    }

    fn stop_helper(&mut self) {
        if let Some(mut helper) = self.helper.take() {
            let _ = helper.kill();
            let _ = helper.wait();
        }
    }

    /// Whether csid sent systemd this since it was started.
    pub fn notified(&self, line: &str) -> bool {
        self.notified.lock().expect("the notifications").iter().any(|notified| notified == line)
    }

    /// Returns what csid sent systemd since it was started, in order.
    pub fn notifications(&self) -> Vec<String> {
        self.notified.lock().expect("the notifications").clone()
    }

    /// The last status line.
    pub fn status(&self) -> String {
        let notified = self.notified.lock().expect("the notifications");
        notified.iter().rev().find_map(|line| line.strip_prefix("STATUS=")).unwrap_or_default().to_owned()
    }

    /// A new connection to the private socket.
    pub async fn client(&mut self) -> Client {
        let target = Target::Socket(self.socket());
        if self.dead() {
            panic!("csid is not running");
        }
        Client::connect(&target).await.expect("csid's private socket")
    }

    pub fn socket(&self) -> PathBuf {
        self.path("run/csid.sock")
    }

    pub fn csid_pid(&self) -> u32 {
        self.csid.as_ref().expect("csid runs").id()
    }

    /// Whether csid has ended; then it is forgotten. Another end than a kill or success fails the test.
    pub fn dead(&mut self) -> bool {
        let Some(csid) = &mut self.csid else { return true };
        let Some(status) = csid.try_wait().expect("csid's status") else { return false };
        self.csid = None;
        assert!(status.success() || status.signal() == Some(9), "csid ended with {status}");
        true
    }

    /// Wait until csid has ended itself by SIGABRT, as a panic makes it.
    pub async fn aborted(&mut self) {
        let mut csid = self.csid.take().expect("csid runs");
        let end = Instant::now() + SOON;
        loop {
            if let Some(status) = csid.try_wait().expect("csid's status") {
                assert_eq!(status.signal(), Some(6), "csid ended with {status}");
                return;
            }
            if Instant::now() > end {
                self.csid = Some(csid);
                panic!("csid did not end");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Kills csid (kill -9). Fails the test if csid does not end, as a process that waits in the kernel does not.
    pub fn kill(&mut self) {
        let csid = self.csid.as_mut().expect("csid runs");
        csid.kill().expect("csid is killed");
        let end = pidfd_open(Pid::from_child(csid), PidfdFlags::empty()).expect("csid's pidfd");
        let limit = Timespec { tv_sec: SOON.as_secs().cast_signed(), tv_nsec: 0 };
        let ended = poll(&mut [PollFd::new(&end, PollFlags::IN)], Some(&limit)).expect("a poll");
        assert_eq!(ended, 1, "csid was killed and has not ended in {SOON:?}");
        csid.wait().expect("csid has ended");
        self.csid = None;
    }

    /// Kills csid, and starts csid as if there had been no journal.
    pub async fn begin_new_journal(&mut self) -> Client {
        self.kill();
        fs::remove_dir_all(self.path("state/journal")).expect("the journal is removed");
        fs::remove_file(self.path("run/journal-seen")).expect("the note of the journal is removed");
        self.start().await
    }

    /// Stops csid, as `systemctl stop` does.
    pub async fn stop(&mut self) {
        let pid = i32::try_from(self.csid_pid()).expect("a pid");
        let pid = Pid::from_raw(pid).expect("a pid");
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("csid gets SIGTERM");
        let end = Instant::now() + SOON;
        while !self.dead() {
            assert!(Instant::now() < end, "csid did not stop");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Reboots the host: every process ends, no mount is left, and `/run` is new. The plugins that ran are started; csid is not.
    pub async fn reboot(&mut self) {
        if self.csid.is_some() {
            self.kill();
        }
        self.stop_helper();
        let ran = self.stop_plugins();
        self.mark_reboot();
        self.unmount_all();
        self.mount_run().expect("a new /run");
        self.start_plugins(&ran).await;
    }

    /// Reboots a host whose `/run` outlives a boot. Only the boot id shows the reboot.
    pub async fn reboot_with_old_run(&mut self) {
        self.kill();
        let ran = self.stop_plugins();
        self.mark_reboot();
        for mount in kernel::below(&self.dir).expect("the mount table").iter().rev() {
            if mount.point != self.path("run") {
                unmount(&mount.point, UnmountFlags::empty()).expect("an unmount");
            }
        }
        self.another_boot_id();
        self.start_plugins(&ran).await;
    }

    /// Gives the kernel another boot id.
    pub fn another_boot_id(&mut self) {
        self.boots += 1;
        let id = self.path("boot-id");
        fs::write(&id, format!("00000000-0000-4000-8000-{:012}\n", self.boots)).expect("a boot id");
        if self.boots == 1 {
            mount_bind(&id, "/proc/sys/kernel/random/boot_id").expect("another boot id");
        }
    }

    fn mark_reboot(&self) {
        for witness in &self.witnesses {
            witness.mark(Mark::Reboot).expect("the witness' log");
        }
    }

    fn stop_plugins(&mut self) -> Vec<String> {
        let mut ran = Vec::new();
        for (id, plugin) in &mut self.plugins {
            if plugin.kill() {
                ran.push(id.clone());
            }
        }
        ran
    }

    async fn start_plugins(&mut self, ran: &[String]) {
        for (id, plugin) in &mut self.plugins {
            plugin.rebooted();
            if ran.contains(id) {
                plugin.start().await;
            }
        }
    }

    fn unmount_all(&self) {
        for mount in kernel::below(&self.dir).expect("the mount table").iter().rev() {
            let end = Instant::now() + SOON;
            // A worker of the helper holds `/run` until it has seen that csid is gone.
            while let Err(error) = unmount(&mount.point, UnmountFlags::empty()) {
                let is_late = Instant::now() > end;
                assert!(error == Errno::BUSY && !is_late, "umount {}: {error}", mount.point.display());
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    /// Returns the remains of volumes: mounts, paths, target mounts, and attachments at the plugins.
    pub fn leftovers(&self) -> Vec<String> {
        let mut left = Vec::new();
        let own = [self.path("run"), self.path("state/journal")];
        for mount in kernel::volumes_below(&self.dir).expect("the mount table") {
            if !own.contains(&mount.point) {
                left.push(format!("mount {}", mount.point.display()));
            }
        }
        // The plugin's own directories stay: plugins/ID/{staging,publish} and plugins/ID/live/{staging,publish}.
        let plugins = self.path("state/plugins");
        let is_of_plugin = |below: &Path| {
            let depth = if below.iter().nth(1).is_some_and(|part| part == "live") { 3 } else { 2 };
            below.iter().count() <= depth
        };
        for path in kernel::tree(&plugins).expect("the state directory") {
            if path.strip_prefix(&plugins).is_ok_and(|below| !is_of_plugin(below)) {
                left.push(format!("path {}", path.display()));
            }
        }
        for plugin in self.plugins.values() {
            for made in plugin.made() {
                // Two instances have the same.
                if made.starts_with("attachment ") && !left.contains(&made) {
                    left.push(made);
                }
            }
        }
        left
    }

    /// Checks that no row, operation, mount, path or attachment is left, and no loop device but the test's own. Waits for operations that
    /// roll back.
    pub async fn nothing_left(&self, client: &Client) {
        let mut busy = String::new();
        eventually("no row and no operation is left", async || {
            let rows = client.list_mounts(MountFilter::default()).await.expect("the rows");
            let operations = client.list_operations().await.expect("the operations");
            let now: Vec<_> = rows
                .iter()
                .map(|row| format!("{} {} {}: {}", row.volume, row.consumer, row.state, row.error))
                .chain(operations.iter().map(|o| format!("operation {} {} {}", o.kind, o.subject, o.step)))
                .collect();
            if busy != now.join("; ") {
                busy = now.join("; ");
                eprintln!("left: {busy}");
            }
            now.is_empty()
        })
        .await;
        if self.servers.is_some() || self.plugins.values().any(TestPlugin::is_sharing) {
            // A call is answered there before servers have the volume detached.
            eventually("nothing is attached", async || self.leftovers().is_empty()).await;
        }
        assert_eq!(self.leftovers(), Vec::<String>::new(), "something is left over");
        let ours = self.dir.to_string_lossy().into_owned();
        let loops = kernel::loops().expect("the loop devices");
        let attached = loops.iter().filter(|line| line.contains(&ours)).count();
        assert!(attached <= self.loops.len(), "loop devices are left: {loops:?}");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // First, since a process that waits for the hung file system does not end before.
        self.hung = None;
        if let Some(mut csid) = self.csid.take() {
            let _ = csid.kill();
            let _ = csid.wait();
        }
        self.stop_helper();
        for plugin in self.plugins.values_mut() {
            plugin.kill();
        }
        if std::thread::panicking() {
            let log = fs::read_to_string(self.path("csid.log")).unwrap_or_default();
            let lines: Vec<_> = log.lines().filter(|line| !is_backtrace(line)).collect();
            eprintln!("---- csid's log, the last of {} lines", lines.len());
            for line in lines.iter().skip(lines.len().saturating_sub(LOG_LINES)) {
                eprintln!("{line}");
            }
            if let Some(servers) = &self.servers {
                eprintln!("{}", servers.logs());
            }
            for (id, plugin) in &mut self.plugins {
                eprintln!("---- calls of plugin {id}");
                for call in plugin.calls().iter().filter(|c| !c.call.volume.is_empty()).take(60) {
                    eprintln!("{call}");
                }
            }
        }
    }
}

/// Returns whether a line of csid's log is a frame of a backtrace: `  12: function`, or `      at file:line:column`.
fn is_backtrace(line: &str) -> bool {
    let frame = line.trim_start();
    let number = frame.split_once(": ").map_or("", |(number, _)| number);
    line.starts_with(' ')
        && (frame.starts_with("at ")
            || !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

impl Fault {
    /// Makes faults of every csid that starts in the world, none of them armed.
    pub fn of(w: &mut World) -> Self {
        let fault = Fault::new(w.path("fault"));
        let (key, file) = fault.environment();
        w.environment.insert(key.to_owned(), file.to_string_lossy().into_owned());
        fault
    }

    pub async fn reached(&self, edge: &str) {
        eventually(&format!("csid is held at {edge}"), async || self.holds(edge)).await;
    }
}
