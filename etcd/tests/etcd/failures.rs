//! Members that die, stand still or forget, and watches that break.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use csid::store::registry::{Conflict, Record, RecordFilter, Registry, RegistryError};
use csid::store::testing::samples::{claim, name, new, record, swap, swap_in};
use csid_etcd::{EtcdRegistry, Timing};
use rustix::process::Signal;
use tokio::net::TcpListener;
use tokio::time::timeout;

use crate::cluster::Cluster;
use crate::proxy::{Losses, Proxy};
use crate::support::{Raw, TIMING, change, config, no_events, registry};

const LONG: Duration = Duration::from_secs(30);

/// Adds one to a record's capacity until it is committed. Returns how many tries were refused as stale.
async fn add_one(registry: &EtcdRegistry, volume: &str) -> usize {
    let mut stale = 0;
    loop {
        let added = change(registry, volume, |record| {
            *record.registration.as_mut().unwrap().capacity.get_or_insert(0) += 1;
        });
        match added.await {
            Ok(_) => return stale,
            Err(RegistryError::Conflict(Conflict::Stale)) => stale += 1,
            Err(error) => panic!("{error}"),
        }
    }
}

async fn capacity(registry: &EtcdRegistry, volume: &str) -> Option<u64> {
    registry.record(name(volume)).await.unwrap().registration.unwrap().capacity
}

async fn names(registry: &EtcdRegistry) -> Vec<String> {
    let (found, _) = registry.records(RecordFilter::default()).await.unwrap();
    found.into_iter().map(|record| record.name.volume).collect()
}

#[tokio::test]
async fn two_registries_lose_no_change_of_a_record() {
    let cluster = Cluster::start(1, &[]).await;
    let registries = [registry(cluster.endpoints()), registry(cluster.endpoints())];
    swap_in(&registries[0], new(record("data", &[]))).await.unwrap();
    let writers = (0..16).map(|writer| {
        let registry = &registries[writer % 2];
        async move {
            let mut stale = 0;
            for _ in 0..8 {
                stale += add_one(registry, "data").await;
            }
            stale
        }
    });
    let stale: usize = futures_util::future::join_all(writers).await.into_iter().sum();
    assert!(stale > 0, "no writer raced");
    for registry in &registries {
        assert_eq!(capacity(registry, "data").await, Some(16 * 8));
    }
}

/// No member is the leader for half a second.
#[tokio::test]
async fn leader_is_found_during_an_election() {
    let mut cluster = Cluster::start(3, &[]).await;
    let leader = cluster.leader().await;
    cluster.members[leader].kill();
    assert_ne!(cluster.leader().await, leader);
}

