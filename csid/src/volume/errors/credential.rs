//! Errors of secrets from systemd credentials.

use crate::error::{Details, Error, Kind, Obstacle};

/// Why the secrets of a credential are not there.
#[derive(Debug, thiserror::Error)]
pub(in crate::volume) enum SecretsError {
    #[error("`{name}` is no credential's name: it is empty, begins with a dot or has a slash")]
    NoName { name: String },
    #[error("credential {name}: systemd has none of that name")]
    Unknown { name: String },
    #[error("credential {name}: no systemd answers, and csid was started without it")]
    NotGiven { name: String },
    #[error("credential {name}: {source}")]
    NotLoaded { name: String, source: Box<dyn std::error::Error + Send + Sync> },
    /// csid's own copy of its start.
    #[error("credential {name}: cannot be read: {source}")]
    Unreadable { name: String, source: std::io::Error },
    #[error("the deadline passed before systemd handed over the credential {name}")]
    Late { name: String },
}

impl SecretsError {
    fn kind(&self) -> Kind {
        match self {
            SecretsError::NoName { .. } => Kind::InvalidArgument,
            SecretsError::Late { .. } => Kind::TimedOut,
            SecretsError::Unknown { .. }
            | SecretsError::NotGiven { .. }
            | SecretsError::NotLoaded { .. }
            | SecretsError::Unreadable { .. } => Kind::SecretRequired,
        }
    }

    fn fill(self, details: &mut Details) {
        details.obstacle = match self.kind() {
            Kind::SecretRequired => Some(Obstacle::Credential),
            _ => None,
        };
    }
}

impl From<SecretsError> for Error {
    fn from(error: SecretsError) -> Self {
        Error::new(error.kind(), error.to_string()).with(|details| error.fill(details))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_credential_is_an_obstacle_and_no_advice() {
        let name = || "csid.key".to_owned();
        for (error, text) in [
            (SecretsError::Unknown { name: name() }, "credential csid.key: systemd has none of that name"),
            (
                SecretsError::NotLoaded { name: name(), source: "it is larger than 7 bytes".into() },
                "credential csid.key: it is larger than 7 bytes",
            ),
        ] {
            let error = Error::from(error);
            assert_eq!((error.kind, error.message.as_str()), (Kind::SecretRequired, text));
            assert_eq!(error.details.obstacle, Some(Obstacle::Credential));
        }
        let late = Error::from(SecretsError::Late { name: name() });
        assert_eq!((late.kind, late.details.obstacle), (Kind::TimedOut, None));
    }
}
