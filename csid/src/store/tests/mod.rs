#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the tests damage the file behind the store's back, and kill a child"
)]

mod damage;
mod file;
mod kill;
mod node;
mod records;
mod registry;

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rusqlite::Connection;
use serde_json::json;
use tempfile::TempDir;
use tokio::sync::broadcast;

use super::event_kind::EventKind;
use super::journal::{Done, Journal};
use super::place::JournalDirectory;
use super::registry::Registry;
use super::request::Work;
use super::rows::*;
pub(crate) use super::testing::samples;
use super::*;

fn fixture(version: u32) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/schema-{version}.db"))
}

fn temporary() -> (TempDir, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let journal = root.path().join("journal");
    (root, journal)
}

/// A journal that an older csid left.
fn of_schema(version: u32) -> (TempDir, PathBuf) {
    let (root, directory) = temporary();
    std::fs::DirBuilder::new().create(&directory).unwrap();
    std::fs::set_permissions(&directory, PermissionsExt::from_mode(0o700)).unwrap();
    std::fs::copy(fixture(version), database(&directory)).unwrap();
    std::fs::set_permissions(database(&directory), PermissionsExt::from_mode(0o600)).unwrap();
    (root, directory)
}

fn database(directory: &Path) -> PathBuf {
    directory.join("csid.db")
}

/// Opens a journal that nothing else has, or will have soon.
pub(crate) fn opened(directory: &Path) -> Result<(Store, Loaded), StoreError> {
    opened_as(directory, None)
}

/// Opens the journal of a node. The runtime directory has the same parent as the journal's. `None`: the node's name is the host's.
fn opened_as(directory: &Path, node: Option<&str>) -> Result<(Store, Loaded), StoreError> {
    unlocked(|| Store::open(directory, directory.parent().unwrap(), node))
}

fn open_journal(directory: &Path) -> Result<(Journal, Loaded), StoreError> {
    unlocked(|| open_at_once(directory))
}

fn open_at_once(directory: &Path) -> Result<(Journal, Loaded), StoreError> {
    Journal::open(&Arc::new(JournalDirectory::take(directory, directory.parent().unwrap())?), None)
}

/// Opens a journal when its lock is free, which takes up to 30 s. The thread of a handle that was dropped without `close` has the lock until
/// it ends. A process that another test forks has it until it has executed its program.
fn unlocked<T>(open: impl Fn() -> Result<T, StoreError>) -> Result<T, StoreError> {
    for _ in 0..1500 {
        match open() {
            Err(StoreError::Held { .. }) => std::thread::sleep(std::time::Duration::from_millis(20)),
            other => return other,
        }
    }
    open()
}

fn commit(journal: &mut Journal, changes: Vec<Change>) -> Result<Done, StoreError> {
    journal.commit(&[&Work::Changes(changes)])
}

pub(crate) fn mount(volume: &str, consumer: &str) -> MountRow {
    let context = BTreeMap::from([("share".to_owned(), "ä \"quoted\"\n".to_owned())]);
    MountRow {
        key: MountKey {
            namespace: "default".into(),
            volume: volume.into(),
            consumer: consumer.into(),
            tag: String::new(),
        },
        volume: VolumeKey::new("local", format!("ext-{volume}")),
        uid: 1000,
        spec: MountSpec {
            usage: Usage {
                access_mode: AccessMode::SingleNodeMultiWriter,
                attachment_mode: AttachmentMode::FileSystem,
                fs_type: "ext4".into(),
                mount_flags: vec!["noatime".into()],
                mount_group: String::new(),
                context,
                publish_context: BTreeMap::new(),
            },
            read_only: true,
            target: Some("/srv/data".into()),
            propagation: Propagation::HostToTask,
            suid: false,
            dev: true,
            restore: Restore::Hold,
            credential: Some("csid.default.vol".into()),
            registered: false,
            secrets_given: false,
        },
        status: MountStatus::default(),
        phase: Phase::Mounted,
        kept: true,
        source: format!("/var/lib/csid/plugins/local/publish/{volume}"),
        published: None,
        publish: Leg::Present,
        target: Leg::Making,
        device: None,
        error: None,
        operations: vec!["op-1".into(), "op 2".into()],
        since_usec: 1_700_000_000_000_000,
        modify_index: 0,
    }
}

fn volume(name: &str) -> VolumeRow {
    VolumeRow {
        key: VolumeKey::new("local", format!("ext-{name}")),
        namespace: "default".into(),
        volume: name.into(),
        staging: Some(format!("/var/lib/csid/plugins/local/staging/{name}")),
        stage: Leg::Present,
        backing: None,
    }
}

