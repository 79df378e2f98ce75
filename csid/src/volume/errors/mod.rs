//! The errors that callers read. An enum's variants become an [`Error`](crate::Error), with its kind and its details.

pub(in crate::volume) mod claim;
pub(in crate::volume) mod mount;
pub(in crate::volume) mod operation;
