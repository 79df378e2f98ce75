//! DeleteVolume: once it was asked for, it goes on to its end, or until the plugin refuses.

use crate::error::{Error, Kind, Result};
use crate::plugin::Controller;
use crate::store::Durability;
use crate::store::registry::{Origin, Record, Registration, Standing, VolumeName};
use crate::volume::controlling::{Call, Target};
use crate::volume::creating::{is_unborn, refuse_anothers};
use crate::volume::drive::Drive;
use crate::volume::journalled::Unfinished;
use crate::volume::requests::VolumeRequest;
use crate::volume::unanswered::Unanswered;
use crate::volume::work::{Operation, Work};
use crate::volume::{Shared, Volumes, claim_words as words};

impl Volumes {
    /// What is being created is created first: it cannot be deleted by its name (CSI rule 39).
    pub async fn delete_volume(&self, mut request: VolumeRequest) -> Result<()> {
        if request.inline.is_some() {
            return self.call(request, Call::Delete).await.map(drop);
        }
        self.shared.changeable()?;
        let record = self.shared.registry.record(request.name.clone()).await?;
        let Some(registration) = record.registration.clone() else { return self.shared.synced().await };
        if is_unborn(&record) {
            refuse_anothers(&record, request.uid)?;
            let (secrets, credential) = (request.secrets.take(), request.credential.take());
            request.secrets = self.shared.given(secrets, credential, request.wait.deadline).await?;
            let VolumeRequest { name, uid, secrets, wait, .. } = &request;
            let (plugin, create) = (&record.volume.plugin, Call::Create { to_delete: true });
            let (secrets, by) = (secrets.clone(), (*uid, wait.clone()));
            let made = self.creation(name.clone(), plugin, create, registration, secrets, by).await;
            let now = self.shared.registry.record(name.clone()).await?;
            match made {
                // The plugin has none of that name.
                Err(_) if now.registration.is_none() => return Ok(()),
                // It is there, if not as it was wanted.
                Err(error) if is_unborn(&now) => return Err(error),
                _ => {}
            }
        }
        let name = request.name.clone();
        match self.call(request, Call::Delete).await {
            // An earlier call's deletion has come to its end since.
            Err(error) if error.kind == Kind::NotFound => {
                let now = self.shared.registry.record(name).await?;
                if now.registration.is_none() { self.shared.synced().await } else { Err(error) }
            }
            done => done.map(drop),
        }
    }
}

impl Operation {
    /// Why `asked` cannot be had while this is under way or queued. What somebody waits for to be created is not deleted, nor
    /// is what he waits for to be deleted given to another.
    pub(super) fn refuses(&self, asked: &Work, shared: &Shared) -> Option<Error> {
        let (
            Work::Call { target, call: Call::Create { to_delete }, .. },
            Work::Call { target: other, call: Call::Create { to_delete: asked_to_delete }, .. },
        ) = (&self.work, asked)
        else {
            return self.work.refuses(asked);
        };
        if self.waiters.is_empty() || target.key != other.key || to_delete == asked_to_delete {
            return None;
        }
        let name = VolumeName::of(&target.key);
        let under_way = shared.operations.creating(&name).filter(|_| *asked_to_delete);
        Some(under_way.map_or_else(|| words::on_its_way(&name), |of| words::being_created(&name, &of)))
    }
}

impl Drive<'_> {
    /// DeleteVolume, registered or not.
    pub(super) async fn delete(&mut self, target: &Target) -> Result<()> {
        let name = VolumeName::of(&target.key);
        self.refuse_while_used(target).await?;
        let (volume, given) = (self.rows.volume().row.key.clone(), self.secrets.is_some());
        let mut asked_before = false;
        let deleting = |record: &mut Record| {
            if record.registration.is_none() && !target.is_registered {
                record.volume = volume.clone();
                record.registration = Some(Registration {
                    standing: Standing::Deleting { secrets_given: given, back: None },
                    ..target.registration.clone()
                });
                return Ok(None);
            }
            self.shared.refuse_other_origin(record, Origin::Bus)?;
            // Nothing else keeps another node from claiming it since it was looked at.
            if !record.claims.is_empty() {
                return Err(words::in_use(record, "release it first"));
            }
            let Some(registration) = &mut record.registration else { return Ok(None) };
            if record.volume != volume {
                return Err(words::changed_meanwhile(&record.name));
            }
            match &mut registration.standing {
                // The secrets of the first call are not forgotten by the next one, which has none.
                Standing::Deleting { secrets_given, .. } => {
                    asked_before = true;
                    *secrets_given |= given;
                }
                standing => {
                    let back = Some(Box::new(standing.clone()));
                    *standing = Standing::Deleting { secrets_given: given, back };
                }
            }
            Ok(None)
        };
        let record = self.shared.amend(&name, Durability::Disk, deleting).await?;
        // An earlier call has deleted it.
        let Some(registration) = &record.registration else { return self.shared.synced().await };
        let needs = matches!(registration.standing, Standing::Deleting { secrets_given: true, .. });
        let deleted = match self.target_secrets(target).await {
            Err(error) => Err(Unanswered::before(error)),
            Ok(None) if needs => Err(Unanswered::before(words::secrets_again(&name, "DeleteVolume"))),
            Ok(secrets) => {
                let id = &self.external_id();
                let delete =
                    |controller: Controller, request| async move { controller.delete(id, request).await };
                self.controlled("delete", "DeleteVolume", target, secrets.as_ref(), delete).await
            }
        };
        let ended = match deleted {
            Ok(()) => self.deleted(&name).await,
            Err(unanswered) if unanswered.is_no(asked_before) => {
                self.not_deleted(&name).await.and(Err(unanswered.error))
            }
            Err(unanswered) => {
                self.shared.note_failure(&name, &unanswered.error).await.and(Err(unanswered.error))
            }
        };
        // Also one whose end the journal could not take: the plugin is asked again, and says that it is gone.
        let there = self.shared.registry.record(name).await;
        let is_open = there.as_ref().map_or(true, is_being_deleted);
        let left = ended.as_ref().err().filter(|_| is_open);
        let left = left.map(|error| Unfinished { uid: target.uid, parked: !error.details.retryable });
        self.rows.set_unfinished(target.key.clone(), left);
        ended
    }

    async fn deleted(&mut self, name: &VolumeName) -> Result<()> {
        let gone = |record: &mut Record| {
            let event = is_being_deleted(record).then(|| words::registered("volume-deregistered", record));
            record.registration = record.registration.take().filter(|_| event.is_none());
            Ok(event)
        };
        self.shared.amend(name, Durability::Disk, gone).await.map(drop)
    }

    /// The plugin keeps it.
    async fn not_deleted(&mut self, name: &VolumeName) -> Result<()> {
        let stays = |record: &mut Record| {
            record.registration = record.registration.take().and_then(|registration| {
                let Standing::Deleting { back, .. } = &registration.standing else {
                    return Some(registration);
                };
                let standing = Standing::clone(back.as_deref()?);
                let (parked, error) = (String::new(), String::new());
                Some(Registration { standing, parked, error, ..registration })
            });
            Ok(None)
        };
        self.shared.amend(name, Durability::Disk, stays).await.map(drop)
    }
}

/// The plugin is or was asked to delete it.
pub(super) fn is_being_deleted(record: &Record) -> bool {
    let standing = record.registration.as_ref().map(|registration| &registration.standing);
    matches!(standing, Some(Standing::Deleting { .. }))
}
