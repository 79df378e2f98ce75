//! The effects that remove: unbind, unpublish and unstage. Each asks the plugin, and compares the state of the kernel.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::error::{Error, Kind, Obstacle, shown};
use crate::fault;
use crate::host::{Backing, HostError, Look, Unbind};
use crate::plugin::{NodeCall, RpcError};
use crate::store::rows::Leg;
use crate::volume::api::requests::Force;
use crate::volume::errors::mount::MountError;
use crate::volume::model::paths;
use crate::volume::model::volume::Outcome;
use crate::volume::probe::STALE;

use crate::volume::mounts::effect_failure::EffectFailure;
use crate::volume::mounts::effects::{EffectContext, EffectResult};
use crate::volume::probe::known;

impl EffectContext<'_> {
    pub(in crate::volume::mounts) async fn unbind(&self) -> EffectResult {
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
    async fn detach_hung(&self, source: &Path, target: &Path) -> EffectResult {
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

    pub(in crate::volume::mounts) async fn unpublish(&self, external_id: &str) -> EffectResult {
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

    async fn unpublish_all(&self, external_id: &str) -> EffectResult {
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
        if self.is_unsearched() {
            return Ok(());
        }
        // Nothing shows a file system that has ended. Its number may be another one's by now.
        let mut shown = backing.shown.clone();
        shown.retain(|shown| !self.ends.have_ended(shown.device()));
        // What appears since is found after the unstage. The row, the claim and the attachment stay until it is gone.
        let has_just_searched =
            outcome == Outcome::NotSent && self.searched.is_some_and(|searched| searched.covers(&shown));
        let failed = |failure: EffectFailure| EffectFailure { outcome, ..failure };
        let consumer = &self.mount.key.consumer;
        if backing.knows_own() && !shown.is_empty() {
            let places = self.shared.places_of(self.volume, Some(&self.mount.key));
            let mounts = self.shared.own_mounts(self.volume, &places).await;
            let mounts = mounts.map_err(|error| failed(error.into()))?;
            let found = backing.foreign(self.shared.mounted_here(&mounts, &shown, &places));
            if !found.is_empty() {
                let at = found.iter().map(|mount| mount.path().to_owned()).collect();
                return Err(EffectFailure::held(outcome, MountError::StillBoundHere { at }.into()));
            }
        }
        if has_just_searched {
            return Ok(());
        }
        let found = self.host.copies_elsewhere(&shown, &self.processes).await;
        let found = found.map_err(|error| failed(error.into()))?;
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

    pub(in crate::volume::mounts) async fn unstage(&self, external_id: &str) -> EffectResult {
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
        let own = paths::OwnDirectories::of(&self.volume.row.key);
        let sources = mounts.map(|mount| Path::new(&mount.source)).filter(|path| own.have(path));
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
