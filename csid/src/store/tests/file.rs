use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;

use rusqlite::Connection;

use super::super::*;
use super::{
    assert_representative, commit, database, event, mount, open_at_once, open_journal, representative,
    temporary,
};

#[test]
fn is_private() {
    let (_root, directory) = temporary();
    let before = rustix::process::umask(rustix::fs::Mode::empty());
    let (mut journal, _) = open_journal(&directory).unwrap();
    commit(&mut journal, representative()).unwrap();
    let mode = |path: &Path| std::fs::symlink_metadata(path).unwrap().mode() & 0o7777;
    let modes = [mode(&directory), mode(&database(&directory)), mode(&directory.join("csid.db-wal"))];
    rustix::process::umask(before);
    assert_eq!(modes, [0o700, 0o600, 0o600]);
    assert!(matches!(open_at_once(&directory), Err(StoreError::Held { .. })));
    let names: Vec<_> =
        std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 2, "{names:?}");
    journal.close().unwrap();

    let refused = |path: &Path, spoil: &dyn Fn(&Path), repair: &dyn Fn(&Path)| {
        spoil(path);
        let found = open_journal(&directory).map(drop);
        assert!(matches!(found, Err(StoreError::Unsafe { .. })), "{found:?}");
        repair(path);
        open_journal(&directory).map(drop).unwrap();
    };
    let chmod =
        |mode| move |path: &Path| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    let own = |uid| move |path: &Path| chown(path, Some(uid), None).unwrap();
    let file = database(&directory);
    refused(&directory, &chmod(0o750), &chmod(0o700));
    refused(&file, &chmod(0o604), &chmod(0o600));
    if rustix::process::geteuid().is_root() {
        refused(&directory, &own(1), &own(0));
        refused(&file, &own(1), &own(0));
    }
    let aside = directory.with_extension("aside");
    let link = |path: &Path| {
        std::fs::rename(path, &aside).unwrap();
        symlink(&aside, path).unwrap();
    };
    let unlink = |path: &Path| {
        std::fs::remove_file(path).unwrap();
        std::fs::rename(&aside, path).unwrap();
    };
    refused(&file, &link, &unlink);
    refused(&directory, &link, &unlink);
    refused(&file, &|path| std::fs::hard_link(path, &aside).unwrap(), &|_| {
        std::fs::remove_file(&aside).unwrap()
    });
}

#[test]
fn damaged_or_newer_is_left_alone() {
    let (_root, directory) = temporary();
    let (mut journal, _) = open_journal(&directory).unwrap();
    let rows: Vec<_> = (0..200).map(|n| Change::PutMount(mount("data", &n.to_string()).into())).collect();
    commit(&mut journal, rows).unwrap();
    journal.close().unwrap();
    let file = database(&directory);
    let good = std::fs::read(&file).unwrap();

    let mut flipped = good.clone();
    let middle = good.len() / 2 / 4096 * 4096;
    flipped[middle..middle + 64].fill(0xa5);
    let mut newer = good.clone();
    newer[60..64].copy_from_slice(&99_u32.to_be_bytes());
    let mut foreign = good.clone();
    foreign[60..64].copy_from_slice(&0_u32.to_be_bytes());
    let half = good[..good.len() / 2].to_vec();
    for (what, bytes) in [
        ("garbage", vec![0x5a; 20_000]),
        ("text", b"hello".to_vec()),
        ("empty", Vec::new()),
        ("half", half),
        ("odd cut", good[..good.len() - 100].to_vec()),
        ("flipped", flipped),
        ("foreign", foreign),
        ("newer", newer),
    ] {
        std::fs::write(&file, &bytes).unwrap();
        match (what, open_journal(&directory).map(drop)) {
            ("newer", Err(StoreError::Newer { path, found: 99, .. })) => assert_eq!(path, file),
            ("newer", other) => panic!("{other:?}"),
            (_, Err(StoreError::Corrupt { path, .. })) => assert_eq!(path, file),
            (what, other) => panic!("{what}: {other:?}"),
        }
        assert!(std::fs::read(&file).unwrap() == bytes, "{what}: the file was changed");
        assert!(
            !directory.join("csid.db-wal").exists()
                || std::fs::read(directory.join("csid.db-wal")).unwrap().is_empty()
        );
    }

    std::fs::write(&file, &good).unwrap();
    let db = Connection::open(&file).unwrap();
    db.execute("UPDATE mounts SET phase = 'dancing' WHERE consumer = '7'", []).unwrap();
    drop(db);
    let found = open_journal(&directory).map(drop);
    assert!(matches!(&found, Err(StoreError::Corrupt { why, .. }) if why.contains("checksum")), "{found:?}");

    std::fs::remove_file(&file).unwrap();
    std::fs::write(directory.join("csid.db-wal"), "rows are in here").unwrap();
    std::fs::set_permissions(directory.join("csid.db-wal"), PermissionsExt::from_mode(0o600)).unwrap();
    assert!(matches!(open_journal(&directory), Err(StoreError::Corrupt { .. })));
    assert_eq!(std::fs::read_to_string(directory.join("csid.db-wal")).unwrap(), "rows are in here");
}

