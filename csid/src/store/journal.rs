//! The connection and what is done with it: one transaction for a group of requests, reads, the close. No
//! threads here. Of a damaged journal what can be read stands in memory, and is only read.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rusqlite::{Connection, TransactionBehavior, ffi, params};

use crate::store::change::Change;
use crate::store::error::{StoreError, at};
use crate::store::file::{File, connect};
use crate::store::known_claims::KnownClaims;
use crate::store::loaded::{Loaded, MountFilter};
use crate::store::mark::{self, Mark};
use crate::store::node::NodeName;
use crate::store::place::JournalDirectory;
use crate::store::record::{Record, VolumeName};
use crate::store::records;
use crate::store::registry::Conflict;
use crate::store::remains;
use crate::store::request::Work;
use crate::store::rows::{Event, MountRow, NewEvent, Phase};
use crate::store::schema;
use crate::store::tables::{
    EVENT, FENCE, NODE_ID, as_written, checked, delete_meta, event, load, meta, put_event, put_fence,
    put_meta, put_mount, put_plugin, put_volume, read_mounts,
};
use crate::store::words::{from_bits, from_word};

/// Sequences that one synced commit sets aside.
const EVENT_BLOCK: u64 = 10_000;
/// Events kept; when there are this many more, the oldest are deleted.
const EVENTS_KEPT: u64 = 10_000;
const EVENTS_TRIMMED: u64 = 256;
/// Pages that the log holds before they are moved into the file. A group of commits may add more.
const LOG_PAGES: i32 = 2_000;
/// More commits than a power cut can take back: the log is synced at the latest when it holds 2,000 pages and
/// what one group adds, and each commit writes a page.
const INDEX_LEAP: u64 = 100_000;

/// Counters that a transaction advances, kept only if it is committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Counters {
    /// Grows with every commit.
    pub modify_index: u64,
    /// The newest event's sequence.
    pub sequence: u64,
    /// The highest sequence that a synced commit set aside. In another boot than `boot` equal to `sequence`.
    reserved: u64,
    /// Events up to this one are gone, or were lost in a power cut.
    dropped: u64,
    events: u64,
}

/// The result of a transaction.
pub(super) struct Done {
    /// The events it holds, as they were numbered.
    pub events: Vec<Arc<Event>>,
    /// The result of each request. An error means that nothing of the request was written.
    pub answers: Vec<Result<(), Conflict>>,
    /// Whether event numbers were set aside. The log has to be synced before one of them is seen.
    pub reserves: bool,
}

pub(super) struct Journal {
    file: File,
    pub id: String,
    pub counters: Counters,
    pub node: NodeName,
    boot: String,
    mark: Option<Mark>,
    /// The damage of the file. The rows are then those that could be read of it.
    damage: Option<String>,
    /// Another journal has taken its place.
    replaced: bool,
    known_claims: RefCell<KnownClaims>,
}

impl Journal {
    /// Open the journal and read all of it before a byte is written. `node`: this host's name in claims.
    pub fn open(place: &Arc<JournalDirectory>, node: Option<&str>) -> Result<(Journal, Loaded), StoreError> {
        let boot = boot();
        let known = mark::known(&place.runtime, &boot);
        let mut file = File::open(place, known.is_some())?;
        let path = file.path();
        let read = |file: &mut File| {
            let version = schema::version(&file.db)?;
            if version == 0 {
                let why = "it is a database, but not csid's".into();
                return Err(StoreError::Corrupt { path: path.clone(), why });
            }
            sound(&file.db, &path)?;
            if version < schema::SUMMED {
                file.adopt()?;
            }
            let id: String = meta(&file.db, "journal_id").map_err(at("read its id"))?;
            let newest = newest_commit(&file.db).map_err(at("read its counters"))?;
            if let Some(known) = &known {
                whole(known, &id, newest, &path)?;
            }
            as_written(&file.db, version, &path)?;
            if version < schema::KNOWN {
                file.adopt()?;
            }
            let loaded = load(&file.db).map_err(at("read its rows"))?;
            let counters = counters(&file.db, &boot, newest).map_err(at("read its counters"))?;
            let node = NodeName::named(&file.db, node)?;
            Ok((loaded, id, counters, newest, node))
        };
        let (loaded, id, counters, newest, node) =
            read(&mut file).map_err(|error| error.of_unknown(&path))?;
        file.adopt().map_err(|error| error.of(&path))?;
        let mark = Mark::begin(&place.runtime, &boot, &id, newest);
        let journal = Journal {
            file,
            id,
            counters,
            node,
            boot,
            mark: Some(mark),
            damage: None,
            replaced: false,
            known_claims: RefCell::default(),
        };
        // A commit is written. `sync` makes it durable.
        journal.synchronous("normal")?;
        Ok((journal, loaded))
    }

