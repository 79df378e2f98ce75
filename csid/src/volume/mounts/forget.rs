//! Forget: root drops the row of a mount or attachment, or a claim with its mounts, although the plugin never confirmed their end. It is the
//! last resort and always ends: it probes the kernel only.
//!
//! Forget interrupts an operation of the volume that waits for its plugin: a removal during its RPC, any other between two
//! tries. It waits for the RPC of another consumer's mount to end.

use std::path::PathBuf;

use serde_json::Value;

use crate::error::{Error, Kind, Result, Step, shown};
use crate::host::{HostError, Sought};
use crate::names::word;
use crate::store::Durability;
use crate::store::event_kind::EventKind;
use crate::store::registry::{Claim, VolumeName};
use crate::store::rows::{AttachmentMode, Leg, MountKey, MountRow, NewEvent, VolumeKey};
use crate::volume::api::requests::{Authority, ForgetRequest, Wait};
use crate::volume::errors::mount::MountError;
use crate::volume::errors::operation::OperationError;
use crate::volume::events::mount as mount_events;
use crate::volume::executor::Executor;
use crate::volume::manager::Volumes;
use crate::volume::model::subject::{ClaimKey, Subject};
use crate::volume::model::volume::MountEvent;
use crate::volume::operation::message::Message;
use crate::volume::operation::orders::Order;
use crate::volume::probe;
use crate::volume::seam::Control;
use crate::volume::waits::PATIENCE;

impl Volumes {
    /// Drops a mount's row, or a claim's row with its mounts, as it is. Returns Busy while any mount namespace shows such a
    /// mount.
    pub async fn forget(&self, request: ForgetRequest) -> Result<()> {
        let ForgetRequest { key, node, all_tags, claim, must_exist, wait } = request;
        self.shared.changeable()?;
        let missing = self.mounts_of(&key, all_tags || claim).await?.is_empty();
        let name = VolumeName::of(&key);
        let record = self.shared.records.registry.record(name).await?;
        let claimed = record.claim(&key.consumer).filter(|_| claim);
        if claimed.is_some_and(|claim| node.is_some_and(|node| node != claim.node)) {
            let text = format!("{} has claimed {} on another node", key.consumer, VolumeName::of(&key));
            return Err(Error::not_found(text));
        }
        if let Some(claim) = claimed.filter(|claim| claim.node != self.shared.records.node) {
            return Err(of_another_node(&key, claim));
        }
        if missing && claimed.is_none() {
            self.shared.synced().await?;
            if !must_exist {
                return Ok(());
            }
            let others = self.mounts_of(&key, true).await?;
            let tags = others.into_iter().map(|row| row.key.tag).collect();
            return Err(MountError::NoMount { key, tags, foreign: Vec::new() }.into());
        }
        let volume = self.shared.directory.find(&key).or((!record.is_empty()).then(|| record.volume.clone()));
        let volume = volume.ok_or_else(|| Error::internal("a mount's volume has no rows"))?;
        let subject = match claim {
            true => Subject::Claim(ClaimKey::of(&key)),
            false => Subject::Mount(key.clone()),
        };
        let answered = self.order(&volume, VolumeName::of(&key), subject, all_tags, &wait).await;
        answered.map_err(|error| {
            error.with(|details| {
                details.namespace.get_or_insert_with(|| key.namespace.clone());
                details.volume.get_or_insert_with(|| key.volume.clone());
                details.plugin.get_or_insert_with(|| volume.plugin.clone());
                details.step.get_or_insert(Step::Forget);
            })
        })
    }

    /// Drops the row of an attachment by AttachVolume. Returns NotFound if there is none, and Busy while this host has the volume
    /// staged under the node id.
    pub async fn forget_attachment(&self, name: VolumeName, node_id: String, wait: Wait) -> Result<()> {
        self.shared.changeable()?;
        let record = self.shared.records.registry.record(name.clone()).await?;
        if !record.attachments.iter().any(|at| at.is_by_call(&node_id)) {
            self.shared.synced().await?;
            return Err(Error::not_found(format!("AttachVolume has attached {name} to no node {node_id}")));
        }
        let subject = Subject::Attachment { volume: name.clone(), node_id };
        self.order(&record.volume, name, subject, false, &wait).await
    }

