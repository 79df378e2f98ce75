//! Keys, their history and leases, as etcd 3.4 has them. Each function answers as a member does, error texts included.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;
use tonic::Status;

use crate::wire::compare::{CompareResult, CompareTarget, TargetUnion};
use crate::wire::event::EventType;
use crate::wire::request_op::Request;
use crate::wire::response_op::Response;
use crate::wire::{
    Compare, DeleteRangeRequest, DeleteRangeResponse, Event, KeyValue, PutRequest, PutResponse, RangeRequest,
    RangeResponse, RequestOp, ResponseHeader, ResponseOp, TxnRequest, TxnResponse,
};

/// The limit of the operations of each kind in a transaction.
const OPERATIONS: usize = 128;

pub(super) const COMPACTED: &str = "etcdserver: mvcc: required revision has been compacted";
const FUTURE: &str = "etcdserver: mvcc: required revision is a future revision";
const NO_LEASE: &str = "etcdserver: requested lease not found";

/// A key at a revision.
#[derive(Clone)]
struct Version {
    revision: i64,
    create: i64,
    version: i64,
    /// `None`: the key was deleted.
    value: Option<Vec<u8>>,
    lease: i64,
}

struct Lease {
    seconds: i64,
    ends: Instant,
    keys: BTreeSet<Vec<u8>>,
}

pub(super) struct Store {
    keys: BTreeMap<Vec<u8>, Vec<Version>>,
    pub revision: i64,
    /// The history up to this revision is gone. -1: nothing was compacted yet, and a compaction at 0 is one.
    pub compacted: i64,
    /// The events of each revision, compacted ones too: a watch that keeps up has them before that.
    events: BTreeMap<i64, Vec<Event>>,
    leases: BTreeMap<i64, Lease>,
    next_lease: i64,
    /// Whether transactions compare.
    pub compares: bool,
}

/// A range of keys.
struct Span<'a> {
    key: &'a [u8],
    end: &'a [u8],
}

impl Span<'_> {
    fn has(&self, key: &[u8]) -> bool {
        match self.end {
            [] => key == self.key,
            [0] => key >= self.key,
            end => key >= self.key && key < end,
        }
    }
}

impl Store {
    pub fn new() -> Store {
        Store {
            keys: BTreeMap::new(),
            revision: 1,
            compacted: -1,
            events: BTreeMap::new(),
            leases: BTreeMap::new(),
            next_lease: 1000,
            compares: true,
        }
    }

    pub fn header(&self) -> Option<ResponseHeader> {
        Some(ResponseHeader { cluster_id: 1, member_id: 1, revision: self.revision, raft_term: 2 })
    }

    pub fn range(&self, request: &RangeRequest) -> Result<RangeResponse, Status> {
        if request.key.is_empty() {
            return Err(Status::invalid_argument("etcdserver: key is not provided"));
        }
        self.check_revision(request.revision)?;
        let mut found = self.find(request);
        found.header = self.header();
        Ok(found)
    }

    fn check_revision(&self, revision: i64) -> Result<(), Status> {
        match revision {
            0.. if revision > self.revision => Err(Status::out_of_range(FUTURE)),
            1.. if revision < self.compacted => Err(Status::out_of_range(COMPACTED)),
            _ => Ok(()),
        }
    }

    fn find(&self, request: &RangeRequest) -> RangeResponse {
        let RangeRequest { key, range_end, limit, revision } = request;
        let at = if *revision > 0 { *revision } else { i64::MAX };
        let span = Span { key, end: range_end };
        let mut kvs: Vec<KeyValue> = self
            .keys
            .range(key.clone()..)
            .take_while(|(key, _)| span.has(key))
            .filter_map(|(key, versions)| {
                let version = versions.iter().rev().find(|version| version.revision <= at)?;
                Some(KeyValue {
                    key: key.clone(),
                    create_revision: version.create,
                    mod_revision: version.revision,
                    version: version.version,
                    value: version.value.clone()?,
                    lease: version.lease,
                })
            })
            .collect();
        let count = kvs.len();
        let most = usize::try_from(*limit).ok().filter(|limit| *limit > 0).unwrap_or(usize::MAX);
        kvs.truncate(most);
        RangeResponse { header: None, more: kvs.len() < count, kvs, count: count as i64 }
    }

