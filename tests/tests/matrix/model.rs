//! The states that a client may believe a mount to have, from its own calls and their answers alone.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Instant;

use csid_client::Kind;

/// A mount when nothing is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    Absent,
    Mounted,
    /// The row rests until a call mounts it.
    Lost,
    /// The row rests until a call gives its secrets.
    Waiting,
    /// The row is `mounted`, but the mount was removed behind csid's back, and csid reports that.
    Taken,
    /// The caller's time was over. csid rolls the mount back, unless the host boots before csid has written that.
    Abandoned,
}

impl State {
    /// Returns the state at rest.
    pub fn at_rest(self) -> State {
        match self {
            State::Abandoned => State::Absent,
            other => other,
        }
    }
}

/// The fate of a mount that the kernel no longer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restores {
    /// restore=auto, and all that is needed is there.
    Alone,
    /// restore=auto, with secrets that only the caller has.
    WithSecrets,
    /// restore=hold.
    OnRequest,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    Mount,
    Unmount,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    Done,
    /// Because of what, and the name of the plugin's gRPC code if it was that.
    Refused(Kind, Option<&'static str>),
    /// csid ended before the answer.
    CutOff,
}

impl Told {
    /// The plugin refused because of the volume's state.
    pub fn is_failed_precondition(&self) -> bool {
        *self == Told::Refused(Kind::PluginError, Some("FAILED_PRECONDITION"))
    }

    /// The plugin did not answer in time, which a busy machine does to an honest one, too.
    pub fn is_held_up(&self) -> bool {
        *self == Told::Refused(Kind::PluginError, Some("DEADLINE_EXCEEDED"))
    }
}

/// Something that may have changed a mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    Asked(Ask, Told),
    /// csid has started again in the same boot: what is gone is noticed.
    Restarted,
    /// The host has booted.
    Rebooted,
    /// Somebody unmounted it behind csid's back, if it was mounted.
    Taken,
    /// A Mount of another consumer of the volume, whose own mount may be taken. csid then probes every mount of the volume.
    Probed,
}

impl What {
    /// Whether a mount may end by it.
    pub fn may_unmount(&self) -> bool {
        !matches!(self, What::Asked(Ask::Mount, _) | What::Restarted | What::Probed)
    }
}

impl Restores {
    /// The state in which it comes to rest.
    pub fn rests(self) -> State {
        match self {
            Restores::Alone => State::Mounted,
            Restores::WithSecrets => State::Waiting,
            Restores::OnRequest => State::Lost,
        }
    }
}

/// Returns the states that are possible when `what` has ended and no call is under way.
pub fn after(before: State, what: &What, restores: Restores) -> BTreeSet<State> {
    use State::*;
    let (abandoned, before) = (before == Abandoned, before.at_rest());
    let states: &[State] = match (what, before) {
        (What::Rebooted, _) if abandoned => &[Absent, restores.rests()],
        (What::Asked(Ask::Mount, Told::Refused(Kind::TimedOut | Kind::Cancelled, _)), Absent) => {
            &[Absent, Abandoned]
        }
        (What::Restarted | What::Taken | What::Probed, _) if abandoned => &[Absent, Abandoned],
        (What::Asked(Ask::Mount, Told::Done), _) => &[Mounted],
        (What::Asked(Ask::Mount, Told::CutOff | Told::Refused(Kind::ShuttingDown, _)), _) => {
            &[before, Mounted, after_loss(before, restores)]
        }
        // A mount that failed is undone; one that was answered before is not.
        (What::Asked(Ask::Mount, Told::Refused(..)), Absent | Abandoned | Mounted) => &[before],
        (What::Asked(Ask::Mount, Told::Refused(..)), Lost | Waiting | Taken) => {
            &[before, Mounted, after_loss(before, restores)]
        }
        (What::Asked(Ask::Unmount, Told::Done), _) => &[Absent],
        (What::Asked(Ask::Unmount, Told::Refused(Kind::Busy, _)), _) => &[before],
        // An Unmount that has begun continues without its caller.
        (What::Asked(Ask::Unmount, Told::Refused(..) | Told::CutOff), _) => &[before, Absent],
        (What::Restarted, _) => &[after_loss(before, restores)],
        (What::Rebooted, Mounted) => &[restores.rests()],
        (What::Rebooted, _) => &[after_loss(before, restores)],
        (What::Taken, Mounted) => &[Mounted, Taken],
        (What::Taken, _) => &[before],
        (What::Probed, _) => &[before, after_loss(before, restores)],
    };
    states.iter().copied().collect()
}

/// A loss is noticed.
fn after_loss(before: State, restores: Restores) -> State {
    match before {
        State::Taken => restores.rests(),
        other => other,
    }
}

