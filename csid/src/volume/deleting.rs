//! DeleteVolume: once it was asked for, it goes on to its end.

use crate::error::{Kind, Result};
use crate::plugin::Controller;
use crate::store::Durability;
use crate::store::registry::{Record, Standing, VolumeName};
use crate::volume::claim_words as words;
use crate::volume::controlling::Target;
use crate::volume::drive::Drive;
use crate::volume::journalled::Unfinished;

impl Drive<'_> {
    /// DeleteVolume, registered or not: once it was asked for it goes on to its end.
    pub(super) async fn delete(&mut self, target: &Target) -> Result<()> {
        let name = VolumeName::of(&target.key);
        self.refuse_while_used(target).await?;
        let volume = self.rows.volume().row.key.clone();
        let standing = Standing::Deleting { secrets_given: self.secrets.is_some() };
        let deleting = |record: &mut Record| {
            record.volume = volume.clone();
            let registration = record.registration.get_or_insert_with(|| target.registration.clone());
            // The secrets of the first call are not forgotten by the next one, which has none.
            if !matches!(registration.standing, Standing::Deleting { .. }) {
                registration.standing = standing.clone();
            }
            registration.parked.clear();
            Ok(None)
        };
        let record = self.shared.amend(&name, Durability::Disk, deleting).await?;
        let needs = matches!(
            record.registration.as_ref().map(|registration| &registration.standing),
            Some(Standing::Deleting { secrets_given: true })
        );
        let has = self.secrets.is_some() || target.registration.spec.credential.is_some();
        let (id, secrets) = (&self.external_id(), self.target_secrets(target)?);
        let delete = |controller: Controller, request| async move { controller.delete(id, request).await };
        let deleted = match needs && !has {
            true => Err(words::secret_required(&name, "DeleteVolume")),
            false => self.controlled("delete", "DeleteVolume", target, secrets.as_ref(), delete).await,
        };
        let Err(error) = deleted else {
            let gone = |record: &mut Record| {
                record.registration = None;
                Ok(Some(words::registered("volume-deregistered", record)))
            };
            return self.shared.amend(&name, Durability::Disk, gone).await.map(drop);
        };
        // The plugin's definite no: it is there, and stays.
        let refused = error.kind == Kind::PluginError && !error.details.retryable;
        let parked = error.kind == Kind::SecretRequired;
        let stays = |record: &mut Record| {
            let Some(registration) = &mut record.registration else { return Ok(None) };
            match refused {
                true if target.is_registered => registration.standing = Standing::Registered,
                true => record.registration = None,
                false if parked => registration.parked.clone_from(&error.message),
                false => {}
            }
            Ok(None)
        };
        self.shared.amend(&name, Durability::Disk, stays).await?;
        if !refused {
            let unfinished = Unfinished { uid: target.uid, parked };
            self.rows.set_unfinished(target.key.clone(), Some(unfinished));
        }
        Err(error)
    }
}
