//! The calls on registered volumes: lists, claims, and controller calls.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use crate::error::{Error, Kind, Result};
use crate::names;
use crate::plugin::{ATTACHES, Snapshot, Stats};
use crate::store::MountFilter;
use crate::store::registry::{
    AttachCall, Capability, Claim, ClaimFilter, ClaimMode, ClaimState, ListedClaim, Origin, Record,
    RecordFilter, Use, VolumeName,
};
use crate::store::rows::{AccessMode, AttachmentMode, MountKey, MountSpec, Phase, VolumeKey};
use crate::volume::api::mount_options::MountOptions;
use crate::volume::api::requests::{
    Authority, ClaimRequest, Inline, Part, ReleaseRequest, VolumeRequest, Wait,
};
use crate::volume::api::views::{Claimed, VolumeView};
use crate::volume::context::Context;
use crate::volume::control::records::UsableVolume;
use crate::volume::errors::volume::VolumeError;
use crate::volume::lifecycle::{ModeFilter, is_unborn, new_claim, new_registration, unregistered};
use crate::volume::manager::Volumes;
use crate::volume::model::claim;
use crate::volume::model::subject::ClaimKey;
use crate::volume::operation::request::{CallTarget, ControllerRequest, OperationRequest, OperationResponse};
use crate::volume::servers::{ServerAttach, ServerSnapshot};

fn unanswered() -> Error {
    Error::internal("a call was answered with another's answer")
}

impl Context {
    /// Bounds by a call's deadline what asks a server about a volume.
    pub(in crate::volume) async fn before<T>(
        &self,
        deadline: Option<Instant>,
        name: &VolumeName,
        asked: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        // Alone csid asks nobody.
        let Some(deadline) = deadline.filter(|_| self.records.servers.is_some()) else {
            return asked.await;
        };
        let late = |_| Error::new(Kind::Unavailable, format!("no server was reached for {name} in time"));
        tokio::time::timeout_at(deadline.into(), asked).await.map_err(late)?
    }

    /// Returns a volume before its first use. A volume that a file declares and that is not registered yet is
    /// registered first, within the call's deadline. `remembers`: what a server has answered to an earlier call will do.
    pub(in crate::volume) async fn to_be_used(
        self: &Arc<Self>,
        name: &VolumeName,
        deadline: Option<Instant>,
        remembers: bool,
    ) -> Result<UsableVolume> {
        if remembers && let Some(answer) = self.records.remembered(name) {
            return self.records.usable(name, Some(answer)).await;
        }
        let Some((declared, _)) = self.records.declarations.waiting(name) else {
            return self.before(deadline, name, self.records.usable(name, None)).await;
        };
        if self.records.registry.record(name.clone()).await?.registration.is_none() {
            let wait = Wait { deadline, ..Wait::default() };
            self.register_declared(&declared, wait).await?;
        }
        self.records.usable(name, None).await
    }

    /// Returns the volume of a name that is in use, or that the consumer has claimed. `None`: neither holds.
    pub(in crate::volume) async fn volume_of(&self, key: &MountKey) -> Result<Option<VolumeKey>> {
        if let Some(volume) = self.directory.find(key) {
            return Ok(Some(volume));
        }
        let record = self.records.registry.record(VolumeName::of(key)).await?;
        Ok(record.claim(&key.consumer).is_some().then_some(record.volume))
    }

    /// Returns the volume of a mount by this name; `None`: there is no such mount.
    async fn mounted_inline(&self, name: &VolumeName) -> Result<Option<VolumeKey>> {
        let filter = MountFilter {
            namespace: Some(name.namespace.clone()),
            volume: Some(name.volume.clone()),
            phase: Some(Phase::Mounted),
            ..MountFilter::default()
        };
        let rows = self.store.mounts(filter).await?;
        Ok(rows.into_iter().next().map(|(row, _)| row.volume))
    }

    /// Returns whether this very volume is mounted under the key.
    pub(in crate::volume) async fn is_mounted(&self, key: &MountKey, volume: &VolumeKey) -> Result<bool> {
        let rows = self.store.mounts(MountFilter::of(key)).await?;
        Ok(rows.iter().any(|(row, _)| row.phase == Phase::Mounted && row.volume == *volume))
    }

