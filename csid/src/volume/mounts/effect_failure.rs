//! The failures of effects: what a failed RPC or call of the kernel means for a mount.

use crate::error::Error;
use crate::host::HostError;
use crate::plugin::{RpcError, RpcKind, RpcOutcome};
use crate::volume::model::volume::Outcome;

/// Reason why an effect did not succeed.
pub(in crate::volume) struct EffectFailure {
    pub(in crate::volume) outcome: Outcome,
    pub(in crate::volume) error: Error,
    /// Whether the answer is definite: the same call would be answered alike.
    pub(in crate::volume) definite: bool,
    /// Whether the RPC may have had its effect, or have it yet.
    pub(in crate::volume) unknown: bool,
    /// Whether an answer came. False: the RPC timed out or its connection broke.
    pub(in crate::volume) answered: bool,
    /// Whether the connection broke. If so, the whole operation may be retried once this effect has been rolled back.
    pub(in crate::volume) broken: bool,
    /// Whether a mount that no row explains is in the way.
    pub(in crate::volume) orphan: bool,
    /// Whether the mount to be removed is in use. If so, nothing was removed.
    pub(in crate::volume) in_use: bool,
    /// Whether the plugin says that it has no such call.
    pub(in crate::volume) unimplemented: bool,
    /// Whether a volume is in use of which csid has no mount any more. csid waits for its release.
    pub(in crate::volume) held: bool,
}

impl EffectFailure {
    pub(in crate::volume) fn new(outcome: Outcome, error: Error) -> Self {
        EffectFailure {
            outcome,
            error,
            definite: false,
            unknown: false,
            answered: true,
            broken: false,
            orphan: false,
            in_use: false,
            unimplemented: false,
            held: false,
        }
    }

    /// Makes the failure of an effect that did nothing. The error decides the rest.
    pub(in crate::volume) fn nothing_done(error: impl Into<EffectFailure>) -> Self {
        EffectFailure { outcome: Outcome::NotSent, ..error.into() }
    }

    pub(in crate::volume::mounts) fn held(outcome: Outcome, error: Error) -> Self {
        EffectFailure { held: true, outcome, ..EffectFailure::definite(error) }
    }

    pub(in crate::volume::mounts) fn definite(error: Error) -> Self {
        EffectFailure { definite: true, ..EffectFailure::new(Outcome::Failed, error) }
    }
}

/// A failure of csid itself. A retry would not change it.
impl From<Error> for EffectFailure {
    fn from(error: Error) -> Self {
        EffectFailure::definite(error)
    }
}

impl From<RpcError> for EffectFailure {
    fn from(error: RpcError) -> Self {
        let meaning = error.outcome(RpcKind::Mount);
        let (outcome, definite) = match meaning {
            RpcOutcome::NotSent => (Outcome::NotSent, false),
            RpcOutcome::Withheld => (Outcome::NotSent, true),
            RpcOutcome::Again { .. } => (Outcome::Again, false),
            RpcOutcome::Refused | RpcOutcome::Unimplemented => (Outcome::Failed, true),
            // The first tries of a mount repeat the call instead: `Tries::note` in `until_done.rs`.
            RpcOutcome::Unknown => (Outcome::Failed, false),
        };
        let (unknown, answered, broken) = (meaning == RpcOutcome::Unknown, error.answered, error.is_broken());
        let unimplemented = meaning == RpcOutcome::Unimplemented;
        EffectFailure {
            definite,
            unknown,
            answered,
            broken,
            unimplemented,
            ..EffectFailure::new(outcome, error.into())
        }
    }
}

impl From<HostError> for EffectFailure {
    fn from(error: HostError) -> Self {
        let hung = matches!(error, HostError::Hung(_) | HostError::Helper { .. } | HostError::Search(_));
        let in_use = matches!(
            error,
            HostError::Busy { .. }
                | HostError::Occupied(_)
                | HostError::Unproven { .. }
                | HostError::AutomountPending(_)
        );
        let outcome = if in_use { Outcome::NotSent } else { Outcome::Failed };
        EffectFailure { outcome, in_use, definite: !hung, ..EffectFailure::definite(error.into()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effect_that_did_nothing_keeps_what_its_error_says() {
        let failure = EffectFailure::nothing_done(HostError::Hung("/srv".into()));
        assert!(failure.outcome == Outcome::NotSent && !failure.definite && !failure.in_use);
        let failure = EffectFailure::nothing_done(HostError::Occupied("/srv".into()));
        assert!(failure.outcome == Outcome::NotSent && failure.definite && failure.in_use);
        let failure = EffectFailure::nothing_done(Error::internal("no staging path"));
        assert!(failure.outcome == Outcome::NotSent && failure.definite && !failure.in_use);
    }
}
