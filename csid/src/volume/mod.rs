//! Volumes: what a volume may do (`state`, pure), the task that queues its operations (`task`), one operation driven to its
//! end (`drive`, `effects`), recovery at start (`recovery`), Reconcile, and the watch over what is mounted.
//!
//! A volume's rows and its operation in flight belong to that volume's task; the others hold the [`Volumes`] handle. A task
//! lives while there is work; `directory` holds the rows of volumes at rest.

mod admission;
mod attaching;
mod bound;
mod claim_effects;
mod claim_words;
mod claimed_mounts;
mod claiming;
pub mod claims;
mod control;
mod controlling;
mod creating;
pub mod declared;
mod deleting;
mod directory;
mod drive;
mod effects;
mod expanding;
mod explaining;
pub mod files;
mod intents;
pub mod inventory;
mod job;
mod journalled;
mod leaving;
mod looking;
mod opening;
mod operations;
mod options;
mod paths;
mod reconcile;
mod record;
mod recovery;
mod registered;
mod registering;
pub mod requests;
mod say;
mod secrets;
mod served;
mod sights;
pub mod state;
mod task;
mod unanswered;
mod watch;
mod work;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::config::{Config, Directories};
use crate::error::{Error, Kind, Result};
use crate::host::units::Units;
use crate::host::{Host, Look};
use crate::plugin::Plugins;
use crate::secret::Secrets;
use crate::store::registry::Registry;
use crate::store::rows::{MountKey, MountRow, Phase, VolumeKey};
use crate::store::{Durability, MountFilter, Store, StoreError};
use bound::{BoundClaims, Connections};
use declared::Declarations;
use directory::Directory;
pub use leaving::Drained;
use looking::{healthy, why};
use operations::{Begin, Operations, Step, TAKES};
pub use options::MountOptions;
pub use recovery::Recovered;
use registered::MountOf;
pub use registering::refuse_nonsense;
use state::{Sight, Wanted};
use task::Message;
use work::{Done, Waiter, Work};

/// How long a caller waits, and what he calls the operation.
#[derive(Clone, Default)]
pub struct Wait {
    pub deadline: Option<Instant>,
    pub operation: Option<String>,
    /// Held until the operation has ended, which may be long after its caller's deadline.
    pub hold: Option<Arc<dyn Send + Sync>>,
}

/// In whose name a row is changed: only one's own rows, or anybody's. The task that owns the row compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Authority {
    Own(u32),
    Any(u32),
}

pub struct MountRequest {
    pub key: MountKey,
    /// The volume as the plugin knows it, when it is given with the call; absent: it is registered.
    pub inline: Option<VolumeKey>,
    pub uid: u32,
    pub options: MountOptions,
    pub secrets: Option<Secrets>,
    pub wait: Wait,
}

pub struct UnmountRequest {
    pub key: MountKey,
    pub authority: Authority,
    /// Detach a dead mount lazily.
    pub force: bool,
    pub wait: Wait,
}

/// What a Mount answers: the published path, and whether it is a block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    pub source: String,
    pub is_device: bool,
}

/// A row of ListMounts.
pub struct MountView {
    pub row: MountRow,
    pub staging: String,
    /// The kernel was asked just now.
    pub healthy: bool,
    /// Why the row is not mounted, or not healthy, for a person.
    pub error: String,
}

/// A row of ListOperations.
#[derive(Clone, Debug)]
pub struct OperationView {
    pub id: String,
    /// `mount`, `unmount`, `restore`, `heal`, `settle`.
    pub kind: &'static str,
    /// `NAMESPACE/VOLUME`.
    pub subject: String,
    pub step: &'static str,
    /// The plugin's last answer, if that was no success; it is asked again.
    pub said: String,
    pub since_usec: u64,
    /// When the last caller's deadline ends; absent: nobody waits with one.
    pub deadline_usec: Option<u64>,
    pub uid: u32,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct ReconcileOptions {
    pub dry_run: bool,
    pub remove_orphans: bool,
    pub new_journal: bool,
}

/// What Reconcile found and did; each entry is a path or `NAMESPACE/VOLUME CONSUMER`.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub adopted: Vec<String>,
    pub remounted: Vec<String>,
    pub undone: Vec<String>,
    pub orphans: Vec<String>,
    pub failed: Vec<String>,
    /// Where a damaged journal is kept since a new one was begun.
    pub kept: Option<PathBuf>,
}

/// The handle of all volumes.
#[derive(Clone)]
pub struct Volumes {
    shared: Arc<Shared>,
}

