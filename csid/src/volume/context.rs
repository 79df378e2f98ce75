//! The handles and tables that all volumes share.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::config::{Config, Directories};
use crate::error::Result;
use crate::host::Host;
use crate::host::units::Units;
use crate::plugin::Plugins;
use crate::store::{Store, StoreError};
use crate::volume::control::records::Records;
use crate::volume::operation::directory::{Directory, Spawn};
use crate::volume::operation::places::Places;
use crate::volume::operation::table::OperationTable;
use crate::volume::tables::bound_claims::BoundClaims;
use crate::volume::tables::connections::Connections;
use crate::volume::tables::leaving_plugins::LeavingPlugins;
use crate::volume::tables::target_roots::TargetRoots;
use crate::volume::tables::watched_volumes::WatchedVolumes;

/// The interval between two retries of blocked releases, and of declared volumes after an error that is not retryable.
pub(in crate::volume) const SWEEP: Duration = Duration::from_secs(300);

/// The handles and tables that the actors of all volumes share.
pub(in crate::volume) struct Context {
    pub(in crate::volume) store: Store,
    pub(in crate::volume) plugins: Plugins,
    pub(in crate::volume) host: Host,
    pub(in crate::volume) units: Units,
    pub(in crate::volume) config: tokio::sync::watch::Receiver<Arc<Config>>,
    pub(in crate::volume) directories: Directories,
    pub(in crate::volume) directory: Directory,
    pub(in crate::volume) operations: OperationTable,
    pub(in crate::volume) records: Records,
    pub(in crate::volume) bound: BoundClaims,
    /// The open connections on the private socket.
    pub(in crate::volume) connections: Connections,
    pub(in crate::volume) stopping: AtomicBool,
    /// Set until recovery has loaded the journal. Requests are refused, otherwise callers would see no mounts.
    pub(in crate::volume) untaken: AtomicBool,
    pub(in crate::volume) leaving: LeavingPlugins,
    pub(in crate::volume) places: Places,
    pub(in crate::volume) roots: TargetRoots,
    pub(in crate::volume) served: WatchedVolumes,
    /// Lock of an adoption, held from the comparison of its paths with all rows until its own row is written.
    pub(in crate::volume) adopting: tokio::sync::Mutex<()>,
    /// The time of the next retry of blocked releases. `None`: it is not known yet.
    pub(in crate::volume) next_sweep: Mutex<Option<Instant>>,
}

impl Context {
    /// Makes the context. `spawn` starts the actor of a volume.
    pub(in crate::volume) fn new(
        store: Store,
        records: Records,
        plugins: Plugins,
        host: Host,
        config: tokio::sync::watch::Receiver<Arc<Config>>,
        directories: Directories,
        spawn: Spawn,
    ) -> Self {
        Context {
            records,
            bound: BoundClaims::default(),
            connections: Connections::default(),
            store,
            units: plugins.units(),
            plugins,
            host,
            config,
            directories,
            directory: Directory::new(spawn),
            operations: OperationTable::default(),
            stopping: AtomicBool::new(false),
            untaken: AtomicBool::new(false),
            leaving: LeavingPlugins::default(),
            places: Places::default(),
            roots: TargetRoots::default(),
            served: WatchedVolumes::default(),
            adopting: tokio::sync::Mutex::default(),
            next_sweep: Mutex::default(),
        }
    }

    pub(in crate::volume) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Refuses changes while the journal cannot take them, or before recovery has loaded its rows.
    pub(in crate::volume) fn changeable(&self) -> Result<()> {
        self.store.writable()?;
        match self.untaken.load(Ordering::SeqCst) {
            true => Err(StoreError::Full.into()),
            false => Ok(()),
        }
    }

    pub(in crate::volume) fn next_sweep(&self) -> MutexGuard<'_, Option<Instant>> {
        self.next_sweep.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Syncs the journal. An answer that repeats an earlier one has to be as durable.
    pub(in crate::volume) async fn synced(&self) -> Result<()> {
        Ok(self.store.sync().await?)
    }

    /// Returns the existing directory below which csid makes and removes directories for the plugin with this `root`. It is
    /// csid's own if `root` is in it, else `root` itself, which the plugin's spec names.
    pub(in crate::volume) fn base<'a>(&'a self, root: &'a Path) -> &'a Path {
        if root.starts_with(&self.directories.state) { &self.directories.state } else { root }
    }
}
