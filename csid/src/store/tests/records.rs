use proptest::prelude::*;
use rusqlite::StatementStatus;

use super::super::held::HeldVolumes;
use super::super::records;
use super::super::request::Work;
use super::samples::*;
use super::*;
use crate::store::registry::*;

#[tokio::test]
async fn swapped_record_survives_restart() {
    let (_root, directory) = temporary();
    let (store, _) = opened(&directory).unwrap();
    assert!(store.record(name("data")).await.unwrap() == Record::none(name("data")));
    for swap in representative_swaps() {
        let (due, revision) = (swap.after.clone(), store.swap(swap).await.unwrap());
        assert_eq!(revision, store.modify_index());
        let found = store.record(due.name.clone()).await.unwrap();
        assert_eq!(found.revision, revision);
        assert!(found.claims.iter().all(|claim| claim.modify_index == revision));
        assert!(bare(found) == due);
    }
    assert_eq!(store.event_sequence(), 3);

    // Only the claim that changed gets the new index.
    let before = store.record(name("data")).await.unwrap();
    let mut after = before.clone();
    after.claims[1].releasing = true;
    let revision = store.swap(swap(&before, after.clone())).await.unwrap();
    let found = store.record(name("data")).await.unwrap();
    assert_eq!(
        found.claims.iter().map(|claim| claim.modify_index).collect::<Vec<_>>(),
        [before.revision, revision]
    );
    assert!(bare(found.clone()) == bare(after));
    store.swap(swap(&found, before)).await.unwrap();

    store.close().await.unwrap();
    let (store, _) = opened(&directory).unwrap();
    assert_representative_swaps(&store).await;
    store.close().await.unwrap();
    assert!(matches!(store.record(name("data")).await, Err(StoreError::Gone)));
    assert!(matches!(store.swap(new(record("x", &[]))).await, Err(StoreError::Gone)));
}

#[tokio::test]
async fn refused_swap_does_not_affect_its_group() {
    let (_root, directory) = temporary();
    let (store, _) = opened(&directory).unwrap();
    store.swap(new(record("data", &["job"]))).await.unwrap();
    let current = store.record(name("data")).await.unwrap();
    let older = Record { revision: current.revision - 1, ..current.clone() };
    let claimed = record("data", &["job", "thief"]);
    let past = |swap: Swap| Swap { past: vec![claim("job", "n1")], ..swap };
    let mut second_name = record("other", &["job"]);
    second_name.volume = current.volume.clone();
    let mut renamed = record("data", &[]);
    renamed.volume.external_id = "ext-neighbour".into();
    store.swap(new(record("neighbour", &[]))).await.unwrap();
    let taken_by = |volume| Some(name(volume));
    let refused = [
        (past(swap(&older, claimed.clone())), None),
        (past(new(claimed.clone())), None),
        (swap(&Record { revision: 9, ..Record::none(name("nowhere")) }, record("nowhere", &[])), None),
        (swap(&older, Record::none(name("data"))), None),
        (past(new(second_name)), taken_by("data")),
        (swap(&current, renamed), taken_by("neighbour")),
    ];
    let (index, sequence) = (store.modify_index(), store.event_sequence());
    for (swap, holder) in refused {
        match (store.swap(swap).await, holder) {
            (Err(StoreError::Stale), None) => {}
            (Err(StoreError::Taken(found)), Some(holder)) => assert_eq!(found, holder),
            (other, _) => panic!("{other:?}"),
        }
    }
    assert_eq!((store.modify_index(), store.event_sequence()), (index, sequence));
    assert!(store.record(name("data")).await.unwrap() == current);
    let all_claims = store.claims(ClaimFilter::default()).await.unwrap().0;
    let past_claims = store.claims(ClaimFilter { past: true, ..ClaimFilter::default() }).await.unwrap().0;
    assert!(all_claims.len() == 1 && past_claims.is_empty());

    // In one transaction with others: those are done, and it is not tried again alone.
    store.close().await.unwrap();
    let (mut journal, _) = open_journal(&directory).unwrap();
    let index = journal.counters.modify_index;
    let group = [
        Work::Changes(vec![event("a")]),
        Work::Swap(swap(&older, claimed.clone()).into()),
        Work::Swap(swap(&current, claimed.clone()).into()),
        Work::Swap(swap(&current, claimed).into()),
        Work::Changes(vec![event("b")]),
    ];
    let done = journal.commit(&group.iter().collect::<Vec<_>>(), Durability::Disk).unwrap();
    let answers: Vec<_> = done.answers.iter().map(Result::is_ok).collect();
    assert_eq!(answers, [true, false, true, false, true]);
    assert_eq!(done.events.iter().map(|event| &*event.subject).collect::<Vec<_>>(), ["a", "data", "b"]);
    assert_eq!(done.events.last().unwrap().sequence, sequence + 3);
    assert_eq!(journal.counters.modify_index, index + 1);
    assert_eq!(journal.synchronous_now(), 2);
}

