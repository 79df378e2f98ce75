//! Calls at one path take turns: only the first of those that come while it is under way can hang.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::host::deadline::DEADLINE;

/// How long a call that has hung is waited for all the same: its server may just have come back.
const GRACE: Duration = Duration::from_millis(500);

#[derive(Clone, Default)]
pub(super) struct PathTurns(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// Since when a call is under way at each path, by the path's bytes.
    begun: Mutex<HashMap<OsString, Instant>>,
    ended: Notify,
}

/// The turn of one call; dropping it ends that.
#[derive(Default)]
pub(super) struct PathTurn {
    turns: PathTurns,
    paths: Vec<OsString>,
}

impl PathTurns {
    fn begun(&self) -> MutexGuard<'_, HashMap<OsString, Instant>> {
        self.0.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the turn of a call at `paths`. `None`: another call there has hung.
    pub(super) async fn wait(&self, paths: &[&Path]) -> Option<PathTurn> {
        let patience = Instant::now() + GRACE;
        loop {
            let mut ended = std::pin::pin!(self.0.ended.notified());
            ended.as_mut().enable();
            let oldest = {
                let mut begun = self.begun();
                let oldest = paths.iter().filter_map(|path| begun.get(path.as_os_str())).min().copied();
                if oldest.is_none() {
                    let paths: Vec<OsString> = paths.iter().map(|path| path.as_os_str().to_owned()).collect();
                    begun.extend(paths.iter().map(|path| (path.clone(), Instant::now())));
                    return Some(PathTurn { turns: self.clone(), paths });
                }
                oldest
            };
            let hangs_at = patience.max(oldest.unwrap_or(patience) + DEADLINE);
            tokio::time::timeout_at(hangs_at.into(), ended).await.ok()?;
        }
    }
}

impl Drop for PathTurn {
    fn drop(&mut self) {
        if !self.paths.is_empty() {
            let mut begun = self.turns.begun();
            self.paths.iter().for_each(|path| {
                begun.remove(path);
            });
            drop(begun);
            self.turns.0.ended.notify_waiters();
        }
    }
}