/// What all volumes' tasks share: handles, and the directory of tasks.
struct Shared {
    store: Store,
    plugins: Plugins,
    host: Host,
    units: Units,
    config: tokio::sync::watch::Receiver<Arc<Config>>,
    directories: Directories,
    directory: Directory,
    operations: Operations,
    registry: Arc<dyn Registry>,
    bound: BoundClaims,
    declarations: Declarations,
    /// Connections on the private socket.
    connections: Connections,
    /// This host, in claims.
    node: String,
    /// The boot of now; empty until the rows were taken over.
    boot: Mutex<String>,
    stopping: AtomicBool,
    /// The journal's rows could not be taken over yet: who asks would be told that he has nothing.
    untaken: AtomicBool,
    leaving: leaving::Plugins,
    /// Of each plugin that takes so many volumes at most: who counts them, until his own is one of them.
    counting: Mutex<BTreeMap<String, Arc<tokio::sync::Mutex<()>>>>,
    served: served::Served,
    /// When what is parked gets its second chance.
    next_sweep: Mutex<Option<Instant>>,
}

impl Volumes {
    pub fn new(
        store: Store,
        plugins: Plugins,
        host: Host,
        config: tokio::sync::watch::Receiver<Arc<Config>>,
        directories: Directories,
    ) -> Self {
        let shared = Shared {
            registry: Arc::new(store.clone()),
            node: store.node().to_owned(),
            boot: Mutex::default(),
            bound: BoundClaims::default(),
            declarations: Declarations::default(),
            connections: Connections::default(),
            store,
            units: plugins.units(),
            plugins,
            host,
            config,
            directories,
            directory: Directory::default(),
            operations: Operations::default(),
            stopping: AtomicBool::new(false),
            untaken: AtomicBool::new(false),
            leaving: leaving::Plugins::default(),
            counting: Mutex::default(),
            served: served::Served::default(),
            next_sweep: Mutex::default(),
        };
        Volumes { shared: Arc::new(shared) }
    }

    pub async fn mount(&self, request: MountRequest) -> Result<Mounted> {
        let MountRequest { key, inline, uid, options, secrets, wait } = request;
        let MountOf { volume, mut spec, claim } = match inline {
            Some(volume) => self.shared.mount_inline(&key, volume, options).await?,
            None => {
                let given = secrets.is_some();
                self.shared.mount_registered(&key, uid, options, given, wait.deadline).await?
            }
        };
        spec.secrets_given = secrets.is_some();
        if let Some(target) = &spec.target {
            self.shared.refuse_own_target(Path::new(target))?;
        }
        self.shared.identify(&volume).await?;
        let wanted = Wanted { key, uid, spec, operations: Vec::new() };
        let answer = self.shared.ask(&volume, uid, Work::Mount { wanted, claim, secrets }, wait)?;
        match self.shared.answered(answer).await? {
            Done::Mounted(mounted) => Ok(mounted),
            _ => Err(Error::internal("a mount was answered without its path")),
        }
    }

    pub async fn unmount(&self, request: UnmountRequest) -> Result<()> {
        let UnmountRequest { key, authority, force, wait } = request;
        self.shared.changeable()?;
        let Some(volume) = self.shared.volume_of(&key).await? else { return self.shared.synced().await };
        let (Authority::Own(uid) | Authority::Any(uid)) = authority;
        let answer = self.shared.ask(&volume, uid, Work::Unmount { key, authority, force }, wait)?;
        self.shared.answered(answer).await.map(drop)
    }

    /// The uid that owns a mount, for the choice of the action to authorise.
    pub async fn owner(&self, key: &MountKey) -> Result<Option<u32>> {
        let rows = self.shared.store.mounts(MountFilter::of(key)).await?;
        Ok(rows.first().map(|(row, _)| row.uid))
    }

    /// Whether something is mounted (or a device published) at a path that csid published.
    pub async fn has_mount(&self, source: &str) -> Result<bool> {
        let filter = MountFilter { source: Some(source.to_owned()), ..MountFilter::default() };
        match self.shared.store.mounts(filter).await?.first() {
            Some((row, _)) => Ok(self.shared.sight(row).await != Sight::Gone),
            None => Ok(false),
        }
    }

    /// The mounts that match, each looked at now.
    pub async fn list(&self, filter: MountFilter) -> Result<Vec<MountView>> {
        let rows = self.shared.store.mounts(filter).await?;
        let mounts: Vec<&MountRow> = rows.iter().map(|(row, _)| row).collect();
        let looks = self.shared.looks(&mounts).await;
        let sights = self.shared.sights_of(&mounts, &looks).await;
        let view = |((row, staging), (look, sight)): ((MountRow, String), (&Look, Sight))| {
            let is_mounted = row.phase == Phase::Mounted;
            let healthy = is_mounted && healthy(&row, look) && sight == Sight::There;
            let error = match sight {
                Sight::Unbound if is_mounted => "nothing is mounted at its target".to_owned(),
                // What stands in the row says more: why it cannot be healed.
                _ if is_mounted && !healthy && row.error.is_empty() => why(look),
                _ => row.error.clone(),
            };
            MountView { row, staging, healthy, error }
        };
        Ok(rows.into_iter().zip(looks.iter().zip(sights)).map(view).collect())
    }

