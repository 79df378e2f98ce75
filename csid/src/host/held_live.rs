//! The tmpfs of plugins' roots that csid holds.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use crate::host::base::Base;
use crate::host::error::{HostError, at};

/// A tmpfs that csid holds.
pub(super) struct HeldLive {
    /// The path of its mount point.
    pub at: PathBuf,
    pub root: OwnedFd,
}

impl HeldLive {
    pub fn base(&self) -> Base<'_> {
        Base::held(&self.at, &self.root)
    }

    /// Returns another descriptor of the root directory, for the helper.
    pub fn descriptor(&self) -> Result<OwnedFd, HostError> {
        rustix::io::fcntl_dupfd_cloexec(&self.root, 0).map_err(at("copy the descriptor of", &self.at))
    }

    /// Returns whether the tmpfs is still mounted at its path. The kernel names the root of a mount that is nowhere `/`.
    pub fn is_attached(&self) -> bool {
        let link = format!("/proc/self/fd/{}", self.root.as_raw_fd());
        rustix::fs::readlink(link, Vec::with_capacity(256))
            .is_ok_and(|name| name.to_bytes() == self.at.as_os_str().as_bytes())
    }
}

/// The tmpfs of a plugin's root.
#[derive(Clone)]
pub(super) enum LiveState {
    Held(Arc<HeldLive>),
    /// It could not be mounted at that time.
    Without(Instant),
}

/// What csid knows of each plugin's tmpfs, by the bytes of the plugin's root.
#[derive(Default)]
pub(super) struct Lives {
    known: RwLock<HashMap<OsString, LiveState>>,
    /// Held while one is looked for, mounted or unmounted.
    pub changing: tokio::sync::Mutex<()>,
}

impl Lives {
    pub fn get(&self, root: &Path) -> Option<LiveState> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).get(root.as_os_str()).cloned()
    }

    pub fn set(&self, root: &Path, known: Option<LiveState>) -> Option<LiveState> {
        let mut all = self.known.write().unwrap_or_else(PoisonError::into_inner);
        match known {
            Some(known) => all.insert(root.as_os_str().to_owned(), known),
            None => all.remove(root.as_os_str()),
        }
    }

    /// Returns the held tmpfs that `path` is in, by its name. `None`: it is in none.
    pub fn around(&self, path: &Path) -> Option<Arc<HeldLive>> {
        let path = path.as_os_str().as_bytes();
        let is_in = |live: &&Arc<HeldLive>| {
            let rest = path.strip_prefix(live.at.as_os_str().as_bytes());
            rest.is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
        };
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        let held = known.values().filter_map(|known| match known {
            LiveState::Held(live) => Some(live),
            LiveState::Without(_) => None,
        });
        held.filter(is_in).max_by_key(|live| live.at.as_os_str().len()).cloned()
    }
}
