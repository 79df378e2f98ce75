//! Probes mounts with a server: FUSE, NFS and the like. If the server dies, the mount stays but returns errors. The kernel
//! sends no event, so these mounts are polled every few seconds. A dead mount is reported by an event. Its actor mounts it
//! again if the policy of the volume says so.
//!
//! A hung mount is not dead. Its probe continues and delays no other probe. The mount is not probed again before that probe
//! ends.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use crate::error::Result;
use crate::host::Look;
use crate::store::MountFilter;
use crate::store::registry::VolumeName;
use crate::store::rows::{MountKey, MountRow, Phase, VolumeKey};
use crate::volume::context::Context;
use crate::volume::lifecycle::is_healed;
use crate::volume::manager::Volumes;
use crate::volume::operation::message::Message;
use crate::volume::reconcile::monitor::UnhealthyMounts;

/// Poll interval. Dead mounts are reported within two intervals, ESTALE within three.
const EVERY: Duration = Duration::from_secs(5);
/// First and longest pause after a try to heal a mount. The pause resets after a mount has lived for the longest pause.
const PAUSE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(300));

/// Back-off for mounts that die repeatedly.
struct Pace {
    pause: Duration,
    not_before: Instant,
}

impl Pace {
    fn new(now: Instant) -> Self {
        Pace { pause: Duration::ZERO, not_before: now }
    }

    /// Returns whether the mount may be made again now. If so, the pause begins.
    fn is_due(&mut self, now: Instant) -> bool {
        if now < self.not_before {
            return false;
        }
        let is_anew = now > self.not_before + PAUSE.1;
        self.pause = if is_anew { PAUSE.0 } else { (self.pause * 2).clamp(PAUSE.0, PAUSE.1) };
        self.not_before = now + self.pause;
        true
    }
}

/// State of a volume that is kept between probes.
struct HealthHistory {
    ills: UnhealthyMounts,
    pace: Pace,
    /// Mounts that were stale at the last probe, each with the time since its row is `mounted`.
    stale: BTreeSet<(MountKey, u64)>,
}

impl HealthHistory {
    fn new(now: Instant) -> Self {
        HealthHistory { ills: UnhealthyMounts::new(), pace: Pace::new(now), stale: BTreeSet::new() }
    }

    /// Confirms stale mounts. NFS also reports a file system as stale while its server renews its exports. Such a mount is dead
    /// if two consecutive probes say so. Other errors, such as FUSE's ENOTCONN, hold at once.
    fn confirm(&mut self, seen: &mut [(Arc<MountRow>, Look)]) {
        let before = std::mem::take(&mut self.stale);
        for (row, look) in seen.iter_mut().filter(|(_, look)| look.is_stale()) {
            let mount = (row.key.clone(), row.since_usec);
            if !before.contains(&mount) {
                *look = Look::Hung;
            }
            self.stale.insert(mount);
        }
    }
}

/// Probed mounts of a volume that are called mounted. `None`: the volume has no rows any more.
type Seen = Option<Vec<(Arc<MountRow>, Look)>>;

impl Volumes {
    pub(in crate::volume) async fn watch_served(&self) {
        let mut every = tokio::time::interval(EVERY);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut looking = FuturesUnordered::new();
        let mut asked = BTreeSet::new();
        let mut patients = BTreeMap::new();
        loop {
            tokio::select! {
                _ = every.tick() => {
                    let volumes: Vec<_> =
                        self.shared.served.lock().iter().map(|(key, name)| (key.clone(), name.clone())).collect();
                    for (key, name) in volumes {
                        if asked.insert(key.clone()) {
                            let shared = Arc::clone(&self.shared);
                            looking.push(async move { (shared.look_at(&key, &name).await, key) });
                        }
                    }
                }
                Some((seen, key)) = looking.next(), if !looking.is_empty() => {
                    asked.remove(&key);
                    if let Err(error) = self.conclude(&key, seen, &mut patients).await {
                        tracing::warn!(%error, "the mounts could not be looked at");
                    }
                }
            }
        }
    }

