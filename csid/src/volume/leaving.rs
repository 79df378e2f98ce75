//! A plugin, or one instance of it, is unregistered: not under mounts and claims that nobody else serves. And registered: not
//! by a user for what others use.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Kind, Result};
use crate::plugin::PluginSpec;
use crate::store::MountFilter;
use crate::store::registry::RecordFilter;
use crate::volume::{Shared, Volumes};

/// Those of which an instance is being unregistered; `true`: none is left that serves its mounts.
pub(super) type Plugins = Mutex<BTreeMap<String, bool>>;

/// One plugin's leave, till it is dropped.
struct Leaving<'a> {
    shared: &'a Shared,
    id: &'a str,
}

impl<'a> Leaving<'a> {
    fn begin(shared: &'a Shared, id: &'a str) -> Result<Self> {
        match Self::lock(shared).entry(id.to_owned()) {
            Entry::Occupied(_) => {
                Err(Error::new(Kind::Busy, format!("plugin {id} is being unregistered already")))
            }
            Entry::Vacant(entry) => {
                entry.insert(false);
                Ok(Leaving { shared, id })
            }
        }
    }

    /// From here on nothing is taken.
    fn close(&self) {
        Self::lock(self.shared).insert(self.id.to_owned(), true);
    }

    fn lock(shared: &Shared) -> MutexGuard<'_, BTreeMap<String, bool>> {
        shared.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        Self::lock(self.shared).remove(self.id);
    }
}

impl Volumes {
    /// Plugins that rows, claims and what is under way need.
    pub async fn plugins_in_use(&self) -> Result<BTreeSet<String>> {
        let under_way = self.shared.operations.taking();
        let rows = self.shared.store.mounts(MountFilter::default()).await?;
        let claimed = self.shared.claimed_here(None).await?.into_iter().map(|record| record.volume.plugin);
        Ok(rows.into_iter().map(|(row, _)| row.volume.plugin).chain(under_way).chain(claimed).collect())
    }

    /// Register an instance of a plugin for `uid`. A plugin that is away may have volumes in use, and who answers by its name
    /// answers for them: that is for root, and for whoever mounts and registers them.
    pub async fn register_plugin(&self, id: &str, spec: PluginSpec, uid: u32) -> Result<()> {
        if uid != 0 && self.shared.plugins.view(id).is_none() {
            let filter = MountFilter { plugin: Some(id.to_owned()), ..MountFilter::default() };
            let mounts = self.shared.store.mounts(filter).await?;
            let filter = RecordFilter { plugin: Some(id.to_owned()), ..RecordFilter::default() };
            let (records, _) = self.shared.registry.records(filter).await?;
            let others = mounts.iter().any(|(row, _)| row.uid != uid)
                || records.iter().any(|record| {
                    let registration = record.registration.as_ref();
                    registration.is_none_or(|registration| registration.uid != uid)
                        || record.claims.iter().any(|claim| claim.uid != uid)
                });
            if others {
                let text = format!("volumes of the plugin {id} are others' too; root may register it");
                return Err(Error::new(Kind::NotAuthorized, text));
            }
        }
        self.shared.plugins.register(id, spec, uid).await
    }

    /// Unregister a plugin for `uid`; one with mounts only by `force`. One of several instances may go under mounts that
    /// another one serves.
    pub async fn unregister_plugin(
        &self,
        id: &str,
        instance: Option<&str>,
        force: bool,
        uid: u32,
    ) -> Result<()> {
        self.shared.store.writable()?;
        // One at a time, so that no two of them are each other's successor.
        let leaving = Leaving::begin(&self.shared, id)?;
        if instance.is_some_and(|instance| self.shared.plugins.serves_without(id, instance)) {
            return self.shared.plugins.unregister(id, instance, uid).await;
        }
        // Whatever has begun is among the operations or the rows.
        leaving.close();
        if !force {
            if self.shared.operations.taking().contains(id) {
                let text = format!("plugin {id} has a mount or claim under way; wait for it, or use force");
                return Err(Error::new(Kind::Busy, text).with(|details| details.plugin = Some(id.to_owned())));
            }
            let filter = MountFilter { plugin: Some(id.to_owned()), ..MountFilter::default() };
            let rows = self.shared.store.mounts(filter).await?;
            if !rows.is_empty() {
                let holders: Vec<String> = rows.into_iter().map(|(row, _)| row.key.consumer).collect();
                let text = format!("plugin {id} has {} mounts; unmount them, or use force", holders.len());
                return Err(Error::new(Kind::Busy, text).with(|details| {
                    details.plugin = Some(id.to_owned());
                    details.holders = holders;
                }));
            }
            let claimed = self.shared.claimed_here(Some(id)).await?;
            if !claimed.is_empty() {
                let volumes: Vec<String> = claimed.iter().map(|record| record.name.to_string()).collect();
                let text = format!(
                    "{} of plugin {id} are claimed or attached; release or detach them, or use force",
                    volumes.join(", ")
                );
                return Err(Error::new(Kind::Busy, text).with(|details| {
                    details.plugin = Some(id.to_owned());
                    details.holders = claimed
                        .iter()
                        .flat_map(|record| &record.claims)
                        .map(|claim| claim.consumer.clone())
                        .collect();
                }));
            }
        }
        self.shared.plugins.unregister(id, instance, uid).await
    }
}

impl Shared {
    pub(super) fn refuse_leaving(&self, plugin: &str) -> Result<()> {
        match Leaving::lock(self).get(plugin) {
            Some(true) => {
                let text = format!("plugin {plugin} is being unregistered");
                Err(Error::new(Kind::PluginUnavailable, text))
            }
            _ => Ok(()),
        }
    }
}
