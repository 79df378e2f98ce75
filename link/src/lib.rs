//! A node's connections to the servers of its cluster. csid has no network and no TLS: it opens a Unix socket, one for each server, and
//! csid-link copies the bytes of HTTP/2 to that server and back. csictl reaches servers with the same code, as an operator.
//!
//! State: the node's key, in memory, and the sockets. Always true:
//! - The far end is a server of this cluster: its certificate has the one URI name `csid://CLUSTER/server/NAME`, besides the DNS name.
//! - Only uid 0 of this host gets a connection.
//! - csid-link does not look into the bytes, and keeps none.

mod config;
mod far;
mod program;
mod relay;
pub mod tls;

pub use config::{bytes, check_servers};
pub use far::Far;
pub use program::main;
