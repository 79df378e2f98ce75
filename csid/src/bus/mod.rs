//! D-Bus: decode, authorise, make one call inward, encode; nothing else.
//!
//! This room owns connections and nothing that outlives one: no volume, no plugin, no operation. Invariants:
//! - Every call passes [`dispatch`], whose table has each member that is served and the action it needs. It refuses other members.
//! - A handler cannot run without a [`authorise::Permit`], which only the authoriser makes. Nothing decodes arguments for it earlier.
//! - A lost connection ends no operation.
//! - csid stops reading from a peer that does not read its answers.
//!
//! Reasons against zbus' object server: docs/decisions/0001-own-dispatcher.md.

mod arguments;
mod authorise;
mod call;
mod caller;
mod claims;
mod cluster;
mod contract;
mod cursor;
mod dispatch;
mod exec;
mod facts;
mod failure;
mod fds;
mod introspect;
mod inventory;
mod limits;
mod manager;
mod mounts;
mod options;
mod oversize;
mod plugin;
mod polkit;
mod rooms;
mod rows;
mod serve;
mod signals;
mod socket;
mod standard;
mod stream;
mod upgrade;
mod volume_rows;
mod volumes;

#[cfg(test)]
mod tests;

pub use limits::Limits;
pub use rooms::{Rooms, State};
pub use serve::{serve_bus, serve_socket};
pub use signals::Signals;
