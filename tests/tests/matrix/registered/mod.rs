//! Registered volumes of a plugin that attaches: csid is killed on the way of a volume from its registration to its deletion
//! (`way`), and while several clients claim, mount, attach and expand (`clients`). Then csid starts again, comes to rest, and
//! what is there is held against the answers (`check`).

mod check;
mod clients;
mod item;
mod way;

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use csi_witness::{Mark, Setup, Sockets, Witness};
use csid::store::registry::VolumeName;
use csid::volume::rules::name_at_plugin;
use csid_client::{
    AccessMode, ClaimFilter, ClaimMode, ClaimRow, Client, Kind, MountFilter, PluginSpec, Supervision,
};
use csid_tests::ask::{NAMESPACE, healthy};
use csid_tests::backend::id_of;
use csid_tests::clustered;
use csid_tests::dice::Dice;
use csid_tests::script::{CONTROLLER, Half};
use csid_tests::site::Site;
use csid_tests::world::{World, eventually};

use crate::model::Told;
use crate::plan::Plugin;
use crate::report::Report;
use crate::slots::POLL;
use item::{Answer, Ask, Got, Item, Manner, State, Thing, after};
pub use way::RPCS;

/// Within this csid comes to rest, however slow the machine is.
const PATIENCE: Duration = Duration::from_secs(60);
/// The size of a provisioned volume.
const BYTES: u64 = 4 << 20;
/// One kill in this number is a reboot of the host, too.
const REBOOTS: u64 = 6;
/// The file of the witness' log, next to the plugin's socket.
const WITNESS_LOG: &str = "witness.jsonl";
/// The instance with a controller only.
const SECOND: &str = "second";
const MODES: [AccessMode; 3] =
    [AccessMode::SingleNodeWriter, AccessMode::SingleNodeMultiWriter, AccessMode::MultiNodeSingleWriter];
const THINGS: [Thing; 6] = [
    Thing::Registration,
    Thing::Use { consumer: "one", mode: ClaimMode::Write },
    Thing::Use { consumer: "two", mode: ClaimMode::Write },
    Thing::Use { consumer: "reader", mode: ClaimMode::Read },
    Thing::Attachment { node: "node-1" },
    Thing::Attachment { node: "node-2" },
];

#[derive(Debug)]
pub enum Chapter {
    /// One volume. csid is killed at each edge of its way.
    EveryEdge,
    /// One volume. csid is killed at each edge of its creation and its deletion. The plugin has this fault in either call.
    Born(Plugin),
    /// One volume. csid is killed at each edge of the release that the end of its unit or connection causes.
    Bound,
    /// A number of volumes at once. csid is killed at random edges, this number of times.
    AnyEdge(usize, Plugin, usize),
    /// Clients and fate of so many volumes, so many times.
    Clients(Setting, usize, usize),
}

/// The kind of plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// One instance, which expands volumes in use.
    Usual,
    /// Two instances, of which one has only a controller.
    TwoControllers,
    /// A plugin that expands only volumes that are not in use.
    Offline,
}

/// How many volumes are in flight.
const FLIGHTS: [usize; 2] = [1, 8];

/// Returns the chapters of every run.
pub fn matrix() -> Vec<Chapter> {
    let cells = Plugin::ALL.into_iter().flat_map(|plugin| FLIGHTS.map(|flight| (flight, plugin)));
    let mut chapters = vec![Chapter::EveryEdge];
    chapters.extend(cells.map(|(flight, plugin)| Chapter::AnyEdge(flight, plugin, 12)));
    chapters.extend([Plugin::Late, Plugin::Serial].map(|plugin| Chapter::AnyEdge(8, plugin, 6)));
    chapters.extend(FLIGHTS.map(|volumes| Chapter::Clients(Setting::Usual, volumes, 30)));
    chapters.extend(Plugin::ALL.map(Chapter::Born));
    chapters.push(Chapter::Bound);
    for setting in [Setting::TwoControllers, Setting::Offline] {
        chapters.extend(FLIGHTS.map(|volumes| Chapter::Clients(setting, volumes, 15)));
    }
    chapters
}

pub fn another(dice: &mut Dice) -> Chapter {
    let flight = dice.of(&FLIGHTS);
    match dice.once_in(2) {
        true => {
            let setting =
                dice.of(&[Setting::Usual, Setting::Usual, Setting::TwoControllers, Setting::Offline]);
            Chapter::Clients(setting, flight, 40)
        }
        false => Chapter::AnyEdge(flight, dice.of(&Plugin::ALL), 24),
    }
}

