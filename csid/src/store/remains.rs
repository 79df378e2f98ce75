//! Reads the legible rows of a damaged journal into a journal in memory. The file and its log stay as they are.

use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::Path;

use rusqlite::types::Value;
use rusqlite::{Connection, Row, params_from_iter};

use crate::store::error::StoreError;
use crate::store::file::{alone, in_memory};
use crate::store::place::{JournalDirectory, LOG, NAME};
use crate::store::records::{claim, record};
use crate::store::schema::{self, TableSchema};
use crate::store::tables::{checked, event, is_legible_meta, mount, plugin, volume, whole};

/// No journal has more rows of a kind; a damaged one may seem to have them without end.
const MOST: u32 = 1_000_000;

/// The rows of a file that could not be opened as a journal. A copy is read: to open a damaged file may change it.
pub(super) fn of_file(place: &JournalDirectory) -> Result<Connection, StoreError> {
    // The runtime directory may be too small for it; then the journal's own disk has to hold it for the while.
    let copies = [&place.runtime, &place.directory].map(|base| base.join("journal-copy"));
    // A csid that was killed here left copies: they take up space, and their logs are of another moment.
    copies.iter().for_each(|copy| clear(copy));
    for copy in &copies {
        let read = copied(place, copy).and_then(|()| of(&alone(&copy.join(NAME))?));
        clear(copy);
        match read {
            Ok(memory) => return Ok(memory),
            Err(error) => tracing::warn!(%error, "the damaged journal cannot be read from a copy"),
        }
    }
    tracing::warn!("nothing of the damaged journal could be read");
    in_memory(schema::KNOWN)
}

fn clear(copy: &Path) {
    // Not what a link leads to.
    if !copy.symlink_metadata().is_ok_and(|found| found.is_dir()) {
        return;
    }
    for name in [NAME, LOG] {
        let _ = std::fs::remove_file(copy.join(name));
    }
    let _ = std::fs::remove_dir(copy);
}

/// Into a directory that nobody else has made.
fn copied(place: &JournalDirectory, copy: &Path) -> Result<(), StoreError> {
    let failed = |source| StoreError::File { step: "copy the damaged journal to", path: copy.into(), source };
    std::fs::DirBuilder::new().mode(0o700).create(copy).map_err(failed)?;
    for name in [NAME, LOG] {
        if place.length(name)?.is_some() {
            std::fs::copy(place.path(name), copy.join(name)).map_err(failed)?;
        }
    }
    whole_length(&copy.join(NAME)).map_err(failed)
}

/// SQLite reads nothing of a file that is shorter than it says, and removes the log of an empty one.
fn whole_length(path: &Path) -> std::io::Result<()> {
    let file = std::fs::OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    let mut header = [0; 32];
    let _ = file.read_at(&mut header, 0)?;
    let page_size = u64::from(u16::from_be_bytes([header[16], header[17]])).max(4096);
    let pages = u32::from_be_bytes([header[28], header[29], header[30], header[31]]).clamp(1, MOST);
    if file.metadata()?.len() < page_size * u64::from(pages) {
        file.set_len(page_size * u64::from(pages))?;
    }
    Ok(())
}

/// The rows that this connection still reads.
pub(super) fn of(from: &Connection) -> Result<Connection, StoreError> {
    let memory = in_memory(schema::KNOWN)?;
    match schema::version(from) {
        Ok(schema::KNOWN) => take(from, &memory, is_legible)?,
        Ok(version @ schema::SUMMED..) => {
            let mut older = in_memory(version)?;
            take(from, &older, |_, row| whole(row).is_ok())?;
            schema::migrate(&mut older, schema::KNOWN)?;
            take(&older, &memory, is_legible)?;
        }
        _ => {}
    }
    Ok(memory)
}

/// Returns whether the row is as it was written, and this csid understands it.
fn is_legible(table: &str, row: &Row<'_>) -> bool {
    match table {
        "meta" => is_legible_meta(row),
        "plugins" => plugin(row).is_ok(),
        "volumes" => volume(row).is_ok(),
        "mounts" => mount(row).is_ok(),
        "events" => event(row).is_ok(),
        "registry" => record(row).is_ok(),
        "claims" | "past_claims" => claim(row).is_ok(),
        _ => whole(row).is_ok(),
    }
}

/// The rows of every table of `to` that can be read and are wanted, from both ends towards what cannot be read.
fn take(from: &Connection, to: &Connection, wanted: fn(&str, &Row<'_>) -> bool) -> Result<(), StoreError> {
    for TableSchema { name: table, columns, order } in schema::tables(to)? {
        let (marks, count) = (vec!["?"; columns.len()].join(", "), columns.len());
        let columns = columns.join(", ");
        let insert = format!("INSERT OR REPLACE INTO {table} ({columns}, sum) VALUES ({marks}, 0)");
        for direction in ["ASC", "DESC"] {
            let order =
                order.iter().map(|column| format!("{column} {direction}")).collect::<Vec<_>>().join(", ");
            let select = format!("SELECT {} FROM {table} ORDER BY {order} LIMIT {MOST}", checked(&columns));
            let all = || -> rusqlite::Result<()> {
                let mut statement = from.prepare(&select)?;
                let mut rows = statement.query([])?;
                while let Some(row) = rows.next()? {
                    if wanted(&table, row) {
                        let values = (0..count).map(|place| row.get::<_, Value>(place));
                        let values = values.collect::<rusqlite::Result<Vec<_>>>()?;
                        to.prepare_cached(&insert)?.execute(params_from_iter(values))?;
                    }
                }
                Ok(())
            };
            match all() {
                Ok(()) => break,
                Err(error) => {
                    tracing::warn!(%error, table, direction, "not all rows of the damaged journal can be read");
                }
            }
        }
        let sums = format!("UPDATE {table} SET sum = checksum({columns})");
        if let Err(error) = to.execute(&sums, []) {
            tracing::warn!(%error, table, "the rows of the damaged journal cannot be shown");
        }
    }
    Ok(())
}
