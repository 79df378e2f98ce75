//! The calls of the contract. Each finds out who calls, and makes one call inward.

use std::sync::Arc;
use std::time::Duration;

use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::cluster_server::Cluster as Calls;
use csi_proto::cluster::v1::from_node::Is as From;
use csi_proto::cluster::v1::to_node::Is as To;
use csi_proto::cluster::v1::{
    Accepted, CallName, ChangeAsk, ClaimAsk, ClaimPage, Drained, Explanation, FromNode, Granted, Held,
    HeldClaims, Hello, InventoryAsk, InventoryPage, ListAsk, NodeExpanded, Owed, Plugins, ReleaseAsk,
    Released, ToNode, VolumeAsk, VolumePage, VolumeRow, Withdrawn,
};
use csi_proto::identity::{Identity, Role};
use csid::error::shortened;
use csid::{Error, Kind};
use csid_etcd::EtcdError;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Extensions, Request, Response, Status, Streaming};

use crate::cluster::Cluster;
use crate::drain::BETWEEN_REPORTS;
use crate::drive::Driving;
use crate::edges::{self, Edge};
use crate::failure::{Result, ServerError};
use crate::join::{Joined, Joining};
use crate::lists::Page;
use crate::places::{HeldPlace, Kept, Places};
use crate::sessions::{Entered, Outgoing, Sessions, WAITING};
use crate::stream::{self, Answers};

/// How long a node has for its Hello.
const HELLO: Duration = Duration::from_secs(10);
/// The least time between two reports of a node: each is a change of etcd.
const BETWEEN: Duration = Duration::from_millis(200);

/// The pause after a report that etcd has refused because its database is full.
const AGAIN: Duration = Duration::from_secs(3);

/// What a session ends with.
type End = ServerError;

#[derive(Clone)]
pub struct Service {
    pub cluster: Arc<Cluster>,
    pub sessions: Arc<Sessions>,
    pub driving: Arc<Driving>,
    pub places: Arc<Places>,
}

#[tonic::async_trait]
impl Calls for Service {
    type SessionStream = Answers<ToNode>;
    type VolumesStream = Answers<VolumePage>;
    type ClaimsStream = Answers<ClaimPage>;

