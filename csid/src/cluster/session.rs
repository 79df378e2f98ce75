//! The session with a server. When it ends, the node joins at the next server.

use std::collections::{BTreeMap, HashSet};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use csi_proto::cluster::v1::{
    Attaches, CallEnded, ClaimChanged, Drain, FromNode, Owed, PluginReport, Plugins as Report, ToNode,
    Welcome, from_node, to_node,
};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tonic::{Status, Streaming};

use crate::cluster::controller::refused;
use crate::cluster::expansions::{LastExpansions, expansion_name, is_expansion};
use crate::cluster::failure::read;
use crate::cluster::link;
use crate::cluster::node::{CLAIMS, FENCED, Joined, Node, OWN_VOLUMES, SessionState};
use crate::cluster::pauses::Pauses;
use crate::cluster::permits::{CALLS, Permits};
use crate::cluster::reconcile::{EVERY, FIRST, spread};
use crate::cluster::round::{Round, SessionEnd, TEXT};
use crate::config::OnFenced;
use crate::error::{Error, presentable};
use crate::fault;
use crate::plugin::{ATTACHES, Plugins};
use crate::random;
use crate::store::registry::VolumeName;
use crate::volume::Volumes;
use crate::volume::rules::check_name;

/// How long a server may take to answer a Hello.
const WELCOME: Duration = Duration::from_secs(15);
/// The pause between the end of a session and the next server.
const AFTER_SESSION: Duration = Duration::from_millis(200);
/// How long a node waits after a refusal that an administrator has to end.
const REFUSED: Duration = Duration::from_secs(10);
/// The time between two tries of a release that a server asked for.
const RELEASE: Duration = Duration::from_secs(10);
/// How long the end of a controller call waits for a server that reads slowly.
const ANSWER: Duration = Duration::from_secs(10);
/// The most volumes of its own that a refused host names.
const SHOWN: usize = 8;
/// Messages that wait for a slow server: the ends of all calls that may run at the same time, and more.
const OUTGOING: usize = CALLS + 64;
/// The controller calls that this csid knows, as a report says it.
const CALLS_KNOWN: u32 = 1;
/// The servers' words for a cluster that grants claims, and for one that recovers from a backup.
const NORMAL: &str = "normal";
const RECOVERING: &str = "recovering";
/// Why a node does not join at a server whose etcd has less than the node has seen. The servers have the same word.
const AHEAD: &str = "ahead-of-etcd";

impl Node {
    /// Keeps a session with a server, for ever. A host that has volumes from before the cluster does not join: neither side would know
    /// the other's claims.
    pub async fn run(self: Arc<Self>, volumes: Volumes, plugins: Plugins) {
        loop {
            match volumes.own_volumes().await {
                Ok(own) if own.is_empty() => break,
                Ok(own) => {
                    let names: Vec<String> = own.iter().take(SHOWN).map(ToString::to_string).collect();
                    let message =
                        format!("this host has {} volumes of its own: {}", own.len(), names.join(", "));
                    self.become_state(SessionState::Refused { reason: OWN_VOLUMES.to_owned(), message });
                }
                Err(error) => {
                    let message = format!("the journal was not read: {error}");
                    self.become_state(SessionState::Refused { reason: "journal".to_owned(), message });
                }
            }
            self.own.notified().await;
        }
        let mut pauses = Pauses::new();
        let mut leaving = JoinSet::new();
        loop {
            let mut round = Round::default();
            let servers = link::servers(&self.link, &self.name);
            match &servers {
                Ok(servers) if servers.is_empty() => {
                    round.note(format!("{} has no socket", self.link.display()))
                }
                Ok(_) => {}
                Err(error) => round.note(format!("{}: {error}", self.link.display())),
            }
            let mut fenced = false;
            for server in servers.unwrap_or_default() {
                let end = match self.join(&server, &volumes, &plugins).await {
                    Ok(session) => {
                        leaving.abort_all();
                        (round, fenced) = (Round::default(), false);
                        let begun = Instant::now();
                        let end = self.serve(session, &volumes, &plugins).await;
                        pauses.worked_for(begun.elapsed());
                        tokio::time::sleep(AFTER_SESSION).await;
                        end
                    }
                    Err(end) => end,
                };
                fenced |= matches!(&end, SessionEnd::Refused { reason, .. } if reason == FENCED);
                if let Some(state) = round.note_end(&server, end) {
                    // A server that is away says nothing against an earlier refusal. The end of the round decides.
                    if !(self.is_refused() && matches!(state, SessionState::CutOff { .. })) {
                        self.become_state(state);
                    }
                }
            }
            self.become_state(round.state());
            while leaving.try_join_next().is_some() {}
            // A fence is in etcd, so no other server has let this node join.
            if fenced && self.on_fenced == OnFenced::Unmount && leaving.is_empty() {
                leaving.spawn(leave(volumes.clone()));
            }
            tokio::time::sleep(if self.is_refused() { REFUSED } else { pauses.next(random::share()) }).await;
        }
    }

