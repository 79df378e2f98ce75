//! Claims of one volume, and ends of claims, that wait at the same time are folded into one transaction.
//!
//! ```text
//!   tries ───▶ line ── its turn ──▶ each steps over the record that the one before it has left ──▶ one transaction ──▶ outcomes
//!                                     │ rows of some nodes have changed: they are read again ──▶ all step again
//!                                     │ the record has changed: a pause, then all step again
//!                                     └ it is too large: two halves, one after the other
//! ```
//!
//! Always true:
//! - Each try has an outcome of its own, and gets it after the transaction. A refusal may be because of a claim of the same transaction.
//! - The transaction compares the rows that each of its tries needs. Nothing is decided by the lists alone: an outcome without a
//!   transaction is by a record that was read of etcd.
//! - A fold is a task of its own. It goes on when a caller goes away.

use std::sync::Arc;
use std::time::Duration;

use csid::store::registry::{Record, Registry, VolumeName};
use csid_etcd::{EtcdError, RowKey};
use futures_util::future::join_all;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::claims::granted;
use crate::cluster::{Cluster, meta_guard};
use crate::drive::Driving;
use crate::failure::{Result, ServerError};
use crate::planning::Planned;
use crate::queue;
use crate::random;
use crate::records::{Put, TRIES};
use crate::tries::Tried;
use crate::turns::{Line, Trying, WaitingTry};
use crate::wanted::Awaits;

/// Tries of one transaction at most. Each is up to three operations of 100.
const MOST: usize = 40;
/// How long the lists have to come to this server's last change. Then etcd is asked.
const LISTS: Duration = Duration::from_millis(50);
/// The first and the longest pause after a change of another server.
const PAUSE: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(128));

/// What became of a try to write a fold.
enum Folded {
    /// The outcome of each try, in their order.
    Done(Vec<Result<Tried>>),
    /// By the lists nothing is to be written. So etcd has to be asked for the record.
    Unwritten,
    /// The record has another revision than this one.
    Stale(u64),
    /// These rows have changed.
    Refused(Vec<RowKey>),
}

/// Where a record is read.
#[derive(Clone, Copy)]
enum Source {
    /// In the lists, if they have a later one than this.
    ListsAfter(u64),
    Etcd,
}

impl Cluster {
    /// Tries to take or to end a claim in its turn.
    pub(crate) async fn try_in_turn(
        self: &Arc<Self>,
        driving: &Arc<Driving>,
        what: &Arc<Trying>,
        deadline: Instant,
    ) -> Result<Tried> {
        let line = self.turns.line(what.name());
        let (outcome, mut tried) = oneshot::channel();
        line.enter(WaitingTry { what: what.clone(), deadline, outcome });
        tokio::select! {
            biased;
            tried = &mut tried => return tried.unwrap_or(Ok(Tried::Changed)),
            turn = line.turn() => {
                let (cluster, driving) = (self.clone(), driving.clone());
                let (line, name) = (line.clone(), what.name().clone());
                tokio::spawn(async move {
                    let _turn = turn;
                    cluster.fold(&driving, &line, &name).await;
                });
            }
            () = tokio::time::sleep_until(deadline) => {
                if line.leave(what) {
                    return Ok(Tried::Late);
                }
            }
        }
        // A try that has begun may write.
        tried.await.unwrap_or(Ok(Tried::Changed))
    }

    /// Makes the tries that wait, until none does. The one whose caller has got the turn may not be the first.
    async fn fold(&self, driving: &Arc<Driving>, line: &Line, name: &VolumeName) {
        loop {
            let first = line.take(MOST);
            if first.is_empty() {
                return;
            }
            let mut parts = vec![first];
            while let Some(part) = parts.pop() {
                parts.extend(self.fold_part(driving, name, part).await.into_iter().flatten());
            }
        }
    }

