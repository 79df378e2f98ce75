//! Takes, binds and releases claims. `claim::step` decides each step. The step is written to the registry and performed, and its
//! outcome is the next event. All of this runs in the actor of the volume, so no controller call overlaps a node call (CSI rule
//! 18).

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::OwnedMutexGuard;

use crate::backoff::Backoff;
use crate::error::{Error, Kind, Result, Step};
use crate::fault;
use crate::names;
use crate::plugin::ATTACHES;
use crate::store::Durability;
use crate::store::registry::{
    Attachment, Bound, Claim, ClaimState, Conflict, Record, Registration, RegistryError, Swap, VolumeName,
};
use crate::store::rows::Leg;
use crate::volume::api::requests::Authority;
use crate::volume::control::claim_effects::{ClaimEffectFailure, Facts};
use crate::volume::control::engine::Engine;
use crate::volume::control::records::UsableVolume;
use crate::volume::errors::claim::ClaimError;
use crate::volume::errors::operation::OperationError;
use crate::volume::errors::volume::VolumeError;
use crate::volume::events::claim as claim_events;
use crate::volume::lifecycle::{enter_attach_secrets, past};
use crate::volume::model::claim;
use crate::volume::model::claim::{
    ClaimAction, ClaimEffect, ClaimEvent, ClaimNext, ClaimOutcome, ClaimRefusal, Claims,
};
use crate::volume::model::subject::{ClaimKey, Subject};
use crate::volume::operation::request::ServersAnswer;
use crate::volume::operation::running::Unfinished;
use crate::volume::operation::table::now_usec;
use crate::volume::seam::Site;
use crate::volume::servers::Granted;
use crate::volume::waits::PluginWaits;

/// The number of volumes that a refusal by the volume limit names.
const HOLDERS: usize = 16;

