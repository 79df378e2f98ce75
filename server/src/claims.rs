//! Claims: each is a step of csid's rules over a record, written in one transaction with the rows that it depends on.

use std::time::Duration;

use csi_proto::cluster::v1::{Accepted, ClaimAsk, ClaimChanged, Done, Granted, Owed, ReleaseAsk};
use csi_proto::identity::{Identity, Role, is_member_name};
use csid::error::{Obstacle, Step, shortened};
use csid::random;
use csid::store::Durability;
use csid::store::registry::{Claim, ClaimState, Conflict, Record, Registry, RegistryError, Swap, VolumeName};
use csid::volume::rules::{self, ClaimEvent, ClaimNext, Claims, check_name};
use csid::{Error, Kind};
use csid_etcd::{Guard, RowKey, Swapped};
use tokio::time::Instant;

use crate::cluster::{Cluster, is_in_state, meta_guard, node_guard, not_joined};
use crate::failure::{Result, ServerError};
use crate::grants::May;
use crate::rows::{NodeRow, NodeState, Read};
use crate::time::now_usec;
use crate::view;

/// Tries of a change that others are faster with.
const TRIES: usize = 64;
/// How long a caller waits for a release at most.
const RELEASE: Duration = Duration::from_secs(60);

/// The least time between two looks at a claim that is being released.
const BETWEEN: Duration = Duration::from_millis(50);

/// The claim that a call asks for.
struct Wanted<'a> {
    caller: &'a Identity,
    name: VolumeName,
    node: String,
    /// The boot of a calling node.
    boot: String,
    claim: Claim,
}

impl Cluster {
    /// Takes a claim, or finds it taken. `has_session`: the calling node has a session with this server.
    pub async fn claim(&self, caller: &Identity, ask: ClaimAsk, has_session: bool) -> Result<Granted> {
        let wanted = self.wanted(caller, ask, has_session)?;
        for _ in 0..TRIES {
            if let Some(granted) = self.try_claim(&wanted).await? {
                return Ok(granted);
            }
        }
        Err(busy(&wanted.name))
    }

