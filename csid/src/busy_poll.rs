//! Busy polling: for a short time after each step of an operation the runtime's worker polls for events instead of sleeping.
//!
//! An operation waits several times for another process or thread, often for less than 200 µs. To wake a worker on an idle processor
//! takes time each time (docs/performance.md, "Polling instead of sleeping").

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// The steps of all operations of this process, which has one runtime.
static STEPS: Steps = Steps::new();

struct Steps {
    last: Mutex<Option<Instant>>,
    news: Notify,
}

/// Notes that an operation has begun a step at this moment.
pub fn note_step(begun: Instant) {
    STEPS.note(begun);
}

/// Keeps the runtime's worker from sleeping after each step, for as long as `time` says then. 0: not at all. It sleeps where other
/// `threads` need the processors. Never returns, and ends with the runtime.
pub async fn after_steps(time: impl Fn() -> Duration, threads: RunningThreads) {
    STEPS.poll_after_each(time, || threads.leaves_a_processor()).await;
}

impl Steps {
    const fn new() -> Self {
        Steps { last: Mutex::new(None), news: Notify::const_new() }
    }

    fn note(&self, begun: Instant) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(begun);
        self.news.notify_one();
    }

    fn last(&self) -> Option<Instant> {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn poll_after_each(&self, time: impl Fn() -> Duration, is_processor_free: impl Fn() -> bool) {
        loop {
            self.news.notified().await;
            let (step, time) = (self.last(), time());
            if time.is_zero() || !is_processor_free() {
                continue;
            }
            while self.last() == step && step.is_some_and(|step| step.elapsed() < time) {
                // A task that is ready keeps the runtime from sleeping when it looks for events.
                tokio::task::yield_now().await;
            }
        }
    }
}

/// The number of the host's threads that run or wait for a processor, as the kernel counts them.
pub struct RunningThreads {
    /// `/proc/loadavg`.
    file: File,
    processors: usize,
}

impl RunningThreads {
    /// Opens the kernel's count. Polling is of no use where csid has one processor, because csid waits for another thread then: `None`.
    pub fn open() -> io::Result<Option<RunningThreads>> {
        let processors = std::thread::available_parallelism()?.get();
        if processors < 2 {
            return Ok(None);
        }
        Ok(Some(RunningThreads { file: File::open("/proc/loadavg")?, processors }))
    }

    /// Returns whether there are no more of these threads than processors. One is csid's, and another one that for which csid waits.
    fn leaves_a_processor(&self) -> bool {
        let mut text = [0; 64];
        let read = self.file.read_at(&mut text, 0).unwrap_or(0);
        running(&text[..read]).is_some_and(|running| running <= self.processors)
    }
}

/// Reads the number from the text of `/proc/loadavg`: three averages, RUNNING/ALL, and a process. `None`: it is another text.
fn running(text: &[u8]) -> Option<usize> {
    let text = str::from_utf8(text).ok()?;
    let (running, _) = text.split(' ').nth(3)?.split_once('/')?;
    running.parse().ok()
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
    fn wakes(time: Duration, is_processor_free: bool) -> [usize; 3] {
        let steps = Steps::new();
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let mut polling = pin!(steps.poll_after_each(|| time, || is_processor_free));
        let mut poll = || {
            assert!(polling.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            woken.0.swap(0, Ordering::Relaxed)
        };
        let before = poll();
        steps.note(Instant::now());
        assert_eq!(woken.0.swap(0, Ordering::Relaxed), 1, "the step wakes the task");
        [before, poll(), poll()]
    }

    #[test]
    fn task_is_ready_only_for_a_time_after_a_step() {
        let hour = Duration::from_secs(3600);
        assert_eq!(wakes(hour, true), [0, 1, 1]);
        assert_eq!(wakes(Duration::ZERO, true), [0, 0, 0]);
        assert_eq!(wakes(hour, false), [0, 0, 0], "other threads need the processors");
    }

    #[test]
    fn kernel_counts_the_threads_that_need_a_processor() {
        assert_eq!(running(b"0.20 0.18 0.12 3/1204 11206\n"), Some(3));
        assert_eq!(running(b""), None);
        let mut threads = RunningThreads { file: File::open("/proc/loadavg").unwrap(), processors: 1 << 20 };
        assert!(threads.leaves_a_processor() && threads.leaves_a_processor(), "it is read each time");
        threads.processors = 0;
        assert!(!threads.leaves_a_processor(), "this thread runs");
    }
}
