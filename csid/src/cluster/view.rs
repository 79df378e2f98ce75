//! What this host shows of itself as a node of a cluster.

use std::time::Instant;

use tokio::sync::watch;

use crate::cluster::node::{FENCED, Joined, Node, Owed, SessionState};

/// The words of a node's state. A host without a cluster is `alone`.
pub const STATES: [&str; 7] = ["alone", "joining", "joined", "cut-off", "fenced", "recovering", "refused"];

/// A node at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeView {
    /// The cluster's name, and the node's. Empty: the host has no cluster.
    pub cluster: String,
    pub node: String,
    /// A word of [`STATES`].
    pub state: &'static str,
    /// HOST:PORT of the session's server. Empty: there is no session.
    pub server: String,
    /// Why there is no session. Empty: there is one, or none was tried yet.
    pub reason: String,
    /// When the state has begun, in microseconds since 1970. 0: the host has no cluster.
    pub since_usec: u64,
    /// The greatest generation and revision that csid has seen since its start.
    pub generation: u64,
    pub revision: u64,
    /// The number of claims whose end the servers have yet to learn.
    pub owed: u32,
}

impl NodeView {
    /// Returns the view of a host that has no cluster.
    pub fn alone() -> NodeView {
        let [cluster, node, server, reason] = Default::default();
        NodeView {
            cluster,
            node,
            state: "alone",
            server,
            reason,
            since_usec: 0,
            generation: 0,
            revision: 0,
            owed: 0,
        }
    }
}

/// A watch of what a node shows.
pub struct NodeWatch {
    state: watch::Receiver<SessionState>,
    owed: watch::Receiver<Owed>,
}

impl NodeWatch {
    /// Waits for a change after the last one. Never returns after the node's end.
    pub async fn changed(&mut self) {
        let changed = tokio::select! {
            changed = self.state.changed() => changed,
            changed = self.owed.changed() => changed,
        };
        if changed.is_err() {
            std::future::pending().await
        }
    }
}

impl SessionState {
    /// Returns the word of a state.
    pub fn word(&self) -> &'static str {
        match self {
            SessionState::Starting => "joining",
            SessionState::CutOff { .. } => "cut-off",
            SessionState::Refused { reason, .. } if reason == FENCED => FENCED,
            SessionState::Refused { .. } => "refused",
            SessionState::Joined(Joined { recovers: true, .. }) => "recovering",
            SessionState::Joined(_) => "joined",
        }
    }

    /// Returns HOST:PORT of the session's server. Empty: there is no session.
    pub fn server(&self) -> &str {
        match self {
            SessionState::Joined(joined) => &joined.server,
            _ => "",
        }
    }
}

impl Node {
    /// Returns what this node shows of itself now.
    pub fn view(&self) -> NodeView {
        let (generation, revision) = self.seen();
        let state = self.state.borrow();
        let reason = match &*state {
            SessionState::Starting | SessionState::Joined(_) => String::new(),
            SessionState::CutOff { why } => why.clone(),
            SessionState::Refused { reason, message } => format!("{reason}: {message}"),
        };
        NodeView {
            cluster: self.cluster.clone(),
            node: self.name.clone(),
            state: state.word(),
            server: state.server().to_owned(),
            reason,
            since_usec: self.since_usec(),
            generation,
            revision,
            owed: u32::try_from(self.owed.borrow().count).unwrap_or(u32::MAX),
        }
    }

    /// Returns a watch of what this node shows, but for the revision.
    pub fn watch(&self) -> NodeWatch {
        NodeWatch { state: self.state.subscribe(), owed: self.owed.subscribe() }
    }

    /// Returns for how many seconds the servers have not learned of the oldest end of a claim that csid has seen. 0: they know all.
    pub fn owed_seconds(&self) -> u64 {
        let oldest = self.owed.borrow().oldest;
        oldest.map_or(0, |oldest| Instant::now().saturating_duration_since(oldest).as_secs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_has_a_word_of_the_contract() {
        let refused = |reason: &str| SessionState::Refused { reason: reason.into(), message: String::new() };
        let states = [
            SessionState::Starting,
            SessionState::CutOff { why: String::new() },
            refused("fenced"),
            refused("blocked"),
        ];
        assert_eq!(states.map(|state| state.word()), ["joining", "cut-off", "fenced", "refused"]);
        assert!(STATES.contains(&NodeView::alone().state));
    }
}
