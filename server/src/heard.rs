//! What nodes have said to hold after a restore of etcd. A row for each node says whether the node has said all, and keeps the first claims that servers have
//! not taken over, for the operators. The rows go with the end of the recovery, and with a fence of the node.

use std::collections::BTreeSet;

use csi_proto::cluster::v1::{RefusedClaim, RefusedClaims};
use csid::error::presentable;
use csid::{Error, Kind};
use csid_etcd::{Expected, Guard, RowKey, Rows, Write, Written};

use crate::cluster::{Cluster, meta_guard, node_guard};
use crate::edges;
use crate::failure::{Result, ServerError};
use crate::rows::{self, HeardRow, MetaRow, NodeRow, Read, RefusedClaimRow};

/// What a row names at most. It fits in etcd then.
const NAMED: usize = 32;
/// The limit of a name and of a reason, in bytes. The rest is cut off.
const NAME: usize = 128;
const WHY: usize = 256;
/// Tries of a write that others are faster with.
const TRIES: usize = 16;

/// What has become of a page of a node's claims.
#[derive(Default)]
pub struct SaidPage {
    pub generation: u64,
    /// The IDs of the claims that etcd has now.
    pub taken: Vec<String>,
    pub refused: Vec<RefusedClaim>,
    /// Whether the node has said all that it holds.
    pub last: bool,
}

/// What keeps a recovery from its end.
#[derive(Default)]
pub struct Missing {
    /// The nodes that have not said yet what they hold, and were not fenced in this recovery.
    pub awaited: Vec<String>,
    /// The nodes whose claims were not all taken over. Fenced ones are left out, for their claims end.
    pub refused: Vec<RefusedClaims>,
}

impl Cluster {
    /// Keeps what has become of a page, next to earlier pages. `row`: the node's. Fails if the cluster does not recover any more.
    pub async fn keep_heard(
        &self,
        node: &str,
        row: &Read<NodeRow>,
        meta: &Read<MetaRow>,
        page: &SaidPage,
    ) -> Result<()> {
        let key = RowKey::Heard(node.to_owned());
        for RefusedClaim { namespace, volume, consumer, why, .. } in &page.refused {
            tracing::warn!(
                node,
                volume = presentable(&format!("{namespace}/{volume}"), NAME),
                consumer = presentable(consumer, NAME),
                "a claim that a node holds was not brought back: {}",
                presentable(why, WHY)
            );
        }
        for _ in 0..TRIES {
            let here = self.presence.here()?;
            let found = self.rows.read(&key).await?;
            let is = found.as_ref().map_or(Expected::Absent, |found| Expected::Revision(found.revision));
            // A row that cannot be read is overwritten.
            let before = found.as_ref().and_then(|found| rows::read::<HeardRow>(&key, found).ok());
            let before = before.map(|read| read.value);
            let after = merged(before.as_ref(), page);
            if found.is_none() && after.is_none() || (before.is_some() && before == after) {
                return Ok(());
            }
            let value = after.map(|after| rows::write(&key, &after)).transpose()?;
            let write = Write { value, key: key.clone(), lease: 0 };
            let guards =
                [Guard { key: key.clone(), is }, node_guard(node, row), meta_guard(meta), here.guard()];
            match edges::write(&self.rows, &guards, vec![write]).await? {
                Written::Done { .. } => return Ok(()),
                Written::Refused(RowKey::Meta) => {
                    self.forget(&RowKey::Meta);
                    return Err(is_not_recovering());
                }
                Written::Refused(_) | Written::Unknown => self.refuse_joined_again(node, row).await?,
            }
        }
        Err(Error::new(Kind::Busy, format!("what node {node} has said changes too often")).into())
    }

