//! The journal's schema, one file per version; `PRAGMA user_version` says which one a file has.
//!
//! - Forward only: a version is left for the next by its file's SQL, in one transaction with the new number.
//! - A file that was released is never edited again; a change is a new file, with a fixture of the one before
//!   it in `tests/fixtures` that a test opens.
//! - A file does not know the types in `rows.rs`, which change: it says what it needs in SQL.
//! - A table's last column is `sum`, the checksum of all others in their order.
//! - A journal of a newer version is not touched, and not called damaged: its csid is wanted back.

use rusqlite::{Connection, TransactionBehavior};

use crate::store::error::{StoreError, at};

const VERSIONS: &[&str] = &[
    include_str!("1.sql"),
    include_str!("2.sql"),
    include_str!("3.sql"),
    include_str!("4.sql"),
    include_str!("5.sql"),
];

/// The version that this csid writes.
pub(super) const KNOWN: u32 = VERSIONS.len() as u32;

/// From this version on rows have checksums: whether they are what was written is seen before anything is changed,
/// and of a damaged file what can be read is read, in the columns that its version has.
pub(super) const SUMMED: u32 = 2;

/// The version of the file; 0 is an empty one. Changes nothing.
pub(super) fn version(db: &Connection) -> Result<u32, StoreError> {
    let found = db.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(at("read its version"))?;
    if found > KNOWN {
        let path = db.path().unwrap_or_default().into();
        return Err(StoreError::Newer { path, found, known: KNOWN });
    }
    Ok(found)
}

/// From the version that the file has to this one.
pub(super) fn migrate(db: &mut Connection, version: u32) -> Result<(), StoreError> {
    let found = self::version(db)?;
    for (sql, next) in VERSIONS.iter().zip(1..=version).skip(found as usize) {
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

/// A table of a file that has checksums.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TableSchema {
    pub name: String,
    /// But for the checksum.
    pub columns: Vec<String>,
    /// What its own tree is ordered by: no index is needed to read it so.
    pub order: Vec<String>,
}

/// The tables, as this file's version has them.
pub(super) fn tables(db: &Connection) -> Result<Vec<TableSchema>, StoreError> {
    let read = || {
        let sql = "SELECT t.name, t.wr, c.name, c.pk FROM pragma_table_list t, pragma_table_info(t.name) c \
                   WHERE t.schema = 'main' AND t.name NOT LIKE 'sqlite_%' AND c.name <> 'sum' \
                   ORDER BY t.name, c.cid";
        let mut statement = db.prepare(sql)?;
        let mut rows = statement.query([])?;
        let mut tables: Vec<TableSchema> = Vec::new();
        while let Some(row) = rows.next()? {
            let (name, by_key, column): (String, bool, String) = (row.get(0)?, row.get(1)?, row.get(2)?);
            if tables.last().is_none_or(|table| table.name != name) {
                let order = Vec::from_iter((!by_key).then(|| "rowid".to_owned()));
                tables.push(TableSchema { name, columns: Vec::new(), order });
            }
            if let Some(table) = tables.last_mut() {
                // A key's columns stand in the table as they do in the key.
                if by_key && row.get::<_, u32>(3)? > 0 {
                    table.order.push(column.clone());
                }
                table.columns.push(column);
            }
        }
        Ok(tables)
    };
    read().map_err(at("read its tables"))
}
