//! The watch: once a minute every mount is looked at, but for those that have a server (`served`), and what vanished becomes an
//! event. It changes no row and repairs nothing: a repeated Mount and Reconcile do.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::host::{Look, trim_memory};
use crate::plugin::PluginChange;
use crate::store::rows::{MountKey, MountRow, Phase};
use crate::store::{Change, Durability, MountFilter};
use crate::volume::looking::{there, why};
use crate::volume::recovery::watched;
use crate::volume::served::Served;
use crate::volume::task::Message;
use crate::volume::{Shared, Volumes};

const EVERY: Duration = Duration::from_secs(60);
/// When claims that are on their way out get their second chance.
pub(super) const SWEEP: Duration = Duration::from_secs(300);

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Ill {
    Dead,
    Lost,
}

/// What is known to be ill, and since when its row was called mounted: each illness is told once.
pub(super) type Ills = BTreeMap<MountKey, (Ill, u64)>;

impl Volumes {
    /// Look at everything for ever.
    pub async fn watch(&self) {
        tokio::join!(self.watch_all(), self.watch_served());
    }

    async fn watch_all(&self) {
        let mut ills = Ills::new();
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
                && let Err(error) = self.look_around(&mut ills).await
            {
                tracing::warn!(%error, "the mounts could not be looked at");
            }
            trim_memory();
        }
    }

    async fn look_around(&self, ills: &mut Ills) -> Result<()> {
        let served = &self.shared.served;
        let filter = MountFilter { phase: Some(Phase::Mounted), ..MountFilter::default() };
        let rows = self.shared.store.mounts(filter).await?.into_iter().map(|(row, _)| row);
        let rows: Vec<MountRow> = rows.filter(|row| !served.has(&row.volume)).collect();
        let looks = self.shared.looks(&rows.iter().collect::<Vec<_>>()).await;
        let mut seen = Vec::new();
        for (row, look) in rows.iter().zip(&looks) {
            match Served::are_watched(look) {
                true => served.note(row),
                false => seen.push((row, look)),
            }
        }
        *ills = self.shared.tell(std::mem::take(ills), &seen).await?;
        Ok(())
    }
}

impl Shared {
    /// Tell by events what has changed with the mounts that were looked at; what is ill now.
    pub(super) async fn tell(&self, mut before: Ills, seen: &[(&MountRow, &Look)]) -> Result<Ills> {
        let mut ills = Ills::new();
        let mut events = Vec::new();
        for &(row, look) in seen {
            let was =
                before.remove(&row.key).filter(|(_, since)| *since == row.since_usec).map(|(ill, _)| ill);
            let is = match look {
                // It may answer yet.
                Look::Hung => was,
                Look::Dead(_) => Some(Ill::Dead),
                look if there(row, look) => None,
                _ => Some(Ill::Lost),
            };
            let kind = match is {
                is if is == was => None,
                Some(Ill::Lost) => Some("mount-lost"),
                Some(Ill::Dead) => Some("mount-dead"),
                None => Some("mount-healed"),
            };
            // What was unmounted on request meanwhile was not lost.
            if let Some(kind) = kind
                && self.is_still(row).await?
            {
                events.push(Change::Event(watched(kind, row, &why(look))));
            }
            if let Some(ill) = is {
                ills.insert(row.key.clone(), (ill, row.since_usec));
            }
        }
        if !events.is_empty() {
            self.store.commit(events, Durability::Process).await?;
        }
        Ok(ills)
    }

    /// Whether nothing was done about the mount since the row was read.
    async fn is_still(&self, row: &MountRow) -> Result<bool> {
        let now = self.store.mounts(MountFilter::of(&row.key)).await?;
        Ok(now.iter().any(|(now, _)| (now.phase, now.since_usec) == (row.phase, row.since_usec)))
    }
}
