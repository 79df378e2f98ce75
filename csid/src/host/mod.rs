//! What the kernel is asked and told: what lies at a path, csid's directories, binds to a consumer's target,
//! which boot this is.
//!
//! State: none about mounts; the kernel is asked each time. Always true:
//! - No path is followed through a symbolic link, in any part of it. Directories that the configuration names
//!   are resolved once, at start ([`resolve`]).
//! - What is created, mounted, unmounted or removed is reached by descriptor, or by name in its parent's
//!   descriptor: never by a path walked twice. Nothing is removed recursively, and nothing with something
//!   mounted on it.
//! - What may hang on a dead server (NFS, FUSE) runs on a blocking thread apart, with a deadline for who
//!   waits, and at most [`AT_ONCE`] a plugin: a plugin's dead mounts delay only that plugin's. A call that
//!   hung may still be carried out; it is told when nobody waits any more, and then takes no further step.

pub mod boot;
pub mod cgroup;
pub mod credential;
pub mod enter;
mod error;
pub mod exec;
pub mod log;
mod mount;
pub mod oneshot;
mod path;
mod raw;
pub(crate) mod sandbox;
mod table;
pub mod units;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

pub use error::HostError;
use mount::Abandoned;

use crate::store::rows::Propagation;

/// How long anybody waits for the kernel.
const DEADLINE: Duration = Duration::from_secs(5);
/// Kernel calls at once for one plugin.
const AT_ONCE: usize = 16;

/// Who gets into a directory of csid's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// 0711: consumers pass through to what is published, and list nothing.
    Passable,
    /// 0700: what is staged is the plugin's.
    Private,
    /// 0700, in a directory that is 0711: what is published without its flags is nobody's yet. Nothing may be mounted on it.
    Closed,
}

/// What lies at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    Missing,
    /// It exists, and nothing is mounted on it: a directory, a file, anything but a block device.
    Plain,
    /// A directory with a file system mounted on it that answers.
    Mounted {
        device: u64,
        /// Somebody serves it, a process or another host (FUSE, NFS), and it dies with him.
        served: bool,
    },
    /// A block device: its node, or one bound on a file.
    Device {
        rdev: u64,
    },
    /// It is there, but cannot be used: the error number. `ENOTCONN` and the like: its server is gone;
    /// `ENOTDIR`: something is mounted, on a file; `ELOOP`: a symbolic link.
    Dead(i32),
    /// The kernel did not answer in time.
    Hung,
}

impl Look {
    /// Whether both are the same file system, mounted, or the same block device.
    fn shows_the_same(self, other: Look) -> bool {
        match (self, other) {
            (Look::Mounted { device, .. }, Look::Mounted { device: other, .. })
            | (Look::Device { rdev: device }, Look::Device { rdev: other }) => device == other,
            _ => false,
        }
    }

    /// Who served it is gone, and the kernel gives the mount nobody else: it can only be unmounted. A server that does not
    /// answer, or answers an error, may come back; SMB's client says EHOSTDOWN of one that it connects to again.
    pub fn has_lost_its_server(self) -> bool {
        let Look::Dead(code) = self else { return false };
        matches!(code, libc::ENOTCONN | libc::ECONNABORTED | libc::ESHUTDOWN | libc::ESTALE)
    }

    /// NFS says so of what its server no longer knows, for a moment also while that makes its exports anew: ask again.
    pub fn is_stale(self) -> bool {
        self == Look::Dead(libc::ESTALE)
    }
}

/// Flags added to a mount; none is taken away.
#[derive(Clone, Copy, Debug, Default)]
pub struct Restrict {
    pub nosuid: bool,
    pub nodev: bool,
    pub read_only: bool,
}

/// How a consumer's target is bound.
#[derive(Clone, Debug)]
pub struct Bind {
    /// What is dead at the target gives way, if it has one of these numbers, which were at the source before.
    pub replaces_dead: Vec<u64>,
    pub nosuid: bool,
    /// Without effect on a block device, whose node could not be opened then.
    pub nodev: bool,
    /// Without effect on what is written to a block device.
    pub read_only: bool,
    pub propagation: Propagation,
}

/// How a consumer's target is unbound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unbind {
    /// If nobody uses it.
    Unused,
    /// Also whoever uses it, if it is dead, and what was at the source before, if that is dead.
    Dead,
    /// Whoever uses it; and where nobody knows what was at its source, and nothing is there any more, whatever it is.
    Forced,
}

/// A path with at least one mount on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountPoint {
    pub path: PathBuf,
    /// Of the one on top.
    pub device: u64,
    /// How many lie over one another.
    pub stacked: usize,
}

/// The name of a directory without symbolic links, as all of this module wants it.
pub fn resolve(directory: &Path) -> Result<PathBuf, HostError> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(directory, flags, Mode::empty()).map_err(error::at("open", directory))?;
    let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
    std::fs::read_link(link).map_err(|source| HostError::Os { step: "name", path: directory.into(), source })
}

/// Give memory back to the host, after something that needed much for a moment.
pub fn trim_memory() {
    raw::trim();
}

