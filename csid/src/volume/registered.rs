//! What the bus asks of volumes beyond their mounts: the registry, claims, and what only a controller does.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use crate::error::{Error, Kind, Result};
use crate::plugin::{ATTACHES, Snapshot, Stats};
use crate::store::registry::{
    AttachCall, Capability, Claim, ClaimFilter, ClaimMode, ClaimState, Origin, Record, RecordFilter,
    Standing, Use, VolumeName,
};
use crate::store::rows::{AccessMode, AttachmentMode, MountKey, MountSpec, VolumeKey};
use crate::volume::controlling::{Call, Target};
use crate::volume::deleting::is_being_deleted;
use crate::volume::registering::{new_registration, unregistered};
use crate::volume::requests::{
    ClaimRequest, Claimed, Inline, Part, ReleaseRequest, VolumeRequest, VolumeView,
};
use crate::volume::work::{Done, Work};
use crate::volume::{Authority, MountOptions, Shared, Volumes, Wait, claim_words as words, claims, say};

fn unanswered() -> Error {
    Error::internal("a call was answered with another's answer")
}

/// What a Mount is of.
pub(super) struct MountOf {
    pub(super) volume: VolumeKey,
    pub(super) spec: MountSpec,
    /// Of a registered volume.
    pub(super) claim: Option<Box<Claim>>,
}

impl Shared {
    /// The record of a volume that can be used.
    pub(super) async fn registered(&self, key: &MountKey) -> Result<Record> {
        let record = self.registry.record(VolumeName::of(key)).await?;
        match record.registration.as_ref().map(|registration| &registration.standing) {
            Some(Standing::Registered) => Ok(record),
            Some(Standing::Creating(_)) => {
                Err(busy(&record.name, "is being created; ask again when it is there"))
            }
            Some(Standing::Deleting { .. }) => Err(busy(&record.name, "is being deleted")),
            None => Err(self.not_registered(&record.name)),
        }
    }

    pub(super) fn not_registered(&self, name: &VolumeName) -> Error {
        match self.declarations.file(name) {
            Some(file) => words::not_yet(name, &file),
            None => say::not_registered(&name.key("")),
        }
    }

    /// The same before the volume's first use: what a file declares and is not registered yet is registered now, in this
    /// call's time.
    async fn to_be_used(self: &Arc<Self>, key: &MountKey, deadline: Option<Instant>) -> Result<Record> {
        let name = VolumeName::of(key);
        let Some((declared, _)) = self.declarations.waiting(&name) else { return self.registered(key).await };
        if self.registry.record(name).await?.registration.is_none() {
            let wait = Wait { deadline, ..Wait::default() };
            self.register_declared(&declared, wait).await?;
        }
        self.registered(key).await
    }

    /// Which volume a name means: one that is in use, or one that is registered.
    pub(super) async fn volume_of(&self, key: &MountKey) -> Result<Option<VolumeKey>> {
        if let Some(volume) = self.directory.find(key) {
            return Ok(Some(volume));
        }
        if self.registry.is_empty() {
            return Ok(None);
        }
        let record = self.registry.record(VolumeName::of(key)).await?;
        Ok(record.claim(&key.consumer).is_some().then_some(record.volume))
    }

    /// The volumes that this node has claimed, and those that it has attached for a scheduler.
    pub(super) async fn claimed_here(&self, plugin: Option<&str>) -> Result<Vec<Record>> {
        let mut found = Vec::new();
        // AttachVolume's attachments are no node's of csid's.
        for node in [self.node.clone(), String::new()] {
            let (plugin, node) = (plugin.map(str::to_owned), Some(node));
            let filter = RecordFilter { plugin, node, ..RecordFilter::default() };
            found.extend(self.registry.records(filter).await?.0);
        }
        Ok(found)
    }

    /// A volume that is given with the call must be nobody's in the registry, but for what is attached of it by this name.
    pub(super) async fn refuse_registered(&self, name: &VolumeName, volume: &VolumeKey) -> Result<()> {
        if self.registry.is_empty() {
            return Ok(());
        }
        let own = self.registry.record(name.clone()).await?;
        if own.registration.is_some() {
            let text = format!("{name} is registered: leave out plugin and external-id");
            return Err(Error::new(Kind::AlreadyExists, text));
        }
        if own.volume != *volume {
            words::refuse_attached(&own)?;
        }
        let filter = RecordFilter {
            plugin: Some(volume.plugin.clone()),
            external_id: Some(volume.external_id.clone()),
            ..RecordFilter::default()
        };
        match self.registry.records(filter).await?.0.into_iter().find(|record| record.name != *name) {
            Some(record) => {
                let known = if record.registration.is_some() { "registered" } else { "attached" };
                let text = format!(
                    "external id `{}` of plugin {} is {known} as {}: ask for it by that name",
                    volume.external_id, volume.plugin, record.name
                );
                Err(Error::new(Kind::AlreadyExists, text))
            }
            None => Ok(()),
        }
    }

