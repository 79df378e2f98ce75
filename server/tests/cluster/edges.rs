//! A server is killed at each of its named edges while nodes and operators ask it for something. Another server goes on, or the same one again. What was
//! answered stays, nothing is granted twice, and in the end all is at rest.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use csi_proto::cluster::v1::call_ended::How;
use csi_proto::cluster::v1::change_ask::What;
use csi_proto::cluster::v1::controller_call::Method;
use csi_proto::cluster::v1::node_change::Change;
use csi_proto::cluster::v1::resume_ask::Step;
use csi_proto::cluster::v1::to_node::Is;
use csi_proto::cluster::v1::{
    Answer, Attaches, CallEnded, CallName, ChangeAsk, ClaimAsk, ControllerCall, CreatedVolume, DeleteAsk,
    DeleteSnapshotAsk, Deregister, DetachAsk, DrainAsk, Drained, ExpandAsk, ExpandedVolume, ExternalSnapshot,
    FenceAsk, ForgetAsk, FromNode, Granted, HeldClaim, HeldClaims, Listed, NodeAsk, NodeChange, NodeRow,
    PluginReport, Plugins, ReleaseAsk, RestoredAsk, ResumeAsk, ServerRows, ServersAsk, SnapshotAsk,
    UndrainAsk, Use, VolumeRow, from_node,
};
use csid_etcd::api::LeaseRevokeRequest;
use csid_etcd::api::lease_client::LeaseClient;
use futures_util::future::join_all;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tonic::transport::Endpoint;
use tonic::{Response, Status};

use crate::attach::{attached, head, healthy, is_publish, node_id, row};
use crate::by_call::attach_ask;
use crate::creations::create;
use crate::fault::Fault;
use crate::site::{First, Node, Refusal, SOON, Session, Site, eventually, register};

/// How long a server may take to pass an edge that nobody has it pass: it writes its row every three seconds.
const BEAT: Duration = Duration::from_secs(6);

/// The volumes of plugin `p`, as the storage has them.
#[derive(Default)]
struct Storage {
    /// The capacities of the volumes that were created, by their IDs.
    made: BTreeMap<String, u64>,
    /// The volumes of the snapshots, by their IDs.
    snapshots: BTreeMap<String, String>,
    /// The plugin's names of the nodes that have a volume, by the volume.
    attached: BTreeMap<String, BTreeSet<String>>,
    /// The plugin's name of the node that uses a volume.
    users: BTreeMap<String, String>,
    epochs: BTreeMap<String, u64>,
    /// What was called in a wrong order.
    wrong: Vec<String>,
}

impl Storage {
    /// Does what a call asks for, and returns its answer.
    fn answer(&mut self, call: &ControllerCall) -> How {
        let volume = call.order.clone();
        // A question has no epoch.
        if !matches!(call.method, Some(Method::List(_))) {
            let last = self.epochs.insert(volume.clone(), call.epoch).unwrap_or(0);
            if call.epoch <= last {
                self.wrong.push(format!("{volume}: epoch {} comes after {last}", call.epoch));
            }
        }
        match call.method.as_ref().expect("a method") {
            Method::Publish(_) | Method::Unpublish(_) => self.attach(call),
            method => How::Answer(self.provision(&volume, method)),
        }
    }

    /// Creates, expands or deletes a volume or a snapshot, or lists the snapshots. The same call again changes nothing.
    fn provision(&mut self, order: &str, method: &Method) -> Answer {
        let is_missing = |made: &BTreeMap<String, u64>| !made.contains_key(order);
        match method {
            Method::Create(of) => {
                let id = order.replacen('+', "made-", 1);
                let capacity = *self.made.entry(id.clone()).or_insert(of.capacity_min);
                let created = CreatedVolume { external_id: id, capacity, ..CreatedVolume::default() };
                Answer { created: Some(created), ..Answer::default() }
            }
            Method::Delete(_) => {
                let is_in_use = self.attached.get(order).is_some_and(|nodes| !nodes.is_empty());
                if is_in_use || self.snapshots.values().any(|of| of == order) {
                    self.wrong.push(format!("{order} is deleted, and is attached or has a snapshot"));
                }
                self.made.remove(order);
                Answer::default()
            }
            Method::Expand(of) => {
                if is_missing(&self.made) {
                    self.wrong.push(format!("{order} is expanded, and is not there"));
                }
                let capacity = self.made.entry(order.to_owned()).or_default();
                *capacity = of.required.max(*capacity);
                let expanded = ExpandedVolume { capacity: *capacity, node_expansion_required: false };
                Answer { expanded: Some(expanded), ..Answer::default() }
            }
            Method::Snapshot(of) => {
                if is_missing(&self.made) {
                    self.wrong.push(format!("a snapshot is made of {order}, which is not there"));
                }
                let id = format!("{} of {order}", of.name);
                self.snapshots.insert(id.clone(), order.to_owned());
                Answer { snapshot: Some(snapshot(&id, order)), ..Answer::default() }
            }
            Method::DeleteSnapshot(of) => {
                self.snapshots.remove(&of.snapshot);
                Answer::default()
            }
            Method::List(of) => {
                let is_asked = |id: &&String| of.snapshot.is_empty() || **id == of.snapshot;
                let found = self.snapshots.keys().filter(is_asked);
                let snapshots = found.map(|id| snapshot(id, &self.snapshots[id])).collect();
                Answer { listed: Some(Listed { snapshots, ..Listed::default() }), ..Answer::default() }
            }
            other => panic!("{other:?}"),
        }
    }

