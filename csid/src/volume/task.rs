//! The task of one volume: its queue, first in first out, one operation at a time (CSI rule 18), and the callers who wait.
//!
//! It exists while there is work and owns the volume's rows meanwhile; a volume at rest is rows only. An operation runs
//! beside the inbox, so that a caller joins, gives up or cancels while an RPC hangs. What an operation is: `work`.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot, watch};

use crate::error::{Error, Kind, Result};
use crate::fault;
use crate::store::registry::{Bound, Claim};
use crate::store::rows::{MountKey, MountRow, Phase, VolumeKey};
use crate::volume::control::Control;
use crate::volume::journalled::Journalled;
use crate::volume::state::{Volume, Wanted};
use crate::volume::work::{Done, Operation, Waiter, Work};
use crate::volume::{Shared, say, shutting_down};

/// The first and the longest pause between two tries of what nobody waits for.
const SETTLE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

#[expect(clippy::large_enum_variant, reason = "most messages are the large one")]
pub(super) enum Message {
    Ask(Work, Waiter),
    /// CancelOperation: this caller waits no more.
    Withdraw(u64),
    /// Look for rows that wait or are unsettled, at once.
    Wake,
    /// Go on with the claim of this consumer, for this uid.
    Continue(MountKey, u32),
    /// This mount, of this uid, has lost its server.
    Heal(MountKey, u32),
    /// Explain: when the next try of what nobody waits for is.
    NextTry(oneshot::Sender<Option<Instant>>),
    /// What this consumer's claim, of this uid, is bound to has ended.
    Unbind(MountKey, u32, Bound),
    /// csid stops: answer everybody.
    Stop,
}

pub(super) struct Task {
    shared: Arc<Shared>,
    key: VolumeKey,
    inbox: mpsc::UnboundedReceiver<Message>,
    queue: VecDeque<Operation>,
    /// What waits for claims and mounts in its way to end, in the order it came.
    waiting: VecDeque<Operation>,
    /// The change of the registry that those who wait for another volume have seen.
    seen: u64,
    /// Rows that are to be settled before the next pause.
    round: VecDeque<MountKey>,
    settle_pause: Duration,
    settle_at: Instant,
}

impl Task {
    /// Work on `volume` until there is nothing left to do.
    pub(super) async fn run(shared: Arc<Shared>, volume: Volume, inbox: mpsc::UnboundedReceiver<Message>) {
        let mut task = Task {
            shared,
            key: volume.row.key.clone(),
            inbox,
            queue: VecDeque::new(),
            waiting: VecDeque::new(),
            seen: 0,
            round: VecDeque::new(),
            settle_pause: SETTLE.0,
            settle_at: Instant::now(),
        };
        task.work(Journalled::new(volume)).await;
    }

    async fn work(&mut self, mut rows: Journalled) {
        loop {
            while let Ok(message) = self.inbox.try_recv() {
                self.take(message);
            }
            if let Some(operation) = self.queue.pop_front() {
                self.perform(operation, &mut rows).await;
                continue;
            }
            // What a caller has settled meanwhile is not waited for.
            self.round.retain(|key| next_of(&rows, key).is_some());
            if self.round.is_empty() {
                self.round = unsettled(&rows);
            }
            if self.round.is_empty() && self.waiting.is_empty() {
                match self.shared.directory.rest(&self.key, rows, &self.inbox) {
                    None => return,
                    Some(busy) => rows = busy,
                }
                continue;
            }
            // With a damaged journal nothing can be settled: csid begins anew with another one.
            if self.shared.is_stopping() || self.shared.store.writable().is_err() {
                return;
            }
            if self.waiting.is_empty() {
                self.shared.directory.release(&self.key, rows.volume(), &self.inbox);
            }
            let settle_at = (!self.round.is_empty()).then_some(self.settle_at);
            let deadline = self.next_deadline();
            let for_others = self.waiting.iter().any(Operation::waits_for_another_volume);
            tokio::select! {
                message = self.inbox.recv() => match message {
                    Some(message) => self.take(message),
                    None => return,
                },
                Ok(index) = self.shared.registry.changed(self.seen), if for_others => {
                    self.seen = index;
                    self.retry_waiting();
                }
                () = until(deadline) => self.expire(),
                () = until(settle_at) => self.settle_one(&mut rows).await,
            }
        }
    }

