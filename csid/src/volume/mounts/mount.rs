//! Mounts, unmounts and settles one mount: takes a step, writes it, performs the effect, and feeds its outcome back.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::backoff::Backoff;
use crate::error::{Error, Kind, Result, Step, shown};
use crate::fault;
use crate::host::{HostError, Look, Sought};
use crate::plugin::{HeldDirectories, Ready};
use crate::store::Durability;
use crate::store::event_kind::EventKind;
use crate::store::rows::{AttachmentMode, Leg, MountKey, MountRow, NewEvent, Phase};
use crate::volume::api::requests::{Authority, Force, Uncovered};
use crate::volume::api::views::Mounted;
use crate::volume::errors::mount::MountError;
use crate::volume::errors::operation::OperationError;
use crate::volume::errors::volume::VolumeError;
use crate::volume::events::mount as mount_events;
use crate::volume::executor::{Executor, Searched};
use crate::volume::model::subject::ClaimKey;
use crate::volume::model::volume::{
    Abilities, Action, DesiredMount, Effect, MountEvent, Next, Observed, Outcome, Paths,
};
use crate::volume::model::{admission, paths};
use crate::volume::mounts::effects;
use crate::volume::mounts::effects::{EffectContext, EffectFailure, clear_the_way};
use crate::volume::operation::orders::abandoned;
use crate::volume::probe::{healthy, there};
use crate::volume::waits::{PATIENCE, PluginWaits};

