//! The handle of the kernel's calls: each is made here, or by the helper where a server can hold it up.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::de::DeserializeOwned;

use crate::host::base::{Base, part_below};
use crate::host::bind::{Bind, Restrict, Unbind};
use crate::host::deadline::DEADLINE;
use crate::host::ends::Ends;
use crate::host::error::{self, HostError};
use crate::host::held_live::{HeldLive, Lives};
use crate::host::helper::{self, Helper, HelperRequest, Sifted, Tree, Unanswered};
use crate::host::look::Look;
use crate::host::lookout;
use crate::host::own_mounts::KnownMounts;
use crate::host::path::{self, Access};
use crate::host::table::{self, MountPoint, MountTable};
use crate::host::target;

/// The name by which calls about target roots are bounded, as a plugin's calls are.
const RESOLVING: &str = ", target roots";

/// The name by which calls that name a mount's users are bounded.
const NAMING: &str = ", users of mounts";

/// A descriptor of a target, opened by a process that an automount there does not keep waiting. Every descriptor in it is closed by
/// the helper.
pub struct TargetFd {
    fd: Tree,
    /// The mount that was bound there with the descriptor.
    made: Mutex<Option<Tree>>,
}

impl TargetFd {
    fn made(&self) -> MutexGuard<'_, Option<Tree>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The handle of the kernel's calls.
#[derive(Clone)]
pub struct Host {
    pub(super) helper: Helper,
    pub(super) elsewhere: Arc<lookout::Lookout>,
    pub(super) own_table: Arc<table::OwnTable>,
    pub(super) known_mounts: Arc<KnownMounts>,
    pub(super) lives: Arc<Lives>,
    pub(super) ends: Arc<Ends>,
}

impl Host {
    /// Returns a handle whose calls that may hang are made by the helper that listens below `runtime`.
    pub fn new(runtime: &Path) -> Host {
        Host {
            helper: Helper::at(runtime.join(helper::SOCKET)),
            elsewhere: Arc::default(),
            own_table: Arc::default(),
            known_mounts: Arc::default(),
            lives: Arc::default(),
            ends: Arc::default(),
        }
    }

    /// Returns a handle whose calls are all made by this process, for tests: what hangs stays in it.
    pub fn of_threads() -> Host {
        Host {
            helper: Helper::of_threads(),
            elsewhere: Arc::default(),
            own_table: Arc::default(),
            known_mounts: Arc::default(),
            lives: Arc::default(),
            ends: Arc::default(),
        }
    }

    /// Has the helper take the next byte off `stream`, with the descriptors that were sent with it. `uid`: the sender's, where it
    /// is known. After an error it is not known whether the byte is taken.
    pub async fn sift(&self, uid: Option<u32>, stream: OwnedFd) -> std::io::Result<Sifted> {
        self.helper.sift(uid, stream).await
    }

    /// Returns what is at `path`.
    pub async fn look(&self, plugin: &str, path: &Path) -> Look {
        self.ask_to_look(plugin, path, Some(DEADLINE)).await
    }

    /// Returns what is at `path`, by a look that is made now, also when an earlier one there has hung. `Hung`: this one has. An
    /// error: no look was made.
    pub async fn look_despite_hung(&self, plugin: &str, path: &Path) -> Result<Look, HostError> {
        let request = HelperRequest::Look { path: path.to_owned(), despite_hung: true };
        match self.helper.call::<Result<Look, HostError>>(plugin, &request, None, Some(DEADLINE)).await {
            Ok((look, _)) => look,
            Err(Unanswered::Hung) => Ok(Look::Hung),
            Err(Unanswered::Lost(source)) => Err(HostError::Helper { path: path.to_owned(), source }),
        }
    }

    /// Returns what is at `path`, without a deadline. No other call waits for this one.
    pub async fn look_long(&self, plugin: &str, path: &Path) -> Look {
        self.ask_to_look(&format!("{plugin}{}", helper::WATCHED), path, None).await
    }

