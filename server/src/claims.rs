//! Claims: each is a step of csid's rules over a record, written in one transaction with the rows that it depends on.

use std::sync::Arc;
use std::time::Duration;

use csi_proto::cluster::v1::to_node::Is;
use csi_proto::cluster::v1::{Accepted, ClaimAsk, ClaimChanged, Granted, Owed, ReleaseAsk, Released};
use csi_proto::identity::{Identity, Role, is_member_name};
use csid::error::{Obstacle, Step, shortened};
use csid::store::registry::{Claim, ClaimState, Queued, Record, Registry, VolumeName};
use csid::volume::rules::{self, ClaimEvent, ClaimNext, check_name};
use csid::{Error, Kind};
use tokio::time::Instant;

use crate::cluster::{CallOutcome, Cluster, is_in_state, node_guard, not_joined};
use crate::controllers::plugin_guard;
use crate::drive::Driving;
use crate::excluded::{left_attached, refuse_excluded};
use crate::failure::{Result, ServerError};
use crate::grants::May;
use crate::presence::Here;
use crate::queue;
use crate::records::{Around, TRIES, busy};
use crate::rows::{NodeRow, NodeState, PluginRow, Read};
use crate::sessions::Due;
use crate::tries::{ClaimEnd, Found, QueuePlace, Tried, Wanted};
use crate::turns::Trying;
use crate::view;
use crate::wanted::{Awaits, CONTROLLER, ClaimStep};

/// How long a caller waits for a release at most.
const RELEASE: Duration = Duration::from_secs(60);

/// The least time between two looks at the record of a claim whose caller waits.
const ELSEWHERE: Duration = Duration::from_millis(150);

/// Returns the error of a claim whose turn has not come in time, or whose record others have changed all the time.
fn late(wanted: &Wanted) -> ServerError {
    let (name, consumer) = (&wanted.name, &wanted.claim.consumer);
    ServerError::Unavailable(format!(
        "{name}: the claim of {consumer} had no turn in time: others claim the volume"
    ))
}

impl Cluster {
    /// Takes a claim, or finds it taken. `has_session`: the calling node has a session with this server. Where the plugin attaches, the
    /// caller waits for the controller's answer. When that takes too long the claim goes on, and the same call finds it. Where others are in
    /// the way, the call waits in the queue, if it asks for that.
    pub async fn claim(
        self: &Arc<Self>,
        driving: &Arc<Driving>,
        caller: &Identity,
        ask: ClaimAsk,
        has_session: bool,
    ) -> Result<Granted> {
        let wanted = Arc::new(self.wanted(caller, ask, has_session)?);
        let begun = Instant::now();
        let deadline = begun + CONTROLLER;
        // A clone of the node may know its calls.
        let is_own = self.is_of_known_boot(&wanted).await?;
        let _asking = is_own.then(|| self.asks.begin(&wanted.claim.call, wanted.until));
        let mut driven = self.subscribe_driven(&wanted.name);
        // The claim that waits, for its controller or in the queue.
        let mut waits: Option<Found> = None;
        // Whether the claim was granted while a try was refused.
        let mut is_found = false;
        let mut tries = 0;
        while tries < TRIES {
            driven.borrow_and_update();
            // A claim that still waits costs no read of etcd.
            let place = if is_own { self.place_in_queue(&wanted).await? } else { None };
            let tried = match place {
                Some(place) => Ok(Tried::Queued(place)),
                None => {
                    let trying = Trying::Claim { wanted: wanted.clone(), found: waits.clone() };
                    self.try_in_turn(driving, &Arc::new(trying), deadline).await
                }
            };
            if let Err(ServerError::Refused(_)) = &tried
                && is_own
                && self.leave_queue(&wanted).await?
                && !is_found
            {
                // The next try finds the claim, or is refused for another reason.
                is_found = true;
                continue;
            }
            match tried? {
                Tried::Granted(granted) => return Ok(*granted),
                Tried::Changed | Tried::Ended => tries += 1,
                // A claim that an earlier try has written is there still, and so is its place in the queue. An earlier message of the call may have
                // written one, too.
                Tried::Late => {
                    return Err(match waits {
                        Some(Found { in_queue: false, .. }) => not_yet(&wanted, None),
                        _ => late(&wanted),
                    });
                }
                Tried::Waits { id, error, revision } => {
                    waits = Some(Found { id, in_queue: false });
                    if Instant::now() >= deadline {
                        return Err(not_yet(&wanted, error));
                    }
                    self.wake(&wanted.name);
                    tokio::select! {
                        biased;
                        _ = driven.changed() => {
                            let outcome = driven.borrow_and_update().clone();
                            if let Some(granted) = outcome.and_then(|of| granted_by(&of, &wanted, waits.as_ref())) {
                                return Ok(granted);
                            }
                        }
                        // Another server may call the controller.
                        changed = self.changed_elsewhere(&wanted.name, revision) => changed?,
                        // The next try fails, and the caller goes to another server.
                        () = self.presence.stopped() => {}
                        () = tokio::time::sleep_until(deadline) => {}
                    }
                }
                Tried::Queued(QueuePlace { id, error, revision }) => {
                    waits = Some(Found { id, in_queue: true });
                    let answer = begun + wanted.answer;
                    if Instant::now() >= answer {
                        return Err(ServerError::Queued(error));
                    }
                    let until = wanted.until.map_or(answer, |until| until.min(answer));
                    tokio::select! {
                        biased;
                        _ = driven.changed() => {}
                        changed = self.changed_elsewhere(&wanted.name, revision) => changed?,
                        () = self.presence.stopped() => {}
                        () = tokio::time::sleep_until(until) => {}
                    }
                }
            }
        }
        Err(busy(&wanted.name))
    }

