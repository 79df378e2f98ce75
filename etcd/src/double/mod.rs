//! An etcd in memory, for simulations: keys, transactions, watches, leases and compaction behind the services of etcd.proto. It is on tokio's
//! clock. What happens to each call on its way decides a [`Way`]: it is late, lost, done without an answer, or done twice. Suite etcd compares
//! it with a real member by random requests.
//!
//! State: the store, which all connections share. Always true: a call that is done is done at one moment, whatever its caller does.

mod store;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::{Stream, StreamExt, stream};
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::codegen::{Service, http};
use tonic::{Request, Response, Status, Streaming};

pub use crate::connection::{Connection, of as of_channel};
use crate::wire::kv_server::{Kv, KvServer};
use crate::wire::lease_server::{Lease, LeaseServer};
use crate::wire::watch_request::RequestUnion;
use crate::wire::watch_server::{Watch, WatchServer};
use crate::wire::{
    CompactionRequest, CompactionResponse, Event, KeyValue, LeaseGrantRequest, LeaseGrantResponse,
    LeaseKeepAliveRequest, LeaseKeepAliveResponse, LeaseRevokeRequest, LeaseRevokeResponse, RangeRequest,
    RangeResponse, TxnRequest, TxnResponse, WatchCreateRequest, WatchRequest, WatchResponse,
};
use store::Store;

/// The time between two looks for leases that are over, as etcd has it.
const LOOK: Duration = Duration::from_millis(500);

/// What becomes of a call.
#[derive(Clone, Debug)]
pub enum Fate {
    Answered,
    /// It is not done, and this is the answer.
    Refused(Status),
    /// It is done, and this is the answer.
    Failed(Status),
    /// It is not done, and has no answer.
    Lost,
    /// It is done, and has no answer.
    Silent,
    /// It is done, and once more after this time. The first answer is given.
    Twice(Duration),
}

/// What becomes of a call, and when.
#[derive(Clone, Debug)]
pub struct Passage {
    /// The time before it is done.
    pub before: Duration,
    pub fate: Fate,
    /// The time before its answer.
    pub after: Duration,
}

/// The way between a client and etcd.
#[tonic::async_trait]
pub trait Way: Send + Sync + 'static {
    /// Decides what becomes of a call. `changes`: it is a transaction, or about a lease.
    fn passage(&self, changes: bool) -> Passage;

    /// Waits until the next message of a watch passes. An error ends the watch.
    async fn message(&self) -> Result<(), Status>;
}

/// A way without faults.
pub struct Clear;

#[tonic::async_trait]
impl Way for Clear {
    fn passage(&self, _changes: bool) -> Passage {
        Passage { before: Duration::ZERO, fate: Fate::Answered, after: Duration::ZERO }
    }

    async fn message(&self) -> Result<(), Status> {
        Ok(())
    }
}

/// The etcd. Copies share it.
#[derive(Clone)]
pub struct Double {
    store: Arc<Mutex<Store>>,
    /// Its revision.
    changed: Arc<watch::Sender<i64>>,
}

impl Default for Double {
    fn default() -> Self {
        Double { store: Arc::new(Mutex::new(Store::new())), changed: Arc::new(watch::Sender::new(1)) }
    }
}

impl Double {
    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with the store, and wakes watches.
    fn with<T>(&self, work: impl FnOnce(&mut Store) -> T) -> T {
        let mut store = self.store();
        let done = work(&mut store);
        let revision = store.revision;
        drop(store);
        self.changed.send_if_modified(|present| {
            let is_new = *present != revision;
            *present = revision;
            is_new
        });
        done
    }

    /// Ends leases when their time is over, until the task is aborted.
    pub async fn run(self) {
        loop {
            tokio::time::sleep(LOOK).await;
            self.with(|store| store.expire(Instant::now()));
        }
    }

    /// Makes a connection.
    pub fn connect(&self, way: Arc<dyn Way>) -> Connection {
        let member = Member { double: self.clone(), way };
        Connection::new(tower::service_fn(move |request: http::Request<tonic::body::Body>| {
            let member = member.clone();
            async move {
                let answer: Result<_, Infallible> = match request.uri().path().split('/').nth(1) {
                    Some("etcdserverpb.KV") => KvServer::new(member).call(request).await,
                    Some("etcdserverpb.Watch") => WatchServer::new(member).call(request).await,
                    _ => LeaseServer::new(member).call(request).await,
                };
                answer.map_err(|never| match never {})
            }
        }))
    }