    pub fn txn(&mut self, request: &TxnRequest) -> Result<TxnResponse, Status> {
        check(request)?;
        let succeeded = !self.compares || request.compare.iter().all(|compare| self.holds(compare));
        let operations = if succeeded { &request.success } else { &request.failure };
        for operation in operations {
            let Some(Request::RequestPut(put)) = &operation.request else { continue };
            if put.ignore_value && self.value(&put.key).is_none() {
                return Err(Status::invalid_argument("etcdserver: key not found"));
            }
            if put.lease != 0 && !self.leases.contains_key(&put.lease) {
                return Err(Status::not_found(NO_LEASE));
            }
        }
        for operation in operations {
            match &operation.request {
                // Outside of a transaction a revision below 0 is the present one.
                Some(Request::RequestRange(range)) if range.revision < self.compacted.min(0) => {
                    return Err(Status::out_of_range(COMPACTED));
                }
                Some(Request::RequestRange(range)) => self.check_revision(range.revision)?,
                _ => {}
            }
        }
        let revision = self.revision + 1;
        let mut events = Vec::new();
        let mut responses = Vec::new();
        for operation in operations {
            let response = match &operation.request {
                Some(Request::RequestRange(range)) => Response::ResponseRange(self.find(range)),
                Some(Request::RequestPut(put)) => {
                    events.push(self.put(put, revision));
                    Response::ResponsePut(PutResponse::default())
                }
                Some(Request::RequestDeleteRange(range)) => {
                    let deleted = self.delete(range, revision);
                    let count = deleted.len() as i64;
                    events.extend(deleted);
                    Response::ResponseDeleteRange(DeleteRangeResponse {
                        deleted: count,
                        ..Default::default()
                    })
                }
                None => continue,
            };
            responses.push(ResponseOp { response: Some(response) });
        }
        self.commit(revision, events);
        Ok(TxnResponse { header: self.header(), succeeded, responses })
    }

    fn commit(&mut self, revision: i64, events: Vec<Event>) {
        if !events.is_empty() {
            self.revision = revision;
            self.events.insert(revision, events);
        }
    }

    fn holds(&self, compare: &Compare) -> bool {
        let request = RangeRequest { key: compare.key.clone(), ..RangeRequest::default() };
        let present = self.find(&request).kvs.into_iter().next();
        let number = |has: fn(&KeyValue) -> i64| present.as_ref().map_or(0, has);
        let order = match (compare.target(), &compare.target_union) {
            (CompareTarget::Value, union) => {
                let Some(present) = &present else { return false };
                let wanted = match union {
                    Some(TargetUnion::Value(value)) => value.as_slice(),
                    _ => &[],
                };
                present.value.as_slice().cmp(wanted)
            }
            (CompareTarget::Version, union) => {
                let wanted = if let Some(TargetUnion::Version(of)) = union { *of } else { 0 };
                number(|kv| kv.version).cmp(&wanted)
            }
            (CompareTarget::Create, union) => {
                let wanted = if let Some(TargetUnion::CreateRevision(of)) = union { *of } else { 0 };
                number(|kv| kv.create_revision).cmp(&wanted)
            }
            (CompareTarget::Mod, union) => {
                let wanted = if let Some(TargetUnion::ModRevision(of)) = union { *of } else { 0 };
                number(|kv| kv.mod_revision).cmp(&wanted)
            }
        };
        match compare.result() {
            CompareResult::Equal => order.is_eq(),
            CompareResult::Greater => order.is_gt(),
            CompareResult::Less => order.is_lt(),
            CompareResult::NotEqual => order.is_ne(),
        }
    }

    /// Returns the present value of a key.
    fn value(&self, key: &[u8]) -> Option<&Vec<u8>> {
        self.keys.get(key)?.last()?.value.as_ref()
    }

