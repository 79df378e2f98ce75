//! Turns of the claims of one volume at this server. A try reads the volume's record, and writes it if it has not changed meanwhile. Of tries at the same
//! time one succeeds, so a thousand of them would need half a million. Here one writes at a time, and takes along what waits ([`crate::folding`]).

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use csid::store::registry::VolumeName;
use tokio::sync::{OwnedMutexGuard, oneshot};
use tokio::time::Instant;

use crate::failure::Result;
use crate::tries::{ClaimEnd, Found, Tried, Wanted};

/// The volumes that calls try to claim, each with its line.
#[derive(Default)]
pub struct Turns(Mutex<HashMap<VolumeName, Arc<Line>>>);

/// The tries of one volume that wait, first come, first served.
#[derive(Default)]
pub struct Line {
    turn: Arc<tokio::sync::Mutex<()>>,
    waiting: Mutex<VecDeque<WaitingTry>>,
}

/// A try that waits for its outcome. Its caller may have gone away.
pub struct WaitingTry {
    pub what: Arc<Trying>,
    /// The caller waits no longer for a try to begin.
    pub deadline: Instant,
    pub outcome: oneshot::Sender<Result<Tried>>,
}

/// What is tried.
pub enum Trying {
    /// A claim. `found`: what an earlier try of its call has found.
    Claim { wanted: Arc<Wanted>, found: Option<Found> },
    /// The end of a claim, by its node's word.
    End(Box<ClaimEnd>),
}

impl Trying {
    pub fn name(&self) -> &VolumeName {
        match self {
            Trying::Claim { wanted, .. } => &wanted.name,
            Trying::End(end) => &end.name,
        }
    }

    /// Returns the node of the claim.
    pub fn node(&self) -> &str {
        match self {
            Trying::Claim { wanted, .. } => &wanted.node,
            Trying::End(end) => &end.node,
        }
    }

    /// Returns the consumer of the claim.
    pub fn consumer(&self) -> &str {
        match self {
            Trying::Claim { wanted, .. } => &wanted.claim.consumer,
            Trying::End(end) => &end.owed.consumer,
        }
    }

    /// Returns the name of the caller. It may be an operator's.
    pub fn caller(&self) -> &str {
        match self {
            Trying::Claim { wanted, .. } => &wanted.caller.name,
            Trying::End(end) => &end.node,
        }
    }
}

impl Turns {
    /// Returns the line of a volume. Lines that nobody uses are forgotten.
    pub fn line(&self, name: &VolumeName) -> Arc<Line> {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.retain(|_, line| Arc::strong_count(line) > 1);
        lines.entry(name.clone()).or_default().clone()
    }

    /// Returns whether several claims of a volume are being written.
    #[cfg(test)]
    pub fn is_folding(&self) -> bool {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Each caller has the line, and so have the table and the task of the turn.
        let others = |line: &Arc<Line>| Arc::strong_count(line).saturating_sub(2 + line.waiting().len());
        lines.values().any(|line| line.turn.try_lock().is_err() && others(line) > 1)
    }
}

impl Line {
    fn waiting(&self) -> MutexGuard<'_, VecDeque<WaitingTry>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a try at the end.
    pub fn enter(&self, waiting: WaitingTry) {
        self.waiting().push_back(waiting);
    }

    /// Takes a try out. Returns `false` if it has its turn now, or had it.
    pub fn leave(&self, what: &Arc<Trying>) -> bool {
        let mut waiting = self.waiting();
        let count = waiting.len();
        waiting.retain(|of| !Arc::ptr_eq(&of.what, what));
        waiting.len() < count
    }

    /// Waits for the turn, which lasts until the drop.
    pub async fn turn(&self) -> OwnedMutexGuard<()> {
        self.turn.clone().lock_owned().await
    }

    /// Takes the first tries whose callers are there, at most so many.
    pub fn take(&self, most: usize) -> Vec<WaitingTry> {
        let mut waiting = self.waiting();
        let mut taken = Vec::new();
        while taken.len() < most
            && let Some(first) = waiting.pop_front()
        {
            if !first.outcome.is_closed() {
                taken.push(first);
            }
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use csi_proto::identity::{Identity, Role};
    use csid::volume::rules;

    use super::*;

    fn volume(name: &str) -> VolumeName {
        VolumeName { namespace: "default".into(), volume: name.into() }
    }

    fn waiting(consumer: &str) -> (WaitingTry, oneshot::Receiver<Result<Tried>>) {
        let usage = rules::read_use("write", "multi-node-multi-writer", "file-system").unwrap();
        let wanted = Wanted {
            caller: Identity { cluster: "prod".into(), role: Role::Node, name: consumer.into() },
            name: volume("a"),
            node: consumer.into(),
            boot: String::new(),
            claim: rules::new_claim(consumer, consumer, 0, usage),
            until: None,
            answer: Duration::ZERO,
            mark: Vec::new(),
            brings_secrets: false,
        };
        let (outcome, answer) = oneshot::channel();
        let deadline = Instant::now() + Duration::from_secs(8);
        let what = Arc::new(Trying::Claim { wanted: wanted.into(), found: None });
        (WaitingTry { what, deadline, outcome }, answer)
    }

    fn names(taken: &[WaitingTry]) -> Vec<&str> {
        taken.iter().map(|of| of.what.caller()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn turn_of_one_volume_keeps_no_other_waiting() {
        let turns = Turns::default();
        let (a, b) = (turns.line(&volume("a")), turns.line(&volume("b")));
        let (first, second) = (a.turn().await, b.turn().await);
        let again = turns.line(&volume("a"));
        let late = tokio::time::timeout(Duration::from_secs(1), again.turn()).await;
        assert!(late.is_err(), "two calls have the turn at a volume");
        drop(first);
        let third = again.turn().await;
        drop((a, b, again, second, third));
        drop(turns.line(&volume("c")));
        assert_eq!(turns.0.lock().unwrap().len(), 1, "volumes that nobody claims are forgotten");
    }

    #[tokio::test]
    async fn tries_are_taken_in_their_order() {
        let line = Line::default();
        let mut answers = Vec::new();
        let mut calls = Vec::new();
        for n in 0..5 {
            let (waiting, answer) = waiting(&format!("c{n}"));
            calls.push(waiting.what.clone());
            line.enter(waiting);
            answers.push(answer);
        }
        // The caller of c1 hangs up, and that of c2 has waited for too long.
        drop(answers.remove(1));
        assert!(line.leave(&calls[2]) && !line.leave(&calls[2]));
        assert_eq!(names(&line.take(2)), ["c0", "c3"]);
        assert!(!line.leave(&calls[0]), "it has its turn");
        assert_eq!(names(&line.take(2)), ["c4"]);
    }
}
