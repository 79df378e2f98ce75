//! The engine of claims and controller calls. It knows the registry and, through `seam::Site`, the host on which it runs. It does not
//! depend on how a mount is made, so it can run where nothing is mounted.

mod attach;
mod claim;
pub(in crate::volume) mod claim_effects;
mod controller;
mod create;
pub(in crate::volume) mod declarations;
mod delete;
pub(in crate::volume) mod engine;
mod expand;
pub(in crate::volume) mod records;
mod secrets;
pub(in crate::volume) mod tries;
