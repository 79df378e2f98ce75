//! Controller calls that concern no claim. Each runs in the actor of the volume, between its mounts (CSI rule 18). The longer ones
//! have files of their own.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::backoff::Backoff;
use crate::error::{Error, Result, Step};
use crate::fault;
use crate::plugin::{CallContext, Controller, RpcError, RpcKind, RpcOutcome, Snapshot};
use crate::secret::Secrets;
use crate::store::registry::Attachment;
use crate::store::registry::{Capability, Origin, Standing, VolumeName};
use crate::store::rows::{AccessMode, AttachmentMode, Leg, Usage};
use crate::volume::control::engine::Engine;
use crate::volume::control::tries::{RpcFailure, RpcTries};
use crate::volume::errors::operation::OperationError;
use crate::volume::errors::volume::VolumeError;
use crate::volume::lifecycle::given_values;
use crate::volume::lifecycle::{known_id, unregistered};
use crate::volume::model::subject::Subject;
use crate::volume::operation::request::{CallTarget, ControllerRequest, OperationResponse};
use crate::volume::seam::Site;
use crate::volume::transitions::refuse_used;
use crate::volume::waits::PluginWaits;

/// The pause between two calls for a snapshot that is not ready yet.
const NOT_READY: Duration = Duration::from_secs(1);