    /// Forgets the claims of a node that were not taken over: an operator has looked. `revision`: that of the row which the operator has seen.
    pub async fn forget_refused(&self, node: &str, revision: u64) -> Result<()> {
        let key = RowKey::Heard(node.to_owned());
        for _ in 0..TRIES {
            let here = self.presence.here()?;
            let Some(found) = self.rows.read(&key).await? else { return Ok(()) };
            let before: Read<HeardRow> = rows::read(&key, &found)?;
            if !before.value.has_refused() {
                return Ok(());
            }
            if before.revision != revision {
                let text = format!(
                    "the refused claims of node {node} have changed: the operator has seen revision {revision}, and etcd has {}",
                    before.revision
                );
                return Err(Error::new(Kind::Busy, text).into());
            }
            let after = HeardRow { claims: Vec::new(), more: false, ..before.value };
            let mut writes =
                vec![Write { value: Some(rows::write(&key, &after)?), key: key.clone(), lease: 0 }];
            let mut guards = vec![Guard { key: key.clone(), is: Expected::Revision(revision) }, here.guard()];
            let of_node = RowKey::Node(node.to_owned());
            match self.node_now(node).await? {
                // The mounts of the claims stay in this boot.
                Some(row) => {
                    guards.push(node_guard(node, &row));
                    let refused_boot = Some(row.value.boot.clone());
                    let value = rows::write(&of_node, &NodeRow { refused_boot, ..row.value })?;
                    writes.push(Write { value: Some(value), key: of_node.clone(), lease: 0 });
                }
                None => guards.push(Guard { key: of_node.clone(), is: Expected::Absent }),
            }
            let written = edges::write(&self.rows, &guards, writes).await?;
            self.forget(&of_node);
            if let Written::Done { .. } = written {
                return Ok(());
            }
        }
        Err(Error::new(Kind::Busy, format!("what node {node} has said changes too often")).into())
    }

    /// Removes what a fenced node has said. One that has joined again meanwhile may have said it since.
    pub async fn drop_heard_of(&self, node: &str) -> Result<()> {
        let Some(row) = self.node_now(node).await?.filter(|row| row.value.is_fenced()) else { return Ok(()) };
        let write = Write { key: RowKey::Heard(node.to_owned()), value: None, lease: 0 };
        edges::write(&self.rows, &[node_guard(node, &row), self.presence.here()?.guard()], vec![write])
            .await?;
        Ok(())
    }

    /// Removes what nodes have said in a recovery that has ended. Another recovery may have begun, whose rows stay. `meta`: the row of the time after.
    pub async fn drop_heard(&self, meta: &Read<MetaRow>) -> Result<()> {
        let mut pages = self.rows.pages(&Rows::Heard);
        while let Some(page) = self.rows.next(&mut pages).await? {
            let writes = page.into_iter().map(|(key, _)| Write { key, value: None, lease: 0 }).collect();
            edges::write(&self.rows, &[meta_guard(meta), self.presence.here()?.guard()], writes).await?;
        }
        Ok(())
    }

    /// Returns what keeps a recovery of this generation from its end.
    pub async fn missing(&self, generation: u64) -> Result<Missing> {
        // What a node says meanwhile is read after its row.
        let (mut awaited, mut fenced) = (BTreeSet::new(), BTreeSet::new());
        let mut pages = self.pages_of_nodes();
        while let Some(page) = self.next_of_nodes(&mut pages).await? {
            for (node, row) in page {
                let row = row.ok().map(|row| row.value);
                if row.as_ref().is_some_and(NodeRow::is_fenced) {
                    fenced.insert(node.clone());
                }
                // One whose row cannot be read is awaited, so that an operator sees it. A block keeps a node from its word, and ends no claim.
                if row.is_none_or(|row| !row.is_fenced_in(generation)) {
                    awaited.insert(node);
                }
            }
        }
        let mut refused = Vec::new();
        let mut pages = self.rows.pages(&Rows::Heard);
        while let Some(page) = self.rows.next(&mut pages).await? {
            for (key, row) in page {
                let RowKey::Heard(node) = &key else { continue };
                let Ok(Read { value, revision }) = rows::read::<HeardRow>(&key, &row) else { continue };
                // What was said in an earlier recovery is said once more in this one.
                if value.generation != generation {
                    continue;
                }
                if value.complete {
                    awaited.remove(node);
                }
                if value.has_refused() && !fenced.contains(node) {
                    let count = u32::try_from(value.claims.len()).unwrap_or(u32::MAX);
                    refused.push(RefusedClaims { node: node.clone(), count, more: value.more, revision });
                }
            }
        }
        Ok(Missing { awaited: awaited.into_iter().collect(), refused })
    }
}

/// Returns the error of a node that says what it holds, and is not asked.
pub fn is_not_recovering() -> ServerError {
    Error::new(Kind::Busy, "the cluster does not recover in the generation of the session").into()
}