    pub fn operations(&self) -> Vec<OperationView> {
        self.shared.operations.list()
    }

    /// What the status tells of may have changed: also by what is no event, or is not at its end when its event comes.
    pub async fn news(&self) {
        self.shared.operations.news().await;
    }

    /// Withdraw the caller who gave his call this name.
    pub async fn cancel(&self, operation: &str, authority: Authority) -> Result<()> {
        let found = self.shared.operations.find(operation, authority);
        if found.is_empty() {
            let text = format!("no operation `{operation}` of yours is under way; see `csictl operations`");
            return Err(Error::not_found(text));
        }
        for (volume, number) in found {
            self.shared.directory.tell(&volume, Message::Withdraw(number));
        }
        Ok(())
    }

    /// Refuse what is new, let what is under way end for as long as `patience`, and answer who waits longer; what is left is
    /// in the journal.
    pub async fn shutdown(&self, patience: Duration) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        self.shared.declarations.stop();
        let end = Instant::now() + patience;
        while self.shared.operations.are_waited_for() && Instant::now() < end {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.shared.directory.tell_all(|| Message::Stop);
    }
}

type Answer = oneshot::Receiver<Result<Done>>;

fn shutting_down() -> Error {
    Error::new(Kind::ShuttingDown, "csid is stopping; ask again when it is back, the answer is kept")
}

impl Shared {
    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// The journal takes changes, and its rows are here.
    fn changeable(&self) -> Result<()> {
        self.store.writable()?;
        match self.untaken.load(Ordering::SeqCst) {
            true => Err(StoreError::Full.into()),
            false => Ok(()),
        }
    }

    /// Queue work at its volume's task.
    fn ask(self: &Arc<Self>, volume: &VolumeKey, uid: u32, work: Work, wait: Wait) -> Result<Answer> {
        if self.is_stopping() {
            return Err(shutting_down());
        }
        self.changeable()?;
        if paths::lacks_id(volume) {
            return Err(say::unidentified(volume, work.key()));
        }
        let (kind, key) = (work.kind(), work.key());
        let begin =
            Begin { kind, key, volume, uid, id: wait.operation, deadline: wait.deadline, step: Step::new() };
        let ticket = self.operations.begin(begin)?;
        if TAKES.contains(&kind) {
            self.refuse_leaving(&volume.plugin)?;
        }
        let (reply, answer) = oneshot::channel();
        let waiter = Waiter { ticket, deadline: wait.deadline, hold: wait.hold, reply };
        self.directory.ask(self, volume, work, waiter)?;
        Ok(answer)
    }

    /// What the task answers. One that has ended without an answer did so because csid stops or the journal is damaged.
    async fn answered(&self, answer: Answer) -> Result<Done> {
        answer.await.unwrap_or_else(|_| Err(self.store.writable().err().unwrap_or_else(shutting_down)))
    }

    fn next_sweep(&self) -> MutexGuard<'_, Option<Instant>> {
        self.next_sweep.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn boot(&self) -> String {
        self.boot.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// An answer that repeats an earlier one is as durable as that was to be.
    async fn synced(&self) -> Result<()> {
        Ok(self.store.commit(Vec::new(), Durability::Disk).await?)
    }

    /// A target over, below or above csid's own directories would hide what is published, or the journal.
    fn refuse_own_target(&self, target: &Path) -> Result<()> {
        let own = [&self.directories.state, &self.directories.runtime];
        match own.into_iter().find(|own| target.starts_with(own) || own.starts_with(target)) {
            Some(own) => {
                let text =
                    format!("target {} is over or below csid's own {}", target.display(), own.display());
                Err(Error::invalid(text))
            }
            None => Ok(()),
        }
    }

    /// The directory that is there, below which csid makes and removes directories for the plugin with this root: csid's own,
    /// or the root that the plugin's spec names.
    fn base<'a>(&'a self, root: &'a Path) -> &'a Path {
        if root.starts_with(&self.directories.state) { &self.directories.state } else { root }
    }

    /// The directory a mount's target has to lie below.
    fn target_root(&self, mount: &MountRow) -> Result<PathBuf> {
        let Some(target) = &mount.spec.target else { return Ok(PathBuf::from("/")) };
        if mount.uid == 0 {
            return Ok(PathBuf::from("/"));
        }
        let config = self.config.borrow();
        let root = config.target_roots.iter().find(|root| Path::new(target).starts_with(root));
        root.cloned().ok_or_else(|| {
            let text = format!(
                "{target} is below none of the target-roots of csid.toml; elsewhere targets are root's alone"
            );
            Error::new(Kind::NotAuthorized, text)
        })
    }
}
