//! Performs the effects of a claim: the calls to the controller, and the unmounting on this node. The next step is decided
//! elsewhere.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, Kind, Obstacle, Result, Step};
use crate::fault;
use crate::plugin::{CallContext, Controller, RpcError, RpcKind, RpcOutcome, is_attached_otherwise};
use crate::secret::Secrets;
use crate::store::registry::{Claim, ClaimState, Record, Registration};
use crate::volume::control::engine::Engine;
use crate::volume::errors::claim::ClaimError;
use crate::volume::errors::operation::OperationError;
use crate::volume::errors::volume::VolumeError;
use crate::volume::lifecycle::given_values;
use crate::volume::lifecycle::known_id;
use crate::volume::model::claim;
use crate::volume::model::claim::{ClaimAction, ClaimEffect, ClaimOutcome};
use crate::volume::model::subject::{ClaimKey, Subject};
use crate::volume::operation::orders::abandoned;
use crate::volume::seam::Site;
use crate::volume::servers::{Granted, ServerFailure, Servers};
use crate::volume::waits::PluginWaits;

/// How long a caller that does not need it waits for a server to learn that a claim has ended.
const BRIEF: Duration = Duration::from_secs(1);

/// Returns a failure of a claim that has waited at the servers. A claim that no server could be asked for keeps its place for a while.
fn still_queued(failure: ServerFailure) -> ServerFailure {
    match failure {
        ServerFailure::NotSent(error) | ServerFailure::Unknown(error) => {
            let text = format!("the claim waits at the cluster's servers, and none has answered: {error}");
            ServerFailure::Queued(Error::new(Kind::ClaimConflict, text))
        }
        failure => failure,
    }
}

fn unanswered() -> ServerFailure {
    let text = format!("the cluster's server did not answer within {} s", BRIEF.as_secs());
    ServerFailure::Unknown(Error::new(Kind::Unavailable, text))
}

/// The data that an effect of a claim returned, for the row.
#[derive(Clone, Default)]
pub(in crate::volume) struct Facts {
    pub(in crate::volume) publish_context: Option<BTreeMap<String, String>>,
    /// What a server has granted.
    pub(in crate::volume) granted: Option<Granted>,
    pub(in crate::volume) error: Option<String>,
}

/// A failed effect of a claim, with its outcome for the claim.
pub(in crate::volume) struct ClaimEffectFailure {
    pub(in crate::volume) outcome: ClaimOutcome,
    pub(in crate::volume) error: Error,
    /// Whether the plugin lacks the RPC or does not offer it. Its capabilities are then queried again.
    pub(in crate::volume) unimplemented: bool,
    /// Whether the claim waits at the servers.
    pub(in crate::volume) queued: bool,
    /// Whether the servers have given the claim of another volume, which has the name now.
    pub(in crate::volume) replaced: bool,
}

impl ClaimEffectFailure {
    fn new(outcome: ClaimOutcome, error: Error) -> ClaimEffectFailure {
        ClaimEffectFailure { outcome, error, unimplemented: false, queued: false, replaced: false }
    }
}

/// The arguments of a controller call for a claim's attachment.
struct ControllerCall<'a> {
    controller: Controller,
    /// The plugin's id of the volume.
    id: &'a str,
    /// The plugin's name of the node.
    node_id: String,
    claim: &'a Claim,
    registration: &'a Registration,
    secrets: Option<Secrets>,
    secrets_forgotten: bool,
    patience: Duration,
}

impl ControllerCall<'_> {
    fn request(&self) -> CallContext<'_> {
        let ControllerCall { claim, secrets, secrets_forgotten, patience, .. } = self;
        let (uid, secrets) = (claim.uid, secrets.as_ref());
        CallContext { uid, secrets, secrets_forgotten: *secrets_forgotten, patience: *patience }
    }
}

