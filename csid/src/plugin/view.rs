//! How a plugin appears to other rooms: its services, capabilities and properties.

use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    Node,
    Controller,
}

/// A capability of a plugin or of one of its services, by CSI's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Can {
    Plugin(&'static str),
    Node(&'static str),
    Controller(&'static str),
}

/// The capability of a plugin whose volumes are attached to a node before they are staged.
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
    /// Whether the health message is about settings of the unit, which hide the plugin's mounts. It is no property.
    pub hidden_by_unit: bool,
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

/// A change that the registry publishes. A listener reads the view when it needs it.
#[derive(Clone, Debug)]
pub enum PluginChange {
    Added(String),
    Changed(String),
    Removed(String),
}
