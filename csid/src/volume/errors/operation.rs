//! Errors of operations, whatever they are about.

use crate::error::{Details, Error, Kind};
use crate::volume::api::operation_kind::OperationKind;

/// Why an operation ended without its result.
#[derive(Debug, thiserror::Error)]
pub(in crate::volume) enum OperationError {
    /// Another call has ended the operation: an Unmount ends a Mount of the same key, a Release a Claim.
    #[error("{} came in", ending(*by))]
    EndedBy { by: OperationKind },
    /// An order to forget the mount, claim or attachment has ended the operation.
    #[error("an order to forget the mount, claim or attachment came in")]
    Forgotten,
    /// `kind`: TimedOut, ShuttingDown or Cancelled.
    #[error("{}", stopped(*kind))]
    Stopped { kind: Kind },
    /// An earlier operation could not be settled in this one's time.
    #[error("an earlier operation has not ended: {}", source.message)]
    Unsettled { source: Error },
    /// The operation failed, and so did its rollback.
    #[error("{}; its rollback has not ended: {}", source.message, undo.message)]
    UndoneLater { source: Error, undo: Error },
    /// An operation without a caller was put off. No caller reads it.
    #[error("put off for another operation")]
    Yielded,
    #[error("csid is stopping; the answer is kept")]
    ShuttingDown,
}

fn ending(by: OperationKind) -> &'static str {
    match by {
        OperationKind::Release => "a Release of the same claim",
        OperationKind::Delete => "a DeleteVolume of the same volume",
        OperationKind::Deregister => "a DeregisterVolume of the same volume",
        _ => "an Unmount of the same mount",
    }
}

fn stopped(kind: Kind) -> &'static str {
    match kind {
        Kind::TimedOut => "deadline exceeded; the operation is being rolled back",
        Kind::ShuttingDown => {
            "csid is stopping; the next csid rolls the operation back, and makes a mount again if the host has booted"
        }
        _ => "the operation was cancelled and is being rolled back",
    }
}

impl OperationError {
    fn kind(&self) -> Kind {
        match self {
            OperationError::EndedBy { .. } | OperationError::Forgotten => Kind::Cancelled,
            OperationError::Stopped { kind } => *kind,
            OperationError::Unsettled { .. } | OperationError::UndoneLater { .. } => Kind::Uncertain,
            OperationError::Yielded => Kind::Busy,
            OperationError::ShuttingDown => Kind::ShuttingDown,
        }
    }

    fn fill(self, details: &mut Details) {
        if let OperationError::Unsettled { source } | OperationError::UndoneLater { source, .. } = self {
            *details = *source.details;
            details.retryable = true;
        }
    }
}

impl From<OperationError> for Error {
    fn from(error: OperationError) -> Self {
        Error::new(error.kind(), error.to_string()).with(|details| error.fill(details))
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;

    #[test]
    fn wrapping_error_keeps_details_and_source() {
        let inner = Error::new(Kind::PluginError, "the plugin refused").with(|details| {
            details.rpc = Some("NodeUnpublishVolume");
            details.grpc_code = Some(13);
        });
        let undo = Error::new(Kind::TimedOut, "no answer");
        for (error, text) in [
            (
                OperationError::Unsettled { source: inner.clone() },
                "an earlier operation has not ended: the plugin refused",
            ),
            (
                OperationError::UndoneLater { source: inner.clone(), undo },
                "the plugin refused; its rollback has not ended: no answer",
            ),
        ] {
            assert_eq!(error.source().unwrap().to_string(), inner.to_string());
            let answer = Error::from(error);
            assert_eq!((answer.kind, answer.message.as_str()), (Kind::Uncertain, text));
            assert_eq!(*answer.details, Details { retryable: true, ..*inner.details.clone() });
        }
    }
}
