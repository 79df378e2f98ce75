//! Joins of nodes that are under way at this server, and those that have ended without an outcome. Such a join may have left the row of a session
//! that has not begun, or may yet write it: a member of etcd can stand still with the transaction for any time.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use csid_etcd::{Expected, Guard};

/// The joins of nodes at this server that are under way, and those that have ended without an outcome.
#[derive(Default)]
pub struct Joins {
    nodes: Mutex<BTreeMap<String, JoinsOfNode>>,
    /// The sessions that have ended, and whose rows etcd may still have.
    parted: Mutex<Vec<Parted>>,
}

/// The row of a session that has ended.
pub struct Parted {
    pub node: String,
    /// The ID of the server that has written the row.
    pub server: String,
    pub revision: u64,
}

#[derive(Default)]
struct JoinsOfNode {
    under_way: usize,
    /// The join without an outcome that has read the latest row of the node. `None`: none may write any more.
    open: Option<OpenJoin>,
}

/// A join without an outcome. Its transaction fails once what it compares has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenJoin {
    /// The node's row.
    pub node: Guard,
    /// This server's ID.
    pub server: String,
}

impl OpenJoin {
    /// Returns the revision of the node's row that the join compares. 0: the row was not there.
    fn revision(&self) -> u64 {
        match self.node.is {
            Expected::Absent => 0,
            Expected::Created(revision) | Expected::Revision(revision) | Expected::Touched(revision) => {
                revision
            }
        }
    }
}

/// A join that is under way, until its session is entered. Its drop ends that.
pub struct JoinUnderWay<'a> {
    pub joins: &'a Joins,
    node: &'a str,
    /// The try that may have written the row of the session, or may yet do so.
    pub open: Option<OpenJoin>,
}

impl Joins {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, JoinsOfNode>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn parted(&self) -> MutexGuard<'_, Vec<Parted>> {
        self.parted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps rows of sessions for another try to remove them.
    pub fn keep_parted(&self, parted: impl IntoIterator<Item = Parted>) {
        self.parted().extend(parted);
    }

    /// Takes the rows of sessions that were not removed.
    pub fn take_parted(&self) -> Vec<Parted> {
        std::mem::take(&mut self.parted())
    }

    /// Notes that a node joins.
    pub fn begin<'a>(&'a self, node: &'a str) -> JoinUnderWay<'a> {
        self.lock().entry(node.to_owned()).or_default().under_way += 1;
        JoinUnderWay { joins: self, node, open: None }
    }

    /// Returns the last joins that have ended without an outcome, by the nodes that do not join now.
    pub fn open(&self) -> Vec<(String, OpenJoin)> {
        let nodes = self.lock();
        let open = nodes.iter().filter(|(_, of)| of.under_way == 0);
        open.filter_map(|(node, of)| Some((node.clone(), of.open.clone()?))).collect()
    }

    /// Returns whether this is the last join of a node that does not join now.
    pub fn is_open(&self, node: &str, join: &OpenJoin) -> bool {
        self.lock().get(node).is_some_and(|of| of.under_way == 0 && of.open.as_ref() == Some(join))
    }

    /// Notes that no earlier join writes any more.
    pub fn close(&self, node: &str) {
        let mut nodes = self.lock();
        if let Some(of) = nodes.get_mut(node) {
            of.open = None;
            if of.under_way == 0 {
                nodes.remove(node);
            }
        }
    }
}

impl Drop for JoinUnderWay<'_> {
    fn drop(&mut self) {
        let mut nodes = self.joins.lock();
        if let Some(of) = nodes.get_mut(self.node) {
            of.under_way -= 1;
            // Of two with the same revision the later one may be of another ID of this server.
            of.open = of.open.take().into_iter().chain(self.open.take()).max_by_key(OpenJoin::revision);
            if of.under_way == 0 && of.open.is_none() {
                nodes.remove(self.node);
            }
        }
    }
}
