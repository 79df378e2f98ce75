//! The present call of each worker, in memory that all workers share. At most one call at a path waits for its file system.
//!
//! A call that hangs keeps its worker until the kernel returns, also when csid has ended meanwhile. So the next csid's calls at that
//! path are answered without another worker that hangs.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::host::deadline::DEADLINE;
use crate::host::raw;

/// Workers at once, hung or not.
pub(super) const WORKERS: usize = 144;
/// A call has at most two paths.
const PATHS: usize = 2;
/// Microseconds after which a call counts as hung.
const HUNG: u64 = DEADLINE.as_micros() as u64;
/// Microseconds that a call that has hung is waited for all the same.
const GRACE: u64 = 500_000;
/// How often a worker looks whether another one has left its path.
const TURN: Duration = Duration::from_millis(2);

/// The key of a search through all mount namespaces; no path has it. The second key of a search is its process.
const SEARCH: u64 = 2;
/// Searches at most that have not ended. csid makes one at a time: each other one hangs, or is of a csid that has just ended.
pub(super) const SEARCHES: usize = 4;

/// Numbers of an entry: since when its call is under way, and hashes of its paths.
const NUMBERS: usize = 1 + PATHS;

/// All workers' entries.
#[derive(Clone)]
pub(super) enum Slots {
    /// In memory that is shared with processes that are forked.
    Shared(&'static [AtomicU64]),
    /// Between threads.
    Own(Arc<[AtomicU64]>),
}

/// The entry of one worker.
struct Slot<'a> {
    /// Microseconds of the monotonic clock when the call began; 0: there is none.
    since: &'a AtomicU64,
    /// 0: there is none.
    paths: &'a [AtomicU64],
}

impl Slots {
    /// Makes entries that this process and those that it forks have in common.
    pub(super) fn shared() -> io::Result<Slots> {
        raw::shared_memory(WORKERS * NUMBERS).map(Slots::Shared)
    }

    pub(super) fn own() -> Slots {
        Slots::Own((0..WORKERS * NUMBERS).map(|_| AtomicU64::new(0)).collect())
    }

    /// Whether each worker is a process.
    pub(super) fn are_of_processes(&self) -> bool {
        matches!(self, Slots::Shared(_))
    }

    fn slot(&self, number: usize) -> Slot<'_> {
        let all: &[AtomicU64] = match self {
            Slots::Shared(all) => all,
            Slots::Own(all) => all,
        };
        let own = &all[number * NUMBERS..(number + 1) * NUMBERS];
        Slot { since: &own[0], paths: &own[1..] }
    }

    /// Ends the call of worker `own`.
    pub(super) fn end(&self, own: usize) {
        self.slot(own).since.store(0, Ordering::SeqCst);
    }

    /// Waits for the turn of a call at `paths` and enters it as worker `own`'s. False: another call there has hung.
    pub(super) fn begin(&self, own: usize, paths: &[&Path], is_despite_hung: bool) -> bool {
        let keys: Vec<u64> = paths.iter().take(PATHS).map(|path| key(path)).collect();
        let patience = now() + GRACE;
        loop {
            let mine = (self.slot(own).enter(&keys), own);
            if is_despite_hung || keys.is_empty() {
                return true;
            }
            let others = (0..WORKERS).filter(|other| *other != own);
            let before = others.filter_map(|other| {
                let since = self.slot(other).since_at(&keys)?;
                ((since, other) < mine).then_some(since)
            });
            let Some(oldest) = before.min() else { return true };
            self.end(own);
            if now() >= patience && now().saturating_sub(oldest) >= HUNG {
                return false;
            }
            std::thread::sleep(TURN);
        }
    }

    /// Enters a search as worker `own`'s. An error has the processes of the others that have not ended, as many as there may be. Each
    /// keeps a worker.
    pub(super) fn begin_search(&self, own: usize) -> Result<(), Vec<u32>> {
        self.slot(own).enter(&[SEARCH, u64::from(std::process::id())]);
        let others = (0..WORKERS).filter(|other| *other != own).map(|other| self.slot(other));
        let others = others.filter(|other| other.since_at(&[SEARCH]).is_some());
        let processes: Vec<u32> =
            others.filter_map(|other| other.paths[1].load(Ordering::SeqCst).try_into().ok()).collect();
        if processes.len() < SEARCHES { Ok(()) } else { Err(processes) }
    }
}

impl Slot<'_> {
    /// Returns since when.
    fn enter(&self, keys: &[u64]) -> u64 {
        for (place, key) in self.paths.iter().zip(keys.iter().chain(std::iter::repeat(&0))) {
            place.store(*key, Ordering::SeqCst);
        }
        let now = now();
        self.since.store(now, Ordering::SeqCst);
        now
    }

    /// When the call began that is at one of these paths.
    fn since_at(&self, keys: &[u64]) -> Option<u64> {
        let since = self.since.load(Ordering::SeqCst);
        let is_at = || self.paths.iter().any(|path| keys.contains(&path.load(Ordering::SeqCst)));
        (since != 0 && is_at()).then_some(since)
    }
}

/// Neither 0 nor [`SEARCH`].
fn key(path: &Path) -> u64 {
    let mut hasher = DefaultHasher::new();
    path.hash(&mut hasher);
    hasher.finish() | 1
}

/// Microseconds since the boot, never 0.
fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    (now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_call_at_hung_path_is_refused() {
        let slots = Slots::own();
        let (hung, other) = (Path::new("/hung"), Path::new("/other"));
        assert!(slots.begin(0, &[hung], false));
        slots.slot(0).since.store(now() - HUNG, Ordering::SeqCst);
        assert!(!slots.begin(1, &[hung], false));
        assert!(!slots.begin(1, &[other, hung], false));
        assert!(slots.begin(1, &[other], false));
        assert!(slots.begin(2, &[hung], true), "it is asked for by name");
        slots.end(0);
        slots.end(2);
        assert!(slots.begin(3, &[hung], false));
    }

    #[test]
    fn fifth_search_that_has_not_ended_is_refused() {
        let slots = Slots::own();
        assert!(slots.begin(7, &[Path::new("/hung")], false), "another call is no search");
        assert!((0..SEARCHES).all(|own| slots.begin_search(own).is_ok()));
        assert_eq!(slots.begin_search(SEARCHES), Err(vec![std::process::id(); SEARCHES]));
        slots.end(SEARCHES);
        slots.end(0);
        assert_eq!(slots.begin_search(SEARCHES), Ok(()));
    }

    #[test]
    fn calls_at_one_path_all_get_their_turn() {
        let slots = Slots::own();
        std::thread::scope(|scope| {
            for own in 0..8 {
                let slots = &slots;
                scope.spawn(move || {
                    for _ in 0..50 {
                        assert!(slots.begin(own, &[Path::new("/one")], false));
                        std::thread::yield_now();
                        slots.end(own);
                    }
                });
            }
        });
        assert!((0..WORKERS).all(|own| slots.slot(own).since.load(Ordering::SeqCst) == 0));
    }
}
