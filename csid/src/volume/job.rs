//! What of an operation runs, and how.

use tokio::sync::watch;

use crate::error::Result;
use crate::secret::Secrets;
use crate::store::registry::{Bound, Claim};
use crate::store::rows::MountKey;
use crate::volume::control::Control;
use crate::volume::controlling::{Call, Target};
use crate::volume::drive::Drive;
use crate::volume::journalled::Journalled;
use crate::volume::operations::Step;
use crate::volume::state::Wanted;
use crate::volume::unanswered::Tried;
use crate::volume::work::Done;
use crate::volume::{Authority, Shared};

/// An operation's work, apart from its waiters.
pub(super) enum Job {
    Mount(Wanted, Option<Box<Claim>>, Option<Secrets>),
    Restore(Wanted),
    Unmount { key: MountKey, authority: Authority, force: bool, names: Vec<String> },
    Settle(MountKey),
    Heal(MountKey),
    Claim { key: MountKey, claim: Claim, secrets: Option<Secrets> },
    Release { key: MountKey, authority: Authority, force: bool, secrets: Option<Secrets> },
    Call { target: Box<Target>, call: Call, secrets: Option<Secrets> },
    Unbind { key: MountKey, bound: Bound },
    Continue(MountKey),
}

impl Job {
    pub(super) async fn run(
        self,
        shared: &Shared,
        rows: &mut Journalled,
        control: watch::Receiver<Control>,
        step: Step,
        ahead: &[Claim],
        expands_first: bool,
    ) -> Result<Done> {
        let (secrets, force, heals, tried) = (None, false, false, Tried::default());
        let mut drive = Drive { shared, rows, control, step, secrets, force, heals, expands_first, tried };
        match self {
            Job::Mount(mut wanted, claim, secrets) => {
                drive.secrets = secrets;
                let mounted = match claim {
                    Some(claim) => drive.mount_claimed(&mut wanted, &claim, ahead).await,
                    None => {
                        drive.refuse_before_expansion(&wanted.key)?;
                        drive.mount(&wanted).await
                    }
                };
                mounted.map(Done::Mounted)
            }
            Job::Restore(mut wanted) => {
                let restored = drive.restore(&mut wanted).await;
                if let Err(error) = &restored {
                    drive.still_waiting(&wanted.key, error).await;
                }
                restored.map(Done::Mounted)
            }
            Job::Unmount { key, authority, force, names } => {
                drive.unmount(&key, authority, force, names).await?;
                drive.give_back(&key).await.map(|()| Done::Gone)
            }
            Job::Settle(key) => {
                drive.settle(&key).await?;
                drive.give_back(&key).await.map(|()| Done::Gone)
            }
            Job::Heal(key) => drive.heal(&key).await.map(|()| Done::Gone),
            Job::Claim { key, claim, secrets } => {
                drive.secrets = secrets;
                let mut record = drive.claim(&key, &claim, ahead).await?;
                drive.rebind(&mut record, &claim).await?;
                Ok(Done::Claimed(Box::new(record)))
            }
            Job::Release { key, authority, force, secrets } => {
                drive.secrets = secrets;
                drive.release(&key, authority, force).await.map(|()| Done::Gone)
            }
            Job::Call { target, call, secrets } => {
                drive.secrets = secrets;
                drive.call(&target, call).await
            }
            Job::Unbind { key, bound } => drive.unbind(&key, &bound).await.map(|()| Done::Gone),
            Job::Continue(key) if key.consumer.is_empty() => {
                drive.continue_call(&key).await.map(|()| Done::Gone)
            }
            Job::Continue(key) => drive.continue_claim(&key).await.map(|()| Done::Gone),
        }
    }
}