/// A log that holds commits stays as it is with a damaged file, and heals with it.
#[test]
fn log_beside_damage_is_kept() {
    let (_root, directory) = temporary();
    let (mut journal, _) = open_journal(&directory).unwrap();
    commit(&mut journal, representative()).unwrap();
    // Gone without a close, as by kill -9.
    let (file, log) = (database(&directory), directory.join("csid.db-wal"));
    let (good, rows) = (std::fs::read(&file).unwrap(), std::fs::read(&log).unwrap());
    drop(journal);
    std::fs::write(&file, vec![0; good.len()]).unwrap();
    std::fs::write(&log, &rows).unwrap();
    std::fs::set_permissions(&log, PermissionsExt::from_mode(0o600)).unwrap();
    // SQLite may read the log's pages instead of the damaged ones; it must not lose either.
    drop(open_journal(&directory));
    std::fs::write(&file, &good).unwrap();
    std::fs::write(&log, &rows).unwrap();
    std::fs::set_permissions(&log, PermissionsExt::from_mode(0o600)).unwrap();
    let (_, loaded) = open_journal(&directory).unwrap();
    assert_representative(&loaded, loaded.mounts[0].modify_index);
}

#[test]
fn full_disk_loses_nothing() {
    let (_root, directory) = temporary();
    let (mut journal, _) = open_journal(&directory).unwrap();
    commit(&mut journal, representative()).unwrap();
    let before = journal.counters;
    journal.limit_pages(Some(1));
    let many = |subject| -> Vec<_> {
        let mounts = (0..500).map(|n| Change::PutMount(mount("more", &n.to_string()).into()));
        mounts.chain([event(subject)]).collect()
    };
    let found = commit(&mut journal, many("lost")).map(drop);
    assert!(matches!(&found, Err(error @ StoreError::Full) if error.is_retryable()), "{found:?}");
    assert_eq!(journal.counters, before);
    assert_eq!(journal.mounts(&MountFilter::default()).unwrap().len(), 6);
    journal.limit_pages(None);
    commit(&mut journal, many("kept")).unwrap();
    assert_eq!(journal.counters.sequence, before.sequence + 1);
    assert_eq!(journal.mounts(&MountFilter::default()).unwrap().len(), 506);
}

/// SQLite would move the log within a commit, and ignore that the log could not be synced.
#[test]
fn long_log_moves_at_a_checkpoint_alone() {
    let (_root, directory) = temporary();
    let (mut journal, _) = open_journal(&directory).unwrap();
    let size = || std::fs::metadata(database(&directory)).unwrap().len();
    let first = size();
    journal.checkpoint().unwrap();
    for batch in 0..8 {
        let mounts = (0..2_000).map(|n| Change::PutMount(mount(&format!("v{batch}"), &n.to_string()).into()));
        commit(&mut journal, mounts.collect()).unwrap();
    }
    assert_eq!(size(), first, "a commit moved the log");
    journal.checkpoint().unwrap();
    let moved = size();
    assert!(moved > first, "the log is long");
    commit(&mut journal, vec![event("e")]).unwrap();
    journal.checkpoint().unwrap();
    assert_eq!(size(), moved, "the log is short");
}