    async fn session(
        &self,
        request: Request<Streaming<FromNode>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let caller = self.cluster.caller(&request)?;
        self.cluster.require_node(&caller)?;
        self.cluster.may_still_join(&caller, request.extensions())?;
        let place = self.places.enter(&caller, Kept::Session)?;
        self.places.hello(&caller)?;
        let (sender, receiver) = mpsc::channel(WAITING);
        let service = self.clone();
        let (_, extensions, incoming) = request.into_parts();
        tokio::spawn(async move { service.run(&caller, &extensions, incoming, sender, place).await });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn claim(&self, request: Request<ClaimAsk>) -> Result<Response<Granted>, Status> {
        let caller = self.cluster.caller(&request)?;
        let has_session = caller.role == Role::Node && self.sessions.has(&caller.name);
        let claimed = self.cluster.claim(&self.driving, &caller, request.into_inner(), has_session);
        answered(Edge::AnswerClaim, claimed).await
    }

    async fn withdraw(&self, request: Request<CallName>) -> Result<Response<Withdrawn>, Status> {
        let caller = self.cluster.caller(&request)?;
        answered(Edge::AnswerWithdraw, self.cluster.withdraw(&caller, request.into_inner())).await
    }

    async fn detached(&self, request: Request<Owed>) -> Result<Response<Accepted>, Status> {
        let caller = self.cluster.caller(&request)?;
        let detached = self.cluster.detached(&self.driving, &caller, request.into_inner());
        answered(Edge::AnswerDetached, detached).await
    }

    async fn hold(&self, request: Request<HeldClaims>) -> Result<Response<Held>, Status> {
        let caller = self.cluster.caller(&request)?;
        answered(Edge::AnswerHold, self.cluster.hold(&caller, request.into_inner())).await
    }

    async fn expanded(&self, request: Request<NodeExpanded>) -> Result<Response<Accepted>, Status> {
        let caller = self.cluster.caller(&request)?;
        Ok(Response::new(self.cluster.expanded(&caller, request.into_inner()).await?))
    }

    async fn release(&self, request: Request<ReleaseAsk>) -> Result<Response<Released>, Status> {
        let caller = self.cluster.caller(&request)?;
        let released = self.cluster.release(&caller, request.into_inner());
        self.answer_change(Edge::AnswerRelease, &caller, released).await
    }

    async fn change(&self, request: Request<ChangeAsk>) -> Result<Response<VolumeRow>, Status> {
        let caller = self.cluster.caller(&request)?;
        let changed = self.change_of(&caller, request.into_inner());
        self.answer_change(Edge::AnswerChange, &caller, changed).await
    }

    async fn volume(&self, request: Request<VolumeAsk>) -> Result<Response<VolumeRow>, Status> {
        let caller = self.cluster.caller(&request)?;
        Ok(Response::new(self.cluster.volume(&caller, request.into_inner()).await?))
    }

    async fn volumes(&self, request: Request<ListAsk>) -> Result<Response<Self::VolumesStream>, Status> {
        let caller = self.cluster.caller(&request)?;
        self.list(caller, request.into_inner())
    }

    async fn claims(&self, request: Request<ListAsk>) -> Result<Response<Self::ClaimsStream>, Status> {
        let caller = self.cluster.caller(&request)?;
        self.list(caller, request.into_inner())
    }

    async fn inventory(&self, request: Request<InventoryAsk>) -> Result<Response<InventoryPage>, Status> {
        let caller = self.cluster.caller(&request)?;
        Ok(Response::new(self.ask_inventory(&caller, request.into_inner()).await?))
    }

    async fn explain(&self, request: Request<VolumeAsk>) -> Result<Response<Explanation>, Status> {
        let caller = self.cluster.caller(&request)?;
        // It reads the rows of many nodes.
        let _place = self.places.enter(&caller, Kept::List)?;
        Ok(Response::new(self.cluster.explain(&caller, request.into_inner()).await?))
    }
}

/// Answers a call that changes something, between two edges.
pub(crate) async fn answered<T>(
    edge: Edge,
    f: impl Future<Output = Result<T>>,
) -> Result<Response<T>, Status> {
    // The futures of some calls are large, and would be on the stack several times.
    Ok(Response::new(edges::around(edge, Box::pin(f)).await?))
}

/// The last reports of a session that etcd has refused because its database is full. A node sends each report once.
#[derive(Default)]
struct Unwritten {
    plugins: Option<Plugins>,
    drained: Option<Drained>,
}

impl Unwritten {
    fn is_empty(&self) -> bool {
        self.plugins.is_none() && self.drained.is_none()
    }

    /// Takes a report out, as the node's message.
    fn next(&mut self) -> FromNode {
        let plugins = self.plugins.take().map(From::Plugins);
        FromNode { is: plugins.or_else(|| self.drained.take().map(From::Drained)) }
    }
}

impl Service {
    /// Answers a change of a volume or of a claim. An operator learns from `Unavailable` that nothing was done, so this server has to follow etcd
    /// when the call begins. The answer does not wait for etcd when this server does not follow it any more.
    async fn answer_change<T>(
        &self,
        edge: Edge,
        caller: &Identity,
        change: impl Future<Output = Result<T>>,
    ) -> Result<Response<T>, Status> {
        if caller.role != Role::Operator {
            return answered(edge, change).await;
        }
        self.cluster.presence.here()?;
        let change = self.cluster.while_here(change);
        answered(edge, async { change.await.map_err(ServerError::of_a_change) }).await
    }

    /// Makes a change of a volume.
    async fn change_of(&self, caller: &Identity, ask: ChangeAsk) -> Result<VolumeRow> {
        match ask.what {
            Some(What::Register(register)) => self.register(caller, register).await,
            Some(What::Snapshot(snapshot)) => self.cluster.snapshot(caller, snapshot).await,
            Some(What::DeleteSnapshot(delete)) => self.delete_snapshot(caller, delete).await,
            Some(What::Validate(validate)) => self.validate(caller, validate).await,
            Some(What::Create(create)) => self.cluster.create(caller, create).await,
            Some(What::CreateFrom(create)) => self.create_from(caller, create).await,
            Some(What::Delete(delete)) => self.cluster.delete(caller, delete).await,
            Some(What::Expand(expand)) => self.cluster.expand(caller, expand).await,
            Some(What::Attach(attach)) => self.cluster.attach(caller, attach).await,
            Some(What::Detach(detach)) => self.cluster.detach(caller, detach).await,
            Some(What::Own(own)) => self.cluster.own(caller, own).await,
            Some(What::Deregister(deregister)) => self.cluster.deregister(caller, deregister).await,
            None => {
                let error = match caller.role {
                    Role::Server => ServerError::denied(format!("{caller} changes no volumes")),
                    _ => Error::new(Kind::NotSupported, "this server does not know the change").into(),
                };
                Err(error)
            }
        }
    }

