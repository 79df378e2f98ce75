//! A change of a record as one transaction: it compares the head's revision, and puts what differs.

use std::collections::BTreeSet;

use csid::store::registry::{Attachment, Queued, Record, Swap, VolumeName, claim_changes};
use prost::Message;
use serde::{Deserialize, Serialize};

use crate::error::EtcdError;
use crate::guard::Guard;
use crate::keys::{Keys, PAST, Part};
use crate::limits::{self, check};
use crate::operations::{delete, delete_range, get, has_revision, is_absent, put};
use crate::rest;
use crate::rows::{Write, operation};
use crate::stored::{Head, Stored};
use crate::wire::{RequestOp, TxnRequest};

/// The value of the key of a plugin's volume: its one name.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Named {
    pub namespace: String,
    pub volume: String,
}

impl From<Named> for VolumeName {
    fn from(Named { namespace, volume }: Named) -> Self {
        VolumeName { namespace, volume }
    }
}

/// The record that a change is made of, as etcd has it.
pub(crate) enum Before {
    Absent {
        /// The revisions of [`Keys::gone`] of the head and of the key of the plugin's volume; 0: there is no such key. A late try of
        /// a creation finds another revision if one of them was deleted meanwhile.
        gone: [u64; 2],
        /// The revision of etcd at the read of the head's deletions.
        seen: u64,
    },
    Present {
        stored: Box<Stored>,
        /// The revision of etcd at which the volume was so.
        seen: u64,
    },
}

/// A transaction, and what is needed to see its outcome.
pub(crate) struct Change {
    pub txn: TxnRequest,
    /// Stands in the head that the transaction writes.
    pub id: String,
    pub head: Vec<u8>,
    /// The key that a deletion of the head writes.
    pub gone: Vec<u8>,
    /// 0: the record was not there.
    pub before: u64,
    /// The revision of etcd before the first try. The first change of the head after it is this change, or this change is not made.
    pub seen: u64,
    pub deletes: bool,
}

impl Change {
    /// Makes the transaction of a swap. If a comparison fails, the answer has the head. It also has the key of the plugin's volume
    /// if the transaction would write that key. The keys of the guards come last. `writes`: rows that it writes, too.
    pub fn of(
        keys: &Keys,
        swap: &Swap,
        found: Before,
        id: String,
        guards: &[Guard],
        writes: &[Write],
    ) -> Result<Change, EtcdError> {
        let Swap { before, after, past, .. } = swap;
        let name = &before.name;
        let head = keys.part(name, &Part::Head);
        let gone = keys.gone(&head);
        let mut txn = TxnRequest { failure: vec![get(head.clone())], ..TxnRequest::default() };
        let (stored, seen) = match found {
            Before::Absent { gone: [of_head, of_volume], seen } => {
                let key = keys.gone(&keys.external(&after.volume));
                txn.compare.push(is_absent(head.clone()));
                txn.compare.extend([has_revision(gone.clone(), of_head), has_revision(key, of_volume)]);
                (Stored::none(name.clone()), seen)
            }
            Before::Present { stored, seen } => {
                txn.compare.push(has_revision(head.clone(), before.revision));
                (*stored, seen)
            }
        };
        if after.is_empty() {
            let (key, range_end) = keys.volume(name);
            txn.success.push(delete_range(key, range_end));
            if before.revision != 0 {
                let external = keys.external(&stored.record.volume);
                // etcd takes no key twice.
                if keys.gone(&external) != gone {
                    txn.success.push(put(gone.clone(), id.clone().into()));
                }
                txn.success.extend(release(keys, external, &id));
            }
        } else {
            let mut parts = Parts { keys, name, stored: &stored, id: &id, txn: &mut txn };
            parts.name_of_volume(after)?;
            parts.registration(before, after)?;
            parts.claims(before, after)?;
            parts.attachments(&before.attachments, &after.attachments)?;
            parts.queue(&before.queue, &after.queue)?;
            let past_number = parts.past(swap)?;
            let external_id =
                (!after.volume.handle.is_creating()).then(|| after.volume.handle.text().into_owned());
            let volume = (after.volume.plugin.clone(), external_id);
            let head = Head {
                volume,
                past_number,
                driver: after.driver.clone(),
                serial: after.serial,
                ended_attaches: after.ended_attaches.clone(),
                change: id.clone(),
            };
            parts.put(&Part::Head, &head, limits::HEAD)?;
        }
        for guard in guards {
            txn.compare.push(guard.compare(keys));
            txn.failure.push(get(keys.row(&guard.key)));
            txn.success.extend(guard.write(keys));
        }
        for write in writes {
            txn.success.push(operation(keys, write)?);
        }
        let what = || format!("the change of the record {name} ({} past claims)", past.len());
        check(what, txn.success.len(), "operations", limits::OPERATIONS)?;
        check(what, txn.compare.len(), "comparisons", limits::OPERATIONS)?;
        check(what, txn.encoded_len(), "bytes", limits::TRANSACTION)?;
        Ok(Change { txn, id, head, gone, before: before.revision, seen, deletes: after.is_empty() })
    }

