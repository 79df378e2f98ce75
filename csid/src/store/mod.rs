//! The journal: SQLite, one connection, one thread that owns it; a request is a message, an answer a oneshot.
//! Requests that wait together are committed together.
//!
//! State: the file `csid.db` and its log. Of the rows only what `held` and `known_claims` say is kept in memory. Always true:
//! - A commit is answered after it happened, and when it is as durable as was asked. SQLite writes its log and never syncs it for a
//!   commit. The thread syncs the log, after the answers to those who need no sync.
//! - A request is done whole or not at all, and fails alone. A swap of a record that is another one by now is refused
//!   before it writes anything, so that it costs the others of its group nothing.
//! - Nothing is written before all was read and found sound. A damaged file is left as it is, whenever that is
//!   noticed: what can be read of it is read, every change is refused ([`StoreError::Corrupt`]), until
//!   [`Store::replace`] keeps it aside.
//! - An event's sequence is never given twice, not even after a power cut; blocks of numbers are reserved by
//!   synced commits.
//!
//! It knows rows, not rules: what a row may become is `volume`'s.

mod change;
mod checksum;
mod claim;
pub mod claim_set;
mod counts;
mod error;
pub mod event_kind;
mod file;
mod handle;
mod held;
mod journal;
mod known_claims;
mod loaded;
mod mark;
mod node;
mod place;
mod record;
mod records;
pub mod registry;
mod remains;
mod request;
pub mod rows;
mod schema;
mod shared;
mod tables;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
pub(crate) mod tests;
mod thread;
pub mod volume_handle;
mod words;

pub use change::{Change, Durability};
pub use counts::Counts;
pub use error::StoreError;
pub use handle::{Store, Syncing};
pub use loaded::{Loaded, MountFilter};
pub use place::JournalDirectory;
pub use shared::Health;