#[derive(Clone, Default)]
pub struct Host {
    gates: Arc<Gates>,
    /// Of [`Host::look_long`].
    long: Arc<Gates>,
}

/// Each plugin's bound.
#[derive(Default)]
struct Gates(Mutex<HashMap<String, Arc<Semaphore>>>);

impl Gates {
    fn of(&self, plugin: &str) -> Arc<Semaphore> {
        let mut gates = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(gates.entry(plugin.to_owned()).or_insert_with(|| Arc::new(Semaphore::new(AT_ONCE))))
    }
}

impl Host {
    pub fn new() -> Host {
        Host::default()
    }

    /// What is at `path`.
    pub async fn look(&self, plugin: &str, path: &Path) -> Look {
        let own = path.to_owned();
        self.apart(plugin, move |_| mount::look(&own)).await.unwrap_or(Look::Hung)
    }

    /// What is at `path`, asked for however long the answer takes. It is in nobody's way: these looks are bounded apart from all
    /// else, and wait for one another. `None`: csid ends.
    pub async fn look_long(&self, plugin: &str, path: &Path) -> Option<Look> {
        let own = path.to_owned();
        unhurried(self.long.of(plugin), move |_| mount::look(&own)).await
    }

    /// What is at `path`, below `root`. Known at once where nothing is mounted: nobody is asked there who could hang.
    pub async fn look_below(&self, plugin: &str, root: &Path, path: &Path) -> Look {
        match path::look_unmounted(root, path) {
            Some(look) => look,
            None => self.look(plugin, path).await,
        }
    }

    /// What is at each of `paths`, in one go. One that hangs costs the deadline once: it and those after it
    /// are `Hung`.
    pub async fn looks(&self, plugin: &str, paths: Vec<PathBuf>) -> Vec<Look> {
        let count = paths.len();
        let seen = Arc::new(Mutex::new(Vec::with_capacity(count)));
        let told = Arc::clone(&seen);
        let so_far = || seen.lock().unwrap_or_else(PoisonError::into_inner).len();
        let mut work = std::pin::pin!(unhurried(self.gates.of(plugin), move |abandoned| {
            for path in &paths {
                if abandoned.0.load(Ordering::Acquire) {
                    return;
                }
                let look = mount::look(path);
                told.lock().unwrap_or_else(PoisonError::into_inner).push(look);
            }
        }));
        let (mut before, mut since) = (0, Instant::now());
        while tokio::time::timeout(DEADLINE / 10, &mut work).await.is_err() {
            let now = so_far();
            if now > before {
                (before, since) = (now, Instant::now());
            } else if since.elapsed() >= DEADLINE {
                break;
            }
        }
        let mut looks = seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
        looks.resize(count, Look::Hung);
        looks
    }

    /// Make the directory and its missing parents below `root`, which exists, csid's; `access` is the
    /// last one's, the parents are passable. What is there already is kept, a mount on it too.
    pub fn make_directory(&self, root: &Path, relative: &Path, access: Access) -> Result<(), HostError> {
        path::make_directory(root, relative, access)
    }

    /// Make passable what is [`Access::Closed`].
    pub fn open_up(&self, path: &Path) -> Result<(), HostError> {
        path::open_up(path)
    }

    /// Remove an empty directory, an empty file or a device node, then the parents that are empty, up to
    /// `root`. False: something is in it or mounted on it.
    pub fn remove(&self, root: &Path, path: &Path) -> Result<bool, HostError> {
        path::remove(root, path)
    }

    /// What is at `path`; a mounted directory is given the flags, that mount alone.
    pub async fn restrict(&self, plugin: &str, path: &Path, how: Restrict) -> Result<Look, HostError> {
        let own = path.to_owned();
        self.within(plugin, path, move |abandoned| mount::restrict(&own, how, abandoned)).await
    }

    /// Whether nothing can be written at `path`, because of the mount or of the file system.
    pub async fn is_read_only(&self, plugin: &str, path: &Path) -> Result<bool, HostError> {
        let own = path.to_owned();
        self.within(plugin, path, move |_| mount::is_read_only(&own)).await
    }

