//! The statistics of a plugin: the RPCs that csid makes to it, and the resources of its units.

use crate::error::Result;
use crate::host::cgroup::Resources;
use crate::plugin::errors::registry::RegistrationError;
use crate::plugin::registry::Plugins;
use crate::plugin::tally::RpcCount;

pub struct PluginStats {
    /// The RPCs to all its instances, since csid has known the plugin.
    pub rpcs: Vec<RpcCount>,
    /// The newest first.
    pub instances: Vec<InstanceStats>,
}

pub struct InstanceStats {
    pub instance: String,
    /// Empty: csid runs none for it, and so does not see what it uses.
    pub unit: String,
    pub resources: Resources,
}

impl Plugins {
    /// As they are now. A unit that does not run, or that systemd does not tell of, has nothing measured.
    pub async fn stats(&self, id: &str) -> Result<PluginStats> {
        let (rpcs, views) = {
            let plugins = self.entries();
            let entries = plugins.get(id).ok_or_else(|| RegistrationError::unknown(id))?;
            let rpcs = entries.first().map(|entry| entry.common.tally.read()).unwrap_or_default();
            let views: Vec<_> = entries.iter().map(|entry| entry.state.borrow().view.clone()).collect();
            (rpcs, views)
        };
        let mut instances = Vec::new();
        for view in views {
            let (instance, unit) = (view.instances.concat(), view.unit.clone());
            let resources = match unit.as_str() {
                "" => None,
                unit => self.0.shared.units.resources(unit).await.unwrap_or_else(|error| {
                    tracing::warn!(plugin = id, unit, %error, "plugin {id}: what it uses cannot be read");
                    None
                }),
            };
            instances.push(InstanceStats { instance, unit, resources: resources.unwrap_or_default() });
        }
        Ok(PluginStats { rpcs, instances })
    }

    /// The RPCs that were made to each plugin.
    pub fn rpcs(&self) -> Vec<(String, Vec<RpcCount>)> {
        let plugins = self.entries();
        let first = plugins.iter().filter_map(|(id, entries)| Some((id, entries.first()?)));
        first.map(|(id, entry)| (id.clone(), entry.common.tally.read())).collect()
    }
}
