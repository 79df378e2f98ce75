//! The life of a process that csid supervises: started, watched, and started again when it has ended. There is one for each
//! instance, in the instance's task, and it waits for one process at a time: so there is never a second process of it.
//!
//! The pause before a start is twice the one before, from half a second up to a minute; it is reset when the plugin was
//! ready for a minute, and by a restart on request. It is never given up: `failed` is a state between two tries, and its
//! message says when the next one is. A Probe that is asked for brings it on. A unit that csid has not defined may be started
//! by others meanwhile, systemd's `Restart=` among them; then it is adopted.

use std::convert::Infallible;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::error::Error;
use crate::host::units::MainProcess;
use crate::plugin::errors::process::ProcessError;
use crate::plugin::errors::start::StartError;
use crate::plugin::events;
use crate::plugin::spec::Supervision;
use crate::plugin::supervise;
use crate::plugin::task::{AGAIN, Task};

/// Why the supervisor has something to do.
enum End {
    Process,
    /// Not ready in time; with the last reason.
    NotReady(String),
}

impl Task {
    pub(super) async fn live(&mut self) -> Infallible {
        // Why the process has to be started again.
        let mut again: Option<String> = None;
        loop {
            let process = match self.spec.supervision {
                Supervision::External => None,
                Supervision::Managed | Supervision::Unit => Some(self.running(again.take()).await),
            };
            self.hidden = None;
            let end = self.serve(process.as_ref()).await;
            if let Some(since) = self.ready_since.take() {
                self.backoff.worked_for(since.elapsed());
            }
            let why = match &end {
                End::Process => supervise::end_of(&self.shared.units, &self.place.unit).await,
                End::NotReady(why) => why.clone(),
            };
            if let Some(process) = process.filter(|_| !matches!(&end, End::Process)) {
                self.set("failed", &format!("{why}{AGAIN} when it is stopped"), None).await;
                let (id, pid) = (&self.view.id, process.pid);
                tracing::warn!(plugin = %id, pid, "plugin {id} is not ready and is started again: {why}");
                self.peer.stops.begin();
                if let Err(error) = self.stop_own(false).await {
                    let id = &self.view.id;
                    tracing::warn!(plugin = %id, "plugin {id} cannot be stopped: {error}");
                }
                self.peer.stops.end();
            }
            self.rest(&why).await;
            again = Some(why);
        }
    }

    /// The main process of the plugin's unit, for which it is started if need be, for ever.
    async fn running(&mut self, mut again: Option<String>) -> MainProcess {
        loop {
            if self.view.state != "failed" {
                self.set("starting", "", None).await;
            }
            let ensured = supervise::ensure(&self.shared.units, &self.view.id, &self.spec, &self.place);
            match ensured.await {
                Ok(running) => {
                    let id = &self.view.id;
                    tracing::info!(
                        plugin = %id, unit = %self.place.unit, pid = running.process.pid,
                        adopted = !running.started, "plugin {id} runs"
                    );
                    self.adopted = (!running.started).then_some(running.process.pid);
                    self.restarted(again).await;
                    self.set("starting", "", None).await;
                    return running.process;
                }
                Err(error) => {
                    if let StartError::Ended { how, .. } = &error {
                        let before = again.replace(how.clone());
                        self.restarted(before).await;
                    }
                    self.rest(&error.to_string()).await;
                }
            }
        }
    }

    /// The process was started, and `why` if it was not the first one.
    pub(super) async fn restarted(&mut self, why: Option<String>) {
        if let Some(why) = why {
            self.view.restarts += 1;
            events::restarted(&self.shared.store, &self.view, &why).await;
        }
    }

    async fn serve(&mut self, process: Option<&MainProcess>) -> End {
        // A process that csid has not started itself may serve mounts: it is never stopped for being slow.
        let limited = self.spec.supervision == Supervision::Managed && self.adopted.is_none();
        let ended = async {
            match process {
                Some(process) => process.ended().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = ended => End::Process,
            why = self.contact(limited) => End::NotReady(why),
        }
    }

    /// Failed, until the next try is due. A Probe brings it on, but not before the shortest pause: nobody drives a plugin
    /// that cannot run. The try answers it.
    async fn rest(&mut self, why: &str) {
        let pause = self.backoff.next();
        let due = Instant::now() + pause;
        let next = clock(SystemTime::now() + pause);
        self.set("failed", &format!("{why}{AGAIN} at {next}"), None).await;
        let (id, why) = (&self.view.id, &self.view.health_message);
        let failed = Error::from(ProcessError::Failed { id: id.clone(), why: why.clone() });
        self.answer(|| Err(failed.clone()));
        tokio::time::sleep(pause.min(self.shared.pace.restart)).await;
        let left = due.saturating_duration_since(Instant::now());
        let (units, unit) = (self.shared.units.clone(), self.place.unit.clone());
        let others = self.spec.supervision == Supervision::Unit;
        tokio::select! {
            () = self.pause(left) => {}
            () = supervise::started_by_others(&units, &unit), if others => {}
        }
    }
}

fn clock(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{hour:02}:{minute:02}:{second:02} UTC")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_time_of_day() {
        assert_eq!(clock(UNIX_EPOCH + Duration::from_secs(86_400 + 3_661)), "01:01:01 UTC");
    }
}