impl<S: Site> Engine<'_, S> {
    pub(in crate::volume::control) async fn perform_claim(
        &mut self,
        record: &Record,
        effect: &ClaimEffect,
    ) -> Result<Facts, ClaimEffectFailure> {
        let mut facts = Facts::default();
        match effect.action {
            ClaimAction::Attach => facts.publish_context = Some(self.attach(record, effect).await?),
            ClaimAction::NodeDetach => self.node_detach(record, effect).await?,
            ClaimAction::Detach => self.detach(record, effect).await?,
            ClaimAction::ServerClaim => facts.granted = Some(self.claim_at_servers(record, effect).await?),
            ClaimAction::ServerDetached => self.report_end(record, effect).await?,
        }
        Ok(facts)
    }

    /// Has a server of the cluster grant the claim. The call goes on when its callers have left: it is bounded in time, and its
    /// outcome matters.
    async fn claim_at_servers(
        &mut self,
        record: &Record,
        effect: &ClaimEffect,
    ) -> Result<Granted, ClaimEffectFailure> {
        if let Some(kind) = self.site.operation().signals.borrow().abandon {
            return Err(ClaimEffectFailure::new(
                ClaimOutcome::NotSent(None),
                OperationError::Stopped { kind }.into(),
            ));
        }
        self.site.operation().step.set(Step::Claim);
        let row = record.claim(&effect.consumer).ok_or_else(no_row)?;
        let claim = Claim { secrets_given: self.brings_secrets, ..row.clone() };
        let servers = self.servers()?;
        let wait = self.site.operation().waits_until;
        let wait = wait.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()));
        let mark = self.answer.as_ref().and_then(|answer| answer.mark().cloned());
        let asked = servers.claim(record.name.clone(), claim, wait, mark);
        let waits = !wait.is_zero() && self.site.operation().queued.contains(&effect.consumer);
        let asked = fault::around("Claim", asked).await;
        if let Some(answer) = &self.answer {
            match &asked {
                // An earlier try may have been without an answer.
                Err(ServerFailure::Changed(_)) => answer.set_compared(false),
                Err(ServerFailure::NotSent(_)) => {}
                _ => answer.set_compared(true),
            }
        }
        let granted = asked.map_err(|failure| {
            let failure = if waits { still_queued(failure) } else { failure };
            of_server(failure, Step::Claim)
        })?;
        if granted.record.volume != record.volume {
            let replaced = VolumeError::Replaced { name: record.name.clone() }.into();
            return Err(ClaimEffectFailure {
                replaced: true,
                ..ClaimEffectFailure::new(ClaimOutcome::Unknown, replaced)
            });
        }
        Ok(granted)
    }

    /// Reports to the servers of the cluster that this node has nothing of the claim any more.
    async fn report_end(&mut self, record: &Record, effect: &ClaimEffect) -> Result<(), ClaimEffectFailure> {
        let is_other = |claim: &Claim| {
            claim.consumer != effect.consumer
                && matches!(claim.state, ClaimState::Pending | ClaimState::Taken)
        };
        let still_staged = self.site.is_staged();
        if still_staged && !record.claims.iter().any(is_other) {
            let error = Error::new(Kind::Busy, "this node has not unmounted the volume yet");
            return Err(again(error));
        }
        self.site.operation().step.set(Step::Release);
        let claim = record.claim(&effect.consumer).ok_or_else(no_row)?.clone();
        let servers = self.servers()?;
        let reported = servers.detached(record.name.clone(), claim, still_staged);
        let reported = fault::around("Detached", reported);
        let reported = match self.is_brief {
            true => tokio::time::timeout(BRIEF, reported).await.unwrap_or_else(|_| Err(unanswered())),
            false => reported.await,
        };
        reported.map_err(|failure| of_server(failure, Step::Release))
    }

    fn servers(&self) -> Result<Arc<dyn Servers>, ClaimEffectFailure> {
        let alone = || unreached(Error::new(Kind::Unavailable, "csid.toml names no cluster"));
        self.records.servers.clone().ok_or_else(alone)
    }

    async fn attach(
        &mut self,
        record: &Record,
        effect: &ClaimEffect,
    ) -> Result<BTreeMap<String, String>, ClaimEffectFailure> {
        if let Some(kind) = self.site.operation().signals.borrow().abandon {
            return Err(ClaimEffectFailure::new(
                ClaimOutcome::NotSent(None),
                OperationError::Stopped { kind }.into(),
            ));
        }
        self.site.operation().step.set(Step::Attach);
        let asking = self.asking(record, effect).await?;
        let usage = asking.registration.usage(asking.claim.usage.capability);
        let read_only = claim::reader_only(asking.claim.usage.capability.access_mode);
        let publish =
            asking.controller.publish(asking.id, &asking.node_id, &usage, read_only, asking.request());
        let mut signals = self.site.operation().signals.clone();
        tokio::select! {
            biased;
            done = fault::around("ControllerPublishVolume", publish) => {
                done.map_err(|error| attach_failed(error, effect.from.is_none()))
            }
            kind = abandoned(&mut signals) => {
                Err(ClaimEffectFailure::new(ClaimOutcome::Unknown, OperationError::Stopped { kind }.into()))
            }
        }
    }

    /// Unmounts every mount of the consumer on this node.
    async fn node_detach(&mut self, record: &Record, effect: &ClaimEffect) -> Result<(), ClaimEffectFailure> {
        if effect.node != self.records.node {
            let text = format!("the claim is of node {}, which has to release it itself", effect.node);
            let error = Error::new(Kind::Busy, text).obstructed_by(Obstacle::OtherNode);
            return Err(ClaimEffectFailure::new(ClaimOutcome::Again, error));
        }
        let key = ClaimKey::new(&record.name, &effect.consumer);
        self.site.unmount_all(&key).await.map_err(again)
    }

    async fn detach(&mut self, record: &Record, effect: &ClaimEffect) -> Result<(), ClaimEffectFailure> {
        if effect.node == self.records.node && self.site.is_staged() {
            let error = Error::new(Kind::Busy, "this node has not unmounted the volume yet");
            return Err(ClaimEffectFailure::new(ClaimOutcome::Again, error));
        }
        self.site.operation().step.set(Step::Detach);
        let asking = self.asking(record, effect).await?;
        let unpublish = asking.controller.unpublish(asking.id, &asking.node_id, asking.request());
        tokio::select! {
            biased;
            done = fault::around("ControllerUnpublishVolume", unpublish) => done.map_err(|error| failed(error, RpcKind::Detach)),
            // An order to forget ends the wait for a detach. The outcome is then unknown.
            () = self.site.operation().orders.came() => Err(ClaimEffectFailure::new(ClaimOutcome::Unknown, OperationError::Forgotten.into())),
        }
    }

    /// Returns the node id to detach from. An older csid may have written none: then it is the accepted one of this node. To CSI no
    /// node id means every node.
    fn attached_under(
        &self,
        record: &Record,
        effect: &ClaimEffect,
        journaled: Option<&str>,
    ) -> Result<String, ClaimEffectFailure> {
        let is_here = effect.node == self.records.node;
        let plugin = &record.volume.plugin;
        let known = match journaled {
            None if is_here => self.records.plugins.node_id(plugin),
            journaled => journaled.unwrap_or_default().to_owned(),
        };
        if !known.is_empty() {
            return Ok(known);
        }
        let unknown = ClaimError::UnknownAttachment {
            name: record.name.clone(),
            node: effect.node.clone(),
            plugin: plugin.clone(),
        };
        // The plugin may name this node later.
        Err(if is_here { unreached(unknown.into()) } else { unsent(unknown.into()) })
    }

    /// Collects the arguments of the controller call for this effect. On failure the controller was not called.
    async fn asking<'a>(
        &mut self,
        record: &'a Record,
        effect: &ClaimEffect,
    ) -> Result<ControllerCall<'a>, ClaimEffectFailure> {
        let claim = record.claim(&effect.consumer).ok_or_else(no_row)?;
        let registration = record.registration.as_ref().ok_or_else(no_row)?;
        let at = record.attachment(&effect.node).ok_or_else(no_row)?;
        let node_id = match effect.action {
            ClaimAction::Attach => {
                let unknown = || unsent(ClaimError::NoNodeId { plugin: record.volume.plugin.clone() }.into());
                at.node_id.clone().ok_or_else(unknown)?
            }
            _ => self.attached_under(record, effect, at.node_id.as_deref())?,
        };
        let id = known_id(&record.volume, &Subject::Volume(record.name.clone())).map_err(unsent)?;
        let had = record.attach_secrets(&effect.node);
        let credential = had.credential.as_ref().or(registration.spec.credential.as_ref());
        let secrets = self.secrets_of(credential).await.map_err(unsent)?;
        if effect.action == ClaimAction::Detach && secrets.is_none() && had.given {
            return Err(unsent(ClaimError::SecretsNeeded { name: record.name.clone() }.into()));
        }
        let secrets_forgotten = (had.given && self.site.operation().secrets.is_none())
            || self.others_secrets(record, Some(&claim.consumer), credential, secrets.is_some());
        let controller = self.site.controller("ControllerPublishVolume").await.map_err(unreached)?;
        let controller = controller.hiding(given_values(registration, &record.attachments));
        let patience = self.records.config.borrow().deadlines.operation;
        Ok(ControllerCall {
            controller,
            id,
            node_id,
            claim,
            registration,
            secrets,
            secrets_forgotten,
            patience,
        })
    }

    /// Returns the secrets of the call, or those of the credential. `None`: there are neither.
    async fn secrets_of(&self, credential: Option<&String>) -> Result<Option<Secrets>> {
        match (&self.site.operation().secrets, credential) {
            (Some(given), _) => Ok(Some(given.clone())),
            (None, Some(name)) => self.site.credential(name).await.map(Some),
            (None, None) => Ok(None),
        }
    }
}

