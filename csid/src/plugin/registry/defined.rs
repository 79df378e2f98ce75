//! The plugins of `plugins.d`, when it is read again.

use std::collections::BTreeSet;

use super::super::events;
use super::super::task::How;
use super::{Entry, Origin, Plugins, stop, to_the_end};
use crate::error::Result;
use crate::plugin::PluginSpec;
use crate::store::Change;

/// What [`Plugins::apply_files`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    pub added: Vec<String>,
    pub changed: Vec<String>,
    pub removed: Vec<String>,
    /// Their files are gone, but they have mounts: they stay until the next reload without.
    pub kept: Vec<String>,
    /// `ID: why`: a unit could not be stopped; the plugin goes on as before.
    pub failed: Vec<String>,
}

impl Plugins {
    /// Make the plugins of `plugins.d` those of `files`. One whose file is gone stays while it is in
    /// `in_use`.
    pub async fn apply_files(
        &self,
        files: Vec<(String, PluginSpec)>,
        in_use: BTreeSet<String>,
    ) -> Result<Applied> {
        let plugins = self.clone();
        to_the_end(async move { plugins.applied(files, &in_use).await }).await
    }

    async fn applied(&self, files: Vec<(String, PluginSpec)>, in_use: &BTreeSet<String>) -> Result<Applied> {
        let _changing = self.0.changing.lock().await;
        self.open()?;
        self.0.shared.store.writable()?;
        let mut applied = Applied::default();
        let mut changes = Vec::new();
        let defined: Vec<(String, PluginSpec)> = self
            .entries()
            .iter()
            .flat_map(|(id, entries)| entries.iter().map(move |entry| (id, entry)))
            .filter(|(_, entry)| entry.origin == Origin::File)
            .map(|(id, entry)| (id.clone(), entry.spec.clone()))
            .collect();
        for (id, spec) in defined.iter().filter(|(id, _)| !files.iter().any(|(file, _)| file == id)) {
            if in_use.contains(id) {
                tracing::warn!(plugin = %id, "the plugin's file is gone, but it has mounts: it stays");
                applied.kept.push(id.clone());
            } else if self.retire(id, spec, How::Unit, &mut applied).await {
                let last = !self.entries().contains_key(id);
                changes.push(Change::Event(events::left(id, spec.instance(), last)));
                if last {
                    self.0.shared.node_ids.forget(id);
                    changes.push(Change::DeleteNodeId(id.clone()));
                }
                applied.removed.push(id.clone());
            }
        }
        for (id, spec) in files {
            let before = defined.iter().find(|(defined, _)| *defined == id).map(|(_, before)| before);
            if before.is_some_and(|before| before.same(&spec)) {
                continue;
            }
            if self.is_taken(&id, spec.instance()) {
                let text = format!("{id}: a plugin registered on the bus has that id; unregister it first");
                tracing::warn!("{text}");
                applied.failed.push(text);
                continue;
            }
            match before {
                Some(before) => {
                    let how = if spec.same_process(before) { How::Leave } else { How::Unit };
                    if !self.retire(&id, before, how, &mut applied).await {
                        continue;
                    }
                    applied.changed.push(id.clone());
                }
                None => {
                    let first = !self.entries().contains_key(&id);
                    changes.push(Change::Event(events::came(&id, spec.instance(), 0, first)));
                    applied.added.push(id.clone());
                }
            }
            self.add(&id, spec, 0, Origin::File, 0);
        }
        if !changes.is_empty() {
            self.commit(changes).await?;
        }
        Ok(applied)
    }

    /// End an instance's task and forget it; `false`: its unit could not be stopped, so it goes on.
    async fn retire(&self, id: &str, spec: &PluginSpec, how: How, applied: &mut Applied) -> bool {
        let Some(stops) = self.entry(id, spec.instance(), |entry| entry.stops.clone()) else { return true };
        match stop(&stops, how).await {
            Ok(()) => {
                self.remove(id, spec.instance());
                true
            }
            Err(error) => {
                applied.failed.push(format!("{id}: {}", error.message));
                false
            }
        }
    }

    /// Whether what is registered otherwise keeps a file from defining this instance.
    fn is_taken(&self, id: &str, instance: &str) -> bool {
        let is_in_the_way = |entry: &Entry| entry.owner != 0 || entry.spec.instance() == instance;
        let plugins = self.entries();
        let mut registered =
            plugins.get(id).into_iter().flatten().filter(|entry| entry.origin != Origin::File);
        registered.any(is_in_the_way)
    }
}
