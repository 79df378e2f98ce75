//! Errors of the plugin registry.

use std::path::PathBuf;

use tokio::task::JoinError;

use crate::error::{Details, Error, Kind, Obstacle};
use crate::plugin::errors::spec::SpecError;

/// Why a plugin is not found, registered or unregistered.
#[derive(Debug, thiserror::Error)]
pub(in crate::plugin) enum RegistrationError {
    #[error("there is no plugin {id}")]
    Unknown { id: String },
    /// A change of a plugin that a file defines.
    #[error("the plugin {id} is defined by plugins.d/{id}.toml")]
    OfFile { id: String },
    /// A registration with the name of an instance that a file defines.
    #[error("instance `{instance}` of the plugin {id} is defined by plugins.d/{id}.toml")]
    NameOfFile { id: String, instance: String },
    /// A change of an instance that goes with its socket in `directory`.
    #[error(
        "instance `{instance}` of the plugin {id} registered itself, and goes with its socket in {}",
        directory.display()
    )]
    SelfRegistered { id: String, instance: String, directory: PathBuf },
    #[error("instance `{instance}`: such names are of instances that register themselves")]
    ReservedName { instance: String },
    /// Keys by which a caller could make csid run or reach what belongs to others.
    #[error(
        "argv, environment, unit, profile, propagation, network, plugin-root and plugin-view are root's alone"
    )]
    RootsKeys,
    /// A registration of another uid.
    #[error("the plugin {id} belongs to uid {owner}")]
    OtherOwner { id: String, owner: u32 },
    /// The end of an instance that another uid registered.
    #[error("plugin {id} was registered by another uid")]
    OtherUid { id: String },
    #[error("instance `{instance}` of the plugin {id} is registered with another spec")]
    OtherSpec { id: String, instance: String },
    /// `instance`: the one that has the socket.
    #[error("instance `{instance}` of the plugin {id} has that socket; each instance has its own")]
    SocketTaken { id: String, instance: String },
    /// The plugin has instances of a file or of a call.
    #[error("the plugin {id} is defined or registered otherwise, so no instance of a socket joins it")]
    NotJoined { id: String },
    #[error("the spec cannot be written: {source}")]
    Unwritten { source: serde_json::Error },
    #[error("the change of the registry was not ended: {source}")]
    Interrupted { source: JoinError },
    #[error("csid is stopping")]
    Stopping,
}

impl RegistrationError {
    pub(in crate::plugin) fn unknown(id: &str) -> Self {
        RegistrationError::Unknown { id: id.to_owned() }
    }

    fn kind(&self) -> Kind {
        match self {
            RegistrationError::Unknown { .. } => Kind::NotFound,
            RegistrationError::OfFile { .. } | RegistrationError::SelfRegistered { .. } => Kind::NotSupported,
            RegistrationError::NameOfFile { .. }
            | RegistrationError::OtherSpec { .. }
            | RegistrationError::SocketTaken { .. }
            | RegistrationError::NotJoined { .. } => Kind::AlreadyExists,
            RegistrationError::ReservedName { .. } => Kind::InvalidArgument,
            RegistrationError::RootsKeys
            | RegistrationError::OtherOwner { .. }
            | RegistrationError::OtherUid { .. } => Kind::NotAuthorized,
            RegistrationError::Unwritten { .. } | RegistrationError::Interrupted { .. } => Kind::Internal,
            RegistrationError::Stopping => Kind::PluginShutdown,
        }
    }

    fn obstacle(&self) -> Option<Obstacle> {
        match self {
            RegistrationError::Unknown { .. } => Some(Obstacle::UnknownPlugin),
            RegistrationError::OfFile { .. } | RegistrationError::NameOfFile { .. } => {
                Some(Obstacle::PluginOfFile)
            }
            RegistrationError::SelfRegistered { .. } => Some(Obstacle::SelfRegistered),
            RegistrationError::SocketTaken { .. } => Some(Obstacle::InstanceSocket),
            RegistrationError::Stopping => Some(Obstacle::Stopping),
            _ => None,
        }
    }

    fn fill(&self, details: &mut Details) {
        details.obstacle = self.obstacle();
    }
}

impl From<RegistrationError> for Error {
    fn from(error: RegistrationError) -> Self {
        Error::new(error.kind(), error.to_string()).with(|details| error.fill(details))
    }
}

/// Why the spec in a row of the journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub(in crate::plugin) enum KeptSpecError {
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error(transparent)]
    Spec(#[from] SpecError),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugin_of_a_file_is_refused_by_what_was_asked() {
        let id = || "p".to_owned();
        for (error, kind) in [
            (RegistrationError::OfFile { id: id() }, Kind::NotSupported),
            (RegistrationError::NameOfFile { id: id(), instance: "i".to_owned() }, Kind::AlreadyExists),
        ] {
            let error = Error::from(error);
            assert_eq!((error.kind, error.details.obstacle), (kind, Some(Obstacle::PluginOfFile)), "{error}");
            assert!(error.message.ends_with("plugins.d/p.toml"), "{error}");
        }
    }

    #[test]
    fn registration_error_has_its_kind_and_obstacle() {
        let [id, instance] = ["p", "i"].map(str::to_owned);
        for (error, kind, obstacle) in [
            (RegistrationError::unknown("p"), Kind::NotFound, Some(Obstacle::UnknownPlugin)),
            (RegistrationError::Stopping, Kind::PluginShutdown, Some(Obstacle::Stopping)),
            (
                RegistrationError::SocketTaken { id: id.clone(), instance: instance.clone() },
                Kind::AlreadyExists,
                Some(Obstacle::InstanceSocket),
            ),
            (
                RegistrationError::SelfRegistered {
                    id: id.clone(),
                    instance,
                    directory: "/var/lib/csid/plugins_registry".into(),
                },
                Kind::NotSupported,
                Some(Obstacle::SelfRegistered),
            ),
            (RegistrationError::OtherOwner { id, owner: 7 }, Kind::NotAuthorized, None),
        ] {
            let error = Error::from(error);
            assert_eq!((error.kind, error.details.obstacle), (kind, obstacle), "{error}");
        }
    }
}