    /// Returns the spec of a mount of a registered volume, and the claim to take if the consumer has none.
    pub(in crate::volume) async fn mount_registered(
        self: &Arc<Self>,
        key: &MountKey,
        uid: u32,
        options: MountOptions,
        secrets_given: bool,
        used: &UsableVolume,
    ) -> Result<(MountSpec, Arc<Claim>)> {
        let record = &used.record;
        let wanted =
            ModeFilter { access_mode: options.access_mode, attachment_mode: options.attachment_mode };
        let mode = if options.read_only { ClaimMode::Read } else { ClaimMode::Write };
        if let Some(bound) = &options.bound {
            self.refuse_ended(bound, uid).await?;
        }
        let usage = match record.claim(&key.consumer) {
            Some(present) if present.usage.mode == ClaimMode::Read && mode == ClaimMode::Write => {
                let text =
                    format!("{} has claimed {} to read: mount it read-only", key.consumer, record.name);
                // The consumer's own claim is in the way, and waiting does not end it.
                return Err(Error::new(Kind::ClaimConflict, text).with(|details| details.retryable = false));
            }
            Some(present) => {
                wanted.refuse_unlike(present, &record.name)?;
                present.usage
            }
            None => Use { mode, capability: wanted.choose(record)? },
        };
        // The request has a claim even if one exists, since that one may be gone when the request runs.
        let (credential, bound) = (options.credential.clone(), options.bound.clone());
        let claim = Claim {
            by_mount: true,
            bound,
            credential,
            ..new_claim(&key.consumer, &self.records.node, uid, usage)
        };
        let registration = record
            .registration
            .as_ref()
            .ok_or_else(|| VolumeError::NotRegistered { name: record.name.clone() })?;
        if let Some(option) = options.other_than(&registration.spec)
            && uid != 0
            && uid != registration.uid
        {
            return Err(VolumeError::OtherOption {
                name: record.name.clone(),
                option,
                uid: registration.uid,
            }
            .into());
        }
        let mut spec = options.spec(Some((claim.usage.capability, &registration.spec)))?;
        if spec.credential.is_none() && !secrets_given {
            spec.credential.clone_from(&registration.spec.credential);
        }
        Ok((spec, Arc::new(claim)))
    }

    pub(in crate::volume) fn view(&self, record: Record, past: Vec<String>) -> VolumeView {
        let plugin = self.plugins.view(&record.volume.plugin).unwrap_or_default();
        let controller_required = self.plugins.can(&record.volume.plugin, ATTACHES).unwrap_or(false);
        let offers =
            |service: &str| plugin.healthy && plugin.services.iter().any(|offered| offered == service);
        let schedulable = offers("node") && (!controller_required || offers("controller"));
        VolumeView {
            record,
            provider: plugin.provider,
            provider_version: plugin.provider_version,
            controller_required,
            schedulable,
            past,
            only_declared: false,
        }
    }
}

impl Volumes {
    pub async fn volumes(&self, filter: RecordFilter) -> Result<Vec<VolumeView>> {
        let (namespace, volume) = (filter.namespace.clone(), filter.volume.clone());
        let (records, _) =
            self.shared.records.registry.records(RecordFilter { registered: true, ..filter }).await?;
        let ends = records.first().zip(records.last()).map(|(first, last)| [&first.name, &last.name]);
        let mut past: BTreeMap<VolumeName, Vec<String>> = BTreeMap::new();
        if let Some(ends) = ends {
            let of_past = ClaimFilter {
                namespace,
                volume,
                between: Some(ends.map(Clone::clone)),
                past: true,
                ..ClaimFilter::default()
            };
            for ListedClaim { name, claim, .. } in
                self.shared.records.registry.claims(of_past).await?.0.into_iter().rev()
            {
                past.entry(name).or_default().push(claim.consumer);
            }
        }
        let mut views = Vec::with_capacity(records.len());
        for record in records {
            let past = past.remove(&record.name).unwrap_or_default();
            views.push(self.shared.view(record, past));
        }
        Ok(views)
    }

