use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rusqlite::Connection;

use super::super::place::{LOG, NAME};
use super::super::registry::{ClaimFilter, Record, RecordFilter, Registry, RegistryError};
use super::super::rows::PluginRow;
use super::super::*;
use super::samples::{name, new, record, representative_swaps, swap, swap_in};
use super::{database, event, mount, of_schema, opened, plugin, representative, temporary, volume};

async fn filled(directory: &Path) -> Store {
    let (store, _) = opened(directory).unwrap();
    store.commit(representative(), Durability::Disk).await.unwrap();
    for swap in representative_swaps() {
        swap_in(&store, swap).await.unwrap();
    }
    store
}

fn is_damaged(store: &Store, why: &str) -> bool {
    matches!(&*store.health().borrow(), Health::Damaged(text) if text.contains(why))
}

fn kept_aside(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> = entries.filter(|path| path.to_str().unwrap().contains(".corrupt-")).collect();
    paths.sort();
    paths
}

/// Each value in turn is another one than what was written.
#[tokio::test]
async fn changed_row_is_damage() {
    let (_root, directory) = temporary();
    filled(&directory).await.close().await.unwrap();
    let good = std::fs::read(database(&directory)).unwrap();
    for (table, column, value) in [
        ("mounts", "uid", "uid + 1"),
        ("mounts", "consumer", "consumer || 'x'"),
        ("mounts", "spec", "replace(spec, 'noatime', 'nodiratime')"),
        ("mounts", "kept", "1 - kept"),
        ("mounts", "phase", "'dancing'"),
        ("volumes", "external_id", "external_id || 'x'"),
        ("volumes", "stage", "'absent'"),
        ("plugins", "instance", "instance || 'x'"),
        ("plugins", "number", "number + 1"),
        ("plugins", "spec", "'{}'"),
        ("meta", "value", "value || 'x'"),
        ("registry", "external_id", "external_id || 'x'"),
        ("registry", "registration", "NULL"),
        ("registry", "restless", "1 - restless"),
        ("registry", "modify_index", "modify_index + 1"),
        ("claims", "consumer", "consumer || 'x'"),
        ("claims", "claim", "replace(claim, 'taken', 'pending')"),
    ] {
        let db = Connection::open(database(&directory)).unwrap();
        db.execute(&format!("UPDATE {table} SET {column} = {value}"), []).unwrap();
        drop(db);
        let bytes = std::fs::read(database(&directory)).unwrap();
        let (store, _) = opened(&directory).unwrap();
        assert!(is_damaged(&store, "checksum"), "{table}.{column}");
        let refused = store.commit(vec![event("x")], Durability::Disk).await;
        assert!(matches!(refused, Err(StoreError::Corrupt { .. })), "{refused:?}");
        let refused = swap_in(&store, new(record("x", &[]))).await;
        assert!(matches!(refused, Err(RegistryError::Damaged(_))), "{refused:?}");
        store.close().await.unwrap();
        assert!(std::fs::read(database(&directory)).unwrap() == bytes, "{table}.{column}: it was written");
        std::fs::write(database(&directory), &good).unwrap();
    }
}

/// The other rows are still read.
#[tokio::test]
async fn readable_rows_of_a_damaged_file_are_read() {
    let (_root, directory) = temporary();
    filled(&directory).await.close().await.unwrap();
    let db = Connection::open(database(&directory)).unwrap();
    db.execute("UPDATE mounts SET uid = 7 WHERE tag = 'second'", []).unwrap();
    drop(db);
    let (store, loaded) = opened(&directory).unwrap();
    assert_eq!((loaded.plugins.len(), loaded.volumes.len(), loaded.mounts.len()), (2, 2, 5));
    assert_eq!(loaded.boot.as_deref(), Some("b007 marker"));
    assert_eq!(store.mounts(MountFilter::default()).await.unwrap().len(), 5);
    assert_eq!(store.events(0, 10).await.unwrap().0.len(), 5);
    store.ping().await.unwrap();
    // What is mounted besides is shown, and nowhere written.
    store.show(vec![Change::PutMount(mount("data", "unknown").into())]).await.unwrap();
    assert_eq!(store.mounts(MountFilter::default()).await.unwrap().len(), 6);
    store.close().await.unwrap();
    assert_eq!(opened(&directory).unwrap().1.mounts.len(), 5);
}

