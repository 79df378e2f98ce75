//! The pauses of a node whose servers have all been asked in vain.

use std::time::Duration;

use crate::backoff::Backoff;

/// The first and the longest pause.
const PAUSE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(2));

/// The pauses between tries of all servers.
pub(super) struct Pauses(Backoff);

impl Pauses {
    pub fn new() -> Pauses {
        Pauses(Backoff::between(PAUSE.0, PAUSE.1))
    }

    /// Notes for how long a session has lasted. After one as long as the longest pause the pauses begin again.
    pub fn worked_for(&mut self, time: Duration) {
        self.0.worked_for(time);
    }

    /// Returns the next pause. `share`, from 0 to 1, spreads the nodes of a cluster: they lose their servers at the same moment.
    pub fn next(&mut self, share: f64) -> Duration {
        self.0.next().mul_f64(0.5 + share / 2.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_is_spread_and_at_most_two_seconds() {
        let millis = |share: f64| {
            let mut pauses = Pauses::new();
            let all: Vec<u128> = (0..6).map(|_| pauses.next(share).as_millis()).collect();
            all
        };
        assert_eq!(millis(0.0), [100, 200, 400, 800, 1000, 1000]);
        assert_eq!(millis(1.0), [200, 400, 800, 1600, 2000, 2000]);
    }

    #[test]
    fn session_of_two_seconds_resets_the_pauses() {
        let mut pauses = Pauses::new();
        for _ in 0..10 {
            pauses.next(0.0);
        }
        pauses.worked_for(Duration::from_millis(1999));
        assert_eq!(pauses.next(1.0), Duration::from_secs(2));
        pauses.worked_for(Duration::from_secs(2));
        assert_eq!(pauses.next(1.0), Duration::from_millis(200));
    }
}
