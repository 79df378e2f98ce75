//! Calls of etcd, each at one member after the other until one decides it.

use std::future::Future;
use std::time::Duration;

use csid::plugin::code_name;
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::FuturesUnordered;
use futures_util::{StreamExt, stream};
use tokio::time::Instant;
use tokio::time::error::Elapsed;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::connection::Connection;
use crate::error::EtcdError;
use crate::history::History;
use crate::members::{EtcdConfig, Members, Timing};
use crate::observe::Observer;
use crate::reply::Reply;
use crate::wire::kv_client::KvClient;
use crate::wire::lease_client::LeaseClient;
use crate::wire::request_op::Request as Operation;
use crate::wire::watch_client::WatchClient;
use crate::wire::watch_request::RequestUnion;
use crate::wire::{
    Event, KeyValue, LeaseGrantRequest, LeaseKeepAliveRequest, LeaseRevokeRequest, RangeRequest,
    RangeResponse, RequestOp, ResponseHeader, TxnRequest, TxnResponse, WatchCreateRequest, WatchRequest,
    WatchResponse,
};

const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LAST_PAUSE: Duration = Duration::from_millis(500);
/// How long members are waited for before one more is asked, where a call may be made twice.
const ONE_MORE: Duration = Duration::from_secs(1);
/// The same where it may not.
const NEVER: Duration = Duration::MAX;

pub(crate) struct Client {
    members: Members,
    pub timing: Timing,
    pub observer: Observer,
    pub history: History,
}

/// The answer to a transaction.
pub(crate) enum Decided {
    /// This try of it was committed.
    Committed { revision: u64 },
    /// A comparison failed.
    Compared {
        answers: TxnResponse,
        /// Whether an earlier try may have been committed.
        open: bool,
    },
    /// The database is full. Without an open try nothing but this try itself may have been committed.
    Full { open: bool },
}

/// The keys of a range at a revision.
pub(crate) struct Found {
    pub kvs: Vec<KeyValue>,
    pub more: bool,
    /// The revision of etcd at the read.
    pub revision: u64,
}

impl Client {
    pub fn new(config: &EtcdConfig) -> Result<Self, EtcdError> {
        Ok(Client::of(Members::new(config)?, config.timing))
    }

    /// Asks members at connections that are there.
    #[cfg(feature = "double")]
    pub fn at(connections: Vec<Connection>, timing: Timing) -> Self {
        Client::of(Members::at(connections), timing)
    }

    fn of(members: Members, timing: Timing) -> Self {
        Client { members, timing, observer: Observer::default(), history: History::default() }
    }

    /// Reads keys. The answer is linearizable: it has every change that was answered before the call. If the request has a
    /// revision, the keys are those of that revision.
    pub async fn range(&self, step: &'static str, request: RangeRequest) -> Result<Found, EtcdError> {
        self.read(Tries::new(step, self), request).await
    }

    /// Reads a page of many keys, as [`Client::range`] does.
    pub async fn page(&self, step: &'static str, request: RangeRequest) -> Result<Found, EtcdError> {
        self.read(Tries { first: self.timing.answer, ..Tries::new(step, self) }, request).await
    }

    async fn read(&self, mut tries: Tries<'_>, request: RangeRequest) -> Result<Found, EtcdError> {
        let revision = u64::try_from(request.revision).unwrap_or(0);
        loop {
            let before = self.history.revision();
            let (at, reply) = tries.call(revision, async |mut kv| kv.range(request.clone()).await).await;
            match reply {
                Ok(RangeResponse { header, kvs, more, .. }) => {
                    self.history.see(before, header.as_ref())?;
                    return Ok(Found { kvs, more, revision: revision_of(header.as_ref()) });
                }
                Err(Reply::Refused(error)) => return Err(error),
                Err(Reply::NoSpace) => tries.next(at, "the database has reached its quota".into()).await?,
                Err(Reply::NotDone(why) | Reply::Unknown(why)) => tries.next(at, why).await?,
            }
        }
    }

    /// Sends a transaction until etcd commits or refuses it. After an unknown outcome the next member gets the same transaction.
    /// etcd commits it at most once, because its comparisons fail after that.
    pub async fn txn(&self, step: &'static str, txn: &TxnRequest) -> Result<Decided, EtcdError> {
        let begun = Instant::now();
        let decided = self.decide(step, txn).await;
        let result = match &decided {
            Ok(Decided::Committed { .. }) => "committed",
            Ok(Decided::Compared { .. }) => "compared",
            Ok(Decided::Full { .. }) => "full",
            Err(_) => "failed",
        };
        self.observer.report(|observe| observe.transaction(result, begun.elapsed()));
        decided
    }

