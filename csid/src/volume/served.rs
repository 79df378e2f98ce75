//! Mounts that somebody serves: FUSE, NFS and the like. Whoever serves one may die, and the mount stays, dead. No notice comes
//! of that, and the kernel keeps it where nobody can ask cheaply; so these mounts are asked, every few seconds, and no others.
//! What died is told by an event, and where it is its volume's policy, the volume's task is told to make it again.
//!
//! State: which volumes to look at, noted when the mount is published or adopted. A volume whose mount hangs keeps its look, and
//! is not looked at again before that ends: it is not dead, and no other waits for it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use crate::error::Result;
use crate::host::Look;
use crate::store::MountFilter;
use crate::store::registry::{Heal, Record, VolumeName};
use crate::store::rows::{MountKey, MountRow, Phase, VolumeKey};
use crate::volume::task::Message;
use crate::volume::watch::Ills;
use crate::volume::{Shared, Volumes};

/// Dead is told of within twice this, and what NFS calls stale within thrice.
const EVERY: Duration = Duration::from_secs(5);
/// The first and the longest pause after a mount was to be healed; who lives as long as the longest begins anew.
const PAUSE: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(300));

/// The volumes to look at, and the one name that each has while it has users.
#[derive(Default)]
pub(super) struct Served(Mutex<BTreeMap<VolumeKey, Arc<VolumeName>>>);

impl Served {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<VolumeKey, Arc<VolumeName>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The mount has a server.
    pub(super) fn note(&self, row: &MountRow) {
        self.lock().insert(row.volume.clone(), Arc::new(VolumeName::of(&row.key)));
    }

    /// The volume has no rows any more, unless it was noted again since.
    fn forget(&self, volume: &VolumeKey, noted: &Arc<VolumeName>) {
        let mut all = self.lock();
        if all.get(volume).is_some_and(|now| Arc::ptr_eq(now, noted)) {
            all.remove(volume);
        }
    }

    pub(super) fn has(&self, volume: &VolumeKey) -> bool {
        self.lock().contains_key(volume)
    }

    /// What is seen has a server, or had one.
    pub(super) fn are_watched(look: &Look) -> bool {
        matches!(look, Look::Mounted { served: true, .. } | Look::Dead(_) | Look::Hung)
    }
}

/// What dies again and again is not made again without pause.
struct Pace {
    pause: Duration,
    not_before: Instant,
}

impl Pace {
    fn new(now: Instant) -> Self {
        Pace { pause: Duration::ZERO, not_before: now }
    }

    /// Whether it may be made again now; if so, it has been.
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

/// What is remembered of a volume from look to look.
struct Patient {
    ills: Ills,
    pace: Pace,
    /// What was stale at the last look, and since when its row was called mounted.
    stale: BTreeSet<(MountKey, u64)>,
}

impl Patient {
    fn new(now: Instant) -> Self {
        Patient { ills: Ills::new(), pace: Pace::new(now), stale: BTreeSet::new() }
    }

    /// NFS calls a file system stale also while its server's exports are made anew: that is dead once two looks in a row say
    /// so. FUSE's word holds at once.
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

/// The mounts of a volume that are called mounted, looked at. `None`: it has no rows any more.
type Seen = Option<Vec<(Arc<MountRow>, Look)>>;

impl Volumes {
    pub(super) async fn watch_served(&self) {
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
        patients: &mut BTreeMap<VolumeKey, Patient>,
    ) -> Result<()> {
        let Some(mut seen) = seen? else {
            patients.remove(key);
            return Ok(());
        };
        // What is found is told by events, and a damaged journal takes none.
        self.shared.store.writable()?;
        let now = Instant::now();
        let mut patient = patients.remove(key).unwrap_or_else(|| Patient::new(now));
        patient.confirm(&mut seen);
        let rows: Vec<_> = seen.iter().map(|(row, look)| (&**row, look)).collect();
        match self.shared.tell(patient.ills.clone(), &rows).await {
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
                    self.shared.directory.send(&self.shared, key, &row.key, message);
                }
            }
        }
        patients.insert(key.clone(), patient);
        Ok(())
    }
}

impl Shared {
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
            if let Some(look) = self.host.look_long(&key.plugin, Path::new(&row.source)).await {
                seen.push((row, look));
            }
        }
        Ok(Some(seen))
    }

    /// Whether a mount that lost its server is made again.
    pub(super) async fn heals(&self, row: &MountRow) -> Result<bool> {
        let is_registered = row.spec.registered;
        Ok(is_registered && is_healed(&self.registry.record(VolumeName::of(&row.key)).await?))
    }
}

/// Whether it is the volume's policy; one that is given with the call has none.
pub(super) fn is_healed(record: &Record) -> bool {
    record.registration.as_ref().is_some_and(|registration| registration.spec.heal == Heal::Remount)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::state::tests::begun;

    /// Rows of none are read, a mount is made and noted, and only then what the reading says is done.
    #[test]
    fn a_note_that_came_meanwhile_is_kept() {
        let (served, row) = (Served::default(), begun().mounts[0].clone());
        served.note(&row);
        let first = Arc::clone(&served.lock()[&row.volume]);
        served.note(&row);
        served.forget(&row.volume, &first);
        assert!(served.has(&row.volume));
        let second = Arc::clone(&served.lock()[&row.volume]);
        served.forget(&row.volume, &second);
        assert!(!served.has(&row.volume));
    }

    #[test]
    fn what_is_stale_is_dead_at_the_second_look_and_what_is_not_connected_at_the_first() {
        const STALE: Look = Look::Dead(libc::ESTALE);
        const NOT_CONNECTED: Look = Look::Dead(libc::ENOTCONN);
        const HEALTHY: Look = Look::Mounted { device: 1, served: true };
        let row = begun().mounts[0].clone();
        let mut again = MountRow::clone(&row);
        again.since_usec += 1;
        let mut patient = Patient::new(Instant::now());
        for (row, look, is) in [
            (&row, NOT_CONNECTED, NOT_CONNECTED),
            (&row, STALE, Look::Hung),
            (&row, HEALTHY, HEALTHY),
            (&row, STALE, Look::Hung),
            (&row, STALE, STALE),
            (&row, STALE, STALE),
            // It was mounted anew.
            (&Arc::new(again), STALE, Look::Hung),
        ] {
            let mut seen = [(Arc::clone(row), look)];
            patient.confirm(&mut seen);
            assert_eq!(seen[0].1, is, "{look:?}");
        }
    }

    #[test]
    fn what_dies_again_and_again_is_healed_ever_more_rarely() {
        let begin = Instant::now();
        let mut pace = Pace::new(begin);
        let tries: Vec<u64> =
            (0..1000).filter(|second| pace.is_due(begin + Duration::from_secs(*second))).collect();
        assert_eq!(tries, [0, 10, 30, 70, 150, 310, 610, 910]);
        let long_after = pace.not_before + PAUSE.1 + Duration::from_secs(1);
        assert!(pace.is_due(long_after) && pace.is_due(long_after + PAUSE.0));
    }
}
