//! One operation on one volume, driven to its end: step, persist, run the effect, feed its outcome back.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::error::{Error, Kind, Result};
use crate::fault;
use crate::host::Look;
use crate::plugin::Ready;
use crate::secret::Secrets;
use crate::store::Durability;
use crate::store::rows::{AttachmentMode, Leg, MountKey, MountRow, NewEvent, Phase};
use crate::volume::control::{Backoff, Control, abandoned};
use crate::volume::effects::{Failure, Surroundings, clear_the_way};
use crate::volume::journalled::Journalled;
use crate::volume::looking::{healthy, there};
use crate::volume::operations::Step;
use crate::volume::state::{Abilities, Action, Effect, Event, Next, Outcome, Paths, Sight, Wanted};
use crate::volume::unanswered::Tried;
use crate::volume::{Authority, Mounted, Shared, admission, paths, say};

/// How long the kernel is asked who holds a mount, and a plugin what it can do.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    Mount,
    Unmount,
    Settle,
}

pub(super) struct Drive<'a> {
    pub(super) shared: &'a Shared,
    pub(super) rows: &'a mut Journalled,
    pub(super) control: watch::Receiver<Control>,
    pub(super) step: Step,
    pub(super) secrets: Option<Secrets>,
    pub(super) force: bool,
    /// What has lost its server is made again.
    pub(super) heals: bool,
    /// An expansion waits until nobody has the volume, and goes before whoever does not have it yet.
    pub(super) expands_first: bool,
    /// Of the controller's call that is or was last under way.
    pub(super) tried: Tried,
}

