//! State that the thread publishes without a request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use tokio::sync::{broadcast, watch};

use crate::store::counts::Counts;
use crate::store::rows::Event;

/// State that the thread publishes without a request.
pub(super) struct Published {
    pub(super) journal_id: String,
    pub(super) node: String,
    pub(super) modify_index: AtomicU64,
    pub(super) sequence: AtomicU64,
    pub(super) events: broadcast::Sender<Arc<Event>>,
    pub(super) health: watch::Sender<Health>,
    /// The index of the registry's newest change; its sender is the thread's.
    pub(super) registry: watch::Receiver<u64>,
    /// Whether there is or was a record since the journal was opened.
    pub(super) has_records: AtomicBool,
    pub(super) counts: Counts,
}

/// The state of the journal's file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Health {
    #[default]
    Sound,
    /// The journal is damaged, for this reason. Nothing is written any more.
    Damaged(String),
    /// A new journal has taken the damaged one's place. csid has to start again with it.
    Replaced,
}
