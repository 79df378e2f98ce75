//! What a failed call of etcd means for the request: refused for good, not done, or not known.

use tonic::{Code, ConnectError, Status};

use crate::error::EtcdError;

/// The meaning of a failed call.
#[derive(Debug)]
pub(crate) enum Reply {
    /// etcd did not do it, and would not do it the next time.
    Refused(EtcdError),
    /// The member did not propose the request. Another member may do it.
    NotDone(String),
    /// The database has reached its quota. etcd 3.4 may have committed the transaction that reached it, and answers with the same
    /// error.
    NoSpace,
    /// The request may have been done, or may be done later.
    Unknown(String),
}

/// Texts of etcd's errors that come before a proposal, or in place of one.
const TOO_MANY: &str = "etcdserver: too many requests";
const NO_SPACE: &str = "etcdserver: mvcc: database space exceeded";
const COMPACTED: &str = "etcdserver: mvcc: required revision has been compacted";

impl Reply {
    /// Classifies an error. What is not known to come before a proposal has an unknown outcome.
    pub(crate) fn of(step: &'static str, member: &str, revision: u64, status: &Status) -> Reply {
        let text = format!("{member}: {:?}: {}", status.code(), status.message());
        let why = || status.message().to_owned();
        match (status.code(), status.message()) {
            (Code::ResourceExhausted, NO_SPACE) => Reply::NoSpace,
            (Code::ResourceExhausted, TOO_MANY) => Reply::NotDone(text),
            (Code::OutOfRange, COMPACTED) => Reply::Refused(EtcdError::Compacted { revision }),
            // Checked before the proposal, or by all members before the transaction.
            (Code::InvalidArgument | Code::PermissionDenied | Code::Unauthenticated, _) => {
                Reply::Refused(EtcdError::Refused { step, member: member.to_owned(), why: why() })
            }
            (Code::DataLoss, _) => {
                Reply::Refused(EtcdError::Corrupt { member: member.to_owned(), why: why() })
            }
            _ if is_unsent(status) => Reply::NotDone(text),
            _ => Reply::Unknown(text),
        }
    }
}

/// Returns whether there was no connection to send the request on.
fn is_unsent(status: &Status) -> bool {
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        if error.is::<ConnectError>() {
            return true;
        }
        source = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_precedes_a_proposal_is_decided() {
        let of = |code, text: &str| Reply::of("change a record", "m", 0, &Status::new(code, text));
        for (code, text) in [
            (Code::Unavailable, "etcdserver: request timed out"),
            (Code::Unavailable, "etcdserver: leader changed"),
            (Code::Unavailable, "etcdserver: server stopped"),
            (Code::Unavailable, "transport error"),
            (Code::Cancelled, ""),
            (Code::DeadlineExceeded, ""),
            (Code::Internal, "h2 protocol error"),
            (Code::Unknown, ""),
            (Code::ResourceExhausted, "of something new"),
        ] {
            assert!(matches!(of(code, text), Reply::Unknown(_)), "{code:?} {text}");
        }
        assert!(matches!(of(Code::ResourceExhausted, NO_SPACE), Reply::NoSpace));
        assert!(matches!(of(Code::ResourceExhausted, TOO_MANY), Reply::NotDone(_)));
        let large = "etcdserver: request is too large";
        assert!(matches!(of(Code::InvalidArgument, large), Reply::Refused(EtcdError::Refused { .. })));
        assert!(matches!(of(Code::DataLoss, "corrupt"), Reply::Refused(EtcdError::Corrupt { .. })));
        assert!(matches!(of(Code::OutOfRange, COMPACTED), Reply::Refused(EtcdError::Compacted { .. })));
    }
}
