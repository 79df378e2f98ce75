//! What a controller does for a volume besides its claims. Each call runs in the volume's task, between its mounts (CSI
//! rule 18); the longer ones are files of their own.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::fault;
use crate::plugin::{Call as NodeCall, Class, Controller, Request, RpcError, Snapshot, Stats};
use crate::secret::Secrets;
use crate::store::registry::Attachment;
use crate::store::registry::{AttachCall, Capability, Origin, Registration, Standing, VolumeName};
use crate::store::rows::{AccessMode, AttachmentMode, Leg, MountKey, MountRow, Phase, Usage};
use crate::volume::control::{Backoff, abandoned};
use crate::volume::creating::task_of;
use crate::volume::drive::Drive;
use crate::volume::registering::unregistered;
use crate::volume::requests::Part;
use crate::volume::secrets::told;
use crate::volume::unanswered::{Tried, Unanswered};
use crate::volume::work::Done;
use crate::volume::{claim_words as words, say};

/// A call about a volume that is no mount and no claim.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Call {
    /// What is to be created is the target's registration; `to_delete`: for a DeleteVolume, which needs its id.
    Create {
        to_delete: bool,
    },
    Validate {
        capabilities: Vec<Capability>,
    },
    Stats,
    Expand {
        required: u64,
        limit: u64,
        part: Part,
    },
    Snapshot {
        name: String,
        parameters: BTreeMap<String, String>,
    },
    Attach {
        node_id: String,
        call: AttachCall,
    },
    Detach {
        node_id: String,
    },
    Delete,
    /// DeregisterVolume by force.
    Forget,
}

/// The volume of a [`Call`], registered or given with it.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) key: MountKey,
    pub(super) uid: u32,
    pub(super) registration: Registration,
    pub(super) is_registered: bool,
}

/// How long a snapshot that is not ready yet is let alone.
const NOT_READY: Duration = Duration::from_secs(1);

impl Call {
    /// When nobody waits for it any more, it is undone.
    pub(super) fn is_undone(&self) -> bool {
        matches!(self, Call::Attach { .. })
    }

    /// It changes nothing, and is anybody's who may ask at all.
    pub(super) fn only_looks(&self) -> bool {
        matches!(self, Call::Validate { .. } | Call::Stats)
    }

    /// Why it cannot be done to this registration for this uid. What is on its way can only be deleted,
    /// detached, or by force forgotten.
    pub(super) fn refuse(&self, name: &VolumeName, registration: &Registration, uid: u32) -> Result<()> {
        if uid != 0 && uid != registration.uid && !self.only_looks() {
            return Err(words::anothers(name));
        }
        match (&registration.standing, self) {
            (Standing::Registered, _)
            | (
                Standing::Creating(_) | Standing::Deleting { .. },
                Call::Delete | Call::Detach { .. } | Call::Forget,
            ) => Ok(()),
            (Standing::Creating(_) | Standing::Deleting { .. }, _) => Err(words::on_its_way(name)),
        }
    }

    pub(super) fn kind(&self) -> &'static str {
        match self {
            Call::Create { to_delete: false } => "create",
            Call::Validate { .. } => "validate",
            Call::Stats => "stats",
            Call::Expand { .. } => "expand",
            Call::Snapshot { .. } => "snapshot",
            Call::Attach { .. } => "attach",
            Call::Detach { .. } => "detach",
            Call::Create { to_delete: true } | Call::Delete => "delete",
            Call::Forget => "deregister",
        }
    }
}

