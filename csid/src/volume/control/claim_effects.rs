//! Performs the effects of a claim: the calls to the controller, and the unmounting on this node. The next step is decided
//! elsewhere.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::{Error, Kind, Obstacle, Result, Step};
use crate::fault;
use crate::plugin::{CallContext, Controller, RpcError, RpcKind, RpcOutcome};
use crate::secret::Secrets;
use crate::store::registry::{Claim, Record, Registration};
use crate::volume::control::engine::Engine;
use crate::volume::control::secrets::given_values;
use crate::volume::errors::claim::ClaimError;
use crate::volume::errors::operation::OperationError;
use crate::volume::lifecycle::known_id;
use crate::volume::model::claim;
use crate::volume::model::claim::{ClaimAction, ClaimEffect, ClaimOutcome};
use crate::volume::model::subject::{ClaimKey, Subject};
use crate::volume::operation::orders::abandoned;
use crate::volume::seam::Site;
use crate::volume::waits::PluginWaits;

/// A failed effect of a claim, with its outcome for the claim.
pub(in crate::volume) struct ClaimEffectFailure {
    pub(in crate::volume) outcome: ClaimOutcome,
    pub(in crate::volume) error: Error,
    /// Whether the plugin lacks the RPC or does not offer it. Its capabilities are then queried again.
    pub(in crate::volume) unimplemented: bool,
}

impl ClaimEffectFailure {
    fn new(outcome: ClaimOutcome, error: Error) -> ClaimEffectFailure {
        ClaimEffectFailure { outcome, error, unimplemented: false }
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
    ) -> Result<Option<BTreeMap<String, String>>, ClaimEffectFailure> {
        match effect.action {
            ClaimAction::Attach => self.attach(record, effect).await.map(Some),
            ClaimAction::NodeDetach => self.node_detach(record, effect).await.map(|()| None),
            ClaimAction::Detach => self.detach(record, effect).await.map(|()| None),
        }
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
            done = fault::around("ControllerPublishVolume", publish) => done.map_err(|error| failed(error, RpcKind::Attach)),
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
            ClaimAction::NodeDetach | ClaimAction::Detach => {
                self.attached_under(record, effect, at.node_id.as_deref())?
            }
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
        let controller = self.site.controller().await.map_err(unreached)?;
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