pub async fn live(w: &mut World, chapter: Chapter, dice: Dice, report: Arc<Report>) {
    let volumes = match chapter {
        // And one that somebody has all the time.
        Chapter::EveryEdge | Chapter::Born(_) | Chapter::Bound => 3,
        Chapter::AnyEdge(flight, ..) => flight + 1,
        Chapter::Clients(_, volumes, _) => volumes,
    };
    let setting = if let Chapter::Clients(setting, ..) = chapter { setting } else { Setting::Usual };
    let mut pool = Pool::new(w, setting, volumes, dice, report).await;
    match chapter {
        Chapter::EveryEdge => pool.every_edge().await,
        Chapter::Born(plugin) => pool.born(plugin).await,
        Chapter::Bound => pool.bound().await,
        Chapter::AnyEdge(_, plugin, rounds) => pool.any_edge(plugin, rounds).await,
        Chapter::Clients(.., epochs) => pool.clients(epochs).await,
    }
    pool.close().await;
}

struct Pool<'w> {
    site: Site<'w>,
    setting: Setting,
    volumes: Vec<Volume>,
    items: Vec<Item>,
    witness: Witness,
    dice: Dice,
    report: Arc<Report>,
    /// In the life of this world.
    rebooted: bool,
}

struct Volume {
    name: String,
    /// Whether CreateVolume made the volume. Otherwise an operator did.
    is_created: bool,
    /// The plugin's ID.
    external_id: String,
    access_mode: AccessMode,
    /// The most bytes that were answered.
    bytes: u64,
    /// The snapshots that were answered.
    snapshots: BTreeSet<String>,
}

impl Volume {
    fn birth(&self) -> Ask {
        if self.is_created { Ask::Create } else { Ask::Register }
    }
}

/// Returns the plugin's ID of a volume that is created. Servers of a cluster name it.
fn created_id(name: &str) -> String {
    let (namespace, volume) = (NAMESPACE.to_owned(), name.to_owned());
    match clustered::is_used() {
        true => id_of("id", &name_at_plugin(clustered::CLUSTER, &VolumeName { namespace, volume })),
        false => id_of("id", name),
    }
}

/// The first item of a volume, its registration.
fn first_of(volume: usize) -> usize {
    volume * THINGS.len()
}

/// The items of a volume.
fn items_of(volume: usize) -> Range<usize> {
    first_of(volume)..first_of(volume + 1)
}

/// A call: its item, its request and its manner.
type Call = (usize, Ask, Manner);

impl<'w> Pool<'w> {
    /// Makes a world with a number of volumes, of each access mode in turn.
    async fn new(
        w: &'w mut World,
        setting: Setting,
        volumes: usize,
        dice: Dice,
        report: Arc<Report>,
    ) -> Self {
        // Each round asks for the verdict, so the witness is this world's own.
        let plugin = w.add_unwitnessed("p", "").await;
        plugin.set(|script| {
            script.control(&CONTROLLER);
            script.plugin.push(if setting == Setting::Offline { "OFFLINE" } else { "ONLINE" }.to_owned());
            script.capabilities.push("EXPAND_VOLUME".to_owned());
        });
        plugin.kill();
        plugin.start().await;
        let [listen, log] = ["witness.sock", WITNESS_LOG].map(|name| plugin.directory.join(name));
        let mut sockets = vec![Sockets { listen: listen.clone(), plugin: plugin.socket() }];
        if setting == Setting::TwoControllers {
            let second = w.add_instance("p", SECOND).await;
            second.set(|script| script.serves = vec![Half::Controller]);
            second.kill();
            second.start().await;
            let listen = second.directory.join("witness.sock");
            sockets.push(Sockets { listen, plugin: second.socket() });
        }
        let listens: Vec<_> = sockets.iter().map(|sockets| sockets.listen.clone()).collect();
        let witness = Witness::start(Setup { sockets, log, ..Setup::default() }).expect("a witness");
        w.configure_plugin("p", &listen, "rpc-deadline = \"1s\"");
        if setting == Setting::TwoControllers {
            // A file has but one instance, so both are registered by call.
            std::fs::remove_file(w.path("etc/plugins.d/p.toml")).expect("the plugin's file");
            w.configure("[deadlines]\nrpc = \"1s\"\n");
        }
        let site = Site::start(w).await;
        if setting == Setting::TwoControllers {
            register_instances(&site.client, &listens).await;
        }
        healthy(&site.client, "p").await;
        let volume = |number: usize| {
            let (name, is_created) = (format!("v{number}"), number % 2 == 1);
            Volume {
                external_id: if is_created { created_id(&name) } else { name.clone() },
                name,
                is_created,
                access_mode: MODES[number % MODES.len()],
                bytes: BYTES,
                snapshots: BTreeSet::new(),
            }
        };
        let items = (0..volumes).flat_map(|volume| THINGS.map(|thing| Item::new(volume, thing)));
        let (volumes, items) = ((0..volumes).map(volume).collect(), items.collect());
        Pool { site, setting, volumes, items, witness, dice, report, rebooted: false }
    }

