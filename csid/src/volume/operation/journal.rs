//! The rows of a volume, and their difference to the journal, which the next commit writes.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::host::KnownEnds;
use crate::store::rows::{MountKey, MountRow, NewEvent};
use crate::store::{Change, Durability, Store, Syncing};
use crate::volume::model::admission::Refusal;
use crate::volume::model::observed::same_after_boot;
use crate::volume::model::step;
use crate::volume::model::subject::Subject;
use crate::volume::model::volume::{Effect, MountEvent, Next, Volume, between};
use crate::volume::model::write_ahead::{cover, foreseen};
use crate::volume::operation::running::Unfinished;
use crate::volume::operation::table::now_usec;

pub(in crate::volume) struct JournaledVolume {
    now: Volume,
    written: Volume,
    /// The rows that the commit under way writes. `None`: no commit is under way.
    writing: Option<Volume>,
    /// The newest rows that are or will be on the disk. All that was written since means the same after another boot. `None`: not
    /// known.
    durable: Option<DurableRows>,
    /// Unfinished releases of claims of this node, and unfinished controller calls. The registry has their records.
    unfinished: BTreeMap<Subject, Unfinished>,
    /// What is known of the ends of the file systems that the volume's mounts have shown since it was staged.
    ends: KnownEnds,
}

struct DurableRows {
    rows: Volume,
    /// The sync, which may have ended.
    syncing: Syncing,
}

fn pointers(rows: &[Arc<MountRow>]) -> HashSet<*const MountRow> {
    rows.iter().map(Arc::as_ptr).collect()
}

impl JournaledVolume {
    /// Makes the rows of a volume as the journal holds them.
    pub(in crate::volume) fn new(volume: Volume) -> Self {
        JournaledVolume {
            written: volume.clone(),
            now: volume,
            writing: None,
            durable: None,
            unfinished: BTreeMap::new(),
            ends: KnownEnds::default(),
        }
    }

    /// Begins an operation. It syncs its first intent, and with it what it has committed before, such as its claim.
    pub(in crate::volume) fn begin(&mut self) {
        self.durable = None;
    }

    pub(in crate::volume) fn volume(&self) -> &Volume {
        &self.now
    }

    /// Returns a row as it was last written, also of a mount that was just dropped.
    pub(in crate::volume) fn written(&self, key: &MountKey) -> Option<&MountRow> {
        self.written.mount(key)
    }

    pub(in crate::volume) fn unfinished(&self) -> impl Iterator<Item = (&Subject, &Unfinished)> {
        self.unfinished.iter()
    }

    pub(in crate::volume) fn set_unfinished(&mut self, subject: Subject, work: Option<Unfinished>) {
        match work {
            Some(work) => drop(self.unfinished.insert(subject, work)),
            None => drop(self.unfinished.remove(&subject)),
        }
    }

    pub(in crate::volume) fn into_volume(self) -> Volume {
        self.written
    }

    pub(in crate::volume) fn step(&mut self, event: MountEvent) -> Result<Next, Refusal> {
        let (volume, next) = step::step(&self.now, event)?;
        self.now = volume;
        Ok(next)
    }

    /// Changes a field of a row that no decision depends on.
    pub(in crate::volume) fn remark(&mut self, key: &MountKey, remark: impl FnOnce(&mut MountRow)) {
        if let Some(mount) = self.now.mount_mut(key) {
            remark(mount);
        }
    }

    /// Sets the backing of the volume's mounts, as JSON of `host::Backing`. `None`: it is not known. The next intent writes it.
    pub(in crate::volume) fn set_backing(&mut self, backing: Option<String>) {
        self.now.row.backing = backing;
    }

    pub(in crate::volume) fn ends(&self) -> &KnownEnds {
        &self.ends
    }

    pub(in crate::volume) fn ends_mut(&mut self) -> &mut KnownEnds {
        &mut self.ends
    }

    /// Sets the staging path of a volume that is not staged.
    pub(in crate::volume) fn stage_at(&mut self, staging: String) {
        self.now.row.staging = Some(staging);
    }

    /// Returns whether the journal holds the current rows.
    pub(in crate::volume) fn is_written(&self) -> bool {
        self.now == self.written
    }

    /// Returns the changes that make the journal hold the current rows.
    pub(in crate::volume) fn changes(&mut self) -> Vec<Change> {
        self.date();
        let now = self.now.clone();
        self.write(now)
    }

    /// Returns the changes that make the journal hold the intent of `effect`. Empty: an earlier intent covers it.
    fn intent(&mut self, effect: &Effect) -> Vec<Change> {
        self.date();
        let ahead = foreseen(&self.now, effect);
        if cover(&self.written, &ahead) { Vec::new() } else { self.write(ahead) }
    }