    /// Sets the state. The log has each change once.
    fn become_state(&self, state: SessionState) {
        let before = self.status();
        let is_new = {
            let present = self.state.borrow();
            (present.word(), present.server()) != (state.word(), state.server())
        };
        if is_new {
            self.begin_state();
        }
        self.remembered.end_session();
        self.state.send_replace(state);
        let now = self.status();
        if before != now {
            match self.is_joined() {
                true => tracing::info!("{now}"),
                false => tracing::warn!("{now}"),
            }
        }
    }

    /// Opens a session with a server.
    async fn join(&self, server: &str, volumes: &Volumes, plugins: &Plugins) -> Result<Session, SessionEnd> {
        // Nothing is claimed while this is set.
        let clean = match self.fence.number() {
            Some(number)
                if volumes
                    .has_nothing_of_servers()
                    .await
                    .map_err(|error| SessionEnd::Lost(error.to_string()))? =>
            {
                number
            }
            Some(_) | None => 0,
        };
        let lost = |text: &str| SessionEnd::Lost(text.to_owned());
        // A server that has less is refused by it: etcd has gone back.
        let seen = volumes.seen_of_servers().await.map_err(|error| SessionEnd::Lost(error.to_string()))?;
        let mut client = link::open(&self.link.join(server));
        let (to_server, receiver) = mpsc::channel(OUTGOING);
        let hello = FromNode { is: Some(from_node::Is::Hello(self.hello(clean, seen))) };
        // The channel is new, so there is a place.
        let _ = to_server.try_send(hello);
        let outgoing = futures_util::stream::unfold(receiver, |mut receiver| async {
            receiver.recv().await.map(|message| (message, receiver))
        });
        let opened = async {
            let mut from_server = client.session(outgoing).await?.into_inner();
            let first = from_server.message().await?;
            Ok((from_server, first))
        };
        let opened = tokio::time::timeout(WELCOME, opened).await.map_err(|_| lost("no answer to Hello"))?;
        let (from_server, first) = opened.map_err(|status| SessionEnd::Lost(text_of(&status)))?;
        let Welcome { generation, mode, node, revision, drain, forget, .. } =
            match first.and_then(|first| first.is) {
                Some(to_node::Is::Welcome(welcome)) => welcome,
                Some(to_node::Is::Refused(refused)) => {
                    if refused.reason == FENCED {
                        self.fence.begin(refused.fence, &self.boot, volumes).await;
                        // What a fenced node does with its mounts, csid.toml says.
                        self.set_drain(0);
                    }
                    let [reason, message] =
                        [refused.reason, refused.message].map(|text| presentable(&text, TEXT));
                    return Err(SessionEnd::Refused { reason, message });
                }
                _ => return Err(lost("the answer to Hello is neither Welcome nor Refused")),
            };
        if !node.is_empty() && node != self.name {
            let message = format!(
                "the certificate is of node {}, and csid.toml says {}",
                presentable(&node, TEXT),
                self.name
            );
            return Err(SessionEnd::Refused { reason: "another-name".to_owned(), message });
        }
        let recovers = mode == RECOVERING;
        // Nothing is granted while the cluster recovers. A server of an earlier version names no revision.
        let is_ahead = seen.0 > generation
            || (seen.0 == generation && (recovers || (revision > 0 && seen.1 > revision)));
        if is_ahead && !forget {
            let message = format!(
                "the server has generation {generation}, and this node has claims of generation {}",
                seen.0
            );
            return Err(SessionEnd::Refused { reason: AHEAD.to_owned(), message });
        }
        if forget {
            tracing::warn!(
                server,
                generation = seen.0,
                revision = seen.1,
                "an operator has had this node forget what it has seen"
            );
            volumes.forget_seen().await.map_err(|error| SessionEnd::Lost(error.to_string()))?;
        }
        // A fenced node may join as one that drains, and mounts nothing in between.
        self.set_drain(drain);
        self.fence.end(volumes).await;
        self.begin_generation(generation, revision);
        self.orders.begin(generation, revision);
        let recovery = recovers.then_some(generation);
        let mut session = Session { to_server, from_server, reported: BTreeMap::new(), recovery };
        session.report(plugins, &self.permits).map_err(|text| lost(&text))?;
        let recovers = mode != NORMAL;
        if recovers {
            tracing::warn!(server, "the cluster recovers, and grants nothing yet");
        }
        self.become_state(SessionState::Joined(Joined { server: server.to_owned(), recovers, client }));
        Ok(session)
    }

