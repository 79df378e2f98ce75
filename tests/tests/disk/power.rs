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

use csid::store::{Health, Store};
use csid_client::{Client, Error, Event, Kind, MountFilter, MountOptions, ReconcileOptions, Restore};
use csid_tests::ask::*;
use csid_tests::dice::Dice;
use csid_tests::kernel;
use csid_tests::power::disk::{Disk, cut};
use csid_tests::power::record::{self, Entry};
use csid_tests::script::{Act, Rule};
use csid_tests::world::{World, count, eventually, world};

use crate::rounds;

const CLIENTS: u64 = 4;
const VOLUMES: u64 = 6;
/// What the plugin refuses to publish: csid undoes the mount, and syncs nothing of it.
const REFUSED: &str = "refused";
/// Power cuts with a reboot, in one world.
const CUTS: usize = 30;
/// Other moments of each kind, of the same record, at which only the journal is looked at.
const MOMENTS: usize = 4;

/// What must be true of a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Due {
    Mounted,
    Gone,
    Either,
}

/// By volume and consumer.
type Dues = BTreeMap<(String, String), Due>;

/// What must be true at the end of `record`, by what the clients noted in it.
fn dues(before: &Dues, record: &[Entry]) -> Dues {
    let mut dues = before.clone();
    for entry in record {
        let Entry::Note(note) = entry else { continue };
        let words: Vec<_> = note.split(' ').collect();
        let [what, volume, consumer] = words[..] else { continue };
        let due = dues.entry((volume.to_owned(), consumer.to_owned())).or_insert(Due::Gone);
        *due = match (what, *due) {
            ("mounted", _) => Due::Mounted,
            ("unmounted", _) => Due::Gone,
            // Asked for what is so already, it stays so.
            ("mount", Due::Mounted) => Due::Mounted,
            ("unmount", Due::Gone) => Due::Gone,
            _ => Due::Either,
        };
    }
    dues
}

/// The highest event sequence that a client was told in `record`.
fn told(record: &[Entry]) -> u64 {
    let sequence = |entry: &Entry| match entry {
        Entry::Note(note) => note.strip_prefix("event ")?.parse().ok(),
        _ => None,
    };
    record.iter().rev().find_map(sequence).unwrap_or(0)
}

/// A client's: even ones want their mounts back by themselves.
fn restore(consumer: &str) -> Restore {
    if consumer.ends_with(['0', '2']) { Restore::Auto } else { Restore::Hold }
}

fn options(volume: &str, consumer: &str) -> MountOptions {
    MountOptions { restore: Some(restore(consumer)), ..shared(volume) }
}

/// The events that clients were told, by sequence.
type Told = Rc<RefCell<BTreeMap<u64, (String, String, u64)>>>;

fn tell(told: &Told, record: &File, event: Event) {
    let Event { sequence, realtime_usec, kind, subject, .. } = event;
    let now = (kind, subject, realtime_usec);
    let before = told.borrow_mut().insert(sequence, now.clone());
    assert!(before.is_none_or(|before| before == now), "event {sequence} was another before");
    note(record, &format!("event {sequence}"));
}

fn note(record: &File, text: &str) {
    record::append(record, &format!("note {text}"), b"").expect("the record");
}

/// Mount and unmount, until the connection is gone.
async fn caller(client: Client, record: File, consumer: String, mut dice: Dice) {
    loop {
        let refused = dice.once_in(10);
        let volume = if refused { REFUSED.to_owned() } else { format!("v{}", dice.below(VOLUMES)) };
        let mounts = dice.below(5) < 3;
        let [ask, answer] = if mounts { ["mount", "mounted"] } else { ["unmount", "unmounted"] };
        note(&record, &format!("{ask} {volume} {consumer}"));
        let result = if mounts {
            mount(&client, &consumer, options(&volume, &consumer)).await.map(drop)
        } else {
            unmount(&client, &volume, &consumer).await
        };
        match result {
            Ok(()) => note(&record, &format!("{answer} {volume} {consumer}")),
            Err(Error::Csid(error)) if refused && error.kind == Kind::PluginError => {}
            Err(Error::Csid(error)) if error.kind == Kind::ShuttingDown => return,
            Err(Error::Disconnected(_)) => return,
            Err(other) => panic!("{ask} {volume} {consumer}: {other:?}"),
        }
    }
}

/// Read the events, until the connection is gone.
async fn listener(client: Client, record: File, told: Told) {
    let mut since = told.borrow().keys().next_back().copied().unwrap_or(0);
    while let Ok((events, _)) = client.get_events(since, 1000).await {
        since = events.last().map_or(since, |event| event.sequence);
        events.into_iter().for_each(|event| tell(&told, &record, event));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

struct Run<'w> {
    w: &'w mut World,
    dice: Dice,
    /// What was on the disk when the record began, and what must have been true.
    disk: Disk,
    dues: Dues,
    told: Told,
    journal: String,
    moments: u64,
    checkpoints: usize,
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
        let mut tasks = Vec::new();
        // One alone has nobody whose sync is good for him too.
        for number in 0..self.dice.of(&[1, CLIENTS]) {
            let (client, dice) = (self.w.client().await, Dice::new(self.dice.bits(), number));
            tasks.push(local.spawn_local(caller(client, open(), format!("c{number}"), dice)));
        }
        tasks.push(local.spawn_local(listener(client, open(), self.told.clone())));
        let lasts = Duration::from_millis(self.dice.below(300));
        local.run_until(tokio::time::sleep(lasts)).await;
        if self.dice.once_in(10) {
            local.run_until(self.w.stop()).await;
        } else {
            self.w.kill();
        }
        for task in tasks {
            local.run_until(task).await.expect("a client");
        }
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
    /// missing, right after somebody was told something.
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
        let (store, loaded) = Store::open(&directory, &self.w.path("another-run")).expect("the journal");
        assert_eq!(*store.health().borrow(), Health::Sound, "no power cut spoils the journal");
        let kept: BTreeMap<_, _> = loaded
            .mounts
            .iter()
            .map(|row| ((row.key.volume.clone(), row.key.consumer.clone()), row.kept))
            .collect();
        for (key, due) in dues(&self.dues, record) {
            let found = kept.get(&key);
            let right = match due {
                Due::Mounted => found == Some(&true),
                Due::Gone => found.is_none(),
                Due::Either => true,
            };
            assert!(right, "{key:?} must be {due:?} at entry {}, its row is {found:?}", record.len());
        }
        let told = told(record);
        assert!(store.event_sequence() >= told, "{} after event {told}", store.event_sequence());
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
                && rows.iter().all(|row| ["mounted", "lost"].contains(&row.state.as_str()))
        })
        .await;
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
        let record = record::open(&self.record()).expect("the record");
        let newest = self.told.borrow().keys().next_back().copied().unwrap_or(0);
        assert!(manager.event_sequence >= newest, "events begin again after {newest}");
        events(client, 0).await.into_iter().for_each(|event| tell(&self.told, &record, event));
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
            told: Told::default(),
            journal: client.manager().await.expect("the properties").journal_id,
            moments: 0,
            checkpoints: 0,
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
        count("volume RPCs without a rule broken", run.w.plugin("p").assert_rules());
    });
}

#[test]
fn what_was_answered_outlives_a_power_cut() {
    rounds().for_each(cuts);
}
