//! The errors that callers read. A variant becomes an [`Error`](crate::Error), with its kind and its details.

pub(in crate::volume) mod claim;
pub(in crate::volume) mod credential;
pub(in crate::volume) mod mount;
pub(in crate::volume) mod operation;
pub(in crate::volume) mod volume;