    /// Serves a session until it ends.
    async fn serve(
        self: &Arc<Self>,
        mut session: Session,
        volumes: &Volumes,
        plugins: &Plugins,
    ) -> SessionEnd {
        // The server learns now what has ended meanwhile.
        volumes.servers_are_back();
        let mut changes = plugins.subscribe();
        let mut comparison = pin!(tokio::time::sleep(spread(FIRST, random::share())));
        let mut comparing = JoinSet::new();
        let mut doing = JoinSet::new();
        let mut asked = HashSet::new();
        let mut saying = JoinSet::new();
        if let Some(generation) = session.recovery {
            saying.spawn(Arc::clone(self).say_held(generation, volumes.clone()));
        }
        let expansions = Arc::new(LastExpansions::default());
        let mut drained = self.drained.subscribe();
        // This server may not have the last report.
        drained.mark_changed();
        loop {
            tokio::select! {
                message = session.from_server.message() => match message {
                    Ok(Some(ToNode { is: Some(to_node::Is::Changed(changed)) })) => {
                        // A server asks once in a session. This one may not be a server of ours.
                        if is_plain(&changed) && asked.len() < CLAIMS && asked.insert(changed.claim.clone()) {
                            doing.spawn(Arc::clone(self).release(changed, volumes.clone()));
                        }
                    }
                    Ok(Some(ToNode { is: Some(to_node::Is::Expand(expand)) })) => {
                        let name = expansion_name(&expand);
                        if is_expansion(&expand)
                            && expansions.note(&name, expand, CLAIMS)
                            && asked.len() < CLAIMS
                            && asked.insert(name.clone())
                        {
                            let expansions = Arc::clone(&expansions);
                            doing.spawn(Arc::clone(self).expand(name, expansions, volumes.clone()));
                        }
                    }
                    Ok(Some(ToNode { is: Some(to_node::Is::Call(call)) })) => {
                        let to_server = session.to_server.clone();
                        match self.admit(&call) {
                            // A call goes on when its session ends.
                            Ok(place) => {
                                let made = Arc::clone(self).make_call(call, volumes.clone());
                                tokio::spawn(async move {
                                    answer(&to_server, made.await).await;
                                    drop(place);
                                });
                            }
                            Err(error) => {
                                if let Some(left_out) = self.refusals.next() {
                                    tracing::warn!(server = self.status(), %error, left_out, "a controller call was not begun");
                                }
                                answer(&to_server, refused(&call, error)).await;
                            }
                        }
                    }
                    Ok(Some(ToNode { is: Some(to_node::Is::Drain(Drain { number })) })) => self.set_drain(number),
                    // Another first answer, or a message of a later version.
                    Ok(Some(_)) => {}
                    Ok(None) => return SessionEnd::Lost("the server has ended the session".to_owned()),
                    Err(status) => return SessionEnd::Lost(text_of(&status)),
                },
                change = changes.recv() => {
                    if matches!(change, Err(RecvError::Closed)) {
                        return SessionEnd::Lost("csid stops".to_owned());
                    }
                    if let Err(text) = session.report(plugins, &self.permits) {
                        return SessionEnd::Lost(text);
                    }
                }
                Ok(()) = drained.changed() => {
                    let report = drained.borrow_and_update().clone().map(from_node::Is::Drained);
                    if let Some(report) = report
                        && let Err(text) = fault::around("Drained", async { session.send(report) }).await
                    {
                        return SessionEnd::Lost(text);
                    }
                }
                () = &mut comparison, if comparing.is_empty() => {
                    comparison.as_mut().reset(tokio::time::Instant::now() + spread(EVERY, random::share()));
                    comparing.spawn(Arc::clone(self).end_unheld(volumes.clone()));
                }
                Some(_) = comparing.join_next() => {}
                Some(_) = saying.join_next() => {}
                Some(ended) = doing.join_next() => {
                    if let Ok(name) = ended {
                        // A request may have come when the task was about to end.
                        match expansions.of(&name) {
                            None => drop(asked.remove(&name)),
                            Some(_) => {
                                let expansions = Arc::clone(&expansions);
                                drop(doing.spawn(Arc::clone(self).expand(name, expansions, volumes.clone())));
                            }
                        }
                    }
                }
            }
        }
    }

