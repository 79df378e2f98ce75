//! Adopts mounts that another manager made, as rows of csid (AdoptMount). The kernel proves the caller's statements; no RPC is
//! sent.
//!
//! An adopted row differs from others only in its paths: they are not csid's ([`paths::is_own`]). csid unpublishes and unstages
//! there, and makes and removes no directory there. If it has to make a mount again, it uses its own paths.
//!
//! The row is written once, complete. A csid that ends before that leaves nothing. A csid that ends after it leaves a mount
//! like any other. A registered volume's claim is written before the row, and recovery releases it if no row followed. The
//! release of a claim detaches the volume if its plugin attaches. Therefore a volume is claimed here only if csid itself has
//! attached it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Kind, Result, Step, shown};
use crate::host::{Look, MountTable};
use crate::plugin::{ATTACHES, Ready};
use crate::store::event_kind::EventKind;
use crate::store::registry::{Claim, Record, VolumeName};
use crate::store::rows::{AttachmentMode, Leg, MountKey, MountRow, Phase};
use crate::store::{Durability, MountFilter};
use crate::volume::api::views::Mounted;
use crate::volume::context::Context;
use crate::volume::errors::mount::MountError;
use crate::volume::errors::operation::OperationError;
use crate::volume::events::{claim as claim_events, mount as mount_events};
use crate::volume::executor::Executor;
use crate::volume::model::subject::ClaimKey;
use crate::volume::model::volume::{Action, DesiredMount, Effect, MountEvent, Paths};
use crate::volume::model::{paths, step};
use crate::volume::mounts::effects::clear_the_way;
use crate::volume::mounts::mount::abilities;
use crate::volume::probe::known;
use crate::volume::seam::Control;
use crate::volume::tables::watched_volumes::WatchedVolumes;
use crate::volume::waits::PluginWaits;

