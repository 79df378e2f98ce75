//! The deadline of calls to the kernel.

use std::time::Duration;

/// How long a caller waits for the kernel.
pub(super) const DEADLINE: Duration = Duration::from_secs(5);
