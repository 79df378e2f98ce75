//! The meaning of a failed RPC. This is the one table of CSI's rules on errors (CSI rules 36, 38 and 40); every caller uses it.

use tonic::Code;

/// The effect of a failed RPC, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The RPC never reached the plugin.
    NotSent,
    /// The plugin says that it may go well later: UNAVAILABLE, ABORTED, RESOURCE_EXHAUSTED.
    Transient,
    /// The plugin's final refusal.
    Refused,
    /// The RPC may have had its effect, or have it yet: INTERNAL, UNKNOWN, a time-out, a broken connection.
    Unknown,
    /// The plugin does not have that RPC.
    Unimplemented,
    /// csid is stopping and sends nothing any more.
    Shutdown,
    /// csid does not send this plugin what the call holds.
    Forbidden,
}

impl Class {
    /// Returns the class of a plugin's answer.
    pub(crate) fn of_answer(code: Code) -> Self {
        match code {
            Code::Unavailable | Code::Aborted | Code::ResourceExhausted => Class::Transient,
            Code::Unimplemented => Class::Unimplemented,
            Code::InvalidArgument
            | Code::NotFound
            | Code::AlreadyExists
            | Code::PermissionDenied
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::Unauthenticated => Class::Refused,
            Code::Ok
            | Code::Cancelled
            | Code::Unknown
            | Code::DeadlineExceeded
            | Code::Internal
            | Code::DataLoss => Class::Unknown,
        }
    }

    /// Returns whether the caller's same call may succeed later.
    pub(in crate::plugin) fn is_retryable(self) -> bool {
        !matches!(self, Class::Refused | Class::Unimplemented | Class::Forbidden)
    }
}

/// The kind of an RPC, as far as the meaning of its errors depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RpcKind {
    /// NodeStageVolume, NodePublishVolume and the calls that undo them.
    Mount,
    /// ControllerPublishVolume for a claim.
    Attach,
    /// ControllerUnpublishVolume for a claim.
    Detach,
    /// Every other call to the controller.
    Controller,
}

/// The action of csid after a failed RPC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RpcOutcome {
    /// The plugin was not called. The call is retried.
    NotSent,
    /// The plugin was not called, and will not be called by a retry either.
    Withheld,
    /// The call is retried as it is.
    Again { perhaps_done: bool },
    /// The plugin has refused the call. A retry would be refused, too.
    Refused,
    /// The plugin does not have the RPC. Its capabilities are queried again before the next call.
    Unimplemented,
    /// The call may have had its effect, or may have it yet. It is retried while it is wanted, else it is rolled back.
    Unknown,
}

impl RpcOutcome {
    /// Returns whether the plugin may have received the call.
    pub fn is_sent(self) -> bool {
        !matches!(self, RpcOutcome::NotSent | RpcOutcome::Withheld)
    }

    /// Returns whether the call may have had its effect, or may have it yet.
    pub fn is_perhaps_done(self) -> bool {
        matches!(self, RpcOutcome::Unknown | RpcOutcome::Again { perhaps_done: true })
    }

    /// Returns whether a retry would fail, too.
    pub fn is_final(self) -> bool {
        matches!(self, RpcOutcome::Refused | RpcOutcome::Unimplemented | RpcOutcome::Withheld)
    }
}

/// Returns the outcome of an RPC of this kind that failed with `code`. `class`: what is known of its effect.
pub(in crate::plugin) fn outcome(class: Class, code: Code, kind: RpcKind) -> RpcOutcome {
    match (class, kind) {
        (Class::NotSent, _) => RpcOutcome::NotSent,
        // No CSI rule: csid stops, and the next csid continues. A claim's call then has no reason that is worth a row.
        (Class::Shutdown, RpcKind::Attach | RpcKind::Detach) => RpcOutcome::NotSent,
        (Class::Shutdown | Class::Forbidden, _) => RpcOutcome::Withheld,
        // Something has to be detached first (CSI rule 38). Other calls may succeed later as they are.
        (Class::Transient, RpcKind::Attach) if code == Code::ResourceExhausted => RpcOutcome::Refused,
        // A plugin that is busy with the call may still complete it (CSI rule 36, ABORTED).
        (Class::Transient, _) => RpcOutcome::Again { perhaps_done: code != Code::ResourceExhausted },
        (Class::Refused, _) => RpcOutcome::Refused,
        (Class::Unimplemented, _) => RpcOutcome::Unimplemented,
        // Only the negation cancels a call (CSI rule 25). An attach is retried while the claim is wanted, and only then detached.
        (Class::Unknown, RpcKind::Attach) => RpcOutcome::Again { perhaps_done: true },
        (Class::Unknown, _) => RpcOutcome::Unknown,
    }
}

