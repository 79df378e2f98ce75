//! The claims and the controller calls of volumes. They do not depend on how a mount is made.

pub(in crate::volume) mod attach;
pub(in crate::volume) mod claim;
pub(in crate::volume) mod claim_effects;
pub(in crate::volume) mod controller;
pub(in crate::volume) mod create;
pub(in crate::volume) mod declarations;
pub(in crate::volume) mod delete;
pub(in crate::volume) mod expand;
pub(in crate::volume) mod records;
