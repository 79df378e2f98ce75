//! The claims of a fenced node end, and what AttachVolume has attached to it. An operator says that the node's machine is off, so nothing there uses a volume any more.

use csi_proto::cluster::v1::AttachmentName;
use csi_proto::identity::Identity;
use csid::store::registry::{Attachment, ClaimState, Record, Registry, VolumeName};
use csid::store::rows::Leg;
use csid::volume::rules;
use csid::{Error, Kind};
use csid_etcd::{ClaimInList, ListFilter};

use crate::by_call::{attachments, detach};
use crate::claims::by_force;
use crate::cluster::{Cluster, meta_guard, node_guard, not_joined};
use crate::controllers::plugin_guard;
use crate::excluded::left_attached;
use crate::failure::Result;
use crate::records::{TRIES, busy};
use crate::rows::{NodeRow, NodeState, Read};
use crate::view::attachment_name;

/// Claims that are read together.
const CLAIMS: usize = 500;
/// The limit of attachments that the answer to a fence names.
const LEFT: usize = 64;

/// What a fence has left attached: AttachVolume names a node by a name that no operator has accepted.
#[derive(Debug, Default)]
pub struct LeftAttached {
    pub count: u64,
    /// The first ones.
    pub first: Vec<AttachmentName>,
}

impl Cluster {
    /// Ends the claims that a fenced node has had, and what AttachVolume has attached to its accepted names. Returns what is left attached, when
    /// etcd has all ends. Controllers detach the volumes later. A call that fails may be repeated.
    pub async fn end_fenced(&self, caller: &Identity, node: &str) -> Result<LeftAttached> {
        let row = self.while_here(self.fenced_row(node, None)).await?;
        // Nothing is granted to the node after that revision.
        self.while_here(async { Ok(self.registry.reached(row.revision).await?) }).await?;
        let number = row.value.fence.as_ref().map(|fence| fence.number);
        let (mut after, mut ended) = (None, 0);
        let filter = ListFilter { node: Some(node.to_owned()), ..ListFilter::default() };
        let left_out = loop {
            let part = self.while_here(async {
                Ok(self.registry.claim_list(&filter, after.as_ref(), CLAIMS, |_| true).await?)
            });
            let part = part.await?;
            for of in part.rows.iter().filter(|of| is_held(of.claim.state)) {
                ended += usize::from(self.while_here(self.end_claim(of, number)).await?);
            }
            after = part.next;
            if after.is_none() {
                break part.left_out;
            }
        };
        self.while_here(self.drop_heard_of(node)).await?;
        let mut left = LeftAttached::default();
        let may_be_left =
            |record: &Record| attachments(record).any(|at| may_be_at(record, at, node, &row.value));
        for record in self.while_here(self.attached_where(may_be_left)).await? {
            let is_left = |at: &&Attachment| {
                may_be_at(&record, at, node, &row.value) && !is_to_end(&record, at, node, &row.value)
            };
            for at in attachments(&record).filter(|at| at.leg != Leg::Removing).filter(is_left) {
                left.count += 1;
                if left.first.len() < LEFT {
                    left.first.push(attachment_name(&record, at));
                }
            }
            if attachments(&record).any(|at| is_to_end(&record, at, node, &row.value)) {
                ended +=
                    usize::from(self.while_here(self.end_attachments(&record.name, node, number)).await?);
            }
        }
        tracing::warn!(%caller, node, ended, left = left.count, "the claims of a fenced node have ended");
        match left_out.first {
            None => Ok(left),
            Some((name, _)) => {
                let text = format!(
                    "{} volumes in etcd cannot be read, {name} first: claims of node {node} there have not ended",
                    left_out.count
                );
                Err(Error::new(Kind::StateCorrupt, text).into())
            }
        }
    }

    /// Returns the number of a node's claims, and of attachments by AttachVolume, that its fence ends. They are as they were at the row's revision
    /// or later.
    pub async fn held_claims(&self, node: &str, row: &Read<NodeRow>) -> Result<usize> {
        let (held, left_out) = self.count_held(node, row).await?;
        Ok(held + left_out)
    }

    /// Returns whether a node has something that its fence ends. A volume that cannot be read counts for no node.
    pub async fn has_held_claims(&self, node: &str, row: &Read<NodeRow>) -> Result<bool> {
        Ok(self.count_held(node, row).await?.0 > 0)
    }

    /// Returns the number of what a node's fence ends, and that of volumes of any node that cannot be read.
    async fn count_held(&self, node: &str, row: &Read<NodeRow>) -> Result<(usize, usize)> {
        self.registry.reached(row.revision).await?;
        let filter = ListFilter { node: Some(node.to_owned()), ..ListFilter::default() };
        let most = self.registry.claims_of(node).await? + 1;
        let part = self.registry.claim_list(&filter, None, most, |_| true).await?;
        let held = part.rows.iter().filter(|of| is_held(of.claim.state)).count();
        let ends = |record: &Record| attachments(record).any(|at| is_to_end(record, at, node, &row.value));
        Ok((held + self.attached_where(ends).await?.len(), part.left_out.count))
    }

