//! Changes whose first try got no answer: etcd did it, did not do it, or does it late.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use csid::store::registry::{
    ClaimFilter, Conflict, Record, RecordFilter, Registry, RegistryError, Swap, VolumeName,
};
use csid::store::rows::VolumeKey;
use csid::store::testing::samples::{claim, name, new, record, representative_swaps, swap, swap_in};
use csid_etcd::EtcdRegistry;
use futures_util::FutureExt;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::cluster::Cluster;
use crate::proxy::{Losses, Proxy};
use crate::support::{Raw, change, config, registry};

const LONG: Duration = Duration::from_secs(15);
/// A change with a claim is longer. A read, a deletion, and what HTTP/2 sends by itself are shorter.
const REQUEST: usize = 600;
const ANSWERS: Losses =
    Losses { requests: false, answers: true, full: false, from: REQUEST, with: None, connections: false };
const REQUESTS: Losses = Losses { requests: true, answers: false, ..ANSWERS };

/// A registry that reaches the one member by a proxy, and another one that has no proxy.
struct World {
    cluster: Cluster,
    proxy: Proxy,
    registry: Arc<EtcdRegistry>,
    other: EtcdRegistry,
    /// How many events came.
    events: Arc<AtomicUsize>,
}

impl World {
    async fn new() -> World {
        let cluster = Cluster::start(1, &[]).await;
        let direct = cluster.endpoints();
        let proxy = Proxy::start(cluster.members[0].client).await;
        let events = Arc::new(AtomicUsize::new(0));
        let counted = events.clone();
        let config = config(vec![proxy.endpoint()]);
        let sink = Box::new(move |events: Vec<_>| {
            counted.fetch_add(events.len(), Ordering::SeqCst);
            std::future::ready(()).boxed()
        });
        let registry = Arc::new(EtcdRegistry::start(&config, sink).unwrap());
        World { cluster, proxy, registry, other: self::registry(direct), events }
    }

