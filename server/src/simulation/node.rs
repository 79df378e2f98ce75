//! A host of the simulation. It does what csid does in a cluster: it writes its journal before it acts, asks again by the same name within a boot, sends
//! Detached until it is accepted, and compares the servers' claims with its journal. Its journal outlives csid, its mounts outlive csid and end with the
//! boot.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use csi_proto::cluster::TRAILER;
use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::cluster_client::ClusterClient;
use csi_proto::cluster::v1::cluster_server::Cluster as Calls;
use csi_proto::cluster::v1::controller_call::Method;
use csi_proto::cluster::v1::{
    Answer, Attaches, CallClass, CallEnded, CallFailure, ClaimAsk, ClaimChanged, ControllerCall, Failure,
    FromNode, Granted, Hello, ListAsk, Owed, PluginReport, Plugins, ToNode, Use, Welcome, from_node, to_node,
};
use csi_proto::identity::{Identity, Role};
use csid::volume::rules::name_call;
use futures_util::future::{BoxFuture, FutureExt, join_all};
use prost::Message;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::breaks::Break;
use super::dice::Dice;
use super::faults::Fault;
use super::history::RefusedClaim;
use super::modes::{access_mode, is_single};
use super::network::{Network, Place};
use super::orders::{CallOrders, NoTurn};
use super::server::{CLUSTER, Running, identity};
use super::world::{Ending, World};

/// How long csid waits for an answer, and for a Welcome.
const CALL: Duration = Duration::from_secs(10);
const WELCOME: Duration = Duration::from_secs(15);
/// The time between two looks at what a session depends on.
const TICK: Duration = Duration::from_millis(250);
/// The first comparison of claims in a session, and the next ones.
const FIRST: Duration = Duration::from_secs(3);
const EVERY: Duration = Duration::from_secs(60);

/// The time between two claims of a crowd.
const GATHER: Duration = Duration::from_secs(2);
/// What the names of those of a crowd end with that wait in the queue.
const WAITING: [char; 2] = ['1', '3'];
/// How long they wait there, in milliseconds.
const QUEUE: u64 = 20_000;

/// The servers, by their places. `None`: it does not run.
pub type Servers = Arc<Mutex<Vec<Option<Arc<Running>>>>>;

/// A claim in the journal.
#[derive(Clone, Debug)]
struct Row {
    call: String,
    /// Empty: the server has not answered.
    claim: String,
    state: State,
    /// Whether a server wants it back.
    is_wanted_back: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A server was asked. After a boot it is asked again.
    Asking,
    /// It was granted. Nothing is mounted yet.
    Held,
    /// It is mounted in this boot.
    Mounted(u64),
    /// It has ended, and no server knows.
    Owed,
}

#[derive(Default)]
struct Journal {
    rows: BTreeMap<(String, String), Row>,
    calls: u64,
    seen: u64,
}

/// What csid has in memory.
#[derive(Default)]
struct Memory {
    /// The server of the session.
    server: Option<(usize, Arc<Running>)>,
    tasks: Vec<AbortHandle>,
    orders: Arc<CallOrders>,
}

/// A host.
pub struct Host {
    pub place: usize,
    pub name: String,
    is_controller: bool,
    /// Its volumes, each with the consumers that use it.
    uses: Vec<(String, String)>,
    network: Arc<Network>,
    servers: Servers,
    world: World,
    dice: Dice,
    is_broken: Option<Break>,
    /// The beginning of the scene.
    begun: Instant,
    boot: Mutex<u64>,
    journal: Mutex<Journal>,
    memory: Mutex<Memory>,
    /// Whether consumers begin nothing more.
    pub stops: AtomicBool,
    /// Those who keep csid from running.
    held_off: AtomicUsize,
}

/// Keeps csid of a host from running.
pub struct HeldOff(Arc<Host>);

impl HeldOff {
    /// Starts csid again, if nothing else keeps it from running.
    pub fn start_again(self) {
        if self.0.held_off.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.0.start();
        }
    }
}

/// Why a call has no answer.
enum Failed {
    /// A server may have done it.
    Unknown,
    Refused(Failure),
}

