//! The turn of an operation: its part of the state that the engine of claims and the mounts of this host share.

use std::sync::Arc;

use tokio::sync::watch;

use crate::error::Result;
use crate::secret::Secrets;
use crate::volume::errors::mount as mount_errors;
use crate::volume::operation::orders::{Orders, Signals};
use crate::volume::operation::table::Progress;

/// One operation of a volume while it runs.
pub(in crate::volume) struct Turn {
    pub(in crate::volume) signals: watch::Receiver<Signals>,
    pub(in crate::volume) step: Progress,
    /// The secrets that the caller gave. `None`: none, or they are used up.
    pub(in crate::volume) secrets: Option<Secrets>,
    /// Orders of root to forget rows, which come while this runs.
    pub(in crate::volume) orders: Arc<Orders>,
    /// Whether an expansion waits until the volume is not in use. New claims and mounts are refused meanwhile.
    pub(in crate::volume) expands_first: bool,
}

impl Turn {
    /// Makes the turn of an operation without secrets.
    pub(in crate::volume) fn new(
        signals: watch::Receiver<Signals>,
        step: Progress,
        orders: Arc<Orders>,
    ) -> Self {
        Turn { signals, step, secrets: None, orders, expands_first: false }
    }

    /// Marks the commit point (`Progress::decide`). Fails if the operation is abandoned.
    pub(in crate::volume) fn decide(&self) -> Result<()> {
        match self.signals.borrow().abandon {
            Some(kind) => Err(mount_errors::stopped(kind)),
            None => {
                self.step.decide();
                Ok(())
            }
        }
    }
}