impl<S: Site> Engine<'_, S> {
    /// Returns the record of this actor's volume. Fails if the name has come to mean another volume since the request.
    pub(in crate::volume::control) async fn registered_as_mine(&self, name: &VolumeName) -> Result<Record> {
        let record = self.records.registered(name).await?;
        self.as_mine(record)
    }

    fn as_mine(&self, record: Record) -> Result<Record> {
        match record.volume == *self.site.volume() {
            true => Ok(record),
            false => Err(VolumeError::Replaced { name: record.name.clone() }.into()),
        }
    }

    /// Takes a claim, or finds it taken, and returns the record with it. `ahead` and `answer`: as of `Control::claim`.
    pub(in crate::volume::control) async fn take_claim(
        &mut self,
        name: &VolumeName,
        wanted: &Claim,
        ahead: &[Arc<Claim>],
        answer: Option<Arc<ServersAnswer>>,
    ) -> Result<Record> {
        self.site.operation().step.set(Step::Claim);
        self.records.refuse_here()?;
        let UsableVolume { record, answer } = self.records.usable(name, answer).await?;
        let mut record = self.as_mine(record)?;
        self.answer = answer;
        // A row that waits at the servers for this operation goes on.
        let waits = self.site.operation().queued.contains(&wanted.consumer);
        let waits = |claim: &Claim| waits && claim.state == ClaimState::Pending && !claim.releasing;
        let is_new = record.claim(&wanted.consumer).is_none_or(waits);
        self.brings_secrets = self.brings_secrets(name, wanted, is_new);
        if let Some(present) = record.claim(&wanted.consumer)
            && !waits(present)
            && (is_owed(&record, &wanted.consumer)
                || present.uid == wanted.uid && (present.releasing || present.state != ClaimState::Taken))
        {
            self.leave(&mut record, &wanted.consumer.clone()).await.map_err(unsettled)?;
            // With its last claim a record loses the registration of the servers.
            record = self.registered_as_mine(name).await?;
        }
        let mut admitted = claim::admit(&self.claims_and_ahead(&record, wanted, ahead), wanted);
        if let Err(ClaimRefusal::Conflict { .. }) = admitted {
            self.end_owed(&mut record, wanted).await?;
            admitted = claim::admit(&self.claims_and_ahead(&record, wanted, ahead), wanted);
        }
        admitted.map_err(|refusal| ClaimError::refused(refusal, name, &wanted.consumer))?;
        let counted = match record.claim(&wanted.consumer).is_none() {
            true => {
                let is_used = self.site.has_mounts_of(&ClaimKey::new(name, &wanted.consumer));
                self.site.operation().refuse_before_expansion(name, is_used)?;
                self.refuse_what_cannot_be_here(&record, wanted).await?
            }
            false => None,
        };
        let wanted = Claim {
            secrets_given: self.site.operation().secrets.is_some(),
            since_usec: now_usec(),
            ..wanted.clone()
        };
        let consumer = wanted.consumer.clone();
        let explicit = (!wanted.by_mount).then(|| wanted.clone());
        let next = self.advance(&mut record, ClaimEvent::Claim(wanted), Facts::default()).await?;
        drop(counted);
        let mut walked = self.walk(&mut record, &consumer, next).await;
        if walked.is_ok()
            && record.claim(&consumer).is_some_and(|claim| claim.by_mount)
            && let Some(explicit) = explicit
        {
            // The claim is there, so the call makes it outlive the mount that took it.
            walked = self.advance(&mut record, ClaimEvent::Claim(explicit), Facts::default()).await.map(drop);
        }
        match walked {
            Ok(()) if record.claim(&consumer).is_some() => Ok(record),
            Ok(()) => Err(Error::internal("a claim ended without its claim")),
            Err(error) if record.claim(&consumer).is_some_and(|claim| claim.kept) => Err(error),
            // It waits at the servers. The actor asks for it again, or ends it.
            Err(error) if self.site.operation().step.queued().is_some() => Err(error),
            // No caller has the claim yet, so it is rolled back, even if that takes longer than the call.
            Err(error) => match self.leave_briefly(&mut record, &consumer).await {
                Ok(()) => Err(error),
                Err(_) if is_owed(&record, &consumer) => Err(error),
                Err(undo) => Err(OperationError::UndoneLater { source: error, undo }.into()),
            },
        }
    }

    /// Returns whether a call has secrets for a controller, or the name of a credential that no controller's host loads. A Mount has them for the RPCs of
    /// this host. A claim that is there already may be restored, and keeps the name that it was granted with.
    fn brings_secrets(&mut self, name: &VolumeName, wanted: &Claim, is_new: bool) -> bool {
        let crosses = |of: &String| names::credential_namespace(of) == Some(name.namespace.as_str());
        let keeps_back = || is_new && wanted.credential.as_ref().is_some_and(|of| !crosses(of));
        !wanted.by_mount && (self.site.operation().secrets.is_some() || keeps_back())
    }

    /// Returns the claims of a volume, and those `ahead` of a new one.
    fn claims_and_ahead(&self, record: &Record, wanted: &Claim, ahead: &[Arc<Claim>]) -> Claims {
        let mut claims = self.claims(record);
        if claims.claim(&wanted.consumer).is_none() {
            let others = ahead.iter().filter(|claim| claim.consumer != wanted.consumer);
            claims.ahead.extend(others.cloned());
        }
        claims
    }

    /// Says the ends of this node's claims that alone are in the way of a new one. Fails if the servers do not take an end: it is not known whether the
    /// claim is still in the way. A caller that waits goes on waiting.
    async fn end_owed(&mut self, record: &mut Record, wanted: &Claim) -> Result<()> {
        for owed in owed_in_the_way(record, wanted) {
            match self.leave_briefly(record, &owed).await {
                // With its last claim a record loses the registration of the servers.
                Ok(()) => *record = self.registered_as_mine(&record.name.clone()).await?,
                Err(_) if self.site.operation().waits() => break,
                Err(source) => return Err(unsettled(source)),
            }
        }
        self.site.operation().step.set(Step::Claim);
        Ok(())
    }

    /// Binds an existing claim to the unit or connection of a repeated call, which is otherwise the same. This is the last step
    /// of the call, so a cancelled call has changed nothing.
    pub(in crate::volume::control) async fn rebind_claim(
        &mut self,
        record: &mut Record,
        wanted: &Claim,
    ) -> Result<()> {
        let (consumer, Some(bound)) = (wanted.consumer.clone(), wanted.bound.clone()) else { return Ok(()) };
        if record.claim(&consumer).is_none_or(|present| present.bound.as_ref() == Some(&bound)) {
            return Ok(());
        }
        if !self.site.operation().step.is_decided() {
            self.site.operation().decide()?;
        }
        self.advance(record, ClaimEvent::Bind { consumer, bound }, Facts::default()).await.map(drop)
    }

    /// Releases a claim whose unit or connection has ended, unless it was bound to another one since.
    pub(in crate::volume::control) async fn release_unbound(
        &mut self,
        key: &ClaimKey,
        bound: &Bound,
    ) -> Result<()> {
        self.site.operation().step.set(Step::Release);
        let mut record = self.records.registry.record(key.volume.clone()).await?;
        let consumer = &key.consumer;
        let is_due = record
            .claim(consumer)
            .is_some_and(|claim| claim.bound.as_ref() == Some(bound) && !claim.releasing);
        if !is_due {
            self.site.note_bound(&record);
            return Ok(());
        }
        tracing::info!(volume = %record.name, consumer, "{} has ended: its claim is released", bound.to);
        let unbound = ClaimEvent::Unbound { consumer: consumer.clone() };
        let next = self.advance(&mut record, unbound, Facts::default()).await?;
        self.walk(&mut record, consumer, next).await
    }

    /// Releases a claim, for its owner or by authority. `force` drops the claim as it is. `id`: only if a server gave it this name.
    pub(in crate::volume::control) async fn release_claim(
        &mut self,
        key: &ClaimKey,
        authority: Authority,
        force: bool,
        id: Option<&str>,
    ) -> Result<()> {
        self.site.operation().step.set(Step::Release);
        let mut record = self.records.registry.record(key.volume.clone()).await?;
        let Some(claim) = record.claim(&key.consumer).cloned() else { return self.records.synced().await };
        if id.is_some_and(|id| claim.id != id) {
            // The consumer has another claim of the volume by now.
            return Ok(());
        }
        // Nothing of an owed claim is anybody's. Its uid may not be known.
        let is_anothers = matches!(authority, Authority::Own(uid) if uid != claim.uid);
        if is_anothers && !is_owed(&record, &key.consumer) {
            return Err(ClaimError::NotOwner { claim: key.clone() }.into());
        }
        if force {
            let forget = ClaimEvent::Forget { consumer: claim.consumer };
            return self.advance(&mut record, forget, Facts::default()).await.map(drop);
        }
        // A release cannot be taken back, so the check for use comes first.
        if !claim.releasing {
            self.site.refuse_in_use(key).await?;
        }
        self.leave(&mut record, &key.consumer).await
    }

    /// Releases a claim that a Mount took, once the last mount of its consumer is gone. Does nothing for other claims. A release that cannot be
    /// written is retried without a caller.
    pub(in crate::volume::control) async fn release_implicit(&mut self, key: &ClaimKey) -> Result<()> {
        if self.site.has_mounts_of(key) {
            return Ok(());
        }
        let mut record = self.records.registry.record(key.volume.clone()).await?;
        match record.claim(&key.consumer) {
            // Another Mount of the consumer waits at the servers, and keeps its place there.
            Some(claim)
                if claim.state == ClaimState::Pending
                    && self.site.operation().queued.contains(&key.consumer) =>
            {
                Ok(())
            }
            Some(claim) if claim.by_mount => {
                let uid = claim.uid;
                match Box::pin(self.leave_briefly(&mut record, &key.consumer)).await {
                    Err(_) if is_owed(&record, &key.consumer) => Ok(()),
                    left => {
                        if self.is_left_by_mount(&record, &key.consumer) {
                            let unfinished = Unfinished { uid, parked: false };
                            self.site.set_unfinished(Subject::Claim(key.clone()), Some(unfinished));
                        }
                        left
                    }
                }
            }
            _ => Ok(()),
        }
    }

    /// Retries the release of a claim, or recovers a claim that an earlier csid left between two states.
    pub(in crate::volume::control) async fn retry_claim(&mut self, key: &ClaimKey) -> Result<()> {
        let mut record = self.records.registry.record(key.volume.clone()).await?;
        let waiting = &self.site.operation().queued;
        if waiting.contains(&key.consumer) {
            // An operation waits for it.
            self.site.set_unfinished(Subject::Claim(key.clone()), None);
            return Ok(());
        }
        if waiting.is_empty() {
            let node = self.records.node.clone();
            self.advance(&mut record, ClaimEvent::Recovered { node }, Facts::default()).await?;
        }
        let Some(claim) = record.claim(&key.consumer) else {
            self.site.set_unfinished(Subject::Claim(key.clone()), None);
            return Ok(());
        };
        if claim.releasing
            || claim.state == ClaimState::Pending
            || (claim.by_mount && !self.site.has_mounts_of(key))
        {
            return self.leave(&mut record, &key.consumer).await;
        }
        self.site.set_unfinished(Subject::Claim(key.clone()), None);
        Ok(())
    }

    /// Releases a claim for a caller that does not wait for a server of the cluster.
    async fn leave_briefly(&mut self, record: &mut Record, consumer: &str) -> Result<()> {
        let was_brief = std::mem::replace(&mut self.is_brief, true);
        let left = self.leave(record, consumer).await;
        self.is_brief = was_brief;
        left
    }

    /// Releases a claim completely, or as far as the time allows.
    async fn leave(&mut self, record: &mut Record, consumer: &str) -> Result<()> {
        let consumer = consumer.to_owned();
        let Some(claim) = record.claim(&consumer) else { return Ok(()) };
        if claim.blocked.is_some() {
            self.advance(record, ClaimEvent::Continue { consumer: consumer.clone() }, Facts::default())
                .await?;
        }
        let next = self
            .advance(record, ClaimEvent::Release { consumer: consumer.clone() }, Facts::default())
            .await?;
        self.walk(record, &consumer, next).await
    }

    /// Performs one effect after the other until the claim is taken or free. Returns an error if it stops before that.
    async fn walk(&mut self, record: &mut Record, consumer: &str, mut next: ClaimNext) -> Result<()> {
        let mut delay = Backoff::new();
        let mut why: Option<Error> = None;
        loop {
            let effect = match next {
                ClaimNext::Run(effect) => effect,
                ClaimNext::Unseen => {
                    if let Err(error) = self.see(&record.volume.plugin).await {
                        return Err(why.unwrap_or(error));
                    }
                    let seen = ClaimEvent::Continue { consumer: consumer.to_owned() };
                    next = self.advance(record, seen, Facts::default()).await?;
                    continue;
                }
                ClaimNext::Taken => return Ok(()),
                ClaimNext::Free => return why.map_or(Ok(()), Err),
                ClaimNext::Rest => {
                    return Err(why.unwrap_or_else(|| Error::internal("a claim rests without a reason")));
                }
            };
            let makes = matches!(effect.action, ClaimAction::Attach | ClaimAction::ServerClaim);
            // Other consumers' unmounts wait in the queue of the volume, and need no server. The servers learn later what has ended.
            let reports = effect.action == ClaimAction::ServerDetached;
            let asks = effect.action == ClaimAction::ServerClaim;
            next = match self.perform_claim(record, &effect).await {
                Ok(facts) => {
                    if asks {
                        self.site.operation().step.set_queued(None);
                    }
                    delay = Backoff::new();
                    self.advance(record, ClaimEvent::Ended { effect, outcome: ClaimOutcome::Done }, facts)
                        .await?
                }
                Err(ClaimEffectFailure { outcome, error, unimplemented, queued, replaced }) => {
                    if asks {
                        let holders = queued.then(|| error.details.holders.clone());
                        self.site.operation().step.set_queued(holders);
                        if queued {
                            self.site.operation().step.say(error.message.clone());
                        }
                    }
                    if unimplemented {
                        self.site.ask_what_it_can().await;
                    }
                    let is_later = reports || queued || (asks && outcome == ClaimOutcome::NotSent(None));
                    let lasting = replaced
                        || matches!(outcome, ClaimOutcome::Hopeless(_) | ClaimOutcome::NotSent(Some(_)));
                    let facts = Facts { error: Some(error.message.clone()), ..Facts::default() };
                    let next = self.advance(record, ClaimEvent::Ended { effect, outcome }, facts).await?;
                    let again =
                        next == ClaimNext::Rest && !lasting && !is_later && self.site.pause(&mut delay).await;
                    if self.forgot(record, consumer).await? {
                        return Err(OperationError::Forgotten.into());
                    }
                    if again {
                        let again = ClaimEvent::Continue { consumer: consumer.to_owned() };
                        self.advance(record, again, Facts::default()).await?
                    } else {
                        // The first error stays the reason, whatever the rollback returns.
                        let stopped = self.site.operation().signals.borrow().abandon.filter(|_| makes);
                        why.get_or_insert(
                            stopped.map_or(error, |kind| OperationError::Stopped { kind }.into()),
                        );
                        next
                    }
                }
            };
        }
    }

    /// Returns whether the consumer's claim was forgotten since `record` was read. Reads `record` again.
    async fn forgot(&mut self, record: &mut Record, consumer: &str) -> Result<bool> {
        let now = self.records.registry.record(record.name.clone()).await?;
        let forgot = record.claim(consumer).is_some() && now.claim(consumer).is_none();
        *record = now;
        Ok(forgot)
    }

    /// Takes one step of the record and persists it. Reads the record again if it was changed meanwhile.
    async fn advance(&mut self, record: &mut Record, event: ClaimEvent, facts: Facts) -> Result<ClaimNext> {
        let name = record.name.clone();
        loop {
            let stepped = claim::step(&self.claims(record), event.clone());
            let (stepped, next) = stepped.map_err(|refusal| match &event {
                // The record has changed since the claim was admitted.
                ClaimEvent::Claim(wanted) => ClaimError::refused(refusal, &name, &wanted.consumer),
                _ => ClaimError::InnerEvent { name: name.clone(), refusal },
            })?;
            let mut after =
                Record { claims: stepped.claims, attachments: stepped.attachments, ..record.clone() };
            enter(&mut after, &event, &next, &facts, self.site.operation().secrets.is_some());
            if let ClaimNext::Run(effect) = &next
                && effect.action == ClaimAction::ServerClaim
            {
                self.name_call(&mut after, &effect.consumer);
            }
            if after.claims.is_empty() && after.registration.as_ref().is_some_and(is_of_servers) {
                // The servers keep the registration. This node has nothing of the volume any more.
                after.registration = None;
            }
            if after == *record {
                // An earlier csid may have written this step, so its unfinished claims are noted here.
                self.note_unfinished(record);
                return Ok(next);
            }
            let durability = match (&next, &event) {
                (ClaimNext::Run(effect), _) if effect.action != ClaimAction::NodeDetach => Durability::Disk,
                // A claim that a Mount took is as durable as the mount, whose commit syncs it.
                (ClaimNext::Taken | ClaimNext::Free, event) if !is_by_mount(record, &after, event) => {
                    Durability::Disk
                }
                _ => Durability::Process,
            };
            if takes(record, &after) {
                self.site.operation().decide()?;
            }
            let swap =
                Swap { past: past(record, &after), before: record.clone(), after: after.clone(), durability };
            let events = claim_events::changed(&swap.before, &swap.after, &event);
            match fault::around("claim", self.records.registry.swap(swap, events)).await {
                Ok(revision) => {
                    after.revision = revision;
                    *record = after;
                    self.note_unfinished(record);
                    self.site.note_bound(record);
                    return Ok(next);
                }
                Err(RegistryError::Conflict(Conflict::Stale)) if matches!(event, ClaimEvent::Claim(_)) => {
                    *record = self.registered_as_mine(&name).await?;
                }
                Err(RegistryError::Conflict(Conflict::Stale)) => {
                    *record = self.records.registry.record(record.name.clone()).await?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Names the call that asks the servers for a claim. A call keeps its name within a boot. In a later boot its name would have no place
    /// among those of that boot.
    fn name_call(&self, record: &mut Record, consumer: &str) {
        if let Some(servers) = &self.records.servers
            && let Some(claim) = record.claims.get_mut(consumer)
            && !servers.is_of_boot(&claim.call)
        {
            claim.call = servers.name_call();
        }
    }

    /// Waits until [`Executor::claims`] knows whether the plugin attaches, and if so the accepted node id of this node. Fails if
    /// there is no such node id.
    async fn see(&mut self, plugin: &str) -> Result<()> {
        if !self.site.can(ATTACHES).await? {
            return Ok(());
        }
        match self.site.ready().await?.node_id().is_empty() {
            true => Err(ClaimError::NoNodeId { plugin: plugin.to_owned() }.into()),
            false => self.records.plugins.refuse_other_node_id(plugin),
        }
    }

    /// Returns whether a claim is taken that a Mount took, and its consumer has no mount.
    fn is_left_by_mount(&mut self, record: &Record, consumer: &str) -> bool {
        let is_by_mount = record
            .claim(consumer)
            .is_some_and(|claim| claim.by_mount && claim.state == ClaimState::Taken && !claim.releasing);
        is_by_mount && !self.site.has_mounts_of(&ClaimKey::new(&record.name, consumer))
    }

    fn note_unfinished(&mut self, record: &Record) {
        for subject in self.site.unfinished() {
            let Subject::Claim(key) = &subject else { continue };
            if key.volume == record.name && !self.is_left_by_mount(record, &key.consumer) {
                self.site.set_unfinished(subject, None);
            }
        }
        for claim in record.claims.iter().filter(|claim| claim.releasing && claim.node == self.records.node) {
            let parked = claim.blocked.is_some();
            let unfinished = Unfinished { uid: claim.uid, parked };
            let subject = Subject::Claim(ClaimKey::new(&record.name, &claim.consumer));
            self.site.set_unfinished(subject, Some(unfinished));
        }
    }

    pub(in crate::volume::control) fn claims(&self, record: &Record) -> Claims {
        let registration = record.registration.as_ref();
        let cluster = self.records.servers.as_ref().map(|servers| servers.cluster().to_owned());
        let attaches = if cluster.is_some() {
            Some(false)
        } else {
            self.records.plugins.can(&record.volume.plugin, ATTACHES)
        };
        Claims {
            attaches,
            node_id: Some(self.records.plugins.node_id(&record.volume.plugin)).filter(|id| !id.is_empty()),
            capabilities: registration.map(|of| of.spec.capabilities.clone()).unwrap_or_default(),
            claims: record.claims.clone(),
            ahead: Vec::new(),
            attachments: record.attachments.clone(),
            node: None,
            cluster,
            boot: self.records.boot(),
        }
    }

    /// Refuses a volume that this node cannot reach, or one more than the plugin takes here. While the caller holds the returned
    /// guard, no other claim takes the last place. `None`: the limit does not apply.
    async fn refuse_what_cannot_be_here(
        &mut self,
        record: &Record,
        wanted: &Claim,
    ) -> Result<Option<OwnedMutexGuard<()>>> {
        let plugin = &record.volume.plugin;
        if self.records.plugins.view(plugin).is_none() {
            return Err(VolumeError::UnknownPlugin { plugin: plugin.to_owned() }.into());
        }
        // The volume limit and the topology are unknown until the plugin was probed.
        let ready = self.site.ready().await?;
        let topologies =
            record.registration.as_ref().map(|of| of.spec.topologies.as_slice()).unwrap_or_default();
        let reaches = |segments: &BTreeMap<String, String>| {
            segments.iter().all(|(key, value)| {
                ready.topology().iter().any(|(k, v)| k.eq_ignore_ascii_case(key) && v == value)
            })
        };
        if !topologies.is_empty() && !topologies.iter().any(reaches) {
            return Err(ClaimError::OutOfReach {
                name: record.name.clone(),
                topology: ready.topology().clone(),
            }
            .into());
        }
        let is_here = |claim: &Claim| claim.node == wanted.node;
        if ready.max_volumes() <= 0 || record.claims.iter().any(is_here) {
            return Ok(None);
        }
        let counted = self.records.counting(plugin).lock_owned().await;
        let held = self.records.registry.held(plugin, &wanted.node, HOLDERS).await?;
        if held.count as i64 >= ready.max_volumes() {
            return Err(ClaimError::TooManyVolumes {
                plugin: plugin.clone(),
                most: ready.max_volumes(),
                volumes: held.names,
            }
            .into());
        }
        Ok(Some(counted))
    }
}

/// Enters into the record what no decision depends on: the data of the last effect, and the secrets of the next attach. `given`:
/// the call has secrets.
fn enter(record: &mut Record, event: &ClaimEvent, next: &ClaimNext, facts: &Facts, given: bool) {
    if let ClaimEvent::Ended { effect, .. } = event {
        if record.claim(&effect.consumer).is_some_and(|claim| claim.error != facts.error)
            && let Some(claim) = record.claims.get_mut(&effect.consumer)
        {
            claim.error.clone_from(&facts.error);
        }
        if let Some(granted) = &facts.granted {
            enter_grant(record, effect, granted);
        }
        if let Some(context) = &facts.publish_context
            && let Some(at) = record.attachments.iter_mut().find(|at| at.node == effect.node)
        {
            at.publish_context.clone_from(context);
        }
    }
    if let ClaimNext::Run(effect) = next {
        enter_attach_secrets(record, effect, given);
    }
}

/// Enters what a server of a cluster has granted: the claim's name, the registration, and the attachment that the servers have made.
fn enter_grant(record: &mut Record, effect: &ClaimEffect, granted: &Granted) {
    let Granted { id, record: of_servers, attached, generation, revision } = granted;
    let is_it = record.volume == of_servers.volume;
    let least = record.registration.as_ref().filter(|_| is_it).and_then(|of| of.capacity);
    record.registration.clone_from(&of_servers.registration);
    if let Some(registration) = &mut record.registration {
        // The server's answer may be older than an expansion.
        registration.capacity = registration.capacity.max(least);
    }
    if let Some(claim) = record.claims.get_mut(&effect.consumer) {
        claim.id.clone_from(id);
        if let Some(grant) = &mut claim.grant {
            (grant.generation, grant.revision) = (*generation, *revision);
        }
    }
    record.attachments.retain(|at| at.node != effect.node);
    let boot = record.claim(&effect.consumer).and_then(|claim| claim.grant.as_ref()?.boot.clone());
    record.attachments.extend(attached.as_ref().map(|attached| Attachment {
        node_id: Some(attached.node_id.clone()),
        publish_context: attached.publish_context.clone(),
        boot,
        ..Attachment::new(&effect.node, Leg::Present)
    }));
}

/// Returns whether a registration is a copy of that of a cluster's servers.
fn is_of_servers(registration: &Registration) -> bool {
    !registration.owner.is_empty()
}

/// Returns whether this node has nothing of a claim any more, and the servers have yet to learn it.
fn is_owed(record: &Record, consumer: &str) -> bool {
    let owed = |claim: &Claim| claim.state == ClaimState::ControllerDetached && claim.grant.is_some();
    record.claim(consumer).is_some_and(owed)
}

/// Returns the error of a call that needs the end of an earlier claim.
fn unsettled(source: Error) -> Error {
    match source.kind {
        // Nothing is left here, and the servers do not know it yet.
        Kind::Unavailable => source,
        _ => OperationError::Unsettled { source }.into(),
    }
}

/// Returns the consumers of this node whose claims alone are in the way of a new one, though nothing of them is left here. The servers may know
/// that already, and their answer be lost.
fn owed_in_the_way(record: &Record, wanted: &Claim) -> Vec<String> {
    let consumers = || record.claims.iter().map(|claim| &claim.consumer);
    let is_new = record.claim(&wanted.consumer).is_none();
    if !is_new || !consumers().any(|consumer| is_owed(record, consumer)) {
        return Vec::new();
    }
    let in_the_way = record.claims.iter().filter(|claim| claim::conflict(claim, wanted));
    let (owed, held): (Vec<_>, Vec<_>) =
        in_the_way.map(|claim| claim.consumer.clone()).partition(|consumer| is_owed(record, consumer));
    if held.is_empty() { owed } else { Vec::new() }
}

/// Returns whether the step acknowledges a claim to its consumer. A claim that a Mount takes is acknowledged with the mount.
fn takes(before: &Record, after: &Record) -> bool {
    let taken = |claim: Option<&Claim>| claim.is_some_and(|claim| claim.kept && !claim.by_mount);
    before.claims.differences(&after.claims).into_iter().any(|(had, has)| taken(has) && !taken(had))
}

fn is_by_mount(before: &Record, after: &Record, event: &ClaimEvent) -> bool {
    let consumer = match event {
        ClaimEvent::Claim(claim) => &claim.consumer,
        ClaimEvent::Release { consumer }
        | ClaimEvent::Continue { consumer }
        | ClaimEvent::Bind { consumer, .. }
        | ClaimEvent::Unbound { consumer }
        | ClaimEvent::Detached { consumer }
        | ClaimEvent::Forget { consumer } => consumer,
        ClaimEvent::Ended { effect, .. } => &effect.consumer,
        ClaimEvent::Recovered { .. } => return false,
    };
    after.claim(consumer).or(before.claim(consumer)).is_some_and(|claim| claim.by_mount)
}
