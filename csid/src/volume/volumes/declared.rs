//! Registers the volumes that files declare, for uid 0, as RegisterVolume does. Each waits until its plugin serves and is retried.
//! Neither the start of csid nor a reload waits for it; only a caller that uses the volume does. A volume that the registry has as the
//! file says needs no plugin.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use serde_json::Value;

use crate::backoff::Backoff;
use crate::error::{Error, Result};
use crate::plugin::Service;
use crate::store::event_kind::EventKind;
use crate::store::registry::{Origin, Record, RecordFilter, Registration, RegistryError, VolumeName};
use crate::store::{Change, Durability};
use crate::volume::api::requests::{Declared, RegisterRequest, Wait};
use crate::volume::api::views::{Applied, VolumeView};
use crate::volume::context::{Context, SWEEP};
use crate::volume::control::declarations::{Declaration, Waits};
use crate::volume::errors::volume::VolumeError;
use crate::volume::events::registration as registration_events;
use crate::volume::lifecycle::{is_of_file, new_registration};
use crate::volume::manager::Volumes;

impl Volumes {
    /// Returns how many volumes are not registered as files declare them.
    pub fn unregistered(&self) -> usize {
        self.shared.records.declarations.lock().values().filter(|entry| entry.waits.is_some()).count()
    }

    /// Returns the registered volumes, and those that files declare and that are not registered yet.
    pub async fn volumes_and_declared(&self, filter: RecordFilter) -> Result<Vec<VolumeView>> {
        // One that is registered meanwhile is in the registry's answer.
        let waiting: Vec<Declared> = {
            let declarations = self.shared.records.declarations.lock();
            let waiting = declarations.values().filter(|entry| entry.waits.is_some());
            waiting.map(|entry| entry.declared.clone()).collect()
        };
        let mut views = self.volumes(filter.clone()).await?;
        let registered: BTreeSet<VolumeName> = views.iter().map(|view| view.record.name.clone()).collect();
        let is = |wanted: &Option<String>, has: &str| wanted.as_ref().is_none_or(|wanted| wanted == has);
        for declared in &waiting {
            let Declared { name, volume, .. } = declared;
            let is_wanted = filter.node.is_none()
                && is(&filter.namespace, &name.namespace)
                && is(&filter.plugin, &volume.plugin)
                && filter.prefix.as_ref().is_none_or(|prefix| name.volume.starts_with(prefix.as_str()))
                && filter.after.as_ref().is_none_or(|after| name > after);
            if !is_wanted || registered.contains(name) {
                continue;
            }
            let (volume, registration) = (volume.clone(), Some(registration(declared)));
            let record = Record { volume, registration, ..Record::none(name.clone()) };
            let view = self.shared.view(record, Vec::new());
            views.push(VolumeView { schedulable: false, only_declared: true, ..view });
        }
        views.sort_by(|one, other| one.record.name.cmp(&other.record.name));
        if filter.most > 0 {
            views.truncate(filter.most);
        }
        Ok(views)
    }

    /// Checks whether the volumes of `files` may be registered so, as far as is known without their plugins.
    pub async fn check_declared(&self, files: &[Declared]) -> Result<()> {
        let records = self.shared.records_by_name().await?;
        for declared in files {
            let mut record = record_of(&records, &declared.name);
            let put = self.shared.records.put(&mut record, &declared.volume, &registration(declared));
            put.map_err(|source| VolumeError::InFile { file: declared.file.clone(), source })?;
        }
        Ok(())
    }

