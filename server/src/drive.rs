//! Controller calls, one at a time for each volume. Which server calls stands in the volume's record, its *driver*.
//!
//! ```text
//!            intent written              answered
//!   no driver ────────────▶ driver(call) ─────────▶ no driver
//!                                │ no answer, or the server is gone        the host is there, or its time is over
//!                                └──────────────▶ driver(no call, host) ──────────────────────▶ driver(next call)
//! ```
//!
//! The intent is in etcd before the call is sent, and its revision is the call's epoch. A claim may be written with it.
//! A call without an answer may run on its host for a while. So the next call goes to the same host, which makes them one after the other,
//! or to another one when the time for that is over.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use csi_proto::cluster::v1::{CallEnded, ControllerCall};
use csid::store::registry::{Claim, ClaimState, DrivenCall, DrivenRpc, Driver, Record, Registry, VolumeName};
use csid::store::rows::Leg;
use csid::volume::rules::{self, ClaimAction, ClaimEffect, ClaimEvent, ClaimOutcome};
use csid::{Error, Kind};
use csid_etcd::{EtcdError, Expected, Guard, RowKey, Rows};
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

use crate::by_call::{
    attachments, due_attachments, enter_lost, failure_name, is_forgotten, remove_forgotten,
};
use crate::cluster::{CallOutcome, Cluster, ToDrive, meta_guard, node_guard};
use crate::controllers::plugin_guard;
use crate::edges::{self, Edge};
use crate::excluded::left_attached;
use crate::failure::{Result, ServerError};
use crate::forward::{Ended, Ready, START, read};
use crate::metrics::{method_name, plugin_of};
use crate::pace::{Awaited, Calls, Memory};
use crate::presence::Here;
use crate::records::{Around, TRIES, busy};
use crate::rows::NodeState;
use crate::sessions::Sessions;
use crate::tasks::{Tasks, VolumeTask};
use crate::time::now_usec;
use crate::volume_calls::{leaves_claims, rpc_of_volume};

/// How much longer than that and than the plugin's time a server waits for the answer.
const LATER: Duration = Duration::from_secs(5);
/// How old an intent may be when its call is sent. A lease is over later.
pub const FRESH: Duration = Duration::from_secs(5);
/// The least time between two looks for volumes whose controllers have to be called.
const LOOK: Duration = Duration::from_millis(300);
/// How long a volume is left alone for which nothing can be done here, and for which another server acts.
pub const NOTHING: Duration = Duration::from_secs(5);
const OTHERS: Duration = Duration::from_secs(1);
/// The pause of a volume whose change etcd has refused because its database is full.
const FULL: Duration = Duration::from_secs(5);
/// How long a node has no session before its pending claims end.
const AWAY: Duration = Duration::from_secs(60);
/// How long a look at an absent node counts. A pending claim is looked at more often.
const FORGOTTEN: Duration = Duration::from_secs(15);
/// The limit of a pause in which a task keeps its place.
pub const SHORT: Duration = Duration::from_secs(1);

/// The volumes for which this server has controllers called.
pub struct Driving {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) sessions: Arc<Sessions>,
    pub tasks: Arc<Tasks>,
    /// Nodes with a pending claim, as this server has seen them.
    away: Mutex<HashMap<String, Away>>,
    pub(crate) calls: Calls,
    /// Has the volumes that rest looked at.
    looks: Notify,
}

/// A node with a pending claim.
struct Away {
    /// The first look without a session. `None`: it has one.
    since: Option<Instant>,
    /// The last look.
    last: Instant,
}

/// An intent that this server writes, and what was there before it.
pub(crate) struct Intended {
    pub here: Here,
    /// When this server has begun to write it.
    begun: Instant,
    /// The driver of the call before, if that was to the same host.
    pub before: Option<Driver>,
}

impl Intended {
    /// Returns an intent that this server, `here`, begins to write now.
    pub fn now(here: Here, before: Option<Driver>) -> Intended {
        Intended { here, begun: Instant::now(), before }
    }
}

