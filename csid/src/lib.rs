//! csid: a CSI volume manager for a plain Linux host. The rooms and who owns what: ARCHITECTURE.md.

mod backoff;
pub mod bus;
mod busy_poll;
pub mod cluster;
pub mod config;
pub mod daemon;
pub mod error;
pub mod fault;
mod histogram;
pub mod host;
mod log;
pub mod metrics;
mod names;
pub mod plugin;
mod quiet_stream;
pub mod random;
pub mod secret;
pub mod store;
mod system_bus;
mod unix_signals;
pub mod volume;

pub use error::{Error, Kind, Result};
