//! Recovery at start: compares the journal with the kernel. Existing mounts are kept without an RPC. The actor of each volume
//! does the rest, so a plugin that is away delays only its own volumes.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::fault;
use crate::host::{Look, MountTable, Restrict};
use crate::store::event_kind::EventKind;
use crate::store::registry::{
    Claim, ClaimFilter, ClaimState, ListedClaim, Record, RecordFilter, RegistryError,
};
use crate::store::rows::{Leg, MountRow, NewEvent, Phase, VolumeKey, VolumeRow};
use crate::store::{Change, Durability};
use crate::volume::api::views::Recovered;
use crate::volume::events::mount::{secret_required, watched};
use crate::volume::lifecycle::{is_being_deleted, is_unborn};
use crate::volume::manager::Volumes;
use crate::volume::model::paths;
use crate::volume::model::subject::{ClaimKey, Subject};
use crate::volume::model::volume::{MountEvent, Observed, Volume};
use crate::volume::operation::journal::JournaledVolume;
use crate::volume::probe::side_by_side;
use crate::volume::tables::watched_volumes::WatchedVolumes;

/// A volume's rows, and the observed state of each. The two lists are separate, because the rows stay, and with them the memory
/// in which they were collected.
#[derive(Default)]
struct Seen {
    mounts: Vec<Arc<MountRow>>,
    looks: Vec<(Observed, Option<Look>)>,
}

impl Volumes {
    /// Takes over the journal's rows. After an error nothing is taken over, and the call can be repeated. `boot`: the present
    /// boot, to be journalled. `same_boot`: the rows are of this boot. `table`: the mount table, read since no other csid had the
    /// journal. Without it each mount is probed.
    pub async fn recover(
        &self,
        volumes: Vec<VolumeRow>,
        mounts: Vec<MountRow>,
        boot: String,
        same_boot: bool,
        table: Option<MountTable>,
    ) -> Result<Recovered, RegistryError> {
        let shared = &self.shared;
        shared.untaken.store(true, Ordering::SeqCst);
        let staged = volumes.iter().filter_map(|row| row.staging.as_deref());
        let roots = roots_of_lives(mounts.iter().map(|row| row.source.as_str()).chain(staged));
        // One table serves all rows: the read of a long one is most of the time until csid is ready.
        if let Some(table) = &table {
            shared.host.find_lives_in(table, &roots).await;
        }
        self.restrict_half_published(&mounts).await;
        let called_mounted: Vec<&MountRow> =
            mounts.iter().filter(|row| row.phase == Phase::Mounted).collect();
        let mut looked = shared.sights_at_start(&called_mounted, table.as_ref()).await.into_iter();
        drop(table);
        let mut seen: BTreeMap<VolumeKey, Seen> = BTreeMap::new();
        for row in mounts {
            let (sight, look) = match row.phase {
                Phase::Mounted => looked.next().unwrap_or((Observed::Gone, None)),
                _ => (Observed::Gone, None),
            };
            // A device node outlives a boot. Its number does not.
            let left_over = !same_boot && matches!(look, Some(Look::Device { .. }));
            let sight = if left_over { Observed::Gone } else { sight };
            let seen = seen.entry(row.volume.clone()).or_default();
            seen.mounts.push(Arc::new(row));
            seen.looks.push((sight, look));
        }

        shared.records.set_boot(boot.clone());
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
                if look.as_ref().is_some_and(WatchedVolumes::are_watched) {
                    shared.served.note(row);
                }
            }
            let mut rows = JournaledVolume::new(Volume { row, mounts });
            if let Err(refusal) = rows.step(MountEvent::Recovered { same_boot, sights }) {
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
        // Synced even if nothing changed: an earlier csid may have written rows and ended before it synced them. From now on
        // they are answered again.
        fault::around("recovery", shared.store.commit(changes, Durability::Disk)).await?;
        for volume in recovered {
            let work = volume.mounts.iter().any(|row| !matches!(row.phase, Phase::Mounted | Phase::Lost));
            let recovering = work.then(|| shared.operations.recovering());
            shared.directory.enter(volume, recovering);
        }
        for Left { volume, subject, uid } in left {
            shared.directory.go_on(&volume, subject, uid);
        }
        shared.untaken.store(false, Ordering::SeqCst);
        Ok(found)
    }

