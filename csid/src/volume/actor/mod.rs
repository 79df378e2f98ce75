//! The actor of one volume: a queue, first in first out, which runs one operation at a time (CSI rule 18).
//!
//! It exists while there is work, and owns the rows of the volume meanwhile. It reads its inbox while an operation runs, so a caller
//! can join, give up or cancel while an RPC hangs.

pub(in crate::volume) mod operation;

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};

use crate::error::{Error, Kind, Result};
use crate::fault;
use crate::store::registry::{Claim, RegistryError};
use crate::store::rows::{MountRow, Phase, VolumeKey};
use crate::volume::actor::operation::Operation;
use crate::volume::api::operation_kind::OperationKind;
use crate::volume::context::Context;
use crate::volume::errors::operation::OperationError;
use crate::volume::executor::Executor;
use crate::volume::model::claim;
use crate::volume::model::subject::{ClaimKey, Subject};
use crate::volume::model::volume::{DesiredMount, Volume};
use crate::volume::operation::journal::JournaledVolume;
use crate::volume::operation::message::Message;
use crate::volume::operation::orders::{ActorSignals, Orders, until};
use crate::volume::operation::places::Place;
use crate::volume::operation::request::{OperationRequest, OperationResponse, Waiter};
use crate::volume::operation::running::RunningOperation;
use crate::volume::operation::table::{Progress, Recovering};

/// The first and the longest pause between two tries of work without a caller.
const SETTLE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The pause between two tries of an operation that waits for claims in a cluster. The servers do not say when a claim ends.
const ELSEWHERE: Duration = Duration::from_secs(1);

pub(in crate::volume) struct VolumeActor {
    shared: Arc<Context>,
    key: VolumeKey,
    inbox: mpsc::UnboundedReceiver<Message>,
    queue: VecDeque<Operation>,
    /// Operations that wait for claims and mounts in their way to end, in order of arrival.
    waiting: VecDeque<Operation>,
    /// The last number given to a waiting operation. Numbers follow the order of arrival.
    last_number: u64,
    /// The number from which waiting operations are retried, before the queue. `None`: no retry is due.
    retry: Option<u64>,
    /// Claims that were retried since then and are still refused. They block operations behind them.
    refused: Vec<Arc<Claim>>,
    /// How often a retry of the waiting operations was requested.
    retries: u64,
    /// The place in the queue for the plugin's volume limit. `None`: no operation waits for another volume.
    place: Option<Place>,
    /// The last change of the registry that was handled while the place is first. 0: none yet.
    seen: u64,
    /// Rows to settle before the next pause.
    round: VecDeque<Subject>,
    settle_pause: Duration,
    settle_at: Instant,
    /// The marker of recovery, until the first operation is listed.
    recovering: Option<Recovering>,
    orders: Arc<Orders>,
}

impl VolumeActor {
    /// Works on `volume` until there is nothing left to do.
    pub(in crate::volume) async fn run(
        shared: Arc<Context>,
        volume: Volume,
        inbox: mpsc::UnboundedReceiver<Message>,
    ) {
        let mut task = VolumeActor {
            shared,
            key: volume.row.key.clone(),
            inbox,
            queue: VecDeque::new(),
            waiting: VecDeque::new(),
            last_number: 0,
            retry: None,
            refused: Vec::new(),
            retries: 0,
            place: None,
            seen: 0,
            round: VecDeque::new(),
            settle_pause: SETTLE.0,
            settle_at: Instant::now(),
            recovering: None,
            orders: Arc::default(),
        };
        task.work(JournaledVolume::new(volume)).await;
    }

