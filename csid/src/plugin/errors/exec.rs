//! Errors of commands in plugins.

use std::time::Duration;

use crate::error::{Details, Error, Kind, Obstacle};
use crate::host::exec::ExecError;

/// Why a command is not run in a plugin, or its end is not known.
#[derive(Debug, thiserror::Error)]
pub(in crate::plugin) enum CommandError {
    /// The main process may be a container's manager.
    #[error(
        "the main process of {unit} is on the host as far as systemd knows: it may be a container's manager, and the command \
         would not be where the plugin {id} is"
    )]
    OnHost { id: String, unit: String },
    /// The plugin has no process. `health`: its text; it may be empty.
    #[error("the plugin {id} is {state}, and no command can be run in it{}", because(health))]
    NotRunning { id: String, state: &'static str, health: String },
    /// `id`: `None` for a call that names no plugin.
    #[error("no command can be run: {source}")]
    Failed { id: Option<String>, source: ExecError },
    #[error("there is no command {operation} in the plugin {id}, or it ended long ago")]
    Unknown { id: String, operation: String },
    #[error("{operation} is another uid's")]
    OtherUid { operation: String },
    #[error("{operation} does not run on a terminal")]
    NoTerminal { operation: String },
    #[error("{operation} has ended")]
    Ended { operation: String },
    #[error("how {operation} ended is not known: what watched it was killed")]
    Lost { operation: String },
    #[error("systemd has not answered in {limit:?}")]
    Silent { limit: Duration },
    #[error("csid is stopping; the command goes on")]
    Stopping,
}

fn because(health: &str) -> String {
    if health.is_empty() { String::new() } else { format!(": {health}") }
}

impl CommandError {
    fn kind(&self) -> Kind {
        match self {
            CommandError::OnHost { .. } => Kind::NotSupported,
            CommandError::NotRunning { .. } => Kind::PluginUnavailable,
            CommandError::Failed { source: ExecError::Many | ExecError::ManyOf { .. }, .. } => {
                Kind::RateLimited
            }
            CommandError::Failed { .. } | CommandError::Silent { .. } => Kind::Internal,
            CommandError::Unknown { .. } | CommandError::Ended { .. } | CommandError::Lost { .. } => {
                Kind::NotFound
            }
            CommandError::OtherUid { .. } => Kind::NotAuthorized,
            CommandError::NoTerminal { .. } => Kind::InvalidArgument,
            CommandError::Stopping => Kind::ShuttingDown,
        }
    }

    fn fill(self, details: &mut Details) {
        match self {
            CommandError::OnHost { .. } => details.obstacle = Some(Obstacle::Container),
            CommandError::Failed { id, .. } => details.plugin = id,
            _ => {}
        }
    }
}

impl From<CommandError> for Error {
    fn from(error: CommandError) -> Self {
        Error::new(error.kind(), error.to_string()).with(|details| error.fill(details))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_of_commands_is_another_kind_than_a_failure() {
        let failed = |source| Error::from(CommandError::Failed { id: Some("p".to_owned()), source });
        for source in [ExecError::Many, ExecError::ManyOf { uid: 7 }] {
            let error = failed(source);
            assert_eq!((error.kind, error.details.plugin.as_deref()), (Kind::RateLimited, Some("p")));
        }
        let source = std::io::Error::from_raw_os_error(libc::EMFILE);
        let error = failed(ExecError::Os { step: "make a terminal", source });
        assert_eq!(error.kind, Kind::Internal);
    }

    #[test]
    fn command_error_names_the_container_as_obstacle() {
        let [id, unit] = ["p", "p.service"].map(str::to_owned);
        let error = Error::from(CommandError::OnHost { id, unit });
        assert_eq!((error.kind, error.details.obstacle), (Kind::NotSupported, Some(Obstacle::Container)));
        let not_running = |health: &str| {
            let health = health.to_owned();
            CommandError::NotRunning { id: "p".to_owned(), state: "failed", health }.to_string()
        };
        assert_eq!(not_running(""), "the plugin p is failed, and no command can be run in it");
        assert_eq!(not_running("a: b"), "the plugin p is failed, and no command can be run in it: a: b");
    }
}