impl Executor<'_> {
    /// Adopts the mount at these paths. After an error everything is as it was.
    pub(in crate::volume) async fn adopt(
        &mut self,
        wanted: &mut DesiredMount,
        at: &Paths,
        claim: Option<&Claim>,
        ahead: &[Arc<Claim>],
    ) -> Result<Mounted> {
        let key = wanted.key.clone();
        self.refuse_unknown_plugin(&key)?;
        let name = VolumeName::of(&key);
        self.operation.refuse_before_expansion(&name, self.row(&key).is_some())?;
        let ready = self.ready().await?;
        refuse_other_staging(&ready, at)?;
        let shared = Arc::clone(self.shared);
        self.operation.step.set(Step::Verify);
        if claim.is_some() {
            let record = self.control().record(&name).await?;
            self.refuse_unattached(&record).await?;
            let attachment = record.attachment(&self.shared.records.node);
            wanted.spec.usage.publish_context =
                attachment.map(|at| at.publish_context.clone()).unwrap_or_default();
        }
        shared.refuse_others_paths(&self.rows.volume().row.key, &key, at).await?;
        let look = shared.prove(wanted, &self.rows.volume().row.key.plugin, at).await?;
        let event = MountEvent::Adopt {
            wanted: wanted.clone(),
            paths: at.clone(),
            abilities: abilities(&ready),
            device: look.0,
        };
        // The step is checked before a claim is taken for the mount.
        step::step(self.rows.volume(), event.clone())
            .map_err(|refusal| MountError::refused(refusal, &wanted.key))?;
        if let Some(claim) = claim {
            let mut record = self.control().claim(&name, claim, ahead, None).await?;
            self.control().rebind(&mut record, claim).await?;
        }
        // Two adoptions of the same paths are of different volumes, so the actors of the volumes do not order them.
        let alone = shared.adopting.lock().await;
        let adopted = match shared.refuse_others_paths(&self.rows.volume().row.key, &key, at).await {
            Ok(()) => self.enter_adopted(event, wanted, &ready, at).await,
            Err(error) => Err(error),
        };
        drop(alone);
        match (&adopted, claim) {
            (Ok(_), _) => {
                if WatchedVolumes::are_watched(&look.1)
                    && let Some(row) = self.row(&key)
                {
                    shared.served.note(row);
                }
            }
            (Err(_), Some(_)) => {
                let returned = self.control().give_back(&ClaimKey::of(&key)).await;
                returned.unwrap_or_else(|error| claim_events::log(&name, &key.consumer, &error));
            }
            (Err(_), None) => {}
        }
        adopted
    }

    async fn enter_adopted(
        &mut self,
        event: MountEvent,
        wanted: &DesiredMount,
        ready: &Ready,
        at: &Paths,
    ) -> Result<Mounted> {
        if let Some(kind) = self.operation.signals.borrow().abandon {
            return Err(OperationError::Stopped { kind }.into());
        }
        let key = &wanted.key;
        let is_new = self.row(key).is_none_or(|row| row.phase != Phase::Mounted);
        let node_id = self.staged_under(ready, wanted);
        self.rows.step(event).map_err(|refusal| MountError::refused(refusal, &wanted.key))?;
        if !is_new {
            self.shared.synced().await?;
            return self.answer(key);
        }
        let published = self.own_private(ready, Path::new(&at.source));
        self.rows.remark(key, |row| {
            row.status.node_id = node_id;
            row.published = published;
        });
        // Mounts of the volume at other paths are the plugin's, or of the manager that made this one.
        let places = self.shared.places_of(self.rows.volume(), Some(key));
        let mounts = self.shared.own_mounts(self.rows.volume(), &places).await?;
        let mut backing = known(&self.rows.volume().row)?;
        self.shared.note_found(&mounts, &places, &mut backing);
        drop(places);
        self.set_known(&backing)?;
        self.operation.step.decide();
        let event = mount_events::ended(EventKind::Mount, self.row(key), None);
        self.persist(Durability::Disk, event).await.map_err(|failure| failure.error)?;
        self.answer(key)
    }

    /// Returns the path at which the plugin publishes a mount at one of csid's own paths whose row was lost. `None`: the path is
    /// not csid's, or nothing is there.
    fn own_private(&self, ready: &Ready, source: &Path) -> Option<String> {
        let base = self.shared.base(ready.host_root());
        let private = Some(source)
            .filter(|source| paths::is_own(&self.rows.volume().row.key, source))
            .and_then(paths::private);
        let private =
            private.filter(|path| self.shared.host.look_unmounted(base, path) != Some(Look::Missing));
        private.map(|path| path.to_string_lossy().into_owned())
    }

    /// Refuses a registered volume of a plugin that attaches, unless csid has attached it to this node. Otherwise the claim's
    /// end would not detach what another manager attached, and its roll-back might.
    async fn refuse_unattached(&mut self, record: &Record) -> Result<()> {
        if !self.can(ATTACHES).await? {
            return Ok(());
        }
        let at = record.attachment(&self.shared.records.node);
        if at
            .is_some_and(|at| at.leg == Leg::Present && at.boot.as_ref() == Some(&self.shared.records.boot()))
        {
            return Ok(());
        }
        let text = format!(
            "{} is registered, its plugin {} attaches volumes, and csid has not attached it to this node",
            record.name, record.volume.plugin
        );
        Err(Error::new(Kind::NotSupported, text).with(|details| details.step = Some(Step::Verify)))
    }

    /// Chooses csid's own paths for a volume or a mount that is about to be made. Another manager's paths remain in use until
    /// their mounts are unmounted.
    pub(in crate::volume) async fn leave_foreign_paths(&mut self, effect: &Effect) -> Result<()> {
        if !matches!(effect.action, Action::Stage | Action::Publish) || effect.from != Leg::Absent {
            return Ok(());
        }
        let volume = &self.rows.volume().row;
        let own = paths::OwnDirectories::of(&volume.key);
        let is_own = |path: &str| own.have(Path::new(path));
        let restages = effect.action == Action::Stage && !volume.staging.as_deref().is_some_and(is_own);
        let row = self.row(&effect.goal).filter(|row| {
            let is_to_come = row.publish == Leg::Absent || effect.action == Action::Publish;
            is_to_come && !is_own(&row.source)
        });
        let wanted = row.map(DesiredMount::of);
        if !restages && wanted.is_none() {
            return Ok(());
        }
        self.in_effect = true;
        let ready = self.ready().await;
        self.in_effect = false;
        let ready = ready?;
        let directory = self.directory_of_new(&ready).await;
        if let Some(wanted) = wanted {
            let source = self.paths(&directory, &wanted).source;
            let base = self.shared.base(ready.host_root());
            clear_the_way(&self.shared.host, ready.id(), base, Path::new(&source)).await?;
            let published = paths::private(Path::new(&source));
            self.rows.remark(&effect.goal, |row| {
                row.published = published.map(|path| path.to_string_lossy().into_owned());
                row.source = source;
            });
        }
        if restages {
            let staging = directory.join(paths::staging(&self.rows.volume().row.key));
            self.rows.stage_at(staging.to_string_lossy().into_owned());
        }
        Ok(())
    }

    /// Returns the paths at which the kernel shows the volume, or a directory of it, and no row has it. Empty: there is none, csid
    /// has the volume neither staged nor published and so does not know its file system, or the mounts cannot be read.
    pub(in crate::volume) fn foreign_mounts(&self) -> Vec<PathBuf> {
        let volume = self.rows.volume();
        let rows = volume.mounts.iter();
        let own: Vec<&Path> = rows
            .clone()
            .flat_map(|row| [Some(row.source.as_str()), Some(row.published()), row.spec.target.as_deref()])
            .flatten()
            .chain(volume.row.staging.as_deref())
            .map(Path::new)
            .collect();
        let published = rows.filter(|row| row.publish == Leg::Present).map(|row| row.source.as_str());
        let staged = volume.row.staging.as_deref().filter(|_| volume.row.stage != Leg::Absent);
        let known = published.chain(staged).map(Path::new);
        let shown = known.flat_map(|path| self.shared.host.copies_and_parts(path).unwrap_or_default());
        let mut found: Vec<PathBuf> = shown.filter(|path| !own.contains(&path.as_path())).collect();
        found.sort();
        found.dedup();
        found
    }
}

