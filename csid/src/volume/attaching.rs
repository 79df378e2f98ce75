//! AttachVolume and DetachVolume, for a scheduler that keeps its own claims.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::plugin::{ATTACHES, Controller, Ready};
use crate::secret::Secrets;
use crate::store::Durability;
use crate::store::registry::{AttachCall, Attachment, Record, VolumeName};
use crate::store::rows::{Leg, MountKey, MountRow, MountSpec};
use crate::volume::claims::reader_only;
use crate::volume::controlling::Target;
use crate::volume::drive::Drive;
use crate::volume::journalled::Unfinished;
use crate::volume::state::{Action, Effect, Wanted};
use crate::volume::unanswered::Unanswered;
use crate::volume::{claim_words as words, say};

/// What AttachVolume left for this node id, among what is unfinished.
pub(super) fn detach_key(name: &VolumeName, node_id: &str) -> MountKey {
    MountKey { tag: node_id.to_owned(), ..name.key("") }
}

/// What another uid's AttachVolume made is his and root's.
fn refuse_anothers(at: &Attachment, uid: u32, name: &VolumeName) -> Result<()> {
    match &at.by_call {
        Some(owner) if uid != 0 && uid != owner.uid => Err(words::not_attacher(name, &at.node_id)),
        _ => Ok(()),
    }
}