    /// The same for a call, which may go on with the deletion of what was given with an earlier one.
    pub(super) async fn refuse_given(&self, own: &Record, volume: &VolumeKey, call: &Call) -> Result<()> {
        match *call == Call::Delete && own.volume == *volume && is_being_deleted(own) {
            true => Ok(()),
            false => self.refuse_registered(&own.name, volume).await,
        }
    }

    pub(super) async fn mount_inline(
        &self,
        key: &MountKey,
        volume: VolumeKey,
        options: MountOptions,
    ) -> Result<MountOf> {
        self.refuse_registered(&VolumeName::of(key), &volume).await?;
        Ok(MountOf { volume, spec: options.spec(None)?, claim: None })
    }

    pub(super) async fn mount_registered(
        self: &Arc<Self>,
        key: &MountKey,
        uid: u32,
        options: MountOptions,
        secrets_given: bool,
        deadline: Option<Instant>,
    ) -> Result<MountOf> {
        let record = self.to_be_used(key, deadline).await?;
        let wanted = Wanted { access_mode: options.access_mode, attachment_mode: options.attachment_mode };
        let mode = if options.read_only { ClaimMode::Read } else { ClaimMode::Write };
        if let Some(bound) = &options.bound {
            self.refuse_ended(bound, uid).await?;
        }
        let usage = match record.claim(&key.consumer) {
            Some(present) if present.usage.mode == ClaimMode::Read && mode == ClaimMode::Write => {
                let text =
                    format!("{} has claimed {} to read: mount it read-only", key.consumer, record.name);
                return Err(Error::new(Kind::ClaimConflict, text));
            }
            Some(present) => {
                wanted.refuse_unlike(present, &record.name)?;
                present.usage
            }
            None => Use { mode, capability: wanted.choose(&record)? },
        };
        // One of its own also where one is present, which may be gone when it is this one's turn.
        let (credential, bound) = (options.credential.clone(), options.bound.clone());
        let claim =
            Claim { by_mount: true, bound, credential, ..new_claim(&key.consumer, &self.node, uid, usage) };
        let registration = record.registration.as_ref().ok_or_else(|| say::not_registered(key))?;
        if let Some(option) = options.other_than(&registration.spec)
            && uid != 0
            && uid != registration.uid
        {
            return Err(words::as_registered(&record.name, option, registration.uid));
        }
        let mut spec = options.spec(Some((claim.usage.capability, &registration.spec)))?;
        if spec.credential.is_none() && !secrets_given {
            spec.credential.clone_from(&registration.spec.credential);
        }
        Ok(MountOf { volume: record.volume, spec, claim: Some(Box::new(claim)) })
    }

