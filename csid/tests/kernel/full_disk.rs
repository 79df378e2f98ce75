use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use csid::store::event_kind::EventKind;
use csid::store::rows::{EventDetails, NewEvent, PluginRow};
use csid::store::{Change, Durability, Store, StoreError};
use rustix::mount::{MountFlags, mount};

use crate::{apart_async, directory};

fn name(n: usize) -> String {
    format!("p{n:05}")
}

fn plugin(n: usize) -> Vec<Change> {
    let spec = format!("{{\"argv\":[\"{}\"]}}", "x".repeat(3000));
    let event =
        NewEvent { kind: EventKind::PluginRegistered, subject: name(n), details: EventDetails::new() };
    vec![
        Change::PutPlugin(PluginRow { id: name(n), instance: "default".into(), number: 1, uid: 0, spec }),
        Change::Event(event),
    ]
}

fn fill(disk: &Path) {
    let mut filler = File::create(disk.join("filler")).unwrap();
    while filler.write_all(&[0; 4096]).is_ok() {}
}

/// Commit new plugins, some at once, until one is refused: how many were kept, and the first that is not.
async fn until_full(store: &Store, first: usize) -> (u64, usize) {
    let (mut kept, mut next) = (0, first);
    loop {
        let group = (next..next + 50).map(|n| {
            let durability = if n % 2 == 0 { Durability::Disk } else { Durability::Process };
            store.commit(plugin(n), durability)
        });
        let (done, full): (Vec<_>, Vec<_>) =
            futures_util::future::join_all(group).await.into_iter().partition(Result::is_ok);
        (kept, next) = (kept + done.len() as u64, next + 50);
        if !full.is_empty() {
            assert!(full.iter().all(|answer| matches!(answer, Err(StoreError::Full))), "{full:?}");
            return (kept, next);
        }
        assert!(next < 20_000, "it was never full");
    }
}

async fn open(journal: &Path) -> (Store, Vec<String>) {
    loop {
        match Store::open(journal, journal.parent().unwrap(), None) {
            Ok((store, loaded)) => {
                return (store, loaded.plugins.into_iter().map(|plugin| plugin.id).collect());
            }
            // The thread of the store before is about to end.
            Err(StoreError::Held { .. }) => tokio::time::sleep(Duration::from_millis(5)).await,
            Err(error) => panic!("{error:?}"),
        }
    }
}

/// A small file system that somebody else fills: errors, and nothing that was answered is lost, also when
/// csid is started while it is full.
#[test]
fn loses_nothing() {
    apart_async("full_disk::loses_nothing", |root| async move {
        let disk = directory(root.join("disk"));
        mount("kernel-test", &disk, "tmpfs", MountFlags::empty(), Some(c"mode=700,size=24m")).unwrap();
        let journal = disk.join("journal");
        let (store, _) = open(&journal).await;
        for n in 0..20 {
            store.commit(plugin(n), Durability::Disk).await.unwrap();
        }
        let mut first = 20;
        for _ in 0..3 {
            fill(&disk);
            let before = store.event_sequence();
            let (kept, next) = until_full(&store, first).await;
            assert_eq!(store.event_sequence() - before, kept);
            store.ping().await.unwrap();
            assert!(!store.events(before - 1, 10).await.unwrap().0.is_empty(), "reads go on");
            fs::remove_file(disk.join("filler")).unwrap();
            for n in first..next {
                store.commit(plugin(n), Durability::Process).await.unwrap();
            }
            first = next;
        }
        let all: Vec<_> = (0..first).map(name).collect();
        fill(&disk);
        drop(store);
        let (store, found) = open(&journal).await;
        assert_eq!(found, all);
        let (kept, _) = until_full(&store, first).await;
        store.ping().await.unwrap();
        drop(store);
        let (store, found) = open(&journal).await;
        assert_eq!(found.len(), all.len() + kept as usize);
        assert_eq!(found[..all.len()], all);
        fs::remove_file(disk.join("filler")).unwrap();
        store.commit(plugin(first), Durability::Disk).await.unwrap();
        store.close().await.unwrap();
    });
}
