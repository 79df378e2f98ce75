//! A test plugin's process, its script and its record, as the tests use them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Child;

use crate::backend::{Backend, Volume};
use crate::script::{self, Call, DIES, Line, Rule, Script};
use crate::world::{child, eventually, program};

/// Microseconds.
const LATE_NEWS: u64 = 100_000;

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

    /// Returns the socket of the plugin's witness, if there is one.
    pub fn witnessed_socket(&self) -> PathBuf {
        Self::witnessed(&self.directory)
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
                Line::Start(call) => calls.push(Recorded { call: *call, code: None, cancelled: false }),
                Line::End(end) => {
                    if let Some(call) = calls.iter_mut().rev().find(|c| c.call.id == end.id) {
                        call.code = Some(end.code);
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

    /// CO rules 18, 21, 22, 28 and 29 over the whole record: never two calls in flight for a volume, publish only after a
    /// stage that succeeded, unstage only after every unpublish succeeded, one staging path, no target twice.
    /// Returns how many calls were looked at.
    pub fn assert_rules(&self) -> usize {
        let mut calls: BTreeMap<u64, Call> = BTreeMap::new();
        let mut open: BTreeMap<u64, String> = BTreeMap::new();
        let mut volumes: BTreeMap<String, VolumeRules> = BTreeMap::new();
        let lines = script::lines(&self.directory).expect("the record");
        let cancelled: BTreeMap<u64, u64> = lines
            .iter()
            .filter_map(|line| if let Line::Cancelled(end) = line { Some((end.id, end.at)) } else { None })
            .collect();
        for line in lines {
            match line {
                Line::Started => open.clear(),
                Line::Boot => {
                    open.clear();
                    volumes.clear();
                }
                Line::Start(call) if call.volume.is_empty() => {}
                Line::Start(call) => {
                    // On another connection the news of a cancellation may come a little late.
                    let lasts = |id: &u64| cancelled.get(id).is_none_or(|at| *at > call.at + LATE_NEWS);
                    let in_flight = open.iter().find(|(id, volume)| **volume == call.volume && lasts(id));
                    assert_eq!(in_flight, None, "co_rule_18: {call:?} while another call is in flight");
                    open.insert(call.id, call.volume.clone());
                    let taken = |(volume, rules): (&String, &VolumeRules)| {
                        *volume != call.volume && rules.published.contains(&call.target)
                    };
                    assert!(!volumes.iter().any(taken), "co_rule_29: {call:?}: another volume's target");
                    volumes.entry(call.volume.clone()).or_default().started(&call);
                    calls.insert(call.id, *call);
                }
                Line::End(end) => {
                    open.remove(&end.id);
                    if let Some(call) = calls.get(&end.id) {
                        volumes.entry(call.volume.clone()).or_default().ended(call, end.code);
                    }
                }
                Line::Cancelled(end) => {
                    open.remove(&end.id);
                }
            }
        }
        calls.len()
    }
}

impl Drop for TestPlugin {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The CO's knowledge of a volume since the boot, from its own calls alone.
#[derive(Default)]
struct VolumeRules {
    staging: Option<String>,
    staged: bool,
    published: BTreeSet<String>,
}

const OK: i32 = 0;
const NOT_FOUND: i32 = 5;

impl VolumeRules {
    fn started(&mut self, call: &Call) {
        if !call.staging.is_empty() {
            assert!(Path::new(&call.staging).is_absolute(), "co_rule_28: {call:?}");
            let first = self.staging.get_or_insert_with(|| call.staging.clone());
            assert_eq!(*first, call.staging, "co_rule_28: one staging path per volume");
        }
        match call.rpc.as_str() {
            "NodePublishVolume" => {
                assert!(call.staging.is_empty() || self.staged, "co_rule_21: {call:?} before a stage");
                // The publish may be there from now on, whatever the answer is.
                self.published.insert(call.target.clone());
            }
            "NodeUnstageVolume" => assert!(
                self.published.is_empty(),
                "co_rule_22: {call:?} before the unpublish of {:?} succeeded",
                self.published
            ),
            _ => {}
        }
    }

    fn ended(&mut self, call: &Call, code: i32) {
        match (call.rpc.as_str(), code) {
            ("NodeStageVolume", OK) => self.staged = true,
            ("NodeUnstageVolume", OK | NOT_FOUND) => self.staged = false,
            ("NodeUnpublishVolume", OK | NOT_FOUND) => {
                self.published.remove(&call.target);
            }
            _ => {}
        }
    }
}