fn failed(status: &Status) -> Failed {
    let trailer = status.metadata().get_bin(TRAILER).and_then(|value| value.to_bytes().ok());
    match trailer.and_then(|bytes| Failure::decode(bytes).ok()) {
        Some(failure) if !["Unavailable", "TimedOut"].contains(&failure.kind.as_str()) => {
            Failed::Refused(failure)
        }
        _ => Failed::Unknown,
    }
}

/// Judges a server's answer to a call for a claim. `since`: etcd's revision when the call began. `messages`: those of the call that were not
/// refused, with this one.
fn judge(
    world: &World,
    identity: &Identity,
    ask: &ClaimAsk,
    since: i64,
    messages: &AtomicUsize,
    answer: &Result<Response<Granted>, Status>,
) {
    let ClaimAsk { volume, consumer, call, .. } = ask;
    match answer.as_ref().map_err(failed) {
        // The grant may not reach the caller, who asks again.
        Ok(granted) => world.answered(volume, &granted.get_ref().claim),
        Err(Failed::Refused(failure)) => {
            // What waits still may be granted while the answer is on its way.
            let is_only = messages.fetch_sub(1, Ordering::Relaxed) == 1 && !failure.queued;
            let (node, call) = (identity.name.as_str(), format!("{identity}/{call}"));
            world.refused(&RefusedClaim { volume, node, consumer, call, since, is_only }, &failure);
        }
        Err(Failed::Unknown) => {}
    }
}

/// What a host is made of.
pub struct Parts {
    pub network: Arc<Network>,
    pub servers: Servers,
    pub world: World,
    pub is_broken: Option<Break>,
}

impl Host {
    pub fn new(place: usize, name: &str, uses: Vec<(String, String)>, parts: Parts) -> Arc<Host> {
        let Parts { network, servers, world, is_broken } = parts;
        let dice = network.dice.clone();
        Arc::new(Host {
            place,
            name: name.to_owned(),
            is_controller: name.starts_with('c'),
            uses,
            network,
            servers,
            world,
            dice,
            is_broken,
            begun: Instant::now(),
            boot: Mutex::new(1),
            journal: Mutex::default(),
            memory: Mutex::default(),
            stops: AtomicBool::new(false),
            held_off: AtomicUsize::new(0),
        })
    }

