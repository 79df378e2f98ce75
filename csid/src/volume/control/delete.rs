//! DeleteVolume. A deletion that has begun continues until the plugin confirms or refuses it.

use crate::error::{Result, Step};
use crate::plugin::Controller;
use crate::secret::Secrets;
use crate::store::Durability;
use crate::store::event_kind::EventKind;
use crate::store::registry::{Origin, Record, Registration, Standing, VolumeName};
use crate::volume::control::engine::Engine;
use crate::volume::control::tries::RpcFailure;
use crate::volume::errors::volume::VolumeError;
use crate::volume::events::registration as registration_events;
use crate::volume::lifecycle::is_being_deleted;
use crate::volume::model::subject::Subject;
use crate::volume::operation::request::CallTarget;
use crate::volume::operation::running::Unfinished;
use crate::volume::seam::Site;
use crate::volume::transitions::{begin_deletion, deletion_refused};

impl<S: Site> Engine<'_, S> {
    /// Deletes a volume, registered or not.
    pub(in crate::volume::control) async fn delete(&mut self, target: &CallTarget) -> Result<()> {
        let name = target.name.clone();
        self.refuse_while_used(target).await?;
        let (volume, given) = (self.site.volume().clone(), self.site.operation().secrets.is_some());
        let mut asked_before = false;
        let deleting = |record: &mut Record| {
            if record.registration.is_none() && !target.is_registered {
                record.volume = volume.clone();
                record.registration = Some(Registration {
                    standing: Standing::Deleting { secrets_given: given, back: None, unasked: false },
                    ..target.registration.clone()
                });
                return Ok(None);
            }
            self.records.refuse_other_origin(record, Origin::Bus)?;
            asked_before |= begin_deletion(record, &volume, given)?;
            Ok(None)
        };
        let record = self.records.amend(&name, Durability::Disk, deleting).await?;
        // An earlier call has deleted it.
        let Some(registration) = &record.registration else { return self.records.synced().await };
        let needs = matches!(registration.standing, Standing::Deleting { secrets_given: true, .. });
        let deleted = match self.target_secrets(target).await {
            Err(error) => Err(RpcFailure::before(error)),
            Ok(None) if needs => Err(RpcFailure::before(
                VolumeError::SecretsNeeded { name: name.clone(), call: "DeleteVolume" }.into(),
            )),
            Ok(secrets) => self.delete_at_plugin(target, secrets.as_ref()).await,
        };
        let ended = match deleted {
            Ok(()) => self.deleted(&name).await,
            Err(unanswered) if unanswered.is_no(asked_before) => {
                self.not_deleted(&name).await.and(Err(unanswered.error))
            }
            Err(unanswered) => {
                self.records.note_failure(&name, &unanswered.error).await.and(Err(unanswered.error))
            }
        };
        // This includes a deletion whose end the journal could not store. The plugin is asked again, and reports that the volume
        // is gone.
        let there = self.records.registry.record(name).await;
        let is_open = there.as_ref().map_or(true, is_being_deleted);
        let left = ended.as_ref().err().filter(|_| is_open);
        let left = left.map(|error| Unfinished { uid: target.uid, parked: !error.details.retryable });
        self.site.set_unfinished(Subject::Volume(target.name.clone()), left);
        ended
    }

    async fn delete_at_plugin(
        &mut self,
        target: &CallTarget,
        secrets: Option<&Secrets>,
    ) -> Result<(), RpcFailure> {
        let id = &self.external_id(target).map_err(RpcFailure::before)?;
        let delete = |controller: Controller, request| async move { controller.delete(id, request).await };
        self.making(Step::Delete, "DeleteVolume", target, secrets, delete).await
    }

    async fn deleted(&mut self, name: &VolumeName) -> Result<()> {
        let gone = |record: &mut Record| {
            let event = is_being_deleted(record)
                .then(|| registration_events::registered(EventKind::VolumeDeregistered, record));
            record.registration = record.registration.take().filter(|_| event.is_none());
            Ok(event)
        };
        self.records.amend(name, Durability::Disk, gone).await.map(drop)
    }

    /// Restores the earlier state of a volume whose deletion the plugin refused.
    async fn not_deleted(&mut self, name: &VolumeName) -> Result<()> {
        let stays = |record: &mut Record| {
            deletion_refused(record);
            Ok(None)
        };
        self.records.amend(name, Durability::Disk, stays).await.map(drop)
    }
}