    fn put(&mut self, put: &PutRequest, revision: i64) -> Event {
        let present = put.ignore_value.then(|| self.value(&put.key).cloned()).flatten();
        let value = present.unwrap_or_else(|| put.value.clone());
        let versions = self.keys.entry(put.key.clone()).or_default();
        let present = versions.last().filter(|version| version.value.is_some());
        let (create, version, lease) =
            present.map_or((revision, 1, 0), |present| (present.create, present.version + 1, present.lease));
        versions.push(Version { revision, create, version, value: Some(value.clone()), lease: put.lease });
        if let Some(lease) = self.leases.get_mut(&lease) {
            lease.keys.remove(&put.key);
        }
        if let Some(lease) = self.leases.get_mut(&put.lease) {
            lease.keys.insert(put.key.clone());
        }
        let kv = KeyValue {
            key: put.key.clone(),
            create_revision: create,
            mod_revision: revision,
            version,
            value,
            lease: put.lease,
        };
        Event { r#type: EventType::Put.into(), kv: Some(kv) }
    }

    fn delete(&mut self, range: &DeleteRangeRequest, revision: i64) -> Vec<Event> {
        let span = Span { key: &range.key, end: &range.range_end };
        let mut events = Vec::new();
        for (key, versions) in self.keys.range_mut(range.key.clone()..).take_while(|(key, _)| span.has(key)) {
            let Some(present) = versions.last().filter(|version| version.value.is_some()) else { continue };
            if let Some(lease) = self.leases.get_mut(&present.lease) {
                lease.keys.remove(key);
            }
            versions.push(Version { revision, create: 0, version: 0, value: None, lease: 0 });
            let kv = KeyValue { key: key.clone(), mod_revision: revision, ..KeyValue::default() };
            events.push(Event { r#type: EventType::Delete.into(), kv: Some(kv) });
        }
        events
    }

    pub fn compact(&mut self, revision: i64) -> Result<(), Status> {
        if revision <= self.compacted {
            return Err(Status::out_of_range(COMPACTED));
        }
        if revision > self.revision {
            return Err(Status::out_of_range(FUTURE));
        }
        self.compacted = revision;
        for versions in self.keys.values_mut() {
            let last = versions.iter().rposition(|version| version.revision <= revision);
            versions.drain(..last.unwrap_or(0));
        }
        self.keys.retain(|_, versions| {
            versions.len() > 1 || versions.iter().any(|of| of.value.is_some() || of.revision > revision)
        });
        Ok(())
    }

    /// Returns the events of a range of keys from a revision on, those of each revision together. They are what a watch has that begins there: of the
    /// compacted revision the deletions are gone.
    pub fn events_left(&self, key: &[u8], end: &[u8], from: i64) -> Vec<(i64, Vec<Event>)> {
        let is_left = |of: &Event| {
            let revision = of.kv.as_ref().map_or(0, |kv| kv.mod_revision);
            of.r#type() == EventType::Put || revision > self.compacted
        };
        let mut found = self.events(key, end, from);
        found.iter_mut().for_each(|(_, events)| events.retain(is_left));
        found.retain(|(_, events)| !events.is_empty());
        found
    }

    /// Does the same for a watch that goes on, and has lost nothing.
    pub fn events(&self, key: &[u8], end: &[u8], from: i64) -> Vec<(i64, Vec<Event>)> {
        let span = Span { key, end };
        let is_in = |event: &&Event| event.kv.as_ref().is_some_and(|kv| span.has(&kv.key));
        let of = |(revision, events): (&i64, &Vec<Event>)| {
            let events: Vec<Event> = events.iter().filter(is_in).cloned().collect();
            (!events.is_empty()).then_some((*revision, events))
        };
        self.events.range(from..).filter_map(of).collect()
    }

    pub fn grant(&mut self, id: i64, seconds: i64, now: Instant) -> Result<(i64, i64), Status> {
        if self.leases.contains_key(&id) {
            return Err(Status::failed_precondition("etcdserver: lease already exists"));
        }
        let id = match id {
            0 => {
                self.next_lease += 1;
                self.next_lease
            }
            id => id,
        };
        let ends = now + std::time::Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
        self.leases.insert(id, Lease { seconds, ends, keys: BTreeSet::new() });
        Ok((id, seconds))
    }

    /// Returns the seconds of a lease that goes on. 0: it has ended.
    pub fn keep(&mut self, id: i64, now: Instant) -> i64 {
        let Some(lease) = self.leases.get_mut(&id) else { return 0 };
        lease.ends = now + std::time::Duration::from_secs(u64::try_from(lease.seconds).unwrap_or(0));
        lease.seconds
    }

    /// Ends a lease. Its keys are deleted at one revision.
    pub fn revoke(&mut self, id: i64) -> Result<(), Status> {
        let lease = self.leases.remove(&id).ok_or_else(|| Status::not_found(NO_LEASE))?;
        let revision = self.revision + 1;
        let mut events = Vec::new();
        for key in lease.keys {
            events.extend(self.delete(&DeleteRangeRequest { key, range_end: Vec::new() }, revision));
        }
        self.commit(revision, events);
        Ok(())
    }

    /// Ends the leases whose time is over.
    pub fn expire(&mut self, now: Instant) {
        let over: Vec<i64> =
            self.leases.iter().filter(|(_, lease)| lease.ends <= now).map(|(id, _)| *id).collect();
        for id in over {
            // It is there.
            let _ = self.revoke(id);
        }
    }

    pub fn leases(&self) -> Vec<i64> {
        self.leases.keys().copied().collect()
    }
}

/// Checks a transaction before it is proposed.
fn check(request: &TxnRequest) -> Result<(), Status> {
    let TxnRequest { compare, success, failure } = request;
    if [compare.len(), success.len(), failure.len()].into_iter().any(|count| count > OPERATIONS) {
        return Err(Status::invalid_argument("etcdserver: too many operations in txn request"));
    }
    let no_key = || Err(Status::invalid_argument("etcdserver: key is not provided"));
    if compare.iter().any(|compare| compare.key.is_empty()) {
        return no_key();
    }
    for operation in success.iter().chain(failure) {
        let key = match &operation.request {
            Some(Request::RequestRange(of)) => &of.key,
            Some(Request::RequestPut(of)) => &of.key,
            Some(Request::RequestDeleteRange(of)) => &of.key,
            None => return Err(Status::invalid_argument("etcdserver: key not found")),
        };
        if key.is_empty() {
            return no_key();
        }
    }
    match writes_twice(success) || writes_twice(failure) {
        true => Err(Status::invalid_argument("etcdserver: duplicate key given in txn request")),
        false => Ok(()),
    }
}

/// Returns whether a key is put twice, or put and deleted.
fn writes_twice(operations: &[RequestOp]) -> bool {
    let mut put = BTreeSet::new();
    let mut deleted = Vec::new();
    for operation in operations {
        match &operation.request {
            Some(Request::RequestPut(of)) if !put.insert(of.key.as_slice()) => return true,
            Some(Request::RequestDeleteRange(of)) => deleted.push(Span { key: &of.key, end: &of.range_end }),
            _ => {}
        }
    }
    put.iter().any(|key| deleted.iter().any(|span| span.has(key)))
}
