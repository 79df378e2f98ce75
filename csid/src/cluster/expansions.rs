//! This node's parts of expansions, for which the servers ask in the session. The journal has what is due and what is done, so a csid that is
//! killed before its report reports it when it is asked again.

use std::sync::Arc;
use std::time::Duration;

use csi_proto::cluster::v1::{Expand, NodeExpanded};

use crate::backoff::Backoff;
use crate::cluster::calls::answered;
use crate::cluster::node::Node;
use crate::error::Result;
use crate::store::registry::VolumeName;
use crate::volume::rules::{check_capacity, check_name};
use crate::volume::{AskedExpansion, Volumes};

/// The first and the longest pause between two tries of an expansion.
const PAUSE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));

/// Returns a name of the request among those of a session.
pub(super) fn expansion_name(expand: &Expand) -> String {
    let Expand { namespace, volume, required, limit } = expand;
    format!("expand {namespace}/{volume} {required} {limit}")
}

/// Returns whether a message has names and bounds, and no other text.
pub(super) fn is_expansion(expand: &Expand) -> bool {
    let names = [("namespace", &expand.namespace), ("volume", &expand.volume)];
    names.into_iter().all(|(what, name)| check_name(what, name).is_ok())
        && (expand.required, expand.limit) != (0, 0)
        && check_capacity(expand.required, expand.limit).is_ok()
}

impl Node {
    /// Does this node's part of an expansion, and reports it. Tries again until both are done, this node has no claim of the volume, or the
    /// session ends. Returns the name of the request.
    pub(super) async fn expand(self: Arc<Self>, expand: Expand, volumes: Volumes) -> String {
        let request = expansion_name(&expand);
        let name = VolumeName { namespace: expand.namespace, volume: expand.volume };
        let mut pause = Backoff::between(PAUSE.0, PAUSE.1);
        loop {
            let mut again = std::pin::pin!(self.expanded.notified());
            // What is done from now on is looked for again.
            again.as_mut().enable();
            match self.try_expand(&name, (expand.required, expand.limit), &volumes).await {
                Ok(AskedExpansion::Done | AskedExpansion::NotHere) => return request,
                Ok(AskedExpansion::Later) => {}
                Err(error) => {
                    tracing::warn!(volume = %name, %error, "this node's part of an expansion is not done yet");
                }
            }
            // Without an end: the server asks once in a session.
            let _ = tokio::time::timeout(pause.next(), again).await;
        }
    }

    async fn try_expand(
        &self,
        name: &VolumeName,
        (required, limit): (u64, u64),
        volumes: &Volumes,
    ) -> Result<AskedExpansion> {
        let found = volumes.expand_asked(name, required, limit).await?;
        if found == AskedExpansion::Done {
            let VolumeName { namespace, volume } = name.clone();
            let done = NodeExpanded { namespace, volume, required, limit, boot: self.boot.clone() };
            answered(self.client()?.expanded(done)).await?;
        }
        Ok(found)
    }
}