    /// Returns the keys below a text now.
    pub fn below(&self, prefix: &str) -> Vec<KeyValue> {
        let request =
            RangeRequest { key: prefix.into(), range_end: end_of(prefix), ..RangeRequest::default() };
        self.store().range(&request).map(|found| found.kvs).unwrap_or_default()
    }

    /// Returns what has changed below a text from a revision on, the changes of each revision together.
    pub fn events(&self, prefix: &str, from: i64) -> Vec<(i64, Vec<Event>)> {
        self.store().events(prefix.as_bytes(), &end_of(prefix), from)
    }

    pub fn revision(&self) -> i64 {
        self.store().revision
    }

    pub fn leases(&self) -> Vec<i64> {
        self.store().leases()
    }

    /// Ends a lease early.
    pub fn end_lease(&self, lease: i64) {
        // It may have ended meanwhile.
        let _ = self.with(|store| store.revoke(lease));
    }

    /// Has transactions compare or not. An etcd that does not is broken.
    pub fn compares(&self, compares: bool) {
        self.with(|store| store.compares = compares);
    }

    /// Forgets the history up to now.
    pub fn compact(&self) {
        self.with(|store| {
            let revision = store.revision;
            // There may be nothing new to forget.
            let _ = store.compact(revision);
        });
    }
}

/// Returns the end of the range of the keys that begin with a text.
fn end_of(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

/// A connection's end at etcd.
#[derive(Clone)]
struct Member {
    double: Double,
    way: Arc<dyn Way>,
}

impl Member {
    /// Does a call as its passage says. It goes on when its caller has gone.
    async fn pass<T: Send + 'static>(
        &self,
        changes: bool,
        work: impl Fn(&mut Store) -> Result<T, Status> + Send + 'static,
    ) -> Result<Response<T>, Status> {
        let Passage { before, fate, after } = self.way.passage(changes);
        let double = self.double.clone();
        let done = async move {
            tokio::time::sleep(before).await;
            let answer = match fate {
                Fate::Answered => Some(double.with(&work)),
                Fate::Refused(status) => Some(Err(status)),
                Fate::Failed(status) => {
                    let _ = double.with(&work);
                    Some(Err(status))
                }
                Fate::Lost => None,
                Fate::Silent => {
                    let _ = double.with(&work);
                    None
                }
                Fate::Twice(later) => {
                    let answer = double.with(&work);
                    tokio::spawn(async move {
                        tokio::time::sleep(later).await;
                        let _ = double.with(&work);
                    });
                    Some(answer)
                }
            };
            tokio::time::sleep(after).await;
            answer
        };
        let answer = tokio::spawn(done).await.map_err(|error| Status::internal(error.to_string()))?;
        match answer {
            Some(answer) => answer.map(Response::new),
            None => std::future::pending().await,
        }
    }
}

#[tonic::async_trait]
impl Kv for Member {
    async fn range(&self, request: Request<RangeRequest>) -> Result<Response<RangeResponse>, Status> {
        let request = request.into_inner();
        self.pass(false, move |store| store.range(&request)).await
    }

    async fn txn(&self, request: Request<TxnRequest>) -> Result<Response<TxnResponse>, Status> {
        let request = request.into_inner();
        self.pass(true, move |store| store.txn(&request)).await
    }