    fn journal(&self) -> MutexGuard<'_, Journal> {
        self.journal.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn boot(&self) -> u64 {
        *self.boot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn boot_name(&self) -> String {
        format!("boot {} of {}", self.boot(), self.name)
    }

    /// Returns what the names of this boot's calls begin with.
    pub fn calls(&self) -> String {
        format!("{}-{}", self.name, self.boot())
    }

    fn identity(&self) -> Identity {
        identity(Role::Node, &self.name)
    }

    fn row(&self, of: &(String, String)) -> Option<Row> {
        self.journal().rows.get(of).cloned()
    }

    fn hold(&self, of: &(String, String)) -> (String, String, String) {
        (of.0.clone(), self.name.clone(), of.1.clone())
    }

    /// Returns whether the host has no claims and owes none.
    pub fn is_empty(&self) -> bool {
        self.journal().rows.is_empty()
    }

    /// Returns the journal, for people.
    pub fn shown(&self) -> String {
        format!("{:?}", self.journal().rows)
    }

    /// Starts csid.
    pub fn start(self: &Arc<Self>) {
        let boot = self.boot();
        for row in self.journal().rows.values_mut() {
            row.state = match row.state {
                // A server may have granted it, and nobody waits any more.
                State::Asking | State::Held | State::Owed => State::Owed,
                State::Mounted(of) if of == boot => State::Mounted(of),
                // It is mounted again when a server has granted it again.
                State::Mounted(_) => State::Asking,
            };
        }
        let host = self.clone();
        let task = tokio::spawn(async move {
            let uses = host.uses.clone();
            let using = join_all(uses.iter().map(|of| host.use_volume(of)));
            tokio::join!(host.sessions(), using, host.owes());
        });
        self.memory().tasks.push(task.abort_handle());
    }

    /// Kills csid. Mounts and the journal stay.
    pub fn kill(&self) {
        let memory = std::mem::take(&mut *self.memory());
        for task in memory.tasks {
            task.abort();
        }
        // A consumer that was granted the volume, and has not mounted it, never will.
        for (of, row) in &self.journal().rows {
            if row.state == State::Held {
                self.world.give_back(&self.hold(of));
            }
        }
    }

    /// Switches the host off. Nothing is mounted any more.
    pub fn reboot(&self) {
        self.kill();
        *self.boot.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        self.world.reboot(&self.name);
    }

    /// Keeps csid from running until the answer starts it again.
    pub fn hold_off(self: &Arc<Self>) -> HeldOff {
        self.held_off.fetch_add(1, Ordering::Relaxed);
        HeldOff(self.clone())
    }

    /// Keeps a session with a server.
    async fn sessions(&self) {
        let servers = self.servers.lock().unwrap_or_else(PoisonError::into_inner).len();
        let first = self.dice.roll(servers as u64) as usize;
        loop {
            for n in 0..servers {
                let at = (first + n) % servers;
                let server = self.servers.lock().unwrap_or_else(PoisonError::into_inner)[at].clone();
                let Some(server) = server else { continue };
                if !self.network.is_open(Place::Node(self.place), Place::Server(at)) {
                    sleep(self.dice.time(100, 3000)).await;
                    continue;
                }
                if let Ok(Some(session)) = timeout(WELCOME, self.join(&server)).await {
                    self.memory().server = Some((at, server.clone()));
                    self.serve(session, at, &server).await;
                    self.memory().server = None;
                    self.world.note(|| format!("{} has no session any more", self.name));
                }
                sleep(Duration::from_millis(200)).await;
            }
            sleep(self.dice.time(200, 2000)).await;
        }
    }

    async fn join(&self, server: &Running) -> Option<Session> {
        let (to_server, receiver) = mpsc::channel(8);
        let hello = Hello {
            cluster: CLUSTER.into(),
            journal_id: format!("journal of {}", self.name),
            machine_id: format!("machine of {}", self.name),
            boot: self.boot_name(),
            version: "0.1.0".into(),
            protocol_min: 1,
            protocol_max: 1,
            generation: 1,
            seen_revision: self.journal().seen,
            clean: 0,
        };
        sleep(self.network.delay()).await;
        to_server.try_send(FromNode { is: Some(from_node::Is::Hello(hello)) }).ok()?;
        let mut request = Request::new(ReceiverStream::new(receiver));
        request.extensions_mut().insert(self.identity());
        let mut client = ClusterClient::new(server.calls.clone());
        let mut from_server = client.session(request).await.ok()?.into_inner();
        let first = from_server.message().await;
        let Ok(Some(ToNode { is: Some(to_node::Is::Welcome(welcome)) })) = first else {
            self.world.note(|| format!("{} is not welcome: {first:?}", self.name));
            return None;
        };
        let Welcome { generation, revision, .. } = welcome;
        self.memory().orders.begin(generation, revision);
        let reports = ["p", "q"].map(|plugin| PluginReport {
            plugin: plugin.into(),
            attaches: match (plugin, self.is_controller) {
                ("p", true) => Attaches::Yes.into(),
                _ => Attaches::No.into(),
            },
            node_id: format!("id of {}", self.name),
            controller: plugin == "p" && self.is_controller,
            max_volumes: None,
            calls: 0,
        });
        let plugins = Plugins { plugins: reports.into() };
        to_server.try_send(FromNode { is: Some(from_node::Is::Plugins(plugins)) }).ok()?;
        self.world.note(|| format!("{} has joined at revision {revision}", self.name));
        Some(Session { to_server, from_server })
    }

    /// Serves a session until it ends.
    async fn serve(&self, mut session: Session, at: usize, server: &Running) {
        let (own, far) = (Place::Node(self.place), Place::Server(at));
        let patience = self.dice.time(1000, 20_000);
        let mut open = Instant::now();
        let mut compare = Instant::now() + FIRST.mul_f64(0.5 + self.dice.roll(100) as f64 / 100.0);
        loop {
            if server.is_dead() {
                return;
            }
            if self.network.is_open(own, far) {
                open = Instant::now();
            } else if open.elapsed() >= patience {
                if self.dice.once_in(2) {
                    // The server has not noticed it yet.
                    self.network.seen.count(Fault::SessionLingers);
                    let rest = self.dice.time(0, 20_000);
                    tokio::spawn(async move {
                        sleep(rest).await;
                        drop(session);
                    });
                }
                return;
            }
            if Instant::now() >= compare {
                compare = Instant::now() + EVERY.mul_f64(0.5 + self.dice.roll(100) as f64 / 100.0);
                self.end_unheld().await;
            }
            let Ok(message) = timeout(TICK, session.from_server.message()).await else { continue };
            let Ok(Some(ToNode { is: Some(message) })) = message else { return };
            sleep(self.network.delay()).await;
            while !self.network.passes(far, own) {
                if open.elapsed() >= patience || server.is_dead() {
                    return;
                }
                sleep(TICK).await;
            }
            match message {
                to_node::Is::Changed(changed) => self.release(&changed),
                to_node::Is::Call(call) => self.take_call(call, &session, at),
                _ => return,
            }
        }
    }

    /// Gives a claim back that a server wants back.
    fn release(&self, changed: &ClaimChanged) {
        let of = (changed.volume.clone(), changed.consumer.clone());
        let mut journal = self.journal();
        match journal.rows.get_mut(&of) {
            Some(row) if row.claim.is_empty() || row.claim == changed.claim => row.is_wanted_back = true,
            // The host has nothing of it.
            Some(_) | None => drop(journal.rows.entry(of).or_insert(Row {
                call: String::new(),
                claim: changed.claim.clone(),
                state: State::Owed,
                is_wanted_back: false,
            })),
        }
    }

    /// Makes a controller call in a task, which goes on without the session.
    fn take_call(&self, call: ControllerCall, session: &Session, at: usize) {
        let twice = self.network.fails().then(|| self.dice.time(0, 15_000));
        if twice.is_some() {
            self.network.seen.count(Fault::ControllerCallTwice);
        }
        let mut memory = self.memory();
        for later in [Some(Duration::ZERO), twice].into_iter().flatten() {
            let making = Making {
                name: self.name.clone(),
                place: self.place,
                orders: memory.orders.clone(),
                world: self.world.clone(),
                network: self.network.clone(),
                has_no_order: self.is_broken == Some(Break::StaleCalls),
            };
            // A stream delivers a message once. So a second one is of a session that is over, and its answer reaches nobody.
            let to_server = match later.is_zero() {
                true => session.to_server.clone(),
                false => mpsc::channel(1).0,
            };
            let call = call.clone();
            let task = tokio::spawn(async move {
                sleep(later).await;
                making.make(call, to_server, at).await;
            });
            memory.tasks.retain(|task| !task.is_finished());
            memory.tasks.push(task.abort_handle());
        }
    }

    /// Calls the session's server.
    async fn ask<T: Send + 'static>(
        &self,
        call: impl Fn(Arc<Running>) -> BoxFuture<'static, Result<Response<T>, Status>> + Send + 'static,
    ) -> Result<T, Failed> {
        let Some((at, server)) = self.memory().server.clone() else { return Err(Failed::Unknown) };
        let (network, dice) = (&self.network, &self.dice);
        let (own, far) = (Place::Node(self.place), Place::Server(at));
        let fate = if network.fails() { Some(dice.roll(4)) } else { None };
        if let Some(fate) = fate {
            let faults = [Fault::CallLost, Fault::CallLate, Fault::CallTwice, Fault::AnswerLost];
            network.seen.count(faults[fate as usize]);
        }
        let asked = async {
            sleep(network.delay()).await;
            if !network.passes(own, far) || fate == Some(0) {
                std::future::pending::<()>().await;
            }
            if fate == Some(1) {
                sleep(dice.time(0, 9_500)).await;
            }
            if fate == Some(2) {
                // The same message comes once more.
                let (later, again) = (dice.time(0, 15_000), call(server.clone()));
                server.spawn(async move {
                    sleep(later).await;
                    drop(again.await);
                });
            }
            // A server drops the call of a connection that is gone, or goes on with it.
            let answer = match dice.once_in(2) {
                true => call(server.clone()).await,
                false => {
                    let lost = |_| Err(Status::unavailable("the server was killed"));
                    server.spawn(call(server.clone())).await.unwrap_or_else(lost)
                }
            };
            sleep(network.delay()).await;
            if !network.passes(far, own) || fate == Some(3) || server.is_dead() {
                std::future::pending::<()>().await;
            }
            answer
        };
        match timeout(CALL, asked).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => {
                self.world.note(|| format!("{} is refused: {}", self.name, status.message()));
                Err(failed(&status))
            }
            Err(_) => Err(Failed::Unknown),
        }
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.extensions_mut().insert(self.identity());
        request
    }

    /// Uses a volume, again and again.
    async fn use_volume(&self, of: &(String, String)) {
        loop {
            match self.row(of) {
                None => {
                    if self.stops.load(Ordering::Relaxed) {
                        sleep(Duration::from_secs(1)).await;
                        continue;
                    }
                    match of.1.starts_with("crowd") {
                        true => self.gather().await,
                        false => sleep(self.dice.time(0, 3000)).await,
                    }
                    let call = self.name_call();
                    let row = Row { call, claim: String::new(), state: State::Asking, is_wanted_back: false };
                    // An end that a server asked for may be owed by now.
                    self.journal().rows.entry(of.clone()).or_insert(row);
                }
                Some(row) if row.state == State::Asking => self.claim(of, row).await,
                Some(Row { state: State::Mounted(_), .. }) => self.hold_volume(of).await,
                Some(_) => sleep(Duration::from_millis(100)).await,
            }
        }
    }

    /// Waits until all of a crowd begin to claim.
    pub async fn gather(&self) {
        let past = self.begun.elapsed().as_millis() as u64 % GATHER.as_millis() as u64;
        sleep(GATHER - Duration::from_millis(past)).await;
    }

    fn set(&self, of: &(String, String), state: State) {
        if let Some(row) = self.journal().rows.get_mut(of) {
            row.state = state;
        }
    }

    /// Names a call. It is later than those before it.
    fn name_call(&self) -> String {
        let mut journal = self.journal();
        journal.calls += 1;
        name_call(&self.calls(), journal.calls, "r")
    }

    fn is_of_boot(&self, call: &str) -> bool {
        call.strip_prefix(&self.calls()).is_some_and(|rest| rest.starts_with('.'))
    }

    /// Asks for a claim, until it is granted, refused, or too late.
    async fn claim(&self, of: &(String, String), mut row: Row) {
        if !self.is_of_boot(&row.call) {
            if row.claim.is_empty() {
                // Nobody has the claim. csid ends what was not granted in an earlier boot.
                return self.set(of, State::Owed);
            }
            row.call = self.name_call();
            self.journal().rows.entry(of.clone()).and_modify(|held| held.call.clone_from(&row.call));
        }
        let deadline = Instant::now() + self.dice.time(2_000, 40_000);
        let (volume, consumer) = of.clone();
        // Of a crowd some wait in the queue.
        let waits = is_single(&volume) && consumer.ends_with(WAITING);
        let ask = ClaimAsk {
            call: row.call.clone(),
            volume: volume.clone(),
            consumer,
            uid: 1000,
            r#use: Some(Use {
                mode: "write".into(),
                access_mode: access_mode(&volume).into(),
                attachment_mode: "file-system".into(),
            }),
            boot: self.boot_name(),
            queue_ms: if waits { self.dice.time(500, QUEUE).as_millis() as u64 } else { 0 },
            ..ClaimAsk::default()
        };
        // What was granted in an earlier boot is there, whatever is answered now.
        let mut may_be_there = !row.claim.is_empty() || waits;
        // Messages of the call that servers have not refused.
        let messages = Arc::new(AtomicUsize::new(0));
        let granted = loop {
            if Instant::now() >= deadline {
                return self.set(of, State::Owed);
            }
            let (asked, identity) = (ask.clone(), self.identity());
            let (world, messages, since) = (self.world.clone(), messages.clone(), self.world.revision());
            let claimed = self.ask(move |server| {
                let (asked, identity) = (asked.clone(), identity.clone());
                let (world, messages) = (world.clone(), messages.clone());
                async move {
                    messages.fetch_add(1, Ordering::Relaxed);
                    let mut request = Request::new(asked.clone());
                    request.extensions_mut().insert(identity.clone());
                    let answer = server.service.claim(request).await;
                    judge(&world, &identity, &asked, since, &messages, &answer);
                    answer
                }
                .boxed()
            });
            match claimed.await {
                Ok(granted) => break granted,
                Err(Failed::Unknown) => may_be_there = true,
                Err(Failed::Refused(failure)) => {
                    let is_given_up = match failure.kind.as_str() {
                        _ if failure.queued => false,
                        "ClaimConflict" | "PluginError" => self.dice.once_in(3),
                        _ => false,
                    };
                    if is_given_up && may_be_there {
                        return self.set(of, State::Owed);
                    }
                    if is_given_up {
                        return drop(self.journal().rows.remove(of));
                    }
                }
            }
            sleep(self.dice.time(50, 1000)).await;
        };
        self.mount(of, &granted).await;
    }

    async fn mount(&self, of: &(String, String), granted: &Granted) {
        let hold = self.hold(of);
        let Granted { claim, publish_context, revision, .. } = granted;
        {
            let mut journal = self.journal();
            journal.seen = journal.seen.max(*revision);
            let Some(row) = journal.rows.get_mut(of) else { return };
            (row.state, row.claim) = (State::Held, claim.clone());
        }
        self.world.note(|| format!("{hold:?} is granted {claim}"));
        self.world.granted(&hold, claim);
        sleep(self.dice.time(0, 50)).await;
        let boot = self.boot();
        self.set(of, State::Mounted(boot));
        self.world.mount(&hold, publish_context.get("device").map_or("", String::as_str));
    }

    /// Keeps a mounted volume for a while, then gives it back.
    async fn hold_volume(&self, of: &(String, String)) {
        let hold = self.hold(of);
        let end = Instant::now() + self.dice.time(0, 6000);
        let is_wanted = || {
            let is_wanted_back = self.row(of).is_some_and(|row| row.is_wanted_back);
            !is_wanted_back && !self.stops.load(Ordering::Relaxed)
        };
        while Instant::now() < end && is_wanted() {
            sleep(self.dice.time(50, 500)).await;
        }
        if self.is_broken == Some(Break::EarlyDetached) {
            self.set(of, State::Owed);
            sleep(Duration::from_millis(500)).await;
            self.world.unmount(&hold);
            return self.world.give_back(&hold);
        }
        self.world.unmount(&hold);
        // The rows are gone and the end is owed, in one commit.
        self.world.give_back(&hold);
        self.set(of, State::Owed);
    }

    /// Sends the ends of claims until servers have accepted them.
    async fn owes(&self) {
        loop {
            sleep(self.dice.time(50, 500)).await;
            let is_owed = |(_, row): &(&(String, String), &Row)| row.state == State::Owed;
            let rows = self
                .journal()
                .rows
                .iter()
                .filter(is_owed)
                .map(|(of, row)| (of.clone(), row.clone()))
                .collect::<Vec<_>>();
            for (of, row) in rows {
                let owed = Owed {
                    claim: row.claim.clone(),
                    volume: of.0.clone(),
                    consumer: of.1.clone(),
                    boot: self.boot_name(),
                    call: row.call.clone(),
                    ..Owed::default()
                };
                let identity = self.identity();
                let sent = self.ask(move |server| {
                    let mut request = Request::new(owed.clone());
                    request.extensions_mut().insert(identity.clone());
                    async move { server.service.detached(request).await }.boxed()
                });
                if sent.await.is_ok() {
                    self.world.note(|| format!("{} owes {of:?} no more", self.name));
                    self.journal().rows.remove(&of);
                }
            }
        }
    }

    /// Ends claims of this boot's calls that servers have and the journal lacks.
    async fn end_unheld(&self) {
        let Some(found) = self.list().await else { return };
        for (of, claim, call) in found {
            if !self.is_of_boot(&call) || self.row(&of).is_some() {
                continue;
            }
            // The list may be older than the journal.
            let is_there = self.list().await.is_some_and(|list| list.iter().any(|(_, id, _)| *id == claim));
            if is_there {
                self.world.note(|| format!("{} ends {claim}, which it does not hold", self.name));
                let row = Row { call, claim, state: State::Owed, is_wanted_back: false };
                self.journal().rows.entry(of).or_insert(row);
            }
        }
    }

    /// Lists this node's taken claims: volume and consumer, name, call.
    async fn list(&self) -> Option<Vec<((String, String), String, String)>> {
        let (_, server) = self.memory().server.clone()?;
        let listing = async {
            let request = self.request(ListAsk { own: true, ..ListAsk::default() });
            let mut pages = ClusterClient::new(server.calls.clone()).claims(request).await.ok()?.into_inner();
            let mut found = Vec::new();
            while let Some(page) = pages.message().await.ok()? {
                for listed in page.claims {
                    let row = listed.claim?;
                    if row.state == "taken" {
                        found.push(((listed.volume, row.consumer), row.claim, row.call));
                    }
                }
            }
            Some(found)
        };
        timeout(CALL, listing).await.ok()?
    }
}