    /// Returns a journal of the rows that can be read of a file that could not be opened, because of `why`.
    pub fn remains(
        place: &Arc<JournalDirectory>,
        why: String,
        node: Option<&str>,
    ) -> Result<(Journal, Loaded), StoreError> {
        let file = File { db: remains::of_file(place)?, place: Arc::clone(place) };
        let mut journal = Journal::over(file, node)?;
        journal.damage = Some(why);
        let loaded = journal.rows()?;
        Ok((journal, loaded))
    }

    /// A journal that nobody else has seen.
    fn over(file: File, node: Option<&str>) -> Result<Journal, StoreError> {
        let node = NodeName::named(&file.db, node)?;
        let boot = boot();
        let id = meta(&file.db, "journal_id").map_err(at("read its id"))?;
        let counters = newest_commit(&file.db)
            .and_then(|newest| counters(&file.db, &boot, newest))
            .map_err(at("read its counters"))?;
        Ok(Journal {
            file,
            id,
            counters,
            node,
            boot,
            mark: None,
            damage: None,
            replaced: false,
            known_claims: RefCell::default(),
        })
    }

    /// Why nothing is written any more.
    pub fn damage(&self) -> Option<StoreError> {
        let why = self.damage.clone()?;
        Some(StoreError::Corrupt { path: self.path(), why })
    }

    /// The file turned out to be damaged: from now on what can still be read of it stands in memory.
    pub fn leave(&mut self, why: String) -> Result<(), StoreError> {
        let memory = remains::of(&self.file.db)?;
        self.file.leave(memory)?;
        // From now on the rows are not those of a commit of the file.
        self.mark = None;
        self.damage = Some(why);
        Ok(())
    }

    /// Adds rows to those that could be read of a damaged journal. Nothing is written.
    pub fn show(&mut self, changes: Vec<Change>) -> Result<(), StoreError> {
        match self.damage {
            Some(_) => self.transaction(&[&Work::Changes(changes)]).map(drop),
            None => Ok(()),
        }
    }

    /// Begin a new journal with `changes`, and the plugins and the registry that could be read; where the damaged one is
    /// kept.
    pub fn replace(&mut self, mut changes: Vec<Change>) -> Result<PathBuf, StoreError> {
        if self.damage.is_none() || self.replaced {
            return Err(StoreError::Gone);
        }
        let Loaded { plugins, node_ids, fence, .. } = self.rows()?;
        changes.extend(plugins.into_iter().map(Change::PutPlugin));
        changes.extend(node_ids.into_iter().map(|(plugin, node_id)| Change::PutNodeId(plugin, node_id)));
        changes.extend(fence.map(Change::PutFence));
        let registry = self.ask("read the registry", records::copied)?;
        let work: Vec<Work> = std::iter::once(Work::Changes(changes))
            .chain(registry.into_iter().map(|swap| Work::Swap(Box::new(swap), Vec::new())))
            .collect();
        let place = Arc::clone(&self.file.place);
        let kept = place.replace(|born| {
            let mut db = connect(born)?;
            schema::migrate(&mut db, schema::KNOWN)?;
            let mut journal = Journal::over(File { db, place: Arc::clone(&place) }, Some(&self.node.name))?;
            let done = journal.transaction(&work.iter().collect::<Vec<_>>())?;
            for error in done.answers.into_iter().filter_map(Result::err) {
                tracing::error!(%error, "a volume of the damaged journal is not in the new one");
            }
            journal.close()
        })?;
        self.replaced = true;
        Ok(kept)
    }

