//! The plugins of `plugins.d`, when it is read again.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use crate::error::Result;
use crate::plugin::common::Common;
use crate::plugin::events;
use crate::plugin::network::Network;
use crate::plugin::place::Location;
use crate::plugin::registry::facts::InstanceFacts;
use crate::plugin::registry::kept::Kept;
use crate::plugin::registry::plugins::{
    InstanceEntry, Plugins, SpecOrigin, UpgradeOutcome, stop, to_the_end,
};
use crate::plugin::spec::{PluginSpec, Supervision, unit_name};
use crate::plugin::task::How;
use crate::store::rows::{MountKey, PluginRow};
use crate::store::{Change, MountFilter};

/// The result of [`Plugins::apply_files`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AppliedFiles {
    pub added: Vec<String>,
    pub changed: Vec<String>,
    pub removed: Vec<String>,
    /// Their files are gone, but they have mounts: they stay until the next reload without.
    pub kept: Vec<String>,
    /// `ID: why`: a unit could not be stopped; the plugin goes on as before.
    pub failed: Vec<String>,
}

/// The changes that were made at once, and the upgrades that continue side by side. No other change of the registry waits for them.
pub struct Applying {
    applied: AppliedFiles,
    upgrades: Vec<(String, UpgradeOutcome)>,
}

impl Applying {
    pub async fn ended(self) -> AppliedFiles {
        let Applying { mut applied, upgrades } = self;
        for (id, upgrade) in upgrades {
            match upgrade.await {
                Ok(_) => applied.changed.push(id),
                Err(error) => applied.failed.push(format!("{id}: {}", error.message)),
            }
        }
        applied
    }
}

/// A plugin of a file.
struct Defined {
    /// As its file has it.
    filed: PluginSpec,
    /// The same, with the name that it runs by.
    runs: PluginSpec,
}

impl Plugins {
    /// Adds the plugin that a file defines and that has no instance of a file, and returns the name that it runs by. An instance that a
    /// reload has renamed keeps its name, which is in the journal's `rows`.
    pub(super) fn define(&self, id: &str, spec: &PluginSpec, rows: &[PluginRow]) -> String {
        let of_file = rows.iter().filter(|row| row.id == id).filter_map(|row| Kept::read(row).ok());
        let (tried, runs): (Vec<Kept>, Vec<Kept>) =
            of_file.filter(|kept| kept.filed.is_some()).partition(|kept| kept.replaces.is_some());
        let (tried, runs) = (tried.into_iter().next(), runs.into_iter().next());
        let name = runs.as_ref().map_or(spec, |runs| &runs.spec).instance().to_owned();
        match (runs, tried) {
            // csid ended meanwhile.
            (Some(runs), Some(tried)) => {
                let before = SpecOrigin::File(runs.filed.unwrap_or_default());
                self.add(id, runs.spec, 0, before, 0);
                let name = tried.spec.instance().to_owned();
                self.add_filed(id, &name, spec, tried);
            }
            _ => self.add_filed(id, &name, spec, Kept::default()),
        }
        name
    }

    /// An instance as its file defines it, by the name that it runs by; the rest is as in `kept`.
    fn add_filed(&self, id: &str, name: &str, spec: &PluginSpec, kept: Kept) {
        let origin = SpecOrigin::File(spec.instance().to_owned());
        let spec = PluginSpec { instance: Some(name.to_owned()), ..spec.clone() };
        self.add_kept(id, Kept { spec, ..kept }, 0, origin, 0);
    }

    /// Make the plugins of `plugins.d` those of `files`. One whose file is gone stays while it is in
    /// `in_use`. One that is to run otherwise is replaced by an instance that was seen to be healthy.
    pub async fn apply_files(
        &self,
        files: Vec<(String, PluginSpec)>,
        in_use: BTreeSet<String>,
    ) -> Result<Applying> {
        let plugins = self.clone();
        to_the_end(async move { plugins.applied(files, &in_use).await }).await
    }

