//! The script of a test for the test plugin, and the record of the plugin for the test: two files in the plugin's directory. The plugin
//! reads the script again at each call, and only appends to the record.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use tonic::Code;

/// How the plugin behaves. The default is an honest node plugin without a controller; `control` gives it one.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Script {
    /// Another one: the calls are counted from the beginning.
    pub generation: u64,
    pub name: String,
    pub node_id: String,
    /// The other nodes that a controller can attach to.
    pub others: Vec<String>,
    /// The services of this process in addition to Identity. Another process with the same backend may have the other half.
    pub serves: Vec<Half>,
    /// Names of `PluginCapability`, `ONLINE` and `OFFLINE` among them.
    pub plugin: Vec<String>,
    /// Names of `NodeServiceCapability`.
    pub capabilities: Vec<String>,
    /// Names of `ControllerServiceCapability`. The node half goes by them, too: with PUBLISH_UNPUBLISH_VOLUME it takes only
    /// what is attached.
    pub controller: Vec<String>,
    pub probe: Probe,
    /// The block devices that back a block volume, by its id: read-write, and the same read-only.
    pub devices: Vec<Device>,
    /// The limit of volumes on the node; 0: none.
    pub max_volumes: i64,
    /// The topology of the node, and with VOLUME_ACCESSIBILITY_CONSTRAINTS of every volume that is created.
    pub topology: BTreeMap<String, String>,
    /// Whether the plugin refuses to create a volume for a caller that requires no topology.
    pub wants_places: bool,
    /// Bytes for all volumes together.
    pub capacity: i64,
    /// No volume has fewer bytes, whatever limit its caller gives.
    pub least: i64,
    /// The CreateSnapshot, counted from 1, that finds the snapshot ready to use.
    pub snapshot_ready_at: u64,
    /// No list has more entries in an answer, whatever is asked for.
    pub page: usize,
    /// The value in every context that it makes; absent: another one each time.
    pub token: Option<String>,
    /// Every RPC that can have secrets wants this one.
    pub secret: Option<(String, String)>,
    /// The socket of the server of hanging file systems (`World::hang`).
    pub hung: PathBuf,
    /// Whether the plugin counts the publishes of a volume, and refuses NodeUnstageVolume above 0. The count outlives a boot.
    pub counts_publishes: bool,
    /// Whether the plugin has mounts of its own in csid's mount namespace: one for a staging, and one for each publish.
    pub mounts_apart: bool,
    pub rules: Vec<Rule>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Half {
    Node,
    Controller,
}

/// The exit status of a plugin that dies of its script.
pub const DIES: i32 = 9;

/// Every capability that the controller can have.
pub const CONTROLLER: [&str; 11] = [
    "CREATE_DELETE_VOLUME",
    "PUBLISH_UNPUBLISH_VOLUME",
    "PUBLISH_READONLY",
    "LIST_VOLUMES",
    "LIST_VOLUMES_PUBLISHED_NODES",
    "GET_CAPACITY",
    "CREATE_DELETE_SNAPSHOT",
    "LIST_SNAPSHOTS",
    "CLONE_VOLUME",
    "EXPAND_VOLUME",
    "SINGLE_NODE_MULTI_WRITER",
];

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Device {
    pub volume: String,
    pub writable: PathBuf,
    pub read_only: PathBuf,
    /// The type of the file system that is staged. Empty: the volume is published as it is.
    pub file_system: String,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Probe {
    Ready,
    /// The answer has no `ready`: that is ready, too (CO rule 37).
    Nil,
    NotReady,
    Fails,
}

/// The calls `from..from + times` (counted from 1) of `rpc` for `volume` do `act`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Rule {
    pub rpc: String,
    /// Absent: every volume.
    pub volume: Option<String>,
    pub from: u64,
    pub times: u64,
    pub act: Act,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Act {
    /// Answer this gRPC code, do nothing.
    Fail(i32),
    /// Do it, and answer this code all the same.
    FailAfter(i32),
    /// Wait so many milliseconds, then fail as `Fail` does; a caller that goes away ends the wait.
    FailLater(u64, i32),
    /// Fails as `Fail` does, with these words.
    Say(i32, String),
    /// Wait, then do it; a caller that goes away ends the wait.
    Delay(u64),
    /// Do it, then wait before answering.
    DelayAfter(u64),
    /// Wait until the plugin has another script, then do it; a caller that goes away ends the wait.
    Hold,
    /// Wait, do it and answer, whether the caller is still there or not.
    Stubborn(u64),
    /// Begin it at the first call and do it once, whether callers are there or not. The same call waits for its end too, and
    /// is answered at once after it. Another call for the volume gets ABORTED meanwhile.
    Background(u64),
    /// Wait for all other calls with this act, whatever their volumes, then take this long, do it and answer. A caller that
    /// goes away shortens nothing, and the same call waits in the queue once more.
    Serial(u64),
    /// The plugin ends with the status [`DIES`], before the effect.
    DieBefore,
    DieAfter,
    Lie(Lie),
}

/// A call that answers OK. Of a controller's, `Nothing` has not been done, and what the answer is about is not in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Lie {
    /// Nothing is there.
    Nothing,
    /// Each snapshot of a list is of a volume that there is not.
    Another,
    /// A directory or file with nothing mounted on it.
    Empty,
    /// A mounted regular file.
    File,
    /// A mounted directory.
    Directory,
    /// A mounted device node of a character device.
    Character,
    /// Writable though asked for read-only.
    Writable,
    /// No lie: a file system in user space, which dies with the plugin.
    Fuse,
    /// No lie: bindfs, a process of its own that can be killed (`Backend::server`). Used for NodeStageVolume.
    Served,
    /// No lie: bindfs again, which the plugin leaves behind when it ends.
    Left,
    /// No lie: one whose requests the test holds and releases (`hung`), by the volume's id. Its server outlives the plugin.
    /// NodeStageVolume or NodePublishVolume makes it.
    Hung,
    /// One that is dead.
    Dead,
}