    /// Waits until lists have another record under this name. Only the lists are read, and no etcd.
    pub async fn changed_elsewhere(&self, name: &VolumeName, revision: u64) -> Result<()> {
        loop {
            let (record, index) = self.registry.listed(name).await?;
            let listed = record.map_or(0, |record| record.revision);
            if index >= revision && listed != revision {
                return Ok(());
            }
            tokio::time::sleep(ELSEWHERE).await;
            self.registry.changed(index).await?;
        }
    }

    /// Has a claim step over a record, which claims of the same change may have changed. `found`: what an earlier try of its call has found.
    /// `None`: a row has changed since it was read.
    pub(crate) async fn step_claim<'a>(
        &'a self,
        here: &Here,
        record: &Record,
        wanted: &'a Wanted,
        found: Option<&Found>,
    ) -> Result<Option<ClaimStep<'a>>> {
        let Wanted { caller, name, node, boot, claim, .. } = wanted;
        self.normal().await?;
        rules::registered(record)?;
        let row = self.node(node).await?;
        let Some(row) = row else { return Err(not_joined(node)) };
        if row.value.state != NodeState::Ready {
            return self.refuse_state(node).await.map(|()| None);
        }
        let plugin = &record.volume.plugin;
        let around = self.around_row(record, Some(row.clone())).await?;
        let mut guards = vec![node_guard(node, &row), plugin_guard(plugin, around.plugin.as_ref())];
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
                return self.refuse_state(&caller.name).await.map(|()| None);
            }
            if caller.name != *node {
                guards.push(node_guard(&caller.name, &own));
            }
        }
        let present = record.claim_at(&claim.consumer, node);
        match present {
            Some(present) => refuse_excluded(record, present)?,
            None => rules::refuse_expanding(record)?,
        }
        let entry = queue::entry(record, &claim.call);
        if entry.is_none()
            && let Some(error) = self.rolled_back(wanted, present, found)
        {
            return Err(error);
        }
        // A claim that an earlier message of the call has written, or its place in the queue, stays.
        let is_new = entry.is_none() && present.is_none_or(|present| present.call != claim.call);
        if is_new && !wanted.mark.is_empty() && wanted.mark != view::mark(record) {
            let text = format!("{name} is registered otherwise than the caller of the claim knows");
            return Err(ServerError::Changed(Error::new(Kind::Busy, text)));
        }
        if entry.is_some_and(|entry| !queue::is_same(&entry.claim, claim)) {
            return Err(Error::invalid("the call waits in the queue for another claim").into());
        }
        if present.is_none() && self.asks.is_withdrawn(&claim.call) {
            return Err(Error::new(Kind::Cancelled, "the call was withdrawn").into());
        }
        let enqueued = async |guards, error| {
            let step = self.enqueue(here, wanted, record, error).await?;
            Ok(Some(ClaimStep { guards, ..step }))
        };
        let mut claims = around.claims(record, node);
        // Such a claim does not wait in the queue either.
        if wanted.brings_secrets && claims.attaches != Some(false) {
            let is_old =
                self.has_changed(node, &row).await? || self.has_changed_plugin(plugin, &around).await?;
            return match claims.attaches {
                _ if is_old => Ok(None),
                Some(_) => Err(secrets_needed(wanted, plugin)),
                None => Err(unseen(node, plugin)),
            };
        }
        claims.ahead = self.in_the_way(record, queue::ahead(record, entry, claim)).await;
        let of_entry = entry.map_or_else(|| claim.clone(), |entry| Claim::clone(&entry.claim));
        let (after, next) = match rules::step(&claims, ClaimEvent::Claim(of_entry)) {
            Err(refusal) if queue::is_waited_for(&refusal) && wanted.is_waiting() => {
                return enqueued(guards, rules::refused(refusal, name, &claim.consumer)).await;
            }
            stepped => stepped.map_err(|refusal| rules::refused(refusal, name, &claim.consumer))?,
        };
        if present.is_none()
            && let Some(error) = self.refuse_limit(record, node, &row.value).await?
        {
            // Another server may have written that the node has more places.
            if self.has_changed(node, &row).await? {
                return Ok(None);
            }
            return match wanted.is_waiting() {
                true => enqueued(guards, error).await,
                false => Err(error.into()),
            };
        }
        let is_due = match next {
            ClaimNext::Taken => Ok(false),
            ClaimNext::Unseen if claims.attaches.is_none() => Err(unseen(node, plugin)),
            _ if !around.has_controllers => Err(self.no_controller(name, plugin)),
            ClaimNext::Unseen => Err(no_node_id(node, record, &around)),
            _ => Ok(true),
        };
        let is_old = is_due.is_err()
            && (self.has_changed(node, &row).await? || self.has_changed_plugin(plugin, &around).await?);
        if is_old {
            // Another server may have written what nodes report of the plugin.
            return Ok(None);
        }
        let is_due = is_due?;
        let after = left_attached(record, claim, around.has_refused_mounts(), around.stepped(record, after));
        let mut after = queue::without(after, &claim.call);
        if let ClaimNext::Run(effect) = &next {
            rules::enter_attach_secrets(&mut after, effect, false);
        }
        if let Some(of) = after.claims.get_mut_at(&claim.consumer, node)
            && of.call == claim.call
        {
            match of.state {
                ClaimState::Pending => of.keeper.clone_from(&here.id),
                _ if present.is_none() => of.keeper.clear(),
                _ => {}
            }
        }
        // What waits has its place already.
        let place = match present.is_none() && entry.is_none() {
            true => Some(self.place(node).await?),
            false => None,
        };
        Ok(Some(ClaimStep { after, guards, place, awaits: Awaits::Claim { is_due } }))
    }

    /// Returns why the claim of a call was rolled back: its volume was not attached. `None`: it was not, or it is another call's.
    fn rolled_back(
        &self,
        wanted: &Wanted,
        present: Option<&Claim>,
        waits: Option<&Found>,
    ) -> Option<ServerError> {
        let in_queue = waits.is_some_and(|found| found.in_queue);
        let (id, error) = match (present, waits.map(|found| found.id.as_str())) {
            (Some(claim), _) if claim.call == wanted.claim.call && claim.releasing && !claim.kept => {
                (claim.id.as_str(), claim.error.clone())
            }
            (Some(claim), Some(id)) if claim.id != id => (id, None),
            (None, Some(id)) => (id, None),
            _ => return None,
        };
        Some(self.failure(id).map(ServerError::from).unwrap_or_else(|| {
            let Wanted { name, claim, .. } = wanted;
            if present.is_none() && in_queue {
                let text = format!("{name}: the claim of {} does not wait any more", claim.consumer);
                return Error::new(Kind::ClaimConflict, text).into();
            }
            let why = error.unwrap_or_else(|| "it was released meanwhile".to_owned());
            let text = format!("{name}: the claim of {} was rolled back: {why}", claim.consumer);
            Error::new(Kind::PluginError, text).with(|details| details.step = Some(Step::Attach)).into()
        }))
    }

    /// Returns whether a plugin's row has changed since it was read.
    pub(crate) async fn has_changed_plugin(&self, plugin: &str, around: &Around) -> Result<bool> {
        let revision = |row: &Option<Read<PluginRow>>| row.as_ref().map(|row| row.revision);
        Ok(revision(&self.plugin_now(plugin).await?) != revision(&around.plugin))
    }

    /// Refuses a node by its row, unless the row has changed.
    async fn refuse_state(&self, node: &str) -> Result<()> {
        match self.node_now(node).await? {
            Some(row) if row.value.state == NodeState::Ready => Ok(()),
            Some(row) => Err(is_in_state(node, row.value.state)),
            None => Err(not_joined(node)),
        }
    }

    /// Refuses a call of another boot than the one that has joined, such as a clone's. `false`: the row has changed since it was read.
    pub(crate) async fn is_of_boot(&self, node: &str, row: &Read<NodeRow>, boot: &str) -> Result<bool> {
        if row.value.boot == boot {
            return Ok(true);
        }
        match self.has_changed(node, row).await? {
            true => Ok(false),
            false => Err(Error::new(Kind::Busy, format!("node {node} has joined with another boot")).into()),
        }
    }

    /// Takes a node's word that it has nothing of a claim any more.
    pub async fn detached(
        self: &Arc<Self>,
        driving: &Arc<Driving>,
        caller: &Identity,
        owed: Owed,
    ) -> Result<Accepted> {
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
        let end = ClaimEnd { name, node: caller.name.clone(), call, owed };
        let trying = Arc::new(Trying::End(end.into()));
        let deadline = Instant::now() + CONTROLLER;
        for _ in 0..TRIES {
            match self.try_in_turn(driving, &trying, deadline).await? {
                Tried::Ended => return Ok(Accepted {}),
                Tried::Late => break,
                _ => {}
            }
        }
        Err(busy(trying.name()))
    }

    /// Has the end of a claim step over a record. `None`: a row has changed since it was read.
    pub(crate) async fn step_end(&self, record: &Record, end: &ClaimEnd) -> Result<Option<ClaimStep<'_>>> {
        let ClaimEnd { name, node, call, owed } = end;
        let is_named = !owed.claim.is_empty();
        let is_meant =
            |claim: &&Claim| (is_named && claim.id == owed.claim) || call.as_ref() == Some(&claim.call);
        let waits = |queued: &Queued| queued.claim.node == *node && is_meant(&queued.claim.as_ref());
        let step = |after, guards| ClaimStep { after, guards, place: None, awaits: Awaits::End };
        let row = match self.node(node).await? {
            Some(row) if row.value.state == NodeState::Blocked => self.unblocked(node).await?,
            row => row,
        };
        let claim = record.claim_at(&owed.consumer, node).filter(is_meant);
        if claim.is_none() && !record.queue.iter().any(waits) {
            // It ended before. A claim of a later call has another id, and stays.
            return Ok(Some(step(record.clone(), Vec::new())));
        }
        let Some(row) = row else { return Err(not_joined(node)) };
        if !self.is_of_boot(node, &row, &owed.boot).await? {
            return Ok(None);
        }
        let plugin = &record.volume.plugin;
        let around = self.around_row(record, Some(row.clone())).await?;
        let guards = vec![node_guard(node, &row), plugin_guard(plugin, around.plugin.as_ref())];
        let Some(claim) = claim else {
            let mut after = record.clone();
            after.queue.retain(|queued| !waits(queued));
            return Ok(Some(step(after, guards)));
        };
        let is_other = |other: &Claim| {
            other.node == *node && other.consumer != owed.consumer && other.state == ClaimState::Taken
        };
        if owed.still_staged && !record.claims.iter().any(is_other) {
            let text = format!("{name} is still staged on node {node}, which has no other claim of it");
            return Err(Error::new(Kind::Busy, text).into());
        }
        if matches!(claim.state, ClaimState::NodeDetached | ClaimState::ControllerDetached) {
            return Ok(Some(step(record.clone(), Vec::new())));
        }
        let event = ClaimEvent::Detached { consumer: owed.consumer.clone() };
        let after = rules::step(&around.claims(record, node), event);
        let (after, _) = after.map_err(|refusal| rules::refused(refusal, name, &owed.consumer))?;
        let after = left_attached(record, claim, around.has_refused_mounts(), around.stepped(record, after));
        Ok(Some(step(after, guards)))
    }

    /// Has a claim released, and waits until it is free. Or returns the ID of the claim, if that is what is asked for.
    pub async fn release(&self, caller: &Identity, ask: ReleaseAsk) -> Result<Released> {
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
        if ask.asks_id {
            self.require_unblocked(caller).await?;
            let record = self.registry.record(name).await?;
            let claim = record.claim_at(&ask.consumer, &ask.node);
            return Ok(Released { claim: claim.map(|claim| claim.id.clone()).unwrap_or_default() });
        }
        let deadline = Instant::now() + limit;
        let Some(id) = self.begin_release(caller, &name, &ask).await? else { return Ok(Released::default()) };
        loop {
            let record = self.registry.record(name.clone()).await?;
            if record.claim_at(&ask.consumer, &ask.node).is_none_or(|claim| claim.id != id) {
                return Ok(Released::default());
            }
            let changed = async {
                tokio::select! {
                    changed = self.changed_elsewhere(&name, record.revision) => changed,
                    // The same call joins the release at another server.
                    () = self.presence.stopped() => Err(self.presence.cut_off()),
                }
            };
            let Ok(changed) = tokio::time::timeout_at(deadline, changed).await else {
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
            };
            changed?;
        }
    }

    /// Writes that a claim is released, or ends it by force. Returns its id. `None`: there is no such claim, or the one that is meant has
    /// ended.
    async fn begin_release(
        &self,
        caller: &Identity,
        name: &VolumeName,
        ask: &ReleaseAsk,
    ) -> Result<Option<String>> {
        for _ in 0..TRIES {
            let mut guards = self.guards_of(caller).await?;
            let record = self.registry.record(name.clone()).await?;
            let is_meant = |claim: &&Claim| ask.claim.is_empty() || claim.id == ask.claim;
            let Some(claim) = record.claim_at(&ask.consumer, &ask.node).filter(is_meant) else {
                return Ok(None);
            };
            let id = claim.id.clone();
            let event = match ask.force {
                true => by_force(&record, &ask.node, &ask.consumer),
                false => ClaimEvent::Release { consumer: ask.consumer.clone() },
            };
            let around = self.around(&record, &ask.node).await?;
            guards.extend(around.node.as_ref().map(|row| node_guard(&ask.node, row)));
            guards.push(plugin_guard(&record.volume.plugin, around.plugin.as_ref()));
            let mut claims = around.claims(&record, &ask.node);
            let mut refused = Ok(());
            // What was given up is tried again.
            for event in claim
                .blocked
                .iter()
                .map(|_| ClaimEvent::Continue { consumer: ask.consumer.clone() })
                .chain([event])
            {
                match rules::step(&claims, event) {
                    Ok((after, _)) => claims = after,
                    Err(refusal) => refused = Err(rules::refused(refusal, name, &ask.consumer)),
                }
            }
            refused?;
            let after = around.stepped(&record, claims);
            let after = match ask.force {
                true => after,
                false => left_attached(&record, claim, around.has_refused_mounts(), after),
            };
            if after == record || self.swap_granting(&record, after, guards).await?.is_some() {
                if ask.force {
                    tracing::warn!(%caller, volume = %name, node = ask.node, consumer = ask.consumer, "a claim was ended by force");
                }
                self.wake(name);
                return Ok(Some(id));
            }
        }
        Err(busy(name))
    }
}

