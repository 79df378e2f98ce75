//! The calls on plugins that concern their volumes.

pub(in crate::volume) mod drain;
pub(in crate::volume) mod inventory;
mod node_drain;
