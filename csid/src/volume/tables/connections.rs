//! The connections on the private socket.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The open connections, by the names that claims have for them.
#[derive(Clone, Default)]
pub(in crate::volume) struct Connections(Arc<Mutex<BTreeSet<String>>>);

/// An open connection; it is removed from the table when this is dropped.
pub struct Connected {
    name: String,
    of: Connections,
}

impl Connected {
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.of.lock().remove(&self.name);
    }
}

impl Connections {
    pub(in crate::volume) fn lock(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a connection until the returned value is dropped. No other connection has or will have its name.
    pub(in crate::volume) fn enter(&self, name: String) -> Connected {
        self.lock().insert(name.clone());
        Connected { name, of: self.clone() }
    }
}
