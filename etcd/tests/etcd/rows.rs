//! Rows, leases, and changes that rows guard.

use std::time::{Duration, Instant};

use csid::store::registry::{Conflict, Registry, RegistryError};
use csid::store::testing::samples::{claim, name, new, record, swap, swap_in};
use csid_etcd::{Expected, Guard, RowKey, Rows, Swapped, Write, Written};

use crate::cluster::Cluster;
use crate::proxy::{Losses, Proxy};
use crate::support::{Raw, registry};

fn node() -> RowKey {
    RowKey::Node("n1".into())
}

fn put(key: RowKey, value: &str, lease: i64) -> Write {
    Write { key, value: Some(value.into()), lease }
}

#[tokio::test]
async fn change_is_refused_when_a_guarded_row_has_changed() {
    let cluster = Cluster::start(1, &[]).await;
    let registry = registry(cluster.endpoints());
    let rows = registry.rows();
    swap_in(&registry, new(record("data", &[]))).await.unwrap();
    let Written::Done { revision } = rows.write(&[], vec![put(node(), "ready", 0)]).await.unwrap() else {
        panic!("a write without a guard was refused")
    };
    let change = async |is: Expected| {
        let before = registry.record(name("data")).await.unwrap();
        let mut after = before.clone();
        after.claims.insert(claim(&format!("job {is:?}"), "n1"));
        registry.swap_guarded(swap(&before, after), vec![Guard { key: node(), is }]).await
    };
    for holds in [Expected::Revision(revision), Expected::Created(revision)] {
        assert!(matches!(change(holds).await, Ok(Swapped::Done(_))), "{holds:?}");
    }
    assert_eq!(change(Expected::Absent).await.unwrap(), Swapped::Refused(vec![node()]));
    rows.write(&[], vec![put(node(), "fenced", 0)]).await.unwrap();
    assert_eq!(change(Expected::Revision(revision)).await.unwrap(), Swapped::Refused(vec![node()]));
    assert!(
        matches!(change(Expected::Created(revision)).await, Ok(Swapped::Done(_))),
        "it was not made again"
    );
    rows.write(&[], vec![Write { key: node(), value: None, lease: 0 }]).await.unwrap();
    rows.write(&[], vec![put(node(), "ready", 0)]).await.unwrap();
    assert_eq!(change(Expected::Created(revision)).await.unwrap(), Swapped::Refused(vec![node()]));
    let claims = registry.record(name("data")).await.unwrap().claims.len();
    assert_eq!((claims, registry.claims_of("n1").await.unwrap()), (2, 2), "a refused change was made");

    // A record that has changed is stale, whatever the guards are.
    let stale = record("data", &[]);
    let guard = Guard { key: node(), is: Expected::Revision(1) };
    let mut after = stale.clone();
    after.revision = 0;
    let before = csid::store::registry::Record { revision: 1, ..stale };
    let refused = registry.swap_guarded(swap(&before, after), vec![guard]).await;
    assert!(matches!(refused, Err(RegistryError::Conflict(Conflict::Stale))));
}

/// The caller reads all of them again, and not one after the other.
#[tokio::test]
async fn refused_change_has_all_rows_that_have_changed() {
    let cluster = Cluster::start(1, &[]).await;
    let registry = registry(cluster.endpoints());
    swap_in(&registry, new(record("data", &[]))).await.unwrap();
    let before = registry.record(name("data")).await.unwrap();
    let key = |n: usize| RowKey::Node(format!("n{n}"));
    registry.rows().write(&[], vec![put(key(2), "ready", 0), put(key(4), "ready", 0)]).await.unwrap();
    let absent = |count: usize| (0..count).map(|n| Guard { key: key(n), is: Expected::Absent }).collect();
    let change = || {
        let mut after = before.clone();
        after.claims.insert(claim("job", "n1"));
        swap(&before, after)
    };
    let refused = registry.swap_guarded(change(), absent(6)).await.unwrap();
    assert_eq!(refused, Swapped::Refused(vec![key(2), key(4)]));
    // etcd takes 128 comparisons. The record's own is one of them.
    let refused = registry.swap_guarded(change(), absent(99)).await.unwrap();
    assert_eq!(refused, Swapped::Refused(vec![key(2), key(4)]));
    match registry.swap_guarded(change(), absent(100)).await {
        Err(RegistryError::Failed(error)) => {
            assert!(error.to_string().ends_with("has 101 comparisons, and the limit is 100"), "{error}");
        }
        outcome => panic!("{outcome:?}"),
    }
}

