//! The task of one instance. It alone owns the channel, capabilities and health, and supervises the process.
//!
//! ```text
//!              managed: unit runs      connects             Probe true, fingerprint
//!   failed <-> starting ----------------------> probing -----------------------------> ready
//!     ^                                            ^ |                                  | heartbeat or
//!     |   process ended, or started by csid        | v Probe fails                      v connection lost
//!     |   and not ready in 30 s                    | |                                  |
//!     +-------------------------------------- unhealthy <-------------------------------+
//! ```
//!
//! A process that ended is started again, without end: `life` has the pauses. The ends of the connection and of the process are
//! signalled. While the plugin is healthy, the heartbeat of 30 s is the only poll.

mod life;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio::sync::{Notify, broadcast, mpsc, oneshot, watch};

use crate::backoff::Backoff;
use crate::error::{Error, Result};
use crate::host::units::{Units, UnitsError};
use crate::plugin::channel;
use crate::plugin::common::Common;
use crate::plugin::errors::node_id::NodeIdError;
use crate::plugin::errors::process::ProcessError;
use crate::plugin::events;
use crate::plugin::fingerprint::{self, Fingerprint, FingerprintError, Identity, PartialFingerprint};
use crate::plugin::instance::{Instance, Load};
use crate::plugin::namespace;
use crate::plugin::node::Ready;
use crate::plugin::node_ids::NodeIds;
use crate::plugin::place::Location;
use crate::plugin::rpc::{Limit, Peer, RpcError, Stops, presentable};
use crate::plugin::rpc_outcome::Class;
use crate::plugin::spec::{Log, PluginSpec, Supervision};
use crate::plugin::supervise;
use crate::plugin::view::{PluginChange, PluginView, Service};
use crate::plugin::visible::{self, HidingSetting};
use crate::store::Store;

/// How fast a plugin is looked at. Only tests have another.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// Between two Probes of a plugin that is not ready.
    pub probe: Duration,
    /// A plugin that this csid started is ready by then, or started again. One that it adopted is left alone.
    pub start: Duration,
    pub heartbeat: Duration,
    /// All RPCs of one look together.
    pub patience: Duration,
    /// Before the first new start of a plugin that ended; each that follows waits twice as long.
    pub restart: Duration,
    /// The longest pause. After a plugin was ready for so long, the pauses are reset.
    pub longest: Duration,
    /// The last Probe when csid stops.
    pub last: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Pace {
            probe: Duration::from_secs(5),
            start: Duration::from_secs(30),
            heartbeat: Duration::from_secs(30),
            patience: Duration::from_secs(30),
            restart: Duration::from_millis(500),
            longest: Duration::from_secs(60),
            last: Duration::from_secs(1),
        }
    }
}

/// Connecting is tried again after this, and twice that, up to a second.
const FIRST_POLL: Duration = Duration::from_millis(20);
const LAST_POLL: Duration = Duration::from_secs(1);

/// How the message of a plugin that failed goes on.
pub(super) const AGAIN: &str = "; it is started again";

/// The state of an instance at one moment.
#[derive(Clone)]
pub(super) struct InstanceState {
    pub view: Arc<PluginView>,
    /// The handle for calls. `Some` exactly while the plugin is healthy.
    pub ready: Option<Ready>,
}

/// A Probe that was asked for, and where its answer goes.
pub(super) type Asked = oneshot::Sender<Result<bool>>;

pub(super) struct Stop {
    pub how: How,
    pub done: oneshot::Sender<Result<()>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// End the task, leave the process.
    Leave,
    /// Stop the unit too, if csid has defined it. If that fails, the task goes on.
    Unit,
    /// The same, and the task goes on, which starts it again.
    Restart,
    /// csid stops: one last Probe, then unhealthy.
    Last,
}

/// Handles that all tasks share.
#[derive(Clone)]
pub(super) struct TaskContext {
    pub store: Store,
    pub units: Units,
    pub changes: broadcast::Sender<PluginChange>,
    pub closed: Arc<AtomicBool>,
    pub limit: Limit,
    pub node_ids: Arc<NodeIds>,
    pub namespaces: namespace::Namespaces,
    pub pace: Pace,
}