    async fn decide(&self, step: &'static str, txn: &TxnRequest) -> Result<Decided, EtcdError> {
        let mut tries = Tries::new(step, self);
        let mut open = false;
        let is_read = |operation: &RequestOp| matches!(operation.request, Some(Operation::RequestRange(_)));
        let writes = !txn.success.iter().all(is_read);
        loop {
            let (before, begun) = (self.history.revision(), Instant::now());
            let (at, reply) = tries.call(0, async |mut kv| kv.txn(txn.clone()).await).await;
            if let Ok(answer) = &reply {
                self.history.see(before, answer.header.as_ref())?;
                // A slow disk makes writes late, and reads are fast.
                if writes && begun.elapsed() < self.timing.first_answer {
                    self.members.set_slow(false);
                }
            }
            match reply {
                Ok(TxnResponse { succeeded: true, header, .. }) => {
                    return Ok(Decided::Committed { revision: revision_of(header.as_ref()) });
                }
                Ok(answers) => return Ok(Decided::Compared { answers, open }),
                Err(Reply::NoSpace) => return Ok(Decided::Full { open }),
                // What etcd would refuse now it may have done before.
                Err(Reply::Refused(error)) if !open => return Err(error),
                Err(Reply::Refused(error)) => tries.next(at, error.to_string()).await?,
                Err(Reply::NotDone(why)) => tries.next(at, why).await?,
                Err(Reply::Unknown(why)) => {
                    open = true;
                    tries.next(at, why).await?;
                }
            }
        }
    }

    /// Takes a lease. A try whose answer is lost leaves a lease that ends by itself.
    pub async fn grant_lease(&self, seconds: i64) -> Result<i64, EtcdError> {
        let granted = self
            .lease("take a lease", NEVER, async |mut client| {
                client.lease_grant(LeaseGrantRequest { ttl: seconds, id: 0 }).await
            })
            .await?;
        granted.map(|granted| granted.id).ok_or(EtcdError::Open { why: "etcd knows no leases" })
    }

    /// Renews a lease. Returns `false` if etcd has ended it. One more member is asked after each second without an answer.
    pub async fn keep_lease(&self, lease: i64) -> Result<bool, EtcdError> {
        let kept = self
            .lease("renew a lease", ONE_MORE, async |mut client| {
                let request = stream::once(async move { LeaseKeepAliveRequest { id: lease } });
                // The member ends the stream when this side does, so that waits for the answer.
                let request = request.chain(stream::pending());
                let mut answers = client.lease_keep_alive(request).await?.into_inner();
                let first = answers.next().await;
                first.unwrap_or_else(|| Err(Status::unavailable("the stream ended"))).map(Response::new)
            })
            .await?;
        Ok(kept.is_some_and(|kept| kept.ttl > 0))
    }

    /// Ends a lease. One that has ended already is no error.
    pub async fn revoke_lease(&self, lease: i64) -> Result<(), EtcdError> {
        let revoke = async |mut client: LeaseClient<Connection>| {
            client.lease_revoke(LeaseRevokeRequest { id: lease }).await
        };
        self.lease("end a lease", NEVER, revoke).await.map(drop)
    }

    /// Makes a call about a lease until a member answers. `None`: etcd does not have the lease. `alone`: as in [`Asking`].
    async fn lease<T, F>(
        &self,
        step: &'static str,
        alone: Duration,
        call: impl Fn(LeaseClient<Connection>) -> F,
    ) -> Result<Option<T>, EtcdError>
    where
        F: Future<Output = Result<Response<T>, Status>> + Send,
    {
        let mut tries = Tries::new(step, self);
        let mut asking = Asking::new(self, alone, |channel| call(LeaseClient::new(channel)));
        loop {
            let (at, answer) = asking.next().await;
            let endpoint = &self.members.member(at).endpoint;
            let why = match answer {
                Ok(Ok(answer)) => {
                    asking.is_answered_by(at);
                    return Ok(Some(answer.into_inner()));
                }
                Ok(Err(status)) if status.code() == Code::NotFound => return Ok(None),
                Ok(Err(status)) => match tries.reply(endpoint, 0, &status) {
                    Reply::Refused(error) => return Err(error),
                    Reply::NotDone(why) | Reply::Unknown(why) => why,
                    Reply::NoSpace => return Err(EtcdError::Full),
                },
                Err(_) => tries.silent(endpoint, self.timing.answer),
            };
            tries.next(at, why).await?;
        }
    }