    /// Whether the block device refuses writes.
    pub fn block_is_read_only(&self, rdev: u64) -> Result<bool, HostError> {
        let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
        let path = PathBuf::from(format!("/sys/dev/block/{major}:{minor}/ro"));
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(text.trim() != "0"),
            Err(source) => Err(HostError::Os { step: "read", path, source }),
        }
    }

    /// Show what is mounted at `source` (or the block device there) also at `target`, which exists below
    /// `root` and is of its kind. If it is shown there already, its flags are set again.
    pub async fn bind(
        &self,
        plugin: &str,
        source: &Path,
        root: &Path,
        target: &Path,
        how: Bind,
    ) -> Result<(), HostError> {
        let (from, below, to) = (source.to_owned(), root.to_owned(), target.to_owned());
        self.within(plugin, target, move |abandoned| mount::bind(&from, &below, &to, &how, abandoned)).await
    }

    /// Undo `bind`, if what is mounted at `target` is what is at `source`; false: nothing is there. `were`: the numbers that were
    /// at `source`, which prove it, too.
    pub async fn unbind(
        &self,
        plugin: &str,
        source: &Path,
        target: &Path,
        were: Vec<u64>,
        how: Unbind,
    ) -> Result<bool, HostError> {
        let (from, to) = (source.to_owned(), target.to_owned());
        self.within(plugin, target, move |abandoned| mount::unbind(&from, &to, &were, how, abandoned)).await
    }

    /// Whether what is at `source` is shown at `target` now.
    pub async fn is_bound(&self, plugin: &str, source: &Path, target: &Path) -> Result<bool, HostError> {
        let (from, to) = (source.to_owned(), target.to_owned());
        self.within(plugin, target, move |_| mount::is_bound(&from, &to)).await
    }

    /// A mount of what is `shown` at `source`, or of what is at `subpath` in it, that is attached nowhere: with these flags
    /// besides its own, and private. What is mounted below is not in it. Whoever holds it holds the file system, too. And whether
    /// it has flags that keep its user from anything. `None`: that is not shown there.
    pub async fn open_tree(
        &self,
        plugin: &str,
        source: &Path,
        shown: Look,
        subpath: Option<PathBuf>,
        how: Restrict,
    ) -> Result<Option<(OwnedFd, bool)>, HostError> {
        let own = source.to_owned();
        self.within(plugin, source, move |_| mount::open_tree(&own, shown, subpath.as_deref(), how)).await
    }

    /// Who uses what is mounted at `path`: `PID COMMAND`, `mount PATH`; best effort, a few of them.
    pub async fn holders(&self, path: &Path) -> Vec<String> {
        let path = path.to_owned();
        tokio::task::spawn_blocking(move || table::holders(&path)).await.unwrap_or_default()
    }

    /// Every mount point at or below `root`, by one reading of the whole table: for recovery and Reconcile
    /// only.
    pub fn mounts_below(&self, root: &Path) -> Result<Vec<MountPoint>, HostError> {
        table::mounts_below(root)
    }

    /// Every mount point that shows what is at `source`, by the device and the root in it, other than `source`
    /// itself: binds that were moved along with a directory, and the plugin's own and other consumers' mounts of
    /// the same. One reading of the whole table: for the odd path only.
    pub fn copies(&self, source: &Path) -> Result<Vec<PathBuf>, HostError> {
        table::copies(source)
    }

    /// Take the topmost mount at `path` out of the tree, whoever uses it: for what somebody asked to be
    /// removed by force.
    pub async fn detach(&self, plugin: &str, path: &Path) -> Result<(), HostError> {
        let own = path.to_owned();
        self.within(plugin, path, move |abandoned| mount::detach(&own, abandoned)).await
    }

    /// Whether somebody uses what is mounted at `path`. Nothing there: nobody.
    pub async fn in_use(&self, plugin: &str, path: &Path) -> Result<bool, HostError> {
        let own = path.to_owned();
        self.within(plugin, path, move |_| mount::in_use(&own)).await
    }

    /// Remove what no row explains: as [`Self::remove`], and, if `ours`, what is mounted there before, unless it is in use.
    pub async fn remove_orphan(&self, root: &Path, path: &Path, ours: bool) -> Result<bool, HostError> {
        let plugin = root.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (below, own) = (root.to_owned(), path.to_owned());
        self.within(&plugin, path, move |abandoned| {
            if ours {
                mount::clear(&own, abandoned)?;
            }
            path::remove(&below, &own)
        })
        .await
    }

    async fn within<T: Send + 'static>(
        &self,
        plugin: &str,
        path: &Path,
        work: impl FnOnce(&Abandoned) -> Result<T, HostError> + Send + 'static,
    ) -> Result<T, HostError> {
        self.apart(plugin, work).await.unwrap_or_else(|| Err(HostError::Hung(path.into())))
    }

    /// Run `work` on a thread apart; `None` when it did not end in time, or did not begin because others
    /// hang.
    async fn apart<T: Send + 'static>(
        &self,
        plugin: &str,
        work: impl FnOnce(&Abandoned) -> T + Send + 'static,
    ) -> Option<T> {
        tokio::time::timeout(DEADLINE, unhurried(self.gates.of(plugin), work)).await.ok().flatten()
    }
}

async fn unhurried<T: Send + 'static>(
    gate: Arc<Semaphore>,
    work: impl FnOnce(&Abandoned) -> T + Send + 'static,
) -> Option<T> {
    let pass = gate.acquire_owned().await.ok()?;
    let waiter = Waiter(Arc::new(Abandoned(AtomicBool::new(false))));
    let abandoned = Arc::clone(&waiter.0);
    let done = tokio::task::spawn_blocking(move || {
        let answer = work(&abandoned);
        drop(pass);
        answer
    });
    done.await.ok()
}

/// Who waits for a blocking call; dropped with the waiting.
struct Waiter(Arc<Abandoned>);

impl Drop for Waiter {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Release);
    }
}
