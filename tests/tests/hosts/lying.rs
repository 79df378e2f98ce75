//! A server that lies in the size of its answers. It is a server of the test, at a socket as csid-link makes them.

use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use csi_proto::cluster::v1::cluster_server::{Cluster, ClusterServer};
use csi_proto::cluster::v1::{
    Accepted, CallName, ChangeAsk, ClaimAsk, ClaimInList, ClaimPage, ClaimRow, Explanation, FromNode,
    Granted, Held, HeldClaims, InventoryAsk, InventoryPage, ListAsk, NodeExpanded, Owed, Refused, ReleaseAsk,
    Released, ToNode, VolumeAsk, VolumePage, VolumeRow, Welcome, Withdrawn, to_node,
};
use csid_client::{ClaimOptions, Kind};
use csid_tests::ask::*;
use csid_tests::kernel::{forget_peak, peak_kib, resident_kib};
use csid_tests::world::{eventually, refusal, world};
use futures_util::{Stream, StreamExt, stream};
use tokio::net::UnixListener;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status, Streaming};

use crate::*;

/// What the server says. Without a change it is a server that grants nothing.
#[derive(Clone, Default)]
pub struct Lying {
    /// How many rows without content an answer has. Each needs two bytes on the wire.
    rows: Arc<AtomicUsize>,
    /// The generation and the mode of its Welcome. 0: generation 1, normal.
    pub welcome: Arc<Mutex<(u64, &'static str)>>,
    /// The word with which it refuses each Hello. Empty: it refuses none.
    refuses: Arc<Mutex<&'static str>>,
    /// The volume that it knows and grants. `None`: rows without content.
    pub volume: Arc<Mutex<Option<VolumeRow>>>,
    /// The sessions that have begun.
    pub sessions: Arc<AtomicUsize>,
    /// The pages of what a node holds that have come.
    pub pages: Arc<AtomicUsize>,
    /// Whether it takes what a node says: its pages and the ends of its claims. It answers the first page when `answer` says so.
    pub takes: Arc<AtomicBool>,
    pub answer: Arc<Notify>,
    /// What it has taken, in that order.
    pub said: Arc<Mutex<Vec<String>>>,
    /// The revisions that lists of claims had to have.
    least: Arc<Mutex<Vec<u64>>>,
    ended: Arc<Notify>,
}

impl Lying {
    /// Serves a socket, as csid-link makes them.
    pub fn start(&self, socket: &Path) -> JoinHandle<Result<(), tonic::transport::Error>> {
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket).unwrap();
        let server = tonic::transport::Server::builder()
            .add_service(ClusterServer::new(self.clone()).max_encoding_message_size(usize::MAX));
        tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)))
    }

    /// Ends the sessions.
    pub fn end_sessions(&self) {
        self.ended.notify_waiters();
    }
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn unknown<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("the test has no such call"))
}

#[tonic::async_trait]
impl Cluster for Lying {
    type SessionStream = Answers<ToNode>;
    type VolumesStream = Answers<VolumePage>;
    type ClaimsStream = Answers<ClaimPage>;

    async fn session(
        &self,
        _: Request<Streaming<FromNode>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let (generation, mode) = match *self.welcome.lock().unwrap() {
            (0, _) => (1, "normal"),
            said => said,
        };
        let welcome = Welcome { generation, mode: mode.into(), node: "n1".into(), ..Welcome::default() };
        let first = ToNode { is: Some(to_node::Is::Welcome(welcome)) };
        self.sessions.fetch_add(1, Ordering::Relaxed);
        let reason = *self.refuses.lock().unwrap();
        if !reason.is_empty() {
            let refused = Refused { reason: reason.into(), ..Refused::default() };
            let first = ToNode { is: Some(to_node::Is::Refused(refused)) };
            return Ok(Response::new(stream::iter([Ok(first)]).boxed()));
        }
        let ended = self.ended.clone();
        let rest = stream::pending().take_until(async move { ended.notified().await });
        Ok(Response::new(stream::iter([Ok(first)]).chain(rest).boxed()))
    }

    async fn claim(&self, _: Request<ClaimAsk>) -> Result<Response<Granted>, Status> {
        match self.volume.lock().unwrap().clone() {
            Some(volume) => Ok(Response::new(Granted {
                claim: "lie".into(),
                volume: Some(volume),
                revision: 7,
                ..Granted::default()
            })),
            None => unknown(),
        }
    }

    async fn withdraw(&self, _: Request<CallName>) -> Result<Response<Withdrawn>, Status> {
        unknown()
    }

