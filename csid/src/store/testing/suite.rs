//! The tests of the trait [`Registry`]. They use nothing else of a registry, so that each implementation runs them all.

use std::time::Duration;

use futures_util::poll;
use tokio::time::timeout;

use crate::store::registry::*;
use crate::store::rows::{Leg, VolumeKey};
use crate::store::testing::samples::*;

/// Runs all tests, each with an empty registry of the constructor. The constructor also returns what the registry needs to
/// stay, as its directory.
#[macro_export]
macro_rules! test_registry {
    ($name:ident, $constructor:expr) => {
        $crate::test_registry!($name, $constructor;
            swapped_record_is_read
            conflicting_swap_changes_nothing
            racing_writers_lose_nothing
            lists_are_filtered
            past_claims_are_few_and_go_with_the_record
            change_is_waited_for
            held_volumes_are_counted
        );
    };
    ($name:ident, $constructor:expr; $($test:ident)*) => {
        mod $name {
            $(
                #[tokio::test]
                async fn $test() {
                    let (_kept, registry) = $constructor;
                    $crate::store::testing::suite::$test(registry).await;
                }
            )*
        }
    };
}

pub async fn swapped_record_is_read<R: Registry>(registry: R) {
    assert!(registry.record(name("data")).await.unwrap() == Record::none(name("data")));
    for swap in representative_swaps() {
        let (due, revision) = (swap.after.clone(), swap_in(&registry, swap).await.unwrap());
        let found = registry.record(due.name.clone()).await.unwrap();
        assert_eq!(found.revision, revision);
        assert!(found.claims.iter().all(|claim| claim.modify_index == revision));
        assert!(bare(found) == due);
    }

    // Only the claim that changed gets the new index.
    let before = registry.record(name("data")).await.unwrap();
    let mut after = before.clone();
    after.claims[1].releasing = true;
    let revision = swap_in(&registry, swap(&before, after.clone())).await.unwrap();
    let found = registry.record(name("data")).await.unwrap();
    assert_eq!(
        found.claims.iter().map(|claim| claim.modify_index).collect::<Vec<_>>(),
        [before.revision, revision]
    );
    assert!(bare(found.clone()) == bare(after));
    swap_in(&registry, swap(&found, before)).await.unwrap();
}

pub async fn conflicting_swap_changes_nothing<R: Registry>(registry: R) {
    swap_in(&registry, new(record("data", &["job"]))).await.unwrap();
    let current = registry.record(name("data")).await.unwrap();
    let older = Record { revision: current.revision - 1, ..current.clone() };
    let claimed = record("data", &["job", "thief"]);
    let past = |swap: Swap| Swap { past: vec![claim("job", "n1")], ..swap };
    let mut second_name = record("other", &["job"]);
    second_name.volume = current.volume.clone();
    let mut renamed = record("data", &[]);
    renamed.volume = VolumeKey::new("local", "ext-neighbour");
    swap_in(&registry, new(record("neighbour", &[]))).await.unwrap();
    let taken_by = |volume| Some(name(volume));
    let refused = [
        (past(swap(&older, claimed.clone())), None),
        (past(new(claimed.clone())), None),
        (swap(&Record { revision: 9, ..Record::none(name("nowhere")) }, record("nowhere", &[])), None),
        (swap(&older, Record::none(name("data"))), None),
        (past(new(second_name)), taken_by("data")),
        (swap(&current, renamed), taken_by("neighbour")),
    ];
    let (_, index) = registry.records(RecordFilter::default()).await.unwrap();
    for (swap, holder) in refused {
        match (swap_in(&registry, swap).await, holder) {
            (Err(RegistryError::Conflict(Conflict::Stale)), None) => {}
            (Err(RegistryError::Conflict(Conflict::Taken(found))), Some(holder)) => assert_eq!(found, holder),
            (other, _) => panic!("{other:?}"),
        }
    }
    assert_eq!(registry.records(RecordFilter::default()).await.unwrap().1, index);
    assert!(registry.record(name("data")).await.unwrap() == current);
    let all_claims = registry.claims(ClaimFilter::default()).await.unwrap().0;
    let past_claims = registry.claims(ClaimFilter { past: true, ..ClaimFilter::default() }).await.unwrap().0;
    assert!(all_claims.len() == 1 && past_claims.is_empty());
}