    /// Answer those who wait for their turn and whose deadline has passed; a claim that has waited as long as it was to has
    /// its last try.
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

    /// Whoever waits for a claim is next, in the order they came.
    fn retry_waiting(&mut self) {
        for waiting in std::mem::take(&mut self.waiting).into_iter().rev() {
            self.queue.push_front(waiting);
        }
    }

    /// Try the next row of the round; the pause is between rounds, so that one that cannot be settled keeps no other waiting.
    async fn settle_one(&mut self, rows: &mut Journalled) {
        let next = self.round.pop_front().and_then(|key| next_of(rows, &key));
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
                // Before it joins an earlier one: it ends also what was asked for in between.
                self.cancel_queued(&work);
                if let Some(same) = self.queue.iter_mut().find(|queued| queued.work.covers(&work)) {
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
                    operation.fail(&self.key, &shutting_down());
                }
                self.queue.clear();
                self.waiting.clear();
            }
            Message::NextTry(answer) => {
                let _ = answer.send((!self.round.is_empty()).then_some(self.settle_at));
            }
            Message::Wake => {
                self.settle_pause = SETTLE.0;
                self.settle_at = Instant::now();
            }
            Message::Continue(key, uid) => self.once(Work::Continue { key, uid }),
            Message::Heal(key, uid) => self.once(Work::Heal { key, uid }),
            Message::Unbind(key, uid, bound) => self.once(Work::Unbind { key, uid, bound }),
        }
    }

    /// Queue what nobody waits for, unless it is queued already.
    fn once(&mut self, work: Work) {
        let same = |queued: &Operation| queued.work.kind() == work.kind() && queued.work.key() == work.key();
        if !self.queue.iter().any(same) {
            self.queue.push_back(Operation::new(work));
        }
    }

    /// Unmount ends a Mount of the same identity that has not begun, Release a Claim.
    fn cancel_queued(&mut self, end: &Work) {
        for queue in [&mut self.queue, &mut self.waiting] {
            for operation in std::mem::take(queue) {
                if end.ends(&operation.work) {
                    operation.answer(&self.key, Err(say::ended_by(end.kind())));
                } else {
                    queue.push_back(operation);
                }
            }
        }
    }

    /// A Mount or Claim that waits in the queue for nobody is not begun.
    fn drop_deserted(&mut self) {
        let is_wanted = |operation: &Operation| !operation.waiters.is_empty() || !operation.work.is_undone();
        self.queue.retain(is_wanted);
        let before = self.waiting.len();
        // What waits has done nothing yet.
        self.waiting.retain(|operation| !operation.waiters.is_empty());
        if self.waiting.len() < before {
            self.retry_waiting();
        }
    }

    /// The first deadline of those who wait for their turn.
    fn next_deadline(&self) -> Option<Instant> {
        let waiters = self.queue.iter().chain(&self.waiting).flat_map(|operation| &operation.waiters);
        let waits = self.waiting.iter().filter_map(|operation| operation.work.waits_until());
        waiters.filter_map(|waiter| waiter.deadline).chain(waits).min()
    }

    async fn perform(&mut self, mut current: Operation, rows: &mut Journalled) {
        let begun = Instant::now();
        let patience = self.shared.config.borrow().deadlines.operation;
        let give_up = |current: &Operation| match current.work {
            ref work if work.is_undone() || matches!(work, Work::Restore { .. }) => {
                let ends = current.waiters.iter().map(|waiter| waiter.deadline.unwrap_or(begun + patience));
                ends.max().unwrap_or(begun + patience)
            }
            // A deadline ends the waiting only.
            _ => begun + patience,
        };
        let (control, orders) =
            watch::channel(Control { abandon: None, hurry: false, give_up: give_up(&current) });
        let anonymous = current.anonymous_ticket(&self.shared, &self.key, rows.volume());
        let names = current.names();
        let ahead: Vec<Claim> =
            self.waiting.iter().filter_map(|operation| operation.work.claim().cloned()).collect();

        let expands_first = self.waiting.iter().any(|operation| operation.work.expands());

        // The operation has the rows; everything else of the task goes on beside it.
        let shared = self.shared.clone();
        let mut running: Running<'_> = Box::pin(current.job(names).run(
            &shared,
            rows,
            orders,
            current.step.clone(),
            &ahead,
            expands_first,
        ));
        let result = loop {
            // Who would leave what is decided is seen once.
            let is_over = current.step.is_decided() && control.borrow().abandon.is_some();
            let own = current.waiters.iter().filter(|_| !is_over).filter_map(|waiter| waiter.deadline);
            let deadline = own.chain(self.next_deadline()).min();
            tokio::select! {
                biased;
                done = &mut running => break done,
                // The directory holds the other end as long as the task runs.
                Some(message) = self.inbox.recv() => self.while_running(message, &mut current, &control),
                () = until(deadline) => {
                    if current.expire(Instant::now(), &self.key) {
                        self.desert(&current, &control, Kind::TimedOut);
                    }
                    self.expire();
                }
            }
            control.send_if_modified(|control| {
                let wanted = give_up(&current);
                let hurry = current.waiters.is_empty() && !self.queue.is_empty();
                let changed = control.give_up != wanted || control.hurry != hurry;
                // Waiters who left do not shorten what is under way.
                control.give_up = control.give_up.max(wanted);
                control.hurry = hurry;
                changed
            });
        };
        drop(running);
        drop(anonymous);
        if let Some(step) = current.work.waits(&result, Instant::now())
            && !current.waiters.is_empty()
        {
            current.step.set(step);
            return self.waiting.push_back(current);
        }
        if current.work.frees(&result) {
            self.retry_waiting();
        }
        if result.is_ok() || !current.waiters.is_empty() {
            self.settle_pause = SETTLE.0;
            self.settle_at = Instant::now() + if result.is_ok() { Duration::ZERO } else { SETTLE.0 };
        }
        fault::around("answer", async { current.answer(&self.key, result) }).await;
    }

    fn while_running(&mut self, message: Message, current: &mut Operation, control: &watch::Sender<Control>) {
        match message {
            Message::Ask(work, waiter) => self.ask_beside(work, waiter, current, control),
            Message::Withdraw(number) if current.withdraw(number, &self.key) => {
                self.desert(current, control, Kind::Cancelled);
            }
            Message::Stop => {
                current.fail(&self.key, &shutting_down());
                self.take(message);
            }
            message => self.take(message),
        }
    }

    /// Work that is asked for while `current` runs: refused, joined, the end of a Mount, or queued.
    fn ask_beside(
        &mut self,
        work: Work,
        waiter: Waiter,
        current: &mut Operation,
        control: &watch::Sender<Control>,
    ) {
        // What is being undone for want of callers is nobody's any more.
        let is_wanted = control.borrow().abandon.is_none();
        let refusal = is_wanted.then(|| current.refuses(&work, &self.shared)).flatten();
        if let Some(error) = refusal.or_else(|| self.refusal(&work)) {
            return refuse(work, waiter, &self.key, error);
        }
        let ends = work.ends(&current.work);
        // Before it joins an earlier one: it ends also what was asked for in between.
        self.cancel_queued(&work);
        if ends {
            control.send_modify(|control| control.abandon = Some(Kind::Cancelled));
            // What is decided is had, and answered so, before it ends.
            if !current.step.is_decided() {
                current.fail(&self.key, &say::ended_by(work.kind()));
            }
            let mut operation = Operation::new(work);
            operation.join(&self.shared, waiter);
            self.queue.push_front(operation);
        } else if current.work.covers(&work) && (is_wanted || !current.work.is_undone()) {
            current.join(&self.shared, waiter);
        } else {
            self.take(Message::Ask(work, waiter));
        }
    }

    /// Why something that is queued does not go with `asked`.
    fn refusal(&self, asked: &Work) -> Option<Error> {
        self.queue.iter().chain(&self.waiting).find_map(|queued| queued.refuses(asked, &self.shared))
    }

    /// When no caller waits any more, a Mount is undone; all else goes on to its end. What is decided is not undone, but
    /// comes to its end at once.
    fn desert(&self, current: &Operation, control: &watch::Sender<Control>, why: Kind) {
        if current.step.is_decided() || (current.waiters.is_empty() && current.work.is_undone()) {
            control.send_if_modified(|control| {
                let first = control.abandon.is_none();
                control.abandon.get_or_insert(why);
                first
            });
        }
    }
}

