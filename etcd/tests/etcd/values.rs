//! The keys and values that are in etcd.

use csid::store::registry::{
    AttachCall, Attachment, Claim, ClaimFilter, DrivenCall, DrivenRpc, Driver, OfVolume, Queued, Record,
    RecordFilter, Registry, RegistryError, Swap,
};
use csid::store::rows::{Leg, VolumeKey};
use csid::store::testing::samples::{claim, name, new, record, representative_swaps, swap, swap_in};
use serde_json::json;

use crate::cluster::Cluster;
use crate::support::{Raw, change, registry};

const DATA: &str = "/csid/v1/vol/default/data";

fn message(error: RegistryError) -> String {
    assert!(matches!(error, RegistryError::Failed(_)), "{error:?}");
    error.to_string()
}

#[tokio::test]
async fn driver_is_in_the_head_until_it_is_cleared() {
    let cluster = Cluster::start(1, &[]).await;
    let (registry, mut raw) =
        (registry(cluster.endpoints()), Raw::connect(cluster.members[0].endpoint()).await);
    swap_in(&registry, swap(&Record::none(name("data")), record("data", &["job/1"]))).await.unwrap();
    let call = DrivenCall {
        id: "c".into(),
        rpc: DrivenRpc::Unpublish,
        node: "n1".into(),
        consumer: "job/1".into(),
        node_id: String::new(),
    };
    let driver = Driver {
        server: "s".into(),
        host: "h".into(),
        call: Some(call),
        unanswered: "b".into(),
        deadline_ms: 7000,
        sent_usec: 9,
    };
    change(&registry, "data", |record| record.driver = Some(driver.clone())).await.unwrap();
    let due = json!({"server": "s", "host": "h",
        "call": {"id": "c", "rpc": "unpublish", "node": "n1", "consumer": "job/1"},
        "unanswered": "b", "deadline-ms": 7000, "sent-usec": 9});
    assert_eq!(raw.json(&format!("{DATA}/head")).await["driver"], due);
    assert_eq!(registry.record(name("data")).await.unwrap().driver, Some(driver));
    let restless = RecordFilter { restless: true, ..RecordFilter::default() };
    assert!(registry.records(restless).await.unwrap().0.iter().any(|record| record.driver.is_some()));
    change(&registry, "data", |record| record.driver = None).await.unwrap();
    assert!(raw.json(&format!("{DATA}/head")).await.get("driver").is_none());
    assert_eq!(registry.record(name("data")).await.unwrap().driver, None);
}

#[tokio::test]
async fn queue_is_kept_in_the_order_of_its_places() {
    let cluster = Cluster::start(3, &[]).await;
    let (registry, mut raw) =
        (registry(cluster.endpoints()), Raw::connect(cluster.members[0].endpoint()).await);
    swap_in(&registry, new(record("data", &["job/1"]))).await.unwrap();
    let entry = |serial: u64, consumer: &str, keeper: &str| {
        let claim = Claim { keeper: keeper.into(), ..claim(consumer, "n1") };
        Queued { serial, claim: claim.into() }
    };
    let due = [entry(9, "b", "s"), entry(10, "a", "s"), entry(300, "c", "s")];
    change(&registry, "data", |record| (record.queue, record.serial) = (due.to_vec(), 300)).await.unwrap();
    assert_eq!(raw.json(&format!("{DATA}/queue/000000000000012c")).await["consumer"], "c");
    assert_eq!(raw.json(&format!("{DATA}/head")).await["serial"], 300);
    assert_eq!(registry.queued_of("n1").await.unwrap(), 3);
    let restless = RecordFilter { restless: true, ..RecordFilter::default() };
    for found in
        [registry.record(name("data")).await.unwrap(), registry.records(restless).await.unwrap().0.remove(0)]
    {
        assert_eq!((found.queue.as_slice(), found.serial), (due.as_slice(), 300));
    }
    // One entry changes and one ends. The third one is not written.
    let before = raw.below(&format!("{DATA}/queue/000000000000012c")).await[0].mod_revision;
    let after = [entry(10, "a", "another"), due[2].clone()];
    change(&registry, "data", |record| record.queue = after.to_vec()).await.unwrap();
    assert_eq!(raw.below(&format!("{DATA}/queue/000000000000012c")).await[0].mod_revision, before);
    assert_eq!(registry.record(name("data")).await.unwrap().queue, after);
    assert_eq!(registry.queued_of("n1").await.unwrap(), 2);
    change(&registry, "data", |record| record.queue.clear()).await.unwrap();
    let found = registry.record(name("data")).await.unwrap();
    assert!(found.queue.is_empty() && found.serial == 300, "a place was given twice");
    assert_eq!(registry.queued_of("n1").await.unwrap(), 0);
}

