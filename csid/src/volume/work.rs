//! An operation of a volume: its work, the callers who wait for it, and what runs.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::{oneshot, watch};

use crate::error::{Error, Kind, Result};
use crate::secret::Secrets;
use crate::store::rows::{MountKey, VolumeKey};
use crate::volume::admission::Refusal;
use crate::volume::control::Control;
use crate::volume::drive::Drive;
use crate::volume::journalled::Journalled;
use crate::volume::operations::{Begin, Step, Ticket};
use crate::volume::state::{Volume, Wanted};
use crate::volume::{Authority, Mounted, Shared, say};

pub(super) enum Work {
    Mount {
        wanted: Wanted,
        secrets: Option<Secrets>,
    },
    Unmount {
        key: MountKey,
        authority: Authority,
        force: bool,
    },
    /// Finish what is under way in the rows.
    Settle {
        key: MountKey,
    },
    /// Mount a row that waits.
    Restore {
        wanted: Wanted,
    },
}

pub(super) struct Waiter {
    pub(super) ticket: Ticket,
    pub(super) deadline: Option<Instant>,
    pub(super) hold: Option<Arc<dyn Send + Sync>>,
    /// `None`: it was an Unmount.
    pub(super) reply: oneshot::Sender<Result<Option<Mounted>>>,
}

pub(super) struct Operation {
    pub(super) work: Work,
    pub(super) waiters: Vec<Waiter>,
    pub(super) step: Step,
    /// What callers gave to be held until the end, also of those who wait no more.
    holds: Vec<Arc<dyn Send + Sync>>,
    /// Of the last caller who left before the end: what goes on without callers is listed under his name.
    left: Option<Ticket>,
}

impl Work {
    pub(super) fn key(&self) -> &MountKey {
        match self {
            Work::Mount { wanted, .. } | Work::Restore { wanted } => &wanted.key,
            Work::Unmount { key, .. } | Work::Settle { key } => key,
        }
    }

    pub(super) fn target(&self) -> Option<&str> {
        match self {
            Work::Mount { wanted, .. } | Work::Restore { wanted } => wanted.spec.target.as_deref(),
            Work::Unmount { .. } | Work::Settle { .. } => None,
        }
    }

    pub(super) fn kind(&self) -> &'static str {
        match self {
            Work::Mount { .. } => "mount",
            Work::Unmount { .. } => "unmount",
            Work::Settle { .. } => "settle",
            Work::Restore { .. } => "restore",
        }
    }

    /// Whether `asked` is the same call as this one, so that its caller may wait for this.
    pub(super) fn covers(&self, asked: &Work) -> bool {
        match (self, asked) {
            (Work::Mount { wanted: a, .. } | Work::Restore { wanted: a }, Work::Mount { wanted: b, .. }) => {
                a.key == b.key && a.uid == b.uid && a.spec.same_call(&b.spec)
            }
            (
                Work::Unmount { key: a, authority: x, force: f },
                Work::Unmount { key: b, authority: y, force: g },
            ) => a == b && x == y && f == g,
            _ => false,
        }
    }
}

/// An operation's work, apart from its waiters.
pub(super) enum Job {
    Mount(Wanted, Option<Secrets>),
    Restore(Wanted),
    Unmount { key: MountKey, authority: Authority, force: bool, names: Vec<String> },
    Settle(MountKey),
}

impl Job {
    pub(super) async fn run(
        self,
        shared: &Shared,
        rows: &mut Journalled,
        control: watch::Receiver<Control>,
        step: Step,
    ) -> Result<Option<Mounted>> {
        let mut drive = Drive { shared, rows, control, step, secrets: None, force: false };
        match self {
            Job::Mount(wanted, secrets) => {
                drive.secrets = secrets;
                drive.mount(&wanted).await.map(Some)
            }
            Job::Restore(wanted) => {
                let restored = drive.mount(&wanted).await;
                if let Err(error) = &restored {
                    drive.still_waiting(&wanted.key, error).await;
                }
                restored.map(Some)
            }
            Job::Unmount { key, authority, force, names } => {
                drive.unmount(&key, authority, force, names).await.map(|()| None)
            }
            Job::Settle(key) => drive.settle(&key).await.map(|()| None),
        }
    }
}

impl Work {
    /// Why `asked` cannot be had while this is under way: another's, or other options of the same identity.
    pub(super) fn refuses(&self, asked: &Work) -> Option<Error> {
        let (Work::Mount { wanted, .. } | Work::Restore { wanted }) = self else { return None };
        match asked {
            _ if *asked.key() != wanted.key => None,
            Work::Mount { wanted: other, .. } if other.uid != wanted.uid => {
                Some(say::refusal(Refusal::NotOwner, other))
            }
            Work::Mount { wanted: other, .. } if !other.spec.same_call(&wanted.spec) => {
                Some(say::refusal(Refusal::OtherOptions, other))
            }
            Work::Unmount { key, authority: Authority::Own(uid), .. } if *uid != wanted.uid => {
                Some(say::not_owner(key))
            }
            _ => None,
        }
    }

