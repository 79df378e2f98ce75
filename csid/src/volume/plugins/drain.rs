//! Unregisters a plugin or an instance, unless mounts or claims need it. Drains a plugin by unmounting its volumes here. Restricts
//! registration: a user may not register a plugin whose volumes others use.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use futures_util::StreamExt;
use serde_json::Value;

use crate::error::{Error, Kind, Result};
use crate::plugin::PluginSpec;
use crate::store::event_kind::EventKind;
use crate::store::registry::RecordFilter;
use crate::store::rows::{EventDetails, MountKey, NewEvent, VolumeKey};
use crate::store::{Change, Durability, MountFilter};
use crate::volume::api::requests::{Authority, Unmounting, Wait};
use crate::volume::api::views::Drained;
use crate::volume::context::Context;
use crate::volume::manager::Volumes;
use crate::volume::model::volume::title;
use crate::volume::operation::request::OperationRequest;
use crate::volume::tables::leaving_plugins::Leave;

/// The number of mounts that a drain unmounts in parallel.
pub(in crate::volume::plugins) const AT_ONCE: usize = 32;

impl Volumes {
    /// Returns the plugins that rows, claims and operations under way need.
    pub async fn plugins_in_use(&self) -> Result<BTreeSet<String>> {
        let under_way = self.shared.operations.taking();
        let rows = self.shared.store.mounts(MountFilter::default()).await?;
        let claimed =
            self.shared.records.claimed_here(None).await?.into_iter().map(|record| record.volume.plugin);
        Ok(rows.into_iter().map(|(row, _)| row.volume.plugin).chain(under_way).chain(claimed).collect())
    }

    /// Registers an instance of a plugin for `uid`. An absent plugin may have volumes in use, and the new instance would answer
    /// for them. So only root may register it, or the uid that has all its mounts, volumes and claims.
    pub async fn register_plugin(&self, id: &str, spec: PluginSpec, uid: u32) -> Result<()> {
        if uid != 0 && self.shared.plugins.view(id).is_none() {
            let filter = MountFilter { plugin: Some(id.to_owned()), ..MountFilter::default() };
            let mounts = self.shared.store.mounts(filter).await?;
            let filter = RecordFilter { plugin: Some(id.to_owned()), ..RecordFilter::default() };
            let (records, _) = self.shared.records.registry.records(filter).await?;
            let others = mounts.iter().any(|(row, _)| row.uid != uid)
                || records.iter().any(|record| {
                    let registration = record.registration.as_ref();
                    registration.is_none_or(|registration| registration.uid != uid)
                        || record.claims.iter().any(|claim| claim.uid != uid)
                });
            if others {
                let text = format!("volumes of the plugin {id} are others' too");
                return Err(Error::new(Kind::NotAuthorized, text));
            }
        }
        self.shared.plugins.register(id, spec, uid).await
    }