    /// Attaches or detaches a volume.
    fn attach(&mut self, call: &ControllerCall) -> How {
        let (volume, node) = (call.order.clone(), node_id(call).to_owned());
        let nodes = self.attached.entry(volume.clone()).or_default();
        let is_attach = is_publish(call);
        if is_attach && nodes.iter().any(|at| *at != node) {
            self.wrong.push(format!("{volume} is attached to {node}, and {nodes:?} has it"));
        }
        if !is_attach && self.users.get(&volume) == Some(&node) {
            self.wrong.push(format!("{volume} is detached from {node}, which uses it"));
        }
        match is_attach {
            true => {
                nodes.insert(node);
                attached("/dev/x")
            }
            false => {
                nodes.remove(&node);
                How::Answer(Answer::default())
            }
        }
    }

    fn at(&self, volume: &str) -> Vec<String> {
        self.attached.get(volume).into_iter().flatten().cloned().collect()
    }
}

fn snapshot(id: &str, volume: &str) -> ExternalSnapshot {
    ExternalSnapshot {
        id: id.into(),
        external_id: volume.into(),
        size: 4096,
        ready: true,
        ..ExternalSnapshot::default()
    }
}

/// A node that has a session with the server that goes on. Its drain is over at once, and it answers controller calls from the storage.
struct Joined {
    node: Arc<Node>,
    /// The server at which it has joined.
    joined: watch::Receiver<Option<usize>>,
    task: JoinHandle<()>,
}

