//! Performs the effects of mounts: makes the RPC, then compares the state of the kernel. The state machine decides the next
//! step.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::error::{Error, Kind, Obstacle, shown};
use crate::fault;
use crate::host::{Access, Bind, Host, HostError, Look, Restrict, part_below};
use crate::host::{KnownEnds, TargetFd};
use crate::plugin::{NodeCall, Ready};
use crate::secret::Secrets;
use crate::store::rows::{AttachmentMode, Leg, MountRow};
use crate::volume::api::requests::Force;
use crate::volume::context::Context;
use crate::volume::executor::Searched;
use crate::volume::lifecycle::known_id;
use crate::volume::model::paths;
use crate::volume::model::subject::Subject;
use crate::volume::model::volume::{Action, Outcome, Volume};
use crate::volume::operation::table::Progress;

use crate::volume::mounts::effect_failure::EffectFailure;

pub(in crate::volume::mounts) type EffectResult = Result<Option<u64>, EffectFailure>;

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
    /// What is known of the ends of the file systems that the volume's mounts have shown.
    pub(in crate::volume) ends: &'a KnownEnds,
}

impl EffectContext<'_> {
    pub(in crate::volume) async fn perform(&self, action: Action) -> EffectResult {
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
    pub(in crate::volume::mounts) fn external_id(&self) -> Result<&str, EffectFailure> {
        let subject = Subject::Mount(self.mount.key.clone());
        known_id(&self.volume.row.key, &subject).map_err(EffectFailure::nothing_done)
    }

    pub(in crate::volume::mounts) fn plugin(&self) -> &str {
        &self.volume.row.key.plugin
    }

    pub(in crate::volume::mounts) fn source(&self) -> &Path {
        Path::new(&self.mount.source)
    }

    /// Returns the staging path. A failure changed nothing.
    pub(in crate::volume::mounts) fn staging(&self) -> Result<&Path, EffectFailure> {
        let staging = self.volume.row.staging.as_deref().map(Path::new);
        let lost = || Error::internal("a volume that is staged has no staging path");
        staging.ok_or_else(|| EffectFailure::nothing_done(lost()))
    }

    /// Returns the path at which the plugin publishes.
    pub(in crate::volume::mounts) fn published(&self) -> &Path {
        Path::new(self.mount.published())
    }

    pub(in crate::volume::mounts) fn call<'c>(&'c self, external_id: &'c str) -> NodeCall<'c> {
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

    async fn stage(&self, external_id: &str) -> EffectResult {
        self.make_directory(self.staging()?, Access::MountPoint, Access::Private)?;
        fault::around("NodeStageVolume", self.ready.stage(self.call(external_id))).await?;
        Ok(None)
    }

    /// Makes a directory before any RPC is sent, and its parent where that is missing. A failure here changed nothing.
    fn make_directory(&self, path: &Path, access: Access, of_parent: Access) -> Result<(), EffectFailure> {
        let made = self.host.make_directory_in(self.base, self.below_base(path)?, access, of_parent);
        made.map_err(EffectFailure::nothing_done)
    }

    /// Makes an empty file at which a device is to be shown.
    fn make_file(&self, path: &Path) -> Result<(), EffectFailure> {
        let made = self.host.make_file(self.base, self.below_base(path)?);
        made.map_err(EffectFailure::nothing_done)
    }

    fn below_base<'p>(&self, path: &'p Path) -> Result<&'p Path, EffectFailure> {
        part_below(path, self.base).ok_or_else(|| {
            let text =
                format!("{} is not below {}: was plugin-root changed?", path.display(), self.base.display());
            EffectFailure::nothing_done(Error::internal(text))
        })
    }

    async fn publish(&self, external_id: &str) -> EffectResult {
        let (published, source) = (self.published(), self.source());
        if published == source {
            let text = format!("{} is no path that csid makes", shown(source));
            return Err(EffectFailure::nothing_done(Error::internal(text)));
        }
        let of_volume = published.parent().unwrap_or(self.base);
        self.make_directory(of_volume, Access::Private, Access::Private)?;
        let own = source.parent().unwrap_or(self.base);
        self.make_directory(own, self.access(own), Access::Passable)?;
        match self.mount.spec.usage.attachment_mode {
            AttachmentMode::FileSystem => {
                self.make_directory(source, Access::MountPoint, Access::Passable)?;
            }
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
    async fn deliver(&self) -> EffectResult {
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

    async fn bind(&self) -> EffectResult {
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
}
