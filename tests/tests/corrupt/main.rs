//! A journal that is damaged, and a disk that is full: what is mounted stays, what is not sure is not changed, and there is a
//! way on.

mod anew;
mod damage;
mod disk;
mod refused;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use csid_client::{Client, MountOptions, MountRow, ReconcileOptions, ReconcileReport};
use csid_tests::ask::*;
use csid_tests::kernel::{self, Mount};
use csid_tests::world::World;

/// The journal's files by name.
type Files = BTreeMap<String, Vec<u8>>;

fn journal(w: &World) -> PathBuf {
    w.path("state/journal")
}

fn files(directory: &Path) -> Files {
    let entries = fs::read_dir(directory).expect("the journal's directory");
    let entries = entries.map(|entry| entry.expect("an entry").path());
    let name = |path: &PathBuf| path.file_name().expect("a name").to_str().expect("a plain name").to_owned();
    entries.map(|path| (name(&path), fs::read(&path).expect("a file of the journal"))).collect()
}

/// A damaged journal is left as it is, to the byte.
fn assert_untouched(w: &World, left: &Files, what: &str) {
    let mut now = files(&journal(w));
    // SQLite makes an empty log where there is none.
    now.retain(|name, bytes| left.contains_key(name) || !bytes.is_empty());
    let lengths =
        |files: &Files| files.iter().map(|(name, bytes)| (name.clone(), bytes.len())).collect::<Vec<_>>();
    assert_eq!(lengths(&now), lengths(left), "{what}");
    let changed: Vec<_> =
        left.iter().filter(|(name, bytes)| now[*name] != **bytes).map(|(name, _)| name).collect();
    assert!(changed.is_empty(), "{what}: {changed:?} were written");
}

/// Make the directory hold these files and no others.
fn put(directory: &Path, wanted: &Files) {
    for name in files(directory).keys().filter(|name| !wanted.contains_key(*name)) {
        fs::remove_file(directory.join(name)).expect("a file is removed");
    }
    for (name, bytes) in wanted {
        use std::io::Write;
        use std::os::unix::fs::OpenOptionsExt;
        let mut options = fs::OpenOptions::new();
        let mut file = options
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(directory.join(name))
            .expect("a file");
        file.write_all(bytes).expect("its bytes");
    }
}

/// Returns the mounts of csid's consumers: every mount in the world but those of the test itself.
fn mounts(w: &World) -> Vec<Mount> {
    let own = [w.path("run"), journal(w)];
    let all = kernel::volumes_below(&w.dir).expect("the mount table");
    all.into_iter().filter(|mount| !own.contains(&mount.point)).collect()
}

/// A volume with a target, one with two consumers, a block device.
async fn populated(w: &mut World) -> Client {
    w.add_plugin("p").await;
    w.add_device("p", "b");
    let client = w.start().await;
    healthy(&client, "p").await;
    let target = w.path("targets/t");
    fs::create_dir(&target).unwrap();
    let with_target = MountOptions { target: Some(target.to_str().unwrap().to_owned()), ..inline("v") };
    mounted(&client, "job", with_target).await;
    mounted(&client, "one", shared("s")).await;
    mounted(&client, "two", shared("s")).await;
    mounted(&client, "disk", block("b")).await;
    client
}

/// Returns the columns that identify the mounts, and their states.
fn facts(rows: &[MountRow]) -> Vec<[String; 8]> {
    let fact = |row: &MountRow| {
        [
            &row.namespace,
            &row.volume,
            &row.consumer,
            &row.external_id,
            &row.source,
            &row.staging,
            &row.target,
            &format!("{} {} {} {}", row.state, row.healthy, row.uid, row.access_mode),
        ]
        .map(Clone::clone)
    };
    rows.iter().map(fact).collect()
}

fn new_journal(dry_run: bool) -> ReconcileOptions {
    ReconcileOptions { new_journal: Some(true), dry_run: Some(dry_run), ..ReconcileOptions::default() }
}

/// Begin a new journal, and a connection to the csid that has it.
async fn begin_anew(w: &mut World, client: &Client) -> (ReconcileReport, Client) {
    let report = client.reconcile(new_journal(false)).await.expect("a new journal");
    let client = w.client().await;
    settled(&client).await;
    healthy(&client, "p").await;
    (report, client)
}

async fn state_of(client: &Client) -> String {
    client.manager().await.expect("the properties").state
}