/// Damage is often noticed by the start that follows an upgrade.
#[tokio::test]
async fn damaged_older_journal_is_read_and_unchanged() {
    for version in schema::SUMMED..schema::KNOWN {
        for (what, mounts) in [("a row", 5), ("an index", 6)] {
            let (_root, directory) = of_schema(version);
            let db = Connection::open(database(&directory)).unwrap();
            if what == "a row" {
                db.execute("UPDATE mounts SET uid = 7 WHERE tag = 'second'", []).unwrap();
                drop(db);
            } else {
                let index = "SELECT rootpage FROM sqlite_schema WHERE name = 'mounts_of_source'";
                let page: u32 = db.query_row(index, [], |row| row.get(0)).unwrap();
                drop(db);
                let file = std::fs::OpenOptions::new().write(true).open(database(&directory)).unwrap();
                file.write_all_at(&[7; 4096], u64::from(page - 1) * 4096).unwrap();
            }
            let bytes = std::fs::read(database(&directory)).unwrap();
            let (store, loaded) = opened(&directory).unwrap();
            assert!(is_damaged(&store, ""), "{what}");
            let found = (loaded.plugins.len(), loaded.volumes.len(), loaded.mounts.len());
            assert_eq!(found, (2, 2, mounts), "{what} of version {version}");
            store.close().await.unwrap();
            assert!(std::fs::read(database(&directory)).unwrap() == bytes, "{what}: it was written");
        }
    }
}

/// What could be read of the registry is in the new journal; a claim is not lost with its volume's row.
#[tokio::test]
async fn the_registry_outlives_a_damaged_row() {
    for (table, lost) in [("registry", "volume = 'data'"), ("claims", "consumer = 'job/1'"), ("meta", "true")]
    {
        let (_root, directory) = temporary();
        filled(&directory).await.close().await.unwrap();
        let db = Connection::open(database(&directory)).unwrap();
        db.execute(&format!("UPDATE {table} SET sum = sum + 1 WHERE {lost}"), []).unwrap();
        drop(db);
        let (store, _) = opened(&directory).unwrap();
        assert!(is_damaged(&store, "checksum"), "{table}");
        let listed = async |store: &Store| {
            let (records, _) = store.records(RecordFilter::default()).await.unwrap();
            let claims = async |past| {
                let (found, _) = store.claims(ClaimFilter { past, ..ClaimFilter::default() }).await.unwrap();
                found.into_iter().map(|found| (found.name.volume, found.claim.consumer)).collect::<Vec<_>>()
            };
            let records =
                records.into_iter().map(|record| (record.name.volume, record.registration.is_some()));
            (records.collect::<Vec<_>>(), claims(false).await, claims(true).await)
        };
        let (records, claims, past) = listed(&store).await;
        let due = match table {
            "registry" => (2, 2, 1),
            "claims" => (3, 1, 1),
            _ => (3, 2, 1),
        };
        assert_eq!((records.len(), claims.len(), past.len()), due, "{table}");
        store.replace(Vec::new()).await.unwrap();
        store.close().await.unwrap();

        let (store, _) = opened(&directory).unwrap();
        assert_eq!(*store.health().borrow(), Health::Sound);
        let (new_records, new_claims, new_past) = listed(&store).await;
        assert_eq!((&new_claims, &new_past), (&claims, &past), "{table}");
        let registered = |found: &[(String, bool)]| found.iter().filter(|(_, is)| *is).count();
        assert_eq!(registered(&new_records), registered(&records));
        // A volume that is registered again is claimed.
        let found = store.record(name("data")).await.unwrap();
        assert_eq!(found.claims.len(), claims.len());
        assert_eq!(found.registration.is_some(), table != "registry");
        let registered = Record { claims: found.claims.clone(), ..record("data", &[]) };
        let revision = swap_in(&store, swap(&found, registered)).await.unwrap();
        assert!(revision > found.revision && found.revision > 0);
        store.close().await.unwrap();
    }
}

