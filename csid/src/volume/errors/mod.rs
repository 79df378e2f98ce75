//! The errors that callers read, and the events that go with them.

pub(in crate::volume) mod claim;
pub(in crate::volume) mod mount;
