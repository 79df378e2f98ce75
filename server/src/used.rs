//! How many volumes of a plugin a node has, where the plugin limits that. The row `used/N/P` has the count.
//!
//! ```text
//!   no row ── a limit is to be kept ──▶ counting ── the volumes of the lists ──▶ count ── first, last claim of a volume ──▶ count ± 1
//! ```
//!
//! Each change of a record by which a node begins or ceases to have a volume compares the row, or its absence, and writes the row if it is
//! there. So two servers never give the last place twice. A row that is counting is written by each such change, too. So the count of
//! the lists is the present one if the row has not changed since.

use std::collections::BTreeSet;

use csid::error::Step;
use csid::store::registry::{Record, claim_changes};
use csid::{Error, Kind};
use csid_etcd::{Expected, Guard, RowKey, Rows, Write, Written};

use crate::cluster::Cluster;
use crate::edges;
use crate::failure::Result;
use crate::rows::{self, NodeRow, Read, UsedRow};

/// Tries of a count that others are faster with.
const TRIES: usize = 16;

/// What a change of a record writes besides the record.
#[derive(Default)]
pub struct Counting {
    pub guards: Vec<Guard>,
    pub writes: Vec<Write>,
    /// The rows as they are after the change: node, plugin, value. `None`: no row was there.
    counted: Vec<(String, String, Option<UsedRow>)>,
    /// The nodes that cease to have a volume of the plugin, and whose volumes are counted.
    pub freed: Vec<(String, String)>,
}

/// Returns whether a node has a volume: a claim, or an attachment.
fn has(record: &Record, node: &str) -> bool {
    record.claims.iter().any(|claim| claim.node == node)
        || record.attachments.iter().any(|at| at.node == node)
}

/// Returns whether a node has brought a claim of the volume back after a restore of etcd.
fn is_brought_back(record: &Record, node: &str) -> bool {
    record.claims.iter().any(|claim| claim.node == node && claim.adopted)
}

/// Returns the nodes that begin (`true`) or cease to have a volume, by a change of its record.
fn changes(before: &Record, after: &Record) -> Vec<(String, bool)> {
    let claims = claim_changes(before, after);
    let of_claims = claims.flat_map(|(had, has)| had.into_iter().chain(has)).map(|of| &of.node);
    let attachments = before.attachments.iter().chain(&after.attachments).map(|at| &at.node);
    // AttachVolume may name a node that the servers do not know.
    let nodes: BTreeSet<&String> = of_claims.chain(attachments).filter(|node| !node.is_empty()).collect();
    let changed = nodes.into_iter().filter_map(|node| match (has(before, node), has(after, node)) {
        (false, true) => Some((node.clone(), true)),
        (true, false) => Some((node.clone(), false)),
        _ => None,
    });
    changed.collect()
}

/// Returns how many volumes of a plugin a node may have. 0: any number.
fn limit_of(row: Option<&NodeRow>, plugin: &str) -> u64 {
    row.and_then(|row| row.plugins.get(plugin)).and_then(|of| of.max_volumes).unwrap_or(0)
}

impl Cluster {
    /// Returns why a node gets no further volume of a plugin. `None`: it has the volume already, or there is a place.
    pub async fn refuse_limit(&self, record: &Record, node: &str, row: &NodeRow) -> Result<Option<Error>> {
        let plugin = &record.volume.plugin;
        let limit = limit_of(Some(row), plugin);
        if limit == 0 || has(record, node) {
            return Ok(None);
        }
        let is_full = |row: Option<&Read<UsedRow>>| {
            row.and_then(|row| row.value.volumes).is_some_and(|volumes| volumes >= limit)
        };
        // An old row may be full. One with a place is compared by the change.
        if !is_full(self.used(node, plugin).await?.as_ref())
            || !is_full(self.used_now(node, plugin).await?.as_ref())
        {
            return Ok(None);
        }
        let text =
            format!("node {node} has {limit} volumes of plugin {plugin}, the plugin's limit for a node");
        let error = Error::new(Kind::ClaimConflict, text);
        Ok(Some(error.with(|details| details.step = Some(Step::VolumeLimit))))
    }

