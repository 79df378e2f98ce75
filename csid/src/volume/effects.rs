//! Each effect of the state machine, done and looked at: the RPC, and what the kernel shows of it afterwards. Nothing here
//! decides what comes next.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Instant;

use tonic::Code;

use crate::error::{Error, Kind};
use crate::fault;
use crate::host::{Access, Bind, Host, HostError, Look, Restrict, Unbind};
use crate::plugin::{Call, Class, Ready, RpcError};
use crate::secret::Secrets;
use crate::store::rows::{AttachmentMode, Leg, MountRow};
use crate::volume::paths;
use crate::volume::reconcile::entries;
use crate::volume::served::Served;
use crate::volume::state::{Action, Outcome, Volume};

/// Why an effect did not come to be.
pub(super) struct Failure {
    pub(super) outcome: Outcome,
    pub(super) error: Error,
    /// The plugin gave a definite answer: the same again is answered alike.
    pub(super) definite: bool,
    /// The connection broke: the whole operation may be tried again once this has been undone.
    pub(super) broken: bool,
    /// A mount that no row explains is in the way.
    pub(super) orphan: bool,
    /// Somebody uses what was to be taken; nothing was taken.
    pub(super) in_use: bool,
    /// The plugin says that it has no such call.
    pub(super) unimplemented: bool,
}

impl Failure {
    pub(super) fn new(outcome: Outcome, error: Error) -> Self {
        Failure {
            outcome,
            error,
            definite: false,
            broken: false,
            orphan: false,
            in_use: false,
            unimplemented: false,
        }
    }

    fn definite(error: Error) -> Self {
        Failure { definite: true, ..Failure::new(Outcome::Failed, error) }
    }
}

/// csid's own failure: nothing that a second try would better.
impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::definite(error)
    }
}

impl From<RpcError> for Failure {
    fn from(error: RpcError) -> Self {
        let (outcome, definite) = match error.class {
            Class::NotSent => (Outcome::NotSent, false),
            Class::Transient => (Outcome::Again, false),
            // csid stops: the next one goes on.
            Class::Shutdown | Class::Forbidden => (Outcome::NotSent, true),
            Class::Refused | Class::Unimplemented => (Outcome::Failed, true),
            Class::Unknown => (Outcome::Failed, false),
        };
        let broken = error.class == Class::Unknown && error.code == Code::Unavailable;
        let unimplemented = error.class == Class::Unimplemented;
        Failure { definite, broken, unimplemented, ..Failure::new(outcome, error.into()) }
    }
}

impl From<HostError> for Failure {
    fn from(error: HostError) -> Self {
        let hung = matches!(error, HostError::Hung(_));
        let in_use =
            matches!(error, HostError::Busy { .. } | HostError::Occupied(_) | HostError::Unproven { .. });
        let outcome = if in_use { Outcome::NotSent } else { Outcome::Failed };
        Failure { outcome, in_use, definite: !hung, ..Failure::definite(error.into()) }
    }
}

type Effect = Result<Option<u64>, Failure>;

/// Where a mount is to be published nothing may be: a stacked mount is not made, and what another boot left is not trusted.
pub(super) async fn clear_the_way(
    host: &Host,
    plugin: &str,
    base: &Path,
    source: &Path,
) -> Result<(), Error> {
    // The mount's alone, whether it is published there or in it.
    let own = if source.ends_with(paths::VOLUME) { source.parent().unwrap_or(source) } else { source };
    let look = host.look_below(plugin, base, own).await;
    let is_free = match look {
        Look::Missing => true,
        // Left from when the volume could have several users, or could not.
        Look::Plain | Look::Device { .. } => {
            host.remove(base, own)?
                || (host.remove(base, &own.join(paths::VOLUME))? && host.remove(base, own)?)
        }
        Look::Mounted { .. } | Look::Dead(_) | Look::Hung => false,
    };
    if is_free {
        return Ok(());
    }
    let ill = match look {
        Look::Dead(code) => format!(" (to look at it fails: {})", std::io::Error::from_raw_os_error(code)),
        Look::Hung => " (to look at it hangs)".to_owned(),
        _ => String::new(),
    };
    let at = if look == Look::Plain { source } else { own };
    let text = format!(
        "something that no row explains is at {}{ill}; look at it with `csictl reconcile --dry-run`, then remove it \
         with `csictl reconcile --remove-orphans`",
        at.display()
    );
    Err(Error::new(Kind::Busy, text))
}

