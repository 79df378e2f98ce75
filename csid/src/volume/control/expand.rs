//! ExpandVolume: the part of the controller, then the part of the node. What cannot be done now is done after the next mount. A
//! volume that is expanded OFFLINE waits until it is not in use. Until then new mounts and claims are refused; a call with `wait-usec`
//! waits for its turn.

use crate::error::{Error, Kind, Result, Step};
use crate::plugin::{Can, Controller};
use crate::store::Durability;
use crate::store::event_kind::EventKind;
use crate::store::registry::{Expansion, Record, Registration};
use crate::volume::api::requests::Part;
use crate::volume::control::engine::Engine;
use crate::volume::errors::volume::VolumeError;
use crate::volume::events::registration as registration_events;
use crate::volume::operation::request::CallTarget;
use crate::volume::seam::Site;
use crate::volume::transitions::falls_short;
use crate::volume::waits::PluginWaits;

const BY_NODE: Can = Can::Node("EXPAND_VOLUME");

impl<S: Site> Engine<'_, S> {
    /// Expands the volume. Returns the capacity, and whether a node still has to expand it.
    pub(in crate::volume::control) async fn expand(
        &mut self,
        target: &CallTarget,
        required: u64,
        limit: u64,
        part: Part,
    ) -> Result<(Option<u64>, bool)> {
        let (current, pending) = (target.registration.capacity, target.registration.pending_expansion);
        if (required, limit) == (0, 0) {
            return Ok((current, pending.is_some()));
        }
        if part == Part::Node && self.has_expanded_here(target, required, limit).await? {
            return Ok((current, false));
        }
        let falls_short = match part {
            // The servers have compared the limit.
            Part::Node if self.records.servers.is_some() => current < Some(required),
            _ => falls_short(current, required, limit)?,
        };
        if part == Part::Node && pending.is_none() && falls_short && !self.site.can(BY_NODE).await? {
            let plugin = self.plugin();
            let text = format!("plugin {plugin} does not expand volumes on a node: it lacks EXPAND_VOLUME");
            return Err(Error::new(Kind::NotSupported, text));
        }
        if part != Part::Node && pending.is_none() && falls_short && !self.expands().await? {
            let plugin = self.plugin();
            let text = format!("plugin {plugin} does not expand volumes: it lacks EXPAND_VOLUME");
            return Err(Error::new(Kind::NotSupported, text));
        }
        let asked = Expansion { required, limit, by_controller: true };
        let (capacity, due) = match part {
            Part::Node => (current, Some(asked)),
            // The part that an earlier call left stays due.
            _ if !falls_short => (current, pending),
            _ if self.expands_by_node_alone().await? => (current, Some(asked)),
            _ => self.expand_by_controller(target, required, limit).await?,
        };
        let is_none = self.records.plugins.can(&self.plugin(), BY_NODE) == Some(false);
        // A part of the controller that has begun stays due, even if the node has no part.
        let due = due.filter(|of| !of.by_controller || !is_none);
        match due {
            // The node has no part in it.
            None if part == Part::Node => self.note_done(target, asked, capacity).await?,
            due => self.note_expansion(target, due, capacity).await?,
        }
        let is_now = |of: &Expansion| of.by_controller && part != Part::Controller && self.site.is_mounted();
        match due.filter(is_now) {
            Some(expansion) => {
                let capacity = self.expand_on_node(target, expansion).await?.max(capacity);
                self.note_done(target, expansion, capacity).await?;
                Ok((capacity, false))
            }
            None => Ok((capacity, due.is_some())),
        }
    }

    /// Returns whether this node has done its part of this expansion for the servers of its cluster. The caller's copy of the record may be older.
    async fn has_expanded_here(&self, target: &CallTarget, required: u64, limit: u64) -> Result<bool> {
        if self.records.servers.is_none() {
            return Ok(false);
        }
        let record = self.records.registry.record(target.name.clone()).await?;
        let asked = Expansion { required, limit, by_controller: true };
        Ok(record.registration.is_some_and(|of| of.expanded_here == Some(asked)))
    }

    /// Finishes a pending expansion on this node, after the volume is published.
    pub(in crate::volume::control) async fn expand_the_rest(&mut self, target: &CallTarget) -> Result<()> {
        let Some(expansion) = target.registration.pending_expansion else { return Ok(()) };
        let (capacity, due) = match expansion.by_controller {
            true => (target.registration.capacity, Some(expansion)),
            // The call has to be repeated when the volume is not in use.
            false if self.expands_offline().await? => return Ok(()),
            false => self.expand_by_controller(target, expansion.required, expansion.limit).await?,
        };
        let capacity = match due {
            Some(expansion) => self.expand_on_node(target, expansion).await?.max(capacity),
            None => capacity,
        };
        self.note_done(target, expansion, capacity).await
    }

    /// Expands the volume by the controller. Returns the capacity, and the part left for a node. `None`: nothing is left.
    async fn expand_by_controller(
        &mut self,
        target: &CallTarget,
        required: u64,
        limit: u64,
    ) -> Result<(Option<u64>, Option<Expansion>)> {
        if self.expands_offline().await? {
            self.refuse_while_used(target).await?;
        }
        let Registration { capacity, pending_expansion, .. } = target.registration;
        let expansion = Expansion { required, limit, by_controller: false };
        let id = &self.external_id(target)?;
        self.note_expansion(target, Some(expansion), capacity).await?;
        let secrets = self.target_secrets(target).await?;
        let usage = &target.registration.usage(self.capability(target));
        let call = |controller: Controller, request| async move {
            controller.expand(id, required, limit, usage, request).await
        };
        let expanded =
            self.controlled(Step::Expand, "ControllerExpandVolume", target, secrets.as_ref(), call).await;
        if expanded.as_ref().is_err_and(|unanswered| !unanswered.perhaps_done) {
            self.note_expansion(target, pending_expansion, capacity).await?;
        }
        let (capacity, node_is_due) = expanded?;
        Ok((capacity, node_is_due.then_some(Expansion { by_controller: true, ..expansion })))
    }

    /// Returns whether the volume must not be in use during an expansion (CSI rule 26).
    async fn expands_offline(&mut self) -> Result<bool> {
        Ok(!self.site.can(Can::Plugin("ONLINE")).await? && self.site.can(Can::Plugin("OFFLINE")).await?)
    }

    /// Returns whether the plugin's controller or node expands volumes.
    async fn expands(&mut self) -> Result<bool> {
        Ok(self.site.can(Can::Controller("EXPAND_VOLUME")).await? || self.site.can(BY_NODE).await?)
    }

    async fn expands_by_node_alone(&mut self) -> Result<bool> {
        Ok(!self.site.can(Can::Controller("EXPAND_VOLUME")).await? && self.site.can(BY_NODE).await?)
    }

    /// Expands the volume on this node, and returns its capacity. `None`: the plugin does not report it, or has no such RPC and so
    /// nothing to do.
    async fn expand_on_node(&mut self, target: &CallTarget, expansion: Expansion) -> Result<Option<u64>> {
        if !self.site.ready().await?.can("EXPAND_VOLUME") {
            return Ok(None);
        }
        if !self.site.is_mounted() {
            return Err(VolumeError::NotMounted { name: target.name.clone() }.into());
        }
        self.site.operation().step.set(Step::Expand);
        let secrets = self.target_secrets(target).await?;
        self.site.expand_here(target, expansion, secrets.as_ref()).await
    }

    /// Notes the capacity and the pending expansion. The next mount finishes a pending expansion, whatever happens to csid.
    async fn note_expansion(
        &mut self,
        target: &CallTarget,
        pending: Option<Expansion>,
        capacity: Option<u64>,
    ) -> Result<()> {
        self.note(target, capacity, |registration| registration.pending_expansion = pending).await
    }

    /// Notes the capacity, and that this expansion is done. Another one that the servers have asked for meanwhile stays pending.
    async fn note_done(&mut self, target: &CallTarget, done: Expansion, capacity: Option<u64>) -> Result<()> {
        let is_of_cluster = self.records.servers.is_some();
        let note = |registration: &mut Registration| {
            if is_of_cluster {
                // The servers learn of it, and ask for it until then.
                registration.expanded_here = Some(Expansion { by_controller: true, ..done });
            }
            let bounds = |of: &Expansion| (of.required, of.limit);
            let is_other = |of: &Expansion| is_of_cluster && bounds(of) != bounds(&done);
            registration.pending_expansion = registration.pending_expansion.filter(is_other);
        };
        self.note(target, capacity, note).await
    }

    /// Changes a volume's registration, and notes its capacity.
    async fn note(
        &mut self,
        target: &CallTarget,
        capacity: Option<u64>,
        change: impl Fn(&mut Registration),
    ) -> Result<()> {
        if !target.is_registered {
            return Ok(());
        }
        let is_of_cluster = self.records.servers.is_some();
        let noted = |record: &mut Record| {
            let Some(registration) = &mut record.registration else { return Ok(None) };
            // The servers may have expanded it further meanwhile.
            let least = registration.capacity.filter(|_| is_of_cluster);
            let capacity = capacity.max(least);
            let expanded = registration.capacity != capacity;
            change(registration);
            registration.capacity = capacity;
            Ok(expanded.then(|| registration_events::registered(EventKind::VolumeExpanded, record)))
        };
        self.records.amend(&target.name, Durability::Disk, noted).await.map(drop)
    }
}
