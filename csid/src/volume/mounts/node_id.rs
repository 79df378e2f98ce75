//! Node id with which a mount's attachment was made. The plugin may give this node another one later.

use std::sync::Arc;

use crate::error::Result;
use crate::plugin::{ATTACHES, Ready};
use crate::store::rows::{Leg, MountRow, MountSpec};
use crate::volume::executor::Executor;
use crate::volume::model::volume::{Action, DesiredMount, Effect};
use crate::volume::waits::PluginWaits;

impl Executor<'_> {
    /// Returns the node id of the attachment that is staged, or is to be staged. `None`: it is not known or not needed.
    pub(in crate::volume) fn staged_under(&self, ready: &Ready, wanted: &DesiredMount) -> Option<String> {
        let volume = self.rows.volume();
        if volume.row.stage != Leg::Absent {
            return volume.mounts.iter().find_map(|row| row.status.node_id.clone());
        }
        match self.row(&wanted.key).filter(|row| row.publish != Leg::Absent) {
            Some(row) => row.status.node_id.clone(),
            None => self.node_id_now(ready, &wanted.spec),
        }
    }

    /// Returns the present node id. `None`: it is not needed, because a claim's attachment has its own, or the plugin does not
    /// attach.
    fn node_id_now(&self, ready: &Ready, spec: &MountSpec) -> Option<String> {
        let is_needed = !spec.registered && self.shared.plugins.can(ready.id(), ATTACHES) != Some(false);
        Some(ready.node_id().to_owned()).filter(|id| is_needed && !id.is_empty())
    }

    /// Writes the node id into the rows before the volume is staged, or before it is published if nothing is staged. The id may
    /// have changed since the rows were begun (CSI rule 23).
    pub(in crate::volume) async fn note_node_id(&mut self, effect: &Effect, ready: &Ready) -> Result<()> {
        let volume = self.rows.volume();
        let stages = volume.row.staging.is_some();
        let its = volume.mounts.iter().filter(|row| effect.action == Action::Stage || row.key == effect.key);
        if !matches!((effect.action, stages), (Action::Stage, _) | (Action::Publish, false)) {
            return Ok(());
        }
        let ids: Vec<_> = its.map(|row| (row.key.clone(), self.node_id_now(ready, &row.spec))).collect();
        for (key, node_id) in ids {
            self.rows.remark(&key, |row| row.status.node_id = node_id);
        }
        self.rows.intend(&self.shared.store, effect).await
    }

    /// Returns whether a mount here is or may be staged under this node id. The plugin may have changed the id since.
    pub(in crate::volume) async fn is_staged_as(&mut self, node_id: &str) -> Result<bool> {
        match self.rows_staged_as(node_id) {
            Some(is_staged) => Ok(is_staged),
            // While the staged node id is not known, it may be the plugin's present one.
            None => Ok(self.ready().await?.node_id() == node_id),
        }
    }

    /// Like [`Self::is_staged_as`], but calls no plugin: an unknown node id may be any.
    pub(in crate::volume) fn may_be_staged_as(&self, node_id: &str) -> bool {
        self.rows_staged_as(node_id).unwrap_or(true)
    }

    /// Returns whether the rows say that a mount is staged under this node id. `None`: they do not have every node id.
    fn rows_staged_as(&self, node_id: &str) -> Option<bool> {
        let volume = self.rows.volume();
        let is_staged = |row: &&Arc<MountRow>| volume.row.stage != Leg::Absent || row.publish != Leg::Absent;
        let staged: Vec<_> = volume.mounts.iter().filter(is_staged).collect();
        if staged.iter().any(|row| row.status.node_id.as_deref() == Some(node_id)) {
            return Some(true);
        }
        let is_known = !staged.is_empty() && staged.iter().all(|row| row.status.node_id.is_some());
        is_known.then_some(false)
    }
}