/// An event and its time. Two events that overlap may have happened in either order.
#[derive(Clone, Debug)]
pub struct Entry<W> {
    pub what: W,
    pub begun: Instant,
    pub ended: Instant,
}

/// Writes a history. Its times are milliseconds since its first event began.
pub fn written<W: fmt::Debug>(history: &[Entry<W>]) -> String {
    let Some(start) = history.iter().map(|entry| entry.begun).min() else { return String::new() };
    let line = |Entry { what, begun, ended }: &Entry<W>| {
        let [begun, ended] = [begun, ended].map(|at| at.duration_since(start).as_millis());
        format!("\n{begun:>6} to {ended:>6} {what:?}")
    };
    history.iter().map(line).collect()
}

/// Returns the states that are possible after all of `history`, in any order that its times allow. `after` gives those after one event.
pub fn after_all<S: Copy + Ord, W>(
    before: S,
    history: &[Entry<W>],
    after: impl Fn(S, &W) -> BTreeSet<S>,
) -> BTreeSet<S> {
    let all = (1_u64 << history.len()) - 1;
    // By the set of entries that have happened; each leads to larger ones only.
    let mut reached = BTreeMap::from([(0, BTreeSet::from([before]))]);
    loop {
        let (done, states) = reached.pop_first().expect("something comes next until all are done");
        if done == all {
            return states;
        }
        let missing = |number: usize| done & (1 << number) == 0;
        for (number, next) in history.iter().enumerate().filter(|(number, _)| missing(*number)) {
            let mut before_it = history.iter().enumerate().filter(|(_, entry)| entry.ended < next.begun);
            if before_it.all(|(number, _)| !missing(number)) {
                let after = states.iter().flat_map(|state| after(*state, &next.what));
                reached.entry(done | (1 << number)).or_default().extend(after);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use csi_witness::GRPC_CODES;

    use super::*;

    /// Returns the possible states of an absent mount after calls at these times.
    fn allowed(calls: &[(Ask, Told, u64, u64)]) -> BTreeSet<State> {
        let start = Instant::now();
        let entry = |(ask, written, begun, ended): &(Ask, Told, u64, u64)| Entry {
            what: What::Asked(*ask, written.clone()),
            begun: start + Duration::from_secs(*begun),
            ended: start + Duration::from_secs(*ended),
        };
        let history: Vec<_> = calls.iter().map(entry).collect();
        let after = |state, what: &What| after(state, what, Restores::OnRequest);
        after_all(State::Absent, &history, after).into_iter().map(State::at_rest).collect()
    }

    #[test]
    fn only_unanswered_calls_are_excused() {
        for code in GRPC_CODES {
            let written = Told::Refused(Kind::PluginError, Some(code));
            assert_eq!(written.is_held_up(), code == GRPC_CODES[4], "{code}");
        }
        assert!(!Told::Refused(Kind::TimedOut, None).is_held_up());
    }

    #[test]
    fn last_answer_holds_unless_calls_overlap() {
        use Ask::*;
        use State::*;
        use Told::*;
        assert_eq!(allowed(&[(Mount, Done, 0, 1), (Unmount, Done, 2, 3)]), [Absent].into());
        assert_eq!(
            allowed(&[(Unmount, Done, 2, 3), (Mount, Done, 4, 5), (Mount, Done, 0, 1)]),
            [Mounted].into()
        );
        assert_eq!(allowed(&[(Mount, Done, 0, 2), (Unmount, Done, 1, 3)]), [Absent, Mounted].into());
        assert_eq!(allowed(&[(Mount, Done, 0, 1), (Unmount, CutOff, 2, 3)]), [Absent, Mounted].into());
        assert_eq!(allowed(&[(Mount, Refused(Kind::TimedOut, None), 0, 1)]), [Absent].into());
        assert_eq!(allowed(&[(Mount, CutOff, 0, 1), (Unmount, Done, 2, 3)]), [Absent].into());
    }

    #[test]
    fn boot_may_keep_an_abandoned_mount() {
        let after = |state, what: &What| after(state, what, Restores::Alone);
        let told = Told::Refused(Kind::TimedOut, None);
        let abandoned = after(State::Absent, &What::Asked(Ask::Mount, told));
        assert_eq!(abandoned, [State::Absent, State::Abandoned].into());
        assert_eq!(after(State::Abandoned, &What::Rebooted), [State::Absent, State::Mounted].into());
        assert_eq!(after(State::Absent, &What::Rebooted), [State::Absent].into());
    }

    #[test]
    fn probe_of_another_consumer_notices_a_loss() {
        let after = |state| after(state, &What::Probed, Restores::OnRequest).into_iter().collect::<Vec<_>>();
        assert_eq!(after(State::Taken), [State::Lost, State::Taken]);
        for state in [State::Absent, State::Mounted, State::Lost, State::Waiting] {
            assert_eq!(after(state), [state]);
        }
    }
}
