//! Why a plugin's process or its network namespace is not there.

use std::io;
use std::path::PathBuf;

use crate::host::units::{UnitState, UnitsError};
use crate::plugin::errors::spec::SpecError;

/// Why a plugin cannot start, or has ended at its start. csictl's hints read these texts in the plugin's health.
#[derive(Debug, thiserror::Error)]
pub(in crate::plugin) enum StartError {
    #[error(transparent)]
    Units(#[from] UnitsError),
    /// The spec cannot be started now: of an older csid, or with a program that is gone or not root's alone.
    #[error("{source}")]
    Spec {
        #[from]
        source: SpecError,
    },
    #[error("cannot prepare {}: {source}", path.display())]
    Socket { path: PathBuf, source: io::Error },
    #[error("there is no network namespace {}", path.display())]
    NoNamespace { path: PathBuf },
    #[error("network-prestart: {unit}: {how}")]
    Network { unit: String, how: String },
    #[error("network-prestart ({unit}) ended well, but did not make {}", path.display())]
    NotMade { path: PathBuf, unit: String },
    #[error("{unit} ended as it was started: {how}")]
    Ended { unit: String, how: String },
    #[error("{unit} has ended, but processes of it are left, which keep the definition of before")]
    Leftovers { unit: String },
    #[error("{unit} stays {active}")]
    Stuck { unit: String, active: String },
    #[error("there is no {unit}")]
    NotFound { unit: String },
    #[error("{unit} is masked")]
    Masked { unit: String },
    #[error("systemd cannot load {unit} ({load})")]
    NotLoaded { unit: String, load: String },
    #[error("{unit} is another name of {name}")]
    Alias { unit: String, name: String },
    #[error(
        "{unit} has no main process to watch: it is of Type=oneshot, or of Type=forking without PIDFile="
    )]
    NoProcess { unit: String },
}

pub(in crate::plugin) fn how_it_ended(state: &UnitState) -> String {
    match state.exit {
        (1, 203) => "systemd could not execute argv[0] (status 203)".into(),
        (1, 225) => "systemd could not put it into its network namespace (status 225)".into(),
        (1, 226) => "systemd could not set up its mount namespace (status 226)".into(),
        (1, status) => format!("it exited with status {status}"),
        (2 | 3, signal) => format!("it was killed by signal {signal}"),
        _ => format!("it ended ({})", state.result),
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;
    use crate::plugin::trust::Distrust;

    #[test]
    fn start_error_keeps_the_cause_of_a_refused_program() {
        let path = PathBuf::from("/usr/bin/csi-driver");
        let source = Distrust::Writable { path, mode: 0o757 };
        let error = StartError::from(SpecError::Distrusted { key: "argv", source });
        let spec = error.source().unwrap();
        let cause = spec.source().unwrap();
        assert!(matches!(cause.downcast_ref(), Some(Distrust::Writable { .. })), "{cause}");
        assert_eq!(error.to_string(), spec.to_string());
    }
}
