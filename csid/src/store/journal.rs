//! The connection and what is done with it: one transaction for a group of requests, reads, the close. No
//! threads here.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use rusqlite::types::Value;
use rusqlite::{
    Connection, OptionalExtension, Row, Statement, ToSql, TransactionBehavior, params, params_from_iter,
};

use super::error::{StoreError, at};
use super::file::File;
use super::rows::{Event, MountKey, MountRow, NewEvent, Phase, PluginRow, VolumeKey, VolumeRow};
use super::words::{from_bits, from_json, from_word, json, word};
use super::{Change, Durability, Loaded, MountFilter, schema};

/// Sequences that one synced commit sets aside.
const EVENT_BLOCK: u64 = 10_000;
/// Events kept; when there are this many more, the oldest are deleted.
const EVENTS_KEPT: u64 = 10_000;
const EVENTS_TRIMMED: u64 = 256;
/// More commits than a power cut can take back: the log is synced at the latest when it holds 2,000 pages and
/// what one group adds, and each commit writes a page.
const INDEX_LEAP: u64 = 100_000;

const MOUNT: &str = "m.namespace, m.volume, m.consumer, m.tag, m.plugin, m.external_id, m.uid, m.spec, \
                     m.phase, m.kept, m.source, m.publish, m.target, m.device, m.error, m.operations, \
                     m.since_usec, m.modify_index";

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
}

impl Journal {
    /// Open the journal and read all of it before a byte is written.
    pub fn open(directory: &Path) -> Result<(Journal, Loaded), StoreError> {
        let mut file = File::open(directory)?;
        let path = file.path.clone();
        let named = |error: StoreError| error.of(&path);
        if schema::version(&file.db).map_err(named)? == 0 {
            return Err(StoreError::Corrupt { path, why: "it is a database, but not csid's".into() });
        }
        sound(&file.db, &path)?;
        if schema::version(&file.db)? < schema::KNOWN {
            file.adopt().map_err(named)?;
        }
        let loaded = load(&file.db).map_err(at("read its rows")).map_err(named)?;
        let boot =
            std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned();
        let id = meta(&file.db, "journal_id").map_err(at("read its id")).map_err(named)?;
        let counters = counters(&file.db, &boot).map_err(at("read its counters")).map_err(named)?;
        file.adopt().map_err(named)?;
        let mut journal = Journal { file, id, counters, boot, full: false };
        journal.synchronous(true)?;
        Ok((journal, loaded))
    }

    /// Commit all groups of changes as one transaction, or none of them; the events it holds, as they were
    /// numbered.
    pub fn commit(
        &mut self,
        groups: &[&[Change]],
        durability: Durability,
    ) -> Result<Vec<Arc<Event>>, StoreError> {
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
        put_meta(&tx, "modify_index", counters.modify_index).map_err(at("count a commit"))?;
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
        let sql = format!(
            "SELECT {MOUNT}, coalesce(v.staging, '') FROM mounts m \
             LEFT JOIN volumes v ON v.plugin = m.plugin AND v.external_id = m.external_id \
             WHERE true{conditions} ORDER BY m.namespace, m.volume, m.consumer, m.tag"
        );
        let mut statement = self.file.db.prepare(&sql)?;
        let values = params_from_iter(wanted.into_iter().map(|(_, value)| value));
        statement.query_map(values, |row| Ok((mount(row)?, row.get(18)?)))?.collect()
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
            let sql = "SELECT sequence, realtime_usec, kind, subject, details FROM events \
                       WHERE sequence > ?1 ORDER BY sequence LIMIT ?2";
            let mut statement = self.file.db.prepare_cached(sql)?;
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
        self.file.path.clone()
    }
}

/// SQLite's own check of every page, its rows' order and the sizes of their parts.
fn sound(db: &Connection, path: &Path) -> Result<(), StoreError> {
    let found: String = db
        .query_row("PRAGMA quick_check(1)", [], |row| row.get(0))
        .map_err(at("check its pages"))
        .map_err(|error| error.of(path))?;
    if found == "ok" { Ok(()) } else { Err(StoreError::Corrupt { path: path.into(), why: found }) }
}

fn counters(db: &Connection, boot: &str) -> rusqlite::Result<Counters> {
    let number = |key| meta::<i64>(db, key).map(|value| value as u64);
    let (newest, events) =
        db.query_row("SELECT coalesce(max(sequence), 0), count(*) FROM events", [], |row| {
            Ok((from_bits(row, 0)?, from_bits(row, 1)?))
        })?;
    let mut counters = Counters {
        modify_index: number("modify_index")?,
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

fn meta<T: rusqlite::types::FromSql>(db: &Connection, key: &str) -> rusqlite::Result<T> {
    db.prepare_cached("SELECT value FROM meta WHERE key = ?1")?.query_row([key], |row| row.get(0))
}

fn put_meta(db: &Connection, key: &str, value: impl Into<MetaValue>) -> rusqlite::Result<()> {
    let sql = "INSERT INTO meta VALUES (?1, ?2) ON CONFLICT (key) DO UPDATE SET value = excluded.value";
    db.prepare_cached(sql)?.execute(params![key, value.into().0]).map(drop)
}

struct MetaValue(Value);

impl From<u64> for MetaValue {
    fn from(number: u64) -> Self {
        MetaValue(Value::Integer(number as i64))
    }
}

impl From<&String> for MetaValue {
    fn from(text: &String) -> Self {
        MetaValue(Value::Text(text.clone()))
    }
}

fn load(db: &Connection) -> rusqlite::Result<Loaded> {
    let boot = db.query_row("SELECT value FROM meta WHERE key = 'boot'", [], |row| row.get(0)).optional()?;
    let plugins = db
        .prepare("SELECT id, uid, spec FROM plugins ORDER BY id")?
        .query_map([], |row| Ok(PluginRow { id: row.get(0)?, uid: row.get(1)?, spec: row.get(2)? }))?
        .collect::<rusqlite::Result<_>>()?;
    let volumes = db
        .prepare("SELECT plugin, external_id, namespace, volume, staging, stage FROM volumes ORDER BY 1, 2")?
        .query_map([], volume)?
        .collect::<rusqlite::Result<_>>()?;
    let mut statement: Statement<'_> = db.prepare(&format!(
        "SELECT {MOUNT} FROM mounts m ORDER BY m.namespace, m.volume, m.consumer, m.tag"
    ))?;
    let mounts = statement.query_map([], mount)?.collect::<rusqlite::Result<_>>()?;
    Ok(Loaded { boot, plugins, volumes, mounts })
}

