//! The drain of this node. A server says that the node drains; csid unmounts what nobody uses, again and again, and reports what is left.
//!
//! The servers keep that the node drains, and csid keeps it in memory. So the drain goes on while no server can be reached, and begins again after csid's
//! restart when the node has joined.

use std::time::{Duration, Instant};

use csi_proto::cluster::v1::{DrainLeft, Drained};
use tokio::sync::broadcast::error::RecvError;

use crate::backoff::Backoff;
use crate::cluster::node::Node;
use crate::error::presentable;
use crate::volume::{LeftByDrain, NodeDrained, Volumes};

/// The shortest and the longest pause between two tries while something is left. Nobody says when a mount is used no more, so csid looks. The pause grows while
/// the tries leave the same.
const PAUSE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(30));
/// The least pause between two tries. While nothing is left there is no other try without an event.
const LEAST: Duration = Duration::from_secs(1);
/// A pause takes at least so many times as long as the try before it: a host with many mounts in use tries them less often.
const IDLE: u32 = 20;
/// The longest pause for that.
const LONGEST: Duration = Duration::from_secs(300);
/// The limit of a path or a reason in a report, in bytes.
const TEXT: usize = 192;

impl Node {
    /// Returns the number of this node's drain. 0: it does not drain.
    pub(super) fn drain_number(&self) -> u64 {
        *self.drain.borrow()
    }

    /// Takes over a server's word about this node's drain. 0: it does not drain.
    pub(super) fn set_drain(&self, number: u64) {
        if self.drain.send_replace(number) != number {
            // The status says it, too.
            self.state.send_modify(|_| ());
        }
    }

    /// Drains this node while the servers want that, until the task is aborted.
    pub async fn run_drain(&self, volumes: Volumes) {
        let mut wanted = self.drain.subscribe();
        loop {
            // The node has the sender.
            let Ok(number) = wanted.wait_for(|number| *number != 0).await.map(|number| *number) else {
                return;
            };
            tracing::info!("this node drains: what of the cluster's volumes nobody uses is unmounted");
            tokio::select! {
                () = self.drain_again(number, &volumes) => {}
                _ = wanted.wait_for(|now| *now != number) => {}
            }
            self.drained.send_replace(None);
            tracing::info!("this drain of the node is over");
            // A server that is not ours may change its word again and again.
            tokio::time::sleep(LEAST).await;
        }
    }

    /// Tries to unmount everything, again and again. Returns only when the journal has ended.
    async fn drain_again(&self, number: u64, volumes: &Volumes) {
        let mut pause = Backoff::between(PAUSE.0, PAUSE.1);
        loop {
            // What changes during a try may come too late for it.
            let mut events = volumes.journal_events();
            let begun = Instant::now();
            let is_empty = match volumes.drain_node().await {
                Ok(left) => {
                    let is_empty = left.count == 0;
                    if self.note_drained(report(number, left)) {
                        pause.reset();
                        if is_empty {
                            tracing::info!("this node is drained: nothing of the cluster's volumes is left");
                        }
                    }
                    is_empty
                }
                Err(error) => {
                    tracing::warn!(%error, "this node is not drained yet");
                    false
                }
            };
            let idle = (begun.elapsed() * IDLE).min(LONGEST);
            if !is_empty {
                tokio::time::sleep(pause.next().max(idle)).await;
                continue;
            }
            // A mount that had begun before the drain has its row later.
            tokio::time::sleep(LEAST.max(idle)).await;
            if matches!(events.recv().await, Err(RecvError::Closed)) {
                return;
            }
        }
    }

    /// Takes over what a try has left. Returns whether it is new.
    fn note_drained(&self, report: Drained) -> bool {
        let report = Some(report);
        self.drained.send_if_modified(|present| {
            let is_new = *present != report;
            if is_new {
                *present = report;
            }
            is_new
        })
    }
}

fn report(drain: u64, NodeDrained { left, count }: NodeDrained) -> Drained {
    let left = left.into_iter().map(|of| {
        let LeftByDrain { name, consumer, tag, target, why } = of;
        let [target, why] = [target, why].map(|text| presentable(&text, TEXT));
        DrainLeft { namespace: name.namespace, volume: name.volume, consumer, tag, target, why }
    });
    Drained { left: left.collect(), count: u64::try_from(count).unwrap_or(u64::MAX), since_usec: 0, drain }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::registry::VolumeName;

    #[test]
    fn report_of_a_drain_has_short_texts() {
        let name = VolumeName { namespace: "prod".into(), volume: "data".into() };
        let of = LeftByDrain {
            name,
            consumer: "web".into(),
            tag: String::new(),
            target: format!("/srv/{}", "d".repeat(1000)),
            why: format!("it is in use\nby {}", "psql (7), ".repeat(1000)),
        };
        let report = report(3, NodeDrained { left: vec![of], count: 10_000 });
        assert_eq!((report.drain, report.count, report.since_usec), (3, 10_000, 0));
        let [left] = &report.left[..] else { panic!("{report:?}") };
        assert!(left.target.starts_with("/srv/d") && left.target.len() <= TEXT);
        assert!(left.why.starts_with("it is in use by psql") && left.why.len() <= TEXT);
    }
}
