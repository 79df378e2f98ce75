//! This host as a node of a cluster: who it is, and whether a server can be asked.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use csi_proto::cluster::v1::cluster_client::ClusterClient;
use csi_proto::cluster::v1::{self, Drained, Hello};
use sha2::{Digest, Sha256};
use tokio::sync::{Notify, watch};
use tonic::transport::Channel;

use crate::cluster::failure::unavailable;
use crate::cluster::fence::FenceMemory;
use crate::cluster::orders::CallOrders;
use crate::cluster::permits::Permits;
use crate::cluster::quiet::Quiet;
use crate::cluster::remembered::RememberedVolumes;
use crate::config::{Cluster, OnFenced};
use crate::error::Result;
use crate::random;
use crate::store::rows::JournaledFence;

/// The machine's identity, which systemd makes at its installation.
const MACHINE_ID: &str = "/etc/machine-id";

/// The limit of claims of one node that a server may have ended at the same time. It is the limit of a node's claims, too.
pub(super) const CLAIMS: usize = 1000;

/// The servers' word for a node that an operator has fenced.
pub(super) const FENCED: &str = "fenced";
/// Why a host does not join that has volumes of its own.
pub(super) const OWN_VOLUMES: &str = "own-volumes";

/// Whether a server can be asked.
#[derive(Clone, Debug)]
pub enum SessionState {
    /// No server has been asked since csid's start.
    Starting,
    /// No server can be asked now.
    CutOff {
        why: String,
    },
    /// The servers refuse this node until an administrator changes something.
    Refused {
        reason: String,
        message: String,
    },
    Joined(Joined),
}

/// A session with a server.
#[derive(Clone, Debug)]
pub struct Joined {
    /// HOST:PORT of the server.
    pub server: String,
    /// Whether the cluster recovered from a backup when the session began. It grants nothing then.
    pub recovers: bool,
    pub(super) client: ClusterClient<Channel>,
}

/// The claims whose end the servers have yet to learn.
#[derive(Clone, Copy, Debug, Default)]
pub struct Owed {
    pub count: usize,
    /// When this csid has first seen the end of the oldest of them. `None`: there is none.
    pub oldest: Option<Instant>,
}

/// This host as a node of a cluster.
pub struct Node {
    pub(super) cluster: String,
    pub(super) name: String,
    /// The directory of csid-link's sockets.
    pub(super) link: PathBuf,
    pub(super) state: watch::Sender<SessionState>,
    /// When the state has begun, in microseconds since 1970.
    since_usec: AtomicU64,
    pub(super) owed: watch::Sender<Owed>,
    /// The servers' last word about a fence of this node. The journal has it.
    pub(super) fence: FenceMemory,
    /// The number of this node's drain, as a server has said last. 0: it does not drain.
    pub(super) drain: watch::Sender<u64>,
    /// What the last try of the drain has left. `None`: the node does not drain, or the first try goes on.
    pub(super) drained: watch::Sender<Option<Drained>>,
    /// The greatest generation of the cluster, and the greatest revision of it, that this csid has seen. They are for people: a server may lie.
    seen: Mutex<(u64, u64)>,
    /// The generation of the last Welcome. 0: none came yet.
    generation: AtomicU64,
    /// What this csid has said to hold while a cluster recovers, as the ends of the claims, by the claims' IDs.
    pub(super) said: Mutex<HashMap<String, v1::Owed>>,
    /// Has the host's own volumes looked for again.
    pub(super) own: Notify,
    /// Has expansions looked at again that the servers wait for.
    pub(super) expanded: Notify,
    journal_id: String,
    machine_id: String,
    pub(super) boot: String,
    /// The controller calls that servers have sent.
    pub(super) orders: CallOrders,
    pub(super) on_fenced: OnFenced,
    /// What this host does for others.
    pub(super) permits: Permits,
    /// The log lines of calls that are not made. A server may send many.
    pub(super) refusals: Quiet,
    /// The beginning of the names of calls that this journal makes in this boot. It shows neither the journal's ID nor the boot's.
    pub(super) calls: String,
    /// Volumes that servers were asked for.
    pub(super) remembered: RememberedVolumes,
}

impl Node {
    /// Makes the node `name`. `boot` is the name of the present boot, and `fence` the journal's.
    pub fn new(
        config: &Cluster,
        name: &str,
        journal_id: &str,
        boot: &str,
        fence: Option<JournaledFence>,
    ) -> Node {
        random::open();
        let machine_id = std::fs::read_to_string(MACHINE_ID).unwrap_or_default();
        let machine_id = match machine_id.trim() {
            // A host without one is known by its journal.
            "" => journal_id.to_owned(),
            id => id.to_owned(),
        };
        Node {
            cluster: config.name.clone(),
            name: name.to_owned(),
            link: config.link.clone(),
            state: watch::Sender::new(SessionState::Starting),
            since_usec: AtomicU64::new(now_usec()),
            owed: watch::Sender::default(),
            fence: FenceMemory::of(fence, boot),
            drain: watch::Sender::new(0),
            drained: watch::Sender::default(),
            seen: Mutex::default(),
            generation: AtomicU64::new(0),
            said: Mutex::default(),
            own: Notify::new(),
            expanded: Notify::new(),
            journal_id: journal_id.to_owned(),
            machine_id,
            boot: boot.to_owned(),
            orders: CallOrders::default(),
            on_fenced: config.on_fenced,
            permits: Permits::new(config),
            refusals: Quiet::default(),
            calls: calls(journal_id, boot),
            remembered: RememberedVolumes::default(),
        }
    }

