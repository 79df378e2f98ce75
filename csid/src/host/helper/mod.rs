//! Calls that a file system's server can hold up, made by another process: a thread that waits for such a server survives SIGKILL,
//! and with it everything that its process has open. csid's own process makes none of them.
//!
//! csid is connected to workers of the helper (`worker`); each carries out one call at a time (`wire`). A call that takes long is
//! put aside: it no longer counts among the calls at once, and other paths do not wait for it. There is one call at a path
//! (`turns`), however many ask; also when csid was restarted while one hung there (`slots`).
//! The search through all mount namespaces has a worker of its own (`search`).

mod client;
mod memory;
mod places;
mod search;
mod sift;
mod slots;
mod ticker;
mod turns;
mod wire;
pub mod worker;

pub(super) use client::{Helper, Unanswered, WATCHED, hung_at};
pub use client::{SOCKET, Tree};
pub(super) use search::{SearchAnswered, SearchWorker};
pub use sift::Sifted;
pub(super) use wire::HelperRequest;
