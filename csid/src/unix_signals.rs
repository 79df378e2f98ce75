//! Signals of the kernel to csid: SIGTERM and SIGINT to stop, SIGHUP to reload.
//!
//! The handlers stay when csid starts again within the process, which ends one runtime and starts another. A signal in between goes
//! to the next listener.

use tokio::signal::unix::{Signal, SignalKind, signal};

pub(crate) struct UnixSignals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SignalOrder {
    Stop,
    Reload,
}

impl UnixSignals {
    /// From here on none of them has its default effect. To be called in a runtime.
    pub fn listen() -> std::io::Result<Self> {
        let [terminate, interrupt, hangup] =
            [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(signal);
        Ok(UnixSignals { terminate: terminate?, interrupt: interrupt?, hangup: hangup? })
    }

    /// The next order; dropping the future loses none.
    pub async fn next(&mut self) -> SignalOrder {
        tokio::select! {
            _ = self.terminate.recv() => SignalOrder::Stop,
            _ = self.interrupt.recv() => SignalOrder::Stop,
            _ = self.hangup.recv() => SignalOrder::Reload,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rustix::process::{Signal, getpid, kill_process};
    use tokio::runtime::Runtime;

    use super::*;

    #[test]
    fn signal_without_listener_reaches_the_next() {
        for (signal, order) in [
            (Signal::TERM, SignalOrder::Stop),
            (Signal::INT, SignalOrder::Stop),
            (Signal::HUP, SignalOrder::Reload),
        ] {
            let before = Runtime::new().unwrap();
            let mut signals = before.block_on(async { UnixSignals::listen() }).unwrap();
            before
                .block_on(async { tokio::time::timeout(Duration::ZERO, signals.next()).await })
                .unwrap_err();
            before.shutdown_background();
            // The handler outlives the runtime. Else this signal would end the tests.
            kill_process(getpid(), signal).unwrap();
            let next = Runtime::new().unwrap();
            let told =
                next.block_on(async { tokio::time::timeout(Duration::from_secs(10), signals.next()).await });
            assert_eq!(told.unwrap(), order);
        }
    }
}
