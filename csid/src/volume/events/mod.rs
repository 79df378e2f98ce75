//! The events that operations write, and the log lines of their failures.

pub(in crate::volume) mod claim;
pub(in crate::volume) mod mount;
pub(in crate::volume) mod registration;