    async fn work(&mut self, mut rows: JournaledVolume) {
        loop {
            while let Ok(message) = self.inbox.try_recv() {
                self.take(message);
            }
            if !self.orders.is_empty() {
                Box::pin(self.carry_out(&mut rows)).await;
                continue;
            }
            if let Some(operation) = self.next_waiting().or_else(|| self.queue.pop_front()) {
                self.perform(operation, &mut rows).await;
                continue;
            }
            // Rows that a caller's operation has settled meanwhile are dropped.
            self.round.retain(|subject| next_of(&rows, subject).is_some());
            if self.round.is_empty() {
                self.round = unsettled(&rows);
            }
            if self.waiting.is_empty() {
                self.place = None;
            }
            if self.round.is_empty() && self.waiting.is_empty() {
                match self.shared.directory.rest(&self.key, rows, &self.inbox) {
                    None => return,
                    Some(busy) => rows = busy,
                }
                continue;
            }
            // A damaged journal accepts no change: csid starts again with another one.
            if self.shared.is_stopping() || self.shared.store.writable().is_err() {
                return;
            }
            self.release(&rows);
            let settle_at = (!self.round.is_empty()).then_some(self.settle_at);
            let deadline = self.next_deadline(None);
            let for_others = self.waiting.iter().any(Operation::waits_for_another_volume);
            // The place is kept while the operation is retried.
            match for_others {
                true => drop(self.place.get_or_insert_with(|| self.shared.places.queue(&self.key.plugin))),
                false => self.place = None,
            }
            if self.place.as_ref().is_some_and(|place| !place.is_first()) {
                self.seen = 0;
            }
            let is_elsewhere = self.shared.records.servers.is_some()
                && self.waiting.iter().any(|operation| operation.lacks_claim);
            let again = is_elsewhere.then(|| Instant::now() + ELSEWHERE);
            tokio::select! {
                message = self.inbox.recv() => match message {
                    Some(message) => self.take(message),
                    None => return,
                },
                () = until(again) => self.retry_waiting(),
                Ok(index) = changed(self.place.as_ref(), &self.shared, self.seen) => {
                    self.seen = index;
                    self.retry_waiting();
                }
                () = until(deadline) => self.expire(),
                () = until(settle_at) => self.settle_one(&mut rows).await,
            }
        }
    }

    /// Releases the names and targets that neither the rows nor an operation in the queue have.
    fn release(&self, rows: &JournaledVolume) {
        let waiting = self.queue.iter().chain(&self.waiting).map(|operation| &operation.work);
        self.shared.directory.release(&self.key, rows.volume(), waiting, &self.inbox);
    }

    /// Answers waiting callers whose deadline has passed. An operation at the end of its wait for claims gets its last try.
    fn expire(&mut self) {
        let now = Instant::now();
        for operation in self.queue.iter_mut().chain(&mut self.waiting) {
            operation.expire(now, &self.key);
        }
        self.drop_deserted();
        let is_over = |operation: &Operation| operation.work.waits_until().is_some_and(|until| until <= now);
        if self.waiting.iter().any(is_over) {
            self.retry_waiting();
        }
    }

    /// Schedules a retry of the waiting operations, in order of arrival.
    fn retry_waiting(&mut self) {
        self.retry = Some(0);
        self.refused.clear();
        self.retries += 1;
    }

    /// Takes the next waiting operation to retry. An operation behind a refused one that wants the same is skipped: otherwise
    /// each claim that ends would cost a try of every waiting operation. `None`: no operation is left to retry.
    fn next_waiting(&mut self) -> Option<Operation> {
        let from = self.retry?;
        let now = Instant::now();
        let is_next = |operation: &Operation| {
            let is_over = operation.work.waits_until().is_some_and(|until| until <= now);
            // The servers end what waits there and is not asked for.
            let is_asked_for = operation.queued.is_some();
            operation.number >= from && (is_over || is_asked_for || !self.is_behind(operation))
        };
        let Some(place) = self.waiting.iter().position(is_next) else {
            self.retry = None;
            self.refused.clear();
            return None;
        };
        let next = self.waiting.remove(place)?;
        self.retry = Some(next.number + 1);
        Some(next)
    }

