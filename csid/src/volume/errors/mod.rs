//! The errors that callers read.

pub(in crate::volume) mod claim;
pub(in crate::volume) mod mount;