    /// Has the actor of a volume forget rows, and waits for its answer until the deadline.
    async fn order(
        &self,
        volume: &VolumeKey,
        name: VolumeName,
        subject: Subject,
        all_tags: bool,
        wait: &Wait,
    ) -> Result<()> {
        let (reply, answer) = tokio::sync::oneshot::channel();
        let order = Order { subject, all_tags, reply };
        self.shared.directory.send(volume, name, Message::Forget(order));
        let answered = async {
            answer.await.unwrap_or_else(|_| {
                Err(self.shared.store.writable().err().unwrap_or_else(|| OperationError::ShuttingDown.into()))
            })
        };
        match wait.deadline {
            None => answered.await,
            Some(at) => tokio::time::timeout_at(at.into(), answered).await.unwrap_or_else(|_| {
                let text = "the deadline passed before it was forgotten; it is forgotten yet";
                Err(Error::new(Kind::TimedOut, text))
            }),
        }
    }
}

fn of_another_node(key: &MountKey, claim: &Claim) -> Error {
    let text = format!(
        "{} has claimed {} on node {}, whose mounts are not seen from here",
        key.consumer,
        VolumeName::of(key),
        claim.node
    );
    Error::new(Kind::NotSupported, text)
}

impl Executor<'_> {
    /// Carries out root's orders to forget, between two effects.
    pub(in crate::volume) async fn carry_out(&mut self) {
        let orders = std::sync::Arc::clone(&self.operation.orders);
        let _under_way = orders.begin();
        while let Some(order) = orders.take() {
            let ended = self.forget(&order).await;
            // A caller that has gone gets the answer when it repeats the call.
            let _ = order.reply.send(ended);
        }
    }

    async fn forget(&mut self, order: &Order) -> Result<()> {
        let (claim_key, keys) = match &order.subject {
            Subject::Attachment { volume, node_id } => {
                return self.control().forget_attachment(volume, node_id).await;
            }
            Subject::Volume(name) => {
                return Err(Error::internal(format!("{name} is no mount, claim or attachment to forget")));
            }
            Subject::Claim(key) => (key.clone(), self.mounts_of(key)),
            Subject::Mount(key) if order.all_tags => (ClaimKey::of(key), self.mounts_of(&ClaimKey::of(key))),
            Subject::Mount(key) => (ClaimKey::of(key), vec![key.clone()]),
        };
        for key in &keys {
            self.forget_mount(key).await?;
        }
        if matches!(order.subject, Subject::Claim(_)) {
            return self.control().release(&claim_key, Authority::Any(0), true, None).await;
        }
        // Releases the claim that a Mount took implicitly, after its last mount.
        if self.mounts_of(&claim_key).is_empty() {
            let record = self.shared.records.registry.record(claim_key.volume.clone()).await?;
            if let Some(claim) = record.claim(&claim_key.consumer).filter(|claim| claim.by_mount) {
                let go_on = Message::Continue(Subject::Claim(claim_key), claim.uid);
                self.shared.directory.tell(&self.rows.volume().row.key, go_on);
            }
        }
        Ok(())
    }

    /// Forgets a mount in one commit. A csid that is killed before the commit has the row as it was, and after it no row.
    async fn forget_mount(&mut self, key: &MountKey) -> Result<()> {
        let Some(row) = self.row(key).cloned() else { return self.shared.synced().await };
        let with_staging = self.rows.volume().forgets_staging(key);
        self.refuse_while_mounted(&row, with_staging).await?;
        let staging = self.rows.volume().row.staging.clone();
        let event = forgotten(&row, staging, self.rows.volume().row.stage);
        let forget = MountEvent::Forget { key: key.clone() };
        self.rows
            .step(forget)
            .map_err(|refusal| Error::internal(format!("a forget was refused: {refusal:?}")))?;
        self.clean_up(key).await;
        self.persist(Durability::Disk, Some(event)).await.map_err(|failure| failure.error)?;
        let (plugin, name) = (&self.rows.volume().row.key.plugin, VolumeName::of(key));
        tracing::warn!(
            consumer = key.consumer,
            tag = key.tag,
            "plugin {plugin}, {name}: a mount was forgotten"
        );
        Ok(())
    }

    /// Returns Busy while a mount namespace shows a mount of the row: at its paths, at its target, or of its file system or
    /// device. `with_staging`: also while one shows the staging, or while the volume's block device is held exclusively.
    async fn refuse_while_mounted(&self, row: &MountRow, with_staging: bool) -> Result<()> {
        let (host, volume) = (&self.shared.host, self.rows.volume());
        let staging = volume.row.staging.as_deref();
        let own = [row.source.as_str(), row.published()].into_iter();
        let below: Vec<PathBuf> = own.chain(staging.filter(|_| with_staging)).map(PathBuf::from).collect();
        let target = row.spec.target.as_ref().filter(|_| row.target != Leg::Absent).map(PathBuf::from);
        let mut backing = probe::known(&volume.row)?;
        if backing.is_unknown() {
            // No removal has begun. Only the device number of the mounts is known.
            let is_block = row.spec.usage.attachment_mode == AttachmentMode::BlockDevice;
            backing = host.all_own_mounts().await?.backing(&[], is_block, row.device);
        }
        let sought = Sought {
            below,
            target,
            device: row.device,
            shown: backing.shown.clone(),
            everywhere: with_staging,
            base: self.shared.directories.state.clone(),
        };
        let mounted = host.still_mounted(sought.clone()).await?;
        if let Some(first) = mounted.first() {
            let holders = host.holders(first);
            let holders = tokio::time::timeout(PATIENCE, holders).await.unwrap_or_default();
            return Err(still_mounted(&mounted, &row.key.consumer, holders));
        }
        let found = host.still_elsewhere(sought).await?;
        if !found.is_empty() {
            let holders = host.holders_elsewhere(&found).await;
            return Err(MountError::InUseElsewhere {
                path: row.source.clone().into(),
                consumer: row.key.consumer.clone(),
                holders,
            }
            .into());
        }
        if !with_staging {
            return Ok(());
        }
        // This call does not run among the plugin's own calls, because hung ones would block it.
        match host.is_held(LAST_RESORT, &backing).await {
            Ok(None) => Ok(()),
            // Another disk may have the number by now, and Forget always ends.
            Ok(Some(device)) if backing.is_remembered() => {
                tracing::warn!(
                    volume = %VolumeName::of(&row.key),
                    device,
                    "a device of this number is in use"
                );
                Ok(())
            }
            Ok(Some(device)) => {
                Err(MountError::DeviceInUse { device, consumer: row.key.consumer.clone() }.into())
            }
            // The last resort also ends if the device does not answer: no table has mounts of it.
            Err(error @ HostError::Hung(_)) => {
                tracing::warn!(volume = %VolumeName::of(&row.key), %error, "the block device was not asked");
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// The name by which the helper bounds a forget's calls. It is no plugin's.
const LAST_RESORT: &str = ", forget";
/// Number of paths that an error names.
const NAMED: usize = 16;

fn still_mounted(paths: &[PathBuf], consumer: &str, holders: Vec<String>) -> Error {
    let named: Vec<String> = paths.iter().take(NAMED).map(shown).collect();
    let text =
        format!("it is still mounted, at {}; it is forgotten only when that is unmounted", named.join(", "));
    Error::new(Kind::Busy, text).with(|details| {
        details.holders = std::iter::once(consumer.to_owned()).chain(holders).collect();
    })
}

/// Returns an event with all that was known of the mount.
fn forgotten(row: &MountRow, staging: Option<String>, stage: Leg) -> NewEvent {
    let mut event = mount_events::ended(EventKind::MountForgotten, Some(row), None).unwrap_or(NewEvent {
        kind: EventKind::MountForgotten,
        subject: VolumeName::of(&row.key).to_string(),
        details: Default::default(),
    });
    let usage = &row.spec.usage;
    let facts = [
        ("external-id", row.volume.handle.to_string()),
        ("state", word(row.phase).to_owned()),
        ("staging", staging.unwrap_or_default()),
        ("source", row.source.clone()),
        ("published", row.published().to_owned()),
        ("target", row.spec.target.clone().unwrap_or_default()),
        ("access-mode", word(usage.access_mode).to_owned()),
        ("attachment-mode", word(usage.attachment_mode).to_owned()),
        ("fs-type", usage.fs_type.clone()),
        ("last-error", row.error.clone().unwrap_or_default()),
    ];
    event.details.extend(facts.map(|(key, text)| (key, Value::from(text))));
    for (key, leg) in [("stage", stage), ("publish", row.publish), ("bind", row.target)] {
        event.details.insert(key, serde_json::to_value(leg).unwrap_or_default());
    }
    event.details.insert("read-only", Value::from(row.spec.read_only));
    event.details.insert("since", Value::from(row.since_usec));
    event
}