#[tokio::test]
async fn keys_and_values_are_those_of_the_layout() {
    let cluster = Cluster::start(1, &[]).await;
    let (registry, mut raw) =
        (registry(cluster.endpoints()), Raw::connect(cluster.members[0].endpoint()).await);
    for swap in representative_swaps() {
        swap_in(&registry, swap).await.unwrap();
    }
    let capability = claim("a", "n1").usage.capability;
    let by_call = Some(AttachCall { uid: 0, read_only: true, capability, secrets_given: false });
    let attached = Attachment { node_id: Some("i/1".into()), by_call, ..Attachment::new("", Leg::Making) };
    change(&registry, "attached", |record| record.attachments.push(attached.clone())).await.unwrap();
    let keys: Vec<_> =
        raw.below("/csid/").await.into_iter().map(|kv| String::from_utf8(kv.key).unwrap()).collect();
    let due = [
        "/csid/v1/ext/local/+36e96c62633613d6f8e98943830ed5c5f814c2bb9214d8bba577386096bc926a",
        "/csid/v1/ext/local/612ac538b696e7f78e5cb5f62ca154735cfa71da93d72b9ab32dbda313b35487",
        "/csid/v1/ext/local/795432be5001bb25aca193f09c56e10c4d77887d820a33a4100404f29f9624f1",
        "/csid/v1/vol/default/attached/at/@/i%2F1",
        "/csid/v1/vol/default/attached/at/n1",
        "/csid/v1/vol/default/attached/head",
        "/csid/v1/vol/default/data/at/n1",
        "/csid/v1/vol/default/data/claim/n1/job%2F1",
        "/csid/v1/vol/default/data/claim/n1/job%2F2",
        "/csid/v1/vol/default/data/head",
        "/csid/v1/vol/default/data/past/1",
        "/csid/v1/vol/default/data/reg",
        "/csid/v1/vol/default/new/at/n1",
        "/csid/v1/vol/default/new/head",
        "/csid/v1/vol/default/new/reg",
    ];
    assert_eq!(keys, due);
    let named = raw.json(&keys[0]).await;
    assert_eq!(named, json!({"namespace": "default", "volume": "new"}));
    let head = raw.json(&format!("{DATA}/head")).await;
    assert_eq!((&head["volume"], &head["past-number"]), (&json!(["local", "ext-data"]), &json!(1)));
    assert_eq!(raw.json("/csid/v1/vol/default/new/head").await["volume"], json!(["local", null]));
    let found: Claim = serde_json::from_value(raw.json(&format!("{DATA}/claim/n1/job%2F1")).await).unwrap();
    assert_eq!(found, claim("job/1", "n1"));

    // What differs is written, and the head.
    let revision = change(&registry, "data", |record| record.claims[1].releasing = true).await.unwrap();
    let written = raw.below(&format!("{DATA}/")).await;
    let written: Vec<_> = written
        .iter()
        .filter(|kv| kv.mod_revision == i64::try_from(revision).unwrap())
        .map(|kv| std::str::from_utf8(&kv.key).unwrap().strip_prefix(DATA).unwrap())
        .collect();
    assert_eq!(written, ["/claim/n1/job%2F2", "/head"]);

    // The deletions leave nothing but their own keys: two each.
    for volume in ["data", "new", "attached"] {
        let before = registry.record(name(volume)).await.unwrap();
        swap_in(&registry, swap(&before, Record::none(name(volume)))).await.unwrap();
    }
    let left = raw.below("/csid/").await;
    assert!(left.len() <= 6 && left.iter().all(|kv| kv.key.starts_with(b"/csid/v1/gone/")));
}

#[tokio::test]
async fn volume_gets_its_id_and_keeps_one_name() {
    let cluster = Cluster::start(1, &[]).await;
    let (registry, mut raw) =
        (registry(cluster.endpoints()), Raw::connect(cluster.members[0].endpoint()).await);
    let creating = representative_swaps().remove(1);
    swap_in(&registry, creating).await.unwrap();
    assert!(registry.record(name("new")).await.unwrap().volume == VolumeKey::creating("local", "a name"));
    change(&registry, "new", |record| record.volume = VolumeKey::new("local", "id")).await.unwrap();
    let keys = raw.below("/csid/v1/ext/").await;
    assert!(keys.len() == 1 && !keys[0].key.contains(&b'+'));
    assert!(registry.record(name("new")).await.unwrap().volume == VolumeKey::new("local", "id"));
}

