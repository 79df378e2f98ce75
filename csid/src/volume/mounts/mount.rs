//! Mounts: begins a mount that is new or at rest, and answers its callers.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::backoff::Backoff;
use crate::error::{Error, Result, Step, shown};
use crate::host::HostError;
use crate::plugin::{HeldDirectories, Ready};
use crate::store::Durability;
use crate::store::rows::{AttachmentMode, Leg, MountKey, MountRow, Phase};
use crate::volume::api::views::Mounted;
use crate::volume::errors::mount::MountError;
use crate::volume::errors::operation::OperationError;
use crate::volume::errors::volume::VolumeError;
use crate::volume::executor::Executor;
use crate::volume::model::subject::ClaimKey;
use crate::volume::model::volume::{Abilities, DesiredMount, MountEvent, Next, Observed, Paths};
use crate::volume::model::{admission, paths};
use crate::volume::mounts::effects::clear_the_way;
use crate::volume::mounts::until_done::Purpose;
use crate::volume::probe::{healthy, there};
use crate::volume::waits::PluginWaits;

impl Executor<'_> {
    /// Mounts, for a caller or for a row at rest, until the mount is made, refused, rolled back or given up.
    pub(in crate::volume) async fn mount(&mut self, wanted: &DesiredMount) -> Result<Mounted> {
        let key = &wanted.key;
        let mut delay = Backoff::new();
        loop {
            if let Some(row) = self.row(key)
                && row.uid == wanted.uid
                && matches!(row.phase, Phase::Mounting | Phase::Unmounting | Phase::Uncertain)
            {
                // The mount was not made with these secrets.
                let secrets = self.operation.secrets.take();
                Box::pin(self.settle(key)).await.map_err(|source| OperationError::Unsettled { source })?;
                self.operation.secrets = secrets;
            }
            admission::admit(self.rows.volume(), wanted, None)
                .map_err(|refusal| MountError::refused(refusal, &wanted.key))?;
            let seen = match self.row(key).filter(|row| row.shows()).cloned() {
                Some(row) => {
                    self.operation.step.set(Step::Verify);
                    let look = self.shared.look_surely(&row).await;
                    let is_healed = self.heals && look.has_lost_its_server();
                    if there(&row, &look) && !healthy(&row, &look) && !is_healed {
                        return Err(MountError::Dead { path: row.source }.into());
                    }
                    let sight = self.shared.sight_of(&row, &look).await;
                    if sight == Observed::There && row.phase == Phase::Mounted {
                        return self.answer(key);
                    }
                    if row.spec.registered {
                        // A mount that others have removed would be made again, by a claim of before.
                        self.shared.records.refuse_here()?;
                    }
                    let mounts = &self.rows.volume().mounts;
                    let mut sights = match mounts.len() {
                        1 => vec![sight],
                        _ => self.shared.sights(mounts).await,
                    };
                    if !self.heals {
                        sights
                            .iter_mut()
                            .filter(|sight| **sight == Observed::Dead)
                            .for_each(|sight| *sight = Observed::There);
                    }
                    if !there(&row, &look) || is_healed {
                        self.find_secrets(wanted).await?;
                    }
                    let rows = self.rows.volume().mounts.len();
                    self.ready().await?;
                    if self.rows.volume().mounts.len() != rows {
                        // Some rows were forgotten meanwhile, so the observed states belong to other rows.
                        continue;
                    }
                    self.rows.remark(key, |row| row.spec.remember_secrets(&wanted.spec));
                    self.event(MountEvent::Seen { key: key.clone(), sights })?
                }
                None => Next::Rest,
            };
            let (next, held) = match seen {
                Next::Rest => self.begin(wanted).await?,
                next => (next, None),
            };
            match self.until_done(next, key, Purpose::Mount, held).await {
                Ok(()) => return self.answer(key),
                Err(failure) if failure.broken && self.pause(&mut delay).await => {}
                Err(failure) => return Err(failure.error),
            }
        }
    }

    /// Returns the first effect of a mount that is new or at rest. The plugin's directories stay where they are until the effect's
    /// intent is written.
    async fn begin(&mut self, wanted: &DesiredMount) -> Result<(Next, Option<HeldDirectories>)> {
        let key = &wanted.key;
        self.refuse_unknown_plugin(key)?;
        if self.row(key).is_none_or(|row| row.publish != Leg::Present) {
            self.find_secrets(wanted).await?;
        }
        let mut ready = self.ready().await?;
        self.refuse_missing_target(wanted).await?;
        let held = loop {
            match self.shared.plugins.hold_directories(&ready).await {
                Some(held) => break held,
                None => ready = self.ready().await?,
            }
        };
        let directory = self.directory_of_new(&ready).await;
        let mut paths = self.paths(&directory, wanted);
        let row = self.row(key);
        let is_new = row.is_none_or(|row| row.publish == Leg::Absent);
        // A row keeps its path, with two exceptions: an older csid published it along with others, or another manager published
        // it elsewhere.
        let moves = |row: &&MountRow| {
            let source = Path::new(&row.source);
            let new = Path::new(&paths.source);
            let is_deeper = row.target == Leg::Absent && is_deeper(new, source);
            is_new && (is_deeper || !paths::is_own(&row.volume, source))
        };
        if let Some(row) = row.filter(|row| !moves(row)) {
            paths.source.clone_from(&row.source);
        }
        // A reconstructed mount has no owner but still occupies its path. Refuse to publish at, above or below it.
        let source = &paths.source;
        let is_at =
            |other: &str| paths::is_at_or_below(source, other) || paths::is_at_or_below(other, source);
        let holder = |row: &&Arc<MountRow>| is_at(&row.source) && row.key != *key;
        if let Some(holder) = self.rows.volume().mounts.iter().find(holder) {
            let holders = vec![holder.key.consumer.clone()];
            return Err(MountError::Conflict { key: key.clone(), what: "the path", holders }.into());
        }
        let source = Path::new(&paths.source);
        if is_new {
            self.operation.step.set(Step::Verify);
            let base = self.shared.base(ready.host_root());
            clear_the_way(&self.shared.host, ready.id(), base, source).await?;
            if let Some(private) = paths::private(source) {
                clear_the_way(&self.shared.host, ready.id(), base, &private).await?;
            }
        }
        let event = MountEvent::Mount { wanted: wanted.clone(), paths, abilities: abilities(&ready) };
        let node_id = self.staged_under(&ready, wanted);
        let next = self.rows.step(event).map_err(|refusal| MountError::refused(refusal, &wanted.key))?;
        self.rows.remark(key, |row| row.status.node_id = node_id);
        Ok((next, Some(held)))
    }

    pub(in crate::volume) fn answer(&self, key: &MountKey) -> Result<Mounted> {
        let row = self.row(key).ok_or_else(|| Error::internal("the row of a finished mount is gone"))?;
        if row.phase != Phase::Mounted {
            return Err(Error::internal(format!("a finished mount is {:?}", row.phase)));
        }
        let is_device = row.spec.usage.attachment_mode == AttachmentMode::BlockDevice;
        Ok(Mounted { source: row.source.clone(), is_device })
    }

    /// Finishes the work that an earlier operation or another csid left under way. The background's next try does the same.
    pub(in crate::volume) async fn settle(&mut self, key: &MountKey) -> Result<()> {
        let next = self.event(MountEvent::Undo { key: key.clone() })?;
        self.until_done(next, key, Purpose::Settle, None).await.map_err(|failure| failure.error)
    }

    /// Refuses a mount whose target is missing or an automount, before anything is staged for it.
    async fn refuse_missing_target(&self, wanted: &DesiredMount) -> Result<()> {
        let Some(target) = wanted.spec.target.as_ref().filter(|_| self.target_fd.is_none()) else {
            return Ok(());
        };
        let (plugin, root) = (&self.rows.volume().row.key.plugin, Path::new("/"));
        match self.shared.host.check_target(plugin, root, Path::new(target), 0).await {
            Err(error @ HostError::Automount(_)) => Err(error.into()),
            Err(error) if matches!(error.errno(), Some(libc::ENOENT | libc::ENOTDIR)) => {
                let what = match wanted.spec.usage.attachment_mode {
                    AttachmentMode::FileSystem => "directory",
                    AttachmentMode::BlockDevice => "empty file",
                };
                let target = shown(target);
                Err(Error::invalid(format!(
                    "target {target} is not there; create it ({what}), then mount again"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Finds the secrets: those of the call, or of its credential, or of the credential that the row names.
    async fn find_secrets(&mut self, wanted: &DesiredMount) -> Result<()> {
        if self.operation.secrets.is_some() {
            return Ok(());
        }
        let row = self.row(&wanted.key);
        let credential = wanted.spec.credential.as_ref().or(row.and_then(|row| row.spec.credential.as_ref()));
        match credential {
            Some(name) => self.operation.secrets = Some(self.shared.credential(name).await?),
            None if row.is_some_and(|row| row.spec.needs_secrets()) => {
                return Err(MountError::SecretsNeeded { key: wanted.key.clone() }.into());
            }
            None => {}
        }
        Ok(())
    }

    /// Refuses a name that no plugin has. Such a name is more likely a slip than a plugin yet to come. An existing row may wait
    /// for its plugin.
    pub(in crate::volume) fn refuse_unknown_plugin(&self, key: &MountKey) -> Result<()> {
        let plugin = &self.rows.volume().row.key.plugin;
        if self.row(key).is_some() || self.shared.plugins.view(plugin).is_some() {
            return Ok(());
        }
        Err(VolumeError::UnknownPlugin { plugin: plugin.to_owned() }.into())
    }

    /// Writes into the row why it still waits, for ListMounts.
    pub(in crate::volume) async fn still_waiting(&mut self, key: &MountKey, error: &Error) {
        if self.operation.step.has_yielded() {
            return;
        }
        self.rows.remark(key, |row| row.error = Some(error.message.clone()));
        if let Err(failure) = self.persist(Durability::Process, None).await {
            tracing::warn!(error = %failure.error, "the journal could not be written");
        }
    }

    pub(in crate::volume::mounts) fn event(&mut self, event: MountEvent) -> Result<Next> {
        self.rows
            .step(event)
            .map_err(|refusal| Error::internal(format!("an inner event was refused: {refusal:?}")))
    }

    pub(in crate::volume) fn row(&self, key: &MountKey) -> Option<&MountRow> {
        self.rows.volume().mount(key)
    }

    /// Returns the tags of the consumer's mounts of the volume.
    pub(in crate::volume) fn tags(&self, key: &MountKey) -> Vec<String> {
        let claim = ClaimKey::of(key);
        let of = |row: &&Arc<MountRow>| claim.has_mount(&row.key);
        self.rows.volume().mounts.iter().filter(of).map(|row| row.key.tag.clone()).collect()
    }

    /// Returns the paths of a new mount whose directories are made below `directory`.
    pub(in crate::volume) fn paths(
        &self,
        directory: &Path,
        DesiredMount { key, spec, .. }: &DesiredMount,
    ) -> Paths {
        let volume = &self.rows.volume().row.key;
        let text = |path: PathBuf| directory.join(path).to_string_lossy().into_owned();
        let source = text(paths::publish(volume, key, spec.usage.access_mode));
        Paths { staging: Some(text(paths::staging(volume))), source }
    }
}

/// Returns whether `new` is a path in the directory `old`, each below its own root: csid's tmpfs or the plugin's root.
fn is_deeper(new: &Path, old: &Path) -> bool {
    let below = |path| Path::strip_prefix(path, paths::root(path)?).ok();
    below(new).zip(below(old)).is_some_and(|(new, old)| new != old && new.starts_with(old))
}

pub(in crate::volume) fn abilities(ready: &Ready) -> Abilities {
    Abilities {
        stages: ready.stages(),
        single_node_multi_writer: ready.single_node_multi_writer(),
        mount_group: ready.mount_group(),
    }
}
