//! A node's connections to the servers of its cluster. csid has no network and no TLS: it opens a Unix socket, one for each server, and
//! csid-link copies the bytes of HTTP/2 to that server and back.
//!
//! State: the node's key, in memory, and the sockets. Always true:
//! - The far end is a server of this cluster: its certificate has the one URI name `csid://CLUSTER/server/NAME`, besides the DNS name.
//! - Only uid 0 of this host gets a connection.
//! - csid-link does not look into the bytes, and keeps none.

mod config;
mod program;
mod relay;
mod tls;

pub use program::main;
