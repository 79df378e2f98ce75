//! D-Bus: decode, authorise, one call inward, encode; nothing else.
//!
//! It owns connections, and nothing that outlives one: no volume, no plugin, no operation. What always holds: every call
//! passes [`dispatch`], which knows each member that is served and the action it needs, and refuses what it does not know;
//! a handler cannot be called without a [`authorise::Permit`], which only the authoriser makes; nothing of a message's body is
//! looked at before that. A lost connection ends no operation, and a peer that does not read stops being read from.
//! Why there is no object server of zbus: docs/decisions/0001-own-dispatcher.md.

mod authorise;
mod caller;
mod claims;
mod dispatch;
mod exec;
mod fds;
mod given;
mod introspect;
mod inventory;
mod limits;
mod manager;
mod mounts;
mod options;
mod plugin;
mod polkit;
mod serve;
mod signals;
mod socket;
mod standard;
mod upgrade;
mod volume_rows;
mod volumes;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};

use crate::config::Config;
use crate::error::Result;
use crate::plugin::Plugins;
use crate::store::Store;
use crate::volume::Volumes;

pub use limits::Limits;
pub use serve::{serve_bus, serve_socket};

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

/// The handles of the rooms that calls go to. `State::Stopping` ends [`serve_socket`] and [`serve_bus`].
#[derive(Clone)]
pub struct Rooms {
    pub volumes: Volumes,
    pub plugins: Plugins,
    pub store: Store,
    pub state: watch::Receiver<State>,
    /// Asks the daemon to read its configuration again; it answers with the configuration's error.
    pub reload: mpsc::Sender<oneshot::Sender<Result<()>>>,
    pub config: watch::Receiver<Arc<Config>>,
    /// Calls under way, by uid: one count for the socket and the bus.
    pub limits: Limits,
}