    /// Ends one claim of a fenced node. Returns `false` if it has ended.
    async fn end_claim(&self, of: &ClaimInList, number: Option<u64>) -> Result<bool> {
        let (name, node, consumer) = (&of.name, &of.claim.node, &of.claim.consumer);
        for _ in 0..TRIES {
            let here = self.presence.here()?;
            let meta = self.normal().await?;
            let row = self.fenced_row(node, number).await?;
            let record = self.registry.record(name.clone()).await?;
            let is_meant = |id: &str, state| id == of.claim.id && is_held(state);
            let claim = record.claim_at(consumer, node).filter(|claim| is_meant(&claim.id, claim.state));
            let Some(claim) = claim else { return Ok(false) };
            let around = self.around_row(&record, Some(row.clone())).await?;
            let stepped_on = rules::step(&around.claims(&record, node), by_force(&record, node, consumer));
            let (after, _) = stepped_on.map_err(|refusal| rules::refused(refusal, name, consumer))?;
            let of_plugin = plugin_guard(&record.volume.plugin, around.plugin.as_ref());
            let guards = vec![meta_guard(&meta), node_guard(node, &row), of_plugin, here.guard()];
            // The word is about the node's machine, and not about the volume.
            let after =
                left_attached(&record, claim, around.has_refused_mounts(), around.stepped(&record, after));
            if self.swap_granting(&record, after, guards).await?.is_some() {
                self.wake(name);
                return Ok(true);
            }
        }
        Err(busy(name))
    }

    /// Ends what AttachVolume has attached to the accepted names of a fenced node. Returns `false` if nothing of the volume is.
    async fn end_attachments(&self, name: &VolumeName, node: &str, number: Option<u64>) -> Result<bool> {
        for _ in 0..TRIES {
            let here = self.presence.here()?;
            let meta = self.normal().await?;
            let row = self.fenced_row(node, number).await?;
            let record = self.registry.record(name.clone()).await?;
            let mut after = record.clone();
            for at in attachments(&record).filter(|at| is_to_end(&record, at, node, &row.value)) {
                detach(&mut after, at.node_id.as_deref().unwrap_or_default(), meta.value.generation);
            }
            if after == record {
                return Ok(false);
            }
            let guards = vec![meta_guard(&meta), node_guard(node, &row), here.guard()];
            if self.swap_granting(&record, after, guards).await?.is_some() {
                self.was_driven(name);
                self.wake(name);
                return Ok(true);
            }
        }
        Err(busy(name))
    }

    /// Returns the number of volumes that AttachVolume has attached to a node, by any name that the node has reported. A blocked node may have
    /// lied: its accepted names alone count.
    pub async fn attached_to(&self, node: &str, row: &NodeRow) -> Result<usize> {
        let counts = |record: &Record, at: &Attachment| match row.state {
            NodeState::Blocked => is_to_end(record, at, node, row),
            NodeState::Ready | NodeState::Draining | NodeState::Fenced => {
                at.leg != Leg::Removing && is_at(record, at, node, row)
            }
        };
        let is_wanted = |record: &Record| attachments(record).any(|at| counts(record, at));
        Ok(self.attached_where(is_wanted).await?.len())
    }

    /// Returns the volumes that AttachVolume has attached and that are as is wanted.
    async fn attached_where(&self, is_wanted: impl Fn(&Record) -> bool) -> Result<Vec<Record>> {
        Ok(self.registry.attached_by_call(is_wanted).await?)
    }

    /// Returns the row of a fenced node. `number`: the fence that is meant.
    async fn fenced_row(&self, node: &str, number: Option<u64>) -> Result<Read<NodeRow>> {
        let is_meant = |row: &Read<NodeRow>| {
            row.value.is_fenced()
                && number.is_none_or(|number| row.value.fence.as_ref().is_some_and(|of| of.number == number))
        };
        // An earlier read serves all claims. A write compares it.
        if let Some(row) = self.node(node).await?.filter(is_meant) {
            return Ok(row);
        }
        match self.node_now(node).await? {
            Some(row) if is_meant(&row) => Ok(row),
            Some(_) => {
                let text =
                    format!("node {node} has joined again, and its claims from before have not all ended");
                Err(Error::new(Kind::Busy, text).into())
            }
            None => Err(not_joined(node)),
        }
    }
}

/// Returns whether a claim's node may use the volume.
fn is_held(state: ClaimState) -> bool {
    matches!(state, ClaimState::Pending | ClaimState::Taken)
}

/// Returns whether an operator has accepted the name of an attachment for a node. Any node may report any name.
fn is_accepted(record: &Record, at: &Attachment, row: &NodeRow) -> bool {
    at.node_id.is_some() && row.accepted_ids.get(&record.volume.plugin) == at.node_id.as_ref()
}

/// Returns whether a fence of a node ends an attachment. What another node has is not this one's, whatever name was accepted.
fn is_to_end(record: &Record, at: &Attachment, node: &str, row: &NodeRow) -> bool {
    is_at(record, at, node, row) && is_accepted(record, at, row) && at.leg != Leg::Removing
}

/// Returns whether an attachment is to a node, by the row of either. AttachVolume may have come before the node's report.
fn is_at(record: &Record, at: &Attachment, node: &str, row: &NodeRow) -> bool {
    let reported = row.plugins.get(&record.volume.plugin).and_then(|of| of.node_id.as_ref());
    let has_name = is_accepted(record, at, row) || (at.node_id.is_some() && reported == at.node_id.as_ref());
    at.node == node || (at.node.is_empty() && has_name)
}

/// Returns whether an attachment is to a node, or under a name that was accepted for it. The row of the attachment may have another node.
fn may_be_at(record: &Record, at: &Attachment, node: &str, row: &NodeRow) -> bool {
    is_at(record, at, node, row) || is_accepted(record, at, row)
}
