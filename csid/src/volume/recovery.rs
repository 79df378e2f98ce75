//! Recovery at start: what the journal says, against what the kernel shows. What is mounted is adopted without an RPC; the
//! rest becomes work for each volume's own task, so that a plugin that is not there delays only its own volumes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use serde_json::Value;

use crate::fault;
use crate::host::{Look, Restrict};
use crate::store::registry::{Claim, ClaimFilter, ClaimState, Record, RecordFilter, VolumeName};
use crate::store::rows::{EventDetails, Leg, MountKey, MountRow, NewEvent, Phase, VolumeKey, VolumeRow};
use crate::store::{Change, Durability, StoreError};
use crate::volume::attaching::detach_key;
use crate::volume::creating::{is_unborn, task_of};
use crate::volume::deleting::is_being_deleted;
use crate::volume::journalled::Journalled;
use crate::volume::served::Served;
use crate::volume::state::{Event, Sight, Volume};
use crate::volume::{Volumes, say};

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
        self.restrict_half_published(&mounts).await;
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
        let left = self.left(&seen).await?;
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
                changes.extend(tell(row, *sight, same_boot).into_iter().map(Change::Event));
                if look.as_ref().is_some_and(Served::are_watched) {
                    shared.served.note(row);
                }
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
        for Left { volume, key, uid } in left {
            shared.directory.go_on(shared, &volume, key, uid);
        }
        shared.untaken.store(false, Ordering::SeqCst);
        Ok(found)
    }

    /// What csid did not live to restrict does not wait for its plugin; nor is it answered, so that one that cannot be is told only.
    async fn restrict_half_published(&self, mounts: &[MountRow]) {
        let is_half = |row: &&MountRow| !matches!(row.publish, Leg::Absent | Leg::Present);
        let restricting = mounts.iter().filter(is_half).map(|row| {
            let (host, plugin) = (&self.shared.host, row.volume.plugin.clone());
            let (source, spec) = (PathBuf::from(&row.source), &row.spec);
            let how = Restrict { nosuid: !spec.suid, nodev: !spec.dev, read_only: false };
            async move {
                if let Err(error) = host.restrict(&plugin, &source, how).await {
                    tracing::warn!(path = %source.display(), %error, "cannot restrict what was half published");
                }
            }
        });
        futures_util::future::join_all(restricting.collect::<Vec<_>>()).await;
    }

    /// What an earlier csid left between two states, and this node's claims without the mount that they were taken for.
    async fn left(&self, seen: &BTreeMap<VolumeKey, Seen>) -> Result<Vec<Left>, StoreError> {
        let shared = &self.shared;
        let mut left = self.unfinished().await?;
        let mounts = seen.values().flat_map(|seen| &seen.mounts);
        let users: BTreeSet<_> = mounts.map(|row| VolumeName::of(&row.key).key(&row.key.consumer)).collect();
        let filter = ClaimFilter { node: Some(shared.node.clone()), ..ClaimFilter::default() };
        for (name, claim) in shared.registry.claims(filter).await?.0 {
            let key = name.key(&claim.consumer);
            if claim.bound.is_some() {
                shared.bound.note(&shared.registry.record(name.clone()).await?, &shared.node);
            }
            if claim.by_mount && !users.contains(&key) && !left.iter().any(|left| left.key == key) {
                let volume = shared.registry.record(name).await?.volume;
                left.push(Left { volume, key, uid: claim.uid });
            }
        }
        Ok(left)
    }

    async fn unfinished(&self) -> Result<Vec<Left>, StoreError> {
        let filter = RecordFilter { restless: true, ..RecordFilter::default() };
        let (records, _) = self.shared.registry.records(filter).await?;
        Ok(records.iter().flat_map(|record| unfinished(record, &self.shared.node)).collect())
    }

    /// The second chance of all that is on its way, also of what is parked.
    pub(super) async fn sweep(&self) -> crate::Result<()> {
        for Left { volume, key, uid } in self.unfinished().await? {
            self.shared.directory.go_on(&self.shared, &volume, key, uid);
        }
        Ok(())
    }
}

/// What is to go on without being asked: by what key, in which volume's task, for whom.
#[derive(Debug, PartialEq, Eq)]
struct Left {
    volume: VolumeKey,
    key: MountKey,
    uid: u32,
}

