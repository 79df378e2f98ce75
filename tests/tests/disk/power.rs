//! The power goes at any moment: csid starts again from a disk with what was synced and a random part of what was not.
//! What was answered is so, whatever the disk kept; what was not answered is so or not, and nothing in between.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use csid::store::rows::Phase;
use csid::store::{Health, Store, StoreError};
use csid_client::{Client, Error, Event, Kind, MountFilter, ReconcileOptions, Restore};
use csid_tests::ask::*;
use csid_tests::dice::Dice;
use csid_tests::kernel;
use csid_tests::power::disk::{Disk, cut};
use csid_tests::power::record::{self, Entry};
use csid_tests::power::vfs::broken;
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, count, eventually, world};

use crate::clients::{CLIENTS, Due, Dues, REFUSED, caller, dues, note, restore};
use crate::rounds;

/// Power cuts with a reboot, in one world.
const CUTS: usize = 30;
/// Other moments of each kind, of the same record, at which only the journal is looked at.
const MOMENTS: usize = 4;

/// The highest event sequence that a client has received in `record`.
fn answer(record: &[Entry]) -> u64 {
    let sequence = |entry: &Entry| match entry {
        Entry::Note(note) => note.strip_prefix("event ")?.parse().ok(),
        _ => None,
    };
    record.iter().rev().find_map(sequence).unwrap_or(0)
}

/// The events that clients have received, by sequence.
type Told = Rc<RefCell<BTreeMap<u64, (String, String, u64)>>>;

fn tell(answer: &Told, record: &File, event: Event) {
    let Event { sequence, realtime_usec, kind, subject, .. } = event;
    let now = (kind, subject, realtime_usec);
    let before = answer.borrow_mut().insert(sequence, now.clone());
    assert!(before.is_none_or(|before| before == now), "event {sequence} was another before");
    note(record, &format!("event {sequence}"));
}

