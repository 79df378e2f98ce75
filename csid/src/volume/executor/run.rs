//! Runs the part of `mounts` or `control` that an operation needs.

use std::sync::Arc;

use crate::error::Result;
use crate::host::TargetFd;
use crate::secret::Secrets;
use crate::store::registry::{Bound, Claim};
use crate::store::rows::MountKey;
use crate::volume::api::requests::{Authority, Uncovered, Unmounting};
use crate::volume::errors::mount as mount_errors;
use crate::volume::executor::Executor;
use crate::volume::model::volume::{DesiredMount, Paths};
use crate::volume::operation::request::{CallTarget, ControllerRequest, OperationResponse};

/// An operation's work, apart from its waiters.
pub(in crate::volume) enum Job {
    Mount {
        wanted: DesiredMount,
        claim: Option<Box<Claim>>,
        target_fd: Option<Arc<TargetFd>>,
        secrets: Option<Secrets>,
    },
    Adopt(DesiredMount, Box<Paths>, Option<Box<Claim>>),
    Restore(DesiredMount),
    Unmount {
        key: MountKey,
        authority: Authority,
        how: Unmounting,
        uncovered: Option<Uncovered>,
        names: Vec<String>,
    },
    Settle(MountKey),
    Heal(MountKey),
    Claim {
        key: MountKey,
        claim: Claim,
        secrets: Option<Secrets>,
    },
    Release {
        key: MountKey,
        authority: Authority,
        force: bool,
        secrets: Option<Secrets>,
    },
    Call {
        target: Box<CallTarget>,
        call: ControllerRequest,
        secrets: Option<Secrets>,
    },
    Unbind {
        key: MountKey,
        bound: Bound,
    },
    Enlarge(MountKey, Option<Secrets>),
    Continue(MountKey),
}

impl Job {
    pub(in crate::volume) async fn run(
        self,
        mut executor: Executor<'_>,
        ahead: &[Claim],
    ) -> Result<OperationResponse> {
        executor.own = matches!(self, Job::Restore(_) | Job::Heal(_));
        match self {
            Job::Mount { mut wanted, claim, target_fd, secrets } => {
                executor.secrets = secrets;
                executor.target_fd = target_fd;
                let mounted = match claim {
                    Some(claim) => executor.mount_claimed(&mut wanted, &claim, ahead).await,
                    None => {
                        executor.refuse_before_expansion(&wanted.key)?;
                        executor.mount(&wanted).await
                    }
                };
                mounted.map(OperationResponse::Mounted)
            }
            Job::Adopt(mut wanted, paths, claim) => executor
                .adopt(&mut wanted, &paths, claim.as_deref(), ahead)
                .await
                .map(OperationResponse::Mounted),
            Job::Restore(mut wanted) => {
                let restored = executor.restore(&mut wanted).await;
                if let Err(error) = &restored {
                    executor.still_waiting(&wanted.key, error).await;
                }
                restored.map(OperationResponse::Mounted)
            }
            Job::Unmount { key, authority, how, uncovered, names } => {
                let missing = executor.row(&key).is_none();
                if let Some(uncovered) = uncovered {
                    executor.uncover(&key, uncovered)?;
                }
                executor.unmount(&key, authority, how.force, names).await?;
                executor.give_back(&key).await?;
                match missing && how.must_exist {
                    true => Err(mount_errors::no_mount(&key, executor.tags(&key), executor.foreign_mounts())),
                    false => Ok(OperationResponse::Gone),
                }
            }
            Job::Settle(key) => {
                executor.settle(&key).await?;
                executor.give_back(&key).await.map(|()| OperationResponse::Gone)
            }
            Job::Heal(key) => executor.heal(&key).await.map(|()| OperationResponse::Gone),
            Job::Claim { key, claim, secrets } => {
                executor.secrets = secrets;
                let mut record = executor.claim(&key, &claim, ahead).await?;
                executor.rebind(&mut record, &claim).await?;
                Ok(OperationResponse::Claimed(Box::new(record)))
            }
            Job::Release { key, authority, force, secrets } => {
                executor.secrets = secrets;
                executor.release(&key, authority, force).await.map(|()| OperationResponse::Gone)
            }
            Job::Call { target, call, secrets } => {
                executor.secrets = secrets;
                executor.call(&target, call).await
            }
            Job::Unbind { key, bound } => {
                executor.unbind(&key, &bound).await.map(|()| OperationResponse::Gone)
            }
            Job::Enlarge(key, secrets) => {
                executor.secrets = secrets;
                executor.enlarge(&key).await.map(|()| OperationResponse::Gone)
            }
            Job::Continue(key) if key.consumer.is_empty() => {
                executor.continue_call(&key).await.map(|()| OperationResponse::Gone)
            }
            Job::Continue(key) => executor.continue_claim(&key).await.map(|()| OperationResponse::Gone),
        }
    }
}
