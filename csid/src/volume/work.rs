//! An operation of a volume: its work, the callers who wait for it, and what runs.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::oneshot;

use crate::error::{Error, Kind, Result};
use crate::plugin::{Snapshot, Stats};
use crate::secret::Secrets;
use crate::store::registry::{Bound, Claim, Record};
use crate::store::rows::{MountKey, VolumeKey};
use crate::volume::admission::Refusal;
use crate::volume::controlling::{Call, Target};
use crate::volume::job::Job;
use crate::volume::operations::{Begin, Step, Ticket};
use crate::volume::state::{Volume, Wanted};
use crate::volume::{Authority, Mounted, Shared, claim_words as words, say};

pub(super) enum Work {
    Mount {
        wanted: Wanted,
        /// Of a registered volume: to be taken when the consumer has none.
        claim: Option<Box<Claim>>,
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
    /// Mount again what lost its server, of this uid.
    Heal {
        key: MountKey,
        uid: u32,
    },
    Claim {
        /// Without a tag: a claim has none.
        key: MountKey,
        claim: Claim,
        /// How long to wait for the claims that are in the way.
        wait_until: Option<Instant>,
        secrets: Option<Secrets>,
    },
    Release {
        key: MountKey,
        authority: Authority,
        force: bool,
        secrets: Option<Secrets>,
    },
    /// What concerns the volume as a whole.
    Call {
        target: Box<Target>,
        call: Call,
        secrets: Option<Secrets>,
    },
    /// What this claim of `uid`'s is bound to has ended.
    Unbind {
        key: MountKey,
        uid: u32,
        bound: Bound,
    },
    /// The next try of a claim that is on its way out, or of a call that has to come to its end.
    Continue {
        key: MountKey,
        uid: u32,
    },
}

/// The step of what waits for that; it has done nothing yet.
const NOBODY_HAS_IT: &str = "waiting until nobody has it";
const ANOTHER_VOLUME: &str = "waiting for another volume's claims";

/// What an operation came to.
#[derive(Clone)]
pub(super) enum Done {
    /// What was to go is gone.
    Gone,
    Mounted(Mounted),
    /// The volume with the claim in it.
    Claimed(Box<Record>),
    /// Whether the plugin confirms it; what it says if not.
    Validated(Result<(), String>),
    Stats(Stats),
    Created(Box<Record>),
    /// The capacity, and whether a node has to expand it yet.
    Expanded(u64, bool),
    Snapshot(Snapshot),
    /// The publish context.
    Attached(BTreeMap<String, String>),
}

pub(super) struct Waiter {
    pub(super) ticket: Ticket,
    pub(super) deadline: Option<Instant>,
    pub(super) hold: Option<Arc<dyn Send + Sync>>,
    pub(super) reply: oneshot::Sender<Result<Done>>,
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
            Work::Unmount { key, .. }
            | Work::Settle { key }
            | Work::Heal { key, .. }
            | Work::Claim { key, .. }
            | Work::Release { key, .. }
            | Work::Unbind { key, .. }
            | Work::Continue { key, .. } => key,
            Work::Call { target, .. } => &target.key,
        }
    }

    pub(super) fn target(&self) -> Option<&str> {
        match self {
            Work::Mount { wanted, .. } | Work::Restore { wanted } => wanted.spec.target.as_deref(),
            _ => None,
        }
    }

    pub(super) fn kind(&self) -> &'static str {
        match self {
            Work::Mount { .. } => "mount",
            Work::Unmount { .. } => "unmount",
            Work::Settle { .. } => "settle",
            Work::Restore { .. } => "restore",
            Work::Heal { .. } => "heal",
            Work::Claim { .. } => "claim",
            Work::Release { .. } => "release",
            Work::Unbind { .. } => "unbind",
            Work::Continue { .. } => "continue",
            Work::Call { call, .. } => call.kind(),
        }
    }

    /// Whose end is to end what a Mount takes.
    fn bound(&self) -> Option<&Bound> {
        match self {
            Work::Mount { claim, .. } => claim.as_ref()?.bound.as_ref(),
            _ => None,
        }
    }

    /// Whether `asked` is the same call as this one, so that its caller may wait for this.
    pub(super) fn covers(&self, asked: &Work) -> bool {
        match (self, asked) {
            (Work::Mount { wanted: a, .. } | Work::Restore { wanted: a }, Work::Mount { wanted: b, .. }) => {
                let same = a.key == b.key && a.uid == b.uid && a.spec.same_call(&b.spec);
                // Who is bound otherwise, by another connection say, has to bind the claim himself.
                same && self.bound() == asked.bound()
            }
            (
                Work::Unmount { key: a, authority: x, force: f },
                Work::Unmount { key: b, authority: y, force: g },
            ) => a == b && x == y && f == g,
            (
                Work::Call { target: a, call: x, secrets: s },
                Work::Call { target: b, call: y, secrets: t },
            ) => a == b && x == y && s.is_some() == t.is_some(),
            _ => false,
        }
    }
}

