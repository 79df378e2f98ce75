//! Compares the action of each caller of a plugin after each failure of an RPC (CSI rules 36 and 38) with a table.

use tonic::Code;

use crate::error::Kind;
use crate::plugin::{Class, RpcError, RpcKind};
use crate::volume::api::requests::Page;
use crate::volume::control::claim_effects::failed;
use crate::volume::control::tries::RpcTries;
use crate::volume::model::claim::ClaimOutcome;
use crate::volume::model::volume::Outcome;
use crate::volume::mounts::effect_failure::EffectFailure;
use crate::volume::plugins::inventory::of_list;

/// Returns the error of an RPC that the plugin has answered.
fn answer(code: Code) -> RpcError {
    let (rpc, message) = ("Rpc", "no".to_owned());
    let class = Class::of_answer(code);
    RpcError { plugin: "p".into(), rpc, code, message, class, answered: true, stopping: false }
}

/// Returns an error that csid made itself.
fn own(code: Code, class: Class) -> RpcError {
    RpcError { class, ..answer(code) }
}

/// Returns the error of an RPC without an answer.
fn broken(code: Code) -> RpcError {
    RpcError { answered: false, ..own(code, Class::Unknown) }
}

/// Returns the words whose condition holds.
fn flags<const N: usize>(flags: [(&'static str, bool); N]) -> String {
    let words: Vec<_> = flags.into_iter().filter_map(|(word, holds)| holds.then_some(word)).collect();
    words.join(" ")
}

/// Returns the effect's outcome for NodeStageVolume, NodePublishVolume and the calls that undo them.
fn mount(error: &RpcError) -> String {
    let failure = EffectFailure::from(error.clone());
    assert!(!failure.orphan && !failure.in_use && !failure.held);
    flags([
        ("not-sent", failure.outcome == Outcome::NotSent),
        ("again", failure.outcome == Outcome::Again),
        ("failed", failure.outcome == Outcome::Failed),
        ("definite", failure.definite),
        ("unknown", failure.unknown),
        ("unanswered", !failure.answered),
        ("broken", failure.broken),
        ("unimplemented", failure.unimplemented),
    ])
}

/// Returns the outcome for ControllerPublishVolume and ControllerUnpublishVolume of a claim.
fn claim(error: &RpcError, kind: RpcKind) -> String {
    let failure = failed(error.clone(), kind);
    let outcome = match &failure.outcome {
        ClaimOutcome::Done => "done",
        ClaimOutcome::NotSent(None) => "not-sent",
        ClaimOutcome::NotSent(Some(_)) => "not-sent definite",
        ClaimOutcome::Again => "again",
        ClaimOutcome::Unknown => "unknown",
        ClaimOutcome::Hopeless(_) => "hopeless",
    };
    flags([(outcome, true), ("unimplemented", failure.unimplemented)])
}

/// Returns what CreateVolume and the other calls to the controller conclude from one try with this error. `no`: the call had no
/// effect. `no-later`: earlier tries had none either.
fn controller(error: &RpcError) -> String {
    let mut tries = RpcTries::default();
    tries.begin();
    tries.note(error.outcome(RpcKind::Controller));
    let failure = tries.unanswered(error.clone().into());
    flags([
        ("not-sent", !failure.is_sent),
        ("perhaps-done", failure.perhaps_done),
        ("no", failure.is_no(false)),
        ("no-later", failure.is_no(true)),
        ("uncertain", failure.error.kind == Kind::Uncertain),
        ("retryable", failure.error.details.retryable),
    ])
}

/// Returns what a list with a token is to do. `restart`: the plugin no longer accepts the token (CSI rule 40).
fn list(error: &RpcError, token: &str) -> String {
    let page = Page { token: token.to_owned(), max: 0 };
    let error = of_list(error.clone(), &page);
    flags([
        ("restart", error.message.contains("does not accept the token")),
        ("retryable", error.details.retryable),
        ("uncertain", error.kind == Kind::Uncertain),
    ])
}

/// The columns: mounts, an attach and a detach of a claim, other calls to the controller, lists with a token.
#[test]
fn each_caller_acts_on_each_failed_rpc_as_pinned() {
    use Code::*;
    let u = ["failed unknown", "again", "unknown", "perhaps-done uncertain retryable", "retryable"];
    let r = ["failed definite", "hopeless", "hopeless", "no no-later", ""];
    let not_of_volume = ["failed definite", "hopeless", "hopeless", "no", ""];
    let later = ["again", "again", "again", "perhaps-done retryable", "retryable"];
    let lost =
        ["failed unknown unanswered", "again", "unknown", "perhaps-done uncertain retryable", "retryable"];
    let unsent = ["not-sent", "not-sent", "not-sent", "not-sent retryable", "retryable"];
    let answers = [
        (Ok, u),
        (Cancelled, u),
        (Unknown, u),
        (InvalidArgument, r),
        (DeadlineExceeded, u),
        (NotFound, r),
        (AlreadyExists, r),
        (PermissionDenied, not_of_volume),
        (ResourceExhausted, ["again", "hopeless", "again", "no retryable", "retryable"]),
        (FailedPrecondition, r),
        (Aborted, ["again", "again", "again", "perhaps-done retryable", "restart retryable"]),
        (OutOfRange, r),
        (
            Unimplemented,
            ["failed definite unimplemented", "hopeless unimplemented", "hopeless unimplemented", "no", ""],
        ),
        (Internal, u),
        (Unavailable, later),
        (DataLoss, u),
        (Unauthenticated, not_of_volume),
    ];
    assert_eq!(answers.map(|(code, _)| code), std::array::from_fn(|code| Code::from(code as i32)));
    let own = [
        (own(Unavailable, Class::NotSent), unsent),
        (own(DeadlineExceeded, Class::NotSent), unsent),
        (
            own(Cancelled, Class::Shutdown),
            ["not-sent definite", "not-sent", "not-sent", "not-sent retryable", "retryable"],
        ),
        (
            own(PermissionDenied, Class::Forbidden),
            ["not-sent definite", "not-sent definite", "not-sent definite", "not-sent no", ""],
        ),
        // A time-out, and then the ways in which a connection breaks.
        (broken(DeadlineExceeded), lost),
        (
            broken(Unavailable),
            [
                "failed unknown unanswered broken",
                "again",
                "unknown",
                "perhaps-done uncertain retryable",
                "retryable",
            ],
        ),
        (broken(Unknown), lost),
        (broken(Cancelled), lost),
        (broken(Internal), lost),
        (broken(ResourceExhausted), lost),
    ];
    for (error, pinned) in answers.map(|(code, pinned)| (answer(code), pinned)).into_iter().chain(own) {
        let found = [
            mount(&error),
            claim(&error, RpcKind::Attach),
            claim(&error, RpcKind::Detach),
            controller(&error),
            list(&error, "token"),
        ];
        assert_eq!(found, pinned, "{error:?}");
        assert!(!list(&error, "").contains("restart"), "a list without a token has nothing to restart");
    }
}
