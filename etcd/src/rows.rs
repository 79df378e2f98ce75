//! The rows of a cluster that are not volumes: the cluster's own, its servers, nodes and sessions.

use std::sync::Arc;

use crate::client::{Client, Decided};
use crate::error::EtcdError;
use crate::guard::Guard;
use crate::keys::{Keys, RowKey, Rows};
use crate::limits::{self, check};
use crate::operations::{delete, get};
use crate::wire::request_op::Request;
use crate::wire::response_op::Response;
use crate::wire::{KeyValue, PutRequest, RangeRequest, RequestOp, TxnRequest};

/// A row as etcd has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub value: Vec<u8>,
    /// The revision at which the key was created.
    pub created: u64,
    /// The revision at which the key was written last.
    pub revision: u64,
}

/// Rows of a page. The largest are those of nodes: each has 64 plugins at most, so a page has less than 1 MiB. One transaction can delete a page.
const PAGE: i64 = 100;

/// The place of a list that is read in pages.
pub struct Pages {
    /// The first key that was not read. `None`: all were.
    next: Option<Vec<u8>>,
    end: Vec<u8>,
}

/// A row to write.
pub struct Write {
    pub key: RowKey,
    /// `None`: the row is deleted.
    pub value: Option<Vec<u8>>,
    /// The lease whose end deletes the row. 0: none.
    pub lease: i64,
}

/// What became of writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Written {
    Done {
        revision: u64,
    },
    /// This row is not as a guard expects. Nothing was written.
    Refused(RowKey),
    /// An earlier try may have been made. The rows have to be read.
    Unknown,
}

/// Reads and writes rows.
#[derive(Clone)]
pub struct RowStore {
    pub(crate) keys: Keys,
    pub(crate) client: Arc<Client>,
}

impl RowStore {
    /// Returns the ID of etcd's cluster, as its answers have it. A backup that is restored gets another ID. 0: no answer has come yet.
    pub fn etcd_cluster(&self) -> u64 {
        self.client.history.cluster()
    }

    /// Returns the greatest revision in an answer of etcd until now. After a read it is none that is less than etcd's at that read.
    pub fn etcd_revision(&self) -> u64 {
        self.client.history.revision()
    }

    /// Waits until an answer of etcd has shown that it was restored from a backup since this process has begun, and returns how. The process has to
    /// end then.
    pub async fn restored(&self) -> String {
        self.client.history.over().await
    }

    /// Reads a row. The answer has every change that was answered before the call.
    pub async fn read(&self, key: &RowKey) -> Result<Option<Row>, EtcdError> {
        let request = RangeRequest { key: self.keys.row(key), ..RangeRequest::default() };
        Ok(self.client.range("read a row", request).await?.kvs.into_iter().next().map(row))
    }

    /// Reads all rows of a kind, in the order of their keys.
    pub async fn all(&self, of: &Rows) -> Result<Vec<(RowKey, Row)>, EtcdError> {
        let (mut pages, mut all) = (self.pages(of), Vec::new());
        while let Some(page) = self.next(&mut pages).await? {
            all.extend(page);
        }
        Ok(all)
    }

    /// Returns whether there is a row of a kind.
    pub async fn has_any(&self, of: &Rows) -> Result<bool, EtcdError> {
        Ok(self.next(&mut self.pages(of)).await?.is_some())
    }

    /// Begins a list of all rows of a kind.
    pub fn pages(&self, of: &Rows) -> Pages {
        let (first, end) = self.keys.rows(of);
        Pages { next: Some(first), end }
    }

