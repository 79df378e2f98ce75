//! What this node holds, for servers whose etcd was restored from a backup. The journal is the second copy of the claims.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use csi_proto::cluster::v1::{Held, HeldClaim, HeldClaims, Owed, RefusedClaim, Use};

use crate::cluster::calls::answered;
use crate::cluster::node::Node;
use crate::error::{Error, Kind, Result, presentable};
use crate::fault;
use crate::random;
use crate::store::registry::VolumeName;
use crate::volume::Volumes;
use crate::volume::rules::{check_credential, words_of};
use crate::volume::servers::HeldVolume;

/// The most claims of a page, and about the most bytes of their contexts, as servers take them.
const CLAIMS: usize = 64;
const CONTEXTS: usize = 128 * 1024;
/// The limit of a server's text in the log, in bytes.
const TEXT: usize = 256;
/// The pause before the next try. Nodes of a cluster try at different times.
const AGAIN: Duration = Duration::from_secs(2);

impl Node {
    /// Says what this node holds to servers that recover in this generation, until one has taken it over.
    pub(super) async fn say_held(self: Arc<Self>, generation: u64, volumes: Volumes) {
        loop {
            match self.try_say_held(generation, &volumes).await {
                Ok(count) => {
                    tracing::info!(count, generation, "the servers know what this node holds");
                    return;
                }
                Err(error) => {
                    tracing::warn!(%error, "the servers do not know yet what this node holds");
                }
            }
            tokio::time::sleep(AGAIN.mul_f64(0.5 + random::share())).await;
        }
    }

    async fn try_say_held(&self, generation: u64, volumes: &Volumes) -> Result<usize> {
        let held = volumes.held_of_servers().await?;
        let mut again = None;
        for claims in pages(&held) {
            // A page may be written although its answer is lost.
            self.said().extend(claims.iter().map(|of| (of.claim.clone(), end_of(of))));
            match self.say_page(generation, claims, false).await {
                // A claim of the page waits, for example for its plugin. Those of the other pages come back meanwhile.
                Err(error) if error.kind == Kind::Unavailable => again = again.or(Some(error)),
                said => said?,
            }
        }
        if let Some(error) = again {
            return Err(error);
        }
        self.report_ended(volumes).await?;
        // The servers do not wait for the node after this one.
        self.say_page(generation, Vec::new(), true).await?;
        Ok(held.len())
    }

    async fn say_page(&self, generation: u64, claims: Vec<HeldClaim>, last: bool) -> Result<()> {
        let page = HeldClaims { boot: self.boot.clone(), generation, claims, last };
        let mut client = self.client()?;
        let held = fault::around("Hold", answered(client.hold(page))).await;
        let Held { refused } = held.map_err(Error::from)?;
        for RefusedClaim { namespace, volume, consumer, why, claim: _ } in refused.iter().take(CLAIMS) {
            let volume = presentable(&format!("{namespace}/{volume}"), TEXT);
            let (consumer, why) = (presentable(consumer, TEXT), presentable(why, TEXT));
            tracing::error!(volume, consumer, "the servers do not take over a claim of this node: {why}");
        }
        Ok(())
    }

    /// Reports the ends of claims that were said and have ended since. Such an end may have been reported before the servers knew the claim.
    async fn report_ended(&self, volumes: &Volumes) -> Result<()> {
        let held = volumes.held_of_servers().await?;
        let held: HashSet<&str> = held.iter().map(|of| of.claim.id.as_str()).collect();
        let ended: Vec<Owed> =
            self.said().values().filter(|of| !held.contains(of.claim.as_str())).cloned().collect();
        for owed in ended {
            let claim = owed.claim.clone();
            match self.report_unheld(owed, volumes).await {
                // The volume is mounted here still. The claim is compared later, as any that the journal lacks.
                Err(error) if error.kind == Kind::Busy => continue,
                reported => reported?,
            }
            self.said().remove(&claim);
        }
        Ok(())
    }

    /// Reports the end of a claim that the journal lacks. A server refuses it while the volume is mounted here and no claim at the servers says so.
    pub(super) async fn report_unheld(&self, owed: Owed, volumes: &Volumes) -> Result<()> {
        let name = VolumeName { namespace: owed.namespace.clone(), volume: owed.volume.clone() };
        let still_staged = volumes.may_be_mounted(&name).await?;
        self.report(Owed { still_staged, ..owed }).await.map_err(Error::from)
    }