    /// Returns whether a claim was refused ahead of this operation that has the same usage or conflicts with its claim.
    fn is_behind(&self, operation: &Operation) -> bool {
        let wanted = operation.work.claim().filter(|_| operation.lacks_claim);
        wanted.is_some_and(|wanted| {
            self.refused.iter().any(|ahead| ahead.usage == wanted.usage || claim::conflict(ahead, wanted))
        })
    }

    /// Puts an operation among the waiting ones, at its earlier place if it had one. `retries` is the number of retries when the
    /// operation began.
    fn wait(&mut self, mut operation: Operation, retries: u64) {
        if operation.number == 0 {
            self.last_number += 1;
            operation.number = self.last_number;
        } else if self.retry.is_some() && retries == self.retries && operation.lacks_claim {
            self.refused.extend(operation.work.claim().cloned());
        }
        let place = self.waiting.partition_point(|waiting| waiting.number < operation.number);
        self.waiting.insert(place, operation);
    }

    /// Tries the next row of the round. The pause is between rounds, so a row that cannot be settled does not delay the others.
    async fn settle_one(&mut self, rows: &mut JournaledVolume) {
        let next = self.round.pop_front().and_then(|subject| next_of(rows, &subject));
        if self.round.is_empty() {
            self.settle_at = Instant::now() + self.settle_pause;
            self.settle_pause = (self.settle_pause * 2).min(SETTLE.1);
        }
        if let Some(work) = next {
            self.perform(Operation::new(work), rows).await;
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Ask(work, waiter) => {
                if let Some(error) = self.refusal(&work) {
                    return refuse(work, waiter, &self.key, error);
                }
                // Cancel before the request joins an earlier one: it also ends requests that were queued in between.
                self.cancel_queued(&work);
                let is_same =
                    |queued: &&mut Operation| !queued.work.is_restore() && queued.work.covers(&work);
                if let Some(same) = self.queue.iter_mut().find(is_same) {
                    same.work.wait_like(&work);
                    return same.join(&self.shared, waiter);
                }
                let mut operation = Operation::new(work);
                operation.join(&self.shared, waiter);
                self.queue.push_back(operation);
            }
            Message::Withdraw(number) => {
                for operation in self.queue.iter_mut().chain(&mut self.waiting) {
                    operation.withdraw(number, &self.key);
                }
                self.drop_deserted();
            }
            Message::Stop => {
                for operation in self.queue.iter_mut().chain(&mut self.waiting) {
                    operation.fail(&self.key, &OperationError::ShuttingDown.into());
                }
                self.queue.clear();
                self.waiting.clear();
            }
            Message::GiveUp(name, by) => {
                self.fail_queued(&OperationError::EndedBy { by }.into(), |work| work.makes_or_deletes(&name));
            }
            Message::Forget(order) => self.orders.push(order),
            Message::NextTry(answer) => {
                let _ = answer.send((!self.round.is_empty()).then_some(self.settle_at));
            }
            Message::Wake => {
                self.settle_pause = SETTLE.0;
                self.settle_at = Instant::now();
            }
            Message::Recover(recovering) => self.recovering = Some(recovering),
            Message::Continue(subject, uid) => self.once(OperationRequest::Continue { subject, uid }),
            Message::Heal(key, uid) => self.once(OperationRequest::Heal { key, uid }),
            Message::Unbind(key, uid, bound) => self.once(OperationRequest::Unbind { key, uid, bound }),
            Message::Enlarge(key, uid, secrets) => self.once(OperationRequest::Enlarge { key, uid, secrets }),
        }
    }

    /// Ends the queued operations that `is_over` names, with `error`. It is asked about all of them, in their order.
    fn fail_queued(&mut self, error: &Error, mut is_over: impl FnMut(&OperationRequest) -> bool) {
        for operation in std::mem::take(&mut self.queue) {
            match is_over(&operation.work) {
                true => operation.answer(&self.key, Err(error.clone())),
                false => self.queue.push_back(operation),
            }
        }
    }