/// An operation that runs, with the volume's rows.
type Running<'a> = Pin<Box<dyn Future<Output = Result<Done>> + Send + 'a>>;

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

/// The rows and claims that leave something to be done without being asked.
fn unsettled(rows: &Journalled) -> VecDeque<MountKey> {
    let mounts = rows.volume().mounts.iter().filter(|row| work_of(row).is_some()).map(|row| &row.key);
    mounts.chain(rows.unfinished().filter(|(_, claim)| !claim.parked).map(|(key, _)| key)).cloned().collect()
}

/// What is to be done for a row or a claim.
fn next_of(rows: &Journalled, key: &MountKey) -> Option<Work> {
    let claim = || {
        let (_, claim) = rows.unfinished().find(|(of, claim)| *of == key && !claim.parked)?;
        Some(Work::Continue { key: key.clone(), uid: claim.uid })
    };
    rows.volume().mount(key).and_then(work_of).or_else(claim)
}

fn work_of(row: &MountRow) -> Option<Work> {
    match row.phase {
        Phase::Mounting | Phase::Unmounting | Phase::Uncertain => Some(Work::Settle { key: row.key.clone() }),
        Phase::Waiting if !row.lacks_secrets() => Some(Work::Restore { wanted: Wanted::of(row) }),
        Phase::Mounted | Phase::Lost | Phase::Waiting => None,
    }
}

