//! Ends claims that the servers have and this node has not. A server may write a claim after the node has given the call up and has
//! reported the claim's end: etcd answered it late, or a backup of etcd has it. Nobody uses such a claim, and it keeps other hosts out.
//!
//! The journal has the row of a claim before a server is asked for it. So a claim by a call of this journal that is not in the journal has
//! ended here. The names of calls begin with a name of the journal in this boot. Other claims stay: an earlier journal may have had
//! them, or a clone of this host may have taken them, and their volumes may be mounted.
//!
//! The other way round, an operator may have ended a claim of this node by force. csid asks the servers again before it mounts the volume. What is
//! mounted stays.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use csi_proto::cluster::v1::{ClaimPage, ClaimRow, ListAsk, VolumeRow};
use tonic::Streaming;

use crate::cluster::calls::answered;
use crate::cluster::failure::read;
use crate::cluster::node::{CLAIMS, Joined, Node, SessionState};
use crate::error::{Error, Kind, Result};
use crate::store::registry::{Claim, ClaimState, Grant, VolumeName};
use crate::store::rows::Leg;
use crate::volume::Volumes;
use crate::volume::rules::{check_name, new_claim, read_use};
use crate::volume::servers::Servers;

/// The time between two comparisons of the servers' claims with the journal, and that from the beginning of a session to the first one.
/// Nodes that have lost the same server join again at the same moment, so each takes another time: [`spread`].
pub(super) const EVERY: Duration = Duration::from_secs(60);
pub(super) const FIRST: Duration = Duration::from_secs(3);
/// The servers' words for a claim that its node may use, and for one that waits for its controller.
const TAKEN: &str = "taken";
const PENDING: &str = "pending";
/// How long csid waits for a page of the servers' list.
const PAGE: Duration = Duration::from_secs(10);
/// The most claims of a list. A server that is not ours could send them without an end.
const LISTED: usize = 100_000;

/// Returns a time between half of `time` and one and a half, by a share between 0 and 1.
pub(super) fn spread(time: Duration, share: f64) -> Duration {
    time.mul_f64(0.5 + share)
}

impl Node {
    /// Compares the servers' claims of this node with the journal, and has those ended that the journal lacks.
    pub(super) async fn end_unheld(self: Arc<Self>, volumes: Volumes) {
        let late = || Error::internal(format!("the comparison did not end within {} s", EVERY.as_secs()));
        let compared = tokio::time::timeout(EVERY, self.try_end_unheld(&volumes)).await;
        // A node that may claim nothing has no claims to compare.
        if let Err(error) = compared.unwrap_or_else(|_| Err(late()))
            && error.kind != Kind::NotAuthorized
        {
            tracing::warn!(%error, "this node's claims at the servers were not compared with the journal");
        }
    }