/// What of a record is between two states: claims of this node, what AttachVolume left, a creation, a deletion.
fn unfinished(record: &Record, node: &str) -> Vec<Left> {
    let volume = task_of(record);
    let left = |key, uid| Left { volume: volume.clone(), key, uid };
    let is_open =
        |claim: &&Claim| claim.node == node && (claim.releasing || claim.state != ClaimState::Taken);
    let claims = record.claims.iter().filter(is_open);
    let claims = claims.map(|claim| left(record.name.key(&claim.consumer), claim.uid));
    let attached = record.attachments.iter().filter(|at| at.leg != Leg::Present);
    let attached = attached.filter_map(|at| {
        at.by_call.as_ref().map(|call| left(detach_key(&record.name, &at.node_id), call.uid))
    });
    let registration = record.registration.as_ref().filter(|_| is_unborn(record) || is_being_deleted(record));
    let registration = registration.map(|registration| left(record.name.key(""), registration.uid));
    claims.chain(attached).chain(registration).collect()
}

/// What was mounted and is not.
fn tell(row: &MountRow, sight: Sight, same_boot: bool) -> Option<NewEvent> {
    match (row.phase, sight) {
        (Phase::Mounted, Sight::Gone | Sight::Unbound) => {
            let why = if same_boot { "removed behind csid's back" } else { "the host has booted" };
            Some(watched("mount-lost", row, why))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::registry::{
        AttachCall, Attachment, Capability, ClaimMode, Creation, Origin, Registration, Standing, Use,
        VolumeSpec,
    };
    use crate::store::rows::{AccessMode, AttachmentMode};
    use crate::volume::paths;
    use crate::volume::registered::new_claim;
    use crate::volume::registering::new_registration;

    fn record(standing: Option<Standing>) -> Record {
        let name = VolumeName { namespace: "ns".into(), volume: "v".into() };
        let spec = VolumeSpec { name: "disk".into(), ..VolumeSpec::default() };
        let registration =
            standing.map(|standing| Registration { standing, ..new_registration(1000, spec, Origin::Bus) });
        let volume = VolumeKey { plugin: "p".into(), external_id: "x".into() };
        Record { volume, registration, ..Record::none(name) }
    }

    fn keys(record: &Record) -> Vec<(String, String, u32)> {
        let left = unfinished(record, "n1").into_iter();
        left.map(|left| {
            (left.volume.external_id, format!("{}@{}", left.key.consumer, left.key.tag), left.uid)
        })
        .collect()
    }

    #[test]
    fn what_is_between_two_states_goes_on_where_its_volume_queues() {
        let capability = Capability {
            access_mode: AccessMode::SingleNodeWriter,
            attachment_mode: AttachmentMode::FileSystem,
        };
        assert_eq!(keys(&record(None)), []);
        assert_eq!(keys(&record(Some(Standing::Registered))), []);

        let deleting = record(Some(Standing::Deleting { secrets_given: true, back: None }));
        assert_eq!(keys(&deleting), [("x".into(), "@".into(), 1000)]);

        let creation = Creation {
            capacity_min: 0,
            capacity_max: 0,
            register: false,
            secrets_given: false,
            source: String::new(),
            sourceless: false,
        };
        let mut creating = record(Some(Standing::Creating(creation)));
        assert_eq!(keys(&creating), [], "the plugin has answered; the answer waits for its caller");
        creating.volume.external_id.clear();
        assert_eq!(keys(&creating), [(paths::unborn("p", "disk").external_id, "@".into(), 1000)]);

        let mut used = record(Some(Standing::Registered));
        let usage = Use { mode: ClaimMode::Write, capability };
        let claim =
            |consumer: &str, node: &str, state| Claim { state, ..new_claim(consumer, node, 7, usage) };
        used.claims = vec![
            claim("taken", "n1", ClaimState::Taken),
            claim("pending", "n1", ClaimState::Pending),
            claim("anothers", "n2", ClaimState::Pending),
        ];
        let by_call = Some(AttachCall { uid: 8, read_only: false, capability, secrets_given: false });
        let at = |node_id: &str, leg, by_call| Attachment {
            node_id: node_id.into(),
            by_call,
            ..Attachment::new("", leg)
        };
        used.attachments = vec![
            at("i-1", Leg::Removing, by_call.clone()),
            at("i-2", Leg::Present, by_call),
            at("i-3", Leg::Making, None),
        ];
        assert_eq!(keys(&used), [("x".into(), "pending@".into(), 7), ("x".into(), "@i-1".into(), 8)]);
    }
}
