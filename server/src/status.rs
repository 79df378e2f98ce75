//! The cluster in numbers, and what needs an operator.

use std::collections::{BTreeMap, BTreeSet};

use csi_proto::cluster::v1::{Attention, ClusterStatus, NodeCount};
use csid::error::cut;
use csid::store::registry::Record;
use csid_etcd::{RowKey, Rows};

use crate::cluster::Cluster;
use crate::explain::owes;
use crate::failure::Result;
use crate::rows::{NodeRow, NodeState};

/// The limit of things that need an operator, and of a text about one, in bytes.
const ATTENTION: usize = 64;
const TEXT: usize = 256;
/// The states of nodes. A node that may have a session and has none is away.
const STATES: [&str; 6] = ["ready", "draining", "fenced", "blocked", AWAY, UNREADABLE];
const AWAY: &str = "away";
const UNREADABLE: &str = "unreadable";

/// How many nodes are in each state.
pub type NodeStates = BTreeMap<&'static str, u64>;

/// Work that is not done, on all servers.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Volumes with such work.
    pub restless: u64,
    /// Claims and volumes whose work a plugin refuses.
    pub parked: u64,
    pub queued: u64,
    /// Claims that their nodes have yet to end.
    pub owed: u64,
}

/// Counts the work of volumes.
pub fn work_of(records: &[Record]) -> Work {
    let owed = |record: &Record| record.claims.iter().filter(|claim| owes(claim)).count();
    Work {
        restless: count(records.len()),
        parked: count(records.iter().map(|record| parked(record).len()).sum()),
        queued: count(records.iter().map(|record| record.queue.len()).sum()),
        owed: count(records.iter().map(owed).sum()),
    }
}

/// Returns why a plugin refuses the work of a volume, of its claims and of its attachments, each.
fn parked(record: &Record) -> Vec<&str> {
    let of_volume = record.registration.iter().filter_map(|of| of.blocked.as_ref());
    let of_claims = record.claims.iter().filter_map(|claim| claim.blocked.as_ref());
    let asked = record.attachments.iter().filter_map(|at| at.asked.as_ref());
    let of_attachments = asked.filter_map(|asked| asked.blocked.as_ref());
    of_volume.chain(of_claims).chain(of_attachments).map(|blocked| blocked.reason.as_str()).collect()
}

fn count(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

/// Returns the word of a node's state. `None`: its row cannot be read.
fn word_of(row: Option<&NodeRow>, is_there: bool) -> &'static str {
    match row.map(|row| row.state) {
        Some(NodeState::Ready | NodeState::Draining) if !is_there => AWAY,
        Some(state) => state.word(),
        None => UNREADABLE,
    }
}

impl Cluster {
    /// Returns the cluster in numbers, and what needs an operator.
    pub async fn status(&self) -> Result<ClusterStatus> {
        let servers = self.list_servers().await?;
        self.while_here(async {
            let mut attention = Vec::new();
            if self.presence.is_full() {
                let text = "etcd's database has reached its quota: no claim begins or ends".to_owned();
                attention.push(about("etcd-full", "", text));
            }
            let mut away = Vec::new();
            let states = self
                .see_nodes(|node, row, state| {
                    if let Some(other) = row.and_then(|row| row.other.as_ref()) {
                        let text = format!("another machine asks to join: {}", cut(&other.machine_id, TEXT));
                        attention.push(about("another-machine", node, text));
                    }
                    let ahead = row.and_then(|row| row.ahead.as_ref());
                    if let Some(ahead) = ahead.filter(|ahead| !ahead.accepted) {
                        let text = format!(
                            "it has seen generation {}, which etcd lacks a part of",
                            ahead.generation
                        );
                        attention.push(about("node-ahead-of-etcd", node, text));
                    }
                    match state {
                        AWAY => away.push(node.to_owned()),
                        UNREADABLE => {
                            attention.push(about(
                                "unreadable-node",
                                node,
                                "its row cannot be read".to_owned(),
                            ));
                        }
                        _ => {}
                    }
                })
                .await?;
            for node in away {
                // A node without claims may be off.
                let claims = self.registry.claims_of(&node).await?;
                if claims > 0 {
                    let text = format!("it has no session, and keeps {claims} claims");
                    attention.push(about("node-away", &node, text));
                }
            }
            for of in &servers.refused {
                let text = "claims that it holds were not brought back after a restore of etcd".to_owned();
                attention.push(about("held-claim-refused", &of.node, text));
            }
            for of in &servers.half_done {
                let text = format!(
                    "a backup of etcd has the attach to {} half done, and nothing detaches it without a word",
                    cut(&of.node_id, TEXT)
                );
                attention.push(about(
                    "attachment-of-backup",
                    &format!("{}/{}", of.namespace, of.volume),
                    text,
                ));
            }
            attention.sort_by(|a, b| (&a.name, &a.kind).cmp(&(&b.name, &b.kind)));
            let (records, _) = self.registry.restless().await?;
            let work = work_of(&records);
            for record in &records {
                if let Some(reason) = parked(record).first() {
                    let text = format!("its plugin refuses work: {}", cut(reason, TEXT));
                    attention.push(about("parked", &record.name.to_string(), text));
                }
            }
            let attention_count = count(attention.len());
            attention.truncate(ATTENTION);
            let (_, volumes) = self.registry.size();
            let nodes = states.into_iter().filter(|(_, count)| *count > 0);
            let Work { restless, parked, queued, owed } = work;
            Ok(ClusterStatus {
                servers: Some(servers),
                nodes: nodes.map(|(state, count)| NodeCount { state: state.to_owned(), count }).collect(),
                volumes: count(volumes),
                restless,
                owed,
                parked,
                queued,
                attention,
                attention_count,
            })
        })
        .await
    }

    /// Shows each node, with its row and the word of its state. No row: it cannot be read. Returns how many are in each state.
    pub async fn see_nodes(
        &self,
        mut see: impl FnMut(&str, Option<&NodeRow>, &'static str),
    ) -> Result<NodeStates> {
        let mut present = BTreeSet::new();
        for (key, _) in self.rows.all(&Rows::AllSessions).await? {
            if let RowKey::Session { node, .. } = key {
                present.insert(node);
            }
        }
        let mut states: NodeStates = STATES.map(|state| (state, 0)).into();
        let mut pages = self.pages_of_nodes();
        while let Some(page) = self.next_of_nodes(&mut pages).await? {
            for (node, row) in page {
                let row = row.ok().map(|row| row.value);
                let state = word_of(row.as_ref(), present.contains(&node));
                see(&node, row.as_ref(), state);
                *states.entry(state).or_default() += 1;
            }
        }
        Ok(states)
    }
}

fn about(kind: &str, name: &str, text: String) -> Attention {
    Attention { kind: kind.to_owned(), name: name.to_owned(), text }
}