    async fn applied(&self, files: Vec<(String, PluginSpec)>, in_use: &BTreeSet<String>) -> Result<Applying> {
        let _changing = self.0.changing.lock().await;
        self.open()?;
        self.0.shared.store.writable()?;
        let rows = self.0.shared.store.plugins().await?;
        let mut applied = AppliedFiles::default();
        let (mut changes, mut upgrades) = (Vec::new(), Vec::new());
        let defined = self.defined();
        for (id, Defined { runs, .. }) in &defined {
            if files.iter().any(|(file, _)| file == id) {
                continue;
            }
            if in_use.contains(id) {
                tracing::warn!(plugin = %id, "the file of plugin {id} is gone, but it has mounts: it stays");
                applied.kept.push(id.clone());
            } else if self.is_left_alone(id, &mut applied) {
                continue;
            } else if self.retire(id, runs, How::Unit, &mut applied).await {
                let last = !self.entries().contains_key(id);
                changes.push(Change::DeletePlugin(id.clone(), runs.instance().to_owned()));
                changes.push(Change::Event(events::left(id, runs.instance(), last)));
                if last {
                    self.0.shared.node_ids.forget(id);
                    changes.push(Change::DeleteNodeId(id.clone()));
                }
                applied.removed.push(id.clone());
            }
        }
        for (id, spec) in files {
            let before = defined.get(&id);
            if before.is_some_and(|before| before.filed.same(&spec)) {
                continue;
            }
            if self.is_taken(&id, spec.instance()) {
                let text = format!("{id}: a plugin registered on the bus has that id; unregister it first");
                tracing::warn!("{text}");
                applied.failed.push(text);
                continue;
            }
            let Some(Defined { filed, runs }) = before else {
                let first = !self.entries().contains_key(&id);
                // csid may have started while the file was wrong.
                let name = self.define(&id, &spec, &rows);
                self.resume();
                changes.push(Change::Event(events::came(&id, &name, 0, first)));
                applied.added.push(id);
                continue;
            };
            if self.is_left_alone(&id, &mut applied) {
                continue;
            }
            // A mount that has chosen its paths writes its row first.
            let _moving = match self.moved(&id, runs, &spec).and(self.common(&id)) {
                Some(common) => Some(Arc::clone(&common.directories).write_owned().await),
                None => None,
            };
            if let Some(why) = self.moved_under_mounts(&id, runs, &spec).await? {
                tracing::warn!(plugin = %id, "plugin {id} stays as it is: {why}");
                applied.failed.push(format!("{id}: {why}"));
                continue;
            }
            let is_same_process = spec.same_process(filed);
            if !is_same_process && let Some(upgrade) = self.upgrade_filed(&id, filed, runs, &spec).await? {
                upgrades.push((id, upgrade));
                continue;
            }
            let how = if is_same_process { How::Leave } else { How::Unit };
            // No command makes it again, so it stays.
            let namespace = if spec.network_prestart.is_empty() { &spec.network } else { &Network::Host };
            self.0.shared.namespaces.add(namespace);
            let mut written = Ok(());
            if self.retire(&id, runs, how, &mut applied).await {
                let name = self.next_name(&id, runs, &spec, is_same_process).await;
                written = self.write_name(&id, runs, &spec, &name).await;
                self.add_filed(&id, &name, &spec, Kept::default());
                applied.changed.push(id);
            }
            self.0.shared.namespaces.remove(namespace);
            written?;
        }
        if !changes.is_empty() {
            self.commit(changes).await?;
        }
        Ok(Applying { applied, upgrades })
    }

    /// Returns why the plugin's directory cannot be moved: a volume has mounts there, and csid would look for them, and for its plugin's
    /// answers about them, elsewhere. `None`: the directory stays, or no volume has mounts there.
    async fn moved_under_mounts(
        &self,
        id: &str,
        runs: &PluginSpec,
        spec: &PluginSpec,
    ) -> Result<Option<String>> {
        let Some(key) = self.moved(id, runs, spec) else { return Ok(None) };
        let root = Location::of(&self.0.directories, id, runs).root;
        let filter = MountFilter { plugin: Some(id.to_owned()), ..MountFilter::default() };
        let is_there = |path: &str| Path::new(path).starts_with(&root);
        let mounts = self.0.shared.store.mounts(filter).await?;
        let mut below = mounts.iter().filter(|(row, staging)| is_there(&row.source) || is_there(staging));
        Ok(below.next().map(|(row, _)| moved_under(key, &root, &row.key)))
    }