    async fn compact(
        &self,
        request: Request<CompactionRequest>,
    ) -> Result<Response<CompactionResponse>, Status> {
        let revision = request.into_inner().revision;
        let work = move |store: &mut Store| {
            store.compact(revision)?;
            Ok(CompactionResponse { header: store.header() })
        };
        self.pass(true, work).await
    }
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Lease for Member {
    type LeaseKeepAliveStream = Answers<LeaseKeepAliveResponse>;

    async fn lease_grant(
        &self,
        request: Request<LeaseGrantRequest>,
    ) -> Result<Response<LeaseGrantResponse>, Status> {
        let LeaseGrantRequest { ttl, id } = request.into_inner();
        let work = move |store: &mut Store| {
            let (id, ttl) = store.grant(id, ttl, Instant::now())?;
            Ok(LeaseGrantResponse { header: store.header(), id, ttl, error: String::new() })
        };
        self.pass(true, work).await
    }

    async fn lease_revoke(
        &self,
        request: Request<LeaseRevokeRequest>,
    ) -> Result<Response<LeaseRevokeResponse>, Status> {
        let id = request.into_inner().id;
        let work = move |store: &mut Store| {
            store.revoke(id)?;
            Ok(LeaseRevokeResponse { header: store.header() })
        };
        self.pass(true, work).await
    }

    async fn lease_keep_alive(
        &self,
        request: Request<Streaming<LeaseKeepAliveRequest>>,
    ) -> Result<Response<Self::LeaseKeepAliveStream>, Status> {
        let state = (request.into_inner(), self.clone());
        let answers = stream::unfold(state, |(mut requests, member)| async move {
            let id = requests.message().await.ok()??.id;
            let work = move |store: &mut Store| {
                let ttl = store.keep(id, Instant::now());
                Ok(LeaseKeepAliveResponse { header: store.header(), id, ttl })
            };
            let answer = member.pass(true, work).await.map(Response::into_inner);
            Some((answer, (requests, member)))
        });
        Ok(Response::new(answers.boxed()))
    }
}

/// A watch that is open.
struct Watching {
    member: Member,
    create: WatchCreateRequest,
    changed: watch::Receiver<i64>,
    /// The first revision whose events are to come.
    next: i64,
    /// Whether it has looked for events before.
    goes_on: bool,
    /// Answers that are ready.
    ready: VecDeque<WatchResponse>,
    is_over: bool,
}

impl Watching {
    /// Returns the next message. `None`: the watch is over.
    async fn message(&mut self) -> Option<Result<WatchResponse, Status>> {
        if self.is_over {
            return None;
        }
        let answer = match self.ready.pop_front() {
            Some(first) => first,
            None => self.events().await,
        };
        if let Err(status) = self.member.way.message().await {
            self.is_over = true;
            return Some(Err(status));
        }
        self.is_over = answer.canceled;
        Some(Ok(answer))
    }

    async fn events(&mut self) -> WatchResponse {
        loop {
            self.changed.borrow_and_update();
            {
                let store = self.member.double.store();
                let header = store.header();
                if self.next < store.compacted {
                    let compact_revision = store.compacted;
                    return WatchResponse { header, canceled: true, compact_revision, ..Default::default() };
                }
                let (key, end) = (&self.create.key, &self.create.range_end);
                let found = match std::mem::replace(&mut self.goes_on, true) {
                    true => store.events(key, end, self.next),
                    false => store.events_left(key, end, self.next),
                };
                self.next = self.next.max(store.revision + 1);
                let answer = |(_, events): (i64, Vec<Event>)| WatchResponse {
                    header,
                    events,
                    ..WatchResponse::default()
                };
                self.ready.extend(found.into_iter().map(answer));
            }
            if let Some(answer) = self.ready.pop_front() {
                return answer;
            }
            if self.changed.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

#[tonic::async_trait]
impl Watch for Member {
    type WatchStream = Answers<WatchResponse>;

    async fn watch(
        &self,
        request: Request<Streaming<WatchRequest>>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let mut requests = request.into_inner();
        let first = requests.message().await?.and_then(|request| request.request_union);
        let Some(RequestUnion::CreateRequest(create)) = first else {
            return Err(Status::invalid_argument("the first request makes no watch"));
        };
        let (header, now) = {
            let store = self.double.store();
            (store.header(), store.revision)
        };
        let next = if create.start_revision > 0 { create.start_revision } else { now + 1 };
        let created = WatchResponse { header, created: true, ..WatchResponse::default() };
        let watching = Watching {
            member: self.clone(),
            create,
            changed: self.double.changed.subscribe(),
            next,
            goes_on: false,
            ready: VecDeque::from([created]),
            is_over: false,
        };
        // A client that says no more ends its watch.
        let answers = stream::unfold((watching, requests), |(mut watching, mut requests)| async move {
            let message = tokio::select! {
                biased;
                message = watching.message() => message?,
                _ = requests.message() => return None,
            };
            Some((message, (watching, requests)))
        });
        Ok(Response::new(answers.boxed()))
    }
}
