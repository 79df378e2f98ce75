//! What a node does when the servers of its cluster are there, or want something.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use tonic::Code;

use crate::error::{Error, Kind, Result};
use crate::fault;
use crate::plugin::Snapshot;
use crate::store::event_kind::EventKind;
use crate::store::registry::{
    Capability, Claim, ClaimFilter, ClaimState, Expansion, ListedClaim, MadeSnapshot, Record, RecordFilter,
    Standing, VolumeName,
};
use crate::store::rows::{JournaledFence, Leg, MountKey, Phase};
use crate::store::{Change, Durability, MountFilter};
use crate::volume::api::requests::{
    Authority, CreateRequest, Force, Part, ReleaseRequest, UnmountRequest, Unmounting, VolumeRequest, Wait,
};
use crate::volume::api::views::VolumeView;
use crate::volume::context::Context;
use crate::volume::errors::claim::ClaimError;
use crate::volume::events::claim as claim_events;
use crate::volume::events::registration as registration_events;
use crate::volume::lifecycle::refuse_nonsense;
use crate::volume::manager::Volumes;
use crate::volume::model::claim::Claims;
use crate::volume::model::subject::{ClaimKey, Subject};
use crate::volume::operation::message::Message;
use crate::volume::operation::request::{ControllerRequest, OperationResponse};
use crate::volume::servers::{HeldVolume, ServerAttach, ServerCreation, ServerSnapshot, Servers};

/// Mounts that a host gives up at the same time, and how long it waits for each.
const LEFT_TOGETHER: usize = 16;
const LEAVING: Duration = Duration::from_secs(30);

impl Context {
    /// Refuses a call that is not done in a cluster. `what` is the call.
    pub(in crate::volume) fn refuse_in_cluster(&self, what: &str) -> Result<()> {
        match self.records.servers {
            None => Ok(()),
            Some(_) => {
                Err(Error::new(Kind::NotSupported, format!("{what}: no node of a cluster does this yet")))
            }
        }
    }

    /// Refuses the mount of a volume that is not registered, of which the cluster knows nothing. Root may have it, if csid.toml says so.
    pub(in crate::volume) fn refuse_inline(&self, uid: u32) -> Result<()> {
        if self.records.servers.is_none() {
            return Ok(());
        }
        let is_allowed = self.config.borrow().cluster.as_ref().is_some_and(|cluster| cluster.inline);
        match is_allowed && uid == 0 {
            true => Ok(()),
            false => {
                let text = "this host is in a cluster, where volumes that are not registered are refused";
                Err(Error::new(Kind::NotAuthorized, text))
            }
        }
    }
}

/// Returns whether csid has something of the record from a time without servers, or from another cluster.
fn is_own(record: &Record, cluster: &str) -> bool {
    let is_of_another = |claim: &Claim| claim.grant.as_ref().is_some_and(|grant| grant.cluster != cluster);
    let is_alone = |claim: &Claim| claim.call.is_empty() || is_of_another(claim);
    (record.registration.is_some() && record.claims.is_empty())
        || record.claims.iter().any(is_alone)
        // The servers attach for claims that they have granted.
        || record.attachments.iter().any(|at| at.by_call.is_some() || record.claims.is_empty())
}

/// The most volumes that a refusal names.
const SHOWN: usize = 8;

/// Returns whether a record is a registration alone.
fn is_movable(record: &Record) -> bool {
    let standing = record.registration.as_ref().map(|registration| &registration.standing);
    standing == Some(&Standing::Registered) && record.claims.is_empty() && record.attachments.is_empty()
}

/// Refuses a call of a user, and one with secrets of its own. The servers know this host as the owner, and take no secrets.
fn refuse_at_servers(uid: u32, has_secrets: bool) -> Result<()> {
    match () {
        () if uid != 0 => {
            let text = "in a cluster root alone changes, validates and attaches volumes on a host";
            Err(Error::new(Kind::NotAuthorized, text))
        }
        () if has_secrets => {
            let text =
                "secrets and credential: a volume of the servers has the credential of its registration";
            Err(Error::new(Kind::NotSupported, text))
        }
        () => Ok(()),
    }
}

/// What has become of a node's part of an expansion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AskedExpansion {
    /// This node has no claim of the volume, and so no part.
    NotHere,
    Done,
    /// The volume is not mounted here, or the plugin has refused the same.
    Later,
}