    /// Releases a claim that the servers want back, and repeats that until it is done or the session ends.
    /// Returns the claim's name.
    async fn release(self: Arc<Self>, changed: ClaimChanged, volumes: Volumes) -> String {
        let ClaimChanged { claim, namespace, volume, consumer, state: _ } = changed;
        let name = VolumeName { namespace, volume };
        loop {
            let released = match volumes.release_asked(name.clone(), consumer.clone(), &claim).await {
                Ok(true) => return claim,
                // This node has no such claim. It may have the volume mounted for another one.
                Ok(false) => {
                    let owed = Owed {
                        claim: claim.clone(),
                        namespace: name.namespace.clone(),
                        volume: name.volume.clone(),
                        consumer: consumer.clone(),
                        ..Owed::default()
                    };
                    self.report_unheld(owed, &volumes).await
                }
                Err(error) => Err(error),
            };
            match released {
                Ok(()) => return claim,
                Err(error) => {
                    tracing::warn!(volume = %name, consumer, %error, "a claim that the cluster wants back is not released yet");
                }
            }
            tokio::time::sleep(RELEASE).await;
        }
    }
}

/// Gives up what a fenced host has of the servers' volumes. What is in use stays until the next refusal.
async fn leave(volumes: Volumes) {
    if let Err(error) = volumes.leave_servers().await {
        tracing::warn!(%error, "this host is fenced, and does not give up all volumes of the servers yet");
    }
}

/// Sends the end of a call to the server that has sent the call. If its session is over, the server has given the call up.
async fn answer(to_server: &mpsc::Sender<FromNode>, ended: CallEnded) {
    let message = FromNode { is: Some(from_node::Is::Ended(ended)) };
    let _ = fault::around("CallEnded", to_server.send_timeout(message, ANSWER)).await;
}

/// Returns whether a message has names, and no other text.
fn is_plain(changed: &ClaimChanged) -> bool {
    let ClaimChanged { claim, namespace, volume, consumer, state: _ } = changed;
    let names = [("claim", claim), ("namespace", namespace), ("volume", volume), ("consumer", consumer)];
    names.into_iter().all(|(what, name)| check_name(what, name).is_ok())
}

/// An open session.
struct Session {
    to_server: mpsc::Sender<FromNode>,
    from_server: Streaming<ToNode>,
    /// What was reported last of each plugin. A plugin that stops has the same volumes, so what is known of it stays.
    reported: BTreeMap<String, PluginReport>,
    /// The generation in which the cluster recovers. `None`: it does not.
    recovery: Option<u64>,
}

impl Session {
    /// Reports which plugins attach volumes, and what their controllers need, if that has changed. Fails if the server does not take it.
    fn report(&mut self, plugins: &Plugins, permits: &Permits) -> Result<(), String> {
        let mut now = BTreeMap::new();
        for view in plugins.list() {
            let before = self.reported.get(&view.id).cloned().unwrap_or_default();
            let attaches = match plugins.can(&view.id, ATTACHES) {
                Some(true) => Attaches::Yes,
                Some(false) => Attaches::No,
                None => before.attaches(),
            };
            let node_id = Some(plugins.node_id(&view.id)).filter(|id| !id.is_empty());
            // A plugin that has not been probed yet has no name of the node, either.
            let max_volumes = match view.node_id.is_empty() {
                true => before.max_volumes,
                false => Some(u64::try_from(view.max_volumes).unwrap_or(0)),
            };
            let report = PluginReport {
                plugin: view.id.clone(),
                max_volumes,
                attaches: attaches.into(),
                node_id: node_id.unwrap_or(before.node_id),
                controller: permits.has(&view.id) && plugins.has_roots_controller(&view.id),
                calls: CALLS_KNOWN,
            };
            now.insert(view.id, report);
        }
        if now == self.reported {
            return Ok(());
        }
        self.send(from_node::Is::Plugins(Report { plugins: now.values().cloned().collect() }))?;
        self.reported = now;
        Ok(())
    }

    /// Sends a message. Fails if the server does not take it.
    fn send(&self, is: from_node::Is) -> Result<(), String> {
        self.to_server
            .try_send(FromNode { is: Some(is) })
            .map_err(|_| "the server takes no message".to_owned())
    }
}

fn text_of(status: &Status) -> String {
    Error::from(read(status)).message
}
