//! A test plugin's process, its script and its record, as the tests use them.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Child;

use crate::backend::{Backend, Volume};
use crate::script::{self, Call, DIES, Line, Rule, Script};
use crate::world::{child, eventually, program};

pub struct TestPlugin {
    pub directory: PathBuf,
    /// Whose backend it has: its own, or the one's that it is another instance of.
    state: PathBuf,
    script: Script,
    /// The socket where it registers itself.
    registration: Option<PathBuf>,
    process: Option<Child>,
}

/// A call with its end.
#[derive(Clone, Debug)]
pub struct Recorded {
    pub call: Call,
    /// The gRPC code answered; absent while it is open, or when the plugin died.
    pub code: Option<i32>,
    /// When it was answered, by the clock of `call.at`.
    pub ended: Option<u64>,
    /// The caller went away before the answer.
    pub cancelled: bool,
}

impl fmt::Display for Recorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Call { rpc, volume, target, at, .. } = &self.call;
        write!(f, "{at:>10} {rpc} {volume} {target} -> {:?} cancelled={}", self.code, self.cancelled)
    }
}

impl TestPlugin {
    pub fn new(directory: PathBuf) -> Self {
        Self::with(directory.clone(), directory, Script::default())
    }

    /// Another instance: with the script, but its own copy of it, and with the volumes of this one.
    pub fn another(&self, directory: PathBuf) -> Self {
        Self::with(directory, self.state.clone(), self.script.clone())
    }

    fn with(directory: PathBuf, state: PathBuf, script: Script) -> Self {
        std::fs::create_dir_all(&directory).expect("the plugin's directory");
        script.write(&directory).expect("the script");
        TestPlugin { directory, state, script, registration: None, process: None }
    }

    /// Returns the directory of the backend.
    pub fn state(&self) -> &Path {
        &self.state
    }

    /// Whether the backend is another one's.
    pub fn is_sharing(&self) -> bool {
        self.state != self.directory
    }

    /// Returns what its controller, or another one with this backend, has attached to this plugin's node, and else what it has made.
    pub fn made(&self) -> Vec<String> {
        let mut made = self.backend().made().expect("the backend");
        let of_node = format!(" {}", self.script.node_id);
        made.retain(|made| !self.is_sharing() || made.starts_with("attachment ") && made.ends_with(&of_node));
        made
    }

    /// Has the plugin use another one's backend, from its next start on: the same storage on another host.
    pub fn shares(&mut self, state: PathBuf) {
        self.state = state;
    }

    /// From its next start on it registers itself there, by its script's name.
    pub fn registers_at(&mut self, socket: PathBuf) {
        self.registration = Some(socket);
    }

    /// Returns the backend, whether the plugin runs or not.
    pub fn backend(&self) -> Backend {
        Backend::new(&self.state)
    }

    /// A volume that an operator made, for every use.
    pub fn provision(&self, volume: &str) {
        let backend = self.backend();
        let _lock = backend.lock().expect("the backend");
        backend.put(&Volume::provisioned(volume, 4 << 20)).expect("a volume");
    }

    pub fn socket(&self) -> PathBuf {
        Self::own_socket(&self.directory)
    }

    /// Returns the socket that csid is to use: that of the plugin's witness, or the plugin's own if it has no witness.
    pub fn witnessed_socket(&self) -> PathBuf {
        Some(Self::witnessed(&self.directory)).filter(|path| path.exists()).unwrap_or_else(|| self.socket())
    }

    pub(crate) fn own_socket(directory: &Path) -> PathBuf {
        directory.join("csi.sock")
    }

    pub(crate) fn witnessed(directory: &Path) -> PathBuf {
        directory.join("witness.sock")
    }

    pub async fn start(&mut self) {
        assert!(self.process.is_none(), "the plugin runs already");
        self.registration
            .iter()
            .chain([&self.socket()])
            .for_each(|socket| drop(std::fs::remove_file(socket)));
        let log = std::fs::File::create(self.directory.join("log")).expect("a log");
        let mut command = child(&program("test-plugin"));
        command.args([&self.directory, &self.state]).args(&self.registration);
        command.stdout(log.try_clone().expect("a log")).stderr(log);
        let socket = self.socket();
        let process = self.process.insert(command.spawn().expect("the plugin starts"));
        eventually("the plugin listens", async || {
            // A caller that waits for it may have made the call at which the script ends it.
            let is_dead = process.try_wait().expect("a status").is_some_and(|s| s.code() == Some(DIES));
            is_dead || std::os::unix::net::UnixStream::connect(&socket).is_ok()
        })
        .await;
    }