/// An expansion that the plugin has refused on this node, and the mounts that the volume had then. It is not asked for again until one of
/// these changes (CSI rule 36).
#[derive(Debug, PartialEq, Eq)]
pub struct RefusedExpansion {
    asked: Expansion,
    mounts: Vec<MountKey>,
}

impl Volumes {
    /// Returns the volumes that csid has registered, claimed or attached without servers, and those that it has mounted although no server
    /// may know them.
    pub async fn own_volumes(&self) -> Result<BTreeSet<VolumeName>> {
        let (records, _) = self.shared.records.registry.records(RecordFilter::default()).await?;
        let cluster =
            self.shared.records.servers.as_ref().map(|servers| servers.cluster()).unwrap_or_default();
        let own = records.into_iter().filter(|record| is_own(record, cluster));
        let mut own: BTreeSet<_> = own.map(|record| record.name).collect();
        if self.shared.refuse_inline(0).is_err() {
            let mounts = self.shared.store.mounts(MountFilter::default()).await?;
            let inline = mounts.iter().filter(|(row, _)| !row.spec.registered);
            own.extend(inline.map(|(row, _)| VolumeName::of(&row.key)));
        }
        Ok(own)
    }

    /// Returns whether csid has no mount and no claim of the servers' volumes. Claims whose end the servers have yet to learn do not count.
    pub async fn has_nothing_of_servers(&self) -> Result<bool> {
        let mounts = self.shared.store.mounts(MountFilter::default()).await?;
        if mounts.iter().any(|(row, _)| row.spec.registered) {
            return Ok(false);
        }
        Ok(self
            .own_claims()
            .await?
            .0
            .iter()
            .all(|listed| listed.claim.state == ClaimState::ControllerDetached))
    }

    /// Keeps in the journal that the servers have fenced this node. `None`: they have not.
    pub async fn keep_fence(&self, fence: Option<JournaledFence>) -> Result<()> {
        let change = fence.map_or(Change::DeleteFence, Change::PutFence);
        Ok(self.shared.store.commit(vec![change], Durability::Disk).await?)
    }

    /// Unmounts the servers' volumes, and releases their claims. A mount that is in use stays, and so does its claim. A mount whose server is
    /// dead is detached. Returns the first failure after all were tried.
    pub async fn leave_servers(&self) -> Result<()> {
        self.shared.changeable()?;
        let (claims, _) = self.own_claims().await?;
        let held = claims.into_iter().filter(|of| of.claim.state != ClaimState::ControllerDetached);
        let mut ended = futures_util::stream::iter(held)
            .map(|of| self.leave(of.name, of.claim))
            .buffer_unordered(LEFT_TOGETHER);
        let mut failed = None;
        while let Some(left) = ended.next().await {
            failed = failed.or(left.err());
        }
        failed.map_or(Ok(()), Err)
    }

    /// Unmounts all mounts of a consumer, and releases this claim. Does nothing when the host is fenced no more.
    async fn leave(&self, name: VolumeName, claim: Claim) -> Result<()> {
        if self.shared.records.servers.as_ref().is_none_or(|servers| servers.fence().is_none()) {
            return Ok(());
        }
        let Claim { consumer, id, .. } = claim;
        let wait = || Wait { deadline: Some(Instant::now() + LEAVING), ..Wait::default() };
        let VolumeName { namespace, volume } = name.clone();
        let unmount = UnmountRequest {
            key: MountKey { namespace, volume, consumer: consumer.clone(), tag: String::new() },
            authority: Authority::Any(0),
            all_tags: true,
            how: Unmounting { force: Force::Dead, once: true, ..Unmounting::default() },
            uncovered: None,
            wait: wait(),
        };
        self.unmount(unmount).await?;
        // A claim without a name is being taken.
        let id = Some(id).filter(|id| !id.is_empty());
        match self.release(released(name, consumer, id, wait())).await {
            // The servers cannot be asked. The claim is released here.
            Err(error) if error.kind == Kind::Unavailable => Ok(()),
            released => released,
        }
    }

    /// Returns this node's claims in the journal, and the index at which they were.
    pub(in crate::volume) async fn own_claims(&self) -> Result<(Vec<ListedClaim>, u64)> {
        let filter = ClaimFilter { node: Some(self.shared.records.node.clone()), ..ClaimFilter::default() };
        Ok(self.shared.records.registry.claims(filter).await?)
    }

