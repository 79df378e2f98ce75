//! Errors of plugins that register themselves.

use std::time::Duration;

use crate::error::{Error, Kind};

/// Why csid does not take the plugin of a registrar.
#[derive(Debug, thiserror::Error)]
pub(in crate::plugin) enum RegistrarError {
    /// `why`: the registrar's message, as it may be shown.
    #[error("GetInfo: {why}")]
    Refused { why: String },
    #[error("GetInfo: no answer within {patience:?}")]
    Silent { patience: Duration },
    #[error("csid takes plugins of type CSIPlugin, not `{found}`")]
    OtherType { found: String },
    #[error("csid speaks version 1 of CSI, and the plugin supports no version 1")]
    OtherVersion,
}

impl RegistrarError {
    fn kind(&self) -> Kind {
        match self {
            RegistrarError::Refused { .. } | RegistrarError::Silent { .. } => Kind::PluginUnavailable,
            RegistrarError::OtherType { .. } | RegistrarError::OtherVersion => Kind::InvalidArgument,
        }
    }
}

impl From<RegistrarError> for Error {
    fn from(error: RegistrarError) -> Self {
        Error::new(error.kind(), error.to_string())
    }
}