#[tokio::test]
async fn rows_of_many_pages_are_all_read() {
    let cluster = Cluster::start(1, &[]).await;
    let registry = registry(cluster.endpoints());
    let (rows, mut raw) = (registry.rows(), Raw::connect(cluster.members[0].endpoint()).await);
    let keys: Vec<_> = (0..205).map(|n| RowKey::Node(format!("n{n:03}"))).collect();
    for part in keys.chunks(50) {
        rows.write(&[], part.iter().map(|key| put(key.clone(), "{}", 0)).collect()).await.unwrap();
    }
    // More keys than a page has are no rows, between two that are.
    for n in 0..150 {
        raw.put(&format!("/csid/v1/node/n100/{n}"), "of another program").await;
    }
    let of = |after: &str| Rows::Nodes { after: after.into() };
    for (of, due) in [(of(""), &keys[..]), (of("n099"), &keys[100..]), (of("n204"), &[]), (Rows::Heard, &[])]
    {
        let found: Vec<_> = rows.all(&of).await.unwrap().into_iter().map(|(key, _)| key).collect();
        assert_eq!(found, due, "{of:?}");
        assert_eq!(rows.has_any(&of).await.unwrap(), !due.is_empty());
    }
}

#[tokio::test]
async fn listed_record_has_own_changes() {
    let cluster = Cluster::start(1, &[]).await;
    let (one, other) = (registry(cluster.endpoints()), registry(cluster.endpoints()));
    assert!(one.listed(&name("data")).await.unwrap().0.is_none());
    swap_in(&one, new(record("data", &[]))).await.unwrap();
    for n in 0..20 {
        let (before, _) = one.listed(&name("data")).await.unwrap();
        let before = before.unwrap();
        assert_eq!(before.claims.len(), n, "a change of this registry is missing");
        let mut after = before.clone();
        after.claims.insert(claim(&format!("job {n}"), "n1"));
        swap_in(&one, swap(&before, after)).await.unwrap();
    }
    // The other one has a later record in its lists than the one that it changes.
    let old = other.record(name("data")).await.unwrap();
    let mut after = old.clone();
    after.claims.insert(claim("job", "n2"));
    let revision = swap_in(&one, swap(&old, after.clone())).await.unwrap();
    other.reached(revision).await.unwrap();
    let refused = swap_in(&other, swap(&old, after)).await;
    assert!(matches!(refused, Err(RegistryError::Conflict(Conflict::Stale))), "{refused:?}");
}

/// etcd commits the change, and its answer is lost. The row changes before the next try.
#[tokio::test]
async fn committed_change_with_a_lost_answer_is_no_refusal() {
    let cluster = Cluster::start(1, &[]).await;
    let proxy = Proxy::start(cluster.members[0].client).await;
    let by_proxy = registry(vec![proxy.endpoint()]);
    let direct = registry(cluster.endpoints());
    swap_in(&direct, new(record("data", &[]))).await.unwrap();
    let rows = direct.rows();
    let Written::Done { revision } = rows.write(&[], vec![put(node(), "ready", 0)]).await.unwrap() else {
        panic!("a write without a guard was refused")
    };
    let before = by_proxy.record(name("data")).await.unwrap();
    by_proxy.reached(before.revision).await.unwrap();
    let mut after = before.clone();
    after.claims.insert(claim("job", "n1"));
    let guard = Guard { key: node(), is: Expected::Revision(revision) };
    proxy.lose(Losses {
        requests: false,
        answers: true,
        full: false,
        from: 600,
        with: None,
        connections: false,
    });
    let changing =
        tokio::spawn(async move { by_proxy.swap_guarded(swap(&before, after), vec![guard]).await });
    while direct.record(name("data")).await.unwrap().claim("job").is_none() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    rows.write(&[], vec![put(node(), "fenced", 0)]).await.unwrap();
    proxy.lose(Losses {
        requests: false,
        answers: false,
        full: false,
        from: 600,
        with: None,
        connections: false,
    });
    proxy.cut();
    let changed = tokio::time::timeout(Duration::from_secs(15), changing).await.unwrap().unwrap().unwrap();
    let due = direct.record(name("data")).await.unwrap().revision;
    assert_eq!(changed, Swapped::Done(due), "a change that was made was taken for refused");
}