/// Returns the row of what a node has said, after a page. `None`: it has not said all, and nothing was refused.
fn merged(before: Option<&HeardRow>, page: &SaidPage) -> Option<HeardRow> {
    let before = before.filter(|row| row.generation == page.generation);
    let mut after = HeardRow { generation: page.generation, ..before.cloned().unwrap_or_default() };
    after.complete |= page.last;
    let said: Vec<RefusedClaimRow> = page.refused.iter().map(shown).collect();
    // A claim may be said again, and taken then.
    let is_again = |of: &RefusedClaimRow| {
        page.taken.contains(&of.claim) || said.iter().any(|other| other.claim == of.claim)
    };
    after.claims.retain(|of| !is_again(of));
    after.claims.extend(said);
    after.more |= after.claims.len() > NAMED;
    after.claims.truncate(NAMED);
    (after.complete || after.has_refused()).then_some(after)
}

fn shown(of: &RefusedClaim) -> RefusedClaimRow {
    let [claim, namespace, volume, consumer] =
        [&of.claim, &of.namespace, &of.volume, &of.consumer].map(|name| presentable(name, NAME));
    RefusedClaimRow { claim, namespace, volume, consumer, why: presentable(&of.why, WHY) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(claim: &str) -> RefusedClaim {
        RefusedClaim { claim: claim.into(), why: "a lie".into(), ..RefusedClaim::default() }
    }

    fn page(generation: u64, taken: &[&str], claims: &[&str]) -> SaidPage {
        let taken = taken.iter().map(|&claim| claim.to_owned()).collect();
        SaidPage {
            generation,
            taken,
            refused: claims.iter().map(|claim| refused(claim)).collect(),
            last: false,
        }
    }

    #[test]
    fn claim_that_is_taken_later_is_refused_no_more() {
        let names = |row: &Option<HeardRow>| -> Vec<String> {
            row.iter().flat_map(|row| row.claims.iter().map(|of| of.claim.clone())).collect()
        };
        let first = merged(None, &page(2, &["a"], &["b", "c"]));
        assert_eq!(names(&first), ["b", "c"]);
        let again = merged(first.as_ref(), &page(2, &["a"], &["b", "c"]));
        assert_eq!(again, first, "the same page again");
        let second = merged(first.as_ref(), &page(2, &["b"], &["d"]));
        assert_eq!(names(&second), ["c", "d"]);
        assert_eq!(merged(second.as_ref(), &page(2, &["c", "d"], &[])), None);
        assert_eq!(merged(second.as_ref(), &page(3, &[], &[])), None, "it is of an earlier recovery");
    }

    #[test]
    fn node_is_heard_until_the_next_recovery() {
        let is_complete = |row: &Option<HeardRow>| row.as_ref().is_some_and(|row| row.complete);
        let first = merged(None, &page(2, &["a"], &[]));
        assert!(!is_complete(&first));
        let last = merged(first.as_ref(), &SaidPage { last: true, ..page(2, &[], &[]) });
        assert!(is_complete(&last));
        assert!(is_complete(&merged(last.as_ref(), &page(2, &["a"], &["b"]))), "it says the same again");
        assert!(!is_complete(&merged(last.as_ref(), &page(3, &["a"], &["b"]))));
    }

    /// The longest texts, of characters that are two bytes in JSON.
    #[test]
    fn most_refused_claims_fit_in_a_row() {
        let long = |n: usize| RefusedClaim {
            claim: format!("{n}{}", "\"".repeat(1000)),
            namespace: "\"".repeat(1000),
            volume: "\\".repeat(1000),
            consumer: "\u{7}\"".repeat(1000),
            why: "\"".repeat(10_000),
        };
        let all =
            SaidPage { generation: u64::MAX, refused: (0..64).map(long).collect(), ..SaidPage::default() };
        let row = merged(None, &all).unwrap();
        assert_eq!((row.claims.len(), row.more), (NAMED, true));
        let size = rows::write(&RowKey::Heard("n".into()), &row).unwrap().len();
        assert!(size < 64 * 1024, "{size} bytes");
        assert!(row.claims.iter().all(|of| !of.consumer.contains(char::is_control)));
    }
}