/// Each takes the record as it finds it and adds one, again until it is still so.
#[tokio::test(flavor = "multi_thread")]
async fn writers_that_race_for_a_record_lose_nothing() {
    let (_root, directory) = temporary();
    let (store, _) = opened(&directory).unwrap();
    store.swap(new(record("data", &[]))).await.unwrap();
    let writers = (0..64).map(|writer| {
        let store = store.clone();
        tokio::spawn(async move {
            let mut stale = 0;
            for n in 0..4 {
                loop {
                    let before = store.record(name("data")).await.unwrap();
                    let mut after = before.clone();
                    after.registration.as_mut().unwrap().capacity += 1;
                    after.claims = vec![claim(&format!("{writer} {n}"), "n1")].into();
                    match store.swap(swap(&before, after)).await {
                        Ok(_) => break,
                        Err(StoreError::Stale) => stale += 1,
                        Err(error) => panic!("{error}"),
                    }
                }
                store.commit(vec![event("other")], Durability::Process).await.unwrap();
            }
            stale
        })
    });
    let mut stale = 0;
    for writer in futures_util::future::join_all(writers).await {
        stale += writer.unwrap();
    }
    assert!(stale > 0, "nobody raced");
    store.close().await.unwrap();
    let (store, _) = opened(&directory).unwrap();
    let found = store.record(name("data")).await.unwrap();
    assert_eq!((found.registration.unwrap().capacity, found.claims.len()), (256, 1));
    assert_eq!(store.event_sequence(), 1 + 2 * 256);
}

#[tokio::test]
async fn lists_are_filtered() {
    let (_root, directory) = temporary();
    let (store, _) = opened(&directory).unwrap();
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
    for row in rows {
        store.swap(Swap { past: row.claims.iter().cloned().collect(), ..new(row) }).await.unwrap();
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
        let (found, index) = store.records(filter.clone()).await.unwrap();
        assert_eq!(index, store.modify_index());
        let names: Vec<_> =
            found.iter().map(|row| format!("{}/{}", row.name.namespace, row.name.volume)).collect();
        assert_eq!(names, due, "{filter:?}");
        for row in found {
            assert!(store.record(row.name.clone()).await.unwrap() == row, "with its claims");
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
            let (found, index) = store.claims(ClaimFilter { past, ..filter.clone() }).await.unwrap();
            assert_eq!(index, store.modify_index());
            let names = found.iter().map(|ListedClaim { name, claim, .. }| {
                assert!(claim.modify_index > 0);
                format!("{}/{}/{}", name.namespace, name.volume, claim.consumer)
            });
            assert_eq!(names.collect::<Vec<_>>(), due, "{filter:?}, past: {past}");
        }
    }
}

