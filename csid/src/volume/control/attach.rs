//! AttachVolume and DetachVolume, for a scheduler that keeps its own claims.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Error, Result, Step};
use crate::plugin::{ATTACHES, Controller};
use crate::secret::Secrets;
use crate::store::Durability;
use crate::store::event_kind::EventKind;
use crate::store::registry::{AttachCall, AttachSecrets, Attachment, Record, VolumeName};
use crate::store::rows::{Leg, VolumeKey};
use crate::volume::control::engine::Engine;
use crate::volume::control::tries::RpcFailure;
use crate::volume::errors::claim::ClaimError;
use crate::volume::errors::operation::OperationError;
use crate::volume::events::registration as registration_events;
use crate::volume::model::claim::reader_only;
use crate::volume::model::subject::Subject;
use crate::volume::operation::request::CallTarget;
use crate::volume::operation::running::Unfinished;
use crate::volume::seam::Site;
use crate::volume::waits::PluginWaits;

/// Refuses a uid that is neither root nor the one whose AttachVolume made the attachment.
fn refuse_anothers(at: &Attachment, uid: u32, name: &VolumeName) -> Result<()> {
    match &at.by_call {
        Some(owner) if uid != 0 && uid != owner.uid => {
            Err(ClaimError::NotAttacher { name: name.clone(), node_id: at.shown_node().to_owned() }.into())
        }
        _ => Ok(()),
    }
}

