//! A volume's rows beside what the journal holds of them: what differs is the next commit.

use crate::store::Change;
use crate::store::rows::{MountKey, MountRow};
use crate::volume::admission::Refusal;
use crate::volume::operations::now_usec;
use crate::volume::state::{self, Event, Next, Volume};

pub(super) struct Journalled {
    now: Volume,
    written: Volume,
}

impl Journalled {
    /// Rows as the journal holds them.
    pub(super) fn new(volume: Volume) -> Self {
        Journalled { written: volume.clone(), now: volume }
    }

    pub(super) fn volume(&self) -> &Volume {
        &self.now
    }

    /// A row as it was last written: also of a mount that has just been dropped.
    pub(super) fn written(&self, key: &MountKey) -> Option<&MountRow> {
        self.written.mount(key)
    }

    pub(super) fn into_volume(self) -> Volume {
        self.written
    }

    pub(super) fn step(&mut self, event: Event) -> Result<Next, Refusal> {
        let (volume, next) = state::step(&self.now, event)?;
        self.now = volume;
        Ok(next)
    }

    /// Write a remark into a row: it decides nothing.
    pub(super) fn remark(&mut self, key: &MountKey, remark: impl FnOnce(&mut MountRow)) {
        if let Some(mount) = self.now.mounts.iter_mut().find(|mount| mount.key == *key) {
            remark(mount);
        }
    }

    /// The journal holds the rows of now.
    pub(super) fn is_written(&self) -> bool {
        self.now == self.written
    }

    /// What has to be written so that the journal holds the rows of now.
    pub(super) fn changes(&mut self) -> Vec<Change> {
        let mut changes = Vec::new();
        let written = &self.written;
        if self.now.mounts.is_empty() {
            if !written.mounts.is_empty() {
                changes.push(Change::DeleteVolume(written.row.key.clone()));
            }
        } else if self.now.row != written.row || written.mounts.is_empty() {
            changes.push(Change::PutVolume(self.now.row.clone()));
        }
        for mount in &mut self.now.mounts {
            let before = written.mount(&mount.key);
            if before.is_none_or(|before| before.phase != mount.phase) {
                mount.since_usec = now_usec();
            }
            if before != Some(mount) {
                changes.push(Change::PutMount(mount.clone()));
            }
        }
        let gone = written.mounts.iter().filter(|mount| self.now.mount(&mount.key).is_none());
        changes.extend(gone.map(|mount| Change::DeleteMount(mount.key.clone())));
        changes
    }

    /// The commit of [`Self::changes`] is done.
    pub(super) fn committed(&mut self) {
        self.written.clone_from(&self.now);
    }

    /// The commit failed: the intent that is written is what is true of an effect whose outcome is not.
    pub(super) fn revert(&mut self) {
        self.now.clone_from(&self.written);
    }
}
