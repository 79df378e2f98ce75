//! Performs the effects of mounts: makes the RPC, then compares the state of the kernel. The state machine decides the next
//! step.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::error::{Error, Kind, Obstacle, shown};
use crate::fault;
use crate::host::TargetFd;
use crate::host::{Access, Backing, Bind, Host, HostError, Look, Restrict, Unbind};
use crate::plugin::{NodeCall, Ready, RpcError, RpcKind, RpcOutcome};
use crate::secret::Secrets;
use crate::store::rows::{AttachmentMode, Leg, MountRow, VolumeRow};
use crate::volume::api::requests::Force;
use crate::volume::context::Context;
use crate::volume::errors::mount::MountError;
use crate::volume::executor::Searched;
use crate::volume::lifecycle::known_id;
use crate::volume::model::paths;
use crate::volume::model::subject::Subject;
use crate::volume::model::volume::{Action, Outcome, Volume};
use crate::volume::operation::table::Progress;
use crate::volume::probe::STALE;

/// Reason why an effect did not succeed.
pub(in crate::volume) struct EffectFailure {
    pub(in crate::volume) outcome: Outcome,
    pub(in crate::volume) error: Error,
    /// Whether the answer is definite: the same call would be answered alike.
    pub(in crate::volume) definite: bool,
    /// Whether the RPC may have had its effect, or have it yet.
    pub(in crate::volume) unknown: bool,
    /// Whether an answer came. False: the RPC timed out or its connection broke.
    pub(in crate::volume) answered: bool,
    /// Whether the connection broke. If so, the whole operation may be retried once this effect has been rolled back.
    pub(in crate::volume) broken: bool,
    /// Whether a mount that no row explains is in the way.
    pub(in crate::volume) orphan: bool,
    /// Whether the mount to be removed is in use. If so, nothing was removed.
    pub(in crate::volume) in_use: bool,
    /// Whether the plugin says that it has no such call.
    pub(in crate::volume) unimplemented: bool,
    /// Whether a volume is in use of which csid has no mount any more. csid waits for its release.
    pub(in crate::volume) held: bool,
}

impl EffectFailure {
    pub(in crate::volume) fn new(outcome: Outcome, error: Error) -> Self {
        EffectFailure {
            outcome,
            error,
            definite: false,
            unknown: false,
            answered: true,
            broken: false,
            orphan: false,
            in_use: false,
            unimplemented: false,
            held: false,
        }
    }

    /// Makes the failure of an effect that did nothing. The error decides the rest.
    pub(in crate::volume) fn nothing_done(error: impl Into<EffectFailure>) -> Self {
        EffectFailure { outcome: Outcome::NotSent, ..error.into() }
    }

    fn held(outcome: Outcome, error: Error) -> Self {
        EffectFailure { held: true, outcome, ..EffectFailure::definite(error) }
    }

    fn definite(error: Error) -> Self {
        EffectFailure { definite: true, ..EffectFailure::new(Outcome::Failed, error) }
    }
}

/// A failure of csid itself. A retry would not change it.
impl From<Error> for EffectFailure {
    fn from(error: Error) -> Self {
        EffectFailure::definite(error)
    }
}

impl From<RpcError> for EffectFailure {
    fn from(error: RpcError) -> Self {
        let meaning = error.outcome(RpcKind::Mount);
        let (outcome, definite) = match meaning {
            RpcOutcome::NotSent => (Outcome::NotSent, false),
            RpcOutcome::Withheld => (Outcome::NotSent, true),
            RpcOutcome::Again { .. } => (Outcome::Again, false),
            RpcOutcome::Refused | RpcOutcome::Unimplemented => (Outcome::Failed, true),
            RpcOutcome::Unknown => (Outcome::Failed, false),
        };
        let (unknown, answered, broken) = (meaning == RpcOutcome::Unknown, error.answered, error.is_broken());
        let unimplemented = meaning == RpcOutcome::Unimplemented;
        EffectFailure {
            definite,
            unknown,
            answered,
            broken,
            unimplemented,
            ..EffectFailure::new(outcome, error.into())
        }
    }
}

impl From<HostError> for EffectFailure {
    fn from(error: HostError) -> Self {
        let hung = matches!(error, HostError::Hung(_) | HostError::Helper { .. } | HostError::Search(_));
        let in_use = matches!(
            error,
            HostError::Busy { .. }
                | HostError::Occupied(_)
                | HostError::Unproven { .. }
                | HostError::AutomountPending(_)
        );
        let outcome = if in_use { Outcome::NotSent } else { Outcome::Failed };
        EffectFailure { outcome, in_use, definite: !hung, ..EffectFailure::definite(error.into()) }
    }
}