fn volume(row: &Row<'_>) -> rusqlite::Result<VolumeRow> {
    Ok(VolumeRow {
        key: VolumeKey { plugin: row.get(0)?, external_id: row.get(1)? },
        namespace: row.get(2)?,
        volume: row.get(3)?,
        staging: row.get(4)?,
        stage: from_word(row, 5)?,
    })
}

/// A row of the columns in [`MOUNT`].
fn mount(row: &Row<'_>) -> rusqlite::Result<MountRow> {
    Ok(MountRow {
        key: MountKey {
            namespace: row.get(0)?,
            volume: row.get(1)?,
            consumer: row.get(2)?,
            tag: row.get(3)?,
        },
        volume: VolumeKey { plugin: row.get(4)?, external_id: row.get(5)? },
        uid: row.get(6)?,
        spec: from_json(row, 7)?,
        phase: from_word(row, 8)?,
        kept: row.get(9)?,
        source: row.get(10)?,
        publish: from_word(row, 11)?,
        target: from_word(row, 12)?,
        device: row.get::<_, Option<i64>>(13)?.map(|bits| bits as u64),
        error: row.get(14)?,
        operations: from_json(row, 15)?,
        since_usec: from_bits(row, 16)?,
        modify_index: from_bits(row, 17)?,
    })
}

fn event(row: &Row<'_>) -> rusqlite::Result<Event> {
    Ok(Event {
        sequence: from_bits(row, 0)?,
        realtime_usec: from_bits(row, 1)?,
        kind: row.get(2)?,
        subject: row.get(3)?,
        details: from_json::<BTreeMap<_, _>>(row, 4)?,
    })
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

fn put_volume(db: &Connection, row: &VolumeRow) -> rusqlite::Result<()> {
    let sql = "INSERT INTO volumes (plugin, external_id, namespace, volume, staging, stage) \
               VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT DO UPDATE SET \
               namespace = excluded.namespace, volume = excluded.volume, \
               staging = excluded.staging, stage = excluded.stage";
    let VolumeRow { key, namespace, volume, staging, stage } = row;
    let values = params![key.plugin, key.external_id, namespace, volume, staging, word(stage)?];
    db.prepare_cached(sql)?.execute(values).map(drop)
}

/// A row mostly changes in columns that no index holds; an upsert would write the indexes' pages as well.
fn put_mount(db: &Connection, row: &MountRow, modify_index: u64) -> rusqlite::Result<()> {
    let update = "UPDATE mounts SET uid = ?7, spec = ?8, phase = ?9, kept = ?10, publish = ?12, target = ?13, \
                  device = ?14, error = ?15, operations = ?16, since_usec = ?17, modify_index = ?18 \
                  WHERE namespace = ?1 AND volume = ?2 AND consumer = ?3 AND tag = ?4 \
                  AND plugin = ?5 AND external_id = ?6 AND source = ?11";
    let replace = "REPLACE INTO mounts (namespace, volume, consumer, tag, plugin, external_id, uid, spec, \
                   phase, kept, source, publish, target, device, error, operations, since_usec, modify_index) \
                   VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18)";
    let values = params![
        row.key.namespace,
        row.key.volume,
        row.key.consumer,
        row.key.tag,
        row.volume.plugin,
        row.volume.external_id,
        row.uid,
        json(&row.spec)?,
        word(&row.phase)?,
        row.kept,
        row.source,
        word(&row.publish)?,
        word(&row.target)?,
        row.device.map(|bits| bits as i64),
        row.error,
        json(&row.operations)?,
        row.since_usec as i64,
        modify_index as i64,
    ];
    if db.prepare_cached(update)?.execute(values)? == 0 {
        db.prepare_cached(replace)?.execute(values)?;
    }
    Ok(())
}

fn put_plugin(db: &Connection, row: &PluginRow) -> rusqlite::Result<()> {
    let sql = "INSERT INTO plugins (id, uid, spec) VALUES (?1, ?2, ?3) \
               ON CONFLICT (id) DO UPDATE SET uid = excluded.uid, spec = excluded.spec";
    db.prepare_cached(sql)?.execute(params![row.id, row.uid, row.spec]).map(drop)
}

fn put_event(db: &Connection, new: &NewEvent, sequence: u64) -> rusqlite::Result<Event> {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let event = Event {
        sequence,
        realtime_usec: since_1970.as_micros() as u64,
        kind: new.kind.into(),
        subject: new.subject.clone(),
        details: new.details.iter().map(|(&key, value)| (key.to_owned(), value.clone())).collect(),
    };
    let sql =
        "INSERT INTO events (sequence, realtime_usec, kind, subject, details) VALUES (?1, ?2, ?3, ?4, ?5)";
    let values = params![
        sequence as i64,
        event.realtime_usec as i64,
        event.kind,
        event.subject,
        json(&event.details)?
    ];
    db.prepare_cached(sql)?.execute(values)?;
    Ok(event)
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
