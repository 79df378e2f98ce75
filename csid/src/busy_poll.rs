//! Busy polling: for a short time after each step of an operation the runtime's worker polls for events instead of sleeping.
//!
//! An operation waits several times for another process or thread, often for less than 200 µs. To wake a worker on an idle processor
//! takes tens of microseconds each time.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// The steps of all operations of this process, which has one runtime.
static STEPS: Steps = Steps::new();

struct Steps {
    last: Mutex<Option<Instant>>,
    news: Notify,
}

/// Notes that an operation has begun a step.
pub fn note_step() {
    STEPS.note();
}

/// Keeps the runtime's worker from sleeping after each step, for as long as `time` says then. 0: not at all. Never returns, and ends with
/// the runtime.
pub async fn after_steps(time: impl Fn() -> Duration) {
    STEPS.poll_after_each(time).await;
}

impl Steps {
    const fn new() -> Self {
        Steps { last: Mutex::new(None), news: Notify::const_new() }
    }

    fn note(&self) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.news.notify_one();
    }

    fn is_recent(&self, time: Duration) -> bool {
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.is_some_and(|last| last.elapsed() < time)
    }

    async fn poll_after_each(&self, time: impl Fn() -> Duration) {
        loop {
            self.news.notified().await;
            while self.is_recent(time()) {
                // Another thread may have this processor. After that the runtime polls for events without sleeping, because a task is ready.
                std::thread::yield_now();
                tokio::task::yield_now().await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake, Waker};

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns how often the task wakes itself in three polls: before any step, and twice after one.
    fn wakes(time: Duration) -> [usize; 3] {
        let steps = Steps::new();
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let mut polling = pin!(steps.poll_after_each(|| time));
        let mut poll = || {
            assert!(polling.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            woken.0.swap(0, Ordering::Relaxed)
        };
        let before = poll();
        steps.note();
        assert_eq!(woken.0.swap(0, Ordering::Relaxed), 1, "the step wakes the task");
        [before, poll(), poll()]
    }

    #[test]
    fn task_is_ready_only_for_a_time_after_a_step() {
        assert_eq!(wakes(Duration::from_secs(3600)), [0, 1, 1]);
        assert_eq!(wakes(Duration::ZERO), [0, 0, 0]);
    }
}
