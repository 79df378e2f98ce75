//! The tables that all volumes share. Each is a leaf, which does not import its readers.

pub(in crate::volume) mod bound_claims;
pub(in crate::volume) mod connections;
pub(in crate::volume) mod leaving_plugins;
pub(in crate::volume) mod target_roots;
pub(in crate::volume) mod watched_volumes;