/// Returns the claims of a volume that their nodes have to release.
pub fn due_releases(record: &Record) -> impl Iterator<Item = Due> {
    let is_due = |claim: &&Claim| claim.releasing && claim.state == ClaimState::Taken;
    record.claims.iter().filter(is_due).map(|claim| {
        let changed = ClaimChanged {
            claim: claim.id.clone(),
            namespace: record.name.namespace.clone(),
            volume: record.name.volume.clone(),
            consumer: claim.consumer.clone(),
            state: "releasing".to_owned(),
        };
        Due { node: claim.node.clone(), is: Is::Changed(changed) }
    })
}

/// Returns the answer to a call whose claim is taken.
pub(crate) fn granted(record: &Record, caller: &Identity, wanted: &Claim) -> Result<Granted> {
    let claim = record.claim_at(&wanted.consumer, &wanted.node);
    let claim = claim.ok_or_else(|| Error::internal("a claim was granted without a claim"))?;
    let volume = Some(view::granted_row(record, claim, caller));
    let attached = record.attachment(&wanted.node);
    // The context may contain a secret, so it is for the claim's node alone.
    let is_own = caller.role == Role::Node && caller.name == wanted.node;
    let publish_context = attached.filter(|_| is_own).map(|at| at.publish_context.clone());
    Ok(Granted {
        claim: claim.id.clone(),
        volume,
        publish_context: publish_context.unwrap_or_default(),
        external_node_id: attached.and_then(|at| at.node_id.clone()).unwrap_or_default(),
        revision: record.revision,
    })
}

