//! The daemon: start, status, reload, stop. It alone sees all rooms.
//!
//! The order of the start: configuration, journal, plugins' tasks, what is mounted is adopted, READY, and only then what has
//! to be mounted again, so that a plugin that is not there keeps nobody waiting. The private socket listens before csid is
//! there (systemd holds it); calls that come in early wait in it.
//!
//! With a damaged journal csid runs to be asked, and takes nothing over; when a new one was begun it starts again within
//! the process, with all of its memory new.

mod notify;
mod panics;
mod reload;
mod sockets;

use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use sd_notify::NotifyState;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use crate::bus::{self, Limits, Rooms, State};
use crate::busy_poll::{self, RunningThreads};
use crate::cluster;
use crate::config::Directories;
use crate::error::with_causes;
use crate::fault;
use crate::host::{self, Host, boot};
use crate::log;
use crate::metrics;
use crate::plugin::{EarlierSecrets, Plugins, files};
use crate::store::registry::{Registry, RegistryError};
use crate::store::rows::Phase;
use crate::store::{Health, JournalDirectory, Loaded, Store, StoreError};
use crate::unix_signals::{SignalOrder, UnixSignals};
use crate::volume::model::volume::Action;
use crate::volume::servers::Servers;
use crate::volume::{OperationKind, Recovered, Volumes, earlier_secrets};
use notify::notify;
use reload::{Handles, keep_roots, load_config, read_configuration};
use sockets::Sockets;

const USAGE: &str = "csid: a CSI volume manager for a plain Linux host; started by csid.service

  csid                  run
  csid --check-config   read the configuration and say what is wrong with it
  csid --version        the version