/// One effect's surroundings.
pub(super) struct Surroundings<'a> {
    pub(super) host: &'a Host,
    pub(super) served: &'a Served,
    pub(super) ready: &'a Ready,
    pub(super) volume: &'a Volume,
    pub(super) mount: &'a MountRow,
    pub(super) secrets: Option<&'a Secrets>,
    pub(super) deadline: Instant,
    /// The directory below which csid makes and removes directories for this plugin.
    pub(super) base: &'a Path,
    pub(super) target_root: Result<PathBuf, Error>,
    /// The leg as it was before.
    pub(super) from: Leg,
    /// Detach what is dead lazily.
    pub(super) force: bool,
}

impl Surroundings<'_> {
    pub(super) async fn perform(&self, action: Action) -> Effect {
        match action {
            Action::Stage => self.stage().await,
            Action::Publish => self.publish().await,
            Action::Bind => self.bind().await,
            Action::Unbind => self.unbind().await,
            Action::Unpublish => self.unpublish().await,
            Action::Unstage => self.unstage().await,
        }
    }

    fn plugin(&self) -> &str {
        &self.volume.row.key.plugin
    }

    fn source(&self) -> &Path {
        Path::new(&self.mount.source)
    }

    fn call(&self) -> Call<'_> {
        let spec = &self.mount.spec;
        Call {
            external_id: &self.volume.row.key.external_id,
            staging: &self.volume.row.staging,
            target: &self.mount.source,
            usage: &spec.usage,
            read_only: spec.read_only,
            uid: self.mount.uid,
            secrets: self.secrets,
            secrets_forgotten: self.volume.has_forgotten_secrets(&self.mount.key, self.secrets.is_some()),
            deadline: self.deadline,
        }
    }

    async fn stage(&self) -> Effect {
        let staging = Path::new(&self.volume.row.staging);
        let parent = staging.parent().unwrap_or(self.base);
        if self.host.look_below(self.plugin(), self.base, parent).await == Look::Missing {
            self.make_directory(parent, Access::Private)?;
        }
        self.make_directory(staging, Access::Private)?;
        fault::around("NodeStageVolume", self.ready.stage(self.call())).await?;
        Ok(None)
    }

    /// Before anything was asked of the plugin: what fails here changed nothing.
    fn make_directory(&self, path: &Path, access: Access) -> Result<(), Failure> {
        let relative = path.strip_prefix(self.base).map_err(|_| {
            let text =
                format!("{} is not below {}: was plugin-root changed?", path.display(), self.base.display());
            Failure { outcome: Outcome::NotSent, ..Failure::definite(Error::internal(text)) }
        })?;
        let made = self.host.make_directory(self.base, relative, access);
        made.map_err(|error| Failure { outcome: Outcome::NotSent, ..Failure::from(error) })
    }

    async fn publish(&self) -> Effect {
        // Nobody gets in and runs a set-uid program before the mount is nosuid.
        let own = self.source().parent().unwrap_or(self.base);
        let is_shared = self.shares(own);
        self.make_directory(own, if is_shared { Access::Passable } else { Access::Closed })?;
        fault::around("NodePublishVolume", self.ready.publish(self.call())).await?;
        let number = self.verify().await?;
        if !is_shared {
            self.host.open_up(own)?;
        }
        Ok(number)
    }

    /// Whether somebody else's publish is in the directory, as an older csid made them: what he has stays open.
    fn shares(&self, own: &Path) -> bool {
        let mut others = self.volume.mounts.iter().filter(|other| other.key != self.mount.key);
        others.any(|other| other.publish != Leg::Absent && Path::new(&other.source).starts_with(own))
    }

    /// What the plugin says it published has to be there, of the right kind, and no more writable than asked.
    async fn verify(&self) -> Effect {
        let spec = &self.mount.spec;
        let lie = |what: &str| {
            let text = format!("NodePublishVolume: OK, but {what} at {}", self.mount.source);
            Failure::definite(Error::new(Kind::PluginError, text).with(|d| d.rpc = Some("NodePublishVolume")))
        };
        let look = match spec.usage.attachment_mode {
            AttachmentMode::FileSystem => {
                let how = Restrict { nosuid: !spec.suid, nodev: !spec.dev, read_only: spec.read_only };
                match self.host.restrict(self.plugin(), self.source(), how).await {
                    Err(HostError::Hung(_)) => Look::Hung,
                    look => look?,
                }
            }
            AttachmentMode::BlockDevice => self.host.look(self.plugin(), self.source()).await,
        };
        match (spec.usage.attachment_mode, look) {
            (AttachmentMode::FileSystem, Look::Mounted { device, served }) => {
                if served {
                    self.served.note(self.mount);
                }
                if spec.read_only && !self.host.is_read_only(self.plugin(), self.source()).await? {
                    return Err(lie("a writable mount for a read-only one is"));
                }
                Ok(Some(device))
            }
            (AttachmentMode::BlockDevice, Look::Device { rdev }) => {
                if spec.read_only && !self.host.block_is_read_only(rdev)? {
                    return Err(lie("a writable device for a read-only one is"));
                }
                Ok(Some(rdev))
            }
            (AttachmentMode::BlockDevice, Look::Mounted { .. }) => {
                Err(lie("a file system, not a block device, is"))
            }
            (AttachmentMode::FileSystem, Look::Device { .. }) => {
                Err(lie("a block device, not a file system, is"))
            }
            (_, Look::Missing | Look::Plain) => Err(lie("nothing is mounted")),
            (_, Look::Dead(_)) => Err(lie("a dead mount is")),
            (_, Look::Hung) => Err(Failure::new(
                Outcome::Failed,
                Error::new(
                    Kind::PluginError,
                    format!("the file system at {} does not answer", self.mount.source),
                ),
            )),
        }
    }

    async fn bind(&self) -> Effect {
        let spec = &self.mount.spec;
        let Some(target) = &spec.target else { return Ok(None) };
        let options = Bind {
            replaces_dead: self.mount.spec.died.clone(),
            nosuid: !spec.suid,
            nodev: !spec.dev && spec.usage.attachment_mode == AttachmentMode::FileSystem,
            read_only: spec.read_only,
            propagation: spec.propagation,
        };
        let nothing = |failure: Failure| Failure { outcome: Outcome::NotSent, ..failure };
        let root = self.target_root.as_ref().map_err(|error| nothing(error.clone().into()))?;
        match self.host.bind(self.plugin(), self.source(), root, Path::new(target), options).await {
            Ok(()) => Ok(None),
            // Whether it was done is not known.
            Err(error @ HostError::Hung(_)) => Err(error.into()),
            Err(error) => Err(nothing(error.into())),
        }
    }

    async fn unbind(&self) -> Effect {
        let Some(target) = self.mount.spec.target.as_ref().map(Path::new) else { return Ok(None) };
        let were = self.mount.device.into_iter().chain(self.mount.spec.died.iter().copied()).collect();
        let how = match self.mount.spec.healing {
            _ if self.force => Unbind::Forced,
            true => Unbind::Dead,
            false => Unbind::Unused,
        };
        let unbound = self.host.unbind(self.plugin(), self.source(), target, were, how).await?;
        if !unbound && self.from == Leg::Present && !self.force {
            self.refuse_if_moved(target)?;
        }
        Ok(None)
    }

    /// A bind that is not where it was made, though nobody unmounted it: a directory above the target was renamed. Unmount
    /// does not answer while the consumer still has it.
    fn refuse_if_moved(&self, target: &Path) -> Result<(), Failure> {
        let ours = |path: &Path| {
            let rows = self.volume.mounts.iter();
            path == Path::new(&self.volume.row.staging)
                || rows
                    .flat_map(|row| [Some(&row.source), row.spec.target.as_ref()])
                    .flatten()
                    .any(|own| path == Path::new(own))
        };
        match self.host.copies(self.source())?.into_iter().find(|path| !ours(path)) {
            None => Ok(()),
            Some(path) => {
                let text = format!(
                    "nothing is mounted at {}, but the volume is at {}: was a directory renamed? Unmount that, then \
                     unmount again",
                    target.display(),
                    path.display()
                );
                let failure = Failure::definite(Error::new(Kind::Busy, text));
                Err(Failure { outcome: Outcome::NotSent, in_use: true, ..failure })
            }
        }
    }

    async fn unpublish(&self) -> Effect {
        self.detach_dead(self.source()).await?;
        fault::around("NodeUnpublishVolume", self.ready.unpublish(self.call())).await?;
        match self.host.look_below(self.plugin(), self.base, self.source()).await {
            Look::Missing => Ok(None),
            // The plugin is to delete its target (CSI rule 29); some leave it.
            Look::Plain | Look::Device { .. } => match self.host.remove(self.base, self.source())? {
                true => Ok(None),
                false => Err(self.still_there("NodeUnpublishVolume", &self.mount.source)),
            },
            Look::Mounted { .. } | Look::Dead(_) | Look::Hung => {
                Err(self.still_there("NodeUnpublishVolume", &self.mount.source))
            }
        }
    }

    /// What is dead leaves the tree before the plugin is told, which would find it busy for as long as anybody has a file of it open.
    async fn detach_dead(&self, path: &Path) -> Result<(), Failure> {
        if !(self.force || self.mount.spec.healing) {
            return Ok(());
        }
        let look = self.host.look_below(self.plugin(), self.base, path).await;
        if look.has_lost_its_server() || (self.force && matches!(look, Look::Dead(_) | Look::Hung)) {
            self.host.detach(self.plugin(), path).await?;
        }
        Ok(())
    }

    async fn unstage(&self) -> Effect {
        if let Some(path) = self.unexplained().await {
            let text = format!(
                "{} is mounted and no row explains it; the volume stays staged until it is gone",
                path.display()
            );
            let failure = Failure::definite(Error::new(Kind::Busy, text));
            return Err(Failure { outcome: Outcome::NotSent, orphan: true, ..failure });
        }
        let staging = Path::new(&self.volume.row.staging);
        self.detach_dead(staging).await?;
        fault::around("NodeUnstageVolume", self.ready.unstage(self.call())).await?;
        match self.host.look_below(self.plugin(), self.base, staging).await {
            Look::Missing | Look::Plain | Look::Device { .. } => Ok(None),
            Look::Mounted { .. } | Look::Dead(_) | Look::Hung => {
                Err(self.still_there("NodeUnstageVolume", &self.volume.row.staging))
            }
        }
    }

    /// Unmount is never "success because rmdir worked": what the plugin says is gone has to be gone.
    fn still_there(&self, rpc: &'static str, path: &str) -> Failure {
        let text = format!("{rpc}: OK, but {path} is still there");
        Failure::new(Outcome::Failed, Error::new(Kind::PluginError, text).with(|d| d.rpc = Some(rpc)))
    }

    /// A mount below the volume's publish directory: no row has one when the volume is unstaged.
    async fn unexplained(&self) -> Option<PathBuf> {
        let mounts = self.volume.mounts.iter();
        let directories: BTreeSet<&Path> =
            mounts.filter_map(|mount| paths::of_volume(Path::new(&mount.source))).collect();
        let mut paths: Vec<PathBuf> = directories.into_iter().flat_map(entries).collect();
        while let Some(path) = paths.pop() {
            match self.host.look_below(self.plugin(), self.base, &path).await {
                Look::Missing => {}
                Look::Plain if !path.ends_with(paths::VOLUME) => paths.push(path.join(paths::VOLUME)),
                Look::Plain => {}
                _ => return Some(path),
            }
        }
        None
    }
}