/// Whole pages are lost: the registry that is left is what the new journal has, and none of it is another's.
#[tokio::test]
async fn the_registry_outlives_damaged_pages() {
    const VOLUMES: usize = 300;
    let (_root, directory) = temporary();
    let (store, _) = opened(&directory).unwrap();
    let swaps = (0..VOLUMES).map(|n| swap_in(&store, new(record(&format!("v{n}"), &["job/1", "job/2"]))));
    futures_util::future::try_join_all(swaps).await.unwrap();
    store.close().await.unwrap();
    let good = std::fs::read(database(&directory)).unwrap();
    let root_of = |name: &str| {
        let db = Connection::open(database(&directory)).unwrap();
        let sql = "SELECT rootpage FROM sqlite_schema WHERE name = ?1";
        db.query_row(sql, [name], |row| row.get::<_, u32>(0)).unwrap() as usize - 1
    };
    let (index, half) = (root_of("sqlite_autoindex_registry_1") * 4096, good.len() / 2 / 4096 * 4096);
    let flipped = |at: usize| {
        let mut bytes = good.clone();
        bytes[at..at + 4096].fill(0xa5);
        bytes
    };
    for (what, bytes, all) in [
        ("an index", flipped(index), true),
        ("a page", flipped(half), false),
        ("its second half", good[..half].to_vec(), false),
    ] {
        std::fs::write(database(&directory), &bytes).unwrap();
        let (store, _) = opened(&directory).unwrap();
        assert!(is_damaged(&store, ""), "{what}");
        let (left, _) = store.records(RecordFilter::default()).await.unwrap();
        assert!(left.len() > 20 && (left.len() == VOLUMES) >= all, "{what}: {}", left.len());
        store.replace(Vec::new()).await.unwrap();
        store.close().await.unwrap();
        let (store, _) = opened(&directory).unwrap();
        assert_eq!(*store.health().borrow(), Health::Sound);
        for row in left {
            let found = store.record(row.name.clone()).await.unwrap();
            let due = record(&row.name.volume, &["job/1", "job/2"]);
            assert!(found.registration == due.registration && found.volume == due.volume, "{what}");
            assert_eq!(found.claims.len(), row.claims.len(), "{what}");
        }
        store.close().await.unwrap();
    }
}

/// The copy that is read is made again each time, in a private place, and is removed.
#[tokio::test]
async fn file_in_the_way_of_the_copy_is_not_read() {
    let (root, directory) = temporary();
    filled(&directory).await.close().await.unwrap();
    let another = std::fs::read(database(&directory)).unwrap();
    let db = Connection::open(database(&directory)).unwrap();
    db.execute("UPDATE mounts SET uid = 7 WHERE tag = 'second'", []).unwrap();
    drop(db);
    let copies = [root.path(), &directory].map(|base| base.join("journal-copy"));
    let reads = async || {
        let (store, loaded) = opened(&directory).unwrap();
        assert!(is_damaged(&store, "checksum"));
        assert_eq!(loaded.mounts.len(), 5);
        store.close().await.unwrap();
    };
    // A csid was killed over it.
    for copy in &copies {
        std::fs::create_dir(copy).unwrap();
        std::fs::write(copy.join(NAME), &another).unwrap();
        std::fs::write(copy.join(LOG), "another log").unwrap();
    }
    reads().await;
    assert!(copies.iter().all(|copy| !copy.exists()));

    let elsewhere = root.path().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    std::fs::write(elsewhere.join(NAME), &another).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &copies[0]).unwrap();
    reads().await;
    assert!(std::fs::read(elsewhere.join(NAME)).unwrap() == another);
    assert_eq!(std::fs::read_dir(&elsewhere).unwrap().count(), 1);
    assert!(!copies[1].exists());
}

