//! The errors of the room, an enum for each subject. A variant becomes an [`Error`](crate::Error), with its kind and its details.

pub(in crate::plugin) mod exec;
pub(in crate::plugin) mod node_id;
pub(in crate::plugin) mod process;
pub(in crate::plugin) mod registrar;
pub(in crate::plugin) mod registry;
pub(in crate::plugin) mod service;
pub(in crate::plugin) mod spec;
pub(in crate::plugin) mod start;
pub(in crate::plugin) mod upgrade;