#[tokio::test]
async fn past_claims_are_few_and_go_with_the_record() {
    let (_root, directory) = temporary();
    let (store, _) = opened(&directory).unwrap();
    for volume in ["data", "other"] {
        store.swap(new(record(volume, &[]))).await.unwrap();
        for n in 0..10 {
            let before = store.record(name(volume)).await.unwrap();
            let past = ["a", "b"].map(|half| claim(&format!("{n}{half}"), "n1")).into();
            store.swap(Swap { past, ..swap(&before, before.clone()) }).await.unwrap();
        }
    }
    let past = async |volume: &str| {
        let filter = ClaimFilter { volume: Some(volume.into()), past: true, ..ClaimFilter::default() };
        let (found, _) = store.claims(filter).await.unwrap();
        found.into_iter().map(|found| found.claim.consumer).collect::<Vec<_>>()
    };
    let due: Vec<_> = (2..10).flat_map(|n| ["a", "b"].map(|half| format!("{n}{half}"))).collect();
    assert_eq!(past("data").await, due);
    let before = store.record(name("data")).await.unwrap();
    let gone = Swap { past: vec![claim("last", "n1")], ..swap(&before, Record::none(name("data"))) };
    store.swap(gone).await.unwrap();
    assert!(store.record(name("data")).await.unwrap() == Record::none(name("data")));
    assert!(past("data").await.is_empty());
    assert_eq!(past("other").await, due);
}

#[tokio::test]
async fn a_change_is_waited_for() {
    let (_root, directory) = temporary();
    let (store, _) = opened(&directory).unwrap();
    let (_, index) = store.records(RecordFilter::default()).await.unwrap();
    let waits = |index, bound| {
        let store = store.clone();
        tokio::spawn(async move { tokio::time::timeout(bound, store.changed(index)).await })
    };
    let (long, short) = (std::time::Duration::from_secs(20), std::time::Duration::from_millis(50));
    let waiting = waits(index, long);
    store.commit(representative(), Durability::Disk).await.unwrap();
    let stale = Record { revision: 1, ..record("data", &[]) };
    assert!(store.swap(swap(&stale, stale.clone())).await.is_err());
    assert!(
        waits(index, short).await.unwrap().is_err() && !waiting.is_finished(),
        "the registry has not changed"
    );
    let revision = store.swap(new(record("data", &[]))).await.unwrap();
    assert_eq!(waiting.await.unwrap().expect("a change").unwrap(), revision);
    let before = waits(index, long).await.unwrap().expect("a change that was before");
    assert_eq!(before.unwrap(), revision);

    let waiting = waits(revision, long);
    assert!(waits(revision, short).await.unwrap().is_err());
    store.close().await.unwrap();
    assert!(matches!(waiting.await.unwrap().expect("the end"), Err(StoreError::Gone)));
}

/// As another request's: not one of them is given again after a power cut.
#[test]
fn the_number_of_a_swaps_event_is_reserved() {
    let (_root, directory) = temporary();
    let (mut journal, _) = open_journal(&directory).unwrap();
    for (volume, synchronous) in [("reserves", 2), ("within the block", 1)] {
        let work = Work::Swap(new(record(volume, &[])).into());
        journal.commit(&[&work], Durability::Process).unwrap();
        assert_eq!(journal.synchronous_now(), synchronous, "{volume}");
    }
}

/// Steps of SQLite's machine, and the rows it finds.
fn steps(journal: &Journal, filter: &ClaimFilter) -> (i32, usize) {
    let count = |db: &Connection| {
        let (sql, values) = records::claims_sql(filter);
        let mut statement = db.prepare(&sql)?;
        let mut rows = statement.query(rusqlite::params_from_iter(values))?;
        let mut found = 0;
        while rows.next()?.is_some() {
            found += 1;
        }
        drop(rows);
        Ok((statement.get_status(StatementStatus::VmStep), found))
    };
    journal.ask("count", count).unwrap()
}

