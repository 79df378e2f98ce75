//! Nodes that are away for too long are fenced, where the administrators want that. A fence whose claims have not all ended is ended.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use csi_proto::cluster::v1::FenceAsk;
use csi_proto::cluster::v1::node_change::Change;
use csi_proto::identity::{Identity, Role};
use csid_etcd::{RowKey, Rows};
use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::failure::Result;
use crate::nodes::SeenNode;

/// The time between two looks.
const LOOK: Duration = Duration::from_secs(5);
/// The time after a failed try.
const AGAIN: Duration = Duration::from_secs(60);

/// What this server has seen of the nodes that are away. Times are of this server's clock alone.
#[derive(Default)]
struct Away {
    /// The first look that has found the node without a session since it had one, and since few nodes were away.
    since: HashMap<String, Instant>,
    /// The last try that has failed.
    tried: HashMap<String, Instant>,
    /// Most nodes were away at the last look.
    most: bool,
}

impl Away {
    /// Notes a look, and returns the node that is due: with claims, and away for so long. Of several it is the one that was tried the
    /// longest ago.
    fn due<'s>(&mut self, seen: &'s [SeenNode], after: Duration, now: Instant) -> Option<&'s SeenNode> {
        // Another node is not away: it may have no session. One that awaits an operator's word says Hello, and is refused.
        let may_join = |seen: &&SeenNode| {
            let row = &seen.row.value;
            seen.holds && row.may_have_sessions() && !row.awaits_acceptance()
        };
        let users = seen.iter().filter(may_join).count();
        let away: Vec<&SeenNode> = seen.iter().filter(may_join).filter(|seen| !seen.has_session).collect();
        let is_away = |node: &String| away.iter().any(|seen| seen.node == *node);
        self.since.retain(|node, _| is_away(node));
        self.tried.retain(|node, _| is_away(node));
        for seen in &away {
            self.since.entry(seen.node.clone()).or_insert(now);
        }
        let before = std::mem::replace(&mut self.most, is_most(away.len(), users));
        if self.most {
            // What the outage lasts is no node's own time. Nodes need a while to come back after it.
            self.since.values_mut().for_each(|since| *since = now);
            if !before {
                let away = away.len();
                tracing::error!(
                    away,
                    users,
                    "most nodes are away, so none is fenced: is the network between them and the servers down?"
                );
            }
            return None;
        }
        let is_due = |seen: &&&SeenNode| {
            let tried = self.tried.get(&seen.node);
            now.duration_since(self.since[&seen.node]) >= after
                && tried.is_none_or(|tried| now.duration_since(*tried) >= AGAIN)
        };
        let of = |seen: &&&SeenNode| (self.tried.get(&seen.node).copied(), self.since[&seen.node]);
        away.iter().filter(is_due).min_by_key(of).copied()
    }
}

/// Returns whether so many nodes are away that the servers themselves may be cut off. One node is never.
fn is_most(away: usize, all: usize) -> bool {
    away > 1 && away * 2 > all
}

/// Fences nodes that are away for too long, and ends claims that a fence has left, until the task is aborted. `name`: this server's.
pub async fn fence_away(cluster: Arc<Cluster>, name: String) {
    let server = Identity { cluster: cluster.config.cluster.clone(), role: Role::Server, name };
    let mut away = Away::default();
    loop {
        tokio::time::sleep(LOOK).await;
        // What was seen before a gap says nothing. While etcd is full no node can join, and no fence can be written.
        let here = match cluster.presence.here() {
            Ok(here) if !cluster.presence.is_full() => here,
            _ => {
                away = Away::default();
                continue;
            }
        };
        let looked = cluster.while_here(look(&cluster, &here.id)).await;
        let (is_first, seen) = match looked {
            Ok(looked) => looked,
            Err(error) => {
                tracing::warn!(%error, "the nodes cannot be looked at");
                away = Away::default();
                continue;
            }
        };
        let after = cluster.config.fence().after;
        let due = after.and_then(|after| Some((away.due(&seen, after, Instant::now())?, after)));
        // One server acts. The others have looked, too, and go on when it is gone.
        if !is_first {
            continue;
        }
        for left in seen.iter().filter(|seen| seen.holds && seen.row.value.is_fenced()) {
            if let Err(error) = cluster.end_fenced(&server, &left.node).await {
                tracing::warn!(node = left.node, %error, "the claims of a fenced node have not all ended");
            }
        }
        if let Some((due, after)) = due
            && let Err(error) = fence(&cluster, &server, due, after).await
        {
            tracing::error!(node = due.node, %error, "a node that is away for too long is not fenced");
            away.tried.insert(due.node.clone(), Instant::now());
        }
    }
}

