//! A bound for log lines that others cause.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The least time between two lines.
const BETWEEN: Duration = Duration::from_secs(10);

/// The lines of one kind.
#[derive(Debug, Default)]
pub(super) struct Quiet(Mutex<Said>);

#[derive(Debug, Default)]
struct Said {
    /// The last line. `None`: there was none.
    last: Option<Instant>,
    /// The events since then, which no line has.
    left_out: u64,
}

impl Quiet {
    /// Counts an event. Returns how many before it had no line, if it is to have one. `None`: it has none, either.
    pub fn next(&self) -> Option<u64> {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if said.last.is_some_and(|last| last.elapsed() < BETWEEN) {
            said.left_out += 1;
            return None;
        }
        said.last = Some(Instant::now());
        Some(std::mem::take(&mut said.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_counts_the_events_without_one() {
        let quiet = Quiet::default();
        assert_eq!([quiet.next(), quiet.next(), quiet.next()], [Some(0), None, None]);
        let before = Instant::now().checked_sub(BETWEEN).expect("the machine has run for some seconds");
        quiet.0.lock().unwrap().last = Some(before);
        assert_eq!([quiet.next(), quiet.next()], [Some(2), None]);
    }
}
