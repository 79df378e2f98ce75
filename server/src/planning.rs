//! What is done next for the claims of a volume: one decision. The volume's task takes it, and so does a fold of claims ([`crate::folding`]). So a
//! fold writes a claim and the intent of its call in one transaction, if the task would make that call next.
//!
//! ```text
//!   record ──▶ plan ─┬─ a call ──▶ intent, by the task or with the claim ──▶ sent ──▶ outcome
//!                    ├─ a change of the record
//!                    └─ nothing now
//! ```

use std::sync::Arc;
use std::time::Duration;

use csid::store::registry::{Claim, ClaimState, Record};
use csid::volume::rules::{self, ClaimAction, ClaimEffect, ClaimEvent, ClaimNext, ClaimOutcome};
use csid_etcd::Guard;

use crate::by_call::{attachments, is_forgotten};
use crate::cluster::node_guard;
use crate::controllers::plugin_guard;
use crate::drive::{Driving, Intended, NOTHING, Next, SHORT, Turn, due, is_due, is_ready, unanswered};
use crate::excluded::{excluding, left_attached, why_waits};
use crate::failure::Result;
use crate::forward::Ready;
use crate::pace::{BLOCKED, Calling, Memory, Wish};
use crate::records::Around;
use crate::tasks::Reserved;

/// What is done next for the claims of a volume.
enum Plan {
    Call(Box<Planned>),
    /// The record is changed, and these rows are compared.
    Change(Box<Record>, Vec<Guard>),
    Nothing(Turn),
}

/// A controller's call for a claim, before its intent is written.
pub(crate) struct Planned {
    /// The record with the intent.
    pub after: Record,
    /// The rows that the intent needs as they are.
    pub guards: Vec<Guard>,
    pub call: ClaimCall,
}

/// A controller's call for a claim. It is sent when its intent is written.
pub(crate) struct ClaimCall {
    ready: Ready,
    wish: Wish,
    intended: Intended,
    /// Its place among the plugin's calls.
    _calling: Calling,
}

impl Driving {
    /// Does one thing for the claims of a volume. `of_volume`: how long the volume's own call waits.
    pub(crate) async fn turn_of_claims(
        &self,
        record: &Record,
        memory: &mut Memory,
        guards: Vec<Guard>,
        of_volume: Option<Duration>,
    ) -> Result<Turn> {
        match self.plan(record, memory, &guards, of_volume).await? {
            Plan::Call(planned) => {
                let Planned { after, guards, call } = *planned;
                if let Some(sent) = self.cluster.swap(record, after, guards).await? {
                    self.call(&sent, call, memory).await?;
                }
                Ok(Turn::Again)
            }
            Plan::Change(after, guards) => {
                self.cluster.swap_granting(record, *after, guards).await?;
                self.cluster.was_driven(&record.name);
                Ok(Turn::Again)
            }
            Plan::Nothing(turn) => Ok(turn),
        }
    }

    /// Decides what is done next for the claims of a volume. `of_volume`: how long the volume's own call waits.
    async fn plan(
        &self,
        record: &Record,
        memory: &mut Memory,
        guards: &[Guard],
        of_volume: Option<Duration>,
    ) -> Result<Plan> {
        let plugin = &record.volume.plugin;
        let hosts = self.cluster.hosts(record, self.sessions.controllers(plugin));
        let Next { host, may_run } = self.choose(record, &hosts, memory);
        let mut is_waiting = of_volume.is_some();
        let is_there = |wish: &Wish| record.claims.iter().any(|claim| Wish::of(claim) == *wish);
        memory.failed.retain(|wish, _| is_there(wish) || (of_volume.is_some() && wish.is_of_volume()));
        let mut pause: Option<Duration> = None;
        for claim in due(record) {
            let wish = Wish::of(claim);
            if let Some(left) = memory.pause(&wish) {
                // The others have their turn meanwhile.
                pause = Some(pause.map_or(left, |pause| pause.min(left)));
                continue;
            }
            let around = self.cluster.around(record, &claim.node).await?;
            let mut guards = guards.to_vec();
            let is_unwanted = claim.state == ClaimState::Pending
                && (!is_ready(&around)
                    || self.has_left(&claim.node).await?
                    || self.cluster.is_forsaken(claim, &mut guards).await?);
            let is_live = matches!(claim.state, ClaimState::Pending | ClaimState::Taken) && !claim.releasing;
            if is_live && !is_unwanted && excluding(record, claim).next().is_some() {
                // Both may have the volume already. An operator decides.
                pause = Some(pause.map_or(NOTHING, |pause| pause.min(NOTHING)));
                continue;
            }
            let (after, next) = next_step(record, claim, &around, is_unwanted)?;
            guards.extend(around.node.as_ref().map(|row| node_guard(&claim.node, row)));
            guards.push(plugin_guard(plugin, around.plugin.as_ref()));
            let is_detach = matches!(&next, ClaimNext::Run(effect) if effect.action == ClaimAction::Detach);
            let stepped = after.claim_at(&claim.consumer, &claim.node).unwrap_or(claim);
            let next = match is_detach && why_waits(record, stepped, around.has_refused_mounts()).is_some() {
                true => ClaimNext::Rest,
                false => next,
            };
            match (next, host) {
                (ClaimNext::Run(effect), _) if effect.action == ClaimAction::NodeDetach => {}
                (ClaimNext::Run(_), None) => is_waiting = true,
                (ClaimNext::Run(effect), Some(host)) => {
                    let Some(calling) = self.calls.begin(plugin) else {
                        pause = Some(pause.map_or(SHORT, |pause| pause.min(SHORT)));
                        continue;
                    };
                    // What is blocked by any server is sent nothing.
                    let Some(of_host) = self.cluster.host_guard(host).await? else {
                        return Ok(Plan::Nothing(Turn::Rest(NOTHING)));
                    };
                    guards.push(of_host);
                    let boot = around.claims(record, &claim.node).boot;
                    let (after, ready, intended) = self.intend(after, effect, host, boot)?;
                    let call = ClaimCall { ready, wish, intended, _calling: calling };
                    return Ok(Plan::Call(Box::new(Planned { after, guards, call })));
                }
                _ if after != *record => return Ok(Plan::Change(Box::new(after), guards)),
                _ => {}
            }
        }
        // A call without an answer may have been for a node whose row was forgotten. It runs on its host until its time is over.
        if pause.is_none() && record.driver.is_some() && !is_waiting && may_run.is_none() {
            let after = Record { driver: None, ..record.clone() };
            return Ok(Plan::Change(Box::new(after), guards.to_vec()));
        }
        // The host's next session ends the rest, and so does a change of the record. A pending claim's node may leave meanwhile.
        let is_pending =
            !record.queue.is_empty() || record.claims.iter().any(|claim| claim.state == ClaimState::Pending);
        let reasons = [pause, may_run, is_pending.then_some(NOTHING), of_volume];
        let rest = reasons.into_iter().flatten().min().unwrap_or(NOTHING);
        // A task that waits for long would have the place of another volume's.
        let is_short = (pause.is_some() || of_volume.is_some()) && rest < SHORT;
        Ok(Plan::Nothing(if is_short { Turn::Wait(rest) } else { Turn::Rest(rest) }))
    }