    fn caller(&self) -> Caller<'_> {
        Caller { client: &self.site.client, volumes: &self.volumes, items: &self.items }
    }

    /// This was asked of an item and answered, and nothing else meanwhile.
    fn note(&mut self, item: usize, ask: Ask, answer: &Answer) {
        let (reply, got) = answer;
        let states = &self.items[item].allowed;
        self.items[item].allowed = states.iter().flat_map(|state| after(*state, ask, reply)).collect();
        self.items[item].asked = Some(ask);
        self.got(item, ask, got);
    }

    /// Notes an answer. Its object is there from then on.
    fn got(&mut self, item: usize, ask: Ask, got: &Got) {
        let item = &mut self.items[item];
        if ask == item.away() || ask == Ask::Unmount {
            item.holds.clear();
        }
        let volume = &mut self.volumes[item.volume];
        match got {
            Got::Nothing => {}
            Got::Bytes(bytes) => volume.bytes = volume.bytes.max(*bytes),
            Got::Snapshot(id) => drop(volume.snapshots.insert(id.clone())),
        }
    }

    /// Makes a call that an honest plugin carries out. A call that a busy machine delayed beyond its deadline is repeated. So is one that servers
    /// refuse while they still detach the volume, and one before csid has joined them.
    async fn must(&mut self, item: usize, ask: Ask) {
        let end = Instant::now() + PATIENCE;
        let after_detach = [Ask::Delete, Ask::Detach, Ask::Attach, Ask::Claim, Ask::Mount].contains(&ask);
        let mut held_up = 0;
        loop {
            let answer = self.caller().call((item, ask, Manner::default())).await;
            self.note(item, ask, &answer);
            let is_early = match &answer.0 {
                Told::Done => return,
                Told::Refused(Kind::Busy | Kind::ClaimConflict, _) => after_detach,
                Told::Refused(kind, _) => *kind == Kind::Unavailable,
                Told::CutOff => false,
            };
            match answer.0 {
                _ if is_early && clustered::is_used() && Instant::now() < end => {
                    tokio::time::sleep(POLL).await;
                }
                reply if reply.is_held_up() && held_up < 2 => held_up += 1,
                reply => panic!("{ask:?} of {}: {reply:?}", self.say(item)),
            }
        }
    }

    fn say(&self, item: usize) -> String {
        let item = &self.items[item];
        format!("{} {:?}", self.volumes[item.volume].name, item.thing)
    }

    /// Let csid come to rest, ask away what is open, and hold what is there against what may be. If it was killed, where; then
    /// it was started again, the plugin mostly honest.
    async fn settle(&mut self, cell: &str) -> Option<String> {
        let rests = self.rests().await;
        let edge = self.site.fault.disarm();
        let killed = (!rests || self.site.client.list_operations().await.is_err()).then_some(edge);
        if let Some(edge) = &killed {
            eventually("csid has ended", async || self.site.w.dead()).await;
            let number = self.report.kill(edge, cell);
            println!("kill {number} at {edge}: {cell}");
            if !self.dice.once_in(4) {
                self.site.w.honest();
            }
            if self.dice.once_in(REBOOTS) {
                self.reboot().await;
            }
            let there = self.made_volumes();
            assert!(self.site.w.launch(&[]).await, "csid ended without a fault");
            self.site.client = self.site.w.client().await;
            self.check_known(&there).await;
            assert!(self.rests().await, "csid ended without a fault");
        }
        self.site.w.honest();
        self.site.w.revive().await;
        let claims = self.site.client.list_claims(ClaimFilter::default()).await.expect("the claims");
        for number in 0..self.items.len() {
            let item = &self.items[number];
            let claimed = claims.iter().any(|row| row.volume == self.volumes[item.volume].name);
            // No row shows which it is.
            if !matches!(item.thing, Thing::Use { .. }) && item.allowed.len() > 1 && !claimed {
                let birth = self.volumes[item.volume].birth();
                let again = birth == Ask::Create && item.asked == Some(birth) && self.dice.once_in(2);
                self.must(number, if again { birth } else { item.away() }).await;
            }
        }
        self.check().await;
        killed
    }

    /// The host boots again, csid is not started yet. What is mounted is to be mounted again by csid itself.
    async fn reboot(&mut self) {
        self.report.count("reboots with registered volumes".to_owned());
        self.site.w.reboot().await;
        self.site.w.another_boot_id();
        self.witness.mark(Mark::Reboot).expect("the witness' log");
        self.items.iter_mut().for_each(|item| item.holds.clear());
        self.rebooted = true;
    }

    /// Wait until nothing is under way; what is parked is asked for again. False: csid was killed before.
    async fn rests(&mut self) -> bool {
        let end = Instant::now() + PATIENCE;
        loop {
            self.site.w.revive().await;
            if self.site.w.dead() {
                return false;
            }
            let client = &self.site.client;
            let claims = client.list_claims(ClaimFilter::default()).await;
            let mounts = client.list_mounts(MountFilter::default()).await;
            let busy = match (client.list_operations().await, claims, mounts) {
                (Ok(operations), Ok(claims), Ok(mounts)) => {
                    for parked in claims.iter().filter(|row| row.state == "parked") {
                        let _ = client
                            .release(NAMESPACE, &parked.volume, &parked.consumer, Default::default())
                            .await;
                    }
                    let operations = operations.iter().map(|row| format!("{row:?}"));
                    // In these worlds the unit or connection of a claim has ended.
                    let is_busy =
                        |row: &&ClaimRow| row.state != "taken" || row.releasing || !row.bind.is_empty();
                    let claims = claims.iter().filter(is_busy);
                    let claims = claims.map(|row| format!("{row:?}"));
                    let mounts = mounts.iter().filter(|row| row.state != "mounted");
                    operations.chain(claims).chain(mounts.map(|row| format!("{row:?}"))).collect()
                }
                cut_off => vec![format!("{cut_off:?}")],
            };
            if busy.is_empty() {
                return true;
            }
            assert!(Instant::now() < end, "csid does not come to rest: {busy:#?}");
            tokio::time::sleep(POLL).await;
        }
    }

    /// Ask everything away from these volumes, which then are no more.
    async fn away(&mut self, volumes: &[usize]) {
        for volume in volumes {
            for item in items_of(*volume).rev() {
                if self.items[item].state() != State::Absent {
                    self.must(item, self.items[item].away()).await;
                }
            }
            let volume = &mut self.volumes[*volume];
            volume.bytes = BYTES;
            volume.snapshots.clear();
        }
    }

    /// The operator's part.
    fn provision(&mut self, volume: usize) {
        if !self.volumes[volume].is_created {
            self.site.w.plugin("p").provision(&self.volumes[volume].name);
        }
    }

    async fn register(&mut self, volume: usize) {
        self.provision(volume);
        self.must(first_of(volume), self.volumes[volume].birth()).await;
    }

    /// Everything is asked away, and nothing is left.
    async fn close(mut self) {
        self.site.w.honest();
        let all: Vec<_> = (0..self.volumes.len()).collect();
        self.away(&all).await;
        assert_eq!(self.settle("closing").await, None, "csid ended by itself");
        self.witness.mark(Mark::Rest).expect("the witness' log");
        self.check().await;
        self.report.looked(&self.witness.verdict().expect("the witness' log").checked);
        self.site.w.nothing_left(&self.site.client).await;
        self.site.w.stop().await;
    }
}

/// Registers both instances of the plugin.
async fn register_instances(client: &Client, sockets: &[PathBuf]) {
    for (instance, socket) in ["first", SECOND].iter().zip(sockets) {
        let spec = PluginSpec {
            supervision: Some(Supervision::External),
            socket: Some(socket.to_string_lossy().into_owned()),
            instance: Some((*instance).to_owned()),
            ..PluginSpec::default()
        };
        client.register_plugin("p", spec).await.expect("an instance");
    }
}

/// A caller, with the data that does not change meanwhile.
#[derive(Clone, Copy)]
struct Caller<'a> {
    client: &'a Client,
    volumes: &'a [Volume],
    items: &'a [Item],
}

impl Caller<'_> {
    async fn call(self, (item, ask, manner): Call) -> Answer {
        let Item { volume, thing, .. } = self.items[item];
        item::ask(self.client, &self.volumes[volume], thing, ask, manner).await
    }
}
