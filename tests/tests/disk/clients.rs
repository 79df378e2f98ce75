//! Clients that mount and unmount at random, and note requests and answers in a record. The answers say which mounts there must be.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::File;
use std::rc::Rc;

use csid_client::{Client, Error, Kind, MountFilter, MountOptions, Restore};
use csid_tests::ask::*;
use csid_tests::dice::Dice;
use csid_tests::kernel;
use csid_tests::power::record::{self, Entry};
use csid_tests::world::{World, eventually};

pub const CLIENTS: u64 = 4;
pub const VOLUMES: u64 = 6;
/// A volume that the plugin refuses to publish. csid rolls the mount back.
pub const REFUSED: &str = "refused";

/// The state that a mount must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    Mounted,
    Gone,
    Either,
}

/// By volume and consumer.
pub type Dues = BTreeMap<(String, String), Due>;

/// Returns the states that mounts must have at the end of `record`, by the notes of the clients in it.
pub fn dues(before: &Dues, record: &[Entry]) -> Dues {
    let mut dues = before.clone();
    for entry in record {
        let Entry::Note(note) = entry else { continue };
        let words: Vec<_> = note.split(' ').collect();
        let [what, volume, consumer] = words[..] else { continue };
        let due = dues.entry((volume.to_owned(), consumer.to_owned())).or_insert(Due::Gone);
        *due = match (what, *due) {
            ("mounted", _) => Due::Mounted,
            ("unmounted" | "refused", _) => Due::Gone,
            // Asked for what is so already, it stays so.
            ("mount", Due::Mounted) => Due::Mounted,
            ("unmount", Due::Gone) => Due::Gone,
            _ => Due::Either,
        };
    }
    dues
}

/// Returns a consumer's option: the mounts of every other consumer are restored by csid.
pub fn restore(consumer: &str) -> Restore {
    if consumer.ends_with(['0', '2']) { Restore::Auto } else { Restore::Hold }
}

pub fn note(record: &File, text: &str) {
    record::append(record, &format!("note {text}"), b"").expect("the record");
}

/// Mounts and unmounts until `stop`, or until csid is gone. Returns how often there was no space.
pub async fn caller(
    client: Client,
    record: File,
    consumer: String,
    mut dice: Dice,
    stop: Rc<Cell<bool>>,
) -> usize {
    let mut full = 0;
    while !stop.get() {
        let refused = dice.once_in(10);
        let volume = if refused { REFUSED.to_owned() } else { format!("v{}", dice.below(VOLUMES)) };
        let mounts = dice.below(5) < 3;
        let [ask, answer] = if mounts { ["mount", "mounted"] } else { ["unmount", "unmounted"] };
        note(&record, &format!("{ask} {volume} {consumer}"));
        let result = if mounts {
            let options = MountOptions { restore: Some(restore(&consumer)), ..shared(&volume) };
            mount(&client, &consumer, options).await.map(drop)
        } else {
            unmount(&client, &volume, &consumer).await
        };
        match result {
            Ok(()) => note(&record, &format!("{answer} {volume} {consumer}")),
            Err(Error::Csid(error)) if refused && error.kind == Kind::PluginError => {
                note(&record, &format!("refused {volume} {consumer}"));
            }
            Err(Error::Csid(error)) if error.message.contains("no space") => {
                // Uncertain: it was done, and that could not be written.
                assert!([Kind::Internal, Kind::Uncertain].contains(&error.kind), "{error:?}");
                assert_eq!(error.details.retryable, Some(true), "{error:?}");
                full += 1;
            }
            Err(Error::Csid(error)) if error.kind == Kind::ShuttingDown => break,
            Err(Error::Disconnected(_)) => break,
            Err(other) => panic!("{ask} {volume} {consumer}: {other:?}"),
        }
    }
    full
}

/// Waits until csid is at rest, and checks that each mount has the state that was answered.
pub async fn check(w: &mut World, client: &Client, dues: &mut Dues) {
    settled(client).await;
    let mut rows = Vec::new();
    eventually("what was begun is done or undone", async || {
        rows = client.list_mounts(MountFilter::default()).await.expect("the rows");
        client.list_operations().await.expect("the operations").is_empty()
            && rows.iter().all(|row| row.state == "mounted")
    })
    .await;
    let published = kernel::volumes_below(&w.path("state/plugins/p/live/publish")).expect("the mount table");
    assert_eq!(published.len(), rows.len(), "{published:#?} {rows:#?}");
    let mut found: BTreeMap<_, _> =
        rows.into_iter().map(|row| ((row.volume.clone(), row.consumer.clone()), row)).collect();
    for (key, due) in dues {
        let Some(row) = found.remove(key) else {
            assert_ne!(*due, Due::Mounted, "{key:?} was answered and is gone");
            *due = Due::Gone;
            continue;
        };
        assert_ne!(*due, Due::Gone, "{key:?} was asked away and is {}", row.state);
        *due = Due::Mounted;
        assert_eq!(kernel::stacked(row.source.as_ref()).expect("the mount table"), 1, "{row:?}");
    }
    assert!(found.is_empty(), "nobody asked for {found:?}");
}
