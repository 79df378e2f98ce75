use proptest::prelude::*;
use rusqlite::StatementStatus;

use super::super::held::HeldVolumes;
use super::super::records;
use super::super::request::Work;
use super::samples::*;
use super::*;
use crate::store::registry::*;

/// Returns the work of the journal's thread for a swap with an event of its volume.
fn work(swap: Swap) -> Work {
    let event = event_of(&swap);
    Work::Swap(swap.into(), vec![event])
}

#[tokio::test]
async fn swapped_record_survives_restart() {
    let (_root, directory) = temporary();
    let (store, _) = opened(&directory).unwrap();
    for swap in representative_swaps() {
        let revision = swap_in(&store, swap).await.unwrap();
        assert_eq!(revision, store.modify_index());
    }
    assert_eq!(store.event_sequence(), 3);
    store.close().await.unwrap();
    let (store, _) = opened(&directory).unwrap();
    assert_representative_swaps(&store).await;
    let registry = store.clone();
    let waiting = tokio::spawn(async move { registry.changed(registry.modify_index()).await });
    store.close().await.unwrap();
    assert!(matches!(store.record(name("data")).await, Err(RegistryError::Ended(_))));
    assert!(matches!(swap_in(&store, new(record("x", &[]))).await, Err(RegistryError::Ended(_))));
    assert!(matches!(waiting.await.unwrap(), Err(RegistryError::Ended(_))));
}

#[test]
fn refused_swap_does_not_affect_its_group() {
    let (_root, directory) = temporary();
    let (mut journal, _) = open_journal(&directory).unwrap();
    swapped(&mut journal, new(record("data", &["job"]))).unwrap();
    let current = journal.record(&name("data")).unwrap();
    let older = Record { revision: current.revision - 1, ..current.clone() };
    let claimed = record("data", &["job", "thief"]);
    let (index, sequence) = (journal.counters.modify_index, journal.counters.sequence);
    let group = [
        Work::Changes(vec![event("a")]),
        work(swap(&older, claimed.clone())),
        work(swap(&current, claimed.clone())),
        work(swap(&current, claimed)),
        Work::Changes(vec![event("b")]),
    ];
    let done = journal.commit(&group.iter().collect::<Vec<_>>()).unwrap();
    let answers: Vec<_> = done.answers.iter().map(Result::is_ok).collect();
    assert_eq!(answers, [true, false, true, false, true]);
    assert_eq!(done.events.iter().map(|event| &*event.subject).collect::<Vec<_>>(), ["a", "data", "b"]);
    assert_eq!(done.events.last().unwrap().sequence, sequence + 3);
    assert_eq!(journal.counters.modify_index, index + 1);
}

#[tokio::test]
async fn other_commit_is_no_change_of_the_registry() {
    let (_root, directory) = temporary();
    let (store, _) = opened(&directory).unwrap();
    let registry = store.clone();
    let waiting = tokio::spawn(async move { registry.changed(registry.modify_index()).await });
    store.commit(representative(), Durability::Disk).await.unwrap();
    let revision = swap_in(&store, new(record("data", &[]))).await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap(), revision);
}

#[tokio::test]
async fn held_volumes_are_counted_after_a_restart() {
    let (_root, directory) = temporary();
    let (store, _) = opened(&directory).unwrap();
    swap_in(&store, new(record("a", &["job/1"]))).await.unwrap();
    store.close().await.unwrap();
    let (store, _) = opened(&directory).unwrap();
    let held = store.held("local", "n1", 1).await.unwrap();
    assert_eq!(held, HeldVolumes { count: 1, names: vec![name("a")] });
}