fn refuse(work: Work, waiter: Waiter, volume: &VolumeKey, error: Error) {
    let mut refused = Operation::new(work);
    refused.waiters.push(waiter);
    refused.answer(volume, Err(error));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Directories};
    use crate::host::Host;
    use crate::plugin::Plugins;
    use crate::store::Store;
    use crate::volume::operations::{Begin, Step};
    use crate::volume::state::tests::begun;
    use crate::volume::{Authority, Volumes};

    /// Who asked just before, and is read by nobody any more, is told of the damage.
    #[tokio::test]
    async fn a_task_that_a_damaged_journal_ended_is_not_called_a_stop() {
        let root = tempfile::tempdir().unwrap();
        let journal = root.path().join("journal");
        Store::open(&journal, root.path(), None).unwrap().0.close().await.unwrap();
        std::fs::write(journal.join("csid.db"), "no database").unwrap();
        let (store, loaded) = Store::open(&journal, root.path(), None).unwrap();
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
        );
        let shared = Volumes::new(store, plugins, Host::new(), config, directories).shared;
        let volume = begun();
        let (volume_key, key) = (volume.row.key.clone(), volume.mounts[0].key.clone());
        shared.directory.enter(&shared, volume, true);
        tokio::task::yield_now().await;

        let work = Work::Unmount { key: key.clone(), authority: Authority::Any(0), force: false };
        let begin = Begin {
            kind: work.kind(),
            key: &key,
            volume: &volume_key,
            uid: 0,
            id: None,
            deadline: None,
            step: Step::new(),
        };
        let ticket = shared.operations.begin(begin).unwrap();
        let (reply, answer) = oneshot::channel();
        let waiter = Waiter { ticket, deadline: None, hold: None, reply };
        shared.directory.ask(&shared, &volume_key, work, waiter).unwrap();
        let error = shared.answered(answer).await.err().unwrap();
        assert_eq!(error.kind, Kind::StateCorrupt, "{error}");
        assert!(error.message.contains("csictl reconcile --new-journal"), "{error}");
    }
}
