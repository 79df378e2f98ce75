//! Plugins: the registry, one task per instance of a plugin, and what `volume` calls.
//!
//! ```text
//!   registry ── one per instance ──> task ── owns ──> channel, fingerprint, health, supervise (its unit)
//!    lookup                           │ watch
//!      ├── ready() ─────> node::Ready: the newest, stage, publish … ──────────────> rpc ──> the plugin
//!      └── controller() ─> controller::Controller: the least busy, attach, create … ──┘
//! ```
//!
//! Each instance's channel, capabilities and health belong to its task alone; the others hold a handle and a
//! watch. The registry holds which there are; the journal those that were registered on the bus. What always
//! holds: plugins never wait for each other, nor an instance for another of its own; csid's stop leaves every
//! plugin running, and its start adopts those that run; a mount costs no capability call; no message, log line or
//! event of this room holds a secret, a context's value or a mount flag.

mod answer;
mod channel;
mod common;
mod controller;
mod errors;
mod events;
pub mod files;
mod fingerprint;
mod instance;
mod lookup;
mod namespace;
mod network;
mod node;
mod node_ids;
mod place;
mod profile;
mod registrar;
mod registry;
mod rpc;
mod rpc_outcome;
mod self_registered;
mod spec;
mod stats;
mod supervise;
mod tally;
mod task;
#[cfg(test)]
mod tests;
mod trust;
mod unit_settings;
mod view;
mod visible;
mod wire;

pub use crate::host::exec::{Run, Size};
pub use crate::host::log::Lines;
pub use common::{EarlierSecrets, HeldDirectories};
pub use controller::{CallContext, Controller, Create, Created, External, Snapshot, Source};
pub use network::Network;
pub use node::{Measure, NodeCall, Ready, Stats};
pub use profile::Profile;
pub use registry::{AppliedFiles, Exec, Plugins, moved_under};
pub use rpc::{RpcError, code_name};
pub use rpc_outcome::{
    Class, RpcKind, RpcOutcome, is_attached_otherwise, is_gone, proves_no_effect, restarts_list,
};
pub use spec::{Log, PluginSpec, Supervision, validate_id};
pub use stats::{InstanceStats, PluginStats};
pub use tally::RpcCount;
pub use view::{ATTACHES, Can, PluginChange, PluginView, Service};