    /// Read of the file, or of what is left of it.
    pub fn ask<T>(
        &self,
        step: &'static str,
        read: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, StoreError> {
        read(&self.file.db).map_err(at(step)).map_err(|error| error.of(&self.path()))
    }

    /// A volume's record.
    pub fn record(&self, name: &VolumeName) -> Result<Record, StoreError> {
        let mut known = self.known_claims.borrow_mut();
        let known = self.damage.is_none().then_some(&mut *known);
        self.ask("read a volume's record", |db| records::read_record(db, name, known))
    }

    /// All rows but the registry's.
    pub fn rows(&self) -> Result<Loaded, StoreError> {
        self.ask("read its rows", load)
    }

    /// Commits all requests but those that are refused as one transaction, or none of them. The transaction survives csid, and
    /// after [`Journal::sync`] a power cut.
    pub fn commit(&mut self, requests: &[&Work]) -> Result<Done, StoreError> {
        if let Some(damage) = self.damage() {
            return Err(damage);
        }
        let path = self.path();
        let done = match self.transaction(requests) {
            // The log itself may be what fills the disk.
            Err(StoreError::Full) if self.empty_log()? => self.transaction(requests),
            done => done,
        };
        done.map_err(|error| error.of(&path))
    }

    /// Syncs the log, and with it every earlier commit. The kernel forgets what it could not write, so a journal whose log was not
    /// synced is damaged.
    pub fn sync(&self) -> Result<(), StoreError> {
        if let Some(damage) = self.damage() {
            return Err(damage);
        }
        sync_log(&self.file.db).map_err(|source| {
            if let Some(mark) = &self.mark {
                mark.set_unsynced();
            }
            StoreError::Corrupt { path: self.path(), why: format!("cannot sync its log: {source}") }
        })
    }

    /// Moves a long log into the file. Call this after each group of commits.
    pub fn checkpoint(&self) -> Result<(), StoreError> {
        if self.damage.is_some() || pages_written(&self.file.db, false) < LOG_PAGES {
            return Ok(());
        }
        self.sync()?;
        pages_written(&self.file.db, true);
        // A page that is not in the file stays in the log, and the next checkpoint tries again.
        let moved = self.file.db.query_row("PRAGMA wal_checkpoint(passive)", [], |_| Ok(()));
        if let Err(error) = moved {
            tracing::warn!(%error, "the journal's log could not be moved into its file");
        }
        Ok(())
    }

    /// Moves the log into the file and gives its space back. Returns whether that was done.
    fn empty_log(&self) -> Result<bool, StoreError> {
        self.sync()?;
        let busy = self.file.db.query_row("PRAGMA wal_checkpoint(truncate)", [], |row| row.get::<_, i64>(0));
        Ok(matches!(busy, Ok(0)))
    }

    fn transaction(&mut self, requests: &[&Work]) -> Result<Done, StoreError> {
        let done = self.try_transaction(requests);
        let known = self.known_claims.get_mut();
        match &done {
            Ok(done) => {
                for (work, answer) in requests.iter().zip(&done.answers) {
                    if let (Work::Swap(swap, _), Ok(())) = (work, answer) {
                        known.change(&swap.before, &swap.after, self.counters.modify_index);
                    }
                }
            }
            Err(_) => *known = KnownClaims::default(),
        }
        done
    }

    fn try_transaction(&mut self, requests: &[&Work]) -> Result<Done, StoreError> {
        let new: u64 = requests.iter().map(|work| events_of(work)).sum();
        let mut counters = self.counters;
        let reserve = counters.sequence + new > counters.reserved;
        counters.modify_index += 1;
        let tx = self
            .file
            .db
            .transaction_with_behavior(TransactionBehavior::Immediate)
            .map_err(at("begin a transaction"))?;
        if !is_said(requests) {
            put_meta(&tx, "modify_index", counters.modify_index).map_err(at("count a commit"))?;
        }
        self.node.keep(&tx)?;
        if reserve {
            counters.reserved = counters.sequence + new + EVENT_BLOCK;
            put_meta(&tx, "events_reserved", counters.reserved)
                .and_then(|()| put_meta(&tx, "events_boot", &self.boot))
                .and_then(|()| put_meta(&tx, "events_dropped", counters.dropped))
                .map_err(at("reserve event numbers"))?;
        }
        let mut done =
            Done { events: Vec::with_capacity(new as usize), answers: Vec::new(), reserves: reserve };
        for work in requests {
            done.answers.push(apply(&tx, work, &mut counters, &mut done.events)?);
        }
        if done.answers.iter().all(Result::is_err) {
            return Ok(Done { reserves: false, ..done });
        }
        if counters.events >= EVENTS_KEPT + EVENTS_TRIMMED {
            trim(&tx, &mut counters).map_err(at("delete old events"))?;
        }
        tx.commit().map_err(at("commit"))?;
        self.counters = counters;
        self.node.kept = true;
        if let Some(mark) = &self.mark {
            mark.set(counters.modify_index);
        }
        Ok(done)
    }

    fn synchronous(&self, level: &str) -> Result<(), StoreError> {
        self.file.db.pragma_update(None, "synchronous", level).map_err(at("choose its durability"))
    }

    pub fn mounts(&self, filter: &MountFilter) -> Result<Vec<(MountRow, String)>, StoreError> {
        self.ask("read the mounts", |db| read_mounts(db, filter))
    }

    pub fn phases(&self) -> Result<BTreeMap<Phase, u64>, StoreError> {
        self.ask("count the mounts", |db| {
            let mut statement = db.prepare_cached("SELECT phase, count(*) FROM mounts GROUP BY phase")?;
            statement.query_map([], |row| Ok((from_word(row, 0)?, from_bits(row, 1)?)))?.collect()
        })
    }

    pub fn events(&self, since: u64, max: u32) -> Result<(Vec<Event>, bool), StoreError> {
        let Counters { sequence, dropped, .. } = self.counters;
        let events = self.ask("read the events", |db| {
            let columns = checked(EVENT);
            let sql = format!("SELECT {columns} FROM events WHERE sequence > ?1 ORDER BY sequence LIMIT ?2");
            let mut statement = db.prepare_cached(&sql)?;
            statement.query_map(params![since.min(sequence) as i64, max], event)?.collect()
        })?;
        Ok((events, since < dropped || since > sequence))
    }

    pub fn ping(&self) -> Result<(), StoreError> {
        self.ask("read its id", |db| meta::<String>(db, "journal_id")).map(drop)
    }

    /// Give unused event numbers back, move the log into the file and sync it. After that nothing can be
    /// lost, so the next boot has no gap to tell of.
    pub fn close(self) -> Result<(), StoreError> {
        let path = self.path();
        let close = || {
            self.synchronous("full")?;
            put_meta(&self.file.db, "events_reserved", self.counters.sequence)
                .and_then(|()| put_meta(&self.file.db, "events_dropped", self.counters.dropped))
                .map_err(at("return event numbers"))
        };
        close().map_err(|error| error.of(&path))?;
        self.file.db.close().map_err(|(_, error)| at("close")(error).of(&path))
    }

    /// A full disk: the file may not grow beyond `pages`, or what it has.
    #[cfg(test)]
    pub fn limit_pages(&self, pages: Option<u32>) {
        let limit = pages.unwrap_or(u32::MAX - 1);
        self.file.db.pragma_update_and_check(None, "max_page_count", limit, |_| Ok(())).unwrap();
    }

    fn path(&self) -> PathBuf {
        self.file.path()
    }
}

/// Returns the number of pages that SQLite has written. `resets`: the count then begins at 0 again.
fn pages_written(db: &Connection, resets: bool) -> i32 {
    let (mut pages, mut most) = (0, 0);
    // SAFETY: the connection is open, and this writes two numbers.
    let read = unsafe {
        let counter = ffi::SQLITE_DBSTATUS_CACHE_WRITE;
        ffi::sqlite3_db_status(db.handle(), counter, &raw mut pages, &raw mut most, resets.into())
    };
    // Without the count each group of commits would be moved at once.
    if read == ffi::SQLITE_OK { pages } else { LOG_PAGES }
}

/// Syncs the file of SQLite's write-ahead log.
fn sync_log(db: &Connection) -> rusqlite::Result<()> {
    let mut log: *mut ffi::sqlite3_file = std::ptr::null_mut();
    // SAFETY: the connection is open, and this operation writes a pointer to the log's file.
    let found = unsafe {
        let place = (&raw mut log).cast();
        ffi::sqlite3_file_control(db.handle(), c"main".as_ptr(), ffi::SQLITE_FCNTL_JOURNAL_POINTER, place)
    };
    // SAFETY: SQLite owns the file, which is open as long as the connection if it has methods. This thread alone uses it.
    let synced = unsafe {
        match log.as_ref().and_then(|file| file.pMethods.as_ref()).and_then(|methods| methods.xSync) {
            Some(sync) if found == ffi::SQLITE_OK => sync(log, ffi::SQLITE_SYNC_NORMAL),
            // Nothing was written yet.
            _ => found,
        }
    };
    match synced {
        ffi::SQLITE_OK => Ok(()),
        code => Err(rusqlite::Error::SqliteFailure(ffi::Error::new(code), None)),
    }
}

/// The boot of the kernel: as long as it is the same, nothing that was written is lost.
fn boot() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// Checks that this is the journal that csid had in this boot, with all commits that csid has seen.
fn whole(known: &(String, u64), id: &str, newest: u64, path: &Path) -> Result<(), StoreError> {
    let why = if known.1 == mark::UNSYNCED {
        "its log could not be synced since the host booted".to_owned()
    } else if id != known.0 {
        "it is another journal than the one that csid had since the host booted".to_owned()
    } else if newest < known.1 {
        "its newest commits are missing".to_owned()
    } else {
        return Ok(());
    };
    Err(StoreError::Corrupt { path: path.into(), why })
}

/// SQLite's own check of every page, the order and the parts of its rows, and what the indexes say of them.
fn sound(db: &Connection, path: &Path) -> Result<(), StoreError> {
    let found: String =
        db.query_row("PRAGMA integrity_check(1)", [], |row| row.get(0)).map_err(at("check its pages"))?;
    if found == "ok" { Ok(()) } else { Err(StoreError::Corrupt { path: path.into(), why: found }) }
}

/// The index of the newest commit: in the newest mount's row, or, of one that wrote none, in `meta`.
fn newest_commit(db: &Connection) -> rusqlite::Result<u64> {
    let of_mounts =
        db.query_row("SELECT coalesce(max(modify_index), 0) FROM mounts", [], |row| from_bits(row, 0))?;
    Ok(meta::<i64>(db, "modify_index")?.cast_unsigned().max(of_mounts))
}

/// `modify_index`: the newest commit's.
fn counters(db: &Connection, boot: &str, modify_index: u64) -> rusqlite::Result<Counters> {
    let number = |key| meta::<i64>(db, key).map(|value| value as u64);
    let (newest, events) =
        db.query_row("SELECT coalesce(max(sequence), 0), count(*) FROM events", [], |row| {
            Ok((from_bits(row, 0)?, from_bits(row, 1)?))
        })?;
    let mut counters = Counters {
        modify_index,
        reserved: number("events_reserved")?,
        dropped: number("events_dropped")?,
        sequence: newest,
        events,
    };
    counters.sequence = newest.max(counters.dropped);
    // Unsynced writes survive as long as the kernel runs. After another boot they may be lost. The counters then leap, so that no
    // number is given out twice, and a reader that knows a lost number sees a gap.
    if boot.is_empty() || meta::<String>(db, "events_boot")? != boot {
        counters.modify_index += INDEX_LEAP;
        if counters.reserved > counters.sequence {
            counters.sequence = counters.reserved;
            counters.dropped = counters.reserved;
        }
        counters.reserved = counters.sequence;
    }
    Ok(counters)
}

/// A row of a mount that stays says the commit's index, too: that saves a page of the log.
fn is_said(requests: &[&Work]) -> bool {
    let changes = || {
        requests.iter().flat_map(|work| match work {
            Work::Changes(changes) => changes.as_slice(),
            Work::Swap(..) => &[],
        })
    };
    changes().any(|change| matches!(change, Change::PutMount(_)))
        && !changes().any(|change| matches!(change, Change::DeleteMount(_)))
}

fn events_of(work: &Work) -> u64 {
    let events = match work {
        Work::Changes(changes) => changes.iter().filter(|change| matches!(change, Change::Event(_))).count(),
        Work::Swap(_, events) => events.len(),
    };
    events as u64
}

fn apply(
    db: &Connection,
    work: &Work,
    counters: &mut Counters,
    events: &mut Vec<Arc<Event>>,
) -> Result<Result<(), Conflict>, StoreError> {
    match work {
        Work::Changes(changes) => {
            changes.iter().try_for_each(|change| apply_change(db, change, counters, events))?;
        }
        Work::Swap(swap, new) => {
            if let Err(conflict) = records::swap(db, swap, counters.modify_index)? {
                return Ok(Err(conflict));
            }
            new.iter().try_for_each(|event| append(db, event, counters, events))?;
        }
    }
    Ok(Ok(()))
}

fn append(
    db: &Connection,
    new: &NewEvent,
    counters: &mut Counters,
    events: &mut Vec<Arc<Event>>,
) -> Result<(), StoreError> {
    let event = put_event(db, new, counters.sequence + 1).map_err(at("keep an event"))?;
    counters.sequence += 1;
    counters.events += 1;
    events.push(Arc::new(event));
    Ok(())
}

fn apply_change(
    db: &Connection,
    change: &Change,
    counters: &mut Counters,
    events: &mut Vec<Arc<Event>>,
) -> Result<(), StoreError> {
    match change {
        Change::PutVolume(row) => put_volume(db, row).map_err(at("keep a volume")),
        Change::DeleteVolume(key) => db
            .prepare_cached("DELETE FROM volumes WHERE plugin = ?1 AND external_id = ?2")
            .and_then(|mut statement| statement.execute(params![key.plugin, key.handle]))
            .map(drop)
            .map_err(at("delete a volume")),
        Change::PutMount(row) => put_mount(db, row, counters.modify_index).map_err(at("keep a mount")),
        Change::DeleteMount(key) => db
            .prepare_cached(
                "DELETE FROM mounts WHERE namespace = ?1 AND volume = ?2 AND consumer = ?3 AND tag = ?4",
            )
            .and_then(|mut statement| {
                statement.execute([&key.namespace, &key.volume, &key.consumer, &key.tag])
            })
            .map(drop)
            .map_err(at("delete a mount")),
        Change::PutPlugin(row) => put_plugin(db, row).map_err(at("keep a plugin")),
        Change::DeletePlugin(id, instance) => db
            .prepare_cached("DELETE FROM plugins WHERE id = ?1 AND instance = ?2")
            .and_then(|mut statement| statement.execute([id, instance]))
            .map(drop)
            .map_err(at("delete a plugin")),
        Change::DeletePlugins(id) => db
            .prepare_cached("DELETE FROM plugins WHERE id = ?1")
            .and_then(|mut statement| statement.execute([id]))
            .map(drop)
            .map_err(at("delete a plugin")),
        Change::PutNodeId(plugin, node_id) => {
            put_meta(db, &format!("{NODE_ID}{plugin}"), node_id).map_err(at("keep a node id"))
        }
        Change::DeleteNodeId(plugin) => {
            delete_meta(db, &format!("{NODE_ID}{plugin}")).map_err(at("delete a node id"))
        }
        Change::Event(new) => append(db, new, counters, events),
        Change::Boot(boot) => put_meta(db, "boot", boot).map_err(at("keep the boot")),
        Change::PutFence(fence) => put_fence(db, fence).map_err(at("keep the fence")),
        Change::DeleteFence => delete_meta(db, FENCE).map_err(at("delete the fence")),
    }
}

/// Delete the oldest events, all that are too many at once: that is cheaper than one a commit.
fn trim(db: &Connection, counters: &mut Counters) -> rusqlite::Result<()> {
    let surplus = counters.events - EVENTS_KEPT;
    let last: i64 = db
        .prepare_cached("SELECT sequence FROM events ORDER BY sequence LIMIT 1 OFFSET ?1")?
        .query_row([surplus as i64 - 1], |row| row.get(0))?;
    db.prepare_cached("DELETE FROM events WHERE sequence <= ?1")?.execute([last])?;
    counters.events -= surplus;
    counters.dropped = counters.dropped.max(last as u64);
    put_meta(db, "events_dropped", counters.dropped)
}