    /// Ends the queued detaches of forgotten attachments. They would call the plugin again. A detach behind another attach stays.
    fn fail_forgotten(&mut self) {
        for attachment in self.orders.take_forgotten() {
            let mut is_attached_again = false;
            self.fail_queued(&OperationError::Forgotten.into(), |work| {
                is_attached_again |= work.attaches(&attachment);
                !is_attached_again && work.detaches(&attachment)
            });
        }
    }

    /// Queues a request without a caller, unless the same is queued already.
    fn once(&mut self, work: OperationRequest) {
        let same =
            |queued: &Operation| queued.work.kind() == work.kind() && queued.work.subject() == work.subject();
        if !self.queue.iter().any(same) {
            self.queue.push_back(Operation::new(work));
        }
    }

    /// Ends queued operations that `end` cancels: an Unmount ends a Mount of the same key, a Release ends a Claim.
    fn cancel_queued(&mut self, end: &OperationRequest) {
        let mut ended = Vec::new();
        for queue in [&mut self.queue, &mut self.waiting] {
            if !queue.iter().any(|operation| end.ends(&operation.work)) {
                continue;
            }
            for operation in std::mem::take(queue) {
                if end.ends(&operation.work) {
                    ended.extend(operation.queued.clone());
                    operation.answer(&self.key, Err(OperationError::EndedBy { by: end.kind() }.into()));
                } else {
                    queue.push_back(operation);
                }
            }
        }
        self.end_claims(ended);
    }