    /// Sets the flags of a mount that an older csid published and did not restrict before it ended. The plugin is not involved.
    /// A failure is only logged, because the mount was never answered.
    async fn restrict_half_published(&self, mounts: &[MountRow]) {
        let is_half =
            |row: &&MountRow| row.published.is_none() && !matches!(row.publish, Leg::Absent | Leg::Present);
        // csid never restricts a publish of another manager.
        let is_own = |row: &&MountRow| paths::is_own(&row.volume, Path::new(&row.source));
        let restricting = mounts.iter().filter(is_half).filter(is_own).map(|row| async {
            let (source, spec) = (Path::new(&row.source), &row.spec);
            let how = Restrict { nosuid: !spec.suid, nodev: !spec.dev, read_only: false };
            if let Err(error) = self.shared.host.deliver(&row.volume.plugin, source, source, how).await {
                tracing::warn!(path = row.source, %error, "cannot restrict what was half published");
            }
        });
        side_by_side(restricting).await;
    }

    /// Returns the work that an earlier csid left between two states, and this node's claims without the mount for which they
    /// were taken.
    async fn left(&self, seen: &BTreeMap<VolumeKey, Seen>) -> Result<Vec<Left>, RegistryError> {
        let shared = &self.shared;
        let mut left = self.unfinished().await?;
        let mounts = seen.values().flat_map(|seen| &seen.mounts);
        let users: BTreeSet<_> = mounts.map(|row| Subject::Claim(ClaimKey::of(&row.key))).collect();
        let filter = ClaimFilter { node: Some(shared.records.node.clone()), ..ClaimFilter::default() };
        for ListedClaim { name, claim, .. } in shared.records.registry.claims(filter).await?.0 {
            let subject = Subject::Claim(ClaimKey::new(&name, &claim.consumer));
            if claim.bound.is_some() {
                shared.bound.note(&shared.records.registry.record(name.clone()).await?, &shared.records.node);
            }
            if claim.by_mount && !users.contains(&subject) && !left.iter().any(|left| left.subject == subject)
            {
                let volume = shared.records.registry.record(name).await?.volume;
                left.push(Left { volume, subject, uid: claim.uid });
            }
        }
        Ok(left)
    }

    async fn unfinished(&self) -> Result<Vec<Left>, RegistryError> {
        let filter = RecordFilter { restless: true, ..RecordFilter::default() };
        let (records, _) = self.shared.records.registry.records(filter).await?;
        Ok(records.iter().flat_map(|record| unfinished(record, &self.shared.records.node)).collect())
    }

    /// Retries all unfinished work, including parked work.
    pub(in crate::volume) async fn sweep(&self) -> crate::Result<()> {
        for Left { volume, subject, uid } in self.unfinished().await? {
            self.shared.directory.go_on(&volume, subject, uid);
        }
        Ok(())
    }
}

/// Returns the roots of plugins below whose tmpfs these paths are.
fn roots_of_lives<'p>(paths: impl Iterator<Item = &'p str>) -> BTreeSet<PathBuf> {
    let root = |path: &'p str| paths::root_of_live(paths::kind(Path::new(path))?.parent()?);
    // Most paths are below the same few roots.
    let roots: BTreeSet<&OsStr> = paths.filter_map(root).map(Path::as_os_str).collect();
    roots.into_iter().map(PathBuf::from).collect()
}

/// Work to continue without a caller: its subject, the volume whose actor does it, and its uid.
#[derive(Debug, PartialEq, Eq)]
struct Left {
    volume: VolumeKey,
    subject: Subject,
    uid: u32,
}

/// Returns the parts of a record that are between two states: claims of this node, attachments that AttachVolume left, a
/// creation, a deletion.
fn unfinished(record: &Record, node: &str) -> Vec<Left> {
    let volume = record.volume.clone();
    let left = |subject, uid| Left { volume: volume.clone(), subject, uid };
    let is_open =
        |claim: &&Claim| claim.node == node && (claim.releasing || claim.state != ClaimState::Taken);
    let claims = record.claims.iter().filter(is_open);
    let claims =
        claims.map(|claim| left(Subject::Claim(ClaimKey::new(&record.name, &claim.consumer)), claim.uid));
    let attached = record.attachments.iter().filter(|at| at.leg != Leg::Present);
    let attached = attached.filter_map(|at| {
        let (call, node_id) = at.by_call.as_ref().zip(at.node_id.clone())?;
        Some(left(Subject::Attachment { volume: record.name.clone(), node_id }, call.uid))
    });
    let registration = record.registration.as_ref().filter(|_| is_unborn(record) || is_being_deleted(record));
    let registration =
        registration.map(|registration| left(Subject::Volume(record.name.clone()), registration.uid));
    claims.chain(attached).chain(registration).collect()
}