/// Returns the answer to a call that waits for its controller, if the outcome of the controller's call grants it by the same rules. The
/// outcome stands in etcd, and its transaction has compared what a claim needs: the rows of the cluster, this server, the node and the plugin.
/// `None`: the claim has to try again.
fn granted_by(outcome: &CallOutcome, wanted: &Wanted, found: Option<&Found>) -> Option<Granted> {
    let CallOutcome { record, node, boot, claims } = outcome;
    let Wanted { caller, claim: asked, .. } = wanted;
    // The row of another caller is not compared.
    let is_own = caller.role == Role::Node && caller.name == wanted.node && *node == wanted.node;
    let may_have = boot.as_ref() == Some(&wanted.boot);
    let claim = record.claim_at(&asked.consumer, node)?;
    let is_found = found.is_some_and(|found| !found.in_queue && found.id == claim.id);
    let is_same =
        is_found && claim.call == asked.call && claim.state == ClaimState::Taken && !claim.releasing;
    if !(is_own && may_have && is_same)
        || rules::registered(record).is_err()
        || queue::entry(record, &asked.call).is_some()
        || refuse_excluded(record, claim).is_err()
    {
        return None;
    }
    let (after, next) = rules::step(claims, ClaimEvent::Claim(asked.clone())).ok()?;
    let is_written = next == ClaimNext::Taken
        && (&after.claims, &after.attachments) == (&record.claims, &record.attachments);
    is_written.then(|| granted(record, caller, asked).ok()).flatten()
}