    /// Returns whether the transaction changes nothing: a record that is not there is deleted.
    pub fn is_nothing(&self) -> bool {
        self.deletes && self.before == 0
    }
}

struct Parts<'a> {
    keys: &'a Keys,
    name: &'a VolumeName,
    stored: &'a Stored,
    id: &'a str,
    txn: &'a mut TxnRequest,
}

impl Parts<'_> {
    /// Keeps each volume of a plugin to one name.
    fn name_of_volume(&mut self, after: &Record) -> Result<(), EtcdError> {
        let had = (self.stored.record.revision != 0).then(|| self.keys.external(&self.stored.record.volume));
        let has = self.keys.external(&after.volume);
        if had.as_ref() == Some(&has) {
            return Ok(());
        }
        if let Some(had) = had {
            self.txn.success.extend(release(self.keys, had, self.id));
        }
        let VolumeName { namespace, volume } = self.name.clone();
        let value = self.bytes(&Part::Other("ext".into()), &Named { namespace, volume }, limits::HEAD)?;
        self.txn.compare.push(is_absent(has.clone()));
        self.txn.failure.push(get(has.clone()));
        self.txn.success.push(put(has, value));
        Ok(())
    }

    fn registration(&mut self, before: &Record, after: &Record) -> Result<(), EtcdError> {
        match &after.registration {
            same if *same == before.registration => Ok(()),
            Some(registration) => self.put(&Part::Registration, registration, limits::REGISTRATION),
            None => {
                self.delete(&Part::Registration);
                Ok(())
            }
        }
    }

    fn claims(&mut self, before: &Record, after: &Record) -> Result<(), EtcdError> {
        for (had, has) in claim_changes(before, after) {
            let part = |claim: &csid::store::registry::Claim| {
                Part::Claim(claim.node.clone(), claim.consumer.clone())
            };
            if let Some(had) = had.map(part).filter(|had| has.map(part).as_ref() != Some(had)) {
                self.delete(&had);
            }
            if let Some(claim) = has {
                self.put(&part(claim), claim, limits::CLAIM)?;
            }
        }
        Ok(())
    }

    fn attachments(&mut self, before: &[Attachment], after: &[Attachment]) -> Result<(), EtcdError> {
        let mut names = BTreeSet::new();
        for attachment in after {
            let part = Part::attachment(attachment);
            if !names.insert(part.clone()) {
                return Err(EtcdError::Twice { what: format!("the record {}", self.name), key: part.name() });
            }
        }
        for part in before.iter().map(Part::attachment).collect::<BTreeSet<_>>() {
            if !names.contains(&part) {
                self.delete(&part);
            }
        }
        for attachment in after.iter().filter(|attachment| !before.contains(attachment)) {
            self.put(&Part::attachment(attachment), attachment, limits::ATTACHMENT)?;
        }
        Ok(())
    }

    /// Both queues are in the order of their places.
    fn queue(&mut self, before: &[Queued], after: &[Queued]) -> Result<(), EtcdError> {
        let had = |queue: &'_ [Queued], serial: u64| {
            queue.binary_search_by_key(&serial, |queued| queued.serial).ok()
        };
        for gone in before.iter().filter(|queued| had(after, queued.serial).is_none()) {
            self.delete(&Part::Queue(gone.serial));
        }
        for queued in after {
            if had(before, queued.serial).is_none_or(|at| before[at] != *queued) {
                self.put(&Part::Queue(queued.serial), queued.claim.as_ref(), limits::CLAIM)?;
            }
        }
        Ok(())
    }

    /// Returns the number of the newest past claim. Only those that the ring keeps are written.
    fn past(&mut self, swap: &Swap) -> Result<u64, EtcdError> {
        let newest = self.stored.past_number.unwrap_or(0);
        let numbered = (newest + 1..).zip(&swap.past);
        let skipped = swap.past.len().saturating_sub(PAST as usize);
        for (number, claim) in numbered.skip(skipped) {
            let of_claim = Part::Claim(claim.node.clone(), claim.consumer.clone());
            let value = self.bytes(&of_claim, claim, limits::CLAIM)?;
            self.txn.success.push(put(self.keys.part(self.name, &Part::Past(number % PAST)), value));
        }
        Ok(newest + swap.past.len() as u64)
    }

    /// Puts a value with what is unknown of the present one.
    fn put<T: Serialize>(&mut self, part: &Part, value: &T, limit: usize) -> Result<(), EtcdError> {
        let value = self.bytes(part, value, limit)?;
        self.txn.success.push(put(self.keys.part(self.name, part), value));
        Ok(())
    }

    fn delete(&mut self, part: &Part) {
        self.txn.success.push(delete(self.keys.part(self.name, part)));
    }

    /// Writes a value with what is unknown of the value that etcd has at `of`.
    fn bytes<T: Serialize>(&self, of: &Part, value: &T, limit: usize) -> Result<Vec<u8>, EtcdError> {
        let what = || format!("the value of {} of {}", of.name(), self.name);
        let value = rest::write(value, self.stored.rest(of))
            .map_err(|error| EtcdError::Unreadable { key: what(), why: error.to_string() })?;
        check(what, value.len(), "bytes", limit)?;
        Ok(value)
    }
}

