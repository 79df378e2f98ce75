//! The types of calls on volumes and of their answers: plain data, without behaviour.

pub mod mount_options;
pub mod operation_kind;
pub mod requests;
pub mod views;
