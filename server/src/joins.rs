//! Joins of nodes that are under way at this server, and those that have ended without an outcome. Such a join may have left the row of a session
//! that has not begun.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// How long a join without an outcome may still write the row of its session.
const OPEN: Duration = Duration::from_secs(120);

/// The joins of nodes at this server that are under way, and those that have ended without an outcome.
#[derive(Default)]
pub struct Joins(Mutex<BTreeMap<String, JoinsOfNode>>);

#[derive(Default)]
struct JoinsOfNode {
    under_way: usize,
    /// The end of the last join without an outcome. `None`: there was none since the last one that has succeeded.
    open: Option<Instant>,
}

/// A join that is under way, until its session is entered. Its drop ends that.
pub struct JoinUnderWay<'a> {
    pub joins: &'a Joins,
    node: &'a str,
    /// Whether a try may have written the row of the session, or may yet do so.
    pub is_open: bool,
}

impl Joins {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, JoinsOfNode>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a node joins.
    pub fn begin<'a>(&'a self, node: &'a str) -> JoinUnderWay<'a> {
        self.lock().entry(node.to_owned()).or_default().under_way += 1;
        JoinUnderWay { joins: self, node, is_open: false }
    }

    /// Returns the nodes whose last join has ended without an outcome, and that do not join now.
    pub fn open(&self) -> Vec<String> {
        let mut nodes = self.lock();
        nodes.retain(|_, of| {
            of.open = of.open.filter(|ended| ended.elapsed() < OPEN);
            of.under_way > 0 || of.open.is_some()
        });
        let is_open = |(_, of): &(&String, &JoinsOfNode)| of.under_way == 0 && of.open.is_some();
        nodes.iter().filter(is_open).map(|(node, _)| node.clone()).collect()
    }

    /// Notes that no earlier join writes any more, because one has succeeded.
    pub fn close(&self, node: &str) {
        if let Some(of) = self.lock().get_mut(node) {
            of.open = None;
        }
    }
}

impl Drop for JoinUnderWay<'_> {
    fn drop(&mut self) {
        let mut nodes = self.joins.lock();
        if let Some(of) = nodes.get_mut(self.node) {
            of.under_way -= 1;
            if self.is_open {
                of.open = Some(Instant::now());
            }
            if of.under_way == 0 && of.open.is_none() {
                nodes.remove(self.node);
            }
        }
    }
}