    pub(super) fn mounts(&self, key: &MountKey) -> bool {
        matches!(self, Work::Mount { wanted, .. } | Work::Restore { wanted } if wanted.key == *key)
    }
}

impl Operation {
    pub(super) fn new(work: Work) -> Self {
        Operation { work, waiters: Vec::new(), step: Step::new(), holds: Vec::new(), left: None }
    }

    /// The work goes to the job; what the task compares with stays here, without the secrets.
    pub(super) fn job(&mut self, names: Vec<String>) -> Job {
        match &mut self.work {
            Work::Mount { wanted, secrets } => {
                wanted.operations = names;
                Job::Mount(wanted.clone(), secrets.take())
            }
            Work::Restore { wanted } => Job::Restore(wanted.clone()),
            Work::Unmount { key, authority, force } => {
                Job::Unmount { key: key.clone(), authority: *authority, force: *force, names }
            }
            Work::Settle { key } => Job::Settle(key.clone()),
        }
    }

    /// The names that callers gave this operation.
    pub(super) fn names(&self) -> Vec<String> {
        self.waiters
            .iter()
            .filter(|waiter| waiter.ticket.named)
            .map(|waiter| waiter.ticket.id.clone())
            .collect()
    }

    pub(super) fn join(&mut self, shared: &Shared, waiter: Waiter) {
        shared.operations.follow(&waiter.ticket, &self.step);
        self.left = None;
        self.holds.extend(waiter.hold.clone());
        self.waiters.push(waiter);
    }

    /// Work that nobody waits for is listed, too, under the name its caller gave it before csid's restart.
    pub(super) fn anonymous_ticket(
        &self,
        shared: &Shared,
        volume: &VolumeKey,
        rows: &Volume,
    ) -> Option<Ticket> {
        if !self.waiters.is_empty() || self.left.is_some() {
            return None;
        }
        let row = rows.mount(self.work.key())?;
        let begin = Begin {
            kind: self.work.kind(),
            key: self.work.key(),
            volume,
            uid: row.uid,
            id: row.operations.first().cloned(),
            deadline: None,
            step: self.step.clone(),
        };
        shared.operations.begin(begin).ok()
    }

    /// Answer those whose deadline has passed.
    pub(super) fn expire(&mut self, now: Instant, volume: &VolumeKey) {
        let (late, rest) = std::mem::take(&mut self.waiters)
            .into_iter()
            .partition(|waiter| waiter.deadline.is_some_and(|at| at <= now));
        self.waiters = rest;
        let step = self.step.get();
        let text = match &self.work {
            Work::Mount { .. } => {
                format!("the deadline passed at `{step}`; the mount is undone unless somebody else waits")
            }
            _ => format!(
                "the deadline passed at `{step}`; the operation goes on, ask again or see ListOperations"
            ),
        };
        self.part(late, volume, &Error::new(Kind::TimedOut, text));
    }

    /// Answer the one caller who cancelled; whether he was one of this operation's.
    pub(super) fn withdraw(&mut self, number: u64, volume: &VolumeKey) -> bool {
        let (gone, rest): (Vec<Waiter>, Vec<Waiter>) =
            std::mem::take(&mut self.waiters).into_iter().partition(|waiter| waiter.ticket.number == number);
        self.waiters = rest;
        let found = !gone.is_empty();
        self.part(gone, volume, &Error::new(Kind::Cancelled, "cancelled by CancelOperation"));
        found
    }

    /// Answer those who leave while the work goes on.
    fn part(&mut self, leaving: Vec<Waiter>, volume: &VolumeKey, error: &Error) {
        let last = self.reply(leaving, volume, &Err(error.clone()));
        if let Some(last) = last.filter(|_| self.waiters.is_empty()) {
            last.left();
            self.left = Some(last);
        }
    }

    pub(super) fn fail(&mut self, volume: &VolumeKey, error: &Error) {
        let waiters = std::mem::take(&mut self.waiters);
        self.reply(waiters, volume, &Err(error.clone()));
    }

    pub(super) fn answer(mut self, volume: &VolumeKey, result: Result<Option<Mounted>>) {
        let waiters = std::mem::take(&mut self.waiters);
        self.reply(waiters, volume, &result);
    }

    /// The last one's ticket.
    fn reply(
        &self,
        waiters: Vec<Waiter>,
        volume: &VolumeKey,
        result: &Result<Option<Mounted>>,
    ) -> Option<Ticket> {
        let mut last = None;
        for Waiter { ticket, reply, .. } in waiters {
            let result = result
                .clone()
                .map_err(|error| say::located(error, self.work.key(), volume, &ticket.id, self.step.get()));
            // A caller who has gone is answered when he asks again.
            let _ = reply.send(result);
            last = Some(ticket);
        }
        last
    }
}