/// SQLite drops what comes after a damaged frame of the log, and does not say so.
#[tokio::test]
async fn commits_that_are_missing_are_damage() {
    let (_root, directory) = temporary();
    let store = filled(&directory).await;
    store.commit(vec![Change::PutMount(mount("data", "last").into())], Durability::Process).await.unwrap();
    let log = directory.join(LOG);
    let good = (std::fs::read(database(&directory)).unwrap(), std::fs::read(&log).unwrap());
    store.close().await.unwrap();
    let put = |log_bytes: &[u8]| {
        std::fs::write(database(&directory), &good.0).unwrap();
        std::fs::write(&log, log_bytes).unwrap();
        std::fs::set_permissions(&log, PermissionsExt::from_mode(0o600)).unwrap();
    };
    let mut flipped = good.1.clone();
    let last = flipped.len() - 100;
    flipped[last] ^= 1;
    let note = directory.parent().unwrap().join("journal-seen");
    for (what, bytes) in [("cut", &good.1[..good.1.len() - 1]), ("flipped", &flipped[..]), ("empty", &[][..])]
    {
        put(bytes);
        let (store, _) = opened(&directory).unwrap();
        assert!(is_damaged(&store, "commits are missing"), "{what}: {:?}", store.health().borrow());
        store.close().await.unwrap();
        assert!(std::fs::read(&log).unwrap() == bytes, "{what}: the log was written");
    }
    // Another boot: a power cut may take what was not synced, and nobody can tell.
    std::fs::remove_file(&note).unwrap();
    put(&good.1[..good.1.len() - 1]);
    let (store, loaded) = opened(&directory).unwrap();
    assert_eq!(*store.health().borrow(), Health::Sound);
    assert_eq!(loaded.mounts.len(), 6);
    store.close().await.unwrap();

    // The journal of another boot, or nothing, in its place.
    std::fs::remove_file(database(&directory)).unwrap();
    let (store, _) = opened(&directory).unwrap();
    assert!(is_damaged(&store, "it is gone"));
}

/// A page goes bad under a csid that runs: what it can still read it reads, and it writes nothing.
#[tokio::test]
async fn damage_that_comes_while_csid_runs() {
    let (_root, directory) = temporary();
    let store = filled(&directory).await;
    let spec = "x".repeat(3000);
    let plugins = |n: usize| PluginRow { spec: spec.clone(), ..plugin(&format!("p{n:04}")) };
    let many: Vec<_> = (0..2000).map(|n| Change::PutPlugin(plugins(n))).collect();
    store.commit(many, Durability::Disk).await.unwrap();
    store.close().await.unwrap();
    let (store, loaded) = opened(&directory).unwrap();
    assert_eq!(loaded.plugins.len(), 2002);
    let file = std::fs::File::options().write(true).open(database(&directory)).unwrap();
    let middle = file.metadata().unwrap().len() / 8192 * 4096;
    file.write_all_at(&[0xa5; 4096], middle).unwrap();
    let damaged = std::fs::read(database(&directory)).unwrap();

    let left = store.rows().await.unwrap();
    assert!(left.plugins.len() > 100 && left.plugins.len() < 2002, "{}", left.plugins.len());
    assert!(is_damaged(&store, "csid refuses every change"), "{:?}", store.health().borrow());
    let refused = store.commit(vec![event("x")], Durability::Disk).await;
    assert!(matches!(refused, Err(StoreError::Corrupt { .. })), "{refused:?}");
    assert!(store.writable().is_err());
    store.mounts(MountFilter::default()).await.unwrap();
    store.ping().await.unwrap();
    store.close().await.unwrap();
    assert!(std::fs::read(database(&directory)).unwrap() == damaged, "it was written");
}