fn no_row() -> ClaimEffectFailure {
    unsent(Error::internal("a claim's row is gone"))
}

/// Makes the failure of a call that was not sent, and will not be sent by the next try either.
fn unsent(error: Error) -> ClaimEffectFailure {
    ClaimEffectFailure::new(ClaimOutcome::NotSent(Some(error.message.clone())), error)
}

/// Makes the failure of a call that could not be sent.
fn unreached(error: Error) -> ClaimEffectFailure {
    ClaimEffectFailure::new(ClaimOutcome::NotSent(None), error)
}

fn again(error: Error) -> ClaimEffectFailure {
    ClaimEffectFailure::new(ClaimOutcome::Again, error)
}

/// Returns the outcome of a call to a server of the cluster that failed.
fn of_server(failure: ServerFailure, step: Step) -> ClaimEffectFailure {
    let (outcome, error) = match failure {
        ServerFailure::NotSent(error) => (ClaimOutcome::NotSent(None), error),
        ServerFailure::Unknown(error) => (ClaimOutcome::Unknown, error),
        // It may be granted at any time.
        ServerFailure::Queued(error) => {
            let error = error.with(|details| details.step = Some(step));
            return ClaimEffectFailure {
                queued: true,
                ..ClaimEffectFailure::new(ClaimOutcome::Unknown, error)
            };
        }
        // A caller that waits for another's claim is the actor's business.
        ServerFailure::Refused(error) if error.details.retryable && error.kind != Kind::ClaimConflict => {
            (ClaimOutcome::Again, error)
        }
        ServerFailure::Refused(error) | ServerFailure::Changed(error) => {
            (ClaimOutcome::Hopeless(error.message.clone()), error)
        }
    };
    ClaimEffectFailure::new(outcome, error.with(|details| details.step = Some(step)))
}