/// Each writer takes the record as it finds it and adds one. It repeats that after a conflict.
pub async fn racing_writers_lose_nothing<R: Registry>(registry: R) {
    swap_in(&registry, new(record("data", &[]))).await.unwrap();
    let writers = (0..64).map(|writer| {
        let registry = &registry;
        async move {
            let mut stale = 0;
            for n in 0..4 {
                loop {
                    let before = registry.record(name("data")).await.unwrap();
                    let mut after = before.clone();
                    *after.registration.as_mut().unwrap().capacity.get_or_insert(0) += 1;
                    after.claims = vec![claim(&format!("{writer} {n}"), "n1")].into();
                    match swap_in(registry, swap(&before, after)).await {
                        Ok(_) => break,
                        Err(RegistryError::Conflict(Conflict::Stale)) => stale += 1,
                        Err(error) => panic!("{error}"),
                    }
                }
            }
            stale
        }
    });
    let mut stale = 0;
    for writer in futures_util::future::join_all(writers).await {
        stale += writer;
    }
    assert!(stale > 0, "nobody raced");
    let found = registry.record(name("data")).await.unwrap();
    assert_eq!((found.registration.unwrap().capacity, found.claims.len()), (Some(256), 1));
}

pub async fn lists_are_filtered<R: Registry>(registry: R) {
    let mut rows = vec![
        record("a*b", &["job", "other"]),
        record("a*c", &["job"]),
        record("axb", &[]),
        record("b", &[]),
        Record { name: VolumeName { namespace: "prod".into(), ..name("b") }, ..record("c", &["job"]) },
    ];
    rows[1].claims[0].node = "n2".into();
    rows[1].claims[0].releasing = true;
    rows[2].volume.plugin = "nfs".into();
    rows[3].attachments = vec![Attachment::new("n2", Leg::Removing)];
    rows[4].attachments.clear();
    let mut newest = 0;
    for row in rows {
        newest = swap_in(&registry, Swap { past: row.claims.iter().cloned().collect(), ..new(row) })
            .await
            .unwrap();
    }
    let text = |text: &str| Some(text.to_owned());
    type Found<'a> = &'a [&'a str];
    let by = RecordFilter::default;
    let records: [(RecordFilter, Found<'_>); 10] = [
        (by(), &["default/a*b", "default/a*c", "default/axb", "default/b", "prod/b"]),
        (RecordFilter { namespace: text("prod"), ..by() }, &["prod/b"]),
        (RecordFilter { volume: text("b"), ..by() }, &["default/b", "prod/b"]),
        (RecordFilter { plugin: text("nfs"), ..by() }, &["default/axb"]),
        (RecordFilter { plugin: text("local"), external_id: text("ext-c"), ..by() }, &["prod/b"]),
        (RecordFilter { node: text("n2"), ..by() }, &["default/a*c", "default/b"]),
        (RecordFilter { prefix: text("a*"), ..by() }, &["default/a*b", "default/a*c"]),
        (RecordFilter { restless: true, ..by() }, &["default/a*c", "default/b"]),
        (RecordFilter { restless: true, prefix: text("b"), node: text("n2"), ..by() }, &["default/b"]),
        (RecordFilter { namespace: text("' OR 1 --"), ..by() }, &[]),
    ];
    for (filter, due) in records {
        let (found, index) = registry.records(filter.clone()).await.unwrap();
        assert_eq!(index, newest);
        let names: Vec<_> =
            found.iter().map(|row| format!("{}/{}", row.name.namespace, row.name.volume)).collect();
        assert_eq!(names, due, "{filter:?}");
        for row in found {
            assert!(registry.record(row.name.clone()).await.unwrap() == row, "with its claims");
        }
    }
    let by = ClaimFilter::default;
    let claims: [(ClaimFilter, Found<'_>); 5] = [
        (by(), &["default/a*b/job", "default/a*b/other", "default/a*c/job", "prod/b/job"]),
        (ClaimFilter { namespace: text("default"), volume: text("a*c"), ..by() }, &["default/a*c/job"]),
        (ClaimFilter { consumer: text("other"), ..by() }, &["default/a*b/other"]),
        (ClaimFilter { node: text("n2"), ..by() }, &["default/a*c/job"]),
        (ClaimFilter { consumer: text("other"), node: text("n2"), ..by() }, &[]),
    ];
    for (filter, due) in claims {
        for past in [false, true] {
            let (found, index) = registry.claims(ClaimFilter { past, ..filter.clone() }).await.unwrap();
            assert_eq!(index, newest);
            let names = found.iter().map(|ListedClaim { name, claim, .. }| {
                assert!(claim.modify_index > 0);
                format!("{}/{}/{}", name.namespace, name.volume, claim.consumer)
            });
            assert_eq!(names.collect::<Vec<_>>(), due, "{filter:?}, past: {past}");
        }
    }
}

pub async fn past_claims_are_few_and_go_with_the_record<R: Registry>(registry: R) {
    for volume in ["data", "other"] {
        swap_in(&registry, new(record(volume, &[]))).await.unwrap();
        for n in 0..10 {
            let before = registry.record(name(volume)).await.unwrap();
            let past = ["a", "b"].map(|half| claim(&format!("{n}{half}"), "n1")).into();
            swap_in(&registry, Swap { past, ..swap(&before, before.clone()) }).await.unwrap();
        }
    }
    let past = async |volume: &str| {
        let filter = ClaimFilter { volume: Some(volume.into()), past: true, ..ClaimFilter::default() };
        let (found, _) = registry.claims(filter).await.unwrap();
        found.into_iter().map(|found| found.claim.consumer).collect::<Vec<_>>()
    };
    let due: Vec<_> = (2..10).flat_map(|n| ["a", "b"].map(|half| format!("{n}{half}"))).collect();
    assert_eq!(past("data").await, due);
    let before = registry.record(name("data")).await.unwrap();
    let gone = Swap { past: vec![claim("last", "n1")], ..swap(&before, Record::none(name("data"))) };
    swap_in(&registry, gone).await.unwrap();
    assert!(registry.record(name("data")).await.unwrap() == Record::none(name("data")));
    assert!(past("data").await.is_empty());
    assert_eq!(past("other").await, due);
}

pub async fn held_volumes_are_counted<R: Registry>(registry: R) {
    let held = async |node: &str| {
        let held = registry.held("local", node, 1).await.unwrap();
        (held.count, held.names)
    };
    swap_in(&registry, new(record("before", &["job"]))).await.unwrap();
    assert_eq!(held("n1").await, (1, vec![name("before")]), "the first read");
    swap_in(&registry, new(record("a", &["job/1", "job/2"]))).await.unwrap();
    assert_eq!(held("n1").await, (2, vec![name("a")]), "no more names than requested");
    assert_eq!(held("n2").await, (0, Vec::new()));
    assert_eq!(registry.held("other", "n1", 9).await.unwrap(), HeldVolumes::default());

    // A claim of another node, then without the attachment, which keeps it for the first.
    let before = registry.record(name("a")).await.unwrap();
    let mut after = before.clone();
    after.claims[0].node = "n2".into();
    after.claims.remove("job/2");
    swap_in(&registry, swap(&before, after)).await.unwrap();
    assert_eq!((held("n1").await.0, held("n2").await.0), (2, 1));
    let before = registry.record(name("a")).await.unwrap();
    let after = Record { attachments: Vec::new(), ..before.clone() };
    swap_in(&registry, swap(&before, after)).await.unwrap();
    assert_eq!((held("n1").await.0, held("n2").await.0), (1, 1));

    // One that is refused changes nothing.
    assert!(swap_in(&registry, swap(&before, record("a", &["job/9"]))).await.is_err());
    assert_eq!((held("n1").await.0, held("n2").await.0), (1, 1));
    let before = registry.record(name("before")).await.unwrap();
    swap_in(&registry, swap(&before, Record::none(name("before")))).await.unwrap();
    assert_eq!((held("n1").await.0, held("n2").await.0), (0, 1));
    assert_eq!(held("n2").await, (1, vec![name("a")]));
}

pub async fn change_is_waited_for<R: Registry>(registry: R) {
    let long = Duration::from_secs(20);
    let newest = async || registry.records(RecordFilter::default()).await.unwrap().1;
    let (_, index) = registry.records(RecordFilter::default()).await.unwrap();
    let stale = Record { revision: 1, ..record("data", &[]) };
    let mut waiting = registry.changed(index);
    assert!(swap_in(&registry, swap(&stale, stale.clone())).await.is_err());
    // The registry answers a later call, and has not changed.
    assert_eq!(newest().await, index);
    assert!(poll!(&mut waiting).is_pending());
    let revision = swap_in(&registry, new(record("data", &[]))).await.unwrap();
    assert_eq!(timeout(long, waiting).await.expect("a change").unwrap(), revision);
    let before = timeout(long, registry.changed(index)).await.expect("an earlier change");
    assert_eq!(before.unwrap(), revision);
    let mut later = registry.changed(revision);
    assert!(poll!(&mut later).is_pending());
    assert_eq!(newest().await, revision);
    assert!(poll!(&mut later).is_pending());
}