    /// Has the claims ended that wait at the servers of a cluster for these operations, which are over.
    fn end_queued<'a>(&mut self, over: impl IntoIterator<Item = &'a Operation>) {
        let ended = over.into_iter().filter_map(|operation| operation.queued.clone()).collect();
        self.end_claims(ended);
    }

    fn end_claims(&mut self, ended: Vec<(ClaimKey, u32)>) {
        for (key, uid) in ended {
            self.once(OperationRequest::Continue { subject: Subject::Claim(key), uid });
        }
    }

    /// Removes operations without callers that end with their callers, before they begin.
    fn drop_deserted(&mut self) {
        let is_wanted =
            |operation: &Operation| !operation.waiters.is_empty() || !operation.ends_with_its_callers();
        self.queue.retain(is_wanted);
        // A waiting operation has done nothing yet, but for a claim that waits at the servers.
        let is_over = |operation: &Operation| operation.waiters.is_empty();
        let ended: Vec<_> =
            self.waiting.iter().filter(|operation| is_over(operation)).map(|of| of.queued.clone()).collect();
        self.waiting.retain(|operation| !is_over(operation));
        if !ended.is_empty() {
            self.end_claims(ended.into_iter().flatten().collect());
            self.retry_waiting();
        }
    }

    /// Returns the earliest of the deadlines of queued callers and of the waits for claims that end after `after`. `None`: there
    /// is none.
    fn next_deadline(&self, after: Option<Instant>) -> Option<Instant> {
        let waiters = self.queue.iter().chain(&self.waiting).flat_map(|operation| &operation.waiters);
        let waits = self.waiting.iter().filter_map(|operation| operation.work.waits_until());
        let waits = waits.filter(|until| after.is_none_or(|after| *until > after));
        waiters.filter_map(|waiter| waiter.deadline).chain(waits).min()
    }

    /// Carries out the orders of root while no operation runs.
    async fn carry_out(&mut self, rows: &mut JournaledVolume) {
        let signals = ActorSignals { abandon: None, preempt: false, give_up: Instant::now() };
        let (_sender, signals) = watch::channel(signals);
        let running = RunningOperation::new(signals, Progress::new(), Arc::clone(&self.orders));
        Executor::new(&self.shared, rows, running).carry_out().await;
        self.fail_forgotten();
        self.retry_waiting();
    }

    async fn perform(&mut self, mut current: Operation, rows: &mut JournaledVolume) {
        if !current.work.renew(rows.volume()) {
            return current.answer(&self.key, Ok(OperationResponse::Gone));
        }
        let begun = current.begun.unwrap_or_else(Instant::now);
        let (retries, taken) = (self.retries, self.orders.taken());
        let patience = self.shared.config.borrow().deadlines.operation;
        let give_up = |current: &Operation| match current.work {
            ref work if work.is_undone() || work.is_restore() => {
                let ends = current.waiters.iter().map(|waiter| waiter.deadline.unwrap_or(begun + patience));
                ends.max().unwrap_or(begun + patience)
            }
            ref work if work.is_tried_once() => begun,
            // A caller's deadline ends only its own wait.
            _ => begun + patience,
        };
        let preempt = self.next_once(&current).is_some();
        let (signals, receiver) =
            watch::channel(ActorSignals { abandon: None, preempt, give_up: give_up(&current) });
        let was_there = current.work.subject().mount().is_some_and(|key| rows.volume().mount(key).is_some());
        let anonymous = current.anonymous_ticket(&self.shared, &self.key, rows.volume());
        self.recovering = None;
        // The row of its claim is that of this operation, as long as it has waited.
        let waits = self.waiting.iter().chain([&current]).filter_map(|operation| operation.queued.as_ref());
        let queued = waits.map(|(key, _)| key.consumer.clone()).collect();
        current.step.set_queued(None);
        let names = current.names();
        let is_ahead = |operation: &&Operation| current.number == 0 || operation.number < current.number;
        let ahead: Vec<Arc<Claim>> = match current.work.claim() {
            Some(_) => self
                .waiting
                .iter()
                .filter(is_ahead)
                .filter_map(|operation| operation.work.claim().cloned())
                .collect(),
            None => Vec::new(),
        };

        let expands_first = self.waiting.iter().any(|operation| operation.work.expands());

        // The operation has the rows; the actor handles messages meanwhile.
        let shared = self.shared.clone();
        let running = RunningOperation::new(receiver, current.step.clone(), Arc::clone(&self.orders));
        let waits_until = current.work.waits_until();
        let running = RunningOperation { expands_first, waits_until, queued, ..running };
        let executor = Executor::new(&shared, rows, running);
        let mut running: Running<'_> = Box::pin(executor.run(current.request(), names, &ahead));
        let orders = Arc::clone(&self.orders);
        let result = loop {
            // After the commit point an expired caller stays. Its deadline is handled once, when it sets `abandon`.
            let is_over = current.step.is_decided() && signals.borrow().abandon.is_some();
            let own = current.waiters.iter().filter(|_| !is_over).filter_map(|waiter| waiter.deadline);
            // An operation whose wait is over gets its last try after this operation.
            let deadline = own.chain(self.next_deadline(Some(Instant::now()))).min();
            tokio::select! {
                biased;
                done = &mut running => break done,
                // Before the inbox: a detach that is asked for after the order's answer stays.
                () = orders.forgot() => self.fail_forgotten(),
                // The directory holds the sender as long as the actor runs.
                Some(message) = self.inbox.recv() => self.while_running(message, &mut current, &signals),
                () = until(deadline) => {
                    if current.expire(Instant::now(), &self.key) {
                        self.desert(&current, &signals, Kind::TimedOut);
                    }
                    self.expire();
                }
            }
            signals.send_if_modified(|signals| {
                let wanted = give_up(&current);
                let others = !self.queue.is_empty() || self.retry.is_some();
                let preempt = (current.waiters.is_empty() && others) || self.next_once(&current).is_some();
                let changed = signals.give_up != wanted || signals.preempt != preempt;
                // A caller that leaves does not shorten the operation under way.
                signals.give_up = signals.give_up.max(wanted);
                signals.preempt = preempt;
                changed
            });
        };
        drop(running);
        drop(anonymous);
        self.fail_forgotten();
        if current.step.take_yield()
            && !current.waiters.is_empty()
            && let Some(once) = self.next_once(&current).and_then(|place| self.queue.remove(place))
        {
            current.begun = Some(begun);
            if was_there {
                current.work.found_mount();
            }
            self.queue.push_front(current);
            return self.queue.push_front(once);
        }
        let is_queued = current.step.queued().is_some();
        let claim = current.work.claim().filter(|_| is_queued);
        current.queued = claim.map(|claim| {
            let name = current.work.subject().volume();
            (ClaimKey::new(&name, &claim.consumer), claim.uid)
        });
        if let Some(step) = current.work.waits(&result, Instant::now())
            && !current.waiters.is_empty()
        {
            current.step.set(step);
            current.lacks_claim = current.work.lacks_claim(&result);
            return self.wait(current, retries);
        }
        self.end_queued([&current]);
        if let Some(claim) = current.work.claim().filter(|_| result.is_ok()) {
            // The other operations of the consumer no longer need a claim.
            let own = |waiting: &&mut Operation| {
                waiting.work.claim().is_some_and(|other| other.consumer == claim.consumer)
            };
            self.waiting.iter_mut().filter(own).for_each(|waiting| waiting.lacks_claim = false);
        }
        if current.work.frees(&result) || self.orders.taken() != taken {
            self.retry_waiting();
        }
        if result.is_ok() || !current.waiters.is_empty() {
            self.settle_pause = SETTLE.0;
            self.settle_at = Instant::now() + if result.is_ok() { Duration::ZERO } else { SETTLE.0 };
        }
        if let kind @ (OperationKind::Mount | OperationKind::Restore | OperationKind::Unmount) =
            current.work.kind()
        {
            self.shared.operations.count_steps(kind, &current.step);
        }
        // Without waiting operations this is due when the queue is empty.
        if !self.waiting.is_empty() {
            self.release(rows);
        }
        fault::around("answer", async { current.answer(&self.key, result) }).await;
    }

    fn while_running(
        &mut self,
        message: Message,
        current: &mut Operation,
        signals: &watch::Sender<ActorSignals>,
    ) {
        match message {
            Message::Ask(work, waiter) => self.ask_beside(work, waiter, current, signals),
            Message::Withdraw(number) if current.withdraw(number, &self.key) => {
                self.desert(current, signals, Kind::Cancelled);
            }
            Message::Stop => {
                current.fail(&self.key, &OperationError::ShuttingDown.into());
                self.take(message);
            }
            Message::GiveUp(name, by) if current.work.makes_or_deletes(&name) => {
                signals.send_modify(|signals| signals.abandon = Some(Kind::Cancelled));
                current.fail(&self.key, &OperationError::EndedBy { by }.into());
                self.take(Message::GiveUp(name, by));
            }
            Message::Forget(order) => {
                if current.work.is_given_up_by(&order) {
                    signals.send_modify(|signals| signals.abandon = Some(Kind::Cancelled));
                    if !current.step.is_decided() {
                        current.fail(&self.key, &OperationError::Forgotten.into());
                    }
                }
                self.orders.push(order);
            }
            message => self.take(message),
        }
    }

    /// Takes a request while `current` runs: refuses it, joins it to `current`, ends `current` for it, or queues it.
    fn ask_beside(
        &mut self,
        work: OperationRequest,
        waiter: Waiter,
        current: &mut Operation,
        signals: &watch::Sender<ActorSignals>,
    ) {
        // An abandoned operation is rolling back; new callers must not join it.
        let is_wanted = signals.borrow().abandon.is_none();
        let refusal = is_wanted.then(|| current.refuses(&work, &self.shared)).flatten();
        if let Some(error) = refusal.or_else(|| self.refusal(&work)) {
            return refuse(work, waiter, &self.key, error);
        }
        let ends = work.ends(&current.work);
        // Cancel before the request joins an earlier one: it also ends requests that were queued in between.
        self.cancel_queued(&work);
        if ends {
            // A CreateVolume that was sent is not abandoned: its answer has the id that the deletion needs.
            if !current.work.creates() || current.step.is_unasked() {
                signals.send_modify(|signals| signals.abandon = Some(Kind::Cancelled));
            }
            // After the commit point the callers receive the real outcome first.
            if !current.step.is_decided() {
                current.fail(&self.key, &OperationError::EndedBy { by: work.kind() }.into());
            }
            let mut operation = Operation::new(work);
            operation.join(&self.shared, waiter);
            self.queue.push_front(operation);
        } else if current.work.covers(&work)
            && (is_wanted || !(current.work.is_undone() || current.work.creates()))
        {
            current.work.wait_like(&work);
            current.join(&self.shared, waiter);
        } else {
            self.take(Message::Ask(work, waiter));
        }
    }

    /// Returns why a queued operation refuses `asked`. `None`: none refuses it. A queued restore refuses nothing, because its row may be
    /// gone when its turn comes.
    fn refusal(&self, asked: &OperationRequest) -> Option<Error> {
        let mut queued = self.queue.iter().chain(&self.waiting).filter(|queued| !queued.work.is_restore());
        queued.find_map(|queued| queued.refuses(asked, &self.shared))
    }

    /// Returns the place in the queue of an operation that is tried once and has its turn between two tries of `current`. `None`:
    /// there is none.
    fn next_once(&self, current: &Operation) -> Option<usize> {
        self.queue.iter().position(|queued| current.work.gives_way_to(&queued.work))
    }

    /// Abandons an operation whose last caller has left, if it ends with its callers, such as a Mount. Other operations continue.
    /// After the commit point nothing is rolled back, but the operation ends at once.
    fn desert(&self, current: &Operation, signals: &watch::Sender<ActorSignals>, why: Kind) {
        let ends = current.work.is_undone() || current.step.is_unasked();
        if current.step.is_decided() || (current.waiters.is_empty() && ends) {
            signals.send_if_modified(|signals| {
                let first = signals.abandon.is_none();
                signals.abandon.get_or_insert(why);
                first
            });
        }
    }
}

