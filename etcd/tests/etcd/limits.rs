//! What is too large for a change, a volume with many claims, and a full database.

use csid::store::registry::{
    Attachment, Blocked, ClaimFilter, Record, RecordFilter, Registry, RegistryError, Swap, VolumeName,
};
use csid::store::rows::Leg;
use csid::store::testing::samples::{claim, name, new, record, swap, swap_in};
use futures_util::future::join_all;

use crate::cluster::Cluster;
use crate::support::{Raw, change, registry};

fn padded(length: usize) -> String {
    "x".repeat(length)
}

fn too_large(change: impl FnOnce(&mut Swap)) -> Swap {
    let mut swap = new(record("data", &[]));
    change(&mut swap);
    swap
}

/// The largest value is taken, and one byte more is refused.
#[tokio::test]
async fn value_over_a_limit_is_refused() {
    let cluster = Cluster::start(1, &[]).await;
    let (registry, mut raw) =
        (registry(cluster.endpoints()), Raw::connect(cluster.members[0].endpoint()).await);
    swap_in(&registry, new(record("data", &["job"]))).await.unwrap();
    type Pad = fn(&mut Record, usize);
    let pads: [(Pad, &str, usize); 3] = [
        (
            |record, length| record.registration.as_mut().unwrap().error = Some(padded(length)),
            "reg",
            64 * 1024,
        ),
        (
            |record, length| drop(record.attachments[0].publish_context.insert("p".into(), padded(length))),
            "at/n1",
            32 * 1024,
        ),
        (|record, length| record.claims[0].error = Some(padded(length)), "claim/n1/job", 16 * 1024),
    ];
    for (pad, key, limit) in pads {
        let key = format!("/csid/v1/vol/default/data/{key}");
        change(&registry, "data", |record| pad(record, 100)).await.unwrap();
        let most = limit - raw.below(&key).await[0].value.len() + 100;
        change(&registry, "data", |record| pad(record, most)).await.unwrap();
        assert_eq!(raw.below(&key).await[0].value.len(), limit);
        match change(&registry, "data", |record| pad(record, most + 1)).await {
            Err(RegistryError::Failed(error)) => {
                assert!(error.to_string().ends_with(&format!("the limit is {limit}")), "{error}");
            }
            outcome => panic!("{key}: {outcome:?}"),
        }
    }
}

/// csid keeps 2,048 bytes of a plugin's message, and JSON doubles quotes.
#[tokio::test]
async fn claim_with_a_message_twice_is_taken() {
    let cluster = Cluster::start(1, &[]).await;
    let registry = registry(cluster.endpoints());
    let message = "\"".repeat(2_048);
    let mut after = record("data", &["job"]);
    after.claims[0].error = Some(message.clone());
    after.claims[0].blocked = Some(Blocked { reason: message });
    swap_in(&registry, new(after.clone())).await.unwrap();
    assert_eq!(registry.record(name("data")).await.unwrap().claims[0].error, after.claims[0].error);
}

#[tokio::test]
async fn limits_are_those_of_etcd() {
    let cluster = Cluster::start(1, &[]).await;
    let registry = registry(cluster.endpoints());
    let claims = |count: usize| (0..count).map(|n| claim(&format!("{n:04}"), "n1")).collect();
    let attachments = |count: usize| -> Vec<Attachment> {
        let mut at = Attachment::new("", Leg::Present);
        at.publish_context.insert("p".into(), padded(30 * 1024));
        (0..count).map(|n| Attachment { node: format!("n{n}"), ..at.clone() }).collect()
    };
    for (swap, why) in [
        (too_large(|swap| swap.after.claims = claims(100)), "operations, and the limit is 100"),
        (too_large(|swap| swap.after.attachments = attachments(18)), "bytes, and the limit is 524288"),
        (
            too_large(|swap| swap.after.attachments = vec![Attachment::new("n1", Leg::Making); 2]),
            "has two attachments with the key at/n1",
        ),
    ] {
        let error = swap_in(&registry, swap).await.unwrap_err();
        assert!(error.to_string().ends_with(why), "{error}");
    }
    assert!(registry.records(RecordFilter::default()).await.unwrap().0.is_empty());
    // Just below.
    for swap in [
        too_large(|swap| swap.after.claims = claims(96)),
        Swap {
            after: Record { attachments: attachments(16), ..record("other", &[]) },
            ..new(record("other", &[]))
        },
    ] {
        swap_in(&registry, swap).await.unwrap();
    }
}

