//! What the callers of an operation ask of it while it runs, and what it waits for: its pauses and its plugin.

use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::error::{Kind, Result};
use crate::plugin::{Can, Controller, Ready, Service};
use crate::volume::drive::Drive;
use crate::volume::say;

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

impl Drive<'_> {
    /// The plugin, waited for until the operation is given up.
    pub(super) async fn ready(&mut self) -> Result<Ready> {
        let (plugins, id) = (&self.shared.plugins, self.plugin());
        self.of_plugin(|give_up| plugins.ready(&id, Service::Node, give_up)).await
    }

    /// A controller of the plugin, likewise.
    pub(super) async fn controller(&mut self) -> Result<Controller> {
        let (plugins, id) = (&self.shared.plugins, self.plugin());
        self.of_plugin(|give_up| plugins.controller(&id, give_up)).await
    }

    /// Whether the plugin can do this, likewise.
    pub(super) async fn can(&mut self, what: Can) -> Result<bool> {
        let (plugins, id) = (&self.shared.plugins, self.plugin());
        self.of_plugin(|give_up| plugins.known(&id, what, give_up)).await
    }

    async fn of_plugin<T, F>(&mut self, wanted: impl Fn(Instant) -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let step = self.step.get();
        self.step.set("waiting for plugin");
        loop {
            let mut control = self.control.clone();
            let give_up = control.borrow().give_up;
            let found = tokio::select! {
                biased;
                found = wanted(give_up) => found,
                () = hurried(&mut control) => return Err(say::yielded()),
            };
            match found {
                Ok(found) => {
                    self.step.set(step);
                    return Ok(found);
                }
                // A caller with a later deadline has joined meanwhile.
                Err(_) if self.control.borrow().give_up > give_up => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Wait before the next try. False when there is none: the time is over, or nobody wants it any more.
    pub(super) async fn pause(&mut self, delay: &mut Backoff, makes: bool) -> bool {
        let wait = delay.next();
        let mut control = self.control.clone();
        if Instant::now() + wait >= control.borrow().give_up {
            return false;
        }
        let mut other = control.clone();
        tokio::select! {
            biased;
            _ = abandoned(&mut control), if makes => false,
            () = hurried(&mut other) => false,
            () = tokio::time::sleep(wait) => true,
        }
    }
}