/// Returns whether a call is known to have had no effect after an error. `code`: the plugin's, `None` for an error of csid itself.
/// `perhaps_done`: an earlier try may have had an effect. An error about the caller, or about the plugin itself, proves nothing
/// about that try (CSI rules 36 and 39).
pub fn proves_no_effect(code: Option<Code>, is_retryable: bool, perhaps_done: bool) -> bool {
    let is_about_volume = match code {
        Some(
            Code::ResourceExhausted | Code::Unauthenticated | Code::PermissionDenied | Code::Unimplemented,
        )
        | None => false,
        Some(_) => true,
    };
    // A retry after RESOURCE_EXHAUSTED may succeed. The call itself is over.
    let is_over = !is_retryable || code == Some(Code::ResourceExhausted);
    is_over && (is_about_volume || !perhaps_done)
}

/// Returns whether the code says that the volume or snapshot does not exist. A removal has then succeeded (CSI rule 36).
pub fn is_gone(code: Code) -> bool {
    code == Code::NotFound
}

/// Returns whether the code of an attach says that the node has the volume attached with other arguments. A caller that has not tried
/// before has not made that attachment.
pub fn is_attached_otherwise(code: Code) -> bool {
    code == Code::AlreadyExists
}

/// Returns whether a list that sent a token has to begin again without one (CSI rule 40).
pub fn restarts_list(code: Code) -> bool {
    code == Code::Aborted
}

/// Returns whether the connection broke during the call. The plugin may have been restarted, and may have lost its state.
pub(in crate::plugin) fn is_broken(class: Class, code: Code) -> bool {
    class == Class::Unknown && code == Code::Unavailable
}

#[cfg(test)]
mod tests {
    use super::*;

    /// CSI rules 36 and 38. The columns: mount, attach, detach, other controller calls.
    #[test]
    fn each_code_has_one_outcome_for_each_kind() {
        use Code::*;
        use RpcOutcome::{
            Again as A, NotSent as N, Refused as R, Unimplemented as I, Unknown as U, Withheld as W,
        };
        let perhaps = A { perhaps_done: true };
        let not_yet = A { perhaps_done: false };
        let answers = [
            (vec![Unavailable, Aborted], [perhaps; 4]),
            (vec![ResourceExhausted], [not_yet, R, not_yet, not_yet]),
            (vec![InvalidArgument, NotFound, AlreadyExists, FailedPrecondition, OutOfRange], [R; 4]),
            (vec![PermissionDenied, Unauthenticated], [R; 4]),
            (vec![Unimplemented], [I; 4]),
            (vec![Ok, Cancelled, Unknown, DeadlineExceeded, Internal, DataLoss], [U, perhaps, U, U]),
        ];
        let answers = answers.into_iter().flat_map(|(codes, outcomes)| {
            codes.into_iter().map(move |code| (code, Class::of_answer(code), outcomes))
        });
        let own = [
            (Unavailable, Class::NotSent, [N; 4]),
            (DeadlineExceeded, Class::Unknown, [U, perhaps, U, U]),
            (Unavailable, Class::Unknown, [U, perhaps, U, U]),
            (Unavailable, Class::Shutdown, [W, N, N, W]),
            (PermissionDenied, Class::Forbidden, [W; 4]),
        ];
        let rows: Vec<_> = answers.chain(own).collect();
        assert_eq!(rows.len(), 17 + own.len(), "every code of gRPC has a row");
        for (code, class, outcomes) in rows {
            let kinds = [RpcKind::Mount, RpcKind::Attach, RpcKind::Detach, RpcKind::Controller];
            let found = kinds.map(|kind| outcome(class, code, kind));
            assert_eq!(found, outcomes, "{code:?} of class {class:?}");
        }
    }

    #[test]
    fn only_not_found_means_that_a_volume_is_gone() {
        let gone: Vec<_> = (0..17).map(Code::from).filter(|code| is_gone(*code)).collect();
        assert_eq!(gone, [Code::NotFound]);
    }

    #[test]
    fn only_aborted_restarts_a_list() {
        let restarts: Vec<_> = (0..17).map(Code::from).filter(|code| restarts_list(*code)).collect();
        assert_eq!(restarts, [Code::Aborted]);
    }

    #[test]
    fn each_outcome_says_if_sent_done_and_final() {
        // (the outcome, was the call sent, may it have had its effect, would a retry fail, too)
        for (outcome, is_sent, is_perhaps_done, is_final) in [
            (RpcOutcome::NotSent, false, false, false),
            (RpcOutcome::Withheld, false, false, true),
            (RpcOutcome::Again { perhaps_done: false }, true, false, false),
            (RpcOutcome::Again { perhaps_done: true }, true, true, false),
            (RpcOutcome::Refused, true, false, true),
            (RpcOutcome::Unimplemented, true, false, true),
            (RpcOutcome::Unknown, true, true, false),
        ] {
            let found = (outcome.is_sent(), outcome.is_perhaps_done(), outcome.is_final());
            assert_eq!(found, (is_sent, is_perhaps_done, is_final), "{outcome:?}");
        }
    }
}