#[tokio::test]
async fn fields_of_a_later_version_stay() {
    let cluster = Cluster::start(1, &[]).await;
    let (registry, mut raw) =
        (registry(cluster.endpoints()), Raw::connect(cluster.members[0].endpoint()).await);
    swap_in(&registry, new(record("data", &["job", "other"]))).await.unwrap();
    let keys = ["head", "reg", "claim/n1/job", "at/n1"].map(|key| format!("{DATA}/{key}"));
    // A later server writes all values, and a key that this one does not know.
    for key in &keys {
        let mut value = raw.json(key).await;
        value["later"] = json!({"by": [key]});
        if key.ends_with("reg") {
            value["spec"]["later"] = json!(1);
        }
        raw.put(key, value.to_string()).await;
    }
    raw.put(&format!("{DATA}/queue/1"), "later").await;
    let head = raw.json(&keys[0]).await;
    raw.put(&keys[0], head.to_string()).await;
    for round in 0..2 {
        // Once with the cache, once with a registry that has none yet.
        let fresh = self::registry(cluster.endpoints());
        let registry = if round == 0 { &registry } else { &fresh };
        change(registry, "data", |record| {
            record.registration.as_mut().unwrap().capacity = Some(round);
            record.claims.get_mut("job").unwrap().uid = 5;
            record.claims.get_mut("job").unwrap().since_usec = round;
            record.attachments[0].boot = Some(round.to_string());
        })
        .await
        .unwrap();
        for key in &keys {
            assert_eq!(raw.json(key).await["later"], json!({"by": [key]}));
        }
        assert_eq!(raw.json(&keys[1]).await["spec"]["later"], json!(1));
        assert_eq!(raw.json(&keys[1]).await["capacity"], json!(round));
    }
    // They go with the claim into the past.
    let before = registry.record(name("data")).await.unwrap();
    let mut after = before.clone();
    after.claims.remove("job");
    let past = vec![before.claim("job").unwrap().clone()];
    swap_in(&registry, Swap { past, ..swap(&before, after) }).await.unwrap();
    assert_eq!(raw.json(&format!("{DATA}/past/1")).await["later"], json!({"by": [&keys[2]]}));
}

#[tokio::test]
async fn unreadable_value_hides_no_claim() {
    let cluster = Cluster::start(1, &[]).await;
    let (registry, mut raw) =
        (registry(cluster.endpoints()), Raw::connect(cluster.members[0].endpoint()).await);
    swap_in(&registry, new(record("data", &["job"]))).await.unwrap();
    swap_in(&registry, new(record("other", &["job"]))).await.unwrap();
    let key = format!("{DATA}/claim/n1/job");
    let sound = raw.json(&key).await.to_string();
    let elsewhere = sound.replace("\"n1\"", "\"n2\"");
    for (key, value) in [(&key, "{}"), (&key, "not JSON"), (&key, elsewhere.as_str())] {
        raw.put(key, value).await;
        let why = message(registry.record(name("data")).await.err().unwrap());
        assert!(why.contains(key), "{why}");
        // A change of this registry makes its lists as new as the damage.
        change(&registry, "other", |record| record.claims[0].uid += 1).await.unwrap();
        let one = RecordFilter { volume: Some("data".into()), ..RecordFilter::default() };
        for error in [
            registry.records(one).await.err(),
            registry.records(RecordFilter::default()).await.err(),
            registry.claims(ClaimFilter::default()).await.err(),
            registry.claim_states().await.err(),
            registry.held("local", "n1", 9).await.err(),
        ] {
            assert_eq!(message(error.expect("an error")), why);
        }
        let other = RecordFilter { volume: Some("other".into()), ..RecordFilter::default() };
        assert_eq!(registry.records(other).await.unwrap().0.len(), 1);
        raw.put(key, &sound).await;
    }
}

#[tokio::test]
async fn claims_are_read_in_parts() {
    let cluster = Cluster::start(1, &[]).await;
    let registry = registry(cluster.endpoints());
    for volume in ["a", "b"] {
        let past = (0..20).map(|n| claim(&format!("past {n:02}"), "n1")).collect();
        swap_in(&registry, Swap { past, ..new(record(volume, &["1", "2", "3"])) }).await.unwrap();
    }
    for past in [false, true] {
        let (all, _) = registry.claims(ClaimFilter { past, ..ClaimFilter::default() }).await.unwrap();
        assert_eq!(all.len(), if past { 32 } else { 6 });
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let filter = ClaimFilter { past, after: after.clone(), most: 4, ..ClaimFilter::default() };
            let (part, _) = registry.claims(filter).await.unwrap();
            let Some(last) = part.last() else { break };
            assert!(part.len() <= 4);
            let place = csid::store::registry::ClaimPlace {
                name: last.name.clone(),
                of_volume: last.of_volume.clone(),
            };
            after = Some(place);
            found.extend(part);
        }
        let shown = |found: &[csid::store::registry::ListedClaim]| -> Vec<_> {
            found.iter().map(|listed| format!("{} {}", listed.name, listed.claim.consumer)).collect()
        };
        assert_eq!(shown(&found), shown(&all));
        if past {
            assert_eq!(found[0].of_volume, OfVolume::Number(5), "the first four are forgotten");
            assert_eq!(found[31].claim.consumer, "past 19");
        }
    }
    let (states, due) = (registry.claim_states().await.unwrap(), [("taken".to_owned(), 6)]);
    assert_eq!(states, due.into());
    let most = RecordFilter { most: 1, after: Some(name("a")), ..RecordFilter::default() };
    let (found, _) = registry.records(most).await.unwrap();
    assert!(found.len() == 1 && found[0].name == name("b"));
}
