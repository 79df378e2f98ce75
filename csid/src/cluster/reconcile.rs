//! Ends claims that the servers have and this node has not. A server may write a claim after the node has given the call up and has
//! reported the claim's end: etcd answered it late. Nobody uses such a claim, and it keeps other hosts out.
//!
//! The journal has the row of a claim before a server is asked for it. So a claim by a call of this journal that is not in the journal has
//! ended here. The names of calls begin with a name of the journal in this boot. Other claims stay: an earlier journal may have had
//! them, or a clone of this host may have taken them, and their volumes may be mounted.

use std::sync::Arc;
use std::time::Duration;

use csi_proto::cluster::v1::{ClaimRow, ListAsk, VolumeAsk, VolumeRow};

use crate::cluster::calls::answered;
use crate::cluster::failure::read;
use crate::cluster::node::{CLAIMS, Node};
use crate::cluster::rows::read_record;
use crate::error::{Error, Kind, Result};
use crate::store::registry::{Claim, ClaimState, Grant, VolumeName};
use crate::store::rows::Leg;
use crate::volume::Volumes;
use crate::volume::rules::{check_name, new_claim, read_use};

/// The time between two comparisons of the servers' claims with the journal.
pub(super) const EVERY: Duration = Duration::from_secs(60);
/// How long csid waits for a page of the servers' list.
const PAGE: Duration = Duration::from_secs(10);

impl Node {
    /// Compares the servers' claims of this node with the journal, and has those ended that the journal lacks.
    pub(super) async fn end_unheld(self: Arc<Self>, volumes: Volumes) {
        let compared = self.try_end_unheld(&volumes).await;
        // A node that may claim nothing has no claims to compare.
        if let Err(error) = compared.or_else(|error| match error.kind {
            Kind::NotAuthorized => Ok(()),
            _ => Err(error),
        }) {
            tracing::warn!(%error, "this node's claims at the servers were not compared with the journal");
        }
    }

    async fn try_end_unheld(&self, volumes: &Volumes) -> Result<()> {
        // Their number is bounded: a server that is not ours could fill the journal.
        let mut room = CLAIMS.saturating_sub(volumes.owed().await?);
        let mut ended = 0;
        let mut last = None;
        let mut client = self.client()?;
        let ask = ListAsk { own: true, ..ListAsk::default() };
        let mut pages = answered(client.volumes(ask)).await.map_err(Error::from)?;
        let late = || Error::internal(format!("no page of the list came within {} s", PAGE.as_secs()));
        loop {
            let page = tokio::time::timeout(PAGE, pages.message()).await.map_err(|_| late())?;
            let Some(page) = page.map_err(|status| Error::from(read(&status)))? else { break };
            for volume in page.volumes {
                let name = VolumeName { namespace: volume.namespace.clone(), volume: volume.volume.clone() };
                check_name("namespace", &name.namespace)?;
                check_name("volume", &name.volume)?;
                if last.as_ref().is_some_and(|last| *last >= name) {
                    return Err(Error::internal("a server's list is not in the order of the names"));
                }
                match self.end_unheld_of(&name, volume, volumes, &mut room).await {
                    Ok(more) => ended += more,
                    Err(error) => {
                        tracing::warn!(volume = %name, %error, "claims at the servers were not compared")
                    }
                }
                last = Some(name);
            }
        }
        if ended > 0 {
            tracing::warn!(ended, "claims that csid gave up were granted later, and are ended");
        }
        Ok(())
    }

    /// Has the claims of one volume ended that the journal lacks, `room` at most. Returns their number.
    async fn end_unheld_of(
        &self,
        name: &VolumeName,
        mut volume: VolumeRow,
        volumes: &Volumes,
        room: &mut usize,
    ) -> Result<usize> {
        let rows = std::mem::take(&mut volume.claims);
        let claims: Vec<Claim> = rows.into_iter().filter_map(|row| self.own_claim(row)).collect();
        if claims.is_empty() {
            return Ok(0);
        }
        let record = read_record(name, volume)?;
        if record.registration.is_none() {
            return Ok(0);
        }
        let mut ended = 0;
        for claim in claims {
            if *room == 0 {
                return Err(Error::internal(format!("{CLAIMS} claims are being ended already, the limit")));
            }
            // The list may be older than the end of a claim that the journal has had. So a server is asked once more, after the journal.
            let is_unheld = volumes.lacks_claim(name, &claim).await? && self.has_claim(name, &claim).await?;
            if is_unheld && volumes.end_unheld(&record, claim).await? {
                *room -= 1;
                ended += 1;
            }
        }
        Ok(ended)
    }

    /// Returns whether the servers have a claim now.
    async fn has_claim(&self, name: &VolumeName, claim: &Claim) -> Result<bool> {
        let ask = VolumeAsk { namespace: name.namespace.clone(), volume: name.volume.clone() };
        let row = answered(self.client()?.volume(ask)).await.map_err(Error::from)?;
        Ok(row.claims.iter().any(|row| row.claim == claim.id))
    }

    /// Returns a claim that a call of this journal took in this boot, as one whose end the servers have yet to learn. `None`: it is another claim.
    fn own_claim(&self, row: ClaimRow) -> Option<Claim> {
        let of_journal = row.call.strip_prefix(self.calls.as_str())?.starts_with('.');
        let is_own = of_journal && row.node == self.name && row.state == "taken";
        let names = [("claim", &row.claim), ("call", &row.call), ("consumer", &row.consumer)];
        if !is_own || names.into_iter().any(|(what, name)| check_name(what, name).is_err()) {
            return None;
        }
        let usage = row.r#use.unwrap_or_default();
        let usage = read_use(&usage.mode, &usage.access_mode, &usage.attachment_mode).ok()?;
        let grant = Grant { cluster: self.cluster.clone(), leg: Leg::Removing, boot: None };
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