/// Refuses a staging path that does not match the plugin's capability: a row without the path would never be unstaged.
fn refuse_other_staging(ready: &Ready, at: &Paths) -> Result<()> {
    match (ready.stages(), at.staging.is_some()) {
        (true, false) => Err(Error::invalid(format!(
            "staging-path is missing: plugin {} has STAGE_UNSTAGE_VOLUME",
            ready.id()
        ))),
        (false, true) => Err(Error::invalid(format!(
            "staging-path is given, but plugin {} has no STAGE_UNSTAGE_VOLUME",
            ready.id()
        ))),
        _ if at.staging.as_ref() == Some(&at.source) => {
            Err(Error::invalid("staging-path and published-path are one path"))
        }
        _ => Ok(()),
    }
}

impl Context {
    /// Returns AlreadyExists if one of the paths belongs to another row.
    async fn refuse_others_paths(
        &self,
        volume: &crate::store::rows::VolumeKey,
        key: &MountKey,
        at: &Paths,
    ) -> Result<()> {
        for path in [Some(at.source.as_str()), at.staging.as_deref()].into_iter().flatten() {
            let by_source = MountFilter { source: Some(path.to_owned()), ..MountFilter::default() };
            let by_staging = MountFilter { staging: Some(path.to_owned()), ..MountFilter::default() };
            let mut published = self.store.mounts(by_source).await?;
            for source in paths::found_at(Path::new(path)) {
                let source = Some(source.to_string_lossy().into_owned());
                published.extend(self.store.mounts(MountFilter { source, ..MountFilter::default() }).await?);
            }
            let staged = self.store.mounts(by_staging).await?;
            let is_other = |row: &&MountRow| row.key != *key;
            let published = published.iter().map(|(row, _)| row).filter(is_other);
            // The volume's users share its staging path.
            let staged = staged.iter().map(|(row, _)| row);
            let staged = staged.filter(|row| row.volume != *volume || path == at.source);
            let rows = published.chain(staged).map(|row| row.key.clone());
            let holder = rows.chain(self.directory.holder(path).filter(|holder| holder != key)).next();
            if let Some(holder) = holder {
                let text = format!(
                    "{path} belongs to the mount of {} by {}",
                    VolumeName::of(&holder),
                    holder.consumer
                );
                let error = Error::new(Kind::AlreadyExists, text);
                return Err(error.with(|details| details.holders = vec![holder.consumer]));
            }
        }
        Ok(())
    }

