//! What a client may believe of a mount, from its own calls and their answers alone.

use std::collections::BTreeSet;

use csid_client::Kind;

/// A mount when nothing is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    Absent,
    Mounted,
    /// Its row rests until somebody asks.
    Lost,
    /// Its row rests until it is given its secrets.
    Waiting,
    /// Its row says mounted, somebody unmounted it behind csid's back, and csid says so.
    Taken,
}

/// What becomes of a mount that the kernel has no more.
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
    Refused(Kind),
    /// csid ended before the answer.
    CutOff,
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

/// What may be true once a call has come to its end and nothing is under way any more.
pub fn after(before: State, ask: Ask, told: &Told, restores: Restores) -> BTreeSet<State> {
    use State::*;
    let states: &[State] = match (ask, told) {
        (Ask::Mount, Told::Done) => &[Mounted],
        (Ask::Mount, Told::CutOff) => &[before, Mounted],
        // A mount that failed is undone; one that was answered before is not.
        (Ask::Mount, Told::Refused(_)) => match before {
            Absent | Mounted => &[before],
            Lost | Waiting => &[before, Mounted],
            Taken => &[Taken, Mounted, restores.rests()],
        },
        (Ask::Unmount, Told::Done) => &[Absent],
        (Ask::Unmount, Told::Refused(Kind::Busy)) => &[before],
        // It goes on without its caller, once it has begun.
        (Ask::Unmount, Told::Refused(_) | Told::CutOff) => &[before, Absent],
    };
    states.iter().copied().collect()
}

/// csid has started again in the same boot: what is gone is noticed.
pub fn restarted(before: State, restores: Restores) -> State {
    match before {
        State::Taken => restores.rests(),
        other => other,
    }
}

/// The host has booted.
pub fn rebooted(before: State, restores: Restores) -> State {
    match before {
        State::Mounted | State::Taken => restores.rests(),
        other => other,
    }
}
