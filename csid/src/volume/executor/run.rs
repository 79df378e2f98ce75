//! Runs the part of `mounts` or `control` that an operation needs.

use std::sync::Arc;

use crate::error::Result;
use crate::store::registry::{Claim, VolumeName};
use crate::volume::errors::mount::MountError;
use crate::volume::executor::Executor;
use crate::volume::model::subject::{ClaimKey, Subject};
use crate::volume::operation::request::{OperationRequest, OperationResponse};
use crate::volume::seam::Control;

impl Executor<'_> {
    /// Runs a request. `names` are those that callers gave the operation, `ahead` the claims that wait before it.
    pub(in crate::volume) async fn run(
        mut self,
        request: OperationRequest,
        names: Vec<String>,
        ahead: &[Arc<Claim>],
    ) -> Result<OperationResponse> {
        self.own = request.is_restore() || matches!(request, OperationRequest::Heal { .. });
        match request {
            OperationRequest::Mount { mut wanted, claim, adopted: Some(paths), .. } => {
                Box::pin(self.adopt(&mut wanted, &paths, claim.as_deref(), ahead))
                    .await
                    .map(OperationResponse::Mounted)
            }
            OperationRequest::Mount { mut wanted, claim, target_fd, secrets, answer, .. } => {
                wanted.operations = names;
                self.operation.secrets = secrets;
                self.target_fd = target_fd;
                let mounted = match claim {
                    Some(claim) => Box::pin(self.mount_claimed(&mut wanted, &claim, ahead, answer)).await,
                    None => {
                        let is_used = self.row(&wanted.key).is_some();
                        self.operation.refuse_before_expansion(&VolumeName::of(&wanted.key), is_used)?;
                        self.mount(&wanted).await
                    }
                };
                mounted.map(OperationResponse::Mounted)
            }
            OperationRequest::Restore { mut wanted } => {
                let restored = Box::pin(self.restore(&mut wanted)).await;
                if let Err(error) = &restored {
                    self.still_waiting(&wanted.key, error).await;
                }
                restored.map(OperationResponse::Mounted)
            }
            OperationRequest::Unmount { key, authority, how, uncovered } => {
                if how.by_drain {
                    self.shared.records.require_drain()?;
                }
                let missing = self.row(&key).is_none();
                if let Some(uncovered) = uncovered {
                    self.uncover(&key, uncovered)?;
                }
                self.unmount(&key, authority, how.force, names).await?;
                self.control().give_back(&ClaimKey::of(&key)).await?;
                match missing && how.must_exist {
                    true => Err(MountError::NoMount {
                        tags: self.tags(&key),
                        foreign: self.foreign_mounts(),
                        key,
                    }
                    .into()),
                    false => Ok(OperationResponse::Gone),
                }
            }
            OperationRequest::Settle { key }
            | OperationRequest::Continue { subject: Subject::Mount(key), .. } => {
                self.settle(&key).await?;
                self.control().give_back(&ClaimKey::of(&key)).await.map(|()| OperationResponse::Gone)
            }
            OperationRequest::Heal { key, .. } => {
                Box::pin(self.heal(&key)).await.map(|()| OperationResponse::Gone)
            }
            OperationRequest::Claim { key, claim, secrets, answer, .. } => {
                self.operation.secrets = secrets;
                let mut record = self.control().claim(&key.volume, &claim, ahead, answer).await?;
                self.control().rebind(&mut record, &claim).await?;
                Ok(OperationResponse::Claimed(Box::new(record)))
            }
            OperationRequest::Release { key, authority, force, secrets, id } => {
                self.operation.secrets = secrets;
                self.control()
                    .release(&key, authority, force, id.as_deref())
                    .await
                    .map(|()| OperationResponse::Gone)
            }
            OperationRequest::Call { target, call, secrets } => {
                self.operation.secrets = secrets;
                self.control().call(&target, call).await
            }
            OperationRequest::Unbind { key, bound, .. } => {
                self.control().unbind(&key, &bound).await.map(|()| OperationResponse::Gone)
            }
            OperationRequest::Enlarge { key, secrets, .. } => {
                self.operation.secrets = secrets;
                Box::pin(self.enlarge(&key)).await.map(|()| OperationResponse::Gone)
            }
            OperationRequest::Continue { subject: Subject::Volume(name), .. } => {
                self.control().continue_call(&name).await.map(|()| OperationResponse::Gone)
            }
            OperationRequest::Continue { subject: Subject::Attachment { volume, node_id }, .. } => {
                self.control().continue_detach(&volume, &node_id).await.map(|()| OperationResponse::Gone)
            }
            OperationRequest::Continue { subject: Subject::Claim(key), .. } => {
                self.control().continue_claim(&key).await.map(|()| OperationResponse::Gone)
            }
        }
    }
}