/// The host of a volume's next call.
pub struct Next<'a> {
    /// `None`: there is none here, or a call without an answer may still run on another one.
    pub host: Option<&'a String>,
    /// How long a call without an answer may still run. `None`: there is none.
    pub may_run: Option<Duration>,
}

/// What a turn leaves to do.
pub enum Turn {
    /// There may be more to do at once.
    Again,
    Wait(Duration),
    /// Nothing, for so long.
    Rest(Duration),
}

impl Driving {
    pub fn new(cluster: Arc<Cluster>, sessions: Arc<Sessions>) -> Driving {
        Driving {
            tasks: Arc::new(Tasks::new(cluster.clone())),
            cluster,
            sessions,
            away: Mutex::default(),
            calls: Calls::default(),
            looks: Notify::new(),
        }
    }

    fn away(&self) -> MutexGuard<'_, HashMap<String, Away>> {
        self.away.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Acts for volumes until the task is aborted. `due` has those for which a caller waits.
    pub async fn run(self: Arc<Self>, mut due: mpsc::Receiver<ToDrive>) {
        let asked = async {
            while let Some(ToDrive { name, written }) = due.recv().await {
                self.begin(&name, None, written);
            }
        };
        tokio::join!(asked, self.look());
    }

    /// Has all volumes looked at that rest: a node has a controller that it had not.
    pub fn has_controller(&self) {
        self.tasks.end_rests();
        self.looks.notify_one();
    }