fn plugin(id: &str) -> PluginRow {
    PluginRow {
        id: id.into(),
        instance: "default".into(),
        number: 1,
        uid: 0,
        spec: r#"{"supervision":"external","socket":"/run/x.sock"}"#.into(),
    }
}

fn event(subject: &str) -> Change {
    let details = EventDetails::from([("success", json!(true)), ("uid", json!(7)), ("error", json!("none"))]);
    Change::Event(NewEvent { kind: EventKind::Mount, subject: subject.into(), details })
}

/// Rows that use every column and every word at least once.
fn representative() -> Vec<Change> {
    let mut block = mount("vol[0]", "job/1");
    block.key.tag = "second".into();
    block.device = Some(u64::MAX - 1);
    block.phase = Phase::Uncertain;
    block.publish = Leg::Removing;
    block.target = Leg::Absent;
    block.error = Some("NodeUnpublishVolume: DEADLINE_EXCEEDED".into());
    block.spec.target = None;
    block.spec.credential = None;
    block.spec.secrets_given = true;
    block.spec.usage.attachment_mode = AttachmentMode::BlockDevice;
    block.operations.clear();
    let phases = [Phase::Mounting, Phase::Mounted, Phase::Unmounting, Phase::Lost, Phase::Waiting];
    let modes = [
        AccessMode::SingleNodeWriter,
        AccessMode::SingleNodeReaderOnly,
        AccessMode::SingleNodeSingleWriter,
        AccessMode::MultiNodeReaderOnly,
        AccessMode::MultiNodeSingleWriter,
    ];
    let mounts = phases.into_iter().zip(modes).enumerate().map(|(n, (phase, mode))| {
        let mut row = mount("data", &format!("consumer {n}"));
        row.phase = phase;
        row.kept = n % 2 == 0;
        row.spec.usage.access_mode = mode;
        row.spec.propagation = [Propagation::Private, Propagation::Bidirectional][n % 2];
        row.spec.restore = [Restore::Auto, Restore::Hold][n % 2];
        Change::PutMount(row.into())
    });
    let mut changes = vec![
        Change::Boot("b007 marker".into()),
        Change::PutPlugin(plugin("local")),
        Change::PutPlugin(plugin("nfs.example")),
        Change::PutVolume(volume("data")),
        Change::PutVolume(VolumeRow { stage: Leg::Absent, staging: None, ..volume("vol[0]") }),
        Change::PutMount(block.into()),
        event("default/data"),
        event(""),
    ];
    changes.extend(mounts);
    changes
}

/// The same rows as [`representative`], in the order and with the index they are read back.
fn assert_representative(loaded: &Loaded, modify_index: u64) {
    let (mut plugins, mut volumes, mut mounts) = (Vec::new(), Vec::new(), Vec::new());
    for change in representative() {
        match change {
            Change::PutPlugin(row) => plugins.push(row),
            Change::PutVolume(row) => volumes.push(row),
            Change::PutMount(row) => mounts.push(MountRow { modify_index, ..Arc::unwrap_or_clone(row) }),
            _ => {}
        }
    }
    mounts.sort_by(|a, b| a.key.cmp(&b.key));
    assert_eq!(loaded.boot.as_deref(), Some("b007 marker"));
    assert!(loaded.plugins == plugins && loaded.volumes == volumes && loaded.mounts == mounts);
}

/// Makes the newest version's fixture, before there is a next one: `cargo test -p csid --lib make_fixture -- --ignored`.
#[tokio::test]
#[ignore = "writes the fixture"]
async fn make_fixture() {
    let (_root, directory) = temporary();
    let (store, _) = opened(&directory).unwrap();
    store.commit(representative(), Durability::Disk).await.unwrap();
    for swap in samples::representative_swaps() {
        samples::swap_in(&store, swap).await.unwrap();
    }
    store.close().await.unwrap();
    std::fs::copy(database(&directory), fixture(schema::KNOWN)).unwrap();
}

#[tokio::test]
async fn opens_every_older_schema() {
    for version in 1..schema::KNOWN {
        let (_root, directory) = of_schema(version);
        let (store, loaded) = opened(&directory).unwrap();
        assert_representative(&loaded, loaded.mounts[0].modify_index);
        if version >= 4 {
            samples::assert_representative_swaps(&store).await;
        }
        let (events, gap) = store.events(0, 2).await.unwrap();
        assert_eq!(
            events.iter().map(|e| (e.sequence, e.subject.as_str())).collect::<Vec<_>>(),
            [(1, "default/data"), (2, "")],
            "version {version}"
        );
        assert_eq!(events[0].details["uid"], json!(7));
        assert!(!gap, "the fixture was closed in order");
        let sequence = store.event_sequence();
        store.commit(vec![event("x")], Durability::Disk).await.unwrap();
        assert_eq!(store.event_sequence(), sequence + 1);
    }
}