    /// Whether it ran.
    pub fn kill(&mut self) -> bool {
        let Some(mut process) = self.process.take() else { return false };
        let _ = process.kill();
        let _ = process.wait();
        true
    }

    /// Whether it runs no more though it was not killed here.
    pub fn dead(&mut self) -> bool {
        let dead = self.process.as_mut().is_some_and(|p| p.try_wait().expect("a status").is_some());
        if dead {
            self.process = None;
        }
        dead
    }

    /// Stops the process: it hangs, and its connections stay open. A thread that runs serves on for a moment after SIGSTOP was
    /// sent, on a busy machine for long, so this waits until all of them have stopped.
    pub fn pause(&self) {
        use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
        self.signal(rustix::process::Signal::STOP);
        let pid = Pid::from_child(self.process.as_ref().expect("the plugin runs"));
        let stopped = WaitIdOptions::STOPPED | WaitIdOptions::NOHANG;
        let end = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while waitid(WaitId::Pid(pid), stopped).expect("its state").is_none() {
            assert!(std::time::Instant::now() < end, "the plugin does not stop");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    pub fn resume(&self) {
        self.signal(rustix::process::Signal::CONT);
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let process = self.process.as_ref().expect("the plugin runs");
        rustix::process::kill_process(rustix::process::Pid::from_child(process), signal).expect("a signal");
    }

    /// Wait for the death that the script ordered.
    pub async fn died(&mut self) {
        let process = self.process.as_mut().expect("the plugin runs");
        eventually("the plugin dies", async || process.try_wait().expect("a status").is_some()).await;
        self.process = None;
    }

    /// Changes the script; counting starts again.
    pub fn set(&mut self, change: impl FnOnce(&mut Script)) {
        change(&mut self.script);
        self.script.generation += 1;
        self.script.write(&self.directory).expect("the script");
    }

    pub fn rules(&mut self, rules: impl IntoIterator<Item = Rule>) {
        self.set(|script| script.rules = rules.into_iter().collect());
    }

    pub fn honest(&mut self) {
        self.rules([]);
    }

    /// Every call so far.
    pub fn calls(&self) -> Vec<Recorded> {
        let mut calls: Vec<Recorded> = Vec::new();
        for line in script::lines(&self.directory).expect("the record") {
            match line {
                Line::Start(call) => {
                    calls.push(Recorded { call: *call, code: None, ended: None, cancelled: false })
                }
                Line::End(end) => {
                    if let Some(call) = calls.iter_mut().rev().find(|c| c.call.id == end.id) {
                        (call.code, call.ended) = (Some(end.code), Some(end.at));
                    }
                }
                Line::Cancelled(end) => {
                    if let Some(call) = calls.iter_mut().rev().find(|c| c.call.id == end.id) {
                        call.cancelled = true;
                    }
                }
                Line::Started | Line::Boot => {}
            }
        }
        calls
    }

    /// How long the record is.
    pub fn recorded(&self) -> usize {
        script::size(&self.directory).expect("the record")
    }

    /// How many calls of `rpc` have begun since the record was `from` long.
    pub fn begun_since(&self, from: usize, rpc: &str) -> usize {
        let lines = script::lines_from(&self.directory, from).expect("the record");
        lines.iter().filter(|line| matches!(line, Line::Start(call) if call.rpc == rpc)).count()
    }

    /// The calls that concern a volume, without the Identity's and GetInfo.
    pub fn volume_calls(&self) -> Vec<Recorded> {
        self.calls().into_iter().filter(|c| !c.call.volume.is_empty()).collect()
    }

    /// How many calls of `rpc` there were for `volume` (empty: for any).
    pub fn count(&self, rpc: &str, volume: &str) -> usize {
        let is = |c: &Recorded| c.call.rpc == rpc && (volume.is_empty() || c.call.volume == volume);
        self.calls().iter().filter(|c| is(c)).count()
    }

    /// Note in the record that nothing is mounted any more.
    pub fn rebooted(&self) {
        let record = script::record(&self.directory).expect("the record");
        script::append(&record, &Line::Boot).expect("the record");
    }
}

impl Drop for TestPlugin {
    fn drop(&mut self) {
        self.kill();
    }
}