/// Writers go on while the leader is killed, and each change that was answered is there once.
#[tokio::test]
async fn killed_leader_loses_no_change() {
    let mut cluster = Cluster::start(3, &[]).await;
    let leader = cluster.leader().await;
    // The leader is asked first.
    let mut endpoints = cluster.endpoints();
    endpoints.rotate_left(leader);
    let registry = Arc::new(registry(endpoints));
    let (ends, changes) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut writers = Vec::new();
    for volume in 0..4 {
        let volume = format!("data {volume}");
        swap_in(&*registry, new(record(&volume, &[]))).await.unwrap();
        let (registry, ends, changes) = (registry.clone(), ends.clone(), changes.clone());
        writers.push(tokio::spawn(async move {
            let mut added = 0;
            while !ends.load(Ordering::SeqCst) {
                // Nobody else writes the record: it is never stale.
                assert_eq!(add_one(&registry, &volume).await, 0);
                added += 1;
                changes.fetch_add(1, Ordering::SeqCst);
            }
            (volume, added)
        }));
    }
    let more = async |count: u64| {
        let due = changes.load(Ordering::SeqCst) + count;
        while changes.load(Ordering::SeqCst) < due {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LONG, more(40)).await.expect("changes before");
    cluster.members[leader].kill();
    timeout(LONG, more(40)).await.expect("changes after");
    ends.store(true, Ordering::SeqCst);
    for writer in writers {
        let (volume, added) = writer.await.unwrap();
        assert_eq!(capacity(&registry, &volume).await, Some(added));
    }
    // The cache follows another member.
    assert_eq!(names(&registry).await.len(), 4);
}

/// A leader that stands still has changes in its sockets when it goes on.
#[tokio::test]
async fn leader_that_stood_still_changes_nothing_late() {
    let cluster = Cluster::start(3, &[]).await;
    let leader = cluster.leader().await;
    let mut endpoints = cluster.endpoints();
    endpoints.rotate_left(leader);
    let registry = registry(endpoints);
    swap_in(&registry, new(record("data", &[]))).await.unwrap();
    assert_eq!(add_one(&registry, "data").await, 0);
    cluster.members[leader].signal(Signal::STOP);
    assert_eq!(add_one(&registry, "data").await, 0);
    assert_eq!(add_one(&registry, "data").await, 0);
    cluster.members[leader].signal(Signal::CONT);
    let follows = async {
        while cluster.members[leader].status().await.is_none_or(|status| status.leader == 0) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(LONG, follows).await.expect("the member follows");
    assert_eq!(add_one(&registry, "data").await, 0);
    let by_the_late_one = self::registry(vec![cluster.members[leader].endpoint()]);
    assert_eq!(capacity(&by_the_late_one, "data").await, Some(4));
}

/// A member that takes connections and answers nothing costs one wait. All requests then leave it.
#[tokio::test]
async fn silent_member_is_left() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let refusing = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = |listener: &TcpListener| format!("http://{}", listener.local_addr().unwrap());
    let dead = [endpoint(&silent), endpoint(&refusing)];
    drop(refusing);
    let cluster = Cluster::start(1, &[]).await;
    let registry = registry([&dead[..], &cluster.endpoints()].concat());
    let begun = Instant::now();
    swap_in(&registry, new(record("data", &[]))).await.unwrap();
    assert!(begun.elapsed() >= TIMING.first_answer, "the silent member was asked");
    assert_eq!(names(&registry).await, ["data"]);
    let begun = Instant::now();
    for _ in 0..16 {
        add_one(&registry, "data").await;
    }
    assert!(begun.elapsed() < TIMING.first_answer * 16, "each request asked the silent member");
}

#[tokio::test]
async fn etcd_that_is_not_there_is_unreachable() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let timing = Timing {
        first_answer: Duration::from_millis(100),
        answer: Duration::from_millis(100),
        request: Duration::from_millis(500),
    };
    let config =
        csid_etcd::EtcdConfig { timing, ..config(vec![format!("http://{}", silent.local_addr().unwrap())]) };
    let registry = EtcdRegistry::start(&config, no_events()).unwrap();
    let all = RecordFilter::default();
    for error in [
        registry.record(name("data")).await.err(),
        swap_in(&registry, new(record("data", &[]))).await.err(),
        registry.records(all).await.err(),
        registry.held("local", "n1", 1).await.err(),
    ] {
        let error = error.expect("an error");
        assert!(matches!(error, RegistryError::Unreachable(_)), "{error:?}");
        assert!(csid::Error::from(error).details.retryable);
    }
}

/// The history that a broken watch needs is compacted when it comes back: all volumes are listed again.
#[tokio::test]
async fn compacted_watch_is_listed_again() {
    let cluster = Cluster::start(1, &[]).await;
    let proxy = Proxy::start(cluster.members[0].client).await;
    let (followed, writer) = (registry(vec![proxy.endpoint()]), registry(cluster.endpoints()));
    for volume in ["changed", "gone"] {
        swap_in(&writer, new(record(volume, &["job"]))).await.unwrap();
    }
    let newest = writer.record(name("gone")).await.unwrap();
    let sees = async |revision: u64| {
        let mut index = 0;
        while index < revision {
            index = timeout(LONG, followed.changed(index)).await.expect("a change").unwrap();
        }
        index
    };
    assert_eq!(sees(newest.revision).await, newest.revision);

    proxy.lose(Losses { connections: true, ..Losses::default() });
    proxy.cut();
    let last = change(&writer, "changed", |record| record.claims.remove("job")).await.unwrap();
    swap_in(&writer, swap(&newest, Record::none(name("gone")))).await.unwrap();
    let due = swap_in(&writer, new(record("new", &["job"]))).await.unwrap();
    Raw::connect(cluster.members[0].endpoint()).await.compact().await;
    proxy.lose(Losses::default());

    assert!(sees(due).await >= due);
    assert_eq!(names(&followed).await, ["changed", "new"]);
    let (found, _) = followed
        .records(RecordFilter { volume: Some("changed".into()), ..Default::default() })
        .await
        .unwrap();
    assert_eq!((found[0].claims.len(), found[0].revision), (0, last));
    assert_eq!(followed.held("local", "n1", 9).await.unwrap().names, [name("changed"), name("new")]);
    // The watch goes on from there.
    let later = change(&writer, "new", |record| record.claims.insert(claim("later", "n1"))).await.unwrap();
    assert_eq!(sees(later).await, later);
}

