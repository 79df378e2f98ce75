//! Nodes without csid: each has its certificate, its connections and its session, and says what csid would say. All are in this process.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::cluster_client::ClusterClient;
use csi_proto::cluster::v1::{
    Answer, Attaches, CallEnded, ClaimAsk, ControllerCall, FromNode, Hello, ListAsk, PluginReport, Plugins,
    ToNode, Use, from_node, to_node,
};
use futures_util::future::try_join_all;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use crate::certificates::Pair;
use crate::site::Site;

/// The pause of csid after a session has ended, and after every server was asked in vain.
const PAUSE: Duration = Duration::from_millis(200);
/// The pause before a call is repeated that may succeed later.
pub const AGAIN: Duration = Duration::from_millis(20);
/// How long csid waits for an answer, before it makes the same call again.
const CALL: Duration = Duration::from_secs(10);
/// How long anything may take.
pub const LIMIT: Duration = Duration::from_secs(120);
/// How long a server may take to answer a Hello.
const WELCOME: Duration = Duration::from_secs(15);
/// The plugins of the nodes: one attaches nothing, and one attaches.
pub const PLAIN: &str = "plain";
pub const ATTACHING: &str = "attaching";

/// What a node has come to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum At {
    Nowhere,
    /// It has a session with this server.
    Joined(usize),
    /// It has also compared its claims, as csid does.
    Compared(usize),
}

impl At {
    pub fn server(self) -> Option<usize> {
        match self {
            At::Nowhere => None,
            At::Joined(server) | At::Compared(server) => Some(server),
        }
    }
}

/// What a node does in a session.
#[derive(Clone, Copy)]
pub enum Role {
    /// Joins one server after the other. `compares`: as csid it asks for its claims, 1.5 to 4.5 s later.
    Claims { compares: bool },
    /// Answers controller calls, with a session at each server.
    Controls,
}

/// One node.
pub struct Node {
    pub name: String,
    channels: Vec<Channel>,
    boot: AtomicU64,
    calls: AtomicU64,
    pub at: watch::Sender<At>,
    /// Claims that the last comparison has found.
    pub found: AtomicUsize,
    /// What takes controller calls in place of an answer.
    pub holds: Mutex<Option<mpsc::UnboundedSender<(usize, ControllerCall)>>>,
}

impl Node {
    fn new(site: &Site, name: &str, pair: &Pair) -> Result<Arc<Node>> {
        let channels = (0..site.addresses.len()).map(|server| site.channel(server, pair));
        Ok(Arc::new(Node {
            name: name.to_owned(),
            channels: channels.collect::<Result<_>>()?,
            boot: AtomicU64::new(1),
            calls: AtomicU64::new(0),
            at: watch::channel(At::Nowhere).0,
            found: AtomicUsize::new(0),
            holds: Mutex::new(None),
        }))
    }

    fn boot(&self) -> String {
        format!("boot {} of {}", self.boot.load(Ordering::Relaxed), self.name)
    }

    /// Has the node say another boot from its next session on.
    pub fn reboot(&self) {
        self.boot.fetch_add(1, Ordering::Relaxed);
    }

    fn client(&self, server: usize) -> ClusterClient<Channel> {
        ClusterClient::new(self.channels[server].clone())
    }

