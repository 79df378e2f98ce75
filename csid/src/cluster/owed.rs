//! What the servers have yet to learn: claims that have ended on this host. The journal has them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::cluster::node::{Node, Owed};
use crate::store::registry::VolumeName;
use crate::volume::Volumes;

/// The least time between two looks into the journal, and the longest one.
const BETWEEN: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);

/// A claim by its volume and consumer.
type Named = (VolumeName, String);

/// Since when each claim has been owed, as this csid has seen it.
#[derive(Default)]
struct Since(BTreeMap<Named, Instant>);

impl Since {
    /// Takes over the present claims.
    fn see(&mut self, now: Instant, claims: Vec<Named>) -> Owed {
        let mut known = std::mem::take(&mut self.0);
        self.0 = claims
            .into_iter()
            .map(|claim| {
                let since = known.remove(&claim).unwrap_or(now);
                (claim, since)
            })
            .collect();
        Owed { count: self.0.len(), oldest: self.0.values().min().copied() }
    }
}

impl Node {
    /// Keeps the count of what is owed, until the task is aborted.
    pub async fn count_owed(&self, volumes: Volumes) {
        let mut since = Since::default();
        loop {
            let index = match volumes.owed().await {
                Ok((claims, index)) => {
                    let now = since.see(Instant::now(), claims);
                    self.owed.send_if_modified(|owed| {
                        let is_new = owed.count != now.count;
                        *owed = now;
                        is_new
                    });
                    Some(index)
                }
                Err(error) => {
                    tracing::debug!(%error, "what the servers have yet to learn was not counted");
                    None
                }
            };
            tokio::time::sleep(BETWEEN).await;
            let registry = volumes.registry();
            let changed = async {
                match index {
                    Some(index) => drop(registry.changed(index).await),
                    None => std::future::pending().await,
                }
            };
            let _ = tokio::time::timeout(LONGEST, changed).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claim_is_owed_since_it_was_first_seen() {
        let claim = |consumer: &str| {
            (VolumeName { namespace: "default".into(), volume: "data".into() }, consumer.to_owned())
        };
        let mut since = Since::default();
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        assert_eq!(since.see(at(0), vec![]).oldest, None);
        since.see(at(1), vec![claim("a")]);
        let both = since.see(at(2), vec![claim("b"), claim("a")]);
        assert_eq!((both.count, both.oldest), (2, Some(at(1))));
        assert_eq!(since.see(at(3), vec![claim("b")]).oldest, Some(at(2)));
        since.see(at(4), vec![]);
        assert_eq!(since.see(at(5), vec![claim("a")]).oldest, Some(at(5)), "it was learned meanwhile");
    }
}
