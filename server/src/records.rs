//! Records as csid's rules take them, and their change in etcd.

use csid::store::Durability;
use csid::store::registry::{Attachment, Claim, Conflict, Record, RegistryError, Swap, VolumeName};
use csid::volume::rules::{self, Claims};
use csid::{Error, Kind};
use csid_etcd::{Guard, RowKey, Swapped};

use crate::cluster::Cluster;
use crate::edges::{self, Edge};
use crate::failure::ServerError;
use crate::rows::{NodeRow, PluginRow, Read};
use crate::time::now_usec;

/// Tries of a change of a record that others are faster with.
pub const TRIES: usize = 64;

/// Returns the error of a change that others were faster with each time.
pub fn busy(name: &VolumeName) -> ServerError {
    Error::new(Kind::Busy, format!("the record of {name} changed {TRIES} times meanwhile")).into()
}

/// The rows that the rules need besides a record, for an event of one node.
#[derive(Clone)]
pub struct Around {
    pub node: Option<Read<NodeRow>>,
    pub plugin: Option<Read<PluginRow>>,
    /// Whether a node that may be sent the plugin's calls in the record's namespace has a controller that attaches.
    pub has_controllers: bool,
    /// The cluster's generation.
    pub generation: u64,
}

impl Around {
    fn reported<'a>(&'a self, record: &Record) -> Option<&'a crate::rows::NodePlugin> {
        self.node.as_ref().and_then(|row| row.value.plugins.get(&record.volume.plugin))
    }

    /// Returns whether the plugin attaches volumes. A node is believed about its own plugin, unless the plugin has controllers. What was
    /// attached has to be detached. `None`: not known.
    pub fn attaches(&self, record: &Record) -> Option<bool> {
        match self.has_controllers || !record.attachments.is_empty() {
            true => Some(true),
            false => self.reported(record).and_then(|plugin| plugin.attaches),
        }
    }

    /// Returns the plugin's name of the node. `None`: not known.
    pub fn node_id(&self, record: &Record) -> Option<String> {
        self.reported(record).and_then(|plugin| plugin.node_id.clone())
    }

    /// Returns whether the node has had a name of its own by the plugin.
    pub fn has_first_name(&self, record: &Record) -> bool {
        self.node.as_ref().is_some_and(|row| row.value.node_ids.contains_key(&record.volume.plugin))
    }

    /// Returns whether the node may have volumes mounted for claims that etcd does not have.
    pub fn has_refused_mounts(&self) -> bool {
        self.node.as_ref().is_some_and(|row| row.value.has_refused_mounts())
    }

    /// Returns another name of the node by the plugin than the first one, or one that another node has. No operator has accepted it.
    pub fn refused_node_id(&self, record: &Record) -> Option<&str> {
        self.reported(record).and_then(|plugin| plugin.other_node_id.as_deref())
    }

    /// Returns the other node that has the volume attached under this node's name. A detach would be of both.
    pub fn other_of_node_id<'a>(&self, record: &'a Record, node: &str) -> Option<&'a str> {
        let node_id = self.node_id(record)?;
        let is_other = |at: &&Attachment| at.node != node && at.node_id.as_ref() == Some(&node_id);
        record.attachments.iter().find(is_other).map(|at| at.node.as_str())
    }

    /// Returns a record as the rules take it, for an event of this node. An attachment of a backup of etcd counts as one of an earlier boot, unless the node
    /// has said that it holds it: the controller is called again before a claim is granted. Its first call may have been made since the backup.
    pub fn claims(&self, record: &Record, node: &str) -> Claims {
        let registration = record.registration.as_ref();
        let mut attachments = record.attachments.clone();
        let is_of_backup = |at: &Attachment| at.by_call.is_none() && at.generation.max(1) < self.generation;
        for at in attachments.iter_mut().filter(|at| at.node == node && is_of_backup(at)) {
            (at.boot, at.uncalled) = (None, false);
        }
        let is_anothers = self.other_of_node_id(record, node).is_some();
        Claims {
            attaches: self.attaches(record),
            node_id: self.node_id(record).filter(|_| !is_anothers),
            capabilities: registration.map(|of| of.spec.capabilities.clone()).unwrap_or_default(),
            claims: record.claims.clone(),
            ahead: Vec::new(),
            attachments,
            node: Some(node.to_owned()),
            cluster: None,
            boot: self.node.as_ref().map(|row| row.value.boot.clone()).unwrap_or_default(),
        }
    }

    /// Returns a record with the claims and attachments of a step. An attachment that the step asks for is of the cluster's generation. The record may have the
    /// one whose detach has ended in this step. A claim that the step begins to release has the time.
    pub fn stepped(&self, record: &Record, after: Claims) -> Record {
        let Claims { mut claims, mut attachments, .. } = after;
        let is_new = |at: &&mut Attachment| {
            at.uncalled && record.attachment(&at.node).is_none_or(|before| !before.uncalled)
        };
        attachments.iter_mut().filter(is_new).for_each(|at| at.generation = self.generation);
        let is_begun =
            |had: Option<&Claim>, has: &Claim| has.releasing && had.is_none_or(|had| !had.releasing);
        let begun: Vec<Claim> = record
            .claims
            .differences(&claims)
            .into_iter()
            .filter_map(|(had, has)| has.filter(|has| is_begun(had, has)).cloned())
            .collect();
        for claim in begun {
            claims.insert(Claim { released_usec: now_usec(), ..claim });
        }
        Record { claims, attachments, ..record.clone() }
    }
}

