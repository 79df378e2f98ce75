//! A volume's rows beside what the journal holds of them: what differs is the next commit.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::store::rows::{MountKey, MountRow, NewEvent};
use crate::store::{Change, Durability, Store};
use crate::volume::admission::Refusal;
use crate::volume::intents::{cover, foreseen};
use crate::volume::operations::now_usec;
use crate::volume::state::{self, Effect, Event, Next, Volume};

pub(super) struct Journalled {
    now: Volume,
    written: Volume,
    /// What the commit under way writes.
    writing: Option<Volume>,
    /// Claims of this node that are on their way out; their rows are the registry's.
    unfinished: BTreeMap<MountKey, Unfinished>,
}

pub(super) struct Unfinished {
    pub(super) uid: u32,
    /// It is tried again only when somebody asks, or by the sweep.
    pub(super) parked: bool,
}

impl Journalled {
    /// Rows as the journal holds them.
    pub(super) fn new(volume: Volume) -> Self {
        Journalled { written: volume.clone(), now: volume, writing: None, unfinished: BTreeMap::new() }
    }

    pub(super) fn volume(&self) -> &Volume {
        &self.now
    }

    /// A row as it was last written: also of a mount that has just been dropped.
    pub(super) fn written(&self, key: &MountKey) -> Option<&MountRow> {
        self.written.mount(key)
    }

    pub(super) fn unfinished(&self) -> impl Iterator<Item = (&MountKey, &Unfinished)> {
        self.unfinished.iter()
    }

    pub(super) fn set_unfinished(&mut self, key: MountKey, claim: Option<Unfinished>) {
        match claim {
            Some(claim) => drop(self.unfinished.insert(key, claim)),
            None => drop(self.unfinished.remove(&key)),
        }
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
        if let Some(mount) = self.now.mount_mut(key) {
            remark(mount);
        }
    }

    /// The journal holds the rows of now.
    pub(super) fn is_written(&self) -> bool {
        self.now == self.written
    }

    /// What has to be written so that the journal holds the rows of now.
    pub(super) fn changes(&mut self) -> Vec<Change> {
        self.date();
        let now = self.now.clone();
        self.write(now)
    }

    /// What has to be written so that the journal holds the intent of `effect`: nothing, when an earlier one foresaw it.
    fn intent(&mut self, effect: &Effect) -> Vec<Change> {
        self.date();
        let ahead = foreseen(&self.now, effect);
        if cover(&self.written, &ahead) { Vec::new() } else { self.write(ahead) }
    }

    fn date(&mut self) {
        for mount in &mut self.now.mounts {
            if self.written.mount(&mount.key).is_none_or(|before| before.phase != mount.phase) {
                Arc::make_mut(mount).since_usec = now_usec();
            }
        }
    }

    fn write(&mut self, new: Volume) -> Vec<Change> {
        let mut changes = Vec::new();
        let written = &self.written;
        if new.mounts.is_empty() {
            if !written.mounts.is_empty() {
                changes.push(Change::DeleteVolume(written.row.key.clone()));
            }
        } else if new.row != written.row || written.mounts.is_empty() {
            changes.push(Change::PutVolume(new.row.clone()));
        }
        let differ = new.mounts.iter().filter(|mount| !written.mounts.contains(mount));
        changes.extend(differ.map(|mount| Change::PutMount(Arc::clone(mount))));
        let gone = written.mounts.iter().filter(|mount| new.mount(&mount.key).is_none());
        changes.extend(gone.map(|mount| Change::DeleteMount(mount.key.clone())));
        self.writing = Some(new);
        changes
    }

    /// The commit of those changes is done.
    pub(super) fn committed(&mut self) {
        if let Some(written) = self.writing.take() {
            self.written = written;
        }
    }

    /// Make the journal hold the rows of now, with `event`.
    pub(super) async fn persist(
        &mut self,
        store: &Store,
        durability: Durability,
        event: Option<NewEvent>,
    ) -> Result<()> {
        let mut changes = self.changes();
        changes.extend(event.map(Change::Event));
        self.commit(store, changes, durability).await
    }

    /// Make the journal hold the intent of `effect`, which has to outlive csid, not the host.
    pub(super) async fn intend(&mut self, store: &Store, effect: &Effect) -> Result<()> {
        let changes = self.intent(effect);
        self.commit(store, changes, Durability::Process).await
    }

    async fn commit(&mut self, store: &Store, changes: Vec<Change>, durability: Durability) -> Result<()> {
        let committed = if changes.is_empty() && durability == Durability::Process {
            // An intent that was foreseen is no leave to go on when the journal was found damaged since.
            store.writable()
        } else {
            store.commit(changes, durability).await.map_err(Error::from)
        };
        match committed {
            Ok(()) => {
                self.committed();
                Ok(())
            }
            Err(error) => {
                // The intent that is written is what is true of an effect whose outcome is not.
                self.writing = None;
                self.now.clone_from(&self.written);
                Err(error)
            }
        }
    }
}
