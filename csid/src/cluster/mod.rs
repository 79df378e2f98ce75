//! csid's side of a cluster: a session with one of its servers, and the calls to that server. The servers have the registrations and
//! claims of all nodes. csid reaches them through csid-link, at one Unix socket for each server, for csid has no network.
//!
//! Nothing that is mounted depends on a server: without one, claims cannot be taken, and the servers learn later what has ended.

mod answers;
mod calls;
mod controller;
mod drain;
mod expansions;
mod explained;
mod failure;
mod fence;
mod hold;
mod link;
mod node;
mod orders;
mod owed;
mod pauses;
mod permits;
mod questions;
mod quiet;
mod reconcile;
mod remembered;
mod round;
pub mod rows;
pub mod rpcs;
mod session;
mod view;

pub use node::{Node, SessionState};
pub use view::{NodeView, NodeWatch, STATES};