/// A bit flipped in the text of the schema makes another name of a table or column.
#[tokio::test]
async fn changed_schema_is_damage() {
    let (_root, directory) = temporary();
    filled(&directory).await.close().await.unwrap();
    let good = std::fs::read(database(&directory)).unwrap();
    for (table, from, to) in [
        ("claims", "modify_index", "modify_indey"),
        ("claims", " sum ", " sul "),
        ("mounts", "consumer", "consumes"),
        ("registry", "restless", "restlesr"),
    ] {
        let db = Connection::open(database(&directory)).unwrap();
        db.execute_batch("PRAGMA writable_schema = ON").unwrap();
        let sql = "UPDATE sqlite_schema SET sql = replace(sql, ?, ?) WHERE name = ?";
        assert_eq!(db.execute(sql, [from, to, table]).unwrap(), 1);
        drop(db);
        let (store, _) = opened(&directory).unwrap();
        assert!(matches!(&*store.health().borrow(), Health::Damaged(_)), "{table}: {from}");
        store.close().await.unwrap();
        std::fs::write(database(&directory), &good).unwrap();
    }
    let (store, _) = opened(&directory).unwrap();
    assert!(matches!(&*store.health().borrow(), Health::Sound), "the columns that were made");
    store.close().await.unwrap();
}

#[tokio::test]
async fn another_journal_replaces_a_damaged_one() {
    let (_root, directory) = temporary();
    let store = filled(&directory).await;
    assert!(matches!(store.replace(Vec::new()).await, Err(StoreError::Gone)), "it is sound");
    let (id, log) = (store.journal_id().to_owned(), std::fs::read(directory.join(LOG)).unwrap());
    store.close().await.unwrap();
    let garbage = vec![0x5a; 9999];
    std::fs::write(database(&directory), &garbage).unwrap();
    std::fs::write(directory.join(LOG), &log).unwrap();
    std::fs::set_permissions(directory.join(LOG), PermissionsExt::from_mode(0o600)).unwrap();

    let (store, _) = opened(&directory).unwrap();
    let changes = vec![
        Change::PutVolume(volume("data")),
        Change::PutMount(mount("data", "unknown").into()),
        event("x"),
    ];
    let kept = store.replace(changes).await.unwrap();
    assert_eq!(*store.health().borrow(), Health::Replaced);
    assert!(store.replace(Vec::new()).await.is_err() && store.writable().is_err(), "this one is read only");
    store.close().await.unwrap();
    let aside = kept_aside(&directory);
    assert_eq!(aside.len(), 2, "{aside:?}");
    assert!(aside[0] == kept && std::fs::read(&aside[0]).unwrap() == garbage);
    assert!(std::fs::read(&aside[1]).unwrap() == log, "its log is kept with it");

    let (store, loaded) = opened(&directory).unwrap();
    assert_eq!(*store.health().borrow(), Health::Sound);
    assert_ne!(store.journal_id(), id);
    assert!(loaded.mounts.len() == 1 && loaded.volumes.len() == 1);
    assert_eq!(store.event_sequence(), 1);
    store.close().await.unwrap();
}

/// Killed between any two steps of the change: it is begun again or finished, and the old rows never come back.
#[tokio::test]
async fn a_replacement_that_was_begun_is_finished() {
    for step in 0..3 {
        let (_root, directory) = temporary();
        filled(&directory).await.close().await.unwrap();
        std::fs::write(database(&directory), [7; 5000]).unwrap();
        let (store, _) = opened(&directory).unwrap();
        store.replace(vec![Change::PutMount(mount("data", "unknown").into())]).await.unwrap();
        store.close().await.unwrap();
        // Back to when it had its other name.
        let aside = kept_aside(&directory);
        std::fs::rename(database(&directory), directory.join("csid.db.next")).unwrap();
        if step < 2 {
            std::fs::rename(&aside[0], directory.join(NAME)).unwrap();
        }
        if step < 1 {
            std::fs::write(directory.join(LOG), "its log").unwrap();
            std::fs::set_permissions(directory.join(LOG), PermissionsExt::from_mode(0o600)).unwrap();
        }
        let (store, loaded) = opened(&directory).unwrap();
        assert_eq!(*store.health().borrow(), Health::Sound, "{step}");
        assert_eq!(loaded.mounts.len(), 1, "{step}");
        assert!(!directory.join("csid.db.next").exists());
        assert!(
            kept_aside(&directory).iter().any(|path| std::fs::read(path).unwrap() == [7; 5000]),
            "{step}"
        );
        store.close().await.unwrap();
    }
}
