//! Volumes that files declare. Each is registered for uid 0, in the way of RegisterVolume, as soon as its plugin serves, and is
//! tried again until it is: at csid's start and after a reload nobody waits for that but who uses the volume. What the
//! registry has already as the file says it needs no plugin.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use serde_json::Value;
use tokio::sync::RwLock;
use tokio::task::JoinHandle;

use crate::error::{Error, Result};
use crate::plugin::Service;
use crate::store::registry::{Origin, Record, RecordFilter, Registration, VolumeName, VolumeSpec};
use crate::store::rows::VolumeKey;
use crate::store::{Change, Durability, StoreError};
use crate::volume::control::Backoff;
use crate::volume::files::Declared;
use crate::volume::registering::new_registration;
use crate::volume::requests::{RegisterRequest, VolumeView};
use crate::volume::watch::SWEEP;
use crate::volume::{Shared, Volumes, Wait, claim_words as words};

/// What files declare now.
#[derive(Default)]
pub(super) struct Declarations {
    table: Mutex<BTreeMap<VolumeName, Entry>>,
    /// Held across a change of the table; read, where a registration of one that it declares is written.
    changing: RwLock<()>,
    /// Has those registered that wait.
    trying: Mutex<Option<JoinHandle<()>>>,
}

struct Entry {
    declared: Declared,
    /// Absent: it is registered.
    waits: Option<Waits>,
}

#[derive(Clone, Default)]
pub(super) struct Waits {
    /// Empty: its plugin does not serve yet.
    pub(super) error: String,
    pub(super) next_try: Option<Instant>,
}

/// What [`Volumes::declare`] did.
#[derive(Debug, Default)]
pub struct Applied {
    /// As they were.
    pub unchanged: usize,
    /// To be registered, or changed.
    pub waiting: usize,
    pub removed: Vec<String>,
    /// Their files are gone, but they are in use: they stay until the next reload without.
    pub kept: Vec<String>,
}

impl Declarations {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<VolumeName, Entry>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The file that declares a volume.
    pub(super) fn file(&self, name: &VolumeName) -> Option<PathBuf> {
        self.lock().get(name).map(|entry| entry.declared.file.clone())
    }

    /// What is declared and not registered so, and why.
    pub(super) fn waiting(&self, name: &VolumeName) -> Option<(Declared, Waits)> {
        let table = self.lock();
        let entry = table.get(name)?;
        Some((entry.declared.clone(), entry.waits.clone()?))
    }

    /// As long as this is held the table stays as it is.
    pub(super) async fn hold(&self) -> impl Sized {
        self.changing.read().await
    }

    /// Whether a file says this of the volume now.
    pub(super) fn say(&self, name: &VolumeName, volume: &VolumeKey, spec: &VolumeSpec) -> bool {
        let table = self.lock();
        table
            .get(name)
            .is_some_and(|Entry { declared, .. }| (&declared.volume, &declared.spec) == (volume, spec))
    }

    /// It is registered so; the file may say something else by now.
    fn done(&self, declared: &Declared) {
        if let Some(entry) = self.lock().get_mut(&declared.name)
            && entry.declared == *declared
        {
            entry.waits = None;
        }
    }

    /// Whether that is news.
    fn failed(&self, name: &VolumeName, error: &Error, next_try: Instant) -> bool {
        let mut table = self.lock();
        let Some(waits) = table.get_mut(name).and_then(|entry| entry.waits.as_mut()) else { return false };
        let before = std::mem::replace(&mut waits.error, error.message.clone());
        waits.next_try = Some(next_try);
        before != waits.error
    }

    /// Nothing is tried any more.
    pub(super) fn stop(&self) {
        self.take_over(None).inspect(JoinHandle::abort);
    }

    /// Who has them registered from now on; who did.
    fn take_over(&self, next: Option<JoinHandle<()>>) -> Option<JoinHandle<()>> {
        std::mem::replace(&mut *self.trying.lock().unwrap_or_else(PoisonError::into_inner), next)
    }
}

impl Volumes {
    /// How many volumes are not registered as files declare them.
    pub fn unregistered(&self) -> usize {
        self.shared.declarations.lock().values().filter(|entry| entry.waits.is_some()).count()
    }

    /// The registered volumes, and those that files declare and that are not registered yet.
    pub async fn volumes_and_declared(&self, filter: RecordFilter) -> Result<Vec<VolumeView>> {
        let mut views = self.volumes(filter.clone()).await?;
        let registered: BTreeSet<VolumeName> = views.iter().map(|view| view.record.name.clone()).collect();
        let is = |wanted: &Option<String>, has: &str| wanted.as_ref().is_none_or(|wanted| wanted == has);
        for Entry { declared, waits } in self.shared.declarations.lock().values() {
            let Declared { name, volume, .. } = declared;
            let is_wanted = filter.node.is_none()
                && is(&filter.namespace, &name.namespace)
                && is(&filter.plugin, &volume.plugin)
                && filter.prefix.as_ref().is_none_or(|prefix| name.volume.starts_with(prefix.as_str()));
            if waits.is_none() || !is_wanted || registered.contains(name) {
                continue;
            }
            let (volume, registration) = (volume.clone(), Some(registration(declared)));
            let record = Record { volume, registration, ..Record::none(name.clone()) };
            let view = self.shared.view(record, Vec::new());
            views.push(VolumeView { schedulable: false, only_declared: true, ..view });
        }
        views.sort_by(|one, other| one.record.name.cmp(&other.record.name));
        Ok(views)
    }