impl Drop for Joined {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Keeps a session with the server that goes on.
async fn keep(
    node: Arc<Node>,
    report: PluginReport,
    mut at: watch::Receiver<usize>,
    storage: Arc<Mutex<Storage>>,
    entered: watch::Sender<Option<usize>>,
) {
    loop {
        let server = *at.borrow_and_update();
        if let Ok((First::Welcome(welcome), mut session)) = node.say_hello(server).await {
            let plugins = Plugins { plugins: vec![report.clone()] };
            say(&session, from_node::Is::Plugins(plugins)).await;
            say_drained(&session, welcome.drain).await;
            entered.send_replace(Some(server));
            loop {
                let message = tokio::select! {
                    message = session.from_server.message() => message,
                    _ = at.changed() => break,
                };
                match message.ok().flatten().map(|message| message.is) {
                    Some(Some(Is::Call(call))) => {
                        let how = Some(storage.lock().unwrap().answer(&call));
                        let ended = CallEnded { call: call.call, epoch: call.epoch, how };
                        say(&session, from_node::Is::Ended(ended)).await;
                    }
                    Some(Some(Is::Drain(drain))) => say_drained(&session, drain.number).await,
                    Some(_) => {}
                    None => break,
                }
            }
            entered.send_replace(None);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Says that nothing is left. 0: the node does not drain.
async fn say_drained(session: &Session, drain: u64) {
    if drain > 0 {
        let drained = Drained { left: Vec::new(), count: 0, since_usec: 7, drain };
        say(session, from_node::Is::Drained(drained)).await;
    }
}

async fn say(session: &Session, is: from_node::Is) {
    // A failure means that the server has died.
    let _ = session.to_server.send(FromNode { is: Some(is) }).await;
}

/// What nodes and operators ask for while a server dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    /// A node claims a volume that is attached, and ends its claim.
    Attach,
    /// Nodes join, and one of them claims. Another claim waits and is withdrawn. An operator releases the claim.
    Join,
    /// An operator registers, attaches, detaches and deregisters a volume.
    ByCall,
    /// An operator drains a node.
    Drain,
    /// A cluster recovers from a backup of etcd.
    Restore,
    /// A node with a claim is off, an operator fences it, and another node gets the volume. The node is forgotten.
    Fence,
    /// An operator creates a volume, expands it, makes a snapshot of it, and deletes both.
    Create,
}

/// The acts that pass all edges together.
const ACTS: [Act; 5] = [Act::Attach, Act::Join, Act::ByCall, Act::Drain, Act::Restore];

/// A cluster of two servers, of which the first one dies.
struct Stage {
    act: Act,
    site: Site,
    fault: Fault,
    /// The server that goes on.
    at: watch::Sender<usize>,
    /// Whether the server that has died goes on itself.
    is_same: bool,
    has_died: bool,
    storage: Arc<Mutex<Storage>>,
    nodes: Vec<Joined>,
    runs: usize,
}

impl Stage {
    async fn start(act: Act) -> Stage {
        let mut site = Site::start(2).await;
        let fault = site.start_with_faults().remove(0);
        let (at, storage) = (watch::Sender::new(0), Arc::default());
        let nodes = Vec::new();
        let mut stage =
            Stage { act, site, fault, at, is_same: false, has_died: false, storage, nodes, runs: 0 };
        match act {
            Act::Attach | Act::ByCall | Act::Fence => stage.join("c1", healthy()),
            Act::Create => stage.join("c1", PluginReport { calls: 1, ..healthy() }),
            Act::Join | Act::Drain | Act::Restore => {}
        }
        stage.join("n1", user("n1", "p"));
        if act == Act::Attach {
            stage.join("n2", user("n2", "p"));
        }
        stage
    }

    /// Has a node join, and keep a session.
    fn join(&mut self, name: &str, report: PluginReport) {
        let (node, (entered, joined)) = (Arc::new(self.site.node(name)), watch::channel(None));
        let (at, storage) = (self.at.subscribe(), self.storage.clone());
        let task = tokio::spawn(keep(node.clone(), report, at, storage, entered));
        self.nodes.push(Joined { node, joined, task });
    }

    fn node(&self, name: &str) -> Arc<Node> {
        let is_it = |of: &&Joined| of.node.hello.journal_id == format!("journal of {name}");
        self.nodes.iter().find(is_it).expect("a node").node.clone()
    }

    /// Waits until all nodes have a session with the server that goes on.
    async fn have_joined(&self) {
        let server = *self.at.borrow();
        eventually("the nodes have joined", async || {
            self.nodes.iter().all(|of| *of.joined.borrow() == Some(server))
        })
        .await;
        // What they report is written, and the sessions of before are removed.
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    /// Makes calls until one has an outcome. Starts the server again that has died meanwhile, or goes on at the other one.
    async fn until<T>(&mut self, what: &str, mut asked: impl AsyncFnMut(&Site, usize) -> Option<T>) -> T {
        let begun = Instant::now();
        loop {
            let server = *self.at.borrow();
            if let Some(outcome) = asked(&self.site, server).await {
                return outcome;
            }
            assert!(
                begun.elapsed() < SOON,
                "{:?}, run {}: it did not come to this: {what}",
                self.act,
                self.runs
            );
            self.mend().await;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Goes on after the end of the server, if it has ended.
    async fn mend(&mut self) {
        if self.has_died || !self.site.servers[0].has_ended() {
            return;
        }
        self.has_died = true;
        self.end_lease().await;
        match self.is_same {
            true => self.site.servers[0] = self.site.start_server(0),
            false => drop(self.at.send_replace(1)),
        }
    }

    /// Ends the lease of the server that has died, as time does.
    async fn end_lease(&self) {
        let endpoint = Endpoint::from_shared(self.site.etcd.endpoints().remove(0)).unwrap();
        let mut leases = LeaseClient::new(endpoint.connect().await.unwrap());
        for row in self.site.raw().await.below("/csid/v1/server/").await {
            if String::from_utf8_lossy(&row.value).contains(&self.site.addresses[0]) {
                leases.lease_revoke(LeaseRevokeRequest { id: row.lease }).await.unwrap();
            }
        }
    }

    /// Plays the act while the first server dies where `armed` says. Returns the edge at which it died. `None`: it has not.
    async fn run(&mut self, armed: &str, wait: Duration) -> Option<String> {
        self.runs += 1;
        (self.is_same, self.has_died) = (self.runs.is_multiple_of(2), false);
        let run = self.runs;
        self.before(run).await;
        self.have_joined().await;
        self.fault.arm(armed);
        match self.act {
            Act::Attach => self.attach(run).await,
            Act::Join => self.nodes_join(run).await,
            Act::ByCall => self.by_call(run).await,
            Act::Drain => self.drain().await,
            Act::Restore => self.restore(run).await,
            Act::Fence => self.fence(run).await,
            Act::Create => self.create(run).await,
        }
        let begun = Instant::now();
        while begun.elapsed() < wait && !self.has_died {
            self.mend().await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        // It may die, or have died, since the last answer.
        let is_dead = !self.fault.killed_at(armed);
        if is_dead {
            eventually("the server has ended", async || {
                self.mend().await;
                self.has_died
            })
            .await;
        }
        let edge = self.fault.disarm();
        if is_dead {
            if !self.is_same {
                self.site.servers[0] = self.site.start_server(0);
            }
            self.at.send_replace(0);
        }
        let wrong = std::mem::take(&mut self.storage.lock().unwrap().wrong);
        assert!(wrong.is_empty(), "{:?}, run {run}, {edge}: {wrong:?}", self.act);
        println!("{:?}, run {run}: {edge}", self.act);
        is_dead.then_some(edge)
    }

    /// Does what the act needs.
    async fn before(&mut self, run: usize) {
        let (volume, plugin) = match self.act {
            Act::Attach => (format!("v{run}"), "p"),
            Act::Join => (format!("v{run}"), "q"),
            Act::Restore | Act::Fence => (format!("v{run}"), "p"),
            Act::ByCall | Act::Drain | Act::Create => return,
        };
        let mut ask = register(&volume, "single-node-writer");
        if let Some(What::Register(register)) = &mut ask.what {
            register.plugin = plugin.into();
        }
        self.changed(|| ask.what.clone().unwrap()).await.unwrap();
    }

    /// Claims a volume as one call. A call that ends uncertainly is followed by another one, as csid's are.
    async fn claims(&mut self, name: &str, volume: &str) -> Granted {
        self.claims_after(name, volume, &[]).await
    }

    /// Does the same. `before`: who has the volume still, which is being detached.
    async fn claims_after(&mut self, name: &str, volume: &str, before: &[String]) -> Granted {
        let node = self.node(name);
        let mut tries = 0;
        self.until("the claim is granted", async |_, server| {
            let ask = ClaimAsk { call: format!("call {tries} of {volume}"), ..node.ask(volume, "web") };
            match lasting(node.client(server).claim(ask).await) {
                Some(Ok(granted)) => Some(granted),
                Some(Err(refusal)) if refusal.kind == "Uncertain" => {
                    tries += 1;
                    None
                }
                Some(Err(refusal)) if refusal.kind == "ClaimConflict" && refusal.holders == before => None,
                Some(Err(refusal)) => panic!("{refusal:?}"),
                None => None,
            }
        })
        .await
    }

    /// Waits until another node is refused, because a node has the volume for `web`.
    async fn refuses(&mut self, name: &str, volume: &str, holder: &str) {
        let node = self.node(name);
        let refusal = self
            .until("another claim is refused", async |_, server| {
                let granted = node.client(server).claim(node.ask(volume, "web")).await;
                lasting(granted).map(|granted| granted.expect_err("the volume was granted twice"))
            })
            .await;
        assert_eq!((refusal.kind.as_str(), &*refusal.holders), ("ClaimConflict", &[holder.to_owned()][..]));
    }

    /// Checks that etcd has one claim of a volume, which was answered.
    async fn has(&self, name: &str, volume: &str, claim: &str) {
        let prefix = format!("/csid/v1/vol/default/{volume}/claim/");
        let rows = self.site.raw().await.below(&prefix).await;
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let found: Vec<_> = rows.iter().map(|row| (text(&row.key), text(&row.value))).collect();
        let is_it = matches!(&found[..], [(key, value)] if *key == format!("{prefix}{name}/web") && value.contains(claim));
        assert!(is_it, "{name} was granted the claim {claim}, and etcd has {found:?}");
    }

    /// Ends a claim.
    async fn detached(&mut self, name: &str, volume: &str, claim: &str) {
        let (node, owed) = (self.node(name), self.node(name).owed(volume, claim));
        self.until("the claim ends", async |_, server| {
            lasting(node.client(server).detached(owed.clone()).await).map(|ended| ended.unwrap())
        })
        .await;
    }

    /// Waits until a volume has no claim, no controller acts for it, and no node has it.
    async fn rests(&mut self, volume: &str) {
        let storage = self.storage.clone();
        self.until("the volume is at rest", async |site, _| {
            let of_volume = site.raw().await.below(&format!("/csid/v1/vol/default/{volume}/")).await;
            let keys: Vec<_> =
                of_volume.iter().map(|row| String::from_utf8_lossy(&row.key).into_owned()).collect();
            let is_left =
                ["/claim/", "/at/", "/queue/"].iter().any(|of| keys.iter().any(|key| key.contains(of)));
            let at = storage.lock().unwrap().at(&format!("ext-{volume}"));
            (!is_left && !head(site, volume).await.contains("driver") && at.is_empty()).then_some(())
        })
        .await;
    }

    async fn attach(&mut self, run: usize) {
        let (volume, order) = (format!("v{run}"), format!("ext-v{run}"));
        let granted = self.claims("n1", &volume).await;
        {
            let mut storage = self.storage.lock().unwrap();
            assert_eq!(storage.at(&order), ["id of n1"], "run {run}: it was granted what it has not");
            storage.users.insert(order.clone(), "id of n1".to_owned());
        }
        assert_eq!(granted.publish_context["device"], "/dev/x");
        self.refuses("n2", &volume, "n1/web").await;
        self.has("n1", &volume, &granted.claim).await;
        self.storage.lock().unwrap().users.remove(&order);
        self.detached("n1", &volume, &granted.claim).await;
        self.rests(&volume).await;
    }

    async fn nodes_join(&mut self, run: usize) {
        let (volume, new, controller) = (format!("v{run}"), format!("n-of-{run}"), format!("c-of-{run}"));
        self.join(&new, PluginReport { max_volumes: Some(5), ..user(&new, "q") });
        self.join(&controller, healthy());
        for (key, due) in [(format!("node/{new}"), "node-id"), ("plugin/p".to_owned(), controller.as_str())] {
            self.until("the servers know the nodes", async |site, _| {
                row(site, &key).await.contains(due).then_some(())
            })
            .await;
        }
        let granted = self.claims(&new, &volume).await;
        let n1 = self.node("n1");
        let call = format!("call for {volume}");
        let waits = ClaimAsk { call: call.clone(), queue_ms: 60_000, answer_ms: 1, ..n1.ask(&volume, "web") };
        let key = format!("vol/default/{volume}/queue/");
        self.until("a claim waits", async |site, server| {
            let refused = n1.client(server).claim(waits.clone()).await;
            assert!(refused.is_err(), "the volume was granted twice");
            (!row(site, &key).await.is_empty()).then_some(())
        })
        .await;
        let name =
            CallName { call, namespace: String::new(), volume: volume.clone(), boot: n1.hello.boot.clone() };
        self.until("the claim is withdrawn", async |_, server| {
            let withdrawn = lasting(n1.client(server).withdraw(name.clone()).await)?.unwrap();
            assert!(!withdrawn.taken, "the volume was granted twice");
            Some(())
        })
        .await;
        assert_eq!(row(&self.site, &key).await, "", "a claim that was withdrawn waits");
        self.has(&new, &volume, &granted.claim).await;
        let release = ReleaseAsk {
            volume: volume.clone(),
            node: new.clone(),
            consumer: "web".into(),
            force: true,
            ..ReleaseAsk::default()
        };
        self.until("the claim is released", async |site, server| {
            if let Err(refusal) = lasting(site.operator(server, "all").release(release.clone()).await)? {
                // The first answer did not come.
                assert_eq!(refusal.kind, "NotFound");
            }
            Some(())
        })
        .await;
        self.rests(&volume).await;
        self.nodes.truncate(1);
        // They do not come back. The server removes the rows of their sessions.
        for name in [new, controller] {
            let key = format!("session/{name}/");
            self.until("the session has ended", async |site, _| {
                row(site, &key).await.is_empty().then_some(())
            })
            .await;
        }
    }

    /// Makes a change as an operator, and repeats it until there is an outcome.
    async fn changed(&mut self, what: impl Fn() -> What) -> Result<VolumeRow, Refusal> {
        self.until("a change is made", async |site, server| {
            let ask = ChangeAsk { what: Some(what()) };
            lasting(site.operator(server, "all").change(ask).await)
                .filter(|changed| !changed.as_ref().is_err_and(is_open))
        })
        .await
    }

    async fn by_call(&mut self, run: usize) {
        let (volume, order) = (format!("v{run}"), format!("ext-v{run}"));
        self.changed(|| register(&volume, "single-node-writer").what.unwrap()).await.unwrap();
        let attach = attach_ask(&volume, "id of n1");
        let row = self.changed(|| What::Attach(attach.clone())).await.unwrap();
        let id = row.attached.expect("the attachment").id;
        assert_eq!(self.storage.lock().unwrap().at(&order), ["id of n1"]);
        let attach = ChangeAsk { what: Some(What::Attach(attach)) };
        let mut other = self.site.operator(1, "all");
        let again = answer(async || other.change(attach.clone()).await).await.unwrap();
        assert_eq!(again.attached.expect("the attachment").id, id, "an answered attachment was lost");
        let (node_id, id) = ("id of n1".to_owned(), id.clone());
        let detach = DetachAsk { volume: volume.clone(), node_id, id, ..DetachAsk::default() };
        self.changed(|| What::Detach(detach.clone())).await.unwrap();
        self.rests(&volume).await;
        let deregister = Deregister { volume: volume.clone(), ..Deregister::default() };
        if let Err(refusal) = self.changed(|| What::Deregister(deregister.clone())).await {
            // The first answer did not come.
            assert_eq!(refusal.kind, "NotFound");
        }
        assert_eq!(head(&self.site, &volume).await, "");
    }

    /// Changes node n1 as an operator.
    async fn set(&mut self, change: Change) {
        self.until("the node is changed", async |site, server| {
            let ask = NodeChange { node: "n1".into(), change: Some(change.clone()) };
            match lasting(site.admin(server, "all").set_node(ask).await)? {
                Ok(_) => Some(()),
                Err(refusal) if refusal.kind == "Uncertain" => None,
                Err(refusal) => panic!("{refusal:?}"),
            }
        })
        .await;
    }

    async fn drain(&mut self) {
        self.set(Change::Drain(DrainAsk {})).await;
        self.until("the servers show that nothing is left", async |site, server| {
            let shown =
                lasting(site.admin(server, "all").node(NodeAsk { node: "n1".into() }).await)?.unwrap();
            assert_eq!(shown.state, "draining", "an answered drain was lost");
            shown.drained.filter(|drained| drained.count == 0).map(drop)
        })
        .await;
        self.set(Change::Undrain(UndrainAsk {})).await;
        let shown = self
            .until("the node is shown", async |site, server| {
                lasting(site.admin(server, "all").node(NodeAsk { node: "n1".into() }).await)
            })
            .await;
        assert_eq!(shown.unwrap().state, "ready");
    }

    /// Returns a node as an operator sees it.
    async fn shown(&mut self, name: &str) -> NodeRow {
        let ask = NodeAsk { node: name.into() };
        let shown = self
            .until("the node is shown", async |site, server| {
                lasting(site.admin(server, "all").node(ask.clone()).await)
            })
            .await;
        shown.unwrap()
    }

    async fn fence(&mut self, run: usize) {
        let (volume, order, name) = (format!("v{run}"), format!("ext-v{run}"), format!("n-of-{run}"));
        let id = format!("id of {name}");
        self.join(&name, user(&name, "p"));
        let key = format!("node/{name}");
        self.until("the servers know the node", async |site, _| {
            row(site, &key).await.contains("node-id").then_some(())
        })
        .await;
        let granted = self.claims(&name, &volume).await;
        {
            let mut storage = self.storage.lock().unwrap();
            assert_eq!(
                storage.at(&order),
                std::slice::from_ref(&id),
                "run {run}: it was granted what it has not"
            );
            storage.users.insert(order.clone(), id.clone());
        }
        self.refuses("n1", &volume, &format!("{name}/web")).await;
        // Its power fails.
        let node = self.node(&name);
        self.nodes.retain(|of| !Arc::ptr_eq(&of.node, &node));
        self.storage.lock().unwrap().users.remove(&order);
        let named = name.clone();
        self.until("the node is fenced", async |site, server| {
            let shown =
                lasting(site.admin(server, "all").node(NodeAsk { node: named.clone() }).await)?.unwrap();
            let fence = FenceAsk { reason: "off".into(), revision: shown.revision, by_hand: true };
            let ask = NodeChange { node: named.clone(), change: Some(Change::Fence(fence)) };
            match lasting(site.admin(server, "all").set_node(ask).await)? {
                Ok(row) => {
                    assert_eq!(row.state, "fenced");
                    Some(())
                }
                Err(refusal) if refusal.kind == "Uncertain" => None,
                Err(refusal) => panic!("{refusal:?}"),
            }
        })
        .await;
        let shown = self.shown(&name).await;
        assert_eq!(shown.state, "fenced", "an answered fence was lost");
        assert_eq!(shown.fence.expect("the fence").number, 1, "run {run}: the node was fenced twice");
        let left = row(&self.site, &format!("vol/default/{volume}/claim/{name}/web")).await;
        assert!(!left.contains("\"taken\""), "an answered fence has left a claim: {left}");
        // The machine goes on for a moment, by itself. Its word ends nothing, and it is granted nothing.
        let second = self.claims_after("n1", &volume, &[format!("{name}/web")]).await;
        assert_eq!(self.storage.lock().unwrap().at(&order), ["id of n1"], "run {run}");
        self.storage.lock().unwrap().users.insert(order.clone(), "id of n1".to_owned());
        self.until("the fenced node is answered", async |_, server| {
            let claimed = node.client(server).claim(node.ask(&volume, "web")).await;
            assert!(claimed.is_err(), "a fenced node was granted a claim");
            lasting(node.client(server).detached(node.owed(&volume, &granted.claim)).await)
        })
        .await
        .unwrap();
        self.has("n1", &volume, &second.claim).await;
        self.storage.lock().unwrap().users.remove(&order);
        self.detached("n1", &volume, &second.claim).await;
        self.rests(&volume).await;
        let forget = NodeChange { node: name.clone(), change: Some(Change::Forget(ForgetAsk {})) };
        self.until("the node is forgotten", async |site, server| {
            match lasting(site.admin(server, "all").set_node(forget.clone()).await)? {
                Ok(_) => Some(()),
                Err(refusal) if refusal.kind == "Uncertain" => None,
                Err(refusal) => panic!("{refusal:?}"),
            }
        })
        .await;
        assert_eq!(row(&self.site, &key).await, "", "an answered end of a node was lost");
    }

    async fn create(&mut self, run: usize) {
        let volume = format!("v{run}");
        let ask = create(&volume);
        let made = self.changed(|| What::Create(ask.clone())).await.unwrap();
        let id = made.external_id;
        let due = BTreeMap::from([(id.clone(), ask.capacity_min)]);
        assert_eq!(self.storage.lock().unwrap().made, due, "run {run}: one volume was asked for");
        let again = ChangeAsk { what: Some(What::Create(ask)) };
        let mut other = self.site.operator(1, "all");
        let again = answer(async || other.change(again.clone()).await).await.unwrap();
        assert_eq!((again.external_id.as_str(), again.standing.as_str()), (id.as_str(), "registered"));

        let expand = ExpandAsk { volume: volume.clone(), required: 8192, ..ExpandAsk::default() };
        let row = self.changed(|| What::Expand(expand.clone())).await.unwrap();
        assert_eq!((row.capacity, row.error.as_str()), (8192, ""));
        assert_eq!(self.storage.lock().unwrap().made[&id], 8192, "an answered expansion was lost");

        let snapshot = SnapshotAsk {
            volume: volume.clone(),
            name: "monday".into(),
            call: format!("snapshot of {volume}"),
            ..SnapshotAsk::default()
        };
        let row = self.changed(|| What::Snapshot(snapshot.clone())).await.unwrap();
        let of_volume = row.snapshot.expect("the snapshot").id;
        let due = BTreeMap::from([(of_volume.clone(), id.clone())]);
        assert_eq!(self.storage.lock().unwrap().snapshots, due, "run {run}: one snapshot was asked for");
        let delete = DeleteSnapshotAsk {
            plugin: "p".into(),
            snapshot: of_volume,
            call: format!("deletion of {volume}"),
        };
        self.changed(|| What::DeleteSnapshot(delete.clone())).await.unwrap();
        assert!(self.storage.lock().unwrap().snapshots.is_empty(), "run {run}: a snapshot is left");

        let delete = DeleteAsk { volume: volume.clone(), ..DeleteAsk::default() };
        self.changed(|| What::Delete(delete.clone())).await.unwrap();
        assert!(self.storage.lock().unwrap().made.is_empty(), "run {run}: a volume is left at the plugin");
        let left = self.site.raw().await.below(&format!("/csid/v1/vol/default/{volume}/")).await;
        let keys: Vec<_> = left.iter().map(|row| String::from_utf8_lossy(&row.key).into_owned()).collect();
        assert!(
            keys.iter().all(|key| key.contains("/past/")),
            "run {run}: a volume is left in etcd: {keys:?}"
        );
    }

    /// Returns the state of the cluster.
    async fn servers(&mut self) -> ServerRows {
        let rows = self
            .until("the servers are listed", async |site, server| {
                lasting(site.admin(server, "all").servers(ServersAsk {}).await)
            })
            .await;
        rows.unwrap()
    }

    async fn restore(&mut self, run: usize) {
        let (volume, claim) = (format!("v{run}"), format!("claim {run}"));
        let generation = self.servers().await.generation;
        self.until("the cluster recovers", async |site, server| {
            let ask = RestoredAsk { generation, past: 0 };
            lasting(site.admin(server, "all").restored(ask).await).map(|restored| restored.unwrap())
        })
        .await;
        let rows = self.servers().await;
        assert_eq!((rows.generation, rows.mode.as_str()), (generation + 1, "recovering"));
        let node = self.node("n1");
        let usage = Use {
            mode: "write".into(),
            access_mode: "single-node-writer".into(),
            attachment_mode: "file-system".into(),
        };
        let held = HeldClaim {
            claim: claim.clone(),
            call: "call 1".into(),
            volume: volume.clone(),
            consumer: "web".into(),
            uid: 1000,
            usage: Some(usage),
            plugin: "p".into(),
            external_id: format!("ext-{volume}"),
            granted_boot: node.hello.boot.clone(),
            ..HeldClaim::default()
        };
        let (boot, claims) = (node.hello.boot.clone(), vec![held]);
        let page = HeldClaims { boot, generation: generation + 1, claims, last: true };
        let held = self
            .until("the node has said what it holds", async |_, server| {
                lasting(node.client(server).hold(page.clone()).await)
            })
            .await;
        assert!(held.unwrap().refused.is_empty(), "run {run}");
        let rows = self.servers().await;
        assert_eq!(rows.awaited, Vec::<String>::new(), "an answered word of a node was lost");
        let end = ResumeAsk { generation: generation + 1, step: Step::End.into(), ..ResumeAsk::default() };
        self.until("the recovery has ended", async |site, server| {
            lasting(site.admin(server, "all").resume(end.clone()).await).map(|ended| ended.unwrap())
        })
        .await;
        assert_eq!(self.servers().await.mode, "normal");
        self.has("n1", &volume, &claim).await;
        self.detached("n1", &volume, &claim).await;
        self.rests(&volume).await;
    }
}

/// Returns the report of a node without a controller.
fn user(name: &str, plugin: &str) -> PluginReport {
    PluginReport {
        plugin: plugin.into(),
        attaches: Attaches::No.into(),
        node_id: format!("id of {name}"),
        ..PluginReport::default()
    }
}

/// Returns whether a refusal is no outcome: the call may have had its effect, or servers have undone an attach without an answer.
fn is_open(refusal: &Refusal) -> bool {
    refusal.kind == "Uncertain"
}

/// Returns the outcome of a call. `None`: the server has died, or a repeat may have another outcome.
fn lasting<T>(answer: Result<Response<T>, Status>) -> Option<Result<T, Refusal>> {
    match answer.map_err(|status| Refusal::of(&status)) {
        Ok(answer) => Some(Ok(answer.into_inner())),
        Err(Refusal { kind, .. })
            if ["", "Unavailable", "TimedOut", "Busy", "PluginUnavailable"].contains(&kind.as_str()) =>
        {
            None
        }
        Err(refusal) => Some(Err(refusal)),
    }
}

/// Returns the outcome of a call to the server that does not die.
async fn answer<T>(mut asked: impl AsyncFnMut() -> Result<Response<T>, Status>) -> Result<T, Refusal> {
    let mut outcome = None;
    eventually("the other server answers", async || {
        outcome = lasting(asked().await);
        outcome.is_some()
    })
    .await;
    outcome.unwrap()
}

/// Kills a server at each edge that it passes in an act, one after the other. Returns them.
async fn walk(act: Act) -> (Stage, BTreeSet<String>) {
    let mut stage = Stage::start(act).await;
    let mut reached = BTreeSet::new();
    for number in 1.. {
        match stage.run(&format!("any:{number}"), Duration::ZERO).await {
            Some(edge) => reached.insert(edge),
            None => break,
        };
    }
    (stage, reached)
}

#[tokio::test]
async fn server_dies_at_each_edge_and_nothing_is_lost() {
    let (mut stages, reached): (Vec<_>, Vec<_>) = join_all(ACTS.map(walk)).await.into_iter().unzip();
    let mut reached: BTreeSet<String> = reached.into_iter().flatten().collect();
    // A beat of the server may have had the number of another edge.
    for point in csid_server::points() {
        for stage in &mut stages {
            if reached.contains(&point) {
                break;
            }
            let wait = if point.starts_with("server.") { BEAT } else { Duration::ZERO };
            reached.extend(stage.run(&format!("{point}:1"), wait).await);
        }
    }
    let points: BTreeSet<String> = csid_server::points().into_iter().collect();
    assert_eq!(reached, points);
}

/// Each of these acts passes the edges of its own once more, in other states of the volume and the node.
#[tokio::test]
async fn server_dies_in_a_fence_or_a_creation() {
    let due = [
        (Act::Fence, &["node", "claims", "intent", "send", "outcome", "SetNode"][..]),
        (Act::Create, &["registration", "intent", "send", "outcome", "Change"][..]),
    ];
    let walks = join_all(due.map(|(act, _)| walk(act))).await;
    for ((mut stage, mut reached), (_, names)) in walks.into_iter().zip(due) {
        let of_names = |point: &String| names.iter().any(|name| point.starts_with(&format!("{name}.")));
        let due: BTreeSet<String> = csid_server::points().into_iter().filter(of_names).collect();
        // A beat of the server may have had the number of another edge.
        for point in due.difference(&reached.clone()) {
            reached.extend(stage.run(&format!("{point}:1"), Duration::ZERO).await);
        }
        assert!(!due.is_empty() && reached.is_superset(&due), "{:?}: {reached:?}", stage.act);
    }
}
