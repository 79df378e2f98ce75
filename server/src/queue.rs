//! The queue of a volume: claims that wait until others end. First come, first served.
//!
//! ```text
//!            conflict            nothing is in its way
//!   Claim ─────────────▶ entry ───────────────────────▶ claim: taken, or pending until its controller has answered
//!                          │ Withdraw, its time is over, its caller has asked no server for 60 s or is blocked, its node is not ready
//!                          └──────────────────────────▶ gone
//! ```
//!
//! Whichever change ends a claim grants from the front, in the same transaction ([`Cluster::swap_granting`]). An entry is in the way of
//! each later one that its claim would exclude. Nothing is granted to a node without a session: it may be off, and its claim would
//! stay.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use csi_proto::cluster::v1::{CallName, Withdrawn};
use csi_proto::identity::{Identity, Role};
use csid::store::registry::{Claim, ClaimState, Queued, Record, Registry, RegistryError, VolumeName};
use csid::volume::rules::{self, ClaimEvent, ClaimNext, ClaimRefusal, Claims, check_name};
use csid::{Error, Kind};
use csid_etcd::{Expected, Guard, RowKey};

use crate::cluster::{Cluster, meta_guard, node_guard, not_joined};
use crate::controllers::plugin_guard;
use crate::excluded::{excluding, left_attached};
use crate::failure::Result;
use crate::grants::May;
use crate::presence::Here;
use crate::records::{Put, TRIES, busy};
use crate::rows::NodeState;
use crate::tries::{QueuePlace, Wanted};
use crate::wanted::{Awaits, ClaimStep};

/// How old the last beat of a server is that is there. It writes one every 3 s.
const BEAT: Duration = Duration::from_secs(10);
/// The limit of claims of one volume that wait.
const ENTRIES: usize = 1024;
/// The same of one node. csid has one of a volume, as a rule.
const OF_NODE: usize = 32;
/// The same of one caller, which may claim for many nodes.
const OF_CALLER: usize = 256;
/// The entries that one transaction ends at most: each is up to four operations of 100.
const MOST: usize = 20;
/// The entries that a change looks at, from the front. Each is compared with those before it.
const LOOKED: usize = 128;

/// Returns the entry of a call. `None`: it has none.
pub fn entry<'a>(record: &'a Record, call: &str) -> Option<&'a Queued> {
    record.queue.iter().find(|queued| queued.claim.call == call)
}

/// Returns the claims that wait before an entry, but for those of its own consumer. `None`: before a new entry.
pub fn ahead(record: &Record, entry: Option<&Queued>, claim: &Claim) -> Vec<Arc<Claim>> {
    let is_before = |queued: &&Queued| entry.is_none_or(|entry| queued.serial < entry.serial);
    let queue = record.queue.iter().filter(is_before).map(|queued| &queued.claim);
    queue.filter(|other| !is_same_consumer(other, claim)).cloned().collect()
}

fn is_same_consumer(one: &Claim, other: &Claim) -> bool {
    (&one.node, &one.consumer) == (&other.node, &other.consumer)
}

/// Returns whether a call asks for what its entry waits for.
pub fn is_same(entry: &Claim, asked: &Claim) -> bool {
    let options = |claim: &Claim| (claim.uid, claim.usage, claim.by_mount, claim.credential.clone());
    is_same_consumer(entry, asked) && options(entry) == options(asked)
}

/// Checks whether a claim is admitted behind those that wait before it. No row of a node or plugin is needed for that.
pub fn admit(record: &Record, ahead: &[Arc<Claim>], claim: &Claim) -> Result<(), ClaimRefusal> {
    let registration = record.registration.as_ref();
    let ahead = ahead.iter().filter(|other| !is_same_consumer(other, claim));
    let claims = Claims {
        capabilities: registration.map(|of| of.spec.capabilities.clone()).unwrap_or_default(),
        claims: record.claims.clone(),
        ahead: ahead.cloned().collect(),
        attachments: record.attachments.clone(),
        node: Some(claim.node.clone()),
        ..Claims::default()
    };
    rules::admit(&claims, claim)
}

/// Returns whether a claim waits because of this refusal.
pub fn is_waited_for(refusal: &ClaimRefusal) -> bool {
    matches!(refusal, ClaimRefusal::Conflict { .. })
}

/// Removes the entry of a call.
pub fn without(mut record: Record, call: &str) -> Record {
    record.queue.retain(|queued| queued.claim.call != call);
    record
}

