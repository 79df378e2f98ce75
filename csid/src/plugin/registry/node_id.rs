//! The refusal to attach under a node ID that was not accepted, and the acceptance of one.

use crate::error::{Error, Kind, Result};
use crate::plugin::errors;
use crate::plugin::events;
use crate::plugin::registry::plugins::Plugins;
use crate::store::{Change, Durability};

impl Plugins {
    /// Refuse to attach anything to this node while the plugin calls it otherwise than was agreed to.
    pub fn refuse_other_node_id(&self, plugin: &str) -> Result<()> {
        let now = self.node_id_now(plugin);
        match self.0.shared.node_ids.other_than(plugin, &now) {
            None => Ok(()),
            Some(agreed) => Err(errors::disputes(plugin, &now, &agreed)),
        }
    }

    /// The same of an attachment to the node of this id, if that is this node by either name.
    pub fn refuse_other_node_id_as(&self, plugin: &str, node_id: &str) -> Result<()> {
        let now = self.node_id_now(plugin);
        match self.0.shared.node_ids.other_than(plugin, &now) {
            Some(agreed) if [now.as_str(), agreed.as_str()].contains(&node_id) => {
                Err(errors::disputes(plugin, &now, &agreed))
            }
            _ => Ok(()),
        }
    }

    /// AcceptNodeId: attach under the name that the plugin has for this node now, and that the caller says.
    pub async fn accept_node_id(&self, id: &str, node_id: &str, uid: u32) -> Result<()> {
        self.open()?;
        self.0.shared.store.writable()?;
        let view = self.view(id).ok_or_else(|| errors::unknown(id))?;
        let now = self.node_id_now(id);
        if now.is_empty() {
            let text = format!(
                "what the plugin {id} calls this node is not known: it is {}, or says nothing",
                view.state
            );
            return Err(Error::new(Kind::PluginUnavailable, text));
        }
        if now != node_id {
            return Err(Error::invalid(format!("the plugin {id} calls this node `{now}`, not `{node_id}`")));
        }
        let _changing = self.0.changing.lock().await;
        // The plugin may have left during that wait.
        if self.view(id).is_none() {
            return Err(errors::unknown(id));
        }
        let Some(agreed) = self.0.shared.node_ids.other_than(id, &now) else { return Ok(()) };
        let accepted = Change::PutNodeId(id.to_owned(), now.clone());
        let event = Change::Event(events::node_id_accepted(id, &agreed, &now, uid));
        self.0.shared.store.commit(vec![accepted, event], Durability::Disk).await?;
        self.0.shared.node_ids.accept(id, &now);
        self.look_again(id);
        Ok(())
    }
}