    async fn try_end_unheld(&self, volumes: &Volumes) -> Result<()> {
        // Their number is bounded: a server that is not ours could fill the journal.
        let mut room = CLAIMS.saturating_sub(volumes.owed().await?.0.len());
        let (mut ended, mut listed, mut left_out) = (0, 0, 0_u64);
        let mut last = None;
        // A claim that is granted later is none of these.
        let granted = volumes.granted().await?.into_iter();
        let mut missing: HashMap<String, (VolumeName, Claim)> =
            granted.map(|(name, claim)| (claim.id.clone(), (name, claim))).collect();
        let mut client = self.client()?;
        let ask = ListAsk { own: true, at_least: self.at_least(), ..ListAsk::default() };
        let mut pages = answered(client.claims(ask)).await.map_err(Error::from)?;
        while let Some(page) = next(&mut pages).await? {
            listed += page.claims.len();
            left_out = left_out.saturating_add(page.left_out);
            if listed > LISTED {
                return Err(Error::internal(format!(
                    "a server's list has {listed} claims, and the limit is {LISTED}"
                )));
            }
            for row in page.claims {
                let name = VolumeName { namespace: row.namespace, volume: row.volume };
                check_name("namespace", &name.namespace)?;
                check_name("volume", &name.volume)?;
                let claim = row.claim.unwrap_or_default();
                let place = (name, claim.consumer.clone());
                if last.as_ref().is_some_and(|last| *last >= place) {
                    return Err(Error::internal("a server's list is not in the order of the names"));
                }
                let name = &place.0;
                // An operator's word has ended another one, whose volume has yet to be detached.
                if claim.state == TAKEN {
                    missing.remove(&claim.claim);
                }
                if let Some(claim) = self.own_claim(claim) {
                    match self.end_unheld_claim(name, claim, volumes, &mut room).await {
                        Ok(true) => ended += 1,
                        Ok(false) => {}
                        Err(error) => {
                            tracing::warn!(volume = %name, %error, "a claim at the servers was not compared");
                        }
                    }
                }
                last = Some(place);
            }
        }
        if left_out > 0 {
            tracing::warn!(left_out, "the servers cannot read volumes, whose claims were not compared");
        }
        if ended > 0 {
            tracing::warn!(ended, "the servers had claims that csid has given up, which are ended");
        }
        // While the cluster recovers, etcd lacks claims that it had.
        if matches!(&*self.state.borrow(), SessionState::Joined(Joined { recovers: true, .. })) {
            return Ok(());
        }
        for (name, claim) in missing.into_values() {
            match self.lose_if_gone(&name, &claim, volumes).await {
                Ok(true) => {
                    tracing::warn!(volume = %name, claim.consumer, "the servers have ended a claim of this node");
                }
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(volume = %name, %error, "a claim in the journal was not compared");
                }
            }
        }
        Ok(())
    }

    /// Notes that the servers have ended a claim, if etcd does not have it now: a list may be older than the claim. Returns whether it was noted.
    async fn lose_if_gone(&self, name: &VolumeName, claim: &Claim, volumes: &Volumes) -> Result<bool> {
        let is_gone = match self.volume_row(self.client()?, name).await {
            Ok(row) => is_gone(&row, claim, &self.name),
            Err(error) if error.kind == Kind::NotFound => true,
            Err(error) => return Err(error),
        };
        Ok(is_gone && volumes.lose_claim(name, claim).await?)
    }

    /// Has a claim ended if the journal lacks it, and if there is room for it. Returns whether it was ended.
    async fn end_unheld_claim(
        &self,
        name: &VolumeName,
        claim: Claim,
        volumes: &Volumes,
        room: &mut usize,
    ) -> Result<bool> {
        if *room == 0 {
            return Err(Error::internal(format!("{CLAIMS} claims are being ended already, the limit")));
        }
        // The list may be older than the end of a claim that the journal has had. So a server is asked once more, after the journal.
        if !volumes.lacks_claim(name, &claim).await? || !self.has_claim(name, &claim).await? {
            return Ok(false);
        }
        let record = self.volume(name.clone()).await?;
        let is_ended = record.registration.is_some() && volumes.end_unheld(&record, claim).await?;
        *room -= usize::from(is_ended);
        Ok(is_ended)
    }

    /// Returns whether the servers have a claim now.
    async fn has_claim(&self, name: &VolumeName, claim: &Claim) -> Result<bool> {
        let ask = ListAsk {
            own: true,
            namespace: name.namespace.clone(),
            volume: name.volume.clone(),
            consumer: claim.consumer.clone(),
            at_least: self.at_least(),
            ..ListAsk::default()
        };
        let mut pages = answered(self.client()?.claims(ask)).await.map_err(Error::from)?;
        // It is one claim at most, so it is in the first page.
        let page = next(&mut pages).await?.unwrap_or_default();
        Ok(page.claims.iter().any(|row| row.claim.as_ref().is_some_and(|row| row.claim == claim.id)))
    }

    /// Returns a claim that a call of this journal took in this boot, or waits for, as one whose end the servers have yet to learn. `None`: it is another claim.
    fn own_claim(&self, row: ClaimRow) -> Option<Claim> {
        // A pending claim that ends already needs no word.
        let is_live = row.state == TAKEN || (row.state == PENDING && !row.releasing);
        let is_own = self.is_of_boot(&row.call) && row.node == self.name && is_live;
        let names = [("claim", &row.claim), ("call", &row.call), ("consumer", &row.consumer)];
        if !is_own || names.into_iter().any(|(what, name)| check_name(what, name).is_err()) {
            return None;
        }
        let usage = row.r#use.unwrap_or_default();
        let usage = read_use(&usage.mode, &usage.access_mode, &usage.attachment_mode).ok()?;
        let grant = Grant::new(self.cluster.clone(), Leg::Removing);
        Some(Claim {
            state: ClaimState::ControllerDetached,
            releasing: true,
            id: row.claim,
            call: row.call,
            grant: Some(grant),
            ..new_claim(&row.consumer, &self.name, 0, usage)
        })
    }
}