#[test]
fn listing_one_volume_does_not_read_all() {
    let filter = |past| ClaimFilter {
        namespace: Some("default".into()),
        volume: Some("v7".into()),
        past,
        ..ClaimFilter::default()
    };
    let steps_among = |volumes: u32| {
        let (_root, directory) = temporary();
        let (mut journal, _) = open_journal(&directory).unwrap();
        let swap = Swap { past: vec![claim("job/0", "n1")], ..new(record("v7", &["job/1", "job/2"])) };
        journal.commit(&[&Work::Swap(swap.into())], Durability::Process).unwrap();
        for (table, columns) in [("claims", "modify_index"), ("past_claims", "modify_index, number")] {
            let sql = format!(
                "WITH RECURSIVE n (n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n < {volumes} - 1) \
                 INSERT INTO {table} SELECT namespace, 'v7' || n, consumer, node, claim, {columns}, sum \
                 FROM {table}, n"
            );
            journal.ask("fill", |db| db.execute(&sql, [])).unwrap();
        }
        let found = [false, true].map(|past| steps(&journal, &filter(past)));
        assert_eq!(found.map(|(_, rows)| rows), [2, 1]);
        let all = steps(&journal, &ClaimFilter::default());
        assert!(all.0 > volumes as i32 && all.1 == 2 * volumes as usize);
        found
    };
    let (few, many) = (steps_among(10), steps_among(10_000));
    println!("steps of SQLite to list a volume's claims, among 10 and 10,000: {few:?} {many:?}");
    assert_eq!(few, many);
}

/// What is asked for by name, and what recovery asks for, is looked up and not looked for.
#[test]
fn no_table_is_scanned_for_a_few_records() {
    let (_root, directory) = temporary();
    let (journal, _) = open_journal(&directory).unwrap();
    let text = || Some("x".to_owned());
    let by = RecordFilter::default;
    let filters = [
        (
            RecordFilter { namespace: text(), volume: text(), ..by() },
            "r USING INDEX sqlite_autoindex_registry_1",
        ),
        (
            RecordFilter { plugin: text(), external_id: text(), ..by() },
            "r USING INDEX registry_of_external_id",
        ),
        (RecordFilter { restless: true, ..by() }, "r USING INDEX registry_restless"),
    ];
    for (filter, due) in filters {
        let ([records, claims], values) = records::records_sql(&filter);
        let plan = |sql: &str| {
            let read = |db: &Connection| {
                let mut statement = db.prepare(&format!("EXPLAIN QUERY PLAN {sql}"))?;
                let plan = statement.query_map(rusqlite::params_from_iter(&values), |row| row.get(3))?;
                plan.collect::<rusqlite::Result<Vec<String>>>()
            };
            journal.ask("plan", read).unwrap().join("; ")
        };
        assert!(plan(&records).contains(due), "{filter:?}: {}", plan(&records));
        let claims = plan(&claims);
        assert!(claims.contains("SEARCH claims USING PRIMARY KEY (namespace=? AND volume=?)"), "{claims}");
    }
}

