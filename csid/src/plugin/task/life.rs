//! The life of a process that csid supervises: started, watched, and started again when it has ended. There is one for each
//! instance, in the instance's task, and it waits for one process at a time: so there is never a second process of it.
//!
//! The pause before a start is twice the one before, from half a second up to a minute; it begins anew when the plugin was
//! ready for a minute, and when somebody restarts it. It is never given up: `failed` is a state between two tries, and its
//! message says when the next one is. A Probe that is asked for brings it on. A unit that csid has not defined may be started
//! by others meanwhile, systemd's `Restart=` among them; then it is adopted.

use std::convert::Infallible;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::{AGAIN, Supervision, Task, events, supervise};
use crate::error::{Error, Kind};
use crate::host::units::MainProcess;
use crate::plugin::supervise::StartError;

/// Why the supervisor has something to do.
enum End {
    Process,
    /// Not ready in time; with the last reason.
    NotReady(String),
}

/// How long the next pause is.
pub(super) struct Backoff {
    first: Duration,
    longest: Duration,
    tries: u32,
}

impl Backoff {
    pub fn new(first: Duration, longest: Duration) -> Self {
        Backoff { first, longest, tries: 0 }
    }

    pub fn begin_anew(&mut self) {
        self.tries = 0;
    }

    /// It was ready for so long, before it ended.
    fn was_ready(&mut self, time: Duration) {
        if time >= self.longest {
            self.begin_anew();
        }
    }

    fn next(&mut self) -> Duration {
        let factor = 2_u32.checked_pow(self.tries).unwrap_or(u32::MAX);
        self.tries = self.tries.saturating_add(1);
        self.first.saturating_mul(factor).min(self.longest)
    }
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
                self.backoff.was_ready(since.elapsed());
            }
            let why = match &end {
                End::Process => supervise::end_of(&self.shared.units, &self.place.unit).await,
                End::NotReady(why) => why.clone(),
            };
            if let Some(process) = process.filter(|_| !matches!(&end, End::Process)) {
                self.set("failed", &format!("{why}{AGAIN} when it is stopped"), None).await;
                let pid = process.pid;
                tracing::warn!(plugin = %self.view.id, pid, %why, "restarting a plugin that is not ready");
                self.peer.stops.begin();
                if let Err(error) = self.stop_own(false).await {
                    tracing::warn!(plugin = %self.view.id, %error, "cannot stop the plugin");
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
                    tracing::info!(
                        plugin = %self.view.id, unit = %self.place.unit, pid = running.process.pid,
                        adopted = !running.started, "the plugin runs"
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
        // What csid has not defined it does not stop because it is not ready.
        let limited = self.spec.supervision == Supervision::Managed;
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
        let message = format!("the plugin {} is failed: {}", self.view.id, self.view.health_message);
        self.answer(|| Err(Error::new(Kind::PluginUnavailable, message.clone())));
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
    use super::*;

    #[test]
    fn the_pause_doubles_up_to_the_longest_and_begins_anew_after_a_good_while() {
        let seconds = Duration::from_secs;
        let mut backoff = Backoff::new(seconds(1), seconds(60));
        let pauses: Vec<u64> = (0..9).map(|_| backoff.next().as_secs()).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
        backoff.was_ready(seconds(59));
        assert_eq!(backoff.next(), seconds(60));
        backoff.was_ready(seconds(60));
        assert_eq!((backoff.next(), backoff.next()), (seconds(1), seconds(2)));
        let last = (0..100).map(|_| backoff.next()).last();
        assert_eq!(last, Some(seconds(60)), "also after very many");
    }

    #[test]
    fn a_time_of_day() {
        assert_eq!(clock(UNIX_EPOCH + Duration::from_secs(86_400 + 3_661)), "01:01:01 UTC");
    }
}
