//! Controller calls, one at a time for each volume. Which server calls stands in the volume's record, its *driver*.
//!
//! ```text
//!            intent written              answered
//!   no driver ────────────▶ driver(call) ─────────▶ no driver
//!                                │ no answer, or the server is gone        the host is there, or its time is over
//!                                └──────────────▶ driver(no call, host) ──────────────────────▶ driver(next call)
//! ```
//!
//! The intent is in etcd before the call is sent, and its revision is the call's epoch. A call without an answer may run on its host for
//! a while. So the next call goes to the same host, which makes them one after the other, or to another one when the time for that is over.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use csid::store::registry::{
    Claim, ClaimState, DrivenCall, DrivenRpc, Driver, Record, RecordFilter, Registry, VolumeName,
};
use csid::store::rows::Leg;
use csid::volume::rules::{self, ClaimAction, ClaimEffect, ClaimEvent, ClaimNext, ClaimOutcome};
use csid::{Error, Kind};
use csid_etcd::{Expected, Guard, RowKey, Rows};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::cluster::{Cluster, meta_guard, node_guard};
use crate::controllers::plugin_guard;
use crate::failure::Result;
use crate::forward::{Ended, Ready, START, read};
use crate::records::{Around, stepped};
use crate::rows::NodeState;
use crate::sessions::Sessions;

/// How much longer than that and than the plugin's time a server waits for the answer.
const LATER: Duration = Duration::from_secs(5);
/// The first and the longest pause between two tries.
const PAUSE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// The least time between two looks for volumes whose controllers have to be called.
const LOOK: Duration = Duration::from_millis(300);
/// How long a volume is left alone for which nothing can be done here, and for which another server acts.
const NOTHING: Duration = Duration::from_secs(5);
const OTHERS: Duration = Duration::from_secs(1);
/// The time between two looks for the host of a call without an answer.
const HOST: Duration = Duration::from_millis(500);
/// How long a node has no session before its pending claims end.
const AWAY: Duration = Duration::from_secs(60);
/// How long a look at an absent node counts. A pending claim is looked at more often.
const FORGOTTEN: Duration = Duration::from_secs(15);
/// The time between two looks for the outcomes that a server waits for at its end.
const STOP: Duration = Duration::from_millis(50);
/// Volumes for which this server acts at the same time.
const VOLUMES: usize = 1000;
/// Tries of a change that others are faster with.
const TRIES: usize = 64;

/// The volumes for which this server has controllers called.
pub struct Driving {
    cluster: Arc<Cluster>,
    sessions: Arc<Sessions>,
    table: Mutex<HashMap<VolumeName, Place>>,
    /// Nodes with a pending claim that have no session: since when, and when this server has looked last.
    away: Mutex<HashMap<String, (Instant, Instant)>>,
    /// Whether this server stops: it makes no more calls.
    stops: AtomicBool,
}

enum Place {
    /// A task acts for the volume. `again`: it is to look once more at its end.
    Runs { again: bool },
    /// Nothing can be done here before this time, unless somebody says otherwise.
    Rests(Instant),
}

/// What a turn leaves to do.
enum Turn {
    /// There may be more to do at once.
    Again,
    /// The same is tried again, after a growing pause.
    Later,
    Wait(Duration),
    /// Nothing, for so long.
    Rest(Duration),
}

impl Driving {
    pub fn new(cluster: Arc<Cluster>, sessions: Arc<Sessions>) -> Driving {
        Driving {
            cluster,
            sessions,
            table: Mutex::default(),
            away: Mutex::default(),
            stops: AtomicBool::new(false),
        }
    }

    fn table(&self) -> MutexGuard<'_, HashMap<VolumeName, Place>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Acts for volumes until the task is aborted. `due` has those that somebody waits for.
    pub async fn run(self: Arc<Self>, mut due: mpsc::Receiver<VolumeName>) {
        let asked = async {
            while let Some(name) = due.recv().await {
                self.begin(&name, true);
            }
        };
        tokio::join!(asked, self.look());
    }

    /// Has all volumes looked at that rest: a node has a controller that it had not.
    pub fn has_controller(&self) {
        self.table().retain(|_, place| matches!(place, Place::Runs { .. }));
    }