    /// Returns the claims that the servers have granted, by this journal.
    pub async fn granted(&self) -> Result<Vec<(VolumeName, Claim)>> {
        let (claims, _) = self.own_claims().await?;
        let granted = claims.into_iter().filter(|listed| Claims::is_held(&listed.claim));
        Ok(granted.map(|listed| (listed.name, listed.claim)).collect())
    }

    /// Returns the claims by which this node may have volumes in use, with their volumes and with what the servers have attached for them.
    pub async fn held_of_servers(&self) -> Result<Vec<HeldVolume>> {
        let (claims, _) = self.own_claims().await?;
        let mut held = Vec::new();
        let in_use = claims.into_iter().filter(|listed| Claims::is_in_use(&listed.claim));
        for ListedClaim { name, claim, .. } in in_use {
            let record = self.shared.records.registry.record(name.clone()).await?;
            let attachment = record.attachment(&claim.node).cloned();
            let credential = record.registration.and_then(|of| of.spec.credential);
            held.push(HeldVolume { name, volume: record.volume, claim, attachment, credential });
        }
        Ok(held)
    }

    /// Returns the greatest generation of this host's cluster, and the greatest revision of that generation, at which a server has granted one of
    /// the claims that the node has still. 0: there is none.
    pub async fn seen_of_servers(&self) -> Result<(u64, u64)> {
        let cluster = self.shared.records.servers.as_ref().map(|servers| servers.cluster());
        let (claims, _) = self.own_claims().await?;
        let grants = claims.iter().filter_map(|listed| listed.claim.grant.as_ref());
        let of_cluster =
            grants.filter(|grant| Claims::was_granted(grant) && Some(grant.cluster.as_str()) == cluster);
        Ok(of_cluster.map(|grant| (grant.generation, grant.revision)).max().unwrap_or_default())
    }

    /// Forgets in which generation and at which revision servers have granted the claims of this node. The claims stay.
    pub async fn forget_seen(&self) -> Result<()> {
        self.shared.changeable()?;
        let node = &self.shared.records.node;
        let (claims, _) = self.own_claims().await?;
        let names: BTreeSet<VolumeName> = claims.into_iter().map(|listed| listed.name).collect();
        for name in names {
            let forget = |record: &mut Record| {
                let own: Vec<String> = record
                    .claims
                    .iter()
                    .filter(|claim| claim.node == *node)
                    .map(|claim| claim.consumer.clone())
                    .collect();
                for consumer in own {
                    if let Some(grant) =
                        record.claims.get_mut(&consumer).and_then(|claim| claim.grant.as_mut())
                    {
                        (grant.generation, grant.revision) = (0, 0);
                    }
                }
                Ok(None)
            };
            self.shared.records.amend(&name, Durability::Disk, forget).await?;
        }
        Ok(())
    }

    /// Notes that the servers have ended a claim. Its mounts stay. Returns `false` if the journal has no such claim any more.
    pub async fn lose_claim(&self, name: &VolumeName, claim: &Claim) -> Result<bool> {
        self.shared.changeable()?;
        let mut is_lost = false;
        let lose = |record: &mut Record| {
            let plugin = record.volume.plugin.clone();
            let held = record.claims.get_mut(&claim.consumer).filter(|held| held.id == claim.id);
            let lost = held.and_then(|held| Claims::lose_grant(held).then(|| held.clone()));
            is_lost = lost.is_some();
            Ok(lost.map(|held| claim_events::gone(name, &plugin, &held)))
        };
        self.shared.records.amend(name, Durability::Disk, lose).await?;
        Ok(is_lost)
    }