impl Drive<'_> {
    /// AttachVolume; the publish context.
    pub(super) async fn attach_call(
        &mut self,
        target: &Target,
        node_id: &str,
        call: &AttachCall,
    ) -> Result<BTreeMap<String, String>> {
        let name = VolumeName::of(&target.key);
        let record = self.shared.registry.record(name.clone()).await?;
        if let Some(at) = record.attachments.iter().find(|at| at.is_by_call(node_id)) {
            refuse_anothers(at, call.uid, &name)?;
            let owner = at.by_call.as_ref();
            if at.leg == Leg::Present {
                return match owner.is_some_and(|owner| owner.same_call(call)) {
                    true => Ok(at.publish_context.clone()),
                    false => Err(words::attached_otherwise(&record.name, node_id)),
                };
            }
            self.detach_call(target, node_id).await.map_err(say::unsettled)?;
        }
        self.refuse_before_expansion(&target.key)?;
        // What the controller would never be asked is not begun, for it could not be undone either.
        if !self.can(ATTACHES).await? {
            return Err(words::does_not_attach(&self.plugin()));
        }
        self.shared.plugins.refuse_other_node_id_as(&self.plugin(), node_id)?;
        // Without them nothing is begun.
        let secrets = self.target_secrets(target).await?;
        let volume = self.rows.volume().row.key.clone();
        let by_call = AttachCall { secrets_given: self.secrets.is_some(), ..call.clone() };
        let entered = |record: &mut Record| {
            words::refuse_claimed(record)?;
            record.volume = volume.clone();
            record.attachments.retain(|at| !at.is_by_call(node_id));
            let by_call = Some(by_call.clone());
            let node_id = node_id.to_owned();
            record.attachments.push(Attachment { node_id, by_call, ..Attachment::new("", Leg::Making) });
            Ok(None)
        };
        self.shared.amend(&name, Durability::Disk, entered).await?;
        let (error, undone) = match self.attach_for_call(target, node_id, call, secrets).await {
            Ok(context) => return Ok(context),
            Err(Unanswered { error, is_sent: true, .. }) => (error, self.detach_call(target, node_id).await),
            Err(Unanswered { error, .. }) => (error, self.put_back(&name, node_id).await),
        };
        match undone {
            Ok(()) => Err(error),
            Err(undo) => {
                // Also where it was refused before it began.
                self.note_detach(&name, node_id, call.uid, Some(&undo));
                Err(words::undone_later(error, &undo))
            }
        }
    }

    /// Nothing was asked of a controller, so there is nothing to undo.
    async fn put_back(&mut self, name: &VolumeName, node_id: &str) -> Result<()> {
        let gone = |record: &mut Record| {
            record.attachments.retain(|at| !at.is_by_call(node_id));
            Ok(None)
        };
        self.shared.amend(name, Durability::Disk, gone).await.map(drop)
    }

    /// What is in the record already.
    async fn attach_for_call(
        &mut self,
        target: &Target,
        node_id: &str,
        call: &AttachCall,
        secrets: Option<Secrets>,
    ) -> Result<BTreeMap<String, String>, Unanswered> {
        let id = &self.external_id();
        let usage = &target.registration.usage(call.capability);
        let read_only = call.read_only || reader_only(call.capability.access_mode);
        let publish = |controller: Controller, request| async move {
            controller.publish(id, node_id, usage, read_only, request).await
        };
        let context =
            self.making("attach", "ControllerPublishVolume", target, secrets.as_ref(), publish).await?;
        self.decide().map_err(Unanswered::after)?;
        let boot = self.shared.boot();
        let present = |record: &mut Record| {
            for at in record.attachments.iter_mut().filter(|at| at.is_by_call(node_id)) {
                at.leg = Leg::Present;
                at.boot.clone_from(&boot);
                at.publish_context.clone_from(&context);
            }
            Ok(Some(words::attached("volume-attached", record, node_id)))
        };
        let amended = self.shared.amend(&VolumeName::of(&target.key), Durability::Disk, present).await;
        amended.map_err(Unanswered::after)?;
        Ok(context)
    }

    /// What is left of a detach is tried again, or rests until somebody asks.
    fn note_detach(&mut self, name: &VolumeName, node_id: &str, uid: u32, error: Option<&Error>) {
        let left = error.map(|error| Unfinished { uid, parked: !error.details.retryable });
        self.rows.set_unfinished(detach_key(name, node_id), left);
    }

    /// DetachVolume: also of what no row tells of, when its volume is given.
    pub(super) async fn detach_call(&mut self, target: &Target, node_id: &str) -> Result<()> {
        let name = VolumeName::of(&target.key);
        let record = self.shared.registry.record(name.clone()).await?;
        words::refuse_claimed(&record)?;
        let volume = self.rows.volume();
        let is_staged =
            volume.row.stage != Leg::Absent || volume.mounts.iter().any(|row| row.publish != Leg::Absent);
        let holders = volume.mounts.iter().map(|row| row.key.consumer.clone()).collect();
        // While it is open which of two names is this node's, a row may have the one and the attachment the other.
        let disputed = self.shared.plugins.refuse_other_node_id_as(&self.plugin(), node_id).err();
        if is_staged && (disputed.is_some() || self.is_staged_under(node_id).await?) {
            return Err(words::staged_here(&name, holders, disputed.as_ref()));
        }
        let of_call = |at: &&Attachment| at.is_by_call(node_id);
        let at = record.attachments.iter().find(of_call);
        at.map_or(Ok(()), |at| refuse_anothers(at, target.uid, &name))?;
        let by_call = at.and_then(|at| at.by_call.as_ref());
        let secrets_given = by_call.is_some_and(|call| call.secrets_given);
        let lacks_secrets =
            secrets_given && self.secrets.is_none() && target.registration.spec.credential.is_none();
        let uid = by_call.map(|call| call.uid);
        let attaches = match at {
            Some(Attachment { leg: Leg::Making, .. }) => self.can(ATTACHES).await,
            // One that was to be detached may be attached, whatever the plugin can do now.
            _ => Ok(true),
        };
        let done = match attaches {
            Ok(true) if lacks_secrets => return Err(words::secret_required(&record.name, "DetachVolume")),
            Ok(true) => self.detach_for_call(target, node_id).await,
            // It was to be asked to attach, and was not (CSI rule 19).
            Ok(false) => self.put_back(&name, node_id).await,
            Err(error) => Err(error),
        };
        self.note_detach(&name, node_id, uid.unwrap_or_default(), uid.and(done.as_ref().err()));
        done?;
        self.shared.synced().await
    }

    /// What the plugin calls this node in the attachment that is staged, or will be.
    pub(super) fn staged_under(&self, ready: &Ready, wanted: &Wanted) -> String {
        let volume = self.rows.volume();
        if volume.row.stage != Leg::Absent {
            let known = volume.mounts.iter().map(|row| &row.spec.node_id).find(|id| !id.is_empty());
            return known.cloned().unwrap_or_default();
        }
        match self.row(&wanted.key).filter(|row| row.publish != Leg::Absent) {
            Some(row) => row.spec.node_id.clone(),
            None => self.node_id_now(ready, &wanted.spec),
        }
    }

    /// Empty: it does not matter; a claim's attachment tells it itself.
    fn node_id_now(&self, ready: &Ready, spec: &MountSpec) -> String {
        match spec.registered || self.shared.plugins.can(ready.id(), ATTACHES) == Some(false) {
            true => String::new(),
            false => ready.node_id().to_owned(),
        }
    }

    /// Before it is staged, or published where nothing is staged: the rows say under which node id, also when that has
    /// changed since they were begun (CSI rule 23).
    pub(super) async fn note_node_id(&mut self, effect: &Effect, ready: &Ready) -> Result<()> {
        let volume = self.rows.volume();
        let stages = !volume.row.staging.is_empty();
        let its = volume.mounts.iter().filter(|row| effect.action == Action::Stage || row.key == effect.key);
        if !matches!((effect.action, stages), (Action::Stage, _) | (Action::Publish, false)) {
            return Ok(());
        }
        let ids: Vec<_> = its.map(|row| (row.key.clone(), self.node_id_now(ready, &row.spec))).collect();
        for (key, node_id) in ids {
            self.rows.remark(&key, |row| row.spec.node_id = node_id);
        }
        self.rows.intend(&self.shared.store, effect).await
    }

    /// The node may be called otherwise since.
    async fn is_staged_under(&mut self, node_id: &str) -> Result<bool> {
        let volume = self.rows.volume();
        let is_staged = |row: &&Arc<MountRow>| volume.row.stage != Leg::Absent || row.publish != Leg::Absent;
        let staged: Vec<_> = volume.mounts.iter().filter(is_staged).collect();
        if staged.iter().any(|row| row.spec.node_id == node_id) {
            return Ok(true);
        }
        let is_known = !staged.is_empty() && staged.iter().all(|row| !row.spec.node_id.is_empty());
        // As long as this node's id is not known, it may be this one.
        Ok(!is_known && self.ready().await?.node_id() == node_id)
    }

    async fn detach_for_call(&mut self, target: &Target, node_id: &str) -> Result<()> {
        let name = VolumeName::of(&target.key);
        let removing = |record: &mut Record| {
            let of_call = record.attachments.iter_mut().filter(|at| at.is_by_call(node_id));
            of_call.for_each(|at| at.leg = Leg::Removing);
            Ok(None)
        };
        self.shared.amend(&name, Durability::Disk, removing).await?;
        let (id, secrets) = (&self.external_id(), self.target_secrets(target).await?);
        let unpublish =
            |controller: Controller, request| async move { controller.unpublish(id, node_id, request).await };
        self.controlled("detach", "ControllerUnpublishVolume", target, secrets.as_ref(), unpublish).await?;
        let gone = |record: &mut Record| {
            record.attachments.retain(|at| !at.is_by_call(node_id));
            Ok(Some(words::attached("volume-detached", record, node_id)))
        };
        self.shared.amend(&name, Durability::Disk, gone).await.map(drop)
    }
}
