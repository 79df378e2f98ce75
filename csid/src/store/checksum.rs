//! `checksum(…)` in SQL: what a row's other columns hash to. SQLite sees when a page's order is broken; that a
//! letter of a name is another one now is seen by this. Against accidents, not against root.

use rusqlite::Connection;
use rusqlite::functions::{Context, FunctionFlags};
use rusqlite::types::ValueRef;

pub(super) fn add(db: &Connection) -> rusqlite::Result<()> {
    let flags = FunctionFlags::SQLITE_UTF8 | FunctionFlags::SQLITE_DETERMINISTIC;
    db.create_scalar_function(c"checksum", -1, flags, |values| Ok(checksum(values)))
}

/// FNV-1a, 64 bits: a change of one byte always shows.
fn checksum(values: &Context<'_>) -> i64 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    let mut feed = |bytes: &[u8]| {
        for byte in bytes {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
    };
    for place in 0..values.len() {
        match values.get_raw(place) {
            ValueRef::Null => feed(b"n"),
            ValueRef::Integer(number) => feed(&number.to_le_bytes()),
            ValueRef::Real(number) => feed(&number.to_bits().to_le_bytes()),
            // With its length, so that no byte can pass from one column to the next.
            ValueRef::Text(bytes) | ValueRef::Blob(bytes) => {
                feed(&(bytes.len() as u64).to_le_bytes());
                feed(bytes);
            }
        }
    }
    hash.cast_signed()
}