    pub async fn volume(&self, name: VolumeName) -> Result<VolumeView> {
        let filter = RecordFilter {
            namespace: Some(name.namespace.clone()),
            volume: Some(name.volume.clone()),
            ..RecordFilter::default()
        };
        let mut view = self.volumes(filter).await?.pop();
        if view.is_none() && self.shared.records.servers.is_some() {
            view = Some(self.shared.view(self.shared.records.registered(&name).await?, Vec::new()));
        }
        view.ok_or_else(|| self.shared.records.not_registered(&name))
    }

    /// Returns whether the plugin confirms the capabilities, and its message if not. Empty `capabilities` stands for all of the
    /// volume.
    pub async fn validate_volume(
        &self,
        request: VolumeRequest,
        capabilities: Vec<Capability>,
    ) -> Result<(bool, String)> {
        if let Some(servers) = self.shared.records.servers.as_ref().filter(|_| request.inline.is_none())
            && !self.is_asked_here(&request.name).await?
        {
            return self.validate_at_servers(servers.as_ref(), request, capabilities).await;
        }
        match self.call(request, ControllerRequest::Validate { capabilities }).await? {
            OperationResponse::Validated(Ok(())) => Ok((true, String::new())),
            OperationResponse::Validated(Err(message)) => Ok((false, message)),
            _ => Err(unanswered()),
        }
    }

    /// Expands a volume. Returns the capacity, and whether a node still has to expand it.
    /// Expands a volume. A call without a deadline ends after `[deadlines] operation`: it keeps later callers from the volume while it waits.
    pub async fn expand_volume(
        &self,
        mut request: VolumeRequest,
        required: u64,
        limit: u64,
        part: Part,
    ) -> Result<(Option<u64>, bool)> {
        if let Some(servers) = self.shared.records.servers.as_ref().filter(|_| part != Part::Node) {
            return self.expand_at_servers(servers.as_ref(), request, (required, limit), part).await;
        }
        let latest = Instant::now() + self.shared.config.borrow().deadlines.operation;
        request.wait.deadline.get_or_insert(latest);
        match self.call(request, ControllerRequest::Expand { required, limit, part }).await? {
            OperationResponse::Expanded(capacity, node_is_due) => Ok((capacity, node_is_due)),
            _ => Err(unanswered()),
        }
    }

    pub async fn create_snapshot(
        &self,
        request: VolumeRequest,
        name: String,
        parameters: BTreeMap<String, String>,
        wait: bool,
    ) -> Result<Snapshot> {
        if let Some(servers) = &self.shared.records.servers {
            let snapshot = ServerSnapshot { name, parameters, until_ready: wait };
            return self.snapshot_at_servers(servers.as_ref(), request, snapshot).await;
        }
        match self.call(request, ControllerRequest::Snapshot { name, parameters, wait }).await? {
            OperationResponse::Snapshot(snapshot) => Ok(snapshot),
            _ => Err(unanswered()),
        }
    }

    /// Returns the statistics of a volume that is mounted here.
    pub async fn volume_stats(&self, request: VolumeRequest) -> Result<Stats> {
        match self.call(request, ControllerRequest::Stats).await? {
            OperationResponse::Stats(stats) => Ok(stats),
            _ => Err(unanswered()),
        }
    }

    /// Attaches a volume, and returns the publish context.
    pub async fn attach_volume(
        &self,
        request: VolumeRequest,
        node_id: String,
        read_only: bool,
        access_mode: Option<AccessMode>,
        attachment_mode: Option<AttachmentMode>,
    ) -> Result<BTreeMap<String, String>> {
        if let Some(servers) = &self.shared.records.servers {
            let attach = ServerAttach {
                node_id,
                read_only,
                access_mode: access_mode.map(names::word).unwrap_or_default().to_owned(),
                attachment_mode: attachment_mode.map(names::word).unwrap_or_default().to_owned(),
            };
            return self.attach_at_servers(servers.as_ref(), request, attach).await;
        }
        let modes = ModeFilter { access_mode, attachment_mode };
        let record = match &request.inline {
            None => self.shared.to_be_used(&request.name, request.wait.deadline, false).await?.record,
            Some(inline) => Record {
                registration: Some(new_registration(request.uid, inline.spec.clone(), Origin::Bus)),
                ..Record::none(request.name.clone())
            },
        };
        let (uid, capability) = (request.uid, modes.choose(&record)?);
        let secrets_given = request.secrets.is_some();
        let call = AttachCall { uid, read_only, capability, secrets_given };
        match self.call(request, ControllerRequest::Attach { node_id, call }).await? {
            OperationResponse::Attached(context) => Ok(context),
            _ => Err(unanswered()),
        }
    }