pub(super) struct Task {
    shared: TaskContext,
    spec: PluginSpec,
    place: Location,
    peer: Peer,
    /// A connection of the channel has ended.
    ended: Arc<Notify>,
    state: watch::Sender<InstanceState>,
    probes: mpsc::Receiver<Asked>,
    /// Probes that the next look answers.
    asked: Vec<Asked>,
    view: PluginView,
    print: Option<Fingerprint>,
    /// Why the host does not see what this process mounts; `None`: that was not looked at yet.
    hidden: Option<Option<HidingSetting>>,
    /// The process, where csid has not started it itself.
    adopted: Option<u32>,
    load: Arc<Load>,
    backoff: Backoff,
    /// When the process that runs was ready first.
    ready_since: Option<Instant>,
    /// The states that an event reported since the plugin was ready. Each try would repeat them.
    reported: Vec<&'static str>,
}

/// The result of one probe.
enum Look {
    Ready,
    Wait,
    NotConnected(String),
    Failed(String),
    /// The plugin answers, but must not mount while this process lives, for this reason.
    Hidden(HidingSetting),
}

impl Task {
    pub fn new(
        shared: TaskContext,
        id: &str,
        spec: PluginSpec,
        owner: u32,
        place: Location,
        probes: mpsc::Receiver<Asked>,
        common: Arc<Common>,
    ) -> (Self, watch::Receiver<InstanceState>) {
        let ended = Arc::new(Notify::new());
        let listener = match place.user {
            Some(_) => {
                channel::AllowedListener::Unit { units: shared.units.clone(), unit: place.unit.clone() }
            }
            None => channel::AllowedListener::Owner(owner),
        };
        common.bound_node_calls(spec.node_calls_at_once());
        let own = spec.rpc_deadline().ok().flatten().map(Limit::new);
        let peer = Peer {
            id: id.into(),
            channel: channel::open(&place.socket, listener, ended.clone(), common.listeners.clone()),
            limit: own.unwrap_or_else(|| shared.limit.clone()),
            closed: shared.closed.clone(),
            stops: Stops::default(),
            common,
        };
        let (name, collected) = match spec.supervision {
            Supervision::Managed => ("managed", spec.log == Log::Journal),
            Supervision::Unit => ("unit", spec.log == Log::Journal),
            // csid alone collects a managed plugin's log. It does not see an external plugin's.
            Supervision::External => ("external", false),
        };
        let view = PluginView {
            id: id.to_owned(),
            state: "starting",
            supervision: name,
            unit: place.unit.clone(),
            socket: place.socket.to_string_lossy().into_owned(),
            instances: vec![spec.instance().to_owned()],
            log: if collected { "journal" } else { "none" },
            owner,
            ..PluginView::default()
        };
        let (state, seen) = watch::channel(InstanceState { view: Arc::new(view.clone()), ready: None });
        let (asked, print, hidden, adopted, load) = (Vec::new(), None, None, None, Arc::default());
        let backoff = Backoff::between(shared.pace.restart, shared.pace.longest);
        let (ready_since, reported) = (None, Vec::new());
        let task = Task {
            shared,
            spec,
            place,
            peer,
            ended,
            state,
            probes,
            asked,
            view,
            print,
            hidden,
            adopted,
            load,
            backoff,
            ready_since,
            reported,
        };
        (task, seen)
    }

    pub async fn run(mut self, mut stops: mpsc::Receiver<Stop>) {
        loop {
            let stop = tokio::select! {
                biased;
                stop = stops.recv() => stop,
                never = self.live() => match never {},
            };
            let Some(stop) = stop else { return };
            let answer = self.stop(stop.how).await;
            let over = answer.is_ok() && stop.how != How::Restart;
            self.answer(|| Err(ProcessError::Stopped.into()));
            let _ = stop.done.send(answer);
            if over {
                return;
            }
        }
    }

    async fn stop(&mut self, how: How) -> Result<()> {
        match how {
            How::Leave => {}
            How::Unit if self.spec.supervision != Supervision::Managed => {}
            How::Unit => self.stop_unit(how).await?,
            How::Restart => {
                self.stop_unit(how).await?;
                self.backoff.reset();
                self.restarted(Some("it was asked for".to_owned())).await;
                self.set("starting", "", None).await;
                return Ok(());
            }
            How::Last => {
                let last = fingerprint::probe(&self.peer, Instant::now() + self.shared.pace.last).await;
                let message = match last {
                    Ok(_) => "csid stops; the plugin goes on".to_owned(),
                    Err(error) => format!("csid stops; the last Probe: {error}"),
                };
                self.set("unhealthy", &message, None).await;
                return Ok(());
            }
        }
        self.set("stopped", "", None).await;
        Ok(())
    }

