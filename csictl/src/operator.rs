//! The servers of a cluster, asked by an operator. TLS and the check of the far end are csid-link's.
//!
//! State: the operator's key, in memory. Always true:
//! - A key file that others can read is not used.
//! - The servers are asked in their order in the file, until one of them decides the call. A call is repeated at the next server, so each call
//!   that changes something has to be the same when it is repeated.

mod connection;
mod failure;
mod file;
pub mod rows;
mod servers;

pub use failure::{OperatorError, Skipped};
pub use servers::{ANSWER, LeftOut, Servers};