    /// Whether the volumes of `files` may be so, as far as that is known without their plugins.
    pub async fn check_declared(&self, files: &[Declared]) -> Result<()> {
        let records = self.shared.records_by_name().await?;
        for declared in files {
            let mut record = record_of(&records, &declared.name);
            let put = self.shared.put(&mut record, &declared.volume, &registration(declared));
            put.map_err(|error| words::declared(&declared.file, error))?;
        }
        Ok(())
    }

    /// Make the declared volumes those of `files`. One whose file is gone is forgotten, unless it is in use; `all`: no other
    /// file is there that could be its.
    pub async fn declare(&self, files: Vec<Declared>, all: bool) -> Result<Applied> {
        let shared = &self.shared;
        let _changing = shared.declarations.changing.write().await;
        // What was begun is in the registry before it is read, or never will be.
        if let Some(before) = shared.declarations.take_over(None) {
            before.abort();
            let _ = before.await;
        }
        let records = shared.records_by_name().await?;
        let mut applied = Applied::default();
        let mut table = BTreeMap::new();
        for declared in files {
            let mut record = record_of(&records, &declared.name);
            let there = shared.put(&mut record, &declared.volume, &registration(&declared));
            let waits = (!matches!(there, Ok(None))).then(Waits::default);
            let count = if waits.is_some() { &mut applied.waiting } else { &mut applied.unchanged };
            *count += 1;
            table.insert(declared.name.clone(), Entry { declared, waits });
        }
        let gone = |record: &&Record| all && is_of_file(record) && !table.contains_key(&record.name);
        let gone: Vec<VolumeName> = records.values().filter(gone).map(|record| record.name.clone()).collect();
        let waiting = table.values().filter(|entry| entry.waits.is_some());
        let waiting = waiting.map(|entry| Arc::clone(shared).pursue(entry.declared.clone()));
        let mut waiting: FuturesUnordered<_> = waiting.collect();
        *shared.declarations.lock() = table;
        for name in gone {
            match shared.deregister(&name, None, 0, false, Origin::File).await {
                Ok(()) => applied.removed.push(name.to_string()),
                Err(error) => {
                    tracing::warn!(volume = %name, "the file of {name} is gone, but the volume cannot be forgotten, it stays: {error}");
                    applied.kept.push(name.to_string());
                }
            }
        }
        let trying = tokio::spawn(async move { while waiting.next().await.is_some() {} });
        shared.declarations.take_over(Some(trying));
        Ok(applied)
    }
}

impl Shared {
    async fn records_by_name(&self) -> Result<BTreeMap<VolumeName, Record>, StoreError> {
        let (records, _) = self.registry.records(RecordFilter::default()).await?;
        Ok(records.into_iter().map(|record| (record.name.clone(), record)).collect())
    }

    pub(super) async fn register_declared(
        self: &Arc<Self>,
        declared: &Declared,
        wait: Wait,
    ) -> Result<Record> {
        let Declared { file, name, volume, spec } = declared.clone();
        let request =
            RegisterRequest { name, volume, spec, uid: 0, origin: Origin::File, secrets: None, wait };
        let registered = self.register(request).await.map_err(|error| words::declared(&file, error))?;
        self.declarations.done(declared);
        self.operations.tell_news();
        Ok(registered)
    }

    /// Register it, however long that takes.
    async fn pursue(self: Arc<Self>, declared: Declared) {
        let Declared { name, volume, .. } = &declared;
        let mut backoff = Backoff::new();
        loop {
            tokio::select! {
                _ = self.plugins.wait(&volume.plugin, Service::Node, None) => {}
                _ = self.plugins.wait(&volume.plugin, Service::Controller, None) => {}
            }
            // Apart: thousands may wait for one plugin.
            let Err(error) = Box::pin(self.register_declared(&declared, Wait::default())).await else {
                tracing::info!(volume = %name, "{name} is registered, as {} declares it", declared.file.display());
                return;
            };
            let pause = if error.details.retryable { backoff.next() } else { SWEEP };
            if self.declarations.failed(name, &error, Instant::now() + pause) {
                self.tell_failure(&declared, &error).await;
            }
            tokio::time::sleep(pause).await;
        }
    }

    async fn tell_failure(&self, declared: &Declared, error: &Error) {
        let (name, kind) = (&declared.name, error.kind.name());
        tracing::warn!(volume = %name, kind, "{name} is not registered as declared: {}", error.message);
        let record = Record { volume: declared.volume.clone(), ..Record::none(name.clone()) };
        let mut event = words::registered("volume-registered", &record);
        event.details.insert("success", Value::from(false));
        event.details.insert("error", Value::from(error.to_string()));
        if let Err(error) = self.store.commit(vec![Change::Event(event)], Durability::Process).await {
            tracing::warn!(%error, "an event could not be written");
        }
    }
}

fn registration(declared: &Declared) -> Registration {
    new_registration(0, declared.spec.clone(), Origin::File)
}

fn record_of(records: &BTreeMap<VolumeName, Record>, name: &VolumeName) -> Record {
    records.get(name).cloned().unwrap_or_else(|| Record::none(name.clone()))
}

pub(super) fn is_of_file(record: &Record) -> bool {
    record.registration.as_ref().is_some_and(|registration| registration.origin == Origin::File)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn nothing_is_tried_any_more_also_while_a_registration_is_written() {
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