    /// Looks for volumes with something to do, again and again.
    async fn look(self: &Arc<Self>) {
        loop {
            match self.cluster.registry.restless().await {
                Ok((records, index)) => {
                    let due = records.iter().filter(|record| is_due(record));
                    let due: BTreeMap<&VolumeName, u64> =
                        due.map(|record| (&record.name, record.revision)).collect();
                    due.iter().for_each(|(name, revision)| self.begin(name, Some(*revision), None));
                    // A volume's task may wait for a call for longer than a look counts.
                    let claims = records.iter().flat_map(|record| record.claims.iter());
                    let pending = claims.filter(|claim| claim.state == ClaimState::Pending);
                    self.look_for(pending.map(|claim| claim.node.as_str()).collect()).await;
                    let latest = Instant::now() + NOTHING;
                    let next = self.tasks.forget_rested(|name| due.contains_key(name));
                    let next = next.map_or(latest, |next| next.min(latest));
                    tokio::select! {
                        biased;
                        // A beat changes the index every few seconds.
                        changed = self.cluster.registry_changed(index) => if changed.is_none() { return },
                        () = self.looks.notified() => {}
                        () = tokio::time::sleep_until(next) => {}
                    }
                }
                Err(error) => tracing::warn!(%error, "the volumes with something to do cannot be listed"),
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Starts a task for a volume, as [`Tasks::begin`] says. `written`: the record, where this server has just written it.
    fn begin(self: &Arc<Self>, name: &VolumeName, revision: Option<u64>, written: Option<Box<Record>>) {
        if let Some((task, memory)) = self.tasks.begin(name, revision) {
            tokio::spawn(self.clone().drive(task, memory, written));
        }
    }

    /// Acts for a volume until nothing is left to do here.
    pub(crate) async fn drive(
        self: Arc<Self>,
        task: VolumeTask,
        mut memory: Memory,
        mut written: Option<Box<Record>>,
    ) {
        let name = task.name().clone();
        loop {
            if self.tasks.have_stopped() {
                task.forget();
                return;
            }
            let is_written = written.is_some();
            let rest = match self.turn(&name, &mut memory, written.take()).await {
                Ok(Turn::Again) => continue,
                // Others may have changed the record since this server has written it.
                Ok(Turn::Rest(_)) if is_written => continue,
                Ok(Turn::Wait(time)) => {
                    tokio::time::sleep(time).await;
                    continue;
                }
                Ok(Turn::Rest(time)) => time,
                Err(error) => {
                    // A change that could not be read is none to begin for at once.
                    memory.seen = u64::MAX;
                    match error {
                        // The beats say that once for all volumes.
                        ServerError::Etcd(EtcdError::Full) => FULL,
                        error => {
                            tracing::warn!(volume = %name, %error, "a volume's controller cannot be called now");
                            OTHERS
                        }
                    }
                }
            };
            if task.is_over(rest, &mut memory) {
                return;
            }
        }
    }

    /// Does one thing for a volume. `written`: its record as this server has written it, perhaps an old one. Each change compares the record's
    /// revision.
    async fn turn(
        &self,
        name: &VolumeName,
        memory: &mut Memory,
        written: Option<Box<Record>>,
    ) -> Result<Turn> {
        let here = self.cluster.presence.here()?;
        let meta = self.cluster.normal().await?;
        let record = match written {
            Some(record) => *record,
            None => self.cluster.registry.record(name.clone()).await?,
        };
        memory.seen = record.revision;
        let guards = vec![meta_guard(&meta), here.guard()];
        let generation = meta.value.generation;
        if !record.queue.is_empty() {
            // It takes no controller, so any server does it.
            let mut guards = guards.clone();
            let after = self.cluster.tend_queue(&record, &mut guards).await?;
            if after != record {
                self.cluster.swap(&record, after, guards).await?;
                self.cluster.was_driven(name);
                return Ok(Turn::Again);
            }
        }
        if record.driver.as_ref().is_none_or(|driver| !driver.server.is_empty()) {
            // What a server calls now may get no answer, either. It has a time of its own.
            memory.awaited = None;
        }
        match &record.driver {
            // A task of this server has ended without an outcome.
            Some(driver) if driver.server == here.id => {
                return self.give_up(&record, guards, generation).await;
            }
            Some(driver) if !driver.server.is_empty() => {
                let key = RowKey::Server(driver.server.clone());
                if self.cluster.rows.read(&key).await?.is_some() {
                    return Ok(Turn::Rest(OTHERS));
                }
                tracing::warn!(volume = %name, server = driver.server, "a server that acted for a volume is gone");
                let gone = Guard { key, is: Expected::Absent };
                return self.give_up(&record, [guards, vec![gone]].concat(), generation).await;
            }
            _ => {}
        }
        if attachments(&record).any(is_forgotten) {
            // While a call may run, nothing but the rows of forgotten attachments shows what it may do.
            let Next { may_run, .. } = self.choose(&record, &[], memory);
            if may_run.is_none() {
                let mut after = Record { driver: None, ..record.clone() };
                remove_forgotten(&mut after);
                self.cluster.swap_granting(&record, after, guards).await?;
                self.cluster.was_driven(name);
                return Ok(Turn::Again);
            }
        }
        let mut of_volume: Option<Duration> = None;
        if let Some(rpc) = rpc_of_volume(&record) {
            match self.turn_of_volume(&record, rpc, memory, guards.clone()).await? {
                // Claims have their turn while an expansion or a snapshot waits.
                Turn::Wait(time) | Turn::Rest(time) if leaves_claims(rpc) => of_volume = Some(time),
                turn => return Ok(turn),
            }
        }
        if due_attachments(&record).next().is_some() {
            // The volume has no claims.
            return self.turn_of_attachments(&record, memory, guards, (of_volume, generation)).await;
        }
        self.turn_of_claims(&record, memory, guards, of_volume).await
    }

    /// Returns whether a node has had no session for so long that nobody waits there for its pending claims.
    pub(crate) async fn has_left(&self, node: &str) -> Result<bool> {
        let sessions = Rows::Sessions { node: node.to_owned() };
        let is_there = self.sessions.has(node) || self.cluster.rows.has_any(&sessions).await?;
        let now = Instant::now();
        let mut away = self.away();
        // The node may have been there since an earlier look.
        away.retain(|_, of| of.last.elapsed() < FORGOTTEN);
        let of = away.entry(node.to_owned()).or_insert(Away { since: None, last: now });
        of.last = now;
        of.since = (!is_there).then(|| of.since.unwrap_or(now));
        Ok(of.since.is_some_and(|since| since.elapsed() >= AWAY))
    }

    /// Looks whether these nodes have a session, unless it has just looked.
    async fn look_for(&self, nodes: BTreeSet<&str>) {
        for node in nodes {
            let is_old = self.away().get(node).is_none_or(|of| of.last.elapsed() >= NOTHING);
            if is_old && let Err(error) = self.has_left(node).await {
                tracing::warn!(node, %error, "the sessions of a node with a pending claim cannot be read");
                return;
            }
        }
    }

    /// Returns the host of the next call.
    pub(crate) fn choose<'a>(&self, record: &Record, hosts: &'a [String], memory: &mut Memory) -> Next<'a> {
        let Some(Driver { host: last, unanswered, deadline_ms, .. }) = &record.driver else {
            return Next { host: hosts.first(), may_run: None };
        };
        // The call's own time, whatever this server's configuration says now.
        let time = match deadline_ms {
            0 => START + self.cluster.config.controller_time,
            _ => START + Duration::from_millis(*deadline_ms),
        };
        let is_same = |awaited: &Awaited| awaited.host == *last && awaited.call == *unanswered;
        let since = match memory.awaited.as_ref().filter(|awaited| is_same(awaited)) {
            Some(awaited) => awaited.since,
            None => {
                let since = Instant::now();
                memory.awaited = Some(Awaited { host: last.clone(), call: unanswered.clone(), since });
                since
            }
        };
        // The host makes its calls one after the other.
        let same = hosts.iter().find(|host| *host == last);
        match time.saturating_sub(since.elapsed()) {
            Duration::ZERO => Next { host: same.or(hosts.first()), may_run: None },
            left => Next { host: same, may_run: Some(left) },
        }
    }

    /// Writes that a call has no answer. Any server may go on.
    async fn give_up(&self, record: &Record, mut guards: Vec<Guard>, generation: u64) -> Result<Turn> {
        let Some(driver) = record.driver.clone() else { return Ok(Turn::Again) };
        let mut after = record.clone();
        if let Some(call) = driver.call.as_ref().filter(|call| !call.node_id.is_empty()) {
            enter_lost(&mut after, call, &driver.host, generation);
            if let (DrivenRpc::Publish, Some(error)) = (call.rpc, Ended::lost(&driver.host).error) {
                self.cluster.note_failure(&failure_name(&record.name, &call.node_id), error);
            }
        } else if let Some(call) = &driver.call
            && let Some(effect) = effect_of(call)
        {
            let around = self.cluster.around(record, &call.node).await?;
            guards.extend(around.node.as_ref().map(|row| node_guard(&call.node, row)));
            guards.push(plugin_guard(&record.volume.plugin, around.plugin.as_ref()));
            after = ended(record, &effect, &around, &Ended::lost(&driver.host), None);
        }
        let is_anothers = driver.server != self.cluster.presence.here()?.id;
        let unanswered = driver.call.map_or(driver.unanswered, |call| call.id);
        after.driver = Some(Driver { server: String::new(), call: None, unanswered, ..driver });
        if self.cluster.swap(record, after, guards).await?.is_some() && is_anothers {
            self.cluster.metrics.took_over();
        }
        Ok(Turn::Again)
    }

    /// Enters the driver of a call, which this server is about to write. `node_id`: the plugin's name of the node, for an attachment by AttachVolume.
    pub(crate) fn enter_intent(&self, after: &mut Record, ready: &Ready, node_id: &str) -> Result<Intended> {
        let here = self.cluster.presence.here()?;
        // The host may still run the call before, which has no answer.
        let before = after.driver.take().filter(|driver| driver.host == ready.host);
        let call = DrivenCall {
            id: ready.id.clone(),
            rpc: rpc_of(ready.effect.action),
            node: ready.effect.node.clone(),
            consumer: ready.effect.consumer.clone(),
            node_id: node_id.to_owned(),
        };
        after.driver = Some(intent(before.as_ref(), &here.id, &ready.host, call, ready.message.deadline_ms));
        Ok(Intended::now(here, before))
    }

    /// Sends a call whose intent is written, and waits for its end. `sent`: the record with the intent.
    pub(crate) async fn send_intended(&self, sent: &Record, ready: &mut Ready, intended: &Intended) -> Ended {
        ready.message.epoch = sent.revision;
        let ended = match self.refuse_late(intended, &ready.host) {
            Ok(()) => self.send(ready).await,
            Err(error) => Ended::failed(ClaimOutcome::NotSent(None), error),
        };
        if let Some(error) = &ended.error {
            let (host, node) = (&ready.host, &ready.effect.node);
            tracing::warn!(volume = %sent.name, host, node, %error, "a controller call has failed");
        }
        ended
    }

    /// Refuses to send a call to `host` if this server has stood still since the call's intent, or stops. Its lease may be over, and another
    /// server may have called.
    pub(crate) fn refuse_late(&self, intended: &Intended, host: &str) -> std::result::Result<(), Error> {
        let is_here = self.cluster.presence.here().is_ok_and(|here| here == intended.here);
        match is_here && intended.begun.elapsed() < FRESH && !self.tasks.have_stopped() {
            true => Ok(()),
            false => {
                let text = format!("a controller call to node {host} was not sent in time");
                Err(Error::new(Kind::PluginUnavailable, text))
            }
        }
    }

    /// Sends a call, and waits for its end.
    async fn send(&self, ready: &Ready) -> Ended {
        match self.sent(&ready.host, &ready.message).await {
            Sent::Not(error) => Ended::failed(ClaimOutcome::NotSent(None), error),
            Sent::Ended(ended) => read(ready, *ended),
            Sent::Lost => Ended::lost(&ready.host),
        }
    }

    /// Sends a message, and waits for its end.
    pub(crate) async fn sent(&self, host: &str, message: &ControllerCall) -> Sent {
        let sending = async { self.sessions.call(host, message.clone()) };
        let Some(answer) = edges::around(Edge::Send, sending).await else {
            let text = format!("node {host} takes no controller call now");
            return Sent::Not(Error::new(Kind::PluginUnavailable, text));
        };
        let limit = START + self.cluster.config.controller_time + LATER;
        let begun = Instant::now();
        let ended = tokio::time::timeout(limit, answer).await.ok().and_then(|answer| answer.ok());
        let Cluster { metrics, config, .. } = &*self.cluster;
        let how = ended.as_ref().and_then(|ended| ended.how.as_ref());
        let plugin = plugin_of(&config.grants, &message.plugin);
        metrics.called(plugin, method_name(message.method.as_ref()), how, begun.elapsed());
        ended.map_or(Sent::Lost, |ended| Sent::Ended(Box::new(ended)))
    }

    /// Writes the outcome of a call, and returns what is written. `None`: another server has taken over. `sent`: the record with the call's intent. `unanswered`: the call that
    /// the host may still run.
    pub(crate) async fn finish(
        &self,
        sent: &Record,
        ready: &Ready,
        of: &Ended,
        unanswered: Option<String>,
    ) -> Result<Option<CallOutcome>> {
        let name = &sent.name;
        // The record is as the intent has left it, as a rule. The transaction compares that.
        let mut written = Some(sent.clone());
        for _ in 0..TRIES {
            let here = self.cluster.presence.here()?;
            let meta = self.cluster.normal().await?;
            let record = match written.take() {
                Some(record) => record,
                None => self.cluster.registry.record(name.clone()).await?,
            };
            let is_mine = |driver: &Driver| driver.call.as_ref().is_some_and(|call| call.id == ready.id);
            if !record.driver.as_ref().is_some_and(is_mine) {
                return Ok(None);
            }
            let around = self.cluster.around(&record, &ready.effect.node).await?;
            let mut after = ended(&record, &ready.effect, &around, of, Some(&ready.boot));
            after.driver = record.driver.as_ref().zip(unanswered.clone()).map(|(driver, unanswered)| {
                Driver { server: String::new(), call: None, unanswered, ..driver.clone() }
            });
            let mut guards = vec![meta_guard(&meta), here.guard()];
            guards.extend(around.node.as_ref().map(|row| node_guard(&ready.effect.node, row)));
            guards.push(plugin_guard(&record.volume.plugin, around.plugin.as_ref()));
            let rolled_back = rolled_back(&record, &after, &ready.effect);
            if let Some(record) = self.cluster.swap_granting(&record, after, guards).await? {
                if let (Some(id), Some(error)) = (rolled_back, &of.error) {
                    self.cluster.note_failure(&id, error.clone());
                }
                let node = ready.effect.node.clone();
                let claims = around.claims(&record, &node);
                let boot = around.node.filter(|row| row.value.state == NodeState::Ready);
                let boot = boot.map(|row| row.value.boot);
                return Ok(Some(CallOutcome { record, node, boot, claims }));
            }
        }
        Err(busy(name))
    }
}

/// What became of a message to a host.
pub enum Sent {
    /// The host takes none now.
    Not(Error),
    Ended(Box<CallEnded>),
    /// The session is over, or the host does not answer.
    Lost,
}

/// Returns the driver of a call that is about to be sent. `before`: the driver of the call before, if that was to the same host, which
/// may still run it.
pub fn intent(
    before: Option<&Driver>,
    server: &str,
    host: &str,
    call: DrivenCall,
    deadline_ms: u32,
) -> Driver {
    let deadline_ms = u64::from(deadline_ms);
    Driver {
        unanswered: before.map(|driver| driver.unanswered.clone()).unwrap_or_default(),
        deadline_ms: before.map_or(deadline_ms, |driver| driver.deadline_ms.max(deadline_ms)),
        server: server.to_owned(),
        host: host.to_owned(),
        call: Some(call),
        sent_usec: now_usec(),
    }
}

/// Returns the call without an answer that a host may still run, after a call to it has ended. `before`: the driver of the call before, if that
/// was to the same host.
pub fn unanswered(before: Option<&Driver>, ready: &Ready, outcome: &ClaimOutcome) -> Option<String> {
    match outcome {
        // The plugin may go on with it after its time. Another host's plugin would not wait for that.
        ClaimOutcome::Unknown | ClaimOutcome::Again => Some(ready.id.clone()),
        // A host that has not made this call may still run the one before.
        ClaimOutcome::NotSent(_) => before.map(|driver| driver.unanswered.clone()),
        ClaimOutcome::Done | ClaimOutcome::Hopeless(_) => None,
    }
}

pub fn rpc_of(action: ClaimAction) -> DrivenRpc {
    match action {
        ClaimAction::Attach => DrivenRpc::Publish,
        _ => DrivenRpc::Unpublish,
    }
}

/// Returns whether a controller may have to be called for a volume, or claims wait.
pub(crate) fn is_due(record: &Record) -> bool {
    record.driver.is_some()
        || !record.queue.is_empty()
        || rpc_of_volume(record).is_some()
        || due_attachments(record).next().is_some()
        || due(record).next().is_some()
}

/// Returns the claims that may need a controller's call, those that end first.
pub(crate) fn due(record: &Record) -> impl Iterator<Item = &Claim> {
    let is_due = |claim: &&Claim| {
        let leg = record.attachment(&claim.node).map_or(Leg::Absent, |at| at.leg);
        let is_between = matches!(leg, Leg::Making | Leg::Removing);
        match (claim.state, claim.releasing) {
            (ClaimState::Taken, true) => false,
            (ClaimState::Taken, false) => is_between,
            _ => true,
        }
    };
    let all = move |releasing| {
        record.claims.iter().filter(is_due).filter(move |claim| claim.releasing == releasing)
    };
    all(true).chain(all(false))
}

pub(crate) fn is_ready(around: &Around) -> bool {
    around.node.as_ref().is_some_and(|row| row.value.state == NodeState::Ready)
}

/// Returns a record after a call. `boot`: the boot in which the node was attached, as far as it is known.
fn ended(
    record: &Record,
    effect: &ClaimEffect,
    around: &Around,
    of: &Ended,
    boot: Option<&String>,
) -> Record {
    let is_of_node = |claim: &&Claim| claim.node == effect.node;
    // The claim may have ended, and left the attachment to another one of its node.
    let claim =
        record.claim_at(&effect.consumer, &effect.node).or_else(|| record.claims.iter().find(is_of_node));
    let Some(claim) = claim else { return record.clone() };
    let consumer = claim.consumer.clone();
    let mut claims = around.claims(record, &effect.node);
    if let Some(boot) = boot {
        claims.boot.clone_from(boot);
    }
    let event = ClaimEvent::Ended {
        effect: ClaimEffect { consumer: consumer.clone(), ..effect.clone() },
        outcome: of.outcome.clone(),
    };
    let Ok((mut after, _)) = rules::step(&claims, event) else { return record.clone() };
    let is_unready = !is_ready(around) && claim.state == ClaimState::Pending && !claim.releasing;
    if is_unready && of.outcome == ClaimOutcome::Done && effect.action == ClaimAction::Attach {
        // Nothing is granted to the node any more.
        let mut before = claims.clone();
        before.attachments.clone_from(&after.attachments);
        match rules::step(&before, ClaimEvent::Release { consumer: consumer.clone() }) {
            Ok((released, _)) => after = released,
            Err(_) => return record.clone(),
        }
    }
    let mut after = left_attached(record, claim, around.has_refused_mounts(), around.stepped(record, after));
    if let Some(claim) = after.claims.get_mut_at(&consumer, &effect.node) {
        claim.error = of.error.as_ref().map(|error| error.message.clone());
        if claim.state == ClaimState::Taken {
            claim.keeper.clear();
        }
    }
    if let Some(context) = &of.context
        && let Some(at) = after.attachments.iter_mut().find(|at| at.node == effect.node)
    {
        at.publish_context.clone_from(context);
        at.generation = around.generation;
    }
    after
}

/// Returns the name of the claim that a failed attach has ended. `None`: it goes on.
fn rolled_back(before: &Record, after: &Record, effect: &ClaimEffect) -> Option<String> {
    let had = before.claim_at(&effect.consumer, &effect.node)?;
    let has = after.claim_at(&effect.consumer, &effect.node);
    let is_ending = has.is_none_or(|claim| claim.releasing);
    (effect.action == ClaimAction::Attach && !had.releasing && is_ending).then(|| had.id.clone())
}

/// Returns the effect of a claim's call. `None`: the call is for no claim, and its effect is made again.
fn effect_of(call: &DrivenCall) -> Option<ClaimEffect> {
    let action = match call.rpc {
        DrivenRpc::Publish => ClaimAction::Attach,
        DrivenRpc::Unpublish => ClaimAction::Detach,
        DrivenRpc::Create
        | DrivenRpc::Delete
        | DrivenRpc::Expand
        | DrivenRpc::Snapshot
        | DrivenRpc::DeleteSnapshot => return None,
    };
    let (consumer, node) = (call.consumer.clone(), call.node.clone());
    Some(ClaimEffect { action, consumer, node, from: None, grant: None })
}
