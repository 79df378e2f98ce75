//! The connection and what is done with it: one transaction for a group of requests, reads, the close. No
//! threads here. Of a damaged journal what can be read stands in memory, and is only read.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rusqlite::{Connection, ToSql, TransactionBehavior, params, params_from_iter};

use super::error::{StoreError, at};
use super::file::{File, connect};
use super::mark::{self, Mark};
use super::place::Place;
use super::rows::{Event, MountRow, Phase};
use super::tables::{
    EVENT, MOUNT, checked, event, load, meta, mount, put_event, put_meta, put_mount, put_plugin, put_volume,
};
use super::words::{from_bits, from_word, word};
use super::{Change, Durability, Loaded, MountFilter, remains, schema};

/// Sequences that one synced commit sets aside.
const EVENT_BLOCK: u64 = 10_000;
/// Events kept; when there are this many more, the oldest are deleted.
const EVENTS_KEPT: u64 = 10_000;
const EVENTS_TRIMMED: u64 = 256;
/// More commits than a power cut can take back: the log is synced at the latest when it holds 2,000 pages and
/// what one group adds, and each commit writes a page.
const INDEX_LEAP: u64 = 100_000;

/// What a transaction moves on, kept only if it is committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Counters {
    /// Grows with every commit, so that each writes a page and a synced one syncs those before it.
    pub modify_index: u64,
    /// The newest event's sequence.
    pub sequence: u64,
    /// The highest sequence that a synced commit set aside. In another boot than `boot` equal to `sequence`.
    reserved: u64,
    /// Events up to this one are gone, or were lost in a power cut.
    dropped: u64,
    events: u64,
}

pub(super) struct Journal {
    file: File,
    pub id: String,
    pub counters: Counters,
    boot: String,
    /// What `PRAGMA synchronous` is: FULL, or NORMAL.
    full: bool,
    mark: Option<Mark>,
    /// What is wrong with the file. The rows of now are what could be read of it.
    damage: Option<String>,
    /// Another journal has taken its place.
    replaced: bool,
}

impl Journal {
    /// Open the journal and read all of it before a byte is written.
    pub fn open(place: &Arc<Place>) -> Result<(Journal, Loaded), StoreError> {
        let boot = boot();
        let known = mark::known(&place.runtime, &boot);
        let mut file = File::open(place, known.is_some())?;
        let path = file.path();
        let read = |file: &mut File| {
            if schema::version(&file.db)? == 0 {
                let why = "it is a database, but not csid's".into();
                return Err(StoreError::Corrupt { path: path.clone(), why });
            }
            sound(&file.db, &path)?;
            if schema::version(&file.db)? < schema::READ {
                file.adopt()?;
            }
            let loaded = load(&file.db).map_err(at("read its rows"))?;
            let id: String = meta(&file.db, "journal_id").map_err(at("read its id"))?;
            let newest = newest_commit(&file.db).map_err(at("read its counters"))?;
            if let Some(known) = &known {
                whole(known, &id, newest, &path)?;
            }
            let counters = counters(&file.db, &boot, newest).map_err(at("read its counters"))?;
            Ok((loaded, id, counters, newest))
        };
        let (loaded, id, counters, newest) = read(&mut file).map_err(|error| error.of_unknown(&path))?;
        file.adopt().map_err(|error| error.of(&path))?;
        let mark = Mark::begin(&place.runtime, &boot, &id, newest);
        let mut journal = Journal {
            file,
            id,
            counters,
            boot,
            full: false,
            mark: Some(mark),
            damage: None,
            replaced: false,
        };
        journal.synchronous(true)?;
        Ok((journal, loaded))
    }

    /// What can be read of a journal that could not be opened, because of `why`.
    pub fn remains(place: &Arc<Place>, why: String) -> Result<(Journal, Loaded), StoreError> {
        let file = File { db: remains::of_file(place)?, place: Arc::clone(place) };
        let mut journal = Journal::over(file)?;
        journal.damage = Some(why);
        let loaded = journal.rows()?;
        Ok((journal, loaded))
    }

    /// A journal that nobody else has seen.
    fn over(file: File) -> Result<Journal, StoreError> {
        let boot = boot();
        let id = meta(&file.db, "journal_id").map_err(at("read its id"))?;
        let counters = newest_commit(&file.db)
            .and_then(|newest| counters(&file.db, &boot, newest))
            .map_err(at("read its counters"))?;
        Ok(Journal { file, id, counters, boot, full: true, mark: None, damage: None, replaced: false })
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
        // What is shown from now on is no commit of the file's.
        self.mark = None;
        self.damage = Some(why);
        self.full = true;
        Ok(())
    }

    /// Enter rows beside those that could be read of a damaged journal; nothing is written.
    pub fn show(&mut self, changes: &[Change]) -> Result<(), StoreError> {
        match self.damage {
            Some(_) => self.transaction(&[changes], Durability::Process).map(drop),
            None => Ok(()),
        }
    }

