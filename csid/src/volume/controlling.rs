//! What a controller does for a volume besides its claims: validate, expand, snapshot, attach for a scheduler that keeps its
//! own claims. Each runs in the volume's task, between its mounts (CSI rule 18).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::error::{Error, Kind, Result};
use crate::fault;
use crate::plugin::{Call as NodeCall, Class, Controller, Request, RpcError, Snapshot, Stats};
use crate::secret::Secrets;
use crate::store::Durability;
use crate::store::registry::{
    AttachCall, Attachment, Capability, Expansion, Record, Registration, Standing, VolumeName,
};
use crate::store::rows::{AccessMode, AttachmentMode, Leg, MountKey, MountRow, Phase, Usage};
use crate::volume::claims::reader_only;
use crate::volume::control::{Backoff, abandoned};
use crate::volume::drive::Drive;
use crate::volume::journalled::Unfinished;
use crate::volume::registered::Part;
use crate::volume::registering::unregistered;
use crate::volume::work::Done;
use crate::volume::{claim_words as words, say};

/// A call about a volume that is no mount and no claim.
#[derive(Clone)]
pub(super) enum Call {
    Validate { capabilities: Vec<Capability> },
    Stats,
    Expand { required: u64, limit: u64, part: Part },
    Snapshot { name: String, parameters: BTreeMap<String, String> },
    Attach { node_id: String, call: AttachCall },
    Detach { node_id: String },
    Delete,
}

/// The volume of a [`Call`], registered or given with it.
#[derive(Clone)]
pub(super) struct Target {
    pub(super) key: MountKey,
    pub(super) uid: u32,
    pub(super) registration: Registration,
    pub(super) is_registered: bool,
}

/// How long a snapshot that is not ready yet is let alone.
const NOT_READY: Duration = Duration::from_secs(1);

/// What AttachVolume left for this node id, among what is unfinished.
pub(super) fn detach_key(name: &VolumeName, node_id: &str) -> MountKey {
    MountKey { tag: node_id.to_owned(), ..name.key("") }
}

impl Call {
    /// When nobody waits for it any more, it is undone.
    pub(super) fn is_undone(&self) -> bool {
        matches!(self, Call::Attach { .. })
    }

    pub(super) fn kind(&self) -> &'static str {
        match self {
            Call::Validate { .. } => "validate",
            Call::Stats => "stats",
            Call::Expand { .. } => "expand",
            Call::Snapshot { .. } => "snapshot",
            Call::Attach { .. } => "attach",
            Call::Detach { .. } => "detach",
            Call::Delete => "delete",
        }
    }
}