    /// Returns what a change of a record writes of the counts. Otherwise it returns a count by which a node has no place for the volume.
    pub async fn count_used(
        &self,
        before: &Record,
        after: &Record,
    ) -> Result<std::result::Result<Counting, RowKey>> {
        let mut counting = Counting::default();
        for (node, begins) in changes(before, after) {
            let plugin = match begins {
                true => &after.volume.plugin,
                false => &before.volume.plugin,
            };
            let limit = match begins {
                // The node has the volume already. A limit that keeps the claim out of etcd would not change that.
                true if is_brought_back(after, &node) => 0,
                true => limit_of(self.node(&node).await?.as_ref().map(|row| &row.value), plugin),
                false => 0,
            };
            let mut row = self.used(&node, plugin).await?;
            if limit > 0 && row.as_ref().is_none_or(|row| row.value.volumes.is_none()) {
                self.recount(&node, plugin).await?;
                row = self.used(&node, plugin).await?;
            }
            let key = RowKey::Used { node: node.clone(), plugin: plugin.clone() };
            let Some(Read { value, revision }) = row else {
                counting.guards.push(Guard { key, is: Expected::Absent });
                counting.counted.push((node, plugin.clone(), None));
                continue;
            };
            let volumes = match (value.volumes, begins) {
                (Some(count), true) if limit > 0 && count >= limit => return Ok(Err(key)),
                (Some(count), true) => Some(count + 1),
                // A count of 0 was wrong. It is made again.
                (Some(count), false) => count.checked_sub(1),
                (None, _) => None,
            };
            let value = UsedRow { volumes, ..value };
            counting.guards.push(Guard { key: key.clone(), is: Expected::Revision(revision) });
            counting.writes.push(Write { value: Some(rows::write(&key, &value)?), key, lease: 0 });
            if !begins {
                counting.freed.push((node.clone(), plugin.clone()));
            }
            counting.counted.push((node, plugin.clone(), Some(value)));
        }
        Ok(Ok(counting))
    }

    /// Notes what a change has written of the counts, at this revision.
    pub async fn has_counted(&self, counting: Counting, revision: u64) {
        for (node, plugin, value) in counting.counted {
            if let Some(value) = value {
                self.know_used(&node, &plugin, Some(Read { value, revision }));
            }
        }
        for (node, plugin) in counting.freed {
            if let Err(error) = self.wake_limited(&node, &plugin).await {
                // Servers look at volumes with a queue every few seconds.
                tracing::debug!(node, plugin, %error, "the volumes that a node waits for are not known now");
            }
        }
    }

    /// Has the volumes of a plugin looked at that a node waits for.
    async fn wake_limited(&self, node: &str, plugin: &str) -> Result<()> {
        if self.registry.queued_of(node).await? == 0 {
            return Ok(());
        }
        let (records, _) = self.registry.restless().await?;
        let waits = |record: &&Record| {
            record.volume.plugin == plugin && record.queue.iter().any(|queued| queued.claim.node == node)
        };
        records.iter().filter(waits).for_each(|record| self.wake(&record.name));
        Ok(())
    }

    /// Counts a node's volumes of a plugin by the lists.
    async fn recount(&self, node: &str, plugin: &str) -> Result<()> {
        let key = RowKey::Used { node: node.to_owned(), plugin: plugin.to_owned() };
        for _ in 0..TRIES {
            let here = self.presence.here()?;
            let write = |value: &UsedRow, is: Expected| {
                let guards = [Guard { key: key.clone(), is }, here.guard()];
                let write = Write { value: Some(rows::write(&key, value)?), key: key.clone(), lease: 0 };
                Ok::<_, crate::failure::ServerError>((guards, vec![write]))
            };
            let (value, revision) = match self.used_now(node, plugin).await? {
                Some(Read { value: UsedRow { volumes: Some(_), .. }, .. }) => return Ok(()),
                Some(Read { value, revision }) => (value, revision),
                None => {
                    let value = UsedRow::default();
                    let (guards, writes) = write(&value, Expected::Absent)?;
                    match edges::write(&self.rows, &guards, writes).await? {
                        Written::Done { revision } => (value, revision),
                        Written::Refused(_) | Written::Unknown => continue,
                    }
                }
            };
            // No volume of these has come or gone since, if the row has this revision still.
            self.registry.reached(revision).await?;
            let volumes = self.registry.held_by(plugin, node).await?;
            let value = UsedRow { volumes: Some(u64::try_from(volumes).unwrap_or(u64::MAX)), ..value };
            let (guards, writes) = write(&value, Expected::Revision(revision))?;
            if let Written::Done { revision } = edges::write(&self.rows, &guards, writes).await? {
                self.know_used(node, plugin, Some(Read { value, revision }));
                return Ok(());
            }
        }
        let text = format!("the volumes of node {node} of plugin {plugin} changed {TRIES} times meanwhile");
        Err(Error::new(Kind::Busy, text).into())
    }

    /// Removes the counts of a node that has no volume, and gets none any more.
    pub async fn drop_used(&self, node: &str, row: &Read<NodeRow>) -> Result<()> {
        for (key, used) in self.rows.all(&Rows::Used { node: node.to_owned() }).await? {
            let guards = [
                Guard { key: key.clone(), is: Expected::Revision(used.revision) },
                crate::cluster::node_guard(node, row),
                self.presence.here()?.guard(),
            ];
            edges::write(&self.rows, &guards, vec![Write { key: key.clone(), value: None, lease: 0 }])
                .await?;
            self.forget(&key);
        }
        Ok(())
    }
}