/// Read the events, until the connection is gone.
async fn listener(client: Client, record: File, answer: Told) {
    let mut since = answer.borrow().keys().next_back().copied().unwrap_or(0);
    while let Ok((events, _)) = client.get_events(since, 1000).await {
        since = events.last().map_or(since, |event| event.sequence);
        events.into_iter().for_each(|event| tell(&answer, &record, event));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

struct Run<'w> {
    w: &'w mut World,
    dice: Dice,
    /// What was on the disk when the record began, and what must have been true.
    disk: Disk,
    dues: Dues,
    answer: Told,
    journal: String,
    moments: u64,
    checkpoints: usize,
    /// Mounts that the plugin refuses, and that were under way when the power went.
    refused: usize,
}

impl Run<'_> {
    fn record(&self) -> PathBuf {
        self.w.path("record")
    }

    /// Clients work for a random while, then csid is killed, or stopped.
    async fn work(&mut self, client: Client) {
        let local = tokio::task::LocalSet::new();
        let record = self.record();
        let open = || record::open(&record).expect("the record");
        let mut callers = Vec::new();
        // A single writer has no other writer's sync to share.
        for number in 0..self.dice.of(&[1, CLIENTS]) {
            let (client, dice) = (self.w.client().await, Dice::new(self.dice.bits(), number));
            let caller = caller(client, open(), format!("c{number}"), dice, Rc::default());
            callers.push(local.spawn_local(caller));
        }
        let listener = local.spawn_local(listener(client, open(), self.answer.clone()));
        let lasts = Duration::from_millis(self.dice.below(300));
        local.run_until(tokio::time::sleep(lasts)).await;
        if self.dice.once_in(10) {
            local.run_until(self.w.stop()).await;
        } else {
            self.w.kill();
        }
        for caller in callers {
            assert_eq!(local.run_until(caller).await.expect("a client"), 0, "there is space");
        }
        local.run_until(listener).await.expect("the listener");
    }

    /// The power goes and comes back.
    async fn cut(&mut self) -> Client {
        let record = record::read(&self.record()).expect("the record");
        self.w.reboot().await;
        self.w.another_boot_id();
        self.other_moments(&record).await;

        let disk = cut(&self.disk, &record, &mut self.dice);
        put(&self.w.path("state/journal"), &disk);
        // What csid made and did not sync is there or not.
        for path in kernel::tree(&self.w.path("state/plugins")).expect("the paths").iter().rev() {
            if self.dice.once_in(5) {
                let _ = fs::remove_dir(path);
            }
        }
        fs::remove_file(self.record()).expect("the record");
        let writes = |entry: &Entry| matches!(entry, Entry::Write { file, .. } if file == "csid.db");
        self.checkpoints += usize::from(record.iter().any(writes));
        (self.dues, self.disk) = (dues(&self.dues, &record), disk);
        self.w.start().await
    }

    /// The journal alone, as it would have been had the power gone earlier: anywhere, and where the least may be
    /// missing, right after a client received something.
    async fn other_moments(&mut self, record: &[Entry]) {
        let notes = |word: &str| -> Vec<usize> {
            let has = |entry: &Entry| matches!(entry, Entry::Note(note) if note.contains(word));
            (0..record.len()).filter(|at| has(&record[*at])).collect()
        };
        let anywhere: Vec<_> = (0..record.len()).collect();
        for moments in [notes("mounted "), notes("event "), anywhere] {
            for _ in 0..MOMENTS.min(moments.len()) {
                let end = self.dice.of(&moments);
                self.moment(&record[..=end]).await;
            }
        }
    }

    async fn moment(&mut self, record: &[Entry]) {
        let directory = self.w.path("moment");
        put(&directory, &cut(&self.disk, record, &mut self.dice));
        let mut opened = None;
        // A process that another test has begun to start holds what was open here, until it is another program.
        eventually("nobody holds the journal", async || {
            let result = Store::open(&directory, &self.w.path("another-run"), None);
            let held = matches!(result, Err(StoreError::Held { .. }));
            opened = Some(result);
            !held
        })
        .await;
        let (store, loaded) = opened.expect("it was tried").expect("the journal");
        assert_eq!(*store.health().borrow(), Health::Sound, "no power cut spoils the journal");
        // csid makes a mount again whose answer the power cut may have hidden, and ends an unmount.
        let returns: BTreeMap<_, _> = loaded
            .mounts
            .iter()
            .map(|row| ((row.key.volume.clone(), row.key.consumer.clone()), (row.kept, row.phase)))
            .collect();
        for (key, due) in dues(&self.dues, record) {
            let found = returns.get(&key);
            let right = match (due, found) {
                (Due::Mounted, found) => matches!(found, Some((true, _) | (_, Phase::Mounting))),
                (Due::Gone, found) => {
                    matches!(found, None | Some((false, Phase::Unmounting | Phase::Uncertain)))
                }
                (Due::Either, _) => true,
            };
            assert!(right, "{key:?} must be {due:?} at entry {}, its row is {found:?}", record.len());
        }
        let answer = answer(record);
        assert!(store.event_sequence() >= answer, "{} after event {answer}", store.event_sequence());
        store.close().await.expect("the journal is closed");
        self.moments += 1;
    }

    /// csid has restored: what was answered is so.
    async fn check(&mut self, client: &Client) {
        healthy(client, "p").await;
        settled(client).await;
        assert!(!self.w.status().contains("damaged"), "no power cut spoils the journal: {}", self.w.status());
        let mut rows = Vec::new();
        eventually("every mount is restored or lost", async || {
            rows = client.list_mounts(MountFilter::default()).await.expect("the rows");
            client.list_operations().await.expect("the operations").is_empty()
                && rows
                    .iter()
                    .all(|row| row.volume == REFUSED || ["mounted", "lost"].contains(&row.state.as_str()))
        })
        .await;
        let record = record::open(&self.record()).expect("the record");
        // A mount that was under way is wanted after a power cut, also one that the plugin was about to refuse.
        for row in rows.extract_if(.., |row| row.volume == REFUSED) {
            let key = (row.volume, row.consumer);
            assert_eq!(self.dues.get(&key), Some(&Due::Either), "nobody was answered {key:?}");
            note(&record, &format!("unmount {REFUSED} {}", key.1));
            unmount(client, REFUSED, &key.1).await.expect("an unmount");
            note(&record, &format!("unmounted {REFUSED} {}", key.1));
            self.refused += 1;
        }
        let mut found: BTreeMap<_, _> =
            rows.into_iter().map(|row| ((row.volume.clone(), row.consumer.clone()), row)).collect();
        for (key, due) in &mut self.dues {
            let Some(row) = found.remove(key) else {
                // What csid undid by itself it may undo again: nobody was answered.
                assert_ne!(*due, Due::Mounted, "{key:?} was answered and is gone");
                continue;
            };
            assert_ne!(*due, Due::Gone, "{key:?} was asked away and is {}", row.state);
            *due = Due::Mounted;
            let state = if restore(&row.consumer) == Restore::Auto { "mounted" } else { "lost" };
            assert_eq!(row.state, state, "{row:?}");
            let mounted = kernel::stacked(row.source.as_ref()).expect("the mount table");
            assert_eq!(mounted, usize::from(state == "mounted"), "{row:?}");
        }
        assert!(found.is_empty(), "nobody asked for {found:?}");
        let manager = client.manager().await.expect("the properties");
        assert_eq!(manager.journal_id, self.journal, "it is the same journal");
        let newest = self.answer.borrow().keys().next_back().copied().unwrap_or(0);
        assert!(manager.event_sequence >= newest, "events begin again after {newest}");
        events(client, 0).await.into_iter().for_each(|event| tell(&self.answer, &record, event));
    }
}

