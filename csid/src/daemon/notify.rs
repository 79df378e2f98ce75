//! Messages to systemd.

use sd_notify::NotifyState;

pub(super) fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "systemd could not be notified");
    }
}