impl Cluster {
    /// Returns the place of a call in the lists' queue, if this server keeps the entry and something is in its way. Reads no etcd.
    pub(crate) async fn place_in_queue(&self, wanted: &Wanted) -> Result<Option<QueuePlace>> {
        if !wanted.is_waiting() {
            return Ok(None);
        }
        let here = self.presence.here()?;
        let Some(record) = self.listed(&wanted.name).await? else { return Ok(None) };
        let entry = entry(&record, &wanted.claim.call);
        let Some(entry) = entry.filter(|entry| is_same(&entry.claim, &wanted.claim)) else { return Ok(None) };
        let ahead = ahead(&record, Some(entry), &entry.claim);
        match admit(&record, &ahead, &entry.claim) {
            Err(refusal) if is_waited_for(&refusal) && entry.claim.keeper == here.id => {
                let error = rules::refused(refusal, &record.name, &entry.claim.consumer);
                Ok(Some(place(&record, &entry.claim, ahead.len(), error)))
            }
            _ => Ok(None),
        }
    }

    /// Enters a call that waits into a record's queue, and that this server was asked for it last.
    pub(crate) async fn enqueue<'a>(
        &'a self,
        here: &Here,
        wanted: &'a Wanted,
        record: &Record,
        error: Error,
    ) -> Result<ClaimStep<'a>> {
        let Wanted { name, node, claim, .. } = wanted;
        let entry = entry(record, &claim.call);
        let before = ahead(record, entry, claim).len();
        let (mut after, mut place) = (record.clone(), None);
        match after.queue.iter_mut().find(|queued| queued.claim.call == claim.call) {
            Some(queued) => {
                let of = Arc::make_mut(&mut queued.claim);
                of.keeper.clone_from(&here.id);
            }
            None => {
                if record.queue.len() >= ENTRIES {
                    let text =
                        format!("{} claims wait for {name}, and the limit is {ENTRIES}", record.queue.len());
                    return Err(Error::new(Kind::RateLimited, text).into());
                }
                if record.queue.iter().filter(|queued| queued.claim.node == *node).count() >= OF_NODE {
                    let text = format!("{OF_NODE} claims of node {node} wait for {name}, the limit");
                    return Err(Error::new(Kind::RateLimited, text).into());
                }
                let of_caller = format!("{}/", wanted.caller);
                let is_own = |queued: &&Queued| queued.claim.call.starts_with(&of_caller);
                if record.queue.iter().filter(is_own).count() >= OF_CALLER {
                    let text = format!("{OF_CALLER} claims of {} wait for {name}, the limit", wanted.caller);
                    return Err(Error::new(Kind::RateLimited, text).into());
                }
                place = Some(self.place(node).await?);
                after.serial += 1;
                let claim = Claim { keeper: here.id.clone(), ..claim.clone() };
                after.queue.push(Queued { serial: after.serial, claim: Arc::new(claim) });
            }
        }
        Ok(ClaimStep { after, guards: Vec::new(), place, awaits: Awaits::Queue { before, error } })
    }

    /// Ends the entry of a call that was refused, as far as lists have it. Returns whether the call has its claim: another server may have granted
    /// it since the record was read.
    pub(crate) async fn leave_queue(&self, wanted: &Wanted) -> Result<bool> {
        let Wanted { name, claim, .. } = wanted;
        let has_claim = |record: &Record| {
            record.claim_at(&claim.consumer, &claim.node).is_some_and(|of| of.call == claim.call)
        };
        for _ in 0..TRIES {
            let Some(listed) = self.listed(name).await? else { return Ok(false) };
            if entry(&listed, &claim.call).is_none() {
                return Ok(has_claim(&listed));
            }
            let (here, meta) = (self.presence.here()?, self.meta().await?);
            let record = self.registry.record(name.clone()).await?;
            let after = without(record.clone(), &claim.call);
            if after == record {
                return Ok(has_claim(&record));
            }
            let guards = vec![meta_guard(&meta), here.guard()];
            if self.swap_granting(&record, after, guards).await?.is_some() {
                return Ok(false);
            }
        }
        Err(busy(name))
    }

    /// Writes a record, and grants in the same transaction what waits and has nothing in its way any more. `None`: it or a guarded row has
    /// changed since it was read.
    pub async fn swap_granting(
        &self,
        before: &Record,
        after: Record,
        guards: Vec<Guard>,
    ) -> Result<Option<Record>, RegistryError> {
        Ok(self.put_granting(before, after, guards).await?.done())
    }

    /// Does the same, and says what became of it.
    pub(crate) async fn put_granting(
        &self,
        before: &Record,
        after: Record,
        mut guards: Vec<Guard>,
    ) -> Result<Put, RegistryError> {
        let after = self.grant_queued(after, &mut guards).await;
        let put = self.put(before, after, guards).await?;
        if !before.queue.is_empty() && matches!(put, Put::Done(_)) {
            self.was_driven(&before.name);
        }
        Ok(put)
    }

    /// Grants what waits and has nothing in its way, from the front. Adds the guards that the grants need.
    async fn grant_queued(&self, mut record: Record, guards: &mut Vec<Guard>) -> Record {
        // What waits for a volume that is being deleted, or for an earlier one of the name, is granted nothing.
        if record.queue.is_empty() || rules::registered(&record).is_err() || self.normal().await.is_err() {
            return record;
        }
        let mut ahead: Vec<Arc<Claim>> = Vec::new();
        let mut left = Vec::new();
        let mut granted = 0;
        // Whether a node has a session.
        let mut present: HashMap<String, bool> = HashMap::new();
        for (n, queued) in std::mem::take(&mut record.queue).into_iter().enumerate() {
            if n >= LOOKED || granted >= MOST {
                left.push(queued);
                continue;
            }
            let is_free = admit(&record, &ahead, &queued.claim).is_ok();
            let node = &queued.claim.node;
            if is_free && !present.contains_key(node) {
                present.insert(node.clone(), self.has_sessions(node).await.unwrap_or(false));
            }
            let may_have = is_free && present.get(node) == Some(&true);
            if may_have && self.is_limited(&record, node).await {
                // It waits for the end of another volume's claim. Nobody has to wait for that here.
                left.push(queued);
                continue;
            }
            let taken = match may_have {
                true => self.grant(&record, &ahead, &queued.claim, guards).await,
                false => Ok(None),
            };
            match taken {
                Ok(Some(after)) => {
                    record = after;
                    granted += 1;
                }
                Ok(None) => {
                    ahead.push(queued.claim.clone());
                    left.push(queued);
                }
                Err(error) => {
                    tracing::warn!(volume = %record.name, node = queued.claim.node, %error, "a claim that waits was not granted");
                    ahead.push(queued.claim.clone());
                    left.push(queued);
                }
            }
        }
        record.queue = left;
        record
    }

    /// Returns whether a node has no place for the volume: as many of the plugin's as it may have.
    pub(crate) async fn is_limited(&self, record: &Record, node: &str) -> bool {
        match self.node(node).await {
            Ok(Some(row)) => {
                matches!(self.refuse_limit(record, node, &row.value).await, Ok(Some(_)))
            }
            Ok(None) | Err(_) => false,
        }
    }

    /// Returns which claims that wait are in the way of a later one. Those that wait for another volume of their node are not.
    pub(crate) async fn in_the_way(&self, record: &Record, ahead: Vec<Arc<Claim>>) -> Vec<Arc<Claim>> {
        let mut limited: HashMap<String, bool> = HashMap::new();
        let mut left = Vec::new();
        for claim in ahead {
            if !limited.contains_key(&claim.node) {
                limited.insert(claim.node.clone(), self.is_limited(record, &claim.node).await);
            }
            if limited.get(&claim.node) == Some(&false) {
                left.push(claim);
            }
        }
        left
    }

    /// Returns a record with this claim, which waits, is admitted, and whose node has a session. `None`: it cannot be granted now.
    async fn grant(
        &self,
        record: &Record,
        ahead: &[Arc<Claim>],
        claim: &Claim,
        guards: &mut Vec<Guard>,
    ) -> Result<Option<Record>> {
        let (node, plugin) = (&claim.node, &record.volume.plugin);
        let Some(row) = self.node(node).await? else { return Ok(None) };
        if row.value.state != NodeState::Ready || !self.may_claim(&record.name.namespace, claim) {
            return Ok(None);
        }
        match record.claim_at(&claim.consumer, node) {
            Some(present) if excluding(record, present).next().is_some() => return Ok(None),
            None if rules::refuse_expanding(record).is_err() => return Ok(None),
            Some(_) | None => {}
        }
        let mut of_caller = Vec::new();
        if self.is_callers_node_out(claim, &mut of_caller).await? {
            return Ok(None);
        }
        let around = self.around_row(record, Some(row.clone())).await?;
        let mut claims = around.claims(record, node);
        claims.ahead = ahead.iter().filter(|other| !is_same_consumer(other, claim)).cloned().collect();
        let Ok((after, next)) = rules::step(&claims, ClaimEvent::Claim(claim.clone())) else {
            return Ok(None);
        };
        let mut after =
            left_attached(record, claim, around.has_refused_mounts(), around.stepped(record, after));
        match &next {
            ClaimNext::Taken => {
                if let Some(claim) = after.claims.get_mut_at(&claim.consumer, node) {
                    claim.keeper.clear();
                }
            }
            ClaimNext::Run(effect) if around.has_controllers => {
                rules::enter_attach_secrets(&mut after, effect, false);
            }
            _ => return Ok(None),
        }
        of_caller.extend([node_guard(node, &row), plugin_guard(plugin, around.plugin.as_ref())]);
        for guard in of_caller {
            if !guards.contains(&guard) {
                guards.push(guard);
            }
        }
        Ok(Some(after))
    }

    /// Ends entries that nobody waits for, and grants what has nothing in its way. Returns the record as it was if there is nothing to do.
    pub async fn tend_queue(&self, record: &Record, guards: &mut Vec<Guard>) -> Result<Record> {
        let mut after = record.clone();
        let mut ended = Vec::new();
        for queued in &record.queue {
            if ended.len() == MOST {
                break;
            }
            let may_wait = self.may_claim(&record.name.namespace, &queued.claim);
            if !may_wait || self.is_unwanted(&queued.claim, guards).await? {
                ended.push(queued.serial);
            }
        }
        after.queue.retain(|queued| !ended.contains(&queued.serial));
        if ended.is_empty() {
            after = self.grant_queued(after, guards).await;
        }
        Ok(after)
    }

    /// Returns whether the caller of a claim that waits may still claim. Its grant may have been revoked since.
    fn may_claim(&self, namespace: &str, claim: &Claim) -> bool {
        let mut parts = claim.call.splitn(3, '/');
        let (role, name) = match (parts.next(), parts.next()) {
            (Some("node"), Some(name)) => (Role::Node, name),
            (Some("operator"), Some(name)) => (Role::Operator, name),
            // A server of an earlier version has noted no caller.
            _ => return true,
        };
        let caller = Identity { cluster: self.config.cluster.clone(), role, name: name.to_owned() };
        let may = match role == Role::Node && name == claim.node {
            true => May::Mount,
            false => May::ClaimFor,
        };
        self.config.grants.allow(&caller, namespace, may)
    }

    async fn is_unwanted(&self, claim: &Claim, guards: &mut Vec<Guard>) -> Result<bool> {
        let here = self.presence.here()?;
        let is_over = claim.keeper == here.id && self.asks.is_over(&claim.call);
        if is_over || self.is_unready(&claim.node, guards).await? {
            return Ok(true);
        }
        let mut of_caller = Vec::new();
        if self.is_callers_node_out(claim, &mut of_caller).await? {
            guards.extend(of_caller);
            return Ok(true);
        }
        self.is_forsaken(claim, guards).await
    }

    /// Returns whether a claim was asked for by another node than its own, and that node is blocked, fenced or forgotten. Adds the guard of its row.
    async fn is_callers_node_out(&self, claim: &Claim, guards: &mut Vec<Guard>) -> Result<bool> {
        let caller = claim.call.strip_prefix("node/").and_then(|rest| rest.split_once('/'));
        let Some((caller, _)) = caller.filter(|(name, _)| *name != claim.node) else { return Ok(false) };
        let row = self.node(caller).await?;
        guards.push(match &row {
            Some(row) => node_guard(caller, row),
            None => Guard { key: RowKey::Node(caller.to_owned()), is: Expected::Absent },
        });
        Ok(row.is_none_or(|row| matches!(row.value.state, NodeState::Blocked | NodeState::Fenced)))
    }

    /// Returns whether nothing is granted to a node any more.
    async fn is_unready(&self, node: &str, guards: &mut Vec<Guard>) -> Result<bool> {
        let row = self.node(node).await?;
        let is_unready = row.as_ref().is_some_and(|row| row.value.state != NodeState::Ready);
        if let Some(row) = row.filter(|_| is_unready) {
            guards.push(node_guard(node, &row));
        }
        Ok(is_unready)
    }

    /// Returns whether the caller of a claim that waits has asked no server for 60 s, as far as this server can judge that.
    pub async fn is_forsaken(&self, claim: &Claim, guards: &mut Vec<Guard>) -> Result<bool> {
        self.is_abandoned(&claim.call, &claim.keeper, guards).await
    }

    /// Does the same for a call with this keeper.
    pub async fn is_abandoned(&self, call: &str, keeper: &str, guards: &mut Vec<Guard>) -> Result<bool> {
        // A server of an earlier version has noted no keeper.
        if keeper.is_empty() {
            return Ok(false);
        }
        if keeper == self.presence.here()?.id {
            return Ok(self.asks.is_idle(call));
        }
        if self.registry.since_beat(keeper).is_some_and(|since| since < BEAT) {
            return Ok(false);
        }
        // Counted from when this server has seen no beat of that keeper.
        let key = RowKey::Server(keeper.to_owned());
        let is_idle = self.asks.is_idle(&format!("{keeper} {call}"));
        if !is_idle || self.rows.read(&key).await?.is_some() {
            return Ok(false);
        }
        guards.push(Guard { key, is: Expected::Absent });
        Ok(true)
    }

    /// Ends what a call waits for: its entry, or its claim that is pending. What is taken stays.
    pub async fn withdraw(&self, caller: &Identity, ask: CallName) -> Result<Withdrawn> {
        let name = rules::volume_name(&ask.namespace, &ask.volume)?;
        if caller.role != Role::Node {
            self.require(caller, &name.namespace, May::ClaimFor)?;
        }
        check_name("call", &ask.call)?;
        let call = format!("{caller}/{}", ask.call);
        for _ in 0..TRIES {
            let here = self.presence.here()?;
            let meta = self.meta().await?;
            let mut guards = vec![meta_guard(&meta), here.guard()];
            let row = match caller.role {
                Role::Node => self.unblocked(&caller.name).await?,
                Role::Operator | Role::Server => None,
            };
            let record = self.registry.record(name.clone()).await?;
            let mut after = without(record.clone(), &call);
            let claim = record.claims.iter().find(|claim| claim.call == call);
            if claim.is_none() && after == record {
                // A try of the call may be under way. A caller that may make none has none.
                let may_claim = self.config.grants.allow(caller, &name.namespace, May::Mount);
                let is_of_boot = row.as_ref().is_some_and(|row| row.value.boot == ask.boot);
                if caller.role != Role::Node || (may_claim && is_of_boot) {
                    self.asks.withdraw(&call);
                }
                return Ok(Withdrawn { taken: false });
            }
            if caller.role == Role::Node {
                let row = row.ok_or_else(|| not_joined(&caller.name))?;
                if !self.is_of_boot(&caller.name, &row, &ask.boot).await? {
                    continue;
                }
                guards.push(node_guard(&caller.name, &row));
            }
            let taken = claim.is_some_and(|claim| claim.state == ClaimState::Taken);
            if !taken {
                self.asks.withdraw(&call);
            }
            if let Some(claim) = claim.filter(|claim| claim.state == ClaimState::Pending && !claim.releasing)
            {
                let around = self.around(&record, &claim.node).await?;
                guards.extend(around.node.as_ref().map(|row| node_guard(&claim.node, row)));
                guards.push(plugin_guard(&record.volume.plugin, around.plugin.as_ref()));
                let release = ClaimEvent::Release { consumer: claim.consumer.clone() };
                let (claims, _) = rules::step(&around.claims(&after, &claim.node), release)
                    .map_err(|refusal| rules::refused(refusal, &name, &claim.consumer))?;
                let stepped = around.stepped(&after, claims);
                after = left_attached(&after, claim, around.has_refused_mounts(), stepped);
            }
            if after == record || self.swap_granting(&record, after, guards).await?.is_some() {
                self.wake(&name);
                return Ok(Withdrawn { taken });
            }
        }
        Err(busy(&name))
    }

    /// Returns a record as lists have it. `None`: they have none.
    async fn listed(&self, name: &VolumeName) -> Result<Option<Record>> {
        Ok(self.registry.listed(name).await?.0)
    }
}

/// Describes the place of a claim that waits.
pub(crate) fn place(record: &Record, claim: &Claim, before: usize, mut error: Error) -> QueuePlace {
    error.message += &format!("; it waits, and {before} claims wait before it");
    QueuePlace { id: claim.id.clone(), error, revision: record.revision }
}