/// Returns whether a volume's row shows that a claim of this node is not there. A row shows few claims, a node's own ones first.
fn is_gone(row: &VolumeRow, claim: &Claim, node: &str) -> bool {
    let shown = u64::try_from(row.claims.len()).unwrap_or(u64::MAX);
    let is_whole = row.claim_count <= shown || row.claims.iter().any(|other| other.node != node);
    is_whole && !row.claims.iter().any(|other| other.claim == claim.id && other.state == TAKEN)
}

/// Returns the next page of a list. `None`: there are no more.
async fn next(pages: &mut Streaming<ClaimPage>) -> Result<Option<ClaimPage>> {
    let late = || Error::internal(format!("no page of the list came within {} s", PAGE.as_secs()));
    let page = tokio::time::timeout(PAGE, pages.message()).await.map_err(|_| late())?;
    page.map_err(|status| Error::from(read(&status)))
}

#[cfg(test)]
mod tests {
    use std::slice;

    use super::*;
    use crate::random;

    #[test]
    fn claim_is_gone_only_if_a_row_shows_all() {
        let row = |claim: &str, node: &str| ClaimRow {
            claim: claim.to_owned(),
            node: node.to_owned(),
            state: TAKEN.to_owned(),
            ..ClaimRow::default()
        };
        let of = |claims: &[ClaimRow], claim_count| VolumeRow {
            claims: claims.to_vec(),
            claim_count,
            ..VolumeRow::default()
        };
        let usage = read_use("write", "single-node-writer", "file-system").unwrap();
        let claim = Claim { id: "one".into(), ..new_claim("c", "here", 0, usage) };
        let (own, other, others) = (row("one", "here"), row("two", "here"), row("three", "there"));
        assert!(!is_gone(&of(&[own.clone(), other.clone()], 2), &claim, "here"));
        assert!(
            is_gone(&of(&[], 0), &claim, "here") && is_gone(&of(slice::from_ref(&other), 1), &claim, "here")
        );
        assert!(!is_gone(&of(slice::from_ref(&other), 9), &claim, "here"), "there may be more of its own");
        assert!(is_gone(&of(&[other, others], 9), &claim, "here"), "others come after its own");
        assert!(!is_gone(&of(slice::from_ref(&own), 9), &claim, "here"));
        let detached = ClaimRow { state: "node-detached".into(), ..own };
        assert!(is_gone(&of(&[detached], 1), &claim, "here"), "it ended, and the volume is attached still");
    }

    #[test]
    fn nodes_that_join_together_compare_apart() {
        assert_eq!([spread(EVERY, 0.0), spread(EVERY, 0.999_999)].map(|time| time.as_secs()), [30, 89]);
        let mut due = vec![Duration::ZERO; 1000];
        for round in 0..3 {
            for node in &mut due {
                *node += spread(if round == 0 { FIRST } else { EVERY }, random::share());
            }
        }
        let mut of_second = std::collections::BTreeMap::new();
        for node in due {
            *of_second.entry(node.as_secs()).or_insert(0) += 1;
        }
        let most = of_second.values().max().copied().unwrap_or(0);
        assert!(most < 60, "{most} of 1000 nodes ask in the same second: {of_second:?}");
    }
}