    /// Watches keys from a revision on. One more member is asked after each second without an answer. The first that takes the watch has it.
    pub async fn watch(&self, key: Vec<u8>, range_end: Vec<u8>, from: u64) -> Result<Watch, EtcdError> {
        let step = "watch keys";
        let mut tries = Tries::new(step, self);
        // etcd refuses a watch from before the compacted revision, and has no deletions of that revision itself. So the watch begins one earlier.
        let first = from.saturating_sub(1).max(1);
        let create =
            WatchCreateRequest { key, range_end, start_revision: i64::try_from(first).unwrap_or(i64::MAX) };
        let mut asking = Asking::new(self, ONE_MORE, |channel| open(channel, create.clone()));
        loop {
            let (at, opened) = asking.next().await;
            let endpoint = &self.members.member(at).endpoint;
            let why = match opened {
                Ok(Ok((answers, first))) if first.created && !first.canceled => {
                    asking.is_answered_by(at);
                    return Ok(Watch { answers, first: Some(first), from, member: at });
                }
                Ok(Ok((_, first))) => match compacted(&first) {
                    true => return Err(EtcdError::Compacted { revision: from }),
                    false => format!("{endpoint}: {}", first.cancel_reason),
                },
                Ok(Err(status)) => match tries.reply(endpoint, from, &status) {
                    Reply::Refused(error) => return Err(error),
                    Reply::NotDone(why) | Reply::Unknown(why) => why,
                    Reply::NoSpace => "the database has reached its quota".into(),
                },
                Err(_) => tries.silent(endpoint, self.timing.answer),
            };
            tries.next(at, why).await?;
        }
    }

    /// Turns from the member of a watch that has ended to the next one.
    pub fn leave(&self, watch: &Watch) {
        self.members.leave(watch.member);
    }
}

/// A member's answer, or the end of its time.
type Answered<T> = Result<Result<T, Status>, Elapsed>;

/// A call that is made at one member after the other. A member that has been asked may answer later, as long as its time lasts.
struct Asking<'a, T, C> {
    members: &'a Members,
    call: C,
    /// How long each member has to answer.
    time: Duration,
    /// How long the members that were asked are waited for before one more is asked.
    alone: Duration,
    /// The place of the member that was asked first, and that of the next one.
    first: usize,
    next: usize,
    asked: FuturesUnordered<BoxFuture<'a, (usize, Answered<T>)>>,
}

impl<'a, T, F, C> Asking<'a, T, C>
where
    F: Future<Output = Result<T, Status>> + Send + 'a,
    C: Fn(Connection) -> F,
{
    fn new(client: &'a Client, alone: Duration, call: C) -> Self {
        let (members, time) = (&client.members, client.timing.answer);
        let (first, _) = members.current();
        Asking { members, call, time, alone, first, next: first, asked: FuturesUnordered::new() }
    }

    /// Asks the next member, and perhaps more. Returns the place and the answer of the first one that has answered, or whose time is over.
    async fn next(&mut self) -> (usize, Answered<T>) {
        loop {
            let at = self.next;
            self.next = (at + 1) % self.members.count();
            let answer =
                tokio::time::timeout(self.time, (self.call)(self.members.member(at).channel.clone()));
            self.asked.push(async move { (at, answer.await) }.boxed());
            if let Ok(Some(answered)) = tokio::time::timeout(self.alone, self.asked.next()).await {
                return answered;
            }
        }
    }

    /// Has other requests ask the member at `at`, which has answered when others have not.
    fn is_answered_by(&self, at: usize) {
        if at != self.first {
            self.members.turn_to(at);
        }
    }
}

/// The tries of one request.
struct Tries<'a> {
    step: &'static str,
    members: &'a Members,
    timing: Timing,
    observer: &'a Observer,
    begun: Instant,
    /// How long each member has to answer when it is asked first.
    first: Duration,
    /// Whether a member has not answered in time.
    is_silent: bool,
    failed: usize,
    pause: Duration,
}

impl<'a> Tries<'a> {
    fn new(step: &'static str, client: &'a Client) -> Self {
        let Client { members, timing, observer, .. } = client;
        Tries {
            step,
            members,
            timing: *timing,
            observer,
            begun: Instant::now(),
            first: timing.first_answer,
            is_silent: false,
            failed: 0,
            pause: FIRST_PAUSE,
        }
    }

    /// Classifies an error of a member.
    fn reply(&self, endpoint: &str, revision: u64, status: &Status) -> Reply {
        self.observer.report(|observe| observe.failed(code_name(status.code())));
        Reply::of(self.step, endpoint, revision, status)
    }