    /// Makes tries. Returns two halves of them if they are too much for one transaction.
    async fn fold_part(
        &self,
        driving: &Arc<Driving>,
        name: &VolumeName,
        mut part: Vec<WaitingTry>,
    ) -> Option<[Vec<WaitingTry>; 2]> {
        let (mut pause, mut source) = (PAUSE.0, Source::ListsAfter(0));
        // Rows that have changed once during this.
        let mut changed: Vec<RowKey> = Vec::new();
        // A call whose time is over looks once.
        let mut has_deadlines = false;
        for _ in 0..TRIES {
            part = still_waiting(part, has_deadlines);
            if part.is_empty() {
                return None;
            }
            // The row of a call's host keeps no claim waiting.
            let caller = changed.is_empty().then_some(driving);
            match self.try_fold(caller, name, &part, source).await {
                Ok(Folded::Done(outcomes)) => {
                    for (of, outcome) in part.into_iter().zip(outcomes) {
                        end(of, outcome);
                    }
                    return None;
                }
                Ok(Folded::Unwritten) => source = Source::Etcd,
                Ok(Folded::Stale(revision)) => {
                    (source, has_deadlines) = (Source::ListsAfter(revision), true);
                    // Servers that try again at the same moment would be in each other's way again.
                    tokio::time::sleep(pause.mul_f64(0.5 + random::share() / 2.0)).await;
                    pause = (pause * 2).min(PAUSE.1);
                }
                Ok(Folded::Refused(keys)) => {
                    has_deadlines = true;
                    // A node whose row changes again and again keeps no other one waiting.
                    let (again, rest) = part
                        .into_iter()
                        .partition(|of| keys.iter().any(|key| changed.contains(key) && is_of(key, &of.what)));
                    part = rest;
                    end_all(again, || Ok(Tried::Changed));
                    changed.extend(keys);
                }
                // It is too large, or the count of one node refuses: that node fails alone.
                Err(ServerError::Etcd(EtcdError::TooLarge { .. }) | ServerError::Refused(_))
                    if part.len() > 1 =>
                {
                    let second = part.split_off(part.len() / 2);
                    return Some([second, part]);
                }
                Err(error) => {
                    end_all(part, || Err(error.clone()));
                    return None;
                }
            }
        }
        end_all(part, || Ok(Tried::Late));
        None
    }

    /// Has each try step over the record, and writes what they have made of it. `driving`: what may make the call of a claim, so that the call's intent
    /// is written with it. `None`: no intent is.
    async fn try_fold(
        &self,
        driving: Option<&Arc<Driving>>,
        name: &VolumeName,
        part: &[WaitingTry],
        source: Source,
    ) -> Result<Folded> {
        let here = self.presence.here()?;
        let meta = self.meta().await?;
        let (record, is_listed) = self.record_of(name, source).await?;
        if record.registration.is_some() {
            self.know_rows(&record.volume.plugin, part).await;
        }
        let mut guards = vec![meta_guard(&meta), here.guard()];
        let mut after = record.clone();
        let (mut places, mut steps) = (Vec::new(), Vec::new());
        for (at, of) in part.iter().enumerate() {
            let step = match &*of.what {
                // Its outcome depends on a try whose outcome nobody has yet.
                what if part[..at].iter().any(|before| is_in_order(&before.what, what)) => Ok(None),
                Trying::Claim { wanted, found } => {
                    let after = &after;
                    #[cfg(test)]
                    let after = &broken::before(&record, after);
                    self.step_claim(&here, after, wanted, found.as_ref()).await
                }
                Trying::End(end) => self.step_end(&after, end).await,
            };
            steps.push(step.map(|step| {
                let step = step?;
                #[cfg(test)]
                let step = broken::joined(&record, &after, step);
                after = step.after;
                let new = step.guards.into_iter().filter(|guard| !guards.contains(guard)).collect::<Vec<_>>();
                guards.extend(new);
                places.extend(step.place);
                Some(step.awaits)
            }));
        }
        let has_end = steps.iter().any(|step| matches!(step, Ok(Some(Awaits::End))));
        let has_due = steps.iter().any(|step| matches!(step, Ok(Some(Awaits::Claim { is_due: true }))));
        let has_claim = steps.iter().any(|step| matches!(step, Ok(Some(Awaits::Claim { .. }))));
        let after = if after != record {
            let call = match driving.filter(|_| has_due) {
                Some(driving) => {
                    let planned = driving.plan_with_claims(&record, &after, &guards).await;
                    planned.map(|(planned, place)| (planned, place, driving))
                }
                None => None,
            };
            let (after, call) = match call {
                Some((Planned { after, guards: more, call }, place, driving)) => {
                    let new = more.into_iter().filter(|guard| !guards.contains(guard)).collect::<Vec<_>>();
                    guards.extend(new);
                    (after, Some((driving, place, call)))
                }
                None => (after, None),
            };
            #[cfg(test)]
            broken::spoil(&mut guards);
            #[cfg(test)]
            let hoped = after.clone();
            let put = match has_claim || has_end {
                true => self.put_granting(&record, after, guards).await,
                false => self.put(&record, after, guards).await,
            };
            #[cfg(test)]
            let put = broken::hoped(put, hoped);
            let put = put?;
            match put {
                Put::Done(after) => {
                    match call {
                        Some((driving, place, call)) => {
                            driving.begin_with_call(place, Record::clone(&after), call);
                        }
                        // A caller that has gone away does not wake the driver.
                        None if has_end || has_due => self.wake_written(&after),
                        None => {}
                    }
                    *after
                }
                Put::Stale => return Ok(Folded::Stale(record.revision)),
                Put::Refused(keys) => return Ok(Folded::Refused(keys)),
            }
        } else if is_listed {
            return Ok(Folded::Unwritten);
        } else if has_claim && let Some(changed) = self.broken(&guards).await? {
            // Nothing is written. The rows are compared all the same: a fence or a recovery may have come since they were read.
            return Ok(changed.map_or(Folded::Stale(0), |key| Folded::Refused(vec![key])));
        } else {
            after
        };
        let outcomes = steps.into_iter().zip(part).map(|(step, of)| match step? {
            Some(awaits) => outcome(&after, &of.what, awaits),
            None => Ok(Tried::Changed),
        });
        let outcomes = outcomes.collect();
        #[cfg(test)]
        let outcomes = broken::shared(outcomes);
        Ok(Folded::Done(outcomes))
    }

