//! Handles of the rooms that a call may reach, and csid's own state.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};

use super::limits::Limits;
use crate::cluster::Node;
use crate::config::Config;
use crate::error::Result;
use crate::plugin::Plugins;
use crate::store::Store;
use crate::volume::Volumes;

/// The Manager's `State`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Starting,
    Restoring,
    Ready,
    Degraded,
    Stopping,
}

impl State {
    pub fn as_str(self) -> &'static str {
        match self {
            State::Starting => "starting",
            State::Restoring => "restoring",
            State::Ready => "ready",
            State::Degraded => "degraded",
            State::Stopping => "stopping",
        }
    }
}

/// Handles of the rooms that calls reach. `State::Stopping` ends [`super::serve_socket`] and [`super::serve_bus`].
#[derive(Clone)]
pub struct Rooms {
    pub volumes: Volumes,
    pub plugins: Plugins,
    pub store: Store,
    pub state: watch::Receiver<State>,
    /// Requests to the daemon to read its configuration again. It answers with the configuration's error.
    pub reload: mpsc::Sender<oneshot::Sender<Result<()>>>,
    pub config: watch::Receiver<Arc<Config>>,
    /// Counts of calls in progress, by uid, with one count for the socket and the bus.
    pub limits: Limits,
    /// This host as a node of a cluster. `None`: it has none.
    pub node: Option<Arc<Node>>,
}