    async fn detached(&self, request: Request<Owed>) -> Result<Response<Accepted>, Status> {
        if !self.takes.load(Ordering::Relaxed) {
            return unknown();
        }
        self.said.lock().unwrap().push(format!("end of {}", request.into_inner().consumer));
        Ok(Response::new(Accepted {}))
    }

    async fn hold(&self, request: Request<HeldClaims>) -> Result<Response<Held>, Status> {
        let is_first = self.pages.fetch_add(1, Ordering::Relaxed) == 0;
        if !self.takes.load(Ordering::Relaxed) {
            return unknown();
        }
        let HeldClaims { claims, last, .. } = request.into_inner();
        let what = if last { "last page" } else { "page" };
        self.said.lock().unwrap().push(format!("{what} of {}", claims.len()));
        if is_first {
            self.answer.notified().await;
        }
        Ok(Response::new(Held::default()))
    }

    async fn expanded(&self, _: Request<NodeExpanded>) -> Result<Response<Accepted>, Status> {
        unknown()
    }

    async fn release(&self, _: Request<ReleaseAsk>) -> Result<Response<Released>, Status> {
        unknown()
    }

    async fn change(&self, _: Request<ChangeAsk>) -> Result<Response<VolumeRow>, Status> {
        unknown()
    }

    async fn volume(&self, _: Request<VolumeAsk>) -> Result<Response<VolumeRow>, Status> {
        if let Some(volume) = self.volume.lock().unwrap().clone() {
            return Ok(Response::new(volume));
        }
        let claims = vec![ClaimRow::default(); self.rows.load(Ordering::Relaxed)];
        Ok(Response::new(VolumeRow { claims, ..VolumeRow::default() }))
    }

    async fn volumes(&self, _: Request<ListAsk>) -> Result<Response<Self::VolumesStream>, Status> {
        unknown()
    }

    async fn inventory(&self, _: Request<InventoryAsk>) -> Result<Response<InventoryPage>, Status> {
        unknown()
    }

    async fn explain(&self, _: Request<VolumeAsk>) -> Result<Response<Explanation>, Status> {
        unknown()
    }

    /// Sends pages for ever.
    async fn claims(&self, request: Request<ListAsk>) -> Result<Response<Self::ClaimsStream>, Status> {
        self.least.lock().unwrap().push(request.into_inner().at_least);
        let claims = vec![ClaimInList::default(); self.rows.load(Ordering::Relaxed)];
        let page = move || Ok(ClaimPage { claims: claims.clone(), ..ClaimPage::default() });
        Ok(Response::new(stream::repeat_with(page).boxed()))
    }
}

#[test]
fn answers_of_a_lying_server_take_little_memory() {
    world(async |w| {
        let link = w.path("lying");
        std::fs::create_dir(&link).unwrap();
        let lying = Lying::default();
        let serving = lying.start(&link.join("s1:7443"));
        let client = start_node(w, "n1", &link).await;
        let pid = w.csid_pid();
        let grown = |before: usize| peak_kib(pid).saturating_sub(before) / 1024;

        // An answer that no server of csid sends. It would need 200 MiB.
        lying.rows.store(700_000, Ordering::Relaxed);
        let before = resident_kib(pid);
        forget_peak(pid);
        for _ in 0..3 {
            let (kind, error) = refusal(client.volume(NAMESPACE, "data").await);
            assert_eq!(kind, Kind::Unavailable, "{}", error.message);
        }
        let mib = grown(before);
        assert!(mib < 32, "a message that is too large took {mib} MiB");

        // The largest that csid takes, from many calls at the same time.
        lying.rows.store(60_000, Ordering::Relaxed);
        let before = resident_kib(pid);
        forget_peak(pid);
        let calls = (0..48).map(|n| {
            let client = client.clone();
            async move { client.volume(NAMESPACE, &format!("v{n}")).await }
        });
        for answer in futures_util::future::join_all(calls).await {
            let (kind, error) = refusal(answer);
            let is_due = [Kind::Internal, Kind::Unavailable].contains(&kind);
            assert!(is_due, "{kind:?}: {}", error.message);
        }
        let mib = grown(before);
        assert!(mib < 512, "the answers to 48 calls took {mib} MiB");
        assert!(w.status().contains("joined at s1:7443"), "{}", w.status());
        serving.abort();
    });
}

