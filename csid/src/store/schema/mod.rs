//! The journal's schema, one file per version; `PRAGMA user_version` says which one a file has.
//!
//! - Forward only: a version is left for the next by its file's SQL, in one transaction with the new number.
//! - A file that was released is never edited again; a change is a new file, with a fixture of the one before
//!   it in `tests/fixtures` that a test opens.
//! - A file does not know the types in `rows.rs`, which change: it says what it needs in SQL.
//! - A journal of a newer version is not touched, and not called damaged: its csid is wanted back.

use rusqlite::{Connection, TransactionBehavior};

use super::StoreError;
use super::error::at;

const VERSIONS: &[&str] = &[include_str!("1.sql"), include_str!("2.sql"), include_str!("3.sql")];

/// The version that this csid writes.
pub(super) const KNOWN: u32 = VERSIONS.len() as u32;

/// From this version on rows are read as this csid reads its own, before anything is changed. An older one's have no
/// checksums; a version with other columns moves this on.
pub(super) const READ: u32 = 2;

/// The version of the file; 0 is an empty one. Changes nothing.
pub(super) fn version(db: &Connection) -> Result<u32, StoreError> {
    let found = db.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(at("read its version"))?;
    if found > KNOWN {
        let path = db.path().unwrap_or_default().into();
        return Err(StoreError::Newer { path, found, known: KNOWN });
    }
    Ok(found)
}

pub(super) fn migrate(db: &mut Connection) -> Result<(), StoreError> {
    for (sql, next) in VERSIONS.iter().zip(1_u32..).skip(version(db)? as usize) {
        let mut migration = || {
            let tx = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
            tx.execute_batch(sql)?;
            tx.pragma_update(None, "user_version", next)?;
            tx.commit()
        };
        migration().map_err(at("migrate"))?;
    }
    Ok(())
}
