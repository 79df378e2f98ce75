//! The volumes that files declare, and which of them are not registered yet.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::RwLock;
use tokio::task::JoinHandle;

use crate::error::Error;
use crate::store::registry::{VolumeName, VolumeSpec};
use crate::store::rows::VolumeKey;
use crate::volume::api::requests::Declared;

/// The declarations of all files.
#[derive(Default)]
pub(in crate::volume) struct Declarations {
    table: Mutex<BTreeMap<VolumeName, Declaration>>,
    /// Write-locked while the table changes, read-locked while a declared volume is registered.
    pub(in crate::volume) changing: RwLock<()>,
    /// The tokio task that registers the waiting volumes.
    trying: Mutex<Option<JoinHandle<()>>>,
}

pub(in crate::volume) struct Declaration {
    pub(in crate::volume) declared: Declared,
    /// `None`: the volume is registered as declared.
    pub(in crate::volume) waits: Option<Waits>,
}

#[derive(Clone, Default)]
pub(in crate::volume) struct Waits {
    /// The last error. Empty: the plugin does not serve yet.
    pub(in crate::volume) error: String,
    pub(in crate::volume) next_try: Option<Instant>,
}

impl Declarations {
    pub(in crate::volume) fn lock(&self) -> MutexGuard<'_, BTreeMap<VolumeName, Declaration>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the file that declares a volume.
    pub(in crate::volume) fn file(&self, name: &VolumeName) -> Option<PathBuf> {
        self.lock().get(name).map(|entry| entry.declared.file.clone())
    }

    /// Returns the declaration of a volume that is not registered so, with its error and next retry. `None`: no declaration
    /// waits.
    pub(in crate::volume) fn waiting(&self, name: &VolumeName) -> Option<(Declared, Waits)> {
        let table = self.lock();
        let entry = table.get(name)?;
        Some((entry.declared.clone(), entry.waits.clone()?))
    }

    /// Keeps the table unchanged while the returned value lives.
    pub(in crate::volume) async fn hold(&self) -> impl Sized {
        self.changing.read().await
    }

    /// Returns whether a file declares the volume like this now.
    pub(in crate::volume) fn say(&self, name: &VolumeName, volume: &VolumeKey, spec: &VolumeSpec) -> bool {
        let table = self.lock();
        table
            .get(name)
            .is_some_and(|Declaration { declared, .. }| (&declared.volume, &declared.spec) == (volume, spec))
    }

    /// Notes that a volume is registered, unless its file has changed since.
    pub(in crate::volume) fn done(&self, declared: &Declared) {
        if let Some(entry) = self.lock().get_mut(&declared.name)
            && entry.declared == *declared
        {
            entry.waits = None;
        }
    }

    /// Notes a failure. Returns whether the error differs from the last one.
    pub(in crate::volume) fn failed(&self, name: &VolumeName, error: &Error, next_try: Instant) -> bool {
        let mut table = self.lock();
        let Some(waits) = table.get_mut(name).and_then(|entry| entry.waits.as_mut()) else { return false };
        let before = std::mem::replace(&mut waits.error, error.message.clone());
        waits.next_try = Some(next_try);
        before != waits.error
    }

    /// Stops the registration of waiting volumes.
    pub(in crate::volume) fn stop(&self) {
        self.take_over(None).inspect(JoinHandle::abort);
    }

    /// Replaces the task that registers, and returns the previous one.
    pub(in crate::volume) fn take_over(&self, next: Option<JoinHandle<()>>) -> Option<JoinHandle<()>> {
        std::mem::replace(&mut *self.trying.lock().unwrap_or_else(PoisonError::into_inner), next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn withdrawn_declaration_is_not_retried() {
        let declarations = Declarations::default();
        let (tries, is_over) = tokio::sync::oneshot::channel::<()>();
        let trying = async move {
            let _tries = tries;
            std::future::pending().await
        };
        declarations.take_over(Some(tokio::spawn(trying)));
        let _written = declarations.hold().await;
        declarations.stop();
        tokio::time::timeout(std::time::Duration::from_secs(5), is_over)
            .await
            .expect("it has ended")
            .unwrap_err();
    }
}
