//! Members that answer late, in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use csid::store::registry::Registry;
use csid::store::testing::samples::{new, record, swap_in};
use csid_etcd::double::{Double, Fate, Passage, Way};
use csid_etcd::{EtcdRegistry, RowKey, Timing};
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
    assert_eq!((begun.elapsed(), way.changes.swap(0, Ordering::Relaxed)), (LATE, 1));
    let begun = Instant::now();
    assert!(registry.rows().keep_lease(lease).await.unwrap());
    // One more member was asked after each second. The fifth one is asked when the first one answers.
    assert_eq!((begun.elapsed(), way.changes.swap(0, Ordering::Relaxed)), (LATE, 5));
    swap_in(&registry, new(record("data", &[]))).await.unwrap();
    assert_eq!(way.changes.swap(0, Ordering::Relaxed), 1);
    let begun = Instant::now();
    change(&registry, "data", |record| record.registration.as_mut().unwrap().capacity = Some(1))
        .await
        .unwrap();
    // It reads the record, and writes it.
    assert_eq!((begun.elapsed(), way.changes.swap(0, Ordering::Relaxed)), (Duration::from_secs(8), 1));
}

/// A way to a member that reads requests and answers none while it hangs.
#[derive(Default)]
struct Hanging {
    hangs: AtomicBool,
    /// Whether it takes no watch, and no watch goes on.
    is_blind: AtomicBool,
    asked: AtomicUsize,
}

#[tonic::async_trait]
impl Way for Hanging {
    fn passage(&self, _changes: bool) -> Passage {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let fate = if self.hangs.load(Ordering::Relaxed) { Fate::Lost } else { Fate::Answered };
        Passage { before: Duration::ZERO, fate, after: Duration::ZERO }
    }

    async fn message(&self) -> Result<(), Status> {
        match self.is_blind.load(Ordering::Relaxed) {
            true => std::future::pending().await,
            false => Ok(()),
        }
    }
}

/// Starts a registry on three members.
fn on_members(etcd: &Double) -> (EtcdRegistry, [Arc<Hanging>; 3]) {
    let ways: [Arc<Hanging>; 3] = Default::default();
    let connections = ways.iter().map(|way| etcd.connect(way.clone())).collect();
    let registry = EtcdRegistry::start_at(connections, "/csid/", Timing::default(), no_events()).unwrap();
    (registry, ways)
}

const SECOND: Duration = Duration::from_secs(1);
/// More than a call takes between members that answer at once.
const ALMOST: Duration = Duration::from_millis(10);

/// A lease of 10 s does not wait for 5 s at each member that hangs.
#[tokio::test(start_paused = true)]
async fn lease_is_renewed_past_members_that_hang() {
    let etcd = Double::default();
    let (registry, ways) = on_members(&etcd);
    let rows = registry.rows();
    let lease = rows.grant_lease(60).await.unwrap();
    for hanging in 1..3_u32 {
        ways[hanging as usize - 1].hangs.store(true, Ordering::Relaxed);
        let begun = Instant::now();
        assert!(rows.keep_lease(lease).await.unwrap());
        assert!((SECOND..SECOND + ALMOST).contains(&begun.elapsed()), "{:?}", begun.elapsed());
        // The member that has answered is asked first from then on, also by other calls.
        let begun = Instant::now();
        assert!(rows.keep_lease(lease).await.unwrap());
        rows.read(&RowKey::Meta).await.unwrap();
        assert!(begun.elapsed() < ALMOST, "{:?}", begun.elapsed());
    }
    // All hang, and a request that was lost stays lost. A member that goes on is asked once more when the two others were.
    ways[2].hangs.store(true, Ordering::Relaxed);
    let begun = Instant::now();
    let heals = async {
        tokio::time::sleep(Duration::from_millis(4500)).await;
        ways[0].hangs.store(false, Ordering::Relaxed);
    };
    let (kept, ()) = tokio::join!(rows.keep_lease(lease), heals);
    assert!(kept.unwrap());
    assert!(begun.elapsed() <= Duration::from_millis(4500) + 3 * SECOND, "{:?}", begun.elapsed());
}

/// Without an answer members are asked as often as they have time for: the calls do not pile up.
#[tokio::test(start_paused = true)]
async fn members_that_hang_are_asked_once_a_second() {
    let etcd = Double::default();
    let (registry, ways) = on_members(&etcd);
    let rows = registry.rows();
    let lease = rows.grant_lease(60).await.unwrap();
    for way in &ways {
        way.hangs.store(true, Ordering::Relaxed);
        way.asked.store(0, Ordering::Relaxed);
    }
    let begun = Instant::now();
    rows.keep_lease(lease).await.unwrap_err();
    let took = begun.elapsed();
    let asked: usize = ways.iter().map(|way| way.asked.load(Ordering::Relaxed)).sum();
    assert!((Duration::from_secs(30)..Duration::from_secs(32)).contains(&took), "{took:?}");
    assert!(asked <= 40, "{asked} calls in {took:?}");
}

#[tokio::test(start_paused = true)]
async fn watch_is_taken_past_a_member_that_hangs() {
    let etcd = Double::default();
    let (writer, _) = on_members(&etcd);
    let (followed, ways) = on_members(&etcd);
    ways[0].is_blind.store(true, Ordering::Relaxed);
    // They are listed, and the watch is not open.
    let mut index = followed.changed(0).await.unwrap();
    let begun = Instant::now();
    let due = swap_in(&writer, new(record("data", &[]))).await.unwrap();
    while index < due {
        index = followed.changed(index).await.unwrap();
    }
    assert!(begun.elapsed() <= SECOND + ALMOST, "{:?}", begun.elapsed());
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
