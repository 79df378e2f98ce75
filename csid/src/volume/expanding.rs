//! ExpandVolume: the controller's part, then the node's; what cannot be done now is done by the next mount. Where only a volume
//! that nobody has can be expanded it waits for that, and whoever comes later waits for it.

use crate::error::{Error, Result};
use crate::fault;
use crate::plugin::{Can, Controller};
use crate::store::Durability;
use crate::store::registry::{Expansion, Record, Registration, VolumeName};
use crate::store::rows::MountKey;
use crate::volume::claim_words as words;
use crate::volume::controlling::Target;
use crate::volume::drive::Drive;
use crate::volume::requests::Part;

const BY_NODE: Can = Can::Node("EXPAND_VOLUME");

impl Drive<'_> {
    /// The capacity, and whether a node still has to expand it.
    pub(super) async fn expand(
        &mut self,
        target: &Target,
        required: u64,
        limit: u64,
        part: Part,
    ) -> Result<(u64, bool)> {
        let (current, pending) = (target.registration.capacity, target.registration.pending_expansion);
        if (required, limit) == (0, 0) {
            return Ok((current, pending.is_some()));
        }
        if limit > 0 && limit < required.max(current) {
            let text = format!(
                "limit {limit} is less than what the volume has or is to have ({})",
                required.max(current)
            );
            return Err(Error::invalid(text));
        }
        let asked = Expansion { required, limit, by_controller: true };
        let (capacity, due) = match part {
            Part::Node => (current, Some(asked)),
            // What an earlier call may have done is due as before.
            _ if current > 0 && required <= current => (current, pending),
            _ if self.expands_by_node_alone().await? => (current, Some(asked)),
            _ => self.expand_by_controller(target, required, limit).await?,
        };
        let is_none = self.shared.plugins.can(&self.plugin(), BY_NODE) == Some(false);
        // What the controller has begun it has to end, also where the node has nothing to do.
        let due = due.filter(|of| !of.by_controller || !is_none);
        self.note_expansion(target, due, capacity).await?;
        let is_now =
            |of: &Expansion| of.by_controller && part != Part::Controller && self.mounted().is_some();
        match due.filter(is_now) {
            Some(expansion) => {
                let capacity = self.expand_on_node(target, expansion).await?.max(capacity);
                self.note_expansion(target, None, capacity).await?;
                Ok((capacity, false))
            }
            None => Ok((capacity, due.is_some())),
        }
    }

    /// What an expansion left for this node, after the volume is published.
    pub(super) async fn finish_expansion(&mut self, target: &Target) -> Result<()> {
        let Some(expansion) = target.registration.pending_expansion else { return Ok(()) };
        let (capacity, due) = match expansion.by_controller {
            true => (target.registration.capacity, Some(expansion)),
            // It has to be asked for again, when nobody has the volume.
            false if self.expands_offline().await? => return Ok(()),
            false => self.expand_by_controller(target, expansion.required, expansion.limit).await?,
        };
        let capacity = match due {
            Some(expansion) => self.expand_on_node(target, expansion).await?.max(capacity),
            None => capacity,
        };
        self.note_expansion(target, None, capacity).await
    }

    /// The capacity, and what a node has to do yet.
    async fn expand_by_controller(
        &mut self,
        target: &Target,
        required: u64,
        limit: u64,
    ) -> Result<(u64, Option<Expansion>)> {
        if self.expands_offline().await? {
            self.refuse_while_used(target).await?;
        }
        let Registration { capacity, pending_expansion, .. } = target.registration;
        let expansion = Expansion { required, limit, by_controller: false };
        self.note_expansion(target, Some(expansion), capacity).await?;
        let (id, secrets) = (&self.external_id(), self.target_secrets(target).await?);
        let usage = &target.registration.usage(self.capability(target));
        let call = |controller: Controller, request| async move {
            controller.expand(id, required, limit, usage, request).await
        };
        let expanded =
            self.controlled("expand", "ControllerExpandVolume", target, secrets.as_ref(), call).await;
        if expanded.as_ref().is_err_and(|unanswered| !unanswered.perhaps_done) {
            self.note_expansion(target, pending_expansion, capacity).await?;
        }
        let (capacity, node_is_due) = expanded?;
        Ok((capacity, node_is_due.then_some(Expansion { by_controller: true, ..expansion })))
    }

    /// CSI rule 26: nobody may have it meanwhile.
    async fn expands_offline(&mut self) -> Result<bool> {
        Ok(!self.can(Can::Plugin("ONLINE")).await? && self.can(Can::Plugin("OFFLINE")).await?)
    }

    /// Else those who keep coming would keep the expansion waiting for ever. Who has the volume may use it meanwhile.
    pub(super) fn refuse_before_expansion(&self, key: &MountKey) -> Result<()> {
        match self.expands_first && self.rows.volume().mount(key).is_none() {
            true => Err(words::expands_first(&VolumeName::of(key))),
            false => Ok(()),
        }
    }

    async fn expands_by_node_alone(&mut self) -> Result<bool> {
        Ok(!self.can(Can::Controller("EXPAND_VOLUME")).await? && self.can(BY_NODE).await?)
    }

    /// The capacity, 0: the plugin does not say, or has no such call, for there is nothing to do then.
    async fn expand_on_node(&mut self, target: &Target, expansion: Expansion) -> Result<u64> {
        let ready = self.ready().await?;
        if !ready.can("EXPAND_VOLUME") {
            return Ok(0);
        }
        let row = self.mounted().ok_or_else(|| words::not_mounted(&target.key))?;
        self.step.set("expand");
        let secrets = self.target_secrets(target).await?;
        let call = self.node_call(&row, target, secrets.as_ref());
        let expanded = ready.expand(call, expansion.required, expansion.limit);
        Ok(fault::around("NodeExpandVolume", expanded).await?)
    }

    /// An expansion that has begun is finished by the next mount, whatever happens to csid.
    async fn note_expansion(
        &mut self,
        target: &Target,
        pending: Option<Expansion>,
        capacity: u64,
    ) -> Result<()> {
        if !target.is_registered {
            return Ok(());
        }
        let noted = |record: &mut Record| {
            let Some(registration) = &mut record.registration else { return Ok(None) };
            let expanded = registration.capacity != capacity;
            registration.pending_expansion = pending;
            registration.capacity = capacity;
            Ok(expanded.then(|| words::registered("volume-expanded", record)))
        };
        self.shared.amend(&VolumeName::of(&target.key), Durability::Disk, noted).await.map(drop)
    }
}
