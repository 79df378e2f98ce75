//! The facts that a plugin's mounts and attachments depend on. An instance that replaces another one must have the same.

use serde::{Deserialize, Serialize};

use crate::plugin::errors::upgrade::InstanceLack;
use crate::plugin::view::PluginView;

/// The facts of an instance, as in its [`PluginView`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct InstanceFacts {
    provider: String,
    pub node_id: String,
    services: Vec<String>,
    node_capabilities: Vec<String>,
    controller_capabilities: Vec<String>,
}

impl InstanceFacts {
    /// `None`: it was never seen.
    pub fn of(view: &PluginView) -> Option<InstanceFacts> {
        (!view.provider.is_empty()).then(|| InstanceFacts {
            provider: view.provider.clone(),
            node_id: view.node_id.clone(),
            services: view.services.clone(),
            node_capabilities: view.node_capabilities.clone(),
            controller_capabilities: view.controller_capabilities.clone(),
        })
    }

    /// Why mounts and attachments of this one would be none of the other's.
    pub fn lack(&self, found: &PluginView) -> Option<InstanceLack> {
        if self.provider != found.provider {
            let (found, before) = (found.provider.clone(), self.provider.clone());
            return Some(InstanceLack::Provider { found, before });
        }
        if let Some(lost) = self.services.iter().find(|service| !found.services.contains(service)) {
            return Some(InstanceLack::Service { service: lost.clone() });
        }
        let lost = |before: &[String], found: &[String], name: &str| {
            let has = |names: &[String]| names.iter().any(|offered| offered == name);
            has(before) && !has(found)
        };
        let stages = "STAGE_UNSTAGE_VOLUME";
        if lost(&self.node_capabilities, &found.node_capabilities, stages) {
            let (negation, done) = ("unstage", "staged");
            return Some(InstanceLack::Capability { capability: stages, negation, done });
        }
        let attaches = "PUBLISH_UNPUBLISH_VOLUME";
        let lost = lost(&self.controller_capabilities, &found.controller_capabilities, attaches);
        let (negation, done) = ("detach", "attached");
        lost.then_some(InstanceLack::Capability { capability: attaches, negation, done })
    }
}

/// The same of the name that it has for this node; an empty one is not known.
pub(super) fn other_node_id(node_id: &str, found: &PluginView) -> Option<InstanceLack> {
    (found.node_id != node_id && !node_id.is_empty())
        .then(|| InstanceLack::NodeId { found: found.node_id.clone(), before: node_id.to_owned() })
}