    /// Calls of it fail with PluginShutdown from here on, until it is to be started again.
    async fn stop_unit(&mut self, how: How) -> Result<()> {
        self.peer.stops.begin();
        self.set("stopping", "", None).await;
        let stopped = match self.spec.supervision {
            Supervision::Unit => supervise::restart(&self.shared.units, &self.place).await,
            Supervision::Managed | Supervision::External => self.stop_own(how == How::Unit).await,
        };
        if stopped.is_err() || how == How::Restart {
            self.peer.stops.end();
        }
        stopped.map_err(|source| ProcessError::NotStopped { id: self.view.id.clone(), source }.into())
    }

    /// Stop the unit that csid has defined, then what its network was made by, if it leaves for good or has it made again.
    async fn stop_own(&self, leaves: bool) -> std::result::Result<(), UnitsError> {
        supervise::stop(&self.shared.units, &self.place).await?;
        match leaves || self.place.network.is_some() {
            true => namespace::clear(&self.shared.units, &self.spec.network, &self.shared.namespaces).await,
            false => Ok(()),
        }
    }

    /// Makes and keeps contact. Returns why a process whose time is `limited` was never ready. Each answer "not ready" to
    /// Probe begins the limit again.
    async fn contact(&mut self, limited: bool) -> String {
        let limit = Instant::now() + self.shared.pace.start;
        let mut reached = false;
        loop {
            let limit = (limited && !reached).then_some(limit);
            if let Err(why) = self.reach(limit).await {
                return why;
            }
            reached = true;
            self.ready_since.get_or_insert_with(Instant::now);
            self.healthy().await;
        }
    }

    /// Probe until ready; an error is the end of the start limit.
    async fn reach(&mut self, mut limit: Option<Instant>) -> std::result::Result<(), String> {
        let since = Instant::now();
        let mut poll = FIRST_POLL;
        loop {
            let patience = Instant::now() + self.shared.pace.patience;
            let pause = match self.look(true, limit.map_or(patience, |limit| limit.min(patience))).await {
                Look::Ready => return Ok(()),
                Look::Wait => {
                    self.set("probing", "Probe says that the plugin is not ready yet", None).await;
                    // The plugin answers, and says that it works. Started again it would begin from the start.
                    limit = limit.map(|_| Instant::now() + self.shared.pace.start);
                    self.shared.pace.probe
                }
                Look::Failed(why) => {
                    self.set("unhealthy", &why, None).await;
                    self.shared.pace.probe
                }
                Look::Hidden(hidden) => {
                    self.set_hidden(&hidden).await;
                    // Started again it would be hidden again: that is the administrator's to change.
                    limit = None;
                    self.shared.pace.heartbeat
                }
                Look::NotConnected(why) => {
                    let starting = self.view.state == "starting" && since.elapsed() < self.shared.pace.start;
                    self.set(if starting { "starting" } else { "unhealthy" }, &why, None).await;
                    poll = (poll * 2).min(LAST_POLL);
                    poll
                }
            };
            let left = limit.map(|limit| limit.saturating_duration_since(Instant::now()));
            self.pause(left.map_or(pause, |left| left.min(pause))).await;
            if limit.is_some_and(|limit| Instant::now() >= limit) {
                let last = &self.view.health_message;
                return Err(format!("not ready within {:?}: {last}", self.shared.pace.start));
            }
        }
    }

