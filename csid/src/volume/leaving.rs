//! A plugin, or one instance of it, is unregistered: not under mounts and claims that nobody else serves. Drained: its mounts
//! here are unmounted, so that it may go. And registered: not by a user for what others use.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::StreamExt;
use serde_json::Value;

use crate::error::{Error, Kind, Result};
use crate::plugin::PluginSpec;
use crate::store::registry::RecordFilter;
use crate::store::rows::{EventDetails, MountKey, NewEvent, VolumeKey};
use crate::store::{Change, Durability, MountFilter};
use crate::volume::reconcile::title;
use crate::volume::work::Work;
use crate::volume::{Authority, Shared, Volumes, Wait};

/// Mounts that are unmounted side by side when a plugin is drained.
const AT_ONCE: usize = 32;

/// What is being done with a plugin: one thing at a time.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Leave {
    /// An instance leaves, and another one serves its mounts.
    Instance,
    /// It leaves: nothing is taken from here on.
    Plugin,
    /// Its mounts end, and likewise.
    Mounts,
}

pub(super) type Plugins = Mutex<BTreeMap<String, Leave>>;

/// What Drain did; each entry is `NAMESPACE/VOLUME CONSUMER`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    pub unmounted: Vec<String>,
    /// Those that are still there, each with why.
    pub failed: Vec<String>,
    /// What was claimed or attached by itself, and is as it was.
    pub claimed: Vec<String>,
}

/// One plugin's leave, till it is dropped.
struct Leaving<'a> {
    shared: &'a Shared,
    id: &'a str,
}

impl<'a> Leaving<'a> {
    fn begin(shared: &'a Shared, id: &'a str, leave: Leave) -> Result<Self> {
        match Self::lock(shared).entry(id.to_owned()) {
            Entry::Occupied(entry) => {
                let what = if *entry.get() == Leave::Mounts { "drained" } else { "unregistered" };
                Err(Error::new(Kind::Busy, format!("plugin {id} is being {what} already")))
            }
            Entry::Vacant(entry) => {
                entry.insert(leave);
                Ok(Leaving { shared, id })
            }
        }
    }

    /// From here on nothing is taken.
    fn close(&self) {
        Self::lock(self.shared).insert(self.id.to_owned(), Leave::Plugin);
    }

    fn lock(shared: &Shared) -> MutexGuard<'_, BTreeMap<String, Leave>> {
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
        let leaving = Leaving::begin(&self.shared, id, Leave::Instance)?;
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

    /// Unmount, for `uid`, every mount of a plugin on this host, and refuse new ones until that is done. The plugin goes on. Claims
    /// that came with a mount go with it; others stay.
    pub async fn drain(&self, id: &str, uid: u32) -> Result<Drained> {
        self.shared.changeable()?;
        let _leaving = Leaving::begin(&self.shared, id, Leave::Mounts)?;
        let mut ended: BTreeMap<MountKey, Option<Error>> = BTreeMap::new();
        loop {
            // Whatever has begun is among the operations or the rows.
            let mut mounts = self.shared.mounts_of_plugin(id).await?;
            mounts.retain(|key, _| !matches!(ended.get(key), Some(Some(_))));
            if mounts.is_empty() {
                break;
            }
            let unmounting = mounts.into_iter().map(|(key, volume)| self.shared.drain_one(key, volume, uid));
            ended.extend(futures_util::stream::iter(unmounting).buffered(AT_ONCE).collect::<Vec<_>>().await);
        }
        let mut drained = Drained::default();
        for (key, error) in ended {
            match error {
                None => drained.unmounted.push(title(&key)),
                Some(error) => drained.failed.push(format!("{}: {error}", title(&key))),
            }
        }
        drained.claimed = self.shared.held_of_plugin(id).await?;
        self.tell_drained(id, uid, &drained).await;
        Ok(drained)
    }

    async fn tell_drained(&self, id: &str, uid: u32, drained: &Drained) {
        let (unmounted, failed) = (drained.unmounted.len(), drained.failed.len());
        tracing::info!(plugin = %id, uid, unmounted, failed, "the plugin was drained");
        let mut details = EventDetails::from([
            ("success", Value::from(failed == 0)),
            ("uid", Value::from(uid)),
            ("plugin", Value::from(id)),
            ("unmounted", Value::from(unmounted)),
        ]);
        if failed > 0 {
            details.insert("error", Value::from(format!("{failed} mounts could not be unmounted")));
        }
        let event = NewEvent { kind: "plugin-drained", subject: id.to_owned(), details };
        if let Err(error) = self.shared.store.commit(vec![Change::Event(event)], Durability::Process).await {
            tracing::warn!(%error, "an event could not be written");
        }
    }
}

impl Shared {
    pub(super) fn refuse_leaving(&self, plugin: &str) -> Result<()> {
        let what = match Leaving::lock(self).get(plugin) {
            None | Some(Leave::Instance) => return Ok(()),
            Some(Leave::Plugin) => "unregistered",
            Some(Leave::Mounts) => "drained",
        };
        let text = format!("plugin {plugin} is being {what}");
        Err(Error::new(Kind::PluginUnavailable, text)
            .with(|details| details.plugin = Some(plugin.to_owned())))
    }

    /// The mount, and why it is still there.
    async fn drain_one(
        self: &Arc<Self>,
        key: MountKey,
        volume: VolumeKey,
        uid: u32,
    ) -> (MountKey, Option<Error>) {
        let work = Work::Unmount { key: key.clone(), authority: Authority::Any(uid), force: false };
        let done = match self.ask(&volume, uid, work, Wait::default()) {
            Ok(answer) => self.answered(answer).await,
            Err(error) => Err(error),
        };
        (key, done.err())
    }

    /// Of a plugin's mounts here: those that have a row, and those that were asked for.
    async fn mounts_of_plugin(&self, plugin: &str) -> Result<BTreeMap<MountKey, VolumeKey>> {
        let filter = MountFilter { plugin: Some(plugin.to_owned()), ..MountFilter::default() };
        // Before the rows: what ends meanwhile has one, or is gone.
        let asked_for = self.operations.mounting(plugin);
        let rows = self.store.mounts(filter).await?;
        Ok(asked_for.into_iter().chain(rows.into_iter().map(|(row, _)| (row.key, row.volume))).collect())
    }

    /// What is claimed or attached here of a plugin.
    async fn held_of_plugin(&self, plugin: &str) -> Result<Vec<String>> {
        let mut held = BTreeSet::new();
        for record in self.claimed_here(Some(plugin)).await? {
            let mut here = record.claims.iter().filter(|claim| claim.node == self.node).peekable();
            match here.peek() {
                None => held.extend([record.name.to_string()]),
                Some(_) => held.extend(here.map(|claim| format!("{} {}", record.name, claim.consumer))),
            }
        }
        Ok(held.into_iter().collect())
    }
}
