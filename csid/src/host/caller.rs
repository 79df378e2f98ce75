//! The connection of the one that waits for a call.

use std::os::fd::BorrowedFd;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::host::error::HostError;

/// The side that a worker carries out a call for.
pub(super) struct WaitingCaller<'a>(BorrowedFd<'a>);

impl<'a> WaitingCaller<'a> {
    /// `connection`: nothing can be read of it while the call is waited for.
    pub(super) fn new(connection: BorrowedFd<'a>) -> Self {
        WaitingCaller(connection)
    }

    /// Returns [`HostError::Hung`] when nothing waits any more: what a hung call would have done next is not done.
    pub(super) fn check(&self, path: &Path) -> Result<(), HostError> {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN | PollFlags::RDHUP)];
        match poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
            Ok(0) | Err(_) => Ok(()),
            Ok(_) => Err(HostError::Hung(path.into())),
        }
    }
}
