//! Puts a request into the queue of its volume, and waits for the answer.

use std::sync::Arc;

use tokio::sync::oneshot;

use crate::error::Result;
use crate::store::rows::VolumeKey;
use crate::volume::api::requests::Wait;
use crate::volume::context::Context;
use crate::volume::errors::operation::OperationError;
use crate::volume::errors::volume::VolumeError;
use crate::volume::operation::request::{OperationRequest, OperationResponse, Waiter};
use crate::volume::operation::table::{Begin, Progress};

pub(in crate::volume) type PendingResponse = oneshot::Receiver<Result<OperationResponse>>;

impl Context {
    /// Queues a request at the actor of its volume.
    pub(in crate::volume) fn ask(
        self: &Arc<Self>,
        volume: &VolumeKey,
        uid: u32,
        work: OperationRequest,
        wait: Wait,
    ) -> Result<PendingResponse> {
        self.ask_and_note(volume, uid, work, wait, None)
    }

    /// Queues a request likewise. `taken` receives a message when the actor has not refused it.
    pub(in crate::volume) fn ask_and_note(
        self: &Arc<Self>,
        volume: &VolumeKey,
        uid: u32,
        work: OperationRequest,
        wait: Wait,
        taken: Option<oneshot::Sender<()>>,
    ) -> Result<PendingResponse> {
        if self.is_stopping() {
            return Err(OperationError::ShuttingDown.into());
        }
        self.changeable()?;
        if volume.handle.is_lost() {
            return Err(VolumeError::unidentified(volume, &work.subject()).into());
        }
        let kind = work.kind();
        let begin = Begin {
            kind,
            subject: Some(work.subject()),
            volume,
            uid,
            id: wait.operation,
            deadline: wait.deadline,
            step: Progress::new(),
        };
        let ticket = self.operations.begin(begin)?;
        if kind.takes() {
            self.leaving.refuse(&volume.plugin)?;
        }
        let (reply, answer) = oneshot::channel();
        let Wait { arrived, deadline, hold, .. } = wait;
        let waiter = Waiter { ticket, arrived, deadline, hold, taken, reply };
        self.directory.ask(volume, work, waiter)?;
        Ok(answer)
    }

    /// Waits for the response of the actor. An actor ends without one if csid stops or the journal is damaged.
    pub(in crate::volume) async fn answered(&self, answer: PendingResponse) -> Result<OperationResponse> {
        answer.await.unwrap_or_else(|_| {
            Err(self.store.writable().err().unwrap_or_else(|| OperationError::ShuttingDown.into()))
        })
    }
}