    /// Reads the next page of a list, in the order of the keys. `None`: all rows were read. Keys that are no row's are left out.
    pub async fn next(&self, pages: &mut Pages) -> Result<Option<Vec<(RowKey, Row)>>, EtcdError> {
        while let Some(key) = pages.next.clone() {
            let range_end = pages.end.clone();
            let request = RangeRequest { key, range_end, limit: PAGE, ..RangeRequest::default() };
            let found = self.client.range("list rows", request).await?;
            // The least key that is greater than a key ends with a byte of 0.
            pages.next = found.kvs.last().filter(|_| found.more).map(|last| [&last.key[..], &[0]].concat());
            let of_kv = |kv: KeyValue| Some((self.keys.read_row(&kv.key)?, row(kv)));
            let page: Vec<_> = found.kvs.into_iter().filter_map(of_kv).collect();
            if !page.is_empty() {
                return Ok(Some(page));
            }
        }
        Ok(None)
    }

    /// Writes rows in one transaction, if all guards hold.
    pub async fn write(&self, guards: &[Guard], writes: Vec<Write>) -> Result<Written, EtcdError> {
        let mut txn = TxnRequest::default();
        for guard in guards {
            txn.compare.push(guard.compare(&self.keys));
            txn.failure.push(get(self.keys.row(&guard.key)));
            txn.success.extend(guard.write(&self.keys));
        }
        for write in &writes {
            txn.success.push(operation(&self.keys, write)?);
        }
        match self.client.txn("write rows", &txn).await? {
            Decided::Committed { revision } => Ok(Written::Done { revision }),
            Decided::Compared { open: true, .. } | Decided::Full { open: true } => Ok(Written::Unknown),
            Decided::Full { open: false } => Err(EtcdError::Full),
            Decided::Compared { answers, open: false } => {
                let refused = broken(&self.keys, guards, &answers.responses).into_iter().next();
                // A guard that holds at the read of the answer cannot have failed.
                refused
                    .map(Written::Refused)
                    .ok_or(EtcdError::Open { why: "etcd refused rows without a reason" })
            }
        }
    }

    /// Takes a lease for some seconds.
    pub async fn grant_lease(&self, seconds: i64) -> Result<i64, EtcdError> {
        self.client.grant_lease(seconds).await
    }

    /// Renews a lease. Returns `false` if it has ended.
    pub async fn keep_lease(&self, lease: i64) -> Result<bool, EtcdError> {
        self.client.keep_lease(lease).await
    }

    /// Ends a lease, and deletes its rows.
    pub async fn revoke_lease(&self, lease: i64) -> Result<(), EtcdError> {
        self.client.revoke_lease(lease).await
    }
}

/// Returns the operation that writes a row.
pub(crate) fn operation(keys: &Keys, Write { key, value, lease }: &Write) -> Result<RequestOp, EtcdError> {
    let bytes = keys.row(key);
    check(|| format!("the row {key:?}"), value.as_ref().map_or(0, Vec::len), "bytes", limits::ROW)?;
    Ok(match value {
        Some(value) => {
            let put = PutRequest { key: bytes, value: value.clone(), lease: *lease, ..PutRequest::default() };
            RequestOp { request: Some(Request::RequestPut(put)) }
        }
        None => delete(bytes),
    })
}

/// Returns the rows of the guards that do not hold, by the answers to a transaction that was refused.
pub(crate) fn broken(keys: &Keys, guards: &[Guard], answers: &[crate::wire::ResponseOp]) -> Vec<RowKey> {
    let found: Vec<&KeyValue> = answers
        .iter()
        .filter_map(|answer| match &answer.response {
            Some(Response::ResponseRange(found)) => found.kvs.first(),
            _ => None,
        })
        .collect();
    let is_broken = |guard: &&Guard| {
        let key = keys.row(&guard.key);
        !guard.holds(found.iter().find(|kv| kv.key == key).copied())
    };
    guards.iter().filter(is_broken).map(|guard| guard.key.clone()).collect()
}

pub(crate) fn row(kv: KeyValue) -> Row {
    let revision = |revision: i64| u64::try_from(revision).unwrap_or(0);
    Row { created: revision(kv.create_revision), revision: revision(kv.mod_revision), value: kv.value }
}