/// An operation that runs, with the rows of the volume.
type Running<'a> = Pin<Box<dyn Future<Output = Result<OperationResponse>> + Send + 'a>>;

/// Waits for a change of the registry after `seen`, once `place` is the first of its queue. Without a place it never returns.
async fn changed(place: Option<&Place>, shared: &Context, seen: u64) -> Result<u64, RegistryError> {
    let Some(place) = place else { return std::future::pending().await };
    place.becomes_first().await;
    shared.records.registry.changed(seen).await
}

/// Returns the subjects that need work without a caller.
fn unsettled(rows: &JournaledVolume) -> VecDeque<Subject> {
    let mounts = rows.volume().mounts.iter().filter(|row| work_of(row).is_some());
    let mounts = mounts.map(|row| Subject::Mount(row.key.clone()));
    let others = rows.unfinished().filter(|(_, work)| !work.parked).map(|(subject, _)| subject.clone());
    mounts.chain(others).collect()
}

/// Returns the request that a subject needs. `None`: it needs none.
fn next_of(rows: &JournaledVolume, subject: &Subject) -> Option<OperationRequest> {
    if let Some(mount) = subject.mount() {
        return rows.volume().mount(mount).and_then(work_of);
    }
    let (_, work) = rows.unfinished().find(|(of, work)| *of == subject && !work.parked)?;
    Some(OperationRequest::Continue { subject: subject.clone(), uid: work.uid })
}