/// Number of times that a plugin may answer a making with INTERNAL, UNKNOWN or the like before the caller gets that answer. The
/// specification requires that the call is repeated. A plugin that answers so to a wrong mount option does it for ever, and its
/// message helps the caller more than a time-out.
const UNKNOWN_ANSWERS: u32 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Mount,
    Unmount,
    Settle,
}

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
                self.settle(key).await.map_err(|source| OperationError::Unsettled { source })?;
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
                    let mut sights = match self.shared.sight_of(&row, &look).await {
                        Observed::There if row.phase == Phase::Mounted => return self.answer(key),
                        _ => self.shared.sights(&self.rows.volume().mounts).await,
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
        self.ready().await?;
        self.refuse_missing_target(wanted).await?;
        let (ready, held) = loop {
            let ready = self.ready().await?;
            if let Some(held) = self.shared.plugins.hold_directories(&ready).await {
                break (ready, held);
            }
        };
        let mut paths = self.paths(&ready, wanted);
        let row = self.row(key);
        let is_new = row.is_none_or(|row| row.publish == Leg::Absent);
        // A row keeps its path, with two exceptions: an older csid published it along with others, or another manager published
        // it elsewhere.
        let moves = |row: &&MountRow| {
            let source = Path::new(&row.source);
            let is_deeper = row.target == Leg::Absent && Path::new(&paths.source).starts_with(source);
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

    /// Unmounts. Detaches no mount by force that is neither dead nor hung.
    pub(in crate::volume) async fn unmount(
        &mut self,
        key: &MountKey,
        authority: Authority,
        force: Force,
        names: Vec<String>,
    ) -> Result<()> {
        let Some(row) = self.row(key) else { return self.shared.synced().await };
        if matches!(authority, Authority::Own(uid) if uid != row.uid) {
            return Err(MountError::NotOwner { key: key.clone() }.into());
        }
        let row = row.clone();
        self.force = self.may_force(&row, force).await?;
        if row.phase == Phase::Mounted && self.force == Force::No {
            self.shared.refuse_while_shown(self.rows.volume(), &row)?;
            self.refuse_while_in_use(row).await?;
        }
        self.rows.remark(key, |row| row.operations = names);
        let next = self.event(MountEvent::Unmount { key: key.clone() })?;
        self.until_done(next, key, Purpose::Unmount, None).await.map_err(|failure| failure.error)
    }

    /// Regards the target of the mount as unmounted. The descriptor has to prove that.
    pub(in crate::volume) fn uncover(&mut self, key: &MountKey, uncovered: Uncovered) -> Result<()> {
        let Uncovered { target, fd } = uncovered;
        let Some(row) = self.row(key) else { return Ok(()) };
        if row.spec.target.as_ref() != Some(&target) {
            return Err(Error::invalid(format!("{} is not the target of this mount", shown(target))));
        }
        if !self.shared.host.is_free(&fd, Path::new(&target))? {
            return Err(HostError::StillBound(target.into()).into());
        }
        self.target_fd = Some(fd);
        Ok(())
    }

    /// Returns the part of `force` that the mount needs. Refuses a mount that hangs, unless the caller requests `Hung` by name.
    async fn may_force(&self, row: &MountRow, force: Force) -> Result<Force> {
        let (host, plugin, source) = (&self.shared.host, &row.volume.plugin, Path::new(&row.source));
        let look = match force {
            Force::No => return Ok(Force::No),
            Force::Gone | Force::Dead => self.shared.look_surely(row).await,
            // An earlier probe proves nothing about the present. The consumers' path may be detached already while the mount
            // that it shows is not.
            Force::Hung => {
                let mut look = host.look_despite_hung(plugin, source).await?;
                let staging = self.rows.volume().row.staging.as_deref();
                for path in [row.published()].into_iter().chain(staging) {
                    if matches!(look, Look::Missing | Look::Plain) && path != row.source {
                        look = host.look_despite_hung(plugin, Path::new(path)).await?;
                    }
                }
                look
            }
        };
        match look {
            Look::Mounted { .. } | Look::Device { .. } => Ok(Force::No),
            Look::Hung if force != Force::Hung => {
                Err(MountError::Hung { path: row.source.clone(), consumer: row.key.consumer.clone() }.into())
            }
            Look::Hung => Ok(Force::Hung),
            Look::Missing | Look::Plain => Ok(Force::Gone),
            Look::Dead(_) if look.has_lost_its_server() => Ok(Force::Dead),
            // A server that answers an error may come back, and a consumer may still write.
            Look::Dead(_) if force == Force::Hung => Ok(Force::Hung),
            Look::Dead(code) => Err(MountError::Failing {
                path: row.source.clone(),
                consumer: row.key.consumer.clone(),
                source: std::io::Error::from_raw_os_error(code),
            }
            .into()),
        }
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

    /// Returns Busy, before anything is touched, while processes use the mount.
    pub(in crate::volume) async fn refuse_while_in_use(&mut self, row: MountRow) -> Result<()> {
        self.operation.step.set(Step::Verify);
        // The descriptor proves that nothing is mounted at the target.
        let target = row.spec.target.as_deref().filter(|_| self.target_fd.is_none());
        let paths = [Some(row.source.as_str()), target];
        for path in paths.into_iter().flatten().map(Path::new) {
            if self.shared.host.in_use(&row.volume.plugin, path).await? {
                let holders = tokio::time::timeout(PATIENCE, self.shared.host.holders(path)).await;
                return Err(MountError::InUse {
                    path: path.into(),
                    consumer: row.key.consumer,
                    processes: holders.unwrap_or_default(),
                }
                .into());
            }
        }
        self.refuse_while_elsewhere(&row).await
    }

    /// Returns Busy while another mount namespace, or another path of csid's own, shows the file system or device of the row's mount
    /// and would continue to show it.
    async fn refuse_while_elsewhere(&mut self, row: &MountRow) -> Result<()> {
        let host = &self.shared.host;
        let own = [Some(row.source.as_str()), row.spec.target.as_deref()].into_iter().flatten();
        let own: Vec<&Path> = own.map(Path::new).collect();
        let is_block = row.spec.usage.attachment_mode == AttachmentMode::BlockDevice;
        let mounts = host.own_mounts().await?;
        self.refuse_while_bound_here(row, &mounts)?;
        let mounts = self.own_mounts.insert(mounts);
        let shown = mounts.backing(&own, is_block, row.device).shown;
        let plugin = self.shared.plugins.processes(&row.volume.plugin);
        let mut found = match shown.is_empty() && row.publish == Leg::Present {
            false => {
                let at = Instant::now();
                let found = host.copies_elsewhere(&shown, &plugin).await?;
                self.searched = found.is_empty().then_some(Searched { at, shown });
                found
            }
            // The mounts were unmounted behind csid's back, and only the number of their file system is known. Copies elsewhere have
            // not gone with them.
            true => host.still_elsewhere(self.gone(row)).await?,
        };
        let others = self.rows.volume().mounts.iter();
        let others: Vec<_> =
            others.filter(|other| other.key != row.key && other.publish != Leg::Absent).collect();
        if !others.is_empty() {
            // A copy belongs to this mount if it is below this mount's path, or if it is writable and all other mounts are
            // read-only. The volume stays staged for the others.
            let all_read = others.iter().all(|other| other.spec.read_only);
            found.retain(|mount| {
                let writes = !mount.read_only && !row.spec.read_only && all_read;
                writes || own.iter().any(|own| mount.may_be_below(own))
            });
        }
        if found.is_empty() {
            return Ok(());
        }
        let holders = host.holders_elsewhere(&found).await;
        Err(MountError::InUseElsewhere {
            path: row.source.clone().into(),
            consumer: row.key.consumer.clone(),
            holders,
        }
        .into())
    }

    /// Returns what to search for a row whose mounts are gone in csid's own namespace.
    fn gone(&self, row: &MountRow) -> Sought {
        let volume = self.rows.volume();
        let own = [row.source.as_str(), row.published()].into_iter().filter(|path| !path.is_empty());
        let is_alone = !volume.published_elsewhere(&row.key);
        Sought {
            below: own.chain(volume.row.staging.as_deref()).map(PathBuf::from).collect(),
            target: row.spec.target.as_ref().map(PathBuf::from),
            device: row.device,
            shown: Vec::new(),
            everywhere: is_alone,
            base: self.shared.directories.state.clone(),
        }
    }

    async fn until_done(
        &mut self,
        mut next: Next,
        key: &MountKey,
        purpose: Purpose,
        mut held: Option<HeldDirectories>,
    ) -> Result<(), EffectFailure> {
        // A user keeps an answered mount even if it cannot be repaired.
        let is_there = self.row(key).is_some_and(|row| row.kept && row.publish == Leg::Present);
        let mut why: Option<EffectFailure> = None;
        let mut delay = Backoff::new();
        let mut tries = Tries::default();
        loop {
            match next {
                Next::Run(effect) => {
                    let noted = match self.leave_foreign_paths(&effect).await {
                        Ok(()) => self.note_backing(&effect).await,
                        Err(error) => Err(EffectFailure::nothing_done(error)),
                    };
                    self.operation.step.set_part("intent");
                    fault::around("intent", self.rows.intend(&self.shared.store, &effect)).await?;
                    drop(held.take());
                    let performed = match noted {
                        Ok(()) => self.perform(&effect).await,
                        Err(failure) => Err(failure),
                    };
                    next = match performed {
                        Ok(device) => {
                            delay = Backoff::new();
                            tries = Tries::default();
                            self.event(MountEvent::Ended {
                                effect,
                                outcome: Outcome::Done { device },
                                error: None,
                            })?
                        }
                        Err(mut failure) => {
                            self.searched = None;
                            if effect.action.makes() {
                                tries.note(&mut failure);
                            }
                            if failure.unimplemented {
                                self.ask_what_it_can().await;
                            }
                            let (effect_action, makes) = (effect.action, effect.action.makes());
                            let (outcome, error) = (failure.outcome, Some(failure.error.message.clone()));
                            self.event(MountEvent::Ended { effect, outcome, error })?;
                            let lasting = failure.definite || (makes && outcome == Outcome::Failed);
                            let again = !lasting && self.pause(&mut delay).await;
                            if self.row(key).is_none() {
                                return Err(Error::from(OperationError::Forgotten).into());
                            } else if again {
                                self.event(MountEvent::Continue { key: key.clone() })?
                            } else if makes && is_there && effect_action == Action::Bind {
                                self.event(MountEvent::Keep { key: key.clone() })?;
                                self.persist(Durability::Disk, None).await?;
                                return Err(self.reason(failure));
                            } else if makes && !lasting && self.yields(&tries) {
                                return Err(self.put_off(key, failure).await);
                            } else if makes {
                                delay = Backoff::new();
                                tries = Tries::default();
                                why = Some(self.reason(failure));
                                self.event(MountEvent::Undo { key: key.clone() })?
                            } else {
                                return Err(self.give_up(key, why, failure, purpose, is_there).await);
                            }
                        }
                    };
                }
                // The mount was there before and still is.
                Next::Mounted if self.rows.is_written() => return Ok(()),
                Next::Mounted => {
                    self.operation.step.decide();
                    let is_healed = self.rows.written(key).is_some_and(|row| row.status.healing);
                    let kind = if is_healed { EventKind::MountHealed } else { EventKind::Mount };
                    let mut event = mount_events::ended(kind, self.row(key), None);
                    if let Some(event) = &mut event {
                        mount_events::note_timings(event, &self.operation.step.timings());
                    }
                    return self.persist(Durability::Disk, event).await;
                }
                Next::Gone | Next::Rest => return self.ended(key, why, purpose).await,
            }
        }
    }

    /// Ends an operation whose row is gone or at rest: removes the directories, commits with an event, and returns why the
    /// volume is not mounted.
    async fn ended(
        &mut self,
        key: &MountKey,
        why: Option<EffectFailure>,
        purpose: Purpose,
    ) -> Result<(), EffectFailure> {
        self.clean_up(key).await;
        if let Some(failure) = &why {
            mount_events::log(key, self.rows.volume(), &failure.error);
        }
        let row = self.rows.written(key).or_else(|| self.row(key));
        let is_gone = self.row(key).is_none();
        let event = match purpose {
            Purpose::Mount => {
                mount_events::ended(EventKind::Mount, row, why.as_ref().map(|failure| &failure.error))
            }
            Purpose::Unmount | Purpose::Settle if is_gone => {
                mount_events::ended(EventKind::Unmount, row, None)
            }
            Purpose::Unmount | Purpose::Settle => None,
        };
        // The removal of a rolled-back mount's row need not outlive a power cut, because its intent did not have to either.
        let durability = if purpose == Purpose::Unmount { Durability::Disk } else { Durability::Process };
        self.persist(durability, event).await?;
        match why {
            Some(why) => Err(why),
            None if purpose == Purpose::Mount => {
                Err(Error::internal("a mount ended without its mount").into())
            }
            None => Ok(()),
        }
    }

    /// Leaves a removal that does not end in time in the rows, for the background and for the next caller.
    async fn give_up(
        &mut self,
        key: &MountKey,
        why: Option<EffectFailure>,
        failure: EffectFailure,
        purpose: Purpose,
        is_there: bool,
    ) -> EffectFailure {
        mount_events::log(key, self.rows.volume(), &failure.error);
        let keep = match purpose {
            Purpose::Unmount => failure.in_use,
            Purpose::Mount | Purpose::Settle => is_there,
        };
        let event = match keep {
            true => Some(MountEvent::Keep { key: key.clone() }),
            // All work is done, and the end is waited for.
            false if failure.held => None,
            false => Some(MountEvent::GaveUp { key: key.clone() }),
        };
        let orphan = self
            .rows
            .written(key)
            .filter(|_| failure.orphan)
            .and_then(|row| mount_events::ended(EventKind::Orphan, Some(row), Some(&failure.error)));
        let persisted = match event.map_or(Ok(Next::Rest), |event| self.event(event)) {
            Ok(_) => self.persist(if keep { Durability::Disk } else { Durability::Process }, orphan).await,
            Err(error) => Err(error.into()),
        };
        match (persisted, why) {
            (Err(error), _) => error,
            (Ok(()), Some(why)) => {
                let text = format!(
                    "{}; and undoing it has not come to an end: {}",
                    why.error.message, failure.error.message
                );
                let mut error = Error { kind: Kind::Uncertain, message: text, details: why.error.details };
                error.details.retryable = true;
                EffectFailure::new(Outcome::Failed, error)
            }
            (Ok(()), None) if failure.outcome == Outcome::Failed && !failure.definite => {
                EffectFailure { error: Error { kind: Kind::Uncertain, ..failure.error }, ..failure }
            }
            (Ok(()), None) => failure,
        }
    }

    /// Returns whether a making that may have been tried rests as it is. That holds if only csid wants it and no caller has
    /// requested its end.
    fn yields(&self, tries: &Tries) -> bool {
        self.own && tries.unknown && self.operation.signals.borrow().abandon.is_none()
    }

    /// Puts the row to rest. The next try repeats the call.
    async fn put_off(&mut self, key: &MountKey, failure: EffectFailure) -> EffectFailure {
        mount_events::log(key, self.rows.volume(), &failure.error);
        let persisted = match self.event(MountEvent::Yield { key: key.clone() }) {
            Ok(_) => self.persist(Durability::Process, None).await,
            Err(error) => Err(error.into()),
        };
        persisted.err().unwrap_or(failure)
    }

    fn event(&mut self, event: MountEvent) -> Result<Next> {
        self.rows
            .step(event)
            .map_err(|refusal| Error::internal(format!("an inner event was refused: {refusal:?}")))
    }

    pub(in crate::volume) async fn persist(
        &mut self,
        durability: Durability,
        event: Option<NewEvent>,
    ) -> Result<(), EffectFailure> {
        let name = if durability == Durability::Disk { "outcome" } else { "intent" };
        let persisted = self.rows.persist(&self.shared.store, durability, event);
        fault::around(name, persisted).await.map_err(EffectFailure::from)
    }

    /// Records what the volume's mounts show before they are removed, so that the journal has it along with the intent: a copy
    /// elsewhere outlives csid. Nothing is recorded for a dead mount, because nothing can write to it.
    async fn note_backing(&mut self, effect: &Effect) -> Result<(), EffectFailure> {
        let mounts = self.own_mounts.take();
        let volume = self.rows.volume();
        let Some(mount) = volume.mount(&effect.key) else { return Ok(()) };
        let staging = volume.row.staging.as_deref();
        let is_first = match effect.action {
            Action::Stage => true,
            Action::Publish => staging.is_none() && !volume.published_elsewhere(&mount.key),
            Action::Bind | Action::Unbind | Action::Unpublish | Action::Unstage => false,
        };
        if is_first || effect.action == Action::Publish {
            return self.note_before(effect, is_first).await.map_err(EffectFailure::nothing_done);
        }
        // Without a staging each publish may be a file system of its own. Another file system may get its number once it is
        // gone.
        let is_not_last = staging.is_none() && volume.published_elsewhere(&mount.key);
        let removes = matches!(effect.action, Action::Unpublish | Action::Unstage) && !is_not_last;
        // An Unpublish since the volume was staged has recorded the staging, too.
        let mut backing = effects::known(&volume.row).map_err(EffectFailure::nothing_done)?;
        let is_noted =
            effect.action == Action::Unstage && effect.from == Leg::Present && !backing.is_unknown();
        if !removes || is_noted || self.force >= Force::Dead || mount.status.healing {
            return Ok(());
        }
        let is_block = mount.spec.usage.attachment_mode == AttachmentMode::BlockDevice;
        let own = [Some(mount.source.as_str()), mount.published.as_deref(), staging].into_iter().flatten();
        let own: Vec<&Path> = own.map(Path::new).collect();
        let mounts = match mounts {
            Some(mounts) => mounts,
            None => self.shared.host.own_mounts().await.map_err(EffectFailure::nothing_done)?,
        };
        // If the mounts are gone, only their device number is known.
        backing.join(mounts.backing(&own, is_block, mount.device));
        self.set_known(&backing).map_err(EffectFailure::nothing_done)
    }

    /// Returns the failure of an effect that an order to forget interrupts. The row keeps its last error, because the order may
    /// be refused.
    fn interrupted(&self, effect: &Effect, outcome: Outcome) -> EffectFailure {
        let last = self.row(&effect.key).and_then(|row| row.error.clone());
        let error =
            last.map_or_else(|| OperationError::Forgotten.into(), |last| Error::new(Kind::Cancelled, last));
        EffectFailure::new(outcome, error)
    }

    async fn perform(&mut self, effect: &Effect) -> Result<Option<u64>, EffectFailure> {
        let makes = effect.action.makes();
        if let Some(kind) = self.operation.signals.borrow().abandon.filter(|_| makes) {
            return Err(EffectFailure::new(Outcome::NotSent, OperationError::Stopped { kind }.into()));
        }
        if !self.operation.orders.is_empty() {
            return Err(self.interrupted(effect, Outcome::NotSent));
        }
        self.in_effect = true;
        let ready = self.ready().await;
        self.in_effect = false;
        let ready = ready.map_err(|error| EffectFailure::new(Outcome::NotSent, error))?;
        self.note_node_id(effect, &ready).await?;
        let gone = || Error::internal("an effect for a row that is gone");
        let mount = self.row(&effect.key).ok_or_else(gone)?;
        // Only a bind needs the root, and it may have to wait for the root's server.
        let target_root = match effect.action {
            Action::Bind => self.shared.target_root(mount.uid, &mount.spec).await,
            _ => Ok(PathBuf::from("/")),
        };
        self.operation.step.set(step_of(effect.action));
        let config = self.shared.config.borrow().clone();
        let asked = AtomicBool::new(false);
        let surroundings = EffectContext {
            host: &self.shared.host,
            shared: self.shared,
            ready: &ready,
            volume: self.rows.volume(),
            mount,
            secrets: self.operation.secrets.as_ref(),
            // A caller's deadline ends only its waiting. The RPC has the deadline of the plugin.
            patience: config.deadlines.operation,
            asked: &asked,
            base: self.shared.base(ready.host_root()),
            processes: self.shared.plugins.processes(&self.rows.volume().row.key.plugin),
            target_root,
            target_fd: self.target_fd.as_deref(),
            progress: &self.operation.step,
            from: effect.from,
            force: self.force,
            searched: self.searched.as_ref(),
        };
        let mut signals = self.operation.signals.clone();
        let is_bind = effect.action == Action::Bind;
        let unwanted = |kind| {
            // A call that was still waiting for its turn had no effect.
            let is_sent = is_bind || asked.load(Ordering::Relaxed);
            EffectFailure::new(
                if is_sent { Outcome::Failed } else { Outcome::NotSent },
                OperationError::Stopped { kind }.into(),
            )
        };
        let mut ended = tokio::select! {
            biased;
            ended = fault::around(effect.action.name(), surroundings.perform(effect.action)) => ended,
            // Only a making is dropped, and with it the RPC. A removal continues to its end. With a descriptor a bind ends
            // soon, and while an automount is pending only the bind's own mount can be rolled back.
            kind = abandoned(&mut signals), if makes && !(is_bind && self.target_fd.is_some()) => {
                Err(unwanted(kind))
            }
            // A removal that an order to forget interrupts need not continue to its end.
            () = self.operation.orders.came(), if !makes => Err(self.interrupted(effect, Outcome::Failed)),
        };
        if let Err(failure) = &ended {
            self.operation.step.note(&failure.error);
        }
        let is_done = ended.is_ok();
        if effect.action == Action::Publish
            && (is_done || asked.load(Ordering::Relaxed))
            && let Err(error) = self.note_published(is_done).await
            && is_done
        {
            ended = Err(EffectFailure::new(Outcome::Failed, error));
        }
        // The effect ended just when no caller wanted it any more. Nothing waits between this check and the commit point.
        match self.operation.signals.borrow().abandon.filter(|_| makes && ended.is_ok()) {
            Some(kind) => Err(unwanted(kind)),
            None => ended,
        }
    }

    /// Returns the error that ended a making: its failure, or that no caller wanted it.
    fn reason(&self, failure: EffectFailure) -> EffectFailure {
        match self.operation.signals.borrow().abandon {
            Some(kind) => EffectFailure::new(failure.outcome, OperationError::Stopped { kind }.into()),
            None => failure,
        }
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

    pub(in crate::volume) fn paths(
        &self,
        ready: &Ready,
        DesiredMount { key, spec, .. }: &DesiredMount,
    ) -> Paths {
        let volume = &self.rows.volume().row.key;
        let text = |path: PathBuf| ready.host_root().join(path).to_string_lossy().into_owned();
        let source = text(paths::publish(volume, key, spec.usage.access_mode));
        Paths { staging: Some(text(paths::staging(volume))), source }
    }

    /// Removes the directories that a row leaves, if they are empty, before the row that explains them goes.
    pub(in crate::volume) async fn clean_up(&self, key: &MountKey) {
        let volume = self.rows.volume();
        let idle =
            volume.row.stage == Leg::Absent && volume.mounts.iter().all(|mount| mount.publish == Leg::Absent);
        // Each user may mount at the consumers' path, in a namespace of its own, so a removal may hang there. That path is the last.
        let own = self.rows.written(key).into_iter().flat_map(|row| [row.published(), row.source.as_str()]);
        let staging = volume.row.staging.as_deref().filter(|_| idle);
        let is_own = |path: &&Path| paths::is_own(&volume.row.key, path);
        // A path is …/ROOT/staging/HASH, …/ROOT/private/HASH/HASH, …/ROOT/publish/HASH/HASH, or longer. The directories
        // below ROOT stay, because the next mount needs them again.
        let below = |path: &Path| Some((paths::kind(path)?.to_owned(), path.to_owned()));
        let mut left: Vec<_> =
            staging.into_iter().chain(own).map(Path::new).filter(is_own).filter_map(below).collect();
        left.dedup();
        let is_forced = self.force >= Force::Dead;
        if let Err(error) = self.shared.host.remove_left(&volume.row.key.plugin, left, is_forced).await {
            tracing::warn!(volume = %key.volume, %error, "cannot remove directories that are no longer used");
        }
    }
}

fn step_of(action: Action) -> Step {
    match action {
        Action::Stage => Step::Stage,
        Action::Publish => Step::Publish,
        Action::Bind => Step::Bind,
        Action::Unbind => Step::Unbind,
        Action::Unpublish => Step::Unpublish,
        Action::Unstage => Step::Unstage,
    }
}

/// Result of the tries of one making.
#[derive(Default)]
struct Tries {
    /// Whether one of the tries may have had its effect, or have it yet.
    unknown: bool,
    /// Whether a connection broke.
    broken: bool,
    /// Number of answers of the plugin that left the outcome open.
    answers: u32,
}

impl Tries {
    /// Records a failed try. A try whose outcome is unknown may be repeated as it is.
    fn note(&mut self, failure: &mut EffectFailure) {
        self.unknown |= failure.unknown;
        self.broken |= failure.broken;
        self.answers += u32::from(failure.unknown && failure.answered);
        // A plugin that was restarted may have lost the state that the mount needs.
        failure.broken = self.broken;
        if failure.unknown && self.answers < UNKNOWN_ANSWERS {
            failure.outcome = Outcome::Again;
        }
    }
}

pub(in crate::volume) fn abilities(ready: &Ready) -> Abilities {
    Abilities {
        stages: ready.stages(),
        single_node_multi_writer: ready.single_node_multi_writer(),
        mount_group: ready.mount_group(),
    }
}
