//! Recovery at start: what the journal says, against what the kernel shows. What is mounted is adopted without an RPC; the
//! rest becomes work for each volume's own task, so that a plugin that is not there delays only its own volumes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use serde_json::Value;

use crate::fault;
use crate::host::Look;
use crate::store::registry::{Claim, ClaimFilter, ClaimState, RecordFilter, VolumeName};
use crate::store::rows::{EventDetails, MountKey, MountRow, NewEvent, Phase, VolumeKey, VolumeRow};
use crate::store::{Change, Durability, StoreError};
use crate::volume::journalled::Journalled;
use crate::volume::state::{Event, Sight, Volume};
use crate::volume::{Volumes, healthy, say};

/// What recovery found, for the status line and the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Mounted before and now; no RPC was made.
    pub adopted: usize,
    /// To be mounted again.
    pub waiting: usize,
    /// Kept as `lost` until somebody asks.
    pub lost: usize,
    /// Begun and not answered, or asked to go: to be taken down.
    pub unsettled: usize,
}

/// A volume's rows, and what was seen of each. Apart: the rows stay, and with them the memory they were collected in.
#[derive(Default)]
struct Seen {
    mounts: Vec<Arc<MountRow>>,
    looks: Vec<(Sight, Option<Look>)>,
}

impl Volumes {
    /// Take over the journal's rows; an error takes nothing, and can be tried again. `boot`: the boot of now, to be journalled; `same_boot`: the rows are of it.
    pub async fn recover(
        &self,
        volumes: Vec<VolumeRow>,
        mounts: Vec<MountRow>,
        boot: String,
        same_boot: bool,
    ) -> Result<Recovered, StoreError> {
        let shared = &self.shared;
        shared.untaken.store(true, Ordering::SeqCst);
        let called_mounted: Vec<&MountRow> =
            mounts.iter().filter(|row| row.phase == Phase::Mounted).collect();
        let looks = shared.looks(&called_mounted).await;
        let sights = shared.sights_of(&called_mounted, &looks).await;
        let mut looked = looks.into_iter().zip(sights);
        let mut seen: BTreeMap<VolumeKey, Seen> = BTreeMap::new();
        for row in mounts {
            let (look, sight) = match row.phase {
                Phase::Mounted => looked.next().unzip(),
                _ => (None, None),
            };
            // A device node outlives a boot; its number does not.
            let left_over = !same_boot && matches!(look, Some(Look::Device { .. }));
            let sight = sight.filter(|_| !left_over).unwrap_or(Sight::Gone);
            let seen = seen.entry(row.volume.clone()).or_default();
            seen.mounts.push(Arc::new(row));
            seen.looks.push((sight, look));
        }

        *shared.boot.lock().unwrap_or_else(PoisonError::into_inner) = boot.clone();
        let left = self.claims_left(&seen).await?;
        let mut changes = vec![Change::Boot(boot)];
        let mut found = Recovered::default();
        let mut recovered = Vec::new();
        for row in volumes {
            let Some(Seen { mounts, looks }) = seen.remove(&row.key) else {
                // A volume without users explains nothing.
                changes.push(Change::DeleteVolume(row.key));
                continue;
            };
            let sights = looks.iter().map(|(sight, _)| *sight).collect();
            for (row, (sight, look)) in mounts.iter().zip(&looks) {
                changes.extend(tell(row, *sight, look.as_ref(), same_boot).into_iter().map(Change::Event));
            }
            let mut rows = Journalled::new(Volume { row, mounts });
            if let Err(refusal) = rows.step(Event::Recovered { same_boot, sights }) {
                tracing::error!(?refusal, "a row could not be recovered");
            }
            changes.extend(rows.changes());
            rows.committed();
            recovered.push(rows.into_volume());
        }
        for (key, Seen { mounts, .. }) in seen {
            tracing::error!(
                plugin = key.plugin,
                mounts = mounts.len(),
                "mounts without their volume's row are left alone"
            );
        }
        for mount in recovered.iter().flat_map(|volume| &volume.mounts) {
            match mount.phase {
                Phase::Mounted => found.adopted += 1,
                Phase::Lost => found.lost += 1,
                Phase::Waiting => {
                    found.waiting += 1;
                    if mount.lacks_secrets() {
                        changes.push(Change::Event(secret_required(mount)));
                    }
                }
                Phase::Mounting | Phase::Unmounting | Phase::Uncertain => found.unsettled += 1,
            }
        }
        // Synced also when nothing changed: what an earlier csid wrote and did not live to sync is answered again from now on.
        fault::around("recovery", shared.store.commit(changes, Durability::Disk)).await?;
        for volume in recovered {
            let work = volume.mounts.iter().any(|row| !matches!(row.phase, Phase::Mounted | Phase::Lost));
            shared.directory.enter(shared, volume, work);
        }
        for (volume, key, uid) in left {
            shared.directory.go_on(shared, &volume, key, uid);
        }
        shared.untaken.store(false, Ordering::SeqCst);
        Ok(found)
    }

