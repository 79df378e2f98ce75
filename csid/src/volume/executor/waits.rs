//! The waits of a running operation: for its plugin, and between two tries.

use std::sync::Arc;
use std::time::Instant;

use crate::backoff::Backoff;
use crate::error::{Result, Step};
use crate::plugin::{Can, Controller, Ready, Service};
use crate::volume::errors::mount as mount_errors;
use crate::volume::executor::Executor;
use crate::volume::operation::orders::preempted;

impl Executor<'_> {
    /// Waits for the plugin's node service until the operation is given up, and returns it.
    pub(in crate::volume) async fn ready(&mut self) -> Result<Ready> {
        let (plugins, id) = (&self.shared.plugins, self.plugin());
        self.of_plugin(|give_up| plugins.ready(&id, Service::Node, give_up)).await
    }

    /// Waits for a controller of the plugin likewise, and returns it.
    pub(in crate::volume) async fn controller(&mut self) -> Result<Controller> {
        let (plugins, id) = (&self.shared.plugins, self.plugin());
        self.of_plugin(|give_up| plugins.controller(&id, give_up)).await
    }

    /// Waits likewise until the capability is known, and returns whether the plugin has it.
    pub(in crate::volume) async fn can(&mut self, what: Can) -> Result<bool> {
        let (plugins, id) = (&self.shared.plugins, self.plugin());
        self.of_plugin(|give_up| plugins.known(&id, what, give_up)).await
    }

    async fn of_plugin<T, F>(&mut self, wanted: impl Fn(Instant) -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let step = self.turn.step.get();
        self.turn.step.set(Step::WaitingForPlugin);
        loop {
            let mut signals = self.turn.signals.clone();
            let give_up = signals.borrow().give_up;
            let orders = Arc::clone(&self.turn.orders);
            let found = tokio::select! {
                biased;
                found = wanted(give_up) => Some(found),
                () = preempted(&mut signals) => return Err(mount_errors::yielded()),
                () = orders.came() => None,
            };
            let Some(found) = found else {
                // The rows must not change under an effect.
                if self.in_effect {
                    return Err(mount_errors::yielded());
                }
                Box::pin(self.carry_out()).await;
                continue;
            };
            match found {
                Ok(found) => {
                    self.turn.step.set(step);
                    return Ok(found);
                }
                // A caller with a later deadline has joined meanwhile.
                Err(_) if self.turn.signals.borrow().give_up > give_up => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits before the next try, and carries out orders meanwhile. Returns `false` if there is no next try: the time is over, or
    /// the operation is preempted or abandoned.
    pub(in crate::volume) async fn pause(&mut self, delay: &mut Backoff) -> bool {
        if self.turn.orders.is_empty() {
            let wait = delay.next();
            let orders = Arc::clone(&self.turn.orders);
            let mut signals = self.turn.signals.clone();
            if Instant::now() + wait >= signals.borrow().give_up {
                return false;
            }
            tokio::select! {
                biased;
                () = preempted(&mut signals) => return false,
                () = orders.came() => {}
                () = tokio::time::sleep(wait) => return true,
            }
        }
        Box::pin(self.carry_out()).await;
        true
    }
}
