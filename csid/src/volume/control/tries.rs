//! The tries of a controller call that failed: whether the plugin was called, and whether a call may have had its effect.

use tonic::Code;

use crate::error::{Error, Kind};
use crate::plugin::{RpcOutcome, is_attached_otherwise, proves_no_effect};

/// The failure of a controller call.
pub(in crate::volume) struct RpcFailure {
    pub(in crate::volume) error: Error,
    /// Whether the plugin was called.
    pub(in crate::volume) is_sent: bool,
    /// Whether the call may have had its effect, or may have it yet.
    pub(in crate::volume) perhaps_done: bool,
}

impl From<RpcFailure> for Error {
    fn from(unanswered: RpcFailure) -> Self {
        unanswered.error
    }
}

impl RpcFailure {
    /// Makes a failure from before the plugin was called.
    pub(in crate::volume) fn before(error: Error) -> Self {
        RpcFailure { error, is_sent: false, perhaps_done: false }
    }

    /// Makes a failure from after the plugin was called.
    pub(in crate::volume) fn after(error: Error) -> Self {
        RpcFailure { error, is_sent: true, perhaps_done: true }
    }

    /// Returns whether the failed attach found an attachment with other arguments, which is not its own.
    pub(in crate::volume) fn is_of_another_attachment(&self) -> bool {
        let code = self.error.details.grpc_code.map(|code| Code::from(code as i32));
        !self.perhaps_done && code.is_some_and(is_attached_otherwise)
    }

    /// Returns whether the call is known to have had no effect. `asked_before`: earlier tries may have had one.
    pub(in crate::volume) fn is_no(&self, asked_before: bool) -> bool {
        let code = self.error.details.grpc_code.map(|code| Code::from(code as i32));
        proves_no_effect(code, self.error.details.retryable, self.perhaps_done || asked_before)
    }
}

/// The combined outcome of the tries of a call.
#[derive(Default)]
pub(in crate::volume) struct RpcTries {
    is_sent: bool,
    is_under_way: bool,
    unknown: bool,
    perhaps_done: bool,
}

impl RpcTries {
    /// Marks that the plugin may be called from now on, until the outcome is noted.
    pub(in crate::volume) fn begin(&mut self) {
        self.is_under_way = true;
    }

    pub(in crate::volume) fn note(&mut self, outcome: RpcOutcome) {
        self.is_under_way = false;
        self.is_sent |= outcome.is_sent();
        self.unknown |= outcome == RpcOutcome::Unknown;
        self.perhaps_done |= outcome.is_perhaps_done();
    }

    pub(in crate::volume) fn unanswered(&self, error: Error) -> RpcFailure {
        let kind = if self.unknown && error.details.retryable { Kind::Uncertain } else { error.kind };
        let RpcTries { is_sent, perhaps_done, .. } = *self;
        RpcFailure { error: Error { kind, ..error }, is_sent, perhaps_done }
    }

    /// Makes the failure of an abandoned call.
    pub(in crate::volume) fn abandoned(&self, error: Error) -> RpcFailure {
        match self.is_sent || self.is_under_way {
            true => RpcFailure::after(error),
            false => RpcFailure::before(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CSI rules 36 and 39.
    #[test]
    fn only_an_error_about_the_volume_is_definite() {
        let error = |kind, code: Option<Code>, retryable| {
            Error::new(kind, "").with(|details| {
                details.grpc_code = code.map(|code| code as u32);
                details.retryable = retryable;
            })
        };
        let plugin = |code, retryable| error(Kind::PluginError, Some(code), retryable);
        // (the error, is it a no at the first try, is it one after a try that may have had its effect)
        for (error, first, later) in [
            (plugin(Code::InvalidArgument, false), true, true),
            (plugin(Code::OutOfRange, false), true, true),
            (plugin(Code::AlreadyExists, false), true, true),
            (plugin(Code::FailedPrecondition, false), true, true),
            (plugin(Code::ResourceExhausted, true), true, false),
            (plugin(Code::Unauthenticated, false), true, false),
            (plugin(Code::PermissionDenied, false), true, false),
            (plugin(Code::Unimplemented, false), true, false),
            (plugin(Code::Aborted, true), false, false),
            (plugin(Code::DeadlineExceeded, true), false, false),
            (error(Kind::SecretRequired, None, false), true, false),
            (error(Kind::PluginUnavailable, None, true), false, false),
            (error(Kind::InvalidArgument, None, false), true, false),
        ] {
            let is_no = |perhaps_done, before| {
                RpcFailure { error: error.clone(), is_sent: true, perhaps_done }.is_no(before)
            };
            assert_eq!(is_no(false, false), first, "{error:?}");
            assert_eq!((is_no(true, false), is_no(false, true)), (later, later), "{error:?}");
        }
    }
}
