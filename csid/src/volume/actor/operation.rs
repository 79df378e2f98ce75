//! An operation in the queue of a volume, and the callers that wait for it.

use std::sync::Arc;
use std::time::Instant;

use crate::error::{Error, Kind, Result, Step};
use crate::store::registry::VolumeName;
use crate::store::rows::VolumeKey;
use crate::volume::context::Context;
use crate::volume::errors::volume::VolumeError;
use crate::volume::model::subject::ClaimKey;
use crate::volume::model::volume::Volume;
use crate::volume::operation::request::{ControllerRequest, OperationRequest, OperationResponse, Waiter};
use crate::volume::operation::table::{Begin, Progress, Ticket};

pub(in crate::volume) struct Operation {
    pub(in crate::volume) work: OperationRequest,
    pub(in crate::volume) waiters: Vec<Waiter>,
    pub(in crate::volume) step: Progress,
    /// When the operation began, if another one had its turn since. `None`: it has not begun.
    pub(in crate::volume) begun: Option<Instant>,
    /// The values that callers gave to be held until the end, also those of callers that have left.
    holds: Vec<Arc<dyn Send + Sync>>,
    /// The ticket of the last caller that left before the end. An operation without callers is listed under its name.
    left: Option<Ticket>,
    /// The place among the waiting operations. 0: it has not waited.
    pub(in crate::volume) number: u64,
    /// Whether claims were in its way at the last try, and its consumer had none.
    pub(in crate::volume) lacks_claim: bool,
    /// The claim that waits at the servers of a cluster, and its uid. Its row is there until the operation has the claim, or the claim is
    /// ended. `None`: it does not wait there.
    pub(in crate::volume) queued: Option<(ClaimKey, u32)>,
}

impl Operation {
    pub(in crate::volume) fn new(work: OperationRequest) -> Self {
        Operation {
            work,
            waiters: Vec::new(),
            step: Progress::new(),
            begun: None,
            holds: Vec::new(),
            left: None,
            number: 0,
            lacks_claim: false,
            queued: None,
        }
    }

    /// Returns a copy of the request for the executor. Secrets that are not needed again move to the copy.
    pub(in crate::volume) fn request(&mut self) -> OperationRequest {
        let request = self.work.clone();
        self.work.drop_used_secrets();
        request
    }

    /// Returns whether the operation ends when its last caller leaves. A creation does as long as the plugin was not asked.
    pub(in crate::volume) fn ends_with_its_callers(&self) -> bool {
        let has_not_begun = || self.work.creates() && self.step.get() == Step::Queued;
        self.work.is_undone() || self.step.is_unasked() || has_not_begun()
    }

    /// Returns whether the end of a claim on any volume may let the operation continue.
    pub(in crate::volume) fn waits_for_another_volume(&self) -> bool {
        self.step.get() == Step::WaitingForAnotherVolume
    }

    /// Returns the names that callers gave this operation.
    pub(in crate::volume) fn names(&self) -> Vec<String> {
        self.waiters
            .iter()
            .filter(|waiter| waiter.ticket.named)
            .map(|waiter| waiter.ticket.id.clone())
            .collect()
    }

    pub(in crate::volume) fn join(&mut self, shared: &Context, mut waiter: Waiter) {
        shared.operations.follow(&waiter.ticket, &self.step);
        if let Some(taken) = waiter.taken.take() {
            // A caller that has gone needs no message.
            let _ = taken.send(());
        }
        if let Some(arrived) = waiter.arrived {
            self.step.note_arrival(arrived);
        }
        self.left = None;
        self.holds.extend(waiter.hold.clone());
        self.waiters.push(waiter);
    }

    /// Lists an operation without callers, under the name that its caller gave it before csid restarted. `None`: it is listed
    /// already, or cannot be.
    pub(in crate::volume) fn anonymous_ticket(
        &self,
        shared: &Context,
        volume: &VolumeKey,
        rows: &Volume,
    ) -> Option<Ticket> {
        if !self.waiters.is_empty() || self.left.is_some() {
            return None;
        }
        let (uid, id) = match &self.work {
            OperationRequest::Heal { uid, .. }
            | OperationRequest::Continue { uid, .. }
            | OperationRequest::Unbind { uid, .. }
            | OperationRequest::Enlarge { uid, .. } => (*uid, None),
            work => {
                let row = rows.mount(work.subject().mount()?)?;
                (row.uid, row.operations.first().cloned())
            }
        };
        let begin = Begin {
            kind: self.work.kind(),
            subject: Some(self.work.subject()),
            volume,
            uid,
            id,
            deadline: None,
            step: self.step.clone(),
        };
        shared.operations.begin(begin).ok()
    }