impl Default for Script {
    fn default() -> Self {
        Script {
            generation: 0,
            name: "test.csid".to_owned(),
            node_id: "node-1".to_owned(),
            others: vec!["node-2".to_owned()],
            serves: vec![Half::Node],
            plugin: Vec::new(),
            capabilities: ["STAGE_UNSTAGE_VOLUME", "SINGLE_NODE_MULTI_WRITER", "VOLUME_MOUNT_GROUP"]
                .map(str::to_owned)
                .to_vec(),
            controller: Vec::new(),
            probe: Probe::Ready,
            devices: Vec::new(),
            max_volumes: 0,
            topology: BTreeMap::new(),
            wants_places: false,
            capacity: 1 << 40,
            least: 0,
            snapshot_ready_at: 1,
            page: usize::MAX,
            token: None,
            secret: None,
            hung: PathBuf::new(),
            counts_publishes: false,
            mounts_apart: false,
            rules: Vec::new(),
        }
    }
}

impl Rule {
    /// Every call of `rpc`.
    pub fn always(rpc: &str, act: Act) -> Self {
        Rule { rpc: rpc.to_owned(), volume: None, from: 1, times: u64::MAX, act }
    }

    /// The first call of `rpc` only.
    pub fn once(rpc: &str, act: Act) -> Self {
        Rule { times: 1, ..Rule::always(rpc, act) }
    }

    pub fn of(self, volume: &str) -> Self {
        Rule { volume: Some(volume.to_owned()), ..self }
    }
}

impl Script {
    /// Serves a controller with these capabilities, in addition to the node service.
    pub fn control(&mut self, can: &[&str]) {
        self.serves = vec![Half::Node, Half::Controller];
        self.plugin = vec!["CONTROLLER_SERVICE".to_owned()];
        self.controller = can.iter().copied().map(str::to_owned).collect();
    }

    pub fn attaches(&self) -> bool {
        has(&self.controller, "PUBLISH_UNPUBLISH_VOLUME")
    }

    pub fn read(directory: &Path) -> io::Result<Self> {
        let text = std::fs::read(directory.join("script.json"))?;
        serde_json::from_slice(&text).map_err(io::Error::from)
    }

    /// In one step: the plugin reads the old one or the new one.
    pub fn write(&self, directory: &Path) -> io::Result<()> {
        let new = directory.join("script.new");
        std::fs::write(&new, serde_json::to_vec(self)?)?;
        std::fs::rename(new, directory.join("script.json"))
    }
}

/// Whether a capability is among these.
pub fn has(capabilities: &[String], capability: &str) -> bool {
    capabilities.iter().any(|name| name == capability)
}

const RECORD: &str = "calls.jsonl";

/// A line of the record.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Line {
    Start(Box<Call>),
    End(End),
    /// A wait that was ended because the caller went away; the code says nothing.
    Cancelled(End),
    /// The plugin started: whatever was open has ended with the one before.
    Started,
    /// The host rebooted: nothing is mounted.
    Boot,
}

/// Returns the time by the clock of the record.
pub fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1_000_000 + now.tv_nsec.cast_unsigned() / 1000
}

/// A call as it came.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Call {
    /// Unique in the record.
    pub id: u64,
    pub rpc: String,
    /// The id of the volume; of CreateVolume the name.
    pub volume: String,
    /// The id; of CreateSnapshot the name.
    pub snapshot: String,
    pub node: String,
    pub required_bytes: i64,
    pub limit_bytes: i64,
    pub staging: String,
    /// The target path; of NodeGetVolumeStats and NodeExpandVolume the `volume_path`.
    pub target: String,
    pub read_only: bool,
    pub block: bool,
    pub access_mode: String,
    pub fs_type: String,
    pub mount_flags: Vec<String>,
    pub mount_group: String,
    pub parameters: Vec<(String, String)>,
    pub context: Vec<(String, String)>,
    pub publish_context: Vec<(String, String)>,
    pub secrets: Vec<(String, String)>,
    /// Microseconds of the machine's monotonic clock, which all plugins of a test have in common.
    pub at: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct End {
    pub id: u64,
    pub code: i32,
    pub at: u64,
}

/// Appends a line by one write, so that a killed plugin leaves whole lines.
pub fn append(file: &File, line: &Line) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    (&*file).write_all(&text)
}

pub fn record(directory: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(directory.join(RECORD))
}

/// All lines so far.
pub fn lines(directory: &Path) -> io::Result<Vec<Line>> {
    lines_from(directory, 0)
}

/// The whole lines after the first `from` bytes, which end one.
pub fn lines_from(directory: &Path, from: usize) -> io::Result<Vec<Line>> {
    let text = match std::fs::read(directory.join(RECORD)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        other => other?,
    };
    let lines = text[from..].split_inclusive(|byte| *byte == b'\n').filter(|line| line.ends_with(b"\n"));
    lines.map(|line| serde_json::from_slice(line).map_err(io::Error::from)).collect()
}

/// How long the record is.
pub fn size(directory: &Path) -> io::Result<usize> {
    Ok(std::fs::metadata(directory.join(RECORD))?.len() as usize)
}

/// `Code::from_i32`, for a code that a script names.
pub fn code(number: i32) -> Code {
    Code::from_i32(number)
}