    /// Returns the key that moves the plugin's directory. `None`: the directory stays where it is.
    fn moved(&self, id: &str, runs: &PluginSpec, spec: &PluginSpec) -> Option<&'static str> {
        let place = |spec| Location::of(&self.0.directories, id, spec);
        let (old, new) = (place(runs), place(spec));
        match (old.root == new.root, old.view == new.view) {
            (true, true) => None,
            (true, false) => Some("plugin-view"),
            (false, _) => Some("plugin-root"),
        }
    }

    fn common(&self, id: &str) -> Option<Arc<Common>> {
        Some(self.entries().get(id)?.first()?.common.clone())
    }

    /// Returns whether the plugin is being upgraded, so that it is not changed.
    fn is_left_alone(&self, id: &str, applied: &mut AppliedFiles) -> bool {
        let refused = self.refuse_upgrading(id).err();
        applied.failed.extend(refused.iter().map(|error| format!("{id}: {}", error.message)));
        refused.is_some()
    }

    /// The plugins that files define; an instance that is only tried is not counted.
    fn defined(&self) -> BTreeMap<String, Defined> {
        let plugins = self.entries();
        let all = plugins.iter().flat_map(|(id, entries)| entries.iter().map(move |entry| (id, entry)));
        all.filter(|(_, entry)| entry.serves())
            .filter_map(|(id, entry)| {
                let SpecOrigin::File(name) = &entry.origin else { return None };
                let filed = PluginSpec { instance: Some(name.clone()), ..entry.spec.clone() };
                Some((id.clone(), Defined { filed, runs: entry.spec.clone() }))
            })
            .collect()
    }

    /// Starts to replace the instance of a file. `None`: the two cannot run at the same time.
    async fn upgrade_filed(
        &self,
        id: &str,
        filed: &PluginSpec,
        runs: &PluginSpec,
        spec: &PluginSpec,
    ) -> Result<Option<UpgradeOutcome>> {
        // Settings of the unit may be the reason why the plugin is not ready. Some, such as a network, cannot exist twice.
        if runs.supervision != Supervision::Managed || !runs.same_settings(spec) {
            return Ok(None);
        }
        let name = match self.entry(id, spec.instance(), |_| ()) {
            None => spec.instance().to_owned(),
            Some(()) => self.free_name(id, 1),
        };
        let name = self.without_leftovers(id, name).await;
        let new = PluginSpec { instance: Some(name), ..spec.clone() };
        if let Err(error) = self.refuse_beside(id, runs, &new) {
            let why = &error.message;
            tracing::warn!(plugin = %id, "plugin {id} is stopped before its next start: {why}");
            return Ok(None);
        }
        let named = |spec: &PluginSpec| Some(spec.instance().to_owned());
        let before = Kept { filed: named(filed), ..Kept::new(runs) };
        let seen =
            self.entry(id, runs.instance(), |entry| InstanceFacts::of(&entry.state.borrow().view)).flatten();
        let tried = Kept { filed: named(spec), replaces: named(runs), before: seen, ..Kept::new(&new) };
        let rows = vec![Change::PutPlugin(before.row(id, 0, 0)?), Change::PutPlugin(tried.row(id, 0, 0)?)];
        self.commit(rows).await?;
        self.add_filed(id, new.instance(), spec, tried);
        Ok(Some(self.under_way(id, runs.instance().to_owned(), new)))
    }

    /// Returns the name by which a plugin runs next whose earlier instance was retired. A process that stays keeps its name.
    async fn next_name(&self, id: &str, runs: &PluginSpec, spec: &PluginSpec, stays: bool) -> String {
        match (stays, spec.supervision) {
            (true, _) => runs.instance().to_owned(),
            (false, Supervision::Managed) => self.without_leftovers(id, spec.instance().to_owned()).await,
            (false, Supervision::Unit | Supervision::External) => spec.instance().to_owned(),
        }
    }

    /// Writes the name by which a file's plugin runs next, before its start: a csid that is killed finds the unit by it.
    async fn write_name(&self, id: &str, runs: &PluginSpec, spec: &PluginSpec, name: &str) -> Result<()> {
        if name == runs.instance() {
            return Ok(());
        }
        let mut changes = vec![Change::DeletePlugin(id.to_owned(), runs.instance().to_owned())];
        if name != spec.instance() {
            let named = PluginSpec { instance: Some(name.to_owned()), ..spec.clone() };
            let kept = Kept { filed: Some(spec.instance().to_owned()), ..Kept::new(&named) };
            changes.push(Change::PutPlugin(kept.row(id, 0, 0)?));
        }
        self.commit(changes).await
    }

    /// The name, or the next one whose unit is not loaded: in one that is, helpers may live that are mounts.
    async fn without_leftovers(&self, id: &str, mut name: String) -> String {
        let mut number = 1;
        while let Ok(Some(_)) = self.0.shared.units.state(&unit_name(id, &name)).await {
            name = self.free_name(id, number);
            number += 1;
        }
        name
    }

    /// End an instance's task and forget it; `false`: its unit could not be stopped, so it goes on.
    async fn retire(&self, id: &str, spec: &PluginSpec, how: How, applied: &mut AppliedFiles) -> bool {
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
        let is_in_the_way = |entry: &InstanceEntry| entry.owner != 0 || entry.spec.instance() == instance;
        let plugins = self.entries();
        let mut registered = plugins
            .get(id)
            .into_iter()
            .flatten()
            .filter(|entry| !matches!(entry.origin, SpecOrigin::File(_)));
        registered.any(is_in_the_way)
    }
}

/// Returns why `key` does not move a plugin's directory away from `root`: the mount is there.
pub fn moved_under(key: &str, root: &Path, mount: &MountKey) -> String {
    let MountKey { namespace, volume, consumer, .. } = mount;
    let root = root.display();
    format!(
        "{key} cannot change while volumes have mounts below {root}: {namespace}/{volume} is mounted by {consumer}"
    )
}