    /// Checks that the kernel shows the mount as described. Returns the device number for its row, and the probe's result.
    async fn prove(&self, wanted: &DesiredMount, plugin: &str, at: &Paths) -> Result<(u64, Look)> {
        let spec = &wanted.spec;
        let source = Path::new(&at.source);
        let staging = at.staging.as_deref().map(Path::new);
        let look = self.host.look(plugin, source).await;
        let device = match (spec.usage.attachment_mode, look) {
            (AttachmentMode::FileSystem, Look::Mounted { device, .. }) => {
                if let Some(staging) = staging {
                    match self.host.look(plugin, staging).await {
                        Look::Mounted { .. } => {}
                        look => return Err(not_shown("staging", staging, "a file system", look)),
                    }
                    refuse_another_file_system(&self.host.mount_table()?, staging, source)?;
                }
                if spec.read_only && self.host.mount_table()?.is_read_only(source) != Some(true) {
                    return Err(writable(source));
                }
                device
            }
            (AttachmentMode::BlockDevice, Look::Device { rdev }) => {
                if let Some(staging) = staging {
                    match self.host.look(plugin, staging).await {
                        // Some plugins mount nothing at the staging path of a block volume.
                        Look::Plain => {}
                        Look::Device { rdev: staged } if staged == rdev => {}
                        Look::Device { .. } => return Err(another(staging, source)),
                        look => return Err(not_shown("staging", staging, "a directory or the device", look)),
                    }
                }
                if spec.read_only && !self.host.block_is_read_only(rdev)? {
                    return Err(writable(source));
                }
                rdev
            }
            (AttachmentMode::FileSystem, look) => {
                return Err(not_shown("published", source, "a file system", look));
            }
            (AttachmentMode::BlockDevice, look) => {
                return Err(not_shown("published", source, "a block device", look));
            }
        };
        if let Some(target) = &spec.target
            && !self.host.is_bound(plugin, source, Path::new(target)).await?
        {
            let text = format!("target {} does not show what is at {}", shown(target), shown(source));
            return Err(Error::invalid(text).with(|details| details.step = Some(Step::Verify)));
        }
        Ok((device, look))
    }
}

/// Refuses a publish that shows neither the staged file system nor a directory of it.
fn refuse_another_file_system(table: &MountTable, staging: &Path, source: &Path) -> Result<()> {
    let is_of = table.at(staging).zip(table.at(source)).is_some_and(|(staged, published)| {
        staged.device == published.device && published.root.starts_with(staged.root)
    });
    if is_of { Ok(()) } else { Err(another(staging, source)) }
}

fn another(staging: &Path, source: &Path) -> Error {
    let text = format!("{} does not show what is staged at {}", shown(source), shown(staging));
    Error::invalid(text).with(|details| details.step = Some(Step::Verify))
}

fn writable(source: &Path) -> Error {
    let text = format!("read-only is asked for, but {} can be written", shown(source));
    Error::invalid(text).with(|details| details.step = Some(Step::Verify))
}

fn not_shown(what: &str, path: &Path, wanted: &str, look: Look) -> Error {
    let (kind, is) = match look {
        Look::Missing => (Kind::NotFound, "nothing is there".to_owned()),
        Look::Plain => (Kind::NotFound, "nothing is mounted there".to_owned()),
        Look::Mounted { .. } => (Kind::InvalidArgument, "a file system is there".to_owned()),
        Look::Device { .. } => (Kind::InvalidArgument, "a block device is there".to_owned()),
        Look::Dead(code) => {
            (Kind::PluginError, format!("to look at it fails: {}", std::io::Error::from_raw_os_error(code)))
        }
        Look::Hung => (Kind::PluginError, "its file system does not answer".to_owned()),
    };
    let text = format!("the {what} path {} has to show {wanted}, but {is}", shown(path));
    Error::new(kind, text).with(|details| details.step = Some(Step::Verify))
}