    pub(super) fn view(&self, record: Record, past: Vec<String>) -> VolumeView {
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

fn busy(name: &VolumeName, why: &str) -> Error {
    Error::new(Kind::Busy, format!("{name} {why}"))
}

pub(super) fn new_claim(consumer: &str, node: &str, uid: u32, usage: Use) -> Claim {
    Claim {
        consumer: consumer.to_owned(),
        node: node.to_owned(),
        uid,
        usage,
        state: ClaimState::Pending,
        kept: false,
        releasing: false,
        parked: String::new(),
        by_mount: false,
        bound: None,
        credential: None,
        secrets_given: false,
        error: String::new(),
        since_usec: 0,
        modify_index: 0,
    }
}

/// The modes that are asked for, as far as they are.
struct Wanted {
    access_mode: Option<AccessMode>,
    attachment_mode: Option<AttachmentMode>,
}

impl Wanted {
    fn fits(&self, capability: Capability) -> bool {
        self.access_mode.is_none_or(|mode| mode == capability.access_mode)
            && self.attachment_mode.is_none_or(|mode| mode == capability.attachment_mode)
    }

    fn refuse_unlike(&self, present: &Claim, name: &VolumeName) -> Result<()> {
        match self.fits(present.usage.capability) {
            true => Ok(()),
            false => {
                let text =
                    format!("{} has claimed {name} with other modes; release that first", present.consumer);
                Err(Error::new(Kind::AlreadyExists, text))
            }
        }
    }

    /// As the volume is used already, else the first of its capabilities that fits.
    fn choose(&self, record: &Record) -> Result<Capability> {
        let capabilities =
            record.registration.iter().flat_map(|registration| &registration.spec.capabilities);
        let used = record.claims.iter().map(|claim| &claim.usage.capability);
        used.chain(capabilities).copied().find(|capability| self.fits(*capability)).ok_or_else(|| {
            Error::invalid(format!(
                "{} was not registered with that access mode and attachment mode; `csictl volume show` lists its \
                 capabilities",
                record.name
            ))
        })
    }
}

impl Volumes {
    pub async fn volumes(&self, filter: RecordFilter) -> Result<Vec<VolumeView>> {
        let of_past = ClaimFilter {
            namespace: filter.namespace.clone(),
            volume: filter.volume.clone(),
            past: true,
            ..ClaimFilter::default()
        };
        let mut past: BTreeMap<VolumeName, Vec<String>> = BTreeMap::new();
        for (name, claim) in self.shared.registry.claims(of_past).await?.0.into_iter().rev() {
            past.entry(name).or_default().push(claim.consumer);
        }
        let (records, _) = self.shared.registry.records(filter).await?;
        let mut views = Vec::with_capacity(records.len());
        for record in records.into_iter().filter(|record| record.registration.is_some()) {
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
        let view = self.volumes(filter).await?.pop();
        view.ok_or_else(|| self.shared.not_registered(&name))
    }

    /// Whether the plugin confirms it, and what it says if not; without a capability all that the volume has.
    pub async fn validate_volume(
        &self,
        request: VolumeRequest,
        capability: Option<Capability>,
    ) -> Result<(bool, String)> {
        let capabilities = capability.into_iter().collect();
        match self.call(request, Call::Validate { capabilities }).await? {
            Done::Validated(Ok(())) => Ok((true, String::new())),
            Done::Validated(Err(message)) => Ok((false, message)),
            _ => Err(unanswered()),
        }
    }

    /// The capacity, and whether a node still has to expand it.
    pub async fn expand_volume(
        &self,
        request: VolumeRequest,
        required: u64,
        limit: u64,
        part: Part,
    ) -> Result<(u64, bool)> {
        match self.call(request, Call::Expand { required, limit, part }).await? {
            Done::Expanded(capacity, node_is_due) => Ok((capacity, node_is_due)),
            _ => Err(unanswered()),
        }
    }

    pub async fn create_snapshot(
        &self,
        request: VolumeRequest,
        name: String,
        parameters: BTreeMap<String, String>,
    ) -> Result<Snapshot> {
        match self.call(request, Call::Snapshot { name, parameters }).await? {
            Done::Snapshot(snapshot) => Ok(snapshot),
            _ => Err(unanswered()),
        }
    }

    /// Of a volume that is mounted here.
    pub async fn volume_stats(&self, request: VolumeRequest) -> Result<Stats> {
        match self.call(request, Call::Stats).await? {
            Done::Stats(stats) => Ok(stats),
            _ => Err(unanswered()),
        }
    }

    /// The publish context.
    pub async fn attach_volume(
        &self,
        request: VolumeRequest,
        node_id: String,
        read_only: bool,
        access_mode: Option<AccessMode>,
        attachment_mode: Option<AttachmentMode>,
    ) -> Result<BTreeMap<String, String>> {
        let modes = Wanted { access_mode, attachment_mode };
        let record = match &request.inline {
            None => self.shared.to_be_used(&request.name.key(""), request.wait.deadline).await?,
            Some(inline) => Record {
                registration: Some(new_registration(request.uid, inline.spec.clone(), Origin::Bus)),
                ..Record::none(request.name.clone())
            },
        };
        let (uid, capability) = (request.uid, modes.choose(&record)?);
        let secrets_given = request.secrets.is_some();
        let call = AttachCall { uid, read_only, capability, secrets_given };
        match self.call(request, Call::Attach { node_id, call }).await? {
            Done::Attached(context) => Ok(context),
            _ => Err(unanswered()),
        }
    }

    pub async fn detach_volume(&self, request: VolumeRequest, node_id: String) -> Result<()> {
        if request.inline.is_none() {
            let record = self.shared.registry.record(request.name.clone()).await?;
            // Neither registered nor attached: there is nothing to detach, and no plugin to ask.
            if record.is_empty() {
                return self.shared.synced().await;
            }
        }
        self.call(request, Call::Detach { node_id }).await.map(drop)
    }

    /// Queue a call at its volume's task, and wait for its end.
    pub(super) async fn call(&self, request: VolumeRequest, call: Call) -> Result<Done> {
        let VolumeRequest { name, inline, uid, secrets, credential, wait } = request;
        let record = self.shared.registry.record(name).await?;
        let key = record.name.key("");
        let (volume, registration, is_registered) = match inline {
            Some(Inline { volume, spec }) => {
                self.shared.refuse_given(&record, &volume, &call).await?;
                (volume, new_registration(uid, spec, Origin::Bus), false)
            }
            None => match &record.registration {
                Some(registration) => {
                    call.refuse(&record.name, registration, uid)?;
                    (record.volume.clone(), registration.clone(), true)
                }
                // What was attached inline is known by its name, to whoever detaches it, or looks at what he has mounted.
                None if matches!(call, Call::Detach { .. } | Call::Stats)
                    && !record.attachments.is_empty() =>
                {
                    (record.volume, unregistered(uid), false)
                }
                None => return Err(self.shared.not_registered(&record.name)),
            },
        };
        let call = match call {
            Call::Validate { capabilities } if capabilities.is_empty() => {
                Call::Validate { capabilities: registration.spec.capabilities.clone() }
            }
            call => call,
        };
        // It is never sent: a read costs no unit.
        let credential = credential.filter(|_| !matches!(call, Call::Stats));
        let secrets = self.shared.given(secrets, credential, wait.deadline).await?;
        let target = Box::new(Target { key, uid, registration, is_registered });
        let answer = self.shared.ask(&volume, uid, Work::Call { target, call, secrets }, wait)?;
        self.shared.answered(answer).await
    }

    pub async fn claim(&self, request: ClaimRequest) -> Result<Claimed> {
        let ClaimRequest { name, consumer, uid, secrets, credential, wait, .. } = request;
        let node = self.shared.node.clone();
        if request.node.is_some_and(|asked| asked != node) {
            let text = format!("this csid claims for its own node only, {node}");
            return Err(Error::new(Kind::NotAuthorized, text));
        }
        let key = name.key(&consumer);
        let record = self.shared.to_be_used(&key, wait.deadline).await?;
        let modes = Wanted { access_mode: request.access_mode, attachment_mode: request.attachment_mode };
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
                let reader = claims::reader_only(capability.access_mode);
                let default = if reader { ClaimMode::Read } else { ClaimMode::Write };
                Use { mode: request.mode.unwrap_or(default), capability }
            }
        };
        let claim = Claim { bound: request.bound, credential, ..new_claim(&consumer, &node, uid, usage) };
        let work = Work::Claim { key, claim, wait_until: request.wait_until, secrets };
        let answer = self.shared.ask(&record.volume, uid, work, wait)?;
        let Done::Claimed(record) = self.shared.answered(answer).await? else {
            return Err(Error::internal("a claim was answered without its volume"));
        };
        let state = record.claim(&consumer).map_or(ClaimState::Pending, |claim| claim.state);
        let at = record.attachment(&node);
        let publish_context = at.map(|at| at.publish_context.clone()).unwrap_or_default();
        let external_node_id = match at {
            Some(at) => at.node_id.clone(),
            None => {
                self.shared.plugins.view(&record.volume.plugin).map(|view| view.node_id).unwrap_or_default()
            }
        };
        let volume = self.shared.view(*record, Vec::new());
        Ok(Claimed { volume, publish_context, external_node_id, state })
    }

    pub async fn release(&self, request: ReleaseRequest) -> Result<()> {
        let ReleaseRequest { name, consumer, authority, force, node, secrets, credential, wait } = request;
        self.shared.changeable()?;
        let key = name.key(&consumer);
        let record = self.shared.registry.record(name.clone()).await?;
        let claim = record.claim(&consumer);
        if claim.is_some_and(|claim| node.as_ref().is_some_and(|node| *node != claim.node)) {
            let text = format!("{consumer} has claimed {name} on another node");
            return Err(Error::new(Kind::NotFound, text));
        }
        // One that is being made has no row yet.
        if record.registration.is_none() && claim.is_none() {
            return self.shared.synced().await;
        }
        let (Authority::Own(uid) | Authority::Any(uid)) = authority;
        // Without a row nothing is attached yet.
        let credential = credential.filter(|_| claim.is_some());
        let secrets = self.shared.given(secrets, credential, wait.deadline).await?;
        let work = Work::Release { key, authority, force, secrets };
        let answer = self.shared.ask(&record.volume, uid, work, wait)?;
        self.shared.answered(answer).await.map(drop)
    }

    pub async fn claims(&self, filter: ClaimFilter) -> Result<Vec<(VolumeName, Claim)>> {
        Ok(self.shared.registry.claims(filter).await?.0)
    }

    /// The uid that owns a claim, for the choice of the action to authorise.
    pub async fn claim_owner(&self, name: &VolumeName, consumer: &str) -> Result<Option<u32>> {
        let record = self.shared.registry.record(name.clone()).await?;
        Ok(record.claim(consumer).map(|claim| claim.uid))
    }
}