    /// Moves this host's own registrations to the servers, one after the other. A server has each before csid forgets it. The same
    /// call again goes on where an earlier one was interrupted.
    pub async fn import(&self) -> Result<()> {
        self.shared.changeable()?;
        let records = &self.shared.records;
        let Some(servers) = &records.servers else {
            return Err(Error::new(Kind::NotSupported, "this host has no cluster: csid.toml names none"));
        };
        let mut in_use = self.own_volumes().await?;
        let (mut own, _) = records.registry.records(RecordFilter::default()).await?;
        own.retain(|record| is_movable(record) && in_use.remove(&record.name));
        if !in_use.is_empty() {
            let names: Vec<String> = in_use.iter().take(SHOWN).map(ToString::to_string).collect();
            let text = format!(
                "{} volumes of this host are claimed, attached, mounted, being created or being deleted: {}",
                in_use.len(),
                names.join(", ")
            );
            return Err(Error::new(Kind::Busy, text));
        }
        for Record { name, volume, registration, .. } in own {
            let Some(registration) = registration else { continue };
            let sent = servers.register_before_join(name.clone(), volume.clone(), registration.spec.clone());
            fault::around("Register", sent).await.map_err(|error| Error {
                message: format!("volume {name} was not moved: {}", error.message),
                ..error
            })?;
            let forget = |present: &mut Record| {
                let is_sent = present.volume == volume
                    && present.registration.as_ref().is_some_and(|now| now.spec == registration.spec);
                match &present.registration {
                    None => Ok(None),
                    Some(_) if is_sent && is_movable(present) => {
                        present.registration = None;
                        Ok(Some(registration_events::registered(EventKind::VolumeDeregistered, present)))
                    }
                    Some(_) => {
                        Err(Error::new(Kind::Busy, format!("volume {name} was changed while it was moved")))
                    }
                }
            };
            records.amend(&name, Durability::Disk, forget).await?;
        }
        records.synced().await
    }

    /// Has the servers create a volume. A controller's host calls the plugin, which need not run here.
    pub(in crate::volume) async fn create_at_servers(
        &self,
        servers: &dyn Servers,
        request: CreateRequest,
    ) -> Result<VolumeView> {
        let CreateRequest { name, plugin, spec, capacity_min, capacity_max, register, uid, secrets, wait } =
            request;
        self.shared.changeable()?;
        refuse_nonsense(&spec)?;
        if !register {
            let text = "register: the servers of a cluster keep each volume they create";
            return Err(Error::new(Kind::NotSupported, text));
        }
        refuse_at_servers(uid, secrets.is_some())?;
        let until = self.give_up_at(&wait);
        let creation = ServerCreation { plugin, spec, capacity_min, capacity_max };
        let record = servers.create(name, creation, until).await?;
        Ok(self.shared.view(record, Vec::new()))
    }

    /// Has the servers delete a volume.
    pub(in crate::volume) async fn delete_at_servers(
        &self,
        servers: &dyn Servers,
        request: VolumeRequest,
    ) -> Result<()> {
        let VolumeRequest { name, uid, secrets, credential, wait, .. } = request;
        refuse_at_servers(uid, secrets.is_some() || credential.is_some())?;
        servers.delete(name, self.give_up_at(&wait)).await
    }

    /// Has the servers end a registration of this host's. `by_force`: although the volume is claimed, being created or being deleted.
    pub(in crate::volume) async fn deregister_at_servers(
        &self,
        servers: &dyn Servers,
        request: VolumeRequest,
        by_force: bool,
    ) -> Result<()> {
        let VolumeRequest { name, uid, secrets, credential, wait, .. } = request;
        if by_force {
            let text =
                "force and forget: the servers of a cluster deregister only a volume that nothing uses";
            return Err(Error::new(Kind::NotSupported, text));
        }
        refuse_at_servers(uid, secrets.is_some() || credential.is_some())?;
        servers.deregister(name, self.give_up_at(&wait)).await
    }

    /// Has the servers expand a volume, then expands it here where it is mounted and the plugin wants that. Returns the capacity, and
    /// whether a node still has to expand it.
    pub(in crate::volume) async fn expand_at_servers(
        &self,
        servers: &dyn Servers,
        request: VolumeRequest,
        bounds: (u64, u64),
        part: Part,
    ) -> Result<(Option<u64>, bool)> {
        let VolumeRequest { name, inline, uid, secrets, credential, wait } = request;
        if inline.is_some() {
            self.shared.refuse_in_cluster("ExpandVolume of a volume that is not registered")?;
        }
        refuse_at_servers(uid, secrets.is_some() || credential.is_some())?;
        self.shared.changeable()?;
        let record = servers.expand(name.clone(), bounds, self.give_up_at(&wait)).await?;
        let here = self.note_capacity(&record).await?;
        let registration = record.registration.as_ref();
        let capacity = registration.and_then(|of| of.capacity);
        let Some(due) = registration.and_then(|of| of.pending_expansion) else {
            return Ok((capacity, false));
        };
        if part == Part::Controller || here.registration.is_none() {
            return Ok((capacity, true));
        }
        let (required, limit, part) = (due.required, due.limit, Part::Node);
        let (secrets, credential) = (None, None);
        let request = VolumeRequest { name, inline, uid, secrets, credential, wait };
        match self.call(request, ControllerRequest::Expand { required, limit, part }).await? {
            OperationResponse::Expanded(of_node, is_due) => {
                servers.has_expanded();
                Ok((of_node.max(capacity), is_due))
            }
            _ => Err(Error::internal("an expansion was answered with another's answer")),
        }
    }

