//! Comparisons and operations of a transaction.

use crate::wire::compare::{CompareTarget, TargetUnion};
use crate::wire::request_op::Request;
use crate::wire::{Compare, DeleteRangeRequest, PutRequest, RangeRequest, RequestOp};

pub(crate) fn is_absent(key: Vec<u8>) -> Compare {
    let union = Some(TargetUnion::CreateRevision(0));
    Compare { target: CompareTarget::Create.into(), key, target_union: union, ..Compare::default() }
}

pub(crate) fn has_revision(key: Vec<u8>, revision: u64) -> Compare {
    // No key has the greatest revision.
    let union = Some(TargetUnion::ModRevision(i64::try_from(revision).unwrap_or(i64::MAX)));
    Compare { target: CompareTarget::Mod.into(), key, target_union: union, ..Compare::default() }
}

pub(crate) fn get(key: Vec<u8>) -> RequestOp {
    RequestOp { request: Some(Request::RequestRange(RangeRequest { key, ..RangeRequest::default() })) }
}

pub(crate) fn put(key: Vec<u8>, value: Vec<u8>) -> RequestOp {
    RequestOp { request: Some(Request::RequestPut(PutRequest { key, value, ..PutRequest::default() })) }
}

/// Writes a key with the value that it has.
pub(crate) fn touch(key: Vec<u8>) -> RequestOp {
    let touch = PutRequest { key, ignore_value: true, ..PutRequest::default() };
    RequestOp { request: Some(Request::RequestPut(touch)) }
}

pub(crate) fn delete(key: Vec<u8>) -> RequestOp {
    delete_range(key, Vec::new())
}

pub(crate) fn delete_range(key: Vec<u8>, range_end: Vec<u8>) -> RequestOp {
    RequestOp { request: Some(Request::RequestDeleteRange(DeleteRangeRequest { key, range_end })) }
}
