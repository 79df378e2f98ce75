//! etcd without servers: the floor, and volumes that are written as the registry writes them.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures_util::future::try_join_all;
use serde_json::Value;
use sha2::{Digest, Sha256};
use tonic::transport::Channel;

use crate::load::{self, Load};
use crate::wire::compare::{CompareTarget, TargetUnion};
use crate::wire::kv_client::KvClient;
use crate::wire::request_op::Request;
use crate::wire::{Compare, DeleteRangeRequest, KeyValue, PutRequest, RangeRequest, RequestOp, TxnRequest};

const VOLUMES: &str = "/csid/v1/vol/default/";
const EXTERNAL: &str = "/csid/v1/ext/";
/// The operations of a transaction: etcd takes 128.
const OPERATIONS: usize = 120;
/// Transactions that write volumes at the same time.
const AT_ONCE: usize = 16;

/// A bare client of one member of etcd.
#[derive(Clone)]
pub struct Raw(KvClient<Channel>);

/// Volumes as the registry has written one: a registered one, and its claim.
pub struct Template {
    volume: String,
    head: String,
    registration: String,
    external: String,
    claim: Value,
}

impl Template {
    /// Returns the sizes of a change that takes a claim: the keys and the values.
    fn sizes(&self, claim: &str) -> [usize; 2] {
        [self.head.len(), claim.len()]
    }

    /// Returns a claim of this node, as the servers would have written it.
    fn claim_of(&self, node: &str, n: usize) -> String {
        let mut claim = self.claim.clone();
        claim["node"] = node.into();
        claim["id"] = format!("{n:032x}").into();
        claim["call"] = format!("node/{node}/call of volume {n}").into();
        claim.to_string()
    }
}

impl Raw {
    pub fn new(channel: Channel) -> Raw {
        Raw(KvClient::new(channel))
    }

    /// Reads the keys that begin with `prefix`.
    pub async fn below(&self, prefix: &str) -> Result<Vec<KeyValue>> {
        let (key, range_end) = below(prefix)?;
        let request = RangeRequest { key, range_end, ..RangeRequest::default() };
        Ok(self.0.clone().range(request).await?.into_inner().kvs)
    }

    /// Reads the keys of a volume that has one claim.
    pub async fn template(&self, volume: &str) -> Result<Template> {
        let found = self.below(&format!("{VOLUMES}{volume}/")).await?;
        let value = |part: &str| -> Result<String> {
            let is_part = |kv: &&KeyValue| {
                let key = String::from_utf8_lossy(&kv.key);
                key[VOLUMES.len() + volume.len() + 1..].starts_with(part)
            };
            let kv = found.iter().find(is_part).with_context(|| format!("{volume} has no {part}"))?;
            Ok(String::from_utf8(kv.value.clone())?)
        };
        let mut externals = self.below(EXTERNAL).await?.into_iter();
        let is_own = |kv: &KeyValue| String::from_utf8_lossy(&kv.value).contains(volume);
        let external = externals.find(is_own).context("no key of the plugin's volume")?;
        Ok(Template {
            volume: volume.to_owned(),
            head: value("head")?,
            registration: value("reg")?,
            external: String::from_utf8(external.value)?,
            claim: serde_json::from_str(&value("claim/")?)?,
        })
    }

    /// Writes volumes like a template's. `holder`: the node that has claimed a volume. `None`: nobody has.
    pub async fn write_volumes(
        &self,
        template: &Template,
        plugin: &str,
        names: &[String],
        holder: impl Fn(usize) -> Option<String>,
    ) -> Result<()> {
        let mut operations = Vec::new();
        for (n, name) in names.iter().enumerate() {
            let named = |text: &str| text.replace(&template.volume, name);
            let external: String =
                Sha256::digest(external_id(name)).iter().map(|byte| format!("{byte:02x}")).collect();
            operations.push(put(format!("{EXTERNAL}{plugin}/{external}"), named(&template.external)));
            operations.push(put(format!("{VOLUMES}{name}/head"), named(&template.head)));
            operations.push(put(format!("{VOLUMES}{name}/reg"), named(&template.registration)));
            if let Some(node) = holder(n) {
                let key = format!("{VOLUMES}{name}/claim/{node}/web");
                operations.push(put(key, template.claim_of(&node, n)));
            }
        }
        let transactions: Vec<Vec<RequestOp>> =
            operations.chunks(OPERATIONS).map(<[RequestOp]>::to_vec).collect();
        let (transactions, next) = (Arc::new(transactions), Arc::new(AtomicUsize::new(0)));
        let writer = |_| {
            let (mut client, transactions, next) =
                (self.0.clone(), Arc::clone(&transactions), Arc::clone(&next));
            tokio::spawn(async move {
                while let Some(success) = transactions.get(next.fetch_add(1, Ordering::Relaxed)) {
                    client.txn(TxnRequest { success: success.clone(), ..TxnRequest::default() }).await?;
                }
                anyhow::Ok(())
            })
        };
        for ended in try_join_all((0..AT_ONCE).map(writer)).await? {
            ended?;
        }
        Ok(())
    }