    /// Describes a member that has not answered in time.
    fn silent(&self, endpoint: &str, time: Duration) -> String {
        self.observer.report(|observe| observe.failed("TIMEOUT"));
        format!("{endpoint}: no answer for {} ms", time.as_millis())
    }

    /// Returns how long the current member has to answer.
    fn time(&self) -> Duration {
        match self.members.are_slow() || self.failed >= self.members.count() {
            true => self.timing.answer,
            false => self.first,
        }
    }

    /// Calls the current member once. Returns the member's place with its reply.
    async fn call<T, F>(
        &mut self,
        revision: u64,
        call: impl FnOnce(KvClient<Connection>) -> F,
    ) -> (usize, Result<T, Reply>)
    where
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let (at, member) = self.members.current();
        // Values of many keys are more than tonic takes by itself.
        let client = KvClient::new(member.channel.clone()).max_decoding_message_size(usize::MAX);
        let time = self.time();
        let reply = match tokio::time::timeout(time, call(client)).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(self.reply(&member.endpoint, revision, &status)),
            Err(_) => {
                self.is_silent = true;
                Err(Reply::Unknown(self.silent(&member.endpoint, time)))
            }
        };
        (at, reply)
    }

    /// Turns to the next member, after a pause when each has been asked.
    async fn next(&mut self, at: usize, why: String) -> Result<(), EtcdError> {
        self.members.leave(at);
        self.failed += 1;
        let waited = self.begun.elapsed();
        if waited >= self.timing.request {
            return Err(EtcdError::Unreachable { step: self.step, waited, last: why });
        }
        tracing::debug!(step = self.step, why, "etcd did not answer; the next member is asked");
        if self.failed.is_multiple_of(self.members.count()) {
            if self.is_silent {
                self.members.set_slow(true);
            }
            tokio::time::sleep(self.pause).await;
            self.pause = (self.pause * 2).min(LAST_PAUSE);
        }
        Ok(())
    }
}

/// A watch that etcd has taken.
pub(crate) struct Watch {
    answers: Streaming<WatchResponse>,
    first: Option<WatchResponse>,
    from: u64,
    member: usize,
}

impl Watch {
    /// Returns the next events, all of each revision together. `None`: the watch has ended, and may be taken up again.
    pub async fn next(&mut self) -> Result<Option<Vec<Event>>, EtcdError> {
        loop {
            let answer = match self.first.take() {
                Some(first) => first,
                None => match self.answers.next().await {
                    Some(Ok(answer)) => answer,
                    Some(Err(status)) => {
                        tracing::debug!(%status, "a watch of etcd has ended");
                        return Ok(None);
                    }
                    None => return Ok(None),
                },
            };
            if compacted(&answer) {
                return Err(EtcdError::Compacted { revision: self.from });
            }
            if answer.canceled {
                return Ok(None);
            }
            let events = since(self.from, answer.events);
            if !events.is_empty() {
                return Ok(Some(events));
            }
        }
    }
}

async fn open(
    channel: Connection,
    create: WatchCreateRequest,
) -> Result<(Streaming<WatchResponse>, WatchResponse), Status> {
    let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    // The watch ends when this side has said all.
    let mut request = Request::new(stream::once(async { create }).chain(stream::pending()));
    // A member that has no leader ends the watch.
    request.metadata_mut().insert("hasleader", "true".parse().map_err(|_| Status::internal("metadata"))?);
    let mut client = WatchClient::new(channel).max_decoding_message_size(usize::MAX);
    let mut answers = client.watch(request).await?.into_inner();
    let first = answers.next().await.unwrap_or_else(|| Err(Status::unavailable("the watch ended")))?;
    Ok((answers, first))
}

/// Returns the events at a revision or later. A member that is behind the revision of a watch begins the watch at its own.
fn since(from: u64, mut events: Vec<Event>) -> Vec<Event> {
    events.retain(|event| {
        event.kv.as_ref().is_some_and(|kv| u64::try_from(kv.mod_revision).is_ok_and(|at| at >= from))
    });
    events
}

fn compacted(answer: &WatchResponse) -> bool {
    answer.canceled && answer.compact_revision > 0
}

fn revision_of(header: Option<&ResponseHeader>) -> u64 {
    header.and_then(|header| u64::try_from(header.revision).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_before_the_watch_begins_are_dropped() {
        let event = |mod_revision| Event {
            kv: Some(KeyValue { mod_revision, ..KeyValue::default() }),
            ..Event::default()
        };
        let left = since(7, vec![event(5), event(6), event(7), event(9)]);
        assert_eq!(left, [event(7), event(9)]);
        assert!(since(7, vec![event(6)]).is_empty());
    }
}
