//! One round of a node over its servers: what they have answered, and what state the node is in by that.

use crate::cluster::node::SessionState;
use crate::error::presentable;

/// The limit of a server's text in the state, in bytes.
pub(super) const TEXT: usize = 256;
/// The words with which a server refuses a node for itself alone. Another server may be of another version.
const OF_ONE_SERVER: [&str; 3] = ["wrong-cluster", "too-old", "too-new"];

/// Why a session ended, or did not begin.
pub(super) enum SessionEnd {
    /// No session began, or it was lost.
    Lost(String),
    Refused {
        reason: String,
        message: String,
    },
}

/// What the servers have answered since the round, or the last session in it, began.
#[derive(Default)]
pub(super) struct Round {
    /// Why the last server that did not answer, or was lost, was of no use. `None`: there is no such server.
    lost: Option<String>,
    /// The last refusal that all servers give: its reason is in etcd, or on this host.
    refused: Option<(String, String)>,
    /// The last server that has refused the node for itself alone, with its reason and message.
    of_one_server: Option<(String, String, String)>,
}

impl Round {
    /// Notes that no server can be asked.
    pub fn note(&mut self, why: String) {
        self.lost = Some(why);
    }

    /// Notes how a session with a server has ended, or why none has begun. Returns the state that is clear before the others have answered. `None`: none is.
    pub fn note_end(&mut self, server: &str, end: SessionEnd) -> Option<SessionState> {
        match end {
            SessionEnd::Lost(text) => self.lost = Some(format!("{server}: {}", presentable(&text, TEXT))),
            SessionEnd::Refused { reason, message } if OF_ONE_SERVER.contains(&reason.as_str()) => {
                self.of_one_server = Some((server.to_owned(), reason, message));
                return None;
            }
            SessionEnd::Refused { reason, message } => self.refused = Some((reason, message)),
        }
        Some(self.state())
    }

    /// Returns the state of the node by the answers. The refusal of one server for itself counts when no server was lost. Otherwise it is a part of why
    /// the node is cut off.
    pub fn state(&self) -> SessionState {
        if let Some((reason, message)) = self.refused.clone() {
            return SessionState::Refused { reason, message };
        }
        match (self.lost.clone(), self.of_one_server.clone()) {
            (None, Some((_, reason, message))) => SessionState::Refused { reason, message },
            (Some(why), Some((server, reason, _))) => {
                let reason = presentable(&reason, TEXT);
                SessionState::CutOff { why: format!("{why}; {server} refuses this node as {reason}") }
            }
            (why, None) => SessionState::CutOff { why: why.unwrap_or_default() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost(text: &str) -> SessionEnd {
        SessionEnd::Lost(text.to_owned())
    }

    fn refused(reason: &str) -> SessionEnd {
        SessionEnd::Refused { reason: reason.to_owned(), message: "why".to_owned() }
    }

    /// Returns the reason of a refusal, or why the node is cut off.
    fn shown(state: &SessionState) -> String {
        match state {
            SessionState::Refused { reason, .. } => reason.clone(),
            SessionState::CutOff { why } => format!("cut off: {why}"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_server_alone_refuses_for_no_other() {
        for order in [[0, 1], [1, 0]] {
            let mut round = Round::default();
            for which in order {
                let (server, end) =
                    [("s1:1", refused("too-old")), ("s2:1", lost("away"))].into_iter().nth(which).unwrap();
                let clear = round.note_end(server, end);
                let due = match (which, order) {
                    (0, _) => None,
                    (_, [1, 0]) => Some("cut off: s2:1: away".to_owned()),
                    _ => Some("cut off: s2:1: away; s1:1 refuses this node as too-old".to_owned()),
                };
                assert_eq!(clear.as_ref().map(shown), due);
            }
            assert_eq!(shown(&round.state()), "cut off: s2:1: away; s1:1 refuses this node as too-old");
        }
        let mut round = Round::default();
        for (server, reason) in [("s1:1", "too-old"), ("s2:1", "too-new")] {
            assert!(round.note_end(server, refused(reason)).is_none());
        }
        assert_eq!(shown(&round.state()), "too-new");
    }

    #[test]
    fn refusal_by_etcd_is_of_all_servers() {
        for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
            let mut round = Round::default();
            for which in order {
                let end =
                    [refused("blocked"), lost("away"), refused("too-old")].into_iter().nth(which).unwrap();
                round.note_end("s:1", end);
            }
            assert_eq!(shown(&round.state()), "blocked", "{order:?}");
        }
    }
}