/// Returns the outcome of a call to the controller that failed.
pub(in crate::volume) fn failed(error: RpcError, kind: RpcKind) -> ClaimEffectFailure {
    let meaning = error.outcome(kind);
    let error = Error::from(error);
    let outcome = match meaning {
        RpcOutcome::NotSent => ClaimOutcome::NotSent(None),
        RpcOutcome::Withheld => ClaimOutcome::NotSent(Some(error.message.clone())),
        RpcOutcome::Again { .. } => ClaimOutcome::Again,
        RpcOutcome::Refused | RpcOutcome::Unimplemented => ClaimOutcome::Hopeless(error.message.clone()),
        RpcOutcome::Unknown => ClaimOutcome::Unknown,
    };
    let unimplemented = meaning == RpcOutcome::Unimplemented;
    ClaimEffectFailure { unimplemented, ..ClaimEffectFailure::new(outcome, error) }
}

/// Returns the outcome of a failed attach. `is_first`: there was no attachment before. Another one that the plugin then finds is not
/// csid's, and is not detached.
fn attach_failed(error: RpcError, is_first: bool) -> ClaimEffectFailure {
    let is_anothers = is_first && is_attached_otherwise(error.code);
    let failure = failed(error, RpcKind::Attach);
    match is_anothers {
        true => unsent(failure.error),
        false => failure,
    }
}