/// etcd has no deletions of the compacted revision any more, and refuses no watch that begins there.
#[tokio::test]
async fn deletion_at_the_compaction_is_seen() {
    let cluster = Cluster::start(1, &[]).await;
    let proxy = Proxy::start(cluster.members[0].client).await;
    let (followed, writer) = (registry(vec![proxy.endpoint()]), registry(cluster.endpoints()));
    let mut index = swap_in(&writer, new(record("data", &["job"]))).await.unwrap();
    assert_eq!(timeout(LONG, followed.changed(index - 1)).await.expect("a change").unwrap(), index);

    proxy.lose(Losses { connections: true, ..Losses::default() });
    proxy.cut();
    let due = change(&writer, "data", |record| record.claims.remove("job")).await.unwrap();
    Raw::connect(cluster.members[0].endpoint()).await.compact().await;
    proxy.lose(Losses::default());

    while index < due {
        index = timeout(LONG, followed.changed(index)).await.expect("a change").unwrap();
    }
    let (found, _) = followed.records(RecordFilter::default()).await.unwrap();
    assert_eq!((found[0].claims.len(), found[0].revision), (0, due));
}

/// A watch that goes on after its last event misses nothing that came meanwhile.
#[tokio::test]
async fn broken_watch_goes_on_where_it_was() {
    let cluster = Cluster::start(1, &[]).await;
    let proxy = Proxy::start(cluster.members[0].client).await;
    let (followed, writer) = (registry(vec![proxy.endpoint()]), registry(cluster.endpoints()));
    let mut index = 0;
    for n in 0..10 {
        let revision = swap_in(&writer, new(record(&format!("data {n}"), &["job"]))).await.unwrap();
        if n % 2 == 0 {
            proxy.cut();
        }
        while index < revision {
            index = timeout(LONG, followed.changed(index)).await.expect("a change").unwrap();
        }
        assert_eq!(names(&followed).await.len(), n + 1);
    }
}

/// The watch's member answers nothing any more. A list that waits for a change of its own registry finds another member before
/// the connection's pings do.
#[tokio::test]
async fn silent_watch_is_noticed_by_a_change() {
    let cluster = Cluster::start(1, &[]).await;
    let proxy = Proxy::start(cluster.members[0].client).await;
    let registry = registry(vec![proxy.endpoint(), cluster.members[0].endpoint()]);
    swap_in(&registry, new(record("data", &[]))).await.unwrap();
    assert_eq!(names(&registry).await, ["data"]);
    let pings = Instant::now();
    proxy.lose(Losses { answers: true, ..Losses::default() });
    swap_in(&registry, new(record("later", &[]))).await.unwrap();
    assert_eq!(names(&registry).await, ["data", "later"]);
    // They take 15 s.
    assert!(pings.elapsed() < Duration::from_secs(14), "the pings found it");
}