/// Returns what deletes the key of a plugin's volume. A late try of a creation does not take it for one that never was.
fn release(keys: &Keys, external: Vec<u8>, id: &str) -> [RequestOp; 2] {
    [put(keys.gone(&external), id.into()), delete(external)]
}

#[cfg(test)]
mod tests {
    use crate::wire::request_op::Request;
    use csid::store::testing::samples::{name, record, swap};

    use super::*;

    /// The head and the plugin's volume share a key of their deletions by chance.
    #[test]
    fn deletion_puts_no_key_twice() {
        let keys = Keys::new("/csid/");
        let mut shared = 0;
        for n in 0..2_000 {
            let volume = format!("data {n}");
            let before = Record { revision: 7, ..record(&volume, &[]) };
            let mut stored = Box::new(Stored::none(name(&volume)));
            stored.record = before.clone();
            let deletion = swap(&before, Record::none(name(&volume)));
            let found = Before::Present { stored, seen: 7 };
            let change = Change::of(&keys, &deletion, found, "id".into(), &[], &[]).unwrap();
            let put: Vec<_> = change
                .txn
                .success
                .iter()
                .filter_map(|operation| match &operation.request {
                    Some(Request::RequestPut(put)) => Some(&put.key),
                    _ => None,
                })
                .collect();
            assert!(put.contains(&&change.gone));
            assert_eq!(put.iter().collect::<BTreeSet<_>>().len(), put.len());
            shared += usize::from(put.len() == 1);
        }
        assert!(shared > 0);
    }
}
