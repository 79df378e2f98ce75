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
mod controller;
mod events;
pub mod files;
mod fingerprint;
mod instance;
mod lookup;
mod network;
mod node;
mod node_ids;
mod profile;
mod registrar;
mod registry;
mod rpc;
mod spec;
mod stats;
mod supervise;
mod tally;
mod task;
#[cfg(test)]
mod tests;
mod trust;
mod visible;

use std::collections::BTreeMap;

pub use crate::host::exec::{Run, Size};
pub use crate::host::log::Lines;
pub use controller::{Controller, Create, Created, External, Request, Snapshot, Source};
pub use network::Network;
pub use node::{Call, Measure, Ready, Stats};
pub use profile::Profile;
pub use registry::{Applied, Exec, Plugins};
pub use rpc::{Class, RpcError, code_name};
pub use spec::{Log, PluginSpec, Supervision, validate_id};
pub use stats::{InstanceStats, PluginStats};
pub use tally::RpcCount;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    Node,
    Controller,
}

/// What a plugin can do by one of its services, or by itself: a capability by CSI's name for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Can {
    Plugin(&'static str),
    Node(&'static str),
    Controller(&'static str),
}

/// Its volumes are attached to a node before they are staged.
pub const ATTACHES: Can = Can::Controller("PUBLISH_UNPUBLISH_VOLUME");

impl Service {
    /// The contract's word, as in WaitForPlugin.
    pub fn name(self) -> &'static str {
        match self {
            Service::Node => "node",
            Service::Controller => "controller",
        }
    }
}

/// The properties of org.csid1.Plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PluginView {
    pub id: String,
    /// stopped starting probing ready unhealthy failed stopping
    pub state: &'static str,
    pub healthy: bool,
    pub health_message: String,
    pub supervision: &'static str,
    pub unit: String,
    pub socket: String,
    /// The active one, then the others, the newest first.
    pub instances: Vec<String>,
    pub provider: String,
    pub provider_version: String,
    pub services: Vec<String>,
    pub plugin_capabilities: Vec<String>,
    pub node_capabilities: Vec<String>,
    pub controller_capabilities: Vec<String>,
    pub node_id: String,
    pub max_volumes: i64,
    pub topology: BTreeMap<String, String>,
    pub restarts: u32,
    pub log: &'static str,
    pub owner: u32,
}

/// What a listener to the registry is told; the view is asked for when it is needed.
#[derive(Clone, Debug)]
pub enum PluginChange {
    Added(String),
    Changed(String),
    Removed(String),
}