/// Neither column is in an older journal.
#[tokio::test]
async fn the_plugins_path_and_the_backing_are_kept() {
    let (_root, directory) = of_schema(4);
    let mount = MountRow { published: Some("/root/private/v/m".into()), ..mount("data", "new") };
    let volume = VolumeRow { backing: Some("{}".into()), ..volume("data") };
    let (store, loaded) = opened(&directory).unwrap();
    assert!(loaded.mounts.iter().all(|row| row.published.is_none()));
    let changes = vec![Change::PutMount(mount.clone().into()), Change::PutVolume(volume.clone())];
    store.commit(changes, Durability::Disk).await.unwrap();
    let moved = MountRow { published: Some("/root/private/v/other".into()), ..mount };
    store.commit(vec![Change::PutMount(moved.clone().into())], Durability::Disk).await.unwrap();
    store.close().await.unwrap();
    let (_, loaded) = opened(&directory).unwrap();
    let found = loaded.mounts.iter().find(|row| row.key == moved.key).unwrap();
    assert_eq!(found.published, moved.published);
    assert!(loaded.volumes.contains(&volume));
}

/// Each csid writes and reads an absent text of a row as an empty one.
#[tokio::test]
async fn absent_texts_of_rows_are_written_as_empty() {
    let (_root, directory) = temporary();
    let (row, volume) = (mount("data", "job"), VolumeRow { staging: None, ..volume("data") });
    assert!(row.published.is_none() && row.error.is_none() && volume.backing.is_none());
    let (store, _) = opened(&directory).unwrap();
    let changes = vec![Change::PutVolume(volume.clone()), Change::PutMount(row.into())];
    store.commit(changes, Durability::Disk).await.unwrap();
    store.close().await.unwrap();
    let db = Connection::open(database(&directory)).unwrap();
    let texts =
        |sql: &str| -> [String; 2] { db.query_row(sql, [], |row| Ok([row.get(0)?, row.get(1)?])).unwrap() };
    assert_eq!(texts("SELECT published, error FROM mounts"), ["", ""]);
    assert_eq!(texts("SELECT staging, backing FROM volumes"), ["", ""]);
    drop(db);
    let (_, loaded) = opened(&directory).unwrap();
    let row = &loaded.mounts[0];
    assert!(row.published.is_none() && row.error.is_none() && loaded.volumes == [volume]);
}