    /// Notes the capacity to which the servers have expanded a volume, if this host has claimed it. Returns what the journal has of the volume.
    async fn note_capacity(&self, of_servers: &Record) -> Result<Record> {
        let capacity = of_servers.registration.as_ref().and_then(|of| of.capacity);
        let note = |record: &mut Record| {
            let is_it = record.volume == of_servers.volume;
            let Some(registration) =
                record.registration.as_mut().filter(|of| is_it && of.capacity < capacity)
            else {
                return Ok(None);
            };
            registration.capacity = capacity;
            Ok(Some(registration_events::registered(EventKind::VolumeExpanded, record)))
        };
        self.shared.records.amend(&of_servers.name, Durability::Disk, note).await
    }

    /// Returns whether a plugin here can be asked about a volume: the journal has the volume, and the plugin has a controller.
    pub(in crate::volume) async fn is_asked_here(&self, name: &VolumeName) -> Result<bool> {
        let record = self.shared.records.registry.record(name.clone()).await?;
        Ok(record.registration.is_some() && self.shared.plugins.has_roots_controller(&record.volume.plugin))
    }

    /// Has the servers ask a volume's plugin whether it confirms these capabilities.
    pub(in crate::volume) async fn validate_at_servers(
        &self,
        servers: &dyn Servers,
        request: VolumeRequest,
        capabilities: Vec<Capability>,
    ) -> Result<(bool, String)> {
        let VolumeRequest { name, uid, secrets, credential, wait, .. } = request;
        refuse_at_servers(uid, secrets.is_some() || credential.is_some())?;
        let asked = servers.validate(name.clone(), capabilities);
        let asked = tokio::time::timeout_at(self.give_up_at(&wait).into(), asked).await;
        let late = |_| Error::new(Kind::TimedOut, format!("no server has answered about {name} in time"));
        Ok(match asked.map_err(late)?? {
            Ok(()) => (true, String::new()),
            Err(message) => (false, message),
        })
    }

    /// Has the servers make a snapshot of a volume.
    pub(in crate::volume) async fn snapshot_at_servers(
        &self,
        servers: &dyn Servers,
        request: VolumeRequest,
        snapshot: ServerSnapshot,
    ) -> Result<Snapshot> {
        let VolumeRequest { name, inline, uid, secrets, credential, wait } = request;
        if inline.is_some() {
            self.shared.refuse_in_cluster("CreateSnapshot of a volume that is not registered")?;
        }
        refuse_at_servers(uid, secrets.is_some() || credential.is_some())?;
        let made = servers.snapshot(name, snapshot, self.give_up_at(&wait)).await?;
        let MadeSnapshot { id, external_id, size, created_usec, ready } = made;
        Ok(Snapshot { id, external_id, size, created_usec, ready })
    }

    /// Has the servers attach a volume to a node, and returns the publish context.
    pub(in crate::volume) async fn attach_at_servers(
        &self,
        servers: &dyn Servers,
        request: VolumeRequest,
        attach: ServerAttach,
    ) -> Result<BTreeMap<String, String>> {
        let VolumeRequest { name, inline, uid, secrets, credential, wait } = request;
        if inline.is_some() {
            self.shared.refuse_in_cluster("AttachVolume of a volume that is not registered")?;
        }
        refuse_at_servers(uid, secrets.is_some() || credential.is_some())?;
        servers.attach(name, attach, self.give_up_at(&wait)).await
    }