/// The next server may be behind the one that granted the claim.
#[test]
fn list_of_the_next_server_has_the_revision_seen() {
    world(async |w| {
        let mut site = one_server(&["data"]).await;
        let (client, link) = n1(w, &site).await;
        mount_registered(&client, "data", "web").await.unwrap();
        let revision = client.cluster().await.unwrap().revision;
        assert!(revision > 0);
        site.servers[0].kill();
        let lying = Lying::default();
        let serving = lying.start(&link.run().join("s9:7443"));
        eventually("csid has asked for a list", async || !lying.least.lock().unwrap().is_empty()).await;
        assert_eq!(lying.least.lock().unwrap()[0], revision);
        // Its Welcome names another generation, whose revisions begin again.
        *lying.welcome.lock().unwrap() = (2, "normal");
        lying.end_sessions();
        eventually("csid has joined again", async || client.cluster().await.unwrap().generation == 2).await;
        lying.least.lock().unwrap().clear();
        eventually("csid has asked for a list", async || !lying.least.lock().unwrap().is_empty()).await;
        assert_eq!(lying.least.lock().unwrap()[0], 0);
        serving.abort();
    });
}

/// The server has refused the end of a claim, and takes it now. The next consumer of the same host is not refused for what has ended.
#[test]
fn claim_after_an_owed_one_asks_the_servers() {
    world(async |w| {
        let mut site = one_server(&["data"]).await;
        let (client, link) = n1(w, &site).await;
        let ask = VolumeAsk { namespace: NAMESPACE.into(), volume: "data".into(), ..VolumeAsk::default() };
        let lying = Lying::default();
        *lying.volume.lock().unwrap() = Some(site.operator(0, "all").volume(ask).await.unwrap().into_inner());
        site.servers[0].kill();
        let socket = link.run().join("s9:7443");
        let serving = lying.start(&socket);
        eventually("the node has joined", async || w.status().contains("joined at s9:7443")).await;
        mount_registered(&client, "data", "web").await.unwrap();
        unmount(&client, "data", "web").await.unwrap();
        assert_eq!(claims(&client).await.len(), 1, "the server has not taken its end");
        for wait_usec in [None, Some(0)] {
            let options = ClaimOptions { wait_usec, ..ClaimOptions::default() };
            let (kind, error) = refusal(client.claim(NAMESPACE, "data", "other", options).await);
            assert_eq!(kind, Kind::Uncertain, "{error}");
        }

        let waits = ClaimOptions { wait_usec: Some(60_000_000), ..ClaimOptions::default() };
        let (asking, step) = (client.clone(), "waiting for claims");
        let waiting = tokio::spawn(async move { asking.claim(NAMESPACE, "data", "other", waits).await });
        eventually("the claim waits", async || {
            client.list_operations().await.unwrap().iter().any(|operation| operation.step == step)
        })
        .await;
        lying.takes.store(true, Ordering::Relaxed);
        waiting.await.unwrap().unwrap();
        assert_eq!(*lying.said.lock().unwrap(), ["end of web"]);
        release(&client, "data", "other").await.unwrap();
        serving.abort();
        w.nothing_left(&client).await;
    });
}

/// A server of another version refuses for itself alone. The other one is away, and may let the host join later.
#[test]
fn refusal_of_one_server_is_not_of_the_cluster() {
    world(async |w| {
        let link = w.path("lying");
        std::fs::create_dir(&link).unwrap();
        let names = ["s1:7443", "s2:7443"];
        let servers: [Lying; 2] = Default::default();
        let start = |n: usize| servers[n].start(&link.join(names[n]));
        let mut serving = [start(0), start(1)];
        start_node(w, "n1", &link).await;
        for (refusing, away) in [(0, 1), (1, 0)] {
            *servers[refusing].refuses.lock().unwrap() = "too-old";
            servers[refusing].end_sessions();
            let joined = format!("joined at {}", names[away]);
            eventually("csid has joined the other server", async || w.status().contains(&joined)).await;
            // Its socket stays.
            serving[away].abort();
            servers[away].end_sessions();
            eventually("csid has lost its server", async || !w.status().contains("joined at")).await;
            let begun = servers[refusing].sessions.load(Ordering::Relaxed);
            eventually("csid has asked all servers again", async || {
                assert!(!w.status().contains("refused as"), "{}", w.status());
                servers[refusing].sessions.load(Ordering::Relaxed) >= begun + 3
            })
            .await;
            serving[away] = start(away);
            eventually("csid has joined again", async || w.status().contains(&joined)).await;
            *servers[refusing].refuses.lock().unwrap() = "";
        }
        for server in &servers {
            *server.refuses.lock().unwrap() = "too-old";
            server.end_sessions();
        }
        eventually("all servers refuse the host", async || w.status().contains("refused as too-old")).await;
        serving.iter().for_each(JoinHandle::abort);
    });
}