    /// Sends a list in pages.
    fn list<P: Page>(&self, caller: Identity, ask: ListAsk) -> Result<Response<Answers<P>>, Status> {
        let mut list = self.cluster.list_of(&caller, ask)?;
        let place = self.places.enter(&caller, Kept::List)?;
        let cluster = self.cluster.clone();
        let (mut sender, answers) = stream::open(1);
        tokio::spawn(async move {
            let _place = place;
            loop {
                let (pages, has_more) = match P::read(&cluster, &caller, &mut list).await {
                    Ok(read) => read,
                    Err(error) => {
                        sender.send(Err(error.into())).await;
                        return;
                    }
                };
                for page in pages {
                    if !sender.send(Ok(page)).await {
                        return;
                    }
                }
                if !has_more {
                    return;
                }
            }
        });
        Ok(Response::new(answers))
    }

    /// Ends a node's session with this server, if the node may have none. Other servers look at the nodes' rows every few seconds.
    pub async fn end_if_over(&self, node: &str) {
        let number = self.sessions.nodes().into_iter().find(|(of, _)| of == node).map(|(_, number)| number);
        if let Some(number) = number {
            end_if_over(&self.cluster, &self.sessions, node, number).await;
        }
    }

    /// Keeps what a node reports of its plugins.
    async fn report(&self, node: &str, boot: &str, plugins: Plugins) -> Result<()> {
        self.cluster.report(node, boot, plugins.clone()).await?;
        self.cluster.keep_controllers(node, &plugins).await
    }

    /// Runs a session to its end, and says why it ended.
    async fn run(
        &self,
        caller: &Identity,
        extensions: &Extensions,
        mut incoming: Streaming<FromNode>,
        sender: mpsc::Sender<Outgoing>,
        place: HeldPlace,
    ) {
        let node = &caller.name;
        let hello = match hello(&mut incoming).await {
            Ok(hello) => hello,
            Err(error) => return drop(sender.try_send(Err(error.into()))),
        };
        let mut under_way = self.cluster.joins.begin(node);
        let (welcome, joining) = match self.cluster.join(caller, &hello, &mut under_way).await {
            Ok(Joined::Welcome(welcome, joining)) => (ToNode { is: Some(To::Welcome(*welcome)) }, joining),
            Ok(Joined::Refused(refused)) => {
                self.cluster.metrics.refused_hello(&refused.reason);
                tracing::warn!(node, reason = refused.reason, "a node was refused: {}", refused.message);
                return drop(sender.try_send(Ok(ToNode { is: Some(To::Refused(refused)) })));
            }
            Err(error) => return drop(sender.try_send(Err(error.into()))),
        };
        tracing::info!(node, version = hello.version, "a node has joined");
        // A node that has its Welcome may claim, so the session is entered first.
        let entered = self.sessions.enter(node, joining.revision, sender.clone(), welcome);
        drop(under_way);
        // A reload may have come since the call began. A later one finds the session.
        let end = match self.cluster.may_still_join(caller, extensions) {
            Ok(()) => self.serve(node, &hello.boot, &mut incoming, &sender, &joining, entered).await,
            Err(error) => Some(error),
        };
        match &end {
            Some(end) => tracing::info!(node, "a node's session has ended: {end}"),
            None => tracing::info!(node, "a node has ended its session"),
        }
        if let Some(end) = end {
            let _ = sender.try_send(Err(end.into()));
        }
        drop(sender);
        // Without etcd the row stays for a while, and the node joins elsewhere.
        drop(place);
        if let Err(error) = self.cluster.part(node, &joining).await {
            // It is tried again every few seconds.
            tracing::debug!(node, %error, "the row of a session was not removed");
        }
    }

