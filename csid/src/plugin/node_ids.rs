//! The node id by which each plugin knows this node. csid accepts the first one. A later, different one may be right, or may come from a
//! cloned disk, a wrong flag, or a cloud's answer for another host. csid attaches nothing under it until an administrator accepts it.
//! The accepted id goes when the plugin is unregistered or its file is removed. It stays when only a registration socket goes.
//! An attachment is detached by the id in its own row (CSI rules 23, 27).

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

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

    /// Returns the accepted id, if the plugin now reports another one.
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

    pub fn accept(&self, plugin: &str, node_id: &str) {
        self.all().insert(plugin.to_owned(), node_id.to_owned());
    }

    pub fn forget(&self, plugin: &str) {
        self.all().remove(plugin);
    }
}