/// Returns the error of a claim that waits for its controller longer than its caller may. The claim goes on.
fn not_yet(wanted: &Wanted, last: Option<String>) -> ServerError {
    let Wanted { name, claim, .. } = wanted;
    let last = last.map(|error| format!("; the last try: {error}")).unwrap_or_default();
    let text = format!("{name} is not attached yet for {}{last}", claim.consumer);
    Error::new(Kind::TimedOut, text).with(|details| details.step = Some(Step::Attach)).into()
}

/// Returns why a node has no name by which a plugin's controller can attach a volume to it.
fn no_node_id(node: &str, record: &Record, around: &Around) -> ServerError {
    let plugin = &record.volume.plugin;
    match around.other_of_node_id(record, node) {
        Some(other) => {
            let text = format!("plugin {plugin} has the same name for node {node} as for node {other}");
            Error::new(Kind::NotAuthorized, text).into()
        }
        None => match around.refused_node_id(record) {
            Some(id) => {
                let why = match around.has_first_name(record) {
                    true => "than it had first",
                    false => "than its own: another node has it",
                };
                let text = format!(
                    "node {node} has another name by plugin {plugin} {why}, {id:?}, and no operator has accepted that"
                );
                Error::new(Kind::NotAuthorized, text).into()
            }
            None => {
                let text = format!("node {node} has not reported its name by plugin {plugin}");
                Error::new(Kind::PluginUnavailable, text).into()
            }
        },
    }
}

/// Returns the event that ends a claim by an operator's word. It stands for the node's. The controller detaches the volume before another node gets
/// it.
pub fn by_force(record: &Record, node: &str, consumer: &str) -> ClaimEvent {
    let consumer = consumer.to_owned();
    match record.attachment(node) {
        Some(_) => ClaimEvent::Detached { consumer },
        None => ClaimEvent::Forget { consumer },
    }
}

/// Returns the error of a claim whose secrets are not here, and no controller's host gets them.
fn secrets_needed(wanted: &Wanted, plugin: &str) -> ServerError {
    let Wanted { name, claim, .. } = wanted;
    let text = format!(
        "{name}: the claim of {} was refused: plugin {plugin} attaches volumes, and secrets of a call, or a credential other than csid.{}.NAME, reach no controller in a cluster",
        claim.consumer, name.namespace
    );
    Error::new(Kind::SecretRequired, text).into()
}

fn unseen(node: &str, plugin: &str) -> ServerError {
    let text = format!("node {node} has not reported whether plugin {plugin} attaches volumes");
    Error::new(Kind::PluginUnavailable, text).into()
}
