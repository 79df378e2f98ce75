//! The refusal to attach under a node ID that was not accepted, and the acceptance of one.

use crate::error::Result;
use crate::plugin::errors::node_id::NodeIdError;
use crate::plugin::errors::registry::RegistrationError;
use crate::plugin::events;
use crate::plugin::registry::plugins::Plugins;
use crate::store::{Change, Durability};

impl Plugins {
    /// Refuse to attach anything to this node while the plugin calls it otherwise than was agreed to.
    pub fn refuse_other_node_id(&self, plugin: &str) -> Result<()> {
        let now = self.node_id_now(plugin);
        match self.0.shared.node_ids.other_than(plugin, &now) {
            None => Ok(()),
            Some(agreed) => Err(NodeIdError::disputed(plugin, &now, &agreed).into()),
        }
    }

    /// The same of an attachment to the node of this id, if that is this node by either name.
    pub fn refuse_other_node_id_as(&self, plugin: &str, node_id: &str) -> Result<()> {
        let now = self.node_id_now(plugin);
        match self.0.shared.node_ids.other_than(plugin, &now) {
            Some(agreed) if [now.as_str(), agreed.as_str()].contains(&node_id) => {
                Err(NodeIdError::disputed(plugin, &now, &agreed).into())
            }
            _ => Ok(()),
        }
    }

    /// Refuses a volume that servers have attached to another name than the plugin gives this node now.
    pub fn refuse_attached_as(&self, plugin: &str, node_id: &str) -> Result<()> {
        match self.node_id_now(plugin) {
            now if now.is_empty() || now == node_id => Ok(()),
            now => Err(NodeIdError::disputed(plugin, &now, node_id).into()),
        }
    }

    /// AcceptNodeId: attach under the name that the plugin has for this node now, and that the caller says.
    pub async fn accept_node_id(&self, id: &str, node_id: &str, uid: u32) -> Result<()> {
        self.open()?;
        self.0.shared.store.writable()?;
        let view = self.view(id).ok_or_else(|| RegistrationError::unknown(id))?;
        let now = self.node_id_now(id);
        if now.is_empty() {
            return Err(NodeIdError::Unknown { plugin: id.to_owned(), state: view.state }.into());
        }
        if now != node_id {
            let (plugin, given) = (id.to_owned(), node_id.to_owned());
            return Err(NodeIdError::NotReported { plugin, now, given }.into());
        }
        let _changing = self.0.changing.lock().await;
        // The plugin may have left during that wait.
        if self.view(id).is_none() {
            return Err(RegistrationError::unknown(id).into());
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
