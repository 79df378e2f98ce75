//! The state that the instances of a plugin share: bounds on their calls in flight, and the plugin's facts.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OnceCell, OwnedRwLockReadGuard, RwLock, Semaphore, SemaphorePermit};

use crate::plugin::channel::Listeners;
use crate::plugin::tally::Tally;

/// The most controller calls in flight of one plugin, for all its volumes and instances.
pub(super) const CALLS: usize = 64;

/// The most read-only calls in flight, in addition: no flood of them delays a detach.
pub(super) const LOOKS: usize = 16;

/// The most node calls in flight of one plugin, unless its definition sets another number.
pub(super) const NODE_CALLS: u32 = 32;

/// A bound on calls in flight. Callers get their turns in the order in which they asked.
pub(super) struct Turns {
    free: Semaphore,
    bound: Mutex<Bound>,
}

struct Bound {
    most: usize,
    /// How many turns end without making room for another call, because the bound was lowered.
    excess: usize,
}

/// A turn. It ends when this is dropped.
pub(super) struct Turn<'a> {
    turns: &'a Turns,
    permit: Option<SemaphorePermit<'a>>,
}

impl Turns {
    fn new(most: usize) -> Self {
        Turns { free: Semaphore::new(most), bound: Mutex::new(Bound { most, excess: 0 }) }
    }

    fn bound(&self) -> MutexGuard<'_, Bound> {
        self.bound.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the bound. Calls that have a turn keep it.
    fn set(&self, most: usize) {
        let mut bound = self.bound();
        if most > bound.most {
            let more = most - bound.most;
            let kept = bound.excess.min(more);
            bound.excess -= kept;
            self.free.add_permits(more - kept);
        } else {
            let less = bound.most - most;
            bound.excess += less - self.free.forget_permits(less);
        }
        bound.most = most;
    }

    pub fn most(&self) -> usize {
        self.bound().most
    }

    /// Waits for a turn. `None`: `patience` ended first.
    pub async fn take(&self, patience: Duration) -> Option<Turn<'_>> {
        let permit = tokio::time::timeout(patience, self.free.acquire()).await.ok()?.ok()?;
        Some(Turn { turns: self, permit: Some(permit) })
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut bound = self.turns.bound();
        if bound.excess > 0
            && let Some(permit) = self.permit.take()
        {
            bound.excess -= 1;
            permit.forget();
        }
    }
}

/// A lock that keeps the directories of a plugin where they are.
pub struct HeldDirectories(#[expect(dead_code)] OwnedRwLockReadGuard<()>);

/// The plugins to which an earlier csid may have sent secrets.
#[derive(Debug, PartialEq, Eq)]
pub enum EarlierSecrets {
    /// Plugins with these ids.
    Of(BTreeSet<String>),
    OfAll,
}

impl Default for EarlierSecrets {
    fn default() -> Self {
        EarlierSecrets::Of(BTreeSet::new())
    }
}

impl EarlierSecrets {
    /// Makes the state of a plugin. Its texts are withheld from the first call on if an earlier csid may have sent it secrets.
    pub(super) fn common_of(&self, id: &str) -> Common {
        let common = Common::default();
        let had_secrets = match self {
            EarlierSecrets::Of(plugins) => plugins.contains(id),
            EarlierSecrets::OfAll => true,
        };
        common.had_secrets.store(had_secrets, Ordering::Release);
        common
    }
}

/// The state that the instances of a plugin share: the turns of calls, and counts.
pub(super) struct Common {
    node: Turns,
    calls: Turns,
    looks: Turns,
    pub listeners: Arc<Listeners>,
    pub tally: Tally,
    /// Lock of the plugin's directories. A mount reads from the choice of its paths until its row is written. A reload that moves the
    /// directories writes.
    pub directories: Arc<RwLock<()>>,
    /// Whether this csid sent secrets, or an earlier one may have, by the rows of the start.
    pub had_secrets: AtomicBool,
    /// Whether an earlier csid did, by the rows of the first call that has to know it.
    pub had_secrets_before: OnceCell<bool>,
}

impl Default for Common {
    fn default() -> Self {
        Common {
            node: Turns::new(NODE_CALLS as usize),
            calls: Turns::new(CALLS),
            looks: Turns::new(LOOKS),
            listeners: Arc::default(),
            tally: Tally::default(),
            directories: Arc::default(),
            had_secrets: AtomicBool::new(false),
            had_secrets_before: OnceCell::new(),
        }
    }
}

impl Common {
    pub async fn hold_directories(&self) -> HeldDirectories {
        HeldDirectories(Arc::clone(&self.directories).read_owned().await)
    }

    /// Sets how many node calls are in flight at most.
    pub fn bound_node_calls(&self, most: u32) {
        self.node.set(most as usize);
    }

    pub fn turns(&self, rpc: &str) -> (&Turns, &'static str) {
        match rpc {
            "ListVolumes"
            | "ListSnapshots"
            | "GetCapacity"
            | "ValidateVolumeCapabilities"
            | "NodeGetVolumeStats" => (&self.looks, "calls that only look"),
            _ if rpc.starts_with("Node") => (&self.node, "node calls"),
            _ => (&self.calls, "calls of its controllers"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Duration = Duration::ZERO;

    #[tokio::test]
    async fn a_lower_bound_holds_when_turns_have_ended() {
        let turns = Turns::new(3);
        let mut taken: Vec<_> =
            [turns.take(NONE).await, turns.take(NONE).await, turns.take(NONE).await].into();
        assert!(taken.iter().all(Option::is_some));
        turns.set(1);
        taken.pop();
        taken.pop();
        assert!(turns.take(NONE).await.is_none(), "one of three has its turn yet");
        taken.pop();
        let one = turns.take(NONE).await;
        assert!(one.is_some() && turns.take(NONE).await.is_none());
        turns.set(2);
        let two = turns.take(NONE).await;
        assert!(two.is_some() && turns.take(NONE).await.is_none());
    }

    #[tokio::test]
    async fn a_bound_raised_again_forgets_no_turn() {
        let turns = Turns::new(2);
        let taken = (turns.take(NONE).await, turns.take(NONE).await);
        turns.set(1);
        turns.set(3);
        assert!(turns.take(NONE).await.is_some());
        drop(taken);
        let all = (turns.take(NONE).await, turns.take(NONE).await, turns.take(NONE).await);
        assert!(all.0.is_some() && all.1.is_some() && all.2.is_some());
        assert!(turns.take(NONE).await.is_none());
    }
}
