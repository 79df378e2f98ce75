//! What this node knows of its fence. csid refuses mounts at once. The journal has the fence before csid gives anything up for it, so a restart of csid
//! forgets no such fence.
//!
//! A fence counts from a server's refusal until this node has joined, or until another boot.

use std::sync::{Mutex, PoisonError};

use crate::error::Result;
use crate::fault;
use crate::store::rows::JournaledFence;
use crate::volume::Volumes;

/// The fence that csid knows of.
pub(super) struct FenceMemory(Mutex<KnownFence>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct KnownFence {
    /// What the journal has. It may be of another boot.
    journal: Option<JournaledFence>,
    /// The number of the fence that counts now. 0: no server has named it. `None`: the node is not fenced.
    number: Option<u64>,
}

impl FenceMemory {
    /// Takes over the journal's fence. One of another boot does not count.
    pub(super) fn of(journal: Option<JournaledFence>, boot: &str) -> FenceMemory {
        let number = journal.as_ref().filter(|fence| fence.boot == boot).map(|fence| fence.number);
        FenceMemory(Mutex::new(KnownFence { journal, number }))
    }

    /// Returns the number of the fence that counts. 0: no server has named it. `None`: the node is not fenced.
    pub(super) fn number(&self) -> Option<u64> {
        self.known().number
    }

    /// Notes that the servers refuse this node as fenced. The journal has it before anything is given up for it. If the journal
    /// cannot be written, the fence counts until csid ends, and the next refusal tries again. `number`: 0: the server does not name it.
    pub(super) async fn begin(&self, number: u64, boot: &str, volumes: &Volumes) {
        let known = self.known();
        // A server of an earlier version names none.
        let number = if number == 0 { known.number.unwrap_or(0) } else { number };
        let fence = JournaledFence { number, boot: boot.to_owned() };
        // Mounts are refused from now on, however long the journal takes.
        self.set(KnownFence { journal: known.journal.clone(), number: Some(number) });
        let kept = keep(&known, Some(fence), volumes).await;
        let journal = kept.unwrap_or_else(|error| {
            tracing::error!(%error, "the journal does not have that this host is fenced, and a restart of csid would forget it");
            known.journal
        });
        self.set(KnownFence { journal, number: Some(number) });
    }

    /// Notes that a server lets this node join. If the journal cannot be written, mounts wait after csid's next start until the node has joined.
    pub(super) async fn end(&self, volumes: &Volumes) {
        let known = self.known();
        let journal = keep(&known, None, volumes).await.unwrap_or_else(|error| {
            tracing::warn!(%error, "the journal has a fence that is over");
            known.journal
        });
        self.set(KnownFence { journal, number: None });
    }

    fn known(&self) -> KnownFence {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, known: KnownFence) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = known;
    }
}

/// Has the journal keep this fence, unless it has it. Returns what the journal has then.
async fn keep(
    known: &KnownFence,
    fence: Option<JournaledFence>,
    volumes: &Volumes,
) -> Result<Option<JournaledFence>> {
    if known.journal != fence {
        fault::around("Fence", volumes.keep_fence(fence.clone())).await?;
    }
    Ok(fence)
}