    /// This node's claims that an earlier csid left between two states, or without the mount that they were taken for.
    async fn claims_left(
        &self,
        seen: &BTreeMap<VolumeKey, Seen>,
    ) -> Result<Vec<(VolumeKey, MountKey, u32)>, StoreError> {
        let shared = &self.shared;
        let mut left = self.unfinished_claims().await?;
        let mounts = seen.values().flat_map(|seen| &seen.mounts);
        let users: BTreeSet<_> = mounts.map(|row| VolumeName::of(&row.key).key(&row.key.consumer)).collect();
        let filter = ClaimFilter { node: Some(shared.node.clone()), ..ClaimFilter::default() };
        for (name, claim) in shared.registry.claims(filter).await?.0 {
            let key = name.key(&claim.consumer);
            if claim.by_mount && !users.contains(&key) && !left.iter().any(|(_, other, _)| *other == key) {
                left.push((shared.registry.record(name).await?.volume, key, claim.uid));
            }
        }
        Ok(left)
    }

    async fn unfinished_claims(&self) -> Result<Vec<(VolumeKey, MountKey, u32)>, StoreError> {
        let node = &self.shared.node;
        let filter = RecordFilter { node: Some(node.clone()), restless: true, ..RecordFilter::default() };
        let (records, _) = self.shared.registry.records(filter).await?;
        let left = records.iter().flat_map(|record| {
            let unfinished =
                |claim: &&Claim| claim.node == *node && (claim.releasing || claim.state != ClaimState::Taken);
            let left =
                move |claim: &Claim| (record.volume.clone(), record.name.key(&claim.consumer), claim.uid);
            record.claims.iter().filter(unfinished).map(left)
        });
        Ok(left.collect())
    }

    /// The second chance of every claim that is on its way out, also of what is parked.
    pub(super) async fn sweep(&self) -> crate::Result<()> {
        for (volume, key, uid) in self.unfinished_claims().await? {
            self.shared.directory.go_on(&self.shared, &volume, key, uid);
        }
        Ok(())
    }
}

/// What was mounted and is not, or is and does not answer.
fn tell(row: &MountRow, sight: Sight, look: Option<&Look>, same_boot: bool) -> Option<NewEvent> {
    match (row.phase, sight) {
        (Phase::Mounted, Sight::Gone | Sight::Unbound) => {
            let why = if same_boot { "removed behind csid's back" } else { "the host has booted" };
            Some(watched("mount-lost", row, why))
        }
        (Phase::Mounted, Sight::There) if look.is_some_and(|look| !healthy(row, look)) => {
            Some(watched("mount-dead", row, "the file system does not answer"))
        }
        _ => None,
    }
}

/// An event about a mount that was only looked at.
pub(super) fn watched(kind: &'static str, row: &MountRow, why: &str) -> NewEvent {
    let mut details = EventDetails::new();
    details.insert("success", Value::from(kind == "mount-healed"));
    if kind != "mount-healed" {
        details.insert("error", Value::from(why));
    }
    details.insert("consumer", Value::from(row.key.consumer.clone()));
    details.insert("tag", Value::from(row.key.tag.clone()));
    details.insert("plugin", Value::from(row.volume.plugin.clone()));
    details.insert("uid", Value::from(row.uid));
    NewEvent { kind, subject: say::name(&row.key), details }
}

fn secret_required(row: &MountRow) -> NewEvent {
    let error = say::secret_required(&row.key);
    let mut event = watched("secret-required", row, &error.message);
    event.details.insert("success", Value::from(false));
    event
}