    /// Watch a plugin that is ready; returns when it is not any more.
    async fn healthy(&mut self) {
        let mut ended_at: Option<Instant> = None;
        loop {
            let ended = self.ended.clone();
            let reconnected = tokio::select! {
                biased;
                () = ended.notified() => true,
                () = self.pause(self.shared.pace.heartbeat) => false,
            };
            if reconnected {
                // A plugin that ends every connection is not asked for one without pause.
                if ended_at.is_some_and(|at| at.elapsed() < LAST_POLL) {
                    tokio::time::sleep(LAST_POLL).await;
                }
                ended_at = Some(Instant::now());
            }
            // Another connection may be another process: who it is is asked again.
            match self.look(reconnected, Instant::now() + self.shared.pace.patience).await {
                Look::Ready => {}
                Look::Wait => {
                    return self
                        .set("probing", "Probe says that the plugin is not ready any more", None)
                        .await;
                }
                Look::NotConnected(why) | Look::Failed(why) => {
                    return self.set("unhealthy", &why, None).await;
                }
                Look::Hidden(hidden) => return self.set_hidden(&hidden).await,
            }
        }
    }

    /// Probe, and if ready ask what the plugin can do; `whole`: also who it is. Then the Probes that were asked for are
    /// answered.
    async fn look(&mut self, whole: bool, deadline: Instant) -> Look {
        while let Ok(asked) = self.probes.try_recv() {
            self.asked.push(asked);
        }
        // A connection that ended before is not the one that answers now.
        let _ = self.ended.notified().now_or_never();
        let probed = fingerprint::probe(&self.peer, deadline).await;
        let look = match &probed {
            Err(error) => failed(error.clone()),
            Ok(false) => Look::Wait,
            Ok(true) => self.fingerprint(whole, deadline).await,
        };
        // A process that has just been started listens soon, and the answer waits for it.
        let starts = self.view.state == "starting" && self.spec.supervision != Supervision::External;
        if !(starts && matches!(look, Look::NotConnected(_))) {
            self.answer(|| probed.clone().map_err(Error::from));
        }
        look
    }

    async fn fingerprint(&mut self, whole: bool, deadline: Instant) -> Look {
        let known = self.print.as_ref().filter(|_| !whole).map(|print| &print.identity);
        let mut facts = PartialFingerprint::default();
        let taken = fingerprint::take(&self.peer, known, deadline, &mut facts).await;
        if taken.is_err() {
            self.keep(facts);
        }
        match taken {
            Ok(print) => match self.hidden(&print).await {
                Ok(None) => {
                    self.found(print).await;
                    Look::Ready
                }
                Ok(Some(hidden)) => Look::Hidden(hidden),
                Err(error) => Look::Failed(error.to_string()),
            },
            Err(FingerprintError::Rpc(error)) => failed(error),
            Err(error) => Look::Failed(error.to_string()),
        }
    }

    /// Why the host does not see what the plugin mounts, if it does any mounts.
    async fn hidden(
        &mut self,
        print: &Fingerprint,
    ) -> std::result::Result<Option<HidingSetting>, UnitsError> {
        if self.place.unit.is_empty() || !print.services.contains(&Service::Node.name()) {
            return Ok(None);
        }
        if self.hidden.is_none() {
            let (units, unit) = (&self.shared.units, &self.place.unit);
            let hidden = visible::hidden(units, &self.view.id, &self.spec, unit, self.adopted);
            self.hidden = Some(hidden.await?);
        }
        Ok(self.hidden.clone().flatten())
    }

    /// Shows what a plugin has answered of a fingerprint that failed. What it has not answered stays as it was; the provider's
    /// name is not shown before all is known (`lookup::known`).
    fn keep(&mut self, facts: PartialFingerprint) {
        let owned = |names: Vec<&'static str>| names.into_iter().map(str::to_owned).collect();
        let PartialFingerprint { plugin, node, controller, identity } = facts;
        if let Some(plugin) = plugin {
            self.view.plugin_capabilities = owned(plugin);
        }
        for (service, capabilities) in [(Service::Node, node), (Service::Controller, controller)] {
            let Some(capabilities) = capabilities else { continue };
            let (at, kept) = match service {
                Service::Node => (0, &mut self.view.node_capabilities),
                Service::Controller => (self.view.services.len(), &mut self.view.controller_capabilities),
            };
            let is_shown = self.view.services.iter().any(|shown| shown == service.name());
            match capabilities.is_some() {
                true if !is_shown => self.view.services.insert(at, service.name().to_owned()),
                true => {}
                false => self.view.services.retain(|shown| shown != service.name()),
            }
            *kept = owned(capabilities.unwrap_or_default());
        }
        if let Some(identity) = identity {
            self.view.node_id = presentable(&identity.node_id);
            self.place_of(&identity);
        }
    }