type Effect = Result<Option<u64>, EffectFailure>;

/// Returns the journal's record of the file systems and devices that keep the volume.
pub(in crate::volume) fn known(volume: &VolumeRow) -> Result<Backing, Error> {
    Backing::from_text(volume.backing.as_deref().unwrap_or_default()).map_err(|error| {
        Error::internal(format!(
            "the journal's record of what the mounts of volume {} of plugin {} showed cannot be read: {error}",
            volume.key.handle, volume.key.plugin
        ))
    })
}

/// Removes what is left at a path before a mount is published there. Refuses a path that is in use: csid does not stack mounts,
/// and does not trust what another boot left.
pub(in crate::volume) async fn clear_the_way(
    host: &Host,
    plugin: &str,
    base: &Path,
    source: &Path,
) -> Result<(), Error> {
    // This directory belongs to the mount alone, whether the mount is published there or in it.
    let own = if source.ends_with(paths::VOLUME) { source.parent().unwrap_or(source) } else { source };
    let look = host.look_below(plugin, base, own).await;
    let is_free = match look {
        Look::Missing => true,
        // The directory is left from a time when the volume could have several users, or could not.
        Look::Plain | Look::Device { .. } => {
            let remove =
                async |path: &Path| host.remove_left(plugin, vec![(base.into(), path.into())], false).await;
            remove(own).await? || (remove(&own.join(paths::VOLUME)).await? && remove(own).await?)
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
    let text = format!("something that no row explains is at {}{ill}", shown(at));
    Err(Error::new(Kind::Busy, text).obstructed_by(Obstacle::UnknownMount))
}

/// Context in which one effect is performed.
pub(in crate::volume) struct EffectContext<'a> {
    pub(in crate::volume) host: &'a Host,
    pub(in crate::volume) shared: &'a Context,
    pub(in crate::volume) ready: &'a Ready,
    pub(in crate::volume) volume: &'a Volume,
    pub(in crate::volume) mount: &'a MountRow,
    pub(in crate::volume) secrets: Option<&'a Secrets>,
    pub(in crate::volume) patience: Duration,
    /// Flag that is set when the RPC may have been sent to the plugin.
    pub(in crate::volume) asked: &'a AtomicBool,
    /// Directory below which csid makes and removes directories for this plugin.
    pub(in crate::volume) base: &'a Path,
    /// The plugin's own processes.
    pub(in crate::volume) processes: Vec<u32>,
    pub(in crate::volume) target_root: Result<PathBuf, Error>,
    /// Descriptor of the target, from the operation's caller. `None`: the caller passed none.
    pub(in crate::volume) target_fd: Option<&'a TargetFd>,
    pub(in crate::volume) progress: &'a Progress,
    /// State of the leg before the effect.
    pub(in crate::volume) from: Leg,
    pub(in crate::volume) force: Force,
    /// The search of the operation that found no copy elsewhere. `None`: there was none, or an effect has failed since.
    pub(in crate::volume) searched: Option<&'a Searched>,
}

impl EffectContext<'_> {
    pub(in crate::volume) async fn perform(&self, action: Action) -> Effect {
        match action {
            Action::Stage => self.stage(self.external_id()?).await,
            Action::Publish => self.publish(self.external_id()?).await,
            Action::Bind => self.bind().await,
            Action::Unbind => self.unbind().await,
            Action::Unpublish => self.unpublish(self.external_id()?).await,
            Action::Unstage => self.unstage(self.external_id()?).await,
        }
    }

    /// Returns the id by which RPCs name the volume. A failure changed nothing.
    fn external_id(&self) -> Result<&str, EffectFailure> {
        let subject = Subject::Mount(self.mount.key.clone());
        known_id(&self.volume.row.key, &subject).map_err(EffectFailure::nothing_done)
    }

    fn plugin(&self) -> &str {
        &self.volume.row.key.plugin
    }

    fn source(&self) -> &Path {
        Path::new(&self.mount.source)
    }

    /// Returns the staging path. A failure changed nothing.
    fn staging(&self) -> Result<&Path, EffectFailure> {
        let staging = self.volume.row.staging.as_deref().map(Path::new);
        let lost = || Error::internal("a volume that is staged has no staging path");
        staging.ok_or_else(|| EffectFailure::nothing_done(lost()))
    }

    /// Returns the path at which the plugin publishes.
    fn published(&self) -> &Path {
        Path::new(self.mount.published())
    }

    fn call<'c>(&'c self, external_id: &'c str) -> NodeCall<'c> {
        let spec = &self.mount.spec;
        NodeCall {
            external_id,
            staging: self.volume.row.staging.as_deref(),
            target: self.mount.published(),
            usage: &spec.usage,
            read_only: spec.read_only,
            uid: self.mount.uid,
            secrets: self.secrets,
            secrets_forgotten: self.volume.has_forgotten_secrets(&self.mount.key, self.secrets.is_some()),
            patience: self.patience,
            asked: Some(self.asked),
        }
    }

    async fn stage(&self, external_id: &str) -> Effect {
        let staging = self.staging()?;
        let parent = staging.parent().unwrap_or(self.base);
        if self.host.look_unmounted(self.base, parent) == Some(Look::Missing) {
            self.make_directory(parent, Access::Private)?;
        }
        self.make_directory(staging, Access::MountPoint)?;
        fault::around("NodeStageVolume", self.ready.stage(self.call(external_id))).await?;
        Ok(None)
    }

    /// Makes a directory before any RPC is sent. A failure here changed nothing.
    fn make_directory(&self, path: &Path, access: Access) -> Result<(), EffectFailure> {
        let made = self.host.make_directory(self.base, self.below_base(path)?, access);
        made.map_err(EffectFailure::nothing_done)
    }

    /// Makes an empty file at which a device is to be shown.
    fn make_file(&self, path: &Path) -> Result<(), EffectFailure> {
        let made = self.host.make_file(self.base, self.below_base(path)?);
        made.map_err(EffectFailure::nothing_done)
    }

    fn below_base<'p>(&self, path: &'p Path) -> Result<&'p Path, EffectFailure> {
        path.strip_prefix(self.base).map_err(|_| {
            let text =
                format!("{} is not below {}: was plugin-root changed?", path.display(), self.base.display());
            EffectFailure::nothing_done(Error::internal(text))
        })
    }

    async fn publish(&self, external_id: &str) -> Effect {
        let (published, source) = (self.published(), self.source());
        if published == source {
            let text = format!("{} is no path that csid makes", shown(source));
            return Err(EffectFailure::nothing_done(Error::internal(text)));
        }
        let of_volume = published.parent().unwrap_or(self.base);
        let private = of_volume.parent().unwrap_or(self.base);
        if self.host.look_unmounted(self.base, private) == Some(Look::Missing) {
            self.make_directory(private, Access::Private)?;
        }
        self.make_directory(of_volume, Access::Private)?;
        let own = source.parent().unwrap_or(self.base);
        self.make_directory(own, self.access(own))?;
        match self.mount.spec.usage.attachment_mode {
            AttachmentMode::FileSystem => self.make_directory(source, Access::MountPoint)?,
            AttachmentMode::BlockDevice => self.make_file(source)?,
        }
        if self.mount.status.counted
            && let Err(error) = self.ready.unpublish(self.call(external_id)).await
        {
            tracing::info!(plugin = self.plugin(), %error, "it was published in an earlier boot");
        }
        fault::around("NodePublishVolume", self.ready.publish(self.call(external_id))).await?;
        // The plugin has published, so the former state is gone, whatever csid failed to do.
        let changed = |failure: EffectFailure| match failure.outcome {
            Outcome::NotSent => EffectFailure { outcome: Outcome::Failed, ..failure },
            _ => failure,
        };
        self.progress.set_part("deliver");
        fault::around("deliver", self.deliver()).await.map_err(changed)
    }

    /// Returns who may pass through the directory of the consumers' path. Consumers with a target find the volume at the target
    /// instead.
    fn access(&self, own: &Path) -> Access {
        let is_there = |mount: &MountRow| mount.key == self.mount.key || mount.publish != Leg::Absent;
        // The row of an older csid lets the consumer use this path as well as its target.
        let uses_it = |mount: &MountRow| mount.spec.target.is_none() || mount.published.is_none();
        let own = own.to_string_lossy();
        let is_below = |mount: &MountRow| paths::is_at_or_below(&mount.source, &own);
        match self.volume.mounts.iter().any(|mount| is_below(mount) && is_there(mount) && uses_it(mount)) {
            true => Access::Passable,
            false => Access::Private,
        }
    }

    /// Clones the plugin's publish to the path where consumers find it. The publish has to be there, of the right kind, and no
    /// more writable than requested.
    async fn deliver(&self) -> Effect {
        let (spec, published) = (&self.mount.spec, self.published());
        let lie = |what: &str| {
            let text = format!("NodePublishVolume: OK, but {what} at {}", published.display());
            EffectFailure::definite(
                Error::new(Kind::PluginError, text).with(|d| d.rpc = Some("NodePublishVolume")),
            )
        };
        let is_file_system = spec.usage.attachment_mode == AttachmentMode::FileSystem;
        let how =
            Restrict { nosuid: !spec.suid, nodev: !spec.dev && is_file_system, read_only: spec.read_only };
        let look = match self.host.deliver(self.plugin(), published, self.source(), how).await {
            Err(HostError::Hung(_)) => Look::Hung,
            look => look?,
        };
        match (spec.usage.attachment_mode, look) {
            (AttachmentMode::FileSystem, Look::Mounted { device, served }) => {
                if served {
                    self.shared.served.note(self.mount);
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
            (_, Look::Hung) => {
                let text = format!("the file system at {} does not answer", published.display());
                Err(EffectFailure::new(Outcome::Failed, Error::new(Kind::PluginError, text)))
            }
        }
    }

    async fn bind(&self) -> Effect {
        let spec = &self.mount.spec;
        let Some(target) = &spec.target else { return Ok(None) };
        let options = Bind {
            uid: self.mount.uid,
            replaces_dead: self.mount.status.died.clone(),
            nosuid: !spec.suid,
            nodev: !spec.dev && spec.usage.attachment_mode == AttachmentMode::FileSystem,
            read_only: spec.read_only,
            propagation: spec.propagation,
        };
        let refused = |error: &Error| EffectFailure::nothing_done(error.clone());
        let root = self.target_root.as_ref().map_err(refused)?;
        let (plugin, source, target) = (self.plugin(), self.source(), Path::new(target));
        let bound = match self.target_fd {
            Some(fd) => self.host.bind_at(plugin, source, target, fd, options).await,
            None => self.host.bind(plugin, source, root, target, options).await,
        };
        match bound {
            Ok(()) => Ok(None),
            // The outcome is unknown.
            Err(error @ (HostError::Hung(_) | HostError::Helper { .. })) => Err(error.into()),
            Err(error) => Err(EffectFailure::nothing_done(error)),
        }
    }

    async fn unbind(&self) -> Effect {
        let Some(target) = self.mount.spec.target.as_ref().map(Path::new) else { return Ok(None) };
        if self.force == Force::Hung {
            return self.detach_hung(self.source(), target).await;
        }
        let (were, how) = self.unbinding();
        let (plugin, source, fd) = (self.plugin(), self.source(), self.target_fd);
        // A bind that was not answered may be under way. The helper runs the bind and this unbind one after the other.
        let unbound = match fd.filter(|_| self.from == Leg::Present).map(|fd| self.host.is_free(fd, target)) {
            Some(Ok(true)) => false,
            _ => self.host.unbind_at(plugin, source, target, were, how, fd).await?,
        };
        if !unbound && self.from == Leg::Present && self.force == Force::No {
            self.refuse_if_moved(target)?;
        }
        Ok(None)
    }

    /// Returns the device numbers that prove a mount to be a clone of the volume's mount, and which clones are unmounted.
    fn unbinding(&self) -> (Vec<u64>, Unbind) {
        let were = self.mount.device.into_iter().chain(self.mount.status.died.iter().copied()).collect();
        let how = match self.mount.status.healing {
            _ if self.force != Force::No => Unbind::Forced,
            true => Unbind::Dead,
            false => Unbind::Unused,
        };
        (were, how)
    }

    /// Detaches from `target` the clone of a hung mount at `source`. Only the mount table is read: no request goes to the
    /// server.
    async fn detach_hung(&self, source: &Path, target: &Path) -> Effect {
        let table = self.host.mount_table()?;
        let Some(there) = table.at(target) else { return Ok(None) };
        let source = table.at(source);
        let is_other =
            source.is_some_and(|source| (source.device, source.root) != (there.device, there.root));
        if is_other || Some(there.device) != self.mount.device {
            return Err(HostError::Occupied(target.into()).into());
        }
        self.host.detach(self.plugin(), target, true).await?;
        Ok(None)
    }

    /// Refuses the unmount if the bind is not at its target, although nothing unmounted it: a directory above the target was
    /// renamed. Unmount does not answer while the consumer still has the volume.
    fn refuse_if_moved(&self, target: &Path) -> Result<(), EffectFailure> {
        let ours = |path: &Path| {
            let rows = self.volume.mounts.iter();
            Some(path) == self.volume.row.staging.as_deref().map(Path::new)
                || rows
                    .flat_map(|row| {
                        [Some(row.source.as_str()), Some(row.published()), row.spec.target.as_deref()]
                    })
                    .flatten()
                    .any(|own| path == Path::new(own))
        };
        match self.host.copies(self.source())?.into_iter().find(|path| !ours(path)) {
            None => Ok(()),
            Some(path) => {
                let text = format!(
                    "nothing is mounted at {}, but the volume is at {}, perhaps since a directory was renamed",
                    shown(target),
                    shown(&path)
                );
                let error = Error::new(Kind::Busy, text)
                    .obstructed_by(Obstacle::UnknownTarget)
                    .with(|details| details.holders = vec![path.display().to_string()]);
                Err(EffectFailure { in_use: true, ..EffectFailure::nothing_done(error) })
            }
        }
    }

    async fn unpublish(&self, external_id: &str) -> Effect {
        let (published, source) = (self.published(), self.source());
        self.detach_dead(source).await?;
        if published == source {
            return self.unpublish_all(external_id).await;
        }
        fault::around("withdraw", self.withdraw()).await?;
        // The consumer's mount is gone, so the leg has changed, whether the RPC was sent or not.
        let changed = |failure: EffectFailure| match failure.outcome {
            Outcome::NotSent => EffectFailure { outcome: Outcome::Again, ..failure },
            _ => failure,
        };
        self.unpublish_all(external_id).await.map_err(changed)
    }

    /// Unmounts the path where consumers find the volume, unless it is in use.
    async fn withdraw(&self) -> Result<(), EffectFailure> {
        let (published, source) = (self.published(), self.source());
        if self.force == Force::Hung {
            return self.detach_hung(published, source).await.map(drop);
        }
        let (were, how) = self.unbinding();
        match self.host.unbind(self.plugin(), published, source, were, how).await {
            // A plugin that was restarted has mounted the volume again, or has removed its own mount. The mount at csid's own
            // path is removed, unless a process uses it.
            Err(HostError::Unproven { .. } | HostError::Occupied(_)) => {
                Ok(self.host.clear(self.plugin(), source).await?)
            }
            other => Ok(other.map(drop)?),
        }
    }

    async fn unpublish_all(&self, external_id: &str) -> Effect {
        let published = self.published();
        let backing = self.backing()?;
        self.detach_dead(published).await?;
        fault::around("NodeUnpublishVolume", self.ready.unpublish(self.call(external_id))).await?;
        let look = self.host.look_below(self.plugin(), self.base, published).await;
        let gone = match look {
            Look::Missing => Ok(None),
            // csid removes the paths that it made, not those of another manager.
            Look::Plain | Look::Device { .. } if self.is_left_at_foreign_path(look)? => Ok(None),
            // The plugin has to delete its target (CSI rule 29). Some plugins leave it.
            Look::Plain | Look::Device { .. } => match self.remove(published).await? {
                true => Ok(None),
                false => Err(self.still_there("NodeUnpublishVolume", published, look).await),
            },
            Look::Mounted { .. } | Look::Dead(_) | Look::Hung => {
                Err(self.still_there("NodeUnpublishVolume", published, look).await)
            }
        };
        // A volume without staging is released with its last publish.
        if gone.is_ok()
            && self.volume.row.stage == Leg::Absent
            && !self.volume.published_elsewhere(&self.mount.key)
        {
            self.refuse_while_elsewhere(&backing, Outcome::Failed).await?;
            self.refuse_while_held(&backing).await?;
        }
        gone
    }

    fn is_own(&self, path: &Path) -> bool {
        paths::is_own(&self.volume.row.key, path)
    }

    /// Returns whether the plugin removed its mount from another manager's path and left the path. The path is a directory, a
    /// file, or a device node that is not mounted there.
    fn is_left_at_foreign_path(&self, look: Look) -> Result<bool, EffectFailure> {
        if self.is_own(self.published()) {
            return Ok(false);
        }
        Ok(look == Look::Plain || self.host.mount_table()?.at(self.published()).is_none())
    }

    /// Returns the journal's record of what the volume's mounts showed when their removal began.
    fn backing(&self) -> Result<Backing, EffectFailure> {
        known(&self.volume.row).map_err(EffectFailure::nothing_done)
    }

    /// Returns whether csid removes the mount whatever other namespaces show. Nothing can write to a dead mount.
    fn is_unsearched(&self) -> bool {
        self.force >= Force::Dead || self.mount.status.healing
    }

    /// Removes a path that csid made, if it is empty.
    async fn remove(&self, path: &Path) -> Result<bool, HostError> {
        let left = vec![(self.base.to_owned(), path.to_owned())];
        self.host.remove_left(self.plugin(), left, self.is_unsearched()).await
    }

    /// Returns an error while another mount namespace, or another path of csid's own, shows the volume. Such a mount may have appeared
    /// since Unmount probed.
    async fn refuse_while_elsewhere(&self, backing: &Backing, outcome: Outcome) -> Result<(), EffectFailure> {
        // What appears since is found after the unstage. The row, the claim and the attachment stay until it is gone.
        let has_just_searched = outcome == Outcome::NotSent
            && self.searched.is_some_and(|searched| searched.covers(&backing.shown));
        if self.is_unsearched() {
            return Ok(());
        }
        let failed = |error| EffectFailure { outcome, ..EffectFailure::from(error) };
        let consumer = &self.mount.key.consumer;
        if backing.knows_own() && !backing.shown.is_empty() {
            let mounts = self.host.own_mounts().await.map_err(failed)?;
            let found = backing.foreign(self.shared.mounted_here(self.volume, &mounts, &backing.shown));
            if !found.is_empty() {
                let at = found.iter().map(|mount| mount.path().to_owned()).collect();
                return Err(EffectFailure::held(outcome, MountError::StillBoundHere { at }.into()));
            }
        }
        if has_just_searched {
            return Ok(());
        }
        let found = self.host.copies_elsewhere(&backing.shown, &self.processes).await.map_err(failed)?;
        if found.is_empty() {
            return Ok(());
        }
        let holders = self.host.holders_elsewhere(&found).await;
        Err(EffectFailure::held(
            outcome,
            MountError::StillElsewhere { consumer: consumer.clone(), holders }.into(),
        ))
    }

    /// Returns an error while a user that no mount table shows holds the block device exclusively.
    async fn refuse_while_held(&self, backing: &Backing) -> Result<(), EffectFailure> {
        if self.is_unsearched() {
            return Ok(());
        }
        match self.host.is_held(self.plugin(), backing).await? {
            None => Ok(()),
            Some(device) => Err(EffectFailure::held(
                Outcome::Failed,
                MountError::DeviceInUse { device, consumer: self.mount.key.consumer.clone() }.into(),
            )),
        }
    }

    /// Detaches a dead mount before the RPC. Otherwise the plugin would find the mount busy for as long as a process has a file
    /// of it open.
    async fn detach_dead(&self, path: &Path) -> Result<(), EffectFailure> {
        if self.force == Force::No && !self.mount.status.healing {
            return Ok(());
        }
        let look = self.host.look_below(self.plugin(), self.base, path).await;
        let is_due = match look {
            Look::Dead(_) => look.has_lost_its_server() || self.force == Force::Hung,
            Look::Hung => self.force == Force::Hung,
            _ => false,
        };
        if is_due {
            self.host.detach(self.plugin(), path, look == Look::Hung).await?;
        }
        Ok(())
    }

    async fn unstage(&self, external_id: &str) -> Effect {
        if let Some(path) = self.unexplained() {
            let text = format!(
                "{} is mounted and no row explains it; the volume stays staged until it is gone",
                path.display()
            );
            let failure = EffectFailure::nothing_done(Error::new(Kind::Busy, text));
            return Err(EffectFailure { orphan: true, ..failure });
        }
        let staging = self.staging()?;
        let backing = self.backing()?;
        self.refuse_while_elsewhere(&backing, Outcome::NotSent).await?;
        self.detach_dead(staging).await?;
        fault::around("NodeUnstageVolume", self.unstage_counted(external_id)).await?;
        let look = self.host.look_below(self.plugin(), self.base, staging).await;
        match look {
            Look::Missing | Look::Plain | Look::Device { .. } => {
                // A namespace may have copied the staging while the call waited for its turn.
                self.refuse_while_elsewhere(&backing, Outcome::Failed).await?;
                self.refuse_while_held(&backing).await?;
                Ok(None)
            }
            Look::Mounted { .. } | Look::Dead(_) | Look::Hung => {
                Err(self.still_there("NodeUnstageVolume", staging, look).await)
            }
        }
    }

    /// Asks the plugin to unstage. A driver that counts publishes does not check the mounts. After a reboot that the driver did not see, it
    /// counts one more than csid has made, and refuses.
    async fn unstage_counted(&self, external_id: &str) -> Result<(), RpcError> {
        if self.from == Leg::Removing {
            self.unpublish_again(external_id).await;
        }
        match self.ready.unstage(self.call(external_id)).await {
            Err(error) if error.is_failed_precondition() => {
                self.unpublish_again(external_id).await;
                self.ready.unstage(self.call(external_id)).await
            }
            other => other,
        }
    }

    /// Repeats the unpublish of each mount of the volume, none of which is published. The answers decide nothing.
    async fn unpublish_again(&self, external_id: &str) {
        let unpublished = self.volume.mounts.iter().filter(|mount| mount.publish == Leg::Absent);
        for target in unpublished.map(|mount| mount.published()).filter(|path| !path.is_empty()) {
            if let Err(error) = self.ready.unpublish(NodeCall { target, ..self.call(external_id) }).await {
                tracing::info!(plugin = self.plugin(), %error, "it was unpublished before");
            }
        }
    }

    /// Returns the failure for a mount that the plugin reports as gone but that is still there. Unmount never succeeds only
    /// because rmdir worked. csid removes the mount itself, unless it is in use, and then calls the plugin again.
    async fn still_there(&self, rpc: &'static str, path: &Path, look: Look) -> EffectFailure {
        let mut is_dead = look.has_lost_its_server();
        if look.is_stale() {
            tokio::time::sleep(STALE).await;
            is_dead = self.host.look(self.plugin(), path).await.has_lost_its_server();
        }
        let taken = match look {
            _ if is_dead => self.host.detach(self.plugin(), path, false).await,
            Look::Mounted { .. } | Look::Device { .. } => self.host.clear(self.plugin(), path).await,
            _ => Ok(()),
        };
        if let Err(error) = taken {
            tracing::warn!(path = %path.display(), %error, "cannot unmount what the plugin left");
        }
        let text = format!("{rpc}: OK, but {} is still there", path.display());
        EffectFailure::new(Outcome::Failed, Error::new(Kind::PluginError, text).with(|d| d.rpc = Some(rpc)))
    }

    /// Returns a mount below the volume's directories of publishes. No row has such a mount when the volume is unstaged.
    /// `None`: there is none.
    fn unexplained(&self) -> Option<PathBuf> {
        let mounts = self.volume.mounts.iter();
        let sources = mounts.map(|mount| Path::new(&mount.source)).filter(|path| self.is_own(path));
        let directories = sources.flat_map(|source| {
            let private = paths::private(source);
            let of_plugin = private.as_deref().and_then(Path::parent);
            [paths::of_volume(source), of_plugin].map(|path| path.map(Path::to_path_buf))
        });
        let directories: BTreeSet<PathBuf> = directories.flatten().collect();
        let mut paths: Vec<PathBuf> = Vec::new();
        for directory in directories {
            match self.host.entries(self.base, &directory) {
                Ok(found) => paths.extend(found),
                Err(_) => return Some(directory),
            }
        }
        while let Some(path) = paths.pop() {
            match self.host.look_unmounted(self.base, &path) {
                Some(Look::Missing) => {}
                Some(Look::Plain) if !path.ends_with(paths::VOLUME) => paths.push(path.join(paths::VOLUME)),
                Some(Look::Plain) => {}
                _ => return Some(path),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effect_that_did_nothing_keeps_what_its_error_says() {
        let failure = EffectFailure::nothing_done(HostError::Hung("/srv".into()));
        assert!(failure.outcome == Outcome::NotSent && !failure.definite && !failure.in_use);
        let failure = EffectFailure::nothing_done(HostError::Occupied("/srv".into()));
        assert!(failure.outcome == Outcome::NotSent && failure.definite && failure.in_use);
        let failure = EffectFailure::nothing_done(Error::internal("no staging path"));
        assert!(failure.outcome == Outcome::NotSent && failure.definite && !failure.in_use);
    }
}
