//! Orders to an operation while it runs: to stop, to give way to another one, or to forget a row.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::{Notify, oneshot, watch};

use crate::error::{Kind, Result};
use crate::volume::model::subject::Subject;

/// Signals of the actor to its running operation.
#[derive(Clone, Debug)]
pub(in crate::volume) struct ActorSignals {
    /// Why the operation is abandoned; `None`: it is not.
    pub(in crate::volume) abandon: Option<Kind>,
    /// Whether another operation waits that has its turn before the next try: this one has no caller, or that one is tried once.
    pub(in crate::volume) preempt: bool,
    /// The time when retries of the operation end.
    pub(in crate::volume) give_up: Instant,
}

pub(in crate::volume) async fn abandoned(signals: &mut watch::Receiver<ActorSignals>) -> Kind {
    let kind = signals.wait_for(|signals| signals.abandon.is_some()).await.map(|signals| signals.abandon);
    match kind {
        Ok(kind) => kind.unwrap_or(Kind::Cancelled),
        // The actor that gives orders is gone, and with it the operation.
        Err(_) => std::future::pending().await,
    }
}

/// Resolves when the operation is preempted or abandoned.
pub(in crate::volume) async fn preempted(signals: &mut watch::Receiver<ActorSignals>) {
    if signals.wait_for(|signals| signals.preempt || signals.abandon.is_some()).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// An order of root to forget rows, with its reply.
pub(in crate::volume) struct Order {
    /// A mount, a claim with all mounts of its consumer, or an attachment by AttachVolume.
    pub(in crate::volume) subject: Subject,
    /// Whether every mount of the mount's consumer is forgotten, whatever its tag.
    pub(in crate::volume) all_tags: bool,
    pub(in crate::volume) reply: oneshot::Sender<Result<()>>,
}

/// The orders to forget rows that an actor has received, for the operation that runs.
#[derive(Default)]
pub(in crate::volume) struct Orders {
    queue: Mutex<VecDeque<Order>>,
    came: Notify,
    /// How many orders are carried out. One may wait for a plugin while another one is carried out.
    under_way: watch::Sender<usize>,
    taken: AtomicU64,
    /// The attachments whose rows were deleted, until the actor takes them.
    forgotten: Mutex<Vec<Subject>>,
    forgot: Notify,
}

impl Orders {
    fn queue(&self) -> MutexGuard<'_, VecDeque<Order>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::volume) fn push(&self, order: Order) {
        self.queue().push_back(order);
        self.came.notify_waiters();
    }

    /// Waits until no order is carried out.
    pub(in crate::volume) async fn ended(&self) {
        // The sender lives as long as `self`.
        let _ = self.under_way.subscribe().wait_for(|orders| *orders == 0).await;
    }

    /// Begins to carry out orders, until the value is dropped.
    pub(in crate::volume) fn begin(&self) -> UnderWay<'_> {
        self.under_way.send_modify(|orders| *orders += 1);
        UnderWay(self)
    }

    pub(in crate::volume) fn take(&self) -> Option<Order> {
        let order = self.queue().pop_front();
        self.taken.fetch_add(u64::from(order.is_some()), Ordering::Relaxed);
        order
    }

    fn forgotten(&self) -> MutexGuard<'_, Vec<Subject>> {
        self.forgotten.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that an order has deleted the row of an attachment, and wakes the actor.
    pub(in crate::volume) fn note_forgotten(&self, attachment: Subject) {
        self.forgotten().push(attachment);
        self.forgot.notify_one();
    }

    /// Waits until an attachment was forgotten. It may return though none was since the last [`Orders::take_forgotten`].
    pub(in crate::volume) async fn forgot(&self) {
        self.forgot.notified().await;
    }

    pub(in crate::volume) fn take_forgotten(&self) -> Vec<Subject> {
        std::mem::take(&mut self.forgotten())
    }

    /// Returns how many orders were taken.
    pub(in crate::volume) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    pub(in crate::volume) fn is_empty(&self) -> bool {
        self.queue().is_empty()
    }

    /// Waits until there is an order.
    pub(in crate::volume) async fn came(&self) {
        loop {
            let mut came = pin!(self.came.notified());
            came.as_mut().enable();
            if !self.is_empty() {
                return;
            }
            came.await;
        }
    }
}

/// Orders are carried out as long as this lives.
pub(in crate::volume) struct UnderWay<'a>(&'a Orders);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.under_way.send_modify(|orders| *orders -= 1);
    }
}

/// Sleeps until the deadline; without one, for ever.
pub(in crate::volume) async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
