//! The journal's file: a directory 0700 and a file 0600 that root or csid's own user owns, made so and never
//! opened before that was seen. A file is born whole under another name: one that lies there empty or cut
//! short is damaged, not new.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::error::{StoreError, at, file};
use super::schema;

const NAME: &str = "csid.db";
const BORN: &str = "csid.db.new";

/// An open journal: the connection, and the lock that keeps a second csid out while it lives.
pub(super) struct File {
    pub db: Connection,
    pub path: PathBuf,
    _lock: OwnedFd,
}

impl File {
    /// Open the journal in `directory` for reading; nothing of it is changed before [`File::adopt`].
    pub fn open(directory: &Path) -> Result<File, StoreError> {
        let lock = open_directory(directory)?;
        let path = directory.join(NAME);
        let wal = directory.join("csid.db-wal");
        if !check(&lock, NAME, &path)? {
            if check(&lock, "csid.db-wal", &wal)? {
                let why = format!("it is gone, but {} is there", wal.display());
                return Err(StoreError::Corrupt { path, why });
            }
            create(&lock, directory, &path)?;
        }
        check(&lock, "csid.db-wal", &wal)?;
        let length = rustix::fs::statat(&lock, NAME, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(file("look at", &path))?
            .st_size;
        if length == 0 {
            return Err(StoreError::Corrupt { path, why: "it is empty".into() });
        }
        let db = connect(&path)?;
        // Nobody else opens it while csid runs (copy file and log to look into them), so the log's index is
        // kept in memory: that saves locks, and a journal on a full disk can still be opened and read.
        let settings =
            "PRAGMA locking_mode = exclusive; PRAGMA cache_size = -2048; PRAGMA temp_store = memory;
                        PRAGMA wal_autocheckpoint = 2000; PRAGMA journal_size_limit = 16777216;";
        db.execute_batch(settings).map_err(at("open")).map_err(|error| error.of(&path))?;
        // Closing would otherwise write the log into a file that was not yet found sound.
        db.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).map_err(at("open"))?;
        Ok(File { db, path, _lock: lock })
    }

    /// The file was found sound: let it be written.
    pub fn adopt(&mut self) -> Result<(), StoreError> {
        self.db.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, false).map_err(at("open"))?;
        self.db
            .pragma_update_and_check(None, "journal_mode", "wal", |row| row.get::<_, String>(0))
            .map_err(at("use a write-ahead log"))?;
        schema::migrate(&mut self.db)
    }
}

fn open_directory(directory: &Path) -> Result<OwnedFd, StoreError> {
    match rustix::fs::mkdir(directory, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(file("create", directory)(error)),
    }
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = rustix::fs::open(directory, flags, Mode::empty()).map_err(|error| match error {
        Errno::NOTDIR | Errno::LOOP => StoreError::Unsafe {
            path: directory.into(),
            why: "it is not a directory, or a symbolic link".into(),
        },
        error => file("open", directory)(error),
    })?;
    private(&rustix::fs::fstat(&fd).map_err(file("look at", directory))?, directory)?;
    match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(fd),
        Err(Errno::WOULDBLOCK) => Err(StoreError::Held { path: directory.into() }),
        Err(error) => Err(file("lock", directory)(error)),
    }
}

/// Whether the file is there; an error if it is anything but a private regular file.
fn check(directory: impl AsFd, name: &str, path: &Path) -> Result<bool, StoreError> {
    let stat = match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => stat,
        Err(Errno::NOENT) => return Ok(false),
        Err(error) => return Err(file("look at", path)(error)),
    };
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || stat.st_nlink != 1 {
        let why = "it is not a regular file with a single name".into();
        return Err(StoreError::Unsafe { path: path.into(), why });
    }
    private(&stat, path)?;
    Ok(true)
}

fn private(stat: &Stat, path: &Path) -> Result<(), StoreError> {
    let own = rustix::process::geteuid().as_raw();
    let why = if stat.st_uid != 0 && stat.st_uid != own {
        format!("it belongs to uid {}; chown it to root", stat.st_uid)
    } else if stat.st_mode & 0o077 != 0 {
        format!("others have access to it (mode {:o}); chmod go= it", stat.st_mode & 0o7777)
    } else {
        return Ok(());
    };
    Err(StoreError::Unsafe { path: path.into(), why })
}

/// Make an empty journal of the newest schema, and give it its name when all of it is on the disk.
fn create(lock: &OwnedFd, directory: &Path, path: &Path) -> Result<(), StoreError> {
    let born = directory.join(BORN);
    for leftover in [BORN, "csid.db.new-journal"] {
        match rustix::fs::unlinkat(lock, leftover, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(file("remove the leftover", &directory.join(leftover))(error)),
        }
    }
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made =
        rustix::fs::openat(lock, BORN, flags, Mode::RUSR | Mode::WUSR).map_err(file("create", &born))?;
    let mut db = connect(&born)?;
    schema::migrate(&mut db)?;
    db.close().map_err(|(_, error)| at("create")(error))?;
    rustix::fs::fsync(&made).map_err(file("sync", &born))?;
    rustix::fs::renameat(lock, BORN, lock, NAME).map_err(file("name", path))?;
    rustix::fs::fsync(lock).map_err(file("sync", directory))
}

#[expect(clippy::disallowed_methods, reason = "this is where it is allowed")]
fn connect(path: &Path) -> Result<Connection, StoreError> {
    // One thread uses it, so SQLite's own mutexes are of no use. The log's permissions are the file's.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let db = Connection::open_with_flags(path, flags).map_err(at("open"))?;
    db.set_prepared_statement_cache_capacity(32);
    db.busy_timeout(Duration::from_millis(100)).map_err(at("open"))?;
    Ok(db)
}
