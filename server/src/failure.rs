//! Errors as callers get them: a status of gRPC, with a Failure in the trailer `csid-failure-bin`.

use csi_proto::cluster::TRAILER;
use csi_proto::cluster::v1::Failure;
use csid::error::{cut, shortened};
use csid::{Error, Kind};
use csid_etcd::EtcdError;
use prost::Message;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Status};

use crate::rows::RowError;

/// Trailers have a limit of their own, so few holders are named.
const HOLDERS: usize = 16;
const MESSAGE: usize = 2048;

/// Why a server did not do what it was asked for.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ServerError {
    #[error(transparent)]
    Refused(#[from] Error),
    /// The claim waits in the queue. The same call asks for it again.
    #[error(transparent)]
    Queued(Error),
    /// The volume's registration is another one than the caller of a claim knows.
    #[error(transparent)]
    Changed(Error),
    /// This server does not do it now.
    #[error("{0}")]
    Unavailable(String),
    /// This server does not reach etcd, does not follow it any more, or is about to stop. etcd may have what the call has written, or get it yet.
    #[error("{0}")]
    Away(String),
    #[error(transparent)]
    Etcd(#[from] EtcdError),
    #[error(transparent)]
    Row(#[from] RowError),
}

pub type Result<T, E = ServerError> = std::result::Result<T, E>;

impl ServerError {
    pub fn denied(text: impl Into<String>) -> Self {
        Error::new(Kind::NotAuthorized, text).into()
    }

    /// Returns whether another server may do the same now.
    pub fn is_unavailable(&self) -> bool {
        match self {
            ServerError::Refused(error) => error.kind == Kind::Unavailable,
            ServerError::Unavailable(_) | ServerError::Away(_) => true,
            ServerError::Etcd(error) => is_away(error),
            ServerError::Row(_) | ServerError::Queued(_) | ServerError::Changed(_) => false,
        }
    }

    /// Returns the error of a call that has written something. Such a call is not Unavailable, but Uncertain.
    pub fn after_a_write(self) -> Self {
        if !self.is_unavailable() {
            return self;
        }
        let (_, Failure { message, .. }) = answer(self);
        Error::new(Kind::Uncertain, format!("{message}; the call may have been done")).into()
    }

    /// Returns the error of a change that has begun. A refusal does not say any more that nothing was written.
    pub fn of_begun(self) -> Self {
        match self {
            ServerError::Unavailable(text) => ServerError::Away(text),
            error => error,
        }
    }

    /// Returns the error of a call that may have written something. A server that refuses the call, and a full etcd, have not.
    pub fn of_a_change(self) -> Self {
        match self {
            ServerError::Unavailable(_) | ServerError::Etcd(EtcdError::Full) => self,
            error => error.after_a_write(),
        }
    }

    /// Returns the error of a call or session that ends because the server has no etcd, or stops.
    pub fn cut_off() -> Self {
        ServerError::Away("this server does not follow etcd now, or stops".into())
    }
}

impl From<csid::store::registry::RegistryError> for ServerError {
    fn from(error: csid::store::registry::RegistryError) -> Self {
        use csid::store::registry::RegistryError;
        match error {
            RegistryError::Full(_) => ServerError::Etcd(EtcdError::Full),
            RegistryError::Unreachable(source) | RegistryError::Ended(source) => {
                tracing::warn!(error = %source, "a call was not done");
                ServerError::Away("the server cannot reach etcd".into())
            }
            RegistryError::Failed(source) => match source.downcast::<EtcdError>() {
                Ok(error) => ServerError::Etcd(*error),
                Err(source) => match source.downcast::<RowError>() {
                    Ok(error) => ServerError::Row(*error),
                    Err(source) => ServerError::Refused(RegistryError::Failed(source).into()),
                },
            },
            error => ServerError::Refused(error.into()),
        }
    }
}

impl From<ServerError> for csid::store::registry::RegistryError {
    fn from(error: ServerError) -> Self {
        use csid::store::registry::RegistryError;
        match error {
            ServerError::Etcd(error) => error.into(),
            ServerError::Unavailable(text) | ServerError::Away(text) => {
                RegistryError::Unreachable(text.into())
            }
            ServerError::Refused(error) | ServerError::Queued(error) | ServerError::Changed(error) => {
                RegistryError::Failed(error.into())
            }
            ServerError::Row(error) => RegistryError::Failed(error.into()),
        }
    }
}

impl From<ServerError> for Status {
    fn from(error: ServerError) -> Self {
        let (code, failure) = answer(error);
        let message = failure.message.clone();
        let mut metadata = MetadataMap::new();
        metadata.insert_bin(TRAILER, MetadataValue::from_bytes(&failure.encode_to_vec()));
        Status::with_metadata(code, message, metadata)
    }
}

/// Returns the code and the failure that a caller gets.
fn answer(error: ServerError) -> (Code, Failure) {
    match error {
        ServerError::Refused(error) => refused(error),
        ServerError::Queued(error) => {
            let (code, failure) = refused(error);
            (code, Failure { queued: true, ..failure })
        }
        ServerError::Changed(error) => {
            let (code, failure) = refused(error);
            (code, Failure { changed: true, ..failure })
        }
        ServerError::Unavailable(message) | ServerError::Away(message) => unavailable(message),
        ServerError::Etcd(error @ EtcdError::Full) => unavailable(error.to_string()),
        ServerError::Etcd(error) if is_away(&error) => {
            // It names etcd's members, which are none of the callers' business.
            tracing::warn!(%error, "a call was not done");
            unavailable("the server cannot reach etcd".into())
        }
        // The reason may have a part of the value, such as a volume's context.
        ServerError::Etcd(EtcdError::Unreadable { key, why: _ }) => {
            tracing::warn!(key, "a value in etcd cannot be read");
            refused(Error::internal(format!("the value of {key} in etcd cannot be read")))
        }
        error @ (ServerError::Etcd(_) | ServerError::Row(_)) => refused(Error::internal(error.to_string())),
    }
}

/// Returns whether etcd gave no answer, or has no place.
fn is_away(error: &EtcdError) -> bool {
    matches!(
        error,
        EtcdError::Unreachable { .. }
            | EtcdError::Open { .. }
            | EtcdError::Full
            | EtcdError::Restored { .. }
            | EtcdError::Ended
    )
}

fn unavailable(message: String) -> (Code, Failure) {
    refused(Error::new(Kind::Unavailable, message))
}

fn refused(error: Error) -> (Code, Failure) {
    let code = match error.kind {
        Kind::InvalidArgument => Code::InvalidArgument,
        Kind::NotFound => Code::NotFound,
        Kind::AlreadyExists => Code::AlreadyExists,
        Kind::ClaimConflict | Kind::SecretRequired => Code::FailedPrecondition,
        Kind::Busy | Kind::Uncertain => Code::Aborted,
        Kind::PluginUnavailable | Kind::PluginShutdown | Kind::ShuttingDown | Kind::Unavailable => {
            Code::Unavailable
        }
        Kind::NotSupported => Code::Unimplemented,
        Kind::NotAuthorized => Code::PermissionDenied,
        Kind::Cancelled => Code::Cancelled,
        Kind::TimedOut => Code::DeadlineExceeded,
        Kind::RateLimited => Code::ResourceExhausted,
        Kind::StateCorrupt => Code::DataLoss,
        Kind::PluginError | Kind::Internal => Code::Internal,
    };
    let holders = error.details.holders.iter().take(HOLDERS);
    let failure = Failure {
        kind: error.kind.name().to_owned(),
        message: cut(&error.message, MESSAGE).into_owned(),
        retryable: error.details.retryable,
        holders: holders.map(|holder| shortened(holder).into_owned()).collect(),
        step: error.details.step.map(|step| step.name().to_owned()).unwrap_or_default(),
        rpc: error.details.rpc.unwrap_or_default().to_owned(),
        code: error.details.grpc_code,
        queued: false,
        changed: false,
    };
    (code, failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_of_a_value_shows_no_part_of_it() {
        let unreadable = EtcdError::Unreadable { key: "/csid/v1/vol/a".into(), why: "\"hunter2\"".into() };
        let error = csid::store::registry::RegistryError::from(unreadable);
        let status = Status::from(ServerError::from(error));
        let text = format!("{status:?}");
        assert!(text.contains("/csid/v1/vol/a") && !text.contains("hunter2"), "{text}");
        assert_eq!(status.code(), Code::Internal);
    }

    #[test]
    fn trailer_of_a_huge_error_is_small() {
        let error = Error::new(Kind::ClaimConflict, "x".repeat(1_000_000)).with(|details| {
            details.holders = (0..10_000).map(|n| format!("n{n}/{}", "c".repeat(128))).collect()
        });
        let status = Status::from(ServerError::from(error));
        assert_eq!((status.code(), status.message().len()), (Code::FailedPrecondition, MESSAGE));
        let trailer = status.metadata().get_bin(TRAILER).unwrap().to_bytes().unwrap();
        let failure = Failure::decode(trailer).unwrap();
        assert_eq!((failure.kind.as_str(), failure.retryable), ("ClaimConflict", true));
        assert_eq!((failure.holders.len(), failure.holders[0].starts_with("n0/ccc")), (HOLDERS, true));
    }
}
