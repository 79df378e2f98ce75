//! Members that answer late, in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use csid::store::testing::samples::{new, record, swap_in};
use csid_etcd::double::{Double, Fate, Passage, Way};
use csid_etcd::{EtcdRegistry, Timing};
use tokio::time::Instant;
use tonic::Status;

use crate::support::{change, no_events};

/// A way to members that answer late, and count what changes.
#[derive(Default)]
struct Slow {
    /// Only what changes something is late, as with a slow disk.
    reads_are_fast: bool,
    changes: AtomicUsize,
}

const LATE: Duration = Duration::from_secs(4);

#[tonic::async_trait]
impl Way for Slow {
    fn passage(&self, changes: bool) -> Passage {
        self.changes.fetch_add(usize::from(changes), Ordering::Relaxed);
        let after = if changes || !self.reads_are_fast { LATE } else { Duration::ZERO };
        Passage { before: Duration::ZERO, fate: Fate::Answered, after }
    }

    async fn message(&self) -> Result<(), Status> {
        Ok(())
    }
}

/// The members answer later than they may when they are asked first. Only the first read is repeated.
#[tokio::test(start_paused = true)]
async fn slow_members_are_given_more_time() {
    let (etcd, way) = (Double::default(), Arc::new(Slow::default()));
    let connections = (0..3).map(|_| etcd.connect(way.clone())).collect();
    let registry = EtcdRegistry::start_at(connections, "/csid/", Timing::default(), no_events()).unwrap();
    let begun = Instant::now();
    let lease = registry.rows().grant_lease(60).await.unwrap();
    assert!(registry.rows().keep_lease(lease).await.unwrap());
    assert_eq!((begun.elapsed(), way.changes.swap(0, Ordering::Relaxed)), (Duration::from_secs(8), 2));
    swap_in(&registry, new(record("data", &[]))).await.unwrap();
    assert_eq!(way.changes.swap(0, Ordering::Relaxed), 1);
    let begun = Instant::now();
    change(&registry, "data", |record| record.registration.as_mut().unwrap().capacity = Some(1))
        .await
        .unwrap();
    // It reads the record, and writes it.
    assert_eq!((begun.elapsed(), way.changes.swap(0, Ordering::Relaxed)), (Duration::from_secs(8), 1));
}

/// A fast read says nothing of a slow disk.
#[tokio::test(start_paused = true)]
async fn fast_reads_leave_writes_more_time() {
    let (etcd, way) = (Double::default(), Arc::new(Slow { reads_are_fast: true, ..Slow::default() }));
    let connections = (0..3).map(|_| etcd.connect(way.clone())).collect();
    let registry = EtcdRegistry::start_at(connections, "/csid/", Timing::default(), no_events()).unwrap();
    swap_in(&registry, new(record("data", &[]))).await.unwrap();
    assert_eq!(
        way.changes.swap(0, Ordering::Relaxed),
        4,
        "each member was asked, and then one with more time"
    );
    let begun = Instant::now();
    change(&registry, "data", |record| record.registration.as_mut().unwrap().capacity = Some(1))
        .await
        .unwrap();
    assert_eq!((begun.elapsed(), way.changes.swap(0, Ordering::Relaxed)), (LATE, 1));
}