    async fn conclude(
        &self,
        key: &VolumeKey,
        seen: Result<Seen>,
        patients: &mut BTreeMap<VolumeKey, HealthHistory>,
    ) -> Result<()> {
        let Some(mut seen) = seen? else {
            patients.remove(key);
            return Ok(());
        };
        // Findings are reported by events, and a damaged journal takes none.
        self.shared.store.writable()?;
        let now = Instant::now();
        let mut patient = patients.remove(key).unwrap_or_else(|| HealthHistory::new(now));
        patient.confirm(&mut seen);
        let rows: Vec<_> = seen.iter().map(|(row, look)| (&**row, look)).collect();
        match self.shared.tell(&mut patient.ills.clone(), &rows).await {
            Ok(ills) => patient.ills = ills,
            Err(error) => {
                patients.insert(key.clone(), patient);
                return Err(error);
            }
        }
        let dead: Vec<_> = seen.iter().filter(|(_, look)| look.has_lost_its_server()).collect();
        if !dead.is_empty() && patient.pace.is_due(now) {
            for (row, _) in dead {
                if self.shared.heals(row).await? {
                    let message = Message::Heal(row.key.clone(), row.uid);
                    self.shared.directory.send(key, VolumeName::of(&row.key), message);
                }
            }
        }
        patients.insert(key.clone(), patient);
        Ok(())
    }
}

impl Context {
    async fn look_at(&self, key: &VolumeKey, noted: &Arc<VolumeName>) -> Result<Seen> {
        let rows = match self.directory.at_rest(key) {
            Some(volume) => volume.mounts,
            None => {
                let VolumeName { namespace, volume } = VolumeName::clone(noted);
                let filter = MountFilter {
                    namespace: Some(namespace),
                    volume: Some(volume),
                    ..MountFilter::default()
                };
                let rows = self.store.mounts(filter).await?.into_iter();
                rows.map(|(row, _)| row).filter(|row| row.volume == *key).map(Arc::new).collect()
            }
        };
        if rows.is_empty() {
            self.served.forget(key, noted);
            return Ok(None);
        }
        let mut seen = Vec::new();
        for row in rows.into_iter().filter(|row| row.phase == Phase::Mounted) {
            let look = self.host.look_long(&key.plugin, Path::new(&row.source)).await;
            seen.push((row, look));
        }
        Ok(Some(seen))
    }

    /// Returns whether a mount that lost its server is made again.
    pub(in crate::volume) async fn heals(&self, row: &MountRow) -> Result<bool> {
        let is_registered = row.spec.registered;
        Ok(is_registered && is_healed(&self.records.registry.record(VolumeName::of(&row.key)).await?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::model::step::tests::begun;

    #[test]
    fn estale_needs_two_probes_enotconn_one() {
        const STALE: Look = Look::Dead(libc::ESTALE);
        const NOT_CONNECTED: Look = Look::Dead(libc::ENOTCONN);
        const HEALTHY: Look = Look::Mounted { device: 1, served: true };
        let row = begun().mounts[0].clone();
        let mut again = MountRow::clone(&row);
        again.since_usec += 1;
        let mut patient = HealthHistory::new(Instant::now());
        for (row, look, is) in [
            (&row, NOT_CONNECTED, NOT_CONNECTED),
            (&row, STALE, Look::Hung),
            (&row, HEALTHY, HEALTHY),
            (&row, STALE, Look::Hung),
            (&row, STALE, STALE),
            (&row, STALE, STALE),
            // The volume was mounted again.
            (&Arc::new(again), STALE, Look::Hung),
        ] {
            let mut seen = [(Arc::clone(row), look)];
            patient.confirm(&mut seen);
            assert_eq!(seen[0].1, is, "{look:?}");
        }
    }

    #[test]
    fn repeated_death_delays_healing() {
        let begin = Instant::now();
        let mut pace = Pace::new(begin);
        let tries: Vec<u64> =
            (0..1000).filter(|second| pace.is_due(begin + Duration::from_secs(*second))).collect();
        assert_eq!(tries, [0, 10, 30, 70, 150, 310, 610, 910]);
        let long_after = pace.not_before + PAUSE.1 + Duration::from_secs(1);
        assert!(pace.is_due(long_after) && pace.is_due(long_after + PAUSE.0));
    }
}
