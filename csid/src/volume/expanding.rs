//! ExpandVolume: the controller's part, then the node's; what cannot be done now is done by the next mount.

use crate::error::{Error, Result};
use crate::fault;
use crate::plugin::Controller;
use crate::store::Durability;
use crate::store::registry::{Expansion, Record, VolumeName};
use crate::volume::claim_words as words;
use crate::volume::controlling::Target;
use crate::volume::drive::Drive;
use crate::volume::registered::Part;

impl Drive<'_> {
    /// The capacity, and whether a node still has to expand it.
    pub(super) async fn expand(
        &mut self,
        target: &Target,
        required: u64,
        limit: u64,
        part: Part,
    ) -> Result<(u64, bool)> {
        let current = target.registration.capacity;
        if (required, limit) == (0, 0) {
            return Ok((current, target.registration.pending_expansion.is_some()));
        }
        if limit > 0 && limit < required.max(current) {
            let text = format!(
                "limit {limit} is less than what the volume has or is to have ({})",
                required.max(current)
            );
            return Err(Error::invalid(text));
        }
        if part != Part::Node && current > 0 && required <= current {
            return Ok((current, target.registration.pending_expansion.is_some()));
        }
        let mut expansion = Expansion { required, limit, by_controller: part == Part::Node };
        let mut capacity = current;
        let mut node_is_due = true;
        if part != Part::Node {
            let plugin = self.plugin();
            let view = self.shared.plugins.view(&plugin).unwrap_or_default();
            let has = |names: &[String], name: &str| names.iter().any(|has| has == name);
            let by_node_alone = !has(&view.controller_capabilities, "EXPAND_VOLUME")
                && has(&view.node_capabilities, "EXPAND_VOLUME");
            if !by_node_alone {
                let offline =
                    has(&view.plugin_capabilities, "OFFLINE") && !has(&view.plugin_capabilities, "ONLINE");
                if offline {
                    self.refuse_while_used(target).await?;
                }
                self.note_expansion(target, Some(expansion), current).await?;
                let (id, secrets) = (&self.external_id(), self.target_secrets(target)?);
                let usage = &target.registration.usage(self.capability(target));
                let call = |controller: Controller, request| async move {
                    controller.expand(id, required, limit, usage, request).await
                };
                let expanded =
                    self.controlled("expand", "ControllerExpandVolume", target, secrets.as_ref(), call).await;
                if let Err(unanswered) = &expanded
                    && !unanswered.perhaps_done
                {
                    self.note_expansion(target, None, current).await?;
                }
                (capacity, node_is_due) = expanded?;
            }
            expansion.by_controller = true;
        }
        node_is_due &= self
            .shared
            .plugins
            .view(&self.plugin())
            .is_some_and(|view| view.node_capabilities.iter().any(|has| has == "EXPAND_VOLUME"));
        let pending = node_is_due.then_some(expansion);
        self.note_expansion(target, pending, capacity).await?;
        if node_is_due && part != Part::Controller && self.mounted().is_some() {
            let of_node = self.expand_on_node(target, expansion).await?;
            capacity = capacity.max(of_node);
            self.note_expansion(target, None, capacity).await?;
            node_is_due = false;
        }
        Ok((capacity, node_is_due))
    }

    /// What an expansion left for this node, after the volume is published.
    pub(super) async fn finish_expansion(&mut self, target: &Target) -> Result<()> {
        let Some(expansion) = target.registration.pending_expansion else { return Ok(()) };
        let mut capacity = target.registration.capacity;
        if !expansion.by_controller {
            let (id, secrets) = (&self.external_id(), self.target_secrets(target)?);
            let usage = &target.registration.usage(self.capability(target));
            let call = |controller: Controller, request| async move {
                controller.expand(id, expansion.required, expansion.limit, usage, request).await
            };
            let (expanded, node_is_due) =
                self.controlled("expand", "ControllerExpandVolume", target, secrets.as_ref(), call).await?;
            capacity = expanded;
            if !node_is_due {
                return self.note_expansion(target, None, capacity).await;
            }
        }
        let of_node = self.expand_on_node(target, expansion).await?;
        self.note_expansion(target, None, capacity.max(of_node)).await
    }

    async fn expand_on_node(&mut self, target: &Target, expansion: Expansion) -> Result<u64> {
        let ready = self.ready().await?;
        let row = self.mounted().ok_or_else(|| words::not_mounted(&target.key))?;
        self.step.set("expand");
        let secrets = self.target_secrets(target)?;
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