/// Looks at all nodes. Returns whether this server is the one that acts, and the nodes.
async fn look(cluster: &Cluster, id: &str) -> Result<(bool, Vec<SeenNode>)> {
    cluster.normal().await?;
    let servers = cluster.rows.all(&Rows::Servers).await?;
    let first = servers.iter().filter_map(|(key, _)| match key {
        RowKey::Server(id) => Some(id.as_str()),
        _ => None,
    });
    let is_first = first.min() == Some(id);
    let has_work = is_first || cluster.config.fence().after.is_some();
    Ok((is_first, if has_work { cluster.seen_nodes().await? } else { Vec::new() }))
}

/// Fences a node whose command says that its machine is off.
async fn fence(cluster: &Cluster, server: &Identity, seen: &SeenNode, after: Duration) -> Result<()> {
    if cluster.while_here(cluster.has_sessions(&seen.node)).await? {
        return Ok(());
    }
    let reason = format!("without a session for {} s", after.as_secs());
    let ask = FenceAsk { reason, revision: seen.row.revision, by_hand: false };
    cluster.change_node(server, &seen.node, &Change::Fence(ask)).await?;
    cluster.end_fenced(server, &seen.node).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::{AheadRow, NodeRow, NodeState, OtherMachine, Read};

    const AFTER: Duration = Duration::from_secs(60);

    fn node(name: &str, state: NodeState, has_session: bool) -> SeenNode {
        let value = NodeRow { state, ..NodeRow::new("j", "m", "b") };
        SeenNode { node: name.into(), row: Read { value, revision: 7 }, has_session, holds: true }
    }

    fn due(away: &mut Away, seen: &[SeenNode], now: Instant) -> Option<String> {
        away.due(seen, AFTER, now).map(|seen| seen.node.clone())
    }

    /// n1 as given, and two nodes that are there.
    fn with(first: SeenNode) -> Vec<SeenNode> {
        vec![first, node("n2", NodeState::Ready, true), node("n3", NodeState::Ready, true)]
    }

    #[test]
    fn node_is_due_after_its_time_without_a_session() {
        let (begun, mut away) = (Instant::now(), Away::default());
        let gone = || with(node("n1", NodeState::Ready, false));
        assert_eq!(due(&mut away, &gone(), begun), None);
        assert_eq!(due(&mut away, &gone(), begun + AFTER / 2), None);
        assert_eq!(due(&mut away, &gone(), begun + AFTER), Some("n1".into()));
        // It has come back for a moment.
        assert_eq!(due(&mut away, &with(node("n1", NodeState::Ready, true)), begun + AFTER), None);
        assert_eq!(due(&mut away, &gone(), begun + AFTER), None, "its time begins again");
        assert_eq!(due(&mut away, &gone(), begun + 2 * AFTER), Some("n1".into()));
        away.tried.insert("n1".into(), begun + 2 * AFTER);
        assert_eq!(due(&mut away, &gone(), begun + 2 * AFTER), None, "a try has failed");
        assert_eq!(due(&mut away, &gone(), begun + 2 * AFTER + AGAIN), Some("n1".into()));
    }

    /// The machines that switch others off may be gone with the nodes.
    #[test]
    fn node_that_was_tried_comes_after_the_others() {
        let (begun, mut away) = (Instant::now(), Away::default());
        let mut seen: Vec<SeenNode> =
            ["n1", "n2", "n3"].map(|name| node(name, NodeState::Ready, false)).into();
        seen.extend(["n4", "n5", "n6"].map(|name| node(name, NodeState::Ready, true)));
        assert_eq!(due(&mut away, &seen, begun), None);
        let mut now = begun + AFTER;
        let mut tried = Vec::new();
        for _ in 0..4 {
            let due = due(&mut away, &seen, now).unwrap();
            now += AGAIN / 2;
            away.tried.insert(due.clone(), now);
            tried.push(due);
        }
        assert_eq!(tried, ["n1", "n2", "n3", "n1"]);
    }

    #[test]
    fn node_without_use_or_fenced_is_never_due() {
        let begun = Instant::now();
        for state in [NodeState::Fenced, NodeState::Blocked] {
            let (mut away, seen) = (Away::default(), with(node("n1", state, false)));
            assert_eq!([begun, begun + 2 * AFTER].map(|now| due(&mut away, &seen, now)), [None, None]);
        }
        let idle = SeenNode { holds: false, ..node("n1", NodeState::Ready, false) };
        let (mut away, seen) = (Away::default(), with(idle));
        assert_eq!([begun, begun + 2 * AFTER].map(|now| due(&mut away, &seen, now)), [None, None]);
    }

    #[test]
    fn node_that_awaits_an_operators_word_is_never_due() {
        let begun = Instant::now();
        let ahead = |accepted| AheadRow {
            generation: 2,
            revision: 9,
            since_usec: 1,
            accepted,
            rest: Default::default(),
        };
        let other = |machine: &str, boot: &str| OtherMachine {
            journal_id: "k".into(),
            machine_id: machine.into(),
            boot: boot.into(),
            since_usec: 1,
            rest: Default::default(),
        };
        let never_due = |change: &dyn Fn(&mut NodeRow)| {
            let mut gone = node("n1", NodeState::Ready, false);
            change(&mut gone.row.value);
            let (mut away, seen) = (Away::default(), with(gone));
            [begun, begun + 2 * AFTER].map(|now| due(&mut away, &seen, now)) == [None, None]
        };
        assert!(never_due(&|row| row.ahead = Some(ahead(false))));
        assert!(!never_due(&|row| row.ahead = Some(ahead(true))), "the node may join");
        assert!(never_due(&|row| row.other = Some(other("m", "b"))), "the node has another journal");
        for (machine, boot) in [("other", "b"), ("m", "later")] {
            assert!(!never_due(&|row| row.other = Some(other(machine, boot))), "{machine} {boot}");
        }
    }

    #[test]
    fn most_nodes_away_means_none_is_due() {
        let (begun, mut away) = (Instant::now(), Away::default());
        let mut seen: Vec<SeenNode> =
            ["n1", "n2", "n3"].map(|name| node(name, NodeState::Ready, false)).into();
        assert_eq!([begun, begun + AFTER].map(|now| due(&mut away, &seen, now)), [None, None]);
        for name in ["n4", "n5", "n6"] {
            seen.push(node(name, NodeState::Ready, true));
        }
        let back = begun + AFTER + LOOK;
        assert_eq!(due(&mut away, &seen, back), None, "the outage was no time of a node's own");
        assert_eq!(due(&mut away, &seen, begun + 2 * AFTER), Some("n1".into()), "half of them is not most");
        for state in [NodeState::Fenced, NodeState::Blocked] {
            let mut away = Away::default();
            let mut seen: Vec<SeenNode> = ["n1", "n2"].map(|name| node(name, NodeState::Ready, false)).into();
            seen.extend(["n3", "n4", "n5"].map(|name| node(name, state, false)));
            assert_eq!([begun, begun + AFTER].map(|now| due(&mut away, &seen, now)), [None, None]);
        }
        assert!(!is_most(1, 1) && is_most(2, 2) && is_most(2, 3) && !is_most(2, 4));
    }
}