impl<S: Site> Engine<'_, S> {
    /// Carries out AttachVolume, and returns the publish context.
    pub(in crate::volume::control) async fn attach_call(
        &mut self,
        target: &CallTarget,
        node_id: &str,
        call: &AttachCall,
    ) -> Result<BTreeMap<String, String>> {
        let name = target.name.clone();
        let record = self.records.registry.record(name.clone()).await?;
        if let Some(at) = record.attachments.iter().find(|at| at.is_by_call(node_id)) {
            refuse_anothers(at, call.uid, &name)?;
            if at.leg == Leg::Present {
                if let Some(present) = &at.by_call {
                    ClaimError::refuse_attached_otherwise(&name, node_id, present, call)?;
                }
                return Ok(at.publish_context.clone());
            }
            self.detach_call(target, node_id, true)
                .await
                .map_err(|source| OperationError::Unsettled { source })?;
        }
        self.site.operation().refuse_before_expansion(&target.name, false)?;
        // An attach that the controller would never receive is not begun, since it could not be rolled back either.
        if !self.site.can(ATTACHES).await? {
            return Err(ClaimError::AttachesNothing { plugin: self.plugin() }.into());
        }
        self.records.plugins.refuse_other_node_id_as(&self.plugin(), node_id)?;
        // Without its secrets the attach is not begun.
        let secrets = self.target_secrets(target).await?;
        let volume = self.site.volume().clone();
        let by_call = AttachCall { secrets_given: self.site.operation().secrets.is_some(), ..call.clone() };
        let entered = |record: &mut Record| {
            ClaimError::refuse_claimed(record)?;
            record.volume = volume.clone();
            record.attachments.retain(|at| !at.is_by_call(node_id));
            let secrets = target.registration.spec.credential.as_ref();
            // The volume may be deregistered before the detach, which needs them, too.
            let secrets = secrets.map(|credential| AttachSecrets {
                credential: Some(credential.clone()),
                given: by_call.secrets_given,
            });
            let by_call = Some(by_call.clone());
            let node_id = Some(node_id.to_owned());
            let attachment = Attachment { node_id, by_call, secrets, ..Attachment::new("", Leg::Making) };
            record.attachments.push(attachment);
            Ok(None)
        };
        self.records.amend(&name, Durability::Disk, entered).await?;
        let (error, undone) = match self.attach_for_call(target, node_id, call, secrets).await {
            Ok(context) => return Ok(context),
            Err(failure) if failure.is_sent && !failure.is_of_another_attachment() => {
                (failure.error, self.detach_call(target, node_id, true).await)
            }
            Err(RpcFailure { error, .. }) => (error, self.put_back(&name, node_id).await),
        };
        match undone {
            Ok(()) => Err(error),
            Err(undo) => {
                // This includes a rollback that was refused before it began.
                self.note_detach(&name, node_id, call.uid, Some(&undo)).await?;
                Err(OperationError::UndoneLater { source: error, undo }.into())
            }
        }
    }

    /// Removes the row of an attachment that csid has not made, so there is nothing to roll back.
    async fn put_back(&mut self, name: &VolumeName, node_id: &str) -> Result<()> {
        let gone = |record: &mut Record| {
            record.attachments.retain(|at| !at.is_by_call(node_id));
            Ok(None)
        };
        self.records.amend(name, Durability::Disk, gone).await.map(drop)
    }

    /// Attaches the volume. The record already has the attachment.
    async fn attach_for_call(
        &mut self,
        target: &CallTarget,
        node_id: &str,
        call: &AttachCall,
        secrets: Option<Secrets>,
    ) -> Result<BTreeMap<String, String>, RpcFailure> {
        let id = &self.external_id(target).map_err(RpcFailure::before)?;
        let usage = &target.registration.usage(call.capability);
        let read_only = call.read_only || reader_only(call.capability.access_mode);
        let publish = |controller: Controller, request| async move {
            controller.publish(id, node_id, usage, read_only, request).await
        };
        let context =
            self.making(Step::Attach, "ControllerPublishVolume", target, secrets.as_ref(), publish).await?;
        self.site.operation().decide().map_err(RpcFailure::after)?;
        let boot = self.records.boot();
        let present = |record: &mut Record| {
            for at in record.attachments.iter_mut().filter(|at| at.is_by_call(node_id)) {
                at.leg = Leg::Present;
                at.boot = Some(boot.clone());
                at.publish_context.clone_from(&context);
            }
            Ok(Some(registration_events::attached(EventKind::VolumeAttached, record, node_id)))
        };
        let amended = self.records.amend(&target.name, Durability::Disk, present).await;
        amended.map_err(RpcFailure::after)?;
        Ok(context)
    }

    /// Notes a detach that failed with `error`. It is retried, or waits for a caller if the error is not retryable. `None`, or an
    /// attachment without a row: nothing is left to do.
    async fn note_detach(
        &mut self,
        name: &VolumeName,
        node_id: &str,
        uid: u32,
        error: Option<&Error>,
    ) -> Result<()> {
        let left = match error {
            Some(error) if self.has_row(name, node_id).await? => {
                Some(Unfinished { uid, parked: !error.details.retryable })
            }
            _ => None,
        };
        let subject = Subject::Attachment { volume: name.clone(), node_id: node_id.to_owned() };
        self.site.set_unfinished(subject, left);
        Ok(())
    }

    /// Returns whether AttachVolume's attachment to this node has a row.
    async fn has_row(&self, name: &VolumeName, node_id: &str) -> Result<bool> {
        let record = self.records.registry.record(name.clone()).await?;
        Ok(record.attachments.iter().any(|at| at.is_by_call(node_id)))
    }

    /// Carries out DetachVolume, also of an attachment without a row. The volume is registered then, or the call gives it (`is_inline`): another
    /// name means only what AttachVolume has attached.
    pub(in crate::volume::control) async fn detach_call(
        &mut self,
        target: &CallTarget,
        node_id: &str,
        is_inline: bool,
    ) -> Result<()> {
        let name = target.name.clone();
        let record = self.records.registry.record(name.clone()).await?;
        ClaimError::refuse_claimed(&record)?;
        // While the node id is disputed, the row may have one of the two ids and the attachment the other.
        let disputed = self.records.plugins.refuse_other_node_id_as(&self.plugin(), node_id).err();
        if self.site.is_staged() && (disputed.is_some() || self.site.is_staged_under(node_id).await?) {
            let holders = self.site.consumers();
            return Err(match disputed {
                None => ClaimError::StagedHere { name, holders },
                Some(source) => ClaimError::PerhapsStagedHere { name, holders, source },
            }
            .into());
        }
        let of_call = |at: &&Attachment| at.is_by_call(node_id);
        let at = record.attachments.iter().find(of_call);
        if at.is_none() && !target.is_registered && !is_inline {
            return self.records.synced().await;
        }
        at.map_or(Ok(()), |at| refuse_anothers(at, target.uid, &name))?;
        let by_call = at.and_then(|at| at.by_call.as_ref());
        let mut target = target.clone();
        // A registration may name a newer one. Absent: an earlier csid made the attachment, or it had no credential.
        let kept = at.and_then(|at| at.secrets.as_ref()).and_then(|had| had.credential.as_ref());
        if target.registration.spec.credential.is_none() {
            target.registration.spec.credential = kept.cloned();
        }
        let target = &target;
        let secrets_given = by_call.is_some_and(|call| call.secrets_given);
        let lacks_secrets = secrets_given
            && self.site.operation().secrets.is_none()
            && target.registration.spec.credential.is_none();
        let uid = by_call.map(|call| call.uid);
        let attaches = match at {
            Some(Attachment { leg: Leg::Making, .. }) => self.site.can(ATTACHES).await,
            // Any other attachment may exist, whatever capabilities the plugin has now.
            _ => Ok(true),
        };
        let done = match attaches {
            Ok(true) if lacks_secrets => {
                return Err(ClaimError::SecretsNeeded { name: record.name.clone() }.into());
            }
            Ok(true) => self.detach_for_call(target, node_id, at.is_some()).await,
            // The attach was intended but never sent (CSI rule 19).
            Ok(false) => self.put_back(&name, node_id).await,
            Err(error) => Err(error),
        };
        self.note_detach(&name, node_id, uid.unwrap_or_default(), uid.and(done.as_ref().err())).await?;
        done?;
        self.records.synced().await
    }

    /// Detaches the volume. `has_row`: the attachment has a row, so an order to forget the row ends the detach.
    async fn detach_for_call(&mut self, target: &CallTarget, node_id: &str, has_row: bool) -> Result<()> {
        let (name, id) = (target.name.clone(), &self.external_id(target)?);
        let removing = |record: &mut Record| {
            let of_call = record.attachments.iter_mut().filter(|at| at.is_by_call(node_id));
            of_call.for_each(|at| at.leg = Leg::Removing);
            Ok(None)
        };
        self.records.amend(&name, Durability::Disk, removing).await?;
        let secrets = self.target_secrets(target).await?;
        let orders = Arc::clone(&self.site.operation().orders);
        loop {
            // An order may have been carried out while the operation waited for the plugin.
            if has_row && !self.has_row(&name, node_id).await? {
                return Err(OperationError::Forgotten.into());
            }
            let unpublish = |controller: Controller, request| async move {
                controller.unpublish(id, node_id, request).await
            };
            let rpc = "ControllerUnpublishVolume";
            tokio::select! {
                biased;
                // The RPC may hang, and an order to forget does not wait for it. The outcome is then unknown, so a row that is
                // still there is detached again.
                () = orders.came() => {}
                done = self.controlled(Step::Detach, rpc, target, secrets.as_ref(), unpublish) => {
                    done?;
                    break;
                }
            }
            Box::pin(self.site.carry_out_orders()).await?;
        }
        let gone = |record: &mut Record| {
            record.attachments.retain(|at| !at.is_by_call(node_id));
            Ok(Some(registration_events::attached(EventKind::VolumeDetached, record, node_id)))
        };
        self.records.amend(&name, Durability::Disk, gone).await.map(drop)
    }

    /// Removes the row of an attachment by AttachVolume, although the plugin has not acknowledged the detach. Refuses a volume that
    /// is or may be staged here under this node id.
    pub(in crate::volume::control) async fn forget_attached(
        &mut self,
        name: &VolumeName,
        node_id: &str,
    ) -> Result<()> {
        let record = self.records.registry.record(name.clone()).await?;
        // The name may have come to mean another volume since the order.
        let is_there = |record: &Record, volume: &VolumeKey| {
            record.volume == *volume && record.attachments.iter().any(|at| at.is_by_call(node_id))
        };
        if !is_there(&record, self.site.volume()) {
            return self.records.synced().await;
        }
        if self.site.is_staged() && self.site.may_be_staged_under(node_id) {
            return Err(ClaimError::StagedHere { name: name.clone(), holders: self.site.consumers() }.into());
        }
        let volume = self.site.volume().clone();
        let gone = |record: &mut Record| {
            if !is_there(record, &volume) {
                return Ok(None);
            }
            record.attachments.retain(|at| !at.is_by_call(node_id));
            let mut event = registration_events::attached(EventKind::VolumeDetached, record, node_id);
            event.details.insert("forgotten", true.into());
            Ok(Some(event))
        };
        self.records.amend(name, Durability::Disk, gone).await?;
        let attachment = Subject::Attachment { volume: name.clone(), node_id: node_id.to_owned() };
        self.site.operation().orders.note_forgotten(attachment);
        self.note_detach(name, node_id, 0, None).await?;
        let plugin = self.plugin();
        tracing::warn!(plugin, volume = %name, node_id, "an attachment was forgotten");
        self.records.synced().await
    }
}
