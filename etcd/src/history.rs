//! Which history of etcd this process has seen. A restore from a backup begins another one.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::watch;

use crate::error::EtcdError;
use crate::wire::ResponseHeader;

/// What etcd has said of itself in its answers. What this process remembers of etcd is of this history, so a process that finds another one has to end.
pub(crate) struct History {
    /// The ID of etcd's cluster, in the first answer. 0: none has come yet.
    cluster: AtomicU64,
    /// The greatest revision in an answer.
    revision: AtomicU64,
    /// Why an answer was of another history. `None`: all have been of this one.
    over: watch::Sender<Option<String>>,
}

impl Default for History {
    fn default() -> Self {
        let (cluster, revision) = Default::default();
        History { cluster, revision, over: watch::channel(None).0 }
    }
}

impl History {
    /// Returns the ID of etcd's cluster. 0: no answer has come yet.
    pub fn cluster(&self) -> u64 {
        self.cluster.load(Ordering::Acquire)
    }

    /// Returns the greatest revision in an answer until now. A linearizable answer to a later request has it, or a greater one.
    pub fn revision(&self) -> u64 {
        self.revision.load(Ordering::Acquire)
    }

    /// Takes over the header of an answer. `before`: the greatest revision when the request was sent. Fails if etcd was restored from a backup.
    pub fn see(&self, before: u64, header: Option<&ResponseHeader>) -> Result<(), EtcdError> {
        let Some(ResponseHeader { cluster_id, revision, .. }) = header else { return Ok(()) };
        let revision = u64::try_from(*revision).unwrap_or(0);
        let first = self.cluster.compare_exchange(0, *cluster_id, Ordering::AcqRel, Ordering::Acquire);
        let why = match first {
            Err(cluster) if cluster != *cluster_id => {
                format!("its cluster had the ID {cluster:x}, and has {cluster_id:x} now")
            }
            _ if revision < before => format!("it had the revision {before}, and has {revision} now"),
            _ => {
                self.revision.fetch_max(revision, Ordering::AcqRel);
                return Ok(());
            }
        };
        self.over.send_replace(Some(why.clone()));
        Err(EtcdError::Restored { why })
    }

    /// Waits until an answer has shown that etcd was restored, and returns how.
    pub async fn over(&self) -> String {
        let mut over = self.over.subscribe();
        // The channel lives as long as `self`.
        let why = over.wait_for(Option::is_some).await;
        why.ok().and_then(|why| why.clone()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn header(cluster_id: u64, revision: i64) -> Option<ResponseHeader> {
        Some(ResponseHeader { cluster_id, revision, ..ResponseHeader::default() })
    }

    #[test]
    fn late_answer_of_the_same_history_is_taken() {
        let history = History::default();
        for (before, revision) in [(0, 7), (5, 9), (7, 8), (9, 9)] {
            history.see(before, header(1, revision).as_ref()).unwrap();
        }
        assert_eq!((history.cluster(), history.revision()), (1, 9));
        assert!(history.over().now_or_never().is_none());
    }

    #[test]
    fn revision_or_cluster_of_a_restore_ends_the_history() {
        for (cluster, revision) in [(1, 8), (2, 100)] {
            let history = History::default();
            history.see(0, header(1, 9).as_ref()).unwrap();
            let error = history.see(history.revision(), header(cluster, revision).as_ref()).unwrap_err();
            assert!(matches!(error, EtcdError::Restored { .. }), "{error}");
            assert!(history.over().now_or_never().is_some());
            assert_eq!((history.cluster(), history.revision()), (1, 9), "the other history was taken over");
        }
    }
}