/// Returns the event for a mount that was mounted, or may have been, and is not any more. `None`: the mount is there, or was not
/// mounted.
fn tell(row: &MountRow, sight: Observed, same_boot: bool) -> Option<NewEvent> {
    let why = match (row.phase, sight) {
        // The journal may lack the outcome of an answered mount.
        (Phase::Mounted | Phase::Mounting, Observed::Gone | Observed::Unbound) if !same_boot => {
            "the host has booted"
        }
        (Phase::Mounted, Observed::Gone | Observed::Unbound) => "removed behind csid's back",
        _ => return None,
    };
    Some(watched(EventKind::MountLost, row, why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::claim_set::ClaimSet;
    use crate::store::registry::{
        AttachCall, Attachment, Capability, ClaimMode, Creation, Origin, Registration, Standing, Use,
        VolumeName, VolumeSpec,
    };
    use crate::store::rows::{AccessMode, AttachmentMode};
    use crate::volume::lifecycle::{new_claim, new_registration};

    fn record(standing: Option<Standing>) -> Record {
        let name = VolumeName { namespace: "ns".into(), volume: "v".into() };
        let spec = VolumeSpec { name: "disk".into(), ..VolumeSpec::default() };
        let registration =
            standing.map(|standing| Registration { standing, ..new_registration(1000, spec, Origin::Bus) });
        let volume = VolumeKey::new("p", "x");
        Record { volume, registration, ..Record::none(name) }
    }

    fn left(record: &Record) -> Vec<(VolumeKey, Subject, u32)> {
        let left = unfinished(record, "n1").into_iter();
        left.map(|left| (left.volume, left.subject, left.uid)).collect()
    }

    #[test]
    fn unsettled_work_continues_in_its_queue() {
        let capability = Capability {
            access_mode: AccessMode::SingleNodeWriter,
            attachment_mode: AttachmentMode::FileSystem,
        };
        let (volume, known) = (|| Subject::Volume(record(None).name), || record(None).volume);
        assert_eq!(left(&record(None)), []);
        assert_eq!(left(&record(Some(Standing::Registered))), []);

        let deleting = record(Some(Standing::Deleting { secrets_given: true, back: None, unasked: false }));
        assert_eq!(left(&deleting), [(known(), volume(), 1000)]);

        let creation = Creation {
            capacity_min: 0,
            capacity_max: 0,
            register: false,
            secrets_given: false,
            source: None,
            sourceless: false,
            ..Creation::default()
        };
        let mut creating = record(Some(Standing::Creating(creation)));
        assert_eq!(left(&creating), [], "the plugin has answered; the answer waits for its caller");
        creating.volume = VolumeKey::creating("p", "disk");
        assert_eq!(left(&creating), [(creating.volume.clone(), volume(), 1000)]);

        let mut used = record(Some(Standing::Registered));
        let usage = Use { mode: ClaimMode::Write, capability };
        let claim =
            |consumer: &str, node: &str, state| Claim { state, ..new_claim(consumer, node, 7, usage) };
        used.claims = ClaimSet::from(vec![
            claim("taken", "n1", ClaimState::Taken),
            claim("pending", "n1", ClaimState::Pending),
            claim("anothers", "n2", ClaimState::Pending),
        ]);
        let by_call = Some(AttachCall { uid: 8, read_only: false, capability, secrets_given: false });
        let at = |node_id: &str, leg, by_call| Attachment {
            node_id: Some(node_id.into()),
            by_call,
            ..Attachment::new("", leg)
        };
        used.attachments = vec![
            at("i-1", Leg::Removing, by_call.clone()),
            at("i-2", Leg::Present, by_call),
            at("i-3", Leg::Making, None),
        ];
        let pending = Subject::Claim(ClaimKey::new(&used.name, "pending"));
        let detach = Subject::Attachment { volume: used.name.clone(), node_id: "i-1".into() };
        assert_eq!(left(&used), [(known(), pending, 7), (known(), detach, 8)]);
    }
}
