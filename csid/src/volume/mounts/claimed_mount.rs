//! Mounts of registered volumes. Each needs the claim of its consumer, and uses what that claim has attached.

use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::store::Durability;
use crate::store::event_kind::EventKind;
use crate::store::registry::{Claim, Record, Registration, VolumeName};
use crate::store::rows::{AttachmentMode, Leg, MountKey, MountRow, Phase};
use crate::volume::api::views::Mounted;
use crate::volume::errors::claim::ClaimError;
use crate::volume::errors::mount::MountError;
use crate::volume::events::{claim as claim_events, mount as mount_events};
use crate::volume::executor::Executor;
use crate::volume::lifecycle::is_healed;
use crate::volume::model::subject::ClaimKey;
use crate::volume::model::volume::DesiredMount;
use crate::volume::operation::message::Message;
use crate::volume::operation::request::{CallTarget, ServersAnswer};
use crate::volume::seam::Control;
use crate::volume::waits::PluginWaits;

impl Executor<'_> {
    /// Mounts a registered volume with its consumer's claim. Takes the claim if there is none. `answer`: as of [`Control::claim`].
    pub(in crate::volume) async fn mount_claimed(
        &mut self,
        wanted: &mut DesiredMount,
        claim: &Claim,
        ahead: &[Arc<Claim>],
        answer: Option<Arc<ServersAnswer>>,
    ) -> Result<Mounted> {
        let (key, name) = (wanted.key.clone(), VolumeName::of(&wanted.key));
        let mut registration = None;
        let mut record = match self.row(&key).filter(|row| row.phase == Phase::Mounted) {
            // A mount that is recorded and there needs no claim, even if every other component is away. A claim that exists has
            // to stay.
            Some(row) => {
                wanted.spec.usage.publish_context = row.spec.usage.publish_context.clone();
                let record = self.shared.records.registry.record(name.clone()).await?;
                if record.claim(&key.consumer).is_some() {
                    self.control().admit(&record, claim)?;
                } else if claim.bound.is_some() {
                    self.control().claim(&name, claim, ahead, answer).await?;
                    // The mount is already there, so it does not sync the claim.
                    self.shared.records.synced().await?;
                }
                record
            }
            None => {
                let record = self.control().claim(&name, claim, ahead, answer).await?;
                self.use_attachment(&record, wanted);
                self.use_granted(&record, claim, wanted);
                registration.clone_from(&record.registration);
                record
            }
        };
        self.heals = is_healed(&record);
        let mut mounted = match self.refuse_other_name(&record).await {
            Ok(()) => self.mount(wanted).await,
            Err(error) => Err(error),
        };
        if mounted.is_ok()
            && let Err(error) = self.control().rebind(&mut record, claim).await
        {
            mounted = Err(error);
        }
        match (&mounted, registration) {
            (Err(_), _) => self
                .control()
                .give_back(&ClaimKey::of(&key))
                .await
                .unwrap_or_else(|error| claim_events::log(&name, &key.consumer, &error)),
            (Ok(_), Some(registration)) => self.enlarge_later(wanted, &registration),
            (Ok(_), None) => {}
        }
        mounted
    }

    /// Queues the rest of an expansion behind the requested mount, which does not wait for it. If it fails again, the next
    /// mount tries it.
    fn enlarge_later(&mut self, wanted: &DesiredMount, registration: &Registration) {
        if registration.pending_expansion.is_some() {
            let message = Message::Enlarge(wanted.key.clone(), wanted.uid, self.operation.secrets.take());
            self.shared.directory.tell(&self.rows.volume().row.key, message);
        }
    }

    /// Finishes the expansion of a volume that is mounted. After an error the expansion stays due.
    pub(in crate::volume) async fn enlarge(&mut self, key: &MountKey) -> Result<()> {
        let Some(row) = self.row(key).filter(|row| row.phase == Phase::Mounted) else { return Ok(()) };
        let uid = row.uid;
        let name = VolumeName::of(key);
        let Some(registration) = self.control().record(&name).await?.registration else { return Ok(()) };
        let target = CallTarget { name, uid, registration, is_registered: true };
        self.control()
            .finish_expansion(&target)
            .await
            .inspect_err(|error| claim_events::log(&target.name, &key.consumer, error))?;
        if let Some(servers) = &self.shared.records.servers {
            servers.has_expanded();
        }
        Ok(())
    }

    /// Mounts a waiting row again.
    pub(in crate::volume) async fn restore(&mut self, wanted: &mut DesiredMount) -> Result<Mounted> {
        let mut registration = None;
        if wanted.spec.registered {
            let key = wanted.key.clone();
            let name = VolumeName::of(&key);
            let record = self.control().record(&name).await?;
            let is_its = |claim: &&Claim| !claim.releasing && claim.uid == wanted.uid;
            let Some(claim) = record.claim(&key.consumer).filter(is_its).cloned() else {
                return Err(ClaimError::Unclaimed { claim: ClaimKey::of(&key) }.into());
            };
            let record = self.control().claim(&name, &claim, &[], None).await?;
            self.use_attachment(&record, wanted);
            self.heals = is_healed(&record);
            self.refuse_other_name(&record).await?;
            registration = record.registration;
        }
        let mounted = self.mount(wanted).await?;
        if let Some(registration) = registration {
            self.enlarge_later(wanted, &registration);
        }
        Ok(mounted)
    }

    /// Mounts again a mount that lost its server. The volume's other mounts that died with it wait from then on, and are
    /// mounted after it.
    pub(in crate::volume) async fn heal(&mut self, key: &MountKey) -> Result<()> {
        let Some(row) = self.row(key).filter(|row| row.phase == Phase::Mounted) else { return Ok(()) };
        let mut wanted = DesiredMount::of(row);
        let healed = self.restore(&mut wanted).await;
        if let Err(error) = &healed
            && !self.operation.step.has_yielded()
            && self.row(key).is_some_and(|row| row.phase == Phase::Mounted)
        {
            self.tell_unhealed(key, error).await;
        }
        let lacks =
            |row: &&Arc<MountRow>| row.phase == Phase::Waiting && row.status.healing && row.lacks_secrets();
        let lacking: Vec<MountKey> =
            self.rows.volume().mounts.iter().filter(lacks).map(|row| row.key.clone()).collect();
        for key in &lacking {
            self.tell_unhealed(key, &MountError::SecretsNeeded { key: key.clone() }.into()).await;
        }
        healed.map(drop)
    }

    /// Writes into the row, and once into an event, why the mount is not made again.
    async fn tell_unhealed(&mut self, key: &MountKey, error: &Error) {
        let Some(row) = self.row(key).filter(|row| row.error.as_ref() != Some(&error.message)) else {
            return;
        };
        let kind =
            if error.kind == Kind::SecretRequired { EventKind::SecretRequired } else { EventKind::Mount };
        let event = mount_events::ended(kind, Some(row), Some(error));
        self.rows.remark(key, |row| row.error = Some(error.message.clone()));
        if let Err(error) = self.rows.persist(&self.shared.store, Durability::Process, event).await {
            tracing::warn!(%error, "the journal could not be written");
        }
    }

    /// Copies into the request what the servers of a cluster show no node before it has claimed the volume.
    fn use_granted(&self, record: &Record, claim: &Claim, wanted: &mut DesiredMount) {
        let Some(registration) =
            record.registration.as_ref().filter(|_| self.shared.records.servers.is_some())
        else {
            return;
        };
        // The context says which storage gets the secrets, so both are of one answer.
        if claim.credential.is_none() && !wanted.spec.secrets_given {
            wanted.spec.credential.clone_from(&registration.spec.credential);
        }
        let usage = &mut wanted.spec.usage;
        usage.context.clone_from(&registration.spec.context);
        if usage.mount_flags.is_empty() && usage.attachment_mode == AttachmentMode::FileSystem {
            usage.mount_flags.clone_from(&registration.spec.mount_flags);
        }
    }

    /// Refuses a mount if a server has attached the volume to another name than the plugin gives this node now. The plugin may stage it for another
    /// node otherwise. A mount that is there stays. csid alone attaches to the present name only.
    async fn refuse_other_name(&mut self, record: &Record) -> Result<()> {
        let records = &self.shared.records;
        let attached = record.attachment(&records.node).filter(|_| records.servers.is_some());
        let Some(node_id) = attached.and_then(|at| at.node_id.as_deref()) else { return Ok(()) };
        let ready = self.ready().await?;
        self.shared.plugins.refuse_attached_as(ready.id(), node_id)
    }

    /// Copies the attachment's present publish context into the request. After another boot the context may have changed.
    pub(in crate::volume) fn use_attachment(&mut self, record: &Record, wanted: &mut DesiredMount) {
        let context = record.attachment(&self.shared.records.node).map(|at| at.publish_context.clone());
        let context = context.unwrap_or_default();
        // A staged volume was staged with the context that its rows have.
        if self.rows.volume().row.stage == Leg::Absent {
            let keys: Vec<MountKey> = self.rows.volume().mounts.iter().map(|row| row.key.clone()).collect();
            for key in keys.iter().filter(|key| VolumeName::of(key) == record.name) {
                self.rows.remark(key, |row| row.spec.usage.publish_context.clone_from(&context));
            }
        }
        wanted.spec.usage.publish_context = context;
    }
}