    fn date(&mut self) {
        let (written, now) = between(&self.written.mounts, &self.now.mounts);
        let written = pointers(&self.written.mounts[written]);
        for mount in self.now.mounts[now].iter_mut().filter(|mount| !written.contains(&Arc::as_ptr(mount))) {
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
        // An unchanged row is the same object in both, so few rows are compared with all.
        let (before, after) = between(&written.mounts, &new.mounts);
        let (before, after) = (&written.mounts[before], &new.mounts[after]);
        let (had, has) = (pointers(before), pointers(after));
        let touched = after.iter().filter(|mount| !had.contains(&Arc::as_ptr(mount)));
        let differ = touched.filter(|mount| !before.contains(mount));
        changes.extend(differ.map(|mount| Change::PutMount(Arc::clone(mount))));
        let other = before.iter().filter(|mount| !has.contains(&Arc::as_ptr(mount)));
        let gone = other.filter(|mount| new.mount(&mount.key).is_none());
        changes.extend(gone.map(|mount| Change::DeleteMount(mount.key.clone())));
        self.writing = Some(new);
        changes
    }

    /// Notes that the commit under way has succeeded.
    pub(in crate::volume) fn committed(&mut self) {
        if let Some(written) = self.writing.take() {
            self.written = written;
        }
    }

    /// Makes the journal hold the current rows, with `event`. An outcome waits for the sync of its intent, and needs no other one if
    /// the intent means the same after a power cut.
    pub(in crate::volume) async fn persist(
        &mut self,
        store: &Store,
        durability: Durability,
        event: Option<NewEvent>,
    ) -> Result<()> {
        let mut changes = self.changes();
        changes.extend(event.map(Change::Event));
        if changes.is_empty() && durability == Durability::Process {
            let committed = store.writable();
            return self.ended(committed);
        }
        let committed = match (durability, self.durable.take()) {
            (Durability::Disk, Some(durable)) if same_after_boot(&durable.rows, &self.now) => {
                // The commit is answered after the sync, unless another request has caused that. So this task wakes once for both.
                match store.commit(changes, Durability::Process).await {
                    Ok(()) => durable.syncing.ended().await,
                    Err(error) => Err(error),
                }
            }
            (Durability::Disk, _) => store.commit(changes, Durability::Disk).await,
            (Durability::Process, durable) => {
                self.durable = durable.filter(|durable| same_after_boot(&durable.rows, &self.now));
                store.commit(changes, Durability::Process).await
            }
        };
        self.ended(committed.map_err(Error::from))
    }

    /// Makes the journal hold the intent of `effect`, which has to survive csid. Its sync goes on during the effect.
    pub(in crate::volume) async fn intend(&mut self, store: &Store, effect: &Effect) -> Result<()> {
        let changes = self.intent(effect);
        if changes.is_empty() {
            // Even with a foreseen intent the effect must not start if the journal was found damaged since.
            let committed = store.writable();
            return self.ended(committed);
        }
        let is_durable = match (&self.durable, &self.writing) {
            (Some(durable), Some(writing)) => same_after_boot(&durable.rows, writing),
            _ => false,
        };
        let committed = match is_durable {
            true => store.commit(changes, Durability::Process).await,
            false => {
                self.durable = None;
                store.commit_and_sync(changes).await.map(|syncing| {
                    let rows = self.writing.clone();
                    self.durable = rows.map(|rows| DurableRows { rows, syncing });
                })
            }
        };
        self.ended(committed.map_err(Error::from))
    }

    /// Notes the end of a commit.
    fn ended(&mut self, committed: Result<()>) -> Result<()> {
        match committed {
            Ok(()) => self.committed(),
            Err(_) => {
                // The written intent stays true for an effect whose outcome is not written.
                self.writing = None;
                self.now.clone_from(&self.written);
            }
        }
        committed
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::store::rows::VolumeKey;
    use crate::store::tests::mount;

    fn rows(count: usize) -> Vec<Arc<MountRow>> {
        (0..count).map(|n| Arc::new(mount("v", &format!("c{n}")))).collect()
    }

    #[test]
    fn one_changed_row_stands_alone() {
        let before = rows(1_000);
        let mut after = before.clone();
        assert!(between(&before, &after).0.is_empty());
        after.push(Arc::new(mount("v", "new")));
        assert_eq!(between(&before, &after), (1_000..1_000, 1_000..1_001));
        Arc::make_mut(&mut after[500]).error = Some("failed".into());
        assert_eq!(between(&before, &after[..1_000]), (500..501, 500..501));
        after.remove(0);
        assert_eq!(between(&before[..1], &[]), (0..1, 0..0));
    }

    proptest! {
        #[test]
        fn the_changes_make_the_rows(count in 0..12_usize, acts in prop::collection::vec((0..3_u8, 0..12_usize), 0..8)) {
            let key = VolumeKey::new("local", "ext-v");
            let volume = Volume { mounts: rows(count), ..Volume::new(key, "default", "v") };
            let mut journalled = JournaledVolume::new(volume.clone());
            let mut new = volume.clone();
            for (at, (act, place)) in acts.into_iter().enumerate() {
                match act {
                    0 => new.mounts.push(Arc::new(mount("v", &format!("new{at}")))),
                    1 if place < new.mounts.len() => drop(new.mounts.remove(place)),
                    2 if place < new.mounts.len() => Arc::make_mut(&mut new.mounts[place]).error.get_or_insert_default().push_str("again"),
                    _ => {}
                }
            }
            let mut written: BTreeMap<MountKey, MountRow> =
                volume.mounts.iter().map(|row| (row.key.clone(), MountRow::clone(row))).collect();
            for change in journalled.write(new.clone()) {
                match change {
                    Change::PutMount(row) => {
                        let had = written.insert(row.key.clone(), MountRow::clone(&row));
                        prop_assert!(had.as_ref() != Some(&*row), "written for nothing");
                    }
                    Change::DeleteMount(key) => prop_assert!(written.remove(&key).is_some()),
                    _ => {}
                }
            }
            let due: BTreeMap<_, _> = new.mounts.iter().map(|row| (row.key.clone(), MountRow::clone(row))).collect();
            prop_assert!(written == due);
        }
    }
}
