//! This node's parts of expansions, for which the servers ask in the session. The journal has what is due and what is done, so a csid that is
//! killed before its report reports it when it is asked again.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use csi_proto::cluster::v1::{Expand, NodeExpanded};

use crate::backoff::Backoff;
use crate::cluster::calls::answered;
use crate::cluster::node::Node;
use crate::error::Result;
use crate::store::registry::VolumeName;
use crate::volume::rules::{check_capacity, check_name};
use crate::volume::{AskedExpansion, RefusedExpansion, Volumes};

/// The first and the longest pause between two tries of an expansion.
const PAUSE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));

/// How often a node looks for a claim of the volume, which it may be about to take.
const LOOKS: u32 = 8;

/// The last request for each volume in a session, by its name. An earlier one of the volume counts no more.
#[derive(Default)]
pub(super) struct LastExpansions(Mutex<HashMap<String, Expand>>);

impl LastExpansions {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Expand>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a request. Returns `false` if there are `most` already.
    pub(super) fn note(&self, name: &str, expand: Expand, most: usize) -> bool {
        let mut last = self.lock();
        let has_room = last.contains_key(name) || last.len() < most;
        if has_room {
            last.insert(name.to_owned(), expand);
        }
        has_room
    }

    /// Returns the last request for a volume. `None`: it is done.
    pub(super) fn of(&self, name: &str) -> Option<Expand> {
        self.lock().get(name).cloned()
    }

    /// Forgets a request that is done. A later one for the volume stays.
    fn forget(&self, name: &str, done: &Expand) {
        let mut last = self.lock();
        if last.get(name) == Some(done) {
            last.remove(name);
        }
    }
}

/// Returns a name of the request among those of a session.
pub(super) fn expansion_name(expand: &Expand) -> String {
    // One of a volume at a time: an unmount would wait for all that are in the volume's queue.
    format!("expand {}/{}", expand.namespace, expand.volume)
}

/// Returns whether a message has names and bounds, and no other text.
pub(super) fn is_expansion(expand: &Expand) -> bool {
    let names = [("namespace", &expand.namespace), ("volume", &expand.volume)];
    names.into_iter().all(|(what, name)| check_name(what, name).is_ok())
        && (expand.required, expand.limit) != (0, 0)
        && check_capacity(expand.required, expand.limit).is_ok()
}

impl Node {
    /// Does this node's part of the last expansion of a volume, and reports it. Tries again until both are done, this node has no claim of the
    /// volume, or the session ends. Returns the name of the request.
    pub(super) async fn expand(
        self: Arc<Self>,
        request: String,
        last: Arc<LastExpansions>,
        volumes: Volumes,
    ) -> String {
        let mut pause = Backoff::between(PAUSE.0, PAUSE.1);
        let (mut looks, mut refused) = (0, None);
        while let Some(expand) = last.of(&request) {
            let name = VolumeName { namespace: expand.namespace.clone(), volume: expand.volume.clone() };
            let mut again = std::pin::pin!(self.expanded.notified());
            // What is done from now on is looked for again.
            again.as_mut().enable();
            match self.try_expand(&name, (expand.required, expand.limit), &mut refused, &volumes).await {
                Ok(AskedExpansion::Done) => {
                    last.forget(&request, &expand);
                    continue;
                }
                Ok(AskedExpansion::NotHere) if looks == LOOKS => {
                    last.forget(&request, &expand);
                    continue;
                }
                Ok(AskedExpansion::NotHere) => looks += 1,
                Ok(AskedExpansion::Later) => {}
                Err(error) => {
                    tracing::warn!(volume = %name, %error, "this node's part of an expansion is not done yet");
                }
            }
            // The server asks once in a session.
            let _ = tokio::time::timeout(pause.next(), again).await;
        }
        request
    }

    async fn try_expand(
        &self,
        name: &VolumeName,
        (required, limit): (u64, u64),
        refused: &mut Option<RefusedExpansion>,
        volumes: &Volumes,
    ) -> Result<AskedExpansion> {
        let found = volumes.expand_asked(name, required, limit, refused).await?;
        if found == AskedExpansion::Done {
            let VolumeName { namespace, volume } = name.clone();
            let done = NodeExpanded { namespace, volume, required, limit, boot: self.boot.clone() };
            answered(self.client()?.expanded(done)).await?;
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_request_for_a_volume_counts() {
        let expand = |volume: &str, required| Expand {
            namespace: "default".into(),
            volume: volume.into(),
            required,
            ..Expand::default()
        };
        let (earlier, later) = (expand("a", 9), expand("a", 12));
        let name = expansion_name(&earlier);
        assert_eq!(name, expansion_name(&later), "one task for a volume");
        let last = LastExpansions::default();
        assert!(last.note(&name, earlier.clone(), 1) && last.note(&name, later.clone(), 1));
        assert!(!last.note(&expansion_name(&expand("b", 9)), expand("b", 9), 1), "the limit");
        last.forget(&name, &earlier);
        assert_eq!(
            last.of(&name),
            Some(later.clone()),
            "the end of the earlier one is none of the later one"
        );
        last.forget(&name, &later);
        assert_eq!(last.of(&name), None);
    }
}