struct Session {
    to_server: mpsc::Sender<FromNode>,
    from_server: Streaming<ToNode>,
}

/// A controller call that a host makes.
struct Making {
    name: String,
    place: usize,
    orders: Arc<CallOrders>,
    world: World,
    network: Arc<Network>,
    has_no_order: bool,
}

impl Making {
    async fn make(self, call: ControllerCall, to_server: mpsc::Sender<FromNode>, at: usize) {
        let how = self.how(&call).await;
        self.world.note(|| format!("{} ends the call {}: {how:?}", self.name, call.epoch));
        sleep(self.network.delay()).await;
        if self.network.passes(Place::Node(self.place), Place::Server(at)) {
            let ended = CallEnded { call: call.call, epoch: call.epoch, how: Some(how) };
            // Its session may be over.
            let _ = to_server.try_send(FromNode { is: Some(from_node::Is::Ended(ended)) });
        }
    }

    async fn how(&self, call: &ControllerCall) -> How {
        let within = Duration::from_millis(call.start_within_ms.into());
        let turn = self.orders.turn(&call.plugin, &call.order, call.epoch, within).await;
        match turn {
            Err(NoTurn::Stale) if !self.has_no_order => return How::Stale(true),
            Err(NoTurn::Late) if !self.has_no_order => return How::NotStarted(true),
            _ => {}
        }
        let (node_id, is_publish) = match &call.method {
            Some(Method::Publish(publish)) => (&publish.node_id, true),
            Some(Method::Unpublish(unpublish)) => (&unpublish.node_id, false),
            // No scene creates a volume.
            _ => {
                return How::NotStarted(true);
            }
        };
        let node = node_id.trim_start_matches("id of ");
        let made = self.world.call(self.place, &call.volume, node, is_publish, call.epoch);
        let limit = Duration::from_millis(call.deadline_ms.into());
        let ending = timeout(limit, made).await.unwrap_or(Ending::Unknown);
        let class = match ending {
            Ending::Done(device) => {
                let publish_context = [("device".to_owned(), device)].into();
                return How::Answer(if is_publish {
                    Answer { publish_context, ..Answer::default() }
                } else {
                    Answer::default()
                });
            }
            Ending::Unknown => CallClass::Unknown,
            Ending::Again => CallClass::Again,
            Ending::Refused => CallClass::Refused,
            Ending::NotSent => CallClass::NotSent,
        };
        How::Failed(CallFailure {
            class: class.into(),
            kind: "PluginError".into(),
            message: "no".into(),
            ..CallFailure::default()
        })
    }
}
