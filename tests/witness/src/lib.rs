//! csi-witness stands between a CO and a plugin: it forwards every call, writes it into a log, breaks what a script asks it
//! to break, and finds in the log which rules for COs were broken. It owns its socket and the log. What always holds: a
//! record of a call's end is written before the CO gets the answer, so the log's order is one that the CO can have seen;
//! no secret, context value or mount flag is in the log.

mod log;
mod message;
mod proxy;
mod record;
pub mod report;
pub mod rules;
mod script;
mod witness;

pub use log::{Hosts, LogError, Reader};
pub use message::Alteration;
pub use record::{Event, Mark, Record, mark};
pub use script::{GRPC_CODES, Script, ScriptError};
pub use witness::{Setup, Sockets, StartError, Witness};