    fn said(&self) -> MutexGuard<'_, HashMap<String, Owed>> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the end of a claim, as the node reports it.
fn end_of(of: &HeldClaim) -> Owed {
    Owed {
        claim: of.claim.clone(),
        namespace: of.namespace.clone(),
        volume: of.volume.clone(),
        consumer: of.consumer.clone(),
        call: of.call.clone(),
        ..Owed::default()
    }
}

/// Returns the claims as pages. None is empty.
fn pages(held: &[HeldVolume]) -> Vec<Vec<HeldClaim>> {
    let (mut pages, mut size) = (Vec::new(), 0);
    for of in held {
        let claim = written(of);
        let context: usize = claim.publish_context.iter().map(|(key, value)| key.len() + value.len()).sum();
        size += context;
        let is_full = |page: &Vec<HeldClaim>| page.len() >= CLAIMS || size > CONTEXTS;
        if pages.last().is_none_or(is_full) {
            pages.push(Vec::new());
            size = context;
        }
        if let Some(page) = pages.last_mut() {
            page.push(claim);
        }
    }
    pages
}

fn written(of: &HeldVolume) -> HeldClaim {
    let HeldVolume { name, volume, claim, attachment, credential } = of;
    let [mode, access_mode, attachment_mode] = words_of(claim.usage).map(str::to_owned);
    // As the call that took the claim: no host loads a credential of another namespace.
    let named = |credential: &Option<String>| {
        let named = credential.clone().filter(|of| check_credential(&name.namespace, of).is_ok());
        named.unwrap_or_default()
    };
    let (external_node_id, publish_context) =
        attachment.clone().map(|at| (at.node_id.unwrap_or_default(), at.publish_context)).unwrap_or_default();
    HeldClaim {
        claim: claim.id.clone(),
        call: claim.call.clone(),
        namespace: name.namespace.clone(),
        volume: name.volume.clone(),
        consumer: claim.consumer.clone(),
        uid: claim.uid,
        usage: Some(Use { mode, access_mode, attachment_mode }),
        by_mount: claim.by_mount,
        credential: named(&claim.credential),
        plugin: volume.plugin.clone(),
        external_id: volume.handle.to_string(),
        publish_context,
        external_node_id,
        granted_boot: claim.grant.as_ref().and_then(|grant| grant.boot.clone()).unwrap_or_default(),
        since_usec: claim.since_usec,
        volume_credential: named(credential),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::registry::{Attachment, VolumeName};
    use crate::store::rows::{Leg, VolumeKey};
    use crate::volume::rules::{new_claim, read_use};

    fn held(count: usize, context: usize) -> Vec<HeldVolume> {
        let usage = read_use("write", "single-node-writer", "file-system").unwrap();
        let of = |n: usize| {
            let name = VolumeName { namespace: "default".into(), volume: format!("v{n}") };
            let at = Attachment {
                node_id: Some("i-1".into()),
                publish_context: [("key".to_owned(), "x".repeat(context))].into(),
                ..Attachment::new("n1", Leg::Present)
            };
            HeldVolume {
                name,
                volume: VolumeKey::new("p", format!("ext-{n}")),
                claim: new_claim("web", "n1", 0, usage),
                attachment: Some(at),
                credential: None,
            }
        };
        (0..count).map(of).collect()
    }

    #[test]
    fn each_claim_is_on_one_page_of_the_right_size() {
        for (count, context, due) in
            [(0, 1, 0), (1, 1, 1), (64, 1, 1), (65, 1, 2), (8, 30_000, 2), (3, 200_000, 3)]
        {
            let pages = pages(&held(count, context));
            assert_eq!(pages.len(), due, "{count} claims with contexts of {context} bytes");
            let volumes: Vec<_> = pages.iter().flatten().map(|claim| claim.volume.clone()).collect();
            assert_eq!(volumes, (0..count).map(|n| format!("v{n}")).collect::<Vec<_>>());
            assert!(pages.iter().all(|page| page.len() <= CLAIMS));
        }
    }
}
