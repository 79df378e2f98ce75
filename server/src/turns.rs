//! Turns of the claims of one volume at this server. A try reads the volume's record, and writes it if it has not changed meanwhile. Of tries at the same
//! time one succeeds, so a thousand of them would need half a million.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use csid::store::registry::VolumeName;
use tokio::sync::OwnedMutexGuard;

/// The volumes that calls try to claim, each with its turn.
#[derive(Default)]
pub struct Turns(Mutex<HashMap<VolumeName, Arc<tokio::sync::Mutex<()>>>>);

impl Turns {
    /// Waits for the turn at a volume, which lasts until the drop. First come, first served.
    pub async fn wait(&self, name: &VolumeName) -> OwnedMutexGuard<()> {
        let turn = {
            let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            turns.retain(|_, turn| Arc::strong_count(turn) > 1);
            turns.entry(name.clone()).or_default().clone()
        };
        turn.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn volume(name: &str) -> VolumeName {
        VolumeName { namespace: "default".into(), volume: name.into() }
    }

    #[tokio::test(start_paused = true)]
    async fn turn_of_one_volume_keeps_no_other_waiting() {
        let turns = Turns::default();
        let first = turns.wait(&volume("a")).await;
        let second = turns.wait(&volume("b")).await;
        let late = tokio::time::timeout(Duration::from_secs(1), turns.wait(&volume("a"))).await;
        assert!(late.is_err(), "two calls have the turn at a volume");
        drop(first);
        let third = turns.wait(&volume("a")).await;
        drop((second, third));
        drop(turns.wait(&volume("c")).await);
        assert_eq!(turns.0.lock().unwrap().len(), 1, "volumes that nobody claims are forgotten");
    }
}