    /// Has the servers detach a volume from a node, or forget that it is attached.
    pub(in crate::volume) async fn detach_at_servers(
        &self,
        servers: &dyn Servers,
        request: VolumeRequest,
        node_id: String,
        forget: bool,
    ) -> Result<()> {
        let VolumeRequest { name, inline, uid, secrets, credential, wait } = request;
        if inline.is_some() {
            self.shared.refuse_in_cluster("DetachVolume of a volume that is not registered")?;
        }
        refuse_at_servers(uid, secrets.is_some() || credential.is_some())?;
        self.refuse_mounted(servers, &name, &node_id).await?;
        servers.detach(name, node_id, forget, self.give_up_at(&wait)).await
    }

    /// Refuses while this host has a volume mounted that AttachVolume may have attached to it. An operator may have released the mount's claim.
    async fn refuse_mounted(&self, servers: &dyn Servers, name: &VolumeName, node_id: &str) -> Result<()> {
        let mounts = self.shared.store.mounts(MountFilter::default()).await?;
        if mounts.is_empty() {
            return Ok(());
        }
        let record = match servers.volume(name.clone()).await {
            Err(error) if error.kind == Kind::NotFound => return Ok(()),
            record => record?,
        };
        let own_id = self.shared.plugins.view(&record.volume.plugin).map(|view| view.node_id);
        let is_here = own_id.is_none_or(|own| own.is_empty() || own == node_id);
        let of_volume = mounts.iter().filter(|(row, _)| row.volume == record.volume);
        let holders: Vec<String> = of_volume.map(|(row, _)| row.key.consumer.clone()).collect();
        match is_here && !holders.is_empty() {
            true => Err(ClaimError::StagedHere { name: name.clone(), holders }.into()),
            false => Ok(()),
        }
    }

    /// Does this node's part of an expansion that the servers have asked for. If the volume is not mounted, its next mount does it.
    pub async fn expand_asked(
        &self,
        name: &VolumeName,
        required: u64,
        limit: u64,
        refused: &mut Option<RefusedExpansion>,
    ) -> Result<AskedExpansion> {
        self.shared.changeable()?;
        let asked = Expansion { required, limit, by_controller: true };
        let mut found = AskedExpansion::NotHere;
        let note = |record: &mut Record| {
            let has_claim = record.claims.iter().any(|claim| claim.state != ClaimState::ControllerDetached);
            let Some(registration) = record.registration.as_mut().filter(|_| has_claim) else {
                return Ok(None);
            };
            found = match registration.expanded_here == Some(asked) {
                true => AskedExpansion::Done,
                false => {
                    registration.pending_expansion = Some(asked);
                    AskedExpansion::Later
                }
            };
            Ok(None)
        };
        self.shared.records.amend(name, Durability::Disk, note).await?;
        let filter = MountFilter {
            namespace: Some(name.namespace.clone()),
            volume: Some(name.volume.clone()),
            phase: Some(Phase::Mounted),
            ..MountFilter::default()
        };
        if found != AskedExpansion::Later {
            return Ok(found);
        }
        let mounts: Vec<MountKey> =
            self.shared.store.mounts(filter).await?.into_iter().map(|(row, _)| row.key).collect();
        let now = RefusedExpansion { asked, mounts };
        if now.mounts.is_empty() || refused.as_ref() == Some(&now) {
            return Ok(found);
        }
        let (inline, secrets, credential, wait) = Default::default();
        let request = VolumeRequest { name: name.clone(), inline, uid: 0, secrets, credential, wait };
        let expanded =
            self.call(request, ControllerRequest::Expand { required, limit, part: Part::Node }).await;
        // A refused caller may have better secrets next time.
        let is_of_caller =
            |code: u32| [Code::Unauthenticated, Code::PermissionDenied].iter().any(|of| *of as u32 == code);
        let is_refused = |error: &Error| {
            !error.details.retryable && error.details.grpc_code.is_some_and(|code| !is_of_caller(code))
        };
        *refused = expanded.as_ref().is_err_and(is_refused).then_some(now);
        match expanded? {
            OperationResponse::Expanded(_, false) => Ok(AskedExpansion::Done),
            OperationResponse::Expanded(_, true) => Ok(AskedExpansion::Later),
            _ => Err(Error::internal("an expansion was answered with another's answer")),
        }
    }

    /// Returns when a call to the servers is given up: at the caller's deadline, and not later than csid gives up an operation.
    fn give_up_at(&self, wait: &Wait) -> Instant {
        let latest = Instant::now() + self.shared.config.borrow().deadlines.operation;
        wait.deadline.map_or(latest, |deadline| deadline.min(latest))
    }

