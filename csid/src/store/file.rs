//! The journal's file, opened: never before it was seen to be a private file, and never written before it was
//! found sound.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags};

use crate::store::checksum;
use crate::store::error::{StoreError, at};
use crate::store::place::{JournalDirectory, LOG, NAME};
use crate::store::schema;

/// An open journal: the connection, and the lock that keeps a second csid out while it lives.
pub(super) struct File {
    pub db: Connection,
    pub place: Arc<JournalDirectory>,
}

impl File {
    /// Open the journal for reading; nothing of it is changed before [`File::adopt`]. `known`: there has been one.
    pub fn open(place: &Arc<JournalDirectory>, known: bool) -> Result<File, StoreError> {
        let path = place.path(NAME);
        let corrupt = |why: String| Err(StoreError::Corrupt { path: path.clone(), why });
        let log = place.length(LOG)?;
        match place.length(NAME)? {
            Some(0) => return corrupt("it is empty".into()),
            Some(_) => {}
            None if log.is_some() => return corrupt("it is gone, but its log is there".into()),
            None if known => return corrupt("it is gone".into()),
            None => place.create(|born| {
                let mut db = connect(born)?;
                schema::migrate(&mut db, schema::KNOWN)?;
                db.close().map_err(|(_, error)| at("create")(error))
            })?,
        }
        let db = alone(&path).map_err(|error| error.of(&path))?;
        Ok(File { db, place: Arc::clone(place) })
    }

    pub fn path(&self) -> PathBuf {
        self.place.path(NAME)
    }

    /// The file was found sound: let it be written.
    pub fn adopt(&mut self) -> Result<(), StoreError> {
        self.db.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, false).map_err(at("open"))?;
        self.db
            .pragma_update_and_check(None, "journal_mode", "wal", |row| row.get::<_, String>(0))
            .map_err(at("use a write-ahead log"))?;
        schema::migrate(&mut self.db, schema::KNOWN)
    }

    /// Go on with rows in memory; the file is not written any more.
    pub fn leave(&mut self, memory: Connection) -> Result<(), StoreError> {
        self.db.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).map_err(at("leave"))?;
        self.db = memory;
        Ok(())
    }
}

/// A connection that shares the file with nobody, and writes nothing when it is closed.
pub(super) fn alone(path: &Path) -> Result<Connection, StoreError> {
    let db = connect(path)?;
    // First of all: closing would otherwise write the log into a file that was not yet found sound.
    db.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).map_err(at("open"))?;
    // Nobody else opens it while csid runs (copy file and log to look into them), so the log's index is
    // kept in memory: that saves locks, and a journal on a full disk can still be opened and read.
    // A checkpoint by SQLite within a commit would sync the log, and ignore a failure (`Journal::checkpoint`).
    let settings = "PRAGMA locking_mode = exclusive; PRAGMA cache_size = -2048; PRAGMA temp_store = memory;
                    PRAGMA wal_autocheckpoint = 0; PRAGMA journal_size_limit = 16777216;";
    db.execute_batch(settings).map_err(at("open"))?;
    Ok(db)
}

#[expect(clippy::disallowed_methods, reason = "this is where it is allowed")]
pub(super) fn connect(path: &Path) -> Result<Connection, StoreError> {
    // One thread uses it, so SQLite's own mutexes are of no use. The log's permissions are the file's.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let db = Connection::open_with_flags(path, flags).map_err(at("open"))?;
    db.busy_timeout(Duration::from_millis(100)).map_err(at("open"))?;
    prepared(db)
}

/// An empty journal of this version that is nowhere on the disk.
pub(super) fn in_memory(version: u32) -> Result<Connection, StoreError> {
    let mut db = prepared(Connection::open_in_memory().map_err(at("open"))?)?;
    schema::migrate(&mut db, version)?;
    Ok(db)
}

fn prepared(db: Connection) -> Result<Connection, StoreError> {
    db.set_prepared_statement_cache_capacity(32);
    checksum::add(&db).map_err(at("open"))?;
    Ok(db)
}
