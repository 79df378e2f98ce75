//! The plugins that are being unregistered or drained.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Kind, Result};

/// The removal of a plugin that is under way. A plugin has one entry at most.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::volume) enum Leave {
    /// An instance is unregistered, and another one serves its mounts.
    Instance,
    /// The plugin is unregistered: new work is refused.
    Plugin,
    /// The plugin is drained: new work is refused.
    Mounts,
}

#[derive(Default)]
pub(in crate::volume) struct LeavingPlugins(Mutex<BTreeMap<String, Leave>>);

/// An entry of [`LeavingPlugins`], which ends when it is dropped.
pub(in crate::volume) struct Leaving<'a> {
    table: &'a LeavingPlugins,
    id: &'a str,
}

impl LeavingPlugins {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Leave>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a plugin. Refuses one that is entered already.
    pub(in crate::volume) fn begin<'a>(&'a self, id: &'a str, leave: Leave) -> Result<Leaving<'a>> {
        match self.lock().entry(id.to_owned()) {
            Entry::Occupied(entry) => {
                let what = if *entry.get() == Leave::Mounts { "drained" } else { "unregistered" };
                Err(Error::new(Kind::Busy, format!("plugin {id} is being {what} already")))
            }
            Entry::Vacant(entry) => {
                entry.insert(leave);
                Ok(Leaving { table: self, id })
            }
        }
    }

    /// Refuses new work for a plugin that is being unregistered or drained.
    pub(in crate::volume) fn refuse(&self, plugin: &str) -> Result<()> {
        let what = match self.lock().get(plugin) {
            None | Some(Leave::Instance) => return Ok(()),
            Some(Leave::Plugin) => "unregistered",
            Some(Leave::Mounts) => "drained",
        };
        let text = format!("plugin {plugin} is being {what}");
        Err(Error::new(Kind::PluginUnavailable, text)
            .with(|details| details.plugin = Some(plugin.to_owned())))
    }
}

impl Leaving<'_> {
    /// Refuses new work from now on.
    pub(in crate::volume) fn close(&self) {
        self.table.lock().insert(self.id.to_owned(), Leave::Plugin);
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.table.lock().remove(self.id);
    }
}