/// `directory` holds `disk` and nothing else.
fn put(directory: &Path, disk: &Disk) {
    let _ = fs::DirBuilder::new().create(directory);
    fs::set_permissions(directory, std::os::unix::fs::PermissionsExt::from_mode(0o700)).expect("a directory");
    for entry in fs::read_dir(directory).expect("a directory") {
        fs::remove_file(entry.expect("an entry").path()).expect("an empty directory");
    }
    for (name, bytes) in disk {
        let mut options = OpenOptions::new();
        let mut file =
            options.write(true).create_new(true).mode(0o600).open(directory.join(name)).expect("a file");
        file.write_all(bytes).expect("its bytes");
    }
}

fn cuts(seed: u64) {
    world(async move |w| {
        let record = w.path("record").to_str().expect("UTF-8").to_owned();
        w.environment.insert("CSID_RECORD".to_owned(), record);
        let refuse = Rule::always("NodePublishVolume", Act::Fail(3)).of(REFUSED);
        w.add_plugin("p").await.rules([refuse]);
        let mut client = w.start().await;
        let mut run = Run {
            w,
            dice: Dice::new(seed, 0),
            disk: Disk::new(),
            dues: Dues::new(),
            answer: Told::default(),
            journal: client.manager().await.expect("the properties").journal_id,
            moments: 0,
            checkpoints: 0,
            refused: 0,
        };
        // The journal's birth: at each of its moments.
        let birth = record::read(&run.record()).expect("the record");
        assert!(
            birth.contains(&Entry::Sync { file: "csid.db-wal".to_owned() }),
            "csid's writes are recorded"
        );
        healthy(&client, "p").await;
        for cut in 0..CUTS {
            // With a restart in between, some times.
            while run.dice.once_in(3) {
                run.work(client).await;
                client = run.w.start().await;
            }
            run.work(client).await;
            client = run.cut().await;
            run.check(&client).await;
            eprintln!("CSID_SEED={seed}: cut {cut} was good");
        }
        for end in 0..birth.len() {
            (run.disk, run.dues) = (Disk::new(), Dues::new());
            run.moment(&birth[..=end]).await;
        }
        for row in client.list_mounts(MountFilter::default()).await.expect("the rows") {
            unmount(&client, &row.volume, &row.consumer).await.expect("an unmount");
        }
        // The directories of a mount whose row never reached the disk.
        let options = ReconcileOptions { remove_orphans: Some(true), ..ReconcileOptions::default() };
        let report = client.reconcile(options).await.expect("a report");
        assert!(report.failed.is_empty(), "{report:?}");
        run.w.nothing_left(&client).await;
        count("power cuts", CUTS);
        count("other moments of a power cut", run.moments as usize);
        count("power cuts around a checkpoint", run.checkpoints);
        count("refused mounts under way at a power cut", run.refused);
    });
}

#[test]
fn answered_calls_survive_a_power_cut() {
    rounds().for_each(cuts);
}

#[test]
fn failed_sync_of_the_journal_is_damage() {
    world(async move |w| {
        let record = w.path("record");
        w.environment.insert("CSID_RECORD".to_owned(), record.to_str().expect("UTF-8").to_owned());
        w.add_plugin("p").await;
        let client = w.start().await;
        healthy(&client, "p").await;
        let answered = mount(&client, "before", shared("v")).await.expect("a mount");
        fs::write(broken(&record), "").expect("a broken disk");
        let error = mount(&client, "after", shared("v")).await.map(drop).expect_err("nothing is on the disk");
        let Error::Csid(error) = error else { panic!("{error:?}") };
        assert_eq!(error.kind, Kind::StateCorrupt, "{error:?}");
        assert!(error.message.contains("cannot sync its log"), "{error:?}");
        // The disk works again. What it has lost meanwhile is not known.
        fs::remove_file(broken(&record)).expect("a broken disk");
        let refused = unmount(&client, "v", "before").await.expect_err("the journal is damaged");
        assert!(matches!(&refused, Error::Csid(error) if error.kind == Kind::StateCorrupt), "{refused:?}");
        assert_eq!(kernel::stacked(answered.source.as_ref()).expect("the mount table"), 1);

        // The kernel shows the next csid what is not on the disk.
        w.stop().await;
        let client = w.start().await;
        let refused = unmount(&client, "v", "before").await.expect_err("the journal is damaged");
        assert!(
            matches!(&refused, Error::Csid(error) if error.message.contains("could not be synced since the host booted")),
            "{refused:?}"
        );
        // After another boot the journal is what the disk has.
        w.reboot().await;
        w.another_boot_id();
        let client = w.start().await;
        healthy(&client, "p").await;
        let rows = client.list_mounts(MountFilter::default()).await.expect("the rows");
        assert!(rows.iter().any(|row| row.consumer == "before" && row.state == "lost"), "{rows:?}");
        for row in rows {
            unmount(&client, "v", &row.consumer).await.expect("an unmount");
        }
        w.nothing_left(&client).await;
    });
}