    /// Unregisters a plugin for `uid`. A plugin with mounts or claims needs `force`. One of several instances may be unregistered
    /// if another one serves its mounts.
    pub async fn unregister_plugin(
        &self,
        id: &str,
        instance: Option<&str>,
        force: bool,
        uid: u32,
    ) -> Result<()> {
        self.shared.store.writable()?;
        // Only one at a time, so that no two instances count on each other as successor.
        let leaving = self.shared.leaving.begin(id, Leave::Instance)?;
        if instance.is_some_and(|instance| self.shared.plugins.serves_without(id, instance)) {
            return self.shared.plugins.unregister(id, instance, uid).await;
        }
        // Every mount or claim that has begun is among the operations or the rows.
        leaving.close();
        if !force {
            if self.shared.operations.taking().contains(id) {
                let text = format!("plugin {id} has a mount or claim under way");
                return Err(Error::new(Kind::Busy, text).with(|details| details.plugin = Some(id.to_owned())));
            }
            let filter = MountFilter { plugin: Some(id.to_owned()), ..MountFilter::default() };
            let rows = self.shared.store.mounts(filter).await?;
            if !rows.is_empty() {
                let holders: Vec<String> = rows.into_iter().map(|(row, _)| row.key.consumer).collect();
                let text = format!("plugin {id} has {} mounts", holders.len());
                return Err(Error::new(Kind::Busy, text).with(|details| {
                    details.plugin = Some(id.to_owned());
                    details.holders = holders;
                }));
            }
            let claimed = self.shared.records.claimed_here(Some(id)).await?;
            if !claimed.is_empty() {
                let volumes: Vec<String> = claimed.iter().map(|record| record.name.to_string()).collect();
                let text = format!("{} of plugin {id} are claimed or attached", volumes.join(", "));
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
        let of_plugin = |(of, root): (String, PathBuf)| (of == id).then_some(root);
        let roots: BTreeSet<PathBuf> =
            self.shared.plugins.roots().into_iter().filter_map(of_plugin).collect();
        self.shared.plugins.unregister(id, instance, uid).await?;
        self.unmount_lives(id, roots).await;
        Ok(())
    }

    /// Unmounts the tmpfs of each of these roots that is empty and that no other plugin uses.
    async fn unmount_lives(&self, id: &str, roots: BTreeSet<PathBuf>) {
        // No row may have been below it since csid started.
        self.shared.host.find_lives(roots.clone()).await;
        let used = self.shared.plugins.roots();
        for root in roots.iter().filter(|root| used.iter().all(|(_, used)| used != *root)) {
            if let Err(error) = self.shared.host.unmount_live(root).await {
                tracing::warn!(plugin = id, %error, "the tmpfs of the plugin's root stays mounted");
            }
        }
    }

    /// Unmounts, for `uid`, every mount of a plugin on this host, and refuses new ones until that is done. The plugin keeps
    /// running. Claims that a Mount took are released with it; others stay.
    pub async fn drain(&self, id: &str, uid: u32) -> Result<Drained> {
        self.shared.changeable()?;
        let _leaving = self.shared.leaving.begin(id, Leave::Mounts)?;
        let mut ended: BTreeMap<MountKey, Option<Error>> = BTreeMap::new();
        loop {
            // Every mount or claim that has begun is among the operations or the rows.
            let mut mounts = self.shared.mounts_of_plugin(id).await?;
            mounts.retain(|key, _| !matches!(ended.get(key), Some(Some(_))));
            if mounts.is_empty() {
                break;
            }
            let unmounting = mounts.into_iter().map(|(key, volume)| {
                let (how, wait) = (Unmounting::default(), Wait::default());
                self.shared.drain_one(key, volume, uid, how, wait)
            });
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
        tracing::info!(uid, unmounted, failed, "plugin {id} was drained");
        let mut details = EventDetails::from([
            ("success", Value::from(failed == 0)),
            ("uid", Value::from(uid)),
            ("plugin", Value::from(id)),
            ("unmounted", Value::from(unmounted)),
        ]);
        if failed > 0 {
            details.insert("error", Value::from(format!("{failed} mounts could not be unmounted")));
        }
        let event = NewEvent { kind: EventKind::PluginDrained, subject: id.to_owned(), details };
        if let Err(error) = self.shared.store.commit(vec![Change::Event(event)], Durability::Process).await {
            tracing::warn!(%error, "an event could not be written");
        }
    }
}

impl Context {
    /// Unmounts one mount. Returns its key, and why it is still there. `None`: it is gone.
    pub(in crate::volume::plugins) async fn drain_one(
        self: &Arc<Self>,
        key: MountKey,
        volume: VolumeKey,
        uid: u32,
        how: Unmounting,
        wait: Wait,
    ) -> (MountKey, Option<Error>) {
        let authority = Authority::Any(uid);
        let work = OperationRequest::Unmount { key: key.clone(), authority, how, uncovered: None };
        let done = match self.ask(&volume, uid, work, wait) {
            Ok(answer) => self.answered(answer).await,
            Err(error) => Err(error),
        };
        (key, done.err())
    }

    /// Returns the mounts of a plugin on this host: those with a row, and those requested.
    async fn mounts_of_plugin(&self, plugin: &str) -> Result<BTreeMap<MountKey, VolumeKey>> {
        let filter = MountFilter { plugin: Some(plugin.to_owned()), ..MountFilter::default() };
        // The operations are read before the rows: a mount that is finished meanwhile has a row, or is gone.
        let asked_for = self.operations.mounting(plugin);
        let rows = self.store.mounts(filter).await?;
        Ok(asked_for.into_iter().chain(rows.into_iter().map(|(row, _)| (row.key, row.volume))).collect())
    }

    /// Returns the claims and attachments of a plugin on this host.
    async fn held_of_plugin(&self, plugin: &str) -> Result<Vec<String>> {
        let mut held = BTreeSet::new();
        for record in self.records.claimed_here(Some(plugin)).await? {
            let mut here = record.claims.iter().filter(|claim| claim.node == self.records.node).peekable();
            match here.peek() {
                None => held.extend([record.name.to_string()]),
                Some(_) => held.extend(here.map(|claim| format!("{} {}", record.name, claim.consumer))),
            }
        }
        Ok(held.into_iter().collect())
    }
}
