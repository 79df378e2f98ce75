//! Growing pauses between retries.

use std::time::Duration;

/// The pauses between tries of one thing, each twice the one before, up to a longest.
pub(crate) struct Backoff {
    first: Duration,
    longest: Duration,
    tries: u32,
}

impl Backoff {
    /// Returns the pauses between tries of an RPC or an effect: 100 ms, up to 5 s.
    pub fn new() -> Self {
        Self::between(Duration::from_millis(100), Duration::from_secs(5))
    }

    pub fn between(first: Duration, longest: Duration) -> Self {
        Backoff { first, longest, tries: 0 }
    }

    /// Makes the next pause the first one.
    pub fn reset(&mut self) {
        self.tries = 0;
    }

    /// Resets if the thing has worked for at least the longest pause.
    pub fn worked_for(&mut self, time: Duration) {
        if time >= self.longest {
            self.reset();
        }
    }

    pub fn next(&mut self) -> Duration {
        let factor = 2_u32.checked_pow(self.tries).unwrap_or(u32::MAX);
        self.tries = self.tries.saturating_add(1);
        self.first.saturating_mul(factor).min(self.longest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_doubles_to_the_longest_and_resets() {
        let seconds = Duration::from_secs;
        let mut backoff = Backoff::between(seconds(1), seconds(60));
        let pauses: Vec<u64> = (0..9).map(|_| backoff.next().as_secs()).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        backoff.worked_for(seconds(59));
        assert_eq!(backoff.next(), seconds(60));
        backoff.worked_for(seconds(60));
        assert_eq!((backoff.next(), backoff.next()), (seconds(1), seconds(2)));
        let last = (0..100).map(|_| backoff.next()).last();
        assert_eq!(last, Some(seconds(60)), "also after very many");
    }
}
