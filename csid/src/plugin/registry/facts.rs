//! The facts that a plugin's mounts and attachments depend on. An instance that replaces another one must have the same.

use serde::{Deserialize, Serialize};

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
    pub fn lack(&self, found: &PluginView) -> Option<String> {
        if self.provider != found.provider {
            return Some(format!("it is {}, and not {}", found.provider, self.provider));
        }
        if let Some(lost) = self.services.iter().find(|service| !found.services.contains(service)) {
            return Some(format!("it offers no {lost} service"));
        }
        let lost = |before: &[String], found: &[String], name: &str| {
            let has = |names: &[String]| names.iter().any(|offered| offered == name);
            has(before) && !has(found)
        };
        let stages = "STAGE_UNSTAGE_VOLUME";
        if lost(&self.node_capabilities, &found.node_capabilities, stages) {
            return Some(format!("it does not offer {stages}, and could not unstage what is staged"));
        }
        let attaches = "PUBLISH_UNPUBLISH_VOLUME";
        let lost = lost(&self.controller_capabilities, &found.controller_capabilities, attaches);
        lost.then(|| format!("it does not offer {attaches}, and could not detach what is attached"))
    }
}

/// The same of the name that it has for this node; an empty one is not known.
pub(super) fn other_node_id(node_id: &str, found: &PluginView) -> Option<String> {
    (found.node_id != node_id && !node_id.is_empty()).then(|| {
        let text = format!("it calls this node {:?}, and not {node_id:?}", found.node_id);
        text + ", and volumes are attached by that name"
    })
}
