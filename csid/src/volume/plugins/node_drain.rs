//! Drains this host as a node of a cluster: unmounts what of the servers' volumes nobody uses, as a drain of each plugin does.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use tokio::sync::broadcast;

use crate::error::Result;
use crate::store::MountFilter;
use crate::store::registry::{Claim, ClaimState, VolumeName};
use crate::store::rows::{Event, MountKey, MountRow, Phase};
use crate::volume::api::requests::{Unmounting, Wait};
use crate::volume::api::views::{LeftByDrain, NodeDrained};
use crate::volume::manager::Volumes;
use crate::volume::plugins::drain::AT_ONCE;

/// How long a drain waits for one mount. The unmount of a mount that takes longer goes on.
const LONGEST: Duration = Duration::from_secs(60);
/// What a report names at most. It counts all.
const NAMED: usize = 32;

impl Volumes {
    /// Tries once to unmount every mount of the servers' volumes, and returns what is left. A mount in use stays. When the node drains no
    /// more, the unmounts that have begun go on, and no other begins.
    pub async fn drain_node(&self) -> Result<NodeDrained> {
        self.shared.changeable()?;
        let mounts = self.servers_mounts().await?;
        let trying = mounts.into_iter().map(|row| async move {
            let MountRow { key, volume, source, spec, phase, .. } = row;
            let target = spec.target.unwrap_or(source);
            if matches!(phase, Phase::Mounting | Phase::Unmounting | Phase::Uncertain) {
                // It may be in use, and csid looks for users of a mount alone.
                return Some((key, target, "csid is at work on it".to_owned()));
            }
            let how = Unmounting { once: true, by_drain: true, ..Unmounting::default() };
            let wait = Wait { deadline: Some(Instant::now() + LONGEST), ..Wait::default() };
            let (key, error) = self.shared.drain_one(key, volume, 0, how, wait).await;
            error.map(|error| (key, target, error.message))
        });
        let mut trying = futures_util::stream::iter(trying).buffered(AT_ONCE);
        let (mut drained, mut mounted) = (NodeDrained::default(), BTreeSet::new());
        while let Some(tried) = trying.next().await {
            if let Some((key, target, why)) = tried {
                mounted.insert((VolumeName::of(&key), key.consumer.clone()));
                let MountKey { namespace, volume, consumer, tag } = key;
                let name = VolumeName { namespace, volume };
                drained.add(|| LeftByDrain { name, consumer, tag, target, why });
            }
        }
        for of in self.own_claims().await?.0 {
            let consumer = of.claim.consumer.clone();
            let Some(why) = stays(&of.claim) else { continue };
            if !mounted.contains(&(of.name.clone(), consumer.clone())) {
                let [tag, target] = Default::default();
                drained.add(|| LeftByDrain { name: of.name, consumer, tag, target, why });
            }
        }
        Ok(drained)
    }

    /// Subscribes to the journal's events, in the order of their commits.
    pub fn journal_events(&self) -> broadcast::Receiver<Arc<Event>> {
        self.shared.store.subscribe()
    }

    /// Returns the mounts of the servers' volumes, by their keys.
    async fn servers_mounts(&self) -> Result<Vec<MountRow>> {
        let mounts = self.shared.store.mounts(MountFilter::default()).await?;
        Ok(mounts.into_iter().map(|(row, _)| row).filter(|row| row.spec.registered).collect())
    }
}

impl NodeDrained {
    /// Counts one more. Names it, if there is room.
    fn add(&mut self, left: impl FnOnce() -> LeftByDrain) {
        self.count += 1;
        if self.left.len() < NAMED {
            self.left.push(left());
        }
    }
}

/// Returns why a claim without a mount stays. `None`: it was not granted yet, or has ended here.
fn stays(claim: &Claim) -> Option<String> {
    let why = match (claim.state, &claim.error) {
        // No server grants a claim to a node that drains.
        (ClaimState::Pending | ClaimState::ControllerDetached, _) => return None,
        (_, Some(error)) => error.clone(),
        (_, None) if claim.releasing => "it is being released".to_owned(),
        (_, None) if claim.by_mount => "csid is at work on its mount".to_owned(),
        (_, None) => "it was claimed by itself, and nobody has released it".to_owned(),
    };
    Some(why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::registry::{Capability, ClaimMode, Use};
    use crate::store::rows::{AccessMode, AttachmentMode};
    use crate::volume::lifecycle::new_claim;

    #[test]
    fn drain_of_many_mounts_names_a_few() {
        let mut drained = NodeDrained::default();
        for n in 0..10_000 {
            let name = VolumeName { namespace: "prod".into(), volume: format!("v{n}") };
            let [consumer, tag, target, why] = Default::default();
            drained.add(|| LeftByDrain { name, consumer, tag, target, why });
        }
        assert_eq!((drained.count, drained.left.len()), (10_000, NAMED));
        assert_eq!(drained.left[NAMED - 1].name.volume, "v31");
    }

    #[test]
    fn claim_stays_until_it_has_ended_here() {
        let capability = Capability {
            access_mode: AccessMode::SingleNodeWriter,
            attachment_mode: AttachmentMode::FileSystem,
        };
        let usage = Use { mode: ClaimMode::Write, capability };
        let of = |state| Claim { state, ..new_claim("web", "n1", 0, usage) };
        for ended in [ClaimState::Pending, ClaimState::ControllerDetached] {
            assert_eq!(stays(&of(ended)), None);
        }
        assert!(stays(&of(ClaimState::Taken)).unwrap().contains("by itself"));
        let released = |by_mount, releasing, error: Option<&str>| {
            let error = error.map(str::to_owned);
            stays(&Claim { by_mount, releasing, error, ..of(ClaimState::NodeDetached) }).unwrap()
        };
        assert_eq!(released(false, true, None), "it is being released");
        assert_eq!(released(true, false, None), "csid is at work on its mount");
        assert_eq!(released(false, true, Some("no controller")), "no controller");
    }
}
