//! What the tests share.

use std::time::Duration;

use csid::store::registry::{Record, Registry, RegistryError};
use csid::store::testing::samples::{name, swap, swap_in};
use csid_etcd::api::kv_client::KvClient;
use csid_etcd::api::request_op::Request;
use csid_etcd::api::response_op::Response;
use csid_etcd::api::{CompactionRequest, KeyValue, PutRequest, RangeRequest, RequestOp, TxnRequest};
use csid_etcd::{EtcdConfig, EtcdRegistry, KeepEvents, Timing};
use futures_util::FutureExt;

/// Members answer within this time, also on a busy machine. The product waits longer.
pub const TIMING: Timing = Timing {
    first_answer: Duration::from_secs(2),
    answer: Duration::from_secs(4),
    request: Duration::from_secs(20),
};

pub fn config(endpoints: Vec<String>) -> EtcdConfig {
    EtcdConfig { endpoints, tls: None, prefix: "/csid/".into(), timing: TIMING }
}

pub fn no_events() -> KeepEvents {
    Box::new(|_| std::future::ready(()).boxed())
}

/// Starts a registry that drops its events.
pub fn registry(endpoints: Vec<String>) -> EtcdRegistry {
    EtcdRegistry::start(&config(endpoints), no_events()).unwrap()
}

/// Changes a volume's record as it is now.
pub async fn change(
    registry: &impl Registry,
    volume: &str,
    change: impl Fn(&mut Record),
) -> Result<u64, RegistryError> {
    let before = registry.record(name(volume)).await?;
    let mut after = before.clone();
    change(&mut after);
    swap_in(registry, swap(&before, after)).await
}

/// etcd itself, past the registry.
pub struct Raw(KvClient<tonic::transport::Channel>);

impl Raw {
    pub async fn connect(endpoint: String) -> Raw {
        let channel = tonic::transport::Endpoint::from_shared(endpoint).unwrap().connect().await.unwrap();
        Raw(KvClient::new(channel).max_decoding_message_size(usize::MAX))
    }

    /// Returns all keys below a text, with their values.
    pub async fn below(&mut self, prefix: &str) -> Vec<KeyValue> {
        let mut range_end = prefix.as_bytes().to_vec();
        *range_end.last_mut().unwrap() += 1;
        let key = prefix.into();
        self.0
            .range(RangeRequest { key, range_end, ..RangeRequest::default() })
            .await
            .unwrap()
            .into_inner()
            .kvs
    }

    pub async fn json(&mut self, key: &str) -> serde_json::Value {
        let request = RangeRequest { key: key.into(), ..RangeRequest::default() };
        let found = self.0.range(request).await.unwrap().into_inner();
        serde_json::from_slice(&found.kvs[0].value).unwrap()
    }

    pub async fn put(&mut self, key: &str, value: impl AsRef<[u8]>) {
        let put = PutRequest { key: key.into(), value: value.as_ref().to_vec(), ..PutRequest::default() };
        let success = vec![RequestOp { request: Some(Request::RequestPut(put)) }];
        let done = self.0.txn(TxnRequest { success, ..TxnRequest::default() }).await.unwrap().into_inner();
        assert!(matches!(done.responses[0].response, Some(Response::ResponsePut(_))));
    }

    /// Forgets the history up to now.
    pub async fn compact(&mut self) {
        let now = self.0.range(RangeRequest { key: "/".into(), ..RangeRequest::default() }).await.unwrap();
        let revision = now.into_inner().header.unwrap().revision;
        self.0.compact(CompactionRequest { revision, physical: true }).await.unwrap();
    }
}