#[tokio::test]
async fn row_ends_with_its_lease() {
    let cluster = Cluster::start(3, &[]).await;
    let registry = registry(cluster.endpoints());
    let rows = registry.rows();
    let lease = rows.grant_lease(60).await.unwrap();
    let key = RowKey::Server("a".into());
    let absent = Guard { key: key.clone(), is: Expected::Absent };
    let write = || vec![put(RowKey::Server("a".into()), "beat", lease)];
    let Written::Done { revision } = rows.write(std::slice::from_ref(&absent), write()).await.unwrap() else {
        panic!("the first write was refused")
    };
    // The cache follows the rows of servers.
    registry.reached(revision).await.unwrap();
    assert_eq!(rows.write(&[absent], write()).await.unwrap(), Written::Refused(key.clone()));
    assert!(rows.keep_lease(lease).await.unwrap());
    let found = rows.all(&Rows::Servers).await.unwrap();
    assert_eq!((found.len(), &found[0].0, &found[0].1.value), (1, &key, &b"beat".to_vec()));
    rows.revoke_lease(lease).await.unwrap();
    assert_eq!(rows.read(&key).await.unwrap(), None);
    assert!(!rows.keep_lease(lease).await.unwrap(), "a lease that has ended was renewed");
    rows.revoke_lease(lease).await.expect("a lease that has ended is no error");
}

#[tokio::test]
async fn lease_that_nothing_renews_ends() {
    let cluster = Cluster::start(1, &[]).await;
    let registry = registry(cluster.endpoints());
    let rows = registry.rows();
    let lease = rows.grant_lease(1).await.unwrap();
    let key = RowKey::Session { node: "n1".into(), server: "a".into() };
    rows.write(&[], vec![put(key.clone(), "{}", lease)]).await.unwrap();
    let begun = Instant::now();
    while rows.read(&key).await.unwrap().is_some() {
        assert!(begun.elapsed() < Duration::from_secs(20), "the row is still there");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(!rows.keep_lease(lease).await.unwrap());
}

/// The change of another record writes a record's head again. So a change that was read before is not made, and the record is the same.
#[tokio::test]
async fn touched_record_refuses_an_earlier_change() {
    let cluster = Cluster::start(1, &[]).await;
    let registry = registry(cluster.endpoints());
    swap_in(&registry, new(record("data", &[]))).await.unwrap();
    let read = registry.record(name("data")).await.unwrap();
    let key = RowKey::Volume(name("data"));
    let guard = |revision: u64| vec![Guard { key: key.clone(), is: Expected::Touched(revision) }];
    let made = registry.swap_guarded(new(record("copy", &[])), guard(read.revision)).await.unwrap();
    let touched = registry.record(name("data")).await.unwrap();
    assert_eq!(made, Swapped::Done(touched.revision));
    assert!(touched.revision > read.revision);
    assert!(registry.listed(&name("data")).await.unwrap().0 == Some(touched.clone()));
    assert!(csid::store::registry::Record { revision: read.revision, ..touched.clone() } == read);
    let mut after = read.clone();
    after.claims.insert(claim("job", "n1"));
    let stale = registry.swap_guarded(swap(&read, after), Vec::new()).await;
    assert!(matches!(stale, Err(RegistryError::Conflict(Conflict::Stale))), "{stale:?}");
    let refused = registry.swap_guarded(new(record("other", &[])), guard(read.revision)).await.unwrap();
    assert_eq!(refused, Swapped::Refused(vec![key.clone()]));
    let none = csid::store::registry::Record::none(name("data"));
    swap_in(&registry, swap(&touched, none)).await.unwrap();
    let refused = registry.swap_guarded(new(record("other", &[])), guard(touched.revision)).await.unwrap();
    assert_eq!(refused, Swapped::Refused(vec![key]));
    assert!(registry.record(name("other")).await.unwrap().is_empty());
}
