//! The registry of volumes on etcd: csid's trait [`Registry`](csid::store::registry::Registry) for the servers of a cluster. The
//! keys, the rule for unknown outcomes and the cache are those of decision 0006.
//!
//! State: etcd's keys below the prefix. In memory is a [`cache`] of them, which one task follows. Always true:
//! - A change is one transaction, which compares the record's revision. So a stale cache never has a record overwritten. Lists come
//!   from the cache, and callers decide with lists: a list has all changes of its own registry, and is refused if the cache cannot
//!   be followed.
//! - A change that was answered is committed. A transaction whose outcome is not known is sent again, unchanged, until etcd commits
//!   or refuses it. Then etcd's history says which try it was.
//! - A field that this version does not know is written back as it was read.

mod by_node;
mod by_owner;
mod cache;
mod change;
mod client;
mod connection;
#[cfg(feature = "double")]
pub mod double;
mod error;
mod guard;
mod history;
mod keys;
mod limits;
mod listing;
mod lists;
mod members;
mod observe;
mod operations;
mod registry;
mod reply;
mod rest;
mod rows;
mod stored;
mod walk;
mod watcher;
mod wire;

pub use error::EtcdError;
pub use guard::{Expected, Guard};
pub use keys::{RowKey, Rows};
pub use listing::{ClaimInList, ClaimsAfter, LeftOut, ListFilter, ListPart};
pub use members::{EtcdConfig, EtcdTls, Timing};
pub use observe::Observe;
pub use registry::{EtcdRegistry, KeepEvents, Swapped};
pub use rows::{Pages, Row, RowStore, Write, Written};
pub use walk::{Walk, Walked, WalkedVolume};

/// etcd's messages and calls, for tests that compact, or ask for the leader.
pub mod api {
    pub use crate::wire::*;
}