    /// Makes no more calls, and waits for the outcomes of those that were sent. The caller bounds the wait.
    pub async fn stop(&self) {
        self.stops.store(true, Ordering::Release);
        let runs = || self.table().values().any(|place| matches!(place, Place::Runs { .. }));
        while runs() {
            tokio::time::sleep(STOP).await;
        }
    }

    /// Looks for volumes with something to do, again and again.
    async fn look(self: &Arc<Self>) {
        loop {
            let filter = RecordFilter { restless: true, ..RecordFilter::default() };
            match self.cluster.registry.records(filter).await {
                Ok((records, index)) => {
                    let now = Instant::now();
                    self.table().retain(|_, place| match place {
                        Place::Runs { .. } => true,
                        Place::Rests(until) => *until > now,
                    });
                    for record in records.iter().filter(|record| is_due(record)) {
                        self.begin(&record.name, false);
                    }
                    // A beat changes the index every few seconds.
                    if self.cluster.registry_changed(index).await.is_none() {
                        return;
                    }
                }
                Err(error) => tracing::warn!(%error, "the volumes with something to do cannot be listed"),
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Has a task act for a volume. `is_asked`: also if the volume rests.
    fn begin(self: &Arc<Self>, name: &VolumeName, is_asked: bool) {
        if self.stops.load(Ordering::Acquire) {
            return;
        }
        let mut table = self.table();
        let running = table.values().filter(|place| matches!(place, Place::Runs { .. })).count();
        match table.get_mut(name) {
            Some(Place::Runs { again }) => *again |= is_asked,
            Some(Place::Rests(_)) if !is_asked => {}
            _ if running >= VOLUMES => {}
            _ => {
                table.insert(name.clone(), Place::Runs { again: false });
                tokio::spawn(self.clone().drive(name.clone()));
            }
        }
    }

    /// Ends a task, unless it is to look again.
    fn is_over(&self, name: &VolumeName, rest: Duration) -> bool {
        let mut table = self.table();
        if let Some(Place::Runs { again }) = table.get_mut(name)
            && *again
        {
            *again = false;
            return false;
        }
        table.insert(name.clone(), Place::Rests(Instant::now() + rest));
        true
    }

    /// Acts for a volume until nothing is left to do here.
    async fn drive(self: Arc<Self>, name: VolumeName) {
        let mut tries = 0;
        // The host of a call without an answer, and since when this server waits for it.
        let mut awaited = None;
        loop {
            if self.stops.load(Ordering::Acquire) {
                self.table().remove(&name);
                return;
            }
            let rest = match self.turn(&name, &mut awaited).await {
                Ok(Turn::Again) => {
                    tries = 0;
                    continue;
                }
                Ok(Turn::Later) => {
                    let (first, longest) = PAUSE;
                    let pause = first.saturating_mul(2_u32.saturating_pow(tries)).min(longest);
                    tries += 1;
                    tokio::time::sleep(pause).await;
                    continue;
                }
                Ok(Turn::Wait(time)) => {
                    tokio::time::sleep(time).await;
                    continue;
                }
                Ok(Turn::Rest(time)) => time,
                Err(error) => {
                    tracing::warn!(volume = %name, %error, "a volume's controller cannot be called now");
                    OTHERS
                }
            };
            if self.is_over(&name, rest) {
                return;
            }
        }
    }

    /// Does one thing for a volume.
    async fn turn(&self, name: &VolumeName, awaited: &mut Option<(String, Instant)>) -> Result<Turn> {
        let here = self.cluster.presence.here()?;
        let meta = self.cluster.normal().await?;
        let record = self.cluster.registry.record(name.clone()).await?;
        let guards = vec![meta_guard(&meta), here.guard()];
        match &record.driver {
            // A task of this server has ended without an outcome.
            Some(driver) if driver.server == here.id => return self.give_up(&record, guards).await,
            Some(driver) if !driver.server.is_empty() => {
                let key = RowKey::Server(driver.server.clone());
                if self.cluster.rows.read(&key).await?.is_some() {
                    return Ok(Turn::Rest(OTHERS));
                }
                tracing::warn!(volume = %name, server = driver.server, "a server that acted for a volume is gone");
                let gone = Guard { key, is: Expected::Absent };
                return self.give_up(&record, [guards, vec![gone]].concat()).await;
            }
            _ => {}
        }
        let hosts = self.cluster.hosts(&record, self.sessions.controllers(&record.volume.plugin));
        let host = self.choose(&record, &hosts, awaited);
        let mut is_waiting = false;
        for claim in due(&record) {
            let around = self.cluster.around(&record, &claim.node).await?;
            let is_unwanted = claim.state == ClaimState::Pending
                && (!is_ready(&around) || self.has_left(&claim.node).await?);
            let (after, next) = next_step(&record, claim, &around, is_unwanted)?;
            let mut guards = guards.clone();
            guards.extend(around.node.as_ref().map(|row| node_guard(&claim.node, row)));
            guards.push(plugin_guard(&record.volume.plugin, around.plugin.as_ref()));
            match (next, host) {
                (ClaimNext::Run(effect), _) if effect.action == ClaimAction::NodeDetach => {}
                (ClaimNext::Run(_), None) => is_waiting = true,
                (ClaimNext::Run(effect), Some(host)) => {
                    let boot = around.claims(&record, &claim.node).boot;
                    // What is blocked by any server is sent nothing.
                    let Some(of_host) = self.cluster.host_guard(host).await? else {
                        return Ok(Turn::Rest(NOTHING));
                    };
                    guards.push(of_host);
                    return self.call(&record, after, effect, host, boot, guards).await;
                }
                _ if after != record => {
                    self.cluster.swap(&record, after, guards).await?;
                    self.cluster.was_driven();
                    return Ok(Turn::Again);
                }
                _ => {}
            }
        }
        if is_waiting && awaited.is_some() {
            return Ok(Turn::Wait(HOST));
        }
        if !is_waiting && record.driver.is_some() {
            let after = Record { driver: None, ..record.clone() };
            self.cluster.swap(&record, after, guards).await?;
            return Ok(Turn::Again);
        }
        Ok(Turn::Rest(NOTHING))
    }

    /// Returns whether a node has had no session for so long that nobody waits there for its pending claims.
    async fn has_left(&self, node: &str) -> Result<bool> {
        let sessions = Rows::Sessions { node: node.to_owned() };
        let is_there = !self.cluster.rows.list(&sessions, 1).await?.is_empty();
        let mut away = self.away.lock().unwrap_or_else(PoisonError::into_inner);
        if is_there {
            away.remove(node);
            return Ok(false);
        }
        // The node may have been there since an earlier look.
        away.retain(|_, (_, last)| last.elapsed() < FORGOTTEN);
        let now = Instant::now();
        let (since, last) = away.entry(node.to_owned()).or_insert((now, now));
        *last = now;
        Ok(since.elapsed() >= AWAY)
    }

    /// Returns the host of the next call. `None`: there is none here, or a call without an answer may still run on another one.
    fn choose<'a>(
        &self,
        record: &Record,
        hosts: &'a [String],
        awaited: &mut Option<(String, Instant)>,
    ) -> Option<&'a String> {
        let Some(Driver { host: last, .. }) = &record.driver else {
            *awaited = None;
            return hosts.first();
        };
        if let Some(same) = hosts.iter().find(|host| *host == last) {
            return Some(same);
        }
        let since = match awaited {
            Some((host, since)) if host == last => *since,
            _ => awaited.insert((last.clone(), Instant::now())).1,
        };
        match since.elapsed() >= START + self.cluster.config.controller_time {
            true => hosts.first(),
            false => None,
        }
    }

    /// Writes that a call has no answer. Any server may go on.
    async fn give_up(&self, record: &Record, mut guards: Vec<Guard>) -> Result<Turn> {
        let Some(driver) = record.driver.clone() else { return Ok(Turn::Again) };
        let mut after = record.clone();
        if let Some(call) = &driver.call {
            let effect = effect_of(call);
            let around = self.cluster.around(record, &call.node).await?;
            guards.push(plugin_guard(&record.volume.plugin, around.plugin.as_ref()));
            after = ended(record, &effect, &around, &Ended::lost(&driver.host), None);
        }
        after.driver = Some(Driver { server: String::new(), host: driver.host, call: None });
        self.cluster.swap(record, after, guards).await?;
        Ok(Turn::Again)
    }

    /// Makes one call: writes its intent, sends it, and writes its outcome.
    async fn call(
        &self,
        record: &Record,
        after: Record,
        effect: ClaimEffect,
        host: &str,
        boot: String,
        guards: Vec<Guard>,
    ) -> Result<Turn> {
        let here = self.cluster.presence.here()?;
        let mut after = after;
        rules::enter_attach_secrets(&mut after, &effect, false);
        let mut ready = Ready::new(&after, effect, host, boot, self.cluster.config.controller_time)?;
        after.driver = Some(Driver {
            server: here.id.clone(),
            host: host.to_owned(),
            call: Some(DrivenCall {
                id: ready.id.clone(),
                rpc: match ready.effect.action {
                    ClaimAction::Attach => DrivenRpc::Publish,
                    _ => DrivenRpc::Unpublish,
                },
                node: ready.effect.node.clone(),
                consumer: ready.effect.consumer.clone(),
            }),
        });
        let Some(after) = self.cluster.swap(record, after, guards).await? else { return Ok(Turn::Again) };
        ready.message.epoch = after.revision;
        // A server that has stood still since then sends nothing.
        let ended = match self.cluster.presence.here()? == here {
            true => self.send(&ready).await,
            false => Ended::lost(host),
        };
        if let Some(error) = &ended.error {
            tracing::warn!(volume = %record.name, host, node = ready.effect.node, %error, "a controller call has failed");
        }
        // A host that has not made this call may still run the one before, which has no answer.
        let is_host = |driver: &Driver| driver.host == host;
        let still_runs =
            matches!(ended.outcome, ClaimOutcome::NotSent(_)) && record.driver.as_ref().is_some_and(is_host);
        self.finish(&record.name, &ready, &ended, ended.is_lost || still_runs).await?;
        self.cluster.was_driven();
        let is_taken = || {
            let claim = after.claim_at(&ready.effect.consumer, &ready.effect.node);
            claim.is_some_and(|claim| claim.state == ClaimState::Taken)
        };
        Ok(match ended.outcome {
            // Its node has the claim, and asks again for the attachment.
            ClaimOutcome::Hopeless(_) | ClaimOutcome::NotSent(Some(_)) if is_taken() => Turn::Wait(NOTHING),
            ClaimOutcome::Done | ClaimOutcome::Hopeless(_) | ClaimOutcome::NotSent(Some(_)) => Turn::Again,
            ClaimOutcome::Unknown | ClaimOutcome::Again | ClaimOutcome::NotSent(None) => Turn::Later,
        })
    }

    /// Sends a call, and waits for its end.
    async fn send(&self, ready: &Ready) -> Ended {
        let Ready { host, message, .. } = ready;
        let Some(answer) = self.sessions.call(host, message.clone()) else {
            let text = format!("node {host} takes no controller call now");
            return Ended::failed(ClaimOutcome::NotSent(None), Error::new(Kind::PluginUnavailable, text));
        };
        let limit = START + self.cluster.config.controller_time + LATER;
        match tokio::time::timeout(limit, answer).await {
            Ok(Ok(ended)) => read(ready, ended),
            // The session is over, or the host does not answer.
            Ok(Err(_)) | Err(_) => Ended::lost(host),
        }
    }

    /// Writes the outcome of a call, unless another server has taken over. `may_run`: the host may still run a call without an answer.
    async fn finish(&self, name: &VolumeName, ready: &Ready, of: &Ended, may_run: bool) -> Result<()> {
        for _ in 0..TRIES {
            let here = self.cluster.presence.here()?;
            let meta = self.cluster.normal().await?;
            let record = self.cluster.registry.record(name.clone()).await?;
            let is_mine = |driver: &Driver| driver.call.as_ref().is_some_and(|call| call.id == ready.id);
            if !record.driver.as_ref().is_some_and(is_mine) {
                return Ok(());
            }
            let around = self.cluster.around(&record, &ready.effect.node).await?;
            let mut after = ended(&record, &ready.effect, &around, of, Some(&ready.boot));
            let unanswered = || Driver { server: String::new(), host: ready.host.clone(), call: None };
            after.driver = may_run.then(unanswered);
            let mut guards = vec![meta_guard(&meta), here.guard()];
            guards.extend(around.node.as_ref().map(|row| node_guard(&ready.effect.node, row)));
            guards.push(plugin_guard(&record.volume.plugin, around.plugin.as_ref()));
            let rolled_back = rolled_back(&record, &after, &ready.effect);
            if self.cluster.swap(&record, after, guards).await?.is_some() {
                if let (Some(id), Some(error)) = (rolled_back, &of.error) {
                    self.cluster.note_failure(&id, error.clone());
                }
                return Ok(());
            }
        }
        let text = format!("the record of {name} changed {TRIES} times meanwhile");
        Err(Error::new(Kind::Busy, text).into())
    }
}

/// Returns whether a controller may have to be called for a volume.
fn is_due(record: &Record) -> bool {
    record.driver.is_some() || due(record).next().is_some()
}

/// Returns the claims that may need a controller's call, those that end first.
fn due(record: &Record) -> impl Iterator<Item = &Claim> {
    let is_due = |claim: &&Claim| {
        let leg = record.attachment(&claim.node).map_or(Leg::Absent, |at| at.leg);
        let is_between = matches!(leg, Leg::Making | Leg::Removing);
        claim.blocked.is_none()
            && match (claim.state, claim.releasing) {
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

/// Takes the next step of a claim. `is_unwanted`: it ends, for nobody has got it or waits for it.
fn next_step(
    record: &Record,
    claim: &Claim,
    around: &Around,
    is_unwanted: bool,
) -> Result<(Record, ClaimNext)> {
    let consumer = claim.consumer.clone();
    let event = match is_unwanted {
        true => ClaimEvent::Release { consumer },
        false => ClaimEvent::Continue { consumer },
    };
    let (after, next) = rules::step(&around.claims(record, &claim.node), event)
        .map_err(|refusal| rules::refused(refusal, &record.name, &claim.consumer))?;
    Ok((stepped(record, after), next))
}

fn is_ready(around: &Around) -> bool {
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
    let Some(consumer) = claim.map(|claim| claim.consumer.clone()) else { return record.clone() };
    let mut claims = around.claims(record, &effect.node);
    if let Some(boot) = boot {
        claims.boot.clone_from(boot);
    }
    let event = ClaimEvent::Ended {
        effect: ClaimEffect { consumer: consumer.clone(), ..effect.clone() },
        outcome: of.outcome.clone(),
    };
    let Ok((mut after, _)) = rules::step(&claims, event) else { return record.clone() };
    let is_unready = !is_ready(around)
        && claim.is_some_and(|claim| claim.state == ClaimState::Pending && !claim.releasing);
    if is_unready && of.outcome == ClaimOutcome::Done && effect.action == ClaimAction::Attach {
        // Nothing is granted to the node any more.
        let mut before = claims.clone();
        before.attachments.clone_from(&after.attachments);
        match rules::step(&before, ClaimEvent::Release { consumer: consumer.clone() }) {
            Ok((released, _)) => after = released,
            Err(_) => return record.clone(),
        }
    }
    let mut after = stepped(record, after);
    if let Some(claim) = after.claims.get_mut_at(&consumer, &effect.node) {
        claim.error = of.error.as_ref().map(|error| error.message.clone());
    }
    if let Some(context) = &of.context
        && let Some(at) = after.attachments.iter_mut().find(|at| at.node == effect.node)
    {
        at.publish_context.clone_from(context);
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

fn effect_of(call: &DrivenCall) -> ClaimEffect {
    ClaimEffect {
        action: match call.rpc {
            DrivenRpc::Publish => ClaimAction::Attach,
            DrivenRpc::Unpublish => ClaimAction::Detach,
        },
        consumer: call.consumer.clone(),
        node: call.node.clone(),
        from: None,
        grant: None,
    }
}