/// Claims of a volume as a few letters say them: who, on which node, releasing or not.
fn claims() -> impl Strategy<Value = Vec<Claim>> {
    let states = prop::collection::btree_map(0..5_u8, (0..2_u8, any::<bool>()), 0..5);
    states.prop_map(|states| {
        let claims = states.into_iter().map(|(consumer, (node, releasing))| Claim {
            releasing,
            ..claim(&format!("job/{consumer}"), &format!("n{node}"))
        });
        claims.collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// What is read after each swap is what was given to it, whatever was there: the difference that is written makes
    /// what writing everything again would. A claim that stays as it is keeps its index.
    #[test]
    fn the_difference_makes_the_whole(
        steps in prop::collection::vec((0..3_u8, prop::option::of(claims()), claims()), 1..20),
    ) {
        let (_root, directory) = temporary();
        let (mut journal, _) = open_journal(&directory).unwrap();
        let read = |journal: &Journal, name: &VolumeName| {
            let read = journal.ask("read", |db| records::read_record(db, name, None)).unwrap();
            assert!(journal.record(name).unwrap() == read, "what is known is what is written");
            read
        };
        let mut model: BTreeMap<VolumeName, (Record, Vec<Claim>)> = BTreeMap::new();
        for (volume, claims, past) in steps {
            let name = name(&format!("v{volume}"));
            let before = read(&journal, &name);
            let after = match claims {
                Some(claims) => Record { claims: claims.into(), ..record(&name.volume, &[]) },
                None => Record::none(name.clone()),
            };
            let swap = Swap { past: past.clone(), ..swap(&before, after.clone()) };
            journal.commit(&[&Work::Swap(swap.into())], Durability::Process).unwrap();
            let found = read(&journal, &name);
            let index = journal.counters.modify_index;
            for claim in &found.claims {
                let had = before.claims.iter().find(|had| had.consumer == claim.consumer);
                let same = had.filter(|had| Claim { modify_index: claim.modify_index, ..(*had).clone() } == *claim);
                prop_assert_eq!(claim.modify_index, same.map_or(index, |had| had.modify_index));
            }
            if after.is_empty() {
                model.remove(&name);
            } else {
                prop_assert_eq!(found.revision, index);
                let (now, ended) = model.entry(name).or_insert_with(|| (after.clone(), Vec::new()));
                *now = after;
                ended.extend(past);
                ended.drain(..ended.len().saturating_sub(16));
            }
        }
        let all = journal.ask("read", |db| records::read_records(db, &RecordFilter::default())).unwrap();
        prop_assert!(all.into_iter().map(bare).eq(model.values().map(|(record, _)| record.clone())));
        for (name, (_, ended)) in &model {
            let filter = ClaimFilter { volume: Some(name.volume.clone()), past: true, ..ClaimFilter::default() };
            let found = journal.ask("read", |db| records::read_claims(db, &filter)).unwrap();
            let found = found.into_iter().map(|found| Claim { modify_index: 0, ..found.claim });
            prop_assert!(found.eq(ended.iter().cloned()));
        }
    }
}

#[test]
fn an_attachment_of_an_earlier_csid_has_its_claims_secrets() {
    let mut json = serde_json::to_value(Attachment::new("n1", Leg::Present)).unwrap();
    json.as_object_mut().unwrap().remove("secrets").unwrap();
    let plain = |consumer, node| Claim { credential: None, secrets_given: false, ..claim(consumer, node) };
    let given = Claim { credential: None, ..claim("c", "n1") };
    let mut record = record("data", &[]);
    record.attachments = vec![serde_json::from_value(json).unwrap()];
    record.claims = vec![plain("a", "n1"), claim("b", "n2"), given.clone()].into();
    let found =
        |credential: Option<&str>, given| AttachSecrets { credential: credential.map(Into::into), given };
    assert_eq!(record.attach_secrets("n1"), found(None, true), "of that node, from any claim");
    record.claims = vec![plain("a", "n1"), Claim { secrets_given: false, ..claim("b", "n1") }].into();
    assert_eq!(record.attach_secrets("n1"), found(Some("csid.claim"), false));
    record.claims = vec![plain("a", "n1")].into();
    assert_eq!(record.attach_secrets("n1"), found(None, false));

    record.attachments[0].secrets = Some(found(Some("kept"), false));
    record.claims = vec![given].into();
    assert_eq!(record.attach_secrets("n1"), found(Some("kept"), false), "not who came later");
}

#[test]
fn an_attachments_debug_has_no_value_of_its_context() {
    let context = BTreeMap::from([("token".to_owned(), "hunter2".to_owned())]);
    let attachment = Attachment { publish_context: context, ..Attachment::new("n1", Leg::Present) };
    let said = format!("{attachment:?} {attachment:#?}");
    assert!(said.contains("n1") && said.contains("token") && !said.contains("hunter2"), "{said}");
}

/// What is kept in memory of a plugin's volumes is what the tables say, whatever changes.
#[tokio::test]
async fn held_volumes_are_counted_as_the_tables_say() {
    let (_root, directory) = temporary();
    let (store, _) = opened(&directory).unwrap();
    let held = async |store: &Store, node: &str| {
        let held = store.held("local", node, 1).await.unwrap();
        (held.count, held.names)
    };
    store.swap(new(record("before", &["job"]))).await.unwrap();
    assert_eq!(held(&store, "n1").await, (1, vec![name("before")]), "read when it is first asked for");
    store.swap(new(record("a", &["job/1", "job/2"]))).await.unwrap();
    assert_eq!(held(&store, "n1").await, (2, vec![name("a")]), "no more names than are wanted");
    assert_eq!(held(&store, "n2").await, (0, Vec::new()));
    assert_eq!(store.held("other", "n1", 9).await.unwrap(), HeldVolumes::default());

    // A claim of another node, then without the attachment, which keeps it for the first.
    let before = store.record(name("a")).await.unwrap();
    let mut after = before.clone();
    after.claims[0].node = "n2".into();
    after.claims.remove("job/2");
    store.swap(swap(&before, after)).await.unwrap();
    assert_eq!((held(&store, "n1").await.0, held(&store, "n2").await.0), (2, 1));
    let before = store.record(name("a")).await.unwrap();
    let after = Record { attachments: Vec::new(), ..before.clone() };
    store.swap(swap(&before, after)).await.unwrap();
    assert_eq!((held(&store, "n1").await.0, held(&store, "n2").await.0), (1, 1));

    // One that is refused changes nothing.
    assert!(store.swap(swap(&before, record("a", &["job/9"]))).await.is_err());
    assert_eq!((held(&store, "n1").await.0, held(&store, "n2").await.0), (1, 1));
    let before = store.record(name("before")).await.unwrap();
    store.swap(swap(&before, Record::none(name("before")))).await.unwrap();
    assert_eq!((held(&store, "n1").await.0, held(&store, "n2").await.0), (0, 1));
    store.close().await.unwrap();
    let (store, _) = opened(&directory).unwrap();
    assert_eq!((held(&store, "n1").await.0, held(&store, "n2").await), (0, (1, vec![name("a")])));
}

/// A registered volume with this many claims.
fn crowded(volume: &str, claims: usize) -> Record {
    let claims: Vec<Claim> = (0..claims).map(|n| claim(&format!("c{n:04}"), "n1")).collect();
    Record { claims: claims.into(), ..record(volume, &[]) }
}

fn swapped(journal: &mut Journal, swap: Swap) -> Result<Done, StoreError> {
    journal.commit(&[&Work::Swap(swap.into())], Durability::Process)
}

/// Returns the work of one claim that is taken with `others` there, read as a volume's task reads it: rows that were read, rows that were written.
fn work_of_a_claim(others: usize) -> (u64, u64) {
    let (_root, directory) = temporary();
    let (mut journal, _) = open_journal(&directory).unwrap();
    let writes = |journal: &Journal| journal.ask("count", |db| Ok(db.total_changes())).unwrap();
    swapped(&mut journal, new(crowded("data", others))).unwrap();
    journal.record(&name("data")).unwrap();
    let (read, written) = (records::CLAIMS_READ.get(), writes(&journal));
    let before = journal.record(&name("data")).unwrap();
    let mut after = before.clone();
    after.claims.insert(claim("one more", "n1"));
    swapped(&mut journal, swap(&before, after)).unwrap();
    let before = journal.record(&name("data")).unwrap();
    assert_eq!(before.claims.len(), others + 1);
    let mut after = before.clone();
    after.claims.get_mut("one more").unwrap().releasing = true;
    swapped(&mut journal, swap(&before, after)).unwrap();
    (records::CLAIMS_READ.get() - read, writes(&journal) - written)
}

#[test]
fn claim_work_does_not_grow_with_other_claims() {
    let (read, written) = work_of_a_claim(10);
    assert!(read > 0, "claims are counted");
    assert_eq!(work_of_a_claim(1_000), (0, written));
    assert_eq!(work_of_a_claim(4_000), (0, written));
}

/// What SQLite says is true, whatever was known before: a transaction that is said to have failed may be there all the same.
#[test]
fn a_failed_transaction_ends_what_is_known() {
    type Fail = fn(&mut Journal, &Record) -> StoreError;
    let full: Fail = |journal, before| {
        journal.limit_pages(Some(1));
        let mut after = before.clone();
        for n in 0..500 {
            after.claims.insert(claim(&format!("more {n}"), "n1"));
        }
        let found = swapped(journal, swap(before, after)).map(drop).unwrap_err();
        journal.limit_pages(None);
        assert!(matches!(found, StoreError::Full), "{found}");
        found
    };
    let refused: Fail = |journal, before| {
        let trigger = "CREATE TEMP TRIGGER no BEFORE INSERT ON claims BEGIN SELECT RAISE(ABORT, 'no'); END";
        journal.ask("refuse", |db| db.execute_batch(trigger)).unwrap();
        let mut after = before.clone();
        after.claims.insert(claim("one more", "n1"));
        let found = swapped(journal, swap(before, after)).map(drop).unwrap_err();
        journal.ask("allow", |db| db.execute_batch("DROP TRIGGER no")).unwrap();
        found
    };
    for (what, fail) in [("a full disk", full), ("a constraint", refused)] {
        let (_root, directory) = temporary();
        let (mut journal, _) = open_journal(&directory).unwrap();
        swapped(&mut journal, new(crowded("data", 40))).unwrap();
        let before = journal.record(&name("data")).unwrap();
        let reads = || records::CLAIMS_READ.get();
        let known = reads();
        assert!(journal.record(&name("data")).unwrap() == before);
        assert_eq!(reads(), known, "{what}: they are known");
        fail(&mut journal, &before);
        // It is there after all, at the revision that csid knows.
        journal.ask("go", |db| db.execute("DELETE FROM claims WHERE consumer > 'c0019'", [])).unwrap();
        let found = journal.record(&name("data")).unwrap();
        assert_eq!((found.claims.len(), found.revision), (20, before.revision), "{what}");
    }
}

#[test]
fn known_claims_are_not_given_with_a_damaged_row() {
    let trigger = "CREATE TEMP TRIGGER no BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'no'); END";
    for (table, damage) in [("registry", "SET restless = 1"), ("claims", "SET node = 'elsewhere'")] {
        let (_root, directory) = temporary();
        let (mut journal, _) = open_journal(&directory).unwrap();
        swapped(&mut journal, new(crowded("data", 40))).unwrap();
        let before = journal.record(&name("data")).unwrap();
        journal.ask("damage", |db| db.execute(&format!("UPDATE {table} {damage}"), [])).unwrap();
        if table == "claims" {
            // Any transaction that fails: then the claims are read again.
            journal.ask("refuse", |db| db.execute_batch(trigger)).unwrap();
            swapped(&mut journal, swap(&before, crowded("data", 41))).map(drop).unwrap_err();
        }
        let found = journal.record(&name("data")).map(drop);
        assert!(matches!(found, Err(StoreError::Corrupt { .. })), "{table}: {found:?}");
        journal.leave("damaged".into()).unwrap();
        let left = journal.record(&name("data")).unwrap();
        assert_eq!(
            (left.registration.is_some(), left.claims.is_empty()),
            (table == "claims", table == "claims")
        );
        let found = swapped(&mut journal, swap(&before, crowded("data", 41))).map(drop);
        assert!(matches!(found, Err(StoreError::Corrupt { .. })), "{table}: {found:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// With claims enough to be known: each change leaves known what is written.
    #[test]
    fn known_claims_are_what_is_written(
        steps in prop::collection::vec((0..2_u8, prop::collection::vec((0..60_u8, 0..3_u8), 0..30)), 1..12),
    ) {
        let (_root, directory) = temporary();
        let (mut journal, _) = open_journal(&directory).unwrap();
        swapped(&mut journal, new(crowded("v0", 30))).unwrap();
        swapped(&mut journal, new(crowded("v1", 14))).unwrap();
        for (volume, changes) in steps {
            let name = name(&format!("v{volume}"));
            let before = journal.record(&name).unwrap();
            let mut after = before.clone();
            for (consumer, change) in changes {
                let consumer = format!("c{consumer:04}");
                match (change, after.claims.get_mut(&consumer)) {
                    (0, _) => after.claims.remove(&consumer),
                    (1, Some(claim)) => claim.error += "again",
                    _ => after.claims.insert(claim(&consumer, "n2")),
                }
            }
            swapped(&mut journal, swap(&before, after.clone())).unwrap();
            let written = journal.ask("read", |db| records::read_record(db, &name, None)).unwrap();
            prop_assert!(journal.record(&name).unwrap() == written);
            prop_assert!(bare(written) == bare(after));
        }
    }
}

/// A part of a list costs what it has, wherever it stands and whatever else is there.
#[test]
fn a_part_of_a_list_is_read_alone() {
    let part_among = |volumes: u32| {
        let (_root, directory) = temporary();
        let (mut journal, _) = open_journal(&directory).unwrap();
        for n in 0..20 {
            let work =
                Swap { past: vec![claim("job/0", "n1")], ..new(record(&format!("m{n:02}"), &["job/1"])) };
            swapped(&mut journal, work).unwrap();
        }
        for (table, columns) in [
            ("claims", "consumer, node, claim, modify_index"),
            ("past_claims", "consumer, node, claim, modify_index, number"),
            ("registry", "plugin, side || n, registration, attachments, restless, modify_index"),
        ] {
            let sql = format!(
                "WITH RECURSIVE n (n) AS (VALUES (1) UNION ALL SELECT n + 1 FROM n WHERE n < {volumes}), \
                 sides (side) AS (VALUES ('a'), ('z')) \
                 INSERT INTO {table} SELECT namespace, side || n, {columns}, 0 FROM {table}, n, sides \
                 WHERE volume = 'm00'"
            );
            journal.ask("fill", |db| db.execute(&sql, [])).unwrap();
        }
        let after = |of_volume| Some(ClaimPlace { name: name("m04"), of_volume });
        let claims = ClaimFilter {
            after: after(OfVolume::Consumer("job/1".into())),
            most: 5,
            ..ClaimFilter::default()
        };
        let past = ClaimFilter { past: true, after: after(OfVolume::Number(1)), ..claims.clone() };
        let registry =
            RecordFilter { registered: true, after: Some(name("m04")), most: 5, ..RecordFilter::default() };
        let of_plugin = RecordFilter { plugin: Some("local".into()), ..registry.clone() };
        let run = |(sql, values): (String, Vec<String>)| {
            let count = |db: &Connection| {
                let mut statement = db.prepare(&sql)?;
                let found = statement
                    .query(rusqlite::params_from_iter(values))?
                    .mapped(|row| row.get::<_, String>(1));
                let found: Vec<String> = found.collect::<rusqlite::Result<_>>()?;
                Ok((statement.get_status(StatementStatus::VmStep), found))
            };
            journal.ask("count", count).unwrap()
        };
        let of_records = |filter: &RecordFilter| {
            let ([records, claims], values) = records::records_sql(filter);
            [(records, values.clone()), (claims, values)]
        };
        let all = [records::claims_sql(&claims), records::claims_sql(&past)];
        let all = all.into_iter().chain(of_records(&registry)).chain(of_records(&of_plugin));
        all.map(run).collect::<Vec<_>>()
    };
    let (few, many) = (part_among(10), part_among(5_000));
    for (_, found) in &few {
        assert_eq!(found, &["m05", "m06", "m07", "m08", "m09"]);
    }
    assert_eq!(few, many, "as many steps of SQLite");
}

#[test]
fn a_part_of_the_mounts_is_read_alone() {
    let (_root, directory) = temporary();
    let (mut journal, _) = open_journal(&directory).unwrap();
    let rows = (0..30).map(|n| {
        let mut row = mount("v", &format!("c{n:02}"));
        row.spec.target = (n % 3 == 0).then(|| "/srv".into());
        Change::PutMount(row.into())
    });
    commit(&mut journal, rows.collect(), Durability::Process).unwrap();
    // What stands behind the part is damaged: nobody reads it.
    journal.ask("damage", |db| db.execute("UPDATE mounts SET uid = 9 WHERE consumer > 'c15'", [])).unwrap();
    let after = Some(MountKey { consumer: "c04".into(), ..mount("v", "").key });
    let part = |target: Option<&str>, most| {
        let filter = MountFilter {
            after: after.clone(),
            most,
            target: target.map(Into::into),
            ..MountFilter::default()
        };
        journal
            .mounts(&filter)
            .map(|rows| rows.into_iter().map(|(row, _)| row.key.consumer).collect::<Vec<_>>())
    };
    assert_eq!(part(None, 3).unwrap(), ["c05", "c06", "c07"]);
    assert_eq!(part(Some("/srv"), 3).unwrap(), ["c06", "c09", "c12"]);
    assert!(part(None, 20).is_err() && part(None, 0).is_err());
}