/// The watch loses one event, and goes on. A change of that record finds it.
#[tokio::test]
async fn lost_event_is_noticed_by_a_change() {
    let cluster = Cluster::start(1, &[]).await;
    let proxy = Proxy::start(cluster.members[0].client).await;
    let (followed, writer) = (registry(vec![proxy.endpoint()]), registry(cluster.endpoints()));
    let mut index = 0;
    let first = swap_in(&writer, new(record("data", &[]))).await.unwrap();
    while index < first {
        index = timeout(LONG, followed.changed(index)).await.expect("a change").unwrap();
    }
    assert_eq!(names(&followed).await, ["data"]);
    proxy.lose(Losses { with: Some("default/lost/head"), ..Losses::default() });
    swap_in(&writer, new(record("lost", &["job"]))).await.unwrap();
    let later = swap_in(&writer, new(record("later", &[]))).await.unwrap();
    while index < later {
        index = timeout(LONG, followed.changed(index)).await.expect("a change").unwrap();
    }
    assert_eq!(names(&followed).await, ["data", "later"], "the event was not lost");
    proxy.lose(Losses::default());
    change(&followed, "lost", |record| record.claims.insert(claim("more", "n1"))).await.unwrap();
    let is_whole = async {
        let due = writer.record(name("lost")).await.unwrap();
        let lost = RecordFilter { volume: Some("lost".into()), ..RecordFilter::default() };
        loop {
            // It has keys without the others until all is listed again.
            if followed.records(lost.clone()).await.is_ok_and(|(found, _)| found == [due.clone()]) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LONG, is_whole).await.expect("the whole record");
    assert_eq!(names(&followed).await, ["data", "later", "lost"]);
}

/// etcd cannot be watched any more, and others change the volumes. A list is not given for one of now.
#[tokio::test]
async fn list_without_a_watch_is_unreachable() {
    let cluster = Cluster::start(1, &[]).await;
    let proxy = Proxy::start(cluster.members[0].client).await;
    let timing = Timing {
        first_answer: Duration::from_millis(500),
        answer: Duration::from_millis(500),
        request: Duration::from_secs(2),
    };
    let config = csid_etcd::EtcdConfig { timing, ..config(vec![proxy.endpoint()]) };
    let (followed, writer) =
        (EtcdRegistry::start(&config, no_events()).unwrap(), registry(cluster.endpoints()));
    assert!(names(&followed).await.is_empty());
    proxy.lose(Losses { connections: true, ..Losses::default() });
    proxy.cut();
    swap_in(&writer, new(record("data", &[]))).await.unwrap();
    let is_refused = async {
        loop {
            match followed.records(RecordFilter::default()).await {
                Ok((found, _)) => assert!(found.is_empty()),
                Err(error) => return error,
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let error = timeout(LONG, is_refused).await.expect("an error");
    assert!(matches!(error, RegistryError::Unreachable(_)), "{error:?}");
    proxy.lose(Losses::default());
    let is_listed = async {
        loop {
            match followed.records(RecordFilter::default()).await {
                Ok((found, _)) => return found,
                Err(error) => assert!(matches!(error, RegistryError::Unreachable(_)), "{error:?}"),
            }
        }
    };
    let found = timeout(LONG, is_listed).await.expect("a list");
    assert_eq!(found[0].name, name("data"));
}

/// A backup that is restored has lower revisions than the cache.
#[tokio::test]
async fn restored_backup_is_changed_by_a_new_registry() {
    let (mut lost, restored) = (Cluster::start(1, &[]).await, Cluster::start(1, &[]).await);
    let writer = registry(lost.endpoints());
    swap_in(&registry(restored.endpoints()), new(record("data", &[]))).await.unwrap();
    swap_in(&writer, new(record("data", &[]))).await.unwrap();
    for _ in 0..4 {
        add_one(&writer, "data").await;
    }
    let registry = registry([lost.endpoints(), restored.endpoints()].concat());
    assert_eq!(names(&registry).await, ["data"]);
    lost.members[0].kill();
    // What this one remembers is of another history. Its program ends, and starts again.
    let refused =
        timeout(LONG, change(&registry, "data", |record| record.registration = None)).await.expect("an end");
    assert!(matches!(refused.map(drop), Err(RegistryError::Unreachable(_))));
    let again = crate::support::registry(restored.endpoints());
    timeout(LONG, add_one(&again, "data")).await.expect("a change");
    assert_eq!(capacity(&again, "data").await, Some(1));
}
