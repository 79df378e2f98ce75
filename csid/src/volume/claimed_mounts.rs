//! Mounts of registered volumes: each has its consumer's claim, and is made with what that has attached.

use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::store::Durability;
use crate::store::registry::{Claim, Record, Registration, VolumeName};
use crate::store::rows::{Leg, MountKey, MountRow, Phase};
use crate::volume::control::abandoned;
use crate::volume::controlling::Target;
use crate::volume::drive::Drive;
use crate::volume::served::is_healed;
use crate::volume::state::Wanted;
use crate::volume::{Mounted, claim_words as words, claims, say};

impl Drive<'_> {
    /// Mount a registered volume with its consumer's claim, which is taken for it when there is none.
    pub(super) async fn mount_claimed(
        &mut self,
        wanted: &mut Wanted,
        claim: &Claim,
        ahead: &[Claim],
    ) -> Result<Mounted> {
        let key = wanted.key.clone();
        let mut registration = None;
        let mut record = match self.row(&key).filter(|row| row.phase == Phase::Mounted) {
            // What is recorded and there needs no claim, also when the rest of the world is away; the claim that is there has
            // to stay.
            Some(row) => {
                wanted.spec.usage.publish_context = row.spec.usage.publish_context.clone();
                let record = self.shared.registry.record(VolumeName::of(&key)).await?;
                if record.claim(&key.consumer).is_some() {
                    claims::admit(&self.claims(&record), claim)
                        .map_err(|refusal| words::refusal(refusal, &key, claim))?;
                } else if claim.bound.is_some() {
                    self.claim(&key, claim, ahead).await?;
                    // The mount that would sync it is there.
                    self.shared.synced().await?;
                }
                record
            }
            None => {
                let record = self.claim(&key, claim, ahead).await?;
                self.use_attachment(&record, wanted);
                registration.clone_from(&record.registration);
                record
            }
        };
        self.heals = is_healed(&record);
        let mut mounted = self.mount(wanted).await;
        if mounted.is_ok()
            && let Err(error) = self.rebind(&mut record, claim).await
        {
            mounted = Err(error);
        }
        match (&mounted, registration) {
            (Err(_), _) => self.give_back(&key).await.unwrap_or_else(|error| words::log(&key, &error)),
            (Ok(_), Some(registration)) => self.enlarge(wanted, registration).await,
            (Ok(_), None) => {}
        }
        mounted
    }

    /// The volume is there as it was; what it is to be is tried again by the next mount, also when nobody waits for it any
    /// more.
    async fn enlarge(&mut self, wanted: &Wanted, registration: Registration) {
        let (key, uid, is_registered) = (wanted.key.clone(), wanted.uid, true);
        let target = Target { key, uid, registration, is_registered };
        let mut control = self.control.clone();
        let rest = tokio::select! {
            biased;
            rest = self.finish_expansion(&target) => rest,
            _ = abandoned(&mut control) => Ok(()),
        };
        if let Err(error) = rest {
            words::log(&wanted.key, &error);
        }
    }

    /// Mount again a row that waits.
    pub(super) async fn restore(&mut self, wanted: &mut Wanted) -> Result<Mounted> {
        let mut registration = None;
        if wanted.spec.registered {
            let key = wanted.key.clone();
            let record = self.registered_as_mine(&key).await?;
            let is_its = |claim: &&Claim| !claim.releasing && claim.uid == wanted.uid;
            let Some(claim) = record.claim(&key.consumer).filter(is_its).cloned() else {
                return Err(words::unclaimed(&key));
            };
            let record = self.claim(&key, &claim, &[]).await?;
            self.use_attachment(&record, wanted);
            self.heals = is_healed(&record);
            registration = record.registration;
        }
        let mounted = self.mount(wanted).await?;
        if let Some(registration) = registration {
            self.enlarge(wanted, registration).await;
        }
        Ok(mounted)
    }

    /// Mount again what lost its server. What died along with it in the volume waits from then on, and comes after it.
    pub(super) async fn heal(&mut self, key: &MountKey) -> Result<()> {
        let Some(row) = self.row(key).filter(|row| row.phase == Phase::Mounted) else { return Ok(()) };
        let mut wanted = Wanted::of(row);
        let healed = self.restore(&mut wanted).await;
        let put_off = self.control.borrow().hurry;
        if let Err(error) = &healed
            && !put_off
            && self.row(key).is_some_and(|row| row.phase == Phase::Mounted)
        {
            self.tell_unhealed(key, error).await;
        }
        let lacks =
            |row: &&Arc<MountRow>| row.phase == Phase::Waiting && row.spec.healing && row.lacks_secrets();
        let lacking: Vec<MountKey> =
            self.rows.volume().mounts.iter().filter(lacks).map(|row| row.key.clone()).collect();
        for key in &lacking {
            self.tell_unhealed(key, &say::secret_required(key)).await;
        }
        healed.map(drop)
    }

    /// Say in the row, and once in an event, why it is not begun to be made again.
    async fn tell_unhealed(&mut self, key: &MountKey, error: &Error) {
        let Some(row) = self.row(key).filter(|row| row.error != error.message) else { return };
        let kind = if error.kind == Kind::SecretRequired { "secret-required" } else { "mount" };
        let event = say::event(kind, Some(row), Some(error));
        self.rows.remark(key, |row| row.error.clone_from(&error.message));
        if let Err(error) = self.rows.persist(&self.shared.store, Durability::Process, event).await {
            tracing::warn!(%error, "the journal could not be written");
        }
    }

    /// The publish context of now: after another boot it may be another one.
    fn use_attachment(&mut self, record: &Record, wanted: &mut Wanted) {
        let context = record.attachment(&self.shared.node).map(|at| at.publish_context.clone());
        let context = context.unwrap_or_default();
        // What is staged was staged with the context that its rows have.
        if self.rows.volume().row.stage == Leg::Absent {
            let keys: Vec<MountKey> = self.rows.volume().mounts.iter().map(|row| row.key.clone()).collect();
            for key in keys.iter().filter(|key| VolumeName::of(key) == record.name) {
                self.rows.remark(key, |row| row.spec.usage.publish_context.clone_from(&context));
            }
        }
        wanted.spec.usage.publish_context = context;
    }
}