    /// Begin a new journal with `changes` and the plugins that could be read; where the damaged one is kept.
    pub fn replace(&mut self, mut changes: Vec<Change>) -> Result<PathBuf, StoreError> {
        if self.damage.is_none() || self.replaced {
            return Err(StoreError::Gone);
        }
        changes.extend(self.rows()?.plugins.into_iter().map(Change::PutPlugin));
        let place = Arc::clone(&self.file.place);
        let kept = place.replace(|born| {
            let mut db = connect(born)?;
            schema::migrate(&mut db)?;
            let mut journal = Journal::over(File { db, place: Arc::clone(&place) })?;
            journal.transaction(&[&changes], Durability::Disk)?;
            journal.close()
        })?;
        self.replaced = true;
        Ok(kept)
    }

    /// All rows.
    pub fn rows(&self) -> Result<Loaded, StoreError> {
        load(&self.file.db).map_err(at("read its rows")).map_err(|error| error.of(&self.path()))
    }

    /// Commit all groups of changes as one transaction, or none of them; the events it holds, as they were
    /// numbered.
    pub fn commit(
        &mut self,
        groups: &[&[Change]],
        durability: Durability,
    ) -> Result<Vec<Arc<Event>>, StoreError> {
        if let Some(damage) = self.damage() {
            return Err(damage);
        }
        let path = self.path();
        let done = match self.transaction(groups, durability) {
            // The log itself may be what fills the disk.
            Err(StoreError::Full) if self.empty_log() => self.transaction(groups, durability),
            done => done,
        };
        done.map_err(|error| error.of(&path))
    }

    /// Move the log into the file and give its space back; whether that was done.
    fn empty_log(&self) -> bool {
        let busy = self.file.db.query_row("PRAGMA wal_checkpoint(truncate)", [], |row| row.get::<_, i64>(0));
        matches!(busy, Ok(0))
    }

    fn transaction(
        &mut self,
        groups: &[&[Change]],
        durability: Durability,
    ) -> Result<Vec<Arc<Event>>, StoreError> {
        let new = groups.iter().copied().flatten().filter(|change| matches!(change, Change::Event(_))).count()
            as u64;
        let mut counters = self.counters;
        let reserve = counters.sequence + new > counters.reserved;
        // Within a transaction it cannot be switched.
        self.synchronous(durability == Durability::Disk || reserve)?;

        counters.modify_index += 1;
        let tx = self
            .file
            .db
            .transaction_with_behavior(TransactionBehavior::Immediate)
            .map_err(at("begin a transaction"))?;
        // The row of a mount that stays says it, too: that saves a page of the log.
        let all = || groups.iter().copied().flatten();
        let said = all().any(|change| matches!(change, Change::PutMount(_)))
            && !all().any(|change| matches!(change, Change::DeleteMount(_)));
        if !said {
            put_meta(&tx, "modify_index", counters.modify_index).map_err(at("count a commit"))?;
        }
        if reserve {
            counters.reserved = counters.sequence + new + EVENT_BLOCK;
            put_meta(&tx, "events_reserved", counters.reserved)
                .and_then(|()| put_meta(&tx, "events_boot", &self.boot))
                .and_then(|()| put_meta(&tx, "events_dropped", counters.dropped))
                .map_err(at("reserve event numbers"))?;
        }
        let mut events = Vec::with_capacity(new as usize);
        for change in groups.iter().copied().flatten() {
            apply(&tx, change, &mut counters, &mut events)?;
        }
        if counters.events >= EVENTS_KEPT + EVENTS_TRIMMED {
            trim(&tx, &mut counters).map_err(at("delete old events"))?;
        }
        tx.commit().map_err(at("commit"))?;
        self.counters = counters;
        if let Some(mark) = &self.mark {
            mark.set(counters.modify_index);
        }
        Ok(events)
    }

    fn synchronous(&mut self, full: bool) -> Result<(), StoreError> {
        if self.full != full {
            let level = if full { "full" } else { "normal" };
            self.file.db.pragma_update(None, "synchronous", level).map_err(at("choose its durability"))?;
            self.full = full;
        }
        Ok(())
    }

    pub fn mounts(&self, filter: &MountFilter) -> Result<Vec<(MountRow, String)>, StoreError> {
        self.read_mounts(filter).map_err(at("read the mounts")).map_err(|error| error.of(&self.path()))
    }

