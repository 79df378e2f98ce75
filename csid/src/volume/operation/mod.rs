//! Operations as data: the requests, their callers, and the tables that list them.

pub(in crate::volume) mod directory;
pub(in crate::volume) mod journal;
pub(in crate::volume) mod message;
pub(in crate::volume) mod orders;
pub(in crate::volume) mod places;
pub(in crate::volume) mod request;
pub(in crate::volume) mod running;
pub(in crate::volume) mod table;
pub(in crate::volume) mod timeline;
