//! A claim's way, driven: `claims::step`, persist, do, feed the outcome back. It runs in the task of the volume, between the
//! mounts, so that no controller call is in flight beside a node call (CSI rule 18).

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};

use tokio::sync::OwnedMutexGuard;

use crate::error::{Error, Result};
use crate::fault;
use crate::plugin::ATTACHES;
use crate::store::Durability;
use crate::store::StoreError;
use crate::store::registry::{
    AttachSecrets, Bound, Claim, ClaimState, Record, RecordFilter, Swap, VolumeName,
};
use crate::store::rows::{MountKey, Phase};
use crate::volume::claim_effects::Failure;
use crate::volume::claims::{self, Action, Claims, Effect, Event, Next, Outcome};
use crate::volume::control::Backoff;
use crate::volume::drive::Drive;
use crate::volume::journalled::Unfinished;
use crate::volume::operations::now_usec;
use crate::volume::{Authority, Shared, claim_words as words, say};

/// What an effect came with, for the row.
#[derive(Clone, Default)]
struct Facts {
    publish_context: Option<BTreeMap<String, String>>,
    error: String,
}

impl Drive<'_> {
    /// The record of this task's volume: since it was asked for, the name may have become another's.
    pub(super) async fn registered_as_mine(&self, key: &MountKey) -> Result<Record> {
        let record = self.shared.registered(key).await?;
        match record.volume == self.rows.volume().row.key {
            true => Ok(record),
            false => Err(words::changed_meanwhile(&record.name)),
        }
    }

    /// Take a claim, or find it taken; the volume with it. `ahead` wait for theirs.
    pub(super) async fn claim(&mut self, key: &MountKey, wanted: &Claim, ahead: &[Claim]) -> Result<Record> {
        self.step.set("claim");
        let mut record = self.registered_as_mine(key).await?;
        if let Some(present) = record.claim(&wanted.consumer)
            && (present.uid == wanted.uid && (present.releasing || present.state != ClaimState::Taken))
        {
            self.leave(&mut record, &wanted.consumer.clone()).await.map_err(say::unsettled)?;
        }
        let mut beside = self.claims(&record);
        let is_new = beside.claim(&wanted.consumer).is_none();
        let before_me = ahead.iter().filter(|claim| claim.consumer != wanted.consumer);
        beside.claims.extend(before_me.filter(|_| is_new).cloned());
        claims::admit(&beside, wanted).map_err(|refusal| words::refusal(refusal, key, wanted))?;
        let counted = match is_new {
            true => {
                self.refuse_before_expansion(key)?;
                self.refuse_what_cannot_be_here(&record, wanted).await?
            }
            false => None,
        };
        let wanted =
            Claim { secrets_given: self.secrets.is_some(), since_usec: now_usec(), ..wanted.clone() };
        let consumer = wanted.consumer.clone();
        let next = self.advance(&mut record, Event::Claim(wanted), Facts::default()).await?;
        drop(counted);
        match self.walk(&mut record, &consumer, next).await {
            Ok(()) if record.claim(&consumer).is_some() => Ok(record),
            Ok(()) => Err(Error::internal("a claim ended without its claim")),
            Err(error) if record.claim(&consumer).is_some_and(|claim| claim.kept) => Err(error),
            // Nobody has it: it is undone, also when that takes longer than the call.
            Err(error) => match self.leave(&mut record, &consumer).await {
                Ok(()) => Err(error),
                Err(undo) => Err(words::undone_later(error, &undo)),
            },
        }
    }

    /// The claim that is there ends with what the repeated call says, which is the same but for its connection. It is the last
    /// step of that call: one that is cancelled has changed nothing.
    pub(super) async fn rebind(&mut self, record: &mut Record, wanted: &Claim) -> Result<()> {
        let (consumer, Some(bound)) = (wanted.consumer.clone(), wanted.bound.clone()) else { return Ok(()) };
        if record.claim(&consumer).is_none_or(|present| present.bound.as_ref() == Some(&bound)) {
            return Ok(());
        }
        if !self.step.is_decided() {
            self.decide()?;
        }
        self.advance(record, Event::Bind { consumer, bound }, Facts::default()).await.map(drop)
    }

    /// What the claim was bound to has ended: it is let go, if it was bound to nothing else since.
    pub(super) async fn unbind(&mut self, key: &MountKey, bound: &Bound) -> Result<()> {
        self.step.set("release");
        let mut record = self.shared.registry.record(VolumeName::of(key)).await?;
        let consumer = &key.consumer;
        let is_due = record
            .claim(consumer)
            .is_some_and(|claim| claim.bound.as_ref() == Some(bound) && !claim.releasing);
        if !is_due {
            self.shared.bound.note(&record, &self.shared.node);
            return Ok(());
        }
        tracing::info!(volume = %record.name, consumer, "{} has ended: its claim is released", bound.to);
        let unbound = Event::Unbound { consumer: consumer.clone() };
        let next = self.advance(&mut record, unbound, Facts::default()).await?;
        self.walk(&mut record, consumer, next).await
    }

    /// Let a claim go, for its owner or by authority; `force`: drop it as it is.
    pub(super) async fn release(&mut self, key: &MountKey, authority: Authority, force: bool) -> Result<()> {
        self.step.set("release");
        let mut record = self.shared.registry.record(VolumeName::of(key)).await?;
        let Some(claim) = record.claim(&key.consumer).cloned() else { return self.shared.synced().await };
        if matches!(authority, Authority::Own(uid) if uid != claim.uid) {
            return Err(say::not_claimant(key));
        }
        if force {
            let forget = Event::Forget { consumer: claim.consumer };
            return self.advance(&mut record, forget, Facts::default()).await.map(drop);
        }
        // Before it is let go, for then there is no way back.
        if !claim.releasing {
            for mount in self.mounts_of(key) {
                if let Some(row) = self.row(&mount).filter(|row| row.phase == Phase::Mounted).cloned() {
                    self.refuse_while_in_use(row, "release").await?;
                }
            }
        }
        self.leave(&mut record, &key.consumer).await
    }

    /// What the consumer's last mount leaves of a claim that a Mount took.
    pub(super) async fn give_back(&mut self, key: &MountKey) -> Result<()> {
        if self.shared.registry.is_empty() || !self.mounts_of(key).is_empty() {
            return Ok(());
        }
        let mut record = self.shared.registry.record(VolumeName::of(key)).await?;
        match record.claim(&key.consumer) {
            Some(claim) if claim.by_mount => self.leave(&mut record, &key.consumer).await,
            _ => Ok(()),
        }
    }

    /// The next try of a claim that is on its way out, or that an earlier csid left between two states.
    pub(super) async fn continue_claim(&mut self, key: &MountKey) -> Result<()> {
        let mut record = self.shared.registry.record(VolumeName::of(key)).await?;
        let node = self.shared.node.clone();
        self.advance(&mut record, Event::Recovered { node }, Facts::default()).await?;
        let Some(claim) = record.claim(&key.consumer) else {
            self.rows.set_unfinished(key.clone(), None);
            return Ok(());
        };
        if claim.releasing || (claim.by_mount && self.mounts_of(key).is_empty()) {
            return self.leave(&mut record, &key.consumer).await;
        }
        self.rows.set_unfinished(key.clone(), None);
        Ok(())
    }

    /// Let a claim go, to the end or as far as its time allows.
    async fn leave(&mut self, record: &mut Record, consumer: &str) -> Result<()> {
        let consumer = consumer.to_owned();
        let Some(claim) = record.claim(&consumer) else { return Ok(()) };
        if !claim.parked.is_empty() {
            self.advance(record, Event::Continue { consumer: consumer.clone() }, Facts::default()).await?;
        }
        let next =
            self.advance(record, Event::Release { consumer: consumer.clone() }, Facts::default()).await?;
        self.walk(record, &consumer, next).await
    }

    /// One effect after the other until the claim is taken or free; an error: it rests before that.
    async fn walk(&mut self, record: &mut Record, consumer: &str, mut next: Next) -> Result<()> {
        let mut delay = Backoff::new();
        let mut why: Option<Error> = None;
        loop {
            let effect = match next {
                Next::Run(effect) => effect,
                Next::Unseen => {
                    if let Err(error) = self.see(&record.volume.plugin).await {
                        return Err(why.unwrap_or(error));
                    }
                    let seen = Event::Continue { consumer: consumer.to_owned() };
                    next = self.advance(record, seen, Facts::default()).await?;
                    continue;
                }
                Next::Taken => return Ok(()),
                Next::Free => return why.map_or(Ok(()), Err),
                Next::Rest => {
                    return Err(why.unwrap_or_else(|| Error::internal("a claim rests without a reason")));
                }
            };
            let makes = effect.action == Action::Attach;
            next = match self.perform_claim(record, &effect).await {
                Ok(context) => {
                    delay = Backoff::new();
                    let facts = Facts { publish_context: context, ..Facts::default() };
                    self.advance(record, Event::Ended { effect, outcome: Outcome::Done }, facts).await?
                }
                Err(Failure { outcome, error }) => {
                    let lasting = matches!(outcome, Outcome::Hopeless(_) | Outcome::NotSent(Some(_)));
                    let facts = Facts { error: error.message.clone(), ..Facts::default() };
                    let next = self.advance(record, Event::Ended { effect, outcome }, facts).await?;
                    let again = next == Next::Rest && !lasting && self.pause(&mut delay, makes).await;
                    if again {
                        let again = Event::Continue { consumer: consumer.to_owned() };
                        self.advance(record, again, Facts::default()).await?
                    } else {
                        // What the way turned back for stays the reason, however its undoing ends.
                        let stopped = self.control.borrow().abandon.filter(|_| makes);
                        why.get_or_insert(stopped.map_or(error, say::stopped));
                        next
                    }
                }
            };
        }
    }

    /// One step of the record, persisted; a record that was changed meanwhile is read again.
    async fn advance(&mut self, record: &mut Record, event: Event, facts: Facts) -> Result<Next> {
        let key = record.name.key("");
        loop {
            let stepped = claims::step(&self.claims(record), event.clone());
            let (stepped, next) = stepped.map_err(|refusal| match &event {
                // What has changed since it was looked at.
                Event::Claim(wanted) => words::refusal(refusal, &key, wanted),
                _ => words::inner(refusal, &key),
            })?;
            let mut after =
                Record { claims: stepped.claims, attachments: stepped.attachments, ..record.clone() };
            enter(&mut after, &event, &next, &facts, self.secrets.is_some());
            if after == *record {
                // An earlier csid may have written it: what is left of it is this one's to finish.
                self.note_unfinished(record);
                return Ok(next);
            }
            let durability = match (&next, &event) {
                (Next::Run(effect), _) if effect.action != Action::NodeDetach => Durability::Disk,
                // One that a Mount took is as durable as its mount, whose commit syncs it.
                (Next::Taken | Next::Free, event) if !is_by_mount(record, &after, event) => Durability::Disk,
                _ => Durability::Process,
            };
            if takes(record, &after) {
                self.decide()?;
            }
            let swap = Swap {
                past: words::past(record, &after),
                events: words::events(record, &after, &event),
                before: record.clone(),
                after: after.clone(),
                durability,
            };
            match fault::around("claim", self.shared.registry.swap(swap)).await {
                Ok(revision) => {
                    after.revision = revision;
                    *record = after;
                    self.note_unfinished(record);
                    self.shared.bound.note(record, &self.shared.node);
                    return Ok(next);
                }
                Err(StoreError::Stale) if matches!(event, Event::Claim(_)) => {
                    *record = self.registered_as_mine(&key).await?;
                }
                Err(StoreError::Stale) => *record = self.shared.registry.record(record.name.clone()).await?,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// What is made is its callers' from here on (`Step::decide`), unless all of them have left.
    pub(super) fn decide(&self) -> Result<()> {
        match self.control.borrow().abandon {
            Some(kind) => Err(say::stopped(kind)),
            None => {
                self.step.decide();
                Ok(())
            }
        }
    }

    /// Whether it attaches, and if so its name of this node, to which somebody has agreed, so that [`Drive::claims`] knows them.
    async fn see(&mut self, plugin: &str) -> Result<()> {
        if !self.can(ATTACHES).await? {
            return Ok(());
        }
        match self.ready().await?.node_id().is_empty() {
            true => Err(words::no_node_id(plugin)),
            false => self.shared.plugins.refuse_other_node_id(plugin),
        }
    }

    fn note_unfinished(&mut self, record: &Record) {
        // A call's has no consumer.
        let of_volume = |key: &MountKey| !key.consumer.is_empty() && VolumeName::of(key) == record.name;
        let known: Vec<MountKey> =
            self.rows.unfinished().map(|(key, _)| key.clone()).filter(of_volume).collect();
        for key in known {
            self.rows.set_unfinished(key, None);
        }
        for claim in record.claims.iter().filter(|claim| claim.releasing && claim.node == self.shared.node) {
            let parked = !claim.parked.is_empty();
            let unfinished = Unfinished { uid: claim.uid, parked };
            self.rows.set_unfinished(record.name.key(&claim.consumer), Some(unfinished));
        }
    }

    pub(super) fn claims(&self, record: &Record) -> Claims {
        let registration = record.registration.as_ref();
        Claims {
            attaches: self.shared.plugins.can(&record.volume.plugin, ATTACHES),
            node_id: self.shared.plugins.node_id(&record.volume.plugin),
            capabilities: registration.map(|of| of.spec.capabilities.clone()).unwrap_or_default(),
            claims: record.claims.clone(),
            attachments: record.attachments.clone(),
            boot: self.shared.boot(),
        }
    }

    /// The consumer's mounts, all tags of them.
    pub(super) fn mounts_of(&self, key: &MountKey) -> Vec<MountKey> {
        let own = |mount: &&MountKey| {
            (&mount.namespace, &mount.volume, &mount.consumer) == (&key.namespace, &key.volume, &key.consumer)
        };
        self.rows.volume().mounts.iter().map(|row| &row.key).filter(own).cloned().collect()
    }

    /// A volume that this node cannot reach, or one more than the plugin takes here: as long as the answer is held nobody else
    /// takes the last place.
    async fn refuse_what_cannot_be_here(
        &mut self,
        record: &Record,
        wanted: &Claim,
    ) -> Result<Option<OwnedMutexGuard<()>>> {
        let plugin = &record.volume.plugin;
        if self.shared.plugins.view(plugin).is_none() {
            return Err(say::unknown_plugin(plugin));
        }
        // Before it was seen nobody knows what it takes, and where it is.
        let ready = self.ready().await?;
        let topologies =
            record.registration.as_ref().map(|of| of.spec.topologies.as_slice()).unwrap_or_default();
        let reaches = |segments: &BTreeMap<String, String>| {
            segments.iter().all(|(key, value)| {
                ready.topology().iter().any(|(k, v)| k.eq_ignore_ascii_case(key) && v == value)
            })
        };
        if !topologies.is_empty() && !topologies.iter().any(reaches) {
            return Err(words::out_of_reach(&record.name, ready.topology()));
        }
        let is_here = |claim: &Claim| claim.node == wanted.node;
        if ready.max_volumes() <= 0 || record.claims.iter().any(is_here) {
            return Ok(None);
        }
        let counted = self.shared.counting(plugin).lock_owned().await;
        let filter = RecordFilter {
            plugin: Some(plugin.clone()),
            node: Some(wanted.node.clone()),
            ..RecordFilter::default()
        };
        let (volumes, _) = self.shared.registry.records(filter).await?;
        if volumes.len() as i64 >= ready.max_volumes() {
            return Err(words::too_many(plugin, ready.max_volumes(), &volumes));
        }
        Ok(Some(counted))
    }
}

impl Shared {
    fn counting(&self, plugin: &str) -> Arc<tokio::sync::Mutex<()>> {
        let mut counting = self.counting.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(counting.entry(plugin.to_owned()).or_default())
    }
}

/// What decides nothing: what the effect came with, and with whose secrets the next is made; `given`: the call brought some.
fn enter(record: &mut Record, event: &Event, next: &Next, facts: &Facts, given: bool) {
    if let Event::Ended { effect, .. } = event {
        if let Some(claim) = record.claims.iter_mut().find(|claim| claim.consumer == effect.consumer) {
            claim.error.clone_from(&facts.error);
        }
        if let Some(context) = &facts.publish_context
            && let Some(at) = record.attachments.iter_mut().find(|at| at.node == effect.node)
        {
            at.publish_context.clone_from(context);
        }
    }
    if let Next::Run(Effect { action: Action::Attach, consumer, node, from }) = next {
        // What an earlier attach had is wanted at the end as well.
        let had = match from {
            None => AttachSecrets::default(),
            Some(_) => record.attach_secrets(node),
        };
        let credential = record.claim(consumer).and_then(|claim| claim.credential.clone());
        let secrets = AttachSecrets { credential: credential.or(had.credential), given: had.given || given };
        if let Some(at) = record.attachments.iter_mut().find(|at| at.node == *node) {
            at.secrets = Some(secrets);
        }
    }
}

/// Whether a claim becomes its consumer's; one that a Mount takes does with the mount.
fn takes(before: &Record, after: &Record) -> bool {
    let is_taken = |record: &Record, consumer: &str| {
        record.claim(consumer).is_some_and(|claim| claim.kept && !claim.by_mount)
    };
    after.claims.iter().any(|Claim { consumer, .. }| is_taken(after, consumer) && !is_taken(before, consumer))
}

fn is_by_mount(before: &Record, after: &Record, event: &Event) -> bool {
    let consumer = match event {
        Event::Claim(claim) => &claim.consumer,
        Event::Release { consumer }
        | Event::Continue { consumer }
        | Event::Bind { consumer, .. }
        | Event::Unbound { consumer }
        | Event::Forget { consumer } => consumer,
        Event::Ended { effect, .. } => &effect.consumer,
        Event::Recovered { .. } => return false,
    };
    after.claim(consumer).or(before.claim(consumer)).is_some_and(|claim| claim.by_mount)
}
