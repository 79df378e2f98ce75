//! Answers the engine of claims and controller calls for this host.

use std::time::Instant;

use crate::error::Result;
use crate::fault;
use crate::plugin::{NodeCall, Plugins, Stats};
use crate::secret::Secrets;
use crate::store::registry::{Capability, Expansion, Record, VolumeName};
use crate::store::rows::{Leg, MountKey, MountRow, MountSpec, Phase, VolumeKey};
use crate::volume::api::requests::{Authority, Force};
use crate::volume::errors::operation::OperationError;
use crate::volume::errors::volume::VolumeError;
use crate::volume::executor::Executor;
use crate::volume::lifecycle::known_id;
use crate::volume::model::subject::{ClaimKey, Subject};
use crate::volume::operation::request::CallTarget;
use crate::volume::operation::running::RunningOperation;
use crate::volume::operation::running::Unfinished;
use crate::volume::seam::Site;
use crate::volume::waits::PluginWaits;

impl Site for Executor<'_> {
    fn operation(&self) -> &RunningOperation {
        &self.operation
    }

    fn volume(&self) -> &VolumeKey {
        &self.rows.volume().row.key
    }

    fn plugins(&self) -> &Plugins {
        &self.shared.plugins
    }

    /// Fails during an effect: the rows must not change under it.
    async fn carry_out_orders(&mut self) -> Result<()> {
        if self.in_effect {
            return Err(OperationError::Yielded.into());
        }
        self.carry_out().await;
        Ok(())
    }

    fn consumers(&self) -> Vec<String> {
        self.rows.volume().mounts.iter().map(|row| row.key.consumer.clone()).collect()
    }

    fn has_mounts_of(&self, key: &ClaimKey) -> bool {
        self.rows.volume().mounts.iter().any(|row| key.has_mount(&row.key))
    }

    fn is_staged(&self) -> bool {
        let volume = self.rows.volume();
        volume.row.stage != Leg::Absent || volume.mounts.iter().any(|row| row.publish != Leg::Absent)
    }

    fn may_be_staged_under(&self, node_id: &str) -> bool {
        self.may_be_staged_as(node_id)
    }

    async fn is_staged_under(&mut self, node_id: &str) -> Result<bool> {
        self.is_staged_as(node_id).await
    }

    fn is_mounted(&self) -> bool {
        self.mounted().is_some()
    }

    fn used_capability(&self) -> Option<Capability> {
        self.rows.volume().mounts.first().map(|row| Capability {
            access_mode: row.spec.usage.access_mode,
            attachment_mode: row.spec.usage.attachment_mode,
        })
    }

    fn has_other_secrets(&self, own: Option<&str>, at_hand: Option<&String>, given: bool) -> bool {
        self.rows.volume().mounts.iter().any(|mount| {
            let MountSpec { credential, secrets_given, .. } = &mount.spec;
            let is_own = given && own == Some(mount.key.consumer.as_str());
            let is_at_hand = given && credential.as_ref() == at_hand;
            mount.status.secrets_beside
                || (*secrets_given && !is_own)
                || (credential.is_some() && !is_own && !is_at_hand)
        })
    }

    async fn refuse_mounted(&self, name: &VolumeName) -> Result<()> {
        self.shared.refuse_mounted(name).await
    }

    async fn refuse_in_use(&mut self, key: &ClaimKey) -> Result<()> {
        for mount in self.mounts_of(key) {
            if let Some(row) = self.row(&mount).filter(|row| row.phase == Phase::Mounted).cloned() {
                self.refuse_while_in_use(row).await?;
            }
        }
        Ok(())
    }

    async fn unmount_all(&mut self, key: &ClaimKey) -> Result<()> {
        for mount in self.mounts_of(key) {
            self.unmount(&mount, Authority::Any(0), Force::No, Vec::new()).await?;
        }
        Ok(())
    }

    async fn stats(&mut self, target: &CallTarget) -> Result<Stats> {
        let ready = self.ready().await?;
        let row = self.mounted().ok_or_else(|| VolumeError::NotMounted { name: target.name.clone() })?;
        let call = self.node_call(&row, target, None)?;
        Ok(ready.stats(call).await?)
    }

    async fn expand_here(
        &mut self,
        target: &CallTarget,
        expansion: Expansion,
        secrets: Option<&Secrets>,
    ) -> Result<Option<u64>> {
        let ready = self.ready().await?;
        // Another instance may serve since the caller asked for the capability.
        if !ready.can("EXPAND_VOLUME") {
            return Ok(None);
        }
        let row = self.mounted().ok_or_else(|| VolumeError::NotMounted { name: target.name.clone() })?;
        let call = self.node_call(&row, target, secrets)?;
        let expanded = ready.expand(call, expansion.required, expansion.limit);
        Ok(fault::around("NodeExpandVolume", expanded).await?)
    }

    async fn credential(&self, name: &str) -> Result<Secrets> {
        self.shared.credential(name).await
    }

    async fn is_own_snapshot(
        &self,
        namespace: &str,
        snapshot: &str,
        uid: u32,
        deadline: Instant,
    ) -> Result<bool> {
        let (plugin, secrets) = (&self.volume().plugin, self.operation.secrets.as_ref());
        self.shared.is_own_snapshot(plugin, Some(namespace), snapshot, uid, secrets, deadline).await
    }

    fn unfinished(&self) -> Vec<Subject> {
        self.rows.unfinished().map(|(subject, _)| subject.clone()).collect()
    }

    fn set_unfinished(&mut self, subject: Subject, work: Option<Unfinished>) {
        self.rows.set_unfinished(subject, work);
    }

    fn go_on(&self, volume: &VolumeKey, subject: Subject, uid: u32) {
        self.shared.directory.go_on(volume, subject, uid);
    }

    fn note_bound(&self, record: &Record) {
        self.shared.bound.note(record, &self.shared.records.node);
    }
}

impl Executor<'_> {
    /// Returns the mounts of the consumer, whatever their tags.
    pub(in crate::volume::mounts) fn mounts_of(&self, key: &ClaimKey) -> Vec<MountKey> {
        let mounts = self.rows.volume().mounts.iter().map(|row| &row.key);
        mounts.filter(|mount| key.has_mount(mount)).cloned().collect()
    }

    /// Returns a mounted row. One that may be written comes first: a plugin expands no file system through a read-only mount.
    fn mounted(&self) -> Option<MountRow> {
        let rows = self.rows.volume().mounts.iter().filter(|row| row.phase == Phase::Mounted);
        rows.min_by_key(|row| row.spec.read_only).map(|row| MountRow::clone(row))
    }

    fn node_call<'a>(
        &'a self,
        row: &'a MountRow,
        target: &CallTarget,
        secrets: Option<&'a Secrets>,
    ) -> Result<NodeCall<'a>> {
        Ok(NodeCall {
            external_id: known_id(&row.volume, &Subject::Mount(row.key.clone()))?,
            staging: self.rows.volume().row.staging.as_deref(),
            target: row.published(),
            usage: &row.spec.usage,
            read_only: row.spec.read_only,
            uid: target.uid,
            secrets,
            secrets_forgotten: self.rows.volume().has_forgotten_secrets(&row.key, secrets.is_some()),
            patience: self.shared.config.borrow().deadlines.operation,
            asked: None,
        })
    }
}