    fn read_mounts(&self, filter: &MountFilter) -> rusqlite::Result<Vec<(MountRow, String)>> {
        let phase = filter.phase.as_ref().map(word).transpose()?;
        let wanted: [(&str, Option<&dyn ToSql>); 8] = [
            ("namespace", filter.namespace.as_ref().map(|v| v as _)),
            ("volume", filter.volume.as_ref().map(|v| v as _)),
            ("consumer", filter.consumer.as_ref().map(|v| v as _)),
            ("tag", filter.tag.as_ref().map(|v| v as _)),
            ("plugin", filter.plugin.as_ref().map(|v| v as _)),
            ("source", filter.source.as_ref().map(|v| v as _)),
            ("phase", phase.as_ref().map(|v| v as _)),
            ("uid", filter.uid.as_ref().map(|v| v as _)),
        ];
        let wanted: Vec<_> =
            wanted.into_iter().filter_map(|(column, value)| Some((column, value?))).collect();
        let conditions: String = wanted.iter().map(|(column, _)| format!(" AND m.{column} = ?")).collect();
        let columns = checked(&format!("m.{MOUNT}").replace(", ", ", m.")).replace(" sum ", " m.sum ");
        let sql = format!(
            "SELECT {columns}, coalesce(v.staging, '') FROM mounts m \
             LEFT JOIN volumes v ON v.plugin = m.plugin AND v.external_id = m.external_id \
             WHERE true{conditions} ORDER BY m.namespace, m.volume, m.consumer, m.tag"
        );
        let mut statement = self.file.db.prepare(&sql)?;
        let values = params_from_iter(wanted.into_iter().map(|(_, value)| value));
        statement.query_map(values, |row| Ok((mount(row)?, row.get(19)?)))?.collect()
    }

    pub fn phases(&self) -> Result<BTreeMap<Phase, u64>, StoreError> {
        let read = || -> rusqlite::Result<_> {
            let mut statement =
                self.file.db.prepare_cached("SELECT phase, count(*) FROM mounts GROUP BY phase")?;
            statement.query_map([], |row| Ok((from_word(row, 0)?, from_bits(row, 1)?)))?.collect()
        };
        read().map_err(at("count the mounts")).map_err(|error| error.of(&self.path()))
    }

    pub fn events(&self, since: u64, max: u32) -> Result<(Vec<Event>, bool), StoreError> {
        let Counters { sequence, dropped, .. } = self.counters;
        let read = || {
            let columns = checked(EVENT);
            let sql = format!("SELECT {columns} FROM events WHERE sequence > ?1 ORDER BY sequence LIMIT ?2");
            let mut statement = self.file.db.prepare_cached(&sql)?;
            statement
                .query_map(params![since.min(sequence) as i64, max], event)?
                .collect::<rusqlite::Result<_>>()
        };
        let events = read().map_err(at("read the events")).map_err(|error| error.of(&self.path()))?;
        Ok((events, since < dropped || since > sequence))
    }

    pub fn ping(&self) -> Result<(), StoreError> {
        meta::<String>(&self.file.db, "journal_id")
            .map(drop)
            .map_err(at("read its id"))
            .map_err(|error| error.of(&self.path()))
    }

    /// Give unused event numbers back, move the log into the file and sync it. After that nothing can be
    /// lost, so the next boot has no gap to tell of.
    pub fn close(mut self) -> Result<(), StoreError> {
        let path = self.path();
        let mut close = || {
            self.synchronous(true)?;
            put_meta(&self.file.db, "events_reserved", self.counters.sequence)
                .and_then(|()| put_meta(&self.file.db, "events_dropped", self.counters.dropped))
                .map_err(at("return event numbers"))
        };
        close().map_err(|error| error.of(&path))?;
        self.file.db.close().map_err(|(_, error)| at("close")(error).of(&path))
    }

    #[cfg(test)]
    pub fn synchronous_now(&self) -> i64 {
        self.file.db.query_row("PRAGMA synchronous", [], |row| row.get(0)).unwrap()
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

/// The boot of the kernel: as long as it is the same, nothing that was written is lost.
fn boot() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// It is the journal that csid had in this boot, with all that csid has seen committed.
fn whole(known: &(String, u64), id: &str, newest: u64, path: &Path) -> Result<(), StoreError> {
    let why = if id != known.0 {
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
    // What was written without a sync is still there as long as the kernel is the same. Else it may be lost,
    // so no number that may have been given out is given again, and who knew one is told of a gap.
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

fn apply(
    db: &Connection,
    change: &Change,
    counters: &mut Counters,
    events: &mut Vec<Arc<Event>>,
) -> Result<(), StoreError> {
    match change {
        Change::PutVolume(row) => put_volume(db, row).map_err(at("keep a volume")),
        Change::DeleteVolume(key) => db
            .prepare_cached("DELETE FROM volumes WHERE plugin = ?1 AND external_id = ?2")
            .and_then(|mut statement| statement.execute([&key.plugin, &key.external_id]))
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
        Change::DeletePlugin(id) => db
            .prepare_cached("DELETE FROM plugins WHERE id = ?1")
            .and_then(|mut statement| statement.execute([id]))
            .map(drop)
            .map_err(at("delete a plugin")),
        Change::Event(new) => {
            let event = put_event(db, new, counters.sequence + 1).map_err(at("keep an event"))?;
            counters.sequence += 1;
            counters.events += 1;
            events.push(Arc::new(event));
            Ok(())
        }
        Change::Boot(boot) => put_meta(db, "boot", boot).map_err(at("keep the boot")),
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