impl<S: Site> Engine<'_, S> {
    pub(in crate::volume::control) async fn run_call(
        &mut self,
        target: &CallTarget,
        call: ControllerRequest,
    ) -> Result<OperationResponse> {
        let target = &self.as_it_is_now(target, &call).await?;
        match call {
            ControllerRequest::Create { to_delete } => self
                .create(target, to_delete)
                .await
                .map(|record| OperationResponse::Created(Box::new(record))),
            ControllerRequest::Validate { capabilities } => {
                self.validate(target, &capabilities).await.map(OperationResponse::Validated)
            }
            ControllerRequest::Stats => self.site.stats(target).await.map(OperationResponse::Stats),
            ControllerRequest::Expand { required, limit, part } => {
                let (capacity, node_is_due) = self.expand(target, required, limit, part).await?;
                Ok(OperationResponse::Expanded(capacity, node_is_due))
            }
            ControllerRequest::Snapshot { name, parameters, wait } => {
                self.snapshot(target, &name, &parameters, wait).await.map(OperationResponse::Snapshot)
            }
            ControllerRequest::Attach { node_id, call } => {
                self.attach_call(target, &node_id, &call).await.map(OperationResponse::Attached)
            }
            ControllerRequest::Detach { node_id, is_inline } => {
                self.detach_call(target, &node_id, is_inline).await.map(|()| OperationResponse::Gone)
            }
            ControllerRequest::Delete => self.delete(target).await.map(|()| OperationResponse::Gone),
            ControllerRequest::Forget => {
                let (name, volume) = (target.name.clone(), self.site.volume().clone());
                self.site.refuse_mounted(&name).await?;
                let done = self.records.deregister(&name, Some(&volume), target.uid, true, Origin::Bus).await;
                done.map(|()| OperationResponse::Gone)
            }
        }
    }

    /// Returns the target as it is when its turn comes. Since the request the name may mean another volume or have another owner,
    /// and an inline volume may have been registered. A creation is checked where it is entered. A read of an inline volume needs
    /// no check.
    async fn as_it_is_now(&self, target: &CallTarget, call: &ControllerRequest) -> Result<CallTarget> {
        let (name, volume) = (target.name.clone(), self.site.volume());
        let record = self.records.registry.record(name.clone()).await?;
        if !target.is_registered {
            if !matches!(call, ControllerRequest::Create { .. }) && !call.only_looks() {
                self.records.refuse_given(&record, volume, call).await?;
            }
            return Ok(target.clone());
        }
        let registration = record.registration.filter(|_| record.volume == *volume);
        let registration = registration.ok_or_else(|| VolumeError::Replaced { name: name.clone() })?;
        call.refuse(&name, &registration, target.uid)?;
        Ok(CallTarget { registration, ..target.clone() })
    }

    /// Returns whether the plugin confirms the capabilities (CSI rule 35). The inner error is the plugin's message.
    async fn validate(
        &mut self,
        target: &CallTarget,
        capabilities: &[Capability],
    ) -> Result<Result<(), String>> {
        let usages: Vec<Usage> = capabilities.iter().map(|of| target.registration.usage(*of)).collect();
        let (id, secrets) = (&self.external_id(target)?, self.target_secrets(target).await?);
        let (usages, parameters) = (&usages, &target.registration.spec.parameters);
        let call = |controller: Controller, request| async move {
            controller.validate(id, usages, parameters, request).await
        };
        let rpc = "ValidateVolumeCapabilities";
        Ok(self.controlled(Step::Validate, rpc, target, secrets.as_ref(), call).await?)
    }

    /// Creates a snapshot. The call is repeated until the snapshot is ready (CSI rule 42): by csid if `waits`, else by the
    /// caller.
    async fn snapshot(
        &mut self,
        target: &CallTarget,
        name: &str,
        parameters: &BTreeMap<String, String>,
        waits: bool,
    ) -> Result<Snapshot> {
        let (id, secrets) = (&self.external_id(target)?, self.target_secrets(target).await?);
        let mut delay = Backoff::between(NOT_READY, NOT_READY);
        loop {
            let call = |controller: Controller, request| async move {
                controller.snapshot(id, name, parameters, request).await
            };
            let snapshot =
                self.controlled(Step::Snapshot, "CreateSnapshot", target, secrets.as_ref(), call).await?;
            if snapshot.ready || !waits {
                return Ok(snapshot);
            }
            self.site.operation().step.set(Step::WaitingForSnapshot);
            if !self.site.pause(&mut delay).await {
                return Err(VolumeError::SnapshotNotReady { name: name.to_owned(), id: snapshot.id }.into());
            }
        }
    }

    /// Finishes what AttachVolume or DetachVolume left between two states.
    pub(in crate::volume::control) async fn retry_detach(
        &mut self,
        name: &VolumeName,
        node_id: &str,
    ) -> Result<()> {
        let record = self.records.registry.record(name.clone()).await?;
        let unsettled = |at: &&Attachment| at.is_by_call(node_id) && at.leg != Leg::Present;
        let subject = Subject::Attachment { volume: name.clone(), node_id: node_id.to_owned() };
        self.site.set_unfinished(subject, None);
        // The name may have come to mean another volume since then.
        if record.volume != *self.site.volume() {
            return Ok(());
        }
        let Some(at) = record.attachments.iter().find(unsettled) else { return Ok(()) };
        let uid = at.by_call.as_ref().map_or(0, |call| call.uid);
        let is_registered = record.registration.is_some();
        let registration = record.registration.unwrap_or_else(|| unregistered(uid));
        let target = CallTarget { name: name.clone(), uid, registration, is_registered };
        self.detach_call(&target, node_id, true).await
    }

    /// Retries a creation or deletion.
    pub(in crate::volume::control) async fn retry_call(&mut self, name: &VolumeName) -> Result<()> {
        let record = self.records.registry.record(name.clone()).await?;
        self.site.set_unfinished(Subject::Volume(name.clone()), None);
        // The name may have come to mean another volume since then.
        if record.volume != *self.site.volume() {
            return Ok(());
        }
        let Some(registration) = record.registration.clone() else { return Ok(()) };
        match registration.standing {
            // The plugin was never asked, so the row is removed. A caller that still wants the volume repeats the call.
            Standing::Creating(ref creation) if creation.unasked => self.not_born(name).await,
            Standing::Creating(_) if record.volume.handle.is_creating() => {
                self.ask_for(record, false).await.map(drop)
            }
            Standing::Deleting { ref back, .. } => {
                let (name, uid, is_registered) = (name.clone(), registration.uid, back.is_some());
                self.delete(&CallTarget { name, uid, registration, is_registered }).await
            }
            Standing::Creating(_) | Standing::Registered => Ok(()),
        }
    }

    /// Refuses while the volume is in use. A call that removes the volume, and an OFFLINE expansion (CSI rule 26), must wait
    /// until it has no users.
    pub(in crate::volume::control) async fn refuse_while_used(&self, target: &CallTarget) -> Result<()> {
        let name = target.name.clone();
        let holders = self.site.consumers();
        if !holders.is_empty() {
            return Err(VolumeError::Mounted { name, holders }.into());
        }
        refuse_used(&self.records.registry.record(name.clone()).await?)?;
        match self.site.is_staged() {
            true => Err(VolumeError::StillStaged { name }.into()),
            false => Ok(()),
        }
    }

    /// Returns the secrets of the call, or those of the volume's credential. `None`: there are neither.
    pub(in crate::volume::control) async fn target_secrets(
        &self,
        target: &CallTarget,
    ) -> Result<Option<Secrets>> {
        match (&self.site.operation().secrets, &target.registration.spec.credential) {
            (Some(given), _) => Ok(Some(given.clone())),
            (None, Some(name)) => self.site.credential(name).await.map(Some),
            (None, None) => Ok(None),
        }
    }

    /// Returns the id by which RPCs name the target's volume. An error: no RPC can name it.
    pub(in crate::volume::control) fn external_id(&self, target: &CallTarget) -> Result<String> {
        known_id(self.site.volume(), &Subject::Volume(target.name.clone())).map(str::to_owned)
    }

    pub(in crate::volume::control) fn plugin(&self) -> String {
        self.site.volume().plugin.clone()
    }

    /// Returns the capability of the first mount, else the first registered one.
    pub(in crate::volume::control) fn capability(&self, target: &CallTarget) -> Capability {
        let registered = target.registration.spec.capabilities.first().copied();
        self.site.used_capability().or(registered).unwrap_or(Capability {
            access_mode: AccessMode::SingleNodeWriter,
            attachment_mode: AttachmentMode::FileSystem,
        })
    }

    /// Makes a controller call, and retries it unchanged until it succeeds, fails for good, or its time is over.
    pub(in crate::volume::control) async fn controlled<'a, T, F>(
        &mut self,
        step: Step,
        rpc: &'static str,
        target: &CallTarget,
        secrets: Option<&'a Secrets>,
        call: impl Fn(Controller, CallContext<'a>) -> F,
    ) -> Result<T, RpcFailure>
    where
        F: Future<Output = Result<T, RpcError>>,
    {
        let mut delay = Backoff::new();
        let mut said: Option<RpcError> = None;
        self.tried = RpcTries::default();
        self.site.operation().step.set(step);
        let record = self.records.registry.record(target.name.clone()).await;
        let record = record.map_err(|error| RpcFailure::before(error.into()))?;
        let credential = target.registration.spec.credential.as_ref();
        let given = given_values(&target.registration, &record.attachments);
        loop {
            let controller = match self.site.controller(rpc).await {
                Ok(controller) => controller,
                // The last error of the plugin is more precise than its absence.
                Err(error) => return Err(self.tried.unanswered(said.map_or(error, Error::from))),
            };
            let patience = self.records.config.borrow().deadlines.operation;
            let secrets_forgotten = self.others_secrets(&record, None, credential, secrets.is_some());
            let request = CallContext { uid: target.uid, secrets, secrets_forgotten, patience };
            self.tried.begin();
            let error = match fault::around(rpc, call(controller.hiding(given.clone()), request)).await {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            let outcome = error.outcome(RpcKind::Controller);
            self.tried.note(outcome);
            if outcome == RpcOutcome::Unimplemented {
                self.site.ask_what_it_can().await;
            }
            if outcome != RpcOutcome::NotSent {
                said = Some(error.clone());
                self.site.operation().step.note(&Error::from(error.clone()));
            }
            if outcome.is_final() || !self.site.pause(&mut delay).await {
                return Err(self.tried.unanswered(said.unwrap_or(error).into()));
            }
        }
    }

    /// Makes a controller call like `controlled`, but stops when the operation is abandoned.
    pub(in crate::volume::control) async fn making<'a, T, F>(
        &mut self,
        step: Step,
        rpc: &'static str,
        target: &CallTarget,
        secrets: Option<&'a Secrets>,
        call: impl Fn(Controller, CallContext<'a>) -> F,
    ) -> Result<T, RpcFailure>
    where
        F: Future<Output = Result<T, RpcError>>,
    {
        if let Some(kind) = self.site.operation().signals.borrow().abandon {
            return Err(RpcFailure::before(OperationError::Stopped { kind }.into()));
        }
        let abandoned = self.site.operation().abandoned();
        tokio::select! {
            biased;
            done = self.controlled(step, rpc, target, secrets, call) => done,
            kind = abandoned => Err(self.tried.abandoned(OperationError::Stopped { kind }.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn other_uid_only_reads_a_volume() {
        let name = VolumeName { namespace: "ns".into(), volume: "v".into() };
        let refused = |call: &ControllerRequest, uid| {
            call.refuse(&name, &unregistered(7), uid).err().map(|error| error.kind)
        };
        let detach = || ControllerRequest::Detach { node_id: "n".into(), is_inline: false };
        for call in [
            ControllerRequest::Delete,
            detach(),
            ControllerRequest::Snapshot { name: "s".into(), parameters: [].into(), wait: true },
        ] {
            let kinds = [0, 7, 8].map(|uid| refused(&call, uid));
            assert_eq!(kinds, [None, None, Some(Kind::NotAuthorized)], "{}", call.kind());
        }
        assert_eq!(refused(&ControllerRequest::Stats, 8), None);
    }
}