    /// Makes the call of an effect, and enters its intent.
    fn intend(
        &self,
        mut after: Record,
        effect: ClaimEffect,
        host: &str,
        boot: String,
    ) -> Result<(Record, Ready, Intended)> {
        rules::enter_attach_secrets(&mut after, &effect, false);
        after.attachments.iter_mut().filter(|at| at.node == effect.node).for_each(|at| at.uncalled = false);
        let ready = Ready::new(&after, effect, host, boot, self.cluster.config.controller_time)?;
        let intended = self.enter_intent(&mut after, &ready, "")?;
        Ok((after, ready, intended))
    }

    /// Plans the call of a fold of claims, and takes the volume's place for the task that sends it. `record`: that before the fold. `after`: what the
    /// fold is to write. `guards`: what it compares. `None`: the task decides when the fold is written.
    pub(crate) async fn plan_with_claims(
        self: &Arc<Self>,
        record: &Record,
        after: &Record,
        guards: &[Guard],
    ) -> Option<(Planned, Reserved)> {
        // Whatever else the volume has to do is not the fold's.
        if is_due(record) || !after.queue.is_empty() || attachments(record).any(is_forgotten) {
            return None;
        }
        // The task asks etcd whether a node is there that has no session here. The others of the fold would wait for that.
        if due(after).any(|claim| !self.sessions.has(&claim.node)) {
            return None;
        }
        let mut place = self.tasks.reserve(&record.name)?;
        match self.plan(after, &mut place.memory, guards, None).await {
            Ok(Plan::Call(planned)) if planned.call.ready.effect.action == ClaimAction::Attach => {
                Some((*planned, place))
            }
            // The task logs an error.
            _ => None,
        }
    }

    /// Starts the task of a volume, which sends a call first. `sent`: the record with the call's intent, as a fold has written it.
    pub(crate) fn begin_with_call(self: &Arc<Self>, place: Reserved, sent: Record, call: ClaimCall) {
        let Some((task, mut memory)) = place.begin() else { return };
        let driving = self.clone();
        tokio::spawn(async move {
            memory.seen = sent.revision;
            if let Err(error) = driving.call(&sent, call, &mut memory).await {
                // The next turn finds the call without an outcome.
                tracing::warn!(volume = %sent.name, %error, "a controller call has no outcome in etcd");
            }
            driving.drive(task, memory, None).await;
        });
    }

    /// Sends a call whose intent is written, and writes its outcome. `sent`: the record with the intent.
    async fn call(&self, sent: &Record, call: ClaimCall, memory: &mut Memory) -> Result<()> {
        let ClaimCall { mut ready, wish, intended, _calling } = call;
        let ended = self.send_intended(sent, &mut ready, &intended).await;
        let unanswered = unanswered(intended.before.as_ref(), &ready, &ended.outcome);
        let outcome = self.finish(sent, &ready, &ended, unanswered).await?;
        self.cluster.was_driven_to(&sent.name, outcome.map(Arc::new));
        let claim = sent.claim_at(&ready.effect.consumer, &ready.effect.node);
        let is_taken = claim.is_some_and(|claim| claim.state == ClaimState::Taken);
        match ended.outcome {
            ClaimOutcome::Done => drop(memory.failed.remove(&wish)),
            // Its node has the claim, and asks again for the attachment.
            ClaimOutcome::Hopeless(_) | ClaimOutcome::NotSent(Some(_)) if is_taken => {
                memory.has_failed(wish, NOTHING);
            }
            ClaimOutcome::Hopeless(_) | ClaimOutcome::NotSent(Some(_)) if wish.is_blocked => {
                memory.has_failed(wish, BLOCKED);
            }
            ClaimOutcome::Hopeless(_) | ClaimOutcome::NotSent(Some(_)) => {}
            ClaimOutcome::Unknown | ClaimOutcome::Again | ClaimOutcome::NotSent(None) => {
                memory.has_failed(wish, Duration::ZERO);
            }
        }
        Ok(())
    }
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
    Ok((left_attached(record, claim, around.has_refused_mounts(), around.stepped(record, after)), next))
}