The configuration is in /etc/csid (csid.toml, plugins.d/*.toml, volumes.d/*.toml); see csid(8) and csictl(1).";

/// How long csid waits at its end for operations under way. The journal keeps the rest.
const STOP_PATIENCE: Duration = Duration::from_secs(3);
/// How long csid unmounts targets when the system goes down; less than systemd waits for a service to stop.
const UNMOUNT_PATIENCE: Duration = Duration::from_secs(30);

/// Runs csid.
pub fn main() -> ExitCode {
    main_with(&|store| Ok(Arc::new(store.clone())))
}

/// Returns the registry of the volumes for a csid with this journal.
pub type OpenRegistry = dyn Fn(&Store) -> anyhow::Result<Arc<dyn Registry>>;

/// Runs csid with another registry than the journal's.
pub fn main_with(registry: &OpenRegistry) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let directories = Directories::from_environment();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => {}
        ["--check-config"] => return report(read_configuration(&directories).map(drop)),
        ["--version"] => {
            println!("csid {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        ["--help" | "-h"] => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        ["--fault-points"] if cfg!(feature = "fault") => {
            fault::points(Action::ALL.iter().map(|action| action.name()))
                .iter()
                .for_each(|point| println!("{point}"));
            return ExitCode::SUCCESS;
        }
        // Started by csid itself, in a unit of its own.
        [host::exec::HELPER, record] => return host::enter::begin(Path::new(record)),
        [host::enter::COPY, record] => return host::enter::main(Path::new(record)),
        // Started by csid-helper.socket.
        ["host-helper"] => return host::helper::worker::main(),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    }
    host::keep_heap_small();
    log::begin();
    panics::end_csid();
    report(start(directories, registry))
}

/// The log's advice on a journal of a newer csid.
const NEWER: &str = "Install the newer csid again, or restore the backup of the journal from before it. If no newer csid was ever \
                     here, the file is damaged: move it aside, then start csid.";

fn report(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("csid: {}", with_causes(error.as_ref()));
            if let Some(StoreError::Newer { .. }) = error.downcast_ref() {
                eprintln!("csid: {NEWER}");
            }
            ExitCode::FAILURE
        }
    }
}

/// Makes the directories, if systemd has not, and the one of registrations. Returns their names without symbolic links.
fn made_and_resolved(directories: Directories) -> anyhow::Result<Directories> {
    let resolved = |path: &Path| {
        std::fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))?;
        host::resolve(path).with_context(|| path.display().to_string())
    };
    let (state, runtime) = (resolved(&directories.state)?, resolved(&directories.runtime)?);
    let directories = Directories { state, runtime, ..directories };
    // A plugin that starts after csid makes its socket there at once. If it cannot be made, `watch_registrations` says so.
    let _ = std::fs::DirBuilder::new().mode(0o700).create(directories.registrations());
    Ok(directories)
}

/// The stack of each thread of the runtime. Memory is used as far as the stack has grown. A build without optimisation used up the
/// default of 2 MiB in the retry of a claimed mount, whose futures are nested.
const STACK: usize = 8 * 1024 * 1024;

/// A busy worker of the runtime asks the kernel for events after so many polls of tasks. With tokio's 61 each question finds few
/// events (docs/performance.md, "Places of the helper, and questions to the kernel").
const POLLS: u32 = 200;

/// After so many events csid gives freed memory back to the host, once nothing has changed for [`REST`].
const BURST: u64 = 1_000;
const REST: Duration = Duration::from_secs(1);

fn start(directories: Directories, registry: &OpenRegistry) -> anyhow::Result<()> {
    // Secrets pass through this process: it makes no core dump, and no debugger may attach.
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)?;
    let (mut sockets, mut signals) = (None, None);
    loop {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .event_interval(POLLS)
            .thread_stack_size(STACK)
            .enable_all()
            .build()?;
        let ended = runtime.block_on(Daemon::run(directories.clone(), registry, &mut sockets, &mut signals));
        // A thread that hangs in the kernel on a dead file system does not hold csid's end.
        runtime.shutdown_background();
        match ended? {
            Ended::Stopped => return Ok(()),
            Ended::Replaced => tracing::info!("csid starts again with the new journal"),
        }
    }
}

/// Why csid has ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ended {
    Stopped,
    /// A new journal took a damaged one's place: everything in memory is of the old one.
    Replaced,
}

/// The status line's part about mounts from before csid's start.
struct Restoration {
    begun: Instant,
    /// Adopted at once, and to be mounted again.
    mounts: u64,
    /// How many are back, and when the last try for the others ended.
    done: Option<(u64, Duration)>,
}

impl Restoration {
    fn tell(&mut self, waiting: u64, under_way: bool) -> String {
        if self.done.is_none() && !under_way {
            self.done = Some((self.mounts.saturating_sub(waiting), self.begun.elapsed()));
        }
        match self.done {
            _ if self.mounts == 0 => String::new(),
            Some((back, took)) => format!("; restored {back} in {} ms", took.as_millis()),
            None => format!("; restoring {waiting} of {}", self.mounts),
        }
    }
}

struct Daemon {
    handles: Handles,
    state: watch::Sender<State>,
    restoration: Restoration,
    /// The journal's rows, while its disk is too full to take them over; they are read all the same.
    untaken: Option<Untaken>,
    /// This host as a node of a cluster. `None`: csid is alone.
    node: Option<Arc<cluster::Node>>,
}

/// The rows that recovery has still to take over.
struct Untaken {
    boot: String,
    same_boot: bool,
}

impl Daemon {
    /// Runs until csid ends. `sockets` and `signals` are kept when csid starts again within the process.
    async fn run(
        directories: Directories,
        registry: &OpenRegistry,
        sockets: &mut Option<Sockets>,
        signals: &mut Option<UnixSignals>,
    ) -> anyhow::Result<Ended> {
        let begun = Instant::now();
        let signals = match signals {
            Some(signals) => signals,
            None => signals.insert(UnixSignals::listen()?),
        };
        let config = load_config(&directories)?;
        let mut files = Vec::new();
        for file in files::load_each(&directories.configuration.join("plugins.d"))? {
            match file {
                Ok(file) => files.push(file),
                // The others' volumes do not wait for this one to be mended.
                Err(error) => {
                    tracing::error!(%error, "this plugin is left out; mend its file, then `csictl reload`")
                }
            }
        }
        let directories = made_and_resolved(directories)?;
        let place = JournalDirectory::take(&directories.journal(), &directories.runtime)?;
        // With many mounts this read takes as long as that of the journal. No other csid mounts any more.
        let table = tokio::spawn(host::mount_table());
        let (store, loaded) = Store::open_in(place, config.node.as_deref())?;
        let boot = boot::current(&directories.runtime)?;
        let kept = keep_roots(&mut files, &loaded.mounts, &directories);
        let same_boot = loaded.boot.as_deref().is_some_and(|journalled| boot.same(journalled));

        let node = config.cluster.as_ref().map(|cluster| {
            let (name, journal_id) = (store.node(), store.journal_id());
            Arc::new(cluster::Node::new(cluster, name, journal_id, boot.as_str(), loaded.fence))
        });
        let registry = registry(&store)?;
        let is_sound = *store.health().borrow() == Health::Sound;
        let earlier_secrets = match is_sound {
            true => earlier_secrets(&config, &loaded.mounts, registry.as_ref()).await,
            // A damaged journal may lack the rows of any plugin.
            false => EarlierSecrets::OfAll,
        };
        let (config, config_changes) = watch::channel(Arc::new(config));
        let (state, state_changes) = watch::channel(State::Starting);
        let host = Host::new(&directories.runtime);
        let rpc = config.borrow().deadlines.rpc;
        let plugins = Plugins::start(
            &directories,
            rpc,
            store.clone(),
            files,
            loaded.plugins,
            loaded.node_ids,
            earlier_secrets,
        );
        let volumes = Volumes::new(
            store.clone(),
            registry,
            plugins.clone(),
            host,
            config_changes.clone(),
            directories.clone(),
            node.clone().map(|node| node as Arc<dyn Servers>),
        );
        volumes.resolve_target_roots();
        let boot = boot.as_str().to_owned();
        let taken = match store.writable() {
            Ok(()) => {
                let table = table.await.unwrap_or_default();
                volumes.recover(loaded.volumes, loaded.mounts, boot.clone(), same_boot, table).await
            }
            Err(_) => Ok(Recovered::default()),
        };
        let taken = match taken {
            Err(RegistryError::Full(_)) => None,
            // Rows that cannot be trusted are neither restored nor settled nor rolled back.
            Err(RegistryError::Damaged(_)) => Some(Recovered::default()),
            taken => Some(taken?),
        };
        let untaken = taken.is_none().then_some(Untaken { boot, same_boot });
        let Recovered { adopted, waiting, lost, unsettled } = taken.unwrap_or_default();
        let ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        tracing::info!(
            adopted,
            waiting,
            lost,
            unsettled,
            same_boot,
            ms,
            "the journal's mounts were taken over"
        );
        let restoration = Restoration { begun, mounts: (adopted + waiting) as u64, done: None };
        let reloading = Arc::default();
        let handles = Handles { directories, config, store, plugins, volumes, reloading };
        if untaken.is_none() && handles.store.writable().is_ok() {
            handles.declare().await;
        }
        if let Err(error) = &kept {
            handles.tell_reload(Some(error)).await;
        }
        let mut daemon = Daemon { handles, state, restoration, untaken, node };

        let (reload, reloads) = mpsc::channel(1);
        let rooms = Rooms {
            volumes: daemon.handles.volumes.clone(),
            plugins: daemon.handles.plugins.clone(),
            store: daemon.handles.store.clone(),
            state: state_changes,
            reload,
            config: config_changes,
            limits: Limits::default(),
            node: daemon.node.clone(),
        };
        let sockets = match sockets {
            Some(sockets) => sockets,
            None => sockets.insert(sockets::listen(&daemon.handles.directories.runtime)?),
        };
        // The tasks end with this value.
        let mut tasks = JoinSet::new();
        if let Some(threads) = RunningThreads::open().unwrap_or_else(|error| {
            tracing::warn!(%error, "csid does not poll after a step: it cannot read the number of running threads");
            None
        }) {
            let config = daemon.handles.config.subscribe();
            let time = move || Duration::from_micros(config.borrow().busy_poll_usec.into());
            tasks.spawn(busy_poll::after_steps(time, threads));
        }
        for socket in &sockets.metrics {
            let listener = metrics::Listener::new(socket.try_clone()?)?;
            tasks.spawn(metrics::serve(listener, daemon.sources()));
        }
        let to_callers = bus::Signals::of(&rooms);
        let private = sockets.private.try_clone()?;
        let socket = tokio::spawn(bus::serve_socket(private, rooms.clone(), to_callers.clone()));
        let system_bus = tokio::spawn(bus::serve_bus(rooms, to_callers));
        let result = daemon.serve(reloads, signals).await;
        let mut goes_down = false;
        if !matches!(result, Ok(Ended::Replaced)) {
            notify(&[NotifyState::Stopping, NotifyState::Status("stopping; every mount stays")]);
            goes_down = daemon.handles.volumes.does_system_stop().await;
        }
        if goes_down {
            notify(&[NotifyState::Status("stopping with the system; targets are unmounted")]);
        }
        daemon.stop(goes_down).await;
        // Both end with the state; answers that are ready are written first.
        let _ = tokio::time::timeout(Duration::from_secs(1), futures_util::future::join(socket, system_bus))
            .await;
        daemon.handles.store.close().await?;
        result
    }

    async fn serve(
        &mut self,
        mut reloads: mpsc::Receiver<oneshot::Sender<crate::Result<()>>>,
        signals: &mut UnixSignals,
    ) -> anyhow::Result<Ended> {
        let mut events = self.handles.store.subscribe();
        let mut changes = self.handles.plugins.subscribe();
        let mut health = self.handles.store.health();
        let mut watchdog = tokio::time::interval(watchdog_period());
        self.state.send_replace(State::Restoring);
        let damaged = *health.borrow_and_update() != Health::Sound;
        if damaged {
            self.show_unexplained().await;
        }
        self.tell_status(true).await;
        if !damaged && let Err(error) = self.handles.volumes.report_orphans().await {
            tracing::warn!(%error, "what no row explains could not be looked for");
        }
        // The journal and the mount table were read as a whole.
        host::trim_memory();
        let Handles { volumes, plugins, .. } = self.handles.clone();
        let (watched, node) = (volumes.clone(), self.node.clone());
        let watch = tokio::spawn(async move {
            let session = async {
                if let Some(node) = node {
                    tokio::join!(
                        Arc::clone(&node).run(watched.clone(), plugins.clone()),
                        node.count_owed(watched.clone()),
                        node.run_drain(watched.clone())
                    );
                }
            };
            tokio::join!(watched.watch(), watched.watch_bound(), plugins.watch_registrations(), session)
        });
        let mut session = self.node.as_ref().map(|node| node.subscribe());
        let mut stale = true;
        let mut refresh = tokio::time::interval(Duration::from_millis(500));
        refresh.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut again = tokio::time::interval(Duration::from_secs(1));
        again.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut trimmed = self.handles.store.event_sequence();
        let mut rest: Option<Instant> = None;
        let ended = loop {
            tokio::select! {
                order = signals.next() => match order {
                    SignalOrder::Stop => break Ended::Stopped,
                    SignalOrder::Reload => self.begin_reload(None),
                },
                Some(reply) = reloads.recv() => self.begin_reload(Some(reply)),
                _ = watchdog.tick() => self.ping_watchdog().await,
                // One event is enough until the next look, so a thousand events do not wake this a thousand times.
                event = events.recv(), if !stale => {
                    stale = true;
                    if matches!(event, Err(tokio::sync::broadcast::error::RecvError::Closed)) {
                        anyhow::bail!("the journal's thread has ended");
                    }
                }
                () = volumes.news(), if !stale => stale = true,
                () = changed(session.as_mut()), if !stale => stale = true,
                _ = health.changed() => {
                    if *health.borrow_and_update() == Health::Replaced {
                        break Ended::Replaced;
                    }
                    self.show_unexplained().await;
                    stale = true;
                }
                _ = again.tick(), if self.untaken.is_some() => {
                    self.take_over().await?;
                    stale = true;
                }
                // Rare, and what a caller of WaitForPlugin sees next.
                _ = changes.recv() => self.tell_status(false).await,
                // Many changes make one status line.
                _ = refresh.tick(), if stale => {
                    stale = false;
                    // This look covers the events up to now.
                    events = events.resubscribe();
                    self.tell_status(false).await;
                    rest = Some(Instant::now() + REST);
                }
                () = tokio::time::sleep_until(rest.unwrap_or_else(Instant::now).into()), if rest.is_some() => {
                    rest = None;
                    let sequence = self.handles.store.event_sequence();
                    if sequence.saturating_sub(trimmed) >= BURST {
                        trimmed = sequence;
                        host::trim_memory();
                    }
                }
            }
        };
        watch.abort();
        Ok(ended)
    }

    /// Takes over the rows that a full disk kept back at the start.
    async fn take_over(&mut self) -> anyhow::Result<()> {
        let Some(Untaken { boot, same_boot }) = &self.untaken else { return Ok(()) };
        let table = host::mount_table().await;
        let Loaded { volumes, mounts, .. } = self.handles.store.rows().await?;
        match self.handles.volumes.recover(volumes, mounts, boot.clone(), *same_boot, table).await {
            Err(RegistryError::Full(_)) => {}
            // Nothing more is taken over from a damaged journal.
            Err(RegistryError::Damaged(_)) => self.untaken = None,
            taken => {
                tracing::info!(taken = ?taken?, "there is room again, the journal's mounts were taken over");
                self.untaken = None;
                self.handles.declare().await;
            }
        }
        Ok(())
    }

    /// Adds mounts whose rows cannot be read in a damaged journal to what lists of mounts return.
    async fn show_unexplained(&self) {
        if let Err(error) = self.handles.volumes.show_unexplained().await {
            tracing::error!(%error, "what is mounted could not be looked at");
        }
    }

    /// Apart from the loop that feeds the watchdog: a plugin that is changed may take its time to stop.
    fn begin_reload(&self, reply: Option<oneshot::Sender<crate::Result<()>>>) {
        let handles = self.handles.clone();
        tokio::spawn(async move {
            let result = handles.patiently(handles.reload()).await;
            if let Err(error) = &result {
                tracing::error!("the configuration was not taken: {error}");
            }
            if let Some(reply) = reply {
                let _ = reply.send(result);
            }
        });
    }

    /// The executor runs this, and the journal's thread answers: both are alive.
    async fn ping_watchdog(&self) {
        match self.handles.store.ping().await {
            Ok(()) => notify(&[NotifyState::Watchdog]),
            Err(error) => {
                tracing::error!(%error, "the journal does not answer; the watchdog is not notified")
            }
        }
    }

    async fn tell_status(&mut self, first: bool) {
        let plugins = self.handles.plugins.list();
        let healthy = plugins.iter().filter(|plugin| plugin.healthy).count();
        let phases = self.handles.store.phases().await.unwrap_or_else(|error| {
            tracing::error!(%error, "the mounts could not be counted");
            Default::default()
        });
        let count = |phase| phases.get(&phase).copied().unwrap_or(0);
        let (mounted, waiting) = (count(Phase::Mounted), count(Phase::Waiting));
        let unregistered = self.handles.volumes.unregistered();
        let others = [
            ("waiting", waiting),
            ("lost", count(Phase::Lost)),
            ("uncertain", count(Phase::Uncertain)),
            ("volumes not registered as declared", unregistered as u64),
        ];
        let others: String =
            others.iter().filter(|(_, n)| *n > 0).map(|(name, n)| format!(", {n} {name}")).collect();
        let begins = first || self.handles.volumes.is_recovering();
        let restoring =
            (begins && waiting > 0 && self.untaken.is_none() && self.handles.store.writable().is_ok())
                || self
                    .handles
                    .volumes
                    .operations()
                    .iter()
                    .any(|operation| operation.kind == OperationKind::Restore);
        let restored = self.restoration.tell(waiting, restoring);
        let plugins = plugins.len();
        let damaged = self.handles.store.writable().is_err();
        let damage = match damaged {
            true => "the journal is damaged, changes are refused until `csictl reconcile --new-journal`; ",
            false if self.untaken.is_some() => "no space is left for the journal, changes are refused; ",
            false => "",
        };
        let cluster = self.node.as_ref().map(|node| format!("; {}", node.status())).unwrap_or_default();
        let status = format!(
            "{damage}{plugins} plugins ({healthy} healthy), {mounted} mounts{others}{restored}{cluster}"
        );
        let mut states = vec![NotifyState::Status(&status)];
        if first {
            states.push(NotifyState::Ready);
        }
        notify(&states);
        let state = if restoring {
            State::Restoring
        } else if damaged
            || self.untaken.is_some()
            || healthy < plugins
            || waiting > 0
            || unregistered > 0
            || self.node.as_ref().is_some_and(|node| !node.is_joined())
            || count(Phase::Uncertain) > 0
        {
            State::Degraded
        } else {
            State::Ready
        };
        self.state.send_if_modified(|now| std::mem::replace(now, state) != state);
    }

    fn sources(&self) -> metrics::Sources {
        let Handles { plugins, volumes, store, .. } = self.handles.clone();
        let claims = volumes.registry();
        let node = self.node.clone();
        metrics::Sources { state: self.state.subscribe(), plugins, volumes, store, claims, node }
    }

    /// `goes_down`: the whole system stops.
    async fn stop(&self, goes_down: bool) {
        self.handles.volumes.shutdown(STOP_PATIENCE).await;
        if goes_down {
            self.handles.volumes.unmount_targets(UNMOUNT_PATIENCE).await;
        }
        self.state.send_replace(State::Stopping);
        if tokio::time::timeout(Duration::from_secs(3), self.handles.plugins.shutdown()).await.is_err() {
            tracing::warn!("a plugin's unit is still being changed; csid stops without it");
        }
    }
}

/// Waits until the state of the cluster's session has changed. Never returns if csid is alone.
async fn changed(session: Option<&mut watch::Receiver<cluster::SessionState>>) {
    match session {
        // The node has the sender, and exists as long as the daemon.
        Some(session) => drop(session.changed().await),
        None => std::future::pending().await,
    }
}

/// Half of what systemd allows, and a look at the journal now and then without systemd.
fn watchdog_period() -> Duration {
    sd_notify::watchdog_enabled().map_or(Duration::from_secs(60), |period| period / 2)
}