    /// Detaches a volume. `forget`: its row is dropped, although the plugin has not acknowledged the detach.
    pub async fn detach_volume(&self, request: VolumeRequest, node_id: String, forget: bool) -> Result<()> {
        if let Some(servers) = &self.shared.records.servers {
            return self.detach_at_servers(servers.as_ref(), request, node_id, forget).await;
        }
        if forget {
            return self.forget_attachment(request.name, node_id, request.wait).await;
        }
        if request.inline.is_none() {
            let record = self.shared.records.registry.record(request.name.clone()).await?;
            // The volume is neither registered nor attached: there is nothing to detach, and no plugin to call.
            if record.is_empty() {
                return self.shared.records.synced().await;
            }
        }
        let is_inline = request.inline.is_some();
        self.call(request, ControllerRequest::Detach { node_id, is_inline }).await.map(drop)
    }

    /// Queues a call at the actor of its volume, and waits for the response.
    pub(in crate::volume) async fn call(
        &self,
        request: VolumeRequest,
        call: ControllerRequest,
    ) -> Result<OperationResponse> {
        let VolumeRequest { name, inline, uid, secrets, credential, wait } = request;
        let is_of_node = matches!(call, ControllerRequest::Expand { part: Part::Node, .. });
        if !is_of_node && !matches!(call, ControllerRequest::Stats | ControllerRequest::Validate { .. }) {
            self.shared.refuse_in_cluster("this call")?;
        }
        let record = self.shared.records.registry.record(name).await?;
        let name = record.name.clone();
        let (volume, registration, is_registered) = match inline {
            Some(Inline { volume, spec }) => {
                self.shared.records.refuse_given(&record, &volume, &call).await?;
                (volume, new_registration(uid, spec, Origin::Bus), false)
            }
            None => match &record.registration {
                Some(registration) => {
                    call.refuse(&record.name, registration, uid)?;
                    // An RPC names the volume by its id, which the plugin has not answered.
                    if is_unborn(&record) {
                        return Err(VolumeError::InTransition { name: record.name.clone() }.into());
                    }
                    (record.volume.clone(), registration.clone(), true)
                }
                // An inline attachment is known by its name, for a Detach and for reads of its own mounts.
                None if matches!(call, ControllerRequest::Detach { .. } | ControllerRequest::Stats)
                    && !record.attachments.is_empty() =>
                {
                    (record.volume, unregistered(uid), false)
                }
                // An inline volume has no row other than those of its mounts.
                None if matches!(call, ControllerRequest::Stats) => {
                    match self.shared.mounted_inline(&record.name).await? {
                        Some(volume) => (volume, unregistered(uid), false),
                        None => return Err(self.shared.records.not_registered(&record.name)),
                    }
                }
                None => return Err(self.shared.records.not_registered(&record.name)),
            },
        };
        let call = match call {
            ControllerRequest::Validate { capabilities } if capabilities.is_empty() => {
                ControllerRequest::Validate { capabilities: registration.spec.capabilities.clone() }
            }
            call => call,
        };
        // Stats never sends the credential, so no unit is started to read it.
        let credential = credential.filter(|_| !matches!(call, ControllerRequest::Stats));
        let secrets = self.shared.given(secrets, credential, wait.deadline).await?;
        let target = Box::new(CallTarget { name, uid, registration, is_registered });
        let answer = self.shared.ask(&volume, uid, OperationRequest::Call { target, call, secrets }, wait)?;
        self.shared.answered(answer).await
    }

    pub async fn claim(&self, request: ClaimRequest) -> Result<Claimed> {
        let node = &self.shared.records.node;
        if request.node.as_ref().is_some_and(|asked| asked != node) {
            let text = format!("this csid claims for its own node only, {node}");
            return Err(Error::new(Kind::NotAuthorized, text));
        }
        let (name, deadline) = (request.name.clone(), request.wait.deadline);
        let used = self.shared.to_be_used(&name, deadline, true).await?;
        if !used.is_remembered() {
            return self.claim_used(request, used).await;
        }
        let answer = used.answer.clone();
        match self.claim_used(request.clone(), used).await {
            Err(error) if answer.is_some_and(|answer| answer.may_mislead(&error)) => {
                let used = self.shared.to_be_used(&name, deadline, false).await?;
                self.claim_used(request, used).await
            }
            claimed => claimed,
        }
    }