    /// Serves a session. Returns why it ended. `None`: the node has ended it.
    async fn serve(
        &self,
        node: &str,
        boot: &str,
        incoming: &mut Streaming<FromNode>,
        sender: &mpsc::Sender<Outgoing>,
        joining: &Joining,
        mut entered: Entered<'_>,
    ) -> Option<End> {
        let mut presence = self.cluster.presence.subscribe();
        let is_over = |here: &Option<crate::presence::Here>| here.as_ref() != Some(&joining.here);
        let (mut unwritten, mut again) = (Unwritten::default(), Instant::now());
        loop {
            let message = tokio::select! {
                biased;
                over = &mut entered.over => {
                    let replaced = || format!("node {node} has another session with this server");
                    return Some(over.unwrap_or_else(|_| ServerError::Unavailable(replaced())));
                }
                _ = presence.wait_for(is_over) => return Some(self.cluster.presence.cut_off()),
                () = self.cluster.left(&joining.phase) => {
                    let text = "the cluster has begun or ended a recovery: a node joins once more";
                    return Some(ServerError::Unavailable(text.into()));
                }
                () = sender.closed() => return None,
                () = tokio::time::sleep_until(again), if !unwritten.is_empty() => Ok(Some(unwritten.next())),
                message = incoming.message() => message,
            };
            match message {
                Ok(Some(FromNode { is: Some(From::Plugins(plugins)) })) => {
                    let controllers = self.cluster.controllers_of(node, &plugins);
                    let reported = tokio::select! {
                        biased;
                        reported = self.report(node, boot, plugins.clone()) => reported,
                        // Without etcd a report waits for longer than a session may go on.
                        _ = presence.wait_for(is_over) => Err(self.cluster.presence.cut_off()),
                    };
                    // A later report says all that an earlier one has said.
                    unwritten.plugins = None;
                    match reported {
                        // A controller is called when etcd knows that its plugin has one.
                        Ok(()) if self.sessions.set_controllers(&entered, controllers) => {
                            self.driving.has_controller();
                        }
                        Ok(()) => {}
                        Err(ServerError::Etcd(EtcdError::Full)) => {
                            (unwritten.plugins, again) = (Some(plugins), Instant::now() + AGAIN);
                        }
                        Err(error) => return Some(error),
                    }
                    tokio::time::sleep(BETWEEN).await;
                }
                Ok(Some(FromNode { is: Some(From::Ended(ended)) })) => {
                    let (call, epoch) = (ended.call.clone(), ended.epoch);
                    if !self.sessions.end_call(&entered, ended) {
                        tracing::warn!(node, call = %shortened(&call), epoch, "the end of no call that waits came");
                        tokio::time::sleep(BETWEEN).await;
                    }
                }
                Ok(Some(FromNode { is: Some(From::Drained(drained)) })) => {
                    let kept = tokio::select! {
                        biased;
                        kept = self.cluster.keep_drained(node, boot, drained.clone()) => kept,
                        _ = presence.wait_for(is_over) => Err(self.cluster.presence.cut_off()),
                    };
                    unwritten.drained = None;
                    match kept {
                        Ok(()) => {}
                        Err(ServerError::Etcd(EtcdError::Full)) => {
                            (unwritten.drained, again) = (Some(drained), Instant::now() + AGAIN);
                        }
                        Err(error) => return Some(error),
                    }
                    tokio::time::sleep(BETWEEN_REPORTS).await;
                }
                Ok(Some(FromNode { is: Some(From::Hello(_)) })) => {
                    return Some(Error::invalid(format!("node {node} says Hello twice in a session")).into());
                }
                // A message of a later version.
                Ok(Some(FromNode { is: None })) => tokio::time::sleep(BETWEEN).await,
                Ok(None) | Err(_) => return None,
            }
        }
    }
}

/// Ends a session, if its node may have none any more.
pub async fn end_if_over(cluster: &Cluster, sessions: &Sessions, node: &str, number: u64) {
    match cluster.over(node).await {
        Ok(None) => {}
        Ok(Some(reason)) => sessions.end(node, number, reason),
        // Without etcd all sessions end, by the presence.
        Err(error) => tracing::warn!(node, %error, "the row of a node cannot be read"),
    }
}

async fn hello(incoming: &mut Streaming<FromNode>) -> Result<Hello> {
    let late = || Error::new(Kind::TimedOut, format!("no Hello came within {} s", HELLO.as_secs()));
    let first = tokio::time::timeout(HELLO, incoming.message()).await.map_err(|_| late())?;
    match first {
        Ok(Some(FromNode { is: Some(From::Hello(hello)) })) => Ok(hello),
        _ => Err(Error::invalid("the first message of a session is not Hello").into()),
    }
}