/// As another request's: not one of them is given again after a power cut.
#[test]
fn the_number_of_a_swaps_event_is_reserved() {
    let (_root, directory) = temporary();
    let (mut journal, _) = open_journal(&directory).unwrap();
    for (volume, reserves) in [("reserves", true), ("within the block", false)] {
        let work = work(new(record(volume, &[])));
        assert_eq!(journal.commit(&[&work]).unwrap().reserves, reserves, "{volume}");
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
        journal.commit(&[&work(swap)]).unwrap();
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
            journal.commit(&[&work(swap)]).unwrap();
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
fn attachment_of_older_csid_has_its_claim_secrets() {
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

/// Journals of earlier and later versions are read either way.
#[test]
fn absent_values_are_written_as_empty() {
    let blocked = || Some(Blocked { reason: "no secrets".into() });
    let free = Claim { error: None, ..claim("a", "n1") };
    let parked = Claim { blocked: blocked(), ..claim("a", "n1") };
    let idle = record("data", &[]).registration.unwrap();
    let known =
        Registration { capacity: Some(7), blocked: blocked(), error: Some("e".into()), ..idle.clone() };
    let unknown = Attachment::new("n1", Leg::Present);
    let called = Attachment { boot: Some("b".into()), node_id: Some("i-1".into()), ..unknown.clone() };
    // Only a server writes that an attachment was not called for.
    let (old, new) = (json!(&unknown), json!(Attachment { uncalled: true, ..unknown.clone() }));
    assert!(old.get("uncalled").is_none() && new["uncalled"] == true);
    assert!(serde_json::from_value::<Attachment>(new).unwrap().uncalled);
    let texts = |value: serde_json::Value, due: serde_json::Value| {
        for (key, due) in due.as_object().unwrap() {
            assert_eq!(&value[key], due, "{key}");
        }
        value
    };
    let written = texts(json!(&free), json!({"parked": "", "error": ""}));
    assert_eq!(serde_json::from_value::<Claim>(written).unwrap(), Claim { modify_index: 0, ..free });
    let written = texts(json!(&parked), json!({"parked": "no secrets", "error": "\"quoted\""}));
    assert_eq!(serde_json::from_value::<Claim>(written).unwrap(), parked);
    let written = texts(json!(&idle), json!({"capacity": 0, "parked": "", "error": ""}));
    assert!(serde_json::from_value::<Registration>(written).unwrap() == idle);
    let written = texts(json!(&known), json!({"capacity": 7, "parked": "no secrets", "error": "e"}));
    assert!(serde_json::from_value::<Registration>(written).unwrap() == known);
    let written = texts(json!(&unknown), json!({"boot": "", "node-id": ""}));
    assert_eq!(serde_json::from_value::<Attachment>(written).unwrap(), unknown);
    let written = texts(json!(&called), json!({"boot": "b", "node-id": "i-1"}));
    assert_eq!(serde_json::from_value::<Attachment>(written).unwrap(), called);
    for (source, text) in [(None, ""), (Some("x".to_owned()), "x")] {
        let creation = Creation { source, ..Creation::default() };
        let written = texts(json!(&creation), json!({"source": text}));
        assert_eq!(serde_json::from_value::<Creation>(written).unwrap(), creation);
    }
}

#[test]
fn an_attachments_debug_has_no_value_of_its_context() {
    let context = BTreeMap::from([("token".to_owned(), "hunter2".to_owned())]);
    let attachment = Attachment { publish_context: context, ..Attachment::new("n1", Leg::Present) };
    let said = format!("{attachment:?} {attachment:#?}");
    assert!(said.contains("n1") && said.contains("token") && !said.contains("hunter2"), "{said}");
}

/// A registered volume with this many claims.
fn crowded(volume: &str, claims: usize) -> Record {
    let claims: Vec<Claim> = (0..claims).map(|n| claim(&format!("c{n:04}"), "n1")).collect();
    Record { claims: claims.into(), ..record(volume, &[]) }
}

fn swapped(journal: &mut Journal, swap: Swap) -> Result<Done, StoreError> {
    journal.commit(&[&work(swap)])
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
fn failed_transaction_clears_known_claims() {
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
    fn known_claims_equal_written_ones(
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
                    (1, Some(claim)) => claim.error.get_or_insert_default().push_str("again"),
                    _ => {
                        // On one host a consumer has one claim.
                        after.claims.remove(&consumer);
                        after.claims.insert(claim(&consumer, "n2"));
                    }
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
    commit(&mut journal, rows.collect()).unwrap();
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
