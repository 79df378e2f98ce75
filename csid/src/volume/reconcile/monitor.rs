//! Probes all mounts without a server once a minute, and reports vanished mounts by events. It changes no row and repairs
//! nothing. A repeated Mount or Reconcile repairs them.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::host::{Look, mount_table, trim_memory};
use crate::plugin::PluginChange;
use crate::store::event_kind::EventKind;
use crate::store::rows::{MountKey, MountRow, Phase};
use crate::store::{Change, Durability, MountFilter};
use crate::volume::context::{Context, SWEEP};
use crate::volume::events::mount::watched;
use crate::volume::manager::Volumes;
use crate::volume::operation::message::Message;
use crate::volume::probe::{there, why};
use crate::volume::tables::watched_volumes::WatchedVolumes;

const EVERY: Duration = Duration::from_secs(60);
/// Rows that are read together. Ten thousand rows at once need as much memory as the rest of csid.
const PART: usize = if cfg!(test) { 2 } else { 1_000 };

#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::volume) enum MountFailure {
    Dead,
    Lost,
}

/// Mounts with a failure, each with the time since its row is `mounted`. Each failure is reported once.
pub(in crate::volume) type UnhealthyMounts = BTreeMap<MountKey, (MountFailure, u64)>;

impl Volumes {
    /// Probes all mounts. Never returns.
    pub async fn watch(&self) {
        tokio::join!(self.watch_all(), self.watch_served());
    }

    async fn watch_all(&self) {
        let mut ills = UnhealthyMounts::new();
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
                    // Operations that wait for a plugin continue as soon as it is healthy again.
                    if let Ok(PluginChange::Added(id) | PluginChange::Changed(id)) = change
                        && self.shared.plugins.healthy_now(&id)
                    {
                        self.shared.directory.tell_plugin(&id, || Message::Wake);
                    }
                    continue;
                }
            }
            // Findings are reported by events, and a damaged journal takes none.
            if self.shared.store.writable().is_ok()
                && let Err(error) = self.look_around(&mut ills).await
            {
                tracing::warn!(%error, "the mounts could not be looked at");
            }
            trim_memory();
        }
    }

    async fn look_around(&self, ills: &mut UnhealthyMounts) -> Result<()> {
        let mut now = UnhealthyMounts::new();
        let looked = self.look_in_parts(ills, &mut now).await;
        if looked.is_ok() {
            // The other mounts are not mounted any more.
            ills.clear();
        }
        ills.append(&mut now);
        looked
    }

    /// Looks at all mounts, and moves those that still have a failure from `before` to `now`.
    async fn look_in_parts(&self, before: &mut UnhealthyMounts, now: &mut UnhealthyMounts) -> Result<()> {
        let served = &self.shared.served;
        // A mount that is newer than the table is probed.
        let table = mount_table().await;
        let mut filter = MountFilter { phase: Some(Phase::Mounted), most: PART, ..MountFilter::default() };
        loop {
            let rows: Vec<MountRow> =
                self.shared.store.mounts(filter.clone()).await?.into_iter().map(|(row, _)| row).collect();
            let Some(last) = rows.last() else { break };
            filter.after = Some(last.key.clone());
            let rows: Vec<&MountRow> = rows.iter().filter(|row| !served.has(&row.volume)).collect();
            let looks = self.shared.looks_in(&rows, table.as_ref()).await;
            let mut seen = Vec::new();
            for (row, look) in rows.into_iter().zip(&looks) {
                match WatchedVolumes::are_watched(look) {
                    true => served.note(row),
                    false => seen.push((row, look)),
                }
            }
            now.extend(self.shared.tell(before, &seen).await?);
        }
        Ok(())
    }
}

impl Context {
    /// Reports by events which of the probed mounts have changed, and takes these mounts out of `before`. Returns those that have a
    /// failure now.
    pub(in crate::volume) async fn tell(
        &self,
        before: &mut UnhealthyMounts,
        seen: &[(&MountRow, &Look)],
    ) -> Result<UnhealthyMounts> {
        let mut ills = UnhealthyMounts::new();
        let mut events = Vec::new();
        for &(row, look) in seen {
            let was =
                before.remove(&row.key).filter(|(_, since)| *since == row.since_usec).map(|(ill, _)| ill);
            let is = match look {
                // The mount may still answer.
                Look::Hung => was,
                Look::Dead(_) => Some(MountFailure::Dead),
                look if there(row, look) => None,
                _ => Some(MountFailure::Lost),
            };
            let kind = match is {
                is if is == was => None,
                Some(MountFailure::Lost) => Some(EventKind::MountLost),
                Some(MountFailure::Dead) => Some(EventKind::MountDead),
                None => Some(EventKind::MountHealed),
            };
            // A mount that was unmounted on request meanwhile was not lost.
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

    /// Returns whether the mount has not changed since the row was read.
    async fn is_still(&self, row: &MountRow) -> Result<bool> {
        let now = self.store.mounts(MountFilter::of(&row.key)).await?;
        Ok(now.iter().any(|(now, _)| (now.phase, now.since_usec) == (row.phase, row.since_usec)))
    }
}
