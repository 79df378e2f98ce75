//! The watch: once a minute every mount is looked at, and what died, vanished or healed becomes an event. It changes no row
//! and repairs nothing: a repeated Mount and Reconcile do.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::host::{Look, trim_memory};
use crate::plugin::PluginChange;
use crate::store::rows::{MountKey, NewEvent, Phase};
use crate::store::{Change, Durability, MountFilter};
use crate::volume::recovery::watched;
use crate::volume::task::Message;
use crate::volume::{Volumes, healthy, there};

const EVERY: Duration = Duration::from_secs(60);
/// When claims that are on their way out get their second chance.
pub(super) const SWEEP: Duration = Duration::from_secs(300);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ill {
    Dead,
    Lost,
}

impl Volumes {
    /// Look at everything for ever.
    pub async fn watch(&self) {
        let mut ill = BTreeMap::new();
        let mut every = tokio::time::interval(EVERY);
        let mut plugins = self.shared.plugins.subscribe();
        let mut sweep = tokio::time::interval(SWEEP);
        every.tick().await;
        sweep.tick().await;
        *self.shared.next_sweep() = Some(Instant::now() + SWEEP);
        loop {
            tokio::select! {
                _ = every.tick() => {}
                _ = sweep.tick() => {
                    *self.shared.next_sweep() = Some(Instant::now() + SWEEP);
                    if let Err(error) = self.sweep().await {
                        tracing::warn!(%error, "claims could not be looked for that are on their way out");
                    }
                    continue;
                }
                change = plugins.recv() => {
                    // What waits for a plugin that is healthy again is not kept waiting longer.
                    if let Ok(PluginChange::Added(id) | PluginChange::Changed(id)) = change
                        && self.shared.plugins.healthy_now(&id)
                    {
                        self.shared.directory.tell_plugin(&id, || Message::Wake);
                    }
                    continue;
                }
            }
            // What is found is told by events, and a damaged journal takes none.
            if self.shared.store.writable().is_ok()
                && let Err(error) = self.look_around(&mut ill).await
            {
                tracing::warn!(%error, "the mounts could not be looked at");
            }
            trim_memory();
        }
    }

    async fn look_around(&self, ill: &mut BTreeMap<MountKey, Ill>) -> crate::Result<()> {
        let filter = MountFilter { phase: Some(Phase::Mounted), ..MountFilter::default() };
        let rows: Vec<_> = self.shared.store.mounts(filter).await?.into_iter().map(|(row, _)| row).collect();
        let looks = self.shared.looks(&rows.iter().collect::<Vec<_>>()).await;
        let mut before = std::mem::take(ill);
        let mut events: Vec<NewEvent> = Vec::new();
        for (row, look) in rows.iter().zip(&looks) {
            let was = before.remove(&row.key);
            let is = if !there(row, look) {
                Some(Ill::Lost)
            } else if healthy(row, look) {
                None
            } else {
                Some(Ill::Dead)
            };
            let event = match (was, is) {
                (was, is) if was == is => None,
                (_, Some(Ill::Lost)) => Some(watched("mount-lost", row, "removed behind csid's back")),
                (_, Some(Ill::Dead)) => Some(watched("mount-dead", row, why(look))),
                (_, None) => Some(watched("mount-healed", row, "")),
            };
            // What was unmounted on request meanwhile was not lost.
            if let Some(event) = event
                && self
                    .shared
                    .store
                    .mounts(MountFilter::of(&row.key))
                    .await?
                    .iter()
                    .any(|(now, _)| now == row)
            {
                events.push(event);
            }
            if let Some(is) = is {
                ill.insert(row.key.clone(), is);
            }
        }
        if !events.is_empty() {
            let changes = events.into_iter().map(Change::Event).collect();
            self.shared.store.commit(changes, Durability::Process).await?;
        }
        Ok(())
    }
}

fn why(look: &Look) -> &'static str {
    match look {
        Look::Hung => "the file system does not answer",
        _ => "the file system is dead",
    }
}