    /// Deletes all volumes. No server may run.
    pub async fn delete_volumes(&self) -> Result<()> {
        let delete = |prefix: &str| {
            let (key, range_end) = below(prefix)?;
            let range = DeleteRangeRequest { key, range_end };
            anyhow::Ok(RequestOp { request: Some(Request::RequestDeleteRange(range)) })
        };
        let success = vec![delete(VOLUMES)?, delete(EXTERNAL)?];
        self.0.clone().txn(TxnRequest { success, ..TxnRequest::default() }).await?;
        Ok(())
    }

    /// Returns etcd's revision, which each transaction that writes raises by one.
    pub async fn revision(&self) -> Result<u64> {
        let request = RangeRequest { key: VOLUMES.into(), ..RangeRequest::default() };
        let header = self.0.clone().range(request).await?.into_inner().header;
        Ok(u64::try_from(header.context("an answer of etcd has no header")?.revision)?)
    }

    /// Has callers compare and swap, each a head of its own, with so many new claims a transaction. The values are as long as those of the
    /// registry.
    pub async fn swap(
        &self,
        template: &Template,
        callers: usize,
        claims: usize,
        time: Duration,
    ) -> Result<Load> {
        static ROUND: AtomicUsize = AtomicUsize::new(0);
        let round = ROUND.fetch_add(1, Ordering::Relaxed);
        let [head, claim] = template.sizes(&template.claim_of("n100", 0)).map(|size| vec![b'x'; size]);
        let revisions: Arc<Vec<AtomicI64>> = Arc::new((0..callers).map(|_| AtomicI64::new(0)).collect());
        let (client, next) = (self.0.clone(), Arc::new(AtomicUsize::new(0)));
        load::run(callers, time, move |caller| {
            let (mut client, head, claim) = (client.clone(), head.clone(), claim.clone());
            let (revisions, n) = (Arc::clone(&revisions), next.fetch_add(1, Ordering::Relaxed));
            async move {
                let key = format!("/floor/v1/vol/default/{round:04}-{caller:04}/head");
                let of_claim =
                    |of| format!("/floor/v1/vol/default/{round:04}-{caller:04}/claim/n{n:06}-{of:02}/web");
                let claims = (0..claims).map(|of| bytes(of_claim(of), claim.clone()));
                let compare = Compare {
                    target: CompareTarget::Mod.into(),
                    key: key.clone().into(),
                    target_union: Some(TargetUnion::ModRevision(revisions[caller].load(Ordering::Relaxed))),
                    ..Compare::default()
                };
                let txn = TxnRequest {
                    compare: vec![compare],
                    success: [bytes(key, head)].into_iter().chain(claims).collect(),
                    failure: Vec::new(),
                };
                let done = client.txn(txn).await?.into_inner();
                ensure!(done.succeeded, "a compare-and-swap of the floor was refused");
                let Some(header) = done.header else { bail!("an answer of etcd has no header") };
                revisions[caller].store(header.revision, Ordering::Relaxed);
                Ok(true)
            }
        })
        .await
    }
}

/// Returns the range of the keys that begin with `prefix`.
fn below(prefix: &str) -> Result<(Vec<u8>, Vec<u8>)> {
    let mut end = prefix.as_bytes().to_vec();
    *end.last_mut().context("an empty prefix")? += 1;
    Ok((prefix.into(), end))
}

/// Returns the plugin's ID of a volume of this name.
pub fn external_id(volume: &str) -> String {
    format!("ext-{volume}")
}

fn put(key: String, value: String) -> RequestOp {
    bytes(key, value.into_bytes())
}

fn bytes(key: String, value: Vec<u8>) -> RequestOp {
    RequestOp {
        request: Some(Request::RequestPut(PutRequest { key: key.into(), value, ..PutRequest::default() })),
    }
}