impl Drive<'_> {
    /// Mount, by a caller or for a row that rests: until it is mounted, refused, undone or given up.
    pub(super) async fn mount(&mut self, wanted: &Wanted) -> Result<Mounted> {
        let key = &wanted.key;
        let mut delay = Backoff::new();
        loop {
            if let Some(row) = self.row(key)
                && row.uid == wanted.uid
                && matches!(row.phase, Phase::Mounting | Phase::Unmounting | Phase::Uncertain)
            {
                // These secrets are not those that it was made with.
                let secrets = self.secrets.take();
                self.settle(key).await.map_err(say::unsettled)?;
                self.secrets = secrets;
            }
            admission::admit(self.rows.volume(), wanted, None)
                .map_err(|refusal| say::refusal(refusal, wanted))?;
            let seen = match self.row(key).filter(|row| row.shows()).cloned() {
                Some(row) => {
                    self.step.set("verify");
                    let look = self.shared.look_surely(&row).await;
                    let is_healed = self.heals && look.has_lost_its_server();
                    if there(&row, &look) && !healthy(&row, &look) && !is_healed {
                        return Err(say::dead(&row));
                    }
                    let mut sights = match self.shared.sight_of(&row, &look).await {
                        Sight::There if row.phase == Phase::Mounted => return self.answer(key),
                        _ => self.shared.sights(&self.rows.volume().mounts).await,
                    };
                    if !self.heals {
                        sights
                            .iter_mut()
                            .filter(|sight| **sight == Sight::Dead)
                            .for_each(|sight| *sight = Sight::There);
                    }
                    if !there(&row, &look) || is_healed {
                        self.find_secrets(wanted).await?;
                    }
                    self.ready().await?;
                    self.rows.remark(key, |row| row.spec.remember_secrets(&wanted.spec));
                    self.event(Event::Seen { key: key.clone(), sights })?
                }
                None => Next::Rest,
            };
            let next = match seen {
                Next::Rest => self.begin(wanted).await?,
                next => next,
            };
            match self.until_done(next, key, Purpose::Mount).await {
                Ok(()) => return self.answer(key),
                Err(failure) if failure.broken && self.pause(&mut delay, true).await => {}
                Err(failure) => return Err(failure.error),
            }
        }
    }

    /// The first effect of a mount that is new or rests.
    async fn begin(&mut self, wanted: &Wanted) -> Result<Next> {
        let key = &wanted.key;
        self.refuse_unknown_plugin(key)?;
        if self.row(key).is_none_or(|row| row.publish != Leg::Present) {
            self.find_secrets(wanted).await?;
        }
        let ready = self.ready().await?;
        self.refuse_missing_target(wanted).await?;
        let mut paths = self.paths(&ready, wanted);
        let row = self.row(key);
        let is_new = row.is_none_or(|row| row.publish == Leg::Absent);
        // A row stays where it is; what an older csid published beside others is made anew in its own directory.
        let moves = |row: &&MountRow| {
            is_new && row.target == Leg::Absent && Path::new(&paths.source).starts_with(&row.source)
        };
        if let Some(row) = row.filter(|row| !moves(row)) {
            paths.source.clone_from(&row.source);
        }
        // A mount that a new journal recorded is nobody's, and at the path of whose it was, above it or in it.
        let source = Path::new(&paths.source);
        let is_at = |other: &Path| source.starts_with(other) || other.starts_with(source);
        let holder = |row: &&Arc<MountRow>| row.key != *key && is_at(Path::new(&row.source));
        if let Some(holder) = self.rows.volume().mounts.iter().find(holder) {
            let holders = vec![holder.key.consumer.clone()];
            return Err(say::refusal(admission::Refusal::Conflict { what: "the path", holders }, wanted));
        }
        if is_new {
            self.step.set("verify");
            let base = self.shared.base(ready.host_root());
            clear_the_way(&self.shared.host, ready.id(), base, source).await?;
        }
        let event = Event::Mount { wanted: wanted.clone(), paths, abilities: abilities(&ready) };
        let node_id = self.staged_under(&ready, wanted);
        let next = self.rows.step(event).map_err(|refusal| say::refusal(refusal, wanted))?;
        self.rows.remark(key, |row| row.spec.node_id = node_id);
        Ok(next)
    }

    fn answer(&self, key: &MountKey) -> Result<Mounted> {
        let row = self.row(key).ok_or_else(|| Error::internal("the row of a finished mount is gone"))?;
        if row.phase != Phase::Mounted {
            return Err(Error::internal(format!("a finished mount is {:?}", row.phase)));
        }
        let is_device = row.spec.usage.attachment_mode == AttachmentMode::BlockDevice;
        Ok(Mounted { source: row.source.clone(), is_device })
    }

    /// Unmount; `force` detaches lazily what is dead, and only that.
    pub(super) async fn unmount(
        &mut self,
        key: &MountKey,
        authority: Authority,
        force: bool,
        names: Vec<String>,
    ) -> Result<()> {
        let Some(row) = self.row(key) else { return self.shared.synced().await };
        if matches!(authority, Authority::Own(uid) if uid != row.uid) {
            return Err(say::not_owner(key));
        }
        let row = row.clone();
        if force {
            let look = self.shared.host.look(&row.volume.plugin, Path::new(&row.source)).await;
            self.force = !matches!(look, Look::Mounted { .. } | Look::Device { .. });
        }
        if row.phase == Phase::Mounted && !self.force {
            self.shared.refuse_while_shown(self.rows.volume(), &row)?;
            self.refuse_while_in_use(row, "unmount").await?;
        }
        self.rows.remark(key, |row| row.operations = names);
        let next = self.event(Event::Unmount { key: key.clone() })?;
        self.until_done(next, key, Purpose::Unmount).await.map_err(|failure| failure.error)
    }

    /// Finish what an earlier operation or another csid left under way; also the background's next try.
    pub(super) async fn settle(&mut self, key: &MountKey) -> Result<()> {
        let next = self.event(Event::Undo { key: key.clone() })?;
        self.until_done(next, key, Purpose::Settle).await.map_err(|failure| failure.error)
    }

    /// Before anything is staged for it.
    async fn refuse_missing_target(&self, wanted: &Wanted) -> Result<()> {
        let Some(target) = &wanted.spec.target else { return Ok(()) };
        match self.shared.host.look(&self.rows.volume().row.key.plugin, Path::new(target)).await {
            Look::Missing => {
                let what = match wanted.spec.usage.attachment_mode {
                    AttachmentMode::FileSystem => "directory",
                    AttachmentMode::BlockDevice => "empty file",
                };
                Err(Error::invalid(format!(
                    "target {target} is not there; create it ({what}), then mount again"
                )))
            }
            _ => Ok(()),
        }
    }

    /// The call's secrets, or its credential's, or those of the credential that the row names.
    async fn find_secrets(&mut self, wanted: &Wanted) -> Result<()> {
        if self.secrets.is_some() {
            return Ok(());
        }
        let row = self.row(&wanted.key);
        let credential = wanted.spec.credential.as_ref().or(row.and_then(|row| row.spec.credential.as_ref()));
        match credential {
            Some(name) => self.secrets = Some(self.shared.credential(name).await?),
            None if row.is_some_and(|row| row.spec.needs_secrets()) => {
                return Err(say::secret_required(&wanted.key));
            }
            None => {}
        }
        Ok(())
    }

    /// A name that no plugin has is more likely a slip than a plugin to come; a row that is there may wait for one.
    fn refuse_unknown_plugin(&self, key: &MountKey) -> Result<()> {
        let plugin = &self.rows.volume().row.key.plugin;
        if self.row(key).is_some() || self.shared.plugins.view(plugin).is_some() {
            return Ok(());
        }
        Err(say::unknown_plugin(plugin))
    }

    /// Say in the row why it still waits, for ListMounts.
    pub(super) async fn still_waiting(&mut self, key: &MountKey, error: &Error) {
        if self.control.borrow().hurry {
            return;
        }
        self.rows.remark(key, |row| row.error.clone_from(&error.message));
        if let Err(failure) = self.persist(Durability::Process, None).await {
            tracing::warn!(error = %failure.error, "the journal could not be written");
        }
    }

    /// Busy, before anything is touched, while processes use the mount.
    pub(super) async fn refuse_while_in_use(&mut self, row: MountRow, call: &str) -> Result<()> {
        self.step.set("verify");
        let paths = [Some(row.source.as_str()), row.spec.target.as_deref()];
        for path in paths.into_iter().flatten().map(Path::new) {
            if self.shared.host.in_use(&row.volume.plugin, path).await? {
                let holders = tokio::time::timeout(PATIENCE, self.shared.host.holders(path)).await;
                return Err(say::busy(path, &row.key.consumer, holders.unwrap_or_default(), call));
            }
        }
        Ok(())
    }

    async fn until_done(&mut self, mut next: Next, key: &MountKey, purpose: Purpose) -> Result<(), Failure> {
        // An answered mount is not taken from its user because it cannot be bettered.
        let is_there = self.row(key).is_some_and(|row| row.kept && row.publish == Leg::Present);
        let mut why: Option<Failure> = None;
        let mut delay = Backoff::new();
        loop {
            match next {
                Next::Run(effect) => {
                    fault::around("intent", self.rows.intend(&self.shared.store, &effect)).await?;
                    next = match self.perform(&effect).await {
                        Ok(device) => {
                            delay = Backoff::new();
                            self.event(Event::Ended {
                                effect,
                                outcome: Outcome::Done { device },
                                error: String::new(),
                            })?
                        }
                        Err(failure) => {
                            if failure.unimplemented {
                                self.ask_what_it_can().await;
                            }
                            let (effect_action, makes) = (effect.action, effect.action.makes());
                            let (outcome, error) = (failure.outcome, failure.error.message.clone());
                            self.event(Event::Ended { effect, outcome, error })?;
                            let lasting = failure.definite || (makes && outcome == Outcome::Failed);
                            if !lasting && self.pause(&mut delay, makes).await {
                                self.event(Event::Continue { key: key.clone() })?
                            } else if makes && is_there && effect_action == Action::Bind {
                                self.event(Event::Keep { key: key.clone() })?;
                                self.persist(Durability::Disk, None).await?;
                                return Err(self.reason(failure));
                            } else if makes {
                                delay = Backoff::new();
                                why = Some(self.reason(failure));
                                self.event(Event::Undo { key: key.clone() })?
                            } else {
                                return Err(self.give_up(key, why, failure, purpose, is_there).await);
                            }
                        }
                    };
                }
                // It was mounted before, and is.
                Next::Mounted if self.rows.is_written() => return Ok(()),
                Next::Mounted => {
                    self.step.decide();
                    let is_healed = self.rows.written(key).is_some_and(|row| row.spec.healing);
                    let kind = if is_healed { "mount-healed" } else { "mount" };
                    let event = say::event(kind, self.row(key), None);
                    return self.persist(Durability::Disk, event).await;
                }
                Next::Gone | Next::Rest => return self.ended(key, why, purpose).await,
            }
        }
    }

    /// The row is gone or at rest: its directories, its event, the commit, and why it is not mounted.
    async fn ended(&mut self, key: &MountKey, why: Option<Failure>, purpose: Purpose) -> Result<(), Failure> {
        self.clean_up(key);
        if let Some(failure) = &why {
            say::log(key, self.rows.volume(), &failure.error);
        }
        let row = self.rows.written(key).or_else(|| self.row(key));
        let is_gone = self.row(key).is_none();
        let event = match purpose {
            Purpose::Mount => say::event("mount", row, why.as_ref().map(|failure| &failure.error)),
            Purpose::Unmount | Purpose::Settle if is_gone => say::event("unmount", row, None),
            Purpose::Unmount | Purpose::Settle => None,
        };
        // That an undone mount is forgotten need not outlive a power cut, nor did its intent.
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

    /// A removal that does not end in its time stays in the rows, for the background and for the next caller.
    async fn give_up(
        &mut self,
        key: &MountKey,
        why: Option<Failure>,
        failure: Failure,
        purpose: Purpose,
        is_there: bool,
    ) -> Failure {
        say::log(key, self.rows.volume(), &failure.error);
        let keep = match purpose {
            Purpose::Unmount => failure.in_use,
            Purpose::Mount | Purpose::Settle => is_there,
        };
        let event = if keep { Event::Keep { key: key.clone() } } else { Event::GaveUp { key: key.clone() } };
        let orphan = self
            .rows
            .written(key)
            .filter(|_| failure.orphan)
            .and_then(|row| say::event("orphan", Some(row), Some(&failure.error)));
        let persisted = match self.event(event) {
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
                Failure::new(Outcome::Failed, error)
            }
            (Ok(()), None) if failure.outcome == Outcome::Failed && !failure.definite => {
                Failure { error: Error { kind: Kind::Uncertain, ..failure.error }, ..failure }
            }
            (Ok(()), None) => failure,
        }
    }

    fn event(&mut self, event: Event) -> Result<Next> {
        self.rows
            .step(event)
            .map_err(|refusal| Error::internal(format!("an inner event was refused: {refusal:?}")))
    }

    async fn persist(&mut self, durability: Durability, event: Option<NewEvent>) -> Result<(), Failure> {
        let name = if durability == Durability::Disk { "outcome" } else { "intent" };
        let persisted = self.rows.persist(&self.shared.store, durability, event);
        fault::around(name, persisted).await.map_err(Failure::from)
    }

    async fn perform(&mut self, effect: &Effect) -> Result<Option<u64>, Failure> {
        let makes = effect.action.makes();
        if let Some(kind) = self.control.borrow().abandon.filter(|_| makes) {
            return Err(Failure::new(Outcome::NotSent, say::stopped(kind)));
        }
        let ready = self.ready().await.map_err(|error| Failure::new(Outcome::NotSent, error))?;
        self.note_node_id(effect, &ready).await?;
        let Some(mount) = self.row(&effect.key) else {
            return Err(Error::internal("an effect for a row that is gone").into());
        };
        self.step.set(effect.action.name());
        let config = self.shared.config.borrow().clone();
        let surroundings = Surroundings {
            host: &self.shared.host,
            served: &self.shared.served,
            ready: &ready,
            volume: self.rows.volume(),
            mount,
            secrets: self.secrets.as_ref(),
            // A caller's deadline ends his waiting; the RPC has the plugin's.
            deadline: Instant::now() + config.deadlines.operation,
            base: self.shared.base(ready.host_root()),
            target_root: self.shared.target_root(mount),
            from: effect.from,
            force: self.force,
        };
        let mut control = self.control.clone();
        let unwanted = |kind| Failure::new(Outcome::Failed, say::stopped(kind));
        let ended = tokio::select! {
            biased;
            ended = fault::around(effect.action.name(), surroundings.perform(effect.action)) => ended,
            // Only what is being made is dropped, and with it the RPC; a removal goes on to its end.
            kind = abandoned(&mut control), if makes => Err(unwanted(kind)),
        };
        // It ended just when nobody wanted it any more.
        match self.control.borrow().abandon.filter(|_| makes && ended.is_ok()) {
            Some(kind) => Err(unwanted(kind)),
            None => ended,
        }
    }

    /// What the plugin says it does not have is asked again only after its capabilities (CSI rule 36).
    async fn ask_what_it_can(&self) {
        let plugin = &self.rows.volume().row.key.plugin;
        if let Err(error) = self.shared.plugins.probe(plugin, Some(Instant::now() + PATIENCE)).await {
            tracing::warn!(plugin, %error, "the plugin does not say what it can do");
        }
    }

    /// What ended a making: its failure, or that nobody wanted it.
    fn reason(&self, failure: Failure) -> Failure {
        match self.control.borrow().abandon {
            Some(kind) => Failure::new(failure.outcome, say::stopped(kind)),
            None => failure,
        }
    }

    pub(super) fn row(&self, key: &MountKey) -> Option<&MountRow> {
        self.rows.volume().mount(key)
    }

    fn paths(&self, ready: &Ready, Wanted { key, spec, .. }: &Wanted) -> Paths {
        let volume = &self.rows.volume().row.key;
        let text = |path: PathBuf| ready.host_root().join(path).to_string_lossy().into_owned();
        let source = text(paths::publish(volume, key, spec.usage.access_mode));
        Paths { staging: text(paths::staging(volume)), source }
    }

    /// Remove the directories that a row leaves, empty ones only, before the row that explains them goes.
    fn clean_up(&self, key: &MountKey) {
        let volume = self.rows.volume();
        let idle =
            volume.row.stage == Leg::Absent && volume.mounts.iter().all(|mount| mount.publish == Leg::Absent);
        let source = self.rows.written(key).map(|row| row.source.as_str());
        let staging = Some(volume.row.staging.as_str()).filter(|path| idle && !path.is_empty());
        for path in source.into_iter().chain(staging).map(Path::new) {
            // …/ROOT/staging/HASH and …/ROOT/publish/HASH/HASH, or more: `staging` and `publish` stay, the next mount needs them again.
            let below = path.ancestors().find(|a| a.ends_with(paths::STAGING) || a.ends_with(paths::PUBLISH));
            let Some(below) = below else { continue };
            if let Err(error) = self.shared.host.remove(below, path) {
                tracing::warn!(path = %path.display(), %error, "cannot remove a directory that is no longer used");
            }
        }
    }
}

fn abilities(ready: &Ready) -> Abilities {
    Abilities {
        stages: ready.stages(),
        single_node_multi_writer: ready.single_node_multi_writer(),
        mount_group: ready.mount_group(),
    }
}