impl Work {
    /// Why `asked` cannot be had while this is under way: another's, or other options of the same identity.
    pub(super) fn refuses(&self, asked: &Work) -> Option<Error> {
        if let (
            Work::Claim { key, claim, .. },
            Work::Release { key: asked, authority: Authority::Own(uid), .. },
        ) = (self, asked)
        {
            return (key == asked && *uid != claim.uid).then(|| say::not_claimant(asked));
        }
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

    /// When nobody waits for it any more, it is undone; all else goes on to its end.
    pub(super) fn is_undone(&self) -> bool {
        match self {
            Work::Mount { .. } | Work::Claim { .. } => true,
            Work::Call { call, .. } => call.is_undone(),
            _ => false,
        }
    }

    /// The claim that it is to take.
    pub(super) fn claim(&self) -> Option<&Claim> {
        match self {
            Work::Claim { claim, .. } => Some(claim),
            _ => None,
        }
    }

    /// What it waits for after this answer instead of giving it to those who ask: other claims to end, or, where a volume is
    /// expanded OFFLINE, that nobody has it (CSI rule 26).
    pub(super) fn waits(&self, result: &Result<Done>, now: Instant) -> Option<&'static str> {
        let error = result.as_ref().err()?;
        match (self, error.kind) {
            (Work::Claim { wait_until, .. }, Kind::ClaimConflict) => {
                wait_until.filter(|until| *until > now)?;
                match error.details.step {
                    // Time brings it no nearer.
                    Some(words::REACH) => None,
                    Some(words::LIMIT) => Some(ANOTHER_VOLUME),
                    _ => Some("waiting for claims"),
                }
            }
            (Work::Call { call: Call::Expand { .. }, .. }, Kind::Busy) => Some(NOBODY_HAS_IT),
            _ => None,
        }
    }

    /// Whether who comes later may not have the volume while this waits.
    pub(super) fn expands(&self) -> bool {
        matches!(self, Work::Call { call: Call::Expand { .. }, .. })
    }

    pub(super) fn waits_until(&self) -> Option<Instant> {
        match self {
            Work::Claim { wait_until, .. } => *wait_until,
            _ => None,
        }
    }

    /// Whether claims that wait may have what they want now.
    pub(super) fn frees(&self, result: &Result<Done>) -> bool {
        match self {
            // One that fails may have let go what its consumer had.
            Work::Mount { .. } | Work::Restore { .. } | Work::Heal { .. } | Work::Claim { .. } => {
                result.is_err()
            }
            _ => true,
        }
    }

    /// Whether it is the end of `other`, which is then cancelled.
    pub(super) fn ends(&self, other: &Work) -> bool {
        match self {
            Work::Unmount { key, .. } => other.mounts(key),
            Work::Release { key, .. } => matches!(other, Work::Claim { key: claimed, .. } if claimed == key),
            _ => false,
        }
    }

    pub(super) fn mounts(&self, key: &MountKey) -> bool {
        match self {
            Work::Mount { wanted, .. } | Work::Restore { wanted } => wanted.key == *key,
            Work::Heal { key: healed, .. } => healed == key,
            _ => false,
        }
    }
}

impl Operation {
    pub(super) fn new(work: Work) -> Self {
        Operation { work, waiters: Vec::new(), step: Step::new(), holds: Vec::new(), left: None }
    }

    /// The work goes to the job; what the task compares with stays here, without the secrets.
    pub(super) fn job(&mut self, names: Vec<String>) -> Job {
        match &mut self.work {
            Work::Mount { wanted, claim, secrets } => {
                wanted.operations = names;
                Job::Mount(wanted.clone(), claim.clone(), secrets.take())
            }
            Work::Restore { wanted } => Job::Restore(wanted.clone()),
            Work::Unmount { key, authority, force } => {
                Job::Unmount { key: key.clone(), authority: *authority, force: *force, names }
            }
            Work::Settle { key } => Job::Settle(key.clone()),
            Work::Heal { key, .. } => Job::Heal(key.clone()),
            Work::Claim { key, claim, secrets, .. } => {
                // It may have to be tried again.
                Job::Claim { key: key.clone(), claim: claim.clone(), secrets: secrets.clone() }
            }
            Work::Release { key, authority, force, secrets } => {
                let (key, authority, force) = (key.clone(), *authority, *force);
                Job::Release { key, authority, force, secrets: secrets.take() }
            }
            Work::Call { target, call, secrets } => {
                Job::Call { target: target.clone(), call: call.clone(), secrets: secrets.clone() }
            }
            Work::Unbind { key, bound, .. } => Job::Unbind { key: key.clone(), bound: bound.clone() },
            Work::Continue { key, .. } => Job::Continue(key.clone()),
        }
    }

    /// Whether it may go on when a claim of any volume has ended.
    pub(super) fn waits_for_another_volume(&self) -> bool {
        self.step.get() == ANOTHER_VOLUME
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
        let (uid, id) = match &self.work {
            Work::Heal { uid, .. } | Work::Continue { uid, .. } | Work::Unbind { uid, .. } => (*uid, None),
            _ => rows.mount(self.work.key()).map(|row| (row.uid, row.operations.first().cloned()))?,
        };
        let begin = Begin {
            kind: self.work.kind(),
            key: self.work.key(),
            volume,
            uid,
            id,
            deadline: None,
            step: self.step.clone(),
        };
        shared.operations.begin(begin).ok()
    }

    /// Whether somebody's deadline has passed; he is answered, unless it is decided what he will be told.
    pub(super) fn expire(&mut self, now: Instant, volume: &VolumeKey) -> bool {
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
            work if work.is_undone() => {
                let kind = work.kind();
                format!("the deadline passed at `{step}`; the {kind} is undone unless somebody else waits")
            }
            _ if step == NOBODY_HAS_IT => {
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
        self.part(late, volume, &Error::new(Kind::TimedOut, text));
        found
    }

    /// Whether the caller who cancelled is one of this operation's; he is answered, unless it is decided what he will be told.
    pub(super) fn withdraw(&mut self, number: u64, volume: &VolumeKey) -> bool {
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

    pub(super) fn answer(mut self, volume: &VolumeKey, result: Result<Done>) {
        let waiters = std::mem::take(&mut self.waiters);
        self.reply(waiters, volume, &result);
    }

    /// The last one's ticket.
    fn reply(&self, waiters: Vec<Waiter>, volume: &VolumeKey, result: &Result<Done>) -> Option<Ticket> {
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