impl Drive<'_> {
    pub(super) async fn call(&mut self, target: &Target, call: Call) -> Result<Done> {
        let target = &self.as_it_is_now(target, &call).await?;
        match call {
            Call::Create { .. } => self.create(target).await.map(|record| Done::Created(Box::new(record))),
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
            Call::Forget => {
                let (name, volume) = (VolumeName::of(&target.key), self.rows.volume().row.key.clone());
                let done = self.shared.deregister(&name, Some(&volume), target.uid, true, Origin::Bus).await;
                done.map(|()| Done::Gone)
            }
        }
    }

    /// The target when it is its turn: since it was asked for, the name may have become another's, or another volume's, and a
    /// volume that was given somebody's. What is to be created is compared where it is entered; what is validated to be
    /// registered is nobody's yet.
    async fn as_it_is_now(&self, target: &Target, call: &Call) -> Result<Target> {
        let (name, volume) = (VolumeName::of(&target.key), &self.rows.volume().row.key);
        let record = self.shared.registry.record(name.clone()).await?;
        if !target.is_registered {
            if !matches!(call, Call::Create { .. }) && !call.only_looks() {
                self.shared.refuse_given(&record, volume, call).await?;
            }
            return Ok(target.clone());
        }
        let registration = record.registration.filter(|_| record.volume == *volume);
        let registration = registration.ok_or_else(|| words::changed_meanwhile(&name))?;
        call.refuse(&name, &registration, target.uid)?;
        Ok(Target { registration, ..target.clone() })
    }

    /// Whether the plugin confirms that the volume can be used so (CSI rule 35); what it says if not.
    async fn validate(&mut self, target: &Target, capabilities: &[Capability]) -> Result<Result<(), String>> {
        let usages: Vec<Usage> = capabilities.iter().map(|of| target.registration.usage(*of)).collect();
        let (id, secrets) = (&self.external_id(), self.target_secrets(target).await?);
        let (usages, parameters) = (&usages, &target.registration.spec.parameters);
        let call = |controller: Controller, request| async move {
            controller.validate(id, usages, parameters, request).await
        };
        let rpc = "ValidateVolumeCapabilities";
        Ok(self.controlled("validate", rpc, target, secrets.as_ref(), call).await?)
    }

    async fn stats(&mut self, target: &Target) -> Result<Stats> {
        let ready = self.ready().await?;
        let row = self.mounted().ok_or_else(|| words::not_mounted(&target.key))?;
        let call = self.node_call(&row, target, None);
        Ok(ready.stats(call).await?)
    }

    /// CSI rule 42: repeated until it is ready.
    async fn snapshot(
        &mut self,
        target: &Target,
        name: &str,
        parameters: &BTreeMap<String, String>,
    ) -> Result<Snapshot> {
        let (id, secrets) = (&self.external_id(), self.target_secrets(target).await?);
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

    /// The next try of what AttachVolume or DetachVolume left between two states, or of a creation or deletion.
    pub(super) async fn continue_call(&mut self, key: &MountKey) -> Result<()> {
        let name = VolumeName::of(key);
        let record = self.shared.registry.record(name.clone()).await?;
        let node_id = &key.tag;
        let unsettled = |at: &&Attachment| at.is_by_call(node_id) && at.leg != Leg::Present;
        self.rows.set_unfinished(key.clone(), None);
        // Since it was left, its name may have become another volume's.
        if task_of(&record) != self.rows.volume().row.key {
            return Ok(());
        }
        if let Some(at) = record.attachments.iter().find(unsettled) {
            let uid = at.by_call.as_ref().map_or(0, |call| call.uid);
            let registration = record.registration.clone().unwrap_or_else(|| unregistered(uid));
            let is_registered = record.registration.is_some();
            let target = Target { key: name.key(""), uid, registration, is_registered };
            return self.detach_call(&target, node_id).await;
        }
        let Some(registration) = record.registration.clone() else { return Ok(()) };
        match registration.standing {
            Standing::Creating(_) if record.volume.external_id.is_empty() => {
                self.ask_for(record, false).await.map(drop)
            }
            Standing::Deleting { ref back, .. } => {
                let (key, uid, is_registered) = (name.key(""), registration.uid, back.is_some());
                self.delete(&Target { key, uid, registration, is_registered }).await
            }
            Standing::Creating(_) | Standing::Registered => Ok(()),
        }
    }

    /// What takes the volume away, or OFFLINE expansion (CSI rule 26), has to wait until nobody has it.
    pub(super) async fn refuse_while_used(&self, target: &Target) -> Result<()> {
        let name = VolumeName::of(&target.key);
        let volume = self.rows.volume();
        let holders: Vec<String> = volume.mounts.iter().map(|row| row.key.consumer.clone()).collect();
        if !holders.is_empty() {
            return Err(words::mounted(&name, holders));
        }
        let record = self.shared.registry.record(name.clone()).await?;
        if !record.claims.is_empty() {
            return Err(words::in_use(&record, "release it first"));
        }
        let nodes: Vec<String> = record.attachments.iter().map(|at| format!("node {}", at.node_id)).collect();
        if !nodes.is_empty() {
            return Err(words::attached_to(&name, nodes));
        }
        match volume.row.stage {
            Leg::Absent => Ok(()),
            _ => Err(words::still_staged(&name)),
        }
    }

    /// The call's secrets, or those of the volume's credential.
    pub(super) async fn target_secrets(&self, target: &Target) -> Result<Option<Secrets>> {
        match (&self.secrets, &target.registration.spec.credential) {
            (Some(given), _) => Ok(Some(given.clone())),
            (None, Some(name)) => self.shared.credential(name).await.map(Some),
            (None, None) => Ok(None),
        }
    }

    pub(super) fn external_id(&self) -> String {
        self.rows.volume().row.key.external_id.clone()
    }

    pub(super) fn plugin(&self) -> String {
        self.rows.volume().row.key.plugin.clone()
    }

    /// One that is mounted, of whom it is the same which.
    pub(super) fn mounted(&self) -> Option<MountRow> {
        self.rows
            .volume()
            .mounts
            .iter()
            .find(|row| row.phase == Phase::Mounted)
            .map(|row| MountRow::clone(row))
    }

    /// As it is used, or as it was registered first.
    pub(super) fn capability(&self, target: &Target) -> Capability {
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

    pub(super) fn node_call<'a>(
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
    pub(super) async fn controlled<'a, T, F>(
        &mut self,
        step: &'static str,
        rpc: &'static str,
        target: &Target,
        secrets: Option<&'a Secrets>,
        call: impl Fn(Controller, Request<'a>) -> F,
    ) -> Result<T, Unanswered>
    where
        F: Future<Output = Result<T, RpcError>>,
    {
        let mut delay = Backoff::new();
        let mut said: Option<RpcError> = None;
        self.tried = Tried::default();
        self.step.set(step);
        let record = self.shared.registry.record(VolumeName::of(&target.key)).await;
        let record = record.map_err(|error| Unanswered::before(error.into()))?;
        let credential = target.registration.spec.credential.as_ref();
        let told = told(&target.registration, &record.attachments);
        loop {
            let controller = match self.controller().await {
                Ok(controller) => controller,
                // What the plugin said before it went away says more.
                Err(error) => return Err(self.tried.unanswered(said.map_or(error, Error::from))),
            };
            let patience = self.shared.config.borrow().deadlines.operation;
            let secrets_forgotten = self.others_secrets(&record, None, credential, secrets.is_some());
            let request = Request { uid: target.uid, secrets, secrets_forgotten, patience };
            self.tried.begin();
            let error = match fault::around(rpc, call(controller.hiding(told.clone()), request)).await {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            self.tried.note(&error);
            let lasting = matches!(
                error.class,
                Class::Refused | Class::Unimplemented | Class::Forbidden | Class::Shutdown
            );
            if error.class != Class::NotSent {
                said = Some(error.clone());
                self.step.say(Error::from(error.clone()).message);
            }
            if lasting || !self.pause(&mut delay, false).await {
                return Err(self.tried.unanswered(said.unwrap_or(error).into()));
            }
        }
    }

    /// The same, ended when nobody wants it any more.
    pub(super) async fn making<'a, T, F>(
        &mut self,
        step: &'static str,
        rpc: &'static str,
        target: &Target,
        secrets: Option<&'a Secrets>,
        call: impl Fn(Controller, Request<'a>) -> F,
    ) -> Result<T, Unanswered>
    where
        F: Future<Output = Result<T, RpcError>>,
    {
        if let Some(kind) = self.control.borrow().abandon {
            return Err(Unanswered::before(say::stopped(kind)));
        }
        let mut control = self.control.clone();
        tokio::select! {
            biased;
            done = self.controlled(step, rpc, target, secrets, call) => done,
            kind = abandoned(&mut control) => Err(self.tried.abandoned(say::stopped(kind))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn what_is_anothers_is_looked_at_only() {
        let name = VolumeName { namespace: "ns".into(), volume: "v".into() };
        let told = |call: &Call, uid| call.refuse(&name, &unregistered(7), uid).err().map(|error| error.kind);
        let detach = || Call::Detach { node_id: "n".into() };
        for call in [Call::Delete, detach(), Call::Snapshot { name: "s".into(), parameters: [].into() }] {
            let told = [0, 7, 8].map(|uid| told(&call, uid));
            assert_eq!(told, [None, None, Some(Kind::NotAuthorized)], "{}", call.kind());
        }
        assert_eq!(told(&Call::Stats, 8), None);
    }
}