#[tokio::test]
async fn volume_has_a_thousand_claims() {
    let cluster = Cluster::start(1, &[]).await;
    let (registry, mut raw) =
        (registry(cluster.endpoints()), Raw::connect(cluster.members[0].endpoint()).await);
    swap_in(&registry, new(record("data", &[]))).await.unwrap();
    for part in 0..20 {
        change(&registry, "data", |record| {
            for n in part * 50..(part + 1) * 50 {
                record.claims.insert(claim(&format!("job {n:04}"), &format!("n{}", n % 100)));
            }
        })
        .await
        .unwrap();
    }
    let found = registry.record(name("data")).await.unwrap();
    assert_eq!(found.claims.len(), 1_000);
    let of_node = ClaimFilter { node: Some("n7".into()), ..ClaimFilter::default() };
    assert_eq!(registry.claims(of_node).await.unwrap().0.len(), 10);
    assert!(registry.records(RecordFilter::default()).await.unwrap().0 == [found.clone()]);
    assert_eq!(registry.held("local", "n99", 1).await.unwrap().count, 1);

    // One more claim is one more key, and all go at once.
    let revision =
        change(&registry, "data", |record| record.claims.insert(claim("more", "n0"))).await.unwrap();
    let written = raw.below("/csid/v1/vol/").await;
    let written = written.iter().filter(|kv| kv.mod_revision == i64::try_from(revision).unwrap());
    assert_eq!(written.count(), 2);
    let before = registry.record(name("data")).await.unwrap();
    swap_in(&registry, swap(&before, Record::none(name("data")))).await.unwrap();
    assert!(raw.below("/csid/v1/vol/").await.is_empty());
    assert_eq!(registry.held("local", "n99", 1).await.unwrap().count, 0);
}

/// A list is read in pages of 10,000 keys.
#[tokio::test]
async fn more_keys_than_a_page_has_are_listed() {
    let cluster = Cluster::start(1, &[]).await;
    let writer = registry(cluster.endpoints());
    const VOLUMES: usize = 106;
    const CLAIMS: usize = 96;
    let written = join_all((0..VOLUMES).map(|volume| {
        let mut after = record(&format!("data {volume:03}"), &[]);
        after.claims = (0..CLAIMS).map(|n| claim(&format!("job {n:02}"), "n1")).collect();
        swap_in(&writer, new(after))
    }));
    let newest = written.await.into_iter().map(Result::unwrap).max().unwrap();
    let mut raw = Raw::connect(cluster.members[0].endpoint()).await;
    assert!(raw.below("/csid/v1/vol/").await.len() > 10_000);
    let fresh = registry(cluster.endpoints());
    let (found, index) = fresh.records(RecordFilter::default()).await.unwrap();
    assert_eq!((found.len(), index), (VOLUMES, newest));
    assert!(found.iter().all(|record| record.claims.len() == CLAIMS && record.registration.is_some()));
}

/// etcd checks the quota before a proposal by the size of its last commit to the disk. Many large changes at once pass that check.
/// etcd then commits those that cross the quota, and answers that the database is full. Each change is there if and only if it was
/// answered as done.
#[tokio::test]
async fn full_database_is_full() {
    let cluster = Cluster::start(1, &["--quota-backend-bytes", "4000000"]).await;
    let registry = registry(cluster.endpoints());
    let changes = |round: usize| {
        let registry = &registry;
        let changes = (0..100).map(move |n| async move {
            let mut after = record(&format!("data {round} {n}"), &["job"]);
            after.registration.as_mut().unwrap().error = Some(padded(60_000));
            let name = after.name.clone();
            (name, swap_in(registry, new(after)).await)
        });
        join_all(changes)
    };
    let (mut done, mut full, mut open) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..3 {
        for (name, outcome) in changes(round).await {
            match outcome {
                Ok(_) => done.push(name),
                Err(RegistryError::Full(_)) => full.push(name),
                // The member did not answer in time before.
                Err(RegistryError::Unreachable(_)) => open.push(name),
                Err(error) => panic!("{error:?}"),
            }
        }
    }
    assert!(!done.is_empty() && !full.is_empty(), "{} {}", done.len(), full.len());
    let (found, _) = registry.records(RecordFilter::default()).await.unwrap();
    let found: Vec<VolumeName> =
        found.into_iter().map(|record| record.name).filter(|name| !open.contains(name)).collect();
    done.sort();
    assert_eq!(found, done);
    for name in full {
        assert_eq!(registry.record(name).await.unwrap().revision, 0);
    }
}