    /// Keeps a session with one of these servers, until the task is aborted.
    async fn keep(self: Arc<Self>, servers: Vec<usize>, role: Role) {
        loop {
            for server in &servers {
                if let Ok((mut session, _to_server)) = self.join(*server, role).await {
                    self.at.send_replace(At::Joined(*server));
                    if let Role::Claims { compares: true } = role {
                        let comparing = async {
                            tokio::time::sleep(self.first_comparison()).await;
                            while let Err(error) = self.compare(*server).await {
                                if error.code() != Code::ResourceExhausted {
                                    return;
                                }
                                tokio::time::sleep(self.share(PAUSE)).await;
                            }
                            self.at.send_replace(At::Compared(*server));
                            std::future::pending().await
                        };
                        tokio::select! {
                            () = comparing => {}
                            () = self.serve(*server, &mut session, &_to_server) => {}
                        }
                    } else {
                        self.serve(*server, &mut session, &_to_server).await;
                    }
                    self.at.send_replace(At::Nowhere);
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Returns a part of a time that each node has for itself.
    fn share(&self, of: Duration) -> Duration {
        let digest = self.name.bytes().fold(7_u32, |sum, byte| sum.wrapping_mul(31) + u32::from(byte));
        of.mul_f64(f64::from(digest % 1000) / 1000.0)
    }

    /// Returns when csid would compare its claims first after a join: between 1.5 and 4.5 s.
    fn first_comparison(&self) -> Duration {
        Duration::from_millis(1500) + self.share(Duration::from_secs(3))
    }

    /// Joins a server, and reports the plugins.
    async fn join(&self, server: usize, role: Role) -> Result<(Streaming<ToNode>, mpsc::Sender<FromNode>)> {
        let (to_server, receiver) = mpsc::channel(64);
        let hello = Hello {
            cluster: "prod".into(),
            journal_id: format!("journal of {}", self.name),
            machine_id: format!("machine of {}", self.name),
            boot: self.boot(),
            version: "bench".into(),
            protocol_min: 1,
            protocol_max: 1,
            ..Hello::default()
        };
        to_server.send(FromNode { is: Some(from_node::Is::Hello(hello)) }).await?;
        let joined = async {
            let mut session = self.client(server).session(ReceiverStream::new(receiver)).await?.into_inner();
            match session.message().await?.and_then(|message| message.is) {
                Some(to_node::Is::Welcome(_)) => Ok(session),
                other => bail!("no Welcome for {}: {other:?}", self.name),
            }
        };
        let session = tokio::time::timeout(WELCOME, joined).await??;
        let controls = matches!(role, Role::Controls);
        let report = |plugin: &str, attaches: Attaches| PluginReport {
            plugin: plugin.into(),
            attaches: attaches.into(),
            node_id: format!("{plugin}-{}", self.name),
            controller: controls && attaches == Attaches::Yes,
            ..PluginReport::default()
        };
        let plugins = vec![report(PLAIN, Attaches::No), report(ATTACHING, Attaches::Yes)];
        to_server.send(FromNode { is: Some(from_node::Is::Plugins(Plugins { plugins })) }).await?;
        Ok((session, to_server))
    }

    /// Serves a session to its end.
    async fn serve(
        &self,
        server: usize,
        session: &mut Streaming<ToNode>,
        to_server: &mpsc::Sender<FromNode>,
    ) {
        while let Ok(Some(message)) = session.message().await {
            let Some(to_node::Is::Call(call)) = message.is else { continue };
            let held = self.holds.lock().unwrap_or_else(PoisonError::into_inner).clone();
            if let Some(held) = held {
                let _ = held.send((server, call));
                continue;
            }
            let publish_context = [("device".to_owned(), "/dev/bench".to_owned())].into();
            let how = How::Answer(Answer { publish_context, ..Answer::default() });
            let ended = CallEnded { call: call.call, epoch: call.epoch, how: Some(how) };
            if to_server.send(FromNode { is: Some(from_node::Is::Ended(ended)) }).await.is_err() {
                return;
            }
        }
    }

    /// Asks for this node's claims, and counts them.
    async fn compare(&self, server: usize) -> Result<(), Status> {
        let ask = ListAsk { own: true, ..ListAsk::default() };
        let mut pages = self.client(server).claims(ask).await?.into_inner();
        let mut found = 0;
        while let Some(page) = pages.message().await? {
            found += page.claims.len();
        }
        self.found.store(found, Ordering::Relaxed);
        Ok(())
    }

    fn ask(&self, volume: &str, access_mode: &str) -> ClaimAsk {
        ClaimAsk {
            call: format!("{}.{}", self.boot(), self.calls.fetch_add(1, Ordering::Relaxed)),
            volume: volume.into(),
            consumer: "web".into(),
            uid: 1000,
            r#use: Some(Use {
                mode: "write".into(),
                access_mode: access_mode.into(),
                attachment_mode: "file-system".into(),
            }),
            boot: self.boot(),
            ..ClaimAsk::default()
        }
    }

    /// Claims a volume for no consumer, at the server of the session. The server refuses that before it looks at the volume.
    pub async fn claim_in_vain(&self, volume: &str, access_mode: &str) -> Result<()> {
        let ask = ClaimAsk { consumer: String::new(), ..self.ask(volume, access_mode) };
        match self.client(self.session().await?).claim(ask).await {
            Err(error) if error.code() == Code::InvalidArgument => Ok(()),
            answer => bail!("{}: a claim for no consumer: {answer:?}", self.name),
        }
    }

    /// Claims a volume for the consumer `web`, at the server of the session. As csid does, it repeats the call until the servers have an
    /// answer that stays.
    pub async fn claim(&self, volume: &str, access_mode: &str) -> Result<()> {
        let ask = self.ask(volume, access_mode);
        let begun = Instant::now();
        loop {
            let server = self.session().await?;
            let error = match tokio::time::timeout(CALL, self.client(server).claim(ask.clone())).await {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(error)) => error,
                Err(_) => Status::deadline_exceeded("no answer"),
            };
            let is_final =
                matches!(error.code(), Code::InvalidArgument | Code::PermissionDenied | Code::NotFound);
            ensure!(!is_final && begun.elapsed() < LIMIT, "{}: claim of {volume}: {error}", self.name);
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Returns the server of the session, when there is one.
    async fn session(&self) -> Result<usize> {
        let mut at = self.at.subscribe();
        let joined = tokio::time::timeout(LIMIT, at.wait_for(|at| at.server().is_some())).await;
        let at = *joined.with_context(|| format!("{} has no session", self.name))??;
        at.server().context("no session")
    }
}

/// Nodes with their sessions. The sessions end with it.
pub struct Fleet {
    pub nodes: Vec<Arc<Node>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Fleet {
    pub fn new(site: &Site, names: &[String], pairs: &[Pair]) -> Result<Fleet> {
        let nodes = names.iter().zip(pairs).map(|(name, pair)| Node::new(site, name, pair));
        Ok(Fleet { nodes: nodes.collect::<Result<_>>()?, tasks: Vec::new() })
    }

    /// Ends all sessions at once.
    pub fn leave(&mut self) {
        self.tasks.drain(..).for_each(|task| task.abort());
        for node in &self.nodes {
            node.at.send_replace(At::Nowhere);
        }
    }

    /// Has the first `count` nodes join, each with an order of these servers of its own.
    pub fn begin(&mut self, count: usize, servers: &[usize], role: Role) {
        self.leave();
        for (n, node) in self.nodes.iter().take(count).enumerate() {
            let sessions: Vec<Vec<usize>> = match role {
                Role::Controls => servers.iter().map(|server| vec![*server]).collect(),
                Role::Claims { .. } => {
                    vec![(0..servers.len()).map(|place| servers[(n + place) % servers.len()]).collect()]
                }
            };
            for servers in sessions {
                self.tasks.push(tokio::spawn(Arc::clone(node).keep(servers, role)));
            }
        }
    }

    /// Has nodes join, and waits until all have. Returns how long it took.
    pub async fn join(&mut self, count: usize, servers: &[usize]) -> Result<Duration> {
        let begun = Instant::now();
        self.begin(count, servers, Role::Claims { compares: false });
        self.wait(count, |at| at != At::Nowhere).await?;
        Ok(begun.elapsed())
    }

    /// Waits until each of the first `count` nodes has come to this.
    pub async fn wait(&self, count: usize, come: impl Fn(At) -> bool + Copy) -> Result<()> {
        let all = try_join_all(self.nodes.iter().take(count).map(|node| async move {
            let mut at = node.at.subscribe();
            let waited = at.wait_for(|at| come(*at)).await.map(drop);
            waited.with_context(|| node.name.clone())
        }));
        tokio::time::timeout(LIMIT, all).await.context("not all nodes have joined in time")??;
        Ok(())
    }
}
