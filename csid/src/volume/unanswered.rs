//! A call of a controller that did not come to its good end: what is known of it.

use tonic::Code;

use crate::error::{Error, Kind};
use crate::plugin::{Class, RpcError};

/// Why a call of a controller did not come to its good end.
pub(super) struct Unanswered {
    pub(super) error: Error,
    /// The plugin was asked.
    pub(super) is_sent: bool,
    /// It may have had its effect, or have it yet.
    pub(super) perhaps_done: bool,
}

impl From<Unanswered> for Error {
    fn from(unanswered: Unanswered) -> Self {
        unanswered.error
    }
}

impl Unanswered {
    /// Before the plugin was asked.
    pub(super) fn before(error: Error) -> Self {
        Unanswered { error, is_sent: false, perhaps_done: false }
    }

    /// When the plugin was asked.
    pub(super) fn after(error: Error) -> Self {
        Unanswered { error, is_sent: true, perhaps_done: true }
    }

    /// Whether it is known that nothing has come of it. `asked_before`: there were other tries, which may have done it; what
    /// the plugin says of the caller, or of itself, says nothing of them (CSI rule 36).
    pub(super) fn is_no(&self, asked_before: bool) -> bool {
        let tried = self.perhaps_done || asked_before;
        let lasts = !self.error.details.retryable;
        match self.error.details.grpc_code.map(|code| Code::from(code as i32)) {
            Some(Code::ResourceExhausted) => !tried,
            None | Some(Code::Unauthenticated | Code::PermissionDenied | Code::Unimplemented) => {
                lasts && !tried
            }
            Some(_) => lasts,
        }
    }
}

/// What the tries of a call came to.
#[derive(Default)]
pub(super) struct Tried {
    is_sent: bool,
    is_under_way: bool,
    unknown: bool,
    perhaps_done: bool,
}

impl Tried {
    /// From now on the plugin may be asked, until the outcome is noted.
    pub(super) fn begin(&mut self) {
        self.is_under_way = true;
    }

    pub(super) fn note(&mut self, error: &RpcError) {
        self.is_under_way = false;
        self.is_sent |= !matches!(error.class, Class::NotSent | Class::Forbidden | Class::Shutdown);
        self.unknown |= error.class == Class::Unknown;
        // A plugin that is busy with it may do it yet.
        self.perhaps_done |=
            self.unknown || (error.class == Class::Transient && error.code != Code::ResourceExhausted);
    }

    pub(super) fn unanswered(&self, error: Error) -> Unanswered {
        let kind = if self.unknown && error.details.retryable { Kind::Uncertain } else { error.kind };
        let Tried { is_sent, perhaps_done, .. } = *self;
        Unanswered { error: Error { kind, ..error }, is_sent, perhaps_done }
    }

    /// Nobody wants it any more.
    pub(super) fn abandoned(&self, error: Error) -> Unanswered {
        match self.is_sent || self.is_under_way {
            true => Unanswered::after(error),
            false => Unanswered::before(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CSI rules 36 and 39.
    #[test]
    fn only_a_word_on_the_volume_ends_what_may_have_been_done() {
        let error = |kind, code: Option<Code>, retryable| {
            Error::new(kind, "").with(|details| {
                details.grpc_code = code.map(|code| code as u32);
                details.retryable = retryable;
            })
        };
        let plugin = |code, retryable| error(Kind::PluginError, Some(code), retryable);
        // (the error, is it a no at the first try, after one that may have done it)
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
                Unanswered { error: error.clone(), is_sent: true, perhaps_done }.is_no(before)
            };
            assert_eq!(is_no(false, false), first, "{error:?}");
            assert_eq!((is_no(true, false), is_no(false, true)), (later, later), "{error:?}");
        }
    }
}