    /// Begins a change by the proxy, which loses part of it. The registry knows the record that is to change.
    async fn begin(&self, losses: Losses, swap: Swap) -> JoinHandle<Result<u64, RegistryError>> {
        if swap.before.revision == 0 {
            // It has a connection.
            self.registry.record(name("nothing")).await.unwrap();
        } else {
            let newest = async || self.registry.records(RecordFilter::default()).await.unwrap().1;
            while newest().await < swap.before.revision {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
        self.proxy.lose(losses);
        let registry = self.registry.clone();
        tokio::spawn(async move { swap_in(&*registry, swap).await })
    }

    /// Waits until another registry sees a record with this volume, and returns it.
    async fn sees(&self, volume: &VolumeName, is_due: impl Fn(&Record) -> bool) -> Record {
        let seen = async {
            loop {
                let record = self.other.record(volume.clone()).await.unwrap();
                if is_due(&record) {
                    return record;
                }
            }
        };
        timeout(LONG, seen).await.expect("the record")
    }

    /// Ends the connection, lets the next one pass, and returns what became of the change.
    async fn outcome(&self, begun: JoinHandle<Result<u64, RegistryError>>) -> Result<u64, RegistryError> {
        assert!(!begun.is_finished(), "the change was not held up");
        self.proxy.lose(Losses::default());
        self.proxy.cut();
        timeout(LONG, begun).await.expect("an answer").unwrap()
    }

    fn events(&self) -> usize {
        self.events.swap(0, Ordering::SeqCst)
    }
}

fn with_claim(before: &Record, consumer: &str) -> Record {
    let mut after = before.clone();
    after.claims.insert(claim(consumer, "n1"));
    after
}

fn is_stale(outcome: &Result<u64, RegistryError>) -> bool {
    matches!(outcome, Err(RegistryError::Conflict(Conflict::Stale)))
}

#[tokio::test]
async fn lost_answer_of_a_change_is_found() {
    let world = World::new().await;
    swap_in(&*world.registry, new(record("data", &[]))).await.unwrap();
    let before = world.other.record(name("data")).await.unwrap();
    let past = vec![claim("ended", "n1")];
    world.events();
    let begun = world.begin(ANSWERS, Swap { past, ..swap(&before, with_claim(&before, "job")) }).await;
    let made = world.sees(&before.name, |record| record.claim("job").is_some()).await;
    assert_eq!(world.events(), 0);
    assert_eq!(world.outcome(begun).await.unwrap(), made.revision);
    // Once, with one event.
    assert!(world.other.record(before.name).await.unwrap() == made);
    let past = ClaimFilter { past: true, ..ClaimFilter::default() };
    assert_eq!((world.registry.claims(past).await.unwrap().0.len(), world.events()), (1, 1));
}

#[tokio::test]
async fn lost_request_is_sent_again() {
    let world = World::new().await;
    let first = swap_in(&*world.registry, new(record("data", &[]))).await.unwrap();
    let before = world.other.record(name("data")).await.unwrap();
    let begun = world.begin(REQUESTS, swap(&before, with_claim(&before, "job"))).await;
    timeout(LONG, world.proxy.keeps()).await.expect("a request");
    assert_eq!(world.other.record(name("data")).await.unwrap().revision, first);
    let revision = world.outcome(begun).await.unwrap();
    assert_eq!(world.other.record(name("data")).await.unwrap().revision, revision);
    let mut raw = Raw::connect(world.cluster.members[0].endpoint()).await;
    let head = raw.below("/csid/v1/vol/default/data/head").await;
    assert_eq!(head[0].version, 2, "the change was made once");
}

/// The record has gone on when the repeated try is refused. The history says that the first try was committed.
#[tokio::test]
async fn lost_answer_is_found_under_later_changes() {
    let world = World::new().await;
    swap_in(&*world.registry, new(record("data", &[]))).await.unwrap();
    for round in 0..2 {
        let before = world.other.record(name("data")).await.unwrap();
        let consumer = format!("job {round}");
        let begun = world.begin(ANSWERS, swap(&before, with_claim(&before, &consumer))).await;
        let made = world.sees(&before.name, |record| record.claim(&consumer).is_some()).await;
        // A later change, or a record of the same name.
        if round == 0 {
            change(&world.other, "data", |record| *record = with_claim(record, "later")).await.unwrap();
        } else {
            swap_in(&world.other, swap(&made, Record::none(name("data")))).await.unwrap();
            swap_in(&world.other, new(record("data", &[]))).await.unwrap();
        }
        assert_eq!(world.outcome(begun).await.unwrap(), made.revision);
    }
}

#[tokio::test]
async fn lost_request_is_stale_after_another_change() {
    let world = World::new().await;
    swap_in(&*world.registry, new(record("data", &[]))).await.unwrap();
    let before = world.other.record(name("data")).await.unwrap();
    let begun = world.begin(REQUESTS, swap(&before, with_claim(&before, "job"))).await;
    timeout(LONG, world.proxy.keeps()).await.expect("a request");
    // The other one writes the very same, and it is not this registry's.
    swap_in(&world.other, swap(&before, with_claim(&before, "job"))).await.unwrap();
    world.events();
    let outcome = world.outcome(begun).await;
    assert!(is_stale(&outcome), "{outcome:?}");
    assert_eq!(world.events(), 0);
}

#[tokio::test]
async fn lost_answers_of_a_creation_are_found() {
    let world = World::new().await;
    for is_changed in [false, true] {
        let volume = if is_changed { "changed" } else { "new" };
        let begun = world.begin(ANSWERS, new(record(volume, &["job"]))).await;
        let made = world.sees(&name(volume), |record| record.revision != 0).await;
        if is_changed {
            change(&world.other, volume, |record| *record = with_claim(record, "later")).await.unwrap();
        }
        assert_eq!(world.outcome(begun).await.unwrap(), made.revision);
    }
    // Another registry was first with the name of the record, or of the volume.
    for own_name in [true, false] {
        let volume = if own_name { "named" } else { "taken" };
        let mut theirs = record(if own_name { volume } else { "theirs" }, &[]);
        theirs.volume = VolumeKey::new("local", format!("ext-{volume}"));
        let begun = world.begin(REQUESTS, new(record(volume, &["job"]))).await;
        timeout(LONG, world.proxy.keeps()).await.expect("a request");
        swap_in(&world.other, new(theirs)).await.unwrap();
        match world.outcome(begun).await {
            Err(RegistryError::Conflict(Conflict::Stale)) if own_name => {}
            Err(RegistryError::Conflict(Conflict::Taken(found))) if !own_name => {
                assert_eq!(found, name("theirs"));
            }
            outcome => panic!("{outcome:?}"),
        }
    }
}

#[tokio::test]
async fn lost_answer_of_a_deletion_is_found() {
    let world = World::new().await;
    for is_made_again in [false, true] {
        swap_in(&*world.registry, new(record("data", &["job"]))).await.unwrap();
        let before = world.other.record(name("data")).await.unwrap();
        let begun =
            world.begin(Losses { from: 150, ..ANSWERS }, swap(&before, Record::none(name("data")))).await;
        world.sees(&before.name, |record| record.revision == 0).await;
        let later = if is_made_again {
            swap_in(&world.other, new(record("data", &[]))).await.unwrap()
        } else {
            u64::MAX
        };
        let deleted = world.outcome(begun).await.unwrap();
        assert!(before.revision < deleted && deleted < later);
    }
}

#[tokio::test]
async fn deletion_of_another_registry_is_stale() {
    let world = World::new().await;
    swap_in(&*world.registry, new(record("data", &["job"]))).await.unwrap();
    let before = world.other.record(name("data")).await.unwrap();
    let deletion = || swap(&before, Record::none(name("data")));
    let begun = world.begin(Losses { from: 150, ..REQUESTS }, deletion()).await;
    timeout(LONG, world.proxy.keeps()).await.expect("a request");
    swap_in(&world.other, deletion()).await.unwrap();
    let outcome = world.outcome(begun).await;
    assert!(is_stale(&outcome), "{outcome:?}");
}

#[tokio::test]
async fn creation_that_was_deleted_is_found() {
    let world = World::new().await;
    let begun = world.begin(ANSWERS, new(record("data", &["job"]))).await;
    let made = world.sees(&name("data"), |record| record.revision != 0).await;
    swap_in(&world.other, swap(&made, Record::none(name("data")))).await.unwrap();
    assert_eq!(world.outcome(begun).await.unwrap(), made.revision);
}

/// etcd forgets the revision of a record that does not change for an hour. The history after the change's own read is there.
#[tokio::test]
async fn lost_answer_is_found_after_a_compaction() {
    let world = World::new().await;
    let mut raw = Raw::connect(world.cluster.members[0].endpoint()).await;
    swap_in(&*world.registry, new(record("data", &[]))).await.unwrap();
    let before = world.other.record(name("data")).await.unwrap();
    swap_in(&world.other, new(record("later", &[]))).await.unwrap();
    let newest = swap_in(&world.other, new(record("last", &[]))).await.unwrap();
    while world.registry.records(RecordFilter::default()).await.unwrap().1 < newest {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    raw.compact().await;
    let begun = world.begin(ANSWERS, swap(&before, with_claim(&before, "job"))).await;
    let made = world.sees(&before.name, |record| record.claim("job").is_some()).await;
    change(&world.other, "data", |record| *record = with_claim(record, "later")).await.unwrap();
    assert_eq!(world.outcome(begun).await.unwrap(), made.revision);
}

#[tokio::test]
async fn compacted_history_decides_nothing() {
    let world = World::new().await;
    let mut raw = Raw::connect(world.cluster.members[0].endpoint()).await;
    swap_in(&*world.registry, new(record("data", &[]))).await.unwrap();
    let before = world.other.record(name("data")).await.unwrap();
    let begun = world.begin(ANSWERS, swap(&before, with_claim(&before, "job"))).await;
    world.sees(&before.name, |record| record.claim("job").is_some()).await;
    change(&world.other, "data", |record| *record = with_claim(record, "later")).await.unwrap();
    raw.compact().await;
    let outcome = world.outcome(begun).await;
    assert!(matches!(outcome, Err(RegistryError::Unreachable(_))), "{outcome:?}");
}

/// The change is committed, whatever becomes of its events.
#[tokio::test]
async fn sink_that_panics_fails_no_change() {
    let cluster = Cluster::start(1, &[]).await;
    let registry =
        EtcdRegistry::start(&config(cluster.endpoints()), Box::new(|_| panic!("no events"))).unwrap();
    let revision = swap_in(&registry, new(record("data", &[]))).await.unwrap();
    assert_eq!(registry.record(name("data")).await.unwrap().revision, revision);
}

/// etcd 3.4 commits the change that crosses its quota, and answers that the database is full.
#[tokio::test]
async fn committed_change_of_a_full_database_is_found() {
    let world = World::new().await;
    swap_in(&*world.registry, new(record("data", &[]))).await.unwrap();
    let before = world.other.record(name("data")).await.unwrap();
    let full = Losses { answers: false, full: true, ..ANSWERS };
    let begun = world.begin(full, swap(&before, with_claim(&before, "job"))).await;
    let made = world.sees(&before.name, |record| record.claim("job").is_some()).await;
    // Each later read has an error for an answer until then.
    assert_eq!(world.outcome(begun).await.unwrap(), made.revision);
}

/// A member that stood still gets to the first try when the second one has long been answered, and the record is deleted.
#[tokio::test]
async fn late_creation_makes_no_deleted_record() {
    let world = World::new().await;
    let begun = world.begin(REQUESTS, new(record("data", &["job"]))).await;
    timeout(LONG, world.proxy.keeps()).await.expect("a request");
    world.outcome(begun).await.unwrap();
    let made = world.other.record(name("data")).await.unwrap();
    assert!(made.revision != 0);
    swap_in(&world.other, swap(&made, Record::none(name("data")))).await.unwrap();
    timeout(LONG, world.proxy.deliver()).await.expect("an answer to the late try");
    let found = world.other.record(name("data")).await.unwrap();
    assert!(found.revision == 0, "the deleted record is there again");
    let mut raw = Raw::connect(world.cluster.members[0].endpoint()).await;
    assert!(raw.below("/csid/v1/ext/").await.is_empty());
}

/// The same where the creation was refused, because the name was another record's.
#[tokio::test]
async fn late_creation_takes_no_freed_name() {
    let world = World::new().await;
    let begun = world.begin(REQUESTS, new(record("data", &["job"]))).await;
    timeout(LONG, world.proxy.keeps()).await.expect("a request");
    let theirs = Record { volume: VolumeKey::new("local", "theirs"), ..record("data", &[]) };
    let revision = swap_in(&world.other, new(theirs)).await.unwrap();
    let outcome = world.outcome(begun).await;
    assert!(is_stale(&outcome), "{outcome:?}");
    let theirs = world.other.record(name("data")).await.unwrap();
    assert_eq!(theirs.revision, revision);
    swap_in(&world.other, swap(&theirs, Record::none(name("data")))).await.unwrap();
    timeout(LONG, world.proxy.deliver()).await.expect("an answer to the late try");
    assert_eq!(world.other.record(name("data")).await.unwrap().revision, 0);
}

/// A record's change compares nothing that a deletion of the other record would change. So the open try may still be made.
#[tokio::test]
async fn open_change_of_a_taken_id_is_not_decided() {
    let world = World::new().await;
    swap_in(&*world.registry, representative_swaps().remove(1)).await.unwrap();
    let before = world.other.record(name("new")).await.unwrap();
    let id = VolumeKey::new("local", "id");
    let after = Record { volume: id.clone(), ..with_claim(&before, "job") };
    let begun = world.begin(REQUESTS, swap(&before, after)).await;
    timeout(LONG, world.proxy.keeps()).await.expect("a request");
    swap_in(&world.other, new(Record { volume: id, ..record("theirs", &[]) })).await.unwrap();
    let outcome = world.outcome(begun).await;
    assert!(matches!(outcome, Err(RegistryError::Unreachable(_))), "{outcome:?}");
    let theirs = world.other.record(name("theirs")).await.unwrap();
    swap_in(&world.other, swap(&theirs, Record::none(name("theirs")))).await.unwrap();
    timeout(LONG, world.proxy.deliver()).await.expect("an answer to the late try");
    assert!(world.other.record(name("new")).await.unwrap().revision > before.revision);
}

/// The same where the creation was refused, because another record had the volume. That record is deleted when the member goes on.
#[tokio::test]
async fn late_creation_takes_no_freed_volume() {
    let world = World::new().await;
    let begun = world.begin(REQUESTS, new(record("data", &["job"]))).await;
    timeout(LONG, world.proxy.keeps()).await.expect("a request");
    let theirs = Record { volume: record("data", &[]).volume, ..record("theirs", &[]) };
    swap_in(&world.other, new(theirs)).await.unwrap();
    let outcome = world.outcome(begun).await;
    assert!(matches!(outcome, Err(RegistryError::Conflict(Conflict::Taken(_)))), "{outcome:?}");
    let theirs = world.other.record(name("theirs")).await.unwrap();
    swap_in(&world.other, swap(&theirs, Record::none(name("theirs")))).await.unwrap();
    timeout(LONG, world.proxy.deliver()).await.expect("an answer to the late try");
    assert_eq!(world.other.record(name("data")).await.unwrap().revision, 0);
}

#[tokio::test]
async fn late_change_undoes_no_later_one() {
    let world = World::new().await;
    swap_in(&*world.registry, new(record("data", &[]))).await.unwrap();
    let before = world.other.record(name("data")).await.unwrap();
    let begun = world.begin(REQUESTS, swap(&before, with_claim(&before, "job"))).await;
    timeout(LONG, world.proxy.keeps()).await.expect("a request");
    world.outcome(begun).await.unwrap();
    let revision = change(&world.other, "data", |record| record.claims.remove("job")).await.unwrap();
    timeout(LONG, world.proxy.deliver()).await.expect("an answer to the late try");
    let found = world.other.record(name("data")).await.unwrap();
    assert_eq!((found.revision, found.claims.len()), (revision, 0));
}
