//! When callers have asked this server last for claims that wait. Each claim that waits names the server that was asked last, its
//! *keeper*. The keeper alone judges whether the caller still waits, until the keeper is gone.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// How long a caller asks no server before its claim ends.
pub const IDLE: Duration = Duration::from_secs(60);
/// The most calls that are remembered, and those of one caller. A call that is not remembered begins to be counted later.
const CALLS: usize = 100_000;
const OF_CALLER: usize = 2_000;
/// The time between two looks for calls to forget.
const BETWEEN: Duration = Duration::from_secs(10);

/// The calls of this server's callers, by the names that they have in claims.
#[derive(Default)]
pub struct Asks(Mutex<Table>);

#[derive(Default)]
struct Table {
    calls: HashMap<String, Asked>,
    /// How many of them each caller has.
    callers: HashMap<String, usize>,
    /// The last look for calls to forget. `None`: there was none.
    looked: Option<Instant>,
}

struct Asked {
    last: Instant,
    /// The callers that wait for an answer now.
    waiting: usize,
    /// The end of the wait in the queue. `None`: not known here.
    until: Option<Instant>,
    is_withdrawn: bool,
}

/// A caller that waits for an answer. Its drop ends that.
pub struct Asking<'a> {
    asks: &'a Asks,
    /// `None`: the call is not remembered.
    call: Option<String>,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if let Some(call) = &self.call
            && let Some(asked) = self.asks.lock().calls.get_mut(call)
        {
            asked.waiting = asked.waiting.saturating_sub(1);
            asked.last = Instant::now();
        }
    }
}

impl Table {
    /// Returns a call, which may be new. `None`: as many as may be are remembered.
    fn entry(&mut self, call: &str) -> Option<&mut Asked> {
        let now = Instant::now();
        if self.looked.is_none_or(|looked| looked + BETWEEN <= now) {
            self.looked = Some(now);
            self.calls.retain(|_, asked| asked.waiting > 0 || asked.last + 2 * IDLE > now);
            self.callers.clear();
            for call in self.calls.keys() {
                *self.callers.entry(caller_of(call).to_owned()).or_insert(0) += 1;
            }
        }
        if !self.calls.contains_key(call) {
            let of_caller = self.callers.get(caller_of(call)).copied().unwrap_or(0);
            if self.calls.len() >= CALLS || of_caller >= OF_CALLER {
                return None;
            }
            self.callers.insert(caller_of(call).to_owned(), of_caller + 1);
        }
        let new = || Asked { last: now, waiting: 0, until: None, is_withdrawn: false };
        Some(self.calls.entry(call.to_owned()).or_insert_with(new))
    }
}

/// Returns ROLE/NAME of a call's name.
fn caller_of(call: &str) -> &str {
    let end = call.match_indices('/').nth(1).map_or(call.len(), |(at, _)| at);
    &call[..end]
}

impl Asks {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a caller asks, and until when it waits in the queue.
    pub fn begin(&self, call: &str, until: Option<Instant>) -> Asking<'_> {
        let is_known = self.lock().entry(call).is_some_and(|asked| {
            (asked.last, asked.until) = (Instant::now(), until);
            asked.waiting += 1;
            true
        });
        Asking { asks: self, call: is_known.then(|| call.to_owned()) }
    }

    /// Returns whether the caller has asked nothing here for [`IDLE`], from when the claim was seen here first.
    pub fn is_idle(&self, call: &str) -> bool {
        let mut table = self.lock();
        table.entry(call).is_some_and(|asked| asked.waiting == 0 && asked.last.elapsed() >= IDLE)
    }

    /// Returns whether the caller's wait in the queue is over, and no call of it is under way.
    pub fn is_over(&self, call: &str) -> bool {
        let table = self.lock();
        let is_past =
            |asked: &Asked| asked.waiting == 0 && asked.until.is_some_and(|at| at <= Instant::now());
        table.calls.get(call).is_some_and(is_past)
    }

    /// Notes that a call was withdrawn. A try of it that is under way here writes nothing any more.
    pub fn withdraw(&self, call: &str) {
        if let Some(asked) = self.lock().entry(call) {
            (asked.last, asked.is_withdrawn) = (Instant::now(), true);
        }
    }

    pub fn is_withdrawn(&self, call: &str) -> bool {
        self.lock().calls.get(call).is_some_and(|asked| asked.is_withdrawn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Has so much time pass.
    fn pass(asks: &Asks, time: Duration) {
        let before =
            |at: &mut Instant| *at = at.checked_sub(time).expect("the machine has run for some minutes");
        let mut table = asks.lock();
        table.looked.iter_mut().for_each(before);
        for asked in table.calls.values_mut() {
            before(&mut asked.last);
            asked.until.iter_mut().for_each(before);
        }
    }

    #[test]
    fn caller_is_idle_after_its_last_ask() {
        let asks = Asks::default();
        assert!(!asks.is_idle("seen"), "it was seen just now");
        let asking = asks.begin("asked", Some(Instant::now() + Duration::from_secs(5)));
        pass(&asks, IDLE * 3);
        assert!(!asks.is_idle("asked") && !asks.is_over("asked"), "the caller waits for the answer");
        drop(asking);
        assert!(!asks.is_idle("asked") && asks.is_over("asked"));
        pass(&asks, IDLE);
        assert!(asks.is_idle("asked"));
        assert!(!asks.is_idle("seen"), "it was forgotten, and is counted from now on");
    }

    #[test]
    fn remembered_calls_are_bounded() {
        let asks = Asks::default();
        let call = |n: usize| format!("node/n{}/c{n}", n / OF_CALLER);
        for n in 0..OF_CALLER + 10 {
            asks.begin(&format!("node/busy/{n}"), None);
        }
        assert_eq!(asks.lock().calls.len(), OF_CALLER, "one caller leaves places to others");
        for n in 0..CALLS {
            asks.begin(&call(n), None);
        }
        assert_eq!(asks.lock().calls.len(), CALLS);
        asks.withdraw(&call(0));
        assert!(asks.is_withdrawn(&call(0)) && !asks.is_withdrawn(&call(1)));
        pass(&asks, IDLE * 3);
        asks.begin("new", None);
        assert_eq!(asks.lock().calls.len(), 1);
    }
}
