//! What the callers of an operation ask of it while it runs, and its pauses.

use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::error::Kind;

/// What the waiting callers ask of the operation while it runs.
#[derive(Clone, Debug)]
pub(super) struct Control {
    /// Nobody wants the mount any more, for this reason.
    pub(super) abandon: Option<Kind>,
    /// Nobody waits for this, and somebody for what comes next.
    pub(super) hurry: bool,
    /// When it is no longer tried.
    pub(super) give_up: Instant,
}

pub(super) async fn abandoned(control: &mut watch::Receiver<Control>) -> Kind {
    let kind = control.wait_for(|control| control.abandon.is_some()).await.map(|control| control.abandon);
    match kind {
        Ok(kind) => kind.unwrap_or(Kind::Cancelled),
        // The task that gives orders is gone; so is the one that runs this.
        Err(_) => std::future::pending().await,
    }
}

/// Somebody else's turn, or nobody's wish.
pub(super) async fn hurried(control: &mut watch::Receiver<Control>) {
    if control.wait_for(|control| control.hurry || control.abandon.is_some()).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// 100 ms, doubled up to 5 s.
pub(super) struct Backoff(Duration);

impl Backoff {
    pub(super) fn new() -> Self {
        Backoff(Duration::from_millis(100))
    }

    pub(super) fn next(&mut self) -> Duration {
        let wait = self.0;
        self.0 = (wait * 2).min(Duration::from_secs(5));
        wait
    }
}