/// Of an older csid a plugin's instance is in its spec alone.
#[test]
fn plugin_row_has_the_instance_of_its_spec() {
    let (_root, directory) = of_schema(3);
    let db = Connection::open(database(&directory)).unwrap();
    checksum::add(&db).unwrap();
    for (id, spec) in [("some", r#"{"instance":"b"}"#), ("none", r#"{"argv":["/x"]}"#), ("wrong", "not JSON")]
    {
        let sql = "INSERT INTO plugins VALUES (?1, 7, ?2, checksum(?1, 7, ?2))";
        db.execute(sql, [id, spec]).unwrap();
    }
    drop(db);
    let (_, loaded) = open_journal(&directory).unwrap();
    let found =
        |id: &str| loaded.plugins.iter().find(|row| row.id == id).map(|row| (&*row.instance, row.uid));
    assert_eq!(found("some"), Some(("b", 7)));
    assert_eq!([found("none"), found("wrong")], [Some(("default", 7)); 2]);
}

#[tokio::test]
async fn index_of_any_row_is_never_reused() {
    let (_root, directory) = temporary();
    let (store, _) = opened(&directory).unwrap();
    let rows = representative();
    let Some(row) = rows.iter().find_map(|change| match change {
        Change::PutMount(row) => Some(row.clone()),
        _ => None,
    }) else {
        panic!("no mount")
    };
    let delete = || Change::DeleteMount(row.key.clone());
    for changes in [
        Some(rows),
        Some(vec![event("x")]),
        Some(vec![Change::PutMount(row.clone())]),
        Some(vec![Change::PutMount(row.clone()), delete()]),
        None,
        Some(vec![delete()]),
        Some(vec![]),
    ] {
        match changes {
            Some(changes) => store.commit(changes, Durability::Disk).await.unwrap(),
            None => {
                samples::swap_in(&store, samples::new(samples::record("data", &["job"]))).await.unwrap();
            }
        }
        let index = store.modify_index();
        let copy = directory.parent().unwrap().join(format!("copy-{index}/journal"));
        std::fs::DirBuilder::new().recursive(true).create(&copy).unwrap();
        std::fs::set_permissions(&copy, PermissionsExt::from_mode(0o700)).unwrap();
        for name in ["csid.db", "csid.db-wal"] {
            std::fs::copy(directory.join(name), copy.join(name)).unwrap();
        }
        assert_eq!(opened(&copy).unwrap().0.modify_index(), index);
    }
}

#[tokio::test]
async fn keeps_rows_and_identity() {
    let (_root, directory) = temporary();
    let (store, loaded) = opened(&directory).unwrap();
    assert!(loaded.boot.is_none() && loaded.mounts.is_empty());
    let id = store.journal_id().to_owned();
    assert_eq!(id.len(), 32);
    store.commit(representative(), Durability::Process).await.unwrap();
    let index = store.modify_index();
    store.ping().await.unwrap();
    store.close().await.unwrap();
    assert!(matches!(store.ping().await, Err(StoreError::Gone)));

    let (store, loaded) = opened(&directory).unwrap();
    assert_representative(&loaded, index);
    assert_eq!(store.journal_id(), id);
    let found = |filter| async { store.mounts(filter).await.unwrap() };
    assert_eq!(found(MountFilter::default()).await.len(), 6);
    let lost = found(MountFilter { phase: Some(Phase::Lost), uid: Some(1000), ..Default::default() }).await;
    assert_eq!(lost.len(), 1);
    assert_eq!(lost[0].1, "/var/lib/csid/plugins/local/staging/data");
    let quoted = found(MountFilter { consumer: Some("' OR 1 --".into()), ..Default::default() }).await;
    assert!(quoted.is_empty());

    let key = lost[0].0.key.clone();
    let gone = vec![
        Change::DeleteMount(key.clone()),
        Change::DeleteVolume(lost[0].0.volume.clone()),
        Change::DeletePlugin("local".into(), "default".into()),
        Change::DeletePlugin("local".into(), "never there".into()),
    ];
    store.commit(gone, Durability::Disk).await.unwrap();
    assert!(store.modify_index() > index);
    drop(store);
    let (_, loaded) = opened(&directory).unwrap();
    assert_eq!((loaded.plugins.len(), loaded.volumes.len(), loaded.mounts.len()), (1, 1, 5));
    assert!(loaded.mounts.iter().all(|row| row.key != key));
}

#[test]
fn first_event_of_a_block_needs_a_sync() {
    let (_root, directory) = temporary();
    let (mut journal, _) = open_journal(&directory).unwrap();
    for reserves in [true, false] {
        assert_eq!(commit(&mut journal, vec![event("e")]).unwrap().reserves, reserves);
    }
    journal.sync().unwrap();
}

#[tokio::test]
async fn syncs_are_counted_apart_from_commits() {
    let (_root, directory) = temporary();
    let (store, _) = opened(&directory).unwrap();
    store.commit(vec![event("reserves a block")], Durability::Process).await.unwrap();
    let counts = || [Durability::Disk, Durability::Process].map(|of| store.counts().commits(of).count());
    assert_eq!(counts(), [1, 0]);
    let syncing = store.commit_and_sync(vec![event("e")]).await.unwrap();
    syncing.ended().await.unwrap();
    store.commit(vec![event("e")], Durability::Process).await.unwrap();
    store.commit(vec![event("e")], Durability::Disk).await.unwrap();
    store.sync().await.unwrap();
    assert_eq!(counts(), [4, 2]);
    assert_eq!(store.event_sequence(), 4);
}

#[tokio::test]
async fn a_bad_request_fails_alone() {
    let (_root, directory) = temporary();
    drop(open_journal(&directory).unwrap());
    let trigger = "CREATE TRIGGER bad BEFORE INSERT ON plugins WHEN NEW.id = 'bad' \
                   BEGIN SELECT RAISE(ABORT, 'bad'); END";
    Connection::open(database(&directory)).unwrap().execute_batch(trigger).unwrap();
    let (store, _) = opened(&directory).unwrap();
    let put = |n: usize| {
        let bad = n % 10 == 3;
        let id = if bad { "bad".to_owned() } else { format!("p{n}") };
        // The bad one's first change is good, and must not stay.
        let changes =
            vec![Change::PutPlugin(plugin(&format!("first{n}"))), event("e"), Change::PutPlugin(plugin(&id))];
        let commit = store.commit(changes, Durability::Disk);
        async move { (bad, commit.await.is_err()) }
    };
    let done = futures_util::future::join_all((0..100).map(put)).await;
    assert!(done.iter().all(|(bad, failed)| bad == failed));
    assert_eq!(store.event_sequence(), 90);
    store.close().await.unwrap();
    let (_, loaded) = opened(&directory).unwrap();
    assert_eq!(loaded.plugins.len(), 180);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_writers() {
    let (_root, directory) = temporary();
    let (store, _) = opened(&directory).unwrap();
    let (mut heard, start) = (store.subscribe(), store.modify_index());
    let writers = (0..64).map(|writer| {
        let store = store.clone();
        tokio::spawn(async move {
            for n in 0..20 {
                let row = mount(&format!("v{writer}"), &n.to_string());
                let durability = if n % 2 == 0 { Durability::Disk } else { Durability::Process };
                let volume = Change::PutVolume(volume(&format!("v{writer}")));
                store
                    .commit(vec![volume, Change::PutMount(row.into()), event("e")], durability)
                    .await
                    .unwrap();
                let own = MountFilter { volume: Some(format!("v{writer}")), ..Default::default() };
                assert_eq!(store.mounts(own).await.unwrap().len(), n + 1, "an answered commit is seen");
            }
        })
    });
    for writer in futures_util::future::join_all(writers).await {
        writer.unwrap();
    }
    assert_eq!(store.event_sequence(), 1280);
    assert!(store.modify_index() - start < 1280, "none of 64 writers' commits were made together");
    let (events, gap) = store.events(1270, 100).await.unwrap();
    assert!(!gap && events.iter().map(|e| e.sequence).eq(1271..=1280));
    // The queue is bounded: a slow listener gets `Lagged`, and goes on with what is left, in order.
    assert!(matches!(heard.try_recv(), Err(broadcast::error::TryRecvError::Lagged(256))));
    assert_eq!(heard.try_recv().unwrap().sequence, 257);
    store.close().await.unwrap();
    assert_eq!(opened(&directory).unwrap().1.mounts.len(), 1280);
}

#[test]
fn events_are_bounded_and_never_renumbered() {
    let (_root, directory) = temporary();
    let (mut journal, _) = open_journal(&directory).unwrap();
    assert_eq!(journal.events(0, 9).unwrap(), (vec![], false));
    assert!(journal.events(1, 9).unwrap().1, "1 was not given out yet");
    for _ in 0..27 {
        let group: Vec<_> = (0..400).map(|_| event("e")).collect();
        commit(&mut journal, group).unwrap();
    }
    assert_eq!(journal.counters.sequence, 10_800);
    let (events, gap) = journal.events(0, u32::MAX).unwrap();
    assert!(gap && events.len() == 10_000 && events[0].sequence == 801);
    assert!(journal.events(799, 1).unwrap().1 && !journal.events(800, 1).unwrap().1);
    assert!(journal.events(u64::MAX, 1).unwrap().1);

    // The process ends, the kernel does not: nothing is lost, the numbers go on.
    let counters = journal.counters;
    drop(journal);
    let (journal, _) = open_journal(&directory).unwrap();
    assert_eq!(journal.counters, counters);
    assert!(!journal.events(10_800, 1).unwrap().1);
    drop(journal);

    // Another boot: what was not synced may be lost, so the reserved numbers are not given again and there is
    // a gap.
    other_boot(&directory);
    let (mut journal, _) = open_journal(&directory).unwrap();
    assert!(journal.counters.modify_index > counters.modify_index);
    assert!(journal.counters.sequence >= 20_000, "{:?}", journal.counters);
    assert!(journal.events(10_800, 1).unwrap().1 && journal.events(12_345, 1).unwrap().1);
    let first = commit(&mut journal, vec![event("after")]).unwrap().events[0].sequence;
    assert!(first > 20_000);
    assert!(!journal.events(first - 1, 1).unwrap().1 && journal.events(first - 2, 1).unwrap().1);

    // Closed in order: no gap, even over a boot.
    journal.close().unwrap();
    other_boot(&directory);
    let (mut journal, _) = open_journal(&directory).unwrap();
    assert_eq!(journal.events(first, 1).unwrap(), (vec![], false));
    assert_eq!(commit(&mut journal, vec![event("next")]).unwrap().events[0].sequence, first + 1);
}

fn other_boot(directory: &Path) {
    let db = Connection::open(database(directory)).unwrap();
    checksum::add(&db).unwrap();
    let sql = "UPDATE meta SET value = 'other', sum = checksum(key, 'other') WHERE key = 'events_boot'";
    db.execute(sql, []).unwrap();
}
