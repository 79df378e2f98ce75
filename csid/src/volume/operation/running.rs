//! The state of a running operation that the engine of claims and the mounts of this host share.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::watch;

use crate::error::{Kind, Result};
use crate::secret::Secrets;
use crate::store::registry::VolumeName;
use crate::volume::errors::claim::ClaimError;
use crate::volume::errors::operation::OperationError;
use crate::volume::operation::orders::{self, ActorSignals, Orders};
use crate::volume::operation::table::Progress;

/// The part of a running operation's state that the engine and the mounts share.
pub(in crate::volume) struct RunningOperation {
    pub(in crate::volume) signals: watch::Receiver<ActorSignals>,
    pub(in crate::volume) step: Progress,
    /// The secrets that the caller gave. `None`: none, or they are used up.
    pub(in crate::volume) secrets: Option<Secrets>,
    /// Orders of root to forget rows, which come while this runs.
    pub(in crate::volume) orders: Arc<Orders>,
    /// Whether an expansion waits until the volume is not in use. New claims and mounts are refused meanwhile.
    pub(in crate::volume) expands_first: bool,
    /// The end of the operation's wait for claims in its way. `None`: it does not wait.
    pub(in crate::volume) waits_until: Option<Instant>,
    /// The consumers whose claims wait at the servers of a cluster, for operations of this volume. Their rows are pending.
    pub(in crate::volume) queued: Vec<String>,
}

impl RunningOperation {
    /// Makes an operation without secrets.
    pub(in crate::volume) fn new(
        signals: watch::Receiver<ActorSignals>,
        step: Progress,
        orders: Arc<Orders>,
    ) -> Self {
        RunningOperation {
            signals,
            step,
            secrets: None,
            orders,
            expands_first: false,
            waits_until: None,
            queued: Vec::new(),
        }
    }

    /// Returns whether the operation's caller still waits for claims in its way.
    pub(in crate::volume) fn waits(&self) -> bool {
        self.waits_until.is_some_and(|until| until > Instant::now())
    }

    /// Returns a future that ends when the operation is abandoned and no order is carried out. An order that is dropped would be half
    /// done: its rows are changed, and perhaps not in the journal.
    pub(in crate::volume) fn abandoned(&self) -> impl Future<Output = Kind> + Send + use<> {
        let (mut signals, orders) = (self.signals.clone(), Arc::clone(&self.orders));
        async move {
            let kind = orders::abandoned(&mut signals).await;
            orders.ended().await;
            kind
        }
    }

    /// Marks the commit point (`Progress::decide`). Fails if the operation is abandoned.
    pub(in crate::volume) fn decide(&self) -> Result<()> {
        match self.signals.borrow().abandon {
            Some(kind) => Err(OperationError::Stopped { kind }.into()),
            None => {
                self.step.decide();
                Ok(())
            }
        }
    }

    /// Refuses new mounts while an expansion waits, since they could delay it for ever. Existing mounts may still be used.
    pub(in crate::volume) fn refuse_before_expansion(&self, name: &VolumeName, is_used: bool) -> Result<()> {
        match self.expands_first && !is_used {
            true => Err(ClaimError::ExpandsFirst { name: name.clone() }.into()),
            false => Ok(()),
        }
    }
}

/// Work on a subject that is left to do: the release of a claim of this node, or a controller call.
pub(in crate::volume) struct Unfinished {
    pub(in crate::volume) uid: u32,
    /// Whether it is retried only by a caller or by the sweep.
    pub(in crate::volume) parked: bool,
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    #[tokio::test]
    async fn abandoned_operation_ends_its_orders_first() {
        let abandon = Some(Kind::Cancelled);
        let signals = ActorSignals { abandon, preempt: false, give_up: Instant::now() };
        let (_sender, signals) = watch::channel(signals);
        let running = RunningOperation::new(signals, Progress::new(), Arc::default());
        let (first, nested) = (running.orders.begin(), running.orders.begin());
        let mut end = pin!(running.abandoned());
        drop(nested);
        assert!(futures_util::poll!(&mut end).is_pending(), "an order is carried out");
        drop(first);
        assert_eq!(end.await, Kind::Cancelled);
    }
}