    /// Reads a record. Returns whether it is of the lists, which may be old.
    async fn record_of(&self, name: &VolumeName, source: Source) -> Result<(Record, bool)> {
        if let Source::ListsAfter(revision) = source
            && let Ok(Ok((Some(record), _))) = tokio::time::timeout(LISTS, self.registry.listed(name)).await
            && record.revision > revision
        {
            return Ok((record, true));
        }
        Ok((self.registry.record(name.clone()).await?, false))
    }

    /// Reads the rows that tries need and that this server does not know, all at the same time.
    async fn know_rows(&self, plugin: &str, part: &[WaitingTry]) {
        let of_nodes = part.iter().map(|of| async {
            // What cannot be read is the business of the try that needs it.
            let _ = tokio::join!(self.node(of.what.node()), self.used(of.what.node(), plugin));
        });
        join_all(of_nodes).await;
    }
}

/// Ends the tries whose callers have gone away, and those whose time is over if that counts. Nothing of them is written.
fn still_waiting(part: Vec<WaitingTry>, has_deadlines: bool) -> Vec<WaitingTry> {
    let now = Instant::now();
    let (waiting, late) = part
        .into_iter()
        .filter(|of| !of.outcome.is_closed())
        .partition(|of| !has_deadlines || of.deadline > now);
    end_all(late, || Ok(Tried::Late));
    waiting
}

fn end(of: WaitingTry, outcome: Result<Tried>) {
    // A caller that has gone away asks again, and finds its claim.
    let _ = of.outcome.send(outcome);
}

fn end_all(part: Vec<WaitingTry>, outcome: impl Fn() -> Result<Tried>) {
    for of in part {
        end(of, outcome());
    }
}

/// Returns whether a try comes after another one, and not in the same transaction: a claim and its end.
fn is_in_order(before: &Trying, what: &Trying) -> bool {
    let is_end = |of: &Trying| matches!(of, Trying::End(_));
    (before.node(), before.consumer()) == (what.node(), what.consumer()) && (is_end(before) || is_end(what))
}

/// Returns whether a try needs a row, and no try of another node or caller does.
fn is_of(key: &RowKey, what: &Trying) -> bool {
    match key {
        RowKey::Node(node) => node == what.node() || node == what.caller(),
        RowKey::Used { node, .. } => node == what.node(),
        _ => false,
    }
}

/// Returns what became of a try, by the record that is written.
fn outcome(after: &Record, what: &Trying, awaits: Awaits) -> Result<Tried> {
    let Trying::Claim { wanted, .. } = what else { return Ok(Tried::Ended) };
    let claim = &wanted.claim;
    match awaits {
        Awaits::Claim { is_due } => match after.claim_at(&claim.consumer, &claim.node) {
            Some(of) if is_due => {
                Ok(Tried::Waits { id: of.id.clone(), error: of.error.clone(), revision: after.revision })
            }
            _ => granted(after, &wanted.caller, claim).map(|granted| Tried::Granted(Box::new(granted))),
        },
        Awaits::Queue { before: ahead, error } => match queue::entry(after, &claim.call) {
            Some(entry) => Ok(Tried::Queued(queue::place(after, &entry.claim, ahead, error))),
            // It was granted by the same change.
            None => Ok(Tried::Changed),
        },
        Awaits::End => Ok(Tried::Ended),
    }
}

