//! A power cut: [`vfs`] records what SQLite does to its files, [`disk`] says what of it may be on the disk afterwards.
//!
//! The record is one file that csid and the test append to, so it has one order: what the test noted before a write was
//! so before that write. Every place in it is a moment at which the power may go.

pub mod disk;
pub mod record;
pub mod vfs;