fn work_of(row: &MountRow) -> Option<OperationRequest> {
    match row.phase {
        Phase::Mounting | Phase::Unmounting | Phase::Uncertain => {
            Some(OperationRequest::Settle { key: row.key.clone() })
        }
        Phase::Waiting if !row.lacks_secrets() => {
            Some(OperationRequest::Restore { wanted: DesiredMount::of(row) })
        }
        Phase::Mounted | Phase::Lost | Phase::Waiting => None,
    }
}

fn refuse(work: OperationRequest, waiter: Waiter, volume: &VolumeKey, error: Error) {
    let mut refused = Operation::new(work);
    refused.waiters.push(waiter);
    refused.answer(volume, Err(error));
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    use crate::config::{Config, Directories};
    use crate::host::Host;
    use crate::plugin::Plugins;
    use crate::store::Store;
    use crate::store::tests::opened;
    use crate::volume::api::requests::{Authority, Unmounting};
    use crate::volume::manager::Volumes;
    use crate::volume::model::step::tests::begun;
    use crate::volume::operation::table::{Begin, Progress};

    /// A request that came just before the damage is answered with it.
    #[tokio::test]
    async fn actor_ended_by_a_damaged_journal_is_no_stop() {
        let root = tempfile::tempdir().unwrap();
        let journal = root.path().join("journal");
        Store::open(&journal, root.path(), None).unwrap().0.close().await.unwrap();
        std::fs::write(journal.join("csid.db"), "no database").unwrap();
        let (store, loaded) = opened(&journal).unwrap();
        let (_config, config) = watch::channel(Arc::new(Config::default()));
        let directories = Directories {
            state: root.path().join("state"),
            runtime: root.path().join("run"),
            configuration: root.path().join("etc"),
        };
        let plugins = Plugins::start(
            &directories,
            SETTLE.0,
            store.clone(),
            Vec::new(),
            loaded.plugins,
            loaded.node_ids,
            Default::default(),
        );
        let shared = Volumes::new(
            store.clone(),
            Arc::new(store),
            plugins,
            Host::of_threads(),
            config,
            directories,
            None,
        )
        .shared;
        let volume = begun();
        let (volume_key, key) = (volume.row.key.clone(), volume.mounts[0].key.clone());
        shared.directory.enter(volume, Some(shared.operations.recovering()));
        tokio::task::yield_now().await;

        let work = OperationRequest::Unmount {
            key: key.clone(),
            authority: Authority::Any(0),
            how: Unmounting::default(),
            uncovered: None,
        };
        let begin = Begin {
            kind: work.kind(),
            subject: Some(work.subject()),
            volume: &volume_key,
            uid: 0,
            id: None,
            deadline: None,
            step: Progress::new(),
        };
        let ticket = shared.operations.begin(begin).unwrap();
        let (reply, answer) = oneshot::channel();
        let waiter = Waiter { ticket, arrived: None, deadline: None, hold: None, taken: None, reply };
        shared.directory.ask(&volume_key, work, waiter).unwrap();
        let error = shared.answered(answer).await.err().unwrap();
        assert_eq!(error.kind, Kind::StateCorrupt, "{error}");
        assert!(error.message.contains("csid refuses every change"), "{error}");
    }

    #[tokio::test]
    async fn recovered_rows_are_restoring_until_that_is_listed() {
        let root = tempfile::tempdir().unwrap();
        let (store, loaded) = Store::open(&root.path().join("journal"), root.path(), None).unwrap();
        let (_config, config) = watch::channel(Arc::new(Config::default()));
        let [state, runtime, configuration] = ["state", "run", "etc"].map(|name| root.path().join(name));
        let directories = Directories { state, runtime, configuration };
        let rows = (loaded.plugins, loaded.node_ids);
        let plugins = Plugins::start(
            &directories,
            SETTLE.0,
            store.clone(),
            Vec::new(),
            rows.0,
            rows.1,
            Default::default(),
        );
        let volumes = Volumes::new(
            store.clone(),
            Arc::new(store),
            plugins,
            Host::of_threads(),
            config,
            directories,
            None,
        );
        let mut volume = begun();
        Arc::make_mut(&mut volume.mounts[0]).phase = Phase::Waiting;
        assert!(!volumes.is_recovering());
        let recovering = volumes.shared.operations.recovering();
        volumes.shared.directory.enter(volume, Some(recovering));
        assert!(volumes.is_recovering() && volumes.operations().is_empty(), "the task has not run yet");
        while volumes.is_recovering() {
            tokio::task::yield_now().await;
        }
        assert_eq!(
            volumes.operations().iter().map(|view| view.kind).collect::<Vec<_>>(),
            [OperationKind::Restore]
        );
    }
}
