//! The time for people. No decision depends on it.

use std::time::{SystemTime, UNIX_EPOCH};

/// Returns microseconds since 1970.
pub fn now_usec() -> u64 {
    #[cfg(test)]
    if crate::random::seeded::is_begun() {
        return 0;
    }
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
