//! The registry of plugins: the handle, what changes it, and what it keeps.

mod defined;
mod exec;
mod facts;
mod kept;
mod leaving;
mod managed;
mod node_id;
mod plugins;
mod upgrade;

pub use defined::{AppliedFiles, moved_under};
pub use exec::Exec;
pub use plugins::Plugins;
pub(super) use plugins::{InstanceEntry, owner};