/// Faults of a fold that a scene of the simulation has on purpose. They are compiled for tests alone.
#[cfg(test)]
pub mod broken {
    use std::cell::Cell;

    use csid::store::registry::{Claim, RegistryError};
    use csid_etcd::Guard;

    use super::*;
    use crate::wanted::ClaimStep;

    /// A fault of a fold.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum FoldFault {
        /// The transaction compares no node's row.
        NodesUncompared,
        /// The refusal of one try is that of all.
        OneRefusal,
        /// Outcomes are given whatever becomes of the transaction.
        OutcomesUnwritten,
        /// Each try steps over the record of before the fold.
        SameRecord,
        /// A claim does not look at those that wait in the queue.
        QueuePassed,
    }

    thread_local! {
        static FAULT: Cell<Option<FoldFault>> = const { Cell::new(None) };
    }

    /// Has folds of this thread a fault. `None`: they have none.
    pub fn begin(fault: Option<FoldFault>) {
        FAULT.set(fault);
    }

    fn has(fault: FoldFault) -> bool {
        FAULT.get() == Some(fault)
    }

    fn new_claims<'a>(record: &'a Record, after: &'a Record) -> impl Iterator<Item = &'a Claim> {
        after.claims.iter().filter(|claim| record.claim_at(&claim.consumer, &claim.node).is_none())
    }

    /// Returns the record that a claim steps over. `record`: of before the fold. `after`: what the tries before it have left.
    pub(super) fn before(record: &Record, after: &Record) -> Record {
        let mut before = after.clone();
        if has(FoldFault::SameRecord) {
            for claim in new_claims(record, after) {
                before.claims.remove_at(&claim.consumer, &claim.node);
            }
            before.attachments.retain(|at| record.attachment(&at.node).is_some());
        }
        if has(FoldFault::QueuePassed) {
            before.queue.clear();
        }
        before
    }

    /// Returns the step of a claim with what it was not shown: the claims that the tries before it have made, and the queue.
    pub(super) fn joined<'a>(record: &Record, after: &Record, mut step: ClaimStep<'a>) -> ClaimStep<'a> {
        if has(FoldFault::SameRecord) && !matches!(step.awaits, Awaits::End) {
            new_claims(record, after).for_each(|claim| step.after.claims.insert(claim.clone()));
            let made = after.attachments.iter().filter(|at| record.attachment(&at.node).is_none());
            let made = made.cloned().collect::<Vec<_>>();
            step.after.attachments.retain(|at| made.iter().all(|of| of.node != at.node));
            step.after.attachments.extend(made);
        }
        if has(FoldFault::QueuePassed) && matches!(step.awaits, Awaits::Claim { .. }) {
            step.after.queue.clone_from(&after.queue);
        }
        step
    }

    pub(super) fn spoil(guards: &mut Vec<Guard>) {
        if has(FoldFault::NodesUncompared) {
            guards.retain(|guard| !matches!(guard.key, RowKey::Node(_)));
        }
    }

    /// Returns what a transaction is taken for. `after`: what it was to write.
    pub(super) fn hoped(put: Result<Put, RegistryError>, after: Record) -> Result<Put, RegistryError> {
        match put {
            put if !has(FoldFault::OutcomesUnwritten) => put,
            Ok(Put::Done(after)) => Ok(Put::Done(after)),
            Ok(Put::Stale | Put::Refused(_)) | Err(_) => Ok(Put::Done(after.into())),
        }
    }

    /// Gives all tries the refusal of the first that has one.
    pub(super) fn shared(mut outcomes: Vec<Result<Tried>>) -> Vec<Result<Tried>> {
        let refusal = outcomes.iter().find_map(|outcome| outcome.as_ref().err().cloned());
        if let Some(refusal) = refusal.filter(|_| has(FoldFault::OneRefusal)) {
            outcomes.iter_mut().for_each(|outcome| *outcome = Err(refusal.clone()));
        }
        outcomes
    }
}
