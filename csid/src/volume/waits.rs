//! The waits of a running operation: for its plugin, and between two tries.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backoff::Backoff;
use crate::error::{Result, Step};
use crate::plugin::{Can, Controller, Ready, Service};
use crate::volume::errors::operation::OperationError;
use crate::volume::operation::orders::preempted;
use crate::volume::seam::Site;

/// The time limit for finding the processes that hold a mount, and for querying the capabilities of a plugin.
pub(in crate::volume) const PATIENCE: Duration = Duration::from_secs(5);

/// The waits of an operation for its plugin, and between two tries.
pub(in crate::volume) trait PluginWaits: Site {
    /// Waits for the plugin's node service until the operation is given up, and returns it.
    fn ready(&mut self) -> impl Future<Output = Result<Ready>> + Send {
        async {
            let (plugins, id) = (self.plugins().clone(), self.volume().plugin.clone());
            of_plugin(self, |give_up| plugins.ready(&id, Service::Node, give_up)).await
        }
    }

    /// Waits likewise for a controller of the plugin that offers `rpc`, and returns it.
    fn controller(&mut self, rpc: &'static str) -> impl Future<Output = Result<Controller>> + Send {
        async move {
            let (plugins, id) = (self.plugins().clone(), self.volume().plugin.clone());
            of_plugin(self, |give_up| plugins.controller(&id, rpc, give_up)).await
        }
    }

    /// Waits likewise until the capability is known, and returns whether the plugin has it.
    fn can(&mut self, what: Can) -> impl Future<Output = Result<bool>> + Send {
        async move {
            let (plugins, id) = (self.plugins().clone(), self.volume().plugin.clone());
            of_plugin(self, |give_up| plugins.known(&id, what, give_up)).await
        }
    }

    /// Reads the plugin's capabilities again. csid repeats a call that the plugin says it lacks only after that (CSI rule 36).
    fn ask_what_it_can(&self) -> impl Future<Output = ()> + Send {
        async {
            let plugin = &self.volume().plugin;
            if let Err(error) = self.plugins().probe(plugin, Some(Instant::now() + PATIENCE)).await {
                tracing::warn!(plugin, %error, "the plugin does not say what it can do");
            }
        }
    }

    /// Waits before the next try, and carries out orders meanwhile. Returns `false` if there is no next try: the time is over, or
    /// the operation is preempted or abandoned.
    fn pause(&mut self, delay: &mut Backoff) -> impl Future<Output = bool> + Send {
        async {
            if self.operation().orders.is_empty() {
                let wait = delay.next();
                let orders = Arc::clone(&self.operation().orders);
                let mut signals = self.operation().signals.clone();
                if Instant::now() + wait >= signals.borrow().give_up {
                    return false;
                }
                tokio::select! {
                    biased;
                    () = preempted(&mut signals) => {
                        self.operation().step.note_yield();
                        return false;
                    }
                    () = orders.came() => {}
                    () = tokio::time::sleep(wait) => return true,
                }
            }
            let is_done = Box::pin(self.carry_out_orders()).await.is_ok();
            // The order may have ended this operation.
            is_done && self.operation().signals.borrow().abandon.is_none()
        }
    }
}

impl<S: Site> PluginWaits for S {}

async fn of_plugin<S: Site + ?Sized, T: Send, F>(
    site: &mut S,
    wanted: impl Fn(Instant) -> F + Send,
) -> Result<T>
where
    F: Future<Output = Result<T>> + Send,
{
    let step = site.operation().step.get();
    site.operation().step.set(Step::WaitingForPlugin);
    loop {
        let mut signals = site.operation().signals.clone();
        let give_up = signals.borrow().give_up;
        let orders = Arc::clone(&site.operation().orders);
        let found = tokio::select! {
            biased;
            found = wanted(give_up) => Some(found),
            () = preempted(&mut signals) => {
                site.operation().step.note_yield();
                return Err(OperationError::Yielded.into());
            }
            () = orders.came() => None,
        };
        let Some(found) = found else {
            Box::pin(site.carry_out_orders()).await?;
            continue;
        };
        match found {
            Ok(found) => {
                site.operation().step.set(step);
                return Ok(found);
            }
            // A caller with a later deadline has joined meanwhile.
            Err(_) if site.operation().signals.borrow().give_up > give_up => {}
            Err(error) => return Err(error),
        }
    }
}
