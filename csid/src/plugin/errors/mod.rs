//! The errors of the room, an enum for each subject. A variant becomes an [`Error`], with its kind and its details.

pub(in crate::plugin) mod exec;
pub(in crate::plugin) mod node_id;
pub(in crate::plugin) mod process;
pub(in crate::plugin) mod registrar;
pub(in crate::plugin) mod registry;
pub(in crate::plugin) mod service;
pub(in crate::plugin) mod spec;
pub(in crate::plugin) mod start;

use crate::error::{Error, Kind, Obstacle};

pub(in crate::plugin) fn unknown(id: &str) -> Error {
    Error::not_found(format!("there is no plugin {id}")).obstructed_by(Obstacle::UnknownPlugin)
}

/// Makes the error for a change of a plugin that a file defines.
pub(in crate::plugin) fn of_file(kind: Kind, id: &str) -> Error {
    let text = format!("the plugin {id} is defined by plugins.d/{id}.toml");
    Error::new(kind, text).obstructed_by(Obstacle::PluginOfFile)
}

/// Makes the error for the name of a new instance that only one that registers itself can have.
pub(in crate::plugin) fn reserved_name(instance: &str) -> Error {
    Error::invalid(format!("instance `{instance}`: such names are of instances that register themselves"))
}

/// Adds to an error that settings of the unit hide the plugin's mounts.
pub(in crate::plugin) fn hidden(error: Error, unit: &str) -> Error {
    error.with(|details| details.holders = vec![unit.to_owned()]).obstructed_by(Obstacle::Hidden)
}

/// Makes the error for a call that csid's own stop has ended.
pub(in crate::plugin) fn stopping(text: &str) -> Error {
    Error::new(Kind::PluginShutdown, text).obstructed_by(Obstacle::Stopping)
}