    /// Replaces the declared volumes by those of `files`. With `all`, a volume whose file is gone is deregistered, unless it is
    /// in use. `all`: no other file exists that could declare it.
    pub async fn declare(&self, files: Vec<Declared>, all: bool) -> Result<Applied> {
        let shared = &self.shared;
        if shared.records.servers.is_some() {
            // Registrations are the servers'. What is left from before the cluster stays as it is.
            if !files.is_empty() {
                tracing::warn!(files = files.len(), "this host is in a cluster: volumes.d is not applied");
            }
            return Ok(Applied::default());
        }
        let _changing = shared.records.declarations.changing.write().await;
        // After this an earlier registration is in the registry, or never will be.
        if let Some(before) = shared.records.declarations.take_over(None) {
            before.abort();
            let _ = before.await;
        }
        let records = shared.records_by_name().await?;
        let mut applied = Applied::default();
        let mut table = BTreeMap::new();
        for declared in files {
            let mut record = record_of(&records, &declared.name);
            let there = shared.records.put(&mut record, &declared.volume, &registration(&declared));
            let waits = (!matches!(there, Ok(None))).then(Waits::default);
            let count = if waits.is_some() { &mut applied.waiting } else { &mut applied.unchanged };
            *count += 1;
            table.insert(declared.name.clone(), Declaration { declared, waits });
        }
        let gone = |record: &&Record| all && is_of_file(record) && !table.contains_key(&record.name);
        let gone: Vec<VolumeName> = records.values().filter(gone).map(|record| record.name.clone()).collect();
        let waiting = table.values().filter(|entry| entry.waits.is_some());
        let waiting = waiting.map(|entry| Arc::clone(shared).pursue(entry.declared.clone()));
        let mut waiting: FuturesUnordered<_> = waiting.collect();
        *shared.records.declarations.lock() = table;
        for name in gone {
            match shared.deregister(&name, 0, false, Origin::File).await {
                Ok(()) => applied.removed.push(name.to_string()),
                Err(error) => {
                    tracing::warn!(volume = %name, "the file of {name} is gone, but the volume cannot be forgotten, it stays: {error}");
                    applied.kept.push(name.to_string());
                }
            }
        }
        let trying = tokio::spawn(async move { while waiting.next().await.is_some() {} });
        shared.records.declarations.take_over(Some(trying));
        Ok(applied)
    }
}

impl Context {
    async fn records_by_name(&self) -> Result<BTreeMap<VolumeName, Record>, RegistryError> {
        let (records, _) = self.records.registry.records(RecordFilter::default()).await?;
        Ok(records.into_iter().map(|record| (record.name.clone(), record)).collect())
    }

    pub(in crate::volume) async fn register_declared(
        self: &Arc<Self>,
        declared: &Declared,
        wait: Wait,
    ) -> Result<Record> {
        let Declared { file, name, volume, spec } = declared.clone();
        let request =
            RegisterRequest { name, volume, spec, uid: 0, origin: Origin::File, secrets: None, wait };
        let registered =
            self.register(request).await.map_err(|source| VolumeError::InFile { file, source })?;
        self.records.declarations.done(declared);
        self.operations.tell_news();
        Ok(registered)
    }

    /// Registers a declared volume, and retries until that succeeds.
    async fn pursue(self: Arc<Self>, declared: Declared) {
        let Declared { name, volume, .. } = &declared;
        let mut backoff = Backoff::new();
        loop {
            tokio::select! {
                _ = self.plugins.wait(&volume.plugin, Service::Node, None) => {}
                _ = self.plugins.wait(&volume.plugin, Service::Controller, None) => {}
            }
            // Boxed, since thousands of volumes may wait for one plugin.
            let Err(error) = Box::pin(self.register_declared(&declared, Wait::default())).await else {
                tracing::info!(volume = %name, "{name} is registered, as {} declares it", declared.file.display());
                return;
            };
            let pause = if error.details.retryable { backoff.next() } else { SWEEP };
            if self.records.declarations.failed(name, &error, Instant::now() + pause) {
                self.tell_failure(&declared, &error).await;
            }
            tokio::time::sleep(pause).await;
        }
    }

    async fn tell_failure(&self, declared: &Declared, error: &Error) {
        let (name, kind) = (&declared.name, error.kind.name());
        tracing::warn!(volume = %name, kind, "{name} is not registered as declared: {}", error.message);
        let record = Record { volume: declared.volume.clone(), ..Record::none(name.clone()) };
        let mut event = registration_events::registered(EventKind::VolumeRegistered, &record);
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
