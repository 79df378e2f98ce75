//! Errors of the units that plugins run in.

use crate::error::{Details, Error, Kind, Obstacle, Step};
use crate::host::units::UnitsError;

/// Why a plugin's process is not restarted or stopped, or its log not read.
#[derive(Debug, thiserror::Error)]
pub(in crate::plugin) enum ProcessError {
    /// csid starts no instance of the plugin.
    #[error("csid does not run the plugin {id}")]
    NotRun { id: String },
    #[error("csid collects no log of the plugin {id}")]
    NoLog { id: String },
    #[error("too many logs are being read")]
    ManyLogs,
    #[error("the log of {id} cannot be read: {source}")]
    LogUnreadable { id: String, source: UnitsError },
    #[error("the plugin {id} was not stopped: {source}")]
    NotStopped { id: String, source: UnitsError },
    /// The deadline of a Restart has passed. `awaited`: the instance that csid waits for, with its state.
    #[error("the plugin {id} was stopped, and is not ready since: {awaited}")]
    NotBack { id: String, awaited: String },
    /// The stop ended a Probe.
    #[error("the plugin was stopped")]
    Stopped,
    /// The failed start ended a Probe. `why`: the text of the plugin's health.
    #[error("the plugin {id} is failed: {why}")]
    Failed { id: String, why: String },
}

impl ProcessError {
    fn kind(&self) -> Kind {
        match self {
            ProcessError::NotRun { .. } | ProcessError::NoLog { .. } => Kind::NotSupported,
            ProcessError::ManyLogs => Kind::RateLimited,
            ProcessError::LogUnreadable { .. } | ProcessError::NotStopped { .. } => Kind::Internal,
            ProcessError::NotBack { .. } => Kind::TimedOut,
            ProcessError::Stopped | ProcessError::Failed { .. } => Kind::PluginUnavailable,
        }
    }

    fn fill(self, details: &mut Details) {
        match self {
            ProcessError::NotRun { .. } | ProcessError::NoLog { .. } => {
                details.obstacle = Some(Obstacle::ExternalPlugin);
            }
            ProcessError::NotStopped { .. } => details.retryable = true,
            ProcessError::NotBack { id, .. } => {
                details.step = Some(Step::WaitingForPlugin);
                details.plugin = Some(id);
            }
            _ => {}
        }
    }
}

impl From<ProcessError> for Error {
    fn from(error: ProcessError) -> Self {
        Error::new(error.kind(), error.to_string()).with(|details| error.fill(details))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_error_has_its_kind_and_details() {
        let id = || "p".to_owned();
        for error in [ProcessError::NotRun { id: id() }, ProcessError::NoLog { id: id() }] {
            let error = Error::from(error);
            assert_eq!(
                (error.kind, error.details.obstacle),
                (Kind::NotSupported, Some(Obstacle::ExternalPlugin))
            );
        }
        let stuck =
            Error::from(ProcessError::NotStopped { id: id(), source: UnitsError::Exists { unit: id() } });
        assert_eq!((stuck.kind, stuck.details.retryable), (Kind::Internal, true));
        let late = Error::from(ProcessError::NotBack { id: id(), awaited: "plugin p (failed)".to_owned() });
        assert_eq!((late.kind, late.details.step), (Kind::TimedOut, Some(Step::WaitingForPlugin)));
        assert_eq!(late.details.plugin, Some(id()));
    }
}
