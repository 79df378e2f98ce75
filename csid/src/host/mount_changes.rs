//! Changes of csid's own mount namespace, as the kernel counts them: at each mount, unmount and move, and at each change of a flag.

use std::fs::File;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The changes since csid last asked.
#[derive(Default)]
pub(super) struct MountChanges {
    /// The file by which the kernel knows what csid has asked. `None`: csid has not asked yet.
    table: Option<File>,
}

impl MountChanges {
    /// Returns whether there may be changes since the last call. That is so at the first one, and where the kernel does not answer.
    pub fn have_come(&mut self) -> bool {
        let Some(table) = &self.table else {
            self.table = File::open("/proc/thread-self/mountinfo").ok();
            return true;
        };
        // It does not wait, and reads nothing.
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(table, PollFlags::PRI)], Some(&now)) != Ok(0)
    }
}