impl Drive<'_> {
    pub(super) async fn call(&mut self, target: &Target, call: Call) -> Result<Done> {
        match call {
            Call::Validate { capabilities } => {
                self.validate(target, &capabilities).await.map(Done::Validated)
            }
            Call::Stats => self.stats(target).await.map(Done::Stats),
            Call::Expand { required, limit, part } => {
                let (capacity, node_is_due) = self.expand(target, required, limit, part).await?;
                Ok(Done::Expanded(capacity, node_is_due))
            }
            Call::Snapshot { name, parameters } => {
                self.snapshot(target, &name, &parameters).await.map(Done::Snapshot)
            }
            Call::Attach { node_id, call } => {
                self.attach_call(target, &node_id, &call).await.map(Done::Attached)
            }
            Call::Detach { node_id } => self.detach_call(target, &node_id).await.map(|()| Done::Gone),
            Call::Delete => self.delete(target).await.map(|()| Done::Gone),
        }
    }

    /// Whether the plugin confirms that the volume can be used so (CSI rule 35); what it says if not.
    async fn validate(&mut self, target: &Target, capabilities: &[Capability]) -> Result<Result<(), String>> {
        let usages: Vec<Usage> = capabilities.iter().map(|of| target.registration.usage(*of)).collect();
        let (id, secrets) = (&self.external_id(), self.target_secrets(target)?);
        let (usages, parameters) = (&usages, &target.registration.spec.parameters);
        let call = |controller: Controller, request| async move {
            controller.validate(id, usages, parameters, request).await
        };
        self.controlled("validate", "ValidateVolumeCapabilities", target, secrets.as_ref(), call).await
    }

    async fn stats(&mut self, target: &Target) -> Result<Stats> {
        let ready = self.ready().await?;
        let row = self.mounted().ok_or_else(|| words::not_mounted(&target.key))?;
        let call = self.node_call(&row, target, None);
        Ok(ready.stats(call).await?)
    }

    /// The capacity, and whether a node still has to expand it.
    async fn expand(
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
                if let Err(error) = &expanded
                    && error.kind != Kind::Uncertain
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

    /// CSI rule 42: repeated until it is ready.
    async fn snapshot(
        &mut self,
        target: &Target,
        name: &str,
        parameters: &BTreeMap<String, String>,
    ) -> Result<Snapshot> {
        let (id, secrets) = (&self.external_id(), self.target_secrets(target)?);
        loop {
            let call = |controller: Controller, request| async move {
                controller.snapshot(id, name, parameters, request).await
            };
            let snapshot =
                self.controlled("snapshot", "CreateSnapshot", target, secrets.as_ref(), call).await?;
            if snapshot.ready {
                return Ok(snapshot);
            }
            self.step.set("waiting for the snapshot");
            if Instant::now() + NOT_READY >= self.control.borrow().give_up {
                return Err(words::not_ready(name, &snapshot.id));
            }
            tokio::time::sleep(NOT_READY).await;
        }
    }

    /// AttachVolume; the publish context.
    async fn attach_call(
        &mut self,
        target: &Target,
        node_id: &str,
        call: &AttachCall,
    ) -> Result<BTreeMap<String, String>> {
        let name = VolumeName::of(&target.key);
        let record = self.shared.registry.record(name.clone()).await?;
        if let Some(at) = record.attachments.iter().find(|at| at.is_by_call(node_id)) {
            let owner = at.by_call.as_ref();
            if owner.is_some_and(|owner| owner.uid != call.uid && call.uid != 0) {
                return Err(words::not_attacher(&record.name, node_id));
            }
            if at.leg == Leg::Present {
                return match owner.is_some_and(|owner| owner.same_call(call)) {
                    true => Ok(at.publish_context.clone()),
                    false => Err(words::attached_otherwise(&record.name, node_id)),
                };
            }
            self.detach_call(target, node_id).await.map_err(say::unsettled)?;
        }
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
        let (id, secrets) = (&self.external_id(), self.target_secrets(target)?);
        let usage = &target.registration.usage(call.capability);
        let read_only = call.read_only || reader_only(call.capability.access_mode);
        let publish = |controller: Controller, request| async move {
            controller.publish(id, node_id, usage, read_only, request).await
        };
        let published =
            self.making("attach", "ControllerPublishVolume", target, secrets.as_ref(), publish).await;
        match published {
            Ok(context) => {
                let present = |record: &mut Record| {
                    for at in record.attachments.iter_mut().filter(|at| at.is_by_call(node_id)) {
                        at.leg = Leg::Present;
                        at.publish_context.clone_from(&context);
                    }
                    Ok(Some(words::attached("volume-attached", record, node_id)))
                };
                self.shared.amend(&name, Durability::Disk, present).await?;
                Ok(context)
            }
            Err(error) => match self.detach_call(target, node_id).await {
                Ok(()) => Err(error),
                Err(undo) => Err(words::undone_later(error, &undo)),
            },
        }
    }

    /// DetachVolume: also of what no row tells of, when its volume is given.
    async fn detach_call(&mut self, target: &Target, node_id: &str) -> Result<()> {
        let name = VolumeName::of(&target.key);
        let record = self.shared.registry.record(name.clone()).await?;
        words::refuse_claimed(&record)?;
        let volume = self.rows.volume();
        let is_here =
            self.shared.plugins.view(&volume.row.key.plugin).is_some_and(|view| view.node_id == node_id);
        let is_staged =
            volume.row.stage != Leg::Absent || volume.mounts.iter().any(|row| row.publish != Leg::Absent);
        if is_here && is_staged {
            let holders = volume.mounts.iter().map(|row| row.key.consumer.clone()).collect();
            return Err(words::staged_here(&name, holders));
        }
        let of_call = |at: &&Attachment| at.is_by_call(node_id);
        let by_call = record.attachments.iter().find(of_call).and_then(|at| at.by_call.as_ref());
        let secrets_given = by_call.is_some_and(|call| call.secrets_given);
        if secrets_given && self.secrets.is_none() && target.registration.spec.credential.is_none() {
            return Err(words::secret_required(&record.name, "DetachVolume"));
        }
        let removing = |record: &mut Record| {
            let of_call = record.attachments.iter_mut().filter(|at| at.is_by_call(node_id));
            of_call.for_each(|at| at.leg = Leg::Removing);
            Ok(None)
        };
        self.shared.amend(&name, Durability::Disk, removing).await?;
        let (id, secrets) = (&self.external_id(), self.target_secrets(target)?);
        let unpublish =
            |controller: Controller, request| async move { controller.unpublish(id, node_id, request).await };
        let done =
            self.controlled("detach", "ControllerUnpublishVolume", target, secrets.as_ref(), unpublish).await;
        let left = by_call.filter(|_| done.is_err()).map(|call| {
            let parked = done.as_ref().is_err_and(|error| !error.details.retryable);
            Unfinished { uid: call.uid, parked }
        });
        self.rows.set_unfinished(detach_key(&name, node_id), left);
        done?;
        let gone = |record: &mut Record| {
            record.attachments.retain(|at| !at.is_by_call(node_id));
            Ok(Some(words::attached("volume-detached", record, node_id)))
        };
        self.shared.amend(&name, Durability::Disk, gone).await?;
        self.shared.synced().await
    }

    /// The next try of what AttachVolume or DetachVolume left between two states, or of a deletion.
    pub(super) async fn continue_call(&mut self, key: &MountKey) -> Result<()> {
        let name = VolumeName::of(key);
        let record = self.shared.registry.record(name.clone()).await?;
        let node_id = &key.tag;
        let unsettled = |at: &&Attachment| at.is_by_call(node_id) && at.leg != Leg::Present;
        self.rows.set_unfinished(key.clone(), None);
        if let Some(at) = record.attachments.iter().find(unsettled) {
            let uid = at.by_call.as_ref().map_or(0, |call| call.uid);
            let registration = record.registration.clone().unwrap_or_else(|| unregistered(uid));
            let is_registered = record.registration.is_some();
            let target = Target { key: name.key(""), uid, registration, is_registered };
            return self.detach_call(&target, node_id).await;
        }
        match record.registration {
            Some(registration) if matches!(registration.standing, Standing::Deleting { .. }) => {
                let (uid, is_registered) = (registration.uid, true);
                self.delete(&Target { key: name.key(""), uid, registration, is_registered }).await
            }
            _ => Ok(()),
        }
    }

    /// DeleteVolume, registered or not: once it was asked for it goes on to its end.
    async fn delete(&mut self, target: &Target) -> Result<()> {
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

    /// What takes the volume away, or OFFLINE expansion (CSI rule 26), has to wait until nobody has it.
    async fn refuse_while_used(&self, target: &Target) -> Result<()> {
        let name = VolumeName::of(&target.key);
        let volume = self.rows.volume();
        let mounts = volume.mounts.iter().map(|row| row.key.consumer.clone());
        let record = self.shared.registry.record(name.clone()).await?;
        let holders: Vec<String> =
            mounts.chain(record.claims.iter().map(|claim| claim.consumer.clone())).collect();
        let attached = record.attachments.iter().map(|at| format!("node {}", at.node_id));
        let holders: Vec<String> = if holders.is_empty() { attached.collect() } else { holders };
        if holders.is_empty() && volume.row.stage == Leg::Absent {
            return Ok(());
        }
        Err(words::mounted(&name, holders))
    }

    /// The call's secrets, or those of the volume's credential.
    fn target_secrets(&self, target: &Target) -> Result<Option<Secrets>> {
        match (&self.secrets, &target.registration.spec.credential) {
            (Some(given), _) => Ok(Some(given.clone())),
            (None, Some(name)) => self.shared.credential(name).map(Some),
            (None, None) => Ok(None),
        }
    }

    fn external_id(&self) -> String {
        self.rows.volume().row.key.external_id.clone()
    }

    fn plugin(&self) -> String {
        self.rows.volume().row.key.plugin.clone()
    }

    /// One that is mounted, of whom it is the same which.
    fn mounted(&self) -> Option<MountRow> {
        self.rows
            .volume()
            .mounts
            .iter()
            .find(|row| row.phase == Phase::Mounted)
            .map(|row| MountRow::clone(row))
    }

    /// As it is used, or as it was registered first.
    fn capability(&self, target: &Target) -> Capability {
        let used = self.rows.volume().mounts.first().map(|row| Capability {
            access_mode: row.spec.usage.access_mode,
            attachment_mode: row.spec.usage.attachment_mode,
        });
        let registered = target.registration.spec.capabilities.first().copied();
        used.or(registered).unwrap_or(Capability {
            access_mode: AccessMode::SingleNodeWriter,
            attachment_mode: AttachmentMode::FileSystem,
        })
    }

    fn node_call<'a>(
        &'a self,
        row: &'a MountRow,
        target: &Target,
        secrets: Option<&'a Secrets>,
    ) -> NodeCall<'a> {
        NodeCall {
            external_id: &row.volume.external_id,
            staging: &self.rows.volume().row.staging,
            target: &row.source,
            usage: &row.spec.usage,
            read_only: row.spec.read_only,
            uid: target.uid,
            secrets,
            secrets_forgotten: self.rows.volume().has_forgotten_secrets(&row.key, secrets.is_some()),
            deadline: Instant::now() + self.shared.config.borrow().deadlines.operation,
        }
    }

    /// A call of the controller that may be repeated as it is, until it is answered or its time is over.
    async fn controlled<'a, T, F>(
        &mut self,
        step: &'static str,
        rpc: &'static str,
        target: &Target,
        secrets: Option<&'a Secrets>,
        call: impl Fn(Controller, Request<'a>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T, RpcError>>,
    {
        let plugin = self.plugin();
        let mut delay = Backoff::new();
        loop {
            self.step.set("waiting for plugin");
            let give_up = self.control.borrow().give_up;
            let controller = self.shared.plugins.controller(&plugin, give_up).await?;
            self.step.set(step);
            let deadline = Instant::now() + self.shared.config.borrow().deadlines.operation;
            let request = Request { uid: target.uid, secrets, secrets_forgotten: false, deadline };
            let error = match fault::around(rpc, call(controller, request)).await {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            let lasting = matches!(
                error.class,
                Class::Refused | Class::Unimplemented | Class::Forbidden | Class::Shutdown
            );
            let unknown = error.class == Class::Unknown;
            if lasting || !self.pause(&mut delay, false).await {
                let error = Error::from(error);
                return Err(if unknown { Error { kind: Kind::Uncertain, ..error } } else { error });
            }
        }
    }

    /// The same, ended when nobody wants it any more.
    async fn making<'a, T, F>(
        &mut self,
        step: &'static str,
        rpc: &'static str,
        target: &Target,
        secrets: Option<&'a Secrets>,
        call: impl Fn(Controller, Request<'a>) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T, RpcError>>,
    {
        let mut control = self.control.clone();
        tokio::select! {
            biased;
            done = self.controlled(step, rpc, target, secrets, call) => done,
            kind = abandoned(&mut control) => Err(say::stopped(kind)),
        }
    }
}
