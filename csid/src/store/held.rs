//! Which volumes of a plugin each node holds, by a claim or an attachment. The thread of the journal keeps this in memory, so that
//! a plugin's limit is not counted over all its volumes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rusqlite::Connection;

use crate::store::record::{Record, VolumeName};

/// The volumes that a node holds of a plugin.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldVolumes {
    pub count: usize,
    /// The first of them by name, not more than were asked for.
    pub names: Vec<VolumeName>,
}

/// Volumes by plugin and node. A server has many volumes in memory, so their names are shared with its lists.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct HeldIndex(BTreeMap<(String, String), BTreeSet<Arc<VolumeName>>>);

impl HeldIndex {
    /// Reads what the journal holds.
    pub(super) fn read(db: &Connection) -> rusqlite::Result<Self> {
        let sql = "SELECT r.plugin, c.node, r.namespace, r.volume FROM registry r \
                   JOIN claims c ON c.namespace = r.namespace AND c.volume = r.volume \
                   UNION SELECT r.plugin, a.value ->> 'node', r.namespace, r.volume \
                   FROM registry r, json_each(r.attachments) a";
        let mut held = HeldIndex::default();
        let mut statement = db.prepare(sql)?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            let name = VolumeName { namespace: row.get(2)?, volume: row.get(3)? };
            held.0.entry((row.get(0)?, row.get(1)?)).or_default().insert(name.into());
        }
        Ok(held)
    }

    /// Takes over a change of the record of this name that is committed.
    pub fn change(&mut self, name: &Arc<VolumeName>, before: &Record, after: &Record) {
        if before.volume.plugin == after.volume.plugin {
            return self.change_nodes(name, before, after);
        }
        for key in keys(before) {
            if let Some(volumes) = self.0.get_mut(&key) {
                volumes.remove(name);
                if volumes.is_empty() {
                    self.0.remove(&key);
                }
            }
        }
        for key in keys(after) {
            self.0.entry(key).or_default().insert(name.clone());
        }
    }

    /// The same where the plugin stays: only the nodes of what has changed are looked at.
    fn change_nodes(&mut self, name: &Arc<VolumeName>, before: &Record, after: &Record) {
        let claims = before.claims.differences(&after.claims);
        let of_claims = claims.into_iter().flat_map(|(had, has)| had.into_iter().chain(has));
        let of_claims = of_claims.map(|claim| &claim.node);
        let attachments = before.attachments.iter().chain(&after.attachments);
        let nodes: BTreeSet<&String> = of_claims.chain(attachments.map(|at| &at.node)).collect();
        for node in nodes {
            let key = (after.volume.plugin.clone(), node.clone());
            let holds = after.attachments.iter().any(|at| at.node == *node)
                || after.claims.iter().any(|claim| claim.node == *node);
            if holds {
                self.0.entry(key).or_default().insert(name.clone());
            } else if let Some(volumes) = self.0.get_mut(&key) {
                volumes.remove(name);
                if volumes.is_empty() {
                    self.0.remove(&key);
                }
            }
        }
    }

    /// Returns the volumes of a plugin that a node holds, and at most `most` of their names.
    pub fn of(&self, plugin: &str, node: &str, most: usize) -> HeldVolumes {
        let volumes = self.0.get(&(plugin.to_owned(), node.to_owned()));
        volumes.map_or_else(HeldVolumes::default, |volumes| HeldVolumes {
            count: volumes.len(),
            names: volumes.iter().take(most).map(|name| VolumeName::clone(name)).collect(),
        })
    }
}

/// The plugin with each node that holds the volume.
fn keys(record: &Record) -> BTreeSet<(String, String)> {
    let claims = record.claims.iter().map(|claim| &claim.node);
    let nodes = claims.chain(record.attachments.iter().map(|at| &at.node));
    nodes.map(|node| (record.volume.plugin.clone(), node.clone())).collect()
}
