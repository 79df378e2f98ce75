//! What each plugin calls this node, as it was agreed to. The first name is agreed to by being the first. Another one may be
//! meant, or may be a cloned disk, a wrong flag, an answer of the cloud's that is not this host's: under it nothing is
//! attached until somebody accepts it. What is attached is detached by the name in its own row (CSI rules 23, 27).

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::events;
use super::lookup::unknown;
use super::registry::Plugins;
use crate::error::{Error, Kind, Result};
use crate::store::{Change, Durability, Store};

/// By plugin; the journal holds the same.
pub(super) struct NodeIds(Mutex<BTreeMap<String, String>>);

impl NodeIds {
    pub fn of(journalled: BTreeMap<String, String>) -> Self {
        NodeIds(Mutex::new(journalled))
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn agreed(&self, plugin: &str) -> Option<String> {
        self.all().get(plugin).cloned()
    }

    /// What was agreed to, if the plugin calls this node otherwise.
    pub fn other_than(&self, plugin: &str, node_id: &str) -> Option<String> {
        self.agreed(plugin).filter(|agreed| !node_id.is_empty() && agreed != node_id)
    }

    /// The plugin says this. The first one is kept; the next sync of the journal is before anything is attached under it.
    pub async fn seen(&self, store: &Store, plugin: &str, node_id: &str) {
        if node_id.is_empty() || self.all().contains_key(plugin) {
            return;
        }
        self.all().insert(plugin.to_owned(), node_id.to_owned());
        if store.writable().is_err() {
            return;
        }
        let first = Change::PutNodeId(plugin.to_owned(), node_id.to_owned());
        if let Err(error) = store.commit(vec![first], Durability::Process).await {
            tracing::warn!(plugin, %error, "the plugin's node id was not written; it is agreed to again at the next start");
        }
    }

    pub fn forget(&self, plugin: &str) {
        self.all().remove(plugin);
    }
}

/// What is said of a plugin that calls this node otherwise, and to whoever wants to attach a volume meanwhile.
pub(super) fn disputed(plugin: &str, now: &str, agreed: &str) -> String {
    format!(
        "the plugin {plugin} calls this node `{now}`, which was `{agreed}`; nothing is attached until that is accepted: \
         csictl plugin accept-node-id {plugin} NODE_ID"
    )
}

impl Plugins {
    /// Refuse to attach anything to this node while the plugin calls it otherwise than was agreed to.
    pub fn refuse_other_node_id(&self, plugin: &str) -> Result<()> {
        let now = self.node_id_now(plugin);
        match self.0.shared.node_ids.other_than(plugin, &now) {
            None => Ok(()),
            Some(agreed) => Err(refusal(plugin, &now, &agreed)),
        }
    }

    /// The same of an attachment to the node of this id, if that is this node by either name.
    pub fn refuse_other_node_id_as(&self, plugin: &str, node_id: &str) -> Result<()> {
        let now = self.node_id_now(plugin);
        match self.0.shared.node_ids.other_than(plugin, &now) {
            Some(agreed) if [now.as_str(), agreed.as_str()].contains(&node_id) => {
                Err(refusal(plugin, &now, &agreed))
            }
            _ => Ok(()),
        }
    }

    /// AcceptNodeId: attach under the name that the plugin has for this node now, and that the caller says.
    pub async fn accept_node_id(&self, id: &str, node_id: &str, uid: u32) -> Result<()> {
        self.open()?;
        self.0.shared.store.writable()?;
        let view = self.view(id).ok_or_else(|| unknown(id))?;
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
        // It may have left while that was waited for.
        if self.view(id).is_none() {
            return Err(unknown(id));
        }
        let Some(agreed) = self.0.shared.node_ids.other_than(id, &now) else { return Ok(()) };
        let accepted = Change::PutNodeId(id.to_owned(), now.clone());
        let event = Change::Event(events::node_id_accepted(id, &agreed, &now, uid));
        self.0.shared.store.commit(vec![accepted, event], Durability::Disk).await?;
        self.0.shared.node_ids.all().insert(id.to_owned(), now);
        self.look_again(id);
        Ok(())
    }
}

fn refusal(plugin: &str, now: &str, agreed: &str) -> Error {
    Error::new(Kind::PluginUnavailable, disputed(plugin, now, agreed))
        .with(|details| details.plugin = Some(plugin.to_owned()))
}