    async fn ask_to_look(&self, plugin: &str, path: &Path, patience: Option<Duration>) -> Look {
        let request = HelperRequest::Look { path: path.to_owned(), despite_hung: false };
        // A worker that ended has changed nothing: one more is asked.
        for _ in 0..2 {
            match self.helper.call::<Result<Look, HostError>>(plugin, &request, None, patience).await {
                Ok((Ok(look), _)) => return look,
                Ok((Err(_), _)) | Err(Unanswered::Hung) => return Look::Hung,
                Err(Unanswered::Lost(error)) => {
                    tracing::warn!(path = %path.display(), %error, "the helper does not answer");
                }
            }
        }
        Look::Hung
    }

    /// Returns what is at `path`, below `root`, without asking a file system that may hang. `None`: something is mounted there, or
    /// on the way.
    pub fn look_unmounted(&self, root: &Path, path: &Path) -> Option<Look> {
        let held = self.lives.around(path);
        path::look_unmounted(base(root, held.as_deref()), path)
    }

    /// Returns what is at `path`, below `root`; at once where nothing is mounted.
    pub async fn look_below(&self, plugin: &str, root: &Path, path: &Path) -> Look {
        match self.look_unmounted(root, path) {
            Some(look) => look,
            None => self.look(plugin, path).await,
        }
    }

    /// Returns the mount table of now. No file system is asked for it.
    pub fn mount_table(&self) -> Result<MountTable, HostError> {
        MountTable::read()
    }

    /// Makes the directory and its missing parents below `root`, an existing directory of csid's. `access` applies to the
    /// last one; the parents are passable. An existing directory is kept, with a mount on it too.
    pub fn make_directory(&self, root: &Path, relative: &Path, access: Access) -> Result<(), HostError> {
        self.make_directory_in(root, relative, access, Access::Passable)
    }

    /// As [`Self::make_directory`]. `of_parent` applies to the directory above, if it is missing.
    pub fn make_directory_in(
        &self,
        root: &Path,
        relative: &Path,
        access: Access,
        of_parent: Access,
    ) -> Result<(), HostError> {
        let make = |base: Base<'_>, relative: &Path| path::make_directory(base, relative, access, of_parent);
        self.made(&root.join(relative), root, make)
    }

    /// Makes an empty file below `root`, 0600, whose directory exists. What is there already is kept.
    pub fn make_file(&self, root: &Path, relative: &Path) -> Result<(), HostError> {
        self.made(&root.join(relative), root, path::make_file)
    }