    /// Has the host's own volumes looked for again: they were moved to the servers.
    pub fn look_again(&self) {
        self.state.send_if_modified(|state| match state {
            SessionState::Refused { reason, .. } if reason == OWN_VOLUMES => {
                *state = SessionState::Starting;
                self.own.notify_one();
                true
            }
            _ => false,
        });
    }

    /// Waits until this host has joined. Fails if the servers refuse it, or when the time is over.
    pub async fn wait_joined(&self, limit: Duration) -> Result<()> {
        let mut state = self.state.subscribe();
        let is_settled =
            |state: &SessionState| matches!(state, SessionState::Joined(_) | SessionState::Refused { .. });
        let _ = tokio::time::timeout(limit, state.wait_for(is_settled)).await;
        self.client().map(drop)
    }

    /// Returns the state of the session, for people: `cluster prod: joined at s1:7443`.
    pub fn status(&self) -> String {
        let state = match &*self.state.borrow() {
            SessionState::Starting => "joining".to_owned(),
            SessionState::CutOff { why } => format!("cut off ({why})"),
            SessionState::Refused { reason, message } => format!("refused as {reason} ({message})"),
            SessionState::Joined(Joined { server, .. }) => format!("joined at {server}"),
        };
        let drains = if self.drain_number() == 0 { "" } else { ", drains" };
        format!("cluster {}: {state}{drains}", self.cluster)
    }

    pub fn subscribe(&self) -> watch::Receiver<SessionState> {
        self.state.subscribe()
    }

    pub fn is_joined(&self) -> bool {
        matches!(*self.state.borrow(), SessionState::Joined(_))
    }

    /// Returns whether the servers refuse this node.
    pub(super) fn is_refused(&self) -> bool {
        matches!(*self.state.borrow(), SessionState::Refused { .. })
    }

    /// Returns what this node says of itself. `clean`: the number of a fence, if it has nothing of the servers' volumes. 0: it may have some. `seen`: the
    /// generation and the revision of its claims.
    pub(super) fn hello(&self, clean: u64, seen: (u64, u64)) -> Hello {
        let (generation, seen_revision) = seen;
        Hello {
            cluster: self.cluster.clone(),
            journal_id: self.journal_id.clone(),
            machine_id: self.machine_id.clone(),
            boot: self.boot.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            protocol_min: 1,
            protocol_max: 1,
            generation,
            seen_revision,
            clean,
        }
    }

    /// Returns the greatest generation of the cluster, and the greatest revision of that generation, that this csid has seen.
    pub(super) fn seen(&self) -> (u64, u64) {
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the generation of the last Welcome. 0: none came yet.
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }

    /// Notes the generation of a session's Welcome, and the revision that etcd has. A greater revision of it was a lie. `revision` 0: a server of an
    /// earlier version does not name it.
    pub(super) fn begin_generation(&self, generation: u64, revision: u64) {
        self.generation.store(generation, Ordering::Relaxed);
        self.has_seen(generation, 0);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if revision > 0 && seen.0 == generation {
            seen.1 = seen.1.min(revision);
        }
    }

    /// Returns the revision that a list of the servers has to have: the greatest that this csid has seen. 0: csid has seen none in this generation.
    pub(super) fn at_least(&self) -> u64 {
        let (generation, revision) = self.seen();
        if generation == self.generation() { revision } else { 0 }
    }

    pub(super) fn since_usec(&self) -> u64 {
        self.since_usec.load(Ordering::Relaxed)
    }

    /// Notes that the state begins now.
    pub(super) fn begin_state(&self) {
        self.since_usec.store(now_usec(), Ordering::Relaxed);
    }

    /// Notes what a server has said in a generation. Revisions of an earlier one do not count any more: etcd was restored since.
    pub(super) fn has_seen(&self, generation: u64, revision: u64) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        *seen = (*seen).max((generation, revision));
    }

    /// Returns the client of the session's server. Fails with Unavailable if there is no session.
    pub(super) fn client(&self) -> Result<ClusterClient<Channel>> {
        match &*self.state.borrow() {
            SessionState::Joined(joined) => Ok(joined.client.clone()),
            _ => Err(unavailable(format!("no server can be asked: {}", self.status()))),
        }
    }

    /// Waits for a session, and returns the client of its server. Fails with Unavailable when the time is over.
    pub(super) async fn joined(&self, limit: Duration) -> Result<ClusterClient<Channel>> {
        let mut state = self.state.subscribe();
        let _ = tokio::time::timeout(limit, state.wait_for(|state| matches!(state, SessionState::Joined(_))))
            .await;
        self.client()
    }
}

fn now_usec() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// Returns a name of a journal in a boot, from which neither can be found.
fn calls(journal_id: &str, boot: &str) -> String {
    let hash = Sha256::new()
        .chain_update("csid calls\0")
        .chain_update(journal_id)
        .chain_update("\0")
        .chain_update(boot);
    hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn revision_after_that_of_a_welcome_is_forgotten() {
        let config: Cluster = toml::from_str("name = \"prod\"").unwrap();
        let node = Node::new(&config, "n1", "journal", "boot", None);
        assert_eq!(node.at_least(), 0);
        node.begin_generation(1, 100);
        node.has_seen(1, 120);
        assert_eq!(node.at_least(), 120);
        node.begin_generation(1, 130);
        assert_eq!(node.at_least(), 120);
        // A server of an earlier version names none.
        node.begin_generation(1, 0);
        assert_eq!(node.at_least(), 120);
        node.has_seen(1, u64::MAX);
        node.begin_generation(1, 140);
        assert_eq!(node.at_least(), 140);
        // etcd was restored.
        node.begin_generation(2, 50);
        assert_eq!((node.at_least(), node.seen()), (0, (2, 0)));
        node.begin_generation(1, 150);
        assert_eq!((node.at_least(), node.seen()), (0, (2, 0)));
    }
}