    fn place_of(&mut self, identity: &Identity) {
        self.view.max_volumes = identity.max_volumes;
        self.view.topology =
            identity.topology.iter().map(|(key, value)| (presentable(key), presentable(value))).collect();
    }

    async fn found(&mut self, print: Fingerprint) {
        let (id, store) = (self.view.id.clone(), self.shared.store.clone());
        let identity = &print.identity;
        self.view.provider = presentable(&identity.name);
        self.view.provider_version = presentable(&identity.version);
        self.place_of(identity);
        let owned = |names: &[&'static str]| names.iter().map(|name| (*name).to_owned()).collect();
        self.view.services = owned(&print.services);
        self.view.plugin_capabilities = owned(&print.plugin);
        self.view.node_capabilities = owned(&print.node);
        self.view.controller_capabilities = owned(&print.controller);
        let node_id = presentable(&identity.node_id);
        self.view.node_id = node_id;
        let now = &identity.node_id;
        let is_news = self.print.as_ref().is_none_or(|before| before.identity.node_id != *now);
        self.shared.node_ids.seen(&store, &id, now).await;
        let agreed = self.shared.node_ids.other_than(&id, now);
        if let Some(agreed) = agreed.as_ref().filter(|_| is_news) {
            tracing::warn!(plugin = %id, from = %agreed, to = %now, "the plugin's node id changed");
            events::node_id(&store, &self.view, agreed).await;
        }
        let health =
            agreed.map(|agreed| NodeIdError::disputed(&id, now, &agreed).to_string()).unwrap_or_default();
        if self.print.as_ref() != Some(&print) {
            events::fingerprint(&store, &self.view).await;
        }
        let (root, view) = (self.place.root.clone(), self.place.view.clone());
        let (peer, owner) = (self.peer.clone(), self.view.owner);
        let (print_now, load) = (print.clone(), self.load.clone());
        let ready = Ready(Arc::new(Instance { peer, owner, print: print_now, root, view, load }), None);
        self.print = Some(print);
        self.set("ready", &health, Some(ready)).await;
    }

    async fn set(&mut self, state: &'static str, message: &str, ready: Option<Ready>) {
        self.set_because(state, message, false, ready).await;
    }

    async fn set_hidden(&mut self, hidden: &HidingSetting) {
        self.set_because("unhealthy", &hidden.why, hidden.by_unit, None).await;
    }

    /// The one place where a plugin's state changes: it is seen at once, and its health's turns are events.
    async fn set_because(
        &mut self,
        state: &'static str,
        message: &str,
        hidden_by_unit: bool,
        ready: Option<Ready>,
    ) {
        let (from, was_healthy) = (self.view.state, self.view.healthy);
        self.view.state = state;
        self.view.hidden_by_unit = hidden_by_unit;
        self.view.healthy = ready.is_some();
        if self.view.health_message != message {
            self.view.health_message = message.to_owned();
        }
        let changed = *self.state.borrow().view != self.view;
        self.state.send_modify(|snapshot| {
            if changed {
                snapshot.view = Arc::new(self.view.clone());
            }
            snapshot.ready = ready;
        });
        if changed {
            let _ = self.shared.changes.send(PluginChange::Changed(self.view.id.clone()));
        }
        let turned = was_healthy != self.view.healthy && !matches!(state, "stopping" | "stopped");
        let fell = matches!(state, "unhealthy" | "failed") && !self.reported.contains(&state);
        if turned || fell {
            match self.view.healthy {
                true => self.reported.clear(),
                false => self.reported.push(state),
            }
            events::health(&self.shared.store, &self.view, from).await;
        }
    }

    fn answer(&mut self, answer: impl Fn() -> Result<bool>) {
        for asked in self.asked.drain(..) {
            let _ = asked.send(answer());
        }
    }

    /// Wait, unless a Probe is asked for.
    async fn pause(&mut self, pause: Duration) {
        tokio::select! {
            Some(asked) = self.probes.recv() => self.asked.push(asked),
            () = tokio::time::sleep(pause) => {}
        }
    }
}

fn failed(error: RpcError) -> Look {
    match error.class {
        Class::NotSent => Look::NotConnected(error.message),
        _ => Look::Failed(error.to_string()),
    }
}