    /// Has unfinished work continued at once: a server can be asked again.
    pub fn servers_are_back(&self) {
        self.shared.directory.tell_all(|| Message::Wake);
    }

    /// Returns the volume and consumer of each claim whose end the servers have yet to learn, and the index at which they were.
    pub async fn owed(&self) -> Result<(Vec<(VolumeName, String)>, u64)> {
        let (claims, index) = self.own_claims().await?;
        let is_owed = |listed: &ListedClaim| listed.claim.state == ClaimState::ControllerDetached;
        let owed = claims.into_iter().filter(is_owed);
        Ok((owed.map(|listed| (listed.name, listed.claim.consumer)).collect(), index))
    }

    /// Returns whether the journal has no claim of the consumer. The end of this very claim, if it is owed already, is reported again.
    pub async fn lacks_claim(&self, name: &VolumeName, claim: &Claim) -> Result<bool> {
        let record = self.shared.records.registry.record(name.clone()).await?;
        let Some(held) = record.claim(&claim.consumer) else { return Ok(true) };
        if held.id == claim.id && held.state == ClaimState::ControllerDetached {
            self.report_end(&record, held);
        }
        Ok(false)
    }

    /// Has the volume's queue report the end of a claim to the servers.
    fn report_end(&self, record: &Record, claim: &Claim) {
        let subject = Subject::Claim(ClaimKey::new(&record.name, &claim.consumer));
        self.shared.directory.go_on(&record.volume, subject, claim.uid);
    }

    /// Writes a claim that the servers have and the journal lacks, as one whose end the servers have yet to learn. `volume` is the
    /// servers' record of the volume. Returns `false` if the journal has a claim of the consumer.
    pub async fn end_unheld(&self, volume: &Record, claim: Claim) -> Result<bool> {
        // A damaged journal may lack the row of a claim whose volume is mounted.
        self.shared.changeable()?;
        let mut is_new = false;
        let put = |record: &mut Record| {
            is_new = record.claim(&claim.consumer).is_none()
                && (record.registration.is_none() || record.volume == volume.volume);
            if is_new {
                if record.registration.is_none() {
                    record.volume = volume.volume.clone();
                    record.registration.clone_from(&volume.registration);
                }
                record.claims.insert(claim.clone());
            }
            Ok(None)
        };
        let record = self.shared.records.amend(&volume.name, Durability::Disk, put).await?;
        if is_new {
            self.report_end(&record, &claim);
        }
        Ok(is_new)
    }

    /// Returns whether the servers' volume of this name is or may be mounted here, whatever claims the journal has.
    pub async fn may_be_mounted(&self, name: &VolumeName) -> Result<bool> {
        let filter = MountFilter {
            namespace: Some(name.namespace.clone()),
            volume: Some(name.volume.clone()),
            ..MountFilter::default()
        };
        let mounts = self.shared.store.mounts(filter).await?;
        Ok(mounts.iter().any(|(row, _)| row.spec.registered && (row.kept || row.publish != Leg::Absent)))
    }

    /// Releases a claim that the servers want back, as its owner would. Returns `false` if this node has no claim of that name, and is
    /// not asking for one.
    pub async fn release_asked(&self, name: VolumeName, consumer: String, claim: &str) -> Result<bool> {
        // A damaged journal may lack the row of a claim whose volume is mounted.
        self.shared.changeable()?;
        let record = self.shared.records.registry.record(name.clone()).await?;
        match record.claim(&consumer) {
            None => return Ok(false),
            // The server's answer to a call under way has the name.
            Some(held) if held.id.is_empty() => {
                return Err(Error::new(Kind::Busy, "the claim is being taken"));
            }
            Some(held) if held.id != claim => return Ok(false),
            Some(_) => {}
        }
        let release = released(name, consumer, Some(claim.to_owned()), Wait::default());
        self.release(release).await.map(|()| true)
    }
}

/// Makes the request by which csid itself releases a claim. `id`: the claim that is meant. `None`: any of the consumer.
fn released(name: VolumeName, consumer: String, id: Option<String>, wait: Wait) -> ReleaseRequest {
    ReleaseRequest {
        name,
        consumer,
        authority: Authority::Any(0),
        force: false,
        node: None,
        secrets: None,
        credential: None,
        id,
        wait,
    }
}