    /// Makes something at `path` by `make`, from the tmpfs that `path` is in, or else from `root`.
    fn made(
        &self,
        path: &Path,
        root: &Path,
        make: impl FnOnce(Base<'_>, &Path) -> Result<(), HostError>,
    ) -> Result<(), HostError> {
        let held = self.lives.around(path);
        let from = held.as_ref().map_or(root, |live| &live.at);
        let outside = || HostError::Outside { path: path.into(), root: from.into() };
        let relative = part_below(path, from).ok_or_else(outside)?;
        make(base(root, held.as_deref()), relative).map_err(|error| match (&held, error.errno()) {
            (Some(live), Some(libc::ENOSPC)) => {
                HostError::LiveFull { path: path.into(), live: live.at.clone() }
            }
            _ => error,
        })
    }

    /// Returns what is in a directory below `root`, in order; nothing where there is no such directory. An error where something is
    /// mounted on the way, or a symbolic link leads there: a plugin may have put it there.
    pub fn entries(&self, root: &Path, directory: &Path) -> Result<Vec<PathBuf>, HostError> {
        let held = self.lives.around(directory);
        path::entries(base(root, held.as_deref()), directory)
    }

    /// Removes an empty directory, an empty file or a device node, then the parents that are empty, up to
    /// `root`, in this process, for tests. False: it is not empty, or something is mounted on it.
    pub fn remove(&self, root: &Path, path: &Path) -> Result<bool, HostError> {
        let held = self.lives.around(path);
        path::remove(base(root, held.as_deref()), path)
    }

    /// Shows what is mounted at `published`, or the block device there, also at `source`, a directory or a file of csid's: a clone
    /// that has its flags before anybody can see it. One that is there already is given the flags. Returns what is at `published`:
    /// a file system is shown at a directory alone, a device at a file, and nothing else anywhere.
    pub async fn deliver(
        &self,
        plugin: &str,
        published: &Path,
        source: &Path,
        how: Restrict,
    ) -> Result<Look, HostError> {
        let (published, source) = (published.to_owned(), source.to_owned());
        self.within(plugin, HelperRequest::Deliver { published, source, how }).await
    }

    /// Returns whether the block device refuses writes.
    pub fn block_is_read_only(&self, rdev: u64) -> Result<bool, HostError> {
        let (major, minor) = (rustix::fs::major(rdev), rustix::fs::minor(rdev));
        let path = PathBuf::from(format!("/sys/dev/block/{major}:{minor}/ro"));
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(text.trim() != "0"),
            Err(source) => Err(HostError::Os { step: "read".into(), path, source }),
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
        let (source, root, target) = (source.to_owned(), root.to_owned(), target.to_owned());
        self.within(plugin, HelperRequest::Bind { source, root, target, how }).await
    }

    /// Takes a descriptor that came with a call. A worker closes it, because its close may hang.
    pub fn keep(&self, fd: OwnedFd) -> Tree {
        self.helper.tree(fd)
    }

    /// Takes a descriptor of a target that came with a call.
    pub fn target_fd(&self, fd: OwnedFd) -> TargetFd {
        TargetFd { fd: self.keep(fd), made: Mutex::default() }
    }

    /// Proves by csid's own tables that `fd` is of `target`, in csid's mount namespace. Returns whether nothing is mounted there but
    /// an automount. No file system is asked.
    pub fn is_free(&self, fd: &TargetFd, target: &Path) -> Result<bool, HostError> {
        Ok(target::prove(fd.fd.as_fd(), target)? == target::At::Free)
    }

    /// Binds as [`Host::bind`] does, and walks to `target` at no step. Root alone gives descriptors, so the target may be anywhere.
    pub async fn bind_at(
        &self,
        plugin: &str,
        source: &Path,
        target: &Path,
        fd: &TargetFd,
        how: Bind,
    ) -> Result<(), HostError> {
        let copy =
            rustix::io::fcntl_dupfd_cloexec(&fd.fd, 0).map_err(error::at("copy the target-fd of", target))?;
        let request = HelperRequest::BindAt { source: source.to_owned(), target: target.to_owned(), how };
        let ((), made) = self.with_descriptor(plugin, request, Some(copy)).await?;
        *fd.made() = made;
        Ok(())
    }

    /// Checks that a caller with this uid may have `target`, below `root`, covered: the target and each directory on the way to it
    /// below `root` belong to that uid or to root, and nobody else may write there. Root may have any. Fails where it is not there.
    pub async fn check_target(
        &self,
        plugin: &str,
        root: &Path,
        target: &Path,
        uid: u32,
    ) -> Result<(), HostError> {
        let (root, target) = (root.to_owned(), target.to_owned());
        self.within(plugin, HelperRequest::CheckTarget { root, target, uid }).await
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
        self.unbind_at(plugin, source, target, were, how, None).await
    }

    /// Undoes [`Host::bind_at`]. What was bound with `fd` is unmounted also while its automount is pending. Later, or with `None`, that
    /// is refused ([`HostError::AutomountPending`]): csid walks to the target, and can do so again when the automount has ended.
    pub async fn unbind_at(
        &self,
        plugin: &str,
        source: &Path,
        target: &Path,
        were: Vec<u64>,
        how: Unbind,
        fd: Option<&TargetFd>,
    ) -> Result<bool, HostError> {
        let made = fd.and_then(|fd| fd.made().take()).and_then(Tree::into_fd);
        let (source, target) = (source.to_owned(), target.to_owned());
        let request = HelperRequest::Unbind { source, target, were, how };
        self.with_descriptor(plugin, request, made).await.map(|(answer, _)| answer)
    }

    /// Returns whether `target` shows what is at `source` now.
    pub async fn is_bound(&self, plugin: &str, source: &Path, target: &Path) -> Result<bool, HostError> {
        let (source, target) = (source.to_owned(), target.to_owned());
        self.within(plugin, HelperRequest::IsBound { source, target }).await
    }

    /// Returns a detached, private mount of what is `shown` at `source`, or of `subpath` in it, with these flags besides its own.
    /// Mounts below are not in it. Its holder keeps the file system in use. The bool is true if it has flags that restrict
    /// its user. `None`: `source` shows something else. `userns`: the user namespace that maps the owners of files.
    pub async fn open_tree(
        &self,
        plugin: &str,
        source: &Path,
        shown: Look,
        subpath: Option<PathBuf>,
        how: Restrict,
        userns: Option<Tree>,
    ) -> Result<Option<(Tree, bool)>, HostError> {
        let (source, userns) = (source.to_owned(), userns.and_then(Tree::into_fd));
        // A helper of an older csid refuses the second, and does not return a mount whose owners are not mapped.
        let request = match userns {
            None => HelperRequest::OpenTree { source, shown, subpath, how },
            Some(_) => HelperRequest::OpenMappedTree { source, shown, subpath, how },
        };
        let (is_bound, tree) = self.with_descriptor::<Option<bool>>(plugin, request, userns).await?;
        Ok(tree.zip(is_bound))
    }

    /// Returns the name of a directory without symbolic links, as [`resolve`] does, but asks for it in the helper.
    pub async fn resolve(&self, directory: &Path) -> Result<PathBuf, HostError> {
        self.within(RESOLVING, HelperRequest::Resolve { directory: directory.to_owned() }).await
    }

    /// Returns users of the mount at `path`, as `PID COMMAND` or `mount PATH`; best effort, a few of them.
    pub async fn holders(&self, path: &Path) -> Vec<String> {
        let request = HelperRequest::Holders { path: path.to_owned() };
        self.within(NAMING, request).await.unwrap_or_default()
    }

    /// Returns every mount point at or below `root`. It reads the whole table once, for recovery and Reconcile only.
    pub fn mounts_below(&self, root: &Path) -> Result<Vec<MountPoint>, HostError> {
        table::mounts_below(root)
    }

    /// Every mount point that shows what is at `source`, by the device and the root in it, other than `source`
    /// itself: binds that were moved along with a directory, and the plugin's own and other consumers' mounts of
    /// the same. One reading of the whole table: for the odd path only.
    pub fn copies(&self, source: &Path) -> Result<Vec<PathBuf>, HostError> {
        table::copies(source)
    }

    /// Returns what [`Self::copies`] does, and every mount point that shows a directory below.
    pub fn copies_and_parts(&self, source: &Path) -> Result<Vec<PathBuf>, HostError> {
        table::copies_and_parts(source)
    }

    /// Detaches the topmost mount at `path`, also one in use, for a forced removal. `despite_hung`: also when an earlier
    /// call there has hung.
    pub async fn detach(&self, plugin: &str, path: &Path, despite_hung: bool) -> Result<(), HostError> {
        self.within(plugin, HelperRequest::Detach { path: path.to_owned(), despite_hung }).await
    }

    /// Returns whether the mount at `path` is in use. False: nothing is mounted there.
    pub async fn in_use(&self, plugin: &str, path: &Path) -> Result<bool, HostError> {
        self.within(plugin, HelperRequest::InUse { path: path.to_owned() }).await
    }

    /// Unmounts what is at `path`, unless it is in use.
    pub async fn clear(&self, plugin: &str, path: &Path) -> Result<(), HostError> {
        self.within(plugin, HelperRequest::Clear { path: path.to_owned() }).await
    }

    /// Removes a path that no row explains, as [`Self::remove`] does. If `ours`, a mount there is unmounted first, unless it is in use.
    pub async fn remove_orphan(
        &self,
        plugin: &str,
        root: &Path,
        path: &Path,
        ours: bool,
    ) -> Result<bool, HostError> {
        let (root, path) = (root.to_owned(), path.to_owned());
        if !ours {
            return self.remove_left(plugin, vec![(root, path)], false).await;
        }
        let (held, fd) = self.held_for(&path)?;
        let request = HelperRequest::RemoveOrphan { root, path, held };
        self.with_descriptor(plugin, request, fd).await.map(|(answer, _)| answer)
    }

    /// Removes paths, each below its directory, as [`Self::remove`] does. Returns whether all are gone. A user or the plugin may have
    /// mounted something there, in a namespace of its own. The kernel unmounts that, and its server may hold that up, so the helper
    /// removes the paths. `despite_hung`: also while many of these calls hang.
    pub async fn remove_left(
        &self,
        plugin: &str,
        paths: Vec<(PathBuf, PathBuf)>,
        despite_hung: bool,
    ) -> Result<bool, HostError> {
        // A row of an older csid may be below the plugin's root, and another one of the volume in its tmpfs.
        let (mut left, mut all) = (paths, Ok(true));
        while !left.is_empty() {
            let first = left.remove(0);
            let (held, fd) = self.held_for(&first.1)?;
            let is_of_it = |(_, path): &mut (PathBuf, PathBuf)| {
                held.as_deref() == self.lives.around(path).as_deref().map(|live| &*live.at)
            };
            let paths = std::iter::once(first).chain(left.extract_if(.., is_of_it)).collect();
            let request = HelperRequest::RemoveLeft { paths, held: held.clone(), despite_hung };
            let gone = self.with_descriptor::<bool>(plugin, request, fd).await.map(|(gone, _)| gone);
            // The other paths are tried, too.
            all = all.and_then(|all| gone.map(|gone| all && gone));
        }
        all
    }

    /// Returns the path and a descriptor of the tmpfs that `path` is in. `None`: it is in none.
    fn held_for(&self, path: &Path) -> Result<(Option<PathBuf>, Option<OwnedFd>), HostError> {
        let held = self.lives.around(path);
        let fd = held.as_ref().map(|live| live.descriptor()).transpose()?;
        Ok((held.map(|live| live.at.clone()), fd))
    }

    pub(super) async fn within<T: DeserializeOwned>(
        &self,
        plugin: &str,
        request: HelperRequest,
    ) -> Result<T, HostError> {
        self.with_descriptor(plugin, request, None).await.map(|(answer, _)| answer)
    }

    pub(super) async fn with_descriptor<T: DeserializeOwned>(
        &self,
        plugin: &str,
        request: HelperRequest,
        fd: Option<OwnedFd>,
    ) -> Result<(T, Option<Tree>), HostError> {
        let path = || helper::hung_at(&request).to_owned();
        match self.helper.call::<Result<T, HostError>>(plugin, &request, fd, Some(DEADLINE)).await {
            Ok((answer, fd)) => answer.map(|answer| (answer, fd)),
            Err(Unanswered::Hung) => Err(HostError::Hung(path())),
            Err(Unanswered::Lost(source)) => Err(HostError::Helper { path: path(), source }),
        }
    }
}

/// Returns the directory from which a path in the tmpfs `held` is walked. `None`: the path is in no tmpfs, and walked from `root`.
fn base<'a>(root: &'a Path, held: Option<&'a HeldLive>) -> Base<'a> {
    held.map_or(Base::at(root), HeldLive::base)
}