    /// Checks a call, and makes the claim that it asks for.
    fn wanted<'a>(&self, caller: &'a Identity, ask: ClaimAsk, has_session: bool) -> Result<Wanted<'a>> {
        let name = rules::volume_name(&ask.namespace, &ask.volume)?;
        let node = self.node_of(caller, &ask.node, &name.namespace)?;
        check_name("call", &ask.call)?;
        check_name("consumer", &ask.consumer)?;
        let usage = ask.r#use.ok_or_else(|| Error::invalid("use is missing"))?;
        let usage = rules::read_use(&usage.mode, &usage.access_mode, &usage.attachment_mode)?;
        if ask.queue_ms != 0 {
            return Err(
                Error::new(Kind::NotSupported, "queue-ms is not 0, and servers have no queue yet").into()
            );
        }
        let credential = (!ask.credential.is_empty()).then_some(ask.credential);
        if let Some(credential) = &credential {
            rules::check_credential(&name.namespace, credential)?;
        }
        if caller.role == Role::Node && !has_session {
            return Err(ServerError::Unavailable(format!("node {node} has no session with this server")));
        }
        let claim = Claim {
            by_mount: ask.by_mount,
            credential,
            id: random::name(),
            call: format!("{caller}/{}", ask.call),
            since_usec: now_usec(),
            ..rules::new_claim(&ask.consumer, &node, ask.uid, usage)
        };
        Ok(Wanted { caller, name, node, boot: ask.boot, claim })
    }

    /// Returns the node whose claim is meant, if the caller may claim for it.
    fn node_of(&self, caller: &Identity, node: &str, namespace: &str) -> Result<String> {
        let is_own = caller.role == Role::Node && (node.is_empty() || node == caller.name);
        if is_own {
            self.require(caller, namespace, May::Mount)?;
            return Ok(caller.name.clone());
        }
        self.require(caller, namespace, May::ClaimFor)?;
        match is_member_name(node) {
            true => Ok(node.to_owned()),
            false => Err(Error::invalid(format!("{:?} is not the name of a node", shortened(node))).into()),
        }
    }

    /// Returns `None` if the record or a row has changed since it was read.
    async fn try_claim(&self, wanted: &Wanted<'_>) -> Result<Option<Granted>> {
        let Wanted { caller, name, node, boot, claim } = wanted;
        let here = self.presence.here()?;
        let meta = self.normal().await?;
        let row = self.node(node).await?;
        let record = self.registry.record(name.clone()).await?;
        rules::registered(&record)?;
        let Some(row) = row else { return Err(not_joined(node)) };
        if row.value.state != NodeState::Ready {
            return self.refuse_state(node).await;
        }
        let mut guards = vec![meta_guard(&meta), node_guard(node, &row), here.guard()];
        if caller.role == Role::Node {
            let own = match caller.name == *node {
                true => row.clone(),
                false => self.node(&caller.name).await?.ok_or_else(|| not_joined(&caller.name))?,
            };
            if !self.is_of_boot(&caller.name, &own, boot).await? {
                return Ok(None);
            }
            // The session of a node that claims for another one may not have ended yet.
            if matches!(own.value.state, NodeState::Blocked | NodeState::Fenced) {
                return self.refuse_state(&caller.name).await;
            }
            if caller.name != *node {
                guards.push(node_guard(&caller.name, &own));
            }
        }
        let claims = claims(&record, node, Some(&row.value));
        let (after, next) = rules::step(&claims, ClaimEvent::Claim(claim.clone()))
            .map_err(|refusal| rules::refused(refusal, name, &claim.consumer))?;
        if next != ClaimNext::Taken && self.has_changed(node, &row).await? {
            // Another server may have written what the node reports of the plugin.
            return Ok(None);
        }
        match next {
            ClaimNext::Taken => {}
            ClaimNext::Unseen if claims.attaches.is_none() => {
                return Err(unseen(node, &record.volume.plugin));
            }
            _ => {
                let plugin = &record.volume.plugin;
                let text = format!("{name}: plugin {plugin} attaches volumes, and servers cannot attach yet");
                return Err(Error::new(Kind::NotSupported, text).into());
            }
        }
        let after = Record { claims: after.claims, attachments: after.attachments, ..record.clone() };
        if after == record {
            // Nothing is written. The rows are compared all the same: a fence or a recovery may have come since they were read.
            return match self.hold(&guards).await? {
                true => granted(&record, caller, claim).map(Some),
                false => Ok(None),
            };
        }
        let _place = match record.claim_at(&claim.consumer, node) {
            None => Some(self.place(node).await?),
            Some(_) => None,
        };
        match self.swap(&record, after, guards).await? {
            Some(after) => granted(&after, caller, claim).map(Some),
            None => Ok(None),
        }
    }

    /// Refuses a node by its row, unless the row has changed.
    async fn refuse_state(&self, node: &str) -> Result<Option<Granted>> {
        match self.node_now(node).await? {
            Some(row) if row.value.state == NodeState::Ready => Ok(None),
            Some(row) => Err(is_in_state(node, row.value.state)),
            None => Err(not_joined(node)),
        }
    }

    /// Refuses a call of another boot than the one that has joined, such as a clone's. `false`: the row has changed since it was read.
    async fn is_of_boot(&self, node: &str, row: &Read<NodeRow>, boot: &str) -> Result<bool> {
        if row.value.boot == boot {
            return Ok(true);
        }
        match self.has_changed(node, row).await? {
            true => Ok(false),
            false => Err(Error::new(Kind::Busy, format!("node {node} has joined with another boot")).into()),
        }
    }

    /// Takes a node's word that it has nothing of a claim any more.
    pub async fn detached(&self, caller: &Identity, owed: Owed) -> Result<Accepted> {
        self.require_node(caller)?;
        let name = rules::volume_name(&owed.namespace, &owed.volume)?;
        check_name("consumer", &owed.consumer)?;
        // A node that got no answer to its last call may have no name of the claim, or an earlier claim's. It has the name of the call.
        let is_named = !owed.claim.is_empty();
        if is_named {
            check_name("claim", &owed.claim)?;
        }
        if !is_named || !owed.call.is_empty() {
            check_name("call", &owed.call)?;
        }
        let call = (!owed.call.is_empty()).then(|| format!("{caller}/{}", owed.call));
        let is_meant =
            |claim: &&Claim| (is_named && claim.id == owed.claim) || call.as_ref() == Some(&claim.call);
        let node = &caller.name;
        for _ in 0..TRIES {
            let here = self.presence.here()?;
            let meta = self.meta().await?;
            let row = self.unblocked(node).await?;
            let record = self.registry.record(name.clone()).await?;
            let Some(claim) = record.claim_at(&owed.consumer, node).filter(is_meant) else {
                // It ended before. A claim of a later call has another id, and stays.
                return Ok(Accepted {});
            };
            let Some(row) = row else { return Err(not_joined(node)) };
            if !self.is_of_boot(node, &row, &owed.boot).await? {
                continue;
            }
            let is_other = |other: &Claim| {
                other.node == *node && other.consumer != owed.consumer && other.state == ClaimState::Taken
            };
            if owed.still_staged && !record.claims.iter().any(is_other) {
                let text = format!("{name} is still staged on node {node}, which has no other claim of it");
                return Err(Error::new(Kind::Busy, text).into());
            }
            if matches!(claim.state, ClaimState::NodeDetached | ClaimState::ControllerDetached) {
                return Ok(Accepted {});
            }
            let event = ClaimEvent::Detached { consumer: owed.consumer.clone() };
            let stepped = rules::step(&claims(&record, node, Some(&row.value)), event);
            let (after, _) = stepped.map_err(|refusal| rules::refused(refusal, &name, &owed.consumer))?;
            let after = Record { claims: after.claims, attachments: after.attachments, ..record.clone() };
            let guards = vec![meta_guard(&meta), node_guard(node, &row), here.guard()];
            if self.swap(&record, after, guards).await?.is_some() {
                return Ok(Accepted {});
            }
        }
        Err(busy(&name))
    }

    /// Has a claim released, and waits until it is free.
    pub async fn release(&self, caller: &Identity, ask: ReleaseAsk) -> Result<Done> {
        let name = rules::volume_name(&ask.namespace, &ask.volume)?;
        check_name("consumer", &ask.consumer)?;
        self.require(caller, &name.namespace, May::ReleaseOthers)?;
        if ask.force {
            self.require(caller, &name.namespace, May::Fence)?;
        }
        if !is_member_name(&ask.node) {
            let text = format!("{:?} is not the name of a node", shortened(&ask.node));
            return Err(Error::invalid(text).into());
        }
        let limit = match ask.deadline_ms {
            0 => RELEASE,
            ms => Duration::from_millis(ms).min(RELEASE),
        };
        let deadline = Instant::now() + limit;
        let Some(id) = self.begin_release(caller, &name, &ask).await? else { return Ok(Done {}) };
        loop {
            let index = self.registry.index().await?;
            let record = self.registry.record(name.clone()).await?;
            if record.claim_at(&ask.consumer, &ask.node).is_none_or(|claim| claim.id != id) {
                return Ok(Done {});
            }
            // The list may be behind the record, which costs a turn. Other volumes change, too.
            tokio::time::sleep(BETWEEN.min(deadline.duration_since(Instant::now()))).await;
            let changed = tokio::time::timeout_at(deadline, self.registry.changed(index)).await;
            if let Err(_elapsed) = changed {
                let holder = format!("{}/{}", ask.node, ask.consumer);
                let text =
                    format!("{name}: node {} has not released the claim of {} yet", ask.node, ask.consumer);
                let error = Error::new(Kind::TimedOut, text).obstructed_by(Obstacle::OtherNode);
                return Err(error
                    .with(|details| {
                        details.holders = vec![holder];
                        details.step = Some(Step::Release);
                    })
                    .into());
            }
        }
    }

    /// Writes that a claim is released, or ends it by force. Returns its id. `None`: there is no such claim.
    async fn begin_release(
        &self,
        caller: &Identity,
        name: &VolumeName,
        ask: &ReleaseAsk,
    ) -> Result<Option<String>> {
        for _ in 0..TRIES {
            let here = self.presence.here()?;
            let meta = self.normal().await?;
            let mut guards = vec![meta_guard(&meta), here.guard()];
            guards.extend(self.unblocked_guard(caller).await?);
            let record = self.registry.record(name.clone()).await?;
            let Some(claim) = record.claim_at(&ask.consumer, &ask.node) else { return Ok(None) };
            let id = claim.id.clone();
            let consumer = ask.consumer.clone();
            let event = match ask.force {
                true => ClaimEvent::Forget { consumer },
                false => ClaimEvent::Release { consumer },
            };
            let row = self.node(&ask.node).await?;
            let stepped = rules::step(&claims(&record, &ask.node, row.as_ref().map(|row| &row.value)), event);
            let (after, _) = stepped.map_err(|refusal| rules::refused(refusal, name, &ask.consumer))?;
            let after = Record { claims: after.claims, attachments: after.attachments, ..record.clone() };
            if after == record || self.swap(&record, after, guards).await?.is_some() {
                if ask.force {
                    tracing::warn!(%caller, volume = %name, node = ask.node, consumer = ask.consumer, "a claim was ended by force");
                }
                return Ok(Some(id));
            }
        }
        Err(busy(name))
    }

    /// Returns the claims that their nodes have to release, and the revision at which they were.
    pub async fn due_releases(&self) -> Result<(Vec<(String, ClaimChanged)>, u64)> {
        let (records, index) = self.registry.restless().await?;
        let mut due = Vec::new();
        for record in &records {
            let claims = record.claims.iter();
            for claim in claims.filter(|claim| claim.releasing && claim.state == ClaimState::Taken) {
                let changed = ClaimChanged {
                    claim: claim.id.clone(),
                    namespace: record.name.namespace.clone(),
                    volume: record.name.volume.clone(),
                    consumer: claim.consumer.clone(),
                    state: "releasing".to_owned(),
                };
                due.push((claim.node.clone(), changed));
            }
        }
        Ok((due, index))
    }

    /// Writes a record. `None`: it or a guarded row has changed since it was read.
    pub(crate) async fn swap(
        &self,
        before: &Record,
        after: Record,
        guards: Vec<Guard>,
    ) -> Result<Option<Record>, RegistryError> {
        let past = rules::past(before, &after);
        let swap = Swap { before: before.clone(), after: after.clone(), past, durability: Durability::Disk };
        match self.registry.swap_guarded(swap, guards).await {
            Ok(Swapped::Done(revision)) => Ok(Some(Record { revision, ..after })),
            Ok(Swapped::Refused(RowKey::Server(_))) => {
                Err(RegistryError::Unreachable("this server's row in etcd is gone".into()))
            }
            Ok(Swapped::Refused(key)) => {
                self.forget(&key);
                Ok(None)
            }
            Err(RegistryError::Conflict(Conflict::Stale)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Returns a record as the rules take it, for an event of this node.
fn claims(record: &Record, node: &str, row: Option<&NodeRow>) -> Claims {
    let registration = record.registration.as_ref();
    Claims {
        attaches: row
            .and_then(|row| row.plugins.get(&record.volume.plugin))
            .and_then(|plugin| plugin.attaches),
        node_id: None,
        capabilities: registration.map(|of| of.spec.capabilities.clone()).unwrap_or_default(),
        claims: record.claims.clone(),
        ahead: Vec::new(),
        attachments: record.attachments.clone(),
        node: Some(node.to_owned()),
        cluster: None,
        boot: row.map(|row| row.boot.clone()).unwrap_or_default(),
    }
}

fn granted(record: &Record, caller: &Identity, wanted: &Claim) -> Result<Granted> {
    let claim = record.claim_at(&wanted.consumer, &wanted.node);
    let claim = claim.ok_or_else(|| Error::internal("a claim was granted without a claim"))?;
    let volume = Some(view::row(record, caller));
    Ok(Granted { claim: claim.id.clone(), volume, revision: record.revision })
}

fn busy(name: &VolumeName) -> ServerError {
    Error::new(Kind::Busy, format!("the record of {name} changed {TRIES} times meanwhile")).into()
}

fn unseen(node: &str, plugin: &str) -> ServerError {
    let text = format!("node {node} has not reported whether plugin {plugin} attaches volumes");
    Error::new(Kind::PluginUnavailable, text).into()
}