/// What became of a change of a record.
pub enum Put {
    /// The record as it is written.
    Done(Box<Record>),
    /// The record has changed since it was read.
    Stale,
    /// These rows have changed since they were read. They are forgotten.
    Refused(Vec<RowKey>),
}

impl Put {
    /// Returns the record that is written. `None`: none is.
    pub fn done(self) -> Option<Record> {
        match self {
            Put::Done(record) => Some(*record),
            Put::Stale | Put::Refused(_) => None,
        }
    }
}

impl Cluster {
    /// Returns the rows around a record, perhaps old ones.
    pub async fn around(&self, record: &Record, node: &str) -> crate::failure::Result<Around> {
        let node = self.node(node).await?;
        self.around_row(record, node).await
    }

    /// Does the same, with a node's row that was read before.
    pub async fn around_row(
        &self,
        record: &Record,
        node: Option<Read<NodeRow>>,
    ) -> crate::failure::Result<Around> {
        let name = &record.volume.plugin;
        let plugin = self.plugin(name).await?;
        let row = plugin.as_ref().map(|row| &row.value);
        let has_controllers = self.has_controllers(&record.name.namespace, name, row);
        let generation = self.meta().await?.value.generation;
        Ok(Around { node, plugin, has_controllers, generation })
    }

    /// Writes a record as [`Cluster::put`] does. `None`: it or a row has changed since it was read.
    pub async fn swap(
        &self,
        before: &Record,
        after: Record,
        guards: Vec<Guard>,
    ) -> Result<Option<Record>, RegistryError> {
        Ok(self.put(before, after, guards).await?.done())
    }

    /// Writes a record, and the counts of nodes' volumes with it. The nodes that owe an expansion are settled with its claims.
    pub async fn put(
        &self,
        before: &Record,
        mut after: Record,
        mut guards: Vec<Guard>,
    ) -> Result<Put, RegistryError> {
        rules::settle_owed(&mut after);
        let mut counting = match self.count_used(before, &after).await? {
            Ok(counting) => counting,
            Err(full) => {
                self.forget(&full);
                return Ok(Put::Refused(vec![full]));
            }
        };
        guards.append(&mut counting.guards);
        let writes = std::mem::take(&mut counting.writes);
        let past = rules::past(before, &after);
        let swap = Swap { before: before.clone(), after: after.clone(), past, durability: Durability::Disk };
        let edge = Edge::of_record(before, &after);
        match edges::around(edge, self.registry.swap_with(swap, guards, writes)).await {
            Ok(Swapped::Done(revision)) => {
                self.has_counted(counting, revision).await;
                Ok(Put::Done(Box::new(Record { revision, ..after })))
            }
            Ok(Swapped::Refused(keys)) if keys.iter().any(|key| self.is_own(key)) => {
                Err(RegistryError::Unreachable("this server's row in etcd is gone".into()))
            }
            Ok(Swapped::Refused(keys)) => {
                keys.iter().for_each(|key| self.forget(key));
                Ok(Put::Refused(keys))
            }
            Err(RegistryError::Conflict(Conflict::Stale)) => Ok(Put::Stale),
            Err(error) => Err(error),
        }
    }

    /// Returns whether a row is this server's, or may have been when a change began.
    fn is_own(&self, key: &RowKey) -> bool {
        let RowKey::Server(id) = key else { return false };
        self.presence.here().map_or(true, |here| here.id == *id)
    }
}

#[cfg(test)]
mod tests {
    use csid::store::rows::Leg;

    use super::*;

    fn attachment(node: &str, leg: Leg, uncalled: bool, generation: u64) -> Attachment {
        Attachment { uncalled, generation, ..Attachment::new(node, leg) }
    }

    /// A detach and the next attach may be one step.
    #[test]
    fn attachment_made_again_is_of_the_generation() {
        let around = Around { node: None, plugin: None, has_controllers: true, generation: 3 };
        let mut record = Record::none(VolumeName { namespace: "default".into(), volume: "data".into() });
        record.attachments = vec![
            attachment("again", Leg::Removing, false, 1),
            attachment("backup", Leg::Making, true, 1),
            attachment("held", Leg::Present, false, 3),
        ];
        let mut after = around.claims(&record, "again");
        after.attachments[0] = attachment("again", Leg::Making, true, 0);
        after.attachments.push(attachment("new", Leg::Making, true, 0));
        let after = around.stepped(&record, after);
        let generations: Vec<_> =
            after.attachments.iter().map(|at| (at.node.as_str(), at.generation)).collect();
        assert_eq!(generations, [("again", 3), ("backup", 1), ("held", 3), ("new", 3)]);
    }
}