    /// Returns whether a caller's deadline has passed. That caller is answered, unless the outcome is decided.
    pub(in crate::volume) fn expire(&mut self, now: Instant, volume: &VolumeKey) -> bool {
        let is_late = |waiter: &Waiter| waiter.deadline.is_some_and(|at| at <= now);
        if self.step.is_decided() {
            return self.waiters.iter().any(is_late);
        }
        let (late, rest): (Vec<Waiter>, Vec<Waiter>) =
            std::mem::take(&mut self.waiters).into_iter().partition(is_late);
        self.waiters = rest;
        let found = !late.is_empty();
        let step = self.step.get();
        let text = match &self.work {
            work if self.ends_with_its_callers() && step == Step::Queued => {
                format!(
                    "the deadline passed while the {} waited for its turn; nothing was begun",
                    work.kind()
                )
            }
            work if self.ends_with_its_callers() => {
                let kind = work.kind();
                format!(
                    "the deadline passed at `{step}`; the {kind} is rolled back unless another caller waits"
                )
            }
            _ if step == Step::WaitingUntilUnused => {
                "the volume is in use, and is expanded only while it is not; the deadline passed".to_owned()
            }
            _ => {
                format!("the deadline passed at `{step}`; the operation goes on: repeat the call for its end")
            }
        };
        let text = match self.step.said() {
            said if said.is_empty() => text,
            said => format!("{text}; the plugin's last answer was {said}"),
        };
        self.part(late, volume, &self.step.explained(Error::new(Kind::TimedOut, text)));
        found
    }

    /// Returns whether the caller that cancelled is one of this operation's. It is answered, unless the outcome is decided.
    pub(in crate::volume) fn withdraw(&mut self, number: u64, volume: &VolumeKey) -> bool {
        let is_his = |waiter: &Waiter| waiter.ticket.number == number;
        if self.step.is_decided() {
            return self.waiters.iter().any(is_his);
        }
        let (gone, rest): (Vec<Waiter>, Vec<Waiter>) =
            std::mem::take(&mut self.waiters).into_iter().partition(is_his);
        self.waiters = rest;
        let found = !gone.is_empty();
        self.part(gone, volume, &Error::new(Kind::Cancelled, "cancelled by CancelOperation"));
        found
    }

    /// Answers callers that leave while the operation continues.
    fn part(&mut self, leaving: Vec<Waiter>, volume: &VolumeKey, error: &Error) {
        let last = self.reply(leaving, volume, &Err(error.clone()));
        if let Some(last) = last.filter(|_| self.waiters.is_empty()) {
            last.left();
            self.left = Some(last);
        }
    }

    pub(in crate::volume) fn fail(&mut self, volume: &VolumeKey, error: &Error) {
        let waiters = std::mem::take(&mut self.waiters);
        self.reply(waiters, volume, &Err(error.clone()));
    }

    pub(in crate::volume) fn answer(mut self, volume: &VolumeKey, result: Result<OperationResponse>) {
        let waiters = std::mem::take(&mut self.waiters);
        self.reply(waiters, volume, &result);
    }

    /// Answers callers, and returns the ticket of the last one. `None`: there were none.
    fn reply(
        &self,
        waiters: Vec<Waiter>,
        volume: &VolumeKey,
        result: &Result<OperationResponse>,
    ) -> Option<Ticket> {
        let (mut last, name) = (None, self.work.subject().volume());
        for Waiter { ticket, reply, .. } in waiters {
            let result =
                result.clone().map_err(|error| located(error, &name, volume, &ticket.id, self.step.get()));
            // A caller that has gone is answered when it repeats the call.
            let _ = reply.send(result);
            last = Some(ticket);
        }
        last
    }

    /// Returns why `asked` is refused while this is under way or queued. A delete conflicts with another uid's create of the same
    /// volume that has callers, and a create with such a delete. `None`: it is not refused.
    pub(in crate::volume) fn refuses(&self, asked: &OperationRequest, shared: &Context) -> Option<Error> {
        let (
            OperationRequest::Call { target, call: ControllerRequest::Create { to_delete }, .. },
            OperationRequest::Call {
                target: other,
                call: ControllerRequest::Create { to_delete: asked_to_delete },
                ..
            },
        ) = (&self.work, asked)
        else {
            return self.work.refuses(asked);
        };
        if self.waiters.is_empty()
            || target.name != other.name
            || to_delete == asked_to_delete
            || asked.ends(&self.work)
        {
            return None;
        }
        let name = &target.name;
        let under_way = shared.operations.creating(name).filter(|_| *asked_to_delete);
        Some(under_way.map_or_else(
            || VolumeError::InTransition { name: name.clone() }.into(),
            |of| VolumeError::being_created(name, of).into(),
        ))
    }
}

/// Adds the volume, the plugin, the operation and the step to an error.
fn located(error: Error, name: &VolumeName, volume: &VolumeKey, operation: &str, step: Step) -> Error {
    error.with(|details| {
        details.namespace.get_or_insert_with(|| name.namespace.clone());
        details.volume.get_or_insert_with(|| name.volume.clone());
        details.plugin.get_or_insert_with(|| volume.plugin.clone());
        details.operation.get_or_insert_with(|| operation.to_owned());
        details.step.get_or_insert(step);
    })
}
