//! Each effect of a claim, done: the controller's calls, and the unmounting of what the consumer has here. Nothing here decides
//! what comes next.

use std::collections::BTreeMap;
use std::time::Duration;

use tonic::Code;

use crate::error::{Error, Kind, Result};
use crate::fault;
use crate::plugin::{Class, Controller, Request, RpcError};
use crate::secret::Secrets;
use crate::store::registry::{Attachment, Claim, Record, Registration};
use crate::store::rows::Leg;
use crate::volume::claims::{self, Action, Effect, Outcome};
use crate::volume::control::abandoned;
use crate::volume::drive::Drive;
use crate::volume::secrets::told;
use crate::volume::{Authority, claim_words as words, say};

/// Why an effect of a claim did not come to be, and what that says about it.
pub(super) struct Failure {
    pub(super) outcome: Outcome,
    pub(super) error: Error,
}

/// What a controller is asked with for a claim's attachment.
struct Asking<'a> {
    controller: Controller,
    claim: &'a Claim,
    registration: &'a Registration,
    at: &'a Attachment,
    secrets: Option<Secrets>,
    secrets_forgotten: bool,
    patience: Duration,
}

impl Asking<'_> {
    fn request(&self) -> Request<'_> {
        let Asking { claim, secrets, secrets_forgotten, patience, .. } = self;
        let (uid, secrets) = (claim.uid, secrets.as_ref());
        Request { uid, secrets, secrets_forgotten: *secrets_forgotten, patience: *patience }
    }
}

impl Drive<'_> {
    pub(super) async fn perform_claim(
        &mut self,
        record: &Record,
        effect: &Effect,
    ) -> Result<Option<BTreeMap<String, String>>, Failure> {
        match effect.action {
            Action::Attach => self.attach(record, effect).await.map(Some),
            Action::NodeDetach => self.node_detach(record, effect).await.map(|()| None),
            Action::Detach => self.detach(record, effect).await.map(|()| None),
        }
    }

    async fn attach(
        &mut self,
        record: &Record,
        effect: &Effect,
    ) -> Result<BTreeMap<String, String>, Failure> {
        if let Some(kind) = self.control.borrow().abandon {
            return Err(Failure { outcome: Outcome::NotSent(None), error: say::stopped(kind) });
        }
        self.step.set("attach");
        let asking = self.asking(record, effect).await?;
        let usage = asking.registration.usage(asking.claim.usage.capability);
        let read_only = claims::reader_only(asking.claim.usage.capability.access_mode);
        let publish = asking.controller.publish(
            &record.volume.external_id,
            &asking.at.node_id,
            &usage,
            read_only,
            asking.request(),
        );
        let mut control = self.control.clone();
        tokio::select! {
            biased;
            done = fault::around("ControllerPublishVolume", publish) => done.map_err(|error| failed(error, true)),
            kind = abandoned(&mut control) => {
                Err(Failure { outcome: Outcome::Unknown, error: say::stopped(kind) })
            }
        }
    }

    /// Every mount of the consumer's on this node is unmounted.
    async fn node_detach(&mut self, record: &Record, effect: &Effect) -> Result<(), Failure> {
        if effect.node != self.shared.node {
            let text = format!(
                "{} has to let go itself; if it is gone for good: csictl release --force",
                effect.node
            );
            return Err(Failure { outcome: Outcome::Again, error: Error::new(Kind::Busy, text) });
        }
        let key = record.name.key(&effect.consumer);
        for mount in self.mounts_of(&key) {
            self.unmount(&mount, Authority::Any(0), false, Vec::new()).await.map_err(again)?;
        }
        Ok(())
    }

    async fn detach(&mut self, record: &Record, effect: &Effect) -> Result<(), Failure> {
        let volume = self.rows.volume();
        let is_here = effect.node == self.shared.node;
        if is_here
            && (volume.row.stage != Leg::Absent || volume.mounts.iter().any(|row| row.publish != Leg::Absent))
        {
            let error = Error::new(Kind::Busy, "this node has not let go of the volume yet");
            return Err(Failure { outcome: Outcome::Again, error });
        }
        self.step.set("detach");
        let asking = self.asking(record, effect).await?;
        let unpublish =
            asking.controller.unpublish(&record.volume.external_id, &asking.at.node_id, asking.request());
        fault::around("ControllerUnpublishVolume", unpublish).await.map_err(|error| failed(error, false))
    }

    /// What a controller is asked with for this effect; a failure: it was not asked.
    async fn asking<'a>(&mut self, record: &'a Record, effect: &Effect) -> Result<Asking<'a>, Failure> {
        let claim = record.claim(&effect.consumer).ok_or_else(no_row)?;
        let registration = record.registration.as_ref().ok_or_else(no_row)?;
        let at = record.attachment(&effect.node).ok_or_else(no_row)?;
        let had = record.attach_secrets(&effect.node);
        let credential = had.credential.as_ref().or(registration.spec.credential.as_ref());
        let secrets = self.secrets_of(credential).await.map_err(unsent)?;
        if effect.action == Action::Detach && secrets.is_none() && had.given {
            return Err(unsent(words::secret_required(&record.name, &claim.consumer)));
        }
        let secrets_forgotten = (had.given && self.secrets.is_none())
            || self.others_secrets(record, Some(&claim.consumer), credential, secrets.is_some());
        let controller = self.controller().await.map_err(unreached)?;
        let controller = controller.hiding(told(registration, &record.attachments));
        let patience = self.shared.config.borrow().deadlines.operation;
        Ok(Asking { controller, claim, registration, at, secrets, secrets_forgotten, patience })
    }

    /// The call's secrets, or those of the attachment's credential or the volume's.
    async fn secrets_of(&self, credential: Option<&String>) -> Result<Option<Secrets>> {
        match (&self.secrets, credential) {
            (Some(given), _) => Ok(Some(given.clone())),
            (None, Some(name)) => self.shared.credential(name).await.map(Some),
            (None, None) => Ok(None),
        }
    }
}

fn no_row() -> Failure {
    unsent(Error::internal("a claim's row is gone"))
}

/// Nobody was asked, nor will anybody be the next time.
fn unsent(error: Error) -> Failure {
    Failure { outcome: Outcome::NotSent(Some(error.message.clone())), error }
}

/// Nobody could be asked.
fn unreached(error: Error) -> Failure {
    Failure { outcome: Outcome::NotSent(None), error }
}

fn again(error: Error) -> Failure {
    Failure { outcome: Outcome::Again, error }
}

/// CSI rules 36 and 38: for an attach RESOURCE_EXHAUSTED means that something has to be detached first.
fn failed(error: RpcError, attaching: bool) -> Failure {
    let full = attaching && error.code == Code::ResourceExhausted;
    let class = error.class;
    let error = Error::from(error);
    let outcome = match class {
        _ if full => Outcome::Hopeless(error.message.clone()),
        Class::NotSent | Class::Shutdown => Outcome::NotSent(None),
        Class::Forbidden => Outcome::NotSent(Some(error.message.clone())),
        Class::Transient => Outcome::Again,
        Class::Refused | Class::Unimplemented => Outcome::Hopeless(error.message.clone()),
        Class::Unknown => Outcome::Unknown,
    };
    Failure { outcome, error }
}