    async fn claim_used(&self, request: ClaimRequest, used: UsableVolume) -> Result<Claimed> {
        let ClaimRequest { name, consumer, uid, secrets, credential, wait, .. } = request;
        let node = self.shared.records.node.clone();
        let key = ClaimKey::new(&name, &consumer);
        let UsableVolume { record, answer } = used;
        let modes = ModeFilter { access_mode: request.access_mode, attachment_mode: request.attachment_mode };
        if let Some(bound) = &request.bound {
            self.shared.refuse_ended(bound, uid).await?;
        }
        let usage = match record.claim(&consumer).filter(|claim| !claim.releasing) {
            Some(present) => {
                modes.refuse_unlike(present, &name)?;
                Use { mode: request.mode.unwrap_or(present.usage.mode), ..present.usage }
            }
            None => {
                let capability = modes.choose(&record)?;
                let reader = claim::reader_only(capability.access_mode);
                let default = if reader { ClaimMode::Read } else { ClaimMode::Write };
                Use { mode: request.mode.unwrap_or(default), capability }
            }
        };
        let claim = Claim { bound: request.bound, credential, ..new_claim(&consumer, &node, uid, usage) };
        let claim = Arc::new(claim);
        let work = OperationRequest::Claim { key, claim, wait_until: request.wait_until, secrets, answer };
        let claimed = self.shared.ask(&record.volume, uid, work, wait)?;
        let OperationResponse::Claimed(record) = self.shared.answered(claimed).await? else {
            return Err(Error::internal("a claim was answered without its volume"));
        };
        let state = record.claim(&consumer).map_or(ClaimState::Pending, |claim| claim.state);
        let at = record.attachment(&node);
        let publish_context = at.map(|at| at.publish_context.clone()).unwrap_or_default();
        let external_node_id = match at {
            Some(at) => at.node_id.clone().unwrap_or_default(),
            None => {
                self.shared.plugins.view(&record.volume.plugin).map(|view| view.node_id).unwrap_or_default()
            }
        };
        let volume = self.shared.view(*record, Vec::new());
        Ok(Claimed { volume, publish_context, external_node_id, state })
    }

    pub async fn release(&self, request: ReleaseRequest) -> Result<()> {
        let ReleaseRequest { name, consumer, authority, force, node, secrets, credential, id, wait } =
            request;
        self.shared.changeable()?;
        let key = ClaimKey::new(&name, &consumer);
        let record = self.shared.records.registry.record(name.clone()).await?;
        let claim = record.claim(&consumer);
        if claim.is_some_and(|claim| node.as_ref().is_some_and(|node| *node != claim.node)) {
            let text = format!("{consumer} has claimed {name} on another node");
            return Err(Error::new(Kind::NotFound, text));
        }
        // A claim that is being made has no row yet. A volume in creation has no claims.
        if (record.registration.is_none() || is_unborn(&record)) && claim.is_none() {
            return self.shared.records.synced().await;
        }
        let (Authority::Own(uid) | Authority::Any(uid)) = authority;
        // Without a row nothing is attached yet, so no secrets are needed.
        let credential = credential.filter(|_| claim.is_some());
        let secrets = self.shared.given(secrets, credential, wait.deadline).await?;
        let work = OperationRequest::Release { key, authority, force, secrets, id };
        let answer = self.shared.ask(&record.volume, uid, work, wait)?;
        self.shared.answered(answer).await.map(drop)
    }

    pub async fn claims(&self, filter: ClaimFilter) -> Result<Vec<ListedClaim>> {
        Ok(self.shared.records.registry.claims(filter).await?.0)
    }

    /// Returns the uid that owns a claim, to choose the action to authorise. `None`: there is no such claim.
    pub async fn claim_owner(&self, name: &VolumeName, consumer: &str) -> Result<Option<u32>> {
        let record = self.shared.records.registry.record(name.clone()).await?;
        Ok(record.claim(consumer).map(|claim| claim.uid))
    }
}
