//! Ticks for calls under way. A timer for each call would cost more than a quick call: a timer that is the next one wakes the executor.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// A clock that runs while a call is under way.
pub(super) struct Ticker(Arc<Inner>);

struct Inner {
    period: Duration,
    ticks: Notify,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    calls: usize,
    /// Whether a task ticks.
    is_ticking: bool,
}

/// The ticks for one call.
pub(super) struct Ticks {
    ticker: Arc<Inner>,
    /// Whether the call wants no more of them.
    is_over: AtomicBool,
}

impl Ticker {
    pub(super) fn new(period: Duration) -> Ticker {
        Ticker(Arc::new(Inner { period, ticks: Notify::new(), state: Mutex::default() }))
    }

    /// Begins to tick for a call, if it does not tick yet.
    pub(super) fn start(&self) -> Ticks {
        let mut state = self.0.state();
        state.calls += 1;
        if !state.is_ticking {
            state.is_ticking = true;
            tokio::spawn(Arc::clone(&self.0).tick());
        }
        Ticks { ticker: Arc::clone(&self.0), is_over: AtomicBool::new(false) }
    }
}

impl Ticks {
    /// Waits for the next tick. The first one may come at once, each later one comes a period after the one before.
    pub(super) fn next(&self) -> Notified<'_> {
        self.ticker.ticks.notified()
    }

    /// Lets the clock rest, unless it ticks for another call.
    pub(super) fn stop(&self) {
        if !self.is_over.swap(true, Ordering::Relaxed) {
            self.ticker.state().calls -= 1;
        }
    }
}

impl Drop for Ticks {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ticks until a period has ended without a call.
    async fn tick(self: Arc<Self>) {
        loop {
            tokio::time::sleep(self.period).await;
            self.ticks.notify_waiters();
            let mut state = self.state();
            if state.calls == 0 {
                state.is_ticking = false;
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: Duration = Duration::from_millis(20);

    #[tokio::test]
    async fn two_ticks_take_at_least_a_period() {
        let ticker = Ticker::new(PERIOD);
        let _earlier = ticker.start();
        tokio::time::sleep(PERIOD / 2).await;
        let ticks = ticker.start();
        let begun = std::time::Instant::now();
        ticks.next().await;
        ticks.next().await;
        assert!(begun.elapsed() >= PERIOD, "{:?}", begun.elapsed());
    }

    #[tokio::test]
    async fn ticker_rests_without_a_call() {
        let ticker = Ticker::new(PERIOD);
        drop(ticker.start());
        assert!(ticker.0.state().is_ticking);
        let rests = async {
            while ticker.0.state().is_ticking {
                tokio::time::sleep(PERIOD).await;
            }
        };
        tokio::time::timeout(500 * PERIOD, rests).await.expect("it ticks without a call");
        ticker.start().next().await;
    }
}
